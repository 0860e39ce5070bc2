/* test_queue.c - the server role in a fabric with a scheduler: random plans, groups and failures.
 *
 * Workers, aggregators and scheduler are a few lines each, written from the protocol alone. Every link has
 * a queue, so that frames in opposite directions cross. Each update adds 1 to its worker's own element: the
 * model counts the applied updates. */
#include "core/sched/client.h"
#include "core/sparse/sparse_apply.h"
#include "scale.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { WORKERS = 5, COUNT = 96, BYTES = COUNT * 4, CHUNK = 192, INBOX = 4096, PENDING = 6 };
enum { BEAT = 500000000 };

typedef struct message {
  uint8_t type;
  uint32_t bytes;
  uint8_t *meta;
} message;

typedef struct inbox {
  message items[INBOX];
  uint32_t begin, end;
} inbox;

typedef struct pending {
  uint64_t seq, group, sent, granted, base, progress;
  uint32_t aggregator;
  int announced, bad;
} pending;

typedef struct sum { /* a group at an aggregator */
  uint64_t group, sent, upto;
  uint32_t members;
  mlfab__group_member member[WORKERS * PENDING];
  int failed;
} sum;

typedef struct peer {
  inbox in;
  int connected;
  uint32_t generation, incarnation;
  uint64_t seq, applied, dropped, refused;
  pending pushes[PENDING];
  sum sums[64];
} peer;

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__server server;
  peer peers[WORKERS];
  inbox scheduler;
  mlfab__announce waiting[WORKERS * PENDING];
  uint32_t nwaiting;
  int scheduler_up, broken;
  uint64_t now, bound, seed, order[WORKERS];
  uint64_t acks[WORKERS], last_decided[WORKERS], groups_seen, drops_told;
} fixture;

static uint64_t draw(fixture *f, uint64_t below) {
  f->seed = f->seed * 6364136223846793005u + 1442695040888963407u;
  return (f->seed >> 33) % below;
}

static void inbox_put(inbox *in, uint8_t type, const void *meta, uint32_t bytes) {
  message *m = &in->items[in->end++ % INBOX];
  assert_true(in->end - in->begin <= INBOX);
  m->type = type;
  m->bytes = bytes;
  m->meta = malloc(bytes + 1);
  memcpy(m->meta, meta, bytes);
}

static void inbox_clear(inbox *in) {
  while (in->begin < in->end) free(in->items[in->begin++ % INBOX].meta);
}

/* --- the port --- */

static void port_post(void *self, uint32_t peer_number, uint8_t type, const void *meta,
                      uint32_t bytes) {
  fixture *f = self;
  if (peer_number == WORKERS) {
    if (f->scheduler_up) inbox_put(&f->scheduler, type, meta, bytes);
  } else if (f->peers[peer_number].connected) {
    inbox_put(&f->peers[peer_number].in, type, meta, bytes);
  }
}
static void port_ready(void *self, uint32_t peer_number) { (void)self, (void)peer_number; }
static void port_drop(void *self, uint32_t peer_number, int code, const char *text) {
  fixture *f = self;
  f->broken++;
  fprintf(stderr, "peer %u was dropped: %d %s\n", peer_number, code, text);
}
static void port_detach(void *self, uint32_t peer_number, uint64_t token) {
  (void)self, (void)peer_number, (void)token;
}
static void port_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                       int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

static void send_frame(fixture *f, uint32_t w, uint8_t type, const uint8_t *meta, uint32_t bytes,
                       const void *bulk, uint32_t bulk_bytes) {
  mlfab__frame_in in = {type, bytes, bulk_bytes, meta, bulk};
  mlfab__server_frame(&f->server, w, &in, f->now);
}

/* --- a worker --- */

static void resync(peer *p, uint32_t generation, uint64_t top, const uint64_t applied[4]) {
  p->generation = generation;
  for (int i = 0; i < PENDING; i++) {
    pending *push = &p->pushes[i];
    if (push->seq == 0) continue;
    push->announced = 0;
    push->sent = push->granted = 0;
    push->aggregator = MLFAB__NO_NODE;
    if (push->seq > top) continue;
    uint64_t back = top - push->seq;
    if (back < 256 && (applied[back / 64] >> (back % 64) & 1)) p->applied++;
    push->seq = 0;
  }
}

static void greet(fixture *f, uint32_t w) {
  peer *p = &f->peers[w];
  mlfab__hello hello = {w, p->incarnation, MLFAB_ROLE_WORKER, 0, 2, w + 1, 0, 0};
  mlfab__hello_ack ack;
  p->connected = 1;
  assert_int_equal(mlfab__server_hello(&f->server, w, &hello, &ack, f->now), 0);
  resync(p, ack.generation, ack.top, ack.applied);
}

static void hang_up(fixture *f, uint32_t w) {
  peer *p = &f->peers[w];
  p->connected = 0;
  inbox_clear(&p->in);
  memset(p->sums, 0, sizeof p->sums);
  mlfab__server_lost(&f->server, w, f->now);
}

static pending *find(peer *p, uint64_t seq) {
  for (int i = 0; i < PENDING; i++) {
    if (p->pushes[i].seq == seq && seq) return &p->pushes[i];
  }
  return NULL;
}

