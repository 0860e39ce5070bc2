/* test_notify.c - core/coll/notify.c: random graphs, one random step of one node or one message at a
 * time, both with slots that the peer writes to word by word and with messages that come in pieces.
 * NOTIFY_ACK never stands still, never writes to what was not read, and averages iteration k of
 * everybody; BSP and ASYNC never take a torn model. What must not be sent or done is refused, and
 * changes nothing.
 * MLFAB_SEED=n one run alone, MLFAB_SCALE=100 a hundred times as many. */
#include "core/coll/notify.h"
#include "core/base/rng.h"

#include "budget.h"
#include "../testing.h"

enum { NODES = 16, WORDS = 3, PIECES = WORDS + 2, QUEUE = 128 };

typedef struct slot {
  uint64_t header, footer, words[WORDS];
} slot;

/* Models on their way: piece 0 the header, then words, last the NOTIFY. */
typedef struct edge {
  int is;
  slot slot;
  uint64_t queue[QUEUE]; /* k * PIECES + piece */
  uint32_t begin, end;   /* of the queue */
  uint64_t acks[2];      /* on their way back */
  uint32_t nacks;
  uint64_t sent, heard, consumed, acked; /* as counted here */
} edge;

enum phase { COMPUTING, SENDING, REDUCING };

typedef struct node {
  mlfab__notify is;
  uint32_t out[NODES], in[NODES], outs, ins;
  enum phase phase;
  uint64_t k, sent;                 /* sent: the last that was begun to be sent */
  uint64_t barrier;                 /* passed */
  uint32_t order[NODES], at, piece; /* edges in this iteration's order, and how far */
  slot copy;
  mlfab__notify_stamps before;
  uint32_t whole;
} node;

typedef struct world {
  mlfab__rng prng;
  mlfab__env env;
  uint32_t n, mode;
  int memory; /* the sender writes the slot itself */
  uint64_t iterations, seed;
  edge edges[NODES][NODES]; /* [from][to] */
  node nodes[NODES];
  uint32_t distance[NODES][NODES]; /* without regard to directions */
  uint64_t whole, torn, stale;
} world;

static world w;

#define MUST(condition) \
  if (!(condition)) fail_msg("seed %llu: %s", (unsigned long long)w.seed, #condition)

static uint32_t below(uint32_t n) { return (uint32_t)mlfab__rng_below(&w.prng, n); }

static uint64_t word(uint32_t from, uint64_t k, uint32_t i) { return (k << 16) + from * 16 + i; }

static void shuffle(uint32_t *order, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    uint32_t k = below(i + 1);
    order[i] = order[k];
    order[k] = i;
  }
}

/* ---- graphs ---- */

/* A cycle through all, and some more edges: strongly connected. */
static void draw_graph(void) {
  uint32_t name[NODES];
  shuffle(name, w.n);
  for (uint32_t i = 0; i < w.n; i++) w.edges[name[i]][name[(i + 1) % w.n]].is = w.n > 1;
  for (uint32_t more = below(2 * w.n); more > 0; more--) {
    uint32_t from = below(w.n), to = below(w.n);
    if (from != to) w.edges[from][to].is = 1;
  }
}

static void measure(void) {
  for (uint32_t i = 0; i < w.n; i++) {
    for (uint32_t j = 0; j < w.n; j++)
      w.distance[i][j] = i == j ? 0 : w.edges[i][j].is || w.edges[j][i].is ? 1 : NODES;
  }
  for (uint32_t k = 0; k < w.n; k++) {
    for (uint32_t i = 0; i < w.n; i++) {
      for (uint32_t j = 0; j < w.n; j++) {
        uint32_t by = w.distance[i][k] + w.distance[k][j];
        if (by < w.distance[i][j]) w.distance[i][j] = by;
      }
    }
  }
}

static void world_begin(uint64_t seed, uint32_t n, uint32_t mode, int memory, uint64_t iterations) {
  memset(&w, 0, sizeof w);
  mlfab__rng_seed(&w.prng, seed);
  mlfab__env_init(&w.env, NULL);
  w.seed = seed;
  w.n = n;
  w.mode = mode;
  w.memory = memory;
  w.iterations = iterations;
}

