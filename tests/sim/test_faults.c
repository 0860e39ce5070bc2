/* test_faults.c - fabrics of five nodes in the simulator, from seeds, with every fault except a server's
 * crash. Half of them have a scheduler, beside a server or on a host of its own, which crashes too.
 *
 * The model itself shows which updates were lost or applied twice. Every update k of every life (process)
 * of every worker has its own element in two tensors of marks, one at each end of the model, and adds 1 to
 * it. The update also adds a number of its own to every element of the tensor between them. So the marks
 * tell which updates a server applied and how often, and the tensor between them must match the marks
 * everywhere: no update is applied in part.
 *
 * Checks: at every pull, that a slice has one version, that nothing seen before is missing, and that
 * acknowledged updates are there; that every call ends in time; at the end, without faults, that marks,
 * results and mlfab_push_status agree. A tenth of the seeds runs twice: same hash. */
#include "job.h"

enum {
  HOSTS = 5,
  LIVES = 3,    /* processes of a worker that push; later ones only pull */
  UPDATES = 12, /* of a life */
  SLOTS = 3,    /* pushes at once */
  MARKS_MAX = HOSTS * LIVES * UPDATES
};
/* A worker that gives up because a server is dead to it may have updates in a round that this server keeps
 * open until the worker has been silent for five heartbeats. Afterwards the model equals the acknowledged
 * updates. */
#define ROUNDS_CLOSE (3 * SECOND)

/* ---- the plan of a seed ---- */

typedef struct plan {
  uint32_t servers, workers, dedicated;
  uint32_t chunk, eager, block, slices, merge_max;
  uint32_t sync, deterministic;
  mlfab_sync consistency; /* size 0: `sync` */
  uint32_t tags;
  uint32_t scheduler; /* MLFAB_SCHEDULER_* */
  mlfab_schedule schedule;
  uint64_t big;   /* elements of the tensor between the marks */
  int floats;     /* its elements are floats, and some updates have NaN */
  uint32_t width; /* bytes of its elements */
  int whole;      /* pushed and pulled as one array (MLFAB_ALL) */
  int cancels, meetings, more, first_weights;
  int loses; /* the last worker's first crash is for good */
  int harsh; /* crashes, and partitions that last longer than heartbeats tolerate */
  uint64_t heartbeat_ns, tick_ns;
  mlfab_sim_options sim;
} plan;

/* The flat model: marks, the tensor between, marks. */
static uint32_t plan_marks(const plan *p) { return p->workers * LIVES * UPDATES; }
static uint64_t plan_big_bytes(const plan *p) { return p->big * p->width; }
/* Offsets in the model: narrow elements follow wide ones. */
static uint64_t plan_big_at(const plan *p) {
  return (p->width == 4 ? 16ull : 8ull) * plan_marks(p);
}
static uint64_t plan_mark_at(const plan *p, int side, uint32_t m) {
  uint64_t between = p->width == 4 ? 0 : plan_big_bytes(p);
  return 8ull * m + (side ? 8ull * plan_marks(p) + between : 0);
}
static uint64_t plan_bytes(const plan *p) { return 16ull * plan_marks(p) + plan_big_bytes(p); }

/* Slices have at least 4 KiB. */
static uint32_t plan_most_slices(const plan *p, uint32_t want) {
  uint64_t most = plan_bytes(p) / 4096;
  return most == 0 ? 1 : want < most ? want : (uint32_t)most;
}

static void plan_network(plan *p, uint64_t *d) {
  mlfab_sim_options *o = &p->sim;
  uint64_t bytes = p->big * p->width;
  /* For a node that also serves, another server that seems dead stays dead. */
  int lasting = p->harsh && (p->dedicated || p->servers == 1);
  double frames = 4.0 + (double)(bytes / p->chunk);
  o->size = sizeof *o;
  o->hosts = HOSTS;
  o->seed = dice_roll(d) | 1;
  o->latency_ns = 20000 + dice_below(d, 2 * MS);
  o->latency_jitter = dice_chance(d, 0.7) ? 0.5 : 0.0;
  o->rate_bytes_per_s = 10000000ull << dice_below(d, 6);
  o->buffer_bytes = 16384ull << dice_below(d, 6);
  /* An update of many frames must have a chance to arrive whole. */
  o->loss = (dice_chance(d, 0.8) ? 0.2 : 0.02) / frames;
  o->duplicate = (dice_chance(d, 0.8) ? 0.2 : 0.02) / frames;
  o->reorder = 0.05;
  o->partition = lasting ? 1.0 : 3.0;
  o->partition_ns = lasting ? 2 * SECOND : 400 * MS;
  o->crash = p->harsh ? 0.4 : 0.0;
  o->pause = 0.5;
  o->pause_ns = lasting ? 2 * SECOND : 300 * MS;
  o->slow = 0.5;
}

/* Uses its own random numbers, so that older seeds keep their meaning. 1 when updates should be large
 * enough to be planned. */
static int plan_scheduler(plan *p, uint64_t seed) {
  uint64_t d = mix(seed ^ 0x5c4ed);
  mlfab_schedule *s = &p->schedule;
  mlfab_schedule_init(s);
  if (dice_chance(&d, 0.5)) return 0;
  p->scheduler = dice_chance(&d, 0.5) ? MLFAB_SCHEDULER_BESIDE : MLFAB_SCHEDULER_OWN;
  if (p->scheduler == MLFAB_SCHEDULER_OWN) p->workers--;
  s->best = (uint32_t)dice_chance(&d, 0.3);
  s->whole = (uint32_t)dice_chance(&d, 0.3);
  s->plan_ahead_ns = (1 + dice_below(&d, 200)) * MS;
  if (dice_chance(&d, 0.2)) s->interval_ns = (5 + dice_below(&d, 100)) * MS;
  if (dice_chance(&d, 0.3)) s->delay_bound = 2 + dice_below(&d, 20);
  return dice_chance(&d, 0.8);
}

