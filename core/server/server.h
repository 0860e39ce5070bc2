/* server.h - the server role: takes updates in, applies them, answers pulls.
 *
 * The updates of all workers form one queue, in the order of their announcements. The head is the first
 * update that may be taken in. The server adds its bytes as they arrive into `next` blocks; a commit swaps
 * the blocks, a refusal discards them. Other updates may send what they have credit for; the server stages
 * these bytes unprocessed:
 *
 *    QUEUED --(first that may be taken in)--> HEAD --(all bytes came, all finite)--> committed: APPLIED
 *      |                                       |                 \--> APPLYING (optimizer, rounds: a few
 *      |                                       |                      blocks a tick) --> APPLIED
 *      |                                       +--(NaN, callback)--> refused: NOT_APPLIED
 *      |                                       +--(no byte of its link for 3 heartbeats)--> revoked: RESEND
 *      +--(link lost, worker dead)--> forgotten; the worker announces it again when it reconnects
 *
 * With a scheduler, large updates and pulls wait beside the queue until a plan places them:
 *
 *    UNPLACED --(PLAN, or the scheduler is lost)--> QUEUED, alone or as a member of a group
 *                                                     \--(too late at that place)--> DROPPED at its turn
 *
 * A group is a run of consecutive updates in the queue. An aggregator sends their sum; the server takes it
 * in as the bytes of the first member, and one commit decides all members. A group has a number. When a
 * member dies or is not finite, or the aggregator is lost, the server ends the number, gives the remaining
 * members a new one, and they send again. A worker's small updates behind an unplaced one wait with it.
 * With a delay bound (delay < tau_max), an update gets a place only where its delay is below the bound. The
 * delay cannot grow afterwards, because no update is placed before one that has a place.
 *
 * Invariants. (1) An update is decided exactly once, and one worker's updates are decided in the order of
 * their numbers. (2) `next` blocks exist only for the head. (3) All staged bytes had credit: eager bytes
 * lie in the worker's arena, the further bytes of an update in its stage. (4) With rounds, the sum of the
 * open round holds whole updates only, at most one complete update of each worker. (5) A pull pins one
 * slice at a time.
 *
 * Source: MLfabric §2, §4 Table 1, §5.1 (one order of commits); FluentPS Alg. 1 (server side). */
#ifndef MLFAB__SERVER_H
#define MLFAB__SERVER_H

#include "../model/windows.h"
#include "lazy.h"
#include "../node/role.h"
#include "../model/store.h"
#include "../model/sync.h"

enum {
  MLFAB__SERVER_PULLS = 8,
  MLFAB__SERVER_SPREADS = 4, /* additional slots, for pulls that an aggregator forwards */
  MLFAB__SERVER_SLOTS = MLFAB__SERVER_PULLS + MLFAB__SERVER_SPREADS,
  MLFAB__SERVER_SENDS = 16,
  MLFAB__SERVER_QUEUED = 64,
  MLFAB__SERVER_STAGES = 16 /* updates that may send before their turn */
};
#define MLFAB__PROGRESS_MAX ((uint64_t)1 << 62)

/* An update that is being received. Reused, so that steady state allocates nothing. */
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
  uint32_t segment;                     /* cursor of `consumed`: segment, and bytes of it */
  uint64_t in_segment;
  uint64_t last_byte_ns;
  uint32_t stage;         /* index of its stage plus one, or 0 */
  int unplaced;           /* is in the list of updates that wait for a plan */
  int announced;          /* the scheduler knows of it */
  int counted;            /* `ahead` counts its members in its slices */
  uint64_t group;         /* number of its group, or 0 */
  uint32_t waits;         /* members that its group has lost to silence */
  uint32_t aggregator;    /* of its group */
  uint64_t delay;         /* its delay when it got its place, or was refused one */
  int withdrawn;          /* its turn decides it as not applied */
  int refused;            /* MLFAB_ERR_* once something is wrong with it */
  double norm2;           /* of the bytes taken in, if a consistency model uses it */
  double aggregator_rate; /* rate of the aggregator's in-link; 0 or less: unknown */
  uint64_t shape;         /* hash of its segments */
  uint64_t packed_end;    /* offset in the model at which the last received packet ends */
  uint64_t own_bytes;     /* its own push.bytes while push.bytes is that of a packed sum; or 0 */
  int all_released;       /* its aggregator may forward that whole sum, of any length */
} mlfab__incoming;

/* How an update's bytes are written into a slice: see apply.c. */
enum mlfab__apply_mode {
  MLFAB__APPLY_INIT,
  MLFAB__APPLY_DIRECT,
  MLFAB__APPLY_STAGE,
  MLFAB__APPLY_SUM
};

/* Whether a pull is held back: for a plan, or for its turn. */
enum mlfab__pull_held { MLFAB__PULL_GOES = 0, MLFAB__PULL_FOR_PLAN, MLFAB__PULL_FOR_TURN };

typedef struct mlfab__server_pull {
  uint64_t request; /* 0: free */
  uint32_t worker;
  uint64_t opened;                            /* ascending over the server */
  struct mlfab__server_pull *next, *previous; /* the open pulls, oldest first */
  uint64_t progress;
  mlfab__segment *segments;
  uint32_t segment_room, segments_used;
  uint32_t segment; /* cursor */
  uint64_t in_segment;
  uint32_t *pinned; /* blocks of the pinned slice, positions_per_slice of them */
  uint32_t slice;   /* the pinned slice, or MLFAB__NO_BLOCK */
  uint64_t version, commit;
  struct mlfab__pull_since *since; /* of the sparse group: what the reader has, or NULL */
  uint32_t restart_segment;        /* cursor at the start of the pinned slice */
  uint64_t restart_in_segment;
  uint64_t progress_ns;
  int waiting;                     /* for the pull condition */
  uint64_t tag;                    /* its tag in the clock's buffer */
  int held;                        /* mlfab__pull_held */
  int poor;                        /* there is no memory to copy its bytes to */
  struct mlfab__server_view *view; /* of the lender: it asks for a view; or NULL */
  int offered;                     /* without segments: its answer was due before the last commit */
  uint64_t bytes;                  /* of all its segments */
  uint64_t expect_ns;              /* when its distributor should have forwarded it; 0: unknown */
  uint32_t chunk;  /* of a spread, whose members know its number of frames: the most bulk of one */
  uint64_t place;  /* its order among the pulls placed by plans; 0: not placed */
  uint64_t spread; /* the spread that forwards it, or 0: answered directly */
  uint32_t aggregator;
  /* number of its newest route, ascending over the server; workers ignore frames of older routes */
  uint32_t attempt;
} mlfab__server_pull;

