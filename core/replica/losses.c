/* losses.c - counts the updates that a worker loses when a replica replaces its server. See copy.h. */
#include "copy.h"

#include "../worker/worker.h"

#include <stdio.h>

/* Called when another copy of the server serves: counts the updates that the former copy applied and this one lacks.
 * They stay in this worker's progress, so no round waits for them. */
static int losses_count(mlfab__worker *worker, uint32_t server, const mlfab__hello_ack *ack) {
  mlfab__stream *stream = &worker->streams[server];
  if (ack->term > stream->term && stream->taken > ack->taken) {
    char text[MLFAB__TEXT_MAX];
    uint64_t lost = stream->taken - ack->taken;
    worker->stats->updates_lost += lost;
    snprintf(text, sizeof text, "%llu updates of worker %u were lost with a server",
             (unsigned long long)lost, worker->rank);
    worker->port.event(worker->port.self, MLFAB_EVENT_UPDATES_LOST, (int32_t)server, 1, 0, 0, text);
    stream->taken = ack->taken;
  }
  if (ack->term <= stream->term) return 0;
  stream->term = ack->term;
  /* The former copy may have made commits that this one lacks. */
  if (worker->cache) worker->cache->lost(worker, server);
  return 1;
}

MLFAB__INTERNAL void mlfab__losses_attach(mlfab__worker *worker) { worker->copies = losses_count; }
