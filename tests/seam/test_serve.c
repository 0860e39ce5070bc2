/* test_serve.c - a server's answers to pulls that a scheduler places: turns, spreads, and both when a peer fails. */
#include "../unit/scale.h"
#include "serving.h"

enum { W = 6, SLICES = 4, SLICE = 32768, BYTES = SLICES * SLICE, BLOCK = 16384, CHUNK = 4096 };
enum { EAGER = 8192, FRAMES = BYTES / CHUNK };
/* Bulks that a server lends to a link; pulls of a worker, and spreads of a distributor, at a time. */
enum { SENDS = 16, PULLS = 8, SPREADS = 4 };
#define BEAT 500000000ull

static seam s;
static mlfab__model model; /* of the last MODEL frame, taken or only offered */
static const uint32_t *bulk;
static uint32_t bulk_bytes;
static uint64_t tokens[W][SENDS];
static uint32_t ntokens[W];
static mlfab__push_ack acked; /* the last answer to a push */
static int refuse_round;

/* Every word tells at which version of its slice it was written. */
static int on_update(void *user, const mlfab_update_info *info, uint32_t tensor, int dtype,
                     uint64_t first, uint64_t count, void *words, const void *u) {
  (void)user, (void)tensor, (void)dtype, (void)first, (void)u;
  for (uint64_t i = 0; i < count; i++) ((uint32_t *)words)[i] = (uint32_t)info->version + 1;
  return refuse_round;
}

static int setup(void **state) {
  (void)state;
  seam_init(&s, W);
  s.config.scheduler = MLFAB_SCHEDULER_OWN;
  mlfab_schedule_init(&s.config.schedule);
  s.config.block_bytes = BLOCK;
  s.config.chunk_bytes = CHUNK;
  s.config.eager_bytes = EAGER;
  for (uint32_t w = 0; w < W; w++) s.peers[w].accumulators = 4;
  refuse_round = 0;
  memset(ntokens, 0, sizeof ntokens);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  seam_close(&s);
  return 0;
}

#define SERVED(name) SCENE_WITH(name, setup, teardown)

static void open_model(uint32_t sync) {
  mlfab__define d = seam_model(sync, SLICES);
  seam_open(&s);
  seam_define(&s, 0, &d, 0, MLFAB_F32, BYTES / 4);
  assert_int_equal(seam_defined(&s, 0), 0);
  for (uint32_t w = 0; w < W; w++) seam_hello(&s, w); /* now there is credit */
  seam_forget(&s);
}

static void lost(uint32_t p) {
  if (p < W) ntokens[p] = 0;
  seam_lost(&s, p);
}

static void hello(uint32_t p) {
  if (p < W) ntokens[p] = 0;
  seam_hello(&s, p);
}

/* --- what workers and the scheduler send --- */

static void ask(uint32_t worker, uint64_t request, uint64_t offset, uint64_t bytes,
                uint64_t progress) {
  seam_ask(&s, worker, request, offset, bytes, progress);
}
static void ask_all(uint32_t worker, uint64_t request) { ask(worker, request, 0, BYTES, 0); }
static void cancel(uint32_t worker, uint64_t request) {
  SAY(&s, worker, PULL_CANCEL, pull_cancel, request);
}
static void done(uint32_t worker, uint64_t request) {
  SAY(&s, worker, PULL_DONE, pull_done, request);
}
static void spread_fail(uint32_t aggregator, uint64_t spread, uint64_t request, uint32_t worker) {
  SAY(&s, aggregator, SPREAD_FAIL, spread_fail, spread, request, worker, MLFAB_ERR_PEER_DEAD);
}

static mlfab__plan_entry entry(uint32_t worker, uint64_t id, uint32_t group, uint32_t aggregator) {
  return OF(mlfab__plan_entry, .kind = MLFAB__TRANSFER_PULL, .worker = worker, .id = id,
            .group = group, .aggregator = aggregator);
}

static void send_plan(const mlfab__plan_entry *entries, uint32_t n) {
  mlfab__plan p = {.serial = 1, .rate_in = -1.0, .rate_out = -1.0, .entries = n};
  seam_say(&s, W, MLFAB__PLAN, mlfab__encode_plan(s.meta, &p, entries));
}
static void plan_one(uint32_t worker, uint64_t id) {
  mlfab__plan_entry e = entry(worker, id, 0, MLFAB__NO_NODE);
  send_plan(&e, 1);
}
/* Pulls `id` of workers first .. last, passed on by `aggregator`. */
static void plan_spread(uint32_t first, uint32_t last, uint64_t id, uint32_t aggregator) {
  mlfab__plan_entry e[W];
  for (uint32_t w = first; w <= last; w++) e[w - first] = entry(w, id, 7, aggregator);
  send_plan(e, last - first + 1);
}

/* An update of the worker's own bytes, small enough for its credit. Returns the answer. */
static int push(uint32_t worker, uint64_t offset, uint32_t bytes, uint64_t progress) {
  static uint64_t values[EAGER / 8];
  mlfab__segment segment = {offset, bytes};
  uint64_t version = UINT64_MAX;
  mlfab__push p =
      OF(mlfab__push, .seq = s.peers[worker].ack.top + 1, .members = 1,
         .generation = s.peers[worker].ack.generation, .eager = bytes, .progress = progress,
         .bytes = bytes, .scale = 1.0, .parts = 1, .segments = 1, .versions = 1);
  memset(values, 0x3f, sizeof values); /* floats near 0.75 */
  s.peers[worker].ack.top++;
  seam_bulk(&s, worker, MLFAB__PUSH, mlfab__encode_push(s.meta, &p, &segment, &version), values,
            bytes);
  seam_settle(&s);
  if (!s.hear) LAST(&s, acked, PUSH_ACK, push_ack, worker);
  assert_true(acked.seq == p.seq);
  return acked.code;
}

/* --- what links take --- */

/* Is a frame offered to this worker? `take`: its link takes it; a token stays out until give_back. */
static int step(uint32_t worker, int take) {
  seam_peer *peer = &s.peers[worker];
  const seam_heard *heard = &peer->offered;
  if (heard->type == 0) return 0;
  assert_int_equal(mlfab__decode_model(heard->meta, heard->meta_bytes, &model), 0);
  if (!take) return 1;
  bulk = (const uint32_t *)(const void *)heard->bulk;
  bulk_bytes = heard->bulk_bytes;
  uint64_t token = heard->token;
  peer->room = 1;
  seam_look(&s);
  assert_int_equal(peer->room, 0);
  assert_true(ntokens[worker] < SENDS);
  if (token) tokens[worker][ntokens[worker]++] = token;
  return 1;
}
static void give_back(uint32_t worker) {
  while (ntokens[worker] > 0) seam_sent(&s, worker, tokens[worker][--ntokens[worker]]);
}
/* Takes up to `most` frames for a worker; all belong to this request. Returns how many. */
static uint32_t drain(uint32_t worker, uint64_t request, uint32_t most) {
  uint32_t n = 0;
  for (; n < most && step(worker, 1); n++) {
    assert_true(model.request == request);
    give_back(worker);
  }
  return n;
}
static void drain_all(uint32_t worker, uint64_t request) {
  assert_int_equal(drain(worker, request, 100), FRAMES);
}
static mlfab__pull_via via(uint32_t worker) {
  mlfab__pull_via v;
  LAST(&s, v, PULL_VIA, pull_via, worker);
  return v;
}
static uint32_t vias(uint32_t worker) { return COUNT_OF(&s, PULL_VIA, worker); }
static mlfab__spread spread(uint32_t worker, mlfab__spread_member *members) {
  const seam_heard *heard = seam_last(&s, MLFAB__SPREAD, worker);
  mlfab__spread spread;
  assert_int_equal(mlfab__decode_spread(heard->meta, heard->meta_bytes, &spread, members), 0);
  return spread;
}
static mlfab__pull_fail failed(uint32_t worker) {
  mlfab__pull_fail f;
  LAST(&s, f, PULL_FAIL, pull_fail, worker);
  return f;
}

