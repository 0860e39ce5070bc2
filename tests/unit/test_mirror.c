/* test_mirror.c - a server 0 with a replica, as its workers see it: the copy that serves is killed or replaced at any
 * moment, words between the copies are late or lost, and the copy that takes over contradicts nothing that a worker was
 * told.
 *
 * Oracle: each worker is a literal state machine that knows only its own frames, from either copy. The world sees everything.
 * It checks each word of server 0 at once, and after every event all that no worker can see. At each mark the state of the
 * standby is compared with the state that the serving copy had when it sent the mark. */
#include "core/base/rng.h"
#include "core/coll/membership.h"
#include "core/replica/mirror.h"
#include "../testing.h"
#include "ports.h"

/* ---- workers as comm.h draws them, and a server 0, over links that break and lose frames ---- */

enum { WORKERS = 12, FRAMES = 256, BEAT = 1000, EPOCHS = 4096 };

typedef struct message {
  uint8_t type;
  uint8_t meta[1024];
  uint32_t bytes;
} message;

typedef struct pipe {
  message frames[FRAMES];
  unsigned begin, count;
} pipe;

enum state { OUT, ASKED, LISTED, IN };

typedef struct worker {
  int alive, here, up; /* the process; as server 0 thinks; its link */
  int process_left, done, wants;
  int finishes, frozen; /* it has no more data; begins nothing */
  uint32_t open;        /* objects */
  uint64_t limit;       /* calls of this epoch */
  int sought;           /* it may change yet: it is the first call of a joiner */
  uint32_t moved;       /* the epoch of which it has ended them */
  uint32_t incarnation;
  pipe to, from;
  enum state state;
  uint32_t epoch, over; /* listed or IN; the newest that it knows to be over */
  uint64_t host, calls;
  double rate;
  int failing;           /* has said FAIL, until OVER */
  uint64_t signature[4]; /* of its calls 0..3; calls: how many it has made */
  int32_t missing, awaited;
  uint32_t overs[EPOCHS / 32]; /* epochs that it has heard the verdict of */
  uint32_t left_known;         /* bit w: told that w has left this epoch */
  mlfab__membership_over verdict;
  mlfab__membership_go go;
  uint32_t members;
  mlfab__membership_member list[WORKERS];
} worker;

typedef struct world {
  mlfab__env env;
  mlfab_config config;
  mlfab__membership *server; /* the one that serves */
  worker workers[WORKERS];
  uint32_t n, incarnations;
  uint64_t now, asks[64]; /* when server 0 asked about a call */
  mlfab__rng prng;
  uint32_t drops, went, shapes, silent, named;
  uint32_t last_go;            /* the newest epoch that has begun */
  uint64_t members_of[EPOCHS]; /* bit w */
  uint8_t over[EPOCHS];        /* server 0 has ended it */
  uint8_t stillborn[EPOCHS];   /* before it was listed */
  uint64_t ready_of[EPOCHS];   /* bit w: said READY, or left before GO */
} world;

static world *w;

/* Of the copies, below. */
static int pump(void);          /* something else moves */
static void greets(uint32_t i); /* a worker is about to be greeted on a new link */

static uint32_t chance(uint32_t n) { return (uint32_t)mlfab__rng_below(&w->prng, n); }

/* --- links --- */

static void put(pipe *p, uint8_t type, const void *meta, uint32_t bytes) {
  assert_true(p->count < FRAMES);
  message *m = &p->frames[(p->begin + p->count++) % FRAMES];
  assert_true(bytes <= sizeof m->meta);
  m->type = type;
  m->bytes = bytes;
  if (bytes > 0) memcpy(m->meta, meta, bytes);
}