typedef struct mlfab__server_peer {
  uint8_t connected, dead, left, done;
  uint8_t absent;         /* no process has had the number, or its last one has left or died */
  uint8_t local;          /* its link's transport reaches this host only */
  uint8_t guest;          /* a new process that is not counted yet: see clock.c */
  uint8_t contributed;    /* the open round has an update of it */
  uint64_t pushed;        /* its progress, as far as this server knows: see clock.c */
  uint64_t decided;       /* its progress after the last update decided here */
  uint64_t changed;       /* id of its last answered consistency change */
  mlfab__sync_ask change; /* the change that waits, if its `ask` is not 0 */
  uint64_t change_turn;   /* ascending in the order of their arrival */
  uint32_t stopped;       /* the reshard attempt that it has stopped for, or 0 */
  int drained;            /* sends nothing more before the slices have moved */
  /* it was told that slices are moving, and must be told when they have moved */
  int put_off;
  double significance; /* |g| of its last update here, relative to |w|; negative: unknown */
  uint32_t incarnation, generation;
  uint32_t queued;
  uint32_t unplaced;      /* of the queued: those that wait for a plan */
  uint64_t walked;        /* last scan of the unplaced updates that met one of its */
  uint64_t last_queued;   /* number of its newest update in the queue */
  uint64_t last_progress; /* progress of that update */
  uint8_t *arena;         /* a ring of twice the credit, so that every update is contiguous */
  uint64_t arena_head, arena_tail, arena_bytes;
  uint64_t eager_used;
  uint32_t accumulators; /* accumulators of its aggregator */
  uint64_t host;
  double link_in, link_out; /* last reported rates of its host; negative: unknown */
  mlfab__server_pull pulls[MLFAB__SERVER_PULLS + MLFAB__SERVER_SPREADS];
  uint32_t pulling;                    /* those of `pulls` that are open */
  uint32_t sends[MLFAB__SERVER_SENDS]; /* blocks lent to the transport */
  uint32_t nsends;
  uint64_t refused_told; /* last refused round that it was told of, plus one */
  uint32_t refusals;     /* number of refused definitions that it was told of */
  uint8_t *definition;   /* tensor table of a definition that came before worker 0's */
  uint32_t definition_bytes;
  mlfab__define define; /* options of that definition, and its number of tensors */
} mlfab__server_peer;

/* A consistency model, with its progress. See clock.c. */
typedef struct mlfab__clock {
  mlfab_sync sync;
  int due; /* the push condition must be evaluated again */
  uint64_t v_train;
  mlfab__sync_tuner tuner;
  uint64_t delayed; /* pulls delayed since v_train last moved */
  mlfab__lazy lazy; /* the delayed pulls, by their tag */
  /* Rounds. */
  uint32_t contributors, round_members; /* workers in the sum; updates in it */
  double round_scale;                   /* weight of the sum: scale of its first member, or 1 */
  uint64_t refused_round;               /* last round refused by a callback, plus one */
  int flush;         /* the open round is applied as it is; v_train does not move */
  double squares;    /* |sum|^2 of the open round, ... */
  int part;          /* some slice has no sum, ... */
  uint32_t measured; /* ... when it had this many updates */
  /* Number of live workers with progress >= arrived_at; valid while arrived_at is v_train + 1. */
  uint32_t arrived;
  uint64_t arrived_at;
} mlfab__clock;

/* The workers' progress, updated with every update, so that a pull does not scan all workers. */
typedef struct mlfab__clock_tally {
  int counted;               /* 0: not valid, because workers came or went */
  uint32_t members;          /* live workers */
  uint32_t stopped;          /* workers stopped while slices move, live or not */
  uint32_t lowest;           /* number of members whose progress is `slowest` */
  uint32_t first;            /* none of those has a rank below this */
  uint64_t slowest, fastest; /* of the members; 0 without members */
  uint64_t most;             /* maximum over all workers that ever connected */
} mlfab__clock_tally;

enum mlfab__server_phase { MLFAB__NO_MODEL, MLFAB__MODEL_DEFINED, MLFAB__MODEL_STANDS };

typedef struct mlfab__server mlfab__server;

/* How the bytes of an update are taken in: as dense values (apply.c), or as packets (sparse_apply.c). */
typedef struct mlfab__apply_codec {
  /* Checks received bytes, of which the first is byte `at` of the update, and may copy them to private
   * memory. Returns NULL, or a text that names the fault. The member is NULL if nothing is to be checked; so is `complete`. */
  const char *(*look)(mlfab__server *server, mlfab__incoming *update, uint64_t at,
                      mlfab__frame_in *frame);
  /* Adds the next bytes of the head into `next` blocks. Errors: NOT_FINITE, MEMORY, FRAME; the caller then
   * refuses the head. */
  int (*consume)(mlfab__server *server, mlfab__incoming *update, const uint8_t *data,
                 uint64_t bytes);
  /* The whole update is at `data`, in private memory: checks it, then adds it in place. Returns 1 with the
   * result in *code_p, or 0 when the caller must take the bytes in through `consume`. */
  int (*whole)(mlfab__server *server, mlfab__incoming *update, const uint8_t *data, int *code_p);
  /* All bytes are in. Provides blocks for the positions that no packet named but that the round or the
   * optimizer touches, so that later steps cannot fail. Errors: MEMORY. */
  int (*complete)(mlfab__server *server, const mlfab__incoming *update);
  /* Fills `next` at a position without a block: with the model where the update touches nothing, with zeros
   * where it touches the slice and the optimizer steps it. Errors: MEMORY. */
  int (*fresh)(mlfab__server *server, const mlfab__incoming *update, uint32_t slice,
               uint32_t position);
} mlfab__apply_codec;

