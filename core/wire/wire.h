/* wire.h - frames: their header, their types, and the meta of each type.
 *
 * A frame is a header of 64 bytes, a meta (fields of its type, at most MLFAB_META_MAX) and a bulk (tensor
 * bytes, at most MLFAB_BULK_MAX). All numbers are little-endian.
 *
 *    0  u32 magic "MLFB"            24  u64 job (hash of its name)
 *    4  u8  protocol                32  u32 epoch
 *    5  u8  type                    36  u32 sender (node id)
 *    6  u16 flags                   40  u32 incarnation of the sender
 *    8  u32 CRC32C of the header    44  u32 code of the header
 *   12  u32 CRC32C of the payload   48  16 bytes: a tag
 *   16  u32 meta bytes              64  meta, then bulk
 *   20  u32 bulk bytes
 *
 * Tag and code are zero unless WIRE_TAGGED is set. The tag covers the frame; only the two ends of the link can make it
 * (../keys/session.h). It replaces the checksum of the bulk. The code covers the header alone: it proves the lengths
 * before the rest has come.
 *
 * The header's checksum covers the 64 bytes with its own field as zero. The payload's covers the meta, and
 * the bulk too if WIRE_BULK_CRC is set. Decoding is total: any bytes give a frame or an error, never a read
 * outside them; a meta must have exactly the length of its fields. Lengths are checked by subtraction
 * before they are used. */
#ifndef MLFAB__WIRE_H
#define MLFAB__WIRE_H

#include "../base/base.h"
#include "../../mlfab_transport.h"
#include "../base/rng.h"

#define MLFAB__MAGIC 0x42464c4du                           /* "MLFB" */
enum { MLFAB__WIRE_BULK_CRC = 1, MLFAB__WIRE_TAGGED = 2 }; /* flags; all other bits are zero */
#define MLFAB__CODE_AT 44u
#define MLFAB__TAG_AT 48u
#define MLFAB__TAG_BYTES 16u

/* Node numbers: workers 0..W-1, then dedicated servers W..W+S-1 (otherwise server s is node s). The replicas of servers
 * follow, in the same order, then a scheduler that is a process of its own. */
#define MLFAB__NO_NODE 0xffffffffu

/* The header, member by member as in a frame. wire_seal sets magic, checksums, code and tag itself. */
typedef struct mlfab__header {
  uint32_t magic;
  uint8_t protocol, type;
  uint16_t flags;
  uint32_t header_crc, payload_crc;
  uint32_t meta_bytes, bulk_bytes;
  uint64_t job;
  uint32_t epoch, sender, incarnation, code;
  uint64_t tag[2];
} mlfab__header;

/* Every type: its name, its number, and whether it may have a bulk. A build does not know the types of groups that are left
 * out. */
#if MLFAB_WITH_SCHED
#define MLFAB__FRAMES_SCHED(X) \
  X(CAPACITY, 30, 0)           \
  X(STATION, 31, 0)            \
  X(SCHEDULE, 32, 0)           \
  X(ANNOUNCE, 33, 0)           \
  X(PLAN, 34, 0)               \
  X(REPORT, 35, 0)             \
  X(VIA, 36, 0)                \
  X(GROUP, 37, 0)              \
  X(GROUP_END, 38, 0)          \
  X(RELEASE, 39, 0)            \
  X(GROUP_FAIL, 40, 0)         \
  X(FORWARD, 41, 1)            \
  X(HOP_GRANT, 42, 0)          \
  X(HOP_CHUNK, 43, 1)          \
  X(SPREAD, 44, 0)             \
  X(SPREAD_FAIL, 45, 0)        \
  X(PULL_VIA, 46, 0)           \
  X(HOP_MODEL, 47, 1)          \
  X(PULL_DONE, 48, 0)
#else
#define MLFAB__FRAMES_SCHED(X)
#endif
#if MLFAB_WITH_RESHARD
#define MLFAB__FRAMES_RESHARD(X) \
  X(RESHARD_SERVER, 60, 1)       \
  X(RESHARD, 61, 0)              \
  X(RESHARD_DONE, 62, 0)         \
  X(FREEZE, 63, 0)               \
  X(FROZEN, 64, 0)               \
  X(MOVE, 66, 0)                 \
  X(MOVED, 67, 0)                \
  X(RESHARD_SERVER_CLOCK, 68, 0) \
  X(RESUME, 69, 0)               \
  X(ADOPT, 90, 1)
