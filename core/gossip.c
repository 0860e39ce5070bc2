/* gossip.c - the communicator: stochastic reduce. See comm.h; what may be sent and averaged when is
 * notify.h's.
 *
 * A graph over the members of the epoch says who sends to whom. A worker keeps an array for each
 * sender, which frames of its models are written to as they come, and one of its own, which its
 * receivers are sent from: so the caller's data is replaced by the mean without waiting for
 * anybody's acknowledgement. That array is written again when all have given it back. Small models
 * are copied by the streams instead.
 *
 * Messages: (channel, iteration, tag), never EAGER: they go to their place, or are numbers. The
 * footer of a model is its last byte: the stream hands on nothing that is not in order, so NOTIFY
 * needs no message of its own. BSP's barrier is REACHED from everybody, sent before the models, so
 * that it says nothing of their bytes: as barriers beside one-sided writes.
 *
 * Iterations count from 1 in every epoch; those of a failed epoch leave nothing but the callers'
 * data as it was. The graph is built anew for the members: where that cannot be, the object is
 * `wrong` as long as the epoch stands, on all of them alike, and that fails no other call.
 *
 * The mean is of the arrays in the order of members, with one rounding an addition and one for the
 * division: the same inputs give the same bits.
 *
 * Source: ASAP §4, §6.2. Departs: iterations end with an epoch; notices come with the bytes. */
#include "gossip.h"

#if MLFAB_WITH_STOCHASTIC

#include "graph.h"
#include "notify.h"

#include <stdio.h>

enum { GOSSIP_MODEL = 1, GOSSIP_ACK, GOSSIP_REACHED }; /* tags */
enum { GOSSIP_BLOCK = 16 << 10 }; /* bytes that are summed and divided in cache */

typedef struct gossip_slot {
  uint8_t *bytes;
  uint64_t got; /* of the model that is coming */
} gossip_slot;

struct mlfab__gossip {
  mlfab__comm *comm;
  mlfab__comm_object *object;
  mlfab_stochastic_options options; /* complete; edges are a copy */
  int dtype;
  uint32_t width;
  uint64_t count, bytes, signature;
  uint64_t iterations; /* that this worker has finished, of all epochs */
  int closing;         /* when its array is given back */
  mlfab_request opening;
  /* The epoch's. */
  uint32_t epoch; /* 0: none */
  int wrong;      /* there is no graph: why */
  mlfab_error why;
  mlfab__notify notify;
  uint32_t room;                    /* of the four lists: members */
  uint32_t *out_member, *in_member; /* ascending */
  uint32_t *out_rank, *in_rank;
  gossip_slot *slots;  /* by in-edge */
  const void **inputs; /* of a mean: room for all senders and itself */
  uint64_t *reached;   /* BSP: iterations, by member */
  uint8_t *own, *sum;  /* what is sent; a block, where inputs are too many for a pass */
  uint32_t lent;       /* messages of `own` */
  /* The iteration that is called. */
  mlfab_request request; /* 0: none */
  void *data;
  mlfab_stochastic_info *info_p;
  mlfab__comm_grave grave;
};

/* --- the graph of an epoch --- */

/* But for `own`, which links may hold until they have been told. */
static void gossip_forget(mlfab__gossip *g) {
  mlfab__env *env = g->comm->env;
  for (uint32_t i = 0; g->slots && i < g->notify.ins; i++)
    mlfab__free_aligned(env, g->slots[i].bytes, g->bytes);
  mlfab__free(env, g->slots, g->notify.ins * sizeof *g->slots);
  mlfab__free(env, g->inputs, (g->notify.ins + 1) * sizeof *g->inputs);
  mlfab__free(env, g->reached, g->room * sizeof *g->reached);
  mlfab__free(env, g->out_member, 4 * (size_t)g->room * sizeof *g->out_member);
  mlfab__free_aligned(env, g->sum, GOSSIP_BLOCK);
  mlfab__notify_free(&g->notify, env);
  g->slots = NULL;
  g->inputs = NULL;
  g->reached = NULL;
  g->out_member = NULL;
  g->sum = NULL;
  g->epoch = g->room = g->lent = 0;
  g->wrong = 0;
}

static int gossip_copies(const mlfab__gossip *g) { return g->bytes <= MLFAB__STREAM_LEND; }

static int gossip_no_memory(mlfab_error *error) {
  return mlfab__error(error, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, 0, 0,
                      "a stochastic reduction: out of memory");
}

/* The graph while it is built. Nodes of a built one are members, in their order, which has those of
 * one host beside each other; nodes of the user's are members by rank. */
typedef struct gossip_graph {
  mlfab_edge *edges;
  uint32_t n, room;
  uint32_t *member; /* by node */
  uint32_t *node;   /* by rank, plus one; 0: no member */
  uint32_t *peers;  /* nodes */
  uint8_t *marks;   /* by member */
} gossip_graph;

