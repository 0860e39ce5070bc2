/* membership.c - server 0 keeps the membership of collectives: forms and ends epochs. See membership.h.
 *
 * It knows who has asked, who knows of the others, and how an epoch ended. Server 0 repeats an answer when the worker
 * repeats its question. Only verdicts, departures and open questions, after which a worker is silent, are repeated at
 * its greeting. */
#include "membership.h"

#include "barrier.h"

#include <stdio.h>

enum {
  MEMBERSHIP_LIST_BYTES = 12,
  MEMBERSHIP_MEMBER_BYTES = 40,
  MEMBERSHIP_KEPT_TICKS = 4,          /* ticks in a heartbeat */
  MEMBERSHIP_UNTOLD = -2,             /* no name was told, even NO_RANK */
  MEMBERSHIP_LATENCY_INSIDE = 10000,  /* ns of a message between processes of one host ... */
  MEMBERSHIP_LATENCY_BETWEEN = 50000, /* ... and between hosts, if nothing has measured it */
};
static const double membership_rate_inside = 2e9; /* bytes a second, with its two system calls */
static const double membership_rate_unknown = 1.25e9;

static void membership_check(mlfab__membership *membership);
static void membership_admit(mlfab__membership *membership);
static void membership_meet(mlfab__membership *membership);

static uint32_t membership_room(const mlfab__membership *membership) {
  return (uint32_t)mlfab__min(membership->workers, MLFAB__MEMBERSHIP_MEMBERS_MAX);
}

static void membership_no_limit(mlfab__membership *membership) {
  membership->freezing = 0;
  membership->finisher = MLFAB_NO_RANK;
  membership->limit = UINT64_MAX;
  membership->kept = 0;
  memset(membership->seek, 0, sizeof membership->seek);
}

