/* voter.c - the votes of a node. See voter.h. */
#include "voter.h"

#include <stdio.h>

/* A voter's part in a shard, and its number in the node. */
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

/* --- the file --- */

static uint32_t voter_file_bytes(uint32_t n) {
  return MLFAB__RECORD_BYTES + 16 + n * MLFAB__VOTE_RECORD_BYTES;
}

static void voter_write(mlfab__voters *voters) {
  mlfab_file_op *op = &voters->filer->op;
  uint8_t *meta = voters->bytes + MLFAB__RECORD_BYTES;
  const mlfab__votes votes = {voters->node->fabric, voters->n};
  mlfab__file_record record = {
      .type = MLFAB__RECORD_VOTES,
      .meta_bytes = mlfab__encode_votes(meta, &votes),
      .bulk_bytes = voters->n * MLFAB__VOTE_RECORD_BYTES,
  };
  uint8_t *table = meta + record.meta_bytes;
  record.bulk = table;
  for (uint32_t i = 0; i < voters->n; i++) {
    mlfab__encode_vote_record(table + i * MLFAB__VOTE_RECORD_BYTES, &voters->shards[i].stored);
    voters->shards[i].written = voters->shards[i].pending ? voters->shards[i].stored.epoch : 0;
  }
  mlfab__record_seal(voters->bytes, &record);
  op->kind = MLFAB_FILE_WRITE;
  op->flags = MLFAB_FILE_FIRST | MLFAB_FILE_LAST;
  op->path = voters->path;
  op->head = voters->bytes;
  op->head_bytes = MLFAB__RECORD_BYTES + record.meta_bytes + record.bulk_bytes;
  op->bulk = NULL;
  op->bulk_bytes = 0;
  mlfab__files_ask(voters->filer);
}

static void voter_begin(mlfab__voters *voters) {
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
                 "votes: what was stored of server %u is there; it votes from now on", s->shard);
  }
}

/* What the file has, if it is of this fabric. */
static void voter_read(mlfab__voters *voters, const mlfab_io_event *event) {
  mlfab__file_record record;
  mlfab__votes votes;
  const char *why = NULL;
  if (event->code) return;
  int64_t n = mlfab__record_open(event->bulk, event->bulk_bytes, &record, &why);
  int bad = n <= 0 || (uint64_t)n != event->bulk_bytes || record.type != MLFAB__RECORD_VOTES ||
            mlfab__decode_votes(record.meta, record.meta_bytes, &votes) ||
            votes.shards != voters->n || record.bulk_bytes != voters->n * MLFAB__VOTE_RECORD_BYTES;
  if (bad) {
    mlfab__log(&voters->node->env, MLFAB_LOG_WARN, "votes: '%s' is damaged: %s", voters->path,
               why ? why : "not a voter's file");
    return;
  }
  if (votes.fabric != voters->node->fabric) return;
  for (uint32_t i = 0; i < voters->n; i++)
    mlfab__decode_vote_record(record.bulk + i * MLFAB__VOTE_RECORD_BYTES,
                              &voters->shards[i].stored);
}

static void voter_event(void *self, const mlfab_io_event *event) {
  mlfab__voters *voters = self;
  if (voters->phase == MLFAB__VOTERS_READ) {
    voter_read(voters, event);
    voter_begin(voters);
    return;
  }
  if (voters->filer->op.kind == MLFAB_FILE_ABORT) return; /* it may fail, too */
  if (event->code) {
    if (!voters->retry_ns)
      mlfab__log(&voters->node->env, MLFAB_LOG_WARN, "votes: cannot write '%s': %s", voters->path,
                 event->text ? event->text : mlfab_error_text(event->code));
    voters->retry_ns = voters->node->now_ns + voters->node->config.heartbeat_ns;
    voters->filer->op.kind = MLFAB_FILE_ABORT;
    voters->filer->op.head_bytes = 0;
    mlfab__files_ask(voters->filer);
    return;
  }
  voters->retry_ns = 0;
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
    if (!s->pending) continue;
    dirty = 1;
    if (voters->path[0]) continue;
    s->pending = 0;
    mlfab__vote_stored(&s->vote, voters->node->now_ns);
  }
  int waits = voters->retry_ns && voters->node->now_ns < voters->retry_ns;
  if (dirty && voters->path[0] && !voters->filer->busy && !waits) voter_write(voters);
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
               "votes: both others of server %u have told what they know; it votes from now on",
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
    if (node->fresh || !voters->path[0]) {
      voter_begin(voters);
    } else {
      voters->phase = MLFAB__VOTERS_READ;
      voters->filer->op.kind = MLFAB_FILE_READ;
      voters->filer->op.path = voters->path;
      voters->filer->op.offset = 0;
      voters->filer->op.bytes = voters->file_bytes + 1;
      mlfab__files_ask(voters->filer);
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
                                       uint32_t first, uint32_t n) {
  *voters = (mlfab__voters){.node = node, .port = *port, .in = *in, .n = n};
  voters->file_bytes = voter_file_bytes(n);
  voters->shards = mlfab__alloc_array(&node->env, n, sizeof *voters->shards);
  voters->bytes = mlfab__alloc(&node->env, voters->file_bytes);
  if (!voters->shards || !voters->bytes) return MLFAB_ERR_MEMORY;
  for (uint32_t i = 0; i < n; i++)
    voters->shards[i] = (mlfab__voter_shard){.voters = voters, .shard = first + i};
  if (!node->config.vote_dir[0]) return 0;
  voters->filer = mlfab__files_open(&voters->files, node, voters, voter_event);
  snprintf(voters->path, sizeof voters->path, "%s/votes-%016llx-%u", node->config.vote_dir,
           (unsigned long long)node->job, node->id);
  return 0;
}

MLFAB__INTERNAL void mlfab__voters_free(mlfab__voters *voters) {
  if (!voters->node) return;
  mlfab__free(&voters->node->env, voters->shards, voters->n * sizeof *voters->shards);
  mlfab__free(&voters->node->env, voters->bytes, voters->file_bytes);
  voters->shards = NULL;
  voters->bytes = NULL;
}
