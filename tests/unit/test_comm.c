/* test_comm.c - collectives between workers: the communicators of up to 16 workers and the membership
 * of server 0, over links that are slow, break, and end with their worker.
 *
 * Oracles: every result is compared with the literal sum over the members of the epoch, in their
 * order. Workers run the same program of calls, which begins anew with every failure that they
 * see: one that missed a failure, or saw it twice, would call something else than the others.
 * What a link has been lent must not have changed when it is read, which here is as late as can
 * be: at delivery. */
#include "core/coll/comm.h"
#include "links.h"
#include "scale.h"

enum {
  WORKERS = 16,
  OPEN = 16,   /* calls of a worker that are open */
  BUFS = 6,    /* of a list */
  EPOCHS = 512 /* remembered */
};

typedef struct shape { /* a call of the program */
  uint8_t kind, algorithm, ordered, user;
  int dtype, op;
  uint32_t width;
  uint64_t count;
  int32_t root;
  uint32_t opens; /* an object */
} shape;

typedef struct open_call { /* that is open */
  shape what;
  uint64_t index;
  mlfab_request request;
  uint8_t *bufs[BUFS];
  uint64_t lengths[BUFS]; /* elements */
  uint32_t n;
  uint64_t counts[WORKERS];
} open_call;

typedef struct worker {
  MEMBER_FIELDS;
  /* Its program. */
  uint64_t generation;          /* failures that it has seen */
  uint64_t index, done;         /* calls begun and finished since the last of them */
  uint64_t generations[EPOCHS]; /* plus one, by epoch */
  open_call open[OPEN];
  uint32_t nopen;
  int32_t code, rank; /* of the last failure */
  char text[320];
} worker;

typedef struct world {
  WORLD_FIELDS(WORKERS); /* to_scheduler: it answers with trees that are drawn */
  uint32_t silent;       /* so many of its answers in 16 never come, and ... */
  uint32_t wrong;        /* ... so many are no trees */
  uint64_t planned, refused;
  uint64_t seed;
  uint32_t most;    /* elements of a call */
  int plain;        /* only what every number of members can do, and any may die */
  uint32_t outside; /* bit r: calls of rank r are outside ones */
  uint64_t finished, failed;
} world;

#include "members.h"

static uint64_t seed_of(uint64_t base) {
  const char *text = getenv("MLFAB_SEED");
  return base + (text ? strtoull(text, NULL, 10) : 0);
}

static int scaled(int least, double full) {
  return (int)test_cases_from((uint64_t)least, full / 100);
}

static void dropped(const void *self, uint32_t peer, const char *text) {
  if (self == w && peer == w->n) {
    assert_string_equal(text, "no tree in a TREE_PLAN");
    w->refused++;
    return;
  }
  if (!w->asked) print_message("dropped: %s\n", text);
  w->drops++;
}

/* --- the world --- */

static void open_worker(uint32_t rank) {
  worker *me = &w->workers[rank];
  open_member(rank);
  me->nopen = 0;
  me->index = me->done = 0;
}

static void open_world(uint32_t n, uint64_t seed) {
  open_links(n, seed);
  w->seed = seed;
  w->most = 2000;
  for (uint32_t i = 0; i < n; i++) open_worker(i);
}

/* Allreduces of so many bytes and more are planned. */
static void add_scheduler(uint32_t bytes) {
  w->config.scheduler = MLFAB_SCHEDULER_BESIDE;
  w->config.eager_bytes = bytes;
  mlfab__trees_scheduler(&w->trees, 1);
}

static void forget_call(worker *me, uint32_t i) {
  for (uint32_t k = 0; k < me->open[i].n; k++) free(me->open[i].bufs[k]);
  me->open[i] = me->open[--me->nopen];
}

static void kill_worker(uint32_t rank) {
  worker *me = &w->workers[rank];
  if (!kill_member(rank)) return;
  while (me->nopen > 0) forget_call(me, 0);
}

static void close_world(void) {
  w->fails = 0;
  for (uint32_t i = 0; i < w->n; i++) kill_worker(i);
  close_links();
}

/* --- the program --- */

/* A reducer that does not commute: maps x -> a x + b, one after the other, and how many they
 * are. */
typedef struct affine {
  uint32_t a, b, n;
} affine;

static void compose(void *user, void *inout, const void *in, uint64_t count) {
  const affine *left = in;
  affine *right = inout;
  assert_ptr_equal(user, w);
  for (uint64_t i = 0; i < count; i++) {
    affine both = {left[i].a * right[i].a, left[i].a * right[i].b + left[i].b,
                   left[i].n + right[i].n};
    right[i] = both;
  }
}

/* The call number `index` since the last failure, the same for all. */
static shape program(uint64_t index) {
  static const int dtypes[] = {MLFAB_I64, MLFAB_F32, MLFAB_F64, MLFAB_F16, MLFAB_BF16, MLFAB_I64};
  uint64_t r[8];
  shape call = {0};
  for (uint32_t i = 0; i < 8; i++) r[i] = mlfab__mix(w->seed * 1000003 + index * 8 + i) >> 16;
  call.kind = (uint8_t)(MLFAB__COLLECTIVE_ALLREDUCE + r[0] % 5);
  if (r[0] / 8 % 3 == 0) call.kind = MLFAB__COLLECTIVE_ALLREDUCE;
  call.count = 1 + r[1] % (r[2] % 4 ? 40 : w->most);
  call.root = w->plain ? 0 : (int32_t)(r[3] % w->n);
  call.dtype = dtypes[r[4] % MLFAB__COUNT(dtypes)];
  call.op = (int)(r[5] % 5);
  if (call.op == MLFAB_OP_PRODUCT && call.dtype != MLFAB_F64) call.dtype = MLFAB_I64;
  if (call.op == MLFAB_OP_MEAN) call.dtype = r[5] & 64 ? MLFAB_F32 : MLFAB_F64;
  call.width = mlfab__element_bytes(call.dtype);
  call.user = call.kind <= MLFAB__COLLECTIVE_REDUCE_SCATTER && r[6] % 5 == 0;
  call.ordered = call.user;
  if (call.user) {
    call.width = sizeof(affine);
    call.dtype = 99; /* not looked at */
  } else if (call.kind == MLFAB__COLLECTIVE_ALLREDUCE) {
    call.algorithm = (uint8_t)(r[7] % 6);
  }
  if (call.kind == MLFAB__COLLECTIVE_BROADCAST) {
    call.dtype = 0;
    call.width = 1;
  }
  if (call.kind == MLFAB__COLLECTIVE_BARRIER) call.count = 0;
  return call;
}

/* Elements of a rank's block; those of ranks that may die are 0. */
static void blocks_of(const shape *what, uint64_t index, uint64_t *counts) {
  uint64_t left = what->count;
  for (uint32_t r = 0; r < w->n; r++) {
    counts[r] = left ? mlfab__mix(w->seed + 31 * index + r) % (left + 1) : 0;
    if (r > 0 && w->plain) counts[r] = 0;
    left -= counts[r];
  }
  counts[0] += left;
}