MLFAB__INTERNAL int mlfab__membership_init(mlfab__membership *membership, mlfab__env *env,
                                           const mlfab_config *config, const mlfab__port *port) {
  memset(membership, 0, sizeof *membership);
  membership->env = env;
  membership->config = config;
  membership->port = *port;
  membership->workers = config->workers;
  uint32_t room = membership_room(membership);
  membership_no_limit(membership);
  membership->entries = mlfab__alloc_array(env, membership->workers, sizeof *membership->entries);
  membership->order = mlfab__alloc_array(env, room, sizeof *membership->order);
  membership->table = mlfab__alloc_array(env, room, sizeof *membership->table);
  membership->list = mlfab__alloc(env, MEMBERSHIP_LIST_BYTES + room * MEMBERSHIP_MEMBER_BYTES);
  if (!membership->entries || !membership->order || !membership->table || !membership->list)
    return MLFAB_ERR_MEMORY;
  for (uint32_t w = 0; w < membership->workers; w++) {
    membership->entries[w].alive = 1;
    membership->entries[w].missing = MEMBERSHIP_UNTOLD;
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__membership_free(void *self) {
  mlfab__membership *membership = self;
  if (!membership->env) return;
  uint32_t room = membership_room(membership);
  mlfab__free(membership->env, membership->entries,
              membership->workers * sizeof *membership->entries);
  mlfab__free(membership->env, membership->order, room * sizeof *membership->order);
  mlfab__free(membership->env, membership->table, room * sizeof *membership->table);
  mlfab__free(membership->env, membership->list,
              MEMBERSHIP_LIST_BYTES + room * MEMBERSHIP_MEMBER_BYTES);
  memset(membership, 0, sizeof *membership);
}

static int membership_stands(const mlfab__membership *membership) {
  return membership->phase == MLFAB__MEMBERSHIP_LISTED ||
         membership->phase == MLFAB__MEMBERSHIP_RUNNING;
}

/* Returns the members in their order. */
static mlfab__membership_entry *membership_member(const mlfab__membership *membership, uint32_t i) {
  return &membership->entries[membership->order[i]];
}

/* Records that a worker's event has changed its entry and the common state; other entries only if all are touched. */
static void membership_touch(mlfab__membership *membership, uint32_t worker) {
  mlfab__touched(membership->touch, 0);
  mlfab__touched(membership->touch, 1 + worker);
}

/* --- sending --- */

static void membership_post(mlfab__membership *membership, uint32_t worker, uint8_t type,
                            const void *meta, uint32_t bytes) {
  membership->port.post(membership->port.self, worker, type, meta, bytes);
}

/* Posts to all members that have not left. */
static void membership_post_all(mlfab__membership *membership, uint8_t type, const void *meta,
                                uint32_t bytes) {
  for (uint32_t i = 0; i < membership->members; i++) {
    const mlfab__membership_entry *entry = membership_member(membership, i);
    if (entry->member && !entry->left)
      membership_post(membership, membership->order[i], type, meta, bytes);
  }
}

/* Tells a worker how its epoch ended. A worker that was declared dead may have missed the end of an older epoch. */
static void membership_post_over(mlfab__membership *membership, uint32_t worker) {
  mlfab__membership_over over = membership->verdict;
  uint8_t meta[MLFAB__TEXT_MAX + 32];
  uint32_t epoch = membership->entries[worker].over_owed;
  if (epoch != over.epoch && membership->entries[worker].over_well) {
    over = (mlfab__membership_over){.epoch = epoch, .rank = MLFAB_NO_RANK};
  } else if (epoch != over.epoch) {
    over.epoch = epoch;
    over.code = MLFAB_ERR_PEER_DEAD;
    over.rank = (int32_t)worker;
    snprintf(over.text, sizeof over.text, "worker %u was taken for dead", worker);
  }
  membership_post(membership, worker, MLFAB__MEMBERSHIP_OVER, meta,
                  mlfab__encode_membership_over(meta, &over));
}

static uint32_t membership_left_meta(const mlfab__membership *membership, uint32_t worker,
                                     uint8_t *meta) {
  mlfab__membership_leave left = {membership->epoch, (int32_t)worker,
                                  membership->entries[worker].calls};
  return mlfab__encode_membership_leave(meta, &left);
}

static void membership_post_go(mlfab__membership *membership, uint32_t worker) {
  uint8_t meta[64];
  membership_post(membership, worker, MLFAB__MEMBERSHIP_GO, meta,
                  mlfab__encode_membership_go(meta, &membership->go));
}

/* Repeats who has left: a member of a running epoch may have missed it. */
static void membership_post_departures(mlfab__membership *membership, uint32_t worker) {
  uint8_t meta[32];
  for (uint32_t i = 0; i < membership->members; i++) {
    if (membership_member(membership, i)->left && membership->order[i] != worker)
      membership_post(membership, worker, MLFAB__MEMBERSHIP_LEFT, meta,
                      membership_left_meta(membership, membership->order[i], meta));
  }
}

/* --- verdicts --- */

/* Releases a worker from the membership. If it is new, and no epoch has begun with it, it joins again. */
static void membership_release(mlfab__membership_entry *entry) {
  entry->joins = entry->fresh;
  entry->member = entry->ready = entry->arena = entry->left = entry->asked = 0;
  entry->finished = entry->frozen = entry->moved = 0;
}

/* Ends the epoch for all members. */
static void membership_verdict(mlfab__membership *membership, int32_t code, int32_t rank,
                               const char *format, ...) {
  va_list arguments;
  mlfab__touched_all(membership->touch);
  membership->verdict.epoch = membership->epoch;
  membership->verdict.code = code;
  membership->verdict.rank = rank;
  va_start(arguments, format);
  mlfab__vformat(membership->verdict.text, sizeof membership->verdict.text, format, arguments);
  va_end(arguments);
  membership->phase = MLFAB__MEMBERSHIP_GATHERING;
  memset(&membership->inquiry, 0, sizeof membership->inquiry);
  membership_no_limit(membership);
  for (uint32_t i = 0; i < membership->members; i++) {
    mlfab__membership_entry *entry = membership_member(membership, i);
    if (!entry->member) continue; /* its process is a new one */
    membership_release(entry);
    entry->over_owed = membership->epoch;
    entry->over_well = 0;
    membership_post_over(membership, membership->order[i]);
  }
  membership->members = 0;
  membership_check(membership);
}

/* --- forming an epoch --- */

/* Returns the bytes a second of a member's link, as it reports; 0: unknown. */
static double membership_rate(const mlfab__membership_ask *ask) {
  double rate = ask->in < ask->out ? ask->in : ask->out;
  return rate > 0.0 && rate < 1e18 ? rate : 0.0;
}

/* Members of one host share its link: the largest measured rate of them counts. */
static void membership_look_at_hosts(mlfab__membership *membership) {
  for (uint32_t i = 0; i < membership->members; i++) {
    mlfab__membership_entry *entry = membership_member(membership, i);
    entry->lead = MLFAB__NO_NODE;
    entry->rate = 0.0;
    for (uint32_t k = 0; k < membership->members; k++) {
      const mlfab__membership_entry *other = membership_member(membership, k);
      if (other->ask.host != entry->ask.host) continue;
      if (membership->order[k] < entry->lead) entry->lead = membership->order[k];
      if (membership_rate(&other->ask) > entry->rate) entry->rate = membership_rate(&other->ask);
    }
  }
}

static int membership_before(const mlfab__membership *membership, uint32_t a, uint32_t b) {
  const mlfab__membership_entry *x = &membership->entries[a], *y = &membership->entries[b];
  if (membership->config->order_by_rate && x->rate > y->rate) return 1;
  if (membership->config->order_by_rate && x->rate < y->rate) return 0;
  return x->lead != y->lead ? x->lead < y->lead : a < b;
}

static void membership_arrange(mlfab__membership *membership) {
  membership_look_at_hosts(membership);
  for (uint32_t i = 1; i < membership->members; i++) {
    uint32_t worker = membership->order[i], at = i;
    for (; at > 0 && membership_before(membership, worker, membership->order[at - 1]); at--)
      membership->order[at] = membership->order[at - 1];
    membership->order[at] = worker;
  }
  for (uint32_t i = 0; i < membership->members; i++) membership_member(membership, i)->place = i;
}

static void membership_make_list(mlfab__membership *membership) {
  mlfab__membership_list list = {membership->epoch, membership->members, 0};
  for (uint32_t i = 0; i < membership->members; i++) {
    const mlfab__membership_entry *entry = membership_member(membership, i);
    list.newcomers += entry->fresh;
    const mlfab__membership_ask *ask = &entry->ask;
    membership->table[i] = (mlfab__membership_member){
        membership->order[i], entry->incarnation, ask->arena_pid, ask->arena_fd,
        ask->arena_nonce,     ask->arena_bytes,   ask->host};
  }
  membership->list_bytes =
      mlfab__encode_membership_list(membership->list, &list, membership->table);
}

/* Ends the epoch, before it begins, for all workers that have asked, except those that cannot fail a call of others. */
static void membership_refuse(mlfab__membership *membership, int32_t code, int32_t rank,
                              const char *text) {
  mlfab__touched_all(membership->touch);
  membership->verdict = (mlfab__membership_over){membership->epoch, code, rank, {0}};
  snprintf(membership->verdict.text, sizeof membership->verdict.text, "%s", text);
  for (uint32_t w = 0; w < membership->workers; w++) {
    membership->entries[w].lost = 0;
    if (!membership->entries[w].asked || membership->entries[w].joins) continue;
    membership->entries[w].asked = 0;
    membership->entries[w].joins = membership->entries[w].fresh; /* nobody waits for it */
    membership->entries[w].over_owed = membership->epoch;
    membership->entries[w].over_well = 0;
    membership_post_over(membership, w);
  }
}

/* Returns 1 if the workers that have asked can form an epoch that begins with this call; else refuses the epoch. */
static int membership_may_form(mlfab__membership *membership, uint32_t asked, uint64_t first) {
  char text[128];
  if (asked > membership_room(membership)) {
    snprintf(text, sizeof text, "%u workers call collectives, which are for %u at most", asked,
             membership_room(membership));
    membership_refuse(membership, MLFAB_ERR_LIMIT, MLFAB_NO_RANK, text);
    return 0;
  }
  for (uint32_t w = 0; w < membership->workers; w++) {
    const mlfab__membership_entry *entry = &membership->entries[w];
    int32_t lost = entry->lost;
    if (!lost || (entry->asked && entry->ask.signature == first)) continue;
    snprintf(text, sizeof text,
             lost == MLFAB_ERR_PEER_DEAD ? "worker %u is dead" : "worker %u has left", w);
    membership_refuse(membership, lost, (int32_t)w, text);
    return 0;
  }
  return 1;
}

/* Returns the first member of the next epoch with objects of the last epoch, which joiners lack; or NO_RANK. */
static int32_t membership_keeper(const mlfab__membership *membership) {
  for (uint32_t w = 0; w < membership->workers; w++) {
    const mlfab__membership_entry *entry = &membership->entries[w];
    if (entry->asked && !entry->joins && entry->ask.open > 0) return (int32_t)w;
  }
  return MLFAB_NO_RANK;
}

/* Returns the number of joiners that fit into an epoch beside the members of the running one, or beside the others that
 * have asked for the next. */
static uint32_t membership_places(const mlfab__membership *membership) {
  uint32_t taken = 0, room = membership_room(membership);
  for (uint32_t w = 0; w < membership->workers; w++) {
    const mlfab__membership_entry *entry = &membership->entries[w];
    taken += membership_stands(membership) ? entry->member && !entry->left && !entry->done
                                           : entry->asked && !entry->joins;
  }
  return taken < room ? room - taken : 0;
}

/* Returns the call with which the next epoch begins, if all workers except joiners have told the same; 0: unknown. With
 * joiners alone it is the first joiner's call. */
static uint64_t membership_first_call(const mlfab__membership *membership) {
  uint64_t first = 0, joiner = 0;
  uint32_t members = 0;
  for (uint32_t w = 0; w < membership->workers; w++) {
    const mlfab__membership_entry *entry = &membership->entries[w];
    if (!entry->asked) continue;
    if (entry->joins) {
      if (!joiner) joiner = entry->ask.signature;
    } else if (members++ == 0) {
      first = entry->ask.signature;
    } else if (entry->ask.signature != first) {
      first = 0;
    }
  }
  return members > 0 ? first : joiner;
}

/* Belongs the worker to the epoch that begins with this call? A joiner does only if its first call is this one, there
 * is room, and nobody keeps objects; a returning worker does even if they do. */
static int membership_fits(const mlfab__membership_entry *entry, uint64_t first, int kept,
                           uint32_t *places) {
  if (!entry->asked || !entry->joins) return entry->asked;
  if (entry->ask.signature != first || (kept && entry->well) || *places == 0) return 0;
  (*places)--;
  return 1;
}

/* Forms the next epoch from the workers that have asked, and from joiners that fit; it begins with its first call. */
static void membership_form(mlfab__membership *membership) {
  uint32_t asked = 0, places = membership_places(membership), joiners = places;
  uint64_t first = membership_first_call(membership);
  int kept = membership_keeper(membership) != MLFAB_NO_RANK;
  for (uint32_t w = 0; w < membership->workers; w++)
    asked += (uint32_t)membership_fits(&membership->entries[w], first, kept, &joiners);
  if (asked == 0) return;
  mlfab__touched_all(membership->touch);
  membership->epoch++;
  if (!membership_may_form(membership, asked, first)) {
    membership_check(membership);
    return;
  }
  membership->phase = MLFAB__MEMBERSHIP_LISTED;
  for (uint32_t w = 0; w < membership->workers; w++) {
    mlfab__membership_entry *entry = &membership->entries[w];
    entry->lost = 0;
    if (!membership_fits(entry, first, kept, &places)) continue;
    entry->asked = entry->joins = 0;
    entry->member = 1;
    entry->missing = MEMBERSHIP_UNTOLD;
    membership->order[membership->members++] = w;
  }
  membership_arrange(membership);
  membership_make_list(membership);
  membership_post_all(membership, MLFAB__MEMBERSHIP_LIST, membership->list, membership->list_bytes);
  membership_meet(membership);
}

/* Returns the rank for which a forming epoch waits: the first that has not asked, or is not ready. Newcomers get ready
 * after the others. */
static int32_t membership_missing(const mlfab__membership *membership) {
  int32_t fresh = MLFAB_NO_RANK;
  for (uint32_t w = 0; w < membership->workers; w++) {
    const mlfab__membership_entry *entry = &membership->entries[w];
    if (membership->phase == MLFAB__MEMBERSHIP_GATHERING && entry->alive && !entry->done &&
        !entry->asked && !entry->joins)
      return (int32_t)w;
    if (membership->phase != MLFAB__MEMBERSHIP_LISTED || !entry->member || entry->ready) continue;
    if (!entry->fresh) return (int32_t)w;
    if (fresh == MLFAB_NO_RANK) fresh = (int32_t)w;
  }
  return fresh;
}

/* Does this rank wait in a barrier? */
static uint32_t membership_waits(const mlfab__membership *membership, int32_t rank) {
  return membership->barrier && rank != MLFAB_NO_RANK &&
         mlfab__barrier_waits(membership->barrier, (uint32_t)rank);
}

/* Tells the waiting workers which rank is missing, if it has changed. */
static void membership_tell_missing(mlfab__membership *membership) {
  int32_t rank = membership_missing(membership);
  const mlfab__membership_missing missing = {.rank = rank,
                                             .waits = membership_waits(membership, rank)};
  uint8_t meta[MLFAB__META_PLAIN];
  uint32_t bytes = mlfab__encode_membership_missing(meta, &missing);
  for (uint32_t w = 0; w < membership->workers; w++) {
    mlfab__membership_entry *entry = &membership->entries[w];
    int waits = membership->phase == MLFAB__MEMBERSHIP_GATHERING
                    ? entry->asked
                    : entry->member && (entry->ready || entry->fresh);
    if (!waits || entry->left || (entry->missing == rank && entry->missing_waits == missing.waits))
      continue;
    entry->missing = rank;
    entry->missing_waits = (uint8_t)missing.waits;
    membership_post(membership, w, MLFAB__MEMBERSHIP_MISSING, meta, bytes);
  }
}

/* Forms the epoch when every live worker has asked. */
static void membership_check(mlfab__membership *membership) {
  if (membership->phase == MLFAB__MEMBERSHIP_GATHERING &&
      membership_missing(membership) == MLFAB_NO_RANK)
    membership_form(membership);
}

/* Computes latency and rate, by which members choose algorithms. */
static void membership_make_go(mlfab__membership *membership) {
  const mlfab__membership_entry *first = membership_member(membership, 0);
  mlfab__membership_go *go = &membership->go;
  int inside = 1;
  *go = (mlfab__membership_go){.epoch = membership->epoch, .arena = MLFAB__ARENA_USED};
  for (uint32_t i = 0; i < membership->members; i++) {
    const mlfab__membership_entry *entry = membership_member(membership, i);
    go->arena &= entry->arena;
    go->round = mlfab__max(go->round, entry->ask.round);
    go->objects = mlfab__max(go->objects, entry->ask.objects);
    inside &= entry->ask.host == first->ask.host;
    if (entry->rate > 0.0 && (go->rate <= 0.0 || entry->rate < go->rate)) go->rate = entry->rate;
  }
  go->latency_ns = inside ? MEMBERSHIP_LATENCY_INSIDE : MEMBERSHIP_LATENCY_BETWEEN;
  if (inside) go->rate = membership_rate_inside;
  if (go->rate <= 0.0) go->rate = membership_rate_unknown;
}

/* Tells newcomers that all others have called, and after how many updates and barriers. Without others the first of
 * them leads: it is told first, and counts with its own number. */
static void membership_meet(mlfab__membership *membership) {
  mlfab__membership_ready ready = {.epoch = membership->epoch, .rank = MLFAB_NO_RANK};
  for (uint32_t i = 0; i < membership->members; i++) {
    const mlfab__membership_entry *entry = membership_member(membership, i);
    if (entry->fresh) continue;
    if (!entry->ready) return;
    if (ready.rank == MLFAB_NO_RANK) ready.rank = (int32_t)membership->order[i];
    ready.progress = mlfab__max(ready.progress, entry->ask.progress);
  }
  int leads = ready.rank == MLFAB_NO_RANK;
  if (leads) ready.rank = (int32_t)membership->order[0];
  const mlfab__membership_entry *first = &membership->entries[ready.rank];
  ready.barriers = first->ask.barriers;
  if (leads) ready.progress = first->ask.progress;
  for (uint32_t i = 0; i < membership->members; i++) {
    const mlfab__membership_entry *entry = membership_member(membership, i);
    if (entry->fresh && !entry->ready && (first->ready || entry == first))
      MLFAB__POST(&membership->port, membership->order[i], MLFAB__MEMBERSHIP_READY,
                  membership_ready, &ready);
  }
}

/* Starts the epoch when every member is ready. */
static void membership_check_ready(mlfab__membership *membership) {
  if (membership->phase != MLFAB__MEMBERSHIP_LISTED) return;
  if (membership_missing(membership) != MLFAB_NO_RANK) {
    membership_meet(membership);
    return;
  }
  membership->phase = MLFAB__MEMBERSHIP_RUNNING;
  membership_make_go(membership);
  for (uint32_t i = 0; i < membership->members; i++) {
    uint32_t worker = membership->order[i];
    membership_member(membership, i)->fresh = 0;
    if (!membership_member(membership, i)->alive) continue;
    membership_post_go(membership, worker);
    membership_post_departures(membership, worker);
  }
  membership_admit(membership);
}

/* --- a call that is stuck --- */

static int membership_awaited(const mlfab__membership_entry *entry) {
  return entry->member && !entry->left;
}

static void membership_ask_all(mlfab__membership *membership, uint32_t channel, uint64_t number,
                               uint64_t now_ns) {
  mlfab__membership_inquiry *inquiry = &membership->inquiry;
  mlfab__membership_call call = {membership->epoch, channel, number};
  uint8_t meta[32];
  inquiry->open = 1;
  if (inquiry->pending_channel == channel && inquiry->pending_number == number)
    inquiry->pending = 0;
  inquiry->channel = channel;
  inquiry->number = number;
  inquiry->asked_ns = mlfab__max(now_ns, 1);
  for (uint32_t i = 0; i < membership->members; i++) membership_member(membership, i)->told = 0;
  membership_post_all(membership, MLFAB__MEMBERSHIP_ASK, meta,
                      mlfab__encode_membership_call(meta, &call));
}

/* Ends the inquiry: a call or an answer of this rank is missing; NO_RANK: none is missing. */
static void membership_answer(mlfab__membership *membership, int32_t rank) {
  mlfab__membership_inquiry *inquiry = &membership->inquiry;
  const mlfab__membership_missing missing = {.epoch = membership->epoch,
                                             .channel = inquiry->channel,
                                             .number = inquiry->number,
                                             .rank = rank,
                                             .waits = membership_waits(membership, rank)};
  uint8_t meta[MLFAB__META_PLAIN];
  inquiry->open = 0;
  membership_post_all(membership, MLFAB__MEMBERSHIP_MISSING, meta,
                      mlfab__encode_membership_missing(meta, &missing));
}

/* Returns 1 if the member has told its call. A call that is over at that member needs no comparison. */
static int membership_knows(const mlfab__membership_entry *entry) {
  return membership_awaited(entry) && entry->signature != 0;
}

/* Returns how many members have made the same call as this one. */
static uint32_t membership_agreeing(const mlfab__membership *membership, uint64_t signature) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < membership->members; i++) {
    const mlfab__membership_entry *entry = membership_member(membership, i);
    n += membership_knows(entry) && entry->signature == signature;
  }
  return n;
}

