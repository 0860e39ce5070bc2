/* test_collective.c - collectives among simulated workers, driven by hand so that all of them can wait at once: every
 * kind, algorithm, type and operation against a literal sum, from 1 to 64 ranks, several in flight, with
 * links that break; and everything that ends an epoch, each time seen exactly once by everybody. Sums of the planned
 * tree go through the same, with a scheduler and without.
 *
 * The n-th call of an epoch is a function of n, so all ranks make the same calls without a word. What is
 * checked: of every call that it ends by its deadline; of every success that it is the sum of those who take
 * part, and has the same bits on every rank; of every failure that all open calls of a rank have it,
 * and that the next calls match again.
 *
 * MLFAB_SCALE=100 runs 10,000 seeds, 1 (the default) 50. MLFAB_SEED=n runs one alone. */
#include "driven.h"
#include "../unit/chance.h"
#include "../unit/values.h"
#include "seeds.h"

#include <math.h>

/* 0: the library has no pushes and pulls. */
#ifndef WITH_MODEL
#define WITH_MODEL 1
#endif

enum { RANKS = 64, NODES = 66, DEPTH = 16, BUFS = 5, FAILURES = 64, CACHE = 64, MODEL = 500 };
/* The elements of a rank repeat after so many, a prime number: blocks and frames begin at other values. */
enum { PERIOD = 1021 };
#define MS 1000000ull
#define SECOND 1000000000ull

enum kind { ALLREDUCE, REDUCE_SCATTER, ALLGATHER, BROADCAST, KINDS };
enum own { NO_REDUCER, AFFINE, XOR };
enum numbers { EXACT, ROUGH, WITH_NAN };

/* The n-th call of an epoch, the same on all ranks. */
typedef struct plan {
  uint64_t number;
  enum kind kind;
  int algorithm, dtype, op, plain; /* plain: mlfab_node_allreduce */
  enum own own;
  enum numbers numbers;
  int32_t root;
  uint32_t width, nbufs;
  uint64_t count, blocks[RANKS], lengths[BUFS];
} plan;

typedef struct open_call {
  mlfab_request request;
  uint64_t began_ns, bytes;
  plan plan;
  uint8_t *memory;
} open_call;

typedef struct failure {
  int32_t code, blamed;
  uint64_t at_ns;
} failure;

typedef struct rank {
  mlfab_node *node;
  void *link; /* its transport */
  open_call open[DEPTH];
  uint32_t nopen, life;
  uint64_t calls;     /* begun since the last failure */
  uint64_t successes; /* since somebody set it to 0 */
  uint64_t next_ns;   /* when it may call again */
  uint64_t members;   /* who takes part, as far as failures have told it */
  uint32_t nfailures;
  failure failures[FAILURES];
  uint64_t bytes; /* that its node has allocated */
  mlfab_request push, pull;
  uint64_t pushed;
  int64_t gradient[MODEL], weights[MODEL];
  int silent; /* it makes no calls */
  int begins; /* its next call is the first with one that is back */
  int finished;
  uint64_t last; /* calls that it had made when it finished */
} rank;

/* The right elements of a period: numbers with the error that is allowed, or bytes. */
typedef struct literal {
  uint64_t number, members;
  double *values, *slack;
  uint8_t *bytes;
} literal;

typedef struct world {
  mlfab_sim *sim;
  rank ranks[NODES]; /* workers, then dedicated servers */
  mlfab_config config;
  uint32_t workers, nodes, depth;
  uint64_t seed, dice, slice_ns, timeout_ns, think_ns, most, goal;
  uint64_t sure; /* not 0: any set of members may be what a sum is of; these alone have blocks */
  int exact;     /* all who have not finished are members, and nothing fails */
  int deaths;    /* some epoch may have fewer members than another */
  int planned;   /* all calls are sums of the planned tree */
  int harsh;     /* faults last longer than heartbeats tolerate */
  int pushes;
  plan (*make)(const struct world *w, uint64_t number, uint64_t members);
  literal literals[CACHE];
  struct {
    uint64_t number, members, hash;
  } seen[CACHE];
  uint64_t outcome;
  char failure[320];
} world;

static uint64_t below(world *w, uint64_t n) { return mix(w->dice++) % n; }
static uint64_t now(const world *w) { return mlfab_sim_clock(w->sim); }
static uint64_t bit(uint32_t i) { return (uint64_t)1 << i; }
static uint64_t all_of(const world *w) { return w->workers == 64 ? ~0ull : bit(w->workers) - 1; }

static uint32_t bits_of(uint64_t set) {
  uint32_t n = 0;
  for (; set; set &= set - 1) n++;
  return n;
}

static void broken(world *w, const char *format, ...) {
  va_list arguments;
  if (w->failure[0]) return;
  va_start(arguments, format);
  vsnprintf(w->failure, sizeof w->failure, format, arguments);
  va_end(arguments);
}

/* ---- numbers */

/* Half an ulp of 1. */
static double rounding_of(int dtype) {
  if (dtype == MLFAB_F64) return 0x1p-53;
  if (dtype == MLFAB_F32) return 0x1p-24;
  return dtype == MLFAB_F16 ? 0x1p-11 : 0x1p-8;
}

static uint64_t dice_of(const plan *p, uint32_t who, uint64_t i) {
  return mix(mix(p->number * 1000003 + who) + i % PERIOD);
}

/* Element i of rank `who`. Exact ones add up without rounding, in any order and in any type. */
static double number(const plan *p, uint32_t who, uint64_t i) {
  uint64_t d = dice_of(p, who, i);
  double magnitude = 1.0 + (double)(d >> 8 & 127) / 128.0;
  if (p->numbers == WITH_NAN && who == 0 && i % PERIOD % 16 == 3) return (double)NAN;
  if (p->numbers == ROUGH) return d & 1 ? magnitude : -magnitude;
  if (p->op == MLFAB_OP_PRODUCT) return d % 3 == 0 ? -1.0 : who % 8 == 1 && d % 3 == 1 ? 2.0 : 1.0;
  return value_bytes(p->dtype) == 2 ? (double)(d % 3) - 1.0 : (double)(d % 2001) - 1000.0;
}

static void compose(void *user, void *inout, const void *in, uint64_t count) {
  (void)user;
  for (uint64_t i = 0; i < count; i++) {
    affine low, high;
    memcpy(&low, (const uint8_t *)in + i * sizeof low, sizeof low);
    memcpy(&high, (uint8_t *)inout + i * sizeof high, sizeof high);
    high = affine_then(low, high);
    memcpy((uint8_t *)inout + i * sizeof high, &high, sizeof high);
  }
}

/* user: bytes of an element. */
static void exclusive_or(void *user, void *inout, const void *in, uint64_t count) {
  for (uint64_t i = 0; i < count * (uintptr_t)user; i++)
    ((uint8_t *)inout)[i] ^= ((const uint8_t *)in)[i];
}

/* What rank `who` brings as element i. */
static void fill(const plan *p, uint32_t who, uint64_t i, uint8_t *at) {
  uint64_t d = dice_of(p, who, i);
  affine map = {(uint32_t)d | 1, (uint32_t)(d >> 32), 1};
  if (p->own == AFFINE)
    memcpy(at, &map, sizeof map);
  else if (p->own == XOR || p->kind == BROADCAST)
    for (uint32_t k = 0; k < p->width; k++) at[k] = (uint8_t)(d >> 8 * (k % 8));
  else if (p->dtype == MLFAB_I64)
    memcpy(at, &d, 8);
  else
    put(at, p->dtype, 0, number(p, who, i));
}

/* Elements i to i + n - 1, one after the other. */
static void fill_many(const plan *p, uint32_t who, uint64_t i, uint64_t n, uint8_t *at) {
  const uint64_t bytes = n * p->width, period = (uint64_t)PERIOD * p->width;
  for (uint64_t k = 0; k < n && k < PERIOD; k++) fill(p, who, i + k, at + k * p->width);
  for (uint64_t k = period; k < bytes; k += period)
    memcpy(at + k, at, bytes - k < period ? bytes - k : period);
}

/* How many of these elements, up to a period, are the same as those a period before? */
static uint64_t repeated(const plan *p, const uint8_t *at, uint64_t n) {
  if (n > PERIOD) n = PERIOD;
  return memcmp(at, at - (uint64_t)PERIOD * p->width, n * p->width) ? 0 : n;
}

/* ---- plans */

static uint64_t size_of(const world *w, uint64_t d) {
  uint64_t most = d % 8 == 0 ? w->most : d % 8 < 4 ? 300 : 12;
  return 1 + mix(d) % (most < w->most ? most : w->most);
}

