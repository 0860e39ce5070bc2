/* elastic.c - a worker of a fabric whose servers come and go while it trains in rounds.
 *
 *   elastic SERVERS FILE
 *
 * Every update adds 1 to the elements of its worker's rank. Worker 0 waits until SERVERS servers are here and moves
 * slices to all of them; after 20 more rounds it moves all slices back to server 0 and creates FILE; when the others
 * have gone it ends the training after 20 more rounds. One line per worker:
 *   worker R: rounds N
 * The exit status is not 0 when a call failed, or an element has not grown by N. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { COUNT = 1 << 16, MOST = 16, ROUNDS = 20 };

static int fail(mlfab *fabric, const char *what) {
  mlfab_error error = {.text = ""};
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s\n", what, error.text);
  return 1;
}

/* Worker 0 after a round: 1 when the next one is the last; negative: an error. */
static int lead(mlfab *fabric, uint32_t servers, const char *file) {
  static int phase, rounds;
  uint32_t list[MOST], n = 0;
  if (mlfab_servers(fabric, list, MOST, &n)) return -1;
  if (phase == 0 && n == servers && n <= MOST) {
    if (mlfab_set_servers(fabric, list, n, 0)) return -1;
    phase = 1;
  } else if (phase == 1 && ++rounds == ROUNDS) {
    if (mlfab_set_servers(fabric, list, 1, 0)) return -1;
    FILE *f = fopen(file, "w");
    if (!f || fclose(f)) return -1;
    phase = 2;
  } else if (phase == 2 && n == 1) {
    phase = 3;
    rounds = 0;
  } else if (phase == 3) {
    return ++rounds == ROUNDS;
  }
  return 0;
}

static int work(mlfab *fabric, uint32_t servers, const char *file) {
  static float w[COUNT], u[COUNT];
  int32_t rank;
  uint32_t workers;
  mlfab_buf weights = {0, 0, w, COUNT}, update = {0, 0, u, COUNT};
  const mlfab_model_options bsp = {.size = sizeof bsp, .sync = MLFAB_SYNC_BSP};
  uint64_t rounds = 0, wrong = 0;
  if (mlfab_rank(fabric, &rank, &workers, NULL)) return fail(fabric, "rank");
  for (uint64_t i = (uint64_t)rank; i < COUNT - 1; i += workers) u[i] = 1.0f;
  if (mlfab_tensor_add(fabric, 0, MLFAB_F32, COUNT)) return fail(fabric, "tensor");
  if (mlfab_model_start(fabric, &bsp, &weights, 1)) return fail(fabric, "model");
  while (w[COUNT - 1] < 1.0f) {
    if (mlfab_push(fabric, &update, 1, NULL, NULL)) return fail(fabric, "push");
    if (mlfab_pull(fabric, &weights, 1, NULL, NULL)) return fail(fabric, "pull");
    rounds++;
    int ends = rank == 0 ? lead(fabric, servers, file) : 0;
    if (ends < 0) return fail(fabric, "servers");
    u[COUNT - 1] = (float)ends;
    usleep(2000);
  }
  for (uint64_t i = 0; i < COUNT - 1; i++) wrong += w[i] < (float)rounds || w[i] > (float)rounds;
  if (wrong)
    fprintf(stderr, "worker %d: %llu elements are wrong\n", rank, (unsigned long long)wrong);
  printf("worker %d: rounds %llu\n", rank, (unsigned long long)rounds);
  return wrong != 0;
}

int main(int argc, char **argv) {
  mlfab *fabric = NULL;
  mlfab_error error;
  if (argc < 3) return 2;
  if (mlfab_open_env(&fabric, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  int status = work(fabric, (uint32_t)atoi(argv[1]), argv[2]);
  mlfab_close(&fabric);
  return status;
}
