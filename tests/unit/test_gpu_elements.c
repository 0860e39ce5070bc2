/* test_gpu_elements.c - what the GPU's kernels do, played on the CPU by loops for grids, blocks, warps and lanes
 * (play.h), against the CPU's kernels: bit for bit, but for which NaN it is. Norms within the bound that
 * gpu/src/elements.h states, and equal bits in whatever order blocks run and wherever arrays begin.
 * MLFAB_SEED=n one random case of each test alone, MLFAB_SCALE=100 a hundred times as many. */
#define ELEMENTS_PARTS 5u /* parts of several tiles without millions of elements */
#include "play_values.h"

#include "core/kernels/half.h"
#include "core/kernels/kernels_combine.h"
#include "core/model/optimizer.h"
#include "core/sparse/filter.h"

#include <math.h>
#include "../testing.h"

enum { GUARD = 0x5a, GUARD_BYTES = 64, LENGTH_MOST = 70000 };

static const int dtypes[] = {MLFAB_F32, MLFAB_F64, MLFAB_I64, MLFAB_F16, MLFAB_BF16};

/* ---- arrays ---- */

static uint64_t get(int dtype, const void *array, uint64_t i) {
  return elements_get(elements_width(dtype), array, i);
}

/* n elements that begin `off` elements after a line of 64 bytes, with guard bytes before and behind. */
typedef struct array {
  int dtype;
  uint64_t n;
  unsigned char *base, *at;
  size_t bytes;
} array;

static array array_new(int dtype, uint64_t n, uint64_t off) {
  array a = {dtype, n, NULL, NULL, 0};
  a.bytes = (size_t)(n * elements_width(dtype));
  a.base = (unsigned char *)aligned_alloc(64, (a.bytes + 3 * GUARD_BYTES) / 64 * 64 + 64);
  assert_non_null(a.base);
  memset(a.base, GUARD, (a.bytes + 3 * GUARD_BYTES) / 64 * 64 + 64);
  a.at = a.base + GUARD_BYTES + off * elements_width(dtype);
  return a;
}

static array array_any(uint64_t *state, int dtype, uint64_t n, uint64_t off, int finite) {
  array a = array_new(dtype, n, off);
  for (uint64_t i = 0; i < n; i++)
    elements_set(elements_width(dtype), a.at, i, any_bits(state, dtype, finite));
  return a;
}

static array array_copy(const array *from, uint64_t off) {
  array a = array_new(from->dtype, from->n, off);
  memcpy(a.at, from->at, from->bytes);
  return a;
}

static void array_free(array *a) {
  for (unsigned char *p = a->base; p < a->at; p++) assert_int_equal(*p, GUARD);
  for (size_t i = 0; i < GUARD_BYTES; i++) assert_int_equal(a->at[a->bytes + i], GUARD);
  free(a->base);
  a->base = NULL;
}

static void expect_same(const array *is, const array *wanted) {
  for (uint64_t i = 0; i < is->n; i++) {
    uint64_t a = get(is->dtype, is->at, i), b = get(is->dtype, wanted->at, i);
    if (same(is->dtype, a, b)) continue;
    print_error("type %d, element %llu of %llu: %#llx, and %#llx was wanted\n", is->dtype,
                (unsigned long long)i, (unsigned long long)is->n, (unsigned long long)a,
                (unsigned long long)b);
    fail();
  }
}

/* Short; around the borders of tiles; several tiles. */
static uint64_t any_length(uint64_t *state, uint64_t tile) {
  uint64_t near = tile * (1 + chance_below(state, 7)) - 9 + chance_below(state, 19);
  switch (chance_below(state, 4)) {
    case 0:
      return chance_below(state, 70);
    case 1:
      return near < LENGTH_MOST ? near : tile + 1;
    default:
      return chance_below(state, 3 * tile);
  }
}

static uint64_t any_off(uint64_t *state) {
  return chance_below(state, 2) ? 0 : chance_below(state, 8);
}

/* Calls a case with each seed. */
static void cases(double usual, void (*one)(uint64_t seed)) {
  for (SEEDS(seed, usual)) {
    play_backwards = seed % 2 != 0;
    one(seed);
  }
  play_backwards = 0;
}

/* ---- 16 bits ---- */

/* The type of values that travel as this half; without one they have their own. */
static int type_of(int half, int dtype) {
  return half == MLFAB_HALF_NONE ? dtype : half == MLFAB_HALF_F16 ? MLFAB_F16 : MLFAB_BF16;
}

