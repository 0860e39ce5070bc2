/* test_filter.c - filters against a version that handles one element at a time in double, at every level,
 * bit for bit; and TDF's exact cases (tests/vectors/tdf.json). MLFAB_SEED=n one random case alone,
 * MLFAB_SCALE=100 a hundred times as many. */
#include "core/sparse/filter.h"

#include "core/kernels/half.h"
#include "draw.h"
#include "core/kernels/kernels.h"
#include "json.h"

#include <math.h>
#include "../testing.h"
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

/* Marks and emits. When it refuses, only keep was written. */
static uint32_t filter_both(const mlfab__filter_rule *rule, const void *g, void *residual,
                            uint64_t first, uint32_t n, uint64_t *keep, void *values,
                            uint64_t *saturated) {
  if (mlfab__filter_mark(rule, g, residual, first, n, keep) == MLFAB__FILTER_REFUSED)
    return MLFAB__FILTER_REFUSED;
  return mlfab__filter_emit(rule, g, residual, n, keep, values, saturated);
}

enum { LENGTH_MAX = 700, WORDS = LENGTH_MAX / 64 + 2 };

/* ---- an update and its residual, in either type ---- */

typedef struct update {
  mlfab__filter_rule rule;
  uint64_t first;
  uint32_t n;
  size_t width;                               /* of an element */
  double g[LENGTH_MAX], residual[LENGTH_MAX]; /* room for either type */
} update;

/* The result of a filter. */
typedef struct outcome {
  uint64_t keep[WORDS], saturated;
  uint32_t count;
  double residual[LENGTH_MAX], values[LENGTH_MAX + 1];
} outcome;

static void set(int dtype, void *array, uint32_t i, double x) {
  if (dtype == MLFAB_F32)
    ((float *)array)[i] = (float)x;
  else
    ((double *)array)[i] = x;
}

static double get(const update *u, const void *array, uint32_t i) {
  return u->rule.dtype == MLFAB_F32 ? (double)((const float *)array)[i]
                                    : ((const double *)array)[i];
}

static double some_number(mlfab__rng *prng) {
  static const double special[] = {0.0,      -0.0,          0x1p-25,           0x1.8p-25,
                                   65504.0,  65519.0,       -65520.0,          1e9,
                                   3.389e38, 3.395e38,      -3.4e38,           1e-40,
                                   0x1p-134, 0x1p-133,      0x1p-149,          0.5,
                                   -0.5,     0x1.000002p-1, 0x1p-25 + 0x1p-60, 0x1p-25 + 0x1p-49,
                                   65504.5};
  double x = (mlfab__rng_unit(prng) - 0.5) * 2;
  switch (mlfab__rng_below(prng, 8)) {
    case 0:
      return special[mlfab__rng_below(prng, sizeof special / sizeof *special)];
    case 1:
      return x * 1e5;
    case 2:
      return x * 1e-7;
    case 3:
      return 0.0;
    default:
      return x;
  }
}

static void make(update *u, uint64_t seed) {
  static const double taus[] = {0.0, 0.5, 0.1, 1e-3, 1e6, INFINITY, 0x1.000001p-1, 1e300, -1.0};
  static const double ps[] = {1.0, 1.0, 0.9, 0.5, 1e-12, 0.0, 1.0 - 0x1p-40, 2.0};
  mlfab__rng prng;
  mlfab__rng_seed(&prng, seed);
  u->rule = (mlfab__filter_rule){.dtype = mlfab__rng_below(&prng, 3) ? MLFAB_F32 : MLFAB_F64,
                                 .half = (int)mlfab__rng_below(&prng, 3),
                                 .tau = taus[mlfab__rng_below(&prng, 9)],
                                 .p = ps[mlfab__rng_below(&prng, 8)],
                                 .seed = mlfab__rng_next(&prng),
                                 .t = 1 + mlfab__rng_below(&prng, 1000)};
  u->first = mlfab__rng_below(&prng, mlfab__rng_below(&prng, 2) ? 10 : UINT64_C(1) << 40);
  u->n = (uint32_t)mlfab__rng_below(&prng, mlfab__rng_below(&prng, 2) ? 130 : LENGTH_MAX + 1);
  if (mlfab__rng_below(&prng, 4) == 0) { /* to the last bit, below or not */
    double draw = draw_of(u->rule.seed, u->rule.t, u->first + u->n / 2);
    u->rule.p = draw + (mlfab__rng_below(&prng, 2) ? 0x1p-33 : 0);
  }
  u->width = mlfab__dtype_bytes(u->rule.dtype);
  for (uint32_t i = 0; i < u->n; i++) {
    double g = some_number(&prng), residual = some_number(&prng);
    if (fabs(g) > 1e38 || mlfab__rng_below(&prng, 3) == 0) residual = 0;
    if (fabs(residual) > 1e38) g = 0;
    set(u->rule.dtype, u->g, i, g);
    set(u->rule.dtype, u->residual, i, residual);
  }
}

