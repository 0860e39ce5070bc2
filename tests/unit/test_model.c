/* test_model.c - whole fabrics against a literal model of push and pull.
 *
 * The literal model is plain loops over typed arrays: one weight after another, by the rules of the papers,
 * rounds as sums in the order of ranks. Only the layout (the slice and the server of an element) is taken
 * from core/model/layout.c, whose own test is test_layout.c. Random models, worlds and pushes with random
 * and tiny block, chunk and eager sizes cover every path through the server: in place, staged, granted,
 * many blocks. */
#include "on_device.h"
#include "world.h"
#include "../testing.h"
#include "../sim/seeds.h"

#include "core/base/env.h"
#include "core/base/rng.h"
#include "core/kernels/kernels.h"
#include "core/model/layout.h"

#include <math.h>
#include <unistd.h>

enum { TENSORS = 20, WORKERS = 4 };

/* How many seeds to run of a test that usually runs `usual`, at most `few` up to scale 1: on devices that are played each
 * takes five times as long. */
static uint64_t cases(uint64_t few, double usual) {
  const char *devices = getenv("MLFAB_PLAYED");
  return test_cases_few(1, few, devices && devices[0] == '1' ? usual / 4 : usual);
}

typedef struct tensor {
  uint32_t id;
  int dtype;
  uint64_t count, bytes;
  const mlfab__tensor *place;
  uint8_t *w, *s0, *s1, *sum; /* the literal model */
} tensor;

/* A push as the test makes it: buffers in any order, and their bytes. */
typedef struct update {
  uint32_t n;
  int all; /* one MLFAB_ALL */
  uint32_t which[TENSORS];
  uint8_t *data[TENSORS];
  mlfab_buf bufs[TENSORS];
  double scale;
} update;

typedef struct scene {
  mlfab__rng prng;
  world w;
  mlfab__env env;
  mlfab__layout layout;
  mlfab_model_options options;
  uint32_t ntensors;
  int has_i64, uniform, exact;
  double tolerance; /* where sums may be added in another order */
  tensor t[TENSORS];
  uint64_t *version, *commit, *touched; /* by slice */
  uint64_t *pulled[WORKERS];            /* versions that a worker has, by slice */
  char what[64];                        /* the test, its seed and its rule */
} scene;

static uint64_t below(scene *s, uint64_t bound) { return mlfab__rng_below(&s->prng, bound); }

static double get(int dtype, const void *a, uint64_t i) {
  if (dtype == MLFAB_F32) return (double)((const float *)a)[i];
  if (dtype == MLFAB_F64) return ((const double *)a)[i];
  return (double)((const int64_t *)a)[i];
}

static void draw(scene *s, int dtype, uint8_t *a, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) {
    double x = mlfab__rng_unit(&s->prng) * 2.0 - 1.0;
    if (dtype == MLFAB_F32) ((float *)(void *)a)[i] = (float)x;
    if (dtype == MLFAB_F64) ((double *)(void *)a)[i] = x;
    if (dtype == MLFAB_I64) ((int64_t *)(void *)a)[i] = (int64_t)mlfab__rng_next(&s->prng);
  }
}

/* --- the literal rules, one element --- */

typedef struct step {
  double scale, t, delay;
} step;

/* As the paper has it: the step is linear in the update. Sums may then be folded, and are exact. */
static int rule_is_linear(uint32_t rule) {
  return rule < MLFAB_OPTIMIZER_ADAM || rule == MLFAB_OPTIMIZER_NESTEROV;
}

