/* text.h - numbers and reasons as text, the same in every locale. Layer 0.
 *
 * A process may have chosen a locale with decimal commas. The settings, errors and logs of this library have points
 * in every process, so a call here has the C locale, for its own thread and until it returns. */
#ifndef MLFAB__TEXT_H
#define MLFAB__TEXT_H

#include "base.h"

/* snprintf and vsnprintf of a text with reals. */
MLFAB__INTERNAL int mlfab__format(char *text, size_t room, const char *format, ...)
    MLFAB__PRINTF(3, 4);
MLFAB__INTERNAL int mlfab__vformat(char *text, size_t room, const char *format, va_list arguments);
/* strtod. */
MLFAB__INTERNAL double mlfab__real(const char *text, char **end_p);
/* strerror. The text is valid until this thread's next call. */
MLFAB__INTERNAL const char *mlfab__reason(int number);

#endif