/* ---- the literal version ---- */

static double top_of(int half) {
  return half == MLFAB_HALF_F16 ? 65504.0 : half == MLFAB_HALF_BF16 ? 0x1.fep127 : (double)INFINITY;
}

static double travelled(int half, double a) {
  if (half == MLFAB_HALF_NONE) return a;
  return (double)mlfab__half_back(half, mlfab__half_one(half, mlfab__half_narrow(a)));
}

static void literal(const update *u, outcome *o) {
  memset(o, 0, sizeof *o);
  for (uint32_t i = 0; i < u->n; i++) {
    double a = get(u, u->g, i) + get(u, u->residual, i), top = top_of(u->rule.half);
    if (u->rule.dtype == MLFAB_F32) a = (double)(float)a;
    double v = travelled(u->rule.half, a);
    int held = fabs(a) < u->rule.tau && draw_of(u->rule.seed, u->rule.t, u->first + i) < u->rule.p;
    if (held || v == 0) {
      set(u->rule.dtype, o->residual, i, a);
      continue;
    }
    o->keep[i / 64] |= (uint64_t)1 << i % 64;
    if (fabs(a) > top) o->saturated++;
    set(u->rule.dtype, o->residual, i, fabs(a) > top ? a - copysign(top, a) : 0);
    if (u->rule.half == MLFAB_HALF_NONE)
      set(u->rule.dtype, o->values, o->count++, a);
    else
      ((uint16_t *)o->values)[o->count++] = mlfab__half_one(u->rule.half, mlfab__half_narrow(a));
  }
}

static size_t value_bytes(const update *u) {
  return u->rule.half == MLFAB_HALF_NONE ? u->width : 2;
}

static void expect_same(const update *u, const outcome *is, const outcome *wanted) {
  assert_int_equal(is->count, wanted->count);
  assert_memory_equal(is->keep, wanted->keep, (u->n + 63) / 64 * sizeof *is->keep);
  assert_memory_equal(is->values, wanted->values, wanted->count * value_bytes(u));
  assert_int_equal(is->saturated, wanted->saturated);
  assert_memory_equal(is->residual, wanted->residual, u->n * u->width);
}

static void one_case(uint64_t seed) {
  static update u;
  static outcome wanted, is;
  make(&u, seed);
  literal(&u, &wanted);
  for (int level = 0; level <= mlfab__kernel_level(); level++) {
    memset(&is, 0x5a, sizeof is);
    is.saturated = 0;
    memcpy(is.residual, u.residual, sizeof is.residual);
    uint32_t marked =
        mlfab__filter_mark_with(level, &u.rule, u.g, is.residual, u.first, u.n, is.keep);
    assert_int_equal(marked, wanted.count);
    assert_memory_equal(is.residual, u.residual, u.n * u.width);
    is.count = mlfab__filter_emit_with(level, &u.rule, u.g, is.residual, u.n, is.keep, is.values,
                                       &is.saturated);
    expect_same(&u, &is, &wanted);
    const uint8_t *behind = (const uint8_t *)is.values + wanted.count * value_bytes(&u);
    for (size_t i = 0; i < 8; i++) assert_int_equal(behind[i], 0x5a);
  }
  /* The same by way of the sum. */
  is.saturated = 0;
  memcpy(is.residual, u.residual, sizeof is.residual);
  assert_int_equal(mlfab__kernel_add(u.rule.dtype, is.residual, is.residual, u.g, 1, u.n, 0), 1);
  assert_int_equal(
      filter_both(&u.rule, NULL, is.residual, u.first, u.n, is.keep, is.values, &is.saturated),
      wanted.count);
  is.count = wanted.count;
  expect_same(&u, &is, &wanted);
}