static void gossip_drop_graph(const mlfab__comm *comm, gossip_graph *graph) {
  mlfab__free(comm->env, graph->edges, graph->room * sizeof *graph->edges);
  mlfab__free(comm->env, graph->member, comm->members * sizeof *graph->member);
  mlfab__free(comm->env, graph->node, comm->config->workers * sizeof *graph->node);
  mlfab__free(comm->env, graph->peers, comm->members * sizeof *graph->peers);
  mlfab__free(comm->env, graph->marks, comm->members);
}

static int gossip_number(const mlfab__gossip *g, gossip_graph *graph) {
  const mlfab__comm *comm = g->comm;
  uint32_t workers = comm->config->workers, n = 0;
  graph->member = mlfab__alloc_array(comm->env, comm->members, sizeof *graph->member);
  graph->node = mlfab__alloc_array(comm->env, workers, sizeof *graph->node);
  graph->peers = mlfab__alloc_array(comm->env, comm->members, sizeof *graph->peers);
  graph->marks = mlfab__alloc(comm->env, comm->members);
  if (!graph->member || !graph->node || !graph->peers || !graph->marks) return MLFAB_ERR_MEMORY;
  if (g->options.graph == MLFAB_GRAPH_USER) {
    for (uint32_t m = 0; m < comm->members; m++) graph->node[comm->ranks[m]] = m + 1;
    for (uint32_t r = 0; r < workers; r++) {
      if (!graph->node[r]) continue;
      graph->member[n] = graph->node[r] - 1;
      graph->node[r] = ++n;
    }
  } else {
    for (uint32_t m = 0; m < comm->members; m++) {
      graph->member[m] = m;
      graph->node[comm->ranks[m]] = m + 1;
    }
  }
  return 0;
}

/* The user's edges among members. */
static int gossip_users_edges(const mlfab__gossip *g, gossip_graph *graph) {
  const mlfab_stochastic_options *o = &g->options;
  graph->edges = mlfab__alloc_array(g->comm->env, o->nedges, sizeof *graph->edges);
  if (!graph->edges) return MLFAB_ERR_MEMORY;
  graph->room = o->nedges;
  for (uint32_t k = 0; k < o->nedges; k++) {
    uint32_t from = graph->node[o->edges[k].from], to = graph->node[o->edges[k].to];
    if (from && to) graph->edges[graph->n++] = (mlfab_edge){from - 1, to - 1};
  }
  return 0;
}

static int gossip_build_edges(const mlfab__gossip *g, gossip_graph *graph, mlfab_error *error) {
  const mlfab_stochastic_options *o = &g->options;
  uint32_t members = g->comm->members;
  int code = mlfab_graph_build(o->graph, members, o->degree, o->seed, NULL, 0, &graph->n);
  if (code == MLFAB_ERR_LIMIT) {
    graph->edges = mlfab__alloc_array(g->comm->env, graph->n, sizeof *graph->edges);
    if (!graph->edges) return MLFAB_ERR_MEMORY;
    graph->room = graph->n;
    code = mlfab_graph_build(o->graph, members, o->degree, o->seed, graph->edges, graph->room,
                             &graph->n);
  }
  if (code != MLFAB_ERR_ARGUMENT) return code;
  return mlfab__error(error, code, MLFAB_NO_RANK, 0, 0,
                      "a stochastic reduction: no graph of kind %u and degree %u for %u workers",
                      o->graph, o->degree, members);
}

/* Those that are built by rule are known to be good. */
static int gossip_check(const mlfab__gossip *g, const gossip_graph *graph, mlfab_error *error) {
  mlfab_graph_info info;
  mlfab_error what;
  uint32_t members = g->comm->members;
  if (g->options.graph != MLFAB_GRAPH_USER && g->options.graph != MLFAB_GRAPH_REGULAR) return 0;
  int code = mlfab_graph_check(graph->edges, graph->n, members, &info, &what);
  if (!code) return 0;
  return mlfab__error(error, code, MLFAB_NO_RANK, 0, 0,
                      "a stochastic reduction: %.140s (nodes: the %u workers that take part)",
                      what.text, members);
}

/* This worker's receivers or senders, ascending. Returns how many. */
static uint32_t gossip_peers(const mlfab__comm *comm, const gossip_graph *graph, int incoming,
                             uint32_t *member, uint32_t *rank) {
  uint32_t me = graph->node[comm->rank] - 1, n = 0;
  uint32_t peers = mlfab__graph_peers(graph->edges, graph->n, me, incoming, graph->peers);
  memset(graph->marks, 0, comm->members);
  for (uint32_t i = 0; i < peers; i++) graph->marks[graph->member[graph->peers[i]]] = 1;
  for (uint32_t m = 0; m < comm->members; m++) {
    if (!graph->marks[m]) continue;
    member[n] = m;
    rank[n++] = comm->ranks[m];
  }
  return n;
}

