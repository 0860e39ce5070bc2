/* shm_coll.c - collectives of the processes of one host, in shared memory.
 *
 * For blocking calls of members that map each other's memory: one copy of the data that the others need, and one copy
 * of the results, without frames. System calls are made only if a member sleeps. Its caller chooses the members, and
 * detects deaths by `pause`. Other users' processes are out of reach. Layout, invariants and waiting:
 * core/base/shm_coll.h.
 *
 * Source: reduce-scatter and allgather, pipelined in rounds that fit the caches. */
#include "shm_memory.h"
#include "../core/base/shm_coll.h"
#include "../core/base/system.h"
#include "../core/kernels/kernels_combine.h"

#if !MLFAB_WITH_SHM

MLFAB__INTERNAL const mlfab__shm_coll_table *mlfab__shm_coll_functions(void) { return NULL; }

#else

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SHM_COLL_MAGIC UINT64_C(0x32414e4552414c4d) /* also the version of this layout */
#define SHM_COLL_LOW ((UINT64_C(1) << 40) - 1)      /* of a word; the epoch is above */

#define SHM_COLL_SMALL 32768u    /* maximum bytes of a small call without additions, */
#define SHM_COLL_SMALL_SUM 7168u /* with additions: of all members together, */
#define SHM_COLL_SMALL_CROWDED 16384u
#define SHM_COLL_ROUND 65536u /* bytes of all parts of a round together, */
#define SHM_COLL_PART 8192u   /* and the minimum of one part */
#define SHM_COLL_IN 524288u   /* bytes of in[i] */
#define SHM_COLL_LINES 256u   /* parts are multiples of this, which suits the kernels */
#define SHM_COLL_SHORT 65536u /* larger calls wake sleepers before they compute */
#define SHM_COLL_MEAN 16384u  /* bytes divided at a time: fits the L1 cache */

enum {
  SHM_COLL_MEMORIES = 256,   /* maximum shared memories of a member; entry 0 is its slots */
  SHM_COLL_IN_DEPTH = 3,     /* rounds in flight: see (I3) */
  SHM_COLL_OUT_DEPTH = 4,    /* see (I4) */
  SHM_COLL_SPINS_BUSY = 100, /* without a pause: about the time a word needs to arrive */
  SHM_COLL_SPINS = 500,      /* about 20 us */
  SHM_COLL_SPINS_CROWDED = 120
};

/* Nanoseconds of waiting. */
enum { SHM_COLL_YIELD_NS = 150000, SHM_COLL_FIRST_NS = 50000, SHM_COLL_SLICE_NS = 500000 };

/* A member's entry for one of its shared memories. */
struct shm_coll_entry {
  _Atomic uint32_t generation; /* 0: unused */
  int32_t fd;
  uint64_t bytes;
};

/* A member's input of a call. */
struct shm_coll_offer {
  uint64_t signature;
  uint64_t offset;            /* offset of the vector in its shared memory */
  uint32_t entry, generation; /* which memory; generation 0: none */
  uint32_t direct;            /* 1: the others access it in place */
  uint32_t refused;           /* 1: contains NaN or infinity, which the call refuses */
};

struct shm_coll_door {
  _Alignas(64) _Atomic uint64_t word; /* (epoch, number + 1) */
  struct shm_coll_offer offer;
};

struct shm_coll_segment { /* NOLINT(clang-analyzer-optin.performance.Padding): one line a writer */
  uint64_t magic, bytes, nonce;
  _Alignas(64) _Atomic uint64_t step;
  _Alignas(64) _Atomic uint32_t asleep;
  _Atomic uint32_t releases; /* number of released memories: others may have to unmap */
  struct shm_coll_door doors[2];
  _Alignas(64) struct shm_coll_entry entries[SHM_COLL_MEMORIES];
  _Atomic uint32_t mapped[MLFAB__SHM_COLL_MOST][SHM_COLL_MEMORIES]; /* generations, by owner */
};

struct shm_coll_slots {
  uint8_t small[2][SHM_COLL_SMALL];
  uint8_t in[SHM_COLL_IN_DEPTH][SHM_COLL_IN];
  uint8_t out[SHM_COLL_OUT_DEPTH][SHM_COLL_ROUND];
};

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "atomics take locks");

/* A shared memory of another member, mapped here. */
struct shm_coll_view {
  uint8_t *at;
  uint64_t bytes;
  uint32_t generation;
};

struct shm_coll_peer {
  mlfab__shm_coll_name name;
  const struct shm_coll_segment *segment;
  struct shm_coll_slots *slots;
  struct shm_coll_offer offer; /* of this call */
  uint8_t *direct;             /* its vector, if the others access it in place */
  uint32_t releases;           /* releases seen */
  struct shm_coll_view views[SHM_COLL_MEMORIES];
};

/* A file of this member's memory that has an entry in the segment. */
struct shm_coll_file {
  uint64_t number; /* 0: none */
  bool known;      /* all others have confirmed that they map it */
};

struct mlfab__shm_coll {
  mlfab__env *env;
  pid_t pid; /* process that created it */
  struct shm_coll_segment *own;
  int fd;
  uint32_t n, me;
  uint64_t epoch;              /* shifted to its place in words; 0: none */
  uint64_t turn, base, round;  /* `base`: first step of this call; `round`: rounds before it */
  struct shm_coll_peer *peers; /* n entries; peers[me] does not use its views */
  mlfab__shm_memory *memory;
  struct shm_coll_file files[SHM_COLL_MEMORIES]; /* guarded by the memory's lock */
  struct shm_coll_slots *slots;
  uint8_t *lent;       /* this call's vector, if it is accessed in place, */
  uint64_t lent_bytes; /* and its bytes */
  uint32_t next_generation;
  _Atomic uint64_t fence; /* see shm_coll_fence */
  bool crowded; /* more members than processors: waiting would keep another from working */
  bool ended;   /* pause has ended the call */
  bool told;    /* words were published since the last wake-up */
};

