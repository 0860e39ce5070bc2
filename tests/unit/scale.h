/* scale.h - numbers that the environment gives to tests of all folders. MLFAB_SEED=7 runs one seed. MLFAB_SCALE is the
 * length of the long tests: it multiplies their usual number of cases (1, the default; 100 in `make soak`; 0.1 where everything is slow). A test runs at least one case. Where
 * a test asserts that it saw something rare, it does so only from scale 1 upwards. */
#ifndef MLFAB_TEST_SCALE_H
#define MLFAB_TEST_SCALE_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* The number in this variable, or `otherwise` if it is empty. Ends the program if it is no number from 1 on. */
static inline uint64_t test_number(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  char *end;
  if (!text || !*text) return otherwise;
  errno = 0;
  unsigned long long n = strtoull(text, &end, 10);
  if (errno || *end || n < 1 || n > INT64_MAX || *text < '0' || *text > '9') {
    fprintf(stderr, "%s=%s: a number from 1 on is wanted\n", name, text);
    exit(2);
  }
  return n;
}
/* The seed that runs alone; 0: all of them run. */
static inline uint64_t test_seed(void) { return test_number("MLFAB_SEED", 0); }

/* The value of MLFAB_SCALE. Ends the program when it is not a number above 0. */
static inline double test_scale(void) {
  const char *text = getenv("MLFAB_SCALE");
  char *end;
  if (!text || !*text) return 1.0;
  double scale = strtod(text, &end);
  if (*end || !(scale > 0.0) || scale > 1e6) {
    fprintf(stderr, "MLFAB_SCALE=%s: a number above 0 is wanted\n", text);
    exit(2);
  }
  return scale;
}

/* How many cases to run of a test that usually runs `usual`: at least `least`, and at least one. */
static inline uint64_t test_cases_from(uint64_t least, double usual) {
  uint64_t cases = (uint64_t)(usual * test_scale());
  return cases > least ? cases : least > 1 ? least : 1;
}
static inline uint64_t test_cases(double usual) { return test_cases_from(1, usual); }
/* As many as test_cases_from(least, usual), but up to scale 1 at most `few`: fewer find all planted bugs. */
static inline uint64_t test_cases_few(uint64_t least, uint64_t few, double usual) {
  uint64_t cases = test_cases_from(least, usual);
  return test_scale() <= 1.0 && cases > few ? few : cases;
}

#endif
