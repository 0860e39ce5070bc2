/* memory.c - memory that a server and a worker allocate, in multiples of the model they hold.
 *
 * Measured in the simulator, where only the library runs: one worker pushes and pulls a model of 64 MiB at
 * a server, and both report their allocations. Buffers of the transport are not included: over shared
 * memory a connection costs two rings of 2.5 MiB, over TCP some hundred KiB. */
#include "bench.h"

#include "mlfab_sim.h"

#include <stdlib.h>

enum { MEMORY_ELEMENTS = 16 << 20 };

static int memory_until_ready(mlfab_sim *sim, mlfab *ctx) {
  for (int i = 0; i < 100000 && mlfab_is_ready(ctx, NULL) == 0; i++) mlfab_sim_step(sim);
  return mlfab_is_ready(ctx, NULL) == 1 ? 0 : -1;
}

static double memory_of(mlfab *ctx) {
  mlfab_stats stats = {.memory_bytes = 0};
  mlfab_get_stats(ctx, &stats, sizeof stats);
  return (double)stats.memory_bytes / (MEMORY_ELEMENTS * sizeof(float));
}

int bench_memory_use(uint32_t rule, uint32_t sync, double *server_p, double *worker_p) {
  mlfab_sim_options options = {.size = sizeof options, .hosts = 2};
  mlfab_model_options model = MLFAB_MODEL_OPTIONS_INIT;
  model.optimizer = rule;
  model.sync = sync;
  mlfab_sim *sim = NULL;
  mlfab *server = NULL, *worker = NULL;
  mlfab_config config;
  float *data = calloc(MEMORY_ELEMENTS, sizeof *data);
  mlfab_buf buf = {MLFAB_ALL, 0, data, MEMORY_ELEMENTS};
  int code = data ? mlfab_sim_create(&options, &sim) : -1;
  mlfab_config_init(&config);
  config.dedicated = 1;
  config.roles = MLFAB_ROLE_SERVER;
  if (!code) code = mlfab_sim_open(sim, 0, &config, &server, NULL);
  config.roles = MLFAB_ROLE_WORKER;
  if (!code) code = mlfab_sim_open(sim, 1, &config, &worker, NULL);
  if (!code) code = memory_until_ready(sim, worker);
  if (!code) code = mlfab_tensor_add(worker, 0, MLFAB_F32, MEMORY_ELEMENTS);
  if (!code) code = mlfab_model_start(worker, &model, &buf, 1);
  if (!code) code = mlfab_push(worker, &buf, 1, NULL, NULL);
  if (!code) code = mlfab_pull(worker, &buf, 1, NULL, NULL);
  if (!code) {
    *server_p = memory_of(server);
    *worker_p = memory_of(worker);
  }
  mlfab_abandon(&worker);
  mlfab_abandon(&server);
  if (sim) mlfab_sim_destroy(&sim);
  free(data);
  return code;
}
