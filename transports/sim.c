/* sim.c - simulates a network of hosts in one process, one thread and virtual time, from a seed.
 *
 * It is a transport like the others, and a clock: mlfab_sim_step executes the next event of any host, and drives the
 * contexts concerned. It has no threads. It ignores the contents of frames. Callers model computing time with
 * mlfab_sim_at. mlfab_sim.c consists of this file and the group `base`. Of the library it uses functions of mlfab.h
 * only.
 *
 * The model of the network
 *  - A link is two directed lanes of frames. A frame occupies the sender's out-port for bytes / rate,
 *    travels for latency + jitter, then occupies the receiver's in-port (store and forward by frames, so n
 *    frames in a row take n + 1 frame times). Order is kept within a lane.
 *  - A port serves its lanes in turn, one frame each. This is fair by frames: the lane with larger frames gets more. A
 *    change of rate re-times the frame in service.
 *  - Hosts may share ports (mlfab_sim_share), as two processes of one machine do: their frames wait in the
 *    same queue, and a slow port is slow for all of them. Partitions, pauses and crashes are per host.
 *  - The bytes that a port has carried, and its busy time, are known exactly at any time (measure): their
 *    quotient is the rate, once enough bytes have passed.
 *  - buffer_bytes bounds the bytes that a lane has accepted and the far end has not read: both socket
 *    buffers of a TCP connection. Acknowledgements are free of time and capacity.
 *  - A partition stalls lanes, as in TCP; connects time out after 3 s. Traffic of a host to itself, or to a host with
 *    the same ports, takes 1 us and bypasses ports; of all faults, only partitions affect it.
 *  - A connection that breaks loses the frames in flight both ways. The end nearer to the cause is told at
 *    once, the other a latency later, or when the partition between them heals.
 *  - A paused host neither reads nor runs, but its system answers probes. A crashed host is gone, with all of its
 *    frames in flight.
 *
 * Invariants: every source of events has an index of the heap from its creation on, so a lack of memory loses no event.
 * If memory for a frame's bytes is short, its connection breaks with MEMORY. Memory addresses have no effect: the same
 * seed and calls give the same hash.
 *
 * Source: one struct of faults as in TigerBeetle's packet simulator; a shared fabric in one process as in
 * raft's fixture. */
#include "../mlfab_sim.h"
#include "../mlfab_transport.h"
#include "../core/base/base.h"
#include "../core/base/env.h"
#include "../core/base/heap.h"
#include "../core/base/rng.h"

#include <stdio.h>

#define SIM_SECOND 1000000000ull
#define SIM_LOCAL_NS 1000u           /* latency within a host */
#define SIM_CONNECT_NS 3000000000ull /* timeout of a connect */
#define SIM_RETRY_NS 250000000ull    /* a connect into a partition is tried again */
#define SIM_SHELVES 22               /* blocks of 64 bytes to 64 << 21 */
#define SIM_ROUNDS 4096              /* consecutive calls of mlfab_progress before time advances */
#define SIM_DEPTH 64                 /* nested waits; deeper waits run no callbacks */
#define SIM_FAULT_TICKS 8            /* draws a second of faults with a rate */
#define SIM_LOAD_BYTES 65536u        /* bytes in a window that suffice to compute a port's rate */

/* Kinds of events; at the same time, in this order. */
enum sim_kind {
  SIM_NOTICE = 1, /* an end of a link is told that it is up or broken */
  SIM_SYN,        /* a connect arrives, or its failure returns */
  SIM_ARRIVE,     /* the first frame in flight of a lane arrives at the in-port */
  SIM_PORT,       /* a port has finished its frame */
  SIM_FAULT,      /* random faults are drawn */
  SIM_SLOW_END,
  SIM_PAUSE_END,
  SIM_HEAL,     /* a random partition ends */
  SIM_DEADLINE, /* a context must be driven */
  SIM_RESTART,  /* a crashed host's callback is called */
  SIM_AT,       /* a callback of mlfab_sim_at */
  SIM_WATCH     /* a callback of mlfab_sim_watch */
};
enum sim_cut { SIM_CUT_USER = 1, SIM_CUT_MENU = 2 };

/* A source of one event; it keeps its index in the heap as long as it exists. */
typedef struct sim_source {
  uint32_t kind, index;
  void *owner;
} sim_source;

struct sim_end;
struct sim_lane;
struct sim_host;

/* A frame (its head follows it), or an event for the reader. */
typedef struct sim_item {
  struct sim_item *next;
  struct sim_end *end; /* its end; NULL: a failed connect */
  uint32_t kind;       /* MLFAB_IO_*; DOWN within a lane marks its end */
  int32_t code;
  uint64_t token;
  const char *text;
  size_t own_bytes; /* size of its block in the pool; 0: part of a link */
  int queued;
  uint32_t head_bytes, bulk_bytes;
  const void *bulk;      /* the caller's memory, or `copy` */
  void *copy;            /* NULL: borrowed, or a ghost */
  struct sim_item *sent; /* reported when the frame has left; NULL: no report */
  uint64_t arrive_ns;
} sim_item;

typedef struct sim_queue {
  sim_item *head, *tail;
} sim_queue;

/* One direction of a link. */
typedef struct sim_lane {
  sim_source arrive;
  struct sim_end *from, *to;
  sim_queue out, flight, in;
  uint64_t buffered; /* bytes accepted and not yet read by the far end */
  uint64_t last_ns;  /* arrival of the last frame in flight */
  int wants;         /* a send was refused */
  int stalled;       /* the first frame in flight waits for a partition to heal */
  struct sim_lane *next[2];
  int waiting[2]; /* is in the ring of the out-port [0], the in-port [1] */
  sim_item fin;
} sim_lane;

typedef struct sim_end {
  sim_source notice;
  struct sim_link *link;
  struct sim_host *host;
  struct sim_endpoint *endpoint; /* valid until closed */
  struct sim_end *prev, *next;   /* in the host's list */
  uint32_t number;
  int up, closed;
  int told;     /* DOWN is in the queue of events */
  int waits;    /* its notice waits for a partition to heal */
  int32_t code; /* reason for the break, for the notice */
  const char *text;
  uint64_t token, until_ns; /* of the connect */
  sim_item up_item, down_item, writable_item;
  sim_lane lane; /* what this end sends */
} sim_end;

typedef struct sim_link {
  sim_end end[2];
  uint32_t slot;
  int broken;
} sim_link;

/* One side of a host's network card. */
typedef struct sim_port {
  sim_source source;
  uint32_t inbound;
  uint64_t rate;     /* bytes a second now */
  uint64_t left;     /* of the frame in service, in 1e-9 bytes: exact at any rate change */
  uint64_t since_ns; /* time at which `left` was exact */
  sim_item *frame;   /* in service */
  sim_lane *lane;    /* lane of that frame */
  sim_lane *head, *tail;
  uint64_t begun_ns; /* when its service began */
  uint64_t passed;   /* bytes, and ... */
  uint64_t busy_ns;  /* ... busy time, both without that frame */
} sim_port;

/* The totals of a port at some time. */
typedef struct sim_meter {
  uint64_t passed, busy_ns;
} sim_meter;

typedef struct sim_attempt {
  sim_item item; /* its failure; first, because the two are one block */
  sim_source source;
  struct sim_attempt *next; /* in the host's list */
  struct sim_endpoint *endpoint;
  struct sim_host *to;
  uint64_t token, until_ns;
  int32_t code; /* set: the failure is on its way back */
  const char *text;
  char why[64]; /* the text, with the address */
} sim_attempt;

/* The object that transport.open returns. */
typedef struct sim_endpoint {
  struct sim_host *host;
  sim_queue events;
  sim_queue taken; /* polled, not released: frames, and texts of failed connects */
  int woken;
  int gone;             /* its host crashed */
  uint64_t measured_ns; /* last call of measure; 0: never */
  sim_meter in, out;    /* totals at that time */
} sim_endpoint;

typedef struct sim_host {
  mlfab_sim *sim;
  uint32_t index;
  struct sim_host *card; /* the host whose ports it uses: itself, if they are not shared */
  sim_port out, in;
  uint64_t rate_out, rate_in; /* as set; the ports have the reduced rates of a slow host */
  sim_source deadline, slow, pause, restart, watch;
  sim_endpoint *endpoint;
  sim_end *ends;
  sim_attempt *attempts;
  mlfab *ctx;
  mlfab **ctx_p; /* the caller's pointer, cleared at a crash */
  int busy;      /* its context is on the stack: being driven, or in a wait */
  int waits;     /* how many of these are waits, in which it can be driven */
  int is_slow, crash_waits;
  int opened; /* it has had an endpoint */
  uint64_t paused_until_ns;
  int listed, ready; /* is in the list of hosts to examine; must be driven */
  struct sim_host *next_listed;
  void (*crash_fn)(void *user, uint32_t host);
  void *crash_user;
  void (*watch_fn)(void *user);
  void *watch_user;
  mlfab__env given; /* the hooks to which the context's hooks forward */
  mlfab_env hooks;
} sim_host;

/* A callback, or the end of a random partition. */
typedef struct sim_timer {
  sim_source source;
  struct sim_timer *prev, *next;
  void (*fn)(void *user);
  void *user;
  uint32_t a, b;
} sim_timer;