#define LITERAL(T, name)                                                                           \
  static void name(const mlfab_model_options *o, const step *p, T *w, T u, T *s0, T *s1) {         \
    double scale = p->scale, gamma = o->gamma;                                                     \
    double b1 = 0.9, b2 = 0.999, epsilon = 1e-8;                                                   \
    *w = *w + (T)(scale * o->weight_decay) * *w;                                                   \
    switch (o->optimizer) {                                                                        \
      case MLFAB_OPTIMIZER_ADADELAY:                                                               \
        scale *= 1.0 / sqrt(p->t + p->delay);                                                      \
        *w = *w + (T)scale * u;                                                                    \
        break;                                                                                     \
      case MLFAB_OPTIMIZER_SGD:                                                                    \
        *w = *w + (T)scale * u;                                                                    \
        break;                                                                                     \
      case MLFAB_OPTIMIZER_MOMENTUM:                                                               \
        *s0 = (T)gamma * *s0 + (T)scale * u;                                                       \
        *w = *w + *s0;                                                                             \
        break;                                                                                     \
      case MLFAB_OPTIMIZER_NESTEROV:                                                               \
        *s0 = (T)gamma * *s0 + (T)scale * u;                                                       \
        *w = *w + (T)gamma * *s0 + (T)scale * u;                                                   \
        break;                                                                                     \
      case MLFAB_OPTIMIZER_LION: {                                                                 \
        T c = (T)b1 * *s0 + (T)(1 - b1) * u;                                                       \
        *s0 = (T)b2 * *s0 + (T)(1 - b2) * u;                                                       \
        *w = *w + (T)scale * (T)((c > 0) - (c < 0));                                               \
        break;                                                                                     \
      }                                                                                            \
      case MLFAB_OPTIMIZER_RMSPROP:                                                                \
      case MLFAB_OPTIMIZER_ADAGRAD: {                                                              \
        double sum = o->optimizer == MLFAB_OPTIMIZER_ADAGRAD ? 1 : b2, add = sum < 1 ? 1 - b2 : 1; \
        double v = sum * (double)*s0 + add * (double)u * (double)u;                                \
        *s0 = (T)v;                                                                                \
        *w = (T)((double)*w + scale * (double)u / (sqrt(v) + epsilon));                            \
        break;                                                                                     \
      }                                                                                            \
      default: {                                                                                   \
        double m = b1 * (double)*s0 + (1 - b1) * (double)u;                                        \
        double v = b2 * (double)*s1 + (1 - b2) * (double)u * (double)u, x = (double)*w;            \
        *s0 = (T)m, *s1 = (T)v;                                                                    \
        x += scale * (m / (1 - pow(b1, p->t))) / (sqrt(v / (1 - pow(b2, p->t))) + epsilon);        \
        *w = (T)x;                                                                                 \
      }                                                                                            \
    }                                                                                              \
  }
LITERAL(float, literal_f32)
LITERAL(double, literal_f64)

static void literal(const scene *s, const step *p, const tensor *t, uint64_t i, const uint8_t *u) {
  if (t->dtype == MLFAB_F32) {
    literal_f32(&s->options, p, (float *)(void *)t->w + i, ((const float *)(const void *)u)[i],
                (float *)(void *)t->s0 + i, (float *)(void *)t->s1 + i);
  } else if (t->dtype == MLFAB_F64) {
    literal_f64(&s->options, p, (double *)(void *)t->w + i, ((const double *)(const void *)u)[i],
                (double *)(void *)t->s0 + i, (double *)(void *)t->s1 + i);
  } else {
    ((uint64_t *)(void *)t->w)[i] +=
        (uint64_t)(int64_t)p->scale * ((const uint64_t *)(const void *)u)[i];
  }
}

static uint32_t slice_of(const scene *s, const tensor *t, uint64_t i) {
  return mlfab__layout_slice_at(&s->layout, t->place->offset + i * mlfab__dtype_bytes(t->dtype));
}

static uint32_t server_of(const scene *s, uint32_t slice) { return s->layout.slices[slice].server; }

/* Counts an update for each slice that it touches. */
static void touch(scene *s, const update *u) {
  for (uint32_t k = 0; k < u->n; k++) {
    const tensor *t = &s->t[u->which[k]];
    uint32_t last = slice_of(s, t, t->count - 1);
    for (uint32_t i = slice_of(s, t, 0); i <= last; i++) s->touched[i] = 1;
  }
}

/* Asynchronous: applies an update at once. `base`: the versions that it was computed from, by slice. Stores
 * the expected result of the call in *expected. */
static void literal_push(scene *s, const update *u, const uint64_t *base, mlfab_result *expected) {
  uint64_t delay[WORKERS] = {0};
  int applied[WORKERS] = {0};
  memset(expected, 0, sizeof *expected);
  memset(s->touched, 0, s->layout.nslices * sizeof *s->touched);
  touch(s, u);
  for (uint32_t i = 0; i < s->layout.nslices; i++) {
    uint32_t server = server_of(s, i);
    if (!s->touched[i]) continue;
    uint64_t late = s->version[i] > base[i] ? s->version[i] - base[i] : 0;
    delay[server] = late > delay[server] ? late : delay[server];
    applied[server] = 1;
  }
  for (uint32_t k = 0; k < u->n; k++) {
    const tensor *t = &s->t[u->which[k]];
    for (uint64_t i = 0; i < t->count; i++) {
      uint32_t slice = slice_of(s, t, i);
      step p = {u->scale, (double)s->commit[slice] + 1.0, (double)delay[server_of(s, slice)]};
      literal(s, &p, t, i, u->data[k]);
    }
  }
  for (uint32_t i = 0; i < s->layout.nslices; i++) {
    if (!s->touched[i]) continue;
    s->version[i]++;
    s->commit[i]++;
    if (s->version[i] > expected->version) expected->version = s->version[i];
  }
  for (uint32_t i = 0; i < s->w.servers; i++) {
    expected->applied += (uint32_t)applied[i];
    if (delay[i] > expected->delay) expected->delay = delay[i];
  }
}

/* --- the fabric --- */

