/* dag.c - builds task graphs, checks them, and runs their rounds: see dag.h.
 *
 * seal sorts the edges by dependency (a counting sort: dependents start in the order in which they were named), and
 * finds cycles: it removes operations without dependencies as long as it can. It also hashes the messages. A round has
 * a counter for each operation, and a queue that every operation enters once. */
#include "dag.h"

#include "../base/rng.h"

MLFAB__INTERNAL void mlfab__dag_init(mlfab__dag *dag, mlfab__env *env) {
  memset(dag, 0, sizeof *dag);
  dag->env = env;
}

MLFAB__INTERNAL void mlfab__dag_free(mlfab__dag *dag) {
  mlfab__free(dag->env, dag->ops, dag->ops_room * sizeof *dag->ops);
  mlfab__free(dag->env, dag->edges, dag->edges_room * sizeof *dag->edges);
  mlfab__free(dag->env, dag->block, dag->block_words * sizeof *dag->block);
  mlfab__dag_init(dag, dag->env);
}

MLFAB__INTERNAL void mlfab__dag_clear(mlfab__dag *dag) {
  dag->nops = dag->nedges = 0;
  dag->sealed = 0;
  dag->flaw = MLFAB__DAG_SOUND;
  dag->queue_head = dag->queue_end = 0;
  dag->round = 0;
}

MLFAB__INTERNAL int mlfab__dag_add(mlfab__dag *dag, const mlfab__dag_op *op, uint32_t *id_p) {
  if (dag->nops == MLFAB__DAG_OPS_MAX) return MLFAB_ERR_LIMIT;
  mlfab__dag_op *ops = mlfab__grow(dag->env, dag->ops, &dag->ops_room, dag->nops + 1u, sizeof *ops);
  if (ops == NULL) return MLFAB_ERR_MEMORY;
  dag->ops = ops;
  dag->sealed = 0;
  dag->ops[dag->nops] = *op;
  *id_p = dag->nops++;
  return 0;
}

MLFAB__INTERNAL int mlfab__dag_after(mlfab__dag *dag, uint32_t op, uint32_t dependency) {
  if (op >= dag->nops || dependency >= dag->nops) return MLFAB_ERR_ARGUMENT;
  if (dag->nedges == MLFAB__DAG_EDGES_MAX) return MLFAB_ERR_LIMIT;
  mlfab__dag_edge *edges =
      mlfab__grow(dag->env, dag->edges, &dag->edges_room, dag->nedges + 1u, sizeof *edges);
  if (edges == NULL) return MLFAB_ERR_MEMORY;
  dag->edges = edges;
  dag->sealed = 0;
  dag->edges[dag->nedges].op = op;
  dag->edges[dag->nedges++].dependency = dependency;
  return 0;
}

/* ---- seal */

static int dag_is_recv(const mlfab__dag_op *op) {
  return op->kind == MLFAB__DAG_RECV || op->kind == MLFAB__DAG_RECV_REDUCE;
}

static int dag_is_message(const mlfab__dag_op *op) {
  return op->kind == MLFAB__DAG_SEND || dag_is_recv(op);
}

/* Lays out the block for the present operations and edges; allocates a larger one if needed. */
static int dag_lay_out(mlfab__dag *dag) {
  size_t n = dag->nops, bytes = (n + 3) / 4, entries = 4, words;
  uint32_t messages = 0;
  for (uint32_t i = 0; i < dag->nops; i++) messages += (uint32_t)dag_is_message(&dag->ops[i]);
  while (entries < 2 * (size_t)messages) entries *= 2;
  words = (n + 1) + dag->nedges + 3 * n + entries + 2 * bytes;
  if (words > dag->block_words) {
    size_t wanted = words + words / 2;
    uint32_t *block = mlfab__alloc_array(dag->env, wanted, sizeof *block);
    if (block == NULL) return MLFAB_ERR_MEMORY;
    mlfab__free(dag->env, dag->block, dag->block_words * sizeof *block);
    dag->block = block;
    dag->block_words = wanted;
  }
  dag->first = dag->block;
  dag->heads = dag->first + n + 1;
  dag->start = dag->heads + dag->nedges;
  dag->missing = dag->start + n;
  dag->queue = dag->missing + n;
  dag->table = dag->queue + n;
  dag->state = (uint8_t *)(dag->table + entries);
  dag->triggered = dag->state + 4 * bytes;
  dag->mask = (uint32_t)entries - 1;
  return 0;
}

