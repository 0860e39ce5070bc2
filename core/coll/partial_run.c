/* partial_run.c - the communicator: runs partial reductions, round by round. See comm.h for the communicator, partial.h
 * for a round and a member's state.
 *
 * There are two runs, by parity of the round. The runner arms a round's run as soon as the round two before it is over
 * and messages of that round borrow nothing. So a worker takes part even if it does not call. The run of a round has
 * the number round - base + 1, where base is the first round of the epoch.
 *
 * An epoch begins with run 0, an allreduce (MAX) of the marks (partial.h). From them each member knows if its data in
 * the round, or flush, that a failure ended is in a result that some member has. An object's first epoch needs no such
 * run: all members begin with 0. A flush that is called meanwhile begins after the run.
 *
 * Closing waits for the round that has taken data here, and for its borrowed parts: all members have given to that
 * round, so it ends by itself. If a round has not taken yet, it fails when others begin it, and names this worker.
 *
 * Invariants. (1) A round's run takes only when the round before is over here (partial.h), so rounds are delivered in
 * order. (2) After its request has ended, a call's buffers are not touched.
 * (3) During a flush no call is open, and rounds leave the flushed data alone. A flush that
 * ends without a failure has succeeded; one that fails here counts as carried out if the next epoch's marks say that
 * another member has its result. */
#include "partial_run.h"

#include "partial.h"

#include <stdio.h>

struct mlfab__partial_run {
  mlfab__comm *comm;
  mlfab__comm_object object;
  uint32_t refuse_nan;
  uint64_t signature;
  mlfab__partial partial;
  mlfab__engine_run runs[2]; /* rounds, by parity */
  mlfab__engine_run settle;
  mlfab_vec vecs[2][2], settle_vec;
  uint64_t base;         /* the epoch's first round */
  uint64_t armed;        /* lower rounds have been armed in this epoch, or are over */
  uint32_t epoch;        /* 0: none stands */
  uint8_t known;         /* it has been through an epoch */
  mlfab_request request; /* request of the waiting call; 0: none */
  mlfab_partial_info *info_p;
  mlfab_request flush; /* 0: none */
  void *flush_data;    /* destination of the flush */
};

/* --- rounds --- */

static void partial_run_fail(const mlfab__partial_run *e, int code) {
  mlfab__comm_fail(e->comm, code, MLFAB_NO_RANK, "a partial reduction: worker %u: %s",
                   e->comm->rank, mlfab_error_text(code));
}

static void partial_run_arm(const mlfab__partial_run *e, mlfab__engine_run *run) {
  int code = mlfab__engine_arm(e->comm, run, e->comm->now_ns);
  if (code && code != MLFAB_ERR_STATE) partial_run_fail(e, code);
}

/* Arms the runs that may be armed, and triggers the operations that are due. */
static void partial_run_go_on(mlfab__partial_run *e) {
  mlfab__comm *comm = e->comm;
  mlfab__partial *partial = &e->partial;
  while (partial->settled && !e->object.closing && !comm->failing && !e->runs[e->armed & 1].armed) {
    mlfab__engine_run *run = &e->runs[e->armed & 1];
    run->number = e->armed++ - e->base + 1;
    partial_run_arm(e, run);
  }
  mlfab__engine_run *open = &e->runs[partial->over & 1];
  if (!partial->settled || !open->armed || open->number != partial->over - e->base + 1) return;
  uint32_t op = mlfab__partial_trigger(partial);
  int take = mlfab__partial_may_take(partial);
  /* If a round ends meanwhile, it calls this function again. */
  if (take) mlfab__engine_trigger(comm, open, partial->plan.take, comm->now_ns);
  if (op != MLFAB__DAG_NONE) mlfab__engine_trigger(comm, open, op, comm->now_ns);
}

static void partial_run_finish(mlfab__partial_run *e) {
  mlfab_request request = e->request;
  mlfab_partial_info *info = e->info_p;
  e->request = 0;
  e->info_p = NULL;
  if (info) {
    uint32_t size = info->size;
    memcpy(info, &e->partial.answer, mlfab__min(size, sizeof *info));
    info->size = size;
  }
  mlfab__comm_succeed(e->comm, request);
}

