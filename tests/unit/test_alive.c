/* test_alive.c - who is dead, and when: peers that are stopped, whose hosts answer, and peers behind a
 * partition, in virtual time. The states of a link are in core/node/node.h. */
#include "world.h"
#include "../testing.h"
#include "chance.h"

enum { COUNT = 4000, WORKERS = 2, SERVERS = 2 };
#define BEAT ((uint64_t)500 * WORLD_MS)

enum { STOPPED, CUT_OFF }; /* a stopped process on a living host; an unreachable host */

typedef struct fixture {
  world w;
  float data[COUNT];
} fixture;

/* active: servers that have slices; 0: all. */
static void begin_active(fixture *f, uint32_t progress, uint64_t silent_death_ns, uint32_t sync,
                         uint32_t active) {
  mlfab_model_options options;
  memset(f, 0, sizeof *f);
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.sync = sync;
  options.active = active;
  world_init(&f->w, WORKERS, SERVERS, 1);
  f->w.config.heartbeat_ns = BEAT;
  f->w.config.progress = progress;
  f->w.config.silent_death_ns = silent_death_ns;
  world_open(&f->w, 1);
  mlfab_buf b = {1, 0, f->data, COUNT};
  for (uint32_t k = 0; k < WORKERS; k++) {
    OK(f->w.node[k], mlfab_tensor_add(f->w.node[k], 1, MLFAB_F32, COUNT));
    OK(f->w.node[k], mlfab_model_start(f->w.node[k], &options, &b, 1));
  }
}

static void begin(fixture *f, uint32_t progress, uint64_t silent_death_ns, uint32_t sync) {
  begin_active(f, progress, silent_death_ns, sync, 0);
}

/* The fault starts now and lasts this long. */
static void befall(fixture *f, uint32_t host, int what, uint64_t ns) {
  if (what == STOPPED) {
    assert_int_equal(mlfab_sim_pause(f->w.sim, host, ns), 0);
    return;
  }
  for (uint32_t other = 0; other < WORKERS + SERVERS; other++)
    if (other != host) assert_int_equal(mlfab_sim_partition(f->w.sim, host, other, 1), 0);
}

static const char *text_of(const world *w, uint32_t kind, int32_t rank, uint32_t is_server) {
  for (uint32_t i = 0; i < w->nseen; i++) {
    if (w->seen[i].kind == kind && w->seen[i].rank == rank && w->seen[i].is_server == is_server)
      return w->said[i];
  }
  return "nothing";
}

static void expect_text(const world *w, int32_t rank, uint32_t is_server, const char *wanted) {
  const char *text = text_of(w, MLFAB_EVENT_DEAD, rank, is_server);
  if (!strstr(text, wanted)) fail_msg("\"%s\" does not say \"%s\"", text, wanted);
}

/* Worker 0 pushes to both servers while the fault strikes server 1. Returns the time that it took. */
static uint64_t push_beside(fixture *f, int what, uint64_t ns, int wanted) {
  mlfab_buf b = {1, 0, f->data, COUNT};
  befall(f, WORKERS + 1, what, ns);
  uint64_t start = mlfab_sim_clock(f->w.sim);
  EXPECT(f->w.node[0], mlfab_push(f->w.node[0], &b, 1, NULL, NULL), wanted);
  return mlfab_sim_clock(f->w.sim) - start;
}

TEST(test_stopped_server_comes_back) {
  fixture f;
  begin(&f, 0, 0, MLFAB_SYNC_ASYNC);
  uint64_t took = push_beside(&f, STOPPED, 20 * (uint64_t)WORLD_S, 0);
  assert_in_range(took, 20 * (uint64_t)WORLD_S, 21 * (uint64_t)WORLD_S);
  assert_true(world_saw(&f.w, MLFAB_EVENT_SUSPECT, 1, 1));
  assert_non_null(strstr(text_of(&f.w, MLFAB_EVENT_SUSPECT, 1, 1), "suspect, silent for 1."));
  mlfab_sim_run(f.w.sim, 20 * (uint64_t)WORLD_S);
  for (int32_t r = 0; r < 2; r++) {
    assert_false(world_saw(&f.w, MLFAB_EVENT_DEAD, r, 1));
    assert_false(world_saw(&f.w, MLFAB_EVENT_DEAD, r, 0)); /* while stopped it received nothing */
  }
  world_close(&f.w);
}

