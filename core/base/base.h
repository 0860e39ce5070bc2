/* base.h - macros and helpers used by every file.
 *
 * Internal functions are MLFAB__INTERNAL: static in the amalgamated mlfab.c, external when the parts are
 * built separately (tests of internals). Nothing here allocates or does I/O. */
#ifndef MLFAB__BASE_H
#define MLFAB__BASE_H

/* Linux and POSIX declarations under -std=c11; before the first system header. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "../../mlfab.h"

#include <assert.h>
#include <stdarg.h>
#include <string.h>

#ifndef MLFAB__INTERNAL
#define MLFAB__INTERNAL
#endif

/* ThreadSanitizer does not model fences; under it, an atomic exchange replaces them. */
#if defined(__SANITIZE_THREAD__)
#define MLFAB__TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MLFAB__TSAN 1
#endif
#endif
#ifndef MLFAB__TSAN
#define MLFAB__TSAN 0
#endif

#if defined(__GNUC__) || defined(__clang__)
#define MLFAB__PRINTF(at, first) __attribute__((__format__(__printf__, at, first)))
#define MLFAB__UNUSED __attribute__((__unused__))
#define MLFAB__LIKELY(x) __builtin_expect(!!(x), 1)
#define MLFAB__UNLIKELY(x) __builtin_expect(!!(x), 0)
#else
#define MLFAB__PRINTF(at, first)
#define MLFAB__UNUSED
#define MLFAB__LIKELY(x) (x)
#define MLFAB__UNLIKELY(x) (x)
#endif

/* Features: 0 leaves a feature out (the default of MPI and CBLAS). amalgamate.py puts these switches around the files
 * of a group. Code that composes a node tests them. Shared memory needs Linux. */
#ifndef MLFAB_WITH_PUSH
#define MLFAB_WITH_PUSH 1
#endif
#ifndef MLFAB_WITH_SCHED
#define MLFAB_WITH_SCHED MLFAB_WITH_PUSH
#endif
#ifndef MLFAB_WITH_SPARSE
#define MLFAB_WITH_SPARSE MLFAB_WITH_PUSH
#endif
#ifndef MLFAB_WITH_GROWTH
#define MLFAB_WITH_GROWTH MLFAB_WITH_PUSH
#endif
#ifndef MLFAB_WITH_RESHARD
#define MLFAB_WITH_RESHARD MLFAB_WITH_GROWTH
#endif
#if MLFAB_WITH_RESHARD && !MLFAB_WITH_GROWTH
#error "MLFAB_WITH_RESHARD needs MLFAB_WITH_GROWTH"
#endif
#ifndef MLFAB_WITH_CHECKPOINT
#define MLFAB_WITH_CHECKPOINT MLFAB_WITH_PUSH
#endif
#ifndef MLFAB_WITH_REPLICA
#define MLFAB_WITH_REPLICA MLFAB_WITH_SCHED
#endif
#if MLFAB_WITH_REPLICA && !MLFAB_WITH_SCHED
#error "MLFAB_WITH_REPLICA needs MLFAB_WITH_SCHED"
#endif
#ifndef MLFAB_WITH_COLL
#define MLFAB_WITH_COLL 1
#endif
#ifndef MLFAB_WITH_PARTIAL
#define MLFAB_WITH_PARTIAL MLFAB_WITH_COLL
#endif
#ifndef MLFAB_WITH_STOCHASTIC
#define MLFAB_WITH_STOCHASTIC MLFAB_WITH_COLL
#endif
#ifndef MLFAB_WITH_DAG
#define MLFAB_WITH_DAG MLFAB_WITH_COLL
#endif
#if !MLFAB_WITH_COLL && (MLFAB_WITH_PARTIAL || MLFAB_WITH_STOCHASTIC || MLFAB_WITH_DAG)
#error "MLFAB_WITH_PARTIAL, MLFAB_WITH_STOCHASTIC and MLFAB_WITH_DAG need MLFAB_WITH_COLL"
#endif
#ifndef MLFAB_WITH_KEYS
#define MLFAB_WITH_KEYS 1
#endif
#ifndef MLFAB_WITH_LEND
#define MLFAB_WITH_LEND MLFAB_WITH_PUSH
#endif
#ifndef MLFAB_WITH_DEVICE
#define MLFAB_WITH_DEVICE MLFAB_WITH_PUSH
#endif
#if !MLFAB_WITH_PUSH &&                                                                  \
    (MLFAB_WITH_SCHED || MLFAB_WITH_SPARSE || MLFAB_WITH_RESHARD || MLFAB_WITH_GROWTH || \
     MLFAB_WITH_CHECKPOINT || MLFAB_WITH_DEVICE || MLFAB_WITH_LEND)