/* Uses its own random numbers too. Even with updates applied at once, pulls may have to wait. */
static void plan_consistency(plan *p, uint64_t seed) {
  static const uint32_t kinds[] = {MLFAB_SYNC_SSP, MLFAB_SYNC_DSPS, MLFAB_SYNC_PSSP,
                                   MLFAB_SYNC_PSSP_DYNAMIC};
  static const uint32_t tags[] = {1, 16, 256};
  uint64_t d = mix(seed ^ 0x7a95);
  mlfab_sync *s = &p->consistency;
  if (dice_chance(&d, 0.4)) p->tags = tags[dice_below(&d, 3)];
  if (p->sync != MLFAB_SYNC_ASYNC || dice_chance(&d, 0.5)) return;
  s->size = sizeof *s;
  s->kind = kinds[dice_below(&d, 4)];
  s->staleness = (int64_t)dice_below(&d, 4);
  s->soft = (uint32_t)dice_below(&d, 2);
  s->only_fastest = (uint32_t)dice_below(&d, 2);
  s->chance = 0.7;
}

static void plan_make(plan *p, uint64_t seed) {
  uint64_t d = mix(seed);
  memset(p, 0, sizeof *p);
  uint64_t shape = dice_below(&d, 4);
  p->dedicated = shape < 2;
  p->servers = shape == 0 || shape == 2 ? 1 : 2;
  p->workers = p->dedicated ? HOSTS - p->servers : HOSTS;
  int large = dice_chance(&d, 0.4) || plan_scheduler(p, seed);
  p->floats = dice_chance(&d, 0.3);
  p->width = p->floats && p->servers == 1 && dice_chance(&d, 0.5) ? 4 : 8;
  p->big = large ? 4000 + 2 * dice_below(&d, 6000) : 2 * (1 + dice_below(&d, 40));
  if (p->servers > 1 && !large) p->big += 2000; /* every server gets a part */
  p->whole = !p->floats && dice_chance(&d, 0.5);
  p->sync = dice_chance(&d, 0.5) ? MLFAB_SYNC_BSP : MLFAB_SYNC_ASYNC;
  if (p->sync == MLFAB_SYNC_BSP) p->schedule.delay_bound = MLFAB_UNBOUNDED;
  p->deterministic = p->sync == MLFAB_SYNC_BSP && dice_chance(&d, 0.3);
  p->more = p->sync == MLFAB_SYNC_BSP && dice_chance(&d, 0.2);
  p->chunk = 1024u << dice_below(&d, large ? 6 : 3);
  p->eager = large ? 512u << dice_below(&d, 4) : 8192u << dice_below(&d, 4);
  p->block = 1024u << dice_below(&d, 5);
  p->slices = plan_most_slices(p, dice_chance(&d, 0.3) ? p->servers : 4 * p->servers);
  p->merge_max = dice_chance(&d, 0.5) ? 0 : 1;
  p->cancels = dice_chance(&d, 0.4);
  p->harsh = dice_chance(&d, 0.4);
  p->meetings = dice_chance(&d, 0.4);
  p->first_weights = dice_chance(&d, 0.5);
  p->loses = p->harsh && dice_chance(&d, 0.3);
  p->heartbeat_ns = 200 * MS;
  p->tick_ns = (5 + dice_below(&d, 60)) * MS;
  plan_network(p, &d);
  plan_consistency(p, seed);
}

/* The slices of a model (core/model/layout.c): whole cache lines, in equal parts. */
static uint64_t plan_slice_begin(const plan *p, uint64_t i) {
  uint64_t lines = (plan_bytes(p) + 63) / 64, at = lines * i / p->slices * 64;
  return at < plan_bytes(p) ? at : plan_bytes(p);
}

/* Where the second server's part begins. */
static uint64_t plan_border(const plan *p) {
  uint64_t n = p->slices, i = 0;
  while (i < n && i * p->servers / n == 0) i++;
  return plan_slice_begin(p, i);
}

/* ---- a run ---- */

/* The known state of an update. */
typedef struct update {
  uint64_t seq;
  uint8_t started, known, nan_side; /* nan_side: 1 at the first server, 2 at the last */
  uint8_t missed;                   /* a pull that had to contain it, if it was applied, did not */
  int code;                         /* once known */
} update;

typedef struct slot { /* a push under way */
  mlfab_request request;
  uint32_t k;
  uint64_t timeout_ns;
  uint8_t *data;
} slot;

enum phase { AWAY, OPENING, DEFINING, WORKING, JOINING, DONE };

struct run;
typedef struct worker {
  struct run *run;
  uint32_t rank, host;
  mlfab *ctx;
  enum phase phase;
  int busy; /* inside a blocking call */
  int gone; /* its host stays down */
  uint32_t life, next;
  int reborn, met, told; /* not the first process; has passed the barrier; the broadcast */
  uint64_t firsts;       /* sequence numbers used by first weights */
  slot slots[SLOTS];
  mlfab_request pull;
  uint64_t pull_timeout_ns;
  uint32_t pull_next;         /* updates started before it */
  uint64_t pull_acked;        /* bits of those that were acknowledged */
  uint8_t *image;             /* what the pull writes */
  int64_t seen[2][MARKS_MAX]; /* by this process */
} worker;

