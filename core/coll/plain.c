/* plain.c - the communicator: takes a plain collective from the call to the result. See plain.h. */
#include "comm.h"

#include <stdio.h>

/* --- slots --- */

static void plain_free_lists(mlfab__comm *comm, mlfab__comm_slot *slot) {
  if (slot->owed) mlfab__pool_give(&comm->pool, slot->one.data, slot->one.count);
  slot->owed = 0;
  mlfab__pool_give(&comm->pool, slot->blocks, slot->blocks_room * sizeof *slot->blocks);
  if (slot->vecs != &slot->one)
    mlfab__pool_give(&comm->pool, slot->vecs, slot->call.n * sizeof *slot->vecs);
  slot->blocks = slot->vecs = NULL;
  slot->blocks_room = 0;
}

static void plain_free_slot(mlfab__comm *comm, mlfab__comm_slot *slot) {
  if (!slot) return;
  mlfab__dag_free(&slot->run.dag);
  mlfab__free(comm->env, slot->counts, comm->config->workers * sizeof *slot->counts);
  plain_free_lists(comm, slot);
  mlfab__free(comm->env, slot, sizeof *slot);
}

MLFAB__INTERNAL int mlfab__plain_slot_new(mlfab__comm *comm, const mlfab__comm_call *call,
                                          mlfab__comm_slot **slot_p) {
  mlfab__comm_slot *slot = comm->spare;
  if (comm->end - comm->first == MLFAB__COMM_CALLS) return MLFAB_ERR_AGAIN;
  if (!comm->slots) comm->slots = mlfab__alloc_array(comm->env, MLFAB__COMM_CALLS, sizeof slot);
  if (!comm->slots) return MLFAB_ERR_MEMORY;
  if (!slot) {
    slot = comm->spare = mlfab__alloc(comm->env, sizeof *slot);
    if (!slot) return MLFAB_ERR_MEMORY;
    slot->comm = comm;
    mlfab__dag_init(&slot->run.dag, comm->env);
  }
  if (call->counts && !slot->counts)
    slot->counts = mlfab__alloc_array(comm->env, comm->config->workers, sizeof *slot->counts);
  if (call->counts && !slot->counts) return MLFAB_ERR_MEMORY;
  slot->vecs =
      call->n <= 1 ? &slot->one : mlfab__pool_take(&comm->pool, call->n * sizeof *slot->vecs);
  if (!slot->vecs) return MLFAB_ERR_MEMORY;
  *slot_p = slot;
  return 0;
}

static int plain_seeks(const mlfab__comm *comm, uint64_t signature) {
  for (uint32_t i = 0; i < MLFAB__MEMBERSHIP_SEEK; i++)
    if (signature && comm->seek[i] == signature) return 1;
  return 0;
}

MLFAB__INTERNAL void mlfab__comm_seek(mlfab__comm *comm) {
  while (comm->seek[0] && comm->limit < mlfab__comm_called(comm) &&
         !plain_seeks(comm, (*mlfab__comm_place(comm, comm->base + comm->limit))->signature))
    comm->limit++;
}

MLFAB__INTERNAL void mlfab__plain_slot_fill(mlfab__comm *comm, mlfab__comm_slot *slot,
                                            const mlfab__comm_call *call, uint64_t count,
                                            mlfab_request request) {
  uint32_t width = mlfab__plain_width(call);
  comm->spare = slot->next;
  slot->serial = comm->end++;
  slot->request = request;
  *mlfab__comm_place(comm, slot->serial) = slot;
  slot->state = MLFAB__SLOT_WAITING;
  slot->wanted = 0;
  slot->call = *call;
  slot->count = count;
  slot->signature = mlfab__plain_signature(comm, call, count);
  slot->stuck_ns = comm->now_ns;
  slot->missing = MLFAB_NO_RANK;
  for (uint32_t i = 0; i < call->n; i++)
    slot->vecs[i] = (mlfab_vec){call->vecs[i].data, call->vecs[i].count * width};
  slot->call.vecs = slot->vecs;
  if (call->counts) {
    memcpy(slot->counts, call->counts, comm->config->workers * sizeof *slot->counts);
    slot->call.counts = slot->counts;
  }
  slot->mark = mlfab__comm_mark(comm);
  mlfab__comm_seek(comm);
}

