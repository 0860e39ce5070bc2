/* copy.c - streams a server's state to its replica, receives such a stream, and takes over. See copy.h. */
#include "copy.h"

#include <stdio.h>

enum { COPY_SUSPEND_BEATS = 6 };

static mlfab__vote *copy_vote(mlfab__copy *c) { return &c->voters.shards[0].vote; }

/* Has the first vote begun? */
static int copy_votes(const mlfab__copy *c) { return c->voters.phase == MLFAB__VOTERS_VOTE; }

static void copy_event(const mlfab__copy *c, uint32_t kind, int code, const char *text) {
  c->port.event(c->port.self, kind, (int32_t)c->server->number, 1, 0, code, text);
}

static const char *copy_name(uint32_t part) {
  return part == MLFAB__VOTER_A   ? "the server"
         : part == MLFAB__VOTER_B ? "its replica"
                                  : "the scheduler";
}

/* --- sender --- */

/* Ends the moment under way; the transport gives back its loans. */
static void copy_unsend(mlfab__copy *c) {
  for (uint32_t i = 0; i < MLFAB__COPY_LOANS; i++) {
    if (c->lent >> i & 1) c->port.detach(c->port.self, c->peer, 1 + i);
  }
  c->lent = 0;
  if (c->sends) mlfab__keeper_unsend(c->server);
  c->sends = c->ready = 0;
  mlfab__moment_unpin(&c->moment);
}

static void copy_fetch(mlfab__copy *c) {
  c->moment.chunk = mlfab__port_chunk(&c->port, c->peer, c->node->config.chunk_bytes);
  c->ready = mlfab__moment_next(&c->moment, c->meta + MLFAB__MOMENT_FRAME_BYTES, &c->record);
  if (c->ready) c->port.ready(c->port.self, c->peer);
}

/* Sends END alone. */
static void copy_send_bare(mlfab__copy *c) {
  if (c->has > 0) return;
  c->number++;
  c->at = c->since = 0;
  c->bare = c->joins = c->ready = 1;
  c->sends = MLFAB__SENDS_RECORDS;
  c->began_ns = c->node->now_ns;
  c->record = (mlfab__file_record){.type = MLFAB__RECORD_END};
  mlfab__keeper_moment(c->server, 1);
  c->port.ready(c->port.self, c->peer);
}

/* Pins the next moment if one is due. */
static void copy_send(mlfab__copy *c) {
  mlfab__server *server = c->server;
  const mlfab__keeper *keeper = server->keeping;
  int waits =
      server->apply.applying != MLFAB__APPLY_NONE && server->apply.applying != MLFAB__APPLY_HELD;
  /* A model without first weights waits for them, or for a checkpoint. */
  int none = server->phase == MLFAB__NO_MODEL && server->layout.nslices == 0;
  waits |= !none && server->phase != MLFAB__MODEL_STANDS;
  if (c->phase != MLFAB__COPY_SERVES || !c->link_up || c->sends || c->lent || c->drops || waits ||
      server->move.held || c->node->now_ns < c->retry_ns)
    return;
  if (none) {
    copy_send_bare(c);
    return;
  }
  int wanted = copy_vote(c)->wanted >> c->other & 1;
  int joins = c->has > 0 && keeper->phase != MLFAB__KEEPER_IN_SYNC && !wanted;
  if (c->has > 0 && !joins && !mlfab__keeper_behind(server)) return;
  c->since = c->has > 0 ? c->has_at : 0;
  c->bare = 0;
  c->moment.complete = 1;
  if (mlfab__moment_pin(&c->moment, server->env, server, c->since)) {
    c->retry_ns = c->node->now_ns + c->node->config.heartbeat_ns;
    return;
  }
  c->retry_ns = 0;
  c->number++;
  c->at = c->moment.at;
  c->joins = joins;
  c->began_ns = c->node->now_ns;
  c->sends = MLFAB__SENDS_RECORDS;
  mlfab__keeper_moment(server, joins);
  copy_fetch(c);
}

