/* port.h - a role's port: its incoming and outgoing frames, and its requests to the node.
 *
 * A role (worker, server, member) knows its peers by number: a server its workers by rank, a worker its servers by
 * number. The role posts control frames to the queue of the peer's link at once. When the link has room, the node asks
 * the role for one frame with a bulk. So the role chooses as late as possible, and control frames go between the
 * chunks. */
#ifndef MLFAB__PORT_H
#define MLFAB__PORT_H

#include "../wire/wire.h"

/* An incoming frame. Borrowed for the length of the call. */
typedef struct mlfab__frame_in {
  uint8_t type;
  uint32_t meta_bytes, bulk_bytes;
  const uint8_t *meta;
  const void *bulk; /* NULL with bulk_bytes > 0: a ghost */
} mlfab__frame_in;

/* An outgoing frame. The role fills it without changing its own state, which advances in `taken`. */
typedef struct mlfab__frame_out {
  uint8_t type;
  uint32_t meta_bytes, bulk_bytes;
  uint8_t *meta;    /* the role encodes here: room for MLFAB_META_MAX */
  const void *bulk; /* borrowed until the token is returned; copied if token is 0 */
  uint64_t token;   /* below 2^60: see role.h, Loans */
  uint8_t
      callers;   /* with a token: bulk is memory of a caller, who gets it back after the request */
  uint32_t slot; /* the role's own notes for `taken` */
  uint64_t note[2];
} mlfab__frame_out;

typedef struct mlfab__port {
  void *self;
  /* Queues a control frame. Frames to a peer without a link are lost: HELLO repeats the important state. */
  void (*post)(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes);
  /* The role has a frame to yield for this peer. */
  void (*ready)(void *self, uint32_t peer);
  /* The peer broke the protocol: the node closes its link. */
  void (*drop)(void *self, uint32_t peer, int code, const char *text);
  /* Takes back the bulk lent with this token. */
  void (*detach)(void *self, uint32_t peer, uint64_t token);
  void (*event)(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                int code, const char *text);
  /* The silence of the peer's link, at its last frame or at the last question to its transport. Bytes of an incomplete
   * frame end the silence; heartbeats only with `heartbeats`. MLFAB__NEVER: no link. NULL: always silent. */
  uint64_t (*silent)(const void *self, uint32_t peer, int heartbeats);
  /* Maximum bulk of a frame to the peer (node.h, Pacing). NULL: not bounded. */
  uint32_t (*chunk)(const void *self, uint32_t peer);
} mlfab__port;

/* The size of a chunk for this peer: at most `most`. */
static inline uint32_t mlfab__port_chunk(const mlfab__port *port, uint32_t peer, uint32_t most) {
  return port->chunk ? (uint32_t)mlfab__min(most, port->chunk(port->self, peer)) : most;
}

/* A transfer may stand still for so many heartbeats while its peer beats. Afterwards its room goes to others. */
enum { MLFAB__PORT_STANDS_BEATS = 10 };

/* Is it time to give up a transfer from or to `peer` that stands still since this time? Yes after `patience_ns`, if the
 * peer's link was as long without a byte; after `most_ns` in any case. A slow peer is not given up: it sends bytes, and
 * its frames may wait for other frames of its link. A peer that only receives (`to_peer`) sends heartbeats. */
MLFAB__INTERNAL int mlfab__port_stalled(const mlfab__port *port, uint32_t peer, int to_peer,
                                        uint64_t since_ns, uint64_t now_ns, uint64_t patience_ns,
                                        uint64_t most_ns);
/* When to ask again. */
MLFAB__INTERNAL uint64_t mlfab__port_stalls_at(uint64_t since_ns, uint64_t now_ns,
                                               uint64_t patience_ns, uint64_t most_ns);

/* Is this bulk lent to the transport? A bulk of at most `copied` bytes is copied, except if chunks for this peer are as
 * small: the node measures with lent bulks. */
static inline int mlfab__port_lends(const mlfab__port *port, uint32_t peer, uint32_t most,
                                    uint64_t bytes, uint32_t copied) {
  uint32_t chunk = mlfab__port_chunk(port, peer, most);
  return bytes > copied || (chunk < most && bytes >= chunk / 2);
}

/* Drops the link of `peer` if `wrong`: the frame is malformed, or has impossible contents. Returns `wrong`. */
MLFAB__INTERNAL int mlfab__port_refuse(const mlfab__port *port, uint32_t peer,
                                       const mlfab__frame_in *frame, int wrong);
/* The same for a frame that does not decode into the struct `m` of the frames called `name`. */
#define MLFAB__MALFORMED(port, peer, frame, name, m) \
  mlfab__port_refuse(port, peer, frame,              \
                     mlfab__decode_##name((frame)->meta, (frame)->meta_bytes, m) != 0)

/* Posts frame `type`, encoded from the struct `meta` of the frames called `name`. For frames with a list
 * the last argument is the list, and `room` has to hold it. */
#define MLFAB__POST_LIST(room, port, peer, type, name, ...)                                        \
  do {                                                                                             \
    uint8_t encoded_[room];                                                                        \
    (port)->post((port)->self, peer, type, encoded_, mlfab__encode_##name(encoded_, __VA_ARGS__)); \
  } while (0)
#define MLFAB__POST(port, peer, type, name, meta) \
  MLFAB__POST_LIST(MLFAB__META_PLAIN, port, peer, type, name, meta)

/* The place of a call among the calls of its worker. progress: number of the worker's updates in the count of rounds
 * (updates owed to closed rounds are left out). pushes, barriers: number begun by the worker; whole updates only. */
typedef struct mlfab__mark {
  uint64_t progress, pushes, barriers;
} mlfab__mark;

/* The reasons why a worker stands apart: it waits in a collective, or in a barrier. */
enum { MLFAB__APART_CALL = 1, MLFAB__APART_BARRIER = 2 };

/* Functions by which collectives and barriers of a worker make servers count it (coll/membership.h). worker: may be NULL. */
typedef struct mlfab__counting {
  struct mlfab__worker *worker;
  int (*idle)(const struct mlfab__worker *worker); /* all its updates are decided */
  void (*mark)(const struct mlfab__worker *worker, mlfab__mark *mark);
  /* apart: the worker stands apart, for these reasons (MLFAB__APART_*). level: the progress and pushes to set; NULL:
   * unchanged. */
  void (*apart)(struct mlfab__worker *worker, uint8_t why);
  void (*back)(struct mlfab__worker *worker, uint8_t why, const uint64_t *level);
  int (*counted)(const struct mlfab__worker *worker);
} mlfab__counting;

#endif
