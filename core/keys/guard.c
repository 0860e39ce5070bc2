/* guard.c - a fabric with a key: proofs on new links, tags on frames. See guard.h. */
#include "guard.h"

#include <stdio.h>

/* The number of frames that may follow a frame that lacks bytes. Twelve of them cost one hash. */
enum { GUARD_AHEAD = 256 };

typedef struct guard_self {
  mlfab__fabric_keys keys;
  uint8_t pool[MLFAB__BLAKE2B_MAX]; /* the key of nonces, which are hashes of a counter */
  uint64_t nonces;                  /* drawn */
} guard_self;

static guard_self *guard_of(const mlfab_node *node) { return node->guard_self; }

static void guard_nonce(const guard_self *self, uint64_t number, uint64_t nonce[2]) {
  mlfab__blake2b s;
  mlfab__blake2b_begin(&s, 16, self->pool, sizeof self->pool);
  mlfab__blake2b_add(&s, &number, sizeof number);
  mlfab__blake2b_end(&s, nonce);
}

static void guard_pool(const mlfab_node *node, guard_self *self) {
  mlfab__blake2b s;
  uint64_t place[3] = {node->now_ns, node->config.seed, node->id};
  mlfab__blake2b_begin(&s, sizeof self->pool, self->keys.key[0], sizeof self->keys.key[0]);
  mlfab__blake2b_add(&s, node->config.entropy, sizeof node->config.entropy);
  mlfab__blake2b_add(&s, place, sizeof place);
  mlfab__blake2b_end(&s, self->pool);
}

/* The job of a challenge: a hash with its nonce, so a listener can only test a guess of the name. */
static uint64_t guard_job(const mlfab_node *node, const mlfab__challenge *c) {
  return mlfab__mix(node->job ^ mlfab__mix(c->nonce[0]));
}

/* The reason to refuse a caller without a common key. Several ports may lead to several jobs. */
static const char *guard_foreign(const mlfab_node *node, const mlfab__challenge *c,
                                 enum mlfab__cause *cause_p) {
  *cause_p = c->job == guard_job(node, c) ? MLFAB__CAUSE_KEY : MLFAB__CAUSE_STRANGE_KEY;
  return *cause_p == MLFAB__CAUSE_KEY ? "the caller's key is not this job's (MLFAB_KEY)"
                                      : "the jobs have different names (MLFAB_JOB), and keys";
}

/* Ends the failed call of a link that is not proven; the link is gone afterwards. */
static void guard_fail(mlfab_node *node, uint32_t index, enum mlfab__cause cause, int code,
                       const char *text) {
  int joining = node->links[index].pending == MLFAB__TOKEN_JOIN;
  if (joining && !mlfab__bootstrap_elsewhere(node, cause, text)) {
    char whole[MLFAB__TEXT_MAX + 192], callee[MLFAB__CALLEE];
    snprintf(whole, sizeof whole, "joining: %s: %s", mlfab__bootstrap_callee(node, callee), text);
    mlfab__node_fail(node, code, 0, 1, whole);
  }
  mlfab__log(&node->env, MLFAB_LOG_WARN, "a call failed: %s", text);
  mlfab__node_hang_up(node, index, text);
}

/* --- the calling end --- */

/* Fills in the number and the roles of the process that this call wants to reach, and the first frame on its link. The
 * number is no node id: the two ends may disagree about the world, and only JOIN detects that. */
static void guard_want(const mlfab_node *node, uint64_t token, mlfab__challenge *c) {
  uint64_t called = token - MLFAB__TOKEN_SERVER, routes = node->nroutes;
  uint32_t servers = node->config.servers, place = 0;
  c->first = token == MLFAB__TOKEN_JOIN ? MLFAB__JOIN : MLFAB__HELLO;
  c->to = 0;
  c->of = MLFAB_ROLE_SERVER | MLFAB_ROLE_REPLICA;
  if (token == MLFAB__TOKEN_JOIN) return;
  if (called >= routes) {
    c->first = MLFAB__MEET;
    c->to = (uint32_t)(called - routes);
    c->of = MLFAB_ROLE_WORKER;
    return;
  }
  place = (uint32_t)(mlfab__node_place(node, (uint32_t)called) - node->places);
  c->to = place % servers;
  c->of = place < servers       ? MLFAB_ROLE_SERVER
          : place < 2 * servers ? MLFAB_ROLE_REPLICA
                                : MLFAB_ROLE_SCHEDULER;
}