static void scene_tensors(scene *s, int dtype) {
  mlfab__tensor_info infos[TENSORS];
  for (uint32_t i = 0; i < s->ntensors; i++) {
    tensor *t = &s->t[i];
    t->id = 7 + 3 * ((i * 7) % TENSORS);
    t->dtype = dtype ? dtype : (int)(1 + below(s, s->has_i64 ? 3 : 2));
    t->count = 1 + below(s, below(s, 3) ? 5000 : 20);
    t->bytes = t->count * mlfab__dtype_bytes(t->dtype);
    t->w = (uint8_t *)calloc(4, t->bytes);
    t->s0 = t->w + t->bytes;
    t->s1 = t->s0 + t->bytes;
    t->sum = t->s1 + t->bytes;
    infos[i].id = t->id;
    infos[i].dtype = (uint32_t)t->dtype;
    infos[i].count = t->count;
  }
  assert_int_equal(mlfab__layout_build(&s->env, infos, s->ntensors, s->options.slices, s->w.servers,
                                       0, (uint64_t)1 << 30, &s->layout, NULL),
                   0);
  for (uint32_t i = 0; i < s->ntensors; i++)
    s->t[i].place = mlfab__layout_find(&s->layout, s->t[i].id);
  s->uniform = s->layout.uniform_dtype != 0;
}

/* Starts the same model everywhere; worker 0's first weights win over the others'. */
static void scene_start(scene *s) {
  mlfab_buf bufs[TENSORS];
  uint8_t *other[TENSORS];
  for (uint32_t k = 0; k < s->w.workers; k++) {
    for (uint32_t i = 0; i < s->ntensors; i++) {
      tensor *t = &s->t[i];
      if (k == 0) draw(s, t->dtype, t->w, t->count);
      other[i] = k == 0 ? t->w : (uint8_t *)calloc(1, t->bytes);
      bufs[i] = (mlfab_buf){t->id, 0, other[i], t->count};
      OK(s->w.node[k], mlfab_tensor_add(s->w.node[k], t->id, t->dtype, t->count));
    }
    OK(s->w.node[k], mlfab_model_start(s->w.node[k], &s->options, bufs, s->ntensors));
    for (uint32_t i = 0; i < s->ntensors && k > 0; i++) {
      assert_memory_equal(other[i], s->t[i].w, s->t[i].bytes);
      free(other[i]);
    }
  }
}

static uint64_t *slices_make(const scene *s) {
  return (uint64_t *)calloc(s->layout.nslices, sizeof(uint64_t));
}

/* Tensors of this type (0: of any type), and the facts about each slice. */
static void scene_layout(scene *s, int dtype) {
  scene_tensors(s, dtype);
  s->version = slices_make(s);
  s->commit = slices_make(s);
  s->touched = slices_make(s);
  for (uint32_t k = 0; k < s->w.workers; k++) s->pulled[k] = slices_make(s);
}

static void scene_forget(scene *s) {
  for (uint32_t i = 0; i < s->ntensors; i++) free(s->t[i].w);
  for (uint32_t k = 0; k < s->w.workers; k++) free(s->pulled[k]);
  free(s->version), free(s->commit), free(s->touched);
  mlfab__layout_free(&s->env, &s->layout);
}

/* Server callbacks of the next scene. */
static mlfab_update_fn hooks_update;
static void *hooks_user;

/* A world with random dimensions. kinds: 1 with int64, 2 of one element type. */
static void scene_open(scene *s, const char *name, uint64_t seed, uint32_t rule, uint32_t sync,
                       int kinds) {
  memset(s, 0, sizeof *s);
  snprintf(s->what, sizeof s->what, "%s seed %u rule %u", name, (unsigned)seed, (unsigned)rule);
  mlfab__rng_seed(&s->prng, seed);
  uint32_t workers = 1 + (uint32_t)below(s, WORKERS), dedicated = (uint32_t)below(s, 2);
  uint32_t servers = 1 + (uint32_t)below(s, 3);
  if (!dedicated && servers > workers) servers = workers;
  world_init(&s->w, workers, servers, dedicated);
  static const uint32_t sizes[] = {64, 128, 320, 1024, 4096, 65536, 0};
  s->w.config.block_bytes = sizes[below(s, 7)];
  s->w.config.chunk_bytes = sizes[below(s, 7)];
  s->w.config.eager_bytes = sizes[below(s, 7)];
  s->w.config.merge_max = (uint32_t)below(s, 3);
  s->w.config.on_update = hooks_update;
  s->w.config.user = hooks_update ? hooks_user : NULL;
  mlfab__env_init(&s->env, NULL);
  mlfab_model_options_init(&s->options);
  if (!(kinds & 1) && !hooks_update && below(s, 4) == 0) s->options.weight_decay = 0.01;
  s->options.optimizer = rule;
  /* Adam divides by the root of a sum: sums near zero expose every bit of their order. */
  s->tolerance = rule_is_linear(rule) ? 1e-5 : 1e-3;
  s->options.sync = sync;
  s->options.slices = below(s, 2) ? 0 : (uint32_t)(1 + below(s, 40));
  if (rule == MLFAB_OPTIMIZER_MOMENTUM && below(s, 2)) s->options.gamma = 0.5;
  s->has_i64 = kinds & 1;
  s->ntensors = (uint32_t)(1 + below(s, TENSORS));
  scene_layout(s, kinds & 2 ? (int)(1 + below(s, s->has_i64 ? 3 : 2)) : 0);
  world_open(&s->w, seed);
}

