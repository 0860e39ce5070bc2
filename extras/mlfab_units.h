/* mlfab_units.h - sizes and times as people type them, in variables of the extras; the sizes also in options of
 * the tools. Internal: not installed. */
#ifndef MLFAB_UNITS_H
#define MLFAB_UNITS_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct mlfab__unit {
  const char *name; /* NULL: the end of the list */
  uint64_t is;
} mlfab__unit;

#define MLFAB__SIZE_UNITS                                                               \
  {                                                                                     \
    {"", 1}, {"B", 1}, {"kB", 1000}, {"KB", 1000}, {"MB", 1000000}, {"GB", 1000000000}, \
        {"TB", 1000000000000}, {"KiB", 1024}, {"MiB", (uint64_t)1 << 20},               \
        {"GiB", (uint64_t)1 << 30}, {"TiB", (uint64_t)1 << 40}, {                       \
      NULL, 0                                                                           \
    }                                                                                   \
  }

/* Reads a whole number and its unit. Returns 0, or -1 for another text or a value above 64 bits: *value_p stays. */
static inline int mlfab__units_read(const char *text, const mlfab__unit *unit, uint64_t *value_p) {
  char *end = NULL;
  errno = 0;
  unsigned long long value = strtoull(text, &end, 10);
  while (unit->name && strcmp(end, unit->name) != 0) unit++;
  if (text[0] < '0' || text[0] > '9' || errno || !unit->name || value > UINT64_MAX / unit->is)
    return -1;
  *value_p = value * unit->is;
  return 0;
}

#endif
