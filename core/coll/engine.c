/* engine.c - the communicator: executes runs, and sends and takes their messages. See engine.h. */
#include "comm.h"

#include <stdio.h>

enum {
  ENGINE_STAGED_MAX = 256 << 10 /* limit of early frames, bytes: more is an attack */
};

/* --- stretches of the runs' memory --- */

typedef struct engine_walk {
  const mlfab_vec *vec;
  uint64_t skip, left;
} engine_walk;

static engine_walk engine_walk_begin(const mlfab__engine_run *run, const mlfab__dag_op *op,
                                     uint64_t offset, uint64_t bytes) {
  engine_walk walk = {run->spaces[op->space].vecs, op->at + offset, bytes};
  if (bytes > 0) {
    for (; walk.skip >= walk.vec->count; walk.vec++) walk.skip -= walk.vec->count;
  }
  return walk;
}

/* Returns the next contiguous piece, of *bytes_p bytes, or NULL. */
static uint8_t *engine_walk_next(engine_walk *walk, uint64_t *bytes_p) {
  if (walk->left == 0) return NULL;
  while (walk->skip == walk->vec->count) {
    walk->vec++;
    walk->skip = 0;
  }
  uint8_t *piece = (uint8_t *)walk->vec->data + walk->skip;
  *bytes_p = mlfab__min(walk->vec->count - walk->skip, walk->left);
  walk->skip += *bytes_p;
  walk->left -= *bytes_p;
  return piece;
}

/* --- sending --- */

static mlfab__coll engine_head(const mlfab__engine_run *run, uint32_t tag, uint32_t flags,
                               uint64_t total) {
  return (mlfab__coll){.channel = run->channel,
                       .number = run->number,
                       .tag = tag,
                       .flags = flags,
                       .signature = run->signature,
                       .total = total};
}

/* Sends the next n bytes of a message. Copies a small message: then nothing waits for its acknowledgement. */
static int engine_send_part(mlfab__comm *comm, mlfab__engine_run *run, uint32_t peer,
                            mlfab__coll *head, const void *bytes, uint64_t n, int how) {
  int borrow = how != MLFAB__STREAM_KEEP_COPY && n > MLFAB__STREAM_LEND;
  int code = mlfab__stream_send(&comm->streams, peer, head, bytes, n,
                                borrow ? how : MLFAB__STREAM_KEEP_COPY, (uint64_t)(uintptr_t)run);
  head->offset += n;
  if (!code && borrow) run->lent++;
  return code;
}

/* Sends a message of several stretches; joins small stretches. */
static int engine_send_list(mlfab__comm *comm, mlfab__engine_run *run, const mlfab__dag_op *op,
                            mlfab__coll *head) {
  engine_walk walk = engine_walk_begin(run, op, 0, op->bytes);
  uint64_t n, gathered = 0;
  int code = 0, how = op->copy                         ? MLFAB__STREAM_KEEP_COPY
                      : run->callers && op->space == 0 ? MLFAB__STREAM_CALLERS
                                                       : MLFAB__STREAM_BORROW;
  for (const uint8_t *piece; !code && (piece = engine_walk_next(&walk, &n)) != NULL;) {
    int small = n <= MLFAB__STREAM_COPY && n < op->bytes;
    if (small && !comm->engine.gather)
      comm->engine.gather = mlfab__alloc_aligned(comm->env, MLFAB__ENGINE_GATHER);
    if (small && !comm->engine.gather) return MLFAB_ERR_MEMORY;
    if (gathered > 0 && (!small || gathered + n > MLFAB__ENGINE_GATHER)) {
      code = engine_send_part(comm, run, op->peer, head, comm->engine.gather, gathered,
                              MLFAB__STREAM_KEEP_COPY);
      gathered = 0;
    }
    if (small) {
      memcpy(comm->engine.gather + gathered, piece, n);
      gathered += n;
    } else if (!code) {
      code = engine_send_part(comm, run, op->peer, head, piece, n, how);
    }
  }
  if (!code && gathered > 0)
    code = engine_send_part(comm, run, op->peer, head, comm->engine.gather, gathered,
                            MLFAB__STREAM_KEEP_COPY);
  return code;
}

static int engine_is_eager(const mlfab__engine_run *run, uint64_t bytes) {
  return run->eager || bytes == 0;
}