static void scene_close(scene *s) {
  scene_forget(s);
  world_close(&s->w);
  assert_int_equal(s->env.bytes, 0);
}

/* A random update: some tensors in random order, or all of them as one array. */
static void update_make(scene *s, update *u, int whole) {
  memset(u, 0, sizeof *u);
  u->scale = s->has_i64 ? (double)((int64_t)below(s, 7) - 3) : 0.5 - mlfab__rng_unit(&s->prng);
  if (s->has_i64 && u->scale > -0.5 && u->scale < 0.5) u->scale = 4;
  if (below(s, 8) == 0) u->scale = s->has_i64 ? -9 : 2.5;
  u->all = s->uniform && below(s, 3) == 0;
  uint32_t order[TENSORS];
  for (uint32_t i = 0; i < s->ntensors; i++) {
    uint32_t j = (uint32_t)below(s, i + 1);
    order[i] = order[j];
    order[j] = i;
  }
  u->n = whole || u->all ? s->ntensors : 1 + (uint32_t)below(s, s->ntensors);
  uint8_t *flat = u->all ? (uint8_t *)malloc(s->layout.bytes) : NULL;
  for (uint32_t k = 0; k < u->n; k++) {
    u->which[k] = u->all ? k : order[k];
    const tensor *t = &s->t[u->which[k]];
    u->data[k] = flat ? flat + t->place->offset : (uint8_t *)malloc(t->bytes);
    draw(s, t->dtype, u->data[k], t->count);
    u->bufs[k] = (mlfab_buf){t->id, 0, u->data[k], t->count};
  }
  if (u->all) {
    u->bufs[0] = (mlfab_buf){MLFAB_ALL, 0, flat,
                             s->layout.bytes / mlfab__dtype_bytes((int)s->layout.uniform_dtype)};
  }
}

static uint32_t update_nbufs(const update *u) { return u->all ? 1 : u->n; }

static void update_free(update *u) {
  for (uint32_t k = 0; k < (u->all ? 1 : u->n); k++) free(u->bufs[k].data);
}

static mlfab_push_options pushing(const update *u) {
  mlfab_push_options o = MLFAB_PUSH_OPTIONS_INIT;
  o.scale = u->scale;
  return o;
}

static void same(const scene *s, const tensor *t, const uint8_t *got) {
  if ((s->exact || t->dtype == MLFAB_I64) && !memcmp(got, t->w, t->bytes)) return;
  for (uint64_t i = 0; i < t->count; i++) {
    double a = get(t->dtype, got, i), b = get(t->dtype, t->w, i);
    int near = !(fabs(a - b) > s->tolerance * (1.0 + fabs(b)));
    if (near && !s->exact && t->dtype != MLFAB_I64) continue;
    /* zeros of different sign, or int64 beyond 2^53, which fails below */
    if (a - b == 0.0) continue;
    fail_msg("%s: tensor %u (%u tensors, %u workers, %u servers%s) element %u: %.17g, not %.17g",
             s->what, (unsigned)t->id, (unsigned)s->ntensors, (unsigned)s->w.workers,
             (unsigned)s->w.servers, s->w.dedicated ? " dedicated" : "", (unsigned)i, a, b);
  }
  if (t->dtype == MLFAB_I64) fail_msg("%s: int64 tensor %u differs", s->what, (unsigned)t->id);
}

/* Worker k pulls everything in a random way; it must equal the literal model. */
static void pull_and_compare(scene *s, uint32_t k) {
  uint64_t newest = 0;
  update u;
  mlfab_result result;
  update_make(s, &u, 1);
  OK(s->w.node[k], mlfab_pull(s->w.node[k], u.bufs, update_nbufs(&u), NULL, &result));
  for (uint32_t i = 0; i < u.n; i++) same(s, &s->t[u.which[i]], u.data[i]);
  for (uint32_t i = 0; i < s->layout.nslices; i++) {
    s->pulled[k][i] = s->version[i];
    if (s->version[i] > newest) newest = s->version[i];
  }
  if (result.version != newest)
    fail_msg("%s: pulled version %u, not %u", s->what, (unsigned)result.version, (unsigned)newest);
  update_free(&u);
}