static int partial_run_compute(void *self, mlfab__engine_run *run, const mlfab__dag_op *op) {
  mlfab__partial_run *e = self;
  mlfab__partial *partial = &e->partial;
  int answered = mlfab__partial_compute(partial, &run->dag, e->base + run->number - 1, op->code);
  if (answered) partial_run_finish(e);
  if (op->code != MLFAB__PARTIAL_DELIVER) return 0;
  e->comm->rounds++;
  e->comm->round = mlfab__max(e->comm->round, partial->over);
  partial_run_go_on(e);
  return 0;
}

/* --- epochs --- */

static void partial_run_free(void *self) {
  mlfab__partial_run *e = self;
  mlfab__env *env = e->comm->env;
  for (uint32_t i = 0; i < 2; i++) mlfab__dag_free(&e->runs[i].dag);
  mlfab__dag_free(&e->settle.dag);
  mlfab__partial_free(&e->partial);
  mlfab__free(env, e, sizeof *e);
}

/* Returns 1 if a round is under way that ends by itself. */
static int partial_run_ends(const mlfab__partial_run *e) {
  if (e->partial.settled && e->partial.taken) return 1;
  for (uint32_t i = 0; i < 2; i++)
    if (e->runs[i].armed && !e->runs[i].running) return 1;
  return 0;
}

static void partial_run_round_over(void *self, int status) {
  mlfab__partial_run *e = self;
  if (status) return;
  if (!e->object.closing) {
    partial_run_go_on(e);
  } else if (!partial_run_ends(e)) {
    mlfab__comm_object_bury(e->comm, &e->object);
  }
}

/* Continues after all members know the base. */
static void partial_run_settled(mlfab__partial_run *e) {
  int code = mlfab__partial_settle(&e->partial, e->epoch);
  if (code) {
    partial_run_fail(e, code);
    return;
  }
  e->base = e->armed = e->partial.over;
  e->comm->round = mlfab__max(e->comm->round, e->base);
  partial_run_go_on(e);
  mlfab__comm_go_on(e->comm);
}

static void partial_run_settle_over(void *self, int status) {
  mlfab__partial_run *e = self;
  if (!status && !e->object.closing) partial_run_settled(e);
}

static int partial_run_build_settle(mlfab__partial_run *e) {
  const mlfab__comm *comm = e->comm;
  const mlfab__algorithm_task task = {.kind = MLFAB__COLLECTIVE_ALLREDUCE,
                                      .algorithm = MLFAB_ALGORITHM_DOUBLING,
                                      .members = comm->members,
                                      .me = comm->me,
                                      .width = sizeof(int64_t),
                                      .count = sizeof e->partial.marks / sizeof(int64_t),
                                      .after = MLFAB__DAG_NONE};
  uint32_t end, tag, culprit;
  mlfab__dag_clear(&e->settle.dag);
  int code = mlfab__algorithm_build(&e->settle.dag, &task, &end, &tag);
  return code ? code : mlfab__dag_seal(&e->settle.dag, &culprit);
}

/* Builds the task graphs for these members. */
static int partial_run_build(mlfab__partial_run *e) {
  const mlfab__comm *comm = e->comm;
  mlfab__partial_begin(&e->partial, comm->members, comm->me, comm->ranks);
  mlfab__algorithm_task task = mlfab__partial_task(&e->partial);
  uint8_t algorithm = mlfab__comm_choose(comm, &task);
  int code = 0;
  for (uint32_t i = 0; i < 2 && !code; i++) {
    code = mlfab__partial_build(&e->partial, &e->runs[i].dag, algorithm);
    e->vecs[i][0] = (mlfab_vec){e->partial.data[i], e->partial.bytes};
    e->vecs[i][1] = (mlfab_vec){e->partial.bitmap[i], sizeof e->partial.bitmap[i]};
  }
  return code ? code : partial_run_build_settle(e);
}

