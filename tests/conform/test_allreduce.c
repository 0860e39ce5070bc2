/* test_allreduce.c - allreduce by the planned tree over every transport: all ranks get the same bits, and
 * these are right. test_collective.c has the other algorithms.
 *
 * Over TCP, UNIX sockets and shared memory every rank is a process of its own; in the simulator ranks are
 * contexts of one thread, whose blocking calls are nested. The plan determines the order of additions: sums
 * of floats are right within the possible rounding errors. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "mlfab_sim.h"
#include "../unit/chance.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANKS_MAX = 8, CALLS = 9 };
#define MS 1000000ull

static const uint64_t counts[CALLS] = {1, 7, 1000, 65536, 300001, 2000003, 3, 4096, 100000};
static const int dtypes[3] = {MLFAB_F32, MLFAB_F64, MLFAB_I64};

/* An element of a rank's contribution. Its exponent varies, so that the order of additions shows. */
static double element(uint32_t rank, uint32_t call, uint64_t i) {
  uint64_t x = mix((i * RANKS_MAX + rank) * CALLS + call);
  return ((double)(x >> 11) * 0x1p-53 - 0.5) * (double)(1u << (x & 15));
}

static void fill(void *data, int dtype, uint32_t rank, uint32_t call, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) {
    double x = element(rank, call, i);
    if (dtype == MLFAB_F32) ((float *)data)[i] = (float)x;
    if (dtype == MLFAB_F64) ((double *)data)[i] = x;
    if (dtype == MLFAB_I64) ((int64_t *)data)[i] = (int64_t)mix((uint64_t)(x * 1e9));
  }
}

/* Is element i the sum of all contributions, in some order? */
static int right(const void *data, int dtype, uint32_t ranks, uint32_t call, uint64_t i) {
  uint64_t whole = 0;
  double sum = 0, size = 0, got;
  for (uint32_t r = 0; r < ranks; r++) {
    double x = element(r, call, i);
    if (dtype == MLFAB_F32) x = (double)(float)x;
    sum += x;
    size += x < 0 ? -x : x;
    whole += mix((uint64_t)(element(r, call, i) * 1e9));
  }
  if (dtype == MLFAB_I64) return !memcmp((const int64_t *)data + i, &whole, sizeof whole);
  got = dtype == MLFAB_F32 ? (double)((const float *)data)[i] : ((const double *)data)[i];
  size *= ranks * (dtype == MLFAB_F32 ? 0x1p-24 : 0x1p-51);
  return got - sum <= size && sum - got <= size;
}

static int is_sum(const void *data, int dtype, uint32_t ranks, uint32_t call, uint64_t count) {
  uint64_t i = 0;
  while (i < count && right(data, dtype, ranks, call, i)) i++;
  return i == count;
}

static uint64_t hash(const void *data, uint64_t bytes) {
  const uint8_t *at = data;
  uint64_t h = bytes;
  for (uint64_t i = 0; i < bytes; i++) h = (h ^ at[i]) * 0x100000001b3u;
  return h;
}

/* With and without a scheduler. */
static int planned(mlfab *ctx, void *data, uint64_t count, int dtype) {
  mlfab_vec vec = {data, count};
  mlfab_collective options = {.size = sizeof options, .algorithm = MLFAB_ALGORITHM_PLANNED};
  return mlfab_allreduce_list(ctx, &vec, 1, dtype, &options);
}

/* --- processes --- */

typedef struct setting {
  char coordinator[128];
  uint32_t ranks, scheduler;
  uint32_t victim; /* exits in the middle; RANKS_MAX: no victim */
} setting;