/* Checks a word of server 0 as it is said. */
static void look(uint32_t to, uint8_t type, const void *meta, uint32_t bytes) {
  mlfab__membership_go go;
  mlfab__membership_list list;
  mlfab__membership_over over;
  mlfab__membership_member members[WORKERS];
  if (type == MLFAB__MEMBERSHIP_LIST) {
    uint64_t bits = 0;
    assert_int_equal(mlfab__decode_membership_list(meta, bytes, &list, members), 0);
    assert_in_range(list.epoch, 1, EPOCHS - 1);
    for (uint32_t i = 0; i < list.members; i++) bits |= (uint64_t)1 << members[i].rank;
    assert_true(bits >> to & 1);
    assert_int_equal(__builtin_popcountll(bits), list.members);
    if (!w->members_of[list.epoch]) { /* (1): numbers grow, one at a time */
      for (uint32_t e = list.epoch + 1; e < EPOCHS; e++) assert_int_equal(w->members_of[e], 0);
      w->over[list.epoch - 1] = 1; /* also where nobody was left to be told */
    }
    if (w->members_of[list.epoch]) assert_true(w->members_of[list.epoch] == bits);
    w->members_of[list.epoch] = bits;
    assert_false(w->over[list.epoch]);
  } else if (type == MLFAB__MEMBERSHIP_GO) {
    assert_int_equal(mlfab__decode_membership_go(meta, bytes, &go), 0);
    /* (2): everybody is ready, or has left; so nobody is IN an older one. */
    assert_true((w->ready_of[go.epoch] & w->members_of[go.epoch]) == w->members_of[go.epoch]);
    for (uint32_t i = 0; i < w->n; i++) {
      const worker *other = &w->workers[i];
      if (other->alive && other->state == IN && !other->done)
        assert_true(other->epoch == go.epoch || !(w->members_of[go.epoch] >> i & 1) ||
                    !other->here);
    }
    assert_false(w->over[go.epoch]);
    if (go.epoch > w->last_go) w->went++;
    w->last_go = go.epoch;
  } else if (type == MLFAB__MEMBERSHIP_OVER) {
    assert_int_equal(mlfab__decode_membership_over(meta, bytes, &over), 0);
    assert_true(over.code < 0 ? over.text[0] : !over.text[0]);
    if (!w->members_of[over.epoch] || w->stillborn[over.epoch]) { /* it was over as it began */
      w->stillborn[over.epoch] = 1;
      w->members_of[over.epoch] |= (uint64_t)1 << to;
    }
    assert_true(w->members_of[over.epoch] >> to & 1);
    w->over[over.epoch] = 1;
  }
}

static void host_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)self;
  look(peer, type, meta, bytes);
  if (w->workers[peer].up) put(&w->workers[peer].from, type, meta, bytes);
}
static void any_drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer, (void)code, (void)text;
  w->drops++;
}

/* --- a worker --- */

static void say(worker *me, uint8_t type, const void *meta, uint32_t bytes) {
  if (me->up) put(&me->to, type, meta, bytes);
}

static void say_roll(worker *me) {
  mlfab__membership_ask ask = {.epoch = me->over,
                               .host = me->host,
                               .in = me->rate,
                               .out = 2 * me->rate,
                               .round = me->calls,
                               .signature = 7, /* of all calls */
                               .open = me->open};
  uint8_t meta[160];
  say(me, MLFAB__MEMBERSHIP, meta, mlfab__encode_membership_ask(meta, &ask));
}

static void say_ready(worker *me) {
  mlfab__membership_ready ready = {.epoch = me->epoch, .arena = 1};
  uint8_t meta[32];
  say(me, MLFAB__MEMBERSHIP_READY, meta, mlfab__encode_membership_ready(meta, &ready));
}

static void say_leave(worker *me) {
  mlfab__membership_leave leave = {me->state >= LISTED ? me->epoch : me->over,
                                   (int32_t)(me - w->workers), me->calls};
  uint8_t meta[32];
  say(me, MLFAB__MEMBERSHIP_LEAVE, meta, mlfab__encode_membership_leave(meta, &leave));
}

static void say_fail(worker *me) {
  mlfab__membership_over fail = {me->epoch, MLFAB_ERR_TIMEOUT, 1, "a deadline passed"};
  uint8_t meta[512];
  say(me, MLFAB__MEMBERSHIP_FAIL, meta, mlfab__encode_membership_over(meta, &fail));
}

static void say_finish(worker *me, uint8_t type, int32_t rank) {
  mlfab__membership_finish finish = {
      .epoch = me->state == IN ? me->epoch : 0, .rank = rank, .calls = me->calls, .open = me->open};
  uint8_t meta[96];
  say(me, type, meta, mlfab__encode_membership_finish(meta, &finish));
}

/* It has ended all calls of the epoch; one that has finished takes part in those that it has not called. */
static void look_at_limit(worker *me) {
  if (me->state != IN || me->frozen || me->moved == me->epoch || me->failing) return;
  if (me->finishes && me->limit < UINT64_MAX) me->calls = me->limit;
  if (me->calls < me->limit) return;
  me->moved = me->epoch;
  if (me->finishes) {
    say_finish(me, MLFAB__MEMBERSHIP_FINISH, MLFAB_NO_RANK);
  } else {
    uint32_t over = me->over;
    me->over = me->epoch;
    say_roll(me);
    me->over = over;
  }
}

static void call(worker *me) {
  me->wants = 1;
  if (me->state != OUT || me->done) return;
  if (me->finishes) {
    say_finish(me, MLFAB__MEMBERSHIP_FINISH, 0);
    return;
  }
  me->state = ASKED;
  say_roll(me);
}

