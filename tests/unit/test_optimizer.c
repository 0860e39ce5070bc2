/* test_optimizer.c - core/model/optimizer.c against the formulas of the papers, written out in double, and against
 * itself cut into pieces. */
#include "core/base/env.h"
#include "core/base/rng.h"
#include "core/model/optimizer.h"

#include <math.h>
#include "../testing.h"

enum { N = 1300 }; /* more than two blocks of the rules, and no multiple of a vector */

typedef struct model {
  double w[N], u[N], s0[N], s1[N];
} model;

static mlfab__optimizer make(uint32_t kind, double decay) {
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  mlfab__optimizer rule;
  options.optimizer = kind;
  options.weight_decay = decay;
  assert_int_equal(mlfab__optimizer_init(&rule, &options, NULL), 0);
  return rule;
}

/* The literal formulas, element by element. */
static void oracle(const mlfab__optimizer *r, const mlfab__optimizer_step *step, double *w,
                   double u, double *s0, double *s1) {
  double t = (double)step->t;
  *w += step->scale * r->weight_decay * *w;
  switch (r->kind) {
    case MLFAB_OPTIMIZER_SGD:
      *w += step->scale * u;
      break;
    case MLFAB_OPTIMIZER_MOMENTUM:
      *s0 = r->gamma * *s0 + step->scale * u;
      *w += *s0;
      break;
    case MLFAB_OPTIMIZER_ADADELAY:
      *w += r->adadelay_c / sqrt(t + (double)step->delay) * step->scale * u;
      break;
    case MLFAB_OPTIMIZER_RMSPROP:
      *s0 = r->beta2 * *s0 + (1.0 - r->beta2) * u * u;
      *w += step->scale * u / (sqrt(*s0) + r->epsilon);
      break;
    case MLFAB_OPTIMIZER_ADAGRAD:
      *s0 += u * u;
      *w += step->scale * u / (sqrt(*s0) + r->epsilon);
      break;
    case MLFAB_OPTIMIZER_NESTEROV:
      *s0 = r->gamma * *s0 + step->scale * u;
      *w += r->gamma * *s0 + step->scale * u;
      break;
    case MLFAB_OPTIMIZER_LION: {
      double c = r->beta1 * *s0 + (1.0 - r->beta1) * u;
      *w += c > 0.0 ? step->scale : c < 0.0 ? -step->scale : 0.0;
      *s0 = r->beta2 * *s0 + (1.0 - r->beta2) * u;
      break;
    }
    default:
      *s0 = r->beta1 * *s0 + (1.0 - r->beta1) * u;
      *s1 = r->beta2 * *s1 + (1.0 - r->beta2) * u * u;
      *w += step->scale * (*s0 / (1.0 - pow(r->beta1, t))) /
            (sqrt(*s1 / (1.0 - pow(r->beta2, t))) + r->epsilon);
  }
}

static void set(int dtype, void *array, size_t i, double x) {
  if (dtype == MLFAB_F32)
    ((float *)array)[i] = (float)x;
  else
    ((double *)array)[i] = x;
}

static double get(int dtype, const void *array, size_t i) {
  return dtype == MLFAB_F32 ? (double)((const float *)array)[i] : ((const double *)array)[i];
}

static void draw(mlfab__rng *prng, int dtype, double *array) {
  for (size_t i = 0; i < N; i++) set(dtype, array, i, mlfab__rng_unit(prng) * 4.0 - 2.0);
}

static void follows(uint32_t kind, double decay, int dtype, double tolerance) {
  mlfab__rng prng;
  mlfab__optimizer rule = make(kind, decay);
  model *got = (model *)calloc(1, sizeof *got), *want = (model *)calloc(1, sizeof *want);
  assert_true(got && want);
  mlfab__rng_seed(&prng, 10 + kind);
  draw(&prng, dtype, got->w);
  for (size_t i = 0; i < N; i++) want->w[i] = get(dtype, got->w, i);
  for (uint64_t t = 1; t <= 40; t++) {
    mlfab__optimizer_step step = {-0.01 * (double)(1 + t % 3), t, mlfab__rng_below(&prng, 9)};
    draw(&prng, dtype, got->u);
    mlfab__optimizer_apply(&rule, &step, dtype, got->w, got->w, got->u, got->s0, got->s1, N);
    for (size_t i = 0; i < N; i++) {
      oracle(&rule, &step, &want->w[i], get(dtype, got->u, i), &want->s0[i], &want->s1[i]);
      assert_true(fabs(get(dtype, got->w, i) - want->w[i]) <= tolerance);
    }
  }
  free(got);
  free(want);
}

TEST(every_rule_follows_its_formula) {
  for (uint32_t kind = 0; kind < MLFAB_OPTIMIZER_COUNT; kind++) {
    for (double decay = 0.0; decay < 0.2; decay += 0.1) {
      follows(kind, decay, MLFAB_F32, 2e-5);
      follows(kind, decay, MLFAB_F64, 1e-13);
    }
  }
}

