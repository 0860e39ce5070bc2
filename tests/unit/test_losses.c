/* test_losses.c - core/replica/losses.c: what a worker counts as lost when another copy of a server serves. */
#include "../testing.h"

#include "core/replica/copy.h"
#include "core/worker/worker.h"

static int events, rank_told;
static char told[200];

static void on_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                     int code, const char *text) {
  (void)self;
  assert_true(kind == MLFAB_EVENT_UPDATES_LOST && is_server && incarnation == 0 && code == 0);
  events++;
  rank_told = rank;
  snprintf(told, sizeof told, "%s", text);
}

/* An update counts once if the former copy has taken it, and the new copy has not. A copy that serves on, or a former one, changes
 * nothing. */
TEST(test_counts) {
  static mlfab__worker worker;
  static mlfab__stream streams[2];
  static mlfab_stats stats;
  mlfab__hello_ack ack = {.term = 3, .taken = 7};
  memset(&worker, 0, sizeof worker);
  worker.rank = 5;
  worker.stats = &stats;
  worker.streams = streams;
  worker.port.event = on_event;
  mlfab__losses_attach(&worker);
  streams[1].taken = 9;
  streams[1].term = 3;
  assert_int_equal(worker.copies(&worker, 1, &ack), 0); /* the same one */
  ack.term = 2;
  assert_int_equal(worker.copies(&worker, 1, &ack), 0);
  assert_int_equal(events, 0);
  assert_int_equal(streams[1].taken, 9);
  assert_int_equal(streams[1].term, 3);
  ack.term = 4;
  assert_int_equal(worker.copies(&worker, 1, &ack), 1);
  assert_int_equal(stats.updates_lost, 2);
  assert_int_equal(events, 1);
  assert_int_equal(rank_told, 1);
  assert_string_equal(told, "2 updates of worker 5 were lost with a server");
  assert_int_equal(streams[1].taken, 7);
  assert_int_equal(streams[1].term, 4);
  ack.term = 6;
  assert_int_equal(worker.copies(&worker, 1, &ack), 1); /* it has all */
  assert_int_equal(streams[1].term, 6);
  ack.term = 7;
  ack.taken = 6;
  assert_int_equal(worker.copies(&worker, 1, &ack), 1);
  assert_int_equal(stats.updates_lost, 3);
  assert_int_equal(events, 2);
  assert_int_equal(streams[0].term, 0);
}

TESTS(NULL, NULL)