static void world_open(void) {
  measure();
  for (uint32_t i = 0; i < w.n; i++) {
    node *a = &w.nodes[i];
    for (uint32_t j = 0; j < w.n; j++) {
      if (w.edges[i][j].is) a->out[a->outs++] = j;
      if (w.edges[j][i].is) a->in[a->ins++] = j;
    }
    assert_int_equal(mlfab__notify_init(&a->is, &w.env, w.mode, a->out, a->outs, a->in, a->ins), 0);
  }
}

static void world_close(void) {
  for (uint32_t i = 0; i < w.n; i++) mlfab__notify_free(&w.nodes[i].is, &w.env);
  assert_int_equal(w.env.bytes, 0);
}

/* ---- invariants, by what was counted here ---- */

static void check_sending(uint32_t from, uint32_t to) {
  const edge *e = &w.edges[from][to];
  if (w.mode != MLFAB_STOCHASTIC_NOTIFY_ACK) return;
  MUST(e->sent == e->consumed); /* I1: and so never 2 behind this one */
  for (uint32_t i = 0; i < w.n; i++) {
    for (uint32_t j = 0; j < w.n; j++) /* I2 */
      MUST(w.nodes[i].sent <= w.nodes[j].sent + w.distance[i][j]);
  }
}

static void write_piece(uint32_t from, uint32_t to, uint64_t k, uint32_t piece) {
  edge *e = &w.edges[from][to];
  if (w.mode == MLFAB_STOCHASTIC_NOTIFY_ACK)
    MUST(k == e->consumed + 1 && e->heard == e->consumed); /* I3 */
  if (piece == 0) {
    e->slot.header = k;
  } else if (piece <= WORDS) {
    e->slot.words[piece - 1] = word(from, k, piece - 1);
  } else {
    e->slot.footer = k;
  }
}

/* ---- messages ---- */

static void post(edge *e, uint64_t k, uint32_t piece) {
  MUST(e->end - e->begin < QUEUE);
  e->queue[e->end++ % QUEUE] = k * PIECES + piece;
}

static int deliver(uint32_t from, uint32_t to) {
  edge *e = &w.edges[from][to];
  node *a = &w.nodes[to];
  if (e->begin == e->end) return 0;
  uint64_t k = e->queue[e->begin % QUEUE] / PIECES;
  uint32_t piece = (uint32_t)(e->queue[e->begin++ % QUEUE] % PIECES);
  uint32_t index = (uint32_t)mlfab__notify_edge(a->in, a->ins, from);
  if (!w.memory && piece == 0) MUST(mlfab__notify_arrives(&a->is, index, k, NULL) == 0);
  if (!w.memory) write_piece(from, to, k, piece);
  if (piece < PIECES - 1) return 1;
  MUST(mlfab__notify_notified(&a->is, index, k, k, NULL) == 0);
  e->heard = k;
  return 1;
}

static int deliver_ack(uint32_t from, uint32_t to) {
  edge *e = &w.edges[from][to];
  node *a = &w.nodes[from];
  if (e->nacks == 0) return 0;
  uint32_t index = (uint32_t)mlfab__notify_edge(a->out, a->outs, to);
  MUST(e->nacks == 1 && mlfab__notify_acked(&a->is, index, e->acks[0], NULL) == 0);
  e->acked = e->acks[0];
  e->nacks = 0;
  return 1;
}

/* ---- a node's steps ---- */

static int compute(node *a) {
  if (a->k == w.iterations) return 0;
  MUST(mlfab__notify_begin(&a->is, a->k + 1) == 0);
  a->k++;
  a->phase = SENDING;
  a->at = a->piece = 0;
  shuffle(a->order, a->outs);
  return 1;
}