typedef struct run {
  plan plan;
  uint64_t seed;
  uint64_t dice;
  mlfab_sim *sim;
  mlfab *server[2], *scheduler;
  worker workers[HOSTS];
  update updates[HOSTS][LIVES][UPDATES];
  int deaths;   /* a node was declared dead at some time */
  int uneven;   /* an update was withdrawn or refused: progress differs from the count of marks */
  int blocking; /* kind and number of the blocking calls under way */
  int blocked;
  int offenders; /* updates with NaN that servers have reported */
  uint8_t message[64];
  int calm;
  uint64_t outcome; /* hash of all results */
} run;

static uint64_t now(const run *r) { return mlfab_sim_clock(r->sim); }

/* Tells of a worker, if one seed runs alone. */
static void note(const worker *w, const char *format, ...) {
  char text[200];
  va_list list;
  if (!seeds_alone()) return;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  say(w->run->sim, "worker %u life %u: %s", w->rank, w->life, text);
}

static uint32_t mark(const worker *w, uint32_t life, uint32_t k) {
  return (w->rank * LIVES + life) * UPDATES + k;
}

/* The number that update `m` adds to every element between the marks. */
static int64_t worth(const plan *p, uint32_t m) {
  return p->floats ? (int64_t)(1 + m % 7) : (int64_t)mix(m);
}

static int64_t get64(const uint8_t *image, uint64_t offset) {
  int64_t value;
  memcpy(&value, image + offset, sizeof value);
  return value;
}

static int64_t get_big(const plan *p, const uint8_t *image, uint64_t element) {
  const uint8_t *at = image + plan_big_at(p) + element * p->width;
  float narrow;
  double wide;
  memcpy(&narrow, at, sizeof narrow);
  if (p->width == 4) return (int64_t)narrow;
  memcpy(&wide, at, sizeof wide);
  return p->floats ? (int64_t)wide : get64(at, 0);
}

static void put_big(const plan *p, uint8_t *image, uint64_t element, int64_t value) {
  uint8_t *at = image + plan_big_at(p) + element * p->width;
  float narrow = (float)value;
  double wide = (double)value;
  memcpy(at,
         p->width == 4 ? (void *)&narrow
         : p->floats   ? (void *)&wide
                       : (void *)&value,
         p->width);
}

/* Writes NaN or infinity. */
static void put_wrong(const plan *p, uint8_t *image, uint64_t element, int nan) {
  uint8_t *at = image + plan_big_at(p) + element * p->width;
  uint32_t narrow = nan ? 0x7fc00000u : 0xff800000u;
  uint64_t wide = nan ? 0x7ff8000000000001u : 0x7ff0000000000000u;
  memcpy(at, p->width == 4 ? (void *)&narrow : (void *)&wide, p->width);
}

static int64_t get_mark(const plan *p, const uint8_t *image, int side, uint32_t m) {
  return get64(image, plan_mark_at(p, side, m));
}

/* The list of buffers over an image of the model; returns their number. */
static uint32_t bufs_of(const plan *p, uint8_t *image, mlfab_buf bufs[3]) {
  uint32_t marks = plan_marks(p);
  if (p->whole) {
    bufs[0] = (mlfab_buf){MLFAB_ALL, 0, image, plan_bytes(p) / 8};
    return 1;
  }
  bufs[0] = (mlfab_buf){1, 0, image, marks};
  bufs[1] = (mlfab_buf){2, 0, image + plan_big_at(p), p->big};
  bufs[2] = (mlfab_buf){3, 0, image + plan_mark_at(p, 1, 0), marks};
  return 3;
}

/* ---- reading the model ---- */

/* A slice has one version, so all its elements between the marks are equal. */
static void check_slices(run *r, const uint8_t *image, const char *when) {
  const plan *p = &r->plan;
  uint64_t slice = 0;
  int64_t value = 0;
  for (uint64_t e = 0; e < p->big; e++) {
    uint64_t at = plan_big_at(p) + e * p->width;
    int begins = e == 0;
    while (slice + 1 < p->slices && at >= plan_slice_begin(p, slice + 1)) {
      slice++;
      begins = 1;
    }
    int64_t here = get_big(p, image, e);
    if (!begins && here != value) {
      wrong("%s: element %llu differs from its neighbour in slice %llu: a part of an update", when,
            (unsigned long long)e, (unsigned long long)slice);
      return;
    }
    value = here;
  }
}

/* With one slice and without disturbance, a model between two rounds contains equally many updates of all
 * workers. */
static void check_rounds(run *r, const uint8_t *image) {
  const plan *p = &r->plan;
  uint32_t least = UPDATES, most = 0;
  if (p->sync != MLFAB_SYNC_BSP || p->slices > 1 || r->deaths || r->uneven || p->more) return;
  for (uint32_t w = 0; w < p->workers; w++) {
    uint32_t count = 0;
    if (r->workers[w].reborn) return;
    for (uint32_t k = 0; k < UPDATES; k++)
      count += get_mark(p, image, 0, mark(&r->workers[w], 0, k)) != 0;
    least = count < least ? count : least;
    most = count > most ? count : most;
  }
  if (least != most) wrong("a model with %u rounds of one worker and %u of another", most, least);
}

static void check_marks(run *r, worker *w, const uint8_t *image) {
  const plan *p = &r->plan;
  for (uint32_t m = 0; m < plan_marks(p); m++) {
    uint32_t rank = m / (LIVES * UPDATES), life = m / UPDATES % LIVES, k = m % UPDATES;
    for (int side = 0; side < 2; side++) {
      int64_t count = get_mark(p, image, side, m);
      if (count < 0 || count > 1)
        wrong("update %u of worker %u's life %u was applied %lld times", k, rank, life,
              (long long)count);
      if (count && !r->updates[rank][life][k].started)
        wrong("update %u of worker %u's life %u was applied and never pushed", k, rank, life);
      if (count < w->seen[side][m])
        wrong("worker %u saw update %u of worker %u's life %u, and does not see it now", w->rank, k,
              rank, life);
      w->seen[side][m] = count;
    }
  }
}