/* Kernels of collectives round so; kernel_round_f16 is seen only through sums. */
static uint16_t literal_round(int dtype, float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  uint32_t sign = bits >> 16 & 0x8000u, m = bits & 0x7fffffffu,
           nan = dtype == MLFAB_F16 ? 0x7e00u : 0x7fc0u;
  if (m > 0x7f800000u)
    return (uint16_t)(sign | nan | (dtype == MLFAB_F16 ? m >> 13 & 0x3ffu : m >> 16 & 0x7fu));
  if (dtype == MLFAB_F16)
    return m >= 0x477ff000u ? (uint16_t)(sign | 0x7c00u) : mlfab__half_one(MLFAB_HALF_F16, x);
  return m >= 0x7f7f8000u ? (uint16_t)(sign | 0x7f80u) : mlfab__half_one(MLFAB_HALF_BF16, x);
}

static void expect_rounded(uint32_t bits) {
  float x = elements_f32(bits);
  assert_int_equal(elements_f16_saturate(x), mlfab__half_one(MLFAB_HALF_F16, x));
  assert_int_equal(elements_bf16_saturate(x), mlfab__half_one(MLFAB_HALF_BF16, x));
  assert_int_equal(elements_f16_round(x), literal_round(MLFAB_F16, x));
  assert_int_equal(elements_bf16_round(x), literal_round(MLFAB_BF16, x));
}

TEST(every_half_comes_back) {
  for (uint32_t h = 0; h < 0x10000; h++) {
    uint32_t wanted = elements_f32_bits(mlfab__half_back(MLFAB_HALF_F16, (uint16_t)h));
    assert_int_equal(elements_f32_bits(elements_f16_exactly((uint16_t)h)), wanted);
    assert_true(same(MLFAB_F32, elements_f32_bits(elements_f16_back((uint16_t)h)), wanted));
    assert_int_equal(elements_f32_bits(elements_bf16_back((uint16_t)h)),
                     elements_f32_bits(mlfab__half_back(MLFAB_HALF_BF16, (uint16_t)h)));
    /* The number, halfway to the next, and the float32 beside both; also of bfloat16. */
    for (uint32_t d = 0; d < 7; d++) {
      static const uint32_t beside[] = {0, 1, 0xfff, 0x1000, 0x1001, UINT32_MAX, 0x1fff};
      expect_rounded(wanted + beside[d]);
    }
    for (uint32_t d = 0; d < 4; d++) expect_rounded((h << 16) + 0x7fffu + d);
    expect_rounded(h << 16);
  }
  uint64_t state = 1, n = test_cases(300000);
  for (uint64_t i = 0; i < n; i++)
    expect_rounded((uint32_t)chance_below(&state, UINT64_C(1) << 32));
  /* The subnormal numbers of binary16 with their halves and quarters. */
  for (uint32_t i = 0; i < 4 * 1024 + 8; i++) {
    uint32_t bits = elements_f32_bits((float)i * 0x1p-26f);
    for (uint32_t d = 0; d < 3; d++) expect_rounded(bits - (bits > 0) + d);
  }
}

static void one_conversion(uint64_t seed) {
  uint64_t state = mix(seed), n = any_length(&state, 8192);
  for (int half = MLFAB_HALF_F16; half <= MLFAB_HALF_BF16; half++) {
    int dtype = type_of(half, 0);
    array from = array_any(&state, MLFAB_F32, n, any_off(&state), 0),
          to = array_new(dtype, n, any_off(&state));
    array wanted = array_new(dtype, n, 0);
    assert_int_equal(play_convert(dtype, to.at, MLFAB_F32, from.at, 1, n), 0);
    mlfab__half_store(half, (uint16_t *)(void *)wanted.at, (const float *)(void *)from.at, n);
    assert_memory_equal(to.at, wanted.at, to.bytes);
    assert_int_equal(play_convert(dtype, to.at, MLFAB_F32, from.at, 0, n), 0);
    for (uint64_t i = 0; i < n; i++)
      assert_int_equal(get(dtype, to.at, i),
                       literal_round(dtype, elements_f32((uint32_t)get(MLFAB_F32, from.at, i))));
    array_free(&to);
    to = array_any(&state, dtype, n, any_off(&state), 0);
    array back = array_new(MLFAB_F32, n, any_off(&state));
    assert_int_equal(play_convert(MLFAB_F32, back.at, dtype, to.at, (int)(seed % 2), n), 0);
    mlfab__half_load(half, (float *)(void *)from.at, (const uint16_t *)(void *)to.at, n);
    assert_memory_equal(back.at, from.at, back.bytes);
    array_free(&from), array_free(&to), array_free(&wanted), array_free(&back);
  }
}

TEST(conversions) { cases(60, one_conversion); }

/* ---- sums ---- */