/* How often this pull was reported to the scheduler with this code. */
static uint32_t reported(uint32_t worker, uint64_t id, int code) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < s.nlog; i++) {
    mlfab__report r;
    if (s.log[i].type != MLFAB__REPORT) continue;
    assert_int_equal(mlfab__decode_report(s.log[i].meta, s.log[i].meta_bytes, &r), 0);
    n += r.kind == MLFAB__TRANSFER_PULL && r.worker == worker && r.id == id && r.code == code;
  }
  return n;
}

/* The bytes still to be sent, as the server tells a scheduler that calls. */
static uint64_t backlog(void) {
  mlfab__report report;
  seam_hello(&s, W);
  LAST(&s, report, REPORT, report, W);
  return report.out_backlog;
}

/* No pull is open: nothing is announced to a scheduler that calls, or offered to a worker, and all slots are free. */
static void all_over(void) {
  for (uint32_t w = 0; w < W; w++) assert_int_equal(step(w, 0), 0);
  seam_forget(&s);
  seam_hello(&s, W);
  assert_int_equal(COUNT_OF(&s, ANNOUNCE, W), 0);
  mlfab__report report;
  LAST(&s, report, REPORT, report, W);
  assert_int_equal(report.out_backlog, 0);
  for (uint32_t w = 0; w < W; w++) {
    if (!s.peers[w].link) hello(w);
    for (uint64_t k = 0; k < PULLS; k++) ask(w, 1000000 + k, 0, 4, 0);
    assert_int_equal(COUNT_OF(&s, PULL_FAIL, w), 0);
    for (uint64_t k = 0; k < PULLS; k++) cancel(w, 1000000 + k);
  }
  seam_forget(&s);
}

/* --- single cases --- */

SERVED(test_announced_and_placed) {
  mlfab__announce a;
  mlfab__report report;
  open_model(MLFAB_SYNC_ASYNC);
  ask_all(2, 9);
  assert_int_equal(step(2, 1), 0);
  assert_int_equal(COUNT_OF(&s, ANNOUNCE, W), 1);
  LAST(&s, a, ANNOUNCE, announce, W);
  assert_true(a.kind == MLFAB__TRANSFER_PULL && a.id == 9 && a.worker == 2);
  assert_int_equal(a.incarnation, s.peers[2].incarnation);
  assert_int_equal(a.bytes, BYTES);
  assert_true(a.members == 1 && a.parts == 1 && a.lag == 0);
  for (uint32_t w = 3; w <= 4; w++) {
    mlfab__announce other;
    ask(w, 9, 0, w == 3 ? BYTES : BYTES - 4, 0);
    LAST(&s, other, ANNOUNCE, announce, W);
    assert_true(other.worker == w && (other.shape == a.shape) == (w == 3));
    cancel(w, 9);
  }
  LAST(&s, report, REPORT, report, W); /* of the other pulls */
  assert_int_equal(report.out_backlog, 0);
  plan_one(2, 9);
  plan_one(2, 9); /* placed twice: no effect */
  assert_int_equal(step(2, 0), 1);
  assert_int_equal(backlog(), BYTES);
  assert_int_equal(drain(2, 9, 8), 8);
  assert_int_equal(backlog(), BYTES - 8 * CHUNK);
  LAST(&s, report, REPORT, report, W);
  assert_int_equal(report.worker, MLFAB__NO_NODE);
  assert_int_equal(drain(2, 9, 100), FRAMES - 8);
  assert_int_equal(reported(2, 9, 0), 1);
  LAST(&s, report, REPORT, report, W);
  assert_int_equal(report.out_backlog, 0);
  assert_int_equal(vias(2), 0);
  all_over();
}

/* A placed pull has at most one MiB in the transport, here two chunks; its next frame is sent when tokens
 * come back. */
SERVED(test_lent) {
  s.config.chunk_bytes = 512 * 1024;
  open_model(MLFAB_SYNC_ASYNC);
  ask_all(2, 9);
  plan_one(2, 9);
  assert_int_equal(step(2, 1), 1);
  assert_int_equal(step(2, 1), 1);
  assert_int_equal(step(2, 1), 0);
  ask(2, 10, 0, EAGER, 0); /* a small pull is not held up */
  assert_int_equal(step(2, 1), 1);
  assert_int_equal(model.request, 10);
  assert_int_equal(step(2, 0), 0);
  give_back(2);
  assert_int_equal(drain(2, 9, 100), BYTES / BLOCK - 2);
  all_over();
}

/* An update of a block that a pull has pinned, which needs a block without a use. */
static void push_beside(uint64_t request, uint64_t progress) {
  ask(3, request, 0, 4, 0);
  assert_int_equal(step(3, 0), 1);
  assert_int_equal(push(1, 0, EAGER, progress), 0);
  assert_int_equal(drain(3, request, 2), 1);
}

/* A peer may read the bytes that its lost link was lent until the transport has been told. So no update is
 * written there before the next tick, also when there is no memory. */
SERVED(test_lent_and_lost) {
  uint8_t before[CHUNK];
  open_model(MLFAB_SYNC_ASYNC);
  push_beside(1, 0); /* now there is memory for both */
  ask(2, 9, 0, EAGER, 0);
  assert_int_equal(step(2, 1), 1);
  assert_int_equal(ntokens[2], 1);
  const uint32_t *lent = bulk;
  memcpy(before, lent, CHUNK);
  s.poor = 1;
  lost(2);
  assert_int_equal(push(1, 0, EAGER, 1), 0);
  assert_memory_equal(lent, before, CHUNK);
  push_beside(2, 2);
  assert_memory_equal(lent, before, CHUNK);
  s.poor = 0;
  seam_pass(&s, 1);
  push_beside(3, 3);
  assert_memory_not_equal(lent, before, CHUNK);
}

/* A pull of a future round tells its worker to wait; it is announced when the round is complete. */
SERVED(test_rounds) {
  mlfab__waiting waiting;
  s.config.on_update = on_update;
  open_model(MLFAB_SYNC_BSP);
  ask(2, 9, 0, BYTES, 1);
  assert_int_equal(COUNT_OF(&s, ANNOUNCE, W), 0);
  LAST(&s, waiting, WAITING, waiting, 2);
  assert_true(waiting.kind == MLFAB__REQUEST_PULL && waiting.request == 9 && waiting.rank == 0);
  plan_one(2, 9); /* not announced */
  assert_int_equal(step(2, 1), 0);
  for (uint32_t w = 0; w < W; w++) {
    assert_int_equal(COUNT_OF(&s, ANNOUNCE, W), 0);
    SAY(&s, w, PROGRESS, progress, .progress = 1);
  }
  assert_int_equal(COUNT_OF(&s, ANNOUNCE, W), 1);
  assert_int_equal(step(2, 1), 0);
  plan_one(2, 9);
  drain_all(2, 9);
  /* A round that a callback refused fails its pull once, without an announcement. */
  refuse_round = 1;
  for (uint32_t w = 1; w < W; w++) SAY(&s, w, PROGRESS, progress, .progress = 2);
  assert_int_equal(push(0, 0, 4, 1), 0);
  ask(2, 10, 0, BYTES, 2);
  assert_int_equal(failed(2).code, MLFAB_ERR_CALLBACK);
  assert_int_equal(COUNT_OF(&s, ANNOUNCE, W), 1);
  ask(2, 11, 0, EAGER, 2);
  assert_int_equal(drain(2, 11, 100), EAGER / CHUNK);
  all_over();
}

/* --- spreads --- */