TEST(test_stopped_server_dies) {
  fixture f;
  mlfab_error error;
  for (uint64_t limit = 0; limit < 13; limit += 4) { /* seconds; 0: 30; not below 5 heartbeats */
    uint64_t dies = limit ? limit * WORLD_S : 30 * (uint64_t)WORLD_S;
    begin(&f, 0, limit * WORLD_S, MLFAB_SYNC_ASYNC);
    uint64_t took = push_beside(&f, STOPPED, 100 * (uint64_t)WORLD_S, MLFAB_ERR_PEER_DEAD);
    assert_in_range(took, dies - 2 * BEAT, dies + 2 * BEAT);
    assert_int_equal(mlfab_last_error(f.w.node[0], &error), 0);
    assert_int_equal(error.rank, 1);
    char wanted[32];
    snprintf(wanted, sizeof wanted, "dead: silent for %u", limit ? (unsigned)limit : 30);
    expect_text(&f.w, 1, 1, wanted);
    world_close(&f.w);
  }
  begin(&f, 0, WORLD_MS, MLFAB_SYNC_ASYNC);
  uint64_t took = push_beside(&f, STOPPED, 100 * (uint64_t)WORLD_S, MLFAB_ERR_PEER_DEAD);
  assert_in_range(took, 4 * BEAT, 6 * BEAT);
  world_close(&f.w);
}

/* A server without slices dies, and no call needs it. */
TEST(test_server_without_slices_dies) {
  fixture f;
  begin_active(&f, 0, 0, MLFAB_SYNC_ASYNC, 1);
  mlfab_buf b = {1, 0, f.data, COUNT};
  assert_int_equal(mlfab_sim_crash(f.w.sim, WORKERS + 1), 0);
  f.w.node[WORKERS + 1] = NULL;
  mlfab_sim_run(f.w.sim, 10 * BEAT);
  for (uint32_t k = 0; k < WORKERS; k++) {
    OK(f.w.node[k], mlfab_push(f.w.node[k], &b, 1, NULL, NULL));
    OK(f.w.node[k], mlfab_pull(f.w.node[k], &b, 1, NULL, NULL));
  }
  assert_true(world_saw(&f.w, MLFAB_EVENT_DEAD, 1, 1));
  world_close(&f.w);
}

/* An unreachable host is dead after 5 heartbeats, hand-driven or not. */
TEST(test_cut_off_server_dies_soon) {
  fixture f;
  for (uint32_t progress = 0; progress < 3; progress += 2) {
    begin(&f, progress, 0, MLFAB_SYNC_ASYNC);
    uint64_t took = push_beside(&f, CUT_OFF, 0, MLFAB_ERR_PEER_DEAD);
    assert_in_range(took, 4 * BEAT, 6 * BEAT);
    expect_text(&f.w, 1, 1, "its system does not answer");
    world_close(&f.w);
  }
}

/* A process that is stopped first and cut off later: the five heartbeats start at the last sign of its
 * host. */
TEST(test_stopped_and_cut_off) {
  fixture f;
  begin(&f, 0, 0, MLFAB_SYNC_ASYNC);
  befall(&f, WORKERS + 1, STOPPED, 100 * (uint64_t)WORLD_S);
  mlfab_sim_run(f.w.sim, 10 * (uint64_t)WORLD_S);
  assert_false(world_saw(&f.w, MLFAB_EVENT_DEAD, 1, 1));
  uint64_t took = push_beside(&f, CUT_OFF, 0, MLFAB_ERR_PEER_DEAD);
  assert_in_range(took, 4 * BEAT, 6 * BEAT);
  world_close(&f.w);
}

/* A round of worker 0, which waits for worker 1. Returns the time that it took. */
static uint64_t round_beside(fixture *f, int what, uint64_t ns) {
  mlfab_buf b = {1, 0, f->data, COUNT};
  befall(f, 1, what, ns);
  uint64_t start = mlfab_sim_clock(f->w.sim);
  OK(f->w.node[0], mlfab_push(f->w.node[0], &b, 1, NULL, NULL));
  OK(f->w.node[0], mlfab_pull(f->w.node[0], &b, 1, NULL, NULL));
  return mlfab_sim_clock(f->w.sim) - start;
}