/* The bound of elements.h, and kernels.c's: eight sums. */
static void expect_norm2(int dtype, const void *u, uint64_t n, double norm2) {
  elements_cut cut = elements_cut_of(n, elements_tile(dtype), 0);
  double exact = 0.0, rest = 0.0, plain = 0.0,
         depth = (double)(cut.per * (elements_tile(dtype) / ELEMENTS_THREADS)) + 56;
  for (uint64_t i = 0; i < n; i++) { /* in twice the precision */
    elements_number x = {0.0f, 0.0, 0};
    elements_chunk chunk = {{0, 0, 0, 0}};
    elements_put_bits(elements_width(dtype), &chunk, 0, get(dtype, u, i));
    x = elements_take(dtype, &chunk, 0);
    double a = elements_square(dtype, x), sum = exact + a, b = sum - exact;
    rest += (exact - (sum - b)) + (a - b);
    exact = sum;
    plain += a;
  }
  exact += rest;
  if (!mlfab__finite(plain)) {
    assert_false(mlfab__finite(norm2));
    assert_true(isnan(plain) == isnan(norm2));
    return;
  }
  assert_true(fabs(norm2 - exact) <= depth * 0x1p-53 * exact);
  if (elements_width(dtype) < 4) return;
  double cpu = mlfab__kernel_norm2(dtype, u, n);
  assert_true(fabs(norm2 - cpu) <= (depth + (double)n / 8 + 8) * 0x1p-53 * exact);
}

/* As 16 bits are summed: in float32, rounded at the end. */
static void literal_weighted(int dtype, array *dst, const array *in, const double *weight,
                             uint32_t k) {
  int small = elements_width(dtype) == 2, type = small ? MLFAB_F32 : dtype;
  array sum = array_new(type, dst->n, 0), wide = array_new(type, dst->n, 0);
  for (uint32_t i = 0; i < k; i++) {
    if (small)
      mlfab__half_load(dtype == MLFAB_F16 ? MLFAB_HALF_F16 : MLFAB_HALF_BF16,
                       (float *)(void *)wide.at, (const uint16_t *)(void *)in[i].at, dst->n);
    else
      memcpy(wide.at, in[i].at, wide.bytes);
    (void)mlfab__kernel_add(type, sum.at, i ? sum.at : NULL, wide.at, weight[i], dst->n, 0);
  }
  for (uint64_t i = 0; i < dst->n; i++)
    elements_set(elements_width(dtype), dst->at, i,
                 small ? literal_round(dtype, elements_f32((uint32_t)get(type, sum.at, i)))
                       : get(type, sum.at, i));
  array_free(&sum), array_free(&wide);
}

static void one_sum(uint64_t seed) {
  uint64_t state = mix(seed);
  int dtype = dtypes[seed % 5], finite = chance_below(&state, 2) != 0,
      weighted = chance_below(&state, 2) != 0;
  int place = (int)chance_below(&state, 3); /* 0: into an input */
  uint32_t k = 1 + (uint32_t)chance_below(&state, MLFAB_GPU_SUM_MOST);
  uint64_t n = any_length(&state, elements_tile(dtype)), off = any_off(&state);
  int apart = chance_below(&state, 3) == 0; /* arrays begin at different places of a line */
  array in[MLFAB_GPU_SUM_MOST], dst = array_new(dtype, n, apart ? any_off(&state) : off),
                                wanted = array_new(dtype, n, 0);
  const void *ins[MLFAB_GPU_SUM_MOST];
  void *out = wanted.at;
  double weight[MLFAB_GPU_SUM_MOST];
  mlfab_gpu_stats stats, again;
  for (uint32_t i = 0; i < k; i++) {
    in[i] = array_any(&state, dtype, n, apart ? any_off(&state) : off, finite);
    ins[i] = in[i].at;
    weight[i] = any_weight(&state, dtype);
  }
  if (weighted)
    literal_weighted(dtype, &wanted, in, weight, k);
  else
    mlfab__kernel_combine_many(MLFAB_OP_SUM, dtype, &out, 1, ins, k, n, 0);
  void *to = place == 0 ? in[chance_below(&state, k)].at : dst.at;
  assert_int_equal(play_sum(dtype, to, ins, weighted ? weight : NULL, k, n, &stats), 0);
  if (to != dst.at) memcpy(dst.at, to, dst.bytes);
  expect_same(&dst, &wanted);
  assert_int_equal(stats.finite, mlfab__elements_finite(dtype, wanted.at, n));
  expect_norm2(dtype, dst.at, n, stats.norm2);
  /* Stats alone, of the result elsewhere, with the blocks in the other order. */
  array moved = array_copy(&dst, 1 + any_off(&state));
  const void *alone = moved.at;
  play_backwards = !play_backwards;
  assert_int_equal(play_sum(dtype, NULL, &alone, NULL, 1, n, &again), 0);
  play_backwards = !play_backwards;
  if (!isnan(stats.norm2)) assert_memory_equal(&stats, &again, sizeof stats);
  assert_int_equal(stats.finite, again.finite);
  for (uint32_t i = 0; i < k; i++) array_free(&in[i]);
  array_free(&dst), array_free(&wanted), array_free(&moved);
}