static void guard_call(mlfab_node *node, uint32_t index, uint64_t token) {
  guard_self *self = guard_of(node);
  mlfab__link *link = &node->links[index];
  uint8_t meta[MLFAB__KEYS_META];
  link->pending = token;
  link->session = mlfab__alloc(&node->env, sizeof *link->session);
  if (!link->session) {
    mlfab__node_hang_up(node, index, "out of memory for the keys of a link");
    return;
  }
  mlfab__challenge *c = &link->session->challenge;
  c->node = node->id;
  c->roles = node->config.roles;
  c->epoch = node->epoch;
  guard_want(node, token, c);
  c->vouched = (link->caps & MLFAB_CAP_VOUCHED) != 0;
  guard_nonce(self, ++self->nonces, c->nonce);
  memcpy(c->keys, self->keys.name, sizeof c->keys);
  c->job = guard_job(node, c);
  mlfab__node_post(node, index, MLFAB__CHALLENGE, meta, mlfab__encode_challenge(meta, c));
}

static const char *guard_name(uint32_t roles) {
  return roles & MLFAB_ROLE_WORKER      ? "worker"
         : roles & MLFAB_ROLE_SERVER    ? "server"
         : roles & MLFAB_ROLE_SCHEDULER ? "scheduler"
                                        : "replica";
}

/* Does this call want the process with this number and these roles? */
static int guard_fits(const mlfab__challenge *c, uint32_t number, uint32_t roles) {
  return number == c->to && (roles & c->of);
}

static void guard_answered(mlfab_node *node, uint32_t index, const uint8_t *meta, uint32_t bytes) {
  guard_self *self = guard_of(node);
  mlfab__link *link = &node->links[index];
  mlfab__session *session = link->session;
  mlfab__answer answer;
  if (mlfab__decode_answer(meta, bytes, &answer) || answer.key >= self->keys.count ||
      answer.vouched > session->challenge.vouched) {
    mlfab__node_drop(node, index, MLFAB_ERR_FRAME, "an ANSWER that does not parse");
    return;
  }
  mlfab__session_derive(session, self->keys.key[answer.key], &session->challenge, &answer, 0);
  if (!mlfab__same_secret(answer.proof, session->theirs, sizeof answer.proof)) {
    node->stats.frames_refused++;
    mlfab__node_hang_up(node, index,
                        "the process that answered has not proved that it has this key");
    return;
  }
  if (!guard_fits(&session->challenge, answer.number, answer.roles)) {
    char text[128];
    snprintf(text, sizeof text, "%s %u answers at the address of %s %u", guard_name(answer.roles),
             answer.number, guard_name(session->challenge.of), session->challenge.to);
    guard_fail(node, index, MLFAB__CAUSE_ELSEWHERE, MLFAB_ERR_REFUSED, text);
    return;
  }
  mlfab__proof proof = {session->challenge, {session->own[0], session->own[1]}};
  uint8_t out[MLFAB__KEYS_META];
  uint64_t token = link->pending;
  mlfab__node_post(node, index, MLFAB__PROOF, out, mlfab__encode_proof(out, &proof));
  link->pending = 0;
  link->proven = 1;
  link->tagged = !answer.vouched;
  mlfab__node_call_up(node, token, index);
}

