/* worker.h - the worker role: sends updates, gets the model. Layer 4.
 *
 * The worker has one stream of updates to each server, in the order of their numbers. The states of an update's
 * part at a server:
 *
 *    QUEUED --(announced, with as many bytes as there is credit)--> ANNOUNCED --(PUSH_ACK)--> DECIDED
 *       ^                                                             |
 *       +--------------(RESEND, or HELLO on a new link)---------------+
 *
 * In a fabric with a scheduler the worker announces a large part without bytes. The server then names its route
 * (VIA): directly, granted by the server, or as a member of a group through another worker's node, granted by the
 * aggregator there. Routes have numbers; a new route voids the one before, and the part begins anew. If the
 * aggregator's grant arrives before VIA, the worker adopts the route from the grant. The same holds for pulls: the
 * answer comes from the server or through a distributor, and only the newest route counts.
 *
 * Invariants. (1) An update keeps its number, and its bytes until every server has decided or it is withdrawn. (2)
 * The worker announces parts in the order of their numbers. (3) It merges nothing into an announced update. (4) It
 * does not return a buffer to the caller while a transport has it. (5) A part has bulks lent to two links at most,
 * its server's and its aggregator's; when the aggregator changes, the worker takes back what the former one still
 * has. (6) The worker sends an aggregator, or a server, only bytes that the receiver granted for the current route.
 * (7) While an update lacks bytes (`lacks`), because they are still being copied to its buffers, the worker sends none of
 * those, and no server gets the last byte of its part: a server applies a part when it has all of it, so an update that is
 * withdrawn until then is applied nowhere. An update that a scheduler places never lacks bytes: its group would wait.
 *
 * Source: MLfabric §3.2 (aggregation, distribution), §4 Table 1 (push with norm, get); FluentPS Alg. 1 (worker
 * side). */
#ifndef MLFAB__WORKER_H
#define MLFAB__WORKER_H

#include "../model/windows.h"
#include "../node/role.h"
#include "../base/request.h"
#include "../base/shm_memory.h"
#include "../model/layout.h"
#include "../model/sync.h"

enum {
  MLFAB__WORKER_UPDATES = 64, /* in flight: with their members, less than MLFAB__WINDOW */
  MLFAB__WORKER_PULLS = 8,
  MLFAB__WORKER_PACK = 65536, /* the worker copies updates up to this size */
  MLFAB__WORKER_COPY = 8192   /* transports copy bulks up to this size */
};

enum mlfab__part_state {
  MLFAB__PART_NONE,
  MLFAB__PART_QUEUED,
  MLFAB__PART_ANNOUNCED,
  MLFAB__PART_DECIDED
};

/* A stretch of the flat model and the address of its bytes. */
typedef struct mlfab__source {
  uint64_t offset, bytes;
  uint8_t *data;
} mlfab__source;

typedef struct mlfab__part {
  uint8_t state;
  uint8_t empty;   /* withdrawn: sent without its bytes, so that its round counts it */
  uint8_t planned; /* the server decides when it goes, and through which hop */
  uint8_t untold;  /* decided by a window, which has neither delay nor iteration */
  uint8_t adopted; /* the route is from the aggregator's grant: VIA has not arrived yet */
  int32_t code;    /* once decided */
  uint32_t eager, lent;
  uint32_t aggregator; /* worker whose node forwards it, or MLFAB__NO_NODE */
  uint32_t lent_hop;   /* bulks lent to that aggregator's link; `lent`: to the server's */
  uint32_t way;        /* part of the hop token: tells apart bulks that were taken back */
  uint64_t group;      /* number of the newest route; 0: none */
  uint64_t bytes, granted, sent;
  uint64_t delay;   /* once decided: its delay; dropped: the delay that it would have had */
  uint64_t reached; /* dropped: the worker's next iteration at this server */
  uint64_t late;    /* dropped because iteration late - 1 was complete; else 0 */
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
  uint8_t *image;     /* MLFAB__WORKER_PACK bytes, allocated on first use */
  /* of the whole update, ascending: see sparse_push.c; reused by the slot's next update */
  uint8_t *packets;
  uint64_t packet_room, packet_bytes;
  const struct mlfab__push_codec *codec; /* makes and sends its bytes */
  int filtered;                          /* its bytes are packets made by filters */
  uint64_t shape;                        /* filtered: hash of its stretches */
  uint64_t kept; /* free: number of the update whose packets a retry can send again, or 0 */
  uint64_t bytes;
  uint32_t nbufs;
  /* The bytes from here to there are not in the caller's buffers yet; NULL: all are. `stalled`: a server has sent for a part
   * again meanwhile, so the worker announces no part before all bytes are there. */
  const uint8_t *lacks, *lacks_end;
  int stalled;
  uint64_t pull_count; /* pulls finished when it was created */
  int mergeable, withdrawn;
  mlfab__part *parts; /* by server */
  uint64_t version;
  uint64_t started_ns;
} mlfab__outgoing;

