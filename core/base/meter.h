/* meter.h - tells whether an in-link has spare capacity.
 *
 * Receivers (server, aggregator) release transfers in order. They release the next transfer as soon as the released
 * transfers leave capacity of the in-link unused. This corrects wrong predictions of the plan. The meter counts
 * received bytes and compares them, over windows of a few chunks, with the link's known capacity. */
#ifndef MLFAB__METER_H
#define MLFAB__METER_H

#include "base.h"

typedef struct mlfab__meter {
  double rate;        /* capacity, bytes a second; 0 or less: unknown */
  uint64_t window_ns; /* length of a window */
  uint64_t since_ns;
  uint64_t bytes; /* since then */
} mlfab__meter;

#if MLFAB_WITH_SCHED
/* Sets the present capacity; `chunk` is the usual size of a frame. */
static inline void mlfab__meter_rate(mlfab__meter *meter, double rate, uint32_t chunk) {
  double window = rate > 0.0 ? 4.0 * 1e9 * (double)chunk / rate : 20e6;
  meter->rate = rate;
  meter->window_ns = window < 2e6 ? 2000000u : window > 100e6 ? 100000000u : (uint64_t)window;
}
#endif

/* Starts a new window: after a release, or a full window. */
static inline void mlfab__meter_begin(mlfab__meter *meter, uint64_t now_ns) {
  meter->since_ns = now_ns;
  meter->bytes = 0;
}

static inline void mlfab__meter_count(mlfab__meter *meter, uint64_t bytes) {
  meter->bytes += bytes;
}

/* The earliest time at which mlfab__meter_idle may return 1. */
static inline uint64_t mlfab__meter_due(const mlfab__meter *meter) {
  return meter->rate > 0.0 ? meter->since_ns + meter->window_ns : MLFAB__NEVER;
}

/* Returns 1 when a window has passed in which less arrived than the link carries. A full window starts again. */
static inline int mlfab__meter_idle(mlfab__meter *meter, uint64_t now_ns) {
  if (!(meter->rate > 0.0) || now_ns - meter->since_ns < meter->window_ns) return 0;
  double could = meter->rate * 1e-9 * (double)(now_ns - meter->since_ns);
  int idle = (double)meter->bytes < 0.85 * could;
  if (!idle) mlfab__meter_begin(meter, now_ns);
  return idle;
}

#endif
