/* talk.h - conversations with one real node: a test plays all its peers, and sees frames only.
 *
 * A scene reads as a conversation. SAY is a frame from a peer to the node. HEAR is the node's next frame to that peer, and
 * HUSH says that there is no other. CALL is a call of the node's program.
 *
 *    TALK(.workers = 2);                              joins; all played peers greet. When the scene ends, all memory is free
 *    mlfab_request push = CALL(PUSH, BUFS({0, 0, weights, COUNT}));
 *    HEAR_PUSH(SERVER(0), m->seq == 1 && segments[0].bytes == 4 * COUNT);
 *    SAY(SERVER(0), GRANT, grant, .seq = 1, .upto = 4096, .generation = 1);
 *    HEAR(SERVER(0), CHUNK, chunk, m->offset == 0 && h->bulk_bytes == 4096);
 *    HUSH(SERVER(0));
 *    PENDING(push);
 *
 * Time is virtual: it stands still unless talk_wait moves it. Peers beat meanwhile. The harness joins, answers HELLO,
 * WHERE and probes, takes MEET, and hangs up after BYE, unless `by_hand` is set. Then the test sees these frames and answers them itself.
 * A condition sees the decoded frame as m, and the frame with its bulk as h. */
#ifndef TALK_H
#define TALK_H

#include "core/reshard/reshard_wire.h"
#include "core/sched/sched_wire.h"
#include "core/wire/peer_wire.h"
#include "mlfab_node.h"

#ifndef SCENE_ENDS
#define SCENE_ENDS talk_close()
#endif
#include "tests/seam/scene.h"

/* --- peers --- */

/* Whom a link is to: its first frame tells. The node calls the first six; the others call the node. */
enum {
  TALK_GATE = 1,
  TALK_SERVER,
  TALK_PLANNED,
  TALK_ACROSS,
  TALK_VOTER,
  TALK_HOP,
  TALK_WORKER,
  TALK_SCHEDULER,
  TALK_FROM_SERVER,
  TALK_FROM_VOTER,
  TALK_MEMBER,
  TALK_JOINER,
  TALK_STRANGER
};
#define TALK_ID(kind, number) ((uint32_t)(kind) << 16 | (uint32_t)(number))
#define GATE TALK_ID(TALK_GATE, 0)           /* server 0, at which the node joins */
#define SERVER(k) TALK_ID(TALK_SERVER, k)    /* called by the node's worker, or scheduler process */
#define PLANNED(k) TALK_ID(TALK_PLANNED, k)  /* server k, called by a scheduler beside server 0 */
#define ACROSS(k) TALK_ID(TALK_ACROSS, k)    /* server k, called by the node's server */
#define VOTER(v) TALK_ID(TALK_VOTER, v)      /* voter v, called by the node's copy of a server */
#define HOP(r) TALK_ID(TALK_HOP, r)          /* worker r, called by the node's worker */
#define WORKER(r) TALK_ID(TALK_WORKER, r)    /* calls the node's server */
#define SCHEDULER TALK_ID(TALK_SCHEDULER, 0) /* calls the node's server */
#define FROM_SERVER(k) TALK_ID(TALK_FROM_SERVER, k) /* server k, calls the node's server */
#define FROM_VOTER(v) TALK_ID(TALK_FROM_VOTER, v)
#define MEMBER(r) TALK_ID(TALK_MEMBER, r)     /* worker r, calls the node's worker */
#define JOINER(n) TALK_ID(TALK_JOINER, n)     /* node n, joins at the node */
#define STRANGER(i) TALK_ID(TALK_STRANGER, i) /* says nothing by itself */

#ifndef TALK_CROWD
#define TALK_CROWD 90 /* the most workers that a test plays */
#endif
enum { TALK_NODES = TALK_CROWD + 6, TALK_PEERS = 2 * TALK_NODES, TALK_LINKS = 8192 };
enum { TALK_FILES = 32 };

typedef struct talk_frame {
  struct talk_frame *next;
  mlfab__header header;
  uint8_t *meta, *bulk; /* copies */
  uint32_t meta_bytes, bulk_bytes;
  const void *lent; /* the bulk itself, if it was sent with a token */
} talk_frame;

typedef struct talk_peer {
  uint32_t id, link;   /* link 0: none */
  uint32_t greeted;    /* HELLO was answered on this link */
  uint32_t parts;      /* the node has said BYE on this link */
  uint32_t closed;     /* how often the node has hung up */
  uint32_t generation; /* of a worker's stream at this server: in the next HELLO_ACK */
  int room;            /* frames that the link takes: -1 for any number */
  int mute;            /* is silent: does not beat or answer probes */
  uint64_t said_ns;
  talk_frame *first;
  uint64_t probe_ns;         /* of a probe that was heard and not answered, or 0 */
  char why[MLFAB__TEXT_MAX]; /* the text of the last REFUSE or BYE */
  int32_t code;
} talk_peer;

/* A bulk that the transport has borrowed. Detached: the node has taken it back, and SENT may still come. */
typedef struct talk_loan {
  enum { LOAN_OVER, LOAN_LIVE, LOAN_DETACHED } state;
  uint32_t who, link, bytes;
  uint64_t token;
  const uint8_t *data;
} talk_loan;

typedef struct talk_file {
  char path[512];
  uint8_t *data;
  size_t bytes;
} talk_file;

