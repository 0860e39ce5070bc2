/* roll.c - server 0 keeps the roll of collectives. See roll.h.
 *
 * It holds no bytes and no schedules: it knows who has asked, who knows of the others, and how an
 * epoch ended. Everything that it says is said again when a worker repeats what it said itself;
 * only verdicts, departures and open questions, after which a worker is silent, are repeated at
 * its greeting. */
#include "roll.h"

#include <stdio.h>

enum {
  ROLL_LIST_BYTES = 8,
  ROLL_MEMBER_BYTES = 40,
  ROLL_UNTOLD = -2,             /* nobody, not even NO_RANK, was named */
  ROLL_LATENCY_INSIDE = 10000,  /* ns of a message between processes of one host ... */
  ROLL_LATENCY_BETWEEN = 50000, /* ... and between hosts, where nothing has measured it */
};
static const double roll_rate_inside = 4e9; /* bytes a second */
static const double roll_rate_unknown = 1.25e9;

static void roll_check(mlfab__roll *roll);

static uint32_t roll_room(const mlfab__roll *roll) {
  return (uint32_t)mlfab__min(roll->workers, MLFAB__ROLL_MEMBERS_MAX);
}

MLFAB__INTERNAL int mlfab__roll_init(mlfab__roll *roll, mlfab__env *env, const mlfab_config *config,
                                     const mlfab__port *port) {
  memset(roll, 0, sizeof *roll);
  roll->env = env;
  roll->config = config;
  roll->port = *port;
  roll->workers = config->workers;
  uint32_t room = roll_room(roll);
  roll->entries = mlfab__alloc_array(env, roll->workers, sizeof *roll->entries);
  roll->order = mlfab__alloc_array(env, room, sizeof *roll->order);
  roll->table = mlfab__alloc_array(env, room, sizeof *roll->table);
  roll->list = mlfab__alloc(env, ROLL_LIST_BYTES + room * ROLL_MEMBER_BYTES);
  if (!roll->entries || !roll->order || !roll->table || !roll->list) return MLFAB_ERR_MEMORY;
  for (uint32_t w = 0; w < roll->workers; w++) {
    roll->entries[w].alive = 1;
    roll->entries[w].missing = ROLL_UNTOLD;
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__roll_free(mlfab__roll *roll) {
  if (!roll->env) return;
  uint32_t room = roll_room(roll);
  mlfab__free(roll->env, roll->entries, roll->workers * sizeof *roll->entries);
  mlfab__free(roll->env, roll->order, room * sizeof *roll->order);
  mlfab__free(roll->env, roll->table, room * sizeof *roll->table);
  mlfab__free(roll->env, roll->list, ROLL_LIST_BYTES + room * ROLL_MEMBER_BYTES);
  memset(roll, 0, sizeof *roll);
}

static int roll_stands(const mlfab__roll *roll) {
  return roll->phase == MLFAB__ROLL_LISTED || roll->phase == MLFAB__ROLL_RUNNING;
}

/* The members in their order. */
static mlfab__roll_entry *roll_member(const mlfab__roll *roll, uint32_t i) {
  return &roll->entries[roll->order[i]];
}

/* --- what is said --- */

static void roll_post(mlfab__roll *roll, uint32_t worker, uint8_t type, const void *meta,
                      uint32_t bytes) {
  roll->port.post(roll->port.self, worker, type, meta, bytes);
}

/* To all members that have not left. */
static void roll_post_all(mlfab__roll *roll, uint8_t type, const void *meta, uint32_t bytes) {
  for (uint32_t i = 0; i < roll->members; i++) {
    const mlfab__roll_entry *entry = roll_member(roll, i);
    if (entry->member && !entry->left) roll_post(roll, roll->order[i], type, meta, bytes);
  }
}

/* The verdict on the epoch that this worker was in. One that was taken for dead may owe an older
 * one than the last. */
static void roll_post_over(mlfab__roll *roll, uint32_t worker) {
  mlfab__roll_over over = roll->verdict;
  uint8_t meta[MLFAB__TEXT_MAX + 32];
  uint32_t epoch = roll->entries[worker].over_owed;
  if (epoch != over.epoch) {
    over.epoch = epoch;
    over.code = MLFAB_ERR_PEER_DEAD;
    over.rank = (int32_t)worker;
    snprintf(over.text, sizeof over.text, "worker %u was taken for dead", worker);
  }
  roll_post(roll, worker, MLFAB__ROLL_OVER, meta, mlfab__encode_roll_over(meta, &over));
}

static uint32_t roll_left_meta(const mlfab__roll *roll, uint32_t worker, uint8_t *meta) {
  mlfab__roll_leave left = {roll->epoch, (int32_t)worker, roll->entries[worker].calls};
  return mlfab__encode_roll_leave(meta, &left);
}

static void roll_post_go(mlfab__roll *roll, uint32_t worker) {
  uint8_t meta[64];
  roll_post(roll, worker, MLFAB__ROLL_GO, meta, mlfab__encode_roll_go(meta, &roll->go));
}

/* Everything that a member of a running epoch may have missed. */
static void roll_post_departures(mlfab__roll *roll, uint32_t worker) {
  uint8_t meta[32];
  for (uint32_t i = 0; i < roll->members; i++) {
    if (roll_member(roll, i)->left && roll->order[i] != worker)
      roll_post(roll, worker, MLFAB__ROLL_LEFT, meta, roll_left_meta(roll, roll->order[i], meta));
  }
}

/* --- verdicts --- */

/* The epoch is over for all members. */
static void roll_verdict(mlfab__roll *roll, int32_t code, int32_t rank, const char *text) {
  roll->verdict.epoch = roll->epoch;
  roll->verdict.code = code;
  roll->verdict.rank = rank;
  snprintf(roll->verdict.text, sizeof roll->verdict.text, "%s", text);
  roll->phase = MLFAB__ROLL_GATHERING;
  memset(&roll->inquiry, 0, sizeof roll->inquiry);
  for (uint32_t i = 0; i < roll->members; i++) {
    mlfab__roll_entry *entry = roll_member(roll, i);
    if (!entry->member) continue; /* its process is another now */
    entry->member = entry->ready = entry->arena = entry->left = entry->asked = 0;
    entry->over_owed = MLFAB__PLANTED(69) ? 0 : roll->epoch;
    roll_post_over(roll, roll->order[i]);
  }
  roll->members = 0;
  roll_check(roll);
}

/* --- forming an epoch --- */

/* What a member says that its link carries; 0: it does not know. */
static double roll_rate(const mlfab__roll_ask *ask) {
  double rate = ask->in < ask->out ? ask->in : ask->out;
  return rate > 0.0 && rate < 1e18 ? rate : 0.0;
}

/* Members of one host share its link: each tells what it has seen of it. */
static void roll_look_at_hosts(mlfab__roll *roll) {
  for (uint32_t i = 0; i < roll->members; i++) {
    mlfab__roll_entry *entry = roll_member(roll, i);
    entry->lead = MLFAB__NO_NODE;
    entry->rate = 0.0;
    for (uint32_t k = 0; k < roll->members; k++) {
      const mlfab__roll_entry *other = roll_member(roll, k);
      if (other->ask.host != entry->ask.host) continue;
      if (roll->order[k] < entry->lead) entry->lead = roll->order[k];
      if (roll_rate(&other->ask) > entry->rate) entry->rate = roll_rate(&other->ask);
    }
  }
}

static int roll_before(const mlfab__roll *roll, uint32_t a, uint32_t b) {
  const mlfab__roll_entry *x = &roll->entries[a], *y = &roll->entries[b];
  if (roll->config->order_by_rate && x->rate > y->rate) return 1;
  if (roll->config->order_by_rate && x->rate < y->rate) return 0;
  return x->lead != y->lead ? x->lead < y->lead : a < b;
}

static void roll_arrange(mlfab__roll *roll) {
  roll_look_at_hosts(roll);
  for (uint32_t i = 1; i < roll->members; i++) {
    uint32_t worker = roll->order[i], at = i;
    for (; at > 0 && roll_before(roll, worker, roll->order[at - 1]); at--)
      roll->order[at] = roll->order[at - 1];
    roll->order[at] = worker;
  }
}

static void roll_make_list(mlfab__roll *roll) {
  mlfab__roll_list list = {roll->epoch, roll->members};
  for (uint32_t i = 0; i < roll->members; i++) {
    const mlfab__roll_entry *entry = roll_member(roll, i);
    const mlfab__roll_ask *ask = &entry->ask;
    roll->table[i] =
        (mlfab__roll_member){roll->order[i],   entry->incarnation, ask->arena_pid, ask->arena_fd,
                             ask->arena_nonce, ask->arena_bytes,   ask->host};
  }
  roll->list_bytes = mlfab__encode_roll_list(roll->list, &list, roll->table);
}

/* The epoch is over as it begins, for all who have asked. */
static void roll_refuse(mlfab__roll *roll, int32_t code, int32_t rank, const char *text) {
  roll->verdict = (mlfab__roll_over){roll->epoch, code, rank, {0}};
  snprintf(roll->verdict.text, sizeof roll->verdict.text, "%s", text);
  for (uint32_t w = 0; w < roll->workers; w++) {
    roll->entries[w].lost = 0;
    if (!roll->entries[w].asked) continue;
    roll->entries[w].asked = 0;
    roll->entries[w].over_owed = roll->epoch;
    roll_post_over(roll, w);
  }
}

/* May those who have asked be an epoch? Else it is refused. */
static int roll_may_form(mlfab__roll *roll, uint32_t asked) {
  char text[128];
  if (asked > roll_room(roll)) {
    snprintf(text, sizeof text, "%u workers call collectives, which are for %u at most", asked,
             roll_room(roll));
    roll_refuse(roll, MLFAB_ERR_LIMIT, MLFAB_NO_RANK, text);
    return 0;
  }
  for (uint32_t w = 0; w < roll->workers && !MLFAB__PLANTED(73); w++) {
    int32_t lost = roll->entries[w].lost;
    if (!lost) continue;
    snprintf(text, sizeof text,
             lost == MLFAB_ERR_PEER_DEAD ? "worker %u is dead" : "worker %u has left", w);
    roll_refuse(roll, lost, (int32_t)w, text);
    return 0;
  }
  return 1;
}

/* Those who have asked are the next epoch. */
static void roll_form(mlfab__roll *roll, uint32_t asked) {
  roll->epoch++;
  if (!roll_may_form(roll, asked)) return;
  roll->phase = MLFAB__ROLL_LISTED;
  for (uint32_t w = 0; w < roll->workers; w++) {
    mlfab__roll_entry *entry = &roll->entries[w];
    if (!entry->asked) continue;
    entry->asked = 0;
    entry->member = 1;
    entry->missing = ROLL_UNTOLD;
    roll->order[roll->members++] = w;
  }
  roll_arrange(roll);
  roll_make_list(roll);
  roll_post_all(roll, MLFAB__ROLL_LIST, roll->list, roll->list_bytes);
}

/* Who an epoch that forms waits for: the first rank that has not asked, or is not ready. */
static int32_t roll_missing(const mlfab__roll *roll) {
  for (uint32_t w = 0; w < roll->workers; w++) {
    const mlfab__roll_entry *entry = &roll->entries[w];
    if (roll->phase == MLFAB__ROLL_GATHERING && entry->alive && !entry->done && !entry->asked)
      return (int32_t)w;
    if (roll->phase == MLFAB__ROLL_LISTED && entry->member && !entry->ready) return (int32_t)w;
  }
  return MLFAB_NO_RANK;
}

/* Tells those who wait who is missing, where it is another than they were told. */
static void roll_tell_missing(mlfab__roll *roll) {
  mlfab__roll_missing missing = {0, 0, 0, roll_missing(roll)};
  uint8_t meta[32];
  uint32_t bytes = mlfab__encode_roll_missing(meta, &missing);
  for (uint32_t w = 0; w < roll->workers; w++) {
    mlfab__roll_entry *entry = &roll->entries[w];
    int waits = roll->phase == MLFAB__ROLL_GATHERING ? entry->asked : entry->member && entry->ready;
    if (!waits || entry->left || entry->missing == missing.rank) continue;
    entry->missing = missing.rank;
    roll_post(roll, w, MLFAB__ROLL_MISSING, meta, bytes);
  }
}

/* Has everybody asked who is awaited? */
static void roll_check(mlfab__roll *roll) {
  uint32_t asked = 0;
  if (roll->phase != MLFAB__ROLL_GATHERING) return;
  for (uint32_t w = 0; w < roll->workers; w++) asked += roll->entries[w].asked;
  if (asked > 0 && roll_missing(roll) == MLFAB_NO_RANK) roll_form(roll, asked);
}

/* What members choose their algorithms by. */
static void roll_make_go(mlfab__roll *roll) {
  const mlfab__roll_entry *first = roll_member(roll, 0);
  mlfab__roll_go *go = &roll->go;
  int inside = 1;
  *go = (mlfab__roll_go){.epoch = roll->epoch, .arena = 1};
  for (uint32_t i = 0; i < roll->members; i++) {
    const mlfab__roll_entry *entry = roll_member(roll, i);
    go->arena &= entry->arena;
    go->round = mlfab__max(go->round, entry->ask.round);
    go->objects = mlfab__max(go->objects, entry->ask.objects);
    inside &= entry->ask.host == first->ask.host;
    if (entry->rate > 0.0 && (go->rate <= 0.0 || entry->rate < go->rate)) go->rate = entry->rate;
  }
  go->latency_ns = inside ? ROLL_LATENCY_INSIDE : ROLL_LATENCY_BETWEEN;
  if (inside) go->rate = roll_rate_inside;
  if (go->rate <= 0.0) go->rate = roll_rate_unknown;
}

/* Is everybody ready who is awaited? */
static void roll_check_ready(mlfab__roll *roll) {
  if (roll->phase != MLFAB__ROLL_LISTED || roll_missing(roll) != MLFAB_NO_RANK) return;
  roll->phase = MLFAB__ROLL_RUNNING;
  roll_make_go(roll);
  for (uint32_t i = 0; i < roll->members; i++) {
    uint32_t worker = roll->order[i];
    if (!roll_member(roll, i)->alive) continue;
    roll_post_go(roll, worker);
    roll_post_departures(roll, worker);
  }
}

/* --- a call that is stuck --- */

static int roll_awaited(const mlfab__roll_entry *entry) { return entry->member && !entry->left; }

static void roll_ask_all(mlfab__roll *roll, uint32_t channel, uint64_t number, uint64_t now_ns) {
  mlfab__roll_inquiry *inquiry = &roll->inquiry;
  mlfab__roll_call call = {roll->epoch, channel, number};
  uint8_t meta[32];
  inquiry->open = 1;
  if (inquiry->pending_channel == channel && inquiry->pending_number == number)
    inquiry->pending = 0;
  inquiry->channel = channel;
  inquiry->number = number;
  inquiry->asked_ns = mlfab__max(now_ns, 1);
  for (uint32_t i = 0; i < roll->members; i++) roll_member(roll, i)->told = 0;
  roll_post_all(roll, MLFAB__ROLL_ASK, meta, mlfab__encode_roll_call(meta, &call));
}

/* The inquiry is over: this rank has not called, or did not answer; or nobody is missing. */
static void roll_answer(mlfab__roll *roll, int32_t rank) {
  mlfab__roll_inquiry *inquiry = &roll->inquiry;
  mlfab__roll_missing missing = {roll->epoch, inquiry->channel, inquiry->number, rank};
  uint8_t meta[32];
  inquiry->open = 0;
  roll_post_all(roll, MLFAB__ROLL_MISSING, meta, mlfab__encode_roll_missing(meta, &missing));
}

/* Has told what it has called; 0: that is over there, and cannot have been anything else. */
static int roll_knows(const mlfab__roll_entry *entry) {
  return roll_awaited(entry) && entry->signature != 0;
}

/* How many have called the same as this one. */
static uint32_t roll_agreeing(const mlfab__roll *roll, uint64_t signature) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < roll->members; i++) {
    const mlfab__roll_entry *entry = roll_member(roll, i);
    n += roll_knows(entry) && entry->signature == signature;
  }
  return n;
}