static void heard_over(worker *me, const mlfab__membership_over *over) {
  if (over->epoch <= me->over) return; /* said again */
  /* (3): the one that it is in, or that it was to be in; the next, where the list was lost. */
  if (me->state >= LISTED && me->moved != me->epoch) assert_int_equal(over->epoch, me->epoch);
  if (me->state == IN && over->code == 0) assert_true(me->done || me->moved == me->epoch);
  me->frozen = 0;
  me->limit = UINT64_MAX;
  assert_false(me->overs[over->epoch / 32] >> over->epoch % 32 & 1);
  me->overs[over->epoch / 32] |= 1u << over->epoch % 32;
  me->over = over->epoch;
  me->verdict = *over;
  me->failing = 0;
  me->calls = 0;
  me->left_known = 0;
  me->state = OUT;
  me->awaited = me->missing = -2;
  call(me);
}

static void hears(worker *me, const message *m) {
  mlfab__membership_list list;
  mlfab__membership_go go;
  mlfab__membership_over over;
  mlfab__membership_call ask;
  mlfab__membership_missing missing;
  mlfab__membership_leave left;
  mlfab__membership_finish finish;
  mlfab__membership_member members[WORKERS];
  uint8_t meta[512];
  switch (m->type) {
    case MLFAB__MEMBERSHIP_LIST:
      assert_int_equal(mlfab__decode_membership_list(m->meta, m->bytes, &list, members), 0);
      if (list.epoch <= me->over || list.epoch <= me->epoch) break;
      if (me->state == IN && me->moved == me->epoch) {
        me->over = me->epoch; /* without a verdict */
        me->left_known = 0;
      } else if (me->state != ASKED) {
        break;
      }
      me->frozen = 0;
      me->limit = UINT64_MAX;
      me->state = LISTED;
      me->epoch = list.epoch;
      me->members = list.members;
      memcpy(me->list, members, sizeof members);
      me->calls = 0;
      if (me->failing)
        say_fail(me);
      else if (!me->done)
        say_ready(me);
      break;
    case MLFAB__MEMBERSHIP_GO:
      assert_int_equal(mlfab__decode_membership_go(m->meta, m->bytes, &go), 0);
      if (me->state != LISTED || go.epoch != me->epoch) break;
      me->state = IN;
      me->go = go;
      if (me->finishes) say_finish(me, MLFAB__MEMBERSHIP_FINISH, (int32_t)(me - w->workers));
      break;
    case MLFAB__MEMBERSHIP_OVER:
      assert_int_equal(mlfab__decode_membership_over(m->meta, m->bytes, &over), 0);
      heard_over(me, &over);
      break;
    case MLFAB__MEMBERSHIP_ASK:
      assert_int_equal(mlfab__decode_membership_call(m->meta, m->bytes, &ask), 0);
      if (me->state == IN && ask.epoch == me->epoch && chance(20)) {
        mlfab__membership_tell tell = {ask.epoch,
                                       ask.channel,
                                       ask.number,
                                       ask.number < me->calls,
                                       me->signature[ask.number % 4],
                                       "x"};
        snprintf(tell.text, sizeof tell.text, "call %d", (int)tell.signature);
        say(me, MLFAB__MEMBERSHIP_TELL, meta, mlfab__encode_membership_tell(meta, &tell));
      }
      break;
    case MLFAB__MEMBERSHIP_MISSING:
      assert_int_equal(mlfab__decode_membership_missing(m->meta, m->bytes, &missing), 0);
      if (missing.epoch == 0) me->awaited = missing.rank;
      if (me->state == IN && missing.epoch == me->epoch) me->missing = missing.rank;
      break;
    case MLFAB__MEMBERSHIP_LEFT:
      assert_int_equal(mlfab__decode_membership_leave(m->meta, m->bytes, &left), 0);
      if (left.epoch == me->epoch) me->left_known |= 1u << left.rank;
      break;
    case MLFAB__MEMBERSHIP_FREEZE:
      assert_int_equal(mlfab__decode_membership_finish(m->meta, m->bytes, &finish), 0);
      if (me->state != IN || finish.epoch != me->epoch || me->failing) break;
      me->frozen = 1;
      me->moved = 0;
      say_finish(me, MLFAB__MEMBERSHIP_FROZEN, finish.rank);
      break;
    case MLFAB__MEMBERSHIP_SETTLE:
      assert_int_equal(mlfab__decode_membership_finish(m->meta, m->bytes, &finish), 0);
      if (me->state != IN || finish.epoch != me->epoch || me->failing) break;
      assert_true(me->limit == UINT64_MAX || me->sought || me->limit == finish.calls);
      me->sought = finish.seek[0] != 0;
      if (finish.calls == UINT64_MAX) me->moved = 0;
      assert_true(me->calls <= finish.calls);
      me->limit = finish.calls;
      me->frozen = 0;
      look_at_limit(me);
      break;
    default:
      fail_msg("a frame of type %d", m->type);
  }
}

