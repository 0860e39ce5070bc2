/* partial.c - builds and runs the rounds of a partial reduction at one member: see partial.h. */
#include "partial.h"

#include "../kernels/kernels_combine.h"
#include "../base/rng.h"

enum { PARTIAL_TAG_FAR, PARTIAL_TAG_NEAR, PARTIAL_TAG_ARRIVE, PARTIAL_TAGS };

/* ---- memory */

static uint64_t partial_stride(uint64_t bytes) { return (bytes + 63) & ~(uint64_t)63; }

MLFAB__INTERNAL int mlfab__partial_init(mlfab__partial *partial, mlfab__env *env,
                                        const mlfab__partial_spec *spec) {
  uint32_t queued = spec->results == MLFAB_PARTIAL_QUEUED ? spec->queue_max : 0;
  uint64_t stride = partial_stride(spec->count * spec->width);
  memset(partial, 0, sizeof *partial);
  partial->env = env;
  partial->spec = *spec;
  partial->bytes = spec->count * spec->width;
  partial->nnotes = queued ? queued : 2;
  if (stride > SIZE_MAX / (4 + (uint64_t)queued)) return MLFAB_ERR_MEMORY;
  partial->memory_bytes = (size_t)(stride * (4 + (uint64_t)queued));
  partial->memory = mlfab__alloc_aligned(env, partial->memory_bytes);
  partial->notes = mlfab__alloc_array(env, partial->nnotes, sizeof *partial->notes);
  if (partial->memory == NULL || partial->notes == NULL) {
    mlfab__partial_free(partial);
    return MLFAB_ERR_MEMORY;
  }
  partial->pending = partial->memory;
  partial->kept = partial->memory + stride;
  for (uint32_t i = 0; i < 2; i++) partial->data[i] = partial->memory + (2 + i) * stride;
  partial->queue = partial->memory + 4 * stride;
  return 0;
}

MLFAB__INTERNAL void mlfab__partial_free(mlfab__partial *partial) {
  mlfab__env *env = partial->env;
  mlfab__free_aligned(env, partial->memory, partial->memory_bytes);
  mlfab__free_aligned(env, partial->flush_memory, (size_t)partial->bytes);
  mlfab__free(env, partial->notes, partial->nnotes * sizeof *partial->notes);
  partial->memory = partial->flush_memory = NULL;
  partial->notes = NULL;
}

/* ---- the task graph */

/* A task graph under construction. `code`: the first error; after it nothing is added. */
typedef struct partial_work {
  mlfab__dag *dag;
  int rc;
} partial_work;

static uint32_t partial_add(partial_work *w, mlfab__dag_op op) {
  uint32_t id = 0;
  if (!w->rc) w->rc = mlfab__dag_add(w->dag, &op, &id);
  return id;
}

static void partial_after(partial_work *w, uint32_t op, uint32_t dependency) {
  if (!w->rc) w->rc = mlfab__dag_after(w->dag, op, dependency);
}

/* Adds a SEND of a bare notice, which the runner triggers. */
static uint32_t partial_add_send(partial_work *w, uint32_t peer, uint32_t tag) {
  return partial_add(w, (mlfab__dag_op){.kind = MLFAB__DAG_SEND,
                                        .outside = 1,
                                        .optional = 1,
                                        .copy = 1,
                                        .peer = peer,
                                        .tag = tag});
}

static uint32_t partial_add_recv(partial_work *w, uint32_t peer, uint32_t tag) {
  return partial_add(
      w, (mlfab__dag_op){.kind = MLFAB__DAG_RECV, .optional = 1, .peer = peer, .tag = tag});
}

/* Adds the notices of one level. Notices of the highest level are never passed on: they have one kind. */
static void partial_add_level(partial_work *w, mlfab__partial *partial, uint32_t level,
                              uint32_t start) {
  uint32_t n = partial->members, far = 1u << level;
  uint32_t to = (partial->me + far) % n, from = (partial->me + n - far) % n;
  for (uint32_t near = 0; near < (level + 1 < partial->levels ? 2u : 1u); near++) {
    uint32_t tag = near ? PARTIAL_TAG_NEAR : PARTIAL_TAG_FAR;
    uint32_t recv = partial_add_recv(w, from, tag);
    uint32_t notice =
        partial_add(w, (mlfab__dag_op){.kind = MLFAB__DAG_COMPUTE,
                                       .optional = 1,
                                       .code = MLFAB__PARTIAL_NOTICES + 2 * level + near});
    partial_after(w, notice, recv);
    partial_after(w, start, notice);
    partial->plan.send[level][near] = partial_add_send(w, to, tag);
  }
}

