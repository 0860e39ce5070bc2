/* optimizer.c - applies a committed sum to the weights.
 *
 * For: applying one optimizer to some elements. Its caller decides when to commit, has checked that the sum is finite,
 * and stores the states.
 *
 * Invariants: every optimizer is a chain of kernels over short blocks that stay in cache. So it has the kernels'
 * guarantees: one rounding for each multiply and each add, in the element's type; the same bits at every CPU level,
 * under every compiler flag, and for every division of the elements. Scalars are computed in double, then rounded to
 * the element's type. One step is no kernel: the quotient by a root, computed in double for both types. Reason: under
 * -ffast-math compilers replace divisions and roots of floats, but not of doubles, by estimates.
 *
 * Source: MLfabric §2 eq. (2); §3.1 and §10.4 eq. (21); Kingma and Ba 2015, Alg. 1 in the order of
 * operations of the end of its §2; Loshchilov and Hutter 2019, Alg. 1 and 2 (decoupled decay); Duchi, Hazan
 * and Singer 2011 (AdaGrad, diagonal); Tieleman and Hinton 2012 (RMSprop); Sutskever et al. 2013 (Nesterov);
 * Chen et al. 2023, Alg. 2 (Lion). Departs: epsilon is scaled by sqrt(1 - beta2^t): the step is that of Alg. 1, not the
 * variant with epsilon hat. */
#include "optimizer.h"
#include "../base/env.h"
#include "../kernels/kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Elements processed at a time: the scratch is four arrays of this many. */
#define OPTIMIZER_BLOCK 512u

/* A block of either floating type; the kernels see it as void. */
typedef union optimizer_scratch {
  float f32[OPTIMIZER_BLOCK];
  double f64[OPTIMIZER_BLOCK];
} optimizer_scratch;

/* The correctly rounded root of x >= 0 (within 1 ulp without a hardware instruction). It replaces libm's sqrt, so that
 * programs can link without -lm. */
static double optimizer_sqrt(double x) {
#if defined(__SSE2__)
  return _mm_cvtsd_f64(_mm_sqrt_pd(_mm_set1_pd(x)));
#else
  uint64_t bits;
  double scale = 1.0, root;
  if (x <= 0.0 || !mlfab__finite(x)) return x;
  /* Subnormal numbers have no exponent to halve: scales by 2^108, and the root by 2^-54. */
  if (x < 2.2250738585072014e-308)
    x *= 324518553658426726783156020576256.0, scale = 1.0 / 18014398509481984.0;
  /* Half the exponent gives a root within 4 %; each Newton step squares the error. */
  memcpy(&bits, &x, sizeof bits);
  bits = (bits >> 1) + 0x1ff7a3bea91d9b1bu;
  memcpy(&root, &bits, sizeof root);
  for (int i = 0; i < 5; i++) root = 0.5 * (root + x / root);
  return root * scale;
#endif
}

/* x[i] = sqrt(x[i]); n is even. */
static void optimizer_sqrt_all(double *x, size_t n) {
#if defined(__SSE2__)
  for (size_t i = 0; i < n; i += 2) _mm_storeu_pd(x + i, _mm_sqrt_pd(_mm_loadu_pd(x + i)));
#else
  for (size_t i = 0; i < n; i++) x[i] = optimizer_sqrt(x[i]);
#endif
}

/* base^exponent by squaring; accurate enough for 1 - beta^t, because the error vanishes with the power. */
static double optimizer_power(double base, uint64_t exponent) {
  double power = 1.0;
  for (; exponent != 0; exponent >>= 1, base *= base)
    if (exponent & 1) power *= base;
  return power;
}

/* At most OPTIMIZER_BLOCK elements of one commit. */
typedef struct optimizer_block {
  int dtype;
  double scale; /* of u */
  uint64_t t;   /* number of the commit, from 1 */
  void *dst;
  const void *w, *u;
  void *s0, *s1; /* states, as many as the optimizer has */
  size_t n;
} optimizer_block;

/* --- the optimizers --- */

/* dst = w + scale * u, without checking that it is finite. */
static void optimizer_add(int dtype, void *dst, const void *w, const void *u, double scale,
                          size_t n) {
  (void)mlfab__kernel_add(dtype, dst, w, u, scale, n, 0);
}

