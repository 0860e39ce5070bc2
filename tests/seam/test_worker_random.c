/* test_worker_random.c - a worker in a fabric with a scheduler: its updates and pulls in any order of events.
 *
 * Servers, aggregators, distributors and links obey the protocol, with every possible event at random. Frames to the
 * worker wait in one queue for each link, so that an aggregator's grant can arrive before the server's VIA, or after the
 * end. Each link takes one frame when chance says so. MLFAB_SEED runs one case. */
#include "tests/seam/worker_talk.h"

#include "core/base/rng.h"
#include "core/model/windows.h"
#include "tests/unit/scale.h"

enum { QUEUE = 512, STEP_NS = 2000000, BEAT_NS = 100000000 };
static const uint32_t hops[] = {0, 2, 3, 4}; /* the other workers */

typedef struct letter { /* what a peer is going to say */
  uint8_t type;
  uint64_t seq, group, upto;
  uint32_t server, aggregator, generation;
  int32_t code;
  mlfab__window window;
} letter;

typedef struct mailbox {
  letter letters[QUEUE];
  uint32_t first, n;
} mailbox;

static mlfab__rng prng;
static mailbox from_server[SERVERS], from_hop[WORKERS];
static uint8_t down[SERVERS]; /* 1: the link broke; 2: the worker may call */

static uint32_t below(uint32_t n) { return (uint32_t)mlfab__rng_below(&prng, n); }

static letter *post(mailbox *box, uint8_t type) {
  assert_true(box->n < QUEUE);
  letter *l = &box->letters[(box->first + box->n++) % QUEUE];
  *l = (letter){.type = type};
  return l;
}

static int receive(mailbox *box, letter *l) {
  if (box->n == 0) return 0;
  *l = box->letters[box->first];
  box->first = (box->first + 1) % QUEUE;
  box->n--;
  return 1;
}

static void begin_at_random(uint64_t seed) {
  mlfab_config config = world(MLFAB_SCHEDULER_BESIDE);
  config.heartbeat_ns = BEAT_NS;
  begin_with(&config, NULL);
  mlfab__rng_seed(&prng, seed);
  memset(from_server, 0, sizeof from_server);
  memset(from_hop, 0, sizeof from_hop);
  memset(down, 0, sizeof down);
}

/* The link to a hop breaks; the worker may call again at once. */
static void lose_hop(uint32_t hop) {
  from_hop[hop].n = 0;
  if (!talk_linked(HOP(hop))) return;
  talk_break(HOP(hop));
  *talk_away(HOP(hop)) = 0;
}

static void lose_server(uint32_t s) {
  from_server[s].n = 0;
  down[s] = 1;
  talk_break(SERVER(s));
}

static void let_call(uint32_t s) {
  if (down[s] != 1) return;
  down[s] = 2;
  *talk_away(SERVER(s)) = 0;
}

/* Lets the link take one frame. Is there one to hear? */
static int take(uint32_t who) {
  talk_room(who, 1);
  talk_peer_of(who)->room = 0;
  return talk_peer_of(who)->first != NULL;
}

static uint8_t next_type(uint32_t who) { return talk_peer_of(who)->first->header.type; }

/* The seeds of a test. */
static void run_seeds(double usual, void (*run)(uint64_t seed)) {
  uint64_t from = test_number("MLFAB_SEED", 1), to = from + (test_seed() ? 1 : test_cases(usual));
  for (uint64_t seed = from; seed < to; seed++) run(seed);
}

/* --- updates --- */

enum { UPDATES = 48, BUFFERS = 6, GROUPS = 1024 };

typedef struct part { /* of an update at a server, as the server sees it */
  enum { ABSENT, WAITS, GROUPED, DIRECT, DECIDED } state;
  uint64_t group;             /* its current group */
  uint64_t granted, received; /* over the server's link */
  /* What the worker knows: the newest number; that it is decided. In which generation the worker has announced it. */
  uint64_t told;
  int settled;
  uint32_t announced;
} part;

