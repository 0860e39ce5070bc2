/* test_distance.c - a server and its replica, with the keeper, the moments and the collecting end of the real ones: how far
 * the two models are from each other.
 *
 * Random models, optimizers, rounds, changes of consistency, links of workers that break, replicas that are lost, and take
 * overs. After every event the distance |w_s - w_r| is computed in double over the whole model, from the time on when the
 * replica has the moment by which it joins. It is at most the ledger's bound, and at most Div_max unless the server hides
 * its last commit; with Div_max 0 what is shown is what the replica has, bit by bit.
 *
 * MLFAB_SCALE=100 runs 100,000 seeds; MLFAB_SEED=n runs one. */
#include "core/checkpoint/collect.h"
#include "core/checkpoint/moment.h"
#include "core/replica/keeper.h"
#include "scale.h"
#include "shards.h"

enum { EVENTS = 160 };

typedef struct pair {
  mlfab__rng rng;
  uint64_t seed;
  shard_setting setting;
  double div_max;
  shard *serves, *copy;
  mlfab__moment moment;   /* of `serves` */
  mlfab__collect collect; /* of `copy` */
  int sending, joins;     /* a moment is under way; the copy has it: 2 */
  int near;               /* the copy has had the moment by which it joined */
  uint64_t has_at, sent_at;
  int has;
} pair;

static pair p;
static uint64_t compared, hidden, taken_over, apart; /* apart: the distance was above 0 */

static uint64_t below(uint64_t n) { return mlfab__rng_below(&p.rng, n); }
static mlfab__keeper *keeper(void) { return p.serves->server.keeping; }

/* ---- models ---- */

static uint64_t read_model(const shard *s, double *to) {
  const mlfab__store *store = &s->server.store;
  uint64_t n = 0;
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__shard_slice *slice = &store->slices[i];
    for (uint64_t at = slice->offset, end = at + slice->bytes; at < end;) {
      mlfab__piece piece;
      mlfab__store_piece(store, at, end - at, &piece);
      at += piece.bytes;
      const uint8_t *from = store->blocks[store->w[piece.position]].data + piece.at;
      for (uint64_t k = 0; k < piece.count; k++) {
        float f;
        if (piece.dtype == MLFAB_F32)
          memcpy(&f, from + 4 * k, 4), to[n++] = (double)f;
        else
          memcpy(&to[n++], from + 8 * k, 8);
      }
    }
  }
  return n;
}

/* |w_s - w_r|, and what the types of the weights may have added to it by rounding: they are rounded once a commit. */
static double distance(double *rounding) {
  static double w[SHARD_MODEL / 4], r[SHARD_MODEL / 4];
  double squares = 0.0, size = 0.0;
  uint64_t n = read_model(p.serves, w);
  assert_int_equal(read_model(p.copy, r), n);
  for (uint64_t i = 0; i < n; i++) {
    squares += (w[i] - r[i]) * (w[i] - r[i]);
    size += w[i] * w[i] + r[i] * r[i];
  }
  *rounding = 1e-9 + EVENTS * 1.2e-7 * sqrt(size);
  return sqrt(squares);
}

static void check(void) {
  double rounding, d;
  if (!p.near || keeper()->phase == MLFAB__KEEPER_ALONE) return;
  d = distance(&rounding);
  double bound = keeper()->ledger.bound * (1 + 1e-9) + rounding;
  /* An adaptive step has no bound: the ledger says only whether something is outstanding. */
  int bounded = !mlfab__keeper_check(&p.setting.define.options, 1.0, p.setting.on_update != NULL);
  compared++;
  apart += d > 0.0;
  if (!(d <= bound) && bounded)
    fail_msg("seed %llu: the distance is %.17g, the bound %.17g", (unsigned long long)p.seed, d,
             keeper()->ledger.bound);
  int shows = mlfab__server_shows(&p.serves->server) == MLFAB__SHOWS_ALL;
  hidden += !shows;
  if (shows && !(d <= (p.div_max == 0.0 ? 0.0 : p.div_max * (1 + 1e-9) + rounding)))
    fail_msg("seed %llu: the distance is %.17g, Div_max is %g", (unsigned long long)p.seed, d,
             p.div_max);
  if (!shows) assert_int_equal(keeper()->ledger.committed, keeper()->ledger.acknowledged + 1);
}