TEST(equals_the_literal_filter) {
  for (SEEDS(seed, 10000)) one_case(seed);
}

/* As many as the probability says, within 5 standard deviations, for adjacent elements and for the next
 * iteration. */
TEST(draws_are_uniform) {
  enum { N = 100000 };
  for (int k = 1; k < 10; k++) {
    double p = k / 10.0, sigma = sqrt(N * p * (1 - p));
    int below = 0, both = 0, again = 0;
    for (uint64_t i = 0; i < N; i++) {
      int is = draw_of(3, (uint64_t)k, i) < p;
      below += is;
      both += is && draw_of(3, (uint64_t)k, i + 1) < p;
      again += is && draw_of(3, (uint64_t)k + 1, i) < p;
    }
    assert_true(fabs(below - N * p) < 5 * sigma);
    assert_true(fabs(both - N * p * p) < 10 * sigma);
    assert_true(fabs(again - N * p * p) < 10 * sigma);
  }
}

/* Compares bits: with -ffast-math comparisons of NaN and infinity are undefined. */
TEST(refuses_what_is_not_finite) {
  static const uint32_t bad32[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u};
  static const uint64_t bad64[] = {0x7ff0000000000000u, 0xfff0000000000000u, 0x7ff8000000000000u,
                                   0x7ff0000000000001u};
  enum { N = 150 };
  double g[N], residual[N], before[N], values[N];
  uint64_t keep[N / 64 + 1], saturated = 0;
  for (int dtype = MLFAB_F32; dtype <= MLFAB_F64; dtype++)
    for (uint32_t at = 0; at < N; at++)
      for (size_t b = 0; b < 4; b++) {
        update u = {.rule = {dtype, MLFAB_HALF_F16, 0.5, 1, 0, 1}};
        for (uint32_t i = 0; i < N; i++)
          set(u.rule.dtype, g, i, 1.0), set(u.rule.dtype, residual, i, 0.25);
        memcpy(before, residual, sizeof before);
        if (dtype == MLFAB_F32)
          memcpy((float *)g + at, &bad32[b], 4);
        else
          memcpy(g + at, &bad64[b], 8);
        for (int level = 0; level <= mlfab__kernel_level(); level++) {
          assert_int_equal(mlfab__filter_mark_with(level, &u.rule, g, residual, 0, N, keep),
                           MLFAB__FILTER_REFUSED);
          assert_int_equal(mlfab__filter_mark_with(level, &u.rule, g, residual, 0, at, keep), at);
        }
        assert_int_equal(filter_both(&u.rule, g, residual, 0, N, keep, values, &saturated),
                         MLFAB__FILTER_REFUSED);
        assert_memory_equal(before, residual, sizeof before);
      }
  float most[64], more[64];
  mlfab__filter_rule rule = {MLFAB_F32, 0, 0, 1, 0, 1};
  for (int i = 0; i < 64; i++) most[i] = more[i] = 3.4e38f; /* a sum can overflow, too */
  assert_int_equal(mlfab__filter_mark(&rule, most, more, 0, 64, keep), MLFAB__FILTER_REFUSED);
}

