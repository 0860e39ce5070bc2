/* test_tree.c - allreduce in random interleavings: server 0's role and up to 64 workers' over links that
 * break.
 *
 * Oracles: the sum as the tree says it, formed serially: a node's own share first, then what its children
 * have, in their order; bit by bit for floats. What a link has been lent must not have changed when it is read,
 * which here is as late as can be: at delivery. */
#include "core/prng.h"
#include "core/tree.h"
#include "scale.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { WORKERS = 64, FRAMES = 512, BEAT = 1000 };

typedef struct message {
  uint8_t type;
  uint8_t *meta, *bulk; /* bulk: as it was when it was taken */
  const void *lent;     /* where it lies, when it is lent; or NULL */
  uint32_t meta_bytes, bulk_bytes;
  uint64_t token;
} message;

/* One direction of a link. */
typedef struct pipe {
  message frames[FRAMES];
  unsigned begin, count;
} pipe;

typedef struct link {
  int stands, wanted;
  pipe *there, *back;
} link;

typedef struct worker {
  mlfab__tree tree;
  mlfab__requests requests;
  mlfab_request request;
  uint8_t *data, *share;
  int alive, open, up; /* up: the link to server 0 stands */
  pipe to_server, from_server;
  int32_t code, rank;
} worker;

typedef struct world {
  mlfab__env env;
  mlfab_config config;
  mlfab__muster muster;
  worker *workers;
  link hops[WORKERS][WORKERS]; /* of the first to the second */
  uint32_t n;
  uint64_t count, bytes, now;
  int dtype;
  mlfab__prng prng;
  /* The scheduler that a test makes up. */
  int plans, plan_bad, plan_silent;
  uint64_t asked;
  uint32_t drops;
  /* The tree of the newest number, as server 0 arranged it. */
  uint64_t seen;
  uint32_t order[WORKERS], parent[WORKERS], inside;
  uint32_t root;
  uint64_t runs; /* allreduces that have stood */
} world;

static world *w;

static uint32_t chance(uint32_t n) { return (uint32_t)mlfab__prng_below(&w->prng, n); }

/* --- links --- */

static void *copy(const void *from, uint32_t bytes) {
  void *to = malloc(bytes + (size_t)(bytes == 0));
  assert_non_null(to);
  if (bytes > 0) memcpy(to, from, bytes);
  return to;
}

static void pipe_put(pipe *p, uint8_t type, const void *meta, uint32_t meta_bytes, const void *bulk,
                     uint32_t bulk_bytes, uint64_t token) {
  assert_true(p->count < FRAMES);
  message *m = &p->frames[(p->begin + p->count++) % FRAMES];
  *m = (message){.type = type, .meta_bytes = meta_bytes, .bulk_bytes = bulk_bytes, .token = token};
  m->meta = copy(meta, meta_bytes);
  if (!bulk) return;
  m->bulk = copy(bulk, bulk_bytes);
  if (token) m->lent = bulk;
}

static void message_free(message *m) {
  free(m->meta);
  free(m->bulk);
}

static void pipe_cut(pipe *p) {
  for (; p->count > 0; p->count--) message_free(&p->frames[p->begin++ % FRAMES]);
}

static void pipe_detach(pipe *p, uint64_t token) {
  for (unsigned i = 0; i < p->count; i++) {
    message *m = &p->frames[(p->begin + i) % FRAMES];
    if (!m->lent || m->token != token) continue;
    assert_memory_equal(m->bulk, m->lent, m->bulk_bytes);
    m->lent = NULL;
  }
}

static link *hop(uint32_t from, uint32_t to) {
  link *l = &w->hops[from][to];
  if (!l->there) {
    l->there = calloc(1, sizeof *l->there);
    l->back = calloc(1, sizeof *l->back);
    assert_true(l->there && l->back);
  }
  return l;
}

/* --- ports: a worker's to server 0, to parents, to children; server 0's --- */

static void up_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  worker *me = self;
  assert_int_equal(peer, 0);
  if (me->up) pipe_put(&me->to_server, type, meta, bytes, NULL, 0, 0);
}
static void hop_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  link *l = hop((uint32_t)((worker *)self - w->workers), peer);
  if (l->stands) pipe_put(l->there, type, meta, bytes, NULL, 0, 0);
}
static void down_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  link *l = hop(peer, (uint32_t)((worker *)self - w->workers));
  if (l->stands) pipe_put(l->back, type, meta, bytes, NULL, 0, 0);
}
static void host_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)self;
  if (peer == w->n) {
    mlfab__tree_ask ask;
    uint32_t ranks[WORKERS];
    assert_int_equal(type, MLFAB__TREE_ASK);
    assert_int_equal(mlfab__decode_tree_ask(meta, bytes, &ask, NULL), 0);
    assert_int_equal(mlfab__decode_tree_ask(meta, bytes, &ask, ranks), 0);
    assert_int_equal(ask.nodes, w->muster.inside);
    w->asked = ask.number;
  } else if (w->workers[peer].up) {
    pipe_put(&w->workers[peer].from_server, type, meta, bytes, NULL, 0, 0);
  }
}
static void no_ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void hop_ready(void *self, uint32_t peer) {
  hop((uint32_t)((worker *)self - w->workers), peer)->wanted = 1;
}
static void any_drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer, (void)code, (void)text;
  w->drops++;
}
static void hop_detach(void *self, uint32_t peer, uint64_t token) {
  pipe_detach(hop((uint32_t)((worker *)self - w->workers), peer)->there, token);
}
static void down_detach(void *self, uint32_t peer, uint64_t token) {
  pipe_detach(hop(peer, (uint32_t)((worker *)self - w->workers))->back, token);
}
static void no_detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static void no_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                     int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

