/* staging.c - a context: calls whose buffers are in device memory (mlfab_device.h).
 *
 * For: copying the input of a call to an image in pinned memory, beginning the call on the image, and copying its
 * results back, in the order in which the calls were made. It has no kernels, and knows devices only by a table.
 *
 * The caller holds a request of the staging (outer); the call on the image has another (inner). States of a call:
 *
 *    FILLING --copied, it is its turn--> RUNNING --inner done, something was written--> LANDING --copied--> ended
 *       |                                   '--inner done, nothing to copy, or it failed--------------------> ended
 *       '--copy failed, deadline, cancelled--> DOOMED
 *    LANDING --copy failed, deadline--> ended
 *    DIRECT --done, or failed at all members--> ended;  --by the host, on all members--> FILLING;  --deadline, cancelled--> DOOMED
 *
 * DIRECT: a collective that the members make from device to device, in direct.c. It gets an image only in FILLING.
 *
 * Copies and transfer overlap in two calls. They copy in chunks, in the order of the image.
 *
 *    Push: FILLING --the first chunk is copied, its turn--> RUNNING (`feeds`) --all copied--> RUNNING
 *                                                              '--copy failed--> inner cancelled --> ended
 *    Pull: RUNNING (`lands`) copies back chunks that have come whole; LANDING the others.
 *
 * `ended`: the outer request is done, and the call remains only until its copies are over (`mark`), because they use
 * the image. DOOMED: the outer request is done, too. In its turn, the call tells other workers that wait for it: they
 * fail now, and the next calls of all meet. Then it has ended.
 *
 * Invariants. (1) Calls begin in the order of the list. A call in FILLING or DOOMED keeps back all calls behind it. A
 * call in DIRECT keeps back calls with a number in the communicator; before the stream has come to it, all calls. A
 * call without a request cannot be kept back: it waits until no call is in these states. (2) One call uses an image.
 * The image goes back to the pool when the call is removed: by then copies and transports have let go of it. (3) All
 * images together, used or not, have at most `most` bytes. (4) If the device does not reach a mark, requests end at
 * their deadlines all the same. If even setting a mark fails, the device is lost (`broken`): the image is never used
 * again and stays pinned, and calls that need the device do not begin. (5) No code here waits for the device. (6) While
 * a call feeds, the worker knows which bytes of the image are still to be copied (mlfab__push_lacks). It holds them
 * back, so each server lacks some of its part. A copy that fails cancels the push before any server can have applied
 * it. A call stops feeding only when the device reports the last mark as reached, or when it is cancelled. (7) The last
 * copy back of a chunk is queued after the last write to it: each write sets `stale`. Chunks that are stale when the
 * inner call is done are copied again. Copies of one direction are carried out in order, so the last copy counts. A
 * chunk is copied at most twice. (8) A copy back that is queued early has a mark and waits for the fence, as any other.
 *
 * Source: CUDA's programming guide, asynchronous concurrent execution (order on a stream). No paper has devices. */
#include "staging.h"

#include "../worker/feed.h"
#include "direct_table.h"
#include "visit.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum {
  STAGING_CALLS = 64,
  STAGING_ALIGN = 256, /* of a buffer in an image */
  STAGING_GRAIN = 65536,
  STAGING_OPTIONS = 2048, /* bytes of options that are kept; no struct of this version has more */
  STAGING_SMALL =
      65536, /* updates of up to so many bytes are copied at the call (mlfab_push_start) */
  STAGING_DEFAULT = 268435456,
  STAGING_CHUNKS = 64, /* of a call, at most */
  /* Bytes of a chunk; less if all images have less than STAGING_CHUNKS of them, more if one call has more. */
  STAGING_CHUNK = 4 << 20,
  STAGING_PAUSE_NS = 100000 /* between two looks, at close */
};

enum staging_state {
  STAGING_FILLING,
  STAGING_RUNNING,
  STAGING_LANDING,
  STAGING_DOOMED,
  STAGING_DIRECT,
  STAGING_ENDED
};

typedef struct staging_image {
  struct staging_image *next; /* in the pool */
  uint8_t *at;
  uint64_t bytes;
} staging_image;

/* A buffer that is in the image. */
typedef struct staging_buffer {
  mlfab__extent of;
  uint64_t place; /* in the image */
  int memory;     /* MLFAB_MEMORY_* */
} staging_buffer;

/* A stretch of the image. Filling: `mark` is reached when it and all before it are copied. Landing: it is whole when
 * `misses` is 0. Bytes that are sent again count again, so it may be copied too early, and is stale then. */
typedef struct staging_chunk {
  void *mark;
  uint64_t misses;
  uint8_t stale, landed; /* the image is newer than the device's memory; copied back once */
} staging_chunk;

typedef struct staging_call {
  struct staging_call *next;
  enum staging_state state;
  mlfab_call call; /* its lists and options are in `copied` */
  uint8_t *copied;
  size_t copied_bytes;
  staging_buffer *buffers; /* in `copied` */
  uint32_t nbuffers;
  uint32_t pinned;      /* number of buffers used in place, after the stream's earlier work */
  staging_image *image; /* NULL: no buffer needs one */
  void *fence;          /* for copies back, or NULL */
  void *mark, *later;   /* of the copies under way; of later copies behind them; or NULL */
  int way;              /* direction of the copies */
  int unknown;          /* copies without a mark may be under way */
  uint64_t chunk;       /* bytes of a chunk; 0: the image is one */
  uint32_t nchunks, filled;
  int feeds, lands; /* RUNNING: the image is not complete yet; chunks are copied back */
  staging_chunk chunks[STAGING_CHUNKS];
  uint64_t began_ns, deadline_ns;
  mlfab_request outer, inner; /* 0: none */
  mlfab__direct_call *direct; /* NULL: it goes by the host */
  mlfab_error why;            /* DOOMED; RUNNING: it was cancelled for this */
} staging_call;

struct mlfab__staging {
  const mlfab_device *device;
  void *self;
  uint64_t most, bytes; /* of all images */
  staging_image *pool;  /* unused images */
  staging_call *first, **last;
  uint32_t ncalls;
  int behind; /* within a look: copies to the host of an earlier call are still under way */
  int broken; /* error number after which copies may be under way for an unknown time */
};

typedef struct mlfab__staging staging;

/* --- the buffers of a call --- */

/* The result of a look at a call's buffers. The second look, which places them, fills `buffers`. */
typedef struct staging_look {
  staging *s;
  mlfab_error *error;
  const char *what;
  int code;
  uint32_t foreign, buffers; /* number in memory of the device; number that need a place */
  uint32_t pinned;           /* number used in place, after the stream's earlier work */
  uint64_t bytes, read;      /* bytes of the image; bytes that the call reads */
  int snapshot;              /* its input in memory of the host is copied, too */
  int direct;                /* it needs no image at first */
  staging_buffer *to;        /* NULL: the first look */
  uint32_t room;             /* of `to` */
  const staging_image *image;
} staging_look;

static int staging_where(staging_look *look, const mlfab__extent *extent) {
  char text[160] = "";
  int memory = look->s->device->where(look->s->self, extent->at, extent->bytes, text, sizeof text);
  if (memory < 0)
    look->code =
        MLFAB__FAIL(look->error, memory, "%s: the buffer at %p: %s", look->what, extent->at, text);
  else if (memory != MLFAB_MEMORY_HOST && extent->align > 1 &&
           (uintptr_t)extent->at % extent->align != 0)
    look->code = MLFAB__FAIL(look->error, MLFAB_ERR_ARGUMENT,
                             "%s: the buffer at %p is not aligned to its elements of %u bytes",
                             look->what, extent->at, extent->align);
  return memory;
}

