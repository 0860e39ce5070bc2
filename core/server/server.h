/* server.h - the server role: takes updates in, applies them, answers pulls. Layer 4.
 *
 * Updates of all workers stand in one queue, in the order of their announcements. The first that
 * may be taken in is the head. Its bytes are added as they arrive into `next` blocks; commit swaps
 * the blocks, a refusal discards them. Others may send what they have credit for, which is staged
 * raw:
 *
 *    QUEUED --(first that may be taken in)--> HEAD --(all bytes came, all finite)--> committed: APPLIED
 *      |                                       |                 \--> APPLYING (rules, rounds: a few
 *      |                                       |                      blocks a tick) --> APPLIED
 *      |                                       +--(NaN, callback)--> refused: NOT_APPLIED
 *      |                                       +--(no byte for 3 heartbeats)--> revoked: RESEND
 *      +--(link lost, worker dead)--> forgotten; a reconnect says it again
 *
 * With a scheduler, large updates and pulls wait beside the queue until a plan places them:
 *
 *    UNPLACED --(PLAN, or no scheduler any more)--> QUEUED, alone or as a member of a group
 *                                                     \--(too late at that place)--> DROPPED at its turn
 *
 * A group is a run of the queue whose bytes come added up, from an aggregator, and are taken in as
 * the bytes of its first member; one commit decides all of them. It has a number; whatever spoils
 * it (a member dead or not finite, the aggregator gone) ends the number, and what is left of it
 * gets another and is sent again. A worker's small updates behind an unplaced one wait with it.
 * With the bound delay < tau_max: an update gets its place only where its delay is below the bound,
 * and its delay cannot grow afterwards, because nothing is put before it.
 *
 * Invariants. (1) An update is decided exactly once, and the decisions of one worker's updates come
 * in the order of their numbers. (2) `next` blocks exist only for the head. (3) Whatever is staged
 * was credited: eager bytes in the worker's arena, one update's more in the stage. (4) With rounds,
 * the sum of the open round holds whole updates only, at most one complete one a worker. (5) A pull
 * pins one slice at a time.
 *
 * Source: MLfabric §2, §4 Table 1, §5.1 (one order of commits); FluentPS Alg. 1 (server side). */
#ifndef MLFAB__SERVER_H
#define MLFAB__SERVER_H

#include "../model/windows.h"
#include "lazy.h"
#include "../base/meter.h"
#include "../node/role.h"
#include "../model/store.h"
#include "../model/sync.h"

enum {
  MLFAB__SERVER_PULLS = 8,
  MLFAB__SERVER_SPREADS = 4, /* slots more, for pulls that an aggregator hands on */
  MLFAB__SERVER_SLOTS = MLFAB__SERVER_PULLS + MLFAB__SERVER_SPREADS,
  MLFAB__SERVER_SENDS = 16,
  MLFAB__SERVER_QUEUED = 64,
  MLFAB__SERVER_STAGES = 16, /* updates that may come before their turn */
  MLFAB__CLOCKS = 8,         /* consistency models at a time */
  MLFAB__SERVER_CHANGES = 8  /* changes of them that wait */
};
#define MLFAB__PROGRESS_MAX ((uint64_t)1 << 62)

/* An update on its way in. Kept and reused, so that steady state allocates nothing. */
typedef struct mlfab__incoming {
  struct mlfab__incoming *previous, *next; /* the queue, or the free list by next */
  uint32_t worker;
  const struct mlfab__apply_codec *codec;
  mlfab__push push;
  mlfab__segment *segments;
  uint64_t *versions;
  uint32_t segment_room, version_room;
  uint64_t received, consumed, granted; /* of push.bytes */
  uint64_t arena_at;                    /* where its eager bytes are staged */
  uint32_t segment;                     /* of `consumed`: segment, and bytes of it */
  uint64_t in_segment;
  uint64_t last_byte_ns;
  uint32_t stage;         /* its stage plus one, or 0 */
  int unplaced;           /* stands in the list of those that wait for a plan */
  int announced;          /* the scheduler knows of it */
  int counted;            /* its members are in `ahead` of its slices */
  uint64_t group;         /* number of its group, or 0 */
  uint32_t waits;         /* members that its group has lost because they were silent */
  uint32_t aggregator;    /* of the group */
  double aggregator_rate; /* in-link of its host; 0 or less: not known */
  uint64_t delay;         /* that it had when it got its place, or would have had */
  uint64_t shape;         /* hash of its segments */
  int withdrawn;          /* to be decided as not applied at its turn */
  int refused;            /* MLFAB_ERR_* once something is wrong with it */
  double norm2;           /* of what was taken in, where a model looks at it */
  uint64_t packed_end;    /* of the packets that came: where in the model the last one ends */
  uint64_t own_bytes;     /* its push.bytes, while that are those of its group's packed sum; or 0 */
  int all_released;       /* its aggregator may forward all of that sum, however long it is */
} mlfab__incoming;

/* What a model makes of an update's bytes in a slice: see apply.c. */
enum mlfab__apply_mode {
  MLFAB__APPLY_INIT,
  MLFAB__APPLY_DIRECT,
  MLFAB__APPLY_STAGE,
  MLFAB__APPLY_SUM
};

