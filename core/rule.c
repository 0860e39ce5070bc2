/* rule.c - update rules: what a committed sum does to the weights. Layer 2.
 *
 * For: applying one rule to one stretch of elements. Not for: deciding when to commit, whether the
 * sum is finite (the store looked before), or where states live.
 *
 * Invariants: every rule is a chain of reduce kernels over short blocks that stay in cache, so that
 * a rule inherits their promise: one rounding a multiply and one an add, in the element's type, the
 * same bits at every CPU level, under every compiler flag, and wherever a stretch is cut. Scalars
 * are computed in double, then rounded to the element's type. The one step that is not such a
 * chain, Adam's quotient, is computed in double for both types: compilers replace float divisions
 * and roots by estimates under -ffast-math, but not those of doubles.
 *
 * Source: MLfabric §2 eq. (2); §3.1 and §10.4 eq. (21); Kingma and Ba 2015, Alg. 1 in the order of
 * operations of the end of its §2; Loshchilov and Hutter 2019, Alg. 2. Departs: epsilon is scaled
 * by sqrt(1 - beta2^t) there, so that the step is the one of Alg. 1, not the variant with epsilon
 * hat. */
#include "rule.h"
#include "env.h"
#include "reduce.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Elements a rule works on at a time: its scratch is three arrays of this many. */
#define RULE_BLOCK 512u

/* Enough for a block of either floating type; the kernels see it as void. */
typedef union rule_scratch {
  float f32[RULE_BLOCK];
  double f64[RULE_BLOCK];
} rule_scratch;

/* The correctly rounded root of x >= 0 (within 1 ulp where there is no instruction for it). Not
 * libm's sqrt, lest a program that links mlfab.c needs -lm. */
static double rule_sqrt(double x) {
#if defined(__SSE2__)
  return _mm_cvtsd_f64(_mm_sqrt_pd(_mm_set1_pd(x)));
#else
  uint64_t bits;
  double scale = 1.0, root;
  if (x <= 0.0 || !mlfab__reduce_finite(MLFAB_F64, &x, 1)) return x;
  /* Subnormal numbers have no exponent to halve: 2^108 lifts them, 2^-54 brings the root back. */
  if (x < 2.2250738585072014e-308)
    x *= 324518553658426726783156020576256.0, scale = 1.0 / 18014398509481984.0;
  /* Half the exponent gives a root within 4 %, and each of Newton's steps squares the error. */
  memcpy(&bits, &x, sizeof bits);
  bits = (bits >> 1) + 0x1ff7a3bea91d9b1bu;
  memcpy(&root, &bits, sizeof root);
  for (int i = 0; i < 5; i++) root = 0.5 * (root + x / root);
  return root * scale;
#endif
}

/* x[i] = sqrt(x[i]); n is even. */
static void rule_sqrt_all(double *x, size_t n) {
#if defined(__SSE2__)
  for (size_t i = 0; i < n; i += 2) _mm_storeu_pd(x + i, _mm_sqrt_pd(_mm_loadu_pd(x + i)));
#else
  for (size_t i = 0; i < n; i++) x[i] = rule_sqrt(x[i]);
#endif
}

/* base^exponent by squaring; accurate enough for 1 - beta^t, as the error vanishes with the
 * power. */
static double rule_power(double base, uint64_t exponent) {
  double power = 1.0;
  for (; exponent != 0; exponent >>= 1, base *= base)
    if (exponent & 1) power *= base;
  return power;
}

/* Replaces zero by the default, then refuses what is outside [low, high) or, with `open`, is
 * low. */
static int rule_member(double *member, double given, double fallback, const char *name, double low,
                       double high, int open, const char *range, mlfab_error *error) {
  *member = given;
  /* Asked before any comparison, which -ffast-math would assume to be about a number. */
  if (!mlfab__reduce_finite(MLFAB_F64, member, 1))
    return mlfab__error(error, MLFAB_ERR_CONFIG, MLFAB_NO_RANK, 0, 0, "%s is not finite", name);
  if (given == 0.0) *member = fallback;
  if (*member < low || *member >= high || (open && *member <= low))
    return mlfab__error(error, MLFAB_ERR_CONFIG, MLFAB_NO_RANK, 0, 0, "%s is %g, must be %s", name,
                        *member, range);
  return 0;
}

