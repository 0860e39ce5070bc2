/* comm_base.c - the communicator: common functions: failures, checks of calls, lookup of calls and objects by number,
 * reports to server 0. See comm.h. */
#include "comm.h"

#include <stdio.h>

/* --- failures --- */

MLFAB__INTERNAL void mlfab__comm_set_verdict(mlfab__comm *comm, int code, int32_t rank,
                                             int is_server, const char *text) {
  memset(&comm->verdict, 0, sizeof comm->verdict);
  comm->verdict.code = code;
  comm->verdict.rank = rank;
  comm->verdict.is_server = is_server;
  snprintf(comm->verdict.text, sizeof comm->verdict.text, "%s", text);
}

MLFAB__INTERNAL void mlfab__comm_enter(mlfab__comm *comm, uint64_t now_ns) {
  comm->depth++;
  if (now_ns) comm->now_ns = now_ns;
}

MLFAB__INTERNAL void mlfab__comm_exit(mlfab__comm *comm) {
  comm->depth--;
  if (comm->depth == 0 && (comm->failing | comm->due)) comm->settle(comm);
}

MLFAB__INTERNAL void mlfab__comm_fail(mlfab__comm *comm, int code, int32_t rank, const char *format,
                                      ...) {
  if (comm->failing || comm->phase == MLFAB__COMM_ENDING || comm->dead) return;
  if (rank == MLFAB_NO_RANK) rank = (int32_t)comm->rank; /* as server 0 tells the others */
  comm->failing = 1;
  comm->fail.code = code;
  comm->fail.rank = rank;
  va_list arguments;
  va_start(arguments, format);
  mlfab__vformat(comm->fail.text, sizeof comm->fail.text, format, arguments);
  va_end(arguments);
  mlfab__comm_set_verdict(comm, code, rank, 0, comm->fail.text);
  mlfab__comm_enter(comm, 0);
  mlfab__comm_exit(comm);
}

MLFAB__INTERNAL void mlfab__comm_fail_memory(mlfab__comm *comm) {
  mlfab__comm_fail(comm, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, "worker %u is out of memory", comm->rank);
}

MLFAB__INTERNAL int mlfab__comm_owed(mlfab__comm *comm, mlfab_error *error) {
  if (!comm->owed) return 0;
  comm->owed = 0;
  if (error) *error = comm->verdict;
  return 1;
}

MLFAB__INTERNAL void mlfab__comm_end_alone(mlfab__comm *comm, mlfab_request id, int code,
                                           int32_t rank, const char *text) {
  mlfab__request *request = mlfab__request_find(comm->requests, id);
  if (request && !request->done)
    mlfab__request_finish(comm->requests, request, code, rank, 0, comm->now_ns, "%s", text);
}

MLFAB__INTERNAL void mlfab__comm_succeed(mlfab__comm *comm, mlfab_request id) {
  comm->collectives++;
  mlfab__comm_end_alone(comm, id, 0, MLFAB_NO_RANK, "");
}

MLFAB__INTERNAL void mlfab__comm_end_request(mlfab__comm *comm, mlfab_request id) {
  mlfab__request *request = mlfab__request_find(comm->requests, id);
  const mlfab_error *verdict = &comm->verdict;
  if (!request || request->done) return;
  comm->owed = 0;
  comm->collectives_failed++;
  mlfab__request_finish(comm->requests, request, verdict->code, verdict->rank, verdict->is_server,
                        comm->now_ns, "%s", verdict->text);
}

/* --- checks that calls have in common --- */

MLFAB__INTERNAL int mlfab__comm_check_state(const mlfab__comm *comm, const char *what,
                                            mlfab_error *error) {
  if (comm->dead)
    return mlfab__error(error, MLFAB_ERR_PEER_DEAD, 0, 1, 0, "%s: server 0 is dead", what);
  if (comm->leaving || comm->finishing)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "%s: this worker has finished, or closes", what);
  if (comm->config->workers > MLFAB__MEMBERSHIP_MEMBERS_MAX)
    return MLFAB__FAIL(error, MLFAB_ERR_LIMIT, "%s: %u workers, the limit is %u", what,
                       comm->config->workers, MLFAB__MEMBERSHIP_MEMBERS_MAX);
  return 0;
}

MLFAB__INTERNAL int mlfab__comm_check_ready(mlfab__comm *comm, const char *what,
                                            mlfab_error *error) {
  int code = mlfab__comm_check_state(comm, what, error);
  return code || !mlfab__comm_owed(comm, error) ? code : comm->verdict.code;
}

MLFAB__INTERNAL int mlfab__comm_check_count(const mlfab__comm *comm, const char *what,
                                            uint64_t count, uint32_t width, mlfab_error *error) {
  if (count == 0) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: no elements", what);
  if (count <= comm->config->model_max_bytes / width) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_LIMIT,
                     "%s: %llu elements, the limit is %llu bytes (model_max_bytes)", what,
                     (unsigned long long)count, (unsigned long long)comm->config->model_max_bytes);
}

MLFAB__INTERNAL int mlfab__comm_check_data(const char *what, const void *data, uint32_t width,
                                           mlfab_error *error) {
  if (!data) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: data is NULL", what);
  if ((uintptr_t)data % width == 0) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: data is not aligned to its elements", what);
}

MLFAB__INTERNAL int mlfab__comm_not_finite(const mlfab__comm *comm, const char *what,
                                           mlfab_error *error) {
  return mlfab__error(error, MLFAB_ERR_NOT_FINITE, (int32_t)comm->rank, 0, 0,
                      "%s: worker %u has NaN or infinity in its data", what, comm->rank);
}

/* --- state, and lookup by number --- */