/* Compares, as all members have called: the verdict is MISMATCH if the calls differ. */
static void membership_compare(mlfab__membership *membership) {
  const mlfab__membership_entry *usual = NULL, *odd = NULL;
  uint32_t most = 0;
  for (uint32_t w = 0; w < membership->workers; w++) {
    const mlfab__membership_entry *entry = &membership->entries[w];
    if (!membership_knows(entry) || (usual && entry->signature == usual->signature)) continue;
    uint32_t n = membership_agreeing(membership, entry->signature);
    if (n <= most) continue;
    most = n;
    usual = entry;
    if (n == membership->members) break;
  }
  for (uint32_t w = 0; w < membership->workers && usual && !odd; w++) {
    const mlfab__membership_entry *entry = &membership->entries[w];
    if (membership_knows(entry) && entry->signature != usual->signature) odd = entry;
  }
  if (!odd) {
    membership_answer(membership, MLFAB_NO_RANK);
    return;
  }
  uint32_t worker = (uint32_t)(odd - membership->entries);
  uint32_t other = (uint32_t)(usual - membership->entries);
  if (!strcmp(odd->words, usual->words))
    membership_verdict(
        membership, MLFAB_ERR_MISMATCH, (int32_t)worker,
        "calls differ: worker %u and worker %u have called %.120s, with other options", worker,
        other, odd->words);
  else
    membership_verdict(membership, MLFAB_ERR_MISMATCH, (int32_t)worker,
                       "calls differ: worker %u has called %.100s, worker %u %.100s", worker,
                       odd->words, other, usual->words);
}