static void *staging_look_at(void *user, const mlfab__extent *extent) {
  staging_look *look = user;
  void *same = (void *)(uintptr_t)extent->at;
  if (look->code) return same;
  int memory = staging_where(look, extent);
  if (look->code) return same;
  look->read = mlfab__add_sat(look->read, extent->in_bytes);
  look->foreign += memory != MLFAB_MEMORY_HOST;
  if (memory != MLFAB_MEMORY_DEVICE && !(look->snapshot && extent->in_bytes > 0)) {
    look->pinned += memory != MLFAB_MEMORY_HOST;
    return same;
  }
  uint64_t place = look->bytes;
  if (look->to &&
      (look->buffers == look->room || !look->image || extent->bytes > look->image->bytes - place)) {
    look->code = MLFAB__FAIL(look->error, MLFAB_ERR_ARGUMENT,
                             "%s: the buffer at %p became device memory during the call",
                             look->what, extent->at);
    return same;
  }
  if (look->to) look->to[look->buffers] = (staging_buffer){*extent, place, memory};
  look->buffers++;
  look->bytes = mlfab__add_sat(place, extent->bytes);
  if (look->bytes <= look->s->most)
    look->bytes = (look->bytes + STAGING_ALIGN - 1) / STAGING_ALIGN * STAGING_ALIGN;
  return look->to ? look->image->at + place : same;
}

/* The call's name. NULL: a call of this kind cannot wait for its turn, as it has no request that ends later. */
static const char *staging_name(uint32_t kind) {
  static const char *const names[] = {[MLFAB_CALL_MODEL_START] = "model_start",
                                      [MLFAB_CALL_PUSH] = "push",
                                      [MLFAB_CALL_PUSH_SPARSE] = "push_sparse",
                                      [MLFAB_CALL_PULL] = "pull",
                                      [MLFAB_CALL_ALLREDUCE] = "allreduce",
                                      [MLFAB_CALL_REDUCE_SCATTER] = "reduce_scatter",
                                      [MLFAB_CALL_ALLGATHER] = "allgather",
                                      [MLFAB_CALL_BROADCAST] = "broadcast",
                                      [MLFAB_CALL_BARRIER] = "barrier",
                                      [MLFAB_CALL_PARTIAL_REDUCE] = "partial_reduce",
                                      [MLFAB_CALL_PARTIAL_FLUSH] = "partial_flush",
                                      [MLFAB_CALL_STOCHASTIC_REDUCE] = "stochastic_reduce"};
  return kind < MLFAB__COUNT(names) ? names[kind] : NULL;
}

/* The kind of the request that the caller gets; its slot belongs to no role. */
static int staging_request_kind(uint32_t kind) {
  switch (kind) {
    case MLFAB_CALL_MODEL_START:
      return MLFAB__REQUEST_MODEL;
    case MLFAB_CALL_PUSH:
    case MLFAB_CALL_PUSH_SPARSE:
      return MLFAB__REQUEST_PUSH;
    case MLFAB_CALL_PULL:
      return MLFAB__REQUEST_PULL;
    case MLFAB_CALL_BARRIER:
      return MLFAB__REQUEST_BARRIER;
    default:
      return MLFAB__REQUEST_COLLECTIVE;
  }
}

/* Do buffers overlap, one of them written? In the image they would not overlap. Sorts the list. */
static int staging_before(const void *a, const void *b) {
  const staging_buffer *one = a, *other = b;
  return one->of.at < other->of.at ? -1 : one->of.at > other->of.at;
}

static int staging_overlaps(staging_buffer *buffers, uint32_t n) {
  uintptr_t read = 0, written = 0; /* ends of the buffers so far */
  qsort(buffers, n, sizeof *buffers, staging_before);
  for (uint32_t i = 0; i < n; i++) {
    const mlfab__extent *of = &buffers[i].of;
    uintptr_t from = (uintptr_t)of->at, to = from + (uintptr_t)of->bytes;
    if (from < written || (of->out_bytes > 0 && from < read)) return 1;
    if (of->out_bytes > 0 && to > written) written = to;
    if (to > read) read = to;
  }
  return 0;
}

/* Compares by the order in the image. */
static int staging_places(const void *a, const void *b) {
  const staging_buffer *one = a, *other = b;
  return one->place < other->place ? -1 : one->place > other->place;
}

/* --- images --- */

static void staging_unpin(staging *s, mlfab__env *env, staging_image *image) {
  s->device->unpin(s->self, image->at);
  s->bytes -= image->bytes;
  mlfab__free(env, image, sizeof *image);
}

/* Takes the smallest image of the pool that has room; none if most of it would stay unused. */
static staging_image *staging_pooled(staging *s, uint64_t bytes) {
  staging_image **best = NULL;
  for (staging_image **at = &s->pool; *at; at = &(*at)->next) {
    if ((*at)->bytes >= bytes && (*at)->bytes / 4 <= bytes &&
        (!best || (*at)->bytes < (*best)->bytes))
      best = at;
  }
  staging_image *found = best ? *best : NULL;
  if (found) *best = found->next;
  return found;
}

/* Gets an image. Errors: AGAIN while calls use too much of the memory; MEMORY; DEVICE. */
static int staging_image_get(mlfab *ctx, uint64_t bytes, staging_image **image_p,
                             mlfab_error *error) {
  staging *s = ctx->staging;
  void *at = NULL;
  bytes = mlfab__max(bytes, STAGING_GRAIN);
  bytes = mlfab__min((bytes + STAGING_GRAIN - 1) / STAGING_GRAIN * STAGING_GRAIN, s->most);
  *image_p = staging_pooled(s, bytes);
  if (*image_p) return 0;
  while (s->pool && s->most - s->bytes < bytes) {
    staging_image *unused = s->pool;
    s->pool = unused->next;
    staging_unpin(s, &ctx->env, unused);
  }
  if (s->most - s->bytes < bytes)
    return MLFAB__FAIL(error, MLFAB_ERR_AGAIN,
                       "staging: %llu of %llu bytes are in use, and this call needs %llu: end some "
                       "requests with mlfab_wait or mlfab_test",
                       (unsigned long long)s->bytes, (unsigned long long)s->most,
                       (unsigned long long)bytes);
  staging_image *image = mlfab__alloc(&ctx->env, sizeof *image);
  if (!image) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "staging: out of memory");
  int failed = s->device->pin(s->self, bytes, &at);
  if (failed) {
    mlfab__free(&ctx->env, image, sizeof *image);
    return MLFAB__FAIL(error, MLFAB_ERR_DEVICE, "staging: %llu bytes of pinned memory: %s",
                       (unsigned long long)bytes, s->device->text(s->self, failed));
  }
  image->at = at;
  image->bytes = bytes;
  s->bytes += bytes;
  *image_p = image;
  return 0;
}

/* --- calls --- */

static void staging_drop(staging *s, void **mark) {
  if (*mark) s->device->drop(s->self, *mark);
  *mark = NULL;
}

/* Removes a call whose copies are over, or that had none. */
static void staging_remove(mlfab *ctx, staging_call *c) {
  staging *s = ctx->staging;
  staging_call **at = &s->first;
  while (*at != c) at = &(*at)->next;
  *at = c->next;
  if (s->last == &c->next) s->last = at;
  s->ncalls--;
  staging_drop(s, &c->fence);
  staging_drop(s, &c->mark);
  staging_drop(s, &c->later);
  for (uint32_t i = 0; i < c->nchunks; i++) staging_drop(s, &c->chunks[i].mark);
  if (c->direct) ctx->direct->free(ctx, c->direct, 0);
  if (c->image && c->unknown) {
    /* The device may still use it: it is counted for ever. */
    mlfab__log(&ctx->node->env, MLFAB_LOG_ERROR,
               "staging: %llu bytes of pinned memory are lost, as a copy has not ended",
               (unsigned long long)c->image->bytes);
    mlfab__free(&ctx->env, c->image, sizeof *c->image);
  } else if (c->image) {
    c->image->next = s->pool;
    s->pool = c->image;
  }
  mlfab__free(&ctx->env, c->copied, c->copied_bytes);
  mlfab__free(&ctx->env, c, sizeof *c);
}

