/* comm_finish.c - the communicator: handles workers without more data, and continues the calls of the others. See
 * comm.h, and membership.h for the protocol. */
#include "comm.h"

MLFAB__INTERNAL void mlfab__comm_no_limit(mlfab__comm *comm) {
  mlfab__free(comm->env, comm->finished, MLFAB__MEMBERSHIP_MEMBERS_MAX * sizeof *comm->finished);
  comm->finished = NULL;
  comm->limit = comm->settled = UINT64_MAX;
  comm->frozen = 0;
  memset(comm->seek, 0, sizeof comm->seek);
}

/* A finished worker may go when nobody needs it: it waits until others have acknowledged all bytes. */
MLFAB__INTERNAL void mlfab__comm_check_moved(mlfab__comm *comm) {
  uint64_t serial = comm->base + comm->limit;
  if (comm->limit == UINT64_MAX || comm->frozen || mlfab__comm_moved(comm)) return;
  if (comm->phase != MLFAB__COMM_IN || comm->first < serial) return;
  if (comm->seek[0] && comm->end == serial) return; /* no such call was made yet */
  if (comm->finishing && comm->end == serial) {
    if (!mlfab__streams_quiet(&comm->streams)) return;
    comm->moved = comm->epoch;
    mlfab__comm_say_finish(comm, comm->limit);
  } else {
    comm->moved = comm->epoch;
    mlfab__comm_ask(comm, comm->epoch);
  }
}

/* A worker has finished after so many calls, or joins. Calls in shared memory that it has not called become runs. */
MLFAB__INTERNAL void mlfab__comm_on_freeze(mlfab__comm *comm, const mlfab__membership_finish *in) {
  uint64_t bytes = MLFAB__MEMBERSHIP_MEMBERS_MAX * sizeof *comm->finished;
  mlfab__membership_finish frozen = {.epoch = comm->epoch,
                                     .rank = in->rank,
                                     .calls = comm->begun - comm->base + comm->promised,
                                     .open = mlfab__comm_open_objects(comm)};
  mlfab__comm_past past;
  int joins = in->calls == UINT64_MAX;
  if (in->epoch != comm->epoch || comm->phase != MLFAB__COMM_IN) return;
  if (!comm->finished && !joins) {
    comm->finished = mlfab__alloc(comm->env, bytes);
    if (!comm->finished) {
      mlfab__comm_fail_memory(comm);
      return;
    }
    memset(comm->finished, 0xff, bytes);
  }
  for (uint32_t m = 0; m < comm->members && !joins; m++)
    if ((int32_t)comm->ranks[m] == in->rank) comm->finished[m] = in->calls;
  comm->frozen = 1;
  comm->moved = 0;
  uint64_t serial = joins ? comm->begun : mlfab__max(comm->first, comm->base + in->calls);
  for (; serial < comm->begun; serial++) {
    mlfab__comm_slot *slot = *mlfab__comm_place(comm, serial);
    if (slot && slot->state == MLFAB__SLOT_OUTSIDE) slot->wanted = 1;
  }
  if (comm->go.arena && !joins) comm->go.arena = MLFAB__ARENA_LEFT;
  if (joins && comm->begun > comm->base &&
      mlfab__plain_past(comm, comm->begun - comm->base - 1, &past))
    mlfab__plain_words(frozen.text, &past, comm->config->workers);
  MLFAB__POST(&comm->up, 0, MLFAB__MEMBERSHIP_FROZEN, membership_finish, &frozen);
}

/* Describes a call to the workers that owe it. */
static void finish_tell_owed(mlfab__comm *comm, uint64_t number) {
  mlfab__comm_past past;
  if (!mlfab__plain_past(comm, number, &past)) return;
  const mlfab__membership_owed owed = {.epoch = comm->epoch,
                                       .kind = past.kind,
                                       .algorithm = past.algorithm,
                                       .dtype = (uint32_t)past.dtype,
                                       .op = (uint32_t)past.op,
                                       .width = past.width,
                                       .user = past.user,
                                       .opens = past.opens,
                                       .root = past.root,
                                       .number = number,
                                       .signature = past.signature,
                                       .elements = past.count,
                                       .counts = past.has_counts ? comm->config->workers : 0};
  MLFAB__POST_LIST(MLFAB_META_MAX / 4, &comm->up, 0, MLFAB__MEMBERSHIP_OWED, membership_owed, &owed,
                   past.counts);
}

