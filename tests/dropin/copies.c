/* copies.c - two copies of mlfab in one process: one in the program, without scheduling, with exported
 * symbols (-rdynamic), and one in a shared object (-DPLUGIN) built with hidden symbols. They are the two
 * workers of one fabric, and must not interact in any other way. Arguments: the plugin, and the
 * coordinator's address. */
#include "mlfab.h"

#include <stdio.h>

static int wrong(int rank, const char *what, int code, const char *text) {
  fprintf(stderr, "worker %d: %s: %s %s\n", rank, what, mlfab_error_name(code), text);
  return 1;
}

/* Pushes 1 + rank to its own element, and pulls both workers' updates. */
static int work(int rank, const char *coordinator, int link_code) {
  mlfab *ctx = NULL;
  mlfab_error error;
  mlfab_config config;
  float w[2] = {0}, u[2] = {0};
  mlfab_buf weights = {0, 0, w, 2}, update = {0, 0, u, 2};
  mlfab_config_init(&config);
  config.timeout_ns = 20000000000u;
  config.rank = rank;
  config.workers = 2;
  snprintf(config.coordinator, sizeof config.coordinator, "%s", coordinator);
  int code = mlfab_open(&config, &ctx, &error);
  if (code) return wrong(rank, "open", code, error.text);
  u[rank] = 1.0f + (float)rank;
  code = mlfab_tensor_add(ctx, 0, MLFAB_F32, 2);
  if (!code) code = mlfab_model_start(ctx, NULL, &weights, 1);
  int told = code ? 0 : mlfab_set_link(ctx, 1e9, 1e9);
  if (!code && told != link_code) return wrong(rank, "set_link", told, "");
  if (!code) code = mlfab_push(ctx, &update, 1, NULL, NULL);
  if (!code) code = mlfab_barrier(ctx, NULL);
  if (!code) code = mlfab_pull(ctx, &weights, 1, NULL, NULL);
  if (!code) code = mlfab_barrier(ctx, NULL);
  if (code && !mlfab_last_error(ctx, &error)) return wrong(rank, "call", code, error.text);
  code = mlfab_close(&ctx);
  if (code) return wrong(rank, "close", code, "");
  return w[0] == 1.0f && w[1] == 2.0f ? 0 : wrong(rank, "the model is another", 0, "");
}

#ifdef PLUGIN
int plugin_run(const char *coordinator);
__attribute__((visibility("default"))) int plugin_run(const char *coordinator) {
  return work(1, coordinator, 0);
}
#else
#include <dlfcn.h>
#include <pthread.h>

typedef int run_fn(const char *coordinator);

static struct {
  run_fn *run;
  const char *coordinator;
  int failed;
} other;

static void *run_other(void *unused) {
  other.failed = other.run(other.coordinator);
  return unused;
}

int main(int argc, char **argv) {
  pthread_t thread;
  union {
    void *object;
    run_fn *function;
  } found = {NULL};
  void *plugin = argc == 3 ? dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) : NULL;
  if (plugin) found.object = dlsym(plugin, "plugin_run");
  if (!found.object) return fprintf(stderr, "copies: %s\n", argc == 3 ? dlerror() : "usage"), 1;
  other.run = found.function;
  other.coordinator = argv[2];
  if (pthread_create(&thread, NULL, run_other, NULL)) return 1;
  int failed = work(0, argv[2], MLFAB_ERR_UNSUPPORTED);
  pthread_join(thread, NULL);
  return failed | other.failed;
}
#endif
