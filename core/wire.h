/* wire.h - frames: their header, their types, and the meta of each type. Layer 1.
 *
 * A frame is a header of 64 bytes, a meta (fields of its type, at most MLFAB_META_MAX) and a bulk
 * (tensor bytes, at most MLFAB_BULK_MAX). Everything is little-endian.
 *
 *    0  u32 magic "MLFB"            24  u64 job (hash of its name)
 *    4  u8  protocol                32  u32 epoch
 *    5  u8  type                    36  u32 sender (node id)
 *    6  u16 flags                   40  u32 incarnation of the sender
 *    8  u32 CRC32C of the header    44  u32 zero
 *   12  u32 CRC32C of the payload   48  16 bytes for an authentication tag, zero
 *   16  u32 meta bytes              64  meta, then bulk
 *   20  u32 bulk bytes
 *
 * The header's checksum covers the 64 bytes with its own field as zero; the payload's covers the meta,
 * and the bulk too when WIRE_BULK_CRC is set. Decoding is total: any bytes give a frame or an error,
 * never a read outside them; a meta must be exactly as long as its fields. Lengths are checked
 * by subtraction before anything is used. */
#ifndef MLFAB__WIRE_H
#define MLFAB__WIRE_H

#include "base.h"

#define MLFAB__MAGIC 0x42464c4du   /* "MLFB" */
enum { MLFAB__WIRE_BULK_CRC = 1 }; /* flags; all other bits must be zero */

/* Names of nodes: workers 0..W-1, then dedicated servers W..W+S-1; otherwise server s is node s. */
#define MLFAB__NO_NODE 0xffffffffu

typedef struct mlfab__header {
  uint8_t protocol, type;
  uint16_t flags;
  uint32_t payload_crc;
  uint32_t meta_bytes, bulk_bytes;
  uint64_t job;
  uint32_t epoch, sender, incarnation;
} mlfab__header;

/* Every type: name, number. The limits on bulk: 0 means that the type has none. */
#define MLFAB__FRAMES(X) \
  X(JOIN, 1)             \
  X(WELCOME, 2)          \
  X(REFUSE, 3)           \
  X(HELLO, 4)            \
  X(HELLO_ACK, 5)        \
  X(HEARTBEAT, 6)        \
  X(BYE, 7)              \
  X(MEMBER, 8)           \
  X(DEFINE, 9)           \
  X(DEFINE_ACK, 10)      \
  X(PUSH, 11)            \
  X(CHUNK, 12)           \
  X(GRANT, 13)           \
  X(PUSH_ACK, 14)        \
  X(RESEND, 15)          \
  X(WITHDRAW, 16)        \
  X(PULL, 17)            \
  X(MODEL, 18)           \
  X(PULL_FAIL, 19)       \
  X(PULL_CANCEL, 20)     \
  X(BARRIER, 21)         \
  X(BARRIER_DONE, 22)    \
  X(BCAST, 23)           \
  X(BCAST_DATA, 24)      \
  X(DONE, 25)            \
  X(DONE_ACK, 26)

enum mlfab__frame_type {
#define MLFAB__FRAME_ENUM(name, number) MLFAB__##name = number,
  MLFAB__FRAMES(MLFAB__FRAME_ENUM)
#undef MLFAB__FRAME_ENUM
      MLFAB__FRAME_TYPES = 27
};

#define MLFAB__TEXT_MAX 256      /* bytes of a text, its terminating zero included */
#define MLFAB__ADDRESSES_MAX 768 /* bytes of a node's list of addresses, likewise */
#define MLFAB__SEGMENTS_MAX 2048 /* stretches of the flat model in one push or pull */
#define MLFAB__SLICES_MAX 4096

/* A stretch of the flat model, bytes. In a list: ascending, not touching, not empty. */
typedef struct mlfab__segment {
  uint64_t offset, bytes;
} mlfab__segment;