/* All have called. When not all have called the same, the verdict. */
static void roll_compare(mlfab__roll *roll) {
  const mlfab__roll_entry *usual = NULL, *odd = NULL;
  uint32_t most = 0;
  char text[MLFAB__TEXT_MAX];
  for (uint32_t w = 0; w < roll->workers; w++) {
    const mlfab__roll_entry *entry = &roll->entries[w];
    if (!roll_knows(entry) || (usual && entry->signature == usual->signature)) continue;
    uint32_t n = roll_agreeing(roll, entry->signature);
    if (n <= most && !MLFAB__PLANTED(68)) continue;
    most = n;
    usual = entry;
    if (n == roll->members) break;
  }
  for (uint32_t w = 0; w < roll->workers && usual && !odd; w++) {
    const mlfab__roll_entry *entry = &roll->entries[w];
    if (roll_knows(entry) && entry->signature != usual->signature) odd = entry;
  }
  if (!odd) {
    roll_answer(roll, MLFAB_NO_RANK);
    return;
  }
  uint32_t worker = (uint32_t)(odd - roll->entries);
  snprintf(text, sizeof text, "calls differ: worker %u has called %.90s, worker %u %.90s", worker,
           odd->words, (uint32_t)(usual - roll->entries), usual->words);
  roll_verdict(roll, MLFAB_ERR_SHAPE, (int32_t)worker, text);
}

