/* notify.c - the NOTIFY-ACK state machine of one node: see notify.h. */
#include "notify.h"

MLFAB__INTERNAL int mlfab__notify_init(mlfab__notify *notify, mlfab__env *env, uint32_t mode,
                                       const uint32_t *out_peer, uint32_t outs,
                                       const uint32_t *in_peer, uint32_t ins) {
  memset(notify, 0, sizeof *notify);
  if (mode < MLFAB_STOCHASTIC_NOTIFY_ACK || mode > MLFAB_STOCHASTIC_ASYNC)
    return MLFAB_ERR_ARGUMENT;
  notify->mode = mode;
  notify->outs = outs;
  notify->ins = ins;
  notify->out_peer = out_peer;
  notify->in_peer = in_peer;
  notify->unheard = ins;
  notify->out = mlfab__alloc_array(env, outs, sizeof *notify->out);
  notify->in = mlfab__alloc_array(env, ins, sizeof *notify->in);
  if ((notify->out || outs == 0) && (notify->in || ins == 0)) return 0;
  mlfab__notify_free(notify, env);
  return MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL void mlfab__notify_free(mlfab__notify *notify, mlfab__env *env) {
  mlfab__free(env, notify->out, notify->outs * sizeof *notify->out);
  mlfab__free(env, notify->in, notify->ins * sizeof *notify->in);
  memset(notify, 0, sizeof *notify);
}

MLFAB__INTERNAL int32_t mlfab__notify_edge(const uint32_t *peers, uint32_t n, uint32_t peer) {
  uint32_t low = 0, high = n;
  MLFAB__SEARCH(low, high, at, peers[at] < peer)
  return low < n && peers[low] == peer ? (int32_t)low : -1;
}

static int notify_under_way(const mlfab__notify *notify) {
  return notify->ended < notify->iteration;
}

/* --- this side --- */

MLFAB__INTERNAL int mlfab__notify_begin(mlfab__notify *notify, uint64_t k) {
  if (notify_under_way(notify) || k != notify->ended + 1) return MLFAB_ERR_STATE;
  notify->iteration = k;
  notify->unsent = notify->outs;
  notify->unknown = notify->ins;
  memset(&notify->tally, 0, sizeof notify->tally);
  return 0;
}

MLFAB__INTERNAL int mlfab__notify_may_send(const mlfab__notify *notify, uint32_t edge) {
  if (edge >= notify->outs || notify->out[edge].sent == notify->iteration) return 0;
  /* After the first receiver all others may get the model: ACKs that come meanwhile belong to this iteration. */
  return notify->mode != MLFAB_STOCHASTIC_NOTIFY_ACK || notify->unsent < notify->outs ||
         notify->unacked == 0;
}

MLFAB__INTERNAL int mlfab__notify_sent(mlfab__notify *notify, uint32_t edge) {
  if (!mlfab__notify_may_send(notify, edge)) return MLFAB_ERR_STATE;
  notify->out[edge].sent = notify->iteration;
  notify->unsent--;
  notify->unacked += notify->mode == MLFAB_STOCHASTIC_NOTIFY_ACK;
  return 0;
}

MLFAB__INTERNAL int mlfab__notify_barrier(mlfab__notify *notify, uint64_t k) {
  if (notify->mode != MLFAB_STOCHASTIC_BSP || !notify_under_way(notify) || notify->unsent > 0 ||
      k != notify->iteration || notify->barrier == k)
    return MLFAB_ERR_STATE;
  notify->barrier = k;
  return 0;
}

MLFAB__INTERNAL int mlfab__notify_ready(const mlfab__notify *notify) {
  if (!notify_under_way(notify) || notify->unsent > 0) return 0;
  if (notify->mode == MLFAB_STOCHASTIC_BSP) return notify->barrier == notify->iteration;
  /* After the first slot all others may be read: a NOTIFY that comes meanwhile belongs to the next iteration. */
  return notify->mode == MLFAB_STOCHASTIC_ASYNC || notify->unknown < notify->ins ||
         notify->unheard == 0;
}

MLFAB__INTERNAL int mlfab__notify_look(const mlfab__notify *notify, uint32_t edge,
                                       mlfab__notify_stamps stamps) {
  const mlfab__notify_in *in = &notify->in[edge];
  if (stamps.header <= in->consumed) return MLFAB__NOTIFY_STALE;
  return stamps.header == stamps.footer ? MLFAB__NOTIFY_WHOLE : MLFAB__NOTIFY_TORN;
}

MLFAB__INTERNAL int mlfab__notify_consumed(mlfab__notify *notify, uint32_t edge,
                                           mlfab__notify_stamps before, mlfab__notify_stamps after,
                                           uint64_t *ack_p, mlfab_error *error) {
  if (edge >= notify->ins || !mlfab__notify_ready(notify)) return MLFAB_ERR_STATE;
  mlfab__notify_in *in = &notify->in[edge];
  if (in->looked == notify->iteration) return MLFAB_ERR_STATE;
  int input = mlfab__notify_look(notify, edge, before);
  if (input == MLFAB__NOTIFY_WHOLE &&
      (after.header != before.header || after.footer != before.footer))
    input = MLFAB__NOTIFY_TORN;
  int acks = notify->mode == MLFAB_STOCHASTIC_NOTIFY_ACK;
  if (acks && (input != MLFAB__NOTIFY_WHOLE || before.header != notify->iteration)) {
    return mlfab__error(error, MLFAB_ERR_FRAME, (int32_t)notify->in_peer[edge], 0, 0,
                        "rank %u wrote iteration %llu to a slot that held %llu unread",
                        notify->in_peer[edge], (unsigned long long)after.header,
                        (unsigned long long)notify->iteration);
  }
  notify->tally.whole += input == MLFAB__NOTIFY_WHOLE;
  notify->tally.torn += input == MLFAB__NOTIFY_TORN;
  notify->tally.stale += input == MLFAB__NOTIFY_STALE;
  if (input == MLFAB__NOTIFY_WHOLE) in->consumed = before.header;
  in->looked = notify->iteration;
  notify->unknown--;
  notify->unheard += (uint32_t)acks;
  *ack_p = acks ? notify->iteration : 0;
  return input;
}

MLFAB__INTERNAL int mlfab__notify_end(mlfab__notify *notify, mlfab__notify_tally *tally_p) {
  if (!mlfab__notify_ready(notify) || notify->unknown > 0) return MLFAB_ERR_STATE;
  notify->ended = notify->iteration;
  *tally_p = notify->tally;
  return 0;
}

/* --- peers --- */

static int notify_refuse(mlfab_error *error, uint32_t rank, const char *what, uint64_t k,
                         uint64_t expected) {
  return mlfab__error(error, MLFAB_ERR_FRAME, (int32_t)rank, 0, 0,
                      "rank %u sent %s of iteration %llu: %llu was to come", rank, what,
                      (unsigned long long)k, (unsigned long long)expected);
}

/* Returns 1 if k can be the next model of this sender: in NOTIFY_ACK the one after the last consumed model (I1, I3),
 * else any later one. */
static int notify_next(const mlfab__notify *notify, const mlfab__notify_in *in, uint64_t k) {
  if (in->header != in->footer) return 0; /* the last model is still arriving */
  return notify->mode == MLFAB_STOCHASTIC_NOTIFY_ACK
             ? in->footer == in->consumed && k == in->consumed + 1
             : k > in->footer;
}

static uint64_t notify_expected(const mlfab__notify_in *in) {
  return in->header != in->footer ? in->header : in->footer + 1;
}

MLFAB__INTERNAL int mlfab__notify_arrives(mlfab__notify *notify, uint32_t edge, uint64_t header,
                                          mlfab_error *error) {
  assert(edge < notify->ins);
  mlfab__notify_in *in = &notify->in[edge];
  uint32_t rank = notify->in_peer[edge];
  if (!notify_next(notify, in, header)) {
    int unread = notify->mode == MLFAB_STOCHASTIC_NOTIFY_ACK && in->footer > in->consumed;
    if (!unread) return notify_refuse(error, rank, "the model", header, notify_expected(in));
    return mlfab__error(error, MLFAB_ERR_FRAME, (int32_t)rank, 0, 0,
                        "rank %u sent the model of iteration %llu before %llu was acknowledged",
                        rank, (unsigned long long)header, (unsigned long long)in->footer);
  }
  in->header = header;
  return 0;
}

MLFAB__INTERNAL int mlfab__notify_notified(mlfab__notify *notify, uint32_t edge, uint64_t header,
                                           uint64_t footer, mlfab_error *error) {
  assert(edge < notify->ins);
  mlfab__notify_in *in = &notify->in[edge];
  uint32_t rank = notify->in_peer[edge];
  int begun = in->header != in->footer;
  if (header != footer) {
    return mlfab__error(error, MLFAB_ERR_FRAME, (int32_t)rank, 0, 0,
                        "rank %u sent NOTIFY of iteration %llu behind the model of %llu", rank,
                        (unsigned long long)footer, (unsigned long long)header);
  }
  if (begun ? footer != in->header : !notify_next(notify, in, footer))
    return notify_refuse(error, rank, "NOTIFY", footer, notify_expected(in));
  in->header = in->footer = footer;
  notify->unheard -= notify->mode == MLFAB_STOCHASTIC_NOTIFY_ACK;
  return 0;
}

MLFAB__INTERNAL int mlfab__notify_acked(mlfab__notify *notify, uint32_t edge, uint64_t k,
                                        mlfab_error *error) {
  assert(edge < notify->outs);
  mlfab__notify_out *out = &notify->out[edge];
  uint32_t rank = notify->out_peer[edge];
  if (notify->mode != MLFAB_STOCHASTIC_NOTIFY_ACK || out->acked == out->sent) {
    return mlfab__error(error, MLFAB_ERR_FRAME, (int32_t)rank, 0, 0,
                        "rank %u sent ACK of iteration %llu: none was to come", rank,
                        (unsigned long long)k);
  }
  if (k != out->sent) return notify_refuse(error, rank, "ACK", k, out->sent);
  out->acked = k;
  notify->unacked--;
  return 0;
}

MLFAB__INTERNAL int mlfab__notify_awaits(const mlfab__notify *notify, int32_t *rank_p) {
  *rank_p = MLFAB_NO_RANK;
  if (!notify_under_way(notify) || mlfab__notify_ready(notify)) return MLFAB__NOTIFY_NOTHING;
  if (notify->unsent > 0) {
    for (uint32_t i = 0; i < notify->outs; i++) {
      if (mlfab__notify_may_send(notify, i)) return MLFAB__NOTIFY_NOTHING;
    }
    for (uint32_t i = notify->outs; i-- > 0;) {
      if (notify->out[i].acked < notify->out[i].sent) *rank_p = (int32_t)notify->out_peer[i];
    }
    return MLFAB__NOTIFY_FOR_ACK;
  }
  if (notify->mode == MLFAB_STOCHASTIC_BSP) return MLFAB__NOTIFY_FOR_BARRIER;
  for (uint32_t i = notify->ins; i-- > 0;) {
    if (notify->in[i].footer < notify->iteration) *rank_p = (int32_t)notify->in_peer[i];
  }
  return MLFAB__NOTIFY_FOR_NOTIFY;
}
