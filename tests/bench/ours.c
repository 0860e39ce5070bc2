/* ours.c - mlfab as a contestant: a dedicated server process that applies the plain rule at once, and
 * workers that push or pull one tensor of float32. */
#include "bench.h"

#if MLFAB_BENCH_TLS
#include "extras/mlfab_tls.h"
#else
#include "mlfab.h"
#define mlfab_transport_tls mlfab_transport_tcp
#endif

#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* The server's address: a free port, or an unused name. */
static int ours_prepare(bench_team *team) {
  static unsigned cells;
  if (team->job.transport == BENCH_SHM) {
    snprintf(team->address, sizeof team->address, "shm:mlfab-bench-%d-%u", (int)getpid(), cells++);
    return 0;
  }
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  int bad = fd < 0 || bind(fd, (struct sockaddr *)&address, length) ||
            getsockname(fd, (struct sockaddr *)&address, &length);
  if (fd >= 0) close(fd);
  snprintf(team->address, sizeof team->address, "tcp:127.0.0.1:%u", ntohs(address.sin_port));
  return bad;
}

static mlfab *fabric_open(bench_team *team, int32_t rank, int is_server) {
  mlfab *fabric = NULL;
  mlfab_error error;
  mlfab_config config;
  mlfab_config_init(&config);
  config.roles = is_server ? MLFAB_ROLE_SERVER : MLFAB_ROLE_WORKER;
  config.rank = rank;
  config.workers = team->job.workers;
  config.dedicated = 1;
  config.transports = team->job.transport == BENCH_TCP ? MLFAB_USE_TCP : MLFAB_USE_SHM;
  config.no_payload_crc = team->job.code != BENCH_CRC;
  config.timeout_ns = 50000000000u;
  config.allow_insecure = 1;
  if (team->job.code >= BENCH_KEYED) strcpy(config.key, "the-key-of-this-benchmark");
  if (team->job.code == BENCH_TLS) {
    config.transport = mlfab_transport_tls();
    config.transports = 0;
  }
  if (!strncmp(team->address, "tcp:", 4)) strcpy(config.listen, "tcp:127.0.0.1:0");
  snprintf(config.coordinator, sizeof config.coordinator, "%s", team->address);
  if (team->job.spin) {
    config.progress = MLFAB_PROGRESS_HAND;
    config.spin_ns = UINT64_MAX;
  }
  if (mlfab_open(&config, &fabric, &error)) bench_fail(team, "open", error.text);
  return fabric;
}

static void fail_with_last(bench_team *team, mlfab *fabric, const char *who) {
  mlfab_error error = {.code = 0};
  mlfab_last_error(fabric, &error);
  bench_fail(team, who, error.text);
}

static uint64_t allocations(mlfab *fabric) {
  mlfab_stats stats = {.allocations = 0};
  mlfab_get_stats(fabric, &stats, sizeof stats);
  return stats.allocations;
}

/* Reports a server's allocations whenever the benchmark asks. */
typedef struct teller {
  bench_team *team;
  mlfab *fabric;
} teller;

static void *tell_allocations(void *argument) {
  teller *t = argument;
  for (uint32_t told = 0; !atomic_load(&t->team->quit);) {
    uint32_t asked = atomic_load(&t->team->asked);
    if (asked == told) {
      bench_futex_wait(&t->team->asked, asked, 0);
      continue;
    }
    t->team->allocations[WORKERS_MAX] = allocations(t->fabric);
    atomic_store(&t->team->answered, told = asked);
    bench_futex_wake(&t->team->answered);
  }
  return NULL;
}

/* A hand-driven server spins during a trial, and dozes between trials so that others can be measured.
 * Otherwise it is the server of mlfab-run, which sleeps in mlfab_serve. */