/* A round waits for a stopped worker until the worker is dead, and not longer. */
TEST(test_stopped_worker) {
  fixture f;
  begin(&f, 0, 0, MLFAB_SYNC_BSP);
  uint64_t took = round_beside(&f, STOPPED, 100 * (uint64_t)WORLD_S);
  assert_in_range(took, 29 * (uint64_t)WORLD_S, 31 * (uint64_t)WORLD_S);
  expect_text(&f.w, 1, 0, "dead, silent for 30");
  world_close(&f.w);

  begin(&f, 0, 0, MLFAB_SYNC_ASYNC);
  befall(&f, 1, STOPPED, 20 * (uint64_t)WORLD_S);
  mlfab_sim_run(f.w.sim, 40 * (uint64_t)WORLD_S);
  mlfab_buf b = {1, 0, f.data, COUNT};
  assert_true(world_saw(&f.w, MLFAB_EVENT_SUSPECT, 1, 0));
  assert_false(world_saw(&f.w, MLFAB_EVENT_DEAD, 1, 0));
  OK(f.w.node[1], mlfab_push(f.w.node[1], &b, 1, NULL, NULL));
  world_close(&f.w);
}

TEST(test_cut_off_worker) {
  fixture f;
  begin(&f, 0, 0, MLFAB_SYNC_BSP);
  assert_in_range(round_beside(&f, CUT_OFF, 0), 4 * BEAT, 6 * BEAT);
  expect_text(&f.w, 1, 0, "dead, silent for 2.");
  world_close(&f.w);
}

/* A worker that computes for long is not declared dead unless its host is unreachable. */
TEST(test_hand_driven_worker) {
  fixture f;
  begin(&f, MLFAB_PROGRESS_HAND, 0, MLFAB_SYNC_BSP);
  befall(&f, 1, STOPPED, 100 * (uint64_t)WORLD_S);
  mlfab_sim_run(f.w.sim, 90 * (uint64_t)WORLD_S);
  assert_int_equal(f.w.nseen - WORKERS * SERVERS, 0); /* the joins, and nothing else */
  world_close(&f.w);

  begin(&f, MLFAB_PROGRESS_HAND, 0, MLFAB_SYNC_BSP);
  assert_in_range(round_beside(&f, CUT_OFF, 0), 4 * BEAT, 12 * BEAT);
  assert_true(world_saw(&f.w, MLFAB_EVENT_DEAD, 1, 0));
  world_close(&f.w);
}

/* The servers give a stopped scheduler up after five heartbeats even though its host answers. Nothing is
 * lost with it, and it plans again when it resumes. */
TEST(test_stopped_scheduler) {
  mlfab_error error;
  world w;
  if (!WORLD_COMPLETE) skip();
  world_init(&w, 1, 1, 1);
  w.nodes = 3;
  w.config.heartbeat_ns = BEAT;
  w.config.scheduler = MLFAB_SCHEDULER_OWN;
  world_network(&w, 1);
  for (uint32_t i = 0; i < w.nodes; i++) {
    mlfab_config c = world_config(&w, i);
    if (i == 2) c.roles = MLFAB_ROLE_SCHEDULER, c.rank = 0;
    if (mlfab_sim_open(w.sim, i, &c, &w.node[i], &error)) fail_msg("%s", error.text);
  }
  mlfab_sim_run(w.sim, WORLD_S);
  for (uint32_t i = 0; i < w.nodes; i++) assert_int_equal(mlfab_is_ready(w.node[i], &error), 1);
  assert_int_equal(mlfab_sim_pause(w.sim, 2, 8 * BEAT), 0);
  w.nseen = 0;
  mlfab_sim_run(w.sim, 6 * BEAT);
  assert_true(world_saw(&w, MLFAB_EVENT_SCHEDULER_LOST, 0, 0));
  assert_false(world_saw(&w, MLFAB_EVENT_SCHEDULER_BACK, 0, 0));
  mlfab_sim_run(w.sim, 6 * BEAT);
  assert_true(world_saw(&w, MLFAB_EVENT_SCHEDULER_BACK, 0, 0));
  for (uint32_t server = 0; server < 2; server++)
    assert_false(world_saw(&w, MLFAB_EVENT_DEAD, 0, server));
  world_close(&w);
}