/* The bytes of an update. */
static void content(const fixture *f, uint32_t w, uint64_t seq, float *data) {
  const peer *p = &f->peers[w];
  memset(data, 0, BYTES);
  data[w] = 1.0f;
  for (int i = 0; i < PENDING; i++) {
    if (p->pushes[i].seq == seq && p->pushes[i].bad) data[COUNT - 1] = NAN;
  }
}

static void announce(fixture *f, uint32_t w) {
  peer *p = &f->peers[w];
  pending *oldest = NULL;
  for (int i = 0; i < PENDING; i++) {
    pending *q = &p->pushes[i];
    if (q->seq && !q->announced && (!oldest || q->seq < oldest->seq)) oldest = q;
  }
  if (!oldest || !p->connected) return;
  uint8_t meta[512];
  mlfab__segment segment = {0, BYTES};
  mlfab__push push;
  memset(&push, 0, sizeof push);
  push.seq = oldest->seq;
  push.members = push.segments = push.versions = push.parts = 1;
  push.generation = p->generation;
  push.flags = MLFAB__PUSH_PLANNED;
  push.progress = oldest->progress;
  push.bytes = BYTES;
  push.scale = 1.0;
  oldest->announced = 1;
  send_frame(f, w, MLFAB__PUSH, meta, mlfab__encode_push(meta, &push, &segment, &oldest->base),
             NULL, 0);
}

static void begin_push(fixture *f, uint32_t w) {
  peer *p = &f->peers[w];
  /* With a tight bound one at a time, because an update that waits long is late. */
  for (int i = 0; i < (f->bound > 8 ? PENDING : 1); i++) {
    if (p->pushes[i].seq) continue;
    memset(&p->pushes[i], 0, sizeof p->pushes[i]);
    p->pushes[i].seq = ++p->seq;
    p->pushes[i].aggregator = MLFAB__NO_NODE;
    p->pushes[i].bad = draw(f, 60) == 0;
    /* As if it had just pulled. */
    uint64_t version = f->server.store.slices[0].version, behind = draw(f, 3);
    p->pushes[i].base = version > behind ? version - behind : 0;
    announce(f, w);
    return;
  }
}

static void send_chunk(fixture *f, uint32_t w) {
  peer *p = &f->peers[w];
  float data[COUNT];
  uint8_t meta[64];
  for (int i = 0; i < PENDING; i++) {
    pending *q = &p->pushes[i];
    if (!q->seq || !q->announced || q->aggregator != MLFAB__NO_NODE || q->sent >= q->granted)
      continue;
    uint64_t n = q->granted - q->sent < CHUNK ? q->granted - q->sent : CHUNK;
    mlfab__chunk chunk = {q->seq, q->sent, p->generation};
    content(f, w, q->seq, data);
    const uint8_t *from = (const uint8_t *)data + q->sent;
    q->sent += n;
    send_frame(f, w, MLFAB__CHUNK, meta, mlfab__encode_chunk(meta, &chunk), from, (uint32_t)n);
    return;
  }
}

static void acknowledged(fixture *f, uint32_t w, const message *m) {
  peer *p = &f->peers[w];
  mlfab__push_ack ack;
  assert_int_equal(mlfab__decode_push_ack(m->meta, m->bytes, &ack), 0);
  pending *q = find(p, ack.seq);
  if (!q) return;
  for (int i = 0; i < PENDING; i++) /* in the order of their numbers */
    assert_true(p->pushes[i].seq == 0 || p->pushes[i].seq >= ack.seq);
  if (ack.code == 0) {
    assert_false(q->bad);
    p->applied++;
    assert_true(ack.delay < f->bound);
  } else if (ack.code == MLFAB_ERR_DROPPED) {
    /* The drop comes before any byte was sent, unless a group with this update was spoilt and the update
     * moved back. */
    if (f->stats.groups_failed == 0) assert_int_equal(q->sent, 0);
    p->dropped++;
  } else {
    assert_true(ack.code == MLFAB_ERR_NOT_FINITE || ack.code == MLFAB_ERR_WITHDRAWN);
    assert_true(ack.code == MLFAB_ERR_WITHDRAWN || q->bad);
    p->refused++;
  }
  q->seq = 0;
}

/* --- an aggregator --- */

static sum *find_sum(peer *p, uint64_t group) {
  for (int i = 0; i < 64; i++) {
    if (p->sums[i].group == group) return &p->sums[i];
  }
  return NULL;
}

static void group_fail(fixture *f, uint32_t w, sum *s, const mlfab__group_member *member,
                       int code) {
  uint8_t meta[64];
  mlfab__group_fail fail = {s->group, member ? member->seq : 0,
                            member ? member->worker : MLFAB__NO_NODE, code};
  s->failed = 1;
  send_frame(f, w, MLFAB__GROUP_FAIL, meta, mlfab__encode_group_fail(meta, &fail), NULL, 0);
}

static void forward(fixture *f, uint32_t w) {
  peer *p = &f->peers[w];
  uint8_t meta[64];
  for (int i = 0; i < 64; i++) {
    sum *s = &p->sums[i];
    if (!s->group || s->failed || s->sent >= s->upto) continue;
    float total[COUNT], one[COUNT];
    memset(total, 0, sizeof total);
    for (uint32_t k = 0; k < s->members; k++) {
      content(f, s->member[k].worker, s->member[k].seq, one);
      if (isnan(one[COUNT - 1])) {
        group_fail(f, w, s, &s->member[k], MLFAB_ERR_NOT_FINITE);
        return;
      }
      for (int j = 0; j < COUNT; j++) total[j] += (float)s->member[k].weight * one[j];
    }
    mlfab__forward frame = {s->group, s->sent, BYTES};
    uint64_t n = s->upto - s->sent < CHUNK ? s->upto - s->sent : CHUNK;
    const uint8_t *from = (const uint8_t *)total + s->sent;
    s->sent += n;
    send_frame(f, w, MLFAB__FORWARD, meta, mlfab__encode_forward(meta, &frame), from, (uint32_t)n);
    return;
  }
}