/* A worker sees its own updates: those acknowledged before the pull, and with rounds all of them, except
 * refused ones. */
static void check_own(run *r, worker *w, const uint8_t *image) {
  const plan *p = &r->plan;
  if (w->life >= LIVES) return;
  for (uint32_t k = 0; k < w->pull_next; k++) {
    update *u = &r->updates[w->rank][w->life][k];
    uint32_t m = mark(w, w->life, k);
    if (get_mark(p, image, 0, m) && get_mark(p, image, 1, m)) continue;
    if ((w->pull_acked >> k & 1) && p->sync == MLFAB_SYNC_ASYNC)
      wrong("worker %u does not see its update %u, which was acknowledged", w->rank, k);
    /* An update with MORE without its end is not in a round yet. */
    if (p->sync != MLFAB_SYNC_BSP || p->more) continue;
    if (!u->missed && !u->known) note(w, "does not see its update %u yet", k);
    u->missed = 1;
  }
}

static void check_pull(run *r, worker *w) {
  check_slices(r, w->image, "a pull");
  check_marks(r, w, w->image);
  check_own(r, w, w->image);
  check_rounds(r, w->image);
}

/* ---- results ---- */

/* No call lasts longer than its deadline and a heartbeat, even with a paused host. */
static void check_time(run *r, const worker *w, const char *what, uint64_t waited,
                       uint64_t timeout) {
  uint64_t limit = timeout + r->plan.heartbeat_ns + 3 * r->plan.sim.pause_ns;
  if (waited > limit)
    wrong("worker %u's %s took %.3f s, its deadline was %.3f s", w->rank, what,
          (double)waited * 1e-9, (double)timeout * 1e-9);
}

/* May this worker's context go on, or has it lost a server? */
static int is_fatal(int code) {
  return code == MLFAB_ERR_PEER_DEAD || code == MLFAB_ERR_FENCED || code == MLFAB_ERR_PEER_CLOSED;
}

static void learn(run *r, worker *w, uint32_t k, int code) {
  update *u = &r->updates[w->rank][w->life][k];
  if (code == MLFAB_ERR_IN_DOUBT || code == MLFAB_ERR_PEER_DEAD) return;
  u->known = 1;
  u->code = code;
  if (code == 0 && u->missed)
    wrong("worker %u's update %u was acknowledged, and a pull after it had not seen it", w->rank,
          k);
  if (code == 0 && u->nan_side) wrong("worker %u's update %u with NaN was applied", w->rank, k);
}

/* A life is over: what is unknown about its updates stays unknown. */
static void bury(worker *w, const char *why) {
  note(w, "ends: %s", why);
  if (w->life < LIVES && w->next > 0) w->life++;
  w->next = 0;
  w->firsts = 0;
  w->reborn = 1;
  w->pull = 0;
  memset(w->seen, 0, sizeof w->seen);
  for (uint32_t i = 0; i < SLOTS; i++) w->slots[i].request = 0;
  w->phase = AWAY;
}

static void give_up(run *r, worker *w, const char *why) {
  /* A node that also serves must stay: it only announces that it will not push any more. */
  if (!r->plan.dedicated && w->rank < r->plan.servers) {
    if (w->phase < JOINING) note(w, "retires: %s", why);
    if (w->phase < JOINING) w->phase = JOINING;
    return;
  }
  if (w->ctx) mlfab_abandon(&w->ctx);
  bury(w, why);
}

static void end_push(run *r, worker *w, slot *s, const mlfab_result *result) {
  const update *u = &r->updates[w->rank][w->life][s->k];
  note(w, "update %u (seq %llu): %s, applied %u, refused %u", s->k, (unsigned long long)result->seq,
       mlfab_error_name(result->status), result->applied, result->refused);
  s->request = 0;
  check_time(r, w, "push", result->waited_ns, s->timeout_ns);
  if (result->seq != u->seq)
    wrong("the result of update %llu names update %llu", (unsigned long long)u->seq,
          (unsigned long long)result->seq);
  if (result->status == MLFAB_ERR_NOT_FINITE && result->rank != (int32_t)w->rank)
    wrong("worker %u's NaN was blamed on %d", w->rank, (int)result->rank);
  if (result->status == 0 && result->refused > 0) wrong("a push that succeeded was refused");
  if (result->status != 0) r->uneven = 1;
  learn(r, w, s->k, result->status);
}

static void collect(run *r, worker *w) {
  mlfab_result result;
  int done = 0, code = 0, lost = 0;
  for (uint32_t i = 0; i < SLOTS && w->ctx; i++) {
    slot *s = &w->slots[i];
    if (!s->request) continue;
    code = mlfab_test(w->ctx, s->request, &done, &result);
    if (code) wrong("mlfab_test of a push: %s", mlfab_error_name(code));
    if (code || !done) continue;
    r->outcome = mix(r->outcome ^ (uint64_t)(uint32_t)result.status ^ result.version << 32);
    lost |= is_fatal(result.status);
    end_push(r, w, s, &result);
  }
  if (w->ctx && w->pull) {
    code = mlfab_test(w->ctx, w->pull, &done, &result);
    if (code) wrong("mlfab_test of a pull: %s", mlfab_error_name(code));
    if (!code && done) {
      note(w, "pull: %s, version %llu", mlfab_error_name(result.status),
           (unsigned long long)result.version);
      w->pull = 0;
      check_time(r, w, "pull", result.waited_ns, w->pull_timeout_ns);
      lost |= is_fatal(result.status);
      if (!result.status) check_pull(r, w);
    }
  }
  if (lost) give_up(r, w, "a server is dead to it");
}

