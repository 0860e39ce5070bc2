/* worker.c - the worker role: its model, its streams. See worker.h. */
#include "worker.h"

#include "../kernels/kernels.h"
#include "../model/store.h"
#include "../node/node.h"

#include <stdio.h>

/* Drops the model, so that it can be defined again. Keeps buffers that transports may still read. */
static void worker_free_model(mlfab__worker *worker) {
  mlfab__env *env = worker->env;
  mlfab__push_forget(worker);
  if (worker->sparse) worker->sparse->drop(worker);
  mlfab__pull_forget(worker);
  mlfab__free(env, worker->table, (size_t)worker->define.tensors * MLFAB__TENSOR_INFO_BYTES);
  mlfab__free(env, worker->pulled, worker->layout.nslices * sizeof *worker->pulled);
  mlfab__free(env, worker->model_bufs, worker->nmodel_bufs * sizeof *worker->model_bufs);
  mlfab__layout_free(env, &worker->layout);
  worker->table = NULL;
  worker->pulled = NULL;
  worker->model_bufs = NULL;
  worker->nmodel_bufs = worker->norder = 0;
  uint32_t asked = worker->define.ask; /* so that late answers do not match the next model */
  memset(&worker->define, 0, sizeof worker->define);
  worker->define.ask = asked;
}

static void worker_free(void *self) {
  mlfab__worker *worker = self;
  mlfab__env *env = worker->env;
  if (!env) return;
  worker_free_model(worker);
  if (worker->sparse) worker->sparse->free(worker);
  mlfab__push_free(worker);
  mlfab__pull_free(worker);
  if (worker->viewer) worker->viewer->free(worker);
  if (worker->mover) worker->mover->free(worker);
  mlfab__free(env, worker->tensors, worker->tensor_room * sizeof *worker->tensors);
  mlfab__free(env, worker->streams, worker->servers * sizeof *worker->streams);
  mlfab__free_aligned(env, worker->lists, sizeof *worker->lists);
  memset(worker, 0, sizeof *worker);
}

/* --- the model --- */

MLFAB__INTERNAL int mlfab__worker_tensor(mlfab__worker *worker, uint32_t id, int dtype,
                                         uint64_t count, mlfab_error *error) {
  if (worker->table)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       "tensor_add: the model was started before; add all tensors first");
  if (!mlfab__dtype_bytes(dtype))
    return MLFAB__FAIL(error, MLFAB_ERR_DTYPE, "tensor %u: unknown element type %d", id, dtype);
  if (count == 0 || id == MLFAB_ALL) {
    return MLFAB__FAIL(
        error, MLFAB_ERR_ARGUMENT,
        id == MLFAB_ALL ? "tensor id %u is reserved (MLFAB_ALL)" : "tensor %u has no elements", id);
  }
  for (uint32_t i = 0; i < worker->ntensors; i++) {
    if (worker->tensors[i].id == id)
      return MLFAB__FAIL(error, MLFAB_ERR_TENSOR, "tensor id %u is used twice", id);
  }
  if (worker->ntensors == MLFAB_BULK_MAX / MLFAB__TENSOR_INFO_BYTES)
    return MLFAB__FAIL(error, MLFAB_ERR_LIMIT, "more than %u tensors", worker->ntensors);
  mlfab__tensor_info *more = mlfab__grow(worker->env, worker->tensors, &worker->tensor_room,
                                         worker->ntensors + 1, sizeof *more);
  if (!more) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for tensors");
  worker->tensors = more;
  mlfab__tensor_info *tensor = &worker->tensors[worker->ntensors++];
  tensor->id = id;
  tensor->dtype = (uint32_t)dtype;
  tensor->count = count;
  return 0;
}

/* The options for DEFINE: `consistency` holds the whole consistency model. */
static void worker_options(const mlfab_model_options *given, mlfab_model_options *options) {
  mlfab_sync *sync = &options->consistency;
  *options = *given;
  memset(sync, 0, sizeof *sync);
  if (given->consistency.size > 0)
    memcpy(sync, &given->consistency, mlfab__min(given->consistency.size, sizeof *sync));
  else
    sync->kind = given->sync;
  mlfab__sync_complete(sync);
}

/* Checks the range of the consistency model. The error text names the call. */
static int worker_check_sync(const mlfab__worker *worker, const mlfab_sync *sync, const char *call,
                             mlfab_error *error) {
  mlfab_error wrong;
  int code = mlfab__sync_check(sync, worker->config->workers, &wrong);
  if (!code) return 0;
  return MLFAB__FAIL(error, code, "%s: %.200s", call, wrong.text);
}