/* Uneven, many of them 0. */
static void make_blocks(const world *w, plan *p, uint64_t members, uint64_t d) {
  uint64_t count = p->count;
  p->count = 0;
  for (uint32_t r = 0; r < w->workers; r++) {
    uint64_t c = mix(d + r);
    p->blocks[r] = members >> r & 1 && c % 4 ? mix(c) % (count / w->workers * 2 + 3) : 0;
    p->count += p->blocks[r];
  }
  for (uint32_t r = 0; r < w->workers && p->count == 0; r++)
    if (members >> r & 1) p->count = p->blocks[r] = 3;
}

static void make_lengths(plan *p, uint64_t d) {
  uint64_t left = p->count;
  p->nbufs = p->plain ? 1 : 1 + (uint32_t)(d % BUFS);
  for (uint32_t i = 0; i + 1 < p->nbufs; i++) {
    p->lengths[i] = mix(d + i) % 3 ? mix(d + i + 7) % (left + 1) : 0;
    left -= p->lengths[i];
  }
  p->lengths[p->nbufs - 1] = left;
}

static int32_t nth_of(uint64_t set, uint32_t n) {
  int32_t r = 0;
  for (n %= bits_of(set);; r++, set >>= 1)
    if (set & 1 && n-- == 0) return r;
}

static void make_reduction(const world *w, plan *p, uint64_t d) {
  static const int types[] = {MLFAB_F32, MLFAB_I64, MLFAB_F64, MLFAB_F16, MLFAB_BF16};
  static const uint32_t widths[] = {1, 3, 8, 20, 64};
  p->dtype = types[mix(d + 1) % 5];
  p->op = (int)(mix(d + 2) % 5);
  if (p->op == MLFAB_OP_MEAN && p->dtype == MLFAB_I64) p->op = MLFAB_OP_SUM;
  p->own = mix(d + 3) % 4 ? NO_REDUCER : mix(d + 4) % 2 ? AFFINE : XOR;
  p->numbers = p->op == MLFAB_OP_PRODUCT ? EXACT : mix(d + 5) % 8 == 0 ? WITH_NAN : mix(d + 6) % 2;
  /* Which algorithm it chooses may depend on measured links, and so the bits of what is rounded. */
  if (w->deaths && p->algorithm == MLFAB_ALGORITHM_AUTO && p->numbers == ROUGH) p->numbers = EXACT;
  p->width = value_bytes(p->dtype);
  if (p->own) p->width = p->own == AFFINE ? sizeof(affine) : widths[mix(d + 7) % 5];
  p->plain = p->kind == ALLREDUCE && !p->own && mix(d + 8) % 4 == 0;
  if (p->plain) p->algorithm = MLFAB_ALGORITHM_AUTO, p->op = MLFAB_OP_SUM;
  if (p->plain && w->deaths && p->numbers == ROUGH) p->numbers = EXACT;
}

static plan make_any(const world *w, uint64_t number, uint64_t members) {
  plan p = {.number = number, .width = 1};
  uint64_t d = mix(w->seed * 7919 + number);
  p.kind = (enum kind)(mix(d) % 8);
  if (p.kind >= KINDS) p.kind = ALLREDUCE;
  p.algorithm = (int)(mix(d + 9) % (MLFAB_ALGORITHM_COUNT - 1));
  p.algorithm += p.algorithm >= MLFAB_ALGORITHM_PLANNED;
  p.count = size_of(w, mix(d + 10));
  p.root = nth_of(members, (uint32_t)(mix(d + 11) % 1024));
  if (p.kind == ALLREDUCE || p.kind == REDUCE_SCATTER) make_reduction(w, &p, d);
  if (p.kind == ALLGATHER) p.dtype = MLFAB_I64, p.width = 8;
  if (p.kind == REDUCE_SCATTER || p.kind == ALLGATHER) make_blocks(w, &p, members, d + 12);
  if (p.kind == ALLREDUCE) make_lengths(&p, d + 100);
  return p;
}

static plan make_sum(const world *w, uint64_t number, uint64_t members) {
  plan p = {.number = number, .dtype = MLFAB_I64, .width = 8, .nbufs = 1};
  (void)members;
  p.count = p.lengths[0] = w->most;
  return p;
}

static plan make_planned(const world *w, uint64_t number, uint64_t members) {
  plan p = make_sum(w, number, members);
  p.algorithm = MLFAB_ALGORITHM_PLANNED;
  if (w->deaths) p.count = p.lengths[0] = size_of(w, mix(w->seed * 7919 + number));
  return p;
}

/* ---- what comes out */

static void forget_literal(literal *l) {
  free(l->values);
  free(l->slack);
  free(l->bytes);
  memset(l, 0, sizeof *l);
}

static void add_number(const plan *p, double *v, double x) {
  if (isnan(x) || isnan(*v))
    *v = (double)NAN;
  else if (p->op == MLFAB_OP_MIN)
    *v = x < *v ? x : *v;
  else if (p->op == MLFAB_OP_MAX)
    *v = x > *v ? x : *v;
  else
    *v = p->op == MLFAB_OP_PRODUCT ? *v * x : *v + x;
}

static uint64_t add_integer(const plan *p, uint64_t v, uint64_t x) {
  if (p->op == MLFAB_OP_MIN) return (int64_t)x < (int64_t)v ? x : v;
  if (p->op == MLFAB_OP_MAX) return (int64_t)x > (int64_t)v ? x : v;
  return p->op == MLFAB_OP_PRODUCT ? v * x : v + x;
}

static void add_element(plan *p, literal *l, uint32_t who, uint64_t i, int first) {
  uint8_t x[64];
  uint8_t *at = l->bytes + i * p->width;
  fill(p, who, i, x);
  if (p->own == AFFINE) {
    uint8_t high[sizeof(affine)];
    memcpy(high, x, sizeof high);
    if (!first) compose(NULL, high, at, 1);
    memcpy(at, high, sizeof high);
  } else if (p->own == XOR) {
    if (first) memset(at, 0, p->width);
    exclusive_or((void *)(uintptr_t)p->width, at, x, 1);
  } else if (p->dtype == MLFAB_I64) {
    uint64_t v, y;
    memcpy(&v, at, 8);
    memcpy(&y, x, 8);
    v = first ? y : add_integer(p, v, y);
    memcpy(at, &v, 8);
  } else {
    double y = get(x, p->dtype, 0);
    if (first)
      l->values[i] = y;
    else
      add_number(p, &l->values[i], y);
    l->slack[i] += fabs(y);
  }
}

/* The sum over `members`, one after the other. */
static const literal *literal_of(world *w, plan *p, uint64_t members) {
  literal *l = &w->literals[p->number % CACHE];
  uint32_t n = bits_of(members);
  double rounding = rounding_of(p->dtype);
  if (l->bytes && l->number == p->number && l->members == members) return l;
  forget_literal(l);
  l->number = p->number;
  l->members = members;
  const uint64_t count = p->count < PERIOD ? p->count : PERIOD;
  l->values = calloc(count, sizeof *l->values);
  l->slack = calloc(count, sizeof *l->slack);
  l->bytes = calloc(count, p->width);
  assert_true(l->values && l->slack && l->bytes);
  int first = 1;
  for (uint32_t r = 0; r < w->workers; r++) {
    if (!(members >> r & 1)) continue;
    for (uint64_t i = 0; i < count; i++) add_element(p, l, r, i, first);
    first = 0;
  }
  int adds = p->op == MLFAB_OP_SUM || p->op == MLFAB_OP_MEAN;
  for (uint64_t i = 0; i < count && !p->own && p->dtype != MLFAB_I64; i++) {
    l->slack[i] = p->numbers == ROUGH && adds ? l->slack[i] * n * rounding : 0.0;
    if (p->op != MLFAB_OP_MEAN) continue;
    l->values[i] /= n;
    l->slack[i] = l->slack[i] / n + fabs(l->values[i]) * rounding * 1.001;
  }
  return l;
}

/* The first element of [from, to) that is not the sum over `members`; `to`: none. `data` begins with element 0. */
static uint64_t first_wrong(world *w, plan *p, uint64_t members, const uint8_t *data, uint64_t from,
                            uint64_t to) {
  const literal *l = literal_of(w, p, members);
  for (uint64_t i = from, k; i < to; i++) {
    const uint8_t *at = data + i * p->width;
    while (i - from >= PERIOD && i < to && (k = repeated(p, at, to - i)) > 0) /* also right */
      i += k, at += k * p->width;
    for (uint64_t end = i + PERIOD; i < to && i < end; i++, at += p->width) {
      k = i % PERIOD;
      if (p->own || p->dtype == MLFAB_I64) {
        if (memcmp(at, l->bytes + k * p->width, p->width)) return i;
        continue;
      }
      double x = get(at, p->dtype, 0), v = l->values[k];
      if (isnan(v) ? !isnan(x) : !(fabs(x - v) <= l->slack[k])) return i;
    }
    i--;
  }
  return to;
}