/* One word into one slot, or all pieces to one peer. */
static int send_some(node *a) {
  uint32_t me = (uint32_t)(a - w.nodes);
  if (a->at == a->outs) {
    a->phase = REDUCING;
    a->at = a->piece = 0;
    a->whole = 0;
    shuffle(a->order, a->ins);
    return 1;
  }
  uint32_t index = a->order[a->at], to = a->out[index];
  edge *e = &w.edges[me][to];
  int may = mlfab__notify_may_send(&a->is, index), wanted = 1;
  for (uint32_t i = 0; i < a->outs; i++) {
    const edge *other = &w.edges[me][a->out[i]];
    if (w.mode == MLFAB_STOCHASTIC_NOTIFY_ACK && other->sent < a->k)
      wanted &= other->acked == other->sent;
  }
  MUST(may == wanted);
  MUST(may || (a->at == 0 && a->piece == 0)); /* never blocks between sends */
  if (!may) return 0;
  if (a->at == 0 && a->piece == 0) a->sent = a->k;
  if (a->piece == 0) check_sending(me, to);
  if (w.memory) {
    write_piece(me, to, a->k, a->piece++);
    if (a->piece < PIECES) return 1;
    post(e, a->k, PIECES - 1);
  } else {
    for (uint32_t piece = 0; piece < PIECES; piece++) post(e, a->k, piece);
  }
  MUST(mlfab__notify_sent(&a->is, index) == 0);
  e->sent = a->k;
  a->piece = 0;
  a->at++;
  return 1;
}

static void consume(node *a, uint32_t index) {
  uint32_t from = a->in[index], me = (uint32_t)(a - w.nodes);
  edge *e = &w.edges[from][me];
  mlfab__notify_stamps after = {e->slot.header, e->slot.footer};
  uint64_t ack = 99, k = a->before.header;
  int fresh = k > e->consumed;
  int input = mlfab__notify_consumed(&a->is, index, a->before, after, &ack, NULL);
  MUST(input >= 0);
  w.whole += input == MLFAB__NOTIFY_WHOLE;
  w.torn += input == MLFAB__NOTIFY_TORN;
  w.stale += input == MLFAB__NOTIFY_STALE;
  MUST((input == MLFAB__NOTIFY_STALE) == !fresh);
  if (input == MLFAB__NOTIFY_WHOLE) {
    a->whole++;
    e->consumed = k;
    for (uint32_t i = 0; i < WORDS; i++) MUST(a->copy.words[i] == word(from, k, i)); /* I4 */
  }
  if (w.mode != MLFAB_STOCHASTIC_NOTIFY_ACK) {
    MUST(ack == 0);
    return;
  }
  MUST(input == MLFAB__NOTIFY_WHOLE && k == a->k && ack == k);
  e->acks[e->nacks++] = ack;
}

/* One word of one slot. */
static int reduce_some(node *a) {
  uint32_t me = (uint32_t)(a - w.nodes);
  mlfab__notify_tally tally = {9, 9, 9};
  int wanted = w.mode != MLFAB_STOCHASTIC_BSP || a->barrier == a->k;
  for (uint32_t i = 0; i < a->ins; i++)
    wanted =
        wanted && (w.mode != MLFAB_STOCHASTIC_NOTIFY_ACK || w.edges[a->in[i]][me].heard >= a->k);
  MUST(mlfab__notify_ready(&a->is) == wanted);
  if (!wanted) return 0;
  if (a->at == a->ins) {
    MUST(mlfab__notify_end(&a->is, &tally) == 0);
    MUST(tally.whole == a->whole && tally.whole + tally.torn + tally.stale == a->ins);
    a->phase = COMPUTING;
    return 1;
  }
  MUST(mlfab__notify_end(&a->is, &tally) == MLFAB_ERR_STATE && tally.whole == 9);
  uint32_t index = a->order[a->at];
  const slot *s = &w.edges[a->in[index]][me].slot;
  if (a->piece == 0) {
    a->before.header = s->header;
    a->before.footer = s->footer;
    if (mlfab__notify_look(&a->is, index, a->before) == MLFAB__NOTIFY_WHOLE) {
      a->piece = 1;
      return 1;
    }
  } else if (a->piece <= WORDS) {
    a->copy.words[a->piece - 1] = s->words[a->piece - 1];
    a->piece++;
    return 1;
  }
  consume(a, index);
  a->piece = 0;
  a->at++;
  return 1;
}

