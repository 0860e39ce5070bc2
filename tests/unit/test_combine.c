/* test_combine.c - the kernels of core/kernels/kernels.c for collectives against a literal loop at every level, bit for
 * bit.
 * Holds under -Ofast -march=native too: the reference rounds by storing and compares bits.
 * MLFAB_SCALE=100 a hundred times as many cases. */
#include "core/kernels/kernels_combine.h"
#include "core/base/rng.h"

#include "../testing.h"

enum { POOL = 1 << 21, MOST = 64, GUARD = 0x5a };

static const int dtypes[] = {MLFAB_F32, MLFAB_F64, MLFAB_I64, MLFAB_F16, MLFAB_BF16};
static const int ops[] = {MLFAB_OP_SUM, MLFAB_OP_MEAN, MLFAB_OP_MIN, MLFAB_OP_MAX,
                          MLFAB_OP_PRODUCT};

/* ---- the literal version: a number is its bits, in the low end of a word ---- */

typedef struct format {
  int exponent, fraction; /* bits */
} format;

static format format_of(int dtype) {
  switch (dtype) {
    case MLFAB_F16:
      return (format){5, 10};
    case MLFAB_BF16:
      return (format){8, 7};
    case MLFAB_F64:
      return (format){11, 52};
    default:
      return (format){8, 23};
  }
}

static uint64_t sign_of(format f) { return (uint64_t)1 << (f.exponent + f.fraction); }
static uint64_t infinity_of(format f) { return (((uint64_t)1 << f.exponent) - 1) << f.fraction; }
static uint64_t quiet_of(format f) { return (uint64_t)1 << (f.fraction - 1); }
static int is_nan(format f, uint64_t x) { return (x & (sign_of(f) - 1)) > infinity_of(f); }

static uint64_t get(int dtype, const void *array, uint64_t i) {
  uint64_t bits = 0;
  uint32_t width = mlfab__element_bytes(dtype);
  unsigned char byte[8];
  memcpy(byte, (const char *)array + i * width, width);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  for (uint32_t b = 0; b < width; b++) bits = bits << 8 | byte[b];
#else
  for (uint32_t b = width; b-- > 0;) bits = bits << 8 | byte[b];
#endif
  return bits;
}

static void put(int dtype, void *array, uint64_t i, uint64_t bits) {
  uint16_t b16 = (uint16_t)bits;
  uint32_t b32 = (uint32_t)bits;
  switch (mlfab__element_bytes(dtype)) {
    case 2:
      memcpy((char *)array + i * 2, &b16, 2);
      return;
    case 4:
      memcpy((char *)array + i * 4, &b32, 4);
      return;
    default:
      memcpy((char *)array + i * 8, &bits, 8);
  }
}

/* From the definition; not for infinity, NaN and subnormal F64. */
static double meaning(format f, uint64_t bits) {
  int bias = (1 << (f.exponent - 1)) - 1;
  int exponent = (int)((bits & (sign_of(f) - 1)) >> f.fraction);
  double one = (double)((uint64_t)1 << f.fraction);
  double x = (double)(bits & (((uint64_t)1 << f.fraction) - 1)) / one;
  if (exponent != 0) x += 1;
  for (int e = (exponent == 0 ? 1 : exponent) - bias; e != 0; e += e > 0 ? -1 : 1)
    x = e > 0 ? x * 2 : x / 2;
  return bits & sign_of(f) ? -x : x;
}

/* A half as a float32 and back. The pattern after the largest number is infinity, and stands for the number
 * that would follow. */
static uint64_t widen(int dtype, uint64_t bits) {
  format f = format_of(dtype), wide = format_of(MLFAB_F32);
  uint64_t sign = bits & sign_of(f) ? sign_of(wide) : 0;
  if (dtype == MLFAB_BF16) return bits << 16;
  if (is_nan(f, bits)) {
    uint64_t fraction = bits & (((uint64_t)1 << f.fraction) - 1);
    return sign | infinity_of(wide) | quiet_of(wide) | fraction << (wide.fraction - f.fraction);
  }
  if ((bits & (sign_of(f) - 1)) == infinity_of(f)) return sign | infinity_of(wide);
  float x = (float)meaning(f, bits);
  uint32_t b;
  memcpy(&b, &x, sizeof b);
  return b;
}

