/* state.h - the records of a server's state, for a checkpoint's files and for the stream of a copy.
 *
 * A record has a meta (one of the structs below, or DEFINE's) and a bulk. moment.h makes the records of a server,
 * reader.h takes them one after another. */
#ifndef MLFAB__STATE_H
#define MLFAB__STATE_H

#include "../wire/wire.h"

enum mlfab__record_type {
  MLFAB__RECORD_MANIFEST = 1,
  MLFAB__RECORD_HEAD = 2,
  MLFAB__RECORD_DEFINE = 3,
  MLFAB__RECORD_CLOCK = 4,
  MLFAB__RECORD_WORKER = 5,
  MLFAB__RECORD_SLICE = 6,
  MLFAB__RECORD_IMAGE = 7, /* BYTES */
  MLFAB__RECORD_END = 8,
  MLFAB__RECORD_PEER = 9,  /* only for a copy on another server: follows WORKER */
  MLFAB__RECORD_VOTES = 10 /* votes of a voter: ../replica/voter.h */
};

typedef struct mlfab__file_record {
  uint16_t type;
  uint32_t index;
  uint64_t set;
  uint32_t meta_bytes, bulk_bytes;
  const uint8_t *meta, *bulk; /* both in the buffer */
} mlfab__file_record;

typedef struct mlfab__checkpoint_head { /* HEAD, the first record of a shard's file */
  uint64_t number;
  uint32_t server, servers, workers;
  uint32_t epoch;  /* epoch of the layout */
  uint32_t slices; /* number of slices of the model */
  uint32_t owned;  /* number of slices of this shard */
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

typedef struct mlfab__checkpoint_peer { /* PEER: a worker's data that only a copy needs */
  uint32_t worker, flags;               /* MLFAB__PEER_* */
  uint64_t decided, changed;            /* as in mlfab__server_peer */
  uint64_t taken;                       /* as in mlfab__window */
  double significance;
} mlfab__checkpoint_peer;

typedef struct mlfab__checkpoint_slice { /* SLICE; its BYTES follow */
  uint32_t slice;                        /* number in the layout */
  uint64_t version, commit;
} mlfab__checkpoint_slice;

typedef struct mlfab__checkpoint_bytes { /* BYTES: a chunk of an image (image.h) */
  uint32_t slice, kind;
  uint64_t offset;
  uint32_t last;
} mlfab__checkpoint_bytes;

typedef struct mlfab__checkpoint_end { /* END, the last record of a shard's file */
  uint32_t records;                    /* number of records before this one */
} mlfab__checkpoint_end;

/* As declared in wire.h, for each type. */
/* clang-format off */
#define MLFAB__STATE_PAIRS(X) \
  X(checkpoint_head) X(checkpoint_worker) X(checkpoint_peer) X(checkpoint_slice) X(checkpoint_bytes) X(checkpoint_end)
/* clang-format on */
MLFAB__STATE_PAIRS(MLFAB__WIRE_DECLARE)

#endif