typedef struct talk {
  /* The test may set these before talk_open, or at any time. */
  int by_hand;            /* the test does the handshakes */
  int depth;              /* of calls of talk_run */
  int hold_sent;          /* SENT is reported by talk_sent, not at once */
  int hold_tick;          /* only talk_wait lets background work go on */
  int as_is;              /* the node gets the bulk that is said itself, not a copy of it */
  int has_files;          /* file operations are carried out; 0: the driver has none */
  int32_t file_code;      /* with which they fail */
  mlfab__hello_ack ack;   /* the harness's answer to HELLO, but for server and generation */
  mlfab__welcome welcome; /* likewise to JOIN, but for its list */
  /* Changes what HELLO is answered, just before. */
  void (*greeting)(uint32_t who, mlfab__hello_ack *ack);
  uint32_t caps;
  /* The test may read these. */
  mlfab_node *node;
  mlfab_config config; /* complete as far as the harness needs it */
  uint64_t now;
  const talk_frame *heard;     /* by the last HEAR */
  mlfab__hello_ack hello_ack;  /* the node's last answer to a played HELLO */
  char log[512], earlier[512]; /* its last line; the one before */
  /* Memory: in use; allocations; from this one on all fail; this one fails. */
  uint64_t bytes, calls, fail_from, fail_at;
  talk_loan *loans;
  uint32_t nloans, detached;        /* detached: loans that the node has taken back so far */
  uint32_t incarnation[TALK_NODES]; /* of played nodes; so is nonce */
  uint64_t nonce[TALK_NODES];
  mlfab__segment segments[MLFAB__SEGMENTS_MAX]; /* of the last push or pull that was heard */
  uint64_t versions[MLFAB__SLICES_MAX];
  uint8_t meta[MLFAB_META_MAX]; /* of what is being said */
  /* The harness's own. */
  talk_peer peers[TALK_PEERS];
  uint32_t npeers, nlinks, loans_room;
  struct {
    uint32_t who, number; /* who 0: nothing was said yet; the number is that of the address */
    uint8_t up, called;   /* called: by which sort of address */
  } links[TALK_LINKS];
  uint8_t away[4][TALK_NODES];
  mlfab_io_event *events;
  uint32_t events_at, nevents, events_room;
  talk_file files[TALK_FILES], writing[4];
  char names[4096];
} talk;

static talk talk_first, *t = &talk_first; /* the conversation */

static inline talk_peer *talk_peer_of(uint32_t who) {
  for (uint32_t i = 0; i < t->npeers; i++)
    if (t->peers[i].id == who) return &t->peers[i];
  assert_true(t->npeers < TALK_PEERS);
  talk_peer *p = &t->peers[t->npeers++];
  *p = (talk_peer){.id = who, .room = -1, .generation = 1};
  return p;
}

/* The node number of a peer. */
static inline uint32_t talk_node_of(uint32_t who) {
  uint32_t k = who & 0xffff, servers = t->config.dedicated ? t->config.workers_max : 0;
  switch (who >> 16) {
    case TALK_GATE:
      return servers;
    case TALK_SERVER:
    case TALK_PLANNED:
    case TALK_ACROSS:
    case TALK_FROM_SERVER:
      return servers + k;
    case TALK_VOTER:
    case TALK_FROM_VOTER:
      return t->config.workers_max + k;
    case TALK_SCHEDULER:
      return t->config.scheduler == MLFAB_SCHEDULER_BESIDE
                 ? servers
                 : t->config.workers_max +
                       (servers ? t->config.servers_max * (1 + t->config.replicas) : 0);
    default:
      return k;
  }
}

static inline void talk_drop_frame(talk_peer *p) {
  talk_frame *f = p->first;
  p->first = f->next;
  free(f->meta);
  free(f->bulk);
  free(f);
}

/* --- what the node asks for --- */

static inline void talk_event(mlfab_io_event event) {
  if (t->nevents == t->events_room) {
    t->events_room = t->events_room ? 2 * t->events_room : 64;
    t->events = realloc(t->events, t->events_room * sizeof *t->events);
  }
  t->events[t->nevents++] = event;
}

static inline uint32_t talk_new_link(uint32_t who, uint64_t token) {
  assert_true(++t->nlinks < TALK_LINKS);
  t->links[t->nlinks].who = who;
  t->links[t->nlinks].up = 1;
  if (who) talk_peer_of(who)->link = t->nlinks;
  if (who) talk_peer_of(who)->parts = 0;
  talk_event(
      (mlfab_io_event){.kind = MLFAB_IO_UP, .link = t->nlinks, .token = token, .caps = t->caps});
  return t->nlinks;
}

/* Addresses: "talk:g" of server 0 for joining, "talk:s1" of servers, "talk:c1" of their replicas, "talk:w1" of workers. */
static inline int talk_connect(const mlfab_action *a) {
  static const char sorts[] = "gscw";
  const char *sort = strchr(sorts, a->address[5]);
  uint32_t number = (uint32_t)strtoul(a->address + 6, NULL, 10);
  assert_true(!strncmp(a->address, "talk:", 5) && sort && number < TALK_NODES);
  if (t->away[sort - sorts][number]) {
    talk_event(OF(mlfab_io_event, .kind = MLFAB_IO_DOWN, .token = a->token,
                  .code = MLFAB_ERR_PEER_CLOSED, .text = "nobody answers"));
    return 0;
  }
  uint32_t link = talk_new_link(0, a->token);
  t->links[link].number = number;
  t->links[link].called = (uint8_t)*sort;
  return 0;
}

/* Whom the node has called, by its first frame. */
static inline uint32_t talk_identify(uint32_t link, uint8_t type, const uint8_t *meta,
                                     uint32_t bytes) {
  mlfab__hello hello;
  uint32_t k = t->links[link].number;
  if (t->links[link].called == 'g') return GATE;
  if (type == MLFAB__MEET) return HOP(k);
  if (type != MLFAB__HELLO || mlfab__decode_hello(meta, bytes, &hello)) return STRANGER(link);
  if (hello.roles & MLFAB_ROLE_WORKER) return SERVER(k);
  if (hello.roles == MLFAB_ROLE_SCHEDULER)
    return t->config.roles == MLFAB_ROLE_SCHEDULER ? SERVER(k) : PLANNED(k);
  if (hello.roles == MLFAB_ROLE_SERVER) return ACROSS(k);
  return VOTER(t->links[link].called == 'c' ? k + t->config.servers_max : k);
}

static inline void talk_end_loans(uint32_t link) {
  for (uint32_t i = 0; i < t->nloans; i++)
    if (t->loans[i].link == link) t->loans[i].state = LOAN_OVER;
}

static inline void talk_lend(uint32_t who, const mlfab_action *a) {
  uint32_t i = 0;
  if (!t->hold_sent) {
    talk_event((mlfab_io_event){.kind = MLFAB_IO_SENT, .link = a->link, .token = a->token});
    return;
  }
  while (i < t->nloans && t->loans[i].state != LOAN_OVER) i++;
  if (i == t->loans_room) {
    t->loans_room = i ? 2 * i : 64;
    t->loans = realloc(t->loans, t->loans_room * sizeof *t->loans);
  }
  if (i == t->nloans) t->nloans++;
  t->loans[i] = (talk_loan){LOAN_LIVE, who, a->link, a->bulk_bytes, a->token, a->bulk};
}

