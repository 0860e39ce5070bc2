/* test_scheduler_lost.c - a server whose local worker has closed still notices the loss of the scheduler. */
#include "world.h"
#include "../testing.h"

enum { FLOATS = 500000, SCHEDULER = 3 }; /* 2 MB: planned */

typedef struct fabric {
  mlfab_sim *sim;
  mlfab *node[SCHEDULER + 1]; /* three workers, of which two serve; a dedicated scheduler */
  mlfab_request request;
  mlfab_result result;
  int ended;
} fabric;

static void fabric_open(fabric *f) {
  mlfab_sim_options options = {
      .size = sizeof options, .hosts = SCHEDULER + 1, .seed = 1, .rate_bytes_per_s = 20000000};
  assert_int_equal(mlfab_sim_create(&options, &f->sim), 0);
  for (int i = 0; i <= SCHEDULER; i++) {
    mlfab_config c;
    mlfab_config_init(&c);
    c.workers = SCHEDULER;
    c.servers = 2;
    c.scheduler = MLFAB_SCHEDULER_OWN;
    c.rank = i < SCHEDULER ? i : 0;
    if (i == SCHEDULER) c.roles = MLFAB_ROLE_SCHEDULER;
    sim_open(f->sim, (uint32_t)i, &c, &f->node[i]);
  }
  for (int i = 0; i <= SCHEDULER; i++) sim_await(f->sim, f->node[i]);
  mlfab_model_options model = {.size = sizeof model, .ghost = 1};
  for (int i = 0; i < SCHEDULER; i++) {
    OK(f->node[i], mlfab_tensor_add(f->node[i], 1, MLFAB_F32, FLOATS));
    OK(f->node[i], mlfab_model_start(f->node[i], &model, NULL, 0));
  }
}

static void scheduler_dies(void *user) {
  fabric *f = user;
  assert_int_equal(mlfab_sim_crash(f->sim, SCHEDULER), 0);
}

static void worker_pushes(void *user) {
  fabric *f = user;
  mlfab_buf buf = {MLFAB_ALL, 0, NULL, FLOATS};
  OK(f->node[2], mlfab_push_start(f->node[2], &buf, 1, NULL, &f->request));
}

/* By then the update must be applied. The others leave, so that closing ends. */
static void worker_looks(void *user) {
  fabric *f = user;
  OK(f->node[2], mlfab_test(f->node[2], f->request, &f->ended, &f->result));
  mlfab_abandon(&f->node[2]);
  mlfab_abandon(&f->node[0]);
}

TEST(test_scheduler_dies_meanwhile) {
  static fabric f;
  fabric_open(&f);
  uint64_t now = mlfab_sim_clock(f.sim);
  assert_int_equal(mlfab_sim_at(f.sim, now + WORLD_S, scheduler_dies, &f), 0);
  assert_int_equal(mlfab_sim_at(f.sim, now + 2ull * WORLD_S, worker_pushes, &f), 0);
  assert_int_equal(mlfab_sim_at(f.sim, now + 12ull * WORLD_S, worker_looks, &f), 0);
  assert_int_equal(mlfab_close(&f.node[1]), 0); /* serves on until the others have left */
  assert_int_equal(f.ended, 1);
  assert_int_equal(f.result.status, 0);
  assert_int_equal(f.result.applied, 2);
  mlfab_sim_destroy(&f.sim);
}

TESTS(NULL, NULL)