static void fail_one(fixture *f, uint32_t w) {
  peer *p = &f->peers[w];
  for (int i = 0; i < 64; i++) {
    sum *s = &p->sums[i];
    if (!s->group || s->failed) continue;
    uint32_t k = (uint32_t)draw(f, s->members + 1);
    group_fail(f, w, s, k < s->members ? &s->member[k] : NULL,
               k < s->members ? MLFAB_ERR_PEER_DEAD : MLFAB_ERR_AGAIN);
    return;
  }
}

static void take_group(fixture *f, uint32_t w, const message *m) {
  mlfab__group group;
  static mlfab__group_member members[MLFAB__GROUP_MEMBERS_MAX];
  static mlfab__segment segments[MLFAB__SEGMENTS_MAX];
  assert_int_equal(mlfab__decode_group(m->meta, m->bytes, &group, members, segments), 0);
  assert_true(group.members >= 2 && group.bytes == BYTES);
  sum *s = find_sum(&f->peers[w], 0);
  assert_non_null(s);
  memset(s, 0, sizeof *s);
  s->group = group.group;
  s->members = group.members;
  memcpy(s->member, members, group.members * sizeof *members);
  f->groups_seen++;
}

/* --- messages of every role --- */

static void deliver(fixture *f, uint32_t w) {
  peer *p = &f->peers[w];
  if (p->in.begin == p->in.end) return;
  message m = p->in.items[p->in.begin++ % INBOX];
  mlfab__grant grant;
  mlfab__via via;
  mlfab__release release;
  mlfab__group_end end;
  mlfab__resend resend;
  pending *q;
  sum *s;
  switch (m.type) {
    case MLFAB__GRANT:
      assert_int_equal(mlfab__decode_grant(m.meta, m.bytes, &grant), 0);
      q = find(p, grant.seq);
      if (q && grant.generation == p->generation && q->aggregator == MLFAB__NO_NODE)
        q->granted = grant.upto;
      break;
    case MLFAB__VIA:
      assert_int_equal(mlfab__decode_via(m.meta, m.bytes, &via), 0);
      q = find(p, via.seq);
      if (!q || via.generation != p->generation) break;
      assert_true(via.group > q->group);
      q->group = via.group;
      q->aggregator = via.aggregator;
      q->sent = q->granted = 0;
      break;
    case MLFAB__PUSH_ACK:
      acknowledged(f, w, &m);
      break;
    case MLFAB__RESEND:
      assert_int_equal(mlfab__decode_resend(m.meta, m.bytes, &resend), 0);
      resync(p, resend.generation, resend.top, resend.applied);
      break;
    case MLFAB__GROUP:
      take_group(f, w, &m);
      break;
    case MLFAB__GROUP_END:
      assert_int_equal(mlfab__decode_group_end(m.meta, m.bytes, &end), 0);
      s = find_sum(p, end.group);
      if (s) memset(s, 0, sizeof *s);
      break;
    case MLFAB__RELEASE:
      assert_int_equal(mlfab__decode_release(m.meta, m.bytes, &release), 0);
      s = find_sum(p, release.group);
      if (s) s->upto = release.upto;
      break;
    default:
      break;
  }
  free(m.meta);
}

static void hear(fixture *f) {
  while (f->scheduler.begin < f->scheduler.end) {
    message m = f->scheduler.items[f->scheduler.begin++ % INBOX];
    if (m.type == MLFAB__ANNOUNCE) {
      mlfab__announce a;
      assert_int_equal(mlfab__decode_announce(m.meta, m.bytes, &a), 0);
      for (uint32_t i = 0; i < f->nwaiting; i++) {
        /* After a broken link the same update is announced again. */
        if (f->waiting[i].worker != a.worker || f->waiting[i].id != a.id) continue;
        f->waiting[i] = f->waiting[--f->nwaiting];
      }
      assert_true(f->nwaiting < WORKERS * PENDING);
      f->waiting[f->nwaiting++] = a;
    }
    free(m.meta);
  }
}

/* A random order, random groups, random drops; sometimes an update that does not exist. */
static void plan(fixture *f) {
  mlfab__plan_entry entries[WORKERS * PENDING + 1];
  static uint8_t meta[MLFAB_META_MAX];
  uint32_t n = 0, group = 0, left = 0;
  hear(f);
  while (f->nwaiting > 0 && (n < 1 || draw(f, 4))) {
    uint32_t i = (uint32_t)draw(f, f->nwaiting);
    mlfab__announce a = f->waiting[i];
    f->waiting[i] = f->waiting[--f->nwaiting];
    if (left == 0) {
      left = (uint32_t)(1 + draw(f, 4));
      group++;
      f->order[0] = draw(f, WORKERS);
    }
    left--;
    memset(&entries[n], 0, sizeof entries[n]);
    entries[n].id = draw(f, 20) ? a.id : a.id + 1000;
    entries[n].worker = a.worker;
    entries[n].group = group;
    entries[n].aggregator = (uint32_t)f->order[0];
    entries[n].fate = draw(f, 12) ? MLFAB__FATE_GO : MLFAB__FATE_LOOKAHEAD;
    entries[n].delay = 99;
    if (entries[n].id != a.id) f->waiting[f->nwaiting++] = a; /* it still waits */
    n++;
  }
  mlfab__plan frame = {1, 1e9, 1e9, n};
  mlfab__frame_in in = {MLFAB__PLAN, mlfab__encode_plan(meta, &frame, entries), 0, meta, NULL};
  mlfab__server_scheduler_frame(&f->server, &in, f->now);
}

