/* test_clock_copy.c - core/server/clock_copy.c: the clock of a server as a record. It is the same after a restore, and at the other
 * copy. Open rounds of several servers are united if they belong to the same round of the same model. */
#include "../testing.h"

#include "core/checkpoint/restore.h"
#include "core/server/clock_copy.h"

enum { WORKERS = 40, WORDS = 2 };

static mlfab__server server;
static mlfab__server_peer peers[WORKERS];
static mlfab__env env;

static void begin(uint32_t optimizer) {
  memset(&server, 0, sizeof server);
  memset(peers, 0, sizeof peers);
  assert_int_equal(mlfab__env_init(&env, NULL), 0);
  server.env = &env;
  server.workers = WORKERS;
  server.peers = peers;
  server.optimizer.kind = optimizer;
}

static mlfab__clock_record clock_of(uint32_t kind) {
  mlfab__clock_record c = {.contributors = 5,
                           .members = 3,
                           .quiet = 2,
                           .v_train = 9,
                           .refused_round = 4,
                           .threshold = 6,
                           .scale = 0.5,
                           .words = WORDS};
  c.consistency = (mlfab_sync){.size = sizeof c.consistency, .kind = kind, .staleness = 1};
  return c;
}

/* The same round of the same model has the same number, if the bits of workers are the same;
 * without rounds the iteration does not count. */
TEST(test_numbers) {
  uint32_t words[WORDS] = {0}, others[WORDS] = {2};
  const mlfab__clock_record bsp = clock_of(MLFAB_SYNC_BSP), ssp = clock_of(MLFAB_SYNC_SSP);
  for (uint32_t rounds = 0; rounds < 2; rounds++) {
    const mlfab__clock_record *a = rounds ? &bsp : &ssp;
    mlfab__clock_record b = *a;
    b.contributors = b.members = b.quiet = 1;
    b.attempt = 7;
    b.refused_round = b.threshold = 1;
    b.scale = 2.0;
    assert_true(mlfab__clock_round(a, words) == mlfab__clock_round(&b, words));
    assert_false(mlfab__clock_round(a, words) == mlfab__clock_round(&b, others));
    b.v_train++;
    assert_int_equal(mlfab__clock_round(a, words) == mlfab__clock_round(&b, words), !rounds);
    b = *a;
    b.consistency.staleness++;
    assert_false(mlfab__clock_round(a, words) == mlfab__clock_round(&b, words));
  }
  assert_false(mlfab__clock_round(&bsp, words) == mlfab__clock_round(&ssp, words));
}

/* A worker whose update of the open round was refused here is a hole of the round. */
TEST(test_holes) {
  uint32_t words[WORDS];
  begin(MLFAB_OPTIMIZER_SGD);
  server.clock.v_train = 4;
  server.clock.round_members = 1;
  for (uint32_t w = 0; w < server.workers; w++) {
    server.peers[w].decided = 4 + w % 2;
    server.peers[w].contributed = w % 4 == 1;
  }
  mlfab__clock_holes(&server, words);
  for (uint32_t w = 0; w < server.workers; w++)
    assert_int_equal(words[w / 32] >> w % 32 & 1, w % 4 == 3);
  server.clock.round_members = 0;
  mlfab__clock_holes(&server, words);
  for (uint32_t i = 0; i < (server.workers + 31) / 32; i++) assert_int_equal(words[i], 0);
}

/* The scale of a sum counts if the optimizer steps with it. */
TEST(test_scales) {
  for (int scaled = 0; scaled < 2; scaled++) {
    begin(scaled ? MLFAB_OPTIMIZER_ADAM : MLFAB_OPTIMIZER_SGD);
    mlfab__clock_record a = clock_of(MLFAB_SYNC_BSP);
    double scale = mlfab__clock_scale(&server, &a), wanted = scaled ? 0.5 : 0.0;
    assert_true(scale >= wanted && scale <= wanted);
    a.members = 0;
    scale = mlfab__clock_scale(&server, &a);
    assert_true(scale >= 0.0 && scale <= 0.0);
  }
}

static void same_clock(const mlfab__clock_record *in, const uint32_t *words) {
  mlfab__clock_record out;
  uint32_t out_words[MLFAB__RESHARD_SERVER_WORDS_MAX];
  mlfab__clock_told(&server, &out, out_words);
  assert_int_equal(out.contributors, in->contributors);
  assert_int_equal(out.members, in->members);
  assert_int_equal(out.quiet, in->quiet);
  assert_int_equal(out.v_train, in->v_train);
  assert_int_equal(out.refused_round, in->refused_round);
  assert_int_equal(out.threshold, in->threshold);
  assert_true(out.scale >= in->scale && out.scale <= in->scale);
  assert_true(mlfab__restore_equal(&out.consistency, &in->consistency));
  assert_int_equal(out.words, WORDS);
  assert_memory_equal(out_words, words, WORDS * sizeof *words);
}

/* It replaces the clock that was there, and the changes that wait. */
TEST(test_taken) {
  static const uint32_t words[2][WORDS] = {{0x80000001u, 0x81}, {6, 0}};
  begin(MLFAB_OPTIMIZER_SGD);
  for (uint32_t i = 0; i < 2; i++) {
    mlfab__clock_record in = clock_of(i ? MLFAB_SYNC_SSP : MLFAB_SYNC_BSP);
    in.v_train += i;
    peers[1].contributed = peers[5].contributed = 1;
    peers[3].change.ask = 4;
    server.clock.measured = 3;
    mlfab__clock_take(&server, &in, words[i]);
    same_clock(&in, words[i]);
    assert_int_equal(server.rounds, !i);
    assert_true(server.clock.due && peers[3].change.ask == 0 && server.clock.measured == 0);
  }
}

/* Workers are counted once; the number of updates is the larger of both; the first sum sets the scale. */
TEST(test_united) {
  static const uint32_t words[WORDS] = {5, 1}, others[WORDS] = {6, 0x80};
  begin(MLFAB_OPTIMIZER_ADAM);
  mlfab__clock_record in = clock_of(MLFAB_SYNC_BSP), more = in;
  in.members = in.contributors = 0;
  mlfab__clock_take(&server, &in, (const uint32_t[WORDS]){0, 0});
  server.clock.round_scale = 4.0;
  in.members = 3;
  mlfab__clock_unite(&server, &in, words);
  in.contributors = 3;
  same_clock(&in, words);
  more.members = 2;
  more.scale = 8.0;
  for (uint32_t i = 0; i < 2; i++) mlfab__clock_unite(&server, &more, others);
  in.contributors = 5;
  same_clock(&in, (const uint32_t[WORDS]){7, 0x81});
}

/* The workers that live, as bits. */
TEST(test_counted) {
  uint32_t words[WORDS] = {7, 7};
  begin(MLFAB_OPTIMIZER_SGD);
  for (uint32_t w = 0; w < WORKERS; w++) peers[w].dead = 1;
  peers[0].dead = peers[31].dead = peers[33].dead = peers[39].dead = 0;
  mlfab__clock_counted(&server, words);
  assert_int_equal(words[0], 0x80000001u);
  assert_int_equal(words[1], 0x82);
}

TESTS(NULL, NULL)