static inline int talk_take(const mlfab_action *a) {
  mlfab__header header;
  const uint8_t *meta = (const uint8_t *)a->head + MLFAB_HEADER_BYTES;
  if (!t->links[a->link].up) return MLFAB_ERR_PEER_CLOSED;
  mlfab__wire_open(a->head, &header);
  assert_int_equal(header.meta_bytes + MLFAB_HEADER_BYTES, a->head_bytes);
  uint32_t who = t->links[a->link].who;
  if (!who) who = talk_identify(a->link, header.type, meta, header.meta_bytes);
  talk_peer *p = talk_peer_of(who);
  if (!t->links[a->link].who) {
    t->links[a->link].who = who;
    p->link = a->link;
    p->greeted = p->parts = 0;
    p->said_ns = t->now;
  }
  int free = header.type == MLFAB__HELLO || header.type == MLFAB__MEET;
  if (p->room == 0 && !free) return MLFAB_ERR_AGAIN;
  if (p->room > 0 && !free) p->room--;
  if (header.type == MLFAB__HEARTBEAT) {
    mlfab__heartbeat beat;
    assert_int_equal(mlfab__decode_heartbeat(meta, header.meta_bytes, &beat), 0);
    if (beat.kind == MLFAB__BEAT_PROBE) p->probe_ns = beat.sent_ns;
    return 0;
  }
  talk_frame *f = calloc(1, sizeof *f), **last = &p->first;
  f->header = header;
  f->meta_bytes = header.meta_bytes;
  f->bulk_bytes = a->bulk_bytes;
  f->meta = malloc(header.meta_bytes + 1u);
  memcpy(f->meta, meta, header.meta_bytes);
  if (a->bulk && a->bulk_bytes) {
    f->bulk = malloc(a->bulk_bytes);
    memcpy(f->bulk, a->bulk, a->bulk_bytes);
  }
  if (a->token) f->lent = a->bulk;
  while (*last) last = &(*last)->next;
  *last = f;
  mlfab__refuse refuse;
  mlfab__bye bye;
  if (header.type == MLFAB__REFUSE && !mlfab__decode_refuse(f->meta, f->meta_bytes, &refuse)) {
    p->code = refuse.code;
    memcpy(p->why, refuse.text, sizeof p->why);
  }
  if (header.type == MLFAB__BYE && !mlfab__decode_bye(f->meta, f->meta_bytes, &bye)) {
    p->code = bye.code;
    memcpy(p->why, bye.text, sizeof p->why);
    p->parts = 1; /* talk_answer hangs up */
  }
  if (a->token) talk_lend(who, a);
  return 0;
}

static inline int talk_detach(const mlfab_action *a) {
  uint32_t found = 0;
  for (uint32_t i = 0; i < t->nloans; i++) {
    talk_loan *l = &t->loans[i];
    if (l->state != LOAN_LIVE || l->link != a->link || l->token != a->token) continue;
    l->state = LOAN_DETACHED;
    found++;
  }
  if (t->hold_sent && t->links[a->link].up)
    assert_true(found > 0); /* nothing unknown is taken back */
  t->detached += found;
  return 0;
}

static inline void talk_disconnect(uint32_t link) {
  talk_peer *p = t->links[link].who ? talk_peer_of(t->links[link].who) : NULL;
  t->links[link].up = 0;
  talk_end_loans(link);
  if (!p || p->link != link) return;
  p->link = p->greeted = p->parts = 0;
  p->closed++;
}

static inline talk_file *talk_file_of(const char *path, int create) {
  for (uint32_t i = 0; i < TALK_FILES; i++)
    if (!strcmp(t->files[i].path, path)) return &t->files[i];
  return create ? talk_file_of("", 0) : NULL;
}

/* Files become visible at LAST, under their names. One directory has them all. */
static inline int talk_file_op(const mlfab_action *a) {
  const mlfab_file_op *op = a->file;
  mlfab_io_event e = {.kind = MLFAB_IO_FILE, .token = a->token, .code = t->file_code};
  if (!t->has_files) return MLFAB_ERR_UNSUPPORTED;
  talk_file *w = &t->writing[op->stream], *f = talk_file_of(op->path, 0);
  if (op->kind == MLFAB_FILE_ABORT || (op->flags & MLFAB_FILE_FIRST)) {
    free(w->data);
    *w = (talk_file){.bytes = 0};
  }
  if (e.code) {
    e.text = "the disk is broken";
  } else if (op->kind == MLFAB_FILE_WRITE) {
    w->data = realloc(w->data, w->bytes + op->head_bytes + op->bulk_bytes + 1);
    if (op->head_bytes) memcpy(w->data + w->bytes, op->head, op->head_bytes);
    if (op->bulk_bytes) memcpy(w->data + w->bytes + op->head_bytes, op->bulk, op->bulk_bytes);
    w->bytes += op->head_bytes + op->bulk_bytes;
    if (op->flags & MLFAB_FILE_LAST) {
      f = talk_file_of(op->path, 1);
      assert_non_null(f);
      free(f->data);
      *f = *w;
      snprintf(f->path, sizeof f->path, "%s", op->path);
      *w = (talk_file){.bytes = 0};
    }
  } else if (op->kind == MLFAB_FILE_READ && f) {
    size_t at = op->offset < f->bytes ? (size_t)op->offset : f->bytes;
    e.bulk = f->data + at;
    e.bulk_bytes = (uint32_t)(f->bytes - at < op->bytes ? f->bytes - at : op->bytes);
  } else if (op->kind == MLFAB_FILE_READ) {
    e.code = MLFAB_ERR_IO;
    e.text = "no such file";
  } else if (op->kind == MLFAB_FILE_LIST) {
    size_t at = 0, dir = strlen(op->path);
    for (uint32_t i = 0; i < TALK_FILES; i++) {
      const char *name = t->files[i].path;
      if (strncmp(name, op->path, dir) || strncmp(name + dir, "/checkpoint-", 12)) continue;
      at += (size_t)snprintf(t->names + at, sizeof t->names - at, "%s\n", name + dir + 1);
    }
    e.bulk = t->names;
    e.bulk_bytes = (uint32_t)at;
  } else if (op->kind == MLFAB_FILE_REMOVE && f) {
    free(f->data);
    *f = (talk_file){.bytes = 0};
  }
  talk_event(e);
  return 0;
}