static void scheduler_turn(fixture *f) {
  if (f->scheduler_up) {
    f->scheduler_up = 0;
    inbox_clear(&f->scheduler);
    f->nwaiting = 0;
    mlfab__server_scheduler_lost(&f->server, f->now);
  } else {
    f->scheduler_up = 1;
    mlfab__server_scheduler_hello(&f->server, f->now);
  }
}

/* --- invariants after every event --- */

static void invariants(fixture *f) {
  const mlfab__server *server = &f->server;
  uint64_t ahead = 0, queued = 0, last = 0;
  assert_int_equal(f->broken, 0);
  for (const mlfab__incoming *u = server->queue.first; u; u = u->next) {
    const mlfab__incoming *later = u->next;
    queued++;
    if (u->counted) {
      /* When it was placed its delay was below the bound. */
      ahead += u->push.members;
    }
    /* A group is a run: its number appears nowhere else. */
    if (u->group && u->group != last) {
      for (; later && later->group == u->group; later = later->next) continue;
      for (; later; later = later->next) assert_true(later->group != u->group);
    }
    last = u->group;
    for (later = u->next; later; later = later->next) /* a worker's updates are in order */
      assert_true(later->worker != u->worker || later->push.seq > u->push.seq);
  }
  for (const mlfab__incoming *u = server->queue.unplaced_first; u; u = u->next) queued++;
  assert_int_equal(server->queue.ahead[0], ahead);
  uint64_t counted = 0, unplaced = 0;
  for (uint32_t w = 0; w < WORKERS; w++) {
    counted += server->peers[w].queued;
    unplaced += server->peers[w].unplaced;
  }
  assert_int_equal(counted, queued);
  for (const mlfab__incoming *u = server->queue.unplaced_first; u; u = u->next) unplaced--;
  assert_int_equal(unplaced, 0);
  assert_true(server->sched->up || !server->queue.unplaced_first);
}

static float *weights(fixture *f, float *out) {
  const mlfab__store *store = &f->server.store;
  for (uint64_t at = 0; at < BYTES;) {
    mlfab__piece piece;
    mlfab__store_piece(store, at, BYTES - at, &piece);
    memcpy((uint8_t *)out + at, store->blocks[store->w[piece.position]].data + piece.at,
           piece.bytes);
    at += piece.bytes;
  }
  return out;
}

static void start_as(fixture *f, uint64_t seed, uint64_t bound, uint32_t rule, uint32_t sync,
                     uint32_t dtype, mlfab_update_fn on_update) {
  mlfab__port port = {f, port_post, port_ready, port_drop, port_detach, port_event};
  memset(f, 0, sizeof *f);
  f->seed = seed;
  f->bound = bound;
  f->now = 1000;
  assert_int_equal(mlfab__env_init(&f->env, NULL), 0);
  mlfab_config_init(&f->config);
  f->config.workers = WORKERS;
  f->config.servers = 1;
  f->config.block_bytes = 128;
  f->config.chunk_bytes = CHUNK;
  f->config.eager_bytes = CHUNK;
  f->config.heartbeat_ns = BEAT;
  f->config.model_max_bytes = 1 << 30;
  f->config.scheduler = MLFAB_SCHEDULER_BESIDE;
  f->config.schedule.delay_bound = bound;
  f->config.on_update = on_update;
  assert_int_equal(mlfab__server_init(&f->server, &f->env, &f->config, 0, &port, &f->stats), 0);
  assert_int_equal(mlfab__client_init(&f->server), 0);
  mlfab__sparse_attach(&f->server);
  for (uint32_t w = 0; w < WORKERS; w++) {
    f->peers[w].incarnation = 1;
    greet(f, w);
  }
  uint8_t meta[256], table[MLFAB__TENSOR_INFO_BYTES];
  mlfab__tensor_info info = {0, dtype, dtype == MLFAB_I64 ? COUNT / 2 : COUNT};
  mlfab__define define;
  memset(&define, 0, sizeof define);
  define.tensors = 1;
  define.options.optimizer = rule;
  define.options.gamma = 0.9, define.options.adadelay_c = 1.0, define.options.beta1 = 0.9,
  define.options.beta2 = 0.999, define.options.epsilon = 1e-8;
  define.options.consistency.kind = sync;
  define.options.gamma = 1e-300; /* 0 would mean 0.9 */
  mlfab__encode_tensor_info(table, &info);
  send_frame(f, 0, MLFAB__DEFINE, meta, mlfab__encode_define(meta, &define), table, sizeof table);
  assert_int_equal(f->server.phase, MLFAB__MODEL_STANDS);
  scheduler_turn(f);
}

