/* error.c - the version, and the texts of error codes. */
#include "base.h"

MLFAB_API const char *mlfab_version(void) { return MLFAB_VERSION; }

MLFAB_API const char *mlfab_error_name(int code) {
  switch (code) {
#define ERROR_NAME(name, number, text) \
  case number:                         \
    return "MLFAB_ERR_" #name;
    MLFAB_ERRORS(ERROR_NAME)
#undef ERROR_NAME
    case MLFAB_OK:
      return "MLFAB_OK";
    default:
      return "MLFAB_ERR_UNKNOWN";
  }
}

MLFAB_API const char *mlfab_error_text(int code) {
  switch (code) {
#define ERROR_TEXT(name, number, text) \
  case number:                         \
    return text;
    MLFAB_ERRORS(ERROR_TEXT)
#undef ERROR_TEXT
    case MLFAB_OK:
      return "success";
    default:
      return "unknown error code";
  }
}
