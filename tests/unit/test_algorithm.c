/* test_algorithm.c - collectives of all members in one process: every task graph is run in a random order,
 * with messages that take as long as they like, and compared with the serial result.
 *
 * The hazards are real: a SEND without `copy` is read when it is delivered, one with it some time
 * after it was started, a RECV writes as soon as its message comes, and a member whose task is over
 * finds its memory overwritten. MLFAB_SEED=n one random case alone, MLFAB_SCALE=100 a hundred times
 * as many. */
#include "core/base/rng.h"
#include "core/coll/algorithm.h"

#include <math.h>
#include "../testing.h"

enum { SPACE = 3, GUARD = 24, TASKS = 4, GARBAGE = 0xa5, MEMBERS = 1024 };

/* What elements are: sums, and maps x -> a x + b modulo 2^32, which do not commute. */
enum { I64, F32, MAPS, BYTES };

static mlfab__env env;

static uint32_t below(mlfab__rng *prng, uint32_t bound) {
  return (uint32_t)mlfab__rng_below(prng, bound);
}

/* ---- elements */

/* own = own o in, or in o own. */
static void combine(int type, void *own, const void *in, uint64_t bytes, int left) {
  uint64_t n = bytes / (type == F32 ? 4 : 8);
  for (uint64_t i = 0; i < n; i++) {
    if (type == I64) {
      ((uint64_t *)own)[i] += ((const uint64_t *)in)[i];
    } else if (type == F32) {
      ((float *)own)[i] += ((const float *)in)[i];
    } else {
      const uint32_t *second = left ? (const uint32_t *)own + 2 * i : (const uint32_t *)in + 2 * i;
      const uint32_t *first = left ? (const uint32_t *)in + 2 * i : (const uint32_t *)own + 2 * i;
      uint32_t a = first[0] * second[0], b = first[1] * second[0] + second[1];
      ((uint32_t *)own)[2 * i] = a;
      ((uint32_t *)own)[2 * i + 1] = b;
    }
  }
}

static void divide(int type, void *own, uint64_t bytes, uint32_t by) {
  assert_int_equal(type, F32);
  for (uint64_t i = 0; i < bytes / 4; i++) ((float *)own)[i] /= (float)by;
}

static void fill(int type, uint8_t *data, uint64_t bytes, mlfab__rng *prng) {
  if (type == F32)
    for (uint64_t i = 0; i < bytes / 4; i++)
      ((float *)(void *)data)[i] = (float)(mlfab__rng_unit(prng) - 0.5) * 1000;
  else
    for (uint64_t i = 0; i < bytes; i++) data[i] = (uint8_t)mlfab__rng_next(prng);
}

/* ---- a world of members and messages */

/* Something that happens some time: bytes are copied, a message is delivered, that is reported to
 * the sender, or what takes time at `to` ends. */
typedef struct message {
  uint32_t from, to, tag, op; /* op: the SEND, while its end is to be reported */
  uint64_t bytes;
  const uint8_t *source; /* read on delivery */
  uint8_t *copy;         /* or what was copied at once */
  enum { COPYING, FLYING, ARRIVED, ENDING } stage;
} message;

typedef struct member {
  mlfab__dag dag;
  uint8_t *memory, *data, *result; /* data lies between guards */
  uint8_t **staged;                /* by RECV: what came before it ran, or the operand */
  uint32_t begin, end;             /* NOPs: of all; begin is triggered */
  int over;
  uint64_t sent, received, messages;
} member;

typedef struct world {
  uint32_t members;
  int type;
  uint64_t bytes;
  member *of;
  message *events;
  uint32_t nevents, room;
  mlfab__rng *prng;
  uint32_t hurry; /* how often task graphs go on rather than messages, of 16 */
  uint32_t begun;
  int barrier;
} world;

static void put_event(world *w, message m) {
  if (w->nevents == w->room) {
    w->room = w->room ? 2 * w->room : 256;
    w->events = realloc(w->events, w->room * sizeof m);
    assert_non_null(w->events);
  }
  w->events[w->nevents++] = m;
}

static uint8_t *duplicate(const uint8_t *bytes, uint64_t n) {
  uint8_t *copy = malloc(n + 1);
  assert_non_null(copy);
  memcpy(copy, bytes, n);
  return copy;
}

/* The task is over: its result stands, and the memory is the caller's, who uses it at once. */
static void over(world *w, member *m) {
  m->over = 1;
  m->result = duplicate(m->data, w->bytes);
  memset(m->data, GARBAGE, w->bytes);
  for (uint32_t i = 0; i < m->dag.nops; i++) {
    int kind = m->dag.ops[i].kind, sends = kind == MLFAB__DAG_SEND;
    if (!sends && i != m->end) assert_int_equal(mlfab__dag_state(&m->dag, i), MLFAB__DAG_DONE);
  }
  if (w->barrier) assert_int_equal(w->begun, w->members);
}

