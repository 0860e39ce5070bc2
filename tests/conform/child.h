/* child.h - the needs of tests between threads and processes: checks in a child, states, and ports. */
#ifndef CONFORM_CHILD_H
#define CONFORM_CHILD_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "mlfab.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static inline void nap(long ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&t, NULL);
}

static inline const char *last(mlfab *fabric) {
  static mlfab_error error;
  return fabric && !mlfab_last_error(fabric, &error) ? error.text : "";
}

/* In a child, in which a failed assertion would not be reported. */
#define CHECK(what)                                                                \
  do {                                                                             \
    if (!(what)) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #what, last(fabric)); \
      _exit(1);                                                                    \
    }                                                                              \
  } while (0)

/* Opens a node, or ends the child. */
static inline mlfab *child_open(const mlfab_config *config) {
  mlfab *fabric = NULL;
  mlfab_error error;
  if (!mlfab_open(config, &fabric, &error)) return fabric;
  fprintf(stderr, "%s\n", error.text);
  _exit(1);
}

/* Waits until the process or the thread with this file (/proc/...) is in this state: T (stopped), S (it sleeps). */
static inline void await_state(const char *path, char wanted) {
  for (char state = 0; state != wanted;) {
    FILE *file = fopen(path, "r");
    if (!file || fscanf(file, "%*d %*[^)]) %c", &state) != 1) state = wanted; /* no /proc here */
    if (file) fclose(file);
    if (state != wanted) nap(1);
  }
}

/* The calling thread's number in /proc/self/task. */
static inline long thread_number(void) {
#ifdef __linux__
  return (long)syscall(SYS_gettid);
#else
  return 0;
#endif
}

/* Makes a port of the loopback this process's, with its children. Returns 0 if it is another's. An abstract socket with
 * its number claims it, as in tests/process/process.py; it stays open until all of them have ended. */
static inline int claim_port(uint32_t port) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  struct sockaddr_un name = {.sun_family = AF_UNIX};
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int claim = socket(AF_UNIX, SOCK_STREAM, 0), fd = socket(AF_INET, SOCK_STREAM, 0);
  assert_true(claim >= 0 && fd >= 0);
  int length =
      snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "mlfab-port-%u", (unsigned)port);
  socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
#ifdef __linux__
  int claimed = !bind(claim, (const struct sockaddr *)(const void *)&name, bytes);
#else
  int claimed = bytes > 0;
#endif
  claimed = claimed && !bind(fd, (const struct sockaddr *)(const void *)&at, sizeof at);
  close(fd);
  if (!claimed) close(claim);
  return claimed;
}

/* A port of the loopback that nobody has, below those that the system gives out: no other socket takes it meanwhile. */
static inline uint32_t free_port(void) {
  static uint32_t next;
  uint32_t tries = 0;
  if (!next) next = (uint32_t)getpid() * 7919u;
  do {
    assert_true(tries++ < 1000); /* a machine without loopback */
    next += 127;
  } while (!claim_port(12000 + next % 20000));
  return 12000 + next % 20000;
}

#endif