/* Element i of what a worker brings: small whole numbers, so that all sums of floats are exact. */
static void element(const shape *what, uint32_t rank, uint64_t generation, uint64_t index,
                    uint64_t i, uint8_t *to) {
  uint64_t x = mlfab__mix(((rank * 1009 + generation) * 10007 + index) * 100003 + i);
  int64_t small = (int64_t)(x % 9) - 4;
  if (what->op == MLFAB_OP_PRODUCT) small = x & 1 ? 2 : 1;
  if (what->user) {
    const affine map = {(uint32_t)x | 1, (uint32_t)(x >> 32), 1};
    memcpy(to, &map, sizeof map);
  } else if (what->dtype == 0) {
    *to = (uint8_t)x;
  } else if (what->dtype == MLFAB_I64) {
    memcpy(to, &small, 8);
  } else if (what->dtype == MLFAB_F64) {
    double wide = (double)small;
    memcpy(to, &wide, 8);
  } else {
    float narrow = (float)small;
    uint32_t bits;
    memcpy(&bits, &narrow, 4);
    if (what->dtype == MLFAB_F32) memcpy(to, &narrow, 4);
    if (what->dtype == MLFAB_BF16) memcpy(to, (uint8_t *)&bits + 2, 2);
    if (what->dtype == MLFAB_F16) {
      /* -4 .. 4 */
      static const uint16_t halves[] = {0xc400, 0xc200, 0xc000, 0xbc00, 0,
                                        0x3c00, 0x4000, 0x4200, 0x4400};
      memcpy(to, &halves[small + 4], 2);
    }
  }
}

/* Whose elements are where in the call's data. */
static uint32_t owner_of(const uint64_t *counts, uint64_t i) {
  uint32_t r = 0;
  while (i >= counts[r]) i -= counts[r++];
  return r;
}

static uint8_t *place(const open_call *c, uint64_t i) {
  uint32_t k = 0;
  while (i >= c->lengths[k]) i -= c->lengths[k++];
  return c->bufs[k] + i * c->what.width;
}

static int brings(const open_call *c, uint32_t rank, uint64_t i) {
  if (c->what.kind == MLFAB__COLLECTIVE_BROADCAST) return (int32_t)rank == c->what.root;
  if (c->what.kind == MLFAB__COLLECTIVE_ALLGATHER) return owner_of(c->counts, i) == rank;
  return 1;
}

/* Literal: element i of the result. */
static void expected(const worker *me, const open_call *c, uint64_t i, uint8_t *to) {
  const shape *what = &c->what;
  uint32_t adds = 0;
  for (uint32_t m = 0; m < me->comm.members; m++) {
    uint32_t rank = me->comm.ranks[m];
    uint64_t generation = w->workers[rank].generations[me->comm.epoch % EPOCHS];
    uint8_t x[16] = {0};
    uint64_t aligned[2];
    if (!brings(c, rank, i)) continue;
    assert_int_not_equal(generation, 0);
    element(what, rank, generation - 1, c->index, i, x);
    memcpy(aligned, x, sizeof x);
    if (adds++ == 0) {
      memcpy(to, aligned, what->width);
    } else if (what->user) {
      compose(w, aligned, to, 1);
      memcpy(to, aligned, what->width);
    } else {
      mlfab__kernel_combine(what->op, what->dtype, to, to, aligned, 1, 0);
    }
  }
  if (what->kind <= MLFAB__COLLECTIVE_REDUCE_SCATTER && what->op == MLFAB_OP_MEAN && !what->user)
    mlfab__kernel_divide(what->dtype, to, 1, adds);
}

static void expect_result(const worker *me, const open_call *c) {
  uint32_t rank = rank_of(me);
  for (uint64_t i = 0; i < c->what.count; i++) {
    uint64_t right[2] = {0, 0};
    if (c->what.kind == MLFAB__COLLECTIVE_REDUCE_SCATTER && owner_of(c->counts, i) != rank)
      continue;
    expected(me, c, i, (uint8_t *)right);
    if (memcmp(place(c, i), right, c->what.width) != 0)
      fail_msg("worker %u, call %u (kind %u, algorithm %u): element %u is wrong", rank,
               (unsigned)c->index, c->what.kind, c->what.algorithm, (unsigned)i);
  }
}

/* Its own cut of the array. Blocks lie together. */
static void make_buffers(worker *me, open_call *c) {
  uint64_t left = c->what.count;
  int blocks = c->what.kind == MLFAB__COLLECTIVE_REDUCE_SCATTER ||
               c->what.kind == MLFAB__COLLECTIVE_ALLGATHER;
  blocks_of(&c->what, c->index, c->counts);
  c->n = blocks ? 1 : 1 + chance(BUFS);
  for (uint32_t k = 0; k < c->n; k++) {
    c->lengths[k] = k + 1 == c->n ? left : chance((uint32_t)left + 1);
    c->bufs[k] = malloc(c->lengths[k] * c->what.width + 1);
    assert_non_null(c->bufs[k]);
    left -= c->lengths[k];
  }
  for (uint64_t i = 0; i < c->what.count; i++) {
    if (brings(c, rank_of(me), i))
      element(&c->what, rank_of(me), me->generation, c->index, i, place(c, i));
  }
}

static mlfab__comm_call call_of(const open_call *c, mlfab_vec *vecs) {
  int blocks = c->what.kind == MLFAB__COLLECTIVE_REDUCE_SCATTER ||
               c->what.kind == MLFAB__COLLECTIVE_ALLGATHER;
  for (uint32_t k = 0; k < c->n; k++) vecs[k] = (mlfab_vec){c->bufs[k], c->lengths[k]};
  return (mlfab__comm_call){.kind = c->what.kind,
                            .algorithm = c->what.algorithm,
                            .ordered = c->what.ordered,
                            .dtype = c->what.dtype,
                            .op = c->what.op,
                            .width = c->what.user ? c->what.width : 0,
                            .reduce = c->what.user ? compose : NULL,
                            .reduce_user = w,
                            .vecs = vecs,
                            .n = c->what.kind == MLFAB__COLLECTIVE_BARRIER ? 0 : c->n,
                            .counts = blocks ? c->counts : NULL,
                            .root = c->what.root,
                            .opens = c->what.opens,
                            .words = "a collective"};
}

/* Which of its data the present epoch sees: a failure that was owed is seen with the next call. */
static void note_epoch(worker *me) {
  if (mlfab__comm_stands(&me->comm)) me->generations[me->comm.epoch % EPOCHS] = me->generation + 1;
}

static void saw_failure(worker *me, int32_t code, int32_t rank, const char *text) {
  if (getenv("MLFAB_SHOW"))
    print_message("worker %u, %u: %s\n", rank_of(me), (unsigned)w->now, text);
  me->generation++;
  me->index = me->done = 0;
  me->code = code;
  me->rank = rank;
  snprintf(me->text, sizeof me->text, "%s", text);
  w->failed++;
}

/* Begins the next call of the program, or what it is changed to. Returns the code. */
static int begin(worker *me, const shape *other, uint64_t timeout_ns) {
  open_call *c = &me->open[me->nopen];
  mlfab_vec vecs[BUFS];
  mlfab_error error = {0};
  memset(c, 0, sizeof *c);
  c->index = me->index;
  c->what = other ? *other : program(c->index);
  make_buffers(me, c);
  mlfab__comm_call call = call_of(c, vecs);
  call.outside = w->outside >> rank_of(me) & 1;
  int code = mlfab__comm_start(&me->comm, &call, timeout_ns, w->now, &c->request, &error);
  if (code) {
    for (uint32_t k = 0; k < c->n; k++) free(c->bufs[k]);
    int again = code == MLFAB_ERR_AGAIN && strstr(error.text, "under way");
    int memory = code == MLFAB_ERR_MEMORY && error.rank == MLFAB_NO_RANK;
    if (!again && !memory && code != MLFAB_ERR_STATE) /* else nothing was called */
      saw_failure(me, code, error.rank, error.text);
    return code;
  }
  me->nopen++;
  me->index++;
  note_epoch(me);
  look(me);
  return 0;
}

