/* 12_server_dies.c - a trainer whose server is killed in the middle, and whose replica goes on.
 *
 * Shows:  a server with a replica: what workers notice of the server's death (a pause), what is lost (nothing that was
 *         answered DURABLE), and how the next process becomes the other copy. The loss curve stands beside the one that
 *         the same training has when nothing dies.
 * Build:  cc -O2 -o 12_server_dies 12_server_dies.c mlfab.o -lpthread -lm
 * Run:    build/mlfab-run -n 3 --replicas --set heartbeat_ms=200 --server build/examples/12_server_dies \
 *             build/examples/12_server_dies
 *         The next line, too, lets updates count before the replica has them. A few may be lost, and the curves differ:
 *         ... --set ack=applied --set div_max=inf ...
 *
 * mlfab-run starts this program three times as a worker, once as the server and once as its replica, and a scheduler of
 * its own, which has the third vote on who serves. When the server dies, mlfab-run starts it again, and the
 * copy that serves now sends it the model.
 *
 * The data are drawn from a seed: y = truth . x, with truth[i] = i. In every round the server adds the workers' gradients
 * up (BSP), so worker 0 can compute alone what the model would be.
 *
 * SPDX-License-Identifier: MIT
 */
#define _POSIX_C_SOURCE 200809L
#include "example.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { DIMENSIONS = 12, BATCH = 32, STEPS = 60, DIES_AT = STEPS / 3, SHOWN = 4 };

static const float rate = 0.05f;
static float weights[DIMENSIONS], gradient[DIMENSIONS];
static float alone[DIMENSIONS]; /* worker 0: the model of a training in which nothing dies */

typedef struct row {          /* one step of worker 0 */
  double loss, alone, waited; /* seconds, for a pull and a push */
} row;
static row rows[STEPS];

/* --- the training --- */

/* Adds -rate times the gradient at `w` to `sum`, over the batch that a worker has in a step. Returns the loss. */
static double descend(const float *w, int32_t worker, int step, float *sum) {
  uint64_t seed = (uint64_t)worker * 1000003u + (uint64_t)step * 7919u;
  return example_learn(w, DIMENSIONS, BATCH, -rate, &seed, sum);
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* One step. No call knows of replicas: a pull or push that meets a dead server waits until the replica serves, and the
 * library sends again what the replica does not have. */
static int train_step(mlfab *fabric, int32_t rank, uint32_t workers, int step) {
  const struct timespec computing = {0, 10000000};
  mlfab_buf model = {MLFAB_ALL, 0, weights, DIMENSIONS},
            update = {MLFAB_ALL, 0, gradient, DIMENSIONS};
  float sum[DIMENSIONS] = {0};
  double began = seconds();
  int status = mlfab_pull(fabric, &model, 1, NULL, NULL);
  double waited = seconds() - began;
  if (status) return status;
  nanosleep(&computing, NULL);
  memset(gradient, 0, sizeof gradient);
  rows[step].loss = descend(weights, rank, step, gradient);
  began = seconds();
  status = mlfab_push(fabric, &update, 1, NULL, NULL);
  rows[step].waited = waited + seconds() - began;
  for (uint32_t w = 0; rank == 0 && w < workers; w++) {
    double loss = descend(alone, (int32_t)w, step, sum);
    if (w == 0) rows[step].alone = loss;
  }
  for (int i = 0; i < DIMENSIONS; i++) alone[i] += sum[i];
  return status;
}

static void draw(double loss, char mark, char *line) {
  int column = (int)(40 + 8 * log10(loss + 1e-9));
  line[column < 0 ? 0 : column > 59 ? 59 : column] = mark;
}

/* Returns 0 if the curves are equal, or need not be. */
static int report(int durable, uint64_t lost) {
  double difference = 0;
  int worst = 0;
  printf("step      loss   if nothing died   waited   loss, logarithmic (o; + if nothing died)\n");
  for (int step = 0; step < STEPS; step++) {
    const row *r = &rows[step];
    char line[61];
    difference = fmax(difference, fabs(r->loss - r->alone) / (1e-6 + r->alone));
    if (r->waited > rows[worst].waited) worst = step;
    if (step % SHOWN && r->waited < 0.2) continue;
    memset(line, ' ', 60);
    line[60] = 0;
    draw(r->alone, '+', line);
    draw(r->loss, 'o', line);
    printf("%4d  %8.4f          %8.4f  %5.2f s   |%s\n", step, r->loss, r->alone, r->waited, line);
  }
  printf("Worker 0 waited longest in step %d: %.2f s.\n", worst, rows[worst].waited);
  printf("Of its updates %llu are lost. The curves differ by at most %.2g %%.\n",
         (unsigned long long)lost, 100 * difference);
  return !durable || (lost == 0 && difference < 0.01) ? 0 : 1;
}

static int train(mlfab *fabric, int32_t rank, int durable) {
  mlfab_model_options model = MLFAB_MODEL_OPTIONS_INIT;
  mlfab_buf first = {MLFAB_ALL, 0, weights, DIMENSIONS};
  uint32_t workers = 0;
  model.consistency = (mlfab_sync){.size = sizeof model.consistency, .kind = MLFAB_SYNC_BSP};
  int status = mlfab_rank(fabric, NULL, &workers, NULL);
  if (!status) status = mlfab_tensor_add(fabric, 0, MLFAB_F32, DIMENSIONS);
  if (!status) status = mlfab_model_start(fabric, &model, &first, 1);
  for (int step = 0; step < STEPS && !status; step++)
    status = train_step(fabric, rank, workers, step);
  if (!status) status = mlfab_finish(fabric, 0);
  mlfab_stats stats;
  if (status || rank != 0 || mlfab_get_stats(fabric, &stats, sizeof stats)) return status;
  if (report(durable, stats.updates_lost) == 0) return 0;
  fprintf(stderr, "what was durable is lost\n");
  return MLFAB_ERR_INTERNAL;
}

/* --- what happens to the server --- */

/* The server has no chance to say goodbye. */
static int die(void *user, const mlfab_pull_info *info) {
  (void)user;
  if (info->iteration >= DIES_AT) raise(SIGKILL);
  return 0;
}

/* At a copy of the server: it serves, or the other copy has all that it has. At a worker: some of its updates are lost. */
static void tell(void *user, const mlfab_event_info *info) {
  (void)user;
  if (info->kind == MLFAB_EVENT_SERVES || info->kind == MLFAB_EVENT_IN_SYNC ||
      info->kind == MLFAB_EVENT_UPDATES_LOST)
    fprintf(stderr, "%s\n", info->text);
}

int main(void) {
  mlfab *fabric = NULL;
  mlfab_config config;
  mlfab_error error = {0};
  int32_t rank = -1;
  mlfab_config_init(&config);
  int status = mlfab_config_from_env(&config, &error);
  if (!config.ack && config.replicas) config.ack = MLFAB_ACK_DURABLE;
  config.on_event = tell;
  /* The process that takes its place does not die: it stands by, and nobody pulls from it. */
  if (config.roles == MLFAB_ROLE_SERVER) config.on_pull = die;
  if (!status) status = mlfab_open(&config, &fabric, &error);
  if (status) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  mlfab_rank(fabric, &rank, NULL, NULL);
  status = rank < 0 ? mlfab_serve(fabric, 0) : train(fabric, rank, config.ack == MLFAB_ACK_DURABLE);
  if (status) {
    mlfab_last_error(fabric, &error);
    fprintf(stderr, "%s: %s\n", mlfab_error_name(status), error.text);
  }
  mlfab_close(&fabric);
  return status ? 1 : 0;
}
