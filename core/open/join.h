/* join.h - opens a context of a process that has no number (config.join). */
#ifndef MLFAB__JOIN_H
#define MLFAB__JOIN_H

#include "../api/context.h"

/* Steps of open.c. key: finds the key. wait: opens, and waits until the fabric is complete (`ask`: or until server 0
 * has told a number). forget: wipes the key. */
typedef struct mlfab__open_steps {
  int (*key)(mlfab_config *config, mlfab_error *error);
  int (*wait)(const mlfab_config *config, int ask, mlfab **ctx_p, mlfab_error *error_p);
  void (*forget)(mlfab_config *config);
} mlfab__open_steps;

/* Asks server 0 for a number, and opens with it. If another process has taken the number in between, asks again. */
MLFAB__INTERNAL int mlfab__open_join(const mlfab_config *config, const mlfab__open_steps *steps,
                                     mlfab **ctx_p, mlfab_error *error_p);

#endif