/* Looks at the answers; `late`: whoever has not answered is not waited for any longer. */
static void roll_look_at_answers(mlfab__roll *roll, int late) {
  int32_t silent = MLFAB_NO_RANK, missing = MLFAB_NO_RANK;
  if (!roll->inquiry.open) return;
  for (uint32_t w = roll->workers; w-- > 0;) {
    const mlfab__roll_entry *entry = &roll->entries[w];
    if (!roll_awaited(entry)) continue;
    if (!entry->told) {
      silent = (int32_t)w;
    } else if (!entry->called) {
      missing = (int32_t)w;
    }
  }
  if (silent != MLFAB_NO_RANK && !late) return;
  if (missing != MLFAB_NO_RANK || silent != MLFAB_NO_RANK) {
    roll_answer(roll, missing != MLFAB_NO_RANK ? missing : silent);
  } else {
    roll_compare(roll);
  }
}

static int roll_may_ask(const mlfab__roll *roll, uint64_t now_ns) {
  const mlfab__roll_inquiry *inquiry = &roll->inquiry;
  return !inquiry->asked_ns || now_ns - inquiry->asked_ns >= roll->config->heartbeat_ns / 4;
}

static void roll_stuck(mlfab__roll *roll, const mlfab__roll_call *in, uint64_t now_ns) {
  mlfab__roll_inquiry *inquiry = &roll->inquiry;
  int beat = now_ns - inquiry->asked_ns >= roll->config->heartbeat_ns;
  int same = in->channel == inquiry->channel && in->number == inquiry->number;
  if (inquiry->asked_ns && same && (inquiry->open || !beat)) return;
  if (!inquiry->open && roll_may_ask(roll, now_ns)) {
    roll_ask_all(roll, in->channel, in->number, now_ns);
    return;
  }
  if (inquiry->pending &&
      (inquiry->pending_number < in->number ||
       (inquiry->pending_number == in->number && inquiry->pending_channel <= in->channel)))
    return;
  inquiry->pending = 1;
  inquiry->pending_channel = in->channel;
  inquiry->pending_number = in->number;
}