TEST(sums) { cases(400, one_sum); }

static void one_reduction(uint64_t seed) {
  uint64_t state = mix(seed);
  const int dtype = dtypes[seed % 5], finite = chance_below(&state, 2) != 0;
  int op = (int)chance_below(&state, 5), into = chance_below(&state, 2) != 0;
  const uint32_t k = 1 + (uint32_t)chance_below(&state, MLFAB_GPU_SUM_MOST);
  const uint64_t n = any_length(&state, elements_tile(dtype)), off = any_off(&state);
  array in[MLFAB_GPU_SUM_MOST], dst = array_new(dtype, n, off), wanted = array_new(dtype, n, 0);
  const void *ins[MLFAB_GPU_SUM_MOST];
  void *out = wanted.at;
  if (op == MLFAB_OP_MEAN && dtype == MLFAB_I64) op = MLFAB_OP_PRODUCT;
  for (uint32_t i = 0; i < k; i++) {
    in[i] = array_any(&state, dtype, n, chance_below(&state, 3) ? off : any_off(&state), finite);
    ins[i] = in[i].at;
  }
  mlfab__kernel_combine_many(op == MLFAB_OP_MEAN ? MLFAB_OP_SUM : op, dtype, &out, 1, ins, k, n, 0);
  if (op == MLFAB_OP_MEAN) mlfab__kernel_divide(dtype, wanted.at, n, k);
  void *to = into ? in[chance_below(&state, k)].at : dst.at;
  assert_int_equal(play_reduce(op, dtype, to, ins, k, n), 0);
  if (to != dst.at) memcpy(dst.at, to, dst.bytes);
  expect_same(&dst, &wanted);
  assert_int_equal(play_reduce(MLFAB_OP_PRODUCT + 1, dtype, to, ins, k, n), ELEMENTS_INVALID);
  assert_int_equal(play_reduce(op, dtype, to, ins, MLFAB_GPU_SUM_MOST + 1, n), ELEMENTS_INVALID);
  assert_int_equal(play_reduce(MLFAB_OP_MEAN, MLFAB_I64, to, ins, k, n), ELEMENTS_INVALID);
  for (uint32_t i = 0; i < k; i++) array_free(&in[i]);
  array_free(&dst), array_free(&wanted);
}

TEST(reductions) { cases(400, one_reduction); }

/* One input and no weights is a copy, of NaN, too. */
TEST(a_sum_of_one_copies) {
  uint64_t state = 3;
  for (size_t d = 0; d < 5; d++) {
    array in = array_new(dtypes[d], 40000, 0), out = array_new(dtypes[d], 40000, d % 2);
    for (size_t i = 0; i < in.bytes; i++) in.at[i] = (unsigned char)chance_below(&state, 256);
    const void *ins = in.at;
    assert_int_equal(play_sum(dtypes[d], out.at, &ins, NULL, 1, in.n, NULL), 0);
    assert_memory_equal(in.at, out.at, in.bytes);
    array_free(&in), array_free(&out);
  }
}

static void one_update(uint64_t seed) {
  static const int types[] = {MLFAB_F32, MLFAB_F64, MLFAB_I64};
  uint64_t state = mix(seed);
  int dtype = types[seed % 3], finite = chance_below(&state, 2) != 0;
  uint64_t n = any_length(&state, elements_tile(dtype)), off = any_off(&state);
  array w = array_any(&state, dtype, n, off, finite), u = array_any(&state, dtype, n, off, finite);
  array dst = array_new(dtype, n, chance_below(&state, 2) ? off : any_off(&state)),
        wanted = array_new(dtype, n, 0);
  double scale = chance_below(&state, 9) == 0 ? 1e300 : any_weight(&state, dtype);
  const void *from = chance_below(&state, 4) ? w.at : NULL;
  mlfab_gpu_stats stats;
  if (dtype == MLFAB_I64 && scale > 1e20) {
    assert_int_equal(play_add(dtype, dst.at, from, u.at, scale, n, NULL), ELEMENTS_INVALID);
    scale = -9223372036854775808.0;
  }
  int fine = mlfab__kernel_add(dtype, wanted.at, from, u.at, scale, n, 0);
  void *to = chance_below(&state, 3) == 0 ? u.at : from && chance_below(&state, 2) ? w.at : dst.at;
  expect_norm2(
      dtype, u.at, n,
      (assert_int_equal(play_add(dtype, NULL, NULL, u.at, scale, n, &stats), 0), stats.norm2));
  assert_int_equal(stats.finite, fine);
  assert_int_equal(
      play_add(dtype, to, from, u.at, scale, n, chance_below(&state, 2) ? &stats : NULL), 0);
  assert_int_equal(stats.finite, fine);
  if (to != dst.at) memcpy(dst.at, to, dst.bytes);
  expect_same(&dst, &wanted);
  array_free(&w), array_free(&u), array_free(&dst), array_free(&wanted);
}

