/* keeper.c - decides which commits a server with a replica may apply, answer and show. See keeper.h. */
#include "keeper.h"

#include "../kernels/kernels.h"

#define KEEPER_NORM_MOST 1e300

static void keeper_free(mlfab__server *server) {
  mlfab__env *env = server->env;
  struct mlfab__keeper *keeper = server->keeping;
  if (keeper) {
    mlfab__free(env, keeper->sent, server->workers * sizeof *keeper->sent);
    mlfab__free(env, keeper->has, server->workers * sizeof *keeper->has);
    mlfab__free(env, keeper->told, server->workers * sizeof *keeper->told);
    mlfab__free(env, keeper->asked, server->workers);
    mlfab__free(env, keeper->answers, keeper->room * sizeof *keeper->answers);
    mlfab__free(env, keeper, sizeof *keeper);
  }
  server->keeping = NULL;
  server->keeper = NULL;
}

/* May only durable updates be reported? */
static int keeper_frozen(const mlfab__server *server) {
  const mlfab__keeper *keeper = server->keeping;
  return keeper->frozen || (keeper->leased && !keeper->leased(keeper->above, server->now_ns));
}

/* --- commits --- */

/* Must nobody see the last commit before the replica has it? */
static int keeper_hides(const mlfab__keeper *keeper) {
  return keeper->phase != MLFAB__KEEPER_ALONE && mlfab__finite(keeper->div_max) &&
         keeper->ledger.bound > keeper->div_max;
}

static double keeper_norm(const mlfab__commit *commit) {
  return mlfab__divergence_norm(commit->squares, commit->elements, commit->scale);
}

/* A slice that the commit does not touch keeps its momentum undecayed. */
static int keeper_part(const mlfab__keeper *keeper, const mlfab__commit *commit) {
  return commit->part && keeper->ledger.gamma > 0.0;
}

static int keeper_may(mlfab__server *server, const mlfab__commit *commit) {
  const mlfab__keeper *keeper = server->keeping;
  const mlfab__divergence *ledger = &keeper->ledger;
  double norm = keeper_norm(commit);
  return keeper->phase == MLFAB__KEEPER_ALONE || ledger->committed == ledger->acknowledged ||
         (keeper_part(keeper, commit) ? mlfab__divergence_may_part(ledger, norm)
                                      : mlfab__divergence_may(ledger, norm));
}

static void keeper_committed(mlfab__server *server, const mlfab__commit *commit) {
  mlfab__keeper *keeper = server->keeping;
  double norm = keeper_norm(commit);
  /* A norm above the largest double: the bound is infinite until the replica has the commit. */
  if (!(norm < KEEPER_NORM_MOST)) norm = KEEPER_NORM_MOST;
  if (keeper_part(keeper, commit)) {
    mlfab__divergence_append_part(&keeper->ledger, norm);
  } else {
    mlfab__divergence_append(&keeper->ledger, norm);
  }
}

/* Returns the sum of the squares of a slice's sum, and sets whether the slice has one. */
static double keeper_squares(const mlfab__server *server, const mlfab__shard_slice *s,
                             int *summed_p) {
  const mlfab__store *store = &server->store;
  double squares = 0.0;
  for (uint64_t at = s->offset, end = at + s->bytes; at < end;) {
    mlfab__piece piece;
    mlfab__store_piece(store, at, mlfab__store_seen(end - at), &piece);
    at += piece.bytes;
    uint32_t block = store->sum[piece.position];
    if (block == MLFAB__NO_BLOCK) continue;
    *summed_p = 1;
    const uint8_t *sum = store->blocks[block].data + piece.at;
    sum = mlfab__memory_see(store->memory, sum, piece.bytes, server->window);
    squares += mlfab__kernel_norm2(piece.dtype, sum, piece.count);
  }
  return squares;
}

static mlfab__commit keeper_round(mlfab__server *server) {
  const mlfab__store *store = &server->store;
  mlfab__clock *round = &server->clock;
  double scale = mlfab__optimizer_linear(&server->optimizer) ? 1.0 : round->round_scale;
  mlfab__commit commit = {0.0, scale * mlfab__clock_share(server), 0, 0};
  int measures = round->measured != round->round_members && !store->ghost;
  if (measures) round->squares = 0.0, round->part = 0;
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__shard_slice *s = &store->slices[i];
    int summed = 0;
    commit.elements += s->bytes;
    if (!measures) continue;
    round->squares += keeper_squares(server, s, &summed);
    round->part |= !summed; /* such a slice takes no step */
  }
  round->measured = round->round_members;
  commit.squares = round->squares;
  commit.part |= round->part;
  return commit;
}

/* --- answers --- */

/* Is an update answered when it is in the sum of an open round? The bound counts it only when the round is committed, so
 * its answer waits for the replica. */