/* Lets members report their calls to the member that counts them. */
static void partial_add_arrivals(partial_work *w, mlfab__partial *partial) {
  partial->plan.arrive = w->dag->nops;
  for (uint32_t i = 0; i < partial->members; i++)
    if (i != partial->me) partial_add_send(w, i, PARTIAL_TAG_ARRIVE);
  for (uint32_t i = 0; i < partial->members; i++)
    if (i != partial->me)
      partial_after(w, partial->plan.initiate, partial_add_recv(w, i, PARTIAL_TAG_ARRIVE));
}

MLFAB__INTERNAL mlfab__algorithm_task mlfab__partial_task(const mlfab__partial *partial) {
  return (mlfab__algorithm_task){.kind = MLFAB__COLLECTIVE_ALLREDUCE,
                                 .algorithm = partial->spec.algorithm,
                                 .mean = partial->spec.mean,
                                 .members = partial->members,
                                 .me = partial->me,
                                 .width = partial->spec.width,
                                 .count = partial->spec.count,
                                 .segment = partial->spec.segment,
                                 .tag = PARTIAL_TAGS,
                                 .space = MLFAB__PARTIAL_DATA,
                                 .after = partial->plan.take};
}

/* Adds the exchange of data and bitmap, after TAKE. */
static void partial_add_exchange(partial_work *w, mlfab__partial *partial, uint8_t algorithm,
                                 uint32_t deliver) {
  mlfab__algorithm_task task = mlfab__partial_task(partial);
  uint32_t end;
  task.algorithm = algorithm;
  for (int i = 0; i < 2 && !w->rc; i++) {
    w->rc = mlfab__algorithm_build(w->dag, &task, &end, &task.tag);
    partial_after(w, deliver, end);
    task.algorithm = MLFAB_ALGORITHM_DOUBLING;
    task.mean = 0;
    task.width = 8;
    task.count = (partial->members + 63) / 64;
    task.space = MLFAB__PARTIAL_BITMAP;
    task.reduce = partial->spec.reduce_or;
  }
}

MLFAB__INTERNAL int mlfab__partial_build(mlfab__partial *partial, mlfab__dag *dag,
                                         uint8_t algorithm) {
  const mlfab__partial_spec *spec = &partial->spec;
  partial_work work = {dag, 0};
  uint32_t quorum = spec->mode == MLFAB_PARTIAL_QUORUM ? spec->quorum : 1, start, deliver, culprit;
  mlfab__dag_op initiate = {.kind = MLFAB__DAG_COMPUTE,
                            .outside = 1,
                            .optional = 1,
                            .need = (uint32_t)mlfab__min(quorum, partial->members),
                            .code = MLFAB__PARTIAL_INITIATE};
  mlfab__dag_op take = {.kind = MLFAB__DAG_COMPUTE, .outside = 1, .code = MLFAB__PARTIAL_TAKE};
  mlfab__dag_clear(dag);
  partial->plan.initiate = partial_add(&work, initiate);
  start = partial_add(&work, (mlfab__dag_op){.kind = MLFAB__DAG_NOP, .need = 1});
  partial_after(&work, start, partial->plan.initiate);
  for (uint32_t b = 0; b < partial->levels; b++) partial_add_level(&work, partial, b, start);
  if (spec->mode == MLFAB_PARTIAL_QUORUM) partial_add_arrivals(&work, partial);
  partial->plan.take = partial_add(&work, take);
  partial_after(&work, partial->plan.take, start);
  deliver = partial_add(
      &work, (mlfab__dag_op){.kind = MLFAB__DAG_COMPUTE, .code = MLFAB__PARTIAL_DELIVER});
  partial_add_exchange(&work, partial, algorithm, deliver);
  return work.rc ? work.rc : mlfab__dag_seal(dag, &culprit);
}