struct mlfab_sim {
  mlfab__env env;
  mlfab_sim_options options;
  uint64_t now, sequence, hash;
  mlfab__rng prng;
  mlfab__heap heap;
  sim_source **sources; /* by index */
  uint32_t *free_indices;
  uint32_t indices, free_count; /* indices: size of both arrays and of the heap */
  sim_host *hosts;
  sim_link **links;                      /* by slot */
  uint32_t slots, link_count, last_slot; /* at least half of the slots are free */
  sim_host *listed_head, *listed_tail;
  uint8_t *cuts; /* hosts x hosts, SIM_CUT_*; NULL: no partition so far */
  sim_timer *timers;
  sim_source fault;
  int faults, fault_stands; /* a fault rate is set; the next draw is in the heap */
  int depth;                /* waits on the stack */
  sim_host *waiting;        /* host of the innermost wait */
  uint32_t crash_waits;
  void *pool[SIM_SHELVES];
};

/* ---- memory, queues, random numbers ---- */

/* Block sizes of the pool are powers of two. */
static unsigned sim_shelf(size_t bytes) {
  unsigned shelf = 0;
  while (((size_t)64 << shelf) < bytes) shelf++;
  return shelf;
}

/* A block whose first `clear` bytes are zero, or NULL. */
static void *sim_take(mlfab_sim *sim, size_t bytes, size_t clear) {
  unsigned shelf = sim_shelf(bytes);
  assert(shelf < SIM_SHELVES);
  void *block = sim->pool[shelf];
  if (!block) return mlfab__alloc(&sim->env, (size_t)64 << shelf);
  memcpy(&sim->pool[shelf], block, sizeof block);
  memset(block, 0, clear);
  return block;
}

static void sim_give(mlfab_sim *sim, void *block, size_t bytes) {
  unsigned shelf = sim_shelf(bytes);
  memcpy(block, &sim->pool[shelf], sizeof block);
  sim->pool[shelf] = block;
}

static void sim_append(sim_queue *queue, sim_item *item) {
  item->next = NULL;
  if (queue->tail) {
    queue->tail->next = item;
  } else {
    queue->head = item;
  }
  queue->tail = item;
}

static sim_item *sim_pop(sim_queue *queue) {
  sim_item *item = queue->head;
  if (!item) return NULL;
  queue->head = item->next;
  if (!queue->head) queue->tail = NULL;
  return item;
}

/* Frees a frame or event with all it owns; a part of a link only becomes unused. */
static void sim_item_free(mlfab_sim *sim, sim_item *item) {
  item->queued = 0;
  if (item->copy) sim_give(sim, item->copy, item->bulk_bytes);
  if (item->sent) sim_give(sim, item->sent, item->sent->own_bytes);
  item->copy = NULL;
  item->sent = NULL;
  if (item->own_bytes) sim_give(sim, item, item->own_bytes);
}

static void sim_queue_free(mlfab_sim *sim, sim_queue *queue) {
  sim_item *item;
  while ((item = sim_pop(queue))) sim_item_free(sim, item);
}

static int sim_chance(mlfab_sim *sim, double p) { return p > 0 && mlfab__rng_unit(&sim->prng) < p; }

static void sim_mix(mlfab_sim *sim, uint64_t value) {
  sim->hash = mlfab__mix(sim->hash ^ value) + sim->sequence;
}

/* ---- sources and the heap ---- */

/* A larger copy of an array, zero-filled, or NULL; the old array stays. */
static void *sim_larger(mlfab_sim *sim, const void *old, uint32_t count, uint32_t room,
                        size_t size) {
  void *array = mlfab__alloc_array(&sim->env, room, size);
  if (array && count) memcpy(array, old, count * size);
  return array;
}

/* Frees an array, if any. */
static void sim_drop(mlfab_sim *sim, void *array, size_t bytes) {
  if (array) mlfab__free(&sim->env, array, bytes);
}

/* Makes room for `n` more sources, so that this many calls of sim_source_add cannot fail. */
static int sim_sources_reserve(mlfab_sim *sim, uint32_t n) {
  uint32_t old = sim->indices, room = old ? old : 64;
  if (sim->free_count >= n) return 0;
  while (room - old + sim->free_count < n) room *= 2;
  sim_source **sources = sim_larger(sim, sim->sources, old, room, sizeof *sources);
  uint32_t *indices = sim_larger(sim, sim->free_indices, sim->free_count, room, sizeof *indices);
  if (!sources || !indices || mlfab__heap_reserve(&sim->heap, &sim->env, room)) {
    sim_drop(sim, sources, room * sizeof *sources);
    sim_drop(sim, indices, room * sizeof *indices);
    return MLFAB_ERR_MEMORY;
  }
  sim_drop(sim, sim->sources, old * sizeof *sources);
  sim_drop(sim, sim->free_indices, old * sizeof *indices);
  while (old < room) indices[sim->free_count++] = old++;
  sim->sources = sources;
  sim->free_indices = indices;
  sim->indices = room;
  return 0;
}

static void sim_source_add(mlfab_sim *sim, sim_source *source, uint32_t kind, void *owner) {
  source->kind = kind;
  source->owner = owner;
  source->index = sim->free_indices[--sim->free_count];
  sim->sources[source->index] = source;
}

static void sim_source_drop(mlfab_sim *sim, sim_source *source) {
  mlfab__heap_remove(&sim->heap, source->index);
  sim->free_indices[sim->free_count++] = source->index;
}

static void sim_put(mlfab_sim *sim, sim_source *source, uint64_t at_ns) {
  uint64_t order = (uint64_t)source->kind << 56 | sim->sequence++;
  mlfab__heap_put(&sim->heap, source->index, mlfab__max(at_ns, sim->now), order);
  /* Faults are drawn only while other events are pending: else a simulation would never end. */
  if (sim->faults && !sim->fault_stands && source != &sim->fault) {
    sim->fault_stands = 1;
    sim_put(sim, &sim->fault,
            sim->now + 1 + mlfab__rng_below(&sim->prng, 2 * SIM_SECOND / SIM_FAULT_TICKS));
  }
}

static void sim_unput(mlfab_sim *sim, const sim_source *source) {
  mlfab__heap_remove(&sim->heap, source->index);
}

/* ---- hosts ---- */

static int sim_paused(const sim_host *host) { return host->paused_until_ns > host->sim->now; }

static int sim_is_cut(const mlfab_sim *sim, const sim_host *a, const sim_host *b) {
  return sim->cuts && sim->cuts[(size_t)a->index * sim->options.hosts + b->index];
}

/* Does traffic between them use no port? */
static int sim_is_local(const sim_host *a, const sim_host *b) { return a->card == b->card; }

static uint64_t sim_latency(const sim_host *a, const sim_host *b) {
  return sim_is_local(a, b) ? SIM_LOCAL_NS : a->sim->options.latency_ns;
}

/* The host's context was used: its deadline may have changed; with `drive`, it has work to do. */
static void sim_touch(sim_host *host, int drive) {
  mlfab_sim *sim = host->sim;
  if (!host->ctx) return;
  host->ready |= drive;
  if (host->listed) return;
  host->listed = 1;
  host->next_listed = NULL;
  if (sim->listed_head) {
    sim->listed_tail->next_listed = host;
  } else {
    sim->listed_head = host;
  }
  sim->listed_tail = host;
}

/* Queues an event for its reader. */
static void sim_post(sim_endpoint *endpoint, sim_item *item) {
  mlfab_sim *sim = endpoint->host->sim;
  const sim_end *end = item->end;
  const sim_end *other = end ? &end->link->end[end == &end->link->end[0]] : NULL;
  sim_mix(sim, sim->now);
  sim_mix(sim, (uint64_t)item->kind << 56 ^ (uint64_t)endpoint->host->index << 28 ^
                   (other ? other->host->index : 0xfffffffu));
  if (item->kind == MLFAB_IO_FRAME) {
    sim_mix(sim, mlfab__hash(0, item + 1, item->head_bytes));
    sim_mix(sim, (uint64_t)item->head_bytes << 32 | item->bulk_bytes);
  }
  item->queued = 1;
  sim_append(&endpoint->events, item);
  sim_touch(endpoint->host, 1);
}

/* ---- ports ---- */

static void sim_port_time(mlfab_sim *sim, sim_port *port) {
  if (!port->left) {
    sim_put(sim, &port->source, sim->now);
  } else if (!port->rate) {
    sim_unput(sim, &port->source);
  } else {
    sim_put(sim, &port->source,
            sim->now + port->left / port->rate + (port->left % port->rate != 0));
  }
}

/* Bytes left of the frame in service, in 1e-9 bytes. */
static uint64_t sim_port_left(const mlfab_sim *sim, const sim_port *port) {
  return port->left - mlfab__min(port->left, (sim->now - port->since_ns) * port->rate);
}

static sim_meter sim_port_meter(const mlfab_sim *sim, const sim_port *port) {
  sim_meter meter = {port->passed, port->busy_ns};
  if (!port->frame) return meter;
  uint64_t left = (sim_port_left(sim, port) + SIM_SECOND - 1) / SIM_SECOND;
  meter.passed += (uint64_t)port->frame->head_bytes + port->frame->bulk_bytes - left;
  meter.busy_ns += sim->now - port->begun_ns;
  return meter;
}

/* Takes the frame out of service, because it is done or lost, and returns it. */
static sim_item *sim_port_clear(mlfab_sim *sim, sim_port *port) {
  sim_meter meter = sim_port_meter(sim, port);
  sim_item *frame = port->frame;
  port->passed = meter.passed;
  port->busy_ns = meter.busy_ns;
  port->frame = NULL;
  port->lane = NULL;
  return frame;
}