static int pass_barrier(node *a) {
  if (w.mode != MLFAB_STOCHASTIC_BSP || a->phase != REDUCING || a->barrier == a->k) return 0;
  for (uint32_t i = 0; i < w.n; i++) {
    const node *b = &w.nodes[i];
    if (b->k < a->k || (b->k == a->k && b->phase == SENDING)) return 0;
  }
  MUST(mlfab__notify_barrier(&a->is, a->k) == 0);
  a->barrier = a->k;
  return 1;
}

/* Who is said to be waited for is. */
static void check_awaits(node *a, int acted) {
  uint32_t me = (uint32_t)(a - w.nodes);
  int32_t rank = 99;
  int what = mlfab__notify_awaits(&a->is, &rank);
  if (acted || a->phase == COMPUTING) return;
  MUST(what != MLFAB__NOTIFY_NOTHING);
  if (what == MLFAB__NOTIFY_FOR_ACK)
    MUST(a->phase == SENDING && rank >= 0 && w.edges[me][rank].acked < w.edges[me][rank].sent);
  if (what == MLFAB__NOTIFY_FOR_NOTIFY)
    MUST(a->phase == REDUCING && rank >= 0 && w.edges[rank][me].heard < a->k);
  if (what == MLFAB__NOTIFY_FOR_BARRIER)
    MUST(w.mode == MLFAB_STOCHASTIC_BSP && rank == MLFAB_NO_RANK && a->phase == REDUCING);
}

static int act(node *a) {
  int32_t rank;
  int before = mlfab__notify_awaits(&a->is, &rank), acted = 0;
  if (a->phase == COMPUTING) {
    acted = compute(a);
  } else if (a->phase == SENDING) {
    acted = send_some(a);
  } else {
    acted = reduce_some(a);
  }
  if (acted && a->phase == SENDING && a->at < a->outs && a->piece > 0)
    MUST(before == MLFAB__NOTIFY_NOTHING);
  check_awaits(a, acted);
  return acted || pass_barrier(a);
}

/* ---- what must be refused ---- */

typedef struct image {
  mlfab__notify is;
  mlfab__notify_out out[NODES];
  mlfab__notify_in in[NODES];
} image;

static void take(const mlfab__notify *is, image *to) {
  memset(to, 0, sizeof *to);
  memcpy(&to->is, is, sizeof *is);
  if (is->outs) memcpy(to->out, is->out, is->outs * sizeof *is->out);
  if (is->ins) memcpy(to->in, is->in, is->ins * sizeof *is->in);
}

/* A random wrong message to a random node; 0 when what was drawn would have been right. */
static int wrong_message(node *a, mlfab_error *error, uint32_t *peer) {
  uint32_t me = (uint32_t)(a - w.nodes), kind = below(3);
  uint32_t count = kind ? a->ins : a->outs;
  if (count == 0) return MLFAB_ERR_FRAME;
  uint32_t index = below(count);
  *peer = kind ? a->in[index] : a->out[index];
  const edge *e = kind ? &w.edges[*peer][me] : &w.edges[me][*peer];
  int acks = w.mode == MLFAB_STOCHASTIC_NOTIFY_ACK;
  int under_way = !w.memory && a->is.in && kind && a->is.in[index].header != e->heard;
  uint64_t k = (kind ? e->heard : e->sent) + below(4) - 1;
  if (kind == 0) {
    if (acks && e->acked < e->sent && k == e->sent) return MLFAB_ERR_FRAME;
    return mlfab__notify_acked(&a->is, index, k, error);
  }
  int next = acks ? e->heard == e->consumed && k == e->consumed + 1 : k > e->heard;
  if (k == UINT64_MAX) k = 0;
  if (kind == 1) {
    if (next && !under_way) return MLFAB_ERR_FRAME;
    return mlfab__notify_arrives(&a->is, index, k, error);
  }
  uint64_t header = k + below(2);
  if (header == k && (under_way ? k == a->is.in[index].header : next)) return MLFAB_ERR_FRAME;
  return mlfab__notify_notified(&a->is, index, header, k, error);
}