/* A RECV that runs has its message: plain ones write at once, sums when the event comes. */
static void receive(world *w, uint32_t me, uint32_t id) {
  member *m = &w->of[me];
  const mlfab__dag_op *op = &m->dag.ops[id];
  message end = {.to = me, .op = id, .stage = ENDING};
  if (op->kind == MLFAB__DAG_RECV) memcpy(m->data + (op->at - GUARD), m->staged[id], op->bytes);
  put_event(w, end);
}

/* The end of what takes time. */
static void ended(world *w, uint32_t me, uint32_t id) {
  member *m = &w->of[me];
  const mlfab__dag_op *op = &m->dag.ops[id];
  if (op->kind == MLFAB__DAG_COMPUTE)
    divide(w->type, m->data + (op->at - GUARD), op->bytes, w->members);
  if (op->kind == MLFAB__DAG_RECV_REDUCE)
    combine(w->type, m->data + (op->at - GUARD), m->staged[id], op->bytes, op->left);
  free(m->staged[id]);
  m->staged[id] = NULL;
  mlfab__dag_done(&m->dag, id);
}

static void deliver(world *w, message f) {
  member *to = &w->of[f.to];
  uint32_t id = mlfab__dag_find_recv(&to->dag, f.from, f.tag);
  assert_int_not_equal(id, MLFAB__DAG_NONE);
  assert_int_equal(to->dag.ops[id].bytes, f.bytes);
  assert_int_not_equal(mlfab__dag_state(&to->dag, id), MLFAB__DAG_DONE);
  assert_null(to->staged[id]);
  to->staged[id] = f.copy ? f.copy : duplicate(f.source, f.bytes);
  to->received += f.bytes;
  if (mlfab__dag_state(&to->dag, id) == MLFAB__DAG_RUNNING) receive(w, f.to, id);
  if (f.copy) return;
  f.stage = ARRIVED;
  put_event(w, f);
}

static void send(world *w, uint32_t me, uint32_t id) {
  member *m = &w->of[me];
  const mlfab__dag_op *op = &m->dag.ops[id];
  message f = {.from = me, .to = op->peer, .tag = op->tag, .op = id, .bytes = op->bytes};
  f.source = m->data + (op->at - GUARD);
  f.stage = op->copy ? COPYING : FLYING;
  m->sent += op->bytes;
  m->messages++;
  put_event(w, f);
}

static void copied(world *w, message f) {
  f.copy = duplicate(f.source, f.bytes);
  f.stage = FLYING;
  put_event(w, f);
  mlfab__dag_done(&w->of[f.from].dag, f.op);
}

static int run_one(world *w, uint32_t me) {
  member *m = &w->of[me];
  uint32_t id;
  if (!mlfab__dag_next(&m->dag, &id)) return 0;
  const mlfab__dag_op *op = &m->dag.ops[id];
  if (op->kind >= MLFAB__DAG_SEND && op->bytes) {
    assert_int_equal(op->space, SPACE);
    assert_in_range(op->at, GUARD, GUARD + w->bytes);
    assert_in_range(op->at + op->bytes, GUARD, GUARD + w->bytes);
  }
  if (op->kind == MLFAB__DAG_SEND) {
    send(w, me, id);
  } else if (op->kind == MLFAB__DAG_RECV || op->kind == MLFAB__DAG_RECV_REDUCE) {
    if (m->staged[id]) receive(w, me, id);
  } else if (op->kind == MLFAB__DAG_COMPUTE) {
    message end = {.to = me, .op = id, .stage = ENDING};
    assert_int_equal(op->code, MLFAB__COLLECTIVE_DIVIDE);
    put_event(w, end);
  } else {
    if (id == m->begin) w->begun++;
    mlfab__dag_done(&m->dag, id);
    if (id == m->end) over(w, m);
  }
  return 1;
}

static int event_one(world *w) {
  if (w->nevents == 0) return 0;
  uint32_t i = below(w->prng, w->nevents);
  message m = w->events[i];
  w->events[i] = w->events[--w->nevents];
  if (m.stage == COPYING)
    copied(w, m);
  else if (m.stage == FLYING)
    deliver(w, m);
  else if (m.stage == ARRIVED)
    mlfab__dag_done(&w->of[m.from].dag, m.op);
  else
    ended(w, m.to, m.op);
  return 1;
}

/* Until nothing moves; members begin in a random order, in the midst of it. */
static void run_all(world *w) {
  uint32_t *order = malloc(w->members * sizeof *order), called = 0;
  assert_non_null(order);
  for (uint32_t i = 0; i < w->members; i++) {
    uint32_t j = below(w->prng, i + 1);
    order[i] = order[j];
    order[j] = i;
  }
  for (int moves = 1; moves || called < w->members;) {
    if (called < w->members && (!moves || below(w->prng, 16) == 0)) {
      member *m = &w->of[order[called++]];
      mlfab__dag_trigger(&m->dag, m->begin);
    }
    moves = below(w->prng, 16) < w->hurry ? run_one(w, below(w->prng, w->members)) : event_one(w);
    for (uint32_t i = 0; !moves && i < w->members; i++) moves = run_one(w, i);
    if (!moves) moves = event_one(w);
  }
  free(order);
  for (uint32_t i = 0; i < w->members; i++) {
    assert_true(w->of[i].over);
    assert_true(mlfab__dag_finished(&w->of[i].dag));
  }
}

