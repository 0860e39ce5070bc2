/* worker.h - the worker role: sends updates, gets the model. Layer 4.
 *
 * To each server there is a stream of updates, in the order of their numbers. The part of an update
 * at a server goes through
 *
 *    QUEUED --(announced, with as many bytes as there is credit)--> ANNOUNCED --(PUSH_ACK)--> DECIDED
 *       ^                                                             |
 *       +--------------(RESEND, or HELLO on a new link)---------------+
 *
 * In a fabric with a scheduler a large part is announced without bytes, and its server says (VIA)
 * by which hop it goes: directly, granted by the server, or as a member of a group by way of
 * another worker's node, granted by the aggregator there. Each way has a number; a new one voids
 * the one before, and the part begins anew. The aggregator's grant may be here before the server's
 * word: then the way is adopted from it. A pull likewise: its answer comes from the server or by
 * way of a distributor, and only the newest of its ways counts.
 *
 * Invariants. (1) An update keeps its number whatever happens, and its bytes until every server has
 * decided or it is withdrawn. (2) Parts are announced in the order of their numbers. (3) What was
 * announced is never merged with. (4) A buffer lent to a transport is not given back to the caller
 * before the transport gave it back. (5) A part has lent to two links at most, its server's and its
 * aggregator's: when that changes, what the former one still has is taken back. (6) Nothing is sent
 * to an aggregator that it, or to a server that the server, did not grant for the way that counts.
 *
 * Source: MLfabric §3.2 (aggregation, distribution), §4 Table 1 (push with norm, get); FluentPS
 * Alg. 1 (worker side). */
#ifndef MLFAB__WORKER_H
#define MLFAB__WORKER_H

#include "../model/windows.h"
#include "../node/role.h"
#include "../base/request.h"
#include "../model/layout.h"
#include "../model/sync.h"

enum {
  MLFAB__WORKER_UPDATES = 64, /* in flight: together with what is merged, less than MLFAB__WINDOW */
  MLFAB__WORKER_PULLS = 8,
  MLFAB__WORKER_PACK = 65536, /* updates up to this are copied and made contiguous */
  MLFAB__WORKER_COPY = 8192   /* bulks up to this are copied by the transport */
};

enum mlfab__part_state {
  MLFAB__PART_NONE,
  MLFAB__PART_QUEUED,
  MLFAB__PART_ANNOUNCED,
  MLFAB__PART_DECIDED
};

/* A stretch of the flat model and where its bytes are. */
typedef struct mlfab__source {
  uint64_t offset, bytes;
  uint8_t *data;
} mlfab__source;

typedef struct mlfab__part {
  uint8_t state;
  uint8_t empty;   /* withdrawn: goes on without its bytes, so that its round counts */
  uint8_t planned; /* its server says when it goes, and by which hop */
  uint8_t untold;  /* once decided: a greeting said so, which gives no delay and no iteration */
  uint8_t adopted; /* its way is known from the aggregator: the server's word is on its way */
  int32_t code;    /* once decided */
  uint32_t eager, lent;
  uint32_t aggregator; /* worker by whose node it goes, or MLFAB__NO_NODE */
  uint32_t lent_hop;   /* bulks lent to the link to that aggregator; `lent` to the server's */
  uint32_t way;        /* in their token: what was taken back may still be reported */
  uint64_t group;      /* newest number of a way; 0: none */
  uint64_t bytes, granted, sent;
  uint64_t delay;   /* once decided: it had, or would have had */
  uint64_t reached; /* dropped: the iteration that the worker goes on with at this server */
  uint64_t late;    /* dropped, since this iteration (plus one) was complete; else 0 */
  uint32_t source;  /* cursor */
  uint64_t in_source;
} mlfab__part;

typedef struct mlfab__outgoing {
  uint64_t seq; /* 0: free */
  uint32_t members, flags, serial;
  double scale, norm;
  uint64_t base; /* the caller's version plus one, or 0 */
  mlfab__source *sources;
  uint32_t nsources, source_room;
  uint64_t *versions; /* pulled, by slice */
  uint8_t *image;     /* MLFAB__WORKER_PACK, once it was needed */
  uint8_t *
      packets; /* of the whole update, ascending: see sparse_push.c; kept for the slot's next one */
  uint64_t packet_room, packet_bytes;
  const struct mlfab__push_codec *codec; /* how its bytes go */
  int filtered;                          /* as packets that filters have made */
  uint64_t shape;                        /* when filtered: hash of which stretches these are of */
  uint64_t kept; /* free: the number of the one whose packets a retry would send again, or 0 */
  uint64_t bytes;
  uint32_t nbufs;
  uint64_t pull_count; /* pulls finished when it was made */
  int mergeable, withdrawn;
  mlfab__part *parts; /* by server */
  uint64_t version;
  uint64_t started_ns;
} mlfab__outgoing;