#else
#define MLFAB__FRAMES_RESHARD(X)
#endif
#if MLFAB_WITH_COLL
#define MLFAB__FRAMES_COLL(X)  \
  X(MEMBERSHIP, 70, 0)         \
  X(MEMBERSHIP_LIST, 71, 0)    \
  X(MEMBERSHIP_READY, 72, 0)   \
  X(MEMBERSHIP_GO, 73, 0)      \
  X(MEMBERSHIP_FAIL, 74, 0)    \
  X(MEMBERSHIP_OVER, 75, 0)    \
  X(MEMBERSHIP_STUCK, 76, 0)   \
  X(MEMBERSHIP_ASK, 77, 0)     \
  X(MEMBERSHIP_TELL, 78, 0)    \
  X(MEMBERSHIP_MISSING, 79, 0) \
  X(MEMBERSHIP_LEAVE, 80, 0)   \
  X(MEMBERSHIP_LEFT, 81, 0)    \
  X(COLL, 82, 1)               \
  X(COLL_ACK, 83, 0)           \
  X(MEMBERSHIP_FINISH, 85, 0)  \
  X(MEMBERSHIP_FREEZE, 86, 0)  \
  X(MEMBERSHIP_FROZEN, 87, 0)  \
  X(MEMBERSHIP_SETTLE, 88, 0)  \
  X(MEMBERSHIP_OWED, 89, 0)
#else
#define MLFAB__FRAMES_COLL(X)
#endif
#if MLFAB_WITH_CHECKPOINT
#define MLFAB__FRAMES_CHECKPOINT(X) \
  X(CHECKPOINT_ASK, 110, 0)         \
  X(CHECKPOINT_DONE, 111, 0)        \
  X(CHECKPOINT_ORDER, 112, 0)       \
  X(CHECKPOINT_SHARD, 113, 0)       \
  X(CHECKPOINT_RESUME, 114, 0)
#else
#define MLFAB__FRAMES_CHECKPOINT(X)
#endif
#if MLFAB_WITH_REPLICA
#define MLFAB__FRAMES_REPLICA(X) \
  X(VOTE, 120, 0)                \
  X(MOMENT, 121, 1)              \
  X(MOMENT_HAS, 122, 0)          \
  X(MIRROR, 123, 0)              \
  X(MIRROR_HAS, 124, 0)
#else
#define MLFAB__FRAMES_REPLICA(X)
#endif
#define MLFAB__FRAMES(X)   \
  X(JOIN, 1, 0)            \
  X(WELCOME, 2, 1)         \
  X(REFUSE, 3, 0)          \
  X(HELLO, 4, 0)           \
  X(HELLO_ACK, 5, 0)       \
  X(HEARTBEAT, 6, 0)       \
  X(BYE, 7, 0)             \
  X(MEMBER, 8, 0)          \
  X(DEFINE, 9, 1)          \
  X(DEFINE_ACK, 10, 0)     \
  X(PUSH, 11, 1)           \
  X(CHUNK, 12, 1)          \
  X(GRANT, 13, 0)          \
  X(PUSH_ACK, 14, 0)       \
  X(RESEND, 15, 0)         \
  X(WITHDRAW, 16, 0)       \
  X(PULL, 17, 0)           \
  X(MODEL, 18, 1)          \
  X(PULL_FAIL, 19, 0)      \
  X(PULL_CANCEL, 20, 0)    \
  X(BARRIER, 21, 0)        \
  X(BARRIER_DONE, 22, 0)   \
  X(WAITING, 23, 0)        \
  X(DONE, 25, 0)           \
  X(DONE_ACK, 26, 0)       \
  X(MEET, 27, 0)           \
  X(WHERE, 28, 0)          \
  X(THERE, 29, 0)          \
  X(TREE_ASK, 56, 0)       \
  X(TREE_PLAN, 57, 0)      \
  X(SYNC, 58, 0)           \
  X(SYNC_ACK, 59, 0)       \
  X(STOP, 65, 0)           \
  X(PROGRESS, 84, 0)       \
  X(CHALLENGE, 100, 0)     \
  X(ANSWER, 101, 0)        \
  X(PROOF, 102, 0)         \
  X(PLACE, 125, 0)         \
  X(VIEW, 126, 1)          \
  MLFAB__FRAMES_SCHED(X)   \
  MLFAB__FRAMES_RESHARD(X) \
  MLFAB__FRAMES_COLL(X) MLFAB__FRAMES_CHECKPOINT(X) MLFAB__FRAMES_REPLICA(X)

