/* metrics.h - the state of a node as OpenMetrics text.
 *
 * A snapshot is a copy of a node's counters, taken at one moment. The text has one family for each member of
 * mlfab_stats, from a table with the member's offset. A member without a row lacks its family, which a test notices.
 *
 * Invariants. (1) Names end in their unit; samples of counters end in _total; the text ends in "# EOF", but not in
 * the older format. (2) Every sample has the labels of its node: role, and rank, server or both. (3) The text is
 * written as a whole or not at all: the caller asks for its length first.
 *
 * Source: OpenMetrics 1.0. */
#ifndef MLFAB__METRICS_H
#define MLFAB__METRICS_H

#include "../node/node.h"

enum { MLFAB__METRICS_CLOSED = 3 }; /* a state; the others: 0 joins, 1 is ready, 2 has failed */

typedef struct mlfab__snapshot {
  mlfab_stats stats;
  uint64_t unix_ns, opened_unix_ns; /* now; when the context was opened */
  uint32_t state;
  int32_t rank, server; /* or -1 */
  const char *role;     /* "worker", "server", "worker+server", "scheduler" */
  const char *job, *host;
  long pid;
  uint32_t requests; /* number of open requests that are not done */
  /* The oldest request that waits for a known rank, or else the oldest. call NULL: there is none. */
  const char *call;
  uint64_t waits_ns;
  int32_t waits_for; /* or MLFAB_NO_RANK */
  int waits_for_server;
} mlfab__snapshot;

/* Fills all except the times of the wall clock, host and pid. */
MLFAB__INTERNAL void mlfab__metrics_take(const mlfab_node *node, uint64_t now_ns,
                                         mlfab__snapshot *snapshot);
/* Writes the text in a format (MLFAB_METRICS_*), at most `room` bytes with its terminating zero. Returns the length of
 * the whole text. */
MLFAB__INTERNAL size_t mlfab__metrics_text(const mlfab__snapshot *snapshot, int format, char *text,
                                           size_t room);

#endif
