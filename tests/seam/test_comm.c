/* test_comm.c - collectives between whole nodes, over links that are slow and break, and end with their worker.
 *
 * Oracles. Every result is compared with the literal sum over the members of the epoch, in their order. Workers make the
 * same calls, beginning anew with each failure that they see: a worker that missed one, or saw it twice, would call
 * something else than the others. Frames of collectives arrive in order, once, and in pieces of chunk_bytes.
 *
 * MLFAB_SEED=n adds to the seeds, MLFAB_SHOW=1 prints the nodes' logs. */
#include "core/api/parts.h"
#include "core/coll/comm.h"
#include "core/node/node.h"
#define SCENE_ENDS close_world()
#include "crowd.h"
#include "core/kernels/kernels_combine.h"
#include "tests/unit/values.h"

enum {
  WORKERS = 16,
  OPEN = 16,         /* calls of a worker that are open */
  BUFS = 6,          /* of a list */
  CREDIT = 8 << 20,  /* eager bytes at a peer */
  EAGER = 64 << 10,  /* a call of up to so many bytes is sent without READY */
  WINDOWS = 4 << 20, /* bytes that a worker may have staged of trees */
  AHEAD = 32,        /* calls that nobody else has called, but needs */
  PATIENCE = 8       /* beats without a link to a worker */
};

typedef struct shape { /* a call of the program */
  int kind, algorithm, user, dtype, op;
  uint32_t width;
  uint64_t count;
  int32_t root;
} shape;

typedef struct open_call {
  shape what;
  uint64_t index, counts[WORKERS];
  mlfab_request request;
  mlfab_vec vecs[BUFS];
  uint32_t n;
} open_call;

typedef struct worker {
  uint64_t generation;                /* failures that it has seen */
  uint64_t index, done;               /* calls begun and finished since the last of them */
  uint64_t generations[CROWD_EPOCHS]; /* plus one, by epoch */
  uint32_t failed_in;                 /* the epoch that ended here before server 0 said so */
  /* Server 0 has told of a failure that no call has seen; failed_in is not over yet; the next epoch fails here. */
  int verdict, failed, untold;
  open_call open[OPEN];
  uint32_t nopen;
  mlfab_error last; /* failure */
} worker;

/* The right result of a call. Its key is all that it depends on: the call, the epoch, each member's rank and generation. */
enum { KEY = 8 + WORKERS };
typedef struct result {
  uint64_t key[KEY];
  uint8_t *data; /* NULL: none is known */
} result;

/* From one worker to another, in the epoch of the receiver. */
typedef struct stream {
  uint32_t epoch;
  uint64_t seen, eager, consumed;
} stream;

static struct {
  worker workers[WORKERS];
  stream streams[WORKERS][WORKERS];
  result results[OPEN];   /* by the number of the call */
  uint64_t seed, most;    /* most: elements of a call */
  int plain;              /* only what every number of members can do, and any may die */
  uint32_t silent, wrong; /* so many trees in 16 never come, or are no trees */
  uint64_t planned, refused, finished, failed, acks;
  uint8_t lost_type; /* the next frame of this type finds no memory; 0: none */
} w;

static uint64_t seed_of(uint64_t base) { return base + test_seed(); }

/* --- frames --- */

static uint32_t above(const uint32_t *ranks, uint32_t i) {
  return i == 0 ? MLFAB__NO_NODE : ranks[chance(i)];
}

/* Puts any tree of these workers into a plan, or what is none. 0: it is lost. */
static int draw_tree(uint8_t *meta, uint32_t bytes) {
  mlfab__tree_plan plan;
  mlfab__tree_node nodes[WORKERS];
  uint32_t up[WORKERS], down[WORKERS], n, root = 0;
  assert_int_equal(mlfab__decode_tree_plan(meta, bytes, &plan, nodes), 0);
  n = plan.nodes;
  if (chance(16) < w.silent) return 0;
  if (n == 0) return 1;
  for (uint32_t i = 0; i < n; i++) {
    up[i] = nodes[i].worker;
    if (nodes[i].parent == MLFAB__NO_NODE) root = i;
  }
  memcpy(down, up, sizeof up);
  for (uint32_t way = 0; way < 2; way++) { /* the root first, the others in any order */
    uint32_t *ranks = way ? down : up, first = ranks[root];
    ranks[root] = ranks[0];
    ranks[0] = first;
    for (uint32_t i = n - 1; i > 1; i--) {
      uint32_t k = 1 + chance(i), rank = ranks[i];
      ranks[i] = ranks[k];
      ranks[k] = rank;
    }
  }
  for (uint32_t i = 0; i < n; i++) {
    uint32_t k = 0;
    while (down[k] != up[i]) k++;
    nodes[i] = (mlfab__tree_node){up[i], above(up, i), above(down, k)};
  }
  for (uint32_t i = n - 1; i > 0; i--) { /* the list is in an order of its own */
    uint32_t k = chance(i + 1);
    mlfab__tree_node node = nodes[i];
    nodes[i] = nodes[k];
    nodes[k] = node;
  }
  w.planned++;
  if (chance(16) < w.wrong) {
    uint32_t *fields[] = {&nodes[0].worker, &nodes[0].parent, &nodes[0].giver};
    *fields[chance(3)] = chance(3) ? nodes[0].worker : crowd.n + chance(3);
    w.refused++;
  }
  assert_int_equal(mlfab__encode_tree_plan(meta, &plan, nodes), bytes);
  return 1;
}

/* In order, once, no more than fits, and no more eager bytes than the receiver has room for. */
static void check_stream(uint32_t from, uint32_t to, const mlfab__coll *head, uint32_t bytes) {
  stream *s = &w.streams[from][to];
  if (head->epoch != crowd.nodes[to].epoch || head->seq == 0 || crowd.asked)
    return; /* 0: asks for an answer */
  if (s->epoch != head->epoch) *s = (stream){.epoch = head->epoch};
  assert_int_equal(head->seq, ++s->seen);
  assert_true(bytes <= mlfab__max(crowd.config.chunk_bytes / 64 * 64, 64));
  if (head->flags & MLFAB__COLL_EAGER) s->eager += bytes;
  assert_true(s->eager - s->consumed <= CREDIT);
}