/* Sorts dependents by dependency, and counts each operation's dependencies in `start`. */
static void dag_sort_edges(mlfab__dag *dag) {
  uint32_t n = dag->nops;
  memset(dag->first, 0, (n + 1) * sizeof *dag->first);
  memset(dag->start, 0, n * sizeof *dag->start);
  for (uint32_t i = 0; i < dag->nedges; i++) {
    dag->first[dag->edges[i].dependency]++;
    dag->start[dag->edges[i].op]++;
  }
  for (uint32_t i = 0; i < n; i++) dag->first[i + 1] += dag->first[i];
  /* first[] holds the end of each list; filling the lists from their ends turns it into the start. */
  for (uint32_t i = dag->nedges; i-- > 0;)
    dag->heads[--dag->first[dag->edges[i].dependency]] = dag->edges[i].op;
}

/* Finds an operation on a cycle: goes back from an operation that is never free, along others of this kind. */
static uint32_t dag_on_cycle(mlfab__dag *dag) {
  uint32_t at = 0;
  for (uint32_t i = 0; i < dag->nedges; i++) {
    const mlfab__dag_edge *edge = &dag->edges[i];
    if (dag->missing[edge->op] == 0 || dag->missing[edge->dependency] == 0) continue;
    dag->queue[edge->op] = edge->dependency;
    at = edge->op;
  }
  for (uint32_t i = 0; i < dag->nops; i++) at = dag->queue[at];
  return at;
}

/* Removes operations that are free of open dependencies, until all are gone or only cycles are left. */
static int dag_find_cycle(mlfab__dag *dag, uint32_t *culprit_p) {
  uint32_t head = 0, end = 0;
  for (uint32_t i = 0; i < dag->nops; i++) {
    dag->missing[i] = dag->start[i];
    if (dag->missing[i] == 0) dag->queue[end++] = i;
  }
  while (head < end) {
    uint32_t id = dag->queue[head++];
    for (uint32_t i = dag->first[id]; i < dag->first[id + 1]; i++)
      if (--dag->missing[dag->heads[i]] == 0) dag->queue[end++] = dag->heads[i];
  }
  if (end == dag->nops) return 0;
  *culprit_p = dag_on_cycle(dag);
  return 1;
}

static uint32_t dag_hash(int recv, uint32_t peer, uint32_t tag) {
  return (uint32_t)mlfab__mix(((uint64_t)peer << 33) ^ ((uint64_t)tag << 1) ^ (uint64_t)recv);
}

/* Returns the place of the message in the table, or the empty place for it. */
static uint32_t dag_look_up(const mlfab__dag *dag, int recv, uint32_t peer, uint32_t tag) {
  uint32_t at = dag_hash(recv, peer, tag) & dag->mask;
  for (; dag->table[at] != 0; at = (at + 1) & dag->mask) {
    const mlfab__dag_op *op = &dag->ops[dag->table[at] - 1];
    if (op->peer == peer && op->tag == tag && dag_is_recv(op) == recv) break;
  }
  return at;
}

/* Puts the messages into the table; returns 1 if one of them is there twice. */
static int dag_find_twice(mlfab__dag *dag, uint32_t *culprit_p) {
  memset(dag->table, 0, ((size_t)dag->mask + 1) * sizeof *dag->table);
  for (uint32_t i = 0; i < dag->nops; i++) {
    const mlfab__dag_op *op = &dag->ops[i];
    if (!dag_is_message(op)) continue;
    uint32_t at = dag_look_up(dag, dag_is_recv(op), op->peer, op->tag);
    if (dag->table[at] != 0) {
      *culprit_p = i;
      return 1;
    }
    dag->table[at] = i + 1;
  }
  return 0;
}