typedef struct group { /* one number of a server, as its aggregator sees it */
  uint64_t seq;
  uint32_t aggregator;
  uint64_t granted, heard, received; /* heard: delivered grants */
  int over;
} group;

typedef struct play {
  mlfab__window windows[SERVERS];
  uint32_t generations[SERVERS], known[SERVERS]; /* at the server; at the worker */
  uint64_t numbers[SERVERS];
  group groups[SERVERS][GROUPS];
  part parts[UPDATES + 1][SERVERS];
  uint8_t buffers[BUFFERS][BYTES];
  uint64_t owner[BUFFERS]; /* the update that uses it, or 0: the caller */
  uint32_t buffer_of[UPDATES + 1];
  mlfab_request requests[UPDATES + 1];
  uint64_t pushed, finished;
} play;

static play p;
/* So that the test can check that they occurred. */
static uint64_t hop_chunks, adopted, rerouted, hops_lost, servers_lost;

/* The contents of an update at each eighth byte. */
static uint64_t word_of(uint64_t seq, uint64_t at) { return seq << 32 | at; }

static int open_at(const part *x) { return x->state != DECIDED && x->state != ABSENT; }

static uint64_t oldest_at(uint32_t s) {
  for (uint64_t i = 1; i <= p.pushed; i++)
    if (open_at(&p.parts[i][s])) return i;
  return 0;
}

/* A server decides its oldest undecided update; those before it that it never received are skipped. */
static void decide(uint32_t s, uint64_t seq, int code) {
  part *x = &p.parts[seq][s];
  for (uint64_t i = 1; i < seq; i++) {
    assert_false(open_at(&p.parts[i][s]));
    p.parts[i][s].state = DECIDED;
  }
  if (x->state == GROUPED) p.groups[s][x->group].over = 1;
  x->state = DECIDED;
  mlfab__windows_decide(&p.windows[s], seq, 1, code);
  letter *l = post(&from_server[s], MLFAB__PUSH_ACK);
  l->seq = seq;
  l->server = s;
  l->code = code;
  l->generation = p.generations[s];
}

/* The server withdraws what it can, in order, after the worker's WITHDRAW. */
static void withdraw(uint32_t s, const mlfab__withdraw *m) {
  part *x = &p.parts[m->seq][s];
  if (m->generation != p.generations[s] || !open_at(x)) return;
  uint64_t received = x->state == GROUPED ? p.groups[s][x->group].received : x->received;
  if (received == SHARD && m->seq == oldest_at(s)) {
    decide(s, m->seq, 0); /* too late */
    return;
  }
  if (x->state == GROUPED) p.groups[s][x->group].over = 1;
  x->state = WAITS;
  x->received = UINT64_MAX; /* to be decided as withdrawn in its turn */
}

/* Routes an update at a server: to a group at an aggregator, or (NO_NODE) directly. */
static void route(uint32_t s, uint64_t seq, uint32_t aggregator) {
  part *x = &p.parts[seq][s];
  uint64_t number = ++p.numbers[s];
  assert_true(number < GROUPS);
  if (x->state == GROUPED) p.groups[s][x->group].over = 1;
  x->state = aggregator == MLFAB__NO_NODE ? DIRECT : GROUPED;
  x->group = number;
  x->granted = x->received = 0;
  p.groups[s][number] = (group){.seq = seq, .aggregator = aggregator};
  letter *l = post(&from_server[s], MLFAB__VIA);
  l->seq = seq;
  l->group = number;
  l->server = s;
  l->aggregator = aggregator;
  l->generation = p.generations[s];
}

