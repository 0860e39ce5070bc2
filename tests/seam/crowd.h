/* crowd.h - many real nodes in one program, between slow links that break: workers, and a server 0 of its own.
 *
 * Time is virtual. Each step delivers one event of one link, drawn from all. So the events of a link arrive in order,
 * and links overtake each other. A link takes few frames at a time. At a break it loses any suffix of them. A bulk that
 * a link borrows must not change before the frame arrives, which is later than on any real link.
 *
 * A crowd hears all frames. Server 0's words must keep the rules of membership.h, and the crowd knows from them who is
 * in which epoch: the oracles of tests use this.
 *
 * crowd.look, a function of the test, hears that a node may have ended requests. A test includes this header once. */
#ifndef CROWD_H
#define CROWD_H

#include "../../mlfab_node.h"
#include "../unit/scale.h"
#include "core/base/rng.h"
#include "core/coll/coll_wire.h"

#include "tests/seam/scene.h"

enum { CROWD_NODES = 42, CROWD_ENDS = 8192, CROWD_EPOCHS = 512, CROWD_FRAMES = 6 };
#define CROWD_BEAT 4000000ull /* a heartbeat: so many times CROWD_STEP */
#define CROWD_STEP 1000ull    /* of time, with each event */

#define SUBMIT(i, request_p, name, ...)                                                  \
  mlfab_node_submit(                                                                     \
      crowd.nodes[i].node,                                                               \
      &(mlfab_call){.size = sizeof(mlfab_call), .kind = MLFAB_CALL_##name, __VA_ARGS__}, \
      crowd.now, request_p)

/* An event on its way to one end of a link. lent: where the sender has the bulk, or NULL. */
typedef struct crowd_item {
  struct crowd_item *next;
  mlfab_io_event event;
  uint8_t *head, *bulk;
  const void *lent;
} crowd_item;

/* One end of a link, with the events on their way to the node there. Frames keep their order; reports tell of sends
 * that have left. Link k + 1 has the ends 2 k and 2 k + 1. */
typedef struct crowd_end {
  uint32_t node, count;
  int up, broken, refused;
  uint64_t connecting; /* the token of a connect that was not reported yet */
  crowd_item *first, **last, *reports, **reports_last; /* last: where the next one goes */
  uint32_t busy; /* its place in crowd.busy, plus one; 0: nothing is on its way */
} crowd_end;

typedef struct crowd_node {
  mlfab_node *node; /* NULL: the process is gone */
  uint64_t due;
  uint32_t life;
  /* The epoch of a worker, as server 0 has told it: listed or standing; 0: none. over: the newest that has ended. */
  uint32_t epoch, over;
  int went; /* an epoch has stood here */
} crowd_node;

typedef struct crowd_epoch {
  uint32_t members, ranks[CROWD_NODES];
  uint64_t ready; /* bit w: server 0 has heard READY, or that it leaves */
  int over, went;
} crowd_epoch;

static struct {
  crowd_node
      nodes[CROWD_NODES]; /* workers, then server 0, then a scheduler, if it is a node of its own */
  uint32_t n, all;        /* workers; nodes */
  mlfab_config config;    /* of all */
  mlfab__rng prng;
  uint64_t now, until, bytes, fails, asked; /* fails: one allocation in so many fails; 0: none */
  uint32_t hidden;                          /* the worker, plus one, that no other worker reaches */
  crowd_end ends[CROWD_ENDS];
  uint32_t nends, busy[CROWD_ENDS], nbusy;
  uint64_t frames, breaks;
  crowd_epoch epochs[CROWD_EPOCHS];
  uint32_t newest; /* epoch */
  char said[320];  /* the last line of a node's log */
  void (*look)(uint32_t i);
  /* A frame arrives. NULL, or: 0: it is lost. It may change the frame's meta, and shorten it. */
  int (*hear)(uint32_t from, uint32_t to, mlfab__header *header, uint8_t *meta,
              const uint8_t *bulk);
} crowd;

static uint32_t chance(uint64_t n) { return (uint32_t)mlfab__rng_below(&crowd.prng, n); }

/* --- what server 0 says --- */

static crowd_epoch *crowd_epoch_of(uint32_t epoch) {
  assert_in_range(epoch, 1, UINT32_MAX);
  return &crowd.epochs[epoch % CROWD_EPOCHS];
}

/* The place of a worker in an epoch, or its number of members. */
static uint32_t crowd_place(uint32_t epoch, uint32_t rank) {
  const crowd_epoch *e = crowd_epoch_of(epoch);
  uint32_t m = 0;
  while (m < e->members && e->ranks[m] != rank) m++;
  return m;
}

/* Numbers of epochs grow by one; an epoch has one list of members, in one order; none is listed when it is over. */
static void crowd_says_list(uint32_t to, const mlfab__membership_list *list,
                            const mlfab__membership_member *members) {
  crowd_epoch *e = crowd_epoch_of(list->epoch);
  if (list->epoch > crowd.newest) {
    memset(e, 0, sizeof *e);
    crowd.newest = list->epoch;
    e->members = list->members;
    for (uint32_t m = 0; m < list->members; m++) e->ranks[m] = members[m].rank;
  }
  assert_int_equal(list->epoch, crowd.newest);
  assert_int_equal(list->members, e->members);
  assert_false(e->over);
  for (uint32_t m = 0; m < e->members; m++) assert_int_equal(members[m].rank, e->ranks[m]);
  assert_true(crowd_place(list->epoch, to) < e->members);
}

/* Server 0 is about to say this: is it right to? */
static void crowd_says(uint32_t to, uint8_t type, const uint8_t *meta, uint32_t bytes) {
  mlfab__membership_member members[CROWD_NODES];
  mlfab__membership_list list;
  mlfab__membership_go go;
  mlfab__membership_over over;
  if (type == MLFAB__MEMBERSHIP_LIST) {
    assert_int_equal(mlfab__decode_membership_list(meta, bytes, &list, members), 0);
    crowd_says_list(to, &list, members);
  } else if (type == MLFAB__MEMBERSHIP_GO) {
    assert_int_equal(mlfab__decode_membership_go(meta, bytes, &go), 0);
    crowd_epoch *e = crowd_epoch_of(go.epoch);
    assert_int_equal(go.epoch, crowd.newest);
    assert_false(e->over);
    e->went = 1;
    for (uint32_t m = 0; m < e->members; m++) assert_true(e->ready >> e->ranks[m] & 1);
  } else if (type == MLFAB__MEMBERSHIP_OVER) {
    assert_int_equal(mlfab__decode_membership_over(meta, bytes, &over), 0);
    assert_true((over.code < 0) == (over.text[0] != 0));
    if (over.epoch <= crowd.newest && over.epoch + CROWD_EPOCHS > crowd.newest) {
      assert_true(crowd_place(over.epoch, to) < crowd_epoch_of(over.epoch)->members);
      crowd_epoch_of(over.epoch)->over = 1;
    }
  }
}

/* Server 0 or a worker hears this. */
static void crowd_hears(uint32_t from, uint32_t to, uint8_t type, const uint8_t *meta,
                        uint32_t bytes) {
  mlfab__membership_member members[CROWD_NODES];
  mlfab__membership_list list;
  mlfab__membership_over over;
  mlfab__membership_ready ready;
  crowd_node *me = &crowd.nodes[to];
  if (type == MLFAB__MEMBERSHIP_LIST &&
      !mlfab__decode_membership_list(meta, bytes, &list, members)) {
    if (list.epoch > me->epoch && list.epoch > me->over) me->epoch = list.epoch;
  } else if (type == MLFAB__MEMBERSHIP_OVER && !mlfab__decode_membership_over(meta, bytes, &over)) {
    if (over.epoch > me->over) me->over = over.epoch;
    if (over.epoch >= me->epoch) me->epoch = 0;
  } else if (type == MLFAB__MEMBERSHIP_GO) {
    me->went = 1;
  } else if (type == MLFAB__MEMBERSHIP_READY &&
             !mlfab__decode_membership_ready(meta, bytes, &ready)) {
    crowd_epoch_of(ready.epoch)->ready |= (uint64_t)1 << from;
  } else if (type == MLFAB__MEMBERSHIP_LEAVE || type == MLFAB__BYE) {
    if (crowd.newest) crowd_epoch_of(crowd.newest)->ready |= (uint64_t)1 << from;
  }
}

/* --- links --- */

static void crowd_touch(uint32_t end) {
  crowd_end *e = &crowd.ends[end];
  int busy = e->first || e->reports;
  if (busy && !e->busy) {
    crowd.busy[crowd.nbusy++] = end;
    e->busy = crowd.nbusy;
  } else if (!busy && e->busy) {
    uint32_t moved = crowd.busy[--crowd.nbusy];
    crowd.busy[e->busy - 1] = moved;
    crowd.ends[moved].busy = e->busy;
    e->busy = 0;
  }
}

static crowd_item *crowd_put(uint32_t end, int report, mlfab_io_event event) {
  crowd_end *e = &crowd.ends[end];
  crowd_item *item = calloc(1, sizeof *item);
  assert_non_null(item);
  item->event = event;
  crowd_item ***last = report ? &e->reports_last : &e->last;
  **last = item;
  *last = &item->next;
  e->count += !report;
  crowd_touch(end);
  return item;
}

#define CROWD_PUT(end, report, ...) crowd_put(end, report, OF(mlfab_io_event, __VA_ARGS__))

static crowd_item *crowd_take(uint32_t end, int report) {
  crowd_end *e = &crowd.ends[end];
  crowd_item **first = report ? &e->reports : &e->first, *item = *first;
  if (!item) return NULL;
  *first = item->next;
  if (!*first && report) e->reports_last = first;
  if (!*first && !report) e->last = first;
  e->count -= !report;
  crowd_touch(end);
  return item;
}

static void crowd_free(crowd_item *item) {
  free(item->head);
  free(item->bulk);
  free(item);
}

static void crowd_check(const crowd_item *item) {
  if (item->lent) assert_memory_equal(item->bulk, item->lent, item->event.bulk_bytes);
}

/* The sender has its memory back: the frames toward this end lie in the link. */
static void crowd_keep(uint32_t end, uint64_t token, int check) {
  for (crowd_item *item = crowd.ends[end].first; item; item = item->next) {
    if (!item->lent || (token && item->event.token != token)) continue;
    if (check) crowd_check(item);
    item->lent = NULL;
  }
}

/* Loses frames toward this end: all but the first few. The others arrive before the node hears of the end. */
static void crowd_lose(uint32_t end, uint32_t keep) {
  crowd_end *e = &crowd.ends[end];
  crowd_item **at = &e->first;
  while (*at && keep > 0) at = &(*at)->next, keep--;
  for (crowd_item *item = *at, *next; item; item = next) {
    next = item->next;
    crowd_free(item);
    e->count--;
  }
  *at = NULL;
  e->last = at;
  crowd_touch(end);
}

/* This end is no longer the node's: nothing more reaches it. */
static void crowd_shut(uint32_t end) {
  crowd_lose(end, 0);
  for (crowd_item *item; (item = crowd_take(end, 1));) crowd_free(item);
  crowd.ends[end].up = 0;
  crowd_keep(end ^ 1, 0, 0);
}

static int crowd_stands(uint32_t end) {
  const crowd_end *e = &crowd.ends[end], *other = &crowd.ends[end ^ 1];
  return e->up && other->up && !e->broken && !other->broken;
}

static void crowd_say_down(uint32_t end, uint32_t keep) {
  crowd_end *e = &crowd.ends[end];
  if (!e->up || e->broken) return;
  crowd_lose(end, keep);
  e->broken = 1;
  e->refused = 0;
  CROWD_PUT(end, 0, .kind = MLFAB_IO_DOWN, .link = end / 2 + 1, .code = MLFAB_ERR_PEER_CLOSED,
            .text = "it broke");
}

static void crowd_break(uint32_t end) {
  if (!crowd_stands(end)) return;
  crowd.breaks++;
  for (uint32_t e = end & ~1u; e <= (end | 1u); e++)
    crowd_say_down(e, chance(crowd.ends[e].count + 1));
}

static uint32_t crowd_new_link(uint32_t from, uint32_t to, uint64_t token) {
  uint32_t end = 0;
  while (end < crowd.nends && (crowd.ends[end].up || crowd.ends[end + 1].up)) end += 2;
  assert_true(end < CROWD_ENDS);
  if (end == crowd.nends) crowd.nends += 2;
  crowd.ends[end] = (crowd_end){.node = from, .up = 1, .connecting = token};
  crowd.ends[end + 1] = (crowd_end){.node = to, .up = 1};
  for (uint32_t e = end; e < end + 2; e++) {
    crowd.ends[e].last = &crowd.ends[e].first;
    crowd.ends[e].reports_last = &crowd.ends[e].reports;
  }
  return end;
}

/* --- nodes --- */

static int crowd_connect(uint32_t i, const mlfab_action *a) {
  uint32_t to = (uint32_t)strtoul(strchr(a->address, ':') + 1, NULL, 10);
  for (uint32_t e = 0; e < crowd.nends; e += 2) {
    if (!crowd.ends[e].up || crowd.ends[e].node != i || crowd.ends[e].connecting != a->token)
      continue;
    crowd_shut(e);
    crowd_say_down(e + 1, 0);
  }
  int reached = crowd.nodes[to].node && (to + 1 != crowd.hidden || i >= crowd.n);
  uint32_t end = crowd_new_link(i, to, a->token);
  if (reached) {
    CROWD_PUT(end, 0, .kind = MLFAB_IO_UP, .link = end / 2 + 1, .token = a->token,
              .caps = MLFAB_CAP_RELIABLE);
    CROWD_PUT(end + 1, 0, .kind = MLFAB_IO_UP, .link = end / 2 + 1, .caps = MLFAB_CAP_RELIABLE);
  } else {
    crowd.ends[end + 1].up = 0;
    CROWD_PUT(end, 0, .kind = MLFAB_IO_DOWN, .token = a->token, .code = MLFAB_ERR_PEER_CLOSED,
              .text = "nobody listens");
  }
  return 0;
}

static int crowd_send(uint32_t end, const mlfab_action *a) {
  crowd_end *other = &crowd.ends[end ^ 1];
  mlfab__header header;
  if (!crowd_stands(end)) return MLFAB_ERR_PEER_CLOSED;
  if (other->count >= CROWD_FRAMES) {
    crowd.ends[end].refused = 1;
    return MLFAB_ERR_AGAIN;
  }
  mlfab__wire_open(a->head, &header);
  if (crowd.ends[end].node == crowd.n)
    crowd_says(other->node, header.type, (const uint8_t *)a->head + MLFAB_HEADER_BYTES,
               header.meta_bytes);
  crowd_item *item =
      CROWD_PUT(end ^ 1, 0, .kind = MLFAB_IO_FRAME, .link = a->link, .token = a->token,
                .head_bytes = a->head_bytes, .bulk_bytes = a->bulk_bytes);
  item->head = malloc(a->head_bytes);
  memcpy(item->head, a->head, a->head_bytes);
  if (a->bulk_bytes == 0) return 0;
  item->bulk = malloc(a->bulk_bytes);
  memcpy(item->bulk, a->bulk, a->bulk_bytes);
  if (a->token) item->lent = a->bulk;
  return 0;
}

/* Carries out what a node asks for. */
static void crowd_pump(uint32_t i) {
  crowd_node *me = &crowd.nodes[i];
  for (mlfab_action a; mlfab_node_next(me->node, crowd.now, &a);) {
    uint32_t end = a.link ? 2 * (a.link - 1) : 0;
    int code = 0;
    if (a.link) end += crowd.ends[end].node != i;
    if (a.kind == MLFAB_ACTION_CONNECT) code = crowd_connect(i, &a);
    if (a.kind == MLFAB_ACTION_SEND) code = crowd_send(end, &a);
    if (a.kind == MLFAB_ACTION_DETACH) crowd_keep(end ^ 1, a.token, 1);
    if (a.kind == MLFAB_ACTION_FILE) code = MLFAB_ERR_UNSUPPORTED;
    if (a.kind == MLFAB_ACTION_DISCONNECT) {
      crowd_shut(end);
      crowd_say_down(end ^ 1, crowd.ends[end ^ 1].count);
    }
    mlfab_node_done(me->node, &a, code, crowd.now);
  }
  me->due = mlfab_node_deadline(me->node);
}

/* Time has passed, or something was submitted: the node does all that it can. */
static void crowd_settle_node(uint32_t i) {
  if (!crowd.nodes[i].node) return;
  if (crowd.nodes[i].due <= crowd.now) mlfab_node_tick(crowd.nodes[i].node, crowd.now);
  crowd_pump(i);
  if (crowd.look) crowd.look(i);
}

static void crowd_deliver(uint32_t end) {
  crowd_end *e = &crowd.ends[end];
  uint32_t i = e->node;
  crowd_item *item = crowd_take(end, !e->first || (e->reports && chance(2)));
  mlfab_io_event *event = &item->event;
  int lost = 0;
  crowd.frames++;
  if (event->kind == MLFAB_IO_UP) e->connecting = 0;
  if (event->kind == MLFAB_IO_DOWN) crowd_shut(end);
  if (event->kind == MLFAB_IO_FRAME) {
    mlfab__header header;
    crowd_end *other = &crowd.ends[end ^ 1];
    crowd_check(item);
    mlfab__wire_open(item->head, &header);
    uint8_t *meta = item->head + MLFAB_HEADER_BYTES;
    lost = crowd.hear && !crowd.hear(other->node, i, &header, meta, item->bulk);
    header.flags &= (uint16_t)~MLFAB__WIRE_BULK_CRC;
    mlfab__wire_seal(item->head, &header, NULL);
    event->head_bytes = MLFAB_HEADER_BYTES + header.meta_bytes;
    if (!lost) crowd_hears(other->node, i, header.type, meta, header.meta_bytes);
    event->head = item->head;
    event->bulk = item->bulk;
    if (event->token && other->up)
      CROWD_PUT(end ^ 1, 1, .kind = MLFAB_IO_SENT, .link = event->link, .token = event->token);
    event->token = 0;
    if (other->refused && other->up && !other->broken)
      CROWD_PUT(end ^ 1, 1, .kind = MLFAB_IO_WRITABLE, .link = event->link);
    other->refused = 0;
  }
  if (!lost) mlfab_node_event(crowd.nodes[i].node, event, crowd.now);
  crowd_free(item);
  crowd_settle_node(i);
}

/* The least that can happen: an event, or time passes. */
static void crowd_step(void) {
  uint64_t due = UINT64_MAX;
  crowd.now += CROWD_STEP;
  for (uint32_t i = 0; i < crowd.all; i++) {
    crowd_node *me = &crowd.nodes[i];
    if (me->node && me->due <= crowd.now) crowd_settle_node(i);
    if (me->node && me->due < due) due = me->due;
  }
  if (crowd.nbusy > 0)
    crowd_deliver(crowd.busy[chance(crowd.nbusy)]);
  else if (due != UINT64_MAX && due > crowd.now)
    crowd.now = crowd.until && crowd.until < due ? crowd.until : due;
}

static inline void crowd_run(uint64_t ns) {
  for (crowd.until = crowd.now + ns; crowd.now < crowd.until;) crowd_step();
  crowd.until = 0;
}

/* One link, drawn from all, breaks. */
static inline void crowd_break_some(void) {
  if (crowd.nends > 0) crowd_break(chance(crowd.nends));
}

/* The links from one node to another break, either way. */
static inline void crowd_part(uint32_t one, uint32_t other) {
  for (uint32_t e = 0; e < crowd.nends; e++)
    if (crowd.ends[e].node == one && crowd.ends[e ^ 1].node == other) crowd_break(e);
}

/* --- they come and go --- */

static void *crowd_allocate(void *user, size_t bytes) {
  (void)user;
  if (crowd.fails && crowd.asked++ % crowd.fails == crowd.fails - 1) return NULL;
  crowd.bytes += bytes;
  return malloc(bytes);
}
static void crowd_release(void *user, void *memory, size_t bytes) {
  (void)user;
  if (memory) crowd.bytes -= bytes;
  free(memory);
}
static uint64_t crowd_clock(void *user) {
  (void)user;
  return crowd.now;
}
static void crowd_log(void *user, int level, const char *line) {
  (void)user, (void)level;
  snprintf(crowd.said, sizeof crowd.said, "%s", line);
  if (getenv("MLFAB_SHOW")) print_message("%llu: %s\n", (unsigned long long)crowd.now, line);
}

static void crowd_open_node(uint32_t i) {
  static const mlfab_env env = {.size = sizeof env,
                                .allocate = crowd_allocate,
                                .release = crowd_release,
                                .clock = crowd_clock,
                                .log = crowd_log};
  crowd_node *me = &crowd.nodes[i];
  mlfab_config c = crowd.config;
  mlfab_error error;
  char address[24];
  c.env = &env;
  c.workers = crowd.n;
  c.servers = c.dedicated = 1;
  c.roles = i < crowd.n    ? MLFAB_ROLE_WORKER
            : i == crowd.n ? MLFAB_ROLE_SERVER
                           : MLFAB_ROLE_SCHEDULER;
  c.rank = (int32_t)(i < crowd.n ? i : 0);
  if (crowd.config.host == 0) c.host = 1 + i % 3; /* members are in another order than ranks */
  c.seed = 1 + chance(1 << 30);
  snprintf(c.coordinator, sizeof c.coordinator, "crowd:%u", crowd.n);
  snprintf(address, sizeof address, "crowd:%u", i);
  if (mlfab_node_open(&c, address, crowd.now, &me->node, &error)) fail_msg("%s", error.text);
  me->life++;
  me->epoch = me->over = 0;
  me->went = 0;
  me->due = crowd.now;
}

/* The process is gone. Its links break. */
static void crowd_kill(uint32_t i) {
  if (!crowd.nodes[i].node) return;
  for (uint32_t e = 0; e < crowd.nends; e++) {
    if (crowd.ends[e].node != i || !crowd.ends[e].up) continue;
    crowd_shut(e);
    crowd_say_down(e ^ 1, chance(crowd.ends[e ^ 1].count + 1));
  }
  mlfab_node_close(&crowd.nodes[i].node);
  crowd.nodes[i].epoch = 0;
}

static int crowd_is_ready(uint32_t i) {
  mlfab_error error;
  int ready = mlfab_node_ready(crowd.nodes[i].node, &error);
  if (ready < 0) fail_msg("node %u: %s", i, error.text);
  return ready;
}

static void crowd_await(uint32_t i) {
  for (uint64_t end = crowd.now + 1000 * CROWD_BEAT; !crowd_is_ready(i); crowd_step())
    assert_true(crowd.now < end);
}

/* So many workers. A test calls crowd_begin, changes crowd.config, and calls crowd_open. */
static void crowd_begin(uint32_t n, uint64_t seed) {
  memset(&crowd, 0, sizeof crowd);
  assert_true(n + 2 <= CROWD_NODES);
  mlfab__rng_seed(&crowd.prng, seed);
  mlfab_config_init(&crowd.config);
  crowd.n = n;
  crowd.now = CROWD_STEP;
  crowd.config.heartbeat_ns = CROWD_BEAT;
  crowd.config.timeout_ns = 100000 * CROWD_BEAT;
  crowd.config.chunk_bytes = 64u << chance(10);
}

static void crowd_open(void) {
  crowd.all = crowd.n + 1 + (crowd.config.scheduler == MLFAB_SCHEDULER_OWN);
  for (uint32_t i = 0; i < crowd.all; i++) crowd_open_node(i);
  for (uint32_t i = 0; i < crowd.all; i++) crowd_await(i);
}

static void crowd_close(void) {
  crowd.fails = 0;
  for (uint32_t i = 0; i < crowd.all; i++) crowd_kill(i);
  for (uint32_t e = 0; e < crowd.nends; e++)
    if (crowd.ends[e].up) crowd_shut(e);
  crowd.all = 0;
  assert_int_equal(crowd.bytes, 0);
}

static inline mlfab_stats crowd_stats(uint32_t i) {
  mlfab_stats stats;
  assert_int_equal(mlfab_node_stats(crowd.nodes[i].node, &stats, sizeof stats), 0);
  return stats;
}

/* Has this request ended? Its result, and the words of its error. */
static inline int crowd_test(uint32_t i, mlfab_request request, mlfab_error *error) {
  mlfab_result result;
  int done = 0;
  memset(error, 0, sizeof *error);
  assert_int_equal(mlfab_node_test(crowd.nodes[i].node, request, &done, &result), 0);
  if (done && result.status) {
    assert_int_equal(mlfab_node_last_error(crowd.nodes[i].node, error), 0);
    assert_int_equal(error->code, result.status);
    assert_int_equal(error->rank, result.rank);
  }
  return done;
}

#endif
