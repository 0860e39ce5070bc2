/* seeds.h - the seeds that a random test runs (seeds_run), and how one of them fails (wrong).
 *
 * MLFAB_SEED=n runs seed n alone. MLFAB_SEED_FIRST=n begins the range of seeds at n; each lane of the Makefile has a range
 * of its own. Without either, the range begins at 1, and the test's seeds of seeds.txt run before it: all of them, at any
 * scale. Each of those failed once. */
#ifndef SEEDS_H
#define SEEDS_H

#include "../testing.h"

/* The seed that runs, or the one that has failed; 0: none. */
static struct {
  uint64_t seed;
  int again; /* it runs twice */
  const char *file;
  char about[160];
} seeds_now;

static inline uint64_t seeds_first(void) { return test_number("MLFAB_SEED_FIRST", 1); }

/* Does one seed run alone? Then the test tells what happens. */
static inline int seeds_alone(void) { return test_seed() != 0; }

/* Does the seed that ran have to run again, with the same trace? It tells nothing then. */
static inline int seeds_again(void) {
  int again = seeds_now.again;
  seeds_now.again = 0;
  return again;
}

/* The program's ("faults") next seed in seeds.txt: 1, or 0 behind the last. */
static inline int seeds_next(FILE *file, const char *program, uint64_t *seed_p) {
  char line[160], name[32];
  unsigned long long seed;
  while (fgets(line, sizeof line, file)) {
    if (sscanf(line, "%31[a-z] %llu", name, &seed) != 2 || strcmp(name, program) != 0) continue;
    *seed_p = seed;
    return 1;
  }
  return 0;
}

static inline FILE *seeds_open(void) { return fopen("tests/sim/seeds.txt", "r"); }

/* Tells how to repeat the seed that has failed. */
static inline void seeds_tell(void) {
  const char *devices = getenv("MLFAB_PLAYED");
  if (seeds_now.seed == 0) return;
  fprintf(stderr, "# seed %llu%s has failed; again: %sMLFAB_SEED=%llu build/%.*s\n",
          (unsigned long long)seeds_now.seed, seeds_now.about,
          devices && *devices ? "MLFAB_PLAYED=1 " : "", (unsigned long long)seeds_now.seed,
          (int)strcspn(seeds_now.file, "."), seeds_now.file);
  seeds_now.seed = 0;
}

static inline void seeds_one(uint64_t seed, int again, void (*one)(uint64_t seed)) {
  seeds_now.seed = seed;
  seeds_now.again = again;
  seeds_now.about[0] = 0;
  one(seed);
  seeds_now.seed = 0;
}

static inline void seeds_run_of(const char *file, const char *name, uint64_t count,
                                void (*one)(uint64_t seed)) {
  uint64_t alone = test_seed(), first = test_number("MLFAB_SEED_FIRST", 0), seed;
  static int begun;
  if (!begun++) (void)atexit(seeds_tell);
  seeds_tell();
  seeds_now.file = file;
  if (alone) {
    seeds_one(alone, 1, one);
    return;
  }
  FILE *list = first ? NULL : seeds_open();
  while (list && seeds_next(list, name, &seed)) seeds_one(seed, 1, one);
  if (list) fclose(list);
  for (uint64_t i = 0; i < count; i++) seeds_one((first ? first : 1) + i, i % 10 == 0, one);
}

/* Calls `one`, which ends the test when it fails, with each seed of the test `name`. */
#define seeds_run(name, count, one) seeds_run_of(__FILE__, name, count, one)

/* Runs a seed, and again if it is its turn: `run` must return the same hash of all that happened. */
static inline void seeds_same(uint64_t seed, uint64_t (*run)(uint64_t seed)) {
  uint64_t hash = run(seed);
  if (seeds_again() && run(seed) != hash) fail_msg("it ran otherwise the second time");
}

/* Says of the seed that runs what its failure should tell. */
static inline void seeds_about(const char *format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(seeds_now.about, sizeof seeds_now.about, format, list);
  va_end(list);
}

/* Ends the test, which has failed. */
static inline void wrong(const char *format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  fail_msg("%s", text);
}

#endif
