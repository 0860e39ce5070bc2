/*
 * mlfab_sim.h - the simulator: a network of hosts in one process and one thread, in virtual time, from a seed.
 *
 * For tests, for trying a policy before you rent a cluster, and for learning: examples/02_hello_sim.c. libmlfab.a has
 * it. To use it without the library, copy mlfab_sim.h and mlfab_sim.c beside mlfab.h and mlfab.c, and compile both
 * sources:
 *
 *    cc -O2 -c mlfab.c mlfab_sim.c
 *
 * It is a transport like any other (mlfab_transport.h) and a clock. mlfab_sim_open opens a context on a simulated
 * host. The same by hand: transport = mlfab_transport_sim(), transport_user = mlfab_sim_host(sim, i), env->clock =
 * mlfab_sim_clock with env->user = sim.
 *
 * The same seed and the same calls give the same events and the same mlfab_sim_trace_hash. One thread at a time may
 * use a simulation. The rules of mlfab.h apply: return values, NULL, `size`, units.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_SIM_H
#define MLFAB_SIM_H

#include "mlfab.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mlfab_sim mlfab_sim;

typedef struct mlfab_sim_options {
  uint32_t size;
  uint32_t hosts;      /* at least 1 */
  uint64_t seed;       /* 0: 1 */
  uint64_t latency_ns; /* one way; 0: 50 us */
  /* 0..1: each frame takes up to this share of latency_ns longer, uniformly; a link keeps its order. */
  double latency_jitter;
  uint64_t rate_bytes_per_s; /* each host's in and out capacity; 0: 1.25e9 */
  uint64_t buffer_bytes;     /* of a link; a send beyond it gets AGAIN; 0: 4 MiB */
  /* Fault menu. Each member is the probability of a fault, per frame or per second; 0: never. */
  double loss;      /* per frame: the connection breaks; the frame and all behind it are lost */
  double duplicate; /* per frame: the connection breaks after delivery; acknowledgements are lost */
  double reorder;   /* per frame: delayed up to 20 latencies; frames of other links overtake it */
  double partition; /* per second: two hosts cannot communicate for up to partition_ns */
  double crash;     /* per second and host of mlfab_sim_on_crash: it crashes */
  double pause;     /* per second and host: it does nothing for up to pause_ns */
  double slow;      /* per second and host: it has a tenth of its rate for up to pause_ns */
  uint64_t partition_ns, pause_ns; /* 0: 1 s */
  const mlfab_env *env;            /* memory and log; NULL: the built-in hooks */
} mlfab_sim_options;

/* Makes a network of hosts without nodes. Errors: ARGUMENT, MEMORY. */
MLFAB_API int mlfab_sim_create(const mlfab_sim_options *options, mlfab_sim **sim_p);
/* Close the contexts on it before. */
MLFAB_API void mlfab_sim_destroy(mlfab_sim **sim_p);
MLFAB_API uint64_t mlfab_sim_clock(void *sim); /* virtual nanoseconds */
MLFAB_API void *mlfab_sim_host(mlfab_sim *sim, uint32_t host);
MLFAB_API const mlfab_transport *mlfab_transport_sim(void);
/* Opens a context on a host; the simulator drives it. As mlfab_open_start: run the simulator until mlfab_is_ready
 * returns 1. config.coordinator "": "sim:0". */
MLFAB_API int mlfab_sim_open(mlfab_sim *sim, uint32_t host, const mlfab_config *config,
                             mlfab **ctx_p, mlfab_error *error_p);
/* Carries out the next event on any host. Returns 1, or 0 when there is no event left. */
MLFAB_API int mlfab_sim_step(mlfab_sim *sim);
/* Runs for `duration_ns` of virtual time. */
MLFAB_API void mlfab_sim_run(mlfab_sim *sim, uint64_t duration_ns);
/* Calls `fn` at the virtual time `at_ns`, for example when a worker's computation ends. It may use the contexts, and
 * call mlfab_sim_at again. Errors: MEMORY. */
MLFAB_API int mlfab_sim_at(mlfab_sim *sim, uint64_t at_ns, void (*fn)(void *user), void *user);
/* Calls `fn` each time after the host's context was driven, at the same virtual time: a request may have finished. It
 * may do what a callback of mlfab_sim_at may do. fn NULL: stop. */
MLFAB_API int mlfab_sim_watch(mlfab_sim *sim, uint32_t host, void (*fn)(void *user), void *user);
/* Sets a host's capacity in and out, bytes per second; 0: nothing passes. */
MLFAB_API int mlfab_sim_set_rate(mlfab_sim *sim, uint32_t host, uint64_t in, uint64_t out);
/* Replaces the fault menu: loss to slow, partition_ns and pause_ns; the other members are ignored. NULL: no new
 * faults; those under way end at their time. */
MLFAB_API int mlfab_sim_set_faults(mlfab_sim *sim, const mlfab_sim_options *options);
/* Makes two hosts share network links, as two processes of one machine do; frames between the two do not use them.
 * Before a context is opened on `host`. */
MLFAB_API int mlfab_sim_share(mlfab_sim *sim, uint32_t host, uint32_t with);
/* cut 1: hosts a and b cannot communicate; 0: they can again. */
MLFAB_API int mlfab_sim_partition(mlfab_sim *sim, uint32_t a, uint32_t b, int cut);
/* The host does nothing for `duration_ns`. */
MLFAB_API int mlfab_sim_pause(mlfab_sim *sim, uint32_t host, uint64_t duration_ns);
/* Crashes a host: its links break and its context is abandoned; the *ctx_p of mlfab_sim_open becomes NULL. */
MLFAB_API int mlfab_sim_crash(mlfab_sim *sim, uint32_t host);
/* Lets the fault menu crash this host, and calls `fn` then, which may open a new context there. */
MLFAB_API int mlfab_sim_on_crash(mlfab_sim *sim, uint32_t host,
                                 void (*fn)(void *user, uint32_t host), void *user);
/* A hash of all events so far. */
MLFAB_API int mlfab_sim_trace_hash(mlfab_sim *sim, uint64_t *hash_p);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_SIM_H */