static void start(fixture *f, uint64_t seed, uint64_t bound, uint32_t rule) {
  start_as(f, seed, bound, rule, MLFAB_SYNC_ASYNC, MLFAB_F32, NULL);
}

static void finish(fixture *f) {
  for (uint32_t w = 0; w < WORKERS; w++) inbox_clear(&f->peers[w].in);
  inbox_clear(&f->scheduler);
  mlfab__server_free(&f->server);
  assert_int_equal(f->env.bytes, 0);
}

static void step(fixture *f, int quiet) {
  uint32_t w = (uint32_t)draw(f, WORKERS);
  f->now += draw(f, 1000);
  switch (draw(f, quiet ? 7 : 9)) {
    case 0:
      if (!quiet) begin_push(f, w);
      announce(f, w);
      break;
    case 1:
    case 2:
      for (uint64_t n = 1 + draw(f, 6); n > 0; n--) deliver(f, w);
      break;
    case 3:
      send_chunk(f, w);
      break;
    case 4:
      forward(f, w);
      break;
    case 5:
      if (f->scheduler_up && draw(f, 12) == 0) plan(f);
      break;
    case 6:
      if (!f->peers[w].connected) greet(f, w);
      mlfab__server_tick(&f->server, f->now);
      break;
    case 7:
      if (draw(f, 60) == 0) fail_one(f, w);
      break;
    default:
      if (draw(f, 300) == 0 && f->peers[w].connected) hang_up(f, w);
      if (draw(f, 300) == 0) scheduler_turn(f);
      if (draw(f, 600) == 0) f->now += 6ull * BEAT;
      break;
  }
  invariants(f);
}

/* Returns the number of applied groups. */
static uint64_t one_seed(uint64_t seed, uint64_t bound, uint32_t rule) {
  static fixture f;
  float model[COUNT];
  uint64_t applied = 0, dropped = 0;
  start(&f, seed, bound, rule);
  for (int i = 0; i < 20000; i++) step(&f, 0);
  /* At the end every update is decided. */
  if (!f.scheduler_up) scheduler_turn(&f);
  for (int i = 0; i < 200000; i++) {
    int open = 0;
    for (uint32_t w = 0; w < WORKERS; w++) {
      for (int k = 0; k < PENDING; k++) open |= f.peers[w].pushes[k].seq != 0;
    }
    if (!open) break;
    step(&f, 1);
    if (i % 1000 == 999) f.now += 6ull * BEAT; /* updates lost with a link are revoked */
    assert_true(i < 199999);
  }
  weights(&f, model);
  for (uint32_t w = 0; w < WORKERS; w++) {
    assert_int_equal((uint64_t)model[w], f.peers[w].applied);
    applied += f.peers[w].applied;
    dropped += f.peers[w].dropped;
  }
  assert_int_equal(f.stats.updates_applied, applied);
  assert_true(f.stats.delay_max < bound);
  if (getenv("SHOW"))
    fprintf(stderr, "seed %llu bound %llu: applied %llu dropped %llu groups %llu failed %llu\n",
            (unsigned long long)seed, (unsigned long long)bound, (unsigned long long)applied,
            (unsigned long long)dropped, (unsigned long long)f.stats.groups_applied,
            (unsigned long long)f.stats.groups_failed);
  assert_true(applied > 20);
  assert_true(bound > 3 || dropped > 0);
  uint64_t groups = f.stats.groups_applied;
  finish(&f);
  return groups;
}

/* A planned update with this progress, after the worker's others. */
static void offer(fixture *f, uint32_t w, uint64_t progress) {
  peer *p = &f->peers[w];
  int i = 0;
  while (p->pushes[i].seq) i++;
  memset(&p->pushes[i], 0, sizeof p->pushes[i]);
  p->pushes[i].seq = ++p->seq;
  p->pushes[i].aggregator = MLFAB__NO_NODE;
  p->pushes[i].progress = progress;
  announce(f, w);
}

/* Places them, in one group when there are several. */
static void place(fixture *f, const mlfab__plan_entry *entries, uint32_t n) {
  static uint8_t meta[MLFAB_META_MAX];
  mlfab__plan frame = {1, 1e9, 1e9, n};
  mlfab__frame_in in = {MLFAB__PLAN, mlfab__encode_plan(meta, &frame, entries), 0, meta, NULL};
  mlfab__server_scheduler_frame(&f->server, &in, f->now);
}

static void change(fixture *f, uint32_t kind) {
  mlfab__sync_ask ask;
  uint8_t meta[256];
  memset(&ask, 0, sizeof ask);
  ask.ask = 1;
  ask.tensor = MLFAB_ALL;
  ask.consistency.kind = kind;
  send_frame(f, 4, MLFAB__SYNC, meta, mlfab__encode_sync_ask(meta, &ask), NULL, 0);
}

static void turns(fixture *f) {
  for (int i = 0; i < 50; i++) {
    for (uint32_t w = 0; w < WORKERS; w++) {
      deliver(f, w);
      send_chunk(f, w);
      forward(f, w);
    }
    invariants(f);
  }
}

/* Rounds are turned on while worker 1's second update is in a group with worker 0's first: worker 0's
 * update belongs to the open round, both updates of worker 1 have to wait, and the group does not take the
 * second one before the first. */