#define RULE_GIVEN(member) \
  (options != NULL && MLFAB__HAS(options, mlfab_model_options, member) ? options->member : 0)
#define RULE_MEMBER(member, fallback, low, high, open, range)                                     \
  if (code == 0)                                                                                  \
  code = rule_member(&made.member, RULE_GIVEN(member), fallback, #member, low, high, open, range, \
                     error)

MLFAB__INTERNAL int mlfab__rule_init(mlfab__rule *rule, const mlfab_model_options *options,
                                     mlfab_error *error) {
  const double huge = 1.7976931348623157e308;
  mlfab__rule made = {0};
  int code = 0;
  made.kind = RULE_GIVEN(rule);
  if (made.kind > MLFAB_RULE_ADAMW)
    return mlfab__error(error, MLFAB_ERR_UNSUPPORTED, MLFAB_NO_RANK, 0, 0, "unknown rule %u",
                        (unsigned)made.kind);
  RULE_MEMBER(gamma, 0.9, 0.0, 1.0, 0, "in [0, 1)");
  RULE_MEMBER(adadelay_c, 1.0, 0.0, huge, 1, "positive");
  RULE_MEMBER(beta1, 0.9, 0.0, 1.0, 0, "in [0, 1)");
  RULE_MEMBER(beta2, 0.999, 0.0, 1.0, 0, "in [0, 1)");
  RULE_MEMBER(epsilon, 1e-8, 0.0, huge, 1, "positive");
  RULE_MEMBER(weight_decay, 0.01, 0.0, huge, 1, "positive");
  if (code == 0) *rule = made;
  return code;
}

MLFAB__INTERNAL uint32_t mlfab__rule_states(uint32_t kind) {
  if (kind == MLFAB_RULE_MOMENTUM) return 1;
  return kind == MLFAB_RULE_ADAM || kind == MLFAB_RULE_ADAMW ? 2 : 0;
}

MLFAB__INTERNAL int mlfab__rule_linear(uint32_t kind) {
  return kind == MLFAB_RULE_PLAIN || kind == MLFAB_RULE_MOMENTUM || kind == MLFAB_RULE_ADADELAY;
}

MLFAB__INTERNAL const char *mlfab__rule_name(uint32_t kind) {
  switch (kind) {
    case MLFAB_RULE_PLAIN:
      return "plain";
    case MLFAB_RULE_MOMENTUM:
      return "momentum";
    case MLFAB_RULE_ADADELAY:
      return "adadelay";
    case MLFAB_RULE_ADAM:
      return "adam";
    case MLFAB_RULE_ADAMW:
      return "adamw";
    default:
      return "unknown";
  }
}

/* dst = w + scale * u without asking whether it is finite. */
static void rule_add(int dtype, void *dst, const void *w, const void *u, double scale, size_t n) {
  (void)mlfab__reduce_add(dtype, dst, w, u, scale, n, 0);
}

/* Eq. (2): h = gamma * h + scale * u; dst = w + h. */
static void rule_momentum(const mlfab__rule *rule, double scale, int dtype, void *dst,
                          const void *w, const void *u, void *h, size_t n) {
  rule_scratch kept;
  rule_add(dtype, &kept, NULL, h, rule->gamma, n);
  rule_add(dtype, h, &kept, u, scale, n);
  rule_add(dtype, dst, w, h, 1.0, n);
}

/* out = u * u, element by element. */
static void rule_square(int dtype, rule_scratch *out, const void *u, size_t n) {
  if (dtype == MLFAB_F32)
    for (size_t i = 0; i < n; i++) out->f32[i] = ((const float *)u)[i] * ((const float *)u)[i];
  else
    for (size_t i = 0; i < n; i++) out->f64[i] = ((const double *)u)[i] * ((const double *)u)[i];
}