/* --- what happens --- */

static void heard_by_server(uint32_t i, const message *m) {
  mlfab__frame_in in = {m->type, m->bytes, 0, m->meta, NULL};
  mlfab__membership_ready ready;
  mlfab__membership_leave leave;
  uint32_t epoch = w->server->epoch;
  if (m->type == MLFAB__MEMBERSHIP_READY) {
    assert_int_equal(mlfab__decode_membership_ready(m->meta, m->bytes, &ready), 0);
    w->ready_of[ready.epoch] |= (uint64_t)1 << i;
  } else if (m->type == MLFAB__MEMBERSHIP_LEAVE) {
    assert_int_equal(mlfab__decode_membership_leave(m->meta, m->bytes, &leave), 0);
    if (leave.epoch != epoch) w->ready_of[epoch] |= (uint64_t)1 << i;
  }
  assert_int_equal(mlfab__membership_frame(w->server, i, &in, w->now), 1);
}

/* One frame of one direction arrives. 0: there was none. */
static int deliver(uint32_t i, int to) {
  worker *me = &w->workers[i];
  pipe *p = to ? &me->to : &me->from;
  if (p->count == 0) return 0;
  message m = p->frames[p->begin % FRAMES];
  p->begin++;
  p->count--;
  if (to)
    heard_by_server(i, &m);
  else if (me->alive)
    hears(me, &m);
  return 1;
}

static void cut(uint32_t i) {
  worker *me = &w->workers[i];
  me->up = 0;
  me->to.count = me->from.count = 0;
}

/* A new link: server 0 hears the greeting first, then the worker says again what may be lost. */
static void greet(uint32_t i) {
  worker *me = &w->workers[i];
  if (!me->alive || me->process_left) return;
  cut(i);
  me->up = me->here = 1;
  greets(i);
  mlfab__membership_hello(w->server, i, me->incarnation, w->now);
  if (me->done) {
    say_leave(me);
    return;
  }
  if (me->state == ASKED) say_roll(me);
  if (me->state == LISTED && !me->failing) say_ready(me);
  if (me->finishes && (me->state == IN || me->state == OUT))
    say_finish(me, MLFAB__MEMBERSHIP_FINISH,
               me->moved == me->epoch ? MLFAB_NO_RANK : (int32_t)(me - w->workers));
  if (me->state == IN && !me->finishes && !me->failing && me->moved == me->epoch) {
    me->moved = 0;
    look_at_limit(me);
  }
  if (me->failing) say_fail(me);
}

static void die(uint32_t i) {
  cut(i);
  w->workers[i].alive = 0;
}

/* Server 0 gives up a worker that has no link. */
static void give_up(uint32_t i) {
  worker *me = &w->workers[i];
  if (me->up || !me->here) return;
  me->here = 0;
  mlfab__membership_gone(w->server, i, 0, w->now);
}

static void come(uint32_t i) {
  worker *me = &w->workers[i];
  if (me->alive) return;
  cut(i);
  uint32_t incarnation = ++w->incarnations;
  int here = me->here;
  uint64_t host = me->host;
  double rate = me->rate;
  memset(me, 0, sizeof *me);
  me->alive = 1;
  me->here = here;
  me->host = host;
  me->rate = rate;
  me->incarnation = incarnation;
  me->missing = me->awaited = -2;
  me->limit = UINT64_MAX;
  greet(i);
}

static void leave(uint32_t i) {
  worker *me = &w->workers[i];
  if (!me->alive || me->done) return;
  me->done = 1;
  say_leave(me);
}

/* It has no more data: as the communicator, which says so in an epoch or in none. */
static void finish(uint32_t i) {
  worker *me = &w->workers[i];
  if (!me->alive || me->done || me->finishes) return;
  me->finishes = 1;
  if (me->state == ASKED) me->state = OUT;
  if (me->state == IN || me->state == OUT) say_finish(me, MLFAB__MEMBERSHIP_FINISH, (int32_t)i);
}

/* The last frames, then the goodbye. */
static void close_one(uint32_t i) {
  worker *me = &w->workers[i];
  if (!me->alive || !me->up || !me->done) return;
  while (deliver(i, 1)) continue;
  w->ready_of[w->server->epoch] |= (uint64_t)1 << i;
  me->here = 0;
  mlfab__membership_gone(w->server, i, 1, w->now);
  die(i);
}