/* --- the metas, one struct a type, members in wire order. Lists are arrays of the decoder's caller
 * or of the encoder's; texts travel as u16 length and bytes. --- */

typedef struct mlfab__join { /* node -> coordinator, first frame of a joining connection */
  int32_t rank;              /* as in mlfab_config */
  uint32_t roles, workers, servers, dedicated;
  uint32_t hand;        /* 1: hand-driven, not missed by its heartbeat */
  uint32_t incarnation; /* the one it had before, or 0 */
  uint64_t nonce;       /* of this process, so that a repeated JOIN is recognised */
  char addresses[MLFAB__ADDRESSES_MAX];
} mlfab__join;

typedef struct mlfab__welcome { /* coordinator -> node; bulk: `nodes` encoded mlfab__member_info */
  uint32_t incarnation;         /* of the receiver */
  uint32_t nodes;
} mlfab__welcome;

typedef struct mlfab__member_info { /* u32 node, roles, incarnation, hand; text addresses */
  uint32_t node, roles, incarnation, hand;
  char addresses[MLFAB__ADDRESSES_MAX];
} mlfab__member_info;

typedef struct mlfab__refuse { /* any -> any; the link is then closed */
  int32_t code, rank;
  char text[MLFAB__TEXT_MAX];
} mlfab__refuse;

typedef struct mlfab__hello { /* worker -> server on a new link */
  uint32_t node, incarnation, roles, hand;
} mlfab__hello;

typedef struct mlfab__hello_ack { /* server -> worker */
  uint32_t server, eager_bytes;   /* credit of bytes without a grant */
  uint32_t generation;            /* of the worker's push stream from here on */
  uint32_t model_stands;          /* 1: this server has a model */
  uint32_t was_dead;              /* 1: had been dead, its rounds went on; 2: not to HELLO, only
                                    the credit is news */
  uint64_t v_train;               /* rounds committed: where a joiner starts */
  uint64_t top;                   /* all updates up to here are decided ... */
  uint64_t applied[4];            /* ... bit i: update top - i was applied (0: refused) */
} mlfab__hello_ack;

typedef struct mlfab__heartbeat {
  uint64_t sent_ns; /* the sender's clock */
} mlfab__heartbeat;

typedef struct mlfab__bye { /* a regular end, or being given up */
  int32_t code;
  char text[MLFAB__TEXT_MAX];
} mlfab__bye;

typedef struct mlfab__member {      /* server 0 -> all: a rank joined again, died, left, is done */
  uint32_t node, incarnation, kind; /* MLFAB_EVENT_* */
  char addresses[MLFAB__ADDRESSES_MAX];
} mlfab__member;

typedef struct
    mlfab__define { /* worker -> server; bulk: `tensors` times {u32 id, u32 dtype, u64 count} */
  uint32_t tensors, rule, sync, mean, deterministic, slices, ghost;
  uint32_t first_weights; /* 1: first weights follow as update 0 */
  double gamma, adadelay_c, beta1, beta2, epsilon, weight_decay;
} mlfab__define;

typedef struct mlfab__tensor_info {
  uint32_t id, dtype;
  uint64_t count;
} mlfab__tensor_info;

typedef struct mlfab__define_ack { /* server -> worker: the model stands here, or why not */
  int32_t code;
  uint32_t server;
  uint64_t v_train;
  char text[MLFAB__TEXT_MAX];
  /* Worker 0's options, which win, follow as a define without tensors. */
  mlfab__define options;
} mlfab__define_ack;

enum { MLFAB__PUSH_MORE = 1, MLFAB__PUSH_INIT = 2 };

/* worker -> server: announces an update; its first bytes may come as the bulk.
 * u32 segment count, then segments; u32 version count (1: the same for all slices touched; else one for each in ascending
 * order), then versions. */
