/* keys_wire.h - frames by which the two ends of a link prove that they know the fabric's key. See guard.h, wire.h. */
#ifndef MLFAB__KEYS_WIRE_H
#define MLFAB__KEYS_WIRE_H

#include "../wire/wire.h"

typedef struct mlfab__challenge { /* caller -> called, the first frame of a link */
  uint32_t node, roles, epoch;    /* of the caller */
  uint32_t first; /* the frame type that will follow the proof: JOIN, HELLO or MEET */
  uint32_t to,
      of; /* number of the wanted process, as a worker or server, and its possible roles: MLFAB_ROLE_* */
  uint32_t vouched; /* 1: the caller's kernel says that the other end is this user's */
  uint64_t nonce[2];
  uint64_t keys[2]; /* names of the caller's keys, best first; 0: no second key */
  uint64_t job;     /* hash (guard.c): tells ends without a common key whether they share a job */
} mlfab__challenge;

typedef struct mlfab__answer {   /* called -> caller */
  uint32_t number, roles, epoch; /* of the called node: its number as a worker or server */
  uint32_t key;                  /* place of the caller's first key that this node has: 0 or 1 */
  uint32_t vouched;              /* 1: both kernels vouch, so the frames that follow have no tags */
  uint64_t nonce[2], proof[2];
} mlfab__answer;

typedef struct
    mlfab__proof { /* caller -> called: the challenge again, which the called node has not kept */
  mlfab__challenge challenge;
  uint64_t proof[2];
} mlfab__proof;

/* Bytes of their metas: buffers of MLFAB__KEYS_META hold any of them. */
#define MLFAB__KEYS_META 96u

#define MLFAB__KEYS_PAIRS(X) X(challenge) X(answer) X(proof)
MLFAB__KEYS_PAIRS(MLFAB__WIRE_DECLARE)

#endif