TEST(updates) { cases(200, one_update); }

/* ---- update rules ---- */

static void one_rule(uint64_t seed) {
  static const double decays[] = {0.0, 0.01}, scales[] = {-0.01, -1.0, 1.0 / 3.0, 1e-7};
  uint64_t state = mix(seed);
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  mlfab__optimizer cpu;
  int dtype = seed % 2 ? MLFAB_F32 : MLFAB_F64;
  options.optimizer = (uint32_t)(seed / 2 % MLFAB_OPTIMIZER_COUNT);
  options.weight_decay = decays[seed / 2 / MLFAB_OPTIMIZER_COUNT % 2];
  if (chance_below(&state, 2))
    options.beta1 = 0.8, options.beta2 = 0.99, options.gamma = 0.5, options.adadelay_c = 3;
  assert_int_equal(mlfab__optimizer_init(&cpu, &options, NULL), 0);
  uint64_t n = any_length(&state, elements_tile(dtype)), off = any_off(&state);
  array w = array_any(&state, dtype, n, off, 1), s0 = array_new(dtype, n, off),
        s1 = array_new(dtype, n, off);
  memset(s0.at, 0, s0.bytes), memset(s1.at, 0, s1.bytes);
  array cw = array_copy(&w, 0), c0 = array_copy(&s0, 0), c1 = array_copy(&s1, 0);
  for (uint64_t t = 1; t < 5; t++) {
    array u = array_any(&state, dtype, n, any_off(&state), t < 4), other = array_new(dtype, n, off);
    mlfab__optimizer_step step = {scales[chance_below(&state, 4)], t * t * t,
                                  chance_below(&state, 9)};
    mlfab_gpu_rule rule = {.kind = cpu.kind,
                           .gamma = cpu.gamma,
                           .adadelay_c = cpu.adadelay_c,
                           .beta1 = cpu.beta1,
                           .beta2 = cpu.beta2,
                           .epsilon = cpu.epsilon,
                           .weight_decay = cpu.weight_decay,
                           .scale = step.scale,
                           .t = step.t,
                           .delay = step.delay};
    int place = (int)chance_below(&state, 3);
    void *to = place == 0 ? w.at : place == 1 ? u.at : other.at;
    mlfab__optimizer_apply(&cpu, &step, dtype, cw.at, cw.at, u.at, c0.at, c1.at, n);
    assert_int_equal(play_apply(&rule, dtype, to, w.at, u.at, s0.at, s1.at, n), 0);
    if (to != w.at) memcpy(w.at, to, w.bytes);
#if defined(__SSE2__) /* elsewhere the CPU's root may differ from the correctly rounded one */
    expect_same(&w, &cw), expect_same(&s0, &c0), expect_same(&s1, &c1);
#else
    if (cpu.kind <= MLFAB_OPTIMIZER_MOMENTUM) expect_same(&w, &cw), expect_same(&s0, &c0);
#endif
    array_free(&u), array_free(&other);
  }
  array_free(&w), array_free(&s0), array_free(&s1), array_free(&cw), array_free(&c0),
      array_free(&c1);
}

TEST(rules) { cases(144, one_rule); }

/* ---- compaction ---- */

static uint32_t literal_compact(const mlfab__filter_rule *rule, const array *g, array *residual,
                                uint32_t *indices, unsigned char *values, uint64_t *saturated) {
  uint32_t kept = 0, width = rule->half == MLFAB_HALF_NONE ? elements_width(rule->dtype) : 2;
  static uint64_t keep[MLFAB__FILTER_STRETCH / 64];
  for (int emit = 0; emit < 2; emit++) {
    for (uint64_t at = 0; at < residual->n; at += MLFAB__FILTER_STRETCH) {
      uint32_t n = (uint32_t)mlfab__min(residual->n - at, MLFAB__FILTER_STRETCH);
      size_t skip = (size_t)at * elements_width(rule->dtype);
      const void *part = g ? g->at + skip : NULL;
      if (mlfab__filter_mark(rule, part, residual->at + skip, at, n, keep) == MLFAB__FILTER_REFUSED)
        return UINT32_MAX;
      if (!emit) continue;
      for (uint32_t i = 0, k = kept; i < n; i++)
        if (keep[i / 64] >> (i % 64) & 1) indices[k++] = (uint32_t)at + i;
      kept += mlfab__filter_emit(rule, part, residual->at + skip, n, keep,
                                 values + (size_t)kept * width, saturated);
    }
  }
  return kept;
}

