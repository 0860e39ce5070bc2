/* test_rng.c - layer 0: seeded random numbers against published values, and the env's hooks. */
#include "core/base/env.h"
#include "core/base/rng.h"

#include "../testing.h"

/* The first outputs of the reference splitmix64.c with state 0. */
TEST(test_mix) {
  assert_true(mlfab__mix(0) == 0xe220a8397b1dcdafu);
  assert_true(mlfab__mix(0x9e3779b97f4a7c15u) == 0x6e789e6aa1b965f4u);
  assert_true(mlfab__mix(2 * 0x9e3779b97f4a7c15u) == 0x06c45d188009454fu);
}

/* The first outputs of the reference xoshiro256starstar.c with state 1, 2, 3, 4. */
TEST(test_sequence) {
  static const uint64_t expected[] = {11520u,
                                      0u,
                                      1509978240u,
                                      1215971899390074240u,
                                      1216172134540287360u,
                                      607988272756665600u,
                                      16172922978634559625u,
                                      8476171486693032832u};
  mlfab__rng prng = {{1, 2, 3, 4}}, other;
  for (size_t i = 0; i < MLFAB__COUNT(expected); i++) {
    assert_true(mlfab__rng_next(&prng) == expected[i]);
  }
  mlfab__rng_seed(&prng, 7);
  mlfab__rng_seed(&other, 7);
  assert_true(prng.s[0] == mlfab__mix(7));
  for (int i = 0; i < 100; i++) {
    assert_true(mlfab__rng_next(&prng) == mlfab__rng_next(&other));
  }
  mlfab__rng_seed(&other, 8);
  assert_true(mlfab__rng_next(&prng) != mlfab__rng_next(&other));
}

TEST(test_below) {
  mlfab__rng prng, reference;
  uint32_t counts[7] = {0};
  mlfab__rng_seed(&prng, 1);
  assert_true(mlfab__rng_below(&prng, 0) == 0);
  assert_true(mlfab__rng_below(&prng, 1) == 0);
  for (int i = 0; i < 70000; i++) counts[mlfab__rng_below(&prng, 7)]++;
  for (int i = 0; i < 7; i++) assert_in_range(counts[i], 9500, 10500);
  for (int i = 0; i < 10000; i++) {
    uint64_t bound = mlfab__rng_next(&prng) >> mlfab__rng_below(&prng, 64);
    if (bound > 0) assert_true(mlfab__rng_below(&prng, bound) < bound);
  }
  /* By a power of two the product is a shift, which shows that the high half is right. */
  reference = prng;
  for (int bit = 1; bit < 64; bit++) {
    uint64_t drawn = mlfab__rng_next(&reference);
    assert_true(mlfab__rng_below(&prng, (uint64_t)1 << bit) == drawn >> (64 - bit));
  }
  /* Just above 2^63 nearly half of all draws are biased and must be drawn again. */
  reference = prng;
  for (int i = 0; i < 1000; i++) (void)mlfab__rng_below(&prng, ((uint64_t)1 << 63) + 1);
  for (int i = 0; i < 1400; i++) (void)mlfab__rng_next(&reference);
  for (int i = 0; i < 1200 && memcmp(&prng, &reference, sizeof prng) != 0; i++) {
    (void)mlfab__rng_next(&reference);
  }
  assert_memory_equal(&prng, &reference, sizeof prng);
}

TEST(test_unit) {
  mlfab__rng prng;
  double sum = 0, least = 1, most = 0;
  mlfab__rng_seed(&prng, 3);
  for (int i = 0; i < 100000; i++) {
    double x = mlfab__rng_unit(&prng);
    assert_true(x >= 0 && x < 1);
    sum += x;
    if (x < least) least = x;
    if (x > most) most = x;
  }
  assert_true(sum > 49500 && sum < 50500 && least < 0.001 && most > 0.999);
}

/* --- env --- */