/* Why a pull does not go: it waits for a plan, for its turn. */
enum mlfab__pull_held { MLFAB__PULL_GOES = 0, MLFAB__PULL_FOR_PLAN, MLFAB__PULL_FOR_TURN };

typedef struct mlfab__server_pull {
  uint64_t request; /* 0: free */
  uint32_t worker;
  uint64_t opened;                            /* ascending over the server */
  struct mlfab__server_pull *next, *previous; /* of those that are open, oldest first */
  uint64_t progress;
  mlfab__segment *segments;
  uint32_t segment_room, segments_used;
  uint32_t segment; /* cursor */
  uint64_t in_segment;
  uint32_t *pinned; /* blocks of the pinned slice, one a position, positions_per_slice of them */
  uint32_t slice;   /* pinned, or MLFAB__NO_BLOCK */
  uint64_t version, commit;
  int cached;       /* the reader's cache counts in our epoch ... */
  uint64_t *sinces; /* ... and has these commits of the slices touched, by local number */
  uint32_t since_room;
  uint32_t restart_segment; /* where the pinned slice began */
  uint64_t restart_in_segment;
  uint64_t progress_ns;
  int waiting;        /* for the pull condition of a clock ... */
  uint32_t clock;     /* ... this one */
  uint32_t passed;    /* clocks whose condition held, as bits */
  double draw;        /* of the models that have chance in them */
  uint64_t tag;       /* in the clocks' buffers */
  int held;           /* mlfab__pull_held */
  uint64_t bytes;     /* of all its segments */
  uint64_t expect_ns; /* when its distributor should have handed it on; 0: not known yet */
  uint64_t place;     /* among the pulls that were placed by plans; 0: not placed */
  uint64_t spread;    /* the request that it is handed on from, or 0: answered directly */
  uint32_t aggregator;
  uint32_t
      attempt; /* its newest way; ascending over the server. Frames of older ones are ignored at the worker */
} mlfab__server_pull;

typedef struct mlfab__server_peer {
  uint8_t connected, dead, left, done, hand;
  uint32_t contributed; /* clocks whose open round has something of it, as bits */
  uint64_t pushed;      /* its progress, as far as it is known here: see clock.c */
  uint64_t decided;     /* the same right behind its last update that was decided here */
  uint64_t changed;     /* the last change of a consistency model that it was answered */
  uint32_t stopped;     /* the attempt to move slices that it has stopped for, or 0 */
  int drained;          /* nothing more of it comes before they have moved */
  int put_off;          /* it was told that they are on the move: it is to hear when that is over */
  double significance;  /* |g| of its last update here; negative: not known */
  uint32_t incarnation, generation;
  uint32_t queued;
  uint32_t unplaced;      /* of those: wait for a plan */
  uint64_t walked;        /* the last look at the unplaced that came by one of its */
  uint64_t last_queued;   /* newest member in the queue */
  uint64_t last_progress; /* its round */
  uint8_t *arena;         /* a ring of twice the credit, so that every update is contiguous */
  uint64_t arena_head, arena_tail, arena_bytes;
  uint64_t eager_used;
  uint32_t accumulators; /* of the aggregator there */
  uint64_t host;
  double link_in, link_out; /* of its host as it said last; negative: not known */
  mlfab__server_pull pulls[MLFAB__SERVER_PULLS + MLFAB__SERVER_SPREADS];
  uint32_t sends[MLFAB__SERVER_SENDS]; /* blocks lent to the transport */
  uint32_t nsends;
  uint64_t refused_told; /* the refused round that it has heard of, plus one */
  uint32_t refusals;     /* of worker 0's definitions, those that it has heard of */
  uint8_t *definition;   /* a definition that came before worker 0's: tensor table */
  uint32_t definition_bytes;
  mlfab__define define; /* its options, and how many tensors the table has */
} mlfab__server_peer;

/* A consistency model of some of the slices, and how far they are. See clock.c. */
typedef struct mlfab__clock {
  mlfab_sync sync;
  int used;
  int due; /* the push condition is to be asked again */
  uint64_t v_train;
  mlfab__sync_tuner tuner;
  uint64_t delayed; /* pulls that had to wait since v_train moved */
  mlfab__lazy lazy; /* they, by their place in all pulls */
  /* Rounds. */
  uint32_t contributors, round_members; /* workers in the sum; updates in it */
  double round_scale;                   /* weight of the sum: of its first member, or 1 */
  uint64_t refused_round;               /* the last that a callback refused, plus one */
  int flush; /* the open round is applied as it stands, and v_train stays */
  /* Live workers whose progress is beyond v_train, if `arrived_at` is v_train + 1. */
  uint32_t arrived;
  uint64_t arrived_at;
} mlfab__clock;

/* How far the workers are, kept up with every update so that no pull has to look at all of them. */
typedef struct mlfab__clock_tally {
  int counted;      /* 0: it does not stand, as workers came or went */
  uint32_t members; /* that live */
  uint32_t stopped; /* workers that stand still while slices move, whether they live or not */
  uint32_t lowest;  /* members whose progress is `slowest` */
  uint64_t slowest, fastest; /* of the members; 0 without one */
  uint64_t most;             /* of all that ever were here */
} mlfab__clock_tally;

