/* gpu_kernels.cu - the kernels of gpu/src on a GPU: fresh random inputs, poisoned outputs with guard bytes behind
 * and before, compared bit for bit with the same element code played on the CPU (tests/unit/play.h), and with
 * float64. Prints TAP. Without a GPU every case is skipped. MLFAB_SEED=n other inputs; MLFAB_SCALE=0.02 few cases,
 * as under compute-sanitizer. From scale 1 on arrays of more than 8,192 tiles, too. */
#include "tests/unit/play_values.h"

#include "tests/unit/scale.h"

#include <cuda_runtime.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

/* ---- TAP ---- */

static int failures;      /* of the case that runs */
static uint64_t the_seed; /* of this run */

__attribute__((format(printf, 1, 2))) static void complain(const char *format, ...) {
  va_list list;
  if (++failures > 5) return;
  va_start(list, format);
  printf("# ");
  vprintf(format, list);
  printf("\n");
  va_end(list);
}

#define EXPECT(what)                                                       \
  do {                                                                     \
    if (!(what)) complain("%s:%d: not so: %s", __FILE__, __LINE__, #what); \
  } while (0)

/* A CUDA call that has to work. */
#define CUDA(call)                                                                                \
  do {                                                                                            \
    cudaError_t error_ = (call);                                                                  \
    if (error_ != cudaSuccess) {                                                                  \
      printf("Bail out! %s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      exit(1);                                                                                    \
    }                                                                                             \
  } while (0)

/* ---- arrays, on both sides ---- */

enum { GUARD = 0x5a, GUARD_BYTES = 256 };

/* n elements, `off` elements after a line: in device memory with guard bytes around, and a copy in host memory. */
typedef struct both {
  int dtype;
  uint64_t n;
  size_t bytes, skip, whole;
  char *base, *at;     /* device */
  char *mirror, *host; /* host: of all with the guards; of the elements */
} both;

static both both_new(int dtype, uint64_t n, uint64_t off) {
  both b;
  b.dtype = dtype;
  b.n = n;
  b.bytes = (size_t)(n * elements_width(dtype));
  b.skip = GUARD_BYTES + (size_t)off * elements_width(dtype);
  b.whole = b.skip + b.bytes + GUARD_BYTES;
  CUDA(cudaMalloc((void **)&b.base, b.whole));
  CUDA(cudaMemset(b.base, GUARD, b.whole));
  b.at = b.base + b.skip;
  b.mirror = (char *)malloc(b.whole);
  if (!b.mirror) abort();
  memset(b.mirror, GUARD, b.whole);
  b.host = b.mirror + b.skip;
  return b;
}

static void both_up(const both *b) {
  CUDA(cudaMemcpy(b->at, b->host, b->bytes, cudaMemcpyHostToDevice));
}

static both both_any(uint64_t *state, int dtype, uint64_t n, uint64_t off, int finite) {
  both b = both_new(dtype, n, off);
  for (uint64_t i = 0; i < n; i++)
    elements_set(elements_width(dtype), b.host, i, any_bits(state, dtype, finite));
  both_up(&b);
  return b;
}

/* The device's bytes, with the guards, are the host's; elements may be different NaNs. */
static void both_check(const both *b, const char *what, int exactly) {
  char *now = (char *)malloc(b->whole);
  if (!now) abort();
  CUDA(cudaMemcpy(now, b->base, b->whole, cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < b->skip; i++)
    if (now[i] != GUARD)
      complain("%s: byte %lld before it has changed", what, (long long)i - (long long)b->skip);
  for (size_t i = b->skip + b->bytes; i < b->whole; i++)
    if (now[i] != GUARD)
      complain("%s: byte %lld behind it has changed", what, (long long)(i - b->skip - b->bytes));
  const uint64_t compare = memcmp(now + b->skip, b->host, b->bytes) != 0 ? b->n : 0;
  for (uint64_t i = 0; i < compare; i++) {
    uint64_t is = elements_get(elements_width(b->dtype), now + b->skip, i);
    uint64_t wanted = elements_get(elements_width(b->dtype), b->host, i);
    if (is != wanted && (exactly || !same(b->dtype, is, wanted)))
      complain("%s, type %d: element %llu of %llu is %#llx, and %#llx was wanted", what, b->dtype,
               (unsigned long long)i, (unsigned long long)b->n, (unsigned long long)is,
               (unsigned long long)wanted);
  }
  free(now);
}

static void both_free(both *b) {
  CUDA(cudaFree(b->base));
  free(b->mirror);
}

static void *device_scratch(uint64_t bytes) {
  void *scratch;
  CUDA(cudaMalloc(&scratch, bytes));
  CUDA(cudaMemset(scratch, 0xa5, bytes));
  return scratch;
}

/* A struct in device memory, poisoned. */
template <typename T>
static T *device_new(void) {
  T *t;
  CUDA(cudaMalloc((void **)&t, sizeof *t));
  CUDA(cudaMemset(t, 0xa5, sizeof *t));
  return t;
}

template <typename T>
static T device_take(T *t) {
  T host;
  CUDA(cudaMemcpy(&host, t, sizeof host, cudaMemcpyDeviceToHost));
  CUDA(cudaFree(t));
  return host;
}

static void expect_stats(mlfab_gpu_stats is, mlfab_gpu_stats wanted) {
  EXPECT(is.finite == wanted.finite && is.spare == 0);
  if (isnan(is.norm2) && isnan(wanted.norm2)) return;
  if (memcmp(&is.norm2, &wanted.norm2, sizeof is.norm2) != 0)
    complain("norm2 is %.17g, and %.17g was wanted", is.norm2, wanted.norm2);
}

static double value_of(int dtype, const void *array, uint64_t i) {
  elements_chunk chunk = {{0, 0, 0, 0}};
  elements_put_bits(elements_width(dtype), &chunk, 0,
                    elements_get(elements_width(dtype), array, i));
  elements_number x = elements_take(dtype, &chunk, 0);
  return dtype == MLFAB_F64 ? x.f64 : dtype == MLFAB_I64 ? (double)(int64_t)x.i64 : (double)x.f32;
}

static uint64_t any_length(uint64_t *state, uint64_t tile) {
  switch (chance_below(state, 8)) {
    case 0:
      return chance_below(state, 70);
    case 1:
      return tile * (1 + chance_below(state, 40)) - 9 + chance_below(state, 19);
    case 2:
      return chance_below(state, test_scale() < 1 ? 10000 : 1500000);
    default:
      return chance_below(state, 4 * tile);
  }
}

static uint64_t any_off(uint64_t *state) {
  return chance_below(state, 2) ? 0 : chance_below(state, 8);
}

static const int dtypes[] = {MLFAB_F32, MLFAB_F64, MLFAB_I64, MLFAB_F16, MLFAB_BF16};

/* Relative precision of a type, and of the type of its sums. */
static double ulp_of(int dtype) {
  return dtype == MLFAB_F64   ? 0x1p-52
         : dtype == MLFAB_F32 ? 0x1p-23
         : dtype == MLFAB_F16 ? 0x1p-10
                              : 0x1p-7;
}

/* ---- the cases ---- */

static void one_sum(uint64_t seed, int dtype, uint32_t k, uint64_t n) {
  uint64_t state = mix(the_seed + seed), off = any_off(&state);
  int finite = chance_below(&state, 3) != 0, weighted = chance_below(&state, 2) != 0;
  int apart = chance_below(&state, 3) == 0, place = (int)chance_below(&state, 3),
      counted = chance_below(&state, 3) != 0;
  both in[MLFAB_GPU_SUM_MOST], dst = both_new(dtype, n, apart ? any_off(&state) : off);
  const void *device[MLFAB_GPU_SUM_MOST], *host[MLFAB_GPU_SUM_MOST];
  double weight[MLFAB_GPU_SUM_MOST];
  for (uint32_t i = 0; i < k; i++) {
    in[i] = both_any(&state, dtype, n, apart ? any_off(&state) : off, finite);
    device[i] = in[i].at;
    host[i] = in[i].host;
    weight[i] = any_weight(&state, dtype);
    if (finite && isinf(weight[i])) weight[i] = 0.75;
  }
  both *to = place == 0 ? &in[chance_below(&state, k)] : &dst;
  double *exact = (double *)calloc(n + 1, sizeof *exact),
         *size = (double *)calloc(n + 1, sizeof *size);
  if (!exact || !size) abort();
  for (uint32_t i = 0; i < k; i++)
    for (uint64_t e = 0; e < n; e++) {
      double w = weighted ? weight[i] : 1.0, x = value_of(dtype, host[i], e);
      if (dtype == MLFAB_F32 || elements_width(dtype) == 2) w = (double)(float)w;
      exact[e] += w * x;
      size[e] += fabs(w * x);
    }
  mlfab_gpu_stats wanted, *stats = counted ? device_new<mlfab_gpu_stats>() : NULL;
  void *scratch = counted ? device_scratch(mlfab_gpu_stats_scratch()) : NULL;
  EXPECT(mlfab_gpu_sum(dtype, to->at, device, weighted ? weight : NULL, k, n, stats, scratch,
                       NULL) == 0);
  CUDA(cudaDeviceSynchronize());
  EXPECT(play_sum(dtype, to->host, host, weighted ? weight : NULL, k, n, &wanted) == 0);
  both_check(to, "sum", k == 1 && !weighted);
  if (counted) expect_stats(device_take(stats), wanted);
  if (finite && dtype != MLFAB_I64)
    for (uint64_t e = 0; e < n; e++) {
      double is = value_of(dtype, to->host, e),
             bound = (k + 1) * (dtype == MLFAB_F64 ? 0x1p-52 : 0x1p-23) * size[e];
      bound += fabs(exact[e]) * ulp_of(dtype) + 0x1p-24;
      if (!(fabs(is - exact[e]) <= bound) && isfinite(is))
        complain("sum, type %d: element %llu is %g, and in float64 %g", dtype,
                 (unsigned long long)e, is, exact[e]);
    }
  free(exact);
  free(size);
  if (scratch) CUDA(cudaFree(scratch));
  for (uint32_t i = 0; i < k; i++) {
    both_check(&in[i], "input", 0);
    both_free(&in[i]);
  }
  both_check(&dst, "dst", 0);
  both_free(&dst);
}

static void sums(void) {
  uint64_t n = test_cases_from(20, 160), state = the_seed;
  for (uint64_t i = 0; i < n; i++) {
    int dtype = dtypes[i % 5];
    one_sum(i, dtype, 1 + (uint32_t)(i / 5 % MLFAB_GPU_SUM_MOST),
            any_length(&state, elements_tile(dtype)));
  }
}

static void one_reduction(uint64_t seed, int dtype, uint32_t k, uint64_t n) {
  uint64_t state = mix(the_seed + 9000 + seed), off = any_off(&state);
  int finite = chance_below(&state, 3) != 0, op = (int)chance_below(&state, 5);
  int apart = chance_below(&state, 3) == 0;
  both in[MLFAB_GPU_SUM_MOST], dst = both_new(dtype, n, apart ? any_off(&state) : off);
  const void *device[MLFAB_GPU_SUM_MOST], *host[MLFAB_GPU_SUM_MOST];
  if (op == MLFAB_OP_MEAN && dtype == MLFAB_I64) op = MLFAB_OP_MAX;
  for (uint32_t i = 0; i < k; i++) {
    in[i] = both_any(&state, dtype, n, apart ? any_off(&state) : off, finite);
    device[i] = in[i].at;
    host[i] = in[i].host;
  }
  both *to = chance_below(&state, 2) ? &in[chance_below(&state, k)] : &dst;
  EXPECT(mlfab_gpu_reduce(op, dtype, to->at, device, k, n, NULL) == 0);
  CUDA(cudaDeviceSynchronize());
  EXPECT(play_reduce(op, dtype, to->host, host, k, n) == 0);
  for (uint32_t i = 0; i < k; i++) {
    both_check(&in[i], "reduction", 0);
    both_free(&in[i]);
  }
  both_check(&dst, "reduction", 0);
  both_free(&dst);
}

static void reductions(void) {
  uint64_t n = test_cases_from(20, 160), state = the_seed;
  for (uint64_t i = 0; i < n; i++) {
    int dtype = dtypes[i % 5];
    one_reduction(i, dtype, 1 + (uint32_t)(i / 5 % MLFAB_GPU_SUM_MOST),
                  any_length(&state, elements_tile(dtype)));
  }
}

/* All numbers of 16 bits, through the device's own conversion: a sum of each with -0 is itself. */
static void every_half(void) {
  for (int dtype = MLFAB_F16; dtype <= MLFAB_BF16; dtype++) {
    both in = both_new(dtype, 65536, 0), zero = both_new(dtype, 65536, 0),
         out = both_new(dtype, 65536, 0);
    both wide = both_new(MLFAB_F32, 65536, 0);
    for (uint32_t h = 0; h < 65536; h++) {
      elements_set(2, in.host, h, h);
      elements_set(2, zero.host, h, 0x8000u);
    }
    both_up(&in), both_up(&zero);
    const void *device[2] = {in.at, zero.at}, *host[2] = {in.host, zero.host};
    EXPECT(mlfab_gpu_sum(dtype, out.at, device, NULL, 2, 65536, NULL, NULL, NULL) == 0);
    EXPECT(play_sum(dtype, out.host, host, NULL, 2, 65536, NULL) == 0);
    both_check(&out, "half + -0", 0);
    EXPECT(mlfab_gpu_convert(MLFAB_F32, wide.at, dtype, in.at, 0, 65536, NULL) == 0);
    EXPECT(play_convert(MLFAB_F32, wide.host, dtype, in.host, 0, 65536) == 0);
    both_check(&wide, "half to float", 1);
    both_free(&in), both_free(&zero), both_free(&out), both_free(&wide);
  }
}

/* float32 around every number of 16 bits and every middle between two, and any bits. */
static void conversions(void) {
  static const uint32_t beside[] = {0,          1,      0xfff,  0x1000, 0x1001,
                                    UINT32_MAX, 0x7fff, 0x8000, 0x8001};
  const uint64_t n = 65536 * 11 + 77;
  for (int dtype = MLFAB_F16; dtype <= MLFAB_BF16; dtype++) {
    for (uint64_t off = 0; off < 2; off++) {
      uint64_t state = mix(the_seed + 77 + off);
      both in = both_new(MLFAB_F32, n, off), out = both_new(dtype, n, 0),
           other = both_new(dtype, n, off);
      for (uint64_t i = 0; i < n; i++) {
        uint32_t h = (uint32_t)(i / 11), d = (uint32_t)(i % 11),
                 bits = (uint32_t)chance_below(&state, UINT64_C(1) << 32);
        if (d < 9)
          bits = elements_f32_bits(elements_half_back(dtype == MLFAB_F16 ? 1 : 2, (uint16_t)h)) +
                 beside[d];
        elements_set(4, in.host, i, bits);
      }
      both_up(&in);
      EXPECT(mlfab_gpu_convert(dtype, out.at, MLFAB_F32, in.at, 1, n, NULL) == 0);
      EXPECT(play_convert(dtype, out.host, MLFAB_F32, in.host, 1, n) == 0);
      both_check(&out, "float to half, saturated", 1);
      EXPECT(mlfab_gpu_convert(dtype, other.at, MLFAB_F32, in.at, 0, n, NULL) == 0);
      EXPECT(play_convert(dtype, other.host, MLFAB_F32, in.host, 0, n) == 0);
      both_check(&other, "float to half", 1);
      both_check(&in, "input", 1);
      both_free(&in), both_free(&out), both_free(&other);
    }
  }
}

static void one_update(uint64_t seed, int dtype, uint64_t n) {
  uint64_t state = mix(the_seed + seed), off = any_off(&state);
  int finite = chance_below(&state, 2) != 0;
  both w = both_any(&state, dtype, n, off, finite), u = both_any(&state, dtype, n, off, finite);
  both dst = both_new(dtype, n, chance_below(&state, 2) ? off : any_off(&state));
  double scale = any_weight(&state, dtype);
  int from = chance_below(&state, 4) != 0, place = (int)chance_below(&state, 4);
  both *to = place == 0 ? &u : place == 1 && from ? &w : &dst;
  mlfab_gpu_stats wanted, *stats = device_new<mlfab_gpu_stats>();
  void *scratch = device_scratch(mlfab_gpu_stats_scratch());
  EXPECT(mlfab_gpu_add(dtype, to->at, from ? w.at : NULL, u.at, scale, n, stats, scratch, NULL) ==
         0);
  CUDA(cudaDeviceSynchronize());
  double *exact = (double *)calloc(n + 1, sizeof *exact),
         *size = (double *)calloc(n + 1, sizeof *size);
  if (!exact || !size) abort();
  for (uint64_t e = 0; e < n; e++) {
    double product =
        (dtype == MLFAB_F32 ? (double)(float)scale : scale) * value_of(dtype, u.host, e);
    exact[e] = (from ? value_of(dtype, w.host, e) : 0) + product;
    size[e] = fabs(exact[e]) + fabs(product);
  }
  EXPECT(play_add(dtype, to->host, from ? w.host : NULL, u.host, scale, n, &wanted) == 0);
  expect_stats(device_take(stats), wanted);
  for (uint64_t e = 0; e < n && dtype != MLFAB_I64; e++) {
    double is = value_of(dtype, to->host, e), bound = 2 * ulp_of(dtype) * size[e] + 0x1p-140;
    if (isfinite(is) && !(fabs(is - exact[e]) <= bound))
      complain("update, type %d: element %llu is %g, and in float64 %g", dtype,
               (unsigned long long)e, is, exact[e]);
  }
  free(exact), free(size);
  both_check(&w, "w", 0), both_check(&u, "u", 0), both_check(&dst, "dst", 0);
  both_free(&w), both_free(&u), both_free(&dst);
  CUDA(cudaFree(scratch));
}

static void updates(void) {
  uint64_t n = test_cases_from(9, 60), state = the_seed + 1;
  for (uint64_t i = 0; i < n; i++)
    one_update(1000 + i, dtypes[i % 3], any_length(&state, elements_tile(dtypes[i % 3])));
}

/* Adam's formula in float64, for ordinary numbers. */
static void expect_adam(const mlfab_gpu_rule *rule, const both *before, const both *u,
                        const both *s0, const both *s1, const both *after) {
  double c1 = 1 - pow(rule->beta1, (double)rule->t), c2 = 1 - pow(rule->beta2, (double)rule->t);
  for (uint64_t i = 0; i < u->n; i++) {
    double x = value_of(u->dtype, u->host, i), w = value_of(u->dtype, before->host, i);
    double m = rule->beta1 * value_of(u->dtype, s0->host, i) + (1 - rule->beta1) * x;
    double v = rule->beta2 * value_of(u->dtype, s1->host, i) + (1 - rule->beta2) * x * x;
    w += rule->scale * rule->weight_decay * w;
    w += rule->scale * (m / c1) / (sqrt(v / c2) + rule->epsilon);
    double bound = 64 * ulp_of(u->dtype) * (fabs(w) + fabs(rule->scale) * 8);
    if (!(fabs(value_of(u->dtype, after->host, i) - w) <= bound))
      complain("Adam: element %llu is %g, and in float64 %g", (unsigned long long)i,
               value_of(u->dtype, after->host, i), w);
  }
}

static void one_rule(uint64_t seed, uint32_t kind, int dtype, uint64_t n) {
  uint64_t state = mix(the_seed + seed), off = any_off(&state);
  mlfab_gpu_rule rule = {kind,  0, 0.9, 1.0, 0.9, 0.999, 1e-8, chance_below(&state, 2) ? 0.01 : 0.0,
                         -0.01, 1, 0};
  both w = both_any(&state, dtype, n, off, 1), s0 = both_new(dtype, n, off),
       s1 = both_new(dtype, n, off);
  uint64_t *tag = device_new<uint64_t>();
  memset(s0.host, 0, s0.bytes), memset(s1.host, 0, s1.bytes);
  both_up(&s0), both_up(&s1);
  for (uint64_t t = 1; t <= 3; t++) {
    both u = both_new(dtype, n, any_off(&state)), before = both_new(dtype, n, 0);
    for (uint64_t i = 0; i < n; i++)
      elements_set(
          elements_width(dtype), u.host, i,
          t == 3 ? any_bits(&state, dtype, 0)
                 : number(dtype, (double)(int64_t)chance_below(&state, UINT64_MAX) * 0x1p-63));
    both_up(&u);
    memcpy(before.host, w.host, w.bytes);
    both c0 = before, c1 = before; /* the states before the step */
    c0.host = (char *)malloc(s0.bytes + 1), c1.host = (char *)malloc(s1.bytes + 1);
    if (!c0.host || !c1.host) abort();
    memcpy(c0.host, s0.host, s0.bytes), memcpy(c1.host, s1.host, s1.bytes);
    rule.t = t * t;
    rule.delay = chance_below(&state, 9);
    both *to = chance_below(&state, 3) == 0 ? &u : &w;
    if (kind == MLFAB_OPTIMIZER_ADAM && t < 3) to = &w;
    EXPECT(mlfab_gpu_apply(&rule, dtype, to->at, w.at, u.at, s0.at, s1.at, n, tag, 1000 + t,
                           NULL) == 0);
    uint64_t version = 0;
    CUDA(cudaMemcpy(&version, tag, sizeof version, cudaMemcpyDeviceToHost));
    EXPECT(version == 1000 + t);
    EXPECT(play_apply(&rule, dtype, to->host, w.host, u.host, s0.host, s1.host, n) == 0);
    if (kind == MLFAB_OPTIMIZER_ADAM && t < 3) expect_adam(&rule, &before, &u, &c0, &c1, &w);
    both_check(&w, "w", 0), both_check(&u, "u", 0), both_check(&s0, "state 0", 0),
        both_check(&s1, "state 1", 0);
    free(c0.host), free(c1.host);
    both_free(&u), both_free(&before);
  }
  CUDA(cudaFree(tag));
  both_free(&w), both_free(&s0), both_free(&s1);
}

/* SGD is the one rule for int64. */
static void integers(uint64_t n) {
  uint64_t state = mix(the_seed + 8), *tag = device_new<uint64_t>();
  mlfab_gpu_rule rule = {MLFAB_OPTIMIZER_SGD, 0, 0.9, 1.0, 0.9, 0.999, 1e-8, 0.0, -3.0, 1, 0};
  both w = both_any(&state, MLFAB_I64, n, 0, 1), u = both_any(&state, MLFAB_I64, n, 1, 1);
  EXPECT(mlfab_gpu_apply(&rule, MLFAB_I64, w.at, w.at, u.at, NULL, NULL, n, tag, 5, NULL) == 0);
  EXPECT(device_take(tag) == 5);
  EXPECT(play_add(MLFAB_I64, w.host, w.host, u.host, -3.0, n, NULL) == 0);
  both_check(&w, "w", 1), both_check(&u, "u", 1);
  rule.weight_decay = 0.1;
  EXPECT(mlfab_gpu_apply(&rule, MLFAB_I64, w.at, w.at, u.at, NULL, NULL, n, NULL, 5, NULL) ==
         cudaErrorInvalidValue);
  both_free(&w), both_free(&u);
}

static void rules(void) {
  uint64_t n = test_cases_from(12, 48), state = the_seed + 2;
  for (uint64_t i = 0; i < n; i++) {
    int dtype = i / 6 % 2 ? MLFAB_F64 : MLFAB_F32;
    one_rule(2000 + i, (uint32_t)(i % MLFAB_OPTIMIZER_COUNT), dtype,
             any_length(&state, elements_tile(dtype)));
  }
  integers(5000);
}

/* Element by element, from the definition. Returns how many are sent, or UINT64_MAX. */
static uint64_t literal_compact(int dtype, const both *g, const both *residual, double tau,
                                uint64_t *first) {
  uint64_t kept = 0;
  *first = UINT64_MAX;
  for (uint64_t i = 0; i < residual->n; i++) {
    double a = value_of(dtype, residual->host, i) + (g ? value_of(dtype, g->host, i) : 0);
    if (dtype == MLFAB_F32) a = (double)(float)a;
    if (!isfinite(a)) return UINT64_MAX;
    if (a == 0 || fabs(a) < tau) continue;
    if (kept++ == 0) *first = i;
  }
  return kept;
}

static void one_compaction(uint64_t seed, int dtype, uint64_t n, uint64_t density) {
  static const double taus[] = {0.5, 0.25, 0.0, 1e-3, 2.0};
  uint64_t state = mix(the_seed + seed), off = any_off(&state), first;
  int half = (int)chance_below(&state, 3), with = chance_below(&state, 2) != 0,
      elsewhere = chance_below(&state, 2) != 0;
  double tau = taus[chance_below(&state, 5)];
  both g = both_new(dtype, n, off), residual = both_new(dtype, n, off),
       other = both_new(dtype, n, off);
  for (uint64_t i = 0; i < n; i++) {
    elements_set(elements_width(dtype), g.host, i, any_gradient(&state, dtype, tau, density));
    elements_set(elements_width(dtype), residual.host, i,
                 any_gradient(&state, dtype, tau, density));
  }
  if (n > 0 && chance_below(&state, 12) == 0)
    elements_set(elements_width(dtype), residual.host, chance_below(&state, n),
                 infinity_of(dtype) + chance_below(&state, 2));
  both_up(&g), both_up(&residual);
  uint64_t kept = literal_compact(dtype, with ? &g : NULL, &residual, tau, &first);
  uint64_t room = kept == UINT64_MAX ? n : kept - (kept > 0 && chance_below(&state, 6) == 0);
  int type = half == MLFAB_HALF_NONE ? dtype : half == MLFAB_HALF_F16 ? MLFAB_F16 : MLFAB_BF16;
  both indices = both_new(MLFAB_F32, room, any_off(&state)),
       values = both_new(type, room, any_off(&state));
  both *to = elsewhere ? &other : &residual;
  mlfab_gpu_compacted wanted, is, *result = device_new<mlfab_gpu_compacted>();
  void *scratch = device_scratch(mlfab_gpu_compact_scratch(n));
  EXPECT(mlfab_gpu_compact(dtype, with ? g.at : NULL, residual.at, to->at, n, tau, half,
                           (uint32_t *)(void *)indices.at, values.at, room, result, scratch,
                           NULL) == 0);
  CUDA(cudaDeviceSynchronize());
  EXPECT(play_compact(dtype, with ? g.host : NULL, residual.host, to->host, n, tau, half,
                      (uint32_t *)(void *)indices.host, values.host, room, &wanted) == 0);
  is = device_take(result);
  EXPECT(is.kept == wanted.kept && is.saturated == wanted.saturated && is.finite == wanted.finite &&
         is.done == wanted.done);
  EXPECT(is.finite == (kept != UINT64_MAX));
  if (half == MLFAB_HALF_NONE && kept != UINT64_MAX) {
    EXPECT(is.kept == kept && is.done == (kept <= room));
    if (is.done && kept > 0) EXPECT(elements_get(4, indices.host, 0) == first);
  }
  if (is.done || !elsewhere) both_check(to, "new residual", 1);
  both_check(&g, "g", 1), both_check(&residual, "residual", 1);
  both_check(&indices, "indices", 1), both_check(&values, "values", 1);
  CUDA(cudaFree(scratch));
  both_free(&g), both_free(&residual), both_free(&other), both_free(&indices), both_free(&values);
}

static void compactions(void) {
  static const uint64_t densities[] = {1, 0, 3, 20, 100};
  uint64_t n = test_cases_from(15, 120), state = the_seed + 3;
  for (uint64_t i = 0; i < n; i++)
    one_compaction(3000 + i, i % 3 ? MLFAB_F32 : MLFAB_F64,
                   any_length(&state, ELEMENTS_COMPACT_TILE), densities[i / 3 % 5]);
}

static void one_scatter(uint64_t seed, int dtype, uint64_t length) {
  uint64_t state = mix(the_seed + seed), n = 0, one_in = 1 + chance_below(&state, 30);
  int half = dtype == MLFAB_I64 ? 0 : (int)chance_below(&state, 3);
  int type = half == MLFAB_HALF_NONE ? dtype : half == MLFAB_HALF_F16 ? MLFAB_F16 : MLFAB_BF16;
  both dst = both_any(&state, dtype, length, any_off(&state), 0),
       values = both_any(&state, type, length, any_off(&state), 0);
  both indices = both_new(MLFAB_F32, length, any_off(&state));
  double scale = any_weight(&state, dtype);
  for (uint64_t i = 0; i < length; i++)
    if (chance_below(&state, one_in) == 0) elements_set(4, indices.host, n++, i);
  both_up(&indices);
  EXPECT(mlfab_gpu_scatter_add(dtype, dst.at, (const uint32_t *)(void *)indices.at, values.at, half,
                               n, scale, NULL) == 0);
  CUDA(cudaDeviceSynchronize());
  EXPECT(play_scatter_add(dtype, dst.host, (const uint32_t *)(void *)indices.host, values.host,
                          half, n, scale) == 0);
  both_check(&dst, "dst", 0), both_check(&values, "values", 1), both_check(&indices, "indices", 1);
  both_free(&dst), both_free(&values), both_free(&indices);
}

static void scatters(void) {
  uint64_t n = test_cases_from(6, 40), state = the_seed + 4;
  for (uint64_t i = 0; i < n; i++)
    one_scatter(4000 + i, dtypes[i % 3], 1 + any_length(&state, 4096));
}

/* Arrays of more than 8,192 tiles, so that a part has several. */
static void large_arrays(void) {
  one_compaction(5010, MLFAB_F32, (uint64_t)ELEMENTS_PARTS * ELEMENTS_COMPACT_TILE + 12345, 1);
  if (test_scale() < 1) return;
  for (int dtype = MLFAB_F32; dtype <= MLFAB_BF16; dtype++)
    one_sum(5000 + (uint64_t)dtype, dtype, 1 + (uint32_t)dtype % 2,
            (uint64_t)ELEMENTS_PARTS * elements_tile(dtype) + 4321);
  one_compaction(5011, MLFAB_F64, (uint64_t)ELEMENTS_PARTS * ELEMENTS_COMPACT_TILE + 7, 0);
}

/* The same norm in every run, at every place, of the same numbers. */
static void norms_repeat(void) {
  uint64_t state = mix(the_seed + 9), n = test_scale() < 1 ? 100000 : 3000001;
  for (size_t d = 0; d < 5; d++) {
    both a = both_any(&state, dtypes[d], n, 0, 1), b = both_new(dtypes[d], n, 1);
    memcpy(b.host, a.host, a.bytes);
    both_up(&b);
    void *scratch = device_scratch(mlfab_gpu_stats_scratch());
    mlfab_gpu_stats first;
    memset(&first, 0, sizeof first);
    double exact = 0;
    for (uint64_t i = 0; i < n; i++)
      exact += value_of(dtypes[d], a.host, i) * value_of(dtypes[d], a.host, i);
    for (int run = 0; run < 20; run++) {
      mlfab_gpu_stats *stats = device_new<mlfab_gpu_stats>(), now;
      const void *in = run % 2 ? b.at : a.at;
      EXPECT(mlfab_gpu_sum(dtypes[d], NULL, &in, NULL, 1, n, stats, scratch, NULL) == 0);
      now = device_take(stats);
      if (run == 0) first = now;
      expect_stats(now, first);
      EXPECT(fabs(now.norm2 - exact) <= (double)(n + 300) * 0x1p-53 * exact);
    }
    CUDA(cudaFree(scratch));
    both_free(&a), both_free(&b);
  }
}

/* Calls follow each other in a stream of the caller, and nothing waits for them but the end. */
static void order_in_a_stream(void) {
  const uint64_t n = 1 << 20;
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  both w = both_new(MLFAB_F32, n, 0), u = both_new(MLFAB_F32, n, 0);
  for (uint64_t i = 0; i < n; i++) {
    elements_set(4, w.host, i, 0);
    elements_set(4, u.host, i, elements_f32_bits(1.0f));
  }
  both_up(&w), both_up(&u);
  CUDA(cudaDeviceSynchronize());
  uint64_t *tag = device_new<uint64_t>(), tags = 0;
  mlfab_gpu_rule rule = {MLFAB_OPTIMIZER_SGD, 0, 0.9, 1.0, 0.9, 0.999, 1e-8, 0.0, 1.0, 1, 0};
  for (uint64_t t = 1; t <= 100; t++)
    EXPECT(mlfab_gpu_apply(&rule, MLFAB_F32, w.at, w.at, u.at, NULL, NULL, n, tag, t, stream) == 0);
  CUDA(cudaMemcpyAsync(&tags, tag, sizeof tags, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  EXPECT(tags == 100);
  for (uint64_t i = 0; i < n; i++) elements_set(4, w.host, i, elements_f32_bits(100.0f));
  both_check(&w, "w", 1);
  CUDA(cudaFree(tag));
  CUDA(cudaStreamDestroy(stream));
  both_free(&w), both_free(&u);
}

static void arguments(void) {
  both a = both_new(MLFAB_F64, 64, 0);
  const void *in[1] = {a.at};
  void *odd = a.at + 2;
  mlfab_gpu_rule rule = {MLFAB_OPTIMIZER_SGD, 0, 0.9, 1.0, 0.9, 0.999, 1e-8, 0.0, 1.0, 0, 0};
  /* The array holds the guard's bytes: nothing may change them. */
  EXPECT(mlfab_gpu_sum(MLFAB_F32, a.at, in, NULL, 0, 8, NULL, NULL, NULL) == cudaErrorInvalidValue);
  EXPECT(mlfab_gpu_sum(MLFAB_F32, a.at, in, NULL, 17, 8, NULL, NULL, NULL) ==
         cudaErrorInvalidValue);
  EXPECT(mlfab_gpu_sum(MLFAB_F32, odd, in, NULL, 1, 8, NULL, NULL, NULL) ==
         cudaErrorMisalignedAddress);
  EXPECT(mlfab_gpu_add(MLFAB_F32, odd, a.at, a.at, 1, 8, NULL, NULL, NULL) ==
         cudaErrorMisalignedAddress);
  EXPECT(mlfab_gpu_add(MLFAB_F16, a.at, a.at, a.at, 1, 8, NULL, NULL, NULL) ==
         cudaErrorInvalidValue);
  EXPECT(mlfab_gpu_apply(&rule, MLFAB_F32, a.at, a.at, a.at, NULL, NULL, 8, NULL, 1, NULL) ==
         cudaErrorInvalidValue);
  rule.t = 1;
  EXPECT(mlfab_gpu_apply(&rule, MLFAB_F32, a.at, a.at, a.at, NULL, NULL, 8, (uint64_t *)odd, 1,
                         NULL) == cudaErrorMisalignedAddress);
  EXPECT(mlfab_gpu_convert(MLFAB_F16, a.at, MLFAB_F64, a.at, 0, 8, NULL) == cudaErrorInvalidValue);
  EXPECT(mlfab_gpu_scatter_add(MLFAB_F32, a.at, NULL, a.at, 0, 8, 1, NULL) ==
         cudaErrorInvalidValue);
  EXPECT(mlfab_gpu_compact(MLFAB_F16, NULL, a.at, a.at, 8, 1, 0, NULL, NULL, 0, NULL, NULL, NULL) ==
         cudaErrorInvalidValue);
  CUDA(cudaDeviceSynchronize());
  both_check(&a, "the array", 1);
  /* n = 0: no arrays; results nevertheless. */
  in[0] = NULL;
  mlfab_gpu_stats *stats = device_new<mlfab_gpu_stats>(), nothing = {0.0, 1, 0};
  mlfab_gpu_compacted *found = device_new<mlfab_gpu_compacted>(), none;
  uint64_t *tag = device_new<uint64_t>();
  void *scratch = device_scratch(mlfab_gpu_compact_scratch(0));
  EXPECT(mlfab_gpu_sum(MLFAB_F32, NULL, in, NULL, 1, 0, stats, scratch, NULL) == 0);
  expect_stats(device_take(stats), nothing);
  EXPECT(mlfab_gpu_compact(MLFAB_F32, NULL, NULL, NULL, 0, 1, 0, NULL, NULL, 0, found, scratch,
                           NULL) == 0);
  none = device_take(found);
  EXPECT(none.kept == 0 && none.saturated == 0 && none.finite == 1 && none.done == 1);
  EXPECT(mlfab_gpu_apply(&rule, MLFAB_F32, NULL, NULL, NULL, NULL, NULL, 0, tag, 7, NULL) == 0);
  EXPECT(device_take(tag) == 7);
  CUDA(cudaFree(scratch));
  both_free(&a);
}

int main(void) {
  static const struct {
    const char *name;
    void (*run)(void);
  } cases[] = {{"sums", sums},
               {"reductions", reductions},
               {"every_half", every_half},
               {"conversions", conversions},
               {"updates", updates},
               {"rules", rules},
               {"compactions", compactions},
               {"scatters", scatters},
               {"large_arrays", large_arrays},
               {"norms_repeat", norms_repeat},
               {"order_in_a_stream", order_in_a_stream},
               {"arguments", arguments}};
  const int count = (int)(sizeof cases / sizeof *cases);
  int devices = 0, failed = 0;
  cudaError_t error = cudaGetDeviceCount(&devices);
  printf("1..%d\n", count);
  if (error != cudaSuccess || devices == 0) {
    const char *why = error != cudaSuccess ? cudaGetErrorString(error) : "no device";
    for (int i = 0; i < count; i++)
      printf("ok %d - %s # SKIP no GPU: %s\n", i + 1, cases[i].name, why);
    return 0;
  }
  the_seed = test_number("MLFAB_SEED", (uint64_t)time(NULL));
  printf("# MLFAB_SEED=%llu\n", (unsigned long long)the_seed);
  for (int i = 0; i < count; i++) {
    failures = 0;
    cases[i].run();
    printf("%sok %d - %s\n", failures ? "not " : "", i + 1, cases[i].name);
    fflush(stdout);
    failed += failures != 0;
  }
  return failed != 0;
}