static int hear(uint32_t from, uint32_t to, mlfab__header *header, uint8_t *meta,
                const uint8_t *bulk) {
  mlfab__membership_over over;
  mlfab__membership_list list;
  mlfab__membership_member members[CROWD_NODES];
  mlfab__coll head;
  mlfab__coll_ack ack;
  worker *me = &w.workers[to % WORKERS];
  (void)bulk;
  if (header->type == MLFAB__TREE_PLAN && to == crowd.n && from == crowd.n + 1)
    return draw_tree(meta, header->meta_bytes);
  if (to >= crowd.n) return 1;
  if (header->type == MLFAB__MEMBERSHIP_OVER &&
      !mlfab__decode_membership_over(meta, header->meta_bytes, &over) &&
      over.epoch > crowd.nodes[to].over) {
    if (over.code && !me->failed && !me->untold) me->verdict = 1;
    if (over.code && !me->failed) me->untold = 0;
    me->failed = 0;
  }
  if (header->type == MLFAB__MEMBERSHIP_LIST && me->untold &&
      !mlfab__decode_membership_list(meta, header->meta_bytes, &list, members)) {
    me->untold = 0;
    me->failed = 1;
    me->failed_in = list.epoch;
  }
  if (header->type == MLFAB__COLL && !mlfab__decode_coll(meta, header->meta_bytes, &head))
    check_stream(from, to, &head, header->bulk_bytes);
  if (header->type == MLFAB__COLL_ACK && !mlfab__decode_coll_ack(meta, header->meta_bytes, &ack)) {
    stream *s = &w.streams[to][from];
    w.acks++;
    if (s->epoch == ack.epoch && ack.consumed > s->consumed) s->consumed = ack.consumed;
  }
  if (header->type == w.lost_type) {
    w.lost_type = 0;
    crowd.fails = 1;
  }
  return 1;
}

/* --- the world --- */

static void look(uint32_t i);

/* Allreduces of more bytes than these are planned: as trees of any form. */
static void add_scheduler(uint32_t bytes) {
  crowd.config.scheduler = MLFAB_SCHEDULER_OWN;
  crowd.config.eager_bytes = (bytes + 64) / 64 * 64;
}

static void forget_call(worker *me, uint32_t k) {
  for (uint32_t b = 0; b < me->open[k].n; b++) free(me->open[k].vecs[b].data);
  me->open[k] = me->open[--me->nopen];
}

static void kill_worker(uint32_t i) {
  crowd_kill(i);
  while (w.workers[i].nopen > 0) forget_call(&w.workers[i], 0);
}

static void revive_worker(uint32_t i) {
  kill_worker(i);
  worker fresh = {0}; /* others may still finish calls with what the former process has brought */
  memcpy(fresh.generations, w.workers[i].generations, sizeof fresh.generations);
  w.workers[i] = fresh;
  crowd_open_node(i);
}

static void close_world(void) {
  if (crowd.all == 0) return;
  for (uint32_t i = 0; i < crowd.all && !crowd.asked; i++)
    if (crowd.nodes[i].node && !w.refused) assert_int_equal(crowd_stats(i).frames_refused, 0);
  for (uint32_t i = 0; i < crowd.n; i++) kill_worker(i);
  for (uint32_t i = 0; i < OPEN; i++) free(w.results[i].data);
  crowd_close();
}

static void begin_world(uint32_t n, uint64_t seed) {
  close_world();
  memset(&w, 0, sizeof w);
  crowd_begin(n, seed);
  w.seed = seed;
  w.most = 2000;
  crowd.look = look;
  crowd.hear = hear;
}

static void open_world(uint32_t n, uint64_t seed) {
  begin_world(n, seed);
  crowd_open();
}

static int can_call(uint32_t i) {
  return crowd.nodes[i].node && crowd_is_ready(i) && w.workers[i].nopen < OPEN;
}

/* --- the program --- */

/* A reducer that does not commute: the second first. */
static void compose(void *user, void *inout, const void *in, uint64_t count) {
  const affine *left = in;
  affine *right = inout;
  assert_ptr_equal(user, &w);
  for (uint64_t i = 0; i < count; i++) right[i] = affine_then(right[i], left[i]);
}

static int blocks(const shape *what) {
  return what->kind == MLFAB_CALL_REDUCE_SCATTER || what->kind == MLFAB_CALL_ALLGATHER;
}

static int reduces(const shape *what) {
  return what->kind == MLFAB_CALL_REDUCE_SCATTER || what->kind == MLFAB_CALL_ALLREDUCE;
}

/* The call number `index` since the last failure, the same for all. */
static shape program(uint64_t index) {
  static const int dtypes[] = {MLFAB_I64, MLFAB_F32, MLFAB_F64, MLFAB_F16, MLFAB_BF16, MLFAB_I64};
  uint64_t r[8];
  shape call = {0};
  for (uint32_t i = 0; i < 8; i++) r[i] = mlfab__mix(w.seed * 1000003 + index * 8 + i) >> 16;
  call.kind = MLFAB_CALL_ALLREDUCE + (int)(r[0] % 4);
  if (r[0] / 8 % 3 == 0) call.kind = MLFAB_CALL_ALLREDUCE;
  call.count = 1 + r[1] % (r[2] % 4 ? 40 : w.most);
  call.root = w.plain ? 0 : (int32_t)(r[3] % crowd.n);
  call.dtype = dtypes[r[4] % MLFAB__COUNT(dtypes)];
  call.op = (int)(r[5] % 5);
  if (call.op == MLFAB_OP_PRODUCT && call.dtype != MLFAB_F64) call.dtype = MLFAB_I64;
  if (call.op == MLFAB_OP_MEAN) call.dtype = r[5] & 64 ? MLFAB_F32 : MLFAB_F64;
  call.width = mlfab__element_bytes(call.dtype);
  call.user = reduces(&call) && r[6] % 5 == 0;
  if (call.user) {
    call.width = sizeof(affine);
    call.dtype = 99; /* not looked at */
  } else if (call.kind == MLFAB_CALL_ALLREDUCE) {
    call.algorithm = (int)(r[7] % MLFAB_ALGORITHM_COUNT);
  }
  if (call.kind == MLFAB_CALL_BROADCAST) {
    call.dtype = 0;
    call.width = 1;
  }
  return call;
}

/* Elements of a rank's block; those of ranks that may die are 0. */
static void blocks_of(const shape *what, uint64_t index, uint64_t *counts) {
  uint64_t left = what->count;
  for (uint32_t r = 0; r < crowd.n; r++) {
    counts[r] = left ? mlfab__mix(w.seed + 31 * index + r) % (left + 1) : 0;
    if (r > 0 && w.plain) counts[r] = 0;
    left -= counts[r];
  }
  counts[0] += left;
}

/* A worker's element i: small whole numbers, so that all sums of floats are exact. */
static void element(const shape *what, uint32_t rank, uint64_t generation, uint64_t index,
                    uint64_t i, uint8_t *to) {
  uint64_t x = mlfab__mix(((rank * 1009 + generation) * 10007 + index) * 100003 + i);
  int64_t small = (int64_t)(x % 9) - 4;
  if (what->op == MLFAB_OP_PRODUCT) small = x & 1 ? 2 : 1;
  const affine map = {(uint32_t)x | 1, (uint32_t)(x >> 32), 1};
  if (what->user) memcpy(to, &map, sizeof map);
  if (what->dtype == 0) *to = (uint8_t)x;
  if (what->dtype && !what->user) put(to, what->dtype, 0, (double)small);
}

/* The rank that element i of the call's data belongs to. */
static uint32_t owner_of(const uint64_t *counts, uint64_t i) {
  uint32_t r = 0;
  while (i >= counts[r]) i -= counts[r++];
  return r;
}

