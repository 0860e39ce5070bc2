/* recut.c - the worker role: a layout with other owners divides updates, pulls and changes anew. See reshard.h. */
#include "reshard.h"

#include "../worker/worker.h"

MLFAB__INTERNAL void mlfab__push_recut(mlfab__worker *worker, uint64_t now_ns) {
  mlfab__outgoing *update;
  mlfab_error error;
  for (uint32_t i = 0; i < worker->norder; i += update->seq != 0) {
    update = &worker->updates[worker->order[i]];
    int decided = 0;
    for (uint32_t s = 0; s < worker->servers; s++)
      decided |= update->parts[s].state == MLFAB__PART_DECIDED;
    if (decided || update->withdrawn) continue; /* it only waits for the return of its loans */
    if (!mlfab__push_parts_begin(worker, update, &error)) {
      mlfab__push_parts_end(worker, update);
      continue;
    }
    /* Its parts no longer fit into a frame. */
    for (uint32_t s = 0; s < worker->servers; s++) update->parts[s].state = MLFAB__PART_NONE;
    update->parts[0].state = MLFAB__PART_QUEUED;
    mlfab__push_decide(worker, update, 0, MLFAB_ERR_LIMIT, now_ns);
  }
  mlfab__push_align(worker); /* the updates have parts at other servers now */
}

static int recut_maps(const mlfab__worker *worker, const mlfab__fetch *fetch) {
  return fetch->view && worker->viewer->maps(fetch);
}

MLFAB__INTERNAL void mlfab__pull_recut(mlfab__worker *worker, uint64_t now_ns) {
  if (worker->cache) worker->cache->lost(worker, MLFAB_ALL);
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    mlfab__pull_cancel cancel = {fetch->request};
    uint64_t bytes;
    uint32_t segments = 0;
    if (fetch->request == 0) continue;
    if (fetch->view) worker->viewer->forget(worker, fetch, MLFAB_ALL);
    fetch->nwaiting = 0;
    for (uint32_t s = 0; s < worker->servers && segments != UINT32_MAX; s++) {
      mlfab__fetch_part *part = &fetch->parts[s];
      /* A server that has reported it has a view under this number. */
      if (recut_maps(worker, fetch) && part->asked)
        MLFAB__POST(&worker->port, s, MLFAB__PULL_CANCEL, pull_cancel, &cancel);
      segments = mlfab__worker_clip(worker, s, fetch->sources, fetch->nsources, &bytes);
      if (fetch->cache) segments = segments > 0; /* a pull asks for whole slices */
      part->waiting = segments > 0;
      part->asked = 0;
      if (worker->routes) worker->routes->pull_leave(worker, fetch, s);
      fetch->nwaiting += part->waiting;
    }
    if (segments == UINT32_MAX)
      mlfab__request_finish(
          worker->requests, mlfab__pull_stop(worker, fetch), MLFAB_ERR_LIMIT, MLFAB_NO_RANK, 0,
          now_ns, "pull: too many separate stretches of the model, since slices have moved");
  }
}

MLFAB__INTERNAL void mlfab__worker_change_again(mlfab__worker *worker) {
  mlfab__sync_change *change = &worker->change;
  if (!change->request || !change->all) return;
  /* Otherwise a server that has got its first slices from a server without the change would miss it. */
  change->ask.ask++;
  change->nwaiting = 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    worker->streams[s].changes = !worker->streams[s].dead && !worker->streams[s].absent;
    change->nwaiting += worker->streams[s].changes;
  }
}
