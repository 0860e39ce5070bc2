/* comm.c - the communicator: epochs, calls and failures. See comm.h. */
#include "comm.h"

#include <stdio.h>

/* What a member adds in a nanosecond, for choosing algorithms: the same for all, as the rest of
 * it is. */
static const double comm_add_bytes_per_ns = 4.0;
static const double comm_bytes_per_ns = 1.0; /* where server 0 does not know */

static void comm_begin(mlfab__comm *comm);
static void comm_act_on_failure(mlfab__comm *comm);
static void comm_begin_waiting(mlfab__comm *comm);
static void comm_turn_plain(mlfab__comm *comm, mlfab__comm_slot *slot);
static void comm_check_moved(mlfab__comm *comm);

MLFAB__INTERNAL int mlfab__comm_init(mlfab__comm *comm, mlfab__env *env, const mlfab_config *config,
                                     uint32_t rank, const mlfab__port *up, const mlfab__port *links,
                                     const mlfab__port *down, mlfab__requests *requests) {
  const mlfab__stream_user user = {comm, mlfab__engine_deliver, mlfab__engine_given_back};
  memset(comm, 0, sizeof *comm);
  comm->env = env;
  comm->config = config;
  comm->requests = requests;
  comm->up = *up;
  comm->rank = rank;
  comm->missing = comm->left_rank = MLFAB_NO_RANK;
  comm->arena_fd = -1;
  comm->limit = UINT64_MAX;
  comm->act = comm_act_on_failure;
  mlfab__pool_init(&comm->pool, env, MLFAB__COMM_POOL);
  mlfab__streams_init(&comm->streams, env, config, links, down, &user);
  return 0;
}

static uint64_t comm_number(const mlfab__comm_slot *slot) {
  return slot->serial - slot->comm->base;
}

static void comm_free_lists(mlfab__comm *comm, mlfab__comm_slot *slot) {
  if (slot->owed) mlfab__pool_give(&comm->pool, slot->one.data, slot->one.count);
  slot->owed = 0;
  mlfab__pool_give(&comm->pool, slot->blocks, slot->blocks_room * sizeof *slot->blocks);
  if (slot->vecs != &slot->one)
    mlfab__pool_give(&comm->pool, slot->vecs, slot->call.n * sizeof *slot->vecs);
  slot->blocks = slot->vecs = NULL;
  slot->blocks_room = 0;
}

static void comm_free_slot(mlfab__comm *comm, mlfab__comm_slot *slot) {
  if (!slot) return;
  mlfab__dag_free(&slot->run.dag);
  mlfab__free(comm->env, slot->counts, comm->config->workers * sizeof *slot->counts);
  comm_free_lists(comm, slot);
  mlfab__free(comm->env, slot, sizeof *slot);
}

static void comm_forget_list(mlfab__comm *comm) {
  mlfab__free(comm->env, comm->list, MLFAB__MEMBERSHIP_MEMBERS_MAX * sizeof *comm->list);
  comm->list = NULL;
}

static void comm_no_limit(mlfab__comm *comm) {
  mlfab__free(comm->env, comm->finished, MLFAB__MEMBERSHIP_MEMBERS_MAX * sizeof *comm->finished);
  comm->finished = NULL;
  comm->limit = UINT64_MAX;
  comm->frozen = 0;
}

static void comm_ignore(void *self, mlfab__engine_run *run, int status, uint64_t now_ns) {
  (void)self, (void)run, (void)status, (void)now_ns;
}

MLFAB__INTERNAL void mlfab__comm_free(mlfab__comm *comm) {
  if (!comm->env) return;
  comm->ending = 1;
  mlfab__streams_free(&comm->streams);
  for (mlfab__engine_run *run = comm->armed; run; run = run->next) run->over = comm_ignore;
  mlfab__engine_end_all(comm, MLFAB_ERR_CLOSED);
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++) {
    mlfab__comm_object object = comm->objects[i];
    comm->objects[i].id = 0;
    if (object.id && object.free_self) object.free_self(object.self);
  }
  mlfab__comm_sweep(comm);
  for (; comm->first < comm->end; comm->first++)
    comm_free_slot(comm, *mlfab__comm_place(comm, comm->first));
  for (uint32_t i = 0; i < MLFAB__COMM_PAST; i++)
    mlfab__free(comm->env, comm->past[i].counts,
                comm->config->workers * sizeof *comm->past[i].counts);
  while (comm->spare) {
    mlfab__comm_slot *slot = comm->spare;
    comm->spare = slot->next;
    comm_free_slot(comm, slot);
  }
  mlfab__free(comm->env, comm->slots, MLFAB__COMM_CALLS * sizeof(mlfab__comm_slot *));
  comm_forget_list(comm);
  comm_no_limit(comm);
  mlfab__free_aligned(comm->env, comm->gather, MLFAB__COMM_GATHER);
  mlfab__pool_drain(&comm->pool);
  memset(comm, 0, sizeof *comm);
}

/* --- what server 0 is told --- */

static void comm_post(mlfab__comm *comm, uint8_t type, const void *meta, uint32_t bytes) {
  comm->up.post(comm->up.self, 0, type, meta, bytes);
}

/* Alone: no membership is kept, and nobody is told. */
static int comm_alone(const mlfab__comm *comm) { return comm->config->workers == 1; }

/* To take part in the epoch after this one. */
static void comm_ask_after(mlfab__comm *comm, uint32_t epoch) {
  const mlfab__membership_ask ask = {.epoch = epoch,
                                     .arena_pid = comm->arena_pid,
                                     .arena_fd = comm->arena_fd,
                                     .arena_nonce = comm->arena_nonce,
                                     .arena_bytes = comm->arena_bytes,
                                     .host = comm->host,
                                     .in = comm->link_in,
                                     .out = comm->link_out,
                                     .round = comm->round,
                                     .objects = comm->objects_opened};
  uint8_t meta[128];
  comm_post(comm, MLFAB__MEMBERSHIP, meta, mlfab__encode_membership_ask(meta, &ask));
}

/* Has server 0 been told that the calls of this epoch are over here? */
static int comm_moved(const mlfab__comm *comm) { return comm->epoch && comm->moved == comm->epoch; }

static void comm_ask(mlfab__comm *comm) { comm_ask_after(comm, comm->over_epoch); }

/* The calls of this epoch are over here. */
static void comm_ask_next(mlfab__comm *comm) { comm_ask_after(comm, comm->epoch); }

static void comm_say_ready(mlfab__comm *comm) {
  const mlfab__membership_ready ready = {comm->epoch, comm->go.arena};
  uint8_t meta[16];
  comm_post(comm, MLFAB__MEMBERSHIP_READY, meta, mlfab__encode_membership_ready(meta, &ready));
}

static void comm_say_failed(mlfab__comm *comm) {
  uint8_t meta[MLFAB__TEXT_MAX + 32];
  comm->fail.epoch = comm->epoch;
  comm_post(comm, MLFAB__MEMBERSHIP_FAIL, meta, mlfab__encode_membership_over(meta, &comm->fail));
}

/* After so many calls; again when those of this epoch are over. */
static void comm_say_finish(mlfab__comm *comm, uint64_t calls) {
  const mlfab__membership_finish finish = {
      comm->phase == MLFAB__COMM_IN ? comm->epoch : 0,
      comm_moved(comm) ? (int32_t)MLFAB_NO_RANK : (int32_t)comm->rank, calls};
  MLFAB__POST(&comm->up, 0, MLFAB__MEMBERSHIP_FINISH, membership_finish, &finish);
}

static void comm_say_leaving(mlfab__comm *comm) {
  int knows = comm->phase == MLFAB__COMM_LISTED || comm->phase == MLFAB__COMM_IN;
  const mlfab__membership_leave leave = {knows ? comm->epoch : 0, (int32_t)comm->rank,
                                         comm->end - comm->base};
  uint8_t meta[32];
  comm_post(comm, MLFAB__MEMBERSHIP_LEAVE, meta, mlfab__encode_membership_leave(meta, &leave));
}

/* A worker alone is its own epoch. */
static void comm_form_alone(mlfab__comm *comm) {
  comm->epoch++;
  comm->members = 1;
  comm->me = 0;
  comm->ranks[0] = comm->rank;
  comm->go = (mlfab__membership_go){.epoch = comm->epoch, .round = comm->round};
  comm->phase = MLFAB__COMM_IN;
  if (mlfab__streams_begin(&comm->streams, comm->epoch, comm->ranks, 1)) {
    comm->later = 1;
    mlfab__comm_fail_memory(comm);
  } else {
    comm_begin(comm);
  }
}

/* Takes part from now on. */
static void comm_join(mlfab__comm *comm) {
  if (comm->phase != MLFAB__COMM_OUT || comm->leaving || comm->dead || comm->later) return;
  if (comm_alone(comm)) {
    comm_form_alone(comm);
    return;
  }
  if (comm->finishing && comm->first == comm->end) {
    comm_say_finish(comm, 0);
    return;
  }
  comm->phase = MLFAB__COMM_ASKED;
  comm->missing = MLFAB_NO_RANK;
  comm_ask(comm);
}

static int comm_adds(const mlfab__comm_call *call) {
  return call->kind == MLFAB__COLLECTIVE_ALLREDUCE ||
         call->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER;
}

/* Bytes of an element, or 0 where there is none; of what adds, the type counts only without
 * reducer. */
static uint32_t comm_width(const mlfab__comm_call *call) {
  if (comm_adds(call) && call->reduce) return call->width;
  return call->dtype || comm_adds(call) ? mlfab__element_bytes(call->dtype) : 1;
}

/* --- calls in words --- */

static const char *comm_words(char text[MLFAB__TEXT_MAX], const mlfab__comm_past *past) {
  unsigned long long count = past->count;
  if (past->kind == MLFAB__COLLECTIVE_BARRIER) {
    snprintf(text, MLFAB__TEXT_MAX, "%.60s", past->words);
  } else if (past->user) {
    snprintf(text, MLFAB__TEXT_MAX, "%.60s of %llu elements of %u bytes (its own reducer)",
             past->words, count, past->width);
  } else if (past->kind == MLFAB__COLLECTIVE_BROADCAST) {
    snprintf(text, MLFAB__TEXT_MAX, "%.60s of %llu bytes from worker %d", past->words,
             count * past->width, (int)past->root);
  } else if (past->kind == MLFAB__COLLECTIVE_ALLGATHER) {
    snprintf(text, MLFAB__TEXT_MAX, "%.60s of %llu %s", past->words, count,
             past->dtype ? mlfab__dtype_name(past->dtype) : "bytes");
  } else {
    snprintf(text, MLFAB__TEXT_MAX, "%.60s of %llu %s (%s)", past->words, count,
             mlfab__dtype_name(past->dtype), mlfab__op_name(past->op));
  }
  size_t n = strlen(text);
  if (past->tag)
    snprintf(text + n, MLFAB__TEXT_MAX - n, ", tag %llu", (unsigned long long)past->tag);
  return text;
}