/* Appends a lane with frames to the ring. A lane in service is appended when its frame is done, so that
 * others do not wait for two of its frames. */
static void sim_port_queue(sim_port *port, sim_lane *lane) {
  uint32_t side = port->inbound;
  if (lane->waiting[side] || port->lane == lane) return;
  if (!(side ? lane->in.head : lane->out.head)) return;
  lane->waiting[side] = 1;
  lane->next[side] = NULL;
  if (port->head) {
    port->tail->next[side] = lane;
  } else {
    port->head = lane;
  }
  port->tail = lane;
}

/* If the port is idle, takes the next lane's first frame into service. */
static void sim_port_start(mlfab_sim *sim, sim_port *port) {
  sim_lane *lane = port->head;
  if (port->frame || !lane) return;
  port->head = lane->next[port->inbound];
  lane->waiting[port->inbound] = 0;
  port->lane = lane;
  port->frame = sim_pop(port->inbound ? &lane->in : &lane->out);
  port->left = ((uint64_t)port->frame->head_bytes + port->frame->bulk_bytes) * SIM_SECOND;
  port->since_ns = port->begun_ns = sim->now;
  sim_port_time(sim, port);
}

/* The lane has a frame for the port. */
static void sim_port_offer(mlfab_sim *sim, sim_port *port, sim_lane *lane) {
  sim_port_queue(port, lane);
  sim_port_start(sim, port);
}

/* Removes a lane from the port; the caller empties its queue. */
static void sim_port_forget(mlfab_sim *sim, sim_port *port, sim_lane *lane) {
  uint32_t side = port->inbound;
  if (lane->waiting[side]) {
    sim_lane *before = NULL;
    for (sim_lane *l = port->head; l != lane; l = l->next[side]) before = l;
    if (before) {
      before->next[side] = lane->next[side];
    } else {
      port->head = lane->next[side];
    }
    if (port->tail == lane) port->tail = before;
    lane->waiting[side] = 0;
  }
  if (port->lane == lane) {
    sim_unput(sim, &port->source);
    sim_item_free(sim, sim_port_clear(sim, port));
    sim_port_start(sim, port);
  }
}

static void sim_port_rate(mlfab_sim *sim, sim_port *port, uint64_t rate) {
  if (port->frame) {
    port->left = sim_port_left(sim, port);
    port->since_ns = sim->now;
  }
  port->rate = rate;
  if (port->frame) sim_port_time(sim, port);
}

/* Sets the port rates of a host with ports of its own. */
static void sim_host_rates(sim_host *host) {
  uint64_t divisor = host->is_slow ? 10 : 1;
  sim_port_rate(host->sim, &host->out, (host->rate_out + divisor - 1) / divisor);
  sim_port_rate(host->sim, &host->in, (host->rate_in + divisor - 1) / divisor);
}

/* ---- links ---- */

static void sim_link_break(sim_link *link, sim_end *near, int code, const char *text);

static sim_end *sim_other(const sim_end *end) { return &end->link->end[end == &end->link->end[0]]; }

static void sim_lane_purge(mlfab_sim *sim, sim_lane *lane) {
  sim_port_forget(sim, &lane->from->host->card->out, lane);
  sim_port_forget(sim, &lane->to->host->card->in, lane);
  sim_queue_free(sim, &lane->out);
  sim_queue_free(sim, &lane->flight);
  sim_queue_free(sim, &lane->in);
  sim_unput(sim, &lane->arrive);
  lane->stalled = 0;
}

/* Reports to an end that its link is down. */
static void sim_end_down(sim_end *end, int code, const char *text) {
  mlfab_sim *sim = end->host->sim;
  if (end->closed || end->told) return;
  end->told = 1;
  sim_unput(sim, &end->notice);
  sim_lane_purge(sim, &end->lane);
  end->down_item.end = end;
  end->down_item.kind = MLFAB_IO_DOWN;
  end->down_item.token = end->up ? 0 : end->token;
  end->down_item.code = code;
  end->down_item.text = text;
  sim_post(end->endpoint, &end->down_item);
}

/* Tells an end of an event that happened a latency ago. */
static void sim_end_notice(sim_end *end) {
  mlfab_sim *sim = end->host->sim;
  int cut = sim_is_cut(sim, end->host, sim_other(end)->host);
  if (end->link->broken) {
    end->waits = cut;
    if (!cut) sim_end_down(end, end->code, end->text);
  } else if (!cut) {
    end->waits = 0;
    end->up = 1;
    end->up_item.end = end;
    end->up_item.kind = MLFAB_IO_UP;
    end->up_item.token = end->token;
    sim_post(end->endpoint, &end->up_item);
  } else if (sim->now < end->until_ns) {
    end->waits = 1;
    sim_put(sim, &end->notice, end->until_ns);
  } else {
    sim_link_break(end->link, end, MLFAB_ERR_TIMEOUT, "connecting took too long");
  }
}

static void sim_link_free(sim_link *link) {
  mlfab_sim *sim = link->end[0].host->sim;
  for (int i = 0; i < 2; i++) {
    sim_lane_purge(sim, &link->end[i].lane);
    sim_source_drop(sim, &link->end[i].lane.arrive);
    sim_source_drop(sim, &link->end[i].notice);
  }
  sim->links[link->slot] = NULL;
  sim->link_count--;
  sim_give(sim, link, sizeof *link);
}

/* Breaks a link; all frames in flight are lost. `near` is told at once, the other end a latency later. */
static void sim_link_break(sim_link *link, sim_end *near, int code, const char *text) {
  sim_end *far = sim_other(near);
  mlfab_sim *sim = near->host->sim;
  if (link->broken) return;
  link->broken = 1;
  for (int i = 0; i < 2; i++) sim_lane_purge(sim, &link->end[i].lane);
  sim_end_down(near, code, text);
  if (far->closed && near->closed) {
    sim_link_free(link);
  } else if (!far->closed && !far->told) {
    far->code = code;
    far->text = text;
    if (sim_is_cut(sim, near->host, far->host)) {
      far->waits = 1;
      sim_unput(sim, &far->notice);
    } else {
      sim_put(sim, &far->notice, sim->now + sim_latency(near->host, far->host));
    }
  }
}

static int sim_copy_bulk(mlfab_sim *sim, sim_item *frame) {
  if (!frame->bulk || frame->copy) return 0;
  frame->copy = sim_take(sim, frame->bulk_bytes, 0);
  if (!frame->copy) return MLFAB_ERR_MEMORY;
  memcpy(frame->copy, frame->bulk, frame->bulk_bytes);
  frame->bulk = frame->copy;
  return 0;
}

/* Copies the bulks that the lane still borrows; with `token`, only the bulks of that send. */
static int sim_lane_detach(mlfab_sim *sim, sim_lane *lane, const uint64_t *token) {
  sim_port *port = &lane->from->host->card->out;
  int status = 0;
  if (port->lane == lane && (!token || port->frame->token == *token))
    status = sim_copy_bulk(sim, port->frame);
  for (sim_item *frame = lane->out.head; frame && !status; frame = frame->next)
    if (!token || frame->token == *token) status = sim_copy_bulk(sim, frame);
  return status;
}

static void sim_lane_left(mlfab_sim *sim, sim_lane *lane, sim_item *frame);

/* Sends a frame, or the end of the lane. */
static void sim_lane_offer(mlfab_sim *sim, sim_lane *lane, sim_item *frame) {
  if (sim_is_local(lane->from->host, lane->to->host)) {
    sim_lane_left(sim, lane, frame);
  } else {
    sim_append(&lane->out, frame);
    sim_port_offer(sim, &lane->from->host->card->out, lane);
  }
}

/* This end is closed: it gets no more events; accepted frames are still sent. */
static void sim_end_close(sim_end *end) {
  mlfab_sim *sim = end->host->sim;
  sim_end *other = sim_other(end);
  sim_queue keep = {NULL, NULL};
  sim_item *item;
  if (end->closed) return;
  while ((item = sim_pop(&end->endpoint->events))) {
    if (item->end == end) {
      sim_item_free(sim, item);
    } else {
      sim_append(&keep, item);
    }
  }
  end->endpoint->events = keep;
  end->closed = 1;
  sim_unput(sim, &end->notice);
  if (end->prev) {
    end->prev->next = end->next;
  } else {
    end->host->ends = end->next;
  }
  if (end->next) end->next->prev = end->prev;
  if (other->closed) {
    sim_link_free(end->link);
  } else if (!end->link->broken && !end->told) {
    if (sim_lane_detach(sim, &end->lane, NULL)) {
      sim_link_break(end->link, end, MLFAB_ERR_MEMORY, "no memory for the last frames");
      return;
    }
    end->lane.fin.kind = MLFAB_IO_DOWN;
    sim_lane_offer(sim, &end->lane, &end->lane.fin);
  }
}

static void sim_end_init(sim_link *link, int side, sim_endpoint *endpoint, uint64_t token) {
  sim_end *end = &link->end[side];
  sim_host *host = endpoint->host;
  end->link = link;
  end->host = host;
  end->endpoint = endpoint;
  end->number = link->slot * 2 + (uint32_t)side + 1;
  end->token = token;
  end->next = host->ends;
  if (end->next) end->next->prev = end;
  host->ends = end;
  end->lane.from = end;
  end->lane.to = sim_other(end);
  sim_source_add(host->sim, &end->notice, SIM_NOTICE, end);
  sim_source_add(host->sim, &end->lane.arrive, SIM_ARRIVE, &end->lane);
}