/* Returns 1 if the peer accepts its bytes. */
static int engine_has_credit(const mlfab__engine_run *run, const mlfab__dag_op *op) {
  const mlfab__engine_peer *peer = &run->peers[op->peer];
  if (engine_is_eager(run, op->bytes)) return 1;
  return peer->ready && (!op->paced || op->tag < peer->credit);
}

static void engine_send(mlfab__comm *comm, mlfab__engine_run *run, uint32_t id) {
  const mlfab__dag_op *op = &run->dag.ops[id];
  mlfab__coll head =
      engine_head(run, op->tag, engine_is_eager(run, op->bytes) ? MLFAB__COLL_EAGER : 0, op->bytes);
  int code = op->bytes == 0 ? engine_send_part(comm, run, op->peer, &head, NULL, 0, 1)
                            : engine_send_list(comm, run, op, &head);
  run->moved = 1;
  if (code) {
    mlfab__comm_fail_memory(comm);
  } else {
    mlfab__dag_done(&run->dag, id);
  }
}

/* Runs a SEND at once, or queues it until the peer accepts its bytes. */
static void engine_may_send(mlfab__comm *comm, mlfab__engine_run *run, uint32_t id) {
  const mlfab__dag_op *op = &run->dag.ops[id];
  mlfab__engine_peer *peer = &run->peers[op->peer];
  if (engine_has_credit(run, op)) {
    engine_send(comm, run, id);
    return;
  }
  run->recvs[id].next = 0;
  if (peer->last) {
    run->recvs[peer->last - 1].next = id + 1;
  } else {
    peer->first = id + 1;
  }
  peer->last = id + 1;
}

static void engine_is_ready(mlfab__comm *comm, mlfab__engine_run *run, uint32_t member,
                            uint32_t credit) {
  mlfab__engine_peer *peer = &run->peers[member];
  uint32_t next, id = peer->first;
  peer->ready = 1;
  peer->credit = (uint32_t)mlfab__max(peer->credit, credit);
  peer->first = peer->last = 0;
  for (; id != 0; id = next) {
    next = run->recvs[id - 1].next;
    engine_may_send(comm, run, id - 1);
  }
}

static void engine_say_ready(mlfab__comm *comm, mlfab__engine_run *run, uint32_t member) {
  mlfab__engine_peer *peer = &run->peers[member];
  peer->told = 1;
  peer->given = peer->paced ? run->step + run->window : 0;
  mlfab__coll head = engine_head(run, peer->given, MLFAB__COLL_READY, 0);
  if (mlfab__stream_send(&comm->streams, member, &head, NULL, 0, 1, 0))
    mlfab__comm_fail_memory(comm);
}

/* Tells the peers that send bytes to this run that they may. In an epoch with an arena tells all peers of the run, so
 * that they learn that this call does not use the arena. */
static void engine_tell_ready(mlfab__comm *comm, mlfab__engine_run *run) {
  int all = run->channel == 0 && comm->go.arena;
  if (run->eager && !all) return;
  for (uint32_t id = 0; id < run->dag.nops; id++) {
    const mlfab__dag_op *op = &run->dag.ops[id];
    int gets = op->kind == MLFAB__DAG_RECV || op->kind == MLFAB__DAG_RECV_REDUCE;
    if (!(gets && op->bytes > 0) && !(all && (gets || op->kind == MLFAB__DAG_SEND))) continue;
    if (!run->peers[op->peer].told) engine_say_ready(comm, run, op->peer);
  }
}

/* --- pacing --- */

/* Raises the credit of paced peers, once it is worth a message. */
static void engine_raise(mlfab__comm *comm, mlfab__engine_run *run) {
  uint32_t worth = (uint32_t)mlfab__max(run->window / 2, 1);
  for (uint32_t m = 0; m < comm->members; m++) {
    const mlfab__engine_peer *peer = &run->peers[m];
    if (peer->paced && run->step + run->window - peer->given >= worth)
      engine_say_ready(comm, run, m);
  }
}

/* Finds the peers that a new run paces. Eager runs do not pace. */
static void engine_pace(mlfab__engine_run *run) {
  uint64_t most = 0;
  run->paced = run->behind = run->step = run->window = 0;
  for (uint32_t id = 0; id < run->dag.nops && !run->eager; id++) {
    const mlfab__dag_op *op = &run->dag.ops[id];
    if (!op->paced || op->kind != MLFAB__DAG_RECV_REDUCE) continue;
    run->paced += !run->peers[op->peer].paced;
    run->peers[op->peer].paced = 1;
    most = mlfab__max(most, op->bytes);
  }
  run->behind = run->paced;
  run->step_bytes = run->paced * most;
}

