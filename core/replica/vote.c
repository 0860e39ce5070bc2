/* vote.c - the votes on one shard: grants, leases, promotion. See vote.h. */
#include "vote.h"

static int vote_same(const mlfab__vote_record *a, const mlfab__vote_record *b) {
  return a->epoch == b->epoch && a->serves == b->serves && a->insync == b->insync;
}

/* Could a voter send this record? `none`: an empty record is possible, too. */
static int vote_possible(const mlfab__vote_record *r, int none) {
  uint32_t copies = 1u << MLFAB__VOTER_A | 1u << MLFAB__VOTER_B;
  if (r->epoch == 0) return none;
  return r->serves < MLFAB__VOTER_WITNESS && (r->insync & ~copies) == 0 &&
         (r->insync >> r->serves & 1);
}

static const mlfab__vote_record *vote_later(const mlfab__vote_record *a,
                                            const mlfab__vote_record *b) {
  return b->epoch > a->epoch ? b : a;
}

/* Notes that this record is decided. No other record of its epoch counts, whatever this voter had granted. */
static void vote_decide(mlfab__vote *vote, const mlfab__vote_record *record) {
  if (record->epoch <= vote->decided.epoch) return;
  vote->decided = *record;
  if (record->serves != vote->self) vote->wanted = 0; /* its wish was for its own term */
  if (record->epoch >= vote->bond.epoch) vote->bond = *record;
  if (vote->floor < record->epoch) vote->floor = record->epoch;
  if (vote->own.epoch <= record->epoch) vote->asking = 0;
}

MLFAB__INTERNAL void mlfab__vote_begin(mlfab__vote *vote, uint32_t self, uint64_t beat_ns,
                                       uint64_t nonce, const mlfab__vote_record *stored, int fresh,
                                       uint64_t now_ns) {
  static const mlfab__vote_record first = {1, MLFAB__VOTER_A, 1u << MLFAB__VOTER_A};
  static const mlfab__vote_record none = {0, 0, 0};
  vote->self = self;
  vote->beat_ns = beat_ns;
  vote->nonce = nonce;
  vote->known = stored || fresh;
  vote->empty = self == MLFAB__VOTER_B || (self == MLFAB__VOTER_A && !fresh);
  vote->bond = stored ? *stored : fresh ? first : none;
  vote->decided = fresh && !stored ? first : none;
  vote->floor = vote->bond.epoch;
  vote->own = vote->stores = vote->heard = none;
  vote->wanted = 0;
  vote->asking = vote->outbid = 0;
  vote->said_ns = vote->looked_ns = 0;
  memset(vote->peers, 0, sizeof vote->peers);
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) vote->peers[i].heard_ns = now_ns;
}

MLFAB__INTERNAL int mlfab__vote_silent(const mlfab__vote *vote, uint32_t other, uint64_t now_ns) {
  const mlfab__vote_peer *peer = &vote->peers[other];
  uint64_t patience_ns = MLFAB__VOTE_SILENT_BEATS * vote->beat_ns;
  if (now_ns - peer->heard_ns < patience_ns) return 0;
  return other == vote->self || peer->empty || !vote->quiet ||
         vote->quiet(vote->user, other) >= patience_ns;
}

MLFAB__INTERNAL void mlfab__vote_awake(mlfab__vote *vote, uint64_t late_ns, uint64_t now_ns) {
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++)
    mlfab__later(&vote->peers[i].heard_ns, late_ns, now_ns);
}

MLFAB__INTERNAL int mlfab__vote_serves(const mlfab__vote *vote) {
  return vote->decided.epoch > 0 && vote->decided.serves == vote->self &&
         vote->bond.serves == vote->self && !vote->empty;
}