static void partial_run_fill_run(mlfab__partial_run *e, mlfab__engine_run *run,
                                 uint64_t signature) {
  run->channel = e->object.channel;
  run->signature = signature;
  run->self = e;
  run->over = partial_run_round_over;
}

static void partial_run_fill_runs(mlfab__partial_run *e) {
  const mlfab__partial_spec *spec = &e->partial.spec;
  for (uint32_t i = 0; i < 2; i++) {
    mlfab__engine_run *run = &e->runs[i];
    partial_run_fill_run(e, run, e->signature);
    run->eager = e->partial.bytes <= MLFAB__COMM_EAGER;
    run->dtype = spec->dtype;
    run->op = MLFAB_OP_SUM;
    run->width = spec->width;
    run->compute = partial_run_compute;
    run->spaces[MLFAB__PARTIAL_DATA] = (mlfab__engine_space){&e->vecs[i][0]};
    run->spaces[MLFAB__PARTIAL_BITMAP] = (mlfab__engine_space){&e->vecs[i][1]};
  }
  partial_run_fill_run(e, &e->settle, e->signature + 1);
  e->settle.eager = 1;
  e->settle.dtype = MLFAB_I64;
  e->settle.op = MLFAB_OP_MAX;
  e->settle.width = sizeof(int64_t);
  e->settle.over = partial_run_settle_over;
  e->settle_vec = (mlfab_vec){&e->partial.marks, sizeof e->partial.marks};
  e->settle.spaces[0] = (mlfab__engine_space){&e->settle_vec};
}

static void partial_run_begin(void *self) {
  mlfab__partial_run *e = self;
  int fresh = !e->known;
  if (e->object.closing || e->epoch == e->comm->epoch) return;
  e->epoch = e->comm->epoch;
  e->known = 1;
  partial_run_fill_runs(e);
  int code = partial_run_build(e);
  if (code) {
    partial_run_fail(e, code);
    return;
  }
  mlfab__partial_mark_epoch(&e->partial, e->epoch);
  if (fresh) {
    partial_run_settled(e);
  } else {
    partial_run_arm(e, &e->settle);
  }
}

/* May the flush begin? It may when the members know the base: only then is its data known. */
static int partial_run_stands(void *self) {
  mlfab__partial_run *e = self;
  if (!e->partial.settled) return 0;
  mlfab__partial_flush(&e->partial, e->flush_data);
  return 1;
}

/* Notes whether the flush is over, and how. */
static void partial_run_look_at_flush(mlfab__partial_run *e) {
  const mlfab__request *request = mlfab__request_find(e->comm->requests, e->flush);
  if (!e->flush || (request && !request->done)) return;
  mlfab__partial_flushed(&e->partial, !request || request->result.status == 0);
  e->flush = 0;
}

static void partial_run_over(void *self) {
  mlfab__partial_run *e = self;
  mlfab_request request = e->request;
  partial_run_look_at_flush(e);
  mlfab__partial_end(&e->partial);
  e->epoch = 0;
  e->request = 0;
  e->info_p = NULL;
  if (request) mlfab__comm_end_request(e->comm, request);
  if (e->object.closing) mlfab__comm_object_bury(e->comm, &e->object);
}

/* --- calls that do not end --- */

static int32_t partial_run_awaited(void *self, uint64_t *number_p, const char **why_p) {
  const mlfab__partial_run *e = self;
  const mlfab__comm *comm = e->comm;
  uint32_t drawn = mlfab__partial_awaits(&e->partial);
  *number_p = e->partial.over;
  if (drawn == MLFAB__DAG_NONE || drawn == comm->me)
    return mlfab__engine_awaits(comm, &e->runs[e->partial.over & 1]);
  *why_p = "has not called it";
  return (int32_t)comm->ranks[drawn];
}

/* Returns 0 if others wait for this worker. They do if its queue is full, or if a call is missing that was drawn or
 * that a quorum counts. */
