/* shm_memory.c - memory of this process that other processes of the host may map. See core/base/shm_memory.h.
 *
 * Pages of a guarded area are renewed into one file for the whole area, at the same offsets, until some pages are
 * renewed again. So an area has few files, however many stretches are renewed.
 *
 * One lock guards the lists; areas come and go only with the context's lock, too. Renewing maps a new file elsewhere,
 * copies, and moves the mapping over the old pages by one call (mremap). So another thread that reads meanwhile finds
 * the old or the new pages. Renewing takes no memory of the env, whose functions need the context's lock. */
#include "shm_memory.h"

#if !MLFAB_WITH_SHM

MLFAB__INTERNAL const mlfab__shm_memory_table *mlfab__shm_memory_functions(void) { return NULL; }

#else

#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SHM_MEMORY_PIECES = 2 * MLFAB__SHM_FILES };

struct shm_memory_file {
  uint64_t number, bytes;
  uint32_t pieces; /* that belong to it; 0: unused */
  int fd;
};

struct shm_memory_piece {
  struct shm_memory_file *file; /* NULL: unused */
  uint8_t *at;
  uint64_t bytes, offset; /* offset in the file */
};

struct shm_memory_area {
  struct shm_memory_area *next;
  uint8_t *at;
  uint64_t asked, bytes; /* bytes: whole pages */
  bool guarded;
  struct shm_memory_file *fresh; /* guarded: pages are renewed into it; or NULL */
  uint64_t *taken;               /* bits: the pages of `fresh` that were used */
};

struct shm_memory_map {
  struct shm_memory_map *next;
  const uint8_t *at;
  uint64_t bytes, number;
  uint32_t holds;
};

struct mlfab__shm_memory {
  mlfab__env *env;
  pid_t pid;
  pthread_mutex_t lock;
  struct shm_memory_area *areas;
  struct shm_memory_map *maps;
  uint64_t page, last_number;
  uint32_t files, npieces; /* slots that have been used */
  struct shm_memory_file file[MLFAB__SHM_FILES];
  struct shm_memory_piece piece[SHM_MEMORY_PIECES];
  mlfab__shm_gone_fn gone;
  void *user;
};

MLFAB__INTERNAL void mlfab__shm_memory_lock(mlfab__shm_memory *m) { pthread_mutex_lock(&m->lock); }

MLFAB__INTERNAL void mlfab__shm_memory_unlock(mlfab__shm_memory *m) {
  pthread_mutex_unlock(&m->lock);
}

/* ---- files and pieces, with the lock ---- */

/* Takes a piece, or the area's hold, from the file. */
static void shm_memory_let_go(mlfab__shm_memory *m, struct shm_memory_file *file) {
  if (--file->pieces > 0) return;
  if (m->gone != NULL) m->gone(m->user, file->number);
  close(file->fd);
}

static void shm_memory_leave(mlfab__shm_memory *m, struct shm_memory_piece *piece) {
  struct shm_memory_file *file = piece->file;
  piece->file = NULL;
  shm_memory_let_go(m, file);
}

static struct shm_memory_piece *shm_memory_unused(mlfab__shm_memory *m) {
  uint32_t i = 0;
  while (i < m->npieces && m->piece[i].file != NULL) i++;
  if (i == SHM_MEMORY_PIECES) return NULL;
  if (i == m->npieces) m->npieces++;
  return &m->piece[i];
}

/* Takes over a file. NULL: too many files or pieces. */
static struct shm_memory_file *shm_memory_enter(mlfab__shm_memory *m, int fd, uint64_t bytes) {
  uint32_t i = 0;
  while (i < m->files && m->file[i].pieces > 0) i++;
  if (i == MLFAB__SHM_FILES || shm_memory_unused(m) == NULL) return NULL;
  if (i == m->files) m->files++;
  m->file[i] = (struct shm_memory_file){++m->last_number, bytes, 0, fd};
  return &m->file[i];
}

/* Gives these addresses to the file. There is an unused piece. Neighbours in memory and in the file become one piece
 * with it. */
static void shm_memory_join(mlfab__shm_memory *m, struct shm_memory_file *file, uint8_t *at,
                            uint64_t bytes, uint64_t offset) {
  for (uint32_t i = 0; i < m->npieces; i++) {
    struct shm_memory_piece *piece = &m->piece[i];
    if (piece->file != file) continue;
    bool before = piece->at + piece->bytes == at && piece->offset + piece->bytes == offset;
    bool behind = at + bytes == piece->at && offset + bytes == piece->offset;
    if (!before && !behind) continue;
    if (before) at = piece->at, offset = piece->offset;
    bytes += piece->bytes;
    piece->file = NULL;
    file->pieces--;
  }
  *shm_memory_unused(m) = (struct shm_memory_piece){file, at, bytes, offset};
  file->pieces++;
}

