/* options.h - the command line of the tools. One table of a tool gives its options, its help, its man page (man.py) and its
 * completion (mlfab.bash). A mistake costs one line and EXIT_USAGE, before the tool has done anything. */
#ifndef MLFAB_TOOLS_OPTIONS_H
#define MLFAB_TOOLS_OPTIONS_H

#include "../core/base/typed.h"
#include "../extras/mlfab_units.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { EXIT_USAGE = 2 };

/* The type behind `to`: int, uint64_t (COUNT; TIME in ns, SIZE in bytes, RATE in bytes a second), double, const char *. */
enum option_kind {
  OPTION_FLAG,
  OPTION_INT,
  OPTION_COUNT,
  OPTION_TIME,
  OPTION_SIZE,
  OPTION_RATE,
  OPTION_PART, /* a number from 0 to 1 */
  OPTION_TEXT,
  OPTION_WORD, /* an int: the index of a word of `value`, "end|continue|restart" */
  OPTION_CALL,
  OPTION_MAYBE /* the value behind = may be missing; behind a blank it counts after the first word */
};

typedef struct option_row {
  const char *names; /* "--tcp", "-n" or "-s, --servers"; NULL: the end of the table */
  const char *value; /* as the help has it; NULL: the option has none */
  enum option_kind kind;
  void *to;
  double least, most, bare; /* bare: what a number without a unit counts */
  void (*call)(const char *name, const char *value);
  const char *help;
} option_row;

typedef struct options_tool {
  const char *name, *usage, *about, *more; /* lines of usage; texts before and behind the options */
  const option_row *rows;
  int ends;                         /* 1: the first word ends the options */
  void (*before)(const char *word); /* sees each option first, or NULL */
} options_tool;

static const options_tool *options_of;
static int options_width = 80;
static const option_row options_own[] = {
    {"-h, --help", NULL, OPTION_FLAG, NULL, 0, 0, 0, NULL, "this text"},
    {"--version", NULL, OPTION_FLAG, NULL, 0, 0, 0, NULL, "the version, and what was compiled in"},
    {NULL, NULL, OPTION_FLAG, NULL, 0, 0, 0, NULL, NULL}};

/* Prints one line and ends the tool. */
static _Noreturn void options_refuse(const char *format, ...) MLFAB__PRINTF(1, 2);
static _Noreturn void options_refuse(const char *format, ...) {
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  for (char *c = text; *c; c++)
    if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
  fflush(stdout);
  fprintf(stderr, "%s: %s\n", options_of->name, text);
  exit(EXIT_USAGE);
}

/* ---- numbers with units */

static const mlfab__word options_multiples[] = {
    {"k", 1000}, {"m", 1000000}, {"g", 1000000000}, {NULL, 0}};
static const mlfab__word options_sizes[] = MLFAB__SIZE_UNITS;
static const mlfab__word options_rates[] = {
    {"kbit", 125}, {"Mbit", 125000}, {"Gbit", 125000000}, {"Tbit", 125000000000}, {NULL, 0}};

/* A number with a unit of its kind, in ns, bytes or bytes a second. -1: the text is none. Rates may end in "/s". k, m and g
 * multiply numbers of the base unit. */
static double options_number(const char *text, enum option_kind kind, double bare) {
  char *end, unit[8] = "";
  double number = strtod(text, &end), is;
  if (((text[0] < '0' || text[0] > '9') && text[0] != '.') || text[1] == 'x' || text[1] == 'X' ||
      strlen(end) >= sizeof unit)
    return -1;
  memcpy(unit, end, strlen(end) + 1);
  size_t n = strlen(unit);
  if (kind == OPTION_RATE && n > 2 && !strcmp(unit + n - 2, "/s")) unit[n - 2] = 0;
  is = mlfab__unit_of(unit,
                      kind == OPTION_TIME                          ? mlfab__times
                      : kind == OPTION_SIZE || kind == OPTION_RATE ? options_sizes
                                                                   : options_multiples,
                      bare);
  if (is == 0 && kind == OPTION_RATE) is = mlfab__unit_of(unit, options_rates, 0);
  if (is == 0 && bare == 1) is = mlfab__unit_of(unit, options_multiples, 0);
  return is > 0 && mlfab__finite(number * is) ? number * is : -1;
}