/* Sets the limit of the epoch: all members know who has finished. */
MLFAB__INTERNAL void mlfab__comm_on_settle(mlfab__comm *comm, const mlfab__membership_finish *in) {
  uint64_t owed = UINT64_MAX;
  if (in->epoch != comm->epoch || comm->phase != MLFAB__COMM_IN) return;
  if (comm->frozen || in->calls == UINT64_MAX) { /* else it repeats the report */
    comm->limit = in->calls;
    comm->settled = mlfab__min(comm->settled, in->calls);
    memcpy(comm->seek, in->seek, sizeof comm->seek);
    if (in->calls == UINT64_MAX) comm->moved = 0;
    mlfab__comm_seek(comm);
  }
  comm->frozen = 0;
  for (uint32_t m = 0; m < comm->members && comm->finished; m++)
    owed = mlfab__min(owed, comm->finished[m]);
  for (; in->rank == (int32_t)comm->rank && owed < comm->limit; owed++)
    finish_tell_owed(comm, owed);
  comm->due |= MLFAB__COMM_BEGIN;
}

/* --- calls that others have begun --- */

/* The bits of an element that changes nothing in a sum (-0), product and so on. By type, then operation. */
static const uint64_t finish_identities[][MLFAB_OP_PRODUCT + 1] = {
    [MLFAB_F32] = {0x80000000, 0x80000000, 0x7f800000, 0xff800000, 0x3f800000},
    [MLFAB_F64] = {0x8000000000000000, 0x8000000000000000, 0x7ff0000000000000, 0xfff0000000000000,
                   0x3ff0000000000000},
    [MLFAB_I64] = {0, 0, INT64_MAX, 0x8000000000000000, 1},
    [MLFAB_F16] = {0x8000, 0x8000, 0x7c00, 0xfc00, 0x3c00},
    [MLFAB_BF16] = {0x8000, 0x8000, 0x7f80, 0xff80, 0x3f80}};

static void finish_fill_identity(void *data, uint64_t n, int dtype, int op) {
  uint64_t bits = finish_identities[dtype][op];
  uint32_t width = mlfab__element_bytes(dtype);
  uint16_t half = (uint16_t)bits;
  uint32_t word = (uint32_t)bits;
  const void *one = width == 2 ? (const void *)&half : width == 4 ? (const void *)&word : &bits;
  for (uint64_t i = 0; i < n; i++) memcpy((uint8_t *)data + i * width, one, width);
}

/* Can the call do without the data of this worker? */
static int finish_has_identity(const mlfab__comm *comm, const mlfab__membership_owed *owed,
                               const uint64_t *counts) {
  if (owed->user) return 0;
  if (owed->kind == MLFAB__COLLECTIVE_BROADCAST) return owed->root != (int32_t)comm->rank;
  return owed->kind != MLFAB__COLLECTIVE_ALLGATHER || !counts || counts[comm->rank] == 0;
}

/* Takes part in a call that others have begun. Returns 0, MEMORY, or FRAME. */
static int finish_owe(mlfab__comm *comm, const mlfab__membership_owed *owed,
                      const uint64_t *counts) {
  const int dtype = (int)owed->dtype;
  mlfab__comm_call call = {.kind = (uint8_t)owed->kind,
                           .algorithm = (uint8_t)owed->algorithm,
                           .dtype = dtype,
                           .op = (int)owed->op,
                           .n = owed->kind != MLFAB__COLLECTIVE_BARRIER,
                           .counts = counts,
                           .root = owed->root,
                           .opens = owed->opens ? UINT32_MAX : 0,
                           .words = "a collective"};
  mlfab__comm_slot *slot;
  if (owed->user) call.dtype = 0;
  uint32_t width = owed->user ? owed->width : mlfab__plain_width(&call);
  int valid = call.kind >= MLFAB__COLLECTIVE_ALLREDUCE && call.kind <= MLFAB__COLLECTIVE_BARRIER;
  if (!valid || (call.n && (!width || owed->elements > comm->config->model_max_bytes / width)) ||
      (mlfab__plain_adds(&call) && (call.op < MLFAB_OP_SUM || call.op > MLFAB_OP_PRODUCT)))
    return MLFAB_ERR_FRAME;
  int code = mlfab__plain_slot_new(comm, &call, &slot);
  if (code) return code;
  uint64_t bytes = call.n ? owed->elements * width : 0;
  void *data = mlfab__pool_take(&comm->pool, mlfab__max(bytes, 1));
  if (!data) return MLFAB_ERR_MEMORY;
  const mlfab_vec vec = {data, call.n ? owed->elements : 0};
  call.vecs = &vec;
  mlfab__plain_slot_fill(comm, slot, &call, vec.count, 0);
  slot->one = (mlfab_vec){data, mlfab__max(bytes, 1)};
  slot->owed = 1;
  slot->signature = owed->signature;
  if (mlfab__plain_adds(&call) && !owed->user)
    finish_fill_identity(data, owed->elements, dtype, call.op);
  else
    memset(data, 0, bytes);
  if (!finish_has_identity(comm, owed, counts))
    mlfab__plain_fail(comm, slot, MLFAB_ERR_PEER_CLOSED, (int32_t)comm->rank,
                      "has finished, and the call cannot do without it");
  return 0;
}

