/* options.h - the lists of optimizers and of consistency models. */
#ifndef MLFAB__OPTIONS_H
#define MLFAB__OPTIONS_H

#include "../base/base.h"

/* Members that change an optimizer's step, beside its kind and weight_decay. */
enum { MLFAB__USES_GAMMA = 1, MLFAB__USES_C = 2, MLFAB__USES_BETA1 = 4 };
enum { MLFAB__USES_BETA2 = 8, MLFAB__USES_EPSILON = 16 };

/* The optimizers, in the order of MLFAB_OPTIMIZER_*: the constant's end; the name of the setting and of the function in
 * optimizer.c; the number of state arrays; 1 if the step is linear in the update; the members that it uses. */
#define MLFAB__OPTIMIZERS(ROW)                                                       \
  ROW(SGD, sgd, 0, 1, 0)                                                             \
  ROW(MOMENTUM, momentum, 1, 1, MLFAB__USES_GAMMA)                                   \
  ROW(ADADELAY, adadelay, 0, 1, MLFAB__USES_C)                                       \
  ROW(ADAM, adam, 2, 0, MLFAB__USES_BETA1 | MLFAB__USES_BETA2 | MLFAB__USES_EPSILON) \
  ROW(RMSPROP, rmsprop, 1, 0, MLFAB__USES_BETA2 | MLFAB__USES_EPSILON)               \
  ROW(ADAGRAD, adagrad, 1, 0, MLFAB__USES_EPSILON)                                   \
  ROW(NESTEROV, nesterov, 1, 1, MLFAB__USES_GAMMA)                                   \
  ROW(LION, lion, 1, 0, MLFAB__USES_BETA1 | MLFAB__USES_BETA2)

/* Consistency, in the order of MLFAB_SYNC_*: the constant's end; the name of the setting; members and rules (sync.h). */
#define MLFAB__SYNCS(ROW)                                                                      \
  ROW(ASYNC, async, 0)                                                                         \
  ROW(BSP, bsp, MLFAB__SYNC_SOFT | MLFAB__SYNC_ROUNDS)                                         \
  ROW(SSP, ssp, MLFAB__SYNC_STALE)                                                             \
  ROW(DSPS, dsps, MLFAB__SYNC_STALE | MLFAB__SYNC_MAX)                                         \
  ROW(DROP, drop, MLFAB__SYNC_SOFT | MLFAB__SYNC_ROUNDS | MLFAB__SYNC_NEED | MLFAB__SYNC_LATE) \
  ROW(PSSP, pssp, MLFAB__SYNC_STALE | MLFAB__SYNC_DRAWS | MLFAB__SYNC_CHANCE)                  \
  ROW(PSSP_DYNAMIC, pssp_dynamic, MLFAB__SYNC_STALE | MLFAB__SYNC_DRAWS | MLFAB__SYNC_ALPHA)   \
  ROW(USER, user, MLFAB__SYNC_SOFT | MLFAB__SYNC_WATCHES)

#endif
