/* trees.c - server 0 asks the scheduler for the trees of allreduces, and tells the members. See trees.h.
 *
 * Source: MLfabric §6 (AllReduce: push to a random root, get from it). */
#include "trees.h"

enum { TREES_META = 64 + 12 * MLFAB__MEMBERSHIP_MEMBERS_MAX };
#define TREES_LOST UINT64_MAX /* since_ns: it was known, and memory for it is missing */

MLFAB__INTERNAL void mlfab__trees_init(mlfab__trees *trees, mlfab__env *env,
                                       const mlfab_config *config, const mlfab__port *port,
                                       const mlfab__membership *membership) {
  memset(trees, 0, sizeof *trees);
  trees->env = env;
  trees->config = config;
  trees->port = *port;
  trees->membership = membership;
}

MLFAB__INTERNAL void mlfab__trees_free(void *self) {
  mlfab__trees *trees = self;
  if (!trees->env) return;
  for (uint32_t i = 0; i < MLFAB__COMM_AHEAD; i++)
    mlfab__free(trees->env, trees->entries[i].nodes,
                trees->entries[i].room * sizeof *trees->entries[i].nodes);
  mlfab__free(trees->env, trees->meta, TREES_META);
  memset(trees, 0, sizeof *trees);
}

MLFAB__INTERNAL uint32_t mlfab__trees_root(uint64_t seed, uint64_t number, uint32_t n) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, mlfab__mix(seed) ^ number);
  return (uint32_t)mlfab__rng_below(&prng, n);
}

/* Returns 1 if the number belongs to the standing epoch. */
static int trees_stands(const mlfab__trees *trees, uint64_t number) {
  const mlfab__membership *membership = trees->membership;
  return membership->phase == MLFAB__MEMBERSHIP_RUNNING &&
         number >> 40 == MLFAB__COMM_TREE(membership->epoch, 0) >> 40;
}

/* --- answers --- */

static void trees_tell(mlfab__trees *trees, const mlfab__trees_entry *tree, uint32_t worker) {
  uint8_t none[64];
  mlfab__tree_plan plan = {tree->number, tree->n};
  uint8_t *meta = tree->n > 0 ? trees->meta : none;
  trees->port.post(trees->port.self, worker, MLFAB__TREE_PLAN, meta,
                   mlfab__encode_tree_plan(meta, &plan, tree->nodes));
}

/* Takes a known tree, or none (n 0): tells the members that wait for it. */
static void trees_know(mlfab__trees *trees, mlfab__trees_entry *tree, uint32_t n) {
  tree->known = 1;
  tree->n = n;
  mlfab__touched(trees->touch, (uint32_t)(tree - trees->entries));
  if (!trees_stands(trees, tree->number)) return;
  for (uint32_t w = 0; w < MLFAB__MEMBERSHIP_MEMBERS_MAX; w++) {
    if (tree->asked[w / 8] >> w % 8 & 1) trees_tell(trees, tree, w);
  }
}

/* --- questions --- */

/* Asks the scheduler for the tree. Without a scheduler, or memory, the tree is empty. */
static void trees_begin(mlfab__trees *trees, mlfab__trees_entry *tree, const mlfab__tree_ask *in,
                        uint64_t now_ns) {
  const mlfab__membership *membership = trees->membership;
  mlfab__tree_node *nodes = tree->nodes;
  if (tree->room != membership->members) {
    mlfab__free(trees->env, nodes, tree->room * sizeof *nodes);
    nodes = mlfab__alloc_array(trees->env, membership->members, sizeof *nodes);
  }
  if (!trees->meta) trees->meta = mlfab__alloc(trees->env, TREES_META);
  *tree = (mlfab__trees_entry){.number = in->number,
                               .since_ns = now_ns,
                               .nodes = nodes,
                               .room = nodes ? membership->members : 0};
  tree->known = !trees->scheduler || !nodes || !trees->meta;
  mlfab__touched(trees->touch, (uint32_t)(tree - trees->entries));
  if (tree->known) return;
  uint32_t root = mlfab__trees_root(trees->config->seed, in->number, membership->members);
  mlfab__tree_ask ask = {in->number, in->bytes, membership->order[root], membership->members};
  trees->port.post(trees->port.self, trees->config->workers, MLFAB__TREE_ASK, trees->meta,
                   mlfab__encode_tree_ask(trees->meta, &ask, membership->order));
}

MLFAB__INTERNAL int mlfab__trees_frame(mlfab__trees *trees, uint32_t worker,
                                       const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__tree_ask in;
  if (frame->type != MLFAB__TREE_ASK) return 0;
  if (mlfab__port_refuse(&trees->port, worker, frame,
                         mlfab__decode_tree_ask(frame->meta, frame->meta_bytes, &in, NULL) ||
                             in.nodes > 0 || in.bytes == 0))
    return 1;
  if (!trees_stands(trees, in.number) || !trees->membership->entries[worker].member ||
      worker >= MLFAB__MEMBERSHIP_MEMBERS_MAX)
    return 1;
  mlfab__trees_entry *tree = &trees->entries[in.number % MLFAB__COMM_AHEAD];
  if (in.number < tree->number) return 1; /* the call is over */
  if (in.number > tree->number) trees_begin(trees, tree, &in, now_ns);
  tree->asked[worker / 8] |= (uint8_t)(1u << worker % 8);
  if (tree->known) trees_tell(trees, tree, worker);
  return 1;
}

/* --- the scheduler --- */

