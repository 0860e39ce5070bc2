/* apart.c - the conformance suite with ends in two processes: mpirun -n 2 apart
 *
 * MPI rank 0 runs the suite of conform.h. Its even ends are transports of its own process; the odd ones are transports
 * of rank 1, which carries out each call that rank 0 sends it over a Unix socket, and returns the result, events
 * included. So frames, closings and floods go between two processes. The suite knows nothing of it: here is one more
 * table of functions.
 *
 * Rank 1 keeps what is borrowed, and overwrites it when the transport has returned it, as the suite does. There are
 * three sockets, each with a thread in rank 1, because wait and wake may run beside the other functions. One answer to
 * POLL has several events, all of which the suite takes before it calls another function, except release. */
#include "../conform/conform.h"

#include <mpi.h>

#include <stdatomic.h>
#include <sys/un.h>

enum { CALLS, WAITS, WAKES, CHANNELS };
enum {
  LOANS = 4096,
  PUMP = 64,            /* events that the suite takes at most between two flushes */
  BATCH_BYTES = 1 << 18 /* rank 1 tells no further event in the same answer */
};

enum op {
  OPEN,
  CLOSE,
  REACH,
  CONNECT,
  DISCONNECT,
  SEND,
  FLUSH,
  POLL,
  RELEASE,
  DETACH,
  WAIT,
  WAKE,
  ARM
};

/* Rank 1 does not answer these: they return nothing. */
static int is_silent(uint64_t op) { return op == FLUSH || op == RELEASE; }

typedef struct order {
  uint64_t op, end, link, token, number, opaque;
  uint32_t head_bytes, bulk_bytes; /* that follow */
  char address[256];
} order;

typedef struct answer {
  int64_t code; /* POLL: the number of notices that follow */
  uint64_t end, allocations;
  int64_t bytes;
  char address[256];
} answer;

/* An event; the bytes of a frame follow. */
typedef struct notice {
  mlfab_io_event event; /* the pointers mean nothing */
  uint64_t opaque;
  uint32_t has_text;
  char text[400];
} notice;

typedef struct bundle {
  uint8_t *at;
  size_t count, room;
} bundle;

typedef struct channel {
  int fd;
  pthread_mutex_t lock;
} channel;

static channel channels[CHANNELS];
static atomic_int over; /* the suite has ended */

static void stop(const char *why) {
  fprintf(stderr, "apart: %s\n", why);
  MPI_Abort(MPI_COMM_WORLD, 2);
}

static void put(int fd, const void *data, size_t bytes) {
  const char *at = data;
  while (bytes > 0) {
    ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
    if (n <= 0) stop("the other process is gone");
    at += n;
    bytes -= (size_t)n;
  }
}

/* 1, or 0 at the end. */
static int get(int fd, void *data, size_t bytes) {
  char *at = data;
  while (bytes > 0) {
    ssize_t n = recv(fd, at, bytes, 0);
    if (n <= 0) return 0;
    at += n;
    bytes -= (size_t)n;
  }
  return 1;
}

static void *memory(size_t bytes) {
  void *at = calloc(1, bytes ? bytes : 1);
  if (!at) stop("out of memory");
  return at;
}

/* ---- rank 1: carries out ---- */

typedef struct loan {
  uint32_t link;
  uint64_t token;
  void *bulk;
  size_t bytes;
} loan;

typedef struct remote {
  void *self;
  mlfab_env env;
  mlfab_error error;
  _Atomic uint64_t allocations;
  _Atomic int64_t bytes;
  loan loans[LOANS];
  int count;
} remote;

static void *remote_allocate(void *user, size_t bytes) {
  remote *r = user;
  r->allocations++;
  r->bytes += (int64_t)bytes;
  return malloc(bytes);
}

static void remote_release(void *user, void *at, size_t bytes) {
  remote *r = user;
  r->bytes -= (int64_t)bytes;
  free(at);
}

/* Ends the loans of a link (0: of all), and of a token (0: with any). */
static void remote_return(remote *r, uint32_t link, uint64_t token) {
  int kept = 0;
  for (int i = 0; i < r->count; i++) {
    loan *l = &r->loans[i];
    if ((!link || l->link == link) && (!token || l->token == token))
      conform_scribble_free(l->bulk, l->bytes);
    else
      r->loans[kept++] = *l;
  }
  r->count = kept;
}

