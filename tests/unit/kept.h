/* kept.h - an allocator for tests under AddressSanitizer, which maps each large block anew, and its pages with it. This one
 * keeps released large blocks for the next allocation of exactly as many bytes. Without AddressSanitizer it is malloc.
 *
 * A kept block is poisoned: whoever uses it is reported. A block that is released twice ends the program. A block that is
 * used again is filled with a pattern, as a new block is. LeakSanitizer sees a block that is never released. */
#ifndef KEPT_H
#define KEPT_H

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>

#ifdef __SANITIZE_ADDRESS__
#define KEPT 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KEPT 1
#endif
#endif

#ifndef KEPT
static void *kept_allocate(size_t bytes) { return malloc(bytes); }

static void kept_release(void *at, size_t bytes) {
  (void)bytes;
  free(at);
}
#else
#include <sanitizer/asan_interface.h>
#include <string.h>

enum { KEPT_BLOCKS = 16, KEPT_LARGE = 1 << 17 };

static struct {
  pthread_mutex_t lock;
  size_t next; /* the block that has been kept for longest */
  struct {
    void *at;
    size_t bytes;
  } block[KEPT_BLOCKS];
} kept_here = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *kept_allocate(size_t bytes) {
  void *found = NULL;
  pthread_mutex_lock(&kept_here.lock);
  for (size_t i = 0; i < KEPT_BLOCKS && bytes >= KEPT_LARGE && !found; i++) {
    if (kept_here.block[i].bytes != bytes) continue;
    found = kept_here.block[i].at;
    kept_here.block[i].at = NULL;
    kept_here.block[i].bytes = 0;
  }
  pthread_mutex_unlock(&kept_here.lock);
  if (!found) return malloc(bytes);
  ASAN_UNPOISON_MEMORY_REGION(found, bytes);
  return memset(found, 0xbe, bytes);
}

static void kept_release(void *at, size_t bytes) {
  void *old = at;
  if (at && bytes >= KEPT_LARGE) {
    ASAN_POISON_MEMORY_REGION(at, bytes);
    pthread_mutex_lock(&kept_here.lock);
    for (size_t k = 0; k < KEPT_BLOCKS; k++)
      if (kept_here.block[k].at == at) abort();
    size_t i = kept_here.next++ % KEPT_BLOCKS, old_bytes = kept_here.block[i].bytes;
    old = kept_here.block[i].at;
    kept_here.block[i].at = at;
    kept_here.block[i].bytes = bytes;
    pthread_mutex_unlock(&kept_here.lock);
    if (old) ASAN_UNPOISON_MEMORY_REGION(old, old_bytes);
  }
  free(old);
}
#endif

#endif