/* ---- activation */

/* Sends notices on this level and those above; this member is d < 2^level after the initiator. near: d < E modulo
 * 2^level, where E = P - 2^top. The receiver on level b is at d + 2^b: if E has bit b, the lower bits of E decide
 * whether it is near; E's bits from `level` to b decide alone if any is set. */
static void partial_notify(mlfab__partial *partial, mlfab__dag *dag, uint32_t level, int near) {
  uint32_t top = partial->levels - 1, extra = partial->members - (1u << top);
  for (uint32_t b = level; b < partial->levels; b++) {
    const uint32_t *send = partial->plan.send[b];
    uint32_t bits = (b < top ? extra & ((1u << b) - 1) : extra) >> level;
    int below = bits != 0 || near;
    if (b == top) {
      if (below) mlfab__dag_trigger(dag, send[0]);
    } else if (!dag->triggered[send[0]] && !dag->triggered[send[1]]) {
      mlfab__dag_trigger(dag, send[(extra >> b & 1) && below]);
    }
  }
}

MLFAB__INTERNAL uint32_t mlfab__partial_draw(const mlfab__partial *partial, uint64_t round) {
  return (uint32_t)(mlfab__mix(partial->spec.seed ^ mlfab__mix(round)) % partial->members);
}

MLFAB__INTERNAL uint32_t mlfab__partial_trigger(const mlfab__partial *partial) {
  const mlfab__partial_plan *plan = &partial->plan;
  if (!partial->settled || !partial->waiting || partial->taken) return MLFAB__DAG_NONE;
  if (partial->spec.mode == MLFAB_PARTIAL_SOLO) return plan->initiate;
  uint32_t drawn = mlfab__partial_draw(partial, partial->over);
  if (drawn == partial->me) return plan->initiate;
  if (partial->spec.mode == MLFAB_PARTIAL_MAJORITY) return MLFAB__DAG_NONE;
  return plan->arrive + drawn - (drawn > partial->me);
}

MLFAB__INTERNAL uint32_t mlfab__partial_awaits(const mlfab__partial *partial) {
  if (!partial->settled || partial->taken || partial->spec.mode != MLFAB_PARTIAL_MAJORITY)
    return MLFAB__DAG_NONE;
  return mlfab__partial_draw(partial, partial->over);
}

/* ---- epochs */

MLFAB__INTERNAL void mlfab__partial_begin(mlfab__partial *partial, uint32_t members, uint32_t me,
                                          const uint32_t *ranks) {
  assert(members > 0 && members <= MLFAB__COLLECTIVE_MEMBERS_MAX && me < members);
  partial->members = members;
  partial->me = me;
  partial->ranks = ranks;
  partial->levels = 0;
  while (1u << partial->levels < members) partial->levels++;
}

static void partial_swap(uint8_t **a, uint8_t **b) {
  uint8_t *was = *a;
  *a = *b;
  *b = was;
}

/* Returns data that no round used to pending: it is older than the later data. */
static void partial_return(mlfab__partial *partial, uint8_t **array, int some, uint64_t calls) {
  if (some && partial->some) {
    mlfab__kernel_combine_by(partial->spec.kernels, MLFAB_OP_SUM, partial->spec.dtype,
                             partial->pending, *array, partial->pending, partial->spec.count, 0);
  } else if (some) {
    partial_swap(&partial->pending, array);
    partial->some = 1;
  }
  partial->pending_calls += calls;
}

static mlfab__partial_mark *partial_mark(mlfab__partial *partial, uint32_t epoch) {
  return &partial->marks.past[epoch % MLFAB__PARTIAL_EPOCHS];
}

MLFAB__INTERNAL void mlfab__partial_mark_epoch(mlfab__partial *partial, uint32_t epoch) {
  uint32_t missed = epoch - partial->epoch;
  for (uint32_t i = 0; i < missed && i < MLFAB__PARTIAL_EPOCHS; i++)
    *partial_mark(partial, epoch - i) = (mlfab__partial_mark){0, 0};
  partial->marks.now = (mlfab__partial_mark){partial->given + 1, partial->flushes + 1};
}