/* Computes how many dependencies start each operation; returns 1 if one needs more than it has. */
static int dag_find_need(mlfab__dag *dag, uint32_t *culprit_p) {
  dag->required = 0;
  for (uint32_t i = 0; i < dag->nops; i++) {
    const mlfab__dag_op *op = &dag->ops[i];
    uint32_t most = dag->start[i] + (op->outside != 0);
    if (op->need > most) {
      *culprit_p = i;
      return 1;
    }
    dag->start[i] = op->need ? op->need : most;
    dag->required += !op->optional;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__dag_seal(mlfab__dag *dag, uint32_t *culprit_p) {
  dag->sealed = 0;
  dag->flaw = MLFAB__DAG_SOUND;
  *culprit_p = MLFAB__DAG_NONE;
  int rc = dag_lay_out(dag);
  if (rc) return rc;
  dag_sort_edges(dag);
  if (dag_find_cycle(dag, culprit_p)) {
    dag->flaw = MLFAB__DAG_CYCLE;
  } else if (dag_find_need(dag, culprit_p)) {
    dag->flaw = MLFAB__DAG_NEED;
  } else if (dag_find_twice(dag, culprit_p)) {
    dag->flaw = MLFAB__DAG_TWICE;
  }
  if (dag->flaw) return MLFAB_ERR_ARGUMENT;
  dag->sealed = 1;
  return 0;
}

/* ---- a round */

static void dag_ready(mlfab__dag *dag, uint32_t id) {
  dag->state[id] = MLFAB__DAG_READY;
  dag->queue[dag->queue_end++] = id;
}

/* Counts a dependency that is done. The operation starts once: later dependencies find it started. */
static void dag_count(mlfab__dag *dag, uint32_t id) {
  if (dag->state[id] != MLFAB__DAG_WAITING) return;
  if (--dag->missing[id] == 0) dag_ready(dag, id);
}

MLFAB__INTERNAL void mlfab__dag_start(mlfab__dag *dag) {
  assert(dag->sealed);
  dag->round++;
  dag->queue_head = dag->queue_end = 0;
  dag->open = dag->required;
  memset(dag->state, MLFAB__DAG_WAITING, dag->nops);
  memset(dag->triggered, 0, dag->nops);
  for (uint32_t i = 0; i < dag->nops; i++) {
    dag->missing[i] = dag->start[i];
    if (dag->missing[i] == 0) dag_ready(dag, i);
  }
}

MLFAB__INTERNAL int mlfab__dag_next(mlfab__dag *dag, uint32_t *id_p) {
  if (dag->queue_head == dag->queue_end) return 0;
  *id_p = dag->queue[dag->queue_head++];
  dag->state[*id_p] = MLFAB__DAG_RUNNING;
  return 1;
}

MLFAB__INTERNAL void mlfab__dag_done(mlfab__dag *dag, uint32_t id) {
  assert(id < dag->nops && dag->state[id] == MLFAB__DAG_RUNNING);
  dag->state[id] = MLFAB__DAG_DONE;
  dag->open -= !dag->ops[id].optional;
  for (uint32_t i = dag->first[id]; i < dag->first[id + 1]; i++) dag_count(dag, dag->heads[i]);
}

MLFAB__INTERNAL void mlfab__dag_trigger(mlfab__dag *dag, uint32_t id) {
  assert(id < dag->nops && dag->round > 0);
  if (!dag->ops[id].outside || dag->triggered[id]) return;
  dag->triggered[id] = 1;
  dag_count(dag, id);
}

MLFAB__INTERNAL int mlfab__dag_finished(const mlfab__dag *dag) {
  return dag->round > 0 && dag->open == 0;
}

MLFAB__INTERNAL int mlfab__dag_state(const mlfab__dag *dag, uint32_t id) {
  assert(id < dag->nops);
  return dag->state[id];
}

MLFAB__INTERNAL uint32_t mlfab__dag_find_recv(const mlfab__dag *dag, uint32_t peer, uint32_t tag) {
  assert(dag->sealed);
  uint32_t entry = dag->table[dag_look_up(dag, 1, peer, tag)];
  return entry ? entry - 1 : MLFAB__DAG_NONE;
}