static uint64_t narrow(int dtype, uint64_t bits) {
  static double values[2][0x8000];
  format f = format_of(dtype), wide = format_of(MLFAB_F32);
  double *value = values[dtype == MLFAB_BF16];
  uint64_t low = 0, high = infinity_of(f), magnitude = bits & (sign_of(wide) - 1);
  uint64_t sign = bits & sign_of(wide) ? sign_of(f) : 0;
  if (is_nan(wide, bits)) {
    uint64_t fraction = bits >> (wide.fraction - f.fraction) & (((uint64_t)1 << f.fraction) - 1);
    return sign | infinity_of(f) | quiet_of(f) | fraction;
  }
  if (magnitude == infinity_of(wide)) return sign | infinity_of(f);
  if (value[1] <= 0)
    for (uint64_t i = 0; i <= infinity_of(f); i++) value[i] = meaning(f, i);
  double size = meaning(wide, magnitude);
  while (low < high) { /* the last one not above */
    uint64_t middle = (low + high + 1) / 2;
    if (value[middle] <= size)
      low = middle;
    else
      high = middle - 1;
  }
  if (low < infinity_of(f)) {
    double below = size - value[low], above = value[low + 1] - size;
    if (above < below || (above == below && (low & 1))) low++;
  }
  return sign | low;
}

/* Compares the signs first, then the magnitudes. */
static int is_less(format f, uint64_t a, uint64_t b) {
  int minus_a = (a & sign_of(f)) != 0, minus_b = (b & sign_of(f)) != 0;
  if (minus_a != minus_b) return minus_a;
  return minus_a ? a > b : a < b;
}

static uint64_t literal_real(int op, int dtype, uint64_t a, uint64_t b) {
  format f = format_of(dtype);
  int smaller = op == MLFAB_OP_MIN;
  if (op == MLFAB_OP_MIN || op == MLFAB_OP_MAX) {
    if (is_nan(f, a)) return a;
    if (is_nan(f, b)) return b;
    return (smaller ? is_less(f, b, a) : is_less(f, a, b)) ? b : a;
  }
  if (is_nan(f, a)) return a | quiet_of(f);
  if (is_nan(f, b)) return b | quiet_of(f);
  uint64_t bits = 0;
  if (dtype == MLFAB_F64) {
    volatile double x, y, r;
    memcpy((void *)&x, &a, 8);
    memcpy((void *)&y, &b, 8);
    if (op == MLFAB_OP_PRODUCT)
      r = x * y;
    else
      r = x + y;
    memcpy(&bits, (void *)&r, 8);
  } else {
    volatile float x, y, r;
    uint32_t a32 = (uint32_t)a, b32 = (uint32_t)b;
    memcpy((void *)&x, &a32, 4);
    memcpy((void *)&y, &b32, 4);
    if (op == MLFAB_OP_PRODUCT)
      r = x * y;
    else
      r = x + y;
    memcpy(&b32, (void *)&r, 4);
    bits = b32;
  }
  return bits;
}

static uint64_t literal_integer(int op, uint64_t a, uint64_t b) {
  if (op == MLFAB_OP_MIN) return (int64_t)b < (int64_t)a ? b : a;
  if (op == MLFAB_OP_MAX) return (int64_t)b > (int64_t)a ? b : a;
  if (op == MLFAB_OP_PRODUCT) return a * b;
  return op == MLFAB__OP_OR ? (a | b) : a + b;
}

static uint64_t literal_many(int op, int dtype, const void *const *in, uint32_t k, uint64_t i) {
  int half = dtype == MLFAB_F16 || dtype == MLFAB_BF16;
  uint64_t sum = get(dtype, in[0], i);
  if (k == 1) return sum;
  if (half) sum = widen(dtype, sum);
  for (uint32_t j = 1; j < k; j++) {
    uint64_t x = get(dtype, in[j], i);
    if (dtype == MLFAB_I64)
      sum = literal_integer(op, sum, x);
    else if (half)
      sum = literal_real(op, MLFAB_F32, sum, widen(dtype, x));
    else
      sum = literal_real(op, dtype, sum, x);
  }
  return half ? narrow(dtype, sum) : sum;
}

/* Bit-equal. Only on x86-64 are the bits of NaNs known; elsewhere two NaNs count as equal. */
static int same(int dtype, uint64_t a, uint64_t b) {
#if !defined(__x86_64__)
  if (dtype != MLFAB_I64 && is_nan(format_of(dtype), a) && is_nan(format_of(dtype), b)) return 1;
#endif
  (void)dtype;
  return a == b;
}