/* A pause while a node joins does not count as time that it has for that. */
TEST(test_paused_while_joining) {
  world w;
  mlfab_error error;
  world_init(&w, 1, 1, 1);
  w.nodes = 2;
  w.config.heartbeat_ns = BEAT;
  world_network(&w, 1);
  mlfab_config c = world_config(&w, 0);
  c.timeout_ns = 20 * BEAT;
  if (mlfab_sim_open(w.sim, 0, &c, &w.node[0], &error)) fail_msg("%s", error.text);
  mlfab_sim_run(w.sim, 2 * BEAT);
  assert_int_equal(mlfab_sim_pause(w.sim, 0, 40 * BEAT), 0);
  mlfab_sim_run(w.sim, 41 * BEAT);
  assert_int_equal(mlfab_is_ready(w.node[0], &error), 0);
  c = world_config(&w, 1);
  if (mlfab_sim_open(w.sim, 1, &c, &w.node[1], &error)) fail_msg("%s", error.text);
  mlfab_sim_run(w.sim, 10 * BEAT);
  for (uint32_t i = 0; i < w.nodes; i++) assert_int_equal(mlfab_is_ready(w.node[i], &error), 1);
  world_close(&w);
}

/* Server and worker both get no processor time, as when many processes start at once. The first to run
 * again has heard nothing from the other for long, and both continue. */
TEST(test_both_stopped) {
  fixture f;
  for (uint32_t first = 0; first < 2; first++) {
    begin(&f, 0, 0, MLFAB_SYNC_ASYNC);
    befall(&f, first ? 0 : WORKERS + 1, STOPPED, 8 * BEAT);
    befall(&f, first ? WORKERS + 1 : 0, STOPPED, 9 * BEAT);
    mlfab_sim_run(f.w.sim, 10 * BEAT);
    mlfab_buf b = {1, 0, f.data, COUNT};
    OK(f.w.node[0], mlfab_push(f.w.node[0], &b, 1, NULL, NULL));
    for (int32_t r = 0; r < SERVERS; r++) {
      assert_false(world_saw(&f.w, MLFAB_EVENT_DEAD, r, 1));
      assert_false(world_saw(&f.w, MLFAB_EVENT_DEAD, r, 0));
    }
    world_close(&f.w);
  }
}

/* All processes are stopped for longer than a death takes, at about the same time, and go on in any order: nobody is
 * dead. A server that does not go on is dead as soon as one that stopped alone. */
TEST(test_all_stopped) {
  uint64_t stopped = 40 * (uint64_t)WORLD_S, random = 7;
  mlfab_error error;
  fixture f;
  for (uint32_t round = 0; round < 12; round++) {
    begin(&f, 0, 0, MLFAB_SYNC_ASYNC);
    for (uint32_t twice = 0; twice < 2; twice++) {
      uint64_t next = mlfab_sim_clock(f.w.sim) + stopped;
      for (uint32_t host = 0; host < WORKERS + SERVERS; host++) {
        mlfab_sim_run(f.w.sim, chance_below(&random, BEAT / 2));
        befall(&f, host, STOPPED, next - mlfab_sim_clock(f.w.sim) + chance_below(&random, BEAT));
      }
      mlfab_sim_run(f.w.sim, stopped + 2 * BEAT);
      mlfab_buf b = {1, 0, f.data, COUNT};
      for (uint32_t k = 0; k < WORKERS; k++)
        OK(f.w.node[k], mlfab_push(f.w.node[k], &b, 1, NULL, NULL));
      for (int32_t r = 0; r < SERVERS; r++) {
        assert_false(world_saw(&f.w, MLFAB_EVENT_DEAD, r, 1));
        assert_false(world_saw(&f.w, MLFAB_EVENT_DEAD, r, 0));
      }
    }
    world_close(&f.w);
  }
  begin(&f, 0, 0, MLFAB_SYNC_ASYNC);
  for (uint32_t host = 0; host < WORKERS + SERVERS; host++)
    befall(&f, host, STOPPED, (host == WORKERS + 1 ? 10 : 1) * stopped);
  mlfab_sim_run(f.w.sim, stopped);
  mlfab_buf b = {1, 0, f.data, COUNT};
  uint64_t start = mlfab_sim_clock(f.w.sim);
  EXPECT(f.w.node[0], mlfab_push(f.w.node[0], &b, 1, NULL, NULL), MLFAB_ERR_PEER_DEAD);
  assert_in_range(mlfab_sim_clock(f.w.sim) - start, 29 * (uint64_t)WORLD_S, 31 * (uint64_t)WORLD_S);
  assert_int_equal(mlfab_last_error(f.w.node[0], &error), 0);
  assert_int_equal(error.rank, 1);
  world_close(&f.w);
}

