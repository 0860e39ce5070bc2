/* distributor.c - the aggregator role: spreads the frames of a model over the members (down). See aggregator.h.
 *
 * Every MODEL frame of a spread becomes a record. A member is a cursor into the list of records, so that bytes received
 * once are lent to all. When the server begins a slice again, the list is cut off where the slice began; its new bytes
 * replace the old ones, or go behind them while those are lent. A frame of packets is forwarded unchanged: bytes of the
 * model that frames cover measure completeness, bytes of their bulks measure room. */
#include "aggregator.h"

enum { DISTRIBUTOR_ACTIVE = 2 };

static void distributor_post_fail(mlfab__aggregator *aggregator, uint32_t server, uint64_t request,
                                  const mlfab__recipient *recipient, int code) {
  mlfab__spread_fail fail = {request, recipient ? recipient->request : 0,
                             recipient ? recipient->worker : MLFAB__NO_NODE, code};
  MLFAB__POST(&aggregator->up, server, MLFAB__SPREAD_FAIL, spread_fail, &fail);
}

MLFAB__INTERNAL void mlfab__distributor_fail(mlfab__aggregator *aggregator,
                                             mlfab__accumulator *spread, int code) {
  distributor_post_fail(aggregator, spread->server, spread->number, NULL, code);
  spread->state = MLFAB__ACCUMULATOR_FREE;
}

/* Is there a record for this member? */
static int distributor_has(const mlfab__accumulator *spread, const mlfab__recipient *recipient) {
  return recipient->record < spread->nrecords && (spread->complete || !spread->whole);
}

static void distributor_activate(mlfab__aggregator *aggregator, mlfab__accumulator *spread) {
  uint32_t active = 0;
  for (uint32_t i = 0; i < spread->nrecipients; i++) {
    active += spread->recipients[i].state == MLFAB__RECIPIENT_ACTIVE;
  }
  for (uint32_t i = 0; i < spread->nrecipients && active < DISTRIBUTOR_ACTIVE; i++) {
    mlfab__recipient *recipient = &spread->recipients[i];
    if (recipient->state != MLFAB__RECIPIENT_WAITING ||
        !mlfab__aggregator_stands(aggregator, recipient->worker, recipient->incarnation))
      continue;
    recipient->state = MLFAB__RECIPIENT_ACTIVE;
    recipient->since_ns = aggregator->now_ns;
    active++;
    if (distributor_has(spread, recipient))
      aggregator->down.ready(aggregator->down.self, recipient->worker);
  }
}

/* Counts one open member less. */
static void distributor_closed(mlfab__aggregator *aggregator, mlfab__accumulator *spread) {
  if (--spread->open == 0) {
    spread->state = MLFAB__ACCUMULATOR_FREE;
  } else {
    distributor_activate(aggregator, spread);
  }
}

static void distributor_give_up(mlfab__aggregator *aggregator, mlfab__accumulator *spread,
                                mlfab__recipient *recipient, int code) {
  distributor_post_fail(aggregator, spread->server, spread->number, recipient, code);
  recipient->state = MLFAB__GIVEN_UP;
  distributor_closed(aggregator, spread);
}

/* A member is done when the transport has taken everything and returned every loan. */
static void distributor_check(mlfab__aggregator *aggregator, mlfab__accumulator *spread,
                              mlfab__recipient *recipient) {
  if (recipient->state != MLFAB__RECIPIENT_ACTIVE || !spread->complete || recipient->lent > 0 ||
      recipient->record < spread->nrecords)
    return;
  recipient->state = MLFAB__RECIPIENT_DONE;
  aggregator->stats->members_served++;
  distributor_closed(aggregator, spread);
}

/* --- frames of servers --- */

