/* collective_limit.c - the bounds of an allreduce on this machine:
 *
 *   bench-collective-limit KIND RANKS DIR
 *
 *   copy   shared memory, callers' own arrays: every rank copies the parts that others add into a
 *          shared block, adds its part of all ranks to its array and a shared block, and copies the
 *          others' sums back
 *   add    arrays in shared memory: every rank adds its part of all ranks' arrays into all of them
 *   tcp    over loopback every rank sends 2 (N-1)/N of its array and receives as much; no sums
 *
 * These move the bytes of an allreduce, with all ranks at once, and do nothing else: shared blocks stay in
 * the cache, and ranks wait for each other before and after a call (over TCP: for its last byte), not where
 * data dependencies would make them. So the sums are not right, and are not checked. Stores do not bypass
 * the cache, because the destination has just been read; non-temporal stores took 2 to 3 times as long. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "collective_common.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum { RANKS_MAX = 8, BLOCK = 8192, BLOCKS = 8, LANES = 32, SPINS = 300, PIECE = 1 << 20 };

typedef struct presence {
  _Alignas(128) _Atomic unsigned turn;
} presence;

typedef struct limit {
  int yields;     /* more ranks than cores */
  presence *here; /* shared, one per rank */
  unsigned turn, blocks;
  float *stage[RANKS_MAX]; /* all ranks' BLOCKS blocks of BLOCK elements, shared */
  float *array[RANKS_MAX]; /* add: all ranks' arrays; copy: only the own one */
  int from, to;            /* tcp: the neighbours in the ring */
} limit;

static void rest(const limit *l, unsigned *spins) {
  if (l->yields && ++*spins % 64 == 0) sched_yield();
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/* Every rank announces its arrival in its own cache line, and reads the others'. */
static void barrier(collective_rank *r, limit *l) {
  unsigned turn = ++l->turn, spins = 0;
  atomic_store_explicit(&l->here[r->rank].turn, turn, memory_order_release);
  for (int k = 0; k < r->ranks; k++) {
    _Atomic unsigned *other = &l->here[k].turn;
    while ((int)(atomic_load_explicit(other, memory_order_acquire) - turn) < 0) rest(l, &spins);
  }
}

/* out[k] = the sum of all in, for each k: n arrays read, m written; count is a multiple of LANES. As fast
 * as the machine allows, whatever the build's flags. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
__attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default")))
#endif
static void
add(float *const *in, int n, float *const *out, int m, size_t count) {
  for (size_t i = 0; i < count; i += LANES) {
    float sum[LANES];
    memcpy(sum, in[0] + i, sizeof sum);
    for (int k = 1; k < n; k++) {
      const float *x = in[k] + i;
      for (int j = 0; j < LANES; j++) sum[j] += x[j];
    }
    for (int k = 0; k < m; k++) memcpy(out[k] + i, sum, sizeof sum);
  }
}

/* Elements of one of n parts. */
static size_t part_of(size_t count, int n) { return count / (size_t)n / LANES * LANES; }

/* The next shared block of this rank to write to. */
static float *block_next(collective_rank *r, limit *l) {
  return l->stage[r->rank] + (size_t)(l->blocks++ % BLOCKS) * BLOCK;
}

/* A block that another rank wrote some blocks ago, not its current one: otherwise both would compete for
 * the lines. */
static float *block_of(const limit *l, int rank) {
  return l->stage[rank] + (size_t)((l->blocks + BLOCKS / 2) % BLOCKS) * BLOCK;
}

static void copy_call(collective_rank *r, size_t count) {
  limit *l = r->self;
  size_t part = part_of(count, r->ranks);
  barrier(r, l);
  for (size_t at = 0; at < part; at += BLOCK) {
    size_t n = part - at < BLOCK ? part - at : BLOCK;
    float *in[RANKS_MAX], *mine = r->data + at;
    for (int k = 1; k < r->ranks; k++)
      memcpy(block_next(r, l), mine + (size_t)k * part, n * sizeof(float));
    for (int k = 0; k < r->ranks; k++) in[k] = k == r->rank ? mine : block_of(l, k);
    float *out[2] = {mine, block_next(r, l)};
    add(in, r->ranks, out, 2, n);
    for (int k = 1; k < r->ranks; k++)
      memcpy(mine + (size_t)k * part, block_of(l, (r->rank + k) % r->ranks), n * sizeof(float));
  }
  barrier(r, l);
}

static void add_call(collective_rank *r, size_t count) {
  limit *l = r->self;
  size_t part = part_of(count, r->ranks);
  float *array[RANKS_MAX];
  for (int k = 0; k < r->ranks; k++) array[k] = l->array[k] + (size_t)r->rank * part;
  barrier(r, l);
  add(array, r->ranks, array, r->ranks, part);
  barrier(r, l);
}

/* Bytes moved; 0 when the call would block. */
static size_t moved(ssize_t n) {
  if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
    collective_fail("bench-collective-limit", strerror(errno));
  return n > 0 ? (size_t)n : 0;
}

static void tcp_call(collective_rank *r, size_t count) {
  limit *l = r->self;
  size_t bytes = 2 * (count * sizeof(float) / (size_t)r->ranks) * (size_t)(r->ranks - 1);
  size_t sent = 0, got = 0;
  unsigned spins = 0;
  char *base = (char *)r->data;
  while (sent < bytes || got < bytes) {
    size_t before = sent + got;
    /* The array is sent once or twice, in pieces that end at its end. */
    if (sent < bytes) {
      size_t n = bytes - sent < PIECE ? bytes - sent : PIECE;
      size_t at = sent % (count * sizeof(float));
      if (n > count * sizeof(float) - at) n = count * sizeof(float) - at;
      sent += moved(send(l->to, base + at, n, MSG_DONTWAIT | MSG_NOSIGNAL));
    }
    if (got < bytes) {
      size_t n = bytes - got < PIECE ? bytes - got : PIECE;
      size_t at = got % (count * sizeof(float));
      if (n > count * sizeof(float) - at) n = count * sizeof(float) - at;
      got += moved(recv(l->from, base + at, n, MSG_DONTWAIT));
    }
    if (sent + got > before) {
      spins = 0;
    } else if (++spins > SPINS || l->yields) {
      struct pollfd fds[2] = {{l->from, got < bytes ? POLLIN : 0, 0},
                              {l->to, sent < bytes ? POLLOUT : 0, 0}};
      poll(fds, 2, -1);
    }
  }
}

/* A connection of 127.0.0.1 with itself: the sending end and the receiving end. */
static void connection(int *to_p, int *from_p) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
  *to_p = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1) ||
      getsockname(listener, (struct sockaddr *)&address, &length) ||
      connect(*to_p, (struct sockaddr *)&address, length) ||
      (*from_p = accept(listener, NULL, NULL)) < 0)
    collective_fail("bench-collective-limit", strerror(errno));
  setsockopt(*to_p, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  close(listener);
}

