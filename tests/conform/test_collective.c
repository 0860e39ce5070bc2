/* test_collective.c - collectives between workers over every transport, drawn from a seed: kinds, types,
 * operations, algorithms, uneven blocks, lists of buffers, blocking or not (which may differ between
 * ranks), several at once, memory of mlfab_alloc and the caller's.
 *
 * Values are small integers, so that every order of additions gives the same numbers in every type, and
 * each result is compared with a loop over the ranks; in addition, random floats, whose results only have
 * to be equal in all bits on all ranks. Over TCP, UNIX sockets and shared memory every rank is a process of
 * its own; in the simulator ranks are contexts of one thread, whose blocking calls are nested. */
#include "child.h"

#include "mlfab_sim.h"
#include "mlfab_transport.h"
#include "../unit/chance.h"
#include "../unit/scale.h"
#include "../unit/values.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Values repeat after PERIOD elements, a prime number, so that blocks and messages begin at other values. */
enum { RANKS_MAX = 8, PIECES = 7, AT_ONCE = 9, LARGE = 300000, HUGE = 600011, PERIOD = 4093 };
#define MS 1000000ull
#define ROOM (12 * large + 4096)

static uint64_t seed = 1;
static double scale = 1;
static uint64_t large = LARGE, huge = HUGE; /* elements; below scale 0.1 a quarter */

static uint64_t draw(uint64_t call, uint64_t what, uint64_t below) {
  return mix(mix(seed * 1000003 + call) * 64 + what) % below;
}