enum mlfab__server_phase { MLFAB__NO_MODEL, MLFAB__MODEL_DEFINED, MLFAB__MODEL_STANDS };

typedef struct mlfab__server mlfab__server;

/* How the bytes of an update are taken in: as they are (apply.c), or as packets. */
typedef struct mlfab__apply_codec {
  /* Looks at bytes that came, the first of them byte `at` of the update, and may move them to private
   * memory: NULL, or what is wrong. */
  const char *(*look)(mlfab__server *server, mlfab__incoming *update, uint64_t at,
                      mlfab__frame_in *frame);
  /* The next bytes of the head go into `next` blocks. Errors: NOT_FINITE, MEMORY, FRAME; the head is
   * then to be refused. */
  int (*consume)(mlfab__server *server, mlfab__incoming *update, const uint8_t *data,
                 uint64_t bytes);
  /* All of the update is at `data`, in private memory: checks all of it, then adds it in place. 1 when it
   * was done, 0 when the long way has to be taken. *code_p tells what became of it. */
  int (*whole)(mlfab__server *server, mlfab__incoming *update, const uint8_t *data, int *code_p);
  /* All bytes are in. What none of them named is in the round or stepped all the same: from here on its
   * blocks are there, or spare. Errors: MEMORY. */
  int (*complete)(mlfab__server *server, const mlfab__incoming *update);
  /* `next` at a position that has none: as the model in what the update does not touch, and zeros where
   * it does and a rule is to be stepped. Errors: MEMORY. */
  int (*fresh)(mlfab__server *server, const mlfab__incoming *update, uint32_t slice,
               uint32_t position);
} mlfab__apply_codec;

/* Packets in updates and answers, where the sparse group is attached. */
typedef struct mlfab__server_sparse {
  const mlfab__apply_codec *(*packed)(void);
  int (*room)(mlfab__server *server); /* memory for taking packets in. Errors: MEMORY */
  /* Tags and filter of a model that is made. Errors: MEMORY. Gives back all memory. */
  int (*open)(mlfab__server *server, int ghost);
  void (*free)(mlfab__server *server);
  /* A commit makes `after` of a piece, which was `before`: what the filter does not want is put back, and
   * what has changed is tagged. To be called where server->watch, before the slice's commit moves. */
  void (*piece)(mlfab__server *server, const mlfab__piece *piece, const uint8_t *before,
                uint8_t *after);
  /* Looks at what a PULL tells of its reader's cache. Errors: FRAME (not one commit a slice), ARGUMENT
   * (from the future: the slice, its local number, and the commit). Remembers it. Errors: MEMORY. */
  int (*cache)(const mlfab__server *server, const mlfab__pull *in, const mlfab__segment *segments,
               const uint64_t *sinces, uint32_t *slice_p, uint64_t *since_p);
  int (*keep)(mlfab__server *server, mlfab__server_pull *pull, const mlfab__pull *in,
              const uint64_t *sinces);
  /* Packets for the pinned slice from its byte `at` on, not beyond `end`: fills the bulk, to be copied,
   * and returns how many bytes of the slice it answers for; 0 when the next *plain bytes, which may
   * become fewer, are as well sent as they are. */
  uint64_t (*answer)(mlfab__server *server, const mlfab__server_pull *pull, uint64_t at,
                     uint64_t end, uint32_t *plain, mlfab__frame_out *frame);
} mlfab__server_sparse;

/* Slices that leave and come, where the reshard group is attached. Meanwhile the server is `held`. */
typedef struct mlfab__server_mover {
  void (*stop)(mlfab__server *server, uint32_t worker, const mlfab__frame_in *frame); /* STOP */
  void (*tick)(mlfab__server *server);
  void (*free)(mlfab__server *server);
} mlfab__server_mover;

/* By which way and in which order large transfers go, where somebody is attached who decides that
 * (core/sched/client.c). Without, updates are taken in as they come, and pulls answered when their
 * condition holds. What has a group, a place or a spread has it from here. */