/* Without the size the other members would be ignored, and the model would be asynchronous. */
static int worker_check_consistency(const mlfab__worker *worker, const mlfab_model_options *o,
                                    mlfab_error *error) {
  static const mlfab_sync none;
  const mlfab_sync *sync = &o->consistency;
  if (sync->size < offsetof(mlfab_sync, kind) + sizeof sync->kind &&
      memcmp(sync, &none, sizeof none) != 0)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "model_start: consistency.size is not set");
  if (o->sync != MLFAB_SYNC_ASYNC && sync->size > 0 && sync->kind != o->sync)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "model_start: sync says %s, consistency.kind %s: set one of them",
                       mlfab__sync_name(o->sync), mlfab__sync_name(sync->kind));
  if (o->sync == MLFAB_SYNC_PSSP && sync->size == 0)
    return MLFAB__FAIL(
        error, MLFAB_ERR_ARGUMENT,
        "model_start: sync = MLFAB_SYNC_PSSP leaves `chance` at 0, and no pull would "
        "wait: set `consistency`");
  return worker_check_sync(worker, &worker->define.options.consistency, "model_start", error);
}

/* Checks what the worker can check; the servers check callbacks, delay bounds and memory. */
static int worker_check_options(const mlfab__worker *worker, const mlfab_model_options *o,
                                mlfab_error *error) {
  mlfab__optimizer optimizer;
  mlfab_error wrong;
  if (!worker->sparse && (o->tags || o->pull_half || !(o->change_threshold <= 0.0)))
    return MLFAB__FAIL(
        error, MLFAB_ERR_UNSUPPORTED,
        "model_start: %s needs filters, which were left out (MLFAB_WITH_SPARSE is 0)",
        o->tags        ? "tags"
        : o->pull_half ? "pull_half"
                       : "change_threshold");
  int code = worker->sparse ? worker->sparse->check(o, &worker->layout, &wrong) : 0;
  if (code)
    return MLFAB__FAIL(error, code == MLFAB_ERR_CONFIG ? MLFAB_ERR_ARGUMENT : code,
                       "model_start: %.230s", wrong.text);
  code = worker_check_consistency(worker, o, error);
  if (code) return code;
  code = mlfab__store_check(&worker->define.options, &worker->layout, &optimizer, &wrong);
  return code ? MLFAB__FAIL(error, code, "model_start: %.230s", wrong.text) : 0;
}

static int worker_check_weights(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                mlfab_error *error) {
  mlfab__source *sources = NULL;
  uint32_t nsources = 0, room = 0;
  if (n == 0) return 0;
  int code = mlfab__worker_sources(worker, bufs, n, 0, &sources, &nsources, &room, error);
  mlfab__free(worker->env, sources, room * sizeof *sources);
  return code;
}

/* Builds the layout and everything that depends on it. On failure worker_free_model undoes it. */
static int worker_build(mlfab__worker *worker, const mlfab_model_options *options,
                        const mlfab_buf *bufs, uint32_t n, mlfab_error *error) {
  mlfab__env *env = worker->env;
  int code =
      mlfab__layout_build(env, worker->tensors, worker->ntensors, options->slices, worker->servers,
                          options->active, worker->config->model_max_bytes, &worker->layout, error);
  if (code) return code;
  /* Slices may have moved before this process joined. */
  if (worker->mover) worker->mover->assign(worker, &worker->layout);
  if (options->slices > MLFAB__SLICES_MAX)
    return MLFAB__FAIL(error, MLFAB_ERR_LIMIT, "more than %d slices", MLFAB__SLICES_MAX);
  worker_options(options, &worker->define.options);
  code = worker_check_options(worker, options, error);
  if (code) return code;
  code = worker_check_weights(worker, bufs, n, error);
  if (code) return code;
  worker->define.ask++;
  worker->define.tensors = worker->ntensors;
  worker->define.first_weights = worker->rank == 0 && n > 0 && !worker->restores;
  worker->table = mlfab__alloc(env, (size_t)worker->ntensors * MLFAB__TENSOR_INFO_BYTES);
  worker->pulled = mlfab__alloc_array(env, worker->layout.nslices, sizeof *worker->pulled);
  if (n > 0) worker->model_bufs = mlfab__alloc_array(env, n, sizeof *worker->model_bufs);
  worker->nmodel_bufs = n;
  if (!worker->table || !worker->pulled || (n > 0 && !worker->model_bufs)) {
    return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for the model");
  }
  for (uint32_t i = 0; i < worker->ntensors; i++) {
    mlfab__encode_tensor_info(worker->table + (size_t)i * MLFAB__TENSOR_INFO_BYTES,
                              &worker->tensors[i]);
  }
  if (n > 0) memcpy(worker->model_bufs, bufs, n * sizeof *bufs);
  if (worker->define.first_weights) return mlfab__push_first(worker, bufs, n, 0, error);
  return 0;
}