/* Prepares an accumulator. Errors: AGAIN (no room), ARGUMENT. */
static int distributor_begin(mlfab__aggregator *aggregator, uint32_t server,
                             const mlfab__spread *spread, const mlfab__spread_member *members) {
  if (!aggregator->layout) return MLFAB_ERR_AGAIN;
  if (spread->bytes > aggregator->shard_bytes) return MLFAB_ERR_ARGUMENT;
  mlfab__accumulator *a =
      mlfab__aggregator_take(aggregator, server, spread->request, spread->bytes, 1);
  if (!a) return MLFAB_ERR_AGAIN;
  mlfab__recipient *recipients = mlfab__grow(aggregator->env, a->recipients, &a->recipient_room,
                                             spread->members, sizeof *recipients);
  if (!recipients) return MLFAB_ERR_AGAIN;
  memset(recipients, 0, spread->members * sizeof *recipients);
  for (uint32_t i = 0; i < spread->members; i++) {
    recipients[i].request = members[i].request;
    recipients[i].worker = members[i].worker;
    recipients[i].incarnation = members[i].incarnation;
    recipients[i].attempt = members[i].attempt;
    recipients[i].since_ns = aggregator->now_ns;
  }
  a->state = MLFAB__ACCUMULATOR_HANDING;
  a->whole = spread->whole != 0;
  a->recipients = recipients;
  a->nrecipients = a->open = spread->members;
  a->nrecords = 0;
  a->filled = a->end = 0;
  a->complete = 0;
  distributor_activate(aggregator, a);
  return 0;
}

MLFAB__INTERNAL void mlfab__distributor_spread(mlfab__aggregator *aggregator, uint32_t server,
                                               const mlfab__frame_in *frame,
                                               mlfab__spread_member *members) {
  mlfab__spread spread;
  mlfab__group_end head = {0}; /* only its number, which comes first */
  int code = MLFAB_ERR_AGAIN, wrong = frame->meta_bytes < 8;
  if (!wrong) wrong = mlfab__decode_group_end(frame->meta, 8, &head);
  if (!wrong && members) {
    wrong = mlfab__decode_spread(frame->meta, frame->meta_bytes, &spread, members) ||
            spread.members == 0 || !(head.group & MLFAB__SPREAD_BIT) ||
            mlfab__aggregator_find(aggregator, server, head.group);
    for (uint32_t i = 0; !wrong && i < spread.members; i++) {
      wrong = members[i].worker >= aggregator->workers;
    }
    if (!wrong) code = distributor_begin(aggregator, server, &spread, members);
  }
  if (wrong) {
    aggregator->up.drop(aggregator->up.self, server, MLFAB_ERR_FRAME,
                        "a SPREAD that does not parse, or comes twice");
  } else if (code) {
    distributor_post_fail(aggregator, server, head.group, NULL, code);
  }
}

/* Are any bytes from `at` on lent? */
static int distributor_lent(const mlfab__accumulator *spread, uint64_t at) {
  for (uint32_t i = 0; spread->lent > 0 && i < MLFAB__AGGREGATOR_LOANS; i++) {
    if (spread->loans[i].serial != 0 && spread->loans[i].end > at) return 1;
  }
  return 0;
}

/* Discards the records from r on. */
static void distributor_cut(mlfab__accumulator *spread, uint32_t r) {
  spread->nrecords = r;
  spread->filled = spread->records[r].before;
  if (!distributor_lent(spread, spread->records[r].at)) spread->end = spread->records[r].at;
  for (uint32_t i = 0; i < spread->nrecipients; i++) {
    if (spread->recipients[i].record > r) spread->recipients[i].record = r;
  }
}

/* Stores a frame. Errors: AGAIN (no room). */
static int distributor_keep(mlfab__aggregator *aggregator, mlfab__accumulator *spread,
                            const mlfab__model *model, const mlfab__frame_in *frame) {
  uint32_t n = spread->nrecords, bytes = frame->bulk_bytes;
  mlfab__record *records = mlfab__grow(aggregator->env, spread->records, &spread->record_room,
                                       (uint64_t)n + 1, sizeof *records);
  if (!records) return MLFAB_ERR_AGAIN;
  spread->records = records;
  if (!aggregator->ghost) {
    if (bytes > spread->room - spread->end) return MLFAB_ERR_AGAIN;
    if (bytes > 0) memcpy(spread->data + spread->end, frame->bulk, bytes);
  }
  records[n] =
      (mlfab__record){model->offset, model->version, model->commit, model->slice, model->flags,
                      model->epoch,  bytes,          model->bytes,  spread->end,  spread->filled};
  spread->nrecords++;
  spread->filled += model->bytes;
  spread->end += bytes;
  spread->complete = (model->flags & MLFAB__MODEL_LAST) != 0;
  return 0;
}