enum mlfab__frame_type {
#define MLFAB__FRAME_ENUM(name, number, bulk) MLFAB__##name = number,
  MLFAB__FRAMES(MLFAB__FRAME_ENUM)
#undef MLFAB__FRAME_ENUM
      MLFAB__FRAME_TYPES = 127 /* the largest number plus one */
};

#define MLFAB__TEXT_MAX 256      /* maximum bytes of a text, with its terminating zero */
#define MLFAB__META_PLAIN 1280   /* maximum meta of a frame without a list */
#define MLFAB__ADDRESSES_MAX 768 /* maximum bytes of a node's list of addresses, likewise */
#define MLFAB__SEGMENTS_MAX 2048 /* maximum number of segments in a push or pull */
#define MLFAB__SLICES_MAX 4096

/* Adjacent bytes of the flat model. In a list: ascending, with gaps between them, never empty. */
typedef struct mlfab__segment {
  uint64_t offset, bytes;
} mlfab__segment;

/* Room for the lists of a push or a pull. */
typedef struct mlfab__lists {
  mlfab__segment segments[MLFAB__SEGMENTS_MAX];
  uint64_t versions[MLFAB__SLICES_MAX];
} mlfab__lists;

/* --- the metas: one struct for each type, members in the order of the frame. The caller of encode or
 * decode owns lists. Texts are sent as u16 length and bytes. --- */

typedef struct mlfab__join { /* node -> coordinator, first frame of a joining connection */
  /* As in mlfab_config; MLFAB_NO_RANK: asks for a free number of a worker or a server, and for the world. Server 0
   * answers that with a JOIN that has both. */
  int32_t rank;
  uint32_t roles, workers, servers, dedicated;
  uint32_t replicas;    /* of each server */
  uint32_t founders;    /* workers that the fabric begins with; `workers` may come */
  uint32_t founding;    /* servers that the fabric begins with; `servers` may come */
  uint32_t scheduler;   /* MLFAB_SCHEDULER_* */
  uint32_t kernels;     /* MLFAB_KERNELS_* */
  uint32_t hand;        /* 1: its program polls it, so missing heartbeats do not declare it dead */
  uint32_t incarnation; /* the incarnation that it had before, or 0 */
  uint64_t nonce;       /* of this process, to recognise a repeated JOIN */
  uint64_t heartbeat_ns;
  char addresses[MLFAB__ADDRESSES_MAX];
} mlfab__join;

typedef struct mlfab__welcome { /* coordinator -> node; bulk: `nodes` encoded mlfab__member_info */
  uint32_t incarnation;         /* of the receiver */
  uint32_t nodes;
  uint32_t running; /* 1: the fabric had begun before */
  uint32_t fresh;   /* 1: the fabric is being formed with it */
  uint64_t fabric;  /* a random number: one for each time that a fabric is formed */
} mlfab__welcome;

/* u32 node, roles, incarnation, hand, added; u64 nonce; text addresses. A frame PLACE has one entry: the place of a
 * server's copy, or of the scheduler that votes on it. */
typedef struct mlfab__member_info {
  uint32_t node, roles, incarnation, hand;
  uint32_t added; /* a server that has joined the running fabric (growth.h) */
  uint64_t nonce; /* of its process, which sends it in HELLO */
  char addresses[MLFAB__ADDRESSES_MAX];
} mlfab__member_info;

