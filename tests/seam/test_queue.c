/* test_queue.c - a server in a fabric with a scheduler: random plans, groups and failures.
 *
 * Workers, aggregators and scheduler are a few lines each, written from the protocol alone. Each peer has an inbox, so
 * that frames in opposite directions cross. Each update adds 1 to its worker's own element: the model counts the
 * applied updates. */
#include "../unit/scale.h"
#include "serving.h"

#include <math.h>

enum { W = 5, COUNT = 96, BYTES = COUNT * 4, CHUNK = 192, INBOX = 4096, PENDING = 6, SUMS = 64 };
#define BEAT 500000000ull

typedef struct letter {
  uint8_t type;
  uint32_t bytes;
  uint8_t *meta;
} letter;

typedef struct inbox {
  letter items[INBOX];
  uint32_t begin, end;
} inbox;

typedef struct pending {
  uint64_t seq, group, sent, granted, base, progress;
  uint32_t aggregator;
  int announced, bad;
  double scale;
} pending;

typedef struct sum { /* a group at an aggregator */
  uint64_t group, sent, upto;
  uint32_t members;
  mlfab__group_member member[W * PENDING];
  int failed;
} sum;

typedef struct peer {
  inbox in;
  uint64_t seq, applied, dropped, refused;
  pending pushes[PENDING];
  sum sums[SUMS];
} peer;

static seam s;
static struct world {
  peer peers[W];
  inbox scheduler;
  mlfab__announce waiting[W * PENDING];
  uint32_t nwaiting, aggregator;
  uint64_t bound, seed, groups_seen;
  int lowered;      /* the bound is set while bytes are on their way */
  uint64_t version; /* after the last commit */
  float model[COUNT];
} w;

static uint64_t draw(uint64_t below) {
  w.seed = w.seed * 6364136223846793005u + 1442695040888963407u;
  return (w.seed >> 33) % below;
}
static int up(uint32_t p) { return s.peers[p].link != 0; }

static void inbox_clear(inbox *in) {
  while (in->begin < in->end) free(in->items[in->begin++ % INBOX].meta);
}

static void hear(seam *of, const seam_heard *heard) {
  inbox *in = heard->peer == W ? &w.scheduler : &w.peers[heard->peer].in;
  (void)of;
  if (heard->type == MLFAB__MODEL) {
    mlfab__model model;
    assert_int_equal(mlfab__decode_model(heard->meta, heard->meta_bytes, &model), 0);
    memcpy((uint8_t *)w.model + model.offset, heard->bulk, heard->bulk_bytes);
    return;
  }
  if (heard->type == MLFAB__PUSH_ACK) {
    mlfab__push_ack ack;
    assert_int_equal(mlfab__decode_push_ack(heard->meta, heard->meta_bytes, &ack), 0);
    if (ack.code == 0) w.version = ack.version;
  }
  letter *l = &in->items[in->end++ % INBOX];
  assert_true(in->end - in->begin <= INBOX);
  l->type = heard->type;
  l->bytes = heard->meta_bytes;
  l->meta = malloc(heard->meta_bytes + 1);
  assert_non_null(l->meta);
  memcpy(l->meta, heard->meta, heard->meta_bytes);
}
#define READ(l, name, to) assert_int_equal(mlfab__decode_##name((l)->meta, (l)->bytes, &(to)), 0)

/* --- a worker --- */