/* The lists, and who waits for whom. */
static int gossip_connect(mlfab__gossip *g, const gossip_graph *graph) {
  mlfab__comm *comm = g->comm;
  uint32_t members = comm->members;
  g->out_member = mlfab__alloc_array(comm->env, 4 * (size_t)members, sizeof *g->out_member);
  if (!g->out_member) return MLFAB_ERR_MEMORY;
  g->room = members;
  g->out_rank = g->out_member + members;
  g->in_member = g->out_rank + members;
  g->in_rank = g->in_member + members;
  uint32_t outs = gossip_peers(comm, graph, 0, g->out_member, g->out_rank);
  uint32_t ins = gossip_peers(comm, graph, 1, g->in_member, g->in_rank);
  return mlfab__notify_init(&g->notify, comm->env, g->options.mode, g->out_rank, outs, g->in_rank,
                            ins);
}

static int gossip_arrays(mlfab__gossip *g) {
  mlfab__env *env = g->comm->env;
  uint32_t ins = g->notify.ins;
  g->slots = mlfab__alloc_array(env, ins, sizeof *g->slots);
  g->inputs = mlfab__alloc_array(env, ins + 1, sizeof *g->inputs);
  if ((!g->slots && ins > 0) || !g->inputs) return MLFAB_ERR_MEMORY;
  for (uint32_t i = 0; i < ins; i++) {
    g->slots[i].bytes = mlfab__alloc_aligned(env, g->bytes);
    if (!g->slots[i].bytes) return MLFAB_ERR_MEMORY;
  }
  if (g->options.mode == MLFAB_NOTIFY_BSP) {
    g->reached = mlfab__alloc_array(env, g->room, sizeof *g->reached);
    if (!g->reached) return MLFAB_ERR_MEMORY;
  }
  if (!gossip_copies(g) && !g->own) g->own = mlfab__alloc_aligned(env, g->bytes);
  if (ins + 1 > MLFAB__COMBINE_MOST) g->sum = mlfab__alloc_aligned(env, GOSSIP_BLOCK);
  return (!gossip_copies(g) && !g->own) || (ins + 1 > MLFAB__COMBINE_MOST && !g->sum)
             ? MLFAB_ERR_MEMORY
             : 0;
}

/* Errors: MEMORY; else `error` tells. */
static int gossip_build(mlfab__gossip *g, mlfab_error *error) {
  gossip_graph graph = {0};
  int code = gossip_number(g, &graph);
  if (!code && g->comm->members > 1) {
    code = g->options.graph == MLFAB_GRAPH_USER ? gossip_users_edges(g, &graph)
                                                : gossip_build_edges(g, &graph, error);
    if (!code) code = gossip_check(g, &graph, error);
  }
  if (!code) code = gossip_connect(g, &graph);
  if (!code) code = gossip_arrays(g);
  gossip_drop_graph(g->comm, &graph);
  return code;
}

static void gossip_finish(mlfab__gossip *g, int code, const char *text) {
  mlfab__request *request = mlfab__request_find(g->comm->requests, g->request);
  g->request = 0;
  g->data = NULL;
  if (request)
    mlfab__request_finish(g->comm->requests, request, code, MLFAB_NO_RANK, 0, g->comm->now_ns, "%s",
                          text);
}

static void gossip_fail_memory(const mlfab__gossip *g) {
  char text[80];
  snprintf(text, sizeof text, "a stochastic reduction: worker %u is out of memory", g->comm->rank);
  mlfab__comm_fail(g->comm, MLFAB_ERR_MEMORY, (int32_t)g->comm->rank, text);
}

/* The members are known: whoever is in the epoch already may send. */
static void gossip_prepare(mlfab__gossip *g) {
  if (g->epoch == g->comm->epoch) return;
  gossip_forget(g);
  g->epoch = g->comm->epoch;
  int code = gossip_build(g, &g->why);
  if (code == MLFAB_ERR_MEMORY) {
    gossip_fail_memory(g);
  } else if (code) {
    g->wrong = code;
    if (g->request) gossip_finish(g, code, g->why.text);
  }
}

/* --- an iteration --- */

static mlfab__coll gossip_head(const mlfab__gossip *g, uint32_t tag, uint64_t iteration,
                               uint64_t total) {
  return (mlfab__coll){.channel = g->object->channel,
                       .number = iteration,
                       .tag = tag,
                       .signature = g->signature,
                       .total = total};
}

static void gossip_send(mlfab__gossip *g, uint32_t member, uint32_t tag, const void *bytes,
                        uint64_t n, uint64_t iteration) {
  mlfab__coll head = gossip_head(g, tag, iteration, n);
  int copy = bytes == NULL || gossip_copies(g);
  int code = mlfab__stream_send(&g->comm->streams, member, &head, bytes, n, copy,
                                MLFAB__COMM_COOKIE(g->object->id, 0));
  if (code) {
    gossip_fail_memory(g);
  } else if (!copy) {
    g->lent++;
  }
}

/* The model to all receivers in one go, when it may go. */
static void gossip_send_all(mlfab__gossip *g) {
  mlfab__notify *notify = &g->notify;
  const mlfab__comm *comm = g->comm;
  const uint8_t *bytes = gossip_copies(g) ? g->data : g->own;
  uint64_t k = notify->iteration;
  if (notify->unsent == 0 || !mlfab__notify_may_send(notify, 0) || g->lent > 0) return;
  for (uint32_t m = 0; g->reached && m < comm->members; m++) {
    if (m != comm->me) gossip_send(g, m, GOSSIP_REACHED, NULL, 0, k);
  }
  if (g->own) memcpy(g->own, g->data, g->bytes);
  for (uint32_t i = 0; i < notify->outs && !comm->failing; i++) {
    gossip_send(g, g->out_member[i], GOSSIP_MODEL, bytes, g->bytes, k);
    (void)mlfab__notify_sent(notify, i);
  }
}

