/* small.c - what the parts of a small call cost: bench-small [FILE.tsv] [--quick]
 *
 * Nanoseconds on one core, without contention: the median of trials, each the mean of many turns. bench.c measures the round
 * trip of a cache line between two cores, beside its rows roundtrip/.
 *
 *    small/lock          a mutex is taken and given back
 *    small/clock         CLOCK_MONOTONIC is read
 *    small/yield         sched_yield, with no other process to run
 *    small/recv          recv on a socket without input
 *    small/epoll         epoll_wait with timeout 0 on such a socket
 *    small/request       a request is opened, finished and ended
 *    small/encode        the meta of a PUSH, of one stretch of one tensor
 *    small/seal          its header, with the checksums of header and meta
 *    small/check         the receiver's checks of both
 *    small/tag           the authentication tag of it and 64 bytes
 *    small/tag-4k        the same with 4 KiB
 *    small/code          the code of its header, as a sender makes it
 *
 * It links the parts, since much of this is not in the public header, and so is a program of its own; rows are
 * appended to FILE.tsv in the format of bench.c. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "core/base/request.h"
#include "core/keys/session.h"
#include "core/wire/wire.h"
#include "single.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { TRIALS_MAX = 31, BULK = 64, LARGE = 4096 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int quiet_socket, poller;
static mlfab__env env;
static mlfab__requests requests;
static mlfab__push push;
static mlfab__segment segment;
static uint64_t version;
static uint8_t head[MLFAB_HEADER_BYTES + MLFAB_META_MAX], bulk[LARGE];
static uint32_t meta_bytes;
static uint64_t state[8], coded;
static mlfab__codes codes;
static volatile uint64_t kept; /* so that no result is left out */

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void do_lock(void) {
  pthread_mutex_lock(&lock);
  pthread_mutex_unlock(&lock);
}

static void do_clock(void) { kept = now(); }

static void do_yield(void) { sched_yield(); }

static void do_recv(void) {
  char byte;
  kept = (uint64_t)recv(quiet_socket, &byte, 1, MSG_DONTWAIT);
}

static void do_epoll(void) {
  struct epoll_event event;
  kept = (uint64_t)epoll_wait(poller, &event, 1, 0);
}

static void do_request(void) {
  mlfab__request *request =
      mlfab__request_open(&requests, MLFAB__REQUEST_PUSH, 0, kept, 1000000000);
  require(request != NULL, "no request");
  mlfab__request_succeed(&requests, request, kept);
  mlfab__request_end(&requests, request);
}

static void do_encode(void) {
  meta_bytes = mlfab__encode_push(head + MLFAB_HEADER_BYTES, &push, &segment, &version);
}

static void do_seal(void) {
  mlfab__header header = {.type = MLFAB__PUSH, .meta_bytes = meta_bytes, .bulk_bytes = BULK};
  mlfab__wire_seal(head, &header, bulk);
}

static void do_check(void) {
  uint32_t head_bytes, bulk_bytes;
  int code = mlfab_frame_check(head, &head_bytes, &bulk_bytes);
  if (!code) code = mlfab_frame_verify(head, head_bytes, bulk, bulk_bytes);
  require(code == 0, "a frame is refused");
}

static void do_tag(void) {
  uint8_t tag[MLFAB__TAG_BYTES];
  mlfab__session_tag(state, kept, head, MLFAB_HEADER_BYTES + meta_bytes, bulk, BULK, tag);
  kept = tag[0];
}

static void do_large(void) {
  uint8_t tag[MLFAB__TAG_BYTES];
  mlfab__session_tag(state, kept, head, MLFAB_HEADER_BYTES + meta_bytes, bulk, LARGE, tag);
  kept = tag[0];
}

static void do_code(void) { kept = mlfab__session_code(state, &codes, coded++, meta_bytes, BULK); }

static const struct part {
  const char *name;
  void (*run)(void);
} parts[] = {{"lock", do_lock},     {"clock", do_clock},  {"yield", do_yield},
             {"recv", do_recv},     {"epoll", do_epoll},  {"request", do_request},
             {"encode", do_encode}, {"seal", do_seal},    {"check", do_check},
             {"tag", do_tag},       {"tag-4k", do_large}, {"code", do_code}};

static void prepare(void) {
  int pair[2];
  struct epoll_event event = {.events = EPOLLIN};
  uint8_t key[MLFAB__BLAKE2B_MAX] = {1};
  mlfab__challenge challenge = {.node = 1, .first = MLFAB__JOIN};
  mlfab__answer answer = {.number = 0};
  mlfab__session session;
  require(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "no sockets");
  quiet_socket = pair[0];
  poller = epoll_create1(0);
  require(poller >= 0 && epoll_ctl(poller, EPOLL_CTL_ADD, quiet_socket, &event) == 0, "no epoll");
  require(mlfab__env_init(&env, NULL) == 0, "no hooks");
  requests.env = &env;
  push = (mlfab__push){.seq = 1,
                       .members = 1,
                       .generation = 1,
                       .bytes = BULK,
                       .eager = BULK,
                       .scale = 1.0,
                       .parts = 1,
                       .segments = 1,
                       .versions = 1};
  segment = (mlfab__segment){0, BULK};
  mlfab__session_derive(&session, key, &challenge, &answer, 0);
  memcpy(state, session.out, sizeof state);
}

int main(int argc, char **argv) {
  int trials, turns = 20000;
  double times[TRIALS_MAX];
  char name[32];
  single_open(argc, argv);
  trials = quick ? 3 : 15;
  prepare();
  for (size_t p = 0; p < sizeof parts / sizeof *parts; p++) {
    for (int t = -1; t < trials; t++) { /* the first one warms up */
      uint64_t begin = now();
      for (int i = 0; i < turns; i++) parts[p].run();
      times[t < 0 ? 0 : t] = (double)(now() - begin) / turns;
    }
    snprintf(name, sizeof name, "small/%s", parts[p].name);
    printf("%-18s %9.1f ns\n", name, median(times, trials));
    row(name, median(times, trials), "ns", NULL, 0, NULL, 0);
  }
  single_close();
  return 0;
}
