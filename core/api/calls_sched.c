/* calls_sched.c - changing a fabric's schedule, and describing its plan. */
#include "calls_sched.h"

#include "../sched/sched_role.h"
#include "complete.h"
#include "context.h"

MLFAB__INTERNAL int mlfab__schedule_complete(const mlfab_schedule *given, mlfab_schedule *schedule,
                                             mlfab_error *error) {
  mlfab_schedule_init(schedule);
  if (given->size == 0) return 0;
  if (given->size < offsetof(mlfab_schedule, plan_ahead_ns) || given->size > 1 << 20)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "schedule.size is not set (call mlfab_schedule_init)");
  memcpy(schedule, given, mlfab__min(given->size, sizeof *schedule));
  schedule->size = sizeof *schedule;
  const struct {
    const char *name;
    uint32_t value, most;
  } flags[] = {{"best", schedule->best, 1},
               {"whole", schedule->whole, 1},
               {"no_aggregation", schedule->no_aggregation, 1},
               {"no_distribution", schedule->no_distribution, 1},
               {"reserved", schedule->reserved, 0}};
  for (size_t i = 0; i < MLFAB__COUNT(flags); i++) {
    if (flags[i].value > flags[i].most)
      return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "schedule.%s is %u, must be 0%s", flags[i].name,
                         flags[i].value, flags[i].most ? " or 1" : "");
  }
  if (schedule->delay_bound > 0) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                     "schedule.delay_bound is 0: no update has a delay below 0, all would be "
                     "dropped (MLFAB_UNBOUNDED: no bound)");
}

MLFAB__INTERNAL int mlfab__calls_sched(const mlfab__call_in *e) {
  mlfab_node *node = e->node;
  mlfab_schedule s;
  if (!e->call->options)
    return MLFAB__FAIL(e->error, MLFAB_ERR_ARGUMENT, "set_schedule: schedule is NULL");
  int code = mlfab__schedule_complete(e->call->options, &s, e->error);
  if (code) return code;
  if (node->config.scheduler == MLFAB_SCHEDULER_NONE)
    return MLFAB__FAIL(e->error, MLFAB_ERR_STATE, "set_schedule: this fabric has no scheduler");
  if (s.delay_bound != MLFAB_UNBOUNDED && node->parts->worker->stands &&
      mlfab__sync_rounds(node->parts->worker->define.options.consistency.kind))
    return MLFAB__FAIL(e->error, MLFAB_ERR_UNSUPPORTED,
                       "not supported: a delay bound with rounds, which drop nothing");
  if (node->routes[0].dead)
    return mlfab__error(e->error, MLFAB_ERR_PEER_DEAD, 0, 1, 0, "set_schedule: server 0 is dead");
  if (node->routes[0].link == MLFAB__NO_LINK)
    return mlfab__error(e->error, MLFAB_ERR_AGAIN, 0, 1, 0,
                        "set_schedule: server 0, whose schedule counts, is being called again");
  const mlfab__schedule frame = {.delay_bound = s.delay_bound,
                                 .plan_ahead_ns = s.plan_ahead_ns,
                                 .interval_ns = s.interval_ns,
                                 .best = s.best,
                                 .whole = s.whole,
                                 .no_aggregation = s.no_aggregation,
                                 .no_distribution = s.no_distribution};
  for (uint32_t i = 0; i < node->config.servers; i++)
    MLFAB__POST(&node->parts->worker->port, i, MLFAB__SCHEDULE, schedule, &frame);
  return 0;
}

MLFAB_API int mlfab_node_explain(const mlfab_node *node, char *text, size_t room, size_t *bytes_p) {
  if (!node || (!text && room > 0)) return MLFAB_ERR_ARGUMENT;
  if (!node->is_scheduler) return MLFAB_ERR_STATE;
  mlfab__scheduler_explain(node->parts->scheduler, text, room, bytes_p);
  return 0;
}