/* ---- arrays ---- */

/* Any bits; ordinary numbers; zeros, and the first and the last number of each kind. */
static uint64_t any_number(mlfab__rng *prng, int dtype) {
  format f = format_of(dtype);
  uint64_t bits = mlfab__rng_next(prng), sign = bits & sign_of(f);
  if (dtype == MLFAB_I64) {
    static const uint64_t some[] = {0, 1, UINT64_MAX, INT64_MAX, (uint64_t)INT64_MAX + 1};
    return mlfab__rng_below(prng, 4) ? bits : some[mlfab__rng_below(prng, MLFAB__COUNT(some))];
  }
  uint64_t some[] = {0,
                     1,
                     quiet_of(f) * 2 - 1,
                     quiet_of(f) * 2,
                     infinity_of(f) - 1,
                     infinity_of(f),
                     infinity_of(f) + 1,
                     infinity_of(f) + quiet_of(f),
                     sign_of(f) - 1,
                     (infinity_of(f) >> 1) & infinity_of(f)};
  switch (mlfab__rng_below(prng, 8)) {
    case 0:
      return bits & (sign_of(f) * 2 - 1);
    case 1:
      return sign | some[mlfab__rng_below(prng, MLFAB__COUNT(some))];
    default: /* near one: rounding shows, and sums cancel */
      bits &= (quiet_of(f) * 8) - 1;
      return sign | (((infinity_of(f) >> 1) & infinity_of(f)) + bits - quiet_of(f) * 4);
  }
}

typedef struct arrays {
  char *in_pool, *kept, *out_pool; /* POOL bytes each */
  void *dst[MOST];
  const void *in[MOST];
  uint64_t *expected;
} arrays;

static char *at_any_place(mlfab__rng *prng, char *slot, uint32_t width) {
  char *line = slot + (0 - (uintptr_t)slot) % 64;
  return line + (mlfab__rng_below(prng, 3) ? mlfab__rng_below(prng, 64 / width) * width : 0);
}

/* Some destinations are inputs, each at most once. */
static void one_case(mlfab__rng *prng, arrays *a, int op, int dtype, uint32_t k, uint32_t ndst,
                     uint64_t n) {
  uint32_t width = mlfab__element_bytes(dtype), alias[MOST],
           first = (uint32_t)mlfab__rng_below(prng, k);
  size_t slot = (size_t)(n * width + 192), bytes = (size_t)n * width;
  int aliased = (int)mlfab__rng_below(prng, 2);
  assert_true(slot * k <= POOL && slot * ndst <= POOL);
  memset(a->out_pool, GUARD, slot * ndst);
  for (uint32_t j = 0; j < k; j++) {
    char *in = at_any_place(prng, a->in_pool + j * slot, width);
    for (uint64_t i = 0; i < n; i++) put(dtype, in, i, any_number(prng, dtype));
    a->in[j] = in;
  }
  for (uint32_t d = 0; d < ndst; d++) {
    alias[d] = aliased && d < k && mlfab__rng_below(prng, 2) ? (first + d) % k : k;
    a->dst[d] = at_any_place(prng, a->out_pool + d * slot, width);
    if (alias[d] < k) a->dst[d] = (void *)(uintptr_t)a->in[alias[d]];
  }
  for (uint64_t i = 0; i < n; i++) a->expected[i] = literal_many(op, dtype, a->in, k, i);
  memcpy(a->kept, a->in_pool, slot * k);
  for (int level = 0; level <= mlfab__kernel_level(); level++) {
    memcpy(a->in_pool, a->kept, slot * k);
    memset(a->out_pool, GUARD, slot * ndst);
    mlfab__kernel_combine_many_with(level, op, dtype, a->dst, ndst, a->in, k, n,
                                    (int)mlfab__rng_below(prng, 2));
    for (uint32_t d = 0; d < ndst; d++) {
      for (uint64_t i = 0; i < n; i++) {
        uint64_t is = get(dtype, a->dst[d], i);
        if (!same(dtype, is, a->expected[i]))
          fail_msg("level %d %s %s k %u dst %u of %u, element %llu of %llu: %llx, not %llx", level,
                   mlfab__op_name(op), mlfab__dtype_name(dtype), k, d, ndst, (unsigned long long)i,
                   (unsigned long long)n, (unsigned long long)is,
                   (unsigned long long)a->expected[i]);
      }
      /* The results were compared; now check that nothing else was written. */
      if (alias[d] < k)
        memcpy(a->dst[d], a->kept + ((char *)a->dst[d] - a->in_pool), bytes);
      else
        memset(a->dst[d], GUARD, bytes);
    }
    assert_memory_equal(a->in_pool, a->kept, slot * k);
    for (size_t i = 0; i < slot * ndst; i++) assert_int_equal(a->out_pool[i], GUARD);
  }
}

