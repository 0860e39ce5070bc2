/* meter.h - does an in-link have capacity to spare? Layer 2.
 *
 * Receivers (server, aggregator) release transfers in order, the next as soon as those already
 * released leave capacity of the in-link unused: then a wrong prediction of the plan corrects
 * itself. The meter counts the bytes that came and compares them, over windows of a few chunks,
 * with what the link is known to carry. */
#ifndef MLFAB__METER_H
#define MLFAB__METER_H

#include "base.h"

typedef struct mlfab__meter {
  double rate;        /* capacity, bytes a second; 0 or less: not known */
  uint64_t window_ns; /* how long it looks before it judges */
  uint64_t since_ns;
  uint64_t bytes; /* since then */
} mlfab__meter;

/* A capacity as reckoned now; `chunk` is the usual size of a frame. */
static inline void mlfab__meter_rate(mlfab__meter *meter, double rate, uint32_t chunk) {
  double window = rate > 0.0 ? 4.0 * 1e9 * (double)chunk / rate : 20e6;
  meter->rate = rate;
  meter->window_ns = window < 2e6 ? 2000000u : window > 100e6 ? 100000000u : (uint64_t)window;
}

/* Something was released, or judged: looks anew from here. */
static inline void mlfab__meter_begin(mlfab__meter *meter, uint64_t now_ns) {
  meter->since_ns = now_ns;
  meter->bytes = 0;
}

static inline void mlfab__meter_count(mlfab__meter *meter, uint64_t bytes) {
  meter->bytes += bytes;
}

/* When mlfab__meter_idle may next say yes. */
static inline uint64_t mlfab__meter_due(const mlfab__meter *meter) {
  return meter->rate > 0.0 ? meter->since_ns + meter->window_ns : MLFAB__NEVER;
}

/* 1 when a window has passed in which less came than the link carries; a window that was full
 * begins anew. */
static inline int mlfab__meter_idle(mlfab__meter *meter, uint64_t now_ns) {
  if (!(meter->rate > 0.0) || now_ns - meter->since_ns < meter->window_ns) return 0;
  double could = meter->rate * 1e-9 * (double)(now_ns - meter->since_ns);
  int idle = (double)meter->bytes < 0.85 * could;
  if (!idle) mlfab__meter_begin(meter, now_ns);
  return idle;
}

#endif
