/* direct.c - a context: collectives of device memory among workers of one host, from device to device (mlfab_device.h).
 *
 * For: agreeing that all members can (mlfab_device_share), and calls whose members read each other's device memory.
 * staging.c, which calls this file by mlfab__context_direct, does the order of calls, requests and host copies.
 *
 * An allreduce meets four times. A meeting is a small allreduce in host memory. Each member writes a record of its own,
 * else zeros; a member that has finished only zeros. States of a call:
 *
 *    FENCED --its turn, the stream has come to it--> AGREES --all can, and agree--> CHOSEN --the epoch has room--> REDUCES
 *       |                                              '--one cannot--> STAGED        '--it has none--> STAGED
 *       '--the epoch is over--> STAGED
 *    REDUCES --own part is done--> REDUCED --all did--> GATHERS --others' parts are copied--> GATHERED --all did--> SETTLES --> over
 *
 * A reduce-scatter goes from REDUCED to SETTLES, and an allgather or a broadcast from CHOSEN to GATHERS.
 *
 * AGREES, REDUCED, GATHERED and SETTLES are meetings: a communicator's failure or deadline ends them at all members.
 * STAGED: the call goes by the host's memory. From CHOSEN on, if a member fails by itself (deadline, cancel), staging.c
 * tells the others (mlfab__comm_forgo). The next meeting reports a failed device: all then end with its rank and words.
 *
 * Invariants. (1) A device writes memory of its own worker only: a member that is late or has given up spoils only its
 * own. In REDUCES member i writes part i, which nobody else reads then. In GATHERS it writes the other parts, which
 * nobody reads any more. (2) A call succeeds only if no member had given up by the last read; SETTLES ensures this. If
 * a member gives up in the meeting before SETTLES, its memory may be overwritten while another still copies from it.
 * The first never meets in SETTLES, so the second fails. (3) All members take the same way: each choice follows from a
 * table that all have, or from the epoch's limit (mlfab__comm_room). A meeting begins at once, in the epoch of the
 * agreement, or not at all. (4) While a call goes on, later calls with a number in the communicator wait: its meetings
 * have consecutive numbers. (5) An agreement lasts for one epoch at most. (6) At most DIRECT_MAPS mappings; all stay
 * while this worker's device may use one (`busy`). (7) No code here waits for the device.
 *
 * Bits: as in the host's blocking collectives in shared memory. One member adds an element, in the order of members.
 * Source: reduce-scatter and allgather over readable memory, as NCCL and MVAPICH on one node; no paper has devices. */
#include "direct.h"

#include "calls_coll.h"

#include <stdio.h>

enum {
  DIRECT_MOST = MLFAB_DEVICE_SHARE_MOST, /* members */
  DIRECT_MAPS = 64,
  DIRECT_LEAST = 1 << 20, /* bytes, if the caller gives no other number */
  DIRECT_GRAIN = 64,      /* elements: parts begin at multiples of it */
  DIRECT_RECORD = 20,     /* words of a record of a meeting */
  DIRECT_TEXT = (DIRECT_RECORD - 1) * 8,
  DIRECT_OFFER = 6,         /* words of a record of mlfab_device_share */
  DIRECT_SALT = 0x64657669, /* of meetings: plus the state, or ... */
  DIRECT_SHARE_LISTS = 101,
  DIRECT_SHARE_COUNTS = 102
};

enum direct_state {
  DIRECT_FENCED,
  DIRECT_AGREES,
  DIRECT_CHOSEN,
  DIRECT_REDUCES,
  DIRECT_REDUCED,
  DIRECT_GATHERS,
  DIRECT_GATHERED,
  DIRECT_SETTLES,
  DIRECT_IS_STAGED
};

/* Memory of another worker, as this worker's device sees it. */
typedef struct direct_map {
  int32_t rank;
  uint8_t handle[MLFAB_DEVICE_HANDLE];
  uint8_t *at; /* NULL: free */
  uint64_t bytes;
  uint64_t used; /* the call that used it last */
} direct_map;

struct mlfab__direct {
  uint32_t epoch; /* of the agreement; 0: there is none */
  uint32_t members, me;
  uint32_t ranks[DIRECT_MOST];
  uint64_t least;
  uint64_t calls; /* so far */
  uint32_t busy;  /* number of marks not reached yet, of calls that were left */
  int lost;       /* the device may use mappings, for an unknown time */
  direct_map maps[DIRECT_MAPS];
};

typedef struct mlfab__direct direct_agreement;

typedef struct direct_record {
  int64_t can, signature;
  uint64_t offset, bytes;
  uint8_t handle[MLFAB_DEVICE_HANDLE];
} direct_record;
_Static_assert(sizeof(direct_record) == DIRECT_RECORD * 8, "a record has no holes");

/* In REDUCED and GATHERED: the member's result, and its device's words. */
enum { DIRECT_DID = 1, DIRECT_FAILED = 2 };

struct mlfab__direct_call {
  const mlfab_call *call;
  enum direct_state state;
  uint64_t deadline_ns;
  void *fence, *mark;
  int ready;    /* the stream has come to it */
  int unmarked; /* the device may have work that has no mark */
  int left;     /* counted in `busy` */
  uint8_t *at;  /* the buffer */
  uint64_t count;
  uint64_t first[DIRECT_MOST], length[DIRECT_MOST]; /* elements of the members' parts */
  uint32_t width;
  int failed;
  char text[DIRECT_TEXT]; /* of failed */
  mlfab_request meeting;
  uint8_t *from[DIRECT_MOST]; /* members' buffers, as this device sees them */
  int64_t words[DIRECT_MOST * DIRECT_RECORD];
};