/* ---- the stream ---- */

/* What is under way is void. */
static void cut(void) {
  if (p.sending) mlfab__keeper_unsend(&p.serves->server);
  p.sending = 0;
  mlfab__moment_unpin(&p.moment);
  mlfab__collect_void(&p.collect);
}

static void begin_moment(void) {
  mlfab__server *server = &p.serves->server;
  int applies =
      server->apply.applying != MLFAB__APPLY_NONE && server->apply.applying != MLFAB__APPLY_HELD;
  if (p.sending || applies || server->phase != MLFAB__MODEL_STANDS) return;
  p.moment.complete = 1;
  assert_int_equal(mlfab__moment_pin(&p.moment, server->env, server, p.has ? p.has_at : 0), 0);
  mlfab__collect_begin(&p.collect, &p.copy->env, &p.copy->server, p.has ? p.has_at : 0);
  p.joins = p.has && keeper()->phase == MLFAB__KEEPER_ALONE;
  p.sent_at = p.moment.at;
  p.sending = 1;
  mlfab__keeper_moment(server, p.joins);
}

/* Some records arrive; after the last one the copy installs them. */
static void travel(uint64_t records) {
  static uint8_t meta[MLFAB__MOMENT_META];
  mlfab__file_record record;
  mlfab_error error;
  for (int code = 0; records > 0 && p.sending == 1 && code == 0; records--) {
    assert_int_equal(mlfab__moment_next(&p.moment, meta, &record), 1);
    assert_false(mlfab__moment_lost(&p.moment));
    code = mlfab__collect_take(&p.collect, &record, &error);
    if (code < 0) fail_msg("seed %llu: %s", (unsigned long long)p.seed, error.text);
    if (code == 0) continue;
    mlfab__collect_install(&p.collect);
    p.sending = 2;
    p.near |= p.joins;
  }
}

/* The server hears that the copy has it. */
static void hear(void) {
  if (p.sending != 2) return;
  p.sending = 0;
  p.has = 1;
  p.has_at = p.sent_at;
  mlfab__moment_unpin(&p.moment);
  mlfab__keeper_has(&p.serves->server);
  shard_settle(p.serves);
}

/* ---- copies ---- */

static shard *new_copy(int asleep) {
  shard *s = shard_new(&p.setting);
  assert_int_equal(mlfab__keeper_attach(&s->server, p.div_max), 0);
  s->server.asleep = asleep;
  return s;
}

static void forget_copy(void) {
  cut();
  mlfab__collect_free(&p.collect);
  memset(&p.collect, 0, sizeof p.collect);
  p.has = p.near = p.joins = 0;
}

/* The copy is dropped; perhaps it is another process from then on. */
static void lose_copy(int process) {
  forget_copy();
  mlfab__keeper_alone(&p.serves->server);
  shard_settle(p.serves);
  if (!process) return;
  shard_free(p.copy);
  p.copy = new_copy(1);
}

/* The server is lost: the copy serves, and gets a copy. */
static void take_over(void) {
  if (keeper()->phase != MLFAB__KEEPER_IN_SYNC) return;
  check();
  forget_copy();
  mlfab__moment_free(&p.moment);
  memset(&p.moment, 0, sizeof p.moment);
  shard *was = p.serves;
  p.serves = p.copy;
  p.serves->server.asleep = 0;
  mlfab__keeper_begin(&p.serves->server);
  for (uint32_t w = 0; w < SHARD_WORKERS; w++) {
    const mlfab__server_peer *peer = &p.serves->server.peers[w];
    if (!peer->dead && !peer->left) shard_hello(p.serves, w, was->incarnation[w]);
    p.serves->asks[w] = was->asks[w];
  }
  shard_free(was);
  p.copy = new_copy(1);
  shard_settle(p.serves);
  taken_over++;
}