static int copy_next(void *self, mlfab__at at, mlfab__frame_out *frame) {
  mlfab__copy *c = self;
  if (at.kind != MLFAB__LINK_VOTER || at.peer != c->peer || !c->ready) return 0;
  /* END says that the moment is complete: so all records must have left, unspoilt. */
  if (c->record.type == MLFAB__RECORD_END && c->lent) return 0;
  uint32_t slot = 0;
  while (slot < MLFAB__COPY_LOANS && (c->lent >> slot & 1)) slot++;
  if (slot == MLFAB__COPY_LOANS) return 0;
  const mlfab__moment_frame head = {c->number,       c->node->term, c->record.type,
                                    c->record.index, c->since,      c->server->save.history};
  frame->type = MLFAB__MOMENT;
  mlfab__encode_moment_frame(frame->meta, &head);
  memcpy(frame->meta + MLFAB__MOMENT_FRAME_BYTES, c->meta + MLFAB__MOMENT_FRAME_BYTES,
         c->record.meta_bytes);
  frame->meta_bytes = MLFAB__MOMENT_FRAME_BYTES + c->record.meta_bytes;
  frame->bulk = c->record.bulk;
  frame->bulk_bytes = c->record.bulk_bytes;
  /* A moment has one buffer for bytes from a device. */
  frame->token = frame->bulk_bytes > 0 && !c->server->memory ? 1 + slot : 0;
  frame->slot = slot;
  return 1;
}

static void copy_taken(void *self, mlfab__at at, const mlfab__frame_out *frame) {
  mlfab__copy *c = self;
  (void)at;
  if (frame->token) c->lent |= 1u << frame->slot;
  c->server->stats->replica_bytes += frame->bulk_bytes;
  if (c->record.type == MLFAB__RECORD_END) {
    c->ready = 0;
    c->sends = MLFAB__SENDS_DONE;
  } else {
    copy_fetch(c);
  }
}

static void copy_returned(void *self, mlfab__at at, uint64_t token) {
  mlfab__copy *c = self;
  c->lent &= ~(1u << (token - 1));
  if (!c->sends && !c->lent) mlfab__moment_unpin(&c->moment);
  if (c->ready) c->port.ready(c->port.self, at.peer);
}

/* Notes that the other copy has the moment `number`. */
static void copy_arrived(mlfab__copy *c) {
  c->has = c->number;
  c->has_at = c->at;
  c->sends = c->ready = 0;
  if (!c->lent) mlfab__moment_unpin(&c->moment);
  c->server->stats->replica_moments++;
  mlfab__keeper_has(c->server);
  c->arrived |= c->joins;
  c->joins = 0;
}

/* Takes the other copy's report of its moment: the one sent, or, on a new link, its last one. */
static int copy_has(mlfab__copy *c, const mlfab__frame_in *frame) {
  mlfab__moment_has in;
  if (mlfab__decode_moment_has(frame->meta, frame->meta_bytes, &in)) return MLFAB_ERR_FRAME;
  if (c->phase == MLFAB__COPY_STANDS_BY) return 1;
  c->heard_ns = c->node->now_ns;
  int ours = in.term == c->node->term && in.number > 0, same = ours && in.number == c->has;
  if (ours && in.number == c->number && c->has != c->number) {
    copy_arrived(c);
  } else if (!c->sends) {
    if (!same) c->has = 0;
  } else if (in.refused == c->number) { /* else the report is older than the moment under way */
    if (!same) c->has = 0;
    copy_unsend(c);
  }
  c->link_up = 1;
  return 1;
}

/* --- receiver --- */

static void copy_say_has(mlfab__copy *c) {
  int took = c->heard_of == c->got || c->heard_of == c->number_in;
  const mlfab__moment_has has = {c->got, c->term_in, took ? 0 : c->heard_of};
  MLFAB__POST(&c->port, c->peer, MLFAB__MOMENT_HAS, moment_has, &has);
}

/* Frees the partly collected moment. */
static void copy_void(mlfab__copy *c) {
  c->number_in = 0;
  mlfab__collect_void(&c->collect);
}

static void copy_has_all(mlfab__copy *c, const mlfab__moment_frame *in) {
  c->number_in = 0;
  c->got = in->number;
  c->term_in = in->term;
  mlfab__vote_filled(copy_vote(c));
  copy_say_has(c);
}