static void one_compaction(uint64_t seed) {
  static const double taus[] = {0.5, 0.0, 0.1, 1e-3, INFINITY, 0x1.000001p-1, -1.0, 1e300};
  static const uint64_t densities[] = {1, 0, 10, 50, 100};
  uint64_t state = mix(seed), n = any_length(&state, ELEMENTS_COMPACT_TILE), off = any_off(&state),
           saturated = 0;
  double tau = taus[chance_below(&state, chance_below(&state, 2) ? 1 : 8)];
  mlfab__filter_rule rule = {
      seed % 3 ? MLFAB_F32 : MLFAB_F64, (int)chance_below(&state, 3), tau, 1.0, 0, 0};
  int dtype = rule.dtype,
      mode = (int)chance_below(&state, 4); /* bit 0: with g; bit 1: to another array */
  int type = type_of(rule.half, dtype);
  uint64_t density = densities[chance_below(&state, 5)];
  array g = array_new(dtype, n, off), residual = array_new(dtype, n, off);
  for (uint64_t i = 0; i < n; i++) {
    uint64_t zero = number(dtype, 0.0),
             x = any_gradient(&state, dtype, tau < 1e9 ? tau : 0.5, density);
    int alone = chance_below(&state, 3) == 0;
    elements_set(elements_width(dtype), g.at, i,
                 alone ? zero : any_gradient(&state, dtype, 0.25, density));
    elements_set(elements_width(dtype), residual.at, i, x);
  }
  if (n > 0 && chance_below(&state, 10) == 0) /* somewhere an infinity or a NaN */
    elements_set(elements_width(dtype), residual.at, chance_below(&state, n),
                 infinity_of(dtype) + chance_below(&state, 2));
  array wanted = array_copy(&residual, 0), before = array_copy(&residual, 0),
        other = array_new(dtype, n, off);
  uint32_t *wanted_i = (uint32_t *)malloc((n + 1) * sizeof *wanted_i);
  unsigned char *wanted_v = (unsigned char *)malloc((n + 1) * 8);
  assert_true(wanted_i && wanted_v);
  uint32_t kept =
      literal_compact(&rule, mode & 1 ? &g : NULL, &wanted, wanted_i, wanted_v, &saturated);
  uint64_t entries = kept == UINT32_MAX ? n : kept;
  int little = entries > 0 && chance_below(&state, 6) == 0; /* too little room */
  uint64_t room = entries - (little ? 1 + chance_below(&state, entries) : 0) +
                  (little ? 0 : chance_below(&state, 2));
  array indices = array_new(MLFAB_F32, room, any_off(&state)),
        values = array_new(type, room, any_off(&state));
  void *to = mode & 2 ? other.at : residual.at;
  mlfab_gpu_compacted result;
  memset(&result, 0xa5, sizeof result);
  assert_int_equal(play_compact(dtype, mode & 1 ? g.at : NULL, residual.at, to, n, tau, rule.half,
                                (uint32_t *)(void *)indices.at, values.at, room, &result),
                   0);
  if (kept == UINT32_MAX) {
    assert_true(!result.finite && !result.done && result.kept == 0 && result.saturated == 0);
  } else {
    assert_true(result.finite && result.kept == kept && result.saturated == saturated);
    assert_int_equal(result.done, kept <= room);
  }
  if (result.done) {
    assert_memory_equal(indices.at, wanted_i, (size_t)kept * 4);
    assert_memory_equal(values.at, wanted_v, (size_t)kept * elements_width(type));
    assert_memory_equal(to, wanted.at, wanted.bytes);
    if (to != residual.at) assert_memory_equal(residual.at, before.at, before.bytes);
  } else {
    assert_memory_equal(residual.at, before.at, before.bytes);
  }
  uint64_t written = result.done ? kept : 0;
  for (uint64_t i = written * 4; i < indices.bytes; i++) assert_int_equal(indices.at[i], GUARD);
  for (uint64_t i = written * elements_width(type); i < values.bytes; i++)
    assert_int_equal(values.at[i], GUARD);
  free(wanted_i), free(wanted_v);
  array_free(&g), array_free(&residual), array_free(&wanted), array_free(&before),
      array_free(&other);
  array_free(&indices), array_free(&values);
}

TEST(compactions) { cases(500, one_compaction); }

