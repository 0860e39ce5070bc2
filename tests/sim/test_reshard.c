/* test_reshard.c - slices move between servers of a simulated fabric, from seeds, while workers push and
 * pull, links break, and workers crash and return.
 *
 * Four servers, of which first one holds the model, then 4, 2, 4 and 1; 8 workers. Every life (process) of
 * a worker has its own elements, spread over the model so that every slice has some; its updates add 1 to
 * them: updates of the whole model, of one tensor, or sparse ones. So each element counts the updates of
 * its owner that it has seen.
 *
 * Checks: every call of a live worker succeeds; every pull contains what was acknowledged before it, and
 * nothing that was never pushed; at the end every element has seen each acknowledged update of its owner
 * exactly once (those that a crash left unknown: at most once), every cache equals the model, and a
 * balanced part of it is at the requested servers. A tenth of the seeds runs twice: same hash.
 *
 * With momentum 1/2 an update adds 1, then half of the rest with every later commit of the slice. At the
 * end enough updates of zeros are pushed to make it 2, so that lost momentum is detected.
 *
 * With even seeds the servers' blocks have different sizes, so that frames end within a receiver's block.
 * In half of the seeds the consistency model changes before every move.
 *
 * Another test injects one fault at each of several moments of a move (test_fault_in_a_move). */
#include "job.h"

#include <math.h>

enum {
  SERVERS = 4,
  WORKERS = 8,
  LIVES = 3,
  OWNERS = WORKERS * LIVES,
  TENSORS = 3,
  SLOTS = 2,
  MOVES = 4,
  ZEROS = 50 /* (1/2)^50 of an update remains */
};

/* ---- what a seed makes ---- */

typedef struct plan {
  uint32_t dedicated, scheduler;
  uint64_t count[TENSORS], total; /* elements */
  uint32_t slices, chunk, eager, block, tags, uneven;
  mlfab_sync sync;
  int momentum, crashes, parts; /* parts: not every update is of the whole model */
  int changes;                  /* of the consistency model, before every move */
  uint64_t heartbeat_ns, tick_ns;
  mlfab_sim_options sim;
} plan;

static void plan_make(plan *p, uint64_t seed) {
  static const uint32_t kinds[] = {MLFAB_SYNC_ASYNC, MLFAB_SYNC_ASYNC, MLFAB_SYNC_BSP,
                                   MLFAB_SYNC_BSP,   MLFAB_SYNC_SSP,   MLFAB_SYNC_PSSP};
  uint64_t d = mix(seed);
  memset(p, 0, sizeof *p);
  p->dedicated = (uint32_t)dice_chance(&d, 0.6);
  p->scheduler = dice_chance(&d, 0.25) ? MLFAB_SCHEDULER_BESIDE : MLFAB_SCHEDULER_NONE;
  for (uint32_t t = 0; t < TENSORS; t++) {
    p->count[t] = 500 + dice_below(&d, 4000);
    p->total += p->count[t];
  }
  uint64_t most = p->total * 8 / 4096;
  p->slices = (uint32_t)(8 + dice_below(&d, 25));
  if (p->slices > most) p->slices = (uint32_t)most;
  p->chunk = 1024u << dice_below(&d, 6);
  p->eager = 512u << dice_below(&d, 8);
  p->block = 1024u << dice_below(&d, 5);
  p->tags = dice_chance(&d, 0.5) ? 1u << dice_below(&d, 9) : 0;
  p->sync.size = sizeof p->sync;
  p->sync.kind = kinds[dice_below(&d, sizeof kinds / sizeof *kinds)];
  p->sync.staleness = (int64_t)dice_below(&d, 4);
  p->sync.soft = (uint32_t)dice_chance(&d, 0.3);
  p->sync.chance = 0.5;
  p->momentum = dice_chance(&d, 0.4);
  p->crashes = dice_chance(&d, 0.5);
  p->parts = dice_chance(&d, 0.7);
  p->changes = dice_chance(&d, 0.5);
  p->heartbeat_ns = 200 * MS;
  p->tick_ns = (3 + dice_below(&d, 25)) * MS;
  p->uneven = seed % 2 == 0;
  mlfab_sim_options *o = &p->sim;
  o->size = sizeof *o;
  o->hosts = p->dedicated ? SERVERS + WORKERS : WORKERS;
  o->seed = dice_roll(&d) | 1;
  o->latency_ns = 20000 + dice_below(&d, 2 * MS);
  o->latency_jitter = dice_chance(&d, 0.7) ? 0.5 : 0.0;
  o->rate_bytes_per_s = 10000000ull << dice_below(&d, 6);
  o->buffer_bytes = 16384ull << dice_below(&d, 6);
  if (!dice_chance(&d, 0.7)) return;
  o->loss = 0.1 / (8.0 + (double)(p->total * 8 / p->chunk));
  o->duplicate = o->loss;
  o->reorder = 0.05;
  o->pause = 0.3;
  o->pause_ns = 100 * MS;
  o->slow = 0.3;
}

/* ---- a run ---- */

typedef struct tally { /* number of a life's updates with bytes of each tensor */
  uint32_t started[TENSORS], acked[TENSORS];
} tally;

typedef struct slot {
  mlfab_request request;
  uint32_t tensors; /* as bits */
  uint32_t k;
  double *data;
} slot;

enum phase { AWAY, OPENING, DEFINING, WORKING, DONE };

struct run;
typedef struct worker {
  struct run *run;
  uint32_t rank, host;
  mlfab *ctx;
  enum phase phase;
  int busy;
  uint32_t life, pushed;
  int missed; /* it was declared dead, but was alive */
  uint64_t back_ns;
  slot slots[SLOTS];
  mlfab_request pull;
  tally before; /* when the pull began */
  double *image;
} worker;