/* All members' task graphs for a list of tasks, each behind the one before. data: all members', one
 * behind the other. */
static world *make_world(const mlfab__algorithm_task *tasks, uint32_t ntasks, int type,
                         const uint8_t *data, mlfab__rng *prng) {
  world *w = calloc(1, sizeof *w);
  uint32_t tag = 0;
  w->members = tasks[0].members;
  w->type = type;
  w->bytes = tasks[0].count * tasks[0].width;
  w->prng = prng;
  w->hurry = 1 + below(prng, 15);
  w->of = calloc(w->members, sizeof *w->of);
  for (uint32_t i = 0; i < w->members; i++) {
    member *m = &w->of[i];
    mlfab__dag_op begin = {.kind = MLFAB__DAG_NOP, .outside = 1};
    uint32_t next = 5, culprit;
    m->memory = malloc(w->bytes + 2 * GUARD);
    memset(m->memory, GARBAGE, w->bytes + 2 * GUARD);
    m->data = m->memory + GUARD;
    memcpy(m->data, data + i * w->bytes, w->bytes);
    mlfab__dag_init(&m->dag, &env);
    assert_int_equal(mlfab__dag_add(&m->dag, &begin, &m->begin), 0);
    m->end = m->begin;
    for (uint32_t t = 0; t < ntasks; t++) {
      mlfab__algorithm_task task = tasks[t];
      task.me = i;
      task.tag = next;
      task.space = SPACE;
      task.at = GUARD;
      task.after = m->end;
      assert_int_equal(mlfab__algorithm_build(&m->dag, &task, &m->end, &next), 0);
    }
    if (i) assert_int_equal(next, tag);
    tag = next;
    assert_int_equal(mlfab__dag_seal(&m->dag, &culprit), 0);
    m->staged = calloc(m->dag.nops, sizeof *m->staged);
    mlfab__dag_start(&m->dag);
  }
  return w;
}

static void free_world(world *w) {
  for (uint32_t i = 0; i < w->members; i++) {
    member *m = &w->of[i];
    for (uint32_t g = 0; g < GUARD; g++) {
      assert_int_equal(m->memory[g], GARBAGE);
      assert_int_equal(m->data[w->bytes + g], GARBAGE);
    }
    mlfab__dag_free(&m->dag);
    free(m->staged);
    free(m->result);
    free(m->memory);
  }
  free(w->of);
  free(w->events);
  free(w);
}

/* ---- cases */

static uint32_t width_of(int type, mlfab__rng *prng) {
  return type == F32 ? 4 : type == BYTES ? 1 + below(prng, 12) : 8;
}

/* Uneven blocks, many of them empty; their sum is task->count. */
static void draw_counts(mlfab__algorithm_task *task, uint64_t *counts, mlfab__rng *prng) {
  uint32_t empty = below(prng, 4);
  task->count = 0;
  for (uint32_t b = 0; b < task->members; b++) {
    counts[b] = below(prng, 4) < empty ? 0 : below(prng, 40);
    task->count += counts[b];
  }
  task->counts = counts;
}

static uint64_t block_of(const mlfab__algorithm_task *task, uint32_t b, uint64_t *bytes_p) {
  uint64_t at = 0;
  for (uint32_t i = 0;; i++) {
    uint64_t n = task->count / task->members + (i < task->count % task->members);
    *bytes_p = (task->counts ? task->counts[i] : n) * task->width;
    if (i == b) return at;
    at += *bytes_p;
  }
}

/* x_0 o x_1 o ... o x_n-1. */
static uint8_t *serial(const mlfab__algorithm_task *task, int type, const uint8_t *data) {
  uint64_t bytes = task->count * task->width;
  uint8_t *sum = duplicate(data, bytes);
  for (uint32_t i = 1; i < task->members; i++) combine(type, sum, data + i * bytes, bytes, 0);
  return sum;
}

/* Bits for what is exact; for F32 what rounding can make of it. */
static void compare(int type, const uint8_t *got, const uint8_t *wanted, uint64_t bytes,
                    uint32_t members) {
  if (type != F32) {
    assert_memory_equal(got, wanted, bytes);
    return;
  }
  for (uint64_t i = 0; i < bytes / 4; i++) {
    double a = (double)((const float *)(const void *)got)[i];
    double b = (double)((const float *)(const void *)wanted)[i];
    assert_true(fabs(a - b) <= 1e-4 * members + 1e-6 * fabs(b));
  }
}

static mlfab__tree_node tree[64];