static void resync(peer *p, uint64_t top, const uint64_t applied[4]) {
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

static void greet(uint32_t i) {
  inbox_clear(&w.peers[i].in);
  seam_hello(&s, i);
  resync(&w.peers[i], s.peers[i].ack.top, s.peers[i].ack.applied);
}

static void hang_up(uint32_t i) {
  inbox_clear(&w.peers[i].in);
  memset(w.peers[i].sums, 0, sizeof w.peers[i].sums);
  seam_lost(&s, i);
}

static pending *find(peer *p, uint64_t seq) {
  for (int i = 0; i < PENDING; i++)
    if (p->pushes[i].seq == seq && seq) return &p->pushes[i];
  return NULL;
}

/* The bytes of an update. */
static void content(uint32_t i, uint64_t seq, float *data) {
  const pending *push = find(&w.peers[i], seq);
  memset(data, 0, BYTES);
  data[i] = 1.0f;
  if (push && push->bad) data[COUNT - 1] = NAN;
}

/* Sends the PUSH of an update, whose segments are 32 bytes each, or all of the model. */
static void say_push(uint32_t i, const pending *q, uint32_t segments, const void *bulk) {
  mlfab__segment all = {0, BYTES}, two[2] = {{0, 32}, {64, 32}};
  mlfab__push push = {.seq = q->seq,
                      .members = 1,
                      .generation = s.peers[i].ack.generation,
                      .flags = bulk ? 0 : MLFAB__PUSH_PLANNED,
                      .eager = bulk ? 32 * segments : 0,
                      .progress = q->progress,
                      .bytes = bulk ? 32 * segments : BYTES,
                      .scale = q->scale,
                      .parts = 1,
                      .segments = segments,
                      .versions = 1};
  uint32_t n = mlfab__encode_push(s.meta, &push, bulk ? two : &all, &q->base);
  seam_bulk(&s, i, MLFAB__PUSH, n, bulk, bulk ? 32 : 0);
}

static void announce(uint32_t i) {
  pending *oldest = NULL;
  for (int k = 0; k < PENDING; k++) {
    pending *q = &w.peers[i].pushes[k];
    if (q->seq && !q->announced && (!oldest || q->seq < oldest->seq)) oldest = q;
  }
  if (!oldest || !up(i)) return;
  oldest->announced = 1;
  say_push(i, oldest, 1, NULL);
}

/* A planned update, after the worker's others. NULL: too many are open. */
static pending *offer(uint32_t i, uint64_t progress, double scale) {
  peer *p = &w.peers[i];
  /* With a tight bound one at a time, because an update that waits long is late. */
  for (int k = 0; k < (w.bound > 8 ? PENDING : 1); k++) {
    if (p->pushes[k].seq) continue;
    p->pushes[k] = (pending){
        .seq = ++p->seq, .aggregator = MLFAB__NO_NODE, .progress = progress, .scale = scale};
    return &p->pushes[k];
  }
  return NULL;
}

static void begin_push(uint32_t i) {
  pending *q = offer(i, 0, 1.0);
  if (!q) return;
  q->bad = draw(60) == 0;
  uint64_t behind = draw(3); /* as if it had just pulled */
  q->base = w.version > behind ? w.version - behind : 0;
  announce(i);
}

static void push_as(uint32_t i, uint64_t progress, double scale) {
  offer(i, progress, scale);
  announce(i);
}

static void send_chunk(uint32_t i) {
  float data[COUNT];
  for (int k = 0; k < PENDING && up(i); k++) {
    pending *q = &w.peers[i].pushes[k];
    if (!q->seq || !q->announced || q->aggregator != MLFAB__NO_NODE || q->sent >= q->granted)
      continue;
    uint64_t n = q->granted - q->sent < CHUNK ? q->granted - q->sent : CHUNK;
    mlfab__chunk chunk = {q->seq, q->sent, s.peers[i].ack.generation};
    content(i, q->seq, data);
    q->sent += n;
    seam_bulk(&s, i, MLFAB__CHUNK, mlfab__encode_chunk(s.meta, &chunk),
              (const uint8_t *)data + chunk.offset, (uint32_t)n);
    return;
  }
}

static void acknowledged(uint32_t i, const mlfab__push_ack *ack) {
  peer *p = &w.peers[i];
  pending *q = find(p, ack->seq);
  if (!q) return;
  for (int k = 0; k < PENDING; k++) /* in the order of their numbers */
    assert_true(p->pushes[k].seq == 0 || p->pushes[k].seq >= ack->seq);
  if (ack->code == 0) {
    assert_false(q->bad);
    p->applied++;
    assert_true(ack->delay < w.bound);
  } else if (ack->code == MLFAB_ERR_DROPPED) {
    /* The drop comes before any byte was sent, unless a group with this update was spoilt and the update
     * moved back. */
    if (seam_stats(&s).groups_failed == 0 && !w.lowered) assert_int_equal(q->sent, 0);
    p->dropped++;
  } else {
    assert_true(ack->code == MLFAB_ERR_NOT_FINITE || ack->code == MLFAB_ERR_WITHDRAWN);
    assert_true(ack->code == MLFAB_ERR_WITHDRAWN || q->bad);
    p->refused++;
  }
  q->seq = 0;
}

/* --- an aggregator --- */

static sum *find_sum(peer *p, uint64_t group) {
  for (int k = 0; k < SUMS; k++)
    if (p->sums[k].group == group) return &p->sums[k];
  return NULL;
}

/* member NULL: because of the aggregator itself */
static void group_fail(uint32_t i, sum *one, const mlfab__group_member *member, int code) {
  one->failed = 1;
  SAY(&s, i, GROUP_FAIL, group_fail,
      {one->group, member ? member->seq : 0, member ? member->worker : MLFAB__NO_NODE, code});
}

static void forward(uint32_t i) {
  for (int k = 0; k < SUMS && up(i); k++) {
    sum *one = &w.peers[i].sums[k];
    if (!one->group || one->failed || one->sent >= one->upto) continue;
    float total[COUNT] = {0}, part[COUNT];
    for (uint32_t m = 0; m < one->members; m++) {
      content(one->member[m].worker, one->member[m].seq, part);
      if (isnan(part[COUNT - 1])) {
        group_fail(i, one, &one->member[m], MLFAB_ERR_NOT_FINITE);
        return;
      }
      for (int j = 0; j < COUNT; j++) total[j] += (float)one->member[m].weight * part[j];
    }
    mlfab__forward frame = {one->group, one->sent, BYTES};
    uint64_t n = one->upto - one->sent < CHUNK ? one->upto - one->sent : CHUNK;
    one->sent += n;
    seam_bulk(&s, i, MLFAB__FORWARD, mlfab__encode_forward(s.meta, &frame),
              (const uint8_t *)total + frame.offset, (uint32_t)n);
    return;
  }
}

static void fail_one(uint32_t i) {
  for (int k = 0; k < SUMS && up(i); k++) {
    sum *one = &w.peers[i].sums[k];
    if (!one->group || one->failed) continue;
    uint32_t m = (uint32_t)draw(one->members + 1);
    group_fail(i, one, m < one->members ? &one->member[m] : NULL,
               m < one->members ? MLFAB_ERR_PEER_DEAD : MLFAB_ERR_AGAIN);
    return;
  }
}

static void take_group(uint32_t i, const letter *l) {
  mlfab__group group;
  static mlfab__group_member members[MLFAB__GROUP_MEMBERS_MAX];
  static mlfab__segment segments[MLFAB__SEGMENTS_MAX];
  assert_int_equal(mlfab__decode_group(l->meta, l->bytes, &group, members, segments), 0);
  assert_true(group.members >= 2 && group.bytes == BYTES);
  for (uint32_t m = 0; m < group.members; m++) { /* a worker's updates are in order */
    for (uint32_t k = 0; k < m; k++)
      assert_true(members[k].worker != members[m].worker || members[k].seq < members[m].seq);
  }
  sum *one = find_sum(&w.peers[i], 0);
  assert_non_null(one);
  memset(one, 0, sizeof *one);
  one->group = group.group;
  one->members = group.members;
  memcpy(one->member, members, group.members * sizeof *members);
  w.groups_seen++;
}

/* --- letters of every role --- */

static void deliver(uint32_t i) {
  peer *p = &w.peers[i];
  if (p->in.begin == p->in.end) return;
  letter l = p->in.items[p->in.begin++ % INBOX];
  mlfab__grant grant;
  mlfab__via via;
  mlfab__release release;
  mlfab__group_end end;
  mlfab__resend resend;
  mlfab__push_ack ack;
  pending *q;
  sum *one;
  switch (l.type) {
    case MLFAB__GRANT:
      READ(&l, grant, grant);
      q = find(p, grant.seq);
      if (q && grant.generation == s.peers[i].ack.generation && q->aggregator == MLFAB__NO_NODE)
        q->granted = grant.upto;
      break;
    case MLFAB__VIA:
      READ(&l, via, via);
      q = find(p, via.seq);
      if (!q || via.generation != s.peers[i].ack.generation) break;
      assert_true(via.group > q->group);
      q->group = via.group;
      q->aggregator = via.aggregator;
      q->sent = q->granted = 0;
      break;
    case MLFAB__PUSH_ACK:
      READ(&l, push_ack, ack);
      acknowledged(i, &ack);
      break;
    case MLFAB__RESEND:
      READ(&l, resend, resend);
      s.peers[i].ack.generation = resend.generation;
      resync(p, resend.top, resend.applied);
      break;
    case MLFAB__GROUP:
      take_group(i, &l);
      break;
    case MLFAB__GROUP_END:
      READ(&l, group_end, end);
      one = find_sum(p, end.group);
      if (one) memset(one, 0, sizeof *one);
      break;
    case MLFAB__RELEASE:
      READ(&l, release, release);
      one = find_sum(p, release.group);
      if (one) one->upto = release.upto;
      break;
    default:
      break;
  }
  free(l.meta);
}

/* --- the scheduler --- */

/* Reads announcements, and forgets an older one of the same update. */
static void listen(void) {
  while (w.scheduler.begin < w.scheduler.end) {
    letter l = w.scheduler.items[w.scheduler.begin++ % INBOX];
    if (l.type == MLFAB__ANNOUNCE) {
      mlfab__announce a;
      READ(&l, announce, a);
      for (uint32_t i = 0; i < w.nwaiting; i++) {
        if (w.waiting[i].worker == a.worker && w.waiting[i].id == a.id)
          w.waiting[i] = w.waiting[--w.nwaiting];
      }
      assert_true(w.nwaiting < W * PENDING);
      w.waiting[w.nwaiting++] = a;
    }
    free(l.meta);
  }
}

/* Places updates, in one group if the entries have one. */
static void place(const mlfab__plan_entry *entries, uint32_t n) {
  mlfab__plan frame = {1, 1e9, 1e9, n};
  seam_say(&s, W, MLFAB__PLAN, mlfab__encode_plan(s.meta, &frame, entries));
}

/* A random order, random groups, random drops; sometimes an update that does not exist. */
static void plan(void) {
  mlfab__plan_entry entries[W * PENDING + 1];
  uint32_t n = 0, group = 0, left = 0;
  listen();
  while (w.nwaiting > 0 && (n < 1 || draw(4))) {
    uint32_t i = (uint32_t)draw(w.nwaiting);
    mlfab__announce a = w.waiting[i];
    w.waiting[i] = w.waiting[--w.nwaiting];
    if (left == 0) {
      left = (uint32_t)(1 + draw(4));
      group++;
      w.aggregator = (uint32_t)draw(W);
    }
    left--;
    entries[n] = (mlfab__plan_entry){.id = draw(20) ? a.id : a.id + 1000,
                                     .worker = a.worker,
                                     .group = group,
                                     .aggregator = w.aggregator,
                                     .delay = 99};
    entries[n].fate = draw(12) ? MLFAB__FATE_GO : MLFAB__FATE_LOOKAHEAD;
    if (entries[n].id != a.id) w.waiting[w.nwaiting++] = a; /* it still waits */
    n++;
  }
  place(entries, n);
}

static void scheduler_turn(void) {
  inbox_clear(&w.scheduler);
  w.nwaiting = 0;
  if (up(W))
    seam_lost(&s, W);
  else
    seam_hello(&s, W);
}

/* --- begin and end --- */

static void start_as(uint64_t seed, uint64_t bound, uint32_t rule, uint32_t sync, uint32_t dtype,
                     mlfab_update_fn on_update) {
  mlfab__define d = seam_model(sync, 0);
  memset(&w, 0, sizeof w);
  w.seed = seed;
  w.bound = bound;
  seam_init(&s, W);
  s.config.scheduler = MLFAB_SCHEDULER_OWN;
  s.config.block_bytes = 128;
  s.config.chunk_bytes = s.config.eager_bytes = CHUNK;
  mlfab_schedule_init(&s.config.schedule);
  s.config.schedule.delay_bound = bound;
  s.config.on_update = on_update;
  for (uint32_t i = 0; i < W; i++) s.peers[i].accumulators = 2;
  seam_open(&s);
  d.options.optimizer = rule;
  d.options.gamma = 1e-300; /* 0 would mean 0.9 */
  s.hear = hear;
  seam_define(&s, 0, &d, 0, dtype, dtype == MLFAB_I64 ? COUNT / 2 : COUNT);
}

static void start(uint64_t seed, uint64_t bound, uint32_t rule) {
  start_as(seed, bound, rule, MLFAB_SYNC_ASYNC, MLFAB_F32, NULL);
}

static void finish(void) {
  for (uint32_t i = 0; i < W; i++) inbox_clear(&w.peers[i].in);
  inbox_clear(&w.scheduler);
  seam_close(&s);
}

/* Worker 4 pulls the model, which needs no plan without a scheduler. */
static const float *weights(void) {
  mlfab__segment all = {0, BYTES};
  mlfab__pull pull = {1, 0, 0, 0, 1, 0};
  if (up(W)) scheduler_turn();
  if (!up(4)) greet(4);
  memset(w.model, 0xff, sizeof w.model);
  s.peers[4].room = SEAM_ALL;
  seam_say(&s, 4, MLFAB__PULL, mlfab__encode_pull(s.meta, &pull, &all, NULL));
  for (int k = 0; k < COUNT; k++) assert_true(isfinite(w.model[k]));
  return w.model;
}

static void turns(uint32_t n) {
  while (n-- > 0) {
    for (uint32_t i = 0; i < W; i++) {
      deliver(i);
      send_chunk(i);
      forward(i);
    }
    seam_tick(&s);
    assert_int_equal(s.drops, 0);
  }
}

/* --- random plans --- */

static void step(int quiet) {
  uint32_t i = (uint32_t)draw(W);
  s.now += draw(1000);
  switch (draw(quiet ? 7 : 9)) {
    case 0:
      if (!quiet) begin_push(i);
      announce(i);
      break;
    case 1:
    case 2:
      for (uint64_t n = 1 + draw(6); n > 0; n--) deliver(i);
      break;
    case 3:
      send_chunk(i);
      break;
    case 4:
      forward(i);
      break;
    case 5:
      if (up(W) && draw(12) == 0) plan();
      break;
    case 6:
      if (!up(i)) greet(i);
      seam_tick(&s);
      break;
    case 7:
      if (draw(60) == 0) fail_one(i);
      break;
    default:
      if (draw(300) == 0 && up(i)) hang_up(i);
      if (draw(300) == 0) scheduler_turn();
      if (draw(600) == 0) seam_pass(&s, 6 * BEAT);
      break;
  }
  assert_int_equal(s.drops, 0);
}

static int all_decided(void) {
  for (uint32_t i = 0; i < W * PENDING; i++)
    if (w.peers[i / PENDING].pushes[i % PENDING].seq) return 0;
  return 1;
}

/* Nothing is left in the queue: nothing is ahead of a new update, no small update waits, and a worker may
 * announce as many as ever. */
static void nothing_queued(void) {
  for (uint32_t i = 0; i < W; i++) {
    float zeros[COUNT] = {0};
    pending small = {.seq = ++w.peers[i].seq, .base = w.version, .scale = 1.0};
    if (!up(i)) greet(i);
    greet(i); /* which renews the credit */
    say_push(i, &small, 1, zeros);
    assert_int_equal(s.peers[i].ack.top + 1, small.seq);
    greet(i);
    assert_int_equal(s.peers[i].ack.top, small.seq);
  }
  for (uint32_t i = 0; i < W; i++) {
    inbox_clear(&w.scheduler);
    w.nwaiting = 0;
    pending *q = offer(i, 0, 1.0);
    q->base = w.version;
    announce(i);
    listen();
    assert_int_equal(w.nwaiting, 1);
    assert_true(w.waiting[0].worker == i && w.waiting[0].lag == 0);
    SAY(&s, i, WITHDRAW, withdraw, {q->seq, 1, s.peers[i].ack.generation});
    q->seq = 0;
  }
}

/* Returns the number of applied groups. */
static uint64_t one_seed(uint64_t seed, uint64_t bound, uint32_t rule) {
  uint64_t applied = 0, dropped = 0;
  start(seed, bound, rule);
  for (int i = 0; i < 20000; i++) step(0);
  /* At the end every update is decided. */
  if (!up(W)) scheduler_turn();
  for (int i = 0; !all_decided(); i++) {
    step(1);
    if (i % 1000 == 999) seam_pass(&s, 6 * BEAT); /* updates lost with a link are revoked */
    assert_true(i < 199999);
  }
  for (uint32_t i = 0; i < W; i++) {
    applied += w.peers[i].applied;
    dropped += w.peers[i].dropped;
  }
  mlfab_stats stats = seam_stats(&s);
  assert_int_equal(stats.updates_applied, applied);
  assert_true(stats.delay_max < bound);
  assert_true(applied > 20);
  assert_true(bound > 3 || dropped > 0);
  nothing_queued();
  const float *model = weights();
  for (uint32_t i = 0; i < W; i++) assert_int_equal((uint64_t)model[i], w.peers[i].applied);
  finish();
  return stats.groups_applied;
}

static void test_random_plans(void **state) {
  static const uint64_t bounds[] = {MLFAB_UNBOUNDED, 3, 1, 8, 40};
  uint64_t seeds = test_cases(30), groups = 0;
  (void)state;
  for (uint64_t seed = 1; seed <= seeds; seed++)
    groups +=
        one_seed(seed, bounds[seed % 5], seed % 3 ? MLFAB_OPTIMIZER_SGD : MLFAB_OPTIMIZER_MOMENTUM);
  assert_true(groups > 3 * seeds);
}

/* --- single cases --- */

static mlfab__plan_entry entry(uint64_t id, uint32_t worker, uint32_t group, uint32_t aggregator) {
  return (mlfab__plan_entry){.id = id,
                             .worker = worker,
                             .group = group,
                             .aggregator = group ? aggregator : MLFAB__NO_NODE};
}
static void place_one(uint64_t id, uint32_t worker) {
  mlfab__plan_entry e = entry(id, worker, 0, 0);
  place(&e, 1);
}

static void change(uint32_t kind) {
  mlfab__sync_ask ask = {.ask = 1, .tensor = MLFAB_ALL};
  ask.consistency.kind = kind;
  seam_say(&s, 4, MLFAB__SYNC, mlfab__encode_sync_ask(s.meta, &ask));
}

/* Is there a letter of this type for worker `i`? Returns the last, or NULL. */
static const letter *letter_of(uint32_t i, uint8_t type) {
  const inbox *in = &w.peers[i].in;
  for (uint32_t k = in->end; k-- > in->begin;)
    if (in->items[k % INBOX].type == type) return &in->items[k % INBOX];
  return NULL;
}

/* Rounds are turned on while worker 1's second update is in a group with worker 0's first. Worker 0's update
 * belongs to the open round. Both updates of worker 1 have to wait, and the group does not take the second
 * before the first. */
static void test_rounds_begin_under_a_group(void **state) {
  mlfab__plan_entry both[2] = {entry(1, 0, 1, 3), entry(2, 1, 1, 3)};
  (void)state;
  start(1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD);
  push_as(2, 0, 1.0);
  place_one(1, 2);
  assert_non_null(letter_of(2, MLFAB__GRANT)); /* none of its bytes arrives yet */
  push_as(1, 5, 1.0);
  place_one(1, 1);
  push_as(1, 6, 1.0);
  push_as(0, 0, 1.0);
  place(both, 2);
  change(MLFAB_SYNC_BSP);
  turns(50);
  assert_true(w.peers[2].applied == 1 && w.peers[0].applied == 1);
  assert_true(w.peers[1].pushes[0].seq == 1 && w.peers[1].pushes[1].seq == 2);
  for (uint32_t i = 0; i < W; i++)
    if (i != 1) seam_bye(&s, i);
  turns(50);
  assert_int_equal(w.peers[1].applied, 2);
  const float *model = weights();
  assert_true(model[0] >= 1.0f && model[1] >= 2.0f && model[2] >= 1.0f);
  finish();
}

/* A small update of two stretches travels in two frames. The plan drops it, because it is behind a placed
 * update of the same worker, while its second frame is on the way. */
static void test_drop_with_bytes_on_their_way(void **state) {
  float data[COUNT] = {0};
  pending small = {.seq = 2, .scale = 1.0};
  (void)state;
  start(1, 1, MLFAB_OPTIMIZER_SGD);
  greet(1); /* now the worker has credit */
  push_as(1, 0, 1.0);
  place_one(1, 1);
  assert_non_null(letter_of(1, MLFAB__GRANT));
  say_push(1, &small, 2, data);
  mlfab__chunk chunk = {2, 32, s.peers[1].ack.generation};
  seam_bulk(&s, 1, MLFAB__CHUNK, mlfab__encode_chunk(s.meta, &chunk), data, 32);
  turns(50);
  assert_int_equal(w.peers[1].applied, 1);
  assert_int_equal(seam_stats(&s).updates_dropped, 1);
  finish();
}

/* An update callback for a group: w + scale * sum, with the arguments that it receives. */
static int add_as_told(void *user, const mlfab_update_info *info, uint32_t tensor, int dtype,
                       uint64_t first, uint64_t count, void *words, const void *u) {
  (void)user, (void)tensor, (void)dtype, (void)first;
  for (uint64_t i = 0; i < count; i++)
    ((float *)words)[i] += (float)(info->scale * (double)((const float *)u)[i]);
  return 0;
}

/* Two workers' updates with different scales under a callback, as a group or (aggregator W) one by one. */
static void callback_case(uint32_t aggregator, uint32_t sync, uint32_t then, float *model) {
  int grouped = aggregator < W, rounds = sync == MLFAB_SYNC_BSP || then == MLFAB_SYNC_BSP;
  mlfab__plan_entry entries[2];
  start_as(1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD, sync, MLFAB_F32, add_as_told);
  for (uint32_t i = 0; i < W && rounds; i++)
    if (i < 1 || i > 2) SAY(&s, i, DONE, done, {0});
  push_as(3, 0, 1.0);
  place_one(1, 3); /* chunks that arrive wait until the update is complete */
  for (uint32_t i = 1; i <= 2; i++) {
    push_as(i, 0, i == 1 ? -0.5 : -2.0);
    entries[i - 1] = entry(1, i, (uint32_t)grouped, aggregator);
  }
  place(entries, 2);
  if (then != sync) change(then);
  turns(200);
  assert_int_equal(w.peers[1].applied + w.peers[2].applied, 2);
  assert_int_equal(seam_stats(&s).groups_applied, grouped);
  memcpy(model, weights(), BYTES);
  finish();
}

/* The models are equal. The callback receives the scale with one consistency model, and not with the other:
 * in the last two cases the model changes under the group. */
static void test_callback_of_group(void **state) {
  static const struct {
    uint32_t aggregator, sync, then;
  } cases[] = {{0, MLFAB_SYNC_ASYNC, MLFAB_SYNC_ASYNC},
               {W, MLFAB_SYNC_BSP, MLFAB_SYNC_BSP},
               {0, MLFAB_SYNC_BSP, MLFAB_SYNC_BSP},
               {0, MLFAB_SYNC_ASYNC, MLFAB_SYNC_BSP},
               {0, MLFAB_SYNC_BSP, MLFAB_SYNC_ASYNC}};
  float alone[COUNT], model[COUNT];
  (void)state;
  callback_case(W, MLFAB_SYNC_ASYNC, MLFAB_SYNC_ASYNC, alone);
  for (size_t i = 0; i < MLFAB__COUNT(cases); i++) {
    callback_case(cases[i].aggregator, cases[i].sync, cases[i].then, model);
    assert_memory_equal(alone, model, sizeof alone);
  }
  assert_float_equal(alone[1], -0.5f, 0.0f);
  assert_float_equal(alone[2], -2.0f, 0.0f);
}

/* A bound that is set when updates have their places holds at their turn. In a group, each member counts those before it. */
static void test_bound_set_late(void **state) {
  (void)state;
  for (uint32_t grouped = 0; grouped < 2; grouped++) {
    mlfab__plan_entry entries[2] = {entry(1, 1, grouped, 0), entry(1, 2, grouped, 0)};
    start(1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD);
    push_as(3, 0, 1.0);
    place_one(1, 3); /* the others wait for it */
    for (uint32_t i = 1; i <= 2; i++) push_as(i, 0, 1.0);
    place(entries, 2);
    SAY(&s, 0, SCHEDULE, schedule, {.delay_bound = 1 + grouped});
    w.lowered = 1;
    turns(200);
    assert_int_equal(w.peers[1].applied, grouped);
    assert_int_equal(w.peers[1].dropped, 1 - grouped);
    assert_true(w.peers[2].applied == 0 && w.peers[2].dropped == 1);
    finish();
  }
}

/* Integers are multiplied with integers only; scales relative to the first member may be fractions. */
static void test_weights_of_integers(void **state) {
  static const double seconds[] = {3.0, 4.0};
  mlfab__plan_entry entries[2] = {entry(1, 1, 1, 0), entry(1, 2, 1, 0)};
  (void)state;
  for (uint32_t k = 0; k < 2; k++) {
    start_as(1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC, MLFAB_I64, add_as_told);
    push_as(1, 0, 2.0);
    push_as(2, 0, seconds[k]);
    place(entries, 2);
    for (int i = 0; i < 16; i++) deliver(0);
    assert_int_equal(w.groups_seen, k);
    finish();
  }
}

/* An unreachable aggregator: after two members that the server waited for in vain, the rest go directly. */
static void test_silent_members(void **state) {
  mlfab__plan_entry entries[W];
  (void)state;
  start(1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD);
  for (uint32_t i = 0; i < W; i++) {
    push_as(i, 0, 1.0);
    entries[i] = entry(1, i, 1, 0);
  }
  place(entries, W);
  for (uint32_t fails = 0; fails <= 2; fails++) {
    uint32_t members = 0;
    s.now += 3 * BEAT;
    for (int i = 0; i < 100; i++) deliver(0);
    for (int i = 0; i < SUMS; i++) {
      sum *one = &w.peers[0].sums[i];
      if (one->group == 0 || one->failed) continue;
      members = one->members;
      group_fail(0, one, &one->member[members - 1], MLFAB_ERR_PEER_DEAD);
    }
    assert_int_equal(members, fails < 2 ? W - fails : 0);
  }
  seam_beat(&s);
  turns(300);
  for (uint32_t i = 0; i < W; i++) assert_int_equal(w.peers[i].applied, 1);
  finish();
}

/* An update that the plan drops is told so at once, with the delay that it would have had, and is never
 * granted. If the plan also names a worker that does not exist, it is refused as a whole. */
static void test_dropped_by_plan(void **state) {
  (void)state;
  for (int strange = 0; strange < 2; strange++) {
    mlfab__plan_entry entries[2] = {entry(1, 0, 0, 0), entry(1, W, 0, 0)};
    mlfab__push_ack ack;
    start(1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD);
    push_as(0, 0, 1.0);
    assert_null(letter_of(0, MLFAB__GRANT));
    entries[0].fate = MLFAB__FATE_LOOKAHEAD;
    entries[0].delay = 99;
    place(entries, 1 + (uint32_t)strange);
    assert_int_equal(s.drops, strange);
    assert_int_equal(seam_stats(&s).updates_dropped, !strange);
    assert_true((letter_of(0, MLFAB__GRANT) != NULL) == strange);
    if (!strange) {
      READ(letter_of(0, MLFAB__PUSH_ACK), push_ack, ack);
      assert_true(ack.code == MLFAB_ERR_DROPPED && ack.delay == 99);
    }
    finish();
  }
}

/* A scheduler that has an announced update and plans nothing counts as lost after eight heartbeats. A
 * scheduler that reports that it waits, or that has nothing to plan, does not. Time in which this server was
 * stopped does not count. */
static void test_scheduler_that_plans_nothing(void **state) {
  (void)state;
  start(1, MLFAB_UNBOUNDED, MLFAB_OPTIMIZER_SGD);
  for (int beats = 0; beats < 40; beats++) seam_pass(&s, BEAT);
  push_as(0, 0, 1.0);
  for (int beats = 0; beats < 40; beats++) {
    seam_pass(&s, BEAT);
    if (beats % 6 == 5) place(NULL, 0);
  }
  place(NULL, 0);
  seam_pass(&s, 100 * BEAT);
  for (int quarters = 0; quarters < 28; quarters++) {
    assert_true(s.drops == 0 && !letter_of(0, MLFAB__GRANT));
    seam_pass(&s, BEAT / 4);
  }
  assert_true(s.drops == 1 && s.dropped == W && letter_of(0, MLFAB__GRANT));
  finish();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_rounds_begin_under_a_group),
      cmocka_unit_test(test_drop_with_bytes_on_their_way),
      cmocka_unit_test(test_callback_of_group),
      cmocka_unit_test(test_bound_set_late),
      cmocka_unit_test(test_silent_members),
      cmocka_unit_test(test_weights_of_integers),
      cmocka_unit_test(test_random_plans),
      cmocka_unit_test(test_scheduler_that_plans_nothing),
      cmocka_unit_test(test_dropped_by_plan),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