static void stuck(uint32_t i, uint64_t number) {
  worker *me = &w->workers[i];
  mlfab__membership_call at = {me->epoch, 0, number};
  uint8_t meta[32];
  if (me->state == IN && !me->done)
    say(me, MLFAB__MEMBERSHIP_STUCK, meta, mlfab__encode_membership_call(meta, &at));
}

static void check_world(void) {
  const mlfab__membership *membership = w->server;
  uint32_t asked = 0, awaited = 0;
  for (uint32_t i = 0; i < w->n; i++) {
    const mlfab__membership_entry *entry = &membership->entries[i];
    asked += entry->asked;
    awaited += entry->alive && !entry->done && !entry->asked && !entry->joins;
    assert_true(!entry->member || membership->phase >= MLFAB__MEMBERSHIP_LISTED);
    assert_true(!entry->asked || entry->joins || membership->phase == MLFAB__MEMBERSHIP_GATHERING);
    assert_true(!(entry->member && entry->over_owed)); /* (3) */
    if (entry->member && !entry->left) assert_true(entry->alive);
  }
  if (membership->phase == MLFAB__MEMBERSHIP_GATHERING) assert_true(asked == 0 || awaited > 0);
}

static void act(int violent) {
  uint32_t i = chance(w->n), what = chance(100);
  worker *me = &w->workers[i];
  w->now += chance(BEAT / 16);
  if (what < 40) {
    deliver(i, (int)chance(2));
  } else if (what < 60) {
    if (me->alive) call(me);
  } else if (what < 75) {
    if (me->state == IN && me->alive && me->calls < 4 && !me->frozen && !me->finishes &&
        me->calls < me->limit) {
      me->signature[me->calls] = violent < 0 || chance(40) ? me->calls : 100 + chance(3);
      me->calls++;
      look_at_limit(me);
    }
  } else if (what < 77) {
    me->open = me->state == IN && !me->frozen && chance(4) == 0;
  } else if (what < 80) {
    mlfab__membership_tick(w->server, w->now);
  } else if (what < 84) {
    if (me->alive && me->calls > 0) stuck(i, chance((uint32_t)me->calls));
  } else if (what < 88) {
    if (me->alive && !me->up) greet(i);
  } else if (what < 91) {
    if (violent >= 0 || chance(2)) cut(i);
  } else if (what < 93) {
    if (violent >= 0) give_up(i);
  } else if (what < 95) {
    come(i);
  } else if (violent <= 0) {
    deliver(i, 1);
  } else if (what == 95) {
    die(i);
  } else if (what == 96) {
    if (chance(2)) leave(i);
    if (chance(2)) finish(i);
  } else if (what == 97) {
    close_one(i);
  } else if (what == 98) {
    if (me->alive && me->state == IN && !me->failing && !me->done) {
      me->failing = 1;
      say_fail(me);
    }
  } else {
    greet(i); /* a link that replaces another */
  }
  check_world();
}

/* Everything that is under way arrives; all who are dead are known to be. */
static void settle(void) {
  for (uint32_t i = 0; i < w->n; i++) {
    if (w->workers[i].alive && !w->workers[i].up) greet(i);
    give_up(i);
  }
  for (int moved = 1; moved;) {
    moved = 0;
    for (uint32_t i = 0; i < w->n; i++) moved |= deliver(i, 1) | deliver(i, 0);
    moved |= pump();
    check_world();
  }
}

static void open_world(uint32_t n, uint64_t seed) {
  w = calloc(1, sizeof *w);
  assert_non_null(w);
  mlfab__rng_seed(&w->prng, seed);
  assert_int_equal(mlfab__env_init(&w->env, NULL), 0);
  mlfab_config_init(&w->config);
  w->config.workers = w->n = n;
  w->config.heartbeat_ns = BEAT;
  w->config.order_by_rate = chance(2);
  w->now = 1;
  for (uint32_t i = 0; i < n; i++) {
    w->workers[i].host = 1 + chance(4);
    w->workers[i].rate = chance(3) ? 1e6 * (double)(1 + w->workers[i].host * 7 % 4) : 0.0;
    w->workers[i].here = 1;
  }
}

static void close_world(void) {
  assert_int_equal(w->drops, 0);
  assert_int_equal(w->env.bytes, 0);
  free(w);
}

/* ---- two copies of server 0 ---- */

enum { ROOM = 2048, MARKS = 2048, BYTES = 512, RECORDS = 1 + WORKERS + WORKERS };

