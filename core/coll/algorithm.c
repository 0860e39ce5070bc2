/* algorithm.c - builds collectives as task graphs, and chooses among the algorithms by their cost. See algorithm.h.
 *
 * Most algorithms are rows: one operation for each segment of a stretch, each waiting for the same segment of an
 * earlier row. Only HALVING moves stretches that begin at a different block at either end; there a segment waits for
 * all segments that it meets. */
#include "algorithm.h"

#define ALGORITHM_MESSAGES 65536u /* most messages per pass over the data; then segments grow */
#define ALGORITHM_STEPS 10u       /* log2 of MLFAB__COLLECTIVE_MEMBERS_MAX */

/* A task under construction. `block` and `offset` belong to the last look-up: the next look-up is mostly near it. */
typedef struct algorithm_work {
  mlfab__dag *dag;
  const mlfab__algorithm_task *task;
  const uint64_t *counts; /* NULL: even */
  uint32_t members, me;
  uint32_t end;
  uint64_t total, step; /* bytes: of the data, of a segment */
  uint32_t block;
  uint64_t offset;
  int rc; /* the first error; after it nothing is added */
} algorithm_work;

/* ---- positions and sizes */

static uint64_t algorithm_block_bytes(const algorithm_work *w, uint32_t block) {
  const mlfab__algorithm_task *task = w->task;
  if (w->counts) return w->counts[block] * task->width;
  return (task->count / w->members + (block < task->count % w->members)) * task->width;
}

/* Returns the start of the block; for block `members`: the end of the data. */
static uint64_t algorithm_offset(algorithm_work *w, uint32_t block) {
  if (!w->counts) {
    uint64_t count = w->task->count, extra = count % w->members;
    return (count / w->members * block + mlfab__min(block, extra)) * w->task->width;
  }
  while (w->block < block) w->offset += algorithm_block_bytes(w, w->block++);
  while (w->block > block) w->offset -= algorithm_block_bytes(w, --w->block);
  return w->offset;
}

static uint64_t algorithm_largest(const algorithm_work *w) {
  uint64_t most = 0;
  if (!w->counts) return algorithm_block_bytes(w, 0);
  for (uint32_t b = 0; b < w->members; b++) most = mlfab__max(most, algorithm_block_bytes(w, b));
  return most;
}

static uint32_t algorithm_segments(const algorithm_work *w, uint64_t bytes) {
  return (uint32_t)((bytes + w->step - 1) / w->step);
}

/* Fills in sizes. Errors: ARGUMENT. */
static int algorithm_measure(algorithm_work *w, const mlfab__algorithm_task *task) {
  uint64_t sum = 0, least;
  int blocks =
      task->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER || task->kind == MLFAB__COLLECTIVE_ALLGATHER;
  memset(w, 0, sizeof *w);
  w->task = task;
  w->members = task->members;
  w->me = task->me;
  w->counts = blocks ? task->counts : NULL;
  if (task->members == 0 || task->members > MLFAB__COLLECTIVE_MEMBERS_MAX)
    return MLFAB_ERR_ARGUMENT;
  if (task->me >= task->members || task->root >= task->members) return MLFAB_ERR_ARGUMENT;
  if (task->kind < MLFAB__COLLECTIVE_ALLREDUCE || task->kind > MLFAB__COLLECTIVE_BARRIER)
    return MLFAB_ERR_ARGUMENT;
  if (task->width == 0 || task->count > (UINT64_MAX >> 1) / task->width) return MLFAB_ERR_ARGUMENT;
  for (uint32_t b = 0; w->counts && b < task->members; b++) {
    if (w->counts[b] > task->count - sum) return MLFAB_ERR_ARGUMENT;
    sum += w->counts[b];
  }
  if (w->counts && sum != task->count) return MLFAB_ERR_ARGUMENT;
  w->total = task->count * task->width;
  least = (w->total + ALGORITHM_MESSAGES - 1) / ALGORITHM_MESSAGES + task->width - 1;
  w->step = mlfab__max(mlfab__max(task->segment, least), task->width);
  w->step -= w->step % task->width;
  return 0;
}

/* ---- operations */

static void algorithm_after(algorithm_work *w, uint32_t op, uint32_t dependency) {
  if (dependency == MLFAB__DAG_NONE) dependency = w->task->after;
  if (w->rc || dependency == MLFAB__DAG_NONE) return;
  w->rc = mlfab__dag_after(w->dag, op, dependency);
}

/* Adds an operation over a stretch of the data, without dependencies. */
static uint32_t algorithm_add(algorithm_work *w, mlfab__dag_op op, uint64_t at, uint64_t bytes) {
  uint32_t id = 0;
  op.space = w->task->space;
  op.at = w->task->at + at;
  op.bytes = bytes;
  op.reduce = op.kind == MLFAB__DAG_RECV_REDUCE ? w->task->reduce : 0;
  if (!w->rc) w->rc = mlfab__dag_add(w->dag, &op, &id);
  return id;
}