static void compare_all(scene *s) {
  for (uint32_t k = 0; k < s->w.workers; k++) pull_and_compare(s, k);
}

static void scene_push(scene *s, uint32_t k, const update *u, const mlfab_push_options *o,
                       mlfab_result *got) {
  OK(s->w.node[k], mlfab_push(s->w.node[k], u->bufs, update_nbufs(u), o, got));
}

/* --- asynchronous --- */

static void async_one(uint64_t seed, uint32_t rule, int kinds) {
  scene s;
  scene_open(&s, "async", seed, rule, MLFAB_SYNC_ASYNC, kinds);
  scene_start(&s);
  s.exact = rule_is_linear(rule);
  for (int turn = 0; turn < 12; turn++) {
    update u;
    mlfab_result got, want;
    uint32_t k = (uint32_t)below(&s, s.w.workers);
    if (below(&s, 3) == 0) pull_and_compare(&s, k);
    update_make(&s, &u, below(&s, 2) == 0);
    mlfab_push_options o = pushing(&u);
    scene_push(&s, k, &u, &o, &got);
    literal_push(&s, &u, s.pulled[k], &want);
    if (got.delay != want.delay || got.version != want.version || got.applied != want.applied ||
        got.refused != 0)
      fail_msg("%s: delay %u version %u applied %u, not %u %u %u", s.what, (unsigned)got.delay,
               (unsigned)got.version, got.applied, (unsigned)want.delay, (unsigned)want.version,
               want.applied);
    update_free(&u);
  }
  compare_all(&s);
  scene_close(&s);
}

static void async_rules(uint64_t seed) {
  async_one(seed, MLFAB_OPTIMIZER_SGD, (int)(seed & 3));
  for (uint32_t rule = MLFAB_OPTIMIZER_MOMENTUM; rule < MLFAB_OPTIMIZER_COUNT; rule++)
    async_one(1000 * rule + seed, rule, (int)(seed & 2));
}

TEST(test_async_rules) { seeds_run("model", cases(24, 40), async_rules); }

/* --- rounds --- */

/* One worker's part of a round: one update, or two that form one (MLFAB_PUSH_MORE). */
typedef struct part {
  uint32_t n;
  update u[2];
  mlfab_request request[2];
} part;

/* sum += weight * u, in the tensor's own type. */
static void literal_sum(const tensor *t, const uint8_t *u, double weight) {
  for (uint64_t i = 0; i < t->count; i++) {
    if (t->dtype == MLFAB_F32) {
      ((float *)(void *)t->sum)[i] += (float)weight * ((const float *)(const void *)u)[i];
    } else if (t->dtype == MLFAB_F64) {
      ((double *)(void *)t->sum)[i] += weight * ((const double *)(const void *)u)[i];
    } else {
      ((uint64_t *)(void *)t->sum)[i] +=
          (uint64_t)(int64_t)weight * ((const uint64_t *)(const void *)u)[i];
    }
  }
}

/* Bulk-synchronous: all parts of a round, in the order of ranks, are one commit. A slice that any of them
 * touched steps as a whole. `linear`: scales are folded into the sum; otherwise all scales are equal. */
static void literal_round(scene *s, const part *parts, int linear) {
  uint64_t members = 0;
  double contributors = s->w.workers, scale = linear ? 1.0 : parts[0].u[0].scale;
  memset(s->touched, 0, s->layout.nslices * sizeof *s->touched);
  for (uint32_t i = 0; i < s->ntensors; i++) memset(s->t[i].sum, 0, s->t[i].bytes);
  for (uint32_t k = 0; k < s->w.workers; k++) {
    for (uint32_t j = 0; j < parts[k].n; j++) {
      const update *u = &parts[k].u[j];
      touch(s, u);
      members++;
      for (uint32_t i = 0; i < u->n; i++)
        literal_sum(&s->t[u->which[i]], u->data[i], linear ? u->scale : 1.0);
    }
  }
  for (uint32_t k = 0; k < s->ntensors; k++) {
    const tensor *t = &s->t[k];
    const double share = 1.0 / contributors;
    for (uint64_t i = 0; i < t->count && s->options.mean && !linear; i++) {
      if (t->dtype == MLFAB_F32) ((float *)(void *)t->sum)[i] *= (float)share;
      if (t->dtype == MLFAB_F64) ((double *)(void *)t->sum)[i] *= share;
    }
    for (uint64_t i = 0; i < t->count; i++) {
      uint32_t slice = slice_of(s, t, i);
      step p = {scale, (double)s->commit[slice] + 1.0, 0};
      if (s->options.mean && linear) p.scale = share;
      if (s->touched[slice]) literal(s, &p, t, i, t->sum);
    }
  }
  for (uint32_t i = 0; i < s->layout.nslices; i++) {
    if (!s->touched[i]) continue;
    s->version[i] += members;
    s->commit[i]++;
  }
}