/* Packets in updates and answers, if the sparse group is attached. */
typedef struct mlfab__server_sparse {
  const mlfab__apply_codec *(*packed)(void);
  int (*room)(mlfab__server *server); /* allocates memory for taking packets in. Errors: MEMORY */
  /* A model's options of tags, 16-bit parameters and parameter filters. Errors: CONFIG, UNSUPPORTED. */
  int (*check)(const mlfab_model_options *options, const mlfab__layout *layout, mlfab_error *error);
  /* Tags and filter of a new model. Errors: MEMORY. `free` returns all memory but that of pulls. */
  int (*open)(mlfab__server *server, int ghost);
  void (*free)(mlfab__server *server);
  /* Gives the store tags for every `elements` (0: none) elements. Errors: MEMORY; store_free frees them. */
  int (*tag)(mlfab__env *env, mlfab__store *store, uint32_t elements);
  /* A commit changes a piece from `before` to `after`: puts back the changes that the filter rejects, and
   * tags the others. Call it if server->watch, before the slice's commit number moves. */
  void (*piece)(mlfab__server *server, const mlfab__piece *piece, const uint8_t *before,
                uint8_t *after);
  /* Checks the cache state that a PULL reports; answers if it is wrong, and returns the code. `keep` stores
   * it (errors: MEMORY), `forget` frees it. */
  int (*cache)(mlfab__server *server, uint32_t worker, const mlfab__pull *in);
  int (*keep)(mlfab__server *server, mlfab__server_pull *pull, const mlfab__pull *in);
  void (*forget)(mlfab__server *server, mlfab__server_pull *pull);
  /* Packets for the pinned slice from its byte `at` on, not beyond `end`: fills the bulk, to be copied, and
   * returns how many bytes of the slice it covers; 0 when the next *plain bytes (which it may reduce) are
   * better sent unpacked. */
  uint64_t (*answer)(mlfab__server *server, const mlfab__server_pull *pull, uint64_t at,
                     uint64_t end, uint32_t *plain, mlfab__frame_out *frame);
} mlfab__server_sparse;

/* Blocks that workers read in place, if the lend group is attached (core/lend/views.c). */
typedef struct mlfab__server_lender {
  /* A new pull asks for a view: pull->view. Errors: LIMIT, UNSUPPORTED. over: the pull ends. */
  int (*ask)(mlfab__server *server, mlfab__server_pull *pull, uint32_t ask);
  void (*over)(mlfab__server *server, mlfab__server_pull *pull);
  /* pinned: has the pull its view? pin: makes it. Errors: MEMORY, UNSUPPORTED (the worker has to pull a copy). */
  int (*pinned)(const mlfab__server_pull *pull);
  int (*pin)(mlfab__server *server, mlfab__server_pull *pull);
  /* As mlfab__server_next and _taken, of a pull with a view. taken: 1 when the pull is over. */
  int (*next)(const mlfab__server_pull *pull, mlfab__frame_out *frame);
  int (*taken)(mlfab__server *server, const mlfab__server_pull *pull,
               const mlfab__frame_out *frame);
  /* has: has the worker a view of this number that is not lost? end: it has released the view; nothing happens if there is none. */
  int (*has)(const mlfab__server *server, uint32_t worker, uint64_t request);
  void (*end)(mlfab__server *server, uint32_t worker, uint64_t request);
  /* The worker's link is lost; the worker has closed its context: a view that was lost before may be another process's. */
  void (*lost)(mlfab__server *server, uint32_t worker);
  void (*left)(mlfab__server *server, uint32_t worker);
  void (*tick)(mlfab__server *server);
  /* Should the transport copy this bulk for a worker, instead of referring to it? */
  int (*copies)(const mlfab__server *server, uint32_t worker, uint64_t bytes);
  /* Frees the store, but for what views have. read: the transport may still read blocks. */
  void (*retire)(mlfab__server *server, int read);
  void (*free)(mlfab__server *server);
} mlfab__server_lender;

/* Slices that leave and arrive, if the reshard group is attached. Meanwhile the server is `held`. */
typedef struct mlfab__server_mover {
  void (*stop)(mlfab__server *server, uint32_t worker, const mlfab__frame_in *frame); /* STOP */
  void (*tick)(mlfab__server *server);
  /* Must this round be closed without workers that have stopped for the move? Moves those on. */
  int (*forces)(mlfab__server *server);
  void (*free)(mlfab__server *server);
} mlfab__server_mover;

/* Checkpoints, if their group is attached. */
typedef struct mlfab__server_saver {
  /* `save.at` commits are reached. No update is being applied: all of the shard is of one moment. */
  void (*due)(mlfab__server *server);
  /* Slices are about to move, or the model is freed: gives back all blocks and states. */
  void (*stop)(mlfab__server *server);
  /* Worker 0 has defined a model, and there is none. 1: it will be restored. */
  int (*restores)(mlfab__server *server);
} mlfab__server_saver;

typedef struct mlfab__server_save {
  const mlfab__server_saver *hooks;     /* or NULL */
  struct mlfab__checkpoint *checkpoint; /* of the hooks */
  uint64_t at;  /* number of commits at which `due` is called; 0: at once, MLFAB__NEVER: not */
  uint32_t cut; /* number of slices of a restored model, or 0 */
  uint64_t restored, restored_version; /* the checkpoint that the model began as, or 0 */
  uint32_t history; /* of the model, or of the one that will begin: ../checkpoint/record.h */
} mlfab__server_save;

/* A commit that is to be applied: the sum of the squares of what is added, before it is multiplied by `scale`, and at
 * least the number of its elements. */
typedef struct mlfab__commit {
  double squares, scale;
  uint64_t elements;
  int part; /* it leaves some slices as they are */
} mlfab__commit;

/* The state that pulls may read: nothing; the slices that they had pinned before the last commit; the model as it is. */
enum mlfab__shows { MLFAB__SHOWS_NOTHING, MLFAB__SHOWS_PINNED, MLFAB__SHOWS_ALL };

