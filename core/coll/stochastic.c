/* stochastic.c - the communicator: runs stochastic reductions. See comm.h; notify.h decides when a model may be sent
 * and averaged.
 *
 * A graph over the members of the epoch tells which member sends to which. A worker has an array for each sender, into
 * which it writes the arriving bytes of models, and one array of its own, from which it sends. So it need not wait for
 * an acknowledgement before it replaces the caller's data by the mean. It writes that array again after all messages
 * have returned it. The streams copy small models instead.
 *
 * Messages: (channel, iteration, tag), never EAGER: models go to their place, the others have no bytes. The last byte
 * of a model is its footer: streams deliver in order, so NOTIFY needs no message of its own. BSP's barrier is a REACHED
 * from every member, sent before the models: like a barrier beside one-sided writes, it proves nothing about bytes.
 *
 * Iterations count from 1 in every epoch; a failed iteration leaves the caller's data as it was. Every epoch has a
 * graph of its members. If it has none, the object is `wrong` while the epoch stands, on all members alike, and no
 * other call fails.
 *
 * The mean adds the arrays in the order of members, with one rounding for each addition and one for the division: the
 * same inputs give the same bits.
 *
 * Source: ASAP §4, §6.2. Departs: iterations end with an epoch; notices come with the bytes. */
#include "stochastic.h"

#include "graph.h"
#include "notify.h"

#include <stdio.h>

enum { STOCHASTIC_MODEL = 1, STOCHASTIC_ACK, STOCHASTIC_REACHED }; /* tags */
enum { STOCHASTIC_BLOCK = 16 << 10 }; /* bytes that are summed and divided in cache */

typedef struct stochastic_slot {
  uint8_t *bytes;
  uint64_t got; /* received bytes of the arriving model */
} stochastic_slot;

struct mlfab__stochastic {
  mlfab__comm *comm;
  mlfab__comm_object object;
  mlfab_stochastic_options options; /* complete; edges are a copy */
  int dtype;
  uint32_t width;
  uint64_t count, bytes, signature;
  uint64_t iterations; /* number that this worker has finished, over all epochs */
  /* State of the epoch. */
  uint32_t epoch; /* 0: none */
  int wrong;      /* 1: there is no graph, for this reason: */
  mlfab_error why;
  mlfab__notify notify;
  uint32_t room;                    /* number of members for which the four lists have room */
  uint32_t *out_member, *in_member; /* ascending */
  uint32_t *out_rank, *in_rank;
  stochastic_slot *slots; /* by in-edge */
  const void **inputs;    /* of a mean: room for all senders and itself */
  uint64_t *reached;      /* BSP: iterations reached, by member */
  uint8_t *own, *sum;     /* the sent model; a block, if inputs are too many for a pass */
  uint32_t lent;          /* number of messages that borrow `own` */
  /* The iteration under way. */
  mlfab_request request; /* 0: none */
  void *data;
  mlfab_stochastic_info *info_p;
};

/* --- the graph of an epoch --- */

/* Frees all except `own`, which links may read until they know of the end. */
static void stochastic_forget(mlfab__stochastic *g) {
  mlfab__env *env = g->comm->env;
  for (uint32_t i = 0; g->slots && i < g->notify.ins; i++)
    mlfab__free_aligned(env, g->slots[i].bytes, g->bytes);
  mlfab__free(env, g->slots, g->notify.ins * sizeof *g->slots);
  mlfab__free(env, g->inputs, (g->notify.ins + 1) * sizeof *g->inputs);
  mlfab__free(env, g->reached, g->room * sizeof *g->reached);
  mlfab__free(env, g->out_member, 4 * (size_t)g->room * sizeof *g->out_member);
  mlfab__free_aligned(env, g->sum, STOCHASTIC_BLOCK);
  mlfab__notify_free(&g->notify, env);
  g->slots = NULL;
  g->inputs = NULL;
  g->reached = NULL;
  g->out_member = NULL;
  g->sum = NULL;
  g->epoch = g->room = g->lent = 0;
  g->wrong = 0;
}