/* Into w, into u, into a third array, and cut at random places: the same bits, including states. */
TEST(places_and_cuts_do_not_show) {
  mlfab__rng prng;
  model *start = (model *)calloc(1, sizeof *start), *a = (model *)malloc(sizeof *a);
  model *b = (model *)malloc(sizeof *b);
  double *out = (double *)malloc(N * sizeof *out);
  assert_true(start && a && b && out);
  mlfab__rng_seed(&prng, 20);
  for (int round = 0; round < 200; round++) {
    int dtype = round % 2 ? MLFAB_F32 : MLFAB_F64, place = (int)mlfab__rng_below(&prng, 3);
    mlfab__optimizer rule =
        make((uint32_t)mlfab__rng_below(&prng, MLFAB_OPTIMIZER_COUNT), round % 4 < 2 ? 0.0 : 0.01);
    mlfab__optimizer_step step = {-0.03, 1 + mlfab__rng_below(&prng, 1000), 3};
    size_t width = dtype == MLFAB_F32 ? 4 : 8;
    draw(&prng, dtype, start->w);
    draw(&prng, dtype, start->u);
    for (size_t i = 0; i < N; i++) {
      set(dtype, start->s0, i, mlfab__rng_unit(&prng));
      set(dtype, start->s1, i, mlfab__rng_unit(&prng));
    }
    *a = *b = *start;
    mlfab__optimizer_apply(&rule, &step, dtype, out, a->w, a->u, a->s0, a->s1, N);
    assert_memory_equal(a->w, start->w, N * width);
    assert_memory_equal(a->u, start->u, N * width);
    char *dst = place == 0 ? (char *)b->w : place == 1 ? (char *)b->u : (char *)a->w;
    for (size_t at = 0, count; at < N; at += count) {
      count = (size_t)mlfab__min(N - at, 1 + mlfab__rng_below(&prng, 900));
      size_t skip = at * width;
      mlfab__optimizer_apply(&rule, &step, dtype, dst + skip, (char *)b->w + skip,
                             (char *)b->u + skip, (char *)b->s0 + skip, (char *)b->s1 + skip,
                             count);
    }
    assert_memory_equal(dst, out, N * width);
    assert_memory_equal(a->s0, b->s0, N * width);
    assert_memory_equal(a->s1, b->s1, N * width);
  }
  free(start);
  free(a);
  free(b);
  free(out);
}

/* MLfabric eq. (5) and (6): two updates in both orders, from h = (1, -2) and w = 0 with gamma 0.9. */
TEST(momentum_is_equation_2) {
  static const double updates[2][2][2] = {{{3, 1}, {-1, 4}}, {{-1, 4}, {3, 1}}};
  static const double w_after[2][2][2] = {{{3.9, -0.8}, {6.41, 2.48}}, {{-0.1, 2.2}, {2.81, 5.18}}};
  static const double h_after[2][2][2] = {{{3.9, -0.8}, {2.51, 3.28}}, {{-0.1, 2.2}, {2.91, 2.98}}};
  mlfab__optimizer rule = make(MLFAB_OPTIMIZER_MOMENTUM, 0.0);
  for (size_t order = 0; order < 2; order++) {
    double w[2] = {0, 0}, h[2] = {1, -2};
    for (size_t k = 0; k < 2; k++) {
      mlfab__optimizer_step step = {1.0, k + 1, 0};
      mlfab__optimizer_apply(&rule, &step, MLFAB_F64, w, w, updates[order][k], h, NULL, 2);
      for (size_t i = 0; i < 2; i++) {
        assert_true(fabs(w[i] - w_after[order][k][i]) < 1e-14);
        assert_true(fabs(h[i] - h_after[order][k][i]) < 1e-14);
      }
    }
  }
}

TEST(adadelay_steps_shrink_with_delay) {
  mlfab__optimizer rule = make(MLFAB_OPTIMIZER_ADADELAY, 0.0);
  double u = 1.0, before = 2.0;
  for (uint64_t delay = 0; delay < 100; delay++) {
    mlfab__optimizer_step step = {1.0, 1, delay};
    double w = 0.0;
    mlfab__optimizer_apply(&rule, &step, MLFAB_F64, &w, &w, &u, NULL, NULL, 1);
    assert_true(w < before);
    /* The square is a rational number; the correctly rounded root almost returns it. */
    assert_true(fabs(w * w * (double)(1 + delay) - 1.0) < 1e-15);
    before = w;
  }
}

