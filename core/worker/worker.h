/* worker.h - the worker role: sends updates, gets the model.
 *
 * The worker has one stream of updates to each server, in the order of their numbers. The states of an update's
 * part at a server:
 *
 *    QUEUED --(announced, with as many bytes as there is credit)--> ANNOUNCED --(PUSH_ACK)--> DECIDED
 *       ^                                                             |
 *       +--------------(RESEND, or HELLO on a new link)---------------+
 *
 * In a fabric with a scheduler the worker announces a large part without bytes. Its route is the server's link, granted by
 * the server, until `routes` (../sched/hops.h) takes another.
 *
 * Invariants. (1) An update keeps its number, and its bytes until every server has decided or it is withdrawn. (2)
 * The worker announces parts in the order of their numbers. (3) It merges nothing into an announced update. (4) It
 * does not return a buffer to the caller while a transport has it. (5) The worker sends only bytes that the receiver
 * granted. (6) While an update lacks bytes (`lacks`), because they are still being copied to its buffers, the worker sends none of
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
#include "../model/layout.h"
#include "../model/sync.h"

enum {
  MLFAB__WORKER_UPDATES = 64, /* in flight: with their members, less than MLFAB__WINDOW */
  MLFAB__WORKER_PULLS = 8,
  MLFAB__WORKER_PACK = 65536, /* the worker copies updates up to this size */
  MLFAB__WORKER_COPY = 8192   /* transports copy bulks up to this size */
};

/* The frame that a worker yields, in its note[0]. */
enum { MLFAB__NOTE_CHUNK, MLFAB__NOTE_PUSH, MLFAB__NOTE_DEFINE };

enum mlfab__part_state {
  MLFAB__PART_NONE,
  MLFAB__PART_DECIDED,
  MLFAB__PART_QUEUED, /* the server has not decided parts from here on */
  MLFAB__PART_ANNOUNCED
};

/* A stretch of the flat model and the address of its bytes. */
typedef struct mlfab__source {
  uint64_t offset, bytes;
  uint8_t *data;
} mlfab__source;

typedef struct mlfab__part {
  uint8_t state;
  uint8_t empty;   /* withdrawn: sent without its bytes, so that its round counts it */
  uint8_t planned; /* the server decides when it goes, and by which route */
  uint8_t untold;  /* decided by a window, which has neither delay nor iteration */
  int32_t code;    /* once decided */
  uint32_t eager, lent;
  uint64_t bytes, granted, sent;
  uint64_t delay;   /* once decided: its delay; dropped: the delay that it would have had */
  uint64_t reached; /* dropped: the worker's next iteration at this server */
  uint64_t missed;  /* dropped because iteration missed - 1 was complete; else 0 */
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
  uint64_t *versions;                    /* pulled, by slice */
  uint8_t *image;                        /* MLFAB__WORKER_PACK bytes, allocated on first use */
  const struct mlfab__push_codec *codec; /* makes and sends its bytes */
  uint64_t kept; /* free: number of the update whose bytes a retry can send again, or 0 */
  uint64_t bytes;
  uint32_t nbufs;
  /* The bytes from here to there are not in the caller's buffers yet; NULL: all are. `stalled`: a server has sent for a part
   * again meanwhile, so the worker announces no part before all bytes are there. */
  const uint8_t *lacks, *lacks_end;
  int stalled;
  uint64_t pull_count; /* pulls finished when it was created */
  int mergeable, withdrawn;
  int packed;         /* its bytes are in `image` */
  int durable;        /* it asks for DURABLE */
  mlfab__part *parts; /* by server */
  uint64_t version;
  uint64_t started_ns;
} mlfab__outgoing;

/* The content of a push: buffers, or elements of the tensor that the one buffer names. */
typedef struct mlfab__push_what {
  const mlfab_buf *bufs;
  uint32_t n;
  const struct mlfab__sparse *sparse; /* or NULL */
} mlfab__push_what;

typedef struct mlfab__worker mlfab__worker;

/* Makes and sends the bytes of an update: as they are (push.c), or as packets (sparse_push.c). */
typedef struct mlfab__push_codec {
  uint32_t flags; /* MLFAB__PUSH_* of its updates */
  int keeps;      /* a retry has to send the same bytes */
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
} mlfab__push_codec;

typedef struct mlfab__fetch_part { /* a server's part of a pull */
  uint8_t waiting;
  uint8_t asked; /* the server has been asked; with a cache, one pull asks at a time */
} mlfab__fetch_part;

