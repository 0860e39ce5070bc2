/* reshard.c - server 0 leads the move of slices between servers. See reshard.h. */
#include "../node/node.h"
#include "../server/clock_copy.h"
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

typedef struct mlfab__seat { /* the state of a worker */
  uint8_t here, gone, frozen;
  uint64_t ask; /* number and outcome of the last request that was answered */
  int32_t code, rank;
} mlfab__seat;

/* Server 0's knowledge of a server. */
typedef struct mlfab__reshard_seat {
  uint8_t member; /* in every attempt; if it goes while it has slices, they are missed */
  /* In this attempt: */
  uint8_t answered; /* it has answered this step */
  uint8_t dead;
  uint8_t away;   /* it takes no part */
  uint8_t adopts; /* it needs the model (ADOPT) first */
  uint64_t round; /* when it was prepared; so is the next (mlfab__moved) */
  double scale;
  uint32_t gone; /* 0; or the incarnation of the process that was declared dead */
} mlfab__reshard_seat;

typedef struct mlfab__reshard {
  mlfab__env *env;
  mlfab_node *node;
  const mlfab_config *config;
  mlfab__port down, across;    /* ports to workers; to servers (its `ready` opens the link) */
  const mlfab__layout *layout; /* server 0's own */
  const struct mlfab__server *server;
  uint32_t workers, servers;
  mlfab__seat *seats;
  mlfab__reshard_seat *at; /* by server */
  int last;                /* INSTALLING: server 0 itself got its INSTALL */
  uint8_t *table;          /* the definition for ADOPT, made on demand */
  uint32_t table_bytes;
  enum mlfab__reshard_phase phase;
  uint32_t attempt; /* number of the last attempt; 1: there was none */
  uint32_t epoch;   /* epoch of the current layout */
  uint32_t asker;
  uint64_t asked_ns, deadline_ns;
  uint32_t *owners; /* owners in the attempt */
  uint32_t nowners;
  uint32_t flush;           /* of the attempt: as in MOVE */
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
  mlfab__free(r->env, r->at, r->servers * sizeof *r->at);
  mlfab__free(r->env, r->table, r->table_bytes);
  memset(r, 0, sizeof *r);
}

/* Does an attempt need links to all servers? */
static int reshard_busy(const mlfab__reshard *r) { return r->phase >= MLFAB__RESHARD_PREPARING; }

/* --- workers --- */

static void reshard_answer(mlfab__reshard *r, uint32_t worker, const mlfab__reshard_done *done) {
  MLFAB__POST(&r->down, worker, MLFAB__RESHARD_DONE, reshard_done, done);
}

static void reshard_freeze(mlfab__reshard *r, uint32_t worker) {
  uint32_t servers[MLFAB__SLICES_MAX];
  mlfab__freeze freeze = {r->attempt, 0};
  for (uint32_t s = 0; s < r->servers; s++)
    if (!r->at[s].member && !r->at[s].away) servers[freeze.servers++] = s;
  MLFAB__POST_LIST(RESHARD_META, &r->down, worker, MLFAB__FREEZE, freeze, &freeze, servers);
}

static void reshard_resume(mlfab__reshard *r, uint32_t worker) {
  uint32_t owners[MLFAB__SLICES_MAX];
  mlfab__resume resume = {r->attempt, r->epoch, r->layout->nslices};
  for (uint32_t i = 0; i < resume.slices; i++) owners[i] = r->layout->slices[i].server;
  MLFAB__POST_LIST(RESHARD_META, &r->down, worker, MLFAB__RESUME, resume, &resume, owners);
}

/* --- servers that come and go --- */

static int reshard_owns(const mlfab__reshard *r, uint32_t server) {
  const mlfab__layout *layout = r->layout;
  return layout->nslices > 0 && layout->owned_at[server] < layout->owned_at[server + 1];
}

/* Does the server get slices in this attempt? */
static int reshard_gets(const mlfab__reshard *r, uint32_t server) {
  for (uint32_t i = 0; i < r->nowners; i++)
    if (r->owners[i] == server) return 1;
  return 0;
}