static void roll_tell(mlfab__roll *roll, mlfab__roll_entry *entry, const mlfab__roll_tell *in) {
  const mlfab__roll_inquiry *inquiry = &roll->inquiry;
  if (!inquiry->open || in->channel != inquiry->channel || in->number != inquiry->number) return;
  entry->told = 1;
  entry->called = in->called != 0;
  entry->signature = in->signature;
  memcpy(entry->words, in->text, sizeof entry->words);
  roll_look_at_answers(roll, 0);
}

/* --- what workers say --- */

/* It wants to take part. */
static void roll_asks(mlfab__roll *roll, uint32_t worker, const mlfab__roll_ask *in) {
  mlfab__roll_entry *entry = &roll->entries[worker];
  if (entry->over_owed > in->epoch) { /* said before it heard of it */
    roll_post_over(roll, worker);
    return;
  }
  if (entry->done) return;
  entry->over_owed = 0;
  if (entry->member) { /* a repetition: the list may have been lost */
    roll_post(roll, worker, MLFAB__ROLL_LIST, roll->list, roll->list_bytes);
    return;
  }
  entry->asked = 1;
  entry->ask = *in;
  entry->missing = ROLL_UNTOLD;
  if (roll->phase == MLFAB__ROLL_IDLE) roll->phase = MLFAB__ROLL_GATHERING;
  if (roll_stands(roll)) {
    char text[64];
    snprintf(text, sizeof text, "worker %u has come in: collectives begin anew", worker);
    roll_verdict(roll, MLFAB_ERR_AGAIN, (int32_t)worker, text);
  } else {
    roll_check(roll);
  }
}