/* A random event for a random update that the server has not decided. */
static void server_acts(uint32_t s) {
  uint64_t oldest = oldest_at(s), seq = oldest + below(2) * below(BUFFERS);
  if (oldest == 0 || seq > p.pushed || down[s]) return;
  part *x = &p.parts[seq][s];
  group *g = &p.groups[s][x->group];
  if (!open_at(x)) return;
  if (x->received == UINT64_MAX) {
    if (seq == oldest) decide(s, seq, MLFAB_ERR_WITHDRAWN);
  } else if (x->state == WAITS && seq == oldest && below(12) == 0) {
    decide(s, seq, MLFAB_ERR_DROPPED);
  } else if (x->state == WAITS && below(4) == 0) { /* never in a group: granted without a VIA */
    x->state = DIRECT;
    x->group = x->granted = x->received = 0;
  } else if (x->state == WAITS || (x->state == GROUPED && below(8) == 0)) {
    rerouted += x->state == GROUPED;
    int direct = below(3) == 0 || p.numbers[s] > GROUPS / 2;
    route(s, seq, direct ? MLFAB__NO_NODE : hops[below(4)]);
  } else if (x->state == DIRECT && x->received == SHARD && seq == oldest) {
    decide(s, seq, 0);
  } else if (x->state == GROUPED && g->received == SHARD && seq == oldest) {
    decide(s, seq, below(8) ? 0 : MLFAB_ERR_NOT_FINITE);
  } else if (x->state == DIRECT && x->granted < SHARD) {
    x->granted = mlfab__min(SHARD, x->granted + SLICE * (1 + below(16)));
    letter *l = post(&from_server[s], MLFAB__GRANT);
    l->seq = seq;
    l->server = s;
    l->upto = x->granted;
    l->generation = p.generations[s];
  }
}

/* An aggregator grants more of a group of the server. */
static void aggregator_acts(uint32_t s) {
  uint64_t number = p.numbers[s];
  group *g = &p.groups[s][number];
  for (uint32_t skip = below(3); number > 0; g = &p.groups[s][--number]) {
    int goes = !g->over && g->aggregator != MLFAB__NO_NODE && g->granted < SHARD;
    if (goes && skip-- == 0) break;
  }
  if (number == 0) return;
  g->granted = mlfab__min(SHARD, g->granted + SLICE * (1 + below(16)));
  letter *l = post(&from_hop[g->aggregator], MLFAB__HOP_GRANT);
  l->seq = g->seq;
  l->group = number;
  l->upto = g->granted;
  l->server = s;
}

/* The worker knows by now what the server has decided. */
static void settle(uint32_t s, uint32_t generation_known) {
  p.known[s] = generation_known;
  for (uint64_t i = 1; i <= p.pushed; i++) p.parts[i][s].settled |= p.parts[i][s].state == DECIDED;
}

/* The link stands again. */
static void greeting(uint32_t who, mlfab__hello_ack *ack) {
  uint32_t s = who & 0xffff;
  ack->generation = p.generations[s];
  ack->top = p.windows[s].top;
  memcpy(ack->applied, p.windows[s].applied, sizeof ack->applied);
  memcpy(ack->dropped, p.windows[s].dropped, sizeof ack->dropped);
  settle(s, ack->generation);
  down[s] = 0;
}

/* Delivers a frame, and records what the worker now knows, to check what it sends. */
static void deliver(mailbox *box) {
  letter l;
  if (!receive(box, &l)) return;
  uint32_t s = l.server;
  part *x = &p.parts[l.seq][s];
  int listens = (l.type == MLFAB__VIA ? l.generation == p.known[s] : l.type == MLFAB__HOP_GRANT) &&
                !down[s] && x->announced == p.known[s] && !x->settled;
  if (listens && l.group > x->told) {
    x->told = l.group;
    adopted += l.type == MLFAB__HOP_GRANT;
  }
  if (l.type == MLFAB__HOP_GRANT) {
    group *g = &p.groups[s][l.group];
    g->heard = mlfab__max(g->heard, l.upto);
    hop_grant(g->aggregator, s, l.seq, l.group, l.upto);
  } else if (l.type == MLFAB__VIA) {
    SAY(SERVER(s), VIA, via, l.seq, l.group, l.generation, l.aggregator);
  } else if (l.type == MLFAB__GRANT) {
    SAY(SERVER(s), GRANT, grant, l.seq, l.upto, l.generation);
  } else if (l.type == MLFAB__PUSH_ACK) {
    x->settled |= l.generation == p.known[s];
    SAY(SERVER(s), PUSH_ACK, push_ack, .seq = l.seq, .members = 1, .generation = l.generation,
        .code = l.code, .version = l.seq, .delay = 3);
  } else {
    mlfab__resend m = {.generation = l.generation, .top = l.window.top};
    memcpy(m.applied, l.window.applied, sizeof m.applied);
    memcpy(m.dropped, l.window.dropped, sizeof m.dropped);
    settle(s, l.generation);
    talk_say(SERVER(s), MLFAB__RESEND, mlfab__encode_resend(t->meta, &m), NULL, 0);
  }
}

