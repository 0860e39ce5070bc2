/* test_shm_memory.c - memory that other processes may map: areas come and go, and pages are renewed, in any order.
 *
 * The oracle is a model of every page: the bytes that its owner reads, and that another process reads which has mapped it
 * before it was renewed. The test includes the file under test, so that it can check that each lock is taken and given back. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <pthread.h>

static int lock_depth, lock_faults;

static int checked_lock(pthread_mutex_t *lock) {
  lock_faults += lock_depth != 0;
  lock_depth++;
  return pthread_mutex_lock(lock);
}

static int checked_unlock(pthread_mutex_t *lock) {
  lock_faults += lock_depth != 1;
  lock_depth--;
  return pthread_mutex_unlock(lock);
}

#define pthread_mutex_lock checked_lock
#define pthread_mutex_unlock checked_unlock
#include "../../transports/shm_memory.c"
#undef pthread_mutex_lock
#undef pthread_mutex_unlock

#include "../../core/base/rng.h"
#include "../testing.h"

#include <dirent.h>

#if MLFAB_WITH_SHM

enum { AREAS = 6, PAGES = 12, VIEWS = 40, LIVES = 64 };

typedef struct owned {
  uint8_t *at;
  int pages, guarded;
  uint8_t value[PAGES];
} owned;

/* A page as another process has mapped it. */
typedef struct view {
  const uint8_t *at;
  uint8_t value;
  int area, page;
  int parted; /* the owner's page is another one now */
} view;

static struct {
  mlfab__env env;
  mlfab__shm_memory *memory;
  size_t page;
  owned areas[AREAS];
  view views[VIEWS];
  uint8_t next;
  uint64_t gone[LIVES], ngone;
} w;

static const mlfab__shm_memory_table *table(void) { return mlfab__shm_memory_functions(); }

static int descriptors(void) {
  int n = 0;
  DIR *dir = opendir("/proc/self/fd");
  while (dir && readdir(dir)) n++;
  if (dir) closedir(dir);
  return n;
}

static void on_gone(void *user, uint64_t number) {
  (void)user;
  for (uint64_t i = 0; i < w.ngone && i < LIVES; i++) assert_true(w.gone[i] != number);
  w.gone[w.ngone++ % LIVES] = number;
}

/* All of a page has this value. */
static int is_all(const uint8_t *at, uint8_t value) {
  return at[0] == value && !memcmp(at, at + 1, w.page - 1);
}

static void check(void) {
  assert_int_equal(lock_faults, 0);
  assert_int_equal(lock_depth, 0);
  for (int a = 0; a < AREAS; a++) {
    const owned *area = &w.areas[a];
    for (int p = 0; area->at && p < area->pages; p++)
      if (!is_all(area->at + (size_t)p * w.page, area->value[p]))
        fail_msg("area %d, page %d", a, p);
  }
  for (int v = 0; v < VIEWS; v++)
    if (w.views[v].at && !is_all(w.views[v].at, w.views[v].value))
      fail_msg("a view of area %d, page %d", w.views[v].area, w.views[v].page);
}

/* --- steps --- */

static void take_area(int a, int pages, int guarded) {
  owned *area = &w.areas[a];
  assert_null(area->at);
  *area = (owned){table()->alloc(w.memory, (size_t)pages * w.page, guarded), pages, guarded, {0}};
}

static void end_view(view *v) {
  if (v->at) munmap((void *)(uintptr_t)v->at, w.page);
  v->at = NULL;
}

static void drop_area(int a) {
  if (w.areas[a].at) table()->release(w.memory, w.areas[a].at, 0);
  w.areas[a].at = NULL;
  for (int v = 0; v < VIEWS; v++) w.views[v].parted |= w.views[v].area == a;
}

/* Renews stretches, as before a write to what others may still read. */
static void renew(int a, int from, int to) {
  owned *area = &w.areas[a];
  assert_int_equal(
      table()->renew(w.memory, area->at + (size_t)from * w.page, (size_t)(to - from) * w.page), 1);
  for (int v = 0; v < VIEWS; v++) {
    view *seen = &w.views[v];
    seen->parted |= seen->area == a && seen->page >= from && seen->page < to;
  }
}

static void write_page(int a, int p) {
  owned *area = &w.areas[a];
  for (int v = 0; v < VIEWS; v++) {
    const view *seen = &w.views[v];
    if (seen->at && !seen->parted && seen->area == a && seen->page == p) {
      renew(a, p, p + 1);
      break;
    }
  }
  memset(area->at + (size_t)p * w.page, w.next, w.page);
  area->value[p] = w.next++;
}