/* BSP: the first member that has not come as far, or NO_RANK. */
static int32_t gossip_behind(const mlfab__gossip *g) {
  const mlfab__comm *comm = g->comm;
  for (uint32_t m = 0; m < comm->members; m++) {
    if (m != comm->me && g->reached[m] < g->notify.iteration) return (int32_t)comm->ranks[m];
  }
  return MLFAB_NO_RANK;
}

static mlfab__notify_stamps gossip_stamps(const mlfab__gossip *g, uint32_t edge) {
  return (mlfab__notify_stamps){g->notify.in[edge].header, g->notify.in[edge].footer};
}

/* Adds this sender's model to the inputs, if it is whole: 0, or what is wrong with its slot. */
static int gossip_take(mlfab__gossip *g, uint32_t edge, uint32_t *n_p, mlfab_error *error) {
  mlfab__notify_stamps stamps = gossip_stamps(g, edge);
  uint64_t ack;
  int input = mlfab__notify_consumed(&g->notify, edge, stamps, stamps, &ack, error);
  if (input == MLFAB__NOTIFY_WHOLE) g->inputs[(*n_p)++] = g->slots[edge].bytes;
  return input < 0 ? input : 0;
}

/* What is averaged, in the order of members: how many, or 0 when that is a failure. Nothing is written
 * to a slot until the caller has averaged. */
static uint32_t gossip_inputs(mlfab__gossip *g) {
  uint32_t n = 0, own = 0;
  for (uint32_t i = 0; i <= g->notify.ins; i++) {
    mlfab_error error;
    if (!own && (i == g->notify.ins || g->in_member[i] > g->comm->me)) {
      g->inputs[n++] = g->data;
      own = 1;
    }
    if (i < g->notify.ins && gossip_take(g, i, &n, &error)) {
      mlfab__comm_fail(g->comm, error.code, error.rank, error.text);
      return 0;
    }
  }
  return n;
}

/* The mean of `n` inputs from the byte `at` on, in place of the data. */
static void gossip_mean(const mlfab__gossip *g, uint32_t n, uint64_t at, uint64_t bytes) {
  const void *in[MLFAB__COMBINE_MOST];
  void *data = (uint8_t *)g->data + at;
  for (uint32_t done = 0; done < n;) {
    uint32_t k = 0;
    if (done > 0) in[k++] = g->sum;
    for (; k < MLFAB__COMBINE_MOST && done < n; done++)
      in[k++] = (const uint8_t *)g->inputs[done] + at;
    void *dst = done < n ? g->sum : data;
    mlfab__combine_many(MLFAB_SUM, g->dtype, &dst, 1, in, k, bytes / g->width, 0);
  }
  mlfab__combine_divide(g->dtype, data, bytes / g->width, n);
}

/* The iteration is over with the mean; what fails from then on fails the next one. */
static void gossip_reduce(mlfab__gossip *g) {
  mlfab__notify_tally tally = {0, 0, 0};
  uint64_t k = g->notify.iteration;
  uint32_t n = gossip_inputs(g);
  if (n == 0) return;
  for (uint64_t at = 0; n > 1 && at < g->bytes; at += GOSSIP_BLOCK)
    gossip_mean(g, n, at, mlfab__min(GOSSIP_BLOCK, g->bytes - at));
  (void)mlfab__notify_end(&g->notify, &tally);
  for (uint32_t i = 0; g->options.mode == MLFAB_NOTIFY_ACK && i < g->notify.ins; i++)
    gossip_send(g, g->in_member[i], GOSSIP_ACK, NULL, 0, k);
  g->iterations++;
  g->comm->collectives++;
  if (g->info_p) {
    const mlfab_stochastic_info info = {.size = g->info_p->size,
                                        .senders = g->notify.ins,
                                        .whole = tally.whole,
                                        .torn = tally.torn,
                                        .stale = tally.stale,
                                        .iteration = g->iterations,
                                        .sent_bytes = g->notify.outs * g->bytes};
    memcpy(g->info_p, &info, mlfab__min(info.size, sizeof info));
  }
  gossip_finish(g, 0, "");
}

/* As far as it goes. */
static void gossip_run(mlfab__gossip *g) {
  const mlfab__comm *comm = g->comm;
  mlfab__notify *notify = &g->notify;
  if (!g->request || g->wrong || comm->phase != MLFAB__COMM_IN || g->epoch != comm->epoch) return;
  if (notify->iteration == notify->ended) {
    (void)mlfab__notify_begin(notify, notify->ended + 1);
    g->object->waits_for = notify->iteration;
  }
  gossip_send_all(g);
  if (comm->failing) return;
  if (g->reached && notify->unsent == 0 && gossip_behind(g) == MLFAB_NO_RANK)
    (void)mlfab__notify_barrier(notify, notify->iteration);
  if (mlfab__notify_ready(notify)) gossip_reduce(g);
}

