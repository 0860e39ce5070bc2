/* rule.h - update rules: what a committed sum does to the weights. Layer 2, pure functions.
 *
 * Source: MLfabric §2 eq. (2) (momentum), §3.1 and §10.4 eq. (21) (delay-adaptive step, 1/alpha
 * = c' sqrt(t + tau)); Adam (Kingma and Ba 2015, Alg. 1); AdamW (Loshchilov and Hutter 2019,
 * Alg. 2). */
#ifndef MLFAB__RULE_H
#define MLFAB__RULE_H

#include "base.h"

typedef struct mlfab__rule {
  uint32_t kind;                                                 /* MLFAB_RULE_* */
  double gamma, adadelay_c, beta1, beta2, epsilon, weight_decay; /* defaults filled in */
} mlfab__rule;

/* What a commit tells its rule. */
typedef struct mlfab__rule_step {
  double scale;   /* of u */
  uint64_t t;     /* number of this commit, from 1 */
  uint64_t delay; /* tau */
} mlfab__rule_step;

/* Fills defaults for members that are zero and checks all of them, whatever the kind: CONFIG with a
 * text that names the member (gamma or a beta outside [0, 1); c, epsilon or weight_decay not
 * positive; any not finite), UNSUPPORTED (unknown kind). options NULL: all defaults, PLAIN. *rule
 * is set on success only. */
MLFAB__INTERNAL int mlfab__rule_init(mlfab__rule *rule, const mlfab_model_options *options,
                                     mlfab_error *error);
/* State arrays of the size of the weights: 0, 1 (momentum) or 2 (Adam). Zero at first. */
MLFAB__INTERNAL uint32_t mlfab__rule_states(uint32_t kind);
/* 1 when the step is linear in u, so that scale may be folded into sums of u. */
MLFAB__INTERNAL int mlfab__rule_linear(uint32_t kind);
/* dst = what the rule makes of w, for n elements; s0 and s1 are its state, updated in place. dst
 * may be w or u; states overlap nothing. I64: PLAIN only (the caller checks). Cutting the n
 * elements anywhere into several calls gives the same bits. */
MLFAB__INTERNAL void mlfab__rule_apply(const mlfab__rule *rule, const mlfab__rule_step *step,
                                       int dtype, void *dst, const void *w, const void *u, void *s0,
                                       void *s1, uint64_t n);
MLFAB__INTERNAL const char *mlfab__rule_name(uint32_t kind);

#endif
