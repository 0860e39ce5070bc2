/* complete.h - completing a configuration, and the options of a schedule. */
#ifndef MLFAB__COMPLETE_H
#define MLFAB__COMPLETE_H

#include "../base/base.h"

/* Copies a configuration, fills in its defaults, refuses contradictions. Errors: CONFIG, ARGUMENT, RANK_RANGE. */
MLFAB__INTERNAL int mlfab__config_complete(const mlfab_config *given, mlfab_config *config,
                                           mlfab_error *error);
/* For a configuration that is all from the environment: CONFIG, with the launcher's variable, when a launcher has started
 * several workers and nobody has said where they meet. */
MLFAB__INTERNAL int mlfab__config_has_address(const mlfab_config *config, mlfab_error *error);
/* The schedule with its defaults. Errors: CONFIG or ARGUMENT (delay_bound 0), with what is
 * wrong. */
MLFAB__INTERNAL int mlfab__schedule_complete(const mlfab_schedule *given, mlfab_schedule *schedule,
                                             mlfab_error *error);

#endif