static void roll_is_ready(mlfab__roll *roll, uint32_t worker, const mlfab__roll_ready *in) {
  mlfab__roll_entry *entry = &roll->entries[worker];
  if (roll->phase == MLFAB__ROLL_RUNNING) { /* a repetition: what followed may have been lost */
    roll_post_go(roll, worker);
    roll_post_departures(roll, worker);
    return;
  }
  if (entry->ready) return;
  entry->ready = 1;
  entry->arena = in->arena == 1 && !entry->left;
  roll_check_ready(roll);
}

static void roll_fails(mlfab__roll *roll, uint32_t worker, const mlfab__roll_over *in) {
  int known = in->rank >= 0 && (uint32_t)in->rank < roll->workers;
  roll_verdict(roll, in->code < 0 ? in->code : MLFAB_ERR_REFUSED,
               known ? in->rank : (int32_t)worker, in->text);
}

/* It takes no further part, and is no member: others are told when they begin one without it. */
static void roll_lose(mlfab__roll *roll, uint32_t worker, int32_t code) {
  mlfab__roll_entry *entry = &roll->entries[worker];
  int counted = entry->alive && !entry->done && !entry->member;
  if (counted && !roll_stands(roll)) entry->lost = code;
}

/* It takes no further part. Of an epoch that it did not know yet it has called nothing. */
static void roll_leaves(mlfab__roll *roll, uint32_t worker, const mlfab__roll_leave *in) {
  mlfab__roll_entry *entry = &roll->entries[worker];
  uint8_t meta[32];
  roll_lose(roll, worker, MLFAB_ERR_PEER_CLOSED);
  entry->done = 1;
  entry->asked = 0;
  if (!entry->member) {
    roll_check(roll);
    return;
  }
  if (entry->left) return;
  int knows = in->epoch == roll->epoch;
  entry->left = 1;
  entry->calls = knows ? in->calls : 0;
  entry->arena = 0;
  if (!knows) entry->ready = 1;
  if (roll->phase == MLFAB__ROLL_RUNNING)
    roll_post_all(roll, MLFAB__ROLL_LEFT, meta, roll_left_meta(roll, worker, meta));
  roll_check_ready(roll);
  roll_look_at_answers(roll, 0);
}