static void remote_open(answer *a) {
  remote *r = memory(sizeof *r);
  r->env = (mlfab_env){.size = sizeof r->env,
                       .log_level = MLFAB_LOG_WARN,
                       .user = r,
                       .allocate = remote_allocate,
                       .release = remote_release,
                       .clock = conform_now,
                       .log = conform_log};
  mlfab_transport_options options = {.size = sizeof options,
                                     .keyed = 1,
                                     .listen = "",
                                     .ifname = "",
                                     .job = "conform",
                                     .env = &r->env,
                                     .error = &r->error};
  a->code = mlfab_transport_mpi()->open(&options, &r->self, a->address);
  if (a->code) stop(r->error.text);
  a->end = (uint64_t)(uintptr_t)r;
}

static void remote_send(remote *r, const order *o, answer *a, const uint8_t *head, void *bulk) {
  a->code = mlfab_transport_mpi()->send(r->self, (uint32_t)o->link, head, o->head_bytes,
                                        o->bulk_bytes ? bulk : NULL, o->bulk_bytes, o->token);
  if (a->code || !o->token) {
    conform_scribble_free(bulk, o->bulk_bytes);
    return;
  }
  if (r->count == LOANS) stop("too many loans");
  r->loans[r->count++] = (loan){(uint32_t)o->link, o->token, bulk, o->bulk_bytes};
}

static void add(bundle *to, const void *data, size_t count) {
  while (to->count + count > to->room) {
    to->room = 2 * to->room + 4096;
    to->at = realloc(to->at, to->room);
    if (!to->at) stop("out of memory");
  }
  if (count) memcpy(to->at + to->count, data, count);
  to->count += count;
}

/* Adds the next event. A frame is released by a later order. */
static int remote_take(remote *r, bundle *to) {
  mlfab_io_event *event = memory(sizeof *event);
  notice n = {.opaque = (uint64_t)(uintptr_t)event};
  int found = mlfab_transport_mpi()->poll(r->self, event);
  if (found && event->kind == MLFAB_IO_SENT) remote_return(r, event->link, event->token);
  if (found && event->kind == MLFAB_IO_DOWN && event->link) remote_return(r, event->link, 0);
  n.event = *event;
  n.has_text = event->text != NULL;
  if (event->text) snprintf(n.text, sizeof n.text, "%s", event->text);
  if (found) add(to, &n, sizeof n);
  if (found && event->kind == MLFAB_IO_FRAME) {
    add(to, event->head, event->head_bytes);
    add(to, event->bulk, event->bulk_bytes);
    return 1;
  }
  if (found) mlfab_transport_mpi()->release(r->self, event);
  free(event);
  return found;
}

/* The answer, and up to `most` events behind it. */
static void remote_poll(remote *r, uint64_t most, bundle *to) {
  answer a = {.code = 0};
  add(to, &a, sizeof a);
  while ((uint64_t)a.code < most && to->count < BATCH_BYTES && remote_take(r, to)) a.code++;
  a.allocations = r->allocations;
  a.bytes = r->bytes;
  memcpy(to->at, &a, sizeof a);
}

static void remote_do(const order *o, answer *a, const uint8_t *head, void *bulk) {
  const mlfab_transport *table = mlfab_transport_mpi();
  remote *r = (remote *)(uintptr_t)o->end;
  mlfab_io_event *event = (mlfab_io_event *)(uintptr_t)o->opaque;
  switch (o->op) {
    case OPEN:
      remote_open(a);
      r = (remote *)(uintptr_t)a->end;
      break;
    case CLOSE:
      table->close(r->self);
      remote_return(r, 0, 0);
      break;
    case REACH:
      a->code = table->reach(r->self, o->address);
      break;
    case CONNECT:
      a->code = table->connect(r->self, o->address, o->token);
      break;
    case DISCONNECT:
      table->disconnect(r->self, (uint32_t)o->link);
      if (o->link) remote_return(r, (uint32_t)o->link, 0);
      break;
    case SEND:
      remote_send(r, o, a, head, bulk);
      break;
    case FLUSH:
      table->flush(r->self);
      break;
    case RELEASE:
      table->release(r->self, event);
      free(event);
      break;
    case DETACH:
      a->code = table->detach(r->self, (uint32_t)o->link, o->token);
      if (!a->code) remote_return(r, (uint32_t)o->link, o->token);
      break;
    case WAIT:
      table->wait(r->self, o->number);
      break;
    case WAKE:
      table->wake(r->self);
      break;
    default:
      a->code = table->arm(r->self, (int)o->number);
  }
  a->allocations = r->allocations;
  a->bytes = r->bytes;
  if (o->op == CLOSE) free(r);
}

