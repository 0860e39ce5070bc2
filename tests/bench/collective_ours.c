/* collective_ours.c - mlfab's allreduce: mlfab-run -n N -s 0 bench-collective-ours DIR [alloc]
 *
 * With `alloc` the array is from mlfab_alloc, otherwise it is the caller's own. Exit status 3: the
 * library has no mlfab_alloc. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "collective_common.h"
#include "mlfab.h"

static void require(mlfab *ctx, int code, const char *what) {
  mlfab_error error = {.code = 0};
  if (code == 0) return;
  mlfab_last_error(ctx, &error);
  fprintf(stderr, "bench-collective: %s: %s\n", mlfab_error_name(code), error.text);
  collective_fail("bench-collective-ours", what);
}

static void allreduce(collective_rank *r, size_t count) {
  mlfab *ctx = r->self;
  require(ctx, mlfab_allreduce(ctx, r->data, count, MLFAB_F32, NULL), "allreduce");
}

static float *allocate(mlfab *ctx) {
  void *memory = NULL;
  require(ctx, mlfab_alloc(ctx, COLLECTIVE_BYTES_MAX, &memory), "alloc");
  memset(memory, 0, COLLECTIVE_BYTES_MAX);
  return memory;
}

static void release(mlfab *ctx, int alloc, float *data) {
  if (alloc) {
    require(ctx, mlfab_free(ctx, data), "free");
  } else {
    free(data);
  }
}

int main(int argc, char **argv) {
  collective_rank r = {.allreduce = allreduce};
  mlfab *ctx = NULL;
  mlfab_error error = {.code = 0};
  mlfab_config config;
  int alloc = argc == 3 && strcmp(argv[2], "alloc") == 0;
  if (argc != 2 && !alloc) collective_fail("usage", "bench-collective-ours DIR [alloc]");
  mlfab_config_init(&config);
  if (mlfab_config_from_env(&config, &error) || mlfab_open(&config, &ctx, &error))
    collective_fail("bench-collective-ours", error.text);
  r.self = ctx;
  r.rank = (int)config.rank;
  r.ranks = (int)config.workers;
  r.data = alloc ? allocate(ctx) : collective_memory();
  collective_bind(r.rank, r.ranks);
  collective_serve(&r, argv[1]);
  release(ctx, alloc, r.data);
  return mlfab_close(&ctx) ? 1 : 0;
}
