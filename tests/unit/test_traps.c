/* test_traps.c - kernels on ordinary numbers raise neither overflow, nor division by zero, nor an invalid
 * operation: a program that traps these would die because of an unused vector lane. Ordinary numbers are
 * zeros, subnormals, numbers beyond a half's range where they travel as halves, and everything between, at
 * every level, length and offset. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* feenableexcept */
#endif
#include "core/kernels/kernels_combine.h"
#include "core/sparse/filter.h"
#include "core/kernels/half.h"
#include "core/kernels/packet.h"
#include "core/base/rng.h"
#include "core/model/optimizer.h"

#include <fenv.h>
#include <math.h>
#include "../testing.h"

enum { MOST = 700, RAISED = FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW };

static mlfab__rng prng;
static uint64_t u[MOST], w[MOST], x[MOST], v[MOST]; /* of any type */
static _Alignas(64) uint8_t bytes[MOST * 8 + 4096];

static void look(const char *call, int level) {
  int raised = fetestexcept(RAISED);
  if (!raised) return;
  fedisableexcept(RAISED);
  fail_msg("level %d: %s raises%s%s%s", level, call, raised & FE_DIVBYZERO ? " DIVBYZERO" : "",
           raised & FE_INVALID ? " INVALID" : "", raised & FE_OVERFLOW ? " OVERFLOW" : "");
}

