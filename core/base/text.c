/* text.c - numbers and reasons as text. See text.h. Layer 0.
 *
 * Source: POSIX.1-2008, newlocale and uselocale: they change the locale of one thread. */
#include "text.h"

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(__APPLE__)
#include <xlocale.h>
#endif

typedef struct text_locale {
  locale_t c, before;
} text_locale;

/* Without memory for it the thread keeps its locale. */
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
  text_locale l = text_enter();
  const char *text = strerror(number);
  text_leave(l);
  return text;
}