typedef struct mlfab__direct_call direct_call;

/* The steps of a kind of call: reduces, then gathers. */
static int direct_reduces(const mlfab_call *call) {
  return call->kind == MLFAB_CALL_ALLREDUCE || call->kind == MLFAB_CALL_REDUCE_SCATTER;
}
static int direct_gathers(const mlfab_call *call) {
  return call->kind != MLFAB_CALL_REDUCE_SCATTER;
}

static const char *direct_name(const mlfab_call *call) {
  return call->kind == MLFAB_CALL_ALLREDUCE        ? "allreduce"
         : call->kind == MLFAB_CALL_REDUCE_SCATTER ? "reduce_scatter"
         : call->kind == MLFAB_CALL_ALLGATHER      ? "allgather"
                                                   : "broadcast";
}

/* Bytes of an element, or 0. */
static uint32_t direct_width(const mlfab_call *call) {
  int bytes = call->kind == MLFAB_CALL_BROADCAST ||
              (call->kind == MLFAB_CALL_ALLGATHER && call->dtype == MLFAB_BYTES);
  return bytes ? 1 : mlfab__element_bytes(call->dtype);
}

/* Returns the number of elements of all buffers; 0 if the call does not fit. */
static uint64_t direct_count(const mlfab *ctx, const mlfab_call *call) {
  uint64_t count = 0;
  if (call->kind == MLFAB_CALL_BROADCAST) return call->count;
  if (call->kind == MLFAB_CALL_ALLREDUCE) {
    for (uint32_t i = 0; call->vecs && i < call->n; i++)
      count = mlfab__add_sat(count, call->vecs[i].count);
  } else if (call->counts) {
    for (uint32_t r = 0; r < ctx->node->config.workers; r++)
      count = mlfab__add_sat(count, call->counts[r]);
  }
  return count;
}

static int direct_op(const mlfab_call *call) {
  const mlfab_collective *o = call->options;
  return o && MLFAB__HAS(o, mlfab_collective, op) ? (int)mlfab__min(o->op, INT32_MAX) : 0;
}

/* --- the device --- */

static const mlfab_device *direct_device(const mlfab *ctx, void **self_p) {
  *self_p = NULL;
  return ctx->stager ? ctx->stager->device(ctx, self_p) : NULL;
}

static int direct_can(const mlfab_device *d) {
  return d && d->size >= offsetof(mlfab_device, reduce) + sizeof d->reduce && d->identify &&
         d->reaches && d->share && d->map && d->unmap && d->reduce;
}

static void direct_unmap(mlfab *ctx, direct_map *map) {
  void *self;
  const mlfab_device *device = direct_device(ctx, &self);
  if (map->at) device->unmap(self, map->at);
  memset(map, 0, sizeof *map);
}

/* Closes all mappings, if the device cannot use any. */
static void direct_release(mlfab *ctx) {
  direct_agreement *d = ctx->shares;
  if (d->busy || d->lost) return;
  for (uint32_t i = 0; i < DIRECT_MAPS; i++) direct_unmap(ctx, &d->maps[i]);
}

/* Finds the memory of a member, mapped in this call or before. Returns the number of an error, or 0. */
static int direct_find(mlfab *ctx, int32_t rank, const uint8_t *handle, const direct_map **map_p) {
  direct_agreement *d = ctx->shares;
  direct_map *best = &d->maps[0];
  void *self, *at = NULL;
  uint64_t bytes = 0;
  const mlfab_device *device = direct_device(ctx, &self);
  for (uint32_t i = 0; i < DIRECT_MAPS; i++) {
    direct_map *map = &d->maps[i];
    if (map->at && map->rank == rank && memcmp(map->handle, handle, sizeof map->handle) == 0) {
      map->used = d->calls;
      *map_p = map;
      return 0;
    }
    if (!map->at || (best->at && map->used < best->used)) best = map;
  }
  direct_unmap(ctx, best); /* of an earlier call: this call has fewer members */
  int number = device->map(self, handle, &at, &bytes);
  if (number) return number;
  *best = (direct_map){.rank = rank, .at = at, .bytes = bytes, .used = d->calls};
  memcpy(best->handle, handle, sizeof best->handle);
  *map_p = best;
  return 0;
}

static void direct_drop(mlfab *ctx, void **mark) {
  void *self;
  const mlfab_device *device = direct_device(ctx, &self);
  if (*mark) device->drop(self, *mark);
  *mark = NULL;
}

/* Notes that this worker's part of the call has failed; the first failure counts. */
static void direct_failed_because(direct_call *c, const char *text) {
  if (c->failed) return;
  c->failed = 1;
  snprintf(c->text, sizeof c->text, "%s", text);
}

static void direct_failed(mlfab *ctx, direct_call *c, const char *what, int number) {
  void *self;
  const mlfab_device *device = direct_device(ctx, &self);
  char text[DIRECT_TEXT];
  snprintf(text, sizeof text, "%s: %s", what, device->text(self, number));
  direct_failed_because(c, text);
}

