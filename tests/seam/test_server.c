/* test_server.c - a server's answers to workers whose links break at bad moments, and the progress that it counts. */
#include "serving.h"

/* A model of more bytes than are applied in one step, so that events can occur between steps. */
enum { COUNT = 3 << 20, BYTES = COUNT * 4, CHUNK = 1 << 20, EAGER = 65536 };
#define BEAT 500000000ull
#define PROGRESS_MAX ((uint64_t)1 << 62)

static seam s;
static uint8_t zeros[CHUNK];
static uint64_t bytes_of_model;

static int setup(uint32_t workers) {
  seam_init(&s, workers);
  bytes_of_model = BYTES;
  s.config.block_bytes = s.config.chunk_bytes = CHUNK;
  s.config.eager_bytes = EAGER;
  return 0;
}
static int open_one(void **state) {
  (void)state;
  return setup(1);
}
static int open_three(void **state) {
  (void)state;
  return setup(3);
}
static int teardown(void **state) {
  (void)state;
  seam_close(&s);
  return 0;
}

#define ONE(name) SCENE_WITH(name, open_one, teardown)
#define THREE(name) SCENE_WITH(name, open_three, teardown)

/* All workers define the model, so that it stands, and have credit. */
static void start(const mlfab__define *d) {
  seam_open(&s);
  for (uint32_t w = 0; w < s.config.workers; w++)
    seam_define(&s, w, d, 0, MLFAB_F32, bytes_of_model / 4);
  for (uint32_t w = 0; w < s.config.workers; w++) {
    assert_int_equal(seam_defined(&s, w), 0);
    seam_hello(&s, w);
  }
  seam_forget(&s);
}

/* --- what workers send --- */

static mlfab__push update(uint64_t seq, uint64_t progress, uint32_t eager, uint64_t bytes) {
  return OF(mlfab__push, .seq = seq, .members = 1, .eager = eager, .progress = progress,
            .bytes = bytes, .scale = 1.0, .parts = 1, .segments = bytes > 0, .versions = 1);
}

/* Announces an update; `bulk`: its first bytes. */
static void say_push(uint32_t w, mlfab__push p, const void *bulk, uint32_t bulk_bytes) {
  mlfab__segment segment = {0, p.bytes};
  uint64_t version = 0;
  p.generation = s.peers[w].ack.generation;
  seam_bulk(&s, w, MLFAB__PUSH, mlfab__encode_push(s.meta, &p, &segment, &version), bulk,
            bulk_bytes);
}

static void say_chunk(uint32_t w, uint64_t seq, uint64_t at, uint32_t bytes) {
  SAY_BULK(&s, w, CHUNK, chunk, zeros, bytes, seq, at, s.peers[w].ack.generation);
}

/* Sends all bytes of an update; the server then applies it in several steps. */
static void push_whole(uint64_t seq) {
  say_push(0, update(seq, 0, 0, bytes_of_model), NULL, 0);
  for (uint64_t at = 0; at < bytes_of_model; at += CHUNK) say_chunk(0, seq, at, CHUNK);
}

static void say_progress(uint32_t w, uint64_t progress) {
  SAY(&s, w, PROGRESS, progress, progress, 0, 0);
}

/* need: with DROP; else the staleness. */
static void change(uint32_t w, uint64_t number, uint32_t kind, uint32_t need) {
  mlfab__sync_ack ack;
  SAY(&s, w, SYNC, sync_ask, number,
      {.kind = kind,
       .need = kind == MLFAB_SYNC_DROP ? need : 0,
       .staleness = kind == MLFAB_SYNC_SSP ? need : 0});
  LAST(&s, ack, SYNC_ACK, sync_ack, w);
  assert_int_equal(ack.code, 0);
}

static mlfab__push_ack acknowledged(uint32_t w) {
  mlfab__push_ack ack;
  LAST(&s, ack, PUSH_ACK, push_ack, w);
  return ack;
}

/* How a server that waits sees the workers: it tells that to a pull of the far future. */
typedef struct told {
  unsigned long long pushed, fastest, slowest, v_train;
  unsigned arrived, members;
  int waits; /* 0: the pull does not wait */
} told;

