/* submit.c - a context: the calls that a node carries out. A function of mlfab.h fills a descriptor and calls
 * mlfab__submit. The functions of optional groups are in calls_*.c. */
#include "context.h"

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
  CONTEXT_ENTER(ctx);
  return mlfab__context_leave(ctx, mlfab__submit(ctx, call, waits, request_p, result_p));
}

MLFAB_API int mlfab_cancel(mlfab *ctx, mlfab_request request) {
  CONTEXT_CALL(ctx, mlfab__context_cancel(ctx, request));
}

/* --- the fabric --- */

MLFAB_API int mlfab_barrier(mlfab *ctx, const mlfab_collective *options) {
  SUBMIT(BARRIER, NULL, .options = options);
}

static int submit_test_finished(mlfab *ctx, void *what) {
  (void)what;
  MLFAB__EACH_ROLE(role, ctx->node, finished) if (!role->finished(role->self)) return 0;
  return 1;
}

/* Waits for this worker's updates, then for collectives that others began before they knew of its end. */
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
  return mlfab__context_leave(ctx, code);
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
  return mlfab__context_leave(ctx, code);
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