/* Marks the work so far. */
static void direct_mark(mlfab *ctx, direct_call *c) {
  void *self;
  const mlfab_device *device = direct_device(ctx, &self);
  int number = device->mark(self, MLFAB_DEVICE_FROM_HOST, &c->mark);
  if (!number) {
    c->unmarked = 0;
    return;
  }
  ctx->shares->lost |= c->unmarked;
  direct_failed(ctx, c, "marking its work", number);
}

/* 1: the work that is under way is over, or has failed. */
static int direct_reached(mlfab *ctx, direct_call *c, const char *what) {
  void *self;
  const mlfab_device *device = direct_device(ctx, &self);
  int reached = c->mark ? device->poll(self, c->mark) : 1;
  if (reached == 0) return 0;
  direct_drop(ctx, &c->mark);
  if (reached < 0) direct_failed(ctx, c, what, -reached);
  return 1;
}

/* --- meetings --- */

/* Assigns the parts: the block of each rank, all to the root, or as even as possible. */
static void direct_plan(const direct_agreement *d, direct_call *c) {
  const mlfab_call *call = c->call;
  uint64_t even = (c->count + d->members - 1) / d->members;
  even = (even + DIRECT_GRAIN - 1) / DIRECT_GRAIN * DIRECT_GRAIN;
  for (uint32_t m = 0; m < d->members; m++) {
    uint64_t from = 0, n = 0;
    if (call->kind == MLFAB_CALL_ALLREDUCE) {
      from = mlfab__min(even * m, c->count);
      n = mlfab__min(even, c->count - from);
    } else if (call->kind == MLFAB_CALL_BROADCAST) {
      n = (int64_t)d->ranks[m] == call->root ? c->count : 0;
    } else {
      for (uint32_t r = 0; r < d->ranks[m]; r++) from += call->counts[r];
      n = call->counts[d->ranks[m]];
    }
    c->first[m] = from;
    c->length[m] = n;
  }
}

/* Begins an allreduce (SUM) of words of the host. `salt` is different for each kind of meeting. */
static int direct_exchange(mlfab *ctx, int64_t *words, uint32_t n, uint64_t salt,
                           uint64_t timeout_ns, mlfab_request *request_p) {
  mlfab_node *node = ctx->node;
  mlfab_error error;
  mlfab__comm_call call;
  const mlfab_vec vec = {words, n}; /* the communicator copies it */
  memset(&call, 0, sizeof call);
  call.kind = MLFAB__COLLECTIVE_ALLREDUCE;
  call.callers = 1;
  call.dtype = MLFAB_I64;
  call.op = MLFAB_OP_SUM;
  call.vecs = &vec;
  call.n = 1;
  call.salt = DIRECT_SALT + salt;
  call.words = "a meeting about device memory";
  int code = mlfab__node_enter(node, ctx->now_ns, 1, &error);
  if (!code)
    code = mlfab__comm_start(node->parts->comm, &call, timeout_ns, ctx->now_ns, request_p, &error);
  return mlfab__node_return(node, code, &error);
}

/* Begins the meeting of a state. AGAIN: later. */
static int direct_meet(mlfab *ctx, direct_call *c, enum direct_state state) {
  const direct_agreement *d = ctx->shares;
  mlfab__comm *comm = ctx->node->parts->comm;
  uint64_t left = c->deadline_ns == MLFAB__NEVER ? 0 : 1;
  if (left && c->deadline_ns > ctx->now_ns) left = c->deadline_ns - ctx->now_ns;
  int code = direct_exchange(ctx, c->words, d->members * DIRECT_RECORD, (uint64_t)state, left,
                             &c->meeting);
  if (code) return code;
  if (comm->promised > 0) comm->promised--;
  c->state = state;
  return 0;
}

static void direct_say(const direct_agreement *d, direct_call *c, const void *record) {
  memset(c->words, 0, sizeof c->words);
  memcpy(&c->words[d->me * DIRECT_RECORD], record, DIRECT_RECORD * sizeof *c->words);
}

/* Writes this worker's result into its record. */
static void direct_say_status(const direct_agreement *d, direct_call *c) {
  int64_t record[DIRECT_RECORD] = {c->failed ? DIRECT_FAILED : DIRECT_DID};
  if (c->failed) memcpy(record + 1, c->text, sizeof c->text);
  direct_say(d, c, record);
}

/* Ends a meeting that is over. Returns 0, or its error. */
static int direct_has_met(mlfab *ctx, mlfab_request *meeting) {
  mlfab_result result;
  int done = 0;
  memset(&result, 0, sizeof result);
  int code = mlfab_node_test(ctx->node, *meeting, &done, &result);
  *meeting = 0;
  return code ? code : result.status;
}

/* Gives the error for a call after the end of its epoch. Returns its code. */
static int direct_is_void(mlfab *ctx, mlfab_error *error) {
  mlfab__comm *comm = ctx->node->parts->comm;
  if (mlfab__comm_owed(comm, error)) return error->code;
  if (comm->phase != MLFAB__COMM_IN && comm->verdict.code) { /* the verdict on this epoch */
    *error = comm->verdict;
    return error->code;
  }
  return MLFAB__FAIL(error, MLFAB_ERR_AGAIN,
                     "the workers that take part have changed: call it again");
}

