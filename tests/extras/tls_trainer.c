/* tls_trainer.c - a node whose transport is TLS, configured by its environment: ROUNDS rounds of BSP with known updates.
 *
 *    tls_trainer [ROUNDS]
 *
 * Worker 0 prints "weights W", what each weight is at the end; every node with TLS_TELL=1 "refused N": the frames and
 * connections that it has refused. Errors go to stderr, with their name. TLS_OFF=1 uses plain TCP. TLS_THROUGH=PORT makes
 * all calls go to that port of this host, where a test listens. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "extras/mlfab_tls.h"
#include "mlfab_transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 30000 };

static const mlfab_transport *inner;

/* Calls `inner` at another port. */
static int through(void *self, const char *address, uint64_t token) {
  char other[64];
  (void)address;
  snprintf(other, sizeof other, "%s:127.0.0.1:%s", inner->name, getenv("TLS_THROUGH"));
  return inner->connect(self, other, token);
}

static int fail(mlfab *fabric, int code) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s\n", mlfab_error_name(code), error.text);
  return code;
}

static int work(mlfab *fabric, int rounds) {
  static float weights[COUNT], update[COUNT];
  mlfab_buf model = {0, 0, weights, COUNT}, gradient = {0, 0, update, COUNT};
  mlfab_model_options options;
  int32_t rank = 0;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.sync = MLFAB_SYNC_BSP;
  int code = mlfab_rank(fabric, &rank, NULL, NULL);
  for (int i = 0; i < COUNT; i++) {
    weights[i] = 123456.0f;
    update[i] = (float)(rank + 1);
  }
  if (!code) code = mlfab_tensor_add(fabric, 0, MLFAB_F32, COUNT);
  if (!code) code = mlfab_model_start(fabric, &options, &model, 1);
  for (int i = 0; i < rounds && !code; i++) {
    code = mlfab_push(fabric, &gradient, 1, NULL, NULL);
    if (!code) code = mlfab_pull(fabric, &model, 1, NULL, NULL);
  }
  if (!code) code = mlfab_barrier(fabric, NULL);
  for (int i = 1; i < COUNT && !code; i++)
    if (weights[i] != weights[0]) code = MLFAB_ERR_INTERNAL;
  if (code) return fail(fabric, code);
  if (rank == 0) printf("weights %.0f\n", (double)weights[0]);
  return 0;
}

int main(int argc, char **argv) {
  mlfab *fabric = NULL;
  mlfab_error error;
  mlfab_config config;
  mlfab_transport table;
  memset(&error, 0, sizeof error);
  mlfab_config_init(&config);
  inner = getenv("TLS_OFF") ? mlfab_transport_tcp() : mlfab_transport_tls();
  table = *inner;
  if (getenv("TLS_THROUGH")) table.connect = through;
  int code = mlfab_config_from_env(&config, &error);
  config.transport = &table;
  config.transports = 0; /* mlfab-run --tcp asks for TCP: only this one, no other beside it */
  if (!code) code = mlfab_open(&config, &fabric, &error);
  if (code) {
    fprintf(stderr, "%s: %s\n", mlfab_error_name(code), error.text);
    return 1;
  }
  int served = config.roles == MLFAB_ROLE_SERVER;
  code = served ? mlfab_serve(fabric, 0) : work(fabric, argc > 1 ? atoi(argv[1]) : 10);
  mlfab_stats stats;
  memset(&stats, 0, sizeof stats);
  mlfab_get_stats(fabric, &stats, sizeof stats);
  mlfab_close(&fabric);
  if (getenv("TLS_TELL"))
    printf("refused %llu\n", (unsigned long long)(stats.frames_refused + stats.strangers_refused));
  return code != 0;
}