/* --- the world --- */

static void open_world(uint32_t n, uint64_t seed) {
  w = calloc(1, sizeof *w);
  assert_non_null(w);
  w->workers = calloc(n, sizeof *w->workers);
  assert_non_null(w->workers);
  mlfab__prng_seed(&w->prng, seed);
  assert_int_equal(mlfab__env_init(&w->env, NULL), 0);
  mlfab_config_init(&w->config);
  w->config.workers = w->n = n;
  w->config.seed = seed;
  w->config.timeout_ns = 1000000;
  w->config.heartbeat_ns = BEAT;
  w->config.chunk_bytes = 64u << chance(8);
  w->config.model_max_bytes = 1 << 30;
  w->now = 1;
  mlfab__port host = {w, host_post, no_ready, any_drop, no_detach, no_event};
  assert_int_equal(mlfab__muster_init(&w->muster, &w->env, &w->config, &host), 0);
  for (uint32_t i = 0; i < n; i++) {
    worker *me = &w->workers[i];
    mlfab__port up = {me, up_post, no_ready, any_drop, no_detach, no_event};
    mlfab__port out = {me, hop_post, hop_ready, any_drop, hop_detach, no_event};
    mlfab__port in = {me, down_post, no_ready, any_drop, down_detach, no_event};
    mlfab__tree_init(&me->tree, &w->env, &w->config, i, &up, &out, &in, &me->requests);
    me->alive = me->up = 1;
    mlfab__muster_hello(&w->muster, i, 1, w->now);
  }
}

static void close_world(void) {
  for (uint32_t i = 0; i < w->n; i++) {
    worker *me = &w->workers[i];
    pipe_cut(&me->to_server);
    pipe_cut(&me->from_server);
    mlfab__tree_free(&me->tree);
    free(me->data);
    free(me->share);
    for (uint32_t k = 0; k < w->n; k++) {
      link *l = &w->hops[i][k];
      if (!l->there) continue;
      pipe_cut(l->there);
      pipe_cut(l->back);
      free(l->there);
      free(l->back);
    }
  }
  mlfab__muster_free(&w->muster);
  assert_int_equal(w->env.bytes, 0);
  free(w->workers);
  free(w);
}

/* Sums of floats whose order shows; integers that wrap round. */
static void fill(uint8_t *at, int dtype, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) {
    uint64_t bits = mlfab__prng_next(&w->prng);
    double wide = ((double)(bits >> 11) * 0x1p-53 - 0.5) * (bits & 1 ? 1e6 : 1e-3);
    float narrow = (float)wide;
    if (dtype == MLFAB_F32) memcpy(at + 4 * i, &narrow, 4);
    if (dtype == MLFAB_F64) memcpy(at + 8 * i, &wide, 8);
    if (dtype == MLFAB_I64) memcpy(at + 8 * i, &bits, 8);
  }
}

static void shape(int dtype, uint64_t count) {
  w->dtype = dtype;
  w->count = count;
  w->bytes = count * mlfab__dtype_bytes(dtype);
  for (uint32_t i = 0; i < w->n; i++) {
    worker *me = &w->workers[i];
    free(me->data);
    free(me->share);
    me->data = malloc(w->bytes);
    me->share = malloc(w->bytes);
    assert_true(me->data && me->share);
  }
}

static int start(uint32_t rank, uint64_t count, int dtype, uint64_t timeout_ns) {
  worker *me = &w->workers[rank];
  mlfab_error error = {0};
  int code = mlfab__tree_start(&me->tree, me->data, count, dtype, timeout_ns, w->now, &me->request,
                               &error);
  if (!code) me->open = 1;
  return code;
}

static void begin(uint32_t rank) {
  worker *me = &w->workers[rank];
  fill(me->share, w->dtype, w->count);
  memcpy(me->data, me->share, w->bytes);
  assert_int_equal(start(rank, w->count, w->dtype, 0), 0);
}

/* Takes note of a request that is done; its array is the caller's again, who writes into it, unless
 * it holds the sum. */