/* Ends the outer request. `text`: of an error. A push without a waiter leaves the error to mlfab_flush. */
static void staging_tell(mlfab *ctx, staging_call *c, int code, int32_t rank, int is_server,
                         const char *text) {
  mlfab__requests *table = &ctx->node->requests;
  mlfab__request *outer = mlfab__request_find(table, c->outer);
  if (outer) {
    mlfab__request_finish(table, outer, code, rank, is_server, ctx->now_ns, "%s", text);
  } else if (code && c->state < STAGING_DOOMED && !table->abandoned.code) {
    mlfab__error(&table->abandoned, code, rank, is_server, ctx->now_ns - c->began_ns, "%s", text);
  }
  c->outer = 0;
}

/* Makes later work on the stream wait for the copies of the call. */
static void staging_order(staging *s, const staging_call *c) {
  void *last = c->later ? c->later : c->mark;
  if (last) (void)s->device->order(s->self, last);
}

/* Ends the request now. The call remains for its copies, and to keep the numbers of collectives. Later work on the
 * stream may overwrite its memory. */
static void staging_end_as(mlfab *ctx, staging_call *c, int code, int32_t rank, int is_server,
                           const char *text) {
  staging_tell(ctx, c, code, rank, is_server, text);
  if (code) staging_order(ctx->staging, c);
  if (c->direct) ctx->direct->leave(ctx, c->direct);
  if (c->state == STAGING_FILLING || c->state == STAGING_DIRECT) {
    MLFAB__FAIL(&c->why, code, "%s", text);
    c->state = STAGING_DOOMED;
  } else {
    c->state = STAGING_ENDED;
  }
}

static void staging_end(mlfab *ctx, staging_call *c, int code, const char *text) {
  staging_end_as(ctx, c, code, MLFAB_NO_RANK, 0, text);
}

static void staging_fail_device(mlfab *ctx, staging_call *c, const char *what, int number) {
  char text[MLFAB__TEXT_MAX];
  snprintf(text, sizeof text, "%s: %s: %s", staging_name(c->call.kind), what,
           ctx->staging->device->text(ctx->staging->self, number));
  staging_end(ctx, c, MLFAB_ERR_DEVICE, text);
}

/* Looks at the mark. Returns 1: no mark is left; 0: not reached; negative: the device's error, with the copies over. */
static int staging_reached(staging *s, staging_call *c) {
  if (!c->mark) return 1;
  int fills = c->way == MLFAB_DEVICE_TO_HOST;
  int reached = fills && s->behind ? 0 : s->device->poll(s->self, c->mark);
  s->behind |= fills && reached == 0;
  if (reached == 0) return 0;
  staging_drop(s, &c->mark);
  c->mark = c->later;
  c->later = NULL;
  return reached > 0 && c->mark ? staging_reached(s, c) : reached;
}

/* Marks the copies of the call: only a mark tells their end. A mark that is set already stays: only that mark may tell
 * that copies before it have failed. */
static int staging_mark(staging *s, staging_call *c) {
  int number = s->device->mark(s->self, c->way, c->mark ? &c->later : &c->mark);
  if (number && c->unknown) s->broken = number;
  if (!number) c->unknown = 0;
  return number;
}

/* --- chunks --- */

/* Divides the image into chunks. Calls of other kinds, and small calls, have one chunk. */
static void staging_cut(staging *s, staging_call *c, uint64_t bytes) {
  const int kind = (int)c->call.kind;
  c->nchunks = 1;
  for (uint32_t i = 0; i < c->nbuffers; i++) /* all of one direction, in memory of the device */
    if (c->buffers[i].memory == MLFAB_MEMORY_HOST ||
        (c->buffers[i].of.in_bytes > 0) == (kind == MLFAB_CALL_PULL))
      return;
  if (kind != MLFAB_CALL_PUSH && kind != MLFAB_CALL_PULL) return;
  uint64_t chunk = mlfab__min(s->most / STAGING_CHUNKS, STAGING_CHUNK);
  chunk = mlfab__max(chunk, (bytes + STAGING_CHUNKS - 1) / STAGING_CHUNKS);
  chunk = (chunk + STAGING_ALIGN - 1) / STAGING_ALIGN * STAGING_ALIGN;
  if (bytes <= chunk) return;
  c->chunk = chunk;
  c->nchunks = (uint32_t)((bytes + chunk - 1) / chunk);
}

/* Returns the bytes that a chunk shares with a buffer's stretch from `at` on, in the image. They begin at *from_p. */
static uint64_t staging_part(const staging_call *c, uint32_t i, uint64_t at, uint64_t bytes,
                             uint64_t *from_p) {
  uint64_t begin = i * c->chunk, end = i + 1 < c->nchunks ? begin + c->chunk : UINT64_MAX;
  uint64_t to = mlfab__min(at + bytes, end);
  *from_p = mlfab__max(at, begin);
  return *from_p < to ? to - *from_p : 0;
}

/* Queues the copies of a chunk. Returns the number of an error, or 0. */
static int staging_copy_chunk(staging *s, staging_call *c, uint32_t i) {
  int number = 0, fills = c->way == MLFAB_DEVICE_TO_HOST;
  for (uint32_t k = 0; k < c->nbuffers && !number; k++) {
    const staging_buffer *b = &c->buffers[k];
    uint64_t from, at = b->place + (fills ? b->of.in : b->of.out);
    uint64_t bytes = staging_part(c, i, at, fills ? b->of.in_bytes : b->of.out_bytes, &from);
    uint8_t *device = (uint8_t *)(uintptr_t)b->of.at + (from - b->place);
    uint8_t *host = c->image->at + from;
    if (bytes == 0) continue;
    if (fills && b->memory == MLFAB_MEMORY_HOST) {
      memcpy(host, device, (size_t)bytes);
      continue;
    }
    number = fills ? s->device->copy(s->self, c->way, host, device, bytes)
                   : s->device->copy(s->self, c->way, device, host, bytes);
    c->unknown = 1;
  }
  return number;
}

/* Copies the call's results back, behind the work that was on the stream at the call. `over` 0: the call goes on, so it
 * copies only whole chunks, once. Returns the number of an error, or 0. *moved_p (may be NULL): a copy was queued. */
static int staging_land(staging *s, staging_call *c, int over, int *moved_p) {
  int number = 0, copies = 0;
  for (uint32_t i = 0; i < c->nchunks && !number; i++) {
    staging_chunk *chunk = &c->chunks[i];
    if (!chunk->stale || (!over && (chunk->misses > 0 || chunk->landed))) continue;
    c->way = MLFAB_DEVICE_FROM_HOST;
    if (c->fence) number = s->device->after(s->self, c->way, c->fence);
    staging_drop(s, &c->fence);
    if (!number) number = staging_copy_chunk(s, c, i);
    chunk->stale = 0;
    chunk->landed = 1;
    copies++;
  }
  int unmarked = c->unknown ? staging_mark(s, c) : 0;
  if (moved_p) *moved_p = copies > 0;
  return number ? number : unmarked;
}

