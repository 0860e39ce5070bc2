/* complete.h - completing a configuration, and the options of a schedule. */
#ifndef MLFAB__COMPLETE_H
#define MLFAB__COMPLETE_H

#include "../base/base.h"

/* Copies a configuration, fills in its defaults, refuses contradictions. Errors: CONFIG, ARGUMENT, RANK_RANGE. */
MLFAB__INTERNAL int mlfab__config_complete(const mlfab_config *given, mlfab_config *config,
                                           mlfab_error *error);
/* The name of a setting that `name` is a misspelling or a member's name of; NULL when none is near. */
MLFAB__INTERNAL const char *mlfab__config_nearest(const char *name);
/* The next of these variables, from *at_p on, that begins with MLFAB_, that nothing reads, and that is nearly a setting's:
 * 1, and a text that names it and the nearest name; or 0. Values are not shown. */
MLFAB__INTERNAL int mlfab__config_stray(char *const *variables, uint32_t *at_p, char *text,
                                        size_t room);
/* For a configuration that is all from the environment: CONFIG, with the variable, when MLFAB_WORKERS says that there are
 * several ranks and nothing says which one this is, or when a launcher has started several workers and nobody has said
 * where they meet. */
MLFAB__INTERNAL int mlfab__config_has_address(const mlfab_config *config, mlfab_error *error);

#endif
