/* test_copy.c - core/replica/copy.c: two copies of a server, each as the role of a node of its own, with a link between them
 * that the test carries frame by frame: what a copy must not take, and what must not be sent. */
#include "core/replica/copy.h"
#include "core/node/node.h"
#include "scale.h"
#include "shards.h"

enum { BEAT = 1000000, MAIL = 64, FRAMES = 4096 };

typedef struct letter { /* a control frame, or one of the stream, with bytes of its own */
  uint8_t type;
  uint32_t meta_bytes, bulk_bytes;
  uint8_t meta[MLFAB_META_MAX];
  uint8_t *bulk;
} letter;

typedef struct side {
  mlfab_node *node;
  mlfab__copy *copy;
  shard *shard;
  letter mail[MAIL]; /* that it has posted to the other copy */
  uint32_t nmail;
} side;

static side a, b; /* a serves, b stands by */
static shard_setting setting;
static mlfab__rng prng;
static letter stream[FRAMES];
static uint32_t nstream;

static void on_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  side *s = self;
  if (peer != s->copy->peer) return;
  assert_true(s->nmail < MAIL);
  letter *to = &s->mail[s->nmail++];
  memset(to, 0, sizeof *to);
  to->type = type;
  to->meta_bytes = bytes;
  memcpy(to->meta, meta, bytes);
}
static void on_ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void on_drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer, (void)code, (void)text;
}
static void on_detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static void on_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                     int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

static const mlfab__role *role_of(const side *s) { return &s->node->roles[0]; }

static void side_open(side *s, int replica) {
  memset(s, 0, sizeof *s);
  s->node = calloc(1, sizeof *s->node);
  assert_non_null(s->node);
  assert_int_equal(mlfab__env_init(&s->node->env, NULL), 0);
  s->node->config.servers = s->node->config.replicas = 1;
  s->node->config.heartbeat_ns = BEAT;
  s->node->config.silent_death_ns = 1000ull * BEAT;
  s->node->config.div_max = HUGE_VAL;
  s->node->is_server = 1;
  s->node->is_replica = replica;
  s->node->now_ns = BEAT;
  s->node->nonce = 1 + (uint64_t)replica;
  s->node->fresh = 1;
  s->node->standby = 1;
  s->node->voter = (uint32_t)replica;
  s->node->phase = MLFAB__BOOTSTRAP_READY;
  s->node->callers = calloc(SHARD_WORKERS + 1, sizeof *s->node->callers);
  assert_non_null(s->node->callers);
  s->shard = shard_new(&setting);
  assert_int_equal(mlfab__copy_attach(s->node, &s->shard->server), 0);
  s->copy = role_of(s)->self;
  s->copy->port = (mlfab__port){s, on_post, on_ready, on_drop, on_detach, on_event, NULL, NULL};
  s->copy->voters.port = s->copy->port;
  role_of(s)->tick(s->copy, BEAT);
}

static void side_close(side *s) {
  role_of(s)->free(s->copy);
  shard_free(s->shard);
  mlfab__free(&s->node->env, s->copy, sizeof *s->copy);
  assert_int_equal(s->node->env.bytes, 0);
  free(s->node->callers);
  free(s->node);
}

static void settle(side *s) { role_of(s)->settle(s->copy); }

/* What `from` has posted is given to `to`; frames of votes count for nothing here. */
static void deliver(side *from, side *to) {
  for (uint32_t i = 0; i < from->nmail; i++) {
    const letter *l = &from->mail[i];
    const mlfab__at at = {MLFAB__LINK_VOTER_IN, to->copy->peer, to->node->now_ns};
    const mlfab__frame_in in = {l->type, l->meta_bytes, 0, l->meta, NULL};
    if (l->type == MLFAB__MOMENT_HAS) role_of(to)->frame(to->copy, at, &in);
  }
  from->nmail = 0;
  settle(to);
}

static void stream_clear(void) {
  for (uint32_t i = 0; i < nstream; i++) free(stream[i].bulk);
  nstream = 0;
}