static void look(uint32_t rank) {
  worker *me = &w->workers[rank];
  mlfab__request *request = me->open ? mlfab__request_find(&me->requests, me->request) : NULL;
  if (!request || !request->done) return;
  me->open = 0;
  me->code = request->result.status;
  me->rank = request->result.rank;
  mlfab__request_end(&me->requests, request);
  if (me->code && me->code != MLFAB_ERR_TIMEOUT && me->code != MLFAB_ERR_CANCELLED)
    memset(me->data, 0xEE, w->bytes);
}

/* --- what happens --- */

static mlfab__frame_in frame_of(const message *m) {
  if (m->lent) assert_memory_equal(m->bulk, m->lent, m->bulk_bytes);
  return (mlfab__frame_in){m->type, m->meta_bytes, m->bulk_bytes, m->meta, m->bulk};
}

static message pipe_take(pipe *p) {
  p->count--;
  return p->frames[p->begin++ % FRAMES];
}

/* The tree, when server 0 has just arranged it. */
static void note_tree(void) {
  if (w->muster.phase != MLFAB__MUSTER_RUNNING || w->seen == w->muster.number) return;
  w->seen = w->muster.number;
  w->inside = w->muster.inside;
  w->root = w->muster.root;
  w->runs++;
  for (uint32_t i = 0; i < w->inside; i++) {
    uint32_t rank = w->muster.order[i];
    w->order[i] = rank;
    w->parent[rank] = w->muster.callers[rank].parent;
  }
}

/* A tree of at most two steps, at random; or nonsense. */
static void answer_ask(void) {
  mlfab__tree_node nodes[WORKERS];
  uint32_t n = w->muster.inside, hubs[WORKERS], nhubs = 0, root = w->muster.root;
  uint8_t meta[WORKERS * 12 + 64];
  if (w->asked != w->muster.number || w->plan_silent) return;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t rank = w->muster.order[i];
    if (rank != root && chance(4) == 0) hubs[nhubs++] = rank;
  }
  for (uint32_t i = 0; i < n; i++) {
    uint32_t rank = w->muster.order[i], parent = root, giver = root, hub = 0;
    for (uint32_t k = 0; k < nhubs; k++) hub |= hubs[k] == rank;
    if (!hub && nhubs > 0 && chance(4) > 0) parent = hubs[chance(nhubs)];
    if (!hub && nhubs > 0 && chance(4) > 0) giver = hubs[chance(nhubs)];
    if (rank == root) parent = giver = MLFAB__NO_NODE;
    nodes[i] = (mlfab__tree_node){rank, parent, giver};
  }
  for (uint32_t i = n; i > 1; i--) {
    uint32_t k = chance(i);
    mlfab__tree_node other = nodes[k];
    nodes[k] = nodes[i - 1];
    nodes[i - 1] = other;
  }
  if (w->plan_bad) {
    static const uint32_t wrong[] = {MLFAB__NO_NODE, 99999};
    uint32_t k = chance(n), how = chance(4);
    if (how == 0) nodes[k].worker = nodes[(k + 1) % n].worker;
    if (how == 1) nodes[k].parent = nodes[k].worker == root ? root : wrong[chance(2)];
    if (how == 2) nodes[k].giver = nodes[k].worker;
    if (how == 3) n--;
  }
  mlfab__tree_plan plan = {w->asked, n};
  mlfab__frame_in in = {MLFAB__TREE_PLAN, mlfab__encode_tree_plan(meta, &plan, nodes), 0, meta,
                        NULL};
  w->asked = 0;
  assert_int_equal(mlfab__muster_scheduler_frame(&w->muster, &in), 1);
}

static void cut_hop(uint32_t from, uint32_t to) {
  link *l = hop(from, to);
  if (!l->stands) return;
  l->stands = 0;
  l->wanted = 1;
  pipe_cut(l->there);
  pipe_cut(l->back);
  mlfab__tree_hop_lost(&w->workers[from].tree, to);
  mlfab__tree_member_lost(&w->workers[to].tree, from);
}

static void cut_server(uint32_t rank) {
  worker *me = &w->workers[rank];
  me->up = 0;
  pipe_cut(&me->to_server);
  pipe_cut(&me->from_server);
}

static int act_server(uint32_t rank) {
  worker *me = &w->workers[rank];
  if (!me->up) {
    if (!me->alive || chance(4)) return 0;
    me->up = 1;
    mlfab__muster_hello(&w->muster, rank, 0, w->now);
    mlfab__tree_hello(&me->tree);
    return 1;
  }
  pipe *p = chance(2) ? &me->to_server : &me->from_server;
  if (p->count == 0) return 0;
  message m = pipe_take(p);
  mlfab__frame_in in = frame_of(&m);
  int taken = p == &me->to_server ? mlfab__muster_frame(&w->muster, rank, &in, w->now)
                                  : mlfab__tree_server_frame(&me->tree, &in, w->now);
  assert_int_equal(taken, 1);
  message_free(&m);
  return 1;
}