static uint8_t *place(const open_call *c, uint64_t i) {
  uint32_t k = 0;
  while (i >= c->vecs[k].count) i -= c->vecs[k++].count;
  return (uint8_t *)c->vecs[k].data + i * c->what.width;
}

static int brings(const open_call *c, uint32_t rank, uint64_t i) {
  if (c->what.kind == MLFAB_CALL_BROADCAST) return (int32_t)rank == c->what.root;
  if (c->what.kind == MLFAB_CALL_ALLGATHER) return owner_of(c->counts, i) == rank;
  return 1;
}

/* Literal: element i of the result. */
static void expected(uint32_t epoch, const open_call *c, uint64_t i, uint8_t *to) {
  const shape *what = &c->what;
  const crowd_epoch *e = crowd_epoch_of(epoch);
  uint32_t adds = 0;
  for (uint32_t m = 0; m < e->members; m++) {
    uint64_t generation = w.workers[e->ranks[m]].generations[epoch % CROWD_EPOCHS], x[2] = {0};
    if (!brings(c, e->ranks[m], i)) continue;
    if (generation == 0)
      fail_msg("epoch %u: worker %u has called nothing: life %u, failed in %u, over %u", epoch,
               e->ranks[m], crowd.nodes[e->ranks[m]].life, w.workers[e->ranks[m]].failed_in,
               crowd.nodes[e->ranks[m]].over);
    element(what, e->ranks[m], generation - 1, c->index, i, (uint8_t *)x);
    if (adds++ == 0) {
      memcpy(to, x, what->width);
    } else if (what->user) {
      compose(&w, x, to, 1);
      memcpy(to, x, what->width);
    } else {
      mlfab__kernel_combine(what->op, what->dtype, to, to, x, 1, 0);
    }
  }
  if (reduces(what) && what->op == MLFAB_OP_MEAN && !what->user)
    mlfab__kernel_divide(what->dtype, to, 1, adds);
}

/* All elements of the result. They are the same for all members, so the last results stay. */
static const uint8_t *results(uint32_t epoch, const open_call *c) {
  const shape *what = &c->what;
  result *r = &w.results[c->index % OPEN];
  uint64_t key[KEY] = {c->index,
                       epoch,
                       what->count,
                       what->width,
                       (uint64_t)what->kind,
                       (uint64_t)what->op,
                       (uint64_t)what->dtype,
                       (uint64_t)what->root};
  for (uint32_t m = 0; crowd.n > 1 && m < crowd_epoch_of(epoch)->members; m++) {
    uint32_t rank = crowd_epoch_of(epoch)->ranks[m];
    key[KEY - WORKERS + m] = w.workers[rank].generations[epoch % CROWD_EPOCHS] << 8 | rank;
  }
  if (crowd.n == 1) key[KEY - 1] = w.workers[0].generation;
  if (r->data && memcmp(r->key, key, sizeof key) == 0) return r->data;
  memcpy(r->key, key, sizeof key);
  free(r->data);
  r->data = calloc(what->count, what->width);
  assert_non_null(r->data);
  for (uint64_t i = 0; i < what->count; i++) {
    uint64_t right[2] = {0, 0};
    if (crowd.n == 1)
      element(what, 0, w.workers[0].generation, c->index, i, (uint8_t *)right);
    else
      expected(epoch, c, i, (uint8_t *)right);
    memcpy(r->data + i * what->width, right, what->width);
  }
  return r->data;
}

static void expect_result(uint32_t rank, const open_call *c) {
  const uint8_t *right = results(crowd.nodes[rank].epoch, c);
  for (uint64_t i = 0; i < c->what.count; i++) {
    if (c->what.kind == MLFAB_CALL_REDUCE_SCATTER && owner_of(c->counts, i) != rank) continue;
    if (memcmp(place(c, i), right + i * c->what.width, c->what.width) != 0)
      fail_msg(
          "worker %u, call %u (kind %d, algorithm %d), epoch %u, generation %u: element %u is "
          "wrong",
          rank, (unsigned)c->index, c->what.kind, c->what.algorithm, crowd.nodes[rank].epoch,
          (unsigned)w.workers[rank].generation, (unsigned)i);
  }
}

/* Its own cut of the array. Blocks lie together. */
static void make_buffers(uint32_t rank, open_call *c) {
  uint64_t left = c->what.count;
  int together = blocks(&c->what) || c->what.kind == MLFAB_CALL_BROADCAST;
  blocks_of(&c->what, c->index, c->counts);
  c->n = together ? 1 : 1 + chance(BUFS);
  for (uint32_t k = 0; k < c->n; k++) {
    c->vecs[k].count = k + 1 == c->n ? left : chance((uint32_t)left + 1);
    c->vecs[k].data = malloc(c->vecs[k].count * c->what.width + 1);
    assert_non_null(c->vecs[k].data);
    left -= c->vecs[k].count;
  }
  for (uint64_t i = 0; i < c->what.count; i++)
    if (brings(c, rank, i))
      element(&c->what, rank, w.workers[rank].generation, c->index, i, place(c, i));
}

/* Notes the data that the present epoch sees. A worker sees a failure that was owed with its next call. */
static void note_epoch(uint32_t i) {
  worker *me = &w.workers[i];
  uint32_t epoch = crowd.nodes[i].epoch;
  if (epoch && epoch != me->failed_in) me->generations[epoch % CROWD_EPOCHS] = me->generation + 1;
}

static void saw_failure(uint32_t i, const mlfab_error *error) {
  worker *me = &w.workers[i];
  if (getenv("MLFAB_SHOW"))
    print_message("%llu: worker %u fails: %s\n", (unsigned long long)crowd.now, i, error->text);
  if (!me->verdict && crowd.nodes[i].epoch && !me->failed) {
    me->failed_in = crowd.nodes[i].epoch;
    me->failed = 1;
  } else if (!me->verdict && (crowd.nodes[i].went || crowd.nodes[i].life == 1)) {
    me->untold = 1;
  }
  me->verdict = 0;
  me->generation++;
  me->index = me->done = 0;
  me->last = *error;
  w.failed++;
}

/* Begins the next call of the program, or another. Returns the code. */
static int begin(uint32_t i, const shape *other, uint64_t timeout_ns) {
  worker *me = &w.workers[i];
  open_call *c = &me->open[me->nopen];
  memset(c, 0, sizeof *c);
  c->index = me->index;
  c->what = other ? *other : program(c->index);
  make_buffers(i, c);
  const shape *what = &c->what;
  const mlfab_collective options = {.size = sizeof options,
                                    .op = (uint32_t)what->op,
                                    .algorithm = (uint32_t)what->algorithm,
                                    .reduce = what->user ? compose : NULL,
                                    .user = &w,
                                    .element_bytes = what->user ? what->width : 0,
                                    .ordered = what->user != 0,
                                    /* One that is back meets the call of this number. */
                                    .tag = c->index + 1,
                                    .timeout_ns = timeout_ns};
  const mlfab_call call =
      SIZED(mlfab_call, .kind = (uint32_t)what->kind, .options = &options, .vecs = c->vecs,
            .n = c->n, .dtype = what->dtype, .root = what->root, .data = c->vecs[0].data,
            .count = what->count, .counts = c->counts);
  int code = mlfab_node_submit(crowd.nodes[i].node, &call, crowd.now, &c->request);
  if (code) {
    mlfab_error error;
    assert_int_equal(mlfab_node_last_error(crowd.nodes[i].node, &error), 0);
    for (uint32_t k = 0; k < c->n; k++) free(c->vecs[k].data);
    int again = code == MLFAB_ERR_AGAIN && strstr(error.text, "under way");
    int memory = code == MLFAB_ERR_MEMORY && error.rank == MLFAB_NO_RANK;
    int leaves = strstr(error.text, "the node is leaving") != NULL;
    if (!again && !memory && !leaves && code != MLFAB_ERR_STATE) /* else nothing was called */
      saw_failure(i, &error);
    crowd_pump(i);
    return code;
  }
  me->nopen++;
  me->index++;
  note_epoch(i);
  crowd_pump(i);
  look(i);
  return 0;
}