/* Another process maps a page. Returns 0 when it is private. */
static int see(int a, int p, view *v) {
  const owned *area = &w.areas[a];
  const uint8_t *at = area->at + (size_t)p * w.page;
  mlfab__shm_span span;
  uint64_t row = 0, number = table()->file(w.memory, at, &row);
  int found = mlfab__shm_memory_find(w.memory, at, w.page, &span);
  assert_int_equal(found, number != 0);
  if (!found) return 0;
  assert_true(span.number == number && row >= w.page && row % w.page == 0 && span.alone);
  assert_true(mlfab__shm_memory_has(w.memory, number));
  end_view(v);
  void *map = mmap(NULL, w.page, PROT_READ, MAP_SHARED, span.fd, (off_t)span.offset);
  assert_true(map != MAP_FAILED);
  *v = (view){map, area->value[p], a, p, 0};
  const uint8_t *from;
  uint64_t bytes;
  assert_int_equal(table()->hold(w.memory, at, w.page, number, &from, &bytes), 1);
  assert_true(from == area->at && bytes == (size_t)area->pages * w.page);
  assert_int_equal(table()->hold(w.memory, at, w.page, number + 1000, &from, &bytes), 0);
  return 1;
}

static void world_begin(void) {
  memset(&w, 0, sizeof w);
  lock_depth = lock_faults = 0;
  assert_int_equal(mlfab__env_init(&w.env, NULL), 0);
  w.page = (size_t)sysconf(_SC_PAGESIZE);
  w.memory = table()->create(&w.env);
  assert_non_null(w.memory);
  mlfab__shm_memory_watch(w.memory, on_gone, NULL);
}

static void world_end(int before) {
  for (int v = 0; v < VIEWS; v++) end_view(&w.views[v]);
  table()->destroy(&w.memory);
  assert_int_equal(lock_faults + lock_depth, 0);
  assert_int_equal(descriptors(), before);
}

/* --- tests --- */

/* Pages of a guarded area are renewed into one file, until some are renewed again. */
TEST(test_guarded) {
  int before = descriptors();
  world_begin();
  take_area(0, 8, 1);
  for (int p = 0; p < 8; p++) write_page(0, p);
  uint64_t row, first = table()->file(w.memory, w.areas[0].at, &row);
  for (int p = 0; p < 4; p++) assert_int_equal(see(0, p, &w.views[p]), 1);
  renew(0, 1, 2);
  uint64_t second = table()->file(w.memory, w.areas[0].at + w.page, &row);
  assert_true(second != first && row == w.page);
  renew(0, 2, 3);
  assert_true(table()->file(w.memory, w.areas[0].at + w.page, &row) == second);
  assert_int_equal(row, 2 * w.page); /* they are one piece */
  assert_true(table()->file(w.memory, w.areas[0].at, &row) == first && row == w.page);
  check();
  for (int p = 0; p < 8; p++) write_page(0, p);
  check();
  renew(0, 2, 3);
  assert_true(table()->file(w.memory, w.areas[0].at + 2 * w.page, &row) != second);
  check();
  drop_area(0);
  check();
  assert_true(w.ngone >= 3);
  world_end(before);
}

/* A random order of steps. */
TEST(test_any_order) {
  for (SEEDS(seed, 40)) {
    int before = descriptors(), seen = 0;
    mlfab__rng prng;
    mlfab__rng_seed(&prng, seed);
    world_begin();
    for (int step = 0; step < 120; step++) {
      int a = (int)mlfab__rng_below(&prng, AREAS), what = (int)mlfab__rng_below(&prng, 10);
      owned *area = &w.areas[a];
      if (!area->at) {
        take_area(a, 1 + (int)mlfab__rng_below(&prng, PAGES), (int)mlfab__rng_below(&prng, 2));
        continue;
      }
      int from = (int)mlfab__rng_below(&prng, (uint64_t)area->pages);
      int to = from + 1 + (int)mlfab__rng_below(&prng, (uint64_t)(area->pages - from));
      if (what == 0)
        drop_area(a);
      else if (what < 4)
        seen += see(a, from, &w.views[mlfab__rng_below(&prng, VIEWS)]);
      else if (what < 7)
        write_page(a, from);
      else
        renew(a, from, to);
      check();
    }
    assert_true(seen > 0);
    world_end(before);
  }
}

#else

TEST(test_nothing) { assert_null(mlfab__shm_memory_functions()); }

#endif

TESTS(NULL, NULL)
