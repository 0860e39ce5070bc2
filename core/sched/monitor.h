/* monitor.h - what a host's network links carry, told from what passed through them. Layer 2.
 *
 * A pure estimator, one a node: samples of the transports (mlfab_measure) in, two capacities out,
 * in and out, each bytes a second and negative as long as nothing is known. It looks at no clock
 * and sends nothing: whoever owns it asks mlfab__monitor_take after every sample and reports what
 * it says.
 *
 * A rate that was limited by the application is a lower bound and nothing else. So of each
 * direction
 *  - the sample is the rate of the whole window when somebody had more to send all the time, else
 *    that of the stretches in which somebody had (`delivery`), else the window's, as a lower bound;
 *  - the first sample that is no mere lower bound is taken as it is; until then the interface's
 *    nominal speed stands, if it tells one, which later is an upper bound;
 *  - from then on a larger sample raises the estimate fast, also one that is a lower bound; one
 *    that is about the same is smoothed in;
 *  - a smaller one may be the limit of the other end, a slow worker's for one, and the next
 *    transfer's is another: so nothing happens until for three heartbeats nothing as large as the
 *    estimate has come. Then the largest of what came meanwhile is believed, if there were two
 *    samples and no mere lower bounds;
 *  - receivers release no more than the link is said to carry, and would never see that it carries
 *    more. So now and then a full link is said to carry a quarter more, for a heartbeat; if more
 *    does not come then, what stood before stands again.
 * A receiver cannot tell the limit of its own link from that of the other end's. Links mostly are
 * alike in both directions, so what is sent is taken to be what could come in, at least.
 *
 * Invariants: an estimate is finite, and negative (unknown) or at most the nominal speed, if there
 * is one. What was set by hand hides the measured estimate, which goes on underneath.
 *
 * Source: MLfabric §4 (network monitor); how it measures is not said there. The delivery rate, the
 * rule for samples limited by the application, the maximum over a stretch of time, and the probes
 * are BBR's ideas (Cardwell et al. 2016). */
#ifndef MLFAB__MONITOR_H
#define MLFAB__MONITOR_H

#include "../base/base.h"

/* One direction. */
typedef struct mlfab__monitor_side {
  double rate;       /* negative: not known */
  double held;       /* while it probes: what stood before; else negative */
  double set;        /* by hand; negative: measured */
  double told;       /* what take said last; negative: nothing, or not known */
  double lower;      /* the largest of the smaller samples since confirmed_ns */
  uint64_t since_ns; /* of the last probe, or change */
  uint64_t confirmed_ns;
  uint32_t lower_samples;
  uint32_t sampled; /* 0: `rate`, if any, is the nominal speed */
} mlfab__monitor_side;

typedef struct mlfab__monitor {
  mlfab__monitor_side in, out;
  uint64_t heartbeat_ns;
  uint64_t told_ns; /* when take last said something; 0: never */
} mlfab__monitor;

/* Nothing is known. The heartbeat, at least 1 ns, is the measure of all that takes time here. */
MLFAB__INTERNAL void mlfab__monitor_init(mlfab__monitor *monitor, uint64_t heartbeat_ns);
/* What transports measured. One without length, or of numbers that are none, is passed over. */
MLFAB__INTERNAL void mlfab__monitor_sample(mlfab__monitor *monitor, const mlfab_measure *measure,
                                           uint64_t now_ns);
/* From now on these are the capacities, 0 for a link that is cut; a negative one: as measured. Both
 * are finite. */
MLFAB__INTERNAL void mlfab__monitor_set(mlfab__monitor *monitor, double in, double out);
/* Sets the capacities as they are now, negative when not known. 1 when they are to be reported:
 * one differs by more than a tenth from what was to be reported last, at most once a heartbeat;
 * else 0. */
MLFAB__INTERNAL int mlfab__monitor_take(mlfab__monitor *monitor, uint64_t now_ns, double *in_p,
                                        double *out_p);

#endif