static void test_rounds_begin_under_a_group(void **state) {
  static fixture f;
  float model[COUNT];
  mlfab__plan_entry blocks = {.id = 1, .worker = 2, .aggregator = MLFAB__NO_NODE};
  mlfab__plan_entry alone = {.id = 1, .worker = 1, .aggregator = MLFAB__NO_NODE};
  mlfab__plan_entry both[2] = {{.id = 1, .worker = 0, .group = 1, .aggregator = 3},
                               {.id = 2, .worker = 1, .group = 1, .aggregator = 3}};
  (void)state;
  start(&f, 1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD);
  offer(&f, 2, 0);
  place(&f, &blocks, 1);
  /* none of its bytes arrives before the others are queued behind it */
  assert_non_null(f.server.apply.head);
  offer(&f, 1, 5);
  place(&f, &alone, 1);
  offer(&f, 1, 6);
  offer(&f, 0, 0);
  place(&f, both, 2);
  change(&f, MLFAB_SYNC_BSP);
  turns(&f);
  assert_int_equal(f.peers[2].applied, 1);
  assert_int_equal(f.peers[0].applied, 1);
  assert_int_equal(f.server.windows.windows[1].top, 0);
  for (uint32_t w = 0; w < WORKERS; w++) {
    if (w != 1) mlfab__server_gone(&f.server, w, 1, f.now);
  }
  turns(&f);
  assert_int_equal(f.peers[1].applied, 2);
  weights(&f, model);
  assert_true(model[0] >= 1.0f && model[1] >= 2.0f && model[2] >= 1.0f);
  finish(&f);
}

/* A small update of two stretches travels in two frames. The plan drops it, because it is behind a placed
 * update of the same worker, while its second frame is on the way. */
static void test_drop_with_bytes_on_their_way(void **state) {
  (void)state;
  static fixture f;
  uint8_t meta[512];
  float data[COUNT];
  memset(data, 0, sizeof data);
  start(&f, 1, 1, MLFAB_OPTIMIZER_SGD);
  greet(&f, 1); /* now the worker has credit */
  begin_push(&f, 1);
  mlfab__plan_entry entry = {.id = 1, .worker = 1, .aggregator = MLFAB__NO_NODE};
  static uint8_t plan_meta[MLFAB_META_MAX];
  mlfab__plan frame = {1, 1e9, 1e9, 1};
  mlfab__frame_in in = {MLFAB__PLAN, mlfab__encode_plan(plan_meta, &frame, &entry), 0, plan_meta,
                        NULL};
  mlfab__server_scheduler_frame(&f.server, &in, f.now);
  assert_non_null(f.server.apply.head);
  mlfab__segment segments[2] = {{0, 32}, {64, 32}};
  uint64_t base = 0;
  mlfab__push push;
  memset(&push, 0, sizeof push);
  push.seq = 2;
  push.members = push.versions = push.parts = 1;
  push.segments = 2;
  push.generation = f.peers[1].generation;
  push.bytes = push.eager = 64;
  push.scale = 1.0;
  send_frame(&f, 1, MLFAB__PUSH, meta, mlfab__encode_push(meta, &push, segments, &base), data, 32);
  mlfab__chunk chunk = {2, 32, f.peers[1].generation};
  send_frame(&f, 1, MLFAB__CHUNK, meta, mlfab__encode_chunk(meta, &chunk), data, 32);
  assert_int_equal(f.broken, 0);
  for (int i = 0; i < 50; i++) {
    deliver(&f, 1);
    send_chunk(&f, 1);
  }
  assert_int_equal(f.peers[1].applied, 1);
  assert_int_equal(f.stats.updates_dropped, 1);
  finish(&f);
}

/* An update callback for a group: w + scale * sum, with the arguments that it receives. */
static int add_as_told(void *user, const mlfab_update_info *info, uint32_t tensor, int dtype,
                       uint64_t first, uint64_t count, void *w, const void *u) {
  (void)user, (void)tensor, (void)dtype, (void)first;
  for (uint64_t i = 0; i < count; i++)
    ((float *)w)[i] += (float)(info->scale * (double)((const float *)u)[i]);
  return 0;
}

/* Two workers' updates with different scales under a callback, as a group or (no aggregator) one by one:
 * the models must be equal. */
static void callback_case(uint32_t aggregator, uint32_t sync, uint32_t then, float *model) {
  static fixture f;
  start_as(&f, 1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD, sync, MLFAB_F32, add_as_told);
  for (uint32_t w = 0; w < WORKERS && (sync == MLFAB_SYNC_BSP || then == MLFAB_SYNC_BSP); w++)
    f.server.peers[w].done = w < 1 || w > 2;
  mlfab__clock_members(&f.server);
  mlfab__plan_entry entries[2], blocks = {.id = 1, .worker = 3, .aggregator = MLFAB__NO_NODE};
  memset(entries, 0, sizeof entries);
  offer(&f, 3, 0);
  place(&f, &blocks, 1); /* chunks that arrive wait until the update is complete */
  for (uint32_t w = 1; w <= 2; w++) {
    begin_push(&f, w);
    f.server.queue.unplaced_last->push.scale = w == 1 ? -0.5 : -2.0;
    entries[w - 1].id = 1;
    entries[w - 1].worker = w;
    entries[w - 1].group = aggregator == MLFAB__NO_NODE ? 0 : 1;
    entries[w - 1].aggregator = aggregator;
  }
  place(&f, entries, 2);
  if (then != sync) change(&f, then);
  for (int i = 0; i < 200; i++) {
    for (uint32_t w = 0; w < WORKERS; w++) {
      deliver(&f, w);
      send_chunk(&f, w);
      forward(&f, w);
    }
    mlfab__server_tick(&f.server, f.now);
  }
  assert_int_equal(f.peers[1].applied + f.peers[2].applied, 2);
  assert_int_equal(f.stats.groups_applied, aggregator == MLFAB__NO_NODE ? 0 : 1);
  weights(&f, model);
  finish(&f);
}