/* Begins a meeting from REDUCES or GATHERS, or in SETTLES. A value of enum mlfab__direct_told. */
static int direct_meet_next(mlfab *ctx, direct_call *c, enum direct_state state,
                            mlfab_error *error) {
  int room = mlfab__comm_room(ctx->node->parts->comm, ctx->shares->epoch, 1);
  if (room == 0) return MLFAB__DIRECT_WAITS;
  if (room < 0) return direct_is_void(ctx, error), MLFAB__DIRECT_FAILED;
  direct_say_status(ctx->shares, c);
  int code = direct_meet(ctx, c, state);
  if (code == MLFAB_ERR_AGAIN) return MLFAB__DIRECT_WAITS;
  if (!code) return MLFAB__DIRECT_MOVED;
  *error = ctx->node->requests.last;
  return MLFAB__DIRECT_FAILED;
}

/* Did all members do their part? Returns 0, or the error that all of them get; the agreement ends then. */
static int direct_judge(mlfab *ctx, const direct_call *c, mlfab_error *error) {
  direct_agreement *d = ctx->shares;
  for (uint32_t m = 0; m < d->members; m++) {
    const int64_t *record = &c->words[m * DIRECT_RECORD];
    char text[DIRECT_TEXT] = "it has finished";
    if (record[0] == DIRECT_DID) continue;
    if (record[0] == DIRECT_FAILED) memcpy(text, record + 1, sizeof text);
    text[sizeof text - 1] = 0;
    d->epoch = 0;
    return mlfab__error(error, MLFAB_ERR_DEVICE, (int32_t)d->ranks[m], 0, 0, "%s: worker %u: %s",
                        direct_name(c->call), d->ranks[m], text);
  }
  return 0;
}

/* --- steps of a call --- */

/* Returns 1 if the call's only buffer is device memory that others can read; the record then has its handle. */
static int direct_offer(mlfab *ctx, direct_call *c, direct_record *record) {
  const direct_agreement *d = ctx->shares;
  const mlfab_collective *o = c->call->options;
  void *self;
  char text[160];
  const mlfab_device *device = direct_device(ctx, &self);
  int refuses = o && MLFAB__HAS(o, mlfab_collective, refuse_nan) && o->refuse_nan;
  int apart = o && MLFAB__HAS(o, mlfab_collective, inputs) && o->inputs;
  int list = c->call->kind == MLFAB_CALL_ALLREDUCE;
  void *data = list ? c->call->vecs[0].data : c->call->data;
  if (c->failed || refuses || apart || (list && c->call->n != 1) || d->busy || d->lost) return 0;
  if (!data || (uintptr_t)data % c->width != 0) return 0;
  int memory = device->where(self, data, record->bytes, text, sizeof text);
  if (memory != MLFAB_MEMORY_DEVICE) return 0;
  c->at = data;
  return device->share(self, c->at, record->bytes, record->handle, &record->offset) == 0;
}

/* A hash of all that must be equal in the members' calls. */
static int64_t direct_signature(const mlfab *ctx, const direct_call *c) {
  const mlfab_call *call = c->call;
  const mlfab_collective *o = call->options;
  const int blocks = call->kind == MLFAB_CALL_REDUCE_SCATTER || call->kind == MLFAB_CALL_ALLGATHER;
  const int64_t of[] = {call->kind,
                        call->kind == MLFAB_CALL_BROADCAST ? 0 : call->dtype,
                        direct_reduces(call) ? direct_op(call) : 0,
                        (int64_t)c->count,
                        o && MLFAB__HAS(o, mlfab_collective, tag) ? (int64_t)o->tag : 0,
                        call->kind == MLFAB_CALL_BROADCAST ? call->root : 0};
  uint64_t hash = mlfab__hash(0, of, sizeof of);
  if (blocks)
    hash = mlfab__hash(hash, call->counts, ctx->node->config.workers * sizeof *call->counts);
  return (int64_t)hash;
}

static int direct_open(mlfab *ctx, direct_call *c, mlfab_error *error) {
  const mlfab__comm *comm = ctx->node->parts->comm;
  direct_agreement *d = ctx->shares;
  int room = mlfab__comm_room(comm, d->epoch, 1);
  if (room == 0) return MLFAB__DIRECT_WAITS;
  if (room < 0) {
    c->state = DIRECT_IS_STAGED;
    return MLFAB__DIRECT_STAGED;
  }
  direct_record record = {.signature = direct_signature(ctx, c), .bytes = c->count * c->width};
  record.can = direct_offer(ctx, c, &record);
  d->calls++;
  direct_plan(d, c);
  direct_say(d, c, &record);
  int code = direct_meet(ctx, c, DIRECT_AGREES);
  if (code == MLFAB_ERR_AGAIN) return MLFAB__DIRECT_WAITS;
  if (!code) return MLFAB__DIRECT_MOVED;
  *error = ctx->node->requests.last;
  return MLFAB__DIRECT_FAILED;
}

/* Can all members share, and are their calls equal? If they differ, the communicator detects it by the host's way. */
static int direct_agreed(const direct_agreement *d, const direct_call *c) {
  direct_record first, other;
  memcpy(&first, c->words, sizeof first);
  for (uint32_t m = 0; m < d->members; m++) {
    memcpy(&other, &c->words[m * DIRECT_RECORD], sizeof other);
    if (!other.can || other.signature != first.signature) return 0;
  }
  return 1;
}