/* Takes a REFUSE before any proof. Its text is not shown, because anybody may have written it. */
static void guard_refused(mlfab_node *node, uint32_t index, const uint8_t *meta, uint32_t bytes) {
  static const char *const texts[] = {
      [MLFAB__CAUSE_KEY] = "refused: the caller's key is not this job's (MLFAB_KEY)",
      [MLFAB__CAUSE_KEYLESS] = "refused: the caller has a key, and this job has none (MLFAB_KEY)",
      [MLFAB__CAUSE_STRANGE_KEY] =
          "refused: the jobs have different names (MLFAB_JOB), and keys (MLFAB_KEY)",
  };
  mlfab__refuse refuse;
  if (!mlfab__decode_refuse(meta, bytes, &refuse) && refuse.code == MLFAB_ERR_JOB &&
      refuse.cause < MLFAB__COUNT(texts) && texts[refuse.cause]) {
    guard_fail(node, index, (enum mlfab__cause)refuse.cause, MLFAB_ERR_JOB, texts[refuse.cause]);
    return;
  }
  mlfab__node_hang_up(node, index, "refused by a process that has not proved that it has this key");
}

/* --- the called end --- */

static void guard_make_answer(const mlfab_node *node, const mlfab__link *link,
                              const mlfab__challenge *c, int key, mlfab__answer *answer) {
  memset(answer, 0, sizeof *answer);
  answer->number = (uint32_t)node->config.rank;
  answer->roles = node->config.roles;
  answer->epoch = node->epoch;
  answer->key = (uint32_t)key;
  answer->vouched = c->vouched && (link->caps & MLFAB_CAP_VOUCHED);
  guard_nonce(guard_of(node), link->pending, answer->nonce);
}

/* Returns NULL, or the reason to refuse the caller. */
static const char *guard_challenged(mlfab_node *node, uint32_t index, const uint8_t *meta,
                                    uint32_t bytes, enum mlfab__cause *cause_p) {
  guard_self *self = guard_of(node);
  mlfab__link *link = &node->links[index];
  mlfab__challenge c;
  mlfab__answer answer;
  mlfab__session session;
  uint32_t own;
  uint8_t out[MLFAB__KEYS_META];
  if (link->pending != 0 || mlfab__decode_challenge(meta, bytes, &c) || c.vouched > 1)
    return "a challenge that does not parse, or a second one";
  int key = mlfab__keys_choose(&self->keys, &c, &own);
  if (key < 0) return guard_foreign(node, &c, cause_p);
  link->pending = ++self->nonces;
  guard_make_answer(node, link, &c, key, &answer);
  mlfab__session_derive(&session, self->keys.key[own], &c, &answer, 1);
  memcpy(answer.proof, session.own, sizeof answer.proof);
  mlfab__wipe(&session, sizeof session);
  mlfab__node_post(node, index, MLFAB__ANSWER, out, mlfab__encode_answer(out, &answer));
  return NULL;
}

static const char *guard_conclude(mlfab_node *node, uint32_t index, const uint8_t *meta,
                                  uint32_t bytes, enum mlfab__cause *cause_p) {
  guard_self *self = guard_of(node);
  mlfab__link *link = &node->links[index];
  mlfab__proof proof;
  mlfab__answer answer;
  mlfab__session session;
  uint32_t own;
  if (link->pending == 0 || mlfab__decode_proof(meta, bytes, &proof))
    return "a proof that does not parse, or came before a challenge";
  int key = mlfab__keys_choose(&self->keys, &proof.challenge, &own);
  if (key < 0) return guard_foreign(node, &proof.challenge, cause_p);
  memset(&session, 0, sizeof session);
  guard_make_answer(node, link, &proof.challenge, key, &answer);
  mlfab__session_derive(&session, self->keys.key[own], &proof.challenge, &answer, 1);
  session.challenge = proof.challenge;
  int right = mlfab__same_secret(proof.proof, session.theirs, sizeof proof.proof);
  if (right && guard_fits(&proof.challenge, answer.number, answer.roles))
    link->session = mlfab__alloc(&node->env, sizeof session);
  if (link->session) *link->session = session;
  mlfab__wipe(&session, sizeof session);
  if (!right) return "the caller has not proved that it has this job's key (MLFAB_KEY)";
  if (!link->session) return "out of memory, or a call to another node";
  link->pending = 0;
  link->proven = 1;
  link->tagged = !answer.vouched;
  return NULL;
}