/* Returns the oldest run that is paced and newer than `than`, or NULL. */
static mlfab__engine_run *engine_next_paced(const mlfab__comm *comm,
                                            const mlfab__engine_run *than) {
  mlfab__engine_run *oldest = NULL;
  for (mlfab__engine_run *run = comm->engine.armed; run; run = run->next) {
    if (!run->paced || (than && run->number <= than->number)) continue;
    if (!oldest || run->number < oldest->number) oldest = run;
  }
  return oldest;
}

/* Gives the free bytes of windows to runs, the oldest first. `fresh`: its peers know nothing yet. */
static void engine_open_windows(mlfab__comm *comm, const mlfab__engine_run *fresh) {
  const mlfab__engine_run *first = engine_next_paced(comm, NULL);
  for (mlfab__engine_run *run = engine_next_paced(comm, NULL); run && comm->phase == MLFAB__COMM_IN;
       run = engine_next_paced(comm, run)) {
    uint32_t before = run->window;
    while (run->window < MLFAB__ENGINE_WINDOW &&
           (comm->engine.window_bytes + run->step_bytes <= MLFAB__ENGINE_WINDOWS ||
            (run == first && run->window == 0))) {
      run->window++;
      comm->engine.window_bytes += run->step_bytes;
    }
    if (run->window > before && run != fresh) engine_raise(comm, run);
  }
}

/* Closes its window: the run awaits no more messages. */
static void engine_close_window(mlfab__comm *comm, mlfab__engine_run *run) {
  comm->engine.window_bytes -= run->window * run->step_bytes;
  run->paced = run->window = 0;
}

/* Counts a paced message of this peer, which is in the sum now. */
static void engine_added(mlfab__comm *comm, mlfab__engine_run *run, uint32_t member) {
  if (!run->paced || run->peers[member].added++ != run->step || --run->behind > 0) return;
  run->step++;
  for (uint32_t m = 0; m < comm->members; m++)
    run->behind += run->peers[m].paced && run->peers[m].added == run->step;
  engine_raise(comm, run);
}

/* --- incoming messages --- */

static int engine_reduces_by_user(const mlfab__engine_run *run, const mlfab__dag_op *op) {
  return op->kind == MLFAB__DAG_RECV_REDUCE && op->reduce == 0 && run->reduce != NULL;
}

/* Finds the type and operation of a RECV_REDUCE without a user's reducer. */
static int engine_reduction(const mlfab__engine_run *run, const mlfab__dag_op *op, int *dtype_p) {
  int which = op->reduce - 1;
  *dtype_p = run->dtype;
  if (op->reduce == 0) return run->op;
  if (which / 16) {
    *dtype_p = which / 16;
  } else if (which % 16 == MLFAB__OP_OR) {
    *dtype_p = MLFAB_I64;
  }
  return which % 16;
}

/* Returns 1 if these bytes can go to their place as they are: they need only alignment, because frames are cut between
 * elements (at multiples of 64 bytes, and at the end of a sender's stretch). */
static int engine_fits(const mlfab__engine_run *run, const mlfab__dag_op *op, const void *bytes) {
  int dtype;
  if (op->kind == MLFAB__DAG_RECV) return 1;
  if (engine_reduces_by_user(run, op)) return 0;
  (void)engine_reduction(run, op, &dtype);
  return (uintptr_t)bytes % mlfab__element_bytes(dtype) == 0;
}

/* Writes n bytes of the message to their place, or adds them. `stage`: the same bytes, which may be changed; NULL only
 * without a reducer of the user's. */
static void engine_apply(mlfab__engine_run *run, const mlfab__dag_op *op, uint64_t offset,
                         const uint8_t *bytes, uint64_t n, uint8_t *stage) {
  engine_walk walk = engine_walk_begin(run, op, offset, n);
  uint64_t k;
  int dtype, reduction = engine_reduction(run, op, &dtype);
  for (uint8_t *piece; (piece = engine_walk_next(&walk, &k)) != NULL; bytes += k) {
    if (op->kind == MLFAB__DAG_RECV) {
      memcpy(piece, bytes, k);
    } else if (!engine_reduces_by_user(run, op)) {
      mlfab__kernel_combine_by(run->kernels, reduction, dtype, piece, op->left ? bytes : piece,
                               op->left ? piece : bytes, k / mlfab__element_bytes(dtype), 0);
    } else if (op->left) {
      run->reduce(run->reduce_user, piece, bytes, k / run->width);
    } else {
      run->reduce(run->reduce_user, stage, piece, k / run->width);
      memcpy(piece, stage, k);
    }
    if (stage) stage += k;
  }
}