/* ---- what a worker does ---- */

static uint64_t patience(run *r) {
  if (r->plan.cancels && !r->calm && dice_chance(&r->dice, 0.1))
    return MS + dice_below(&r->dice, 100 * MS);
  return 8 * SECOND;
}

static void start_push(run *r, worker *w, slot *s) {
  const plan *p = &r->plan;
  mlfab_buf bufs[3];
  mlfab_push_options options;
  uint32_t k = w->next, m = mark(w, w->life, k);
  update *u = &r->updates[w->rank][w->life][k];
  if (!s->data) s->data = calloc(1, plan_bytes(p));
  memset(s->data, 0, plan_bytes(p));
  int64_t one = 1;
  for (int side = 0; side < 2; side++) memcpy(s->data + plan_mark_at(p, side, m), &one, 8);
  for (uint64_t e = 0; e < p->big; e++) put_big(p, s->data, e, worth(p, m));
  if (p->floats && dice_chance(&r->dice, 0.15)) {
    uint64_t e = dice_chance(&r->dice, 0.5) ? 0 : p->big - 1;
    u->nan_side = e && p->servers > 1 ? 2 : 1;
    put_wrong(p, s->data, e, dice_chance(&r->dice, 0.5));
    r->uneven = 1;
  }
  mlfab_push_options_init(&options);
  options.timeout_ns = s->timeout_ns = patience(r);
  if (s->timeout_ns < SECOND) r->uneven = 1;
  if (p->more && k % 3 == 1 && k + 1 < UPDATES) options.flags = MLFAB_PUSH_MORE;
  uint32_t n = bufs_of(p, s->data, bufs);
  s->k = k;
  int code = mlfab_push_start(w->ctx, bufs, n, &options, &s->request);
  if (code) {
    s->request = 0;
    u->nan_side = 0;
    if (is_fatal(code))
      give_up(r, w, "it cannot push");
    else if (code != MLFAB_ERR_AGAIN)
      wrong("push_start: %s", mlfab_error_name(code));
    return;
  }
  u->started = 1;
  u->seq = 0;
  w->next++;
}

/* Updates are numbered consecutively; worker 0's first weights took a number. */
static void number(run *r, worker *w, uint32_t k) {
  r->updates[w->rank][w->life][k].seq = 1 + w->firsts + k;
}

static void start_pull(run *r, worker *w) {
  mlfab_buf bufs[3];
  mlfab_pull_options options = {sizeof options, 0, 0};
  options.timeout_ns = w->pull_timeout_ns = patience(r);
  w->pull_next = w->next;
  w->pull_acked = 0;
  for (uint32_t k = 0; k < w->next && w->life < LIVES; k++) {
    const update *u = &r->updates[w->rank][w->life][k];
    if (u->known && u->code == 0) w->pull_acked |= 1ull << k;
  }
  uint32_t n = bufs_of(&r->plan, w->image, bufs);
  int code = mlfab_pull_start(w->ctx, bufs, n, &options, &w->pull);
  if (!code) return;
  w->pull = 0;
  if (is_fatal(code))
    give_up(r, w, "it cannot pull");
  else if (code != MLFAB_ERR_AGAIN)
    wrong("pull_start: %s", mlfab_error_name(code));
}

/* Blocking calls run the simulator, and other workers' turns within. Calls that wait for each other may
 * nest only with calls of their kind, because a deeper one on the stack must end first. */
enum { MODEL = 1, BARRIER, BROADCAST, JOIN };

static int may_block(run *r, int kind) {
  if (r->blocked > 8) return 0;
  return kind == JOIN || r->blocked == 0 || r->blocking == kind;
}

static void block(run *r, worker *w, int kind) {
  w->busy = 1;
  r->blocked++;
  if (kind != JOIN || r->blocked == 1) r->blocking = kind;
}

static void unblock(run *r, worker *w) {
  w->busy = 0;
  r->blocked--;
}

static void define(run *r, worker *w) {
  const plan *p = &r->plan;
  mlfab_model_options options;
  mlfab_buf bufs[3];
  if (!may_block(r, MODEL)) return;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.sync = p->sync;
  options.consistency = p->consistency;
  options.tags = p->tags;
  options.deterministic = p->deterministic;
  options.slices = p->slices;
  memset(w->image, 0, plan_bytes(p));
  uint32_t n = p->first_weights ? bufs_of(p, w->image, bufs) : 0;
  int type = p->width == 4 ? MLFAB_F32 : p->floats ? MLFAB_F64 : MLFAB_I64;
  int code = mlfab_tensor_add(w->ctx, 1, MLFAB_I64, plan_marks(p));
  if (!code) code = mlfab_tensor_add(w->ctx, 2, type, p->big);
  if (!code) code = mlfab_tensor_add(w->ctx, 3, MLFAB_I64, plan_marks(p));
  if (code && code != MLFAB_ERR_TENSOR) wrong("tensor_add: %s", mlfab_error_name(code));
  if (w->rank == 0 && n) w->firsts++;
  block(r, w, MODEL);
  code = mlfab_model_start(w->ctx, &options, n ? bufs : NULL, n);
  unblock(r, w);
  note(w, "model_start: %s", mlfab_error_name(code));
  if (!code) {
    w->phase = WORKING;
    if (n) {
      w->pull_next = 0;
      check_slices(r, w->image, "model_start");
      check_marks(r, w, w->image);
    }
  } else if (is_fatal(code)) {
    give_up(r, w, "model_start failed");
  } else if (code != MLFAB_ERR_TIMEOUT) {
    wrong("worker %u's model_start: %s", w->rank, mlfab_error_name(code));
  }
}