static int partial_run_called(void *self, uint64_t number) {
  const mlfab__partial_run *e = self;
  const mlfab__partial *partial = &e->partial;
  uint64_t round = e->base + number - 1;
  if (number == 0 || !partial->settled || round < partial->over) return 1;
  if (partial->taken && round == partial->over) return 1;
  if (!partial->taken && !mlfab__partial_may_take(partial)) return 0;
  if (partial->spec.mode == MLFAB_PARTIAL_SOLO || partial->step > round) return 1;
  return partial->spec.mode == MLFAB_PARTIAL_MAJORITY &&
         mlfab__partial_draw(partial, round) != partial->me;
}

/* --- opening --- */

static const char partial_run_what[] = "a partial reduction";

static const mlfab__comm_kind partial_run_kind = {.what = partial_run_what,
                                                  .opening = "the opening of a partial reduction",
                                                  .counts = "round",
                                                  .absent = "has not called it",
                                                  .ahead = 1,
                                                  .begin = partial_run_begin,
                                                  .over = partial_run_over,
                                                  .stands = partial_run_stands,
                                                  .awaited = partial_run_awaited,
                                                  .called = partial_run_called,
                                                  .free_self = partial_run_free};

static int partial_run_refuse(mlfab_error *error, int code, const char *what) {
  return MLFAB__FAIL(error, code, "a partial reduction: %s", what);
}

static int partial_run_check_type(const mlfab__comm *comm, uint64_t count, int dtype, uint32_t op,
                                  mlfab_error *error) {
  uint32_t width = mlfab__element_bytes(dtype);
  if (!width)
    return MLFAB__FAIL(error, MLFAB_ERR_DTYPE, "a partial reduction: %d is not an element type",
                       dtype);
  int code = mlfab__comm_check_count(comm, partial_run_what, count, width, error);
  if (code) return code;
  if (op != MLFAB_OP_SUM && op != MLFAB_OP_MEAN)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "a partial reduction: op is %u, and must be MLFAB_OP_SUM or MLFAB_OP_MEAN",
                       op);
  if (op == MLFAB_OP_MEAN && dtype == MLFAB_I64)
    return partial_run_refuse(error, MLFAB_ERR_UNSUPPORTED,
                              "MLFAB_OP_MEAN cannot be used with MLFAB_I64");
  return 0;
}

static int partial_run_check_options(const mlfab__comm *comm, const mlfab_partial_options *o,
                                     mlfab_error *error) {
  uint32_t live = comm->phase == MLFAB__COMM_IN ? comm->members : comm->config->workers;
  if (o->mode < MLFAB_PARTIAL_SOLO || o->mode > MLFAB_PARTIAL_QUORUM)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "a partial reduction: %u is not a mode (MLFAB_PARTIAL_SOLO ...)", o->mode);
  if (o->mode == MLFAB_PARTIAL_QUORUM && (o->quorum == 0 || o->quorum > live))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "a partial reduction: quorum is %u, and must be 1..%u: so many workers "
                       "take part",
                       o->quorum, live);
  if (o->results > MLFAB_PARTIAL_QUEUED)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "a partial reduction: results is %u, and must be MLFAB_PARTIAL_LATEST or "
                       "MLFAB_PARTIAL_QUEUED",
                       o->results);
  if (o->queue_max > MLFAB__PARTIAL_RUN_QUEUE_MAX)
    return MLFAB__FAIL(error, MLFAB_ERR_LIMIT,
                       "a partial reduction: queue_max is %u, the limit is %d", o->queue_max,
                       MLFAB__PARTIAL_RUN_QUEUE_MAX);
  if (!mlfab__algorithm_name(o->algorithm) || o->algorithm == MLFAB_ALGORITHM_PLANNED)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "a partial reduction: %u is not an algorithm of an exchange "
                       "(MLFAB_ALGORITHM_*, but not PLANNED)",
                       o->algorithm);
  return 0;
}

