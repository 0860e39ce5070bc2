/* mixed.c - a fabric of two builds. Worker 0, which also serves, was built without MLFAB_WITH_SPARSE and
 * MLFAB_WITH_LEND: worker 1 asks for a filter and for a sparse update, and each call returns UNSUPPORTED and names the
 * server and the switch. It asks for a view, and gets a copy. With NO_PUSH worker 0 was built without MLFAB_WITH_PUSH, and
 * worker 1 defines a model. */
#include "mlfab.h"

#include <stdio.h>
#include <string.h>

static int refused(mlfab *ctx, const char *call, int code) {
#ifdef NO_PUSH
  static const char text[] = "at server 0, which was built without MLFAB_WITH_PUSH";
#else
  static const char text[] = "at server 0, which was built without MLFAB_WITH_SPARSE";
#endif
  mlfab_error error = {0};
  mlfab_last_error(ctx, &error);
  if (code == MLFAB_ERR_UNSUPPORTED && strstr(error.text, text) && error.rank == 0) return 0;
  fprintf(stderr, "%s: %s, and not \"%s\": %s\n", call, mlfab_error_name(code), text, error.text);
  return 1;
}

#ifdef NO_PUSH
static int run(mlfab *ctx, int32_t rank) {
  float w[4] = {0};
  mlfab_buf weights = {0, 0, w, 4};
  int code = mlfab_tensor_add(ctx, 0, MLFAB_F32, 4);
  int failed = (rank == 0) != (code == MLFAB_ERR_UNSUPPORTED);
  if (rank == 1) failed += refused(ctx, "model_start", mlfab_model_start(ctx, NULL, &weights, 1));
  return failed || mlfab_barrier(ctx, NULL);
}

int main(void) {
  mlfab *ctx = NULL;
  mlfab_error error;
  int32_t rank = 0;
  if (mlfab_open_env(&ctx, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  int failed = mlfab_rank(ctx, &rank, NULL, NULL) || run(ctx, rank);
  mlfab_close(&ctx);
  return failed;
}
#else
static int ask(mlfab *ctx) {
  mlfab_filter filter = {.size = sizeof filter, .threshold = 0.5};
  float value = 1;
  uint64_t index = 2;
  int failed = refused(ctx, "set_filter", mlfab_set_filter(ctx, 0, &filter));
  return failed +
         refused(ctx, "push_sparse", mlfab_push_sparse(ctx, 0, &index, &value, 1, NULL, NULL));
}

/* 1 unless a view of the weights is a copy. */
static int view(mlfab *ctx, const mlfab_buf *weights) {
  mlfab_view view = {.size = sizeof view};
  int code = mlfab_pull_view(ctx, weights, 1, NULL, &view);
  int failed = code || !view.copied || ((const float *)view.parts[0].data)[3] != 8.0f;
  if (failed) fprintf(stderr, "pull_view: %s, copied: %d\n", mlfab_error_name(code), view.copied);
  return failed || mlfab_view_release(ctx, &view);
}

int main(void) {
  mlfab *ctx = NULL;
  mlfab_error error;
  float w[4] = {0}, u[4] = {1, 2, 3, 4};
  mlfab_buf weights = {0, 0, w, 4}, update = {0, 0, u, 4};
  int code = mlfab_open_env(&ctx, &error);
  if (code) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  int failed = 0;
  int32_t rank = 0;
  code = mlfab_tensor_add(ctx, 0, MLFAB_F32, 4);
  if (!code) code = mlfab_model_start(ctx, NULL, &weights, 1);
  if (!code) code = mlfab_rank(ctx, &rank, NULL, NULL);
  if (!code && rank == 1) failed = ask(ctx);
  if (!code) code = mlfab_push(ctx, &update, 1, NULL, NULL);
  if (!code) code = mlfab_barrier(ctx, NULL);
  if (!code) code = mlfab_pull(ctx, &weights, 1, NULL, NULL);
  if (!code && w[3] != 8.0f) failed = 1;
  if (!code && rank == 1) failed |= view(ctx, &weights);
  if (!code) code = mlfab_barrier(ctx, NULL);
  if (code) {
    mlfab_last_error(ctx, &error);
    fprintf(stderr, "%s\n", error.text);
  }
  mlfab_close(&ctx);
  return code || failed;
}
#endif