static void swap_nodes(uint32_t a, uint32_t b) {
  mlfab__tree_node node = tree[a];
  tree[a] = tree[b];
  tree[b] = node;
}

/* Any tree up, any tree down, from one root. */
static void draw_tree(uint32_t n, mlfab__rng *prng) {
  for (uint32_t i = 0; i < n; i++) tree[i] = (mlfab__tree_node){i, 0, 0};
  for (uint32_t i = n; i > 1; i--) swap_nodes(i - 1, below(prng, i));
  for (uint32_t i = 0; i < n; i++)
    tree[i].parent = i == 0 ? MLFAB__NO_NODE : tree[below(prng, i)].worker;
  for (uint32_t i = n; i > 2; i--) swap_nodes(i - 1, 1 + below(prng, i - 1));
  for (uint32_t i = 0; i < n; i++)
    tree[i].giver = i == 0 ? MLFAB__NO_NODE : tree[below(prng, i)].worker;
  for (uint32_t i = n; i > 1; i--) swap_nodes(i - 1, below(prng, i));
}

/* A tree is taken as it is, and nothing else. */
TEST(test_trees) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 77);
  uint32_t most;
  for (int round = 0; round < 2000; round++) {
    uint32_t n = 1 + below(&prng, 64), children[64] = {0}, many = 0;
    draw_tree(n, &prng);
    for (uint32_t i = 0; i < n; i++)
      if (tree[i].parent < n) many = (uint32_t)mlfab__max(many, ++children[tree[i].parent]);
    assert_int_equal(mlfab__algorithm_check_tree(tree, n, &most), 0);
    assert_int_equal(most, many);
    if (n == 1) continue;
    uint32_t at = below(&prng, n);
    mlfab__tree_node good = tree[at];
    uint32_t *const fields[] = {&tree[at].worker, &tree[at].parent, &tree[at].giver};
    /* Beyond the members, or itself; a second root, or none. */
    for (uint32_t k = 0; k < 3; k++) {
      *fields[k] = n + below(&prng, 3);
      assert_int_equal(mlfab__algorithm_check_tree(tree, n, &most), MLFAB_ERR_ARGUMENT);
      *fields[k] = k == 0 ? (good.worker + 1) % n : good.worker;
      assert_int_equal(mlfab__algorithm_check_tree(tree, n, &most), MLFAB_ERR_ARGUMENT);
      tree[at] = good;
    }
    tree[at].parent = good.parent == MLFAB__NO_NODE ? (good.worker + 1) % n : MLFAB__NO_NODE;
    assert_int_equal(mlfab__algorithm_check_tree(tree, n, &most), MLFAB_ERR_ARGUMENT);
  }
  assert_int_equal(mlfab__algorithm_check_tree(tree, 0, &most), MLFAB_ERR_ARGUMENT);
}

static void draw_task(mlfab__algorithm_task *task, int *type, uint64_t *counts, mlfab__rng *prng) {
  memset(task, 0, sizeof *task);
  task->members = 1 + below(prng, below(prng, 4) ? 9 : 64);
  task->kind = (uint8_t)(1 + below(prng, 5));
  task->root = below(prng, task->members);
  *type = (int)below(prng, task->kind <= MLFAB__COLLECTIVE_REDUCE_SCATTER ? 3 : 4);
  task->ordered = *type == MAPS;
  task->mean = *type == F32 && below(prng, 2);
  task->width = width_of(*type, prng);
  task->count = below(prng, below(prng, 3) ? 4 * task->members + 2 : 600);
  task->segment = 1 + below(prng, below(prng, 2) ? 64 : 5000);
  if (task->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER || task->kind == MLFAB__COLLECTIVE_ALLGATHER)
    if (below(prng, 2)) draw_counts(task, counts, prng);
  draw_tree(task->members, prng);
  task->tree = tree;
  do {
    task->algorithm = (uint8_t)(1 + below(prng, MLFAB_ALGORITHM_COUNT - 1));
  } while (mlfab__algorithm_cost(task, task->algorithm, 1, 1, 1) < 0);
}

static uint8_t *draw_data(const mlfab__algorithm_task *task, int type, mlfab__rng *prng) {
  uint64_t bytes = task->count * task->width;
  uint8_t *data = malloc(bytes * task->members + 1);
  assert_non_null(data);
  for (uint32_t i = 0; i < task->members; i++) fill(type, data + i * bytes, bytes, prng);
  return data;
}

/* What every member must have in the end; of a reduce-scatter, in its own block. */
static uint8_t *literal(const mlfab__algorithm_task *task, int type, const uint8_t *data) {
  uint64_t bytes = task->count * task->width, n;
  uint8_t *wanted;
  if (task->kind == MLFAB__COLLECTIVE_BROADCAST) return duplicate(data + task->root * bytes, bytes);
  if (task->kind == MLFAB__COLLECTIVE_ALLGATHER) {
    wanted = duplicate(data, bytes);
    for (uint32_t b = 0; b < task->members; b++) {
      uint64_t at = block_of(task, b, &n);
      memcpy(wanted + at, data + b * bytes + at, n);
    }
    return wanted;
  }
  if (task->kind == MLFAB__COLLECTIVE_BARRIER) return duplicate(data, 0);
  wanted = serial(task, type, data);
  if (task->mean && task->members > 1) divide(type, wanted, bytes, task->members);
  return wanted;
}