MLFAB__INTERNAL int mlfab__plain_past(const mlfab__comm *comm, uint64_t number,
                                      mlfab__comm_past *past_p) {
  const mlfab__comm_slot *slot = mlfab__comm_slot_of(comm, number);
  uint64_t serial = comm->base + number;
  if (number >= comm->end - comm->base) return 0;
  if (!slot && comm->begun - serial > MLFAB__COMM_PAST) return 0;
  *past_p = slot ? mlfab__plain_describe(slot) : comm->past[serial % MLFAB__COMM_PAST];
  return 1;
}

static void plain_close_slot(mlfab__comm *comm, mlfab__comm_slot *slot) {
  mlfab__comm_past *past = &comm->past[slot->serial % MLFAB__COMM_PAST];
  uint64_t *counts = past->counts;
  *past = mlfab__plain_describe(slot);
  if (past->has_counts)
    slot->counts = counts;
  else
    past->counts = counts;
  plain_free_lists(comm, slot);
  slot->state = MLFAB__SLOT_FREE;
  *mlfab__comm_place(comm, slot->serial) = NULL;
  slot->next = comm->spare;
  comm->spare = slot;
  while (comm->first < comm->end && !*mlfab__comm_place(comm, comm->first)) comm->first++;
}

static void plain_finish_slot(mlfab__comm *comm, mlfab__comm_slot *slot) {
  plain_close_slot(comm, slot);
  mlfab__comm_succeed(comm, slot->request);
  comm->due |= MLFAB__COMM_BEGIN;
}

MLFAB__INTERNAL void mlfab__plain_fail(mlfab__comm *comm, const mlfab__comm_slot *slot, int code,
                                       int32_t rank, const char *what) {
  char words[MLFAB__TEXT_MAX];
  const mlfab__comm_past past = mlfab__plain_describe(slot);
  if (rank == MLFAB_NO_RANK) rank = (int32_t)comm->rank;
  mlfab__comm_fail(comm, code, rank, "%.120s: worker %d %.90s",
                   mlfab__plain_words(words, &past, comm->config->workers), (int)rank, what);
}

MLFAB__INTERNAL void mlfab__plain_end_all(mlfab__comm *comm) {
  while (comm->first < comm->end) {
    mlfab__comm_slot *slot = *mlfab__comm_place(comm, comm->first);
    mlfab__comm_end_request(comm, slot->request);
    plain_close_slot(comm, slot);
  }
}

MLFAB__INTERNAL void mlfab__plain_free(mlfab__comm *comm) {
  uint64_t bytes = comm->config->workers * sizeof(uint64_t);
  for (; comm->first < comm->end; comm->first++)
    plain_free_slot(comm, *mlfab__comm_place(comm, comm->first));
  for (uint32_t i = 0; i < MLFAB__COMM_PAST; i++)
    mlfab__free(comm->env, comm->past[i].counts, bytes);
  while (comm->spare) {
    mlfab__comm_slot *slot = comm->spare;
    comm->spare = slot->next;
    plain_free_slot(comm, slot);
  }
  mlfab__free(comm->env, comm->slots, MLFAB__COMM_CALLS * sizeof(mlfab__comm_slot *));
}

/* --- its run --- */