static uint64_t hash_bytes(uint64_t hash, const uint8_t *data, uint64_t bytes) {
  for (uint64_t word; bytes >= sizeof word; bytes -= sizeof word, data += sizeof word) {
    memcpy(&word, data, sizeof word);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
  }
  for (uint64_t i = 0; i < bytes; i++) hash = (hash ^ data[i]) * 0x100000001b3ull;
  return mix(hash);
}

/* All ranks have the same bits, and in every epoch with the same members. */
static void check_bits(world *w, uint32_t i, const plan *p, uint64_t members, const uint8_t *data) {
  uint64_t hash = hash_bytes(p->number, data, p->count * p->width);
  uint32_t at = p->number % CACHE;
  w->outcome = mix(w->outcome ^ hash ^ now(w) ^ i);
  if (w->seen[at].number == p->number + 1 && w->seen[at].members == members) {
    if (w->seen[at].hash != hash)
      broken(w, "rank %u: call %d has other bits than elsewhere", i, (int)p->number);
    return;
  }
  w->seen[at].number = p->number + 1;
  w->seen[at].members = members;
  w->seen[at].hash = hash;
}

/* Whose data a call has: of those that have finished, what they had called before. */
static uint64_t givers(const world *w, uint32_t i, uint64_t number) {
  uint64_t set = w->ranks[i].members;
  for (uint32_t r = 0; r < w->workers; r++)
    if (w->ranks[r].finished && number >= w->ranks[r].last) set &= ~bit(r);
  return set;
}

static void check_sum(world *w, uint32_t i, open_call *c, const uint8_t *data) {
  plan *p = &c->plan;
  uint64_t set = givers(w, i, p->number), from = 0, to = p->count;
  if (p->kind == REDUCE_SCATTER) {
    for (uint32_t r = 0; r < i; r++) from += p->blocks[r];
    to = from + p->blocks[i];
  }
  uint64_t wrong = first_wrong(w, p, set, data, from, to), first = wrong;
  for (uint64_t k = all_of(w) + 1; wrong < to && w->sure && !w->exact && k-- > 1;) {
    set = k;
    if (set >> i & 1) wrong = first_wrong(w, p, set, data, from, to);
  }
  if (wrong == to) {
    if (!w->exact) w->ranks[i].members = set;
    if (p->kind == ALLREDUCE) check_bits(w, i, p, set, data);
    return;
  }
  broken(w,
         "rank %u: call %d (kind %d, algorithm %d, type %d, operation %d, reducer %d, %d elements "
         "of %u) is wrong at element %d",
         i, (int)p->number, (int)p->kind, p->algorithm, p->dtype, p->op, (int)p->own, (int)p->count,
         p->width, (int)first);
}

/* Bytes as they were brought: of the root, or each rank's block. */
static void check_copies(world *w, uint32_t i, open_call *c) {
  plan *p = &c->plan;
  uint8_t x[64];
  uint64_t at = 0;
  for (uint32_t r = 0; r < w->workers && p->kind == ALLGATHER; r++) {
    for (uint64_t k = 0, n; k < p->blocks[r]; k++, at++) {
      if (k >= PERIOD && (n = repeated(p, c->memory + at * p->width, p->blocks[r] - k)) > 0) {
        k += n - 1, at += n - 1;
        continue;
      }
      fill(p, r, at, x);
      if (memcmp(c->memory + at * p->width, x, p->width))
        broken(w, "rank %u: call %d: element %d of the allgather is wrong", i, (int)p->number,
               (int)at);
    }
  }
  for (uint64_t k = 0, n; k < p->count && p->kind == BROADCAST; k++) {
    if (k >= PERIOD && (n = repeated(p, c->memory + k, p->count - k)) > 0) {
      k += n - 1;
      continue;
    }
    fill(p, (uint32_t)p->root, k, x);
    if (c->memory[k] != x[0])
      broken(w, "rank %u: call %d: byte %d of the broadcast is wrong", i, (int)p->number, (int)k);
  }
}

static uint64_t memory_bytes_of(const plan *p) {
  return (p->count * p->width + BUFS * 128) / 64 * 64 + 128;
}

/* The buffers of a list lie apart, backwards. */
static mlfab_vec *vecs_of(const plan *p, uint8_t *memory, mlfab_vec *vecs) {
  uint8_t *end = memory + memory_bytes_of(p) - 64;
  for (uint32_t i = 0; i < p->nbufs; i++) {
    uint64_t bytes = (p->lengths[i] * p->width + 63) / 64 * 64;
    end -= bytes;
    vecs[i] = (mlfab_vec){end, p->lengths[i]};
    end -= 64;
  }
  return vecs;
}

/* As one array, as the literal has it. */
static void check_success(world *w, uint32_t i, open_call *c) {
  plan *p = &c->plan;
  if (p->kind != ALLREDUCE && p->kind != REDUCE_SCATTER) {
    check_copies(w, i, c);
    return;
  }
  if (p->kind == REDUCE_SCATTER) {
    check_sum(w, i, c, c->memory);
    return;
  }
  mlfab_vec vecs[BUFS];
  if (p->nbufs == 1) {
    check_sum(w, i, c, vecs_of(p, c->memory, vecs)->data);
    return;
  }
  uint8_t *data = malloc(p->count * p->width + 1);
  uint64_t at = 0;
  assert_non_null(data);
  vecs_of(p, c->memory, vecs);
  for (uint32_t k = 0; k < p->nbufs; k++) {
    if (vecs[k].count) memcpy(data + at, vecs[k].data, vecs[k].count * p->width);
    at += vecs[k].count * p->width;
  }
  check_sum(w, i, c, data);
  free(data);
}

/* ---- nodes on the simulator's transport */

/* env.user is the rank, so the clock is not its business: nodes are told the time. */
static void *take(void *user, size_t bytes) {
  ((rank *)user)->bytes += bytes;
  return malloc(bytes);
}
static void give(void *user, void *memory, size_t bytes) {
  rank *r = user;
  if (!memory) return;
  assert_true(r->bytes >= bytes);
  r->bytes -= bytes;
  free(memory);
}
static uint64_t no_clock(void *user) {
  (void)user;
  return 0;
}
static void open_node(world *w, uint32_t i) {
  rank *r = &w->ranks[i];
  mlfab_config c = w->config;
  mlfab_error error;
  mlfab_env env = {.size = sizeof env,
                   .allocate = take,
                   .release = give,
                   .clock = no_clock,
                   .log = driven_log,
                   .user = r};
  c.env = &env;
  c.workers = w->workers;
  c.rank = (int32_t)(i < w->workers ? i : i - w->workers);
  r->begins = r->life > 0;
  c.seed = w->seed + i + 1000 * r->life++;
  if (c.dedicated) c.roles = i < w->workers ? MLFAB_ROLE_WORKER : MLFAB_ROLE_SERVER;
  snprintf(c.coordinator, sizeof c.coordinator, "sim:%u", c.dedicated ? w->workers : 0);
  if (driven_open(w->sim, i, &c, &r->node, &r->link, &error)) fail_msg("%s", error.text);
}

static void drop_calls(rank *r) {
  for (uint32_t k = 0; k < r->nopen; k++) free(r->open[k].memory);
  r->nopen = 0;
  r->calls = 0;
}

/* Everything of it is gone, without a word. */
static void kill_node(world *w, uint32_t i) {
  rank *r = &w->ranks[i];
  if (!r->node) return;
  driven_kill(&r->node, r->link);
  drop_calls(r);
  r->push = r->pull = 0;
  if (r->bytes) broken(w, "rank %u: %d bytes are never given back", i, (int)r->bytes);
}

static void turn(world *w) {
  mlfab_sim_run(w->sim, w->slice_ns);
  for (uint32_t i = 0; i < w->nodes; i++)
    if (w->ranks[i].node) driven_pump(w->ranks[i].node, w->ranks[i].link, now(w));
}

static void init_world(world *w, uint32_t workers, uint64_t seed) {
  memset(w, 0, sizeof *w);
  mlfab_config_init(&w->config);
  w->workers = workers;
  w->seed = seed;
  w->dice = mix(seed);
  w->config.dedicated = 1;
  w->config.servers = 1;
  if (seed % 4 == 1) strcpy(w->config.key, "the-key-of-this-test");
  w->config.heartbeat_ns = 100 * MS;
  w->config.eager_bytes = 4096;
  w->nodes = workers + 1;
  w->slice_ns = 50000;
  w->timeout_ns = 20 * SECOND;
  w->depth = 4;
  w->most = 300;
  w->think_ns = MS;
  w->make = make_any;
}