static void meet(run *r, worker *w) {
  if (!may_block(r, BARRIER)) return;
  w->met = 1;
  block(r, w, BARRIER);
  int code = mlfab_barrier(
      w->ctx, &(mlfab_collective){.size = sizeof(mlfab_collective), .timeout_ns = 2 * SECOND});
  unblock(r, w);
  note(w, "barrier: %s", mlfab_error_name(code));
  for (uint32_t i = 0; !code && i < r->plan.workers; i++) {
    const worker *other = &r->workers[i];
    if (!other->met && !other->reborn && !r->deaths && other->phase <= WORKING)
      wrong("worker %u passed the barrier without worker %u", w->rank, i);
  }
  if (is_fatal(code)) give_up(r, w, "barrier failed");
}

static void tell(run *r, worker *w) {
  uint8_t data[sizeof r->message];
  if (!may_block(r, BROADCAST)) return;
  w->told = 1;
  memset(data, 0, sizeof data);
  if (w->rank == 1) memcpy(data, r->message, sizeof data);
  block(r, w, BROADCAST);
  int code = mlfab_broadcast(
      w->ctx, 1, data, sizeof data,
      &(mlfab_collective){.size = sizeof(mlfab_collective), .timeout_ns = 2 * SECOND});
  unblock(r, w);
  note(w, "broadcast: %s", mlfab_error_name(code));
  if (!code && memcmp(data, r->message, sizeof data) != 0)
    wrong("worker %u got another broadcast than was sent", w->rank);
  if (is_fatal(code)) give_up(r, w, "broadcast failed");
}

static void join(run *r, worker *w) {
  if (!may_block(r, JOIN)) return;
  block(r, w, JOIN);
  int code = mlfab_finish(w->ctx, 8 * SECOND);
  unblock(r, w);
  note(w, "join: %s", mlfab_error_name(code));
  if (is_fatal(code) && w->phase != JOINING) give_up(r, w, "join failed");
  if (w->phase != AWAY) w->phase = DONE;
}

static void work(run *r, worker *w) {
  const plan *p = &r->plan;
  uint32_t last = w->life < LIVES ? UPDATES : 0, idle = SLOTS;
  collect(r, w);
  if (w->phase != WORKING) return;
  for (uint32_t i = 0; i < SLOTS; i++) {
    if (!w->slots[i].request) continue;
    if (p->cancels && !r->calm && dice_chance(&r->dice, 0.05)) {
      note(w, "cancels update %u", w->slots[i].k);
      r->uneven = 1;
      mlfab_cancel(w->ctx, w->slots[i].request);
    }
  }
  if (w->pull && p->cancels && dice_chance(&r->dice, 0.03)) mlfab_cancel(w->ctx, w->pull);
  uint32_t open = 0;
  for (uint32_t i = 0; i < SLOTS; i++)
    if (w->slots[i].request)
      open++;
    else
      idle = i;
  if (p->meetings && !w->met && !w->reborn && w->next >= UPDATES / 3) {
    meet(r, w);
  } else if (p->meetings && !p->harsh && !w->told && !w->reborn && w->next >= UPDATES / 2) {
    tell(r, w);
  } else if (w->next < last && idle < SLOTS && dice_chance(&r->dice, 0.7)) {
    uint32_t k = w->next;
    start_push(r, w, &w->slots[idle]);
    if (w->phase == WORKING && w->next > k) number(r, w, k);
  }
  if (w->phase != WORKING) return;
  if (!w->pull && dice_chance(&r->dice, 0.4)) start_pull(r, w);
  if (w->phase == WORKING && w->next >= last && open == 0 && !w->pull) join(r, w);
}

static void open_worker(run *r, worker *w);

static void turn(void *user) {
  worker *w = user;
  run *r = w->run;
  mlfab_sim_at(r->sim, now(r) + 1 + dice_below(&r->dice, 2 * r->plan.tick_ns), turn, w);
  if (w->busy) return;
  mlfab_error error;
  int ready;
  if (w->gone || (!w->ctx && w->phase != AWAY)) return; /* crashed: the callback follows */
  switch (w->phase) {
    case AWAY:
      open_worker(r, w);
      break;
    case OPENING:
      ready = mlfab_is_ready(w->ctx, &error);
      if (ready == 1) w->phase = DEFINING;
      if (ready < 0) give_up(r, w, error.text);
      break;
    case DEFINING:
      define(r, w);
      break;
    case WORKING:
      work(r, w);
      break;
    case JOINING:
      join(r, w);
      break;
    default:
      break;
  }
}

/* ---- the fabric ---- */

static void on_event(void *user, const mlfab_event_info *info) {
  run *r = user;
  if (info->kind == MLFAB_EVENT_DEAD) r->deaths = 1;
  if (info->kind == MLFAB_EVENT_REFUSED_UPDATE && info->code == MLFAB_ERR_NOT_FINITE)
    r->offenders++;
  if (info->kind != MLFAB_EVENT_JOINED)
    say(r->sim, "event %u: %s %d: %s", info->kind, info->is_server ? "server" : "worker",
        (int)info->rank, info->text);
}