static int copy_record(mlfab__copy *c, const mlfab__moment_frame *in,
                       const mlfab__file_record *record) {
  mlfab_error error;
  int code = mlfab__collect_take(&c->collect, record, &error);
  if (code < 0) {
    char text[MLFAB__TEXT_MAX];
    snprintf(text, sizeof text, "a state of server %u cannot be taken over: %.180s",
             c->server->number, error.text);
    mlfab__log(&c->node->env, MLFAB_LOG_WARN, "%s", text);
    copy_void(c);
    copy_event(c, MLFAB_EVENT_IN_SYNC, code, text);
    c->got = 0; /* the next moment has to be full */
    return code == MLFAB_ERR_MEMORY ? MLFAB_ERR_MEMORY : MLFAB_ERR_FRAME;
  }
  if (code == 0) return 1;
  mlfab__collect_install(&c->collect);
  copy_has_all(c, in);
  return 1;
}

/* Does this copy take moments? Only from the serving copy, as far as it knows, and while it does not ask to replace
 * that copy. */
static int copy_takes(mlfab__copy *c) {
  const mlfab__vote *vote = copy_vote(c);
  return copy_votes(c) && c->phase == MLFAB__COPY_STANDS_BY && vote->known &&
         vote->bond.serves == c->other && !vote->asking;
}

static int copy_moment(mlfab__copy *c, const mlfab__frame_in *frame) {
  mlfab__moment_frame in;
  if (frame->meta_bytes < MLFAB__MOMENT_FRAME_BYTES ||
      mlfab__decode_moment_frame(frame->meta, MLFAB__MOMENT_FRAME_BYTES, &in) ||
      in.type > UINT16_MAX || (frame->bulk_bytes > 0 && !frame->bulk))
    return MLFAB_ERR_FRAME;
  c->heard_of = in.number;
  if (!copy_takes(c)) {
    copy_void(c); /* the rest may come when this copy takes moments again */
    return 1;
  }
  if (in.index == 0 && in.type == MLFAB__RECORD_END) {
    copy_void(c);
    mlfab__server_unbuild(c->server);
    copy_has_all(c, &in);
    return 1;
  }
  if (in.index == 0) {
    copy_void(c);
    if (in.since > 0 && (in.term != c->term_in || in.since != c->collect.at)) {
      copy_say_has(c);
      return 1;
    }
    c->number_in = in.number;
    mlfab__collect_begin(&c->collect, c->server->env, c->server, in.since);
    c->collect.history = in.history;
  }
  if (c->number_in != in.number) return 1;
  const mlfab__file_record record = {.type = (uint16_t)in.type,
                                     .index = in.index,
                                     .meta_bytes = frame->meta_bytes - MLFAB__MOMENT_FRAME_BYTES,
                                     .bulk_bytes = frame->bulk_bytes,
                                     .meta = frame->meta + MLFAB__MOMENT_FRAME_BYTES,
                                     .bulk = frame->bulk};
  return copy_record(c, &in, &record);
}

/* --- who serves --- */

/* Marks the absent workers, so that nobody waits for them. */
static void copy_know_workers(mlfab__copy *c) {
  const mlfab__server *server = c->server;
  for (uint32_t w = 0; w < server->workers; w++) {
    mlfab__caller *caller = &c->node->callers[w];
    caller->left = server->peers[w].left;
    caller->dead = server->peers[w].dead;
    caller->incarnation = server->peers[w].incarnation;
  }
}

/* The mirror may know of workers that left after the last moment. */
static void copy_tell_gone(mlfab__copy *c) {
  mlfab__server *server = c->server;
  for (uint32_t w = 0; w < server->workers && c->mirror; w++) {
    const mlfab__caller *caller = &c->node->callers[w];
    if ((caller->dead || caller->left) && !server->peers[w].dead && !server->peers[w].left)
      mlfab__server_gone(server, w, caller->left, c->node->now_ns);
  }
}