enum { NOTHING, MODEL, MOVE, JOIN };

typedef struct run {
  plan plan;
  uint64_t dice;
  mlfab_sim *sim;
  mlfab *servers[SERVERS];
  worker workers[WORKERS];
  tally tallies[OWNERS];
  int blocking, blocked; /* kind and number of the blocking calls */
  uint32_t moves, last[SERVERS], nlast;
  uint64_t move_ns;
  int ending;
} run;

static uint64_t now(const run *r) { return mlfab_sim_clock(r->sim); }

/* A worker's call failed. That is right if it was taken for dead. */
static void failed(const worker *w, const char *what, int code) {
  if (!w->missed)
    wrong("worker %u, %s: %s (%s)", w->rank, what, mlfab_error_name(code), last_text(w->ctx));
}

static uint32_t owner_of(const worker *w) { return w->rank * LIVES + w->life; }

/* Calls of one kind may nest; only one worker moves slices. */
static int may_block(const run *r, int kind) {
  if (kind == MOVE) return r->blocked == 0;
  return r->blocked == 0 || r->blocking == kind || (kind == MODEL && r->blocking == MOVE);
}

static int block(run *r, worker *w, int kind) {
  int before = r->blocking;
  r->blocking = kind;
  r->blocked++;
  w->busy = 1;
  return before;
}

static void unblock(run *r, worker *w, int before) {
  r->blocking = before;
  r->blocked--;
  w->busy = 0;
}

static uint32_t bufs_of(const plan *p, double *image, uint32_t tensors, mlfab_buf *bufs) {
  uint32_t n = 0;
  for (uint32_t t = 0; t < TENSORS; image += p->count[t], t++) {
    if (!(tensors >> t & 1)) continue;
    bufs[n++] = (mlfab_buf){t, 0, image, p->count[t]};
  }
  return n;
}

/* ---- reading ---- */

/* Checks every element against its owner's known pushes; `exact`: nothing is under way. */
static void check_image(run *r, const worker *w, const double *image, const tally *own, int exact) {
  const plan *p = &r->plan;
  double most = p->momentum ? 2.0 : 1.0, least = p->momentum && exact ? 2.0 : 1.0;
  uint64_t e = 0;
  for (uint32_t t = 0; t < TENSORS; t++) {
    for (uint64_t i = 0; i < p->count[t]; i++, e++) {
      uint32_t owner = (uint32_t)(i % OWNERS);
      const tally *known = &r->tallies[owner];
      double high = most * known->started[t], low = 0.0;
      if (exact) low = least * known->acked[t];
      if (!exact && owner == owner_of(w)) low = least * own->acked[t];
      if (image[e] >= low - 1e-6 && image[e] <= high + 1e-6) continue;
      wrong(
          "worker %u, %s: element %llu of tensor %u is %.9g, and its owner (worker %u, life %u) "
          "pushed %u updates of it, of which %u are acknowledged",
          w->rank, exact ? "at the end" : "in a pull", (unsigned long long)i, t, image[e],
          owner / LIVES, owner % LIVES, known->started[t],
          exact || owner != owner_of(w) ? known->acked[t] : own->acked[t]);
      return;
    }
  }
}

/* The cache equals the last pull. */
static void check_cache(run *r, const worker *w) {
  const double *image = w->image;
  for (uint32_t t = 0; t < TENSORS && r->plan.tags; t++) {
    const void *data = NULL;
    uint64_t count = 0;
    if (mlfab_cached(w->ctx, t, &data, &count) || count != r->plan.count[t] ||
        memcmp(data, image, count * sizeof *image) != 0)
      wrong("worker %u: tensor %u in the cache is not what was pulled", w->rank, t);
    image += r->plan.count[t];
  }
}

/* ---- a worker's turn ---- */

static void end_push(run *r, worker *w, slot *s, int code) {
  tally *t = &r->tallies[owner_of(w)];
  s->request = 0;
  for (uint32_t k = 0; !code && k < TENSORS; k++) t->acked[k] += s->tensors >> k & 1;
  if (code) failed(w, "an update", code);
}

static void collect(run *r, worker *w) {
  mlfab_result result;
  int done;
  for (uint32_t i = 0; i < SLOTS; i++) {
    slot *s = &w->slots[i];
    if (s->request && !mlfab_test(w->ctx, s->request, &done, &result) && done)
      end_push(r, w, s, result.status);
  }
  if (!w->pull || mlfab_test(w->ctx, w->pull, &done, &result) || !done) return;
  w->pull = 0;
  if (!result.status) {
    check_image(r, w, w->image, &w->before, 0);
    check_cache(r, w);
  } else {
    failed(w, "a pull", result.status);
  }
}

static int push_sparse(run *r, worker *w, slot *s, const mlfab_push_options *options) {
  uint64_t indices[8000 / OWNERS + 2], n = 0;
  double ones[8000 / OWNERS + 2];
  uint32_t t = (uint32_t)dice_below(&r->dice, TENSORS);
  for (uint64_t i = owner_of(w); i < r->plan.count[t]; i += OWNERS, n++) {
    indices[n] = i;
    ones[n] = 1.0;
  }
  s->tensors = 1u << t;
  return mlfab_push_sparse_start(w->ctx, t, indices, ones, n, options, &s->request);
}