/* --- what came --- */

static void gossip_wrong(const mlfab__gossip *g, uint32_t member, const char *what) {
  char text[120];
  uint32_t rank = g->comm->ranks[member];
  snprintf(text, sizeof text, "a stochastic reduction: worker %u sent %s", rank, what);
  mlfab__comm_fail(g->comm, MLFAB_ERR_FRAME, (int32_t)rank, text);
}

/* Bytes of a model go to their place. */
static void gossip_model(mlfab__gossip *g, uint32_t member, const mlfab__coll *head,
                         const void *bulk, uint32_t bytes) {
  int32_t edge = mlfab__notify_edge(g->in_member, g->notify.ins, member);
  mlfab_error error;
  int code = 0;
  if (edge < 0 || head->total != g->bytes) {
    gossip_wrong(g, member, edge < 0 ? "a model and is no sender" : "a model of another size");
    return;
  }
  gossip_slot *slot = &g->slots[edge];
  if (slot->got == g->bytes) slot->got = 0;
  if (head->offset != slot->got) {
    gossip_wrong(g, member, "a model's bytes out of order");
    return;
  }
  if (head->offset == 0)
    code = mlfab__notify_arrives(&g->notify, (uint32_t)edge, head->number, &error);
  if (!code) {
    memcpy(slot->bytes + slot->got, bulk, bytes);
    slot->got += bytes;
    if (slot->got == g->bytes)
      code = mlfab__notify_notified(&g->notify, (uint32_t)edge, head->number, head->number, &error);
  }
  if (code) mlfab__comm_fail(g->comm, code, error.rank, error.text);
}

static void gossip_ack(mlfab__gossip *g, uint32_t member, uint64_t iteration) {
  int32_t edge = mlfab__notify_edge(g->out_member, g->notify.outs, member);
  mlfab_error error;
  if (edge < 0) {
    gossip_wrong(g, member, "an acknowledgement and is no receiver");
  } else if (mlfab__notify_acked(&g->notify, (uint32_t)edge, iteration, &error)) {
    mlfab__comm_fail(g->comm, error.code, error.rank, error.text);
  }
}

static void gossip_reaches(mlfab__gossip *g, uint32_t member, uint64_t iteration) {
  if (!g->reached || iteration != g->reached[member] + 1) {
    gossip_wrong(g, member, "the barrier of another iteration");
  } else {
    g->reached[member] = iteration;
  }
}

/* It is closed here: what is over may still come. Nobody waits for an ASYNC one. */
static void gossip_closed(const mlfab__gossip *g, uint64_t iteration) {
  char text[64];
  if (g->options.mode == MLFAB_NOTIFY_ASYNC || iteration <= g->notify.ended) return;
  snprintf(text, sizeof text, "worker %u has closed object %u", g->comm->rank, g->object->channel);
  mlfab__comm_fail(g->comm, MLFAB_ERR_PEER_CLOSED, (int32_t)g->comm->rank, text);
}

static void gossip_frame(void *self, uint32_t member, const mlfab__coll *head, const void *bulk,
                         uint32_t bytes, uint64_t now_ns) {
  mlfab__gossip *g = self;
  (void)now_ns;
  if (!g->closing) gossip_prepare(g);
  if (g->comm->failing || g->wrong) return;
  if (g->closing) {
    gossip_closed(g, head->number);
  } else if (head->signature != g->signature) {
    char text[96];
    snprintf(text, sizeof text, "workers %u and %u have opened object %u with other options",
             g->comm->rank, g->comm->ranks[member], g->object->channel);
    mlfab__comm_fail(g->comm, MLFAB_ERR_SHAPE, (int32_t)g->comm->ranks[member], text);
  } else if (head->tag == GOSSIP_MODEL) {
    gossip_model(g, member, head, bulk, bytes);
  } else if (head->tag == GOSSIP_ACK) {
    gossip_ack(g, member, head->number);
  } else if (head->tag == GOSSIP_REACHED) {
    gossip_reaches(g, member, head->number);
  } else {
    gossip_wrong(g, member, "a message of an unknown kind");
  }
  if (!g->comm->failing) gossip_run(g);
}

/* --- the end of it --- */

static void gossip_free(void *self) {
  mlfab__gossip *g = self;
  mlfab__env *env = g->comm->env;
  gossip_forget(g);
  mlfab__free_aligned(env, g->own, g->bytes);
  mlfab__free(env, (void *)(uintptr_t)g->options.edges,
              g->options.nedges * sizeof *g->options.edges);
  mlfab__free(env, g, sizeof *g);
}

static void gossip_remove(mlfab__gossip *g) {
  g->object->upto = g->options.mode == MLFAB_NOTIFY_ASYNC ? UINT64_MAX : g->notify.ended + 1;
  mlfab__comm_object_remove(g->comm, g->object);
  g->grave = (mlfab__comm_grave){.free_self = gossip_free, .self = g};
  mlfab__comm_bury(g->comm, &g->grave);
}