static const char *options_units(enum option_kind kind) {
  return kind == OPTION_TIME   ? "a time, as 50us, 60ms or 2s"
         : kind == OPTION_SIZE ? "a size, as 5MB or 64KiB"
         : kind == OPTION_RATE ? "a rate, as 125MB/s or 1Gbit"
         : kind == OPTION_PART ? "a number"
                               : "a whole number";
}

/* A bound of an option, in its unit. */
static const char *options_bound(const option_row *o, double x, char text[32]) {
  const char *unit = o->kind == OPTION_SIZE   ? "B"
                     : o->kind == OPTION_RATE ? "B/s"
                     : o->kind != OPTION_TIME ? ""
                     : x < 1e6                ? "ns"
                     : x < 1e9                ? "ms"
                                              : "s";
  snprintf(text, 32, "%.10g%s", *unit == 's' ? x / 1e9 : *unit == 'm' ? x / 1e6 : x, unit);
  return text;
}

static double options_value(const option_row *o, const char *name, const char *text) {
  char least[32], most[32];
  double x = options_number(text, o->kind, o->bare > 0 ? o->bare : 1);
  if (x < 0 || (o->kind < OPTION_TIME && x != floor(x)))
    options_refuse("%s='%s': not %s", name, text, options_units(o->kind));
  if (x < o->least || x > o->most)
    options_refuse("%s='%s': not from %s to %s", name, text, options_bound(o, o->least, least),
                   options_bound(o, o->most, most));
  return x;
}

/* ---- options */

/* Is this a name of the row? n: its length. */
static int options_is(const option_row *o, const char *word, size_t n) {
  for (const char *at = o->names; at; at = strstr(at, ", ") ? strstr(at, ", ") + 2 : NULL)
    if (strcspn(at, ",") == n && !strncmp(at, word, n)) return 1;
  return 0;
}

static const option_row *options_find(const char *word, size_t n) {
  for (const option_row *o = options_of->rows; o->names; o++)
    if (options_is(o, word, n)) return o;
  for (const option_row *o = options_own; o->names; o++)
    if (options_is(o, word, n)) return o;
  return NULL;
}

static _Noreturn void options_unknown(const char *word) {
  char typed[32], name[32], best[32] = "";
  uint32_t least = UINT32_MAX, far;
  snprintf(typed, sizeof typed, "%.*s", (int)strcspn(word, "="), word);
  for (int own = 0; own < 2; own++) {
    for (const option_row *o = own ? options_own : options_of->rows; o->names; o++) {
      const char *at = strstr(o->names, "--") ? strstr(o->names, "--") : o->names;
      snprintf(name, sizeof name, "%s", at);
      if ((far = mlfab__misspelt(typed, name)) >= least) continue;
      least = far;
      memcpy(best, name, sizeof best);
    }
  }
  if (best[0]) options_refuse("there is no option %s; the nearest is %s", typed, best);
  options_refuse("there is no option %s; %s --help lists all", typed, options_of->name);
}

/* The index of a word in "a|b|c". */
static int options_word(const option_row *o, const char *name, const char *text) {
  int index = 0;
  for (const char *at = o->value; at; index++) {
    size_t n = strcspn(at, "|");
    if (strlen(text) == n && !strncmp(at, text, n)) return index;
    at = at[n] ? at + n + 1 : NULL;
  }
  options_refuse("%s='%s': not one of %s", name, text, o->value);
}