static int open_rank(const setting *s, uint32_t rank, mlfab **ctx_p) {
  mlfab_config config;
  mlfab_error error;
  mlfab_config_init(&config);
  config.workers = s->ranks;
  config.servers = 1;
  config.rank = (int32_t)rank;
  config.scheduler = s->scheduler;
  /* so that a rank delayed by a busy machine is not declared dead */
  config.heartbeat_ns = 1000 * MS;
  config.timeout_ns = 60000 * MS;
  config.eager_bytes = 65536;
  config.transports = strncmp(s->coordinator, "shm:", 4) ? MLFAB_USE_TCP : MLFAB_USE_SHM;
  strcpy(config.key, "the-key-of-this-test");
  snprintf(config.coordinator, sizeof config.coordinator, "%s", s->coordinator);
  int code = mlfab_open(&config, ctx_p, &error);
  if (code) fprintf(stderr, "rank %u: %s\n", rank, error.text);
  return code;
}

/* One rank. Returns 0, or the line of the failure. Writes a hash of every sum to the pipe. */
static int live(const setting *s, uint32_t rank, int pipe_fd) {
  mlfab *ctx = NULL;
  mlfab_error error;
  void *data = malloc(2000003 * 8);
  if (!data || open_rank(s, rank, &ctx)) return __LINE__;
  for (uint32_t call = 0; call < CALLS; call++) {
    int dtype = dtypes[call % 3];
    fill(data, dtype, rank, call, counts[call]);
    int code = planned(ctx, data, counts[call], dtype);
    if (code) {
      mlfab_last_error(ctx, &error);
      fprintf(stderr, "rank %u: %s\n", rank, error.text);
      return __LINE__;
    }
    uint64_t h = hash(data, counts[call] * (dtype == MLFAB_F32 ? 4 : 8));
    if (rank == 0 && !is_sum(data, dtype, s->ranks, call, counts[call])) return __LINE__;
    if (write(pipe_fd, &h, sizeof h) != sizeof h) return __LINE__;
  }
  if (s->victim < RANKS_MAX) {
    /* The victim dies while the others wait for it. Before the call's deadline they get an error or
     * continue without it. */
    if (rank == s->victim) _exit(0);
    int64_t one = 1;
    int code = planned(ctx, &one, 1, MLFAB_I64);
    if (code && code != MLFAB_ERR_PEER_DEAD) return __LINE__;
    if (code) {
      one = 1;
      if (planned(ctx, &one, 1, MLFAB_I64)) return __LINE__;
    }
    if (one != s->ranks - 1) return __LINE__;
  }
  free(data);
  return mlfab_close(&ctx) ? __LINE__ : 0;
}

static void run_processes(const setting *s) {
  pid_t children[RANKS_MAX];
  int pipes[RANKS_MAX][2];
  for (uint32_t r = 0; r < s->ranks; r++) {
    assert_int_equal(pipe(pipes[r]), 0);
    children[r] = fork();
    assert_true(children[r] >= 0);
    if (children[r] == 0) {
      alarm(120);
      int line = live(s, r, pipes[r][1]);
      if (line) fprintf(stderr, "rank %u: line %d\n", r, line);
      _exit(line != 0);
    }
    close(pipes[r][1]);
  }
  for (uint32_t call = 0; call < CALLS; call++) {
    uint64_t first = 0, h = 0;
    for (uint32_t r = 0; r < s->ranks; r++) {
      assert_int_equal(read(pipes[r][0], &h, sizeof h), sizeof h);
      if (r == 0) first = h;
      assert_true(h == first);
    }
  }
  for (uint32_t r = 0; r < s->ranks; r++) {
    int status;
    assert_int_equal(waitpid(children[r], &status, 0), children[r]);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(pipes[r][0]);
  }
}

static uint32_t free_port(void) {
  struct sockaddr_in at = {.sin_family = AF_INET};
  socklen_t bytes = sizeof at;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  assert_true(fd >= 0);
  assert_int_equal(bind(fd, (const struct sockaddr *)(const void *)&at, sizeof at), 0);
  assert_int_equal(getsockname(fd, (struct sockaddr *)(void *)&at, &bytes), 0);
  close(fd);
  return ntohs(at.sin_port);
}

static void test_tcp(void **state) {
  (void)state;
  if (!mlfab_transport_tcp()) skip();
  for (uint32_t k = 0; k < 4; k++) {
    setting s = {.ranks = k == 0 ? 1 : k + 1, .scheduler = k == 3, .victim = RANKS_MAX};
    snprintf(s.coordinator, sizeof s.coordinator, "tcp:127.0.0.1:%u", free_port());
    run_processes(&s);
  }
}