/* A program may have been linked with -Ofast, and then subnormal numbers of both types count as zero. */
TEST(doubles_do_not_need_subnormals) {
#ifdef __SSE2__
  const double x[] = {0x1.0001p-134,  0x1.0001000000001p-134, -0x1p-133, 0x1p-134,
                      0x1.000001p-25, 0x1.0000010000001p-25,  -0x1p-24,  0x1p-25};
  const double none[8] = {0};
  const unsigned mode = _mm_getcsr();
  for (int half = MLFAB_HALF_F16; half <= MLFAB_HALF_BF16; half++) {
    mlfab__filter_rule rule = {MLFAB_F64, half, 0, 1, 1, 1};
    uint64_t keep = 0;
    _mm_setcsr(mode | 0x8040); /* results and operands */
    uint32_t kept = mlfab__filter_mark_with(0, &rule, x, none, 0, 8, &keep);
    _mm_setcsr(mode);
    assert_int_equal(kept, half == MLFAB_HALF_F16 ? 2 : 6);
    assert_int_equal(keep, half == MLFAB_HALF_F16 ? 0x60 : 0xf6);
  }
#endif
}

/* ---- the largest ---- */

typedef struct ranked {
  double size;
  uint32_t at;
} ranked;

static int by_rank(const void *a, const void *b) {
  const ranked *x = a, *y = b;
  if (x->size != y->size) return x->size < y->size ? 1 : -1;
  return x->at < y->at ? -1 : 1;
}

static void top_case(uint64_t seed) {
  static update u;
  static ranked order[LENGTH_MAX];
  uint64_t keep[WORDS], wanted[WORDS] = {0};
  mlfab__rng prng;
  mlfab__filter_cut cut;
  uint32_t kept = 0;
  make(&u, seed);
  mlfab__rng_seed(&prng, mlfab__mix(seed));
  int coarse = (int)mlfab__rng_below(&prng, 2); /* many ties */
  for (uint32_t i = 0; i < u.n; i++) {
    if (coarse) set(u.rule.dtype, u.g, i, (double)mlfab__rng_below(&prng, 7) - 3.0);
    order[i] = (ranked){fabs(get(&u, u.g, i)), i};
  }
  qsort(order, u.n, sizeof *order, by_rank);
  uint64_t k = mlfab__rng_below(&prng, u.n + 1);
  for (uint64_t i = 0; i < k; i++) wanted[order[i].at / 64] |= (uint64_t)1 << order[i].at % 64;
  mlfab__filter_kth(u.rule.dtype, NULL, u.g, u.n, k, &cut);
  for (uint32_t at = 0, n; at < u.n; at += n) { /* in stretches */
    n = 1 + (uint32_t)mlfab__rng_below(&prng, 300);
    if (n > u.n - at) n = u.n - at;
    for (uint32_t i = 0; i < (n + 63) / 64; i++)
      keep[i] = n - i * 64 >= 64 ? UINT64_MAX : ((uint64_t)1 << (n - i * 64)) - 1;
    kept += mlfab__filter_top(u.rule.dtype, NULL, (char *)u.g + at * u.width, n, &cut, keep);
    for (uint32_t i = 0; i < n; i++)
      assert_int_equal(keep[i / 64] >> i % 64 & 1, wanted[(at + i) / 64] >> (at + i) % 64 & 1);
  }
  assert_int_equal(kept, k);
}

TEST(selects_the_largest) {
  for (SEEDS(seed, 1500)) top_case(seed);
}

TEST(the_largest_do_not_bring_marks_back) {
  float values[5] = {3, -4, 1, 4, 0};
  uint64_t keep = 0x1c; /* 2, 3, 4 */
  mlfab__filter_cut cut;
  mlfab__filter_kth(MLFAB_F32, NULL, values, 5, 2, &cut);
  assert_int_equal(mlfab__filter_top(MLFAB_F32, NULL, values, 5, &cut, &keep), 1);
  assert_int_equal(keep, 0x8);
}

/* ---- the largest, while they are marked ---- */

enum { CHOICE_MOST = 150000, CHOICE_WORDS = CHOICE_MOST / 64 + 1 };
enum { MIXED, FINE, COARSE, EQUAL, ZEROS, MOSTLY_ZEROS, SUBNORMAL, FALLING, PATTERNS };

typedef struct choice_update {
  mlfab__filter_rule rule;
  uint32_t n, pattern;
  uint64_t k;
  double g[CHOICE_MOST], residual[CHOICE_MOST]; /* room for either type */
} choice_update;