/* Takes [from, from + bytes) out of all pieces. A piece with a part on both sides is split; if there are too many
 * pieces, its end becomes private. */
static void shm_memory_cut(mlfab__shm_memory *m, uint8_t *from, uint64_t bytes) {
  uint8_t *to = from + bytes;
  for (uint32_t i = 0; i < m->npieces; i++) {
    struct shm_memory_piece *piece = &m->piece[i], was = *piece;
    if (was.file == NULL || was.at >= to || was.at + was.bytes <= from) continue;
    uint64_t before = was.at < from ? (uint64_t)(from - was.at) : 0;
    uint64_t after = was.at + was.bytes > to ? (uint64_t)(was.at + was.bytes - to) : 0;
    if (after > 0 && shm_memory_unused(m) != NULL)
      shm_memory_join(m, was.file, to, after, was.offset + was.bytes - after);
    if (before > 0)
      piece->bytes = before;
    else
      shm_memory_leave(m, piece);
  }
}

static struct shm_memory_area *shm_memory_area_of(const mlfab__shm_memory *m, const uint8_t *at,
                                                  uint64_t bytes) {
  for (struct shm_memory_area *area = m->areas; area != NULL; area = area->next) {
    uintptr_t offset = (uintptr_t)at - (uintptr_t)area->at;
    if (offset < area->bytes && bytes <= area->bytes - offset) return area;
  }
  return NULL;
}

static const struct shm_memory_piece *shm_memory_piece_of(const mlfab__shm_memory *m,
                                                          const uint8_t *at, uint64_t bytes) {
  for (uint32_t i = 0; i < m->npieces; i++) {
    const struct shm_memory_piece *piece = &m->piece[i];
    uintptr_t offset = (uintptr_t)at - (uintptr_t)piece->at;
    if (piece->file != NULL && offset < piece->bytes && bytes <= piece->bytes - offset)
      return piece;
  }
  return NULL;
}

/* ---- for the users of shared memory ---- */

MLFAB__INTERNAL int mlfab__shm_memory_look(const mlfab__shm_memory *m, const void *bytes_at,
                                           uint64_t bytes, mlfab__shm_span *span) {
  const uint8_t *at = bytes_at;
  const struct shm_memory_piece *piece = shm_memory_piece_of(m, at, bytes);
  if (piece == NULL) return 0;
  const struct shm_memory_area *area = shm_memory_area_of(m, at, bytes);
  uint64_t begin = (uint64_t)(at - area->at), end = begin + bytes;
  *span = (mlfab__shm_span){piece->file->number, piece->offset + (uint64_t)(at - piece->at),
                            piece->file->bytes, piece->file->fd, 0};
  span->alone =
      area->guarded ||
      (begin % m->page == 0 &&
       (end % m->page == 0 || (end <= area->asked && area->asked - end < MLFAB__SHM_LINE)));
  return 1;
}

MLFAB__INTERNAL int mlfab__shm_memory_find(mlfab__shm_memory *m, const void *at, uint64_t bytes,
                                           mlfab__shm_span *span) {
  pthread_mutex_lock(&m->lock);
  int found = mlfab__shm_memory_look(m, at, bytes, span);
  pthread_mutex_unlock(&m->lock);
  return found;
}

static uint64_t shm_memory_file_of(mlfab__shm_memory *m, const void *at, uint64_t *bytes_p) {
  uint64_t number = 0;
  pthread_mutex_lock(&m->lock);
  const struct shm_memory_piece *piece = shm_memory_piece_of(m, at, 1);
  if (piece != NULL) {
    number = piece->file->number;
    *bytes_p = piece->bytes - (uint64_t)((const uint8_t *)at - piece->at);
  }
  pthread_mutex_unlock(&m->lock);
  return number;
}