static void test_unix(void **state) {
  (void)state;
  if (!mlfab_transport_tcp()) skip();
  setting s = {.ranks = 3, .victim = RANKS_MAX};
  snprintf(s.coordinator, sizeof s.coordinator, "unix:/tmp/mlfab-reduce-%ld.sock", (long)getpid());
  run_processes(&s);
}

static void test_shm(void **state) {
  (void)state;
  if (!mlfab_transport_shm()) skip();
  for (uint32_t k = 0; k < 2; k++) {
    setting s = {.ranks = 4, .scheduler = k, .victim = RANKS_MAX};
    snprintf(s.coordinator, sizeof s.coordinator, "shm:reduce-%ld-%u", (long)getpid(), k);
    run_processes(&s);
  }
}

static void test_death(void **state) {
  (void)state;
  if (!mlfab_transport_tcp()) skip();
  setting s = {.ranks = 4, .victim = 2};
  snprintf(s.coordinator, sizeof s.coordinator, "tcp:127.0.0.1:%u", free_port());
  run_processes(&s);
}

/* --- the simulator --- */

typedef struct sim_rank {
  mlfab *ctx;
  void *data;
  uint32_t rank, call;
  int code;
} sim_rank;

static void sim_call(void *user) {
  sim_rank *r = user;
  int dtype = dtypes[r->call % 3];
  fill(r->data, dtype, r->rank, r->call, counts[r->call]);
  r->code = planned(r->ctx, r->data, counts[r->call], dtype);
}

static void test_sim(void **state) {
  (void)state;
  for (uint32_t n = 1; n <= RANKS_MAX; n++) {
    sim_rank ranks[RANKS_MAX];
    mlfab_sim_options options = {.size = sizeof options, .hosts = n, .seed = n};
    mlfab_sim *sim = NULL;
    mlfab_error error;
    assert_int_equal(mlfab_sim_create(&options, &sim), 0);
    for (uint32_t r = 0; r < n; r++) {
      mlfab_config config;
      mlfab_config_init(&config);
      config.workers = n;
      config.servers = 1 + (n > 2);
      config.rank = (int32_t)r;
      ranks[r] = (sim_rank){.rank = r, .data = malloc(2000003 * 8)};
      assert_non_null(ranks[r].data);
      assert_int_equal(mlfab_sim_open(sim, r, &config, &ranks[r].ctx, &error), 0);
    }
    for (uint32_t r = 0; r < n;) {
      int ready = mlfab_is_ready(ranks[r].ctx, &error);
      assert_true(ready >= 0);
      if (ready == 0) assert_int_equal(mlfab_sim_step(sim), 1);
      r += ready == 1;
    }
    for (uint32_t call = 0; call < CALLS; call++) {
      int dtype = dtypes[call % 3];
      for (uint32_t r = 0; r < n; r++) ranks[r].call = call;
      for (uint32_t r = 1; r < n; r++)
        assert_int_equal(mlfab_sim_at(sim, mlfab_sim_clock(sim) + r, sim_call, &ranks[r]), 0);
      sim_call(&ranks[0]);
      uint64_t bytes = counts[call] * (dtype == MLFAB_F32 ? 4 : 8);
      for (uint32_t r = 0; r < n; r++) {
        assert_int_equal(ranks[r].code, 0);
        assert_memory_equal(ranks[r].data, ranks[0].data, bytes);
      }
      if (counts[call] < 400000) assert_true(is_sum(ranks[0].data, dtype, n, call, counts[call]));
    }
    for (uint32_t r = 0; r < n; r++) {
      mlfab_abandon(&ranks[r].ctx);
      free(ranks[r].data);
    }
    mlfab_sim_destroy(&sim);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_tcp),   cmocka_unit_test(test_unix), cmocka_unit_test(test_shm),
      cmocka_unit_test(test_death), cmocka_unit_test(test_sim),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