typedef struct mlfab__fetch { /* a pull */
  uint64_t request;           /* 0: free */
  mlfab__source *sources;
  uint32_t nsources, source_room;
  uint32_t flags;           /* MLFAB_PULL_* */
  uint64_t after_seq;       /* smaller numbers are of pushes before the pull */
  mlfab__fetch_part *parts; /* by server */
  uint32_t nwaiting;
  uint64_t version;
  /* It is about to write this stretch, for the first time or again: feed.c. Or NULL. */
  void (*arrives)(const struct mlfab__fetch *fetch, uint64_t offset, uint64_t bytes);
  void (*arrives_fn)(void *user, const void *at, uint64_t bytes);
  void *arrives_user;
  struct mlfab__worker_view *view;         /* of the viewer: that this pull makes; or NULL */
  const struct mlfab__worker_cache *cache; /* it goes through the cache of the model; or NULL */
} mlfab__fetch;

/* How pulls fetch changes only, into a copy of the model: ../sparse/cache.c. */
typedef struct mlfab__worker_cache {
  /* Fills the scratch lists with the request of a pull to the server. */
  void (*ask)(mlfab__worker *worker, uint32_t server, const mlfab__fetch *fetch, mlfab__pull *pull);
  /* Asks the server for the next pull, unless one is under way there. */
  void (*turn)(mlfab__worker *worker, uint32_t server);
  /* A pull is complete. */
  void (*done)(mlfab__worker *worker, const mlfab__fetch *fetch);
  /* The copies of a server's slices, or of all, are void: the next pull fetches them again. */
  void (*lost)(mlfab__worker *worker, uint32_t server);
} mlfab__worker_cache;

/* Packets, filters and the cache, if the sparse group is attached. */
typedef struct mlfab__worker_sparse {
  /* A model's options of tags, 16-bit parameters and parameter filters. Errors: CONFIG, UNSUPPORTED. */
  int (*check)(const mlfab_model_options *options, const mlfab__layout *layout, mlfab_error *error);
  /* open: sets worker->cache if the model has version tags. Errors: MEMORY. drop: the model is dropped; the
   * memory of its filters and cache is freed. free: all other memory, too. */
  int (*open)(mlfab__worker *worker);
  void (*drop)(mlfab__worker *worker);
  void (*free)(mlfab__worker *worker);
  /* Has a tensor of the buffer a filter, or a residual of a removed one? */
  int (*sifts)(const mlfab__worker *worker, const mlfab_buf *buf);
  /* Sets the codec of an update that has filtered tensors or is sparse; else leaves it. *again_p: it sends
   * the kept bytes. Errors: ARGUMENT, STATE. */
  int (*choose)(mlfab__worker *worker, mlfab__outgoing *update, const mlfab__push_what *what,
                uint64_t retry_seq, int *again_p, mlfab_error *error);
  double (*norm2)(const mlfab__worker *worker, const struct mlfab__sparse *sparse);
  /* Takes in the bytes of a MODEL frame, if they are packets or the pull goes through the cache. Errors:
   * FRAME if they are malformed or of another stretch; MEMORY. */
  int (*take)(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
              const mlfab__model *model, const mlfab__frame_in *frame);
} mlfab__worker_sparse;

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
  uint64_t round; /* progress of the first update undecided here: see push.c */
  uint64_t taken; /* updates (members) that this worker knows to be applied there */
  uint32_t term;  /* of the copy that answers: see ../node/copies.h */
  uint32_t epoch; /* of its layout, from its answer; 0: not told yet */
  /* It counts for nothing here, because it has no slices, and is an added server or has gone: reshard.h. */
  uint8_t absent;
} mlfab__stream;

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