static void *remote_serve(void *argument) {
  int fd = *(int *)argument;
  order o;
  bundle events = {NULL, 0, 0};
  while (get(fd, &o, sizeof o)) {
    answer *a = memory(sizeof *a);
    uint8_t *head = memory(o.head_bytes), *bulk = memory(o.bulk_bytes);
    if (!get(fd, head, o.head_bytes) || !get(fd, bulk, o.bulk_bytes)) stop("half an order");
    events.count = 0;
    if (o.op == POLL)
      remote_poll((remote *)(uintptr_t)o.end, o.number, &events);
    else
      remote_do(&o, a, head, bulk);
    if (o.op != SEND) free(bulk);
    free(head);
    if (o.op == POLL)
      put(fd, events.at, events.count);
    else if (!is_silent(o.op))
      put(fd, a, sizeof *a);
    free(a);
  }
  free(events.at);
  return NULL;
}

/* ---- rank 0: the table ---- */

typedef struct apart_end {
  void *self;  /* a transport of this process, or NULL */
  uint64_t id; /* rank 1's */
  conform_end *user;
  uint64_t taken; /* events since the last flush */
  uint64_t left;  /* notices of rank 1 that are still to be read */
  char text[400];
} apart_end;

/* A frame of rank 1. */
typedef struct apart_frame {
  uint64_t opaque;
  uint8_t *bytes;
} apart_frame;

static void ask(int which, const order *o, const void *head, const void *bulk, answer *a) {
  channel *c = &channels[which];
  pthread_mutex_lock(&c->lock);
  put(c->fd, o, sizeof *o);
  put(c->fd, head, o->head_bytes);
  put(c->fd, bulk, o->bulk_bytes);
  if (!get(c->fd, a, sizeof *a)) stop("rank 1 is gone");
  pthread_mutex_unlock(&c->lock);
}

/* An order that rank 1 carries out before the next one. */
static void leave(const apart_end *e, order o) {
  channel *c = &channels[CALLS];
  o.end = e->id;
  pthread_mutex_lock(&c->lock);
  put(c->fd, &o, sizeof o);
  pthread_mutex_unlock(&c->lock);
}

/* An order without bytes. The counters of rank 1's memory become those of the end. */
static int64_t tell(apart_end *e, order o, answer *a) {
  answer *own = a ? a : memory(sizeof *own);
  if (e->left) stop("the suite has not taken all events");
  o.end = e->id;
  ask(CALLS, &o, NULL, NULL, own);
  int64_t code = own->code;
  e->user->allocations = own->allocations;
  e->user->bytes = own->bytes;
  if (!a) free(own);
  return code;
}

static int apart_open(const mlfab_transport_options *options, void **self_p, char *address) {
  apart_end *e = memory(sizeof *e);
  mlfab_transport_options plain = *options;
  plain.listen = "";
  e->user = options->env->user;
  *self_p = e;
  if (options->listen[6] == '0') return mlfab_transport_mpi()->open(&plain, &e->self, address);
  answer *a = memory(sizeof *a);
  ask(CALLS, &(order){.op = OPEN}, NULL, NULL, a);
  e->id = a->end;
  memcpy(address, a->address, 256);
  free(a);
  return 0;
}

static void apart_close(void *self) {
  apart_end *e = self;
  if (e->self)
    mlfab_transport_mpi()->close(e->self);
  else
    tell(e, (order){.op = CLOSE}, NULL);
  free(e);
}

static order addressed(enum op op, const char *address, uint64_t token) {
  order o = {.op = op, .token = token};
  snprintf(o.address, sizeof o.address, "%s", address);
  return o;
}

static int apart_reach(void *self, const char *address) {
  apart_end *e = self;
  if (e->self) return mlfab_transport_mpi()->reach(e->self, address);
  return (int)tell(e, addressed(REACH, address, 0), NULL);
}

static int apart_connect(void *self, const char *address, uint64_t token) {
  apart_end *e = self;
  if (e->self) return mlfab_transport_mpi()->connect(e->self, address, token);
  return (int)tell(e, addressed(CONNECT, address, token), NULL);
}

static void apart_disconnect(void *self, uint32_t link) {
  apart_end *e = self;
  if (e->self)
    mlfab_transport_mpi()->disconnect(e->self, link);
  else
    tell(e, (order){.op = DISCONNECT, .link = link}, NULL);
}