/* The bytes that were heard are those of the update, which the caller has not got back. */
static void check_bytes(uint64_t seq, uint32_t s, uint64_t offset) {
  const talk_frame *h = t->heard;
  uint32_t b = p.buffer_of[seq];
  assert_int_equal(p.owner[b], seq);
  if (h->lent) assert_ptr_equal(h->lent, p.buffers[b] + s * SHARD + offset);
  for (uint32_t i = 0; i < h->bulk_bytes; i += 8) {
    uint64_t word;
    memcpy(&word, h->bulk + i, 8);
    if (word != word_of(seq, s * SHARD + offset + i)) fail();
  }
}

static void take_hop(uint32_t hop) {
  mlfab__hop_chunk got = {.seq = 0};
  if (!talk_linked(HOP(hop)) || !take(HOP(hop))) return;
  HEAR(HOP(hop), HOP_CHUNK, hop_chunk, (got = *m, 1));
  group *g = &p.groups[got.server][got.group];
  assert_int_equal(g->seq, got.seq);
  assert_int_equal(g->aggregator, hop);
  assert_true(got.group >= p.parts[got.seq][got.server].told);
  assert_int_equal(got.offset, g->received);
  assert_true(t->heard->bulk_bytes > 0 && got.offset + t->heard->bulk_bytes <= g->heard);
  check_bytes(got.seq, got.server, got.offset);
  g->received += t->heard->bulk_bytes;
  hop_chunks++;
}

static void take_server(uint32_t s) {
  if (down[s] || !take(SERVER(s))) return;
  mlfab__chunk got = {.seq = 0};
  mlfab__push push_got = {.seq = 0};
  mlfab__withdraw gone = {.seq = 0};
  if (next_type(SERVER(s)) == MLFAB__PUSH) {
    HEAR_PUSH(SERVER(s), (push_got = *m, 1));
    part *x = &p.parts[push_got.seq][s];
    x->announced = push_got.generation;
    if (push_got.generation != p.generations[s]) return;
    assert_int_equal(x->state, ABSENT);
    x->state = WAITS;
  } else if (next_type(SERVER(s)) == MLFAB__WITHDRAW) {
    HEAR(SERVER(s), WITHDRAW, withdraw, (gone = *m, 1));
    withdraw(s, &gone);
  } else {
    HEAR(SERVER(s), CHUNK, chunk, (got = *m, 1));
    if (got.generation != p.generations[s]) return;
    part *x = &p.parts[got.seq][s];
    if (x->state == WAITS && x->received == UINT64_MAX) return; /* withdrawn meanwhile */
    assert_int_equal(x->state, DIRECT);
    assert_int_equal(got.offset, x->received);
    assert_true(got.offset + t->heard->bulk_bytes <= x->granted);
    check_bytes(got.seq, s, got.offset);
    x->received += t->heard->bulk_bytes;
  }
}

/* The aggregator gives up those numbers; the servers choose other routes later. */
static void lose_aggregator(uint32_t hop) {
  hops_lost++;
  lose_hop(hop);
  for (uint32_t s = 0; s < SERVERS; s++) {
    for (uint64_t i = 1; i <= p.numbers[s]; i++) {
      group *g = &p.groups[s][i];
      if (g->aggregator != hop || g->over) continue;
      g->over = 1;
      g->received = 0; /* never complete */
    }
  }
}

