/* report.c - the server role: sends its reports to the scheduler. See client.h. */
#include "client.h"

MLFAB__INTERNAL int mlfab__report_plans(const mlfab__server *server, uint64_t bytes) {
  return server->sched->up && bytes > server->config->eager_bytes;
}

MLFAB__INTERNAL uint64_t mlfab__report_shape(const mlfab__segment *segments, uint32_t n) {
  return mlfab__hash(n, segments, n * sizeof *segments);
}

/* Returns the bytes that the transport has not taken yet. */
MLFAB__INTERNAL uint64_t mlfab__report_left(const mlfab__server_pull *pull) {
  uint64_t left = 0;
  for (uint32_t i = pull->segment; i < pull->segments_used; i++) left += pull->segments[i].bytes;
  return left - pull->in_segment;
}

MLFAB__INTERNAL uint64_t mlfab__report_out_backlog(const mlfab__server *server) {
  uint64_t bytes = 0;
  for (const mlfab__server_pull *pull = server->serve.first; pull; pull = pull->next) {
    if (mlfab__server_goes(pull) || pull->held == MLFAB__PULL_FOR_TURN)
      bytes += mlfab__report_left(pull);
  }
  return bytes;
}

MLFAB__INTERNAL uint64_t mlfab__report_backlog(const mlfab__server *server) {
  uint64_t bytes = 0;
  for (const mlfab__incoming *u = server->queue.first; u; u = u->next) {
    if (!mlfab__queue_follows(u)) bytes += u->push.bytes - mlfab__min(u->received, u->push.bytes);
  }
  return bytes;
}

MLFAB__INTERNAL void mlfab__report_tell(mlfab__server *server, uint8_t type, const void *meta,
                                        uint32_t bytes) {
  if (server->sched->up) server->port.post(server->port.self, server->workers, type, meta, bytes);
}

MLFAB__INTERNAL void mlfab__report_over(mlfab__server *server, uint32_t kind, uint32_t worker,
                                        uint64_t id, int code) {
  uint8_t meta[128];
  mlfab__report report;
  if (!server->sched->up) return;
  memset(&report, 0, sizeof report);
  report.id = id;
  report.placed = server->queue.placed;
  report.backlog = mlfab__report_backlog(server);
  report.out_backlog = mlfab__report_out_backlog(server);
  report.version = server->store.nslices > 0 ? server->store.slices[0].version : 0;
  report.kind = kind;
  report.worker = worker;
  report.code = code;
  mlfab__report_tell(server, MLFAB__REPORT, meta, mlfab__encode_report(meta, &report));
}

MLFAB__INTERNAL void mlfab__report_announce(mlfab__server *server, mlfab__announce *announce) {
  uint8_t meta[128];
  announce->placed = server->queue.placed;
  announce->incarnation = server->peers[announce->worker].incarnation;
  mlfab__report_tell(server, MLFAB__ANNOUNCE, meta, mlfab__encode_announce(meta, announce));
}