static void copy_begin_to_serve(mlfab__copy *c, const char *text) {
  mlfab__vote *vote = copy_vote(c);
  if (c->phase == MLFAB__COPY_STANDS_BY) {
    copy_void(c);
    c->collect.at = 0;
    copy_know_workers(c);
    mlfab__mirror_serve(c->mirror, c->term);
    c->arrived = 0;
    c->has = c->number = 0;
    c->term_in = 0;
    c->got = 0;
    mlfab__keeper_begin(c->server);
    mlfab__keeper_freeze(c->server, 1);
    if (vote->decided.epoch > 1) c->server->stats->promotions++;
  }
  c->phase = MLFAB__COPY_SERVES;
  c->frozen_ns = mlfab__max(c->node->now_ns, 1);
  c->server->asleep = 0;
  c->server->term = c->term;
  mlfab__copy_serve(c->node, c->term);
  copy_tell_gone(c);
  copy_event(c, MLFAB_EVENT_SERVES, 0, text);
  mlfab__server_advance(c->server);
}

/* Turns workers away, so that they look for the other copy. */
static void copy_suspend(mlfab__copy *c) {
  char text[128];
  uint32_t parts[2] = {c->other, MLFAB__VOTER_WITNESS};
  snprintf(text, sizeof text, "%s and %s are silent", copy_name(parts[0]), copy_name(parts[1]));
  c->phase = MLFAB__COPY_SUSPENDED;
  mlfab__copy_stand_by(c->node, text);
  copy_event(c, MLFAB_EVENT_STANDS_BY, MLFAB_ERR_PEER_DEAD, text);
}

/* Finishes running updates, forgets updates and pulls of all workers, and decides nothing until `asleep` is 0. */
static void copy_sleep(mlfab__server *server, uint64_t now_ns) {
  while (server->apply.applying == MLFAB__APPLY_UPDATE ||
         server->apply.applying == MLFAB__APPLY_ROUND) {
    if (server->apply.applying == MLFAB__APPLY_UPDATE)
      mlfab__apply_go_on(server, UINT64_MAX);
    else
      mlfab__round_apply(server, UINT64_MAX);
  }
  server->asleep = 1;
  for (uint32_t w = 0; w < server->workers; w++) {
    if (server->peers[w].connected) mlfab__server_lost(server, w, now_ns);
  }
}

/* Stands by, because the other copy serves. */
static void copy_yield(mlfab__copy *c) {
  char text[64];
  snprintf(text, sizeof text, "%s serves", copy_name(c->other));
  c->phase = MLFAB__COPY_STANDS_BY;
  c->frozen_ns = 0;
  copy_unsend(c);
  copy_vote(c)->empty = 1;
  c->got = 0;
  c->term_in = 0;
  mlfab__mirror_stand_by(c->mirror);
  c->arrived = 0;
  mlfab__copy_stand_by(c->node, text);
  copy_sleep(c->server, c->node->now_ns);
  mlfab__keeper_alone(c->server);
  mlfab__keeper_freeze(c->server, 1);
  copy_say_has(c);
  copy_event(c, MLFAB_EVENT_STANDS_BY, 0, text);
}

static void copy_look_at_lease(mlfab__copy *c) {
  uint64_t now_ns = c->node->now_ns, beat = c->node->config.heartbeat_ns;
  int leased = mlfab__vote_may_ack(copy_vote(c), now_ns);
  if (leased) {
    c->frozen_ns = 0;
    mlfab__keeper_freeze(c->server, 0);
    if (c->phase == MLFAB__COPY_SUSPENDED) copy_begin_to_serve(c, "it has its vote again");
    return;
  }
  mlfab__keeper_freeze(c->server, 1);
  if (!c->frozen_ns) c->frozen_ns = mlfab__max(now_ns, 1);
  if (c->phase == MLFAB__COPY_SERVES && now_ns - c->frozen_ns >= COPY_SUSPEND_BEATS * beat)
    copy_suspend(c);
}

/* --- in sync --- */

/* Is the other copy in sync, or may it be, as far as this one knows? */
static int copy_may_be_in_sync(mlfab__copy *c) {
  const mlfab__vote *vote = copy_vote(c);
  return (vote->decided.insync >> c->other & 1) ||
         (vote->own.epoch > vote->decided.epoch && (vote->own.insync >> c->other & 1));
}

