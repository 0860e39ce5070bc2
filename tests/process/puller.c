/* puller.c - a worker of kill9_test.py that pulls and views a model which changes all the time, and may be stopped or killed.
 *
 * Worker 0 adds 1.0 to every element after each pull. So what anybody pulls must be uniform, or somebody wrote to memory that was
 * lent to a reader. The server gives up a stopped worker after five beats, one second, if another process wants its number. Lines:
 *
 *   pid <pid>                       once the model has begun
 *   torn <first> <other>            a pull or view that is not uniform
 *   end <pulls> <copied>            at the end, once the file <folder>/stop exists: how many views were copies
 *   dead <rank>                     of the server
 *
 * Usage: puller <folder>
 *        puller             as a server */
#include "node.h"

enum { COUNT = 1 << 20 }; /* 4 MiB: several blocks, of several chunks */

static void uniform(const float *at, uint64_t count, float expected) {
  for (uint64_t i = 0; i < count; i++) {
    if (at[i] == expected) continue;
    tell("torn %g %g", (double)expected, (double)at[i]);
    exit(1);
  }
}

static void look_at(const mlfab_view *view) {
  float expected = *(const float *)view->parts[0].data;
  for (uint32_t i = 0; i < view->nparts; i++)
    uniform(view->parts[i].data, view->parts[i].count, expected);
}

static void work(const char *folder) {
  long pulls = 0, copied = 0;
  float *weights = zeros(COUNT, sizeof *weights), *ones = zeros(COUNT, sizeof *ones);
  for (uint64_t i = 0; i < COUNT; i++) ones[i] = 1.0f;
  mlfab_buf model = {0, 0, weights, COUNT}, update = {0, 0, ones, COUNT};
  mlfab_model_options options;
  mlfab_model_options_init(&options);
  options.consistency.kind = MLFAB_SYNC_ASYNC;
  options.slices = 1; /* so that every pull is of one commit */
  must("tensor", mlfab_tensor_add(fabric, 0, MLFAB_F32, COUNT));
  must("model_start", mlfab_model_start(fabric, &options, &model, 1));
  tell("pid %ld", (long)getpid());
  do {
    mlfab_view view = {.size = sizeof view};
    must("pull", mlfab_pull(fabric, &model, 1, NULL, NULL));
    uniform(weights, COUNT, weights[0]);
    pulls++;
    if (rank == 0) must("push", mlfab_push(fabric, &update, 1, NULL, NULL));
    must("pull_view", mlfab_pull_view(fabric, &model, 1, NULL, &view));
    copied += view.copied;
    look_at(&view);
    must("release", mlfab_view_release(fabric, &view));
  } while (!exists(folder, "stop"));
  tell("end %ld %ld", pulls, copied);
  free(weights);
  free(ones);
}

static void event(void *unused, const mlfab_event_info *info) {
  (void)unused;
  if (info->kind == MLFAB_EVENT_DEAD) tell("dead %d", info->rank);
}

int main(int argc, char **argv) {
  mlfab_config config;
  configure(&config);
  config.heartbeat_ns = 200 * MS;
  if (argc == 1) config.on_event = event;
  open_node(&config);
  if (argc == 1)
    must("serve", mlfab_serve(fabric, 0));
  else
    work(argv[1]);
  return close_node(0);
}