/* Notes that the pull writes these bytes, if they are in the image. */
static void staging_arrives(void *user, const void *at, uint64_t bytes) {
  staging_call *c = user;
  uintptr_t image = (uintptr_t)c->image->at, to = (uintptr_t)at;
  if (to < image || to - image >= c->image->bytes) return;
  for (uint64_t i = (to - image) / c->chunk; i < c->nchunks; i++) {
    uint64_t from, part = staging_part(c, (uint32_t)i, to - image, bytes, &from);
    if (part == 0) break;
    c->chunks[i].misses -= mlfab__min(c->chunks[i].misses, part);
    c->chunks[i].stale = 1;
  }
}

/* --- filling --- */

/* Copies the input of the call, behind its fence. Nothing has been sent yet. */
static int staging_fill(staging *s, staging_call *c, int snapshot) {
  int number = c->fence ? 0 : s->device->fence(s->self, &c->fence), copies = 0, writes = 0;
  c->way = MLFAB_DEVICE_TO_HOST;
  if (!number) number = s->device->after(s->self, c->way, c->fence);
  for (uint32_t i = 0; i < c->nbuffers; i++) {
    const staging_buffer *b = &c->buffers[i];
    writes |= b->of.out_bytes > 0;
    copies |= b->of.in_bytes > 0 && b->memory != MLFAB_MEMORY_HOST;
  }
  for (uint32_t i = 0; i < c->nchunks && !number; i++) {
    uint64_t from;
    for (uint32_t k = 0; k < c->nbuffers; k++) {
      const staging_buffer *b = &c->buffers[k];
      c->chunks[i].misses += staging_part(c, i, b->place + b->of.out, b->of.out_bytes, &from);
    }
    c->chunks[i].stale = 1;
    number = staging_copy_chunk(s, c, i);
    if (!number && c->unknown && i + 1 < c->nchunks)
      number = s->device->mark(s->self, c->way, &c->chunks[i].mark);
  }
  /* Only results that are copied back have to wait for the stream by themselves. */
  int waits = copies || !writes || c->pinned > 0;
  int unmarked = c->unknown || (!number && waits) ? staging_mark(s, c) : 0;
  if (!number && !unmarked && c->mark && snapshot) number = s->device->order(s->self, c->mark);
  if (!writes) staging_drop(s, &c->fence);
  return number ? number : unmarked;
}

/* Looks which chunks are copied to the image. Returns 1: all; 0: the first `filled`; negative: the device's error. */
static int staging_filled(staging *s, staging_call *c) {
  while (c->filled + 1 < c->nchunks && c->chunks[c->filled].mark) {
    void **mark = &c->chunks[c->filled].mark;
    int reached = s->behind ? 0 : s->device->poll(s->self, *mark);
    s->behind |= reached == 0;
    if (reached == 0) return 0;
    staging_drop(s, mark);
    if (reached < 0) return reached;
    c->filled++;
  }
  return staging_reached(s, c);
}

/* --- beginning --- */

/* Bytes of the lists that a call borrows, each in a multiple of 16. */
static size_t staging_pad(size_t bytes) { return (bytes + 15) / 16 * 16; }

typedef struct staging_sizes {
  size_t options, bufs, vecs, counts, inputs, buffers;
} staging_sizes;

static const void *const *staging_inputs(const mlfab_call *call) {
  const mlfab_collective *o = call->options;
  int has = call->kind >= MLFAB_CALL_ALLREDUCE && call->kind <= MLFAB_CALL_BROADCAST && o &&
            MLFAB__HAS(o, mlfab_collective, inputs);
  return has ? o->inputs : NULL;
}

static size_t staging_measure(const mlfab *ctx, const mlfab_call *call, uint32_t buffers,
                              staging_sizes *z) {
  uint32_t n = call->kind == MLFAB_CALL_ALLREDUCE ? call->n : 1;
  int blocks = call->kind == MLFAB_CALL_REDUCE_SCATTER || call->kind == MLFAB_CALL_ALLGATHER;
  memset(z, 0, sizeof *z);
  z->options = call->options ? mlfab__min(*(const uint32_t *)call->options, STAGING_OPTIONS) : 0;
  z->bufs = call->bufs ? call->n * sizeof *call->bufs : 0;
  z->vecs = call->vecs ? call->n * sizeof *call->vecs : 0;
  z->counts = blocks && call->counts ? ctx->node->config.workers * sizeof *call->counts : 0;
  z->inputs = staging_inputs(call) ? n * sizeof(void *) : 0;
  z->buffers = buffers * sizeof(staging_buffer);
  return staging_pad(z->options) + staging_pad(z->bufs) + staging_pad(z->vecs) +
         staging_pad(z->counts) + staging_pad(z->inputs) + staging_pad(z->buffers);
}

/* Copies a list to *at_p, and advances *at_p. NULL stays. */
static void *staging_keep(uint8_t **at_p, const void *list, size_t bytes) {
  void *to = *at_p;
  if (!list || bytes == 0) return NULL;
  memcpy(to, list, bytes);
  *at_p += staging_pad(bytes);
  return to;
}

/* Copies the call with its lists. NULL: out of memory. */
static staging_call *staging_copy(mlfab *ctx, const mlfab_call *call, uint32_t buffers) {
  staging_sizes z;
  staging_call *c = mlfab__alloc(&ctx->env, sizeof *c);
  if (!c) return NULL;
  c->copied_bytes = staging_measure(ctx, call, buffers, &z) + 16;
  c->copied = mlfab__alloc(&ctx->env, c->copied_bytes);
  if (!c->copied) {
    mlfab__free(&ctx->env, c, sizeof *c);
    return NULL;
  }
  uint8_t *at = c->copied;
  const void *const *inputs = staging_inputs(call);
  c->call = *call;
  c->call.options = staging_keep(&at, call->options, z.options);
  c->call.bufs = staging_keep(&at, call->bufs, z.bufs);
  c->call.vecs = staging_keep(&at, call->vecs, z.vecs);
  if (z.counts > 0) c->call.counts = staging_keep(&at, call->counts, z.counts);
  if (inputs)
    ((mlfab_collective *)(uintptr_t)c->call.options)->inputs = staging_keep(&at, inputs, z.inputs);
  c->buffers = (staging_buffer *)(void *)at;
  c->nbuffers = buffers;
  return c;
}

/* The call's timeout_ns; 0: none given. *at_p: its place in the options, or 0: it is in the descriptor. */
static uint64_t staging_timeout(const mlfab_call *call, size_t *at_p) {
  size_t at = 0;
  uint64_t timeout_ns = 0;
  if (call->kind == MLFAB_CALL_PUSH || call->kind == MLFAB_CALL_PUSH_SPARSE)
    at = offsetof(mlfab_push_options, timeout_ns);
  else if (call->kind == MLFAB_CALL_PULL || call->kind == MLFAB_CALL_PULL_VIEW)
    at = offsetof(mlfab_pull_options, timeout_ns);
  else if (call->kind >= MLFAB_CALL_ALLREDUCE && call->kind <= MLFAB_CALL_BARRIER)
    at = offsetof(mlfab_collective, timeout_ns);
  *at_p = 0;
  if (at == 0) return call->timeout_ns;
  /* All options begin with their size. */
  if (!call->options || *(const uint32_t *)call->options < at + sizeof timeout_ns) return 0;
  *at_p = at;
  memcpy(&timeout_ns, (const char *)call->options + at, sizeof timeout_ns);
  return timeout_ns;
}

