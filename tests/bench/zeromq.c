/* zeromq.c - the same work over ZeroMQ, on which ps-lite is built: DEALER workers, a ROUTER server that
 * adds each message to its model and answers with 8 bytes. Sends borrow the sender's array, so there is no
 * copy that ZeroMQ does not need.
 *
 * The library is loaded at run time, so the benchmark builds without it and then leaves it out. */
#include "bench.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* From zmq.h of libzmq 4, whose binary interface is stable. */
enum { ZMQ_DEALER = 5, ZMQ_ROUTER = 6, ZMQ_SNDMORE = 2 };
enum { ZMQ_LINGER = 17, ZMQ_SNDHWM = 23, ZMQ_RCVHWM = 24, ZMQ_LAST_ENDPOINT = 32 };
typedef union zmq_message {
  unsigned char bytes[64];
  void *align;
} zmq_message;

static struct {
  void *(*ctx_new)(void);
  void *(*socket)(void *, int);
  int (*bind)(void *, const char *);
  int (*connect)(void *, const char *);
  int (*setsockopt)(void *, int, const void *, size_t);
  int (*getsockopt)(void *, int, void *, size_t *);
  int (*msg_init)(zmq_message *);
  int (*msg_init_data)(zmq_message *, void *, size_t, void (*)(void *, void *), void *);
  void *(*msg_data)(zmq_message *);
  size_t (*msg_size)(const zmq_message *);
  int (*msg_send)(zmq_message *, void *, int);
  int (*msg_recv)(zmq_message *, void *, int);
  int (*msg_close)(zmq_message *);
  int (*send)(void *, const void *, size_t, int);
  int (*recv)(void *, void *, size_t, int);
} zmq;

/* ISO C has no conversion from an object pointer to a function pointer; dlsym means one. */
static int symbol(void *library, const char *name, void *function_p) {
  void *address = dlsym(library, name);
  memcpy(function_p, &address, sizeof address);
  return address ? 0 : -1;
}

static int zmq_prepare(bench_team *team) {
  static void *library;
  static int warned;
  if (!library) library = dlopen("libzmq.so.5", RTLD_NOW);
  if (!library) {
    if (!warned++) fprintf(stderr, "bench: libzmq.so.5 is not there; ZeroMQ is left out\n");
    return -1;
  }
  /* Workers wait in shared memory until the server has written its address. */
  team->address[0] = 0;
  return symbol(library, "zmq_ctx_new", &zmq.ctx_new) ||
         symbol(library, "zmq_socket", &zmq.socket) || symbol(library, "zmq_bind", &zmq.bind) ||
         symbol(library, "zmq_connect", &zmq.connect) ||
         symbol(library, "zmq_setsockopt", &zmq.setsockopt) ||
         symbol(library, "zmq_getsockopt", &zmq.getsockopt) ||
         symbol(library, "zmq_msg_init", &zmq.msg_init) ||
         symbol(library, "zmq_msg_init_data", &zmq.msg_init_data) ||
         symbol(library, "zmq_msg_data", &zmq.msg_data) ||
         symbol(library, "zmq_msg_size", &zmq.msg_size) ||
         symbol(library, "zmq_msg_send", &zmq.msg_send) ||
         symbol(library, "zmq_msg_recv", &zmq.msg_recv) ||
         symbol(library, "zmq_msg_close", &zmq.msg_close) ||
         symbol(library, "zmq_send", &zmq.send) || symbol(library, "zmq_recv", &zmq.recv);
}

static void *socket_open(bench_team *team, int kind) {
  int no_limit = 0;
  void *context = zmq.ctx_new(), *socket = context ? zmq.socket(context, kind) : NULL;
  if (!socket) bench_fail(team, "socket", "cannot be made");
  zmq.setsockopt(socket, ZMQ_SNDHWM, &no_limit, sizeof no_limit);
  zmq.setsockopt(socket, ZMQ_RCVHWM, &no_limit, sizeof no_limit);
  zmq.setsockopt(socket, ZMQ_LINGER, &no_limit, sizeof no_limit);
  return socket;
}

static void keep(void *data, void *hint) {
  (void)data;
  (void)hint;
}

/* Sends the caller's array without copying it. */
static void send_array(bench_team *team, void *socket, void *array) {
  zmq_message message;
  zmq.msg_init_data(&message, array, team->job.bytes, keep, NULL);
  if (zmq.msg_send(&message, socket, 0) < 0) bench_fail(team, "send", "failed");
}

/* The server: pushes are added and acknowledged, requests of 8 bytes are answered with the model. */
static void zmq_server(bench_team *team) {
  void *socket = socket_open(team, ZMQ_ROUTER);
  float *model = bench_memory(team->job.bytes);
  char endpoint[sizeof team->address];
  size_t length = sizeof endpoint;
  snprintf(endpoint, sizeof endpoint, "ipc://@mlfab-bench-%d", (int)getpid());
  if (zmq.bind(socket, team->job.transport == BENCH_TCP ? "tcp://127.0.0.1:*" : endpoint) ||
      zmq.getsockopt(socket, ZMQ_LAST_ENDPOINT, endpoint, &length)) {
    bench_fail(team, "bind", "failed");
  }
  memcpy(team->address, endpoint, sizeof endpoint);
  bench_ready(team);
  for (;;) {
    char identity[256];
    zmq_message message;
    int n = zmq.recv(socket, identity, sizeof identity, 0);
    zmq.msg_init(&message);
    if (n < 0 || zmq.msg_recv(&message, socket, 0) < 0) bench_fail(team, "receive", "failed");
    zmq.send(socket, identity, (size_t)n, ZMQ_SNDMORE);
    if (team->job.what == BENCH_PULL) {
      send_array(team, socket, model);
    } else {
      bench_add(model, zmq.msg_data(&message), zmq.msg_size(&message) / sizeof(float));
      zmq.send(socket, "applied", 8, 0);
    }
    zmq.msg_close(&message);
  }
}

/* Takes one answer; copies a pulled model to the trainer's array. */
static void take_answer(bench_team *team, void *socket, void *array) {
  zmq_message message;
  zmq.msg_init(&message);
  if (zmq.msg_recv(&message, socket, 0) < 0) bench_fail(team, "receive", "failed");
  if (team->job.what == BENCH_PULL) memcpy(array, zmq.msg_data(&message), zmq.msg_size(&message));
  zmq.msg_close(&message);
}

static void zmq_worker(bench_team *team, uint32_t rank) {
  void *array = bench_memory(team->job.bytes);
  while (atomic_load(&team->ready) == 0) usleep(1000);
  while (team->address[0] == 0) usleep(1000);
  void *socket = socket_open(team, ZMQ_DEALER);
  if (zmq.connect(socket, team->address)) bench_fail(team, "connect", "failed");
  bench_ready(team);
  while (bench_next(team, rank)) {
    uint32_t sent = 0, answered = 0;
    while (answered < team->job.messages) {
      if (sent == team->job.messages || sent - answered == team->job.window) {
        take_answer(team, socket, array);
        answered++;
      } else if (team->job.what == BENCH_PULL) {
        zmq.send(socket, "request", 8, 0);
        sent++;
      } else {
        send_array(team, socket, array);
        sent++;
      }
    }
    bench_done(team, rank);
  }
}

const bench_player bench_zeromq = {"ZeroMQ", 0, zmq_prepare, zmq_server, zmq_worker};
