/* shm_lend.c - the shared-memory transport: references to memory that is lent, and the pool for small rings. See shm.h, and
 * shm.c for records, rings and life lines.
 *
 * Size of a ring: 24 MiB by the number of neighbours, at least 128 KiB (shm_share). The connector tells its size; the
 * acceptor answers with the smaller of both sizes, which holds. The number of neighbours is the number of nodes in the
 * options, or of present links, if this is larger. In a ring of less than 2.5 MiB, a record takes at most a fourth. The
 * bulk of a larger frame is copied into the sender's pool, and the record refers to the copy. The pool is one file for
 * all links of a node; its pages exist after their first use. A link may have 512 KiB in it, or two frames, so a peer
 * that stops reading holds up no other. If a link ends while its peer may still read, its units are lost until the
 * others are free, too: then the next pool begins.
 *
 * References. A bulk that the caller lends (with a token) is lent on to the peer, if its pages hold nothing else
 * (shm_memory.h). The loan lasts until its frame is released: tail has passed its record (`lent`, in the order of
 * sending). The peer gets a file before the first record that refers to it, so it reads the life line when it finds an
 * unknown number. Each end has SHM_FILES places for the other's files. A place is used again when its file is gone and
 * no part of it is lent. If the caller gets the bytes back before their release (detach, disconnect, DOWN), their pages
 * are renewed. A peer that was stopped while it read goes on with the old pages. */
#include "shm_lend.h"

#if MLFAB_WITH_SHM

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- files of the peer ---- */

static void shm_unview(struct shm *t, struct shm_view *view) {
  if (view->at != NULL) mlfab__shm_memory_unmap(t->lender->memory, view->at, view->bytes);
  if (view->number != 0 && view->at == NULL) close(view->fd);
  *view = (struct shm_view){0};
}

static size_t shm_refers_bytes(const struct shm_refers *refers) {
  return sizeof *refers + refers->lent_room * sizeof *refers->lent;
}

/* Returns a link's state for references, made at first use. NULL: out of memory. */
static struct shm_refers *shm_refers(struct shm *t, struct shm_link *link) {
  const struct shm_refers made = {.lent_room = link->ring < SHM_RING ? SHM_LENT_FEW : SHM_LENT};
  if (link->refers == NULL) {
    link->refers = mlfab__alloc(&t->env, shm_refers_bytes(&made));
    if (link->refers != NULL) link->refers->lent_room = made.lent_room;
  }
  return link->refers;
}

/* Takes a file from the peer, in the place of an earlier file. Returns 0, or the reason to refuse it. */
static int shm_pass(struct shm *t, struct shm_link *link, const struct shm_file *file, int *fd_p) {
  int fd = *fd_p;
  struct shm_refers *refers = shm_refers(t, link);
  if (refers == NULL) return MLFAB_ERR_MEMORY;
  if (file->magic != SHM_FILE_MAGIC || file->place >= SHM_PLACES || file->number == 0 ||
      file->bytes == 0 || file->bytes > INT64_MAX || !mlfab__shm_sealed(fd, file->bytes))
    return MLFAB_ERR_FRAME;
  struct shm_view *view = &refers->views[file->place];
  if (view->borrowed > 0) return MLFAB_ERR_FRAME;
  shm_unview(t, view);
  const uint8_t *map = mlfab__shm_memory_map(t->lender->memory, fd, file->bytes, file->number);
  *view = (struct shm_view){map, fd, file->number, file->bytes, 0};
  if (map == NULL) *fd_p = -1; /* the view owns it */
  return 0;
}

/* Reads packets of the life line, up to the file with this number, if it is not 0. Their number is limited: a peer may
 * send endlessly. The end of the line, or a wrong packet, ends the link, and shm_scan reports DOWN at the end of the
 * ring. */