static double choice_number(uint32_t pattern, uint32_t i, mlfab__rng *prng) {
  double x = mlfab__rng_unit(prng) * 2 - 1;
  switch (pattern) {
    case MIXED:
      return some_number(prng) / 4;
    case COARSE:
      return (double)mlfab__rng_below(prng, 7) - 3.0;
    case EQUAL:
      return mlfab__rng_below(prng, 2) ? 0.75 : -0.75;
    case ZEROS:
      return mlfab__rng_below(prng, 2) ? 0.0 : -0.0;
    case MOSTLY_ZEROS:
      return mlfab__rng_below(prng, 50) ? 0.0 : x;
    case SUBNORMAL:
      return x * 1e-39;
    case FALLING:
      return 1.0 / (1 + i);
    default:
      return x;
  }
}

static double choice_size(const choice_update *u, uint32_t i) {
  return u->rule.dtype == MLFAB_F32
             ? (double)fabsf(((const float *)u->g)[i] + ((const float *)u->residual)[i])
             : fabs(u->g[i] + u->residual[i]);
}

static void choice_make(choice_update *u, uint64_t seed) {
  static const double shares[] = {0.0, 0.001, 0.01, 0.1, 0.5, 0.97, 1.0};
  mlfab__rng prng;
  mlfab__rng_seed(&prng, mlfab__mix(seed));
  u->rule = (mlfab__filter_rule){.dtype = mlfab__rng_below(&prng, 3) ? MLFAB_F32 : MLFAB_F64,
                                 .half = (int)mlfab__rng_below(&prng, 3),
                                 .tau = mlfab__rng_below(&prng, 2) ? 0 : 0.5,
                                 .p = mlfab__rng_below(&prng, 2) ? 1 : 0.5,
                                 .seed = seed,
                                 .t = 3};
  static const uint32_t most[] = {3, 200, 33000, 36000, CHOICE_MOST};
  u->n = 1 + (uint32_t)mlfab__rng_below(&prng, most[mlfab__rng_below(&prng, 5)]);
  u->pattern = (uint32_t)mlfab__rng_below(&prng, PATTERNS);
  u->k = (uint64_t)(shares[mlfab__rng_below(&prng, 7)] * u->n);
  for (uint32_t i = 0; i < u->n; i++) {
    double x = choice_number(u->pattern, i, &prng);
    int whole = u->pattern == EQUAL || u->pattern == ZEROS || mlfab__rng_below(&prng, 2);
    set(u->rule.dtype, u->g, i, whole ? x : x / 4);
    set(u->rule.dtype, u->residual, i, whole ? 0 : x / 2);
  }
}

/* Looks in pieces of any length, whose words follow one another, as those of `wanted` do. */
static void choice_level(const choice_update *u, int level, const ranked *order, int limits) {
  static uint64_t keep[2 * CHOICE_WORDS + 3000], wanted[2 * CHOICE_WORDS + 3000];
  static uint8_t within[CHOICE_MOST];
  static uint32_t piece[CHOICE_MOST];
  size_t width = mlfab__dtype_bytes(u->rule.dtype);
  uint32_t pieces = 0, words = 0;
  mlfab__filter_choice choice;
  mlfab__filter_cut cut;
  mlfab__rng prng;
  mlfab__rng_seed(&prng, u->rule.seed);
  memset(within, 0, u->n);
  for (uint64_t i = 0; i < u->k; i++) within[order[i].at] = 1;
  for (uint32_t at = 0; at < u->n; at += piece[pieces++]) {
    uint32_t n = 1 + (uint32_t)mlfab__rng_below(&prng, MLFAB__FILTER_MOST);
    piece[pieces] = n < u->n - at ? n : u->n - at;
    mlfab__filter_mark_with(0, &u->rule, (const char *)u->g + at * width,
                            (const char *)u->residual + at * width, at, piece[pieces],
                            wanted + words);
    for (uint32_t i = 0; i < piece[pieces]; i++)
      if (!within[at + i]) wanted[words + i / 64] &= ~((uint64_t)1 << i % 64);
    words += (piece[pieces] + 63) / 64;
  }
  uint64_t room = mlfab__filter_choice_words(u->rule.dtype, u->n, words) * sizeof(uint64_t);
  uint64_t *memory = malloc(room);
  mlfab__filter_choose_with(level, &choice, u->rule.dtype, u->g, u->residual, u->n, u->k, memory);
  if (limits == 1) choice.high = choice.low = 1; /* the k-th largest is above, */
  if (limits == 2) choice.low = choice.high;     /* ... or below */
  uint64_t *at_keep = keep;
  for (uint32_t i = 0, at = 0; i < pieces; at += piece[i++]) {
    assert_true(mlfab__filter_look(&choice, &u->rule, at, piece[i], at_keep));
    at_keep += (piece[i] + 63) / 64;
  }
  int settled = mlfab__filter_settle(&choice, keep);
  if (limits == 0 && u->k > 0 &&
      (u->n <= 33000 || u->pattern == FINE || u->pattern == MOSTLY_ZEROS || u->pattern == ZEROS))
    assert_true(settled);
  free(memory);
  if (!settled) {
    mlfab__filter_kth(u->rule.dtype, u->g, u->residual, u->n, u->k, &cut);
    at_keep = keep;
    for (uint32_t i = 0, at = 0; i < pieces; at += piece[i++]) {
      const char *g = (const char *)u->g + at * width;
      const char *residual = (const char *)u->residual + at * width;
      mlfab__filter_mark_with(level, &u->rule, g, residual, at, piece[i], at_keep);
      mlfab__filter_top(u->rule.dtype, g, residual, piece[i], &cut, at_keep);
      at_keep += (piece[i] + 63) / 64;
    }
  }
  assert_memory_equal(keep, wanted, words * sizeof *keep);
}