static inline int talk_act(const mlfab_action *a) {
  switch (a->kind) {
    case MLFAB_ACTION_SEND:
      return talk_take(a);
    case MLFAB_ACTION_CONNECT:
      return talk_connect(a);
    case MLFAB_ACTION_DETACH:
      return talk_detach(a);
    case MLFAB_ACTION_FILE:
      return talk_file_op(a);
    case MLFAB_ACTION_PROBE:
      return MLFAB_ERR_UNSUPPORTED;
    default:
      talk_disconnect(a->link);
      return 0;
  }
}

/* --- speaking, hearing, time --- */

static inline void talk_run(void);

/* Says a frame whose meta is in t->meta. The node gets a copy, which is gone when it has handled the frame. */
static inline void talk_say(uint32_t who, uint8_t type, uint32_t meta_bytes, const void *bulk,
                            uint32_t bulk_bytes) {
  talk_peer *p = talk_peer_of(who);
  uint32_t node = talk_node_of(who);
  mlfab__header header = OF(
      mlfab__header, .type = type, .meta_bytes = meta_bytes, .bulk_bytes = bulk_bytes,
      .job = mlfab__hash(0, t->config.job, strlen(t->config.job)),
      .epoch = t->ack.term ? t->ack.term : 1, .sender = node, .incarnation = t->incarnation[node]);
  uint8_t *head = malloc(MLFAB_HEADER_BYTES + meta_bytes), *copy = malloc(bulk_bytes + 1u);
  if (!p->link) fail_msg("a peer without a link (%u, %u) speaks", who >> 16, who & 0xffff);
  memcpy(head + MLFAB_HEADER_BYTES, t->meta, meta_bytes);
  if (bulk && !t->as_is) memcpy(copy, bulk, bulk_bytes);
  mlfab__wire_seal(head, &header, bulk);
  const mlfab_io_event e = OF(mlfab_io_event, .kind = MLFAB_IO_FRAME, .link = p->link, .head = head,
                              .head_bytes = MLFAB_HEADER_BYTES + meta_bytes,
                              .bulk = t->as_is ? bulk
                                      : bulk   ? copy
                                               : NULL,
                              .bulk_bytes = bulk_bytes);
  p->said_ns = t->now;
  mlfab_node_event(t->node, &e, t->now);
  free(head);
  free(copy);
  talk_run();
}

#define SAY_BULK(who, TYPE, name, data, bytes, ...)                                                \
  talk_say(who, MLFAB__##TYPE, mlfab__encode_##name(t->meta, &(const mlfab__##name){__VA_ARGS__}), \
           data, bytes)
#define SAY(who, TYPE, name, ...) SAY_BULK(who, TYPE, name, NULL, 0, __VA_ARGS__)
/* A frame with a list. Its entries: LIST(mlfab__plan_entry, {.id = 1}, {.id = 2}). The frame's count is the test's. */
#define LIST(type, ...) ((const type[]){__VA_ARGS__})
#define SAY_LIST(who, TYPE, name, list, ...) \
  talk_say(who, MLFAB__##TYPE,               \
           mlfab__encode_##name(t->meta, &(const mlfab__##name){__VA_ARGS__}, list), NULL, 0)
/* PUSH, PULL and GROUP have two lists. SEGMENTS and VERSIONS stand for a count and a list, in this order. Zeros in
 * members, generation, scale, parts and bytes stand for the usual values. */
#define SEGMENTS(...)                                               \
  sizeof((mlfab__segment[]){__VA_ARGS__}) / sizeof(mlfab__segment), \
      LIST(mlfab__segment, __VA_ARGS__)
#define VERSIONS(...) \
  sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t), LIST(uint64_t, __VA_ARGS__)
#define NO_VERSIONS 0, NULL
#define SAY_PUSH(who, data, data_bytes, lists, ...) \
  TALK_PUSH(who, data, data_bytes, lists, __VA_ARGS__)
#define TALK_PUSH(who, data, data_bytes, n, segs, v, vers, ...) \
  talk_push(who, (mlfab__push){__VA_ARGS__}, n, segs, v, vers, data, data_bytes)
#define SAY_PULL(who, ...) TALK_PULL(who, __VA_ARGS__)
#define TALK_PULL(who, n, segs, v, vers, ...) \
  talk_pull(who, (mlfab__pull){__VA_ARGS__}, n, segs, v, vers)

static inline void talk_push(uint32_t who, mlfab__push m, size_t n, const mlfab__segment *segments,
                             size_t nversions, const uint64_t *versions, const void *bulk,
                             uint32_t bulk_bytes) {
  uint64_t sum = 0;
  for (size_t i = 0; i < n; i++) sum += segments[i].bytes;
  if (!m.members) m.members = 1;
  if (!m.generation) m.generation = talk_peer_of(who)->generation;
  if (m.scale >= 0 && m.scale <= 0) m.scale = 1;
  if (!m.parts) m.parts = 1;
  if (!m.bytes) m.bytes = sum;
  m.segments = (uint32_t)n;
  m.versions = (uint32_t)nversions;
  talk_say(who, MLFAB__PUSH, mlfab__encode_push(t->meta, &m, segments, versions), bulk, bulk_bytes);
}

static inline void talk_pull(uint32_t who, mlfab__pull m, size_t n, const mlfab__segment *segments,
                             size_t nsinces, const uint64_t *sinces) {
  m.segments = (uint32_t)n;
  m.sinces = (uint32_t)nsinces;
  talk_say(who, MLFAB__PULL, mlfab__encode_pull(t->meta, &m, segments, sinces), NULL, 0);
}

static inline void talk_wrong(const talk_frame *h, uint32_t who, const char *wish, const char *file,
                              int line) {
  static const char *const names[] = {"",           "GATE",   "SERVER", "PLANNED",   "ACROSS",
                                      "VOTER",      "HOP",    "WORKER", "SCHEDULER", "FROM_SERVER",
                                      "FROM_VOTER", "MEMBER", "JOINER", "STRANGER"};
  print_error("%s(%u) was to hear %s, and heard ", names[who >> 16], who & 0xffff, wish);
  if (!h) print_error("nothing\n");
  for (uint32_t i = 0; h && i < h->meta_bytes && i < 160; i++)
    print_error(i ? i % 8 ? "%02x" : " %02x" : "%02x", h->meta[i]);
  if (h)
    print_error("\n  as a %s with %u bytes of meta and %u of bulk\n",
                mlfab__frame_name(h->header.type), h->meta_bytes, h->bulk_bytes);
  _fail(file, line);
}