static void start_push(run *r, worker *w, slot *s) {
  const plan *p = &r->plan;
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  mlfab_buf bufs[TENSORS];
  int code;
  s->tensors = (1u << TENSORS) - 1;
  int sparse = p->parts && dice_chance(&r->dice, 0.2);
  if (sparse) {
    code = push_sparse(r, w, s, &options);
  } else {
    if (p->parts && dice_chance(&r->dice, 0.3)) s->tensors = 1 + (uint32_t)dice_below(&r->dice, 7);
    double *at = s->data;
    for (uint32_t t = 0; t < TENSORS; t++)
      for (uint64_t i = 0; i < p->count[t]; i++) *at++ = i % OWNERS == owner_of(w) ? 1.0 : 0.0;
    uint32_t n = bufs_of(p, s->data, s->tensors, bufs);
    code = mlfab_push_start(w->ctx, bufs, n, &options, &s->request);
  }
  if (code == MLFAB_ERR_AGAIN) return;
  if (code) {
    failed(w, "push_start", code);
    return;
  }
  s->k = w->pushed++;
  for (uint32_t t = 0; t < TENSORS; t++) r->tallies[owner_of(w)].started[t] += s->tensors >> t & 1;
}

static void start_pull(run *r, worker *w) {
  mlfab_buf bufs[TENSORS];
  w->before = r->tallies[owner_of(w)];
  int code = mlfab_pull_start(w->ctx, bufs, bufs_of(&r->plan, w->image, 7, bufs), NULL, &w->pull);
  if (code && code != MLFAB_ERR_AGAIN) failed(w, "pull_start", code);
}

/* Sets another consistency model, of all servers or of one. */
static void change(run *r, worker *w) {
  static const uint32_t kinds[] = {MLFAB_SYNC_ASYNC, MLFAB_SYNC_BSP, MLFAB_SYNC_SSP};
  mlfab_sync sync = {.size = sizeof sync, .kind = kinds[dice_below(&r->dice, 3)], .staleness = 1};
  uint32_t server =
      dice_chance(&r->dice, 0.7) ? MLFAB_ALL : (uint32_t)dice_below(&r->dice, SERVERS);
  int code = mlfab_set_sync(w->ctx, &sync, server, 20 * SECOND);
  say(r->sim, "worker %u: model %u at server %u: %s", w->rank, sync.kind, server,
      mlfab_error_name(code));
  if (code) failed(w, "set_sync", code);
}

/* Moves to 4, 2, 4, 1 servers. */
static void move(run *r, worker *w) {
  static const uint32_t sizes[MOVES] = {4, 2, 4, 1};
  uint32_t list[SERVERS] = {0, 1, 2, 3}, n = sizes[r->moves];
  for (uint32_t i = 0; i < SERVERS; i++) {
    uint32_t k = i + (uint32_t)dice_below(&r->dice, SERVERS - i), other = list[i];
    list[i] = list[k];
    list[k] = other;
  }
  int before = block(r, w, MOVE);
  if (r->plan.changes) change(r, w);
  say(r->sim, "worker %u: to %u servers (%u ...)", w->rank, n, list[0]);
  int code = mlfab_set_servers(w->ctx, list, n, 20 * SECOND);
  unblock(r, w, before);
  say(r->sim, "worker %u: to %u servers: %s %s", w->rank, n, mlfab_error_name(code),
      code ? last_text(w->ctx) : "");
  if (code) {
    failed(w, "set_servers", code);
    return;
  }
  r->moves++;
  r->nlast = n;
  memcpy(r->last, list, sizeof list);
  r->move_ns = now(r) + dice_below(&r->dice, 300 * MS);
}

static void define(run *r, worker *w) {
  const plan *p = &r->plan;
  mlfab_model_options options;
  if (!may_block(r, MODEL)) return;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.consistency = p->sync;
  options.slices = p->slices;
  options.active = 1;
  options.tags = p->tags;
  options.optimizer = p->momentum ? MLFAB_OPTIMIZER_MOMENTUM : MLFAB_OPTIMIZER_SGD;
  options.adadelay_c = 1.0, options.beta1 = 0.9, options.beta2 = 0.999, options.epsilon = 1e-8;
  options.gamma = 0.5;
  for (uint32_t t = 0; t < TENSORS; t++) {
    int code = mlfab_tensor_add(w->ctx, t, MLFAB_F64, p->count[t]);
    if (code && code != MLFAB_ERR_TENSOR) wrong("tensor_add: %s", mlfab_error_name(code));
  }
  int before = block(r, w, MODEL);
  int code = mlfab_model_start(w->ctx, &options, NULL, 0);
  unblock(r, w, before);
  say(r->sim, "worker %u life %u: model_start: %s", w->rank, w->life, mlfab_error_name(code));
  if (!code) w->phase = WORKING;
  if (code && code != MLFAB_ERR_TIMEOUT) failed(w, "model_start", code);
}

/* A new process pulls the updates of its predecessor, and of all others. */
static void die(run *r, worker *w) {
  say(r->sim, "worker %u crashes", w->rank);
  mlfab_sim_crash(r->sim, w->host);
  w->phase = AWAY;
  w->missed = 0;
  w->life++;
  w->pushed = 0;
  w->pull = 0;
  for (uint32_t i = 0; i < SLOTS; i++) w->slots[i].request = 0;
  w->back_ns = now(r) + dice_below(&r->dice, 1500 * MS);
}

static void join(run *r, worker *w) {
  if (!may_block(r, JOIN)) return;
  int before = block(r, w, JOIN);
  int code = mlfab_finish(w->ctx, 20 * SECOND);
  unblock(r, w, before);
  if (code) wrong("worker %u's join: %s (%s)", w->rank, mlfab_error_name(code), last_text(w->ctx));
  w->phase = DONE;
}