/* Returns the beginning of the first epoch that others have settled and this member has missed. */
static mlfab__partial_mark partial_missed(mlfab__partial *partial, uint32_t epoch) {
  uint32_t missed = epoch - partial->epoch;
  uint32_t i = missed < MLFAB__PARTIAL_EPOCHS ? missed : MLFAB__PARTIAL_EPOCHS;
  while (--i > 0) {
    const mlfab__partial_mark *mark = partial_mark(partial, epoch - i);
    if (mark->base > 0 && mark->flushes > 0) return *mark;
  }
  return partial->marks.now;
}

MLFAB__INTERNAL int mlfab__partial_settle(mlfab__partial *partial, uint32_t epoch) {
  const mlfab__partial_mark now = partial->marks.now, first = partial_missed(partial, epoch);
  assert(!partial->settled && epoch > partial->epoch);
  if (now.base <= partial->given || now.base < partial->over || now.flushes <= partial->flushes ||
      first.base > now.base || first.flushes > now.flushes)
    return MLFAB_ERR_FRAME;
  uint64_t base = now.base - 1, used = first.base - 1;
  if (partial->flushing && first.flushes - 1 <= partial->flushes)
    partial_return(partial, &partial->flushed, partial->flushed_some, partial->flushed_calls);
  if (partial->over > used || (partial->taken && partial->over == used))
    partial_return(partial, &partial->kept, partial->kept_some, partial->kept_calls);
  *partial_mark(partial, epoch) = now;
  partial->epoch = epoch;
  partial->flushing = 0;
  partial->flushes = now.flushes - 1;
  partial->taken = partial->kept_some = 0;
  partial->kept_calls = 0;
  partial->over = partial->given = base;
  partial->step = base + partial->waiting;
  partial->settled = 1;
  return 0;
}

MLFAB__INTERNAL void mlfab__partial_end(mlfab__partial *partial) {
  partial->waiting = 0;
  partial->settled = 0;
}

/* ---- rounds */

MLFAB__INTERNAL int mlfab__partial_may_take(const mlfab__partial *partial) {
  if (!partial->settled || partial->taken) return 0;
  return partial->spec.results != MLFAB_PARTIAL_QUEUED ||
         partial->over < partial->step + partial->spec.queue_max;
}

static void partial_take(mlfab__partial *partial, uint64_t round) {
  uint32_t parity = round & 1;
  int some = partial->some;
  assert(round == partial->over && !partial->taken);
  /* The initiator of this round has the result of the former round. */
  partial->given = mlfab__max(partial->given, round);
  partial->taken = 1;
  partial->kept_some = (uint8_t)some;
  partial->kept_calls = 0;
  memset(partial->bitmap[parity], 0, sizeof partial->bitmap[parity]);
  if (!some) {
    memset(partial->data[parity], 0, partial->bytes);
    return;
  }
  partial_swap(&partial->pending, &partial->kept);
  partial->some = 0;
  memcpy(partial->data[parity], partial->kept, partial->bytes);
  partial->kept_calls = partial->pending_calls;
  partial->pending_calls = 0;
  if (partial->step > round)
    partial->bitmap[parity][partial->me / 64] |= (uint64_t)1 << partial->me % 64;
}

/* Notes the bitmap by ranks, and the rest of a result's description. */
static void partial_note(const mlfab__partial *partial, uint64_t round, mlfab__partial_note *note) {
  const uint64_t *bitmap = partial->bitmap[round & 1];
  memset(note, 0, sizeof *note);
  note->workers = partial->members;
  note->included = bitmap[partial->me / 64] >> partial->me % 64 & 1;
  for (uint32_t i = 0; i < partial->members; i++) {
    uint32_t rank = partial->ranks[i];
    if (!(bitmap[i / 64] >> i % 64 & 1)) continue;
    note->active++;
    if (rank / 64 < MLFAB__COUNT(note->bitmap)) note->bitmap[rank / 64] |= (uint64_t)1 << rank % 64;
  }
}

