/* peers.c - the contestants that mlfab is compared with: hand-written loops over plain sockets, and a bare
 * loop over shared memory.
 *
 * copy loop  a worker writes an array to a socket, the server reads it into its own array, and answers
 *            with 8 bytes. Nothing is added: the limit of the socket itself.
 * add loop   the server receives in pieces of 256 KB and adds each to its model while it is in
 *            cache: a push written by hand.
 * futex loop 64 bytes in shared memory, a little spinning, then a futex: a round trip.
 *
 * Both socket loops keep as many messages in flight as mlfab does, and run over TCP on the loopback, or
 * over Unix sockets where mlfab runs over shared memory. */
#include "bench.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ACK = 8, PIECE = 256 * 1024 };

/* ---------------------------------------------------------------------------------------------
 * Sockets
 */
static int tcp_pair(int pair[2]) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  struct sockaddr *a = (struct sockaddr *)&address;
  int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  if (listener < 0 || bind(listener, a, length) || listen(listener, 1)) return -1;
  if (getsockname(listener, a, &length)) return -1;
  pair[0] = socket(AF_INET, SOCK_STREAM, 0);
  if (pair[0] < 0 || connect(pair[0], a, length)) return -1;
  pair[1] = accept(listener, NULL, NULL);
  close(listener);
  for (int i = 0; i < 2; i++) setsockopt(pair[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return pair[1] < 0 ? -1 : 0;
}

static int sockets_prepare(bench_team *team) {
  for (uint32_t i = 0; i < team->job.workers; i++) {
    int bad = team->job.transport == BENCH_TCP ? tcp_pair(team->fd[i])
                                               : socketpair(AF_UNIX, SOCK_STREAM, 0, team->fd[i]);
    if (bad) {
      perror("bench: socket loop");
      return -1;
    }
  }
  return 0;
}

static void write_all(bench_team *team, int fd, const void *data, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    ssize_t n = write(fd, (const char *)data + at, bytes - at);
    if (n <= 0) bench_fail(team, "socket", strerror(errno));
    at += (size_t)n;
  }
}

/* Reads some bytes: sleeps until they arrive, or polls during a trial when the job is to spin. */
static size_t read_some(bench_team *team, int fd, void *data, size_t bytes) {
  ssize_t n;
  if (!team->job.spin) {
    n = read(fd, data, bytes);
  } else {
    while ((n = recv(fd, data, bytes, MSG_DONTWAIT)) < 0 && errno == EAGAIN) {
      struct pollfd wanted = {.fd = fd, .events = POLLIN};
      if (!atomic_load_explicit(&team->active, memory_order_relaxed)) poll(&wanted, 1, -1);
    }
  }
  if (n <= 0) bench_fail(team, "socket", n ? strerror(errno) : "closed");
  return (size_t)n;
}

/* ---------------------------------------------------------------------------------------------
 * The worker of both loops
 */
static void push_trial(bench_team *team, int fd, const void *array) {
  uint32_t acks = 0;
  size_t part = 0;
  char answers[ACK * WINDOW_MAX];
  for (uint32_t sent = 0; acks < team->job.messages;) {
    if (sent < team->job.messages && sent - acks < team->job.window) {
      write_all(team, fd, array, team->job.bytes);
      sent++;
      continue;
    }
    part += read_some(team, fd, answers, (sent - acks) * ACK - part);
    acks += (uint32_t)(part / ACK);
    part %= ACK;
  }
}

static void pull_trial(bench_team *team, int fd, char *array) {
  static const char request[ACK * WINDOW_MAX];
  uint32_t asked = team->job.window < team->job.messages ? team->job.window : team->job.messages;
  write_all(team, fd, request, asked * ACK);
  for (uint32_t got = 0; got < team->job.messages; got++) {
    for (size_t at = 0; at < team->job.bytes;) {
      at += read_some(team, fd, array + at, team->job.bytes - at);
    }
    if (asked < team->job.messages) {
      write_all(team, fd, request, ACK);
      asked++;
    }
  }
}

static void socket_worker(bench_team *team, uint32_t rank) {
  char *array = bench_memory(team->job.bytes);
  int fd = team->fd[rank][0];
  bench_ready(team);
  while (bench_next(team, rank)) {
    if (team->job.what == BENCH_PULL) {
      pull_trial(team, fd, array);
    } else {
      push_trial(team, fd, array);
    }
    bench_done(team, rank);
  }
}

/* ---------------------------------------------------------------------------------------------
 * The servers
 */

/* Waits for the connections; returns a bit for each readable one. One connection needs no poll: its read
 * sleeps. */
static uint32_t readable(bench_team *team) {
  struct pollfd wanted[WORKERS_MAX];
  uint32_t bits = 0;
  if (team->job.workers == 1) return 1;
  for (uint32_t i = 0; i < team->job.workers; i++) {
    wanted[i] = (struct pollfd){.fd = team->fd[i][1], .events = POLLIN};
  }
  if (poll(wanted, team->job.workers, -1) < 0) return 0;
  for (uint32_t i = 0; i < team->job.workers; i++) {
    if (wanted[i].revents) bits |= 1u << i;
  }
  return bits;
}

