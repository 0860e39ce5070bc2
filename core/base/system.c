/* system.c - threads and the clock of the system. See system.h. */
#include "system.h"

#include <signal.h>
#include <time.h>

MLFAB__INTERNAL int mlfab__thread_start(pthread_t *thread, const pthread_attr_t *attributes,
                                        void *(*run)(void *argument), void *argument) {
  static const int faults[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP};
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (size_t i = 0; i < MLFAB__COUNT(faults); i++) sigdelset(&blocked, faults[i]);
  pthread_sigmask(SIG_SETMASK, &blocked, &before); /* the new thread inherits it */
  int failed = pthread_create(thread, attributes, run, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return failed ? MLFAB_ERR_IO : 0;
}

MLFAB__INTERNAL uint64_t mlfab__monotonic(void *user) {
  struct timespec t;
  (void)user;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
