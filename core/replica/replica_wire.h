/* replica_wire.h - frames between the voters of a shard. See wire.h, vote.h, copy.h. */
#ifndef MLFAB__REPLICA_WIRE_H
#define MLFAB__REPLICA_WIRE_H

#include "../wire/wire.h"
#include "vote.h"

typedef struct mlfab__vote_frame { /* voter -> voter */
  uint32_t shard;
  mlfab__vote_message message;
} mlfab__vote_frame;

typedef struct
    mlfab__moment_frame { /* serving copy -> other copy: a record (../checkpoint/state.h); its meta follows */
  uint64_t number; /* of the moment; ascending in a term */
  uint32_t term;   /* term of the sender */
  uint32_t type, index;
  uint64_t since;   /* as in moment_pin: 0: with all slices; else it builds on moment number - 1 */
  uint32_t history; /* history number of the model */
} mlfab__moment_frame;

typedef struct mlfab__moment_has { /* other copy -> serving copy, after END and on a new link */
  uint64_t number;                 /* its last whole moment ... */
  uint32_t term;                   /* ... of this term; 0: none */
  uint64_t refused;                /* a moment of that sender that it refuses, or 0 */
} mlfab__moment_has;

typedef struct
    mlfab__mirror_frame { /* serving copy -> other copy: a record of a part (../node/mirrored.h) follows */
  uint64_t number;        /* number of the mark that the record belongs to; ascending in a term */
  uint32_t term, stream; /* term of the sender; stream: 1, 2, ... */
  uint32_t part, record; /* number; or part is MLFAB__MIRROR_BEGINS or MLFAB__MIRROR_MARK */
} mlfab__mirror_frame;

typedef struct
    mlfab__mirror_has { /* other copy -> serving copy: it has all records up to this mark ... */
  uint64_t number;
  uint32_t term, stream; /* ... of this stream; stream 0: it takes none, and wants a new one */
} mlfab__mirror_has;

#define MLFAB__MIRROR_BEGINS 0xfffffffeu /* u32 records of each part follow */
#define MLFAB__MIRROR_MARK 0xffffffffu

/* VOTES, a record in a voter's file: its bulk is the table. */
typedef struct mlfab__votes_head {
  uint64_t fabric;
  uint32_t shards;
} mlfab__votes_head;

enum {
  MLFAB__MIRROR_FRAME_BYTES = 24,
  MLFAB__MOMENT_FRAME_BYTES = 32,
  MLFAB__VOTE_RECORD_BYTES = 12
};

MLFAB__WIRE_DECLARE(vote_frame)
MLFAB__WIRE_DECLARE(moment_frame)
MLFAB__WIRE_DECLARE(moment_has)
MLFAB__WIRE_DECLARE(mirror_frame)
MLFAB__WIRE_DECLARE(mirror_has)
MLFAB__WIRE_DECLARE(votes_head)
/* Encodes a record of the table. */
MLFAB__INTERNAL void mlfab__encode_vote_record(uint8_t at[MLFAB__VOTE_RECORD_BYTES],
                                               const mlfab__vote_record *record);
MLFAB__INTERNAL void mlfab__decode_vote_record(const uint8_t at[MLFAB__VOTE_RECORD_BYTES],
                                               mlfab__vote_record *record);

#endif