/* A server forgets its state of undecided updates, because the stream starts again. */
static void reset(uint32_t s) {
  p.generations[s]++;
  for (uint64_t i = 1; i <= p.pushed; i++) {
    part *x = &p.parts[i][s];
    if (!open_at(x)) continue;
    if (x->state == GROUPED) p.groups[s][x->group].over = 1;
    *x = (part){.told = x->told, .announced = x->announced};
  }
}

static void resend(uint32_t s) {
  reset(s);
  letter *l = post(&from_server[s], MLFAB__RESEND);
  l->server = s;
  l->generation = p.generations[s];
  l->window = p.windows[s];
}

static void push_one(void) {
  uint32_t b = 0;
  while (b < BUFFERS && p.owner[b] != 0) b++;
  if (b == BUFFERS || p.pushed == UPDATES) return;
  uint64_t seq = ++p.pushed;
  for (uint32_t i = 0; i < BYTES; i += 8) {
    uint64_t word = word_of(seq, i);
    memcpy(p.buffers[b] + i, &word, 8);
  }
  p.owner[b] = seq;
  p.buffer_of[seq] = b;
  p.requests[seq] = CALL(PUSH, BUFS(buffer(MLFAB_ALL, p.buffers[b])));
}

static int lent_from(uint32_t b) {
  for (uint32_t i = 0; i < t->nloans; i++) {
    const talk_loan *l = &t->loans[i];
    if (l->state == LOAN_LIVE && l->data >= p.buffers[b] && l->data < p.buffers[b] + BYTES)
      return 1;
  }
  return 0;
}

/* The caller gets each finished buffer back once, and overwrites it. An update that is decided everywhere and lent nowhere is
 * finished. */
static void collect(void) {
  for (uint64_t seq = 1; seq <= p.pushed; seq++) {
    uint32_t b = p.buffer_of[seq];
    int done = 0, open = 0;
    mlfab_result result;
    if (!p.requests[seq]) continue;
    assert_int_equal(mlfab_node_test(t->node, p.requests[seq], &done, &result), 0);
    for (uint32_t s = 0; s < SERVERS; s++) open |= !p.parts[seq][s].settled;
    if (!done) {
      assert_true(open || lent_from(b));
      continue;
    }
    assert_false(lent_from(b));
    assert_int_equal(p.owner[b], seq);
    assert_int_equal(result.seq, seq);
    p.owner[b] = p.requests[seq] = 0;
    p.finished++;
    memset(p.buffers[b], 0xee, BYTES);
  }
}

static void report_one(void) {
  uint32_t from = t->nloans ? below(t->nloans) : 0;
  for (uint32_t i = 0; i < t->nloans; i++) {
    talk_loan *l = &t->loans[(i + from) % t->nloans];
    if (l->state == LOAN_OVER) continue;
    if (l->state == LOAN_DETACHED && below(2))
      l->state = LOAN_OVER; /* it may never be reported */
    else
      talk_sent(l);
    return;
  }
}

static void cancel_one(void) {
  uint64_t seq = 1 + below((uint32_t)p.pushed);
  if (p.requests[seq]) talk_cancel(p.requests[seq]);
}

static void step(int calm) {
  uint32_t what = below(calm ? 953 : 1000), s = below(SERVERS), a = below(4);
  while (what >= 180 && what < 310 && a + 1 < 4 && from_hop[hops[a]].n == 0) a++;
  if (down[s] && below(8) == 0) let_call(s);
  talk_wait(STEP_NS);
  if (p.pushed == 0 || what < 50) {
    if (!calm) push_one();
  } else if (what < 180) {
    if (!down[s]) deliver(&from_server[s]);
  } else if (what < 310) {
    if (talk_linked(HOP(hops[a]))) deliver(&from_hop[hops[a]]);
  } else if (what < 420) {
    server_acts(s);
  } else if (what < 560) {
    aggregator_acts(s);
  } else if (what < 640) {
    take_server(s);
  } else if (what < 800) {
    take_hop(hops[a]);
  } else if (what < 953) {
    report_one();
  } else if (what < 965) {
    if (below(3) == 0) lose_aggregator(hops[a]);
  } else if (what < 977) {
    if (!down[s] && below(3) == 0) {
      servers_lost++;
      reset(s);
      lose_server(s);
    }
  } else if (what < 985) {
    if (!down[s] && below(3) == 0) resend(s);
  } else {
    cancel_one();
  }
  collect();
}

