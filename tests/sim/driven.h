/* driven.h - nodes on the simulator's transport that a test drives by itself, so that all of them can wait at once. */
#ifndef DRIVEN_H
#define DRIVEN_H

#include "mlfab_sim.h"
#include "mlfab_node.h"

#include <string.h>

#define SUBMIT(node, at, request_p, name, ...)                                                     \
  mlfab_node_submit(                                                                               \
      node, &(mlfab_call){.size = sizeof(mlfab_call), .kind = MLFAB_CALL_##name, __VA_ARGS__}, at, \
      request_p)

static inline uint64_t driven_clock(void *sim) { return mlfab_sim_clock(sim); }
static inline void driven_log(void *sim, int level, const char *line) {
  (void)sim, (void)level, (void)line;
}

/* A node with this configuration, and its transport, on a host of the simulation. config->env, or NULL: what the
 * transport has, the time of the simulation, the usual memory and no log. An error is in *error. */
static inline int driven_open(mlfab_sim *sim, uint32_t host, const mlfab_config *config,
                              mlfab_node **node_p, void **link_p, mlfab_error *error) {
  const mlfab_transport *transport = mlfab_transport_sim();
  mlfab_env env = {.size = sizeof env, .clock = driven_clock, .log = driven_log, .user = sim};
  mlfab_transport_options options = {.size = sizeof options,
                                     .listen = "",
                                     .ifname = "",
                                     .job = "mlfab",
                                     .env = &env,
                                     .user = mlfab_sim_host(sim, host),
                                     .error = error};
  mlfab_config c = *config;
  char address[256];
  memset(error, 0, sizeof *error);
  if (!c.env) c.env = &env;
  int code = transport->open(&options, link_p, address);
  return code ? code : mlfab_node_open(&c, address, mlfab_sim_clock(sim), node_p, error);
}

/* Removes a node without a goodbye. */
static inline void driven_kill(mlfab_node **node_p, void *link) {
  mlfab_transport_sim()->close(link);
  mlfab_node_close(node_p);
}

static inline int driven_act(void *link, const mlfab_action *a) {
  const mlfab_transport *sim = mlfab_transport_sim();
  switch (a->kind) {
    case MLFAB_ACTION_SEND:
      return sim->send(link, a->link, a->head, a->head_bytes, a->bulk, a->bulk_bytes, a->token);
    case MLFAB_ACTION_CONNECT:
      return sim->connect(link, a->address, a->token);
    case MLFAB_ACTION_DETACH:
      return sim->detach(link, a->link, a->token);
    case MLFAB_ACTION_PROBE:
      return sim->probe(link, a->link);
    default:
      sim->disconnect(link, a->link);
      return 0;
  }
}

/* Lets a node do all that it can at this time. */
static inline void driven_pump(mlfab_node *node, void *link, uint64_t now_ns) {
  const mlfab_transport *sim = mlfab_transport_sim();
  mlfab_io_event event;
  mlfab_action action;
  for (int more = 1; more;) {
    more = 0;
    while (sim->poll(link, &event)) {
      if (event.kind == MLFAB_IO_UP) event.caps = sim->caps;
      mlfab_node_event(node, &event, now_ns);
      sim->release(link, &event);
      more = 1;
      while (mlfab_node_next(node, now_ns, &action))
        mlfab_node_done(node, &action, driven_act(link, &action), now_ns);
    }
    if (now_ns >= mlfab_node_deadline(node)) mlfab_node_tick(node, now_ns);
    while (mlfab_node_next(node, now_ns, &action)) {
      mlfab_node_done(node, &action, driven_act(link, &action), now_ns);
      more = 1;
    }
  }
  sim->flush(link);
}

#endif