MLFAB_API int mlfab_node_set_link(mlfab_node *node, double in, double out, uint64_t now_ns) {
  mlfab_error error;
  if (!node) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 0, &error);
  if (!code && !(mlfab__finite(in) && mlfab__finite(out)))
    code = MLFAB__FAIL(&error, MLFAB_ERR_ARGUMENT, "set_link: a capacity is not a finite number");
  if (!code && node->config.scheduler == MLFAB_SCHEDULER_NONE && !node->is_worker)
    code = MLFAB__FAIL(&error, MLFAB_ERR_STATE,
                       "set_link: this fabric has no scheduler, and this node is no worker");
  if (!code) mlfab__capacity_set(node->parts->capacity, in, out, node->now_ns);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_set_other_traffic(mlfab_node *node, double in, double out, double speed,
                                           uint64_t now_ns) {
  mlfab_error error;
  if (!node) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 0, &error);
  const double all[] = {in, out, speed};
  for (size_t i = 0; !code && i < MLFAB__COUNT(all); i++) {
    if (!mlfab__finite(all[i]) || all[i] < 0.0)
      code = MLFAB__FAIL(&error, MLFAB_ERR_ARGUMENT,
                         "set_other_traffic: a rate is negative or not a finite number");
  }
  if (!code && node->config.scheduler == MLFAB_SCHEDULER_NONE && !node->config.order_by_rate)
    code =
        MLFAB__FAIL(&error, MLFAB_ERR_STATE,
                    "set_other_traffic: links are not measured: there is neither a scheduler nor "
                    "order_by_rate");
  if (!code) mlfab__capacity_other(node->parts->capacity, in, out, speed, node->now_ns);
  return mlfab__node_return(node, code, &error);
}

/* Adds the traffic of one more transport of this node. */
static void calls_sched_add(mlfab_measure *sum, const mlfab_measure *one) {
  sum->elapsed_ns = mlfab__max(sum->elapsed_ns, one->elapsed_ns);
  sum->bytes_in += one->bytes_in;
  sum->bytes_out += one->bytes_out;
  sum->own_in += one->own_in;
  sum->own_out += one->own_out;
  if (one->delivery_in > sum->delivery_in) sum->delivery_in = one->delivery_in;
  if (one->delivery_out > sum->delivery_out) sum->delivery_out = one->delivery_out;
  if (one->nominal > sum->nominal) sum->nominal = one->nominal;
  sum->limited_in &= one->limited_in;
  sum->limited_out &= one->limited_out;
}

MLFAB__INTERNAL void mlfab__calls_sched_measure(mlfab *ctx, uint64_t now) {
  mlfab_measure sum = {.limited_in = 1, .limited_out = 1};
  ctx->measure_ns = mlfab__add_sat(now, ctx->heartbeat_ns / 2);
  for (uint32_t t = 0; t < ctx->ntransports; t++) {
    const mlfab__context_transport *transport = &ctx->transports[t];
    mlfab_measure one = {0};
    if (!transport->table->measure || transport->table->caps & MLFAB_CAP_LOCAL) continue;
    if (transport->table->measure(transport->self, now, &one) == 1) calls_sched_add(&sum, &one);
  }
  if (!sum.elapsed_ns) return;
  mlfab_io_event event = {.kind = MLFAB_IO_MEASURED, .measure = &sum};
  mlfab_node_event(ctx->node, &event, now);
}

MLFAB_API int mlfab_set_schedule(mlfab *ctx, const mlfab_schedule *schedule) {
  SUBMIT_AT_ONCE(SET_SCHEDULE, .options = schedule);
}

MLFAB_API int mlfab_explain(mlfab *ctx, char *text, size_t room, size_t *bytes_p) {
  CONTEXT_CHECK(ctx);
  if (!text && room > 0) return mlfab__context_null(ctx, "explain: text");
  mlfab__context_enter(ctx);
  int code = mlfab_node_explain(ctx->node, text, room, bytes_p);
  if (code)
    MLFAB__FAIL(&ctx->node->requests.last, code, "explain: the scheduler is not on this node");
  return mlfab__context_leave(ctx, code);
}