/* The filter of a tensor, and what it holds back. */
typedef struct mlfab__sieve {
  mlfab_filter filter;
  uint8_t *residual; /* as large as the tensor; NULL: there is no filter */
  uint8_t leaves;    /* taken away: the next update takes the residual along */
  uint8_t fresh;     /* the residual was made by the call under way */
} mlfab__sieve;

typedef struct mlfab__sparse { /* a sparse update, as its caller tells it */
  uint32_t tensor;
  const uint64_t *indices;
  const void *values;
  uint64_t count;
} mlfab__sparse;

/* What is pushed: buffers, or elements of the tensor that the one buffer tells. */
typedef struct mlfab__push_what {
  const mlfab_buf *bufs;
  uint32_t n;
  const mlfab__sparse *sparse; /* or NULL */
} mlfab__push_what;

typedef struct mlfab__worker mlfab__worker;

/* How the bytes of an update are made, and go: as they are (push.c), or as packets (sparse_push.c). */
typedef struct mlfab__push_codec {
  uint32_t flags; /* MLFAB__PUSH_* of its updates */
  /* Makes the bytes, in iteration t (from 1). On failure nothing has changed. */
  int (*encode)(mlfab__worker *worker, mlfab__outgoing *update, const mlfab__push_what *what,
                uint64_t t, mlfab_error *error);
  /* Bytes of a server's part, whole elements or packets, as far as they are not more than `most`. */
  uint64_t (*bytes)(const mlfab__worker *worker, const mlfab__outgoing *update, uint32_t server,
                    uint64_t most);
  /* The next contiguous ones at the part's cursor, at most `most` and what a frame holds; may be none. */
  uint64_t (*piece)(const mlfab__worker *worker, const mlfab__outgoing *update, uint32_t server,
                    const mlfab__part *part, uint64_t most, const uint8_t **data_p);
  void (*advance)(const mlfab__worker *worker, const mlfab__outgoing *update, uint32_t server,
                  mlfab__part *part, uint64_t bytes);
  /* Packets only. 1 when a tensor here has a filter, or had one and a residual is left. Gives back
   * what filters hold: the model goes. */
  int (*wanted)(const mlfab__worker *worker, const mlfab__source *sources, uint32_t n);
  void (*free)(mlfab__worker *worker);
} mlfab__push_codec;

typedef struct mlfab__fetch_part { /* of a pull, at a server */
  uint8_t waiting;
  uint8_t begun;    /* something came by way of the hop */
  uint32_t hop;     /* worker that hands it on, or MLFAB__NO_NODE: the server itself */
  uint32_t attempt; /* newest way: what comes by an older one is void */
  /* With a cache: */
  uint8_t asked;         /* it is this pull's turn */
  uint8_t changed;       /* something has come of the slice ... */
  uint32_t slice;        /* ... that is coming in, */
  uint64_t upto, commit; /* so far, and which of it */
} mlfab__fetch_part;

typedef struct mlfab__fetch { /* a pull */
  uint64_t request;           /* 0: free */
  mlfab__source *sources;
  uint32_t nsources, source_room;
  uint32_t flags;           /* MLFAB_PULL_* */
  uint64_t after_seq;       /* numbers below are of pushes before it */
  mlfab__fetch_part *parts; /* by server */
  uint32_t nwaiting;
  uint64_t version;
} mlfab__fetch;

typedef struct mlfab__stream { /* to a server */
  uint8_t up, dead, define, defined, done_told, done_acked, own_weights;
  uint8_t packets; /* it takes updates as packets */
  uint8_t counts;  /* it counts iterations: also of updates that have no bytes for it */
  uint8_t changes; /* it has not answered the change of consistency that is under way */
  uint32_t generation;
  uint64_t announced; /* the newest of our updates that it was told of, on any link */
  uint64_t eager_bytes, eager_used;
  uint32_t small;       /* mergeable updates announced and not decided */
  uint64_t round;       /* progress of the first update that is not decided here: see push.c */
  uint32_t epoch;       /* of its layout, as it has said; 0: it is to say it */
  uint8_t stopped;      /* it has answered STOP */
  uint32_t cache_epoch; /* in which the cache counts the commits of its slices; 0: in none */
} mlfab__stream;