/* Groups that a lost link has ended, which the server has not been told yet. */
static void heal(void) {
  for (uint32_t s = 0; s < SERVERS; s++) {
    let_call(s);
    for (uint64_t i = 1; i <= p.pushed; i++) {
      part *x = &p.parts[i][s];
      if (x->state == GROUPED && p.groups[s][x->group].over && !down[s])
        route(s, i, MLFAB__NO_NODE);
    }
  }
}

/* Is nothing under way any more? */
static int rests(void) {
  for (uint32_t s = 0; s < SERVERS; s++) {
    if (down[s] || from_server[s].n > 0) return 0;
    for (uint64_t i = 1; i <= p.pushed; i++)
      if (open_at(&p.parts[i][s])) return 0;
  }
  return p.finished == p.pushed;
}

static void play_updates(uint64_t seed) {
  memset(&p, 0, sizeof p);
  begin_at_random(seed);
  t->greeting = greeting;
  for (uint32_t s = 0; s < SERVERS; s++) {
    p.generations[s] = p.known[s] = 1;
    talk_room(SERVER(s), 0);
  }
  for (uint32_t i = 0; i < 4; i++) talk_room(HOP(hops[i]), 0);
  for (uint32_t i = 0; i < 4000; i++) {
    step(0);
    if (i % 40 == 0) heal();
  }
  for (uint32_t i = 0; i < 30000 && !rests(); i++) {
    heal();
    step(1);
  }
  if (!rests()) fail_msg("MLFAB_SEED=%llu", (unsigned long long)seed);
  assert_int_equal(talk_stats().frames_refused, 0);
  for (uint32_t i = 0; i < 4; i++) {
    if (talk_linked(HOP(hops[i]))) lose_hop(hops[i]);
    talk_wait(BEAT_NS / 2);
    assert_false(talk_linked(HOP(hops[i])));
  }
  talk_close();
}

SCENE(test_updates) {
  run_seeds(200, play_updates);
  if (test_seed() || test_scale() < 1) return;
  /* Every interesting event has occurred, and often. */
  const uint64_t totals[] = {hop_chunks, adopted, rerouted, hops_lost, servers_lost};
  for (uint32_t i = 0; i < MLFAB__COUNT(totals); i++) assert_true(totals[i] > 400);
}

/* --- pulls --- */

/* Each route of a server brings its own bytes, so that the test can see that a shard came over one route. Former distributors
 * go on until their link is lost, because nobody tells them. */
enum { WAYS = 256 };

typedef struct way {
  uint64_t request;
  uint32_t hop; /* distributor or NO_NODE */
  uint32_t at;  /* the next slice of the shard */
} way;

typedef struct source { /* a server that is asked for its shard */
  enum { IDLE, HELD, SPREAD, SENDS } state;
  uint64_t request;
  uint32_t way, ways; /* the newest route; the routes of all its pulls */
  uint32_t told;      /* the newest one that the worker knows */
  way list[WAYS];
} source;

typedef struct walk {
  source sources[SERVERS];
  uint8_t buffers[2][BYTES];
  uint32_t turn;
  mlfab_request request;
} walk;

static walk w;
static uint64_t pulls, cancelled, done_by_hop, ways_adopted, stale;