static mlfab__partial_spec partial_run_spec(const mlfab__comm *comm, uint64_t count, int dtype,
                                            const mlfab_partial_options *o) {
  return (mlfab__partial_spec){.mode = o->mode,
                               .quorum = o->mode == MLFAB_PARTIAL_QUORUM ? o->quorum : 0,
                               .results = o->results,
                               .queue_max = o->queue_max ? o->queue_max : 8,
                               .segment = MLFAB__COMM_SEGMENT,
                               .algorithm = (uint8_t)o->algorithm,
                               .mean = o->op == MLFAB_OP_MEAN,
                               .reduce_or = MLFAB__ENGINE_REDUCE(0, MLFAB__OP_OR),
                               .dtype = dtype,
                               .width = mlfab__element_bytes(dtype),
                               .kernels = comm->config->kernels,
                               .count = count,
                               .seed = o->seed ? o->seed : comm->config->seed};
}

/* Returns a hash of the options that must be equal on all workers. */
static uint64_t partial_run_signature(const mlfab__partial_spec *spec) {
  const uint64_t of[] = {spec->mode,      spec->quorum, spec->results,         spec->queue_max,
                         spec->algorithm, spec->mean,   (uint64_t)spec->dtype, spec->count,
                         spec->seed};
  return mlfab__hash(0, of, sizeof of);
}

static mlfab__partial_run *partial_run_new(mlfab__comm *comm, const mlfab__partial_spec *spec,
                                           uint32_t refuse_nan) {
  mlfab__partial_run *e = mlfab__alloc(comm->env, sizeof *e);
  if (!e) return NULL;
  e->comm = comm;
  e->refuse_nan = refuse_nan;
  e->signature = partial_run_signature(spec);
  for (uint32_t i = 0; i < 2; i++) mlfab__dag_init(&e->runs[i].dag, comm->env);
  mlfab__dag_init(&e->settle.dag, comm->env);
  if (mlfab__partial_init(&e->partial, comm->env, spec) == 0) return e;
  partial_run_free(e);
  return NULL;
}

MLFAB__INTERNAL int mlfab__partial_run_open(mlfab__comm *comm, uint64_t count, int dtype,
                                            const mlfab_partial_options *options,
                                            uint64_t timeout_ns, uint64_t now_ns, uint32_t *id_p,
                                            mlfab_request *request_p, mlfab_error *error) {
  mlfab_partial_options given = {0};
  if (!options || options->size < offsetof(mlfab_partial_options, quorum))
    return partial_run_refuse(error, MLFAB_ERR_ARGUMENT, "no options, or their size is not set");
  memcpy(&given, options, mlfab__min(options->size, sizeof given));
  int code = partial_run_check_type(comm, count, dtype, given.op, error);
  if (!code) code = partial_run_check_options(comm, &given, error);
  if (!code) code = mlfab__comm_check_ready(comm, partial_run_what, error);
  if (code) return code;
  mlfab__partial_spec spec = partial_run_spec(comm, count, dtype, &given);
  mlfab__partial_run *e = partial_run_new(comm, &spec, given.refuse_nan);
  if (!e) return partial_run_refuse(error, MLFAB_ERR_MEMORY, "out of memory");
  code = mlfab__comm_object_open(comm, &e->object, &partial_run_kind, e, e->signature, timeout_ns,
                                 now_ns, request_p, error);
  if (code)
    partial_run_free(e);
  else
    *id_p = e->object.id;
  return code;
}

/* --- calls --- */

static int partial_run_check_call(mlfab__partial_run *e, const void *data, mlfab_error *error) {
  const mlfab__partial_spec *spec = &e->partial.spec;
  int code = mlfab__comm_check_data(partial_run_what, data, spec->width, error);
  if (code) return code;
  partial_run_look_at_flush(e);
  if (e->request) return partial_run_refuse(error, MLFAB_ERR_AGAIN, "a step is under way");
  if (e->flush) return partial_run_refuse(error, MLFAB_ERR_AGAIN, "a flush is under way");
  return 0;
}

