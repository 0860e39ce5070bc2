/*
 * mlfab_curl.h - mlfab's HTTP clients for monitoring, with libcurl 7.68 or later. Optional.
 *
 *    cc trainer.c mlfab.c mlfab_curl.c mlfab_http.c -lcurl -lpthread -lm        (beside them mlfab.h and mlfab_http.h)
 *
 *    mlfab_curl_monitor   reads the network traffic of this host from its node_exporter, so that the scheduler leaves room
 *                         for the traffic of others
 *    mlfab_curl_push      puts this node's metrics into a Prometheus Pushgateway
 *
 * Each has a thread of its own, which blocks all signals. Training never waits for them. A failure is one line in the
 * context's log (on stderr if it has none), and its end is another line. Stop them before mlfab_close. In a forked
 * child the get functions return MLFAB_ERR_STATE, and stop only frees memory.
 *
 * All requests: http and https only, also in redirects; limits on time, redirects and sizes. The URL may contain user
 * and password (https://user:password@host/); errors and logs do not show them. http_proxy and the like are ignored.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_CURL_H
#define MLFAB_CURL_H

#include "mlfab.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- other traffic of this host ---------------------------------------------------------------- */

typedef struct mlfab_curl_monitor mlfab_curl_monitor;

typedef struct mlfab_curl_monitor_options {
  uint32_t size;
  uint32_t reserved;
  const char *url; /* of this host's node_exporter; NULL: "http://localhost:9100/metrics" */
  /* The network interface, by its name in node_exporter. NULL: the interface with the most traffic among those that
   * look physical (not lo, veth*, docker*, br-*, ...). */
  const char *device;
  uint64_t interval_ns; /* time between two scrapes; 0: 2 s; at least 100 ms */
  uint64_t timeout_ns;  /* limit of a scrape; 0: 2 s */
  const char *ca_file;  /* certificates for https; NULL: the system's */
} mlfab_curl_monitor_options;

typedef struct mlfab_curl_monitor_state {
  uint32_t size;
  uint32_t alive; /* 1: the last scrape succeeded */
  uint64_t scrapes, failures;
  char device[64];
  /* Bytes per second: of the interface; of them, bytes that this fabric has not moved. */
  double in, out, other_in, other_out;
  double speed;      /* of the interface, bytes per second; 0: unknown */
  mlfab_error error; /* the last failure */
} mlfab_curl_monitor_state;

/* Starts to scrape. From the second scrape on it calls mlfab_set_other_traffic with the mean of the last four
 * intervals. After three failures in a row it takes the other traffic as 0, and keeps trying. options may be NULL; its
 * texts are copied. error_p may be NULL. Start it on every node: a node subtracts the traffic of all nodes of its user
 * and fabric on this host. They share these numbers in a page of /dev/shm. Less than a tenth of their traffic counts as
 * no traffic of others: headers are estimated. Errors: ARGUMENT, STATE (neither scheduler nor order_by_rate: nobody
 * would use it), UNSUPPORTED (MLFAB_WITH_SCHED is 0), MEMORY, IO (no thread). */
int mlfab_curl_monitor_start(mlfab *ctx, const mlfab_curl_monitor_options *options,
                             mlfab_curl_monitor **monitor_p, mlfab_error *error_p);
/* Copies the monitor's state. The caller sets state_p->size. */
int mlfab_curl_monitor_get(mlfab_curl_monitor *monitor, mlfab_curl_monitor_state *state_p);
/* Ends a running scrape, and resets the other traffic. *monitor_p becomes NULL; NULL is allowed. */
void mlfab_curl_monitor_stop(mlfab_curl_monitor **monitor_p);

/* --- metrics to a Pushgateway ------------------------------------------------------------------ */

typedef struct mlfab_curl_push mlfab_curl_push;

typedef struct mlfab_curl_push_options {
  uint32_t size;
  uint32_t remove;      /* 1: stop deletes this node's metrics at the Pushgateway */
  const char *url;      /* "http://host:9091"; required */
  const char *job;      /* the label `job`; NULL: "mlfab" */
  uint64_t interval_ns; /* 0: 15 s; at least 100 ms */
  uint64_t timeout_ns;  /* limit of a push; 0: 5 s */
  const char *ca_file;
} mlfab_curl_push_options;

/* Puts the metrics of mlfab_metrics into the group job, fabric, node (worker-3, server-0, scheduler), at once and then
 * at each interval. Each push replaces the group.
 * Errors: ARGUMENT, UNSUPPORTED (MLFAB_WITH_TELEMETRY is 0), MEMORY, IO (no thread). */
int mlfab_curl_push_start(mlfab *ctx, const mlfab_curl_push_options *options,
                          mlfab_curl_push **push_p, mlfab_error *error_p);
/* Returns how many pushes the Pushgateway has taken, and how many have failed. Each output may be NULL. */
int mlfab_curl_push_get(mlfab_curl_push *push, uint64_t *taken_p, uint64_t *failed_p,
                        mlfab_error *error_p);
/* Waits for a push under way, then pushes a last time, or deletes the group. Both together take at most timeout_ns, and
 * a millisecond. *push_p becomes NULL; NULL is allowed. */
void mlfab_curl_push_stop(mlfab_curl_push **push_p);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_CURL_H */
