/* monitor.c - estimates the capacities of a host's network links. See monitor.h. */
#include "monitor.h"

enum {
  MONITOR_PROBE_BEATS = 16, /* minimum time between two probes */
  /* time without a sample of the estimate's size before a smaller one is believed ... */
  MONITOR_PATIENCE_BEATS = 3,
  MONITOR_LOWER_SAMPLES = 2 /* ... and minimum number of smaller samples */
};

#define MONITOR_NEWS 0.1   /* relative change that is reported */
#define MONITOR_CLOSE 0.05 /* relative difference within which rates count as equal */
#define MONITOR_PROBE 1.25
#define MONITOR_SHARE 0.125 /* part of the link that others' traffic leaves in any case */

MLFAB__INTERNAL void mlfab__monitor_init(mlfab__monitor *monitor, uint64_t heartbeat_ns) {
  memset(monitor, 0, sizeof *monitor);
  monitor->heartbeat_ns = heartbeat_ns;
  monitor->in.rate = monitor->in.held = monitor->in.set = monitor->in.told = -1.0;
  monitor->out = monitor->in;
}

/* The rate if it is finite and positive, else 0. */
static double monitor_clean(double rate) { return rate > 0.0 && mlfab__finite(rate) ? rate : 0.0; }

/* Notes that the estimate was reached. */
static void monitor_confirm(mlfab__monitor_side *side, uint64_t now_ns) {
  side->confirmed_ns = now_ns;
  side->lower = 0.0;
  side->lower_samples = 0;
}

/* Ends a probe: after a heartbeat, or when a sample exceeds the former estimate, which is then updated from
 * that sample. */
static void monitor_probe_over(mlfab__monitor_side *side, double rate, uint64_t heartbeat_ns,
                               uint64_t now_ns) {
  if (side->held < 0.0) return;
  int found = rate > side->held * (1.0 + MONITOR_CLOSE);
  if (!found && now_ns - side->since_ns < heartbeat_ns) return;
  side->rate = side->held;
  side->held = -1.0;
}

/* Takes a rate below the estimate that is more than a lower bound. */
static void monitor_below(mlfab__monitor_side *side, double rate, double elapsed_ns,
                          uint64_t heartbeat_ns, uint64_t now_ns) {
  double half = (double)heartbeat_ns / 2.0;
  if (rate >= side->rate * (1.0 - MONITOR_CLOSE)) {
    side->rate += (rate - side->rate) * elapsed_ns / (elapsed_ns + half);
    monitor_confirm(side, now_ns);
    return;
  }
  if (rate > side->lower) side->lower = rate;
  side->lower_samples++;
  if (side->lower_samples < MONITOR_LOWER_SAMPLES ||
      now_ns - side->confirmed_ns < MONITOR_PATIENCE_BEATS * heartbeat_ns)
    return;
  side->rate = side->lower;
  side->since_ns = now_ns;
  monitor_confirm(side, now_ns);
}

/* Updates the estimate with a rate; `bound`: the rate is only a lower bound. */
static void monitor_learn(mlfab__monitor_side *side, double rate, int bound, double elapsed_ns,
                          uint64_t heartbeat_ns, uint64_t now_ns) {
  if (!side->sampled) {
    if (bound) return;
    side->rate = rate;
    side->sampled = 1;
    side->since_ns = now_ns;
    monitor_confirm(side, now_ns);
    return;
  }
  monitor_probe_over(side, rate, heartbeat_ns, now_ns);
  if (side->held >= 0.0) return;
  if (rate > side->rate) {
    if (rate > side->rate * (1.0 + MONITOR_CLOSE)) side->since_ns = now_ns;
    side->rate += (rate - side->rate) * elapsed_ns / (elapsed_ns + (double)heartbeat_ns / 8.0);
    monitor_confirm(side, now_ns);
  } else if (!bound) {
    monitor_below(side, rate, elapsed_ns, heartbeat_ns, now_ns);
  } else if (rate >= side->rate * (1.0 - MONITOR_CLOSE)) {
    monitor_confirm(side, now_ns);
  }
}

/* The link was full for the whole window at its estimated rate: probes whether it carries more. */
static void monitor_probe(mlfab__monitor_side *side, double rate, double nominal,
                          uint64_t heartbeat_ns, uint64_t now_ns) {
  if (side->held >= 0.0 || rate < side->rate * (1.0 - MONITOR_CLOSE)) return;
  if (now_ns - side->since_ns < MONITOR_PROBE_BEATS * heartbeat_ns) return;
  double more = side->rate * MONITOR_PROBE;
  side->since_ns = now_ns;
  if (nominal > 0.0 && more > nominal) return;
  side->held = side->rate;
  side->rate = more;
}

