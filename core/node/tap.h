/* tap.h - an observer of a node, for traces: it changes nothing. */
#ifndef MLFAB__TAP_H
#define MLFAB__TAP_H

#include "node.h"

/* A frame on a link that a transport sees. `meta` is valid during the call. */
typedef struct mlfab__tap_frame {
  uint64_t now_ns;
  uint8_t out;  /* 1: a transport has taken it; 0: it arrived */
  uint8_t type; /* MLFAB__PUSH ... */
  uint8_t kind; /* of the link */
  uint32_t peer;
  uint32_t incarnation; /* of the sender */
  uint32_t meta_bytes, bulk_bytes;
  const uint8_t *meta;
} mlfab__tap_frame;

/* A transfer that the scheduler has planned. */
typedef struct mlfab__tap_plan {
  uint64_t id;               /* number of the update, or of the pull */
  uint64_t serial;           /* of the plan */
  uint64_t start_ns, end_ns; /* first byte sent, last byte received, as planned */
  uint64_t bytes, delay;
  uint32_t worker, aggregator; /* aggregator: or MLFAB__NO_NODE */
  uint8_t is_pull, dropped;
} mlfab__tap_plan;

typedef struct mlfab__tap {
  void *self;
  void (*frame)(void *self, const mlfab__tap_frame *frame);
  void (*plan)(void *self, const mlfab__tap_plan *plan);
} mlfab__tap;

#endif