static arrays *arrays_new(void) {
  arrays *a = (arrays *)calloc(1, sizeof *a);
  assert_non_null(a);
  a->in_pool = (char *)calloc(1, POOL);
  a->out_pool = (char *)calloc(1, POOL);
  a->kept = (char *)calloc(1, POOL);
  a->expected = (uint64_t *)calloc(1, POOL);
  assert_true(a->in_pool && a->out_pool && a->kept && a->expected);
  return a;
}

static void arrays_delete(arrays *a) {
  free(a->in_pool);
  free(a->out_pool);
  free(a->kept);
  free(a->expected);
  free(a);
}

TEST(equals_the_loop_at_every_level) {
  mlfab__rng prng;
  arrays *a = arrays_new();
  mlfab__rng_seed(&prng, 1);
  for (uint64_t c = 0; c < test_cases(3000); c++) {
    int dtype = dtypes[mlfab__rng_below(&prng, MLFAB__COUNT(dtypes))];
    int op = ops[mlfab__rng_below(&prng, MLFAB__COUNT(ops))];
    uint32_t k = 1 + (uint32_t)mlfab__rng_below(&prng, mlfab__rng_below(&prng, 10) ? 5 : MOST);
    uint32_t ndst = 1 + (uint32_t)mlfab__rng_below(&prng, mlfab__rng_below(&prng, 10) ? 3 : MOST);
    uint64_t n = mlfab__rng_below(&prng, mlfab__rng_below(&prng, 2) ? 80 : 700);
    if (dtype == MLFAB_I64 && mlfab__rng_below(&prng, 5) == 0) op = MLFAB__OP_OR;
    one_case(&prng, a, op, dtype, k, ndst, n);
  }
  arrays_delete(a);
}

/* Long enough for non-temporal stores, and copied in pieces. */
TEST(streams_long_arrays) {
  mlfab__rng prng;
  arrays *a = arrays_new();
  mlfab__rng_seed(&prng, 2);
  for (uint64_t c = 0; c < test_cases(2); c++)
    for (size_t t = 0; t < MLFAB__COUNT(dtypes); t++)
      for (uint32_t k = 1; k <= 3; k++) {
        uint64_t n = 66000 / mlfab__element_bytes(dtypes[t]) + mlfab__rng_below(&prng, 100);
        one_case(&prng, a, ops[mlfab__rng_below(&prng, MLFAB__COUNT(ops))], dtypes[t], k,
                 1 + (uint32_t)mlfab__rng_below(&prng, 4), n);
      }
  arrays_delete(a);
}

/* Each special number with each other one, at every position of a vector. */
TEST(special_numbers_meet) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 3);
  for (size_t t = 0; t < MLFAB__COUNT(dtypes); t++) {
    int dtype = dtypes[t];
    if (dtype == MLFAB_I64) continue;
    format f = format_of(dtype);
    uint64_t one = (infinity_of(f) >> 1) & infinity_of(f), bits[26];
    uint64_t half[13] = {0,
                         1,
                         quiet_of(f) * 2 - 1,
                         quiet_of(f) * 2,
                         one,
                         one + 1,
                         infinity_of(f) - quiet_of(f) * 2,
                         infinity_of(f) - 1,
                         infinity_of(f),
                         infinity_of(f) + 1,
                         infinity_of(f) + quiet_of(f),
                         infinity_of(f) + quiet_of(f) + 5,
                         sign_of(f) - 1};
    enum { PAIRS = 26 * 26 };
    static uint64_t room[3][PAIRS + 64];
    for (int i = 0; i < 26; i++) bits[i] = half[i % 13] | (i < 13 ? 0 : sign_of(f));
    for (uint32_t i = 0; i < PAIRS; i++) {
      put(dtype, room[0], i, bits[i / 26]);
      put(dtype, room[1], i, bits[i % 26]);
    }
    const void *in[2] = {room[0], room[1]};
    void *dst = room[2];
    for (size_t o = 0; o < MLFAB__COUNT(ops); o++)
      for (int level = 0; level <= mlfab__kernel_level(); level++) {
        mlfab__kernel_combine_many_with(level, ops[o], dtype, &dst, 1, in, 2, PAIRS, 0);
        for (uint32_t i = 0; i < PAIRS; i++)
          if (!same(dtype, get(dtype, dst, i), literal_many(ops[o], dtype, in, 2, i)))
            fail_msg("level %d %s %s of %llx and %llx: %llx", level, mlfab__op_name(ops[o]),
                     mlfab__dtype_name(dtype), (unsigned long long)bits[i / 26],
                     (unsigned long long)bits[i % 26], (unsigned long long)get(dtype, dst, i));
      }
  }
}

