/* clock_copy.c - the server role: its clock as a record. See clock_copy.h. */
#include "clock_copy.h"

MLFAB__INTERNAL void mlfab__clock_told(const mlfab__server *server, mlfab__clock_record *out,
                                       uint32_t *words) {
  const mlfab__clock *clock = &server->clock;
  *out = (mlfab__clock_record){.contributors = clock->contributors,
                               .members = clock->round_members,
                               .quiet = clock->tuner.quiet,
                               .v_train = clock->v_train,
                               .refused_round = clock->refused_round,
                               .threshold = clock->tuner.threshold,
                               .scale = clock->round_scale,
                               .consistency = clock->sync,
                               .words = (server->workers + 31) / 32};
  memset(words, 0, out->words * sizeof *words);
  for (uint32_t w = 0; w < server->workers; w++)
    words[w / 32] |= (uint32_t)server->peers[w].contributed << w % 32;
}

MLFAB__INTERNAL void mlfab__clock_take(mlfab__server *server, const mlfab__clock_record *in,
                                       const uint32_t *words) {
  mlfab__clock *clock = &server->clock;
  clock->sync = in->consistency;
  clock->sync.size = sizeof clock->sync;
  clock->v_train = in->v_train;
  clock->tuner = (mlfab__sync_tuner){in->threshold, in->quiet};
  clock->contributors = in->contributors;
  clock->round_members = in->members;
  clock->round_scale = in->scale;
  clock->refused_round = in->refused_round;
  clock->measured = 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    server->peers[w].contributed = words[w / 32] >> w % 32 & 1;
    server->peers[w].change.ask = 0;
  }
  mlfab__clock_measure(server);
  mlfab__clock_members(server);
}

MLFAB__INTERNAL void mlfab__clock_counted(const mlfab__server *server, uint32_t *words) {
  memset(words, 0, (server->workers + 31) / 32 * sizeof *words);
  for (uint32_t w = 0; w < server->workers; w++)
    words[w / 32] |= (uint32_t)mlfab__clock_lives(&server->peers[w]) << w % 32;
}

MLFAB__INTERNAL void mlfab__clock_unite(mlfab__server *server, const mlfab__clock_record *in,
                                        const uint32_t *words) {
  mlfab__clock *clock = &server->clock;
  if (clock->round_members == 0) clock->round_scale = in->scale;
  if (clock->round_members < in->members) clock->round_members = in->members;
  uint32_t contributors = 0; /* some may have no bit: the fabric had more workers */
  for (uint32_t w = 0; w < server->workers; w++) {
    server->peers[w].contributed |= (uint8_t)(words[w / 32] >> w % 32 & 1);
    contributors += server->peers[w].contributed;
  }
  if (contributors < clock->contributors) contributors = clock->contributors;
  clock->contributors = contributors < in->contributors ? in->contributors : contributors;
}

MLFAB__INTERNAL void mlfab__clock_holes(const mlfab__server *server, uint32_t *words) {
  memset(words, 0, (server->workers + 31) / 32 * sizeof *words);
  for (uint32_t w = 0; w < server->workers && server->clock.round_members > 0; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    uint32_t hole = peer->decided > server->clock.v_train && !peer->contributed;
    words[w / 32] |= hole << w % 32;
  }
}

MLFAB__INTERNAL uint64_t mlfab__clock_round(const mlfab__clock_record *clock,
                                            const uint32_t *words) {
  mlfab__clock_record round = {.consistency = clock->consistency};
  uint8_t meta[256];
  if (mlfab__sync_rounds(clock->consistency.kind)) round.v_train = clock->v_train;
  uint32_t bytes = mlfab__encode_clock_record(meta, &round, NULL);
  return mlfab__crc32c(mlfab__crc32c(0, meta, bytes), words, clock->words * sizeof *words);
}

MLFAB__INTERNAL double mlfab__clock_scale(const mlfab__server *server,
                                          const mlfab__clock_record *clock) {
  int steps = clock->members > 0 && !mlfab__optimizer_linear(&server->optimizer);
  return steps ? clock->scale : 0.0;
}

MLFAB__INTERNAL int mlfab__clock_flush(mlfab__server *server) {
  if (server->clock.round_members == 0) return 0;
  mlfab__clock_close(server, 1);
  mlfab__round_apply(server, MLFAB__NEVER);
  return server->apply.code;
}
