/* test_fabric.c - simulated fabrics in the library that was compiled with cblas: the model and the sums of collectives
 * have the bits of the own kernels, and a node with other kernels than server 0 is refused. (A process that joins later: tests/process/cblas_test.py.) */
#include "tests/unit/world.h"
#include "../testing.h"

#include <math.h>

enum { COUNT = 5000, STEPS = 4, WORKERS = 3 };

/* A number for this worker, step and element, with a full fraction. */
static float value(uint32_t worker, uint32_t step, uint32_t i) {
  uint32_t x = (worker * 7919u + step * 104729u + i) * 2654435761u;
  return (float)(x >> 8) / 16777216.0f - 0.37f;
}

/* ---- the same bits ---- */

static void push_all(world *w, uint32_t step, double clip) {
  static float data[WORKERS][COUNT];
  mlfab_request requests[WORKERS];
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  options.scale = -0.1;
  options.clip_norm = clip;
  for (uint32_t k = 0; k < WORKERS; k++) {
    mlfab_buf b = {0, 0, data[k], COUNT};
    for (uint32_t i = 0; i < COUNT; i++) data[k][i] = value(k, step, i);
    OK(w->node[k], mlfab_push_start(w->node[k], &b, 1, &options, &requests[k]));
  }
  for (uint32_t k = 0; k < WORKERS; k++)
    OK(w->node[k], mlfab_wait(w->node[k], requests[k], 0, NULL));
}

/* Trains in rounds on two servers. out: what worker 0 pulls at the end. clip 0: norms are not needed. */
static void train(uint32_t kernels, uint32_t optimizer, double clip, float *out) {
  static float first[COUNT];
  world w;
  mlfab_model_options model = MLFAB_MODEL_OPTIONS_INIT;
  mlfab_buf b = {0, 0, first, COUNT};
  world_init(&w, WORKERS, 2, 1);
  w.config.kernels = kernels;
  world_open(&w, 5);
  model.optimizer = optimizer;
  model.sync = MLFAB_SYNC_BSP;
  model.mean = 1;
  model.deterministic = 1;
  for (uint32_t i = 0; i < COUNT; i++) first[i] = value(9, 0, i);
  for (uint32_t k = 0; k < WORKERS; k++) {
    OK(w.node[k], mlfab_tensor_add(w.node[k], 0, MLFAB_F32, COUNT));
    OK(w.node[k], mlfab_model_start(w.node[k], &model, &b, 1));
  }
  for (uint32_t step = 0; step < STEPS; step++) push_all(&w, step, clip);
  b.data = out;
  OK(w.node[0], mlfab_pull(w.node[0], &b, 1, NULL, NULL));
  world_close(&w);
}

TEST(trains_the_same_model) {
  static float own[COUNT], cblas[COUNT];
  for (uint32_t optimizer = MLFAB_OPTIMIZER_SGD; optimizer <= MLFAB_OPTIMIZER_ADAM; optimizer++) {
    train(MLFAB_KERNELS_OWN, optimizer, 0, own);
    train(MLFAB_KERNELS_CBLAS, optimizer, 0, cblas);
    assert_memory_equal(own, cblas, sizeof own);
  }
}

/* A norm may differ by parts in 10^7, and the scale of the update with it. */
TEST(clips_nearly_alike) {
  static float own[COUNT], cblas[COUNT], whole[COUNT];
  double moved = 0;
  train(MLFAB_KERNELS_OWN, MLFAB_OPTIMIZER_SGD, 1.5, own);
  train(MLFAB_KERNELS_CBLAS, MLFAB_OPTIMIZER_SGD, 1.5, cblas);
  train(MLFAB_KERNELS_CBLAS, MLFAB_OPTIMIZER_SGD, 0, whole);
  for (int i = 0; i < COUNT; i++) {
    assert_true(fabs((double)own[i] - (double)cblas[i]) < 1e-6);
    moved += fabs((double)whole[i] - (double)cblas[i]);
  }
  assert_true(moved > 1);
}