/* Finds the members' memory, as far as this call reads it. */
static void direct_map_members(mlfab *ctx, direct_call *c) {
  const direct_agreement *d = ctx->shares;
  c->from[d->me] = c->at;
  for (uint32_t m = 0; m < d->members && !c->failed; m++) {
    direct_record record;
    memcpy(&record, &c->words[m * DIRECT_RECORD], sizeof record);
    if (m == d->me || (!direct_reduces(c->call) && c->length[m] == 0)) continue;
    const direct_map *map = NULL;
    int number = direct_find(ctx, (int32_t)d->ranks[m], record.handle, &map);
    if (number) {
      direct_failed(ctx, c, "mapping another worker's memory", number);
    } else if (record.offset > map->bytes || record.bytes > map->bytes - record.offset) {
      direct_failed_because(c, "another worker's buffer does not lie in the memory that it shares");
    } else {
      c->from[m] = map->at + record.offset;
    }
  }
}

/* Queues the reduction of this worker's part. */
static void direct_reduce(mlfab *ctx, direct_call *c) {
  const direct_agreement *d = ctx->shares;
  const void *in[DIRECT_MOST];
  void *self;
  const uint64_t n = c->length[d->me], from = c->first[d->me] * c->width;
  const mlfab_device *device = direct_device(ctx, &self);
  if (c->failed || n == 0) return;
  for (uint32_t m = 0; m < d->members; m++) in[m] = c->from[m] + from;
  int number =
      device->reduce(self, direct_op(c->call), c->call->dtype, c->at + from, in, d->members, n);
  if (number) {
    direct_failed(ctx, c, "reducing", number);
    return;
  }
  c->unmarked = 1;
  direct_mark(ctx, c);
}

/* Queues the copies of the other members' parts. */
static void direct_gather(mlfab *ctx, direct_call *c) {
  const direct_agreement *d = ctx->shares;
  void *self;
  const mlfab_device *device = direct_device(ctx, &self);
  for (uint32_t m = 0; m < d->members && !c->failed; m++) {
    const uint64_t n = c->length[m], from = c->first[m] * c->width;
    if (m == d->me || n == 0) continue;
    int number =
        device->copy(self, MLFAB_DEVICE_FROM_HOST, c->at + from, c->from[m] + from, n * c->width);
    if (number)
      direct_failed(ctx, c, "copying another worker's part", number);
    else
      c->unmarked = 1;
  }
  if (c->unmarked) direct_mark(ctx, c);
}

/* Meetings after AGREES. */
static uint32_t direct_meetings(const direct_call *c) {
  return 1 + (uint32_t)direct_reduces(c->call) + (uint32_t)direct_gathers(c->call);
}

static int direct_choose(mlfab *ctx, direct_call *c) {
  mlfab__comm *comm = ctx->node->parts->comm;
  int room = mlfab__comm_room(comm, ctx->shares->epoch, direct_meetings(c));
  if (room == 0) return MLFAB__DIRECT_WAITS;
  if (room < 0) {
    comm->promised = 0;
    c->state = DIRECT_IS_STAGED;
    return MLFAB__DIRECT_STAGED;
  }
  direct_map_members(ctx, c);
  c->state = direct_reduces(c->call) ? DIRECT_REDUCES : DIRECT_GATHERS;
  if (c->state == DIRECT_REDUCES)
    direct_reduce(ctx, c);
  else
    direct_gather(ctx, c);
  return MLFAB__DIRECT_MOVED;
}

/* Goes to the next state when a meeting has ended. */
static int direct_go_on(mlfab *ctx, direct_call *c, mlfab_error *error) {
  mlfab__comm *comm = ctx->node->parts->comm;
  const direct_agreement *d = ctx->shares;
  if (direct_has_met(ctx, &c->meeting)) {
    *error = ctx->node->requests.last;
    return MLFAB__DIRECT_FAILED;
  }
  switch (c->state) {
    case DIRECT_AGREES:
      if (!direct_agreed(d, c)) {
        c->state = DIRECT_IS_STAGED;
        return MLFAB__DIRECT_STAGED;
      }
      comm->promised = direct_meetings(c);
      c->state = DIRECT_CHOSEN;
      return MLFAB__DIRECT_MOVED;
    case DIRECT_REDUCED:
      if (direct_judge(ctx, c, error)) return MLFAB__DIRECT_FAILED;
      c->state = direct_gathers(c->call) ? DIRECT_GATHERS : DIRECT_SETTLES;
      if (c->state == DIRECT_GATHERS) direct_gather(ctx, c);
      return MLFAB__DIRECT_MOVED;
    case DIRECT_GATHERED:
      if (direct_judge(ctx, c, error)) return MLFAB__DIRECT_FAILED;
      c->state = DIRECT_SETTLES;
      return MLFAB__DIRECT_MOVED;
    default:
      return MLFAB__DIRECT_OVER;
  }
}

