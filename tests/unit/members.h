/* members.h - communicators, the membership of server 0, and the links between them, which are slow and break. A test
 * includes links.h, defines `worker` and `world` with its fields and WORKERS, and includes this once. It then defines
 * look() and dropped(). */

#include "ports.h"

static world *w;

/* Takes note of what has happened to a worker's requests. */
static void look(worker *me);
/* A port dropped the link of `peer`. self: the world, when it is server 0's. */
static void dropped(const void *self, uint32_t peer, const char *text);

static uint32_t chance(uint64_t n) { return (uint32_t)mlfab__rng_below(&w->prng, n); }

static uint32_t rank_of(const void *self) { return (uint32_t)((const worker *)self - w->workers); }

/* --- ports --- */

static void up_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  worker *me = self;
  assert_int_equal(peer, 0);
  if (me->up) pipe_put(&me->to_server, type, meta, bytes, NULL, 0, 0);
}
static void hop_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  link *l = &w->peers_out[rank_of(self)][peer];
  if (l->stands) pipe_put(&l->there, type, meta, bytes, NULL, 0, 0);
}
static void down_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  link *l = &w->peers_out[peer][rank_of(self)];
  if (l->stands) pipe_put(&l->back, type, meta, bytes, NULL, 0, 0);
}
static void host_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)self;
  if (w->workers[peer].up) pipe_put(&w->workers[peer].from_server, type, meta, bytes, NULL, 0, 0);
}
static void hop_ready(void *self, uint32_t peer) {
  assert_int_not_equal(peer, rank_of(self));
  w->peers_out[rank_of(self)][peer].wanted = 1;
}
static void any_drop(void *self, uint32_t peer, int code, const char *text) {
  (void)code;
  dropped(self, peer, text);
}
static void down_drop(void *self, uint32_t peer, int code, const char *text) {
  w->peers_out[peer][rank_of(self)].dropped = 1;
  any_drop(self, peer, code, text);
}
static void hop_detach(void *self, uint32_t peer, uint64_t token) {
  pipe *p = &w->peers_out[rank_of(self)][peer].there;
  for (unsigned i = 0; i < p->count; i++) {
    message *m = &p->frames[(p->begin + i) % p->room];
    if (!m->lent || m->token != token) continue;
    assert_memory_equal(m->bulk, m->lent, m->bulk_bytes);
    m->lent = NULL;
  }
}

/* --- they come and go --- */

static void *give(void *user, size_t bytes) {
  (void)user;
  if (w->fails && w->asked++ % w->fails == w->fails - 1) return NULL;
  return malloc(bytes);
}
static void take(void *user, void *memory, size_t bytes) {
  (void)user, (void)bytes;
  free(memory);
}

static void open_member(uint32_t rank) {
  worker *me = &w->workers[rank];
  mlfab__port up = {me, up_post, no_ready, any_drop, no_detach, no_event, NULL, NULL};
  mlfab__port out = {me, hop_post, hop_ready, any_drop, hop_detach, no_event, NULL, NULL};
  mlfab__port in = {me, down_post, no_ready, down_drop, no_detach, no_event, NULL, NULL};
  memset(&me->requests, 0, sizeof me->requests);
  me->requests.timeout_ns = w->config.timeout_ns;
  assert_int_equal(
      mlfab__comm_init(&me->comm, &w->env, &w->config, rank, &up, &out, &in, &me->requests), 0);
  memset(&me->barrier, 0, sizeof me->barrier);
  me->barrier.dead = 1;
  me->comm.barrier = &me->barrier;
  me->comm.host = 1 + rank % 3; /* members are in another order than ranks */
  me->alive = me->up = 1;
  mlfab__membership_hello(&w->membership, rank, ++me->incarnation, w->now);
}

/* The deadline of calls that do not say. */
static inline void set_timeout(uint64_t timeout_ns) {
  for (uint32_t i = 0; i < w->n; i++) w->workers[i].requests.timeout_ns = timeout_ns;
}