static int wrong_call(node *a) {
  mlfab__notify_stamps stamps = {a->k, a->k};
  mlfab__notify_tally tally;
  uint64_t ack, k = a->k + below(3);
  uint32_t index = below(NODES + 1);
  switch (below(5)) {
    case 0:
      return a->phase == COMPUTING && k == a->k + 1 ? MLFAB_ERR_STATE
                                                    : mlfab__notify_begin(&a->is, k);
    case 1:
      return mlfab__notify_may_send(&a->is, index) ? MLFAB_ERR_STATE
                                                   : mlfab__notify_sent(&a->is, index);
    case 2:
      if (w.mode == MLFAB_STOCHASTIC_BSP && a->phase != COMPUTING && k == a->k)
        return MLFAB_ERR_STATE;
      return mlfab__notify_barrier(&a->is, k);
    case 3:
      if (a->phase == REDUCING && index < a->ins) return MLFAB_ERR_STATE;
      return a->phase == SENDING && a->at == a->outs
                 ? MLFAB_ERR_STATE
                 : mlfab__notify_consumed(&a->is, index, stamps, stamps, &ack, NULL);
    default:
      if (a->phase != COMPUTING && a->at >= (a->phase == SENDING ? a->outs : a->ins))
        return MLFAB_ERR_STATE;
      return mlfab__notify_end(&a->is, &tally);
  }
}

static void do_wrong(node *a) {
  static image before, after;
  mlfab_error error;
  uint32_t peer = 0;
  memset(&error, 0, sizeof error);
  take(&a->is, &before);
  MUST(wrong_message(a, &error, &peer) == MLFAB_ERR_FRAME);
  if (error.code) MUST(error.code == MLFAB_ERR_FRAME && error.rank == (int32_t)peer);
  MUST(wrong_call(a) == MLFAB_ERR_STATE);
  take(&a->is, &after);
  MUST(memcmp(&before, &after, sizeof before) == 0);
}

/* ---- runs ---- */

static int step(uint32_t actor) {
  if (actor < w.n) return act(&w.nodes[actor]);
  actor -= w.n;
  uint32_t from = actor / 2 / w.n, to = actor / 2 % w.n;
  return actor % 2 ? deliver_ack(from, to) : deliver(from, to);
}

/* Random steps, some actors rarely; ends when nobody can go on. */
static void run(uint32_t wrong) {
  uint32_t actors = w.n + 2 * w.n * w.n, slow = below(actors);
  for (;;) {
    uint32_t first = below(actors), tried = 0;
    if (first == slow && below(8)) continue;
    while (tried < actors && !step((first + tried) % actors)) tried++;
    if (tried == actors) break;
    if (wrong && below(wrong) == 0) do_wrong(&w.nodes[below(w.n)]);
  }
  for (uint32_t i = 0; i < w.n; i++) /* I5 */
    MUST(w.nodes[i].k == w.iterations && w.nodes[i].phase == COMPUTING);
}

static void run_many(uint64_t runs, uint32_t mode, uint64_t *whole, uint64_t *torn,
                     uint64_t *stale) {
  *whole = *torn = *stale = 0;
  for (SEEDS(seed, (double)runs)) {
    mlfab__rng prng;
    mlfab__rng_seed(&prng, seed);
    uint32_t n = 1 + (uint32_t)mlfab__rng_below(&prng, seed % 16 ? 6 : 12);
    world_begin(seed, n, mode, seed % 2 == 0, 2 + mlfab__rng_below(&prng, 6));
    draw_graph();
    world_open();
    run(4);
    *whole += w.whole;
    *torn += w.torn;
    *stale += w.stale;
    world_close();
  }
}

TEST(notify_ack) {
  uint64_t whole, torn, stale;
  run_many(4000, MLFAB_STOCHASTIC_NOTIFY_ACK, &whole, &torn, &stale);
  assert_true(whole > 0);
  assert_int_equal(torn + stale, 0);
}