/* Returns 1 if the stream has come to the call. */
static int direct_sees_fence(mlfab *ctx, direct_call *c) {
  void *self;
  const mlfab_device *device = direct_device(ctx, &self);
  if (!c->ready && c->fence) {
    int reached = device->poll(self, c->fence);
    if (reached == 0) return 0;
    if (reached < 0) direct_failed(ctx, c, "what the stream has", -reached);
  }
  c->ready = 1;
  return 1;
}

static int direct_step(mlfab *ctx, direct_call *c, int turn, mlfab_request *inner_p,
                       mlfab_error *error) {
  int told = MLFAB__DIRECT_WAITS;
  if (c->meeting) {
    if (!mlfab__context_is_over(ctx, &c->meeting)) return told;
    told = direct_go_on(ctx, c, error);
    *inner_p = 0;
    return told;
  }
  switch (c->state) {
    case DIRECT_FENCED:
      if (!direct_sees_fence(ctx, c) || !turn) return told;
      told = direct_open(ctx, c, error);
      break;
    case DIRECT_CHOSEN:
      told = direct_choose(ctx, c);
      break;
    case DIRECT_REDUCES:
    case DIRECT_GATHERS:
      if (mlfab__comm_room(ctx->node->parts->comm, ctx->shares->epoch, 1) < 0)
        return direct_is_void(ctx, error), MLFAB__DIRECT_FAILED;
      if (!direct_reached(ctx, c, c->state == DIRECT_REDUCES ? "reducing" : "copying")) return told;
      told = direct_meet_next(ctx, c, c->state == DIRECT_REDUCES ? DIRECT_REDUCED : DIRECT_GATHERED,
                              error);
      break;
    case DIRECT_SETTLES:
      told = direct_meet_next(ctx, c, DIRECT_SETTLES, error);
      break;
    default:
      return MLFAB__DIRECT_STAGED;
  }
  *inner_p = c->meeting;
  return told;
}

/* --- other functions for staging.c --- */

/* Are the root, and all ranks with a block, members? */
static int direct_is_among(const mlfab *ctx, const direct_agreement *d, const mlfab_call *call) {
  uint64_t blocks = 0, root = 0;
  for (uint32_t m = 0; m < d->members; m++) {
    root |= (int64_t)d->ranks[m] == call->root;
    if (call->counts) blocks = mlfab__add_sat(blocks, call->counts[d->ranks[m]]);
  }
  if (call->kind == MLFAB_CALL_BROADCAST) return root != 0;
  return call->kind == MLFAB_CALL_ALLREDUCE || blocks == direct_count(ctx, call);
}

/* Would all members make this collective in the same way? The tests use only properties that are equal on all. */
static int direct_wants(const mlfab *ctx, const mlfab_call *call) {
  const direct_agreement *d = ctx->shares;
  const mlfab__comm *comm = ctx->node->parts->comm;
  const mlfab_collective *o = call->options;
  if (d->epoch == 0 || call->kind < MLFAB_CALL_ALLREDUCE || call->kind > MLFAB_CALL_BROADCAST)
    return 0;
  if (comm->epoch != d->epoch || comm->phase != MLFAB__COMM_IN) return 0;
  const uint32_t width = direct_width(call);
  if (width == 0 || (o && o->size == 0)) return 0;
  if (o && MLFAB__HAS(o, mlfab_collective, algorithm) && o->algorithm) return 0;
  if (direct_reduces(call)) {
    const int op = direct_op(call);
    if (op > MLFAB_OP_PRODUCT || (op == MLFAB_OP_MEAN && call->dtype == MLFAB_I64)) return 0;
    if (o && MLFAB__HAS(o, mlfab_collective, reduce) && o->reduce) return 0;
  }
  const uint64_t count = direct_count(ctx, call);
  return mlfab__mul_sat(count, width) >= d->least &&
         count <= comm->config->model_max_bytes / width && direct_is_among(ctx, d, call);
}

static direct_call *direct_begin(mlfab *ctx, const mlfab_call *call, uint64_t deadline_ns) {
  void *self;
  direct_call *c = mlfab__alloc(&ctx->env, sizeof *c);
  if (!c) return NULL;
  c->call = call;
  c->deadline_ns = deadline_ns;
  c->width = direct_width(call);
  c->count = direct_count(ctx, call);
  const mlfab_device *device = direct_device(ctx, &self);
  int number = device->fence(self, &c->fence);
  if (number) direct_failed(ctx, c, "marking the stream", number);
  return c;
}

static int direct_fenced(const direct_call *c) { return c->ready && c->state != DIRECT_IS_STAGED; }

static const char *direct_why(const direct_call *c) {
  if (!c->ready) return "earlier work on the device's stream is not over";
  if (c->state == DIRECT_FENCED) return "earlier calls have not begun";
  if (c->state == DIRECT_IS_STAGED) return "there is no room for it in staging memory";
  return c->mark ? "the device is not done with other workers' memory"
                 : "the workers that take part are changing";
}

static void direct_leave(mlfab *ctx, direct_call *c) {
  void *self;
  const mlfab_device *device = direct_device(ctx, &self);
  if (c->state >= DIRECT_CHOSEN && c->state <= DIRECT_SETTLES)
    ctx->node->parts->comm->promised = 0; /* to this call: one at a time is behind AGREES */
  if (!c->mark || c->left) return;
  c->left = 1;
  ctx->shares->busy++;
  (void)device->order(self, c->mark);
}