#define CALM(level, call)         \
  do {                            \
    feclearexcept(FE_ALL_EXCEPT); \
    call;                         \
    look(#call, level);           \
  } while (0)

static uint64_t below(uint64_t n) { return mlfab__rng_next(&prng) % n; }

/* Zeros, subnormals, small and large numbers; `most` bounds them. */
static double ordinary(double smallest, double most) {
  double sign = below(2) ? 1 : -1;
  switch (below(6)) {
    case 0:
      return 0;
    case 1:
      return sign * smallest;
    case 2:
      return sign * most;
    case 3:
      return sign * 1e-6 * (double)(1 + below(1000));
    default:
      return sign * (double)(1 + below(1000)) / 500;
  }
}

static void fill(int dtype, void *at, uint32_t n, double most) {
  for (uint32_t i = 0; i < n; i++) {
    if (dtype == MLFAB_F32) ((float *)at)[i] = (float)ordinary(1e-45, most);
    if (dtype == MLFAB_F64) ((double *)at)[i] = ordinary(5e-324, most);
    if (dtype == MLFAB_I64) ((int64_t *)at)[i] = (int64_t)mlfab__rng_next(&prng);
    if (dtype == MLFAB_F16 || dtype == MLFAB_BF16)
      ((uint16_t *)at)[i] = mlfab__half_one(dtype == MLFAB_F16 ? MLFAB_HALF_F16 : MLFAB_HALF_BF16,
                                            (float)ordinary(1e-7, most > 100 ? 100 : most));
  }
}

static void reduce(int level, int dtype, uint32_t n) {
  double scale = dtype == MLFAB_I64 ? 3 : 0.1;
  fill(dtype, u, n, 1e15);
  fill(dtype, w, n, 1e15);
  CALM(level, mlfab__kernel_add_with(level, dtype, x, w, u, scale, n, 0));
  CALM(level, mlfab__kernel_add_with(level, dtype, w, w, u, scale, n, 1));
  CALM(level, mlfab__kernel_add_with(level, dtype, x, NULL, u, scale, n, 0));
  if (dtype != MLFAB_I64)
    CALM(level, mlfab__kernel_add_with(level, dtype, NULL, NULL, u, scale, n, 0));
  CALM(level, mlfab__kernel_finite(dtype, u, n));
  CALM(level, mlfab__kernel_norm2(dtype, u, n));
}

static void combine(int level, int dtype, uint32_t n) {
  static const int ops[] = {MLFAB_OP_SUM, MLFAB_OP_MIN, MLFAB_OP_MAX, MLFAB_OP_PRODUCT};
  const void *in[3] = {u, w, v};
  void *out[1] = {x};
  fill(dtype, u, n, 10);
  fill(dtype, w, n, 10);
  fill(dtype, v, n, 10);
  for (uint32_t i = 0; i < MLFAB__COUNT(ops); i++)
    CALM(level, mlfab__kernel_combine_many_with(level, ops[i], dtype, out, 1, in, 3, n, 0));
  if (dtype != MLFAB_I64) CALM(level, mlfab__kernel_divide_with(level, dtype, x, n, 3));
  CALM(level, mlfab__elements_finite(dtype, x, n));
}

static void halves(int level, int half, uint32_t n) {
  fill(MLFAB_F32, u, n, 1e38);
  CALM(level, mlfab__half_store_with(level, half, (uint16_t *)x, (const float *)u, n));
  CALM(level, mlfab__half_load_with(level, half, (float *)w, (const uint16_t *)x, n));
  CALM(level, mlfab__half_finite(half, (const uint16_t *)x, n));
  CALM(level, mlfab__half_narrow(1e300));
}

/* Every kernel that handles an update or the model. */
static void filter(int level, int dtype, int half, uint32_t n) {
  static const double taus[] = {0, 1e-9, 0.5, 1e9, HUGE_VAL};
  mlfab__filter_rule rule = {dtype, half, taus[below(5)], (double)below(3) / 2, 7, 1 + below(9)};
  uint64_t keep[MOST / 64 + 1], saturated = 0;
  mlfab__filter_cut cut;
  fill(dtype, u, n, 1e15);
  fill(dtype, w, n, 1e15);
  CALM(level, mlfab__filter_threshold(rule.tau, 0.5, rule.t));
  CALM(level, mlfab__filter_mark_with(level, &rule, u, w, 3, n, keep));
  for (uint32_t i = 0; i < n; i++) /* someone has cleared marks */
    if (below(3) == 0) keep[i / 64] &= ~(UINT64_C(1) << i % 64);
  CALM(level, mlfab__filter_emit_with(level, &rule, u, w, n, keep, bytes, &saturated));
  CALM(level, mlfab__filter_kth(dtype, u, w, n, 1 + n / 3, &cut));
  CALM(level, mlfab__filter_top(dtype, u, w, n, &cut, keep));
  fill(dtype, u, n, 1e15);
  fill(dtype, w, n, 1e15);
  /* some elements do not change */
  for (uint32_t i = 0, width = mlfab__dtype_bytes(dtype); i < n; i++)
    if (below(3) == 0) memcpy((char *)u + i * width, (char *)w + i * width, width);
  CALM(level, mlfab__filter_change_with(level, dtype, w, u, n, 0.01));
}

static void pack(int level, int dtype, int half, uint32_t n) {
  mlfab__packet_shape shape = {0, dtype, half, (uint32_t)below(3), n};
  uint64_t keep[MOST / 64 + 1] = {0};
  mlfab__packet packet;
  for (uint32_t i = 0; i < n >> shape.grain_log2; i++)
    if (below(3)) keep[i / 64] |= UINT64_C(1) << i % 64;
  fill(dtype, u, n, 1e15);
  fill(dtype, w, n, 1e15);
  for (int form = 0; form < 3; form++) {
    uint32_t room = 0;
    if (form == 0)
      CALM(level, room = mlfab__packet_dense(bytes, &shape, u));
    else
      CALM(level, room = mlfab__packet_marked(bytes, &shape, u, keep, form == 1));
    if (!room || !mlfab__packet_open(bytes, room, &packet)) continue;
    CALM(level, mlfab__unpack_finite(&packet));
    CALM(level, mlfab__unpack_dense(&packet, x));
    CALM(level, mlfab__unpack_add(&packet, w, 0.1));
    CALM(level, mlfab__unpack_store(&packet, w));
  }
}

static void rules(int level, int dtype, uint32_t n) {
  for (uint32_t kind = MLFAB_OPTIMIZER_SGD; kind < MLFAB_OPTIMIZER_COUNT; kind++) {
    mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
    options.optimizer = kind;
    options.weight_decay = 0.01 * (double)below(2);
    mlfab__optimizer_step step = {-0.01, 1, below(3)};
    mlfab_error error;
    mlfab__optimizer rule;
    assert_int_equal(mlfab__optimizer_init(&rule, &options, &error), 0);
    fill(dtype, w, n, 1e15);
    memset(x, 0, sizeof x);
    memset(v, 0, sizeof v);
    for (; step.t <= 4; step.t++) {
      fill(dtype, u, n, 1e15);
      CALM(level, mlfab__optimizer_apply(&rule, &step, dtype, w, w, u, x, v, n));
    }
  }
}

static int upto(int level, int most) { return level < most ? level : most; }

static void all_kernels(int level) {
  static const int dtypes[] = {MLFAB_F32, MLFAB_F64, MLFAB_I64, MLFAB_F16, MLFAB_BF16};
  for (uint32_t round = 0; round < 60; round++) {
    uint32_t n = round < 20 ? 1 + round : 1 + (uint32_t)below(MOST - 1);
    for (uint32_t d = 0; d < 3; d++) reduce(upto(level, mlfab__kernel_level()), dtypes[d], n);
    for (uint32_t d = 0; d < 5; d++) combine(upto(level, mlfab__kernel_level()), dtypes[d], n);
    for (int half = MLFAB_HALF_NONE; half <= MLFAB_HALF_BF16; half++) {
      if (half) halves(upto(level, mlfab__kernel_level()), half, n);
      for (uint32_t d = 0; d < 2; d++) {
        filter(upto(level, mlfab__kernel_level()), dtypes[d], half, n);
        pack(level, dtypes[d], half, n);
      }
    }
    for (uint32_t d = 0; d < 2; d++) rules(level, dtypes[d], n);
  }
}

/* Checks the exception flags, which show what would trap and in which case. */
TEST(test_flags) {
  mlfab__rng_seed(&prng, 1);
  for (int level = 0; level <= 2; level++) all_kernels(level);
}

/* The same with traps enabled. */
TEST(test_traps) {
  mlfab__rng_seed(&prng, 2);
  feclearexcept(FE_ALL_EXCEPT);
  if (feenableexcept(RAISED) < 0) skip();
  for (int level = 0; level <= 2; level++) all_kernels(level);
  fedisableexcept(RAISED);
}

TESTS(NULL, NULL)