/* Causes of a refusal, as far as the caller acts on them: texts are for users only. */
enum mlfab__cause {
  MLFAB__CAUSE_OTHER,     /* its code and text tell it */
  MLFAB__CAUSE_GIVEN_UP,  /* server 0 of this job has failed */
  MLFAB__CAUSE_KEY,       /* of this job, but with another key */
  MLFAB__CAUSE_LACKS_KEY, /* the callee has a key, the caller none */
  MLFAB__CAUSE_ELSEWHERE, /* another job's, or not server 0. From here on another port may be right */
  MLFAB__CAUSE_KEYLESS,   /* the caller has a key, the callee none */
  MLFAB__CAUSE_STRANGE_KEY /* another name, and another key */
};

typedef struct mlfab__refuse { /* any -> any; the link is then closed */
  int32_t code, rank;
  uint32_t cause; /* enum mlfab__cause */
  char text[MLFAB__TEXT_MAX];
} mlfab__refuse;

typedef struct mlfab__hello { /* worker or scheduler -> server on a new link */
  uint32_t node, incarnation, roles, hand;
  uint32_t accumulators; /* offered by this worker as an aggregator */
  uint64_t host;         /* the nodes of a host share its links */
  uint64_t nonce;        /* of this process, equal to that of its JOIN */
  uint32_t term; /* a server with a replica: epoch of the record by which it serves; else 0 */
} mlfab__hello;

/* Kinds of HELLO_ACK: the worker was alive; it was dead, and rounds went on; no HELLO, only new credit; an answer to STOP. */
enum { MLFAB__ACK_ALIVE, MLFAB__ACK_DEAD, MLFAB__ACK_CREDIT, MLFAB__ACK_STOP };

typedef struct mlfab__hello_ack { /* server -> worker */
  uint32_t server, eager_bytes;   /* credit: bytes that may be sent without a grant */
  uint32_t generation;            /* of the worker's push stream from now on */
  uint32_t model_stands;          /* 1: this server has a model */
  uint32_t kind;                  /* MLFAB__ACK_* */
  uint64_t v_train;               /* the worker's progress at this server */
  uint64_t top;                   /* all updates up to here are decided ... */
  uint64_t applied[4];            /* ... bit i: update top - i was applied ... */
  uint64_t dropped[4];            /* ... or was dropped; neither: refused or withdrawn */
  uint32_t epoch;                 /* of its layout; 0: its slices are moving */
  uint32_t stopped;               /* the attempt for which the worker has sent STOP, or 0 */
  uint64_t nonce;                 /* to a server: nonce of the answering process; else 0 */
  uint32_t guest;                 /* 1: rounds do not count the worker until its PROGRESS */
  uint32_t term;                  /* as in HELLO */
  uint64_t taken; /* updates of this worker's process that were applied here, in all */
} mlfab__hello_ack;

/* The receiver of a PROBE sends an ANSWER at once. */
enum { MLFAB__BEAT = 0, MLFAB__BEAT_PROBE = 1, MLFAB__BEAT_ANSWER = 2 };
typedef struct mlfab__heartbeat {
  uint64_t sent_ns; /* the sender's clock; in an answer, the probe's value */
  uint32_t kind;
} mlfab__heartbeat;

typedef struct mlfab__bye { /* a regular end, or the reason for dropping the link */
  int32_t code;
  uint64_t nonce; /* of a copy of a server that does not serve; else 0 */
  char text[MLFAB__TEXT_MAX];
} mlfab__bye;

/* server 0 -> all: a rank rejoined, died, left, or ran out of data; or a server has joined (growth.h) */
typedef struct mlfab__member {
  uint32_t node, incarnation, kind; /* MLFAB_EVENT_* */
  uint32_t hand;                    /* of a server that has joined; so are nonce and addresses */
  uint64_t nonce;
  char addresses[MLFAB__ADDRESSES_MAX];
} mlfab__member;

/* worker -> server; bulk: `tensors` times {u32 id, u32 dtype, u64 count} */
typedef struct mlfab__define {
  uint32_t ask; /* number of the worker's definition: older answers are void */
  uint32_t tensors;
  uint32_t first_weights;      /* 1: first weights follow as update 0 */
  mlfab_model_options options; /* `sync` and the sizes are not sent */
} mlfab__define;