static int stochastic_copies(const mlfab__stochastic *g) { return g->bytes <= MLFAB__STREAM_LEND; }

static int stochastic_no_memory(mlfab_error *error) {
  return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "a stochastic reduction: out of memory");
}

/* The graph under construction. In a graph by rule the nodes are members in their order, which puts members of one host
 * beside each other; in the user's graph they are members by rank. */
typedef struct stochastic_graph {
  mlfab_edge *edges;
  uint32_t n, room;
  uint32_t *member; /* by node */
  uint32_t *node;   /* by rank, plus one; 0: no member */
  uint32_t *peers;  /* nodes */
  uint8_t *marks;   /* by member */
} stochastic_graph;

static void stochastic_drop_graph(const mlfab__comm *comm, stochastic_graph *graph) {
  mlfab__free(comm->env, graph->edges, graph->room * sizeof *graph->edges);
  mlfab__free(comm->env, graph->member, comm->members * sizeof *graph->member);
  mlfab__free(comm->env, graph->node, comm->config->workers * sizeof *graph->node);
  mlfab__free(comm->env, graph->peers, comm->members * sizeof *graph->peers);
  mlfab__free(comm->env, graph->marks, comm->members);
}

static int stochastic_number(const mlfab__stochastic *g, stochastic_graph *graph) {
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
static int stochastic_users_edges(const mlfab__stochastic *g, stochastic_graph *graph) {
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

static int stochastic_build_edges(const mlfab__stochastic *g, stochastic_graph *graph,
                                  mlfab_error *error) {
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
  return MLFAB__FAIL(error, code,
                     "a stochastic reduction: no graph of kind %u and degree %u for %u workers",
                     o->graph, o->degree, members);
}

/* Graphs by rule pass by construction. */
static int stochastic_check(const mlfab__stochastic *g, const stochastic_graph *graph,
                            mlfab_error *error) {
  mlfab_graph_info info;
  mlfab_error what;
  uint32_t members = g->comm->members;
  if (g->options.graph != MLFAB_GRAPH_USER && g->options.graph != MLFAB_GRAPH_REGULAR) return 0;
  int code = mlfab_graph_check(graph->edges, graph->n, members, &info, &what);
  if (!code) return 0;
  return MLFAB__FAIL(error, code,
                     "a stochastic reduction: %.140s (nodes: the %u workers that take part)",
                     what.text, members);
}

/* Lists this worker's receivers or senders, ascending. Returns their number. */
static uint32_t stochastic_peers(const mlfab__comm *comm, const stochastic_graph *graph,
                                 int incoming, uint32_t *member, uint32_t *rank) {
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

/* Builds the lists of senders and receivers. */
static int stochastic_connect(mlfab__stochastic *g, const stochastic_graph *graph) {
  mlfab__comm *comm = g->comm;
  uint32_t members = comm->members;
  g->out_member = mlfab__alloc_array(comm->env, 4 * (size_t)members, sizeof *g->out_member);
  if (!g->out_member) return MLFAB_ERR_MEMORY;
  g->room = members;
  g->out_rank = g->out_member + members;
  g->in_member = g->out_rank + members;
  g->in_rank = g->in_member + members;
  uint32_t outs = stochastic_peers(comm, graph, 0, g->out_member, g->out_rank);
  uint32_t ins = stochastic_peers(comm, graph, 1, g->in_member, g->in_rank);
  return mlfab__notify_init(&g->notify, comm->env, g->options.mode, g->out_rank, outs, g->in_rank,
                            ins);
}

static int stochastic_arrays(mlfab__stochastic *g) {
  mlfab__env *env = g->comm->env;
  uint32_t ins = g->notify.ins;
  g->slots = mlfab__alloc_array(env, ins, sizeof *g->slots);
  g->inputs = mlfab__alloc_array(env, ins + 1, sizeof *g->inputs);
  if ((!g->slots && ins > 0) || !g->inputs) return MLFAB_ERR_MEMORY;
  for (uint32_t i = 0; i < ins; i++) {
    g->slots[i].bytes = mlfab__alloc_aligned(env, g->bytes);
    if (!g->slots[i].bytes) return MLFAB_ERR_MEMORY;
  }
  if (g->options.mode == MLFAB_STOCHASTIC_BSP) {
    g->reached = mlfab__alloc_array(env, g->room, sizeof *g->reached);
    if (!g->reached) return MLFAB_ERR_MEMORY;
  }
  if (!stochastic_copies(g) && !g->own) g->own = mlfab__alloc_aligned(env, g->bytes);
  if (ins + 1 > MLFAB__COMBINE_MOST) g->sum = mlfab__alloc_aligned(env, STOCHASTIC_BLOCK);
  return (!stochastic_copies(g) && !g->own) || (ins + 1 > MLFAB__COMBINE_MOST && !g->sum)
             ? MLFAB_ERR_MEMORY
             : 0;
}

/* Errors: MEMORY; others are in `error`. */
static int stochastic_build(mlfab__stochastic *g, mlfab_error *error) {
  stochastic_graph graph = {0};
  int code = stochastic_number(g, &graph);
  if (!code && g->comm->members > 1) {
    code = g->options.graph == MLFAB_GRAPH_USER ? stochastic_users_edges(g, &graph)
                                                : stochastic_build_edges(g, &graph, error);
    if (!code) code = stochastic_check(g, &graph, error);
  }
  if (!code) code = stochastic_connect(g, &graph);
  if (!code) code = stochastic_arrays(g);
  stochastic_drop_graph(g->comm, &graph);
  return code;
}

/* Ends the iteration with 0, or with an error of this worker alone. */
static void stochastic_finish(mlfab__stochastic *g, int code, const char *text) {
  mlfab_request request = g->request;
  g->request = 0;
  g->data = NULL;
  mlfab__comm_end_alone(g->comm, request, code, MLFAB_NO_RANK, text);
}

static void stochastic_fail_memory(const mlfab__stochastic *g) {
  mlfab__comm_fail(g->comm, MLFAB_ERR_MEMORY, MLFAB_NO_RANK,
                   "a stochastic reduction: worker %u is out of memory", g->comm->rank);
}

/* Prepares for the epoch, once the members are known: a member that is IN already may send. */
static void stochastic_prepare(mlfab__stochastic *g) {
  if (g->epoch == g->comm->epoch) return;
  stochastic_forget(g);
  g->epoch = g->comm->epoch;
  int code = stochastic_build(g, &g->why);
  if (code == MLFAB_ERR_MEMORY) {
    stochastic_fail_memory(g);
  } else if (code) {
    g->wrong = code;
    if (g->request) stochastic_finish(g, code, g->why.text);
  }
}

/* --- an iteration --- */

static mlfab__coll stochastic_head(const mlfab__stochastic *g, uint32_t tag, uint64_t iteration,
                                   uint64_t total) {
  return (mlfab__coll){.channel = g->object.channel,
                       .number = iteration,
                       .tag = tag,
                       .signature = g->signature,
                       .total = total};
}

static void stochastic_send(mlfab__stochastic *g, uint32_t member, uint32_t tag, const void *bytes,
                            uint64_t n, uint64_t iteration) {
  mlfab__coll head = stochastic_head(g, tag, iteration, n);
  int copy = bytes == NULL || stochastic_copies(g);
  int code = mlfab__stream_send(&g->comm->streams, member, &head, bytes, n, copy,
                                MLFAB__COMM_COOKIE(g->object.id));
  if (code) {
    stochastic_fail_memory(g);
  } else if (!copy) {
    g->lent++;
  }
}

/* Sends the model to all receivers at once, when it may go. */
static void stochastic_send_all(mlfab__stochastic *g) {
  mlfab__notify *notify = &g->notify;
  const mlfab__comm *comm = g->comm;
  const uint8_t *bytes = stochastic_copies(g) ? g->data : g->own;
  uint64_t k = notify->iteration;
  if (notify->unsent == 0 || !mlfab__notify_may_send(notify, 0) || g->lent > 0) return;
  for (uint32_t m = 0; g->reached && m < comm->members; m++) {
    if (m != comm->me) stochastic_send(g, m, STOCHASTIC_REACHED, NULL, 0, k);
  }
  if (g->own) memcpy(g->own, g->data, g->bytes);
  for (uint32_t i = 0; i < notify->outs && !comm->failing; i++) {
    stochastic_send(g, g->out_member[i], STOCHASTIC_MODEL, bytes, g->bytes, k);
    (void)mlfab__notify_sent(notify, i);
  }
}

/* BSP: returns the rank of the first member that has not reached this iteration, or NO_RANK. */
static int32_t stochastic_behind(const mlfab__stochastic *g) {
  const mlfab__comm *comm = g->comm;
  for (uint32_t m = 0; m < comm->members; m++) {
    if (m != comm->me && g->reached[m] < g->notify.iteration) return (int32_t)comm->ranks[m];
  }
  return MLFAB_NO_RANK;
}

static mlfab__notify_stamps stochastic_stamps(const mlfab__stochastic *g, uint32_t edge) {
  return (mlfab__notify_stamps){g->notify.in[edge].header, g->notify.in[edge].footer};
}

/* Adds this sender's model to the inputs if it is whole. Errors: of mlfab__notify_consumed. */
static int stochastic_take(mlfab__stochastic *g, uint32_t edge, uint32_t *n_p, mlfab_error *error) {
  mlfab__notify_stamps stamps = stochastic_stamps(g, edge);
  uint64_t ack;
  int input = mlfab__notify_consumed(&g->notify, edge, stamps, stamps, &ack, error);
  if (input == MLFAB__NOTIFY_WHOLE) g->inputs[(*n_p)++] = g->slots[edge].bytes;
  return input < 0 ? input : 0;
}

/* Collects the inputs in the order of members: returns their number, or 0 after a failure. Slots are not written until
 * the caller has averaged. */
static uint32_t stochastic_inputs(mlfab__stochastic *g) {
  uint32_t n = 0, own = 0;
  for (uint32_t i = 0; i <= g->notify.ins; i++) {
    mlfab_error error;
    if (!own && (i == g->notify.ins || g->in_member[i] > g->comm->me)) {
      g->inputs[n++] = g->data;
      own = 1;
    }
    if (i < g->notify.ins && stochastic_take(g, i, &n, &error)) {
      mlfab__comm_fail(g->comm, error.code, error.rank, "%s", error.text);
      return 0;
    }
  }
  return n;
}

/* Writes the mean of `n` inputs over the data, from byte `at` on. */
static void stochastic_mean(const mlfab__stochastic *g, uint32_t n, uint64_t at, uint64_t bytes) {
  const void *in[MLFAB__COMBINE_MOST];
  void *data = (uint8_t *)g->data + at;
  for (uint32_t done = 0; done < n;) {
    uint32_t k = 0;
    if (done > 0) in[k++] = g->sum;
    for (; k < MLFAB__COMBINE_MOST && done < n; done++)
      in[k++] = (const uint8_t *)g->inputs[done] + at;
    void *dst = done < n ? g->sum : data;
    mlfab__kernel_combine_many_by(g->comm->config->kernels, MLFAB_OP_SUM, g->dtype, &dst, 1, in, k,
                                  bytes / g->width, 0);
  }
  mlfab__kernel_divide(g->dtype, data, bytes / g->width, n);
}

/* Averages, acknowledges, and ends the iteration; a later failure fails the next. */
static void stochastic_reduce(mlfab__stochastic *g) {
  mlfab__notify_tally tally = {0, 0, 0};
  uint64_t k = g->notify.iteration;
  uint32_t n = stochastic_inputs(g);
  if (n == 0) return;
  for (uint64_t at = 0; n > 1 && at < g->bytes; at += STOCHASTIC_BLOCK)
    stochastic_mean(g, n, at, mlfab__min(STOCHASTIC_BLOCK, g->bytes - at));
  (void)mlfab__notify_end(&g->notify, &tally);
  for (uint32_t i = 0; g->options.mode == MLFAB_STOCHASTIC_NOTIFY_ACK && i < g->notify.ins; i++)
    stochastic_send(g, g->in_member[i], STOCHASTIC_ACK, NULL, 0, k);
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
  stochastic_finish(g, 0, "");
}

/* Continues the iteration as far as possible. */
static void stochastic_run(mlfab__stochastic *g) {
  const mlfab__comm *comm = g->comm;
  mlfab__notify *notify = &g->notify;
  if (!g->request || g->wrong || comm->phase != MLFAB__COMM_IN || g->epoch != comm->epoch) return;
  if (notify->iteration == notify->ended) {
    (void)mlfab__notify_begin(notify, notify->ended + 1);
    g->object.waits_for = notify->iteration;
  }
  stochastic_send_all(g);
  if (comm->failing) return;
  if (g->reached && notify->unsent == 0 && stochastic_behind(g) == MLFAB_NO_RANK)
    (void)mlfab__notify_barrier(notify, notify->iteration);
  if (mlfab__notify_ready(notify)) stochastic_reduce(g);
}

/* --- incoming messages --- */

static void stochastic_wrong(const mlfab__stochastic *g, uint32_t member, const char *what) {
  uint32_t rank = g->comm->ranks[member];
  mlfab__comm_fail(g->comm, MLFAB_ERR_FRAME, (int32_t)rank,
                   "a stochastic reduction: worker %u sent %s", rank, what);
}

/* Writes bytes of a model to the sender's slot. */
static void stochastic_model(mlfab__stochastic *g, uint32_t member, const mlfab__coll *head,
                             const void *bulk, uint32_t bytes) {
  int32_t edge = mlfab__notify_edge(g->in_member, g->notify.ins, member);
  mlfab_error error;
  int code = 0;
  if (edge < 0 || head->total != g->bytes) {
    stochastic_wrong(g, member, edge < 0 ? "a model and is no sender" : "a model of another size");
    return;
  }
  stochastic_slot *slot = &g->slots[edge];
  if (slot->got == g->bytes) slot->got = 0;
  if (head->offset != slot->got) {
    stochastic_wrong(g, member, "a model's bytes out of order");
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
  if (code) mlfab__comm_fail(g->comm, code, error.rank, "%s", error.text);
}

static void stochastic_ack(mlfab__stochastic *g, uint32_t member, uint64_t iteration) {
  int32_t edge = mlfab__notify_edge(g->out_member, g->notify.outs, member);
  mlfab_error error;
  if (edge < 0) {
    stochastic_wrong(g, member, "an acknowledgement and is no receiver");
  } else if (mlfab__notify_acked(&g->notify, (uint32_t)edge, iteration, &error)) {
    mlfab__comm_fail(g->comm, error.code, error.rank, "%s", error.text);
  }
}

static void stochastic_reaches(mlfab__stochastic *g, uint32_t member, uint64_t iteration) {
  if (!g->reached || iteration != g->reached[member] + 1) {
    stochastic_wrong(g, member, "the barrier of another iteration");
  } else {
    g->reached[member] = iteration;
  }
}

/* Takes a frame for an object closed here. Frames of earlier iterations may still come; ASYNC waits for nobody. */
static void stochastic_closed(const mlfab__stochastic *g, uint64_t iteration) {
  if (g->options.mode == MLFAB_STOCHASTIC_ASYNC || iteration <= g->notify.ended) return;
  mlfab__comm_fail(g->comm, MLFAB_ERR_PEER_CLOSED, MLFAB_NO_RANK, "worker %u has closed object %u",
                   g->comm->rank, g->object.channel);
}

static void stochastic_frame(void *self, uint32_t member, const mlfab__coll *head, const void *bulk,
                             uint32_t bytes) {
  mlfab__stochastic *g = self;
  if (!g->object.closing) stochastic_prepare(g);
  if (g->comm->failing || g->wrong) return;
  if (g->object.closing) {
    stochastic_closed(g, head->number);
  } else if (head->signature != g->signature) {
    mlfab__comm_fail(g->comm, MLFAB_ERR_MISMATCH, (int32_t)g->comm->ranks[member],
                     "workers %u and %u have opened object %u with other options", g->comm->rank,
                     g->comm->ranks[member], g->object.channel);
  } else if (head->tag == STOCHASTIC_MODEL) {
    stochastic_model(g, member, head, bulk, bytes);
  } else if (head->tag == STOCHASTIC_ACK) {
    stochastic_ack(g, member, head->number);
  } else if (head->tag == STOCHASTIC_REACHED) {
    stochastic_reaches(g, member, head->number);
  } else {
    stochastic_wrong(g, member, "a message of an unknown kind");
  }
  if (!g->comm->failing) stochastic_run(g);
}

/* --- the end --- */

static void stochastic_free(void *self) {
  mlfab__stochastic *g = self;
  mlfab__env *env = g->comm->env;
  stochastic_forget(g);
  mlfab__free_aligned(env, g->own, g->bytes);
  mlfab__free(env, (void *)(uintptr_t)g->options.edges,
              g->options.nedges * sizeof *g->options.edges);
  mlfab__free(env, g, sizeof *g);
}

static void stochastic_remove(mlfab__stochastic *g) {
  g->object.upto = g->options.mode == MLFAB_STOCHASTIC_ASYNC ? UINT64_MAX : g->notify.ended + 1;
  mlfab__comm_object_bury(g->comm, &g->object);
}

static void stochastic_given_back(void *self) {
  mlfab__stochastic *g = self;
  g->lent--;
  if (!g->object.closing) {
    stochastic_run(g);
  } else if (g->lent == 0) {
    stochastic_remove(g);
  }
}

static void stochastic_begin(void *self) {
  mlfab__stochastic *g = self;
  stochastic_prepare(g);
  if (!g->comm->failing) stochastic_run(g);
}

static void stochastic_over(void *self) {
  mlfab__stochastic *g = self;
  if (g->request) mlfab__comm_end_request(g->comm, g->request);
  g->request = 0;
  g->data = NULL;
  const mlfab__request *opening = mlfab__request_find(g->comm->requests, g->object.opening);
  int never_open = opening && opening->done && opening->result.status;
  if (g->object.closing || never_open) {
    stochastic_remove(g);
  } else {
    stochastic_forget(g);
  }
}

static int32_t stochastic_awaited(void *self, uint64_t *number_p, const char **why_p) {
  const mlfab__stochastic *g = self;
  int32_t rank;
  (void)why_p;
  *number_p = g->iterations + 1;
  return mlfab__notify_awaits(&g->notify, &rank) == MLFAB__NOTIFY_FOR_BARRIER ? stochastic_behind(g)
                                                                              : rank;
}

/* A worker that waits has done its part. */
static int stochastic_called(void *self, uint64_t number) {
  const mlfab__stochastic *g = self;
  return g->request || number <= g->notify.ended;
}

/* --- calls --- */

static const char stochastic_what[] = "a stochastic reduction";

static const mlfab__comm_kind stochastic_kind = {.what = stochastic_what,
                                                 .opening = "the opening of a stochastic reduction",
                                                 .counts = "iteration",
                                                 .absent = "has not called it",
                                                 .frame = stochastic_frame,
                                                 .given_back = stochastic_given_back,
                                                 .begin = stochastic_begin,
                                                 .over = stochastic_over,
                                                 .awaited = stochastic_awaited,
                                                 .called = stochastic_called,
                                                 .free_self = stochastic_free};

static int stochastic_refuse(mlfab_error *error, int code, const char *what) {
  return MLFAB__FAIL(error, code, "a stochastic reduction: %s", what);
}

static int stochastic_check_edges(const mlfab__comm *comm, const mlfab_stochastic_options *o,
                                  mlfab_error *error) {
  uint32_t workers = comm->config->workers;
  if (o->nedges == 0 || !o->edges) return stochastic_refuse(error, MLFAB_ERR_ARGUMENT, "no edges");
  if (o->nedges > MLFAB__GRAPH_NODES_MAX * MLFAB__GRAPH_NODES_MAX)
    return stochastic_refuse(error, MLFAB_ERR_LIMIT, "more than 1048576 edges");
  for (uint32_t k = 0; k < o->nedges; k++) {
    if (o->edges[k].from < workers && o->edges[k].to < workers) continue;
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "a stochastic reduction: edge %u leads from %u to %u, and there are %u "
                       "workers, from 0",
                       k, o->edges[k].from, o->edges[k].to, workers);
  }
  return 0;
}

static int stochastic_check_options(const mlfab__comm *comm, uint64_t count, int dtype,
                                    const mlfab_stochastic_options *o, mlfab_error *error) {
  if (dtype != MLFAB_F32 && dtype != MLFAB_F64)
    return MLFAB__FAIL(error, MLFAB_ERR_DTYPE,
                       "a stochastic reduction: type %d, and only MLFAB_F32 and MLFAB_F64 can be",
                       dtype);
  int code =
      mlfab__comm_check_count(comm, stochastic_what, count, mlfab__element_bytes(dtype), error);
  if (code) return code;
  if (o->graph < MLFAB_GRAPH_ALL || o->graph > MLFAB_GRAPH_USER || o->graph == MLFAB_GRAPH_STAR)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "a stochastic reduction: %u is not a graph to reduce over (MLFAB_GRAPH_*, "
                       "not STAR)",
                       o->graph);
  if (o->mode > MLFAB_STOCHASTIC_ASYNC)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "a stochastic reduction: %u is not a mode (MLFAB_STOCHASTIC_*)", o->mode);
  return o->graph == MLFAB_GRAPH_USER ? stochastic_check_edges(comm, o, error) : 0;
}

/* Returns a hash of the options that must be equal on all workers. */
static uint64_t stochastic_signature(const mlfab__stochastic *g) {
  const mlfab_stochastic_options *o = &g->options;
  const uint64_t of[] = {(uint64_t)g->dtype, g->count, o->graph, o->degree, o->mode,
                         o->refuse_nan,      o->seed,  o->nedges};
  uint64_t hash = mlfab__hash(0, of, sizeof of);
  if (o->nedges > 0) hash = mlfab__hash(hash, o->edges, o->nedges * sizeof *o->edges);
  return hash;
}

static mlfab__stochastic *stochastic_new(mlfab__comm *comm, uint64_t count, int dtype,
                                         const mlfab_stochastic_options *options) {
  mlfab__stochastic *g = mlfab__alloc(comm->env, sizeof *g);
  if (!g) return NULL;
  g->comm = comm;
  g->dtype = dtype;
  g->width = mlfab__element_bytes(dtype);
  g->count = count;
  g->bytes = count * g->width;
  g->options = *options;
  g->options.refuse_nan = options->refuse_nan != 0;
  if (!g->options.mode) g->options.mode = MLFAB_STOCHASTIC_NOTIFY_ACK;
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
      stochastic_free(g);
      return NULL;
    }
    memcpy(edges, options->edges, options->nedges * sizeof *edges);
  }
  g->signature = stochastic_signature(g);
  return g;
}