/* Not for halves, which are rounded once. */
TEST(one_pass_equals_many) {
  enum { N = 1000, K = 7 };
  static uint64_t array[K][N], once[N], often[N];
  const void *in[K];
  void *dst = once;
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 4);
  for (uint64_t c = 0; c < test_cases(20); c++)
    for (size_t t = 0; t < 3; t++)
      for (size_t o = 0; o < MLFAB__COUNT(ops); o++) {
        for (int j = 0; j < K; j++) {
          in[j] = array[j];
          for (uint64_t i = 0; i < N; i++)
            put(dtypes[t], array[j], i, any_number(&prng, dtypes[t]));
        }
        mlfab__kernel_combine_many(ops[o], dtypes[t], &dst, 1, in, K, N, 0);
        mlfab__kernel_combine(ops[o], dtypes[t], often, in[0], in[1], N, 0);
        for (int j = 2; j < K; j++)
          mlfab__kernel_combine(ops[o], dtypes[t], often, often, in[j], N, 0);
        assert_memory_equal(once, often, N * mlfab__element_bytes(dtypes[t]));
        mlfab__kernel_combine(ops[o], dtypes[t], array[1], in[0], in[1], N, 0);
        for (int j = 2; j < K; j++)
          mlfab__kernel_combine(ops[o], dtypes[t], array[j], array[j - 1], array[j], N, 0);
        assert_memory_equal(array[K - 1], once, N * mlfab__element_bytes(dtypes[t]));
      }
}

static uint64_t literal_quotient(int dtype, uint64_t x, uint32_t by) {
  volatile float a32, r32;
  volatile double a64, r64;
  format f = format_of(dtype == MLFAB_F64 ? MLFAB_F64 : MLFAB_F32);
  uint32_t bits;
  if (dtype == MLFAB_F64) {
    if (is_nan(f, x)) return x | quiet_of(f);
    memcpy((void *)&a64, &x, 8);
    volatile double by64 = by;
    r64 = a64 / by64;
    memcpy(&x, (void *)&r64, 8);
    return x;
  }
  uint64_t wide = dtype == MLFAB_F32 ? x : widen(dtype, x);
  if (is_nan(f, wide)) {
    wide |= quiet_of(f);
  } else {
    bits = (uint32_t)wide;
    memcpy((void *)&a32, &bits, 4);
    volatile float by32 = (float)by;
    r32 = a32 / by32;
    memcpy(&bits, (void *)&r32, 4);
    wide = bits;
  }
  return dtype == MLFAB_F32 ? wide : narrow(dtype, wide);
}

/* Lengths around the size from which stores go past the caches, at all offsets in a line; nothing beside is written. */
TEST(copies_past_the_caches) {
  enum { BYTES = 70000, EDGE = 64 };
  static const uint64_t lengths[] = {0, 1, 63, 64, 65535, 65536, 65537, 65599, 65600, 69999};
  static uint8_t from[BYTES + 2 * EDGE], to[BYTES + 2 * EDGE];
  for (uint32_t i = 0; i < sizeof from; i++) from[i] = (uint8_t)(i * 7 + i / 251);
  for (uint32_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
    for (uint32_t at = 0; at < 128; at++) {
      uint8_t *begin = to + at % EDGE;
      memset(to, 0x55, sizeof to);
      mlfab__kernel_copy(begin, from + at % 17, lengths[k], at < EDGE);
      assert_memory_equal(begin, from + at % 17, lengths[k]);
      for (uint8_t *b = to; b < begin; b++) assert_int_equal(*b, 0x55);
      for (uint32_t b = 0; b < EDGE; b++) assert_int_equal(begin[lengths[k] + b], 0x55);
    }
  }
}