/* Gives the call the remaining time, counted from now on. */
static void staging_set_timeout(mlfab *ctx, staging_call *c) {
  size_t at;
  uint64_t left = c->deadline_ns == MLFAB__NEVER ? 0 : c->deadline_ns - ctx->now_ns;
  (void)staging_timeout(&c->call, &at);
  if (c->deadline_ns != MLFAB__NEVER && left == 0) left = 1;
  if (at)
    memcpy((uint8_t *)(uintptr_t)c->call.options + at, &left, sizeof left);
  else
    c->call.timeout_ns = left;
}

/* May a call of this kind have a number in the communicator? */
static int staging_is_numbered(uint32_t kind) {
  return !(kind == MLFAB_CALL_MODEL_START || kind == MLFAB_CALL_PUSH ||
           kind == MLFAB_CALL_PUSH_SPARSE || kind == MLFAB_CALL_PULL || kind == MLFAB_CALL_BARRIER);
}

/* The kind of calls behind this call that must wait; earlier calls make `held` wait. A copied call that itself waits
 * only for its number keeps back only calls with numbers. */
enum { STAGING_NONE, STAGING_NUMBERED, STAGING_ALL };
static int staging_holds(const mlfab *ctx, const staging_call *c, int held) {
  int copied = c->state == STAGING_FILLING && !c->mark, own = STAGING_ALL;
  if (c->state == STAGING_RUNNING || c->state == STAGING_LANDING || c->state == STAGING_ENDED)
    own = STAGING_NONE;
  else if (c->state == STAGING_DIRECT && ctx->direct->fenced(c->direct))
    own = STAGING_NUMBERED;
  else if (copied && held == STAGING_NUMBERED && staging_is_numbered(c->call.kind))
    own = STAGING_NUMBERED;
  return own > held ? own : held;
}

/* Returns 1 if no queued call keeps back a call of the kind *what. NULL: of any kind. */
static int staging_test_begun(mlfab *ctx, void *what) {
  const uint32_t *kind = what;
  int held = STAGING_NONE;
  for (const staging_call *c = ctx->staging->first; c; c = c->next)
    held = staging_holds(ctx, c, held);
  return held <= (kind && !staging_is_numbered(*kind) ? STAGING_NUMBERED : STAGING_NONE);
}

/* Waits for the turn of a call that has to find all earlier calls begun. */
static int staging_wait_turn(mlfab *ctx) {
  mlfab_error *last = &ctx->node->requests.last;
  if (staging_test_begun(ctx, NULL)) return 0;
  if (mlfab__context_is_told(ctx)) return MLFAB_ERR_STATE;
  uint64_t deadline = mlfab__add_sat(ctx->now_ns, ctx->timeout_ns);
  if (mlfab__context_until(ctx, deadline, staging_test_begun, NULL)) return 0;
  return mlfab__context_in_vain(
      ctx, mlfab__error(last, MLFAB_ERR_TIMEOUT, MLFAB_NO_RANK, 0, ctx->timeout_ns,
                        "the call waits for earlier ones, which wait for the device's stream"));
}

typedef struct staging_want {
  uint64_t bytes;
  staging_image *image;
  int code;
  mlfab_error *error;
} staging_want;

/* Returns 1 if there is room for a call, with its image if needed; or if there never will be (`code`). */
static int staging_test_room(mlfab *ctx, void *what) {
  staging_want *want = what;
  want->code = 0;
  if (ctx->staging->ncalls == STAGING_CALLS)
    want->code = MLFAB__FAIL(want->error, MLFAB_ERR_AGAIN,
                             "staging: %u calls are under way: end some requests with mlfab_wait "
                             "or mlfab_test",
                             (unsigned)STAGING_CALLS);
  else if (want->bytes > 0 && !want->image)
    want->code = staging_image_get(ctx, want->bytes, &want->image, want->error);
  return want->code != MLFAB_ERR_AGAIN;
}

static int staging_room(mlfab *ctx, staging_want *want, uint64_t deadline, int waits) {
  if (staging_test_room(ctx, want) || !waits) return want->code;
  if (mlfab__context_until(ctx, deadline, staging_test_room, want)) return want->code;
  if (ctx->closed)
    return MLFAB__FAIL(want->error, MLFAB_ERR_CLOSED, "the context was closed by another thread");
  want->error->code = MLFAB_ERR_TIMEOUT;
  return MLFAB_ERR_TIMEOUT;
}

static int staging_too_large(const staging_look *look) {
  return MLFAB__FAIL(look->error, MLFAB_ERR_LIMIT,
                     "%s: %llu bytes of device memory, but staging_bytes is %llu", look->what,
                     (unsigned long long)look->bytes, (unsigned long long)look->s->most);
}

/* Looks at the buffers, and refuses calls that cannot be staged. */
static int staging_check(mlfab *ctx, const mlfab_call *call, int waits, mlfab_request *request_p,
                         staging_look *look) {
  staging *s = ctx->staging;
  /* The node reports mistakes in the call itself. */
  if (mlfab__node_visit(ctx->node, call, request_p, staging_look_at, look, look->error)) return 0;
  if (look->code) return look->code;
  look->snapshot = call->kind == MLFAB_CALL_PUSH_SPARSE ||
                   (call->kind == MLFAB_CALL_PUSH && !waits && look->read <= STAGING_SMALL);
  if (look->snapshot && (look->foreign > 0 || !staging_test_begun(ctx, NULL))) {
    look->buffers = look->foreign = look->pinned = 0;
    look->bytes = look->read = 0;
    (void)mlfab__node_visit(ctx->node, call, request_p, staging_look_at, look, look->error);
  }
  if (look->code) return look->code;
  if (look->foreign > 0 && s->broken)
    return MLFAB__FAIL(look->error, MLFAB_ERR_DEVICE, "%s: the device has failed before: %s",
                       look->what, s->device->text(s->self, s->broken));
  if (look->bytes <= s->most || look->direct) return 0;
  return staging_too_large(look);
}

/* Makes the call with its image and its request. */
static int staging_make(mlfab *ctx, const mlfab_call *call, staging_look *look, int waits,
                        staging_call **call_p) {
  staging *s = ctx->staging;
  mlfab__requests *table = &ctx->node->requests;
  staging_want want = {.bytes = look->direct ? 0 : look->bytes, .error = look->error};
  size_t ignored;
  uint64_t began_ns = ctx->now_ns, timeout_ns = staging_timeout(call, &ignored);
  timeout_ns = timeout_ns ? timeout_ns : table->timeout_ns;
  const uint64_t deadline = timeout_ns ? mlfab__add_sat(began_ns, timeout_ns) : MLFAB__NEVER;
  int code = staging_room(ctx, &want, deadline, waits);
  if (!code) code = mlfab__request_room(table, staging_request_kind(call->kind), look->error);
  staging_call *c = code ? NULL : staging_copy(ctx, call, look->buffers);
  if (!code && !c)
    code = MLFAB__FAIL(look->error, MLFAB_ERR_MEMORY, "%s: out of memory", look->what);
  if (code) {
    if (want.image) want.image->next = s->pool, s->pool = want.image;
    return code;
  }
  c->image = want.image;
  c->began_ns = began_ns;
  c->deadline_ns = deadline;
  *call_p = c;
  if (!look->direct) return 0;
  c->state = STAGING_DIRECT;
  c->direct = ctx->direct->begin(ctx, &c->call, c->deadline_ns);
  if (c->direct) return 0;
  mlfab__free(&ctx->env, c->copied, c->copied_bytes);
  mlfab__free(&ctx->env, c, sizeof *c);
  return MLFAB__FAIL(look->error, MLFAB_ERR_MEMORY, "%s: out of memory", look->what);
}

