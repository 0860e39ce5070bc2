/* testing.h - the part that all tests share: tests that enter themselves into the program's list, and seeds.
 *
 * TEST(name) { ... } defines a test. TEST_WITH(name, begin, end) has functions of cmocka's before and after it.
 * The program ends with TESTS(begin, end), which are cmocka's functions around the whole of it, or NULL. Words
 * given to the program choose the tests with one of them in their names. */
#ifndef MLFAB_TESTING_H
#define MLFAB_TESTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "unit/scale.h"

#define TESTING_UNUSED __attribute__((unused))

static struct {
  struct CMUnitTest all[128];
  size_t count;
  int some; /* not all of them are run */
} TESTING;

TESTING_UNUSED static void testing_add(const char *name, CMUnitTestFunction run,
                                       CMFixtureFunction begin, CMFixtureFunction end) {
  if (TESTING.count == sizeof TESTING.all / sizeof TESTING.all[0]) abort();
  TESTING.all[TESTING.count++] = (struct CMUnitTest){name, run, begin, end, NULL};
}

/* The order is that of the file. */
#define TEST_WITH(name, begin, end)                               \
  static void name(void **);                                      \
  __attribute__((constructor)) static void name##_is_here(void) { \
    testing_add(#name, name, begin, end);                         \
  }                                                               \
  static void name(void **testing_state TESTING_UNUSED)
#define TEST(name) TEST_WITH(name, NULL, NULL)
/* A test once more, with other functions around it. */
#define TEST_AGAIN(name, begin, end)                            \
  __attribute__((constructor)) static void name##_again(void) { \
    testing_add(#name " again", name, begin, end);              \
  }                                                             \
  static void name(void **)

/* How many of the tests failed. */
TESTING_UNUSED static int testing_run(int words, char **word, CMFixtureFunction begin,
                                      CMFixtureFunction end) {
  size_t chosen = words ? 0 : TESTING.count;
  TESTING.some = words > 0;
  for (size_t i = 0; words && i < TESTING.count; i++) {
    int w = 0;
    while (w < words && !strstr(TESTING.all[i].name, word[w])) w++;
    if (w < words) TESTING.all[chosen++] = TESTING.all[i];
  }
  if (!chosen) fprintf(stderr, "no test of this program has such a name\n");
  return chosen ? _cmocka_run_group_tests("tests", TESTING.all, chosen, begin, end) : 2;
}

#define TESTS(begin, end) \
  int main(int argc, char **argv) { return testing_run(argc - 1, argv + 1, begin, end); }

/* for (SEEDS(seed, usual)): as many seeds, from 1 on, as MLFAB_SCALE makes of `usual`, or over the one of MLFAB_SEED. */
#define SEEDS(seed, usual)                                       \
  uint64_t seed = test_number("MLFAB_SEED", 1),                  \
           last_##seed = test_seed() ? seed : test_cases(usual); \
  seed <= last_##seed;                                           \
  seed++

/* Are all tests of the program run, with at least the usual number of seeds? Then rare events must have been seen. */
TESTING_UNUSED static int testing_whole(void) {
  return !test_seed() && !TESTING.some && test_scale() >= 1.0;
}

#endif