/* Frames of the moment that is under way, up to `most`: copies of them; returns: gives the loans back at once. */
static uint32_t take_frames(uint32_t most, int returns) {
  uint32_t n = 0;
  const mlfab__at at = {MLFAB__LINK_VOTER, a.copy->peer, a.node->now_ns};
  for (; n < most; n++) {
    letter *to = &stream[nstream];
    mlfab__frame_out out = {.meta = to->meta};
    if (!role_of(&a)->next(a.copy, at, &out)) break;
    assert_true(nstream < FRAMES - 1);
    nstream++;
    to->type = MLFAB__MOMENT;
    to->meta_bytes = out.meta_bytes;
    to->bulk_bytes = out.bulk_bytes;
    to->bulk = malloc(out.bulk_bytes + 1);
    if (out.bulk_bytes > 0) memcpy(to->bulk, out.bulk, out.bulk_bytes);
    uint64_t token = out.token;
    role_of(&a)->taken(a.copy, at, &out);
    if (returns && token) role_of(&a)->returned(a.copy, at, token);
    settle(&a);
  }
  return n;
}

/* The frame `i` reaches b. */
static int feed(uint32_t i) {
  const mlfab__at at = {MLFAB__LINK_VOTER_IN, b.copy->peer, b.node->now_ns};
  const letter *l = &stream[i];
  const mlfab__frame_in in = {l->type, l->meta_bytes, l->bulk_bytes, l->meta, l->bulk};
  int code = role_of(&b)->frame(b.copy, at, &in);
  settle(&b);
  return code;
}

/* All that a has to send goes through. */
static void follow(void) {
  for (int i = 0; i < 4; i++) {
    settle(&a);
    stream_clear();
    take_frames(FRAMES, 1);
    for (uint32_t k = 0; k < nstream; k++) assert_int_equal(feed(k), 1);
    deliver(&b, &a);
  }
}

/* The lease: b's beat echoes a's. */
static void lease(void) {
  a.copy->voters.shards[0].vote.peers[MLFAB__VOTER_B].lease_ns = a.node->now_ns;
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) {
    a.copy->voters.shards[0].vote.peers[i].heard_ns = a.node->now_ns;
    b.copy->voters.shards[0].vote.peers[i].heard_ns = b.node->now_ns;
  }
}

static int begin(void **state) {
  (void)state;
  memset(&setting, 0, sizeof setting);
  mlfab__rng_seed(&prng, 5);
  const mlfab_model_options initial = MLFAB_MODEL_OPTIONS_INIT;
  setting.define.options = initial;
  setting.define.options.optimizer = MLFAB_OPTIMIZER_MOMENTUM;
  setting.define.options.gamma = 0.5;
  setting.define.options.slices = 4;
  setting.define.tensors = 1;
  setting.tensors[0] = (mlfab__tensor_info){1, MLFAB_F32, 4096};
  setting.block_bytes = setting.chunk_bytes = 1024;
  setting.servers = 1;
  side_open(&a, 0);
  side_open(&b, 1);
  lease();
  settle(&a);
  settle(&b);
  assert_int_equal(a.copy->phase, MLFAB__COPY_SERVES);
  assert_int_equal(b.copy->phase, MLFAB__COPY_STANDS_BY);
  shard_define(a.shard, &setting);
  for (int i = 0; i < 20; i++) shard_push(a.shard, &prng, 0), shard_settle(a.shard);
  b.copy->got = 0;
  b.nmail = 0;
  const mlfab__greeting greeting = {0};
  const mlfab__at at = {MLFAB__LINK_VOTER, b.copy->peer, BEAT};
  role_of(&b)->up(b.copy, at, (mlfab__greeting *)(uintptr_t)&greeting);
  deliver(&b, &a);
  follow();
  assert_true(b.copy->got > 0);
  return 0;
}

static int end(void **state) {
  (void)state;
  stream_clear();
  side_close(&a);
  side_close(&b);
  return 0;
}

/* A moment is under way, of which b has got some frames; nothing of it was taken yet. */
static void send_more(void) {
  shard_push(a.shard, &prng, 0);
  shard_settle(a.shard);
  settle(&a);
  stream_clear();
  assert_true(take_frames(FRAMES, 1) > 3);
}