/* Takes note of requests that are done. All that are open fail together. */
static void look(worker *me) {
  int32_t code = 0, rank = 0;
  note_epoch(me);
  for (uint32_t i = 0; i < me->nopen;) {
    mlfab__request *request = mlfab__request_find(&me->requests, me->open[i].request);
    assert_non_null(request);
    if (!request->done) {
      i++;
      continue;
    }
    if (request->result.status) {
      code = request->result.status;
      rank = request->result.rank;
    } else {
      expect_result(me, &me->open[i]);
      me->done++;
      w->finished++;
    }
    mlfab__request_end(&me->requests, request);
    for (uint32_t k = 0; k < me->open[i].n; k++)
      memset(me->open[i].bufs[k], 0xEE, me->open[i].lengths[k] * me->open[i].what.width);
    forget_call(me, i);
  }
  if (!code) return;
  assert_int_equal(me->nopen, 0);
  saw_failure(me, code, rank, me->requests.last.text);
}

/* --- what happens --- */

/* Somebody above node i of a list, in a tree whose ways are of any length. */
static uint32_t above(const uint32_t *ranks, uint32_t i) {
  return i == 0 ? MLFAB__NO_NODE : ranks[chance(i)];
}

/* The scheduler answers a question, mostly. */
static void answer_plan(void) {
  message m = pipe_take(&w->to_scheduler);
  mlfab__tree_ask ask;
  mlfab__tree_node nodes[WORKERS];
  uint32_t up[WORKERS], down[WORKERS];
  uint8_t meta[64 + 12 * WORKERS];
  assert_int_equal(mlfab__decode_tree_ask(m.meta, m.meta_bytes, &ask, up), 0);
  message_free(&m);
  assert_in_range(ask.nodes, 3, w->n);
  mlfab__tree_plan plan = {ask.number, chance(16) ? ask.nodes : 0};
  for (uint32_t way = 0; way < 2; way++) { /* the root first, the others in any order */
    uint32_t *ranks = way ? down : up, at = 0;
    if (way) memcpy(down, up, sizeof up);
    for (uint32_t i = ask.nodes - 1; i > 0; i--) {
      uint32_t k = chance(i + 1), rank = ranks[i];
      ranks[i] = ranks[k];
      ranks[k] = rank;
    }
    while (ranks[at] != ask.root) at++;
    ranks[at] = ranks[0];
    ranks[0] = ask.root;
  }
  for (uint32_t i = 0; i < ask.nodes; i++) {
    uint32_t k = 0;
    while (down[k] != up[i]) k++;
    nodes[i] = (mlfab__tree_node){up[i], above(up, i), above(down, k)};
  }
  for (uint32_t i = ask.nodes - 1; i > 0; i--) { /* the list is in an order of its own */
    uint32_t k = chance(i + 1);
    mlfab__tree_node node = nodes[i];
    nodes[i] = nodes[k];
    nodes[k] = node;
  }
  if (chance(16) < w->wrong) {
    uint32_t *fields[] = {&nodes[0].worker, &nodes[0].parent, &nodes[0].giver};
    *fields[chance(3)] = chance(3) ? nodes[0].worker : w->n + chance(3);
  }
  mlfab__frame_in frame = {MLFAB__TREE_PLAN, mlfab__encode_tree_plan(meta, &plan, nodes), 0, meta,
                           NULL};
  if (chance(16) < w->silent) return;
  w->planned += plan.nodes > 0;
  assert_int_equal(mlfab__trees_scheduler_frame(&w->trees, &frame), 1);
}

static int act(void) {
  if (w->to_scheduler.count > 0 && chance(8) == 0) answer_plan();
  return act_any();
}

/* Everybody calls on until each has finished `calls` since the last failure that it saw. A call
 * that is known to fail is counted with `stop`. */
static int all_done(uint64_t calls) {
  for (uint32_t i = 0; i < w->n; i++) {
    if (w->workers[i].alive && w->workers[i].done < calls) return 0;
  }
  return 1;
}

/* What hangs. */
static void explain(void) {
  print_message("%u workers, seed %llu\n", w->n, (unsigned long long)w->seed);
  for (uint32_t i = 0; i < w->n; i++) {
    const worker *me = &w->workers[i];
    print_message("worker %u: phase %d, epoch %u, %u done, %u begun, %u failures, code %d\n", i,
                  me->comm.phase, me->comm.epoch, (unsigned)me->done, (unsigned)me->index,
                  (unsigned)me->generation, me->code);
    for (const mlfab__engine_run *run = me->comm.engine.armed; me->alive && run; run = run->next)
      print_message("  call %u: kind %u, eager %u, lent %u, awaits %d\n", (unsigned)run->number,
                    program(run->number).kind, run->eager, run->lent,
                    mlfab__engine_awaits(&me->comm, run));
  }
}

static void run(uint64_t calls, int breaks) {
  uint64_t end = w->now + 2000000;
  while (!all_done(calls)) {
    if (w->now >= end) explain();
    assert_true(w->now < end);
    worker *me = &w->workers[chance(w->n)];
    if (me->alive && me->index < calls && me->nopen < OPEN && chance(4) == 0)
      (void)begin(me, NULL, 0);
    if (breaks && chance(600) == 0) break_hop(chance(w->n), chance(w->n));
    if (breaks && chance(3000) == 0) {
      uint32_t rank = chance(w->n);
      if (w->workers[rank].alive) break_up(rank);
    }
    (void)act();
  }
}

static void expect_calm(void) {
  for (uint32_t i = 0; i < w->n; i++) {
    worker *me = &w->workers[i];
    if (!me->alive) continue;
    assert_int_equal(me->nopen, 0);
    assert_null(me->comm.engine.armed);
    assert_int_equal(me->comm.engine.stage_count, 0);
    assert_int_equal(me->requests.open, 0);
  }
}

/* --- without failures --- */

static void test_calls(void **state) {
  (void)state;
  int rounds = scaled(16, 6400);
  uint64_t finished = 0;
  for (int round = 0; round < rounds; round++) {
    open_world(1 + (uint32_t)round % WORKERS, seed_of(1000 + (uint64_t)round));
    if (round % 10 == 0) w->most = 30000;
    if (round % 3) add_scheduler(chance(4000));
    w->silent = round % 4 == 0;
    run(20 + chance(60), round % 2);
    expect_calm();
    assert_int_equal(w->failed, 0);
    assert_int_equal(w->drops, 0);
    finished += w->finished;
    close_world();
  }
  print_message("%u collectives\n", (unsigned)finished);
}

/* --- failures --- */

static void step(uint32_t n) {
  while (n-- > 0) (void)act();
}

/* A worker's process ends; server 0 hears of it a little later. */
static void die(uint32_t rank) {
  uint64_t heard = w->now + chance(2 * BEAT);
  kill_worker(rank);
  while (w->now < heard) (void)act();
  mlfab__membership_gone(&w->membership, rank, 0, w->now);
}

static void cancel(worker *me) {
  mlfab__request *r = mlfab__request_find(&me->requests, me->open[chance(me->nopen)].request);
  w->merged += me->comm.untold;
  mlfab__comm_withdraw(&me->comm, r, MLFAB_ERR_CANCELLED, w->now);
  look(me);
}

