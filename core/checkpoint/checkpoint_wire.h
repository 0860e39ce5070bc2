/* checkpoint_wire.h - frames of checkpoints, and the metas of the records in their files. See wire.h, record.h. Layer
 * 4. */
#ifndef MLFAB__CHECKPOINT_WIRE_H
#define MLFAB__CHECKPOINT_WIRE_H

#include "../wire/wire.h"

/* --- frames --- */

typedef struct mlfab__checkpoint_ask { /* worker -> server 0: make a checkpoint */
  uint64_t ask;                        /* counts the worker's requests, from 1 */
  uint64_t timeout_ns;
  uint32_t keep; /* 0: as server 0 is configured */
  char dir[MLFAB__TEXT_MAX];
} mlfab__checkpoint_ask;

typedef struct mlfab__checkpoint_done { /* server 0 -> worker: it is whole, or why not */
  uint64_t ask;
  int32_t code, rank;
  uint32_t is_server, servers;
  uint64_t number, version, bytes;
  char text[MLFAB__TEXT_MAX];
} mlfab__checkpoint_done;

typedef struct mlfab__checkpoint_order { /* server 0 -> server: write your shard */
  uint64_t number, set;                  /* set: as in record.h */
  uint32_t index, shards;                /* of the shards this one is number `index` */
  char dir[MLFAB__TEXT_MAX];
} mlfab__checkpoint_order;

typedef struct mlfab__checkpoint_shard { /* server -> server 0: its shard is durable, or why not */
  uint64_t number, set, bytes, version;
  uint32_t server, chain, epoch;
  int32_t code;
  char text[MLFAB__TEXT_MAX];
} mlfab__checkpoint_shard;

typedef struct mlfab__checkpoint_resume { /* worker 0 -> server: the model will begin as the newest
                                             checkpoint in `dir`; "": it will not */
  char dir[MLFAB__TEXT_MAX];
} mlfab__checkpoint_resume;

/* --- records --- */

typedef struct mlfab__checkpoint_head { /* HEAD, the first record of a shard's file */
  uint64_t number;
  uint32_t server, servers, workers;
  uint32_t epoch;  /* of the layout */
  uint32_t slices; /* of the model */
  uint32_t owned;  /* of this shard */
} mlfab__checkpoint_head;

typedef struct
    mlfab__checkpoint_worker { /* WORKER: its window of decided updates, and its progress */
  uint32_t worker, incarnation;
  uint64_t top, applied[4], dropped[4];
  uint64_t pushed;
} mlfab__checkpoint_worker;

enum {
  MLFAB__PEER_DEAD = 1,
  MLFAB__PEER_LEFT = 2,
  MLFAB__PEER_DONE = 4,
  MLFAB__PEER_ABSENT = 8,
  MLFAB__PEER_GUEST = 16
};

typedef struct mlfab__checkpoint_peer { /* PEER: what only a copy of the server needs of a worker */
  uint32_t worker, flags;               /* MLFAB__PEER_* */
  uint64_t decided, changed;            /* as in mlfab__server_peer */
  uint64_t taken;                       /* as in mlfab__window */
  double significance;
} mlfab__checkpoint_peer;

typedef struct mlfab__checkpoint_slice { /* SLICE; its BYTES follow */
  uint32_t slice, clock;                 /* numbers in the layout, and of a CLOCK before */
  uint64_t version, commit;
} mlfab__checkpoint_slice;

typedef struct mlfab__checkpoint_bytes { /* BYTES: a chunk of an image (image.h) */
  uint32_t slice, kind;
  uint64_t offset;
  uint32_t last;
} mlfab__checkpoint_bytes;

typedef struct mlfab__checkpoint_end { /* END, the last record of a shard's file */
  uint32_t records;                    /* before this one */
} mlfab__checkpoint_end;

typedef struct mlfab__checkpoint_entry { /* of a manifest: one shard */
  uint64_t bytes;
  uint32_t chain; /* checksum over the headers of all its records */
} mlfab__checkpoint_entry;

typedef struct
    mlfab__checkpoint_manifest { /* MANIFEST: the only record of its file; u32 count and entries follow */
  uint64_t number, version, bytes;
  uint32_t epoch, slices;
  uint32_t shards;
} mlfab__checkpoint_manifest;

#define MLFAB__CHECKPOINT_SHARDS_MAX 4096u

/* As declared in wire.h, for each type. */
/* clang-format off */
#define MLFAB__CHECKPOINT_PAIRS(X) \
  X(checkpoint_ask) X(checkpoint_done) X(checkpoint_order) X(checkpoint_shard) X(checkpoint_resume) \
  X(checkpoint_head) X(checkpoint_worker) X(checkpoint_peer) X(checkpoint_slice) X(checkpoint_bytes) X(checkpoint_end)
#define MLFAB__CHECKPOINT_LISTS(X) \
  X(checkpoint_manifest, mlfab__checkpoint_entry)
/* clang-format on */
MLFAB__CHECKPOINT_PAIRS(MLFAB__WIRE_DECLARE)
MLFAB__CHECKPOINT_LISTS(MLFAB__WIRE_DECLARE_LIST)

#endif
