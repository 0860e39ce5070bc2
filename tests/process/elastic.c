/* elastic.c - a worker of a fabric that grows or shrinks while it trains.
 *
 * Every update adds 1 to the elements of its worker's rank, so that a worker sees in the model how often each of its updates was
 * applied to each slice. The exit status is not 0 when a call failed, or an own element has not grown by the number of updates.
 *
 *   elastic join WORKERS [COUNT]
 * Workers join. All train until WORKERS ranks have made 20 updates each, as they see in the model; then they call an allreduce
 * until WORKERS workers are in it. COUNT: elements, for a worker that comes with another model. JOINER_HEIR=1: a worker of this
 * rank was killed while it pushed. Servers decide separately, so its last update may be in some elements, at first or later, and
 * not in others. Lines: began; worker R: updates N mean X
 *
 *   elastic loop WORKERS
 * Workers join a loop of a push, a pull and an allreduce. It ends after 20 steps in which WORKERS workers take part. Lines: as
 * for join.
 *
 *   elastic servers SERVERS FOLDER
 * Servers join and leave. Worker 0 waits until SERVERS servers are here and moves slices to all of them; after 20 more rounds it
 * moves all slices back to server 0 and makes FOLDER/emptied; when the others have gone it ends the training after 20 more
 * rounds. A line: worker R: updates N
 *
 *   elastic move MOVES
 * Start it with mlfab-run -s 4. Worker 0 changes the set of servers that hold the model so often, from one to all and back, while
 * all push and pull. A line: worker R: updates N */
#include "node.h"

enum { COUNT = 1 << 16, MOST = 16, UPDATES = 20, ROUNDS = 20 };

static uint64_t count = COUNT, updates;
static float *w, *u, *before; /* the model, the update, and the model at the beginning */

static void begin(const mlfab_model_options *options) {
  w = zeros(count, sizeof *w);
  u = zeros(count, sizeof *u);
  before = zeros(count, sizeof *before);
  mlfab_buf weights = {0, 0, w, count};
  for (uint64_t i = (uint64_t)rank; i < count - 1; i += workers) u[i] = 1.0f;
  must("tensor", mlfab_tensor_add(fabric, 0, MLFAB_F32, count));
  must("model", mlfab_model_start(fabric, options, &weights, 1));
  memcpy(before, w, count * sizeof *w); /* by a worker that had this rank before */
}

static void push(void) {
  const mlfab_buf update = {0, 0, u, count};
  must("push", mlfab_push(fabric, &update, 1, NULL, NULL));
  updates++;
}

static void pull(void) {
  mlfab_buf weights = {0, 0, w, count};
  must("pull", mlfab_pull(fabric, &weights, 1, NULL, NULL));
}

/* The last element says that the training ends; it belongs to nobody. */
static int wrong(int one_more) {
  uint64_t n = 0;
  for (uint64_t i = (uint64_t)rank; i < count - 1; i += workers) {
    float grown = w[i] - before[i];
    n += grown != (float)updates && !(one_more && grown == (float)(updates + 1));
  }
  if (n) fprintf(stderr, "worker %d: %llu elements are wrong\n", rank, (unsigned long long)n);
  return n != 0;
}

/* Ranks whose elements show enough updates. */
static uint32_t trained(void) {
  uint32_t n = 0;
  for (uint32_t r = 0; r < workers; r++) n += w[r] >= (float)UPDATES;
  return n;
}