static void ours_server(bench_team *team) {
  teller t = {team, fabric_open(team, 0, 1)};
  pthread_t thread;
  if (pthread_create(&thread, NULL, tell_allocations, &t)) bench_fail(team, "server", "no thread");
  bench_ready(team);
  while (team->job.spin && !atomic_load(&team->quit)) {
    int active = (int)atomic_load(&team->active);
    int status = active ? mlfab_serve(t.fabric, 1000000) : mlfab_progress(t.fabric, 0);
    if (status < 0 && status != MLFAB_ERR_TIMEOUT) fail_with_last(team, t.fabric, "server");
    if (!active) usleep(100);
  }
  int status = mlfab_serve(t.fabric, 0);
  if (status && !atomic_load(&team->quit)) fail_with_last(team, t.fabric, "server");
  pthread_join(thread, NULL);
  mlfab_close(&t.fabric);
}

/* Starts one push or pull; when there is no room, drives the node first. */
static void begin(bench_team *team, mlfab *fabric, const mlfab_buf *buf, mlfab_request *request_p) {
  int status;
  do {
    status = team->job.what == BENCH_PULL ? mlfab_pull_start(fabric, buf, 1, NULL, request_p)
                                          : mlfab_push_start(fabric, buf, 1, NULL, request_p);
    if (status == MLFAB_ERR_AGAIN) mlfab_progress(fabric, 1000000);
  } while (status == MLFAB_ERR_AGAIN);
  if (status) fail_with_last(team, fabric, "start");
}

static void trial(bench_team *team, mlfab *fabric, const mlfab_buf *buf) {
  mlfab_request open[WINDOW_MAX] = {0};
  uint32_t window = team->job.window;
  if (team->job.what == BENCH_STREAM) {
    for (uint32_t i = 0; i < team->job.messages; i++) begin(team, fabric, buf, NULL);
    if (mlfab_flush(fabric, 0)) fail_with_last(team, fabric, "flush");
    return;
  }
  if (team->job.what == BENCH_VIEW) {
    for (uint32_t i = 0; i < team->job.messages; i++) {
      mlfab_view view = {.size = sizeof view};
      int status = mlfab_pull_view(fabric, buf, 1, NULL, &view);
      if (!status) status = mlfab_view_release(fabric, &view);
      if (status || view.copied) fail_with_last(team, fabric, "view");
    }
    return;
  }
  if (window == 1) {
    for (uint32_t i = 0; i < team->job.messages; i++) {
      int status = team->job.what == BENCH_PULL ? mlfab_pull(fabric, buf, 1, NULL, NULL)
                                                : mlfab_push(fabric, buf, 1, NULL, NULL);
      if (status) fail_with_last(team, fabric, "blocking call");
    }
    return;
  }
  for (uint32_t i = 0; i < team->job.messages + window; i++) {
    mlfab_request *slot = &open[i % window];
    if (*slot && mlfab_wait(fabric, *slot, 0, NULL)) fail_with_last(team, fabric, "wait");
    *slot = 0;
    if (i < team->job.messages) begin(team, fabric, buf, slot);
  }
}

static void ours_worker(bench_team *team, uint32_t rank) {
  uint64_t count = team->job.bytes / sizeof(float);
  mlfab *fabric = fabric_open(team, (int32_t)rank, 0);
  void *memory = NULL;
  if (team->job.code != BENCH_ALLOC)
    memory = bench_memory(team->job.bytes);
  else if (mlfab_alloc(fabric, team->job.bytes, &memory))
    fail_with_last(team, fabric, "alloc");
  memset(memory, 0, team->job.bytes);
  mlfab_buf buf = {0, 0, memory, count};
  if (mlfab_tensor_add(fabric, 0, MLFAB_F32, count) || mlfab_model_start(fabric, NULL, NULL, 0)) {
    fail_with_last(team, fabric, "model");
  }
  team->allocations[rank] = allocations(fabric);
  bench_ready(team);
  while (bench_next(team, rank)) {
    trial(team, fabric, &buf);
    team->allocations[rank] = allocations(fabric);
    bench_done(team, rank);
  }
  mlfab_close(&fabric);
}

const bench_player bench_mlfab = {"mlfab", 1, ours_prepare, ours_server, ours_worker};
