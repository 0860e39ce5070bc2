/* curl_watch.c - a node, configured by its environment, that trains while it is watched by extras/mlfab_curl.c.
 *
 *    curl_watch SECONDS [monitor URL [DEVICE]] [push URL [JOB]] [remove]
 *
 * Every 200 ms it prints "state", then pairs of a name and a value: the monitor's state, link_in and link_out of mlfab_stats,
 * steps of training, the longest step in ms so far, and pushes taken and failed. Errors go to stderr with their name. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "extras/mlfab_curl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { COUNT = 100000 };

typedef struct watch {
  mlfab *fabric;
  mlfab_curl_monitor *monitor;
  mlfab_curl_push *push;
  double seconds, longest_s;
  uint64_t steps;
  mlfab_error error;
} watch;

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void tell(watch *w) {
  mlfab_curl_monitor_state s;
  mlfab_stats stats;
  uint64_t taken = 0, failed = 0;
  memset(&s, 0, sizeof s);
  memset(&stats, 0, sizeof stats);
  s.size = sizeof s;
  if (w->monitor) mlfab_curl_monitor_get(w->monitor, &s);
  if (w->push) mlfab_curl_push_get(w->push, &taken, &failed, NULL);
  mlfab_get_stats(w->fabric, &stats, sizeof stats);
  printf(
      "state alive %u scrapes %llu failures %llu device %s in %.0f out %.0f other_in %.0f "
      "other_out %.0f speed %.0f "
      "link_in %llu link_out %llu sent %llu received %llu steps %llu longest_ms %.0f taken %llu "
      "failed %llu\n",
      s.alive, (unsigned long long)s.scrapes, (unsigned long long)s.failures,
      s.device[0] ? s.device : "-", s.in, s.out, s.other_in, s.other_out, s.speed,
      (unsigned long long)stats.link_in, (unsigned long long)stats.link_out,
      (unsigned long long)stats.network_sent, (unsigned long long)stats.network_received,
      (unsigned long long)w->steps, 1e3 * w->longest_s, (unsigned long long)taken,
      (unsigned long long)failed);
  fflush(stdout);
}

/* Pushes and pulls until the time is over. */
static int train(watch *w) {
  static float weights[COUNT], update[COUNT];
  mlfab_buf model = {0, 0, weights, COUNT}, gradient = {0, 0, update, COUNT};
  double began = now_s(), told = 0;
  int code = mlfab_tensor_add(w->fabric, 0, MLFAB_F32, COUNT);
  if (!code) code = mlfab_model_start(w->fabric, NULL, &model, 1);
  while (!code && now_s() < began + w->seconds) {
    double since = now_s();
    code = mlfab_push(w->fabric, &gradient, 1, NULL, NULL);
    if (!code) code = mlfab_pull(w->fabric, &model, 1, NULL, NULL);
    double took = now_s() - since;
    if (w->steps++ > 0 && took > w->longest_s) w->longest_s = took;
    if (now_s() - told < 0.2) continue;
    told = now_s();
    tell(w);
  }
  if (!code) tell(w);
  return code;
}

/* Starts what the arguments ask for. */
static int begin(watch *w, int argc, char **argv) {
  mlfab_curl_monitor_options m;
  mlfab_curl_push_options p;
  memset(&m, 0, sizeof m);
  memset(&p, 0, sizeof p);
  m.size = sizeof m;
  p.size = sizeof p;
  m.interval_ns = p.interval_ns = 200000000;
  for (int i = 2; i < argc; i++) {
    if (!strcmp(argv[i], "monitor") && i + 1 < argc) {
      m.url = argv[++i];
      if (i + 1 < argc && strcmp(argv[i + 1], "push") != 0) m.device = argv[++i];
    } else if (!strcmp(argv[i], "push") && i + 1 < argc) {
      p.url = argv[++i];
      if (i + 1 < argc && strcmp(argv[i + 1], "remove") != 0) p.job = argv[++i];
    } else {
      p.remove = 1;
    }
  }
  int code = m.url ? mlfab_curl_monitor_start(w->fabric, &m, &w->monitor, &w->error) : 0;
  if (!code && p.url) code = mlfab_curl_push_start(w->fabric, &p, &w->push, &w->error);
  return code;
}

int main(int argc, char **argv) {
  watch w;
  memset(&w, 0, sizeof w);
  w.seconds = argc > 1 ? atof(argv[1]) : 5;
  int code = mlfab_open_env(&w.fabric, &w.error);
  if (!code) code = begin(&w, argc, argv);
  if (!code) {
    int32_t rank = -1;
    mlfab_rank(w.fabric, &rank, NULL, NULL);
    code = rank < 0 ? mlfab_serve(w.fabric, 0) : train(&w);
    if (code) mlfab_last_error(w.fabric, &w.error);
  }
  mlfab_curl_monitor_stop(&w.monitor);
  mlfab_curl_push_stop(&w.push);
  if (code) fprintf(stderr, "%s: %s\n", mlfab_error_name(code), w.error.text);
  if (w.fabric) mlfab_close(&w.fabric);
  return code != 0;
}
