/* submit.c - a context: the calls that a node carries out. A function of mlfab.h fills a descriptor and calls
 * mlfab__submit. The functions of optional groups are in calls_*.c. */
#include "../worker/worker.h"
#include "context.h"

#include <errno.h>
#include <stdio.h>

MLFAB__INTERNAL int mlfab__context_begin(mlfab *ctx, const mlfab_call *call, int waits,
                                         mlfab_request *request_p, mlfab__collective *shared) {
  int taken = 0;
  int code = ctx->stager ? ctx->stager->begin(ctx, call, waits, request_p, &taken) : 0;
  if (taken || code) return code;
  return mlfab__node_submit(ctx->node, call, ctx->now_ns, request_p, shared);
}

MLFAB__INTERNAL int mlfab__submit(mlfab *ctx, const mlfab_call *call, int waits,
                                  mlfab_request *request_p, mlfab_result *result_p) {
  mlfab_request request = 0;
  if (waits && mlfab__context_is_told(ctx)) return MLFAB_ERR_STATE;
  int code = mlfab__context_begin(ctx, call, waits, waits ? &request : request_p, NULL);
  if (!code && request) return mlfab__context_await(ctx, request, 0, result_p);
  return mlfab__context_sent(ctx, code);
}

MLFAB__INTERNAL int mlfab__submit_call(mlfab *ctx, const mlfab_call *call, int waits,
                                       mlfab_request *request_p, mlfab_result *result_p) {
  CONTEXT_CHECK(ctx);
  mlfab__context_enter(ctx);
  int code = mlfab__submit(ctx, call, waits, request_p, result_p);
  mlfab__context_leave(ctx);
  return code;
}

/* --- model, push, pull --- */

MLFAB_API int mlfab_tensor_add(mlfab *ctx, uint32_t id, int dtype, uint64_t count) {
  SUBMIT_AT_ONCE(TENSOR_ADD, .tensor = id, .dtype = dtype, .count = count);
}

static int submit_model(mlfab *ctx, const mlfab_model_options *options, const mlfab_buf *bufs,
                        uint32_t n) {
  SUBMIT(MODEL_START, NULL, .options = options, .bufs = bufs, .n = n);
}

/* With options and filter from the environment, after mlfab_open_env. */
static int submit_model_from_env(mlfab *ctx, const mlfab_buf *bufs, uint32_t n) {
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  mlfab_filter filter = {.size = sizeof filter};
  const mlfab_filter none = filter;
  mlfab_error error;
  int code = mlfab_model_options_from_env(&options, &error);
  if (!code) code = mlfab_filter_from_env(&filter, &error);
  if (code) {
    mlfab__context_enter(ctx);
    ctx->node->requests.last = error;
    mlfab__context_leave(ctx);
    return code;
  }
  code = submit_model(ctx, &options, bufs, n);
  if (!code && memcmp(&filter, &none, sizeof filter) != 0)
    code = mlfab_set_filter(ctx, MLFAB_ALL, &filter);
  return code;
}

MLFAB_API int mlfab_model_start(mlfab *ctx, const mlfab_model_options *options,
                                const mlfab_buf *bufs, uint32_t n) {
  CONTEXT_CHECK(ctx);
  return !options && ctx->from_env ? submit_model_from_env(ctx, bufs, n)
                                   : submit_model(ctx, options, bufs, n);
}

/* For the most frequent calls. It sets every member by name: compilers clear the rest of a large struct with an
 * instruction that takes longer than the call. */
static int submit_transfer(mlfab *ctx, uint32_t kind, const void *options, const mlfab_buf *bufs,
                           uint32_t n, int waits, mlfab_request *request_p,
                           mlfab_result *result_p) {
  mlfab_call call;
  call.size = sizeof call;
  call.kind = kind;
  call.options = options;
  call.bufs = bufs;
  call.n = n;
  call.tensor = call.server = call.id = 0;
  call.dtype = call.root = 0;
  call.vecs = NULL;
  call.servers = NULL;
  call.data = call.info_p = NULL;
  call.counts = call.indices = NULL;
  call.id_p = NULL;
  call.count = call.timeout_ns = 0;
  return mlfab__submit_call(ctx, &call, waits, request_p, result_p);
}

