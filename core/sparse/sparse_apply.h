/* sparse_apply.h - the server role: packets in updates (sparse_apply.c) and in answers (delta.c), attached
 * to the server. See server.h. */
#ifndef MLFAB__SPARSE_APPLY_H
#define MLFAB__SPARSE_APPLY_H

#include "../kernels/packet.h"
#include "../server/server.h"

/* Attaches the group: the server then accepts packets, and answers with them. */
MLFAB__INTERNAL void mlfab__sparse_attach(mlfab__server *server);

/* Scratch memory: one decoded packet, and its old bytes; `came`. Errors: MEMORY. */
#define MLFAB__SPARSE_APPLY_HALF (65536u * 8)
#define MLFAB__SPARSE_APPLY_ROOM (2 * MLFAB__SPARSE_APPLY_HALF)
MLFAB__INTERNAL int mlfab__sparse_apply_room(mlfab__server *server);
MLFAB__INTERNAL void mlfab__sparse_apply_free(mlfab__server *server);
/* The codec of packets. */
MLFAB__INTERNAL const mlfab__apply_codec *mlfab__sparse_apply_codec(void);

#endif