#error \
    "MLFAB_WITH_SCHED, _SPARSE, _RESHARD, _GROWTH, _CHECKPOINT, _DEVICE and _LEND need MLFAB_WITH_PUSH"
#endif
#ifndef MLFAB_WITH_TELEMETRY
#define MLFAB_WITH_TELEMETRY 1
#endif
#ifndef MLFAB_WITH_TCP
#define MLFAB_WITH_TCP 1
#endif
#ifndef MLFAB_WITH_MPI
#define MLFAB_WITH_MPI 0 /* needs mpi.h */
#endif
#ifndef MLFAB_WITH_CBLAS
#define MLFAB_WITH_CBLAS 0 /* needs cblas.h and its library */
#endif
#ifndef __linux__
#undef MLFAB_WITH_SHM
#define MLFAB_WITH_SHM 0
#elif !defined(MLFAB_WITH_SHM)
#define MLFAB_WITH_SHM 1
#endif

#define MLFAB__COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define MLFAB__NEVER UINT64_MAX

static inline uint64_t mlfab__min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t mlfab__max(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* a + b, or MLFAB__NEVER instead of wrapping round. */
static inline uint64_t mlfab__add_sat(uint64_t a, uint64_t b) {
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/* Moves a stamp by `by_ns`, at most to now. A stamp of 0 (none) or in the future stays. */
MLFAB__UNUSED static inline void mlfab__later(uint64_t *stamp_ns, uint64_t by_ns, uint64_t now_ns) {
  if (*stamp_ns != 0 && *stamp_ns < now_ns)
    *stamp_ns = mlfab__min(mlfab__add_sat(*stamp_ns, by_ns), now_ns);
}

/* a * b, or MLFAB__NEVER instead of wrapping round. */
MLFAB__UNUSED static inline uint64_t mlfab__mul_sat(uint64_t a, uint64_t b) {
  return b != 0 && a > UINT64_MAX / b ? UINT64_MAX : a * b;
}

/* Does this URL contain a user or a password? 0 for any other path. Text behind the ':' that is no port may be a
 * password with an unescaped '/'. */
MLFAB__UNUSED static inline int mlfab__url_tells(const char *url) {
  const char *at = strstr(url, "://"), *host = at ? at + 3 : "";
  size_t n = strcspn(host, "/@");
  const char *colon = (const char *)memchr(host, ':', n);
  if (host[n] == '@') return 1;
  return colon && host[0] != '[' && !(colon[1] >= '0' && colon[1] <= '9') && strchr(colon, '@');
}

/* Tests bits, because -ffast-math lets a compiler assume that x - x is 0. */
MLFAB__UNUSED static inline int mlfab__finite(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (bits >> 52 & 0x7ff) != 0x7ff;
}

/* The number of set bits; the index of the lowest one (x is not 0). */
MLFAB__UNUSED static inline uint32_t mlfab__bits(uint64_t x) {
  x -= x >> 1 & 0x5555555555555555u;
  x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
  x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu;
  return (uint32_t)(x * 0x0101010101010101u >> 56);
}

MLFAB__UNUSED static inline uint32_t mlfab__lowest(uint64_t x) {
#if defined(__GNUC__) || defined(__clang__)
  return (uint32_t)__builtin_ctzll(x);
#else
  uint32_t i = 0;
  while (!(x >> i & 1)) i++;
  return i;
#endif
}

/* Binary search: sets `low` to the first of low..high-1 that is not below, or to `high`. `below`: condition on `at`. */
#define MLFAB__SEARCH(low, high, at, below)     \
  while ((low) < (high)) {                      \
    uint32_t at = (low) + ((high) - (low)) / 2; \
    if (below)                                  \
      (low) = at + 1;                           \
    else                                        \
      (high) = at;                              \
  }

/* Does the caller's struct have this member? Its `size` may be that of an older version. */
#define MLFAB__HAS(ptr, type, member) \
  ((ptr)->size >= offsetof(type, member) + sizeof((ptr)->member))

#endif
