/* test_windows.c - core/model/windows.c against a literal list of decisions. */
#include "core/model/windows.h"
#include "core/base/rng.h"

#include "../testing.h"

enum { HISTORY = 8192 };

/* The window's expected contents, from a full history: verdict[seq] is a decision. */
static enum mlfab__decision literal(const uint8_t *verdict, uint64_t top, uint64_t last) {
  if (last > top) return MLFAB__UNDECIDED;
  if (top - last >= MLFAB__WINDOW) return MLFAB__NOT_APPLIED;
  return (enum mlfab__decision)verdict[last];
}

static void compare(const mlfab__window *window, const uint8_t *verdict, uint64_t top) {
  uint64_t from = top > 300 ? top - 300 : 1;
  assert_int_equal(window->top, top);
  for (uint64_t seq = from; seq < top + 5; seq++)
    assert_int_equal(mlfab__windows_ask(window, seq, 1), literal(verdict, top, seq));
}

/* Numbers that skip by a little, a lot, exactly a word and exactly the window; merged updates. */
TEST(test_random) {
  static const uint64_t jumps[] = {1, 1, 1, 1, 2, 3, 63, 64, 65, 127, 128, 255, 256, 257, 300};
  for (uint64_t seed = 1; seed <= 60; seed++) {
    mlfab__rng prng;
    mlfab__window window = {0, {0, 0, 0, 0}, {0, 0, 0, 0}, 0, 1};
    uint8_t *verdict = (uint8_t *)calloc(HISTORY, 1);
    uint64_t top = 0;
    assert_non_null(verdict);
    mlfab__rng_seed(&prng, seed);
    while (top + 600 < HISTORY) {
      uint64_t jump = jumps[mlfab__rng_below(&prng, seed % 2 ? 6 : 15)];
      uint32_t members =
          (uint32_t)(mlfab__rng_below(&prng, 3) ? 1 : 1 + mlfab__rng_below(&prng, 128));
      static const struct {
        int code;
        enum mlfab__decision decision;
      } ends[] = {{0, MLFAB__APPLIED},
                  {0, MLFAB__APPLIED},
                  {MLFAB_ERR_DROPPED, MLFAB__DROPPED},
                  {MLFAB_ERR_NOT_FINITE, MLFAB__NOT_APPLIED}};
      uint64_t end = mlfab__rng_below(&prng, 4);
      uint64_t first = top + jump;
      for (uint64_t i = top + 1; i < first; i++) verdict[i] = MLFAB__NOT_APPLIED; /* skipped */
      for (uint32_t i = 0; i < members; i++) verdict[first + i] = (uint8_t)ends[end].decision;
      top = first + members - 1;
      mlfab__windows_decide(&window, first, members, ends[end].code);
      compare(&window, verdict, top);
      assert_int_equal(mlfab__windows_ask(&window, first, members), ends[end].decision);
    }
    free(verdict);
  }
}

/* The oldest number that is remembered, and the one before it. */
TEST(test_edges) {
  mlfab__window window = {0, {0, 0, 0, 0}, {0, 0, 0, 0}, 0, 1};
  assert_int_equal(mlfab__windows_ask(&window, 1, 1), MLFAB__UNDECIDED);
  mlfab__windows_decide(&window, 1, 1, 0);
  assert_int_equal(mlfab__windows_ask(&window, 1, 1), MLFAB__APPLIED);
  mlfab__windows_decide(&window, MLFAB__WINDOW, 1, MLFAB_ERR_WITHDRAWN);
  assert_int_equal(mlfab__windows_ask(&window, 1, 1), MLFAB__APPLIED);
  mlfab__windows_decide(&window, MLFAB__WINDOW + 1, 1, 0);
  /* Forgotten: older numbers must not be applied again. */
  assert_int_equal(mlfab__windows_ask(&window, 1, 1), MLFAB__NOT_APPLIED);
  assert_int_equal(mlfab__windows_ask(&window, MLFAB__WINDOW, 1), MLFAB__NOT_APPLIED);
  assert_int_equal(mlfab__windows_ask(&window, MLFAB__WINDOW + 1, 1), MLFAB__APPLIED);
  mlfab__windows_decide(&window, 1000, 1000, 0); /* more members than the window */
  for (uint64_t seq = 1999; seq > 1999 - MLFAB__WINDOW; seq--)
    assert_int_equal(mlfab__windows_ask(&window, seq, 1), MLFAB__APPLIED);
  assert_int_equal(mlfab__windows_ask(&window, 1999 - MLFAB__WINDOW, 1), MLFAB__NOT_APPLIED);
}

TEST(test_incarnations) {
  mlfab__env env;
  mlfab__windows windows;
  mlfab__env_init(&env, NULL);
  assert_int_equal(mlfab__windows_init(&env, &windows, 2), 0);
  assert_int_equal(mlfab__windows_admit(&windows, 1, 3), 0);
  mlfab__windows_decide(&windows.windows[1], 5, 1, 0);
  assert_int_equal(mlfab__windows_admit(&windows, 1, 3), 0); /* repeated: nothing is forgotten */
  assert_int_equal(mlfab__windows_ask(&windows.windows[1], 5, 1), MLFAB__APPLIED);
  assert_int_equal(mlfab__windows_admit(&windows, 1, 2), MLFAB_ERR_FENCED);
  assert_int_equal(mlfab__windows_ask(&windows.windows[1], 5, 1), MLFAB__APPLIED);
  assert_int_equal(mlfab__windows_admit(&windows, 1, 9), 0);
  assert_int_equal(mlfab__windows_ask(&windows.windows[1], 5, 1), MLFAB__UNDECIDED);
  assert_int_equal(mlfab__windows_admit(&windows, 1, 3), MLFAB_ERR_FENCED);
  assert_int_equal(windows.windows[0].incarnation, 0);
  mlfab__windows_free(&env, &windows);
  assert_int_equal(env.bytes, 0);
}

TESTS(NULL, NULL)