/* Returns a text if the frame contradicts the server's announcement, else NULL. */
static const char *distributor_check_frame(const mlfab__aggregator *aggregator,
                                           const mlfab__accumulator *spread,
                                           const mlfab__model *model,
                                           const mlfab__frame_in *frame) {
  int last = (model->flags & MLFAB__MODEL_LAST) != 0;
  int packed = (model->flags & MLFAB__MODEL_PACKED) != 0;
  if (spread->complete) return "a MODEL behind the last one of a spread";
  if (frame->bulk_bytes > 0 && (frame->bulk == NULL) != (aggregator->ghost != 0))
    return "ghosts for a model with bytes, or bytes for ghosts";
  if (packed ? aggregator->ghost : model->bytes != frame->bulk_bytes)
    return "a MODEL of a spread that is not as long as the stretch in its head";
  if (model->bytes > spread->bytes - spread->filled ||
      (last ? spread->filled + model->bytes != spread->bytes : model->bytes == 0))
    return "more or less bytes in a spread than its server said";
  return NULL;
}

MLFAB__INTERNAL int mlfab__distributor_model(mlfab__aggregator *aggregator, uint32_t server,
                                             const mlfab__frame_in *frame) {
  mlfab__model model;
  if (mlfab__decode_model(frame->meta, frame->meta_bytes, &model))
    return 0; /* left to the worker role */
  if (!(model.request & MLFAB__SPREAD_BIT)) return 0;
  mlfab__accumulator *spread = mlfab__aggregator_find(aggregator, server, model.request);
  if (!spread || spread->state != MLFAB__ACCUMULATOR_HANDING) return 1; /* given up meanwhile */
  for (uint32_t r = spread->complete ? 0 : spread->nrecords;
       r > 0 && spread->records[r - 1].slice == model.slice; r--) {
    if (spread->records[r - 1].offset != model.offset) continue;
    distributor_cut(spread, r - 1);
    break;
  }
  const char *wrong = distributor_check_frame(aggregator, spread, &model, frame);
  if (wrong) {
    aggregator->up.drop(aggregator->up.self, server, MLFAB_ERR_FRAME, wrong);
    return 1;
  }
  if (distributor_keep(aggregator, spread, &model, frame)) {
    mlfab__distributor_fail(aggregator, spread, MLFAB_ERR_AGAIN);
    return 1;
  }
  for (uint32_t i = 0; i < spread->nrecipients; i++) {
    mlfab__recipient *recipient = &spread->recipients[i];
    if (recipient->state != MLFAB__RECIPIENT_ACTIVE || !distributor_has(spread, recipient))
      continue;
    /* If the member had everything so far, nobody waited for it. */
    if (recipient->record + 1 == spread->nrecords && recipient->lent == 0)
      recipient->since_ns = aggregator->now_ns;
    aggregator->down.ready(aggregator->down.self, recipient->worker);
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__distributor_pull_fail(mlfab__aggregator *aggregator, uint32_t server,
                                                 const mlfab__frame_in *frame) {
  mlfab__pull_fail fail;
  if (mlfab__decode_pull_fail(frame->meta, frame->meta_bytes, &fail)) return 0;
  if (!(fail.request & MLFAB__SPREAD_BIT)) return 0;
  mlfab__accumulator *spread = mlfab__aggregator_find(aggregator, server, fail.request);
  /* The server serves the members itself. */
  if (spread && spread->state == MLFAB__ACCUMULATOR_HANDING)
    spread->state = MLFAB__ACCUMULATOR_FREE;
  return 1;
}

/* Gives a member up that has not begun: the server serves it itself. */
MLFAB__INTERNAL int mlfab__distributor_skip(mlfab__aggregator *aggregator, uint32_t server,
                                            const mlfab__frame_in *frame) {
  mlfab__spread_fail fail;
  if (MLFAB__MALFORMED(&aggregator->up, server, frame, spread_fail, &fail)) return 1;
  mlfab__accumulator *spread = mlfab__aggregator_find(aggregator, server, fail.request);
  if (!spread || spread->state != MLFAB__ACCUMULATOR_HANDING) return 1;
  for (uint32_t i = 0; i < spread->nrecipients; i++) {
    mlfab__recipient *recipient = &spread->recipients[i];
    if (recipient->worker != fail.worker || recipient->request != fail.member_request ||
        recipient->state != MLFAB__RECIPIENT_WAITING)
      continue;
    recipient->state = MLFAB__GIVEN_UP;
    distributor_closed(aggregator, spread);
    return 1;
  }
  return 1;
}

/* --- links --- */

MLFAB__INTERNAL void mlfab__distributor_met(mlfab__aggregator *aggregator) {
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *spread = &aggregator->accumulators[i];
    for (uint32_t k = 0; k < spread->nrecipients; k++) {
      mlfab__recipient *recipient = &spread->recipients[k];
      if (spread->state == MLFAB__ACCUMULATOR_HANDING &&
          recipient->state <= MLFAB__RECIPIENT_ACTIVE && aggregator->connected[recipient->worker] &&
          aggregator->incarnations[recipient->worker] > recipient->incarnation)
        distributor_give_up(aggregator, spread, recipient, MLFAB_ERR_PEER_DEAD);
    }
    if (spread->state == MLFAB__ACCUMULATOR_HANDING) distributor_activate(aggregator, spread);
  }
}

/* Bytes sent on a lost link may be lost, too. */
MLFAB__INTERNAL void mlfab__distributor_lost(mlfab__aggregator *aggregator, uint32_t member) {
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *spread = &aggregator->accumulators[i];
    for (uint32_t k = 0; k < spread->nrecipients; k++) {
      mlfab__recipient *recipient = &spread->recipients[k];
      if (spread->state != MLFAB__ACCUMULATOR_HANDING || recipient->worker != member) continue;
      recipient->lent = 0;
      recipient->since_ns = aggregator->now_ns;
      if (recipient->state == MLFAB__RECIPIENT_ACTIVE)
        distributor_give_up(aggregator, spread, recipient, MLFAB_ERR_PEER_DEAD);
      if (recipient->state == MLFAB__RECIPIENT_DONE) {
        distributor_post_fail(aggregator, spread->server, spread->number, recipient,
                              MLFAB_ERR_PEER_DEAD);
        recipient->state = MLFAB__GIVEN_UP;
      }
    }
  }
}

