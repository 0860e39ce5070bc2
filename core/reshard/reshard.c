/* reshard.c - server 0 leads the move of slices between servers. See reshard.h. */
#include "../node/node.h"
#include "../server/server.h"
#include "reshard.h"

#include <stdio.h>

enum { RESHARD_META = 64 + 2 * MLFAB__SLICES_MAX };

enum mlfab__reshard_phase {
  MLFAB__RESHARD_IDLE,
  MLFAB__RESHARD_FREEZING,
  MLFAB__RESHARD_PREPARING,
  MLFAB__RESHARD_SENDING,
  MLFAB__RESHARD_INSTALLING,
  MLFAB__RESHARD_ABORTING
};

typedef struct mlfab__seat { /* a worker */
  uint8_t here, gone, frozen;
  uint64_t ask; /* number and outcome of the last request that was answered */
  int32_t code, rank;
} mlfab__seat;

typedef struct mlfab__reshard {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port down, across;    /* to workers; to servers, whose `ready` opens the link */
  const mlfab__layout *layout; /* server 0's own */
  const struct mlfab__server *server;
  uint32_t workers, servers;
  mlfab__seat *seats;
  uint8_t *answered; /* by server: it has answered this step */
  int last;          /* INSTALLING: server 0 itself has got its INSTALL */
  uint8_t *dead;     /* by server: in this attempt */
  enum mlfab__reshard_phase phase;
  uint32_t attempt; /* number of the last attempt; 1: there was none */
  uint32_t epoch;   /* of the current layout */
  uint32_t asker;
  uint64_t asked_ns, deadline_ns;
  uint32_t *owners; /* of the attempt */
  uint32_t nowners;
  mlfab__reshard_done done; /* the next answer, or the last one */
} mlfab__reshard;

static void reshard_free_owners(mlfab__reshard *r) {
  mlfab__free(r->env, r->owners, r->nowners * sizeof *r->owners);
  r->owners = NULL;
  r->nowners = 0;
}

static void reshard_free(void *self) {
  mlfab__reshard *r = self;
  if (!r->env) return;
  reshard_free_owners(r);
  mlfab__free(r->env, r->seats, r->workers * sizeof *r->seats);
  mlfab__free(r->env, r->answered, r->servers * sizeof *r->answered);
  mlfab__free(r->env, r->dead, r->servers * sizeof *r->dead);
  memset(r, 0, sizeof *r);
}

/* Does an attempt need links to all servers? */
static int reshard_busy(const mlfab__reshard *r) { return r->phase >= MLFAB__RESHARD_PREPARING; }

/* --- workers --- */

static void reshard_answer(mlfab__reshard *r, uint32_t worker, const mlfab__reshard_done *done) {
  MLFAB__POST(&r->down, worker, MLFAB__RESHARD_DONE, reshard_done, done);
}

static void reshard_freeze(mlfab__reshard *r, uint32_t worker) {
  mlfab__freeze freeze = {r->attempt};
  MLFAB__POST(&r->down, worker, MLFAB__FREEZE, freeze, &freeze);
}

static void reshard_resume(mlfab__reshard *r, uint32_t worker) {
  uint32_t owners[MLFAB__SLICES_MAX];
  mlfab__resume resume = {r->attempt, r->epoch, r->layout->nslices};
  for (uint32_t i = 0; i < resume.slices; i++) owners[i] = r->layout->slices[i].server;
  MLFAB__POST_LIST(RESHARD_META, &r->down, worker, MLFAB__RESUME, resume, &resume, owners);
}

/* --- the end --- */

/* The workers go on with the current layout, and the asking worker gets the outcome. */
static void reshard_end(mlfab__reshard *r) {
  r->phase = MLFAB__RESHARD_IDLE;
  reshard_free_owners(r);
  for (uint32_t w = 0; w < r->workers; w++) {
    if (r->seats[w].here) reshard_resume(r, w);
  }
  if (r->asker == MLFAB__NO_NODE) return;
  mlfab__seat *seat = &r->seats[r->asker];
  seat->ask = r->done.ask;
  seat->code = r->done.code;
  seat->rank = r->done.rank;
  reshard_answer(r, r->asker, &r->done);
}

static void reshard_fault(mlfab__reshard *r, int code, int32_t rank, int is_server,
                          const char *text) {
  if (r->done.code) return;
  r->done.code = code;
  r->done.rank = rank;
  r->done.is_server = (uint32_t)is_server;
  snprintf(r->done.text, sizeof r->done.text, "%s", text);
}

/* --- steps --- */

