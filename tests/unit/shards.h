/* shards.h - a server role by itself for tests: random models, and random updates that all come with their
 * announcements. */
#ifndef SHARDS_H
#define SHARDS_H

#include "core/base/rng.h"
#include "core/kernels/kernels.h"
#include "core/server/server.h"
#include "core/sparse/sparse_apply.h"
#include "mlfab.h"
#include "ports.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { SHARD_WORKERS = 3, SHARD_TENSORS = 4, SHARD_MODEL = 1 << 16 };

typedef struct shard_setting {
  mlfab__define define;
  mlfab__tensor_info tensors[SHARD_TENSORS];
  uint32_t block_bytes, chunk_bytes, number, servers;
  mlfab_update_fn on_update;
} shard_setting;

typedef struct shard {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__server server;
  uint32_t generation[SHARD_WORKERS], incarnation[SHARD_WORKERS];
  uint64_t seq[SHARD_WORKERS], asks[SHARD_WORKERS];
  uint64_t acks, refused;
  uint64_t fail_at; /* this allocation fails, and all later ones; 0: none */
} shard;

static void *shard_allocate(void *user, size_t bytes) {
  shard *s = user;
  return s->fail_at && s->env.allocations >= s->fail_at ? NULL : malloc(bytes);
}
static void shard_release(void *user, void *memory, size_t bytes) {
  (void)user, (void)bytes;
  free(memory);
}
static void shard_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  shard *s = self;
  mlfab__push_ack ack;
  (void)peer;
  if (type != MLFAB__PUSH_ACK) return;
  assert_int_equal(mlfab__decode_push_ack(meta, bytes, &ack), 0);
  s->acks++;
  s->refused += ack.code != 0;
}
static void shard_drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer;
  fail_msg("dropped: %d %s", code, text);
}

static inline void shard_frame(shard *s, uint32_t worker, uint8_t type, const uint8_t *meta,
                               uint32_t bytes, const void *bulk, uint32_t bulk_bytes) {
  mlfab__frame_in in = {type, bytes, bulk_bytes, meta, bulk};
  mlfab__server_frame(&s->server, (mlfab__at){MLFAB__LINK_WORKER, worker, 1000}, &in);
}

static inline void shard_hello(shard *s, uint32_t worker, uint32_t incarnation) {
  mlfab__hello h = {worker, incarnation, MLFAB_ROLE_WORKER, 0, 0, 0, 0, 0};
  mlfab__hello_ack ack;
  assert_int_equal(mlfab__server_hello(&s->server, worker, &h, &ack, 1000), 0);
  s->generation[worker] = ack.generation;
  s->incarnation[worker] = incarnation;
  s->seq[worker] = ack.top + 1;
}

/* w - u / 2, rounded as double. */
static inline int shard_update(void *user, const mlfab_update_info *info, uint32_t tensor,
                               int32_t dtype, uint64_t offset, uint64_t count, void *weights,
                               const void *change) {
  (void)user, (void)info, (void)tensor, (void)offset;
  for (uint64_t i = 0; i < count; i++) {
    if (dtype == MLFAB_F32) ((float *)weights)[i] -= ((const float *)change)[i] / 2;
    if (dtype == MLFAB_F64) ((double *)weights)[i] -= ((const double *)change)[i] / 2;
  }
  return 0;
}

/* A server role without workers. */
static inline shard *shard_new(const shard_setting *setting) {
  shard *s = calloc(1, sizeof *s);
  assert_non_null(s);
  const mlfab_env env = {
      .size = sizeof env, .user = s, .allocate = shard_allocate, .release = shard_release};
  const mlfab__port port = {s, shard_post, no_ready, shard_drop, no_detach, no_event, NULL, NULL};
  assert_int_equal(mlfab__env_init(&s->env, &env), 0);
  mlfab_config_init(&s->config);
  s->config.workers = SHARD_WORKERS;
  s->config.servers = setting->servers;
  s->config.block_bytes = setting->block_bytes;
  s->config.chunk_bytes = setting->chunk_bytes;
  s->config.eager_bytes = 1 << 20;
  s->config.heartbeat_ns = 500000000;
  s->config.model_max_bytes = 1 << 30;
  s->config.on_update = setting->on_update;
  assert_int_equal(
      mlfab__server_init(&s->server, &s->env, &s->config, setting->number, &port, &s->stats), 0);
  mlfab__sparse_attach(&s->server);
  return s;
}