static told ask_state(uint32_t w) {
  mlfab__waiting waiting;
  told t = {.waits = 0};
  seam_forget(&s);
  seam_ask(&s, w, 1, 0, 4, PROGRESS_MAX);
  if (COUNT_OF(&s, WAITING, w) > 0) {
    LAST(&s, waiting, WAITING, waiting, w);
    const char *text = strstr(waiting.text, "has pushed");
    assert_non_null(text);
    assert_int_equal(sscanf(text,
                            "has pushed %llu updates, the fastest %llu, the slowest %llu; "
                            "V_train is %llu, %u of %u have",
                            &t.pushed, &t.fastest, &t.slowest, &t.v_train, &t.arrived, &t.members),
                     6);
    t.waits = 1;
  }
  SAY(&s, w, PULL_CANCEL, pull_cancel, 1);
  return t;
}

/* --- links that break --- */

/* The link breaks while an update is applied. The answer to the next HELLO says that it is applied; otherwise
 * a worker that has withdrawn the update would push it again. If a new process has taken the rank, its numbers
 * start again, and its updates are applied. */
ONE(test_reconnect_while_applying) {
  for (int process = 0; process < 2; process++) {
    mlfab__define d = seam_model(MLFAB_SYNC_ASYNC, 0);
    d.options.optimizer = MLFAB_OPTIMIZER_MOMENTUM;
    if (process) assert_int_equal(teardown(NULL) + setup(1), 0);
    start(&d);
    push_whole(7);
    assert_int_equal(COUNT_OF(&s, PUSH_ACK, 0), 0);
    assert_int_equal(seam_stats(&s).updates_applied, 0);
    seam_lost(&s, 0);
    if (!process) {
      seam_hello(&s, 0);
      assert_int_equal(s.peers[0].ack.top, 7);
      assert_int_equal(s.peers[0].ack.applied[0] & 1, 1);
      assert_int_equal(seam_stats(&s).updates_applied, 1);
      continue;
    }
    seam_process(&s, 0);
    assert_int_equal(s.peers[0].ack.top, 0);
    seam_settle(&s);
    seam_hello(&s, 0);
    assert_int_equal(s.peers[0].ack.top, 0);
    push_whole(1);
    seam_settle(&s);
    assert_true(acknowledged(0).seq == 1 && acknowledged(0).code == 0);
    assert_int_equal(seam_stats(&s).updates_applied, 2);
  }
}

/* A worker rejoins while a round that closed without it is applied: its pushes go into the next round, and
 * it is told so, so its pulls wait for that round. */
THREE(test_rejoin_while_round_is_applied) {
  mlfab__define d = seam_model(MLFAB_SYNC_BSP, 0);
  d.options.optimizer = MLFAB_OPTIMIZER_MOMENTUM;
  bytes_of_model = 4 * BYTES; /* the server also works at what follows */
  start(&d);
  push_whole(1);
  say_progress(1, 1);
  seam_settle(&s);
  assert_int_equal(s.peers[2].ack.v_train, 0);
  seam_bye(&s, 2); /* now the round is complete */
  seam_hello(&s, 2);
  assert_int_equal(seam_stats(&s).rounds, 0);
  assert_int_equal(s.peers[2].ack.v_train, 1);
  seam_settle(&s);
  assert_int_equal(seam_stats(&s).rounds, 1);
  seam_hello(&s, 2);
  assert_int_equal(s.peers[2].ack.v_train, 1);
}

/* --- definitions --- */

/* Worker 0 gives up before its first weights have arrived, and starts again with another model: the last one
 * counts, with or without first weights. */
ONE(test_other_model_again) {
  for (uint32_t weights = 0; weights < 2; weights++) {
    mlfab__define d = seam_model(MLFAB_SYNC_ASYNC, 0);
    uint64_t bytes = weights ? 4000 : 8000;
    if (weights) assert_int_equal(teardown(NULL) + setup(1), 0);
    seam_open(&s);
    d.first_weights = 1;
    seam_define(&s, 0, &d, 0, MLFAB_F32, COUNT);
    seam_define(&s, 0, &d, 5, MLFAB_F32, 1000);
    d.first_weights = 0;
    if (!weights) seam_define(&s, 0, &d, 5, MLFAB_F32, 2000);
    if (weights) {
      mlfab__push first = update(1, 0, 0, bytes);
      assert_int_equal(COUNT_OF(&s, DEFINE_ACK, 0), 0);
      first.flags = MLFAB__PUSH_INIT;
      say_push(0, first, NULL, 0);
      say_chunk(0, 1, 0, 4000);
      seam_settle(&s);
    }
    assert_int_equal(seam_defined(&s, 0), 0);
    for (uint32_t more = 0; more <= 4; more += 4) {
      s.peers[0].room = SEAM_ALL;
      seam_ask(&s, 0, 1 + more, 0, bytes + more, 0);
      assert_int_equal(COUNT_OF(&s, MODEL, 0), 1);
      assert_int_equal(s.drops, more > 0);
    }
  }
}

