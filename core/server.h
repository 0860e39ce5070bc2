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

#include "dedup.h"
#include "lazy.h"
#include "meter.h"
#include "pack.h"
#include "port.h"
#include "store.h"
#include "sync.h"

enum {
  MLFAB__SERVER_PULLS = 8,
  MLFAB__SERVER_SPREADS = 4, /* slots more, for pulls that an aggregator hands on */
  MLFAB__SERVER_SENDS = 16,
  MLFAB__SERVER_QUEUED = 64,
  MLFAB__SERVER_STAGES = 16, /* updates that may come before their turn */
  MLFAB__GATES = 8,          /* consistency models at a time */
  MLFAB__SERVER_CHANGES = 8  /* changes of them that wait */
};
#define MLFAB__PROGRESS_MAX ((uint64_t)1 << 62)

/* An update on its way in. Kept and reused, so that steady state allocates nothing. */
typedef struct mlfab__incoming {
  struct mlfab__incoming *previous, *next; /* the queue, or the free list by next */
  uint32_t worker;
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

/* What a model makes of an update's bytes in a slice: see intake.c. */
enum mlfab__intake_mode {
  MLFAB__INTAKE_INIT,
  MLFAB__INTAKE_DIRECT,
  MLFAB__INTAKE_STAGE,
  MLFAB__INTAKE_SUM
};

typedef struct mlfab__server_pull {
  uint64_t request; /* 0: free */
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
  int waiting;        /* for the pull condition of a gate ... */
  uint32_t gate;      /* ... this one */
  uint32_t passed;    /* gates whose condition held, as bits */
  double draw;        /* of the models that have chance in them */
  uint64_t tag;       /* in the gates' buffers */
  int held;           /* for a plan */
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
  uint32_t contributed; /* gates whose open round has something of it, as bits */
  uint64_t pushed;      /* its progress, as far as it is known here: see gate.c */
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
  mlfab__define definition_options;
} mlfab__server_peer;

/* A consistency model of some of the slices, and how far they are. See gate.c. */
typedef struct mlfab__gate {
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
} mlfab__gate;

enum mlfab__server_phase { MLFAB__NO_MODEL, MLFAB__MODEL_DEFINED, MLFAB__MODEL_STANDS };

typedef struct mlfab__server {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port port;
  mlfab_stats *stats;
  uint32_t number, workers, servers;
  enum mlfab__server_phase phase;
  mlfab__server_peer *peers;
  mlfab__dedup dedup;
  mlfab__layout layout;
  mlfab__tensor_info *definition; /* worker 0's */
  uint32_t ndefinition;
  mlfab__define options; /* worker 0's */
  uint32_t refusals;     /* definitions of worker 0 that were refused; why the last one was */
  int32_t refusal_code;
  char refusal[MLFAB__TEXT_MAX];
  mlfab__rule rule;
  mlfab__store store;
  uint32_t first_weights_incarnation; /* of the worker 0 whose first weights stand, or 0 */
  uint64_t eager_bytes;               /* credit of a worker */
  uint8_t
      *stages[MLFAB__SERVER_STAGES]; /* the first with the model, the others when they are needed */
  uint64_t stage_bytes;
  mlfab__incoming *stage_owner[MLFAB__SERVER_STAGES];
  mlfab__incoming *first, *last, *head, *free_list;
  /* With a scheduler. */
  mlfab__schedule schedule; /* as set last */
  int scheduled;            /* the fabric has a scheduler; small and large differ */
  int scheduler_up;
  /* How long something announced has waited since the last plan, and the last look. What passes while
   * this server itself stands still does not count. */
  uint64_t unplanned_ns, looked_ns;
  mlfab__incoming *unplaced_first, *unplaced_last;
  int place_due;          /* something may be placed or announced that could not before */
  uint64_t place_walk;    /* numbers the looks at the unplaced */
  uint64_t placed;        /* members that ever got a place */
  uint64_t groups;        /* the last number of a group */
  uint64_t places;        /* the last place of a pull */
  uint64_t spreads;       /* the last number of a spread */
  uint32_t late;          /* dropped ones that are not decided yet */
  uint64_t *ahead;        /* by slice: members in the queue that will be applied to it */
  uint64_t reported_left; /* bytes of the head when the scheduler was told last */
  mlfab__capacity own;    /* of this node's host */
  mlfab__meter meter;
  mlfab__plan_entry *plan_scratch;
  mlfab__group_member *group_scratch;
  uint8_t *meta_scratch; /* MLFAB_META_MAX */
  /* Consistency. */
  mlfab__gate gates[MLFAB__GATES];
  uint32_t ngates;  /* none behind them is used */
  int significant;  /* a model looks at |g| / |w| */
  uint32_t waiting; /* pulls that wait for a pull condition */
  struct mlfab__change_wait {
    uint32_t worker;
    mlfab__sync_ask change;
  } changes[MLFAB__SERVER_CHANGES];
  uint32_t nchanges;
  double norm_w;         /* |w| of the shard ... */
  uint64_t norm_commits; /* ... after so many commits, plus one; 0: never */
  /* A commit that takes several ticks. */
  enum { MLFAB__APPLY_NONE, MLFAB__APPLY_UPDATE, MLFAB__APPLY_ROUND } applying;
  uint32_t apply_gate, apply_slice, apply_position;
  uint32_t apply_segment;
  int apply_code;
  uint8_t *scratch; /* a block: the sum beside the weights, for callbacks */
  uint8_t *packed;  /* MLFAB__PACKED_ROOM for packets and for bytes as they were, once needed */
  uint8_t *came;    /* MLFAB__PACK_ROOM: the packets of the frame that is being taken in */
  int watch;        /* what a commit changes is looked at: tags, a parameter filter */
  uint32_t epoch;   /* in which commits are counted, from 1: slices that move begin a new one */
  uint64_t *versions_scratch;
  mlfab__segment *segments_scratch;
  uint64_t now_ns, heartbeat_ns;
  /* Slices on the move: see reslice.h. */
  mlfab__port across;         /* to other servers; `ready` opens the link */
  struct mlfab__shift *shift; /* under way here, or NULL */
  int held;                   /* from the first MOVE to the last: nothing is decided or answered */
  int orphan;                 /* server 0 is out of reach */
  uint64_t said_ns;           /* while it is, or slices move: when others were told last */
  int untidy;                 /* gates of one model stand side by side */
  mlfab__moved moved;         /* what server 0 was answered last */
} mlfab__server;

MLFAB__INTERNAL int mlfab__server_init(mlfab__server *server, mlfab__env *env,
                                       const mlfab_config *config, uint32_t number,
                                       const mlfab__port *port, mlfab_stats *stats);
MLFAB__INTERNAL void mlfab__server_free(mlfab__server *server);

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

/* The scheduler is peer number `workers` of the port. Its link stands: it is told everything. It is
 * lost, or dead: first come, first served. A frame of it (PLAN). */
MLFAB__INTERNAL void mlfab__server_scheduler_hello(mlfab__server *server, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__server_scheduler_lost(mlfab__server *server, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__server_scheduler_frame(mlfab__server *server,
                                                   const mlfab__frame_in *frame, uint64_t now_ns);

/* What this node's host carries, for the scheduler. */
MLFAB__INTERNAL void mlfab__server_capacity(mlfab__server *server, const mlfab__capacity *capacity,
                                            uint64_t now_ns);

/* --- between the files of the role: server.c, intake.c (updates), answer.c (pulls) --- */

/* Is this large enough to be planned, and is there a scheduler? */
/* A scheduler that is told of something, and sends no plan for so many heartbeats, not even an empty
 * one, counts as lost: its link is given up, and the server grants first come, first served. */
enum { MLFAB__SERVER_PLAN_BEATS = 8 };
MLFAB__INTERNAL int mlfab__server_plans(const mlfab__server *server, uint64_t bytes);
/* Tells the scheduler that a transfer is over (worker MLFAB__NO_NODE: only how the queues
 * stand). */
MLFAB__INTERNAL void mlfab__server_report(mlfab__server *server, uint32_t kind, uint32_t worker,
                                          uint64_t id, int code);
/* ANNOUNCE to the scheduler; fills `placed` and `incarnation`. */
MLFAB__INTERNAL void mlfab__server_announce(mlfab__server *server, mlfab__announce *announce);
/* A hash of segments: transfers of one shape can be grouped. */
MLFAB__INTERNAL uint64_t mlfab__server_shape(const mlfab__segment *segments, uint32_t n);

/* gate.c - the gates of a model that is made anew; gives back what they hold. */
MLFAB__INTERNAL void mlfab__gate_start(mlfab__server *server, const mlfab_sync *sync);
MLFAB__INTERNAL void mlfab__gate_free(mlfab__server *server);
/* The gates of these segments' slices, as bits; of no segments, all. */
MLFAB__INTERNAL uint32_t mlfab__gate_mask(const mlfab__server *server,
                                          const mlfab__segment *segments, uint32_t n);
/* 1 when any gate has rounds; counts iterations. */
MLFAB__INTERNAL int mlfab__gate_rounds(const mlfab__server *server);
MLFAB__INTERNAL int mlfab__gate_counts(const mlfab__server *server);
/* What the conditions of a gate may look at, for this worker with this progress. */
MLFAB__INTERNAL void mlfab__gate_state(mlfab__server *server, const mlfab__gate *gate,
                                       uint32_t worker, uint64_t progress, mlfab_sync_state *state);
/* May this worker's update of this progress be taken in now on these gates? Would it be too late? */
MLFAB__INTERNAL int mlfab__gate_may_push(const mlfab__server *server, uint32_t worker,
                                         uint64_t progress, uint32_t mask);
MLFAB__INTERNAL int mlfab__gate_late(const mlfab__server *server, uint32_t worker, uint32_t mask);
/* An update of this worker was decided: its progress, and the rounds that it is part of. */
MLFAB__INTERNAL void mlfab__gate_decided(mlfab__server *server, const mlfab__incoming *update,
                                         int code);
/* It is as far as this, it says, before the first of its that is undecided here: raises what is known.
 * PROGRESS of a worker. */
MLFAB__INTERNAL void mlfab__gate_reach(mlfab__server *server, uint32_t worker, uint64_t progress);
MLFAB__INTERNAL void mlfab__gate_progress(mlfab__server *server, uint32_t worker,
                                          const mlfab__frame_in *frame);
/* The progress that a worker which joins begins with. */
MLFAB__INTERNAL uint64_t mlfab__gate_join(const mlfab__server *server, uint32_t worker);
/* Members came or went: every push condition is to be asked again. */
MLFAB__INTERNAL void mlfab__gate_members(mlfab__server *server);
/* Asks push conditions until all say no, or until a round begins to be applied (1). */
MLFAB__INTERNAL int mlfab__gate_advance(mlfab__server *server);
/* v_train of a gate moves on. */
MLFAB__INTERNAL void mlfab__gate_step(mlfab__server *server, mlfab__gate *gate);
/* SYNC of a worker. Carries changes out, when there is no head; 1: a round has to be applied first. */
MLFAB__INTERNAL void mlfab__gate_ask(mlfab__server *server, uint32_t worker,
                                     const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__gate_change(mlfab__server *server);
/* Tells a worker whether iterations count here. */
MLFAB__INTERNAL void mlfab__gate_tell(mlfab__server *server, uint32_t worker);
/* round.c - begins to apply the open round of a gate; goes on, at most `budget` bytes: 1 when it is
 * finished. */
MLFAB__INTERNAL void mlfab__round_begin(mlfab__server *server, uint32_t gate);
MLFAB__INTERNAL int mlfab__round_apply(mlfab__server *server, uint64_t budget);

/* Gates of one model that have come to the same point become one, those without slices go: 1 when a
 * slice has another gate now. */
MLFAB__INTERNAL int mlfab__gate_tidy(mlfab__server *server);
/* What another server is told of a gate whose slices go there; `words` has room for MLFAB__SHIFT_WORDS_MAX,
 * and tells who is in its open round. */
MLFAB__INTERNAL void mlfab__gate_told(const mlfab__server *server, uint32_t g,
                                      mlfab__shift_gate *out, uint32_t *words);
/* Is the second, of slices that come, at the same point as the first, so that they can be one? */
MLFAB__INTERNAL int mlfab__gate_joins(const mlfab__server *server, const mlfab__shift_gate *gate,
                                      const uint32_t *gate_words, const mlfab__shift_gate *in,
                                      const uint32_t *words);
/* The gate for slices that come with this one from another server, or MLFAB__GATES. */
MLFAB__INTERNAL uint32_t mlfab__gate_match(const mlfab__server *server, const mlfab__shift_gate *in,
                                           const uint32_t *words);
/* The same, or one of its own, for which there is room. */
MLFAB__INTERNAL uint32_t mlfab__gate_adopt(mlfab__server *server, const mlfab__shift_gate *in,
                                           const uint32_t *words);

/* shift.c - MOVE came from server 0; MOVED or another frame of another server. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__shift_move(mlfab__server *server, const mlfab__frame_in *frame,
                                      uint64_t now_ns);
MLFAB__INTERNAL int mlfab__shift_told(mlfab__server *server, uint32_t from,
                                      const mlfab__frame_in *frame);
/* That server is out of reach. Once a tick. */
MLFAB__INTERNAL void mlfab__shift_dead(mlfab__server *server, uint32_t which);
MLFAB__INTERNAL void mlfab__shift_tick(mlfab__server *server);
MLFAB__INTERNAL int mlfab__shift_frame(mlfab__server *server, uint32_t from,
                                       const mlfab__frame_in *frame);
/* The next bytes for another server: 1, or 0; they were taken. */
MLFAB__INTERNAL int mlfab__shift_next(mlfab__server *server, uint32_t to, mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__shift_taken(mlfab__server *server, uint32_t to,
                                        const mlfab__frame_out *frame);
/* The link to a server stands, and begins with the first slice. Is it wanted? */
MLFAB__INTERNAL void mlfab__shift_up(mlfab__server *server, uint32_t to);
MLFAB__INTERNAL int mlfab__shift_wants(const mlfab__server *server, uint32_t to);
/* STOP of a worker. */
MLFAB__INTERNAL void mlfab__shift_stop(mlfab__server *server, uint32_t worker,
                                       const mlfab__frame_in *frame);
/* Goes on when what it waits for is over: after everything that may have changed something. */
MLFAB__INTERNAL void mlfab__shift_check(mlfab__server *server);
MLFAB__INTERNAL void mlfab__shift_free(mlfab__server *server);
/* Credit of a worker, and bytes of a stage, for a shard of so many bytes. */
MLFAB__INTERNAL uint64_t mlfab__server_credit(const mlfab__server *server, uint64_t shard);
MLFAB__INTERNAL uint64_t mlfab__server_stage(const mlfab__server *server, uint64_t shard,
                                             int ghost);
/* HELLO_ACK without a HELLO. */
MLFAB__INTERNAL void mlfab__server_tell(mlfab__server *server, uint32_t worker);

/* Which list an update stands in; intake.c keeps both. */
MLFAB__INTERNAL void mlfab__intake_append(mlfab__server *server, mlfab__incoming *update,
                                          int unplaced);
MLFAB__INTERNAL void mlfab__intake_unlink(mlfab__server *server, mlfab__incoming *update);
/* What was written of the head is void, and there is none. */
MLFAB__INTERNAL void mlfab__intake_abort(mlfab__server *server);
MLFAB__INTERNAL void mlfab__intake_leave_stage(mlfab__server *server, mlfab__incoming *update);
/* The slices of a segment: the first is returned. */
MLFAB__INTERNAL uint32_t mlfab__intake_touched(const mlfab__server *server,
                                               const mlfab__incoming *update, uint32_t segment,
                                               uint32_t *last_p);
MLFAB__INTERNAL int mlfab__intake_eligible(const mlfab__server *server,
                                           const mlfab__incoming *update);
/* A new block for place[position], holding what `from` holds unless it will be overwritten whole.
 * Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__intake_fresh(mlfab__server *server, uint32_t *place, uint32_t from,
                                        int fill);
/* One piece: `next` becomes what callback or rule make of w and the sum. Errors: CALLBACK. */
MLFAB__INTERNAL int mlfab__intake_apply_piece(mlfab__server *server, const mlfab_update_info *info,
                                              const mlfab__piece *piece, const uint8_t *sum);
MLFAB__INTERNAL void mlfab__intake_decide(mlfab__server *server, mlfab__incoming *update, int code,
                                          uint64_t version, uint64_t delay);
MLFAB__INTERNAL enum mlfab__intake_mode mlfab__intake_mode(const mlfab__server *server,
                                                           const mlfab__incoming *update,
                                                           uint32_t slice);
/* What u is multiplied with as it comes in. */
MLFAB__INTERNAL double mlfab__intake_weight(const mlfab__server *server,
                                            const mlfab__incoming *update,
                                            enum mlfab__intake_mode mode, uint32_t slice);

/* packed.c - bytes of a packed update, in private memory, the first of them its byte `at`: NULL when they
 * are whole packets as they may follow, or what is wrong. */
MLFAB__INTERNAL const char *mlfab__packed_check(const mlfab__server *server,
                                                mlfab__incoming *update, uint64_t at,
                                                const uint8_t *data, uint64_t bytes);
/* Memory for packets: what one holds, and as much for what was before; `came`. Errors: MEMORY. */
#define MLFAB__PACKED_HALF (65536u * 8)
#define MLFAB__PACKED_ROOM (2 * MLFAB__PACKED_HALF)
MLFAB__INTERNAL int mlfab__packed_room(mlfab__server *server);
MLFAB__INTERNAL void mlfab__packed_free(mlfab__server *server);
/* Checked packets of the head go into `next` blocks. Errors: NOT_FINITE, MEMORY, FRAME. */
MLFAB__INTERNAL int mlfab__packed_consume(mlfab__server *server, mlfab__incoming *update,
                                          const uint8_t *data, uint64_t bytes);
/* All of the update's packets are at `data`, and no rule is stepped: checks all, then adds in place. As
 * in intake.c: 1 when it was done, *code_p tells what became of it. */
MLFAB__INTERNAL int mlfab__packed_whole(mlfab__server *server, mlfab__incoming *update,
                                        const uint8_t *data, int *code_p);
/* All packets are in. What none of them named is in the round or stepped all the same: from here on its
 * blocks are there, or spare. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__packed_complete(mlfab__server *server, const mlfab__incoming *update);
/* `next` at a position that has none: as the model in what the update does not touch, and zeros where it
 * does and a rule is to be stepped. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__packed_fresh(mlfab__server *server, const mlfab__incoming *update,
                                        uint32_t slice, uint32_t position);

/* place.c: a new update gets its place, or waits for a plan. */
MLFAB__INTERNAL void mlfab__place_new(mlfab__server *server, mlfab__incoming *update);
/* It leaves the lists. */
MLFAB__INTERNAL void mlfab__place_forget(mlfab__server *server, mlfab__incoming *update,
                                         int unplaced);
/* DROPPED when this delay is not below the bound, which is remembered, or 0. */
MLFAB__INTERNAL int mlfab__place_late(const mlfab__server *server, mlfab__incoming *update,
                                      uint64_t delay);
/* Gives places that need no plan, announces, tells of drops. */
MLFAB__INTERNAL void mlfab__place_advance(mlfab__server *server);
/* Is something announced that no plan has placed? answer.c: pulls likewise. */
MLFAB__INTERNAL int mlfab__place_waits(const mlfab__server *server);
MLFAB__INTERNAL int mlfab__answer_waits(const mlfab__server *server);
/* The first member of its group that may not be taken in now: other rounds may count since they were
 * grouped. NULL: none. */
MLFAB__INTERNAL mlfab__incoming *mlfab__place_stray(const mlfab__server *server,
                                                    mlfab__incoming *member);
/* All groups begin again, with the weights that count now. Nothing is the head. */
MLFAB__INTERNAL void mlfab__place_regroup(mlfab__server *server);
/* Is it a member of a group, but not the first? */
MLFAB__INTERNAL int mlfab__place_follows(const mlfab__incoming *update);
/* The first member of a group, if this aggregator has it. */
MLFAB__INTERNAL mlfab__incoming *mlfab__place_find(const mlfab__server *server, uint32_t aggregator,
                                                   uint64_t group);
/* Do the members of a group come multiplied with their own scales? Else they are relative to the
 * first's. */
MLFAB__INTERNAL int mlfab__place_absolute(const mlfab__server *server);
/* Is it, or its group, past recall? */
MLFAB__INTERNAL int mlfab__place_applying(const mlfab__server *server,
                                          const mlfab__incoming *update);
/* Ends the number of a member's group. `culprit` goes behind the rest, alone; the rest begins anew,
 * at the aggregator or, with `direct`, without. */
MLFAB__INTERNAL void mlfab__place_ungroup(mlfab__server *server, mlfab__incoming *member,
                                          mlfab__incoming *culprit, int direct);
/* The group was applied: its members are about to be decided. */
MLFAB__INTERNAL void mlfab__place_applied(mlfab__server *server, const mlfab__incoming *leader);
/* Refuses the head, with all members if it is a group. */
MLFAB__INTERNAL void mlfab__place_refuse(mlfab__server *server, mlfab__incoming *update, int code);
/* It is being withdrawn: leaves its group. 1 when it is too late. */
MLFAB__INTERNAL int mlfab__place_recall(mlfab__server *server, mlfab__incoming *update);
MLFAB__INTERNAL void mlfab__place_lost_aggregator(mlfab__server *server, uint32_t aggregator);
/* changed.c - tags and filter of a model that is made. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__changed_open(mlfab__server *server, int ghost);
/* A commit makes `after` of a piece, which was `before`: what the filter does not want is put back, and
 * what has changed is tagged. To be called where server->watch, before the slice's commit moves. */
MLFAB__INTERNAL void mlfab__changed_piece(mlfab__server *server, const mlfab__piece *piece,
                                          const uint8_t *before, uint8_t *after);
/* The number under which a slice's present commit travels. */
MLFAB__INTERNAL uint64_t mlfab__changed_label(const mlfab__shard_slice *slice);
/* Looks at what a PULL tells of its reader's cache. Errors: FRAME (not one commit a slice), ARGUMENT
 * (from the future: the slice, its local number, and the commit). */
MLFAB__INTERNAL int mlfab__changed_cache(const mlfab__server *server, const mlfab__pull *in,
                                         const mlfab__segment *segments, const uint64_t *sinces,
                                         uint32_t *slice_p, uint64_t *since_p);
/* Remembers it. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__changed_keep(mlfab__server *server, mlfab__server_pull *pull,
                                        const mlfab__pull *in, const uint64_t *sinces);
/* Packets for the pinned slice from its byte `at` on, not beyond `end`: fills the bulk, to be copied, and
 * returns how many bytes of the slice it answers for; 0 when the next *plain bytes, which may become
 * fewer, are as well sent as they are. */
MLFAB__INTERNAL uint64_t mlfab__changed_answer(mlfab__server *server,
                                               const mlfab__server_pull *pull, uint64_t at,
                                               uint64_t end, uint32_t *plain,
                                               mlfab__frame_out *frame);

/* Lets the aggregator of a group forward `upto` bytes of the sum. Of packets, whose length is not
 * known: of the head all, of another what a stage holds. */
MLFAB__INTERNAL void mlfab__place_release(mlfab__server *server, mlfab__incoming *leader,
                                          uint64_t upto);
/* The first FORWARD of a packed sum tells its length, which the leader's push has from then on. NULL,
 * or what is wrong. */
MLFAB__INTERNAL const char *mlfab__place_sum(mlfab__incoming *leader, const mlfab__forward *forward,
                                             uint32_t bulk_bytes);
/* Bytes of the head came: tells the scheduler now and then. */
MLFAB__INTERNAL void mlfab__place_progress(mlfab__server *server, const mlfab__incoming *head);

/* Updates of a plan get their places, in order. */
MLFAB__INTERNAL void mlfab__intake_plan(mlfab__server *server, const mlfab__plan_entry *entries,
                                        uint32_t n);
/* Announces all that wait for a plan; gives all of them places, first come first served. */
MLFAB__INTERNAL void mlfab__intake_announce_all(mlfab__server *server);
MLFAB__INTERNAL void mlfab__intake_unschedule(mlfab__server *server);
/* Bytes that were placed and are still to come. */
MLFAB__INTERNAL uint64_t mlfab__intake_backlog(const mlfab__server *server);
/* FORWARD and GROUP_FAIL of an aggregator's node. */
MLFAB__INTERNAL void mlfab__intake_forward(mlfab__server *server, uint32_t aggregator,
                                           const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__intake_group_fail(mlfab__server *server, uint32_t aggregator,
                                              const mlfab__frame_in *frame);

/* The same for pulls. Entries in a row with one group number are one spread. */
MLFAB__INTERNAL void mlfab__answer_plan(mlfab__server *server, const mlfab__plan_entry *entries,
                                        uint32_t n);
MLFAB__INTERNAL void mlfab__answer_announce_all(mlfab__server *server);
MLFAB__INTERNAL void mlfab__answer_unschedule(mlfab__server *server);
MLFAB__INTERNAL uint64_t mlfab__answer_backlog(const mlfab__server *server);
/* PULL_DONE of a member; SPREAD_FAIL of an aggregator's node. */
MLFAB__INTERNAL void mlfab__answer_done(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__answer_spread_fail(mlfab__server *server, uint32_t aggregator,
                                               const mlfab__frame_in *frame);

/* What the scheduler knows of this server has changed. */
MLFAB__INTERNAL void mlfab__server_retold(mlfab__server *server);
/* The first weights are in: tells everybody who waits with a definition. */
MLFAB__INTERNAL void mlfab__server_stands(mlfab__server *server);
/* A spare block: pulls are unpinned and blocks added before this gives MLFAB__NO_BLOCK. */
MLFAB__INTERNAL uint32_t mlfab__server_spare(mlfab__server *server);
/* Gives up the link of a peer that broke the protocol. */
MLFAB__INTERNAL void mlfab__server_drop(mlfab__server *server, uint32_t worker, int code,
                                        const char *text);
MLFAB__INTERNAL void mlfab__intake_push(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__intake_chunk(mlfab__server *server, uint32_t worker,
                                         const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__intake_withdraw(mlfab__server *server, uint32_t worker,
                                            const mlfab__frame_in *frame);
/* Forgets the undecided updates of a worker: its stream begins anew under a new generation. */
MLFAB__INTERNAL void mlfab__intake_reset(mlfab__server *server, uint32_t worker);
/* Finishes applying an update of this worker, if one is being applied. */
MLFAB__INTERNAL void mlfab__intake_finish(mlfab__server *server, uint32_t worker);
/* Does whatever can be done now: heads, commits, rounds. */
MLFAB__INTERNAL void mlfab__intake_advance(mlfab__server *server);
/* Revokes the head when it stalls. */
MLFAB__INTERNAL void mlfab__intake_tick(mlfab__server *server);
MLFAB__INTERNAL uint64_t mlfab__intake_deadline(const mlfab__server *server);
MLFAB__INTERNAL void mlfab__intake_free(mlfab__server *server);
MLFAB__INTERNAL void mlfab__answer_pull(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__answer_cancel(mlfab__server *server, uint32_t worker,
                                          const mlfab__frame_in *frame);
/* Looks again at the pulls that wait for the pull condition; after a change, at all of a gate's. */
MLFAB__INTERNAL void mlfab__answer_check(mlfab__server *server);
MLFAB__INTERNAL void mlfab__answer_changed(mlfab__server *server, uint32_t gate);
/* Drops the pulls of a worker and takes back what was lent to its link. */
MLFAB__INTERNAL void mlfab__answer_reset(mlfab__server *server, uint32_t worker);
/* Drops the pulls of a worker whose link stands; what was lent comes back by itself. */
MLFAB__INTERNAL void mlfab__answer_stop(mlfab__server *server, uint32_t worker);
/* Nothing is lent and no pull is open. */
MLFAB__INTERNAL int mlfab__answer_quiet(const mlfab__server *server);
/* The slices are others from now on: gives back what was made to measure. */
MLFAB__INTERNAL void mlfab__answer_resize(mlfab__server *server);
/* Unpins all slices; their pulls begin them again. */
MLFAB__INTERNAL void mlfab__answer_unpin(mlfab__server *server);
MLFAB__INTERNAL void mlfab__answer_tick(mlfab__server *server);
MLFAB__INTERNAL void mlfab__answer_free(mlfab__server *server);

#endif
