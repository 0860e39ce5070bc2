/* scale.h - how long the long tests are, for all folders of tests: MLFAB_SCALE multiplies what they usually
 * run (1, the default; 100 in `make soak`; 0.1 where everything is slow). A test runs one case at
 * least; what it claims to have seen of something that is rare, it claims from 1 upwards. */
#ifndef MLFAB_TEST_SCALE_H
#define MLFAB_TEST_SCALE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* What MLFAB_SCALE says. The program ends when that is no number above 0. */
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

/* How many cases to run of what is usually `usual`: `least`, and one, at least. */
static inline uint64_t test_cases_from(uint64_t least, double usual) {
  uint64_t cases = (uint64_t)(usual * test_scale());
  return cases > least ? cases : least > 1 ? least : 1;
}
static inline uint64_t test_cases(double usual) { return test_cases_from(1, usual); }

#endif
