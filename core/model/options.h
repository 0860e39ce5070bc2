/* options.h - names of the kinds of optimizers and of consistency. */
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

/* The name, for instance "adam" and "ssp"; "unknown" for an invalid kind. */
MLFAB__INTERNAL const char *mlfab__optimizer_name(uint32_t kind);
MLFAB__INTERNAL const char *mlfab__sync_name(uint32_t kind);

#endif