static int apart_send(void *self, uint32_t link, const void *head, uint32_t head_bytes,
                      const void *bulk, uint32_t bulk_bytes, uint64_t token) {
  apart_end *e = self;
  if (e->self)
    return mlfab_transport_mpi()->send(e->self, link, head, head_bytes, bulk, bulk_bytes, token);
  if (e->left) stop("the suite has not taken all events");
  answer *a = memory(sizeof *a);
  order o = {.op = SEND, .end = e->id, .link = link, .token = token};
  o.head_bytes = head_bytes;
  o.bulk_bytes = bulk_bytes;
  ask(CALLS, &o, head, bulk, a);
  int code = (int)a->code;
  e->user->allocations = a->allocations;
  e->user->bytes = a->bytes;
  free(a);
  return code;
}

static void apart_flush(void *self) {
  apart_end *e = self;
  if (e->self)
    mlfab_transport_mpi()->flush(e->self);
  else
    leave(e, (order){.op = FLUSH});
  e->taken = 0;
}

/* Reads the frame behind the notice. */
static void apart_frame_of(mlfab_io_event *event, uint64_t opaque) {
  apart_frame *frame = memory(sizeof *frame);
  uint32_t gap = (event->head_bytes + 15) & ~15u;
  frame->opaque = opaque;
  frame->bytes = memory(gap + event->bulk_bytes);
  if (!get(channels[CALLS].fd, frame->bytes, event->head_bytes) ||
      !get(channels[CALLS].fd, frame->bytes + gap, event->bulk_bytes))
    stop("half a frame");
  event->head = frame->bytes;
  event->bulk = event->bulk_bytes ? frame->bytes + gap : NULL;
  event->opaque = frame;
}

static int apart_poll(void *self, mlfab_io_event *event) {
  apart_end *e = self;
  notice n;
  if (e->self) return mlfab_transport_mpi()->poll(e->self, event);
  *event = (mlfab_io_event){0};
  if (!e->left)
    e->left = (uint64_t)tell(
        e, (order){.op = POLL, .number = e->taken < PUMP ? PUMP - e->taken : 1}, NULL);
  if (!e->left) return 0;
  if (!get(channels[CALLS].fd, &n, sizeof n)) stop("half an answer");
  e->left--;
  e->taken++;
  *event = n.event;
  event->head = event->bulk = event->opaque = NULL;
  event->text = n.has_text ? memcpy(e->text, n.text, sizeof e->text) : NULL;
  if (event->kind == MLFAB_IO_FRAME) apart_frame_of(event, n.opaque);
  return 1;
}

static void apart_release(void *self, const mlfab_io_event *event) {
  apart_end *e = self;
  apart_frame *frame = event->opaque;
  if (e->self) {
    mlfab_transport_mpi()->release(e->self, event);
  } else if (frame) {
    leave(e, (order){.op = RELEASE, .opaque = frame->opaque});
    free(frame->bytes);
    free(frame);
  }
}

static int apart_detach(void *self, uint32_t link, uint64_t token) {
  apart_end *e = self;
  if (e->self) return mlfab_transport_mpi()->detach(e->self, link, token);
  return (int)tell(e, (order){.op = DETACH, .link = link, .token = token}, NULL);
}

/* Beside the other functions, so without the counters. */
static void beside(apart_end *e, int which, order o) {
  answer *a = memory(sizeof *a);
  o.end = e->id;
  ask(which, &o, NULL, NULL, a);
  free(a);
}

static void apart_wait(void *self, uint64_t timeout_ns) {
  apart_end *e = self;
  if (e->self)
    mlfab_transport_mpi()->wait(e->self, timeout_ns);
  else
    beside(e, WAITS, (order){.op = WAIT, .number = timeout_ns});
}

static void apart_wake(void *self) {
  apart_end *e = self;
  if (e->self)
    mlfab_transport_mpi()->wake(e->self);
  else
    beside(e, WAKES, (order){.op = WAKE});
}

static int apart_fd(void *self) {
  (void)self;
  return -1;
}

static int apart_arm(void *self, int on) {
  apart_end *e = self;
  if (e->self) return mlfab_transport_mpi()->arm(e->self, on);
  return (int)tell(e, (order){.op = ARM, .number = (uint64_t)on}, NULL);
}

static void apart_listen(conform_world *world, int i, char *address) {
  (void)world;
  snprintf(address, 256, "apart:%d", i % 2);
}