/* Puts the call into the list, with a request if the caller wants one, and begins to copy. */
static void staging_queue(mlfab *ctx, staging_call *c, mlfab_request *request_p, int snapshot) {
  staging *s = ctx->staging;
  mlfab__requests *table = &ctx->node->requests;
  *s->last = c;
  s->last = &c->next;
  s->ncalls++;
  if (request_p) {
    /* There is room. This file keeps the deadline: no role knows this request. */
    mlfab__request *outer =
        mlfab__request_open(table, staging_request_kind(c->call.kind), UINT32_MAX, c->began_ns, 0);
    outer->deadline_ns = MLFAB__NEVER;
    mlfab__request_blame(outer, MLFAB_NO_RANK, 0,
                         ", as earlier work on the device's stream is not over");
    *request_p = c->outer = outer->id;
  }
  int number = c->direct ? 0 : staging_fill(s, c, snapshot);
  if (number) staging_fail_device(ctx, c, "copying from device memory", number);
}

/* Gives the buffers of a call their places in its image. Returns 0, or look->code. */
static int staging_place(mlfab *ctx, staging_call *c, staging_look *look) {
  look->to = c->buffers;
  look->room = c->nbuffers;
  look->image = c->image;
  look->buffers = look->foreign = look->pinned = 0;
  look->bytes = look->read = 0;
  (void)mlfab__node_visit(ctx->node, &c->call, &c->outer, staging_look_at, look, look->error);
  if (!look->code && staging_overlaps(c->buffers, c->nbuffers))
    look->code = MLFAB__FAIL(look->error, MLFAB_ERR_ARGUMENT,
                             "%s: two buffers overlap, and one is written", look->what);
  if (look->code) return look->code;
  c->pinned = look->pinned;
  qsort(c->buffers, c->nbuffers, sizeof *c->buffers, staging_places);
  staging_cut(ctx->staging, c, look->bytes);
  return 0;
}

static int staging_begin(mlfab *ctx, const mlfab_call *call, int waits, mlfab_request *request_p,
                         int *taken_p) {
  mlfab_error error;
  staging_call *c = NULL;
  staging_look look = {.s = ctx->staging, .error = &error};
  const char *name = call->size >= sizeof *call ? staging_name(call->kind) : NULL;
  uint32_t kind = call->kind;
  look.what = name ? name : "a call";
  if (!name) return staging_wait_turn(ctx);
  look.direct = ctx->direct && request_p && ctx->direct->wants(ctx, call);
  int code = ctx->closed ? 0 : staging_check(ctx, call, waits, request_p, &look);
  int plain = look.foreign == 0 && !look.direct;
  if (!code && plain && staging_test_begun(ctx, &kind)) return 0;
  if (!code && call->options && *(const uint32_t *)call->options < sizeof(uint32_t)) return 0;
  *taken_p = 1;
  if (!code) code = staging_make(ctx, call, &look, waits, &c);
  if (code) return mlfab__node_return(ctx->node, code, &error);
  if (!c->direct && staging_place(ctx, c, &look)) {
    c->next = NULL;
    *ctx->staging->last = c; /* removed at once */
    ctx->staging->last = &c->next;
    ctx->staging->ncalls++;
    staging_remove(ctx, c);
    return mlfab__node_return(ctx->node, look.code, &error);
  }
  staging_queue(ctx, c, request_p, look.snapshot);
  return 0;
}

/* --- moving --- */

/* May the call begin with the chunks that are copied? */
static int staging_may_feed(const mlfab *ctx, const staging_call *c) {
  return c->filled > 0 && c->call.kind == MLFAB_CALL_PUSH &&
         mlfab__push_may_lack(ctx->node->parts->worker, c->call.bufs, c->call.n, c->call.options);
}

/* Tells the worker which bytes of the image are missing, for this request, or for the push that begins next (0). */
static void staging_feed(mlfab *ctx, const staging_call *c, mlfab_request inner) {
  const uint8_t *from = c->image->at + c->filled * c->chunk, *to = c->image->at + c->image->bytes;
  mlfab__push_lacks(ctx->node->parts->worker, inner, c->feeds ? from : NULL, to);
}

/* Begins the call in its turn; if it `feeds`, before all copies are over. Returns 0 if it cannot begin now. */
static int staging_run(mlfab *ctx, staging_call *c, int feeds) {
  mlfab_request inner = 0;
  staging_set_timeout(ctx, c);
  c->feeds = feeds;
  if (feeds) staging_feed(ctx, c, 0);
  int code = mlfab__node_submit(ctx->node, &c->call, ctx->now_ns, &inner, NULL);
  if (feeds) mlfab__push_lacks(ctx->node->parts->worker, 0, NULL, NULL);
  if (code == MLFAB_ERR_AGAIN && !ctx->closed) return 0;
  if (code) {
    const mlfab_error error = ctx->node->requests.last;
    staging_end_as(ctx, c, code, error.rank, error.is_server, error.text);
    return 1;
  }
  c->inner = inner;
  c->state = STAGING_RUNNING;
  c->lands = c->nchunks > 1 && c->call.kind == MLFAB_CALL_PULL &&
             mlfab__pull_watch(ctx->node->parts->worker, inner, staging_arrives, c);
  return 1;
}

/* Cancels a call under which the device has failed; staging_ran tells the reason. */
static void staging_break(mlfab *ctx, staging_call *c, const char *what, int number) {
  MLFAB__FAIL(&c->why, MLFAB_ERR_DEVICE, "%s: %s: %s", staging_name(c->call.kind), what,
              ctx->staging->device->text(ctx->staging->self, number));
  c->feeds = c->lands = 0;
  (void)mlfab_node_cancel(ctx->node, c->inner, ctx->now_ns);
}

/* Copies while the call goes on. Returns 1 if anything moved. */
static int staging_overlap(mlfab *ctx, staging_call *c) {
  staging *s = ctx->staging;
  const uint32_t before = c->filled;
  int number = 0, moved = 0;
  int reached = c->feeds ? staging_filled(s, c) : c->lands ? staging_reached(s, c) : 0;
  if (reached > 0 && c->lands) number = staging_land(s, c, 0, &moved);
  if (reached < 0 || number) {
    const char *what = c->feeds ? "copying from device memory" : "copying to device memory";
    staging_break(ctx, c, what, reached < 0 ? -reached : number);
    return 1;
  }
  if (!c->feeds || (reached == 0 && c->filled == before)) return moved;
  c->feeds = reached == 0;
  staging_feed(ctx, c, c->inner);
  (void)mlfab__node_return(ctx->node, 0, NULL); /* a server in this node takes its bytes now */
  return 1;
}

/* Takes the failure of the call on the image, which staging_break may have cancelled. */
static void staging_failed(mlfab *ctx, staging_call *c, int code, const mlfab_error *error) {
  char text[MLFAB__TEXT_MAX], waited[24];
  if (c->why.code) {
    staging_tell(ctx, c, c->why.code, MLFAB_NO_RANK, 0, c->why.text);
  } else if (c->feeds && code == MLFAB_ERR_TIMEOUT) {
    snprintf(text, sizeof text,
             "%s: the deadline passed after %s: the device has not copied all of it; no server "
             "applies it",
             staging_name(c->call.kind), mlfab__duration(waited, ctx->now_ns - c->began_ns));
    staging_tell(ctx, c, code, MLFAB_NO_RANK, 0, text);
  } else {
    staging_tell(ctx, c, code, error->rank, error->is_server, error->text);
  }
  staging_order(ctx->staging, c); /* the buffers belong to the caller again */
  c->state = STAGING_ENDED;
}