static void configure(run *r, mlfab_config *c) {
  const plan *p = &r->plan;
  mlfab_config_init(c);
  c->workers = p->workers;
  c->servers = p->servers;
  c->dedicated = p->dedicated;
  c->chunk_bytes = p->chunk;
  c->eager_bytes = p->eager;
  c->block_bytes = p->block;
  c->merge_max = p->merge_max;
  c->heartbeat_ns = p->heartbeat_ns;
  c->timeout_ns = 8 * SECOND;
  c->on_event = on_event;
  c->user = r;
  c->scheduler = p->scheduler;
  c->schedule = p->schedule;
  if (r->seed % 4 == 1) strcpy(c->key, "the-key-of-this-test");
}

static void crashed(void *user, uint32_t host) {
  run *r = user;
  for (uint32_t i = 0; i < r->plan.workers; i++) {
    worker *w = &r->workers[i];
    /* It may have been opened again before this. */
    if (w->host != host || w->ctx) continue;
    /* Without it the fabric could not have formed. */
    w->gone = r->plan.loses && i + 1 == r->plan.workers && w->phase > OPENING;
    bury(w, "its host crashed");
  }
}

/* The scheduler's host is the last one; it is opened again after every crash. */
static void open_scheduler(void *user, uint32_t host) {
  run *r = user;
  mlfab_config c;
  if (r->scheduler) return; /* it was opened before this */
  configure(r, &c);
  c.roles = MLFAB_ROLE_SCHEDULER;
  c.timeout_ns = 60 * SECOND;
  sim_open(r->sim, host, &c, &r->scheduler);
}

static void open_worker(run *r, worker *w) {
  mlfab_config c;
  configure(r, &c);
  c.rank = (int32_t)w->rank;
  if (!r->plan.dedicated && w->rank >= r->plan.servers) c.roles = MLFAB_ROLE_WORKER;
  /* A server that gives up joining counts as crashed. */
  if (!r->plan.dedicated && w->rank < r->plan.servers) c.timeout_ns = 60 * SECOND;
  c.seed = r->seed + w->rank + w->life * HOSTS;
  sim_open(r->sim, w->host, &c, &w->ctx);
  w->phase = OPENING;
}

static void start(run *r, uint64_t seed) {
  memset(r, 0, sizeof *r);
  r->seed = seed;
  r->dice = mix(seed ^ 0x5eed);
  plan *p = &r->plan;
  plan_make(p, seed);
  for (size_t i = 0; i < sizeof r->message; i++) r->message[i] = (uint8_t)dice_roll(&r->dice);
  assert_int_equal(mlfab_sim_create(&p->sim, &r->sim), 0);
  say(r->sim,
      "%u %sservers, %u workers, scheduler %u, %s%s%s%s%s, %llu elements, chunk %u, eager %u, "
      "slices %u, consistency %u, tags %u",
      p->servers, p->dedicated ? "dedicated " : "", p->workers, p->scheduler,
      p->sync == MLFAB_SYNC_BSP ? "bsp" : "async", p->deterministic ? ", deterministic" : "",
      p->harsh ? ", harsh" : "", p->cancels ? ", cancels" : "", p->more ? ", more" : "",
      (unsigned long long)p->big, p->chunk, p->eager, p->slices, p->consistency.kind, p->tags);
  for (uint32_t s = 0; p->dedicated && s < p->servers; s++) {
    mlfab_config c;
    configure(r, &c);
    c.roles = MLFAB_ROLE_SERVER;
    c.timeout_ns = 60 * SECOND;
    c.rank = (int32_t)s;
    sim_open(r->sim, s, &c, &r->server[s]);
  }
  if (p->scheduler == MLFAB_SCHEDULER_OWN) {
    mlfab_sim_on_crash(r->sim, HOSTS - 1, open_scheduler, r);
    open_scheduler(r, HOSTS - 1);
  }
  for (uint32_t i = 0; i < p->workers; i++) {
    worker *w = &r->workers[i];
    w->run = r;
    w->rank = i;
    w->host = i + (p->dedicated ? p->servers : 0);
    w->image = calloc(1, plan_bytes(p));
    if (p->dedicated || i >= p->servers) mlfab_sim_on_crash(r->sim, w->host, crashed, r);
    open_worker(r, w);
    mlfab_sim_at(r->sim, now(r) + 1 + dice_below(&r->dice, p->tick_ns), turn, w);
  }
}

static void finish(run *r) {
  for (uint32_t i = 0; i < r->plan.workers; i++) {
    worker *w = &r->workers[i];
    if (w->ctx) mlfab_abandon(&w->ctx);
    for (uint32_t k = 0; k < SLOTS; k++) free(w->slots[k].data);
    free(w->image);
  }
  for (uint32_t s = 0; s < 2; s++)
    if (r->server[s]) mlfab_abandon(&r->server[s]);
  if (r->scheduler) mlfab_abandon(&r->scheduler);
  mlfab_sim_destroy(&r->sim);
}

/* ---- the end: resolves and compares everything ---- */

static int all_done(const run *r) {
  for (uint32_t i = 0; i < r->plan.workers; i++) {
    const worker *w = &r->workers[i];
    if (!w->gone && (w->phase != DONE || w->busy || !w->ctx)) return 0;
  }
  return 1;
}

static void run_until(run *r, uint64_t until) {
  while (!all_done(r) && now(r) < until) sim_step(r->sim);
}