/* Collects the members' blocks in their order, and their lengths. Joins neighbouring blocks. */
static int plain_blocks(mlfab__comm *comm, mlfab__comm_slot *slot, uint64_t *lengths) {
  uint32_t n = 0, width = mlfab__plain_width(&slot->call);
  uint8_t *data = slot->vecs[0].data, *end = NULL;
  slot->blocks = mlfab__pool_take(&comm->pool, comm->members * sizeof *slot->blocks);
  if (!slot->blocks) return MLFAB_ERR_MEMORY;
  slot->blocks_room = comm->members;
  for (uint32_t m = 0; m < comm->members; m++) {
    uint64_t from = 0;
    for (uint32_t r = 0; r < comm->ranks[m]; r++) from += slot->counts[r];
    lengths[m] = slot->counts[comm->ranks[m]];
    uint8_t *at = data + from * width;
    if (n > 0 && at == end) {
      slot->blocks[n - 1].count += lengths[m] * width;
    } else {
      slot->blocks[n++] = (mlfab_vec){at, lengths[m] * width};
    }
    end = at + lengths[m] * width;
  }
  slot->run.spaces[0] = (mlfab__engine_space){slot->blocks};
  return 0;
}

/* Returns the bytes of a message: the windows of a parent with so many children stay within MLFAB__ENGINE_WINDOWS. */
static uint32_t plain_tree_segment(uint32_t children) {
  uint64_t all = (uint64_t)MLFAB__ENGINE_WINDOWS / MLFAB__ENGINE_WINDOW / mlfab__max(children, 1);
  return (uint32_t)mlfab__min(MLFAB__COMM_SEGMENT, mlfab__max(all / 64 * 64, 4096));
}

/* Builds its task graph; `tree` (nodes with at most `children`), or NULL. Errors: MEMORY, LIMIT. */
static int plain_schedule(mlfab__comm *comm, mlfab__comm_slot *slot, const mlfab__tree_node *tree,
                          uint32_t children) {
  const mlfab__comm_call *call = &slot->call;
  mlfab__algorithm_task task = mlfab__plain_task(call, slot->count, comm->members);
  uint64_t *lengths = NULL, bytes = comm->members * sizeof *lengths;
  uint32_t end, tag, culprit;
  int code = 0;
  task.me = comm->me;
  task.tree = tree;
  if (tree) task.algorithm = MLFAB_ALGORITHM_PLANNED;
  if (tree) task.segment = plain_tree_segment(children);
  slot->run.spaces[0] = (mlfab__engine_space){slot->vecs};
  for (uint32_t m = 0; call->kind == MLFAB__COLLECTIVE_BROADCAST && m < comm->members; m++) {
    if (comm->ranks[m] == (uint32_t)call->root) task.root = m;
  }
  if (call->counts) {
    lengths = mlfab__pool_take(&comm->pool, bytes);
    code = lengths ? plain_blocks(comm, slot, lengths) : MLFAB_ERR_MEMORY;
    task.counts = lengths;
  }
  mlfab__dag_clear(&slot->run.dag);
  if (!code) {
    task.algorithm = mlfab__comm_choose(comm, &task);
    code = mlfab__algorithm_build(&slot->run.dag, &task, &end, &tag);
  }
  if (!code) code = mlfab__dag_seal(&slot->run.dag, &culprit);
  mlfab__pool_give(&comm->pool, lengths, bytes);
  return code;
}

static void plain_slot_over(void *self, int status) {
  mlfab__comm_slot *slot = self;
  if (status == 0) plain_finish_slot(slot->comm, slot);
}

/* If others only receive, some calls still wait for them (MLFAB__COMM_AHEAD). */
static int plain_is_eager(const mlfab__comm_slot *slot) {
  uint8_t kind = slot->call.kind;
  int ahead = kind != MLFAB__COLLECTIVE_ALLREDUCE && kind != MLFAB__COLLECTIVE_BARRIER;
  return slot->count * mlfab__plain_width(&slot->call) <= MLFAB__COMM_EAGER &&
         !(ahead && mlfab__comm_number(slot) % MLFAB__COMM_AHEAD == MLFAB__COMM_AHEAD - 1);
}