static void engine_drop_stage(mlfab__comm *comm, mlfab__engine_run *run, uint32_t id) {
  mlfab__engine_recv *recv = &run->recvs[id];
  const mlfab__dag_op *op = &run->dag.ops[id];
  if (!recv->stage) return;
  if (recv->eager && comm->streams.epoch)
    mlfab__stream_consumed(&comm->streams, op->peer, recv->got - recv->from);
  mlfab__pool_give(&comm->pool, recv->stage, op->bytes);
  recv->stage = NULL;
  run->staged--;
}

/* Moves staged bytes to their place: a RECV may run, or its last byte came. */
static void engine_settle(mlfab__comm *comm, mlfab__engine_run *run, uint32_t id) {
  mlfab__engine_recv *recv = &run->recvs[id];
  const mlfab__dag_op *op = &run->dag.ops[id];
  if (recv->stage && (recv->whole || engine_fits(run, op, recv->stage))) {
    uint8_t *stage = recv->stage + recv->from;
    engine_apply(run, op, recv->from, stage, recv->got - recv->from, stage);
    engine_drop_stage(comm, run, id);
  }
  if (!recv->whole) return;
  mlfab__dag_done(&run->dag, id);
  if (op->paced) engine_added(comm, run, op->peer);
}

static void engine_wrong(mlfab__comm *comm, uint32_t member, const char *text) {
  mlfab__port *down = &comm->streams.down;
  down->drop(down->self, comm->ranks[member], MLFAB_ERR_FRAME, text);
}

static void engine_other_size(mlfab__comm *comm, uint32_t member, const mlfab__coll *head,
                              const mlfab__dag_op *op) {
  mlfab__comm_fail(comm, MLFAB_ERR_MISMATCH, (int32_t)comm->ranks[member],
                   "worker %u sends %llu bytes under tag %u, and worker %u expects %llu",
                   comm->ranks[member], (unsigned long long)head->total, head->tag, comm->rank,
                   (unsigned long long)op->bytes);
}

/* No RECV takes the message. In an object the two workers' task graphs differ; a plain call's peer is wrong. */
static void engine_unexpected(mlfab__comm *comm, const mlfab__engine_run *run, uint32_t member,
                              const mlfab__coll *head) {
  if (run->channel == 0) {
    engine_wrong(comm, member, "a message that no task graph receives");
    return;
  }
  mlfab__comm_fail(comm, MLFAB_ERR_MISMATCH, (int32_t)comm->ranks[member],
                   "worker %u sends %llu bytes under tag %u, which worker %u does not receive",
                   comm->ranks[member], (unsigned long long)head->total, head->tag, comm->rank);
}

/* Takes bytes for the RECV `id`. */
static void engine_take(mlfab__comm *comm, mlfab__engine_run *run, uint32_t id,
                        const mlfab__coll *head, const uint8_t *bytes, uint32_t n) {
  mlfab__engine_recv *recv = &run->recvs[id];
  const mlfab__dag_op *op = &run->dag.ops[id];
  int runs = mlfab__dag_state(&run->dag, id) == MLFAB__DAG_RUNNING;
  int direct = runs && !recv->stage && engine_fits(run, op, bytes);
  recv->eager = head->flags & MLFAB__COLL_EAGER ? 1 : 0;
  if (direct) {
    engine_apply(run, op, recv->got, bytes, n, NULL);
  } else if (n > 0) {
    if (!recv->stage) {
      recv->stage = mlfab__pool_take(&comm->pool, op->bytes);
      if (!recv->stage) {
        mlfab__comm_fail_memory(comm);
        return;
      }
      recv->from = recv->got;
      run->staged++;
    }
    memcpy(recv->stage + recv->got, bytes, n);
  }
  recv->got += n;
  recv->whole = recv->got == op->bytes;
  if (direct && recv->eager && n > 0) mlfab__stream_consumed(&comm->streams, op->peer, n);
  if (runs && recv->whole) engine_settle(comm, run, id);
}

static void engine_run(mlfab__comm *comm, mlfab__engine_run *run);