static int others_joined(const run *r) {
  for (uint32_t i = 1; i < WORKERS; i++)
    if (r->workers[i].phase != DONE || r->workers[i].busy) return 0;
  return 1;
}

static void work(run *r, worker *w) {
  const plan *p = &r->plan;
  slot *idle = NULL;
  uint32_t open = 0;
  collect(r, w);
  int serves = !p->dedicated && w->rank < SERVERS;
  if (p->crashes && !r->ending && w->rank > 0 && !serves && w->life + 1 < LIVES &&
      dice_chance(&r->dice, r->blocking == MOVE ? 0.02 : 0.004)) {
    die(r, w);
    return;
  }
  for (uint32_t i = 0; i < SLOTS; i++) {
    open += w->slots[i].request != 0;
    if (!w->slots[i].request) idle = &w->slots[i];
  }
  /* Worker 0 stays until the others have finished, who may wait for its updates. */
  int goes_on = !r->ending || (w->rank == 0 && !others_joined(r));
  if (r->ending && w->rank > 0 && open == 0 && !w->pull) {
    join(r, w);
    return;
  }
  if (idle && goes_on && dice_chance(&r->dice, 0.7)) start_push(r, w, idle);
  if (!w->pull && !r->ending && dice_chance(&r->dice, 0.4)) start_pull(r, w);
  if (r->moves < MOVES && now(r) >= r->move_ns && may_block(r, MOVE) && dice_chance(&r->dice, 0.2))
    move(r, w);
}

static void on_event(void *user, const mlfab_event_info *info) {
  run *r = user;
  if (info->kind == MLFAB_EVENT_DEAD && !info->is_server && info->rank >= 0 &&
      info->rank < WORKERS && r->workers[info->rank].ctx)
    r->workers[info->rank].missed = 1;
  say(r->sim, "event %u: %s %d: %s", info->kind, info->is_server ? "server" : "worker",
      (int)info->rank, info->text);
}

static void configure(run *r, uint32_t rank, mlfab_config *c) {
  const plan *p = &r->plan;
  mlfab_config_init(c);
  c->workers = WORKERS;
  c->servers = SERVERS;
  c->dedicated = p->dedicated;
  c->chunk_bytes = p->chunk;
  c->eager_bytes = p->eager;
  /* Servers with different block sizes: a frame may hold bytes of several blocks of its receiver. */
  c->block_bytes = p->uneven ? 512u << (p->block / 1024 + rank) % 6 : p->block;
  c->heartbeat_ns = p->heartbeat_ns;
  c->timeout_ns = 30 * SECOND;
  c->scheduler = p->scheduler;
  c->on_event = on_event;
  c->user = r;
}

static void open_worker(run *r, worker *w) {
  mlfab_config c;
  configure(r, w->rank, &c);
  c.rank = (int32_t)w->rank;
  c.seed = r->plan.sim.seed + owner_of(w);
  sim_open(r->sim, w->host, &c, &w->ctx);
  w->phase = OPENING;
}

static void turn(void *user) {
  worker *w = user;
  run *r = w->run;
  mlfab_error error;
  mlfab_sim_at(r->sim, now(r) + 1 + dice_below(&r->dice, 2 * r->plan.tick_ns), turn, w);
  if (w->busy) return;
  switch (w->phase) {
    case AWAY:
      if (now(r) >= w->back_ns) open_worker(r, w);
      break;
    case OPENING:
      if (mlfab_is_ready(w->ctx, &error) == 1) w->phase = DEFINING;
      break;
    case DEFINING:
      define(r, w);
      break;
    case WORKING:
      work(r, w);
      break;
    default:
      break;
  }
}

/* ---- the fabric ---- */

static void start(run *r, uint64_t seed) {
  memset(r, 0, sizeof *r);
  r->dice = mix(seed ^ 0x51ce5);
  plan *p = &r->plan;
  plan_make(p, seed);
  assert_int_equal(mlfab_sim_create(&p->sim, &r->sim), 0);
  say(r->sim,
      "%s servers, scheduler %u, sync %u, momentum %d, crashes %d, parts %d, %u slices, %llu "
      "elements, tags %u, chunk %u, eager %u",
      p->dedicated ? "dedicated" : "shared", p->scheduler, p->sync.kind, p->momentum, p->crashes,
      p->parts, p->slices, (unsigned long long)p->total, p->tags, p->chunk, p->eager);
  for (uint32_t s = 0; p->dedicated && s < SERVERS; s++) {
    mlfab_config c;
    configure(r, s, &c);
    c.roles = MLFAB_ROLE_SERVER;
    c.rank = (int32_t)s;
    sim_open(r->sim, s, &c, &r->servers[s]);
  }
  for (uint32_t i = 0; i < WORKERS; i++) {
    worker *w = &r->workers[i];
    w->run = r;
    w->rank = i;
    w->host = i + (p->dedicated ? SERVERS : 0);
    w->image = calloc(p->total, sizeof *w->image);
    for (uint32_t k = 0; k < SLOTS; k++) w->slots[k].data = calloc(p->total, sizeof(double));
    open_worker(r, w);
    mlfab_sim_at(r->sim, now(r) + 1 + dice_below(&r->dice, p->tick_ns), turn, w);
  }
  r->move_ns = dice_below(&r->dice, 400 * MS);
}

static void finish(run *r) {
  for (uint32_t i = 0; i < WORKERS; i++) {
    worker *w = &r->workers[i];
    if (w->ctx) mlfab_abandon(&w->ctx);
    for (uint32_t k = 0; k < SLOTS; k++) free(w->slots[k].data);
    free(w->image);
  }
  for (uint32_t s = 0; s < SERVERS; s++)
    if (r->servers[s]) mlfab_abandon(&r->servers[s]);
  mlfab_sim_destroy(&r->sim);
}