/* --- frames to go --- */

/* Returns a member of the spread for which this worker's link has room, or NULL. */
static const mlfab__recipient *distributor_next(const mlfab__aggregator *aggregator,
                                                const mlfab__accumulator *spread, uint32_t member) {
  for (uint32_t i = 0; i < spread->nrecipients; i++) {
    const mlfab__recipient *recipient = &spread->recipients[i];
    if (recipient->state == MLFAB__RECIPIENT_ACTIVE && recipient->worker == member &&
        distributor_has(spread, recipient) &&
        (aggregator->ghost || mlfab__aggregator_lends(spread, 0, member)))
      return recipient;
  }
  return NULL;
}

MLFAB__INTERNAL int mlfab__aggregator_next_down(mlfab__aggregator *aggregator, uint32_t member,
                                                mlfab__frame_out *frame) {
  const mlfab__accumulator *best = NULL;
  const mlfab__recipient *recipient = NULL;
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    const mlfab__accumulator *spread = &aggregator->accumulators[i];
    if (spread->state != MLFAB__ACCUMULATOR_HANDING || (best && best->age < spread->age)) continue;
    const mlfab__recipient *next = distributor_next(aggregator, spread, member);
    if (!next) continue;
    best = spread;
    recipient = next;
  }
  if (!best) return 0;
  const mlfab__record *record = &best->records[recipient->record];
  mlfab__hop_model model = {recipient->request, record->offset,    record->stretch, record->version,
                            record->commit,     record->slice,     record->flags,   record->epoch,
                            best->server,       recipient->attempt};
  frame->type = MLFAB__HOP_MODEL;
  frame->meta_bytes = mlfab__encode_hop_model(frame->meta, &model);
  frame->bulk_bytes = record->bulk;
  frame->note[0] = (uint64_t)(recipient - best->recipients);
  mlfab__aggregator_offer(aggregator, best, 0, member, record->at, frame);
  return 1;
}