static uint32_t reshard_step(const mlfab__reshard *r) {
  switch (r->phase) {
    case MLFAB__RESHARD_PREPARING:
      return MLFAB__MOVE_PREPARE;
    case MLFAB__RESHARD_SENDING:
      return MLFAB__MOVE_SEND;
    case MLFAB__RESHARD_INSTALLING:
      return MLFAB__MOVE_INSTALL;
    default:
      return MLFAB__MOVE_ABORT;
  }
}

static void reshard_tell(mlfab__reshard *r, uint32_t server) {
  mlfab__move move = {r->attempt, reshard_step(r), 0};
  if (move.step == MLFAB__MOVE_PREPARE) move.slices = r->nowners;
  MLFAB__POST_LIST(RESHARD_META, &r->across, server, MLFAB__MOVE, move, &move, r->owners);
}

/* Must server 0 wait for the others before it installs? */
static int reshard_is_early(const mlfab__reshard *r, uint32_t server) {
  if (r->phase != MLFAB__RESHARD_INSTALLING || server != 0 || MLFAB__PLANTED(81)) return 0;
  for (uint32_t s = 1; s < r->servers; s++) {
    if (!r->answered[s] && !r->dead[s]) return 1;
  }
  return 0;
}

static int reshard_installed(const mlfab__reshard *r) {
  int some = 0;
  for (uint32_t s = 0; r->phase == MLFAB__RESHARD_INSTALLING && s < r->servers; s++)
    some |= r->answered[s];
  return some;
}

static void reshard_go(mlfab__reshard *r, enum mlfab__reshard_phase phase) {
  r->phase = phase;
  memset(r->answered, 0, r->servers);
  r->last = !reshard_is_early(r, 0);
  for (uint32_t s = 0; s < r->servers; s++) {
    r->across.ready(r->across.self, s);
    if (!reshard_is_early(r, s)) reshard_tell(r, s);
  }
}

/* Ends the attempt before any server has installed: all servers keep their slices. */
static void reshard_abort(mlfab__reshard *r, int code, int32_t rank, int is_server,
                          const char *text) {
  reshard_fault(r, code, rank, is_server, text);
  if (r->phase == MLFAB__RESHARD_FREEZING) {
    reshard_end(r);
  } else if (r->phase == MLFAB__RESHARD_PREPARING || r->phase == MLFAB__RESHARD_SENDING) {
    reshard_go(r, MLFAB__RESHARD_ABORTING);
  }
}

/* The first worker that has not stopped, or MLFAB_NO_RANK. */
static int32_t reshard_awaits_worker(const mlfab__reshard *r) {
  for (uint32_t w = 0; w < r->workers; w++) {
    if (!r->seats[w].gone && !r->seats[w].frozen) return (int32_t)w;
  }
  return MLFAB_NO_RANK;
}

static int32_t reshard_awaits_server(const mlfab__reshard *r) {
  for (uint32_t s = 0; s < r->servers; s++) {
    if (!r->answered[s] && !r->dead[s]) return (int32_t)s;
  }
  return MLFAB_NO_RANK;
}

/* Takes the next step when everybody has answered this one. */
static void reshard_check(mlfab__reshard *r) {
  if (r->phase == MLFAB__RESHARD_IDLE) return;
  if (r->phase == MLFAB__RESHARD_FREEZING) {
    if (reshard_awaits_worker(r) == MLFAB_NO_RANK) reshard_go(r, MLFAB__RESHARD_PREPARING);
    return;
  }
  if (r->phase == MLFAB__RESHARD_INSTALLING && !r->last && !reshard_is_early(r, 0)) {
    r->last = 1;
    /* All others are out of reach, and none has reported that it installed. */
    if (!reshard_installed(r)) {
      reshard_go(r, MLFAB__RESHARD_ABORTING);
      return;
    }
    reshard_tell(r, 0);
  }
  if (reshard_awaits_server(r) != MLFAB_NO_RANK) return;
  if (r->phase == MLFAB__RESHARD_PREPARING) {
    reshard_go(r, MLFAB__RESHARD_SENDING);
  } else if (r->phase == MLFAB__RESHARD_SENDING) {
    reshard_go(r, MLFAB__RESHARD_INSTALLING);
  } else {
    if (r->phase == MLFAB__RESHARD_INSTALLING) r->epoch = r->attempt;
    reshard_end(r);
  }
}

/* --- requests --- */