static mlfab__dag_op algorithm_send(uint32_t peer, uint32_t tag) {
  mlfab__dag_op op = {0};
  op.kind = MLFAB__DAG_SEND;
  op.peer = peer;
  op.tag = tag;
  return op;
}

static mlfab__dag_op algorithm_recv(uint32_t peer, uint32_t tag) {
  mlfab__dag_op op = algorithm_send(peer, tag);
  op.kind = MLFAB__DAG_RECV;
  return op;
}

/* Makes an operation. left: the message is the left operand. */
static mlfab__dag_op algorithm_recv_reduce(uint32_t peer, uint32_t tag, int left) {
  mlfab__dag_op op = algorithm_send(peer, tag);
  op.kind = MLFAB__DAG_RECV_REDUCE;
  op.left = (uint8_t)left;
  return op;
}

/* Makes the operation of a row up a tree, which is paced: tags of such rows count from 0. */
static mlfab__dag_op algorithm_paced(const algorithm_work *w, mlfab__dag_op op) {
  op.paced = w->task->tag == 0;
  return op;
}

static mlfab__dag_op algorithm_divide(void) {
  mlfab__dag_op op = {0};
  op.kind = MLFAB__DAG_COMPUTE;
  op.code = MLFAB__COLLECTIVE_DIVIDE;
  return op;
}

/* Adds the operation for each segment of a stretch, tags counting up; segment i waits for operation after + i. Returns
 * the first of them. */
static uint32_t algorithm_row(algorithm_work *w, mlfab__dag_op op, uint64_t at, uint64_t bytes,
                              uint32_t after) {
  uint32_t first = w->dag->nops;
  for (uint64_t from = 0; from < bytes && !w->rc; from += w->step) {
    uint32_t id = algorithm_add(w, op, at + from, mlfab__min(w->step, bytes - from));
    algorithm_after(w, id, after);
    if (after != MLFAB__DAG_NONE) after++;
    op.tag++;
  }
  return first;
}

/* Makes the end of the task wait for the row. */
static void algorithm_until(algorithm_work *w, uint32_t first, uint64_t bytes) {
  for (uint32_t i = 0; i < algorithm_segments(w, bytes) && !w->rc; i++)
    algorithm_after(w, w->end, first + i);
}

/* Divides the finished stretch if the task is a mean. Returns the row to wait for from then on. */
static uint32_t algorithm_finish(algorithm_work *w, uint64_t at, uint64_t bytes, uint32_t after) {
  return w->task->mean ? algorithm_row(w, algorithm_divide(), at, bytes, after) : after;
}

/* ---- RING */

/* The first half: the block that ends at `me` arrives in the last step. Returns the row that finished it.
 * Reduce-scatter alone has no message that proves the arrival of its SENDs. */
static uint32_t algorithm_scatter(algorithm_work *w, uint32_t tag, uint32_t per) {
  uint32_t n = w->members, last = MLFAB__DAG_NONE;
  uint32_t next = (w->me + 1) % n, before = (w->me + n - 1) % n;
  for (uint32_t s = 0; s + 1 < n && !w->rc; s++) {
    uint32_t out = (w->me + 2 * n - 1 - s) % n, in = (out + n - 1) % n;
    uint64_t bytes = algorithm_block_bytes(w, out);
    uint32_t sends = algorithm_row(w, algorithm_send(next, tag + out * per),
                                   algorithm_offset(w, out), bytes, last);
    if (w->task->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER) algorithm_until(w, sends, bytes);
    last = algorithm_row(w, algorithm_recv_reduce(before, tag + in * per, 1),
                         algorithm_offset(w, in), algorithm_block_bytes(w, in), MLFAB__DAG_NONE);
  }
  return algorithm_finish(w, algorithm_offset(w, w->me), algorithm_block_bytes(w, w->me), last);
}

/* The second half; `last` is the row that finished the own block. */
static void algorithm_gather(algorithm_work *w, uint32_t tag, uint32_t per, uint32_t last) {
  uint32_t n = w->members, next = (w->me + 1) % n, before = (w->me + n - 1) % n, in = w->me;
  for (uint32_t s = 0; s + 1 < n && !w->rc; s++) {
    uint32_t out = in;
    uint64_t bytes = algorithm_block_bytes(w, out);
    in = (out + n - 1) % n;
    algorithm_until(w,
                    algorithm_row(w, algorithm_send(next, tag + out * per),
                                  algorithm_offset(w, out), bytes, last),
                    bytes);
    last = algorithm_row(w, algorithm_recv(before, tag + in * per), algorithm_offset(w, in),
                         algorithm_block_bytes(w, in), MLFAB__DAG_NONE);
  }
  algorithm_until(w, last, algorithm_block_bytes(w, in));
}

static uint32_t algorithm_around(algorithm_work *w) {
  uint32_t per = algorithm_segments(w, algorithm_largest(w)), tag = w->task->tag,
           last = MLFAB__DAG_NONE;
  if (w->task->kind != MLFAB__COLLECTIVE_ALLGATHER) {
    last = algorithm_scatter(w, tag, per);
    tag += w->members * per;
    if (w->task->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER) {
      algorithm_until(w, last, algorithm_block_bytes(w, w->me));
      return tag;
    }
  }
  algorithm_gather(w, tag, per, last);
  return tag + w->members * per;
}