/* What the servers hear. */
static void sources_hear(void) {
  for (uint32_t s = 0; s < SERVERS; s++) {
    source *x = &w.sources[s];
    while (!down[s] && talk_peer_of(SERVER(s))->first) {
      uint8_t type = next_type(SERVER(s));
      if (type == MLFAB__PULL) {
        HEAR_PULL(SERVER(s), (x->request = m->request) > 0);
        assert_int_equal(x->state, IDLE);
        x->state = HELD;
      } else if (type == MLFAB__PULL_DONE) {
        HEAR(SERVER(s), PULL_DONE, pull_done, x->state != IDLE && m->request == x->request);
        x->state = IDLE;
        done_by_hop++;
      } else {
        HEAR(SERVER(s), PULL_CANCEL, pull_cancel, m->request > 0);
        x->state = IDLE;
      }
    }
  }
}

static void choose_way(uint32_t s, uint32_t hop) {
  source *x = &w.sources[s];
  int told = x->ways > 0 || hop != MLFAB__NO_NODE;
  assert_true(x->ways + 1 < WAYS);
  x->way = ++x->ways;
  x->list[x->way] = (way){x->request, hop, 0};
  x->state = hop == MLFAB__NO_NODE ? SENDS : SPREAD;
  if (!told) return; /* there never was a distributor, and the worker knows it */
  letter *l = post(&from_server[s], MLFAB__PULL_VIA);
  l->server = s;
  l->seq = x->request;
  l->group = x->way;
  l->aggregator = hop;
}

/* Sends the next slice of a route. */
static void send_model(uint32_t s, uint32_t number) {
  way *x = &w.sources[s].list[number];
  int direct = x->hop == MLFAB__NO_NODE;
  letter *l =
      post(direct ? &from_server[s] : &from_hop[x->hop], direct ? MLFAB__MODEL : MLFAB__HOP_MODEL);
  l->seq = x->request;
  l->server = s;
  l->group = number;
  l->upto = x->at++;
  l->aggregator = x->hop;
}

static void source_acts(uint32_t s) {
  source *x = &w.sources[s];
  way *newest = &x->list[x->way];
  int anew = x->state == HELD || (x->state == SPREAD && below(20) == 0) ||
             (x->state == SPREAD && newest->hop == MLFAB__NO_NODE);
  if (down[s] || x->state == IDLE) return;
  if (anew) {
    int direct = below(4) == 0 || x->ways > WAYS / 2;
    choose_way(s, direct ? MLFAB__NO_NODE : hops[below(4)]);
  } else if (x->state == SENDS && newest->at < SHARD / SLICE) {
    send_model(s, x->way);
    if (newest->at == SHARD / SLICE) x->state = IDLE;
  }
}

/* A distributor sends: the newest routes, and sometimes former ones. */
static void distributor_acts(uint32_t s) {
  source *x = &w.sources[s];
  uint32_t back = below(3) ? 0 : below(3);
  if (x->way <= back) return;
  const way *sent = &x->list[x->way - back];
  if (sent->hop != MLFAB__NO_NODE && sent->at < SHARD / SLICE) send_model(s, x->way - back);
}

static void deliver_model(mailbox *box) {
  uint8_t bulk[SLICE];
  letter l;
  if (!receive(box, &l)) return;
  source *x = &w.sources[l.server];
  uint32_t flags = l.upto + 1 == SHARD / SLICE ? MLFAB__MODEL_LAST : 0, number = (uint32_t)l.group;
  uint64_t at = l.server * SHARD + l.upto * SLICE;
  memset(bulk, (int)(uint8_t)number, sizeof bulk);
  if (l.type == MLFAB__PULL_VIA) {
    if (number > x->told) x->told = number;
    SAY(SERVER(l.server), PULL_VIA, pull_via, l.seq, number, l.aggregator);
  } else if (l.type == MLFAB__MODEL) {
    SAY_BULK(SERVER(l.server), MODEL, model, bulk, SLICE, .request = l.seq, .offset = at,
             .bytes = SLICE, .version = number, .commit = number, .slice = (uint32_t)(at / SLICE),
             .flags = flags, .epoch = 1);
  } else {
    int current = x->state != IDLE && l.seq == x->request;
    ways_adopted += current && number > x->told;
    stale += current && number < x->told;
    if (current)
      if (number > x->told) x->told = number;
    SAY_BULK(HOP(l.aggregator), HOP_MODEL, hop_model, bulk, SLICE, .request = l.seq, .offset = at,
             .bytes = SLICE, .version = number, .commit = number, .slice = (uint32_t)(at / SLICE),
             .flags = flags, .epoch = 1, .server = l.server, .attempt = number);
  }
}