/* Returns 1 for frames that do not prove a call: a READY of an object with runs armed ahead, and all frames of run 0,
 * which `begin` arms. */
static int engine_is_ahead(int ahead, uint32_t flags, uint64_t number) {
  return ahead && (flags & MLFAB__COLL_READY || number == 0);
}

static int engine_says_nothing(mlfab__comm *comm, const mlfab__coll *head) {
  const mlfab__comm_object *object = mlfab__comm_channel_find(comm, head->channel);
  return object && engine_is_ahead(object->kind->ahead, head->flags, head->number);
}

/* Takes a frame of an armed run. */
static void engine_frame(mlfab__comm *comm, mlfab__engine_run *run, uint32_t member,
                         const mlfab__coll *head, const void *bulk, uint32_t bytes) {
  if (!engine_says_nothing(comm, head)) run->moved = 1;
  if (head->signature != run->signature) {
    mlfab__comm_stuck(comm, run->channel, run->number);
    return;
  }
  if (head->flags & MLFAB__COLL_READY) {
    engine_is_ready(comm, run, member, head->tag);
    engine_run(comm, run);
    return;
  }
  uint32_t id = mlfab__dag_find_recv(&run->dag, member, head->tag);
  if (id == MLFAB__DAG_NONE) {
    engine_unexpected(comm, run, member, head);
    return;
  }
  const mlfab__engine_recv *recv = &run->recvs[id];
  if (head->total != run->dag.ops[id].bytes) {
    engine_other_size(comm, member, head, &run->dag.ops[id]);
  } else if (recv->whole || head->offset != recv->got ||
             (recv->got > 0 && recv->eager != (head->flags & MLFAB__COLL_EAGER ? 1 : 0))) {
    engine_wrong(comm, member, "a message's bytes out of place");
  } else {
    engine_take(comm, run, id, head, bulk, bytes);
    engine_run(comm, run);
  }
}

MLFAB__INTERNAL mlfab__engine_run *mlfab__engine_find(const mlfab__comm *comm, uint32_t channel,
                                                      uint64_t number) {
  mlfab__engine_run *run = comm->engine.armed;
  while (run && (run->channel != channel || run->number != number)) run = run->next;
  return run;
}

/* --- early and late frames --- */

static uint32_t engine_bucket(uint32_t channel, uint64_t number) {
  return (uint32_t)((number + 7 * (uint64_t)channel) % MLFAB__ENGINE_BUCKETS);
}

static void engine_keep(mlfab__comm *comm, uint32_t member, const mlfab__coll *head,
                        const void *bulk, uint32_t bytes) {
  uint32_t bucket = engine_bucket(head->channel, head->number);
  if (!(head->flags & (MLFAB__COLL_READY | MLFAB__COLL_EAGER))) {
    engine_wrong(comm, member, "bytes of a call that were not asked for");
    return;
  }
  mlfab__engine_stage *stage = comm->engine.stage_count < ENGINE_STAGED_MAX
                                   ? mlfab__pool_take(&comm->pool, sizeof *stage + bytes)
                                   : NULL;
  if (!stage) {
    mlfab__comm_fail_memory(comm);
    return;
  }
  *stage = (mlfab__engine_stage){NULL, *head, member, bytes};
  if (bytes > 0) memcpy(stage + 1, bulk, bytes);
  if (comm->engine.stages[bucket]) {
    comm->engine.stage_ends[bucket]->next = stage;
  } else {
    comm->engine.stages[bucket] = stage;
  }
  comm->engine.stage_ends[bucket] = stage;
  comm->engine.stage_count++;
}

MLFAB__INTERNAL int mlfab__engine_came(const mlfab__comm *comm, uint64_t number) {
  const mlfab__engine_stage *stage = comm->engine.stages[engine_bucket(0, number)];
  while (stage && (stage->head.channel != 0 || stage->head.number != number)) stage = stage->next;
  return stage != NULL;
}

/* Takes the early frames of one run out of the bucket, in their order. */
static mlfab__engine_stage *engine_pick(mlfab__comm *comm, uint32_t channel, uint64_t number) {
  uint32_t bucket = engine_bucket(channel, number);
  mlfab__engine_stage *picked = NULL, **picked_end = &picked, **kept = &comm->engine.stages[bucket];
  comm->engine.stage_ends[bucket] = NULL;
  for (mlfab__engine_stage *stage = *kept, *next; stage; stage = next) {
    next = stage->next;
    if (stage->head.channel == channel && stage->head.number == number) {
      stage->next = NULL;
      *picked_end = stage;
      picked_end = &stage->next;
    } else {
      *kept = stage;
      kept = &stage->next;
      comm->engine.stage_ends[bucket] = stage;
    }
  }
  *kept = NULL;
  return picked;
}