/* out = m / (sqrt(v) + epsilon), in double, rounded to the element's type. */
static void rule_quotient(int dtype, rule_scratch *out, const void *m, const void *v,
                          double epsilon, size_t n) {
  double root[RULE_BLOCK];
  if (dtype == MLFAB_F32)
    for (size_t i = 0; i < n; i++) root[i] = (double)((const float *)v)[i];
  else
    memcpy(root, v, n * sizeof root[0]);
  if (n % 2 != 0) root[n] = 0.0;
  rule_sqrt_all(root, n + n % 2);
  if (dtype == MLFAB_F32)
    for (size_t i = 0; i < n; i++)
      out->f32[i] = (float)((double)((const float *)m)[i] / (root[i] + epsilon));
  else
    for (size_t i = 0; i < n; i++) out->f64[i] = ((const double *)m)[i] / (root[i] + epsilon);
}

/* m = beta1 * m + (1 - beta1) * u; v = beta2 * v + (1 - beta2) * u * u; dst = w + scale * mhat /
 * (sqrt(vhat) + epsilon). Both bias corrections are drawn out of the quotient into the scalars. */
static void rule_adam(const mlfab__rule *rule, const mlfab__rule_step *step, int dtype, void *dst,
                      const void *w, const void *u, void *m, void *v, size_t n) {
  rule_scratch kept, square;
  double correction1 = 1.0 - rule_power(rule->beta1, step->t);
  double correction2 = rule_sqrt(1.0 - rule_power(rule->beta2, step->t));
  rule_add(dtype, &kept, NULL, m, rule->beta1, n);
  rule_add(dtype, m, &kept, u, 1.0 - rule->beta1, n);
  rule_square(dtype, &square, u, n);
  rule_add(dtype, &kept, NULL, v, rule->beta2, n);
  rule_add(dtype, v, &kept, &square, 1.0 - rule->beta2, n);
  rule_quotient(dtype, &square, m, v, rule->epsilon * correction2, n);
  if (rule->kind == MLFAB_RULE_ADAMW) {
    rule_add(dtype, &kept, w, w, step->scale * rule->weight_decay, n);
    w = &kept;
  }
  rule_add(dtype, dst, w, &square, step->scale * correction2 / correction1, n);
}

MLFAB__INTERNAL void mlfab__rule_apply(const mlfab__rule *rule, const mlfab__rule_step *step,
                                       int dtype, void *dst, const void *w, const void *u, void *s0,
                                       void *s1, uint64_t n) {
  double scale = step->scale;
  assert(step->t >= 1);
  assert(dtype != MLFAB_I64 || rule->kind == MLFAB_RULE_PLAIN);
  if (rule->kind == MLFAB_RULE_ADADELAY)
    scale *= rule->adadelay_c / rule_sqrt((double)step->t + (double)step->delay);
  if (mlfab__rule_states(rule->kind) == 0) {
    (void)mlfab__reduce_add(dtype, dst, w, u, scale, n, 0);
    return;
  }
  size_t width = mlfab__dtype_bytes(dtype);
  for (uint64_t at = 0; at < n; at += RULE_BLOCK) {
    size_t count = (size_t)mlfab__min(n - at, RULE_BLOCK), skip = (size_t)at * width;
    void *dst_at = (char *)dst + skip, *s0_at = (char *)s0 + skip;
    const void *w_at = (const char *)w + skip, *u_at = (const char *)u + skip;
    if (rule->kind == MLFAB_RULE_MOMENTUM)
      rule_momentum(rule, scale, dtype, dst_at, w_at, u_at, s0_at, count);
    else
      rule_adam(rule, step, dtype, dst_at, w_at, u_at, s0_at, (char *)s1 + skip, count);
  }
}

#undef RULE_BLOCK
#undef RULE_GIVEN
#undef RULE_MEMBER