/* A world without workers yet. */
static void open_links(uint32_t n, uint64_t seed) {
  w = calloc(1, sizeof *w);
  assert_non_null(w);
  mlfab__rng_seed(&w->prng, seed);
  mlfab_env hooks = {.size = sizeof hooks, .allocate = give, .release = take};
  assert_int_equal(mlfab__env_init(&w->env, &hooks), 0);
  mlfab_config_init(&w->config);
  w->config.workers = w->n = n;
  w->config.seed = seed;
  w->config.timeout_ns = 100000 * BEAT;
  w->config.heartbeat_ns = BEAT;
  w->config.chunk_bytes = 64u << chance(10);
  w->config.model_max_bytes = 1 << 30;
  w->now = 1;
  mlfab__port host = {w, host_post, no_ready, any_drop, no_detach, no_event, NULL, NULL};
  assert_int_equal(mlfab__membership_init(&w->membership, &w->env, &w->config, &host), 0);
}

static void cut_hop(uint32_t from, uint32_t to) {
  link *l = &w->peers_out[from][to];
  pipe_cut(&l->there);
  pipe_cut(&l->back);
  l->stands = l->dropped = 0;
}

/* The process is gone, and all that it had. 0: it was not there. */
static int kill_member(uint32_t rank) {
  worker *me = &w->workers[rank];
  if (!me->alive) return 0;
  me->alive = me->up = 0;
  pipe_cut(&me->to_server);
  pipe_cut(&me->from_server);
  for (uint32_t k = 0; k < w->n; k++) {
    int stood = w->peers_out[k][rank].stands;
    cut_hop(rank, k);
    cut_hop(k, rank);
    if (stood && w->workers[k].alive) mlfab__stream_peer_lost(&w->workers[k].comm.streams, rank);
  }
  mlfab__comm_free(&me->comm);
  return 1;
}

/* When all workers are gone. */
static void close_links(void) {
  for (uint32_t i = 0; i < w->n; i++) {
    pipe_free(&w->workers[i].to_server);
    pipe_free(&w->workers[i].from_server);
    for (uint32_t k = 0; k < w->n; k++) {
      pipe_free(&w->peers_out[i][k].there);
      pipe_free(&w->peers_out[i][k].back);
    }
  }
  mlfab__membership_free(&w->membership);
  assert_int_equal(w->env.bytes, 0);
  free(w);
  w = NULL;
}

/* --- what happens --- */

static void deliver_to_server(uint32_t rank) {
  message m = pipe_take(&w->workers[rank].to_server);
  mlfab__frame_in frame = frame_of(&m);
  assert_int_equal(mlfab__membership_frame(&w->membership, rank, &frame, w->now), 1);
  message_free(&m);
}

static void deliver_from_server(uint32_t rank) {
  worker *me = &w->workers[rank];
  message m = pipe_take(&me->from_server);
  mlfab__frame_in frame = frame_of(&m);
  assert_int_equal(mlfab__comm_server_frame(&me->comm, &frame, w->now), 1);
  message_free(&m);
  if (me->comm.phase == MLFAB__COMM_LISTED) mlfab__comm_mapped(&me->comm, 0);
  look(me);
}

static void deliver_there(uint32_t from, uint32_t to) {
  link *l = &w->peers_out[from][to];
  message m = pipe_take(&l->there);
  mlfab__frame_in frame = frame_of(&m);
  assert_int_equal(mlfab__comm_member_frame(&w->workers[to].comm, from, &frame, w->now), 1);
  if (m.token && l->stands && w->workers[from].alive)
    mlfab__stream_sent(&w->workers[from].comm.streams, to, m.token);
  message_free(&m);
  look(&w->workers[to]);
}

static void deliver_back(uint32_t from, uint32_t to) {
  message m = pipe_take(&w->peers_out[from][to].back);
  mlfab__frame_in frame = frame_of(&m);
  assert_int_equal(mlfab__comm_peer_frame(&w->workers[from].comm, to, &frame, w->now), 1);
  message_free(&m);
  look(&w->workers[from]);
}

