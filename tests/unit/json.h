/* json.h - a file of tests/vectors, read as text; only as much JSON as the tests need. */
#ifndef TESTS_JSON_H
#define TESTS_JSON_H

#include "../testing.h"

static char json[32768];

static inline void json_read(const char *path) {
  FILE *file = fopen(path, "r");
  assert_non_null(file);
  size_t n = fread(json, 1, sizeof json - 1, file);
  fclose(file);
  assert_true(n > 0 && n < sizeof json - 1);
  json[n] = '\0';
}

/* The text after the next "key" from `at` on. */
static inline const char *json_find(const char *at, const char *key) {
  char quoted[64];
  snprintf(quoted, sizeof quoted, "\"%s\":", key);
  at = strstr(at, quoted);
  if (at == NULL) fail_msg("the vectors have no %s", quoted);
  return at + strlen(quoted);
}

/* The numbers of the next array, including those of nested arrays; hexadecimal ones are in quotes. Returns
 * how many; *end_p is after it. */
static inline uint32_t json_numbers(const char *at, double *numbers, uint32_t room,
                                    const char **end_p) {
  uint32_t n = 0, depth = 0;
  for (at = strchr(at, '['); at != NULL;) {
    if (*at == '[') depth++;
    if (*at == ']' && --depth == 0) break;
    if (strchr("-0123456789", *at)) {
      char *end;
      assert_true(n < room);
      numbers[n++] = strtod(at, &end); /* takes 0x2e66 too */
      at = end;
    } else {
      at++;
    }
  }
  assert_non_null(at);
  if (end_p) *end_p = at;
  return n;
}

static inline double json_number(const char *at, const char *key) {
  return strtod(json_find(at, key), NULL);
}

#endif