static void check_results(const world *w, const mlfab__algorithm_task *task, const uint8_t *data) {
  uint8_t *wanted = literal(task, w->type, data);
  for (uint32_t i = 0; i < w->members; i++) {
    uint64_t n = w->bytes, at = 0;
    const uint8_t *got = w->of[i].result;
    if (task->kind == MLFAB__COLLECTIVE_BARRIER) {
      assert_memory_equal(got, data + i * w->bytes, w->bytes);
      continue;
    }
    if (task->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER) at = block_of(task, i, &n);
    compare(task->kind <= MLFAB__COLLECTIVE_REDUCE_SCATTER ? w->type : BYTES, got + at, wanted + at,
            n, w->members);
    if (task->kind == MLFAB__COLLECTIVE_ALLREDUCE)
      assert_memory_equal(got, w->of[0].result, w->bytes);
  }
  free(wanted);
}

/* The bits do not depend on what came first: the same once more, in another order. */
static void check_again(const world *w, const mlfab__algorithm_task *task, const uint8_t *data) {
  world *again = make_world(task, 1, w->type, data, w->prng);
  run_all(again);
  for (uint32_t i = 0; i < w->members; i++) {
    uint64_t n = w->bytes, at = 0;
    if (task->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER) at = block_of(task, i, &n);
    assert_memory_equal(again->of[i].result + at, w->of[i].result + at, n);
  }
  free_world(again);
}

static void check_bytes(const world *w, const mlfab__algorithm_task *task);

TEST(test_random) {
  for (SEEDS(seed, 1000)) {
    static uint64_t counts[MEMBERS];
    mlfab__algorithm_task task;
    mlfab__rng prng;
    int type;
    mlfab__rng_seed(&prng, seed);
    draw_task(&task, &type, counts, &prng);
    uint8_t *data = draw_data(&task, type, &prng);
    world *w = make_world(&task, 1, type, data, &prng);
    w->barrier = task.kind == MLFAB__COLLECTIVE_BARRIER;
    run_all(w);
    check_results(w, &task, data);
    check_bytes(w, &task);
    if (type == F32) check_again(w, &task, data);
    free_world(w);
    free(data);
    assert_int_equal(env.bytes, 0);
  }
}

/* ---- what is sent */

static uint32_t log_up(uint32_t n) {
  uint32_t log = 0;
  while ((1u << log) < n) log++;
  return log;
}

/* Members in the binomial tree's subtree below v: how many children it has. */
static uint32_t children(uint32_t v, uint32_t n) {
  uint32_t count = 0;
  for (uint32_t far = 1; far < n && (v == 0 || far < (v & (0u - v))); far *= 2)
    count += v + far < n;
  return count;
}

static uint64_t bytes_of_ring(const world *w, const mlfab__algorithm_task *task, uint32_t me) {
  uint64_t own, next, n = w->bytes;
  uint32_t last = w->members - 1, v = (me + w->members - task->root) % w->members;
  block_of(task, me, &own);
  block_of(task, (me + 1) % w->members, &next);
  if (task->kind == MLFAB__COLLECTIVE_BROADCAST) return v == last ? 0 : n;
  if (task->kind == MLFAB__COLLECTIVE_ALLGATHER) return n - next;
  if (task->ordered && task->kind == MLFAB__COLLECTIVE_ALLREDUCE)
    return me && me < last ? 2 * n : n;
  if (task->ordered) return me < last ? n : n - own;
  return n - own + (task->kind == MLFAB__COLLECTIVE_ALLREDUCE ? n - next : 0);
}

static uint64_t bytes_of_doubling(const world *w, uint32_t me) {
  uint32_t pow = 1, extra;
  while (2 * pow <= w->members) pow *= 2;
  extra = w->members - pow;
  if (me < 2 * extra && me % 2) return w->bytes;
  return (log_up(pow) + (me < 2 * extra)) * w->bytes;
}