MLFAB__INTERNAL int mlfab__worker_model(mlfab__worker *worker, const mlfab_model_options *given,
                                        const mlfab_buf *bufs, uint32_t n, uint64_t now_ns,
                                        mlfab_request *request_p, mlfab_error *error) {
  mlfab_model_options options;
  mlfab_model_options_init(&options);
  if (given) memcpy(&options, given, mlfab__min(given->size, sizeof options));
  if (given && given->size < offsetof(mlfab_model_options, sync))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "model_start: options.size is not set");
  if (worker->table)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "model_start: the model was started before");
  if ((n > 0) != (bufs != NULL))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "model_start: bufs is NULL and n is not 0, or n is 0 and bufs is not NULL");
  /* Slices go to the servers that were there first. */
  if (worker->founding < worker->servers && options.active == 0) options.active = worker->founding;
  if (options.active > worker->founding)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "active: %u servers shall hold slices, there are %u", options.active,
                       worker->founding);
  int code = mlfab__worker_reaches(worker, MLFAB_ALL, "model_start", error);
  if (!code) code = mlfab__request_room(worker->requests, MLFAB__REQUEST_MODEL, error);
  if (code) return code;
  code = worker_build(worker, &options, bufs, n, error);
  if (code) {
    worker_free_model(worker);
    return code;
  }
  mlfab__request *request =
      mlfab__request_open(worker->requests, MLFAB__REQUEST_MODEL, 0, now_ns, 0);
  worker->model_request = request->id;
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (worker->streams[s].absent) continue;
    worker->streams[s].define = 1;
    worker->port.ready(worker->port.self, s);
  }
  *request_p = request->id;
  return 0;
}

static mlfab__request *worker_model_request(const mlfab__worker *worker) {
  return mlfab__request_find(worker->requests, worker->model_request);
}

/* Ends model_start, whose request is done. After an error another model can be defined. */
static void worker_model_end(mlfab__worker *worker, int code) {
  mlfab__request *pull = mlfab__request_find(worker->requests, worker->model_pull);
  worker->model_request = worker->model_pull = 0;
  worker->enters = 0;
  if (pull) mlfab__request_end(worker->requests, pull);
  if (code) {
    for (uint32_t s = 0; s < worker->servers; s++)
      worker->streams[s].define = worker->streams[s].defined = 0;
    worker_free_model(worker);
  } else {
    worker->stands = 1;
    /* The servers may have reported different iterations. */
    mlfab__push_align(worker);
    mlfab__free(worker->env, worker->model_bufs, worker->nmodel_bufs * sizeof *worker->model_bufs);
    worker->model_bufs = NULL;
    worker->nmodel_bufs = 0;
  }
}

static void worker_model_fail(mlfab__worker *worker, int code, int32_t rank, int is_server,
                              uint64_t now_ns, const char *text) {
  mlfab__request_finish(worker->requests, worker_model_request(worker), code, rank, is_server,
                        now_ns, "%s", text);
  worker_model_end(worker, code);
}

/* Asks a server to count this worker, or not to. It may have been ahead of the others: then its number falls to theirs. */
static void worker_enter(mlfab__worker *worker, uint32_t server) {
  mlfab__stream *stream = &worker->streams[server];
  if (!stream->up || stream->epoch == 0 || stream->absent) return;
  if (worker->apart) {
    stream->guest = 1;
    stream->entry = stream->asked = 0;
  } else if (!worker->enters || !stream->guest || stream->asked) {
    return;
  } else {
    uint64_t round =
        worker->level + worker->wholes - mlfab__worker_ahead(worker, server, worker->next_seq);
    stream->entry = ++worker->entries ? worker->entries : ++worker->entries;
    stream->asked = 1;
    if (worker->levels && stream->round != round) {
      stream->round = round;
      mlfab__pull_again(worker, server, 0);
    }
  }
  const mlfab__progress progress = {stream->round, worker->apart != 0, stream->entry};
  MLFAB__POST(&worker->port, server, MLFAB__PROGRESS, progress, &progress);
}

/* The server counts this worker from its answer on. */
static void worker_entered(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame) {
  mlfab__stream *stream = &worker->streams[server];
  mlfab__progress in;
  if (MLFAB__MALFORMED(&worker->port, server, frame, progress, &in)) return;
  if (worker->apart) worker_enter(worker, server); /* an update has made it count */
  if (!stream->guest || worker->apart || !stream->entry || in.entry != stream->entry) return;
  stream->entry = stream->asked = 0;
  worker->due = 1; /* asks again if an update was decided meanwhile */
  if (in.progress < stream->round) return;
  stream->guest = 0;
  stream->round = mlfab__max(stream->round, in.progress);
}