static void test_callback_of_group(void **state) {
  (void)state;
  float alone[COUNT], grouped[COUNT];
  callback_case(MLFAB__NO_NODE, MLFAB_SYNC_ASYNC, MLFAB_SYNC_ASYNC, alone);
  callback_case(0, MLFAB_SYNC_ASYNC, MLFAB_SYNC_ASYNC, grouped);
  assert_memory_equal(alone, grouped, sizeof alone);
  callback_case(MLFAB__NO_NODE, MLFAB_SYNC_BSP, MLFAB_SYNC_BSP, alone);
  assert_memory_equal(alone, grouped, sizeof alone);
  callback_case(0, MLFAB_SYNC_BSP, MLFAB_SYNC_BSP, grouped);
  assert_memory_equal(alone, grouped, sizeof alone);
  /* The callback receives the scale in one of the two models, and not in the other. */
  callback_case(0, MLFAB_SYNC_ASYNC, MLFAB_SYNC_BSP, grouped);
  assert_memory_equal(alone, grouped, sizeof alone);
  callback_case(0, MLFAB_SYNC_BSP, MLFAB_SYNC_ASYNC, grouped);
  assert_memory_equal(alone, grouped, sizeof alone);
  assert_float_equal(grouped[1], -0.5f, 0.0f);
  assert_float_equal(grouped[2], -2.0f, 0.0f);
}

/* Integers are multiplied with integers only; scales relative to the first member may be fractions. */
static void test_weights_of_integers(void **state) {
  (void)state;
  static const double seconds[] = {3.0, 4.0};
  for (int k = 0; k < 2; k++) {
    static fixture f;
    static uint8_t meta[MLFAB_META_MAX];
    mlfab__plan_entry entries[2];
    start_as(&f, 1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC, MLFAB_I64, add_as_told);
    for (uint32_t w = 1; w <= 2; w++) {
      begin_push(&f, w);
      f.server.queue.unplaced_last->push.scale = w == 1 ? 2.0 : seconds[k];
      entries[w - 1] = (mlfab__plan_entry){.id = 1, .worker = w, .group = 1, .aggregator = 0};
    }
    mlfab__plan frame = {1, 1e9, 1e9, 2};
    mlfab__frame_in in = {MLFAB__PLAN, mlfab__encode_plan(meta, &frame, entries), 0, meta, NULL};
    mlfab__server_scheduler_frame(&f.server, &in, f.now);
    for (int i = 0; i < 8; i++) deliver(&f, 0);
    assert_int_equal(f.groups_seen, k);
    f.scheduler_up = 0; /* no scheduler is told that they are forgotten */
    finish(&f);
  }
}

/* An unreachable aggregator: after two members that the server waited for in vain, the rest go directly. */
static void test_silent_members(void **state) {
  (void)state;
  static fixture f;
  mlfab__plan_entry entries[WORKERS];
  memset(entries, 0, sizeof entries);
  start(&f, 1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD);
  for (uint32_t w = 0; w < WORKERS; w++) {
    begin_push(&f, w);
    entries[w] = (mlfab__plan_entry){.id = 1, .worker = w, .group = 1, .aggregator = 0};
  }
  static uint8_t meta[MLFAB_META_MAX];
  mlfab__plan frame = {1, 1e9, 1e9, WORKERS};
  mlfab__frame_in in = {MLFAB__PLAN, mlfab__encode_plan(meta, &frame, entries), 0, meta, NULL};
  mlfab__server_scheduler_frame(&f.server, &in, f.now);
  for (uint32_t fails = 0; fails <= 2; fails++) {
    uint32_t members = 0;
    f.now += 3ull * BEAT;
    for (int i = 0; i < 100; i++) deliver(&f, 0);
    for (int i = 0; i < 64; i++) {
      sum *s = &f.peers[0].sums[i];
      if (s->group == 0 || s->failed) continue;
      members = s->members;
      group_fail(&f, 0, s, &s->member[s->members - 1], MLFAB_ERR_PEER_DEAD);
    }
    assert_int_equal(members, fails < 2 ? WORKERS - fails : 0);
  }
  for (int i = 0; i < 300; i++) {
    for (uint32_t w = 0; w < WORKERS; w++) {
      deliver(&f, w);
      send_chunk(&f, w);
    }
  }
  for (uint32_t w = 0; w < WORKERS; w++) assert_int_equal(f.peers[w].applied, 1);
  finish(&f);
}

static void test_random_plans(void **state) {
  (void)state;
  uint64_t seeds = test_cases(30);
  uint64_t groups = 0;
  for (uint64_t seed = 1; seed <= seeds; seed++) {
    static const uint64_t bounds[] = {MLFAB_UNBOUNDED, 3, 1, 8, 40};
    groups +=
        one_seed(seed, bounds[seed % 5], seed % 3 ? MLFAB_OPTIMIZER_SGD : MLFAB_OPTIMIZER_MOMENTUM);
  }
  assert_true(groups > 3 * seeds);
}