static void choice_case(uint64_t seed) {
  static choice_update u;
  static ranked order[CHOICE_MOST];
  choice_make(&u, seed);
  for (uint32_t i = 0; i < u.n; i++) order[i] = (ranked){choice_size(&u, i), i};
  qsort(order, u.n, sizeof *order, by_rank);
  for (int level = 0; level <= mlfab__kernel_level(); level++)
    choice_level(&u, level, order, seed % 8 < 6 ? 0 : 1 + (int)(seed % 2));
}

TEST(chooses_the_largest) {
  for (SEEDS(seed, 100)) choice_case(seed);
}

/* A look finds every value that is not finite while its list has room, and never settles without it. */
TEST(a_look_refuses) {
  enum { N = 200 };
  const float bad[] = {INFINITY, -INFINITY, NAN};
  float g[N], residual[N] = {0};
  uint64_t keep[N / 64 + 1], *room = malloc(8 * mlfab__filter_choice_words(MLFAB_F32, N, 4));
  mlfab__filter_choice choice;
  for (int level = 0; level <= mlfab__kernel_level(); level++)
    for (int draws = 0; draws < 2; draws++)
      for (uint32_t at = 0; at < N; at++) {
        mlfab__filter_rule rule = {MLFAB_F32, 0, 0.5, draws ? 0.5 : 1, 1, 1};
        for (int i = 0; i < N; i++) g[i] = (float)i;
        g[at] = bad[at % 3];
        mlfab__filter_choose_with(level, &choice, MLFAB_F32, g, residual, N, 10, room);
        assert_false(mlfab__filter_look(&choice, &rule, 0, N, keep));
        mlfab__filter_choose_with(level, &choice, MLFAB_F32, g, residual, N, 10, room);
        assert_true(mlfab__filter_look(&choice, &rule, 0, at, keep));
      }
  free(room);
}

/* ---- changes ---- */