MLFAB__INTERNAL int mlfab__stochastic_open(mlfab__comm *comm, uint64_t count, int dtype,
                                           const mlfab_stochastic_options *options,
                                           uint64_t timeout_ns, uint64_t now_ns, uint32_t *id_p,
                                           mlfab_request *request_p, mlfab_error *error) {
  mlfab_stochastic_options given = {0};
  if (!options || options->size < offsetof(mlfab_stochastic_options, degree))
    return stochastic_refuse(error, MLFAB_ERR_ARGUMENT, "no options, or their size is not set");
  memcpy(&given, options, mlfab__min(options->size, sizeof given));
  int code = stochastic_check_options(comm, count, dtype, &given, error);
  if (!code) code = mlfab__comm_check_ready(comm, stochastic_what, error);
  if (code) return code;
  mlfab__stochastic *g = stochastic_new(comm, count, dtype, &given);
  if (!g) return stochastic_no_memory(error);
  code = mlfab__comm_object_open(comm, &g->object, &stochastic_kind, g, g->signature, timeout_ns,
                                 now_ns, request_p, error);
  if (code)
    stochastic_free(g);
  else
    *id_p = g->object.id;
  return code;
}

MLFAB__INTERNAL int mlfab__stochastic_state(mlfab__comm *comm, uint32_t id, mlfab_error *error) {
  mlfab__stochastic *g = mlfab__comm_object_get(comm, &stochastic_kind, id, error);
  if (!g) return MLFAB_ERR_ARGUMENT;
  mlfab__comm_enter(comm, 0);
  if (comm->phase == MLFAB__COMM_IN) stochastic_prepare(g);
  mlfab__comm_exit(comm);
  if (g->wrong && error) *error = g->why;
  return g->wrong;
}