/* A worker's bytes onto a link, when it has any and there is room. */
static int act_yield(uint32_t from, uint32_t to, int back) {
  static uint8_t meta[MLFAB_META_MAX];
  link *l = hop(from, to);
  pipe *p = back ? l->back : l->there;
  mlfab__frame_out out = {.meta = meta};
  mlfab__tree *tree = &w->workers[back ? to : from].tree;
  if (p->count > 20) return 0;
  if (!(back ? mlfab__tree_next_down(tree, from, &out) : mlfab__tree_next_up(tree, to, &out)))
    return 0;
  pipe_put(p, out.type, meta, out.meta_bytes, out.bulk, out.bulk_bytes, out.token);
  if (back) {
    mlfab__tree_taken_down(tree, from, &out);
  } else {
    mlfab__tree_taken_up(tree, &out);
  }
  return 1;
}

static int act_hop(uint32_t from, uint32_t to) {
  link *l = &w->hops[from][to];
  if (!l->there) return 0;
  if (!l->stands) {
    int both = w->workers[from].alive && w->workers[to].alive;
    if (!both || !l->wanted || chance(4)) return 0;
    l->stands = 1;
    mlfab__tree_hop_up(&w->workers[from].tree, to);
    return 1;
  }
  int back = (int)chance(2);
  if (chance(2)) return act_yield(from, to, back);
  pipe *p = back ? l->back : l->there;
  if (p->count == 0) return 0;
  message m = pipe_take(p);
  mlfab__frame_in in = frame_of(&m);
  worker *taker = &w->workers[back ? from : to], *sender = &w->workers[back ? to : from];
  assert_int_equal(back ? mlfab__tree_hop_frame(&taker->tree, to, &in)
                        : mlfab__tree_member_frame(&taker->tree, from, &in),
                   1);
  if (m.token) mlfab__tree_sent(&sender->tree, back ? from : to, !back, m.token);
  message_free(&m);
  return 1;
}

/* One thing somewhere; 0 when this time there was none. */
static int act(void) {
  uint32_t a = chance(w->n), b = chance(w->n);
  int moved = 0;
  if (w->asked) answer_ask();
  if (chance(3) == 0 || w->n == 1) moved = act_server(a);
  /* Links that nobody wants are most of all pairs: those of the tree are tried more often. */
  const mlfab__tree *tree = &w->workers[a].tree;
  if (!moved && tree->number && tree->parent != MLFAB__NO_NODE)
    b = chance(2) ? tree->parent : tree->giver;
  if (!moved && a != b) moved = act_hop(a, b);
  note_tree();
  return moved;
}

static int any_open(void) {
  int open = 0;
  for (uint32_t i = 0; i < w->n; i++) {
    if (w->workers[i].alive) look(i);
    open |= w->workers[i].alive && w->workers[i].open;
  }
  return open;
}

/* Until every call is over. `breaks`: how often links break, one in so many steps; 0: never. */
static void settle(uint32_t breaks) {
  for (uint64_t steps = 0, idle = 0; any_open(); steps++) {
    idle = act() ? 0 : idle + 1;
    if (idle > 200000) fail_msg("nothing happens any more");
    uint32_t a = chance(w->n), b = chance(w->n);
    if (breaks == 0 || chance(breaks)) continue;
    if (chance(3) == 0) {
      cut_server(a);
    } else if (a != b && w->hops[a][b].there) {
      cut_hop(a, b);
    }
  }
}

/* Until nothing happens by itself. */
static void calm(void) {
  for (uint64_t idle = 0; idle < 5000 * (uint64_t)w->n;) idle = act() ? 0 : idle + 1;
  any_open();
}

static void kill(uint32_t rank) {
  w->workers[rank].alive = 0;
  cut_server(rank);
  for (uint32_t i = 0; i < w->n; i++) {
    if (i == rank) continue;
    if (w->hops[i][rank].there) cut_hop(i, rank);
    if (w->hops[rank][i].there) cut_hop(rank, i);
  }
}

/* --- the literal sum --- */

static void add(uint8_t *to, const uint8_t *from) {
  for (uint64_t i = 0; i < w->count; i++) {
    if (w->dtype == MLFAB_F32) {
      volatile float a = ((const float *)(const void *)to)[i];
      a += ((const float *)(const void *)from)[i];
      ((float *)(void *)to)[i] = a;
    } else if (w->dtype == MLFAB_F64) {
      volatile double a = ((const double *)(const void *)to)[i];
      a += ((const double *)(const void *)from)[i];
      ((double *)(void *)to)[i] = a;
    } else {
      ((uint64_t *)(void *)to)[i] += ((const uint64_t *)(const void *)from)[i];
    }
  }
}