/* Workers that wait for worker 0's definition are told once that it was refused, and why, also those that
 * come later. Bytes of first weights already on their way are no violation. */
THREE(test_refusal_reaches_all) {
  mlfab__define d = seam_model(MLFAB_SYNC_USER, 0); /* there are no conditions */
  mlfab__define_ack ack;
  mlfab__waiting waiting;
  seam_open(&s);
  d.first_weights = 1;
  seam_define(&s, 1, &d, 0, MLFAB_F32, COUNT);
  LAST(&s, waiting, WAITING, waiting, 1);
  assert_int_equal(waiting.kind, MLFAB__REQUEST_MODEL);
  assert_string_equal(waiting.text, ", which has not defined the model at server 0");
  seam_define(&s, 0, &d, 0, MLFAB_F32, COUNT);
  for (uint32_t w = 0; w < 2; w++) {
    LAST(&s, ack, DEFINE_ACK, define_ack, w);
    assert_int_equal(ack.code, MLFAB_ERR_UNSUPPORTED);
    assert_non_null(strstr(ack.text, w ? "worker 0's model: not supported: MLFAB_SYNC_USER"
                                       : "not supported: MLFAB_SYNC_USER at server 0"));
  }
  seam_define(&s, 2, &d, 0, MLFAB_F32, COUNT);
  assert_int_equal(seam_defined(&s, 2), MLFAB_ERR_UNSUPPORTED);
  assert_int_equal(COUNT_OF(&s, WAITING, 2), 0);
  seam_define(&s, 2, &d, 0, MLFAB_F32, COUNT);
  assert_int_equal(COUNT_OF(&s, WAITING, 2), 1);
  mlfab__push first = update(1, 0, 0, BYTES);
  first.flags = MLFAB__PUSH_INIT;
  say_push(0, first, NULL, 0);
  d.options.consistency.kind = MLFAB_SYNC_BSP;
  d.first_weights = 0;
  assert_int_equal(s.drops, 0);
  seam_define(&s, 0, &d, 0, MLFAB_F32, COUNT);
  assert_int_equal(seam_defined(&s, 0), 0);
  assert_int_equal(seam_defined(&s, 2), 0);
}

/* A ghost model has no memory for bytes, and a real one cannot apply ghosts: in both cases the server
 * closes the sender's link. */
ONE(test_ghosts_and_bytes) {
  for (uint32_t ghost = 0; ghost < 2; ghost++) {
    mlfab__define d = seam_model(MLFAB_SYNC_ASYNC, 0);
    d.options.ghost = ghost;
    if (ghost) assert_int_equal(teardown(NULL) + setup(1), 0);
    start(&d);
    say_push(0, update(1, 0, 4096, 8192), ghost ? zeros : NULL, 4096);
    assert_int_equal(s.drops, 1);
    if (!ghost) continue;
    seam_hello(&s, 0);
    say_push(0, update(2, 0, 4096, 8192), NULL, 4096);
    assert_int_equal(s.drops, 1);
    say_chunk(0, 2, 4096, 4096);
    assert_int_equal(s.drops, 2);
  }
}

/* --- grants --- */

static uint64_t granted(uint32_t w) {
  mlfab__grant grant;
  if (COUNT_OF(&s, GRANT, w) == 0) return 0;
  LAST(&s, grant, GRANT, grant, w);
  return grant.upto;
}

/* The next update is granted when no more than two chunks of earlier grants are outstanding: of the update
 * that is applied, and of eager bytes of those behind it. */