/* Takes note of requests that are done. All that are open fail together. */
static void look(uint32_t i) {
  mlfab_error error, failure = {0};
  if (i >= crowd.n) return;
  worker *me = &w.workers[i];
  if (crowd.fails == 1) crowd.fails = 0;
  note_epoch(i);
  for (uint32_t k = 0; k < me->nopen;) {
    if (!crowd_test(i, me->open[k].request, &error)) {
      k++;
      continue;
    }
    if (error.code) {
      failure = error;
    } else {
      expect_result(i, &me->open[k]);
      me->done++;
      w.finished++;
    }
    for (uint32_t b = 0; b < me->open[k].n; b++) /* a link that still reads it will notice */
      memset(me->open[k].vecs[b].data, 0xEE, me->open[k].vecs[b].count * me->open[k].what.width);
    forget_call(me, k);
  }
  if (!failure.code) return;
  assert_int_equal(me->nopen, 0);
  saw_failure(i, &failure);
}

/* --- what happens --- */

static void explain(void) {
  print_message("%u workers, seed %llu\n", crowd.n, (unsigned long long)w.seed);
  for (uint32_t i = 0; i < crowd.n; i++) {
    const worker *me = &w.workers[i];
    print_message("worker %u: here %d, epoch %u, %u done, %u begun, %u failures: %s\n", i,
                  crowd.nodes[i].node != NULL, crowd.nodes[i].epoch, (unsigned)me->done,
                  (unsigned)me->index, (unsigned)me->generation, me->last.text);
  }
}

static void break_something(void) {
  if (chance(600) == 0) crowd_break_some();
}

/* A failure has come that a worker sees with its next call: it may have finished all of its calls before. */
static int owes_failure(uint32_t i) {
  const mlfab_node *node = crowd.nodes[i].node;
  return node && node->parts->comm->owed;
}

/* Everybody calls on until each has finished so many calls since the last failure that it saw. */
static void run(uint64_t calls, int breaks) {
  uint64_t end = crowd.now + 500 * CROWD_BEAT;
  for (int all = 0; !all;) {
    uint32_t i = chance(crowd.n);
    if (crowd.now >= end) explain();
    assert_true(crowd.now < end);
    int calls_on = w.workers[i].index < calls || owes_failure(i);
    if (calls_on && can_call(i) && chance(4) == 0) (void)begin(i, NULL, 0);
    if (breaks) break_something();
    crowd_step();
    all = 1;
    for (i = 0; i < crowd.n; i++) all &= !crowd.nodes[i].node || w.workers[i].done >= calls;
  }
}

/* Until nothing is open. */
static void settle(void) {
  uint64_t end = crowd.now + 250 * CROWD_BEAT;
  for (int open = 1; open;) {
    if (crowd.now >= end) explain();
    assert_true(crowd.now < end);
    crowd_step();
    open = 0;
    for (uint32_t i = 0; i < crowd.n; i++) open |= w.workers[i].nopen > 0;
  }
}

/* So that all who are ahead end as well. */
static uint64_t furthest(void) {
  uint64_t calls = 0;
  for (uint32_t i = 0; i < crowd.n; i++) calls = mlfab__max(calls, w.workers[i].index);
  return calls;
}

static void cancel(uint32_t i) {
  const worker *me = &w.workers[i];
  if (!crowd.nodes[i].node || me->nopen == 0) return;
  assert_int_equal(
      mlfab_node_cancel(crowd.nodes[i].node, me->open[chance(me->nopen)].request, crowd.now), 0);
  crowd_pump(i);
  look(i);
}

/* --- without failures --- */

SCENE(test_calls) {
  uint64_t rounds = test_cases_from(16, 16), finished = 0;
  for (uint64_t round = 0; round < rounds; round++) {
    begin_world(1 + (uint32_t)round % WORKERS, seed_of(1000 + round));
    if (round % 10 == 0) w.most = 30000;
    if (round % 3) add_scheduler(chance(4000));
    w.silent = round % 4 == 0;
    crowd_open();
    run(10 + chance(40), round % 2);
    assert_int_equal(w.failed, 0);
    finished += w.finished;
  }
  print_message("%u collectives\n", (unsigned)finished);
}

/* --- failures --- */

/* Something that fails. Workers 0 and 1 are spared. */
static void spoil(void) {
  uint32_t i = 2 + chance(crowd.n - 2);
  uint32_t what = chance(5), any = chance(crowd.n);
  if (what == 0) kill_worker(i);
  if (what == 2 || (what == 1 && !crowd.nodes[i].node)) revive_worker(i); /* 2: at once */
  if (what == 3) cancel(any);
  if (what == 4 && can_call(any)) (void)begin(any, NULL, 1 + chance(CROWD_BEAT));
}

/* All who live through it see every failure once: the same numbers of the same program follow, and nothing differs in
 * shape. */
SCENE(test_failures) {
  uint64_t rounds = test_cases_from(10, 20), finished = 0, failed = 0;
  for (uint64_t round = 0; round < rounds; round++) {
    begin_world(3 + (uint32_t)round % 8, seed_of(50000 + round));
    w.plain = 1;
    if (round % 3) add_scheduler(chance(4000));
    w.silent = round % 4 == 0;
    w.wrong = round % 5 == 0;
    crowd.config.timeout_ns = 1000 * CROWD_BEAT;
    crowd_open();
    for (int bad = 0; bad < 6; bad++) {
      for (uint32_t k = 400 + chance(chance(4) ? 2000 : 8000); k > 0; k--) {
        uint32_t i = chance(crowd.n);
        if (can_call(i) && chance(4) == 0) (void)begin(i, NULL, 0);
        break_something();
        crowd_step();
      }
      spoil();
    }
    w.wrong = 0;
    /* One that is back is let in by now, whatever the others call: seldom, so that most of the time is skipped. */
    for (uint64_t end = crowd.now + 120 * CROWD_BEAT; crowd.now < end; crowd_step()) {
      uint32_t i = chance(crowd.n);
      if (can_call(i) && chance(100) == 0) (void)begin(i, NULL, 0);
    }
    run(furthest() + 20, round % 2);
    for (uint32_t i = 0; i < crowd.n; i++)
      assert_int_not_equal(w.workers[i].last.code, MLFAB_ERR_MISMATCH);
    finished += w.finished;
    failed += w.failed;
  }
  print_message("%u collectives, %u failures seen\n", (unsigned)finished, (unsigned)failed);
  assert_true(failed > 10);
}