typedef struct mlfab__server_policy {
  void (*free)(mlfab__server *server);
  /* A frame that the server does not know: 1 when it was the policy's. */
  int (*frame)(mlfab__server *server, uint32_t worker, const mlfab__frame_in *frame);
  void (*tick)(mlfab__server *server);
  /* The model, or its consistency, has changed. A worker's link stands, or is lost. */
  void (*told)(mlfab__server *server);
  void (*station)(mlfab__server *server, uint32_t worker);
  /* A new update: 1 when it is held back. Later, at every look: gives places to those. */
  int (*hold)(mlfab__server *server, mlfab__incoming *update);
  void (*advance)(mlfab__server *server);
  /* One that was announced leaves the queue. Bytes of the head came. */
  void (*over)(mlfab__server *server, const mlfab__incoming *update);
  void (*progress)(mlfab__server *server, const mlfab__incoming *head);
  /* A group may send `upto` bytes of its sum. Of packets, whose length is not known: of the head all, of
   * another what a stage holds. */
  void (*grant)(mlfab__server *server, mlfab__incoming *leader, uint64_t upto);
  /* Ends the number of a member's group. `culprit` goes behind the rest, alone; the rest begins anew,
   * at the aggregator or, with `direct`, without. */
  void (*split)(mlfab__server *server, mlfab__incoming *member, mlfab__incoming *culprit,
                int direct);
  /* A group is about to be decided. */
  void (*end)(mlfab__server *server, const mlfab__incoming *leader, int applied);
  /* All groups begin again, with the weights that count now. Nothing is the head. */
  void (*regroup)(mlfab__server *server);
  /* What goes by way of this worker's node goes another way. */
  void (*lost)(mlfab__server *server, uint32_t worker);
  /* A pull whose condition holds: 1 when it is held back. It is answered from now on. */
  int (*pull_hold)(mlfab__server *server, mlfab__server_pull *pull);
  void (*pull_goes)(mlfab__server *server, mlfab__server_pull *pull);
  /* `taken` bytes more of a placed one were handed to the transport; all of one to be handed on. */
  void (*pull_left)(mlfab__server *server, const mlfab__server_pull *pull, uint64_t taken);
  void (*pull_out)(mlfab__server *server, mlfab__server_pull *own);
  /* One is over: what it was. */
  void (*pull_over)(mlfab__server *server, const mlfab__server_pull *was, int code);
  /* All pulls of this worker are over. */
  void (*stopped)(mlfab__server *server, uint32_t worker);
  /* Those whose turn it is begin. */
  void (*turns)(mlfab__server *server);
} mlfab__server_policy;

/* The updates that are here: queue.c. */
typedef struct mlfab__server_queue {
  mlfab__incoming *first, *last;                   /* in the order in which they are taken in */
  mlfab__incoming *unplaced_first, *unplaced_last; /* held back by the policy */
  mlfab__incoming *free_list;
  int place_due;   /* something may be placed or announced that could not before */
  uint64_t placed; /* members that ever got a place */
  uint32_t late;   /* dropped ones that are not decided yet */
  uint64_t *ahead; /* by slice: members in the queue that will be applied to it */
} mlfab__server_queue;

/* The one that is being taken in, and a commit that takes several ticks: apply.c, and round.c while a
 * round is applied. */
typedef struct mlfab__server_apply {
  mlfab__incoming *head;
  /* Where updates come before their turn: the first with the model, the others when they are needed. */
  uint8_t *stages[MLFAB__SERVER_STAGES];
  mlfab__incoming *stage_owner[MLFAB__SERVER_STAGES];
  uint64_t stage_bytes;
  mlfab__meter meter; /* of the in-link */
  enum { MLFAB__APPLY_NONE, MLFAB__APPLY_UPDATE, MLFAB__APPLY_ROUND } applying;
  uint32_t clock, slice, position; /* of a round */
  int code;
  uint8_t *scratch; /* a block: the sum beside the weights, for callbacks */
} mlfab__server_apply;

/* Pulls that wait for a pull condition: serve.c. */
typedef struct mlfab__server_serve {
  mlfab__server_pull *first, *last; /* all that are open */
  uint64_t opened;                  /* how many ever were */
  uint32_t waiting;
  int due;     /* v_train has moved: they are looked at again, where that can help ... */
  int changed; /* ... the consistency has changed: all are */
} mlfab__server_serve;

/* Slices on the move: reshard_server.c. */
typedef struct mlfab__server_move {
  const mlfab__server_mover *hooks;        /* or NULL */
  mlfab__port across;                      /* to other servers; `ready` opens the link */
  struct mlfab__reshard_server *under_way; /* here, or NULL */
  int held;           /* from the first MOVE to the last: nothing is decided or answered */
  int orphan;         /* server 0 is out of reach */
  uint64_t said_ns;   /* while it is, or slices move: when others were told last */
  mlfab__moved moved; /* what server 0 was answered last */
} mlfab__server_move;