static void engine_forget(mlfab__comm *comm, mlfab__engine_stage *stage) {
  comm->engine.stage_count--;
  mlfab__pool_give(&comm->pool, stage, sizeof *stage + stage->bytes);
}

static void engine_fail_closed(mlfab__comm *comm, uint32_t channel) {
  mlfab__comm_fail(comm, MLFAB_ERR_PEER_CLOSED, (int32_t)comm->rank,
                   "worker %u has closed object %u", comm->rank, channel);
}

/* Takes a frame of an object that is closed here: a failure if its round needs this worker, else a late frame. */
static void engine_closed(mlfab__comm *comm, const mlfab__coll *head) {
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++) {
    const mlfab__comm_closed *closed = &comm->closed[i];
    if (closed->channel == head->channel && head->number >= closed->upto &&
        !engine_is_ahead(closed->ahead, head->flags, head->number))
      engine_fail_closed(comm, head->channel);
  }
}

/* Takes a frame without an armed run: returns 1 if it is kept, or an object takes it. */
static int engine_other(mlfab__comm *comm, uint32_t member, const mlfab__coll *head,
                        const void *bulk, uint32_t bytes) {
  mlfab__comm_object *object = mlfab__comm_channel_find(comm, head->channel);
  if (object && object->kind->frame) {
    object->kind->frame(object->self, member, head, bulk, bytes);
    return 1;
  }
  if (head->channel == 0 ? !mlfab__comm_awaits(comm, head->number)
                         : object && head->number < object->upto)
    return 0;
  if (head->channel && !object && head->channel <= comm->objects_opened) {
    engine_closed(comm, head);
    return 0;
  }
  engine_keep(comm, member, head, bulk, bytes);
  return 1;
}

static void engine_consume(mlfab__comm *comm, uint32_t member, const mlfab__coll *head,
                           uint32_t bytes) {
  if (head->flags & MLFAB__COLL_EAGER && bytes > 0)
    mlfab__stream_consumed(&comm->streams, member, bytes);
}

MLFAB__INTERNAL void mlfab__engine_deliver(void *self, uint32_t member, const mlfab__coll *head,
                                           const void *bulk, uint32_t bytes) {
  mlfab__comm *comm = self;
  mlfab__engine_run *run = mlfab__engine_find(comm, head->channel, head->number);
  if (comm->failing || comm->phase == MLFAB__COMM_ENDING) return;
  mlfab__comm_enter(comm, 0);
  if (run && run->running) {
    engine_frame(comm, run, member, head, bulk, bytes);
  } else if (run || !engine_other(comm, member, head, bulk, bytes)) {
    engine_consume(comm, member, head, bytes); /* late: the run did not wait for it */
  }
  mlfab__comm_exit(comm);
}

/* Delivers the early frames of a run that is now armed. The run may be over before the last of them. */
static void engine_take_early(mlfab__comm *comm, uint32_t channel, uint64_t number) {
  mlfab__engine_stage *stage = engine_pick(comm, channel, number);
  for (mlfab__engine_stage *next; stage; stage = next) {
    next = stage->next;
    mlfab__engine_deliver(comm, stage->member, &stage->head, stage + 1, stage->bytes);
    engine_forget(comm, stage);
  }
}

/* --- running --- */

static void engine_divide(const mlfab__comm *comm, const mlfab__engine_run *run,
                          const mlfab__dag_op *op) {
  engine_walk walk = engine_walk_begin(run, op, 0, op->bytes);
  uint64_t n;
  uint32_t by = mlfab__comm_givers(comm, run->number);
  for (uint8_t *piece; (piece = engine_walk_next(&walk, &n)) != NULL;)
    mlfab__kernel_divide(run->dtype, piece, n / mlfab__element_bytes(run->dtype), by);
}