static void reduce(uint32_t kernels, int op, uint64_t count, float *out) {
  static float data[WORKERS][COUNT];
  mlfab_request requests[WORKERS];
  mlfab_collective options = {.size = sizeof options};
  world w;
  options.op = (uint32_t)op;
  world_init(&w, WORKERS, 1, 0);
  w.config.kernels = kernels;
  world_open(&w, 6);
  for (uint32_t k = 0; k < WORKERS; k++) {
    mlfab_vec vec = {data[k], count};
    for (uint32_t i = 0; i < count; i++) data[k][i] = value(k, 1, i);
    OK(w.node[k], mlfab_allreduce_start(w.node[k], &vec, 1, MLFAB_F32, &options, &requests[k]));
  }
  for (uint32_t k = 0; k < WORKERS; k++) OK(w.node[k], mlfab_wait(w.node[k], requests[k], 0, NULL));
  for (uint32_t k = 1; k < WORKERS; k++) assert_memory_equal(data[k], data[0], count * 4);
  memcpy(out, data[0], count * 4);
  world_close(&w);
}

TEST(reduces_to_the_same_bits) {
  static const uint64_t counts[] = {1, 3, 2049, COUNT};
  static float own[COUNT], cblas[COUNT];
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
    for (int op = MLFAB_OP_SUM; op <= MLFAB_OP_MAX; op++) {
      reduce(MLFAB_KERNELS_OWN, op, counts[i], own);
      reduce(MLFAB_KERNELS_CBLAS, op, counts[i], cblas);
      assert_memory_equal(own, cblas, counts[i] * 4);
    }
  }
}

/* ---- nodes that differ ---- */

/* Node `other` of 2 workers and a server has these kernels, the others have `common`; what it is told. */
static void differs(uint32_t other, uint32_t common, uint32_t kernels, const char *text) {
  world w;
  mlfab_error error;
  int ready = 0;
  world_init(&w, 2, 2, 1);
  world_network(&w, 1);
  for (uint32_t i = 0; i < w.nodes; i++) {
    mlfab_config c = world_config(&w, i);
    c.kernels = i == other ? kernels : common;
    c.timeout_ns = 4 * (uint64_t)WORLD_S;
    assert_int_equal(mlfab_sim_open(w.sim, i, &c, &w.node[i], &error), 0);
  }
  while ((ready = mlfab_is_ready(w.node[other], &error)) == 0) assert_true(mlfab_sim_step(w.sim));
  if (ready != MLFAB_ERR_WORLD || !strstr(error.text, text))
    fail_msg("%s \"%s\" instead of \"%s\"", mlfab_error_name(ready), error.text, text);
  world_close(&w);
}

TEST(refuses_other_kernels) {
  differs(0, MLFAB_KERNELS_CBLAS, MLFAB_KERNELS_OWN,
          "kernels (MLFAB_KERNELS) is own at worker 0, cblas at server 0");
  differs(1, MLFAB_KERNELS_OWN, MLFAB_KERNELS_CBLAS,
          "kernels (MLFAB_KERNELS) is cblas at worker 1, own at server 0");
  differs(3, MLFAB_KERNELS_OWN, MLFAB_KERNELS_CBLAS,
          "kernels (MLFAB_KERNELS) is cblas at server 1, own at server 0");
}

/* ---- what was compiled in ---- */

TEST(says_what_was_compiled_in) {
  const char *info = mlfab_build_info();
  assert_true(info == mlfab_build_info());
  assert_ptr_equal(strstr(info, "mlfab " MLFAB_VERSION), info);
  assert_null(strchr(info, '\n'));
  const char *with = strstr(info, "with:"), *without = strstr(info, "without:");
  const char *cblas = strstr(info, " cblas");
  assert_true(with && without && cblas && with < cblas && cblas < without);
}

TESTS(NULL, NULL)