/* ---- RING, ordered: a chain up, and back */

/* Member 0 first. Returns the row that passes on the sum of all up to `me`; at the last member, the row that finished
 * it. */
static uint32_t algorithm_up(algorithm_work *w, uint32_t tag, uint64_t at, uint64_t bytes) {
  uint32_t last = MLFAB__DAG_NONE;
  if (w->me > 0)
    last = algorithm_row(w, algorithm_recv_reduce(w->me - 1, tag, 1), at, bytes, MLFAB__DAG_NONE);
  if (w->me + 1 == w->members) return algorithm_finish(w, at, bytes, last);
  return algorithm_row(w, algorithm_send(w->me + 1, tag), at, bytes, last);
}

static uint32_t algorithm_chain_allreduce(algorithm_work *w) {
  uint32_t tag = w->task->tag, last = algorithm_up(w, tag, 0, w->total);
  if (w->me + 1 < w->members)
    last = algorithm_row(w, algorithm_recv(w->me + 1, tag), 0, w->total, MLFAB__DAG_NONE);
  if (w->me > 0) last = algorithm_row(w, algorithm_send(w->me - 1, tag), 0, w->total, last);
  algorithm_until(w, last, w->total);
  return tag + algorithm_segments(w, w->total);
}

/* Up the chain as well; the last member then sends each member its block. */
static uint32_t algorithm_chain_scatter(algorithm_work *w) {
  uint32_t tag = w->task->tag, top = w->members - 1,
           per = algorithm_segments(w, algorithm_largest(w));
  uint32_t back = tag + w->members * per;
  for (uint32_t b = 0; b < w->members && !w->rc; b++) {
    uint64_t at = algorithm_offset(w, b), bytes = algorithm_block_bytes(w, b);
    uint32_t last = algorithm_up(w, tag + b * per, at, bytes);
    if (w->me == top && b != top) {
      last = algorithm_row(w, algorithm_send(b, back), at, bytes, last);
    } else if (w->me == b && b != top) {
      last = algorithm_row(w, algorithm_recv(top, back), at, bytes, MLFAB__DAG_NONE);
    }
    algorithm_until(w, last, bytes);
  }
  return back + per;
}

/* ---- HALVING */

/* A stretch that begins at a block and may wrap round to the beginning of the data. Segments are cut at both places;
 * positions in it count from its beginning. */
typedef struct algorithm_bow {
  uint64_t at;   /* its start in the data */
  uint64_t tail; /* bytes from there to the end of the data */
  uint64_t bytes;
} algorithm_bow;

/* Returns the bow of `blocks` blocks, fewer than all, from `block` on. */
static algorithm_bow algorithm_bow_of(algorithm_work *w, uint32_t block, uint32_t blocks) {
  algorithm_bow bow;
  uint32_t end = block + blocks;
  bow.at = algorithm_offset(w, block);
  bow.tail = w->total - bow.at;
  bow.bytes = end <= w->members ? algorithm_offset(w, end) - bow.at
                                : bow.tail + algorithm_offset(w, end - w->members);
  return bow;
}

/* Returns the index of the segment that has this byte. */
static uint32_t algorithm_bow_index(const algorithm_work *w, const algorithm_bow *bow,
                                    uint64_t place) {
  if (place < bow->tail) return (uint32_t)(place / w->step);
  return algorithm_segments(w, bow->tail) + (uint32_t)((place - bow->tail) / w->step);
}

static uint32_t algorithm_bow_segments(const algorithm_work *w, const algorithm_bow *bow) {
  return bow->bytes ? algorithm_bow_index(w, bow, bow->bytes - 1) + 1 : 0;
}

/* Returns the end of the segment that begins at this place. */
static uint64_t algorithm_bow_end(const algorithm_work *w, const algorithm_bow *bow,
                                  uint64_t place) {
  uint64_t end = mlfab__min(place + w->step, bow->bytes);
  return place < bow->tail ? mlfab__min(end, bow->tail) : end;
}

static uint64_t algorithm_bow_at(const algorithm_bow *bow, uint64_t place) {
  return place < bow->tail ? bow->at + place : place - bow->tail;
}

/* Makes `op` wait for those operations of a row, one for each segment of the bow, that meet [from, end). Returns their
 * number. */
static uint32_t algorithm_meet(algorithm_work *w, uint32_t op, uint32_t row,
                               const algorithm_bow *bow, uint64_t from, uint64_t end) {
  end = mlfab__min(end, bow->bytes);
  if (from >= end || row == MLFAB__DAG_NONE) return 0;
  uint32_t i = algorithm_bow_index(w, bow, from), last = algorithm_bow_index(w, bow, end - 1);
  for (uint32_t id = i; id <= last; id++) algorithm_after(w, op, row + id);
  return last - i + 1;
}

/* A row of an earlier step that wrote at this member: its stretch, and its start, counted from the beginning of the own
 * block. */