/* Names the other copy in a record when it has the moment by which it joins, and all that workers were told. */
static void copy_look_at_joining(mlfab__copy *c) {
  mlfab__vote *vote = copy_vote(c);
  int mirrored = mlfab__mirror_in_sync(c->mirror), wanted = vote->wanted >> c->other & 1;
  if (c->server->keeping->phase == MLFAB__KEEPER_ALONE) c->arrived = 0;
  if (c->arrived && mirrored && !wanted && !c->drops)
    mlfab__vote_want(vote, 1u << c->self | 1u << c->other, c->node->now_ns);
  if (!mirrored && wanted && !copy_may_be_in_sync(c))
    mlfab__vote_want(vote, 1u << c->self, c->node->now_ns);
  int apart = !mirrored && c->server->keeping->phase != MLFAB__KEEPER_ALONE;
  if (!apart) c->apart_ns = 0;
  if (apart && !c->apart_ns) c->apart_ns = mlfab__max(c->node->now_ns, 1);
}

static void copy_look_at_sync(mlfab__copy *c) {
  mlfab__vote *vote = copy_vote(c);
  const mlfab__keeper *keeper = c->server->keeping;
  uint64_t now_ns = c->node->now_ns;
  copy_look_at_joining(c);
  int behind = c->sends && now_ns - c->began_ns >= c->node->config.silent_death_ns;
  behind |= c->apart_ns && now_ns - c->apart_ns >= c->node->config.silent_death_ns;
  behind |= mlfab__mirror_behind(c->mirror);
  /* An empty copy counts as silent for the vote, until the first beat after it was filled. */
  int silent = mlfab__vote_silent(vote, c->other, now_ns) &&
               now_ns - c->heard_ns >= MLFAB__VOTE_SILENT_BEATS * c->node->config.heartbeat_ns;
  /* The other copy runs a new process, so not the one that was in sync. */
  int empty = c->link_up && c->has == 0 && !c->sends;
  if (keeper->phase == MLFAB__KEEPER_JOINING && (vote->decided.insync >> c->other & 1)) {
    mlfab__keeper_joined(c->server);
    copy_event(c, MLFAB_EVENT_IN_SYNC, 0, "the other copy is in sync");
  }
  if (keeper->phase != MLFAB__KEEPER_ALONE && (behind || silent || empty) && !c->drops) {
    c->drops = 1;
    c->has = 0;
    copy_unsend(c);
    mlfab__vote_want(vote, 1u << c->self, now_ns);
    copy_event(c, MLFAB_EVENT_IN_SYNC, MLFAB_ERR_PEER_DEAD,
               behind   ? "the other copy is behind"
               : silent ? "the other copy is silent"
                        : "the other copy has lost its state");
  }
  /* This also ends a drop from before this copy stood by: it serves again by a record with its name alone. */
  if (!c->drops || copy_may_be_in_sync(c)) return;
  c->drops = 0;
  mlfab__keeper_alone(c->server);
}

/* Without memory for a state of the moment under way: sends another moment a beat later. */
static void copy_look_at_loss(mlfab__copy *c) {
  if (c->sends != MLFAB__SENDS_RECORDS || c->bare || !mlfab__moment_lost(&c->moment)) return;
  copy_unsend(c);
  c->retry_ns = c->node->now_ns + c->node->config.heartbeat_ns;
}

/* The mirror looks next, and needs these facts. */
static void copy_tell_mirror(mlfab__copy *c) {
  const mlfab__vote *vote = copy_vote(c);
  int votes = copy_votes(c) && !c->stops;
  int named = copy_may_be_in_sync(c) || (vote->wanted >> c->other & 1);
  const mlfab__mirror_facts facts = {.leased = votes && c->phase == MLFAB__COPY_SERVES &&
                                               mlfab__vote_may_ack(vote, c->node->now_ns),
                                     .named = votes && named,
                                     .takes = !c->stops && copy_takes(c)};
  mlfab__mirror_know(c->mirror, &facts);
}

/* Tells users why their workers find no serving copy. */
static void copy_tell_callers(mlfab__copy *c) {
  const mlfab__vote *vote = copy_vote(c);
  uint64_t now_ns = c->node->now_ns;
  char *why = c->node->replica->standby_why;
  size_t room = sizeof c->node->replica->standby_why;
  int silent = mlfab__vote_silent(vote, c->other, now_ns);
  if (silent && c->voters.retry_ns)
    snprintf(why, room, "it cannot write its vote in vote_dir");
  else if (silent && mlfab__vote_silent(vote, MLFAB__VOTER_WITNESS, now_ns))
    snprintf(why, room, "%s and %s are silent", copy_name(c->other),
             copy_name(MLFAB__VOTER_WITNESS));
  else
    snprintf(why, room, "%s %s", copy_name(c->other), silent ? "is silent" : "serves");
}