static int worker_is_guest(const mlfab__worker *worker) {
  for (uint32_t s = 0; s < worker->servers; s++) {
    const mlfab__stream *stream = &worker->streams[s];
    if (stream->guest && !stream->absent && !stream->dead) return 1;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__worker_counted(const mlfab__worker *worker) {
  return !worker->stands || (!worker->apart && !worker_is_guest(worker));
}

MLFAB__INTERNAL int mlfab__worker_idle(const mlfab__worker *worker) { return worker->norder == 0; }

MLFAB__INTERNAL void mlfab__worker_mark(const mlfab__worker *worker, mlfab__mark *mark) {
  mark->progress = mlfab__worker_progress(worker) - worker->debt;
  mark->pushes = worker->wholes;
}

/* A worker that has no model yet is a guest anyway. */
MLFAB__INTERNAL void mlfab__worker_stand_apart(mlfab__worker *worker, uint8_t why) {
  uint8_t before = worker->apart;
  if (!worker->stands) return;
  worker->apart |= why;
  worker->enters = 0;
  worker->debt = 0; /* its next updates count from the call in which it waits */
  for (uint32_t s = 0; s < worker->servers && !before; s++) worker_enter(worker, s);
}

MLFAB__INTERNAL void mlfab__worker_return(mlfab__worker *worker, uint8_t why,
                                          const uint64_t *level) {
  if (!(worker->apart & why)) return;
  worker->apart &= (uint8_t)~why;
  worker->levels = level != NULL;
  if (level) worker->level = *level;
  if (worker->apart) return;
  worker->enters = 1;
  for (uint32_t s = 0; s < worker->servers; s++) worker_enter(worker, s);
}

/* The worker has the model. The model stands for it when all servers count it. */
static void worker_model_stands(mlfab__worker *worker, uint64_t now_ns) {
  if (!worker_is_guest(worker)) {
    mlfab__request_succeed(worker->requests, worker_model_request(worker), now_ns);
    worker_model_end(worker, 0);
  } else if (!worker->enters) {
    worker->enters = 1;
    worker->levels = 0;
    for (uint32_t s = 0; s < worker->servers; s++) worker_enter(worker, s);
  }
}

static void worker_define_ack(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame,
                              uint64_t now_ns) {
  mlfab__define_ack ack = {.code = 0};
  mlfab__stream *stream = &worker->streams[server];
  if (MLFAB__MALFORMED(&worker->port, server, frame, define_ack, &ack)) return;
  if (!worker->model_request || stream->defined || ack.ask != worker->define.ask) return;
  /* Worker 0's options win. */
  const mlfab_model_options *own = &worker->define.options, *first = &ack.options;
  char text[MLFAB__TEXT_MAX + 64] = "";
  int code = ack.code ? ack.code : MLFAB_ERR_MODEL, half = first->pull_half && !worker->sparse;
  if (ack.code) {
    snprintf(text, sizeof text, "model_start: server %u: %s", server, ack.text);
  } else if (first->slices != own->slices) {
    snprintf(text, sizeof text, "model_start: %u slices asked for, worker 0 has %u", own->slices,
             first->slices);
  } else if (first->active != own->active) {
    snprintf(text, sizeof text, "model_start: %u active servers asked for, worker 0 has %u",
             own->active, first->active);
  } else if (half || (ack.cut && ack.cut != worker->layout.nslices && !worker->began)) {
    code = MLFAB_ERR_UNSUPPORTED;
    snprintf(text, sizeof text, "model_start: %s left out here (MLFAB_WITH_%s is 0)",
             half ? "worker 0 asks for pull_half, and filters were"
                  : "the model began as a checkpoint, and checkpoints were",
             half ? "SPARSE" : "CHECKPOINT");
  } else {
    code = worker->began ? worker->began(worker, server, &ack, text, sizeof text) : 0;
  }
  if (code) {
    worker_model_fail(worker, code, (int32_t)server, 1, now_ns, text);
    return;
  }
  stream->own_weights = ack.first_weights != 0;
  stream->packets = ack.packets != 0;
  worker->define.options = ack.options;
  stream->defined = 1;
  stream->define = 0;
  stream->round = ack.v_train;
  stream->counts = (uint8_t)mlfab__sync_counts(worker->define.options.consistency.kind);
  worker->due = 1;
}

/* Every server has the model: pulls the weights unless they are this worker's own. */
static void worker_model_pull(mlfab__worker *worker, uint64_t now_ns) {
  int own = 1;
  for (uint32_t s = 0; s < worker->servers; s++)
    own &= worker->streams[s].own_weights || worker->streams[s].absent;
  if (own || worker->nmodel_bufs == 0) {
    worker_model_stands(worker, now_ns);
    return;
  }
  mlfab_error error;
  int code = mlfab__pull_open(worker, worker->model_bufs, worker->nmodel_bufs, NULL, NULL, now_ns,
                              &worker->model_pull, &error);
  if (code) worker_model_fail(worker, code, error.rank, error.is_server, now_ns, error.text);
}

static void worker_tell_done(mlfab__worker *worker, uint32_t server) {
  mlfab__done done = {worker->next_seq - 1};
  worker->streams[server].done_told = 1;
  MLFAB__POST(&worker->port, server, MLFAB__DONE, done, &done);
}

/* Sends DONE to each server as soon as that one has decided everything, without waiting for the others.
 * They may be at different rounds, and one must not wait for a worker that waits for another. */
static void worker_finish_progress(mlfab__worker *worker, uint64_t now_ns) {
  uint32_t acked = 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (!worker->streams[s].done_told && !worker->streams[s].absent &&
        !mlfab__push_pending(worker, s))
      worker_tell_done(worker, s);
  }
  for (uint32_t s = 0; s < worker->servers; s++) {
    const mlfab__stream *stream = &worker->streams[s];
    acked += stream->done_acked || stream->dead || stream->absent;
  }
  mlfab__request *request = mlfab__request_find(worker->requests, worker->join_request);
  if (acked == worker->servers) mlfab__request_succeed(worker->requests, request, now_ns);
}

static void worker_model_progress(mlfab__worker *worker, uint64_t now_ns) {
  if (worker->enters) {
    worker_model_stands(worker, now_ns);
    return;
  }
  if (worker->model_pull) {
    mlfab__request *pull = mlfab__request_find(worker->requests, worker->model_pull);
    if (pull && !pull->done) return;
    int code = pull ? pull->result.status : MLFAB_ERR_INTERNAL;
    if (code && pull) mlfab__request_recall(worker->requests, pull);
    const mlfab_error last = worker->requests->last; /* finishing the request overwrites it */
    if (code)
      worker_model_fail(worker, code, pull ? pull->result.rank : MLFAB_NO_RANK, last.is_server,
                        now_ns, last.text);
    else
      worker_model_stands(worker, now_ns);
    return;
  }
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (!worker->streams[s].defined && !worker->streams[s].absent) return;
  }
  if (worker->norder > 0) return;
  if (worker->sparse && worker->sparse->open(worker)) {
    worker_model_fail(worker, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, 0, now_ns,
                      "model_start: out of memory for the cache of the model");
    return;
  }
  worker_model_pull(worker, now_ns);
}