typedef struct mlfab__tensor_info {
  uint32_t id, dtype;
  uint64_t count;
} mlfab__tensor_info;

typedef struct mlfab__define_ack { /* server -> worker: the model is ready here, or an error */
  int32_t code;
  uint32_t server;
  uint64_t v_train;
  char text[MLFAB__TEXT_MAX];
  uint32_t ask;                /* of the DEFINE that this answers */
  uint32_t first_weights;      /* 1: the receiver's own first weights are in use */
  uint32_t packets;            /* 1: this server takes updates as packets */
  mlfab_model_options options; /* worker 0's, which apply; fields as in DEFINE */
  /* If the model began as a checkpoint: the checkpoint's number of slices, its number and its version; else 0. */
  uint32_t cut;
  uint64_t restored, restored_version;
} mlfab__define_ack;

/* PLANNED: large, in a fabric with a scheduler; its bytes wait for a grant. */
/* PACKED: sent as packets (packet.h); every bulk holds whole packets. DURABLE: to be answered when a replica has it. */
enum {
  MLFAB__PUSH_MORE = 1,
  MLFAB__PUSH_INIT = 2,
  MLFAB__PUSH_PLANNED = 4,
  MLFAB__PUSH_PACKED = 8,
  MLFAB__PUSH_DURABLE = 16
};

/* worker -> server: announces an update; the bulk may hold its first bytes. Then follow a u32 segment count and the
 * segments; a u32 version count and the versions: one version for all touched slices, or one for each slice in
 * ascending order. */
typedef struct mlfab__push {
  uint64_t seq;        /* of its first member */
  uint32_t members;    /* number of merged updates: seq .. seq + members - 1 */
  uint32_t generation; /* of the stream */
  uint32_t flags;
  uint32_t eager;    /* credit used; at most this many bytes are sent before a grant */
  uint64_t progress; /* the worker's iteration, from 0; the same at all servers */
  uint64_t bytes;    /* size at this server: sum of its segments, or of its packets */
  double scale, norm;
  uint32_t parts; /* number of servers that have a part of it */
  uint32_t segments;
  uint32_t versions;
} mlfab__push;

typedef struct mlfab__chunk { /* worker -> server: the next bytes of an update */
  uint64_t seq, offset;       /* offset: in the update's bytes at this server */
  uint32_t generation;
} mlfab__chunk;

typedef struct mlfab__grant { /* server -> worker: the update may be sent up to byte `upto` */
  uint64_t seq, upto;
  uint32_t generation;
} mlfab__grant;

typedef struct mlfab__push_ack { /* server -> worker: decided */
  uint64_t seq;
  uint32_t members, generation;
  int32_t code;            /* 0: applied */
  uint64_t version, delay; /* maximum over the slices, after the commit; for the first member */
  uint64_t v_train;        /* the worker's progress at this server from now on */
} mlfab__push_ack;

typedef struct mlfab__resend { /* server -> worker: resend all undecided updates, in order */
  uint32_t generation;         /* new; the server discards frames of older generations */
  uint64_t top;
  uint64_t applied[4], dropped[4];
} mlfab__resend;

typedef struct mlfab__withdraw { /* worker -> server: forget this update unless it is decided */
  uint64_t seq;
  uint32_t members, generation;
} mlfab__withdraw;

/* A u32 segment count and the segments follow. If the model has tags, then follow a u32 count and the commits of the
 * touched slices in the worker's cache (listed like the versions of a push; 0: not cached). */
typedef struct mlfab__pull {
  uint64_t request;
  uint64_t progress; /* number of rounds that this worker has pushed */
  uint32_t epoch;    /* of the cache; of a view: number of the worker's questions for it here */
  uint32_t flags;    /* VIEW: answered by VIEW frames */
  uint32_t segments;
  uint32_t sinces; /* 0: no cache */
} mlfab__pull;

/* flags. LAST: this completes the answer. PACKED: the bulk is packets for these bytes; all other elements are as at the
 * cache's commit. */