/* The next frame to this peer, which must be of this type. It is valid until the next one to this peer is heard. */
static inline const talk_frame *talk_hear(uint32_t who, uint8_t type, const char *wish,
                                          const char *file, int line) {
  static talk_frame kept;
  talk_frame *f = talk_peer_of(who)->first;
  if (!f || f->header.type != type) talk_wrong(f, who, wish, file, line);
  free(kept.meta);
  free(kept.bulk);
  kept = *f;
  talk_peer_of(who)->first = f->next;
  free(f);
  t->heard = &kept;
  return t->heard;
}

#define TALK_HEAR(who, TYPE, name, decoded, ...)                                    \
  do {                                                                              \
    const talk_frame *h = talk_hear(who, MLFAB__##TYPE, #TYPE, __FILE__, __LINE__); \
    mlfab__##name m_, *m = &m_;                                                     \
    if ((decoded) || !(__VA_ARGS__))                                                \
      talk_wrong(h, who, #TYPE " with " #__VA_ARGS__, __FILE__, __LINE__);          \
  } while (0)
#define HEAR(who, TYPE, name, ...) \
  TALK_HEAR(who, TYPE, name, mlfab__decode_##name(h->meta, h->meta_bytes, m), __VA_ARGS__)
/* The list is decoded into `list`, which has room for the most of its type. */
#define HEAR_LIST(who, TYPE, name, list, ...) \
  TALK_HEAR(who, TYPE, name, mlfab__decode_##name(h->meta, h->meta_bytes, m, list), __VA_ARGS__)
/* The lists are in t->segments and t->versions. */
#define HEAR_PUSH(who, ...)  \
  TALK_HEAR(who, PUSH, push, \
            mlfab__decode_push(h->meta, h->meta_bytes, m, t->segments, t->versions), __VA_ARGS__)
#define HEAR_PULL(who, ...)  \
  TALK_HEAR(who, PULL, pull, \
            mlfab__decode_pull(h->meta, h->meta_bytes, m, t->segments, t->versions), __VA_ARGS__)
/* Nothing more was said to this peer. */
#define HUSH(who)                                               \
  do {                                                          \
    const talk_frame *h_ = talk_peer_of(who)->first;            \
    if (h_) talk_wrong(h_, who, "nothing", __FILE__, __LINE__); \
  } while (0)

/* Forgets all frames to this peer; returns how many frames. */
static inline uint32_t talk_skip(uint32_t who) {
  talk_peer *p = talk_peer_of(who);
  uint32_t n = 0;
  for (; p->first; n++) talk_drop_frame(p);
  return n;
}

static inline int talk_linked(uint32_t who) { return talk_peer_of(who)->link != 0; }

/* --- manners: what peers say by themselves --- */

static inline void talk_greet(uint32_t who) {
  talk_peer *p = talk_peer_of(who);
  mlfab__hello_ack ack = t->ack;
  ack.server = who & 0xffff;
  ack.generation = p->generation;
  ack.nonce = t->nonce[talk_node_of(who)];
  if (t->greeting) t->greeting(who, &ack);
  p->generation = ack.generation;
  p->greeted = 1;
  talk_say(who, MLFAB__HELLO_ACK, mlfab__encode_hello_ack(t->meta, &ack), NULL, 0);
}

/* Says WELCOME, with all servers. */
static inline void talk_say_welcome(void) {
  static uint8_t bulk[TALK_NODES * (MLFAB__ADDRESSES_MAX + 32)];
  uint32_t n = t->config.servers_max * (1 + t->config.replicas), at = 0;
  mlfab__welcome welcome = t->welcome;
  uint32_t voters = n + (t->config.replicas > 0);
  for (uint32_t s = 0; s < voters; s++) {
    uint32_t node = talk_node_of(SERVER(s)), server = s % t->config.servers_max;
    mlfab__member_info info = OF(mlfab__member_info, .node = node, .roles = MLFAB_ROLE_SERVER,
                                 .incarnation = t->incarnation[node], .nonce = t->nonce[node]);
    if (server >= t->config.servers && s < n) continue; /* may come later */
    snprintf(info.addresses, sizeof info.addresses, "talk:%c%u",
             s < t->config.servers_max ? 's' : 'c', s < n ? server : t->config.servers_max);
    at += mlfab__encode_member_info(bulk + at, sizeof bulk - at, &info);
    welcome.nodes++;
  }
  talk_say(GATE, MLFAB__WELCOME, mlfab__encode_welcome(t->meta, &welcome), bulk, at);
}

/* The link to this peer breaks. */
static inline void talk_hang_up(talk_peer *p) {
  uint32_t link = p->link;
  p->link = p->greeted = p->parts = 0;
  t->links[link].up = 0;
  talk_end_loans(link);
  talk_event(OF(mlfab_io_event, .kind = MLFAB_IO_DOWN, .link = link, .code = MLFAB_ERR_PEER_CLOSED,
                .text = "the connection broke"));
}

/* Answers a frame to one peer, if manners ask for it. Returns whether it did. */
static inline int talk_answer(talk_peer *p) {
  uint32_t kind = p->id >> 16, type = p->first ? p->first->header.type : 0;
  if (!p->link) return 0;
  if (p->parts) {
    talk_hang_up(p);
    return 1;
  }
  if (p->probe_ns && !p->mute) {
    uint64_t asked_ns = p->probe_ns;
    p->probe_ns = 0;
    SAY(p->id, HEARTBEAT, heartbeat, .sent_ns = asked_ns, .kind = MLFAB__BEAT_ANSWER);
    return 1;
  }
  if ((type == MLFAB__MEET && kind == TALK_HOP) || (type == MLFAB__MEMBER && kind == TALK_SERVER)) {
    talk_drop_frame(p);
  } else if (type == MLFAB__HELLO && !p->greeted) {
    talk_drop_frame(p);
    talk_greet(p->id);
  } else if (type == MLFAB__WHERE && kind == TALK_SERVER) {
    mlfab__where where;
    assert_int_equal(mlfab__decode_where(p->first->meta, p->first->meta_bytes, &where), 0);
    mlfab__member there = {.node = where.node, .incarnation = t->incarnation[where.node]};
    snprintf(there.addresses, sizeof there.addresses, "talk:w%u", where.node);
    talk_drop_frame(p);
    talk_say(p->id, MLFAB__THERE, mlfab__encode_member(t->meta, &there), NULL, 0);
  } else if (type == MLFAB__JOIN && kind == TALK_GATE) {
    talk_drop_frame(p);
    talk_say_welcome();
  } else {
    return 0;
  }
  return 1;
}

/* Lets the node do all that it can do now. */
static inline void talk_run(void) {
  int outermost = t->depth++ == 0; /* answers come from it */
  for (uint32_t steps = 0, more = 1; more; steps++) {
    assert_true(steps < 10000000); /* else the node never rests */
    more = 0;
    for (mlfab_action a; mlfab_node_next(t->node, t->now, &a);)
      mlfab_node_done(t->node, &a, talk_act(&a), t->now);
    if (t->events_at < t->nevents) {
      mlfab_io_event e = t->events[t->events_at++];
      if (t->events_at == t->nevents) t->events_at = t->nevents = 0;
      mlfab_node_event(t->node, &e, t->now);
      more = 1;
    } else if (!t->hold_tick && mlfab_node_deadline(t->node) <= t->now) {
      mlfab_node_tick(t->node, t->now);
      more = 1;
    }
    for (uint32_t i = 0; !more && !t->by_hand && outermost && i < t->npeers; i++)
      more |= (uint32_t)talk_answer(&t->peers[i]);
  }
  t->depth--;
}

static inline void talk_beat(uint64_t every_ns) {
  for (uint32_t i = 0; i < t->npeers; i++) {
    talk_peer *p = &t->peers[i];
    if (!p->link || p->mute || t->now - p->said_ns < every_ns) continue;
    SAY(p->id, HEARTBEAT, heartbeat, .sent_ns = t->now);
  }
}

/* Time passes: timers run, and peers beat. */
static inline void talk_wait(uint64_t ns) {
  uint64_t end = t->now + ns, beat = t->config.heartbeat_ns / 2;
  talk_run();
  while (t->now < end) {
    uint64_t due = mlfab_node_deadline(t->node);
    if (due <= t->now) mlfab_node_tick(t->node, t->now); /* hold_tick */
    due = due <= t->now ? t->now + 1 : due;
    if (due > t->now + beat) due = t->now + beat;
    t->now = due < end ? due : end;
    talk_beat(beat);
    talk_run();
  }
}

/* --- links --- */

static inline uint8_t *talk_away(uint32_t who) {
  uint32_t kind = who >> 16, sort = kind == TALK_GATE ? 0 : kind == TALK_HOP ? 3 : 1;
  return &t->away[sort][who & 0xffff];
}

/* The link to this peer breaks; frames that were not heard yet are kept. If the node calls this peer, it does not
 * answer until talk_back. */
static inline void talk_break(uint32_t who) {
  assert_true(talk_linked(who));
  if (who >> 16 <= TALK_HOP) *talk_away(who) = 1;
  talk_hang_up(talk_peer_of(who));
  talk_run();
}

/* A peer that calls: a new link, and nothing said on it. */
static inline void talk_dial(uint32_t who) {
  talk_new_link(who, 0);
  talk_peer_of(who)->said_ns = t->now;
  talk_run();
}

static inline mlfab__hello talk_hello(uint32_t who) {
  uint32_t node = talk_node_of(who), kind = who >> 16;
  return OF(mlfab__hello, .node = node, .incarnation = t->incarnation[node],
            .roles = kind == TALK_SCHEDULER     ? MLFAB_ROLE_SCHEDULER
                     : kind == TALK_FROM_SERVER ? MLFAB_ROLE_SERVER
                     : kind == TALK_FROM_VOTER  ? (1u << 16)
                                                : MLFAB_ROLE_WORKER,
            .accumulators = 2, .host = 100 + node, .nonce = t->nonce[node]);
}

/* A peer calls and greets: HELLO, whose answer is in t->hello_ack; or MEET. */
static inline void talk_call(uint32_t who) {
  talk_dial(who);
  uint32_t node = talk_node_of(who);
  if (who >> 16 == TALK_MEMBER) {
    SAY(who, MEET, meet, .node = node, .incarnation = t->incarnation[node],
        .nonce = t->nonce[node]);
    return;
  }
  mlfab__hello hello = talk_hello(who);
  talk_say(who, MLFAB__HELLO, mlfab__encode_hello(t->meta, &hello), NULL, 0);
  HEAR(who, HELLO_ACK, hello_ack, (t->hello_ack = *m, 1));
  talk_peer_of(who)->generation = t->hello_ack.generation;
}

/* The peer has a link again: it calls, or answers the node, which calls within a beat. The next generation begins. */
static inline void talk_back(uint32_t who) {
  talk_peer *p = talk_peer_of(who);
  if (who >> 16 > TALK_HOP) {
    talk_call(who);
    return;
  }
  *talk_away(who) = 0;
  p->generation++;
  for (uint32_t i = 0; i < 8 && !p->link; i++) talk_wait(t->config.heartbeat_ns / 8);
  assert_true(p->link > 0);
}

/* The peer goes and never comes back: time passes until the node takes it for dead. */
static inline void talk_dies(uint32_t who) {
  if (talk_linked(who)) talk_break(who);
  talk_wait((t->config.replicas ? 21 : 6) * t->config.heartbeat_ns);
}

/* The link takes n frames from now on, beside greetings, or any number (-1). */
static inline void talk_room(uint32_t who, int n) {
  talk_peer *p = talk_peer_of(who);
  p->room = n;
  if (n == 0 || !p->link) return;
  talk_event((mlfab_io_event){.kind = MLFAB_IO_WRITABLE, .link = p->link});
  talk_run();
}

/* --- loans: with hold_sent --- */

/* Reports SENT of one loan. */
static inline void talk_sent(talk_loan *loan) {
  talk_event((mlfab_io_event){.kind = MLFAB_IO_SENT, .link = loan->link, .token = loan->token});
  loan->state = LOAN_OVER;
  talk_run();
}

/* Live loans of a peer. */
static inline uint32_t talk_lent(uint32_t who) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < t->nloans; i++)
    n += t->loans[i].who == who && t->loans[i].state == LOAN_LIVE;
  return n;
}

/* Reports all loans of this peer in this state; returns how many. */
static inline uint32_t talk_sent_all(uint32_t who, int state) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < t->nloans; i++) {
    if (t->loans[i].who != who || (int)t->loans[i].state != state) continue;
    talk_sent(&t->loans[i]);
    n++;
  }
  return n;
}