static uint8_t *literal(uint32_t rank) {
  uint8_t *sum = copy(w->workers[rank].share, (uint32_t)w->bytes);
  for (uint32_t i = 0; i < w->inside; i++) {
    if (w->order[i] == rank || w->parent[w->order[i]] != rank) continue;
    uint8_t *share = literal(w->order[i]);
    add(sum, share);
    free(share);
  }
  return sum;
}

static void expect_sum(void) {
  uint8_t *sum = literal(w->root);
  for (uint32_t i = 0; i < w->inside; i++) {
    const worker *me = &w->workers[w->order[i]];
    assert_int_equal(me->code, 0);
    assert_memory_equal(me->data, sum, w->bytes);
  }
  free(sum);
}

static void expect_all(int32_t code, int32_t rank) {
  for (uint32_t i = 0; i < w->n; i++) {
    if (!w->workers[i].alive) continue;
    assert_int_equal(w->workers[i].code, code);
    assert_int_equal(w->workers[i].rank, rank);
  }
}

static void begin_all(void) {
  for (uint32_t i = 0; i < w->n; i++) {
    if (w->workers[i].alive && !w->workers[i].open) begin(i);
  }
}

/* --- tests --- */

static int scaled(int least, double full) {
  return (int)test_cases_from((uint64_t)least, full / 100);
}

/* All sizes of worlds, all types, with and without a scheduler and with links that break. */
static void test_sums(void **state) {
  static const int dtypes[] = {MLFAB_F32, MLFAB_F64, MLFAB_I64};
  (void)state;
  int rounds = scaled(150, 10000);
  for (int round = 0; round < rounds; round++) {
    open_world(round < 64 ? 1 + (uint32_t)round : 1 + (uint32_t)(round * 7) % 24,
               1000 + (uint64_t)round);
    w->config.eager_bytes = 0;
    w->plans = (int)chance(2);
    if (w->plans) mlfab__muster_scheduler(&w->muster, 1);
    for (int call = 0; call < 3; call++) {
      shape(dtypes[chance(3)], 1 + chance(chance(8) ? 3000 : 20));
      begin_all();
      settle(round % 3 ? 400 : 0);
      if (w->n == 1) {
        assert_memory_equal(w->workers[0].data, w->workers[0].share, w->bytes);
        continue;
      }
      assert_int_equal(w->inside, w->n);
      expect_sum();
      expect_all(0, MLFAB_NO_RANK);
    }
    assert_int_equal(w->drops, 0);
    assert_true(w->n == 1 || w->runs == 3);
    close_world();
  }
}

/* Arrays that are larger than rings and windows are. */
static void test_large(void **state) {
  (void)state;
  for (uint32_t n = 2; n <= 12; n += 5) {
    open_world(n, n);
    w->config.chunk_bytes = 262144;
    shape(MLFAB_F32, 3 * MLFAB__TREE_WINDOW / 4 / 2 * 2 + 13);
    begin_all();
    settle(n == 7 ? 300 : 0);
    expect_sum();
    close_world();
  }
}

/* Rings are bounded, and without memory for them the sum is the same. */
static uint64_t refuse_above;
static void *stingy(void *user, size_t bytes) {
  (void)user;
  return bytes > refuse_above ? NULL : calloc(1, bytes);
}
static void generous(void *user, void *memory, size_t bytes) {
  (void)user, (void)bytes;
  free(memory);
}

static void test_no_rings(void **state) {
  (void)state;
  open_world(5, 3);
  shape(MLFAB_F64, 40000);
  mlfab_env hooks = {.size = sizeof hooks, .allocate = stingy, .release = generous};
  mlfab__env env;
  assert_int_equal(mlfab__env_init(&env, &hooks), 0);
  refuse_above = 200000; /* server 0's scratch fits, rings do not */
  for (uint32_t i = 0; i < w->n; i++) w->workers[i].tree.env = &env;
  begin_all();
  settle(0);
  expect_sum();
  assert_int_equal(w->workers[w->root].tree.stage_room, 0);
  refuse_above = 100; /* not even the lists: it ends for all, and says who has no memory */
  for (uint32_t i = 0; i < w->n; i++) {
    mlfab__tree *tree = &w->workers[i].tree;
    mlfab__free(&env, tree->children, tree->child_room * sizeof *tree->children);
    tree->children = NULL;
    tree->child_room = 0;
  }
  refuse_above = 31;
  begin_all();
  settle(0);
  for (uint32_t i = 0; i < w->n; i++) assert_int_equal(w->workers[i].code, MLFAB_ERR_MEMORY);
  refuse_above = 1 << 30;
  begin_all();
  settle(0);
  expect_sum();
  close_world();
  assert_int_equal(env.bytes, 0);
}