/* mlfab_node: would the fabric miss the state of this server? */
static int reshard_counts(void *self, uint32_t server) {
  const mlfab__reshard *r = self;
  if (!r->at[server].member) return 0;
  return r->server->phase != MLFAB__MODEL_STANDS || server == 0 || reshard_owns(r, server);
}

/* A server has gone that had no slices and got none: the attempt loses nothing. */
static void reshard_spare(mlfab__reshard *r, uint32_t server) {
  r->at[server].member = 0;
  r->at[server].away = 1;
  if (r->node->growth) r->node->growth->left(r->node, server, r->at[server].gone);
}

/* Added servers are members while they own slices. Server 0 keeps links to the others, to notice their end. */
static void reshard_recount(mlfab__reshard *r) {
  for (uint32_t s = 1; s < r->servers; s++) {
    mlfab__reshard_seat *at = &r->at[s];
    int added = r->config->dedicated && r->node->peers[mlfab__node_of_server(r->node, s)].added;
    if (added) at->member = (uint8_t)reshard_owns(r, s);
    if (at->dead && !reshard_owns(r, s)) reshard_spare(r, s);
    if (at->member && r->config->dedicated && !reshard_owns(r, s))
      r->across.ready(r->across.self, s);
  }
}

/* --- the end --- */