/* Does the scheduler plan a tree for it? All members answer alike. */
static int plain_is_planned(const mlfab__comm *comm, const mlfab__comm_slot *slot) {
  const mlfab__comm_call *call = &slot->call;
  if (call->kind != MLFAB__COLLECTIVE_ALLREDUCE || comm->members < 3 ||
      comm->config->scheduler == MLFAB_SCHEDULER_NONE)
    return 0;
  if (call->algorithm == MLFAB_ALGORITHM_PLANNED) return 1;
  return call->algorithm == MLFAB_ALGORITHM_AUTO && !(call->reduce && call->ordered) &&
         slot->count * mlfab__plain_width(call) > comm->config->eager_bytes;
}

static void plain_ask_tree(mlfab__comm *comm, const mlfab__comm_slot *slot) {
  const mlfab__tree_ask ask = {.number = MLFAB__COMM_TREE(comm->epoch, mlfab__comm_number(slot)),
                               .bytes = slot->count * mlfab__plain_width(&slot->call)};
  MLFAB__POST_LIST(64, &comm->up, 0, MLFAB__TREE_ASK, tree_ask, &ask, NULL);
}

MLFAB__INTERNAL void mlfab__plain_ask_trees(mlfab__comm *comm) {
  for (uint64_t serial = comm->first; serial < comm->begun; serial++) {
    const mlfab__comm_slot *slot = *mlfab__comm_place(comm, serial);
    if (slot && slot->state == MLFAB__SLOT_PLANNING) plain_ask_tree(comm, slot);
  }
}

/* Arms its run, up and down `tree` if there is one. Returns an error if the epoch fails. */
static int plain_arm(mlfab__comm *comm, mlfab__comm_slot *slot, const mlfab__tree_node *tree,
                     uint32_t children) {
  mlfab__engine_run *run = &slot->run;
  const mlfab__comm_call *call = &slot->call;
  slot->state = MLFAB__SLOT_PLAIN;
  int code = plain_schedule(comm, slot, tree, children);
  if (!code) {
    run->channel = 0;
    run->number = mlfab__comm_number(slot);
    run->signature = slot->signature;
    run->eager = (uint8_t)plain_is_eager(slot);
    run->callers = call->callers;
    run->dtype = call->dtype;
    run->op = call->op;
    run->width = mlfab__plain_width(call);
    run->reduce = mlfab__plain_adds(call) ? call->reduce : NULL;
    run->reduce_user = call->reduce_user;
    run->compute = NULL;
    run->over = plain_slot_over;
    run->self = slot;
    code = mlfab__engine_arm(comm, run, comm->now_ns);
  }
  if (code) mlfab__plain_fail(comm, slot, code, (int32_t)comm->rank, mlfab_error_text(code));
  return code;
}