static void init_planned(world *w, uint32_t workers, uint64_t seed, uint32_t servers,
                         int dedicated) {
  init_world(w, workers, seed);
  w->planned = 1;
  w->make = make_planned;
  w->config.servers = servers;
  w->config.dedicated = (uint32_t)dedicated;
  w->nodes = workers + (dedicated ? servers : 0);
  assert_true(w->nodes <= NODES);
}

static void wait_ready(world *w, uint32_t i) {
  mlfab_error error;
  uint64_t since = now(w);
  for (int ready = 0; ready != 1; turn(w)) {
    ready = mlfab_node_ready(w->ranks[i].node, &error);
    if (ready < 0) fail_msg("node %u: %s", (unsigned)i, error.text);
    assert_true(now(w) - since < 30 * SECOND);
  }
}

static void open_world(world *w, const mlfab_sim_options *sim) {
  mlfab_sim_options calm = *sim;
  calm.size = sizeof calm;
  calm.hosts = w->nodes;
  calm.seed = w->seed;
  assert_int_equal(mlfab_sim_create(&calm, &w->sim), 0);
  for (uint32_t i = 0; i < w->nodes; i++) open_node(w, i);
  for (uint32_t i = 0; i < w->nodes; i++) wait_ready(w, i);
  for (uint32_t i = 0; i < w->workers; i++) w->ranks[i].members = all_of(w);
}

static void close_world(world *w) {
  for (uint32_t i = 0; i < w->nodes; i++) kill_node(w, i);
  for (uint32_t k = 0; k < CACHE; k++) forget_literal(&w->literals[k]);
  mlfab_sim_destroy(&w->sim);
}

/* ---- calls */

static int call_node(world *w, rank *r, open_call *c, const mlfab_collective *o) {
  plan *p = &c->plan;
  mlfab_vec vecs[BUFS];
  switch (p->kind) {
    case ALLREDUCE:
      vecs_of(p, c->memory, vecs);
      if (p->plain)
        return SUBMIT(
            r->node, now(w), &c->request, ALLREDUCE, .vecs = vecs, .n = 1, .dtype = p->dtype,
            .options = (&(mlfab_collective){.size = sizeof *o, .timeout_ns = o->timeout_ns}));
      return SUBMIT(r->node, now(w), &c->request, ALLREDUCE, .vecs = vecs, .n = p->nbufs,
                    .dtype = p->dtype, .options = o);
    case REDUCE_SCATTER:
      return SUBMIT(r->node, now(w), &c->request, REDUCE_SCATTER, .data = c->memory,
                    .counts = p->blocks, .dtype = p->dtype, .options = o);
    case ALLGATHER:
      return SUBMIT(r->node, now(w), &c->request, ALLGATHER, .data = c->memory, .counts = p->blocks,
                    .dtype = p->dtype, .options = o);
    default:
      return SUBMIT(r->node, now(w), &c->request, BROADCAST, .root = p->root, .data = c->memory,
                    .count = p->count, .options = o);
  }
}

/* What this rank brings; of an allgather and a broadcast nothing but its own. */
static void fill_call(uint32_t i, open_call *c) {
  const plan *p = &c->plan;
  mlfab_vec vecs[BUFS];
  uint64_t e = 0;
  memset(c->memory, 0x5a, c->bytes);
  if (p->kind == ALLREDUCE) {
    vecs_of(p, c->memory, vecs);
    for (uint32_t b = 0; b < p->nbufs; e += vecs[b++].count)
      fill_many(p, i, e, vecs[b].count, vecs[b].data);
  } else if (p->kind == REDUCE_SCATTER || (p->kind == BROADCAST && (uint32_t)p->root == i)) {
    fill_many(p, i, 0, p->count, c->memory);
  } else if (p->kind == ALLGATHER) {
    for (uint32_t r = 0; r < i; r++) e += p->blocks[r];
    fill_many(p, i, e, p->blocks[i], c->memory + e * p->width);
  }
}

static void note_failure(world *w, uint32_t i, int32_t code, int32_t blamed) {
  rank *r = &w->ranks[i];
  if (r->nfailures < FAILURES) r->failures[r->nfailures] = (failure){code, blamed, now(w)};
  r->nfailures++;
  r->calls = 0;
  r->begins = code == MLFAB_ERR_AGAIN || (r->begins && code == MLFAB_ERR_TIMEOUT);
  w->outcome = mix(w->outcome ^ now(w) ^ (uint64_t)(uint32_t)code << 32 ^ i);
  if (blamed < 0 || blamed >= (int32_t)w->workers) return;
  if (code == MLFAB_ERR_PEER_DEAD || code == MLFAB_ERR_PEER_CLOSED || code == MLFAB_ERR_ARGUMENT)
    r->members &= ~bit((uint32_t)blamed);
  if (code == MLFAB_ERR_AGAIN) r->members |= bit((uint32_t)blamed);
}

/* Makes the call of this plan. Returns 0, or its error.
 *
 * The tag: no later call is the same as the first call with a process that is back. A worker that withdraws a call in that moment
 * does not hear of the process. If no result depends on that (`sure`), the first call after any failure has the tag. */
static int begin_plan(world *w, uint32_t i, const plan *p) {
  rank *r = &w->ranks[i];
  open_call *c = &r->open[r->nopen];
  *c = (open_call){.plan = *p, .began_ns = now(w), .bytes = memory_bytes_of(p)};
  mlfab_collective o = {.size = sizeof o,
                        .op = (uint32_t)p->op,
                        .algorithm = (uint32_t)p->algorithm,
                        .timeout_ns = w->timeout_ns,
                        .tag = r->calls == 0 && (r->begins || w->sure)};
  if (p->own) {
    o.reduce = p->own == AFFINE ? compose : exclusive_or;
    o.user = (void *)(uintptr_t)p->width;
    o.element_bytes = p->width;
    o.ordered = p->own == AFFINE;
  }
  c->memory = aligned_alloc(64, (size_t)c->bytes);
  assert_non_null(c->memory);
  fill_call(i, c);
  int code = call_node(w, r, c, &o);
  if (code == MLFAB_ERR_UNSUPPORTED && o.algorithm) {
    c->plan.algorithm = MLFAB_ALGORITHM_AUTO; /* so do all others */
    o.algorithm = MLFAB_ALGORITHM_AUTO;
    if (w->deaths && c->plan.numbers == ROUGH) {
      c->plan.numbers = EXACT;
      fill_call(i, c);
    }
    code = call_node(w, r, c, &o);
  }
  if (code) {
    free(c->memory);
    return code;
  }
  r->nopen++;
  r->calls++;
  return 0;
}

static void begin(world *w, uint32_t i) {
  rank *r = &w->ranks[i];
  mlfab_error error;
  plan p = w->make(w, r->calls, w->sure ? w->sure : r->members);
  int code = begin_plan(w, i, &p);
  if (!code) return;
  mlfab_node_last_error(r->node, &error);
  if (w->harsh && code == MLFAB_ERR_PEER_DEAD && error.is_server) {
    kill_node(w, i); /* server 0 is dead to it for good: the process ends */
    return;
  }
  if (error.code != code) broken(w, "rank %u: %s: \"%s\"", i, mlfab_error_name(code), error.text);
  if (r->nopen) /* what was owed would have been seen by these */
    broken(w, "rank %u: a call among others returns %s", i, mlfab_error_name(code));
  note_failure(w, i, code, error.rank);
}

static uint64_t live_of(const world *w) {
  uint64_t live = 0;
  for (uint32_t i = 0; i < w->workers; i++) live |= (uint64_t)(w->ranks[i].node != NULL) << i;
  return live;
}

/* Looks at all open calls. Those that fail do so together, and none stays. A planned sum tells whose data it has: it is a
 * success if all who live are in it. */
