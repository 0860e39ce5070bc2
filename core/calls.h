/* calls.h - a node: collectives between workers, as they are called. Layer 5. */
#ifndef MLFAB__CALLS_H
#define MLFAB__CALLS_H

#include "node.h"

/* A call: what it does not have is 0. Memory is the caller's. */
typedef struct mlfab__collective {
  uint8_t kind; /* MLFAB__RING_* */
  uint8_t plan; /* 1: allreduce that goes by the scheduler's tree, where there is one and it pays */
  uint8_t block; /* 1: the caller waits, and has memory in common with others of its host */
  int dtype;     /* 0: bytes */
  int32_t root;  /* of a broadcast */
  const mlfab_vec *bufs;
  uint32_t n;
  void *data; /* instead of bufs: `counts` elements a rank, or `bytes` */
  uint64_t bytes;
  const uint64_t *counts;
  const mlfab_collective *options; /* or NULL */
  /* Filled by mlfab__node_collective. call.outside: it got a number, and is to be run by the caller
   * when mlfab__comm_outside says so. call.vecs may point into this. */
  mlfab_vec one;
  mlfab__comm_call call;
} mlfab__collective;

/* Checks it and begins it. Errors: as of its public form. */
MLFAB__INTERNAL int mlfab__node_collective(mlfab_node *node, mlfab__collective *c, uint64_t now_ns,
                                           mlfab_request *request_p);
/* One with call.outside was carried out, or failed: see mlfab__comm_finish. */
MLFAB__INTERNAL void mlfab__node_carried_out(mlfab_node *node, mlfab_request request, int code,
                                             int32_t rank, uint64_t now_ns);
/* It was left because others do without: goes on with frames, unless it has failed. */
MLFAB__INTERNAL void mlfab__node_turn_plain(mlfab_node *node, mlfab_request request);
/* The others' memory was mapped, or not: see mlfab__comm_mapped. */
MLFAB__INTERNAL void mlfab__node_mapped(mlfab_node *node, int ok);

#endif