/* The links to server 0 break all the time, also between a failure, its verdict and the next epoch. */
SCENE(test_server_links) {
  uint64_t rounds = test_cases_from(10, 20);
  for (uint64_t round = 0; round < rounds; round++) {
    open_world(2 + (uint32_t)round % 4, seed_of(90000 + round));
    w.plain = 1; /* a worker whose links break too often is taken for dead */
    for (uint32_t k = 6000; k > 0; k--) {
      uint32_t i = chance(crowd.n);
      if (can_call(i) && chance(4) == 0) (void)begin(i, NULL, 0);
      if (chance(200) == 0) cancel(i);
      if (i > 0 && crowd.nbusy > 0 && chance(200) == 0) crowd_part(i, crowd.n);
      crowd_step();
    }
    run(furthest() + 20, 0);
    for (uint32_t i = 0; i < crowd.n; i++)
      assert_int_not_equal(w.workers[i].last.code, MLFAB_ERR_MISMATCH);
  }
}

/* --- one failure at a time --- */

static const shape plain_sum = {
    .kind = MLFAB_CALL_ALLREDUCE, .dtype = MLFAB_F64, .width = 8, .count = 100};
static const shape large_sum = {
    .kind = MLFAB_CALL_ALLREDUCE, .dtype = MLFAB_I64, .width = 8, .count = 20000};

static void begin_all(const shape *what, uint64_t timeout_ns) {
  for (uint32_t i = 0; i < crowd.n; i++)
    if (crowd.nodes[i].node) assert_int_equal(begin(i, what, timeout_ns), 0);
}

static void all_call(const shape *what) {
  begin_all(what, 0);
  settle();
}

static void expect_all(uint64_t generation, int32_t code, int32_t rank, const char *text) {
  for (uint32_t i = 0; i < crowd.n; i++) {
    const worker *me = &w.workers[i];
    if (!crowd.nodes[i].node) continue;
    assert_int_equal(me->generation, generation);
    assert_int_equal(me->last.code, code);
    assert_int_equal(me->last.rank, rank);
    if (!strstr(me->last.text, text)) fail_msg("'%s' has no '%s'", me->last.text, text);
  }
}

/* A worker that differs is named on all ranks, with both calls in words, and within a beat. */
SCENE(test_shapes) {
  for (uint32_t odd = 0; odd < 4; odd++) {
    open_world(4, seed_of(6 + odd));
    shape other = plain_sum;
    if (odd == 0) other.count++;
    if (odd == 1) other.dtype = MLFAB_I64;
    if (odd == 2) other.op = MLFAB_OP_MAX;
    if (odd == 3) other = large_sum;
    all_call(&plain_sum);
    uint64_t start = crowd.now;
    for (uint32_t i = 0; i < 4; i++)
      assert_int_equal(begin(i, i == odd ? &other : &plain_sum, 0), 0);
    settle();
    expect_all(1, MLFAB_ERR_MISMATCH, (int32_t)odd, "100 F64 (SUM)");
    assert_true(crowd.now - start < CROWD_BEAT); /* not by the look at the clock */
    all_call(&plain_sum);
    expect_all(1, MLFAB_ERR_MISMATCH, (int32_t)odd, "");
  }
}

/* A deadline names the worker that has not called, before there is an epoch and in it. That worker sees it with its next
 * call. */
SCENE(test_deadlines) {
  for (uint64_t seed = 0; seed < test_cases(20); seed++) {
    open_world(5, seed_of(100 + seed));
    if (seed % 2) all_call(&plain_sum);
    for (uint32_t i = 0; i < 5; i++)
      if (i != 3) assert_int_equal(begin(i, &large_sum, i == 1 ? 10 * CROWD_BEAT : 0), 0);
    crowd_run(30 * CROWD_BEAT);
    if (seed % 2 == 0) { /* told when the last one comes */
      assert_int_equal(w.workers[1].last.code, MLFAB_ERR_TIMEOUT);
      assert_int_equal(w.workers[0].nopen, 1);
      assert_int_equal(begin(3, &plain_sum, 0), 0);
      settle();
    } else {
      assert_int_equal(w.workers[3].generation, 0);
      assert_int_equal(begin(3, &large_sum, 0), MLFAB_ERR_TIMEOUT);
    }
    expect_all(1, MLFAB_ERR_TIMEOUT, 3, "worker 1's deadline passed after");
    expect_all(1, MLFAB_ERR_TIMEOUT, 3,
               seed % 2 ? "worker 3 has not called it" : "takes no part yet");
    all_call(&plain_sum);
    expect_all(1, MLFAB_ERR_TIMEOUT, 3, "");
  }
}

/* A call that begins while a failure is still to be told belongs to the next epoch; also if it fails before that
 * stands. */
SCENE(test_failure_after_failure) {
  for (uint64_t seed = 0; seed < test_cases(40); seed++) {
    open_world(3, seed_of(200 + seed));
    all_call(&plain_sum);
    begin_all(&large_sum, 0);
    crowd_run(chance(60) * CROWD_STEP);
    for (uint32_t k = 0; k < 2; k++) {
      if (w.workers[0].nopen == 0 && begin(0, &large_sum, 0)) continue;
      cancel(0);
    }
    settle();
    run(30, (int)seed % 2);
    assert_true(w.workers[0].generation >= 1);
    assert_int_equal(w.workers[1].generation, w.workers[0].generation);
    assert_int_equal(w.workers[2].generation, w.workers[0].generation);
  }
}

SCENE(test_not_finite) {
  double bad[4] = {1, 2, 1e308 * 10, 4};
  const mlfab_vec vec = {bad, 4};
  const mlfab_collective options = {.size = sizeof options, .refuse_nan = 1};
  mlfab_request request = 0;
  mlfab_error error;
  open_world(3, seed_of(9));
  for (uint64_t round = 1; round <= 2; round++) { /* before any epoch, and in one */
    for (uint32_t i = 0; i < 2; i++) assert_int_equal(begin(i, &plain_sum, 0), 0);
    if (round == 2) crowd_run(200 * CROWD_STEP);
    assert_int_equal(SUBMIT(2, &request, ALLREDUCE, .vecs = &vec, .n = 1, .dtype = MLFAB_F64,
                            .options = &options),
                     MLFAB_ERR_NOT_FINITE);
    assert_int_equal(mlfab_node_last_error(crowd.nodes[2].node, &error), 0);
    assert_int_equal(error.rank, 2);
    saw_failure(2, &error);
    crowd_pump(2);
    settle();
    expect_all(round, MLFAB_ERR_NOT_FINITE, 2, "NaN or infinity");
    all_call(&plain_sum);
  }
  expect_all(2, MLFAB_ERR_NOT_FINITE, 2, "");
}