static void finish(world *w, uint32_t i) {
  rank *r = &w->ranks[i];
  int32_t code = 0, blamed = 0;
  uint32_t kept = 0;
  for (uint32_t k = 0; k < r->nopen; k++) {
    open_call *c = &r->open[k];
    mlfab_result result = {0};
    int done = 0;
    if (mlfab_node_test(r->node, c->request, &done, &result)) broken(w, "rank %u: no request", i);
    if (!done && now(w) - c->began_ns > w->timeout_ns + 2 * SECOND)
      broken(w, "rank %u: call %d hangs", i, (int)c->plan.number);
    if (!done) {
      if (code) broken(w, "rank %u: call %d outlives a failure", i, (int)c->plan.number);
      if (kept < k) r->open[kept] = *c;
      kept++;
      continue;
    }
    if (code && (result.status != code || result.rank != blamed) && result.status)
      broken(w, "rank %u: two failures at once, %s and %s", i, mlfab_error_name(code),
             mlfab_error_name(result.status));
    if (result.status) {
      if (kept) broken(w, "rank %u: a call outlives a failure", i);
      code = result.status;
      blamed = result.rank;
    } else {
      check_success(w, i, c);
      r->successes += !w->planned || r->members == live_of(w);
      r->begins = 0;
    }
    free(c->memory);
  }
  r->nopen = kept;
  if (code) note_failure(w, i, code, blamed);
}

/* ---- a model beside: pushes of 1 and pulls, now and then */

static void start_model(world *w) {
  mlfab_request requests[RANKS];
  for (uint32_t i = 0; i < w->workers; i++) {
    rank *r = &w->ranks[i];
    mlfab_buf b = {7, 0, r->weights, MODEL};
    for (int k = 0; k < MODEL; k++) r->gradient[k] = 1;
    assert_int_equal(
        SUBMIT(r->node, 0, NULL, TENSOR_ADD, .tensor = 7, .dtype = MLFAB_I64, .count = MODEL), 0);
    assert_int_equal(
        SUBMIT(r->node, now(w), &requests[i], MODEL_START, .options = NULL, .bufs = &b, .n = 1), 0);
  }
  for (uint32_t i = 0; i < w->workers; i++) {
    mlfab_result result;
    for (int done = 0; !done; turn(w))
      assert_int_equal(mlfab_node_test(w->ranks[i].node, requests[i], &done, &result), 0);
    assert_int_equal(result.status, 0);
  }
}

static void end_request(world *w, uint32_t i, mlfab_request *request, const char *what) {
  mlfab_result result = {0};
  int done = 0;
  if (!*request) return;
  if (mlfab_node_test(w->ranks[i].node, *request, &done, &result) || result.status)
    broken(w, "rank %u: a %s ends with %s", i, what, mlfab_error_name(result.status));
  if (done) *request = 0;
}

static void touch_model(world *w, uint32_t i) {
  rank *r = &w->ranks[i];
  mlfab_buf update = {7, 0, r->gradient, MODEL}, weights = {7, 0, r->weights, MODEL};
  end_request(w, i, &r->push, "push");
  end_request(w, i, &r->pull, "pull");
  if (!r->push && below(w, 200) == 0) {
    if (SUBMIT(r->node, now(w), &r->push, PUSH, .bufs = &update, .n = 1)) broken(w, "no push");
    r->pushed++;
  }
  if (!r->pull && below(w, 200) == 0 &&
      SUBMIT(r->node, now(w), &r->pull, PULL, .bufs = &weights, .n = 1))
    broken(w, "no pull");
}

static void check_model(world *w) {
  uint64_t pushed = 0;
  for (uint32_t i = 0; i < w->workers; i++) {
    rank *r = &w->ranks[i];
    for (uint64_t end = now(w) + 20 * SECOND; (r->push || r->pull) && !w->failure[0]; turn(w)) {
      end_request(w, i, &r->push, "push");
      end_request(w, i, &r->pull, "pull");
      if (now(w) > end) broken(w, "rank %u: a push or pull hangs", i);
    }
    pushed += r->pushed;
  }
  rank *r = &w->ranks[0];
  mlfab_buf weights = {7, 0, r->weights, MODEL};
  if (w->failure[0]) return;
  assert_int_equal(SUBMIT(r->node, now(w), &r->pull, PULL, .bufs = &weights, .n = 1), 0);
  for (uint64_t end = now(w) + 20 * SECOND; r->pull && now(w) < end; turn(w))
    end_request(w, 0, &r->pull, "last pull");
  for (int k = 0; k < MODEL; k++)
    if ((uint64_t)r->weights[k] != pushed)
      broken(w, "the model holds %d, %d were pushed", (int)r->weights[k], (int)pushed);
}

/* ---- driving */

static void live_on(world *w) {
  turn(w);
  for (uint32_t i = 0; i < w->workers && !w->failure[0]; i++) {
    rank *r = &w->ranks[i];
    if (!r->node) continue;
    finish(w, i);
    if (w->pushes) touch_model(w, i);
    if (r->silent || r->nopen >= w->depth || r->calls >= w->goal || now(w) < r->next_ns) continue;
    begin(w, i);
    r->next_ns = now(w) + below(w, w->think_ns + 1);
  }
}

static int settled(const world *w) {
  for (uint32_t i = 0; i < w->workers; i++) {
    const rank *r = &w->ranks[i];
    if (r->node && !r->silent && (r->nopen || r->calls < w->goal)) return 0;
  }
  return 1;
}

/* Everybody makes calls until each has made `calls` of them since its last failure, and all have ended. */
static void run_calls(world *w, uint64_t calls, uint64_t limit_ns) {
  uint64_t end = now(w) + limit_ns;
  w->goal = calls;
  for (uint32_t i = 0; i < w->workers; i++)
    if (w->ranks[i].node && w->ranks[i].calls > w->goal) w->goal = w->ranks[i].calls;
  while (!settled(w) && !w->failure[0]) {
    live_on(w);
    if (now(w) > end) broken(w, "%d calls are not made in time", (int)calls);
  }
}

/* `more` calls by everybody. Nobody may be ahead by a failure that another has not seen. */
static void run_more(world *w, uint64_t more, uint64_t limit_ns) {
  uint64_t most = 0;
  for (uint32_t i = 0; i < w->workers; i++)
    if (w->ranks[i].node && w->ranks[i].calls > most) most = w->ranks[i].calls;
  run_calls(w, most + more, limit_ns);
}

/* Everybody goes on calling until everybody of `who` has seen `n` failures. */
static void run_to_failure(world *w, uint64_t who, uint32_t n, uint64_t limit_ns) {
  uint64_t end = now(w) + limit_ns, left = who;
  w->goal = UINT64_MAX;
  while (left && !w->failure[0]) {
    live_on(w);
    for (uint32_t i = 0; i < w->workers; i++)
      if (w->ranks[i].nfailures >= n) left &= ~bit(i);
    if (left && now(w) > end)
      broken(w, "ranks %llx have not heard of a failure in time", (unsigned long long)left);
  }
}

static void expect_failures(world *w, uint64_t who, uint32_t n, int32_t code, int32_t blamed) {
  for (uint32_t i = 0; i < w->workers; i++) {
    const rank *r = &w->ranks[i];
    const failure *f = &r->failures[n ? n - 1 : 0];
    if (!(who >> i & 1)) continue;
    if (r->nfailures != n)
      broken(w, "rank %u has seen %u failures, not %u (the last: %s, rank %d)", i, r->nfailures, n,
             r->nfailures ? mlfab_error_name(r->failures[r->nfailures - 1].code) : "none",
             r->nfailures ? (int)r->failures[r->nfailures - 1].blamed : 0);
    if (n && r->nfailures == n && (f->code != code || f->blamed != blamed))
      broken(w, "rank %u fails with %s, rank %d; not %s, rank %d", i, mlfab_error_name(f->code),
             (int)f->blamed, mlfab_error_name(code), (int)blamed);
  }
}

static void end_test(world *w) {
  close_world(w);
  if (w->failure[0]) fail_msg("MLFAB_SEED=%llu: %s", (unsigned long long)w->seed, w->failure);
}

/* ---- what works */

TEST(test_sizes) {
  static const uint32_t sizes[] = {1, 2, 3, 4, 5, 7, 8, 13, 16, 33, 64};
  static world w;
  for (uint32_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    init_world(&w, sizes[k], 100 + k);
    w.most = sizes[k] < 10 ? 100000 : 2000;
    w.depth = 1 + k % 5 * 3;
    if (k % 2) w.config.chunk_bytes = 4096;
    if (sizes[k] > 32) w.slice_ns = 200000;
    mlfab_sim_options sim = {.latency_jitter = 0.9, .rate_bytes_per_s = 200000000};
    open_world(&w, &sim);
    run_calls(&w, sizes[k] < 10 ? 120 : sizes[k] < 32 ? 60 : 25, 200 * SECOND);
    expect_failures(&w, all_of(&w), 0, 0, 0);
    end_test(&w);
  }
}