/* Computes new owners for these servers. 1: slices have to move; 0: they need not; or MEMORY. */
static int reshard_balance(mlfab__reshard *r, const uint32_t *list, uint32_t n) {
  const mlfab__layout *layout = r->layout;
  uint32_t slices = layout->nslices;
  uint8_t *active = mlfab__alloc(r->env, r->servers);
  uint64_t *load = mlfab__alloc_array(r->env, r->servers, sizeof *load);
  uint32_t *order = mlfab__alloc_array(r->env, 2 * (size_t)slices, sizeof *order);
  r->owners = mlfab__alloc_array(r->env, slices, sizeof *r->owners);
  r->nowners = r->owners ? slices : 0;
  int code = active && load && order && r->owners ? 0 : MLFAB_ERR_MEMORY;
  if (!code) {
    memset(active, 0, r->servers);
    for (uint32_t i = 0; i < n; i++) active[list[i]] = 1;
    mlfab__layout_balance(layout->slices, slices, active, r->servers, r->owners, load, order);
    for (uint32_t i = 0; i < slices; i++) code |= r->owners[i] != layout->slices[i].server;
  }
  mlfab__free(r->env, active, r->servers);
  mlfab__free(r->env, load, r->servers * sizeof *load);
  mlfab__free(r->env, order, 2 * (size_t)slices * sizeof *order);
  if (code != 1) reshard_free_owners(r);
  return code;
}

/* Checks the requested servers: 0 or a code, with its text in `done`. */
static int reshard_refuse(const mlfab__reshard *r, const uint32_t *list, uint32_t n, int stands,
                          mlfab__reshard_done *done) {
  int code = 0;
  if (!stands) {
    code = MLFAB_ERR_STATE;
    snprintf(done->text, sizeof done->text, "there is no model");
  } else if (n == 0) {
    code = MLFAB_ERR_ARGUMENT;
    snprintf(done->text, sizeof done->text, "no servers");
  }
  for (uint32_t i = 0; i < n && !code; i++) {
    if (list[i] >= r->servers) {
      code = MLFAB_ERR_ARGUMENT;
      snprintf(done->text, sizeof done->text,
               "there is no server %u of %u, and servers cannot join a fabric", list[i],
               r->servers);
    }
    for (uint32_t k = 0; k < i && !code; k++) {
      if (list[i] != list[k]) continue;
      code = MLFAB_ERR_ARGUMENT;
      snprintf(done->text, sizeof done->text, "server %u is named twice in the list", list[i]);
    }
  }
  return code;
}

static void reshard_begin(mlfab__reshard *r, uint32_t worker, const mlfab__reshard_done *done,
                          uint64_t timeout_ns, uint64_t now_ns) {
  r->asker = worker;
  r->done = *done;
  r->asked_ns = now_ns;
  r->deadline_ns = now_ns + mlfab__min(timeout_ns, UINT64_MAX / 2);
  r->attempt++;
  r->phase = MLFAB__RESHARD_FREEZING;
  memset(r->dead, 0, r->servers);
  for (uint32_t w = 0; w < r->workers; w++) {
    r->seats[w].frozen = 0;
    if (r->seats[w].here) reshard_freeze(r, w);
  }
  reshard_check(r);
}

static void reshard_asked(mlfab__reshard *r, uint32_t worker, const mlfab__frame_in *frame,
                          uint64_t now_ns) {
  int stands = r->server->phase == MLFAB__MODEL_STANDS;
  mlfab__reshard_ask ask;
  mlfab__reshard_done done;
  uint32_t list[MLFAB__SLICES_MAX];
  mlfab__seat *seat = &r->seats[worker];
  if (mlfab__port_refuse(
          &r->down, worker, frame,
          mlfab__decode_reshard_ask(frame->meta, frame->meta_bytes, &ask, list) || ask.ask == 0))
    return;
  memset(&done, 0, sizeof done);
  done.ask = ask.ask;
  done.rank = MLFAB_NO_RANK;
  if (ask.ask <= seat->ask) {
    /* The answer was lost with a link. */
    done.code = seat->code;
    done.rank = seat->rank;
    if (r->asker == worker && r->done.ask == ask.ask) done = r->done;
    reshard_answer(r, worker, &done);
    return;
  }
  if (r->phase != MLFAB__RESHARD_IDLE) {
    if (r->asker == worker && r->done.ask == ask.ask) return; /* under way */
    done.code = MLFAB_ERR_AGAIN;
    snprintf(done.text, sizeof done.text, "slices are on the move for worker %u", r->asker);
    reshard_answer(r, worker, &done);
    return;
  }
  done.code = reshard_refuse(r, list, ask.servers, stands, &done);
  int moves = done.code ? 0 : reshard_balance(r, list, ask.servers);
  if (moves < 0) {
    done.code = moves;
    done.is_server = 1;
    done.rank = 0;
    snprintf(done.text, sizeof done.text, "server 0 is out of memory");
  }
  if (moves == 1) {
    reshard_begin(r, worker, &done, ask.timeout_ns ? ask.timeout_ns : r->config->timeout_ns,
                  now_ns);
  } else {
    reshard_answer(r, worker, &done);
  }
}