TEST(divides_with_one_rounding) {
  enum { N = 600 };
  static uint64_t before[N], room[N + 16];
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 5);
  for (uint64_t c = 0; c < test_cases(300); c++) {
    int dtype = dtypes[mlfab__rng_below(&prng, MLFAB__COUNT(dtypes))];
    uint32_t width = mlfab__element_bytes(dtype);
    uint32_t by = 1 + (uint32_t)mlfab__rng_below(&prng, mlfab__rng_below(&prng, 2) ? 9 : 1 << 24);
    uint64_t n = mlfab__rng_below(&prng, N + 1);
    char *data = (char *)room + width * mlfab__rng_below(&prng, 16);
    if (dtype == MLFAB_I64) continue;
    for (uint64_t i = 0; i < n; i++) put(dtype, before, i, any_number(&prng, dtype));
    for (int level = 0; level <= mlfab__kernel_level(); level++) {
      memcpy(data, before, (size_t)n * width);
      memset(data + n * width, GUARD, width);
      mlfab__kernel_divide_with(level, dtype, data, n, by);
      for (uint64_t i = 0; i < n; i++) {
        uint64_t x = get(dtype, before, i);
        if (!same(dtype, get(dtype, data, i), literal_quotient(dtype, x, by)))
          fail_msg("level %d %s %llx / %u: %llx", level, mlfab__dtype_name(dtype),
                   (unsigned long long)x, by, (unsigned long long)get(dtype, data, i));
      }
      for (uint32_t i = 0; i < width; i++) assert_int_equal(data[n * width + i], GUARD);
    }
  }
  float third = 1.0f;
  mlfab__kernel_divide(MLFAB_F32, &third, 1, 3);
  assert_int_equal(get(MLFAB_F32, &third, 0), 0x3eaaaaab);
}

TEST(finds_what_is_not_finite) {
  enum { N = 83 };
  uint64_t room[N];
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 6);
  for (size_t t = 0; t < MLFAB__COUNT(dtypes); t++) {
    format f = format_of(dtypes[t]);
    uint64_t bad[] = {infinity_of(f), infinity_of(f) | sign_of(f), infinity_of(f) + 1,
                      sign_of(f) * 2 - 1};
    if (dtypes[t] == MLFAB_I64) {
      memset(room, 0xff, sizeof room);
      assert_int_equal(mlfab__elements_finite(MLFAB_I64, room, N), 1);
      continue;
    }
    for (uint32_t at = 0; at < N; at++)
      for (size_t b = 0; b < MLFAB__COUNT(bad); b++) {
        for (uint32_t i = 0; i < N; i++) {
          uint64_t x = any_number(&prng, dtypes[t]);
          put(dtypes[t], room, i, (x & infinity_of(f)) == infinity_of(f) ? infinity_of(f) - 1 : x);
        }
        assert_int_equal(mlfab__elements_finite(dtypes[t], room, N), 1);
        put(dtypes[t], room, at, bad[b]);
        assert_int_equal(mlfab__elements_finite(dtypes[t], room, N), 0);
        assert_int_equal(mlfab__elements_finite(dtypes[t], room, at), 1);
      }
  }
}

TEST(knows_its_types) {
  static const uint32_t bytes[] = {0, 4, 8, 8, 2, 2, 0};
  static const char *const names[] = {"unknown", "F32", "F64", "I64", "F16", "BF16", "unknown"};
  static const char *const operations[] = {"SUM", "MEAN", "MIN", "MAX", "PRODUCT", "OR", "unknown"};
  for (int i = 0; i < 7; i++) {
    assert_int_equal(mlfab__element_bytes(i), bytes[i]);
    assert_string_equal(mlfab__dtype_name(i), names[i]);
    assert_string_equal(mlfab__op_name(i), operations[i]);
  }
  assert_int_equal(mlfab__element_bytes(-1), 0);
  assert_string_equal(mlfab__dtype_name(-1), "unknown");
  assert_string_equal(mlfab__op_name(-1), "unknown");
}

int main(int argc, char **argv) {
  printf("levels up to %d\n", mlfab__kernel_level());
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