static void gossip_given_back(void *self, uint32_t member, uint64_t cookie) {
  mlfab__gossip *g = self;
  (void)member, (void)cookie;
  g->lent--;
  if (!g->closing) {
    gossip_run(g);
  } else if (g->lent == 0) {
    gossip_remove(g);
  }
}

static void gossip_begin(void *self, uint64_t round, uint64_t now_ns) {
  mlfab__gossip *g = self;
  (void)round, (void)now_ns;
  gossip_prepare(g);
  if (!g->comm->failing) gossip_run(g);
}

static void gossip_over(void *self, int code, uint64_t now_ns) {
  mlfab__gossip *g = self;
  (void)code;
  if (g->request) mlfab__comm_end_request(g->comm, g->request, now_ns);
  g->request = 0;
  g->data = NULL;
  const mlfab__request *opening = mlfab__request_find(g->comm->requests, g->opening);
  int never_open = opening && opening->done && opening->result.status;
  if (g->closing || never_open) {
    gossip_remove(g);
  } else {
    gossip_forget(g);
  }
}

/* Whom the open iteration waits for, and why, as far as known. */
static int32_t gossip_awaited(const mlfab__gossip *g, const char **why_p) {
  const mlfab__comm *comm = g->comm;
  int32_t rank = mlfab__comm_missing(g->comm, g->object);
  *why_p = comm->phase == MLFAB__COMM_IN ? "has not called it" : "takes no part yet";
  if (rank != MLFAB_NO_RANK || comm->phase != MLFAB__COMM_IN) return rank;
  *why_p = "is awaited";
  if (mlfab__notify_awaits(&g->notify, &rank) == MLFAB__NOTIFY_FOR_BARRIER) rank = gossip_behind(g);
  return rank;
}

static void gossip_withdraw(void *self, mlfab__request *request, int code, uint64_t now_ns) {
  mlfab__gossip *g = self;
  char text[MLFAB__TEXT_MAX], waited[24];
  const char *why = "";
  unsigned long long iteration = g->iterations + 1;
  int32_t rank = (int32_t)g->comm->rank;
  if (request->id != g->request) return;
  mlfab__duration(waited, now_ns - request->started_ns);
  if (code == MLFAB_ERR_TIMEOUT) rank = gossip_awaited(g, &why);
  if (code != MLFAB_ERR_TIMEOUT) {
    snprintf(text, sizeof text,
             "a stochastic reduction (iteration %llu): withdrawn by worker %u after %s", iteration,
             g->comm->rank, waited);
  } else if (rank == MLFAB_NO_RANK) {
    snprintf(text, sizeof text,
             "a stochastic reduction (iteration %llu): worker %u's deadline passed after %s",
             iteration, g->comm->rank, waited);
  } else {
    snprintf(text, sizeof text,
             "a stochastic reduction (iteration %llu): worker %u's deadline passed after %s: "
             "worker %d %s",
             iteration, g->comm->rank, waited, (int)rank, why);
  }
  mlfab__comm_fail(g->comm, code, rank, text);
}

/* One that waits itself has done what it can. */
static int gossip_called(void *self, uint64_t number, int32_t *awaited_p) {
  const mlfab__gossip *g = self;
  const char *why;
  *awaited_p = g->request ? gossip_awaited(g, &why) : MLFAB_NO_RANK;
  return g->request || number <= g->notify.ended;
}

/* --- calls --- */

static int gossip_refuse(mlfab_error *error, int code, const char *what) {
  return mlfab__error(error, code, MLFAB_NO_RANK, 0, 0, "a stochastic reduction: %s", what);
}

static int gossip_check_edges(const mlfab__comm *comm, const mlfab_stochastic_options *o,
                              mlfab_error *error) {
  uint32_t workers = comm->config->workers;
  if (o->nedges == 0 || !o->edges) return gossip_refuse(error, MLFAB_ERR_ARGUMENT, "no edges");
  if (o->nedges > MLFAB__GRAPH_NODES_MAX * MLFAB__GRAPH_NODES_MAX)
    return gossip_refuse(error, MLFAB_ERR_LIMIT, "more than 1048576 edges");
  for (uint32_t k = 0; k < o->nedges; k++) {
    if (o->edges[k].from < workers && o->edges[k].to < workers) continue;
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "a stochastic reduction: edge %u leads from %u to %u, and there are %u "
                        "workers, from 0",
                        k, o->edges[k].from, o->edges[k].to, workers);
  }
  return 0;
}