/* --- calls of the node's program --- */

#define BUFS(...)                           \
  .bufs = (const mlfab_buf[]){__VA_ARGS__}, \
  .n = sizeof((mlfab_buf[]){__VA_ARGS__}) / sizeof(mlfab_buf)
#define TALK_CALL(name, ...) \
  (&(const mlfab_call){.size = sizeof(mlfab_call), .kind = MLFAB_CALL_##name, __VA_ARGS__})
/* Returns the request; the call must begin. FAILS: it must fail with this code. */
#define CALL(name, ...) talk_submit(TALK_CALL(name, __VA_ARGS__), 0, __FILE__, __LINE__)
#define FAILS(code, name, ...) talk_submit(TALK_CALL(name, __VA_ARGS__), code, __FILE__, __LINE__)
#define PENDING(request) talk_pending(request, __FILE__, __LINE__)
/* The request has ended with this status. Returns its result. */
#define ENDS(request, status_) talk_ends(request, status_, __FILE__, __LINE__)

static inline const char *talk_error(void) {
  static mlfab_error error;
  assert_int_equal(mlfab_node_last_error(t->node, &error), 0);
  return error.text;
}

static inline mlfab_request talk_submit(const mlfab_call *call, int wish, const char *file,
                                        int line) {
  mlfab_request request = 0;
  int code = mlfab_node_submit(t->node, call, t->now, &request);
  if (code != wish) {
    print_error("call %u: %s (%s) instead of %s\n", call->kind, mlfab_error_name(code),
                code ? talk_error() : "", mlfab_error_name(wish));
    _fail(file, line);
  }
  talk_run();
  return request;
}

static inline void talk_pending(mlfab_request request, const char *file, int line) {
  int done = 0;
  mlfab_result result = {.status = 0};
  int code = mlfab_node_test(t->node, request, &done, &result);
  if (!code && !done) return;
  print_error("the request has ended: %s\n", mlfab_error_name(code ? code : result.status));
  _fail(file, line);
}

static inline mlfab_result talk_ends(mlfab_request request, int wish, const char *file, int line) {
  int done = 0;
  mlfab_result result;
  memset(&result, 0, sizeof result);
  int code = mlfab_node_test(t->node, request, &done, &result);
  if (code || !done || result.status != wish) {
    print_error("the request %s: %s (%s) instead of %s\n", done ? "has ended" : "is open",
                mlfab_error_name(code ? code : result.status), talk_error(),
                mlfab_error_name(wish));
    _fail(file, line);
  }
  return result;
}

static inline void talk_cancel(mlfab_request request) {
  assert_int_equal(mlfab_node_cancel(t->node, request, t->now), 0);
  talk_run();
}

static inline mlfab_stats talk_stats(void) {
  mlfab_stats stats;
  assert_int_equal(mlfab_node_stats(t->node, &stats, sizeof stats), 0);
  return stats;
}

/* --- open and close --- */

static inline void *talk_allocate(void *user, size_t bytes) {
  talk *of = user;
  of->calls++;
  if ((of->fail_from && of->calls >= of->fail_from) || of->calls == of->fail_at) return NULL;
  of->bytes += bytes;
  return malloc(bytes);
}

static inline void talk_release(void *user, void *memory, size_t bytes) {
  if (memory) ((talk *)user)->bytes -= bytes;
  free(memory);
}

static inline void talk_log(void *user, int level, const char *line) {
  (void)level;
  talk *of = user;
  memcpy(of->earlier, of->log, sizeof of->log);
  snprintf(of->log, sizeof of->log, "%s", line);
}

/* A played node joins at server 0, which is the node. */
static inline void talk_join(uint32_t node) {
  const mlfab_config *c = &t->config;
  uint32_t servers = c->dedicated ? c->servers_max : 0, first = c->workers_max;
  uint32_t k = node < first ? node : (node - first) % (servers ? servers : 1);
  uint32_t sort = node < first ? 0 : servers ? (node - first) / servers : 2;
  mlfab__join join =
      OF(mlfab__join, .rank = (int32_t)k,
         .roles = sort == 1 && c->replicas          ? MLFAB_ROLE_REPLICA
                  : sort >= 1                       ? MLFAB_ROLE_SCHEDULER
                  : node >= first                   ? MLFAB_ROLE_SERVER
                  : !c->dedicated && k < c->servers ? MLFAB_ROLE_WORKER | MLFAB_ROLE_SERVER
                                                    : MLFAB_ROLE_WORKER,
         .workers = c->workers_max, .servers = c->servers_max, .dedicated = c->dedicated,
         .replicas = c->replicas, .founders = c->workers, .founding = c->servers,
         .scheduler = c->scheduler, .kernels = c->kernels, .nonce = t->nonce[node],
         .heartbeat_ns = c->heartbeat_ns);
  if (node >= first && sort == 0) join.roles = MLFAB_ROLE_SERVER;
  snprintf(join.addresses, sizeof join.addresses, "talk:%c%u",
           node < first ? 'w'
           : sort       ? 'c'
                        : 's',
           sort == 2 ? servers : k); /* a witness is called after the replicas */
  talk_dial(JOINER(node));
  talk_say(JOINER(node), MLFAB__JOIN, mlfab__encode_join(t->meta, &join), NULL, 0);
}

/* Takes the WELCOME of a played node, and hangs up. */
static inline void talk_welcomed(uint32_t node) {
  while (talk_peer_of(JOINER(node))->first->header.type == MLFAB__MEMBER)
    talk_drop_frame(talk_peer_of(JOINER(node)));
  HEAR(JOINER(node), WELCOME, welcome, (t->incarnation[node] = m->incarnation) > 0);
  talk_break(JOINER(node));
}

/* A worker's process, a new one if there was one, joins at server 0, which is the node, and calls it. */
static inline void talk_enter(uint32_t worker) {
  if (talk_linked(WORKER(worker))) talk_break(WORKER(worker));
  t->nonce[worker]++;
  talk_join(worker);
  talk_welcomed(worker);
  talk_call(WORKER(worker));
}

/* All played nodes join at server 0, which is the node. */
static inline void talk_join_all(void) {
  const mlfab_config *c = &t->config;
  uint32_t servers = c->dedicated ? c->servers_max : 0, self = c->dedicated ? c->workers_max : 0;
  uint32_t others = c->workers_max + servers * (1 + c->replicas);
  uint32_t nodes = others + (c->scheduler == MLFAB_SCHEDULER_OWN);
  for (int welcomed = 0; welcomed < 2; welcomed++) {
    for (uint32_t n = 0; n < nodes; n++) {
      int absent = n < c->workers_max ? n >= c->workers
                   : n < others       ? (n - c->workers_max) % c->servers_max >= c->servers
                                      : 0;
      if (n == self || absent) continue;
      if (welcomed)
        talk_welcomed(n);
      else
        talk_join(n);
    }
  }
}

/* Workers, and a scheduler that is no part of the node, call the node's server. */
static inline void talk_call_all(void) {
  const mlfab_config *c = &t->config;
  uint32_t own = c->dedicated ? UINT32_MAX : (uint32_t)c->rank;
  int beside = c->scheduler == MLFAB_SCHEDULER_BESIDE && c->rank != 0;
  for (uint32_t w = 0; w < c->workers; w++)
    if (w != own) talk_call(WORKER(w));
  if (beside || c->scheduler == MLFAB_SCHEDULER_OWN) talk_call(SCHEDULER);
}

static inline void talk_close(void) {
  if (!t->node) return;
  mlfab_node_close(&t->node);
  for (uint32_t i = 0; i < t->npeers; i++)
    while (t->peers[i].first) talk_drop_frame(&t->peers[i]);
  for (uint32_t i = 0; i < TALK_FILES; i++) free(t->files[i].data);
  for (uint32_t i = 0; i < 4; i++) free(t->writing[i].data);
  free(t->events);
  free(t->loans);
  t->loans = NULL;
  assert_int_equal(t->bytes, 0);
}

/* Begins another conversation: the last one is over. */
static inline void talk_init(void) {
  talk_close();
  memset(t, 0, sizeof *t);
  t->now = 1000000000;
  t->caps = MLFAB_CAP_RELIABLE | MLFAB_CAP_GHOST;
  t->ack = (mlfab__hello_ack){.model_stands = 0, .epoch = 1};
  t->welcome = (mlfab__welcome){.incarnation = 50, .fresh = 1, .fabric = 7};
  for (uint32_t n = 0; n < TALK_NODES; n++) {
    t->incarnation[n] = 10 + n;
    t->nonce[n] = 1000 + n;
  }
}

/* Opens a node of this configuration, which must pass mlfab_node_open. The fabric is complete on return, unless the
 * test joins by hand. Call talk_init first. */
static inline void talk_open(const mlfab_config *config) {
  mlfab_env env = SIZED(mlfab_env, .user = t, .allocate = talk_allocate, .release = talk_release,
                        .log = talk_log);
  mlfab_config *c = &t->config;
  mlfab_error error;
  *c = *config;
  c->env = &env;
  if (c->coordinator[0] == 0) strcpy(c->coordinator, "talk:g");
  if (c->workers == 0) c->workers = 1;
  if (c->servers == 0) c->servers = 1;
  if (c->workers_max == 0) c->workers_max = c->workers;
  if (c->servers_max == 0) c->servers_max = c->servers;
  if (c->heartbeat_ns == 0) c->heartbeat_ns = 500000000;
  if (c->job[0] == 0) strcpy(c->job, "mlfab");
  int code = mlfab_node_open(c, "talk:self", t->now, &t->node, &error);
  if (code) fail_msg("%s", error.text);
  c->env = NULL;
  if (c->roles == 0)
    c->roles = !c->dedicated && (uint32_t)c->rank < c->servers
                   ? MLFAB_ROLE_WORKER | MLFAB_ROLE_SERVER
                   : MLFAB_ROLE_WORKER;
  if (t->ack.eager_bytes == 0) t->ack.eager_bytes = c->eager_bytes ? c->eager_bytes : 1 << 18;
  talk_run();
  if (t->by_hand) return;
  int serves = (c->roles & MLFAB_ROLE_SERVER) != 0;
  if (serves && c->rank == 0) talk_join_all();
  if (serves) talk_call_all();
  if (mlfab_node_ready(t->node, &error) != 1) fail_msg("not ready: %s", error.text);
}
#define TALK(...) (talk_init(), talk_open(&SIZED(mlfab_config, __VA_ARGS__)))

/* The model of a worker under test, whose tensors are added: all servers accept DEFINE. */
static inline void talk_stand(const mlfab_model_options *options) {
  mlfab_request request = CALL(MODEL_START, .options = options);
  for (uint32_t s = 0; s < t->config.servers; s++) {
    mlfab__define define = {.ask = 0};
    if (!(t->config.dedicated || s != (uint32_t)t->config.rank)) continue;
    HEAR(SERVER(s), DEFINE, define, (define = *m, 1));
    SAY(SERVER(s), DEFINE_ACK, define_ack, .server = s, .packets = 1, .ask = define.ask,
        .options = define.options);
  }
  ENDS(request, 0);
  t->ack.model_stands = 1;
}

/* Slices have these owners now, and a worker under test was not told in time: it stops at each server, which tells it the
 * last number that it has decided, and then goes on. The epoch is the attempt plus one. */
static inline void talk_resume(uint32_t attempt, const uint32_t *owners, uint32_t slices,
                               const uint64_t *tops) {
  SAY_LIST(SERVER(0), RESUME, resume, owners, .attempt = attempt, .epoch = attempt + 1,
           .slices = slices);
  for (uint32_t kind = MLFAB__STOP_BEGIN; kind <= MLFAB__STOP_OVER; kind += 2) {
    int begins = kind == MLFAB__STOP_BEGIN;
    for (uint32_t s = 0; s < t->config.servers; s++)
      HEAR(SERVER(s), STOP, stop, m->attempt == attempt && m->kind == kind);
    for (uint32_t s = 0; s < t->config.servers; s++)
      SAY(SERVER(s), HELLO_ACK, hello_ack, .server = s, .epoch = attempt + 1,
          .eager_bytes = t->ack.eager_bytes, .generation = talk_peer_of(SERVER(s))->generation,
          .model_stands = 1, .top = tops[s], .stopped = begins ? attempt : 0,
          .kind = begins ? MLFAB__ACK_STOP : MLFAB__ACK_ALIVE);
  }
}

#endif