static mlfab__comm_past comm_describe(const mlfab__comm_slot *slot) {
  const mlfab__comm_call *call = &slot->call;
  return (mlfab__comm_past){.signature = slot->signature,
                            .count = slot->count,
                            .tag = call->tag,
                            .words = call->words,
                            .dtype = call->dtype,
                            .op = call->op,
                            .width = comm_width(call),
                            .root = call->root,
                            .kind = call->kind,
                            .user = comm_adds(call) && call->reduce != NULL,
                            .algorithm = call->algorithm,
                            .opens = call->opens != 0,
                            .counts = slot->counts,
                            .has_counts = call->counts != NULL};
}

/* What is known of a call of this epoch: 1, or 0. */
static int comm_past(const mlfab__comm *comm, uint64_t number, mlfab__comm_past *past_p) {
  const mlfab__comm_slot *slot = mlfab__comm_slot_of(comm, number);
  uint64_t serial = comm->base + number;
  if (number >= comm->end - comm->base) return 0;
  if (!slot && comm->begun - serial > MLFAB__COMM_PAST) return 0;
  *past_p = slot ? comm_describe(slot) : comm->past[serial % MLFAB__COMM_PAST];
  return 1;
}

/* --- the end of a call, of an epoch --- */

static void comm_close_slot(mlfab__comm *comm, mlfab__comm_slot *slot) {
  mlfab__comm_past *past = &comm->past[slot->serial % MLFAB__COMM_PAST];
  uint64_t *counts = past->counts;
  *past = comm_describe(slot);
  if (past->has_counts)
    slot->counts = counts;
  else
    past->counts = counts;
  comm_free_lists(comm, slot);
  slot->state = MLFAB__SLOT_FREE;
  *mlfab__comm_place(comm, slot->serial) = NULL;
  slot->next = comm->spare;
  comm->spare = slot;
  while (comm->first < comm->end && !*mlfab__comm_place(comm, comm->first)) comm->first++;
}

static void comm_finish_slot(mlfab__comm *comm, mlfab__comm_slot *slot) {
  mlfab__request *request = mlfab__request_find(comm->requests, slot->request);
  comm_close_slot(comm, slot);
  comm->collectives++;
  if (request)
    mlfab__request_finish(comm->requests, request, 0, MLFAB_NO_RANK, 0, comm->now_ns, "%s", "");
  comm_begin_waiting(comm);
  comm_check_moved(comm);
}

MLFAB__INTERNAL void mlfab__comm_end_request(mlfab__comm *comm, mlfab_request id, uint64_t now_ns) {
  mlfab__request *request = mlfab__request_find(comm->requests, id);
  const mlfab_error *verdict = &comm->verdict;
  if (!request || request->done) return;
  comm->owed = 0;
  comm->collectives_failed++;
  mlfab__request_finish(comm->requests, request, verdict->code, verdict->rank, verdict->is_server,
                        now_ns, "%s", verdict->text);
}

static void comm_objects_over(mlfab__comm *comm, int code) {
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++) {
    mlfab__comm_object *object = &comm->objects[i];
    object->upto = 0; /* frames of the next epoch may come before it begins here */
    if (object->id && object->over) object->over(object->self, code, comm->now_ns);
    if (comm->closed[i].upto != UINT64_MAX) comm->closed[i].upto = 0;
  }
}

/* Everything that is open ends with the verdict. Afterwards numbers begin at 0. */
static void comm_end(mlfab__comm *comm) {
  comm->ending = 1;
  comm->failing = 0;
  comm->owed = !MLFAB__PLANTED(66);
  comm->depth++;
  mlfab__streams_end(&comm->streams);
  mlfab__engine_end_all(comm, comm->verdict.code);
  while (comm->first < comm->end) {
    mlfab__comm_slot *slot = *mlfab__comm_place(comm, comm->first);
    mlfab__comm_end_request(comm, slot->request, comm->now_ns);
    comm_close_slot(comm, slot);
  }
  comm_objects_over(comm, comm->verdict.code);
  comm->depth--;
  comm->base = comm->begun = comm->end;
  comm->left = 0;
  comm_no_limit(comm);
  comm->arena_asked = comm->ready = 0;
  comm->ending = 0;
}

/* A failure of ours takes effect here, and is told: now, or where it is one of calls that wait
 * for an epoch, as soon as it is listed. */
static void comm_act_on_failure(mlfab__comm *comm) {
  int stands = comm->phase == MLFAB__COMM_LISTED || comm->phase == MLFAB__COMM_IN;
  if (comm_alone(comm)) {
    comm->phase = MLFAB__COMM_OUT;
    comm_end(comm);
    comm_join(comm);
    return;
  }
  if (stands) comm->phase = MLFAB__COMM_FAILED;
  comm_end(comm);
  if (stands) {
    comm_say_failed(comm);
  } else {
    comm->untold = 1;
    comm_join(comm);
  }
}

MLFAB__INTERNAL int mlfab__comm_owed(mlfab__comm *comm, mlfab_error *error) {
  if (!comm->owed) return 0;
  comm->owed = 0;
  if (error) *error = comm->verdict;
  return 1;
}

/* --- what a call must be --- */

static int comm_refuse(mlfab_error *error, int code, const mlfab__comm_call *call,
                       const char *what) {
  return MLFAB__FAIL(error, code, "%s: %s", call->words, what);
}

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

static int comm_check_type(const mlfab__comm_call *call, mlfab_error *error) {
  if (call->kind == MLFAB__COLLECTIVE_BARRIER) return 0;
  if (comm_adds(call) && call->reduce) {
    if (call->width >= 1 && call->width <= 65536) return 0;
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "%s: element_bytes is %u, and must be 1..65536 with a reducer", call->words,
                       call->width);
  }
  if (!comm_width(call))
    return MLFAB__FAIL(error, MLFAB_ERR_DTYPE, "%s: %d is not an element type", call->words,
                       call->dtype);
  if (!comm_adds(call)) return 0;
  if (call->op < MLFAB_OP_SUM || call->op > MLFAB_OP_PRODUCT)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "%s: %d is not an operation (MLFAB_OP_SUM ... MLFAB_OP_PRODUCT)",
                       call->words, call->op);
  if (call->op == MLFAB_OP_MEAN && call->dtype == MLFAB_I64)
    return comm_refuse(error, MLFAB_ERR_UNSUPPORTED, call,
                       "MLFAB_MEAN cannot be used with MLFAB_I64");
  return 0;
}

static int comm_check_buffer(const mlfab__comm_call *call, uint32_t i, mlfab_error *error) {
  const mlfab_vec *vec = &call->vecs[i];
  uint32_t width = comm_width(call), line = width & (0u - width);
  if (vec->count > 0 && !vec->data)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: buffer %u is NULL and has %llu elements",
                       call->words, i, (unsigned long long)vec->count);
  if ((uintptr_t)vec->data % (line < 8 ? line : 8))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: buffer %u is not aligned to its elements",
                       call->words, i);
  return 0;
}

/* Sorts indices of buffers by address (Shell's sort). Lists are mostly sorted already. */
static void comm_sort(const mlfab__comm_call *call, uint16_t *order, uint32_t n) {
  for (uint32_t gap = 1093; gap > 0; gap /= 3) {
    for (uint32_t i = gap; i < n; i++) {
      uint16_t buf = order[i];
      uint32_t at = i;
      uintptr_t data = (uintptr_t)call->vecs[buf].data;
      for (; at >= gap && (uintptr_t)call->vecs[order[at - gap]].data > data; at -= gap)
        order[at] = order[at - gap];
      order[at] = buf;
    }
  }
}

/* Bytes that an input has: of an allgather this worker's block, of a broadcast what the root brings. */
static uint64_t comm_input_bytes(const mlfab__comm *comm, const mlfab__comm_call *call,
                                 uint32_t i) {
  uint64_t count = call->vecs[i].count;
  if (call->kind == MLFAB__COLLECTIVE_ALLGATHER) count = call->counts[comm->rank];
  if (call->kind == MLFAB__COLLECTIVE_BROADCAST && call->root != (int32_t)comm->rank) count = 0;
  return count * comm_width(call);
}

/* An input lies apart from all buffers, which are sorted by `order`. */
static int comm_check_input(const mlfab__comm *comm, const mlfab__comm_call *call, uint32_t i,
                            const uint16_t *order, uint32_t n, mlfab_error *error) {
  uintptr_t from = (uintptr_t)call->inputs[i];
  uint64_t bytes = comm_input_bytes(comm, call, i);
  uint32_t low = 0, high = n;
  if (bytes == 0) return 0;
  if (!from) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: input %u is NULL", call->words, i);
  while (low < high) { /* the first buffer that ends behind it begins */
    uint32_t at = (low + high) / 2;
    const mlfab_vec *vec = &call->vecs[order[at]];
    if ((uintptr_t)vec->data + vec->count * comm_width(call) > from)
      high = at;
    else
      low = at + 1;
  }
  if (low == n || (uintptr_t)call->vecs[order[low]].data >= from + bytes) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: input %u and buffer %u overlap", call->words,
                     i, order[low]);
}

/* Sorted by address, neighbours must not overlap, and inputs none of them. */
static int comm_check_overlap(const mlfab__comm *comm, const mlfab__comm_call *call,
                              mlfab_error *error) {
  uint16_t order[MLFAB__COMM_BUFS];
  uint32_t n = 0, width = comm_width(call);
  int code = 0;
  for (uint32_t i = 0; i < call->n; i++)
    if (call->vecs[i].count > 0) order[n++] = (uint16_t)i;
  comm_sort(call, order, n);
  for (uint32_t i = 1; i < n; i++) {
    const mlfab_vec *low = &call->vecs[order[i - 1]], *high = &call->vecs[order[i]];
    if ((uintptr_t)high->data - (uintptr_t)low->data < low->count * width)
      return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: buffers %u and %u overlap", call->words,
                         order[i - 1], order[i]);
  }
  for (uint32_t i = 0; call->inputs && i < call->n && !code; i++)
    code = comm_check_input(comm, call, i, order, n, error);
  return code;
}

