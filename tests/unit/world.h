/* world.h - a simulated fabric in one process, for tests that need several nodes.
 *
 * Workers live on hosts 0.., dedicated servers behind them. Time is virtual, so that deadlines and
 * deaths cost nothing; blocking calls run the simulator until they are answered. */
#ifndef WORLD_H
#define WORLD_H

#include "mlfab_sim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { WORLD_NODES = 8 };
#define WORLD_MS 1000000u
/* Is everything compiled in? Not in the runs of tests/dropin/switches.sh, which skip tests of more than
 * pushes and pulls. */
#ifndef WORLD_COMPLETE
#define WORLD_COMPLETE 1
#endif

#define WORLD_S 1000000000u

/* --- nodes of a simulation --- */

static inline void sim_open(mlfab_sim *sim, uint32_t host, const mlfab_config *config,
                            mlfab **node_p) {
  mlfab_error error;
  if (mlfab_sim_open(sim, host, config, node_p, &error))
    fail_msg("host %u: %s", (unsigned)host, error.text);
}

static inline void sim_step(mlfab_sim *sim) {
  if (!mlfab_sim_step(sim)) fail_msg("nothing happens any more");
}

/* 1 when the node has joined. */
static inline int sim_ready(mlfab *node) {
  mlfab_error error;
  int ready = mlfab_is_ready(node, &error);
  if (ready < 0) fail_msg("a node cannot join: %s", error.text);
  return ready;
}

/* Lets time pass until the node has joined. */
static inline void sim_await(mlfab_sim *sim, mlfab *node) {
  while (!sim_ready(node)) sim_step(sim);
}

/* --- a world --- */

typedef struct world {
  mlfab_sim *sim;
  uint32_t workers, servers, dedicated, nodes;
  mlfab *node[WORLD_NODES];  /* workers, then dedicated servers */
  mlfab_config config;       /* common to all nodes */
  mlfab_event_info seen[64]; /* events of all nodes, in order */
  char said[64][96];
  uint32_t nseen;
} world;

static inline void world_event(void *user, const mlfab_event_info *info) {
  world *w = (world *)user;
  if (w->nseen == 64) return;
  snprintf(w->said[w->nseen], sizeof w->said[0], "%s", info->text ? info->text : "");
  w->seen[w->nseen] = *info;
  w->seen[w->nseen].text = w->said[w->nseen];
  w->nseen++;
}

/* Was this kind of event reported about this rank? */
static inline int world_saw(const world *w, uint32_t kind, int32_t rank, uint32_t is_server) {
  for (uint32_t i = 0; i < w->nseen; i++) {
    if (w->seen[i].kind == kind && w->seen[i].rank == rank && w->seen[i].is_server == is_server)
      return 1;
  }
  return 0;
}

/* The configuration of node i of this world. */
static inline mlfab_config world_config(world *w, uint32_t i) {
  mlfab_config c = w->config;
  c.workers = w->workers;
  c.servers = w->servers;
  c.dedicated = w->dedicated;
  c.rank = (int32_t)(i < w->workers ? i : i - w->workers);
  if (w->dedicated) c.roles = i < w->workers ? MLFAB_ROLE_WORKER : MLFAB_ROLE_SERVER;
  snprintf(c.coordinator, sizeof c.coordinator, "sim:%u", w->dedicated ? w->workers : 0);
  if (!c.on_event && !c.user) {
    c.on_event = world_event;
    c.user = w;
  }
  return c;
}

static inline void world_init(world *w, uint32_t workers, uint32_t servers, uint32_t dedicated) {
  memset(w, 0, sizeof *w);
  w->workers = workers;
  w->servers = servers;
  w->dedicated = dedicated;
  w->nodes = workers + (dedicated ? servers : 0);
  assert_true(w->nodes <= WORLD_NODES);
  mlfab_config_init(&w->config);
}

static inline void world_network(world *w, uint64_t seed) {
  mlfab_sim_options options;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.hosts = w->nodes;
  options.seed = seed;
  assert_int_equal(mlfab_sim_create(&options, &w->sim), 0);
}

static inline void world_await(world *w, uint32_t i) { sim_await(w->sim, w->node[i]); }

static inline void world_open(world *w, uint64_t seed) {
  world_network(w, seed);
  for (uint32_t i = 0; i < w->nodes; i++) {
    mlfab_config c = world_config(w, i);
    sim_open(w->sim, i, &c, &w->node[i]);
  }
  for (uint32_t i = 0; i < w->nodes; i++) world_await(w, i);
}

/* Abandons all nodes at once; tests of closing close them before. */
static inline void world_close(world *w) {
  for (uint32_t i = 0; i < w->nodes; i++) {
    if (w->node[i]) mlfab_abandon(&w->node[i]);
  }
  mlfab_sim_destroy(&w->sim);
}

/* The call must have ended with `wanted`; otherwise fails with the node's text. An error without a rank
 * names no server. */
static inline void world_expect(mlfab *node, int code, int wanted, const char *what) {
  mlfab_error error;
  if (code == 0 && wanted == 0) return;
  memset(&error, 0, sizeof error);
  if (node) mlfab_last_error(node, &error);
  if (error.code == code && error.rank == MLFAB_NO_RANK) assert_int_equal(error.is_server, 0);
  if (code == wanted) return;
  fail_msg("%s: %s instead of %s (%s)", what, mlfab_error_name(code), mlfab_error_name(wanted),
           error.text);
}
#define EXPECT(node, call, wanted) world_expect(node, call, wanted, #call)
#define OK(node, call) world_expect(node, call, 0, #call)

#endif