/* By hand: the first step of Adam is scale * sign(u) for any u, except for epsilon. */
TEST(adam_begins_with_the_sign) {
  mlfab__optimizer rule = make(MLFAB_OPTIMIZER_ADAM, 0.0);
  mlfab__optimizer_step step = {-0.125, 1, 0};
  double w[3] = {1, 1, 1}, u[3] = {1000, -0.5, 0}, m[3] = {0}, v[3] = {0};
  mlfab__optimizer_apply(&rule, &step, MLFAB_F64, w, w, u, m, v, 3);
  assert_true(fabs(w[0] - 0.875) < 1e-8);
  assert_true(fabs(w[1] - 1.125) < 1e-8);
  assert_true(w[2] == 1.0);
  assert_true(fabs(m[0] - 100.0) < 1e-12);
  assert_true(fabs(v[0] - 1000.0) < 1e-9);
}

/* Without a gradient AdamW only decays. */
TEST(adamw_decays) {
  mlfab__optimizer rule = make(MLFAB_OPTIMIZER_ADAM, 0.01);
  mlfab__optimizer_step step = {-0.5, 1, 0};
  float w = 2.0f, u = 0.0f, m = 0.0f, v = 0.0f;
  mlfab__optimizer_apply(&rule, &step, MLFAB_F32, &w, &w, &u, &m, &v, 1);
  assert_true(fabsf(w - 2.0f * (1.0f - 0.005f)) < 1e-6f);
}

/* t beyond any run: the corrections are 1 and nothing overflows. */
TEST(adam_survives_large_t) {
  mlfab__optimizer rule = make(MLFAB_OPTIMIZER_ADAM, 0.0);
  mlfab__optimizer_step step = {-1.0, UINT64_MAX, 0};
  double w = 0, u = 0, m = 3, v = 4;
  mlfab__optimizer_apply(&rule, &step, MLFAB_F64, &w, &w, &u, &m, &v, 1);
  assert_true(fabs(w + 2.7 / sqrt(3.996)) < 1e-7);
}

TEST(integers_are_plain) {
  mlfab__optimizer rule = make(MLFAB_OPTIMIZER_SGD, 0.0);
  mlfab__optimizer_step step = {-2.0, 1, 0};
  int64_t w[2] = {10, INT64_MIN}, u[2] = {3, 1};
  mlfab__optimizer_apply(&rule, &step, MLFAB_I64, w, w, u, NULL, NULL, 2);
  assert_true(w[0] == 4 && w[1] == INT64_MAX - 1);
}

TEST(has_initial_values) {
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT, other;
  mlfab_model_options_init(&other);
  assert_memory_equal(&other, &options, sizeof other);
  mlfab__optimizer rule;
  assert_int_equal(mlfab__optimizer_init(&rule, NULL, NULL), 0);
  assert_int_equal(rule.kind, MLFAB_OPTIMIZER_SGD);
  assert_true(rule.gamma == 0.9 && rule.adadelay_c == 1.0 && rule.beta1 == 0.9);
  assert_true(rule.beta2 == 0.999 && rule.epsilon == 1e-8 && rule.weight_decay == 0.0);
  options.size = sizeof options;
  options.gamma = 0.5;
  options.beta1 = 0.25;
  options.weight_decay = 0.125;
  assert_int_equal(mlfab__optimizer_init(&rule, &options, NULL), 0);
  assert_true(rule.gamma == 0.9 && rule.beta1 == 0.9 &&
              rule.weight_decay == 0.125); /* unused by SGD */
  options.optimizer = MLFAB_OPTIMIZER_NESTEROV;
  assert_int_equal(mlfab__optimizer_init(&rule, &options, NULL), 0);
  assert_true(rule.gamma == 0.5 && rule.beta1 == 0.9 && rule.weight_decay == 0.125);
  options.optimizer = MLFAB_OPTIMIZER_LION;
  assert_int_equal(mlfab__optimizer_init(&rule, &options, NULL), 0);
  assert_true(rule.gamma == 0.9 && rule.beta1 == 0.25 && rule.beta2 == 0.999);
  /* A zero gradient gives a zero step. */
  options = (mlfab_model_options){
      .size = sizeof options, .optimizer = MLFAB_OPTIMIZER_ADAM, .epsilon = 1e-8};
  assert_int_equal(mlfab__optimizer_init(&rule, &options, NULL), 0);
  assert_true(rule.gamma == 0.9 && rule.beta1 == 0.0 && rule.beta2 == 0.0);
  options = (mlfab_model_options){.size = sizeof options};
  assert_int_equal(mlfab__optimizer_init(&rule, &options, NULL), 0);
  /* A caller compiled against a header without gamma has unknown bytes after its struct. */
  options.size = offsetof(mlfab_model_options, gamma);
  options.gamma = 7.0;
  assert_int_equal(mlfab__optimizer_init(&rule, &options, NULL), 0);
  assert_true(rule.gamma == 0.9);
}

