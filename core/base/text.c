/* text.c - numbers and reasons as text. See text.h.
 *
 * Source: POSIX.1-2008, newlocale and uselocale: they change the locale of one thread. */
#include "text.h"

#include <errno.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(__APPLE__)
#include <xlocale.h>
#endif

typedef struct text_locale {
  locale_t c, before;
} text_locale;

/* The thread keeps its locale if there is no memory for another. */
static text_locale text_enter(void) {
  text_locale l = {newlocale(LC_ALL_MASK, "C", (locale_t)0), (locale_t)0};
  if (l.c) l.before = uselocale(l.c);
  return l;
}

static void text_leave(text_locale l) {
  if (!l.c) return;
  uselocale(l.before);
  freelocale(l.c);
}

MLFAB__INTERNAL int mlfab__vformat(char *text, size_t room, const char *format, va_list arguments) {
  text_locale l = text_enter();
  int n = vsnprintf(text, room, format, arguments);
  text_leave(l);
  return n;
}

MLFAB__INTERNAL int mlfab__format(char *text, size_t room, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int n = mlfab__vformat(text, room, format, arguments);
  va_end(arguments);
  return n;
}

MLFAB__INTERNAL double mlfab__real(const char *text, char **end_p) {
  text_locale l = text_enter();
  double value = strtod(text, end_p);
  text_leave(l);
  return value;
}

MLFAB__INTERNAL const char *mlfab__reason(int number) {
  if (number == EMFILE) return "Too many open files (raise the limit: ulimit -n)";
  text_locale l = text_enter();
  const char *text = strerror(number);
  text_leave(l);
  return text;
}

/* --- ranges of ports --- */

/* Returns the number of bytes before FIRST; 0: there is no range. */
static size_t text_range(const char *address, size_t bytes, uint32_t *first_p, uint32_t *last_p) {
  uint32_t value[2] = {0, 0};
  size_t at = bytes, host;
  if (!strncmp(address, "unix:", 5) || !strncmp(address, "shm:", 4)) return 0;
  while (at > 0 && address[at - 1] != ':') at--;
  host = at;
  for (int i = 0; i < 2; i++) {
    size_t begin = at;
    for (; at < bytes && address[at] >= '0' && address[at] <= '9' && at - begin < 6; at++)
      value[i] = 10 * value[i] + (uint32_t)(address[at] - '0');
    if (at == begin || (i == 0 ? at >= bytes || address[at++] != '-' : at != bytes)) return 0;
  }
  *first_p = value[0];
  *last_p = value[1];
  return value[0] > 0 && value[0] <= value[1] && value[1] <= 65535 ? host : 0;
}

MLFAB__INTERNAL uint32_t mlfab__address_ports(const char *address, size_t bytes) {
  uint32_t first, last;
  return text_range(address, bytes, &first, &last) ? last - first + 1 : 1;
}

MLFAB__INTERNAL void mlfab__address_port(const char *address, size_t bytes, uint32_t n, char *text,
                                         size_t room) {
  uint32_t first, last;
  size_t host = text_range(address, bytes, &first, &last);
  if (host)
    snprintf(text, room, "%.*s%u", (int)host, address, (unsigned)(first + n));
  else
    snprintf(text, room, "%.*s", (int)bytes, address);
}

MLFAB__INTERNAL uint32_t mlfab__job_restarts(const char *job, size_t *bytes_p) {
  const char *mark = strrchr(job, '~');
  uint32_t restarts = 0;
  *bytes_p = strlen(job);
  if (!mark || !mark[1]) return 0;
  for (const char *at = mark + 1; *at; at++) {
    if (*at < '0' || *at > '9' || restarts > 65535) return 0;
    restarts = 10 * restarts + (uint32_t)(*at - '0');
  }
  if (restarts > 65535) return 0;
  *bytes_p = (size_t)(mark - job);
  return restarts;
}

MLFAB__INTERNAL const char *mlfab__address_fault(const char *address) {
  const char *host = !strncmp(address, "tcp:", 4) ? address + 4 : address;
  const char *end = host[0] == '[' ? strchr(host, ']') : host,
             *colon = end ? strrchr(end, ':') : NULL;
  if (!strncmp(address, "unix:", 5) || !strncmp(address, "shm:", 4) || !end || !host[0])
    return mlfab_error_text(MLFAB_ERR_ADDRESS);
  if (!colon || colon[1] < '0' || colon[1] > '9') return "it has no port (tcp:HOST:PORT)";
  return strtoul(colon + 1, NULL, 10) - 1 > 65534 ? "its port is not in 1..65535"
                                                  : mlfab_error_text(MLFAB_ERR_ADDRESS);
}
