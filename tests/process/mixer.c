/* mixer.c - a worker of soak_mix_test.py: each step has a push, a pull and an allreduce.
 *
 * The model is one F64 tensor of RANKS * COUNT elements. Element e belongs to rank e % RANKS, whose pushes add 1 to it, so the
 * model shows which pushes were lost or applied twice. The consistency model is that of the environment. Lines on stdout:
 *
 *   here RANK           it has joined, and has the model
 *   start, done         around a push; done: it was acknowledged
 *   sum N               after an allreduce, of the most pushes of a worker
 *   told RANK           an allreduce failed, since this worker had died, or was back
 *   dead ROLE RANK      the library says so
 *   stopped             after mlfab_finish, once FOLDER/stop exists
 *   final RANK LEAST MOST   for each rank, once FOLDER/read exists: its smallest and its largest element
 *
 * Usage: mixer FOLDER COUNT [comes]. comes: others train already. */
#include "node.h"

enum { RANKS = 6 };

static uint64_t count, pushes;
static int
    comes; /* this worker has come while the others trained, and has met them in no allreduce yet */
static double *model;

static void event(void *user, const mlfab_event_info *info) {
  (void)user;
  if (info->kind == MLFAB_EVENT_DEAD)
    tell("dead %s %d", info->is_server ? "server" : "worker", info->rank);
}

static void push(const mlfab_buf *update) {
  tell("start");
  must("push", mlfab_push(fabric, update, 1, NULL, NULL));
  pushes++;
  tell("done");
}

/* The most pushes of a worker, or 0 when one that took part had died or was back. */
static uint64_t reduce(void) {
  const mlfab_collective options = {.size = sizeof options, .op = MLFAB_OP_MAX};
  int64_t most = (int64_t)pushes;
  const mlfab_vec vec = {&most, 1};
  int code = mlfab_allreduce_list(fabric, &vec, 1, MLFAB_I64, &options);
  mlfab_error error = {.text = ""};
  if (!code) {
    tell("sum %lld", (long long)most);
    return (uint64_t)most;
  }
  mlfab_last_error(fabric, &error);
  if (code != MLFAB_ERR_PEER_DEAD && code != MLFAB_ERR_AGAIN) exit(failed("allreduce"));
  tell("told %d", error.rank);
  return 0;
}

/* One step. A failure is told to some workers in this step and to others in the next one. So after it a worker pushes, and
 * makes the next allreduce without a pull, which might wait for the others' pushes. Those that are behind push again. */
static void step(const mlfab_buf *all, const mlfab_buf *update) {
  static int failed_before;
  push(update);
  if (!failed_before) must("pull", mlfab_pull(fabric, all, 1, NULL, NULL));
  uint64_t most = reduce();
  failed_before = most == 0;
  if (comes && most) {
    pushes = most; /* its first allreduce has met the others: from now on its rounds are theirs */
    comes = 0;
  }
  while (pushes < most) push(update);
}

static void read_model(mlfab_buf *all) {
  must("last pull", mlfab_pull(fabric, all, 1, NULL, NULL));
  for (uint64_t r = 0; r < RANKS; r++) {
    double least = model[r], most = model[r];
    for (uint64_t i = r; i < count; i += RANKS) {
      if (model[i] < least) least = model[i];
      if (model[i] > most) most = model[i];
    }
    tell("final %d %.0f %.0f", (int)r, least, most);
  }
}

int main(int argc, char **argv) {
  if (argc != 3 && argc != 4) return 2;
  comes = argc == 4;
  mlfab_config config;
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  count = RANKS * strtoull(argv[2], NULL, 10);
  double *ones = zeros(count, sizeof *ones);
  model = zeros(count, sizeof *model);
  configure(&config);
  config.on_event = event;
  open_node(&config);
  for (uint64_t i = (uint64_t)rank; i < count; i += RANKS) ones[i] = 1.0;
  mlfab_buf all = {0, 0, model, count}, update = {0, 0, ones, count};
  must("options", mlfab_model_options_from_env(&options, NULL));
  must("tensor", mlfab_tensor_add(fabric, 0, MLFAB_F64, count));
  must("model", mlfab_model_start(fabric, &options, &all, 1));
  tell("here %d", rank);
  while (!exists(argv[1], "stop")) {
    step(&all, &update);
    nap(5);
  }
  must("finish", mlfab_finish(fabric, 0));
  tell("stopped");
  await_file(argv[1], "read");
  read_model(&all);
  free(ones);
  free(model);
  return close_node(0);
}