static int keeper_sums(const mlfab__server *server) {
  const mlfab__keeper *keeper = server->keeping;
  return keeper->phase != MLFAB__KEEPER_ALONE && mlfab__finite(keeper->div_max) &&
         server->rounds != 0;
}

/* Has the replica this update, and is it known to be in sync? */
static int keeper_durable(const mlfab__server *server, uint32_t worker,
                          const mlfab__push_ack *ack) {
  const mlfab__keeper *keeper = server->keeping;
  const mlfab__window *has = &keeper->has[worker], *window = &server->windows.windows[worker];
  return keeper->phase == MLFAB__KEEPER_IN_SYNC && has->incarnation == window->incarnation &&
         mlfab__windows_ask(has, ack->seq, ack->members) != MLFAB__UNDECIDED;
}

static int keeper_defers(mlfab__server *server, uint32_t worker, uint32_t flags,
                         const mlfab__push_ack *ack) {
  mlfab__keeper *keeper = server->keeping;
  keeper->decisions++;
  keeper->asked[worker] |= (flags & MLFAB__PUSH_DURABLE) != 0;
  int waits = ((flags & MLFAB__PUSH_DURABLE) && ack->code == 0) || keeper_hides(keeper) ||
              keeper_sums(server) || keeper_frozen(server);
  if (!waits || keeper_durable(server, worker, ack)) return 0;
  mlfab__keeper_answer *more =
      mlfab__grow(server->env, keeper->answers, &keeper->room, keeper->nanswers + 1, sizeof *more);
  if (!more) {
    /* The worker asks again on a new link. */
    mlfab__server_drop(server, worker, MLFAB_ERR_MEMORY, "out of memory for an answer");
    return 1;
  }
  keeper->answers = more;
  keeper->answers[keeper->nanswers++] =
      (mlfab__keeper_answer){worker, (flags & MLFAB__PUSH_DURABLE) != 0, keeper->decisions, *ack};
  return 1;
}

/* Posts the answers that are due. */
static void keeper_answer(mlfab__server *server) {
  mlfab__keeper *keeper = server->keeping;
  uint32_t kept = 0;
  if (keeper_frozen(server)) return;
  for (uint32_t i = 0; i < keeper->nanswers; i++) {
    const mlfab__keeper_answer *answer = &keeper->answers[i];
    int safe = answer->moment <= keeper->has_decisions;
    int due = answer->durable ? safe && keeper->phase == MLFAB__KEEPER_IN_SYNC
                              : safe || keeper->phase == MLFAB__KEEPER_ALONE;
    if (due) {
      MLFAB__POST(&server->port, answer->worker, MLFAB__PUSH_ACK, push_ack, &answer->ack);
    } else {
      keeper->answers[kept++] = *answer;
    }
  }
  keeper->nanswers = kept;
}

static void keeper_withdrawn(mlfab__server *server, uint32_t worker, uint64_t seq) {
  mlfab__keeper *keeper = server->keeping;
  for (uint32_t i = 0; i < keeper->nanswers; i++) {
    mlfab__keeper_answer *answer = &keeper->answers[i];
    if (answer->worker == worker && answer->ack.seq == seq) answer->durable = 0;
  }
  keeper_answer(server);
}

/* Returns the window that a worker may rely on when it calls again. If it never asked for DURABLE and nothing is
 * hidden, this is the window of decided updates. */
static const mlfab__window *keeper_window(mlfab__server *server, uint32_t worker) {
  mlfab__keeper *keeper = server->keeping;
  const mlfab__window *window = &server->windows.windows[worker], *has = &keeper->has[worker];
  uint32_t kept = 0;
  for (uint32_t i = 0; i < keeper->nanswers; i++) {
    if (keeper->answers[i].worker != worker) keeper->answers[kept++] = keeper->answers[i];
  }
  keeper->nanswers = kept;
  if (keeper->told[worker].incarnation != window->incarnation) { /* a new process */
    keeper->told[worker] = (mlfab__window){.incarnation = window->incarnation};
    keeper->asked[worker] = 0;
  }
  if (!keeper->asked[worker] && !keeper_hides(keeper) && !keeper_sums(server) &&
      !keeper_frozen(server))
    return window;
  keeper->told[worker] = *has;
  if (keeper->phase != MLFAB__KEEPER_IN_SYNC || has->incarnation != window->incarnation)
    keeper->told[worker] = (mlfab__window){.incarnation = window->incarnation};
  return &keeper->told[worker];
}

/* --- what pulls see --- */

static enum mlfab__shows keeper_shows(const mlfab__server *server) {
  return keeper_frozen(server)           ? MLFAB__SHOWS_NOTHING
         : keeper_hides(server->keeping) ? MLFAB__SHOWS_PINNED
                                         : MLFAB__SHOWS_ALL;
}