static void roll_broken(mlfab__roll *roll, uint32_t worker, const char *text) {
  roll->port.drop(roll->port.self, worker, MLFAB_ERR_FRAME, text);
}

/* Frames of members about the epoch that stands. Others are of what is over. */
#define ROLL_DECODE(name) \
  mlfab__decode_##name(frame->meta, frame->meta_bytes, &in.name) ? -1 : in.name.epoch == epoch
static int roll_member_frame(mlfab__roll *roll, uint32_t worker, const mlfab__frame_in *frame,
                             uint64_t now_ns) {
  union {
    mlfab__roll_ready roll_ready;
    mlfab__roll_over roll_over;
    mlfab__roll_call roll_call;
    mlfab__roll_tell roll_tell;
  } in;
  mlfab__roll_entry *entry = &roll->entries[worker];
  uint32_t epoch = entry->alive && entry->member ? roll->epoch : 0;
  int running = roll->phase == MLFAB__ROLL_RUNNING, fits;
  switch (frame->type) {
    case MLFAB__ROLL_READY:
      fits = ROLL_DECODE(roll_ready);
      if (fits > 0 && epoch) roll_is_ready(roll, worker, &in.roll_ready);
      break;
    case MLFAB__ROLL_FAIL:
      fits = ROLL_DECODE(roll_over);
      if (fits > 0 && epoch) roll_fails(roll, worker, &in.roll_over);
      break;
    case MLFAB__ROLL_STUCK:
      fits = ROLL_DECODE(roll_call);
      if (fits > 0 && epoch && running) roll_stuck(roll, &in.roll_call, now_ns);
      break;
    case MLFAB__ROLL_TELL:
      fits = ROLL_DECODE(roll_tell);
      if (fits > 0 && epoch && running) roll_tell(roll, entry, &in.roll_tell);
      break;
    default:
      return 0;
  }
  if (fits < 0) roll_broken(roll, worker, "a frame of the roll that does not parse");
  return 1;
}
#undef ROLL_DECODE