/* Something that fails. Workers 0 and 1 are spared. */
static void spoil(void) {
  uint32_t rank = 2 + chance(w->n - 2);
  worker *me = &w->workers[rank];
  switch (chance(5)) {
    case 0:
      if (me->alive) die(rank);
      break;
    case 1:
      if (!me->alive) open_worker(rank);
      break;
    case 2: /* a new process, at once */
      kill_worker(rank);
      open_worker(rank);
      break;
    case 3:
      me = &w->workers[chance(w->n)];
      if (me->alive && me->nopen > 0) cancel(me);
      break;
    default:
      me = &w->workers[chance(w->n)];
      if (me->alive && me->nopen < OPEN) (void)begin(me, NULL, 1 + chance(BEAT));
  }
}

/* All who live through it see every failure once: the same numbers of the same program follow, and
 * nothing differs in shape. */
static void test_failures(void **state) {
  (void)state;
  int rounds = scaled(10, 3000);
  uint64_t finished = 0, failed = 0;
  for (int round = 0; round < rounds; round++) {
    open_world(3 + (uint32_t)round % 8, seed_of(50000 + (uint64_t)round));
    w->plain = 1;
    if (round % 3) add_scheduler(chance(4000));
    w->silent = round % 4 == 0;
    w->wrong = round % 5 == 0;
    for (int bad = 0; bad < 6; bad++) {
      for (uint32_t k = 400 + chance(4000); k > 0; k--) {
        worker *me = &w->workers[chance(w->n)];
        if (me->alive && me->nopen < OPEN && chance(4) == 0) (void)begin(me, NULL, 0);
        if (chance(600) == 0) break_hop(chance(w->n), chance(w->n));
        if (me->alive && chance(1000) == 0) break_up(rank_of(me));
        (void)act();
      }
      spoil();
    }
    /* Those that are ahead end as well. */
    uint64_t calls = 0;
    for (uint32_t i = 0; i < w->n; i++) calls = mlfab__max(calls, w->workers[i].index);
    run(calls + 20, round % 2);
    expect_calm();
    for (uint32_t i = 0; i < w->n; i++) {
      if (w->workers[i].alive && w->workers[i].generation > 0)
        assert_int_not_equal(w->workers[i].code, MLFAB_ERR_MISMATCH);
    }
    if (!w->merged) assert_int_equal(w->workers[0].generation, w->workers[1].generation);
    assert_int_equal(w->drops, 0);
    finished += w->finished;
    failed += w->failed;
    close_world();
  }
  print_message("%u collectives, %u failures seen\n", (unsigned)finished, (unsigned)failed);
}

/* The link to server 0 breaks all the time, also between a failure, its verdict and what comes
 * then. */
static void test_server_links(void **state) {
  (void)state;
  int rounds = scaled(20, 3000);
  for (int round = 0; round < rounds; round++) {
    open_world(2 + (uint32_t)round % 4, seed_of(90000 + (uint64_t)round));
    for (uint32_t k = 6000; k > 0; k--) {
      worker *me = &w->workers[chance(w->n)];
      if (me->nopen < OPEN && chance(4) == 0) (void)begin(me, NULL, 0);
      if (chance(200) == 0 && me->nopen > 0 && !me->comm.untold) cancel(me);
      if (chance(8) == 0) break_up(rank_of(me));
      (void)act();
    }
    uint64_t calls = 0;
    for (uint32_t i = 0; i < w->n; i++) calls = mlfab__max(calls, w->workers[i].index);
    run(calls + 20, 0);
    expect_calm();
    for (uint32_t i = 0; i < w->n; i++) {
      if (!w->merged) assert_int_equal(w->workers[i].generation, w->workers[0].generation);
      assert_int_not_equal(w->workers[i].code, MLFAB_ERR_MISMATCH);
    }
    close_world();
  }
}

/* --- one failure at a time --- */

static void settle(void) {
  uint64_t end = w->now + 1000000;
  for (int open = 1; open;) {
    if (w->now >= end) explain();
    assert_true(w->now < end);
    (void)act();
    open = 0;
    for (uint32_t i = 0; i < w->n; i++) open |= w->workers[i].nopen > 0;
  }
}

static const shape plain_sum = {
    .kind = MLFAB__COLLECTIVE_ALLREDUCE, .dtype = MLFAB_F64, .width = 8, .count = 100};
static const shape large_sum = {
    .kind = MLFAB__COLLECTIVE_ALLREDUCE, .dtype = MLFAB_I64, .width = 8, .count = 20000};

static void begin_all(const shape *what, uint64_t timeout_ns) {
  for (uint32_t i = 0; i < w->n; i++) {
    if (w->workers[i].alive) assert_int_equal(begin(&w->workers[i], what, timeout_ns), 0);
  }
}

static void expect_all(uint64_t generation, int32_t code, int32_t rank, const char *text) {
  for (uint32_t i = 0; i < w->n; i++) {
    const worker *me = &w->workers[i];
    if (!me->alive) continue;
    assert_int_equal(me->generation, generation);
    assert_int_equal(me->code, code);
    assert_int_equal(me->rank, rank);
    if (!strstr(me->text, text)) fail_msg("'%s' has no '%s'", me->text, text);
  }
}

/* Who differs is named on all ranks, with both calls in words, and at once: within a few beats. */
static void test_shapes(void **state) {
  (void)state;
  for (uint32_t odd = 0; odd < 4; odd++) {
    open_world(4, seed_of(6 + odd));
    shape other = plain_sum;
    if (odd == 0) other.count++;
    if (odd == 1) other.dtype = MLFAB_I64;
    if (odd == 2) other.op = MLFAB_OP_MAX;
    if (odd == 3) other = large_sum;
    begin_all(&plain_sum, 0);
    settle();
    uint64_t start = w->now;
    for (uint32_t i = 0; i < 4; i++)
      assert_int_equal(begin(&w->workers[i], i == odd ? &other : &plain_sum, 0), 0);
    settle();
    expect_all(1, MLFAB_ERR_MISMATCH, (int32_t)odd, "a collective of 100 F64 (SUM)");
    assert_true(w->now - start < BEAT); /* not by the look at the clock */
    begin_all(&plain_sum, 0);
    settle();
    expect_all(1, MLFAB_ERR_MISMATCH, (int32_t)odd, "");
    close_world();
  }
}

/* A deadline names who has not called, before there is an epoch and in it. Who had not called
 * sees it with the next call. */
static void test_deadlines(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 20; seed++) {
    open_world(5, seed_of(100 + seed));
    if (seed % 2) {
      begin_all(&plain_sum, 0);
      settle();
    }
    for (uint32_t i = 0; i < 5; i++) {
      uint64_t timeout = i == 1 ? 10 * BEAT : 0;
      if (i != 3) assert_int_equal(begin(&w->workers[i], &large_sum, timeout), 0);
    }
    uint64_t end = w->now + 30 * BEAT;
    while (w->now < end) (void)act();
    if (seed % 2 == 0) {
      /* Told when the last one comes. */
      assert_int_equal(w->workers[1].code, MLFAB_ERR_TIMEOUT);
      assert_int_equal(w->workers[0].nopen, 1);
      assert_int_equal(begin(&w->workers[3], &plain_sum, 0), 0);
      settle();
    } else {
      assert_int_equal(w->workers[3].generation, 0);
      assert_int_equal(begin(&w->workers[3], &large_sum, 0), MLFAB_ERR_TIMEOUT);
    }
    expect_all(1, MLFAB_ERR_TIMEOUT, 3, "worker 1's deadline passed after");
    expect_all(1, MLFAB_ERR_TIMEOUT, 3,
               seed % 2 ? "worker 3 has not called it" : "takes no part yet");
    begin_all(&plain_sum, 0);
    settle();
    expect_all(1, MLFAB_ERR_TIMEOUT, 3, "");
    close_world();
  }
}

