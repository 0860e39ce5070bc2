/* traffic.c - a node that only pushes and pulls, to measure a network's throughput.
 *
 *   traffic SECONDS BYTES [IN_FLIGHT]
 *
 * Its place in the fabric comes from MLFAB_* variables. A worker pulls the model, pushes an update of the
 * same size, and repeats, with at most IN_FLIGHT pushes in progress. At the end each node prints one line:
 *   worker R: applied N dropped N seconds S delay_max D delays C0 C1 ... (how many had delay 0, 1, ...)
 *   server N: applied N commits N groups N delay_max D sum S
 * The model starts at zero, and every update adds 1 to one element of its worker's tensor: the server's sum
 * is the number of applied updates. */
#include "node.h"

enum { IN_FLIGHT_MAX = 8, DELAYS = 64 };

static int serve(const mlfab_config *config) {
  mlfab_stats stats;
  must("serve", mlfab_serve(fabric, 0));
  mlfab_get_stats(fabric, &stats, sizeof stats);
  if (config->roles == MLFAB_ROLE_SCHEDULER) {
    printf("scheduler: plans %llu grouped %llu dropped %llu\n",
           (unsigned long long)stats.plans_made, (unsigned long long)stats.plans_grouped,
           (unsigned long long)stats.plans_dropped);
    return 0;
  }
  printf(
      "server: applied %llu dropped %llu commits %llu groups %llu failed %llu spreads %llu "
      "delay_max %llu bytes_in %llu\n",
      (unsigned long long)stats.updates_applied, (unsigned long long)stats.updates_dropped,
      (unsigned long long)stats.commits, (unsigned long long)stats.groups_applied,
      (unsigned long long)stats.groups_failed, (unsigned long long)stats.spreads_answered,
      (unsigned long long)stats.delay_max, (unsigned long long)stats.bytes_received);
  return 0;
}

typedef struct tally {
  uint64_t applied, dropped, delay_max, delays[DELAYS];
} tally;

/* Waits for a push and counts its result. */
static void settle(mlfab_request request, tally *t) {
  mlfab_result result = {.version = 0};
  int code = mlfab_wait(fabric, request, 0, &result);
  if (code == MLFAB_ERR_DROPPED) {
    t->dropped++;
    return;
  }
  must("push", code);
  t->applied++;
  t->delays[result.delay < DELAYS ? result.delay : DELAYS - 1]++;
  if (result.delay > t->delay_max) t->delay_max = result.delay;
}

static int work(double seconds, uint64_t count, uint32_t in_flight) {
  float *weights = zeros(count, sizeof *weights), *update = zeros(count, sizeof *update);
  update[(uint64_t)rank % count] = 1.0f;
  mlfab_buf model = {MLFAB_ALL, 0, weights, count}, gradient = {MLFAB_ALL, 0, update, count};
  mlfab_request pushes[IN_FLIGHT_MAX];
  uint32_t open = 0, oldest = 0;
  tally t = {0};
  must("tensor", mlfab_tensor_add(fabric, 0, MLFAB_F32, count));
  must("model", mlfab_model_start(fabric, NULL, NULL, 0));
  must("barrier", mlfab_barrier(fabric, NULL));
  double began = seconds_now();
  while (seconds_now() - began < seconds) {
    must("pull", mlfab_pull(fabric, &model, 1, NULL, NULL));
    if (open == in_flight) {
      settle(pushes[oldest], &t);
      oldest = (oldest + 1) % IN_FLIGHT_MAX;
      open--;
    }
    mlfab_request *next = &pushes[(oldest + open++) % IN_FLIGHT_MAX];
    must("push_start", mlfab_push_start(fabric, &gradient, 1, NULL, next));
  }
  double took = seconds_now() - began;
  for (; open > 0; open--, oldest = (oldest + 1) % IN_FLIGHT_MAX) settle(pushes[oldest], &t);
  printf("worker %d: applied %llu dropped %llu seconds %.3f delay_max %llu delays", rank,
         (unsigned long long)t.applied, (unsigned long long)t.dropped, took,
         (unsigned long long)t.delay_max);
  for (int i = 0; i < DELAYS; i++) printf(" %llu", (unsigned long long)t.delays[i]);
  printf("\n");
  /* No worker leaves before everything is counted: worker 0 reads the sum. */
  must("barrier", mlfab_barrier(fabric, NULL));
  if (rank == 0) {
    double sum = 0.0;
    must("pull", mlfab_pull(fabric, &model, 1, NULL, NULL));
    for (uint64_t i = 0; i < count; i++) sum += (double)weights[i];
    printf("sum: %.0f\n", sum);
  }
  return 0;
}

int main(int argc, char **argv) {
  double seconds = argc > 1 ? strtod(argv[1], NULL) : 10.0;
  uint64_t count = (argc > 2 ? strtoull(argv[2], NULL, 10) : 4000000) / 4;
  uint32_t in_flight = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 1;
  mlfab_config config;
  if (in_flight < 1 || in_flight > IN_FLIGHT_MAX || count == 0) {
    fprintf(stderr, "usage: traffic SECONDS BYTES [IN_FLIGHT, at most %d]\n", IN_FLIGHT_MAX);
    return 2;
  }
  configure(&config);
  open_node(&config);
  int served = config.roles == MLFAB_ROLE_SERVER || config.roles == MLFAB_ROLE_SCHEDULER;
  return close_node(served ? serve(&config) : work(seconds, count, in_flight));
}