/* Returns 1 if the call under inquiry waits for this member. Nobody begins a call while a worker finishes, and a
 * finished worker takes part in the others' calls by itself. */
static int membership_may_call(const mlfab__membership *membership,
                               const mlfab__membership_entry *entry) {
  return !membership->freezing && !entry->finished;
}

/* Evaluates the answers; `last`: does not wait for members that have not answered. */
static void membership_look_at_answers(mlfab__membership *membership, int last) {
  int32_t silent = MLFAB_NO_RANK, missing = MLFAB_NO_RANK;
  if (!membership->inquiry.open) return;
  for (uint32_t w = membership->workers; w-- > 0;) {
    const mlfab__membership_entry *entry = &membership->entries[w];
    if (!membership_awaited(entry)) continue;
    if (!entry->told) {
      silent = (int32_t)w;
    } else if (!entry->called && membership_may_call(membership, entry)) {
      missing = (int32_t)w;
    }
  }
  if (silent != MLFAB_NO_RANK && !last) return;
  if (missing != MLFAB_NO_RANK || silent != MLFAB_NO_RANK) {
    membership_answer(membership, missing != MLFAB_NO_RANK ? missing : silent);
  } else {
    membership_compare(membership);
  }
}

static int membership_may_ask(const mlfab__membership *membership, uint64_t now_ns) {
  const mlfab__membership_inquiry *inquiry = &membership->inquiry;
  return !inquiry->asked_ns || now_ns - inquiry->asked_ns >= membership->config->heartbeat_ns / 4;
}

