/* typed.h - units and names as people type them, in settings and in options of the tools. */
#ifndef MLFAB__TYPED_H
#define MLFAB__TYPED_H

#include "base.h"

typedef struct mlfab__word {
  const char *word; /* NULL: the end of the list */
  uint64_t value;
} mlfab__word;

/* Units of time, in ns. */
static const mlfab__word mlfab__times[] = {
    {"ns", 1},         {"us", 1000},          {"ms", 1000000},
    {"s", 1000000000}, {"min", 60000000000u}, {"h", 3600000000000u},
    {NULL, 0}};
#define MLFAB__TIMES "ns, us, ms, s, min, h"

/* By how much to multiply a number that this unit follows; `bare` without a unit; 0: not a unit of the list. */
static inline double mlfab__unit_of(const char *text, const mlfab__word *units, double bare) {
  if (!*text) return bare;
  while (units->word && strcmp(text, units->word) != 0) units++;
  return (double)units->value;
}

/* The number of changed, missing and added characters (Levenshtein) between two names of at most 31, if `typed` may be a
 * misspelling of `name`; else UINT32_MAX. */
static inline uint32_t mlfab__misspelt(const char *typed, const char *name) {
  uint32_t row[32], bytes = (uint32_t)strlen(name);
  uint64_t most = mlfab__max(1, mlfab__min(3, strlen(typed) / 3));
  if (strlen(typed) > 31 || bytes > 31) return UINT32_MAX;
  for (uint32_t k = 0; k <= bytes; k++) row[k] = k;
  for (uint32_t i = 0; typed[i]; i++) {
    uint32_t corner = row[0];
    row[0] = i + 1;
    for (uint32_t k = 0; k < bytes; k++) {
      uint32_t changed = corner + (typed[i] != name[k]);
      corner = row[k + 1];
      row[k + 1] = (uint32_t)mlfab__min(changed, 1 + mlfab__min(corner, row[k]));
    }
  }
  return row[bytes] <= most ? row[bytes] : UINT32_MAX;
}

#endif