/* Frames of a copy that does not serve by what this one knows count for nothing, not even a whole state. */
static void test_stale(void **state) {
  (void)state;
  a.copy->has = 0;
  send_more();
  mlfab__vote *vote = &b.copy->voters.shards[0].vote;
  vote->bond = vote->decided =
      (mlfab__vote_record){vote->bond.epoch + 1, MLFAB__VOTER_B, 1u << MLFAB__VOTER_B};
  vote->floor = vote->bond.epoch;
  settle(&b);
  assert_int_equal(b.copy->phase, MLFAB__COPY_SERVES);
  uint64_t changes = b.shard->server.store.changes;
  for (uint32_t k = 0; k < nstream; k++) assert_int_equal(feed(k), 1);
  assert_int_equal(b.shard->server.store.changes, changes);
  assert_int_equal(b.copy->got, 0);
}

/* A copy that asks to serve takes nothing. If it does not get to serve, the rest of that moment is no error and counts for
 * nothing. */
static void test_asks(void **state) {
  (void)state;
  send_more();
  mlfab__vote *vote = &b.copy->voters.shards[0].vote;
  uint64_t got = b.copy->got;
  for (uint32_t k = 0; k < nstream; k++) {
    vote->asking = k == 1;
    assert_int_equal(feed(k), 1);
  }
  assert_int_equal(b.copy->got, got);
}

/* Frames for which nothing is given back; END is not among them while anything is lent. */
static void take_lent(void) {
  while (take_frames(1, 0)) {
    mlfab__moment_frame head;
    const letter *l = &stream[nstream - 1];
    assert_int_equal(mlfab__decode_moment_frame(l->meta, MLFAB__MOMENT_FRAME_BYTES, &head), 0);
    if (head.type == MLFAB__RECORD_END) assert_int_equal(a.copy->lent, 0);
  }
}

/* END leaves when the transport has given back everything that was lent: until then it may have been spoilt. */
static void test_end_waits(void **state) {
  (void)state;
  shard_push(a.shard, &prng, 0);
  shard_settle(a.shard);
  settle(&a);
  stream_clear();
  const mlfab__at at = {MLFAB__LINK_VOTER, a.copy->peer, a.node->now_ns};
  for (uint32_t i = 0; i < FRAMES && a.copy->sends == 1; i++) {
    take_lent();
    uint32_t k = 0; /* the oldest that is still out */
    while (k < MLFAB__COPY_LOANS && !(a.copy->lent >> k & 1)) k++;
    if (k < MLFAB__COPY_LOANS) role_of(&a)->returned(a.copy, at, 1 + k);
  }
  assert_int_equal(a.copy->sends, 2);
}

/* There is no memory to keep a state that an update changes while it is sent: that moment is not whole. */
static void test_lost(void **state) {
  (void)state;
  shard_push(a.shard, &prng, 0);
  shard_settle(a.shard);
  settle(&a);
  stream_clear();
  assert_int_equal(take_frames(1, 1), 1);
  assert_int_equal(a.copy->sends, 1);
  a.copy->moment.holder.lost = 1;
  settle(&a);
  assert_int_equal(a.copy->sends, 0);
  assert_int_equal(take_frames(FRAMES, 1), 0); /* not before a beat has passed */
  a.node->now_ns += BEAT;
  lease();
  settle(&a);
  assert_true(take_frames(FRAMES, 1) > 3);
}

/* While the model is loaded from a checkpoint it does not stand yet, but there is one: a copy without it is not told that it
 * has everything. */
static void test_loading(void **state) {
  (void)state;
  a.copy->has = 0;
  a.shard->server.phase = MLFAB__NO_MODEL;
  settle(&a);
  stream_clear();
  assert_int_equal(take_frames(FRAMES, 1), 0);
  a.shard->server.phase = MLFAB__MODEL_STANDS;
  settle(&a);
  assert_true(take_frames(FRAMES, 1) > 3);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_stale, begin, end),
      cmocka_unit_test_setup_teardown(test_asks, begin, end),
      cmocka_unit_test_setup_teardown(test_end_waits, begin, end),
      cmocka_unit_test_setup_teardown(test_lost, begin, end),
      cmocka_unit_test_setup_teardown(test_loading, begin, end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
