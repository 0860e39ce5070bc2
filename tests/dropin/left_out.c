/* left_out.c - the errors of an mlfab.c compiled without all optional groups, with pushes and pulls or without: each public function of a
 * group returns UNSUPPORTED and names the switch, and a configuration that needs a group is refused. */
#include "mlfab_device.h"
#include "mlfab_partial.h"

#include <stdio.h>
#include <string.h>

static int failed;

static void says(const char *what, int code, const char *text, const char *name) {
  if (code == MLFAB_ERR_UNSUPPORTED && strstr(text, name)) return;
  fprintf(stderr, "%s: %s, and not %s: %s\n", what, mlfab_error_name(code), name, text);
  failed = 1;
}

static void refused(mlfab *ctx, const char *what, int code, const char *name) {
  mlfab_error error = {0};
  mlfab_last_error(ctx, &error);
  says(what, code, error.text, name);
}

#define REFUSED(call, name) refused(ctx, #call, call, name)

/* A push, and a pull that brings it back. */
static void push_pull(mlfab *ctx) {
  float w[4] = {0}, u[4] = {1, 2, 3, 4};
  mlfab_buf weights = {0, 0, w, 4}, update = {0, 0, u, 4};
  const mlfab_model_options tags = {.size = sizeof tags, .tags = 16},
                            half = {.size = sizeof half, .pull_half = MLFAB_HALF_F16},
                            filter = {.size = sizeof filter, .change_threshold = 0.5};
  int code = mlfab_tensor_add(ctx, 0, MLFAB_F32, 4);
  REFUSED(mlfab_model_start(ctx, &tags, &weights, 1), "tags needs filters, which were left out");
  REFUSED(mlfab_model_start(ctx, &tags, &weights, 1), "MLFAB_WITH_SPARSE is 0");
  REFUSED(mlfab_model_start(ctx, &half, &weights, 1), "pull_half needs filters");
  REFUSED(mlfab_model_start(ctx, &filter, &weights, 1), "change_threshold needs filters");
  if (!code) code = mlfab_model_start(ctx, NULL, &weights, 1);
  if (!code) code = mlfab_push(ctx, &update, 1, NULL, NULL);
  if (!code) code = mlfab_pull(ctx, &weights, 1, NULL, NULL);
  if (!code) code = mlfab_barrier(ctx, NULL);
  if (!code && w[3] == 4.0f) return;
  fprintf(stderr, "push and pull: %s, %g\n", mlfab_error_name(code), (double)w[3]);
  failed = 1;
}

/* A build without pushes and pulls. Barriers are there. */
static void no_push(mlfab *ctx) {
  const char *push = "pushes and pulls (MLFAB_WITH_PUSH is 0)";
  float x[4] = {0};
  mlfab_buf buf = {0, 0, x, 4};
  int status = 0;
  mlfab_sync sync = {.size = sizeof sync};
  REFUSED(mlfab_tensor_add(ctx, 0, MLFAB_F32, 4), push);
  REFUSED(mlfab_model_start(ctx, NULL, &buf, 1), push);
  REFUSED(mlfab_push(ctx, &buf, 1, NULL, NULL), push);
  REFUSED(mlfab_push_status(ctx, 1, &status), push);
  REFUSED(mlfab_pull(ctx, &buf, 1, NULL, NULL), push);
  REFUSED(mlfab_set_sync(ctx, &sync, MLFAB_ALL, 0), push);
  int code = mlfab_barrier(ctx, NULL);
  if (!code) code = mlfab_flush(ctx, 0);
  if (!code) code = mlfab_finish(ctx, 0);
  if (!code && mlfab_finish(ctx, 0) == MLFAB_ERR_STATE) return;
  fprintf(stderr, "barrier, flush and finish: %s\n", mlfab_error_name(code));
  failed = 1;
}