static void engine_compute(mlfab__comm *comm, mlfab__engine_run *run, uint32_t id) {
  const mlfab__dag_op *op = &run->dag.ops[id];
  int code = 0;
  if (op->code == MLFAB__COLLECTIVE_DIVIDE) {
    engine_divide(comm, run, op);
  } else {
    code = run->compute(run->self, run, op);
  }
  if (code) {
    mlfab__comm_fail(comm, code, (int32_t)comm->rank,
                     "an operation of worker %u's task graph has failed", comm->rank);
  } else {
    mlfab__dag_done(&run->dag, id);
  }
}

static void engine_unlink(mlfab__comm *comm, mlfab__engine_run *run) {
  mlfab__engine_run **at = &comm->engine.armed;
  while (*at != run) at = &(*at)->next;
  *at = run->next;
  engine_close_window(comm, run);
  run->armed = run->running = 0;
  for (uint32_t id = 0; run->staged > 0; id++) engine_drop_stage(comm, run, id);
  mlfab__pool_give(&comm->pool, run->recvs, run->dag.nops * sizeof *run->recvs);
  mlfab__pool_give(&comm->pool, run->peers, comm->members * sizeof *run->peers);
  run->recvs = NULL;
  run->peers = NULL;
}

static void engine_run(mlfab__comm *comm, mlfab__engine_run *run) {
  uint32_t id;
  if (run->busy) return; /* the outer call continues it */
  run->busy = 1;
  while (run->running && !comm->failing && mlfab__dag_next(&run->dag, &id)) {
    switch (run->dag.ops[id].kind) {
      case MLFAB__DAG_SEND:
        engine_may_send(comm, run, id);
        break;
      case MLFAB__DAG_COMPUTE:
        engine_compute(comm, run, id);
        break;
      case MLFAB__DAG_NOP:
        mlfab__dag_done(&run->dag, id);
        break;
      default:
        engine_settle(comm, run, id);
    }
  }
  run->busy = 0;
  if (comm->failing) return; /* the end of the epoch ends it */
  if (mlfab__dag_finished(&run->dag)) run->running = 0;
  if (!run->running) engine_close_window(comm, run);
  if (run->running || run->lent > 0) return;
  engine_unlink(comm, run);
  engine_open_windows(comm, NULL);
  run->over(run->self, 0);
}

MLFAB__INTERNAL void mlfab__engine_given_back(void *self, uint32_t member, uint64_t cookie) {
  mlfab__comm *comm = self;
  (void)member;
  mlfab__comm_enter(comm, 0);
  if (cookie & 1) {
    mlfab__comm_object *object = mlfab__comm_object_find(comm, (uint32_t)(cookie >> 1));
    if (object && object->kind->given_back) object->kind->given_back(object->self);
  } else {
    mlfab__engine_run *run = (mlfab__engine_run *)(uintptr_t)cookie;
    run->lent--;
    engine_run(comm, run);
  }
  mlfab__comm_exit(comm);
}

MLFAB__INTERNAL int mlfab__engine_arm(mlfab__comm *comm, mlfab__engine_run *run, uint64_t now_ns) {
  mlfab__comm_object *object = mlfab__comm_channel_find(comm, run->channel);
  if (comm->phase != MLFAB__COMM_IN || comm->failing || run->armed) return MLFAB_ERR_STATE;
  uint64_t recvs = run->dag.nops * sizeof *run->recvs;
  uint64_t peers = comm->members * sizeof *run->peers;
  run->recvs = mlfab__pool_take(&comm->pool, recvs);
  run->peers = mlfab__pool_take(&comm->pool, peers);
  if (!run->recvs || !run->peers) {
    mlfab__pool_give(&comm->pool, run->recvs, recvs);
    mlfab__pool_give(&comm->pool, run->peers, peers);
    return MLFAB_ERR_MEMORY;
  }
  memset(run->recvs, 0, recvs);
  memset(run->peers, 0, peers);
  run->kernels = comm->config->kernels;
  run->armed = run->running = 1;
  run->busy = run->moved = 0;
  run->lent = run->staged = 0;
  run->next = comm->engine.armed;
  comm->engine.armed = run;
  if (object) object->upto = mlfab__max(object->upto, run->number + 1);
  uint32_t channel = run->channel;
  uint64_t number = run->number;
  mlfab__comm_enter(comm, now_ns);
  mlfab__dag_start(&run->dag);
  engine_pace(run);
  engine_open_windows(comm, run);
  engine_tell_ready(comm, run);
  engine_run(comm, run);
  engine_take_early(comm, channel, number);
  mlfab__comm_exit(comm);
  return 0;
}