static int gossip_check_options(const mlfab__comm *comm, uint64_t count, int dtype,
                                const mlfab_stochastic_options *o, mlfab_error *error) {
  if (dtype != MLFAB_F32 && dtype != MLFAB_F64)
    return mlfab__error(error, MLFAB_ERR_DTYPE, MLFAB_NO_RANK, 0, 0,
                        "a stochastic reduction: type %d, and only MLFAB_F32 and MLFAB_F64 can be",
                        dtype);
  if (count == 0) return gossip_refuse(error, MLFAB_ERR_ARGUMENT, "no elements");
  if (count > comm->config->model_max_bytes / mlfab__element_bytes(dtype))
    return mlfab__error(error, MLFAB_ERR_LIMIT, MLFAB_NO_RANK, 0, 0,
                        "a stochastic reduction: %llu elements, the limit is %llu bytes "
                        "(model_max_bytes)",
                        (unsigned long long)count,
                        (unsigned long long)comm->config->model_max_bytes);
  if (o->graph < MLFAB_GRAPH_ALL || o->graph > MLFAB_GRAPH_USER || o->graph == MLFAB_GRAPH_STAR)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "a stochastic reduction: %u is not a graph to reduce over (MLFAB_GRAPH_*, "
                        "not STAR)",
                        o->graph);
  if (o->mode > MLFAB_NOTIFY_ASYNC)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "a stochastic reduction: %u is not a mode (MLFAB_NOTIFY_*)", o->mode);
  return o->graph == MLFAB_GRAPH_USER ? gossip_check_edges(comm, o, error) : 0;
}

static int gossip_check_state(mlfab__comm *comm, mlfab_error *error) {
  if (comm->dead)
    return mlfab__error(error, MLFAB_ERR_PEER_DEAD, 0, 1, 0,
                        "a stochastic reduction: server 0 is dead");
  if (comm->leaving)
    return gossip_refuse(error, MLFAB_ERR_STATE, "this worker takes no further part");
  return mlfab__comm_owed(comm, error) ? comm->verdict.code : 0;
}

/* What all workers must have in common. */
static uint64_t gossip_signature(const mlfab__gossip *g) {
  const mlfab_stochastic_options *o = &g->options;
  const uint64_t of[] = {(uint64_t)g->dtype, g->count, o->graph, o->degree, o->mode,
                         o->refuse_nan,      o->seed,  o->nedges};
  uint64_t hash = mlfab__hash(0, of, sizeof of);
  if (o->nedges > 0) hash = mlfab__hash(hash, o->edges, o->nedges * sizeof *o->edges);
  return hash;
}

static mlfab__gossip *gossip_new(mlfab__comm *comm, uint64_t count, int dtype,
                                 const mlfab_stochastic_options *options) {
  mlfab__gossip *g = mlfab__alloc(comm->env, sizeof *g);
  if (!g) return NULL;
  g->comm = comm;
  g->dtype = dtype;
  g->width = mlfab__element_bytes(dtype);
  g->count = count;
  g->bytes = count * g->width;
  g->options = *options;
  g->options.refuse_nan = options->refuse_nan != 0;
  if (!g->options.mode) g->options.mode = MLFAB_NOTIFY_ACK;
  if (g->options.graph != MLFAB_GRAPH_REGULAR) g->options.degree = 0;
  if (!g->options.seed) g->options.seed = comm->config->seed;
  if (g->options.graph != MLFAB_GRAPH_REGULAR) g->options.seed = 0;
  if (g->options.graph != MLFAB_GRAPH_USER) g->options.nedges = 0;
  g->options.edges = NULL;
  if (g->options.nedges > 0) {
    mlfab_edge *edges = mlfab__alloc_array(comm->env, options->nedges, sizeof *edges);
    g->options.edges = edges;
    if (!edges) {
      g->options.nedges = 0;
      gossip_free(g);
      return NULL;
    }
    memcpy(edges, options->edges, options->nedges * sizeof *edges);
  }
  g->signature = gossip_signature(g);
  return g;
}

/* All workers open it with the same options, or nobody does. */
static int gossip_gather(mlfab__gossip *g, uint64_t timeout_ns, uint64_t now_ns,
                         mlfab_request *request_p, mlfab_error *error) {
  const mlfab__comm_object object = {.self = g,
                                     .frame = gossip_frame,
                                     .given_back = gossip_given_back,
                                     .begin = gossip_begin,
                                     .over = gossip_over,
                                     .withdraw = gossip_withdraw,
                                     .called = gossip_called,
                                     .free_self = gossip_free};
  mlfab__comm_call call = {.kind = MLFAB__RING_BARRIER,
                           .salt = g->signature,
                           .words = "the opening of a stochastic reduction"};
  g->object = mlfab__comm_object_add(g->comm, &object);
  if (!g->object) {
    gossip_free(g);
    return mlfab__error(error, MLFAB_ERR_LIMIT, MLFAB_NO_RANK, 0, 0,
                        "a stochastic reduction: %d objects are open", MLFAB__COMM_OBJECTS);
  }
  call.opens = g->object->id;
  int code = mlfab__comm_start(g->comm, &call, timeout_ns, now_ns, request_p, error);
  if (code) {
    gossip_remove(g);
  } else {
    g->opening = *request_p;
  }
  return code;
}