MLFAB__INTERNAL int mlfab__vote_may_ack(const mlfab__vote *vote, uint64_t now_ns) {
  if (!mlfab__vote_serves(vote)) return 0;
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) {
    uint64_t lease = vote->peers[i].lease_ns;
    if (lease && now_ns - lease < MLFAB__VOTE_LEASE_BEATS * vote->beat_ns) return 1;
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__vote_filled(mlfab__vote *vote) { vote->empty = 0; }

/* --- out --- */

static void vote_send(const mlfab__vote *vote, uint32_t to, uint32_t kind,
                      const mlfab__vote_record *record, uint64_t now_ns) {
  const mlfab__vote_peer *peer = &vote->peers[to];
  mlfab__vote_message message;
  memset(&message, 0, sizeof message);
  message.kind = kind;
  message.known = vote->known != 0;
  message.empty = vote->empty != 0;
  message.floor = vote->floor;
  if (record) message.record = *record;
  message.decided = vote->decided;
  message.bond = vote->bond;
  message.nonce = vote->nonce;
  message.sent_ns = now_ns;
  if (vote->known && vote->bond.serves == to && !vote->asking) {
    message.echo_nonce = peer->nonce;
    message.echo_ns = peer->sent_ns;
  }
  vote->send(vote->user, to, &message);
}

static void vote_send_all(const mlfab__vote *vote, uint32_t kind, const mlfab__vote_record *record,
                          uint64_t now_ns) {
  for (uint32_t to = 0; to < MLFAB__VOTERS; to++) {
    if (to != vote->self) vote_send(vote, to, kind, record, now_ns);
  }
}

/* Stores the record; mlfab__vote_stored goes on. */
static void vote_grant(mlfab__vote *vote, const mlfab__vote_record *record, uint32_t grantee) {
  vote->floor = record->epoch;
  vote->asking = 0;
  vote->stores = *record;
  vote->grantee = grantee;
  if (grantee == vote->self) {
    vote->own = *record;
  } else {
    vote->bond = *record;
  }
  vote->store(vote->user, record);
}

MLFAB__INTERNAL void mlfab__vote_stored(mlfab__vote *vote, uint64_t now_ns) {
  mlfab__vote_record record = vote->stores;
  vote->stores.epoch = 0;
  if (record.epoch == 0) return;
  if (vote->grantee != vote->self) {
    vote_send(vote, vote->grantee, MLFAB__VOTE_GRANT, &record, now_ns);
  } else if (vote->decided.epoch < record.epoch) {
    vote->asking = 1;
    vote_send_all(vote, MLFAB__VOTE_ASK, &record, now_ns);
  }
}

/* --- what this voter wants --- */

static void vote_propose(mlfab__vote *vote, uint32_t insync) {
  uint32_t epoch = vote->floor;
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) {
    if (vote->peers[i].floor > epoch) epoch = vote->peers[i].floor;
  }
  const mlfab__vote_record record = {epoch + 1, vote->self, insync};
  vote->outbid = 0;
  vote_grant(vote, &record, vote->self);
}

/* Returns the copy that this one may replace when it is silent, or MLFAB__VOTERS: none. */
static uint32_t vote_replaces(const mlfab__vote *vote) {
  const mlfab__vote_record *bond = vote_later(&vote->bond, &vote->heard);
  int may = bond->epoch > 0 && bond->serves != vote->self && (bond->insync >> vote->self & 1);
  return may ? bond->serves : MLFAB__VOTERS;
}

/* May this copy try to replace the one that serves? */
static int vote_may_replace(const mlfab__vote *vote, uint64_t now_ns) {
  uint32_t other = vote_replaces(vote);
  return other < MLFAB__VOTERS && mlfab__vote_silent(vote, other, now_ns);
}

/* Has some voter granted an epoch beyond the one in force, or this epoch to another record? */
static int vote_passed(const mlfab__vote *vote, uint32_t epoch) {
  if (vote->asking && vote->outbid) return 1;
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) {
    if (i != vote->self && vote->peers[i].floor > epoch) return 1;
  }
  return 0;
}

static void vote_act(mlfab__vote *vote, uint64_t now_ns) {
  if (!vote->known || vote->self == MLFAB__VOTER_WITNESS || vote->empty || vote->stores.epoch)
    return;
  if (mlfab__vote_serves(vote)) {
    uint32_t insync = vote->wanted | 1u << vote->self;
    /* Asks again under a larger epoch when another voter is beyond its own. */
    if (vote->asking ? vote_passed(vote, vote->own.epoch) || insync != vote->own.insync
                     : vote_passed(vote, vote->decided.epoch) || insync != vote->decided.insync)
      vote_propose(vote, insync);
  } else if (!vote_may_replace(vote, now_ns)) {
    vote->asking = 0;
  } else if (!vote->asking || vote_passed(vote, vote->own.epoch)) {
    vote_propose(vote, 1u << vote->self);
  }
}

MLFAB__INTERNAL void mlfab__vote_want(mlfab__vote *vote, uint32_t insync, uint64_t now_ns) {
  vote->wanted = insync;
  vote_act(vote, now_ns);
}

MLFAB__INTERNAL void mlfab__vote_tick(mlfab__vote *vote, uint64_t now_ns) {
  vote->looked_ns = now_ns;
  vote_act(vote, now_ns);
  if (vote->said_ns && now_ns - vote->said_ns < vote->beat_ns) return;
  vote->said_ns = now_ns;
  vote_send_all(vote, MLFAB__VOTE_BEAT, NULL, now_ns);
  if (vote->asking) vote_send_all(vote, MLFAB__VOTE_ASK, &vote->own, now_ns);
}