/* Takes the end of the call on the image. */
static void staging_ran(mlfab *ctx, staging_call *c) {
  staging *s = ctx->staging;
  mlfab_result result;
  int done = 0, writes = 0;
  memset(&result, 0, sizeof result);
  int code = mlfab_node_test(ctx->node, c->inner, &done, &result);
  const mlfab_error error = ctx->node->requests.last;
  mlfab__request *outer = mlfab__request_find(&ctx->node->requests, c->outer);
  c->inner = 0;
  c->lands = 0;
  if (outer) outer->result = result;
  for (uint32_t i = 0; i < c->nbuffers; i++) writes |= c->buffers[i].of.out_bytes > 0;
  if (code || result.status || c->why.code) {
    staging_failed(ctx, c, code ? code : result.status, &error);
  } else if (!writes) {
    staging_tell(ctx, c, 0, MLFAB_NO_RANK, 0, "");
    c->state = STAGING_ENDED;
  } else {
    int number = staging_land(s, c, 1, NULL);
    c->state = STAGING_LANDING;
    if (number) staging_fail_device(ctx, c, "copying to device memory", number);
  }
}

/* Ends a call that does not run on its image, if its deadline has passed. */
static int staging_expire(mlfab *ctx, staging_call *c) {
  char text[MLFAB__TEXT_MAX], waited[24];
  const char *why = "earlier calls have not begun, or there is no room for this one";
  if (ctx->now_ns < c->deadline_ns) return 0;
  if (c->mark) why = "earlier work on the device's stream is not over";
  if (c->state == STAGING_LANDING) why = "it was carried out, but results are not copied yet";
  if (c->state == STAGING_DIRECT) why = ctx->direct->why(c->direct);
  snprintf(text, sizeof text, "%s: the deadline passed after %s: %s", staging_name(c->call.kind),
           mlfab__duration(waited, ctx->now_ns - c->began_ns), why);
  staging_end(ctx, c, MLFAB_ERR_TIMEOUT, text);
  return 1;
}

/* Returns 1 if a call that will end by itself has an image. */
static int staging_images_return(const staging *s) {
  for (const staging_call *c = s->first; c; c = c->next)
    if (c->image &&
        (c->state == STAGING_RUNNING || c->state == STAGING_LANDING || c->state == STAGING_ENDED))
      return 1;
  return 0;
}

/* Makes a call of DIRECT go by the host. Returns 0 if there is no room for it yet. */
static int staging_stage(mlfab *ctx, staging_call *c) {
  staging *s = ctx->staging;
  mlfab_error error;
  staging_look look = {.s = s, .error = &error, .what = staging_name(c->call.kind)};
  int code = mlfab__node_visit(ctx->node, &c->call, &c->outer, staging_look_at, &look, &error);
  if (!code) code = look.code;
  if (!code && look.bytes > s->most) code = staging_too_large(&look);
  if (!code && look.bytes > 0) code = staging_image_get(ctx, look.bytes, &c->image, &error);
  if (code == MLFAB_ERR_AGAIN && staging_images_return(s)) return staging_expire(ctx, c);
  if (!code) code = staging_place(ctx, c, &look);
  if (code) {
    staging_end(ctx, c, code, error.text);
    return 1;
  }
  c->fence = ctx->direct->fence(c->direct);
  c->state = STAGING_FILLING;
  int number = staging_fill(s, c, 0);
  if (number) staging_fail_device(ctx, c, "copying from device memory", number);
  return 1;
}

static int staging_direct(mlfab *ctx, staging_call *c, int first) {
  mlfab_error error;
  switch (ctx->direct->step(ctx, c->direct, first, &c->inner, &error)) {
    case MLFAB__DIRECT_WAITS:
      return c->inner ? 0 : staging_expire(ctx, c);
    case MLFAB__DIRECT_MOVED:
      return 1;
    case MLFAB__DIRECT_STAGED:
      return staging_stage(ctx, c);
    case MLFAB__DIRECT_OVER:
      staging_tell(ctx, c, 0, MLFAB_NO_RANK, 0, "");
      break;
    default:
      staging_tell(ctx, c, error.code, error.rank, error.is_server, error.text);
  }
  ctx->direct->leave(ctx, c->direct);
  c->state = STAGING_ENDED;
  return 1;
}

/* Makes one step of a call. `first`: no earlier call waits for its turn. Returns 1 if it moved. */
static int staging_step(mlfab *ctx, staging_call *c, int first) {
  staging *s = ctx->staging;
  int reached = 0;
  switch (c->state) {
    case STAGING_FILLING:
      reached = staging_filled(s, c);
      if (reached < 0)
        return staging_fail_device(ctx, c, "copying from device memory", -reached), 1;
      if (staging_expire(ctx, c)) return 1;
      return first && (reached || staging_may_feed(ctx, c)) && staging_run(ctx, c, !reached);
    case STAGING_RUNNING:
      if (staging_overlap(ctx, c)) return 1;
      if (!mlfab__context_is_over(ctx, &c->inner)) return 0;
      return staging_ran(ctx, c), 1;
    case STAGING_LANDING:
      reached = staging_reached(s, c);
      if (reached < 0) return staging_fail_device(ctx, c, "copying to device memory", -reached), 1;
      if (reached == 0) return staging_expire(ctx, c);
      staging_tell(ctx, c, 0, MLFAB_NO_RANK, 0, "");
      c->state = STAGING_ENDED;
      return 1;
    case STAGING_DOOMED:
      if (!first || mlfab__node_forgo(ctx->node, &c->call, &c->why, ctx->now_ns) == MLFAB_ERR_AGAIN)
        return 0;
      c->state = STAGING_ENDED;
      return 1;
    case STAGING_DIRECT:
      return staging_direct(ctx, c, first);
    default:
      return 0;
  }
}

/* Returns 1 if this device does no more work for the call. */
static int staging_quiet(mlfab *ctx, staging_call *c) {
  return staging_reached(ctx->staging, c) != 0 && !c->mark &&
         (!c->direct || ctx->direct->quiet(ctx, c->direct));
}

static int staging_move(mlfab *ctx) {
  staging *s = ctx->staging;
  int moved = 0, held = STAGING_NONE;
  staging_call *next;
  if (!s->first || ctx->closed) return 0;
  s->behind = 0;
  for (staging_call *c = s->first; c; c = next) {
    next = c->next;
    int free = staging_is_numbered(c->call.kind) ? STAGING_NONE : STAGING_NUMBERED;
    while (staging_step(ctx, c, held <= free)) moved = 1;
    held = staging_holds(ctx, c, held);
    if (c->state == STAGING_ENDED && staging_quiet(ctx, c)) {
      staging_remove(ctx, c);
      moved = 1;
    }
  }
  return moved;
}

/* --- functions for the context --- */

static int staging_copies(const mlfab *ctx) {
  for (const staging_call *c = ctx->staging->first; c; c = c->next)
    if (c->mark || c->state == STAGING_FILLING || (c->direct && !c->inner)) return 1;
  return 0;
}

static staging_call *staging_find(const mlfab *ctx, mlfab_request outer) {
  staging_call *c = ctx->staging->first;
  while (c && c->outer != outer) c = c->next;
  return outer ? c : NULL;
}

static int staging_cancel(mlfab *ctx, mlfab_request request) {
  staging_call *c = staging_find(ctx, request);
  char text[96];
  if (!c) return 0;
  if (c->state == STAGING_RUNNING) {
    (void)mlfab_node_cancel(ctx->node, c->inner, ctx->now_ns);
    if (mlfab__context_is_over(ctx, &c->inner)) staging_ran(ctx, c);
  } else if (c->state == STAGING_DIRECT && c->inner) {
    (void)mlfab_node_cancel(ctx->node, c->inner, ctx->now_ns);
    (void)staging_direct(ctx, c, 1);
  } else if (c->state == STAGING_FILLING || c->state == STAGING_DIRECT) {
    snprintf(text, sizeof text, "%s: cancelled%s", staging_name(c->call.kind),
             c->state == STAGING_DIRECT ? "" : " before it had begun");
    staging_end(ctx, c, MLFAB_ERR_CANCELLED, text);
  }
  /* Else it has been carried out, and its results are being copied. */
  return 1;
}

