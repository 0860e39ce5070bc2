/* monitor.h - estimates the capacities of a host's network links from their traffic.
 *
 * A pure estimator, one for each node. Input: samples of the transports (mlfab_measure). Output: two capacities, in and
 * out, in bytes a second, negative while unknown. It has no clock and no link: its owner calls mlfab__monitor_take
 * after every sample and reports the result.
 *
 * A rate that the application limited is only a lower bound. So, for each direction:
 *  - the sample is the rate of the whole window if there was always more to send; else the rate of the busy periods
 *    (`delivery`), if known; else the window's rate, as a lower bound;
 *  - the first sample that is more than a lower bound sets the estimate; until then the interface's nominal speed
 *    counts, if there is one; later it is an upper bound;
 *  - afterwards a larger sample, also a lower bound, raises the estimate fast; a similar one is smoothed in;
 *  - a smaller sample may reflect the limit of the other end, for instance a slow worker, and the next transfer may
 *    have another. So the estimate falls only if no sample has reached it for three heartbeats, and two samples were
 *    more than lower bounds: then to the largest sample of that time;
 *  - receivers release at most the reported capacity, and so would never see that a link carries more. So sometimes a
 *    full link is reported with a quarter more, for a heartbeat; if no more arrives then, the former estimate is
 *    restored.
 * A receiver cannot distinguish the limit of its own link from that of the other end. Links are mostly
 * symmetric, so the outgoing rate is taken as a lower bound of the incoming capacity.
 *
 * The estimate covers the whole link, including others' traffic: a transport that sees only its own bytes gets the
 * others' rate added to its samples, if that rate was told. The report is the estimate without it, and at least an
 * eighth of the estimate, because a flow of ours would take a share from flows of others.
 *
 * Invariants: an estimate is finite, and negative (unknown) or at most the nominal speed, if there is one.
 * A value set by hand hides the measured estimate, which is still updated.
 *
 * Source: MLfabric §4 (network monitor), which leaves the measurement open. The delivery rate, the rule for samples
 * limited by the application, the maximum over a period, and the probes are from BBR (Cardwell et al. 2016). */
#ifndef MLFAB__MONITOR_H
#define MLFAB__MONITOR_H

#include "../base/base.h"
#include "../../mlfab_transport.h"

/* One direction. */
typedef struct mlfab__monitor_side {
  double rate;       /* negative: unknown */
  double held;       /* while probing: the former estimate; else negative */
  double set;        /* set by hand; negative: use the measured one */
  double told;       /* last reported by take; negative: none, or unknown */
  double other;      /* told traffic of others; 0: none */
  double lower;      /* largest of the samples below the estimate since confirmed_ns */
  uint64_t since_ns; /* time of the last probe or change */
  uint64_t confirmed_ns;
  uint32_t lower_samples;
  uint32_t sampled; /* 0: `rate`, if any, is the nominal speed */
} mlfab__monitor_side;

typedef struct mlfab__monitor {
  mlfab__monitor_side in, out;
  double nominal; /* as told; 0: unknown */
  uint64_t heartbeat_ns;
  uint64_t told_ns; /* time of take's last report; 0: never */
} mlfab__monitor;

/* Starts with nothing known. The heartbeat, at least 1 ns, is the unit of all periods here. */
MLFAB__INTERNAL void mlfab__monitor_init(mlfab__monitor *monitor, uint64_t heartbeat_ns);
/* Takes a measurement of a transport. Ignores one of zero length, or with invalid numbers. */
MLFAB__INTERNAL void mlfab__monitor_sample(mlfab__monitor *monitor, const mlfab_measure *measure,
                                           uint64_t now_ns);
/* Sets the capacities by hand, 0 for a link that is cut; negative: as measured. Both are finite. */
MLFAB__INTERNAL void mlfab__monitor_set(mlfab__monitor *monitor, double in, double out);
/* Sets the traffic of others on these links, and the nominal speed for samples that have none. All are finite and at
 * least 0. A value set by hand is not reduced. */
MLFAB__INTERNAL void mlfab__monitor_other(mlfab__monitor *monitor, double in, double out,
                                          double nominal);
/* Sets the present capacities, negative if unknown. Returns 1 if they should be reported: one differs by more than a
 * tenth from its last report, at most once a heartbeat; else 0. */
MLFAB__INTERNAL int mlfab__monitor_take(mlfab__monitor *monitor, uint64_t now_ns, double *in_p,
                                        double *out_p);

#endif