THREE(test_released_when_little_comes) {
  enum { SMALL = 4096, MOST = 1 << 20 };
  mlfab__define d = seam_model(MLFAB_SYNC_ASYNC, 0);
  s.config.chunk_bytes = SMALL;
  start(&d);
  say_push(0, update(1, 0, 64, MOST), zeros, 64);
  assert_true(granted(0) == MOST); /* it is the head */
  say_push(1, update(1, 0, EAGER, MOST), zeros, EAGER - 2 * SMALL);
  uint64_t at = 64;
  for (; at + 3 * SMALL < MOST; at += SMALL) say_chunk(0, 1, at, SMALL);
  assert_int_equal(granted(1), 0);
  say_chunk(0, 1, at, (uint32_t)(MOST - 2 * SMALL - at));
  assert_int_equal(granted(1), 0); /* two chunks of each are outstanding */
  say_chunk(1, 1, EAGER - 2 * SMALL, SMALL);
  assert_int_equal(granted(1), 0);
  say_chunk(1, 1, EAGER - SMALL, SMALL - 64);
  assert_int_equal(granted(1), 0);
  say_chunk(1, 1, EAGER - 64, 64);
  assert_int_equal(granted(1), MOST);
  assert_int_equal(s.drops, 0);
}

/* --- progress --- */

/* A worker's progress increases: the server closes the link of one whose progress decreases. It may
 * increase by more than one, when this server had no part of some updates, or another server has moved the
 * worker on. */
ONE(test_progress_back) {
  mlfab__define d = seam_model(MLFAB_SYNC_BSP, 0);
  start(&d);
  for (uint64_t second = 4; second <= 99; second += 95) {
    say_push(0, update(1, 5, 64, 128), zeros, 64);
    assert_int_equal(s.drops, second == 99);
    say_push(0, update(2, second, 64, 64), zeros, 64);
    assert_int_equal(s.drops, 1);
    if (second == 4) seam_hello(&s, 0);
  }
  assert_int_equal(ask_state(0).fastest, 5); /* the first one is undecided */
  say_progress(0, 99);
  assert_int_equal(ask_state(0).fastest, 99);
  say_chunk(0, 1, 64, 64); /* undecided updates keep numbers of their own */
  assert_int_equal(COUNT_OF(&s, PUSH_ACK, 0), 2);
  for (uint32_t i = 0, n = 0; i < s.nlog; i++) {
    mlfab__push_ack ack;
    if (s.log[i].type != MLFAB__PUSH_ACK) continue;
    assert_int_equal(mlfab__decode_push_ack(s.log[i].meta, s.log[i].meta_bytes, &ack), 0);
    assert_true(ack.code == 0 && ack.v_train == 100 + n++);
  }
  say_push(0, update(3, PROGRESS_MAX + 1, 64, 64), zeros, 64);
  assert_int_equal(s.drops, 2);
}

/* PROGRESS about updates without a part for this server advances V_train, by any amount at once; a smaller
 * value undoes nothing. The same when all leave, the one that is ahead first. */
THREE(test_progress_told) {
  mlfab__define d = seam_model(MLFAB_SYNC_BSP, 0);
  uint64_t much = (uint64_t)1 << 40;
  start(&d);
  for (uint32_t w = 0; w < 3; w++) {
    say_progress(w, much + w * 1000000);
    say_progress(w, 7);
    told t = ask_state(w);
    assert_true(t.fastest == much + w * 1000000);
    assert_true(t.v_train == (w < 2 ? 0 : much));
  }
  say_progress(0, PROGRESS_MAX + 1);
  assert_int_equal(s.drops, 1);
  seam_hello(&s, 0);
  for (uint32_t w = 3; w-- > 0;) seam_bye(&s, w);
  seam_process(&s, 1);
  assert_true(s.peers[1].ack.v_train == much + 2000000);
  assert_true(seam_stats(&s).rounds < 10);
}

/* One of three pushes closes a round, and one worker is far ahead: V_train jumps instead of counting up. */
THREE(test_one_far_ahead) {
  mlfab__define d = seam_model(MLFAB_SYNC_ASYNC, 0);
  start(&d);
  say_push(0, update(1, 2000000, 0, 0), NULL, 0);
  assert_int_equal(acknowledged(0).code, 0);
  change(0, 1, MLFAB_SYNC_DROP, 1);
  assert_int_equal(ask_state(1).v_train, 2000001);
  assert_true(seam_stats(&s).rounds < 10);
}

