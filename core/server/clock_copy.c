/* clock_copy.c - the server role: clocks as records. See clock_copy.h. */
#include "clock_copy.h"

/* V_train for arriving slices. With an open sum it is that of the arriving clock: a worker must not pull
 * its own update before the round is closed. */
static uint64_t copy_here(const mlfab__server *server, const mlfab__clock_record *in) {
  uint64_t least = UINT64_MAX;
  for (uint32_t g = 0; g < server->ngates; g++) {
    if (server->clocks[g].used) least = mlfab__min(least, server->clocks[g].v_train);
  }
  return mlfab__sync_rounds(in->consistency.kind) && in->members > 0 ? in->v_train : least;
}

MLFAB__INTERNAL void mlfab__clock_told(const mlfab__server *server, uint32_t g,
                                       mlfab__clock_record *out, uint32_t *words) {
  const mlfab__clock *clock = &server->clocks[g];
  memset(out, 0, sizeof *out);
  out->clock = g;
  out->contributors = clock->contributors;
  out->members = clock->round_members;
  out->quiet = clock->tuner.quiet;
  out->v_train = clock->v_train;
  out->refused_round = clock->refused_round;
  out->threshold = clock->tuner.threshold;
  out->scale = clock->round_scale;
  out->consistency = clock->sync;
  out->words = (server->workers + 31) / 32;
  memset(words, 0, out->words * sizeof *words);
  for (uint32_t w = 0; w < server->workers; w++)
    words[w / 32] |= (server->peers[w].contributed >> g & 1) << w % 32;
}

MLFAB__INTERNAL void mlfab__clock_counted(const mlfab__server *server, uint32_t *words) {
  memset(words, 0, (server->workers + 31) / 32 * sizeof *words);
  for (uint32_t w = 0; w < server->workers; w++)
    words[w / 32] |= (uint32_t)mlfab__clock_lives(&server->peers[w]) << w % 32;
}

MLFAB__INTERNAL int mlfab__clock_joins(const mlfab__server *server,
                                       const mlfab__clock_record *clock,
                                       const uint32_t *clock_words, const mlfab__clock_record *in,
                                       const uint32_t *words) {
  int rounds = mlfab__sync_rounds(in->consistency.kind);
  int scaled = rounds && !mlfab__optimizer_linear(&server->optimizer);
  if (!mlfab__sync_equal(&clock->consistency, &in->consistency)) return 0;
  /* Without a sum, the clock has no state that is not here already. */
  if (!rounds || in->members == 0) return 1;
  if (scaled && (clock->scale < in->scale || clock->scale > in->scale)) return 0;
  return clock->v_train == in->v_train && clock->members == in->members &&
         clock->contributors == in->contributors &&
         memcmp(clock_words, words, in->words * sizeof *words) == 0;
}

MLFAB__INTERNAL uint32_t mlfab__clock_match(const mlfab__server *server,
                                            const mlfab__clock_record *in, const uint32_t *words) {
  uint32_t own_words[MLFAB__RESHARD_SERVER_WORDS_MAX];
  mlfab__clock_record own;
  for (uint32_t g = 0; g < server->ngates; g++) {
    if (!server->clocks[g].used) continue;
    mlfab__clock_told(server, g, &own, own_words);
    if (mlfab__clock_joins(server, &own, own_words, in, words)) return g;
  }
  return MLFAB__CLOCKS;
}

MLFAB__INTERNAL uint32_t mlfab__clock_adopt(mlfab__server *server, const mlfab__clock_record *in,
                                            const uint32_t *words) {
  uint64_t v_train = copy_here(server, in);
  uint32_t g = mlfab__clock_match(server, in, words);
  if (g < MLFAB__CLOCKS) return g;
  g = mlfab__clock_new(server, v_train);
  if (g == MLFAB__CLOCKS) return g;
  mlfab__clock *clock = &server->clocks[g];
  clock->sync = in->consistency;
  clock->sync.size = sizeof clock->sync;
  clock->tuner = (mlfab__sync_tuner){in->threshold, in->quiet};
  clock->contributors = in->contributors;
  clock->round_members = in->members;
  clock->round_scale = in->scale;
  clock->refused_round = v_train == in->v_train ? in->refused_round : 0;
  for (uint32_t w = 0; w < server->workers; w++)
    server->peers[w].contributed |= (words[w / 32] >> w % 32 & 1) << g;
  mlfab__clock_measure(server);
  server->untidy = 1;
  return g;
}

/* Takes over a whole state. */
static void copy_take(mlfab__clock *clock, const mlfab__clock_record *in) {
  clock->sync = in->consistency;
  clock->sync.size = sizeof clock->sync;
  clock->v_train = in->v_train;
  clock->tuner = (mlfab__sync_tuner){in->threshold, in->quiet};
  clock->contributors = in->contributors;
  clock->round_members = in->members;
  clock->round_scale = in->scale;
  clock->refused_round = in->refused_round;
}

MLFAB__INTERNAL uint32_t mlfab__clock_restore(mlfab__server *server, int first,
                                              const mlfab__clock_record *in,
                                              const uint32_t *words) {
  if (!first) return mlfab__clock_adopt(server, in, words);
  copy_take(&server->clocks[0], in);
  for (uint32_t w = 0; w < server->workers; w++)
    server->peers[w].contributed = words[w / 32] >> w % 32 & 1;
  mlfab__clock_measure(server);
  return 0;
}

MLFAB__INTERNAL void mlfab__clock_mirror(mlfab__server *server, const mlfab__clock_record *clocks,
                                         uint32_t n, const uint32_t *words) {
  uint32_t nwords = (server->workers + 31) / 32;
  mlfab__clock_free(server);
  for (uint32_t w = 0; w < server->workers; w++) server->peers[w].contributed = 0;
  for (uint32_t i = 0; i < n; i++, words += nwords) {
    uint32_t g = clocks[i].clock;
    server->clocks[g].used = 1;
    copy_take(&server->clocks[g], &clocks[i]);
    if (g >= server->ngates) server->ngates = g + 1;
    for (uint32_t w = 0; w < server->workers; w++)
      server->peers[w].contributed |= (words[w / 32] >> w % 32 & 1) << g;
  }
  mlfab__clock_measure(server);
  server->untidy = n > 1;
  mlfab__clock_members(server);
}