typedef struct line { /* from one copy to the other */
  struct {
    uint8_t type;
    uint32_t bytes;
    uint8_t meta[BYTES];
  } frames[ROOM];
  unsigned begin, count;
  int up;
} line;

typedef struct copy {
  mlfab__membership membership;
  mlfab__mirror mirror;
  mlfab__touch *known; /* who is here, as the node knows it */
  int ready;
  line to; /* the other copy */
} copy;

typedef struct fabric {
  copy copies[2];
  uint32_t s; /* serves */
  uint32_t term;
  int wanted; /* a record that names the other copy is asked for, or decided */
  int drops;  /* another one is asked for */
  uint64_t takeovers, held;
  /* What the serving copy was at its marks. */
  uint8_t was[MARKS][RECORDS][BYTES];
  uint32_t was_n[MARKS][RECORDS];
} fabric;

static fabric both, *const f = &both;

static copy *serving(void) { return &f->copies[f->s]; }
static copy *other(void) { return &f->copies[1 - f->s]; }

/* --- who is here: a part as the node has it --- */

static uint32_t known_encode(const void *self, uint32_t record, uint8_t *bytes) {
  (void)self;
  bytes[0] = (uint8_t)w->workers[record].here;
  return 1;
}

static int known_decode(void *self, uint32_t record, const uint8_t *bytes, uint32_t n, int apply) {
  (void)self;
  if (n != 1 || bytes[0] > 1) return MLFAB_ERR_FRAME;
  if (apply) w->workers[record].here = bytes[0];
  return 0;
}

/* --- the link between the copies --- */

static void line_put(line *l, uint8_t type, const void *meta, uint32_t bytes) {
  if (!l->up) return;
  assert_true(l->count < ROOM && bytes <= BYTES);
  unsigned at = (l->begin + l->count++) % ROOM;
  l->frames[at].type = type;
  l->frames[at].bytes = bytes;
  memcpy(l->frames[at].meta, meta, bytes);
}

static void out_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)peer;
  line_put(&((copy *)self)->to, type, meta, bytes);
}

static void out_ready(void *self, uint32_t peer) {
  (void)peer;
  ((copy *)self)->ready = 1;
}

static void line_up(copy *from) {
  from->to.up = 1;
  from->to.begin = from->to.count = 0;
  mlfab__mirror_link(&from->mirror, 1);
}

static void line_cut(copy *from) {
  from->to.up = 0;
  from->to.count = 0;
  mlfab__mirror_link(&from->mirror, 0);
  mlfab__mirror_cut(&f->copies[from == &f->copies[0]].mirror);
}

static void look_at(copy *c) {
  mlfab__mirror_facts facts = {.leased = 1, .named = f->wanted, .takes = c == other()};
  mlfab__mirror_know(&c->mirror, &facts);
  mlfab__mirror_look(&c->mirror, w->now, BEAT);
  f->held += c->mirror.end - c->mirror.begin;
}

/* The copy that serves gets a frame off. */
static int line_send(copy *c) {
  static uint8_t meta[MLFAB_META_MAX];
  mlfab__frame_out frame = {.meta = meta};
  mlfab__mirror *m = &c->mirror;
  if (!c->to.up || !mlfab__mirror_next(m, &frame)) {
    c->ready = 0;
    return 0;
  }
  uint64_t before = m->number;
  mlfab__mirror_taken(m, &frame, w->now);
  if (m->number > before) {
    uint32_t slot = (uint32_t)(m->number % MARKS);
    for (uint32_t r = 0; r < m->nrecords; r++) {
      const mlfab__mirror_part *part = &m->parts[r >= m->parts[1].first];
      f->was_n[slot][r] =
          part->mirrored.encode(part->mirrored.self, r - part->first, f->was[slot][r]);
    }
  }
  line_put(&c->to, frame.type, frame.meta, frame.meta_bytes);
  look_at(c);
  return 1;
}

/* A frame arrives. */
static int line_arrive(copy *from) {
  line *l = &from->to;
  copy *to = &f->copies[from == &f->copies[0]];
  if (l->count == 0) return 0;
  unsigned at = l->begin % ROOM;
  const mlfab__frame_in in = {l->frames[at].type, l->frames[at].bytes, 0, l->frames[at].meta, NULL};
  uint64_t before = to->mirror.got;
  l->begin++;
  l->count--;
  assert_int_equal(mlfab__mirror_hear(&to->mirror, &in, w->now, BEAT), 0);
  if (to->mirror.got != before) {
    const mlfab__mirror *m = &to->mirror;
    for (uint32_t r = 0; r < m->nrecords; r++) {
      assert_int_equal(m->records[r].n, f->was_n[m->got % MARKS][r]);
      assert_memory_equal(m->records[r].bytes, f->was[m->got % MARKS][r], m->records[r].n);
    }
  }
  look_at(to);
  return 1;
}