typedef struct hooks {
  int fail, lines;
  size_t live;
  char last[600];
} hooks;

static void *hook_allocate(void *user, size_t bytes) {
  hooks *h = user;
  void *memory = h->fail ? NULL : malloc(bytes);
  if (memory != NULL) {
    memset(memory, 0xa5, bytes);
    h->live += bytes;
  }
  return memory;
}

static void hook_release(void *user, void *memory, size_t bytes) {
  ((hooks *)user)->live -= bytes;
  free(memory);
}

static void hook_log(void *user, int level, const char *line) {
  hooks *h = user;
  (void)level;
  h->lines++;
  snprintf(h->last, sizeof h->last, "%s", line);
}

static mlfab_env hooked(hooks *h) {
  mlfab_env given = {0};
  given.size = sizeof given;
  given.user = h;
  given.allocate = hook_allocate;
  given.release = hook_release;
  given.log = hook_log;
  return given;
}

TEST(test_hash) {
  /* FNV-1a of "a" and "foobar" as published, then the mix. */
  assert_true(mlfab__hash(0, "a", 1) == mlfab__mix(0xaf63dc4c8601ec8cu));
  assert_true(mlfab__hash(0, "foobar", 6) == mlfab__mix(0x85944171f73967e8u));
  assert_true(mlfab__hash(0, NULL, 0) == mlfab__mix(0xcbf29ce484222325u));
  assert_true(mlfab__hash(1, "a", 1) != mlfab__hash(0, "a", 1));
}

TEST(test_env_init) {
  hooks h = {0};
  mlfab__env env;
  mlfab_env given = hooked(&h);
  assert_int_equal(mlfab__env_init(&env, NULL), 0);
  assert_non_null(env.hooks.allocate);
  assert_null(env.hooks.clock);
  assert_int_equal(env.hooks.log_level, MLFAB_LOG_WARN);

  given.release = NULL;
  assert_int_equal(mlfab__env_init(&env, &given), MLFAB_ERR_CONFIG);
  given.size = 0;
  assert_int_equal(mlfab__env_init(&env, &given), MLFAB_ERR_CONFIG);

  /* A caller compiled before there was a log hook has none, whatever bytes follow its struct. */
  given = hooked(&h);
  given.size = offsetof(mlfab_env, log);
  assert_int_equal(mlfab__env_init(&env, &given), 0);
  assert_null(env.hooks.log);
  assert_ptr_equal(env.hooks.allocate, hook_allocate);
  assert_int_equal(env.hooks.size, sizeof env.hooks);
}

TEST(test_env_memory) {
  hooks h = {0};
  mlfab__env env;
  mlfab_env given = hooked(&h);
  unsigned char *memory;
  assert_int_equal(mlfab__env_init(&env, &given), 0);
  assert_null(mlfab__alloc(&env, 0));
  assert_null(mlfab__alloc_aligned(&env, 0));
  assert_null(mlfab__alloc_aligned(&env, SIZE_MAX - 8));
  assert_null(mlfab__alloc_array(&env, SIZE_MAX / 8 + 1, 8));
  assert_int_equal(env.allocations, 0);

  memory = mlfab__alloc_array(&env, 10, 10);
  assert_non_null(memory);
  for (int i = 0; i < 100; i++) assert_int_equal(memory[i], 0);
  assert_int_equal(env.allocations, 1);
  assert_int_equal(env.bytes, 100);
  mlfab__free(&env, memory, 100);
  mlfab__free(&env, NULL, 100);
  mlfab__free_aligned(&env, NULL, 100);
  assert_int_equal(env.bytes, 0);

  for (size_t bytes = 1; bytes < 300; bytes++) {
    memory = mlfab__alloc_aligned(&env, bytes);
    assert_non_null(memory);
    assert_int_equal((uintptr_t)memory % 64, 0);
    memset(memory, 1, bytes);
    mlfab__free_aligned(&env, memory, bytes);
  }
  assert_int_equal(env.bytes, 0);
  assert_int_equal(h.live, 0);

  h.fail = 1;
  assert_null(mlfab__alloc(&env, 8));
  assert_null(mlfab__alloc_aligned(&env, 8));
  assert_int_equal(env.bytes, 0);
  assert_int_equal(env.allocations, 302);
}