/* Checks that the header of a frame of a proof is empty: the proofs do not cover it. */
static int guard_is_bare(const mlfab__header *h) {
  return h->job == 0 && !(h->sender | h->epoch | h->incarnation | h->flags);
}

static void guard_stranger(mlfab_node *node, uint32_t index, const mlfab__header *header,
                           const uint8_t *meta) {
  int ours = header->job == node->job || header->job == 0;
  enum mlfab__cause cause = ours ? MLFAB__CAUSE_LACKS_KEY : MLFAB__CAUSE_ELSEWHERE;
  const char *why = ours ? "this job has a key, and the caller has none (MLFAB_KEY)"
                         : "the jobs have different names (MLFAB_JOB), and the caller has no key";
  if (header->type == MLFAB__BYE) {
    mlfab__node_hang_up(node, index, "the caller left before its proof");
    return;
  }
  if (header->type == MLFAB__CHALLENGE || header->type == MLFAB__PROOF) {
    uint32_t bytes = header->meta_bytes;
    cause = MLFAB__CAUSE_OTHER;
    why = !guard_is_bare(header)         ? "a challenge or proof that does not parse"
          : header->type == MLFAB__PROOF ? guard_conclude(node, index, meta, bytes, &cause)
                                         : guard_challenged(node, index, meta, bytes, &cause);
  }
  if (why) mlfab__node_turn_away(node, index, cause, why);
}

/* --- every frame --- */

/* Is the first frame after the proof the frame that the challenge announced, from that node? */
static int guard_is_announced(const mlfab__link *link, const mlfab__header *header) {
  const mlfab__challenge *c = &link->session->challenge;
  return link->kind != MLFAB__LINK_NEW || !link->called ||
         (header->type == c->first && header->sender == c->node);
}

static void guard_altered(const mlfab_node *node, const mlfab__link *link, char *text,
                          size_t room) {
  const mlfab__challenge *c = &link->session->challenge;
  char name[32];
  if (link->called)
    mlfab__node_name(node, c->node, name);
  else
    snprintf(name, sizeof name, "%s %u", guard_name(c->of), c->to);
  snprintf(text, room, "a frame from %s was altered or repeated on its way", name);
}

static void guard_give_up(mlfab_node *node, uint32_t index) {
  char text[128];
  guard_altered(node, &node->links[index], text, sizeof text);
  mlfab__log(&node->env, MLFAB_LOG_WARN, "link given up: %s", text);
  node->stats.frames_refused++;
  mlfab__node_hang_up(node, index, text);
}

/* Is it the header of the peer's frame with a counter in [from, to)? */
static int guard_is_next(mlfab__session *session, const mlfab__header *header, uint64_t from,
                         uint64_t to) {
  int next = 0;
  for (uint64_t at = from; at < to && !next; at++)
    next = header->code == mlfab__session_code(session->in, &session->codes_in, at,
                                               header->meta_bytes, header->bulk_bytes);
  return next && (header->flags & MLFAB__WIRE_TAGGED);
}

/* Checks a header before the rest of its frame is awaited: guard.h (5). */
static void guard_head(mlfab_node *node, uint32_t index, const mlfab_io_event *event) {
  const mlfab__link *link = &node->links[index];
  mlfab__header header;
  if (!link->tagged) return;
  uint64_t next = link->session->received + 1;
  mlfab__wire_open(event->head, &header);
  int right = event->token ? !guard_is_next(link->session, &header, next, next + GUARD_AHEAD)
                           : guard_is_next(link->session, &header, next - 1, next);
  if (!right) guard_give_up(node, index);
}