MLFAB__INTERNAL uint64_t mlfab__vote_deadline(const mlfab__vote *vote) {
  uint64_t due = vote->said_ns + vote->beat_ns;
  /* Only a copy that may ask to serve must act as soon as the other copy is silent. */
  uint32_t other = vote_replaces(vote);
  if (vote->self == MLFAB__VOTER_WITNESS || vote->empty || vote->asking || vote->stores.epoch ||
      !vote->known || mlfab__vote_serves(vote) || other >= MLFAB__VOTERS || other == vote->self)
    return due;
  uint64_t silent_ns = vote->peers[other].heard_ns + MLFAB__VOTE_SILENT_BEATS * vote->beat_ns;
  /* The link was not silent at the last look. */
  if (silent_ns <= vote->looked_ns) silent_ns = vote->looked_ns + vote->beat_ns / 4;
  return mlfab__min(due, silent_ns);
}

/* --- messages --- */

static int vote_judge(const mlfab__vote *vote, uint32_t from, const mlfab__vote_message *in,
                      uint64_t now_ns) {
  const mlfab__vote_record *r = &in->record, *by = vote_later(&vote->bond, &in->bond);
  if (!vote->known || r->serves != from || r->epoch <= vote->floor) return 0;
  if (by->serves == from) return 1;
  if (by->serves == vote->self) return 0;
  if (!(by->insync >> from & 1)) return 0;
  return mlfab__vote_silent(vote, by->serves, now_ns);
}

static void vote_asked(mlfab__vote *vote, uint32_t from, const mlfab__vote_message *in,
                       uint64_t now_ns) {
  if (vote->stores.epoch) return; /* it asks again */
  if (vote->known && vote_same(&in->record, &vote->bond) &&
      vote->decided.epoch < vote->bond.epoch) {
    vote_send(vote, from, MLFAB__VOTE_GRANT, &in->record, now_ns);
  } else if (vote_judge(vote, from, in, now_ns)) {
    vote_grant(vote, &in->record, from);
  } else {
    vote_send(vote, from, MLFAB__VOTE_DENY, NULL, now_ns);
  }
}

/* After a voter has lost its memory: it takes over the others' bonds and epochs. */
static void vote_learn(mlfab__vote *vote, uint32_t from, const mlfab__vote_message *in) {
  if (vote->known || !in->known) return;
  vote->bond = *vote_later(&vote->bond, &in->bond);
  if (in->floor > vote->floor) vote->floor = in->floor;
  vote->peers[from].told = 1;
  uint32_t told = 0;
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) told += vote->peers[i].told;
  if (told == MLFAB__VOTERS - 1) vote->known = 1;
}

MLFAB__INTERNAL void mlfab__vote_take(mlfab__vote *vote, uint32_t from,
                                      const mlfab__vote_message *in, uint64_t now_ns) {
  if (from >= MLFAB__VOTERS || from == vote->self || !vote_possible(&in->decided, 1) ||
      !vote_possible(&in->bond, 1) ||
      !vote_possible(&in->record, in->kind == MLFAB__VOTE_BEAT || in->kind == MLFAB__VOTE_DENY))
    return;
  mlfab__vote_peer *peer = &vote->peers[from];
  if (!in->empty) peer->heard_ns = now_ns;
  peer->empty = in->empty != 0;
  if (peer->nonce != in->nonce) peer->sent_ns = 0;
  peer->nonce = in->nonce;
  if (in->sent_ns > peer->sent_ns) peer->sent_ns = in->sent_ns;
  if (in->floor > peer->floor) peer->floor = in->floor;
  if (in->echo_nonce == vote->nonce && in->echo_ns <= now_ns && in->echo_ns > peer->lease_ns)
    peer->lease_ns = in->echo_ns;
  vote_decide(vote, &in->decided);
  if (in->bond.epoch > vote->heard.epoch && in->bond.serves != vote->self) vote->heard = in->bond;
  vote_learn(vote, from, in);
  if (!mlfab__vote_serves(vote) && !vote_may_replace(vote, now_ns)) vote->asking = 0;
  if (in->kind == MLFAB__VOTE_ASK) {
    vote_asked(vote, from, in, now_ns);
  } else if (in->kind == MLFAB__VOTE_GRANT && vote->asking && vote_same(&in->record, &vote->own)) {
    vote_decide(vote, &vote->own);
  } else if (in->kind == MLFAB__VOTE_DENY && vote->asking && in->floor >= vote->own.epoch) {
    vote->outbid = 1;
  }
}
