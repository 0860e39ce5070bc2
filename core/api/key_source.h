/* key_source.h - where the fabric's key comes from. */
#ifndef MLFAB__KEY_SOURCE_H
#define MLFAB__KEY_SOURCE_H

#include "../keys/session.h"

/* Fills config->key from its function or file, checks it, and draws config->entropy. Does nothing without a key. The
 * caller wipes `key` and `entropy`.
 * Errors: CONFIG (the file is not private, or no key), IO, or the function's; none quotes the key. */
MLFAB__INTERNAL int mlfab__key_source(mlfab_config *config, mlfab_error *error);
MLFAB__INTERNAL void mlfab__key_forget(mlfab_config *config);

#endif
