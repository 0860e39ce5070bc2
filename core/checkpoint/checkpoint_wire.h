/* checkpoint_wire.h - frames of checkpoints, and the manifest's record. See wire.h, record.h. */
#ifndef MLFAB__CHECKPOINT_WIRE_H
#define MLFAB__CHECKPOINT_WIRE_H

#include "../wire/wire.h"

/* --- frames --- */

typedef struct mlfab__checkpoint_ask { /* worker -> server 0: make a checkpoint */
  uint64_t ask;                        /* counts the worker's requests, from 1 */
  uint64_t timeout_ns;
  uint32_t keep; /* 0: server 0's own setting */
  char dir[MLFAB__TEXT_MAX];
} mlfab__checkpoint_ask;

typedef struct mlfab__checkpoint_done { /* server 0 -> worker: it is whole, or has failed */
  uint64_t ask;
  int32_t code, rank;
  uint32_t is_server, servers;
  uint64_t number, version, bytes;
  char text[MLFAB__TEXT_MAX];
} mlfab__checkpoint_done;

typedef struct mlfab__checkpoint_order { /* server 0 -> server: write your shard */
  uint64_t number, set;                  /* set: as in record.h */
  uint32_t index, shards;                /* shards: their number; index: number of this shard */
  char dir[MLFAB__TEXT_MAX];
} mlfab__checkpoint_order;

typedef struct mlfab__checkpoint_shard { /* server -> server 0: its shard is durable or failed */
  uint64_t number, set, bytes, version;
  uint32_t server, chain, epoch;
  int32_t code;
  char text[MLFAB__TEXT_MAX];
} mlfab__checkpoint_shard;

typedef struct mlfab__checkpoint_resume { /* worker 0 -> server: restore the model from the newest
                                             checkpoint in `dir`; "": do not restore */
  char dir[MLFAB__TEXT_MAX];
} mlfab__checkpoint_resume;

/* --- records --- */

typedef struct mlfab__checkpoint_entry { /* entry of a manifest: one shard */
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
  X(checkpoint_ask) X(checkpoint_done) X(checkpoint_order) X(checkpoint_shard) X(checkpoint_resume)
#define MLFAB__CHECKPOINT_LISTS(X) \
  X(checkpoint_manifest, mlfab__checkpoint_entry)
/* clang-format on */
MLFAB__CHECKPOINT_PAIRS(MLFAB__WIRE_DECLARE)
MLFAB__CHECKPOINT_LISTS(MLFAB__WIRE_DECLARE_LIST)

#endif
