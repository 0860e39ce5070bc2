/* key_source.h - gets the fabric's key. */
#ifndef MLFAB__KEY_SOURCE_H
#define MLFAB__KEY_SOURCE_H

#include "../keys/session.h"

/* Fills config->key from its function or file, checks it, and draws config->entropy. Has an effect only if there is a
 * key. The caller wipes `key` and `entropy`. Errors: CONFIG (the file is public, or its text is no key), IO, or the
 * function's. They never quote the key. */
MLFAB__INTERNAL int mlfab__key_source(mlfab_config *config, mlfab_error *error);
MLFAB__INTERNAL void mlfab__key_forget(mlfab_config *config);

#endif