typedef struct algorithm_written {
  uint32_t row;
  algorithm_bow bow;
  uint64_t from;
} algorithm_written;

/* Sends a bow that begins `from` bytes after the beginning of the own block; its segments wait for all rows that wrote
 * there. */
static void algorithm_send_bow(algorithm_work *w, mlfab__dag_op op, const algorithm_bow *bow,
                               uint64_t from, const algorithm_written *written, uint32_t n,
                               int until) {
  for (uint64_t place = 0, end; place < bow->bytes && !w->rc; place = end) {
    uint32_t id = algorithm_add(w, op, algorithm_bow_at(bow, place),
                                algorithm_bow_end(w, bow, place) - place);
    uint32_t waits = 0;
    end = algorithm_bow_end(w, bow, place);
    for (uint32_t i = 0; i < n; i++) {
      uint64_t base = written[i].from, first = mlfab__max(from + place, base);
      if (from + end <= base) continue;
      waits +=
          algorithm_meet(w, id, written[i].row, &written[i].bow, first - base, from + end - base);
    }
    if (waits == 0) algorithm_after(w, id, MLFAB__DAG_NONE);
    if (until) algorithm_after(w, w->end, id);
    op.tag++;
  }
}

/* Returns the number of members whose blocks travel in step k. */
static uint32_t algorithm_part(const algorithm_work *w, uint32_t k) {
  return (uint32_t)mlfab__min(1u << k, w->members - (1u << k));
}

static uint32_t algorithm_log(uint32_t members) {
  uint32_t log = 0;
  while ((1u << log) < members) log++;
  return log;
}

/* The first half. Step k sends blocks 2^k or more behind `me`, which receive nothing any more. Step k receives into
 * blocks from `me` on. The longer stretch of step k + 1 began there, too, with the same cuts (in the first step it may
 * be shorter): so segment i waits for segment i. */
static algorithm_written algorithm_halve(algorithm_work *w, uint32_t tag) {
  algorithm_written last = {MLFAB__DAG_NONE, {0, 0, 0}, 0};
  uint32_t n = w->members, had = 0;
  int until = w->task->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER;
  for (uint32_t k = algorithm_log(n); k-- > 0 && !w->rc;) {
    uint32_t far = 1u << k, to = (w->me + far) % n, from = (w->me + n - far) % n;
    algorithm_bow out = algorithm_bow_of(w, to, algorithm_part(w, k));
    algorithm_bow in = algorithm_bow_of(w, w->me, algorithm_part(w, k));
    mlfab__dag_op op = algorithm_recv_reduce(from, tag, from < w->me);
    uint32_t row, i = 0;
    algorithm_send_bow(w, algorithm_send(to, tag), &out, algorithm_bow_of(w, w->me, far).bytes,
                       &last, 1, until);
    row = w->dag->nops;
    for (uint64_t place = 0, end; place < in.bytes && !w->rc; place = end, i++) {
      end = algorithm_bow_end(w, &in, place);
      op.tag = tag + i;
      algorithm_after(w, algorithm_add(w, op, algorithm_bow_at(&in, place), end - place),
                      i < had ? last.row + i : MLFAB__DAG_NONE);
    }
    last.row = row;
    last.bow = in;
    had = algorithm_bow_segments(w, &in);
  }
  last.row =
      algorithm_finish(w, algorithm_offset(w, w->me), algorithm_block_bytes(w, w->me), last.row);
  return last;
}

/* The second half; `own` is the row that finished the own block. */
static void algorithm_double(algorithm_work *w, uint32_t tag, algorithm_written own) {
  algorithm_written written[ALGORITHM_STEPS + 1];
  uint32_t n = w->members, steps = algorithm_log(n);
  written[0] = own;
  for (uint32_t k = 0; k < steps && !w->rc; k++) {
    uint32_t far = 1u << k, to = (w->me + n - far) % n, from = (w->me + far) % n;
    algorithm_written *in = &written[k + 1];
    mlfab__dag_op op = algorithm_recv(from, tag);
    algorithm_bow out = algorithm_bow_of(w, w->me, algorithm_part(w, k));
    algorithm_send_bow(w, algorithm_send(to, tag), &out, 0, written, k + 1, 1);
    in->from = algorithm_bow_of(w, w->me, far).bytes;
    in->bow = algorithm_bow_of(w, from, algorithm_part(w, k));
    in->row = w->dag->nops;
    for (uint64_t place = 0, end; place < in->bow.bytes && !w->rc; place = end) {
      end = algorithm_bow_end(w, &in->bow, place);
      uint32_t id = algorithm_add(w, op, algorithm_bow_at(&in->bow, place), end - place);
      algorithm_after(w, id, MLFAB__DAG_NONE);
      algorithm_after(w, w->end, id);
      op.tag++;
    }
  }
}

