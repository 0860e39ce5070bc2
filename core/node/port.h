/* port.h - how a role speaks: what it is handed, what it yields, whom it may ask.
 *
 * A role (worker, server, member) knows its peers by number: a server its workers by rank, a worker
 * its servers by number. Control frames are posted to a queue of the peer's link at once; frames
 * with a bulk are yielded one at a time when the link has room, so that the choice falls as late as
 * possible and control goes between the chunks. */
#ifndef MLFAB__PORT_H
#define MLFAB__PORT_H

#include "../wire/wire.h"

/* A frame that came. Borrowed for the length of the call. */
typedef struct mlfab__frame_in {
  uint8_t type;
  uint32_t meta_bytes, bulk_bytes;
  const uint8_t *meta;
  const void *bulk; /* NULL with bulk_bytes > 0: a ghost */
} mlfab__frame_in;

/* A frame to go. The role fills it without changing its state; the state follows when it was
 * taken. */
typedef struct mlfab__frame_out {
  uint8_t type;
  uint32_t meta_bytes, bulk_bytes;
  uint8_t *meta;    /* where to encode: room for MLFAB_META_MAX */
  const void *bulk; /* borrowed until the token comes back, or copied when token is 0 */
  uint64_t token;   /* below 2^60: see role.h, Loans */
  uint32_t slot;    /* the role's own notes until it was taken */
  uint64_t note[2];
} mlfab__frame_out;

typedef struct mlfab__port {
  void *self;
  /* Queues a control frame. A peer without link gets nothing: what matters is said again at
   * HELLO. */
  void (*post)(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes);
  /* The role has a frame to yield for this peer. */
  void (*ready)(void *self, uint32_t peer);
  /* The peer broke the protocol: its link is given up. */
  void (*drop)(void *self, uint32_t peer, int code, const char *text);
  /* The bulk lent with this token is taken back. */
  void (*detach)(void *self, uint32_t peer, uint64_t token);
  void (*event)(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                int code, const char *text);
} mlfab__port;

/* Gives the link of `peer` up when `wrong`: the frame is malformed, or says what cannot be. Returns `wrong`. */
MLFAB__INTERNAL int mlfab__port_refuse(const mlfab__port *port, uint32_t peer,
                                       const mlfab__frame_in *frame, int wrong);
/* The same of a frame that does not decode into the struct `m` of the frames called `name`. */
#define MLFAB__MALFORMED(port, peer, frame, name, m) \
  mlfab__port_refuse(port, peer, frame,              \
                     mlfab__decode_##name((frame)->meta, (frame)->meta_bytes, m) != 0)

/* Posts frame `type`, encoded from the struct `meta` of the frames called `name`; for those with a list
 * the last argument is the list, and `room` is enough for it. */
#define MLFAB__POST_LIST(room, port, peer, type, name, ...)                                        \
  do {                                                                                             \
    uint8_t encoded_[room];                                                                        \
    (port)->post((port)->self, peer, type, encoded_, mlfab__encode_##name(encoded_, __VA_ARGS__)); \
  } while (0)
#define MLFAB__POST(port, peer, type, name, meta) \
  MLFAB__POST_LIST(MLFAB__META_PLAIN, port, peer, type, name, meta)

#endif