static int all_done(const run *r) {
  for (uint32_t i = 0; i < SLOTS; i++)
    if (r->workers[0].slots[i].request) return 0;
  return others_joined(r) && r->workers[0].pull == 0 && !r->workers[0].busy;
}

static void run_until(run *r, uint64_t until) {
  while (now(r) < until) {
    if (!r->ending && r->moves == MOVES && r->blocked == 0) return;
    if (r->ending && all_done(r)) return;
    sim_step(r->sim);
  }
}

/* Pushes zeros until no momentum remains. */
static void push_zeros(run *r) {
  worker *w = &r->workers[0];
  mlfab_buf bufs[TENSORS];
  memset(w->slots[0].data, 0, r->plan.total * sizeof(double));
  uint32_t n = bufs_of(&r->plan, w->slots[0].data, 7, bufs);
  for (int i = 0; i < ZEROS && r->plan.momentum; i++) {
    int code = mlfab_push(w->ctx, bufs, n, NULL, NULL);
    if (code) wrong("the last updates: %s (%s)", mlfab_error_name(code), last_text(w->ctx));
  }
  /* Open rounds are closed when no worker pushes any more. */
  int code = mlfab_finish(w->ctx, 20 * SECOND);
  if (code) wrong("worker 0's join: %s (%s)", mlfab_error_name(code), last_text(w->ctx));
}

static uint64_t moved(const run *r) {
  uint64_t slices = 0;
  for (uint32_t s = 0; s < SERVERS; s++) {
    mlfab_stats stats;
    mlfab *ctx = r->plan.dedicated ? r->servers[s] : r->workers[s].ctx;
    memset(&stats, 0, sizeof stats);
    if (ctx) mlfab_get_stats(ctx, &stats, sizeof stats);
    slices += stats.slices_moved;
  }
  return slices;
}

static void settle(run *r) {
  mlfab_buf bufs[TENSORS];
  push_zeros(r);
  for (uint32_t i = 0; i < WORKERS; i++) {
    worker *w = &r->workers[i];
    int code = mlfab_pull(w->ctx, bufs, bufs_of(&r->plan, w->image, 7, bufs), NULL, NULL);
    if (code) wrong("worker %u's last pull: %s (%s)", i, mlfab_error_name(code), last_text(w->ctx));
    check_image(r, w, w->image, NULL, 1);
    check_cache(r, w);
    if (memcmp(w->image, r->workers[0].image, r->plan.total * sizeof *w->image) != 0)
      wrong("worker %u pulls another model than worker 0", i);
  }
  if (r->plan.slices > 1 && moved(r) == 0) wrong("no slice has ever moved");
}

/* Returns a hash of all that happened. */
static uint64_t run_seed(uint64_t seed) {
  static run it;
  run *r = &it;
  uint64_t hash;
  start(r, seed);
  run_until(r, now(r) + 120 * SECOND);
  if (r->moves < MOVES) wrong("%u moves in two minutes", r->moves);
  r->ending = 1;
  mlfab_sim_set_faults(r->sim, NULL);
  run_until(r, now(r) + 60 * SECOND);
  if (!all_done(r)) wrong("after a minute without faults it is not done");
  settle(r);
  mlfab_sim_trace_hash(r->sim, &hash);
  finish(r);
  return hash;
}

static void play(uint64_t seed) { seeds_same(seed, run_seed); }

TEST(test_seeds) { seeds_run("reshard", test_cases(40), play); }

/* ---- a round that is open ---- */

static int is_done(mlfab *ctx, mlfab_request request) {
  mlfab_result result;
  int done = 0;
  assert_int_equal(mlfab_test(ctx, request, &done, &result), 0);
  if (done) assert_int_equal(result.status, 0);
  return done;
}

enum { COUNT = 3000 };
static double ones[COUNT], broken[COUNT], image[COUNT];
static const mlfab_buf push = {0, 0, ones, COUNT}, bad = {0, 0, broken, COUNT},
                       pull = {0, 0, image, COUNT};
static const mlfab_push_options half = {
    .size = sizeof half, .scale = 1.0, .flags = MLFAB_PUSH_MORE};

/* active: servers that have the model at first; 0: both. */
static void round_open(world *w, uint32_t workers, uint64_t seed, uint32_t active, uint32_t mean) {
  const mlfab_model_options model = {
      .size = sizeof model, .slices = 4, .active = active, .mean = mean, .sync = MLFAB_SYNC_BSP};
  for (uint32_t i = 0; i < COUNT; i++) ones[i] = broken[i] = 1.0;
  broken[COUNT - 1] = HUGE_VAL; /* server 1 has the last slices */
  world_init(w, workers, 2, 1);
  world_open(w, seed);
  for (uint32_t i = 0; i < workers; i++)
    OK(w->node[i], mlfab_tensor_add(w->node[i], 0, MLFAB_F64, COUNT));
  for (uint32_t i = 0; i < workers; i++)
    OK(w->node[i], mlfab_model_start(w->node[i], &model, NULL, 0));
}

static void move_to(world *w, uint32_t rank, const uint32_t *servers, uint32_t n) {
  OK(w->node[rank], mlfab_set_servers(w->node[rank], servers, n, 20 * SECOND));
}