/* The rights of a server with a replica, if a keeper is attached (core/replica/keeper.c). Without one it may do all. */
typedef struct mlfab__server_keeper {
  void (*free)(mlfab__server *server);
  void (*model)(mlfab__server *server); /* there is a new model */
  void (*stop)(mlfab__server *server);  /* it is about to be freed */
  /* The name of a feature that a replica cannot follow, or NULL. */
  const char *(*refuses)(const mlfab__server *server, const mlfab_model_options *options);
  /* May this commit be applied? 0: it is held; the keeper calls mlfab__server_advance later. committed: it was. */
  int (*may)(mlfab__server *server, const mlfab__commit *commit);
  void (*committed)(mlfab__server *server, const mlfab__commit *commit);
  /* The commit that the open round will be. */
  mlfab__commit (*round)(mlfab__server *server);
  /* An answer to a push is due. 1: the keeper posts it later, or never if the worker's link breaks before. */
  int (*defers)(mlfab__server *server, uint32_t worker, uint32_t flags, const mlfab__push_ack *ack);
  /* A worker has withdrawn an update that is decided: it does not wait for DURABLE any more. */
  void (*withdrawn)(mlfab__server *server, uint32_t worker, uint64_t seq);
  /* The state that pulls may read now. When it changes to ALL, the keeper calls mlfab__keeper_offer. */
  enum mlfab__shows (*shows)(const mlfab__server *server);
  /* The decisions that a worker may rely on, for the answer to its HELLO; it forgets the answers that are due to it. */
  const mlfab__window *(*window)(mlfab__server *server, uint32_t worker);
} mlfab__server_keeper;

/* The order and the routes of large transfers, if a policy is attached (core/sched/client.c). Without one,
 * the server takes updates in as they come, and answers pulls when their condition holds. Only the policy
 * assigns groups, places and spreads. */
typedef struct mlfab__server_policy {
  void (*free)(mlfab__server *server);
  /* A frame that the server does not know. Returns 1 if it was the policy's. */
  int (*frame)(mlfab__server *server, uint32_t worker, const mlfab__frame_in *frame);
  void (*tick)(mlfab__server *server);
  /* told: the model, or its consistency, has changed. station: a worker's link came up or was lost. */
  void (*told)(mlfab__server *server);
  void (*station)(mlfab__server *server, uint32_t worker);
  /* hold: a new update; 1 when the policy holds it back. advance: gives places to held updates. */
  int (*hold)(mlfab__server *server, mlfab__incoming *update);
  void (*advance)(mlfab__server *server);
  /* over: an announced update leaves the queue. progress: bytes of the head came. */
  void (*over)(mlfab__server *server, const mlfab__incoming *update);
  void (*progress)(mlfab__server *server, const mlfab__incoming *head);
  /* The in-link. came: bytes of updates. idle: does it carry less than it could? idle_at: when that may be so next. let: an
   * update may send from now on. */
  void (*came)(mlfab__server *server, uint64_t bytes);
  int (*idle)(mlfab__server *server);
  uint64_t (*idle_at)(const mlfab__server *server);
  void (*let)(mlfab__server *server);
  /* A group may send `upto` bytes of its sum. For packets, whose length is not known: all of the head, or
   * what a stage holds. */
  void (*grant)(mlfab__server *server, mlfab__incoming *leader, uint64_t upto);
  /* Ends the number of a member's group. `culprit` is moved behind the others, alone. The others start
   * again, through the aggregator or, if `direct`, without it. */
  void (*split)(mlfab__server *server, mlfab__incoming *member, mlfab__incoming *culprit,
                int direct);
  /* May a member of the group not be taken in now, because the consistency has changed since? Then it leaves the group. */
  int (*strays)(mlfab__server *server, mlfab__incoming *member);
  /* The server is about to decide a group. */
  void (*end)(mlfab__server *server, const mlfab__incoming *leader, int applied);
  /* All groups start again, with the current weights. There must be no head. */
  void (*regroup)(mlfab__server *server);
  /* This worker's node is lost: its transfers, and those through it, take another route. */
  void (*lost)(mlfab__server *server, uint32_t worker);
  /* pull_hold: a pull's condition holds; 1 when the policy holds it back. pull_goes: the server answers it. */
  int (*pull_hold)(mlfab__server *server, mlfab__server_pull *pull);
  void (*pull_goes)(mlfab__server *server, mlfab__server_pull *pull);
  /* pull_left: the transport took `taken` more bytes of a placed pull. pull_out: it took all of a spread. */
  void (*pull_left)(mlfab__server *server, const mlfab__server_pull *pull, uint64_t taken);
  void (*pull_out)(mlfab__server *server, mlfab__server_pull *own);
  /* A pull has ended; `was` is a copy of it. */
  void (*pull_over)(mlfab__server *server, const mlfab__server_pull *was, int code);
  /* All pulls of this worker have ended. */
  void (*stopped)(mlfab__server *server, uint32_t worker);
  /* Starts the pulls whose turn has come. */
  void (*turns)(mlfab__server *server);
} mlfab__server_policy;

/* The announced updates: queue.c. */
typedef struct mlfab__server_queue {
  mlfab__incoming *first, *last;                   /* in the order in which they are taken in */
  mlfab__incoming *unplaced_first, *unplaced_last; /* held back by the policy */
  mlfab__incoming *free_list;
  int place_due;     /* an update may be placed or announced that could not before */
  uint64_t placed;   /* number of members that ever got a place */
  uint32_t ndropped; /* dropped updates that are not decided yet */
  uint64_t *ahead;   /* by slice: queued members that will be applied to it */
} mlfab__server_queue;

/* The update that is being taken in, and a commit that takes several ticks: apply.c, and round.c for a
 * round. */
typedef struct mlfab__server_apply {
  mlfab__incoming *head;
  /* Memory for updates that send before their turn. The first is allocated with the model, others on
   * demand. */
  uint8_t *stages[MLFAB__SERVER_STAGES];
  mlfab__incoming *stage_owner[MLFAB__SERVER_STAGES];
  uint64_t stage_bytes;
  /* HELD: all bytes of the head are in `next`, and the keeper does not let it be applied yet; it can be withdrawn. */
  enum { MLFAB__APPLY_NONE, MLFAB__APPLY_HELD, MLFAB__APPLY_UPDATE, MLFAB__APPLY_ROUND } applying;
  uint32_t slice, position; /* of a round */
  int code;
  uint8_t *scratch; /* one block, for callbacks: the sum, beside the weights */
} mlfab__server_apply;