static void change_case(uint64_t seed) {
  static update u;
  static double before[LENGTH_MAX], after[LENGTH_MAX], wanted[LENGTH_MAX];
  static const double taus[] = {0.0, 1e-4, 0.01, 0.5, 1.0, 1e9};
  mlfab__rng prng;
  uint64_t back = 0;
  make(&u, seed);
  mlfab__rng_seed(&prng, mlfab__mix(seed));
  double tau = taus[mlfab__rng_below(&prng, 6)];
  for (uint32_t i = 0; i < u.n; i++) {
    double x = some_number(&prng), share = (mlfab__rng_unit(&prng) - 0.5) * 4 * tau;
    set(u.rule.dtype, before, i, x);
    set(u.rule.dtype, after, i,
        fabs(x) > 1e30               ? x
        : mlfab__rng_below(&prng, 5) ? x * (1 + share)
                                     : -x);
    double old = get(&u, before, i), is = get(&u, after, i);
    int small = is != old && old != 0 && fabs(is - old) / fabs(old) < tau;
    back += (uint64_t)small;
    set(u.rule.dtype, wanted, i, small || is == old ? old : is);
  }
  for (int level = 0; level <= mlfab__kernel_level(); level++) {
    static double is[LENGTH_MAX];
    memcpy(is, after, sizeof is);
    assert_int_equal(mlfab__filter_change_with(level, u.rule.dtype, before, is, u.n, tau), back);
    assert_memory_equal(is, wanted, u.n * u.width);
  }
}

TEST(puts_small_changes_back) {
  for (SEEDS(seed, 2500)) change_case(seed);
  /* Integers are not filtered, even if their bits read as floats are close to each other. */
  for (int level = 0; level <= mlfab__kernel_level(); level++) {
    double one = 1.0, near = 1.25;
    int64_t before[16], after[16], was;
    for (int i = 0; i < 16; i++) memcpy(before + i, &one, 8), memcpy(after + i, &near, 8);
    memcpy(&was, &near, 8);
    assert_int_equal(mlfab__filter_change_with(level, MLFAB_I64, before, after, 16, 100), 0);
    for (int i = 0; i < 16; i++) assert_true(after[i] == was);
  }
}

/* A NaN is not a small change: it must reach the check for NaN. */
TEST(leaves_nan_alone) {
  const uint32_t nan = 0x7fc00000u;
  uint32_t is;
  for (int level = 0; level <= mlfab__kernel_level(); level++) {
    float before[11] = {1}, after[11] = {0};
    memcpy(after, &nan, sizeof nan);
    before[10] = 1;
    memcpy(after + 10, &nan, sizeof nan);
    assert_int_equal(mlfab__filter_change_with(level, MLFAB_F32, before, after, 11, 0.5), 0);
    memcpy(&is, after, sizeof is);
    assert_int_equal(is, nan);
    memcpy(&is, after + 10, sizeof is);
    assert_int_equal(is, nan);
  }
}

/* ---- tests/vectors/tdf.json ---- */

TEST(vector_threshold) {
  double row[64];
  uint32_t n = json_numbers(json_find(json_find(json, "threshold"), "rows"), row, 64, NULL);
  assert_int_equal(n, 24);
  for (uint32_t i = 0; i < n; i += 4) {
    double tau = mlfab__filter_threshold(row[i], row[i + 1], (uint64_t)row[i + 2]);
    assert_true(fabs(tau - row[i + 3]) <= 1e-15 * row[i + 3]);
  }
  for (uint64_t t = 1; t < 100000; t += 1 + t / 50) { /* against libm */
    double wanted = 1 / (1 + 0.3 * log((double)t));
    assert_true(fabs(mlfab__filter_threshold(1, 0.3, t) - wanted) <= 1e-15 * wanted);
  }
  double wanted = 1 / (1 + log(18446744073709551615.0));
  assert_true(fabs(mlfab__filter_threshold(1, 1, UINT64_MAX) - wanted) <= 1e-15);
}

TEST(vector_half) {
  double row[64];
  uint32_t n = json_numbers(json_find(json_find(json, "half"), "rows"), row, 64, NULL);
  assert_int_equal(n, 42);
  for (uint32_t i = 0; i < n; i += 3) {
    uint16_t bits = mlfab__half_one(MLFAB_HALF_F16, (float)row[i]);
    assert_int_equal(bits, (uint16_t)row[i + 2]);
    assert_true((double)mlfab__half_back(MLFAB_HALF_F16, bits) == row[i + 1]);
  }
}

/* A seed whose draws lie on the same sides of p as the vector's. */
static uint64_t seed_for(const double *draws, uint32_t n, double p, uint64_t t) {
  for (uint64_t seed = 0;; seed++) {
    uint32_t i = 0;
    while (i < n && (draw_of(seed, t, i) < p) == (draws[i] < p)) i++;
    if (i == n) return seed;
  }
}