/* --- copies --- */

static void copy_open(copy *c) {
  c->ready = c->to.up = 0;
  c->to.count = 0;
  mlfab__port port = {w, host_post, no_ready, any_drop, no_detach, no_event, NULL, NULL};
  assert_int_equal(mlfab__membership_init(&c->membership, &w->env, &w->config, &port), 0);
  const mlfab__mirrored parts[2] = {mlfab__membership_mirrored(&c->membership),
                                    {.name = "known",
                                     .self = c,
                                     .records = w->n,
                                     .encode = known_encode,
                                     .decode = known_decode,
                                     .touch = &c->known}};
  const mlfab__port out = {c, out_post, out_ready, any_drop, no_detach, no_event, NULL, NULL};
  assert_int_equal(mlfab__mirror_init(&c->mirror, &w->env, parts, 2, &out, 0), 0);
}

static void copy_close(copy *c) {
  mlfab__mirror_free(&c->mirror);
  mlfab__membership_free(&c->membership);
}

static void greets(uint32_t i) { mlfab__mirror_forget(&serving()->mirror, i); }

/* After every event of the copy that serves. */
static void look_at_both(void) {
  mlfab__touched_all(serving()->known);
  look_at(serving());
  look_at(other());
  if (!f->wanted && mlfab__mirror_in_sync(&serving()->mirror) && chance(8) == 0) f->wanted = 1;
}

static int pump(void) {
  int moved = 0;
  look_at_both();
  for (int c = 0; c < 2; c++) {
    copy *from = &f->copies[c];
    if (!from->to.up) line_up(from);
    look_at(from);
    if (!f->drops) moved |= line_send(from) | line_arrive(from);
  }
  return moved;
}

static void mirrored_open(uint32_t n, uint64_t seed) {
  open_world(n, seed);
  f->s = f->term = 0;
  f->wanted = f->drops = 0;
  f->takeovers = f->held = 0;
  for (int c = 0; c < 2; c++) copy_open(&f->copies[c]);
  w->server = &f->copies[0].membership;
  mlfab__mirror_serve(&f->copies[0].mirror, ++f->term);
  look_at_both();
  for (int c = 0; c < 2; c++) line_up(&f->copies[c]);
}

static void mirrored_close(void) {
  for (int c = 0; c < 2; c++) copy_close(&f->copies[c]);
  close_world();
}

/* The other copy serves from now on. The former one is dead, and another process takes its place; or it was away. */
static void take_over(int dead) {
  copy *was = serving(), *next = other();
  assert_true(f->wanted && next->mirror.got > 0);
  for (uint32_t i = 0; i < w->n; i++) cut(i);
  line_cut(was);
  line_cut(next);
  f->s = 1 - f->s;
  f->wanted = f->drops = 0;
  f->takeovers++;
  mlfab__mirror_serve(&next->mirror, ++f->term);
  w->server = &next->membership;
  if (dead) {
    copy_close(was);
    copy_open(was);
  } else {
    mlfab__mirror_stand_by(&was->mirror);
  }
  look_at_both();
}

/* What happens to the copies. */
static void act_on_copies(int violent) {
  uint32_t what = chance(violent ? 400 : 800), which = chance(2);
  copy *c = &f->copies[which];
  if (what == 0 && f->wanted) {
    take_over((int)chance(2));
  } else if (what < 3) {
    line_cut(c);
  } else if (what < 12) {
    if (!c->to.up) line_up(c);
  } else if (what < 14 && !serving()->to.up && f->wanted) {
    f->drops = 1; /* the other copy is to leave the record: until then nothing comes of it */
  } else if (what < 20 && f->drops) {
    f->drops = f->wanted = 0;
    line_cut(serving());
  } else if (what < 200) {
    for (uint32_t k = chance(20); k > 0; k--) line_send(serving());
  } else {
    for (uint32_t k = chance(20); k > 0; k--) line_arrive(c);
  }
}

static void act_mirrored(int violent) {
  act(violent);
  look_at_both();
  for (int k = 0; k < 2; k++) {
    act_on_copies(violent > 0);
    look_at_both();
  }
}

static void settle_mirrored(void) {
  if (f->drops) f->drops = f->wanted = 0;
  w->now += 2 * BEAT;
  settle();
  w->now += 2 * BEAT;
  settle();
}