/* The next free slot in turn, so that numbers are not reused soon; ~0: out of memory. */
static uint32_t sim_slot(mlfab_sim *sim) {
  if (sim->link_count >= sim->slots / 2) {
    uint32_t room = sim->slots ? sim->slots * 2 : 64;
    if (room > 1u << 23) return ~0u; /* numbers of ends stay below 2^24 */
    sim_link **links = sim_larger(sim, sim->links, sim->slots, room, sizeof *links);
    if (!links) return ~0u;
    sim_drop(sim, sim->links, sim->slots * sizeof *links);
    sim->links = links;
    sim->slots = room;
  }
  do sim->last_slot = (sim->last_slot + 1) % sim->slots;
  while (sim->links[sim->last_slot]);
  return sim->last_slot;
}

/* A link from endpoint `a`, which connected with `token`, to `b`; NULL without memory. */
static sim_link *sim_link_make(mlfab_sim *sim, sim_endpoint *a, sim_endpoint *b, uint64_t token) {
  uint32_t slot = sim_slot(sim);
  if (slot == ~0u || sim_sources_reserve(sim, 4)) return NULL;
  sim_link *link = sim_take(sim, sizeof *link, sizeof *link);
  if (!link) return NULL;
  link->slot = slot;
  sim->links[slot] = link;
  sim->link_count++;
  sim_end_init(link, 0, a, token);
  sim_end_init(link, 1, b, 0);
  return link;
}

/* ---- frames in flight ---- */

static void sim_lane_reading(sim_lane *lane, uint64_t bytes) {
  sim_end *from = lane->from;
  lane->buffered -= bytes;
  if (!lane->wants || lane->buffered > from->host->sim->options.buffer_bytes / 2) return;
  lane->wants = 0;
  if (from->closed || from->told || from->link->broken || from->writable_item.queued) return;
  from->writable_item.end = from;
  from->writable_item.kind = MLFAB_IO_WRITABLE;
  sim_post(from->endpoint, &from->writable_item);
}

/* The whole frame has arrived. */
static void sim_deliver(mlfab_sim *sim, sim_lane *lane, sim_item *frame) {
  sim_end *to = lane->to;
  if (frame->kind == MLFAB_IO_DOWN) {
    sim_end_down(to, MLFAB_ERR_PEER_CLOSED, "the peer closed the connection");
    return;
  }
  if (to->closed) {
    sim_item_free(sim, frame);
    return;
  }
  assert(to->up);
  frame->end = to;
  sim_post(to->endpoint, frame);
  if (!sim_is_local(to->host, lane->from->host) && sim_chance(sim, sim->options.duplicate))
    sim_link_break(to->link, to, MLFAB_ERR_PEER_CLOSED, "connection lost (simulated duplicate)");
}

/* The frame's last byte has left the sender. */
static void sim_lane_left(mlfab_sim *sim, sim_lane *lane, sim_item *frame) {
  sim_end *from = lane->from;
  sim_link *link = from->link;
  uint64_t delay = sim_latency(from->host, lane->to->host);
  if (frame->kind == MLFAB_IO_FRAME) {
    int local = sim_is_local(from->host, lane->to->host);
    if (!local && !link->broken && sim_chance(sim, sim->options.loss)) {
      sim_item_free(sim, frame);
      sim_link_break(link, from, MLFAB_ERR_PEER_CLOSED, "connection lost (simulated loss)");
      return;
    }
    if (sim_copy_bulk(sim, frame)) {
      sim_item_free(sim, frame);
      sim_link_break(link, from, MLFAB_ERR_MEMORY, "no memory for a frame under way");
      return;
    }
    if (frame->sent && !from->closed) {
      frame->sent->end = from;
      sim_post(from->endpoint, frame->sent);
      frame->sent = NULL;
    }
    /* the far end is gone, and this end does not know yet: no acknowledgement */
    if (link->broken) {
      sim_item_free(sim, frame);
      return;
    }
    if (!local && sim->options.latency_jitter > 0)
      delay +=
          mlfab__rng_below(&sim->prng, (uint64_t)(sim->options.latency_jitter * (double)delay) + 1);
    if (!local && sim_chance(sim, sim->options.reorder))
      delay += 1 + mlfab__rng_below(&sim->prng, 20 * sim->options.latency_ns);
  }
  lane->last_ns = mlfab__max(lane->last_ns, sim->now + delay);
  frame->arrive_ns = lane->last_ns;
  sim_append(&lane->flight, frame);
  if (lane->flight.head == frame) sim_put(sim, &lane->arrive, frame->arrive_ns);
}

/* Takes the arrival of the first frame in flight; a partition delays it. */
static void sim_lane_arrives(mlfab_sim *sim, sim_lane *lane) {
  sim_host *to = lane->to->host;
  if (sim_is_cut(sim, lane->from->host, to)) {
    lane->stalled = 1;
    return;
  }
  sim_item *frame = sim_pop(&lane->flight);
  if (lane->flight.head) sim_put(sim, &lane->arrive, lane->flight.head->arrive_ns);
  if (sim_is_local(lane->from->host, to)) {
    sim_deliver(sim, lane, frame);
  } else {
    sim_append(&lane->in, frame);
    sim_port_offer(sim, &to->card->in, lane);
  }
}

static void sim_port_done(mlfab_sim *sim, sim_port *port) {
  sim_lane *lane = port->lane;
  sim_item *frame = sim_port_clear(sim, port);
  sim_port_queue(port, lane);
  if (port->inbound) {
    sim_deliver(sim, lane, frame);
  } else {
    sim_lane_left(sim, lane, frame);
  }
  sim_port_start(sim, port);
}

/* ---- connecting ---- */

static void sim_attempt_unlist(sim_attempt *attempt) {
  sim_attempt **at = &attempt->endpoint->host->attempts;
  while (*at != attempt) at = &(*at)->next;
  *at = attempt->next;
  sim_source_drop(attempt->endpoint->host->sim, &attempt->source);
}

static void sim_attempt_fails(sim_attempt *attempt, int code, const char *text) {
  sim_attempt_unlist(attempt);
  attempt->item.kind = MLFAB_IO_DOWN;
  attempt->item.token = attempt->token;
  attempt->item.code = code;
  attempt->item.text = attempt->why;
  snprintf(attempt->why, sizeof attempt->why, "sim:%u: %s", (unsigned)attempt->to->index, text);
  sim_post(attempt->endpoint, &attempt->item);
}

static void sim_attempt_arrives(mlfab_sim *sim, sim_attempt *attempt) {
  sim_host *from = attempt->endpoint->host, *to = attempt->to;
  uint64_t latency = sim_latency(from, to);
  if (sim_is_cut(sim, from, to)) {
    if (sim->now >= attempt->until_ns) {
      sim_attempt_fails(attempt, MLFAB_ERR_TIMEOUT, "connecting took too long");
    } else {
      sim_put(sim, &attempt->source, mlfab__min(sim->now + SIM_RETRY_NS, attempt->until_ns));
    }
    return;
  }
  if (attempt->code) {
    sim_attempt_fails(attempt, attempt->code, attempt->text);
    return;
  }
  sim_link *link = NULL;
  if (to->endpoint) link = sim_link_make(sim, attempt->endpoint, to->endpoint, attempt->token);
  if (!link) { /* the failure returns after one latency */
    attempt->code = to->endpoint ? MLFAB_ERR_MEMORY : MLFAB_ERR_PEER_CLOSED;
    attempt->text = to->endpoint ? "no memory for a link" : "nobody listens there";
    sim_put(sim, &attempt->source, sim->now + latency);
    return;
  }
  link->end[0].until_ns = attempt->until_ns;
  sim_put(sim, &link->end[0].notice, sim->now + latency);
  link->end[1].up = 1;
  link->end[1].up_item.end = &link->end[1];
  link->end[1].up_item.kind = MLFAB_IO_UP;
  sim_post(to->endpoint, &link->end[1].up_item);
  sim_attempt_unlist(attempt);
  sim_give(sim, attempt, sizeof *attempt);
}

/* Forgets a pending connect with this token without an event. */
static void sim_connect_forget(sim_endpoint *endpoint, uint64_t token) {
  mlfab_sim *sim = endpoint->host->sim;
  sim_queue keep = {NULL, NULL};
  for (sim_attempt *a = endpoint->host->attempts, *next; a; a = next) {
    next = a->next;
    if (a->token != token) continue;
    sim_attempt_unlist(a);
    sim_give(sim, a, sizeof *a);
  }
  for (sim_end *end = endpoint->host->ends, *next; end; end = next) {
    next = end->next;
    if (end->up || end->token != token) continue;
    sim_end_close(end);
    break; /* at most one is pending; closing a link to itself may have freed `next` */
  }
  for (sim_item *item; (item = sim_pop(&endpoint->events));) {
    if (!item->end && item->token == token) {
      sim_give(sim, item, item->own_bytes);
    } else {
      sim_append(&keep, item);
    }
  }
  endpoint->events = keep;
}

/* The host of an address "sim:<number>", or NULL. */
static sim_host *sim_resolve(mlfab_sim *sim, const char *address) {
  uint64_t number = 0;
  if (strncmp(address, "sim:", 4) != 0 || !address[4]) return NULL;
  for (const char *c = address + 4; *c; c++) {
    if (*c < '0' || *c > '9' || number > UINT32_MAX) return NULL;
    number = number * 10 + (uint64_t)(*c - '0');
  }
  return number < sim->options.hosts ? &sim->hosts[number] : NULL;
}