/* Ends the attempt: the workers continue with the current layout, and the asking worker gets the outcome. */
static void reshard_end(mlfab__reshard *r) {
  r->phase = MLFAB__RESHARD_IDLE;
  reshard_free_owners(r);
  reshard_recount(r);
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

/* Is there a server that cannot go on with the sums of another? */
static int reshard_differ(const mlfab__reshard *r) {
  uint64_t round = MLFAB__NEVER;
  double scale = 0.0;
  for (uint32_t s = 0; s < r->servers; s++) {
    const mlfab__reshard_seat *at = &r->at[s];
    if (at->away || at->round == MLFAB__NEVER) continue;
    if (round != MLFAB__NEVER && round != at->round) return 1;
    if (scale != 0.0 && at->scale != 0.0 && scale != at->scale) return 1;
    round = at->round;
    if (at->scale != 0.0) scale = at->scale;
  }
  return 0;
}

static void reshard_tell(mlfab__reshard *r, uint32_t server) {
  mlfab__move move = {.attempt = r->attempt, .step = reshard_step(r)};
  if (move.step == MLFAB__MOVE_SEND) move.flush = r->flush;
  if (move.step == MLFAB__MOVE_PREPARE) move.slices = r->nowners;
  MLFAB__POST_LIST(RESHARD_META, &r->across, server, MLFAB__MOVE, move, &move, r->owners);
}

/* Must server 0 wait for the others before it installs? */
static int reshard_is_early(const mlfab__reshard *r, uint32_t server) {
  if (r->phase != MLFAB__RESHARD_INSTALLING || server != 0) return 0;
  for (uint32_t s = 1; s < r->servers; s++) {
    if (!r->at[s].answered && !r->at[s].dead && !r->at[s].away) return 1;
  }
  return 0;
}

static int reshard_installed(const mlfab__reshard *r) {
  int some = 0;
  for (uint32_t s = 0; r->phase == MLFAB__RESHARD_INSTALLING && s < r->servers; s++)
    some |= r->at[s].answered;
  return some;
}

static void reshard_go(mlfab__reshard *r, enum mlfab__reshard_phase phase) {
  r->phase = phase;
  for (uint32_t s = 0; s < r->servers; s++) r->at[s].answered = r->at[s].adopts = 0;
  r->last = !reshard_is_early(r, 0);
  for (uint32_t s = 0; s < r->servers; s++) {
    if (r->at[s].away) continue;
    r->across.ready(r->across.self, s);
    if (phase == MLFAB__RESHARD_PREPARING && !r->at[s].member)
      r->at[s].adopts = 1;
    else if (!reshard_is_early(r, s))
      reshard_tell(r, s);
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

/* Returns the first worker that has not stopped, or MLFAB_NO_RANK. */
static int32_t reshard_awaits_worker(const mlfab__reshard *r) {
  for (uint32_t w = 0; w < r->workers; w++) {
    if (!r->seats[w].gone && !r->seats[w].frozen) return (int32_t)w;
  }
  return MLFAB_NO_RANK;
}

static int32_t reshard_awaits_server(const mlfab__reshard *r) {
  for (uint32_t s = 0; s < r->servers; s++) {
    if (!r->at[s].answered && !r->at[s].dead && !r->at[s].away) return (int32_t)s;
  }
  return MLFAB_NO_RANK;
}

/* Encodes the definition of the model, for a server without it. */
static int reshard_table(mlfab__reshard *r) {
  const mlfab__server *server = r->server;
  uint32_t news = 0;
  for (uint32_t s = 0; s < r->servers; s++) news += !r->at[s].member && !r->at[s].away;
  mlfab__free(r->env, r->table, r->table_bytes);
  r->table = NULL;
  r->table_bytes = news ? server->ndefinition * MLFAB__TENSOR_INFO_BYTES : 0;
  if (!news) return 0;
  r->table = mlfab__alloc(r->env, r->table_bytes);
  if (!r->table) {
    r->table_bytes = 0;
    return MLFAB_ERR_MEMORY;
  }
  for (uint32_t i = 0; i < server->ndefinition; i++)
    mlfab__encode_tensor_info(r->table + (size_t)i * MLFAB__TENSOR_INFO_BYTES,
                              &server->definition[i]);
  return 0;
}

/* Takes the next step when everybody has answered this one. */
static void reshard_check(mlfab__reshard *r) {
  if (r->phase == MLFAB__RESHARD_IDLE) return;
  if (r->phase == MLFAB__RESHARD_FREEZING) {
    if (reshard_awaits_worker(r) != MLFAB_NO_RANK) return;
    if (reshard_table(r))
      reshard_abort(r, MLFAB_ERR_MEMORY, 0, 1, "server 0 is out of memory");
    else
      reshard_go(r, MLFAB__RESHARD_PREPARING);
    return;
  }
  if (r->phase == MLFAB__RESHARD_INSTALLING && !r->last && !reshard_is_early(r, 0)) {
    r->last = 1;
    /* All other servers are out of reach, and no report of an install came. */
    if (!reshard_installed(r)) {
      reshard_go(r, MLFAB__RESHARD_ABORTING);
      return;
    }
    reshard_tell(r, 0);
  }
  if (reshard_awaits_server(r) != MLFAB_NO_RANK) return;
  if (r->phase == MLFAB__RESHARD_PREPARING) {
    r->flush = (uint32_t)reshard_differ(r);
    reshard_go(r, MLFAB__RESHARD_SENDING);
  } else if (r->phase == MLFAB__RESHARD_SENDING) {
    reshard_go(r, MLFAB__RESHARD_INSTALLING);
  } else {
    if (r->phase == MLFAB__RESHARD_INSTALLING) r->epoch = r->attempt;
    reshard_end(r);
  }
}

/* --- requests --- */

/* Computes new owners for these servers. Returns 1: slices have to move; 0: they need not; or MEMORY. */
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

/* Checks the requested servers: returns 0 or a code, with its text in `done`. */
static int reshard_refuse(const mlfab__reshard *r, const uint32_t *list, uint32_t n, int stands,
                          mlfab__reshard_done *done) {
  int code = 0;
  if (!stands) {
    code = MLFAB_ERR_STATE;
    snprintf(done->text, sizeof done->text, "there is no model");
  } else if (r->config->replicas) {
    code = MLFAB_ERR_UNSUPPORTED;
    snprintf(done->text, sizeof done->text,
             "not supported: slices of servers with replicas do not move");
  } else if (n == 0) {
    code = MLFAB_ERR_ARGUMENT;
    snprintf(done->text, sizeof done->text, "no servers");
  }
  for (uint32_t i = 0; i < n && !code; i++) {
    if (list[i] >= r->servers) {
      code = MLFAB_ERR_ARGUMENT;
      snprintf(done->text, sizeof done->text, "there is no server %u, there are %u", list[i],
               r->servers);
    } else if (!mlfab__server_link_here(r->node, list[i]) ||
               (!r->at[list[i]].member && !r->config->dedicated)) {
      code = MLFAB_ERR_STATE;
      done->rank = (int32_t)list[i];
      done->is_server = 1;
      snprintf(done->text, sizeof done->text,
               "server %u is not here: it has not joined, or has gone", list[i]);
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
  for (uint32_t s = 0; s < r->servers; s++) {
    r->at[s].dead = 0;
    r->at[s].away = !r->at[s].member && !reshard_gets(r, s);
  }
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
    /* A link has lost the answer. */
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
  int awaited = at.kind == MLFAB__LINK_RESHARD && reshard_busy(r) && !r->at[at.peer].answered &&
                !r->at[at.peer].away && !reshard_is_early(r, at.peer);
  if (awaited && r->phase == MLFAB__RESHARD_PREPARING && !r->at[at.peer].member) {
    r->at[at.peer].adopts = 1;
    r->across.ready(r->across.self, at.peer);
  } else if (awaited) {
    reshard_tell(r, at.peer);
  }
  if (at.kind != MLFAB__LINK_WORKER) return;
  mlfab__seat *seat = &r->seats[at.peer];
  if (greeting->fresh) memset(seat, 0, sizeof *seat);
  /* A new process counts from 1 again, and does not want the old process's answer. */
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

/* Called when a server is out of reach. */
static void reshard_dead(mlfab__reshard *r, uint32_t server) {
  char text[96];
  r->at[server].gone = r->node->peers[mlfab__node_of_server(r->node, server)].incarnation;
  int founds = r->at[server].member && r->server->phase != MLFAB__MODEL_STANDS;
  if (server != 0 && !founds && !reshard_owns(r, server) && !reshard_gets(r, server)) {
    reshard_spare(r, server);
    reshard_check(r);
    return;
  }
  snprintf(text, sizeof text, "server %u is dead", server);
  /* It has no slices, and was about to get some. */
  int early = r->phase == MLFAB__RESHARD_FREEZING && server != 0 && !reshard_owns(r, server);
  if (!reshard_busy(r) && !early) return;
  r->at[server].dead = 1;
  if (early) {
    reshard_abort(r, MLFAB_ERR_PEER_DEAD, (int32_t)server, 1, text);
    return;
  }
  /* If other servers have installed it is too late to abort: the dead server's slices are lost, as with any death. */
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

/* Handles a server that lost server 0 and undid its part by itself; or a restarted one that knows no attempt. */
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
    r->at[server].dead = 1;
    reshard_check(r);
  } else if (r->phase != MLFAB__RESHARD_ABORTING) {
    reshard_go(r, MLFAB__RESHARD_ABORTING);
  } else {
    reshard_check(r);
  }
}

/* Answers MOVED for an attempt that is over: the server may still be held, so it needs the outcome. */
static void reshard_outcome(mlfab__reshard *r, uint32_t server, const mlfab__moved *moved) {
  mlfab__move move = {.attempt = moved->attempt, .step = MLFAB__MOVE_ABORT};
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
  if (r->at[server].away) return 0;
  if ((moved.step == MLFAB__MOVE_ABORT && r->phase != MLFAB__RESHARD_ABORTING) ||
      (moved.step == MLFAB__MOVE_INSTALL && moved.code)) {
    reshard_given_up(r, server, moved.code);
  } else if (moved.code && moved.step != MLFAB__MOVE_ABORT) {
    reshard_abort(r, moved.code, (int32_t)server, 1, moved.text);
  } else if (moved.step == reshard_step(r)) {
    r->at[server].round = moved.round;
    r->at[server].scale = moved.scale;
    r->at[server].answered = 1;
    reshard_check(r);
  }
  return 0;
}

/* Called at the deadline: aborts, and names a process that has not answered. */
static void reshard_overdue(mlfab__reshard *r, uint64_t now_ns) {
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
  if (now_ns >= reshard_deadline(self)) reshard_overdue(self, now_ns);
}

static int reshard_wants(void *self, mlfab__at at, const char *why) {
  (void)why;
  const mlfab__reshard *r = self;
  if (at.kind != MLFAB__LINK_RESHARD) return 0;
  if (reshard_busy(r)) return !r->at[at.peer].away;
  return r->attempt > 1 && r->config->dedicated && r->at[at.peer].member &&
         !reshard_owns(r, at.peer);
}

/* Sends the model to a server that gets its first slices. */
static int reshard_next(void *self, mlfab__at at, mlfab__frame_out *frame) {
  const mlfab__reshard *r = self;
  const mlfab__server *server = r->server;
  uint32_t words[MLFAB__ADOPT_WORDS_MAX];
  if (at.kind != MLFAB__LINK_RESHARD || !r->at[at.peer].adopts) return 0;
  mlfab__adopt adopt = {.attempt = r->attempt,
                        .slices = r->layout->nslices,
                        .packets = server->sparse != NULL,
                        .cut = server->save.cut,
                        .restored = server->save.restored,
                        .restored_version = server->save.restored_version,
                        .tensors = server->ndefinition,
                        .options = server->options};
  for (uint32_t i = 0; i < adopt.slices; i++) words[i] = r->layout->slices[i].server;
  adopt.words = adopt.slices + (r->workers + 31) / 32;
  mlfab__clock_counted(server, words + adopt.slices);
  frame->type = MLFAB__ADOPT;
  frame->meta_bytes = mlfab__encode_adopt(frame->meta, &adopt, words);
  frame->bulk = r->table;
  frame->bulk_bytes = r->table_bytes;
  frame->token = 0;
  return 1;
}

static void reshard_taken(void *self, mlfab__at at, const mlfab__frame_out *frame) {
  mlfab__reshard *r = self;
  (void)frame;
  r->at[at.peer].adopts = 0;
  reshard_tell(r, at.peer);
}

static int reshard_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__reshard *r = self;
  mlfab__frozen frozen;
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
  if (MLFAB__MALFORMED(&r->down, at.peer, frame, frozen, &frozen)) return 1;
  if (frozen.attempt == r->attempt && frozen.unreached != MLFAB__NO_NODE) {
    char text[96];
    snprintf(text, sizeof text, "worker %u cannot reach server %u", at.peer, frozen.unreached);
    if (r->phase == MLFAB__RESHARD_FREEZING)
      reshard_abort(r, MLFAB_ERR_PEER_DEAD, (int32_t)frozen.unreached, 1, text);
  } else if (frozen.attempt == r->attempt) {
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
    .sends = MLFAB__ON(RESHARD),
    .frame = reshard_frame,
    .next = reshard_next,
    .taken = reshard_taken,
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
  r->node = node;
  r->config = &node->config;
  r->server = server;
  r->layout = &server->layout;
  r->down = mlfab__roles_port(node, role, MLFAB__LINK_WORKER);
  r->across = mlfab__roles_port(node, role, MLFAB__LINK_RESHARD);
  r->workers = node->config.workers;
  r->servers = node->config.servers;
  r->attempt = r->epoch = 1;
  r->seats = mlfab__alloc_array(env, r->workers, sizeof *r->seats);
  r->at = mlfab__alloc_array(env, r->servers, sizeof *r->at);
  if (!r->seats || !r->at) return MLFAB_ERR_MEMORY;
  for (uint32_t s = 0; s < node->founding; s++) r->at[s].member = 1;
  if (node->growth) node->growth->judge(node, reshard_counts, r);
  return 0;
}