/* Others pushed after the call in which this worker came, and rounds went on. The debt is its number less its own updates. */
static uint64_t worker_debt(const mlfab__worker *worker) {
  uint64_t debt = mlfab__worker_progress(worker) - worker->level - worker->wholes;
  return worker->levels && debt <= MLFAB__WINDOW ? debt : 0;
}

/* Does the work for which other files have set `due`; once after each event. */
MLFAB__INTERNAL void mlfab__worker_advance(mlfab__worker *worker, uint64_t now_ns) {
  while (worker->due) {
    worker->due = 0;
    if (worker->done) worker_finish_progress(worker, now_ns);
    if (worker->model_request) worker_model_progress(worker, now_ns);
    for (uint32_t s = 0; worker->enters && s < worker->servers; s++)
      if (worker->streams[s].guest) worker_enter(worker, s);
    if (worker->enters && !worker->model_request && !worker_is_guest(worker)) {
      worker->enters = 0;
      mlfab__push_align(worker);
      worker->debt = worker_debt(worker);
    }
    if (worker->mover && worker->announces != MLFAB__NEVER) worker->mover->decided(worker, now_ns);
  }
}

MLFAB__INTERNAL int mlfab__worker_finish(void *self, uint64_t timeout_ns, uint64_t now_ns,
                                         mlfab_request *request_p, mlfab_error *error) {
  mlfab__worker *worker = self;
  if (worker->done)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "finish: this worker has finished before");
  int code = mlfab__request_room(worker->requests, MLFAB__REQUEST_JOIN, error);
  if (code) return code;
  mlfab__request *request =
      mlfab__request_open(worker->requests, MLFAB__REQUEST_JOIN, 0, now_ns, timeout_ns);
  worker->done = 1;
  worker->join_request = request->id;
  *request_p = request->id;
  worker->due = 1;
  mlfab__worker_advance(worker, now_ns);
  return 0;
}

/* --- a change of consistency --- */

static void worker_change_ask(mlfab__worker *worker, uint32_t server) {
  if (!mlfab__worker_sends(worker, server)) return; /* it is asked after it has told its epoch */
  MLFAB__POST(&worker->port, server, MLFAB__SYNC, sync_ask, &worker->change.ask);
}

static int worker_change_check(const mlfab__worker *worker, const mlfab_sync *sync, uint32_t server,
                               mlfab_error *error) {
  if (!worker->stands)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       "set_sync: there is no model yet: call mlfab_model_start first");
  if (server != MLFAB_ALL && server >= worker->servers)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "set_sync: there is no server %u, there are %u",
                       server, worker->servers);
  if (server != MLFAB_ALL && worker->streams[server].absent)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "set_sync: server %u has no slices: it has not come, or has gone", server);
  if (worker->change.request)
    return MLFAB__FAIL(error, MLFAB_ERR_AGAIN,
                       "set_sync: an earlier set_sync of this worker has not ended");
  int code = mlfab__worker_reaches(worker, server, "set_sync", error);
  if (!code) code = worker_check_sync(worker, sync, "set_sync", error);
  return code ? code : mlfab__request_room(worker->requests, MLFAB__REQUEST_SYNC, error);
}

MLFAB__INTERNAL int mlfab__worker_set_sync(mlfab__worker *worker, const mlfab_sync *given,
                                           uint32_t server, uint64_t timeout_ns, uint64_t now_ns,
                                           mlfab_request *request_p, mlfab_error *error) {
  mlfab__sync_change *change = &worker->change;
  mlfab_sync sync;
  memset(&sync, 0, sizeof sync);
  if (!given || given->size < offsetof(mlfab_sync, kind) + sizeof given->kind)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       given ? "set_sync: sync.size is not set" : "set_sync: sync is NULL");
  memcpy(&sync, given, mlfab__min(given->size, sizeof sync));
  int code = worker_change_check(worker, &sync, server, error);
  if (code) return code;
  mlfab__request *request =
      mlfab__request_open(worker->requests, MLFAB__REQUEST_SYNC, 0, now_ns, timeout_ns);
  mlfab__sync_complete(&sync);
  change->request = request->id;
  change->ask.ask++;
  change->ask.consistency = sync;
  change->all = server == MLFAB_ALL;
  change->nwaiting = 0;
  change->code = 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    mlfab__stream *stream = &worker->streams[s];
    stream->changes = (server == MLFAB_ALL || server == s) && !stream->absent;
    change->nwaiting += stream->changes;
    if (stream->changes && stream->up) worker_change_ask(worker, s);
  }
  *request_p = request->id;
  return 0;
}