/* A worker that leaves in good order ends nothing that it has called. */
SCENE(test_leaving) {
  for (uint64_t seed = 0; seed < test_cases(30); seed++) {
    begin_world(4, seed_of(300 + seed));
    crowd.config.chunk_bytes = 65536; /* a worker that leaves waits for a beat */
    crowd_open();
    if (seed % 3) { /* now there are links */
      all_call(&plain_sum);
      all_call(&large_sum);
    }
    begin_all(&large_sum, 0);
    begin_all(&plain_sum, 0);
    if (seed % 3) crowd_run(chance(400) * CROWD_STEP);
    mlfab_node_leave(crowd.nodes[2].node, crowd.now);
    crowd_pump(2);
    look(2);
    if (seed % 3) {
      assert_int_not_equal(begin(2, &plain_sum, 0), 0);
      settle();
      crowd_run(2 * CROWD_BEAT);
      kill_worker(2);
      assert_int_equal(w.workers[0].generation + w.workers[1].generation, 0);
      begin_all(&large_sum, 0);
      settle();
      expect_all(1, MLFAB_ERR_PEER_CLOSED, 2, "worker 2 has left");
    } else {
      assert_int_equal(w.workers[2].last.code, MLFAB_ERR_CANCELLED);
      settle();
      kill_worker(2);
    }
    all_call(&plain_sum);
    assert_int_equal(crowd_epoch_of(crowd.newest)->members, 3);
  }
}

/* A death while nothing is called is seen with the next call, once. */
SCENE(test_owed) {
  open_world(4, seed_of(11));
  all_call(&plain_sum);
  kill_worker(3);
  crowd_run(4 * CROWD_BEAT);
  expect_all(0, 0, 0, "");
  for (uint32_t i = 0; i < 3; i++) assert_int_equal(begin(i, &plain_sum, 0), MLFAB_ERR_PEER_DEAD);
  expect_all(1, MLFAB_ERR_PEER_DEAD, 3, "worker 3 is dead");
  all_call(&plain_sum);
  expect_all(1, MLFAB_ERR_PEER_DEAD, 3, "");
  /* Ranks that are dead. */
  shape bad = {.kind = MLFAB_CALL_BROADCAST, .width = 1, .count = 5, .root = 3};
  assert_int_equal(begin(1, &bad, 0), MLFAB_ERR_ARGUMENT);
  assert_non_null(strstr(w.workers[1].last.text, "worker 3 does not take part"));
  /* Server 0. */
  assert_int_equal(begin(0, &plain_sum, 0), 0);
  crowd_kill(crowd.n);
  settle();
  assert_int_equal(w.workers[0].last.code, MLFAB_ERR_PEER_DEAD);
  assert_int_equal(w.workers[0].last.is_server, 1);
  assert_int_equal(begin(0, &plain_sum, 0), MLFAB_ERR_PEER_DEAD);
}

/* A worker that lives, and that the others cannot reach, is named after some beats. */
SCENE(test_unreachable) {
  open_world(4, seed_of(15));
  crowd.hidden = 3;
  begin_all(&plain_sum, 0);
  uint64_t start = crowd.now;
  settle();
  crowd_run(200 * CROWD_STEP);
  for (uint32_t i = 0; i < 4; i++) /* a worker that needs nothing from it has got its result */
    if (w.workers[i].generation == 0)
      assert_int_equal(begin(i, &plain_sum, 0), MLFAB_ERR_PEER_DEAD);
  expect_all(1, MLFAB_ERR_PEER_DEAD, 2, "worker 2 cannot be reached, says worker ");
  assert_in_range(crowd.now - start, PATIENCE * CROWD_BEAT, (PATIENCE + 2) * CROWD_BEAT);
  crowd.hidden = 0;
  all_call(&plain_sum);
  expect_all(1, MLFAB_ERR_PEER_DEAD, 2, "");
}

/* Each is refused before anything is sent. Zeros stand for an allreduce of F64, over two buffers that lie apart. */
SCENE(test_arguments) {
  enum { BROADCAST = MLFAB_CALL_BROADCAST };
  static double data[8];
  static mlfab_vec many[4097];
  static const uint64_t counts[2] = {4, 4};
  static const struct row {
    const char *text;
    int code, dtype;
    mlfab_vec first, second;
    uint32_t kind, op, algorithm, n, reduces;
    int32_t root;
  } rows[] = {
      {"buffers 1 and 0 overlap", MLFAB_ERR_ARGUMENT, .first = {data + 2, 3}, .second = {data, 3}},
      {"buffer 0 is NULL and has 3 elements", MLFAB_ERR_ARGUMENT, .first = {NULL, 3},
       .second = {data, 2}},
      {"buffer 0 is not aligned", MLFAB_ERR_ARGUMENT, .first = {(uint8_t *)data + 20, 3},
       .second = {data, 2}},
      {"model_max_bytes", MLFAB_ERR_LIMIT, .first = {data + 2, 1u << 30}, .second = {data, 2}},
      {"model_max_bytes", MLFAB_ERR_LIMIT, .first = {data + 2, UINT64_MAX}, .second = {data, 2}},
      {"no elements", MLFAB_ERR_ARGUMENT, .first = {data + 2, 0}, .second = {data, 0}},
      {"77 is not an element type", MLFAB_ERR_DTYPE, .dtype = 77},
      {"7 is not an operation", MLFAB_ERR_ARGUMENT, .op = 7},
      {"MLFAB_OP_MEAN cannot be used with MLFAB_I64", MLFAB_ERR_UNSUPPORTED, .dtype = MLFAB_I64,
       .op = MLFAB_OP_MEAN},
      {"4097 buffers, the limit is 4096", MLFAB_ERR_LIMIT, .n = 4097},
      {"99 is not an algorithm", MLFAB_ERR_ARGUMENT, .algorithm = 99},
      {"algorithm 5", MLFAB_ERR_UNSUPPORTED, .kind = BROADCAST, .algorithm = 5},
      {"element_bytes is 0", MLFAB_ERR_ARGUMENT, .reduces = 1},
      {"root 2 is not one of 2 workers", MLFAB_ERR_RANK_RANGE, .kind = BROADCAST, .root = 2},
  };
  begin_world(2, seed_of(5));
  crowd.config.model_max_bytes = 1 << 30;
  crowd_open();
  for (uint32_t k = 0; k < MLFAB__COUNT(rows); k++) {
    const struct row *row = &rows[k];
    const mlfab_collective options =
        SIZED(mlfab_collective, .op = row->op, .algorithm = row->algorithm,
              .reduce = row->reduces ? compose : NULL);
    const mlfab_vec apart[2] = {{data + 2, 1}, {data, 2}}, given[2] = {row->first, row->second};
    mlfab_request request;
    mlfab_error error;
    int code = mlfab_node_submit(
        crowd.nodes[0].node,
        &SIZED(mlfab_call, .kind = row->kind ? row->kind : MLFAB_CALL_ALLREDUCE,
               .options = &options,
               .vecs = row->n             ? many
                       : row->second.data ? given
                                          : apart,
               .n = row->n ? row->n : 2, .dtype = row->dtype ? row->dtype : MLFAB_F64, .data = data,
               .count = 8, .root = row->root, .counts = counts),
        crowd.now, &request);
    assert_int_equal(code, row->code);
    assert_int_equal(mlfab_node_last_error(crowd.nodes[0].node, &error), 0);
    if (!strstr(error.text, row->text)) fail_msg("'%s' has no '%s'", error.text, row->text);
  }
  crowd_pump(0);
  crowd_run(200 * CROWD_STEP);
  assert_int_equal(crowd.newest, 0);
  all_call(&plain_sum);
  assert_int_equal(crowd.newest, 1);
}