/* One direction of a sample. */
typedef struct monitor_window {
  uint64_t bytes, own;
  double delivery, nominal, elapsed_ns;
  int limited;
} monitor_window;

static void monitor_side_sample(mlfab__monitor_side *side, const monitor_window *w,
                                uint64_t heartbeat_ns, uint64_t now_ns) {
  double elapsed_ns = w->elapsed_ns, nominal = w->nominal;
  int limited = w->limited;
  double rate = (double)w->bytes * 1e9 / elapsed_ns, stretches = monitor_clean(w->delivery);
  double together = (double)w->own * 1e9 / elapsed_ns + side->other;
  if (rate < together) rate = together;
  if (stretches > 0.0) stretches += side->other;
  int bound = limited && stretches <= 0.0;
  if (rate < stretches) rate = stretches;
  if (nominal > 0.0 && rate > nominal) rate = nominal;
  if (nominal > 0.0 && (side->rate > nominal || !side->sampled)) side->rate = nominal;
  if (nominal > 0.0 && side->held > nominal) side->held = nominal;
  monitor_learn(side, rate, bound, elapsed_ns, heartbeat_ns, now_ns);
  if (!limited) monitor_probe(side, rate, nominal, heartbeat_ns, now_ns);
}

MLFAB__INTERNAL void mlfab__monitor_sample(mlfab__monitor *monitor, const mlfab_measure *measure,
                                           uint64_t now_ns) {
  if (!measure->elapsed_ns) return;
  double elapsed_ns = (double)measure->elapsed_ns, nominal = monitor_clean(measure->nominal);
  if (nominal <= 0.0) nominal = monitor->nominal;
  const monitor_window in = {measure->bytes_in, measure->own_in, measure->delivery_in,
                             nominal,           elapsed_ns,      measure->limited_in != 0};
  const monitor_window out = {
      measure->bytes_out, measure->own_out,         measure->delivery_out, nominal,
      elapsed_ns,         measure->limited_out != 0};
  monitor_side_sample(&monitor->in, &in, monitor->heartbeat_ns, now_ns);
  monitor_side_sample(&monitor->out, &out, monitor->heartbeat_ns, now_ns);
}

MLFAB__INTERNAL void mlfab__monitor_other(mlfab__monitor *monitor, double in, double out,
                                          double nominal) {
  monitor->in.other = in;
  monitor->out.other = out;
  monitor->nominal = nominal;
  if (nominal > 0.0 && monitor->in.rate < 0.0) monitor->in.rate = nominal;
  if (nominal > 0.0 && monitor->out.rate < 0.0) monitor->out.rate = nominal;
}

MLFAB__INTERNAL void mlfab__monitor_set(mlfab__monitor *monitor, double in, double out) {
  monitor->in.set = in;
  monitor->out.set = out;
}

static double monitor_now(const mlfab__monitor_side *side) {
  return side->set >= 0.0 ? side->set : side->rate;
}

/* Returns the part of a capacity that others leave; a capacity set by hand, or unknown, stays as it is. */
static double monitor_left(const mlfab__monitor_side *side, double capacity) {
  if (side->set >= 0.0 || capacity < 0.0) return capacity;
  double left = capacity - side->other, share = capacity * MONITOR_SHARE;
  return left > share ? left : share;
}

static int monitor_is_news(const mlfab__monitor_side *side, double now) {
  double change = now > side->told ? now - side->told : side->told - now;
  if (now < 0.0 || side->told < 0.0) return (now < 0.0) != (side->told < 0.0);
  return change > MONITOR_NEWS * side->told;
}

MLFAB__INTERNAL int mlfab__monitor_take(mlfab__monitor *monitor, uint64_t now_ns, double *in_p,
                                        double *out_p) {
  *in_p = monitor_now(&monitor->in);
  *out_p = monitor_left(&monitor->out, monitor_now(&monitor->out));
  /* The outgoing estimate counts only if it was measured; the nominal speed does not. */
  int sent = monitor->in.set < 0.0 && *in_p >= 0.0 && monitor->out.sampled;
  if (sent && monitor->out.rate > *in_p) *in_p = monitor->out.rate;
  *in_p = monitor_left(&monitor->in, *in_p);
  if (monitor->told_ns && now_ns - monitor->told_ns < monitor->heartbeat_ns) return 0;
  if (!monitor_is_news(&monitor->in, *in_p) && !monitor_is_news(&monitor->out, *out_p)) return 0;
  monitor->told_ns = mlfab__max(now_ns, 1);
  monitor->in.told = *in_p;
  monitor->out.told = *out_p;
  return 1;
}