static void options_take(const option_row *o, const char *name, const char *text) {
  if (o->kind == OPTION_FLAG) *(int *)o->to = 1;
  if (o->kind == OPTION_INT) *(int *)o->to = (int)options_value(o, name, text);
  if (o->kind >= OPTION_COUNT && o->kind <= OPTION_RATE)
    *(uint64_t *)o->to = (uint64_t)options_value(o, name, text);
  if (o->kind == OPTION_PART) *(double *)o->to = options_value(o, name, text);
  if (o->kind == OPTION_TEXT && !*text) options_refuse("%s='': its %s is empty", name, o->value);
  if (o->kind == OPTION_TEXT) *(const char **)o->to = text;
  if (o->kind == OPTION_WORD) *(int *)o->to = options_word(o, name, text);
  if (o->call) o->call(name, text);
}

/* Prints words up to column options_width; the lines after the first are indented. A newline is one. */
static void options_wrap(const char *text, int at, int indent) {
  for (int gap = 0; *text; text += gap) {
    int n = (int)strcspn(text, " \n");
    int fits = at + gap + n <= options_width || at == indent;
    if (n > 0)
      at = (fits ? at + printf("%*s", gap, "") : printf("\n%*s", indent, "") - 1) +
           printf("%.*s", n, text);
    text += n;
    gap = *text != 0;
    if (*text != '\n') continue;
    printf("\n%*s", text[1] != '\n' ? indent : 0, "");
    at = indent;
    text++;
    gap = 0;
  }
  putchar('\n');
}

static _Noreturn void options_help(void) {
  printf("%s\n\n", options_of->usage);
  options_wrap(options_of->about, 0, 0);
  putchar('\n');
  for (int own = 0; own < 2; own++) {
    for (const option_row *o = own ? options_own : options_of->rows; o->names; o++) {
      int n = printf("  %s%s%s%s", o->names, o->value ? o->kind == OPTION_MAYBE ? "[=" : " " : "",
                     o->value ? o->value : "", o->kind == OPTION_MAYBE ? "]" : "");
      if (n > 23) printf("\n");
      printf("%*s", n > 23 ? 25 : 25 - n, "");
      options_wrap(o->help, 25, 25);
    }
  }
  if (options_of->more) putchar('\n');
  if (options_of->more) options_wrap(options_of->more, 0, 0);
  exit(0);
}

/* Reads the options. The words, such as files, are at the end of argv then; returns the index of the first. */
static int options_read(const options_tool *tool, int argc, char **argv) {
  int words = 0, at = 1;
  options_of = tool;
  for (; at < argc; at++) {
    char *word = argv[at];
    size_t n = strcspn(word, "=");
    if (!strcmp(word, "--") && ++at) break;
    if (word[0] != '-' || !word[1]) {
      if (tool->ends) break;
      argv[1 + words++] = word;
      continue;
    }
    if (tool->before) tool->before(word);
    int joined = !options_find(word, n) && word[1] != '-' && options_find(word, 2) &&
                 options_find(word, 2)->value;
    const option_row *o = options_find(word, joined ? 2 : n);
    char shown[32], *value = joined ? word + 2 : word[n] ? word + n + 1 : NULL;
    if (!o) options_unknown(word);
    snprintf(shown, sizeof shown, "%.*s", joined ? 2 : (int)n, word);
    if (o == options_own) options_help();
    if (o == options_own + 1) {
      puts(mlfab_build_info());
      exit(0);
    }
    if (!o->value && value) options_refuse("%s takes no value, not '%s'", shown, value);
    if (o->value && !value && o->kind == OPTION_MAYBE) {
      if (words > 0 && at + 1 < argc && argv[at + 1][0] != '-') value = argv[++at];
    } else if (o->value && !value) {
      if (at + 1 == argc) options_refuse("%s needs a value, %s", shown, o->value);
      value = argv[++at];
    }
    options_take(o, shown, value ? value : "");
  }
  for (int i = words; i > 0; i--) argv[--at] = argv[i];
  return at;
}

/* fopen, but a directory is none to read. */
static inline FILE *options_open(const char *path, const char *mode) {
  struct stat is;
  if (!stat(path, &is) && S_ISDIR(is.st_mode)) return errno = EISDIR, (FILE *)NULL;
  return fopen(path, mode);
}

#endif
