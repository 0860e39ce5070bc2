/* closer.c - a worker of close_test.py: opens, makes one last call, and closes.
 *
 *   closer LAST
 *
 * LAST is one of the names in `table` below, which are printed when it is missing. Success prints nothing
 * and returns 0; a failure is printed on stderr. */
#include "node.h"
#include "mlfab_partial.h"

enum { COUNT = 250000, SMALL = 100, PARTS = 4, WORKERS_MAX = 64 };

static float weights[COUNT], gradient[COUNT]; /* zeros */

static int begin_model(void) {
  mlfab_buf first = {MLFAB_ALL, 0, weights, COUNT};
  int code = mlfab_tensor_add(fabric, 0, MLFAB_F32, COUNT);
  return code ? code : mlfab_model_start(fabric, NULL, &first, 1);
}

static int nothing(void) { return 0; }

static int push(void) {
  mlfab_buf update = {0, 0, gradient, COUNT};
  int code = begin_model();
  return code ? code : mlfab_push(fabric, &update, 1, NULL, NULL);
}

/* The requests are not waited for: closing forgets them. */
static int push_start(void) {
  mlfab_buf update = {0, 0, gradient, COUNT};
  mlfab_request request;
  int code = begin_model();
  for (int i = 0; i < PARTS && !code; i++)
    code = mlfab_push_start(fabric, &update, 1, NULL, &request);
  return code;
}

static int push_sparse(void) {
  uint64_t at = (uint64_t)rank;
  float one = 1;
  int code = begin_model();
  return code ? code : mlfab_push_sparse(fabric, 0, &at, &one, 1, NULL, NULL);
}

static int flush(void) {
  int code = push_start();
  return code ? code : mlfab_flush(fabric, 0);
}

static int pull(void) {
  mlfab_buf model = {0, 0, weights, COUNT};
  int code = begin_model();
  return code ? code : mlfab_pull(fabric, &model, 1, NULL, NULL);
}

static int pull_start(void) {
  mlfab_buf model = {0, 0, weights, COUNT};
  mlfab_request request;
  int code = begin_model();
  return code ? code : mlfab_pull_start(fabric, &model, 1, NULL, &request);
}

static int cancel(void) {
  mlfab_buf model = {0, 0, weights, COUNT};
  mlfab_request request;
  int code = begin_model();
  if (!code) code = mlfab_pull_start(fabric, &model, 1, NULL, &request);
  return code ? code : mlfab_cancel(fabric, request);
}

static int barrier(void) { return mlfab_barrier(fabric, NULL); }

static int broadcast(void) { return mlfab_broadcast(fabric, 0, weights, sizeof weights, NULL); }

static int join(void) {
  int code = push();
  return code ? code : mlfab_finish(fabric, 0);
}

static int allreduce(void) { return mlfab_allreduce(fabric, gradient, COUNT, MLFAB_F32, NULL); }

static int small(void) { return mlfab_allreduce(fabric, gradient, SMALL, MLFAB_F32, NULL); }

static int allreduce_start(void) {
  mlfab_vec vec = {gradient, COUNT};
  mlfab_request request;
  int code = mlfab_allreduce_start(fabric, &vec, 1, MLFAB_F32, NULL, &request);
  return code ? code : mlfab_wait(fabric, request, 0, NULL);
}

static int barrier_start(void) {
  mlfab_request request;
  int code = mlfab_barrier_start(fabric, NULL, &request);
  return code ? code : mlfab_wait(fabric, request, 0, NULL);
}

static int broadcast_start(void) {
  mlfab_request request;
  int code = mlfab_broadcast_start(fabric, 0, weights, sizeof weights, NULL, &request);
  return code ? code : mlfab_wait(fabric, request, 0, NULL);
}

static int scatter_gather(void) {
  uint64_t counts[WORKERS_MAX];
  if (workers > WORKERS_MAX) return MLFAB_ERR_LIMIT;
  for (uint32_t w = 0; w < workers; w++) counts[w] = COUNT / workers;
  int code = mlfab_reduce_scatter(fabric, gradient, counts, MLFAB_F32, NULL);
  return code ? code : mlfab_allgather(fabric, gradient, counts, MLFAB_F32, NULL);
}

static int open_partial(uint32_t *id_p) {
  mlfab_partial_options options = {.size = sizeof options, .mode = MLFAB_PARTIAL_SOLO};
  return mlfab_partial_open(fabric, SMALL, MLFAB_F32, &options, id_p);
}

static int partial(void) {
  uint32_t id;
  int code = open_partial(&id);
  if (!code) code = mlfab_partial_reduce(fabric, id, gradient, 0, NULL);
  if (!code) code = mlfab_partial_flush(fabric, id, gradient, 0);
  return code ? code : mlfab_partial_close(fabric, id);
}

/* The object stays open: closing the context closes it. */
static int partial_open(void) {
  uint32_t id;
  int code = open_partial(&id);
  if (!code) code = mlfab_partial_reduce(fabric, id, gradient, 0, NULL);
  return code ? code : mlfab_partial_flush(fabric, id, gradient, 0);
}

static int stochastic(void) {
  mlfab_stochastic_options options = {.size = sizeof options, .graph = MLFAB_GRAPH_RING};
  uint32_t id;
  if (workers == 1) return 0;
  int code = mlfab_stochastic_open(fabric, SMALL, MLFAB_F32, &options, &id);
  if (!code) code = mlfab_stochastic_reduce(fabric, id, gradient, 0, NULL);
  return code ? code : mlfab_stochastic_close(fabric, id);
}

static int everything(void) {
  int code = push();
  if (!code) code = allreduce();
  if (!code) code = allreduce_start();
  if (!code) code = partial();
  return code ? code : barrier();
}

/* Odd ranks close later than even ones. */
static int late(void) {
  int code = allreduce_start();
  nap(30.0 * (rank % 2));
  return code;
}

static const struct {
  const char *name;
  int (*call)(void);
} table[] = {{"nothing", nothing},
             {"model", begin_model},
             {"push", push},
             {"push_start", push_start},
             {"push_sparse", push_sparse},
             {"flush", flush},
             {"pull", pull},
             {"pull_start", pull_start},
             {"cancel", cancel},
             {"barrier", barrier},
             {"broadcast", broadcast},
             {"join", join},
             {"allreduce", allreduce},
             {"small", small},
             {"allreduce_start", allreduce_start},
             {"barrier_start", barrier_start},
             {"broadcast_start", broadcast_start},
             {"scatter_gather", scatter_gather},
             {"partial", partial},
             {"partial_open", partial_open},
             {"stochastic", stochastic},
             {"everything", everything},
             {"late", late}};

int main(int argc, char **argv) {
  mlfab_config config;
  size_t n = sizeof table / sizeof table[0], i = 0;
  while (argc == 2 && i < n && strcmp(table[i].name, argv[1])) i++;
  if (argc != 2 || i == n) {
    for (i = 0; i < n; i++) printf("%s\n", table[i].name);
    return 2;
  }
  configure(&config);
  open_node(&config);
  int status = table[i].call() ? failed(argv[1]) : 0, code = mlfab_close(&fabric);
  if (code) fprintf(stderr, "close: %s\n", mlfab_error_name(code));
  return status || code;
}
