/* options.c - the initial options; also in builds without models. See options.h. */
#include "options.h"

MLFAB_API void mlfab_model_options_init(mlfab_model_options *options) {
  const mlfab_model_options initial = MLFAB_MODEL_OPTIONS_INIT;
  if (options) *options = initial;
}

MLFAB_API void mlfab_push_options_init(mlfab_push_options *options) {
  const mlfab_push_options initial = MLFAB_PUSH_OPTIONS_INIT;
  if (options) *options = initial;
}
