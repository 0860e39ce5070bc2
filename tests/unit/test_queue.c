/* test_queue.c - the delay of an update that waits, by slice.
 *
 * Oracle: every element of the update by itself. */
#include "shards.h"

#include "../testing.h"

enum { COUNT = 8192, SLICES = 8, SEGMENTS = 6 };

static mlfab__rng prng;
static uint64_t below(uint64_t n) { return mlfab__rng_below(&prng, n); }

/* A model of one tensor, in slices whose versions and queued members are drawn. */
static shard *open_shard(void) {
  const mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  shard_setting setting = {.define = {.tensors = 1, .options = options},
                           .tensors = {{1, MLFAB_F32, COUNT}},
                           .block_bytes = 64,
                           .chunk_bytes = 64,
                           .servers = 1};
  setting.define.options.slices = SLICES;
  shard *s = shard_new(&setting);
  s->config.eager_bytes = 4096; /* no worker pushes: the room for its updates is small */
  shard_define(s, &setting);
  assert_int_equal(s->server.store.nslices, SLICES);
  for (uint32_t i = 0; i < SLICES; i++) {
    s->server.store.slices[i].version = below(20);
    s->server.queue.ahead[i] = below(5);
  }
  return s;
}

/* Stretches in order, often several in one slice. */
static uint32_t draw_segments(mlfab__segment *segments) {
  uint32_t n = 0;
  for (uint64_t at = below(COUNT / 4); n < SEGMENTS && at < COUNT;) {
    uint64_t count = 1 + below(below(2) ? 8 : COUNT / 3);
    if (count > COUNT - at) count = COUNT - at;
    segments[n++] = (mlfab__segment){4 * at, 4 * count};
    at += count + 1 + below(below(2) ? 4 : COUNT / 4);
  }
  return n;
}

/* Each slice counts once, with the version that the update has of it, or with the one version for all. */
TEST(test_lag) {
  mlfab__rng_seed(&prng, 1);
  for (int run = 0; run < 500; run++) {
    shard *s = open_shard();
    mlfab__server *server = &s->server;
    mlfab__segment segments[SEGMENTS];
    uint64_t versions[SLICES], ahead[SLICES], delay = 0;
    mlfab__incoming update = {.segments = segments, .versions = versions};
    uint32_t seen = 0, touched[SLICES] = {0}, one = (uint32_t)below(2);
    int64_t members = 1 + (int64_t)below(3);
    for (uint32_t i = 0; i < SLICES; i++) versions[i] = below(4) ? below(20) : UINT64_MAX;
    memcpy(ahead, server->queue.ahead, sizeof ahead);
    update.push.segments = draw_segments(segments);
    for (uint32_t k = 0; k < update.push.segments; k++) {
      for (uint64_t at = 0; at < segments[k].bytes; at += 4) {
        uint32_t slice = mlfab__layout_slice_at(&server->layout, segments[k].offset + at);
        uint32_t i = server->store.local[slice];
        if (touched[i]++) continue;
        uint64_t version = server->store.slices[i].version, base = versions[one ? 0 : seen];
        if (base > version) base = version;
        if (version + ahead[i] - base > delay) delay = version + ahead[i] - base;
        ahead[i] += (uint64_t)members;
        seen++;
      }
    }
    update.push.versions = one ? 1 : seen;
    assert_int_equal(mlfab__queue_lag(server, &update, members), delay);
    assert_memory_equal(server->queue.ahead, ahead, sizeof ahead);
    shard_free(s);
  }
}

TESTS(NULL, NULL)