/* What is begun while a failure is still to be told belongs to the next epoch; also when it fails
 * before that stands. */
static void test_failure_after_failure(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 40; seed++) {
    open_world(3, seed_of(200 + seed));
    begin_all(&plain_sum, 0);
    settle();
    begin_all(&large_sum, 0);
    step(chance(60));
    for (uint32_t k = 0; k < 2; k++) {
      worker *me = &w->workers[0];
      if (me->nopen == 0 && begin(me, &large_sum, 0)) continue;
      if (me->nopen > 0) cancel(me);
    }
    settle();
    run(30, (int)seed % 2);
    assert_true(w->workers[0].generation >= 1);
    assert_int_equal(w->workers[1].generation, w->workers[0].generation);
    assert_int_equal(w->workers[2].generation, w->workers[0].generation);
    close_world();
  }
}

static void test_not_finite(void **state) {
  (void)state;
  open_world(3, seed_of(9));
  double bad[4] = {1, 2, 1e308 * 10, 4};
  const mlfab_vec vec = {bad, 4};
  mlfab__comm_call call = {.kind = MLFAB__COLLECTIVE_ALLREDUCE,
                           .dtype = MLFAB_F64,
                           .refuse_nan = 1,
                           .vecs = &vec,
                           .n = 1,
                           .words = "an allreduce"};
  mlfab_request request = 0;
  mlfab_error error = {0};
  worker *me = &w->workers[2];
  /* Before any epoch, in one, and where there is no arena for a call outside, whose numbers are looked at late. */
  for (int round = 1; round <= 3; round++) {
    for (uint32_t i = 0; i < 2; i++) assert_int_equal(begin(&w->workers[i], &plain_sum, 0), 0);
    if (round == 2) step(200);
    call.outside = round == 3;
    int code = mlfab__comm_start(&me->comm, &call, 0, w->now, &request, &error);
    assert_int_equal(code, call.outside ? 0 : MLFAB_ERR_NOT_FINITE);
    if (code) {
      assert_int_equal(error.rank, 2);
      saw_failure(me, code, 2, error.text);
    } else {
      me->open[me->nopen++] = (open_call){.request = request};
      look(me);
    }
    settle();
    expect_all((uint64_t)round, MLFAB_ERR_NOT_FINITE, 2, "NaN or infinity");
    begin_all(&plain_sum, 0);
    settle();
  }
  expect_all(3, MLFAB_ERR_NOT_FINITE, 2, "");
  close_world();
}

/* Who leaves in good order ends nothing that it has called. */
static void test_leaving(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 30; seed++) {
    open_world(4, seed_of(300 + seed));
    worker *me = &w->workers[2];
    begin_all(&large_sum, 0);
    begin_all(&plain_sum, 0);
    if (seed % 3) step(chance(400));
    mlfab__comm_leave(&me->comm);
    look(me);
    if (seed % 3 == 0) { /* it never was a member */
      assert_int_equal(me->code, MLFAB_ERR_CANCELLED);
      settle();
      kill_worker(2);
      mlfab__membership_gone(&w->membership, 2, 1, w->now);
    } else {
      assert_int_equal(begin(me, &plain_sum, 0), MLFAB_ERR_STATE);
      settle();
      while (!mlfab__comm_quiet(&me->comm)) (void)act();
      step(50);
      kill_worker(2);
      mlfab__membership_gone(&w->membership, 2, 1, w->now);
      assert_int_equal(w->workers[0].generation + w->workers[1].generation, 0);
      begin_all(&large_sum, 0);
      settle();
      expect_all(1, MLFAB_ERR_PEER_CLOSED, 2, "worker 2 has left");
    }
    begin_all(&plain_sum, 0);
    settle();
    assert_int_equal(w->workers[0].comm.members, 3);
    close_world();
  }
}

/* A death while nothing is called is seen with the next call, once. */
static void test_owed(void **state) {
  (void)state;
  open_world(4, seed_of(11));
  begin_all(&plain_sum, 0);
  settle();
  die(3);
  step(2000);
  expect_all(0, 0, 0, "");
  for (uint32_t i = 0; i < 3; i++)
    assert_int_equal(begin(&w->workers[i], &plain_sum, 0), MLFAB_ERR_PEER_DEAD);
  expect_all(1, MLFAB_ERR_PEER_DEAD, 3, "worker 3 is dead");
  begin_all(&plain_sum, 0);
  settle();
  expect_all(1, MLFAB_ERR_PEER_DEAD, 3, "");
  /* Ranks that are dead. */
  shape bad = {.kind = MLFAB__COLLECTIVE_BROADCAST, .width = 1, .count = 5, .root = 3};
  assert_int_equal(begin(&w->workers[1], &bad, 0), MLFAB_ERR_ARGUMENT);
  assert_non_null(strstr(w->workers[1].text, "worker 3 does not take part"));
  /* Server 0. */
  assert_int_equal(begin(&w->workers[0], &plain_sum, 0), 0);
  mlfab__comm_dead(&w->workers[0].comm, w->now);
  look(&w->workers[0]);
  assert_int_equal(w->workers[0].code, MLFAB_ERR_PEER_DEAD);
  assert_int_equal(w->workers[0].requests.last.is_server, 1);
  assert_int_equal(begin(&w->workers[0], &plain_sum, 0), MLFAB_ERR_PEER_DEAD);
  close_world();
}

/* A worker that lives and cannot be reached by the others is named after some heartbeats. */
static void test_unreachable(void **state) {
  (void)state;
  open_world(4, seed_of(15));
  w->hidden = 3;
  begin_all(&plain_sum, 0);
  uint64_t start = w->now;
  settle();
  step(200);
  for (uint32_t i = 0; i < 4; i++) { /* who needs nothing from it has got its result */
    if (w->workers[i].generation == 0)
      assert_int_equal(begin(&w->workers[i], &plain_sum, 0), MLFAB_ERR_PEER_DEAD);
  }
  expect_all(1, MLFAB_ERR_PEER_DEAD, 2, "worker 2 cannot be reached, says worker ");
  assert_in_range(w->now - start, MLFAB__COMM_PATIENCE * BEAT, (MLFAB__COMM_PATIENCE + 60) * BEAT);
  w->hidden = 0;
  begin_all(&plain_sum, 0);
  settle();
  expect_all(1, MLFAB_ERR_PEER_DEAD, 2, "");
  close_world();
}

static int refused(mlfab__comm_call call, const char *text) {
  mlfab_request request;
  mlfab_error error = {0};
  call.words = "it";
  int code = mlfab__comm_start(&w->workers[0].comm, &call, 0, w->now, &request, &error);
  if (!strstr(error.text, text)) fail_msg("'%s' has no '%s'", error.text, text);
  return code;
}