static int guard_frame(mlfab_node *node, uint32_t index, const mlfab_io_event *event,
                       const mlfab__header *header) {
  mlfab__link *link = &node->links[index];
  const uint8_t *head = event->head, *meta = head + MLFAB_HEADER_BYTES;
  int tagged = (header->flags & MLFAB__WIRE_TAGGED) != 0;
  if (link->tagged) {
    uint8_t tag[MLFAB__TAG_BYTES];
    mlfab__session *session = link->session;
    if (tagged)
      mlfab__session_tag(session->in, session->received, head, event->head_bytes, event->bulk,
                         event->bulk_bytes, tag);
    if (!tagged || !mlfab__same_secret(tag, head + MLFAB__TAG_AT, sizeof tag)) {
      guard_give_up(node, index);
      return 0;
    }
    session->received++;
  }
  if (link->proven && (link->tagged || !tagged) && guard_is_announced(link, header)) return 1;
  link->heard_ns = node->now_ns;
  if (link->proven || tagged) {
    mlfab__node_drop(node, index, MLFAB_ERR_FRAME, "a frame that was not announced");
  } else if (link->called) {
    guard_stranger(node, index, header, meta);
  } else if (header->type == MLFAB__ANSWER && guard_is_bare(header)) {
    guard_answered(node, index, meta, header->meta_bytes);
  } else if (header->type == MLFAB__REFUSE) {
    guard_refused(node, index, meta, header->meta_bytes);
  } else {
    mlfab__node_drop(node, index, MLFAB_ERR_FRAME, "neither ANSWER nor REFUSE came first");
  }
  return 0;
}

static void guard_seal(const mlfab__link *link, uint8_t *head, uint32_t head_bytes,
                       const void *bulk, uint32_t bulk_bytes) {
  uint8_t tag[MLFAB__TAG_BYTES];
  mlfab__session *session = link->session;
  mlfab__wire_code(head, mlfab__session_code(session->out, &session->codes_out, session->sent,
                                             head_bytes - MLFAB_HEADER_BYTES, bulk_bytes));
  mlfab__session_tag(session->out, session->sent, head, head_bytes, bulk, bulk_bytes, tag);
  mlfab__wire_tag(head, tag);
}

static void guard_sent(mlfab__link *link) { link->session->sent++; }

static void guard_end(mlfab_node *node, mlfab__link *link) {
  mlfab__wipe(link->session, sizeof *link->session);
  mlfab__free(&node->env, link->session, sizeof *link->session);
  link->session = NULL;
}

static void guard_free(mlfab_node *node) {
  mlfab__wipe(node->guard_self, sizeof(guard_self));
  mlfab__free(&node->env, node->guard_self, sizeof(guard_self));
}

/* --- attaching --- */

MLFAB__INTERNAL int mlfab__guard_check(const mlfab_config *config, mlfab_error *error) {
  mlfab__fabric_keys keys;
  const char *why;
  int code = config->key[0] ? mlfab__keys_parse(config->key, &keys, &why) : 0;
  if (config->key[0]) mlfab__wipe(&keys, sizeof keys);
  return code ? MLFAB__FAIL(error, code, "configuration: key (MLFAB_KEY): %s", why) : 0;
}

MLFAB__INTERNAL int mlfab__guard_attach(mlfab_node *node) {
  static const mlfab__guard guard = {guard_call, guard_frame, guard_head, guard_altered,
                                     guard_seal, guard_sent,  guard_end,  guard_free};
  const char *why;
  guard_self *self = mlfab__alloc(&node->env, sizeof *self);
  if (!self) {
    mlfab__wipe(node->config.key, sizeof node->config.key);
    return MLFAB_ERR_MEMORY;
  }
  node->guard = &guard;
  node->guard_self = self;
  (void)mlfab__keys_parse(node->config.key, &self->keys, &why); /* valid: it was checked */
  guard_pool(node, self);
  mlfab__wipe(node->config.key, sizeof node->config.key);
  mlfab__wipe(node->config.entropy, sizeof node->config.entropy);
  uint64_t nonce[2];
  guard_nonce(self, 0, nonce);
  node->nonce = nonce[0];
  return 0;
}