/* NaN and infinity are everybody's, as the numbers are. */
static void test_not_finite(void **state) {
  (void)state;
  open_world(4, 4);
  shape(MLFAB_F32, 100);
  for (uint32_t i = 0; i < 4; i++) begin(i);
  float *odd = (float *)(void *)w->workers[2].data;
  odd[7] = NAN;
  odd[50] = INFINITY;
  memcpy(w->workers[2].share, odd, w->bytes);
  settle(0);
  for (uint32_t i = 0; i < 4; i++) {
    const float *got = (const float *)(const void *)w->workers[i].data;
    assert_int_equal(w->workers[i].code, 0);
    assert_true(isnan(got[7]) && isinf(got[50]) && isfinite(got[8]));
    assert_memory_equal(got, w->workers[0].data, w->bytes);
  }
  close_world();
}

static void test_arguments(void **state) {
  (void)state;
  open_world(2, 5);
  shape(MLFAB_F64, 10);
  worker *me = &w->workers[0];
  assert_int_equal(start(0, 0, MLFAB_F64, 0), MLFAB_ERR_ARGUMENT);
  assert_int_equal(start(0, 10, 77, 0), MLFAB_ERR_DTYPE);
  assert_int_equal(start(0, UINT64_MAX / 2, MLFAB_F64, 0), MLFAB_ERR_LIMIT);
  me->data++;
  assert_int_equal(start(0, 1, MLFAB_F64, 0), MLFAB_ERR_ARGUMENT);
  me->data--;
  begin(0);
  assert_int_equal(start(0, 10, MLFAB_F64, 0), MLFAB_ERR_AGAIN);
  begin(1);
  settle(0);
  expect_sum();
  mlfab__tree_dead(&me->tree, w->now);
  assert_int_equal(start(0, 10, MLFAB_F64, 0), MLFAB_ERR_PEER_DEAD);
  close_world();
}

/* Who differs is named on all ranks; then they agree again. */
static void test_shapes(void **state) {
  (void)state;
  for (uint32_t odd = 0; odd < 4; odd++) {
    open_world(4, 6 + odd);
    shape(MLFAB_F64, 10);
    for (uint32_t i = 0; i < 4; i++) {
      if (i != odd) begin(i);
    }
    if (odd & 1) {
      assert_int_equal(start(odd, 9, MLFAB_F64, 0), 0);
    } else {
      assert_int_equal(start(odd, 10, MLFAB_I64, 0), 0);
    }
    settle(0);
    expect_all(MLFAB_ERR_SHAPE, (int32_t)odd);
    for (uint32_t i = 0; i < 4; i++) {
      const char *text = w->workers[i].requests.last.text;
      assert_non_null(strstr(text, odd & 1 ? "calls it with 9 F64" : "calls it with 10 I64"));
      assert_non_null(strstr(text, i == odd ? "others with 10 F64" : "this worker with 10 F64"));
    }
    begin_all();
    settle(0);
    expect_sum();
    close_world();
  }
}

/* Lets it run for a while, from before the tree to the last bytes. */
static void some_steps(uint32_t most) {
  for (uint32_t i = chance(most); i > 0; i--) act();
}

/* A worker dies at any time: the others end, and the next allreduce is theirs. */
static void test_death(void **state) {
  (void)state;
  int rounds = scaled(200, 10000), failed = 0;
  for (int round = 0; round < rounds; round++) {
    open_world(2 + (uint32_t)round % 11, 20000 + (uint64_t)round);
    shape(MLFAB_F32, 1 + chance(2000));
    uint32_t victim = chance(w->n);
    begin_all();
    some_steps(3000);
    for (uint32_t i = 0; i < w->n; i++) look(i);
    kill(victim);
    some_steps(300);
    int inside = w->muster.callers[victim].state == MLFAB__CALLER_INSIDE;
    mlfab__muster_gone(&w->muster, victim, 0, w->now);
    settle(round % 2 ? 500 : 0);
    for (uint32_t i = 0; i < w->n && inside; i++) {
      if (i == victim) continue;
      assert_int_equal(w->workers[i].code, MLFAB_ERR_PEER_DEAD);
      assert_int_equal(w->workers[i].rank, victim);
    }
    failed += inside;
    begin_all();
    settle(0);
    expect_all(0, MLFAB_NO_RANK);
    if (w->n > 2) {
      assert_int_equal(w->inside, w->n - 1);
      expect_sum();
    }
    assert_int_equal(w->drops, 0);
    close_world();
  }
  assert_true(failed > rounds / 10 && failed < rounds);
}

