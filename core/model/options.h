/* options.h - names of the kinds of optimizers and of consistency. Layer 3. */
#ifndef MLFAB__OPTIONS_H
#define MLFAB__OPTIONS_H

#include "../base/base.h"

/* Members of mlfab_model_options that change an optimizer's step, beside its kind and weight_decay. */
#define MLFAB__USES_GAMMA 1u
#define MLFAB__USES_C 2u
#define MLFAB__USES_BETA1 4u
#define MLFAB__USES_BETA2 8u
#define MLFAB__USES_EPSILON 16u

/* The optimizers, in the order of MLFAB_OPTIMIZER_*. A row has: the end of the constant's name; the setting's name,
 * which is also that of the function in optimizer.c; the number of its state arrays; 1 if its step is linear in the
 * update; and the members that it uses. */
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
