/* kill_worker.c - a worker of kill9_test.py, which is killed and restarted at random times.
 *
 * Each push adds 1.0 to this worker's own element of a small tensor, and to every element of a large one,
 * as one operation: the model shows which pushes were lost, applied twice, or applied in part. The memory of the large one is of
 * mlfab_alloc. Lines on stdout:
 *
 *   pid <pid>              at every start
 *   start                  before a push
 *   done                   after the push was acknowledged
 *   barrier                after a barrier
 *   stopped                after mlfab_finish, once the file <folder>/stop exists
 *   added <updates>        before that, with a scheduler: updates that this process aggregated
 *   final <small elements> <least and largest of the large tensor>
 *                          once <folder>/read exists
 *
 * Usage: kill_worker <folder> <elements of the large tensor>
 *        kill_worker        as a server, whose link is as slow as the workers' */
#include "node.h"

#define LINK 50e6 /* bytes a second */
enum { SMALL = 0, LARGE = 1, PUSHES_A_BARRIER = 7 };

/* Prints the current model. */
static void read_model(mlfab_buf *bufs) {
  const double *small = bufs[SMALL].data;
  const float *large = bufs[LARGE].data;
  must("last pull", mlfab_pull(fabric, bufs, 2, NULL, NULL));
  float least = large[0], most = large[0];
  for (uint64_t i = 0; i < bufs[LARGE].count; i++) {
    if (large[i] < least) least = large[i];
    if (large[i] > most) most = large[i];
  }
  char text[512];
  size_t n = 0;
  for (uint32_t r = 0; r < workers && n < sizeof text - 32; r++)
    n += (size_t)snprintf(text + n, sizeof text - n, " %.0f", small[r]);
  tell("final%s %.1f %.1f", text, (double)least, (double)most);
}

/* All workers run on one host. With a scheduler they report different hosts with slow links, and a long
 * interval lets several updates wait, so that groups form. */
static void spread_out(void) {
  mlfab_schedule schedule;
  mlfab_schedule_init(&schedule);
  schedule.interval_ns = 10 * MS;
  must("set_link", mlfab_set_link(fabric, LINK, LINK));
  must("set_schedule", mlfab_set_schedule(fabric, &schedule));
}

static void tell_added(void) {
  mlfab_stats stats;
  if (!mlfab_get_stats(fabric, &stats, sizeof stats))
    tell("added %llu", (unsigned long long)stats.members_added);
}

static void work(const char *folder, uint64_t elements, int scheduled) {
  double *small = zeros(workers, sizeof *small), *one = zeros(workers, sizeof *one);
  float *large = zeros(elements, sizeof *large);
  void *lent = NULL; /* where the server is on this host, it reads the memory in place */
  must("alloc", mlfab_alloc(fabric, elements * sizeof(float), &lent));
  float *ones = lent;
  one[rank] = 1.0;
  for (uint64_t i = 0; i < elements; i++) ones[i] = 1.0f;
  mlfab_buf model[2] = {{SMALL, 0, small, workers}, {LARGE, 0, large, elements}};
  mlfab_buf update[2] = {{SMALL, 0, one, workers}, {LARGE, 0, ones, elements}};

  must("tensor", mlfab_tensor_add(fabric, SMALL, MLFAB_F64, workers));
  must("tensor", mlfab_tensor_add(fabric, LARGE, MLFAB_F32, elements));
  /* Zeros at every start: only the first process of worker 0 may set the model. */
  must("model_start", mlfab_model_start(fabric, NULL, model, 2));
  if (scheduled) spread_out();
  tell("ready");
  for (int pushes = 1; !exists(folder, "stop"); pushes++) {
    tell("start");
    must("push", mlfab_push(fabric, update, 2, NULL, NULL));
    tell("done");
    if (pushes % PUSHES_A_BARRIER == 0) {
      must("barrier", mlfab_barrier(fabric, NULL));
      tell("barrier");
    }
  }
  must("finish", mlfab_finish(fabric, 0));
  if (scheduled) tell_added();
  tell("stopped");
  while (!exists(folder, "read")) nap(10);
  read_model(model);
  free(small);
  free(large);
  free(one);
}

int main(int argc, char **argv) {
  mlfab_config config;
  if (argc != 3 && argc != 1) return 2;
  if (argc == 3) tell("pid %ld", (long)getpid());
  configure(&config);
  config.timeout_ns = 120000 * MS;
  config.host = argc == 3 ? (uint64_t)config.rank + 1 : 1000;
  open_node(&config);
  if (argc == 1) {
    must("set_link", mlfab_set_link(fabric, LINK, LINK));
    must("serve", mlfab_serve(fabric, 0));
  } else {
    work(argv[1], strtoull(argv[2], NULL, 10), config.scheduler != MLFAB_SCHEDULER_NONE);
  }
  return close_node(0);
}