static void shm_hear(struct shm *t, struct shm_link *link, uint64_t number) {
  for (int i = 0; i < 2 * SHM_FILES && link->fd >= 0; i++) {
    struct shm_file file;
    uint32_t count;
    int fd = -1, code = 0;
    mlfab__shm_close_fd(&t->lender->spare_fd);
    ssize_t n = mlfab__shm_packet_take(link->fd, &file, sizeof file, &fd, 1, &count);
    int why = n < 0 ? errno : 0;
    if (n > 0)
      code =
          n == (ssize_t)sizeof file && count == 1 ? shm_pass(t, link, &file, &fd) : MLFAB_ERR_FRAME;
    mlfab__shm_close_fd(&fd);
    t->lender->spare_fd = fcntl(t->epoll_fd, F_DUPFD_CLOEXEC, 0);
    if (n > 0 && code == 0 && file.number == number) return;
    if (why == EINTR || (n > 0 && code == 0)) continue;
    if (why == EAGAIN) return;
    mlfab__shm_lose(t, link, code);
  }
}

static void shm_lend_hear(struct shm *t, struct shm_link *link) { shm_hear(t, link, 0); }

/* The view with the bulk of a record with a reference; NULL: the peer has not passed such bytes. */
static struct shm_view *shm_look_up(struct shm *t, struct shm_link *link,
                                    const struct shm_reference *reference, uint32_t bytes) {
  for (int heard = 0; heard < 2; heard++) {
    for (uint32_t i = 0; link->refers != NULL && i < SHM_PLACES; i++) {
      struct shm_view *view = &link->refers->views[i];
      if (view->number != reference->number || reference->number == 0) continue;
      return reference->offset % 8 == 0 && reference->offset <= view->bytes &&
                     bytes <= view->bytes - reference->offset
                 ? view
                 : NULL;
    }
    if (heard == 0) shm_hear(t, link, reference->number);
  }
  return NULL;
}