/* The buffers, and how many elements they have together. */
static int comm_check_buffers(const mlfab__comm *comm, const mlfab__comm_call *call,
                              uint64_t *count_p, mlfab_error *error) {
  uint32_t width = (uint32_t)mlfab__max(comm_width(call), 1);
  uint64_t count = 0, blocks = 0;
  if (call->n > MLFAB__COMM_BUFS)
    return MLFAB__FAIL(error, MLFAB_ERR_LIMIT, "%s: %u buffers, the limit is %d", call->words,
                       call->n, MLFAB__COMM_BUFS);
  for (uint32_t i = 0; i < call->n; i++) {
    int wrong = comm_check_buffer(call, i, error);
    if (wrong) return wrong;
    count = mlfab__add_sat(count, call->vecs[i].count);
  }
  for (uint32_t r = 0; call->counts && r < comm->config->workers; r++)
    blocks = mlfab__add_sat(blocks, call->counts[r]);
  if (call->counts && (blocks != count || call->n != 1))
    return comm_refuse(error, MLFAB_ERR_ARGUMENT, call, "counts are not those of the data");
  int code = mlfab__comm_check_count(comm, call->words, count, width, error);
  *count_p = count;
  return code ? code : comm_check_overlap(comm, call, error);
}

static int comm_is_member(const mlfab__comm *comm, uint32_t rank) {
  for (uint32_t i = 0; i < comm->members; i++) {
    if (comm->ranks[i] == rank) return 1;
  }
  return 0;
}

/* A rank that the call speaks of and that is no member of this epoch: it, or NO_RANK. */
static int32_t comm_stranger(const mlfab__comm *comm, const mlfab__comm_call *call) {
  if (call->kind == MLFAB__COLLECTIVE_BROADCAST && !comm_is_member(comm, (uint32_t)call->root))
    return call->root;
  if (!call->counts || comm->members == comm->config->workers) return MLFAB_NO_RANK;
  for (uint32_t r = 0; r < comm->config->workers; r++) {
    if (call->counts[r] > 0 && !comm_is_member(comm, r)) return (int32_t)r;
  }
  return MLFAB_NO_RANK;
}

static int comm_check_ranks(const mlfab__comm *comm, const mlfab__comm_call *call,
                            mlfab_error *error) {
  if (call->kind == MLFAB__COLLECTIVE_BROADCAST &&
      (call->root < 0 || (uint32_t)call->root >= comm->config->workers))
    return mlfab__error(error, MLFAB_ERR_RANK_RANGE, call->root, 0, 0,
                        "%s: root %d is not one of %u workers", call->words, (int)call->root,
                        comm->config->workers);
  /* Who has not seen yet that somebody is gone is told that first. */
  int32_t stranger = comm->phase == MLFAB__COMM_IN && !comm->owed ? comm_stranger(comm, call)
                                                                  : (int32_t)MLFAB_NO_RANK;
  if (stranger != MLFAB_NO_RANK)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, stranger, 0, 0,
                        "%s: worker %d does not take part any more, and is the root or has a block",
                        call->words, (int)stranger);
  return 0;
}

static mlfab__algorithm_task comm_task(const mlfab__comm_call *call, uint64_t count,
                                       uint32_t members) {
  return (mlfab__algorithm_task){
      .kind = call->kind,
      .algorithm = call->algorithm,
      .ordered = call->ordered && call->reduce,
      .mean = comm_adds(call) && !call->reduce && call->op == MLFAB_OP_MEAN,
      .members = members,
      .width = comm_width(call),
      .count = count,
      .segment = MLFAB__COMM_SEGMENT,
      .after = MLFAB__DAG_NONE};
}

static int comm_check_algorithm(const mlfab__comm *comm, const mlfab__comm_call *call,
                                uint64_t count, mlfab_error *error) {
  if (!mlfab__algorithm_exists(call->algorithm))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: %d is not an algorithm (MLFAB_ALGORITHM_*)",
                       call->words, call->algorithm);
  if (call->algorithm == MLFAB_ALGORITHM_AUTO || call->kind == MLFAB__COLLECTIVE_BARRIER) return 0;
  mlfab__algorithm_task task = comm_task(call, count, comm->config->workers);
  if (call->algorithm == MLFAB_ALGORITHM_PLANNED
          ? call->kind == MLFAB__COLLECTIVE_ALLREDUCE && !task.ordered
          : mlfab__algorithm_cost(&task, call->algorithm, 1.0, 1.0, 1.0) >= 0.0)
    return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED, "%s: cannot be done by algorithm %d",
                     call->words, call->algorithm);
}

static int comm_check(const mlfab__comm *comm, const mlfab__comm_call *call, uint64_t *count_p,
                      mlfab_error *error) {
  *count_p = 0;
  int code = mlfab__comm_check_state(comm, call->words, error);
  if (!code) code = comm_check_type(call, error);
  if (!code && call->kind != MLFAB__COLLECTIVE_BARRIER)
    code = comm_check_buffers(comm, call, count_p, error);
  if (!code) code = comm_check_ranks(comm, call, error);
  if (!code) code = comm_check_algorithm(comm, call, *count_p, error);
  return code;
}

/* Is what this worker brings finite? The counts of the buffers are in units of so many bytes. */
static int comm_finite(const mlfab__comm *comm, const mlfab__comm_call *call, uint32_t unit) {
  uint64_t from = 0;
  int brings = call->kind != MLFAB__COLLECTIVE_BROADCAST || (uint32_t)call->root == comm->rank;
  if (!call->refuse_nan || !brings || !call->dtype || (comm_adds(call) && call->reduce)) return 1;
  if (call->kind != MLFAB__COLLECTIVE_ALLGATHER) {
    for (uint32_t i = 0; i < call->n; i++) {
      if (!mlfab__kernel_finite(call->dtype, call->vecs[i].data,
                                call->vecs[i].count * unit / comm_width(call)))
        return 0;
    }
    return 1;
  }
  for (uint32_t r = 0; r < comm->rank; r++) from += call->counts[r];
  return mlfab__kernel_finite(call->dtype,
                              (const uint8_t *)call->vecs[0].data + from * comm_width(call),
                              call->counts[comm->rank]);
}

/* --- a call begins --- */

static uint64_t comm_signature(const mlfab__comm *comm, const mlfab__comm_call *call,
                               uint64_t count) {
  int own = comm_adds(call) && call->reduce != NULL;
  const uint64_t of[] = {call->kind,
                         own ? 0 : (uint64_t)call->dtype,
                         own || !comm_adds(call) || MLFAB__PLANTED(67) ? 0 : (uint64_t)call->op,
                         (uint64_t)own,
                         own && call->ordered,
                         comm_width(call),
                         count,
                         call->kind == MLFAB__COLLECTIVE_BROADCAST ? (uint64_t)call->root : 0,
                         call->algorithm,
                         MLFAB__PLANTED(100) ? 0 : call->tag,
                         call->salt};
  uint64_t hash = mlfab__hash(0, of, sizeof of);
  if (call->counts)
    hash = mlfab__hash(hash, call->counts, comm->config->workers * sizeof *call->counts);
  return hash ? hash : 1;
}

/* A slot for the next call. Errors: AGAIN (there are MLFAB__COMM_CALLS, counted from the oldest that is
 * open), MEMORY. */