/* Moves of slices, and servers that come later, if the reshard group is attached. */
typedef struct mlfab__worker_mover {
  /* The owners of slices, if slices have moved before there was a model. */
  void (*assign)(const mlfab__worker *worker, mlfab__layout *layout);
  void (*hello)(mlfab__worker *worker, uint32_t server, const mlfab__hello_ack *ack,
                uint64_t now_ns);
  /* The server is dead. spares: 1 if nobody misses it. dead: nothing waits for it any more. */
  int (*spares)(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
  void (*dead)(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
  /* No process has had this server's number, or another one has taken it: it is absent until slices move there. */
  void (*vacant)(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
  /* 1 if the frame belongs to it. */
  int (*frame)(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame,
               uint64_t now_ns);
  /* While the worker does not announce all: a server may have decided something. */
  void (*decided)(mlfab__worker *worker, uint64_t now_ns);
  void (*withdraw)(mlfab__worker *worker, mlfab__request *request, int code, uint64_t now_ns);
  void (*free)(mlfab__worker *worker);
} mlfab__worker_mover;

/* Pulls that are read in the servers' memory, if the lend group is attached (core/lend/view.c). */
typedef struct mlfab__worker_viewer {
  /* The pull makes a view: fetch->view, and no source has memory. `tensor`: of its first buffer. Errors: ARGUMENT,
   * UNSUPPORTED, LIMIT, MEMORY. drop: there is none any more. */
  int (*begin)(mlfab__worker *worker, mlfab__fetch *fetch, mlfab_view *out, uint32_t flags,
               uint32_t tensor, mlfab_error *error);
  void (*drop)(mlfab__worker *worker, mlfab__fetch *fetch);
  /* Of a pull with a view. maps: servers answer with VIEW frames: it is no copy. ask: fills in this question. */
  int (*maps)(const mlfab__fetch *fetch);
  void (*ask)(const mlfab__fetch *fetch, uint32_t server, mlfab__pull *pull);
  /* forget: what this server, or MLFAB_ALL, has told. refused: it has none: the view becomes a copy. */
  void (*forget)(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server);
  void (*refused)(mlfab__worker *worker, mlfab__fetch *fetch, uint64_t now_ns);
  /* All has come: the caller gets the view. Errors: MEMORY. */
  int (*finish)(mlfab__worker *worker, mlfab__fetch *fetch);
  /* 1 if the frame belongs to it. */
  int (*frame)(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame,
               uint64_t now_ns);
  void (*free)(mlfab__worker *worker);
} mlfab__worker_viewer;
/* Routes other than the server's link, if a scheduler may choose them: parts go and come through other workers' nodes. */
typedef struct mlfab__worker_routes {
  /* A server's frame: 1 if it is about routes. */
  int (*frame)(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame);
  /* An update. plan: sets `planned` of its parts. parts: number of servers that tell the scheduler about it. A server that has
   * decided it does not. */
  void (*plan)(const mlfab__worker *worker, mlfab__outgoing *update);
  uint32_t (*parts)(const mlfab__worker *worker, const mlfab__outgoing *update);
  /* A part of an update. direct: do granted bytes go by the server's link? by: the worker that forwards the part, or
   * MLFAB__NO_NODE. lent: bulks on the hop's link. leave: takes them back; the part goes by the server's link from now on. */
  int (*direct)(mlfab__worker *worker, mlfab__outgoing *update, uint32_t server);
  uint32_t (*by)(const mlfab__worker *worker, const mlfab__outgoing *update, uint32_t server);
  uint32_t (*lent)(const mlfab__worker *worker, const mlfab__outgoing *update, uint32_t server);
  void (*leave)(mlfab__worker *worker, const mlfab__outgoing *update, uint32_t server);
  uint32_t (*chunk)(const mlfab__worker *worker, uint32_t hop); /* the most bulk of a frame */
  /* A part of a pull: the same. */
  uint32_t (*pull_by)(const mlfab__worker *worker, const mlfab__fetch *fetch, uint32_t server);
  void (*pull_leave)(mlfab__worker *worker, const mlfab__fetch *fetch, uint32_t server);
} mlfab__worker_routes;

struct mlfab__worker {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port port;
  mlfab__worker_routes *routes; /* or NULL */
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
  /* DEFINE_ACK: takes over that checkpoint and its slices. Errors, with a text: MEMORY, CHECKPOINT. NULL: left out. */
  int (*began)(mlfab__worker *worker, uint32_t server, const mlfab__define_ack *ack, char *text,
               size_t room);
  int enters;     /* it has the model, and asks the servers to count it */
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
  /* Slots, ascending by number. An update that ends leaves it: its number is 0 then. */
  uint8_t order[MLFAB__WORKER_UPDATES];
  uint32_t norder;
  mlfab__fetch fetches[MLFAB__WORKER_PULLS];
  const mlfab__worker_viewer *viewer; /* or NULL */
  struct mlfab__worker_views *views;  /* its state */
  mlfab__sync_change change;
  uint32_t founding;  /* servers that the fabric begins with */
  uint32_t epoch;     /* of the layout */
  uint64_t announces; /* the last update that may be announced; MLFAB__NEVER: all may */
  const uint8_t *lacks, *lacks_end; /* the next push lacks these bytes; NULL: none */
  /* The bytes of a piece, in whole elements, that may be sent of an update that lacks some (feed.c). */
  uint64_t (*has)(const mlfab__outgoing *update, const mlfab__part *part, const uint8_t *data,
                  uint64_t bytes);
  uint64_t next_seq, pull_count;
  uint64_t wholes;                  /* updates that end an iteration, here or in a closed round */
  uint64_t *pulled;                 /* version by slice */
  int16_t status[MLFAB__WINDOW];    /* by number: outcomes of the last updates */
  mlfab__lists *lists;              /* of the frame that is being encoded */
  int due;                          /* something ended or was decided: worker.c does what follows */
  const mlfab__worker_mover *mover; /* or NULL */
  struct mlfab__moving *moving;     /* its state */
  /* HELLO_ACK: is it of another copy of the server than the last one? NULL: servers have no replicas. */
  int (*copies)(mlfab__worker *worker, uint32_t server, const mlfab__hello_ack *ack);
  const mlfab__worker_sparse *sparse;    /* or NULL */
  struct mlfab__worker_packets *packets; /* its state */
  const mlfab__worker_cache *cache;      /* the model has version tags; else NULL */
};

/* Adds the row of a worker; the node owns *worker_p. Errors: MEMORY. */
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
/* self: the worker. */
MLFAB__INTERNAL int mlfab__worker_finish(void *self, uint64_t timeout_ns, uint64_t now_ns,
                                         mlfab_request *request_p, mlfab_error *error);
/* Sends the servers another consistency model; server may be MLFAB_ALL. */
MLFAB__INTERNAL int mlfab__worker_set_sync(mlfab__worker *worker, const mlfab_sync *sync,
                                           uint32_t server, uint64_t timeout_ns, uint64_t now_ns,
                                           mlfab_request *request_p, mlfab_error *error);
MLFAB__INTERNAL int mlfab__worker_status(const mlfab__worker *worker, uint64_t seq, int *status_p);

/* The server is dead. */
MLFAB__INTERNAL void mlfab__worker_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
/* Nobody misses this server: it has no slices and has gone. It counts for nothing from now on, and parts of updates there,
 * which have no bytes, are forgotten. */
MLFAB__INTERNAL void mlfab__worker_spare(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
/* The server is dead: calls that wait for it fail. */
MLFAB__INTERNAL void mlfab__worker_bereave(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
/* The change of consistency does not wait for this server any more. */
MLFAB__INTERNAL void mlfab__worker_change_spare(mlfab__worker *worker, uint32_t server,
                                                uint64_t now_ns);
MLFAB__INTERNAL void mlfab__worker_advance(mlfab__worker *worker, uint64_t now_ns);
/* The address where a pull puts byte `offset` of the model; NULL: nowhere. The pull must have asked for the byte. */
MLFAB__INTERNAL uint8_t *mlfab__pull_into(const mlfab__fetch *fetch, uint64_t offset);
/* Writes a stretch of the model to the buffers of a pull that have some of it. */
MLFAB__INTERNAL void mlfab__pull_write(const mlfab__worker *worker, const mlfab__fetch *fetch,
                                       uint64_t offset, const uint8_t *from, uint64_t bytes);
/* Asks a server for its part of a pull. */
MLFAB__INTERNAL void mlfab__pull_ask(mlfab__worker *worker, uint32_t server, mlfab__fetch *fetch);
/* Number of updates that some server has not decided; one that has not decided the oldest. `server_p` may be NULL. */
MLFAB__INTERNAL uint32_t mlfab__worker_unfinished(const mlfab__worker *worker, uint32_t *server_p);

/* --- between the files of the role, lowest first: sources.c, pull.c, push.c (updates), worker.c.
 * The lower ones set `due`; worker.c acts on it once after each event. --- */

/* Resolves buffers to sources, in ascending order; bare: buffers may be NULL. Errors: ARGUMENT, TENSOR,
 * SHAPE, DTYPE, LIMIT, MEMORY. */
MLFAB__INTERNAL int mlfab__worker_sources(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                          int bare, mlfab__source **sources, uint32_t *nsources,
                                          uint32_t *room, mlfab_error *error);
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
MLFAB__INTERNAL void mlfab__push_sent(mlfab__worker *worker, uint32_t server, uint64_t token,
                                      uint64_t now_ns);
/* token: below 2^32. settle: ends the update once it is over. bulk: the next granted bytes of a part, for a frame on this
 * port's link; 0: no packet is granted whole. rewind: nothing of the part was sent, or the sent bytes are void. */
MLFAB__INTERNAL uint64_t mlfab__push_token(const mlfab__worker *worker,
                                           const mlfab__outgoing *update);
MLFAB__INTERNAL void mlfab__push_settle(mlfab__worker *worker, mlfab__outgoing *update,
                                        uint64_t now_ns);
MLFAB__INTERNAL int mlfab__push_bulk(const mlfab__worker *worker, const mlfab__port *port,
                                     uint32_t peer, const mlfab__outgoing *update, uint32_t server,
                                     uint64_t token, mlfab__frame_out *frame);
static inline void mlfab__push_rewind(mlfab__part *part) {
  part->granted = part->sent = part->in_source = 0;
  part->source = 0;
}
/* The size of a chunk of this part. */
MLFAB__INTERNAL uint32_t mlfab__push_chunk_bytes(const mlfab__worker *worker,
                                                 const mlfab__outgoing *update, uint32_t server);
/* Takes the server's decisions from its window, and starts a new generation with the other updates. */
MLFAB__INTERNAL void mlfab__push_resync(mlfab__worker *worker, uint32_t server, uint32_t generation,
                                        const mlfab__window *window, uint64_t now_ns);
/* The link is lost. state: of undecided parts there from now on. ANNOUNCED: unchanged; DECIDED: the server is dead; NONE:
 * nobody misses it, and its parts are forgotten. */
MLFAB__INTERNAL void mlfab__push_lost(mlfab__worker *worker, uint32_t server,
                                      enum mlfab__part_state state, uint64_t now_ns);
/* begin: determines the servers that get a part. After slices have moved it is called again: bulks still lent come back under the
 * same token, and a late grant of an aggregator has an old number. end: call it when the update's bytes are known. */
MLFAB__INTERNAL int mlfab__push_parts_begin(mlfab__worker *worker, mlfab__outgoing *update,
                                            mlfab_error *error);
MLFAB__INTERNAL void mlfab__push_parts_end(mlfab__worker *worker, mlfab__outgoing *update);
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
/* A call of pull; out: the view that it makes, or NULL. */
MLFAB__INTERNAL int mlfab__pull_open(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                     const mlfab_pull_options *given, mlfab_view *out,
                                     uint64_t now_ns, mlfab_request *request_p, mlfab_error *error);
/* find: the pull of a request, or NULL. begin: asks this server. part_done: a server's part is complete. stop: ends it, and
 * cancels it at the servers that still have to answer. Returns its request, for the caller to finish. */
MLFAB__INTERNAL mlfab__fetch *mlfab__pull_find(mlfab__worker *worker, uint64_t request);
MLFAB__INTERNAL void mlfab__pull_begin(mlfab__worker *worker, uint32_t server, mlfab__fetch *fetch);
MLFAB__INTERNAL void mlfab__pull_part_done(mlfab__worker *worker, mlfab__fetch *fetch,
                                           uint32_t server, uint64_t now_ns);
MLFAB__INTERNAL mlfab__request *mlfab__pull_stop(mlfab__worker *worker, mlfab__fetch *fetch);
MLFAB__INTERNAL void mlfab__pull_model(mlfab__worker *worker, uint32_t server,
                                       const mlfab__frame_in *frame, uint64_t now_ns);
/* Takes in a MODEL frame from the server or a hop. Errors: FRAME if it does not match the pull; MEMORY. */
MLFAB__INTERNAL int mlfab__pull_take(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                                     const mlfab__model *model, const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__pull_failed(mlfab__worker *worker, uint32_t server,
                                        const mlfab__frame_in *frame, uint64_t now_ns);
/* Repeats the pulls after this update, or all: the server will never hear of it, or the updates before them have other
 * numbers now, or the link is new. */
MLFAB__INTERNAL void mlfab__pull_again(mlfab__worker *worker, uint32_t server, uint64_t seq);
MLFAB__INTERNAL void mlfab__pull_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__pull_withdraw(mlfab__worker *worker, mlfab__request *request, int code,
                                          uint64_t now_ns);
/* The model is dropped. */
MLFAB__INTERNAL void mlfab__pull_forget(mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__pull_free(mlfab__worker *worker);
/* Decides an undecided part. */
MLFAB__INTERNAL void mlfab__push_decide(mlfab__worker *worker, mlfab__outgoing *update,
                                        uint32_t server, int code, uint64_t now_ns);

#endif