MLFAB__INTERNAL void mlfab__engine_trigger(mlfab__comm *comm, mlfab__engine_run *run, uint32_t op,
                                           uint64_t now_ns) {
  if (!run->armed || !run->running) return;
  mlfab__comm_enter(comm, now_ns);
  mlfab__dag_trigger(&run->dag, op);
  engine_run(comm, run);
  mlfab__comm_exit(comm);
}

MLFAB__INTERNAL void mlfab__engine_disarm(mlfab__comm *comm, mlfab__engine_run *run) {
  mlfab__comm_object *object = mlfab__comm_channel_find(comm, run->channel);
  if (!run->armed) return;
  mlfab__comm_enter(comm, 0);
  uint32_t lent = run->lent;
  if (run->running && object) object->upto = mlfab__min(object->upto, run->number);
  engine_unlink(comm, run);
  if (lent > 0) {
    /* Only the end of the streams gives the bytes back, and the caller needs them now. */
    mlfab__streams_end(&comm->streams);
    mlfab__comm_fail(comm, MLFAB_ERR_CANCELLED, (int32_t)comm->rank,
                     "worker %u has withdrawn a message under way", comm->rank);
  }
  mlfab__comm_exit(comm);
}

MLFAB__INTERNAL void mlfab__engine_close(mlfab__comm *comm, const mlfab__comm_object *object) {
  for (mlfab__engine_run *run = comm->engine.armed, *next; run; run = next) {
    next = run->next;
    if (run->channel != object->channel) continue;
    if (run->running && run->moved && !engine_is_ahead(object->kind->ahead, 0, run->number))
      engine_fail_closed(comm, object->channel);
    mlfab__engine_disarm(comm, run);
  }
  for (uint32_t b = 0; b < MLFAB__ENGINE_BUCKETS; b++) {
    for (const mlfab__engine_stage *stage = comm->engine.stages[b]; stage; stage = stage->next) {
      if (stage->head.channel == object->channel && stage->head.number >= object->upto &&
          !engine_says_nothing(comm, &stage->head))
        engine_fail_closed(comm, object->channel);
    }
  }
}

static void engine_forget_all(mlfab__comm *comm) {
  for (uint32_t b = 0; b < MLFAB__ENGINE_BUCKETS; b++) {
    for (mlfab__engine_stage *stage = comm->engine.stages[b], *next; stage; stage = next) {
      next = stage->next;
      engine_forget(comm, stage);
    }
    comm->engine.stages[b] = comm->engine.stage_ends[b] = NULL;
  }
}

MLFAB__INTERNAL void mlfab__engine_end_all(mlfab__comm *comm, int code) {
  engine_forget_all(comm);
  while (comm->engine.armed) {
    mlfab__engine_run *run = comm->engine.armed;
    engine_unlink(comm, run);
    run->lent = 0;
    run->over(run->self, code);
  }
}

MLFAB__INTERNAL void mlfab__engine_free(mlfab__comm *comm) {
  engine_forget_all(comm);
  while (comm->engine.armed) engine_unlink(comm, comm->engine.armed);
  mlfab__free_aligned(comm->env, comm->engine.gather, MLFAB__ENGINE_GATHER);
}

MLFAB__INTERNAL const mlfab__engine_run *mlfab__engine_oldest(const mlfab__comm *comm,
                                                              uint32_t channel) {
  const mlfab__engine_run *oldest = NULL;
  for (const mlfab__engine_run *run = comm->engine.armed; run; run = run->next) {
    if (run->channel == channel && (!oldest || run->number < oldest->number)) oldest = run;
  }
  return oldest;
}

MLFAB__INTERNAL int mlfab__engine_moves(const mlfab__comm *comm) {
  const mlfab__engine_run *run = comm->engine.armed;
  while (run && !run->moved) run = run->next;
  return run != NULL;
}

MLFAB__INTERNAL int32_t mlfab__engine_awaits(const mlfab__comm *comm,
                                             const mlfab__engine_run *run) {
  for (uint32_t id = 0; run->running && id < run->dag.nops; id++) {
    const mlfab__dag_op *op = &run->dag.ops[id];
    if (op->optional || op->kind == MLFAB__DAG_NOP || op->kind == MLFAB__DAG_COMPUTE) continue;
    if (mlfab__dag_state(&run->dag, id) == MLFAB__DAG_RUNNING)
      return (int32_t)comm->ranks[op->peer];
  }
  return MLFAB_NO_RANK;
}