/* Worker 0's pull waits until this worker has pushed, and then has `want` everywhere. */
static void round_waits_for(world *w, uint32_t rank, double want) {
  mlfab_request view, other;
  OK(w->node[0], mlfab_pull_start(w->node[0], &pull, 1, NULL, &view));
  mlfab_sim_run(w->sim, 500 * MS);
  assert_false(is_done(w->node[0], view));
  OK(w->node[rank], mlfab_push_start(w->node[rank], &push, 1, NULL, &other));
  while (!is_done(w->node[0], view)) sim_step(w->sim);
  for (uint32_t i = 0; i < COUNT; i++) assert_true(image[i] >= want && image[i] <= want);
}

/* The contributors of an open round move with its slices: the second half of worker 0's iteration, pushed
 * after the move, must not count as another worker's in the mean. */
TEST(test_open_round_moves) {
  const uint32_t to = 1;
  mlfab_request first, second;
  mlfab_stats stats;
  world w;
  round_open(&w, 2, 5, 1, 1);
  OK(w.node[0], mlfab_push_start(w.node[0], &push, 1, &half, &first));
  mlfab_sim_run(w.sim, 50 * MS);
  move_to(&w, 1, &to, 1);
  OK(w.node[3], mlfab_get_stats(w.node[3], &stats, sizeof stats));
  assert_int_equal(stats.slices_moved, 4);
  assert_int_equal(stats.bytes_moved, sizeof ones);
  OK(w.node[0], mlfab_push_start(w.node[0], &push, 1, NULL, &second));
  round_waits_for(&w, 1, 1.5);
  world_close(&w);
}

/* Servers have different models, or are in different rounds: each applies its open round as it is before slices move, and no
 * update is lost or counted twice. Slices take the model of their new server. */
TEST(test_models_differ) {
  static const uint32_t to[] = {0, 1};
  const mlfab_sync ssp = {.size = sizeof ssp, .kind = MLFAB_SYNC_SSP};
  /* The server with rounds loses its slices, or gets those of the other. */
  for (uint32_t loses = 0; loses < 2; loses++) {
    world w;
    round_open(&w, 2, 8 + loses, 0, 0);
    OK(w.node[0], mlfab_set_sync(w.node[0], &ssp, 0, 0));
    OK(w.node[0], mlfab_push(w.node[0], &push, 1, &half, NULL)); /* server 1 has it in a sum */
    move_to(&w, 1, &to[!loses], 1);
    OK(w.node[0], mlfab_push(w.node[0], &push, 1, NULL, NULL));
    round_waits_for(&w, 1, 3.0); /* in both models */
    move_to(&w, 1, to, 2);
    OK(w.node[1], mlfab_pull(w.node[1], &pull, 1, NULL, NULL));
    for (uint32_t i = 0; i < COUNT; i++) assert_true(image[i] >= 3.0 && image[i] <= 3.0);
    world_close(&w);
  }
}

/* One of two servers refused an update of the open round. The rounds differ then, so each server applies its own before slices
 * move: the mean never counts a worker whose update is missing. */
TEST(test_refused_update_moves) {
  for (uint32_t to = 0; to < 2; to++) {
    mlfab_result result;
    world w;
    round_open(&w, 3, 6 + to, 0, 1);
    OK(w.node[0], mlfab_push(w.node[0], &push, 1, NULL, NULL));
    assert_int_equal(mlfab_push(w.node[1], &bad, 1, NULL, &result), MLFAB_ERR_NOT_FINITE);
    assert_int_equal(result.applied, 1);
    move_to(&w, 2, &to, 1);
    round_waits_for(&w, 2, 2.0);
    world_close(&w);
  }
}

static int always(void *user, const mlfab_sync_state *state) {
  (void)user, (void)state;
  return 1;
}

/* A server that joined later would take over a model by conditions, but it has none: the move is undone, and the caller is told. A
 * server of the beginning keeps its own model, so the move succeeds. */
TEST(test_conditions_do_not_move) {
  static const uint32_t to = 1;
  const mlfab_sync conditions = {.size = sizeof conditions, .kind = MLFAB_SYNC_USER};
  for (uint32_t founding = 1; founding <= 2; founding++) {
    const mlfab_model_options model = {.size = sizeof model, .slices = 4, .active = 1};
    mlfab_error error;
    world w;
    for (uint32_t i = 0; i < COUNT; i++) ones[i] = 1.0;
    world_init(&w, 1, 2, 1);
    world_network(&w, 5);
    for (uint32_t i = 0; i < w.nodes; i++) {
      mlfab_config c = world_config(&w, i);
      c.servers = founding;
      c.servers_max = 2;
      c.pull_condition = c.push_condition = i == 1 ? always : NULL;
      sim_open(w.sim, i, &c, &w.node[i]);
    }
    for (uint32_t i = 0; i < w.nodes; i++) world_await(&w, i);
    OK(w.node[0], mlfab_tensor_add(w.node[0], 0, MLFAB_F64, COUNT));
    OK(w.node[0], mlfab_model_start(w.node[0], &model, NULL, 0));
    OK(w.node[0], mlfab_set_sync(w.node[0], &conditions, 0, 0));
    EXPECT(w.node[0], mlfab_set_servers(w.node[0], &to, 1, 20 * SECOND),
           founding == 1 ? MLFAB_ERR_UNSUPPORTED : 0);
    mlfab_last_error(w.node[0], &error);
    if (founding == 1) assert_non_null(strstr(error.text, "server 1 has no pull_condition"));
    OK(w.node[0], mlfab_push(w.node[0], &push, 1, NULL, NULL));
    OK(w.node[0], mlfab_pull(w.node[0], &pull, 1, NULL, NULL));
    for (uint32_t i = 0; i < COUNT; i++) assert_true(image[i] >= 1.0 && image[i] <= 1.0);
    world_close(&w);
  }
}