/* PSSP with alpha 0 pauses with the chance |g| / |w|, where w has g already: zeros pause nobody, not even in a model of
 * zeros. A push that is all of the model, or takes all of it back, always pauses; a tiny one almost never. */
ONE(test_significance) {
  static const struct {
    float value;
    int waits;
  } pushes[] = {{0, 0},     {0x1p-6f, 1}, {0x1p-20f, 0}, {-0x1p-6f - 0x1p-20f, 1},
                {1e30f, 1}, {1, 0},       {0, 0}};
  mlfab__define d = seam_model(MLFAB_SYNC_PSSP_DYNAMIC, 0);
  float values[16];
  start(&d);
  for (uint32_t i = 0; i < sizeof pushes / sizeof *pushes; i++) {
    for (uint32_t k = 0; k < 16; k++) values[k] = pushes[i].value;
    say_push(0, update(i + 1, i, 64, 64), values, 64);
    assert_int_equal(acknowledged(0).code, 0);
    assert_int_equal(ask_state(0).waits, pushes[i].waits);
  }
}

/* Two of three pushes close a round. The former process's decided updates count for the open round, but not
 * for later rounds that it had pushed into (with another model). The new process is past those rounds
 * because it was dropped from them at another server. */
THREE(test_new_process_in_round) {
  mlfab__define d = seam_model(MLFAB_SYNC_ASYNC, 0);
  start(&d);
  for (uint64_t seq = 1; seq <= 4; seq++) say_push(2, update(seq, seq - 1, 0, 0), NULL, 0);
  assert_int_equal(COUNT_OF(&s, PUSH_ACK, 2), 4);
  change(0, 1, MLFAB_SYNC_DROP, 2);
  assert_int_equal(ask_state(1).v_train, 0);
  seam_process(&s, 2);
  say_progress(2, 2);
  for (uint64_t seq = 1; seq <= 2; seq++) {
    say_push(0, update(seq, seq - 1, 0, 0), NULL, 0);
    seam_settle(&s);
    assert_true(acknowledged(0).seq == seq);
    assert_int_equal(ask_state(1).v_train, 1);
  }
}

/* Two of three pushes close a round. The former process of worker 1 has an update in it. The new process enters it, too: its
 * own update is not here. Worker 2 is past the round, because it was late in it at another server. */
THREE(test_new_process_enters_round) {
  mlfab__define d = seam_model(MLFAB_SYNC_ASYNC, 0);
  start(&d);
  change(0, 1, MLFAB_SYNC_DROP, 2);
  say_push(1, update(1, 0, 0, 0), NULL, 0);
  assert_int_equal(acknowledged(1).code, 0);
  seam_process(&s, 1);
  assert_true(s.peers[1].ack.guest);
  say_progress(1, 0);
  say_push(0, update(1, 0, 0, 0), NULL, 0);
  say_progress(2, 1);
  told t = ask_state(0);
  assert_true(t.v_train == 0 && t.arrived == 2 && t.members == 3 && t.slowest == 0);
  say_progress(1, 1);
  assert_int_equal(ask_state(0).v_train, 1);
}

/* A withdrawn update keeps its place behind an earlier one of its worker. At its turn it is decided at once. */
THREE(test_withdrawn_in_order) {
  mlfab__define d = seam_model(MLFAB_SYNC_ASYNC, 0);
  start(&d);
  for (uint64_t seq = 1; seq <= 2; seq++) say_push(0, update(seq, 0, 0, bytes_of_model), NULL, 0);
  SAY(&s, 0, WITHDRAW, withdraw, 2, 1, s.peers[0].ack.generation);
  seam_settle(&s);
  assert_int_equal(COUNT_OF(&s, PUSH_ACK, 0), 0);
  for (uint64_t at = 0; at < bytes_of_model; at += CHUNK) say_chunk(0, 1, at, CHUNK);
  seam_settle(&s);
  assert_int_equal(COUNT_OF(&s, PUSH_ACK, 0), 2);
  assert_true(acknowledged(0).seq == 2 && acknowledged(0).code == MLFAB_ERR_WITHDRAWN);
  say_push(0, update(3, 1, 0, bytes_of_model), NULL, 0);
  SAY(&s, 0, WITHDRAW, withdraw, 3, 1, s.peers[0].ack.generation);
  assert_true(acknowledged(0).seq == 3 && acknowledged(0).code == MLFAB_ERR_WITHDRAWN);
}