static void part_push(scene *s, uint32_t k, part *p, double scale) {
  p->n = 1 + (uint32_t)(below(s, 4) == 0);
  for (uint32_t j = 0; j < p->n; j++) {
    update_make(s, &p->u[j], below(s, 2) == 0);
    if (scale < 0 || scale > 0) p->u[j].scale = scale;
    mlfab_push_options o = pushing(&p->u[j]);
    o.flags = j + 1 < p->n ? MLFAB_PUSH_MORE : 0;
    OK(s->w.node[k],
       mlfab_push_start(s->w.node[k], p->u[j].bufs, update_nbufs(&p->u[j]), &o, &p->request[j]));
  }
}

static void bsp_one(uint64_t seed, uint32_t rule, int kinds, int deterministic, int mean) {
  scene s;
  scene_open(&s,
             deterministic ? mean ? "bsp deterministic mean" : "bsp deterministic"
             : mean        ? "bsp mean"
                           : "bsp",
             seed, rule, MLFAB_SYNC_BSP, kinds);
  int linear = rule_is_linear(rule) && !(s.options.weight_decay > 0.0);
  s.options.deterministic = deterministic ? 1 : 0;
  s.options.mean = mean ? 1 : 0;
  scene_start(&s);
  s.exact = linear && (deterministic || s.w.workers == 1);
  for (int turn = 0; turn < 6; turn++) {
    part parts[WORKERS];
    double scale = linear ? 0.0 : -0.25;
    for (uint32_t i = 0; i < s.w.workers; i++) {
      uint32_t k = deterministic ? s.w.workers - 1 - i : i; /* the last rank arrives first */
      part_push(&s, k, &parts[k], scale);
    }
    for (uint32_t k = 0; k < s.w.workers; k++) {
      for (uint32_t j = 0; j < parts[k].n; j++) {
        mlfab_result result;
        OK(s.w.node[k], mlfab_wait(s.w.node[k], parts[k].request[j], 0, &result));
        assert_int_equal(result.delay, 0);
      }
    }
    literal_round(&s, parts, linear);
    compare_all(&s);
    for (uint32_t k = 0; k < s.w.workers; k++)
      for (uint32_t j = 0; j < parts[k].n; j++) update_free(&parts[k].u[j]);
  }
  scene_close(&s);
}

static void rounds(uint64_t seed) {
  bsp_one(50000 + seed, MLFAB_OPTIMIZER_SGD, (int)(seed & 3), (int)(seed & 4), 0);
  for (uint32_t rule = MLFAB_OPTIMIZER_SGD; rule < MLFAB_OPTIMIZER_COUNT; rule++)
    bsp_one(60000 + 1000 * rule + seed, rule, (int)(seed & 2), (int)((seed + 3 * rule) & 4),
            (int)((seed + 3 * rule) & 8));
}

/* Sixteen seeds have all forms of a round: their last four bits choose. */
TEST(test_rounds) { seeds_run("model", cases(16, 24), rounds); }

/* --- the version that an update was computed from, and its norm --- */

/* The version that a pull reports is the largest of its slices. Passing it to the push is right for all
 * slices, also for those with smaller versions. An older version adds to the delay. */
static void versions(uint64_t seed) {
  scene s;
  scene_open(&s, "versions", 90000 + seed, MLFAB_OPTIMIZER_ADADELAY, MLFAB_SYNC_ASYNC, 0);
  scene_start(&s);
  s.exact = 1;
  for (int turn = 0; turn < 10; turn++) {
    update u;
    mlfab_result got, want, seen;
    uint32_t k = (uint32_t)below(&s, s.w.workers);
    uint64_t *base = slices_make(&s);
    update_make(&s, &u, 1);
    OK(s.w.node[k], mlfab_pull(s.w.node[k], u.bufs, update_nbufs(&u), NULL, &seen));
    update_free(&u);
    for (uint32_t i = 0; i < s.layout.nslices; i++) s.pulled[k][i] = s.version[i];
    uint64_t told = seen.version - (seen.version > 0 ? below(&s, 2) : 0);
    for (uint32_t i = 0; i < s.layout.nslices; i++) base[i] = told;
    update_make(&s, &u, 0);
    mlfab_push_options o = pushing(&u);
    o.version = told + 1;
    scene_push(&s, k, &u, &o, &got);
    literal_push(&s, &u, base, &want);
    assert_int_equal(got.delay, want.delay);
    assert_int_equal(got.version, want.version);
    update_free(&u);
    free(base);
  }
  pull_and_compare(&s, 0);
  scene_close(&s);
}

TEST(test_versions) { seeds_run("model", cases(30, 30), versions); }