TEST(vector_gradient_filter) {
  const char *at = json_find(json, "gradient_filter");
  double draws[8], g[8], sent[16], left[8], p = json_number(at, "p");
  float gradient[8], residual[8] = {0};
  uint32_t n = json_numbers(json_find(at, "uniform_draws_by_index"), draws, 8, NULL);
  assert_int_equal(n, 5);
  mlfab__filter_rule rule = {MLFAB_F32, MLFAB_HALF_F16, 0, p, 0, 0};
  double phi = json_number(at, "phi"), d = json_number(at, "d");
  at = json_find(at, "pushes");
  for (uint64_t t = 1; t <= 3; t++) {
    uint16_t values[8];
    uint64_t keep, saturated = 0;
    assert_int_equal((uint64_t)json_number(at, "t"), t);
    assert_int_equal(json_numbers(json_find(at, "gradient"), g, 8, &at), n);
    uint32_t pairs = json_numbers(json_find(at, "sent"), sent, 16, &at) / 2;
    assert_int_equal(json_numbers(json_find(at, "residual"), left, 8, &at), n);
    for (uint32_t i = 0; i < n; i++) gradient[i] = (float)g[i];
    rule.tau = mlfab__filter_threshold(phi, d, t);
    rule.t = t;
    rule.seed = seed_for(draws, n, p, t);
    assert_int_equal(filter_both(&rule, gradient, residual, 0, n, &keep, values, &saturated),
                     pairs);
    uint64_t wanted = 0;
    for (uint32_t i = 0; i < pairs; i++) {
      wanted |= (uint64_t)1 << (uint32_t)sent[2 * i];
      assert_true((double)mlfab__half_back(MLFAB_HALF_F16, values[i]) == sent[2 * i + 1]);
    }
    assert_int_equal(keep, wanted);
    for (uint32_t i = 0; i < n; i++) assert_true((double)residual[i] == left[i]);
  }
}

/* The vector gives the store after the update. Before it, the elements that stay were equal, and the
 * updated ones differed by more than the threshold. */
TEST(vector_parameter_filter) {
  static const float started[6] = {0.0f, 0.0f, 1.0f, 1.0f, -2.0f, 0.001f};
  const char *at = json_find(json, "parameter_filter");
  double theta[6], pushed[6], updated[6];
  float before[6], after[6];
  double tau = mlfab__filter_threshold(json_number(at, "phi"), json_number(at, "d"), 1);
  assert_int_equal(json_numbers(json_find(at, "theta"), theta, 6, NULL), 6);
  assert_int_equal(json_numbers(json_find(at, "new"), pushed, 6, NULL), 6);
  assert_int_equal(json_numbers(json_find(at, "updated"), updated, 6, NULL), 4);
  for (int i = 0; i < 6; i++) {
    before[i] = started[i];
    after[i] = (float)pushed[i];
  }
  assert_int_equal(mlfab__filter_change(MLFAB_F32, before, after, 6, tau), 1);
  for (uint32_t i = 0, k = 0; i < 6; i++) {
    assert_true((double)after[i] == theta[i]);
    int changes = k < 4 && (uint32_t)updated[k] == i;
    assert_int_equal(after[i] != before[i], changes);
    k += (uint32_t)changes;
  }
}

/* A step below the threshold until it has decayed enough. */
TEST(vector_first_pass) {
  const char *at = json_find(json, "parameter_filter_first_pass");
  double phi = json_number(at, "phi"), d = json_number(at, "d"), step = json_number(at, "step");
  uint64_t t = 1;
  for (;; t++) {
    double before = 1.0, after = 1.0 + step;
    if (mlfab__filter_change(MLFAB_F64, &before, &after, 1, mlfab__filter_threshold(phi, d, t)) ==
        0)
      break;
    assert_true(after == before);
  }
  assert_int_equal(t, (uint64_t)json_number(at, "first t at which it passes"));
}

int main(int argc, char **argv) {
  json_read("tests/vectors/tdf.json");
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