/* The filter of a tensor, and what it holds back. */
typedef struct mlfab__sieve {
  mlfab_filter filter;
  uint8_t *residual; /* as large as the tensor; NULL: no filter */
  uint8_t leaves;    /* the filter was removed: the next update includes the residual */
  uint8_t fresh;     /* the current call created the residual */
} mlfab__sieve;

typedef struct mlfab__sparse { /* a sparse update, as the caller passes it */
  uint32_t tensor;
  const uint64_t *indices;
  const void *values;
  uint64_t count;
} mlfab__sparse;

/* The content of a push: buffers, or elements of the tensor that the one buffer names. */
typedef struct mlfab__push_what {
  const mlfab_buf *bufs;
  uint32_t n;
  const mlfab__sparse *sparse; /* or NULL */
} mlfab__push_what;

typedef struct mlfab__worker mlfab__worker;

/* Makes and sends the bytes of an update: as they are (push.c), or as packets (sparse_push.c). */
typedef struct mlfab__push_codec {
  uint32_t flags; /* MLFAB__PUSH_* of its updates */
  /* Makes the bytes, in iteration t (from 1). On failure nothing has changed. */
  int (*encode)(mlfab__worker *worker, mlfab__outgoing *update, const mlfab__push_what *what,
                uint64_t t, mlfab_error *error);
  /* Bytes of a server's part, in whole elements or packets, `most` at most. */
  uint64_t (*bytes)(const mlfab__worker *worker, const mlfab__outgoing *update, uint32_t server,
                    uint64_t most);
  /* The next contiguous bytes at the part's cursor, at most `most` and what a frame holds; may be none. */
  uint64_t (*piece)(const mlfab__worker *worker, const mlfab__outgoing *update, uint32_t server,
                    const mlfab__part *part, uint64_t most, const uint8_t **data_p);
  void (*advance)(const mlfab__worker *worker, const mlfab__outgoing *update, uint32_t server,
                  mlfab__part *part, uint64_t bytes);
  /* Packets only. wanted: 1 if a tensor here has a filter, or a residual of a removed one. free: releases
   * the residuals when the model is dropped. */
  int (*wanted)(const mlfab__worker *worker, const mlfab__source *sources, uint32_t n);
  void (*free)(mlfab__worker *worker);
} mlfab__push_codec;

/* Bytes of a view: view.c. */
typedef struct mlfab__worker_run {
  uint64_t offset, bytes; /* in the model */
  const uint8_t *at;
  const uint8_t *held; /* the memory that a frame was about, at its first run; else NULL */
  uint32_t server;     /* that has told it */
} mlfab__worker_run;

typedef struct mlfab__worker_view {
  uint8_t used, all;
  uint8_t copied;   /* it is pulled into memory of its own */
  uint64_t request; /* once it is out */
  mlfab_view *out;  /* until then */
  mlfab__worker_run *runs;
  uint32_t nruns, run_room, nparts, part_room;
  mlfab_view_part *parts;
  uint8_t *memory;
  uint64_t memory_bytes;
} mlfab__worker_view;