int main(void) {
  int pushes = !strstr(strstr(mlfab_build_info(), "; without:"), " push");
  mlfab *ctx = NULL;
  mlfab_error error;
  mlfab_config config;
  mlfab_config_init(&config);
  config.scheduler = MLFAB_SCHEDULER_BESIDE;
  int code = mlfab_open(&config, &ctx, &error);
  says("a scheduler", code, error.text, "MLFAB_SCHEDULER) needs scheduling");
  says("a scheduler", code, error.text, "MLFAB_WITH_SCHED is 0");
  config.scheduler = MLFAB_SCHEDULER_NONE;
  snprintf(config.resume, sizeof config.resume, ".");
  code = mlfab_open(&config, &ctx, &error);
  says("resume", code, error.text, "MLFAB_WITH_CHECKPOINT is 0");
  config.resume[0] = 0;
  config.replicas = config.dedicated = 1;
  config.scheduler = MLFAB_SCHEDULER_OWN;
  snprintf(config.coordinator, sizeof config.coordinator, "127.0.0.1:9");
  code = mlfab_open(&config, &ctx, &error);
  says("replicas", code, error.text, "MLFAB_WITH_REPLICA is 0");
  config.replicas = config.dedicated = 0;
  config.scheduler = MLFAB_SCHEDULER_NONE;
  config.coordinator[0] = 0;
  config.order_by_rate = 1;
  code = mlfab_open(&config, &ctx, &error);
  says("order_by_rate", code, error.text, "MLFAB_WITH_SCHED is 0");
  config.order_by_rate = 0;
  config.transports = MLFAB_USE_MPI;
  code = mlfab_open(&config, &ctx, &error);
  says("transports", code, error.text, "MLFAB_WITH_MPI=0");
  config.transports = 0;
  config.kernels = MLFAB_KERNELS_CBLAS;
  code = mlfab_open(&config, &ctx, &error);
  says("kernels", code, error.text, "MLFAB_WITH_CBLAS is 0");
  config.kernels = MLFAB_KERNELS_OWN;
  config.workers_max = 2;
  config.rank = 1;
  snprintf(config.coordinator, sizeof config.coordinator, "127.0.0.1:9");
  code = mlfab_open(&config, &ctx, &error);
  says("workers_max", code, error.text, "workers_max (MLFAB_WORKERS_MAX) needs growth");
  says("workers_max", code, error.text, "MLFAB_WITH_GROWTH is 0");
  config.workers_max = config.rank = 0;
  config.join = 1;
  code = mlfab_open(&config, &ctx, &error);
  says("join", code, error.text, "join (MLFAB_JOIN) needs growth");
  config.join = 0;
  config.coordinator[0] = 0;
  snprintf(config.metrics, sizeof config.metrics, "m.prom");
  code = mlfab_open(&config, &ctx, &error);
  says("metrics", code, error.text, "MLFAB_WITH_TELEMETRY is 0");
  config.metrics[0] = 0;
  config.servers = config.workers = 2;
  config.allow_insecure = 1;
  snprintf(config.coordinator, sizeof config.coordinator, "127.0.0.1:9");
  code = pushes ? 0 : mlfab_open(&config, &ctx, &error);
  if (!pushes) says("servers", code, error.text, "MLFAB_WITH_PUSH is 0");
  config.servers = config.workers = 1;
  config.allow_insecure = 0;
  config.coordinator[0] = 0;
  if (mlfab_open(&config, &ctx, &error)) {
    fprintf(stderr, "mlfab_open: %s\n", error.text);
    return 1;
  }
  if (pushes) push_pull(ctx);
  float x[4] = {0};
  uint64_t index = 0, count;
  const void *cached;
  uint32_t id = 0, servers[] = {0};
  mlfab_dag *dag = NULL;
  mlfab_filter filter = {.size = sizeof filter};
  mlfab_schedule schedule;
  mlfab_schedule_init(&schedule);
  REFUSED(mlfab_allreduce(ctx, x, 4, MLFAB_F32, NULL), "collectives (MLFAB_WITH_COLL is 0)");
  REFUSED(mlfab_device_share(ctx, 0, 0, NULL), "collectives (MLFAB_WITH_COLL is 0)");
  REFUSED(mlfab_partial_open(ctx, 4, MLFAB_F32, NULL, &id), "MLFAB_WITH_PARTIAL is 0");
  REFUSED(mlfab_stochastic_open(ctx, 4, MLFAB_F32, NULL, &id), "MLFAB_WITH_STOCHASTIC is 0");
  REFUSED(mlfab_dag_create(ctx, &dag), "MLFAB_WITH_DAG is 0");
  REFUSED(mlfab_set_schedule(ctx, &schedule), "MLFAB_WITH_SCHED is 0");
  REFUSED(mlfab_set_link(ctx, 1.0, 1.0), "MLFAB_WITH_SCHED is 0");
  REFUSED(mlfab_set_other_traffic(ctx, 1.0, 1.0, 0.0), "MLFAB_WITH_SCHED is 0");
  REFUSED(mlfab_metrics(ctx, 0, NULL, 0, NULL), "MLFAB_WITH_TELEMETRY is 0");
  REFUSED(mlfab_device_attach(ctx, NULL, NULL, 0), "device memory (MLFAB_WITH_DEVICE is 0)");
  REFUSED(mlfab_set_filter(ctx, 0, &filter), "MLFAB_WITH_SPARSE is 0");
  REFUSED(mlfab_push_sparse(ctx, 0, &index, x, 1, NULL, NULL), "MLFAB_WITH_SPARSE is 0");
  REFUSED(mlfab_cached(ctx, 0, &cached, &count), "MLFAB_WITH_SPARSE is 0");
  REFUSED(mlfab_set_servers(ctx, servers, 1, 0), "MLFAB_WITH_RESHARD is 0");
  mlfab_checkpoint_info info = {.size = sizeof info};
  REFUSED(mlfab_checkpoint(ctx, NULL, &info), "MLFAB_WITH_CHECKPOINT is 0");
  REFUSED(mlfab_load(ctx, ".", NULL, 0, NULL), "MLFAB_WITH_CHECKPOINT is 0");
  REFUSED(mlfab_restore(ctx, "."), "MLFAB_WITH_CHECKPOINT is 0");
  REFUSED(mlfab_save(ctx, "model.safetensors"), "MLFAB_WITH_CHECKPOINT is 0");
  REFUSED(mlfab_restored(ctx, &info), "checkpoints (MLFAB_WITH_CHECKPOINT is 0)");
  if (!pushes) no_push(ctx);
  mlfab_buf weights = {0, 0, x, 4};
  mlfab_view view = {.size = sizeof view};
  mlfab_request request = 0;
  REFUSED(mlfab_pull_view(ctx, &weights, 1, NULL, &view),
          "views and shared areas (MLFAB_WITH_LEND is 0)");
  REFUSED(mlfab_pull_view_start(ctx, &weights, 1, NULL, &view, &request), "MLFAB_WITH_LEND is 0");
  REFUSED(mlfab_view_release(ctx, &view), "MLFAB_WITH_LEND is 0");
  void *memory = NULL;
  code = mlfab_alloc(ctx, 1 << 20, &memory);
  if (!code) code = mlfab_free(ctx, memory);
  if (code) {
    fprintf(stderr, "mlfab_alloc or mlfab_free: %s\n", mlfab_error_name(code));
    failed = 1;
  }
  code = mlfab_close(&ctx);
  if (code) fprintf(stderr, "mlfab_close: %s\n", mlfab_error_name(code));
  return failed || code;
}