static void lose_distributor(uint32_t hop) {
  lose_hop(hop);
  for (uint32_t s = 0; s < SERVERS; s++) {
    for (uint32_t i = 1; i <= w.sources[s].ways; i++)
      if (w.sources[s].list[i].hop == hop) w.sources[s].list[i].hop = MLFAB__NO_NODE;
  }
}

static void greet_source(uint32_t who, mlfab__hello_ack *ack) {
  (void)ack;
  down[who & 0xffff] = 0;
}

static void pull_one(void) {
  memset(w.buffers[w.turn], 0, BYTES);
  memset(w.buffers[1 - w.turn], 0xee, BYTES); /* the caller's: it must not be written any more */
  w.request = CALL(PULL, BUFS(buffer(MLFAB_ALL, w.buffers[w.turn])));
  pulls++;
}

static void collect_pull(void) {
  int done = 0;
  mlfab_result result;
  const uint8_t *data = w.buffers[w.turn];
  if (!w.request) return;
  assert_int_equal(mlfab_node_test(t->node, w.request, &done, &result), 0);
  if (!done) return;
  for (uint32_t i = 0; i < BYTES && result.status == 0; i++)
    if (data[i] == 0 || data[i] != data[i / SHARD * SHARD]) fail();
  for (uint32_t i = 0; i < BYTES; i++)
    if (w.buffers[1 - w.turn][i] != 0xee) fail();
  w.request = 0;
  w.turn = 1 - w.turn;
}

static void step_pull(int calm) {
  uint32_t what = below(calm ? 985 : 1000), s = below(SERVERS), a = below(4);
  while (what >= 250 && what < 500 && a + 1 < 4 && from_hop[hops[a]].n == 0) a++;
  if (down[s] && below(8) == 0) let_call(s);
  talk_wait(STEP_NS);
  sources_hear();
  if (!w.request) {
    if (!calm) pull_one();
  } else if (what < 250) {
    if (!down[s]) deliver_model(&from_server[s]);
  } else if (what < 500) {
    if (talk_linked(HOP(hops[a]))) deliver_model(&from_hop[hops[a]]);
  } else if (what < 700) {
    source_acts(s);
  } else if (what < 985) {
    distributor_acts(s);
  } else if (what < 993) {
    lose_distributor(hops[a]);
  } else if (what < 997) {
    if (!down[s]) {
      talk_skip(SERVER(s));
      lose_server(s);
      w.sources[s].state = IDLE;
    }
  } else if (below(3) == 0) {
    talk_cancel(w.request);
    cancelled++;
  }
  collect_pull();
}

static void walk_pulls(uint64_t seed) {
  memset(&w, 0, sizeof w);
  begin_at_random(seed);
  t->greeting = greet_source;
  for (uint32_t i = 0; i < 3000; i++) step_pull(0);
  for (uint32_t i = 0; i < 50000 && w.request; i++) step_pull(1);
  if (w.request) fail_msg("MLFAB_SEED=%llu", (unsigned long long)seed);
  assert_int_equal(talk_stats().frames_refused, 0);
  talk_close();
}

SCENE(test_pulls) {
  run_seeds(60, walk_pulls);
  if (test_seed() || test_scale() < 1) return;
  const uint64_t totals[] = {pulls - cancelled, cancelled, done_by_hop, ways_adopted, stale};
  for (uint32_t i = 0; i < MLFAB__COUNT(totals); i++) assert_true(totals[i] > 80);
}