TEST(test_planned_sizes) {
  static const uint32_t sizes[] = {1, 2, 3, 5, 8, 13, 33, 64};
  static world w;
  if (!WITH_MODEL) skip();
  for (uint32_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    for (uint32_t scheduled = 0; scheduled < 2; scheduled++) {
      uint32_t servers = sizes[k] == 64 ? 2 : 1 + (k + scheduled) % 3;
      init_planned(&w, sizes[k], k + 1, servers > sizes[k] ? sizes[k] : servers, k % 2);
      if (scheduled) w.config.scheduler = MLFAB_SCHEDULER_BESIDE;
      w.most = scheduled ? 20011 : 611;
      w.depth = 1;
      open_world(&w, &(mlfab_sim_options){.latency_jitter = 0.0});
      run_calls(&w, 3, 200 * SECOND);
      expect_failures(&w, all_of(&w), 0, 0, 0);
      end_test(&w);
    }
  }
}

/* Links that break, slow and paused hosts, partitions too short for anybody to be taken for dead: no call
 * fails. Two runs of a seed are one and the same. */
static uint64_t run_faulty(uint64_t seed) {
  static world w;
  uint64_t hash;
  init_world(&w, 2 + (uint32_t)(mix(seed) % 7), seed);
  w.config.heartbeat_ns = 500 * MS;
  w.config.chunk_bytes = 1024u << below(&w, 8);
  w.timeout_ns = 60 * SECOND;
  w.slice_ns = 200000;
  w.depth = 1 + (uint32_t)below(&w, DEPTH);
  w.most = below(&w, 3) ? 3000 : 60000;
  w.think_ns = below(&w, 3) ? 2 * MS : 100 * MS;
  w.pushes = below(&w, 3) == 0;
  double frames = 4.0 + 8.0 * (double)w.most / w.config.chunk_bytes;
  mlfab_sim_options sim = {.latency_ns = 20000 + below(&w, MS),
                           .latency_jitter = 0.5,
                           .rate_bytes_per_s = 20000000ull << below(&w, 6)};
  open_world(&w, &sim);
  if (w.pushes) start_model(&w);
  sim.loss = sim.duplicate = 0.1 / frames;
  sim.reorder = 0.05;
  sim.partition = 0.5;
  sim.partition_ns = 200 * MS;
  sim.slow = sim.pause = 0.3;
  sim.pause_ns = 200 * MS;
  mlfab_sim_set_faults(w.sim, &sim);
  run_calls(&w, 100, 300 * SECOND);
  mlfab_sim_set_faults(w.sim, NULL);
  expect_failures(&w, all_of(&w), 0, 0, 0);
  if (w.pushes && !w.failure[0]) check_model(&w);
  mlfab_sim_trace_hash(w.sim, &hash);
  hash = mix(hash ^ w.outcome);
  end_test(&w);
  return hash;
}

TEST(test_faulty_links) {
  if (test_seed() || !WITH_MODEL) skip();
  for (uint64_t seed = seeds_first(), end = seed + test_cases_from(3, 30); seed < end; seed++) {
    uint64_t hash = run_faulty(seed);
    if (seed % 10 == 1 && run_faulty(seed) != hash)
      fail_msg("seed %d runs otherwise the second time", (int)seed);
  }
}

/* After a while calls take no memory any more, and hold no more than before. */
TEST(test_steady) {
  static world w;
  mlfab_stats before[RANKS], after;
  for (int k = 0; k < (test_scale() < 1.0 ? 1 : 3); k++) {
    init_world(&w, 5, 7 + (uint64_t)k);
    w.make = make_sum;
    w.most = k == 0 ? 40 : k == 1 ? 3000 : 100000;
    w.depth = k == 2 ? 1 : 4;
    w.think_ns = 0;
    open_world(&w, &(mlfab_sim_options){.latency_jitter = 0.0});
    uint64_t warm = k == 2 ? 40 : 1000; /* what is under way at most comes by chance */
    if (k == 2) run_calls(&w, warm / 2, 100 * SECOND); /* so do the calls that follow a rest */
    run_calls(&w, warm, 100 * SECOND);
    for (uint32_t i = 0; i < w.workers; i++)
      assert_int_equal(mlfab_node_stats(w.ranks[i].node, &before[i], sizeof before[i]), 0);
    run_calls(&w, warm + 100, 100 * SECOND);
    for (uint32_t i = 0; i < w.workers; i++) {
      assert_int_equal(mlfab_node_stats(w.ranks[i].node, &after, sizeof after), 0);
      if (after.allocations != before[i].allocations)
        broken(&w, "rank %u: %d allocations in 100 calls of %d elements", i,
               (int)(after.allocations - before[i].allocations), (int)w.most);
      if (after.memory_bytes > before[i].memory_bytes) broken(&w, "rank %u has grown", i);
      if (after.collectives != warm + 100 || after.collectives_failed ||
          after.collective_epochs != 1)
        broken(&w, "rank %u counts %d collectives, %d failures, %d epochs", i,
               (int)after.collectives, (int)after.collectives_failed, (int)after.collective_epochs);
    }
    end_test(&w);
  }
}

/* ---- what fails */

enum { PLANNED = 1000 }; /* seeds above it: sums of the planned tree */

static void failing_world(world *w, uint32_t workers, uint64_t seed) {
  if (seed <= PLANNED) {
    init_world(w, workers, seed);
  } else {
    init_planned(w, workers, seed, 1 + (uint32_t)seed % 2, 1);
    if (seed % 4 == 0) w->config.scheduler = MLFAB_SCHEDULER_BESIDE;
  }
  w->deaths = 1;
  w->depth = 1 + (uint32_t)below(w, 6);
  w->most = below(w, 2) ? 5000 : 60000;
  w->config.chunk_bytes = 4096u << below(w, 6);
  w->config.timeout_ns = 4 * SECOND; /* one that is back waits for a tenth of it */
  mlfab_sim_options sim = {.latency_jitter = 0.5, .rate_bytes_per_s = 20000000ull << below(w, 5)};
  open_world(w, &sim);
  if (seed % 2) run_calls(w, 3, 60 * SECOND);
}

/* All go on calling for a random while. */
static void run_a_while(world *w, uint64_t ns) {
  w->goal = UINT64_MAX;
  for (uint64_t end = now(w) + below(w, ns + 1); now(w) < end && !w->failure[0];) live_on(w);
}

/* All of these hear of their n-th failure, once, within this time, and go on. */
static void all_fail(world *w, uint64_t all, uint32_t n, uint64_t within_ns, int32_t code,
                     uint32_t blamed) {
  run_to_failure(w, all, n, within_ns);
  run_more(w, 10, 60 * SECOND);
  expect_failures(w, all, n, code, (int32_t)blamed);
}
#define BEATS(w) (8 * (w)->config.heartbeat_ns)

/* Scenes: something happens to rank `who`, or it does something. */

/* It dies inside a call. The others hear it within 8 heartbeats, once, and go on; a new process takes part
 * again: they hear that once, too. */
static void crash(world *w, uint64_t seed, uint32_t who) {
  uint64_t others = all_of(w) & ~bit(who);
  run_a_while(w, 20 * MS);
  kill_node(w, who);
  all_fail(w, others, 1, BEATS(w), MLFAB_ERR_PEER_DEAD, who);
  if (w->failure[0] || seed % 2 == 0) return;
  open_node(w, who);
  wait_ready(w, who);
  all_fail(w, others, 2, 60 * SECOND, MLFAB_ERR_AGAIN, who);
  expect_failures(w, bit(who), 0, 0, 0);
}

/* It dies or closes before anybody's first call: the others hear it then, once. */
static void lost_early(world *w, uint64_t seed, uint32_t who) {
  uint64_t later = now(w) + 10 * w->config.heartbeat_ns;
  int dies = seed % 4 == 0;
  if (dies) {
    kill_node(w, who);
  } else {
    mlfab_node_leave(w->ranks[who].node, now(w));
    w->ranks[who].silent = 1;
  }
  w->goal = 0;
  while (now(w) < later && !w->failure[0]) live_on(w);
  all_fail(w, all_of(w) & ~bit(who), 1, BEATS(w),
           dies ? MLFAB_ERR_PEER_DEAD : MLFAB_ERR_PEER_CLOSED, who);
}