static void test_arguments(void **state) {
  (void)state;
  open_world(2, seed_of(5));
  double data[8] = {0};
  mlfab_vec two[2] = {{data + 2, 3}, {data, 3}}, many[MLFAB__COMM_BUFS + 1] = {{0, 0}};
  uint64_t counts[2] = {4, 4};
  const mlfab__comm_call good = {
      .kind = MLFAB__COLLECTIVE_ALLREDUCE, .dtype = MLFAB_F64, .vecs = two, .n = 2};
  mlfab__comm_call c = good;
  assert_int_equal(refused(c, "buffers 1 and 0 overlap"), MLFAB_ERR_ARGUMENT);
  two[1].count = 2;
  c.dtype = 77;
  assert_int_equal(refused(c, "77 is not an element type"), MLFAB_ERR_DTYPE);
  c = good;
  c.op = 7;
  assert_int_equal(refused(c, "7 is not an operation"), MLFAB_ERR_ARGUMENT);
  c.op = MLFAB_OP_MEAN;
  c.dtype = MLFAB_I64;
  assert_int_equal(refused(c, "MLFAB_MEAN cannot be used with MLFAB_I64"), MLFAB_ERR_UNSUPPORTED);
  c = good;
  two[0].data = NULL;
  assert_int_equal(refused(c, "buffer 0 is NULL and has 3 elements"), MLFAB_ERR_ARGUMENT);
  two[0].data = (uint8_t *)data + 20;
  assert_int_equal(refused(c, "buffer 0 is not aligned"), MLFAB_ERR_ARGUMENT);
  two[0] = (mlfab_vec){data + 2, 1u << 30};
  assert_int_equal(refused(c, "model_max_bytes"), MLFAB_ERR_LIMIT);
  two[0].count = UINT64_MAX;
  assert_int_equal(refused(c, "model_max_bytes"), MLFAB_ERR_LIMIT);
  two[0].count = two[1].count = 0;
  assert_int_equal(refused(c, "no elements"), MLFAB_ERR_ARGUMENT);
  c.vecs = many;
  c.n = MLFAB__COMM_BUFS + 1;
  assert_int_equal(refused(c, "4097 buffers, the limit is 4096"), MLFAB_ERR_LIMIT);
  c = good;
  two[0].count = 1;
  c.algorithm = 9;
  assert_int_equal(refused(c, "9 is not an algorithm"), MLFAB_ERR_ARGUMENT);
  c.algorithm = MLFAB_ALGORITHM_PLANNED;
  c.kind = MLFAB__COLLECTIVE_BROADCAST;
  c.root = 0;
  assert_int_equal(refused(c, "algorithm 5"), MLFAB_ERR_UNSUPPORTED);
  c = good;
  two[0].count = 1;
  c.reduce = compose;
  assert_int_equal(refused(c, "element_bytes is 0"), MLFAB_ERR_ARGUMENT);
  c = good;
  c.kind = MLFAB__COLLECTIVE_BROADCAST;
  c.root = 2;
  assert_int_equal(refused(c, "root 2 is not one of 2 workers"), MLFAB_ERR_RANK_RANGE);
  c.kind = MLFAB__COLLECTIVE_ALLGATHER;
  c.n = 1;
  c.counts = counts;
  assert_int_equal(refused(c, "counts are not those of the data"), MLFAB_ERR_ARGUMENT);
  assert_int_equal(w->workers[0].comm.phase, MLFAB__COMM_OUT);
  close_world();
}

/* A root that nobody holds up waits for those who only receive. */
static void test_ahead(void **state) {
  (void)state;
  open_world(4, seed_of(12));
  const shape cast = {.kind = MLFAB__COLLECTIVE_BROADCAST, .width = 1, .count = 100, .root = 1};
  begin_all(&plain_sum, 0);
  settle();
  worker *root = &w->workers[1];
  uint64_t end = w->now + 20 * BEAT;
  while (w->now < end) {
    if (root->nopen < OPEN) assert_int_equal(begin(root, &cast, 0), 0);
    (void)act();
  }
  assert_in_range(root->done, MLFAB__COMM_AHEAD, 2 * MLFAB__COMM_AHEAD);
  while (w->workers[0].index + w->workers[2].index + w->workers[3].index < 3 * root->index) {
    worker *me = &w->workers[chance(4)];
    if (me->index < root->index && me->nopen < OPEN) assert_int_equal(begin(me, &cast, 0), 0);
    (void)act();
  }
  settle();
  assert_int_equal(w->failed, 0);
  expect_calm();
  close_world();
}

/* Numbers of calls outside; one that a worker calls as a plain one becomes plain for all. */
static void test_outside(void **state) {
  (void)state;
  uint64_t number, signature, first = 0;
  for (uint64_t seed = 0; seed < 30; seed++) {
    open_world(3, seed_of(400 + seed));
    kill_worker(0), kill_worker(1), kill_worker(2);
    w->arena = 1;
    for (uint32_t i = 0; i < 3; i++) open_worker(i);
    w->outside = seed % 3 ? 7 : 5;
    const shape *what = seed % 2 ? &large_sum : &plain_sum;
    int bad = seed % 3 == 2;
    shape longer = *what;
    longer.count++;
    for (uint32_t i = 0; i < 3; i++)
      assert_int_equal(begin(&w->workers[i], bad && i == 1 ? &longer : what, 0), 0);
    uint64_t end = w->now + 20 * BEAT;
    uint32_t plain = 0, ready = 0;
    while (w->now < end && !(bad && ready == 7)) {
      for (uint32_t i = 0; i < 3; i++) {
        if (w->workers[i].nopen == 0 || !(w->outside >> i & 1)) continue;
        int code = mlfab__comm_outside(&w->workers[i].comm, w->workers[i].open[0].request, &number,
                                       &signature);
        assert_true(code == 0 || code == 1 || code == MLFAB_ERR_UNSUPPORTED);
        plain |= code == MLFAB_ERR_UNSUPPORTED;
        if (code == 1) ready |= 1u << i;
        if (code != 1) continue;
        if (!first) first = signature;
        assert_int_equal(number, 0);
      }
      (void)act();
    }
    if (seed % 3) {
      assert_int_equal(plain, 0);
      for (uint32_t i = 0; i < 3; i++) {
        worker *me = &w->workers[i];
        assert_int_equal(me->nopen, 1);
        mlfab__comm_finish(&me->comm, me->open[0].request, bad ? MLFAB_ERR_MISMATCH : 0,
                           bad ? 1 : 0, w->now);
        if (bad) continue; /* until server 0 has compared the calls */
        assert_int_equal(mlfab__request_find(&me->requests, me->open[0].request)->done, 1);
        mlfab__request_end(&me->requests, mlfab__request_find(&me->requests, me->open[0].request));
        forget_call(me, 0);
      }
      if (bad) {
        settle();
        expect_all(1, MLFAB_ERR_MISMATCH, 1, "calls differ: worker 1 has called ");
        expect_all(1, MLFAB_ERR_MISMATCH, 1, seed % 2 ? "20001" : "101");
      }
    } else {
      assert_int_equal(plain, 1);
      settle();
      assert_int_equal(w->failed, 0);
      assert_int_equal(w->finished, 3);
    }
    w->outside = 0;
    begin_all(&plain_sum, 0);
    settle();
    close_world();
  }
}

/* --- objects --- */

enum { ROUND_ELEMENTS = 3000 };

typedef struct
    rounds { /* an object: rounds that begin when they are triggered, one after the other */
  worker *me;
  mlfab__comm_object object;
  mlfab__engine_run run;
  uint32_t trigger;
  mlfab_vec vec, spare;
  double data[ROUND_ELEMENTS], late[2];
  uint64_t round, begun;
  int32_t status;
} turns;