/* ---- the transport table ---- */

static sim_end *sim_find(sim_endpoint *endpoint, uint32_t number) {
  mlfab_sim *sim = endpoint->host->sim;
  uint32_t slot = (number - 1) / 2;
  if (!number || slot >= sim->slots || !sim->links[slot]) return NULL;
  sim_end *end = &sim->links[slot]->end[(number - 1) % 2];
  return end->endpoint == endpoint && !end->closed ? end : NULL;
}

static int sim_open(const mlfab_transport_options *options, void **self_p, char *address) {
  sim_host *host = options->user;
  if (!host)
    return MLFAB__FAIL(options->error, MLFAB_ERR_CONFIG,
                       "the simulator needs transport_user = mlfab_sim_host(...)");
  if (host->endpoint)
    return MLFAB__FAIL(options->error, MLFAB_ERR_ADDRESS_IN_USE,
                       "simulated host %u has a node already", (unsigned)host->index);
  if (options->listen && options->listen[0] && sim_resolve(host->sim, options->listen) != host)
    return MLFAB__FAIL(options->error, MLFAB_ERR_ADDRESS,
                       "simulated host %u cannot listen at \"%s\"", (unsigned)host->index,
                       options->listen);
  sim_endpoint *endpoint = sim_take(host->sim, sizeof *endpoint, sizeof *endpoint);
  if (!endpoint) return MLFAB__FAIL(options->error, MLFAB_ERR_MEMORY, "out of memory");
  endpoint->host = host;
  host->endpoint = endpoint;
  host->opened = 1;
  snprintf(address, 256, "sim:%u", (unsigned)host->index);
  *self_p = endpoint;
  return 0;
}

/* Disconnects the endpoint from the network. */
static void sim_vacate(sim_endpoint *endpoint) {
  sim_host *host = endpoint->host;
  while (host->attempts) {
    sim_attempt *attempt = host->attempts;
    sim_attempt_unlist(attempt);
    sim_give(host->sim, attempt, sizeof *attempt);
  }
  while (host->ends) sim_end_close(host->ends);
  sim_queue_free(host->sim, &endpoint->events);
  host->endpoint = NULL;
}

static void sim_close(void *self) {
  sim_endpoint *endpoint = self;
  sim_host *host = endpoint->host;
  mlfab_sim *sim = host->sim;
  if (!endpoint->gone) {
    sim_vacate(endpoint);
    host->ctx = NULL;
    host->ctx_p = NULL;
    sim_unput(sim, &host->deadline);
  }
  sim_queue_free(sim, &endpoint->taken);
  sim_give(sim, endpoint, sizeof *endpoint);
}

static int sim_reach(void *self, const char *address) {
  sim_endpoint *endpoint = self;
  return sim_resolve(endpoint->host->sim, address) != NULL;
}

static int sim_connect(void *self, const char *address, uint64_t token) {
  sim_endpoint *endpoint = self;
  sim_host *host = endpoint->host;
  mlfab_sim *sim = host->sim;
  sim_host *to = sim_resolve(sim, address);
  sim_attempt *attempt = NULL;
  if (!to) return MLFAB_ERR_ADDRESS;
  if (endpoint->gone) return MLFAB_ERR_IO;
  if (!sim_sources_reserve(sim, 1)) attempt = sim_take(sim, sizeof *attempt, sizeof *attempt);
  if (!attempt) return MLFAB_ERR_MEMORY;
  sim_connect_forget(endpoint, token);
  sim_source_add(sim, &attempt->source, SIM_SYN, attempt);
  attempt->endpoint = endpoint;
  attempt->to = to;
  attempt->token = token;
  attempt->until_ns = sim->now + SIM_CONNECT_NS;
  attempt->item.own_bytes = sizeof *attempt;
  attempt->next = host->attempts;
  host->attempts = attempt;
  sim_put(sim, &attempt->source, sim->now + sim_latency(host, to));
  sim_touch(host, 0);
  return 0;
}

static void sim_disconnect(void *self, uint32_t link) {
  sim_endpoint *endpoint = self;
  sim_end *end = endpoint->gone ? NULL : sim_find(endpoint, link);
  if (end) sim_end_close(end);
}

static int sim_send(void *self, uint32_t link, const void *head, uint32_t head_bytes,
                    const void *bulk, uint32_t bulk_bytes, uint64_t token) {
  sim_endpoint *endpoint = self;
  mlfab_sim *sim = endpoint->host->sim;
  sim_end *end = endpoint->gone ? NULL : sim_find(endpoint, link);
  uint64_t bytes = (uint64_t)head_bytes + bulk_bytes;
  if (!end || end->told || !end->up) return MLFAB_ERR_PEER_CLOSED;
  if (!head_bytes || head_bytes > MLFAB_HEADER_BYTES + MLFAB_META_MAX ||
      bulk_bytes > MLFAB_BULK_MAX)
    return MLFAB_ERR_LIMIT;
  sim_lane *lane = &end->lane;
  /* A frame larger than the buffer passes alone. */
  if (lane->buffered && lane->buffered + bytes > sim->options.buffer_bytes) {
    lane->wants = 1;
    return MLFAB_ERR_AGAIN;
  }
  size_t own_bytes = sizeof(sim_item) + head_bytes;
  sim_item *frame = sim_take(sim, own_bytes, sizeof *frame);
  if (!frame) return MLFAB_ERR_MEMORY;
  frame->own_bytes = own_bytes;
  frame->kind = MLFAB_IO_FRAME;
  frame->token = token;
  frame->head_bytes = head_bytes;
  frame->bulk_bytes = bulk_bytes;
  frame->bulk = bulk_bytes ? bulk : NULL;
  memcpy(frame + 1, head, head_bytes);
  if (token) frame->sent = sim_take(sim, sizeof *frame, sizeof *frame);
  if (token ? !frame->sent : sim_copy_bulk(sim, frame)) {
    sim_item_free(sim, frame);
    return MLFAB_ERR_MEMORY;
  }
  if (token) {
    frame->sent->own_bytes = sizeof *frame;
    frame->sent->kind = MLFAB_IO_SENT;
    frame->sent->token = token;
  }
  lane->buffered += bytes;
  sim_lane_offer(sim, lane, frame);
  sim_touch(end->host, 0);
  return 0;
}

static void sim_flush(void *self) {
  sim_endpoint *endpoint = self;
  sim_touch(endpoint->host, 0);
}

static int sim_poll(void *self, mlfab_io_event *event_p) {
  sim_endpoint *endpoint = self;
  mlfab_sim *sim = endpoint->host->sim;
  if (endpoint->gone || sim_paused(endpoint->host)) return 0;
  sim_item *item = sim_pop(&endpoint->events);
  if (!item) return 0;
  sim_end *end = item->end;
  item->queued = 0;
  memset(event_p, 0, sizeof *event_p);
  event_p->kind = item->kind;
  event_p->link = end && end->up ? end->number : 0;
  event_p->token = item->token;
  event_p->code = item->code;
  event_p->text = item->text;
  if (item->kind == MLFAB_IO_FRAME) {
    event_p->token = 0;
    event_p->head = item + 1;
    event_p->head_bytes = item->head_bytes;
    event_p->bulk = item->bulk;
    event_p->bulk_bytes = item->bulk_bytes;
    event_p->opaque = item;
    sim_append(&endpoint->taken, item);
    sim_lane_reading(&sim_other(end)->lane, (uint64_t)item->head_bytes + item->bulk_bytes);
  } else if (item->kind == MLFAB_IO_DOWN && end) {
    sim_end_close(end);
  } else if (item->kind == MLFAB_IO_DOWN) {
    event_p->opaque = item;
    sim_append(&endpoint->taken, item);
  } else if (item->own_bytes) {
    sim_give(sim, item, item->own_bytes);
  }
  sim_touch(endpoint->host, 0);
  return 1;
}

static void sim_release(void *self, const mlfab_io_event *event) {
  sim_endpoint *endpoint = self;
  sim_item *before = NULL, *item = endpoint->taken.head;
  while (item && item != event->opaque) {
    before = item;
    item = item->next;
  }
  if (!item) return;
  if (before) {
    before->next = item->next;
  } else {
    endpoint->taken.head = item->next;
  }
  if (endpoint->taken.tail == item) endpoint->taken.tail = before;
  sim_item_free(endpoint->host->sim, item);
}

static int sim_detach(void *self, uint32_t link, uint64_t token) {
  sim_endpoint *endpoint = self;
  sim_end *end = endpoint->gone ? NULL : sim_find(endpoint, link);
  return end ? sim_lane_detach(endpoint->host->sim, &end->lane, &token) : 0;
}

static int sim_step_until(mlfab_sim *sim, uint64_t limit_ns);

static void sim_wait(void *self, uint64_t timeout_ns) {
  sim_endpoint *endpoint = self;
  sim_host *host = endpoint->host;
  mlfab_sim *sim = host->sim;
  uint64_t until = mlfab__add_sat(sim->now, timeout_ns);
  sim_host *below = sim->waiting;
  host->busy++;
  host->waits++;
  sim->depth++;
  sim->waiting = host;
  if (below) sim_touch(below, 1); /* it can no longer drive itself */
  while (!endpoint->woken && (!endpoint->events.head || sim_paused(host))) {
    if (sim_step_until(sim, until)) continue;
    if (until != MLFAB__NEVER) sim->now = mlfab__max(sim->now, until);
    break;
  }
  endpoint->woken = 0;
  sim->waiting = below;
  sim->depth--;
  host->waits--;
  if (!--host->busy) {
    sim_touch(host, 1);
  }
}