/* Starts a spread of pulls 5 of workers 1 to 3 by worker 0's node. Returns its number. */
static uint64_t begin_spread(void) {
  mlfab__spread_member members[MLFAB__GROUP_MEMBERS_MAX];
  open_model(MLFAB_SYNC_ASYNC);
  for (uint32_t w = 1; w <= 3; w++) ask_all(w, 5);
  plan_spread(1, 3, 5, 0);
  return spread(0, members).request;
}

SERVED(test_spread) {
  mlfab__spread_member members[MLFAB__GROUP_MEMBERS_MAX];
  s.config.schedule.whole = 1;
  uint64_t number = begin_spread();
  mlfab__spread one = spread(0, members);
  assert_true((number & MLFAB__SPREAD_BIT) != 0);
  assert_true(one.bytes == BYTES && one.frames == FRAMES && one.whole == 1 && one.members == 3);
  for (uint32_t w = 1; w <= 3; w++) {
    mlfab__pull_via v = via(w);
    /* members are told first */
    assert_true(seam_last(&s, MLFAB__PULL_VIA, w) < seam_last(&s, MLFAB__SPREAD, 0));
    assert_true(v.request == 5 && v.aggregator == 0 && v.attempt > 0);
    assert_true(members[w - 1].worker == w && members[w - 1].request == 5);
    assert_int_equal(members[w - 1].incarnation, s.peers[w].incarnation);
    assert_int_equal(members[w - 1].attempt, v.attempt);
    assert_int_equal(step(w, 1), 0);
  }
  assert_int_equal(backlog(), BYTES);
  drain_all(0, number);
  assert_int_equal(model.flags, MLFAB__MODEL_LAST);
  assert_int_equal(backlog(), 0);
  assert_int_equal(seam_stats(&s).pulls_answered, 0);
  for (uint32_t w = 3; w >= 1; w--) {
    assert_int_equal(reported(w, 5, 0), 0);
    done(w, 5);
    done(w, 5); /* the server knows already */
    assert_int_equal(reported(w, 5, 0), 1);
  }
  mlfab_stats stats = seam_stats(&s);
  assert_true(stats.pulls_answered == 3 && stats.spreads_answered == 3);
  assert_int_equal(stats.spreads_failed, 0);
  assert_int_equal(COUNT_OF(&s, PULL_FAIL, 0), 0);
  assert_int_equal(s.drops, 0);
  all_over();
}

/* The announced number of frames is right for every list of segments. */
SERVED(test_frames) {
  mlfab__spread_member members[MLFAB__GROUP_MEMBERS_MAX];
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 5);
  open_model(MLFAB_SYNC_ASYNC);
  for (uint64_t id = 1; id <= 200; id++) {
    mlfab__segment segments[8];
    mlfab__pull pull = {id, 0, 0, 0, 0, 0};
    uint64_t bytes = 0, at = 0;
    for (; pull.segments < 8; pull.segments++) {
      at += 4 + 4 * mlfab__rng_below(&prng, 4000);
      uint64_t n = 4 + 4 * mlfab__rng_below(&prng, 8000);
      if (at + n > BYTES) break;
      segments[pull.segments] = (mlfab__segment){at, n};
      at += n;
      bytes += n;
    }
    seam_forget(&s);
    for (uint32_t w = 1; w <= 2; w++)
      seam_say(&s, w, MLFAB__PULL, mlfab__encode_pull(s.meta, &pull, segments, NULL));
    plan_spread(1, 2, id, 0);
    if (bytes <= EAGER) {
      for (uint32_t w = 1; w <= 2; w++) drain(w, id, UINT32_MAX);
      continue;
    }
    mlfab__spread one = spread(0, members);
    assert_int_equal(one.bytes, bytes);
    assert_int_equal(drain(0, one.request, UINT32_MAX), one.frames);
    done(1, id);
    done(2, id);
    if (id % 20 == 0) all_over();
  }
}

/* Bulks that are lent to these workers, and from which updates move on, use the spare blocks up: a pull restarts. */
static void use_up_blocks(uint32_t first) {
  for (uint32_t i = 0; seam_stats(&s).pulls_restarted == 0; i++) {
    assert_true(i < 4 * SENDS);
    ask(first + i / SENDS, 9, 3 * SLICE, 4, 0);
    assert_int_equal(step(first + i / SENDS, 1), 1);
    assert_int_equal(push(5, 3 * SLICE, EAGER, i), 0);
  }
}

/* A server short of spare blocks unpins a spread's slice; more frames than announced are sent. */
SERVED(test_unpinned) {
  uint64_t number = begin_spread();
  assert_int_equal(drain(0, number, 10), 10);
  use_up_blocks(1);
  assert_int_equal(seam_stats(&s).pulls_restarted, 1);
  assert_int_equal(drain(0, number, 100), FRAMES - 8);
}

/* A slice with two stretches of a pull is unpinned when the second is on its way: both are sent again, from one commit, and
 * nothing of the slice before. */
SERVED(test_unpinned_apart) {
  enum { STRETCH = 3 * CHUNK };
  open_model(MLFAB_SYNC_ASYNC);
  const mlfab__segment apart[3] = {
      {0, CHUNK}, {SLICE + CHUNK, STRETCH}, {2 * SLICE - STRETCH, STRETCH}};
  mlfab__pull pull = {9, 0, 0, 0, 3, 0};
  seam_say(&s, 1, MLFAB__PULL, mlfab__encode_pull(s.meta, &pull, apart, NULL));
  plan_one(1, 9);
  assert_int_equal(drain(1, 9, 5), 5);
  assert_true(model.offset == apart[2].offset);
  use_up_blocks(2);
  for (uint64_t k = 0; k < 6; k++) {
    const mlfab__segment *in = &apart[1 + k / 3];
    assert_int_equal(drain(1, 9, 1), 1);
    assert_true(model.offset == in->offset + k % 3 * CHUNK && model.bytes == CHUNK);
  }
  assert_int_equal(step(1, 0), 0);
}

/* The server gives up the link of a peer that sends a wrong frame, and nothing else changes. */
static void wrong_frame(uint32_t i, uint64_t number) {
  mlfab__plan_entry e[3] = {entry(4, 5, 8, 0), entry(5, 5, 8, 0), entry(1, 5, 0, W)};
  static const uint32_t wrong[] = {5, 1, 1, 1, 0, 0, 0, 0, W, W};
  uint32_t from = wrong[i];
  memset(s.meta, 0, 64);
  if (i == 0) ask_all(from, MLFAB__SPREAD_BIT | 1);
  if (i == 1) ask_all(from, 5); /* in progress already */
  if (i == 2) seam_say(&s, from, MLFAB__PULL_DONE, 3);
  if (i == 3) done(from, number);
  if (i == 4) done(from, number); /* the node's aggregator cannot say that */
  if (i == 5) seam_say(&s, from, MLFAB__SPREAD_FAIL, 5);
  if (i == 6) spread_fail(from, number, 5, W);
  if (i == 7) spread_fail(from, 5, 5, 1);
  if (i == 8) plan_one(W, 5);
  if (i == 9) send_plan(e, 3); /* the whole plan is void */
  assert_int_equal(s.drops, 1);
  assert_int_equal(s.dropped, from);
  assert_int_equal(seam_stats(&s).frames_refused, 1);
  assert_int_equal(COUNT_OF(&s, SPREAD, 0), 1);
}

SERVED(test_bad_frames) {
  for (uint32_t i = 0; i <= 10; i++) {
    uint64_t number = begin_spread();
    ask_all(4, 5);
    if (i != 0) ask_all(5, 5);
    if (i < 10) {
      wrong_frame(i, number);
      teardown(NULL);
      setup(NULL);
      continue;
    }
    cancel(0, number); /* no error: the worker cannot cancel it */
    spread_fail(1, MLFAB__SPREAD_BIT | 999, 5, MLFAB__NO_NODE);
    assert_int_equal(s.drops, 0);
    drain_all(0, number);
  }
}