static int yield(uint32_t from, uint32_t to) {
  uint8_t meta[MLFAB_META_MAX];
  mlfab__frame_out frame = {.meta = meta};
  mlfab__streams *streams = &w->workers[from].comm.streams;
  if (w->peers_out[from][to].there.count >= 4 || !mlfab__stream_next(streams, to, &frame)) return 0;
  pipe_put(&w->peers_out[from][to].there, frame.type, meta, frame.meta_bytes, frame.bulk,
           frame.bulk_bytes, frame.token);
  mlfab__stream_taken(streams, to, &frame);
  return 1;
}

static void break_hop(uint32_t from, uint32_t to) {
  if (!w->peers_out[from][to].stands) return;
  cut_hop(from, to);
  mlfab__stream_peer_lost(&w->workers[from].comm.streams, to);
}

static void connect_hop(uint32_t from, uint32_t to) {
  link *l = &w->peers_out[from][to];
  if (!l->wanted || l->stands || !w->workers[to].alive) return;
  l->stands = 1;
  mlfab__stream_peer_up(&w->workers[from].comm.streams, to);
}

MLFAB__UNUSED static void break_up(uint32_t rank) {
  worker *me = &w->workers[rank];
  pipe_cut(&me->to_server);
  pipe_cut(&me->from_server);
  me->up = 1;
  mlfab__membership_hello(&w->membership, rank, me->incarnation, w->now);
  mlfab__comm_hello(&me->comm);
}

static void tick(void) {
  w->tick_ns = w->now + BEAT / 4;
  mlfab__membership_tick(&w->membership, w->now);
  for (uint32_t i = 0; i < w->n; i++) {
    worker *me = &w->workers[i];
    if (!me->alive) continue;
    mlfab__request *r;
    uint32_t place = 0;
    while ((r = mlfab__request_due(&me->requests, w->now, &place)))
      mlfab__comm_withdraw(&me->comm, r, MLFAB_ERR_TIMEOUT, w->now);
    mlfab__comm_tick(&me->comm, w->now);
    for (uint32_t k = 0; k < w->n; k++) {
      if (k != i && !w->peers_out[i][k].stands &&
          mlfab__comm_peer_missing(&me->comm, k, "", w->now))
        w->peers_out[i][k].wanted = 1;
    }
    look(me);
  }
}

/* One thing that can happen on a link. 0: nothing can. */
static int act_link(uint32_t from, uint32_t to) {
  link *l = &w->peers_out[from][to];
  if (l->dropped) break_hop(from, to);
  connect_hop(from, to);
  if (!l->stands) return 0;
  for (uint32_t tried = 0, which = chance(3); tried < 3; tried++, which = (which + 1) % 3) {
    if (which == 0 && l->there.count > 0) {
      deliver_there(from, to);
      return 1;
    }
    if (which == 1 && l->back.count > 0) {
      deliver_back(from, to);
      return 1;
    }
    if (which == 2 && yield(from, to)) return 1;
  }
  return 0;
}

/* One thing that can happen to a worker, drawn from all. 0: nothing can. */
static int act_member(uint32_t from) {
  worker *me = &w->workers[from];
  for (uint32_t j = 0, to = chance(w->n + 2); j < w->n + 2; j++, to = (to + 1) % (w->n + 2)) {
    if (to == w->n && me->to_server.count > 0) {
      deliver_to_server(from);
      return 1;
    }
    if (to == w->n + 1 && me->from_server.count > 0) {
      deliver_from_server(from);
      return 1;
    }
    if (to < w->n && to != from && act_link(from, to)) return 1;
  }
  return 0;
}

/* One thing that can happen, drawn from all. 0: only time passes. */
MLFAB__UNUSED static int act_any(void) {
  uint32_t from = chance(w->n);
  w->now++;
  if (w->now >= w->tick_ns) tick();
  for (uint32_t tried = 0; tried < w->n; tried++, from = (from + 1) % w->n)
    if (w->workers[from].alive && act_member(from)) return 1;
  w->now = mlfab__max(w->now, w->tick_ns);
  return 0;
}