/* Open pulls: serve.c. */
typedef struct mlfab__server_serve {
  mlfab__server_pull *first, *last; /* all open pulls */
  uint64_t opened;                  /* number of pulls ever opened */
  uint32_t waiting;
  int copies;        /* some pull waits for bytes that are being copied from a device */
  int due;           /* v_train has moved: look at waiting pulls that this may release */
  int changed;       /* the consistency has changed: look at all waiting pulls */
  uint32_t *orphans; /* blocks that were lent to lost links, until these are gone: see blocks.c */
  uint32_t norphans, orphan_room;
} mlfab__server_serve;

/* Slices on the move: reshard_server.c. */
typedef struct mlfab__server_move {
  const mlfab__server_mover *hooks; /* or NULL */
  int held;                         /* slices are moving: this server decides and answers nothing */
#if MLFAB_WITH_RESHARD
  mlfab__port across;                      /* to the other servers; `ready` opens the link */
  struct mlfab__reshard_server *under_way; /* the move that is under way, or NULL */
  int orphan;                              /* server 0 is unreachable */
  int adopted;                             /* this server got the model from server 0 (ADOPT) */
  uint64_t said_ns;   /* when the workers were last told of the move or of the lost server 0 */
  mlfab__moved moved; /* the last answer to server 0 */
#endif
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
  uint32_t refusals; /* number of refused definitions of worker 0; code and text of the last */
  int32_t refusal_code;
  char refusal[MLFAB__TEXT_MAX];
  mlfab__optimizer optimizer;
  mlfab__store store;
  uint32_t epoch; /* epoch of the commit numbers, from 1; moving slices begins a new one */
  uint32_t first_weights_incarnation; /* of the worker 0 whose first weights are in, or 0 */
  uint64_t eager_bytes;               /* credit of one worker */
  /* Updates and pulls. */
  mlfab__server_queue queue;
  mlfab__server_apply apply;
  mlfab__server_serve serve;
  mlfab__lists *lists;                /* of the frame that is being decoded */
  const mlfab__server_policy *policy; /* or NULL */
  struct mlfab__server_sched *sched;  /* state of the policy */
  uint64_t delay_bound;               /* updates of this delay and more are dropped */
  int scheduled;                      /* the fabric has a scheduler: large transfers are planned */
  const mlfab__server_sparse *sparse; /* or NULL */
  const mlfab__server_lender *lender; /* or NULL */
  struct mlfab__server_lending *lending; /* its state */
  uint8_t *packed; /* of `sparse`: scratch for packets and for the old bytes, on demand */
  uint8_t *came;   /* of `sparse`: packets of the frame being taken in */
  int watch;       /* commits are compared with the old model: tags, or a change filter */
  /* Consistency: clock.c. */
  mlfab__clock clock;
  mlfab__clock_tally tally;
  int significant;       /* the consistency model uses |g| / |w| */
  int measures;          /* norms of updates are taken: for such a model, or for the keeper */
  int rounds;            /* the model has rounds */
  int changes;           /* some peer's change waits */
  uint64_t change_turns; /* changes that had to wait so far */
  double norm_w;         /* |w| of the shard ... */
  uint64_t norm_commits; /* ... after this many commits, plus one; 0: not computed */
  mlfab__server_move move;
  mlfab__server_save save;
  const mlfab__server_keeper *keeper; /* or NULL */
  struct mlfab__keeper *keeping;      /* its state */
  uint32_t term;                      /* as in HELLO_ACK */
  int closing;                        /* it is being freed */
  int asleep;            /* a copy that does not serve: nothing is decided or applied by itself */
  mlfab__memory *memory; /* of the model: of a device, or NULL */
  mlfab__slab *slab;     /* of the blocks, in memory of the host; or NULL */
  uint8_t *window;       /* on a device: MLFAB_BULK_MAX bytes, for what the host looks at */
  /* Work for the next mlfab__server_advance. */
  int due;      /* something can be done that could not before */
  int greets;   /* the first weights are in: answer the workers that wait with a definition */
  int regroups; /* the weights of groups have changed */
  int retold;   /* the consistency has changed */
};

MLFAB__INTERNAL int mlfab__server_init(mlfab__server *server, mlfab__env *env,
                                       const mlfab_config *config, uint32_t number,
                                       const mlfab__port *port, mlfab_stats *stats);
MLFAB__INTERNAL void mlfab__server_free(mlfab__server *server);
/* In a forked child: what is on a device is the parent's, and is left alone. */
MLFAB__INTERNAL void mlfab__server_disown(mlfab__server *server);
/* Adds the server role to the node, which owns *server_p (server_role.c). Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__server_attach(struct mlfab_node *node, mlfab__server **server_p);

/* A model that is to be restored, or copied. build: the model of a definition and its table of encoded
 * mlfab__tensor_info, divided into `cut` slices (0: the usual number); it does not stand yet. Errors: of the definition,
 * with a text; then call refuse or unbuild. unbuild: there is no model. refuse: there is no model; tells worker 0, and all
 * who wait for its definition, why. */
MLFAB__INTERNAL int mlfab__server_build(mlfab__server *server, const mlfab__define *define,
                                        const uint8_t *table, uint32_t cut, mlfab_error *error);
/* owners: of its slices, which must be as many as these; or NULL: as the options say. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__server_build_owned(mlfab__server *server, const mlfab__define *define,
                                              const uint8_t *table, uint32_t cut,
                                              const uint32_t *owners, uint32_t nowners,
                                              mlfab_error *error);
MLFAB__INTERNAL void mlfab__server_unbuild(mlfab__server *server);
/* Frees the blocks, the layout, and all memory whose size depends on them. */
MLFAB__INTERNAL void mlfab__server_empty(mlfab__server *server);
MLFAB__INTERNAL void mlfab__server_refuse(mlfab__server *server, const mlfab_error *error);
/* Compares worker 0's definition with a table of encoded mlfab__tensor_info: 0, or MODEL with the first difference. `whose`
 * it is: "worker 0's". */
MLFAB__INTERNAL int mlfab__server_compare(const mlfab__tensor_info *definition, uint32_t n,
                                          const char *whose, const uint8_t *table, uint32_t tensors,
                                          mlfab_error *error);

/* A worker sent HELLO on a new link: fills the answer, and forgets its incomplete updates. Errors: FENCED
 * (an older incarnation), MEMORY. */