static void resolve(run *r, worker *w) {
  if (!w->ctx || w->phase != DONE) return;
  int code = mlfab_flush(w->ctx, 8 * SECOND);
  if (code == MLFAB_ERR_TIMEOUT) wrong("worker %u: updates are never decided", w->rank);
  for (uint32_t k = 0; w->life < LIVES && k < w->next; k++) {
    update *u = &r->updates[w->rank][w->life][k];
    int status = 1;
    code = mlfab_push_status(w->ctx, u->seq, &status);
    if (code) {
      wrong("worker %u: push_status of update %u: %s", w->rank, k, mlfab_error_name(code));
    } else if (status == MLFAB_ERR_IN_DOUBT) {
      wrong("worker %u's update %u stays in doubt", w->rank, k);
    } else if (u->known && (u->code == 0) != (status == 0)) {
      wrong("worker %u's update %u ended with %s, its status is %s", w->rank, k,
            mlfab_error_name(u->code), mlfab_error_name(status));
    } else {
      learn(r, w, k, status);
    }
    note(w, "update %u: status %s", k, mlfab_error_name(status));
  }
}

/* Compares the known state of an update with its marks at the first and the last server. */
static void compare(run *r, uint32_t m, const uint8_t *image) {
  const plan *p = &r->plan;
  uint32_t rank = m / (LIVES * UPDATES), life = m / UPDATES % LIVES, k = m % UPDATES;
  const update *u = &r->updates[rank][life][k];
  int64_t a = get_mark(p, image, 0, m), b = get_mark(p, image, 1, m);
  int bad = a < 0 || a > 1 || b < 0 || b > 1 || (p->servers == 1 && a != b);
  if (!u->started) bad |= a || b;
  if (u->nan_side == 1) bad |= a != 0;
  if (u->nan_side == 2) bad |= b != 0;
  if (u->known && u->code == 0) bad |= a != 1 || b != 1;
  if (u->known && u->code != 0) bad |= a == 1 && b == 1;
  if (u->known && u->code == MLFAB_ERR_PARTIAL) bad |= a == b;
  if (u->known && (u->code == MLFAB_ERR_WITHDRAWN || u->code == MLFAB_ERR_CANCELLED ||
                   u->code == MLFAB_ERR_TIMEOUT))
    bad |= a || b;
  if (bad)
    wrong("update %u of worker %u's life %u (%s) was applied %lld and %lld times", k, rank, life,
          !u->started ? "never pushed"
          : u->known  ? mlfab_error_name(u->code)
                      : "not known",
          (long long)a, (long long)b);
}

/* The tensor between the marks must follow from them. */
static void compare_big(run *r, const uint8_t *image) {
  const plan *p = &r->plan;
  int64_t sum[2] = {0, 0};
  uint64_t border = plan_border(p);
  for (uint32_t m = 0; m < plan_marks(p); m++) {
    for (int side = 0; side < 2; side++) {
      uint64_t product = (uint64_t)worth(p, m) * (uint64_t)get_mark(p, image, side, m);
      sum[side] = (int64_t)((uint64_t)sum[side] + product);
    }
  }
  for (uint64_t e = 0; e < p->big; e++) {
    int side = p->servers > 1 && 8ull * plan_marks(p) + e * p->width >= border;
    if (get_big(p, image, e) == sum[side]) continue;
    wrong("element %llu holds %lld, the updates that were applied make %lld", (unsigned long long)e,
          (long long)get_big(p, image, e), (long long)sum[side]);
    return;
  }
}

/* Pulls the model with a worker that still can; NULL: none can. */
static worker *read_model(run *r) {
  for (uint32_t i = 0; i < r->plan.workers; i++) {
    worker *w = &r->workers[i];
    mlfab_buf bufs[3];
    if (!w->ctx) continue;
    int code = mlfab_pull(w->ctx, bufs, bufs_of(&r->plan, w->image, bufs), NULL, NULL);
    note(w, "last pull: %s", mlfab_error_name(code));
    if (!code) return w;
    /* A worker that also serves may have retired before there was a model. */
    if (!is_fatal(code) && code != MLFAB_ERR_STATE)
      wrong("worker %u's last pull: %s", i, mlfab_error_name(code));
  }
  return NULL;
}

static void settle(run *r) {
  const plan *p = &r->plan;
  for (uint32_t i = 0; i < p->workers; i++) resolve(r, &r->workers[i]);
  mlfab_sim_run(r->sim, ROUNDS_CLOSE);
  worker *reader = read_model(r);
  if (!reader) {
    /* All were cut off at the end: new processes can pull. */
    for (uint32_t i = 0; i < p->workers; i++) {
      if (r->workers[i].gone || (!p->dedicated && i < p->servers)) continue;
      r->workers[i].next = r->workers[i].life = LIVES;
      give_up(r, &r->workers[i], "it cannot read");
    }
    run_until(r, now(r) + 60 * SECOND);
    reader = read_model(r);
    if (!reader) wrong("no worker is left that can pull");
  }
  check_marks(r, reader, reader->image);
  for (uint32_t m = 0; m < plan_marks(p); m++) compare(r, m, reader->image);
  compare_big(r, reader->image);
}

/* Runs a seed; returns a hash of all that happened. */
static uint64_t run_seed(uint64_t seed) {
  static run it;
  run *r = &it;
  uint64_t hash;
  start(r, seed);
  run_until(r, now(r) + 12 * SECOND);
  r->calm = 1;
  mlfab_sim_set_faults(r->sim, NULL);
  run_until(r, now(r) + 60 * SECOND);
  if (!all_done(r)) wrong("after a minute without faults it is not done");
  settle(r);
  mlfab_sim_trace_hash(r->sim, &hash);
  finish(r);
  return mix(hash ^ r->outcome);
}

static void play(uint64_t seed) { seeds_same(seed, run_seed); }

TEST(test_seeds) { seeds_run("faults", test_cases(100), play); }

TESTS(NULL, NULL)