typedef struct mlfab__push {
  uint64_t seq;        /* of its first member */
  uint32_t members;    /* how many merged updates: seq .. seq + members - 1 */
  uint32_t generation; /* of the stream */
  uint32_t flags;
  uint32_t eager;    /* bytes of credit that it takes; at most that is sent before a grant */
  uint64_t progress; /* the worker's iteration, from 0 */
  uint64_t bytes;    /* all of it at this server = sum of its segments */
  double scale, norm;
  uint32_t segments;
  uint32_t versions;
} mlfab__push;

typedef struct mlfab__chunk { /* worker -> server: the next bytes of an update */
  uint64_t seq, offset;       /* offset: within the update's bytes at this server */
  uint32_t generation;
} mlfab__chunk;

typedef struct mlfab__grant { /* server -> worker: update may be sent up to `upto` of its bytes */
  uint64_t seq, upto;
  uint32_t generation;
} mlfab__grant;

typedef struct mlfab__push_ack { /* server -> worker: decided */
  uint64_t seq;
  uint32_t members, generation;
  int32_t code; /* 0: applied */
  uint64_t version,
      delay; /* largest over the slices, after the commit; delay of the first member */
  uint64_t v_train;
} mlfab__push_ack;

typedef struct mlfab__resend { /* server -> worker: send again, in order, what is not decided */
  uint32_t generation;         /* the new one; everything older is discarded here */
  uint64_t top;
  uint64_t applied[4];
} mlfab__resend;

typedef struct mlfab__withdraw { /* worker -> server: forget this update unless it is decided */
  uint64_t seq;
  uint32_t members, generation;
} mlfab__withdraw;

typedef struct mlfab__pull { /* u32 segment count and segments follow */
  uint64_t request;
  uint64_t progress; /* how many rounds this worker has pushed */
  uint32_t segments;
} mlfab__pull;

enum { MLFAB__MODEL_LAST = 1 }; /* flags: the pull is answered with this */
typedef struct mlfab__model {   /* server -> worker: bytes of one slice at one version */
  uint64_t request;
  uint64_t offset;          /* in the flat model */
  uint64_t version, commit; /* of the slice */
  uint32_t slice, flags;
} mlfab__model;

typedef struct mlfab__pull_fail {
  uint64_t request;
  int32_t code, rank;
  char text[MLFAB__TEXT_MAX];
} mlfab__pull_fail;

typedef struct mlfab__pull_cancel {
  uint64_t request;
} mlfab__pull_cancel;

typedef struct mlfab__barrier { /* both directions: BARRIER up, BARRIER_DONE down */
  uint64_t number;              /* the worker's count of barriers, from 1 */
} mlfab__barrier;

typedef struct
    mlfab__bcast { /* both directions: BCAST up (root: with bulk; others: a request), BCAST_DATA down */
  uint64_t number;        /* the worker's count of broadcasts, from 1 */
  uint64_t bytes, offset; /* of the whole, of this bulk */
  int32_t root;
  int32_t code; /* down: SHAPE, PEER_DEAD ... */
  int32_t rank; /* to blame */
} mlfab__bcast;

typedef struct mlfab__done { /* DONE up: no more data; DONE_ACK down */
  uint64_t last_seq;
} mlfab__done;

/* --- encoding and decoding --- */

/* One pair per type, all of this form (meta has room for MLFAB_META_MAX bytes, or for the largest
 * meta of the type where that is known; what m holds after an error is not specified):
 *   uint32_t mlfab__encode_join(uint8_t *meta, const mlfab__join *m);      -> bytes of meta
 *   int      mlfab__decode_join(const uint8_t *meta, uint32_t bytes, mlfab__join *m);  -> 0 or FRAME
 * Those with lists take them as further arguments. */
/* clang-format off */
#define MLFAB__WIRE_PAIRS(X) \
  X(join) X(welcome) X(refuse) X(hello) X(hello_ack) X(heartbeat) X(bye) X(member) \
  X(define) X(define_ack) X(chunk) X(grant) X(push_ack) X(resend) X(withdraw) X(model) \
  X(pull_fail) X(pull_cancel) X(barrier) X(bcast) X(done)