/* Answers the call of step - 1 with the result of `round`. */
static void partial_answer(mlfab__partial *partial, uint64_t round, const uint8_t *data) {
  const mlfab__partial_note *note = &partial->notes[round % partial->nnotes];
  mlfab_partial_info *info = &partial->answer;
  uint64_t step = partial->step - 1;
  memcpy(partial->out, data, partial->bytes);
  memset(info, 0, sizeof *info);
  info->size = sizeof *info;
  info->included = note->included && step == round;
  info->round = round;
  info->step = step;
  info->active = note->active;
  info->workers = note->workers;
  info->stale = (uint32_t)(partial->pending_calls + (partial->taken ? partial->kept_calls : 0));
  memcpy(info->bitmap, note->bitmap, sizeof info->bitmap);
  partial->given = mlfab__max(partial->given, round + 1);
  partial->waiting = 0;
}

static int partial_deliver(mlfab__partial *partial, uint64_t round) {
  const uint8_t *data = partial->data[round & 1];
  assert(round == partial->over && partial->taken);
  partial_note(partial, round, &partial->notes[round % partial->nnotes]);
  partial->over = round + 1;
  partial->taken = 0;
  if (partial->waiting && partial->step == round + 1) {
    partial_answer(partial, round, data);
    return 1;
  }
  if (partial->spec.results == MLFAB_PARTIAL_QUEUED)
    memcpy(partial->queue + round % partial->spec.queue_max * partial_stride(partial->bytes), data,
           partial->bytes);
  return 0;
}

MLFAB__INTERNAL int mlfab__partial_compute(mlfab__partial *partial, mlfab__dag *dag,
                                           uint64_t number, uint32_t code) {
  if (code == MLFAB__PARTIAL_DELIVER) return partial_deliver(partial, number);
  if (code == MLFAB__PARTIAL_TAKE) {
    partial_take(partial, number);
  } else if (code == MLFAB__PARTIAL_INITIATE) {
    if (partial->levels > 0) partial_notify(partial, dag, 0, 0);
  } else {
    uint32_t notice = code - MLFAB__PARTIAL_NOTICES;
    partial_notify(partial, dag, notice / 2 + 1, notice & 1);
  }
  return 0;
}

/* ---- calls */

MLFAB__INTERNAL void mlfab__partial_keep(mlfab__partial *partial, const void *data) {
  const mlfab__partial_spec *spec = &partial->spec;
  if (partial->some) {
    mlfab__kernel_combine_by(spec->kernels, MLFAB_OP_SUM, spec->dtype, partial->pending,
                             partial->pending, data, spec->count, 0);
  } else {
    memcpy(partial->pending, data, partial->bytes);
  }
  partial->some = 1;
  partial->pending_calls++;
}

MLFAB__INTERNAL int mlfab__partial_call(mlfab__partial *partial, void *data) {
  const mlfab__partial_spec *spec = &partial->spec;
  assert(!partial->waiting && !(partial->flushing && partial->settled));
  mlfab__partial_keep(partial, data);
  partial->waiting = 1;
  partial->out = data;
  if (!partial->settled) return 0;
  uint64_t step = partial->step++, newest = partial->over - 1;
  if (step >= partial->over) return 0;
  if (spec->results == MLFAB_PARTIAL_LATEST) {
    partial_answer(partial, newest, partial->data[newest & 1]);
  } else {
    partial_answer(partial, step,
                   partial->queue + step % spec->queue_max * partial_stride(partial->bytes));
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__partial_flush_room(mlfab__partial *partial) {
  if (partial->flush_memory) return 0;
  partial->flush_memory = mlfab__alloc_aligned(partial->env, (size_t)partial->bytes);
  partial->flushed = partial->flush_memory;
  return partial->flush_memory ? 0 : MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL void mlfab__partial_flush(mlfab__partial *partial, void *data) {
  assert(partial->settled && partial->flush_memory && !partial->waiting && !partial->flushing);
  partial->flushing = 1;
  partial->flushed_some = partial->some;
  partial->flushed_calls = partial->pending_calls;
  partial->some = 0;
  partial->pending_calls = 0;
  if (partial->flushed_some) {
    partial_swap(&partial->pending, &partial->flushed);
    memcpy(data, partial->flushed, partial->bytes);
  } else {
    memset(data, 0, partial->bytes);
  }
}

MLFAB__INTERNAL void mlfab__partial_flushed(mlfab__partial *partial, int done) {
  if (!partial->flushing || !done) return;
  partial->flushing = 0;
  partial->flushes++;
}