/* --- events --- */

static void reshard_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__reshard *r = self;
  if (at.kind == MLFAB__LINK_RESHARD && reshard_busy(r) && !r->answered[at.peer] &&
      !reshard_is_early(r, at.peer))
    reshard_tell(r, at.peer);
  if (at.kind != MLFAB__LINK_WORKER) return;
  mlfab__seat *seat = &r->seats[at.peer];
  if (greeting->fresh) memset(seat, 0, sizeof *seat);
  /* A new process counts from 1 again, and does not want the old one's answer. */
  if (greeting->fresh && r->asker == at.peer) r->asker = MLFAB__NO_NODE;
  seat->here = 1;
  seat->gone = seat->frozen = 0;
  if (r->phase != MLFAB__RESHARD_IDLE) {
    reshard_freeze(r, at.peer);
  } else if (r->attempt > 1) {
    reshard_resume(r, at.peer);
  }
}

static void reshard_lost(void *self, mlfab__at at) {
  mlfab__reshard *r = self;
  if (at.kind == MLFAB__LINK_WORKER) r->seats[at.peer].here = 0;
}

/* A server is out of reach. */
static void reshard_dead(mlfab__reshard *r, uint32_t server) {
  char text[96];
  if (!reshard_busy(r)) return;
  r->dead[server] = 1;
  snprintf(text, sizeof text, "server %u is dead", server);
  /* If others have installed it is too late to abort: the dead server's slices are lost, as with any death. */
  reshard_fault(r, MLFAB_ERR_PEER_DEAD, (int32_t)server, 1, text);
  reshard_abort(r, MLFAB_ERR_PEER_DEAD, (int32_t)server, 1, text);
  reshard_check(r);
}

static void reshard_gone(void *self, mlfab__at at, int left) {
  mlfab__reshard *r = self;
  (void)left;
  if (at.kind == MLFAB__LINK_RESHARD) reshard_dead(r, at.peer);
  if (at.kind != MLFAB__LINK_WORKER) return;
  r->seats[at.peer].here = 0;
  r->seats[at.peer].gone = 1;
  reshard_check(r);
}

/* The server lost server 0 and undid its part by itself; or it was restarted and does not know the attempt. */
static void reshard_given_up(mlfab__reshard *r, uint32_t server, int code) {
  char text[MLFAB__TEXT_MAX];
  if (code) {
    snprintf(text, sizeof text, "server %u was restarted while slices moved", server);
    reshard_fault(r, MLFAB_ERR_PEER_DEAD, (int32_t)server, 1, text);
  } else {
    snprintf(text, sizeof text, "server %u gave it up: server 0 was out of its reach", server);
    reshard_fault(r, MLFAB_ERR_PEER_DEAD, 0, 1, text);
  }
  if (reshard_installed(r) || code) {
    r->dead[server] = 1;
    reshard_check(r);
  } else if (r->phase != MLFAB__RESHARD_ABORTING) {
    reshard_go(r, MLFAB__RESHARD_ABORTING);
  } else {
    reshard_check(r);
  }
}

/* MOVED for an attempt that is over: the server may still be held, so tell it the outcome. */
static void reshard_outcome(mlfab__reshard *r, uint32_t server, const mlfab__moved *moved) {
  mlfab__move move = {moved->attempt, MLFAB__MOVE_ABORT, 0};
  if (moved->step == MLFAB__MOVE_ABORT || moved->step == MLFAB__MOVE_INSTALL) return;
  if (moved->attempt == r->epoch) move.step = MLFAB__MOVE_INSTALL;
  r->across.ready(r->across.self, server);
  MLFAB__POST_LIST(RESHARD_META, &r->across, server, MLFAB__MOVE, move, &move, NULL);
}

static int reshard_moved(mlfab__reshard *r, uint32_t server, const mlfab__frame_in *frame) {
  mlfab__moved moved;
  if (mlfab__decode_moved(frame->meta, frame->meta_bytes, &moved) || moved.server != server)
    return MLFAB_ERR_FRAME;
  if (!reshard_busy(r) || moved.attempt != r->attempt) {
    reshard_outcome(r, server, &moved);
    return 0;
  }
  if ((moved.step == MLFAB__MOVE_ABORT && r->phase != MLFAB__RESHARD_ABORTING) ||
      (moved.step == MLFAB__MOVE_INSTALL && moved.code)) {
    reshard_given_up(r, server, moved.code);
  } else if (moved.code && moved.step != MLFAB__MOVE_ABORT) {
    reshard_abort(r, moved.code, (int32_t)server, 1, moved.text);
  } else if (moved.step == reshard_step(r)) {
    r->answered[server] = 1;
    reshard_check(r);
  }
  return 0;
}