MLFAB__INTERNAL int mlfab__gossip_open(mlfab__comm *comm, uint64_t count, int dtype,
                                       const mlfab_stochastic_options *options, uint64_t timeout_ns,
                                       uint64_t now_ns, uint32_t *id_p, mlfab_request *request_p,
                                       mlfab_error *error) {
  mlfab_stochastic_options given = {0};
  if (!options || options->size < offsetof(mlfab_stochastic_options, degree))
    return gossip_refuse(error, MLFAB_ERR_ARGUMENT, "no options, or their size is not set");
  memcpy(&given, options, mlfab__min(options->size, sizeof given));
  int code = gossip_check_options(comm, count, dtype, &given, error);
  if (!code) code = gossip_check_state(comm, error);
  if (code) return code;
  mlfab__gossip *g = gossip_new(comm, count, dtype, &given);
  if (!g) return gossip_no_memory(error);
  mlfab__comm_enter(comm, now_ns);
  code = gossip_gather(g, timeout_ns, now_ns, request_p, error);
  if (!code) *id_p = g->object->id;
  mlfab__comm_exit(comm);
  return code;
}

/* One that is open, or NULL. */
static mlfab__gossip *gossip_find(mlfab__comm *comm, uint32_t id, mlfab_error *error) {
  mlfab__comm_object *object = mlfab__comm_object_find(comm, id);
  mlfab__gossip *g = object && object->frame == gossip_frame ? object->self : NULL;
  if (g && !g->closing) return g;
  (void)mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                     "no stochastic reduction with the number %u is open", id);
  return NULL;
}

MLFAB__INTERNAL int mlfab__gossip_state(mlfab__comm *comm, uint32_t id, mlfab_error *error) {
  mlfab__gossip *g = gossip_find(comm, id, error);
  if (!g) return MLFAB_ERR_ARGUMENT;
  mlfab__comm_enter(comm, 0);
  if (comm->phase == MLFAB__COMM_IN) gossip_prepare(g);
  mlfab__comm_exit(comm);
  if (g->wrong && error) *error = g->why;
  return g->wrong;
}

static int gossip_check_call(const mlfab__gossip *g, const void *data, mlfab_error *error) {
  if (!data) return gossip_refuse(error, MLFAB_ERR_ARGUMENT, "data is NULL");
  if ((uintptr_t)data % g->width)
    return gossip_refuse(error, MLFAB_ERR_ARGUMENT, "data is not aligned to its elements");
  if (g->request) return gossip_refuse(error, MLFAB_ERR_AGAIN, "an iteration is under way");
  if (!g->options.refuse_nan || mlfab__combine_finite(g->dtype, data, g->count)) return 0;
  return mlfab__error(error, MLFAB_ERR_NOT_FINITE, (int32_t)g->comm->rank, 0, 0,
                      "a stochastic reduction: worker %u has NaN or infinity in its data",
                      g->comm->rank);
}

MLFAB__INTERNAL int mlfab__gossip_start(mlfab__comm *comm, uint32_t id, void *data,
                                        uint64_t timeout_ns, uint64_t now_ns,
                                        mlfab_stochastic_info *info_p, mlfab_request *request_p,
                                        mlfab_error *error) {
  mlfab__gossip *g = gossip_find(comm, id, error);
  if (!g) return MLFAB_ERR_ARGUMENT;
  if (info_p && info_p->size < sizeof info_p->size)
    return gossip_refuse(error, MLFAB_ERR_ARGUMENT, "info's size is not set");
  int code = gossip_check_call(g, data, error);
  if (!code) code = gossip_check_state(comm, error);
  if (!code) code = mlfab__gossip_state(comm, id, error);
  if (code) return code;
  mlfab__request *request =
      mlfab__request_open(comm->requests, MLFAB__REQUEST_COLLECTIVE, MLFAB__COMM_REQUEST(id),
                          now_ns, timeout_ns ? timeout_ns : comm->config->timeout_ns);
  if (!request) return gossip_refuse(error, MLFAB_ERR_AGAIN, "too many requests are open");
  g->request = *request_p = request->id;
  g->data = data;
  g->info_p = info_p;
  mlfab__comm_enter(comm, now_ns);
  gossip_run(g);
  mlfab__comm_exit(comm);
  return 0;
}

/* Has somebody begun an iteration that this worker has not called? */
static int gossip_is_wanted(const mlfab__gossip *g) {
  for (uint32_t i = 0; i < g->notify.ins; i++) {
    if (g->notify.in[i].header > g->notify.ended) return 1;
  }
  for (uint32_t m = 0; g->reached && m < g->room; m++) {
    if (g->reached[m] > g->notify.ended) return 1;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__gossip_close(mlfab__comm *comm, uint32_t id, mlfab_error *error) {
  mlfab__gossip *g = gossip_find(comm, id, error);
  if (!g) return MLFAB_ERR_ARGUMENT;
  if (g->request) return gossip_refuse(error, MLFAB_ERR_STATE, "an iteration is under way");
  mlfab__comm_enter(comm, 0);
  if (gossip_is_wanted(g)) gossip_closed(g, g->notify.ended + 1);
  if (g->lent > 0) {
    g->closing = 1;
  } else {
    gossip_remove(g);
  }
  mlfab__comm_exit(comm);
  return 0;
}

#endif