MLFAB__INTERNAL void mlfab__keeper_offer(mlfab__server *server) {
  mlfab__serve_walk walk = {NULL, 0};
  if (mlfab__server_shows(server) != MLFAB__SHOWS_ALL) return;
  for (mlfab__server_pull *pull; (pull = mlfab__serve_each(server, &walk)) != NULL;) {
    if (!mlfab__server_goes(pull)) continue;
    if (pull->view && !server->lender->pinned(pull) &&
        mlfab__serve_view(server, pull, server->lender->pin(server, pull)))
      continue;
    server->port.ready(server->port.self, pull->worker);
    pull->offered = 1;
    if (pull->view) continue;
    if (pull->segments_used == 0 || pull->slice != MLFAB__NO_BLOCK) continue;
    uint64_t at = pull->segments[pull->segment].offset + pull->in_segment;
    mlfab__blocks_pin(server, pull,
                      server->store.local[mlfab__layout_slice_at(&server->layout, at)]);
  }
}

static void keeper_ready(mlfab__server *server) {
  mlfab__keeper_offer(server);
  mlfab__server_advance(server);
}

/* --- moments --- */

/* Returns |h| of momentum, or -1 if it is not known. */
static double keeper_history(const mlfab__server *server) {
  const mlfab__store *store = &server->store;
  uint64_t elements = 0;
  double squares = 0.0;
  if (!store->s0 || store->ghost) return -1.0;
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__shard_slice *s = &store->slices[i];
    for (uint64_t at = s->offset, end = at + s->bytes; at < end;) {
      mlfab__piece piece;
      mlfab__store_piece(store, at, mlfab__store_seen(end - at), &piece);
      at += piece.bytes;
      elements += piece.count;
      const uint8_t *h = store->s0[piece.position] + piece.at;
      h = mlfab__memory_see(store->memory, h, piece.bytes, server->window);
      squares += mlfab__kernel_norm2(piece.dtype, h, piece.count);
    }
  }
  return mlfab__divergence_norm(squares, elements, 1.0);
}

/* Counts the bound from the moment that was sent. */
static void keeper_acked(mlfab__keeper *keeper) {
  mlfab__divergence_acked(&keeper->ledger, keeper->sent_commits);
  mlfab__divergence_measured(&keeper->ledger, keeper->sent_commits, keeper->sent_history);
}

MLFAB__INTERNAL void mlfab__keeper_moment(mlfab__server *server, int joins) {
  mlfab__keeper *keeper = server->keeping;
  keeper->sending = 1;
  keeper->sent_decisions = keeper->decisions;
  keeper->sent_commits = keeper->ledger.committed;
  /* After one measurement the ledger's own estimate bounds |h|. The estimate is loose: a bound that commits reach needs
   * a measurement at each moment. */
  int measures = joins || (keeper->div_max > 0.0 && mlfab__finite(keeper->div_max));
  keeper->sent_history = measures && keeper->ledger.gamma > 0.0 ? keeper_history(server) : -1.0;
  memcpy(keeper->sent, server->windows.windows, server->workers * sizeof *keeper->sent);
  if (!joins || keeper->phase != MLFAB__KEEPER_ALONE) return;
  /* The replica will have all of this: the bound counts from here on. The momentum may be more than the commits here
   * have made, if another copy or a file handed some over. */
  double history = keeper->sent_history;
  if (!mlfab__finite(history)) history = mlfab__network_never();
  (void)mlfab__divergence_init(&keeper->ledger, keeper->ledger.gamma, keeper->div_max,
                               keeper->ledger.committed, history < 0.0 ? 0.0 : history);
  keeper->phase = MLFAB__KEEPER_JOINING;
}

MLFAB__INTERNAL void mlfab__keeper_has(mlfab__server *server) {
  mlfab__keeper *keeper = server->keeping;
  if (!keeper->sending) return;
  keeper->sending = 0;
  keeper->has_decisions = keeper->sent_decisions;
  mlfab__window *has = keeper->has;
  keeper->has = keeper->sent;
  keeper->sent = has;
  keeper_acked(keeper);
  keeper_answer(server);
  keeper_ready(server);
}

MLFAB__INTERNAL void mlfab__keeper_unsend(mlfab__server *server) { server->keeping->sending = 0; }

MLFAB__INTERNAL void mlfab__keeper_joined(mlfab__server *server) {
  mlfab__keeper *keeper = server->keeping;
  if (keeper->phase != MLFAB__KEEPER_JOINING) return;
  keeper->phase = MLFAB__KEEPER_IN_SYNC;
  keeper_answer(server);
  keeper_ready(server);
}