/* Eq. (2): h = gamma * h + scale * u; dst = w + h. */
static void optimizer_momentum(const mlfab__optimizer *optimizer, const optimizer_block *block) {
  optimizer_scratch kept;
  int dtype = block->dtype;
  optimizer_add(dtype, &kept, NULL, block->s0, optimizer->gamma, block->n);
  optimizer_add(dtype, block->s0, &kept, block->u, block->scale, block->n);
  optimizer_add(dtype, block->dst, block->w, block->s0, 1.0, block->n);
}

/* Nesterov's momentum, without a second position for the look ahead: h = gamma * h + scale * u; dst = w +
 * gamma * h + scale * u. */
static void optimizer_nesterov(const mlfab__optimizer *optimizer, const optimizer_block *block) {
  optimizer_scratch kept;
  int dtype = block->dtype;
  optimizer_add(dtype, &kept, NULL, block->s0, optimizer->gamma, block->n);
  optimizer_add(dtype, block->s0, &kept, block->u, block->scale, block->n);
  optimizer_add(dtype, &kept, block->w, block->s0, optimizer->gamma, block->n);
  optimizer_add(dtype, block->dst, &kept, block->u, block->scale, block->n);
}

/* x = its sign: -1, 0 or 1. */
static void optimizer_sign(int dtype, optimizer_scratch *x, size_t n) {
  if (dtype == MLFAB_F32)
    for (size_t i = 0; i < n; i++) x->f32[i] = (float)((x->f32[i] > 0.0f) - (x->f32[i] < 0.0f));
  else
    for (size_t i = 0; i < n; i++) x->f64[i] = (double)((x->f64[i] > 0.0) - (x->f64[i] < 0.0));
}

/* c = beta1 * m + (1 - beta1) * u; m = beta2 * m + (1 - beta2) * u; dst = w + scale * sign(c). */
static void optimizer_lion(const mlfab__optimizer *optimizer, const optimizer_block *block) {
  optimizer_scratch kept, sign;
  void *m = block->s0;
  int dtype = block->dtype;
  size_t n = block->n;
  optimizer_add(dtype, &kept, NULL, m, optimizer->beta1, n);
  optimizer_add(dtype, &sign, &kept, block->u, 1.0 - optimizer->beta1, n);
  optimizer_add(dtype, &kept, NULL, m, optimizer->beta2, n);
  optimizer_add(dtype, m, &kept, block->u, 1.0 - optimizer->beta2, n);
  optimizer_sign(dtype, &sign, n);
  optimizer_add(dtype, block->dst, block->w, &sign, block->scale, n);
}

/* out = u * u, element by element. */
static void optimizer_square(int dtype, optimizer_scratch *out, const void *u, size_t n) {
  if (dtype == MLFAB_F32)
    for (size_t i = 0; i < n; i++) out->f32[i] = ((const float *)u)[i] * ((const float *)u)[i];
  else
    for (size_t i = 0; i < n; i++) out->f64[i] = ((const double *)u)[i] * ((const double *)u)[i];
}

/* out = m / (sqrt(v) + epsilon), in double, rounded to the element's type. */
static void optimizer_quotient(int dtype, optimizer_scratch *out, const void *m, const void *v,
                               double epsilon, size_t n) {
  double root[OPTIMIZER_BLOCK];
  if (dtype == MLFAB_F32)
    for (size_t i = 0; i < n; i++) root[i] = (double)((const float *)v)[i];
  else
    memcpy(root, v, n * sizeof root[0]);
  if (n % 2 != 0) root[n] = 0.0;
  optimizer_sqrt_all(root, n + n % 2);
  if (dtype == MLFAB_F32)
    for (size_t i = 0; i < n; i++)
      out->f32[i] = (float)((double)((const float *)m)[i] / (root[i] + epsilon));
  else
    for (size_t i = 0; i < n; i++) out->f64[i] = ((const double *)m)[i] / (root[i] + epsilon);
}

/* v = keep * v + take * u * u. */
static void optimizer_squares(int dtype, const void *u, void *v, double keep, double take,
                              size_t n) {
  optimizer_scratch kept, square;
  optimizer_square(dtype, &square, u, n);
  optimizer_add(dtype, &kept, NULL, v, keep, n);
  optimizer_add(dtype, v, &kept, &square, take, n);
}

