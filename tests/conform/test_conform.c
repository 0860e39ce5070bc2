/* test_conform.c - the built-in transports, each against the suite of conform.h.
 *
 * CONFORM_ONLY=name in the environment runs one of them. */
#include "conform.h"
#include "mlfab_sim.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>

/* 0 where a transport is not linked. */
#ifndef CONFORM_TCP
#define CONFORM_TCP 1
#endif
#ifndef CONFORM_SHM
#define CONFORM_SHM 1
#endif
#ifndef CONFORM_SIM
#define CONFORM_SIM 1
#endif
#ifndef CONFORM_MPI
#define CONFORM_MPI 0 /* needs mpirun */
#endif

/* --- tcp -------------------------------------------------------------------------------------- */

#if CONFORM_TCP

static void tcp6_listen(conform_world *world, int i, char *address) {
  (void)world, (void)i;
  snprintf(address, 256, "tcp:[::1]:0");
}

static void unix_listen(conform_world *world, int i, char *address) {
  (void)world;
  snprintf(address, 256, "unix:/tmp/mlfab-conform-%ld-%d.sock", (long)getpid(), i);
}

static void abstract_listen(conform_world *world, int i, char *address) {
  (void)world;
  snprintf(address, 256, "unix:@mlfab-conform-%ld-%d", (long)getpid(), i);
}

static int socket_stranger(const char *address) {
  struct sockaddr_in v4 = {.sin_family = AF_INET};
  struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
  struct sockaddr_un local = {.sun_family = AF_UNIX};
  const struct sockaddr *to = (const struct sockaddr *)(const void *)&local;
  socklen_t bytes = sizeof local;
  const char *port = strrchr(address, ':') + 1;
  if (!strncmp(address, "unix:", 5)) {
    size_t n = strlen(address + 5);
    assert_true(n < sizeof local.sun_path);
    memcpy(local.sun_path, address + 5, n + 1);
    bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
    if (local.sun_path[0] == '@') local.sun_path[0] = 0;
  } else if (!strncmp(address, "tcp:[::1]:", 10)) {
    v6.sin6_port = htons((uint16_t)strtoul(port, NULL, 10));
    to = (const struct sockaddr *)(const void *)&v6;
    bytes = sizeof v6;
  } else {
    v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    v4.sin_port = htons((uint16_t)strtoul(port, NULL, 10));
    to = (const struct sockaddr *)(const void *)&v4;
    bytes = sizeof v4;
  }
  int fd = socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd >= 0 && connect(fd, to, bytes)) {
    close(fd);
    return -1;
  }
  return fd;
}

static int have_ipv6(void) {
  struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
  int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int bound = fd >= 0 && !bind(fd, (const struct sockaddr *)(const void *)&v6, sizeof v6);
  if (fd >= 0) close(fd);
  return bound;
}

#endif

/* --- shm -------------------------------------------------------------------------------------- */

#if CONFORM_SHM
static void shm_listen(conform_world *world, int i, char *address) {
  (void)world;
  snprintf(address, 256, "shm:conform-%ld-%d", (long)getpid(), i);
}
#endif

/* --- sim -------------------------------------------------------------------------------------- */

#if CONFORM_SIM
static void sim_begin(conform_world *world) {
  mlfab_sim_options options = {.size = sizeof options, .hosts = CONFORM_ENDS, .seed = 7};
  mlfab_sim *sim = NULL;
  assert_int_equal(mlfab_sim_create(&options, &sim), 0);
  world->user = sim;
}

static void sim_finish(conform_world *world) {
  mlfab_sim *sim = world->user;
  mlfab_sim_destroy(&sim);
}

static void *sim_host(conform_world *world, int i) {
  return mlfab_sim_host(world->user, (uint32_t)i);
}

static void sim_step(conform_world *world) { mlfab_sim_run(world->user, 100000); }
#endif

/* --- mpi, from the caller's buffers ------------------------------------------------------------- */

#if CONFORM_MPI

/* Lends a copy of each bulk that is borrowed. A copy is overwritten and freed at its SENT, or else, because the suite
 * takes its own buffers back at once, at close, which has waited for MPI. */
typedef struct lent_copy {
  struct lent_copy *next;
  uint64_t token;
  uint32_t link, bytes;
  uint8_t *data;
} lent_copy;

typedef struct lent_end {
  void *self;
  lent_copy *first, **last;
} lent_end;

static void lent_free(lent_end *e, lent_copy **at) {
  lent_copy *copy = *at;
  *at = copy->next;
  if (e->last == &copy->next) e->last = at;
  memset(copy->data, 0xdb, copy->bytes);
  free(copy->data);
  free(copy);
}

static int lent_open(const mlfab_transport_options *options, void **self_p, char *address) {
  mlfab_transport_options own = *options;
  lent_end *e = calloc(1, sizeof *e);
  if (!e) return MLFAB_ERR_MEMORY;
  own.lend = 1;
  e->last = &e->first;
  int code = mlfab_transport_mpi()->open(&own, &e->self, address);
  if (code)
    free(e);
  else
    *self_p = e;
  return code;
}

static void lent_close(void *self) {
  lent_end *e = self;
  mlfab_transport_mpi()->close(e->self);
  while (e->first) lent_free(e, &e->first);
  free(e);
}

static int lent_reach(void *self, const char *address) {
  return mlfab_transport_mpi()->reach(((lent_end *)self)->self, address);
}

static int lent_connect(void *self, const char *address, uint64_t token) {
  return mlfab_transport_mpi()->connect(((lent_end *)self)->self, address, token);
}