struct mlfab__server {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port port;
  mlfab_stats *stats;
  uint32_t number, workers, servers;
  uint64_t now_ns, heartbeat_ns;
  enum mlfab__server_phase phase;
  mlfab__server_peer *peers;
  mlfab__windows windows;
  /* The model, as worker 0 defined it. */
  mlfab__layout layout;
  mlfab__tensor_info *definition;
  uint32_t ndefinition;
  mlfab_model_options options;
  uint32_t refusals; /* definitions of worker 0 that were refused; why the last one was */
  int32_t refusal_code;
  char refusal[MLFAB__TEXT_MAX];
  mlfab__optimizer optimizer;
  mlfab__store store;
  uint32_t epoch; /* in which commits are counted, from 1: slices that move begin a new one */
  uint32_t first_weights_incarnation; /* of the worker 0 whose first weights stand, or 0 */
  uint64_t eager_bytes;               /* credit of a worker */
  /* Updates and pulls. */
  mlfab__server_queue queue;
  mlfab__server_apply apply;
  mlfab__server_serve serve;
  uint64_t *versions_scratch;
  mlfab__segment *segments_scratch;
  const mlfab__server_policy *policy; /* or NULL ... */
  struct mlfab__server_sched *sched;  /* ... its own */
  mlfab__schedule schedule;           /* as set last */
  int scheduled;                      /* the fabric has a scheduler; small and large differ */
  const mlfab__server_sparse *sparse; /* or NULL */
  uint8_t *packed; /* of `sparse`: room for packets, and for bytes as they were, once needed */
  uint8_t *came;   /* of `sparse`: the packets of the frame that is being taken in */
  int watch;       /* what a commit changes is looked at: tags, a parameter filter */
  /* Consistency: clock.c. */
  mlfab__clock clocks[MLFAB__CLOCKS];
  mlfab__clock_tally tally;
  uint32_t ngates; /* none behind them is used */
  int significant; /* a model looks at |g| / |w| */
  int untidy;      /* clocks of one model stand side by side */
  struct mlfab__change_wait {
    uint32_t worker;
    mlfab__sync_ask change;
  } changes[MLFAB__SERVER_CHANGES];
  uint32_t nchanges;
  double norm_w;         /* |w| of the shard ... */
  uint64_t norm_commits; /* ... after so many commits, plus one; 0: never */
  mlfab__server_move move;
  /* What is due at the next mlfab__server_advance. */
  int due;      /* something may be done that could not before */
  int greets;   /* the first weights are in: who waits with a definition is told */
  int regroups; /* groups have other weights now */
  int retold;   /* the consistency has changed */
};

MLFAB__INTERNAL int mlfab__server_init(mlfab__server *server, mlfab__env *env,
                                       const mlfab_config *config, uint32_t number,
                                       const mlfab__port *port, mlfab_stats *stats);
MLFAB__INTERNAL void mlfab__server_free(mlfab__server *server);
/* Adds the row of a server, *server_p, which is the node's (server_role.c). Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__server_attach(struct mlfab_node *node, mlfab__server **server_p);

/* A worker said HELLO on a new link: fills the answer. Its half-sent updates are forgotten.
 * Errors: FENCED (an older incarnation), MEMORY. */
MLFAB__INTERNAL int mlfab__server_hello(mlfab__server *server, uint32_t worker,
                                        const mlfab__hello *hello, mlfab__hello_ack *ack,
                                        uint64_t now_ns);
/* Its link is lost; it may come back. */
MLFAB__INTERNAL void mlfab__server_lost(mlfab__server *server, uint32_t worker, uint64_t now_ns);
/* It is dead, or has left: rounds go on without it. */
MLFAB__INTERNAL void mlfab__server_gone(mlfab__server *server, uint32_t worker, int left,
                                        uint64_t now_ns);
/* A frame of a worker. Never fails: a bad peer is dropped through the port. */
MLFAB__INTERNAL void mlfab__server_frame(mlfab__server *server, uint32_t worker,
                                         const mlfab__frame_in *frame, uint64_t now_ns);
/* The next frame with a bulk for this worker: 1, or 0. */
MLFAB__INTERNAL int mlfab__server_next(mlfab__server *server, uint32_t worker,
                                       mlfab__frame_out *frame, uint64_t now_ns);
/* That frame was taken. */
MLFAB__INTERNAL void mlfab__server_taken(mlfab__server *server, uint32_t worker,
                                         const mlfab__frame_out *frame, uint64_t now_ns);
