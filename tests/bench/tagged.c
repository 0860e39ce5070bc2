/* tagged.c - what version tags save in a pull: bench-tagged [FILE.tsv] [--quick]
 *
 * A model of 100 MB of float32 at a server process, and one worker. Between two pulls the worker changes
 * some of it; timed is the pull alone, medians of trials in turns with a full pull of a model without
 * tags, on the same transport.
 *
 *    tagged/TRANSPORT/B/WHAT/HOW   ms; B: elements a tag; WHAT: none, clustered (1 % in 16 places),
 *                                  scattered (1 % one by one), all; HOW: cached (no buffer: the
 *                                  library's cache is read), kept (the buffer is brought up to date),
 *                                  buffer (written in full); the peer is the full pull
 *
 * What has changed must arrive: the last element that was changed is looked at after each pull. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"
#include "single.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RUNS_MAX = 31, CLUSTERS = 16 };
enum { NONE, CLUSTERED, SCATTERED, ALL, KINDS };
static const char *const kinds[KINDS] = {"none", "clustered", "scattered", "all"};
enum { CACHED, KEPT, BUFFER, HOWS };
static const char *const hows[HOWS] = {"cached", "kept", "buffer"};

static uint64_t n; /* elements */
static int trials;
static float *ones;
static uint64_t *indices;

/* A server in its own process, and this process's worker. */
typedef struct fabric {
  mlfab *worker;
  pid_t server;
  float *buffer;
  float expected; /* of the element that every change touches */
} fabric;

static void must(mlfab *ctx, int code, const char *what) {
  mlfab_error error = {.code = 0};
  if (code == 0) return;
  if (ctx) mlfab_last_error(ctx, &error);
  fprintf(stderr, "bench-tagged: %s: %s (%s)\n", what, mlfab_error_name(code), error.text);
  exit(1);
}

/* A free port, or an unused name. */
static void place(uint32_t transport, char *address, size_t bytes) {
  static unsigned number;
  struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof in;
  if (transport == MLFAB_USE_SHM) {
    snprintf(address, bytes, "shm:mlfab-tagged-%d-%u", (int)getpid(), number++);
    return;
  }
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0 || bind(fd, (struct sockaddr *)&in, length) ||
      getsockname(fd, (struct sockaddr *)&in, &length)) {
    perror("bench-tagged: a port");
    exit(1);
  }
  close(fd);
  snprintf(address, bytes, "tcp:127.0.0.1:%u", ntohs(in.sin_port));
}

static mlfab *node_open(uint32_t transport, const char *address, uint32_t role) {
  mlfab *node = NULL;
  mlfab_error error = {.code = 0};
  mlfab_config config;
  mlfab_config_init(&config);
  config.roles = role;
  config.dedicated = 1;
  config.transports = transport;
  config.no_payload_crc = 1;
  config.allow_insecure = 1; /* no authentication tags */
  if (!strncmp(address, "tcp:", 4)) strcpy(config.listen, "tcp:127.0.0.1:0");
  snprintf(config.coordinator, sizeof config.coordinator, "%s", address);
  if (mlfab_open(&config, &node, &error)) {
    fprintf(stderr, "bench-tagged: %s\n", error.text);
    exit(1);
  }
  return node;
}

static fabric fabric_open(uint32_t transport, uint32_t tags) {
  fabric f = {NULL, 0, memory(n * sizeof(float)), 0.0f};
  char address[200];
  mlfab_model_options options;
  place(transport, address, sizeof address);
  fflush(NULL);
  f.server = fork();
  if (f.server == 0) {
    mlfab *server = node_open(transport, address, MLFAB_ROLE_SERVER);
    mlfab_serve(server, 0);
    mlfab_close(&server);
    _exit(0);
  }
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.tags = tags;
  f.worker = node_open(transport, address, MLFAB_ROLE_WORKER);
  must(f.worker, mlfab_tensor_add(f.worker, 0, MLFAB_F32, n), "tensor");
  must(f.worker, mlfab_model_start(f.worker, &options, NULL, 0), "model");
  return f;
}