/* It is back before anybody noticed that it was away. */
static void quick_restart(world *w, uint64_t seed, uint32_t who) {
  (void)seed;
  run_a_while(w, 20 * MS);
  kill_node(w, who);
  open_node(w, who);
  for (uint64_t end = now(w) + 30 * SECOND;
       !w->failure[0] && mlfab_node_ready(w->ranks[who].node, NULL) != 1;) {
    w->ranks[who].silent = 1;
    live_on(w);
    if (now(w) > end) broken(w, "rank %u is not let in again", who);
  }
  w->ranks[who].silent = 0;
  run_to_failure(w, all_of(w) & ~bit(who), 2, 60 * SECOND); /* it is dead; it takes part */
  run_more(w, 10, 60 * SECOND);
  for (uint32_t i = 0; i < w->workers; i++) {
    const rank *r = &w->ranks[i];
    if (i == who || w->failure[0]) continue;
    if (r->failures[0].blamed != (int32_t)who || r->nfailures > 2)
      broken(w, "rank %u: %u failures, the first %s, rank %d", i, r->nfailures,
             mlfab_error_name(r->failures[0].code), (int)r->failures[0].blamed);
    if (r->members != all_of(w)) broken(w, "rank %u does not know all", i);
  }
}

/* It makes no calls: the others' deadline names it, and so does its own next call. */
static void forgets(world *w, uint64_t seed, uint32_t who) {
  run_more(w, 2, 60 * SECOND);
  uint64_t since = now(w);
  w->timeout_ns = SECOND + below(w, SECOND);
  w->ranks[who].silent = 1;
  /* If nobody needs its part, a call ends all the same. The call sixteen later fails. */
  run_to_failure(w, all_of(w) & ~bit(who), 1, 20 * w->timeout_ns);
  if (seed % 2 && !w->failure[0]) { /* the new epoch is there before its call */
    uint64_t end = now(w) + w->timeout_ns / 2;
    while (now(w) < end && !w->failure[0]) live_on(w);
  }
  w->ranks[who].silent = 0;
  run_to_failure(w, bit(who), 1, SECOND);
  run_more(w, 5, 60 * SECOND);
  expect_failures(w, all_of(w), 1, MLFAB_ERR_TIMEOUT, (int32_t)who);
  assert_true(w->failure[0] || now(w) - since < 20 * SECOND);
}

/* It is only slow, which fails nothing. */
static void slow_rank(world *w, uint64_t seed, uint32_t who) {
  (void)seed;
  w->timeout_ns = 2 * SECOND;
  run_more(w, 1, 60 * SECOND);
  for (int k = 0; k < 3; k++) {
    w->ranks[who].next_ns = now(w) + 1600 * MS;
    w->depth = 1;
    run_more(w, 2, 60 * SECOND);
  }
  mlfab_sim_set_rate(w->sim, who, 2000000, 1000000);
  w->timeout_ns = 60 * SECOND;
  run_more(w, 5, 300 * SECOND);
  expect_failures(w, all_of(w), 0, 0, 0);
}

/* It calls another thing than the others. */
static void differs(world *w, uint64_t seed, uint32_t who) {
  uint64_t how = seed / 2 % 5;
  w->make = make_sum;
  w->depth = 1;
  w->most = 1 + below(w, below(w, 2) ? 30 : 30000);
  run_calls(w, 2, 60 * SECOND);
  plan p = make_sum(w, w->ranks[who].calls, w->ranks[who].members);
  if (how == 0) p.count = ++p.lengths[0];
  if (how == 1) p.op = MLFAB_OP_MAX;
  if (how == 2) p.dtype = MLFAB_F64;
  if (how >= 3) p.kind = BROADCAST, p.width = 1, p.root = how == 4;
  if (!w->failure[0]) assert_int_equal(begin_plan(w, who, &p), 0);
  all_fail(w, all_of(w), 1, BEATS(w), MLFAB_ERR_MISMATCH, who);
}

/* A rank says goodbye. Its calls still work everywhere. In later calls each other rank hears, once, that it has left. */
static void leaves(world *w, uint64_t seed, uint32_t who) {
  rank *r = &w->ranks[who];
  int early = seed % 4 < 2;
  w->most = 3000;
  w->goal = 5 + below(w, 20);
  while (!w->failure[0] && (r->calls < w->goal || (!early && r->nopen))) live_on(w);
  mlfab_node_leave(r->node, now(w));
  run_calls(w, w->goal, 60 * SECOND);
  expect_failures(w, all_of(w), 0, 0, 0);
  r->silent = 1;
  all_fail(w, all_of(w) & ~bit(who), 1, BEATS(w), MLFAB_ERR_PEER_CLOSED, who);
}

static void cancels(world *w, uint64_t seed, uint32_t who) {
  rank *r = &w->ranks[who];
  (void)seed;
  run_a_while(w, 10 * MS);
  w->goal = UINT64_MAX;
  do {
    live_on(w);
    finish(w, who); /* what is over cannot be cancelled */
  } while (r->nopen == 0 && !w->failure[0]);
  if (!w->failure[0])
    assert_int_equal(mlfab_node_cancel(r->node, r->open[below(w, r->nopen)].request, now(w)), 0);
  all_fail(w, all_of(w), 1, BEATS(w), MLFAB_ERR_CANCELLED, who);
}

/* refuse_nan: its call returns it, the others hear of it. */
static void not_finite(world *w, uint64_t seed, uint32_t who) {
  double data[] = {1.0, seed % 2 ? (double)NAN : (double)INFINITY};
  const mlfab_vec vec = {data, 2};
  const mlfab_collective o = {.size = sizeof o, .refuse_nan = 1};
  mlfab_request request;
  mlfab_error error;
  rank *r = &w->ranks[who];
  run_a_while(w, 10 * MS);
  if (!w->failure[0]) {
    finish(w, who);
    assert_int_equal(SUBMIT(r->node, now(w), &request, ALLREDUCE, .vecs = &vec, .n = 1,
                            .dtype = MLFAB_F64, .options = &o),
                     MLFAB_ERR_NOT_FINITE);
    assert_int_equal(mlfab_node_last_error(r->node, &error), 0);
    assert_int_equal(error.rank, who);
    uint32_t had = r->nopen;
    driven_pump(r->node, r->link, now(w)); /* links may have memory of theirs until then */
    finish(w, who);                        /* its other calls are over, too */
    assert_int_equal(r->nopen, 0);
    if (!had) note_failure(w, who, MLFAB_ERR_NOT_FINITE, (int32_t)who);
  }
  all_fail(w, all_of(w), 1, BEATS(w), MLFAB_ERR_NOT_FINITE, who);
}

/* planned: so many seeds more, with the planned tree. Workers: least + seed % spread. early: there were no calls before. */
static void scene(uint32_t seeds, uint32_t planned, uint32_t least, uint32_t spread, int early,
                  void (*play)(world *w, uint64_t seed, uint32_t who)) {
  static world w;
  for (uint64_t k = 1; k <= seeds + (WITH_MODEL ? planned : 0); k++) {
    uint64_t seed = k <= seeds ? k : PLANNED + k - seeds;
    if (early) seed *= 2; /* with an even one there are no calls */
    failing_world(&w, least + (uint32_t)k % spread, seed);
    play(&w, seed, (uint32_t)below(&w, w.workers));
    end_test(&w);
  }
}

TEST(test_crash) { scene(24, 24, 2, 7, 0, crash); }
TEST(test_lost_early) { scene(8, 0, 2, 5, 1, lost_early); }
TEST(test_quick_restart) { scene(10, 0, 2, 5, 0, quick_restart); }
TEST(test_forgets) { scene(10, 6, 2, 6, 0, forgets); }
TEST(test_slow_rank) { scene(4, 0, 4, 4, 0, slow_rank); }
TEST(test_differs) { scene(20, 0, 3, 4, 1, differs); }
TEST(test_leaves) { scene(16, 0, 2, 6, 0, leaves); }
TEST(test_cancels) { scene(16, 4, 2, 6, 0, cancels); }
TEST(test_not_finite) { scene(12, 0, 2, 6, 0, not_finite); }

/* What can do without a worker that has finished. */
static plan make_without(const world *w, uint64_t number, uint64_t members) {
  plan p = make_any(w, number, members);
  p.own = NO_REDUCER;
  if (p.kind == ALLREDUCE || p.kind == REDUCE_SCATTER) p.width = value_bytes(p.dtype);
  return p;
}

static void begin_to_finish(world *w, uint32_t who, mlfab_request *request) {
  rank *r = &w->ranks[who];
  if (r->finished || r->calls < r->last) return;
  r->last = r->calls;
  r->finished = r->silent = 1;
  assert_int_equal(SUBMIT(r->node, now(w), request, FINISH, .timeout_ns = 20 * SECOND), 0);
}

/* Some finish, with calls of theirs open or not, while others are ahead or behind: nothing fails, and each result is
 * that of those who had not finished. In the end one is left, or two. */