/* A node that is stopped again and again still finds out that a host has gone. */
TEST(test_stopped_often) {
  fixture f;
  begin(&f, 0, 0, MLFAB_SYNC_ASYNC);
  befall(&f, WORKERS + 1, CUT_OFF, 0);
  for (uint32_t i = 0; i < 12; i++) {
    befall(&f, 0, STOPPED, 6 * BEAT);
    mlfab_sim_run(f.w.sim, 7 * BEAT);
  }
  mlfab_buf b = {1, 0, f.data, COUNT};
  EXPECT(f.w.node[0], mlfab_push(f.w.node[0], &b, 1, NULL, NULL), MLFAB_ERR_PEER_DEAD);
  expect_text(&f.w, 1, 1, "dead");
  world_close(&f.w);
}

/* A worker's link breaks while the worker is stopped. When it resumes it learns of the break only, and
 * calls again. */
TEST(test_link_breaks_while_stopped) {
  mlfab_sim_options faults;
  fixture f;
  begin(&f, 0, 0, MLFAB_SYNC_ASYNC);
  memset(&faults, 0, sizeof faults);
  faults.size = sizeof faults;
  faults.loss = 1;
  befall(&f, 0, STOPPED, 8 * BEAT);
  assert_int_equal(mlfab_sim_set_faults(f.w.sim, &faults), 0);
  mlfab_sim_run(f.w.sim, 2 * BEAT);
  assert_int_equal(mlfab_sim_set_faults(f.w.sim, NULL), 0);
  mlfab_sim_run(f.w.sim, 6 * BEAT);
  mlfab_buf b = {1, 0, f.data, COUNT};
  OK(f.w.node[0], mlfab_push(f.w.node[0], &b, 1, NULL, NULL));
  for (int32_t r = 0; r < SERVERS; r++) assert_false(world_saw(&f.w, MLFAB_EVENT_DEAD, r, 1));
  world_close(&f.w);
}

/* A worker that closes before all servers have greeted it says goodbye to those that have. */
TEST(test_close_before_ready) {
  fixture f;
  mlfab_error error;
  memset(&f, 0, sizeof f);
  world_init(&f.w, WORKERS, SERVERS, 1);
  f.w.config.heartbeat_ns = BEAT;
  world_network(&f.w, 1);
  static const uint32_t order[] = {WORKERS, WORKERS + 1, 0, 1};
  for (uint32_t i = 0; i < WORKERS + SERVERS; i++) {
    mlfab_config c = world_config(&f.w, order[i]);
    if (i == 3) assert_int_equal(mlfab_sim_pause(f.w.sim, WORKERS + 1, 5 * BEAT), 0);
    assert_int_equal(mlfab_sim_open(f.w.sim, order[i], &c, &f.w.node[order[i]], &error), 0);
    mlfab_sim_run(f.w.sim, BEAT);
  }
  assert_int_equal(mlfab_is_ready(f.w.node[1], &error), 0);
  OK(f.w.node[1], mlfab_close(&f.w.node[1]));
  mlfab_sim_run(f.w.sim, 40 * BEAT);
  assert_true(world_saw(&f.w, MLFAB_EVENT_LEFT, 1, 0));
  assert_false(world_saw(&f.w, MLFAB_EVENT_DEAD, 1, 0));
  world_close(&f.w);
}

TESTS(NULL, NULL)
