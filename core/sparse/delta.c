/* delta.c - the server role: finds changes in the model, and packs them for pulls. See server.h, version.h and
 * packet.h.
 *
 * It has the parameter filter and the tags (called while a commit writes), and the packets of an answer. Other files
 * decide when a pull is answered (serve.c), and keep its bytes unchanged (a pull pins blocks).
 *
 * A tag is the commit's number plus one, so that 0 means "none" and the first weights are 1; commits are sent in this
 * form. Tags are set while a commit is being prepared, piece by piece while the bytes are in the cache, with the number
 * that the commit will have. So the end of a commit costs nothing more. A pull in between sends such a piece with its
 * old bytes; the next pull has a smaller commit number, and sends it again. A refused commit leaves tags that are too
 * large. Both are harmless: a tag is at least the last commit that changed its grain. So an answer may combine the
 * present tags with the bytes of the pinned blocks: all changes up to the pinned commit are tagged, and later changes
 * come with the next pull.
 *
 * Source: TDF §3 (versioned store), §4.2 (P-SMP: changes set back are discarded). */
#include "sparse_apply.h"

#include "filter.h"
#include "../kernels/kernels.h"

#include <stdio.h>

enum {
  DELTA_TAGS_MAX = 65536,
  DELTA_WORDS = MLFAB__PACKET_ELEMENTS / 64,
  DELTA_OVERHEAD = MLFAB__PACKET_HEADER + 16, /* of a packet: header, and both kinds of padding */
  DELTA_PLAIN = 16 * 1024, /* minimum size for sending mostly changed bytes unpacked */
  DELTA_TAG_BYTES = 4,
  DELTA_LOOK = 64 /* grains searched in the first step */
};

/* --- a new model --- */

static int delta_share(double x) { return mlfab__finite(x) && x >= 0.0; }

MLFAB__INTERNAL int mlfab__sparse_check(const mlfab_model_options *options,
                                        const mlfab__layout *layout, mlfab_error *error) {
  uint32_t tags = options->tags;
  if (tags > DELTA_TAGS_MAX || (tags & (tags - 1)) != 0)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "tags is %u: not 0 or a power of two up to %d",
                       tags, DELTA_TAGS_MAX);
  if (options->pull_half > MLFAB_HALF_BF16)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "pull_half is %u: not one of MLFAB_HALF_*",
                       options->pull_half);
  if (!delta_share(options->change_threshold))
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "change_threshold is %g: not 0 or more, and finite",
                       options->change_threshold);
  if (!delta_share(options->change_decay))
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "change_decay is %g: not 0 or more, and finite",
                       options->change_decay);
  if (options->ghost && tags)
    return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED,
                       "not supported: ghost with tags: there are no bytes that change");
  int filtered = options->pull_half || options->change_threshold > 0.0;
  for (uint32_t i = 0; filtered && i < layout->ntensors; i++) {
    if (layout->tensors[i].dtype != MLFAB_I64) continue;
    return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED,
                       "not supported: int64 tensors (tensor %u) with %s", layout->tensors[i].id,
                       options->pull_half ? "pull_half (16-bit parameters)"
                                          : "change_threshold (a parameter filter)");
  }
  return 0;
}

/* The tags of a store's slices. */
typedef struct delta_tags {
  struct mlfab__store_tags base;
  mlfab__tags of[]; /* by slice */
} delta_tags;

MLFAB__INTERNAL mlfab__tags *mlfab__store_tags_of(const mlfab__store *store, uint32_t slice) {
  return &((delta_tags *)store->tags)->of[slice];
}

static size_t delta_tags_bytes(const mlfab__store *store) {
  return sizeof(delta_tags) + store->nslices * sizeof(mlfab__tags);
}

static void delta_tags_free(mlfab__env *env, mlfab__store *store) {
  for (uint32_t i = 0; i < store->nslices; i++)
    mlfab__tags_free(env, mlfab__store_tags_of(store, i));
  mlfab__free(env, store->tags, delta_tags_bytes(store));
  store->tags = NULL;
}

/* Called for a slice that has moved: its former changes are unknown. */
static void delta_tags_moved(mlfab__store *store, uint32_t slice) {
  mlfab__store_tags_of(store, slice)->base = mlfab__store_label(&store->slices[slice]);
}