/* A plan that names a worker that does not exist is refused as a whole: the updates before that entry are
 * not placed. */
static void test_plan_of_strangers(void **state) {
  (void)state;
  static fixture f;
  static uint8_t meta[MLFAB_META_MAX];
  start(&f, 1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD);
  begin_push(&f, 0);
  assert_non_null(f.server.queue.unplaced_first);
  mlfab__plan_entry entries[2];
  memset(entries, 0, sizeof entries);
  entries[0].id = 1;
  entries[0].aggregator = entries[1].aggregator = MLFAB__NO_NODE;
  entries[1].worker = WORKERS;
  mlfab__plan frame = {1, 1e9, 1e9, 2};
  mlfab__frame_in in = {MLFAB__PLAN, mlfab__encode_plan(meta, &frame, entries), 0, meta, NULL};
  mlfab__server_scheduler_frame(&f.server, &in, f.now);
  assert_int_equal(f.broken, 1);
  assert_non_null(f.server.queue.unplaced_first);
  assert_null(f.server.queue.first);
  frame.entries = 1;
  in.meta_bytes = mlfab__encode_plan(meta, &frame, entries);
  mlfab__server_scheduler_frame(&f.server, &in, f.now);
  assert_null(f.server.queue.unplaced_first);
  finish(&f);
}

/* A scheduler that has an announced update and plans nothing counts as lost after eight heartbeats; one
 * that reports that it waits, or that has nothing to plan, does not. Time in which this server was stopped
 * does not count. */
static void test_scheduler_that_plans_nothing(void **state) {
  (void)state;
  static fixture f;
  static uint8_t meta[MLFAB_META_MAX];
  start(&f, 1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD);
  mlfab__plan frame = {1, -1.0, -1.0, 0};
  mlfab__frame_in nothing = {MLFAB__PLAN, mlfab__encode_plan(meta, &frame, NULL), 0, meta, NULL};
  for (int beats = 0; beats < 40; beats++) {
    f.now += BEAT;
    mlfab__server_tick(&f.server, f.now);
  }
  begin_push(&f, 0);
  assert_non_null(f.server.queue.unplaced_first);
  for (int beats = 0; beats < 40; beats++) {
    f.now += BEAT;
    mlfab__server_tick(&f.server, f.now);
    if (beats % 6 == 5) mlfab__server_scheduler_frame(&f.server, &nothing, f.now);
  }
  mlfab__server_scheduler_frame(&f.server, &nothing, f.now);
  f.now += 100ull * BEAT;
  mlfab__server_tick(&f.server, f.now);
  assert_int_equal(f.broken, 0);
  assert_non_null(f.server.queue.unplaced_first);
  for (int quarters = 0; quarters < 28; quarters++) {
    assert_int_equal(f.broken, 0);
    f.now += BEAT / 4;
    mlfab__server_tick(&f.server, f.now);
  }
  assert_int_equal(f.broken, 1);
  /* The node closes the link and tells the server. */
  mlfab__server_scheduler_lost(&f.server, f.now);
  assert_null(f.server.queue.unplaced_first);
  finish(&f);
}

/* An update that the plan drops is told so at once, with the delay that it would have had, and is never
 * granted. */
static void test_dropped_by_plan(void **state) {
  (void)state;
  static fixture f;
  static uint8_t meta[MLFAB_META_MAX];
  start(&f, 1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD);
  begin_push(&f, 0);
  mlfab__plan_entry entry;
  memset(&entry, 0, sizeof entry);
  entry.id = 1;
  entry.aggregator = MLFAB__NO_NODE;
  entry.fate = MLFAB__FATE_LOOKAHEAD;
  entry.delay = 99;
  mlfab__plan frame = {1, 1e9, 1e9, 1};
  mlfab__frame_in in = {MLFAB__PLAN, mlfab__encode_plan(meta, &frame, &entry), 0, meta, NULL};
  mlfab__server_scheduler_frame(&f.server, &in, f.now);
  assert_int_equal(f.stats.updates_dropped, 1);
  inbox *box = &f.peers[0].in;
  const message *told = &box->items[(box->end - 1) % INBOX];
  mlfab__push_ack ack;
  assert_int_equal(told->type, MLFAB__PUSH_ACK);
  assert_int_equal(mlfab__decode_push_ack(told->meta, told->bytes, &ack), 0);
  assert_int_equal(ack.code, MLFAB_ERR_DROPPED);
  assert_int_equal(ack.delay, 99);
  for (uint32_t i = box->begin; i < box->end; i++)
    assert_int_not_equal(box->items[i % INBOX].type, MLFAB__GRANT);
  finish(&f);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_rounds_begin_under_a_group),
                                     cmocka_unit_test(test_drop_with_bytes_on_their_way),
                                     cmocka_unit_test(test_callback_of_group),
                                     cmocka_unit_test(test_silent_members),
                                     cmocka_unit_test(test_weights_of_integers),
                                     cmocka_unit_test(test_random_plans),
                                     cmocka_unit_test(test_plan_of_strangers),
                                     cmocka_unit_test(test_scheduler_that_plans_nothing),
                                     cmocka_unit_test(test_dropped_by_plan)};
  return cmocka_run_group_tests_name("place", tests, NULL, NULL);
}