MLFAB__INTERNAL int mlfab__partial_run_start(mlfab__comm *comm, uint32_t id, void *data,
                                             uint64_t timeout_ns, uint64_t now_ns,
                                             mlfab_partial_info *info_p, mlfab_request *request_p,
                                             mlfab_error *error) {
  mlfab__partial_run *e = mlfab__comm_object_get(comm, &partial_run_kind, id, error);
  if (!e) return MLFAB_ERR_ARGUMENT;
  const mlfab__partial_spec *spec = &e->partial.spec;
  if (info_p && info_p->size < sizeof info_p->size)
    return partial_run_refuse(error, MLFAB_ERR_ARGUMENT, "info's size is not set");
  int code = partial_run_check_call(e, data, error);
  if (!code) code = mlfab__comm_check_state(comm, partial_run_what, error);
  if (code) return code;
  if (e->refuse_nan && !mlfab__elements_finite(spec->dtype, data, spec->count))
    return mlfab__comm_not_finite(comm, partial_run_what, error);
  if (mlfab__comm_owed(comm, error)) {
    mlfab__partial_keep(&e->partial, data);
    return comm->verdict.code;
  }
  code = mlfab__comm_object_request(comm, &e->object, timeout_ns, now_ns, request_p, error);
  if (code) return code;
  e->request = *request_p;
  e->info_p = info_p;
  mlfab__comm_enter(comm, now_ns);
  if (mlfab__partial_call(&e->partial, data)) partial_run_finish(e);
  partial_run_go_on(e);
  mlfab__comm_exit(comm);
  return 0;
}

MLFAB__INTERNAL uint64_t mlfab__partial_run_bytes(mlfab__comm *comm, uint32_t id,
                                                  uint32_t *width_p) {
  mlfab_error ignored;
  const mlfab__partial_run *e = mlfab__comm_object_get(comm, &partial_run_kind, id, &ignored);
  if (!e) return 0;
  *width_p = mlfab__element_bytes(e->partial.spec.dtype);
  return mlfab__mul_sat(e->partial.spec.count, *width_p);
}

MLFAB__INTERNAL int mlfab__partial_run_flush(mlfab__comm *comm, uint32_t id, void *data,
                                             uint64_t timeout_ns, uint64_t now_ns,
                                             mlfab_request *request_p, mlfab_error *error) {
  mlfab__partial_run *e = mlfab__comm_object_get(comm, &partial_run_kind, id, error);
  if (!e) return MLFAB_ERR_ARGUMENT;
  const mlfab__partial_spec *spec = &e->partial.spec;
  const mlfab_vec vec = {data, spec->count};
  const mlfab__comm_call call = {.kind = MLFAB__COLLECTIVE_ALLREDUCE,
                                 .algorithm = spec->algorithm,
                                 .dtype = spec->dtype,
                                 .op = spec->mean ? MLFAB_OP_MEAN : MLFAB_OP_SUM,
                                 .vecs = &vec,
                                 .n = 1,
                                 .salt = e->object.channel,
                                 .of = id,
                                 .words = "the flush of a partial reduction"};
  int code = partial_run_check_call(e, data, error);
  if (code) return code;
  if (mlfab__partial_flush_room(&e->partial))
    return partial_run_refuse(error, MLFAB_ERR_MEMORY, "out of memory");
  e->flush_data = data;
  mlfab__comm_enter(comm, now_ns);
  code = mlfab__comm_start(comm, &call, timeout_ns, now_ns, request_p, error);
  if (!code) e->flush = *request_p;
  mlfab__comm_exit(comm);
  return code;
}

MLFAB__INTERNAL int mlfab__partial_run_close(mlfab__comm *comm, uint32_t id, mlfab_error *error) {
  mlfab__partial_run *e = mlfab__comm_object_get(comm, &partial_run_kind, id, error);
  if (!e) return MLFAB_ERR_ARGUMENT;
  partial_run_look_at_flush(e);
  if (e->request || e->flush)
    return partial_run_refuse(error, MLFAB_ERR_STATE, "a step or a flush is under way");
  if (partial_run_ends(e)) {
    e->object.closing = 1;
  } else {
    mlfab__comm_object_bury(e->comm, &e->object);
  }
  return 0;
}