static void *shared(size_t bytes) {
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) collective_fail("bench-collective-limit", "out of memory");
  memset(memory, 0, bytes);
  return memory;
}

int main(int argc, char **argv) {
  static limit l;
  collective_rank r = {.self = &l};
  int to[RANKS_MAX], from[RANKS_MAX];
  if (argc != 4 || (r.ranks = atoi(argv[2])) < 2 || r.ranks > RANKS_MAX)
    collective_fail("usage", "bench-collective-limit copy|add|tcp RANKS DIR");
  int in_place = strcmp(argv[1], "add") == 0, tcp = strcmp(argv[1], "tcp") == 0;
  r.allreduce = in_place ? add_call : tcp ? tcp_call : copy_call;
  l.yields = r.ranks > sysconf(_SC_NPROCESSORS_ONLN);
  l.here = shared(sizeof(presence) * RANKS_MAX);
  for (int i = 0; i < r.ranks; i++) {
    l.stage[i] = shared(BLOCKS * BLOCK * sizeof(float));
    if (in_place) l.array[i] = shared(COLLECTIVE_BYTES_MAX);
    if (tcp) connection(&to[i], &from[(i + 1) % r.ranks]);
  }
  for (int i = 1; i < r.ranks && r.rank == 0; i++) {
    if (fork() == 0) r.rank = i;
  }
  if (r.rank > 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
  l.to = to[r.rank];
  l.from = from[r.rank];
  r.data = in_place ? l.array[r.rank] : collective_memory();
  collective_bind(r.rank, r.ranks);
  collective_serve(&r, argv[3]);
  while (r.rank == 0 && wait(NULL) > 0) continue;
  return 0;
}