/* Each half has its own range of tags: the peers of a half differ from step to step. */
static uint32_t algorithm_halving(algorithm_work *w) {
  uint32_t tag = w->task->tag, range = algorithm_segments(w, w->total) + 1;
  algorithm_written own = {MLFAB__DAG_NONE, {0, 0, 0}, 0};
  if (w->task->kind != MLFAB__COLLECTIVE_ALLGATHER) {
    own = algorithm_halve(w, tag);
    tag += range;
    if (w->task->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER) {
      algorithm_until(w, own.row, algorithm_block_bytes(w, w->me));
      return tag;
    }
  }
  algorithm_double(w, tag, own);
  return tag + range;
}

/* ---- DOUBLING */

/* Returns the member with number v if the first 2 * extra members are pairs. */
static uint32_t algorithm_partner(uint32_t v, uint32_t extra) {
  return v < extra ? 2 * v : v + extra;
}

/* Each step sends all of the data; every member adds into the memory that it sends. */
static uint32_t algorithm_exchange(algorithm_work *w) {
  uint32_t tag = w->task->tag, me = w->me, last = MLFAB__DAG_NONE, pow = 1;
  uint64_t bytes = w->total;
  while (2 * pow <= w->members) pow *= 2;
  uint32_t extra = w->members - pow;
  int paired = me < 2 * extra;
  if (paired && me % 2) {
    algorithm_row(w, algorithm_send(me - 1, tag), 0, bytes, MLFAB__DAG_NONE);
    algorithm_until(w, algorithm_row(w, algorithm_recv(me - 1, tag), 0, bytes, MLFAB__DAG_NONE),
                    bytes);
    return tag + algorithm_segments(w, bytes);
  }
  if (paired) last = algorithm_row(w, algorithm_recv_reduce(me + 1, tag, 0), 0, bytes, last);
  for (uint32_t far = 1, v = paired ? me / 2 : me - extra; far < pow; far *= 2) {
    uint32_t peer = algorithm_partner(v ^ far, extra);
    mlfab__dag_op send = algorithm_send(peer, tag);
    send.copy = 1;
    last = algorithm_row(w, send, 0, bytes, last);
    last = algorithm_row(w, algorithm_recv_reduce(peer, tag, peer < me), 0, bytes, last);
  }
  last = algorithm_finish(w, 0, bytes, last);
  if (paired) last = algorithm_row(w, algorithm_send(me + 1, tag), 0, bytes, last);
  algorithm_until(w, last, bytes);
  return tag + algorithm_segments(w, bytes);
}

/* ---- TREE */

/* Down a binomial tree from the root; `last` is the row that finished the data there. */
static void algorithm_down(algorithm_work *w, uint32_t root, uint32_t tag, uint32_t last) {
  uint32_t n = (uint32_t)mlfab__max(w->members, 1), v = (w->me + n - root) % n;
  uint32_t low = v ? v & (0u - v) : 1u << algorithm_log(n);
  if (v)
    last =
        algorithm_row(w, algorithm_recv((v - low + root) % n, tag), 0, w->total, MLFAB__DAG_NONE);
  if (v) algorithm_until(w, last, w->total);
  for (uint32_t far = low / 2; far > 0; far /= 2) {
    if (v + far >= n) continue;
    algorithm_until(w,
                    algorithm_row(w, algorithm_send((v + far + root) % n, tag), 0, w->total, last),
                    w->total);
  }
}

/* Up to member 0: each child brings the sum of the neighbours above those that are in already. */
static uint32_t algorithm_tree(algorithm_work *w) {
  uint32_t tag = w->task->tag, me = w->me, last = MLFAB__DAG_NONE, far = 1;
  for (; me % (2 * far) == 0 && far < w->members; far *= 2) {
    if (me + far >= w->members) continue;
    last = algorithm_row(w, algorithm_paced(w, algorithm_recv_reduce(me + far, tag, 0)), 0,
                         w->total, last);
  }
  if (me) {
    algorithm_row(w, algorithm_paced(w, algorithm_send(me - far, tag)), 0, w->total, last);
  } else {
    last = algorithm_finish(w, 0, w->total, last);
  }
  algorithm_down(w, 0, tag, last);
  return tag + algorithm_segments(w, w->total);
}

/* ---- PLANNED */

static uint32_t algorithm_planned(algorithm_work *w) {
  const mlfab__tree_node *tree = w->task->tree, *mine = tree;
  uint32_t tag = w->task->tag, down = tag + algorithm_segments(w, w->total), last = MLFAB__DAG_NONE;
  while (mine->worker != w->me) mine++;
  for (uint32_t i = 0; i < w->members && !w->rc; i++) {
    if (tree[i].parent != w->me) continue;
    uint32_t after = last;
    last = algorithm_row(w, algorithm_paced(w, algorithm_recv_reduce(tree[i].worker, tag, 0)), 0,
                         w->total, after);
  }
  if (mine->parent == MLFAB__NO_NODE) {
    last = algorithm_finish(w, 0, w->total, last);
  } else {
    algorithm_row(w, algorithm_paced(w, algorithm_send(mine->parent, tag)), 0, w->total, last);
    last = algorithm_row(w, algorithm_recv(mine->giver, down), 0, w->total, MLFAB__DAG_NONE);
  }
  algorithm_until(w, last, w->total);
  for (uint32_t i = 0; i < w->members && !w->rc; i++) {
    if (tree[i].giver != w->me) continue;
    algorithm_until(w, algorithm_row(w, algorithm_send(tree[i].worker, down), 0, w->total, last),
                    w->total);
  }
  return down + algorithm_segments(w, w->total);
}