static int direct_quiet(mlfab *ctx, direct_call *c) {
  if (!direct_reached(ctx, c, "")) return 0;
  ctx->shares->busy -= (uint32_t)c->left;
  c->left = 0;
  return 1;
}

static void *direct_fence(direct_call *c) {
  void *fence = c->failed ? NULL : c->fence;
  if (fence) c->fence = NULL;
  return fence;
}

static void direct_free(mlfab *ctx, direct_call *c, int child) {
  if (!child) {
    ctx->shares->lost |= c->mark != NULL;
    direct_drop(ctx, &c->fence);
    direct_drop(ctx, &c->mark);
  }
  mlfab__free(&ctx->env, c, sizeof *c);
}

static void direct_close(mlfab *ctx, int child) {
  direct_agreement *d = ctx->shares;
  if (!child) direct_release(ctx);
  if (!child && (d->busy || d->lost))
    mlfab__log(&ctx->node->env, MLFAB_LOG_ERROR,
               "device memory of other workers stays mapped, as the device has not ended its work");
  mlfab__free(&ctx->env, d, sizeof *d);
  ctx->shares = NULL;
  ctx->direct = NULL;
  ctx->direct_close = NULL;
}

static const mlfab__context_direct direct_functions = {
    direct_wants, direct_begin, direct_step,  direct_fenced, direct_why,
    direct_leave, direct_quiet, direct_fence, direct_free,   direct_close};

/* --- agreeing --- */

/* A record of mlfab_device_share. */
struct mlfab__direct_host {
  int64_t can; /* DIRECT_SHARES ...; 0: it takes no part */
  uint64_t least;
  uint8_t id[MLFAB_DEVICE_ID];
};
typedef struct mlfab__direct_host direct_host;
enum { DIRECT_SHARES = 1, DIRECT_SHARES_NOT, DIRECT_IS_BUSY };
_Static_assert(sizeof(direct_host) == DIRECT_OFFER * 8, "a record has no holes");

/* Returns the reason why this worker cannot share with the workers of the list, or NULL. *rank_p: the worker that
 * causes it. *busy_p: the first worker with a device that may still use others' memory, or unchanged. */
static const char *direct_compare(const mlfab *ctx, const direct_host *list, uint32_t *rank_p,
                                  int32_t *busy_p) {
  const direct_host *own = &list[ctx->node->config.rank];
  direct_agreement *d = ctx->shares;
  void *self;
  const mlfab_device *device = direct_device(ctx, &self);
  const char *why = NULL;
  uint32_t count = 0;
  d->least = 0;
  for (uint32_t r = 0; r < ctx->node->config.workers; r++) {
    const direct_host *other = &list[r];
    if (other->can == 0) continue;
    count++;
    d->least = mlfab__max(d->least, other->least);
    if (other->can == DIRECT_IS_BUSY && *busy_p == MLFAB_NO_RANK) *busy_p = (int32_t)r;
    if (why) continue;
    *rank_p = r;
    if (other->can != DIRECT_SHARES)
      why = "has no device that can share memory";
    else if (other != own && own->can == DIRECT_SHARES && !device->reaches(self, other->id))
      why = "has a device that this worker's cannot reach, or is on another host";
  }
  return why || count <= DIRECT_MOST ? why : "is one of more workers than can share";
}

/* Fills in this worker's own record. */
static void direct_describe(mlfab *ctx, uint64_t least, direct_host *own) {
  const direct_agreement *d = ctx->shares;
  void *self;
  const mlfab_device *device = direct_device(ctx, &self);
  own->least = least ? least : DIRECT_LEAST;
  own->can = d->busy || d->lost ? DIRECT_IS_BUSY : DIRECT_SHARES_NOT;
  if (!direct_can(device) || own->can == DIRECT_IS_BUSY) return;
  if (device->identify(self, own->id) == 0) own->can = DIRECT_SHARES;
}

MLFAB__INTERNAL int mlfab__direct_share_begin(mlfab *ctx, mlfab__direct_share *a, uint64_t least,
                                              uint64_t timeout_ns) {
  mlfab_error *last = &ctx->node->requests.last;
  const uint32_t workers = ctx->node->config.workers;
  memset(a, 0, sizeof *a);
  a->busy = MLFAB_NO_RANK;
  if (!ctx->shares) ctx->shares = mlfab__alloc(&ctx->env, sizeof *ctx->shares);
  if (ctx->shares) ctx->direct = &direct_functions;
  if (ctx->shares) ctx->direct_close = direct_close;
  if (ctx->shares) a->list = mlfab__alloc(&ctx->env, workers * sizeof *a->list);
  if (!a->list) return MLFAB__FAIL(last, MLFAB_ERR_MEMORY, "device_share: out of memory");
  ctx->shares->epoch = 0;
  direct_release(ctx);
  direct_describe(ctx, least, &a->list[ctx->node->config.rank]);
  a->timeout_ns = timeout_ns;
  int code = direct_exchange(ctx, (int64_t *)(void *)a->list, workers * DIRECT_OFFER,
                             DIRECT_SHARE_LISTS, timeout_ns, &a->request);
  a->serial = ctx->node->parts->comm->end - 1;
  if (!code) return 0;
  mlfab__free(&ctx->env, a->list, workers * sizeof *a->list);
  return code;
}

