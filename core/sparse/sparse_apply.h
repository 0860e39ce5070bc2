/* sparse_apply.h - the server role: packets in updates (sparse_apply.c) and in answers (delta.c), attached
 * to the server. See server.h. */
#ifndef MLFAB__SPARSE_APPLY_H
#define MLFAB__SPARSE_APPLY_H

#include "../kernels/packet.h"
#include "../server/server.h"
#include "version.h"

/* Attaches the group: the server then accepts packets, and answers with them. */
MLFAB__INTERNAL void mlfab__sparse_attach(mlfab__server *server);

/* A model's options of tags, 16-bit parameters and parameter filters, checked against each other and the tensors.
 * Errors: CONFIG, UNSUPPORTED. */
MLFAB__INTERNAL int mlfab__sparse_check(const mlfab_model_options *options,
                                        const mlfab__layout *layout, mlfab_error *error);
/* Allocates tags for every `elements` (a power of two, or 0: none) elements of the smallest type in a slice; no grain
 * is smaller than an element. Errors: MEMORY; mlfab__store_free frees the rest. */
MLFAB__INTERNAL int mlfab__store_tag(mlfab__env *env, mlfab__store *store, uint32_t elements);
/* Returns the tags of a slice (an index) of a store that has tags. */
MLFAB__INTERNAL mlfab__tags *mlfab__store_tags_of(const mlfab__store *store, uint32_t slice);

/* Allocates scratch memory for one decoded packet, and its old bytes; `came`. Errors: MEMORY. */
#define MLFAB__SPARSE_APPLY_HALF (65536u * 8)
#define MLFAB__SPARSE_APPLY_ROOM (2 * MLFAB__SPARSE_APPLY_HALF)
MLFAB__INTERNAL int mlfab__sparse_apply_room(mlfab__server *server);
MLFAB__INTERNAL void mlfab__sparse_apply_free(mlfab__server *server);
/* The codec of packets. */
MLFAB__INTERNAL const mlfab__apply_codec *mlfab__sparse_apply_codec(void);

#endif