/* ---- one fault during a move ---- */

/* Three servers; server 0, the leader, holds nothing. A worker moves half of the model from server 1 to
 * server 2, while another one pushes. At one moment a host is paused, stopped for longer than five
 * heartbeats, cut off from another, crashes, or crashes and returns. Every call ends in time; no push waits
 * for its deadline; errors blame the affected host; and afterwards the remaining nodes, and a new process,
 * read the same model, with each acknowledged push once: so the move was completed everywhere or undone
 * everywhere. */
enum { PAUSED, STOPPED, CUT, CRASHED, RESTARTED, FAULTS };
enum {
  HIT_SERVERS = 3,
  HIT_COUNT = 6000,
  MOVER = 0,
  PUSHER = 1,
  FIRST = 2
}; /* FIRST: server 0's host */
#define HIT_BEAT (100 * MS)

typedef struct hit {
  world w;
  uint32_t fault, victim, other;
  uint64_t after_ns; /* time of the fault, from the start of the move */
  int64_t ones[HIT_COUNT], image[HIT_COUNT], acked, started;
  mlfab_request push;
  int calm, stops; /* it pushes now and then; it stops pushing */
} hit;

static void hit_open(hit *h, uint32_t host) {
  mlfab_config c = world_config(&h->w, host);
  sim_open(h->w.sim, host, &c, &h->w.node[host]);
}

static int hit_model(hit *h, uint32_t host) {
  const mlfab_model_options options = {.size = sizeof options, .slices = 12, .active = 1};
  int code = mlfab_tensor_add(h->w.node[host], 0, MLFAB_I64, HIT_COUNT);
  return code ? code : mlfab_model_start(h->w.node[host], &options, NULL, 0);
}

static void hit_ready(hit *h, uint32_t host) {
  mlfab_error error;
  uint64_t end = mlfab_sim_clock(h->w.sim) + 6 * SECOND;
  while (mlfab_is_ready(h->w.node[host], &error) == 0 && mlfab_sim_clock(h->w.sim) < end)
    mlfab_sim_step(h->w.sim);
}

static void hit_broken(const hit *h, const char *what, int code, const mlfab_error *error) {
  static const char *names[] = {"paused", "stopped", "cut off", "crashed", "restarted"};
  wrong("server %u is %s (from %u) after %.3f ms: %s: %s (%.120s)", h->victim, names[h->fault],
        h->other, (double)h->after_ns * 1e-6, what, mlfab_error_name(code),
        error ? error->text : "");
}

/* Only a death may be reported, and only of that host. */
static void hit_check(hit *h, mlfab *node, const char *what, int code) {
  mlfab_error error = {0};
  if (!code) return;
  mlfab_last_error(node, &error);
  int dead = code == MLFAB_ERR_PEER_DEAD || code == MLFAB_ERR_PARTIAL || code == MLFAB_ERR_IN_DOUBT;
  if (h->fault == PAUSED || !dead ||
      (error.code == code && error.rank != (int32_t)h->victim && error.rank != (int32_t)h->other))
    hit_broken(h, what, code, &error);
}

/* Pushes one update after another. */
static void hit_push(void *user) {
  hit *h = user;
  mlfab *node = h->w.node[PUSHER];
  mlfab_buf buf = {0, 0, h->ones, HIT_COUNT};
  mlfab_result result = {0};
  int done = 1, code = 0;
  if (h->push) {
    code = mlfab_test(node, h->push, &done, &result);
    if (code || done) h->push = 0;
    if (!code && done && !result.status) h->acked++;
    if (result.waited_ns > 4 * SECOND) hit_broken(h, "a push waited", result.status, NULL);
    if (!code && done && result.status) hit_check(h, node, "a push", result.status);
  }
  if (h->stops && !h->push) return;
  if (!h->push) {
    code = mlfab_push_start(node, &buf, 1, NULL, &h->push);
    h->started += code == 0;
    if (code) h->push = 0;
    if (code) hit_check(h, node, "push_start", code);
  }
  sim_later(h->w.sim, hit_push, h, code ? 50 * MS : h->calm ? 20 * MS : 200000);
}

static void hit_heal(void *user) {
  hit *h = user;
  if (h->fault == CUT) mlfab_sim_partition(h->w.sim, FIRST + h->victim, FIRST + h->other, 0);
  if (h->fault == RESTARTED) hit_open(h, FIRST + h->victim);
}

static void hit_strike(void *user) {
  hit *h = user;
  if (h->fault == PAUSED) mlfab_sim_pause(h->w.sim, FIRST + h->victim, 2 * HIT_BEAT);
  if (h->fault == STOPPED) mlfab_sim_pause(h->w.sim, FIRST + h->victim, 20 * HIT_BEAT);
  if (h->fault == CUT) mlfab_sim_partition(h->w.sim, FIRST + h->victim, FIRST + h->other, 1);
  if (h->fault == CRASHED || h->fault == RESTARTED) mlfab_sim_crash(h->w.sim, FIRST + h->victim);
  sim_later(h->w.sim, hit_heal, h, (h->fault == RESTARTED ? 1 : 20) * HIT_BEAT);
}

static void hit_define(void *user) {
  hit *h = user;
  assert_int_equal(hit_model(h, PUSHER), 0);
}