/* Ends the change at this worker, and returns its request. Servers that have not answered may still make it. */
static mlfab__request *worker_change_end(mlfab__worker *worker) {
  mlfab__request *request = mlfab__request_find(worker->requests, worker->change.request);
  worker->change.request = 0;
  for (uint32_t s = 0; s < worker->servers; s++) worker->streams[s].changes = 0;
  return request;
}

MLFAB__INTERNAL void mlfab__worker_change_spare(mlfab__worker *worker, uint32_t server,
                                                uint64_t now_ns) {
  mlfab__sync_change *change = &worker->change;
  if (!worker->streams[server].changes) return;
  worker->streams[server].changes = 0;
  if (--change->nwaiting > 0) return;
  mlfab__request_finish(worker->requests, worker_change_end(worker), change->code,
                        change->code ? (int32_t)change->server : MLFAB_NO_RANK, change->code != 0,
                        now_ns, "set_sync: %s", change->text);
}

/* SYNC_ACK: the outcome of a change of consistency, or only the current state. */
static void worker_sync_ack(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame,
                            uint64_t now_ns) {
  mlfab__sync_ack ack;
  mlfab__sync_change *change = &worker->change;
  mlfab__stream *stream = &worker->streams[server];
  if (MLFAB__MALFORMED(&worker->port, server, frame, sync_ack, &ack)) return;
  int counted = stream->counts;
  stream->counts = ack.counts != 0;
  if (!counted) mlfab__push_tell(worker, server);
  if (!stream->changes || ack.ask != change->ask.ask) return;
  if (ack.code && !change->code) {
    change->code = ack.code;
    change->server = server;
    snprintf(change->text, sizeof change->text, "server %u: %.200s", server, ack.text);
  }
  mlfab__worker_change_spare(worker, server, now_ns);
}

static void worker_withdraw(void *self, mlfab__request *request, int code, uint64_t now_ns) {
  mlfab__worker *worker = self;
  const mlfab__blame *blame = &request->blame;
  uint32_t s = 0;
  switch (request->kind) {
    case MLFAB__REQUEST_PUSH:
      mlfab__push_withdraw(worker, request, code, now_ns);
      break;
    case MLFAB__REQUEST_PULL:
      mlfab__pull_withdraw(worker, request, code, now_ns);
      break;
    case MLFAB__REQUEST_RESLICE:
      worker->mover->withdraw(worker, request, code, now_ns);
      break;
    case MLFAB__REQUEST_MODEL:
      while (s + 1 < worker->servers && (worker->streams[s].defined || worker->streams[s].absent) &&
             !(worker->enters && worker->streams[s].guest))
        s++;
      if (blame->rank == MLFAB_NO_RANK || worker->streams[blame->by].defined)
        mlfab__request_blame(request, (int32_t)s, 1, "%s", "");
      mlfab__request_expire(worker->requests, request, code, now_ns);
      worker_model_end(worker, code);
      break;
    case MLFAB__REQUEST_SYNC:
      while (s + 1 < worker->servers && !worker->streams[s].changes) s++;
      mlfab__request_blame(request, (int32_t)s, 1, "; it may still change there");
      mlfab__request_expire(worker->requests, request, code, now_ns);
      worker_change_end(worker);
      break;
    default:
      while (s + 1 < worker->servers &&
             (worker->streams[s].done_acked || worker->streams[s].absent))
        s++;
      mlfab__request_blame(request, (int32_t)s, 1, "%s", "");
      mlfab__request_expire(worker->requests, request, code, now_ns);
  }
  mlfab__worker_advance(worker, now_ns);
}

/* --- links and frames --- */

/* The updates that a server has decided, from its frame. */
static void worker_resync(mlfab__worker *worker, uint32_t server, uint32_t generation, uint64_t top,
                          const uint64_t applied[4], const uint64_t dropped[4], uint64_t now_ns) {
  mlfab__window window = {.top = top};
  memcpy(window.applied, applied, sizeof window.applied);
  memcpy(window.dropped, dropped, sizeof window.dropped);
  mlfab__push_resync(worker, server, generation, &window, now_ns);
}

MLFAB__INTERNAL void mlfab__worker_bereave(mlfab__worker *worker, uint32_t server,
                                           uint64_t now_ns) {
  mlfab__push_lost(worker, server, MLFAB__PART_DECIDED, now_ns);
  mlfab__pull_dead(worker, server, now_ns);
  if (worker->streams[server].changes)
    mlfab__request_dead(worker->requests, worker_change_end(worker), server, now_ns);
  if (!worker->model_request) return;
  mlfab__request_dead(worker->requests, worker_model_request(worker), server, now_ns);
  worker_model_end(worker, MLFAB_ERR_PEER_DEAD);
}