/* m = beta1 * m + (1 - beta1) * u; v = beta2 * v + (1 - beta2) * u * u; dst = w + scale * mhat / (sqrt(vhat) +
 * epsilon). Both bias corrections are in the scalars instead of the quotient. */
static void optimizer_adam(const mlfab__optimizer *optimizer, const optimizer_block *block) {
  optimizer_scratch kept, quotient;
  void *m = block->s0, *v = block->s1;
  int dtype = block->dtype;
  size_t n = block->n;
  double correction1 = 1.0 - optimizer_power(optimizer->beta1, block->t);
  double correction2 = optimizer_sqrt(1.0 - optimizer_power(optimizer->beta2, block->t));
  optimizer_add(dtype, &kept, NULL, m, optimizer->beta1, n);
  optimizer_add(dtype, m, &kept, block->u, 1.0 - optimizer->beta1, n);
  optimizer_squares(dtype, block->u, v, optimizer->beta2, 1.0 - optimizer->beta2, n);
  optimizer_quotient(dtype, &quotient, m, v, optimizer->epsilon * correction2, n);
  optimizer_add(dtype, block->dst, block->w, &quotient, block->scale * correction2 / correction1,
                n);
}

/* v = keep * v + take * u * u; dst = w + scale * u / (sqrt(v) + epsilon). */
static void optimizer_by_root(const mlfab__optimizer *optimizer, const optimizer_block *block,
                              double keep, double take) {
  optimizer_scratch quotient;
  int dtype = block->dtype;
  optimizer_squares(dtype, block->u, block->s0, keep, take, block->n);
  optimizer_quotient(dtype, &quotient, block->u, block->s0, optimizer->epsilon, block->n);
  optimizer_add(dtype, block->dst, block->w, &quotient, block->scale, block->n);
}

static void optimizer_rmsprop(const mlfab__optimizer *optimizer, const optimizer_block *block) {
  optimizer_by_root(optimizer, block, optimizer->beta2, 1.0 - optimizer->beta2);
}

static void optimizer_adagrad(const mlfab__optimizer *optimizer, const optimizer_block *block) {
  optimizer_by_root(optimizer, block, 1.0, 1.0);
}

static void optimizer_sgd(const mlfab__optimizer *optimizer, const optimizer_block *block) {
  (void)optimizer;
  optimizer_add(block->dtype, block->dst, block->w, block->u, block->scale, block->n);
}
#define optimizer_adadelay optimizer_sgd /* with another scale */

/* The optimizers, by MLFAB_OPTIMIZER_*. */
#define OPTIMIZER_ROW(kind, name, states, linear, uses) \
  [MLFAB_OPTIMIZER_##kind] = {states, linear, uses, optimizer_##name},
static const struct {
  uint32_t states; /* number of state arrays of the weights' size: 0, 1 or 2 */
  int linear;      /* the step is linear in u and does not decay w */
  uint32_t uses;   /* MLFAB__USES_* */
  void (*apply)(const mlfab__optimizer *optimizer, const optimizer_block *block);
} optimizer_kinds[MLFAB_OPTIMIZER_COUNT] = {MLFAB__OPTIMIZERS(OPTIMIZER_ROW)};

/* --- the interface --- */

/* Refuses values outside [low, high); with `open`, low, too. */
static int optimizer_member(double *member, double given, const char *name, double low, double high,
                            int open, const char *range, mlfab_error *error) {
  *member = given;
  /* Checked before any comparison: -ffast-math assumes that comparisons never see a NaN. */
  if (!mlfab__finite(*member))
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "%s is not finite", name);
  if (*member < low || *member >= high || (open && *member <= low))
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "%s is %g, must be %s", name, *member, range);
  return 0;
}