/* A new process takes a rank in the middle of it: over for the others, and it takes part in the next. */
static void test_new_process(void **state) {
  (void)state;
  for (uint64_t round = 0; round < 50; round++) {
    open_world(5, 30000 + round);
    shape(MLFAB_I64, 500);
    begin_all();
    some_steps(800);
    for (uint32_t i = 0; i < 5; i++) look(i);
    int inside = w->muster.callers[3].state == MLFAB__CALLER_INSIDE;
    worker *me = &w->workers[3];
    kill(3);
    mlfab__port up = me->tree.up, out = me->tree.hop, in = me->tree.down;
    mlfab__tree_free(&me->tree);
    memset(&me->requests, 0, sizeof me->requests);
    mlfab__tree_init(&me->tree, &w->env, &w->config, 3, &up, &out, &in, &me->requests);
    me->alive = me->up = 1;
    me->open = 0;
    mlfab__muster_hello(&w->muster, 3, 1, w->now);
    mlfab__tree_hello(&me->tree);
    begin(3);
    calm();
    if (inside) {
      for (uint32_t i = 0; i < 5; i++) {
        if (i != 3) assert_int_equal(w->workers[i].code, MLFAB_ERR_PEER_DEAD);
      }
    }
    begin_all();
    settle(0);
    expect_all(0, MLFAB_NO_RANK);
    expect_sum();
    close_world();
  }
}

/* Who withdraws before the tree stands may call again, as if nothing had been; later it is over for all. */
static void test_withdrawn(void **state) {
  (void)state;
  int before = 0, after = 0;
  for (uint64_t round = 0; round < 200; round++) {
    open_world(4, 40000 + round);
    shape(MLFAB_F64, 300);
    int waits = (int)chance(2), code = chance(2) ? MLFAB_ERR_TIMEOUT : MLFAB_ERR_CANCELLED;
    for (uint32_t i = 0; i < 4; i++) {
      if (i != 2 || !waits) begin(i);
    }
    some_steps(600);
    for (uint32_t i = 0; i < 4; i++) look(i);
    worker *me = &w->workers[1];
    mlfab__request *request = mlfab__request_find(&me->requests, me->request);
    int had = me->tree.number && me->tree.have == me->tree.bytes;
    if (me->open) mlfab__tree_withdraw(&me->tree, request, code, w->now);
    look(1);
    int inside = w->muster.callers[1].state == MLFAB__CALLER_INSIDE;
    if (me->code) assert_int_equal(me->code, code);
    if (waits) {
      before++;
      begin(1);
      begin(2);
    } else if (inside && me->code) {
      after++;
      if (chance(2)) begin(1); /* at once, before it can know that the others fail */
    }
    calm();
    if (chance(2)) cut_server(1);
    calm();
    if (!waits && inside && me->code) {
      /* It had said that it has all, perhaps; else nobody succeeds. */
      for (uint32_t i = 0; i < 4; i++) {
        if (i == 1) continue;
        assert_int_equal(w->workers[i].code, had ? w->workers[0].code : code);
        assert_true(w->workers[i].code == 0 || w->workers[i].rank >= 0);
      }
    }
    for (uint32_t i = 0; i < 4; i++) {
      if (!w->workers[i].open) begin(i);
    }
    settle(0);
    expect_all(0, MLFAB_NO_RANK);
    expect_sum();
    close_world();
  }
  assert_true(before > 20 && after > 20);
}

/* The first rank that is missing is named, also when it is another after a while. */
static void test_missing(void **state) {
  (void)state;
  open_world(4, 7);
  shape(MLFAB_F32, 8);
  begin(3);
  calm();
  assert_int_equal(w->workers[3].tree.missing, 0);
  begin(0);
  calm();
  assert_int_equal(w->workers[0].tree.missing, 1);
  assert_int_equal(w->workers[3].tree.missing, 0);
  mlfab__muster_tick(&w->muster, w->now);
  calm();
  assert_int_equal(w->workers[3].tree.missing, 1);
  mlfab__request *request = mlfab__request_find(&w->workers[3].requests, w->workers[3].request);
  mlfab__tree_withdraw(&w->workers[3].tree, request, MLFAB_ERR_TIMEOUT, w->now);
  look(3);
  assert_int_equal(w->workers[3].code, MLFAB_ERR_TIMEOUT);
  assert_int_equal(w->workers[3].rank, 1);
  calm();
  /* Those who have no more data are not waited for. */
  mlfab__muster_done(&w->muster, 1, w->now);
  mlfab__muster_done(&w->muster, 2, w->now);
  begin(3);
  settle(0);
  assert_int_equal(w->inside, 2);
  expect_sum();
  close_world();
}

/* A parent that cannot be reached, though server 0 sees it: named in 8 heartbeats, and over for all. */
static void test_unreachable(void **state) {
  (void)state;
  open_world(3, 8);
  shape(MLFAB_F32, 8);
  begin_all();
  while (!w->workers[0].tree.number || !w->workers[1].tree.number || !w->workers[2].tree.number) {
    for (uint32_t i = 0; i < 3; i++) act_server(i);
    note_tree();
  }
  uint32_t child = (w->root + 1) % 3, said = 0;
  mlfab__tree *tree = &w->workers[child].tree;
  assert_int_equal(mlfab__tree_hop_missing(tree, (w->root + 2) % 3, w->now), 0);
  for (uint64_t now = 100; !tree->gave_up; now += BEAT / 4, said++) {
    assert_true(now <= 101 + (MLFAB__TREE_PATIENCE + 1) * BEAT);
    assert_int_equal(mlfab__tree_hop_missing(tree, w->root, now), 1);
  }
  assert_true(said > 4 * MLFAB__TREE_PATIENCE - 2);
  settle(0);
  expect_all(MLFAB_ERR_PEER_DEAD, (int32_t)w->root);
  begin_all();
  settle(0);
  expect_sum();
  close_world();
}

