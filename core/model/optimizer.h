/* optimizer.h - applies a committed sum to the weights. Pure functions.
 *
 * Source: MLfabric §2 eq. (2) (momentum), §3.1 and §10.4 eq. (21) (delay-adaptive step, 1/alpha = c' sqrt(t
 * + tau)); Adam (Kingma and Ba 2015, Alg. 1); decoupled decay (Loshchilov and Hutter 2019). */
#ifndef MLFAB__OPTIMIZER_H
#define MLFAB__OPTIMIZER_H

#include "../base/base.h"
#include "options.h"

/* Members that the optimizer does not use keep the values of MLFAB_MODEL_OPTIONS_INIT. */
typedef struct mlfab__optimizer {
  uint32_t kind; /* MLFAB_OPTIMIZER_* */
  double gamma, adadelay_c, beta1, beta2, epsilon, weight_decay;
} mlfab__optimizer;

/* Parameters of one commit. */
typedef struct mlfab__optimizer_step {
  double scale;   /* of u */
  uint64_t t;     /* number of this commit, from 1 */
  uint64_t delay; /* tau */
} mlfab__optimizer_step;

/* Checks the options. Errors: CONFIG with a text that names the member (gamma or a beta outside [0, 1); adadelay_c of
 * ADADELAY, or epsilon of any kind but SGD, not positive; weight_decay negative; NaN or infinity), UNSUPPORTED (unknown
 * kind). options NULL: the initial values. Sets *optimizer on success only. */
MLFAB__INTERNAL int mlfab__optimizer_init(mlfab__optimizer *optimizer,
                                          const mlfab_model_options *options, mlfab_error *error);
/* Number of state arrays of the weights' size: 0, 1 or 2 (Adam). They begin with zeros. */
MLFAB__INTERNAL uint32_t mlfab__optimizer_states(uint32_t kind);
/* Returns 1 if the step is linear in u and does not decay w: the scale may be folded into sums of u. */
MLFAB__INTERNAL int mlfab__optimizer_linear(const mlfab__optimizer *optimizer);
/* Returns 1 if the step only adds scale * u. */
MLFAB__INTERNAL int mlfab__optimizer_adds(const mlfab__optimizer *optimizer);
/* dst = the step applied to w, for n elements; updates the states s0 and s1 in place. dst may be w or u; the states
 * overlap no other array. I64: only if mlfab__optimizer_adds (the caller checks). Splitting the n elements into several
 * calls gives the same bits. */
MLFAB__INTERNAL void mlfab__optimizer_apply(const mlfab__optimizer *optimizer,
                                            const mlfab__optimizer_step *step, int dtype, void *dst,
                                            const void *w, const void *u, void *s0, void *s1,
                                            uint64_t n);

#endif