/* A change whose answer was lost is requested again: it is not made twice, and another worker's later
 * change stays. */
SERVED(test_change_asked_again) {
  static const struct {
    uint32_t worker, ask, kind;
    int waits; /* does a pull of the first iteration wait afterwards? With SSP it does not. */
  } changes[] = {{0, 1, MLFAB_SYNC_SSP, 0},
                 {1, 1, MLFAB_SYNC_BSP, 1},
                 {0, 1, MLFAB_SYNC_SSP, 1},
                 {0, 2, MLFAB_SYNC_SSP, 0}};
  open_model(MLFAB_SYNC_ASYNC);
  for (uint32_t i = 0; i < 4; i++) {
    mlfab__sync_ack ack;
    SAY(&s, changes[i].worker, SYNC, sync_ask, changes[i].ask,
        {.kind = changes[i].kind, .staleness = 3});
    LAST(&s, ack, SYNC_ACK, sync_ack, changes[i].worker);
    assert_int_equal(ack.code, 0);
    ask(4, 10 + i, 0, EAGER, 1);
    assert_int_equal(step(4, 0), !changes[i].waits);
    cancel(4, 10 + i);
  }
}

/* --- conversations --- */

/* A script is a list of commands, each with its arguments, which are numbers and peers. A peer's pull has the number
 * 5, or another behind a slash: "ask 1-3/6" are the pulls 6 of workers 1 to 3. "S" is the last spread's number. */
static struct player {
  const char *command;
  char words[10][16];
  uint32_t n, attempt;
  uint64_t number; /* of the last spread */
} play;

/* Peers first .. last, and the number of their pull. "-" is nobody. */
typedef struct range {
  uint32_t first, last;
  uint64_t id;
} range;

static range peers(uint32_t word) {
  char *text = play.words[word], *end;
  range r = {MLFAB__NO_NODE, MLFAB__NO_NODE, 5};
  if (*text == '-') return r;
  r.first = r.last = (uint32_t)strtoul(text, &end, 10);
  if (*end == '-') r.last = (uint32_t)strtoul(end + 1, &end, 10);
  if (*end == '/') r.id = end[1] == 'S' ? play.number : strtoull(end + 1, &end, 10);
  return r;
}
static uint64_t number(uint32_t word) {
  const char *text = play.words[word];
  return *text == 'S' ? play.number : *text == 'T' ? play.number + 1 : strtoull(text, NULL, 10);
}

#define IS(command) !strcmp(name, command)
static int expect(int holds, const char *what) {
  if (!holds) fail_msg("'%.40s ...': not %s", play.command, what);
  return 1;
}
#define EXPECT(condition) expect(condition, #condition)

/* "take" takes this number of frames, or with "all" the rest, which has this number. */
static int takes(uint32_t w, uint64_t id) {
  uint32_t frames = play.n > 2 ? (uint32_t)number(2) : FRAMES;
  return EXPECT(drain(w, id, play.n == 3 ? frames : 1000) == frames);
}

/* As "place", but of a push. */
static int pushes(uint32_t w, uint64_t id) {
  mlfab__plan_entry e = entry(w, id, 0, MLFAB__NO_NODE);
  e.kind = MLFAB__TRANSFER_PUSH;
  send_plan(&e, 1);
  return 1;
}

/* The code with which a pull was reported to the scheduler. */
static int code_of(const char *word) {
  return !strcmp(word, "cancelled") ? MLFAB_ERR_CANCELLED
         : !strcmp(word, "closed")  ? MLFAB_ERR_PEER_CLOSED
                                    : 0;
}

/* Commands about each pull of a range. */
static int play_pull(const char *name, uint32_t w, uint64_t id) {
  if (IS("ask")) return ask_all(w, id), 1;
  if (IS("part")) return ask(w, id, 0, number(2), 0), 1; /* its first bytes */
  if (IS("cancel")) return cancel(w, id), 1;
  if (IS("done")) return done(w, id), 1;
  if (IS("place")) return plan_one(w, id), 1;
  if (IS("pushes")) return pushes(w, id);
  if (IS("take")) return takes(w, id);
  if (IS("direct")) /* the server answers it itself */
    return EXPECT(via(w).aggregator == MLFAB__NO_NODE) && EXPECT(drain(w, id, 1000) == FRAMES);
  if (IS("reported")) return EXPECT(reported(w, id, code_of(play.words[2])) == 1);
  return 0;
}

/* Commands about each peer of a range. */
static int play_peer(const char *name, uint32_t p) {
  uint64_t n = play.n > 2 ? number(2) : 0;
  if (IS("idle")) return EXPECT(!step(p, 0)); /* its link is offered nothing */
  if (IS("offered")) return EXPECT(step(p, 0));
  if (IS("lost")) return lost(p), 1;
  if (IS("hello")) return hello(p), 1;
  if (IS("process")) return seam_process(&s, p), 1;
  if (IS("bye")) return seam_bye(&s, p), 1;
  if (IS("capacity")) /* of the worker's link; 0: not known */
    return SAY(&s, p, CAPACITY, capacity, 0, n ? (double)n : -1.0, 50.0), 1;
  if (IS("vias")) return EXPECT(vias(p) == n);
  if (IS("via")) return EXPECT(via(p).aggregator == peers(2).first); /* its last route */
  if (IS("mark")) return play.attempt = via(p).attempt, 1;           /* its present attempt */
  if (IS("newer")) return EXPECT(via(p).attempt > play.attempt);
  if (IS("spreads")) return EXPECT(COUNT_OF(&s, SPREAD, p) == n);
  if (IS("skips")) return EXPECT(COUNT_OF(&s, SPREAD_FAIL, p) == n);
  if (IS("fails")) /* so often; the last is that of the spread */
    return EXPECT(COUNT_OF(&s, PULL_FAIL, p) == n) &&
           EXPECT(n == 0 || failed(p).request == play.number) &&
           EXPECT(n == 0 || failed(p).code == MLFAB_ERR_CANCELLED);
  return 0;
}

/* Places a range in one row, which a peer is to pass on; with two peers, its first pull and the others. */
static void play_spread(void) {
  mlfab__spread_member members[MLFAB__GROUP_MEMBERS_MAX];
  mlfab__plan_entry e[W];
  range r = peers(1), hub = peers(2), other = peers(play.n > 3 ? 3 : 2);
  uint32_t before = hub.first < W ? COUNT_OF(&s, SPREAD, hub.first) : 0, n = 0;
  for (uint32_t w = r.first; w <= r.last; w++)
    e[n++] = entry(w, r.id, 7, w == r.first ? hub.first : other.first);
  send_plan(e, n);
  if (hub.first < W && COUNT_OF(&s, SPREAD, hub.first) > before)
    play.number = spread(hub.first, members).request;
}

/* The last spread by worker 0 has so many members, which are the present processes; the last is this worker. */
static void has_members(uint64_t n, uint64_t last) {
  mlfab__spread_member members[MLFAB__GROUP_MEMBERS_MAX];
  EXPECT(spread(0, members).members == n);
  EXPECT(members[n - 1].worker == last);
  for (uint64_t i = 0; i < n; i++)
    EXPECT(members[i].incarnation == s.peers[members[i].worker].incarnation);
}