/* Returns the grain size of a slice, which may have types of 4 and of 8 bytes. */
static uint64_t delta_grain(const mlfab__store *store, const mlfab__shard_slice *slice,
                            uint32_t elements) {
  const mlfab__layout *layout = store->layout;
  uint64_t last = slice->offset + slice->bytes - 1;
  /* Tensors with 8-byte types come first. */
  uint32_t first_width =
      mlfab__dtype_bytes((int)mlfab__layout_tensor_at(layout, slice->offset)->dtype);
  uint32_t last_width = mlfab__dtype_bytes((int)mlfab__layout_tensor_at(layout, last)->dtype);
  return mlfab__max((uint64_t)elements * last_width, first_width);
}

MLFAB__INTERNAL int mlfab__store_tag(mlfab__env *env, mlfab__store *store, uint32_t elements) {
  if (store->nslices == 0 || elements == 0) return 0;
  delta_tags *tags = mlfab__alloc(env, delta_tags_bytes(store));
  if (!tags) return MLFAB_ERR_MEMORY;
  tags->base = (struct mlfab__store_tags){delta_tags_free, delta_tags_moved};
  store->tags = &tags->base;
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__shard_slice *slice = &store->slices[i];
    if (mlfab__tags_init(env, &tags->of[i], slice->bytes, delta_grain(store, slice, elements)))
      return MLFAB_ERR_MEMORY;
  }
  return 0;
}

/* --- commits --- */

static int delta_open(mlfab__server *server, int ghost) {
  const mlfab_model_options *options = &server->options;
  server->watch = !ghost && (options->tags > 0 || options->change_threshold > 0.0 ||
                             server->config->change_filter != NULL);
  int code = server->watch || (options->pull_half && !ghost) ? mlfab__sparse_apply_room(server) : 0;
  return code ? code : mlfab__store_tag(server->env, &server->store, options->tags);
}

/* Marks the elements that differ; returns their number. */
static uint32_t delta_elements(uint32_t width, const uint8_t *before, const uint8_t *after,
                               uint32_t n, uint64_t *keep) {
  uint32_t changed = 0;
  memset(keep, 0, (size_t)(n + 63) / 64 * sizeof *keep);
  for (uint32_t i = 0; i < n; i++) {
    if (memcmp(before + (size_t)i * width, after + (size_t)i * width, width) == 0) continue;
    keep[i / 64] |= (uint64_t)1 << i % 64;
    changed++;
  }
  return changed;
}

/* Applies the user's filter: sets the changes back that the filter does not keep. */
static void delta_select(const mlfab__server *server, const mlfab__piece *piece, uint64_t t,
                         const uint8_t *before, uint8_t *after) {
  uint64_t marks[DELTA_WORDS], keep[DELTA_WORDS];
  uint32_t width = mlfab__dtype_bytes(piece->dtype);
  mlfab_filter_info info = {piece->tensor->id, (uint32_t)piece->dtype, piece->first, 0, t};
  for (uint64_t at = 0; at < piece->count; at += info.count, info.first += info.count) {
    const uint8_t *from = before + at * width;
    uint8_t *to = after + at * width;
    info.count = mlfab__min(piece->count - at, MLFAB__PACKET_ELEMENTS);
    if (delta_elements(width, from, to, (uint32_t)info.count, marks) == 0) continue;
    memcpy(keep, marks, (size_t)(info.count + 63) / 64 * sizeof *keep);
    server->config->change_filter(server->config->user, &info, to, from, keep);
    for (uint64_t i = 0; i < info.count; i++) {
      if (marks[i / 64] >> i % 64 & ~(keep[i / 64] >> i % 64) & 1)
        memcpy(to + i * width, from + i * width, width);
    }
  }
}

