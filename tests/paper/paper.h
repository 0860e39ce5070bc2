/* paper.h - MLfabric's evaluation (§7) in the simulator: settings, runs of the library, models for
 * comparison, and the resulting table.
 *
 * 30 workers on 15 hosts of 10 Gbps, a server on a host of its own with the scheduler beside it. All random
 * numbers are functions of the seed, the host or worker, and the time, so that every algorithm has the same
 * stragglers and the same changes of the network. Uses only mlfab.h, except that replica.c calls the planner itself.
 * FluentPS is in consistency.c alone, TDF in tdf.c, eagerSGD in eager.c. */
#ifndef PAPER_H
#define PAPER_H

#include "mlfab_sim.h"

#include <stddef.h>
#include <stdint.h>

enum { WORKERS = 30, HOSTS = 15, LEVELS = 5, PERIODS_MAX = 64, DELAYS = 96 };
#define MS 1000000u
#define SECOND 1000000000u
/* T of §7: the interval at which the rates of all links are drawn again */
#define PERIOD_NS (5ull * SECOND)
#define FULL_RATE 1250000000u /* 10 Gbps, in bytes a second */

/* ---- setting.c: compute and network settings of §7 ---- */

typedef struct paper_compute {
  const char *name;
  double share, factor; /* a computation takes `factor` times as long with probability `share` */
} paper_compute;

typedef struct paper_network {
  const char *name;
  double share[LEVELS]; /* of a link at 1, 2.5, 3.3, 5 and 10 Gbps */
} paper_network;

extern const paper_compute paper_c1, paper_c2, paper_c3;
extern const paper_network paper_n1, paper_n2, paper_n3, paper_skewed;
extern const double paper_gbps[LEVELS];

uint64_t paper_compute_ns(const paper_compute *c, uint64_t seed, uint32_t worker, uint64_t step);
/* The slowest of all workers' computations of a step. */
uint64_t paper_slowest_ns(const paper_compute *c, uint64_t seed, uint64_t step);
/* The level, of five, of a host's link in a period; `out` 0: incoming. */
uint32_t paper_level(const paper_network *n, uint64_t seed, uint32_t host, uint32_t out,
                     uint64_t period);
uint64_t paper_rate(const paper_network *n, uint64_t seed, uint32_t host, uint32_t out,
                    uint64_t period); /* bytes a second */

/* ---- fabric.c: a run of the library ---- */

typedef struct paper_case {
  const paper_compute *compute;
  const paper_network *network;
  uint64_t bytes, seed;
  uint64_t lag_ns;         /* delay after which the scheduler learns a changed rate */
  uint64_t measure_ns;     /* virtual time, after one period to warm up */
  mlfab_schedule schedule; /* size 0: no scheduler, first come first served */
  uint32_t early_pull;     /* 1: the pull is issued with the push; 0: when the push has ended */
  uint32_t rounds;         /* 1: bulk-synchronous */
} paper_case;

/* Counts over the measured time; those of several seeds are added up. */
typedef struct paper_outcome {
  double measured_ns;
  uint64_t applied, dropped, delay_sum, delay_max, late; /* late: applied beyond the bound */
  uint64_t histogram[DELAYS];                            /* of delays; the last: that and more */
  uint64_t rounds;                                       /* iterations in rounds_ns */
  double rounds_ns, slowest_ns;                          /* slowest: computations of these rounds */
  uint64_t server_in, server_out;                        /* bytes */
  uint64_t groups, failed, spreads, plans;
  uint64_t added, added_at[LEVELS];   /* updates added at aggregators, by rate of the in-link */
  uint64_t served, served_at[LEVELS]; /* models passed on, by rate of the out-link */
} paper_outcome;

/* Adds the result of a run to *sum. Returns 0, or 1 after printing the error to standard error. */
int paper_fabric(const paper_case *run, paper_outcome *sum);

/* ---- models.c: for comparison with MLfabric ---- */

/* Plain asynchronous SGD: a worker computes, pushes, pulls; concurrent transfers share the links max-min
 * fairly, as TCP would. Returns ms for 30 updates. */
double paper_async_ms(const paper_case *run);

/* Ideal ring all-reduce, reckoned in lock step: 2(W - 1) steps of bytes / W, each at the rate of the
 * slowest link. `flows` on each network card: 1 when the workers of a host are neighbours in the ring, 2
 * when none are. */
double paper_ring_ms(const paper_case *run, uint32_t flows, uint32_t rounds);

typedef struct paper_tree {
  double round_ms, communication_ms; /* of an iteration */
  uint64_t messages_at[LEVELS];      /* by rate of the receiver's in-link */
} paper_tree;

/* All-reduce up a binary tree and down again: of all ranks or, with `hosts`, of hosts whose two workers
 * have added theirs before. Store and forward: a whole message at a time,
 * flows of one card share it max-min fairly. Pipelined: all edges move at the one rate that the fullest
 * card allows; up and down one after the other, or both at once. */
enum paper_tree_kind { TREE_STORED = 0, TREE_PIPELINED = 1, TREE_BOTH_WAYS = 2 };
void paper_tree_run(const paper_case *run, int hosts, int kind, uint32_t rounds,
                    paper_tree *tree_p);

/* ---- replica.c: the cost of a replica (§7.3) ---- */

/* Writes its part of the table. Returns the number of runs that failed, or in which a replica lacked more than
 * Div_max allows. */
int paper_replica(uint32_t seeds);

/* ---- consistency.c: FluentPS's delayed pulls ---- */

/* Writes its part of the table. Returns the number of wrong runs: with a pull that was never answered, or
 * an impossible order of times. */
int paper_consistency(uint32_t seeds);

/* ---- tdf.c: TDF's tags and filters ---- */

/* Writes its part of the table. Returns the number of runs that failed, or had a wrong model. */
int paper_tdf(uint32_t seeds);

/* ---- eager.c: eagerSGD's reductions that do not wait ---- */

/* Writes its part of the table. Returns the number of wrong sums, or sums with too few members. */
int paper_eager(uint32_t seeds);

/* ---- asap.c: ASAP's stochastic reduce ---- */

/* Writes its part of the table. Returns the number of failed runs. */
int paper_asap(uint32_t seeds);

/* ---- report.c ---- */

typedef struct paper_row {
  const char *claim, *unit;
  const char *paper;  /* as printed; "-": the paper has no such figure */
  double ours;        /* NaN: not run */
  double least, most; /* the range expected from theory and a separate model; 0, 0: none */
  const char *note;   /* why it differs, or how it was measured */
} paper_row;

int paper_report_open(const char *tsv, const char *page);
void paper_text(const char *text); /* a paragraph or heading of the page */
void paper_line(const char *text); /* as it is */
/* A picture of docs/img, which `make plots` draws from the file, and how to read it. It ends a table. */
void paper_picture(const char *name, const char *how);
void paper_table(void); /* begins a table */
void paper_add(const paper_row *row);

static inline void add(const char *claim, const char *paper, double ours, const char *unit,
                       double least, double most, const char *note) {
  const paper_row row = {claim, unit, paper, ours, least, most, note};
  paper_add(&row);
}

int paper_report_close(void); /* 0, or 1 when writing failed */

#endif
