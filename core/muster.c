/* muster.c - allreduce at server 0: who is there, which tree, and when it is over. See tree.h.
 *
 * It holds no bytes of tensors. One allreduce at a time: the next begins when every live worker
 * that has more data has asked for it, which nobody does before it has heard that the last one is
 * over.
 *
 * The root is drawn from the seed and the number. With a scheduler, and an array that is large as
 * updates are (eager_bytes), the scheduler arranges the rest and has a heartbeat for it; else the
 * root is the only aggregator, and gives the sum to everybody.
 *
 * Invariants: places are sent when the whole tree stands, and sent again as they were; whoever is
 * inside has a parent and a giver on a way of at most two steps to the root, whatever a scheduler
 * says. */
#include "tree.h"

#include "prng.h"

struct mlfab__muster_scratch {
  uint8_t meta[MLFAB_META_MAX];
  uint32_t ranks[2 * MLFAB__TREE_NODES_MAX];
  mlfab__tree_node nodes[MLFAB__TREE_NODES_MAX];
};

static void muster_check(mlfab__muster *muster, uint32_t newcomer, uint64_t now_ns);

MLFAB__INTERNAL int mlfab__muster_init(mlfab__muster *muster, mlfab__env *env,
                                       const mlfab_config *config, const mlfab__port *port) {
  memset(muster, 0, sizeof *muster);
  muster->env = env;
  muster->config = config;
  muster->port = *port;
  muster->workers = config->workers;
  muster->callers = mlfab__alloc_array(env, muster->workers, sizeof *muster->callers);
  muster->order = mlfab__alloc_array(env, muster->workers, sizeof *muster->order);
  return muster->callers && muster->order ? 0 : MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL void mlfab__muster_free(mlfab__muster *muster) {
  if (!muster->env) return;
  mlfab__free(muster->env, muster->callers, muster->workers * sizeof *muster->callers);
  mlfab__free(muster->env, muster->order, muster->workers * sizeof *muster->order);
  mlfab__free(muster->env, muster->scratch, sizeof *muster->scratch);
  memset(muster, 0, sizeof *muster);
}

/* --- what is said --- */

static void muster_tell(mlfab__muster *muster, uint32_t worker, int32_t code, int32_t rank) {
  const mlfab__caller *caller = &muster->callers[worker];
  mlfab__reduce_done done = {.ask = caller->ask, .code = code, .rank = rank};
  uint8_t meta[64];
  if (code == MLFAB_ERR_SHAPE) {
    done.count = caller->other_count;
    done.dtype = caller->other_dtype;
  }
  muster->port.post(muster->port.self, worker, MLFAB__REDUCE_DONE, meta,
                    mlfab__encode_reduce_done(meta, &done));
}

/* Who is missing, for those who run out of patience: when it is another than they were told. */
static void muster_tell_missing(mlfab__muster *muster, uint32_t worker, int32_t missing) {
  mlfab__caller *caller = &muster->callers[worker];
  if (caller->told == missing) return;
  caller->told = missing;
  muster_tell(muster, worker, MLFAB_ERR_AGAIN, missing);
}

/* The calls of those inside differ: to `odd`'s each is compared, and odd's to another one's. */
static void muster_compare(mlfab__muster *muster, uint32_t odd) {
  const mlfab__caller *wrong = &muster->callers[odd], *right = wrong;
  for (uint32_t i = 0; i < muster->inside && right == wrong; i++) {
    const mlfab__caller *caller = &muster->callers[muster->order[i]];
    if (caller->count != wrong->count || caller->dtype != wrong->dtype) right = caller;
  }
  for (uint32_t i = 0; i < muster->inside; i++) {
    mlfab__caller *caller = &muster->callers[muster->order[i]];
    const mlfab__caller *other = caller == wrong ? right : wrong;
    caller->other_count = other->count;
    caller->other_dtype = other->dtype;
  }
}

/* It is over for all who are inside. */
static void muster_end(mlfab__muster *muster, int32_t code, int32_t rank, uint64_t now_ns) {
  muster->phase = MLFAB__MUSTER_IDLE;
  for (uint32_t i = 0; i < muster->inside; i++) {
    mlfab__caller *caller = &muster->callers[muster->order[i]];
    if (caller->state != MLFAB__CALLER_INSIDE) continue; /* its process is another now */
    caller->state = MLFAB__CALLER_OVER;
    caller->code = code;
    caller->rank = rank;
    muster_tell(muster, muster->order[i], code, rank);
  }
  muster->inside = 0;
  muster_check(muster, MLFAB__NO_NODE, now_ns);
}

/* --- places --- */

/* A worker's place. Lists are made from the order of all, for those who have any. */
static void muster_place(mlfab__muster *muster, uint32_t worker) {
  const mlfab__caller *caller = &muster->callers[worker];
  mlfab__muster_scratch *scratch = muster->scratch;
  mlfab__tree_place place = {.ask = caller->ask,
                             .number = muster->number,
                             .parent = caller->parent,
                             .giver = caller->giver};
  for (uint32_t i = 0; i < muster->inside && place.children < caller->children; i++) {
    if (muster->callers[muster->order[i]].parent == worker)
      scratch->ranks[place.children++] = muster->order[i];
  }
  for (uint32_t i = 0; i < muster->inside && place.takers < caller->takers; i++) {
    if (muster->callers[muster->order[i]].giver == worker)
      scratch->ranks[place.children + place.takers++] = muster->order[i];
  }
  muster->port.post(muster->port.self, worker, MLFAB__TREE, scratch->meta,
                    mlfab__encode_tree_place(scratch->meta, &place, scratch->ranks));
}

static void muster_run(mlfab__muster *muster) {
  muster->phase = MLFAB__MUSTER_RUNNING;
  muster->having = 0;
  for (uint32_t i = 0; i < muster->inside; i++) {
    const mlfab__caller *caller = &muster->callers[muster->order[i]];
    if (caller->parent != MLFAB__NO_NODE) muster->callers[caller->parent].children++;
    if (caller->giver != MLFAB__NO_NODE) muster->callers[caller->giver].takers++;
  }
  for (uint32_t i = 0; i < muster->inside; i++) muster_place(muster, muster->order[i]);
}

/* The root is the only aggregator. More than a frame can list are passed on by the first of the
 * others, as in a heap. */
static void muster_star(mlfab__muster *muster) {
  uint32_t at = 0;
  while (muster->order[at] != muster->root) at++;
  memmove(muster->order + 1, muster->order, at * sizeof *muster->order);
  muster->order[0] = muster->root;
  for (uint32_t i = 0; i < muster->inside; i++) {
    mlfab__caller *caller = &muster->callers[muster->order[i]];
    caller->parent = i == 0 ? MLFAB__NO_NODE : muster->order[(i - 1) / MLFAB__TREE_NODES_MAX];
    caller->giver = caller->parent;
  }
  muster_run(muster);
}

/* 1 when this worker is inside, and its way up is of one or two steps. */
static int muster_reaches(const mlfab__muster *muster, const mlfab__tree_node *at, uint32_t to,
                          int giver) {
  if (to == muster->root) return 1;
  if (to >= muster->workers || to == at->worker ||
      muster->callers[to].state != MLFAB__CALLER_INSIDE)
    return 0;
  const mlfab__caller *hub = &muster->callers[to];
  return (giver ? hub->giver : hub->parent) == muster->root;
}

/* The scheduler's tree: everybody once, and every way leads to the root. Errors: FRAME. */
static int muster_take_plan(mlfab__muster *muster, const mlfab__tree_node *nodes, uint32_t n) {
  if (n != muster->inside) return MLFAB_ERR_FRAME;
  for (uint32_t i = 0; i < n; i++) {
    const mlfab__tree_node *node = &nodes[i];
    if (node->worker >= muster->workers ||
        muster->callers[node->worker].state != MLFAB__CALLER_INSIDE ||
        muster->callers[node->worker].have)
      return MLFAB_ERR_FRAME;
    muster->callers[node->worker].have = 1; /* so that nobody is listed twice */
    muster->callers[node->worker].parent = node->parent;
    muster->callers[node->worker].giver = node->giver;
  }
  for (uint32_t i = 0; i < n; i++) {
    const mlfab__tree_node *node = &nodes[i];
    int root = node->worker == muster->root;
    if (root != (node->parent == MLFAB__NO_NODE) || root != (node->giver == MLFAB__NO_NODE))
      return MLFAB_ERR_FRAME;
    if (!root && (!muster_reaches(muster, node, node->parent, 0) ||
                  !muster_reaches(muster, node, node->giver, 1)))
      return MLFAB_ERR_FRAME;
  }
  for (uint32_t i = 0; i < n; i++) muster->order[i] = nodes[i].worker;
  return 0;
}

MLFAB__INTERNAL int mlfab__muster_scheduler_frame(mlfab__muster *muster,
                                                  const mlfab__frame_in *frame) {
  mlfab__tree_plan plan;
  if (frame->type != MLFAB__TREE_PLAN) return 0;
  if (muster->phase != MLFAB__MUSTER_PLANNING) return 1; /* too late */
  mlfab__tree_node *nodes = muster->scratch->nodes;
  int code = mlfab__decode_tree_plan(frame->meta, frame->meta_bytes, &plan, nodes);
  if (!code && plan.number != muster->number) return 1;
  if (!code && plan.nodes == 0) {
    muster_star(muster); /* it has none */
    return 1;
  }
  if (!code) code = muster_take_plan(muster, nodes, plan.nodes);
  for (uint32_t i = 0; i < muster->inside; i++) muster->callers[muster->order[i]].have = 0;
  if (code) {
    muster->port.drop(muster->port.self, muster->workers, MLFAB_ERR_FRAME,
                      "no tree in a TREE_PLAN");
    muster_star(muster);
  } else {
    muster_run(muster);
  }
  return 1;
}

/* --- forming --- */

MLFAB__INTERNAL uint32_t mlfab__muster_draw(uint64_t seed, uint64_t number, uint32_t n) {
  mlfab__prng prng;
  mlfab__prng_seed(&prng, mlfab__mix(seed) ^ number);
  return (uint32_t)mlfab__prng_below(&prng, n);
}

/* Of those inside, the first whose count or type is not the others', or NO_RANK. When most differ
 * from the first, it is the first. */
static int32_t muster_odd(const mlfab__muster *muster) {
  const mlfab__caller *first = &muster->callers[muster->order[0]];
  int32_t odd = MLFAB_NO_RANK;
  uint32_t differ = 0;
  for (uint32_t i = 1; i < muster->inside; i++) {
    const mlfab__caller *caller = &muster->callers[muster->order[i]];
    if (caller->count == first->count && caller->dtype == first->dtype) continue;
    if (odd == MLFAB_NO_RANK) odd = (int32_t)muster->order[i];
    differ++;
  }
  return 2 * differ > muster->inside ? (int32_t)muster->order[0] : odd;
}

/* Asks the scheduler to arrange it; 0 when it is not worth it. */
static int muster_ask(mlfab__muster *muster, uint64_t now_ns) {
  const mlfab__caller *caller = &muster->callers[muster->root];
  mlfab__tree_ask ask = {muster->number, caller->count * mlfab__dtype_bytes((int)caller->dtype),
                         muster->root, muster->inside};
  if (!muster->scheduler || muster->inside < 3 || muster->inside > MLFAB__TREE_NODES_MAX ||
      ask.bytes <= muster->config->eager_bytes)
    return 0;
  muster->phase = MLFAB__MUSTER_PLANNING;
  muster->planning_ns = now_ns;
  muster->port.post(muster->port.self, muster->workers, MLFAB__TREE_ASK, muster->scratch->meta,
                    mlfab__encode_tree_ask(muster->scratch->meta, &ask, muster->order));
  return 1;
}

/* All are there: those who wait are the next allreduce. */
static void muster_form(mlfab__muster *muster, uint64_t now_ns) {
  muster->number++;
  muster->inside = 0;
  for (uint32_t w = 0; w < muster->workers; w++) {
    mlfab__caller *caller = &muster->callers[w];
    if (caller->state != MLFAB__CALLER_WAITING) continue;
    caller->state = MLFAB__CALLER_INSIDE;
    caller->have = 0;
    caller->told = MLFAB_NO_RANK;
    caller->children = caller->takers = 0;
    muster->order[muster->inside++] = w;
  }
  int32_t odd = muster_odd(muster);
  if (!muster->scratch) muster->scratch = mlfab__alloc(muster->env, sizeof *muster->scratch);
  if (odd != MLFAB_NO_RANK) {
    muster_compare(muster, (uint32_t)odd);
    muster_end(muster, MLFAB_ERR_SHAPE, odd, now_ns);
  } else if (muster->inside == 1) {
    muster_end(muster, 0, MLFAB_NO_RANK, now_ns);
  } else if (!muster->scratch) {
    muster_end(muster, MLFAB_ERR_MEMORY, 0, now_ns);
  } else {
    muster->root =
        muster->order[mlfab__muster_draw(muster->config->seed, muster->number, muster->inside)];
    if (!muster_ask(muster, now_ns)) muster_star(muster);
  }
}

/* The first live worker with more data that does not wait, or NO_RANK; and how many wait. */
static int32_t muster_missing(const mlfab__muster *muster, uint32_t *waiting_p) {
  int32_t missing = MLFAB_NO_RANK;
  *waiting_p = 0;
  for (uint32_t w = 0; w < muster->workers; w++) {
    const mlfab__caller *caller = &muster->callers[w];
    if (caller->state == MLFAB__CALLER_WAITING) {
      ++*waiting_p;
    } else if (!caller->gone && !caller->done && missing == MLFAB_NO_RANK) {
      missing = (int32_t)w;
    }
  }
  return missing;
}

static void muster_check(mlfab__muster *muster, uint32_t newcomer, uint64_t now_ns) {
  uint32_t waiting;
  if (muster->phase != MLFAB__MUSTER_IDLE) return;
  int32_t missing = muster_missing(muster, &waiting);
  if (waiting == 0) return;
  if (missing == MLFAB_NO_RANK) {
    muster_form(muster, now_ns);
  } else if (newcomer != MLFAB__NO_NODE) {
    muster_tell_missing(muster, newcomer, missing);
  }
}

/* --- what callers say --- */

/* A call begins, or is repeated on a new link. */
static void muster_asks(mlfab__muster *muster, uint32_t worker, const mlfab__reduce *in,
                        uint64_t now_ns) {
  mlfab__caller *caller = &muster->callers[worker];
  if (caller->state == MLFAB__CALLER_INSIDE) {
    if (muster->phase == MLFAB__MUSTER_RUNNING) muster_place(muster, worker);
    return;
  }
  caller->state = MLFAB__CALLER_WAITING;
  caller->count = in->count;
  caller->dtype = in->dtype;
  caller->told = MLFAB_NO_RANK;
  muster_check(muster, worker, now_ns);
}

/* One more has all of the sum. */
static void muster_have(mlfab__muster *muster, uint32_t worker, uint64_t now_ns) {
  mlfab__caller *caller = &muster->callers[worker];
  if (caller->state != MLFAB__CALLER_INSIDE || caller->have) return;
  caller->have = 1;
  if (++muster->having < muster->inside && !MLFAB__PLANTED(33)) return;
  muster_end(muster, 0, MLFAB_NO_RANK, now_ns);
}

/* A caller's codes are its own affair, within what a caller may end with. */
static int32_t muster_code(int32_t code) {
  switch (code) {
    case MLFAB_ERR_TIMEOUT:
    case MLFAB_ERR_CANCELLED:
    case MLFAB_ERR_PEER_DEAD:
    case MLFAB_ERR_MEMORY:
      return code;
    default:
      return MLFAB_ERR_REFUSED;
  }
}

static void muster_give_up(mlfab__muster *muster, uint32_t worker, const mlfab__reduce *in,
                           uint64_t now_ns) {
  mlfab__caller *caller = &muster->callers[worker];
  int known = in->rank >= 0 && (uint32_t)in->rank < muster->workers;
  int32_t code = muster_code(in->code), rank = known ? in->rank : (int32_t)worker;
  if (caller->state == MLFAB__CALLER_INSIDE) {
    muster_end(muster, code, rank, now_ns);
    return;
  }
  caller->state = MLFAB__CALLER_OVER;
  caller->code = code;
  caller->rank = rank;
  muster_tell(muster, worker, code, rank);
}

MLFAB__INTERNAL int mlfab__muster_frame(mlfab__muster *muster, uint32_t worker,
                                        const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__reduce in;
  mlfab__caller *caller = &muster->callers[worker];
  if (frame->type != MLFAB__REDUCE) return 0;
  if (mlfab__decode_reduce(frame->meta, frame->meta_bytes, &in) || in.ask == 0 ||
      in.state > MLFAB__REDUCE_GIVE_UP || in.count == 0 || in.dtype > 0xff ||
      mlfab__dtype_bytes((int)in.dtype) == 0) {
    muster->port.drop(muster->port.self, worker, MLFAB_ERR_FRAME, "a REDUCE that does not parse");
    return 1;
  }
  if (in.ask < caller->ask) return 1;
  if (in.ask > caller->ask) {
    /* The call before is over for it, or was withdrawn in a frame that was lost. */
    if (caller->state == MLFAB__CALLER_INSIDE)
      muster_end(muster, MLFAB_ERR_CANCELLED, (int32_t)worker, now_ns);
    caller->ask = in.ask;
    caller->state = MLFAB__CALLER_IDLE;
  }
  if (caller->state == MLFAB__CALLER_OVER) {
    muster_tell(muster, worker, caller->code, caller->rank);
  } else if (in.state == MLFAB__REDUCE_ASK) {
    muster_asks(muster, worker, &in, now_ns);
  } else if (in.state == MLFAB__REDUCE_HAVE) {
    muster_have(muster, worker, now_ns);
  } else {
    muster_give_up(muster, worker, &in, now_ns);
  }
  return 1;
}

/* --- who comes and goes --- */

MLFAB__INTERNAL void mlfab__muster_hello(mlfab__muster *muster, uint32_t worker, int fresh,
                                         uint64_t now_ns) {
  mlfab__caller *caller = &muster->callers[worker];
  caller->gone = 0;
  if (!fresh) return;
  int inside = caller->state == MLFAB__CALLER_INSIDE;
  memset(caller, 0, sizeof *caller);
  if (inside) muster_end(muster, MLFAB_ERR_PEER_DEAD, (int32_t)worker, now_ns);
}

MLFAB__INTERNAL void mlfab__muster_gone(mlfab__muster *muster, uint32_t worker, int left,
                                        uint64_t now_ns) {
  mlfab__caller *caller = &muster->callers[worker];
  caller->gone = 1;
  if (caller->state == MLFAB__CALLER_INSIDE) {
    muster_end(muster, left ? MLFAB_ERR_PEER_CLOSED : MLFAB_ERR_PEER_DEAD, (int32_t)worker, now_ns);
    return;
  }
  if (caller->state == MLFAB__CALLER_WAITING) caller->state = MLFAB__CALLER_IDLE;
  muster_check(muster, MLFAB__NO_NODE, now_ns);
}

MLFAB__INTERNAL void mlfab__muster_done(mlfab__muster *muster, uint32_t worker, uint64_t now_ns) {
  muster->callers[worker].done = 1;
  muster_check(muster, MLFAB__NO_NODE, now_ns);
}

MLFAB__INTERNAL void mlfab__muster_scheduler(mlfab__muster *muster, int here) {
  muster->scheduler = here;
  if (!here && muster->phase == MLFAB__MUSTER_PLANNING) muster_star(muster);
}

MLFAB__INTERNAL void mlfab__muster_tick(mlfab__muster *muster, uint64_t now_ns) {
  uint32_t waiting;
  int32_t missing = muster_missing(muster, &waiting);
  for (uint32_t w = 0; waiting > 0 && w < muster->workers; w++) {
    if (muster->callers[w].state == MLFAB__CALLER_WAITING) muster_tell_missing(muster, w, missing);
  }
  if (muster->phase == MLFAB__MUSTER_PLANNING &&
      now_ns - muster->planning_ns >= muster->config->heartbeat_ns)
    muster_star(muster);
  if (muster->phase != MLFAB__MUSTER_RUNNING || muster->having == 0) return;
  missing = MLFAB_NO_RANK;
  for (uint32_t i = 0; i < muster->inside; i++) {
    uint32_t w = muster->order[i];
    if (!muster->callers[w].have && (missing == MLFAB_NO_RANK || (int32_t)w < missing))
      missing = (int32_t)w;
  }
  for (uint32_t i = 0; i < muster->inside; i++) {
    if (muster->callers[muster->order[i]].have)
      muster_tell_missing(muster, muster->order[i], missing);
  }
}