static void delta_piece(mlfab__server *server, const mlfab__piece *piece, const uint8_t *before,
                        uint8_t *after) {
  const mlfab_model_options *options = &server->options;
  const mlfab__shard_slice *slice = &server->store.slices[piece->slice];
  uint64_t t = server->clock.v_train + 1;
  if (options->change_threshold > 0.0 && piece->dtype != MLFAB_I64) {
    double tau = mlfab__filter_threshold(options->change_threshold, options->change_decay, t);
    mlfab__filter_change(piece->dtype, before, after, piece->count, tau);
  }
  if (server->config->change_filter) delta_select(server, piece, t, before, after);
  if (!server->store.tags) return;
  uint64_t at = (uint64_t)(piece->position - slice->first) * server->store.block_bytes + piece->at;
  mlfab__tags_mark(mlfab__store_tags_of(&server->store, piece->slice), before, after, at,
                   piece->bytes, mlfab__store_label(slice) + 1);
}

/* --- caches --- */

/* Iterates over the slices (local numbers) that a pull touches; MLFAB__NO_SLICE at the end. Begin with
 * zeros. */
typedef struct delta_walk {
  uint32_t segment, next;
} delta_walk;

static uint32_t delta_next(const mlfab__server *server, const mlfab__segment *segments, uint32_t n,
                           delta_walk *walk) {
  const uint32_t *local = server->store.local;
  for (; walk->segment < n; walk->segment++) {
    const mlfab__segment *s = &segments[walk->segment];
    uint32_t i = local[mlfab__layout_slice_at(&server->layout, s->offset)];
    uint32_t last = local[mlfab__layout_slice_at(&server->layout, s->offset + s->bytes - 1)];
    if (i < walk->next) i = walk->next;
    if (i > last) continue;
    walk->next = i + 1;
    return i;
  }
  return MLFAB__NO_SLICE;
}

/* The commits that a cache has of the touched slices, by local number. */
struct mlfab__pull_since {
  uint32_t room; /* for commits */
  int counts;    /* they belong to the model's present epoch */
  uint64_t commits[];
};

/* Handles a cache that is ahead of the slice. */
static int delta_future(mlfab__server *server, uint32_t worker, const mlfab__pull *in,
                        const mlfab__shard_slice *s, uint64_t since) {
  char text[128];
  snprintf(text, sizeof text,
           "a cache from the future: slice %u is at commit %llu, the cache at %llu", s->number,
           (unsigned long long)mlfab__store_label(s), (unsigned long long)since);
  mlfab__serve_fail(server, worker, in->request, MLFAB_ERR_ARGUMENT, text);
  return MLFAB_ERR_ARGUMENT;
}

static int delta_cache(mlfab__server *server, uint32_t worker, const mlfab__pull *in) {
  const uint64_t *sinces = server->lists->versions;
  delta_walk walk = {0, 0};
  uint32_t seen = 0, i;
  if (in->sinces == 0) return 0;
  while ((i = delta_next(server, server->lists->segments, in->segments, &walk)) !=
         MLFAB__NO_SLICE) {
    uint32_t at = in->sinces == 1 ? 0 : seen;
    seen++;
    if (at >= in->sinces) break;
    const mlfab__shard_slice *s = &server->store.slices[i];
    if (in->epoch == server->epoch && sinces[at] > mlfab__store_label(s))
      return delta_future(server, worker, in, s, sinces[at]);
  }
  if (in->sinces == 1 || seen == in->sinces) return 0;
  mlfab__server_drop(server, worker, MLFAB_ERR_FRAME,
                     "a PULL with another number of commits than of slices");
  return MLFAB_ERR_FRAME;
}

static void delta_forget(mlfab__server *server, mlfab__server_pull *pull) {
  mlfab__free(server->env, pull->since,
              sizeof *pull->since + pull->since->room * sizeof *pull->since->commits);
  pull->since = NULL;
}

static int delta_keep(mlfab__server *server, mlfab__server_pull *pull, const mlfab__pull *in) {
  const uint64_t *sinces = server->lists->versions;
  delta_walk walk = {0, 0};
  uint32_t n = server->store.nslices, seen = 0, i;
  if (pull->since) pull->since->counts = 0;
  if (in->sinces == 0 || in->epoch != server->epoch || !server->store.tags) return 0;
  if (pull->since && pull->since->room < n) delta_forget(server, pull);
  if (!pull->since) {
    pull->since = mlfab__alloc(server->env, sizeof *pull->since + n * sizeof *pull->since->commits);
    if (!pull->since) return MLFAB_ERR_MEMORY;
    pull->since->room = n;
  }
  pull->since->counts = 1;
  while ((i = delta_next(server, pull->segments, pull->segments_used, &walk)) != MLFAB__NO_SLICE)
    pull->since->commits[i] = sinces[in->sinces == 1 ? 0 : seen++];
  return 0;
}