static int comm_new_slot(mlfab__comm *comm, const mlfab__comm_call *call,
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

static void comm_fill_slot(mlfab__comm *comm, mlfab__comm_slot *slot, const mlfab__comm_call *call,
                           uint64_t count) {
  uint32_t width = comm_width(call);
  slot->state = MLFAB__SLOT_WAITING;
  slot->wanted = 0;
  slot->call = *call;
  slot->count = count;
  slot->signature = comm_signature(comm, call, count);
  slot->stuck_ns = comm->now_ns;
  slot->missing = MLFAB_NO_RANK;
  for (uint32_t i = 0; i < call->n; i++)
    slot->vecs[i] = (mlfab_vec){call->vecs[i].data, call->vecs[i].count * width};
  slot->call.vecs = slot->vecs;
  if (call->counts) {
    memcpy(slot->counts, call->counts, comm->config->workers * sizeof *slot->counts);
    slot->call.counts = slot->counts;
  }
}

static int comm_open_slot(mlfab__comm *comm, const mlfab__comm_call *call, uint64_t count,
                          uint64_t timeout_ns, mlfab_request *request_p, mlfab_error *error) {
  mlfab__comm_slot *slot;
  int code = comm_new_slot(comm, call, &slot);
  if (code == MLFAB_ERR_MEMORY) return comm_refuse(error, code, call, "out of memory");
  if (code)
    return MLFAB__FAIL(error, code, "%s: %d collectives are under way", call->words,
                       MLFAB__COMM_CALLS);
  mlfab__request *request = mlfab__request_open(
      comm->requests, MLFAB__REQUEST_COLLECTIVE, (uint32_t)(comm->end % MLFAB__COMM_CALLS),
      comm->now_ns, timeout_ns ? timeout_ns : comm->config->timeout_ns);
  if (!request) {
    slot->call.n = call->n;
    comm_free_lists(comm, slot);
    return comm_refuse(error, MLFAB_ERR_AGAIN, call,
                       "too many requests are open: end some with mlfab_wait or mlfab_test");
  }
  comm->spare = slot->next;
  slot->serial = comm->end++;
  slot->request = *request_p = request->id;
  *mlfab__comm_place(comm, slot->serial) = slot;
  comm_fill_slot(comm, slot, call, count);
  comm_begin_waiting(comm); /* the request tells how that goes */
  comm_join(comm);
  return 0;
}

static int comm_refuse_nan(mlfab__comm *comm, const mlfab__comm_call *call, uint64_t count,
                           mlfab_error *error) {
  char text[MLFAB__TEXT_MAX];
  snprintf(text, sizeof text, "%.60s of %llu elements: worker %u has NaN or infinity in its data",
           call->words, (unsigned long long)count, comm->rank);
  mlfab__comm_fail(comm, MLFAB_ERR_NOT_FINITE, (int32_t)comm->rank, text);
  comm->owed = 0; /* it is seen here */
  return mlfab__error(error, MLFAB_ERR_NOT_FINITE, (int32_t)comm->rank, 0, 0, "%s", text);
}

/* Brings the inputs to where they are worked on. */
static void comm_take_inputs(const mlfab__comm *comm, const mlfab__comm_call *call) {
  for (uint32_t i = 0; call->inputs && i < call->n; i++) {
    uint64_t bytes = comm_input_bytes(comm, call, i), at = 0;
    for (uint32_t r = 0; call->kind == MLFAB__COLLECTIVE_ALLGATHER && r < comm->rank; r++)
      at += call->counts[r] * comm_width(call);
    if (bytes > 0) memcpy((uint8_t *)call->vecs[i].data + at, call->inputs[i], bytes);
  }
}

MLFAB__INTERNAL int mlfab__comm_start(mlfab__comm *comm, const mlfab__comm_call *call,
                                      uint64_t timeout_ns, uint64_t now_ns,
                                      mlfab_request *request_p, mlfab_error *error) {
  uint64_t count;
  int code = comm_check(comm, call, &count, error);
  if (code) return code;
  if (mlfab__comm_owed(comm, error)) return comm->verdict.code;
  comm->now_ns = now_ns;
  comm_take_inputs(comm, call);
  if (!call->outside && !comm_finite(comm, call, comm_width(call)))
    return comm_refuse_nan(comm, call, count, error);
  mlfab__comm_enter(comm, now_ns);
  code = comm_open_slot(comm, call, count, timeout_ns, request_p, error);
  mlfab__comm_exit(comm);
  return code;
}

/* The members' blocks in their order, and their lengths. Those that are neighbours become one. */
static int comm_blocks(mlfab__comm *comm, mlfab__comm_slot *slot, uint64_t *lengths) {
  uint32_t n = 0, width = comm_width(&slot->call);
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
  slot->run.spaces[0] = (mlfab__comm_space){slot->blocks, n};
  return 0;
}

/* Windows of a parent with so many children are within what they may have staged. */
static uint32_t comm_tree_segment(uint32_t children) {
  uint64_t all = (uint64_t)MLFAB__COMM_WINDOWS / MLFAB__COMM_WINDOW / mlfab__max(children, 1);
  return (uint32_t)mlfab__min(MLFAB__COMM_SEGMENT, mlfab__max(all / 64 * 64, 4096));
}

/* Its task graph; `tree` with so many children at most, or NULL. Errors: MEMORY, LIMIT. */
static int comm_schedule(mlfab__comm *comm, mlfab__comm_slot *slot, const mlfab__tree_node *tree,
                         uint32_t children) {
  const mlfab__comm_call *call = &slot->call;
  mlfab__algorithm_task task = comm_task(call, slot->count, comm->members);
  double rate = comm->go.rate > 0.0 ? comm->go.rate / 1e9 : comm_bytes_per_ns;
  uint64_t *lengths = NULL, bytes = comm->members * sizeof *lengths;
  uint32_t end, tag, culprit;
  int code = 0;
  task.me = comm->me;
  task.tree = tree;
  if (tree) task.algorithm = MLFAB_ALGORITHM_PLANNED;
  if (tree) task.segment = comm_tree_segment(children);
  slot->run.spaces[0] = (mlfab__comm_space){slot->vecs, call->n};
  for (uint32_t m = 0; call->kind == MLFAB__COLLECTIVE_BROADCAST && m < comm->members; m++) {
    if (comm->ranks[m] == (uint32_t)call->root) task.root = m;
  }
  if (call->counts) {
    lengths = mlfab__pool_take(&comm->pool, bytes);
    code = lengths ? comm_blocks(comm, slot, lengths) : MLFAB_ERR_MEMORY;
    task.counts = lengths;
  }
  mlfab__dag_clear(&slot->run.dag);
  if (!code) {
    task.algorithm =
        mlfab__algorithm_choose(&task, (double)comm->go.latency_ns, rate, comm_add_bytes_per_ns);
    code = mlfab__algorithm_build(&slot->run.dag, &task, &end, &tag);
  }
  if (!code) code = mlfab__dag_seal(&slot->run.dag, &culprit);
  mlfab__pool_give(&comm->pool, lengths, bytes);
  return code;
}

static void comm_slot_over(void *self, mlfab__engine_run *run, int status, uint64_t now_ns) {
  mlfab__comm_slot *slot = self;
  (void)run, (void)now_ns;
  if (status == 0) comm_finish_slot(slot->comm, slot);
}

/* Where others might only receive, some calls wait for them all the same. */
static int comm_is_eager(const mlfab__comm_slot *slot) {
  uint8_t kind = slot->call.kind;
  int ahead = kind != MLFAB__COLLECTIVE_ALLREDUCE && kind != MLFAB__COLLECTIVE_BARRIER;
  return slot->count * comm_width(&slot->call) <= MLFAB__COMM_EAGER &&
         !(ahead && comm_number(slot) % MLFAB__COMM_AHEAD == MLFAB__COMM_AHEAD - 1);
}

static void comm_fail_call(mlfab__comm *comm, const mlfab__comm_slot *slot, int code, int32_t rank,
                           const char *what) {
  char text[MLFAB__TEXT_MAX], words[MLFAB__TEXT_MAX];
  const mlfab__comm_past past = comm_describe(slot);
  comm_words(words, &past);
  if (rank == MLFAB_NO_RANK) rank = (int32_t)comm->rank;
  snprintf(text, sizeof text, "%.120s: worker %d %.90s", words, (int)rank, what);
  mlfab__comm_fail(comm, code, rank, text);
}

/* Does it go by a tree of the scheduler? The same for all members. */
static int comm_is_planned(const mlfab__comm *comm, const mlfab__comm_slot *slot) {
  const mlfab__comm_call *call = &slot->call;
  if (call->kind != MLFAB__COLLECTIVE_ALLREDUCE || comm->members < 3) return 0;
  if (call->algorithm == MLFAB_ALGORITHM_PLANNED) return 1;
  return call->algorithm == MLFAB_ALGORITHM_AUTO && !(call->reduce && call->ordered) &&
         comm->config->scheduler != MLFAB_SCHEDULER_NONE &&
         slot->count * comm_width(call) > comm->config->eager_bytes;
}

static void comm_ask_tree(mlfab__comm *comm, const mlfab__comm_slot *slot) {
  const mlfab__tree_ask ask = {.number = MLFAB__COMM_TREE(comm->epoch, comm_number(slot)),
                               .bytes = slot->count * comm_width(&slot->call)};
  uint8_t meta[64];
  comm_post(comm, MLFAB__TREE_ASK, meta, mlfab__encode_tree_ask(meta, &ask, NULL));
}

/* Runs as a task graph, up and down `tree` where there is one. Not 0: the epoch fails. */
static int comm_begin_play(mlfab__comm *comm, mlfab__comm_slot *slot, const mlfab__tree_node *tree,
                           uint32_t children) {
  mlfab__engine_run *run = &slot->run;
  const mlfab__comm_call *call = &slot->call;
  slot->state = MLFAB__SLOT_PLAIN;
  int code = comm_schedule(comm, slot, tree, children);
  if (!code) {
    run->channel = 0;
    run->number = comm_number(slot);
    run->signature = slot->signature;
    run->eager = (uint8_t)comm_is_eager(slot);
    run->dtype = call->dtype;
    run->op = call->op;
    run->width = comm_width(call);
    run->reduce = comm_adds(call) ? call->reduce : NULL;
    run->reduce_user = call->reduce_user;
    run->compute = NULL;
    run->over = comm_slot_over;
    run->self = slot;
    code = mlfab__comm_arm(comm, run, comm->now_ns);
  }
  if (code) comm_fail_call(comm, slot, code, (int32_t)comm->rank, mlfab_error_text(code));
  return code;
}

/* Not 0: the epoch fails. */
static int comm_begin_plain(mlfab__comm *comm, mlfab__comm_slot *slot) {
  if (comm->members == 1) {
    comm_finish_slot(comm, slot);
  } else if (comm_is_planned(comm, slot)) {
    slot->state = MLFAB__SLOT_PLANNING;
    comm_ask_tree(comm, slot);
  } else {
    return comm_begin_play(comm, slot, NULL, 0);
  }
  return 0;
}

/* The tree of a call that waits for it. 0, or FRAME. */
static int comm_on_tree(mlfab__comm *comm, const mlfab__frame_in *frame) {
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
  if (!code) (void)comm_begin_play(comm, slot, tree, children);
  mlfab__pool_give(&comm->pool, tree, bytes);
  return code;
}

/* What the call that begins now opens has a channel from here on, whether or not it is still there. */
static void comm_open_object(mlfab__comm *comm, uint32_t id) {
  mlfab__comm_object *object = mlfab__comm_object_find(comm, id);
  comm->objects_opened++;
  if (!object) return;
  object->channel = (uint32_t)comm->objects_opened;
  object->stuck_ns = comm->now_ns;
  if (object->begin) object->begin(object->self, comm->go.round, comm->now_ns);
}

/* A call of an epoch that stands. Not 0: the epoch fails. */
static int comm_begin_call(mlfab__comm *comm, mlfab__comm_slot *slot) {
  int32_t stranger = comm_stranger(comm, &slot->call);
  slot->stuck_ns = comm->now_ns;
  if (comm->left && comm_number(slot) >= comm->left_calls) {
    comm_fail_call(comm, slot, MLFAB_ERR_PEER_CLOSED, comm->left_rank, "has left");
    return MLFAB_ERR_PEER_CLOSED;
  }
  if (stranger != MLFAB_NO_RANK) {
    comm_fail_call(comm, slot, MLFAB_ERR_ARGUMENT, stranger,
                   "does not take part, and is the root or has a block");
    return MLFAB_ERR_ARGUMENT;
  }
  if (slot->call.opens) comm_open_object(comm, slot->call.opens);
  if (comm->failing) { /* the object could not begin: it is not open, and may go until the tick */
    comm->later = 1;
    return comm->verdict.code;
  }
  if (slot->call.outside && comm->go.arena == 1 && comm->members > 1) {
    slot->state = MLFAB__SLOT_OUTSIDE;
    slot->wanted = (uint8_t)mlfab__engine_came(comm, comm_number(slot));
    return 0;
  }
  if (slot->call.outside) { /* its numbers have not been looked at */
    comm_turn_plain(comm, slot);
    return 0;
  }
  return comm_begin_plain(comm, slot);
}

static int comm_may_begin(mlfab__comm *comm, const mlfab__comm_call *call) {
  const mlfab__comm_object *object = call->of ? mlfab__comm_object_find(comm, call->of) : NULL;
  return !object || !object->stands || object->stands(object->self);
}

/* Begins what waits, in the order of calls, up to COMM_AHEAD calls above the first that is open:
 * so what others hold up here holds up what follows, before that takes all of their credit. */
static void comm_begin_waiting(mlfab__comm *comm) {
  if (comm->beginning || comm->ending) return;
  comm->beginning = 1;
  while (comm->phase == MLFAB__COMM_IN && !comm->failing && comm->begun < comm->end &&
         comm->begun - comm->first < MLFAB__COMM_AHEAD && !comm->frozen &&
         comm->begun - comm->base < comm->limit) {
    mlfab__comm_slot *slot = *mlfab__comm_place(comm, comm->begun);
    if (!comm_may_begin(comm, &slot->call)) break;
    comm->begun++;
    (void)comm_begin_call(comm, slot);
  }
  comm->beginning = 0;
}

MLFAB__INTERNAL void mlfab__comm_go_on(mlfab__comm *comm) { comm_begin_waiting(comm); }

/* --- outside calls --- */

static mlfab__comm_slot *comm_slot_by_request(mlfab__comm *comm, const mlfab__request *request) {
  mlfab__comm_slot *slot =
      comm->slots && request->slot < MLFAB__COMM_CALLS ? comm->slots[request->slot] : NULL;
  return slot && slot->request == request->id ? slot : NULL;
}

/* It is run as a task graph after all. */
static void comm_turn_plain(mlfab__comm *comm, mlfab__comm_slot *slot) {
  /* For this worker it is over; others may not know yet. */
  if (comm->go.arena) comm->go.arena = 2;
  if (comm_finite(comm, &slot->call, 1)) {
    (void)comm_begin_plain(comm, slot);
  } else {
    comm_fail_call(comm, slot, MLFAB_ERR_NOT_FINITE, (int32_t)comm->rank,
                   "has NaN or infinity in its data");
  }
}

MLFAB__INTERNAL int mlfab__comm_outside(mlfab__comm *comm, mlfab_request id, uint64_t *number_p,
                                        uint64_t *signature_p) {
  mlfab__request *request = mlfab__request_find(comm->requests, id);
  if (!request) return MLFAB_ERR_REQUEST;
  if (request->done) return request->result.status ? request->result.status : MLFAB_ERR_UNSUPPORTED;
  mlfab__comm_slot *slot = comm_slot_by_request(comm, request);
  if (!slot) return MLFAB_ERR_REQUEST;
  if (slot->state == MLFAB__SLOT_WAITING) return 0;
  if (slot->state == MLFAB__SLOT_OUTSIDE && slot->wanted) {
    mlfab__comm_enter(comm, 0);
    comm_turn_plain(comm, slot);
    mlfab__comm_exit(comm);
    return request->done && request->result.status ? request->result.status : MLFAB_ERR_UNSUPPORTED;
  }
  if (slot->state != MLFAB__SLOT_OUTSIDE) return MLFAB_ERR_UNSUPPORTED;
  *number_p = comm_number(slot);
  *signature_p = slot->signature;
  return 1;
}

MLFAB__INTERNAL int mlfab__comm_outside_over(mlfab__comm *comm, mlfab_request id) {
  const mlfab__request *request = mlfab__request_find(comm->requests, id);
  if (!request) return MLFAB_ERR_REQUEST;
  if (request->done) return request->result.status ? request->result.status : MLFAB_ERR_UNSUPPORTED;
  const mlfab__comm_slot *slot = comm_slot_by_request(comm, request);
  return slot && slot->state == MLFAB__SLOT_OUTSIDE && !slot->wanted ? 0 : MLFAB_ERR_UNSUPPORTED;
}

MLFAB__INTERNAL void mlfab__comm_finish(mlfab__comm *comm, mlfab_request id, int code, int32_t rank,
                                        uint64_t now_ns) {
  mlfab__request *request = mlfab__request_find(comm->requests, id);
  mlfab__comm_slot *slot = request ? comm_slot_by_request(comm, request) : NULL;
  if (!slot || slot->state != MLFAB__SLOT_OUTSIDE) return; /* it has ended meanwhile */
  mlfab__comm_enter(comm, now_ns);
  if (code == 0) {
    comm_finish_slot(comm, slot);
  } else if (code == MLFAB_ERR_MISMATCH) {
    /* All have called: server 0 compares what, and its verdict names both calls. */
    mlfab__comm_stuck(comm, 0, comm_number(slot));
  } else if (code == MLFAB_ERR_NOT_FINITE) {
    comm_fail_call(comm, slot, code, rank, "has NaN or infinity in its data");
  } else {
    comm_fail_call(comm, slot, code, rank, mlfab_error_text(code));
  }
  mlfab__comm_exit(comm);
}

/* --- calls that do not end --- */

/* Whom this call waits for, and why as far as known. */
static int32_t comm_awaited(const mlfab__comm *comm, const mlfab__comm_slot *slot,
                            const char **why_p) {
  *why_p = "has not called it";
  if (slot->missing != MLFAB_NO_RANK) return slot->missing;
  if (comm->phase != MLFAB__COMM_IN || comm_number(slot) >= comm->limit) {
    *why_p = "takes no part yet";
    return comm->missing;
  }
  *why_p = "is awaited";
  return mlfab__engine_awaits(comm, &slot->run);
}

/* A request is withdrawn, which ends the epoch: of `what`, with this number of what it counts. A deadline
 * blames who is awaited, if that is known. */
static void comm_withdraw(mlfab__comm *comm, const mlfab__request *request, int code,
                          const char *what, const char *counts, uint64_t number, int32_t awaited,
                          const char *why) {
  char text[MLFAB__TEXT_MAX], waited[24];
  unsigned long long which = number;
  mlfab__duration(waited, comm->now_ns - request->started_ns);
  if (code != MLFAB_ERR_TIMEOUT) {
    awaited = (int32_t)comm->rank;
    snprintf(text, sizeof text, "%.120s (%s %llu): withdrawn by worker %u after %s", what, counts,
             which, comm->rank, waited);
  } else if (awaited == MLFAB_NO_RANK) {
    snprintf(text, sizeof text, "%.120s (%s %llu): worker %u's deadline passed after %s", what,
             counts, which, comm->rank, waited);
  } else {
    snprintf(text, sizeof text,
             "%.120s (%s %llu): worker %u's deadline passed after %s: worker %d %s", what, counts,
             which, comm->rank, waited, (int)awaited, why);
  }
  mlfab__comm_fail(comm, code, awaited, text);
}

MLFAB__INTERNAL void mlfab__comm_withdraw(mlfab__comm *comm, mlfab__request *request, int code,
                                          uint64_t now_ns) {
  const char *why = "";
  mlfab__comm_enter(comm, now_ns);
  if (request->slot < MLFAB__COMM_CALLS) {
    const mlfab__comm_slot *slot = comm_slot_by_request(comm, request);
    char words[MLFAB__TEXT_MAX];
    if (slot) {
      int32_t rank = comm_awaited(comm, slot, &why);
      const mlfab__comm_past past = comm_describe(slot);
      comm_words(words, &past);
      comm_withdraw(comm, request, code, words, "number", comm_number(slot), rank, why);
    }
  } else {
    mlfab__comm_object *object = mlfab__comm_object_find(comm, request->slot - MLFAB__COMM_CALLS);
    uint64_t number = 0;
    if (object) {
      int32_t rank = object->awaited(object->self, &number, &why);
      comm_withdraw(comm, request, code, object->what, object->counts, number, rank, why);
    }
  }
  mlfab__comm_exit(comm);
}

/* --- frames of server 0 --- */

/* The members as listed: 0, or what is wrong with them. */
static int comm_take_members(mlfab__comm *comm, const mlfab__membership_list *list,
                             const mlfab__membership_member *members) {
  uint32_t me = list->members;
  if (list->members == 0) return MLFAB_ERR_FRAME;
  for (uint32_t i = 0; i < list->members; i++) {
    if (members[i].rank >= comm->config->workers) return MLFAB_ERR_FRAME;
    for (uint32_t k = 0; k < i; k++) {
      if (members[k].rank == members[i].rank) return MLFAB_ERR_FRAME;
    }
    if (members[i].rank == comm->rank) me = i;
  }
  if (me == list->members) return MLFAB_ERR_FRAME;
  comm->members = list->members;
  comm->me = me;
  for (uint32_t i = 0; i < list->members; i++) comm->ranks[i] = members[i].rank;
  return 0;
}

/* Do all share this host, and have they memory for each other? */
static int comm_has_arena(const mlfab__comm *comm) {
  for (uint32_t i = 0; i < comm->members; i++) {
    if (!comm->list[i].arena_nonce || comm->list[i].host != comm->list[comm->me].host) return 0;
  }
  return 1;
}

/* An epoch is to begin: frames of it are taken from now on. */
static void comm_listed(mlfab__comm *comm) {
  memset(&comm->go, 0, sizeof comm->go);
  comm->phase = MLFAB__COMM_LISTED;
  comm->left = 0;
  comm->ready = 0;
  if (mlfab__streams_begin(&comm->streams, comm->epoch, comm->ranks, comm->members)) {
    comm->later = 1;
    mlfab__comm_fail_memory(comm);
    return;
  }
  comm->arena_asked = comm_has_arena(comm);
  if (comm->arena_asked) return;
  comm->ready = 1;
  comm_say_ready(comm);
}

static int32_t comm_first_finished(const mlfab__comm *comm) {
  int32_t rank = MLFAB_NO_RANK;
  for (uint32_t m = 0; m < comm->members && comm->finished; m++)
    if (comm->finished[m] != UINT64_MAX &&
        (rank == MLFAB_NO_RANK || (int32_t)comm->ranks[m] < rank))
      rank = (int32_t)comm->ranks[m];
  return rank;
}

/* All members have ended the calls of this epoch. What waits has numbers of the next one. */
static void comm_renew(mlfab__comm *comm) {
  char text[MLFAB__TEXT_MAX];
  int32_t rank = comm_first_finished(comm);
  snprintf(text, sizeof text, "worker %d has finished while this was under way", (int)rank);
  mlfab__comm_set_verdict(comm, MLFAB_ERR_PEER_CLOSED, rank, 0, text);
  comm->ending = 1;
  comm->depth++;
  mlfab__streams_end(&comm->streams);
  mlfab__engine_end_all(comm, MLFAB_ERR_PEER_CLOSED);
  comm_objects_over(comm, MLFAB_ERR_PEER_CLOSED);
  comm->depth--;
  comm->ending = 0;
  if (comm->over_epoch < comm->epoch) comm->over_epoch = comm->epoch;
  comm->phase = MLFAB__COMM_ASKED;
  comm->base = comm->begun = comm->first;
  comm->left = 0;
  comm->missing = MLFAB_NO_RANK;
  comm_no_limit(comm);
}

/* 0, or FRAME. */
static int comm_on_list(mlfab__comm *comm, const mlfab__frame_in *frame) {
  mlfab__membership_list list;
  mlfab__membership_member *members =
      mlfab__alloc_array(comm->env, MLFAB__MEMBERSHIP_MEMBERS_MAX, sizeof *members);
  if (!members) { /* as if it had not come */
    mlfab__log(comm->env, MLFAB_LOG_ERROR, "collectives: no memory for the list of members");
    return 0;
  }
  int code = mlfab__decode_membership_list(frame->meta, frame->meta_bytes, &list, members);
  int fresh = !code && (comm->phase == MLFAB__COMM_ASKED || comm_moved(comm)) &&
              list.epoch > comm->over_epoch && list.epoch > comm->epoch;
  if (fresh && comm->phase == MLFAB__COMM_IN) comm_renew(comm);
  if (fresh) code = comm_take_members(comm, &list, members);
  if (!fresh || code) {
    mlfab__free(comm->env, members, MLFAB__MEMBERSHIP_MEMBERS_MAX * sizeof *members);
    return code;
  }
  comm_forget_list(comm);
  comm->list = members;
  comm->epoch = list.epoch;
  if (comm->phase == MLFAB__COMM_FAILED) { /* of the epoch before, which nobody can fail any more */
    comm_say_failed(comm);
  } else if (comm->untold) {
    comm->untold = 0;
    comm->phase = MLFAB__COMM_FAILED;
    comm_say_failed(comm);
  } else {
    comm_listed(comm);
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__comm_mapped(mlfab__comm *comm, int ok) {
  if (comm->phase != MLFAB__COMM_LISTED || !comm->arena_asked) return;
  comm->arena_asked = 0;
  comm->go.arena = ok != 0;
  comm->ready = 1;
  comm_say_ready(comm);
}

/* The epoch stands: what was called meanwhile begins. */
static void comm_begin(mlfab__comm *comm) {
  comm->in_ns = comm->now_ns;
  comm->epochs++;
  mlfab__comm_enter(comm, 0);
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++) {
    mlfab__comm_object *object = &comm->objects[i];
    object->missing = MLFAB_NO_RANK;
    object->stuck_ns = comm->now_ns;
    if (object->channel && object->begin) object->begin(object->self, comm->go.round, comm->now_ns);
  }
  comm->later = comm->failing;
  if (comm->finishing && !comm_alone(comm)) comm_say_finish(comm, comm->end - comm->base);
  comm_begin_waiting(comm);
  mlfab__comm_exit(comm);
}

static void comm_on_go(mlfab__comm *comm, const mlfab__membership_go *go) {
  if (comm->phase != MLFAB__COMM_LISTED || go->epoch != comm->epoch) return;
  comm->go = *go;
  comm->go.arena = go->arena != 0;
  comm->objects_opened = mlfab__max(comm->objects_opened, go->objects);
  comm->phase = MLFAB__COMM_IN;
  comm_begin(comm);
}

/* The verdict. What has failed here already is not failed by it. */
static void comm_on_over(mlfab__comm *comm, const mlfab__membership_over *over) {
  int told = comm->phase == MLFAB__COMM_FAILED || comm->untold;
  if (over->epoch <= comm->over_epoch) return;
  comm->over_epoch = over->epoch;
  if (comm->phase == MLFAB__COMM_OUT) return;
  if (over->code == 0) { /* it has not begun, or is over for a worker that has finished */
    if (comm->phase == MLFAB__COMM_IN) comm_renew(comm);
    mlfab__streams_end(&comm->streams);
    comm->arena_asked = comm->ready = 0;
    comm->phase = MLFAB__COMM_OUT;
    comm_join(comm);
    return;
  }
  if (comm->phase != MLFAB__COMM_FAILED) comm->untold = 0;
  comm->phase = MLFAB__COMM_OUT;
  if (!told || comm->owed) mlfab__comm_set_verdict(comm, over->code, over->rank, 0, over->text);
  if (!told) comm_end(comm);
  comm_join(comm);
}

/* A member has left: which call it is the first not to have called. */
static void comm_on_left(mlfab__comm *comm, const mlfab__membership_leave *in) {
  int stands = comm->phase == MLFAB__COMM_LISTED || comm->phase == MLFAB__COMM_IN;
  if (!stands || in->epoch != comm->epoch || in->rank == (int32_t)comm->rank) return;
  if (!comm->left || in->calls < comm->left_calls ||
      (in->calls == comm->left_calls && in->rank < comm->left_rank)) {
    comm->left_calls = in->calls;
    comm->left_rank = in->rank;
  }
  if (!comm->left) comm->left_ns = comm->now_ns;
  comm->left = 1;
  if (comm->phase != MLFAB__COMM_IN) return;
  for (uint64_t number = comm->left_calls; number < comm->end - comm->base; number++) {
    const mlfab__comm_slot *slot = mlfab__comm_slot_of(comm, number);
    if (slot) comm_fail_call(comm, slot, MLFAB_ERR_PEER_CLOSED, comm->left_rank, "has left");
  }
}

static void comm_on_ask(mlfab__comm *comm, const mlfab__membership_call *in) {
  mlfab__membership_tell tell = {.epoch = in->epoch, .channel = in->channel, .number = in->number};
  uint8_t meta[MLFAB__TEXT_MAX + 64];
  if (in->epoch != comm->epoch || comm->phase != MLFAB__COMM_IN) return;
  if (in->channel == 0) {
    mlfab__comm_past past;
    tell.called = in->number < comm->end - comm->base;
    if (comm_past(comm, in->number, &past)) {
      tell.signature = past.signature;
      comm_words(tell.text, &past);
    }
  } else {
    mlfab__comm_object *object = mlfab__comm_channel_find(comm, in->channel);
    tell.called = object && (!object->called || object->called(object->self, in->number));
    snprintf(tell.text, sizeof tell.text, "round %llu of object %u", (unsigned long long)in->number,
             in->channel);
    for (const mlfab__engine_run *run = comm->armed; run; run = run->next) {
      if (run->channel == in->channel && run->number == in->number) tell.signature = run->signature;
    }
  }
  comm_post(comm, MLFAB__MEMBERSHIP_TELL, meta, mlfab__encode_membership_tell(meta, &tell));
}

/* --- workers that finish --- */

static uint64_t comm_called(const mlfab__comm *comm) { return comm->end - comm->base; }

/* Tells server 0 that all calls below the limit are over here. This worker, if it has finished, is then not
 * needed any more, so others have acknowledged all bytes. */
static void comm_check_moved(mlfab__comm *comm) {
  uint64_t serial = comm->base + comm->limit;
  if (comm->limit == UINT64_MAX || comm->frozen || comm_moved(comm) || comm->failing ||
      comm->ending)
    return;
  if (comm->phase != MLFAB__COMM_IN || comm->first < serial) return;
  if (comm->finishing && comm->end == serial) {
    if (!mlfab__streams_quiet(&comm->streams)) return;
    comm->moved = comm->epoch;
    comm_say_finish(comm, comm->limit);
  } else {
    comm->moved = comm->epoch;
    comm_ask_next(comm);
  }
}

/* A worker has finished after so many calls. What others run in shared memory goes on without it. */
static void comm_on_freeze(mlfab__comm *comm, const mlfab__membership_finish *in) {
  uint64_t bytes = MLFAB__MEMBERSHIP_MEMBERS_MAX * sizeof *comm->finished;
  mlfab__membership_finish frozen = {comm->epoch, in->rank, comm->begun - comm->base};
  if (in->epoch != comm->epoch || comm->phase != MLFAB__COMM_IN) return;
  if (!comm->finished) {
    comm->finished = mlfab__alloc(comm->env, bytes);
    if (!comm->finished) {
      mlfab__comm_fail_memory(comm);
      return;
    }
    memset(comm->finished, 0xff, bytes);
  }
  for (uint32_t m = 0; m < comm->members; m++)
    if ((int32_t)comm->ranks[m] == in->rank) comm->finished[m] = in->calls;
  comm->frozen = 1;
  comm->moved = 0;
  for (uint64_t serial = mlfab__max(comm->first, comm->base + in->calls); serial < comm->begun;
       serial++) {
    mlfab__comm_slot *slot = *mlfab__comm_place(comm, serial);
    if (slot && slot->state == MLFAB__SLOT_OUTSIDE) slot->wanted = 1;
  }
  if (comm->go.arena) comm->go.arena = 2;
  MLFAB__POST(&comm->up, 0, MLFAB__MEMBERSHIP_FROZEN, membership_finish, &frozen);
}

/* Describes a call to those that owe it. */
static void comm_tell_owed(mlfab__comm *comm, uint64_t number) {
  mlfab__comm_past past;
  uint8_t meta[MLFAB_META_MAX / 4];
  if (!comm_past(comm, number, &past)) return;
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
  comm_post(comm, MLFAB__MEMBERSHIP_OWED, meta,
            mlfab__encode_membership_owed(meta, &owed, past.counts));
}

/* All know who has finished, and the epoch has a limit. */
static void comm_on_settle(mlfab__comm *comm, const mlfab__membership_finish *in) {
  uint64_t owed = UINT64_MAX;
  if (in->epoch != comm->epoch || comm->phase != MLFAB__COMM_IN) return;
  comm->limit = in->calls;
  comm->frozen = 0;
  for (uint32_t m = 0; m < comm->members && comm->finished; m++)
    owed = mlfab__min(owed, comm->finished[m]);
  for (; in->rank == (int32_t)comm->rank && owed < comm->limit; owed++) comm_tell_owed(comm, owed);
  comm_begin_waiting(comm);
  comm_check_moved(comm);
}

/* The bits of an element that changes nothing: -0 for sums. By type, then operation. */
static const uint64_t comm_identities[][MLFAB_OP_PRODUCT + 1] = {
    [MLFAB_F32] = {0x80000000, 0x80000000, 0x7f800000, 0xff800000, 0x3f800000},
    [MLFAB_F64] = {0x8000000000000000, 0x8000000000000000, 0x7ff0000000000000, 0xfff0000000000000,
                   0x3ff0000000000000},
    [MLFAB_I64] = {0, 0, INT64_MAX, 0x8000000000000000, 1},
    [MLFAB_F16] = {0x8000, 0x8000, 0x7c00, 0xfc00, 0x3c00},
    [MLFAB_BF16] = {0x8000, 0x8000, 0x7f80, 0xff80, 0x3f80}};

static void comm_fill_identity(void *data, uint64_t n, int dtype, int op) {
  uint64_t bits = comm_identities[dtype][op];
  uint32_t width = mlfab__element_bytes(dtype);
  uint16_t half = (uint16_t)bits;
  uint32_t word = (uint32_t)bits;
  const void *one = width == 2 ? (const void *)&half : width == 4 ? (const void *)&word : &bits;
  for (uint64_t i = 0; i < n; i++) memcpy((uint8_t *)data + i * width, one, width);
}

/* Has this call a sense without what this worker would bring? */
static int comm_has_identity(const mlfab__comm *comm, const mlfab__membership_owed *owed,
                             const uint64_t *counts) {
  if (owed->user) return 0;
  if (owed->kind == MLFAB__COLLECTIVE_BROADCAST) return owed->root != (int32_t)comm->rank;
  return owed->kind != MLFAB__COLLECTIVE_ALLGATHER || !counts || counts[comm->rank] == 0;
}

/* Takes part in a call that others have begun. Not 0: MEMORY, or FRAME. */
static int comm_owe(mlfab__comm *comm, const mlfab__membership_owed *owed, const uint64_t *counts) {
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
  uint32_t width = owed->user ? owed->width : comm_width(&call);
  int valid = call.kind >= MLFAB__COLLECTIVE_ALLREDUCE && call.kind <= MLFAB__COLLECTIVE_BARRIER;
  if (!valid || (call.n && (!width || owed->elements > comm->config->model_max_bytes / width)) ||
      (comm_adds(&call) && (call.op < MLFAB_OP_SUM || call.op > MLFAB_OP_PRODUCT)))
    return MLFAB_ERR_FRAME;
  int code = comm_new_slot(comm, &call, &slot);
  if (code) return code;
  uint64_t bytes = call.n ? owed->elements * width : 0;
  void *data = mlfab__pool_take(&comm->pool, mlfab__max(bytes, 1));
  if (!data) return MLFAB_ERR_MEMORY;
  comm->spare = slot->next;
  slot->serial = comm->end++;
  slot->request = 0;
  *mlfab__comm_place(comm, slot->serial) = slot;
  const mlfab_vec vec = {data, call.n ? owed->elements : 0};
  call.vecs = &vec;
  comm_fill_slot(comm, slot, &call, vec.count);
  slot->one = (mlfab_vec){data, mlfab__max(bytes, 1)};
  slot->owed = 1;
  slot->signature = owed->signature;
  if (comm_adds(&call) && !owed->user)
    comm_fill_identity(data, owed->elements, dtype, call.op);
  else
    memset(data, 0, bytes);
  if (!comm_has_identity(comm, owed, counts))
    comm_fail_call(comm, slot, MLFAB_ERR_PEER_CLOSED, (int32_t)comm->rank,
                   "has finished, and the call cannot do without it");
  return 0;
}

/* 0, or FRAME. */
static int comm_on_owed(mlfab__comm *comm, const mlfab__frame_in *frame) {
  mlfab__membership_owed owed;
  uint64_t *counts = mlfab__alloc_array(comm->env, MLFAB__MEMBERSHIP_MEMBERS_MAX, sizeof *counts);
  if (!counts) {
    mlfab__comm_fail_memory(comm);
    return 0;
  }
  int code = mlfab__decode_membership_owed(frame->meta, frame->meta_bytes, &owed, counts);
  if (!code && owed.counts != 0 && owed.counts != comm->config->workers) code = MLFAB_ERR_FRAME;
  int next = !code && comm->phase == MLFAB__COMM_IN && owed.epoch == comm->epoch &&
             comm->finishing && owed.number == comm_called(comm) && owed.number < comm->limit;
  if (next) code = comm_owe(comm, &owed, owed.counts ? counts : NULL);
  mlfab__free(comm->env, counts, MLFAB__MEMBERSHIP_MEMBERS_MAX * sizeof *counts);
  if (code == MLFAB_ERR_MEMORY) mlfab__comm_fail_memory(comm);
  if (next) comm_begin_waiting(comm);
  return code == MLFAB_ERR_FRAME ? code : 0;
}

MLFAB__INTERNAL void mlfab__comm_finish_work(mlfab__comm *comm) {
  if (comm->finishing || comm->leaving) return;
  comm->finishing = 1;
  mlfab__streams_leave(&comm->streams);
  if (comm_alone(comm) || comm->dead) return;
  int waits = comm->first < comm->end;
  if (comm->phase == MLFAB__COMM_IN && comm_called(comm) <= comm->limit) {
    comm_say_finish(comm, comm_called(comm));
  } else if (!waits && (comm->phase == MLFAB__COMM_OUT || comm->phase == MLFAB__COMM_ASKED)) {
    comm->phase = MLFAB__COMM_OUT;
    comm_say_finish(comm, 0);
  } /* else as soon as an epoch stands, or the one that failed is over */
}

MLFAB__INTERNAL int mlfab__comm_finish_over(const mlfab__comm *comm) {
  if (comm_alone(comm) || comm->dead) return 1;
  if (comm->first < comm->end) return 0;
  return comm->phase == MLFAB__COMM_IN ? comm_moved(comm) : comm->phase == MLFAB__COMM_OUT;
}

MLFAB__INTERNAL uint32_t mlfab__comm_present(const mlfab__comm *comm, uint32_t *ranks,
                                             uint32_t room) {
  int known = comm->phase == MLFAB__COMM_LISTED || comm->phase == MLFAB__COMM_IN;
  uint32_t most = known ? comm->members : comm->config->workers, n = 0;
  for (uint32_t i = 0; i < most; i++) {
    uint32_t rank = known ? comm->ranks[i] : i;
    if (known && !mlfab__comm_gives(comm, i, comm_called(comm))) continue;
    if (n++ < room) ranks[n - 1] = rank;
  }
  return n;
}

/* --- more frames of server 0 --- */

static void comm_on_missing(mlfab__comm *comm, const mlfab__membership_missing *in) {
  int forms = comm->phase == MLFAB__COMM_ASKED || comm->phase == MLFAB__COMM_LISTED;
  if (in->epoch == 0) {
    if (forms || comm_moved(comm)) comm->missing = in->rank;
    return;
  }
  if (in->epoch != comm->epoch || comm->phase != MLFAB__COMM_IN) return;
  mlfab__comm_object *object = mlfab__comm_channel_find(comm, in->channel);
  mlfab__comm_slot *slot = in->channel ? NULL : mlfab__comm_slot_of(comm, in->number);
  if (object) object->missing = in->rank;
  if (slot) slot->missing = in->rank;
}

/* 0, FRAME, or 1: not of this role. */
static int comm_roll_frame(mlfab__comm *comm, const mlfab__frame_in *frame) {
  union {
    mlfab__membership_go membership_go;
    mlfab__membership_over membership_over;
    mlfab__membership_leave membership_leave;
    mlfab__membership_call membership_call;
    mlfab__membership_missing membership_missing;
    mlfab__membership_finish membership_finish;
  } in;
  int code;
#define COMM_DECODE(name) mlfab__decode_##name(frame->meta, frame->meta_bytes, &in.name)
  switch (frame->type) {
    case MLFAB__MEMBERSHIP_LIST:
      return comm_on_list(comm, frame);
    case MLFAB__TREE_PLAN:
      return comm_on_tree(comm, frame);
    case MLFAB__MEMBERSHIP_OWED:
      return comm_on_owed(comm, frame);
    case MLFAB__MEMBERSHIP_FREEZE:
      code = COMM_DECODE(membership_finish);
      if (!code) comm_on_freeze(comm, &in.membership_finish);
      return code;
    case MLFAB__MEMBERSHIP_SETTLE:
      code = COMM_DECODE(membership_finish);
      if (!code) comm_on_settle(comm, &in.membership_finish);
      return code;
    case MLFAB__MEMBERSHIP_GO:
      code = COMM_DECODE(membership_go);
      if (!code) comm_on_go(comm, &in.membership_go);
      return code;
    case MLFAB__MEMBERSHIP_OVER:
      code = COMM_DECODE(membership_over);
      if (!code) comm_on_over(comm, &in.membership_over);
      return code;
    case MLFAB__MEMBERSHIP_LEFT:
      code = COMM_DECODE(membership_leave);
      if (!code) comm_on_left(comm, &in.membership_leave);
      return code;
    case MLFAB__MEMBERSHIP_ASK:
      code = COMM_DECODE(membership_call);
      if (!code) comm_on_ask(comm, &in.membership_call);
      return code;
    case MLFAB__MEMBERSHIP_MISSING:
      code = COMM_DECODE(membership_missing);
      if (!code) comm_on_missing(comm, &in.membership_missing);
      return code;
    default:
      return 1;
  }
#undef COMM_DECODE
}

MLFAB__INTERNAL int mlfab__comm_server_frame(mlfab__comm *comm, const mlfab__frame_in *frame,
                                             uint64_t now_ns) {
  mlfab__comm_enter(comm, now_ns);
  int code = comm_roll_frame(comm, frame);
  mlfab__comm_exit(comm);
  if (code == MLFAB_ERR_FRAME)
    comm->up.drop(comm->up.self, 0, MLFAB_ERR_FRAME,
                  "a frame of the membership that does not parse");
  return code != 1;
}

/* --- frames of members --- */

MLFAB__INTERNAL int mlfab__comm_member_frame(mlfab__comm *comm, uint32_t rank,
                                             const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__comm_enter(comm, now_ns);
  int ours = mlfab__stream_member_frame(&comm->streams, rank, frame);
  mlfab__comm_exit(comm);
  return ours;
}

MLFAB__INTERNAL int mlfab__comm_peer_frame(mlfab__comm *comm, uint32_t rank,
                                           const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__comm_enter(comm, now_ns);
  int ours = mlfab__stream_peer_frame(&comm->streams, rank, frame);
  if (comm->finishing) comm_check_moved(comm); /* it may have been the last acknowledgement */
  mlfab__comm_exit(comm);
  return ours;
}

/* --- coming, going, time --- */

MLFAB__INTERNAL void mlfab__comm_leave(mlfab__comm *comm) {
  if (comm->leaving) return;
  comm->leaving = 1;
  mlfab__streams_leave(&comm->streams);
  if (comm->phase == MLFAB__COMM_OUT || comm_alone(comm)) return;
  comm_say_leaving(comm);
  if (comm->phase == MLFAB__COMM_ASKED) {
    char text[64];
    snprintf(text, sizeof text, "worker %u takes no further part", comm->rank);
    comm->phase = MLFAB__COMM_OUT;
    comm->untold = 0;
    mlfab__comm_set_verdict(comm, MLFAB_ERR_CANCELLED, (int32_t)comm->rank, 0, text);
    comm_end(comm);
  }
}

MLFAB__INTERNAL int mlfab__comm_quiet(const mlfab__comm *comm) {
  if (comm->phase != MLFAB__COMM_IN && comm->phase != MLFAB__COMM_LISTED) return 1;
  if (comm->first < comm->end) return 0;
  if (comm->finishing && comm->phase == MLFAB__COMM_IN && !comm_moved(comm) && !comm_alone(comm) &&
      comm_called(comm) <= comm->limit)
    return 0;
  for (const mlfab__engine_run *run = comm->armed; run; run = run->next) {
    if (run->moved) return 0;
  }
  return mlfab__streams_quiet(&comm->streams);
}

MLFAB__INTERNAL void mlfab__comm_hello(mlfab__comm *comm) {
  if (comm->dead || comm_alone(comm)) return;
  if (comm->phase == MLFAB__COMM_ASKED) comm_ask(comm);
  if (comm->phase == MLFAB__COMM_LISTED && comm->ready) comm_say_ready(comm);
  if (comm->phase == MLFAB__COMM_FAILED) comm_say_failed(comm);
  if (comm->finishing && comm->phase == MLFAB__COMM_IN && comm_called(comm) <= comm->limit)
    comm_say_finish(comm, comm_called(comm));
  else if (comm->finishing && comm->phase == MLFAB__COMM_OUT)
    comm_say_finish(comm, 0);
  else if (comm_moved(comm))
    comm_ask_next(comm);
  if (comm->leaving) comm_say_leaving(comm);
  for (uint64_t serial = comm->first; serial < comm->begun; serial++) {
    const mlfab__comm_slot *slot = *mlfab__comm_place(comm, serial);
    if (slot && slot->state == MLFAB__SLOT_PLANNING) comm_ask_tree(comm, slot);
  }
}

MLFAB__INTERNAL void mlfab__comm_dead(mlfab__comm *comm, uint64_t now_ns) {
  if (comm->dead) return;
  comm->dead = 1;
  if (comm_alone(comm)) return;
  comm->now_ns = now_ns;
  comm->phase = MLFAB__COMM_OUT;
  comm->untold = 0;
  mlfab__comm_set_verdict(comm, MLFAB_ERR_PEER_DEAD, 0, 1, "server 0 is dead");
  comm_end(comm);
  comm->owed = 0; /* every later call hears it */
}

/* Says which call seems to be stuck: the first, as later ones may wait for it. */
static void comm_say_stuck(mlfab__comm *comm) {
  uint64_t beat = comm->config->heartbeat_ns;
  mlfab__comm_slot *first = comm->first < comm->end ? *mlfab__comm_place(comm, comm->first) : NULL;
  if (first && comm->now_ns - first->stuck_ns >= beat) {
    first->stuck_ns = comm->now_ns;
    mlfab__comm_stuck(comm, 0, comm_number(first));
  }
}

/* The lowest round of an object that is armed, or NULL. */
static const mlfab__engine_run *comm_oldest_run(const mlfab__comm *comm, uint32_t channel) {
  const mlfab__engine_run *oldest = NULL;
  for (const mlfab__engine_run *run = comm->armed; run; run = run->next) {
    if (run->channel == channel && (!oldest || run->number < oldest->number)) oldest = run;
  }
  return oldest;
}

/* A request of an object has been open for long. */
static void comm_look_at_object(mlfab__comm *comm, mlfab__comm_object *object,
                                const mlfab__request *request) {
  uint64_t beat = comm->config->heartbeat_ns;
  uint64_t since = mlfab__max(request->started_ns, comm->in_ns);
  const mlfab__engine_run *run = comm_oldest_run(comm, object->channel);
  if (comm->left && comm->now_ns - mlfab__max(since, comm->left_ns) >= 2 * beat) {
    char text[64];
    snprintf(text, sizeof text, "worker %d has left", (int)comm->left_rank);
    mlfab__comm_fail(comm, MLFAB_ERR_PEER_CLOSED, comm->left_rank, text);
  } else if ((run || object->frame) && comm->now_ns - mlfab__max(since, object->stuck_ns) >= beat) {
    object->stuck_ns = comm->now_ns;
    mlfab__comm_stuck(comm, object->channel, run ? run->number : object->waits_for);
  }
}

static void comm_look_at_objects(mlfab__comm *comm) {
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++) {
    mlfab__comm_object *object = &comm->objects[i];
    uint32_t slot = MLFAB__COMM_REQUEST(object->id);
    mlfab__request *r = NULL;
    while (object->id && !comm->failing &&
           (r = mlfab__request_of(comm->requests, MLFAB__REQUEST_COLLECTIVE, slot, r)))
      comm_look_at_object(comm, object, r);
  }
}

MLFAB__INTERNAL int mlfab__comm_peer_missing(mlfab__comm *comm, uint32_t rank, uint64_t now_ns) {
  char text[96], waited[24];
  uint64_t since;
  if (!comm->streams.epoch || !mlfab__stream_peer_missing(&comm->streams, rank, now_ns, &since))
    return 0;
  if (now_ns - since >= MLFAB__COMM_PATIENCE * comm->config->heartbeat_ns) {
    mlfab__duration(waited, now_ns - since);
    snprintf(text, sizeof text, "worker %u cannot be reached, says worker %u after %s", rank,
             comm->rank, waited);
    comm->now_ns = now_ns;
    mlfab__comm_fail(comm, MLFAB_ERR_PEER_DEAD, (int32_t)rank, text);
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__comm_waits(const mlfab__comm *comm) {
  return comm->phase != MLFAB__COMM_OUT || comm->later || comm->streams.epoch;
}

MLFAB__INTERNAL void mlfab__comm_tick(mlfab__comm *comm, uint64_t now_ns) {
  mlfab__comm_enter(comm, now_ns);
  if (comm->phase == MLFAB__COMM_IN) {
    comm_say_stuck(comm);
    comm_look_at_objects(comm);
  }
  if (comm->later && comm->phase == MLFAB__COMM_OUT) {
    comm->later = 0;
    comm_join(comm);
  }
  if (comm->streams.epoch) mlfab__streams_tick(&comm->streams);
  comm_check_moved(comm);
  mlfab__comm_exit(comm);
}

/* --- objects --- */

MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_object_add(mlfab__comm *comm,
                                                           const mlfab__comm_object *object) {
  mlfab__comm_object *entry = comm->objects;
  while (entry < comm->objects + MLFAB__COMM_OBJECTS && entry->id) entry++;
  if (entry == comm->objects + MLFAB__COMM_OBJECTS) return NULL;
  *entry = *object;
  entry->id = ++comm->objects_added;
  entry->channel = 0;
  entry->upto = 0;
  entry->missing = MLFAB_NO_RANK;
  entry->stuck_ns = comm->now_ns;
  return entry;
}

MLFAB__INTERNAL int mlfab__comm_object_open(mlfab__comm *comm, const mlfab__comm_object *object,
                                            const char *opening, uint64_t salt, uint64_t timeout_ns,
                                            uint64_t now_ns, mlfab__comm_object **object_p,
                                            mlfab_request *request_p, mlfab_error *error) {
  mlfab__comm_object *entry = mlfab__comm_object_add(comm, object);
  *object_p = entry;
  if (!entry)
    return MLFAB__FAIL(error, MLFAB_ERR_LIMIT, "%s: %d objects are open", object->what,
                       MLFAB__COMM_OBJECTS);
  const mlfab__comm_call call = {
      .kind = MLFAB__COLLECTIVE_BARRIER, .salt = salt, .opens = entry->id, .words = opening};
  int code = mlfab__comm_start(comm, &call, timeout_ns, now_ns, request_p, error);
  if (!code) return 0;
  mlfab__comm_object_remove(comm, entry);
  *object_p = NULL;
  return code;
}

MLFAB__INTERNAL int mlfab__comm_object_request(mlfab__comm *comm, const mlfab__comm_object *object,
                                               uint64_t timeout_ns, uint64_t now_ns,
                                               mlfab_request *request_p, mlfab_error *error) {
  mlfab__request *request = mlfab__request_open(comm->requests, MLFAB__REQUEST_COLLECTIVE,
                                                MLFAB__COMM_REQUEST(object->id), now_ns,
                                                timeout_ns ? timeout_ns : comm->config->timeout_ns);
  if (!request)
    return MLFAB__FAIL(error, MLFAB_ERR_AGAIN,
                       "%s: too many requests are open: end some with mlfab_wait or mlfab_test",
                       object->what);
  *request_p = request->id;
  return 0;
}

MLFAB__INTERNAL void *mlfab__comm_object_self(mlfab__comm *comm, uint32_t id,
                                              void (*kind)(void *self)) {
  const mlfab__comm_object *object = mlfab__comm_object_find(comm, id);
  return object && object->free_self == kind ? object->self : NULL;
}

MLFAB__INTERNAL void mlfab__comm_object_remove(mlfab__comm *comm, mlfab__comm_object *object) {
  mlfab__comm_enter(comm, 0);
  if (object->channel) {
    mlfab__engine_close(comm, object);
    comm->closed[comm->closed_next++ % MLFAB__COMM_OBJECTS] =
        (mlfab__comm_closed){object->channel, object->ahead, object->upto};
  }
  object->id = object->channel = 0;
  mlfab__comm_exit(comm);
}

MLFAB__INTERNAL void mlfab__comm_bury(mlfab__comm *comm, mlfab__comm_grave *grave) {
  grave->next = comm->graves;
  comm->graves = grave;
}

MLFAB__INTERNAL void mlfab__comm_sweep(mlfab__comm *comm) {
  while (comm->graves) {
    mlfab__comm_grave *grave = comm->graves;
    comm->graves = grave->next;
    grave->free_self(grave->self);
  }
  mlfab__streams_trim(&comm->streams);
}

MLFAB__INTERNAL int32_t mlfab__comm_missing(const mlfab__comm *comm,
                                            const mlfab__comm_object *object) {
  return comm->phase == MLFAB__COMM_IN ? object->missing : comm->missing;
}