enum { MLFAB__MODEL_LAST = 1, MLFAB__MODEL_PACKED = 2 };
typedef struct mlfab__model { /* server -> worker: bytes of one slice at one version */
  uint64_t request;
  uint64_t offset, bytes;   /* the bytes of the flat model that it covers */
  uint64_t version, commit; /* of the slice */
  uint32_t slice, flags;
  uint32_t epoch; /* epoch of the commit numbers */
} mlfab__model;

enum { MLFAB__PULL_VIEW = 1 };

/* Pulls through a distributor. The server sends MODEL frames for a request of its own, with this bit set,
 * to the distributor's worker, where the aggregator role takes them. */
#define MLFAB__SPREAD_BIT 0x8000000000000000u

typedef struct mlfab__pull_fail {
  uint64_t request;
  int32_t code;
  char text[MLFAB__TEXT_MAX];
} mlfab__pull_fail;

typedef struct mlfab__pull_cancel {
  uint64_t request;
} mlfab__pull_cancel;

/* Server -> worker: cannot answer yet, because the server waits for a worker. An expired deadline names that worker. */
typedef struct mlfab__waiting {
  uint64_t request;           /* of a pull; 0: all open requests of this kind */
  uint32_t kind;              /* MLFAB__REQUEST_* (request.h) */
  int32_t rank;               /* MLFAB_NO_RANK: no worker any more */
  char text[MLFAB__TEXT_MAX]; /* the sentence after the worker's name: ", which has not ..." */
} mlfab__waiting;

/* BARRIER up. ASKS: for this barrier. APART: the worker is a guest (coll/membership.h). HERE: the worker counts from
 * now on. COLLECTS: it takes part in collectives. */
enum { MLFAB__BARRIER_ASKS, MLFAB__BARRIER_APART, MLFAB__BARRIER_HERE, MLFAB__BARRIER_COLLECTS };
/* BARRIER_DONE down. MEETS: a guest shall count, from this progress on. PASSES: the same, in this barrier only, because
 * others take part in collectives. LEAVES: it has been in a barrier, and is a guest again, for the same reason. */
enum { MLFAB__BARRIER_OVER, MLFAB__BARRIER_MEETS, MLFAB__BARRIER_PASSES, MLFAB__BARRIER_LEAVES };
typedef struct mlfab__barrier { /* both directions: BARRIER up, BARRIER_DONE down */
  uint64_t number;              /* the worker's count of barriers, from 1 */
  uint32_t what;                /* MLFAB__BARRIER_* */
  uint64_t progress;            /* updates that the worker has pushed */
  /* HERE, after a collective: the rank to compare with. Barriers before it that follow number `mine` of the sender
   * match those that follow number `theirs` of this rank. */
  int32_t of;
  uint64_t theirs, mine;
} mlfab__barrier;

typedef struct mlfab__sync_ask { /* SYNC, worker -> server: sets a consistency model */
  uint64_t ask;                  /* number of the worker's change, from 1 */
  mlfab_sync consistency;        /* without `size` */
} mlfab__sync_ask;

typedef struct mlfab__sync_ack { /* server -> worker: done or error; to all: the present state */
  uint64_t ask;                  /* 0: no answer, only a notice */
  int32_t code;
  uint32_t counts; /* 1: this server counts iterations, even of updates that have no bytes for it */
  char text[MLFAB__TEXT_MAX];
} mlfab__sync_ack;

/* worker -> server that counts: its progress; of a guest: it counts from now on. server -> worker: a guest counts */
typedef struct mlfab__progress {
  uint64_t progress; /* number of whole updates before the first undecided update there */
  uint32_t apart;    /* 1, up: the worker is a guest from now on (coll/membership.h) */
  uint32_t entry; /* number of a guest's question (up), or of the answered question (down); or 0 */
} mlfab__progress;

typedef struct mlfab__done { /* DONE up: no more data; DONE_ACK down */
  uint64_t last_seq;
} mlfab__done;

/* --- encoding and decoding --- */

/* One pair for each type, all of this form. `meta` has room for MLFAB_META_MAX bytes, or for the type's
 * largest meta if that is known. After an error, the contents of *m are unspecified.
 *   uint32_t mlfab__encode_join(uint8_t *meta, const mlfab__join *m);      -> bytes of meta
 *   int      mlfab__decode_join(const uint8_t *meta, uint32_t bytes, mlfab__join *m);  -> 0 or FRAME
 * Types with lists take them as further arguments. */