static hit *hit_begin(uint64_t seed) {
  const mlfab_sim_options options = {.size = sizeof options,
                                     .hosts = FIRST + HIT_SERVERS,
                                     .seed = seed,
                                     .latency_ns = 200000,
                                     .latency_jitter = 0.3,
                                     .rate_bytes_per_s = 100000000};
  const uint32_t one = 1;
  hit *h = calloc(1, sizeof *h);
  assert_non_null(h);
  for (uint32_t i = 0; i < HIT_COUNT; i++) h->ones[i] = 1;
  world_init(&h->w, FIRST, HIT_SERVERS, 1);
  h->w.config.heartbeat_ns = HIT_BEAT;
  h->w.config.silent_death_ns = 5 * HIT_BEAT; /* a stopped server is declared dead early */
  h->w.config.timeout_ns = 6 * SECOND;
  h->w.config.chunk_bytes = h->w.config.block_bytes = 1024;
  assert_int_equal(mlfab_sim_create(&options, &h->w.sim), 0);
  for (uint32_t i = 0; i < h->w.nodes; i++) hit_open(h, i);
  for (uint32_t i = 0; i < h->w.nodes; i++) world_await(&h->w, i);
  sim_later(h->w.sim, hit_define, h, 1000);
  assert_int_equal(hit_model(h, MOVER), 0);
  assert_int_equal(mlfab_set_servers(h->w.node[MOVER], &one, 1, 0), 0);
  sim_later(h->w.sim, hit_push, h, 1000);
  mlfab_sim_run(h->w.sim, 20 * MS);
  return h;
}

static void hit_end(hit *h) {
  world_close(&h->w);
  free(h);
}

/* What this worker reads: every acknowledged update once. */
static int hit_read(hit *h, uint32_t host, const char *what) {
  mlfab_buf buf = {0, 0, h->image, HIT_COUNT};
  uint64_t since = mlfab_sim_clock(h->w.sim);
  int code = mlfab_pull(h->w.node[host], &buf, 1, NULL, NULL);
  if (code) hit_check(h, h->w.node[host], what, code);
  if (code && mlfab_sim_clock(h->w.sim) - since > 4 * SECOND)
    hit_broken(h, "it waited", code, NULL);
  for (uint32_t i = 0; i < HIT_COUNT && !code; i++)
    if (h->image[i] < h->acked || h->image[i] > h->started)
      hit_broken(h, "it reads wrong", code, NULL);
  return code;
}

/* A new process finds all servers, and they agree. */
static void hit_newcomer(hit *h) {
  static int64_t before[HIT_COUNT];
  int code = hit_read(h, PUSHER, "a pull");
  memcpy(before, h->image, sizeof before);
  if (h->fault == CRASHED || h->fault == RESTARTED) return; /* the model is incomplete */
  mlfab_sim_crash(h->w.sim, MOVER);
  hit_open(h, MOVER);
  hit_ready(h, MOVER);
  int joined = hit_model(h, MOVER);
  if (joined) hit_broken(h, "a new process", joined, NULL);
  if (!joined && hit_read(h, MOVER, "a new process pulls"))
    hit_broken(h, "a new process", -1, NULL);
  if (!joined && !code && memcmp(before, h->image, sizeof before) != 0)
    hit_broken(h, "a new process reads another model", 0, NULL);
}

/* The duration of the move without a fault. */
static uint64_t hit_usual(void) {
  const uint32_t both[] = {1, 2};
  hit *h = hit_begin(seeds_first());
  uint64_t since = mlfab_sim_clock(h->w.sim);
  assert_int_equal(mlfab_set_servers(h->w.node[MOVER], both, 2, 4 * SECOND), 0);
  uint64_t took = mlfab_sim_clock(h->w.sim) - since;
  hit_end(h);
  return took;
}

static void hit_run(uint32_t fault, uint32_t victim, uint32_t other, uint64_t after_ns) {
  const uint32_t both[] = {1, 2};
  hit *h = hit_begin(seeds_first());
  h->fault = fault;
  h->victim = victim;
  h->other = other;
  h->after_ns = after_ns;
  uint64_t since = mlfab_sim_clock(h->w.sim);
  sim_later(h->w.sim, hit_strike, h, after_ns);
  int code = mlfab_set_servers(h->w.node[MOVER], both, 2, 4 * SECOND);
  /* A server that returns at once has lost its model, but is not declared dead; nor does server 0 declare
   * two dead that are cut off from each other. */
  int lost = (fault == RESTARTED && code == MLFAB_ERR_STATE) ||
             (fault >= CUT && code == MLFAB_ERR_TIMEOUT);
  if (code && !lost) hit_check(h, h->w.node[MOVER], "set_servers", code);
  if (mlfab_sim_clock(h->w.sim) - since > 5 * SECOND)
    hit_broken(h, "set_servers waited", code, NULL);
  mlfab_sim_run(h->w.sim, 50 * MS);
  h->calm = 1;
  mlfab_sim_run(h->w.sim, 4 * SECOND);
  h->stops = 1;
  mlfab_sim_run(h->w.sim, SECOND);
  if (h->push) hit_broken(h, "a push does not end", 0, NULL);
  hit_newcomer(h);
  hit_end(h);
}

TEST(test_fault_in_a_move) {
  if (seeds_alone()) skip();
  uint64_t usual = hit_usual(), moments = test_cases_from(3, 4);
  if (moments > 200) moments = 200;
  for (uint64_t k = 0; k <= moments; k++) {
    for (uint32_t fault = 0; fault < FAULTS; fault++) {
      for (uint32_t victim = 0; victim < HIT_SERVERS; victim++)
        hit_run(fault, victim, fault == CUT ? (victim + 1) % HIT_SERVERS : victim,
                1 + usual * k / moments);
    }
  }
  print_message("a move takes %.1f ms\n", (double)usual * 1e-6);
}

TESTS(NULL, NULL)