/* Returns an error if the epoch fails. */
static int plain_begin(mlfab__comm *comm, mlfab__comm_slot *slot) {
  if (comm->members == 1) {
    plain_finish_slot(comm, slot);
  } else if (plain_is_planned(comm, slot)) {
    slot->state = MLFAB__SLOT_PLANNING;
    plain_ask_tree(comm, slot);
  } else {
    return plain_arm(comm, slot, NULL, 0);
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__plain_on_tree(mlfab__comm *comm, const mlfab__frame_in *frame) {
  mlfab__tree_plan plan;
  uint32_t children = 0;
  int code = mlfab__decode_tree_plan(frame->meta, frame->meta_bytes, &plan, NULL);
  uint64_t number = code ? 0 : plan.number - MLFAB__COMM_TREE(comm->epoch, 0);
  mlfab__comm_slot *slot =
      code || comm->phase != MLFAB__COMM_IN ? NULL : mlfab__comm_slot_of(comm, number);
  if (!slot || slot->state != MLFAB__SLOT_PLANNING || comm->failing) return code;
  if (plan.nodes > 0 && plan.nodes != comm->members) return MLFAB_ERR_FRAME;
  uint64_t bytes = MLFAB__TREE_NODES_MAX * sizeof(mlfab__tree_node);
  mlfab__tree_node *tree = plan.nodes > 0 ? mlfab__pool_take(&comm->pool, bytes) : NULL;
  if (plan.nodes > 0 && !tree) {
    mlfab__comm_fail_memory(comm);
    return 0;
  }
  if (tree) code = mlfab__decode_tree_plan(frame->meta, frame->meta_bytes, &plan, tree);
  if (tree && !code && mlfab__algorithm_check_tree(tree, plan.nodes, &children))
    code = MLFAB_ERR_FRAME;
  if (!code) (void)plain_arm(comm, slot, tree, children);
  mlfab__pool_give(&comm->pool, tree, bytes);
  return code;
}

/* --- its turn --- */

/* Turns an outside call into a run. */
static void plain_go_inside(mlfab__comm *comm, mlfab__comm_slot *slot) {
  /* This worker no longer uses the arena in this epoch; others may not know yet. */
  if (comm->go.arena) comm->go.arena = MLFAB__ARENA_LEFT;
  if (mlfab__plain_finite(comm, &slot->call, 1)) {
    (void)plain_begin(comm, slot);
  } else {
    mlfab__plain_fail(comm, slot, MLFAB_ERR_NOT_FINITE, (int32_t)comm->rank,
                      "has NaN or infinity in its data");
  }
}

/* Gives the object that this call opens its channel, even if the object is gone already. */
static void plain_open_object(mlfab__comm *comm, uint32_t id) {
  mlfab__comm_object *object = mlfab__comm_object_find(comm, id);
  comm->objects_opened++;
  if (!object) return;
  object->channel = (uint32_t)comm->objects_opened;
  object->stuck_ns = comm->now_ns;
  if (object->kind->begin) object->kind->begin(object->self);
}

/* Begins a call of a standing epoch. Returns an error if the epoch fails. */
static int plain_begin_call(mlfab__comm *comm, mlfab__comm_slot *slot) {
  int32_t stranger = mlfab__plain_stranger(comm, &slot->call);
  slot->stuck_ns = comm->now_ns;
  if (comm->left && mlfab__comm_number(slot) >= comm->left_calls) {
    mlfab__plain_fail(comm, slot, MLFAB_ERR_PEER_CLOSED, comm->left_rank, "has left");
    return MLFAB_ERR_PEER_CLOSED;
  }
  if (stranger != MLFAB_NO_RANK) {
    mlfab__plain_fail(comm, slot, MLFAB_ERR_ARGUMENT, stranger,
                      "does not take part, and is the root or has a block");
    return MLFAB_ERR_ARGUMENT;
  }
  if (slot->call.opens) plain_open_object(comm, slot->call.opens);
  if (comm->failing) { /* the object could not begin; until the tick its user may close it */
    comm->later = 1;
    return comm->verdict.code;
  }
  if (slot->call.outside && comm->go.arena == MLFAB__ARENA_USED && comm->members > 1) {
    slot->state = MLFAB__SLOT_OUTSIDE;
    slot->wanted = (uint8_t)mlfab__engine_came(comm, mlfab__comm_number(slot));
    return 0;
  }
  if (slot->call.outside) { /* nobody has checked its data for NaN yet */
    plain_go_inside(comm, slot);
    return 0;
  }
  return plain_begin(comm, slot);
}

static int plain_may_begin(mlfab__comm *comm, const mlfab__comm_call *call) {
  const mlfab__comm_object *object = call->of ? mlfab__comm_object_find(comm, call->of) : NULL;
  return !object || !object->kind->stands || object->kind->stands(object->self);
}

/* If others delay a call, it delays the calls MLFAB__COMM_AHEAD above it, before these take all of the others'
 * credit. */
MLFAB__INTERNAL void mlfab__plain_begin_waiting(mlfab__comm *comm) {
  while (comm->phase == MLFAB__COMM_IN && !comm->failing && comm->begun < comm->end &&
         comm->begun - comm->first < MLFAB__COMM_AHEAD && !comm->frozen &&
         comm->begun - comm->base < comm->limit) {
    mlfab__comm_slot *slot = *mlfab__comm_place(comm, comm->begun);
    if (!plain_may_begin(comm, &slot->call)) break;
    comm->begun++;
    (void)plain_begin_call(comm, slot);
  }
}

/* --- the call --- */

static int plain_open_slot(mlfab__comm *comm, const mlfab__comm_call *call, uint64_t count,
                           uint64_t timeout_ns, mlfab_request *request_p, mlfab_error *error) {
  mlfab__comm_slot *slot;
  int code = mlfab__plain_slot_new(comm, call, &slot);
  if (code == MLFAB_ERR_MEMORY) return MLFAB__FAIL(error, code, "%s: out of memory", call->words);
  if (code)
    return MLFAB__FAIL(error, code, "%s: %d collectives are under way", call->words,
                       MLFAB__COMM_CALLS);
  code = mlfab__request_room(comm->requests, MLFAB__REQUEST_COLLECTIVE, error);
  if (code) {
    slot->call.n = call->n;
    plain_free_lists(comm, slot);
    return code;
  }
  mlfab__request *request =
      mlfab__request_open(comm->requests, MLFAB__REQUEST_COLLECTIVE,
                          (uint32_t)(comm->end % MLFAB__COMM_CALLS), comm->now_ns, timeout_ns);
  *request_p = request->id;
  mlfab__plain_slot_fill(comm, slot, call, count, request->id);
  comm->due |= MLFAB__COMM_BEGIN | MLFAB__COMM_JOIN; /* the request tells the outcome */
  return 0;
}

static int plain_refuse_nan(mlfab__comm *comm, const mlfab__comm_call *call, uint64_t count,
                            mlfab_error *error) {
  mlfab__comm_fail(comm, MLFAB_ERR_NOT_FINITE, (int32_t)comm->rank,
                   "%.60s of %llu elements: worker %u has NaN or infinity in its data", call->words,
                   (unsigned long long)count, comm->rank);
  comm->owed = 0; /* the caller sees it now */
  return mlfab__error(error, MLFAB_ERR_NOT_FINITE, (int32_t)comm->rank, 0, 0, "%s",
                      comm->fail.text);
}

MLFAB__INTERNAL int mlfab__comm_start(mlfab__comm *comm, const mlfab__comm_call *call,
                                      uint64_t timeout_ns, uint64_t now_ns,
                                      mlfab_request *request_p, mlfab_error *error) {
  uint64_t count;
  int code = mlfab__plain_check(comm, call, &count, error);
  if (code) return code;
  if (mlfab__comm_owed(comm, error)) return comm->verdict.code;
  comm->now_ns = now_ns;
  mlfab__plain_take_inputs(comm, call);
  if (!call->outside && !mlfab__plain_finite(comm, call, mlfab__plain_width(call)))
    return plain_refuse_nan(comm, call, count, error);
  mlfab__comm_enter(comm, now_ns);
  code = plain_open_slot(comm, call, count, timeout_ns, request_p, error);
  mlfab__comm_exit(comm);
  return code;
}

MLFAB__INTERNAL int mlfab__comm_forgo(mlfab__comm *comm, const mlfab_error *why, uint64_t now_ns) {
  if (comm->failing || comm->phase == MLFAB__COMM_ENDING) return MLFAB_ERR_AGAIN;
  if (mlfab__comm_owed(comm, NULL)) return 0; /* the call would have reported this */
  comm->now_ns = now_ns;
  mlfab__comm_fail(comm, why->code, (int32_t)comm->rank, "worker %u: %.200s", comm->rank,
                   why->text);
  comm->owed = 0;
  return 0;
}

/* --- outside calls --- */

MLFAB__INTERNAL void mlfab__comm_go_on(mlfab__comm *comm) { comm->due |= MLFAB__COMM_BEGIN; }

/* --- outside calls --- */

static mlfab__comm_slot *plain_slot_by_request(mlfab__comm *comm, const mlfab__request *request) {
  mlfab__comm_slot *slot =
      comm->slots && request->slot < MLFAB__COMM_CALLS ? comm->slots[request->slot] : NULL;
  return slot && slot->request == request->id ? slot : NULL;
}

MLFAB__INTERNAL int mlfab__comm_outside(mlfab__comm *comm, mlfab_request id, uint64_t *number_p,
                                        uint64_t *signature_p) {
  mlfab__request *request = mlfab__request_find(comm->requests, id);
  if (!request) return MLFAB_ERR_REQUEST;
  if (request->done) return request->result.status ? request->result.status : MLFAB_ERR_UNSUPPORTED;
  mlfab__comm_slot *slot = plain_slot_by_request(comm, request);
  if (!slot) return MLFAB_ERR_REQUEST;
  if (slot->state == MLFAB__SLOT_WAITING) return 0;
  if (slot->state == MLFAB__SLOT_OUTSIDE && slot->wanted) {
    mlfab__comm_enter(comm, 0);
    plain_go_inside(comm, slot);
    mlfab__comm_exit(comm);
    return request->done && request->result.status ? request->result.status : MLFAB_ERR_UNSUPPORTED;
  }
  if (slot->state != MLFAB__SLOT_OUTSIDE) return MLFAB_ERR_UNSUPPORTED;
  *number_p = mlfab__comm_number(slot);
  *signature_p = slot->signature;
  return 1;
}

MLFAB__INTERNAL int mlfab__comm_outside_over(mlfab__comm *comm, mlfab_request id) {
  const mlfab__request *request = mlfab__request_find(comm->requests, id);
  if (!request) return MLFAB_ERR_REQUEST;
  if (request->done) return request->result.status ? request->result.status : MLFAB_ERR_UNSUPPORTED;
  const mlfab__comm_slot *slot = plain_slot_by_request(comm, request);
  return slot && slot->state == MLFAB__SLOT_OUTSIDE && !slot->wanted ? 0 : MLFAB_ERR_UNSUPPORTED;
}

MLFAB__INTERNAL void mlfab__comm_finish(mlfab__comm *comm, mlfab_request id, int code, int32_t rank,
                                        uint64_t now_ns) {
  mlfab__request *request = mlfab__request_find(comm->requests, id);
  mlfab__comm_slot *slot = request ? plain_slot_by_request(comm, request) : NULL;
  if (!slot || slot->state != MLFAB__SLOT_OUTSIDE) return; /* it has ended meanwhile */
  mlfab__comm_enter(comm, now_ns);
  if (code == 0) {
    plain_finish_slot(comm, slot);
  } else if (code == MLFAB_ERR_MISMATCH) {
    /* All have called: server 0 compares the calls, and its verdict names both. */
    mlfab__comm_stuck(comm, 0, mlfab__comm_number(slot));
  } else if (code == MLFAB_ERR_NOT_FINITE) {
    mlfab__plain_fail(comm, slot, code, rank, "has NaN or infinity in its data");
  } else {
    mlfab__plain_fail(comm, slot, code, rank, mlfab_error_text(code));
  }
  mlfab__comm_exit(comm);
}

/* --- calls that do not end --- */

/* Returns the rank for which this call waits, or MLFAB_NO_RANK, and a reason if known. */
static int32_t plain_awaited(const mlfab__comm *comm, const mlfab__comm_slot *slot,
                             const char **why_p) {
  *why_p = slot->missing_waits ? "waits in a barrier instead" : "has not called it";
  if (slot->missing != MLFAB_NO_RANK) return slot->missing;
  if (comm->phase != MLFAB__COMM_IN || mlfab__comm_number(slot) >= comm->limit) {
    *why_p = comm->others[0]       ? comm->others
             : comm->missing_waits ? "waits in a barrier instead"
                                   : "takes no part yet";
    return comm->missing;
  }
  *why_p = "is awaited";
  return mlfab__engine_awaits(comm, &slot->run);
}

/* Withdraws a request, which ends the epoch: a call or round of `what` with this number of its unit `counts`. A
 * deadline blames the awaited rank, if it is known. */
static void plain_withdraw(mlfab__comm *comm, const mlfab__request *request, int code,
                           const char *what, const char *counts, uint64_t number, int32_t awaited,
                           const char *why) {
  char waited[24];
  unsigned long long which = number;
  mlfab__duration(waited, comm->now_ns - request->started_ns);
  if (code != MLFAB_ERR_TIMEOUT) {
    mlfab__comm_fail(comm, code, (int32_t)comm->rank,
                     "%.120s (%s %llu): withdrawn by worker %u after %s", what, counts, which,
                     comm->rank, waited);
  } else if (awaited == MLFAB_NO_RANK) {
    mlfab__comm_fail(comm, code, awaited, "%.120s (%s %llu): worker %u's deadline passed after %s",
                     what, counts, which, comm->rank, waited);
  } else {
    mlfab__comm_fail(comm, code, awaited,
                     "%.120s (%s %llu): worker %u's deadline passed after %s: worker %d %s", what,
                     counts, which, comm->rank, waited, (int)awaited, why);
  }
}

/* Server 0's report of missing ranks counts more than the object's own. */
static void plain_withdraw_object(mlfab__comm *comm, const mlfab__request *request, int code,
                                  const mlfab__comm_object *object) {
  const mlfab__comm_kind *kind = object->kind;
  const char *why = "is awaited";
  uint64_t number = 0;
  int32_t rank = kind->awaited(object->self, &number, &why);
  if (comm->phase != MLFAB__COMM_IN) {
    rank = comm->missing;
    why = "takes no part yet";
  } else if (object->missing != MLFAB_NO_RANK) {
    rank = object->missing;
    why = kind->absent;
  }
  plain_withdraw(comm, request, code, kind->what, kind->counts, number, rank, why);
}

MLFAB__INTERNAL int32_t mlfab__comm_awaited(void *self, const mlfab__request *request) {
  mlfab__comm *comm = self;
  const char *why;
  if (request->slot < MLFAB__COMM_CALLS) {
    const mlfab__comm_slot *slot = plain_slot_by_request(comm, request);
    return slot ? plain_awaited(comm, slot, &why) : MLFAB_NO_RANK;
  }
  const mlfab__comm_object *object =
      mlfab__comm_object_find(comm, request->slot - MLFAB__COMM_CALLS);
  uint64_t number = 0;
  if (!object) return MLFAB_NO_RANK;
  if (comm->phase != MLFAB__COMM_IN) return comm->missing;
  if (object->missing != MLFAB_NO_RANK) return object->missing;
  return object->kind->awaited(object->self, &number, &why);
}

MLFAB__INTERNAL void mlfab__comm_withdraw(void *self, mlfab__request *request, int code,
                                          uint64_t now_ns) {
  mlfab__comm *comm = self;
  mlfab__comm_enter(comm, now_ns);
  if (request->slot < MLFAB__COMM_CALLS) {
    const mlfab__comm_slot *slot = plain_slot_by_request(comm, request);
    char words[MLFAB__TEXT_MAX];
    const char *why;
    if (slot) {
      int32_t rank = plain_awaited(comm, slot, &why);
      const mlfab__comm_past past = mlfab__plain_describe(slot);
      mlfab__plain_words(words, &past, comm->config->workers);
      plain_withdraw(comm, request, code, words, "number", mlfab__comm_number(slot), rank, why);
    }
  } else {
    const mlfab__comm_object *object =
        mlfab__comm_object_find(comm, request->slot - MLFAB__COMM_CALLS);
    if (object) plain_withdraw_object(comm, request, code, object);
  }
  mlfab__comm_exit(comm);
}