static void staging_blame(mlfab *ctx, mlfab_request request) {
  const staging_call *c = staging_find(ctx, request);
  mlfab__request *outer = c ? mlfab__request_find(&ctx->node->requests, request) : NULL;
  const mlfab__request *inner =
      c && c->inner ? mlfab__request_find(&ctx->node->requests, c->inner) : NULL;
  if (outer && inner && !outer->done) outer->blame = inner->blame;
}

static uint32_t staging_updates(const mlfab *ctx) {
  uint32_t n = 0;
  for (const staging_call *c = ctx->staging->first; c; c = c->next)
    n += staging_request_kind(c->call.kind) == MLFAB__REQUEST_PUSH && c->state < STAGING_DOOMED;
  return n;
}

static int staging_refuse(mlfab *ctx, const void *memory, uint64_t bytes, const char *what,
                          mlfab_error *error) {
  const mlfab__extent extent = {.at = memory, .bytes = bytes};
  staging_look look = {.s = ctx->staging, .error = error, .what = what};
  int where = memory && bytes > 0 ? staging_where(&look, &extent) : MLFAB_MEMORY_HOST;
  if (look.code || where != MLFAB_MEMORY_DEVICE) return look.code;
  return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED, "%s: takes memory of the host only", what);
}

static const mlfab_device staging_none;

static const mlfab_device *staging_device(const mlfab *ctx, void **self_p) {
  *self_p = ctx->staging->self;
  return ctx->staging->device == &staging_none ? NULL : ctx->staging->device;
}

/* Copies that are under way have two heartbeats to end. */
static void staging_free(mlfab *ctx, int child) {
  staging *s = ctx->staging;
  const uint64_t until = mlfab__add_sat(mlfab__context_now(ctx), 2 * ctx->heartbeat_ns);
  const struct timespec pause = {0, STAGING_PAUSE_NS};
  while (s->first) {
    staging_call *c = s->first;
    s->behind = 0;
    /* In a child the device belongs to the parent. */
    while (!child && !staging_quiet(ctx, c) && !ctx->simulated && mlfab__context_now(ctx) < until) {
      nanosleep(&pause, NULL); /* with the lock: the context is being freed */
      s->behind = 0;
    }
    if (child) {
      if (c->image) mlfab__free(&ctx->env, c->image, sizeof *c->image);
      c->image = NULL;
      c->mark = c->later = c->fence = NULL;
      c->nchunks = 0;
      if (c->direct) ctx->direct->free(ctx, c->direct, 1);
      c->direct = NULL;
    }
    c->unknown |= c->mark != NULL;
    staging_remove(ctx, c);
  }
  while (s->pool) {
    staging_image *image = s->pool;
    s->pool = image->next;
    if (child)
      mlfab__free(&ctx->env, image, sizeof *image);
    else
      staging_unpin(s, &ctx->env, image);
  }
  if (ctx->direct) ctx->direct->close(ctx, child);
  if (!child && s->device->close) s->device->close(s->self);
  mlfab__free(&ctx->env, s, sizeof *s);
  ctx->staging = NULL;
  ctx->stager = NULL;
}

/* --- attaching --- */

static const mlfab__context_stager staging_functions = {
    staging_begin, staging_wait_turn, staging_move,   staging_copies, staging_cancel,
    staging_blame, staging_updates,   staging_refuse, staging_device, staging_free};

/* The first member that is missing, or NULL. */
static const char *staging_missing(const mlfab_device *d) {
  if (d->size < offsetof(mlfab_device, close) + sizeof d->close) return "size";
  if (!d->name) return "name";
  if (!d->where) return "where";
  if (!d->pin) return "pin";
  if (!d->unpin) return "unpin";
  if (!d->fence) return "fence";
  if (!d->after) return "after";
  if (!d->copy) return "copy";
  if (!d->mark) return "mark";
  if (!d->order) return "order";
  if (!d->poll) return "poll";
  if (!d->drop) return "drop";
  return d->text ? NULL : "text";
}

static int staging_open(mlfab *ctx, const mlfab_device *device) {
  staging *s = mlfab__alloc(&ctx->env, sizeof *s);
  if (!s) return MLFAB_ERR_MEMORY;
  s->device = device;
  s->last = &s->first;
  ctx->staging = s;
  ctx->stager = &staging_functions;
  return 0;
}

/* --- before a device is attached --- */

/* A program that contains code for a device has this function (gpu/mlfab_gpu.cu has it). It returns 1 for memory of a
 * device, which the host cannot read. Other programs lack it: then such memory stays undetected. */
#if defined(__ELF__) && (defined(__GNUC__) || defined(__clang__))
extern int mlfab_device_owns(const void *memory) __attribute__((__weak__));
#define STAGING_OWNS (&mlfab_device_owns)
#else
#define STAGING_OWNS ((int (*)(const void *))0)
#endif

static int staging_none_where(void *self, const void *memory, uint64_t bytes, char *text,
                              size_t room) {
  int (*owns)(const void *) = STAGING_OWNS;
  (void)self;
  (void)bytes;
  if (!owns || !owns(memory)) return MLFAB_MEMORY_HOST;
  snprintf(text, room,
           "it is in device memory, but this context has no device: call "
           "mlfab_gpu_attach or mlfab_device_attach");
  return MLFAB_ERR_ARGUMENT;
}

static const mlfab_device staging_none = {
    .size = sizeof staging_none, .name = "no device", .where = staging_none_where};

MLFAB__INTERNAL void mlfab__staging_guard(mlfab *ctx) {
  /* If memory for it is short, the context works, and device memory is a fault. */
  if (STAGING_OWNS && ctx->node->is_worker && !ctx->stager) (void)staging_open(ctx, &staging_none);
}

static int staging_attach(mlfab *ctx, const mlfab_device *device, void *self, uint64_t bytes) {
  mlfab_error *last = &ctx->node->requests.last;
  const char *missing = device ? staging_missing(device) : NULL;
  if (!device) return MLFAB__FAIL(last, MLFAB_ERR_ARGUMENT, "device_attach: device is NULL");
  if (missing)
    return MLFAB__FAIL(last, MLFAB_ERR_ARGUMENT, "device_attach: device.%s is not set", missing);
  if (ctx->stager && ctx->staging->device != &staging_none)
    return MLFAB__FAIL(last, MLFAB_ERR_STATE, "device_attach: %s is attached already",
                       ctx->staging->device->name);
  if (!ctx->node->is_worker)
    return MLFAB__FAIL(last, MLFAB_ERR_STATE, "device_attach: this node is not a worker");
  int code = ctx->stager ? 0 : staging_open(ctx, device);
  if (code) return MLFAB__FAIL(last, code, "device_attach: out of memory");
  ctx->staging->device = device;
  ctx->staging->self = self;
  ctx->staging->most = bytes ? mlfab__max(bytes, STAGING_GRAIN) : STAGING_DEFAULT;
  return 0;
}

MLFAB_API int mlfab_device_attach(mlfab *ctx, const mlfab_device *device, void *self,
                                  uint64_t staging_bytes) {
  CONTEXT_LOOK(ctx, staging_attach(ctx, device, self, staging_bytes));
}