static int stochastic_check_call(const mlfab__stochastic *g, const void *data, mlfab_error *error) {
  int code = mlfab__comm_check_data(stochastic_what, data, g->width, error);
  if (code) return code;
  if (g->request) return stochastic_refuse(error, MLFAB_ERR_AGAIN, "an iteration is under way");
  if (!g->options.refuse_nan || mlfab__elements_finite(g->dtype, data, g->count)) return 0;
  return mlfab__comm_not_finite(g->comm, stochastic_what, error);
}

MLFAB__INTERNAL uint64_t mlfab__stochastic_bytes(mlfab__comm *comm, uint32_t id,
                                                 uint32_t *width_p) {
  mlfab_error ignored;
  const mlfab__stochastic *g = mlfab__comm_object_get(comm, &stochastic_kind, id, &ignored);
  if (!g) return 0;
  *width_p = g->width;
  return g->bytes;
}

MLFAB__INTERNAL int mlfab__stochastic_start(mlfab__comm *comm, uint32_t id, void *data,
                                            uint64_t timeout_ns, uint64_t now_ns,
                                            mlfab_stochastic_info *info_p, mlfab_request *request_p,
                                            mlfab_error *error) {
  mlfab__stochastic *g = mlfab__comm_object_get(comm, &stochastic_kind, id, error);
  if (!g) return MLFAB_ERR_ARGUMENT;
  if (info_p && info_p->size < sizeof info_p->size)
    return stochastic_refuse(error, MLFAB_ERR_ARGUMENT, "info's size is not set");
  int code = stochastic_check_call(g, data, error);
  if (!code) code = mlfab__comm_check_ready(comm, stochastic_what, error);
  if (!code) code = mlfab__stochastic_state(comm, id, error);
  if (code) return code;
  code = mlfab__comm_object_request(comm, &g->object, timeout_ns, now_ns, request_p, error);
  if (code) return code;
  g->request = *request_p;
  g->data = data;
  g->info_p = info_p;
  mlfab__comm_enter(comm, now_ns);
  stochastic_run(g);
  mlfab__comm_exit(comm);
  return 0;
}

/* Returns 1 if another worker has begun an iteration that this one has not called. */
static int stochastic_is_wanted(const mlfab__stochastic *g) {
  for (uint32_t i = 0; i < g->notify.ins; i++) {
    if (g->notify.in[i].header > g->notify.ended) return 1;
  }
  for (uint32_t m = 0; g->reached && m < g->room; m++) {
    if (g->reached[m] > g->notify.ended) return 1;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__stochastic_close(mlfab__comm *comm, uint32_t id, mlfab_error *error) {
  mlfab__stochastic *g = mlfab__comm_object_get(comm, &stochastic_kind, id, error);
  if (!g) return MLFAB_ERR_ARGUMENT;
  if (g->request) return stochastic_refuse(error, MLFAB_ERR_STATE, "an iteration is under way");
  mlfab__comm_enter(comm, 0);
  if (stochastic_is_wanted(g)) stochastic_closed(g, g->notify.ended + 1);
  if (g->lent > 0) {
    g->object.closing = 1;
  } else {
    stochastic_remove(g);
  }
  mlfab__comm_exit(comm);
  return 0;
}