MLFAB__INTERNAL void mlfab__keeper_alone(mlfab__server *server) {
  mlfab__keeper *keeper = server->keeping;
  keeper->phase = MLFAB__KEEPER_ALONE;
  keeper->sending = 0;
  keeper->has_decisions = 0;
  for (uint32_t w = 0; w < server->workers; w++) keeper->has[w] = (mlfab__window){0};
  keeper_answer(server);
  keeper_ready(server);
}

MLFAB__INTERNAL void mlfab__keeper_freeze(mlfab__server *server, int frozen) {
  mlfab__keeper *keeper = server->keeping;
  if (keeper->frozen == frozen) return;
  keeper->frozen = frozen;
  if (frozen) return;
  keeper_answer(server);
  keeper_ready(server);
}

MLFAB__INTERNAL void mlfab__keeper_begin(mlfab__server *server) {
  mlfab__keeper *keeper = server->keeping;
  keeper->phase = MLFAB__KEEPER_ALONE;
  keeper->sending = 0;
  keeper->nanswers = 0;
  keeper->has_decisions = 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    keeper->asked[w] = 0;
    keeper->has[w] = (mlfab__window){0};
    keeper->told[w] = (mlfab__window){0};
  }
}

MLFAB__INTERNAL int mlfab__keeper_behind(const mlfab__server *server) {
  const mlfab__keeper *keeper = server->keeping;
  uint64_t decisions = keeper->sending ? keeper->sent_decisions : keeper->has_decisions;
  return keeper->decisions != decisions ||
         (!keeper->sending && keeper->ledger.committed != keeper->ledger.acknowledged);
}

/* --- opening --- */

static void keeper_stop(mlfab__server *server) {
  const mlfab__keeper *keeper = server->keeping;
  if (keeper->stop) keeper->stop(keeper->above);
}

static void keeper_model(mlfab__server *server) {
  mlfab__keeper *keeper = server->keeping;
  int momentum = server->options.optimizer == MLFAB_OPTIMIZER_MOMENTUM;
  keeper->phase = MLFAB__KEEPER_ALONE;
  keeper->sending = 0;
  /* The options were checked: gamma and Div_max fit. */
  (void)mlfab__divergence_init(&keeper->ledger, momentum ? server->options.gamma : 0.0,
                               keeper->div_max, 0, 0.0);
  if (keeper->model) keeper->model(keeper->above);
}

MLFAB__INTERNAL const char *mlfab__keeper_check(const mlfab_model_options *options, double div_max,
                                                int callback) {
  if (div_max == 0.0 || !mlfab__finite(div_max)) return NULL;
  if (callback) return "a bound (div_max) and on_update, whose steps cannot be bounded";
  if (options->optimizer != MLFAB_OPTIMIZER_SGD && options->optimizer != MLFAB_OPTIMIZER_MOMENTUM)
    return "a bound (div_max) and an optimizer other than sgd and momentum: its steps have no "
           "bound";
  if (options->weight_decay != 0.0)
    return "a bound (div_max) and weight_decay, which moves the model by itself";
  return NULL;
}

static const char *keeper_refuses(const mlfab__server *server, const mlfab_model_options *options) {
  const mlfab__keeper *keeper = server->keeping;
  if (options->ghost) return "replicas and ghost tensors, which have no bytes";
  return mlfab__keeper_check(options, keeper->div_max, server->config->on_update != NULL);
}

MLFAB__INTERNAL int mlfab__keeper_attach(mlfab__server *server, double div_max) {
  static const mlfab__server_keeper hooks = {.free = keeper_free,
                                             .model = keeper_model,
                                             .stop = keeper_stop,
                                             .refuses = keeper_refuses,
                                             .may = keeper_may,
                                             .committed = keeper_committed,
                                             .round = keeper_round,
                                             .defers = keeper_defers,
                                             .withdrawn = keeper_withdrawn,
                                             .shows = keeper_shows,
                                             .window = keeper_window};
  if (mlfab__divergence_check(0.0, div_max)) return MLFAB_ERR_ARGUMENT;
  mlfab__env *env = server->env;
  mlfab__keeper *keeper = mlfab__alloc(env, sizeof *keeper);
  if (!keeper) return MLFAB_ERR_MEMORY;
  server->keeping = keeper;
  keeper->div_max = div_max;
  keeper->sent = mlfab__alloc_array(env, server->workers, sizeof *keeper->sent);
  keeper->has = mlfab__alloc_array(env, server->workers, sizeof *keeper->has);
  keeper->told = mlfab__alloc_array(env, server->workers, sizeof *keeper->told);
  keeper->asked = mlfab__alloc(env, server->workers);
  if (!keeper->sent || !keeper->has || !keeper->told || !keeper->asked) {
    keeper_free(server);
    return MLFAB_ERR_MEMORY;
  }
  mlfab__divergence_init(&keeper->ledger, 0.0, div_max, 0, 0.0);
  server->keeper = &hooks;
  server->measures = 1;
  return 0;
}