static void copy_look(mlfab__copy *c) {
  mlfab__vote *vote = copy_vote(c);
  c->server->now_ns = c->node->now_ns;
  mlfab__voters_settle(&c->voters);
  if (!copy_votes(c) || c->stops) return;
  int serves = mlfab__vote_serves(vote);
  if (c->phase == MLFAB__COPY_STANDS_BY && serves) {
    c->term = vote->decided.epoch;
    copy_begin_to_serve(c, "it serves");
  }
  if (c->phase != MLFAB__COPY_STANDS_BY && !serves) copy_yield(c);
  int takes = copy_takes(c);
  if (takes && !c->takes) copy_say_has(c); /* earlier records are lost */
  c->takes = takes;
  if (c->phase == MLFAB__COPY_STANDS_BY) {
    copy_tell_callers(c);
    return;
  }
  copy_look_at_lease(c);
  copy_look_at_sync(c);
  copy_look_at_loss(c);
  copy_send(c);
}

/* Runs after every event. */
static void copy_settle(void *self) {
  copy_look(self);
  copy_tell_mirror(self);
}

/* --- the role --- */

static int copy_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__copy *c = self;
  c->server->now_ns = at.now_ns;
  if (at.kind != MLFAB__LINK_VOTER_IN) return MLFAB_ERR_FRAME;
  if (frame->type == MLFAB__VOTE) {
    int code = mlfab__voters_frame(&c->voters, at.peer, frame);
    return code ? code : 1;
  }
  if (at.peer != c->peer) return MLFAB_ERR_FRAME;
  return frame->type == MLFAB__MOMENT ? copy_moment(c, frame) : copy_has(c, frame);
}

static void copy_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__copy *c = self;
  (void)greeting;
  /* Either link may have lost something: moments arrive on one link, and are answered on the other. */
  if (at.peer == c->peer && c->phase == MLFAB__COPY_STANDS_BY) copy_say_has(c);
  if (at.kind == MLFAB__LINK_VOTER && at.peer == c->peer && c->ready)
    c->port.ready(c->port.self, c->peer);
}

static void copy_lost(void *self, mlfab__at at) {
  mlfab__copy *c = self;
  if (at.peer != c->peer) return;
  if (at.kind == MLFAB__LINK_VOTER_IN) {
    c->link_up = 0;
    copy_void(c);
  } else {
    c->lent = 0; /* the link has ended the loans */
    copy_unsend(c);
    c->link_up = 0;
  }
}

/* Called when a voter has closed for good. */
static void copy_gone(void *self, mlfab__at at, int left) {
  mlfab__copy *c = self;
  if (at.kind != MLFAB__LINK_VOTER_IN || at.peer != c->peer || !left) return;
  if (c->phase == MLFAB__COPY_STANDS_BY && copy_votes(c) && copy_vote(c)->bond.serves == c->other) {
    c->stops = 1;
    c->node->ended = 1;
  }
}

static void copy_tick(void *self, uint64_t now_ns) {
  mlfab__copy *c = self;
  (void)now_ns;
  mlfab__voters_tick(&c->voters);
}

static void copy_awake(void *self, uint64_t late_ns, uint64_t now_ns) {
  mlfab__copy *c = self;
  mlfab__voters_awake(&c->voters, late_ns, now_ns);
  mlfab__later(&c->node->replica->served_ns, late_ns, now_ns);
  mlfab__later(&c->heard_ns, late_ns, now_ns);
  mlfab__later(&c->began_ns, late_ns, now_ns);
  mlfab__later(&c->apart_ns, late_ns, now_ns);
  mlfab__later(&c->frozen_ns, late_ns, now_ns);
}

static uint64_t copy_deadline(const void *self) {
  const mlfab__copy *c = self;
  uint64_t due_ns = mlfab__voters_deadline(&c->voters);
  uint64_t beat = c->node->config.heartbeat_ns;
  if (c->retry_ns > c->node->now_ns) due_ns = mlfab__min(due_ns, c->retry_ns);
  if (c->frozen_ns && c->phase == MLFAB__COPY_SERVES)
    due_ns = mlfab__min(due_ns, c->frozen_ns + COPY_SUSPEND_BEATS * beat);
  return due_ns;
}