/* Every member has sent what the algorithm says, and has received what it lacked. */
static void check_bytes(const world *w, const mlfab__algorithm_task *task) {
  uint32_t n = w->members, log = log_up(n);
  int halves = task->kind == MLFAB__COLLECTIVE_ALLREDUCE ? 2 : 1;
  for (uint32_t i = 0; i < n; i++) {
    const member *m = &w->of[i];
    uint64_t own;
    block_of(task, i, &own);
    if (n == 1 || task->kind == MLFAB__COLLECTIVE_BARRIER) {
      assert_int_equal(m->sent, 0);
      assert_int_equal(m->messages, n == 1 ? 0 : log);
    } else if (task->algorithm == MLFAB_ALGORITHM_RING) {
      assert_int_equal(m->sent, bytes_of_ring(w, task, i));
    } else if (task->algorithm == MLFAB_ALGORITHM_TREE) {
      uint32_t v = (i + n - task->root) % n;
      if (task->kind == MLFAB__COLLECTIVE_BROADCAST)
        assert_int_equal(m->sent, children(v, n) * w->bytes);
      else
        assert_int_equal(m->sent, (children(i, n) + (i > 0)) * w->bytes);
    } else if (task->algorithm == MLFAB_ALGORITHM_PLANNED) {
      uint64_t sends = 0;
      for (uint32_t k = 0; k < n; k++)
        sends += (uint64_t)(tree[k].worker == i && tree[k].parent < n) + (tree[k].giver == i);
      assert_int_equal(m->sent, sends * w->bytes);
    } else if (task->algorithm == MLFAB_ALGORITHM_DOUBLING &&
               task->kind != MLFAB__COLLECTIVE_ALLGATHER) {
      assert_int_equal(m->sent, bytes_of_doubling(w, i));
    } else {
      if (task->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER) assert_int_equal(m->sent, w->bytes - own);
      if (task->kind == MLFAB__COLLECTIVE_ALLGATHER) assert_int_equal(m->received, w->bytes - own);
      if (!task->counts && task->count % n == 0) {
        assert_int_equal(m->sent, (uint64_t)halves * (w->bytes - own));
        assert_int_equal(m->received, (uint64_t)halves * (w->bytes - own));
      }
      /* A stretch may go round the end of the data: then it is two messages. */
      if (task->segment >= w->bytes && task->segment >= task->width)
        assert_true(m->messages <= 2u * (uint32_t)halves * log);
    }
  }
}

/* ---- all sizes */

TEST(test_all_sizes) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 1);
  for (uint32_t members = 1; members <= 64; members++) {
    for (uint8_t kind = MLFAB__COLLECTIVE_ALLREDUCE; kind <= MLFAB__COLLECTIVE_BARRIER; kind++) {
      for (uint8_t algorithm = 1; algorithm < MLFAB_ALGORITHM_COUNT; algorithm++) {
        mlfab__algorithm_task task = {.kind = kind, .algorithm = algorithm, .members = members};
        int type = below(&prng, 2) ? I64 : MAPS;
        task.width = 8;
        task.count = below(&prng, 2) ? 3 * members : 1 + below(&prng, 100);
        task.segment = below(&prng, 2) ? 16 : 4096;
        task.root = below(&prng, members);
        task.ordered = type == MAPS;
        if (mlfab__algorithm_cost(&task, algorithm, 1, 1, 1) < 0) {
          type = I64;
          task.ordered = 0;
        }
        if (mlfab__algorithm_cost(&task, algorithm, 1, 1, 1) < 0) continue;
        uint8_t *data = draw_data(&task, type, &prng);
        world *w = make_world(&task, 1, type, data, &prng);
        w->barrier = kind == MLFAB__COLLECTIVE_BARRIER;
        run_all(w);
        check_results(w, &task, data);
        check_bytes(w, &task);
        free_world(w);
        free(data);
      }
    }
  }
}

/* As many members as there may be. */
TEST(test_most) {
  static const uint8_t algorithms[] = {MLFAB_ALGORITHM_HALVING, MLFAB_ALGORITHM_DOUBLING,
                                       MLFAB_ALGORITHM_TREE};
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 1);
  for (uint32_t i = 0; i < 6; i++) {
    mlfab__algorithm_task task = {.kind = MLFAB__COLLECTIVE_ALLREDUCE,
                                  .members = i < 3 ? 1024 : 1000};
    task.algorithm = algorithms[i % 3];
    task.width = 8;
    task.count = 1100;
    task.segment = 1u << 20;
    uint8_t *data = draw_data(&task, I64, &prng);
    world *w = make_world(&task, 1, I64, data, &prng);
    run_all(w);
    check_results(w, &task, data);
    free_world(w);
    free(data);
    assert_int_equal(env.bytes, 0);
  }
}

/* ---- one task behind the other */

/* Sums of sums in one task graph: reduce-scatter and allgather make an allreduce, then another, then
 * a broadcast, which changes nothing. */