typedef struct mlfab__fetch_part { /* a server's part of a pull */
  uint8_t waiting;
  uint8_t begun;    /* the hop has sent some of it */
  uint32_t hop;     /* worker that forwards it, or MLFAB__NO_NODE: the server sends it */
  uint32_t attempt; /* number of the newest route; frames of older ones are void */
  uint32_t ask; /* of a view: how often it was asked for; what is told of earlier ones is void */
  /* With a cache: */
  uint8_t asked;         /* this pull is the one that asks */
  uint8_t changed;       /* some of the slice has changed */
  uint32_t slice;        /* the slice that is arriving */
  uint64_t upto, commit; /* end of the bytes that have arrived; their commit */
} mlfab__fetch_part;

/* A pull is about to write these bytes, for the first time or again. */
typedef void mlfab__arrives_fn(void *user, const void *at, uint64_t bytes);

typedef struct mlfab__fetch { /* a pull */
  uint64_t request;           /* 0: free */
  mlfab__source *sources;
  uint32_t nsources, source_room;
  uint32_t flags;           /* MLFAB_PULL_* */
  uint64_t after_seq;       /* smaller numbers are of pushes before the pull */
  mlfab__fetch_part *parts; /* by server */
  uint32_t nwaiting;
  uint64_t version;
  mlfab__arrives_fn *arrives; /* or NULL */
  void *arrives_user;
  mlfab__worker_view *view; /* that this pull makes, or NULL */
} mlfab__fetch;

typedef struct mlfab__stream { /* to a server */
  uint8_t up, dead, define, defined, done_told, done_acked, own_weights;
  uint8_t packets; /* the server accepts packets */
  uint8_t counts;  /* the server counts iterations, even of updates without bytes for it */
  uint8_t guest;   /* the server does not count this worker yet (server/clock.c) */
  uint8_t asked;   /* it has asked to be counted, on this link */
  uint32_t entry;  /* the newest of `entries` that may be answered; 0: none */
  uint8_t changes; /* it has not answered the current change of consistency */
  uint32_t generation;
  uint64_t announced; /* number of our newest update announced to it, on any link */
  uint64_t eager_bytes, eager_used;
  /* Mergeable updates announced and not decided: that ask for no more than APPLIED, and DURABLE ones, which may wait
   * long for a replica. */
  uint32_t small[2];
  uint64_t round;  /* progress of the first update undecided here: see push.c */
  uint64_t taken;  /* updates (members) that this worker knows to be applied there */
  uint32_t term;   /* of the copy that answers: see ../node/node.h, Copies */
  uint32_t epoch;  /* of its layout, from its answer; 0: not told yet */
  uint8_t stopped; /* it has answered STOP */
  /* Growth (reshard.h). absent: it counts for nothing here, because it has no slices and came late, or has gone. */
  uint8_t late, absent;
  uint8_t comes;        /* the move under way will give it its first slices */
  uint32_t cache_epoch; /* epoch of the commits that the cache has of its slices; 0: none */
} mlfab__stream;

/* A copy of the model: see cache.c. A request identifies a pull; requests ascend. */
typedef struct mlfab__cache {
  uint8_t *bytes;    /* NULL: no tags */
  uint64_t *commits; /* by slice: the copy's commit, 0: none */
  uint64_t *brought; /* by slice: the last pull that changed it ... */
  uint64_t *before;  /* ... and the last other one */
  uint64_t *written; /* by tensor: the last pull that copied it to buffers */
} mlfab__cache;

/* a change of consistency that some servers have not answered */
typedef struct mlfab__sync_change {
  uint64_t request; /* 0: none */
  mlfab__sync_ask ask;
  int all; /* for all servers */
  uint32_t nwaiting;
  int32_t code; /* of the first server that refused */
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
  int late;         /* the move is over; adopt its layout when the servers have stopped */
  uint64_t last;    /* all updates up to this one are decided everywhere before FROZEN */
  uint32_t *owners; /* owners and epoch of the last RESUME */
  uint32_t nowners, epoch;
} mlfab__pause;

typedef struct mlfab__resize { /* mlfab_set_servers under way */
  uint64_t request;            /* 0: none */
  uint64_t ask, timeout_ns;
  uint32_t *servers;
  uint32_t n;
} mlfab__resize;

/* The functions that lead the worker through a move of slices, if attached: they pause the worker by means
 * of `pause`. `decided`: while draining, a server may have decided something. */