static inline void shard_define(shard *s, const shard_setting *setting) {
  uint8_t meta[1024], table[SHARD_TENSORS * MLFAB__TENSOR_INFO_BYTES];
  for (uint32_t w = 0; w < SHARD_WORKERS; w++) shard_hello(s, w, 1);
  for (uint32_t i = 0; i < setting->define.tensors; i++)
    mlfab__encode_tensor_info(table + i * MLFAB__TENSOR_INFO_BYTES, &setting->tensors[i]);
  shard_frame(s, 0, MLFAB__DEFINE, meta, mlfab__encode_define(meta, &setting->define), table,
              setting->define.tensors * MLFAB__TENSOR_INFO_BYTES);
  assert_int_equal(s->server.phase, MLFAB__MODEL_STANDS);
  for (uint32_t w = 0; w < SHARD_WORKERS; w++) shard_hello(s, w, 1); /* which renews the credit */
}

static inline void shard_free(shard *s) {
  mlfab__server_free(&s->server);
  assert_int_equal(s->env.bytes, 0);
  free(s);
}

static inline void shard_random_sync(mlfab__rng *prng, mlfab_sync *sync) {
  static const uint32_t kinds[] = {MLFAB_SYNC_ASYNC, MLFAB_SYNC_ASYNC, MLFAB_SYNC_BSP,
                                   MLFAB_SYNC_SSP,   MLFAB_SYNC_DSPS,  MLFAB_SYNC_DROP};
  memset(sync, 0, sizeof *sync);
  sync->size = sizeof *sync;
  sync->kind = kinds[mlfab__rng_below(prng, MLFAB__COUNT(kinds))];
  if (sync->kind == MLFAB_SYNC_SSP || sync->kind == MLFAB_SYNC_DSPS)
    sync->staleness = (int64_t)mlfab__rng_below(prng, 4);
  if (sync->kind == MLFAB_SYNC_DROP) {
    sync->need = 1 + (uint32_t)mlfab__rng_below(prng, SHARD_WORKERS);
    sync->keep_late = (uint32_t)mlfab__rng_below(prng, 2);
  }
}

static inline void shard_random_setting(mlfab__rng *prng, shard_setting *setting) {
  const mlfab_model_options initial = MLFAB_MODEL_OPTIONS_INIT;
  mlfab_model_options *o = &setting->define.options;
  memset(setting, 0, sizeof *setting);
  *o = initial;
  setting->define.tensors = 1 + (uint32_t)mlfab__rng_below(prng, SHARD_TENSORS);
  for (uint32_t i = 0; i < setting->define.tensors; i++)
    setting->tensors[i] =
        (mlfab__tensor_info){i + 1, mlfab__rng_below(prng, 2) ? MLFAB_F32 : MLFAB_F64,
                             1 + mlfab__rng_below(prng, SHARD_MODEL / SHARD_TENSORS / 8)};
  o->optimizer = (uint32_t)mlfab__rng_below(prng, MLFAB_OPTIMIZER_COUNT);
  o->slices = 1 + (uint32_t)mlfab__rng_below(prng, 9);
  shard_random_sync(prng, &o->consistency);
  o->mean = mlfab__sync_rounds(o->consistency.kind) && mlfab__rng_below(prng, 2);
  if (mlfab__rng_below(prng, 3) == 0) o->tags = 1u << mlfab__rng_below(prng, 5);
  if (mlfab__rng_below(prng, 3) == 0) o->pull_half = MLFAB_HALF_BF16;
  if (o->tags == 0 && !o->pull_half && mlfab__rng_below(prng, 8) == 0) o->ghost = 1;
  setting->block_bytes = 64u << mlfab__rng_below(prng, 6);
  setting->chunk_bytes = 64u << mlfab__rng_below(prng, 7);
  setting->servers = 1 + (uint32_t)mlfab__rng_below(prng, 2);
  setting->number = (uint32_t)mlfab__rng_below(prng, setting->servers);
  if (!o->ghost && mlfab__rng_below(prng, 6) == 0) setting->on_update = shard_update;
}