/* After any chaos: all live workers that call are in one epoch, and know it. */
TEST(test_chaos) {
  uint64_t stood = 0, takeovers = 0, held = 0;
  for (SEEDS(seed, 1000)) {
    mirrored_open(1 + (uint32_t)(seed % WORKERS), seed);
    for (uint32_t i = 0; i < w->n; i++) come(i);
    for (int k = 0; k < 1200 && w->server->epoch < EPOCHS - 64; k++) act_mirrored(1);
    settle_mirrored();
    for (uint32_t i = 0; i < w->n; i++) {
      come(i);
      if (w->workers[i].finishes) leave(i);
      if (w->workers[i].alive && w->workers[i].done) { /* it goes, and comes again */
        if (!w->workers[i].up) greet(i);
        close_one(i);
        come(i);
      }
    }
    for (uint32_t i = 0; i < w->n; i++) w->workers[i].open = 0;
    settle_mirrored();
    for (uint32_t i = 0; i < w->n; i++) call(&w->workers[i]);
    settle_mirrored();
    for (int k = 0; k < 5; k++) mlfab__membership_tick(w->server, w->now);
    settle_mirrored();
    for (uint32_t i = 0; i < w->n; i++) {
      worker *me = &w->workers[i];
      if (me->state != IN || me->limit == UINT64_MAX) continue;
      me->calls = me->limit;
      look_at_limit(me);
    }
    settle_mirrored();
    assert_int_equal(w->server->phase, MLFAB__MEMBERSHIP_RUNNING);
    for (uint32_t i = 0; i < w->n; i++) {
      const worker *me = &w->workers[i];
      assert_int_equal(me->state, IN);
      assert_int_equal(me->epoch, w->server->epoch);
      assert_int_equal(me->members, w->n);
      assert_memory_equal(me->list, w->workers[0].list, w->n * sizeof me->list[0]);
    }
    stood += w->went;
    takeovers += f->takeovers;
    held += f->held;
    mirrored_close();
  }
  if (testing_whole()) assert_true(stood > 20 && takeovers > 20 && held > 20);
}

/* Three of five finish at random, and server 0 is replaced again and again: nobody hears of a failure. */
TEST(test_finishing) {
  for (SEEDS(seed, 1000)) {
    mirrored_open(5, seed);
    for (uint32_t i = 0; i < 5; i++) come(i);
    for (uint32_t i = 0; i < 5; i++) call(&w->workers[i]);
    settle_mirrored();
    for (int k = 0; k < 400; k++) {
      if (k % 100 == 7 && k < 300) finish(1 + chance(3));
      act_mirrored(-1);
    }
    settle_mirrored();
    for (int more = 1, turns = 0; more; turns++) {
      assert_true(turns < 20);
      more = 0;
      for (uint32_t i = 0; i < 5; i++) {
        worker *me = &w->workers[i];
        if (me->finishes || me->state != IN || me->limit == UINT64_MAX) continue;
        more |= me->moved != me->epoch;
        me->calls = me->limit;
        look_at_limit(me);
      }
      settle_mirrored();
    }
    for (uint32_t i = 0; i < 5; i++) {
      worker *me = &w->workers[i];
      assert_int_equal(me->verdict.code, 0);
      assert_int_equal(me->state, me->finishes ? OUT : IN);
      if (!me->finishes) assert_int_equal(me->epoch, w->server->epoch);
    }
    mirrored_close();
  }
}

/* A new stream begins, and its mark comes before its records: the standby takes nothing, as it would be half a state. */
TEST(test_mark_too_early) {
  mlfab__mirror_frame head = {0};
  mirrored_open(2, 1);
  for (uint32_t i = 0; i < 2; i++) come(i);
  settle_mirrored();
  uint64_t got = other()->mirror.got;
  assert_true(got > 0);
  line_cut(serving());
  line_up(serving());
  look_at_both();
  while (line_send(serving())) continue;
  line *l = &serving()->to;
  assert_int_equal(line_arrive(serving()), 1); /* it begins */
  for (;; l->begin++, l->count--) {
    unsigned at = l->begin % ROOM;
    assert_true(l->count > 0);
    assert_int_equal(
        mlfab__decode_mirror_frame(l->frames[at].meta, MLFAB__MIRROR_FRAME_BYTES, &head), 0);
    if (head.part != MLFAB__MIRROR_MARK) continue;
    const mlfab__frame_in in = {l->frames[at].type, l->frames[at].bytes, 0, l->frames[at].meta,
                                NULL};
    assert_int_equal(mlfab__mirror_hear(&other()->mirror, &in, w->now, BEAT), MLFAB_ERR_FRAME);
    break;
  }
  assert_true(other()->mirror.got == got);
  mirrored_close();
}

TESTS(NULL, NULL)