/* If the server has decided updates under this worker's number that it never announced there, another process uses the number.
 * Then its reports of applied updates may be about updates that the model lacks. */
static int worker_hello(void *self, mlfab__at at, mlfab__greeting *greeting) {
  const mlfab__worker *worker = self;
  if (greeting->ack->top <= worker->streams[at.peer].announced) return 0;
  greeting->why = "it has updates of this worker that it never sent: another process uses its rank";
  return MLFAB_ERR_RANK_TAKEN;
}

/* The link stands, and the server has answered HELLO. */
static void worker_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__worker *worker = self;
  const mlfab__hello_ack *ack = greeting->ack;
  const uint32_t server = at.peer;
  const uint64_t now_ns = at.now_ns;
  mlfab__stream *stream = &worker->streams[server];
  stream->eager_bytes = ack->eager_bytes;
  stream->epoch = ack->epoch;
  stream->guest = ack->guest != 0;
  stream->asked = 0; /* the answer may be lost, or still come */
  if (worker->stands && !ack->model_stands && !stream->absent)
    greeting->died = "it has restarted without the model";
  if (stream->absent) {
    stream->up = 1;
    if (worker->mover) worker->mover->hello(worker, server, ack, now_ns);
    return;
  }
  if (ack->kind == MLFAB__ACK_CREDIT) {
    worker->port.ready(worker->port.self, server);
    return;
  }
  if (worker->stands && !ack->model_stands) {
    mlfab__worker_dead(worker, server, now_ns);
    return;
  }
  stream->up = 1;
  if (worker->table && !stream->defined) stream->define = 1;
  worker_resync(worker, server, ack->generation, ack->top, ack->applied, ack->dropped, now_ns);
  /* A new copy of the server may lack updates that the former copy has confirmed. */
  int another = worker->copies && worker->copies(worker, server, ack);
  /* Rounds may have gone on without this worker, and answers and PROGRESS may be lost. */
  if (worker->stands && stream->guest && worker->enters) {
    /* Its number is that of the others, or the server's answer. */
  } else if (worker->stands) {
    mlfab__push_reached(worker, server, ack->v_train);
  } else {
    stream->round = ack->v_train;
  }
  worker_enter(worker, server);
  if (worker->enters) worker->due = 1; /* its answer may have been lost */
  mlfab__pull_again(worker, server, 0);
  if (stream->done_told && (!stream->done_acked || another)) worker_tell_done(worker, server);
  if (stream->changes) worker_change_ask(worker, server);
  if (worker->mover) worker->mover->hello(worker, server, ack, now_ns);
  worker->port.ready(worker->port.self, server);
  mlfab__worker_advance(worker, now_ns);
}

static void worker_lost(void *self, mlfab__at at) {
  mlfab__worker *worker = self;
  worker->streams[at.peer].up = 0;
  mlfab__push_lost(worker, at.peer, MLFAB__PART_ANNOUNCED, at.now_ns);
  mlfab__worker_advance(worker, at.now_ns);
}

MLFAB__INTERNAL void mlfab__worker_spare(mlfab__worker *worker, uint32_t server, uint64_t now_ns) {
  worker->streams[server].up = 0;
  worker->streams[server].absent = 1;
  mlfab__push_lost(worker, server, MLFAB__PART_NONE, now_ns);
  mlfab__worker_change_spare(worker, server, now_ns);
}

/* Without moves a server that has no slices never gets some. Server 0 is never spared. */
static int worker_spares(mlfab__worker *worker, uint32_t server, uint64_t now_ns) {
  const uint32_t *at = worker->layout.owned_at;
  if (server == 0 || !worker->stands || at[server] < at[server + 1]) return 0;
  mlfab__worker_spare(worker, server, now_ns);
  worker->due = 1;
  mlfab__worker_advance(worker, now_ns);
  return 1;
}

MLFAB__INTERNAL void mlfab__worker_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns) {
  worker->streams[server].dead = 1;
  worker->streams[server].up = 0;
  if (worker->mover ? worker->mover->spares(worker, server, now_ns)
                    : worker_spares(worker, server, now_ns))
    return;
  mlfab__worker_bereave(worker, server, now_ns);
  if (worker->mover) worker->mover->dead(worker, server, now_ns);
  worker->due = 1;
  mlfab__worker_advance(worker, now_ns);
}

static void worker_resend(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame,
                          uint64_t now_ns) {
  mlfab__resend resend;
  if (MLFAB__MALFORMED(&worker->port, server, frame, resend, &resend)) return;
  if (resend.top > worker->streams[server].announced) {
    worker->port.drop(worker->port.self, server, MLFAB_ERR_FENCED, "a RESEND beyond what was sent");
    return;
  }
  worker_resync(worker, server, resend.generation, resend.top, resend.applied, resend.dropped,
                now_ns);
}

