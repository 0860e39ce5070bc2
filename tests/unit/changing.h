/* changing.h - memory that its sender changes while it is read, as a neighbour can do with a ring that both
 * map.
 *
 * The first access to its second page faults. The handler then changes bytes of the first page and lets the
 * reader go on. A reader that reads forwards and only once has what was sent. A reader that checks first
 * and reads again later reads bytes that it has not checked. A reader that touches the second page first
 * may get bytes that do not parse. */
#ifndef CHANGING_H
#define CHANGING_H

#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CHANGING_MOST = 8 };

static struct {
  uint8_t *map, *bytes;
  size_t page, room, n;
  struct {
    size_t at;
    uint8_t bytes[8], count;
  } changes[CHANGING_MOST];
  uint32_t nchanges;
  volatile sig_atomic_t fired;
  struct sigaction before;
} CHANGING;

static void changing_fault(int signal_number, siginfo_t *info, void *context) {
  uint8_t *at = (uint8_t *)info->si_addr, *second = CHANGING.map + CHANGING.page;
  (void)context;
  if (CHANGING.fired || at < second || at >= second + CHANGING.page) {
    /* not our fault address: the same access faults again with the old handler */
    sigaction(signal_number, &CHANGING.before, NULL);
    return;
  }
  CHANGING.fired = 1;
  mprotect(second, CHANGING.page, PROT_READ | PROT_WRITE);
  for (uint32_t i = 0; i < CHANGING.nchanges; i++)
    memcpy(CHANGING.bytes + CHANGING.changes[i].at, CHANGING.changes[i].bytes,
           CHANGING.changes[i].count);
}

/* n bytes, of which `head` (at most a page, a multiple of 8) lie in the first page. */
static uint8_t *changing_make(const void *from, size_t n, size_t head) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  CHANGING.page = (size_t)sysconf(_SC_PAGESIZE);
  CHANGING.room = (n / CHANGING.page + 3) * CHANGING.page;
  CHANGING.map =
      mmap(NULL, CHANGING.room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(CHANGING.map != MAP_FAILED && head <= CHANGING.page);
  CHANGING.bytes = CHANGING.map + CHANGING.page - head;
  CHANGING.n = n;
  memcpy(CHANGING.bytes, from, n);
  CHANGING.nchanges = 0;
  CHANGING.fired = 0;
  action.sa_sigaction = changing_fault;
  action.sa_flags = SA_SIGINFO;
  assert_int_equal(sigaction(SIGSEGV, &action, &CHANGING.before), 0);
  return CHANGING.bytes;
}

/* The first access to the second page overwrites these bytes of the first page. */
static void changing_to(size_t at, const void *bytes, size_t count) {
  assert_true(CHANGING.nchanges < CHANGING_MOST && count <= 8);
  CHANGING.changes[CHANGING.nchanges].at = at;
  CHANGING.changes[CHANGING.nchanges].count = (uint8_t)count;
  memcpy(CHANGING.changes[CHANGING.nchanges++].bytes, bytes, count);
}

static void changing_arm(void) {
  assert_int_equal(mprotect(CHANGING.map + CHANGING.page, CHANGING.page, PROT_NONE), 0);
}

/* Returns 1 when the memory has been changed. */
static int changing_end(void) {
  int fired = CHANGING.fired;
  sigaction(SIGSEGV, &CHANGING.before, NULL);
  munmap(CHANGING.map, CHANGING.room);
  return fired;
}

#endif
