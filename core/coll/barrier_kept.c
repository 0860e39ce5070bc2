/* barrier_kept.c - barriers at both copies of server 0: record 0, and one for each worker. See barrier_kept.h. */
#include "barrier_kept.h"

static void barrier_touched(mlfab__barrier_server *server, uint32_t worker) {
  mlfab__touched(server->touch, 0);
  mlfab__touched(server->touch, 1 + worker);
}

static uint32_t barrier_encode(const void *self, uint32_t record, uint8_t *bytes) {
  const mlfab__barrier_server *server = self;
  if (record == 0) {
    const mlfab__barrier_state state = {server->over};
    return mlfab__encode_barrier_state(bytes, &state);
  }
  const mlfab__barrier_entry *entry = &server->entries[record - 1];
  const mlfab__barrier_worker_state state = {.gone = entry->gone,
                                             .done = entry->done,
                                             .left = entry->left,
                                             .guest = entry->guest,
                                             .wants = entry->wants,
                                             .half = entry->half,
                                             .among = entry->among,
                                             .base = entry->base,
                                             .asked = entry->asked,
                                             .progress = entry->progress};
  return mlfab__encode_barrier_worker_state(bytes, &state);
}

static int barrier_decode(void *self, uint32_t record, const uint8_t *bytes, uint32_t n,
                          int apply) {
  mlfab__barrier_server *server = self;
  mlfab__barrier_state state;
  mlfab__barrier_worker_state in;
  int code = record ? mlfab__decode_barrier_worker_state(bytes, n, &in)
                    : mlfab__decode_barrier_state(bytes, n, &state);
  if (code || !apply) return code;
  if (record == 0) {
    server->over = state.over;
    server->missing = MLFAB_NO_RANK;
  } else {
    server->entries[record - 1] = (mlfab__barrier_entry){.gone = in.gone != 0,
                                                         .done = in.done != 0,
                                                         .left = in.left != 0,
                                                         .guest = in.guest != 0,
                                                         .wants = in.wants != 0,
                                                         .half = in.half != 0,
                                                         .among = in.among != 0,
                                                         .progress = in.progress,
                                                         .base = in.base,
                                                         .asked = in.asked};
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__barrier_keep(struct mlfab_node *node, mlfab__barrier_server *server) {
  server->touched = barrier_touched;
  mlfab__mirrored_add(node, &(mlfab__mirrored){.name = "barrier",
                                               .self = server,
                                               .records = 1 + server->workers,
                                               .encode = barrier_encode,
                                               .decode = barrier_decode,
                                               .port = &server->port,
                                               .workers = 1,
                                               .touch = &server->touch});
}