static void membership_stuck(mlfab__membership *membership, const mlfab__membership_call *in,
                             uint64_t now_ns) {
  mlfab__membership_inquiry *inquiry = &membership->inquiry;
  int beat = now_ns - inquiry->asked_ns >= membership->config->heartbeat_ns;
  int same = in->channel == inquiry->channel && in->number == inquiry->number;
  if (inquiry->asked_ns && same && (inquiry->open || !beat)) return;
  if (!inquiry->open && membership_may_ask(membership, now_ns)) {
    membership_ask_all(membership, in->channel, in->number, now_ns);
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

static void membership_tell(mlfab__membership *membership, mlfab__membership_entry *entry,
                            const mlfab__membership_tell *in) {
  const mlfab__membership_inquiry *inquiry = &membership->inquiry;
  if (!inquiry->open || in->channel != inquiry->channel || in->number != inquiry->number) return;
  entry->told = 1;
  entry->called = in->called != 0;
  entry->signature = in->signature;
  memcpy(entry->words, in->text, sizeof entry->words);
  membership_look_at_answers(membership, 0);
}

/* --- a worker finishes --- */

static void membership_post_finish(mlfab__membership *membership, uint32_t worker, uint8_t type,
                                   int32_t rank, uint64_t calls) {
  mlfab__membership_finish finish = {.epoch = membership->epoch, .rank = rank, .calls = calls};
  if (type == MLFAB__MEMBERSHIP_SETTLE) memcpy(finish.seek, membership->seek, sizeof finish.seek);
  MLFAB__POST(&membership->port, worker, type, membership_finish, &finish);
}

/* Returns a member that has called all calls below the limit, and can describe them. */
static int32_t membership_teller(const mlfab__membership *membership) {
  for (uint32_t i = 0; i < membership->members; i++) {
    const mlfab__membership_entry *entry = membership_member(membership, i);
    if (entry->left) continue;
    if (mlfab__max(entry->begun, entry->finished ? entry->calls : 0) == membership->limit)
      return (int32_t)membership->order[i];
  }
  return MLFAB_NO_RANK;
}

/* Returns the number of calls of the last rank that has finished; UINT64_MAX: it joins. */
static uint64_t membership_finished_with(const mlfab__membership *membership) {
  const mlfab__membership_entry *entry = &membership->entries[membership->finisher];
  return entry->finished ? entry->calls : UINT64_MAX;
}

/* Repeats all that a member may have missed: who has finished, the last one last; or, if all know that, the limit. */
static void membership_post_finished(mlfab__membership *membership, uint32_t worker) {
  if (membership->finisher == MLFAB_NO_RANK || membership->entries[worker].left) return;
  for (uint32_t i = 0; i < membership->members && membership->freezing; i++) {
    const mlfab__membership_entry *entry = membership_member(membership, i);
    if (entry->finished && membership->order[i] != (uint32_t)membership->finisher)
      membership_post_finish(membership, worker, MLFAB__MEMBERSHIP_FREEZE,
                             (int32_t)membership->order[i], entry->calls);
  }
  if (membership->freezing)
    membership_post_finish(membership, worker, MLFAB__MEMBERSHIP_FREEZE, membership->finisher,
                           membership_finished_with(membership));
  else
    membership_post_finish(membership, worker, MLFAB__MEMBERSHIP_SETTLE,
                           membership_teller(membership), membership->limit);
}

/* Is a joiner's first call sought, or is there room for it in `seek`? */
static int membership_sought(const mlfab__membership *membership, uint64_t signature,
                             uint32_t *free_p) {
  *free_p = MLFAB__MEMBERSHIP_SEEK;
  for (uint32_t i = MLFAB__MEMBERSHIP_SEEK; i-- > 0;) {
    if (membership->seek[i] == signature) return 1;
    if (membership->seek[i] == 0) *free_p = i;
  }
  return 0;
}

/* Ends the epoch before the first call of a joiner, from `limit` on. */
static void membership_seek(mlfab__membership *membership, uint64_t limit) {
  uint32_t at;
  for (uint32_t w = 0; w < membership->workers; w++) {
    mlfab__membership_entry *entry = &membership->entries[w];
    if (!entry->asked || !entry->joins) continue;
    entry->missing = MEMBERSHIP_UNTOLD;
    if (!membership_sought(membership, entry->ask.signature, &at) && at < MLFAB__MEMBERSHIP_SEEK)
      membership->seek[at] = entry->ask.signature;
  }
  if (membership->seek[0]) membership->limit = limit;
}

/* When all members have answered FREEZE: sets the limit of the epoch; then finished workers may give identities. */
static void membership_settle(mlfab__membership *membership) {
  uint64_t limit = 0;
  int finished = membership->limit != UINT64_MAX;
  int32_t keeper = MLFAB_NO_RANK;
  if (!membership->freezing) return;
  for (uint32_t i = 0; i < membership->members; i++) {
    const mlfab__membership_entry *entry = membership_member(membership, i);
    if (entry->left) continue;
    if (!entry->frozen) return;
    limit = mlfab__max(limit, entry->begun);
    if (entry->finished) limit = mlfab__max(limit, entry->calls);
    finished |= entry->finished;
    if (entry->open && keeper == MLFAB_NO_RANK) keeper = (int32_t)membership->order[i];
  }
  membership->freezing = 0;
  if (keeper != MLFAB_NO_RANK) membership->keeper = keeper;
  membership->kept = finished || keeper == MLFAB_NO_RANK ? 0 : MEMBERSHIP_KEPT_TICKS;
  if (membership->limit == UINT64_MAX && finished) {
    membership->limit = limit;
  } else if (membership->limit == UINT64_MAX && membership->kept == 0) {
    membership_seek(membership, limit);
  }
  for (uint32_t i = 0; i < membership->members; i++)
    if (!membership_member(membership, i)->left)
      membership_post_finish(membership, membership->order[i], MLFAB__MEMBERSHIP_SETTLE,
                             membership_teller(membership), membership->limit);
}

/* A member has opened an object before the joiner's call: continues the epoch for a while. */
static void membership_keep(mlfab__membership *membership, uint32_t worker) {
  mlfab__touched_all(membership->touch);
  membership->keeper = (int32_t)worker;
  membership->kept = MEMBERSHIP_KEPT_TICKS;
  membership->limit = UINT64_MAX;
  memset(membership->seek, 0, sizeof membership->seek);
  for (uint32_t i = 0; i < membership->members; i++) {
    membership_member(membership, i)->moved = 0;
    membership_post_finished(membership, membership->order[i]);
  }
}

/* When all members have ended the calls below the limit: forms the next epoch, without a verdict. */
static void membership_check_moved(mlfab__membership *membership) {
  uint32_t members = membership->members;
  int32_t keeper = MLFAB_NO_RANK;
  if (membership->limit == UINT64_MAX || membership->freezing) return;
  for (uint32_t i = 0; i < members; i++) {
    const mlfab__membership_entry *entry = membership_member(membership, i);
    if (!entry->moved && !entry->left) return;
    if (entry->ask.open > 0 && !entry->left) keeper = (int32_t)membership->order[i];
  }
  if (membership->seek[0] && keeper != MLFAB_NO_RANK) {
    membership_keep(membership, (uint32_t)keeper);
    return;
  }
  mlfab__touched_all(membership->touch);
  membership->verdict = (mlfab__membership_over){.epoch = membership->epoch, .rank = MLFAB_NO_RANK};
  membership->phase = MLFAB__MEMBERSHIP_GATHERING;
  membership->members = 0;
  memset(&membership->inquiry, 0, sizeof membership->inquiry);
  membership_no_limit(membership);
  for (uint32_t i = 0; i < members; i++) {
    mlfab__membership_entry *entry = membership_member(membership, i);
    int ends = entry->done;
    membership_release(entry);
    entry->asked = !ends;
    entry->over_owed = ends ? membership->epoch : 0;
    entry->over_well = 1;
    if (ends && entry->alive) membership_post_over(membership, membership->order[i]);
  }
  membership_form(membership);
}

/* Stops all members from beginning calls for now, because this rank finishes, or joins. */
static void membership_freeze(mlfab__membership *membership, uint32_t worker) {
  mlfab__touched_all(membership->touch);
  if (membership->seek[0]) membership_no_limit(membership);
  membership->freezing = 1;
  membership->finisher = (int32_t)worker;
  for (uint32_t i = 0; i < membership->members; i++) {
    mlfab__membership_entry *other = membership_member(membership, i);
    other->frozen = other->moved = 0;
    if (!other->left)
      membership_post_finish(membership, membership->order[i], MLFAB__MEMBERSHIP_FREEZE,
                             membership->finisher, membership_finished_with(membership));
  }
}

/* Has `seek` a call for which nobody asks any more? */
static int membership_is_stale(const mlfab__membership *membership) {
  for (uint32_t i = 0; i < MLFAB__MEMBERSHIP_SEEK && membership->seek[i]; i++) {
    uint32_t w = 0;
    while (w < membership->workers &&
           !(membership->entries[w].asked && membership->entries[w].joins &&
             membership->entries[w].ask.signature == membership->seek[i]))
      w++;
    if (w == membership->workers) return 1;
  }
  return 0;
}

/* Ends a running epoch for the workers that join, except if it is about to end, or their calls are sought. */
static void membership_admit(mlfab__membership *membership) {
  uint32_t at;
  if (membership->phase != MLFAB__MEMBERSHIP_RUNNING || membership->freezing ||
      (membership->limit != UINT64_MAX && !membership->seek[0]) || membership->kept > 0 ||
      membership_places(membership) == 0)
    return;
  for (uint32_t w = 0; w < membership->workers; w++) {
    const mlfab__membership_entry *entry = &membership->entries[w];
    if (!entry->asked || !entry->joins) continue;
    if (membership_sought(membership, entry->ask.signature, &at)) continue;
    if (at == MLFAB__MEMBERSHIP_SEEK && !membership_is_stale(membership)) continue;
    membership_freeze(membership, w);
    membership_settle(membership); /* all members may have left */
    membership_check_moved(membership);
    return;
  }
}

/* Tells a joiner that the epoch is full; then its next call waits for room. Returns 0 if it knows, or there is room. */
static int membership_is_full(mlfab__membership *membership, uint32_t worker,
                              const mlfab__membership_ask *in) {
  mlfab__membership_over over = {membership->epoch, MLFAB_ERR_LIMIT, MLFAB_NO_RANK, {0}};
  if (in->epoch == membership->epoch || membership_places(membership) > 0) return 0;
  snprintf(over.text, sizeof over.text, "collectives are for %u workers at most, which take part",
           membership_room(membership));
  MLFAB__POST(&membership->port, worker, MLFAB__MEMBERSHIP_OVER, membership_over, &over);
  return 1;
}

/* Tells the joining workers whose objects they wait for, or the call of the others. */
static void membership_tell_joiners(mlfab__membership *membership) {
  mlfab__membership_missing missing = {.rank = membership->keeper};
  if (membership->kept == 0) memcpy(missing.text, membership->others, sizeof missing.text);
  for (uint32_t w = 0; w < membership->workers; w++) {
    mlfab__membership_entry *entry = &membership->entries[w];
    if (!entry->asked || entry->missing == missing.rank) continue;
    entry->missing = missing.rank;
    MLFAB__POST(&membership->port, w, MLFAB__MEMBERSHIP_MISSING, membership_missing, &missing);
  }
}

/* Finishes a worker. If it has not yet heard of the listed epoch, that epoch ends without failing a call. */
static void membership_finishes(mlfab__membership *membership, uint32_t worker,
                                const mlfab__membership_finish *in) {
  mlfab__membership_entry *entry = &membership->entries[worker];
  int running = membership->phase == MLFAB__MEMBERSHIP_RUNNING && in->epoch == membership->epoch;
  if (!entry->member) {
    entry->done = 1;
    entry->asked = 0;
    membership_check(membership);
  } else if (membership->phase == MLFAB__MEMBERSHIP_LISTED && in->epoch != membership->epoch) {
    entry->done = 1;
    membership_verdict(membership, 0, MLFAB_NO_RANK, "%s", "");
  } else if (running && entry->finished && in->rank == MLFAB_NO_RANK && !membership->freezing) {
    entry->moved = 1;
    membership_check_moved(membership);
  } else if (running && entry->finished) { /* a repetition */
    membership_post_finished(membership, worker);
    int32_t teller = membership->freezing ? MLFAB_NO_RANK : membership_teller(membership);
    if (teller != MLFAB_NO_RANK) membership_post_finished(membership, (uint32_t)teller);
  } else if (running && !entry->left && (membership->seek[0] || in->calls <= membership->limit)) {
    entry->done = entry->finished = 1;
    entry->calls = in->calls;
    membership_freeze(membership, worker);
  }
}

static void membership_freezes(mlfab__membership *membership, uint32_t worker,
                               const mlfab__membership_finish *in) {
  mlfab__membership_entry *entry = &membership->entries[worker];
  if (!membership->freezing || in->rank != membership->finisher) return;
  entry->frozen = 1;
  entry->begun = in->calls;
  entry->open = in->open > 0;
  if (in->text[0]) {
    membership->keeper = (int32_t)worker;
    memcpy(membership->others, in->text, sizeof membership->others);
  }
  membership_settle(membership);
}

/* Passes the description of a call on to the workers that owe it. */
static void membership_hand_on(mlfab__membership *membership, uint64_t number,
                               const mlfab__frame_in *frame) {
  for (uint32_t i = 0; i < membership->members; i++) {
    const mlfab__membership_entry *entry = membership_member(membership, i);
    if (entry->finished && !entry->left && entry->calls <= number)
      membership_post(membership, membership->order[i], MLFAB__MEMBERSHIP_OWED, frame->meta,
                      frame->meta_bytes);
  }
}

/* --- frames of workers --- */

/* Takes the wish of a worker to take part. Returns 0; or FRAME if it names an epoch that never existed. */
static int membership_asks(mlfab__membership *membership, uint32_t worker,
                           const mlfab__membership_ask *in) {
  mlfab__membership_entry *entry = &membership->entries[worker];
  if (in->epoch > membership->epoch) return MLFAB_ERR_FRAME;
  /* It has not heard how its epoch ended meanwhile. */
  if (in->newcomer == MLFAB__MEMBERSHIP_MOVED && !entry->member) return 0;
  if (entry->alive && entry->over_owed > in->epoch) { /* it has not heard the verdict yet */
    membership_post_over(membership, worker);
    return 0;
  }
  if (!entry->alive || entry->done) return 0;
  entry->over_owed = 0;
  if (entry->member &&
      in->epoch == membership->epoch) { /* it has ended all calls below the limit */
    entry->ask = *in;
    entry->moved = membership->limit != UINT64_MAX && !membership->freezing;
    membership_check_moved(membership);
    return 0;
  }
  if (entry->member && membership->phase == MLFAB__MEMBERSHIP_LISTED && entry->fresh &&
      in->signature == 0) { /* its call ended before it heard of the list */
    membership_verdict(membership, 0, MLFAB_NO_RANK, "%s", "");
    return 0;
  }
  if (entry->member) { /* a repetition: the list may have been lost */
    membership_post(membership, worker, MLFAB__MEMBERSHIP_LIST, membership->list,
                    membership->list_bytes);
    return 0;
  }
  if (!in->newcomer) entry->joins = 0;
  if (in->newcomer && in->signature == 0) { /* its call has ended */
    entry->asked = 0;
    entry->joins = 1;
    membership_check(membership);
    return 0;
  }
  if (membership_stands(membership) && entry->joins && membership_is_full(membership, worker, in))
    return 0;
  if (!entry->asked || entry->ask.signature != in->signature) entry->waited = 0;
  entry->asked = 1;
  entry->fresh = in->newcomer != 0;
  entry->ask = *in;
  entry->missing = MEMBERSHIP_UNTOLD;
  if (membership->phase == MLFAB__MEMBERSHIP_IDLE) membership->phase = MLFAB__MEMBERSHIP_GATHERING;
  if (membership_stands(membership) && entry->joins) {
    membership_admit(membership);
  } else if (membership_stands(membership)) {
    membership_verdict(membership, MLFAB_ERR_AGAIN, (int32_t)worker,
                       "worker %u has come in: collectives begin anew", worker);
  } else {
    membership_check(membership);
  }
  return 0;
}

static void membership_is_ready(mlfab__membership *membership, uint32_t worker,
                                const mlfab__membership_ready *in) {
  mlfab__membership_entry *entry = &membership->entries[worker];
  if (membership->phase ==
      MLFAB__MEMBERSHIP_RUNNING) { /* a repetition: what followed may have been lost */
    membership_post_go(membership, worker);
    membership_post_departures(membership, worker);
    membership_post_finished(membership, worker);
    return;
  }
  if (!entry->ready) mlfab__touched_all(membership->touch);
  if (entry->ready) {
    membership_meet(membership);
    return;
  }
  entry->ready = 1;
  entry->ask.progress = in->progress;
  entry->ask.barriers = in->barriers;
  entry->arena = in->arena == MLFAB__ARENA_USED && !entry->left;
  membership_check_ready(membership);
}

static void membership_fails(mlfab__membership *membership, uint32_t worker,
                             const mlfab__membership_over *in) {
  int known = in->rank >= 0 && (uint32_t)in->rank < membership->workers;
  membership_verdict(membership, in->code < 0 ? in->code : MLFAB_ERR_REFUSED,
                     known ? in->rank : (int32_t)worker, "%s", in->text);
}

/* Loses a worker that is no member: the members of the next epoch are told. */
static void membership_lose(mlfab__membership *membership, uint32_t worker, int32_t code) {
  mlfab__membership_entry *entry = &membership->entries[worker];
  int counted = entry->alive && !entry->done && !entry->member && !entry->joins && !entry->fresh;
  if (counted && !membership_stands(membership)) entry->lost = code;
}

/* Lets a worker leave: it takes no further part. An epoch that is new to it counts as one without its calls. */
static void membership_leaves(mlfab__membership *membership, uint32_t worker,
                              const mlfab__membership_leave *in) {
  mlfab__membership_entry *entry = &membership->entries[worker];
  uint8_t meta[32];
  membership_lose(membership, worker, MLFAB_ERR_PEER_CLOSED);
  entry->done = 1;
  entry->asked = 0;
  if (entry->finished) return; /* it has reported this before */
  if (!entry->member) {
    membership_check(membership);
    return;
  }
  if (entry->left) return;
  int knows = in->epoch == membership->epoch;
  entry->left = 1;
  entry->calls = knows ? in->calls : 0;
  entry->arena = 0;
  if (!knows) entry->ready = 1;
  if (membership->phase == MLFAB__MEMBERSHIP_RUNNING)
    membership_post_all(membership, MLFAB__MEMBERSHIP_LEFT, meta,
                        membership_left_meta(membership, worker, meta));
  membership_check_ready(membership);
  membership_look_at_answers(membership, 0);
  membership_settle(membership);
  membership_check_moved(membership);
}

/* Returns 0, FRAME, or 1: not of this role. Ignores frames of an epoch that is over, and of dead workers. */
static int membership_take_frame(mlfab__membership *membership, uint32_t worker,
                                 const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__membership_entry *entry = &membership->entries[worker];
  int listed = entry->alive && entry->member && membership->epoch;
  int runs = listed && membership->phase == MLFAB__MEMBERSHIP_RUNNING;
  mlfab__membership_owed owed;
#define MEMBERSHIP_FRAME(TYPE, name, when, handle)                                         \
  case TYPE: {                                                                             \
    mlfab__##name in;                                                                      \
    if (mlfab__decode_##name(frame->meta, frame->meta_bytes, &in)) return MLFAB_ERR_FRAME; \
    if (when) handle;                                                                      \
    return 0;                                                                              \
  }
#define PRESENT in.epoch == membership->epoch
  switch (frame->type) {
    MEMBERSHIP_FRAME(MLFAB__MEMBERSHIP, membership_ask, 1,
                     return membership_asks(membership, worker, &in))
    MEMBERSHIP_FRAME(MLFAB__MEMBERSHIP_FINISH, membership_finish, entry->alive,
                     membership_finishes(membership, worker, &in))
    MEMBERSHIP_FRAME(MLFAB__MEMBERSHIP_LEAVE, membership_leave, entry->alive,
                     membership_leaves(membership, worker, &in))
    MEMBERSHIP_FRAME(MLFAB__MEMBERSHIP_READY, membership_ready, listed && PRESENT,
                     membership_is_ready(membership, worker, &in))
    MEMBERSHIP_FRAME(MLFAB__MEMBERSHIP_FAIL, membership_over, listed && PRESENT,
                     membership_fails(membership, worker, &in))
    MEMBERSHIP_FRAME(MLFAB__MEMBERSHIP_STUCK, membership_call, runs && PRESENT,
                     membership_stuck(membership, &in, now_ns))
    MEMBERSHIP_FRAME(MLFAB__MEMBERSHIP_TELL, membership_tell, runs && PRESENT,
                     membership_tell(membership, entry, &in))
    MEMBERSHIP_FRAME(MLFAB__MEMBERSHIP_FROZEN, membership_finish, runs && PRESENT,
                     membership_freezes(membership, worker, &in))
    case MLFAB__MEMBERSHIP_OWED:
      if (mlfab__decode_membership_owed(frame->meta, frame->meta_bytes, &owed, NULL))
        return MLFAB_ERR_FRAME;
      if (entry->member && owed.epoch == membership->epoch)
        membership_hand_on(membership, owed.number, frame);
      return 0;
    default:
      return 1;
  }
#undef PRESENT
#undef MEMBERSHIP_FRAME
}

MLFAB__INTERNAL int mlfab__membership_frame(mlfab__membership *membership, uint32_t worker,
                                            const mlfab__frame_in *frame, uint64_t now_ns) {
  membership_touch(membership, worker);
  int code = membership_take_frame(membership, worker, frame, now_ns);
  if (code == MLFAB_ERR_FRAME)
    membership->port.drop(
        membership->port.self, worker, code,
        "a frame of the membership that does not parse, or of an epoch that never was");
  return code != 1;
}

/* --- who comes and goes --- */

/* For a worker on a new link: repeats all that it may have missed, except answers: it repeats its own questions. */
static void membership_repeat(mlfab__membership *membership, uint32_t worker) {
  const mlfab__membership_entry *entry = &membership->entries[worker];
  const mlfab__membership_inquiry *inquiry = &membership->inquiry;
  uint8_t meta[32];
  if (entry->over_owed) membership_post_over(membership, worker);
  if (entry->member && membership->phase == MLFAB__MEMBERSHIP_LISTED) membership_meet(membership);
  if (!entry->member || membership->phase != MLFAB__MEMBERSHIP_RUNNING) return;
  membership_post_departures(membership, worker);
  membership_post_finished(membership, worker);
  if (!inquiry->open || entry->told || entry->left) return;
  mlfab__membership_call call = {membership->epoch, inquiry->channel, inquiry->number};
  membership_post(membership, worker, MLFAB__MEMBERSHIP_ASK, meta,
                  mlfab__encode_membership_call(meta, &call));
}

MLFAB__INTERNAL void mlfab__membership_hello(mlfab__membership *membership, uint32_t worker,
                                             uint32_t incarnation, uint64_t now_ns) {
  mlfab__membership_entry *entry = &membership->entries[worker];
  (void)now_ns;
  membership_touch(membership, worker);
  if (entry->incarnation == incarnation) {
    if (!entry->alive) entry->lost = 0;
    entry->alive = 1;
    entry->missing = MEMBERSHIP_UNTOLD;
    membership_repeat(membership, worker);
    return;
  }
  if (entry->incarnation) membership_lose(membership, worker, MLFAB_ERR_PEER_DEAD);
  const mlfab__membership_entry was = *entry;
  memset(entry, 0, sizeof *entry);
  entry->alive = 1;
  entry->well = was.well && !was.incarnation; /* its former process left in good order */
  entry->joins = was.well || was.incarnation;
  entry->lost = was.lost;
  entry->incarnation = incarnation;
  entry->missing = MEMBERSHIP_UNTOLD;
  if (was.member)
    membership_verdict(membership, MLFAB_ERR_PEER_DEAD, (int32_t)worker,
                       "worker %u is dead: a new process has taken its place", worker);
  else
    membership_check(membership); /* nobody waits for it any more */
}

MLFAB__INTERNAL void mlfab__membership_gone(mlfab__membership *membership, uint32_t worker,
                                            int left, uint64_t now_ns) {
  mlfab__membership_entry *entry = &membership->entries[worker];
  (void)now_ns;
  membership_touch(membership, worker);
  entry->well = left != 0;
  if (left != MLFAB__NEVER_HERE)
    membership_lose(membership, worker, left ? MLFAB_ERR_PEER_CLOSED : MLFAB_ERR_PEER_DEAD);
  entry->alive = entry->asked = 0;
  if (entry->member && entry->finished && entry->moved) { /* nobody waits for its bytes */
    entry->left = 1;
    membership_check_moved(membership);
  } else if (entry->member && left && entry->left) { /* it has reported this */
    entry->ready = 1;
    membership_check_ready(membership);
  } else if (entry->member) {
    membership_verdict(
        membership, left ? MLFAB_ERR_PEER_CLOSED : MLFAB_ERR_PEER_DEAD, (int32_t)worker,
        left ? "worker %u has closed"
             : "worker %u is dead: it exited without mlfab_close, was killed, or is cut off",
        worker);
  } else {
    membership_check(membership);
  }
}

/* Tells the barrier which workers wait in a collective: for the forming epoch, or in the call of the last inquiry. */
static void membership_tell_barrier(mlfab__membership *membership, uint64_t now_ns) {
  const mlfab__membership_inquiry *inquiry = &membership->inquiry;
  int fresh =
      inquiry->asked_ns && now_ns - inquiry->asked_ns < 3 * membership->config->heartbeat_ns;
  for (uint32_t w = 0; w < membership->workers; w++) {
    const mlfab__membership_entry *entry = &membership->entries[w];
    int waits = membership->phase == MLFAB__MEMBERSHIP_RUNNING
                    ? fresh && entry->told && entry->called && entry->signature != 0
                    : entry->asked || entry->member;
    mlfab__barrier_elsewhere(membership->barrier, w, waits);
  }
}

/* Ends the epoch for a returning worker if the members keep objects, or have not made its first call for long. Then it
 * belongs to the next epoch, whatever its call. */
static void membership_insist(mlfab__membership *membership) {
  const mlfab_config *config = membership->config;
  for (uint32_t w = 0; w < membership->workers; w++) {
    mlfab__membership_entry *entry = &membership->entries[w];
    if (!entry->asked || !entry->joins || entry->well || membership_places(membership) == 0)
      continue;
    entry->waited += config->heartbeat_ns / 4;
    if (membership->kept == 0 && entry->waited < config->timeout_ns / 10) continue;
    entry->joins = 0;
    membership_verdict(membership, MLFAB_ERR_AGAIN, (int32_t)w,
                       "worker %u has come in: collectives begin anew", w);
    return;
  }
}

MLFAB__INTERNAL void mlfab__membership_tick(void *self, uint64_t now_ns) {
  mlfab__membership *membership = self;
  mlfab__membership_inquiry *inquiry = &membership->inquiry;
  if (membership->barrier) membership_tell_barrier(membership, now_ns);
  if (membership->phase == MLFAB__MEMBERSHIP_GATHERING ||
      membership->phase == MLFAB__MEMBERSHIP_LISTED)
    membership_tell_missing(membership);
  if (membership->phase == MLFAB__MEMBERSHIP_RUNNING) membership_insist(membership);
  if (membership->phase != MLFAB__MEMBERSHIP_RUNNING) return;
  if (membership->kept > 0) mlfab__touched(membership->touch, 0);
  if (membership->kept > 0 || membership->seek[0]) membership_tell_joiners(membership);
  if (membership->kept == 0 || --membership->kept == 0) membership_admit(membership);
  if (inquiry->open && now_ns - inquiry->asked_ns >= 2 * membership->config->heartbeat_ns)
    membership_look_at_answers(membership, 1);
  if (!inquiry->open && inquiry->pending && membership_may_ask(membership, now_ns))
    membership_ask_all(membership, inquiry->pending_channel, inquiry->pending_number, now_ns);
}

MLFAB__INTERNAL void mlfab__membership_resume(mlfab__membership *membership) {
  membership->members = 0;
  for (uint32_t w = 0; w < membership->workers; w++) {
    mlfab__membership_entry *entry = &membership->entries[w];
    entry->missing = MEMBERSHIP_UNTOLD;
    if (!entry->member || membership->members == membership_room(membership)) continue;
    uint32_t at = membership->members++;
    for (; at > 0 && entry->place < membership_member(membership, at - 1)->place; at--)
      membership->order[at] = membership->order[at - 1];
    membership->order[at] = w;
  }
  memset(&membership->inquiry, 0, sizeof membership->inquiry);
  if (!membership_stands(membership)) return;
  membership_look_at_hosts(membership);
  membership_make_list(membership);
}