/* --- the tally --- */

static struct counted { /* a worker, as the literal model counts it */
  uint64_t pushed;
  int gone, guest;
} workers[3];

static void greeted(uint32_t w) {
  workers[w].gone = 0;
  workers[w].pushed = s.peers[w].ack.v_train;
  workers[w].guest = s.peers[w].ack.guest != 0;
}

static void advance(uint32_t w, uint64_t by) {
  struct counted *one = &workers[w];
  mlfab__progress told_;
  say_progress(w, one->pushed + by);
  one->pushed += by;
  if (!one->guest) return;
  LAST(&s, told_, PROGRESS, progress, w);
  one->pushed = told_.progress;
  one->guest = 0;
}

/* Compares the server's words to a worker with a literal count. Returns 1 if it tells anything. */
static int same_state(uint32_t w) {
  told want = {.slowest = UINT64_MAX}, is = ask_state(w);
  if (!is.waits) return 0;
  for (uint32_t i = 0; i < 3; i++) {
    const struct counted *one = &workers[i];
    if (one->gone || one->guest) continue;
    want.members++;
    want.arrived += one->pushed > is.v_train;
    want.fastest = one->pushed > want.fastest ? one->pushed : want.fastest;
    want.slowest = one->pushed < want.slowest ? one->pushed : want.slowest;
  }
  if (want.members == 0) want.slowest = 0;
  assert_int_equal(is.members, want.members);
  assert_int_equal(is.arrived, want.arrived);
  assert_int_equal(is.fastest, want.fastest);
  assert_int_equal(is.slowest, want.slowest);
  return 1;
}

static void tally_step(mlfab__rng *rng, const mlfab__define *d, uint64_t round) {
  static const uint32_t kinds[] = {MLFAB_SYNC_ASYNC, MLFAB_SYNC_BSP, MLFAB_SYNC_SSP,
                                   MLFAB_SYNC_DROP};
  uint32_t w = (uint32_t)mlfab__rng_below(rng, 3);
  uint64_t dice = mlfab__rng_below(rng, 20);
  if (dice < 14) {
    if (!workers[w].gone) advance(w, mlfab__rng_below(rng, 3));
  } else if (dice < 16) {
    if (s.peers[w].link && dice == 14) seam_bye(&s, w);
    seam_lost(&s, w);
    if (dice == 15) seam_pass(&s, 3 * BEAT); /* it is dead */
    workers[w].gone = 1;
  } else if (dice < 19) {
    if (mlfab__rng_below(rng, 2))
      seam_process(&s, w);
    else
      seam_hello(&s, w);
    greeted(w);
    seam_define(&s, w, d, 0, MLFAB_F32, COUNT);
  } else if (!workers[w].gone) {
    uint32_t kind = kinds[mlfab__rng_below(rng, 4)];
    change(w, round, kind, kind == MLFAB_SYNC_DROP ? 2 : (uint32_t)round);
  }
}

/* Workers join, leave, advance and change the model in any order: the tally equals the count. */
THREE(test_tally) {
  mlfab__rng rng;
  uint32_t compared = 0;
  uint64_t rounds = 0;
  mlfab__rng_seed(&rng, 1);
  for (int run = 0; run < 20; run++) {
    mlfab__define d = seam_model(run % 2 ? MLFAB_SYNC_SSP : MLFAB_SYNC_BSP, 0);
    if (run > 0) assert_int_equal(teardown(NULL) + setup(3), 0);
    d.options.ghost = 1;
    start(&d);
    memset(workers, 0, sizeof workers);
    for (uint64_t round = 1; round <= 1000; round++) {
      tally_step(&rng, &d, round);
      for (uint32_t i = 0; i < 3; i++) {
        if (workers[i].gone) continue;
        compared += (uint32_t)same_state(i);
        break;
      }
    }
    rounds += seam_stats(&s).rounds;
  }
  assert_true(compared > 10000);
  assert_true(rounds > 1000);
}