static void sim_wake(void *self) {
  sim_endpoint *endpoint = self;
  endpoint->woken = 1;
}

static int sim_fd(void *self) {
  (void)self;
  return -1;
}

static int sim_arm(void *self, int on) {
  (void)self;
  (void)on;
  return 0;
}

/* A paused host is a stopped process: its system answers. A host behind a partition, or with rate 0, gives no answer.
 * Frames are stored and forwarded, so bytes count as coming while any of their lane is under way. */
static int sim_probe(void *self, uint32_t link) {
  sim_endpoint *endpoint = self;
  const sim_end *end = endpoint->gone ? NULL : sim_find(endpoint, link);
  if (!end) return MLFAB_ERR_AGAIN;
  const sim_host *a = end->host->card, *b = sim_other(end)->host->card;
  int cut = sim_is_cut(end->host->sim, end->host, sim_other(end)->host);
  int stands = a == b || (a->in.rate && a->out.rate && b->in.rate && b->out.rate);
  if (cut || !stands || end->link->broken) return MLFAB_ERR_AGAIN;
  const sim_lane *lane = &sim_other(end)->lane;
  return lane->out.head || lane->flight.head || lane->in.head || b->out.lane == lane ||
         a->in.lane == lane;
}

/* The difference of a port's totals to *last, which it updates. */
static sim_meter sim_port_since(const mlfab_sim *sim, const sim_port *port, sim_meter *last) {
  sim_meter now = sim_port_meter(sim, port);
  sim_meter since = {now.passed - last->passed, now.busy_ns - last->busy_ns};
  *last = now;
  return since;
}

static double sim_delivery(const sim_meter *meter) {
  if (meter->passed < SIM_LOAD_BYTES || !meter->busy_ns) return 0;
  return (double)meter->passed * 1e9 / (double)meter->busy_ns;
}

/* Measures all traffic of the ports that this host uses, for any host. */
static int sim_measure(void *self, uint64_t now_ns, mlfab_measure *measure_p) {
  sim_endpoint *endpoint = self;
  (void)now_ns; /* the simulator's own time is used */
  if (endpoint->gone) return 0;
  const mlfab_sim *sim = endpoint->host->sim;
  const sim_host *card = endpoint->host->card;
  uint64_t elapsed_ns = sim->now - endpoint->measured_ns;
  int first = endpoint->measured_ns == 0;
  if (!elapsed_ns) return 0;
  sim_meter in = sim_port_since(sim, &card->in, &endpoint->in);
  sim_meter out = sim_port_since(sim, &card->out, &endpoint->out);
  endpoint->measured_ns = sim->now;
  if (first) return 0;
  memset(measure_p, 0, sizeof *measure_p);
  measure_p->elapsed_ns = elapsed_ns;
  measure_p->bytes_in = in.passed;
  measure_p->bytes_out = out.passed;
  measure_p->delivery_in = sim_delivery(&in);
  measure_p->delivery_out = sim_delivery(&out);
  measure_p->limited_in = in.busy_ns < elapsed_ns - elapsed_ns / 8;
  measure_p->limited_out = out.busy_ns < elapsed_ns - elapsed_ns / 8;
  return 1;
}

MLFAB_API const mlfab_transport *mlfab_transport_sim(void) {
  static const mlfab_transport table = {
      sizeof(mlfab_transport),
      MLFAB_TRANSPORT_ABI,
      "sim",
      MLFAB_CAP_RELIABLE | MLFAB_CAP_GHOST | MLFAB_CAP_PROBE | MLFAB_CAP_VIRTUAL,
      0,
      sim_open,
      sim_close,
      sim_reach,
      sim_connect,
      sim_disconnect,
      sim_send,
      sim_flush,
      sim_poll,
      sim_release,
      sim_detach,
      sim_wait,
      sim_wake,
      sim_fd,
      sim_arm,
      sim_measure,
      sim_probe,
      NULL,
      NULL,
      NULL};
  return &table;
}

/* ---- driving contexts ---- */

static void sim_read_deadline(sim_host *host, uint64_t earliest_ns) {
  uint64_t at_ns = MLFAB__NEVER;
  if (mlfab_deadline(host->ctx, &at_ns) || at_ns == MLFAB__NEVER) {
    sim_unput(host->sim, &host->deadline);
  } else {
    sim_put(host->sim, &host->deadline, at_ns > host->sim->now ? at_ns : earliest_ns);
  }
}

/* Can it be driven? Among hosts in a wait, only the innermost drives itself; the others may stay below it on the stack
 * for long. */
static int sim_idle(const sim_host *host) {
  return host->ctx && host->busy == host->waits && host->sim->waiting != host;
}

static void sim_drive(sim_host *host) {
  int rounds = 0;
  if (!sim_idle(host) || sim_paused(host)) return;
  host->busy++;
  while (rounds++ < SIM_ROUNDS && host->ctx && mlfab_progress(host->ctx, 0) > 0) continue;
  host->busy--;
  /* its wait checks whether it is over */
  if (host->waits && host->endpoint) host->endpoint->woken = 1;
  /* A context that always has more work must not stop time. */
  if (host->ctx) sim_read_deadline(host, host->sim->now + SIM_LOCAL_NS);
  if (host->watch_fn) sim_put(host->sim, &host->watch, host->sim->now);
}

/* Drives every context that has work, until none has. */
static void sim_settle(mlfab_sim *sim) {
  sim_host *host;
  while ((host = sim->listed_head)) {
    int ready = host->ready;
    host->ready = 0;
    if (ready) {
      sim_drive(host);
    } else {
      if (sim_idle(host)) sim_read_deadline(host, sim->now);
    }
    if (host->ready) continue; /* it got new work meanwhile */
    sim->listed_head = host->next_listed;
    host->listed = 0; /* only now, because driving touches it */
  }
}

/* ---- faults ---- */

static void sim_set_cut(mlfab_sim *sim, uint32_t a, uint32_t b, int who, int cut) {
  size_t hosts = sim->options.hosts, pair[2] = {a * hosts + b, b * hosts + a};
  for (int i = 0; i < 2; i++) {
    unsigned now = sim->cuts[pair[i]] & (unsigned)~who;
    sim->cuts[pair[i]] = (uint8_t)(cut ? now | (unsigned)who : now);
  }
  if (sim->cuts[pair[0]]) return;
  for (uint32_t slot = 0; slot < sim->slots; slot++) {
    sim_link *link = sim->links[slot];
    if (!link) continue;
    uint32_t x = link->end[0].host->index, y = link->end[1].host->index;
    if ((x != a || y != b) && (x != b || y != a)) continue;
    for (int i = 0; i < 2; i++) {
      sim_end *end = &link->end[i];
      uint64_t at_ns = sim->now + sim->options.latency_ns;
      if (end->lane.stalled) sim_put(sim, &end->lane.arrive, at_ns);
      /* UP at once: frames behind it may be about to arrive. */
      if (end->waits && !end->closed) sim_put(sim, &end->notice, link->broken ? at_ns : sim->now);
      end->lane.stalled = end->waits = 0;
    }
  }
}

static int sim_cuts_reserve(mlfab_sim *sim) {
  if (!sim->cuts) sim->cuts = mlfab__alloc_array(&sim->env, sim->options.hosts, sim->options.hosts);
  return sim->cuts ? 0 : MLFAB_ERR_MEMORY;
}

static sim_timer *sim_timer_make(mlfab_sim *sim, uint32_t kind) {
  if (sim_sources_reserve(sim, 1)) return NULL;
  sim_timer *timer = sim_take(sim, sizeof *timer, sizeof *timer);
  if (!timer) return NULL;
  sim_source_add(sim, &timer->source, kind, timer);
  timer->next = sim->timers;
  if (timer->next) timer->next->prev = timer;
  sim->timers = timer;
  return timer;
}

static void sim_timer_free(mlfab_sim *sim, sim_timer *timer) {
  if (timer->prev) {
    timer->prev->next = timer->next;
  } else {
    sim->timers = timer->next;
  }
  if (timer->next) timer->next->prev = timer->prev;
  sim_source_drop(sim, &timer->source);
  sim_give(sim, timer, sizeof *timer);
}

static void sim_menu_partition(mlfab_sim *sim) {
  uint32_t hosts = sim->options.hosts;
  uint32_t a = (uint32_t)mlfab__rng_below(&sim->prng, hosts);
  uint32_t b = (uint32_t)mlfab__rng_below(&sim->prng, hosts);
  uint64_t lasts_ns = 1 + mlfab__rng_below(&sim->prng, sim->options.partition_ns);
  if (a == b || sim_cuts_reserve(sim)) return;
  if (sim->cuts[(size_t)a * hosts + b] & SIM_CUT_MENU) return;
  sim_timer *timer = sim_timer_make(sim, SIM_HEAL);
  if (!timer) return;
  timer->a = a;
  timer->b = b;
  sim_set_cut(sim, a, b, SIM_CUT_MENU, 1);
  sim_put(sim, &timer->source, sim->now + lasts_ns);
}