/* --- packets --- */

/* A frame being filled: packets of a pinned slice, one after another. */
typedef struct delta_frame {
  const mlfab__server *server;
  const mlfab__server_pull *pull;
  const mlfab__tags *tags; /* NULL: sends everything */
  uint64_t since;
  uint8_t *out;
  uint32_t used, room;
  uint32_t plain; /* this many of the next bytes are better sent unpacked */
} delta_frame;

static uint32_t delta_log2(uint64_t x) {
  uint32_t log2 = 0;
  while (x >> log2 > 1) log2++;
  return log2;
}

/* Marks the changed grains of `elements` from byte `at` of the slice on; returns the maximum number of
 * elements in them. */
static uint64_t delta_mark(const delta_frame *f, uint64_t at, uint32_t elements,
                           uint32_t grain_log2, uint64_t *keep) {
  uint32_t grains = (elements + (1u << grain_log2) - 1) >> grain_log2;
  uint64_t kept = 0;
  mlfab__tags_bitmap(f->tags, f->since, at, grains, keep);
  for (uint32_t i = 0; i < (grains + 63) / 64; i++) kept += mlfab__bits(keep[i]);
  return mlfab__min(kept << grain_log2, elements);
}

/* Returns 1 if most of these bytes have changed: packets would save little, and both sides would search for it. */
static int delta_most(uint64_t changed, uint64_t of) { return 8 * changed > 7 * of; }

/* Returns 1 if these bytes are probably better sent as they are. Inside a host bytes cost little: packets cost as much
 * time as everything once the tags of the touched blocks are a quarter of its bytes. */
static int delta_plain(const delta_frame *f, uint64_t at, uint64_t end) {
  mlfab__tags_share share = mlfab__tags_estimate(f->tags, f->since, at, end);
  int local = f->server->peers[f->pull->worker].local && f->pull->spread == 0;
  return delta_most(share.grains, 256) ||
         (local && share.blocks * DELTA_TAG_BYTES * 4 > 256 * f->tags->grain_bytes);
}

/* Returns the maximum size of a packet. */
static uint64_t delta_bound(uint32_t elements, uint32_t grain_log2, uint64_t kept, uint32_t width) {
  uint32_t grains = (elements + (1u << grain_log2) - 1) >> grain_log2;
  return DELTA_OVERHEAD + (grains + 7) / 8 + kept * width;
}

/* Packs the changes at the beginning of a piece, which is at byte `at` of the slice. Returns the number of
 * elements covered, or 0 if no more fits. */
static uint32_t delta_pack(delta_frame *f, const mlfab__piece *piece, uint64_t at,
                           const uint8_t *values) {
  uint64_t keep[DELTA_WORDS];
  uint32_t width = mlfab__dtype_bytes(piece->dtype), room = f->room - f->used;
  int half = piece->dtype == MLFAB_I64 ? MLFAB_HALF_NONE : (int)f->server->options.pull_half;
  uint32_t sent = half == MLFAB_HALF_NONE ? width : 2;
  uint32_t elements = (uint32_t)mlfab__min(piece->count, MLFAB__PACKET_ELEMENTS);
  uint32_t fit = room > DELTA_OVERHEAD ? (room - DELTA_OVERHEAD) / sent : 0;
  mlfab__packet_shape shape = {piece->tensor->offset + piece->first * width, piece->dtype, half, 0,
                               elements};
  if (f->tags) {
    uint32_t log2 = delta_log2(f->tags->grain_bytes / width), grain = 1u << log2;
    uint32_t least = f->used > 0 ? elements / 8 : 0;
    int large = !f->server->options.pull_half && elements * width >= DELTA_PLAIN;
    if (large && delta_plain(f, at, at + elements * width)) {
      f->plain = elements * width;
      return 0;
    }
    uint64_t kept = delta_mark(f, at, elements, log2, keep);
    if (large && delta_most(kept, elements)) {
      f->plain = elements * width;
      return 0;
    }
    while (delta_bound(elements, log2, kept, sent) > room && elements > grain) {
      elements = elements / 2 > grain ? elements / 2 >> log2 << log2 : grain;
      if (elements < least) return 0;
      kept = delta_mark(f, at, elements, log2, keep);
    }
    if (delta_bound(elements, log2, kept, sent) <= room) {
      shape.grain_log2 = log2;
      shape.elements = elements;
      f->used += mlfab__packet_marked(f->out + f->used, &shape, values, keep, 1);
      return elements;
    }
    /* A single grain that is too large is cut only if it has a frame of its own. */
  }
  if (fit == 0 || (f->used > 0 && fit < elements)) return 0;
  shape.elements = (uint32_t)mlfab__min(elements, fit);
  f->used += mlfab__packet_dense(f->out + f->used, &shape, values);
  return shape.elements;
}