static int worker_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__worker *worker = self;
  const uint32_t server = at.peer;
  const uint64_t now_ns = at.now_ns;
  int known = (worker->mover && worker->mover->frame(worker, server, frame, now_ns)) ||
              worker->streams[server].absent || /* it tells again when it counts */
              (worker->routes && worker->routes->frame(worker, server, frame));
  switch (known ? MLFAB__FRAME_TYPES : frame->type) {
    case MLFAB__FRAME_TYPES:
      break;
    case MLFAB__DEFINE_ACK:
      worker_define_ack(worker, server, frame, now_ns);
      break;
    case MLFAB__PROGRESS:
      worker_entered(worker, server, frame);
      break;
    case MLFAB__GRANT:
      mlfab__push_granted(worker, server, frame);
      break;
    case MLFAB__PUSH_ACK:
      mlfab__push_acked(worker, server, frame, now_ns);
      break;
    case MLFAB__RESEND:
      worker_resend(worker, server, frame, now_ns);
      break;
    case MLFAB__SYNC_ACK:
      worker_sync_ack(worker, server, frame, now_ns);
      break;
    case MLFAB__MODEL:
      mlfab__pull_model(worker, server, frame, now_ns);
      break;
    case MLFAB__PULL_FAIL:
      mlfab__pull_failed(worker, server, frame, now_ns);
      break;
    case MLFAB__DONE_ACK:
      worker->streams[server].done_acked = 1;
      worker->due = 1;
      break;
    default:
      if (worker->viewer && worker->viewer->frame(worker, server, frame, now_ns)) break;
      worker->port.drop(worker->port.self, server, MLFAB_ERR_FRAME, "a frame that no server sends");
  }
  mlfab__worker_advance(worker, now_ns);
  return 1;
}

static int worker_next(void *self, mlfab__at at, mlfab__frame_out *frame) {
  mlfab__worker *worker = self;
  const mlfab__stream *stream = &worker->streams[at.peer];
  if (!stream->up || !worker->table) return 0;
  if (stream->define) {
    frame->type = MLFAB__DEFINE;
    frame->meta_bytes = mlfab__encode_define(frame->meta, &worker->define);
    frame->bulk = worker->table;
    frame->bulk_bytes = worker->define.tensors * MLFAB__TENSOR_INFO_BYTES;
    frame->token = 0;
    frame->note[0] = MLFAB__NOTE_DEFINE;
    return 1;
  }
  return mlfab__push_next(worker, at.peer, frame);
}

static void worker_taken(void *self, mlfab__at at, const mlfab__frame_out *frame) {
  mlfab__worker *worker = self;
  if (frame->note[0] == MLFAB__NOTE_DEFINE)
    worker->streams[at.peer].define = 0;
  else
    mlfab__push_taken(worker, at.peer, frame);
}

static void worker_sent(void *self, mlfab__at at, uint64_t token) {
  mlfab__push_sent(self, at.peer, token, at.now_ns);
  mlfab__worker_advance(self, at.now_ns);
}

static void worker_gone(void *self, mlfab__at at, int left) {
  const mlfab__worker *worker = self;
  if (left == MLFAB__NEVER_HERE && worker->mover)
    worker->mover->vacant(self, at.peer, at.now_ns);
  else
    mlfab__worker_dead(self, at.peer, at.now_ns);
}

static int worker_wants(void *self, mlfab__at at, const char *why) {
  (void)self, (void)at, (void)why;
  return 1;
}

static const mlfab__role worker_row = {
    .name = "worker",
    .rest = 1,
    .sends = MLFAB__ON(SERVER),
    .links = MLFAB__ON(SERVER),
    .requests = MLFAB__SERVES(PUSH) | MLFAB__SERVES(PULL) | MLFAB__SERVES(MODEL) |
                MLFAB__SERVES(JOIN) | MLFAB__SERVES(SYNC) | MLFAB__SERVES(RESLICE),
    .frame = worker_frame,
    .next = worker_next,
    .taken = worker_taken,
    .returned = worker_sent,
    .hello = worker_hello,
    .up = worker_up,
    .lost = worker_lost,
    .gone = worker_gone,
    .wants = worker_wants,
    .withdraw = worker_withdraw,
    .free = worker_free,
};

MLFAB__INTERNAL int mlfab__worker_attach(mlfab_node *node, mlfab__worker **worker_p) {
  mlfab__role *role = mlfab__roles_add(node, &worker_row, sizeof **worker_p);
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__worker *worker = *worker_p = role->self;
  worker->env = &node->env;
  worker->config = &node->config;
  worker->port = mlfab__roles_port(node, role, MLFAB__LINK_SERVER);
  worker->stats = &node->stats;
  worker->requests = &node->requests;
  worker->rank = (uint32_t)node->config.rank;
  worker->servers = node->config.servers;
  worker->founding = node->founding;
  worker->next_seq = 1;
  worker->epoch = 1;
  worker->announces = MLFAB__NEVER;
  worker->streams = mlfab__alloc_array(worker->env, worker->servers, sizeof *worker->streams);
  worker->lists = mlfab__alloc_aligned(worker->env, sizeof *worker->lists);
  return worker->streams && worker->lists ? 0 : MLFAB_ERR_MEMORY;
}