/* Commands about the server, with its n words behind the name. */
static int play_server(const char *name, range r, uint64_t n) {
  mlfab_stats stats = seam_stats(&s);
  if (IS("spread")) return play_spread(), 1;
  if (IS("refuse")) /* peer, spread, pull, its worker */
    return spread_fail(r.first, number(2), number(3), peers(4).first), 1;
  for (; IS("wait") && n > 0; n--) /* so many times a part of a beat */
    seam_pass(&s, BEAT / (play.n > 2 ? number(2) : 4));
  if (IS("jump")) seam_pass(&s, n * BEAT / 4); /* the same, at once */
  if (IS("members")) return has_members(n, number(2)), 1;
  if (IS("stats")) /* pulls answered; through distributors; not so after all */
    return EXPECT(stats.pulls_answered == n) && EXPECT(stats.spreads_answered == number(2)) &&
           EXPECT(stats.spreads_failed == number(3));
  if (IS("link")) /* of the server */
    assert_int_equal(mlfab_node_set_link(s.node, (double)n, (double)n, s.now), 0);
  if (IS("link")) seam_pump(&s);
  if (IS("poor")) s.poor = (int)n;
  if (IS("announced")) return EXPECT(COUNT_OF(&s, ANNOUNCE, W) == n); /* since the last "over" */
  if (IS("backlog")) return EXPECT(backlog() == n); /* as a scheduler is told that calls now */
  if (IS("over")) all_over();
  return IS("wait") || IS("jump") || IS("link") || IS("poor") || IS("over");
}

static void play_command(void) {
  const char *name = play.words[0];
  range r = play.n > 1 ? peers(1) : (range){0, 0, 0};
  if (play_server(name, r, play.n > 1 ? number(1) : 0)) return;
  for (uint32_t p = r.first; p <= r.last; p++)
    EXPECT(play_pull(name, p, r.id) || play_peer(name, p));
}

static void play_script(const char *script) {
  for (size_t n; *script; script += n + (script[n] == ';')) {
    char text[128];
    n = strcspn(script, ";");
    assert_true(n < sizeof text);
    memcpy(text, script, n);
    text[n] = 0;
    play.command = script;
    play.n = 0;
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " "))
      snprintf(play.words[play.n++], sizeof play.words[0], "%s", word);
    play_command();
  }
}

static const struct scene {
  const char *name, *script;
} scenes[] = {
    /* Small pulls are not announced, nor are pulls without a scheduler. */
    {"small and unscheduled",
     "part 1 8192; take 1 2; lost 6; ask 1/6; take 1/6; ask 1/7; announced 0; backlog 131072; "
     "announced 0; take 1/7; stats 3 0 0; over"},

    /* A plan's entry for a pull that is gone is skipped. Small pulls are answered at once. */
    {"gone before its plan",
     "ask 2/9; cancel 2/9; reported 2/9 cancelled; place 2/9; ask 2/10; pushes 2/10; idle 2; "
     "part 2/11 8192; take 2/11 2; place 2/10; part 2/12 8192; take 2/12 2; take 2/10; over"},

    /* Two pulls at a time, in the order of places. A pull whose reader takes nothing for half a beat stops
     * counting: that of worker 4. */
    {"turns",
     "ask 0-4; place 4; place 1; place 3; place 0; place 2; offered 4; offered 1; idle 3; idle 0; "
     "idle 2; take 1; offered 3; idle 0; idle 2; take 3 5; wait 1; idle 0; take 3 5; wait 1; "
     "offered 0; idle 2; offered 4; cancel 3; reported 3 cancelled; offered 2; lost 0; "
     "reported 0 closed; take 4; take 2; over"},

    /* With known capacities of the readers' links, more pulls move until together they can fill the server's
     * link. When three move, 150 are used, and worker 1 may take the rest. */
    {"slow readers",
     "link 200; capacity 0 50; capacity 1 0; capacity 2-4 50; ask 0-4; place 0; place 2-4; "
     "offered 0; idle 1; offered 2-4; take 0; place 1; ask 0/6; place 0/6; offered 1; idle 0; "
     "take 2; take 3; idle 0; take 4; take 0/6; take 1; over"},

    /* Announced pulls go when the scheduler is lost. Placed pulls are not announced to the next one. */
    {"scheduler lost",
     "ask 2/9; ask 3/8; announced 2; place 3/8; lost 6; take 2/9; hello 6; announced 2; take 3/8; "
     "over"},

    /* No spread starts for one member, another shape, an unknown distributor, a lost one, different
     * distributors, or without a free slot. */
    {"no spread",
     "ask 1-2; part 3 131068; spread 1 0; take 1; spread 2-3 0; take 2; take 3 32 all; ask 3-4/6; "
     "spread 3-4/6 -; take 3/6; take 4/6; lost 0; ask 3-4/7; spread 3-4/7 0; take 3/7; take 4/7; "
     "hello 0; ask 3-4/8; spread 3-4/8 0 1; take 3/8; take 4/8; spreads 0-5 0; vias 3 0; "
     "ask 3-4/10; spread 3-4/10 0; ask 3-4/11; spread 3-4/11 0; ask 3-4/12; spread 3-4/12 0; "
     "ask 3-4/13; spread 3-4/13 0; ask 3-4/14; spread 3-4/14 0; spreads 0 4; lost 3-4; over"},

    /* Without memory for a slot the members are served directly. */
    {"no memory", "ask 1-2; poor 1; spread 1-2 0; poor 0; take 1; take 2; spreads 0 0; over"},

    /* A pull of another shape in a row is answered directly, the others are spread; the distributor may be a
     * member. */
    {"a row with an odd one",
     "ask 0-1; part 2 98304; ask 3; spread 0-3 0; members 3 3; take 2 24 all; via 2 -; take 0/S; "
     "done 0-3; stats 4 3 0; over"},

    /* One member has to be served directly; the others are not affected. The server ignores a failure
     * that another node tells, one of an unknown pull or spread, and a repetition. */
    {"a member fails",
     "ask 1-3; spread 1-3 0; mark 2; take 0/S 10; refuse 4 S 5 2; refuse 0 S 6 2; refuse 0 T 5 2; "
     "vias 2 1; refuse 0 S 5 2; refuse 0 S 5 2; vias 2 2; newer 2; stats 0 0 1; direct 2; "
     "reported 2 0; take 0/S 22 all; done 1; done 3; stats 3 2 1; over"},

    /* The distributor refuses: all members are served directly, in their old order, before pulls that were
     * placed later. */
    {"a spread is refused",
     "ask 1-5; spread 1-3 0; place 4-5; idle 5; refuse 0 S 0 -; idle 0; stats 0 0 3; offered 1; "
     "idle 2; take 1; idle 5; take 2; take 3; take 5; take 4; over"},

    {"the distributor is lost",
     "ask 1-3; spread 1-3 0; ask 0/6; take 0/S 10; done 3; lost 0; reported 0/6 closed; direct 1; "
     "direct 2; stats 3 1 2; over"},

    /* The distributor reconnects after it has received all frames, before its loss is noticed. Worker 2's
     * message crosses with PULL_VIA: the worker has everything. */
    {"the distributor is lost late",
     "ask 1-3; spread 1-3 0; take 0/S; done 1; hello 0; vias 1 1; done 2; idle 2; take 3; "
     "stats 3 1 2; over"},

    /* Leaving members do not stop the others. When the last one leaves, the spread ends, and the distributor is
     * told: the member has gone, cancels, or is done before all frames are out. */
    {"members leave",
     "ask 1-3; spread 1-3 0; take 0/S 10; lost 1; reported 1 closed; cancel 2; "
     "reported 2 cancelled; take 0/S 10; fails 0 0; bye 3; fails 0 1; idle 0; over; ask 1-3/6; "
     "spread 1-3/6 0; take 0/S 10; cancel 1-3/6; fails 0 1; idle 0; over; ask 1-3/7; "
     "spread 1-3/7 0; done 1-3/7; fails 0 1; idle 0; over"},

    /* A distributor that reads nothing has failed after ten beats, though it sends heartbeats, and is told so. */
    {"the distributor is stuck",
     "ask 1-3; spread 1-3 0; take 0/S 10; wait 39; idle 1; wait 1; fails 0 1; idle 0; take 1; "
     "take 2; take 3; over"},

    /* A distributor that reads other frames meanwhile is not stuck. */
    {"the distributor is busy",
     "ask 1-3; spread 1-3 0; wait 5; part 0 4096; take 0 1; wait 5; part 0 4096; take 0 1; wait 5; "
     "part 0 4096; take 0 1; vias 1-3 1; take 0/S; done 1-3; stats 6 3 0; over"},

    /* A distributor that has all frames and reports nothing: the server waits four beats plus the expected time
     * of handing on, counted from the last report. */
    {"the distributor is silent",
     "ask 1-3; spread 1-3 0; take 0/S; wait 15; done 1; wait 15; vias 2 1; wait 1; direct 2; "
     "direct 3; fails 0 1; over"},

    /* The server needed two beats, so the distributor gets that time too: the server waits longer for the
     * second member than for the first. The out-link is not idle, because worker 4 is slow. */
    {"the distributor is slow",
     "ask 1-3; spread 1-3 0; wait 1 1; take 0/S 10; wait 1 1; take 0/S 22 all; ask 4; place 4; "
     "wait 47; vias 1 1; wait 1; vias 1 2; vias 2 1; wait 16; vias 2 2; vias 3 1; done 3; lost 1; "
     "take 2; take 4; over"},

    /* The distributor has become slow while the out-link is idle: the server takes overdue members back one at
     * a time, the last one first, and tells the distributor to skip them. The server took one beat, so the
     * members are due after 2, 3 and 4 beats, and a quarter. */
    {"an idle link takes back",
     "ask 1-3; spread 1-3 0; wait 1 1; take 0/S; wait 8; vias 1 1; jump 9; vias 3 2; vias 2 1; "
     "skips 0 1; wait 1 8; vias 2 1; take 3; wait 1 8; vias 2 2; take 2; done 1; over"},

    /* The time that a spread waits for its turn does not count as its duration. */
    {"a late turn",
     "ask 1-5; place 4-5; spread 1-3 0; take 4-5 4; wait 1; take 4-5 4; wait 1; take 4-5 4; "
     "wait 1; take 4-5 4; wait 1; idle 0; take 4 16 all; take 0/S; wait 16; vias 3 2; done 1-3; "
     "take 5 16 all; over"},

    /* A worker that lost its link pulls again under the same number: its former distributor's frames have an
     * older attempt than any PULL_VIA from now on, also without a scheduler. Worker 3 is done with the frames
     * that were on their way. */
    {"reconnect",
     "ask 1-3; spread 1-3 0; mark 2; take 0/S; hello 2; ask 2; place 2; newer 2; direct 2; "
     "process 3; ask 3-4; mark 3; spread 3-4 0; newer 3; members 2 4; done 3; lost 6; hello 1; "
     "ask 1; via 1 -; lost 0; direct 1; direct 4; over"},
};