static void sim_fault_tick(mlfab_sim *sim) {
  const mlfab_sim_options *o = &sim->options;
  sim->fault_stands = 0;
  if (!sim->heap.count) return;
  if (sim_chance(sim, o->partition / SIM_FAULT_TICKS)) sim_menu_partition(sim);
  for (uint32_t i = 0; i < o->hosts; i++) {
    sim_host *host = &sim->hosts[i];
    if (host->crash_fn && sim_chance(sim, o->crash / SIM_FAULT_TICKS) && host->endpoint)
      mlfab_sim_crash(sim, i);
    if (sim_chance(sim, o->pause / SIM_FAULT_TICKS))
      mlfab_sim_pause(sim, i, 1 + mlfab__rng_below(&sim->prng, o->pause_ns));
    if (sim_chance(sim, o->slow / SIM_FAULT_TICKS) && !host->card->is_slow) {
      host->card->is_slow = 1;
      sim_host_rates(host->card);
      sim_put(sim, &host->card->slow, sim->now + 1 + mlfab__rng_below(&sim->prng, o->pause_ns));
    }
  }
  if (sim->faults && !sim->fault_stands) {
    sim->fault_stands = 1;
    sim_put(sim, &sim->fault,
            sim->now + 1 + mlfab__rng_below(&sim->prng, 2 * SIM_SECOND / SIM_FAULT_TICKS));
  }
}

/* Crashes a host: breaks its links, kills its endpoint and frees its context. */
static void sim_crash_now(sim_host *host) {
  mlfab_sim *sim = host->sim;
  sim_endpoint *endpoint = host->endpoint;
  mlfab *ctx = host->ctx;
  if (host->crash_waits) sim->crash_waits--;
  host->crash_waits = 0;
  if (!endpoint) return;
  sim_mix(sim, sim->now ^ host->index);
  for (sim_end *end = host->ends, *next; end; end = next) {
    next = end->next;
    sim_link_break(end->link, end, MLFAB_ERR_PEER_CLOSED, "the peer's host crashed");
  }
  sim_vacate(endpoint);
  endpoint->gone = 1;
  sim_unput(sim, &host->deadline);
  host->ctx = NULL;
  if (host->ctx_p) *host->ctx_p = NULL;
  host->ctx_p = NULL;
  if (ctx) mlfab_abandon(&ctx);
  if (host->crash_fn)
    sim_put(sim, &host->restart, sim->now + mlfab__rng_below(&sim->prng, SIM_SECOND));
}

/* ---- stepping ---- */

static void sim_fire_timer(mlfab_sim *sim, sim_timer *timer) {
  if (timer->source.kind == SIM_HEAL) {
    uint32_t a = timer->a, b = timer->b;
    sim_timer_free(sim, timer);
    sim_set_cut(sim, a, b, SIM_CUT_MENU, 0);
  } else if (sim->depth >= SIM_DEPTH) {
    /* Limits nested waits in callbacks: this callback runs when some of them have ended. */
    sim_put(sim, &timer->source, sim->now + 100 * SIM_LOCAL_NS);
  } else {
    void (*fn)(void *user) = timer->fn;
    void *user = timer->user;
    sim_timer_free(sim, timer);
    fn(user);
  }
}

static void sim_fire(mlfab_sim *sim, const sim_source *source) {
  sim_host *host = source->owner; /* if the owner is a host */
  switch (source->kind) {
    case SIM_NOTICE:
      sim_end_notice(source->owner);
      break;
    case SIM_SYN:
      sim_attempt_arrives(sim, source->owner);
      break;
    case SIM_ARRIVE:
      sim_lane_arrives(sim, source->owner);
      break;
    case SIM_PORT:
      sim_port_done(sim, source->owner);
      break;
    case SIM_FAULT:
      sim_fault_tick(sim);
      break;
    case SIM_SLOW_END:
      host->is_slow = 0;
      sim_host_rates(host);
      break;
    case SIM_PAUSE_END:
    case SIM_DEADLINE:
      sim_touch(host, 1);
      break;
    case SIM_WATCH:
      if (sim->depth >= SIM_DEPTH) { /* as with timers */
        sim_put(sim, &host->watch, sim->now + 100 * SIM_LOCAL_NS);
      } else if (host->watch_fn) {
        host->watch_fn(host->watch_user);
      }
      break;
    case SIM_RESTART:
      if (host->crash_fn) host->crash_fn(host->crash_user, host->index);
      break;
    default:
      sim_fire_timer(sim, source->owner);
      break;
  }
}

/* Executes the next event at limit_ns or before; 0 when there is none. */
static int sim_step_until(mlfab_sim *sim, uint64_t limit_ns) {
  for (uint32_t i = 0; sim->crash_waits && i < sim->options.hosts; i++)
    if (sim->hosts[i].crash_waits && !sim->hosts[i].busy) sim_crash_now(&sim->hosts[i]);
  sim_settle(sim);
  const mlfab__heap_entry *top = mlfab__heap_top(&sim->heap);
  if (!top || top->time > limit_ns) return 0;
  const sim_source *source = sim->sources[top->index];
  sim->now = mlfab__max(sim->now, top->time);
  mlfab__heap_remove(&sim->heap, source->index);
  sim_fire(sim, source);
  sim_settle(sim);
  return 1;
}

MLFAB_API int mlfab_sim_step(mlfab_sim *sim) { return sim ? sim_step_until(sim, MLFAB__NEVER) : 0; }

MLFAB_API void mlfab_sim_run(mlfab_sim *sim, uint64_t duration_ns) {
  if (!sim) return;
  uint64_t until = mlfab__add_sat(sim->now, duration_ns);
  while (sim_step_until(sim, until)) continue;
  sim->now = mlfab__max(sim->now, until);
}

/* ---- creating, opening, and control of the network ---- */

static int sim_options_check(const mlfab_sim_options *o) {
  const double p[] = {o->loss, o->duplicate, o->reorder, o->latency_jitter};
  const double rate[] = {o->partition, o->crash, o->pause, o->slow};
  if (!o->hosts || o->hosts > 1u << 20) return MLFAB_ERR_ARGUMENT;
  for (size_t i = 0; i < MLFAB__COUNT(p); i++)
    if (!(p[i] >= 0 && p[i] <= 1)) return MLFAB_ERR_ARGUMENT;
  for (size_t i = 0; i < MLFAB__COUNT(rate); i++)
    if (!(rate[i] >= 0 && rate[i] <= SIM_FAULT_TICKS)) return MLFAB_ERR_ARGUMENT;
  return 0;
}

static void sim_options_defaults(mlfab_sim_options *o) {
  if (!o->seed) o->seed = 1;
  if (!o->latency_ns) o->latency_ns = 50000;
  if (!o->rate_bytes_per_s) o->rate_bytes_per_s = 1250000000;
  if (!o->buffer_bytes) o->buffer_bytes = 4u << 20;
  if (!o->partition_ns) o->partition_ns = SIM_SECOND;
  if (!o->pause_ns) o->pause_ns = SIM_SECOND;
  o->env = NULL; /* the caller's struct; sim->env holds a copy */
}

static void sim_host_init(mlfab_sim *sim, uint32_t index) {
  sim_host *host = &sim->hosts[index];
  host->sim = sim;
  host->index = index;
  host->card = host;
  host->in.inbound = 1;
  host->in.rate = host->rate_in = sim->options.rate_bytes_per_s;
  host->out.rate = host->rate_out = sim->options.rate_bytes_per_s;
  sim_source_add(sim, &host->out.source, SIM_PORT, &host->out);
  sim_source_add(sim, &host->in.source, SIM_PORT, &host->in);
  sim_source_add(sim, &host->deadline, SIM_DEADLINE, host);
  sim_source_add(sim, &host->slow, SIM_SLOW_END, host);
  sim_source_add(sim, &host->pause, SIM_PAUSE_END, host);
  sim_source_add(sim, &host->restart, SIM_RESTART, host);
  sim_source_add(sim, &host->watch, SIM_WATCH, host);
}

MLFAB_API int mlfab_sim_create(const mlfab_sim_options *options, mlfab_sim **sim_p) {
  mlfab_sim_options o = {0};
  mlfab__env env;
  if (!options || !sim_p || options->size < offsetof(mlfab_sim_options, seed))
    return MLFAB_ERR_ARGUMENT;
  memcpy(&o, options, mlfab__min(options->size, sizeof o));
  int status = sim_options_check(&o);
  if (!status) status = mlfab__env_init(&env, o.env);
  if (status) return status;
  mlfab_sim *sim = mlfab__alloc(&env, sizeof *sim);
  if (!sim) return MLFAB_ERR_MEMORY;
  sim->env = env;
  sim->options = o;
  sim_options_defaults(&sim->options);
  sim->now = SIM_SECOND; /* not 0, which often means "unset" */
  sim->faults = o.partition > 0 || o.crash > 0 || o.pause > 0 || o.slow > 0;
  mlfab__rng_seed(&sim->prng, sim->options.seed);
  sim->hash = mlfab__mix(sim->options.seed);
  sim->hosts = mlfab__alloc_array(&sim->env, o.hosts, sizeof *sim->hosts);
  if (!sim->hosts || sim_sources_reserve(sim, o.hosts * 7 + 1)) {
    mlfab_sim_destroy(&sim);
    return MLFAB_ERR_MEMORY;
  }
  sim_source_add(sim, &sim->fault, SIM_FAULT, sim);
  for (uint32_t i = 0; i < o.hosts; i++) sim_host_init(sim, i);
  *sim_p = sim;
  return 0;
}