/* The scan of as many parts as a grid has, which the cases above do not reach. */
static void one_scan(uint64_t seed) {
  enum { MOST = 8192 };
  static uint64_t before[MOST];
  static uint32_t count[MOST], over[MOST], bad[MOST];
  uint64_t state = mix(seed), sum = 0, overs = 0;
  uint32_t parts = (uint32_t)(seed == 0 ? MOST : chance_below(&state, MOST + 1)), wrong = 0,
           verdict;
  mlfab_gpu_compacted result;
  elements_compact c;
  memset(&c, 0, sizeof c);
  c.cut.parts = parts;
  c.before = before, c.count = count, c.over = over, c.bad = bad, c.verdict = &verdict,
  c.result = &result;
  for (uint32_t p = 0; p < MOST; p++) {
    count[p] = (uint32_t)chance_below(&state, 524289);
    over[p] = (uint32_t)chance_below(&state, 524289);
    bad[p] = chance_below(&state, 10000) == 0;
    before[p] = UINT64_MAX;
    if (p < parts) sum += count[p], overs += over[p], wrong |= bad[p];
  }
  c.room = sum - (sum > 0 && seed % 3 == 0);
  play_scan(&c);
  assert_int_equal(result.finite, !wrong);
  assert_true(result.kept == (wrong ? 0 : sum) && result.saturated == (wrong ? 0 : overs));
  assert_int_equal(result.done, !wrong && sum <= c.room);
  assert_int_equal(verdict, result.done);
  for (uint32_t p = 0, at = 0; p < MOST; p++) {
    assert_true(before[p] == (p < parts ? at : UINT64_MAX));
    at += count[p];
  }
}

TEST(scans) { cases(20, one_scan); }

/* ---- scatter ---- */

static void one_scatter(uint64_t seed) {
  static const int types[] = {MLFAB_F32, MLFAB_F64, MLFAB_I64};
  uint64_t state = mix(seed), length = 1 + any_length(&state, 4096), n = 0;
  int dtype = types[seed % 3], half = dtype == MLFAB_I64 ? 0 : (int)chance_below(&state, 3);
  int type = type_of(half, dtype);
  double scale = any_weight(&state, dtype);
  array dst = array_any(&state, dtype, length, any_off(&state), 0), wanted = array_copy(&dst, 0);
  array indices = array_new(MLFAB_F32, length, any_off(&state)),
        values = array_any(&state, type, length, any_off(&state), 0);
  uint64_t one_in = 1 + chance_below(&state, 5);
  for (uint64_t i = 0; i < length; i++) {
    if (chance_below(&state, one_in) != 0) continue;
    double wide = 0;
    uint64_t bits = get(type, values.at, n);
    float x = half ? mlfab__half_back(half, (uint16_t)bits) : 0.0f;
    const void *term = &bits;
    uint32_t b32 = (uint32_t)bits;
    if (dtype == MLFAB_F32) term = half ? (const void *)&x : (const void *)&b32;
    if (dtype == MLFAB_F64 && half) wide = (double)x, term = &wide;
    void *at = wanted.at + i * elements_width(dtype);
    (void)mlfab__kernel_add(dtype, at, at, term, scale, 1, 0);
    elements_set(4, indices.at, n++, i);
  }
  assert_int_equal(play_scatter_add(dtype, dst.at, (const uint32_t *)(void *)indices.at, values.at,
                                    half, n, scale),
                   0);
  expect_same(&dst, &wanted);
  array_free(&dst), array_free(&wanted), array_free(&indices), array_free(&values);
}

TEST(scatters) { cases(150, one_scatter); }

/* ---- arguments ---- */

#define INVALID(call) assert_int_equal(call, ELEMENTS_INVALID)
#define MISALIGNED(call) assert_int_equal(call, ELEMENTS_MISALIGNED)