/* Called when the model is freed. */
static void copy_stop(void *self) {
  mlfab__copy *c = self;
  if (c->voids) return; /* the freed model came with a stream that is void now */
  c->voids = 1;
  copy_void(c);
  copy_unsend(c);
  if (c->collect.memory) mlfab__collect_free(&c->collect); /* while the device's memory exists */
  c->has = 0;
  c->voids = 0;
}

/* May this copy answer anything? It may not while the record names another copy that lacks the model. */
static int copy_leased(void *self, uint64_t now_ns) {
  mlfab__copy *c = self;
  int without = c->drops && c->server->keeping->phase == MLFAB__KEEPER_ALONE;
  return mlfab__vote_may_ack(copy_vote(c), now_ns) && !without;
}

/* Called when there is a model that the other copy lacks. */
static void copy_model(void *self) {
  mlfab__copy *c = self;
  if (c->phase == MLFAB__COPY_STANDS_BY) return;
  copy_unsend(c);
  c->has = 0;
  c->drops = copy_may_be_in_sync(c);
  mlfab__vote_want(copy_vote(c), 1u << c->self, c->node->now_ns);
  if (c->drops) copy_event(c, MLFAB_EVENT_IN_SYNC, MLFAB_ERR_AGAIN, "the other copy has no model");
}

static void copy_free(void *self) {
  mlfab__copy *c = self;
  if (!c->node) return;
  c->node->replica->leased = NULL;
  mlfab__moment_free(&c->moment);
  mlfab__collect_free(&c->collect);
  mlfab__voters_free(&c->voters);
  mlfab__free(&c->node->env, c->meta, MLFAB__MOMENT_FRAME_BYTES + MLFAB__MOMENT_META);
  c->meta = NULL;
}

static const mlfab__role copy_row = {
    .name = "copy",
    .from = MLFAB__VOTE,
    .to = MLFAB__MOMENT_HAS,
    .links = MLFAB__ON(VOTER) | MLFAB__ON(VOTER_IN),
    .sends = MLFAB__ON(VOTER),
    .frame = copy_frame,
    .next = copy_next,
    .taken = copy_taken,
    .returned = copy_returned,
    .up = copy_up,
    .lost = copy_lost,
    .gone = copy_gone,
    .tick = copy_tick,
    .awake = copy_awake,
    .deadline = copy_deadline,
    .settle = copy_settle,
    .free = copy_free,
};

MLFAB__INTERNAL int mlfab__copy_attach(mlfab_node *node, mlfab__server *server,
                                       const mlfab__voter_disk *disk) {
  mlfab__role *role = mlfab__roles_add(node, &copy_row, sizeof(mlfab__copy));
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__copy *c = role->self;
  uint32_t servers = node->config.servers;
  c->node = node;
  c->server = server;
  c->port = mlfab__roles_port(node, role, MLFAB__LINK_VOTER);
  const mlfab__port in = mlfab__roles_port(node, role, MLFAB__LINK_VOTER_IN);
  c->self = node->is_replica ? MLFAB__VOTER_B : MLFAB__VOTER_A;
  c->other = node->is_replica ? MLFAB__VOTER_A : MLFAB__VOTER_B;
  c->peer = c->other * servers + server->number;
  server->asleep = 1;
  c->meta = mlfab__alloc(&node->env, MLFAB__MOMENT_FRAME_BYTES + MLFAB__MOMENT_META);
  int code = mlfab__voters_init(&c->voters, node, &c->port, &in, server->number, 1, disk);
  if (!code && !c->meta) code = MLFAB_ERR_MEMORY;
  if (!code) code = mlfab__keeper_attach(server, node->config.div_max);
  if (code) return code;
  server->keeping->above = c;
  server->keeping->stop = copy_stop;
  server->keeping->leased = copy_leased;
  node->replica->leased = copy_leased;
  node->replica->leased_copy = c;
  server->keeping->model = copy_model;
  mlfab__keeper_freeze(server, 1);
  return mlfab__mirror_attach(node, c->peer, &c->mirror);
}