MLFAB__INTERNAL int mlfab__comm_on_owed(mlfab__comm *comm, const mlfab__frame_in *frame) {
  mlfab__membership_owed owed;
  uint64_t *counts = mlfab__alloc_array(comm->env, MLFAB__MEMBERSHIP_MEMBERS_MAX, sizeof *counts);
  if (!counts) {
    mlfab__comm_fail_memory(comm);
    return 0;
  }
  int code = mlfab__decode_membership_owed(frame->meta, frame->meta_bytes, &owed, counts);
  if (!code && owed.counts != 0 && owed.counts != comm->config->workers) code = MLFAB_ERR_FRAME;
  int next = !code && comm->phase == MLFAB__COMM_IN && owed.epoch == comm->epoch &&
             comm->finishing && owed.number == mlfab__comm_called(comm) &&
             owed.number < comm->limit;
  if (next) code = finish_owe(comm, &owed, owed.counts ? counts : NULL);
  mlfab__free(comm->env, counts, MLFAB__MEMBERSHIP_MEMBERS_MAX * sizeof *counts);
  if (code == MLFAB_ERR_MEMORY) mlfab__comm_fail_memory(comm);
  if (next) comm->due |= MLFAB__COMM_BEGIN;
  return code == MLFAB_ERR_FRAME ? code : 0;
}

/* --- the worker that finishes --- */

MLFAB__INTERNAL void mlfab__comm_finish_work(void *self) {
  mlfab__comm *comm = self;
  if (comm->finishing || comm->leaving) return;
  comm->finishing = 1;
  mlfab__streams_leave(&comm->streams);
  if (mlfab__comm_alone(comm) || comm->dead) return;
  int waits = comm->first < comm->end;
  if (comm->phase == MLFAB__COMM_IN && mlfab__comm_called(comm) <= comm->limit) {
    mlfab__comm_say_finish(comm, mlfab__comm_called(comm));
  } else if (!waits && (comm->phase == MLFAB__COMM_OUT || comm->phase == MLFAB__COMM_ASKED)) {
    comm->phase = MLFAB__COMM_OUT;
    mlfab__comm_say_finish(comm, 0);
  } else { /* epoch.c reports it when an epoch stands, or when the failed epoch is over */
    mlfab__comm_enter(comm, 0);
    comm->due |= MLFAB__COMM_BEGIN;
    mlfab__comm_exit(comm);
  }
}

MLFAB__INTERNAL int mlfab__comm_finish_over(const void *self) {
  const mlfab__comm *comm = self;
  if (mlfab__comm_alone(comm) || comm->dead) return 1;
  if (comm->first < comm->end) return 0;
  return comm->phase == MLFAB__COMM_IN ? mlfab__comm_moved(comm) : comm->phase == MLFAB__COMM_OUT;
}

MLFAB__INTERNAL uint32_t mlfab__comm_present(const mlfab__comm *comm, uint32_t *ranks,
                                             uint32_t room) {
  int known = mlfab__comm_stands(comm);
  uint32_t most = known ? comm->members : comm->config->workers, n = 0;
  for (uint32_t i = 0; i < most; i++) {
    uint32_t rank = known ? comm->ranks[i] : i;
    if (!known && rank >= comm->founders && rank != comm->rank) continue;
    if (known && !mlfab__comm_gives(comm, i, mlfab__comm_called(comm))) continue;
    if (n++ < room) ranks[n - 1] = rank;
  }
  return n;
}