static void test_scene(void **state) {
  open_model(MLFAB_SYNC_ASYNC);
  play_script(*state);
}

BEFORE_MAIN scenes_join(void) {
  for (size_t i = 0; i < MLFAB__COUNT(scenes); i++)
    scene_add((struct CMUnitTest){scenes[i].name, test_scene, setup, teardown,
                                  (void *)(uintptr_t)scenes[i].script});
}

/* --- everything at once --- */

enum { OPEN = 3, KEPT = 400 };

typedef struct client_pull {
  uint64_t request; /* 0: free */
  uint64_t offset, bytes;
  uint32_t attempt, hop;
  uint32_t words[BYTES / 4]; /* the version of each */
} client_pull;

typedef struct kept_frame {
  uint64_t offset;
  uint32_t bytes, version, flags;
} kept_frame;

typedef struct handing { /* a spread at its distributor */
  uint64_t request;      /* 0: free */
  mlfab__spread_member members[W + 2];
  uint32_t at[W + 2], n; /* frames that each member has; KEPT: it has ended */
  kept_frame frames[KEPT];
  uint32_t nframes;
} handing;

typedef struct letter { /* a frame that a client has not read yet */
  uint8_t type;
  mlfab__pull_via via;
  mlfab__pull_fail fail;
  mlfab__spread spread;
  mlfab__spread_member members[W + 2];
} letter;

typedef struct client {
  int mute, stuck; /* mute: passes nothing on; stuck: reads nothing */
  int broken[W];   /* links to members */
  client_pull pulls[OPEN];
  handing spreads[SPREADS];
  letter queue[256];
  uint32_t nqueue;
} client;

typedef struct known_pull { /* announced and not reported */
  uint64_t id;
  uint32_t worker;
  int waiting;
} known_pull;

typedef struct watched { /* a reader's link */
  uint64_t offered;      /* request; 0: nothing */
  uint64_t moved_ns;     /* when that is known to have begun or moved; 0: not known */
  int bare;              /* it would have been offered any pull that goes */
} watched;

enum { IDS = 1 << 16, VERSIONS = 1 << 14, PARTS = SLICE / EAGER };

static struct world {
  mlfab__rng prng;
  client clients[W];
  known_pull known[256];
  uint32_t nknown;
  uint64_t ids, earlier, finished, turns;
  /* Places of pulls ascend; 0: none. A spread has an odd one. The server has told `hops`. */
  uint64_t places[IDS], spreads[IDS], placed;
  uint32_t hops[IDS];
  watched links[W];
} w;

/* The literal model: the version at which a part of a slice was written, by slice and its version. */
static uint32_t written[SLICES][VERSIONS][PARTS];
static uint64_t versions[SLICES];

static uint64_t pick(uint64_t below) { return mlfab__rng_below(&w.prng, below); }
static int up(uint32_t i) { return s.peers[i].link != 0; }

static void world_announced(uint32_t worker, uint64_t id, int announced) {
  uint32_t i = 0;
  while (i < w.nknown && (w.known[i].id != id || w.known[i].worker != worker)) i++;
  if (announced) {
    assert_true(i == w.nknown && i < MLFAB__COUNT(w.known));
    w.known[w.nknown++] = (known_pull){id, worker, 1};
  } else if (i < w.nknown) {
    w.known[i] = w.known[--w.nknown];
  } else {
    assert_true(id <= w.earlier); /* placed by an earlier scheduler */
  }
}

static void world_reported(const mlfab__report *r) {
  if (r->kind == MLFAB__TRANSFER_PULL && r->worker != MLFAB__NO_NODE)
    world_announced(r->worker, r->id, 0);
}

static void world_scheduler_hears(const seam_heard *heard) {
#define ON(...) ON_FRAME(heard->type, heard->meta, heard->meta_bytes, __VA_ARGS__)
  ON(ANNOUNCE, announce, world_announced(m->worker, m->id, 1));
  ON(REPORT, report, world_reported(m));
}

/* The scheduler hears a frame at once, a client when it reads. */
static void world_hear(seam *of, const seam_heard *heard) {
  static mlfab__spread_member members[MLFAB__GROUP_MEMBERS_MAX];
  (void)of;
  if (heard->peer == W) {
    world_scheduler_hears(heard);
    return;
  }
  client *c = &w.clients[heard->peer];
  letter *l = &c->queue[c->nqueue];
  l->type = heard->type;
  uint32_t queued = c->nqueue + 1;
  ON(MODEL, model, (model = *m, bulk_bytes = heard->bulk_bytes));
  if (l->type == MLFAB__MODEL) bulk = (const uint32_t *)(const void *)heard->bulk;
  ON(PUSH_ACK, push_ack, acked = *m);
  ON(PULL_VIA, pull_via, (w.hops[m->request] = m->aggregator, l->via = *m, c->nqueue = queued));
  ON(PULL_FAIL, pull_fail, (l->fail = *m, c->nqueue = queued));
  if (l->type == MLFAB__SPREAD) {
    assert_int_equal(mlfab__decode_spread(heard->meta, heard->meta_bytes, &l->spread, members), 0);
    assert_true(l->spread.members <= W + 2);
    memcpy(l->members, members, l->spread.members * sizeof *members);
    w.spreads[l->spread.request % IDS] = w.places[members[0].request] - 1;
    c->nqueue = queued;
  }
  assert_true(queued < MLFAB__COUNT(c->queue));
}