TEST(test_in_turn) {
  for (SEEDS(seed, 300)) {
    static uint64_t counts[MEMBERS];
    mlfab__algorithm_task tasks[TASKS];
    mlfab__rng prng;
    mlfab__rng_seed(&prng, seed);
    memset(tasks, 0, sizeof tasks);
    tasks[0].members = 1 + below(&prng, 12);
    tasks[0].width = 8;
    tasks[0].segment = 1 + below(&prng, 100);
    draw_counts(&tasks[0], counts, &prng);
    tasks[3] = tasks[2] = tasks[1] = tasks[0];
    tasks[0].kind = MLFAB__COLLECTIVE_REDUCE_SCATTER;
    tasks[1].kind = MLFAB__COLLECTIVE_ALLGATHER;
    tasks[2].kind = MLFAB__COLLECTIVE_ALLREDUCE;
    tasks[3].kind = MLFAB__COLLECTIVE_BROADCAST;
    tasks[3].root = below(&prng, tasks[0].members);
    for (uint32_t t = 0; t < TASKS; t++) {
      tasks[t].algorithm = (uint8_t)(1 + below(&prng, MLFAB_ALGORITHM_COUNT - 1));
      tasks[t].algorithm = mlfab__algorithm_choose(&tasks[t], below(&prng, 100), 1, 1);
    }
    uint8_t *data = draw_data(&tasks[0], I64, &prng);
    uint8_t *wanted = serial(&tasks[0], I64, data);
    world *w = make_world(tasks, TASKS, I64, data, &prng);
    for (uint64_t i = 0; i < tasks[0].count; i++)
      ((uint64_t *)(void *)wanted)[i] *= tasks[0].members;
    run_all(w);
    for (uint32_t i = 0; i < w->members; i++)
      assert_memory_equal(w->of[i].result, wanted, w->bytes);
    free_world(w);
    free(wanted);
    free(data);
  }
}

/* ---- the order of operands, and when RECVs are ready */

/* Ring: block b is ((x_b+1 o x_b+2) o ...) o x_b. */
TEST(test_ring_order) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 1);
  for (uint32_t members = 2; members < 20; members++) {
    mlfab__algorithm_task task = {.kind = MLFAB__COLLECTIVE_ALLREDUCE,
                                  .algorithm = MLFAB_ALGORITHM_RING};
    task.members = members;
    task.width = 4;
    task.count = 5 * members + 3;
    task.segment = 8;
    uint8_t *data = draw_data(&task, F32, &prng);
    world *w = make_world(&task, 1, F32, data, &prng);
    run_all(w);
    for (uint32_t b = 0; b < members; b++) {
      uint64_t n, at = block_of(&task, b, &n);
      uint8_t *sum = duplicate(data + (b + 1) % members * w->bytes + at, n);
      for (uint32_t i = 2; i <= members; i++)
        combine(F32, sum, data + (b + i) % members * w->bytes + at, n, 0);
      for (uint32_t i = 0; i < members; i++) assert_memory_equal(w->of[i].result + at, sum, n);
      free(sum);
    }
    free_world(w);
    free(data);
    assert_int_equal(env.bytes, 0);
  }
}

/* RECVs may write from the beginning, and add where one comes to each stretch. Only DOUBLING, among
 * a power of two, copies, and always. */
TEST(test_recvs_are_ready) {
  for (uint8_t kind = MLFAB__COLLECTIVE_ALLREDUCE; kind <= MLFAB__COLLECTIVE_BARRIER; kind++) {
    for (uint8_t algorithm = 1; algorithm < MLFAB_ALGORITHM_COUNT; algorithm++) {
      mlfab__algorithm_task task = {.kind = kind, .algorithm = algorithm, .members = 8};
      int copies = algorithm == MLFAB_ALGORITHM_DOUBLING && kind != MLFAB__COLLECTIVE_ALLGATHER;
      mlfab__dag dag;
      uint32_t end, tag, culprit;
      task.width = 4;
      task.count = 100;
      task.segment = 8;
      task.after = MLFAB__DAG_NONE;
      if (mlfab__algorithm_cost(&task, algorithm, 1, 1, 1) < 0) continue;
      mlfab__dag_init(&dag, &env);
      assert_int_equal(mlfab__algorithm_build(&dag, &task, &end, &tag), 0);
      assert_int_equal(mlfab__dag_seal(&dag, &culprit), 0);
      mlfab__dag_start(&dag);
      for (uint32_t i = 0; i < dag.nops; i++) {
        int recv = dag.ops[i].kind == MLFAB__DAG_RECV;
        int reduce = dag.ops[i].kind == MLFAB__DAG_RECV_REDUCE;
        int sends = dag.ops[i].kind == MLFAB__DAG_SEND;
        if (sends) assert_int_equal(dag.ops[i].copy, copies);
        if (recv || (reduce && algorithm == MLFAB_ALGORITHM_RING))
          assert_int_equal(mlfab__dag_state(&dag, i), MLFAB__DAG_READY);
      }
      mlfab__dag_free(&dag);
    }
  }
}

/* ---- refusals and choices */

static int build_alone(const mlfab__algorithm_task *task) {
  mlfab__dag dag;
  uint32_t end, tag;
  mlfab__dag_init(&dag, &env);
  int rc = mlfab__algorithm_build(&dag, task, &end, &tag);
  if (rc) assert_int_equal(dag.nops, 0);
  mlfab__dag_free(&dag);
  return rc;
}