static void turns_arm(turns *o, uint64_t now_ns) {
  o->run.channel = o->object.channel;
  o->run.number = o->round;
  for (uint32_t i = 0; i < ROUND_ELEMENTS; i++)
    o->data[i] = (double)(rank_of(o->me) + i + o->round);
  assert_int_equal(mlfab__engine_arm(&o->me->comm, &o->run, now_ns), 0);
}

static void turns_over(void *self, int status) {
  turns *o = self;
  assert_false(o->run.armed);
  o->status = status;
  if (status) return;
  for (uint32_t i = 0; i < ROUND_ELEMENTS; i++) {
    double sum = w->n * (double)(i + o->round) + w->n * (w->n - 1) / 2;
    assert_true(o->data[i] == sum);
  }
  o->round++;
  turns_arm(o, 0);
}

static const mlfab__comm_kind turns_kind = {.what = "turns"};

static void turns_open(turns *o, worker *me) {
  shape opening = plain_sum;
  const mlfab__dag_op trigger = {.kind = MLFAB__DAG_NOP, .outside = 1};
  /* A message that may come when the round is over. */
  mlfab__dag_op late = {.kind = MLFAB__DAG_RECV,
                        .optional = 1,
                        .tag = 1u << 30,
                        .space = 1,
                        .bytes = 8,
                        .peer = (rank_of(me) + w->n - 1) % w->n};
  uint32_t end, tag, op;
  mlfab__dag *dag = &o->run.dag;
  o->me = me;
  assert_int_equal(mlfab__comm_object_add(&me->comm, &o->object, &turns_kind, o, NULL), 0);
  opening.opens = o->object.id;
  assert_int_equal(begin(me, &opening, 0), 0);
  mlfab__dag_init(dag, &w->env);
  assert_int_equal(mlfab__dag_add(dag, &trigger, &o->trigger), 0);
  assert_int_equal(mlfab__dag_add(dag, &late, &op), 0);
  mlfab__algorithm_task task = {.kind = MLFAB__COLLECTIVE_ALLREDUCE,
                                .algorithm = MLFAB_ALGORITHM_RING,
                                .members = w->n,
                                .me = rank_of(me),
                                .width = 8,
                                .count = ROUND_ELEMENTS,
                                .segment = 1000,
                                .after = o->trigger};
  assert_int_equal(mlfab__algorithm_build(dag, &task, &end, &tag), 0);
  late.kind = MLFAB__DAG_SEND;
  late.at = 8;
  late.peer = (rank_of(me) + 1) % w->n;
  assert_int_equal(mlfab__dag_add(dag, &late, &op), 0);
  assert_int_equal(mlfab__dag_after(dag, op, end), 0);
  assert_int_equal(mlfab__dag_seal(dag, &op), 0);
  o->vec = (mlfab_vec){o->data, sizeof o->data};
  o->run.signature = 5;
  o->run.eager = w->seed & 1;
  o->run.dtype = MLFAB_F64;
  o->run.width = 8;
  o->spare = (mlfab_vec){o->late, sizeof o->late};
  o->run.spaces[0] = (mlfab__engine_space){&o->vec, 1};
  o->run.spaces[1] = (mlfab__engine_space){&o->spare, 1};
  o->run.over = turns_over;
  o->run.self = o;
}

/* What is kept is of rounds to come. */
static void expect_early(const turns *o) {
  for (uint32_t b = 0; b < MLFAB__ENGINE_BUCKETS; b++) {
    for (const mlfab__engine_stage *stage = o->me->comm.engine.stages[b]; stage;
         stage = stage->next)
      assert_true(stage->head.number > o->round);
  }
}

/* As workers that took part in openings that failed, or that are new. Returns the most of any. */
static uint32_t open_some_alone(void) {
  mlfab__comm_object object;
  uint32_t most = 0;
  for (uint32_t i = 0; i < w->n; i++) {
    mlfab__comm *comm = &w->workers[i].comm;
    for (uint32_t left = (uint32_t)chance(5); left > 0; left--) {
      assert_int_equal(mlfab__comm_object_add(comm, &object, &turns_kind, NULL, NULL), 0);
      mlfab__comm_object_remove(comm, &object);
    }
    comm->objects_opened = (uint32_t)chance(9);
    most = (uint32_t)mlfab__max(most, comm->objects_opened);
  }
  return most;
}

/* Rounds that workers join when they please, some ahead of others; then one closes its object. */
static void test_objects(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 12; seed++) {
    uint32_t n = 2 + (uint32_t)seed % 5;
    open_world(n, seed_of(500 + seed));
    turns *all = calloc(n, sizeof *all);
    assert_non_null(all);
    for (uint32_t i = 0; i < n; i++) w->workers[i].comm.host = i;
    /* Workers have opened different numbers of objects in their lives; and some open before there is an
     * epoch, or while others are still elsewhere. */
    uint32_t most = open_some_alone();
    if (seed & 2) {
      begin_all(&plain_sum, 0);
      settle();
    }
    for (uint32_t i = 0; i < n; i++) {
      turns_open(&all[i], &w->workers[i]);
      if (seed & 4) step(100);
    }
    settle();
    for (uint32_t i = 0; i < n; i++) {
      assert_int_equal(all[i].object.channel, most + 1);
      turns_arm(&all[i], w->now);
    }
    for (uint64_t end = w->now + 40000000; all[0].round < 30; (void)act()) {
      turns *o = &all[chance(n)];
      if (chance(500) == 0) break_hop(chance(n), chance(n));
      if (chance(60) == 0) begin_all(&plain_sum, 0), settle();
      if (chance(20) == 0) mlfab__engine_trigger(&o->me->comm, &o->run, o->trigger, w->now);
      assert_true(w->now < end);
    }
    assert_int_equal(w->failed, 0);
    for (uint32_t i = 0; i < n; i++) expect_early(&all[i]);
    char closed[64];
    int begun = seed % 3 == 0; /* the others have begun the round, or will */
    for (uint32_t i = 0; i < n && begun; i++) {
      turns *o = &all[i];
      if (i != 1) mlfab__engine_trigger(&o->me->comm, &o->run, o->trigger, w->now);
    }
    step(begun ? 2000 : 0);
    snprintf(closed, sizeof closed, "worker 1 has closed object %u", all[1].object.channel);
    mlfab__comm_object_remove(&all[1].me->comm, &all[1].object);
    assert_false(all[1].run.armed);
    for (uint64_t end = w->now + 40000000; all[0].status == 0; (void)act()) {
      turns *o = &all[chance(n)];
      if (!begun) mlfab__engine_trigger(&o->me->comm, &o->run, o->trigger, w->now);
      assert_true(w->now < end);
    }
    step(3000);
    for (uint32_t i = 0; i < n; i++) {
      turns *o = &all[i];
      if (i != 1) assert_int_not_equal(o->status, 0);
      assert_int_equal(begin(o->me, &plain_sum, 0), MLFAB_ERR_PEER_CLOSED);
      mlfab__dag_free(&o->run.dag);
    }
    expect_all(1, MLFAB_ERR_PEER_CLOSED, 1, closed);
    begin_all(&plain_sum, 0);
    settle();
    close_world();
    free(all);
  }
}

/* Eager bytes are given back to their sender: many times its credit passes, whatever came early. */
static void test_credit(void **state) {
  (void)state;
  shape sum = large_sum;
  open_world(4, seed_of(14));
  w->config.chunk_bytes = 65536;
  sum.algorithm = MLFAB_ALGORITHM_DOUBLING;
  sum.count = MLFAB__COMM_EAGER / 8;
  for (uint32_t calls = 0; calls < 6 * (MLFAB__STREAM_CREDIT / MLFAB__COMM_EAGER); calls += 8) {
    for (uint32_t k = 0; k < 8; k++) begin_all(&sum, 0);
    settle();
  }
  assert_int_equal(w->failed, 0);
  close_world();
}