static void finish_one_by_one(uint64_t seed, const mlfab_sim_options *faults) {
  static world w;
  uint32_t workers = 2 + (uint32_t)seed % 7;
  mlfab_request requests[RANKS] = {0};
  failing_world(&w, workers, seed);
  if (faults) mlfab_sim_set_faults(w.sim, faults);
  w.make = make_without;
  w.exact = 1;
  w.most = below(&w, 2) ? 60 : 3000;
  w.depth = 1 + (uint32_t)below(&w, DEPTH);
  w.sure = bit((uint32_t)below(&w, workers)) | bit((uint32_t)below(&w, workers));
  uint64_t goal = 0;
  for (uint32_t i = 0; i < workers; i++) {
    w.ranks[i].last = w.sure >> i & 1 ? UINT64_MAX : below(&w, 40);
    if (w.ranks[i].last < UINT64_MAX && w.ranks[i].last > goal) goal = w.ranks[i].last;
  }
  w.goal = goal + 30;
  for (uint64_t end = now(&w) + 60 * SECOND; !settled(&w) && !w.failure[0];) {
    for (uint32_t i = 0; i < workers; i++) begin_to_finish(&w, i, &requests[i]);
    live_on(&w);
    if (now(&w) > end) broken(&w, "calls are not made in time");
  }
  run_more(&w, 5, 60 * SECOND);
  expect_failures(&w, all_of(&w), 0, 0, 0);
  for (uint32_t i = 0; i < workers; i++) {
    if (w.sure >> i & 1) continue;
    mlfab_result result = {0};
    int done = 0;
    assert_int_equal(mlfab_node_test(w.ranks[i].node, requests[i], &done, &result), 0);
    if (!done || result.status) broken(&w, "rank %u has not finished", i);
    if (w.ranks[i].nopen) broken(&w, "rank %u: a call is still open", i);
  }
  end_test(&w);
}

TEST(test_finishes) {
  const mlfab_sim_options faults = {.latency_ns = 50000,
                                    .latency_jitter = 0.5,
                                    .rate_bytes_per_s = 100000000,
                                    .loss = 0.002,
                                    .duplicate = 0.002,
                                    .reorder = 0.05};
  for (uint64_t seed = 1, n = test_cases_from(30, 30); seed <= n; seed++) {
    finish_one_by_one(seed, NULL);
    finish_one_by_one(seed + n, &faults);
  }
}

/* Failure after failure: nothing of an epoch stays. */
TEST(test_memory) {
  static world w;
  mlfab_stats stats;
  uint64_t before[RANKS];
  failing_world(&w, 4, 6);
  w.make = make_sum;
  w.most = 4000;
  for (uint32_t round = 0; round < 60 && !w.failure[0]; round++) {
    run_a_while(&w, 10 * MS);
    w.goal = UINT64_MAX;
    while (w.ranks[round % 4].nopen == 0 && !w.failure[0]) live_on(&w);
    mlfab_node_cancel(w.ranks[round % 4].node, w.ranks[round % 4].open[0].request, now(&w));
    run_to_failure(&w, all_of(&w), round + 1, 8 * w.config.heartbeat_ns);
    run_more(&w, 4, 60 * SECOND);
    for (uint32_t i = 0; i < w.workers; i++) {
      assert_int_equal(mlfab_node_stats(w.ranks[i].node, &stats, sizeof stats), 0);
      if (stats.memory_bytes != w.ranks[i].bytes) broken(&w, "rank %u cannot count", i);
      if (round == 19) before[i] = stats.memory_bytes;
      if (round > 19 && stats.memory_bytes > before[i] + 400000)
        broken(&w, "rank %u grows: %d bytes, then %d", i, (int)before[i], (int)stats.memory_bytes);
    }
  }
  expect_failures(&w, all_of(&w), 60, MLFAB_ERR_CANCELLED, 3);
  end_test(&w);
}

/* ---- seeds: everything at once */

static void look_at_failures(world *w) {
  for (uint32_t i = 0; i < w->workers; i++) {
    rank *r = &w->ranks[i];
    for (uint32_t k = 0; k < r->nfailures && k < FAILURES; k++) {
      int32_t code = r->failures[k].code;
      if (code != MLFAB_ERR_PEER_DEAD && code != MLFAB_ERR_AGAIN && code != MLFAB_ERR_TIMEOUT &&
          code != MLFAB_ERR_CANCELLED)
        broken(w, "rank %u: %s", i, mlfab_error_name(code));
    }
    r->nfailures = 0;
  }
}

static void crash_and_return(world *w, uint32_t victim, uint64_t *back_ns) {
  if (w->ranks[victim].node) {
    kill_node(w, victim);
    *back_ns = below(w, 2) ? now(w) + below(w, 2 * SECOND) : UINT64_MAX;
  } else {
    open_node(w, victim);
    w->ranks[victim].members = all_of(w);
    w->ranks[victim].silent = 1;
    *back_ns = UINT64_MAX;
  }
}

/* The victim's new process makes calls when it has joined. */
static void let_in(world *w, uint32_t victim) {
  rank *r = &w->ranks[victim];
  if (r->node && r->silent) r->silent = mlfab_node_ready(r->node, NULL) != 1;
}

static void run_seed_as(uint64_t seed, int planned) {
  static world w;
  uint32_t workers = 2 + (uint32_t)(mix(seed) % 7);
  if (planned) {
    init_planned(&w, workers, seed, 1 + (uint32_t)(mix(seed) >> 8) % 2, 1);
    if (mix(seed) >> 16 & 1) w.config.scheduler = MLFAB_SCHEDULER_BESIDE;
    w.harsh = seed % 3 == 0;
  } else {
    init_world(&w, workers, seed);
  }
  w.deaths = 1;
  w.config.chunk_bytes = 1024u << below(&w, 8);
  w.timeout_ns = 500 * MS << below(&w, 4);
  w.config.timeout_ns = 4 * SECOND;
  w.slice_ns = 200000;
  w.depth = 1 + (uint32_t)below(&w, DEPTH);
  w.most = 2 + below(&w, below(&w, 2) ? 20000 : 100);
  w.think_ns = 20 * MS;
  double frames = 4.0 + 8.0 * (double)w.most / w.config.chunk_bytes;
  mlfab_sim_options sim = {.latency_ns = 20000 + below(&w, MS),
                           .latency_jitter = 0.5,
                           .rate_bytes_per_s = 10000000ull << below(&w, 6)};
  open_world(&w, &sim);
  sim.loss = sim.duplicate = 0.05 / frames;
  sim.reorder = 0.05;
  sim.partition = 0.3;
  sim.partition_ns = (w.harsh ? 1500 : 150) * MS;
  sim.slow = 0.5;
  sim.pause = 0.3;
  sim.pause_ns = 150 * MS;
  mlfab_sim_set_faults(w.sim, &sim);
  w.goal = UINT64_MAX;
  uint32_t victim = (uint32_t)below(&w, workers);
  w.sure = all_of(&w) & ~bit(victim);
  uint64_t next_ns = below(&w, 2) ? now(&w) + below(&w, 4 * SECOND) : UINT64_MAX;
  for (uint64_t end = now(&w) + 6 * SECOND; now(&w) < end && !w.failure[0];) {
    if (now(&w) >= next_ns) crash_and_return(&w, victim, &next_ns);
    let_in(&w, victim);
    live_on(&w);
    look_at_failures(&w);
    rank *r = &w.ranks[below(&w, workers)];
    if (r->node && r->nopen && below(&w, 5000) == 0)
      mlfab_node_cancel(r->node, r->open[0].request, now(&w));
  }
  mlfab_sim_set_faults(w.sim, NULL);
  for (uint32_t i = 0; i < w.workers; i++) w.ranks[i].successes = 0;
  for (uint64_t end = now(&w) + 60 * SECOND; !w.failure[0];) {
    uint32_t behind = 0;
    for (uint32_t i = 0; i < w.workers; i++) behind += w.ranks[i].node && w.ranks[i].successes < 30;
    if (behind == 0) break;
    if (now(&w) > end) broken(&w, "%u ranks do not succeed any more", behind);
    let_in(&w, victim);
    live_on(&w);
    look_at_failures(&w);
  }
  end_test(&w);
}

static void run_seed(uint64_t seed) { run_seed_as(seed, 0); }
static void run_planned_seed(uint64_t seed) { run_seed_as(seed, 1); }

TEST(test_seeds) { seeds_run("collective", test_cases_few(5, 50, 100), run_seed); }

TEST(test_planned_seeds) {
  if (!WITH_MODEL) skip();
  seeds_run("planned", test_cases_few(5, 50, 100), run_planned_seed);
}

TESTS(NULL, NULL)
