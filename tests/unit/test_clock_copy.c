/* test_clock_copy.c - core/server/clock_copy.c: the clocks of a server as records. Slices arrive with their clock, which joins one
 * that is here or is new. The other copy of a server gets all clocks. */
#include "../testing.h"

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
  server.clocks[0].used = 1;
  server.ngates = 1;
}

static mlfab__clock_record clock_of(uint32_t kind) {
  mlfab__clock_record c = {.clock = 0,
                           .contributors = 3,
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

/* Rounds that are open join if they are the same in all. Without an open round only the model counts. */
TEST(test_joins) {
  const uint32_t words[WORDS] = {5, 1}, others[WORDS] = {5, 3}, firsts[WORDS] = {4, 1};
  for (int scaled = 0; scaled < 2; scaled++) {
    begin(scaled ? MLFAB_OPTIMIZER_ADAM : MLFAB_OPTIMIZER_SGD);
    const mlfab__clock_record a = clock_of(MLFAB_SYNC_BSP);
    mlfab__clock_record b = a;
#define JOINS(b, words_b) mlfab__clock_joins(&server, &a, words, &(b), words_b)
    assert_true(JOINS(b, words));
    assert_false(JOINS(b, others));
    assert_false(JOINS(b, firsts));
    b.v_train++;
    assert_false(JOINS(b, words));
    b = a;
    b.members = 1;
    assert_false(JOINS(b, words));
    b = a;
    b.contributors++;
    assert_false(JOINS(b, words));
    for (int less = 0; less < 2; less++) {
      b = a;
      b.scale = less ? 0.25f : 0.75f;
      assert_int_equal(JOINS(b, words), !scaled);
    }
    b = a;
    b.consistency.kind = MLFAB_SYNC_SSP;
    assert_false(JOINS(b, words));
    /* No round is open: it has no state. */
    b = a;
    b.members = 0;
    b.v_train = 1;
    b.contributors = 7;
    b.scale = 3;
    assert_true(JOINS(b, others));
#undef JOINS
  }
  begin(MLFAB_OPTIMIZER_SGD);
  const mlfab__clock_record a = clock_of(MLFAB_SYNC_ASYNC);
  mlfab__clock_record b = a;
  b.v_train = 1;
  b.members = 8;
  assert_true(mlfab__clock_joins(&server, &a, words, &b, others)); /* there are no rounds */
}

static void same_clock(uint32_t g, const mlfab__clock_record *in, const uint32_t *words) {
  mlfab__clock_record out;
  uint32_t out_words[MLFAB__RESHARD_SERVER_WORDS_MAX];
  mlfab__clock_told(&server, g, &out, out_words);
  assert_int_equal(out.clock, g);
  assert_int_equal(out.contributors, in->contributors);
  assert_int_equal(out.members, in->members);
  assert_int_equal(out.quiet, in->quiet);
  assert_int_equal(out.v_train, in->v_train);
  assert_int_equal(out.refused_round, in->refused_round);
  assert_int_equal(out.threshold, in->threshold);
  assert_true(out.scale == in->scale);
  assert_true(mlfab__sync_equal(&out.consistency, &in->consistency));
  assert_int_equal(out.words, WORDS);
  assert_memory_equal(out_words, words, WORDS * sizeof *words);
}

/* All clocks are as they were: after a restore, and at the other copy. */
TEST(test_restored_and_mirrored) {
  const uint32_t words[3][WORDS] = {{0x80000001u, 0x81}, {6, 0}, {0, 0x40}};
  mlfab__clock_record clocks[3];
  for (uint32_t i = 0; i < 3; i++) {
    clocks[i] = clock_of(i == 1 ? MLFAB_SYNC_SSP : MLFAB_SYNC_BSP);
    clocks[i].clock = 2 * i;
    clocks[i].v_train += i;
    clocks[i].threshold += i;
  }
  begin(MLFAB_OPTIMIZER_SGD);
  peers[1].contributed = 1;
  assert_int_equal(mlfab__clock_restore(&server, 1, &clocks[0], words[0]), 0);
  same_clock(0, &clocks[0], words[0]);

  for (uint32_t n = 1; n <= 3; n++) {
    begin(MLFAB_OPTIMIZER_SGD);
    server.clocks[1].used = 1;
    server.ngates = 2;
    peers[1].contributed = 3;
    mlfab__clock_mirror(&server, clocks, n, words[0]);
    assert_int_equal(server.ngates, 2 * n - 1);
    assert_int_equal(server.untidy, n > 1);
    for (uint32_t g = 0; g < 6; g++)
      assert_int_equal(server.clocks[g].used, g % 2 == 0 && g / 2 < n);
    for (uint32_t i = 0; i < n; i++) same_clock(2 * i, &clocks[i], words[i]);
    mlfab__clock_free(&server);
  }
}

/* Slices arrive with their clock: it joins one that is the same; else it is one more. Its version is that of the clocks that are
 * here, unless it has an open round. */
TEST(test_adopted) {
  const uint32_t words[WORDS] = {5, 1}, others[WORDS] = {5, 3};
  begin(MLFAB_OPTIMIZER_SGD);
  mlfab__clock_record in = clock_of(MLFAB_SYNC_BSP);
  (void)mlfab__clock_restore(&server, 1, &in, words);
  assert_int_equal(mlfab__clock_adopt(&server, &in, words), 0);
  assert_int_equal(server.ngates, 1);
  in.v_train = 12;
  assert_int_equal(mlfab__clock_adopt(&server, &in, others), 1);
  same_clock(1, &in, others);
  same_clock(0,
             &(mlfab__clock_record){.contributors = 3,
                                    .members = 3,
                                    .quiet = 2,
                                    .v_train = 9,
                                    .refused_round = 4,
                                    .threshold = 6,
                                    .scale = 0.5,
                                    .consistency = in.consistency},
             words);
  assert_true(server.untidy);
  /* Without rounds the version is that of the slowest here. The round that was refused there means nothing here. */
  in = clock_of(MLFAB_SYNC_SSP);
  in.v_train = 30;
  in.refused_round = 8;
  assert_int_equal(mlfab__clock_adopt(&server, &in, words), 2);
  in.v_train = 9;
  in.refused_round = 0;
  same_clock(2, &in, words);
  /* So it is between two rounds. The slowest is not the first. */
  server.clocks[1].v_train = 8;
  in = clock_of(MLFAB_SYNC_DROP);
  in.consistency.need = 2;
  in.members = 0;
  in.v_train = 30;
  assert_int_equal(mlfab__clock_adopt(&server, &in, words), 3);
  assert_int_equal(server.clocks[3].v_train, 8);
  assert_int_equal(server.clocks[3].refused_round, 0);
  in = clock_of(MLFAB_SYNC_BSP);
  in.consistency.staleness = 0;
  for (uint32_t g = 4; g <= MLFAB__CLOCKS; g++) {
    in.v_train = 100 + g;
    assert_int_equal(mlfab__clock_adopt(&server, &in, words), g); /* CLOCKS: there is no room */
  }
  mlfab__clock_free(&server);
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
