/* complete.h - completing a configuration, and the options of a schedule. */
#ifndef MLFAB__COMPLETE_H
#define MLFAB__COMPLETE_H

#include "../base/base.h"

/* Copies a configuration, fills in its defaults, refuses contradictions. Errors: CONFIG, ARGUMENT, RANK_RANGE. */
MLFAB__INTERNAL int mlfab__config_complete(const mlfab_config *given, mlfab_config *config,
                                           mlfab_error *error);
/* Sets members that are 0 to the defaults of their settings. Returns the fault of a text, or NULL. */
MLFAB__INTERNAL const char *mlfab__config_members(mlfab_config *config);
/* Returns the setting of which `name` is a misspelling, or which sets the member `name`; NULL if there is none near. */
MLFAB__INTERNAL const char *mlfab__config_nearest(const char *name);
/* Finds the next variable, from *at_p on, that begins with MLFAB_, that no code reads, and that resembles a setting.
 * Returns 1, and a text with its name and the nearest name; or 0. Values are not shown. */
MLFAB__INTERNAL int mlfab__config_stray(char *const *variables, uint32_t *at_p, char *text,
                                        size_t room);
/* Checks a configuration that comes from the environment alone. Errors: CONFIG, with the variable, if MLFAB_WORKERS
 * gives several ranks, but no variable gives this rank; or if a launcher has started several workers, but no meeting
 * place is given. */
MLFAB__INTERNAL int mlfab__config_has_address(const mlfab_config *config, mlfab_error *error);

#endif