/* The bytes of a view. NULL: no memory for a copy. */
static const uint8_t *shm_see(struct shm *t, struct shm_seen *seen, uint64_t offset,
                              uint32_t bytes) {
  if (seen->view->at != NULL) return seen->view->at + offset;
  if (seen->bulk == NULL) seen->bulk = mlfab__alloc_aligned(&t->env, MLFAB_BULK_MAX);
  for (uint32_t done = 0; seen->bulk != NULL && done < bytes;) {
    ssize_t n = pread(seen->view->fd, seen->bulk + done, bytes - done, (off_t)(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return NULL; /* its size is sealed: the system is short of memory */
    done += (uint32_t)n;
  }
  return seen->bulk;
}

static int shm_lend_see(struct shm *t, struct shm_slot *slot, uint32_t bytes,
                        const uint8_t **bulk_p) {
  struct shm_link *link = slot->link;
  struct shm_reference reference;
  memcpy(&reference, *bulk_p, sizeof reference);
  if (slot->seen == NULL) slot->seen = mlfab__alloc(&t->env, sizeof *slot->seen);
  if (slot->seen == NULL) return 0;
  struct shm_view *view = shm_look_up(t, link, &reference, bytes);
  if (view == NULL) return link->code != 0 ? link->code : MLFAB_ERR_FRAME;
  slot->seen->view = view;
  *bulk_p = shm_see(t, slot->seen, reference.offset, bytes);
  if (*bulk_p == NULL) {
    slot->seen->view = NULL;
    return 0;
  }
  view->borrowed++;
  return 1;
}

static void shm_lend_unsee(struct shm_slot *slot) {
  if (slot->seen->view != NULL) slot->seen->view->borrowed--;
  slot->seen->view = NULL;
}

/* ---- the pool ---- */

static void shm_pool_close(struct shm_pool *pool) {
  if (pool->at != NULL) munmap(pool->at, (size_t)SHM_UNITS * SHM_UNIT);
  mlfab__shm_close_fd(&pool->read_fd);
  mlfab__shm_close_fd(&pool->fd);
  *pool = (struct shm_pool){.fd = -1, .read_fd = -1};
}

/* Begins a pool, in place of a pool with all units lost; a peer that still reads those keeps their pages to itself.
 * Returns false, with the pool as it was, if descriptors or addresses are lacking. */
static bool shm_pool_open(struct shm *t) {
  char path[40];
  const size_t bytes = (size_t)SHM_UNITS * SHM_UNIT;
  struct shm_pool pool = {.read_fd = -1, .number = UINT64_C(1) << 63 | (t->lender->pools + 1)};
  pool.fd = mlfab__shm_file("mlfab-pool", bytes, F_SEAL_SEAL);
  if (pool.fd >= 0) {
    snprintf(path, sizeof path, "/proc/self/fd/%d", pool.fd);
    pool.read_fd = open(path, O_RDONLY | O_CLOEXEC); /* so that the peers cannot write */
    pool.at =
        pool.read_fd >= 0 ? mlfab__shm_map(NULL, bytes, PROT_READ | PROT_WRITE, pool.fd, 0) : NULL;
  }
  if (pool.at == NULL) {
    shm_pool_close(&pool);
    return false;
  }
  shm_pool_close(&t->lender->pool);
  t->lender->pool = pool;
  t->lender->pools++;
  return true;
}

/* The ring that this node wishes a new link to have. */
static uint32_t shm_lend_wish(struct shm *t) {
  uint32_t ring = shm_share(mlfab__max(t->lender->neighbours, t->live_count + 1));
  return ring == SHM_RING || t->lender->pool.at != NULL || shm_pool_open(t) ? ring : SHM_RING;
}

/* The first of n free units in a row, the lowest place, because its pages exist; or SHM_UNITS. */
static uint32_t shm_pool_find(const struct shm_pool *pool, uint32_t n) {
  for (uint32_t i = 0, run = 0; i < SHM_UNITS; i++) {
    if (i % 64 == 0 && pool->bits[i / 64] == UINT64_MAX) {
      run = 0;
      i += 63;
      continue;
    }
    run = pool->bits[i / 64] >> i % 64 & 1 ? 0 : run + 1;
    if (run == n) return i + 1 - n;
  }
  return SHM_UNITS;
}

static void shm_pool_turn(struct shm_pool *pool, uint32_t first, uint32_t n) {
  for (uint32_t i = first; i < first + n; i++) pool->bits[i / 64] ^= UINT64_C(1) << i % 64;
}

/* Gives the peer the descriptor of the pool, if it lacks it. false: not now. */
static bool shm_pool_tell(struct shm *t, struct shm_link *link) {
  struct shm_file file = {SHM_FILE_MAGIC, SHM_FILES, t->lender->pool.number,
                          (uint64_t)SHM_UNITS * SHM_UNIT};
  uint64_t *told = &link->refers->told[SHM_FILES];
  if (*told == file.number) return true;
  if (!mlfab__shm_packet_post(link->fd, &file, sizeof file, &t->lender->pool.read_fd, 1))
    return false;
  *told = file.number;
  return true;
}

/* Takes back bytes in the pool. lost: the link has ended, and its peer may still read them. */
static void shm_pool_back(struct shm *t, struct shm_refers *refers, struct shm_lent *lent,
                          bool lost) {
  refers->pooled--;
  refers->pooled_bytes -= lent->bytes;
  if (lost) {
    t->lender->pool.lost += lent->units;
  } else {
    shm_pool_turn(&t->lender->pool, lent->unit, lent->units);
    t->lender->pool.used -= lent->units;
  }
  lent->units = 0;
  if (t->lender->pool.lost > 0 && t->lender->pool.lost == t->lender->pool.used) shm_pool_open(t);
}

/* Called at the start of a link: a small ring needs the pool. */
static int shm_lend_meet(struct shm *t, struct shm_link *link, bool tell) {
  if (link->ring == SHM_RING) return 0;
  if (shm_refers(t, link) == NULL || (t->lender->pool.at == NULL && !shm_pool_open(t)))
    return MLFAB_ERR_MEMORY;
  return !tell || shm_pool_tell(t, link) ? 0 : MLFAB_ERR_REFUSED;
}

/* ---- loans ---- */

static struct shm_lent *shm_lent_at(struct shm_refers *refers, uint32_t i) {
  return &refers->lent[(refers->lent_first + i) % refers->lent_room];
}

static uint64_t shm_lend_wants(const struct shm_link *link, uint64_t room) {
  if (link->refers->tokens == 0) return room;
  uint64_t end = link->refers->tokens_end;
  return room == 0 || end < room ? end : room;
}

/* Forgets the first bytes lent. Returns their token, or 0. */
static uint64_t shm_lent_over(struct shm *t, struct shm_link *link) {
  struct shm_refers *refers = link->refers;
  struct shm_lent *lent = shm_lent_at(refers, 0);
  if (lent->pooled && lent->units > 0) shm_pool_back(t, refers, lent, false);
  if (!lent->pooled) refers->tokens--;
  refers->lent_first = (refers->lent_first + 1) % refers->lent_room;
  if (--refers->lent_count == 0) t->lender->lending--;
  mlfab__shm_want(t, link);
  return lent->token;
}

/* Ends the loans with this token (0: all) that are not released. Their pages are renewed, neighbours together; if the
 * peer's process is gone, it is not needed. Returns 0, or MEMORY: some loans remain. With token 0 none remain: if
 * memory was short, the peer may read later writes to those pages. */
static int shm_lend_take_back(struct shm *t, struct shm_link *link, uint64_t token) {
  struct shm_refers *refers = link->refers;
  if (refers == NULL || refers->lent_count == 0) return 0;
  bool read = link->pid <= 0 || kill(link->pid, 0) == 0 || errno == EPERM;
  uint64_t released = mlfab__shm_see_tail(link) ? link->tail_seen : 0;
  for (uint32_t i = 0, n; i < refers->lent_count; i += n) {
    struct shm_lent *first = shm_lent_at(refers, i);
    uint64_t bytes = first->bytes;
    n = 1;
    if (token == 0 && first->units > 0 && first->end > released && read)
      shm_pool_back(t, refers, first, true);
    if (first->at == NULL || first->end <= released || (token != 0 && first->token != token))
      continue;
    for (; i + n < refers->lent_count; n++) {
      const struct shm_lent *next = shm_lent_at(refers, i + n);
      if (next->at != first->at + bytes || (token != 0 && next->token != token)) break;
      bytes += next->bytes;
    }
    if (read && !mlfab__shm_memory_renew(t->lender->memory, first->at, bytes)) {
      if (token != 0) return MLFAB_ERR_MEMORY;
      continue;
    }
    for (uint32_t k = 0; k < n; k++) {
      struct shm_lent *lent = shm_lent_at(refers, i + k);
      lent->at = NULL;
      lent->token = 0;
    }
  }
  while (token == 0 && refers->lent_count > 0) shm_lent_over(t, link);
  return 0;
}

/* Finds bytes that a peer has released. */
static int shm_lend_back(struct shm *t, mlfab_io_event *event) {
  if (MLFAB__LIKELY(t->lender->lending == 0)) return 0;
  for (uint32_t i = 0; i < t->live_count; i++) {
    struct shm_link *link = t->live[i];
    while (link->refers != NULL && link->refers->lent_count > 0) {
      if (shm_lent_at(link->refers, 0)->end > link->tail_seen && !mlfab__shm_see_tail(link)) break;
      if (shm_lent_at(link->refers, 0)->end > link->tail_seen) break;
      uint64_t token = shm_lent_over(t, link);
      if (token == 0) continue;
      event->kind = MLFAB_IO_SENT;
      event->link = link->number;
      event->token = token;
      return 1;
    }
  }
  return 0;
}

/* ---- sending ---- */

/* A place for one more own file, or SHM_FILES. */
static uint32_t shm_place(struct shm *t, const struct shm_refers *refers) {
  uint64_t lent = 0; /* places with loans, as bits */
  for (uint32_t i = 0; i < refers->lent_count; i++)
    lent |= UINT64_C(1) << refers->lent[(refers->lent_first + i) % refers->lent_room].place;
  for (uint32_t i = 0; i < SHM_FILES; i++) {
    if (refers->told[i] == 0) return i;
    if (!(lent >> i & 1) && !mlfab__shm_memory_has(t->lender->memory, refers->told[i])) return i;
  }
  return SHM_FILES;
}

/* Passes a file to the peer. Returns its place, or SHM_FILES: not now. */
static uint32_t shm_tell_file(struct shm *t, struct shm_link *link, const mlfab__shm_span *span) {
  char path[40];
  uint32_t place = shm_place(t, link->refers);
  if (place == SHM_FILES) return SHM_FILES;
  snprintf(path, sizeof path, "/proc/self/fd/%d", span->fd);
  int fd = open(path, O_RDONLY | O_CLOEXEC); /* so that the peer cannot write */
  struct shm_file file = {SHM_FILE_MAGIC, place, span->number, span->file_bytes};
  bool told = fd >= 0 && mlfab__shm_packet_post(link->fd, &file, sizeof file, &fd, 1);
  mlfab__shm_close_fd(&fd);
  if (!told) return SHM_FILES;
  link->refers->told[place] = span->number;
  return place;
}

/* May the frame refer to this bulk? Returns 1, with *lent_p and *reference_p; 0: no, copy it; or AGAIN. */
static int shm_refer(struct shm *t, struct shm_link *link, const void *bulk, uint32_t bytes,
                     struct shm_lent *lent, struct shm_reference *reference) {
  mlfab__shm_span span;
  uint32_t place = 0;
  if (!mlfab__shm_memory_find(t->lender->memory, bulk, bytes, &span) || span.offset % 8 != 0 ||
      !span.alone)
    return 0;
  struct shm_refers *refers = shm_refers(t, link);
  if (refers == NULL) return 0;
  if (refers->lent_count == refers->lent_room)
    return mlfab__shm_block(t, link, shm_lent_at(refers, refers->lent_room / 2)->end);
  while (place < SHM_FILES && refers->told[place] != span.number) place++;
  if (place == SHM_FILES) place = shm_tell_file(t, link, &span);
  if (place == SHM_FILES) return 0;
  *reference = (struct shm_reference){span.number, span.offset};
  *lent = (struct shm_lent){.at = bulk, .bytes = bytes, .place = place};
  return 1;
}

/* May the link have so many bytes more in the pool? */
static bool shm_pool_room(const struct shm_refers *refers, uint32_t bytes) {
  return refers->lent_count < refers->lent_room &&
         (refers->pooled < 2 || refers->pooled_bytes + bytes <= SHM_POOLED);
}

/* Copies a bulk into the pool. Returns 0, with *lent_p and *reference_p; or AGAIN, PEER_CLOSED. */
static int shm_pool_put(struct shm *t, struct shm_link *link, const void *bulk, uint32_t bytes,
                        struct shm_lent *lent, struct shm_reference *reference) {
  struct shm_refers *refers = link->refers;
  const uint32_t units = (bytes + SHM_UNIT - 1) / SHM_UNIT;
  if (!shm_pool_room(refers, bytes)) {
    if (!mlfab__shm_see_tail(link)) return MLFAB_ERR_PEER_CLOSED;
    const struct shm_lent *first = shm_lent_at(refers, 0);
    for (; refers->lent_count > 0 && first->pooled && first->end <= link->tail_seen;
         first = shm_lent_at(refers, 0))
      shm_lent_over(t, link);
    if (!shm_pool_room(refers, bytes)) return mlfab__shm_block(t, link, first->end);
  }
  uint32_t unit = shm_pool_find(&t->lender->pool, units);
  if (unit == SHM_UNITS || !shm_pool_tell(t, link)) return mlfab__shm_block(t, link, 0);
  memcpy(t->lender->pool.at + (size_t)unit * SHM_UNIT, bulk, bytes);
  shm_pool_turn(&t->lender->pool, unit, units);
  t->lender->pool.used += units;
  refers->pooled++;
  refers->pooled_bytes += bytes;
  *reference = (struct shm_reference){t->lender->pool.number, (uint64_t)unit * SHM_UNIT};
  *lent = (struct shm_lent){
      .bytes = bytes, .place = SHM_FILES, .pooled = true, .unit = unit, .units = units};
  return 0;
}

/* Notes the loan of the bytes to which the record published last refers. */
static void shm_lend_note(struct shm *t, struct shm_link *link, struct shm_lent *lent,
                          uint64_t token) {
  struct shm_refers *refers = link->refers;
  lent->end = link->head;
  lent->token = token;
  *shm_lent_at(refers, refers->lent_count) = *lent;
  if (refers->lent_count++ == 0) t->lender->lending++;
  if (lent->pooled) return;
  refers->tokens++;
  refers->tokens_end = lent->end;
  mlfab__shm_want(t, link);
}

static int shm_lend_send(struct shm *t, struct shm_link *link, const void *head,
                         uint32_t head_bytes, const void *bulk, uint32_t bulk_bytes,
                         uint64_t token) {
  struct shm_lent lent;
  struct shm_reference reference;
  const uint32_t front = shm_up(8 + head_bytes), bytes = front + SHM_LINE;
  if (link->plain) return 1;
  int refers = token != 0 && bulk_bytes >= SHM_REFER && t->lender->memory != NULL
                   ? shm_refer(t, link, bulk, bulk_bytes, &lent, &reference)
                   : 0;
  if (refers < 0) return refers;
  /* In a small ring, a record takes at most a fourth. */
  if (!refers && (link->ring == SHM_RING || front + shm_up(bulk_bytes) <= link->ring / 4)) return 1;
  int code = mlfab__shm_room(t, link, bytes, refers ? 0 : token);
  if (code == 0 && !refers) code = shm_pool_put(t, link, bulk, bulk_bytes, &lent, &reference);
  if (code != 0) return code;
  memcpy(link->tx + link->tx_offset + front, &reference, sizeof reference);
  mlfab__shm_publish(t, link, head, head_bytes, bytes,
                     SHM_VALID | SHM_REFERS | (uint64_t)head_bytes << 32 | bulk_bytes);
  shm_lend_note(t, link, &lent, refers ? token : 0);
  if (token != 0 && !refers) mlfab__shm_sent(t, link->number, token);
  return 0;
}

/* ---- the beginning and the end ---- */

/* In a forked child the mappings do not exist. */
static void shm_lend_free(struct shm *t, struct shm_link *link) {
  const bool child = t->pid != getpid();
  struct shm_refers *refers = link->refers;
  if (refers == NULL) return;
  if (refers->lent_count > 0) t->lender->lending--;
  for (uint32_t i = 0; i < SHM_PLACES; i++)
    if (!child || refers->views[i].at == NULL) shm_unview(t, &refers->views[i]);
  mlfab__free(&t->env, refers, shm_refers_bytes(refers));
  link->refers = NULL;
}

static int shm_lend_open(struct shm *t, const mlfab_transport_options *options) {
  struct shm_lender *lender = mlfab__alloc(&t->env, sizeof *lender);
  if (lender == NULL) return MLFAB_ERR_MEMORY;
  if (MLFAB__HAS(options, mlfab_transport_options, memory)) lender->memory = options->memory;
  if (MLFAB__HAS(options, mlfab_transport_options, neighbours))
    lender->neighbours = options->neighbours;
  lender->pool.fd = lender->pool.read_fd = -1;
  lender->spare_fd = fcntl(t->epoll_fd, F_DUPFD_CLOEXEC, 0);
  t->lender = lender;
  return 0;
}

static void shm_lend_close(struct shm *t) {
  struct shm_lender *lender = t->lender;
  for (struct shm_slot *slot = t->all_slots; slot != NULL; slot = slot->all) {
    if (slot->seen == NULL) continue;
    if (slot->seen->bulk != NULL) mlfab__free_aligned(&t->env, slot->seen->bulk, MLFAB_BULK_MAX);
    mlfab__free(&t->env, slot->seen, sizeof *slot->seen);
  }
  if (t->pid != getpid()) lender->pool.at = NULL;
  shm_pool_close(&lender->pool);
  mlfab__shm_close_fd(&lender->spare_fd);
  mlfab__free(&t->env, lender, sizeof *lender);
  t->lender = NULL;
}

MLFAB__INTERNAL const mlfab__shm_lend *mlfab__shm_lend_table(void) {
  static const mlfab__shm_lend table = {shm_lend_open,  shm_lend_close, shm_lend_wish,
                                        shm_lend_meet,  shm_lend_free,  shm_lend_hear,
                                        shm_lend_send,  shm_lend_wants, shm_lend_see,
                                        shm_lend_unsee, shm_lend_back,  shm_lend_take_back};
  return &table;
}

#endif