/* The place of the pull that a link is offered; 0: it has none. */
static uint64_t place_of(uint64_t request) {
  return request & MLFAB__SPREAD_BIT ? w.spreads[request % IDS] : w.places[request];
}

static void world_begins(uint32_t i, uint64_t place) {
  uint32_t moving = 0;
  w.turns++;
  for (uint32_t k = 0; k < W; k++) {
    const watched *link = &w.links[k];
    moving +=
        k != i && link->moved_ns && place_of(link->offered) && s.now - link->moved_ns < BEAT / 2;
    for (uint32_t j = 0; j < OPEN && s.peers[k].offered.type == 0 && ntokens[k] < SENDS; j++) {
      uint64_t other = w.clients[k].pulls[j].request;
      assert_false(up(k) && other && w.places[other] && w.places[other] < place &&
                   w.hops[other] == MLFAB__NO_NODE);
    }
  }
  assert_true(moving <= 1);
}

/* Called after every event: turns are given in the order of places, to at most two pulls that move. */
static void watch(void) {
  uint32_t begun = 0;
  for (uint32_t i = 0; i < W; i++) {
    watched *link = &w.links[i];
    uint64_t request = step(i, 0) ? model.request : 0;
    int bare = link->bare && request != link->offered;
    link->bare = up(i) && request == 0 && ntokens[i] < SENDS;
    if (request == link->offered) continue;
    link->offered = request;
    link->moved_ns = bare ? s.now : 0;
    begun |= (uint32_t)(bare && place_of(request)) << i;
  }
  for (uint32_t i = 0; i < W; i++)
    if (begun >> i & 1) world_begins(i, place_of(w.links[i].offered));
}

static client_pull *client_find(client *c, uint64_t request) {
  for (uint32_t i = 0; i < OPEN; i++)
    if (request != 0 && c->pulls[i].request == request) return &c->pulls[i];
  return NULL;
}

static void client_write(client_pull *p, uint64_t offset, uint32_t bytes, uint32_t version) {
  assert_true(offset >= p->offset && offset + bytes <= p->offset + p->bytes);
  for (uint32_t i = 0; i < bytes / 4; i++) p->words[offset / 4 + i] = version;
}

/* All bytes have arrived, and the bytes of a slice have one version. */
static void client_finish(client_pull *p) {
  for (uint64_t at = p->offset; at < p->offset + p->bytes; at += 4) {
    assert_true(p->words[at / 4] != UINT32_MAX);
    if (at > p->offset && at % SLICE != 0) assert_int_equal(p->words[at / 4], p->words[at / 4 - 1]);
  }
  p->request = 0;
  w.finished++;
}

static handing *client_spread(client *c, uint64_t request) {
  for (uint32_t i = 0; i < SPREADS; i++)
    if (c->spreads[i].request == request) return &c->spreads[i];
  return NULL;
}

static void client_read(client *c) {
  for (uint32_t i = 0; i < c->nqueue; i++) {
    const letter *l = &c->queue[i];
    if (l->type == MLFAB__PULL_VIA) {
      client_pull *p = client_find(c, l->via.request);
      if (!p || l->via.attempt <= p->attempt) continue;
      p->attempt = l->via.attempt;
      p->hop = l->via.aggregator;
    } else if (l->type == MLFAB__SPREAD) {
      handing *h = client_spread(c, 0);
      if (!h) continue; /* no slot: it says so when frames arrive */
      memset(h, 0, sizeof *h);
      h->request = l->spread.request;
      h->n = l->spread.members;
      memcpy(h->members, l->members, sizeof h->members);
    } else {
      handing *h = client_spread(c, l->fail.request);
      assert_true((l->fail.request & MLFAB__SPREAD_BIT) != 0);
      if (h) h->request = 0;
    }
  }
  c->nqueue = 0;
}

/* A worker's link takes one more MODEL frame. */
static int client_receive(uint32_t i) {
  client *c = &w.clients[i];
  if (!up(i) || c->stuck || ntokens[i] == SENDS) return 0;
  client_read(c);
  if (!step(i, 1)) return 0;
  mlfab__model m = model;
  uint32_t bytes = bulk_bytes, version = (uint32_t)m.version;
  if (m.request == w.links[i].offered) w.links[i].moved_ns = s.now;
  for (uint32_t k = 0; k < bytes / 4; k++)
    assert_int_equal(bulk[k], written[m.slice][version][m.offset % SLICE / EAGER]);
  client_read(c);
  if (m.request & MLFAB__SPREAD_BIT) {
    handing *h = client_spread(c, m.request);
    if (!h) {
      spread_fail(i, m.request, 0, MLFAB__NO_NODE);
    } else {
      assert_true(h->nframes < KEPT);
      h->frames[h->nframes++] = (kept_frame){m.offset, bytes, version, m.flags};
    }
    return 1;
  }
  client_pull *p = client_find(c, m.request);
  if (!p || p->hop != MLFAB__NO_NODE) return 1;
  client_write(p, m.offset, bytes, version);
  if (m.flags & MLFAB__MODEL_LAST) client_finish(p);
  return 1;
}

/* A distributor passes one frame to a member, or fails to. */
static int client_hand(uint32_t i, uint32_t slot, uint32_t k) {
  handing *h = &w.clients[i].spreads[slot];
  if (h->request == 0 || k >= h->n || w.clients[i].mute || h->at[k] == KEPT) return 0;
  const mlfab__spread_member *m = &h->members[k];
  client *to = &w.clients[m->worker];
  if (w.clients[i].broken[m->worker] || s.peers[m->worker].incarnation != m->incarnation) {
    h->at[k] = KEPT;
    if (up(i)) spread_fail(i, h->request, m->request, m->worker);
    return 1;
  }
  if (h->at[k] == h->nframes || to->stuck) return 0;
  const kept_frame *frame = &h->frames[h->at[k]++];
  if (frame->flags & MLFAB__MODEL_LAST) h->at[k] = KEPT;
  client_pull *p = client_find(to, m->request);
  if (!p || m->attempt < p->attempt) return 1;
  p->attempt = m->attempt;
  p->hop = i;
  client_write(p, frame->offset, frame->bytes, frame->version);
  if (frame->flags & MLFAB__MODEL_LAST) {
    client_finish(p);
    if (up(m->worker)) done(m->worker, m->request);
  }
  return 1;
}

/* Removes spreads in which all members have ended. */
static void client_tidy(client *c) {
  for (uint32_t i = 0; i < SPREADS; i++) {
    handing *h = &c->spreads[i];
    uint32_t over = 0;
    for (uint32_t k = 0; k < h->n; k++) over += h->at[k] == KEPT;
    if (over == h->n) h->request = 0;
  }
}

static void client_pulls(uint32_t i, const client_pull *p) {
  assert_true(p->request < IDS);
  w.places[p->request] = 0;
  w.hops[p->request] = MLFAB__NO_NODE;
  ask(i, p->request, p->offset, p->bytes, 0);
}

static void client_ask(uint32_t i) {
  static const uint64_t stretches[][2] = {
      {0, BYTES}, {0, BYTES}, {0, BYTES}, {SLICE / 2, 2 * SLICE}, {8192, EAGER}};
  client_pull *p = NULL;
  for (uint32_t k = 0; k < OPEN && !p; k++)
    if (w.clients[i].pulls[k].request == 0) p = &w.clients[i].pulls[k];
  if (!p || !up(i)) return;
  uint64_t which = pick(MLFAB__COUNT(stretches));
  p->request = ++w.ids;
  p->offset = stretches[which][0];
  p->bytes = stretches[which][1];
  p->attempt = 0;
  p->hop = MLFAB__NO_NODE;
  memset(p->words, 0xff, sizeof p->words);
  client_pulls(i, p);
}

