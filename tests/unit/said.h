/* said.h - the last error of a node: its code, and words that its text must have. */
#ifndef MLFAB_TEST_SAID_H
#define MLFAB_TEST_SAID_H

#include "world.h"

static inline void said(mlfab *node, int code, const char *text) {
  mlfab_error error;
  OK(node, mlfab_last_error(node, &error));
  if (error.code != code || !strstr(error.text, text))
    fail_msg("last error is %s \"%s\", not %s \"%s\"", mlfab_error_name(error.code), error.text,
             mlfab_error_name(code), text);
}

/* The call ends with this code, and the node says why. */
#define REFUSED(node, call, code, text) \
  do {                                  \
    EXPECT(node, call, code);           \
    said(node, code, text);             \
  } while (0)

static inline void all_wrong(const int *codes, size_t n, const char *calls) {
  for (size_t i = 0; i < n; i++)
    if (codes[i] != MLFAB_ERR_ARGUMENT)
      fail_msg("call %zu of %s: %s", i, calls, mlfab_error_name(codes[i]));
}

/* Each of these calls has a wrong argument. */
#define WRONG_ALL(...)                                                                    \
  all_wrong((const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int), \
            #__VA_ARGS__)

#endif