/* ---- both ---- */

static int unix_socket(long name, struct sockaddr_un *at, socklen_t *bytes_p) {
  memset(at, 0, sizeof *at);
  at->sun_family = AF_UNIX;
  int n = snprintf(at->sun_path + 1, sizeof at->sun_path - 1, "mlfab-apart-%ld", name);
  *bytes_p = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
  return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

static int direct(void) {
  static const mlfab_transport table = {.size = sizeof table,
                                        .abi = MLFAB_TRANSPORT_ABI,
                                        .name = "mpi",
                                        .caps = MLFAB_CAP_RELIABLE | MLFAB_CAP_CHECKED,
                                        .open = apart_open,
                                        .close = apart_close,
                                        .reach = apart_reach,
                                        .connect = apart_connect,
                                        .disconnect = apart_disconnect,
                                        .send = apart_send,
                                        .flush = apart_flush,
                                        .poll = apart_poll,
                                        .release = apart_release,
                                        .detach = apart_detach,
                                        .wait = apart_wait,
                                        .wake = apart_wake,
                                        .fd = apart_fd,
                                        .arm = apart_arm};
  const conform_transport apart = {
      .name = "mpi-apart", .table = &table, .flags = CONFORM_WAITS, .listen = apart_listen};
  struct sockaddr_un at;
  socklen_t bytes;
  long name = getpid();
  int fd = unix_socket(name, &at, &bytes);
  if (fd < 0 || bind(fd, (struct sockaddr *)&at, bytes) || listen(fd, CHANNELS)) stop("no socket");
  MPI_Bcast(&name, 1, MPI_LONG, 0, MPI_COMM_WORLD);
  for (int i = 0; i < CHANNELS; i++) { /* rank 1 connects them one after the other */
    channels[i].fd = accept(fd, NULL, NULL);
    if (channels[i].fd < 0 || pthread_mutex_init(&channels[i].lock, NULL)) stop("no connection");
    MPI_Barrier(MPI_COMM_WORLD);
  }
  close(fd);
  int failed = conform_run(&apart, 1);
  for (int i = 0; i < CHANNELS; i++) close(channels[i].fd);
  return failed;
}

static void obey(void) {
  struct sockaddr_un at;
  socklen_t bytes;
  pthread_t threads[CHANNELS];
  static int fds[CHANNELS];
  long name = 0;
  MPI_Bcast(&name, 1, MPI_LONG, 0, MPI_COMM_WORLD);
  for (int i = 0; i < CHANNELS; i++) {
    fds[i] = unix_socket(name, &at, &bytes);
    if (connect(fds[i], (struct sockaddr *)&at, bytes)) stop("cannot connect");
    MPI_Barrier(MPI_COMM_WORLD);
    if (pthread_create(&threads[i], NULL, remote_serve, &fds[i])) stop("no thread");
  }
  for (int i = 0; i < CHANNELS; i++) {
    pthread_join(threads[i], NULL);
    close(fds[i]);
  }
}

/* The first open of a process is collective. In rank 1 this one stays, and is polled all the time, because MPI moves
 * messages only while both processes call it. */
static void *first_open(void) {
  static mlfab_env env = {.size = sizeof env, .clock = conform_now, .log = conform_log};
  mlfab_error error = {.code = 0};
  mlfab_transport_options options = {
      .size = sizeof options, .listen = "", .env = &env, .error = &error};
  char address[256];
  void *self = NULL;
  if (mlfab_transport_mpi()->open(&options, &self, address)) stop(error.text);
  return self;
}

static void *keep_polling(void *self) {
  mlfab_io_event event;
  while (!atomic_load(&over)) {
    mlfab_transport_mpi()->poll(self, &event);
    usleep(1000);
  }
  mlfab_transport_mpi()->close(self);
  return NULL;
}

int main(int argc, char **argv) {
  int rank = 0, size = 0, level = 0, failed = 0;
  pthread_t keeper;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != 2 || level != MPI_THREAD_MULTIPLE) stop("needs two processes and threads");
  void *first = first_open();
  if (rank == 0) {
    mlfab_transport_mpi()->close(first);
    failed = direct();
  } else {
    if (pthread_create(&keeper, NULL, keep_polling, first)) stop("no thread");
    obey();
    atomic_store(&over, 1);
    pthread_join(keeper, NULL);
  }
  MPI_Finalize();
  return failed != 0;
}