MLFAB__INTERNAL int mlfab__server_hello(mlfab__server *server, uint32_t worker,
                                        const mlfab__hello *hello, mlfab__hello_ack *ack,
                                        uint64_t now_ns);
/* The worker's link is lost; it may reconnect. */
MLFAB__INTERNAL void mlfab__server_lost(mlfab__server *server, uint32_t worker, uint64_t now_ns);
/* The worker is dead, or has left: rounds go on without it. */
MLFAB__INTERNAL void mlfab__server_gone(mlfab__server *server, uint32_t worker, int left,
                                        uint64_t now_ns);
/* A frame from a worker. Never fails: the server drops the link of a bad peer through the port. The next frame with a
 * bulk for it, or 0; that frame was taken, and its bulk returned: see mlfab__role. */
MLFAB__INTERNAL int mlfab__server_frame(void *self, mlfab__at at, const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__server_next(void *self, mlfab__at at, mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__server_taken(void *self, mlfab__at at, const mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__server_sent(void *self, mlfab__at at, uint64_t token);
/* Background work and timers. */
MLFAB__INTERNAL void mlfab__server_tick(void *self, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__server_deadline(const void *self);

/* Does everything that can be done now: heads, commits, rounds, and what is due. */
MLFAB__INTERNAL void mlfab__server_advance(mlfab__server *server);

/* --- between the files of the role, lowest first: blocks.c, clock.c, queue.c, apply.c (updates), round.c,
 * serve.c (pulls), server.c. The lower ones set flags for what is due; server.c acts on them at the end of
 * an event. --- */

/* Drops the link of a peer that broke the protocol. */
static inline void mlfab__server_drop(mlfab__server *server, uint32_t worker, int code,
                                      const char *text) {
  server->port.drop(server->port.self, worker, code, text);
}

/* blocks.c - pins a slice's blocks for a pull; unpins them; unpins them in the middle of the slice, which
 * the pull then begins again; the same for all pulls. */
MLFAB__INTERNAL void mlfab__blocks_pin(mlfab__server *server, mlfab__server_pull *pull,
                                       uint32_t slice);
MLFAB__INTERNAL void mlfab__blocks_unpin(mlfab__server *server, mlfab__server_pull *pull);
MLFAB__INTERNAL void mlfab__blocks_restart(mlfab__server *server, mlfab__server_pull *pull);
MLFAB__INTERNAL void mlfab__blocks_unpin_all(mlfab__server *server);
/* unlend: the link of a worker is lost: takes back the blocks lent to it. drop_orphans: in a tick after that: they are free. retire:
 * frees the store. */
MLFAB__INTERNAL void mlfab__blocks_unlend(mlfab__server *server, uint32_t worker);
MLFAB__INTERNAL void mlfab__blocks_drop_orphans(mlfab__server *server);
MLFAB__INTERNAL void mlfab__blocks_retire(mlfab__server *server);
/* A spare block. Unpins pulls and allocates blocks before it returns MLFAB__NO_BLOCK. */
MLFAB__INTERNAL uint32_t mlfab__blocks_spare(mlfab__server *server);
/* A new block for place[position]. With `fill`, a copy of `from`, or zeros if that is MLFAB__NO_BLOCK.
 * Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__blocks_fresh(mlfab__server *server, uint32_t *place, uint32_t from,
                                        int fill);

/* clock.c - the clock of a new model; returns its memory. */
MLFAB__INTERNAL void mlfab__clock_start(mlfab__server *server, const mlfab_sync *sync);
MLFAB__INTERNAL void mlfab__clock_free(mlfab__server *server);
/* Does the worker count? After a change of models: are there rounds, and are norms taken? */
MLFAB__INTERNAL int mlfab__clock_lives(const mlfab__server_peer *peer);
MLFAB__INTERNAL void mlfab__clock_measure(mlfab__server *server);
/* Does the aggregator multiply each member of a group with its own scale? Otherwise weights are relative to
 * the first member. */
MLFAB__INTERNAL int mlfab__clock_absolute(const mlfab__server *server);
/* The live worker with the smallest progress, of several the lowest rank, or MLFAB_NO_RANK. */
MLFAB__INTERNAL int32_t mlfab__clock_slowest(mlfab__server *server);
/* Fills the inputs of the conditions, for this worker at this progress. */
MLFAB__INTERNAL void mlfab__clock_state(mlfab__server *server, uint32_t worker, uint64_t progress,
                                        mlfab_sync_state *state);
/* May this worker's update of this progress be taken in now? late: would it be too late? */
MLFAB__INTERNAL int mlfab__clock_may_push(const mlfab__server *server, uint32_t worker,
                                          uint64_t progress);
MLFAB__INTERNAL int mlfab__clock_late(const mlfab__server *server, uint32_t worker);
/* This worker's update was decided: moves its progress, and counts it in its rounds. */
MLFAB__INTERNAL void mlfab__clock_decided(mlfab__server *server, const mlfab__incoming *update,
                                          int code);
/* The worker reports this progress for the time before its first undecided update here: raises the known
 * progress. The second: a PROGRESS frame. */
MLFAB__INTERNAL void mlfab__clock_reach(mlfab__server *server, uint32_t worker, uint64_t progress);
MLFAB__INTERNAL void mlfab__clock_progress(mlfab__server *server, uint32_t worker,
                                           const mlfab__frame_in *frame);
/* The progress with which a joining worker begins. */
MLFAB__INTERNAL uint64_t mlfab__clock_join(const mlfab__server *server, uint32_t worker);
/* A guest counts from now on, from this progress or the one with which it begins here; it is told. */
MLFAB__INTERNAL void mlfab__clock_enter(mlfab__server *server, uint32_t worker, uint64_t progress,
                                        uint32_t entry);
/* Members came or went: all push conditions must be evaluated again. */
MLFAB__INTERNAL void mlfab__clock_members(mlfab__server *server);
/* Evaluates push conditions until all are false (returns 0), or until a round must be applied (1). */
MLFAB__INTERNAL int mlfab__clock_advance(mlfab__server *server);
/* The divisor of a mean. With MLFAB_SYNC_DROP and keep_late it is at least the number of members, as in
 * FluentPS. */
MLFAB__INTERNAL double mlfab__clock_share(mlfab__server *server);
/* v_train moves on. */
MLFAB__INTERNAL void mlfab__clock_step(mlfab__server *server);
/* Begins to apply the open round. flush: as it is; v_train stays. */
MLFAB__INTERNAL void mlfab__clock_close(mlfab__server *server, int flush);
/* Has this server the conditions of such a consistency model? Errors: UNSUPPORTED. */
MLFAB__INTERNAL int mlfab__clock_follows(const mlfab__server *server, uint32_t kind,
                                         mlfab_error *error);
/* clock_ask: a SYNC frame of a worker. clock_change: carries the waiting changes out; call it when there is
 * no head. Returns 1 when a round must be applied first. */
MLFAB__INTERNAL void mlfab__clock_ask(mlfab__server *server, uint32_t worker,
                                      const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__clock_change(mlfab__server *server);
/* Tells a worker whether iterations count here. */
MLFAB__INTERNAL void mlfab__clock_tell(mlfab__server *server, uint32_t worker);
/* round.c - continues to apply the open round, at most `budget` bytes. 1 when it is finished. */
MLFAB__INTERNAL int mlfab__round_apply(mlfab__server *server, uint64_t budget);

/* Credit of a worker, and bytes of a stage, for a shard of this size. */
MLFAB__INTERNAL uint64_t mlfab__server_credit(const mlfab__server *server, uint64_t shard);
MLFAB__INTERNAL uint64_t mlfab__server_stage(const mlfab__server *server, uint64_t shard,
                                             int ghost);
/* The words for this worker about its decided updates, if it has lost answers. */
static inline const mlfab__window *mlfab__server_window(mlfab__server *server, uint32_t worker) {
  return server->keeper ? server->keeper->window(server, worker) : &server->windows.windows[worker];
}
/* Fills in a HELLO_ACK of this kind (MLFAB__ACK_*). */
MLFAB__INTERNAL void mlfab__server_hello_ack(mlfab__server *server, uint32_t worker, uint32_t kind,
                                             mlfab__hello_ack *ack);

/* queue.c - takes an update for the announcement in the scratch arrays; returns it. NULL: no memory. */
MLFAB__INTERNAL mlfab__incoming *mlfab__queue_take(mlfab__server *server, const mlfab__push *push);
MLFAB__INTERNAL void mlfab__queue_give_back(mlfab__server *server, mlfab__incoming *update);
/* Appends to the queue, or to the unplaced updates; removes from its list. */
MLFAB__INTERNAL void mlfab__queue_append(mlfab__server *server, mlfab__incoming *update,
                                         int unplaced);
MLFAB__INTERNAL void mlfab__queue_unlink(mlfab__server *server, mlfab__incoming *update);
MLFAB__INTERNAL mlfab__incoming *mlfab__queue_find(const mlfab__server *server, uint32_t worker,
                                                   uint64_t seq);
MLFAB__INTERNAL void mlfab__queue_leave_stage(mlfab__server *server, mlfab__incoming *update);
/* The local numbers of the slices that a segment touches: returns the first. */
MLFAB__INTERNAL uint32_t mlfab__queue_touched(const mlfab__server *server,
                                              const mlfab__incoming *update, uint32_t segment,
                                              uint32_t *last_p);
/* May this update be taken in now? */
MLFAB__INTERNAL int mlfab__queue_eligible(const mlfab__server *server,
                                          const mlfab__incoming *update);
/* A new update: it gets a place, or the policy holds it back. forget: it leaves the lists. */
MLFAB__INTERNAL void mlfab__queue_new(mlfab__server *server, mlfab__incoming *update);
MLFAB__INTERNAL void mlfab__queue_forget(mlfab__server *server, mlfab__incoming *update);
/* now: places it at the end of the queue, or drops it if it is too late there. drop: marks it as dropped. */
MLFAB__INTERNAL void mlfab__queue_now(mlfab__server *server, mlfab__incoming *update);
MLFAB__INTERNAL void mlfab__queue_drop(mlfab__server *server, mlfab__incoming *update);
/* Its largest delay over the slices that it touches, if it stood behind all placed updates; then adds
 * `members` to `ahead` of these slices. */
MLFAB__INTERNAL uint64_t mlfab__queue_lag(mlfab__server *server, const mlfab__incoming *update,
                                          int64_t members);
/* Stores the delay. Returns DROPPED when it is not below the bound, else 0. */
MLFAB__INTERNAL int mlfab__queue_late(const mlfab__server *server, mlfab__incoming *update,
                                      uint64_t delay);
/* Of a group: the next member, or NULL. follows: is it a member other than the first? */
MLFAB__INTERNAL mlfab__incoming *mlfab__queue_member(const mlfab__incoming *update);
MLFAB__INTERNAL int mlfab__queue_follows(const mlfab__incoming *update);
/* Is it, or its group, being applied, so that it can no longer be withdrawn? */
MLFAB__INTERNAL int mlfab__queue_applying(const mlfab__server *server,
                                          const mlfab__incoming *update);

/* apply.c - discards what was written of the head; there is no head then. */
MLFAB__INTERNAL void mlfab__apply_abort(mlfab__server *server);
/* Does the optimizer or the callback step its slices? */
MLFAB__INTERNAL int mlfab__apply_steps(const mlfab__server *server, const mlfab__incoming *update);
/* One piece: `next` becomes the result of the callback or the optimizer on w and the sum. Errors: CALLBACK. */
MLFAB__INTERNAL int mlfab__apply_piece(mlfab__server *server, const mlfab_update_info *info,
                                       const mlfab__piece *piece, const uint8_t *sum);
/* Decides an update: answers it, counts it, and removes it from the queue. */
MLFAB__INTERNAL void mlfab__apply_decide(mlfab__server *server, mlfab__incoming *update, int code,
                                         uint64_t version, uint64_t delay);
MLFAB__INTERNAL enum mlfab__apply_mode mlfab__apply_mode(const mlfab__server *server,
                                                         const mlfab__incoming *update);
/* The block that a piece of an update, in place, is added to. */
static inline uint32_t *mlfab__apply_target(mlfab__server *server, const mlfab__piece *piece) {
  return &(server->rounds ? server->store.sum : server->store.w)[piece->position];
}
/* The factor with which u is multiplied as it is taken in. */
MLFAB__INTERNAL double mlfab__apply_weight(const mlfab__server *server,
                                           const mlfab__incoming *update,
                                           enum mlfab__apply_mode mode);

MLFAB__INTERNAL void mlfab__apply_push(mlfab__server *server, uint32_t worker,
                                       const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__apply_chunk(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__apply_withdraw(mlfab__server *server, uint32_t worker,
                                           const mlfab__frame_in *frame);
/* Forgets the undecided updates of a worker: it sends them again under a new generation. */
MLFAB__INTERNAL void mlfab__apply_reset(mlfab__server *server, uint32_t worker);
/* Finishes applying this worker's update, if it is being applied. */
MLFAB__INTERNAL void mlfab__apply_finish(mlfab__server *server, uint32_t worker);
/* The next bytes of an update, or of a group's sum, which `peer` sent. */
MLFAB__INTERNAL void mlfab__apply_bytes(mlfab__server *server, uint32_t peer,
                                        mlfab__incoming *update, uint64_t offset,
                                        const mlfab__frame_in *frame);
/* Answers dropped updates that are the oldest of their worker in the queue. */
MLFAB__INTERNAL void mlfab__apply_tell_dropped(mlfab__server *server);
/* eligible_from: the first from here on that may be taken in. begin: makes it the head. `data`: all its
 * bytes, if they came with its announcement and are not staged. */
MLFAB__INTERNAL mlfab__incoming *mlfab__apply_eligible_from(const mlfab__server *server,
                                                            mlfab__incoming *update);
MLFAB__INTERNAL void mlfab__apply_begin(mlfab__server *server, mlfab__incoming *update,
                                        const uint8_t *data);
/* HELD: applies the head if the keeper lets it now. Returns 0 while it is held. */
MLFAB__INTERNAL int mlfab__apply_held(mlfab__server *server);
/* Continues to apply the head, at most `budget` bytes. Returns 1 when it is finished. */
MLFAB__INTERNAL int mlfab__apply_go_on(mlfab__server *server, uint64_t budget);
/* Lets the next update send when the updates before it leave the in-link idle. */
MLFAB__INTERNAL void mlfab__apply_release(mlfab__server *server);
/* Revokes the head when it stalls. */
MLFAB__INTERNAL void mlfab__apply_tick(mlfab__server *server);
MLFAB__INTERNAL uint64_t mlfab__apply_deadline(const mlfab__server *server);
MLFAB__INTERNAL void mlfab__apply_free(mlfab__server *server);
MLFAB__INTERNAL void mlfab__serve_pull(mlfab__server *server, uint32_t worker,
                                       const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__serve_cancel(mlfab__server *server, uint32_t worker,
                                         const mlfab__frame_in *frame);
/* Checks delayed pulls again, if `serve` says that it is due, and starts those that may be answered. */
MLFAB__INTERNAL void mlfab__serve_look(mlfab__server *server);
/* find: the pull with this request, or NULL. begin: this server answers it. */
MLFAB__INTERNAL mlfab__server_pull *mlfab__serve_find(mlfab__server *server, uint32_t worker,
                                                      uint64_t request);
MLFAB__INTERNAL void mlfab__serve_begin(mlfab__server *server, mlfab__server_pull *pull);
/* end: frees its slot. over: the same, and tells the policy. */
MLFAB__INTERNAL void mlfab__serve_end(mlfab__server *server, mlfab__server_pull *pull);
MLFAB__INTERNAL void mlfab__serve_over(mlfab__server *server, mlfab__server_pull *pull, int code);
MLFAB__INTERNAL void mlfab__serve_fail(mlfab__server *server, uint32_t worker, uint64_t request,
                                       int code, const char *text);
/* Walks the open pulls, oldest first: returns the next, or NULL after the last. Start with zeros. Any pull
 * may end during the walk, including the one returned last. */
typedef struct mlfab__serve_walk {
  mlfab__server_pull *at;
  uint64_t opened;
} mlfab__serve_walk;
MLFAB__INTERNAL mlfab__server_pull *mlfab__serve_each(const mlfab__server *server,
                                                      mlfab__serve_walk *walk);
/* slot: a free slot with room for this many segments; `own`: for a spread. fill: fills it. */
MLFAB__INTERNAL mlfab__server_pull *mlfab__serve_slot(mlfab__server *server, uint32_t worker,
                                                      uint32_t segments, int own, int *code_p);
MLFAB__INTERNAL void mlfab__serve_fill(mlfab__server *server, uint32_t worker,
                                       mlfab__server_pull *pull, uint64_t request,
                                       const mlfab__segment *segments, uint32_t n, uint64_t bytes);
/* Size of the next frame of a segment, at most `most`, and its slice (index into store.slices). */
MLFAB__INTERNAL uint32_t mlfab__serve_cut(const mlfab__server *server,
                                          const mlfab__segment *segment, uint64_t in_segment,
                                          uint32_t most, uint32_t *slice_p);
/* Is this server answering it now? */
static inline int mlfab__server_goes(const mlfab__server_pull *pull) {
  return pull->request != 0 && !pull->waiting && pull->held == MLFAB__PULL_GOES &&
         pull->spread == 0;
}
/* The state that pulls may read now. */
static inline enum mlfab__shows mlfab__server_shows(const mlfab__server *server) {
  return server->keeper ? server->keeper->shows(server) : MLFAB__SHOWS_ALL;
}
/* A pull asks for a view, and has it if the code is 0; else the pull has failed. Returns the code. */
MLFAB__INTERNAL int mlfab__serve_view(mlfab__server *server, mlfab__server_pull *pull, int code);
/* Ends the pulls of a worker and takes back the blocks lent to its link. */
MLFAB__INTERNAL void mlfab__serve_reset(mlfab__server *server, uint32_t worker);
/* Ends the pulls of a worker whose link stands; the transport returns the lent blocks. */
MLFAB__INTERNAL void mlfab__serve_stop(mlfab__server *server, uint32_t worker);
MLFAB__INTERNAL void mlfab__serve_tick(mlfab__server *server);
MLFAB__INTERNAL void mlfab__serve_free(mlfab__server *server);

#endif