/* A copy of the model: see cache.c. Pulls are told by their requests, which ascend. */
typedef struct mlfab__cache {
  uint8_t *bytes;    /* NULL: there are no tags */
  uint64_t *commits; /* by slice: which one the copy has, 0: none */
  uint64_t *brought; /* by slice: the pull that changed it last, ... */
  uint64_t *before;  /* ... and the last other one */
  uint64_t *written; /* by tensor: the pull that handed it out last */
} mlfab__cache;

typedef struct mlfab__sync_change { /* of consistency, under way at some servers */
  uint64_t request;                 /* 0: none */
  mlfab__sync_ask ask;
  int all; /* it is for all servers */
  uint32_t nwaiting;
  int32_t code; /* the first server's that refused it, and which */
  uint32_t server;
  char text[MLFAB__TEXT_MAX];
} mlfab__sync_change;

/* Slices move between servers: see reshard_worker.c. */
enum mlfab__pause_state {
  MLFAB__PAUSE_RUNS,
  MLFAB__PAUSE_STOPPING,
  MLFAB__PAUSE_DRAINING,
  MLFAB__PAUSE_FROZEN
};

typedef struct mlfab__pause {
  enum mlfab__pause_state state;
  uint32_t attempt;
  int late;      /* it is over already, and what it told is adopted when the servers have stopped */
  uint64_t last; /* updates up to here are decided everywhere before it is frozen */
  uint32_t *owners; /* as RESUME told last, and of which epoch */
  uint32_t nowners, epoch;
} mlfab__pause;

typedef struct mlfab__resize { /* mlfab_set_servers under way */
  uint64_t request;            /* 0: none */
  uint64_t ask, timeout_ns;
  uint32_t *servers;
  uint32_t n;
} mlfab__resize;

/* Who leads the worker through a move of slices, where one is attached: it pauses the worker by what
 * `pause` says. `decided`: while it is draining, something may have been decided. */