/* clang-format off */
#define MLFAB__WIRE_PAIRS(X) \
  X(join) X(welcome) X(refuse) X(hello) X(hello_ack) X(heartbeat) X(bye) X(member) X(define) \
  X(define_ack) X(chunk) X(grant) X(push_ack) X(resend) X(withdraw) X(model) X(pull_fail) \
  X(pull_cancel) X(waiting) X(barrier) X(sync_ask) X(sync_ack) X(progress) X(done)
/* clang-format on */
#define MLFAB__WIRE_DECLARE(name)                                                       \
  MLFAB__INTERNAL uint32_t mlfab__encode_##name(uint8_t *meta, const mlfab__##name *m); \
  MLFAB__INTERNAL int mlfab__decode_##name(const uint8_t *meta, uint32_t bytes, mlfab__##name *m);
MLFAB__WIRE_PAIRS(MLFAB__WIRE_DECLARE)

/* When decoding, versions and sinces have room for MLFAB__SLICES_MAX, segments for MLFAB__SEGMENTS_MAX. A
 * meta larger than MLFAB_META_MAX encodes to 0. Decoding checks: segments ascending, not touching, not
 * empty, no overflow, their sum = bytes (packets: at most 8 times the sum); members 1..4096, seq + members
 * without overflow; eager <= bytes; scale finite; at least one version if there are segments. */
MLFAB__INTERNAL uint32_t mlfab__encode_push(uint8_t *meta, const mlfab__push *m,
                                            const mlfab__segment *segments,
                                            const uint64_t *versions);
MLFAB__INTERNAL int mlfab__decode_push(const uint8_t *meta, uint32_t bytes, mlfab__push *m,
                                       mlfab__segment *segments, uint64_t *versions);
MLFAB__INTERNAL uint32_t mlfab__encode_pull(uint8_t *meta, const mlfab__pull *m,
                                            const mlfab__segment *segments, const uint64_t *sinces);
MLFAB__INTERNAL int mlfab__decode_pull(const uint8_t *meta, uint32_t bytes, mlfab__pull *m,
                                       mlfab__segment *segments, uint64_t *sinces);

/* --- lists; the other frames are in peer_wire.h, sched_wire.h, reshard_wire.h and coll_wire.h --- */

#if MLFAB_WITH_SCHED || MLFAB_WITH_RESHARD || MLFAB_WITH_COLL || MLFAB_WITH_CHECKPOINT || \
    MLFAB_WITH_REPLICA || MLFAB_WITH_LEND
/* One pair for each type with one list; the second argument is the type of an entry. When decoding, the list is NULL
 * (only its length is set), or has room for the maximum of its type: MLFAB__PLAN_ENTRIES_MAX, GROUP_MEMBERS_MAX (of a
 * spread), TREE_NODES_MAX, MEMBERSHIP_MEMBERS_MAX (also of blocks), RESHARD_SERVER_WORDS_MAX, ADOPT_WORDS_MAX,
 * SLICES_MAX (of servers or owners, which are below 65536). A longer list encodes to 0 and fails to decode. The
 * receiver itself refuses plans with a group of members that are not in a row, and empty spreads. */
#define MLFAB__WIRE_DECLARE_LIST(name, entry)                                                     \
  MLFAB__INTERNAL uint32_t mlfab__encode_##name(uint8_t *meta, const mlfab__##name *m,            \
                                                const entry *list);                               \
  MLFAB__INTERNAL int mlfab__decode_##name(const uint8_t *meta, uint32_t bytes, mlfab__##name *m, \
                                           entry *list);
#endif

/* --- moves and records --- */

#if MLFAB_WITH_RESHARD || MLFAB_WITH_CHECKPOINT || MLFAB_WITH_REPLICA
/* Server 0 -> a server that has joined: the model as it stands, before slices move there; bulk as of DEFINE. The list
 * has the current owner of each slice, then bits: the workers whose iterations server 0 counts. */