/* The second meeting, in the epoch of the first, counts the workers that agree. After the epoch its base has moved. */
static int direct_share_count(mlfab *ctx, mlfab__direct_share *a) {
  const mlfab__comm *comm = ctx->node->parts->comm;
  direct_agreement *d = ctx->shares;
  mlfab_error error;
  int room = a->serial < comm->base ? -1 : mlfab__comm_room(comm, a->epoch, 1);
  if (room == 0) return 0;
  if (room < 0) {
    a->code = mlfab__comm_owed(ctx->node->parts->comm, &error) ? error.code : 0;
    if (!a->code)
      a->code = MLFAB__FAIL(&error, MLFAB_ERR_AGAIN,
                            "device_share: the workers that take part change: call it again");
    return mlfab__node_return(ctx->node, a->code, &error);
  }
  d->members = comm->members;
  d->me = comm->me;
  for (uint32_t m = 0; m < comm->members && m < DIRECT_MOST; m++) d->ranks[m] = comm->ranks[m];
  a->code = direct_exchange(ctx, &a->agree, 1, DIRECT_SHARE_COUNTS, a->timeout_ns, &a->request);
  if (a->code) return a->code;
  a->state = MLFAB__SHARE_COUNTS;
  return mlfab__context_sent(ctx, 0);
}

MLFAB__INTERNAL int mlfab__direct_share_poll(mlfab *ctx, void *share) {
  mlfab__direct_share *a = share;
  direct_agreement *d = ctx->shares;
  uint32_t rank = 0;
  if (a->request && !mlfab__context_is_over(ctx, &a->request)) return 0;
  if (a->request) a->code = direct_has_met(ctx, &a->request);
  if (a->code) return 1;
  if (a->state == MLFAB__SHARE_LISTS) {
    const char *why = direct_compare(ctx, a->list, &rank, &a->busy);
    if (why)
      mlfab__log(&ctx->node->env, MLFAB_LOG_INFO, "device memory is not shared: worker %u %s", rank,
                 why);
    a->agree = why == NULL;
    a->epoch = ctx->node->parts->comm->epoch;
    a->state = MLFAB__SHARE_LOOKS;
  } else if (a->state == MLFAB__SHARE_COUNTS) {
    if (a->agree == (int64_t)d->members) d->epoch = a->epoch;
    a->state = MLFAB__SHARE_OVER;
  }
  if (a->state == MLFAB__SHARE_LOOKS) (void)direct_share_count(ctx, a);
  return a->code || a->state == MLFAB__SHARE_OVER;
}

MLFAB__INTERNAL int mlfab__direct_share_end(mlfab *ctx, mlfab__direct_share *a, int *shared_p) {
  mlfab_error *last = &ctx->node->requests.last;
  const direct_agreement *d = ctx->shares;
  int code = a->code;
  if (!code && a->request)
    code = mlfab__context_await(ctx, a->request, 0, NULL); /* the context was closed */
  else if (!code && ctx->closed)
    code = mlfab__context_in_vain(ctx, 0);
  else if (!code && a->state != MLFAB__SHARE_OVER)
    code = MLFAB__FAIL(last, MLFAB_ERR_TIMEOUT, "device_share: the workers that take part change");
  else if (!code && a->busy != MLFAB_NO_RANK)
    code = mlfab__error(last, MLFAB_ERR_DEVICE, a->busy, 0, 0,
                        "device_share: worker %d's device may still use memory of other workers, "
                        "for a call that has failed",
                        (int)a->busy);
  mlfab__free(&ctx->env, a->list, ctx->node->config.workers * sizeof *a->list);
  if (!code) *shared_p = d->epoch != 0;
  return code;
}

/* Checks the conditions before any message to others. */
static int direct_share_check(mlfab *ctx, const int *shared_p) {
  mlfab_error *last = &ctx->node->requests.last;
  if (ctx->closed) return mlfab__context_in_vain(ctx, 0);
  if (!shared_p) return MLFAB__FAIL(last, MLFAB_ERR_ARGUMENT, "device_share: shared_p is NULL");
  if (!ctx->node->is_worker)
    return MLFAB__FAIL(last, MLFAB_ERR_STATE, "device_share: this node is not a worker");
  if (mlfab__context_is_told(ctx)) return MLFAB_ERR_STATE;
  return ctx->stager ? ctx->stager->settle(ctx) : 0;
}

MLFAB_API int mlfab_device_share(mlfab *ctx, uint64_t least_bytes, uint64_t timeout_ns,
                                 int *shared_p) {
  mlfab__direct_share a;
  CONTEXT_CHECK(ctx);
  uint64_t began_ns = mlfab__context_enter(ctx);
  int code = direct_share_check(ctx, shared_p);
  if (!code) code = mlfab__direct_share_begin(ctx, &a, least_bytes, timeout_ns);
  if (!code) {
    /* The meetings have deadlines of their own, and there is one wait between them. */
    uint64_t each_ns = timeout_ns ? timeout_ns : ctx->timeout_ns;
    (void)mlfab__context_sent(ctx, 0);
    (void)mlfab__context_until(ctx, mlfab__add_sat(began_ns, 3 * each_ns), mlfab__direct_share_poll,
                               &a);
    code = mlfab__direct_share_end(ctx, &a, shared_p);
  }
  return mlfab__context_leave(ctx, code);
}