MLFAB__INTERNAL int mlfab__roll_frame(mlfab__roll *roll, uint32_t worker,
                                      const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__roll_ask ask;
  mlfab__roll_leave leave;
  if (frame->type == MLFAB__ROLL) {
    if (mlfab__decode_roll_ask(frame->meta, frame->meta_bytes, &ask) || ask.epoch > roll->epoch) {
      roll_broken(roll, worker, "a ROLL that does not parse, or of an epoch that never was");
    } else if (roll->entries[worker].alive) {
      roll_asks(roll, worker, &ask);
    }
    return 1;
  }
  if (frame->type == MLFAB__ROLL_LEAVE) {
    if (mlfab__decode_roll_leave(frame->meta, frame->meta_bytes, &leave)) {
      roll_broken(roll, worker, "a ROLL_LEAVE that does not parse");
    } else if (roll->entries[worker].alive) {
      roll_leaves(roll, worker, &leave);
    }
    return 1;
  }
  return roll_member_frame(roll, worker, frame, now_ns);
}

/* --- who comes and goes --- */

/* What a member may have missed while it had no link. What it repeats itself is answered then. */
static void roll_repeat(mlfab__roll *roll, uint32_t worker) {
  const mlfab__roll_entry *entry = &roll->entries[worker];
  const mlfab__roll_inquiry *inquiry = &roll->inquiry;
  uint8_t meta[32];
  if (entry->over_owed) roll_post_over(roll, worker);
  if (!entry->member || roll->phase != MLFAB__ROLL_RUNNING) return;
  roll_post_departures(roll, worker);
  if (!inquiry->open || entry->told || entry->left) return;
  mlfab__roll_call call = {roll->epoch, inquiry->channel, inquiry->number};
  roll_post(roll, worker, MLFAB__ROLL_ASK, meta, mlfab__encode_roll_call(meta, &call));
}

MLFAB__INTERNAL void mlfab__roll_hello(mlfab__roll *roll, uint32_t worker, uint32_t incarnation,
                                       uint64_t now_ns) {
  mlfab__roll_entry *entry = &roll->entries[worker];
  (void)now_ns;
  if (entry->incarnation == incarnation) {
    if (!entry->alive) entry->lost = 0;
    entry->alive = 1;
    entry->missing = ROLL_UNTOLD;
    roll_repeat(roll, worker);
    return;
  }
  int ends = entry->member;
  memset(entry, 0, sizeof *entry);
  entry->alive = 1;
  entry->incarnation = incarnation;
  entry->missing = ROLL_UNTOLD;
  if (ends) {
    char text[64];
    snprintf(text, sizeof text, "worker %u is back as a new process", worker);
    roll_verdict(roll, MLFAB_ERR_AGAIN, (int32_t)worker, text);
  }
}

MLFAB__INTERNAL void mlfab__roll_gone(mlfab__roll *roll, uint32_t worker, int left,
                                      uint64_t now_ns) {
  mlfab__roll_entry *entry = &roll->entries[worker];
  (void)now_ns;
  roll_lose(roll, worker, left ? MLFAB_ERR_PEER_CLOSED : MLFAB_ERR_PEER_DEAD);
  entry->alive = entry->asked = 0;
  if (entry->member && left && entry->left) { /* as it has said */
    entry->ready = 1;
    roll_check_ready(roll);
  } else if (entry->member) {
    char text[64];
    snprintf(text, sizeof text, left ? "worker %u has closed" : "worker %u is dead", worker);
    roll_verdict(roll, left ? MLFAB_ERR_PEER_CLOSED : MLFAB_ERR_PEER_DEAD, (int32_t)worker, text);
  } else {
    roll_check(roll);
  }
}

MLFAB__INTERNAL void mlfab__roll_done(mlfab__roll *roll, uint32_t worker, uint64_t now_ns) {
  (void)now_ns;
  roll_lose(roll, worker, MLFAB_ERR_PEER_CLOSED);
  roll->entries[worker].done = 1;
  roll->entries[worker].asked = 0;
  roll_check(roll);
}

MLFAB__INTERNAL void mlfab__roll_tick(mlfab__roll *roll, uint64_t now_ns) {
  mlfab__roll_inquiry *inquiry = &roll->inquiry;
  if (roll->phase == MLFAB__ROLL_GATHERING || roll->phase == MLFAB__ROLL_LISTED)
    roll_tell_missing(roll);
  if (roll->phase != MLFAB__ROLL_RUNNING) return;
  if (inquiry->open && now_ns - inquiry->asked_ns >= 2 * roll->config->heartbeat_ns)
    roll_look_at_answers(roll, 1);
  if (!inquiry->open && inquiry->pending && roll_may_ask(roll, now_ns))
    roll_ask_all(roll, inquiry->pending_channel, inquiry->pending_number, now_ns);
}