MLFAB_API int mlfab_push(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                         const mlfab_push_options *options, mlfab_result *result_p) {
  return submit_transfer(ctx, MLFAB_CALL_PUSH, options, bufs, n, 1, NULL, result_p);
}

MLFAB_API int mlfab_push_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                               const mlfab_push_options *options, mlfab_request *request_p) {
  return submit_transfer(ctx, MLFAB_CALL_PUSH, options, bufs, n, 0, request_p, NULL);
}

MLFAB_API int mlfab_pull(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                         const mlfab_pull_options *options, mlfab_result *result_p) {
  return submit_transfer(ctx, MLFAB_CALL_PULL, options, bufs, n, 1, NULL, result_p);
}

MLFAB_API int mlfab_pull_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                               const mlfab_pull_options *options, mlfab_request *request_p) {
  return submit_transfer(ctx, MLFAB_CALL_PULL, options, bufs, n, 0, request_p, NULL);
}

MLFAB_API int mlfab_cancel(mlfab *ctx, mlfab_request request) {
  CONTEXT_CALL(ctx, mlfab__context_cancel(ctx, request));
}

MLFAB_API int mlfab_push_status(mlfab *ctx, uint64_t seq, int *status_p) {
  CONTEXT_CALL(ctx, mlfab_node_push_status(ctx->node, seq, status_p));
}

/* --- the fabric --- */

MLFAB_API int mlfab_barrier(mlfab *ctx, const mlfab_collective *options) {
  SUBMIT(BARRIER, NULL, .options = options);
}

static int submit_test_finished(mlfab *ctx, void *what) {
  (void)what;
  return mlfab__roles_finished(ctx->node);
}

/* Waits for this worker's updates, then for collectives that others began before they knew. */
MLFAB_API int mlfab_finish(mlfab *ctx, uint64_t timeout_ns) {
  const mlfab_call call = {
      .size = sizeof call, .kind = MLFAB_CALL_FINISH, .timeout_ns = timeout_ns};
  CONTEXT_CHECK(ctx);
  uint64_t start = mlfab__context_enter(ctx);
  uint64_t deadline = mlfab__add_sat(start, timeout_ns ? timeout_ns : ctx->timeout_ns);
  int code = mlfab__submit(ctx, &call, 1, NULL, NULL);
  if (!code && !mlfab__context_until(ctx, deadline, submit_test_finished, NULL)) {
    code = MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_TIMEOUT,
                       "finish: collectives that other workers began before are not over");
    code = mlfab__context_in_vain(ctx, code);
  }
  mlfab__context_leave(ctx);
  return code;
}

MLFAB_API int mlfab_set_sync(mlfab *ctx, const mlfab_sync *sync, uint32_t server, uint32_t tensor,
                             uint64_t timeout_ns) {
  SUBMIT(SET_SYNC, NULL, .options = sync, .server = server, .tensor = tensor,
         .timeout_ns = timeout_ns);
}

MLFAB_API int mlfab_set_link(mlfab *ctx, double in_bytes_per_s, double out_bytes_per_s) {
  CONTEXT_CALL(ctx, mlfab_node_set_link(ctx->node, in_bytes_per_s, out_bytes_per_s, ctx->now_ns));
}

MLFAB_API int mlfab_set_other_traffic(mlfab *ctx, double in_bytes_per_s, double out_bytes_per_s,
                                      double speed_bytes_per_s) {
  CONTEXT_CALL(ctx, mlfab_node_set_other_traffic(ctx->node, in_bytes_per_s, out_bytes_per_s,
                                                 speed_bytes_per_s, ctx->now_ns));
}

MLFAB_API int mlfab_log(mlfab *ctx, int level, const char *line) {
  char clean[512];
  size_t n = 0;
  CONTEXT_CHECK(ctx);
  if (!line) return mlfab__context_null(ctx, "log: line");
  for (; line[n] && n < sizeof clean - 1; n++)
    clean[n] = (unsigned char)line[n] < 32 || line[n] == 127 ? '?' : line[n];
  clean[n] = 0;
  mlfab__context_enter(ctx);
  int code = level <= (int)ctx->log_level;
  if (level < MLFAB_LOG_ERROR || level > MLFAB_LOG_DEBUG)
    code = MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_ARGUMENT, "log: level %d", level);
  else
    mlfab__log(&ctx->node->env, level, "%s", clean);
  mlfab__context_leave(ctx);
  return code;
}

