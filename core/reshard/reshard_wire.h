/* reshard_wire.h - frames of slices that move between servers. See wire.h. */
#ifndef MLFAB__RESHARD_WIRE_H
#define MLFAB__RESHARD_WIRE_H

#include "../wire/wire.h"

typedef struct mlfab__reshard_ask { /* RESHARD, worker -> server 0; u32 count and u16 numbers of the
                                       servers follow */
  uint64_t ask;                     /* counts the worker's requests, from 1 */
  uint64_t timeout_ns;
  uint32_t servers;
} mlfab__reshard_ask;

typedef struct mlfab__reshard_done { /* server 0 -> worker */
  uint64_t ask;
  int32_t code, rank;
  uint32_t is_server;
  char text[MLFAB__TEXT_MAX];
} mlfab__reshard_done;

typedef struct
    mlfab__freeze { /* FREEZE, server 0 -> worker; u32 count and u16 numbers of the servers that soon
                       get their first slices follow */
  uint32_t attempt, servers;
} mlfab__freeze;

typedef struct mlfab__frozen { /* worker -> server 0 */
  uint32_t attempt;
  uint32_t unreached; /* one of those servers, out of its reach; or MLFAB__NO_NODE */
} mlfab__frozen;

/* On BEGIN and OVER the server forgets undecided updates, and HELLO_ACK reports the decided updates. */
enum mlfab__stop_kind {
  MLFAB__STOP_BEGIN = 0,
  MLFAB__STOP_DRAINED = 1, /* the worker sends nothing more until the slices have moved */
  MLFAB__STOP_OVER = 2
};
typedef struct mlfab__stop { /* worker -> server */
  uint32_t attempt, kind;
} mlfab__stop;

enum mlfab__move_step {
  MLFAB__MOVE_ABORT = 0,
  MLFAB__MOVE_PREPARE = 1, /* with owners: stop deciding, make room */
  MLFAB__MOVE_SEND = 2,    /* all are ready: send the slices that leave */
  MLFAB__MOVE_INSTALL = 3  /* all slices have arrived: use the new layout */
};
typedef struct mlfab__move { /* server 0 -> server; u32 count and u16 owners of all slices follow */
  uint32_t attempt, step;
  uint32_t flush;  /* only with SEND, else 0. 1: first apply the open round as it is */
  uint32_t slices; /* only with PREPARE, else 0 */
} mlfab__move;

typedef struct
    mlfab__reshard_server_bytes { /* RESHARD_SERVER, server -> server: the next bytes of a slice */
  uint32_t attempt, slice, kind;  /* kind: MLFAB__IMAGE_* (image.h) */
  uint64_t offset;                /* offset in the slice */
  uint64_t version, commit;
  uint32_t last; /* 1: the last bytes of this slice */
} mlfab__reshard_server_bytes;

typedef struct
    mlfab__resume { /* server 0 -> worker; u32 count and u16 owners of all slices follow */
  uint32_t attempt; /* this attempt and all before it are over */
  uint32_t epoch;   /* epoch of the current layout */
  uint32_t slices;
} mlfab__resume;

/* As declared in wire.h, for each type. */
/* clang-format off */
#define MLFAB__RESHARD_PAIRS(X) \
  X(reshard_done) X(frozen) X(stop) X(reshard_server_bytes)
#define MLFAB__RESHARD_LISTS(X) \
  X(reshard_ask, uint32_t) \
  X(freeze, uint32_t) \
  X(move, uint32_t) \
  X(resume, uint32_t)
/* clang-format on */
MLFAB__RESHARD_PAIRS(MLFAB__WIRE_DECLARE)
MLFAB__RESHARD_LISTS(MLFAB__WIRE_DECLARE_LIST)

#endif
