/* options.c - names of a model's options, and the initial options; also in builds without models. See options.h. */
#include "options.h"

/* By MLFAB_OPTIMIZER_*, and by MLFAB_SYNC_*. */
#define OPTIONS_NAME(kind, name, states, linear, uses) [MLFAB_OPTIMIZER_##kind] = #name,
static const char *const options_optimizers[] = {MLFAB__OPTIMIZERS(OPTIONS_NAME)};
static const char *const options_syncs[] = {"async", "bsp",  "ssp",          "dsps",
                                            "drop",  "pssp", "pssp_dynamic", "user"};

MLFAB__INTERNAL const char *mlfab__optimizer_name(uint32_t kind) {
  return kind < MLFAB__COUNT(options_optimizers) ? options_optimizers[kind] : "unknown";
}

MLFAB__INTERNAL const char *mlfab__sync_name(uint32_t kind) {
  return kind < MLFAB__COUNT(options_syncs) ? options_syncs[kind] : "unknown";
}

MLFAB_API void mlfab_model_options_init(mlfab_model_options *options) {
  const mlfab_model_options initial = MLFAB_MODEL_OPTIONS_INIT;
  if (options) *options = initial;
}

MLFAB_API void mlfab_push_options_init(mlfab_push_options *options) {
  const mlfab_push_options initial = MLFAB_PUSH_OPTIONS_INIT;
  if (options) *options = initial;
}