/* ---- words ---- */

static inline void shm_coll_relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

/* Prefetches a line of this member that others have read, for writing. */
static inline void shm_coll_prefetch(const void *line) {
#if defined(__x86_64__)
  /* the builtin prefetches for reading only */
  __asm__ volatile("prefetchw %0" : : "m"(*(const uint8_t *)line));
#elif defined(__GNUC__)
  __builtin_prefetch(line, 1);
#else
  (void)line;
#endif
}

/* The half of a word that changes. */
static uint32_t *shm_coll_futex(const _Atomic uint64_t *word) {
  const uint64_t one = 1;
  const uint8_t *half = (const uint8_t *)word + (*(const uint8_t *)&one == 1 ? 0 : 4);
  return (uint32_t *)(uintptr_t)half;
}

static inline void shm_coll_fence(mlfab__shm_coll *a, memory_order order) {
#if MLFAB__TSAN
  (void)order;
  atomic_fetch_add(&a->fence, 1);
#else
  (void)a;
  atomic_thread_fence(order);
#endif
}

/* Wakes others that may sleep on this member's words. */
static void shm_coll_wake(mlfab__shm_coll *a) {
  uint32_t asleep = 0;
  a->told = false;
  shm_coll_fence(a, memory_order_seq_cst);
  for (uint32_t j = 0; j < a->n; j++)
    asleep |= atomic_load_explicit(&a->peers[j].segment->asleep, memory_order_relaxed);
  if (MLFAB__LIKELY(asleep == 0)) return;
  syscall(SYS_futex, shm_coll_futex(&a->own->step), MLFAB__FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
  for (int i = 0; i < 2; i++)
    syscall(SYS_futex, shm_coll_futex(&a->own->doors[i].word), MLFAB__FUTEX_WAKE, INT_MAX, NULL,
            NULL, 0);
}

static inline void shm_coll_settle(mlfab__shm_coll *a) {
  if (a->told) shm_coll_wake(a);
}

/* Publishes a word. Sleepers are woken later: before this member waits or computes for long, and at the
 * end. */
static inline void shm_coll_tell(mlfab__shm_coll *a, _Atomic uint64_t *word, uint64_t value) {
  atomic_store_explicit(word, value, memory_order_release);
  a->told = true;
}

static inline bool shm_coll_reached(const _Atomic uint64_t *word, uint64_t want, uint64_t *seen_p) {
  uint64_t seen = atomic_load_explicit(word, memory_order_acquire);
  *seen_p = seen;
  return seen >= want && (seen ^ want) <= SHM_COLL_LOW;
}

static void shm_coll_sleep(mlfab__shm_coll *a, const _Atomic uint64_t *word, uint64_t want) {
  struct timespec span = {0, SHM_COLL_SLICE_NS};
  uint64_t seen;
  atomic_store_explicit(&a->own->asleep, 1, memory_order_relaxed);
  shm_coll_fence(a, memory_order_seq_cst);
  if (!shm_coll_reached(word, want, &seen))
    syscall(SYS_futex, shm_coll_futex(word), MLFAB__FUTEX_WAIT, (uint32_t)seen, &span, NULL, 0);
  atomic_store_explicit(&a->own->asleep, 0, memory_order_relaxed);
}

static int shm_coll_wait_long(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                              const _Atomic uint64_t *word, uint64_t want) {
  uint64_t seen, now, begin, due;
  for (uint32_t i = 0, n = a->crowded ? SHM_COLL_SPINS_CROWDED : SHM_COLL_SPINS; i < n; i++) {
    if (i == SHM_COLL_SPINS_BUSY) shm_coll_settle(a);
    if (i >= SHM_COLL_SPINS_BUSY) shm_coll_relax();
    if (shm_coll_reached(word, want, &seen)) return 0;
  }
  begin = mlfab__monotonic(NULL);
  due = begin + SHM_COLL_FIRST_NS;
  for (;;) {
    sched_yield();
    if (shm_coll_reached(word, want, &seen)) return 0;
    now = mlfab__monotonic(NULL);
    if (now >= due) {
      int code = c->pause(c->user);
      a->ended = code != 0;
      if (code != 0) return code;
      due = now + SHM_COLL_SLICE_NS;
    }
    if (now - begin > SHM_COLL_YIELD_NS) {
      shm_coll_sleep(a, word, want);
      if (shm_coll_reached(word, want, &seen)) return 0;
    }
  }
}

/* Waits until the word has this epoch and at least `want`, or until pause ends the wait. */
static inline int shm_coll_wait(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                                const _Atomic uint64_t *word, uint64_t want) {
  uint64_t seen;
  if (MLFAB__LIKELY(shm_coll_reached(word, want, &seen))) return 0;
  return shm_coll_wait_long(a, c, word, want);
}

/* Withdraws this member's words, before their data may change (I6). */
static void shm_coll_leave(mlfab__shm_coll *a) {
  atomic_store_explicit(&a->own->doors[0].word, 0, memory_order_release);
  atomic_store_explicit(&a->own->doors[1].word, 0, memory_order_release);
  atomic_store_explicit(&a->own->step, 0, memory_order_release);
  shm_coll_fence(a, memory_order_seq_cst);
  a->epoch = 0;
  a->told = false;
}

/* ---- descriptors and mappings ---- */

/* Maps a peer's descriptor once its size is verified and sealed. */
static void *shm_coll_map_of(uint32_t pid, int32_t fd, uint64_t bytes, bool writable) {
  char path[48];
  snprintf(path, sizeof path, "/proc/%u/fd/%d", (unsigned)pid, (int)fd);
  int own = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
  if (own < 0) return NULL;
  void *map = NULL;
  if (mlfab__shm_sealed(own, bytes))
    map = mlfab__shm_map(NULL, bytes, PROT_READ | (writable ? PROT_WRITE : 0), own, 0);
  close(own);
  return map;
}

static void shm_coll_unview(struct shm_coll_view *view) {
  if (view->at != NULL) munmap(view->at, view->bytes);
  *view = (struct shm_coll_view){0};
}

static void shm_coll_unmap(mlfab__shm_coll *a, struct shm_coll_peer *peer) {
  if (peer->segment != NULL && peer->segment != a->own)
    munmap((void *)(uintptr_t)peer->segment, sizeof *peer->segment);
  for (uint32_t i = 0; i < SHM_COLL_MEMORIES; i++) shm_coll_unview(&peer->views[i]);
  peer->segment = NULL;
}

/* ---- this member's memory ---- */

/* Called before a file of this member's memory is closed: nobody maps it any more. */
static void shm_coll_gone(void *user, uint64_t number) {
  mlfab__shm_coll *a = user;
  for (uint32_t i = 0; i < SHM_COLL_MEMORIES; i++) {
    if (a->files[i].number != number) continue;
    a->files[i] = (struct shm_coll_file){0};
    atomic_store_explicit(&a->own->entries[i].generation, 0, memory_order_seq_cst);
    atomic_fetch_add_explicit(&a->own->releases, 1, memory_order_release);
  }
}

static void shm_coll_publish(mlfab__shm_coll *a, uint32_t i, const mlfab__shm_span *span) {
  struct shm_coll_entry *entry = &a->own->entries[i];
  a->files[i] = (struct shm_coll_file){span->number, false};
  entry->fd = span->fd;
  entry->bytes = span->file_bytes;
  if (++a->next_generation == 0) a->next_generation = 1;
  atomic_store_explicit(&entry->generation, a->next_generation, memory_order_release);
  atomic_fetch_add_explicit(&a->own->releases, 1, memory_order_release);
}

/* Finds the place of these bytes, and the entry of their file; makes an entry if it has none. Returns SHM_COLL_MEMORIES
 * if they span files, or all entries are used. */
static uint32_t shm_coll_entry(mlfab__shm_coll *a, const void *at, uint64_t bytes,
                               mlfab__shm_span *span) {
  uint32_t i = SHM_COLL_MEMORIES;
  mlfab__shm_memory_lock(a->memory);
  if (mlfab__shm_memory_look(a->memory, at, bytes, span)) {
    uint32_t unused = SHM_COLL_MEMORIES;
    for (i = 1; i < SHM_COLL_MEMORIES && a->files[i].number != span->number; i++)
      if (a->files[i].number == 0 && unused == SHM_COLL_MEMORIES) unused = i;
    if (i == SHM_COLL_MEMORIES && unused < i) shm_coll_publish(a, i = unused, span);
  }
  mlfab__shm_memory_unlock(a->memory);
  return i;
}

/* Fills entry 0. Returns false if the slots are not shared any more. */
static bool shm_coll_show_slots(mlfab__shm_coll *a) {
  mlfab__shm_span span;
  mlfab__shm_memory_lock(a->memory);
  bool found = mlfab__shm_memory_look(a->memory, a->slots, sizeof *a->slots, &span);
  if (found && a->files[0].number != span.number) shm_coll_publish(a, 0, &span);
  mlfab__shm_memory_unlock(a->memory);
  return found;
}

/* Leaves a failed call. The words of the turn before stay: it succeeded, and others may still be in it. This holds,
 * too, if a call continues without the arena. */
static void shm_coll_break(mlfab__shm_coll *a, uint32_t parity) {
  atomic_store_explicit(&a->own->doors[parity].word, 0, memory_order_release);
  shm_coll_fence(a, memory_order_seq_cst);
  a->epoch = 0;
  a->told = false;
  /* Slow or stopped members may still write to these pages. So this member gets new pages, and they keep the old pages.
   * If memory for that is short, they continue to write here. */
  mlfab__shm_memory_renew(a->memory, a->slots, sizeof *a->slots);
  shm_coll_show_slots(a);
  if (a->lent != NULL) mlfab__shm_memory_renew(a->memory, a->lent, a->lent_bytes);
}

static int shm_coll_create(mlfab__env *env, mlfab__shm_memory *memory, mlfab__shm_coll **shm_coll_p,
                           mlfab__shm_coll_name *name_p) {
  uint64_t nonce;
  mlfab__shm_coll *a = mlfab__alloc(env, sizeof *a);
  if (a == NULL) return MLFAB_ERR_MEMORY;
  a->env = env;
  a->memory = memory;
  a->pid = getpid();
  a->fd = mlfab__shm_file("mlfab-arena", sizeof *a->own, 0);
  void *map = NULL;
  if (a->fd >= 0 && getrandom(&nonce, sizeof nonce, GRND_NONBLOCK) == (ssize_t)sizeof nonce)
    map = mlfab__shm_map(NULL, sizeof *a->own, PROT_READ | PROT_WRITE, a->fd, 0);
  a->slots = map == NULL ? NULL : mlfab__shm_memory_functions()->alloc(memory, sizeof *a->slots, 0);
  if (a->slots == NULL) {
    if (map != NULL) munmap(map, sizeof *a->own);
    if (a->fd >= 0) close(a->fd);
    mlfab__free(env, a, sizeof *a);
    return MLFAB_ERR_IO;
  }
#ifdef F_SEAL_FUTURE_WRITE
  fcntl(a->fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE); /* not on older kernels */
#endif
  a->own = map;
  a->own->magic = SHM_COLL_MAGIC;
  a->own->bytes = sizeof *a->own;
  a->own->nonce = nonce;
  shm_coll_show_slots(a);
  mlfab__shm_memory_watch(memory, shm_coll_gone, a);
  *name_p = (mlfab__shm_coll_name){(uint32_t)getpid(), a->fd, nonce, sizeof *a->own};
  *shm_coll_p = a;
  return 0;
}

static void shm_coll_drop_peers(mlfab__shm_coll *a) {
  for (uint32_t j = 0; j < a->n; j++) shm_coll_unmap(a, &a->peers[j]);
  mlfab__free(a->env, a->peers, a->n * sizeof *a->peers);
  a->peers = NULL;
  a->n = 0;
}

static void shm_coll_destroy(mlfab__shm_coll **shm_coll_p) {
  mlfab__shm_coll *a = *shm_coll_p;
  if (a == NULL) return;
  *shm_coll_p = NULL;
  bool child = a->pid != getpid();
  mlfab__shm_memory_watch(a->memory, NULL, NULL);
  /* In a forked child none of the shared mappings exists, so it cannot write to the others. */
  for (uint32_t j = 0; child && j < a->n; j++) {
    a->peers[j].segment = NULL;
    memset(a->peers[j].views, 0, sizeof a->peers[j].views);
  }
  /* The words stay in memory that others have mapped: a member may still be leaving the last call. */
  shm_coll_drop_peers(a);
  mlfab__shm_memory_functions()->release(a->memory, a->slots, 0);
  if (!child) munmap(a->own, sizeof *a->own);
  close(a->fd);
  mlfab__free(a->env, a, sizeof *a);
}

/* The number of processors that this process may use. */
static uint32_t shm_coll_processors(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1024;
  return (uint32_t)CPU_COUNT(&set);
}

/* Maps a shared memory of a peer, if it is not mapped yet. If its generation has changed at the end, the descriptor may
 * belong to another memory. */
static bool shm_coll_view(struct shm_coll_peer *peer, uint32_t i, uint32_t generation) {
  struct shm_coll_view *view = &peer->views[i];
  const struct shm_coll_entry *entry = &peer->segment->entries[i];
  if (view->generation == generation) return view->at != NULL;
  shm_coll_unview(view);
  view->bytes = *(const volatile uint64_t *)&entry->bytes; /* read once: its owner may change it */
  view->generation = generation;
  view->at = shm_coll_map_of(peer->name.pid, entry->fd, view->bytes, true);
  if (atomic_load(&entry->generation) != generation) shm_coll_unview(view);
  return view->at != NULL;
}

/* Maps a peer's present slots. */
static bool shm_coll_slots_of(struct shm_coll_peer *peer) {
  uint32_t generation =
      atomic_load_explicit(&peer->segment->entries[0].generation, memory_order_acquire);
  if (generation == 0 || !shm_coll_view(peer, 0, generation) ||
      peer->views[0].bytes != sizeof *peer->slots)
    return false;
  peer->slots = (struct shm_coll_slots *)(void *)peer->views[0].at;
  return true;
}

/* The segment and slots of a name: taken from the old peers if mapped, else new mappings. */
static bool shm_coll_meet(mlfab__shm_coll *a, const mlfab__shm_coll_name *name,
                          struct shm_coll_peer *peer) {
  peer->name = *name;
  for (uint32_t j = 0; j < a->n && peer->segment == NULL; j++) {
    struct shm_coll_peer *old = &a->peers[j];
    if (old->segment == NULL || memcmp(&old->name, name, sizeof *name) != 0) continue;
    *peer = *old;
    *old = (struct shm_coll_peer){0};
  }
  if (peer->segment == NULL && name->bytes == sizeof *peer->segment)
    peer->segment = shm_coll_map_of(name->pid, name->fd, name->bytes, false);
  if (peer->segment == NULL || peer->segment->magic != SHM_COLL_MAGIC ||
      peer->segment->bytes != name->bytes || peer->segment->nonce != name->nonce)
    return false;
  return shm_coll_slots_of(peer);
}

/* Called before the first call of an epoch, when all members have joined: a member that failed before may
 * have replaced its slots after the first mapping. */
static bool shm_coll_meet_again(mlfab__shm_coll *a) {
  for (uint32_t j = 0; j < a->n; j++) {
    struct shm_coll_peer *peer = &a->peers[j];
    if (j != a->me && !shm_coll_slots_of(peer)) return false;
  }
  return true;
}

static int shm_coll_join(mlfab__shm_coll *a, const mlfab__shm_coll_name *names, uint32_t n,
                         uint32_t me, uint32_t epoch) {
  bool met = true;
  shm_coll_leave(a);
  if (n > MLFAB__SHM_COLL_MOST || me >= n || !shm_coll_show_slots(a)) return MLFAB_ERR_UNSUPPORTED;
  struct shm_coll_peer *peers = mlfab__alloc_array(a->env, n, sizeof *peers);
  if (peers == NULL) return MLFAB_ERR_MEMORY;
  for (uint32_t j = 0; j < n; j++) {
    if (j == me)
      peers[j].segment = a->own, peers[j].slots = a->slots;
    else
      met &= shm_coll_meet(a, &names[j], &peers[j]);
  }
  shm_coll_drop_peers(a);
  a->peers = peers;
  a->n = n;
  a->me = me;
  if (!met) {
    shm_coll_drop_peers(a);
    return MLFAB_ERR_UNSUPPORTED;
  }
  for (uint32_t j = 0; j < MLFAB__SHM_COLL_MOST; j++) {
    for (uint32_t i = 0; i < SHM_COLL_MEMORIES; i++)
      atomic_store_explicit(&a->own->mapped[j][i], 0, memory_order_relaxed);
  }
  for (uint32_t i = 0; i < SHM_COLL_MEMORIES; i++) a->files[i].known = false;
  a->turn = a->base = a->round = 0;
  a->crowded = n > shm_coll_processors();
  a->epoch = (uint64_t)(epoch % 0xffffffu + 1) << 40;
  atomic_store_explicit(&a->own->step, a->epoch, memory_order_release);
  return 0;
}

/* Have all others mapped the file of this entry? */
static bool shm_coll_known(mlfab__shm_coll *a, uint32_t i) {
  uint32_t generation = atomic_load_explicit(&a->own->entries[i].generation, memory_order_relaxed);
  for (uint32_t j = 0; j < a->n && !a->files[i].known; j++) {
    if (j != a->me && atomic_load_explicit(&a->peers[j].segment->mapped[a->me][i],
                                           memory_order_acquire) != generation)
      return false;
  }
  a->files[i].known = true;
  return true;
}

/* Unmaps memory that its owner has released. */
static void shm_coll_forget(mlfab__shm_coll *a, struct shm_coll_peer *peer) {
  uint32_t releases = atomic_load_explicit(&peer->segment->releases, memory_order_acquire);
  if (releases == peer->releases || peer->segment == a->own) return;
  peer->releases = releases;
  for (uint32_t i = 1; i < SHM_COLL_MEMORIES; i++) {
    /* The peer's offer of this call stays, even if its owner has renewed the pages since. */
    if (peer->offer.direct && i == peer->offer.entry) continue;
    if (peer->views[i].at != NULL &&
        atomic_load_explicit(&peer->segment->entries[i].generation, memory_order_acquire) !=
            peer->views[i].generation)
      shm_coll_unview(&peer->views[i]);
  }
}

/* Maps the shared memory of a peer's vector, so that it need not be copied next time. A failure is not published, and
 * the peer continues to copy. */
static void shm_coll_get_to_know(mlfab__shm_coll *a, uint32_t j) {
  struct shm_coll_peer *peer = &a->peers[j];
  uint32_t i = peer->offer.entry, generation = peer->offer.generation;
  if (generation == 0 || i == 0 || i >= SHM_COLL_MEMORIES || j == a->me) return;
  _Atomic uint32_t *said = &a->own->mapped[j][i];
  if (atomic_load_explicit(said, memory_order_relaxed) == generation) return;
  if (shm_coll_view(peer, i, generation))
    atomic_store_explicit(said, generation, memory_order_release);
}

/* ---- the vector ---- */

struct shm_coll_plan {
  uint32_t width;        /* bytes of an element */
  uint64_t bytes;        /* of the vector */
  uint64_t part, rounds; /* maximum elements of a part in a round */
  bool adds, gathers, small;
  uint32_t parity;                                                    /* of the turn */
  uint64_t first[MLFAB__SHM_COLL_MOST], length[MLFAB__SHM_COLL_MOST]; /* elements by owner */
};

/* The address of element `at`, and how many elements follow it contiguously. */
static uint8_t *shm_coll_at(const mlfab__shm_coll_call *c, uint32_t width, uint64_t at,
                            uint64_t *run_p) {
  const mlfab_vec *v = c->bufs;
  while (at >= v->count) at -= v++->count;
  *run_p = v->count - at;
  return (uint8_t *)v->data + at * width;
}

static void shm_coll_pack(uint8_t *to, const mlfab__shm_coll_call *c, uint32_t width, uint64_t at,
                          uint64_t n) {
  for (uint64_t run; n > 0; at += run, n -= run, to += run * width) {
    const uint8_t *from = shm_coll_at(c, width, at, &run);
    run = mlfab__min(run, n);
    memcpy(to, from, run * width);
  }
}

static void shm_coll_unpack(const mlfab__shm_coll_call *c, uint32_t width, uint64_t at, uint64_t n,
                            const uint8_t *from) {
  for (uint64_t run; n > 0; at += run, n -= run, from += run * width) {
    uint8_t *to = shm_coll_at(c, width, at, &run);
    run = mlfab__min(run, n);
    memcpy(to, from, run * width);
  }
}

/* Combines n elements at `at` of all members; where[j] is member j's data (for this member: the vector).
 * Stores the result in the place of the inputs: of all members, or of this member only. */
static void shm_coll_combine(const mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                             const struct shm_coll_plan *p, uint64_t at, uint64_t n,
                             uint8_t *const *where, bool all) {
  const void *in[MLFAB__SHM_COLL_MOST];
  void *to[MLFAB__SHM_COLL_MOST];
  bool mean = c->op == MLFAB_OP_MEAN;
  for (uint64_t done = 0, run; done < n; done += run) {
    uint32_t others = 1;
    to[0] = shm_coll_at(c, p->width, at + done, &run);
    run = mlfab__min(run, n - done);
    if (mean) run = mlfab__min(run, SHM_COLL_MEAN / p->width);
    for (uint32_t j = 0; j < a->n; j++) {
      in[j] = j == a->me ? to[0] : where[j] + done * p->width;
      if (j != a->me && all) to[others++] = where[j] + done * p->width;
    }
    mlfab__kernel_combine_many_by(c->kernels, c->op, c->dtype, to, mean ? 1 : others, in, a->n, run,
                                  0);
    if (!mean) continue;
    mlfab__kernel_divide(c->dtype, to[0], run, a->n);
    in[0] = to[0];
    if (others > 1) mlfab__kernel_combine_many(c->op, c->dtype, to + 1, others - 1, in, 1, run, 0);
  }
}

static bool shm_coll_finite(const mlfab__shm_coll_call *c, uint32_t width, uint64_t at,
                            uint64_t n) {
  for (uint64_t run; n > 0; at += run, n -= run) {
    const uint8_t *from = shm_coll_at(c, width, at, &run);
    run = mlfab__min(run, n);
    if (!mlfab__kernel_finite(c->dtype, from, run)) return false;
  }
  return true;
}

static void shm_coll_plan_parts(const mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                                struct shm_coll_plan *p) {
  uint64_t lanes = p->width > 0 ? SHM_COLL_LINES / p->width : 1, at = 0;
  uint64_t even = ((c->count + a->n - 1) / a->n + lanes - 1) / lanes * lanes;
  for (uint32_t j = 0; j < a->n; j++) {
    uint64_t length = mlfab__min(even, c->count - at);
    if (c->counts != NULL) length = c->counts[j];
    if (c->kind == MLFAB__SHM_COLL_BROADCAST) length = j == c->root ? c->count : 0;
    p->first[j] = at;
    p->length[j] = length;
    at += length;
  }
}

/* Maximum size of a small call. Sums use limits at which one wait costs more than the additional traffic:
 * measured with two distant processors, and with more members than processors. */
static uint64_t shm_coll_small(const mlfab__shm_coll *a, bool adds) {
  if (!adds) return SHM_COLL_SMALL;
  return a->crowded ? SHM_COLL_SMALL_CROWDED : SHM_COLL_SMALL_SUM / a->n;
}

/* Chooses the size of a round: a member's data of three rounds stays in its L2 cache. Results go to lines that were
 * read a moment ago, so plain stores suffice. */
static void shm_coll_plan(const mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                          struct shm_coll_plan *p) {
  uint64_t most = 0, part = mlfab__max(SHM_COLL_ROUND / a->n, SHM_COLL_PART);
  if (c->kind == MLFAB__SHM_COLL_BROADCAST) part = SHM_COLL_ROUND;
  p->width = c->kind == MLFAB__SHM_COLL_BARRIER ? 0 : mlfab__element_bytes(c->dtype);
  p->bytes = c->count * p->width;
  p->adds = c->kind == MLFAB__SHM_COLL_ALLREDUCE || c->kind == MLFAB__SHM_COLL_REDUCE_SCATTER;
  p->gathers = c->kind != MLFAB__SHM_COLL_REDUCE_SCATTER;
  p->small = p->bytes <= shm_coll_small(a, p->adds);
  p->parity = (uint32_t)(a->turn & 1);
  shm_coll_plan_parts(a, c, p);
  p->part = p->width > 0 ? part / SHM_COLL_LINES * SHM_COLL_LINES / p->width : 1;
  for (uint32_t j = 0; j < a->n; j++) most = mlfab__max(most, p->length[j]);
  p->rounds = (most + p->part - 1) / p->part;
}

/* Member j's part of a round: its first element and its length. */
static uint64_t shm_coll_part(const struct shm_coll_plan *p, uint32_t j, uint64_t round,
                              uint64_t *n_p) {
  uint64_t skip = mlfab__min(round * p->part, p->length[j]);
  *n_p = mlfab__min(p->part, p->length[j] - skip);
  return p->first[j] + skip;
}

/* ---- reductions ---- */

/* The place of member j's data for owner i in a round, and later of i's result for j. */
static uint8_t *shm_coll_where(const mlfab__shm_coll *a, const struct shm_coll_plan *p, uint32_t j,
                               uint32_t i, uint64_t round) {
  const struct shm_coll_peer *peer = &a->peers[j];
  uint64_t n, at = shm_coll_part(p, i, round, &n);
  if (peer->direct != NULL) return peer->direct + at * p->width;
  if (p->small) return peer->slots->small[p->parity] + at * p->width;
  return peer->slots->in[(a->round + round) % SHM_COLL_IN_DEPTH] +
         (i < j ? i : i - 1) * p->part * p->width;
}

/* Step (1). */
static void shm_coll_put(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                         const struct shm_coll_plan *p, uint64_t round) {
  if (round >= p->rounds) return;
  for (uint32_t i = 0; i < a->n; i++) {
    uint64_t n, at = shm_coll_part(p, i, round, &n);
    if (i != a->me) shm_coll_pack(shm_coll_where(a, p, a->me, i, round), c, p->width, at, n);
  }
}

/* Step (2). */
static void shm_coll_make(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                          const struct shm_coll_plan *p, uint64_t round) {
  uint8_t *where[MLFAB__SHM_COLL_MOST];
  uint64_t n, at = shm_coll_part(p, a->me, round, &n);
  if (round >= p->rounds) return;
  for (uint32_t j = 0; j < a->n; j++)
    where[j] = j == a->me ? NULL : shm_coll_where(a, p, j, a->me, round);
  shm_coll_combine(a, c, p, at, n, where, p->gathers);
}

/* Step (3). */
static void shm_coll_take(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                          const struct shm_coll_plan *p, uint64_t round) {
  if (!p->gathers) return;
  for (uint32_t i = 0; i < a->n; i++) {
    uint64_t n, at = shm_coll_part(p, i, round, &n);
    if (i != a->me) shm_coll_unpack(c, p->width, at, n, shm_coll_where(a, p, a->me, i, round));
  }
}

/* Waits until the steps of all others have reached this. */
static int shm_coll_wait_all(mlfab__shm_coll *a, const mlfab__shm_coll_call *c, uint64_t step) {
  int code = 0;
  for (uint32_t i = 1; i < a->n && code == 0; i++)
    code =
        shm_coll_wait(a, c, &a->peers[(a->me + i) % a->n].segment->step, a->epoch + a->base + step);
  return code;
}

static void shm_coll_step(mlfab__shm_coll *a, uint64_t step) {
  shm_coll_tell(a, &a->own->step, a->epoch + a->base + step);
}

/* The reduction after the doors, which announce that round 0 is in place. */
static int shm_coll_reduce(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                           const struct shm_coll_plan *p) {
  bool direct = a->peers[a->me].direct != NULL;
  for (uint64_t i = 1; i <= p->rounds + 1; i++) {
    int code = i > 1 ? shm_coll_wait_all(a, c, i - 1) : 0;
    if (code != 0) return code;
    if (p->bytes > SHM_COLL_SHORT) shm_coll_settle(a);
    if (direct && i > p->rounds) break;
    if (!direct) shm_coll_put(a, c, p, i);
    shm_coll_make(a, c, p, i - 1);
    if (!direct && i > 1) shm_coll_take(a, c, p, i - 2);
    if (i <= p->rounds) shm_coll_step(a, i);
  }
  return 0;
}

/* Makes a small call without shared vectors: every member adds all elements, and waits only once. */
static void shm_coll_reduce_small(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                                  const struct shm_coll_plan *p) {
  uint64_t at = p->gathers ? 0 : p->first[a->me], n = p->gathers ? c->count : p->length[a->me];
  uint8_t *where[MLFAB__SHM_COLL_MOST];
  for (uint32_t j = 0; j < a->n; j++)
    where[j] = a->peers[j].slots->small[p->parity] + at * p->width;
  shm_coll_combine(a, c, p, at, n, where, false);
}

/* ---- allgather, broadcast ---- */

static void shm_coll_offer_part(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                                const struct shm_coll_plan *p, uint64_t round) {
  uint64_t n, at = shm_coll_part(p, a->me, round, &n);
  if (a->peers[a->me].direct == NULL)
    shm_coll_pack(a->peers[a->me].slots->out[(a->round + round) % SHM_COLL_OUT_DEPTH], c, p->width,
                  at, n);
}

/* The doors announce that round 0 is in place; step i + 1 announces round i. */
static int shm_coll_spread(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                           const struct shm_coll_plan *p) {
  int code = 0;
  for (uint64_t i = 1; i <= p->rounds && code == 0; i++) {
    if (i < p->rounds) {
      shm_coll_offer_part(a, c, p, i);
      shm_coll_step(a, i + 1);
      shm_coll_settle(a);
    }
    for (uint32_t k = 1; k < a->n && code == 0; k++) {
      uint32_t j = (a->me + k) % a->n;
      const struct shm_coll_peer *peer = &a->peers[j];
      uint64_t n, at = shm_coll_part(p, j, i - 1, &n);
      if (i > 1) code = shm_coll_wait(a, c, &peer->segment->step, a->epoch + a->base + i);
      if (code == 0)
        shm_coll_unpack(c, p->width, at, n,
                        peer->direct != NULL
                            ? peer->direct + at * p->width
                            : peer->slots->out[(a->round + i - 1) % SHM_COLL_OUT_DEPTH]);
    }
  }
  if (code != 0) return code;
  shm_coll_step(a, p->rounds + 1);
  return a->peers[a->me].direct != NULL ? shm_coll_wait_all(a, c, p->rounds + 1) : 0;
}

static void shm_coll_spread_small(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                                  const struct shm_coll_plan *p) {
  for (uint32_t j = 0; j < a->n; j++) {
    if (j != a->me)
      shm_coll_unpack(c, p->width, p->first[j], p->length[j], a->peers[j].slots->small[p->parity]);
  }
}

/* ---- a call ---- */

/* (I7): checks that the doors with which the call began are unchanged, so that nothing read since was
 * overwritten. If not, others have failed in this call, and pause returns the reason. */
static int shm_coll_stands(mlfab__shm_coll *a, const mlfab__shm_coll_call *c, uint64_t word) {
  bool stands = true;
  shm_coll_fence(a, memory_order_acquire);
  for (uint32_t j = 0; j < a->n; j++)
    stands &= atomic_load_explicit(&a->peers[j].segment->doors[a->turn & 1].word,
                                   memory_order_relaxed) == word;
  if (MLFAB__LIKELY(stands)) return 0;
  a->ended = true;
  for (int code;; sched_yield()) {
    if ((code = c->pause(c->user)) != 0) return code;
  }
}

/* The verdict over all inputs, the same on all members: 0, MISMATCH or NOT_FINITE. */
static int shm_coll_judge(const mlfab__shm_coll *a, uint32_t *culprit_p) {
  uint32_t right = 0, most = 0, refused = a->n;
  bool same = true;
  for (uint32_t j = a->n; j-- > 0;) {
    same &= a->peers[j].offer.signature == a->peers[0].offer.signature;
    if (a->peers[j].offer.refused) refused = j;
  }
  *culprit_p = refused;
  if (MLFAB__LIKELY(same)) return refused < a->n ? MLFAB_ERR_NOT_FINITE : 0;
  for (uint32_t j = 0; j < a->n; j++) {
    uint32_t count = 0;
    for (uint32_t k = 0; k < a->n; k++)
      count += a->peers[k].offer.signature == a->peers[j].offer.signature;
    if (count > most) most = count, right = j;
  }
  *culprit_p = 0;
  while (a->peers[*culprit_p].offer.signature == a->peers[right].offer.signature) ++*culprit_p;
  return MLFAB_ERR_MISMATCH;
}

/* Publishes this member's door and waits for all. */
static int shm_coll_gather(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                           const struct shm_coll_plan *p, uint64_t word, uint32_t *culprit_p) {
  a->own->doors[p->parity].offer = a->peers[a->me].offer;
  shm_coll_tell(a, &a->own->doors[p->parity].word, word);
  for (uint32_t i = 1; i < a->n; i++) {
    struct shm_coll_peer *peer = &a->peers[(a->me + i) % a->n];
    int code = shm_coll_wait(a, c, &peer->segment->doors[p->parity].word, word);
    if (code != 0) return code;
    peer->offer = peer->segment->doors[p->parity].offer;
  }
  int code = shm_coll_stands(a, c, word);
  return code != 0 ? code : shm_coll_judge(a, culprit_p);
}

/* Finds the vectors in shared memory. FRAME when a peer's offer is invalid. */
static int shm_coll_place(mlfab__shm_coll *a, const struct shm_coll_plan *p, uint32_t *culprit_p) {
  for (uint32_t j = 0; j < a->n; j++) {
    struct shm_coll_peer *peer = &a->peers[j];
    const struct shm_coll_offer *offer = &peer->offer;
    if (j == a->me) continue;
    peer->direct = NULL;
    shm_coll_forget(a, peer);
    shm_coll_get_to_know(a, j);
    if (!offer->direct) continue;
    *culprit_p = j;
    if (offer->entry == 0 || offer->entry >= SHM_COLL_MEMORIES) return MLFAB_ERR_FRAME;
    const struct shm_coll_view *view = &peer->views[offer->entry];
    if (view->at == NULL || view->generation != offer->generation || offer->offset > view->bytes ||
        p->bytes > view->bytes - offer->offset || offer->offset % 8 != 0)
      return MLFAB_ERR_FRAME;
    peer->direct = view->at + offer->offset;
  }
  return 0;
}

/* Fills this member's own offer. */
static void shm_coll_own_offer(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                               const struct shm_coll_plan *p) {
  struct shm_coll_peer *me = &a->peers[a->me];
  bool useful = c->nbufs == 1 && (p->adds || !p->small);
  mlfab__shm_span span;
  me->offer = (struct shm_coll_offer){.signature = c->signature};
  me->direct = NULL;
  a->lent = NULL;
  if (c->refuse && p->adds)
    me->offer.refused = !shm_coll_finite(c, p->width, 0, c->count);
  else if (c->refuse)
    me->offer.refused = !shm_coll_finite(c, p->width, p->first[a->me], p->length[a->me]);
  uint32_t i = useful ? shm_coll_entry(a, c->bufs[0].data, p->bytes, &span) : SHM_COLL_MEMORIES;
  if (i == SHM_COLL_MEMORIES) return;
  me->offer.entry = i;
  me->offer.generation = atomic_load_explicit(&a->own->entries[i].generation, memory_order_relaxed);
  if (me->offer.generation == 0) return; /* renewed by another thread */
  me->offer.offset = span.offset;
  /* Pages are renewed when the call fails: they must hold no other data of the caller. */
  if (!span.alone || !shm_coll_known(a, i)) return;
  me->offer.direct = 1;
  me->direct = a->lent = c->bufs[0].data;
  a->lent_bytes = p->bytes;
}

/* Copies the data that the others need first. */
static void shm_coll_prepare(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                             const struct shm_coll_plan *p) {
  uint8_t *small = a->peers[a->me].slots->small[p->parity];
  if (a->peers[a->me].direct != NULL || a->n == 1) return;
  if (p->small && p->adds)
    shm_coll_pack(small, c, p->width, 0, c->count);
  else if (p->small)
    shm_coll_pack(small, c, p->width, p->first[a->me], p->length[a->me]);
  else if (p->adds)
    shm_coll_put(a, c, p, 0);
  else
    shm_coll_offer_part(a, c, p, 0);
}

/* The part of a call after all doors were seen. */
static int shm_coll_exchange(mlfab__shm_coll *a, const mlfab__shm_coll_call *c,
                             struct shm_coll_plan *p) {
  uint32_t direct = 0;
  for (uint32_t j = 0; j < a->n; j++) direct += a->peers[j].direct != NULL;
  if (p->bytes > SHM_COLL_SHORT) shm_coll_settle(a);
  if (p->small && direct == 0) {
    if (p->adds)
      shm_coll_reduce_small(a, c, p);
    else
      shm_coll_spread_small(a, c, p);
    return 0;
  }
  if (p->adds && (p->small || direct == a->n)) { /* in one round */
    p->part = c->count;
    p->rounds = 1;
  }
  int code = p->adds ? shm_coll_reduce(a, c, p) : shm_coll_spread(a, c, p);
  a->base += p->rounds + 2;
  a->round += p->rounds;
  return code;
}

static int shm_coll_run(mlfab__shm_coll *a, const mlfab__shm_coll_call *c, uint32_t *culprit_p) {
  struct shm_coll_plan plan;
  if (a->epoch == 0 || (a->turn == 0 && !shm_coll_meet_again(a))) return MLFAB_ERR_STATE;
  shm_coll_prefetch(&a->own->doors[a->turn & 1]);
  shm_coll_prefetch(&a->own->step);
  uint64_t word = a->epoch + ((c->number + 1) & SHM_COLL_LOW);
  a->ended = false;
  shm_coll_plan(a, c, &plan);
  shm_coll_own_offer(a, c, &plan);
  shm_coll_prepare(a, c, &plan);
  int code = shm_coll_gather(a, c, &plan, word, culprit_p);
  bool judged = code != 0 && !a->ended;
  if (code == 0) code = shm_coll_place(a, &plan, culprit_p);
  if (code == 0 && a->n > 1) code = shm_coll_exchange(a, c, &plan);
  if (!judged && !a->ended) {
    /* takes precedence over a result from overwritten data */
    int why = shm_coll_stands(a, c, word);
    if (why != 0) code = why;
  }
  shm_coll_settle(a);
  a->turn++;
  /* Members that have not seen all doors yet reach the same verdict: no data is read or written after it. */
  if (judged)
    a->epoch = 0;
  else if (code != 0)
    shm_coll_break(a, plan.parity);
  return code;
}

MLFAB__INTERNAL const mlfab__shm_coll_table *mlfab__shm_coll_functions(void) {
  static const mlfab__shm_coll_table table = {shm_coll_create, shm_coll_destroy, shm_coll_join,
                                              shm_coll_run};
  return &table;
}

#endif