TEST(arguments_are_checked) {
  double data[8] = {0}, states[16] = {0};
  float *odd = (float *)(void *)((char *)data + 2);
  uint32_t indices[4];
  const void *in[17] = {data};
  const double nan[1] = {NAN}, big[1] = {9.3e18};
  mlfab_gpu_stats stats;
  mlfab_gpu_compacted found;
  mlfab_gpu_rule rule = {.kind = MLFAB_OPTIMIZER_ADAM,
                         .beta1 = 0.9,
                         .beta2 = 0.9,
                         .epsilon = 1e-8,
                         .scale = 1,
                         .t = 1};
  for (int i = 1; i < 17; i++) in[i] = data;
  INVALID(play_sum(MLFAB_F32, data, in, NULL, 0, 1, NULL));
  INVALID(play_sum(MLFAB_F32, data, in, NULL, 17, 1, NULL));
  INVALID(play_sum(MLFAB_F32, data, NULL, NULL, 1, 1, NULL));
  INVALID(play_sum(MLFAB_F32, NULL, in, NULL, 1, 1, NULL));
  INVALID(play_sum(MLFAB_BYTES, data, in, NULL, 1, 1, NULL));
  INVALID(play_sum(MLFAB_I64, data, in, nan, 1, 1, NULL));
  INVALID(play_sum(MLFAB_I64, data, in, big, 1, 1, NULL));
  MISALIGNED(play_sum(MLFAB_F32, odd, in, NULL, 1, 1, NULL));
  in[3] = NULL;
  INVALID(play_sum(MLFAB_F32, data, in, NULL, 4, 1, NULL));
  assert_int_equal(play_sum(MLFAB_F32, NULL, in + 3, NULL, 1, 0, &stats), 0);
  assert_true(stats.norm2 == 0 && stats.finite == 1);
  INVALID(elements_stats_check(&stats, NULL));
  MISALIGNED(elements_stats_check(&stats, (char *)data + 8 + 8 * ((uintptr_t)data % 16 != 0)));
  INVALID(play_add(MLFAB_F16, data, data, data, 1, 1, NULL));
  INVALID(play_add(MLFAB_F32, data, data, NULL, 1, 1, NULL));
  MISALIGNED(play_add(MLFAB_F32, data, odd, data, 1, 1, NULL));
  INVALID(play_add(MLFAB_F32, NULL, data, data, 1, 1, NULL));
  INVALID(play_apply(NULL, MLFAB_F32, data, data, data, states, states, 1));
  INVALID(play_apply(&rule, MLFAB_I64, data, data, data, states, states, 1));
  INVALID(play_apply(&rule, MLFAB_F32, data, data, data, states, NULL, 1));
  MISALIGNED(play_apply(&rule, MLFAB_F32, data, data, data, states, odd, 1));
  rule.t = 0;
  INVALID(play_apply(&rule, MLFAB_F32, data, data, data, states, states + 8, 1));
  rule.t = 1, rule.kind = MLFAB_OPTIMIZER_COUNT;
  INVALID(play_apply(&rule, MLFAB_F32, data, data, data, states, states + 8, 1));
  INVALID(play_convert(MLFAB_F16, data, MLFAB_BF16, states, 0, 1));
  MISALIGNED(play_convert(MLFAB_F16, data, MLFAB_F32, odd, 0, 1));
  assert_int_equal(play_convert(MLFAB_F16, NULL, MLFAB_F32, NULL, 0, 0), 0);
  INVALID(play_compact(MLFAB_I64, NULL, data, data, 1, 1, 0, indices, states, 1, &found));
  INVALID(play_compact(MLFAB_F32, NULL, data, data, 1, NAN, 0, indices, states, 1, &found));
  INVALID(play_compact(MLFAB_F32, NULL, data, data, 1, 1, 3, indices, states, 1, &found));
  INVALID(play_compact(MLFAB_F32, NULL, data, NULL, 1, 1, 0, indices, states, 1, &found));
  MISALIGNED(play_compact(MLFAB_F32, odd, data, data, 1, 1, 0, indices, states, 1, &found));
  assert_int_equal(play_compact(MLFAB_F32, NULL, NULL, NULL, 0, 1, 0, NULL, NULL, 0, &found), 0);
  assert_true(found.kept == 0 && found.finite == 1 && found.done == 1);
  INVALID(play_scatter_add(MLFAB_I64, data, indices, states, MLFAB_HALF_F16, 1, 1));
  INVALID(play_scatter_add(MLFAB_F32, data, NULL, states, 0, 1, 1));
  MISALIGNED(play_scatter_add(MLFAB_F32, odd, indices, states, 0, 1, 1));
}

/* The cut of large arrays: at most as many parts as a scan takes, and every tile in one of them. */
TEST(every_tile_is_in_one_part) {
  uint64_t state = 5;
  for (int i = 0; i < 2000; i++) {
    uint64_t n = chance_below(&state, UINT64_C(1) << (1 + chance_below(&state, 44))), tile = 0;
    elements_cut cut = elements_cut_of(n, 2048u << chance_below(&state, 3), 0);
    assert_true(cut.parts <= ELEMENTS_PARTS && cut.tiles * cut.tile >= n &&
                (cut.tiles == 0 || (cut.tiles - 1) * cut.tile < n));
    for (uint32_t p = 0; p < cut.parts; p++) {
      assert_true(elements_first(&cut, p) == tile && elements_end(&cut, p) > tile);
      tile = elements_end(&cut, p);
    }
    assert_true(tile == cut.tiles);
  }
}

TESTS(NULL, NULL)