MLFAB__INTERNAL int mlfab__comm_room(const mlfab__comm *comm, uint32_t epoch, uint32_t calls) {
  if (comm->phase != MLFAB__COMM_IN || comm->epoch != epoch || comm->dead || comm->leaving)
    return -1;
  if (comm->frozen || comm->failing) return 0;
  uint64_t called = mlfab__comm_called(comm);
  if (called > comm->settled || comm->settled - called < calls) return -1;
  return comm->begun == comm->end && comm->begun - comm->first < MLFAB__COMM_AHEAD;
}

/* Returns the open call of this number, or NULL. */
MLFAB__INTERNAL mlfab__comm_slot *mlfab__comm_slot_of(const mlfab__comm *comm, uint64_t number) {
  uint64_t serial = comm->base + number;
  return number < comm->end - comm->base && serial >= comm->first ? *mlfab__comm_place(comm, serial)
                                                                  : NULL;
}

MLFAB__INTERNAL int mlfab__comm_awaits(mlfab__comm *comm, uint64_t number) {
  mlfab__comm_slot *slot = mlfab__comm_slot_of(comm, number);
  if (slot && slot->state == MLFAB__SLOT_OUTSIDE) slot->wanted = 1;
  return slot != NULL || number >= comm->end - comm->base;
}

MLFAB__INTERNAL int mlfab__comm_gives(const mlfab__comm *comm, uint32_t member, uint64_t number) {
  return !comm->finished || comm->finished[member] > number;
}

MLFAB__INTERNAL uint32_t mlfab__comm_givers(const mlfab__comm *comm, uint64_t number) {
  uint32_t n = 0;
  for (uint32_t m = 0; m < comm->members; m++) n += (uint32_t)mlfab__comm_gives(comm, m, number);
  return n;
}

MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_object_find(mlfab__comm *comm, uint32_t id) {
  for (uint32_t i = 0; id && i < MLFAB__COMM_OBJECTS; i++) {
    if (comm->objects[i] && comm->objects[i]->id == id) return comm->objects[i];
  }
  return NULL;
}

MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_channel_find(mlfab__comm *comm, uint32_t channel) {
  for (uint32_t i = 0; channel && i < MLFAB__COMM_OBJECTS; i++) {
    if (comm->objects[i] && comm->objects[i]->channel == channel) return comm->objects[i];
  }
  return NULL;
}

MLFAB__INTERNAL uint8_t mlfab__comm_choose(const mlfab__comm *comm,
                                           const mlfab__algorithm_task *task) {
  const double add_bytes_per_ns = 16.0; /* in a cache; the same on all members, like the rest */
  double rate = comm->go.rate > 0.0 ? comm->go.rate / 1e9 : 1.0;
  return mlfab__algorithm_choose(task, (double)comm->go.latency_ns, rate, add_bytes_per_ns);
}

MLFAB__INTERNAL mlfab__mark mlfab__comm_mark(const mlfab__comm *comm) {
  const mlfab__counting *counting = &comm->counting;
  mlfab__mark mark = {.barriers = comm->barrier->over + comm->barrier->open};
  if (counting->worker) counting->mark(counting->worker, &mark);
  return mark;
}

/* --- reports to server 0 --- */

MLFAB__INTERNAL uint32_t mlfab__comm_open_objects(const mlfab__comm *comm) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++)
    n += comm->objects[i] && comm->objects[i]->channel != 0;
  return n;
}

MLFAB__INTERNAL void mlfab__comm_ask(mlfab__comm *comm, uint32_t after_epoch) {
  const mlfab__comm_slot *first =
      comm->first < comm->end ? *mlfab__comm_place(comm, comm->first) : NULL;
  uint32_t moved = comm->phase == MLFAB__COMM_IN ? MLFAB__MEMBERSHIP_MOVED : 0;
  comm->asked_for = first ? first->signature : 0;
  const mlfab__membership_ask ask = {.epoch = after_epoch,
                                     .arena_pid = comm->arena_pid,
                                     .arena_fd = comm->arena_fd,
                                     .arena_nonce = comm->arena_nonce,
                                     .arena_bytes = comm->arena_bytes,
                                     .host = comm->host,
                                     .in = comm->link_in,
                                     .out = comm->link_out,
                                     .round = comm->round,
                                     .objects = comm->objects_opened,
                                     .signature = comm->asked_for,
                                     .progress = first ? first->mark.progress : 0,
                                     .barriers = first ? first->mark.barriers : 0,
                                     .open = mlfab__comm_open_objects(comm),
                                     .newcomer = comm->newcomer | moved};
  MLFAB__POST(&comm->up, 0, MLFAB__MEMBERSHIP, membership_ask, &ask);
}

MLFAB__INTERNAL void mlfab__comm_say_finish(mlfab__comm *comm, uint64_t calls) {
  const mlfab__membership_finish finish = {
      .epoch = comm->phase == MLFAB__COMM_IN ? comm->epoch : 0,
      .rank = mlfab__comm_moved(comm) ? (int32_t)MLFAB_NO_RANK : (int32_t)comm->rank,
      .calls = calls};
  MLFAB__POST(&comm->up, 0, MLFAB__MEMBERSHIP_FINISH, membership_finish, &finish);
}

MLFAB__INTERNAL void mlfab__comm_stuck(mlfab__comm *comm, uint32_t channel, uint64_t number) {
  const mlfab__membership_call call = {comm->epoch, channel, number};
  if (comm->phase != MLFAB__COMM_IN || mlfab__comm_alone(comm)) return;
  MLFAB__POST(&comm->up, 0, MLFAB__MEMBERSHIP_STUCK, membership_call, &call);
}