typedef struct mlfab__worker_mover {
  void (*hello)(mlfab__worker *worker, uint32_t server, const mlfab__hello_ack *ack,
                uint64_t now_ns);
  void (*dead)(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
  /* 1 if the frame belongs to it. */
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
  mlfab__port hop; /* to aggregators, by the rank of their worker: `ready` opens a missing link */
  mlfab_stats *stats;
  mlfab__requests *requests;
  uint32_t rank, servers;
  mlfab__tensor_info *tensors; /* as added */
  uint32_t ntensors, tensor_room;
  uint8_t *table; /* encoded for DEFINE */
  mlfab__define define;
  mlfab__layout layout;
  int stands;   /* every server has the model */
  int restores; /* worker 0: the model is to begin as a checkpoint, so no first weights are sent */
  uint64_t restored, restored_version; /* the checkpoint that it began as, or 0 */
  int enters;                          /* it has the model, and asks the servers to count it */
  uint8_t apart;  /* it asks them not to count it, for these reasons: see ../coll/membership.h */
  uint8_t levels; /* while it enters: its number is `level`, and its whole updates */
  /* debt: so many next whole updates belong to closed rounds. Its number is level + wholes + debt, if it has a level. */
  uint64_t level, debt;
  uint32_t entries; /* how often it has asked a server to count it */
  int done;         /* finish was called: no more data */
  uint64_t model_request, join_request;
  uint64_t model_pull; /* the pull inside model_start, or 0 */
  mlfab_buf *model_bufs;
  uint32_t nmodel_bufs;
  mlfab__stream *streams;
  mlfab__outgoing updates[MLFAB__WORKER_UPDATES];
  uint8_t order[MLFAB__WORKER_UPDATES]; /* slots, ascending by number */
  uint32_t norder;
  mlfab__fetch fetches[MLFAB__WORKER_PULLS];
  mlfab__worker_view views[MLFAB_VIEWS_MAX];
  const mlfab__shm_memory_table *shared; /* memory that processes of the host share, or NULL */
  mlfab__shm_memory *shared_memory;
  mlfab__sync_change change;
  uint32_t founding; /* servers that the fabric begins with */
  uint32_t epoch;    /* of the layout */
  mlfab__pause pause;
  mlfab__resize resize;
  mlfab__cache cache;
  mlfab__sieve *sieves; /* by tensor of the layout, from the first filter on */
  uint32_t nsieves;     /* number of residuals */
  uint64_t *marks;      /* scratch: bitmaps of the elements of an update to send */
  uint64_t mark_room;
  const uint8_t *lacks, *lacks_end; /* the next push lacks these bytes; NULL: none */
  uint64_t next_seq, pull_count;
  uint64_t wholes;               /* updates that end an iteration, here or in a closed round */
  uint64_t *pulled;              /* version by slice */
  int16_t status[MLFAB__WINDOW]; /* by number: outcomes of the last updates */
  mlfab__lists *lists;           /* of the frame that is being encoded */
  uint8_t *came; /* packets of the incoming frame: came_bytes long, allocated on first use */
  size_t came_bytes;
  int due;                          /* something ended or was decided: worker.c does what follows */
  const mlfab__worker_mover *mover; /* or NULL */
  const mlfab__push_codec *packed;  /* from the first filter or sparse update on, or NULL */
  /* Writes the packets of a MODEL frame; NULL if no decoder is attached. Errors: FRAME if they are
   * malformed or of another stretch; MEMORY. */
  int (*unpack)(mlfab__worker *worker, const mlfab__fetch *fetch, const mlfab__model *model,
                const mlfab__frame_in *frame);
};

MLFAB__INTERNAL int mlfab__worker_init(mlfab__worker *worker, mlfab__env *env,
                                       const mlfab_config *config, uint32_t rank,
                                       const mlfab__port *port, const mlfab__port *hop,
                                       mlfab_stats *stats, mlfab__requests *requests);
MLFAB__INTERNAL void mlfab__worker_free(mlfab__worker *worker);
/* Adds the row of a worker (worker_role.c); the node owns *worker_p. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__worker_attach(struct mlfab_node *node, mlfab__worker **worker_p);

/* Errors: PEER_DEAD if this server, or with MLFAB_ALL any server, is dead. */
MLFAB__INTERNAL int mlfab__worker_reaches(const mlfab__worker *worker, uint32_t server,
                                          const char *call, mlfab_error *error);
/* The calls of mlfab.h sections 7 to 9; they fill `error` on failure. */
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
/* *out describes the view when the request has ended. */
MLFAB__INTERNAL int mlfab__worker_pull_view(mlfab__worker *worker, const mlfab_buf *bufs,
                                            uint32_t n, const mlfab_pull_options *options,
                                            mlfab_view *out, uint64_t now_ns,
                                            mlfab_request *request_p, mlfab_error *error);
/* May a push of these buffers begin before all of its bytes are there? The worker must send it from the buffers, and need no
 * pass over all of it before. lacks: the bytes from `from` to `to` are not there yet; NULL: all are. Request 0: of the push that
 * is submitted next (a server in the same node gets its frames before the call returns); take it back after that. The
 * caller runs the node's epilogue. */
MLFAB__INTERNAL int mlfab__push_may_lack(const mlfab__worker *worker, const mlfab_buf *bufs,
                                         uint32_t n, const mlfab_push_options *options);
MLFAB__INTERNAL void mlfab__push_lacks(mlfab__worker *worker, mlfab_request request,
                                       const void *from, const void *to);
/* Calls `fn` whenever the pull writes to its buffers. 0: it cannot tell, because it writes from a cache at its end. */
MLFAB__INTERNAL int mlfab__pull_watch(mlfab__worker *worker, mlfab_request request,
                                      mlfab__arrives_fn *fn, void *user);
/* The cached values of a tensor. */
MLFAB__INTERNAL int mlfab__worker_cached(const mlfab__worker *worker, uint32_t tensor,
                                         const void **data_p, uint64_t *count_p,
                                         mlfab_error *error);
/* self: the worker. */
MLFAB__INTERNAL int mlfab__worker_finish(void *self, uint64_t timeout_ns, uint64_t now_ns,
                                         mlfab_request *request_p, mlfab_error *error);
/* Sends the servers another consistency model; server and tensor may be MLFAB_ALL. */
MLFAB__INTERNAL int mlfab__worker_set_sync(mlfab__worker *worker, const mlfab_sync *sync,
                                           uint32_t server, uint32_t tensor, uint64_t timeout_ns,
                                           uint64_t now_ns, mlfab_request *request_p,
                                           mlfab_error *error);
MLFAB__INTERNAL int mlfab__worker_status(const mlfab__worker *worker, uint64_t seq, int *status_p);
/* Withdraws the work of a request; `code` is CANCELLED or TIMEOUT. */
MLFAB__INTERNAL void mlfab__worker_withdraw(mlfab__worker *worker, mlfab__request *request,
                                            int code, uint64_t now_ns);

/* Has the server decided updates under our number that we never announced to it? Then they are from another
 * process, and what the server reports as applied may be missing from the model. */
MLFAB__INTERNAL int mlfab__worker_usurped(const mlfab__worker *worker, uint32_t server,
                                          uint64_t top);
/* The link to a server stands and it answered HELLO; it is lost; the server is dead. */
MLFAB__INTERNAL void mlfab__worker_hello(mlfab__worker *worker, uint32_t server,
                                         const mlfab__hello_ack *ack, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__worker_lost(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__worker_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
/* No process has had this server's number, or another one has taken it: absent until slices move there. */
MLFAB__INTERNAL void mlfab__worker_vacant(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
/* A move has ended: servers that died meanwhile are missed, or not. */
MLFAB__INTERNAL void mlfab__worker_bury(mlfab__worker *worker, uint64_t now_ns);
/* Counts a late server from now on, or no more; before updates are divided anew. */
MLFAB__INTERNAL void mlfab__worker_count(mlfab__worker *worker, uint32_t server, int counts);
MLFAB__INTERNAL void mlfab__worker_frame(mlfab__worker *worker, uint32_t server,
                                         const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL int mlfab__worker_next(mlfab__worker *worker, uint32_t server,
                                       mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__worker_taken(mlfab__worker *worker, uint32_t server,
                                         const mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__worker_sent(mlfab__worker *worker, uint32_t server, uint64_t token,
                                        uint64_t now_ns);
/* The link to an aggregator is lost: bulks lent to it are the caller's again, and nothing goes there
 * without a new grant. */
MLFAB__INTERNAL void mlfab__worker_hop_lost(mlfab__worker *worker, uint32_t aggregator,
                                            uint64_t now_ns);
/* A frame from an aggregator: HOP_GRANT, HOP_MODEL. */
MLFAB__INTERNAL void mlfab__worker_hop_frame(mlfab__worker *worker, uint32_t aggregator,
                                             const mlfab__frame_in *frame, uint64_t now_ns);
/* next: the next frame with a bulk for it (HOP_CHUNK): 1, or 0. taken: it was sent. sent: its bulk is free. */
MLFAB__INTERNAL int mlfab__worker_hop_next(mlfab__worker *worker, uint32_t aggregator,
                                           mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__worker_hop_taken(mlfab__worker *worker, uint32_t aggregator,
                                             const mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__worker_hop_sent(mlfab__worker *worker, uint32_t aggregator,
                                            uint64_t token, uint64_t now_ns);
/* The address where a pull puts byte `offset` of the model; NULL: nowhere. The pull must have asked for the byte. */
MLFAB__INTERNAL uint8_t *mlfab__pull_into(const mlfab__worker *worker, const mlfab__fetch *fetch,
                                          uint64_t offset);
/* Views: view.c. share: memory in which views may be. begin: a free place, for `out`, of bufs that begin with this tensor. Errors:
 * ARGUMENT, UNSUPPORTED, LIMIT. forget: what this server, or MLFAB_ALL, has told. take: a VIEW frame. Errors: UNSUPPORTED (its
 * bulk is no reference), FRAME, MEMORY. copy: the view becomes a copy: its memory is that of the fetch's sources. Errors: MEMORY.
 * finish: fills `out`. Errors: MEMORY. */
MLFAB__INTERNAL void mlfab__worker_share(mlfab__worker *worker, const mlfab__shm_memory_table *on,
                                         mlfab__shm_memory *memory);
MLFAB__INTERNAL int mlfab__view_begin(mlfab__worker *worker, mlfab_view *out, uint32_t tensor,
                                      mlfab__worker_view **view_p, mlfab_error *error);
MLFAB__INTERNAL void mlfab__view_forget(mlfab__worker *worker, mlfab__worker_view *view,
                                        uint32_t server);
MLFAB__INTERNAL int mlfab__view_take(mlfab__worker *worker, const mlfab__fetch *fetch,
                                     uint32_t server, const mlfab__view *in,
                                     const mlfab__view_run *told, const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__view_copy(mlfab__worker *worker, mlfab__fetch *fetch);
MLFAB__INTERNAL int mlfab__view_finish(mlfab__worker *worker, mlfab__fetch *fetch);
MLFAB__INTERNAL void mlfab__view_drop(mlfab__worker *worker, mlfab__worker_view *view);
/* mlfab_view_release. Errors: ARGUMENT. */
MLFAB__INTERNAL int mlfab__worker_view_release(mlfab__worker *worker, uint64_t id,
                                               const void *parts, mlfab_error *error);
MLFAB__INTERNAL void mlfab__view_free(mlfab__worker *worker);
/* Does an update or a pull use this aggregator? Then the worker wants the link to it. */
MLFAB__INTERNAL int mlfab__worker_hop_wanted(const mlfab__worker *worker, uint32_t aggregator);
/* Number of updates that some server has not decided; one that has not decided the oldest. `server_p` may be NULL. */
MLFAB__INTERNAL uint32_t mlfab__worker_unfinished(const mlfab__worker *worker, uint32_t *server_p);

/* --- between the files of the role, lowest first: sources.c, cache.c, pull.c, push.c (updates), worker.c.
 * The lower ones set `due`; worker.c acts on it once after each event. --- */

/* Resolves buffers to sources, in ascending order; bare: buffers may be NULL. Errors: ARGUMENT, TENSOR,
 * SHAPE, DTYPE, LIMIT, MEMORY. */
MLFAB__INTERNAL int mlfab__worker_sources(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                          int bare, mlfab__source **sources, uint32_t *nsources,
                                          uint32_t *room, mlfab_error *error);
/* The bytes of a buffer that has the size of its tensor, or of the model, and of its elements; 0 where it has another size,
 * there is no such tensor, or the model has no bytes (ghost). Also before the model stands. */
MLFAB__INTERNAL uint64_t mlfab__worker_buf_bytes(const mlfab__worker *worker, const mlfab_buf *buf,
                                                 uint32_t *align_p);
/* The bytes of an element of this tensor; 0: there is no such tensor. */
MLFAB__INTERNAL uint32_t mlfab__worker_element_bytes(const mlfab__worker *worker, uint32_t tensor);
/* Writes the stretches of sources in a server's shard, neighbours joined, to lists->segments. */
MLFAB__INTERNAL uint32_t mlfab__worker_clip(mlfab__worker *worker, uint32_t server,
                                            const mlfab__source *sources, uint32_t n,
                                            uint64_t *bytes_p);
/* sends: may updates and pulls go to this server now? announces: may this update be announced there? */
MLFAB__INTERNAL int mlfab__worker_sends(const mlfab__worker *worker, uint32_t server);
MLFAB__INTERNAL int mlfab__worker_announces(const mlfab__worker *worker, uint32_t server,
                                            uint64_t seq);
/* Does the update end an iteration? */
static inline int mlfab__worker_whole(const mlfab__outgoing *update) {
  return !(update->flags & (MLFAB__PUSH_MORE | MLFAB__PUSH_INIT));
}
/* Number of whole updates below `before` that this server has not decided. */
MLFAB__INTERNAL uint64_t mlfab__worker_ahead(const mlfab__worker *worker, uint32_t server,
                                             uint64_t before);
/* Aligns progress over all servers: moves on those that are behind, and tells those that count. */
MLFAB__INTERNAL void mlfab__push_align(mlfab__worker *worker);
/* The same; the next update has this number at least. */
MLFAB__INTERNAL void mlfab__push_align_to(mlfab__worker *worker, uint64_t least);
/* The number of the next update: how many it has pushed, as rounds count. */
MLFAB__INTERNAL uint64_t mlfab__worker_progress(const mlfab__worker *worker);
/* No server counts this worker from now on; all do from this progress on, which may be too small; do all? */
MLFAB__INTERNAL int mlfab__worker_idle(const mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__worker_mark(const mlfab__worker *worker, mlfab__mark *mark);
MLFAB__INTERNAL void mlfab__worker_stand_apart(mlfab__worker *worker, uint8_t why);
MLFAB__INTERNAL void mlfab__worker_return(mlfab__worker *worker, uint8_t why,
                                          const uint64_t *level);
MLFAB__INTERNAL int mlfab__worker_counted(const mlfab__worker *worker);
/* A server has told this worker's progress there: adopts a larger one, corrects a smaller one. */
MLFAB__INTERNAL void mlfab__push_reached(mlfab__worker *worker, uint32_t server, uint64_t reached);
MLFAB__INTERNAL void mlfab__push_tell(mlfab__worker *worker, uint32_t server);
/* 1 while the server has not decided all updates of this worker. */
MLFAB__INTERNAL int mlfab__push_pending(const mlfab__worker *worker, uint32_t server);
MLFAB__INTERNAL void mlfab__push_acked(mlfab__worker *worker, uint32_t server,
                                       const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__push_granted(mlfab__worker *worker, uint32_t server,
                                         const mlfab__frame_in *frame);
/* VIA: the server names the hop of an update. HOP_GRANT: the aggregator grants bytes. */
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
/* Takes the server's decisions from its window, and starts a new generation with the other updates. */
MLFAB__INTERNAL void mlfab__push_resync(mlfab__worker *worker, uint32_t server, uint32_t generation,
                                        const mlfab__window *window, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__push_lost(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
/* Decides all parts at a dead server. spare: forgets the parts at one that has gone without slices: they had no bytes. */
MLFAB__INTERNAL void mlfab__push_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__push_spare(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
/* A call of push. */
MLFAB__INTERNAL int mlfab__push_start(mlfab__worker *worker, const mlfab__push_what *what,
                                      const mlfab_push_options *given, uint64_t now_ns,
                                      mlfab_request *request_p, mlfab_error *error);
/* The update with the first weights. */
MLFAB__INTERNAL int mlfab__push_first(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                      uint64_t now_ns, mlfab_error *error);
MLFAB__INTERNAL void mlfab__push_withdraw(mlfab__worker *worker, mlfab__request *request, int code,
                                          uint64_t now_ns);
MLFAB__INTERNAL int mlfab__push_next(mlfab__worker *worker, uint32_t server,
                                     mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__push_taken(mlfab__worker *worker, uint32_t server,
                                       const mlfab__frame_out *frame);
/* Withdraws every update without waiting, and frees what depends on the layout. */
MLFAB__INTERNAL void mlfab__push_forget(mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__push_free(mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__pull_view(mlfab__worker *worker, uint32_t server,
                                      const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__pull_model(mlfab__worker *worker, uint32_t server,
                                       const mlfab__frame_in *frame, uint64_t now_ns);
/* PULL_VIA: the server names the hop of a pull. HOP_MODEL: the hop forwards bytes. */
MLFAB__INTERNAL void mlfab__pull_rerouted(mlfab__worker *worker, uint32_t server,
                                          const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__pull_hop_model(mlfab__worker *worker, uint32_t aggregator,
                                           const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__pull_hop_lost(mlfab__worker *worker, uint32_t aggregator);
MLFAB__INTERNAL int mlfab__pull_hop_wanted(const mlfab__worker *worker, uint32_t aggregator);
MLFAB__INTERNAL void mlfab__pull_failed(mlfab__worker *worker, uint32_t server,
                                        const mlfab__frame_in *frame, uint64_t now_ns);
/* Repeats the pulls after this update: the server will never hear of it, or the updates before them have
 * other numbers now. */
MLFAB__INTERNAL void mlfab__pull_renumber(mlfab__worker *worker, uint32_t server, uint64_t seq);
/* Repeats pulls on a new link. */
MLFAB__INTERNAL void mlfab__pull_again(mlfab__worker *worker, uint32_t server);
MLFAB__INTERNAL void mlfab__pull_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__pull_withdraw(mlfab__worker *worker, mlfab__request *request, int code,
                                          uint64_t now_ns);
/* The model is dropped. */
MLFAB__INTERNAL void mlfab__pull_forget(mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__pull_free(mlfab__worker *worker);
/* The layout has changed: divides undecided updates and pulls anew; sends a change of consistency to all
 * servers again. */
MLFAB__INTERNAL void mlfab__push_recut(mlfab__worker *worker, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__pull_recut(mlfab__worker *worker, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__worker_change_again(mlfab__worker *worker);
/* Ends an update: servers that have not decided it never will. */
MLFAB__INTERNAL void mlfab__push_lose(mlfab__worker *worker, mlfab__outgoing *update,
                                      uint64_t now_ns);
/* Opens the cache of a model with version tags; else does nothing. Errors: MEMORY (then free it). */
MLFAB__INTERNAL int mlfab__cache_open(mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__cache_free(mlfab__worker *worker);
/* Voids the copies of a server's slices, or of all: they keep their bytes, and the next pull fetches them again. */
MLFAB__INTERNAL void mlfab__cache_void(mlfab__worker *worker, uint32_t server);
/* Fills the scratch lists with the request of a pull to the server. */
MLFAB__INTERNAL void mlfab__cache_ask(mlfab__worker *worker, uint32_t server,
                                      const mlfab__fetch *fetch, mlfab__pull *pull);
/* A MODEL frame of a pull. begin: before its bytes are written (FRAME: it does not continue the frame
 * before); taken: after; `changed`: it had bytes. */
MLFAB__INTERNAL int mlfab__cache_begin(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                                       const mlfab__model *model);
MLFAB__INTERNAL void mlfab__cache_taken(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                                        const mlfab__model *model, int changed);
/* A pull is complete. */
MLFAB__INTERNAL void mlfab__cache_done(mlfab__worker *worker, const mlfab__fetch *fetch);

#endif