typedef struct mlfab__worker_mover {
  void (*hello)(mlfab__worker *worker, uint32_t server, const mlfab__hello_ack *ack,
                uint64_t now_ns);
  void (*dead)(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
  /* 1 when the frame was of this kind. */
  int (*frame)(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame,
               uint64_t now_ns);
  void (*decided)(mlfab__worker *worker, uint64_t now_ns);
  void (*withdraw)(mlfab__worker *worker, mlfab__request *request, int code, uint64_t now_ns);
  void (*free)(mlfab__worker *worker);
} mlfab__worker_mover;

struct mlfab__worker {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port port;
  mlfab__port hop; /* aggregators by their worker's rank: `ready` opens the link if there is none */
  mlfab_stats *stats;
  mlfab__requests *requests;
  uint32_t rank, servers;
  mlfab__tensor_info *tensors; /* as added */
  uint32_t ntensors, tensor_room;
  uint8_t *table; /* encoded for DEFINE */
  mlfab__define define;
  mlfab__layout layout;
  int stands; /* the model stands everywhere */
  int done;   /* no more data */
  uint64_t model_request, join_request;
  uint64_t model_pull; /* the pull inside model_start, or 0 */
  mlfab_buf *model_bufs;
  uint32_t nmodel_bufs;
  mlfab__stream *streams;
  mlfab__outgoing updates[MLFAB__WORKER_UPDATES];
  uint8_t order[MLFAB__WORKER_UPDATES]; /* slots, ascending by number */
  uint32_t norder;
  mlfab__fetch fetches[MLFAB__WORKER_PULLS];
  mlfab__sync_change change;
  uint32_t epoch; /* of the layout */
  mlfab__pause pause;
  mlfab__resize resize;
  mlfab__cache cache;
  mlfab__sieve *sieves; /* by tensor of the layout, once there was a filter */
  uint32_t nsieves;     /* with a residual */
  uint64_t *marks;      /* scratch: bitmaps of what is sent of an update */
  uint64_t mark_room;
  uint64_t next_seq, pull_count;
  uint64_t *pulled;              /* version by slice */
  int16_t status[MLFAB__WINDOW]; /* of the last updates, by number */
  mlfab__lists *lists;           /* of the frame that is being made */
  uint8_t *came; /* the packets of the frame that is being taken in: came_bytes, once needed */
  size_t came_bytes;
  int due; /* something ended, or was decided: worker.c looks what follows */
  const mlfab__worker_mover *mover; /* or NULL */
  const mlfab__push_codec *packed;  /* once there was a filter or a sparse update, or NULL */
  /* Writes the packets of a MODEL frame, where somebody is attached who reads them; or NULL. Errors: FRAME when
   * they are malformed or not of the stretch; MEMORY. */
  int (*unpack)(mlfab__worker *worker, const mlfab__fetch *fetch, const mlfab__model *model,
                const mlfab__frame_in *frame);
};

MLFAB__INTERNAL int mlfab__worker_init(mlfab__worker *worker, mlfab__env *env,
                                       const mlfab_config *config, uint32_t rank,
                                       const mlfab__port *port, const mlfab__port *hop,
                                       mlfab_stats *stats, mlfab__requests *requests);
MLFAB__INTERNAL void mlfab__worker_free(mlfab__worker *worker);
/* Adds the row of a worker, *worker_p, which is the node's (worker_role.c). Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__worker_attach(struct mlfab_node *node, mlfab__worker **worker_p);

/* Errors: PEER_DEAD, when this server, or with MLFAB_ALL one of them, is dead. */
MLFAB__INTERNAL int mlfab__worker_reaches(const mlfab__worker *worker, uint32_t server,
                                          const char *call, mlfab_error *error);
/* The calls of mlfab.h sections 7 to 9; `error` is filled on failure. */
MLFAB__INTERNAL int mlfab__worker_tensor(mlfab__worker *worker, uint32_t id, int dtype,
                                         uint64_t count, mlfab_error *error);
MLFAB__INTERNAL int mlfab__worker_model(mlfab__worker *worker, const mlfab_model_options *options,
                                        const mlfab_buf *bufs, uint32_t n, uint64_t now_ns,
                                        mlfab_request *request_p, mlfab_error *error);
MLFAB__INTERNAL int mlfab__worker_push(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                       const mlfab_push_options *options, uint64_t now_ns,
                                       mlfab_request *request_p, mlfab_error *error);
MLFAB__INTERNAL int mlfab__worker_pull(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                       const mlfab_pull_options *options, uint64_t now_ns,
                                       mlfab_request *request_p, mlfab_error *error);
/* A tensor in the cache. */
MLFAB__INTERNAL int mlfab__worker_cached(const mlfab__worker *worker, uint32_t tensor,
                                         const void **data_p, uint64_t *count_p,
                                         mlfab_error *error);
MLFAB__INTERNAL int mlfab__worker_finish(mlfab__worker *worker, uint64_t timeout_ns,
                                         uint64_t now_ns, mlfab_request *request_p,
                                         mlfab_error *error);
/* Tells the servers of another consistency model; server and tensor may be MLFAB_ALL. */
MLFAB__INTERNAL int mlfab__worker_set_sync(mlfab__worker *worker, const mlfab_sync *sync,
                                           uint32_t server, uint32_t tensor, uint64_t timeout_ns,
                                           uint64_t now_ns, mlfab_request *request_p,
                                           mlfab_error *error);
MLFAB__INTERNAL int mlfab__worker_status(const mlfab__worker *worker, uint64_t seq, int *status_p);
/* Withdraws what a request waits for; `code` is CANCELLED or TIMEOUT. */
MLFAB__INTERNAL void mlfab__worker_withdraw(mlfab__worker *worker, mlfab__request *request,
                                            int code, uint64_t now_ns);

/* Has the server decided updates of ours that we never told it of? Then another process speaks under our
 * number there, and what the server calls applied may be in no model. */
MLFAB__INTERNAL int mlfab__worker_usurped(const mlfab__worker *worker, uint32_t server,
                                          uint64_t top);
/* The link to a server stands and it answered HELLO; it is lost; the server is dead. */
MLFAB__INTERNAL void mlfab__worker_hello(mlfab__worker *worker, uint32_t server,
                                         const mlfab__hello_ack *ack, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__worker_lost(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__worker_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__worker_frame(mlfab__worker *worker, uint32_t server,
                                         const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL int mlfab__worker_next(mlfab__worker *worker, uint32_t server,
                                       mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__worker_taken(mlfab__worker *worker, uint32_t server,
                                         const mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__worker_sent(mlfab__worker *worker, uint32_t server, uint64_t token,
                                        uint64_t now_ns);
/* The link to an aggregator is lost: what was on it is the caller's again, and nothing goes there
 * until it is granted anew. */
MLFAB__INTERNAL void mlfab__worker_hop_lost(mlfab__worker *worker, uint32_t aggregator,
                                            uint64_t now_ns);
/* A frame of an aggregator: HOP_GRANT, HOP_MODEL. */
MLFAB__INTERNAL void mlfab__worker_hop_frame(mlfab__worker *worker, uint32_t aggregator,
                                             const mlfab__frame_in *frame, uint64_t now_ns);
/* The next frame with a bulk for it (HOP_CHUNK): 1, or 0; it was taken; its bulk is free. */
MLFAB__INTERNAL int mlfab__worker_hop_next(mlfab__worker *worker, uint32_t aggregator,
                                           mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__worker_hop_taken(mlfab__worker *worker, uint32_t aggregator,
                                             const mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__worker_hop_sent(mlfab__worker *worker, uint32_t aggregator,
                                            uint64_t token, uint64_t now_ns);
/* Where a pull puts the model's byte `offset`, of those that it asked for; NULL: nowhere. */
MLFAB__INTERNAL uint8_t *mlfab__pull_into(const mlfab__worker *worker, const mlfab__fetch *fetch,
                                          uint64_t offset);
/* Does anything go, or come, by this aggregator? Then the link to it is wanted. */
MLFAB__INTERNAL int mlfab__worker_hop_wanted(const mlfab__worker *worker, uint32_t aggregator);
/* Updates that no server has decided yet. */
MLFAB__INTERNAL uint32_t mlfab__worker_unfinished(const mlfab__worker *worker);

/* --- between the files of the role, lowest first: sources.c, cache.c, pull.c, push.c (updates), worker.c.
 * The lower ones set `due`; worker.c looks once when an event is over. --- */

/* Resolves buffers to sources, ascending; bare: they may be NULL. Errors: ARGUMENT, TENSOR, SHAPE,
 * DTYPE, LIMIT, MEMORY. */
MLFAB__INTERNAL int mlfab__worker_sources(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                          int bare, mlfab__source **sources, uint32_t *nsources,
                                          uint32_t *room, mlfab_error *error);
/* The stretches of sources in a server's shard, neighbours joined, into lists->segments. */
MLFAB__INTERNAL uint32_t mlfab__worker_clip(mlfab__worker *worker, uint32_t server,
                                            const mlfab__source *sources, uint32_t n,
                                            uint64_t *bytes_p);
/* May updates and pulls be sent to this server now? May this update be announced there? */
MLFAB__INTERNAL int mlfab__worker_sends(const mlfab__worker *worker, uint32_t server);
MLFAB__INTERNAL int mlfab__worker_announces(const mlfab__worker *worker, uint32_t server,
                                            uint64_t seq);
/* Does the update end an iteration? */
static inline int mlfab__worker_whole(const mlfab__outgoing *update) {
  return !(update->flags & (MLFAB__PUSH_MORE | MLFAB__PUSH_INIT));
}
/* Whole updates with a number below `before` that this server has not decided. */
MLFAB__INTERNAL uint64_t mlfab__worker_ahead(const mlfab__worker *worker, uint32_t server,
                                             uint64_t before);
/* One progress at all servers: those that are behind are moved on, and told if they count. */
MLFAB__INTERNAL void mlfab__push_align(mlfab__worker *worker);
/* A server has said which progress this worker has there; it counts from now on. */
MLFAB__INTERNAL void mlfab__push_reached(mlfab__worker *worker, uint32_t server, uint64_t reached);
MLFAB__INTERNAL void mlfab__push_tell(mlfab__worker *worker, uint32_t server);
/* 1 while the server has updates of this worker to decide. */
MLFAB__INTERNAL int mlfab__push_pending(const mlfab__worker *worker, uint32_t server);
MLFAB__INTERNAL void mlfab__push_acked(mlfab__worker *worker, uint32_t server,
                                       const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__push_granted(mlfab__worker *worker, uint32_t server,
                                         const mlfab__frame_in *frame);
/* VIA: the hop of an update, says the server; HOP_GRANT: how far it may be sent, says the
 * aggregator. */
MLFAB__INTERNAL void mlfab__push_rerouted(mlfab__worker *worker, uint32_t server,
                                          const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__push_hop_granted(mlfab__worker *worker, uint32_t aggregator,
                                             const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__push_hop_lost(mlfab__worker *worker, uint32_t aggregator,
                                          uint64_t now_ns);
MLFAB__INTERNAL void mlfab__push_sent(mlfab__worker *worker, uint32_t server, uint64_t token,
                                      uint64_t now_ns);
MLFAB__INTERNAL void mlfab__push_hop_sent(mlfab__worker *worker, uint32_t aggregator,
                                          uint64_t token, uint64_t now_ns);
MLFAB__INTERNAL int mlfab__push_hop_wanted(const mlfab__worker *worker, uint32_t aggregator);
/* What the server has decided, by its window, and a new generation for the rest. */
MLFAB__INTERNAL void mlfab__push_resync(mlfab__worker *worker, uint32_t server, uint32_t generation,
                                        const mlfab__window *window, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__push_lost(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
/* Decides all parts at a server that will never answer. */
MLFAB__INTERNAL void mlfab__push_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
/* A call of push. */
MLFAB__INTERNAL int mlfab__push_start(mlfab__worker *worker, const mlfab__push_what *what,
                                      const mlfab_push_options *given, uint64_t now_ns,
                                      mlfab_request *request_p, mlfab_error *error);
/* The update of first weights. */
MLFAB__INTERNAL int mlfab__push_first(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                      uint64_t now_ns, mlfab_error *error);
MLFAB__INTERNAL void mlfab__push_withdraw(mlfab__worker *worker, mlfab__request *request, int code,
                                          uint64_t now_ns);
MLFAB__INTERNAL int mlfab__push_next(mlfab__worker *worker, uint32_t server,
                                     mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__push_taken(mlfab__worker *worker, uint32_t server,
                                       const mlfab__frame_out *frame);
/* Withdraws every update without waiting, and drops what depends on the layout. */
MLFAB__INTERNAL void mlfab__push_forget(mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__push_free(mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__pull_model(mlfab__worker *worker, uint32_t server,
                                       const mlfab__frame_in *frame, uint64_t now_ns);
/* PULL_VIA: the hop of a pull; HOP_MODEL: what it handed on. */
MLFAB__INTERNAL void mlfab__pull_rerouted(mlfab__worker *worker, uint32_t server,
                                          const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__pull_hop_model(mlfab__worker *worker, uint32_t aggregator,
                                           const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__pull_hop_lost(mlfab__worker *worker, uint32_t aggregator);
MLFAB__INTERNAL int mlfab__pull_hop_wanted(const mlfab__worker *worker, uint32_t aggregator);
MLFAB__INTERNAL void mlfab__pull_failed(mlfab__worker *worker, uint32_t server,
                                        const mlfab__frame_in *frame, uint64_t now_ns);
/* Pulls behind this update are asked again: the server will never hear of it, or what is before them has
 * other numbers now. */
MLFAB__INTERNAL void mlfab__pull_renumber(mlfab__worker *worker, uint32_t server, uint64_t seq);
/* Asks again on a new link. */
MLFAB__INTERNAL void mlfab__pull_again(mlfab__worker *worker, uint32_t server);
MLFAB__INTERNAL void mlfab__pull_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__pull_withdraw(mlfab__worker *worker, mlfab__request *request, int code,
                                          uint64_t now_ns);
MLFAB__INTERNAL void mlfab__pull_free(mlfab__worker *worker);
/* The layout has changed: updates that are decided nowhere, and pulls, are cut anew; a change of
 * consistency is told to all again. */
MLFAB__INTERNAL void mlfab__push_recut(mlfab__worker *worker, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__pull_recut(mlfab__worker *worker, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__worker_change_again(mlfab__worker *worker);
/* Where it is undecided it never will be decided. */
MLFAB__INTERNAL void mlfab__push_lose(mlfab__worker *worker, mlfab__outgoing *update,
                                      uint64_t now_ns);
/* The cache of a model that has version tags, else nothing. Errors: MEMORY (free it). */
MLFAB__INTERNAL int mlfab__cache_open(mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__cache_free(mlfab__worker *worker);
/* Its copies of a server's slices, or of all, are no good: what they are stays, and is brought again. */
MLFAB__INTERNAL void mlfab__cache_void(mlfab__worker *worker, uint32_t server);
/* What to ask the server for, into the scratches. */
MLFAB__INTERNAL void mlfab__cache_ask(mlfab__worker *worker, uint32_t server,
                                      const mlfab__fetch *fetch, mlfab__pull *pull);
/* A frame of a pull: before its bytes are written (FRAME: it does not go on where the one before
 * ended), and after it; `changed`: there were some. */
MLFAB__INTERNAL int mlfab__cache_begin(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                                       const mlfab__model *model);
MLFAB__INTERNAL void mlfab__cache_taken(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                                        const mlfab__model *model, int changed);
/* All of a pull is here. */
MLFAB__INTERNAL void mlfab__cache_done(mlfab__worker *worker, const mlfab__fetch *fetch);

#endif