/* Answers requests of 8 bytes with the model. */
static void serve_pulls(bench_team *team) {
  char *model = bench_memory(team->job.bytes), requests[ACK * WINDOW_MAX];
  size_t part[WORKERS_MAX] = {0};
  bench_ready(team);
  for (;;) {
    uint32_t bits = readable(team);
    for (uint32_t i = 0; i < team->job.workers; i++) {
      if (!(bits >> i & 1)) continue;
      part[i] += read_some(team, team->fd[i][1], requests, sizeof requests);
      for (; part[i] >= ACK; part[i] -= ACK) {
        write_all(team, team->fd[i][1], model, team->job.bytes);
      }
    }
  }
}

static void copy_server(bench_team *team) {
  static const char ack[ACK];
  char *array[WORKERS_MAX] = {NULL};
  size_t at[WORKERS_MAX] = {0};
  if (team->job.what == BENCH_PULL) serve_pulls(team);
  for (uint32_t i = 0; i < team->job.workers; i++) array[i] = bench_memory(team->job.bytes);
  bench_ready(team);
  for (;;) {
    uint32_t bits = readable(team);
    for (uint32_t i = 0; i < team->job.workers; i++) {
      if (!(bits >> i & 1) || !array[i]) continue;
      int fd = team->fd[i][1];
      at[i] += read_some(team, fd, array[i] + at[i], team->job.bytes - at[i]);
      if (at[i] < team->job.bytes) continue;
      at[i] = 0;
      write_all(team, fd, ack, ACK);
    }
  }
}

/* One connection of the add loop: progress within the message, and the bytes of an incomplete float. */
typedef struct adder {
  float *piece;
  size_t added, left;
} adder;

/* A piece may hold the end of a message and the beginning of the next, or many small ones; their
 * answers are sent together. */
static void add_piece(bench_team *team, int fd, adder *a, float *model) {
  static const char acks[PIECE / 64 * ACK];
  size_t have = a->left + read_some(team, fd, (char *)a->piece + a->left, PIECE - a->left);
  size_t floats = have / sizeof(float), finished = 0;
  for (size_t at = 0; at < floats;) {
    size_t n = (team->job.bytes - a->added) / sizeof(float);
    if (n > floats - at) n = floats - at;
    bench_add(model + a->added / sizeof(float), a->piece + at, n);
    at += n;
    a->added += n * sizeof(float);
    if (a->added < team->job.bytes) continue;
    a->added = 0;
    finished++;
  }
  a->left = have - floats * sizeof(float);
  if (a->left) memmove(a->piece, a->piece + floats, a->left);
  if (finished) write_all(team, fd, acks, finished * ACK);
}

static void add_server(bench_team *team) {
  adder adders[WORKERS_MAX] = {{NULL, 0, 0}};
  float *model = bench_memory(team->job.bytes);
  for (uint32_t i = 0; i < WORKERS_MAX; i++) adders[i].piece = bench_memory(PIECE);
  bench_ready(team);
  for (;;) {
    uint32_t bits = readable(team);
    for (uint32_t i = 0; i < WORKERS_MAX; i++) {
      if (bits >> i & 1) add_piece(team, team->fd[i][1], &adders[i], model);
    }
  }
}

const bench_player bench_copy_loop = {"copy loop", 0, sockets_prepare, copy_server, socket_worker};
const bench_player bench_add_loop = {"add loop", 0, sockets_prepare, add_server, socket_worker};

/* ---------------------------------------------------------------------------------------------
 * The bare loop over shared memory: one 64-byte message under way
 */
static void line_wait(_Atomic uint32_t *word, uint32_t value) {
  for (int spins = 0;; spins++) {
    uint32_t seen = atomic_load_explicit(word, memory_order_acquire);
    if (seen == value) return;
    if (spins < 200) {
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#endif
    } else {
      bench_futex_wait(word, seen, 0);
    }
  }
}

static void futex_worker(bench_team *team, uint32_t rank) {
  unsigned char message[64] = {0};
  uint32_t turn = 0;
  bench_ready(team);
  while (bench_next(team, rank)) {
    for (uint32_t i = 0; i < team->job.messages; i++) {
      memcpy(team->message[0], message, sizeof message);
      atomic_store(&team->ping, ++turn);
      bench_futex_wake(&team->ping);
      line_wait(&team->pong, turn);
      memcpy(message, team->message[1], sizeof message);
    }
    bench_done(team, rank);
  }
}

static void futex_server(bench_team *team) {
  unsigned char message[64];
  bench_ready(team);
  for (uint32_t turn = 1;; turn++) {
    line_wait(&team->ping, turn);
    memcpy(message, team->message[0], sizeof message);
    memcpy(team->message[1], message, sizeof message);
    atomic_store(&team->pong, turn);
    bench_futex_wake(&team->pong);
  }
}

const bench_player bench_futex_loop = {"futex loop", 0, NULL, futex_server, futex_worker};