/* Translates ranks to members' numbers; returns 0 if a rank is no member. */
static int trees_translate(const mlfab__trees *trees, mlfab__trees_entry *tree, uint32_t n) {
  const mlfab__membership *membership = trees->membership;
  uint32_t place[MLFAB__MEMBERSHIP_MEMBERS_MAX];
  memset(place, 0xff, sizeof place);
  for (uint32_t i = 0; i < membership->members; i++) {
    if (membership->order[i] < MLFAB__MEMBERSHIP_MEMBERS_MAX) place[membership->order[i]] = i;
  }
  for (uint32_t i = 0; i < n; i++) {
    uint32_t *of[] = {&tree->nodes[i].worker, &tree->nodes[i].parent, &tree->nodes[i].giver};
    for (uint32_t k = 0; k < 3; k++) {
      if (*of[k] == MLFAB__NO_NODE) continue;
      if (*of[k] >= MLFAB__MEMBERSHIP_MEMBERS_MAX || place[*of[k]] == MLFAB__NO_NODE) return 0;
      *of[k] = place[*of[k]];
    }
  }
  return n == membership->members;
}

MLFAB__INTERNAL int mlfab__trees_scheduler_frame(mlfab__trees *trees,
                                                 const mlfab__frame_in *frame) {
  mlfab__tree_plan plan;
  if (frame->type != MLFAB__TREE_PLAN) return 0;
  int code = mlfab__decode_tree_plan(frame->meta, frame->meta_bytes, &plan, NULL);
  mlfab__trees_entry *tree = code ? NULL : &trees->entries[plan.number % MLFAB__COMM_AHEAD];
  if (!code && (tree->number != plan.number || tree->known)) return 1; /* too late */
  if (!code && !trees_stands(trees, plan.number)) {
    trees_know(trees, tree, 0);
    return 1;
  }
  uint32_t most;
  if (!code && plan.nodes > tree->room) code = MLFAB_ERR_FRAME;
  if (!code && plan.nodes > 0)
    code = mlfab__decode_tree_plan(frame->meta, frame->meta_bytes, &plan, tree->nodes);
  if (!code && plan.nodes > 0 &&
      (!trees_translate(trees, tree, plan.nodes) ||
       mlfab__algorithm_check_tree(tree->nodes, plan.nodes, &most)))
    code = MLFAB_ERR_FRAME;
  if (code)
    trees->port.drop(trees->port.self, trees->config->workers, MLFAB_ERR_FRAME,
                     "no tree in a TREE_PLAN");
  if (tree) trees_know(trees, tree, code ? 0 : plan.nodes);
  return 1;
}

/* Gives up trees requested at since_ns or before: they are empty. */
static void trees_give_up(mlfab__trees *trees, uint64_t since_ns) {
  for (uint32_t i = 0; i < MLFAB__COMM_AHEAD; i++) {
    mlfab__trees_entry *tree = &trees->entries[i];
    if (tree->number && !tree->known && tree->since_ns != TREES_LOST && tree->since_ns <= since_ns)
      trees_know(trees, tree, 0);
  }
}

MLFAB__INTERNAL void mlfab__trees_scheduler(mlfab__trees *trees, int here) {
  trees->scheduler = here;
  if (!here) trees_give_up(trees, UINT64_MAX);
}

MLFAB__INTERNAL void mlfab__trees_tick(void *self, uint64_t now_ns) {
  mlfab__trees *trees = self;
  uint64_t beat = trees->config->heartbeat_ns;
  if (now_ns >= beat) trees_give_up(trees, now_ns - beat);
}

/* --- as records: the TREE_PLAN of each entry; number 0 while the tree is not known --- */

static uint32_t trees_encode(const void *self, uint32_t record, uint8_t *bytes) {
  const mlfab__trees *trees = self;
  const mlfab__trees_entry *tree = &trees->entries[record];
  const mlfab__tree_plan plan = {tree->known ? tree->number : 0, tree->known ? tree->n : 0};
  return mlfab__encode_tree_plan(bytes, &plan, tree->nodes);
}

/* If memory for a tree is missing, nobody is told any tree: members that ask for it wait, until their deadlines. */
static int trees_decode(void *self, uint32_t record, const uint8_t *bytes, uint32_t n, int apply) {
  mlfab__trees *trees = self;
  mlfab__trees_entry *tree = &trees->entries[record];
  mlfab__tree_plan plan;
  if (mlfab__decode_tree_plan(bytes, n, &plan, NULL)) return MLFAB_ERR_FRAME;
  if (!apply) return 0;
  mlfab__free(trees->env, tree->nodes, tree->room * sizeof *tree->nodes);
  *tree = (mlfab__trees_entry){.number = plan.number, .known = plan.number > 0, .n = plan.nodes};
  if (!trees->meta) trees->meta = mlfab__alloc(trees->env, TREES_META);
  if (plan.nodes > 0) tree->nodes = mlfab__alloc_array(trees->env, plan.nodes, sizeof *tree->nodes);
  if (plan.nodes > 0 && tree->nodes) {
    tree->room = plan.nodes;
    (void)mlfab__decode_tree_plan(bytes, n, &plan, tree->nodes);
  }
  if (plan.nodes > 0 && (!tree->nodes || !trees->meta)) {
    tree->known = 0;
    tree->since_ns = TREES_LOST;
  }
  return 0;
}

MLFAB__INTERNAL mlfab__mirrored mlfab__trees_mirrored(mlfab__trees *trees) {
  return (mlfab__mirrored){.name = "trees",
                           .self = trees,
                           .records = MLFAB__COMM_AHEAD,
                           .encode = trees_encode,
                           .decode = trees_decode,
                           .port = &trees->port,
                           .workers = 1,
                           .touch = &trees->touch};
}