#define OPTIMIZER_MEMBER(member, used, low, high, open, range)                                   \
  if (code == 0)                                                                                 \
    code = optimizer_member(&made.member, given.member, #member, low, high, open, range, error); \
  if (!(used)) made.member = initial.member

MLFAB__INTERNAL int mlfab__optimizer_init(mlfab__optimizer *optimizer,
                                          const mlfab_model_options *options, mlfab_error *error) {
  const double huge = 1.7976931348623157e308;
  const mlfab_model_options initial = MLFAB_MODEL_OPTIONS_INIT;
  mlfab_model_options given = initial;
  if (options) memcpy(&given, options, mlfab__min(options->size, sizeof given));
  mlfab__optimizer made = {.kind = given.optimizer};
  int code = 0;
  if (made.kind >= MLFAB_OPTIMIZER_COUNT)
    return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED, "unknown optimizer %u", (unsigned)made.kind);
  const uint32_t uses = optimizer_kinds[made.kind].uses;
  int sgd = made.kind == MLFAB_OPTIMIZER_SGD, scaled = made.kind == MLFAB_OPTIMIZER_ADADELAY;
  OPTIMIZER_MEMBER(epsilon, uses & MLFAB__USES_EPSILON, 0.0, huge, !sgd,
                   sgd ? "0 or more" : "positive: MLFAB_MODEL_OPTIONS_INIT has initial values");
  OPTIMIZER_MEMBER(gamma, uses & MLFAB__USES_GAMMA, 0.0, 1.0, 0, "in [0, 1)");
  OPTIMIZER_MEMBER(adadelay_c, uses & MLFAB__USES_C, 0.0, huge, scaled,
                   scaled ? "positive" : "0 or more");
  OPTIMIZER_MEMBER(beta1, uses & MLFAB__USES_BETA1, 0.0, 1.0, 0, "in [0, 1)");
  OPTIMIZER_MEMBER(beta2, uses & MLFAB__USES_BETA2, 0.0, 1.0, 0, "in [0, 1)");
  OPTIMIZER_MEMBER(weight_decay, 1, 0.0, huge, 0, "0 or more");
  if (code == 0) *optimizer = made;
  return code;
}

MLFAB__INTERNAL uint32_t mlfab__optimizer_states(uint32_t kind) {
  return kind < MLFAB_OPTIMIZER_COUNT ? optimizer_kinds[kind].states : 0;
}

MLFAB__INTERNAL int mlfab__optimizer_linear(const mlfab__optimizer *optimizer) {
  return optimizer_kinds[optimizer->kind].linear && !(optimizer->weight_decay > 0.0);
}

MLFAB__INTERNAL int mlfab__optimizer_adds(const mlfab__optimizer *optimizer) {
  return optimizer->kind == MLFAB_OPTIMIZER_SGD && !(optimizer->weight_decay > 0.0);
}

MLFAB__INTERNAL void mlfab__optimizer_apply(const mlfab__optimizer *optimizer,
                                            const mlfab__optimizer_step *step, int dtype, void *dst,
                                            const void *w, const void *u, void *s0, void *s1,
                                            uint64_t n) {
  double scale = step->scale;
  assert(step->t >= 1);
  assert(dtype != MLFAB_I64 || mlfab__optimizer_adds(optimizer));
  if (optimizer->kind == MLFAB_OPTIMIZER_ADADELAY)
    scale *= optimizer->adadelay_c / optimizer_sqrt((double)step->t + (double)step->delay);
  uint32_t states = mlfab__optimizer_states(optimizer->kind);
  int plain = optimizer_kinds[optimizer->kind].apply == optimizer_sgd;
  if (plain && !(optimizer->weight_decay > 0.0)) {
    (void)mlfab__kernel_add(dtype, dst, w, u, scale, n, 0);
    return;
  }
  size_t width = mlfab__dtype_bytes(dtype);
  for (uint64_t at = 0; at < n; at += OPTIMIZER_BLOCK) {
    size_t count = (size_t)mlfab__min(n - at, OPTIMIZER_BLOCK), skip = (size_t)at * width;
    optimizer_scratch decayed;
    optimizer_block block = {.dtype = dtype, .scale = scale, .t = step->t, .n = count};
    block.dst = (char *)dst + skip;
    block.w = (const char *)w + skip;
    block.u = (const char *)u + skip;
    block.s0 = states > 0 ? (char *)s0 + skip : NULL;
    block.s1 = states > 1 ? (char *)s1 + skip : NULL;
    if (optimizer->weight_decay > 0.0) {
      optimizer_add(dtype, &decayed, block.w, block.w, step->scale * optimizer->weight_decay,
                    count);
      block.w = &decayed;
    }
    optimizer_kinds[optimizer->kind].apply(optimizer, &block);
  }
}
