/*
 * mlfab_sim.h - the simulator: a network of hosts in one process and one thread, in virtual time, from a seed.
 *
 * For tests, for trying out a policy before a cluster is rented, and for learning: examples/01_hello_sim.c.
 * It is in libmlfab.a; who copies files into a project copies mlfab_sim.h and mlfab_sim.c besides mlfab.h and
 * mlfab.c, and compiles both sources:
 *
 *    cc -O2 -c mlfab.c mlfab_sim.c
 *
 * It is a transport like any other (mlfab.h, section 12) and a clock. mlfab_sim_open opens a context on a
 * simulated host. What it does can be done by hand: transport = mlfab_transport_sim(), transport_user =
 * mlfab_sim_host(sim, i), and env->clock = mlfab_sim_clock with env->user = sim.
 *
 * Same seed, same calls: the same events, and the same mlfab_sim_trace_hash. A simulation belongs to one
 * thread at a time. Conventions are those of mlfab.h.
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
  uint32_t hosts;            /* at least 1 */
  uint64_t seed;             /* 0: 1 */
  uint64_t latency_ns;       /* one way; 0: 50 us */
  double latency_jitter;     /* 0..1, a uniform part of latency_ns added per frame; order is kept
                                 within a link */
  uint64_t rate_bytes_per_s; /* each host's in and out capacity; 0: 1.25e9 */
  uint64_t buffer_bytes;     /* of a link: a send beyond it is refused with AGAIN; 0: 4 MiB */
  /* Fault menu: each is a probability a frame, or a second and host; 0: never. */
  double loss;      /* a frame: its connection breaks, it and all behind it are lost */
  double duplicate; /* a frame: connection breaks after delivery, its acknowledgements are lost */
  double reorder;   /* a frame: held back up to 20 latencies, other links overtake it */
  double partition; /* a second: two hosts cannot talk for up to partition_ns */
  double crash;     /* a second and host allowed to crash: see mlfab_sim_on_crash */
  double pause;     /* a second and host: it does nothing for up to pause_ns */
  double slow;      /* a second and host: a tenth of its rate for up to pause_ns */
  uint64_t partition_ns, pause_ns; /* 0: 1 s */
  const mlfab_env *env;            /* memory and log; NULL: built-in */
} mlfab_sim_options;

MLFAB_API int mlfab_sim_create(const mlfab_sim_options *options, mlfab_sim **sim_p);
/* Contexts on it must be closed before. */
MLFAB_API void mlfab_sim_destroy(mlfab_sim **sim_p);
MLFAB_API uint64_t mlfab_sim_clock(void *sim); /* virtual nanoseconds */
MLFAB_API void *mlfab_sim_host(mlfab_sim *sim, uint32_t host);
MLFAB_API const mlfab_transport *mlfab_transport_sim(void);
/* mlfab_open on host `host`, hand-driven by the simulator, returning before the fabric is complete:
 * run the simulator until mlfab_is_ready. config.coordinator is "sim:0" unless set. */
MLFAB_API int mlfab_sim_open(mlfab_sim *sim, uint32_t host, const mlfab_config *config,
                             mlfab **ctx_p, mlfab_error *error_p);
/* Carries out the next thing that happens anywhere; 1, or 0 when nothing will ever happen. */
MLFAB_API int mlfab_sim_step(mlfab_sim *sim);
/* Runs for a stretch of virtual time. */
MLFAB_API void mlfab_sim_run(mlfab_sim *sim, uint64_t duration_ns);
/* Calls `fn` at virtual time `at_ns` (a worker's computation ends, a link changes). It may use the
 * contexts, and call mlfab_sim_at again. Errors: MEMORY. */
MLFAB_API int mlfab_sim_at(mlfab_sim *sim, uint64_t at_ns, void (*fn)(void *user), void *user);
/* Calls `fn` whenever this host's context was driven, at the same virtual time: a request may be done. It may do
 * what a callback of mlfab_sim_at may. NULL: no longer. */
MLFAB_API int mlfab_sim_watch(mlfab_sim *sim, uint32_t host, void (*fn)(void *user), void *user);
/* A host's in and out capacity from now on, bytes a second; 0: nothing passes. */
MLFAB_API int mlfab_sim_set_rate(mlfab_sim *sim, uint32_t host, uint64_t in, uint64_t out);
/* The fault menu from now on: loss to slow, partition_ns and pause_ns of options; nothing else of them
 * is looked at. NULL: no faults any more; what stands ends at its time. */
MLFAB_API int mlfab_sim_set_faults(mlfab_sim *sim, const mlfab_sim_options *options);
/* Host `host` has its network links in common with host `with` from now on, as two processes of one
 * machine do: frames between them take neither. Before anything is opened on it. */
MLFAB_API int mlfab_sim_share(mlfab_sim *sim, uint32_t host, uint32_t with);
MLFAB_API int mlfab_sim_partition(mlfab_sim *sim, uint32_t a, uint32_t b, int cut);
MLFAB_API int mlfab_sim_pause(mlfab_sim *sim, uint32_t host, uint64_t duration_ns);
/* Everything of this host is gone at once: links break, its context is abandoned and *ctx NULL. */
MLFAB_API int mlfab_sim_crash(mlfab_sim *sim, uint32_t host);
/* Hosts that the fault menu may crash, and who is told so that it can open a new context there. */
MLFAB_API int mlfab_sim_on_crash(mlfab_sim *sim, uint32_t host,
                                 void (*fn)(void *user, uint32_t host), void *user);
MLFAB_API int mlfab_sim_trace_hash(mlfab_sim *sim, uint64_t *hash_p);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_SIM_H */