/* --- how much --- */

/* A root that nobody holds up waits for those who only receive. */
SCENE(test_ahead) {
  const shape cast = {.kind = MLFAB_CALL_BROADCAST, .width = 1, .count = 100, .root = 1};
  const worker *root = &w.workers[1];
  open_world(4, seed_of(12));
  all_call(&plain_sum);
  for (uint64_t end = crowd.now + 20 * CROWD_BEAT; crowd.now < end; crowd_step())
    if (root->nopen < OPEN) assert_int_equal(begin(1, &cast, 0), 0);
  assert_in_range(root->done, AHEAD, 2 * AHEAD);
  while (w.workers[0].index + w.workers[2].index + w.workers[3].index < 3 * root->index) {
    uint32_t i = chance(4);
    if (w.workers[i].index < root->index && w.workers[i].nopen < OPEN)
      assert_int_equal(begin(i, &cast, 0), 0);
    crowd_step();
  }
  settle();
  assert_int_equal(w.failed, 0);
}

/* Eager bytes are given back to their sender: many times its credit passes. */
SCENE(test_credit) {
  shape sum = OF(shape, .kind = MLFAB_CALL_ALLREDUCE, .algorithm = MLFAB_ALGORITHM_DOUBLING,
                 .dtype = MLFAB_I64, .width = 8, .count = EAGER / 8);
  begin_world(4, seed_of(14));
  crowd.config.chunk_bytes = 65536;
  crowd_open();
  for (uint32_t calls = 0; calls < 2 * (CREDIT / EAGER); calls += 8) {
    for (uint32_t k = 0; k < 8; k++) begin_all(&sum, 0);
    settle();
  }
  assert_int_equal(w.failed, 0);
}

/* Small messages are acknowledged by sixteen, and before a quarter of a beat is over. */
SCENE(test_acknowledges_seldom) {
  const shape cast = {.kind = MLFAB_CALL_BROADCAST, .width = 1, .count = 100, .root = 1};
  begin_world(2, seed_of(18));
  crowd.config.chunk_bytes = 65536;
  crowd_open();
  all_call(&cast);
  crowd_run(CROWD_BEAT);
  uint64_t acks = w.acks;
  for (uint32_t k = 0; k < 15; k++) all_call(&cast);
  assert_int_equal(w.acks, acks);
  all_call(&cast);
  crowd_run(20 * CROWD_STEP);
  assert_int_equal(w.acks, acks + 1);
  all_call(&cast);
  crowd_run(CROWD_BEAT / 2);
  assert_int_equal(w.acks, acks + 2);
  crowd_run(CROWD_BEAT);
  assert_int_equal(w.acks, acks + 2);
}

/* Trees of large arrays, several at a time. Few bytes wait until they can be added, whoever is slow, and all of them
 * pass. */
SCENE(test_windows) {
  shape sum = large_sum;
  for (uint64_t round = 0, rounds = test_cases_from(2, 4); round < rounds; round++) {
    uint64_t before[WORKERS], most = 0;
    begin_world(3 + (uint32_t)round % 4, seed_of(1400 + round));
    crowd.config.chunk_bytes = 65536;
    sum.algorithm = round % 2 ? MLFAB_ALGORITHM_PLANNED : MLFAB_ALGORITHM_TREE;
    add_scheduler(0);
    crowd_open();
    all_call(&plain_sum);
    for (uint32_t i = 0; i < crowd.n; i++) before[i] = crowd_stats(i).memory_bytes;
    sum.count = 200000 + chance(100000);
    for (uint32_t k = 0; k < 3; k++) begin_all(&sum, 0);
    uint64_t begun = crowd.now, done = w.finished + 3 * crowd.n;
    while (w.finished < done) {
      const uint32_t *ranks = crowd_epoch_of(1)->ranks;
      assert_true(crowd.now - begun < 200 * CROWD_BEAT);
      crowd_step();
      if (chance(2000) == 0) crowd_break_some();
      /* For a while nothing comes from the child that is added first. */
      if (crowd.now - begun < CROWD_BEAT && chance(20) == 0) crowd_part(ranks[1], ranks[0]);
      for (uint32_t i = 0; i < crowd.n && crowd.frames % 64 == 0; i++)
        most = mlfab__max(most, crowd_stats(i).memory_bytes - before[i]);
    }
    /* The windows, a pool of copies, and the runs' notes of each message. */
    assert_in_range(most, 256 << 10, WINDOWS + (4 << 20));
    assert_int_equal(w.failed, 0);
  }
}

/* Calls that repeat allocate nothing. */
SCENE(test_steady) {
  shape large = large_sum;
  uint64_t before = 0, after = 0;
  begin_world(5, seed_of(13));
  crowd.config.chunk_bytes = 4096;
  crowd_open();
  large.count = 12000; /* not eager */
  for (int round = 0; round < 400; round++) {
    begin_all(&plain_sum, 0);
    all_call(&large);
    for (uint32_t i = 0; i < 5 && round >= 300; i++) {
      if (round == 300) before += crowd_stats(i).allocations;
      if (round == 399) after += crowd_stats(i).allocations;
    }
  }
  print_message("%u allocations in 100 rounds of 5\n", (unsigned)(after - before));
  assert_in_range(after - before, 0, 20); /* queues that were never as long before */
}

/* Whatever allocation fails: the call, or all calls, with MEMORY; nothing hangs or leaks. */
SCENE(test_memory) {
  uint64_t failed = 0;
  for (uint64_t round = 0, rounds = test_cases_from(5, 20); round < rounds; round++) {
    begin_world(4, seed_of(70000 + round));
    crowd.config.timeout_ns = 40 * CROWD_BEAT;
    crowd_open();
    crowd.asked = chance(100);
    crowd.fails = 20 + chance(400);
    for (uint32_t k = 6000; k > 0; k--) {
      uint32_t i = chance(crowd.n);
      if (can_call(i) && chance(4) == 0) (void)begin(i, chance(3) ? NULL : &large_sum, 0);
      crowd_step();
    }
    failed += w.failed;
    crowd.fails = 0;
    crowd.asked = 1;
    crowd_run(200 * CROWD_BEAT);
    for (uint32_t i = 0; i < crowd.n; i++) assert_int_equal(w.workers[i].nopen, 0);
  }
  assert_true(failed > 0);
}