TEST(bsp_and_async) {
  for (uint32_t mode = MLFAB_STOCHASTIC_BSP; mode <= MLFAB_STOCHASTIC_ASYNC; mode++) {
    uint64_t whole, torn, stale;
    run_many(1500, mode, &whole, &torn, &stale);
    if (test_seed()) return;
    assert_true(whole > 0 && torn > 0 && stale > 0);
  }
}

/* A slot that changes under the reader, or holds another iteration, is the writer's fault. */
TEST(a_slot_written_too_early) {
  static const uint32_t peer[] = {7};
  static const mlfab__notify_stamps good = {1, 1}, torn = {2, 1}, next = {2, 2};
  mlfab__notify notify;
  mlfab__notify_tally tally;
  mlfab__env env;
  mlfab_error error;
  uint64_t ack = 9;
  mlfab__env_init(&env, NULL);
  assert_int_equal(mlfab__notify_init(&notify, &env, 0, peer, 1, peer, 1), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__notify_init(&notify, &env, 4, peer, 1, peer, 1), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__notify_init(&notify, &env, MLFAB_STOCHASTIC_NOTIFY_ACK, peer, 1, peer, 1),
                   0);
  assert_int_equal(mlfab__notify_edge(peer, 1, 7), 0);
  assert_int_equal(mlfab__notify_edge(peer, 1, 6), -1);
  assert_int_equal(mlfab__notify_edge(peer, 1, 8), -1);
  assert_int_equal(mlfab__notify_begin(&notify, 1), 0);
  assert_int_equal(mlfab__notify_sent(&notify, 0), 0);
  assert_int_equal(mlfab__notify_notified(&notify, 0, 1, 1, &error), 0);
  assert_int_equal(mlfab__notify_arrives(&notify, 0, 2, &error), MLFAB_ERR_FRAME);
  assert_non_null(strstr(error.text, "rank 7 sent the model of iteration 2 before 1"));
  assert_int_equal(mlfab__notify_consumed(&notify, 0, good, torn, &ack, &error), MLFAB_ERR_FRAME);
  assert_int_equal(mlfab__notify_consumed(&notify, 0, torn, torn, &ack, &error), MLFAB_ERR_FRAME);
  assert_int_equal(mlfab__notify_consumed(&notify, 0, next, next, &ack, &error), MLFAB_ERR_FRAME);
  assert_int_equal(error.rank, 7);
  assert_non_null(strstr(error.text, "rank 7 wrote iteration 2"));
  assert_int_equal(ack, 9);
  assert_int_equal(mlfab__notify_end(&notify, &tally), MLFAB_ERR_STATE);
  assert_int_equal(mlfab__notify_consumed(&notify, 0, good, good, &ack, &error),
                   MLFAB__NOTIFY_WHOLE);
  assert_int_equal(ack, 1);
  assert_int_equal(mlfab__notify_consumed(&notify, 0, good, good, &ack, &error), MLFAB_ERR_STATE);
  assert_int_equal(mlfab__notify_end(&notify, &tally), 0);
  assert_int_equal(tally.whole, 1);
  mlfab__notify_free(&notify, &env);
  assert_int_equal(env.bytes, 0);
}

TEST(out_of_memory) {
  static const uint32_t peer[] = {1, 2};
  for (uint32_t good = 0; good <= 2; good++) {
    mlfab__notify notify;
    mlfab__env env;
    budget memory = {good, 0};
    mlfab_env hooks = budget_env(&memory);
    assert_int_equal(mlfab__env_init(&env, &hooks), 0);
    assert_int_equal(
        mlfab__notify_init(&notify, &env, MLFAB_STOCHASTIC_NOTIFY_ACK, peer, 2, peer, 2),
        good < 2 ? MLFAB_ERR_MEMORY : 0);
    mlfab__notify_free(&notify, &env);
    assert_int_equal(env.bytes, 0);
  }
}

TESTS(NULL, NULL)