TEST(test_env_texts) {
  hooks h = {0};
  mlfab__env env;
  mlfab_env given = hooked(&h);
  mlfab_error error;
  char long_text[1000], buffer[24];
  assert_int_equal(mlfab__env_init(&env, &given), 0);
  memset(long_text, 'x', sizeof long_text - 1);
  long_text[sizeof long_text - 1] = 0;
  mlfab__log(&env, MLFAB_LOG_WARN, "rank %d of %s", 3, "job");
  assert_string_equal(h.last, "rank 3 of job");
  mlfab__log(&env, MLFAB_LOG_INFO, "not wanted");
  assert_int_equal(h.lines, 1);
  mlfab__log(&env, MLFAB_LOG_ERROR, "%s", long_text);
  assert_int_equal(strlen(h.last), 511);
  env.hooks.log = NULL;
  mlfab__log(&env, MLFAB_LOG_ERROR, "nobody listens");

  assert_int_equal(mlfab__error(NULL, MLFAB_ERR_IO, 0, 0, 0, "unheard"), MLFAB_ERR_IO);
  assert_int_equal(mlfab__error(&error, MLFAB_ERR_TIMEOUT, 5, 1, 9, "%s", long_text),
                   MLFAB_ERR_TIMEOUT);
  assert_int_equal(error.code, MLFAB_ERR_TIMEOUT);
  assert_int_equal(error.rank, 5);
  assert_int_equal(error.is_server, 1);
  assert_int_equal(error.waited_ns, 9);
  assert_int_equal(strlen(error.text), sizeof error.text - 1);

  assert_string_equal(mlfab_error_name(MLFAB_ERR_TIMEOUT), "MLFAB_ERR_TIMEOUT");
  assert_string_equal(mlfab_error_text(MLFAB_ERR_TIMEOUT), "the deadline passed");
  assert_string_equal(mlfab_error_name(0), "MLFAB_OK");
  assert_string_equal(mlfab_error_name(-999), "MLFAB_ERR_UNKNOWN");
  assert_non_null(mlfab_error_text(12345));
  assert_string_equal(mlfab_version(), MLFAB_VERSION);

  assert_string_equal(mlfab__duration(buffer, 0), "0 ns");
  assert_string_equal(mlfab__duration(buffer, 999), "999 ns");
  assert_string_equal(mlfab__duration(buffer, 1500), "1.5 us");
  assert_string_equal(mlfab__duration(buffer, 350000000u), "350 ms");
  assert_string_equal(mlfab__duration(buffer, 999999999u), "999 ms");
  assert_string_equal(mlfab__duration(buffer, 2500000000u), "2.5 s");
  assert_string_equal(mlfab__duration(buffer, 300000000000u), "300 s");
  assert_string_equal(mlfab__duration(buffer, UINT64_MAX), "18446744073 s");
}

/* Texts that are made of others begin with the same words once. */
TEST(test_words_once) {
  mlfab_error error;
  assert_int_equal(MLFAB__FAIL(&error, MLFAB_ERR_STATE, "push: %s", "push: push: no model"),
                   MLFAB_ERR_STATE);
  assert_string_equal(error.text, "push: no model");
  (void)MLFAB__FAIL(&error, MLFAB_ERR_STATE, "push: %s", "a pull: a pull");
  assert_string_equal(error.text, "push: a pull: a pull");
  (void)MLFAB__FAIL(&error, MLFAB_ERR_STATE, "%s", ": : x");
  assert_string_equal(error.text, ": x");
}

TESTS(NULL, NULL)