TEST(test_refusals) {
  static const uint64_t counts[] = {3, 0, 7};
  mlfab__algorithm_task good = {.kind = MLFAB__COLLECTIVE_REDUCE_SCATTER,
                                .algorithm = MLFAB_ALGORITHM_RING,
                                .members = 3,
                                .me = 2,
                                .width = 4,
                                .count = 10,
                                .counts = counts,
                                .after = MLFAB__DAG_NONE};
  mlfab__algorithm_task bad = good;
  assert_int_equal(build_alone(&good), 0);
#define REFUSED(member, value) \
  bad = good;                  \
  bad.member = value;          \
  assert_int_equal(build_alone(&bad), MLFAB_ERR_ARGUMENT)
  REFUSED(members, 0);
  REFUSED(members, 2);
  REFUSED(members, MLFAB__COLLECTIVE_MEMBERS_MAX + 1);
  REFUSED(me, 3);
  REFUSED(root, 3);
  REFUSED(width, 0);
  REFUSED(count, 9);
  REFUSED(count, 11);
  REFUSED(count, UINT64_MAX);
  REFUSED(kind, 0);
  REFUSED(kind, MLFAB__COLLECTIVE_BARRIER + 1);
  REFUSED(algorithm, MLFAB_ALGORITHM_AUTO);
  REFUSED(algorithm, MLFAB_ALGORITHM_TREE);
  REFUSED(algorithm, MLFAB_ALGORITHM_PLANNED);
  REFUSED(after, 0);
#undef REFUSED
}

static uint8_t choice(uint8_t kind, uint32_t members, uint64_t count, int ordered) {
  mlfab__algorithm_task task = {.kind = kind, .members = members, .width = 4, .count = count};
  task.ordered = (uint8_t)ordered;
  task.segment = 1u << 18;
  uint8_t best = mlfab__algorithm_choose(&task, 10000, 1.25, 10);
  double least = mlfab__algorithm_cost(&task, best, 10000, 1.25, 10);
  assert_true(least >= 0);
  for (uint8_t a = 1; a < MLFAB_ALGORITHM_COUNT; a++) {
    double cost = mlfab__algorithm_cost(&task, a, 10000, 1.25, 10);
    assert_true(cost < 0 || least * 0.949 <= cost);
  }
  task.algorithm = best;
  task.me = members - 1;
  assert_int_equal(mlfab__algorithm_choose(&task, 1, 1, 1), best);
  task.after = MLFAB__DAG_NONE;
  assert_int_equal(build_alone(&task), 0);
  return best;
}

TEST(test_choices) {
  /* Few bytes: few messages. Many: few bytes. */
  assert_int_equal(choice(MLFAB__COLLECTIVE_ALLREDUCE, 8, 100, 0), MLFAB_ALGORITHM_DOUBLING);
  assert_int_equal(choice(MLFAB__COLLECTIVE_ALLREDUCE, 4, 25000000, 0), MLFAB_ALGORITHM_RING);
  assert_int_equal(choice(MLFAB__COLLECTIVE_ALLREDUCE, 64, 100000, 0), MLFAB_ALGORITHM_HALVING);
  assert_int_equal(choice(MLFAB__COLLECTIVE_ALLREDUCE, 8, 100, 1), MLFAB_ALGORITHM_DOUBLING);
  assert_int_equal(choice(MLFAB__COLLECTIVE_ALLREDUCE, 8, 25000000, 1), MLFAB_ALGORITHM_RING);
  assert_int_equal(choice(MLFAB__COLLECTIVE_BROADCAST, 16, 100, 0), MLFAB_ALGORITHM_TREE);
  assert_int_equal(choice(MLFAB__COLLECTIVE_BROADCAST, 16, 25000000, 0), MLFAB_ALGORITHM_RING);
  assert_int_equal(choice(MLFAB__COLLECTIVE_BARRIER, 16, 0, 0), MLFAB_ALGORITHM_DOUBLING);
  for (uint8_t kind = MLFAB__COLLECTIVE_ALLREDUCE; kind <= MLFAB__COLLECTIVE_BARRIER; kind++)
    for (uint32_t members = 1; members < 40; members++)
      for (uint64_t count = 0; count < 10000000; count = 7 * count + 1)
        choice(kind, members, count, members % 2);
}

/* However much the data and small the segments, messages are bounded. */
TEST(test_messages_are_bounded) {
  mlfab__algorithm_task task = {.kind = MLFAB__COLLECTIVE_ALLREDUCE, .members = 1024, .width = 4};
  task.after = MLFAB__DAG_NONE;
  task.count = UINT64_C(1) << 40;
  task.segment = 4096;
  for (uint8_t algorithm = MLFAB_ALGORITHM_RING; algorithm <= MLFAB_ALGORITHM_HALVING;
       algorithm++) {
    task.algorithm = algorithm;
    assert_int_equal(build_alone(&task), 0);
  }
  task.members = 3;
  task.algorithm = MLFAB_ALGORITHM_DOUBLING;
  assert_int_equal(build_alone(&task), 0);
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