static void clipping(uint64_t seed) {
  scene s;
  scene_open(&s, "clip", 80000 + seed, (uint32_t)(seed % 2), MLFAB_SYNC_ASYNC, 0);
  scene_start(&s);
  for (int turn = 0; turn < 5; turn++) {
    update u;
    mlfab_result got, want;
    double sum = 0;
    update_make(&s, &u, 0);
    for (uint32_t k = 0; k < u.n; k++) {
      const tensor *t = &s.t[u.which[k]];
      for (uint64_t i = 0; i < t->count; i++)
        sum += get(t->dtype, u.data[k], i) * get(t->dtype, u.data[k], i);
    }
    mlfab_push_options o = pushing(&u);
    o.clip_norm = sqrt(sum) * (turn % 2 ? 0.3 : 1.7);
    scene_push(&s, 0, &u, &o, &got);
    if (turn % 2) u.scale *= 0.3;
    literal_push(&s, &u, s.pulled[0], &want);
    update_free(&u);
  }
  pull_and_compare(&s, 0);
  scene_close(&s);
}

TEST(test_clipping) { seeds_run("model", cases(20, 20), clipping); }

/* --- many at once --- */

/* Workers push concurrently, some updates small enough to be merged by the sender: sums do not depend on
 * the order, versions count every update, and no slice of a concurrent pull mixes two versions. */
static void together(uint64_t seed, int dtype) {
  enum { PUSHES = 12 };
  scene s;
  mlfab_request request[WORKERS][PUSHES];
  uint64_t total = 0;
  scene_open(&s, "together", seed, MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC, 1);
  /* All of one type, and all updates are ones. */
  scene_forget(&s);
  if (seed % 3 == 0) s.ntensors = 1;
  scene_layout(&s, dtype);
  for (uint32_t i = 0; i < s.ntensors; i++)
    for (uint32_t k = 0; k < s.w.workers; k++)
      OK(s.w.node[k], mlfab_tensor_add(s.w.node[k], s.t[i].id, dtype, s.t[i].count));
  for (uint32_t k = 0; k < s.w.workers; k++)
    OK(s.w.node[k], mlfab_model_start(s.w.node[k], &s.options, NULL, 0));
  uint64_t count = s.layout.bytes / mlfab__dtype_bytes(dtype);
  uint8_t *ones = (uint8_t *)malloc(s.layout.bytes), *got = (uint8_t *)malloc(s.layout.bytes);
  for (uint64_t i = 0; i < count; i++) {
    if (dtype == MLFAB_F32) ((float *)(void *)ones)[i] = 1;
    if (dtype == MLFAB_F64) ((double *)(void *)ones)[i] = 1;
    if (dtype == MLFAB_I64) ((int64_t *)(void *)ones)[i] = 1;
  }
  mlfab_buf b = {MLFAB_ALL, 0, ones, count}, g = {MLFAB_ALL, 0, got, count};
  for (int p = 0; p < PUSHES; p++) {
    for (uint32_t k = 0; k < s.w.workers; k++, total++)
      OK(s.w.node[k], mlfab_push_start(s.w.node[k], &b, 1, NULL, &request[k][p]));
    if (p % 3) continue;
    mlfab_result result;
    OK(s.w.node[0], mlfab_pull(s.w.node[0], &g, 1, NULL, &result));
    double newest = 0;
    for (uint64_t i = 0; i < count; i++) {
      uint32_t slice = mlfab__layout_slice_at(&s.layout, i * mlfab__dtype_bytes(dtype));
      uint64_t first = s.layout.slices[slice].offset / mlfab__dtype_bytes(dtype);
      if (get(dtype, got, i) < get(dtype, got, first) ||
          get(dtype, got, i) > get(dtype, got, first))
        fail_msg("%s: slice %u is of two versions", s.what, slice);
      newest = fmax(newest, get(dtype, got, i));
    }
    assert_int_equal(result.version, (uint64_t)newest);
  }
  for (int p = 0; p < PUSHES; p++)
    for (uint32_t k = 0; k < s.w.workers; k++)
      OK(s.w.node[k], mlfab_wait(s.w.node[k], request[k][p], 0, NULL));
  OK(s.w.node[0], mlfab_pull(s.w.node[0], &g, 1, NULL, NULL));
  for (uint64_t i = 0; i < count; i++) assert_true(get(dtype, got, i) == (double)total);
  free(ones);
  free(got);
  scene_close(&s);
}

static void pushes_together(uint64_t seed) { together(40000 + seed, 1 + (int)(seed % 3)); }

TEST(test_together) { seeds_run("model", cases(30, 30), pushes_together); }

/* --- the update callback --- */

typedef struct witness {
  scene *s;
  uint32_t calls;
  uint64_t delay; /* the longest */
  mlfab_update_info last;
} witness;