/* The deadline passed: aborts, and names who has not answered. */
static void reshard_late(mlfab__reshard *r, uint64_t now_ns) {
  char text[MLFAB__TEXT_MAX], waited[24];
  mlfab__duration(waited, now_ns - r->asked_ns);
  int32_t worker = reshard_awaits_worker(r), server = reshard_awaits_server(r);
  if (r->phase == MLFAB__RESHARD_FREEZING) {
    snprintf(text, sizeof text, "the deadline passed after %s awaiting worker %d, to stop", waited,
             (int)worker);
    reshard_abort(r, MLFAB_ERR_TIMEOUT, worker, 0, text);
  } else if (r->phase == MLFAB__RESHARD_PREPARING || r->phase == MLFAB__RESHARD_SENDING) {
    snprintf(text, sizeof text, "the deadline passed after %s awaiting server %d, to %s", waited,
             (int)server, r->phase == MLFAB__RESHARD_SENDING ? "get its slices" : "hold still");
    reshard_abort(r, MLFAB_ERR_TIMEOUT, server, 1, text);
  }
}

static uint64_t reshard_deadline(const void *self) {
  const mlfab__reshard *r = self;
  int may_end = r->phase == MLFAB__RESHARD_FREEZING || r->phase == MLFAB__RESHARD_PREPARING ||
                r->phase == MLFAB__RESHARD_SENDING;
  return may_end ? r->deadline_ns : MLFAB__NEVER;
}

static void reshard_tick(void *self, uint64_t now_ns) {
  if (now_ns >= reshard_deadline(self)) reshard_late(self, now_ns);
}

static int reshard_wants(void *self, mlfab__at at) {
  return at.kind == MLFAB__LINK_RESHARD && reshard_busy(self);
}

static int reshard_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__reshard *r = self;
  mlfab__freeze frozen;
  if (at.kind == MLFAB__LINK_RESHARD_IN && frame->type == MLFAB__MOVED) {
    int code = reshard_moved(r, at.peer, frame);
    return code ? code : 1;
  }
  if (at.kind != MLFAB__LINK_WORKER) return 0;
  if (frame->type == MLFAB__RESHARD) {
    reshard_asked(r, at.peer, frame, at.now_ns);
    return 1;
  }
  if (frame->type != MLFAB__FROZEN) return 0;
  if (MLFAB__MALFORMED(&r->down, at.peer, frame, freeze, &frozen)) return 1;
  if (frozen.attempt == r->attempt) {
    r->seats[at.peer].frozen = 1;
    reshard_check(r);
  }
  return 1;
}

static const mlfab__role reshard_row = {
    .from = MLFAB__RESHARD,
    .to = MLFAB__MOVED,
    .name = "reshard",
    .links = MLFAB__ON(WORKER) | MLFAB__ON(RESHARD) | MLFAB__ON(RESHARD_IN),
    .frame = reshard_frame,
    .up = reshard_up,
    .lost = reshard_lost,
    .gone = reshard_gone,
    .wants = reshard_wants,
    .tick = reshard_tick,
    .deadline = reshard_deadline,
    .free = reshard_free,
};

MLFAB__INTERNAL int mlfab__reshard_attach(mlfab_node *node, mlfab__server *server) {
  mlfab__role *role = mlfab__roles_add(node, &reshard_row, sizeof(mlfab__reshard));
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__env *env = &node->env;
  mlfab__reshard *r = role->self;
  memset(r, 0, sizeof *r);
  r->env = env;
  r->config = &node->config;
  r->server = server;
  r->layout = &server->layout;
  r->down = mlfab__roles_port(node, role, MLFAB__LINK_WORKER);
  r->across = mlfab__roles_port(node, role, MLFAB__LINK_RESHARD);
  r->workers = node->config.workers;
  r->servers = node->config.servers;
  r->attempt = r->epoch = 1;
  r->seats = mlfab__alloc_array(env, r->workers, sizeof *r->seats);
  r->answered = mlfab__alloc_array(env, r->servers, sizeof *r->answered);
  r->dead = mlfab__alloc_array(env, r->servers, sizeof *r->dead);
  return r->seats && r->answered && r->dead ? 0 : MLFAB_ERR_MEMORY;
}