MLFAB__INTERNAL void mlfab__aggregator_taken_down(mlfab__aggregator *aggregator, uint32_t member,
                                                  const mlfab__frame_out *frame) {
  mlfab__accumulator *spread = &aggregator->accumulators[frame->slot];
  mlfab__recipient *recipient = &spread->recipients[frame->note[0]];
  const mlfab__record *record = &spread->records[recipient->record++];
  recipient->lent += (uint32_t)mlfab__aggregator_lend(
      aggregator, 0, member, (uint32_t)frame->note[0], record->at + record->bulk, frame);
  recipient->moved = 1;
  distributor_check(aggregator, spread, recipient);
}

MLFAB__INTERNAL void mlfab__distributor_returned(mlfab__aggregator *aggregator,
                                                 mlfab__accumulator *spread, uint32_t index) {
  mlfab__recipient *recipient = &spread->recipients[index];
  if (recipient->lent > 0) recipient->lent--;
  recipient->moved = 1;
  aggregator->down.ready(aggregator->down.self, recipient->worker);
  distributor_check(aggregator, spread, recipient);
}

/* --- time --- */

MLFAB__INTERNAL void mlfab__distributor_tick(mlfab__aggregator *aggregator,
                                             mlfab__accumulator *spread) {
  uint64_t now = aggregator->now_ns, beat = aggregator->config->heartbeat_ns;
  for (uint32_t i = 0; i < spread->nrecipients; i++) {
    mlfab__recipient *recipient = &spread->recipients[i];
    int active = recipient->state == MLFAB__RECIPIENT_ACTIVE;
    /* It waits for records, or for room to borrow. */
    int idle = recipient->lent == 0 &&
               (!distributor_has(spread, recipient) ||
                (!aggregator->ghost && !mlfab__aggregator_lends(spread, 0, recipient->worker)));
    if (active && (recipient->moved || idle)) recipient->since_ns = now;
    recipient->moved = 0;
    if (!active &&
        (recipient->state != MLFAB__RECIPIENT_WAITING ||
         mlfab__aggregator_stands(aggregator, recipient->worker, recipient->incarnation)))
      continue;
    if (!mlfab__port_stalled(&aggregator->down, recipient->worker, 1, recipient->since_ns, now,
                             3 * beat, MLFAB__PORT_STANDS_BEATS * beat))
      continue;
    aggregator->stats->transfers_revoked++;
    distributor_give_up(aggregator, spread, recipient, MLFAB_ERR_PEER_DEAD);
    if (spread->state == MLFAB__ACCUMULATOR_FREE) return;
  }
  spread->since_ns = now;
}

MLFAB__INTERNAL uint64_t mlfab__distributor_deadline(const mlfab__aggregator *aggregator,
                                                     const mlfab__accumulator *spread) {
  uint64_t beat = aggregator->config->heartbeat_ns, deadline = MLFAB__NEVER;
  for (uint32_t i = 0; i < spread->nrecipients; i++) {
    const mlfab__recipient *recipient = &spread->recipients[i];
    if (recipient->state == MLFAB__RECIPIENT_ACTIVE)
      deadline = mlfab__min(deadline, mlfab__add_sat(spread->since_ns, beat));
    if (recipient->state == MLFAB__RECIPIENT_WAITING &&
        !mlfab__aggregator_stands(aggregator, recipient->worker, recipient->incarnation))
      deadline =
          mlfab__min(deadline, mlfab__port_stalls_at(recipient->since_ns, aggregator->now_ns,
                                                     3 * beat, MLFAB__PORT_STANDS_BEATS * beat));
  }
  return deadline;
}