/* Makes a file of `bytes` for pages to renew, or private pages if no file can be made. NULL: out of memory. */
static uint8_t *shm_memory_fresh(uint64_t bytes, int *fd_p) {
  int fd = mlfab__shm_file("mlfab-memory", bytes, 0);
  void *map = fd < 0 ? NULL : mlfab__shm_map(NULL, bytes, PROT_READ | PROT_WRITE, fd, 0);
  if (map == NULL) {
    if (fd >= 0) close(fd);
    fd = -1;
    map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  *fd_p = fd;
  return map == MAP_FAILED ? NULL : map;
}

/* Size in bytes of a bitmap of pages. */
static size_t shm_memory_bits(const mlfab__shm_memory *m, uint64_t bytes) {
  return (size_t)((bytes / m->page + 63) / 64 * 8);
}

/* Gives up the file that an area's pages were renewed into. With the lock. */
static void shm_memory_stale(mlfab__shm_memory *m, struct shm_memory_area *area) {
  if (area->fresh != NULL) shm_memory_let_go(m, area->fresh);
  area->fresh = NULL;
}

/* Were any of these pages of the area's fresh file used? `take`: they are now. */
static bool shm_memory_taken(const mlfab__shm_memory *m, const struct shm_memory_area *area,
                             uint64_t offset, uint64_t bytes, bool take) {
  bool taken = false;
  for (uint64_t p = offset / m->page; p < (offset + bytes) / m->page; p++) {
    taken |= area->taken[p / 64] >> p % 64 & 1;
    if (take) area->taken[p / 64] |= UINT64_C(1) << p % 64;
  }
  return taken;
}

/* As shm_memory_replace, for a guarded area: the context's lock is held by all code that writes to it or renews it. */
static bool shm_memory_refresh(mlfab__shm_memory *m, struct shm_memory_area *area, uint8_t *from,
                               uint64_t bytes) {
  uint64_t offset = (uint64_t)(from - area->at);
  pthread_mutex_lock(&m->lock);
  if (area->fresh != NULL && shm_memory_taken(m, area, offset, bytes, false))
    shm_memory_stale(m, area);
  if (area->fresh == NULL) {
    int fd = mlfab__shm_file("mlfab-memory", area->bytes, 0);
    area->fresh = fd < 0 ? NULL : shm_memory_enter(m, fd, area->bytes);
    if (fd >= 0 && area->fresh == NULL) close(fd);
    if (area->fresh != NULL) area->fresh->pieces = 1; /* the area's hold */
    memset(area->taken, 0, shm_memory_bits(m, area->bytes));
  }
  int fd = area->fresh == NULL ? -1 : area->fresh->fd;
  pthread_mutex_unlock(&m->lock);
  uint8_t *map = fd < 0 ? NULL : mlfab__shm_map(NULL, bytes, PROT_READ | PROT_WRITE, fd, offset);
  if (map == NULL) return false;
  memcpy(map, from, bytes);
  pthread_mutex_lock(&m->lock);
  bool done = mremap(map, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, from) != MAP_FAILED;
  if (done) {
    shm_memory_cut(m, from, bytes);
    shm_memory_taken(m, area, offset, bytes, true);
    if (shm_memory_unused(m) != NULL) shm_memory_join(m, area->fresh, from, bytes, offset);
  }
  pthread_mutex_unlock(&m->lock);
  if (!done) munmap(map, bytes);
  return done;
}

/* [from, from + bytes) are whole pages of an area. Copies without the lock, which others need for every send. */
static int shm_memory_replace(mlfab__shm_memory *m, uint8_t *from, uint64_t bytes) {
  pthread_mutex_lock(&m->lock);
  struct shm_memory_area *area = shm_memory_area_of(m, from, bytes);
  pthread_mutex_unlock(&m->lock);
  if (area != NULL && area->guarded && shm_memory_refresh(m, area, from, bytes)) return 1;
  int fd;
  uint8_t *map = shm_memory_fresh(bytes, &fd);
  if (map == NULL) return 0;
  memcpy(map, from, bytes);
  pthread_mutex_lock(&m->lock);
  bool done = mremap(map, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, from) != MAP_FAILED;
  if (done) shm_memory_cut(m, from, bytes);
  struct shm_memory_file *file = done && fd >= 0 ? shm_memory_enter(m, fd, bytes) : NULL;
  if (file != NULL)
    shm_memory_join(m, file, from, bytes, 0);
  else if (fd >= 0)
    close(fd); /* the pages are mapped here only */
  pthread_mutex_unlock(&m->lock);
  if (!done) munmap(map, bytes);
  return done;
}

/* The first pages of [from, from + bytes) that are in one area. 0: there are none. */
static int shm_memory_first(mlfab__shm_memory *m, const uint8_t *from, uint64_t bytes,
                            uint8_t **at_p, uint64_t *bytes_p) {
  const struct shm_memory_area *first = NULL;
  pthread_mutex_lock(&m->lock);
  for (const struct shm_memory_area *area = m->areas; area != NULL; area = area->next) {
    bool meets = area->at < from + bytes && from < area->at + area->bytes;
    if (meets && (first == NULL || area->at < first->at)) first = area;
  }
  if (first != NULL) {
    uint64_t begin = from > first->at ? (uint64_t)(from - first->at) / m->page * m->page : 0;
    uint64_t end = mlfab__min((uint64_t)(from + bytes - first->at), first->bytes);
    *at_p = first->at + begin;
    *bytes_p = (end + m->page - 1) / m->page * m->page - begin;
  }
  pthread_mutex_unlock(&m->lock);
  return first != NULL;
}

MLFAB__INTERNAL int mlfab__shm_memory_renew(mlfab__shm_memory *m, const void *bytes_at,
                                            uint64_t bytes) {
  const uint8_t *from = bytes_at, *to = from + bytes;
  uint8_t *at;
  int done = 1;
  /* Neighbouring areas may be lent one after the other. */
  while (from < to && shm_memory_first(m, from, (uint64_t)(to - from), &at, &bytes)) {
    done &= shm_memory_replace(m, at, bytes);
    from = at + bytes;
  }
  return done;
}

MLFAB__INTERNAL int mlfab__shm_memory_has(mlfab__shm_memory *m, uint64_t number) {
  int found = 0;
  pthread_mutex_lock(&m->lock);
  for (uint32_t i = 0; i < m->files; i++)
    found |= m->file[i].pieces > 0 && m->file[i].number == number;
  pthread_mutex_unlock(&m->lock);
  return found;
}

MLFAB__INTERNAL void mlfab__shm_memory_watch(mlfab__shm_memory *m, mlfab__shm_gone_fn gone,
                                             void *user) {
  pthread_mutex_lock(&m->lock);
  m->gone = gone;
  m->user = user;
  pthread_mutex_unlock(&m->lock);
}

/* ---- files of other processes ---- */

MLFAB__INTERNAL const uint8_t *mlfab__shm_memory_map(mlfab__shm_memory *m, int fd, uint64_t bytes,
                                                     uint64_t number) {
  struct shm_memory_map *map = m == NULL ? NULL : mlfab__alloc(m->env, sizeof *map);
  if (m != NULL && map == NULL) return NULL;
  const uint8_t *at = mlfab__shm_map(NULL, bytes, PROT_READ, fd, 0);
  if (at == NULL && map != NULL) mlfab__free(m->env, map, sizeof *map);
  if (at == NULL || map == NULL) return at;
  pthread_mutex_lock(&m->lock);
  *map = (struct shm_memory_map){m->maps, at, bytes, number, 1};
  m->maps = map;
  pthread_mutex_unlock(&m->lock);
  return at;
}

static int shm_memory_hold(mlfab__shm_memory *m, const void *bytes_at, uint64_t bytes,
                           uint64_t number, const uint8_t **from_p, uint64_t *bytes_p) {
  const uint8_t *at = bytes_at;
  mlfab__shm_span span;
  int found = 0;
  pthread_mutex_lock(&m->lock);
  for (struct shm_memory_map *map = m->maps; map != NULL && !found; map = map->next) {
    uintptr_t offset = (uintptr_t)at - (uintptr_t)map->at;
    if (map->number != number || offset >= map->bytes || bytes > map->bytes - offset) continue;
    map->holds++;
    *from_p = map->at;
    *bytes_p = map->bytes;
    found = 1;
  }
  if (!found && mlfab__shm_memory_look(m, at, bytes, &span) && span.number == number) {
    const struct shm_memory_area *area = shm_memory_area_of(m, at, bytes);
    *from_p = area->at;
    *bytes_p = area->bytes;
    found = 1;
  }
  pthread_mutex_unlock(&m->lock);
  return found;
}

static void shm_memory_drop(mlfab__shm_memory *m, const void *from) {
  bool here = m->pid == getpid(); /* as in shm_memory_release */
  if (here) pthread_mutex_lock(&m->lock);
  struct shm_memory_map **link = &m->maps;
  while (*link != NULL && (*link)->at != from) link = &(*link)->next;
  struct shm_memory_map *map = *link;
  if (map != NULL && --map->holds == 0) {
    *link = map->next;
    if (here) munmap((void *)(uintptr_t)map->at, map->bytes);
    mlfab__free(m->env, map, sizeof *map);
  }
  if (here) pthread_mutex_unlock(&m->lock);
}

MLFAB__INTERNAL void mlfab__shm_memory_unmap(mlfab__shm_memory *m, const uint8_t *at,
                                             uint64_t bytes) {
  if (m != NULL)
    shm_memory_drop(m, at);
  else
    munmap((void *)(uintptr_t)at, bytes);
}

/* ---- for the context ---- */

static mlfab__shm_memory *shm_memory_create(mlfab__env *env) {
  mlfab__shm_memory *m = mlfab__alloc(env, sizeof *m);
  if (m == NULL) return NULL;
  pthread_mutex_init(&m->lock, NULL);
  m->env = env;
  m->pid = getpid();
  m->page = (uint64_t)sysconf(_SC_PAGESIZE);
  return m;
}

static void *shm_memory_alloc(mlfab__shm_memory *m, uint64_t asked, int guarded) {
  if (asked == 0 || asked > SIZE_MAX / 2) return NULL;
  uint64_t bytes = (asked + m->page - 1) / m->page * m->page;
  struct shm_memory_area *area = mlfab__alloc(m->env, sizeof *area);
  uint64_t *taken =
      area != NULL && guarded ? mlfab__alloc(m->env, shm_memory_bits(m, bytes)) : NULL;
  int fd =
      area == NULL || (guarded && taken == NULL) ? -1 : mlfab__shm_file("mlfab-memory", bytes, 0);
  uint8_t *map = fd < 0 ? NULL : mlfab__shm_map(NULL, bytes, PROT_READ | PROT_WRITE, fd, 0);
  pthread_mutex_lock(&m->lock);
  struct shm_memory_file *file = map == NULL ? NULL : shm_memory_enter(m, fd, bytes);
  if (file != NULL) {
    *area = (struct shm_memory_area){m->areas, map, asked, bytes, guarded != 0, NULL, taken};
    m->areas = area;
    shm_memory_join(m, file, map, bytes, 0);
  }
  pthread_mutex_unlock(&m->lock);
  if (file != NULL) {
    madvise(map, bytes, MADV_HUGEPAGE); /* a hint */
    return map;
  }
  if (map != NULL) munmap(map, bytes);
  if (fd >= 0) close(fd);
  if (taken != NULL) mlfab__free(m->env, taken, shm_memory_bits(m, bytes));
  if (area != NULL) mlfab__free(m->env, area, sizeof *area);
  return NULL;
}

/* In a forked child the mappings do not exist, and a thread of the parent may hold the lock. */
static void shm_memory_release(mlfab__shm_memory *m, void *at, int emptied) {
  bool here = m->pid == getpid();
  if (here) pthread_mutex_lock(&m->lock);
  struct shm_memory_area **in = &m->areas;
  while (*in != NULL && (*in)->at != at) in = &(*in)->next;
  struct shm_memory_area *area = *in;
  assert(area != NULL);
  *in = area->next;
  if (here && emptied) madvise(area->at, area->bytes, MADV_REMOVE);
  shm_memory_cut(m, area->at, area->bytes);
  shm_memory_stale(m, area);
  if (here) munmap(area->at, area->bytes);
  if (area->taken != NULL) mlfab__free(m->env, area->taken, shm_memory_bits(m, area->bytes));
  mlfab__free(m->env, area, sizeof *area);
  if (here) pthread_mutex_unlock(&m->lock);
}

static void shm_memory_destroy(mlfab__shm_memory **memory_p) {
  mlfab__shm_memory *m = *memory_p;
  if (m == NULL) return;
  *memory_p = NULL;
  while (m->areas != NULL) shm_memory_release(m, m->areas->at, 0);
  while (m->maps != NULL) {
    m->maps->holds = 1;
    shm_memory_drop(m, m->maps->at);
  }
  pthread_mutex_destroy(&m->lock);
  mlfab__free(m->env, m, sizeof *m);
}

MLFAB__INTERNAL const mlfab__shm_memory_table *mlfab__shm_memory_functions(void) {
  static const mlfab__shm_memory_table table = {
      shm_memory_create,  shm_memory_destroy,      shm_memory_alloc, shm_memory_release,
      shm_memory_file_of, mlfab__shm_memory_renew, shm_memory_hold,  shm_memory_drop};
  return &table;
}

#endif