static void client_cut(uint32_t i) {
  w.clients[i].nqueue = 0;
  for (uint32_t k = 0; k < SPREADS; k++) w.clients[i].spreads[k].request = 0;
}

static void client_down(uint32_t i) {
  if (!up(i)) return;
  client_cut(i);
  lost(i);
}

/* A new link; if there was none, perhaps a new process. Pulls in progress are sent again. */
static void client_up(uint32_t i) {
  client *c = &w.clients[i];
  int fresh = !up(i) && pick(3) == 0, forget = (int)pick(2);
  client_cut(i);
  if (fresh) {
    ntokens[i] = 0;
    seam_process(&s, i);
  } else {
    hello(i);
  }
  for (uint32_t k = 0; k < OPEN; k++) {
    client_pull *p = &c->pulls[k];
    if (fresh) p->request = 0;
    if (p->request == 0) continue;
    if (forget) {
      p->attempt = 0;
      p->hop = MLFAB__NO_NODE;
    }
    client_pulls(i, p);
  }
}

/* Places the pulls that wait, in the order of the entries. */
static void world_place(const mlfab__plan_entry *e, uint32_t n) {
  for (uint32_t k = 0; k < n; k++) {
    for (uint32_t i = 0; i < w.nknown; i++) {
      known_pull *known = &w.known[i];
      if (known->worker != e[k].worker || known->id != e[k].id || !known->waiting) continue;
      known->waiting = 0;
      w.places[known->id] = w.placed += 2;
    }
  }
}

static void world_plan(void) {
  mlfab__plan_entry e[64];
  uint32_t n = 0, group = 0, aggregator = MLFAB__NO_NODE;
  for (uint32_t i = 0; i < w.nknown && n < 60; i++) {
    if (!w.known[i].waiting || pick(4) == 0) continue;
    if (pick(4) == 0) {
      group = (uint32_t)pick(8);
      aggregator = pick(8) ? (uint32_t)pick(W) : MLFAB__NO_NODE;
    }
    e[n++] = entry(w.known[i].worker, w.known[i].id, group, aggregator);
    if (pick(16) == 0) e[n++] = entry((uint32_t)pick(W), 1 + pick(w.ids), group, 0);
  }
  world_place(e, n);
  if (n > 0 && up(W)) send_plan(e, n);
}

static void world_scheduler_down(void) {
  w.earlier = w.ids;
  w.nknown = 0;
  seam_lost(&s, W);
}

/* A commit of a part of a slice. */
static void world_commit(void) {
  uint32_t slice = (uint32_t)pick(SLICES), part = (uint32_t)pick(PARTS), from = (uint32_t)pick(W);
  if (!up(from)) return;
  uint64_t version = ++versions[slice];
  assert_true(version < VERSIONS);
  memcpy(written[slice][version], written[slice][version - 1], sizeof written[slice][version]);
  written[slice][version][part] = (uint32_t)version;
  assert_int_equal(push(from, slice * SLICE + part * EAGER, EAGER, s.peers[from].ack.top), 0);
}

static void world_fault(void) {
  uint32_t i = (uint32_t)pick(W);
  client *c = &w.clients[i];
  uint64_t what = pick(8);
  if (what == 0) client_down(i);
  if (what == 1) client_up(i);
  if (what == 2) c->mute = pick(3) == 0;
  if (what == 3) c->stuck = pick(3) == 0;
  if (what == 4) c->broken[pick(W)] ^= 1;
  for (uint32_t k = 0; k < OPEN && what == 5; k++) {
    if (c->pulls[k].request == 0 || !up(i) || pick(2)) continue;
    cancel(i, c->pulls[k].request);
    c->pulls[k].request = 0;
  }
  if (what == 6 && up(W) && pick(2)) world_scheduler_down();
  if (what == 7 && !up(W)) seam_hello(&s, W);
}

static void world_step(void) {
  uint32_t i = (uint32_t)pick(W);
  uint64_t what = pick(11);
  if (what == 0) client_ask(i);
  if (what == 1 && pick(8) == 0) world_plan();
  if (what == 2 && pick(4) == 0) world_commit();
  if (what == 3 && pick(8) == 0) world_fault();
  if (what == 4) seam_pass(&s, pick(BEAT / 8));
  if (what == 5) client_read(&w.clients[i]);
  if (what == 5) client_tidy(&w.clients[i]);
  if (what == 6 && up(i)) give_back(i);
  for (uint64_t n = what == 7 || what == 8 ? pick(16) : 0; n > 0 && client_receive(i); n--) {
    watch();
    if (ntokens[i] == SENDS) give_back(i);
  }
  for (uint32_t at = 0; at < SPREADS * W && what > 8; at++)
    for (uint64_t n = pick(16); n > 0 && client_hand(i, at / W, at % W); n--) watch();
  watch();
}

/* Faults end, but stuck and mute distributors stay so, and the scheduler may be gone. Then every worker
 * that reads gets its answer. */
static void world_settle(void) {
  uint32_t open = 1;
  for (uint32_t i = 0; i < W; i++) {
    memset(w.clients[i].broken, 0, sizeof w.clients[i].broken);
    if (!up(i)) client_up(i);
  }
  for (uint32_t round = 0; open > 0; round++) {
    assert_true(round < 4000);
    if (up(W)) world_plan();
    open = 0;
    for (uint32_t i = 0; i < W; i++) {
      client *c = &w.clients[i];
      give_back(i);
      while (client_receive(i)) give_back(i);
      for (uint32_t slot = 0; slot < SPREADS; slot++) {
        for (uint32_t k = 0; k < W; k++) {
          while (client_hand(i, slot, k)) continue;
        }
      }
      client_tidy(c);
      for (uint32_t k = 0; k < OPEN; k++) open += c->pulls[k].request != 0 && !c->stuck;
    }
    seam_pass(&s, BEAT / 8);
  }
}

/* One seed, after which nothing is open. */
static void world_run(uint64_t seed) {
  memset(&w, 0, sizeof w);
  mlfab__rng_seed(&w.prng, seed);
  s.hear = world_hear;
  if (!up(W)) seam_hello(&s, W);
  for (int n = 0; n < 4000; n++) world_step();
  world_settle();
  for (uint32_t i = 0; i < W; i++) client_down(i);
  assert_int_equal(w.nknown, 0);
  s.hear = NULL;
  all_over();
}

SERVED(test_random) {
  enum { RUNS = 40 }; /* of one server */
  uint64_t runs = test_cases(RUNS), finished = 0, turns = 0, memory = 0, answered = 0, failed_ = 0;
  for (uint64_t seed = 1; seed <= runs; seed++) {
    if (seed % RUNS == 1) {
      s.config.on_update = on_update;
      open_model(MLFAB_SYNC_ASYNC);
      memset(written, 0, sizeof written);
      memset(versions, 0, sizeof versions);
    }
    world_run(seed);
    finished += w.finished;
    turns += w.turns;
    if (seed % RUNS == 5) memory = s.memory;
    if (seed % RUNS && seed < runs) continue;
    if (memory) assert_true(s.memory < memory + 10 * BLOCK); /* no block is lost */
    answered += seam_stats(&s).spreads_answered;
    failed_ += seam_stats(&s).spreads_failed;
    if (seed < runs) assert_int_equal(teardown(NULL) + setup(NULL), 0);
  }
  assert_true(finished > 20 * runs && turns > 20 * runs);
  assert_true(answered > runs && failed_ > runs);
}