/* Bytes that a worker has staged of messages that are paced, and how many may be. */
static void expect_staged(const mlfab__comm *comm) {
  uint64_t staged = 0, least = 0;
  for (const mlfab__engine_run *run = comm->engine.armed; run; run = run->next) {
    for (uint32_t id = 0; id < run->dag.nops; id++) {
      if (run->dag.ops[id].paced && run->recvs[id].stage) staged += run->dag.ops[id].bytes;
    }
    least = mlfab__max(least, run->step_bytes);
  }
  assert_in_range(comm->engine.window_bytes, 0, MLFAB__ENGINE_WINDOWS + least);
  assert_in_range(staged, 0, MLFAB__ENGINE_WINDOWS + least);
}

/* Trees of large arrays, several at a time: what comes before it can be added is bounded, whoever is slow,
 * and all of it passes. */
static void test_windows(void **state) {
  (void)state;
  shape sum = large_sum;
  int rounds = scaled(4, 400);
  for (int round = 0; round < rounds; round++) {
    open_world(3 + (uint32_t)round % 4, seed_of(1400 + (uint64_t)round));
    w->config.chunk_bytes = 65536;
    sum.algorithm = round % 2 ? MLFAB_ALGORITHM_PLANNED : MLFAB_ALGORITHM_TREE;
    add_scheduler(0);
    sum.count = 200000 + chance(100000);
    for (uint32_t k = 0; k < 3; k++) begin_all(&sum, 0);
    uint64_t end = w->now + 2000000;
    while (w->finished < 3 * w->n) {
      assert_true(w->now < end);
      const mlfab__comm *root = &w->workers[0].comm;
      (void)act();
      if (chance(2000) == 0) break_hop(chance(w->n), chance(w->n));
      /* For a while nothing comes from the child that is added first. */
      if (w->now < 6 * BEAT && root->members) break_hop(root->ranks[1], root->ranks[0]);
      for (uint32_t i = 0; i < w->n && w->now % 64 == 0; i++) expect_staged(&w->workers[i].comm);
    }
    settle();
    for (uint32_t i = 0; i < w->n; i++) assert_int_equal(w->workers[i].comm.engine.window_bytes, 0);
    assert_int_equal(w->failed, 0);
    close_world();
  }
}

/* Calls that repeat allocate nothing. */
static void test_steady(void **state) {
  (void)state;
  open_world(5, seed_of(13));
  w->config.chunk_bytes = 4096;
  uint64_t before = 0;
  shape large = large_sum;
  large.count = 12000; /* not eager */
  for (int round = 0; round < 400; round++) {
    if (round == 300) before = w->env.allocations;
    begin_all(&plain_sum, 0);
    begin_all(&large, 0);
    settle();
  }
  print_message("%u allocations in 200 calls of 5\n", (unsigned)(w->env.allocations - before));
  assert_in_range(w->env.allocations - before, 0, 20); /* queues that were never as long before */
  close_world();
}

/* Whatever allocation fails: the call, or all calls, with MEMORY; nothing hangs or leaks. */
static void test_memory(void **state) {
  (void)state;
  int rounds = scaled(10, 4000);
  uint64_t failed = 0;
  for (int round = 0; round < rounds; round++) {
    open_world(4, seed_of(70000 + (uint64_t)round));
    set_timeout(40 * BEAT);
    w->asked = chance(100);
    w->fails = 20 + chance(400);
    for (uint32_t k = 6000; k > 0; k--) {
      worker *me = &w->workers[chance(w->n)];
      if (me->nopen < OPEN && chance(4) == 0) (void)begin(me, chance(3) ? NULL : &large_sum, 0);
      (void)act();
    }
    failed += w->failed;
    w->fails = 0;
    uint64_t end = w->now + 200 * BEAT;
    while (w->now < end) (void)act();
    for (uint32_t i = 0; i < w->n; i++) assert_int_equal(w->workers[i].nopen, 0);
    close_world();
  }
  assert_true(failed > 0);
}

/* A list of members for which there is no memory is asked for again: nobody waits for that worker in vain. */
static void test_list_lost(void **state) {
  (void)state;
  open_world(3, seed_of(74000));
  begin_all(&plain_sum, 20 * BEAT);
  pipe *from = &w->workers[1].from_server;
  while (from->count == 0 || from->frames[from->begin].type != MLFAB__MEMBERSHIP_LIST) (void)act();
  w->fails = 1;
  deliver_from_server(1);
  w->fails = 0;
  uint64_t end = w->now + 10 * BEAT;
  while (w->now < end) (void)act();
  assert_int_equal(w->failed, 0);
  for (uint32_t i = 0; i < w->n; i++) assert_int_equal(w->workers[i].nopen, 0);
  close_world();
}

/* Allreduces within a host, where all choose by the same constants. The times that these were set by: docs/decisions.md. */
static void test_choices_inside(void **state) {
  static const struct {
    uint32_t members, bytes;
    uint8_t algorithm;
  } rows[] = {
      {2, 4 << 10, MLFAB_ALGORITHM_DOUBLING}, {2, 32 << 10, MLFAB_ALGORITHM_DOUBLING},
      {2, 256 << 10, MLFAB_ALGORITHM_RING},   {4, 32 << 10, MLFAB_ALGORITHM_DOUBLING},
      {4, 64 << 10, MLFAB_ALGORITHM_HALVING}, {4, 1 << 20, MLFAB_ALGORITHM_RING},
      {8, 64 << 10, MLFAB_ALGORITHM_HALVING}, {8, 1 << 20, MLFAB_ALGORITHM_HALVING},
      {8, 16 << 20, MLFAB_ALGORITHM_RING},
  };
  static mlfab__comm comm;
  (void)state;
  comm.go.latency_ns = 10000;
  comm.go.rate = 2e9;
  for (uint32_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const mlfab__algorithm_task task = {.kind = MLFAB__COLLECTIVE_ALLREDUCE,
                                        .members = rows[i].members,
                                        .width = 4,
                                        .count = rows[i].bytes / 4,
                                        .segment = MLFAB__COMM_SEGMENT};
    assert_int_equal(mlfab__comm_choose(&comm, &task), rows[i].algorithm);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_calls),        cmocka_unit_test(test_failures),
      cmocka_unit_test(test_server_links), cmocka_unit_test(test_shapes),
      cmocka_unit_test(test_deadlines),    cmocka_unit_test(test_failure_after_failure),
      cmocka_unit_test(test_not_finite),   cmocka_unit_test(test_leaving),
      cmocka_unit_test(test_owed),         cmocka_unit_test(test_unreachable),
      cmocka_unit_test(test_arguments),    cmocka_unit_test(test_ahead),
      cmocka_unit_test(test_outside),      cmocka_unit_test(test_objects),
      cmocka_unit_test(test_credit),       cmocka_unit_test(test_steady),
      cmocka_unit_test(test_windows),      cmocka_unit_test(test_memory),
      cmocka_unit_test(test_list_lost),    cmocka_unit_test(test_choices_inside),
  };
  if (getenv("MLFAB_TEST")) cmocka_set_test_filter(getenv("MLFAB_TEST"));
  return cmocka_run_group_tests(tests, NULL, NULL);
}
