/* text.h - numbers, reasons and addresses as text, the same in every locale.
 *
 * A process may have chosen a locale with decimal commas. The settings, errors and logs of this library have decimal
 * points in every process. So each function here sets the C locale for its thread until it returns. */
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

/* Returns the number of ports of an address: it may have a range, "tcp:HOST:FIRST-LAST"; 1 without a range. */
MLFAB__INTERNAL uint32_t mlfab__address_ports(const char *address, size_t bytes);
/* Writes the address with the port FIRST + n; an address without a range is copied. */
MLFAB__INTERNAL void mlfab__address_port(const char *address, size_t bytes, uint32_t n, char *text,
                                         size_t room);

/* A job's name may end with "~N": its launcher has started it again N times. Returns N, at most 65535, or 0. *bytes_p:
 * length of the name before it. */
MLFAB__INTERNAL uint32_t mlfab__job_restarts(const char *job, size_t *bytes_p);
/* Returns the reason why an address does not parse. An address without a known beginning counts as TCP. */
MLFAB__INTERNAL const char *mlfab__address_fault(const char *address);

#endif