/* The server does all that it can. */
static inline void shard_settle(shard *s) {
  for (int i = 0; i < 4; i++) mlfab__server_tick(&s->server, 1000);
}

/* Numbers whose sums are exact, of type `dtype`; sometimes one that is not finite. */
static inline void shard_values(mlfab__rng *prng, const mlfab__layout *layout, uint64_t offset,
                                uint64_t bytes, uint8_t *to) {
  for (uint64_t at = offset, n; at < offset + bytes; at += n, to += n) {
    const mlfab__tensor *t = mlfab__layout_tensor_at(layout, at);
    double x = ((double)mlfab__rng_below(prng, 200) - 100.0) / 8.0;
    if (mlfab__rng_below(prng, 20000) == 0) x = HUGE_VAL;
    float f = (float)x;
    n = mlfab__dtype_bytes((int)t->dtype);
    memcpy(to, t->dtype == MLFAB_F32 ? (const void *)&f : (const void *)&x, n);
  }
}

/* A worker pushes an update of some slices, unless it has several in the queue. */
static inline void shard_push(shard *s, mlfab__rng *prng, uint32_t w) {
  static uint8_t meta[MLFAB_META_MAX], values[SHARD_MODEL];
  mlfab__server *server = &s->server;
  mlfab__segment segments[32];
  const uint64_t version = UINT64_MAX; /* no delay */
  mlfab__push p;
  if (!server->peers[w].connected || server->peers[w].queued >= 3) return;
  memset(&p, 0, sizeof p);
  for (uint32_t i = 0; i < server->store.nslices; i++) {
    const mlfab__shard_slice *slice = &server->store.slices[i];
    if (mlfab__rng_below(prng, 3) == 0) continue;
    uint64_t from = mlfab__rng_below(prng, 2) ? 0 : mlfab__rng_below(prng, slice->bytes) / 8 * 8;
    mlfab__segment *last = p.segments > 0 ? &segments[p.segments - 1] : NULL;
    if (last && last->offset + last->bytes == slice->offset + from)
      last->bytes += slice->bytes;
    else
      segments[p.segments++] = (mlfab__segment){slice->offset + from, slice->bytes - from};
    shard_values(prng, &server->layout, slice->offset + from, slice->bytes - from,
                 values + p.bytes);
    p.bytes += slice->bytes - from;
  }
  p.seq = s->seq[w]++;
  p.members = p.versions = 1;
  p.generation = s->generation[w];
  p.eager = (uint32_t)p.bytes;
  p.progress = server->peers[w].pushed + server->peers[w].queued;
  p.scale = mlfab__rng_below(prng, 3) == 0 ? -4.0 : -0.125;
  shard_frame(s, w, MLFAB__PUSH, meta, mlfab__encode_push(meta, &p, segments, &version),
              p.bytes == 0 || server->store.ghost ? NULL : values, p.eager);
}

/* A worker changes the consistency; the server may refuse. */
static inline void shard_change(shard *s, mlfab__rng *prng, uint32_t w) {
  uint8_t meta[256];
  if (!s->server.peers[w].connected) return;
  mlfab__sync_ask ask = {.ask = ++s->asks[w]};
  shard_random_sync(prng, &ask.consistency);
  shard_frame(s, w, MLFAB__SYNC, meta, mlfab__encode_sync_ask(meta, &ask), NULL, 0);
}

/* A random event. */
static inline void shard_step(shard *s, mlfab__rng *prng) {
  uint32_t w = (uint32_t)mlfab__rng_below(prng, SHARD_WORKERS);
  if (mlfab__rng_below(prng, 30) == 0)
    shard_change(s, prng, w);
  else
    shard_push(s, prng, w);
  shard_settle(s);
}

#endif
