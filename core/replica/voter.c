/* voter.c - sends, stores and hears the votes of a node. See voter.h. */
#include "voter.h"

/* Returns the part of a voter in a shard, and its number in the node. */
static uint32_t voter_part(const mlfab__voters *voters, uint32_t voter) {
  return voter / voters->node->config.servers; /* copy 0, copy 1, and behind both the scheduler */
}

static uint32_t voter_of(const mlfab__voter_shard *shard, uint32_t part) {
  uint32_t servers = shard->voters->node->config.servers;
  return part == MLFAB__VOTER_WITNESS ? part * servers : part * servers + shard->shard;
}

_Static_assert(MLFAB__VOTER_A == 0 && MLFAB__VOTER_B == 1 && MLFAB__VOTER_WITNESS == 2,
               "voters are numbered by part");

/* --- out --- */

static void voter_send(void *user, uint32_t to, const mlfab__vote_message *message) {
  mlfab__voter_shard *shard = user;
  mlfab__port *port = &shard->voters->port;
  const mlfab__vote_frame frame = {shard->shard, *message};
  MLFAB__POST(port, voter_of(shard, to), MLFAB__VOTE, vote_frame, &frame);
}

static uint64_t voter_quiet(void *user, uint32_t from) {
  const mlfab__voter_shard *shard = user;
  const mlfab__port *in = &shard->voters->in;
  return in->silent(in->self, voter_of(shard, from), 0);
}

static void voter_store(void *user, const mlfab__vote_record *record) {
  mlfab__voter_shard *shard = user;
  shard->stored = *record;
  shard->pending = 1;
}

/* --- what is stored --- */

MLFAB__INTERNAL void mlfab__voters_begin(mlfab__voters *voters) {
  const mlfab_node *node = voters->node;
  voters->phase = MLFAB__VOTERS_VOTE;
  for (uint32_t i = 0; i < voters->n; i++) {
    mlfab__voter_shard *s = &voters->shards[i];
    s->vote.user = s;
    s->vote.send = voter_send;
    s->vote.store = voter_store;
    s->vote.quiet = voters->in.silent ? voter_quiet : NULL;
    mlfab__vote_begin(&s->vote, voter_part(voters, node->voter), node->config.heartbeat_ns,
                      node->nonce, s->stored.epoch ? &s->stored : NULL, node->fresh, node->now_ns);
    if (s->stored.epoch)
      mlfab__log(&node->env, MLFAB_LOG_INFO,
                 "votes: the stored record of server %u is read; it votes from now on", s->shard);
  }
}

MLFAB__INTERNAL void mlfab__voters_stored(mlfab__voters *voters) {
  for (uint32_t i = 0; i < voters->n; i++) {
    mlfab__voter_shard *s = &voters->shards[i];
    if (!s->pending || s->written != s->stored.epoch) continue;
    s->pending = 0;
    mlfab__vote_stored(&s->vote, voters->node->now_ns);
  }
}

MLFAB__INTERNAL void mlfab__voters_settle(mlfab__voters *voters) {
  int dirty = 0;
  if (voters->phase != MLFAB__VOTERS_VOTE) return;
  for (uint32_t i = 0; i < voters->n; i++) {
    mlfab__voter_shard *s = &voters->shards[i];
    dirty |= s->pending;
    if (!voters->disk) s->written = s->stored.epoch;
  }
  int waits = voters->retry_ns && voters->node->now_ns < voters->retry_ns;
  if (!voters->disk)
    mlfab__voters_stored(voters);
  else if (dirty && !waits)
    voters->disk->write(voters);
}

/* --- in --- */

MLFAB__INTERNAL int mlfab__voters_frame(mlfab__voters *voters, uint32_t from,
                                        const mlfab__frame_in *frame) {
  mlfab__vote_frame in;
  if (mlfab__decode_vote_frame(frame->meta, frame->meta_bytes, &in)) return MLFAB_ERR_FRAME;
  uint32_t i = in.shard - voters->shards[0].shard;
  if (in.shard < voters->shards[0].shard || i >= voters->n ||
      voter_of(&voters->shards[i], voter_part(voters, from)) != from)
    return MLFAB_ERR_FRAME;
  if (voters->phase != MLFAB__VOTERS_VOTE) return 0;
  mlfab__vote *vote = &voters->shards[i].vote;
  int known = vote->known;
  mlfab__vote_take(vote, voter_part(voters, from), &in.message, voters->node->now_ns);
  if (vote->known && !known)
    mlfab__log(&voters->node->env, MLFAB_LOG_INFO,
               "votes: both other voters of server %u have reported; it votes from now on",
               in.shard);
  return 0;
}

/* --- time --- */

MLFAB__INTERNAL void mlfab__voters_awake(mlfab__voters *voters, uint64_t late_ns, uint64_t now_ns) {
  for (uint32_t i = 0; voters->phase == MLFAB__VOTERS_VOTE && i < voters->n; i++)
    mlfab__vote_awake(&voters->shards[i].vote, late_ns, now_ns);
}

MLFAB__INTERNAL void mlfab__voters_tick(mlfab__voters *voters) {
  const mlfab_node *node = voters->node;
  if (node->phase != MLFAB__BOOTSTRAP_GREETING && node->phase != MLFAB__BOOTSTRAP_READY) return;
  if (voters->phase == MLFAB__VOTERS_WAIT) {
    if (node->fresh || !voters->disk) {
      mlfab__voters_begin(voters);
    } else {
      voters->phase = MLFAB__VOTERS_READ;
      voters->disk->read(voters);
    }
  }
  if (voters->phase != MLFAB__VOTERS_VOTE) return;
  for (uint32_t i = 0; i < voters->n; i++) mlfab__vote_tick(&voters->shards[i].vote, node->now_ns);
}

MLFAB__INTERNAL uint64_t mlfab__voters_deadline(const mlfab__voters *voters) {
  const mlfab_node *node = voters->node;
  uint64_t due_ns = voters->retry_ns > node->now_ns ? voters->retry_ns : MLFAB__NEVER;
  int joined = node->phase == MLFAB__BOOTSTRAP_GREETING || node->phase == MLFAB__BOOTSTRAP_READY;
  if (voters->phase == MLFAB__VOTERS_WAIT && joined) return 0;
  if (voters->phase != MLFAB__VOTERS_VOTE) return due_ns;
  for (uint32_t i = 0; i < voters->n; i++)
    due_ns = mlfab__min(due_ns, mlfab__vote_deadline(&voters->shards[i].vote));
  return due_ns;
}

/* --- open and close --- */

MLFAB__INTERNAL int mlfab__voters_init(mlfab__voters *voters, mlfab_node *node,
                                       const mlfab__port *port, const mlfab__port *in,
                                       uint32_t first, uint32_t n, const mlfab__voter_disk *disk) {
  *voters = (mlfab__voters){.node = node, .port = *port, .in = *in, .n = n};
  voters->shards = mlfab__alloc_array(&node->env, n, sizeof *voters->shards);
  if (!voters->shards) return MLFAB_ERR_MEMORY;
  for (uint32_t i = 0; i < n; i++)
    voters->shards[i] = (mlfab__voter_shard){.voters = voters, .shard = first + i};
  if (!node->config.vote_dir[0] || !disk) return 0;
  voters->disk = disk;
  return disk->open(voters);
}

MLFAB__INTERNAL void mlfab__voters_free(mlfab__voters *voters) {
  if (!voters->node) return;
  mlfab__free(&voters->node->env, voters->shards, voters->n * sizeof *voters->shards);
  voters->shards = NULL;
  if (voters->disk) voters->disk->free(voters);
}