static int join(uint32_t enough) {
  float who[2] = {0, 0}, mean = (float)rank;
  const mlfab_sync async = {.size = sizeof async, .kind = MLFAB_SYNC_ASYNC};
  begin(NULL);
  tell("began");
  while (trained() < enough) {
    push();
    pull();
    nap(2);
  }
  /* Workers that go on for a little must not wait for this one. With BSP all see the same model and stop together. */
  const char *kind = getenv("MLFAB_CONSISTENCY");
  if (kind && !strcmp(kind, "ssp")) must("set_sync", mlfab_set_sync(fabric, &async, MLFAB_ALL, 0));
  while (who[1] < (float)enough) {
    who[0] = (float)rank;
    who[1] = 1.0f;
    must("allreduce", mlfab_allreduce(fabric, who, 2, MLFAB_F32, NULL));
  }
  must("mean", mlfab_allreduce_mean(fabric, &mean, 1));
  pull();
  printf("worker %d: updates %llu mean %g\n", rank, (unsigned long long)updates, (double)mean);
  return wrong(getenv("JOINER_HEIR") != NULL);
}

static int loop(uint32_t enough) {
  float mean = (float)rank;
  begin(NULL);
  tell("began");
  for (int steps = 0; steps < ROUNDS;) {
    float here = 1.0f;
    push();
    pull();
    must("allreduce", mlfab_allreduce(fabric, &here, 1, MLFAB_F32, NULL));
    steps += here == (float)enough;
    nap(2);
  }
  must("mean", mlfab_allreduce_mean(fabric, &mean, 1));
  pull();
  printf("worker %d: updates %llu mean %g\n", rank, (unsigned long long)updates, (double)mean);
  return wrong(0);
}

/* Worker 0 after a round. Does the training end with the next one? */
static int lead(uint32_t enough, const char *folder) {
  static int phase, rounds;
  uint32_t list[MOST], n = 0;
  must("servers", mlfab_servers(fabric, list, MOST, &n));
  if (phase == 0 && n == enough && n <= MOST) {
    must("set_servers", mlfab_set_servers(fabric, list, n, 0));
    phase = 1;
  } else if (phase == 1 && ++rounds == ROUNDS) {
    must("set_servers", mlfab_set_servers(fabric, list, 1, 0));
    make_file(folder, "emptied");
    phase = 2;
  } else if (phase == 2 && n == 1) {
    phase = 3;
    rounds = 0;
  } else if (phase == 3) {
    return ++rounds == ROUNDS;
  }
  return 0;
}

/* The next set of servers in turn: all, two, all, one. Is it the last? */
static int move(int moves) {
  static const uint32_t order[] = {0, 1, 2, 3, 4, 5, 6, 7}, two[] = {1, 0};
  static int turn;
  turn++;
  if (turn % 4 == 2)
    must("set_servers", mlfab_set_servers(fabric, two, 2, 0));
  else
    must("set_servers", mlfab_set_servers(fabric, order, turn % 2 ? servers : 1, 0));
  return turn == moves;
}

/* All workers end when they see that worker 0 has added to the last element. */
static int train(int most, const char *folder) {
  const mlfab_model_options bsp = {.size = sizeof bsp, .sync = MLFAB_SYNC_BSP};
  const mlfab_model_options one = {.size = sizeof one, .active = 1, .slices = 64};
  begin(folder ? &bsp : &one);
  while (w[count - 1] < 1.0f) {
    push();
    if (folder || updates % 3 == 0) pull();
    if (rank == 0 && folder) u[count - 1] = (float)lead((uint32_t)most, folder);
    if (rank == 0 && !folder && updates % 8 == 7 && move(most)) u[count - 1] = 1.0f;
    if (folder) nap(2);
  }
  if (!folder) must("barrier", mlfab_barrier(fabric, NULL));
  pull();
  printf("worker %d: updates %llu\n", rank, (unsigned long long)updates);
  return wrong(0);
}

int main(int argc, char **argv) {
  if (argc < 3) return 2;
  int number = atoi(argv[2]);
  if (!strcmp(argv[1], "join") && argc > 3) count = strtoull(argv[3], NULL, 10);
  open_node(NULL);
  if (!strcmp(argv[1], "join")) return close_node(join((uint32_t)number));
  if (!strcmp(argv[1], "loop")) return close_node(loop((uint32_t)number));
  return close_node(train(number, argc > 3 ? argv[3] : NULL));
}