/* The bulk lent with this token is free. */
MLFAB__INTERNAL void mlfab__server_sent(mlfab__server *server, uint32_t worker, uint64_t token);
/* Background work and timers. */
MLFAB__INTERNAL void mlfab__server_tick(mlfab__server *server, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__server_deadline(const mlfab__server *server);
/* 1 when every worker has left or died. */
MLFAB__INTERNAL int mlfab__server_finished(const mlfab__server *server);

/* Does whatever can be done now: heads, commits, rounds, and what is due. */
MLFAB__INTERNAL void mlfab__server_advance(mlfab__server *server);

/* --- between the files of the role, lowest first: blocks.c, clock.c, queue.c, apply.c (updates), round.c,
 * serve.c (pulls), server.c. The lower ones set what is due; server.c does it when an event is over. --- */

/* Gives up the link of a peer that broke the protocol. */
static inline void mlfab__server_drop(mlfab__server *server, uint32_t worker, int code,
                                      const char *text) {
  server->port.drop(server->port.self, worker, code, text);
}

/* blocks.c - a pull pins the blocks of a slice; unpins them; gives the slice up in the middle, to begin
 * it again. All pulls do. */
MLFAB__INTERNAL void mlfab__blocks_pin(mlfab__server *server, mlfab__server_pull *pull,
                                       uint32_t slice);
MLFAB__INTERNAL void mlfab__blocks_unpin(mlfab__server *server, mlfab__server_pull *pull);
MLFAB__INTERNAL void mlfab__blocks_restart(mlfab__server *server, mlfab__server_pull *pull);
MLFAB__INTERNAL void mlfab__blocks_unpin_all(mlfab__server *server);
/* A spare block: pulls are unpinned and blocks added before this gives MLFAB__NO_BLOCK. */
MLFAB__INTERNAL uint32_t mlfab__blocks_spare(mlfab__server *server);
/* A new block for place[position], holding what `from` holds unless it will be overwritten whole.
 * Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__blocks_fresh(mlfab__server *server, uint32_t *place, uint32_t from,
                                        int fill);

/* clock.c - the clocks of a model that is made anew; gives back what they hold. */
MLFAB__INTERNAL void mlfab__clock_start(mlfab__server *server, const mlfab_sync *sync);
MLFAB__INTERNAL void mlfab__clock_free(mlfab__server *server);
/* The clocks of these segments' slices, as bits; of no segments, all. */
MLFAB__INTERNAL uint32_t mlfab__clock_mask(const mlfab__server *server,
                                           const mlfab__segment *segments, uint32_t n);
/* 1 when any clock has rounds; counts iterations. */
MLFAB__INTERNAL int mlfab__clock_rounds(const mlfab__server *server);
MLFAB__INTERNAL int mlfab__clock_counts(const mlfab__server *server);
/* Do the members of a group come multiplied with their own scales? Else they are relative to the
 * first's. */
MLFAB__INTERNAL int mlfab__clock_absolute(const mlfab__server *server);
/* What the conditions of a clock may look at, for this worker with this progress. */
MLFAB__INTERNAL void mlfab__clock_state(mlfab__server *server, const mlfab__clock *clock,
                                        uint32_t worker, uint64_t progress,
                                        mlfab_sync_state *state);
/* May this worker's update of this progress be taken in now on these clocks? Would it be too late? */
MLFAB__INTERNAL int mlfab__clock_may_push(const mlfab__server *server, uint32_t worker,
                                          uint64_t progress, uint32_t mask);
MLFAB__INTERNAL int mlfab__clock_late(const mlfab__server *server, uint32_t worker, uint32_t mask);
/* An update of this worker was decided: its progress, and the rounds that it is part of. */
MLFAB__INTERNAL void mlfab__clock_decided(mlfab__server *server, const mlfab__incoming *update,
                                          int code);
/* It is as far as this, it says, before the first of its that is undecided here: raises what is known.
 * PROGRESS of a worker. */
MLFAB__INTERNAL void mlfab__clock_reach(mlfab__server *server, uint32_t worker, uint64_t progress);
MLFAB__INTERNAL void mlfab__clock_progress(mlfab__server *server, uint32_t worker,
                                           const mlfab__frame_in *frame);
/* The progress that a worker which joins begins with. */
MLFAB__INTERNAL uint64_t mlfab__clock_join(const mlfab__server *server, uint32_t worker);
/* Members came or went: every push condition is to be asked again. */
MLFAB__INTERNAL void mlfab__clock_members(mlfab__server *server);
/* Asks push conditions until all say no, or until a round begins to be applied (1). */
MLFAB__INTERNAL int mlfab__clock_advance(mlfab__server *server);
/* v_train of a clock moves on. */
MLFAB__INTERNAL void mlfab__clock_step(mlfab__server *server, mlfab__clock *clock);
/* SYNC of a worker. Carries changes out, when there is no head; 1: a round has to be applied first. */
MLFAB__INTERNAL void mlfab__clock_ask(mlfab__server *server, uint32_t worker,
                                      const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__clock_change(mlfab__server *server);
/* Tells a worker whether iterations count here. */
MLFAB__INTERNAL void mlfab__clock_tell(mlfab__server *server, uint32_t worker);
/* round.c - goes on applying the open round of a clock, at most `budget` bytes: 1 when it is finished. */
MLFAB__INTERNAL int mlfab__round_apply(mlfab__server *server, uint64_t budget);

/* clocks of one model that have come to the same point become one, those without slices go: 1 when a
 * slice has another clock now. */
MLFAB__INTERNAL int mlfab__clock_tidy(mlfab__server *server);
/* What another server is told of a clock whose slices go there; `words` has room for MLFAB__RESHARD_SERVER_WORDS_MAX,
 * and tells who is in its open round. */
MLFAB__INTERNAL void mlfab__clock_told(const mlfab__server *server, uint32_t g,
                                       mlfab__reshard_server_clock *out, uint32_t *words);
/* Is the second, of slices that come, at the same point as the first, so that they can be one? */
MLFAB__INTERNAL int mlfab__clock_joins(const mlfab__server *server,
                                       const mlfab__reshard_server_clock *clock,
                                       const uint32_t *clock_words,
                                       const mlfab__reshard_server_clock *in,
                                       const uint32_t *words);
/* The clock for slices that come with this one from another server, or MLFAB__CLOCKS. */
MLFAB__INTERNAL uint32_t mlfab__clock_match(const mlfab__server *server,
                                            const mlfab__reshard_server_clock *in,
                                            const uint32_t *words);
/* The same, or one of its own, for which there is room. */
MLFAB__INTERNAL uint32_t mlfab__clock_adopt(mlfab__server *server,
                                            const mlfab__reshard_server_clock *in,
                                            const uint32_t *words);

/* Credit of a worker, and bytes of a stage, for a shard of so many bytes. */
MLFAB__INTERNAL uint64_t mlfab__server_credit(const mlfab__server *server, uint64_t shard);
MLFAB__INTERNAL uint64_t mlfab__server_stage(const mlfab__server *server, uint64_t shard,
                                             int ghost);
/* HELLO_ACK without a HELLO. */
MLFAB__INTERNAL void mlfab__server_tell(mlfab__server *server, uint32_t worker);

/* queue.c - an update for what was announced in the scratches, and back. NULL: no memory. */
MLFAB__INTERNAL mlfab__incoming *mlfab__queue_take(mlfab__server *server, const mlfab__push *push);
MLFAB__INTERNAL void mlfab__queue_give_back(mlfab__server *server, mlfab__incoming *update);
/* At the end of the queue, or of those that are held back; out of its list. */
MLFAB__INTERNAL void mlfab__queue_append(mlfab__server *server, mlfab__incoming *update,
                                         int unplaced);
MLFAB__INTERNAL void mlfab__queue_unlink(mlfab__server *server, mlfab__incoming *update);
MLFAB__INTERNAL mlfab__incoming *mlfab__queue_find(const mlfab__server *server, uint32_t worker,
                                                   uint64_t seq);
MLFAB__INTERNAL void mlfab__queue_leave_stage(mlfab__server *server, mlfab__incoming *update);
/* The slices of a segment: the first is returned. */
MLFAB__INTERNAL uint32_t mlfab__queue_touched(const mlfab__server *server,
                                              const mlfab__incoming *update, uint32_t segment,
                                              uint32_t *last_p);
/* May this update be taken in now? */
MLFAB__INTERNAL int mlfab__queue_eligible(const mlfab__server *server,
                                          const mlfab__incoming *update);
/* A new update: it gets a place, or is held back. It leaves the lists. */
MLFAB__INTERNAL void mlfab__queue_new(mlfab__server *server, mlfab__incoming *update);
MLFAB__INTERNAL void mlfab__queue_forget(mlfab__server *server, mlfab__incoming *update);
/* Its place is the end of the queue; it is dropped there when it is too late. */
MLFAB__INTERNAL void mlfab__queue_now(mlfab__server *server, mlfab__incoming *update);
MLFAB__INTERNAL void mlfab__queue_drop(mlfab__server *server, mlfab__incoming *update);
/* The largest delay over the slices that the update touches, behind all that has a place; then adds
 * `members` to what stands before the next. */
MLFAB__INTERNAL uint64_t mlfab__queue_lag(mlfab__server *server, const mlfab__incoming *update,
                                          int64_t members);
/* DROPPED when this delay is not below the bound, which is remembered, or 0. */
MLFAB__INTERNAL int mlfab__queue_late(const mlfab__server *server, mlfab__incoming *update,
                                      uint64_t delay);
/* Of a group: the member behind this one, or NULL; the first. Is it a member, but not the first? */
MLFAB__INTERNAL mlfab__incoming *mlfab__queue_member(const mlfab__incoming *update);
MLFAB__INTERNAL mlfab__incoming *mlfab__queue_leader(mlfab__incoming *update);
MLFAB__INTERNAL int mlfab__queue_follows(const mlfab__incoming *update);
/* The first member of its group that may not be taken in now: other rounds may count since they were
 * grouped. NULL: none. */
MLFAB__INTERNAL mlfab__incoming *mlfab__queue_stray(const mlfab__server *server,
                                                    mlfab__incoming *member);
/* Is it, or its group, past recall? */
MLFAB__INTERNAL int mlfab__queue_applying(const mlfab__server *server,
                                          const mlfab__incoming *update);

/* apply.c - what was written of the head is void, and there is none. */
MLFAB__INTERNAL void mlfab__apply_abort(mlfab__server *server);
/* Is anything of it to be stepped by rule or callback? */
MLFAB__INTERNAL int mlfab__apply_steps(const mlfab__server *server, const mlfab__incoming *update);
/* One piece: `next` becomes what callback or rule make of w and the sum. Errors: CALLBACK. */
MLFAB__INTERNAL int mlfab__apply_piece(mlfab__server *server, const mlfab_update_info *info,
                                       const mlfab__piece *piece, const uint8_t *sum);
/* Decides an update: answers, counts, and takes it out of the queue. */
MLFAB__INTERNAL void mlfab__apply_decide(mlfab__server *server, mlfab__incoming *update, int code,
                                         uint64_t version, uint64_t delay);
MLFAB__INTERNAL enum mlfab__apply_mode mlfab__apply_mode(const mlfab__server *server,
                                                         const mlfab__incoming *update,
                                                         uint32_t slice);
/* What u is multiplied with as it comes in. */
MLFAB__INTERNAL double mlfab__apply_weight(const mlfab__server *server,
                                           const mlfab__incoming *update,
                                           enum mlfab__apply_mode mode, uint32_t slice);

MLFAB__INTERNAL void mlfab__apply_push(mlfab__server *server, uint32_t worker,
                                       const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__apply_chunk(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__apply_withdraw(mlfab__server *server, uint32_t worker,
                                           const mlfab__frame_in *frame);
/* Forgets the undecided updates of a worker: its stream begins anew under a new generation. */
MLFAB__INTERNAL void mlfab__apply_reset(mlfab__server *server, uint32_t worker);
/* Finishes applying an update of this worker, if one is being applied. */
MLFAB__INTERNAL void mlfab__apply_finish(mlfab__server *server, uint32_t worker);
/* The next bytes of an update, or of a group as those of its first: they came on the link of
 * `peer`. */
MLFAB__INTERNAL void mlfab__apply_bytes(mlfab__server *server, uint32_t peer,
                                        mlfab__incoming *update, uint64_t offset,
                                        const mlfab__frame_in *frame);
/* Drops that are the oldest of their worker in the queue are told. */
MLFAB__INTERNAL void mlfab__apply_tell_dropped(mlfab__server *server);
/* The first from here on that may be taken in. Makes it the head: `data` is its first and only bytes when
 * they came with its announcement and are not staged. */
MLFAB__INTERNAL mlfab__incoming *mlfab__apply_eligible_from(const mlfab__server *server,
                                                            mlfab__incoming *update);
MLFAB__INTERNAL void mlfab__apply_begin(mlfab__server *server, mlfab__incoming *update,
                                        const uint8_t *data);
/* Goes on applying the head, at most `budget` bytes: 1 when it is finished. */
MLFAB__INTERNAL int mlfab__apply_go_on(mlfab__server *server, uint64_t budget);
/* Releases the next transfer when those before it leave the in-link unused. */
MLFAB__INTERNAL void mlfab__apply_release(mlfab__server *server);
/* Revokes the head when it stalls. */
MLFAB__INTERNAL void mlfab__apply_tick(mlfab__server *server);
MLFAB__INTERNAL uint64_t mlfab__apply_deadline(const mlfab__server *server);
MLFAB__INTERNAL void mlfab__apply_free(mlfab__server *server);
MLFAB__INTERNAL void mlfab__serve_pull(mlfab__server *server, uint32_t worker,
                                       const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__serve_cancel(mlfab__server *server, uint32_t worker,
                                         const mlfab__frame_in *frame);
/* Looks again at the pulls for which that is due. */
MLFAB__INTERNAL void mlfab__serve_look(mlfab__server *server);
/* The pull with this request, or NULL. Answers it from here. */
MLFAB__INTERNAL mlfab__server_pull *mlfab__serve_find(mlfab__server *server, uint32_t worker,
                                                      uint64_t request);
MLFAB__INTERNAL void mlfab__serve_begin(mlfab__server *server, mlfab__server_pull *pull);
/* Its slot is free; the same, and the policy hears of it. */
MLFAB__INTERNAL void mlfab__serve_end(mlfab__server *server, mlfab__server_pull *pull);
MLFAB__INTERNAL void mlfab__serve_over(mlfab__server *server, mlfab__server_pull *pull, int code);
MLFAB__INTERNAL void mlfab__serve_fail(mlfab__server *server, uint32_t worker, uint64_t request,
                                       int code, const char *text);
/* Walks the open pulls, oldest first: the next, or NULL behind the last. Begin with zeros. Any pull may end
 * meanwhile, also the one that was given last. */
typedef struct mlfab__serve_walk {
  mlfab__server_pull *at;
  uint64_t opened;
} mlfab__serve_walk;
MLFAB__INTERNAL mlfab__server_pull *mlfab__serve_each(const mlfab__server *server,
                                                      mlfab__serve_walk *walk);
/* A free slot with room for so many segments; `own`: for a pull that is handed on. Fills it. */
MLFAB__INTERNAL mlfab__server_pull *mlfab__serve_slot(mlfab__server *server, uint32_t worker,
                                                      uint32_t segments, int own, int *code_p);
MLFAB__INTERNAL void mlfab__serve_fill(mlfab__server *server, uint32_t worker,
                                       mlfab__server_pull *pull, uint64_t request,
                                       const mlfab__segment *segments, uint32_t n, uint64_t bytes);
/* How many bytes the next frame of a segment has, and of which slice (index into store.slices). */
MLFAB__INTERNAL uint32_t mlfab__serve_cut(const mlfab__server *server,
                                          const mlfab__segment *segment, uint64_t in_segment,
                                          uint32_t *slice_p);
/* Is it being answered from here? */
static inline int mlfab__server_goes(const mlfab__server_pull *pull) {
  return pull->request != 0 && !pull->waiting && pull->held == MLFAB__PULL_GOES &&
         pull->spread == 0;
}
/* Drops the pulls of a worker and takes back what was lent to its link. */
MLFAB__INTERNAL void mlfab__serve_reset(mlfab__server *server, uint32_t worker);
/* Drops the pulls of a worker whose link stands; what was lent comes back by itself. */
MLFAB__INTERNAL void mlfab__serve_stop(mlfab__server *server, uint32_t worker);
/* Nothing is lent and no pull is open. */
MLFAB__INTERNAL int mlfab__serve_quiet(const mlfab__server *server);
/* The slices are others from now on: gives back what was made to measure. */
MLFAB__INTERNAL void mlfab__serve_resize(mlfab__server *server);
MLFAB__INTERNAL void mlfab__serve_tick(mlfab__server *server);
MLFAB__INTERNAL void mlfab__serve_free(mlfab__server *server);

#endif