/* A scheduler that says nothing, nonsense, or is lost costs a heartbeat at most. */
static void test_bad_plans(void **state) {
  (void)state;
  uint32_t refused = 0;
  for (uint64_t round = 0; round < 120; round++) {
    open_world(3 + (uint32_t)round % 6, 50000 + round);
    shape(MLFAB_F32, 30);
    mlfab__muster_scheduler(&w->muster, 1);
    w->config.eager_bytes = 0;
    w->plan_silent = round % 3 > 0;
    w->plan_bad = 1;
    begin_all();
    while (w->muster.phase == MLFAB__MUSTER_IDLE) act();
    uint64_t since = w->now;
    if (round % 3 == 1) {
      mlfab__muster_tick(&w->muster, since + BEAT - 1);
      assert_int_equal(w->muster.phase, MLFAB__MUSTER_PLANNING);
      mlfab__muster_tick(&w->muster, since + BEAT);
      assert_int_equal(w->muster.phase, MLFAB__MUSTER_RUNNING);
    } else if (round % 3 == 2) {
      mlfab__muster_scheduler(&w->muster, 0);
      assert_int_equal(w->muster.phase, MLFAB__MUSTER_RUNNING);
    }
    settle(0);
    expect_sum();
    refused += w->drops;
    close_world();
  }
  assert_true(refused > 20);
}

/* Frames that no peer of ours sends: the link is given up, nothing else happens. */
static void test_hostile(void **state) {
  (void)state;
  for (uint64_t round = 0; round < 400; round++) {
    open_world(4, 60000 + round);
    shape(MLFAB_F32, 600);
    begin_all();
    some_steps(900);
    static const uint8_t types[] = {MLFAB__REDUCE,    MLFAB__REDUCE_DONE, MLFAB__TREE,
                                    MLFAB__TREE_JOIN, MLFAB__TREE_GRANT,  MLFAB__TREE_UP,
                                    MLFAB__TREE_DOWN, MLFAB__TREE_PLAN};
    uint8_t meta[64], bulk[256] = {0};
    uint32_t to = chance(4), from = (to + 1 + chance(3)) % 4;
    mlfab__tree *tree = &w->workers[to].tree;
    uint64_t fields[] = {chance(2) ? tree->number : mlfab__prng_next(&w->prng),
                         chance(2) ? chance(3000) : mlfab__prng_next(&w->prng),
                         chance(2) ? chance(3000) : mlfab__prng_next(&w->prng)};
    memcpy(meta, fields, sizeof fields);
    mlfab__frame_in in = {types[chance(8)], chance(2) ? 16 : chance(33),
                          chance(2) ? chance(256) : 0, meta, chance(4) ? bulk : NULL};
    if (in.type == MLFAB__TREE_DOWN && in.bulk && in.bulk_bytes)
      in.bulk = NULL; /* would be the sum */
    if (in.type == MLFAB__TREE_UP) in.bulk = NULL;
    if (in.type == MLFAB__REDUCE) {
      mlfab__muster_frame(&w->muster, to, &in, w->now);
    } else if (in.type == MLFAB__TREE_PLAN) {
      mlfab__muster_scheduler_frame(&w->muster, &in);
    } else if (in.type == MLFAB__TREE_GRANT || in.type == MLFAB__TREE_DOWN) {
      mlfab__tree_hop_frame(tree, from, &in);
    } else if (in.type == MLFAB__TREE_JOIN || in.type == MLFAB__TREE_UP) {
      mlfab__tree_member_frame(tree, from, &in);
    } else if (in.meta_bytes != 16 || in.type == MLFAB__TREE) {
      mlfab__tree_server_frame(tree, &in, w->now);
    }
    for (int i = 0; i < 3000; i++) act();
    close_world();
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_sums),        cmocka_unit_test(test_large),
      cmocka_unit_test(test_no_rings),    cmocka_unit_test(test_not_finite),
      cmocka_unit_test(test_arguments),   cmocka_unit_test(test_shapes),
      cmocka_unit_test(test_death),       cmocka_unit_test(test_new_process),
      cmocka_unit_test(test_withdrawn),   cmocka_unit_test(test_missing),
      cmocka_unit_test(test_unreachable), cmocka_unit_test(test_bad_plans),
      cmocka_unit_test(test_hostile),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