/* Applies the sum, and counts every element in the literal tensor's `sum`. */
static int witness_update(void *user, const mlfab_update_info *info, uint32_t id, int dtype,
                          uint64_t first, uint64_t count, void *w, const void *sum) {
  witness *v = (witness *)user;
  v->calls++;
  v->last = *info;
  v->delay = info->delay > v->delay ? info->delay : v->delay;
  for (uint32_t k = 0; k < v->s->ntensors; k++) {
    tensor *t = &v->s->t[k];
    if (t->id != id) continue;
    if (t->dtype != dtype || first + count > t->count || count == 0) return 1;
    for (uint64_t i = first; i < first + count; i++) t->sum[i]++;
    (void)mlfab__kernel_add(dtype, w, w, sum, info->scale, count, 0);
    return 0;
  }
  return 1;
}

static void callback(uint64_t seed) {
  scene s;
  witness v = {.s = &s};
  hooks_update = witness_update;
  hooks_user = &v;
  scene_open(&s, "callback", 30000 + seed, MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC, (int)(seed & 3));
  hooks_update = NULL;
  scene_start(&s);
  s.exact = 1;
  for (int turn = 0; turn < 8; turn++) {
    update u;
    mlfab_result got, want;
    uint32_t k = (uint32_t)below(&s, s.w.workers);
    update_make(&s, &u, 0);
    mlfab_push_options o = pushing(&u);
    for (uint32_t i = 0; i < s.ntensors; i++) memset(s.t[i].sum, 0, s.t[i].bytes);
    v.delay = v.last.members = 0;
    scene_push(&s, k, &u, &o, &got);
    literal_push(&s, &u, s.pulled[k], &want);
    assert_int_equal(v.last.worker, k);
    assert_int_equal(v.last.seq, got.seq);
    assert_int_equal(v.last.members, 1);
    assert_int_equal(v.delay, want.delay);
    assert_true(v.last.scale == u.scale);
    for (uint32_t i = 0; i < s.ntensors; i++) {
      int pushed = 0;
      for (uint32_t j = 0; j < u.n; j++) pushed |= u.which[j] == i;
      for (uint64_t e = 0; e < s.t[i].count; e++) assert_int_equal(s.t[i].sum[e], pushed);
    }
    update_free(&u);
  }
  pull_and_compare(&s, 0);
  scene_close(&s);
}

TEST(test_callback) { seeds_run("model", cases(30, 30), callback); }

/* --- saving --- */

/* Finds "id":{...,"data_offsets":[a,b]} in a safetensors header; parses only as much JSON as that needs. */
static void saved_tensor(const scene *s, const tensor *t, const char *header, const uint8_t *data,
                         size_t bytes) {
  static const char *const types[] = {"", "F32", "F64", "I64"};
  char name[32], type[8];
  unsigned long long shape, from, to;
  snprintf(name, sizeof name, "\"%u\":{", (unsigned)t->id);
  const char *at = strstr(header, name);
  assert_non_null(at);
  assert_int_equal(sscanf(at + strlen(name),
                          "\"dtype\":\"%3[A-Z0-9]\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}",
                          type, &shape, &from, &to),
                   4);
  assert_string_equal(type, types[t->dtype]);
  assert_int_equal(shape, t->count);
  assert_int_equal(to - from, t->bytes);
  assert_true(to <= bytes);
  same(s, t, data + from);
}

static void save(uint64_t seed) {
  scene s;
  update u;
  mlfab_result want;
  char path[64];
  scene_open(&s, "save", 20000 + seed, MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC, (int)(seed & 3));
  scene_start(&s);
  s.exact = 1;
  update_make(&s, &u, 1);
  mlfab_push_options o = pushing(&u);
  scene_push(&s, 0, &u, &o, NULL);
  literal_push(&s, &u, s.pulled[0], &want);
  update_free(&u);
  snprintf(path, sizeof path, "/tmp/mlfab_test_model.%ld", (long)getpid());
  OK(s.w.node[0], mlfab_save(s.w.node[0], path));
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  size_t room = s.layout.bytes + 65536, n;
  uint8_t *bytes = (uint8_t *)calloc(1, room);
  n = fread(bytes, 1, room, file);
  fclose(file);
  remove(path);
  uint64_t header = 0;
  for (int i = 0; i < 8; i++) header |= (uint64_t)bytes[i] << (8 * i);
  assert_int_equal(header % 8, 0);
  assert_int_equal(8 + header + s.layout.bytes, n);
  char *text = (char *)calloc(1, header + 1);
  memcpy(text, bytes + 8, header);
  assert_int_equal(text[0], '{');
  for (uint32_t i = 0; i < s.ntensors; i++)
    saved_tensor(&s, &s.t[i], text, bytes + 8 + header, n - 8 - header);
  size_t end = header;
  while (text[end - 1] == ' ') end--;
  assert_int_equal(text[end - 1], '}');
  free(text);
  free(bytes);
  scene_close(&s);
}

TEST(test_save) { seeds_run("model", cases(8, 8), save); }

TESTS(NULL, NULL)