/* Returns 1 if every way leads to the root. `at`: position of a member in the list, plus one. */
static int algorithm_leads(const mlfab__tree_node *tree, uint32_t n, const uint32_t *at,
                           uint32_t root, int down) {
  for (uint32_t i = 0; i < n; i++) {
    uint32_t member = tree[i].worker;
    for (uint32_t steps = 0; member != root; steps++) {
      const mlfab__tree_node *node = &tree[at[member] - 1];
      member = down ? node->giver : node->parent;
      if (steps == n || member >= n) return 0;
    }
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__algorithm_check_tree(const mlfab__tree_node *tree, uint32_t n,
                                                uint32_t *most_p) {
  uint32_t at[MLFAB__COLLECTIVE_MEMBERS_MAX] = {0}, children[MLFAB__COLLECTIVE_MEMBERS_MAX] = {0};
  uint32_t root = MLFAB__NO_NODE;
  *most_p = 0;
  if (n == 0 || n > MLFAB__COLLECTIVE_MEMBERS_MAX) return MLFAB_ERR_ARGUMENT;
  for (uint32_t i = 0; i < n; i++) {
    const mlfab__tree_node *node = &tree[i];
    int top = node->parent == MLFAB__NO_NODE;
    if (node->worker >= n || at[node->worker] || top != (node->giver == MLFAB__NO_NODE) ||
        (top && root != MLFAB__NO_NODE))
      return MLFAB_ERR_ARGUMENT;
    at[node->worker] = i + 1;
    if (top) root = node->worker;
    if (!top && node->parent < n) *most_p = (uint32_t)mlfab__max(*most_p, ++children[node->parent]);
  }
  if (root == MLFAB__NO_NODE || !algorithm_leads(tree, n, at, root, 0) ||
      !algorithm_leads(tree, n, at, root, 1))
    return MLFAB_ERR_ARGUMENT;
  return 0;
}

/* ---- broadcast and barrier */

static uint32_t algorithm_broadcast(algorithm_work *w) {
  const mlfab__algorithm_task *task = w->task;
  uint32_t n = w->members, v = (w->me + n - task->root) % n, last = MLFAB__DAG_NONE;
  uint32_t next_tag = task->tag + algorithm_segments(w, w->total);
  if (task->algorithm == MLFAB_ALGORITHM_TREE) {
    algorithm_down(w, task->root, task->tag, last);
    return next_tag;
  }
  if (v) last = algorithm_row(w, algorithm_recv((w->me + n - 1) % n, task->tag), 0, w->total, last);
  if (v + 1 < n)
    last = algorithm_row(w, algorithm_send((w->me + 1) % n, task->tag), 0, w->total, last);
  algorithm_until(w, last, w->total);
  return next_tag;
}

/* In step k each member has heard of the 2^k members before it, and tells the member 2^k after it. */
static uint32_t algorithm_barrier(algorithm_work *w) {
  uint32_t n = w->members, tag = w->task->tag, heard[ALGORITHM_STEPS], steps = 0;
  for (uint32_t far = 1; far < n; far *= 2, steps++) {
    mlfab__dag_op send = algorithm_send((w->me + far) % n, tag);
    send.copy = 1; /* the memory is not kept for the peer */
    uint32_t id = algorithm_add(w, send, 0, 0);
    if (steps == 0) algorithm_after(w, id, MLFAB__DAG_NONE);
    for (uint32_t k = 0; k < steps; k++) algorithm_after(w, id, heard[k]);
    algorithm_after(w, w->end, id);
    heard[steps] = algorithm_add(w, algorithm_recv((w->me + n - far) % n, tag), 0, 0);
    algorithm_after(w, heard[steps], MLFAB__DAG_NONE);
    algorithm_after(w, w->end, heard[steps]);
  }
  return tag + 1;
}

static uint32_t algorithm_ring(algorithm_work *w) {
  const mlfab__algorithm_task *task = w->task;
  if (task->kind == MLFAB__COLLECTIVE_BROADCAST) return algorithm_broadcast(w);
  if (!task->ordered || task->kind == MLFAB__COLLECTIVE_ALLGATHER) return algorithm_around(w);
  return task->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER ? algorithm_chain_scatter(w)
                                                        : algorithm_chain_allreduce(w);
}

static uint32_t algorithm_doubling(algorithm_work *w) {
  if (w->task->kind == MLFAB__COLLECTIVE_BARRIER) return algorithm_barrier(w);
  return w->task->kind == MLFAB__COLLECTIVE_ALLGATHER ? algorithm_halving(w)
                                                      : algorithm_exchange(w);
}

static uint32_t algorithm_binomial(algorithm_work *w) {
  return w->task->kind == MLFAB__COLLECTIVE_BROADCAST ? algorithm_broadcast(w) : algorithm_tree(w);
}

/* ---- costs */

typedef struct algorithm_link {
  double latency, send, add; /* ns for a message, for a byte, for a byte */
} algorithm_link;

/* Returns the cost of one step of `bytes` that are sent and (add 1) added: all but one segment of the shorter part is
 * hidden behind the longer. */
static double algorithm_step_cost(const algorithm_work *w, const algorithm_link *link, double bytes,
                                  int add) {
  double send = bytes * link->send, sum = add ? bytes * link->add : 0;
  double step = (double)w->step, less = send < sum ? send : sum;
  double seen = bytes > step ? less * step / bytes : less;
  return link->latency + (send > sum ? send : sum) + seen;
}

/* Returns the cost of the steps of one half of HALVING. */
static double algorithm_half_cost(const algorithm_work *w, const algorithm_link *link, int add) {
  double cost = 0, most = (double)algorithm_largest(w), total = (double)w->total;
  for (uint32_t k = 0; k < algorithm_log(w->members); k++) {
    double bytes = most * algorithm_part(w, k);
    cost += algorithm_step_cost(w, link, bytes < total ? bytes : total, add);
  }
  return cost;
}

/* Returns the cost of all segments down a chain: the first all the way, the others behind it. */
static double algorithm_chain_cost(const algorithm_work *w, const algorithm_link *link, int add) {
  double total = (double)w->total, first = total < (double)w->step ? total : (double)w->step;
  double slow = add && link->add > link->send ? link->add : link->send;
  return (w->members - 1) * algorithm_step_cost(w, link, first, add) + (total - first) * slow;
}

static double algorithm_ring_cost(const algorithm_work *w, const algorithm_link *link) {
  double most = (double)algorithm_largest(w), steps = w->members - 1, cost = 0;
  int kind = w->task->kind;
  if (kind == MLFAB__COLLECTIVE_BROADCAST) return algorithm_chain_cost(w, link, 0);
  if (w->task->ordered && kind != MLFAB__COLLECTIVE_ALLGATHER) {
    double back = kind == MLFAB__COLLECTIVE_ALLREDUCE
                      ? algorithm_chain_cost(w, link, 0)
                      : algorithm_step_cost(w, link, (double)w->total, 0);
    return algorithm_chain_cost(w, link, 1) + back;
  }
  if (kind != MLFAB__COLLECTIVE_ALLGATHER) cost += steps * algorithm_step_cost(w, link, most, 1);
  if (kind != MLFAB__COLLECTIVE_REDUCE_SCATTER)
    cost += steps * algorithm_step_cost(w, link, most, 0);
  return cost;
}

/* Does the task add? The way back down, or around, adds nothing. */
static int algorithm_reduces(const algorithm_work *w) {
  return w->task->kind != MLFAB__COLLECTIVE_ALLGATHER &&
         w->task->kind != MLFAB__COLLECTIVE_BROADCAST;
}

static double algorithm_halving_cost(const algorithm_work *w, const algorithm_link *link) {
  double cost = algorithm_reduces(w) ? algorithm_half_cost(w, link, 1) : 0;
  if (w->task->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER) return cost;
  return cost + algorithm_half_cost(w, link, 0);
}

/* Returns the cost of a tree, also of a planned tree, whose shape it ignores. */
static double algorithm_tree_cost(const algorithm_work *w, const algorithm_link *link) {
  double log = algorithm_log(w->members), total = (double)w->total;
  double up = algorithm_reduces(w) ? algorithm_step_cost(w, link, total, 1) : 0;
  return log * up + log * algorithm_step_cost(w, link, total, 0);
}

static double algorithm_doubling_cost(const algorithm_work *w, const algorithm_link *link) {
  double total = (double)w->total, log = algorithm_log(w->members), cost;
  if (w->task->kind == MLFAB__COLLECTIVE_BARRIER) return log * link->latency;
  if (w->task->kind == MLFAB__COLLECTIVE_ALLGATHER) return algorithm_half_cost(w, link, 0);
  /* The data is copied once a step, at about the price of adding it. */
  cost = algorithm_step_cost(w, link, total, 1) + total * link->add;
  if ((1u << algorithm_log(w->members)) == w->members) return log * cost;
  return log * cost + algorithm_step_cost(w, link, total, 0);
}

/* ---- the algorithms */

enum {
  ALGORITHM_ALLREDUCE = 1 << MLFAB__COLLECTIVE_ALLREDUCE,
  ALGORITHM_SCATTER = 1 << MLFAB__COLLECTIVE_REDUCE_SCATTER,
  ALGORITHM_GATHER = 1 << MLFAB__COLLECTIVE_ALLGATHER,
  ALGORITHM_BROADCAST = 1 << MLFAB__COLLECTIVE_BROADCAST,
  ALGORITHM_BARRIER = 1 << MLFAB__COLLECTIVE_BARRIER
};

/* By MLFAB_ALGORITHM_*. */
static const struct algorithm_row {
  uint8_t kinds;                        /* bits: collectives that it can do */
  uint8_t ordered;                      /* bits: those that it can do in the order of the members */
  uint8_t by_tree;                      /* only if the task names a tree */
  uint32_t (*build)(algorithm_work *w); /* returns the first free tag behind it */
  double (*cost)(const algorithm_work *w, const algorithm_link *link);
  const char *name;
} algorithm_list[] = {
    [MLFAB_ALGORITHM_AUTO] = {.name = "AUTO"},
    [MLFAB_ALGORITHM_RING] = {ALGORITHM_ALLREDUCE | ALGORITHM_SCATTER | ALGORITHM_GATHER |
                                  ALGORITHM_BROADCAST,
                              0xff, 0, algorithm_ring, algorithm_ring_cost, "RING"},
    [MLFAB_ALGORITHM_HALVING] = {ALGORITHM_ALLREDUCE | ALGORITHM_SCATTER | ALGORITHM_GATHER,
                                 ALGORITHM_GATHER, 0, algorithm_halving, algorithm_halving_cost,
                                 "HALVING"},
    [MLFAB_ALGORITHM_DOUBLING] = {ALGORITHM_ALLREDUCE | ALGORITHM_SCATTER | ALGORITHM_GATHER |
                                      ALGORITHM_BARRIER,
                                  0xff, 0, algorithm_doubling, algorithm_doubling_cost, "DOUBLING"},
    [MLFAB_ALGORITHM_TREE] = {ALGORITHM_ALLREDUCE | ALGORITHM_BROADCAST, 0xff, 0,
                              algorithm_binomial, algorithm_tree_cost, "TREE"},
    [MLFAB_ALGORITHM_PLANNED] = {ALGORITHM_ALLREDUCE, 0, 1, algorithm_planned, algorithm_tree_cost,
                                 "PLANNED"},
};

MLFAB__INTERNAL const char *mlfab__algorithm_name(uint32_t algorithm) {
  return algorithm < MLFAB__COUNT(algorithm_list) ? algorithm_list[algorithm].name : NULL;
}

static int algorithm_can(const mlfab__algorithm_task *task, uint8_t algorithm) {
  if (algorithm >= MLFAB__COUNT(algorithm_list)) return 0;
  const struct algorithm_row *row = &algorithm_list[algorithm];
  if (task->kind > MLFAB__COLLECTIVE_BARRIER || !(row->kinds & 1 << task->kind)) return 0;
  return (!row->by_tree || task->tree) && (!task->ordered || (row->ordered & 1 << task->kind));
}

MLFAB__INTERNAL int mlfab__algorithm_build(mlfab__dag *dag, const mlfab__algorithm_task *task,
                                           uint32_t *end_p, uint32_t *next_tag_p) {
  algorithm_work work;
  int rc = algorithm_measure(&work, task);
  if (rc || !algorithm_can(task, task->algorithm)) return MLFAB_ERR_ARGUMENT;
  if (task->after != MLFAB__DAG_NONE && task->after >= dag->nops) return MLFAB_ERR_ARGUMENT;
  work.dag = dag;
  work.end = algorithm_add(&work, (mlfab__dag_op){.kind = MLFAB__DAG_NOP}, 0, 0);
  algorithm_after(&work, work.end, MLFAB__DAG_NONE);
  uint32_t next_tag = work.members == 1 ? task->tag : algorithm_list[task->algorithm].build(&work);
  if (work.rc) return work.rc;
  *end_p = work.end;
  *next_tag_p = next_tag;
  return 0;
}

MLFAB__INTERNAL double mlfab__algorithm_cost(const mlfab__algorithm_task *task, uint8_t algorithm,
                                             double latency_ns, double bytes_per_ns,
                                             double add_bytes_per_ns) {
  algorithm_work work;
  algorithm_link link = {latency_ns, bytes_per_ns > 0 ? 1 / bytes_per_ns : 0,
                         add_bytes_per_ns > 0 ? 1 / add_bytes_per_ns : 0};
  if (!algorithm_can(task, algorithm) || algorithm_measure(&work, task)) return -1;
  if (task->members == 1) return 0;
  return algorithm_list[algorithm].cost(&work, &link);
}

MLFAB__INTERNAL uint8_t mlfab__algorithm_choose(const mlfab__algorithm_task *task,
                                                double latency_ns, double bytes_per_ns,
                                                double add_bytes_per_ns) {
  uint8_t best = MLFAB_ALGORITHM_RING;
  double least = -1;
  if (algorithm_can(task, task->algorithm)) return task->algorithm;
  for (uint32_t k = MLFAB_ALGORITHM_RING; k < MLFAB__COUNT(algorithm_list); k++) {
    uint8_t a = (uint8_t)k;
    if (algorithm_list[k].by_tree) continue;
    double cost = mlfab__algorithm_cost(task, a, latency_ns, bytes_per_ns, add_bytes_per_ns);
    /* Members are in the order of hosts, so most messages of the ring stay within a host, and the ring pipelines over
     * its steps: another algorithm must be a twentieth better. */
    if (cost < 0 || (least >= 0 && cost >= least)) continue;
    if (best == MLFAB_ALGORITHM_RING && least >= 0 && cost >= least * 0.95) continue;
    best = a;
    least = cost;
  }
  return best;
}