/* ---- seeds ---- */

static void event(void) {
  uint32_t w = (uint32_t)below(SHARD_WORKERS);
  switch (below(16)) {
    case 0:
    case 1:
      begin_moment();
      break;
    case 2:
    case 3:
      travel(1 + below(12));
      break;
    case 4:
      travel(UINT64_MAX);
      break;
    case 5:
      hear();
      break;
    case 6:
      /* A record that names the copy is decided, after the moment by which it joined has arrived. */
      if (p.near && p.has) mlfab__keeper_joined(&p.serves->server);
      shard_settle(p.serves);
      break;
    case 7:
      if (below(8) == 0) lose_copy((int)below(2));
      if (below(8) == 0) take_over();
      break;
    case 8:
      if (!p.serves->server.peers[w].connected)
        shard_hello(p.serves, w, p.serves->incarnation[w]);
      else if (below(4) == 0)
        mlfab__server_lost(&p.serves->server, w, 1000);
      shard_settle(p.serves);
      break;
    default:
      shard_step(p.serves, &p.rng);
  }
  /* A copy that does not serve does nothing by itself: no round ends there. */
  uint64_t changes = p.copy->server.store.changes;
  mlfab__server_advance(&p.copy->server);
  shard_settle(p.copy);
  assert_int_equal(p.copy->server.store.changes, changes);
  check();
}

static void random_setting(void) {
  static const double bounds[] = {0.0, 3.0, 40.0, 500.0, 6000.0, HUGE_VAL};
  static const double gammas[] = {0.0, 0.5, 0.9};
  mlfab_model_options *o = &p.setting.define.options;
  shard_random_setting(&p.rng, &p.setting);
  o->ghost = 0;
  p.div_max = bounds[below(MLFAB__COUNT(bounds))];
  if (p.div_max > 0.0 && mlfab__finite(p.div_max)) {
    o->optimizer = below(3) ? MLFAB_OPTIMIZER_MOMENTUM : MLFAB_OPTIMIZER_SGD;
    o->weight_decay = 0.0;
    p.setting.on_update = NULL;
  }
  o->gamma = gammas[below(3)];
}

static void play(uint64_t seed) {
  memset(&p, 0, sizeof p);
  p.seed = seed;
  mlfab__rng_seed(&p.rng, seed);
  random_setting();
  p.serves = new_copy(0);
  p.copy = new_copy(1);
  shard_define(p.serves, &p.setting);
  for (int i = 0; i < EVENTS; i++) event();
  forget_copy();
  mlfab__moment_free(&p.moment);
  shard_free(p.serves);
  shard_free(p.copy);
}

static int say_seed(void **state) {
  (void)state;
  if (p.seed) print_message("MLFAB_SEED=%llu\n", (unsigned long long)p.seed);
  return 0;
}

static void test_distance(void **state) {
  uint64_t one = test_seed(), first = one ? one : 1, n = one ? 1 : test_cases(1000);
  (void)state;
  if (!one) play(1373); /* a replica begins while commits that it will see have momentum: rare */
  for (uint64_t seed = first; seed < first + n; seed++) play(seed);
  p.seed = 0;
  print_message(
      "%llu seeds: %llu distances, %llu above 0, %llu with a hidden commit, %llu take overs\n",
      (unsigned long long)n, (unsigned long long)compared, (unsigned long long)apart,
      (unsigned long long)hidden, (unsigned long long)taken_over);
  if (!one && test_scale() >= 1.0)
    assert_true(compared > n && apart > n && hidden > n / 4 && taken_over > n / 4);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(test_distance, say_seed)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