/* A list of members for which there is no memory is asked for again: nobody waits for that worker in vain. */
SCENE(test_list_lost) {
  open_world(3, seed_of(74000));
  w.lost_type = MLFAB__MEMBERSHIP_LIST;
  begin_all(&plain_sum, 20 * CROWD_BEAT);
  crowd_run(10 * CROWD_BEAT);
  assert_int_equal(w.lost_type, 0);
  assert_true(crowd.asked > 0);
  assert_int_equal(w.failed, 0);
  for (uint32_t i = 0; i < crowd.n; i++) assert_int_equal(w.workers[i].nopen, 0);
}

/* --- which algorithm --- */

static uint64_t longest; /* message of a collective, in bytes */

static int hear_longest(uint32_t from, uint32_t to, mlfab__header *header, uint8_t *meta,
                        const uint8_t *bulk) {
  mlfab__coll head;
  if (header->type == MLFAB__COLL && !mlfab__decode_coll(meta, header->meta_bytes, &head))
    longest = mlfab__max(longest, head.offset + header->bulk_bytes);
  return hear(from, to, header, meta, bulk);
}

/* Allreduces within a host, where all choose by the same constants. docs/decisions.md has the times by which these were
 * set. A worker sends everything in one message (DOUBLING), a half and parts of it (HALVING), or equal parts (RING): the
 * longest message tells. */
SCENE(test_choices_inside) {
  static const struct {
    uint32_t members, bytes, part;
  } rows[] = {
      {2, 4 << 10, 1}, {2, 32 << 10, 1}, {2, 256 << 10, 2}, {4, 32 << 10, 1}, {4, 64 << 10, 2},
      {4, 1 << 20, 4}, {8, 64 << 10, 2}, {8, 256 << 10, 2}, {8, 4 << 20, 8},
  };
  for (uint32_t i = 0; i < MLFAB__COUNT(rows); i++) {
    shape sum = plain_sum;
    begin_world(rows[i].members, seed_of(i));
    crowd.config.host = 1;
    crowd.config.chunk_bytes = 1 << 20;
    crowd.hear = hear_longest;
    crowd_open();
    sum.count = rows[i].bytes / 8;
    longest = 0;
    all_call(&sum);
    if (rows[i].bytes / rows[i].part <= 256 << 10) {
      assert_int_equal(longest, rows[i].bytes / rows[i].part);
    } else { /* in segments of parts */
      assert_true(longest <= 256 << 10);
    }
  }
}

/* --- frames that nobody may send --- */

static const struct bent {
  uint8_t type;
  int cut;                                               /* the meta has so many bytes */
  int64_t seq, offset, total, flags, received, consumed; /* what is added */
  const char *text;                                      /* of the receiver */
} bents[] = {
    {.type = MLFAB__COLL, .seq = 1, .text = "a collective's frame came before others"},
    {.type = MLFAB__COLL, .offset = 1, .text = "a collective's bytes beyond its end"},
    {.type = MLFAB__COLL, .offset = INT64_MIN, .text = "a collective's bytes beyond its end"},
    {.type = MLFAB__COLL, .total = -1, .text = "a collective's bytes beyond its end"},
    {.type = MLFAB__COLL, .flags = MLFAB__COLL_READY, .text = "a READY with bytes"},
    {.type = MLFAB__COLL, .cut = 3, .text = "a malformed COLL"},
    {.type = MLFAB__COLL_ACK, .cut = 3, .text = "a malformed COLL_ACK"},
    {.type = MLFAB__COLL_ACK, .received = 1000, .text = "an acknowledgement of frames never sent"},
    {.type = MLFAB__COLL_ACK, .received = -1, .text = "less than before"},
    {.type = MLFAB__COLL_ACK,
     .consumed = 1 << 20,
     .text = "an acknowledgement of frames never sent"},
    {.type = MLFAB__COLL_ACK, .consumed = -1, .text = "less than before"},
};
static const struct bent *bent; /* the next frame from worker 1 to 0, or back, is; NULL: none */

static int hear_bent(uint32_t from, uint32_t to, mlfab__header *header, uint8_t *meta,
                     const uint8_t *bulk) {
  mlfab__coll head;
  mlfab__coll_ack ack;
  if (!bent || header->type != bent->type) return hear(from, to, header, meta, bulk);
  if (header->type == MLFAB__COLL) {
    assert_int_equal(mlfab__decode_coll(meta, header->meta_bytes, &head), 0);
    if (header->bulk_bytes == 0 || head.offset + header->bulk_bytes < head.total)
      return hear(from, to, header, meta, bulk);
    head.seq += (uint64_t)bent->seq;
    head.offset += (uint64_t)bent->offset;
    head.total += (uint64_t)bent->total;
    head.flags |= (uint32_t)bent->flags;
    mlfab__encode_coll(meta, &head);
  } else {
    assert_int_equal(mlfab__decode_coll_ack(meta, header->meta_bytes, &ack), 0);
    if (ack.received == 0 || ack.consumed == 0) return hear(from, to, header, meta, bulk);
    /* Less than the same sender has acknowledged before. */
    if (bent->received < 0) ack.received = 0;
    if (bent->consumed < 0) ack.consumed = 0;
    if (bent->received > 0) ack.received += (uint64_t)bent->received;
    if (bent->consumed > 0) ack.consumed += (uint64_t)bent->consumed;
    mlfab__encode_coll_ack(meta, &ack);
  }
  if (bent->cut) header->meta_bytes = (uint32_t)bent->cut;
  bent = NULL;
  return 1;
}

/* The receiver gives the link up, and says why. The frame is sent again: the call ends well. */
SCENE(test_bent_frames) {
  const shape sum = OF(shape, .kind = MLFAB_CALL_ALLREDUCE, .algorithm = MLFAB_ALGORITHM_DOUBLING,
                       .dtype = MLFAB_I64, .width = 8, .count = 1000);
  for (uint32_t k = 0; k < MLFAB__COUNT(bents); k++) {
    begin_world(2, seed_of(600 + k));
    crowd.config.chunk_bytes = 4096;
    crowd.hear = hear_bent;
    crowd_open();
    for (uint32_t i = 0; i < 30; i++) all_call(&sum);
    crowd_run(CROWD_BEAT); /* all is acknowledged */
    uint64_t refused = crowd_stats(0).frames_refused + crowd_stats(1).frames_refused;
    assert_int_equal(refused, 0);
    bent = &bents[k];
    crowd.said[0] = 0;
    for (uint32_t i = 0; i < 40 && bent; i++) all_call(&sum);
    crowd_run(CROWD_BEAT);
    assert_null(bent);
    if (!strstr(crowd.said, bents[k].text)) fail_msg("'%s' has no '%s'", crowd.said, bents[k].text);
    w.refused = 1;
    for (uint32_t i = 0; i < 30; i++) all_call(&sum);
    assert_int_equal(w.failed, 0);
    refused = crowd_stats(0).frames_refused + crowd_stats(1).frames_refused;
    assert_int_equal(refused, 1);
  }
}