static void refuse(uint32_t kind, size_t member, double value, int code, const char *text) {
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  mlfab_error error;
  mlfab__optimizer rule = {0}, before = {0};
  options.size = sizeof options;
  options.optimizer = kind;
  if (member != 0) memcpy((char *)&options + member, &value, sizeof value);
  rule.kind = before.kind = 77;
  assert_int_equal(mlfab__optimizer_init(&rule, &options, &error), code);
  assert_int_equal(error.code, code);
  assert_int_equal(error.rank, MLFAB_NO_RANK);
  if (strstr(error.text, text) == NULL) fail_msg("\"%s\" is not in \"%s\"", text, error.text);
  assert_memory_equal(&rule, &before, sizeof rule);
}

TEST(refusals_name_the_member) {
  const uint32_t kind = MLFAB_OPTIMIZER_ADAM;
  static const uint64_t nan_bits = 0x7ff8000000000000u, infinity_bits = 0xfff0000000000000u;
  double nan, infinity;
  memcpy(&nan, &nan_bits, sizeof nan);
  memcpy(&infinity, &infinity_bits, sizeof infinity);
#define AT(member) offsetof(mlfab_model_options, member)
  refuse(1000, 0, 0.0, MLFAB_ERR_UNSUPPORTED, "unknown optimizer 1000");
  refuse(kind, AT(gamma), 1.0, MLFAB_ERR_CONFIG, "gamma is 1, must be in [0, 1)");
  refuse(kind, AT(gamma), -0.5, MLFAB_ERR_CONFIG, "gamma is -0.5, must be in [0, 1)");
  refuse(kind, AT(gamma), nan, MLFAB_ERR_CONFIG, "gamma is not finite");
  refuse(kind, AT(adadelay_c), -1.0, MLFAB_ERR_CONFIG, "adadelay_c is -1, must be 0 or more");
  refuse(MLFAB_OPTIMIZER_ADADELAY, AT(adadelay_c), 0.0, MLFAB_ERR_CONFIG,
         "adadelay_c is 0, must be positive");
  for (uint32_t k = MLFAB_OPTIMIZER_MOMENTUM; k < MLFAB_OPTIMIZER_COUNT; k++)
    refuse(k, AT(epsilon), 0.0, MLFAB_ERR_CONFIG,
           "epsilon is 0, must be positive: MLFAB_MODEL_OPTIONS_INIT");
  refuse(kind, AT(adadelay_c), infinity, MLFAB_ERR_CONFIG, "adadelay_c is not finite");
  refuse(kind, AT(beta1), 1.5, MLFAB_ERR_CONFIG, "beta1 is 1.5, must be in [0, 1)");
  refuse(kind, AT(beta2), -1.0, MLFAB_ERR_CONFIG, "beta2 is -1, must be in [0, 1)");
  refuse(kind, AT(epsilon), -1e-8, MLFAB_ERR_CONFIG, "epsilon is -1e-08, must be positive");
  refuse(kind, AT(weight_decay), -0.1, MLFAB_ERR_CONFIG, "weight_decay is -0.1, must be 0 or more");
  refuse(kind, AT(weight_decay), nan, MLFAB_ERR_CONFIG, "weight_decay is not finite");
  refuse(MLFAB_OPTIMIZER_SGD, AT(gamma), 2.0, MLFAB_ERR_CONFIG, "gamma is 2");
#undef AT
}

TEST(knows_its_rules) {
  static const struct {
    const char *name;
    uint32_t states;
    int linear;
  } rules[MLFAB_OPTIMIZER_COUNT] = {{"sgd", 0, 1},      {"momentum", 1, 1}, {"adadelay", 0, 1},
                                    {"adam", 2, 0},     {"rmsprop", 1, 0},  {"adagrad", 1, 0},
                                    {"nesterov", 1, 1}, {"lion", 1, 0}};
  assert_int_equal(mlfab__optimizer_states(MLFAB_OPTIMIZER_COUNT), 0);
  for (uint32_t kind = 0; kind < MLFAB__COUNT(rules); kind++) {
    mlfab_model_options named = MLFAB_MODEL_OPTIONS_INIT;
    assert_int_equal(mlfab_model_options_set(&named, "optimizer", rules[kind].name, NULL), 0);
    assert_int_equal(named.optimizer, kind);
    assert_int_equal(mlfab__optimizer_states(kind), rules[kind].states);
    mlfab__optimizer plain = make(kind, 0.0), decays = make(kind, 0.01);
    assert_int_equal(mlfab__optimizer_linear(&plain), rules[kind].linear);
    assert_int_equal(mlfab__optimizer_linear(&decays), 0);
    assert_int_equal(mlfab__optimizer_adds(&plain), kind == MLFAB_OPTIMIZER_SGD);
    assert_int_equal(mlfab__optimizer_adds(&decays), 0);
  }
}

TESTS(NULL, NULL)