MLFAB_API int mlfab_barrier_start(mlfab *ctx, const mlfab_collective *options,
                                  mlfab_request *request_p) {
  SUBMIT_START(BARRIER, request_p, .options = options);
}

/* --- calls that were left out --- */

MLFAB__INTERNAL int mlfab__error_without(mlfab_error *error, const char *what) {
  return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED, "mlfab was compiled without %s", what);
}

MLFAB__INTERNAL int mlfab__node_without(mlfab_node *node, const char *what) {
  if (!node) return MLFAB_ERR_ARGUMENT;
  return mlfab__error_without(&node->requests.last, what);
}

MLFAB__INTERNAL int mlfab__context_without(mlfab *ctx, const char *what) {
  CONTEXT_LOOK(ctx, mlfab__node_without(ctx->node, what));
}

/* --- saving --- */

/* Writes the safetensors header: one JSON object with offsets into the data behind it. The data have the layout of the
 * flat model, where every element is aligned. Returns its bytes. */
static size_t submit_save_header(const mlfab__layout *layout, char *text, size_t room) {
  size_t at = 0;
  for (uint32_t i = 0; i < layout->ntensors; i++) {
    const mlfab__tensor *t = &layout->tensors[i];
    const char *name = t->dtype == MLFAB_F32 ? "F32" : t->dtype == MLFAB_F64 ? "F64" : "I64";
    int n = snprintf(text ? text + at : NULL, text ? room - at : 0,
                     "%s\"%u\":{\"dtype\":\"%s\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}",
                     i ? "," : "{", t->id, name, (unsigned long long)t->count,
                     (unsigned long long)t->offset, (unsigned long long)(t->offset + t->bytes));
    at += (size_t)n;
  }
  if (text) memcpy(text + at, "}", 2);
  return at + 1;
}

MLFAB_API int mlfab_save(mlfab *ctx, const char *path) {
  CONTEXT_CHECK(ctx);
  if (!path) return mlfab__context_null(ctx, "save: path");
  mlfab__context_enter(ctx);
  const mlfab__worker *worker = ctx->node->parts->worker;
  mlfab_error *last = &ctx->node->requests.last;
  int code = 0;
  if (!worker || !worker->stands || worker->define.options.ghost) {
    code = MLFAB__FAIL(last, MLFAB_ERR_STATE, "save: there is no model with bytes here");
    mlfab__context_leave(ctx);
    return code;
  }
  const mlfab__layout *layout = &worker->layout;
  size_t header = submit_save_header(layout, NULL, 0), padded = (header + 7) / 8 * 8;
  size_t bytes = 8 + padded + layout->bytes;
  uint8_t *file = mlfab__alloc_aligned(&ctx->env, bytes + 1);
  mlfab_buf *bufs = mlfab__alloc_array(&ctx->env, layout->ntensors, sizeof *bufs);
  if (!file || !bufs) code = MLFAB__FAIL(last, MLFAB_ERR_MEMORY, "save: out of memory");
  if (!code) {
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)padded >> (8 * i));
    submit_save_header(layout, (char *)file + 8, padded + 1);
    memset(file + 8 + header, ' ', padded - header);
    for (uint32_t i = 0; i < layout->ntensors; i++) {
      const mlfab__tensor *t = &layout->tensors[i];
      bufs[i].tensor = t->id;
      bufs[i].count = t->count;
      bufs[i].data = file + 8 + padded + t->offset;
    }
    const mlfab_call pull = {
        .size = sizeof pull, .kind = MLFAB_CALL_PULL, .bufs = bufs, .n = layout->ntensors};
    code = mlfab__submit(ctx, &pull, 1, NULL, NULL);
  }
  pthread_mutex_unlock(&ctx->lock); /* others go on while it writes */
  errno = 0;
  int failed = !code && ctx->hooks.store(ctx->hooks.user, path, file, bytes), number = errno;
  pthread_mutex_lock(&ctx->lock);
  if (failed)
    code = MLFAB__FAIL(last, MLFAB_ERR_IO, "save: '%.200s' cannot be written: %s", path,
                       number ? mlfab__reason(number) : "env.store failed");
  mlfab__free(&ctx->env, bufs, layout->ntensors * sizeof *bufs);
  mlfab__free_aligned(&ctx->env, file, bytes + 1);
  mlfab__context_leave(ctx);
  return code;
}