static void fabric_close(fabric *f) {
  mlfab_close(&f->worker);
  waitpid(f->server, NULL, 0);
  free(f->buffer);
}

/* Indices of 1 %, with the first element among them. */
static uint64_t choose(int kind) {
  uint64_t count = 0;
  if (kind == CLUSTERED) {
    for (uint64_t c = 0; c < CLUSTERS; c++) {
      for (uint64_t i = 0; i < n / 100 / CLUSTERS; i++) indices[count++] = c * (n / CLUSTERS) + i;
    }
  } else {
    for (uint64_t i = 0; i + 100 <= n; i += 100) indices[count++] = i + (i ? i * 7919 % 100 : 0);
  }
  return count;
}

static void change(fabric *f, int kind) {
  mlfab_buf buf = {0, 0, ones, n};
  if (kind == NONE) return;
  f->expected += 1.0f;
  if (kind == ALL) {
    must(f->worker, mlfab_push(f->worker, &buf, 1, NULL, NULL), "push");
  } else {
    uint64_t count = choose(kind);
    must(f->worker, mlfab_push_sparse(f->worker, 0, indices, ones, count, NULL, NULL),
         "sparse push");
  }
}

/* Seconds. */
static double pull(fabric *f, int how) {
  mlfab_buf buf = {0, 0, how == CACHED ? NULL : f->buffer, n};
  mlfab_pull_options options = {sizeof options, how == KEPT ? MLFAB_PULL_KEPT : 0, 0};
  const void *data = f->buffer;
  uint64_t count;
  double begin = wall_now();
  must(f->worker, mlfab_pull(f->worker, &buf, 1, &options, NULL), "pull");
  double seconds = wall_now() - begin;
  if (how == CACHED) must(f->worker, mlfab_cached(f->worker, 0, &data, &count), "cached");
  if (*(const float *)data != f->expected) {
    fprintf(stderr, "bench-tagged: %g instead of %g\n", (double)*(const float *)data,
            (double)f->expected);
    exit(1);
  }
  return seconds;
}

static void cell(const char *transport, uint32_t tags, fabric *full, fabric *tagged, int kind,
                 int how) {
  double times[2][RUNS_MAX];
  for (int t = -1; t < trials; t++) {
    change(tagged, kind);
    times[0][t < 0 ? 0 : t] = pull(tagged, how);
    times[1][t < 0 ? 0 : t] = pull(full, BUFFER);
  }
  double ms = median(times[0], trials) * 1e3, all = median(times[1], trials) * 1e3;
  char name[64];
  snprintf(name, sizeof name, "tagged/%s/%u/%s/%s", transport, tags, kinds[kind], hows[how]);
  printf("%-36s %9.3f ms   full pull %.2f ms (%.1f %%)\n", name, ms, all, 100 * ms / all);
  fflush(stdout);
  row(name, ms, "ms", "full-pull", all, NULL, 0);
}

static void cells(const char *transport, uint32_t use, uint32_t tags) {
  fabric full = fabric_open(use, 0), tagged = fabric_open(use, tags);
  for (int how = 0; how < HOWS; how++) {
    for (int kind = 0; kind < KINDS; kind++) cell(transport, tags, &full, &tagged, kind, how);
  }
  fabric_close(&tagged);
  fabric_close(&full);
}

int main(int argc, char **argv) {
  single_open(argc, argv);
  n = quick ? 2500000 : 25000000;
  trials = quick ? 5 : 15;
  ones = memory(n * sizeof(float));
  indices = memory((n / 100 + 1) * sizeof(uint64_t));
  for (uint64_t i = 0; i < n; i++) ones[i] = 1.0f;
  cells("shm", MLFAB_USE_SHM, 256);
  cells("shm", MLFAB_USE_SHM, 1);
  cells("tcp", MLFAB_USE_TCP, 256);
  cells("tcp", MLFAB_USE_TCP, 1);
  free(ones);
  free(indices);
  single_close();
  return 0;
}