typedef struct mlfab__adopt {
  uint32_t attempt; /* the move (reshard.h) */
  uint32_t slices;  /* entries of the list that are owners */
  uint32_t packets; /* 1: server 0 takes updates as packets */
  uint32_t cut;     /* as in DEFINE_ACK; so are the next two */
  uint64_t restored, restored_version;
  uint32_t tensors;
  mlfab_model_options options;
  uint32_t words; /* of the list */
} mlfab__adopt;
#define MLFAB__ADOPT_WORDS_MAX (MLFAB__SLICES_MAX + 2048u)

typedef struct mlfab__moved { /* server -> server 0: a step is done, or impossible */
  uint32_t attempt, step, server;
  int32_t code;
  uint64_t round; /* mlfab__clock_round; MLFAB__NEVER: it has joined, without slices */
  double scale;   /* mlfab__clock_scale */
  char text[MLFAB__TEXT_MAX];
} mlfab__moved;

/* Server -> server: the sender's clock; u32 count and u32 words follow. Bit w: worker w has
 * contributed to its open round. */
typedef struct mlfab__clock_record {
  uint32_t attempt, contributors, members, quiet;
  uint64_t v_train, refused_round, threshold;
  double scale;
  mlfab_sync consistency; /* without `size` */
  uint32_t words;
} mlfab__clock_record;
#define MLFAB__RESHARD_SERVER_WORDS_MAX 2048u

MLFAB__WIRE_DECLARE(moved)
MLFAB__WIRE_DECLARE_LIST(adopt, uint32_t)
MLFAB__WIRE_DECLARE_LIST(clock_record, uint32_t)
#endif

/* Lists in bulks. Encode appends an entry at `at`, with `room` bytes left, and returns its size, or 0 when
 * it does not fit. Decode reads an entry and returns its size, or 0 when it is malformed. */
MLFAB__INTERNAL uint32_t mlfab__encode_member_info(uint8_t *at, uint32_t room,
                                                   const mlfab__member_info *m);
MLFAB__INTERNAL uint32_t mlfab__decode_member_info(const uint8_t *at, uint32_t room,
                                                   mlfab__member_info *m);
#define MLFAB__TENSOR_INFO_BYTES 16u
MLFAB__INTERNAL void mlfab__encode_tensor_info(uint8_t *at, const mlfab__tensor_info *m);
MLFAB__INTERNAL void mlfab__decode_tensor_info(const uint8_t *at, mlfab__tensor_info *m);

/* Writes the 64 header bytes in front of the meta at head + 64, with checksums. The payload's covers the bulk, too, if
 * flags has WIRE_BULK_CRC and this is no ghost (bulk NULL). Ignores header->payload_crc; protocol 0 means
 * MLFAB_PROTOCOL. */
MLFAB__INTERNAL void mlfab__wire_seal(uint8_t *head, const mlfab__header *header, const void *bulk);
/* Puts the header's code, then the tag, into a sealed frame with WIRE_TAGGED. untag: zeros the tag and the header's
 * checksum, as the tag covers them. */
MLFAB__INTERNAL void mlfab__wire_code(uint8_t *head, uint32_t code);
MLFAB__INTERNAL void mlfab__wire_tag(uint8_t *head, const uint8_t tag[MLFAB__TAG_BYTES]);
MLFAB__INTERNAL void mlfab__wire_untag(uint8_t *head);
/* Reads the header of a head that mlfab_frame_check and mlfab_frame_verify accepted. */
MLFAB__INTERNAL void mlfab__wire_open(const uint8_t *head, mlfab__header *header);
/* "PUSH"; "UNKNOWN" for other numbers. */
MLFAB__INTERNAL const char *mlfab__frame_name(uint8_t type);

/* CRC32C (Castagnoli) of bytes, continuing from `crc` (initially 0). Uses hardware if available. */
MLFAB__INTERNAL uint32_t mlfab__crc32c(uint32_t crc, const void *data, size_t bytes);
/* The same in a chosen way, for tests. level: 0 tables, 1 instructions for checksums, 2 wide carry-less products; at
 * most the level of this processor. */
MLFAB__INTERNAL uint32_t mlfab__crc32c_with(int level, uint32_t crc, const void *data,
                                            size_t bytes);
MLFAB__INTERNAL int mlfab__crc32c_level(void);

#endif