static void lent_disconnect(void *self, uint32_t link) {
  mlfab_transport_mpi()->disconnect(((lent_end *)self)->self, link);
}

static int lent_send(void *self, uint32_t link, const void *head, uint32_t head_bytes,
                     const void *bulk, uint32_t bulk_bytes, uint64_t token) {
  lent_end *e = self;
  const mlfab_transport *mpi = mlfab_transport_mpi();
  if (!token || !bulk_bytes)
    return mpi->send(e->self, link, head, head_bytes, bulk, bulk_bytes, token);
  lent_copy *copy = calloc(1, sizeof *copy);
  uint8_t *data = malloc(bulk_bytes);
  assert_true(copy && data);
  memcpy(data, bulk, bulk_bytes);
  *copy = (lent_copy){NULL, token, link, bulk_bytes, data};
  int code = mpi->lend(e->self, link, head, head_bytes, data, bulk_bytes, token);
  if (code) {
    free(data);
    free(copy);
    return code;
  }
  *e->last = copy;
  e->last = &copy->next;
  return 0;
}

static void lent_flush(void *self) { mlfab_transport_mpi()->flush(((lent_end *)self)->self); }

static int lent_poll(void *self, mlfab_io_event *event) {
  lent_end *e = self;
  int found = mlfab_transport_mpi()->poll(e->self, event);
  if (!found || event->kind != MLFAB_IO_SENT) return found;
  lent_copy **at = &e->first;
  while (*at && ((*at)->link != event->link || (*at)->token != event->token)) at = &(*at)->next;
  assert_non_null(*at);
  lent_free(e, at);
  return found;
}

static void lent_release(void *self, const mlfab_io_event *event) {
  mlfab_transport_mpi()->release(((lent_end *)self)->self, event);
}

static int lent_detach(void *self, uint32_t link, uint64_t token) {
  return mlfab_transport_mpi()->detach(((lent_end *)self)->self, link, token);
}

static void lent_wait(void *self, uint64_t timeout_ns) {
  mlfab_transport_mpi()->wait(((lent_end *)self)->self, timeout_ns);
}

static void lent_wake(void *self) { mlfab_transport_mpi()->wake(((lent_end *)self)->self); }

static int lent_fd(void *self) { return mlfab_transport_mpi()->fd(((lent_end *)self)->self); }

static int lent_arm(void *self, int on) {
  return mlfab_transport_mpi()->arm(((lent_end *)self)->self, on);
}

static const mlfab_transport *lent_table(void) {
  static const mlfab_transport table = {.size = sizeof table,
                                        .abi = MLFAB_TRANSPORT_ABI,
                                        .name = "mpi",
                                        .caps = MLFAB_CAP_RELIABLE | MLFAB_CAP_CHECKED,
                                        .open = lent_open,
                                        .close = lent_close,
                                        .reach = lent_reach,
                                        .connect = lent_connect,
                                        .disconnect = lent_disconnect,
                                        .send = lent_send,
                                        .flush = lent_flush,
                                        .poll = lent_poll,
                                        .release = lent_release,
                                        .detach = lent_detach,
                                        .wait = lent_wait,
                                        .wake = lent_wake,
                                        .fd = lent_fd,
                                        .arm = lent_arm};
  return &table;
}
#endif

int main(void) {
  conform_transport list[16];
  size_t n = 0;
  memset(list, 0, sizeof list);
#if CONFORM_TCP
  const mlfab_transport *tcp = mlfab_transport_tcp();
  list[n++] = (conform_transport){.name = "tcp",
                                  .table = tcp,
                                  .missing = "not compiled in",
                                  .flags = CONFORM_SOCKETS | CONFORM_WAITS,
                                  .stranger = socket_stranger};
  list[n] = list[0];
  list[n].name = "tcp6";
  list[n].missing = "no IPv6 here";
  list[n].table = have_ipv6() ? tcp : NULL;
  list[n].flags |= CONFORM_SAME;
  list[n++].listen = tcp6_listen;
  list[n] = list[1];
  list[n].table = tcp;
  list[n].name = "unix";
  list[n++].listen = unix_listen;
#if defined(__linux__)
  list[n] = list[2];
  list[n].name = "unix-abstract";
  list[n++].listen = abstract_listen;
#endif
#endif
#if CONFORM_SHM
  list[n++] = (conform_transport){.name = "shm",
                                  .table = mlfab_transport_shm(),
                                  .missing = "not compiled in",
                                  .flags = CONFORM_WAITS,
                                  .listen = shm_listen};
  list[n] = list[n - 1];
  list[n].name = "shm, small rings";
  list[n].flags |= CONFORM_SAME;
  list[n++].neighbours = 129;
#endif
#if CONFORM_SIM
  list[n++] = (conform_transport){.name = "sim",
                                  .table = mlfab_transport_sim(),
                                  .missing = "not compiled in",
                                  .begin = sim_begin,
                                  .finish = sim_finish,
                                  .host = sim_host,
                                  .step = sim_step};
#endif
#if CONFORM_MPI
  list[n++] = (conform_transport){.name = "mpi",
                                  .table = mlfab_transport_mpi(),
                                  .missing = "not compiled in",
                                  .flags = CONFORM_WAITS | CONFORM_ALONE};
  list[n] = list[n - 1];
  list[n].name = "mpi-lend";
  list[n++].table = lent_table();
#endif
  const char *only = getenv("CONFORM_ONLY");
  for (size_t i = 0; only && i < n; i++)
    if (!strcmp(list[i].name, only)) return conform_run(&list[i], 1);
  return conform_run(list, n);
}
