/* seeds.h - the seeds that a simulation runs: MLFAB_SEED=n runs one alone. Otherwise the seeds that seeds.txt lists for
 * the program (each failed once), then the usual number from 1 on. Each other lane and variant has a range of its own, which
 * begins with MLFAB_SEED_FIRST, and leaves seeds.txt to the plain tests. */
#ifndef SEEDS_H
#define SEEDS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline uint64_t seeds_number(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  char *end;
  if (!text || !*text) return otherwise;
  uint64_t number = strtoull(text, &end, 10);
  if (*end || number == 0 || *text == '-') {
    fprintf(stderr, "%s=%s: a seed is a number from 1 on\n", name, text);
    exit(2);
  }
  return number;
}

static inline uint64_t seeds_first(void) { return seeds_number("MLFAB_SEED_FIRST", 1); }

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

/* NULL: seeds.txt is for another variant. */
static inline FILE *seeds_open(void) {
  return seeds_number("MLFAB_SEED_FIRST", 0) ? NULL : fopen("tests/sim/seeds.txt", "r");
}

/* Calls `one` with each seed; `one` ends the test when it fails. */
static inline void seeds_run(const char *program, uint64_t count, void (*one)(uint64_t seed)) {
  uint64_t seed = seeds_number("MLFAB_SEED", 0), first = seeds_first();
  FILE *file = seed ? NULL : seeds_open();
  if (seed) one(seed);
  while (file && seeds_next(file, program, &seed)) one(seed);
  if (file) fclose(file);
  for (uint64_t i = 0; i < count && !getenv("MLFAB_SEED"); i++) one(first + i);
}

#endif