/* clang-format on */
#define MLFAB__WIRE_DECLARE(name)                                                       \
  MLFAB__INTERNAL uint32_t mlfab__encode_##name(uint8_t *meta, const mlfab__##name *m); \
  MLFAB__INTERNAL int mlfab__decode_##name(const uint8_t *meta, uint32_t bytes, mlfab__##name *m);
MLFAB__WIRE_PAIRS(MLFAB__WIRE_DECLARE)
#undef MLFAB__WIRE_DECLARE

/* versions has room for MLFAB__SLICES_MAX, segments for MLFAB__SEGMENTS_MAX when decoding. A push that
 * does not fit into MLFAB_META_MAX encodes to 0. Decoding checks: segments ascending, apart, not empty, no
 * overflow, their sum = bytes; members 1..4096, seq + members not wrapping; eager <= bytes; scale
 * finite; at least one version unless there are no segments. */
MLFAB__INTERNAL uint32_t mlfab__encode_push(uint8_t *meta, const mlfab__push *m,
                                            const mlfab__segment *segments,
                                            const uint64_t *versions);
MLFAB__INTERNAL int mlfab__decode_push(const uint8_t *meta, uint32_t bytes, mlfab__push *m,
                                       mlfab__segment *segments, uint64_t *versions);
MLFAB__INTERNAL uint32_t mlfab__encode_pull(uint8_t *meta, const mlfab__pull *m,
                                            const mlfab__segment *segments);
MLFAB__INTERNAL int mlfab__decode_pull(const uint8_t *meta, uint32_t bytes, mlfab__pull *m,
                                       mlfab__segment *segments);

/* Lists inside bulks. Encode appends one at `at` of a buffer of `room` bytes and returns the bytes
 * taken, 0 when it does not fit. Decode reads one, returns the bytes taken, 0 when malformed. */
MLFAB__INTERNAL uint32_t mlfab__encode_member_info(uint8_t *at, uint32_t room,
                                                   const mlfab__member_info *m);
MLFAB__INTERNAL uint32_t mlfab__decode_member_info(const uint8_t *at, uint32_t room,
                                                   mlfab__member_info *m);
#define MLFAB__TENSOR_INFO_BYTES 16u
MLFAB__INTERNAL void mlfab__encode_tensor_info(uint8_t *at, const mlfab__tensor_info *m);
MLFAB__INTERNAL void mlfab__decode_tensor_info(const uint8_t *at, mlfab__tensor_info *m);

/* Writes the 64 header bytes before the meta at head + 64, checksums included. The payload's covers
 * the bulk too when flags has WIRE_BULK_CRC, but for a ghost (bulk NULL). Of `header`, payload_crc is
 * not looked at, and protocol 0 means MLFAB_PROTOCOL. */
MLFAB__INTERNAL void mlfab__wire_seal(uint8_t *head, const mlfab__header *header, const void *bulk);
/* The header of a head that mlfab_frame_check and mlfab_frame_verify accepted. */
MLFAB__INTERNAL void mlfab__wire_open(const uint8_t *head, mlfab__header *header);
/* "PUSH"; "type 77" for unknown ones is not made: "UNKNOWN". */
MLFAB__INTERNAL const char *mlfab__frame_name(uint8_t type);

/* CRC32C (Castagnoli) of bytes, continuing from `crc` (0 to begin). Hardware where there is. */
MLFAB__INTERNAL uint32_t mlfab__crc32c(uint32_t crc, const void *data, size_t bytes);
/* The same from tables: what there is without the hardware, and what tests compare it with. */
MLFAB__INTERNAL uint32_t mlfab__crc32c_portable(uint32_t crc, const void *data, size_t bytes);
/* FNV-1a with a mix at the end: names of jobs, traces. */
MLFAB__INTERNAL uint64_t mlfab__hash(uint64_t seed, const void *data, size_t bytes);

#endif