static uint64_t monotonic(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* --- a call, which all ranks draw alike --- */

enum { ALLREDUCE, SCATTER, GATHER, BROADCAST, BARRIER, PLAIN, COMPOSE, KINDS };

typedef struct call {
  uint64_t number;
  int kind, dtype, op, noisy, ordered;
  uint32_t algorithm, pieces;
  int32_t root;
  uint64_t count, counts[RANKS_MAX];
} call;

static uint64_t draw_count(uint64_t number) {
  const uint64_t most[] = {1, 9, 300, 5000, 9000, 70000, large};
  return 1 + draw(number, 1, most[draw(number, 2, 7)]);
}

static void draw_blocks(call *c, uint32_t ranks) {
  uint64_t left = c->count;
  int even = draw(c->number, 3, 3) == 0;
  memset(c->counts, 0, sizeof c->counts);
  for (uint32_t r = 0; r + 1 < ranks; r++) {
    uint64_t block = even ? c->count / ranks : draw(c->number, 20 + r, left + 1);
    if (draw(c->number, 40 + r, 5) == 0) block = 0;
    c->counts[r] = block;
    left -= block;
  }
  c->counts[ranks - 1] = left;
}

static call draw_call(uint64_t number, uint32_t ranks) {
  call c = {.number = number, .kind = (int)draw(number, 4, KINDS), .count = draw_count(number)};
  c.dtype = MLFAB_F32 + (int)draw(number, 5, 5);
  c.op = (int)draw(number, 6, 5);
  if (c.op == MLFAB_OP_MEAN && c.dtype == MLFAB_I64) c.op = MLFAB_OP_SUM;
  if (c.kind == PLAIN) c.op = MLFAB_OP_SUM;
  c.noisy =
      draw(number, 7, 4) == 0 && c.dtype != MLFAB_I64 && (c.kind == ALLREDUCE || c.kind == PLAIN);
  c.root = (int32_t)draw(number, 8, ranks);
  c.pieces = 1 + (uint32_t)draw(number, 9, PIECES);
  c.ordered = (int)draw(number, 10, 2);
  if (draw(number, 11, 2))
    c.algorithm = (uint32_t)draw(number, 12, MLFAB_ALGORITHM_COUNT - (c.kind != ALLREDUCE));
  if (c.algorithm == MLFAB_ALGORITHM_HALVING && c.kind == COMPOSE && c.ordered) c.algorithm = 0;
  if (c.algorithm >= MLFAB_ALGORITHM_TREE && c.kind != ALLREDUCE && c.kind != BROADCAST)
    c.algorithm = 0;
  if (c.kind == BROADCAST && c.algorithm != MLFAB_ALGORITHM_TREE) c.algorithm = 0;
  if (c.kind == COMPOSE) c.algorithm = 0;
  draw_blocks(&c, ranks);
  return c;
}

/* A random number of element i of a rank. */
static uint64_t element(uint64_t number, uint32_t rank, uint64_t i) {
  return mix((i % PERIOD * RANKS_MAX + rank) * 1000 + number);
}

static double value(const call *c, uint32_t rank, uint64_t i) {
  uint64_t x = element(c->number, rank, i);
  if (c->noisy) { /* some sums are halves that are not normal */
    double size = i % PERIOD % 61 == 5 ? 0x1p-11 : (double)(1u << (x & 7));
    return ((double)(x >> 11) * 0x1p-53 - 0.5) * size;
  }
  if (c->op == MLFAB_OP_PRODUCT) return x & 1 ? 2 : x & 2 ? 1 : -1;
  return (double)(x % 15) - 7;
}

static double reduced(const call *c, uint32_t ranks, uint64_t i) {
  double sum = value(c, 0, i);
  for (uint32_t r = 1; r < ranks; r++) {
    double x = value(c, r, i);
    if (c->op == MLFAB_OP_SUM || c->op == MLFAB_OP_MEAN) sum += x;
    if (c->op == MLFAB_OP_MIN) sum = x < sum ? x : sum;
    if (c->op == MLFAB_OP_MAX) sum = x > sum ? x : sum;
    if (c->op == MLFAB_OP_PRODUCT) sum *= x;
  }
  return c->op == MLFAB_OP_MEAN ? sum / ranks : sum;
}

/* A period of elements from number `from` on, element i at i % PERIOD; those of `count` elements suffice. */
typedef double (*element_fn)(const call *c, uint32_t rank, uint64_t i);

static const uint8_t *period_of(const call *c, element_fn of, uint32_t rank, uint64_t from,
                                uint64_t count) {
  static uint8_t period[PERIOD * 8];
  for (uint64_t i = from; i < from + count && i < from + PERIOD; i++)
    put(period, c->dtype, i % PERIOD, of(c, rank, i));
  return period;
}

/* How many of the elements from number i on, of `left`, are in one piece in the period. */
static uint64_t stretch(uint64_t i, uint64_t left) {
  uint64_t n = PERIOD - i % PERIOD;
  return n < left ? n : left;
}

/* Writes elements from .. from + count - 1. */
static void write_values(void *data, const call *c, uint32_t rank, uint64_t from, uint64_t count) {
  const uint32_t width = value_bytes(c->dtype);
  const uint8_t *period = period_of(c, value, rank, from, count);
  uint8_t *at = data;
  for (uint64_t i = from, n; i < from + count; i += n, at += n * width) {
    n = stretch(i, from + count - i);
    memcpy(at, period + i % PERIOD * width, n * width);
  }
}

/* Are these elements from .. from + count - 1? */
static int are(const void *data, const call *c, element_fn of, uint32_t rank, uint64_t from,
               uint64_t count) {
  const uint32_t width = value_bytes(c->dtype);
  const uint8_t *period = period_of(c, of, rank, from, count), *at = data;
  for (uint64_t i = from, n; i < from + count; i += n, at += n * width) {
    n = stretch(i, from + count - i);
    const uint8_t *wanted = period + i % PERIOD * width;
    if (!memcmp(at, wanted, n * width)) continue;
    for (uint64_t k = 0; k < n; k++) /* zeros may have other bits */
      if (get(at, c->dtype, k) != get(wanted, c->dtype, k)) return 0;
  }
  return 1;
}

static uint64_t hash_of(uint64_t hash, const void *data, uint64_t bytes) {
  const uint8_t *at = data;
  for (uint64_t n; bytes > 0; bytes -= n, at += n) {
    uint64_t word = 0;
    n = bytes < 8 ? bytes : 8;
    memcpy(&word, at, n);
    hash = mix(hash ^ word);
  }
  return hash;
}

/* --- a reducer that does not commute --- */

static affine affine_of(const call *c, uint32_t rank, uint64_t i) {
  uint64_t x = element(c->number, rank, i);
  return (affine){(uint32_t)x | 1, c->ordered ? (uint32_t)(x >> 32) : 0, 1};
}

static void compose(void *user, void *inout, const void *in, uint64_t count) {
  const affine *first = in;
  affine *then = inout;
  ++*(int *)user;
  for (uint64_t i = 0; i < count; i++) then[i] = affine_then(first[i], then[i]);
}

/* --- executing a call --- */

typedef struct rank_state {
  mlfab *ctx;
  uint32_t rank, ranks;
  uint8_t *memory; /* AT_ONCE areas of ROOM bytes */
  int line;        /* of the failure */
  uint64_t first, last, hash;
} rank_state;

typedef struct running {
  call c;
  uint8_t *data;
  mlfab_vec vecs[PIECES];
  mlfab_collective options;
  mlfab_request request;
  int reductions;
} running;

static int said(const rank_state *s, const call *c, int code, int line) {
  mlfab_error error;
  mlfab_last_error(s->ctx, &error);
  fprintf(stderr, "rank %u, call %llu (kind %d): %s: %s\n", s->rank, (unsigned long long)c->number,
          c->kind, mlfab_error_name(code), error.text);
  return line;
}

/* Lists have gaps, and sometimes an empty piece. */
static void lay_out(running *r, uint32_t bytes) {
  uint64_t left = r->c.count, at = 0;
  for (uint32_t p = 0; p < r->c.pieces; p++) {
    uint64_t n = p + 1 == r->c.pieces ? left : draw(r->c.number, 50 + p, left + 1);
    r->vecs[p] = (mlfab_vec){n || p % 2 ? r->data + at : NULL, n};
    at += (n * bytes + 15) / 8 * 8;
    left -= n;
  }
}

static void fill(running *r, const rank_state *s) {
  const call *c = &r->c;
  uint64_t i = 0;
  for (uint32_t p = 0; p < c->pieces && c->kind == ALLREDUCE; i += r->vecs[p++].count)
    write_values(r->vecs[p].data, c, s->rank, i, r->vecs[p].count);
  for (uint32_t p = 0; p < c->pieces && c->kind == COMPOSE; i += r->vecs[p++].count)
    for (uint64_t k = 0; k < r->vecs[p].count; k++)
      ((affine *)r->vecs[p].data)[k] =
          k < PERIOD ? affine_of(c, s->rank, i + k) : ((affine *)r->vecs[p].data)[k - PERIOD];
  if (c->kind == BROADCAST && s->rank != (uint32_t)c->root) memset(r->data, 0, c->count);
  if (c->kind == BROADCAST && s->rank == (uint32_t)c->root)
    for (i = 0; i < c->count; i++) r->data[i] = (uint8_t)mix(i + c->number);
  if (c->kind == SCATTER || c->kind == GATHER || c->kind == PLAIN)
    write_values(r->data, c, s->rank, 0, c->count);
}

/* Starts the call, or executes it when it blocks. */
static int carry_out(running *r, const rank_state *s, int block) {
  const call *c = &r->c;
  r->options = (mlfab_collective){
      .size = sizeof r->options, .op = (uint32_t)c->op, .algorithm = c->algorithm};
  lay_out(r, c->kind == COMPOSE ? sizeof(affine) : value_bytes(c->dtype));
  fill(r, s);
  r->request = 0;
  r->reductions = 0;
  switch (c->kind) {
    case COMPOSE:
      r->options.reduce = compose;
      r->options.user = &r->reductions;
      r->options.element_bytes = sizeof(affine);
      r->options.ordered = (uint32_t)c->ordered;
      r->options.op = 77; /* ignored */
      /* fallthrough */
    case ALLREDUCE:
      return block ? mlfab_allreduce_list(s->ctx, r->vecs, c->pieces, c->dtype, &r->options)
                   : mlfab_allreduce_start(s->ctx, r->vecs, c->pieces, c->dtype, &r->options,
                                           &r->request);
    case PLAIN: {
      mlfab_vec one = {r->data, c->count};
      return block ? mlfab_allreduce(s->ctx, r->data, c->count, c->dtype, NULL)
                   : mlfab_allreduce_start(s->ctx, &one, 1, c->dtype, NULL, &r->request);
    }
    case SCATTER:
      return block ? mlfab_reduce_scatter(s->ctx, r->data, c->counts, c->dtype, &r->options)
                   : mlfab_reduce_scatter_start(s->ctx, r->data, c->counts, c->dtype, &r->options,
                                                &r->request);
    case GATHER:
      return block ? mlfab_allgather(s->ctx, r->data, c->counts, c->dtype, &r->options)
                   : mlfab_allgather_start(s->ctx, r->data, c->counts, c->dtype, &r->options,
                                           &r->request);
    case BROADCAST:
      return mlfab_broadcast_start(s->ctx, c->root, r->data, c->count, &r->options, &r->request);
    default:
      return mlfab_barrier_start(s->ctx, &r->options, &r->request);
  }
}

static int check(const running *r, rank_state *s) {
  const call *c = &r->c;
  const uint32_t width = value_bytes(c->dtype);
  uint64_t i = 0, from = 0;
  for (uint32_t p = 0; p < c->pieces && c->kind == ALLREDUCE; i += r->vecs[p++].count) {
    const mlfab_vec *vec = &r->vecs[p];
    s->hash = hash_of(s->hash, vec->data, vec->count * width);
    if (!c->noisy && !are(vec->data, c, reduced, s->ranks, i, vec->count)) return __LINE__;
  }
  for (uint32_t p = 0; p < c->pieces && c->kind == COMPOSE; i += r->vecs[p++].count) {
    const affine *got = r->vecs[p].data;
    for (uint64_t k = 0; k < r->vecs[p].count; k++) {
      affine all = affine_of(c, 0, i + k);
      if (k >= PERIOD) all = got[k - PERIOD]; /* which is right */
      for (uint32_t q = 1; q < s->ranks && k < PERIOD; q++)
        all = affine_then(all, affine_of(c, q, i + k));
      if (memcmp(&got[k], &all, sizeof all)) return __LINE__;
    }
  }
  if (c->kind == PLAIN) {
    s->hash = hash_of(s->hash, r->data, c->count * width);
    if (!c->noisy && !are(r->data, c, reduced, s->ranks, 0, c->count)) return __LINE__;
  }
  for (i = 0; i < c->count && c->kind == BROADCAST; i++) {
    if (r->data[i] != (uint8_t)mix(i + c->number)) return __LINE__;
  }
  for (uint32_t q = 0; q < s->ranks; from += c->counts[q++]) {
    const uint8_t *at = r->data + from * width;
    if (c->kind == GATHER && !are(at, c, value, q, from, c->counts[q])) return __LINE__;
    if (c->kind == SCATTER && q == s->rank && !are(at, c, reduced, s->ranks, from, c->counts[q]))
      return __LINE__;
  }
  return 0;
}

/* Calls first .. last - 1, one after the other; each rank draws for itself which of them block. */
static int one_by_one(rank_state *s) {
  running r;
  for (uint64_t k = s->first; k < s->last; k++) {
    /* Mostly all ranks alike: where one does not block, the others cannot use their shared memory. */
    int block = draw(k / 8, 60, 3) ? 1 : draw(k, 60 + s->rank, 2) == 0;
    r.c = draw_call(k, s->ranks);
    r.data = s->memory + ROOM * (AT_ONCE - 1) * draw(k, 13, 2) + 8 * draw(k, 14, 9);
    int code = carry_out(&r, s, block);
    if (!code && r.request) code = mlfab_wait(s->ctx, r.request, 0, NULL);
    if (code) return said(s, &r.c, code, __LINE__);
    int line = check(&r, s);
    if (line) return said(s, &r.c, 0, line);
  }
  return 0;
}

/* The same calls, several in progress; the first one started is waited for last. */
static int at_once(rank_state *s) {
  static running all[RANKS_MAX][AT_ONCE];
  running *r = all[s->rank];
  for (uint64_t k = s->first; k < s->last; k += AT_ONCE) {
    uint32_t n = s->last - k < AT_ONCE ? (uint32_t)(s->last - k) : AT_ONCE;
    for (uint32_t i = 0; i < n; i++) {
      r[i].c = draw_call(k + i, s->ranks);
      r[i].data = s->memory + ROOM * i;
      int code = carry_out(&r[i], s, 0);
      if (code) return said(s, &r[i].c, code, __LINE__);
    }
    for (uint32_t i = n; i-- > 0;) {
      int code = mlfab_wait(s->ctx, r[i].request, 0, NULL);
      if (code) return said(s, &r[i].c, code, __LINE__);
      int line = check(&r[i], s);
      if (line) return said(s, &r[i].c, 0, line);
    }
  }
  return 0;
}

/* --- processes --- */

typedef struct setting {
  char coordinator[128];
  uint32_t ranks, transports;
  uint32_t apart; /* 1: two hosts, as far as the fabric knows */
  uint32_t hand;  /* 1: hand-driven */
  uint32_t scheduler;
  uint32_t victim; /* the rank, plus one, that exits in the end while others wait for it; 0: none */
  uint64_t calls;
} setting;

static int open_rank(const setting *t, uint32_t rank, mlfab **ctx_p) {
  mlfab_config config;
  mlfab_error error;
  mlfab_config_init(&config);
  config.workers = t->ranks;
  config.servers = 1;
  config.rank = (int32_t)rank;
  config.heartbeat_ns = t->scheduler ? 1000 * MS : 500 * MS; /* a busy machine delays ranks */
  config.scheduler = t->scheduler;
  if (t->scheduler) config.eager_bytes = 65536;
  config.timeout_ns = 60000 * MS;
  config.transports = t->transports;
  strcpy(config.key, "the-key-of-this-test");
  if (t->hand) config.progress = MLFAB_PROGRESS_HAND;
  if (t->apart) config.host = 1 + rank * 2 / t->ranks;
  snprintf(config.coordinator, sizeof config.coordinator, "%s", t->coordinator);
  int code = mlfab_open(&config, ctx_p, &error);
  if (code) fprintf(stderr, "rank %u: %s\n", rank, error.text);
  return code;
}

/* Where all ranks share a host, blocking calls send no frames but heartbeats. Returns 0 or a line. */
static int count_frames(rank_state *s, const setting *t) {
  mlfab_stats before, after;
  int shares = t->transports == MLFAB_USE_SHM && !t->apart && t->ranks > 1;
  float x[1000];
  uint64_t since = 0;
  for (int k = 0; k < 200; k++) {
    for (uint32_t i = 0; i < 1000; i++) x[i] = (float)i;
    if (mlfab_allreduce(s->ctx, x, 1000, MLFAB_F32, NULL)) return __LINE__;
    if (x[999] != 999.0f * (float)s->ranks) return __LINE__;
    if (k > 0) continue;
    since = monotonic();
    if (mlfab_get_stats(s->ctx, &before, sizeof before)) return __LINE__;
  }
  if (mlfab_get_stats(s->ctx, &after, sizeof after)) return __LINE__;
  if (after.collectives - before.collectives != 199) return __LINE__;
  uint64_t beats = 2 + (monotonic() - since) / (500 * MS); /* to every other rank */
  return shares && after.frames_sent - before.frames_sent > 50 + beats * s->ranks ? __LINE__ : 0;
}

/* An allreduce by the planned tree, with a scheduler or without. */
static int planned(const rank_state *s, int64_t *data, uint64_t count) {
  const mlfab_vec vec = {data, count};
  const mlfab_collective options = {.size = sizeof options, .algorithm = MLFAB_ALGORITHM_PLANNED};
  return mlfab_allreduce_list(s->ctx, &vec, 1, MLFAB_I64, &options);
}

/* Of many messages. Returns 0 or a line. */
static int plan_huge(const rank_state *s) {
  int64_t *data = (int64_t *)(void *)s->memory;
  for (uint64_t i = 0; i < huge; i++)
    data[i] = i < PERIOD ? (int64_t)element(0, s->rank, i) : data[i - PERIOD];
  if (planned(s, data, huge)) return __LINE__;
  for (uint64_t i = 0; i < huge; i++) {
    uint64_t sum = i < PERIOD ? 0 : (uint64_t)data[i - PERIOD]; /* which is right */
    for (uint32_t r = 0; r < s->ranks && i < PERIOD; r++) sum += element(0, r, i);
    if ((uint64_t)data[i] != sum) return __LINE__;
  }
  return 0;
}

/* The victim dies while the others wait for it. Before the call's deadline they get an error, or continue without it. */
static int lose_one(const rank_state *s, const setting *t) {
  int64_t one = 1;
  if (s->rank + 1 == t->victim) _exit(0);
  int code = planned(s, &one, 1);
  if (code && code != MLFAB_ERR_PEER_DEAD) return __LINE__;
  if (code) {
    one = 1;
    if (planned(s, &one, 1)) return __LINE__;
  }
  return one != s->ranks - 1 ? __LINE__ : 0;
}

/* One rank. Returns 0, or the line of the failure. */
static int live(const setting *t, uint32_t rank, int pipe_fd) {
  rank_state s = {.rank = rank, .ranks = t->ranks};
  void *shared = NULL, *other = NULL;
  if (open_rank(t, rank, &s.ctx)) return __LINE__;
  uint8_t *own = malloc(AT_ONCE * ROOM);
  if (!own || mlfab_alloc(s.ctx, AT_ONCE * ROOM, &shared)) return __LINE__;
  if ((uintptr_t)shared % 64) return __LINE__;
  for (uint64_t i = 0; i < ROOM / 8; i++) { /* the areas of single calls */
    if (((uint64_t *)shared)[i] || ((uint64_t *)shared)[(AT_ONCE - 1) * ROOM / 8 + i])
      return __LINE__;
  }
  s.line = count_frames(&s, t);
  if (s.line) return s.line;
  for (uint32_t part = 0; part < 4; part++) {
    s.memory = part % 2 ? shared : own;
    s.first = part * t->calls;
    s.last = s.first + t->calls;
    s.line = part == 2 ? at_once(&s) : one_by_one(&s);
    if (s.line) return s.line;
    if (write(pipe_fd, &s.hash, sizeof s.hash) != sizeof s.hash) return __LINE__;
    if (mlfab_alloc(s.ctx, 100 + part, &other) || (part % 2 && mlfab_free(s.ctx, other)))
      return __LINE__;
  }
  s.memory = own;
  s.line = t->ranks > 2 ? plan_huge(&s) : 0;
  if (!s.line && t->victim) s.line = lose_one(&s, t);
  if (s.line) return s.line;
  if (mlfab_free(s.ctx, shared)) return __LINE__;
  free(own);
  return mlfab_close(&s.ctx) ? __LINE__ : 0;
}

static void run_processes(const setting *t) {
  pid_t children[RANKS_MAX];
  int pipes[RANKS_MAX][2];
  for (uint32_t r = 0; r < t->ranks; r++) {
    assert_int_equal(pipe(pipes[r]), 0);
    children[r] = fork();
    assert_true(children[r] >= 0);
    if (children[r] == 0) {
      alarm(300);
      int line = live(t, r, pipes[r][1]);
      if (line) fprintf(stderr, "rank %u: line %d (%s)\n", r, line, t->coordinator);
      _exit(line != 0);
    }
    close(pipes[r][1]);
  }
  for (uint32_t part = 0; part < 4; part++) {
    uint64_t first = 0, h = 0;
    for (uint32_t r = 0; r < t->ranks; r++) {
      assert_int_equal(read(pipes[r][0], &h, sizeof h), sizeof h);
      if (r == 0) first = h;
      assert_true(h == first);
    }
  }
  for (uint32_t r = 0; r < t->ranks; r++) {
    int status;
    assert_int_equal(waitpid(children[r], &status, 0), children[r]);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(pipes[r][0]);
  }
}

static uint64_t calls(double n) { return 1 + (uint64_t)(n * scale); }

static void test_tcp(void **state) {
  (void)state;
  if (!mlfab_transport_tcp()) skip();
  for (uint32_t k = 0; k < 4; k++) {
    setting t = {.ranks = k == 0 ? 1 : k + 1,
                 .transports = MLFAB_USE_TCP,
                 .scheduler = k == 3,
                 .victim = k == 3 ? 3 : 0,
                 .calls = calls(40)};
    snprintf(t.coordinator, sizeof t.coordinator, "tcp:127.0.0.1:%u", free_port());
    run_processes(&t);
  }
}

static void test_unix(void **state) {
  (void)state;
  if (!mlfab_transport_tcp()) skip();
  setting t = {.ranks = 3, .transports = MLFAB_USE_TCP, .calls = calls(40)};
  snprintf(t.coordinator, sizeof t.coordinator, "unix:/tmp/mlfab-collective-%ld.sock",
           (long)getpid());
  run_processes(&t);
}

/* All ranks share memory. */
static void test_shm(void **state) {
  (void)state;
  if (!mlfab_transport_shm()) skip();
  for (uint32_t k = 0; k < 3; k++) {
    setting t = {.ranks = k == 2 ? 5 : k + 2,
                 .transports = MLFAB_USE_SHM,
                 .hand = k == 1,
                 .scheduler = k == 2,
                 .calls = calls(120)};
    snprintf(t.coordinator, sizeof t.coordinator, "shm:collective-%ld-%u", (long)getpid(), k);
    run_processes(&t);
  }
}

/* Two hosts: shared memory carries frames, but ranks share no arena. */
static void test_apart(void **state) {
  (void)state;
  if (!mlfab_transport_shm()) skip();
  setting t = {.ranks = 4, .transports = MLFAB_USE_SHM, .apart = 1, .calls = calls(40)};
  snprintf(t.coordinator, sizeof t.coordinator, "shm:collective-%ld-a", (long)getpid());
  run_processes(&t);
}

/* --- the simulator --- */

static void sim_one_by_one(void *user) {
  rank_state *s = user;
  s->line = one_by_one(s);
}

static void sim_at_once(void *user) {
  rank_state *s = user;
  s->line = at_once(s);
}

#ifdef __SANITIZE_THREAD__
enum { SIM_RANKS = 2 }; /* one thread has no races */
#else
enum { SIM_RANKS = RANKS_MAX };
#endif

static void test_sim(void **state) {
  (void)state;
  for (uint32_t n = 1; n <= SIM_RANKS; n++) {
    rank_state ranks[RANKS_MAX];
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
      ranks[r] = (rank_state){.rank = r, .ranks = n, .memory = malloc(AT_ONCE * ROOM)};
      assert_non_null(ranks[r].memory);
      assert_int_equal(mlfab_sim_open(sim, r, &config, &ranks[r].ctx, &error), 0);
    }
    for (uint32_t r = 0; r < n;) {
      int ready = mlfab_is_ready(ranks[r].ctx, &error);
      assert_true(ready >= 0);
      if (ready == 0) assert_int_equal(mlfab_sim_step(sim), 1);
      r += ready == 1;
    }
    /* Calls of ranks are nested on the stack: one event makes one call, or starts all that are in progress
     * at once. */
    for (uint64_t part = 0; part < calls(60); part++) {
      int single = part % 4 != 3;
      for (uint32_t r = 0; r < n; r++) {
        ranks[r].first = (n * 1000 + part) * AT_ONCE;
        ranks[r].last = ranks[r].first + (single ? 1 : AT_ONCE);
        ranks[r].line = -1;
      }
      void (*act)(void *) = single ? sim_one_by_one : sim_at_once;
      for (uint32_t r = 1; r < n; r++)
        assert_int_equal(mlfab_sim_at(sim, mlfab_sim_clock(sim) + r, act, &ranks[r]), 0);
      act(&ranks[0]);
      for (uint32_t r = 0; r < n; r++) {
        while (ranks[r].line == -1) assert_int_equal(mlfab_sim_step(sim), 1);
        assert_int_equal(ranks[r].line, 0);
        assert_true(ranks[r].hash == ranks[0].hash);
      }
    }
    for (uint32_t r = 0; r < n; r++) {
      mlfab_abandon(&ranks[r].ctx);
      free(ranks[r].memory);
    }
    mlfab_sim_destroy(&sim);
  }
}

int main(void) {
  seed = test_number("MLFAB_SEED", seed);
  scale = test_scale();
  if (scale > 20) scale = 20;
  if (scale < 0.1) large /= 4, huge /= 4;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_tcp),   cmocka_unit_test(test_unix), cmocka_unit_test(test_shm),
      cmocka_unit_test(test_apart), cmocka_unit_test(test_sim),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