MLFAB_API void mlfab_sim_destroy(mlfab_sim **sim_p) {
  if (!sim_p || !*sim_p) return;
  mlfab_sim *sim = *sim_p;
  uint32_t hosts = sim->hosts ? sim->options.hosts : 0;
  for (uint32_t i = 0; i < hosts; i++)
    if (sim->hosts[i].endpoint) sim_close(sim->hosts[i].endpoint);
  while (sim->timers) sim_timer_free(sim, sim->timers);
  for (unsigned shelf = 0; shelf < SIM_SHELVES; shelf++) {
    for (void *block = sim->pool[shelf], *next; block; block = next) {
      memcpy(&next, block, sizeof next);
      mlfab__free(&sim->env, block, (size_t)64 << shelf);
    }
  }
  mlfab__heap_free(&sim->heap, &sim->env);
  sim_drop(sim, sim->sources, sim->indices * sizeof(sim_source *));
  sim_drop(sim, sim->free_indices, sim->indices * sizeof *sim->free_indices);
  sim_drop(sim, sim->links, sim->slots * sizeof(sim_link *));
  sim_drop(sim, sim->cuts, (size_t)hosts * hosts);
  sim_drop(sim, sim->hosts, hosts * sizeof *sim->hosts);
  mlfab__env env = sim->env;
  mlfab__free(&env, sim, sizeof *sim);
  *sim_p = NULL;
}

MLFAB_API uint64_t mlfab_sim_clock(void *sim) {
  const mlfab_sim *s = sim;
  return s ? s->now : 0;
}

MLFAB_API void *mlfab_sim_host(mlfab_sim *sim, uint32_t host) {
  return sim && host < sim->options.hosts ? &sim->hosts[host] : NULL;
}

/* The hooks of a driven context: the given hooks, and a clock that records its caller, because every call on a context
 * begins by reading the clock. */
static void *sim_hook_allocate(void *user, size_t bytes) {
  sim_host *host = user;
  return host->given.hooks.allocate(host->given.hooks.user, bytes);
}
static void sim_hook_release(void *user, void *memory, size_t bytes) {
  sim_host *host = user;
  host->given.hooks.release(host->given.hooks.user, memory, bytes);
}
static uint64_t sim_hook_clock(void *user) {
  sim_host *host = user;
  sim_touch(host, 0);
  return host->sim->now;
}
static void sim_hook_log(void *user, int level, const char *line) {
  sim_host *host = user;
  host->given.hooks.log(host->given.hooks.user, level, line);
}
static int sim_hook_store(void *user, const char *path, const void *data, size_t bytes) {
  sim_host *host = user;
  return host->given.hooks.store(host->given.hooks.user, path, data, bytes);
}

MLFAB_API int mlfab_sim_open(mlfab_sim *sim, uint32_t host_index, const mlfab_config *config,
                             mlfab **ctx_p, mlfab_error *error_p) {
  sim_host *host = mlfab_sim_host(sim, host_index);
  mlfab_config copy;
  mlfab *ctx = NULL;
  if (!host || !config || !ctx_p || config->size < sizeof config->size)
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT,
                       "mlfab_sim_open: an argument is NULL, or there is no such host");
  if (host->endpoint)
    return MLFAB__FAIL(error_p, MLFAB_ERR_ADDRESS_IN_USE, "simulated host %u has a node already",
                       (unsigned)host_index);
  mlfab_config_init(&copy);
  memcpy(&copy, config, mlfab__min(config->size, sizeof copy));
  copy.size = sizeof copy;
  int status = mlfab__env_init(&host->given, copy.env ? copy.env : &sim->env.hooks);
  if (status) return MLFAB__FAIL(error_p, status, "mlfab_sim_open: bad env");
  host->hooks = host->given.hooks;
  host->hooks.size = sizeof host->hooks;
  host->hooks.user = host;
  host->hooks.allocate = sim_hook_allocate;
  host->hooks.release = sim_hook_release;
  host->hooks.clock = sim_hook_clock;
  if (host->hooks.log) host->hooks.log = sim_hook_log;
  if (host->hooks.store) host->hooks.store = sim_hook_store;
  copy.env = &host->hooks;
  copy.transport = mlfab_transport_sim();
  copy.transport_user = host;
  copy.transports = 0; /* no other transport */
  if (!copy.coordinator[0]) memcpy(copy.coordinator, "sim:0", sizeof "sim:0");
  status = mlfab_open_start(&copy, &ctx, error_p);
  if (status) return status;
  *ctx_p = ctx;
  /* A world of one node opens no transport: driving it is unnecessary, and its close is not reported. */
  if (host->endpoint) {
    host->ctx = ctx;
    host->ctx_p = ctx_p;
    sim_touch(host, 1);
  }
  return 0;
}

MLFAB_API int mlfab_sim_at(mlfab_sim *sim, uint64_t at_ns, void (*fn)(void *user), void *user) {
  if (!sim || !fn) return MLFAB_ERR_ARGUMENT;
  sim_timer *timer = sim_timer_make(sim, SIM_AT);
  if (!timer) return MLFAB_ERR_MEMORY;
  timer->fn = fn;
  timer->user = user;
  sim_put(sim, &timer->source, at_ns);
  return 0;
}

MLFAB_API int mlfab_sim_watch(mlfab_sim *sim, uint32_t host, void (*fn)(void *user), void *user) {
  sim_host *h = mlfab_sim_host(sim, host);
  if (!h) return MLFAB_ERR_ARGUMENT;
  h->watch_fn = fn;
  h->watch_user = user;
  return 0;
}

MLFAB_API int mlfab_sim_set_rate(mlfab_sim *sim, uint32_t host, uint64_t in, uint64_t out) {
  sim_host *h = mlfab_sim_host(sim, host);
  if (!h) return MLFAB_ERR_ARGUMENT;
  h->card->rate_in = in;
  h->card->rate_out = out;
  sim_host_rates(h->card);
  return 0;
}

MLFAB_API int mlfab_sim_share(mlfab_sim *sim, uint32_t host, uint32_t with) {
  sim_host *h = mlfab_sim_host(sim, host), *w = mlfab_sim_host(sim, with);
  if (!h || !w || h == w) return MLFAB_ERR_ARGUMENT;
  if (h->card == w->card) return 0;
  /* Hosts that share h's ports move with it; none of them may have been opened. */
  for (uint32_t i = 0; i < sim->options.hosts; i++)
    if (sim->hosts[i].card == h->card && sim->hosts[i].opened) return MLFAB_ERR_STATE;
  const sim_host *old = h->card;
  for (uint32_t i = 0; i < sim->options.hosts; i++)
    if (sim->hosts[i].card == old) sim->hosts[i].card = w->card;
  return 0;
}

MLFAB_API int mlfab_sim_set_faults(mlfab_sim *sim, const mlfab_sim_options *options) {
  mlfab_sim_options o = {0};
  if (!sim) return MLFAB_ERR_ARGUMENT;
  if (options) memcpy(&o, options, mlfab__min(options->size, sizeof o));
  o.hosts = sim->options.hosts;
  o.latency_jitter = sim->options.latency_jitter;
  int status = sim_options_check(&o);
  if (status) return status;
  sim_options_defaults(&o);
  sim->options.loss = o.loss;
  sim->options.duplicate = o.duplicate;
  sim->options.reorder = o.reorder;
  sim->options.partition = o.partition;
  sim->options.crash = o.crash;
  sim->options.pause = o.pause;
  sim->options.slow = o.slow;
  sim->options.partition_ns = o.partition_ns;
  sim->options.pause_ns = o.pause_ns;
  sim->faults = o.partition > 0 || o.crash > 0 || o.pause > 0 || o.slow > 0;
  return 0;
}

MLFAB_API int mlfab_sim_partition(mlfab_sim *sim, uint32_t a, uint32_t b, int cut) {
  if (!mlfab_sim_host(sim, a) || !mlfab_sim_host(sim, b) || a == b) return MLFAB_ERR_ARGUMENT;
  if (!cut && !sim->cuts) return 0;
  if (sim_cuts_reserve(sim)) return MLFAB_ERR_MEMORY;
  sim_set_cut(sim, a, b, SIM_CUT_USER, cut != 0);
  return 0;
}

MLFAB_API int mlfab_sim_pause(mlfab_sim *sim, uint32_t host, uint64_t duration_ns) {
  sim_host *h = mlfab_sim_host(sim, host);
  if (!h) return MLFAB_ERR_ARGUMENT;
  h->paused_until_ns = mlfab__max(h->paused_until_ns, mlfab__add_sat(sim->now, duration_ns));
  sim_put(sim, &h->pause, h->paused_until_ns);
  return 0;
}

MLFAB_API int mlfab_sim_crash(mlfab_sim *sim, uint32_t host) {
  sim_host *h = mlfab_sim_host(sim, host);
  if (!h) return MLFAB_ERR_ARGUMENT;
  if (!h->endpoint) return MLFAB_ERR_STATE;
  /* A context inside a call cannot be freed: crashes when the call has returned. */
  if (!h->busy) {
    sim_crash_now(h);
  } else if (!h->crash_waits) {
    h->crash_waits = 1;
    sim->crash_waits++;
  }
  return 0;
}

MLFAB_API int mlfab_sim_on_crash(mlfab_sim *sim, uint32_t host,
                                 void (*fn)(void *user, uint32_t host), void *user) {
  sim_host *h = mlfab_sim_host(sim, host);
  if (!h) return MLFAB_ERR_ARGUMENT;
  h->crash_fn = fn;
  h->crash_user = user;
  return 0;
}

MLFAB_API int mlfab_sim_trace_hash(mlfab_sim *sim, uint64_t *hash_p) {
  if (!sim || !hash_p) return MLFAB_ERR_ARGUMENT;
  *hash_p = sim->hash;
  return 0;
}