/* Returns the first byte from `at` to `end` that may have changed, or `end`. */
static uint64_t delta_seek(const delta_frame *f, uint64_t at, uint64_t end) {
  uint64_t begin = at, stop = at, step;
  if (!f->tags) return at;
  /* Doubles the step: only the beginning is needed. */
  for (step = DELTA_LOOK * f->tags->grain_bytes; at < end && begin == stop; step *= 2) {
    stop = mlfab__min(end, at + step);
    mlfab__tags_next(f->tags, f->since, at, stop, &begin, &stop);
    at = stop;
  }
  return begin;
}

/* Fills the frame with the changes from `at` to `end` of the pinned slice, as far as they fit; returns how
 * far it covers. */
static uint64_t delta_fill(delta_frame *f, uint32_t slice, uint64_t at, uint64_t end) {
  const mlfab__store *store = &f->server->store;
  const mlfab__shard_slice *s = &store->slices[slice];
  while ((at = delta_seek(f, at, end)) < end) {
    mlfab__piece piece;
    mlfab__store_piece(store, s->offset + at, end - at, &piece);
    const uint8_t *data = store->blocks[f->pull->pinned[piece.position - s->first]].data;
    uint32_t n = delta_pack(f, &piece, at, data + piece.at);
    if (n == 0) break;
    at += (uint64_t)n * mlfab__dtype_bytes(piece.dtype);
  }
  return at;
}

static uint64_t delta_answer(mlfab__server *server, const mlfab__server_pull *pull, uint64_t at,
                             uint64_t end, uint32_t *plain, mlfab__frame_out *frame) {
  uint32_t room = (uint32_t)mlfab__min(
                      mlfab__port_chunk(&server->port, pull->worker, server->config->chunk_bytes),
                      MLFAB__SPARSE_APPLY_ROOM) &
                  ~7u;
  delta_frame f = {server, pull, NULL, 0, server->packed, 0, room, 0};
  if (pull->since && pull->since->counts && pull->since->commits[pull->slice] > 0) {
    f.tags = mlfab__store_tags_of(&server->store, pull->slice);
    f.since = pull->since->commits[pull->slice];
  }
  if (server->store.ghost || (!f.tags && server->options.pull_half == MLFAB_HALF_NONE)) return 0;
  uint64_t upto = delta_fill(&f, pull->slice, at, end);
  if (upto == at && f.plain > 0) *plain = (uint32_t)mlfab__min(*plain, f.plain);
  frame->bulk = f.used > 0 ? f.out : NULL;
  frame->bulk_bytes = f.used;
  frame->token = 0;
  return upto - at;
}

static const mlfab__server_sparse delta_sparse = {mlfab__sparse_apply_codec,
                                                  mlfab__sparse_apply_room,
                                                  mlfab__sparse_check,
                                                  delta_open,
                                                  mlfab__sparse_apply_free,
                                                  mlfab__store_tag,
                                                  delta_piece,
                                                  delta_cache,
                                                  delta_keep,
                                                  delta_forget,
                                                  delta_answer};

MLFAB__INTERNAL void mlfab__sparse_attach(mlfab__server *server) { server->sparse = &delta_sparse; }
