/* sparse_push.c - the worker role: encodes and sends updates of which only some values are sent. See worker.h.
 *
 * A filter holds small values back in a residual of their tensor, which is added to the next update. The
 * caller gives a sparse update element by element. Both are encoded as packets (packet.h) when the push is
 * made, so that the caller may reuse its buffers. The packets of an update are in the order of the flat
 * model; those of a server are selected while sending.
 *
 * Encoding has three steps, so that an error changes nothing: check every value and mark those to send; allocate
 * memory; write the packets, and the rest into the residuals.
 *
 * A filtered update that no server applied keeps its packets for a retry, which sends them again and leaves the
 * residuals alone. Filtering the same buffers again would send the held-back values twice.
 *
 * Source: TDF §4.2, 4.3. */
#include "sparse_push.h"

#include "../kernels/packet.h"

#include "filter.h"
#include "sparse_apply.h"
#include "../kernels/kernels.h"

#include <float.h>
#include <math.h>

enum { SPARSE_PUSH_LEAST = 64 }; /* minimum of a packet's elements, whatever the frame size */

struct mlfab__sparse { /* a sparse update, as the caller passes it */
  uint32_t tensor;
  const uint64_t *indices;
  const void *values;
  uint64_t count;
};

/* The packets of an update. */
static mlfab__packets *sparse_push_of(const mlfab__worker *worker, const mlfab__outgoing *update) {
  return &worker->packets->of[update - worker->updates];
}

/* A part of an update for one packet: in one slice and one tensor. */
typedef struct sparse_push_piece {
  uint64_t offset; /* in the flat model, bytes */
  uint64_t first;  /* index of its first element in the tensor */
  uint32_t tensor; /* index in the layout */
  uint32_t n;
  int dtype;
  const uint8_t *data; /* the caller's */
} sparse_push_piece;

typedef struct sparse_push_walk {
  uint32_t source;
  uint64_t in_source;
} sparse_push_walk;

static uint64_t sparse_push_pad(uint64_t bytes) { return (bytes + 7) & ~(uint64_t)7; }

/* Returns the number of elements of a packet that always fits a frame. */
static uint64_t sparse_push_most(const mlfab__worker *worker, int dtype) {
  uint64_t room = (uint64_t)worker->config->chunk_bytes - MLFAB__PACKET_HEADER;
  uint64_t most = room * 8 / (8 * mlfab__dtype_bytes(dtype) + 1);
  return mlfab__max(SPARSE_PUSH_LEAST, mlfab__min(MLFAB__PACKET_ELEMENTS, most & ~(uint64_t)63));
}

/* Returns the bytes from `offset` to the end of the tensor or slice. */
static uint64_t sparse_push_left(const mlfab__worker *worker, const mlfab__tensor *tensor,
                                 uint64_t offset) {
  const mlfab__layout *layout = &worker->layout;
  const mlfab__slice *slice = &layout->slices[mlfab__layout_slice_at(layout, offset)];
  return mlfab__min(tensor->offset + tensor->bytes, slice->offset + slice->bytes) - offset;
}

static int sparse_push_next(const mlfab__worker *worker, const mlfab__outgoing *update,
                            sparse_push_walk *walk, sparse_push_piece *piece) {
  if (walk->source == update->nsources) return 0;
  const mlfab__source *source = &update->sources[walk->source];
  uint64_t offset = source->offset + walk->in_source;
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(&worker->layout, offset);
  uint32_t width = mlfab__dtype_bytes((int)tensor->dtype);
  uint64_t bytes = mlfab__min(sparse_push_left(worker, tensor, offset),
                              sparse_push_most(worker, (int)tensor->dtype) * width);
  bytes = mlfab__min(bytes, source->bytes - walk->in_source);
  piece->offset = offset;
  piece->first = (offset - tensor->offset) / width;
  piece->tensor = (uint32_t)(tensor - worker->layout.tensors);
  piece->n = (uint32_t)(bytes / width);
  piece->dtype = (int)tensor->dtype;
  piece->data = source->data + walk->in_source;
  walk->in_source += bytes;
  if (walk->in_source == source->bytes) {
    walk->source++;
    walk->in_source = 0;
  }
  return 1;
}

static uint32_t sparse_push_words(const sparse_push_piece *piece) { return (piece->n + 63) / 64; }

/* The tensor's filter with its residual, or NULL. */
static mlfab__sieve *sparse_push_sieve(const mlfab__worker *worker, uint32_t tensor) {
  mlfab__sieve *sieve = worker->packets->nsieves > 0 ? &worker->packets->sieves[tensor] : NULL;
  return sieve && sieve->residual ? sieve : NULL;
}

static uint8_t *sparse_push_residual(const mlfab__sieve *sieve, const sparse_push_piece *piece) {
  return sieve->residual + piece->first * mlfab__dtype_bytes(piece->dtype);
}

static void sparse_push_rule(const mlfab__worker *worker, const mlfab__sieve *sieve,
                             uint32_t tensor, uint64_t t, mlfab__filter_rule *rule) {
  const mlfab_filter *filter = &sieve->filter;
  const mlfab__tensor *its = &worker->layout.tensors[tensor];
  uint32_t names[2] = {worker->rank, its->id};
  memset(rule, 0, sizeof *rule);
  rule->dtype = (int)its->dtype;
  rule->seed = mlfab__hash(worker->config->seed, names, sizeof names);
  rule->t = t;
  if (sieve->leaves) return; /* the filter was removed: sends everything */
  rule->half = (int)filter->half;
  if (filter->threshold > 0.0) {
    rule->tau = mlfab__filter_threshold(filter->threshold, filter->decay, t);
    rule->p = filter->drop > 0.0 ? filter->drop : 1.0;
  }
}

/* --- memory --- */

static int sparse_push_marks_room(mlfab__worker *worker, uint64_t words) {
  struct mlfab__worker_packets *own = worker->packets;
  if (words <= own->mark_room) return 0;
  mlfab__free(worker->env, own->marks, own->mark_room * sizeof *own->marks);
  own->marks = mlfab__alloc_array(worker->env, words, sizeof *own->marks);
  own->mark_room = own->marks ? words : 0;
  return own->marks ? 0 : MLFAB_ERR_MEMORY;
}

static int sparse_push_packet_room(mlfab__worker *worker, const mlfab__outgoing *update,
                                   uint64_t bytes) {
  mlfab__packets *packets = sparse_push_of(worker, update);
  if (bytes <= packets->room) return 0;
  mlfab__free_aligned(worker->env, packets->data, packets->room);
  packets->data = mlfab__alloc_aligned(worker->env, bytes);
  packets->room = packets->data ? bytes : 0;
  return packets->data ? 0 : MLFAB_ERR_MEMORY;
}

static int sparse_push_no_memory(mlfab_error *error) {
  return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "push: out of memory for the packets of an update");
}

/* Returns the maximum size of a packet with `kept` values of `width` bytes. */
static uint64_t sparse_push_bound(uint32_t elements, uint64_t kept, uint32_t width) {
  if (kept == 0) return 0;
  uint64_t marks = mlfab__min(sparse_push_pad((elements + 7) / 8), sparse_push_pad(2 * kept));
  return MLFAB__PACKET_HEADER + marks + sparse_push_pad(kept * width);
}

/* --- filters --- */

static int sparse_push_refuse(const mlfab__worker *worker, const sparse_push_piece *piece,
                              const mlfab__filter_rule *rule, const uint8_t *residual,
                              mlfab_error *error) {
  uint32_t width = mlfab__dtype_bytes(piece->dtype), i = 0;
  for (uint64_t keep; i + 1 < piece->n; i++) {
    const uint8_t *g = piece->data + (size_t)i * width;
    int bad = rule ? mlfab__filter_mark(rule, g, residual + (size_t)i * width, piece->first + i, 1,
                                        &keep) == MLFAB__FILTER_REFUSED
                   : !mlfab__kernel_finite(piece->dtype, g, 1);
    if (bad) break;
  }
  return mlfab__error(error, MLFAB_ERR_NOT_FINITE, (int32_t)worker->rank, 0, 0,
                      "push: element %llu of tensor %u is NaN or infinite%s: nothing was sent",
                      (unsigned long long)(piece->first + i),
                      worker->layout.tensors[piece->tensor].id,
                      rule ? " (after adding its residual)" : "");
}

static int sparse_push_tops(const mlfab__sieve *sieve) {
  return !sieve->leaves && sieve->filter.top > 0.0;
}

/* Returns the words of all marks; *room_p: words of the largest choice of a tensor. */
static uint64_t sparse_push_count_words(const mlfab__worker *worker, const mlfab__outgoing *update,
                                        uint64_t *room_p) {
  uint64_t words = 0, first = 0;
  sparse_push_walk walk = {0, 0};
  sparse_push_piece piece;
  *room_p = 0;
  while (sparse_push_next(worker, update, &walk, &piece)) {
    const mlfab__sieve *sieve = sparse_push_sieve(worker, piece.tensor);
    if (!sieve) continue;
    if (piece.first == 0) first = words;
    words += sparse_push_words(&piece);
    if (!sparse_push_tops(sieve)) continue;
    uint64_t count = worker->layout.tensors[piece.tensor].count;
    *room_p = mlfab__max(*room_p, mlfab__filter_choice_words(piece.dtype, count, words - first));
  }
  return words;
}

/* The pieces of one filtered tensor, in order. */
typedef struct sparse_push_tour {
  sparse_push_walk walk; /* behind the piece */
  sparse_push_piece piece;
  uint64_t *marks; /* of the piece */
} sparse_push_tour;

/* Moves to the tensor's next piece, if there is one. */
static int sparse_push_tour_next(const mlfab__worker *worker, const mlfab__outgoing *update,
                                 sparse_push_tour *tour) {
  const sparse_push_piece *piece = &tour->piece;
  if (piece->first + piece->n == worker->layout.tensors[piece->tensor].count) return 0;
  tour->marks += sparse_push_words(piece);
  return sparse_push_next(worker, update, &tour->walk, &tour->piece);
}

/* Marks the largest elements of a tensor; `tour` is at its first piece, and afterwards at its last. `room`
 * is for the choice. */
static int sparse_push_look_top(const mlfab__worker *worker, const mlfab__outgoing *update,
                                const mlfab__filter_rule *rule, sparse_push_tour *tour,
                                uint64_t *room, mlfab_error *error) {
  const mlfab__sieve *sieve = sparse_push_sieve(worker, tour->piece.tensor);
  const sparse_push_tour first = *tour;
  sparse_push_piece *piece = &tour->piece;
  uint64_t count = worker->layout.tensors[piece->tensor].count;
  uint64_t k = (uint64_t)(sieve->filter.top * (double)count);
  mlfab__filter_choice choice;
  mlfab__filter_cut cut;
  k = mlfab__max(1, mlfab__min(k, count));
  mlfab__filter_choose(&choice, rule->dtype, piece->data, sieve->residual, count, k, room);
  do {
    if (!mlfab__filter_look(&choice, rule, piece->first, piece->n, tour->marks))
      return sparse_push_refuse(worker, piece, rule, sparse_push_residual(sieve, piece), error);
  } while (sparse_push_tour_next(worker, update, tour));
  if (mlfab__filter_settle(&choice, first.marks)) return 0;
  *tour = first;
  mlfab__filter_kth(rule->dtype, piece->data, sieve->residual, count, k, &cut);
  do {
    const uint8_t *residual = sparse_push_residual(sieve, piece);
    if (mlfab__filter_mark(rule, piece->data, residual, piece->first, piece->n, tour->marks) ==
        MLFAB__FILTER_REFUSED)
      return sparse_push_refuse(worker, piece, rule, residual, error);
    mlfab__filter_top(rule->dtype, piece->data, residual, piece->n, &cut, tour->marks);
  } while (sparse_push_tour_next(worker, update, tour));
  return 0;
}

/* Checks all values and marks those to be sent. Changes nothing else. `room` is for choices. */
static int sparse_push_look(const mlfab__worker *worker, const mlfab__outgoing *update, uint64_t t,
                            uint64_t *room, mlfab_error *error) {
  sparse_push_tour tour = {.marks = worker->packets->marks};
  sparse_push_piece *piece = &tour.piece;
  mlfab__filter_rule rule;
  while (sparse_push_next(worker, update, &tour.walk, piece)) {
    const mlfab__sieve *sieve = sparse_push_sieve(worker, piece->tensor);
    if (!sieve) {
      if (!mlfab__kernel_finite(piece->dtype, piece->data, piece->n))
        return sparse_push_refuse(worker, piece, NULL, NULL, error);
      continue;
    }
    sparse_push_rule(worker, sieve, piece->tensor, t, &rule);
    if (sparse_push_tops(sieve)) {
      int code = sparse_push_look_top(worker, update, &rule, &tour, room, error);
      if (code) return code;
    } else {
      const uint8_t *residual = sparse_push_residual(sieve, piece);
      if (mlfab__filter_mark(&rule, piece->data, residual, piece->first, piece->n, tour.marks) ==
          MLFAB__FILTER_REFUSED)
        return sparse_push_refuse(worker, piece, &rule, residual, error);
    }
    tour.marks += sparse_push_words(piece);
  }
  return 0;
}

/* Returns the maximum size of the packets of marked elements. */
static uint64_t sparse_push_size(const mlfab__worker *worker, const mlfab__outgoing *update) {
  const uint64_t *marks = worker->packets->marks;
  sparse_push_walk walk = {0, 0};
  sparse_push_piece piece;
  uint64_t bytes = 0;
  while (sparse_push_next(worker, update, &walk, &piece)) {
    const mlfab__sieve *sieve = sparse_push_sieve(worker, piece.tensor);
    uint32_t width = mlfab__dtype_bytes(piece.dtype), words = sparse_push_words(&piece), kept = 0;
    if (!sieve) {
      bytes += sparse_push_bound(piece.n, piece.n, width);
      continue;
    }
    for (uint32_t i = 0; i < words; i++) kept += mlfab__bits(marks[i]);
    bytes += sparse_push_bound(piece.n, kept, !sieve->leaves && sieve->filter.half ? 2 : width);
    marks += words;
  }
  return bytes;
}

/* Calls the user's filter for a piece; it can only clear marks. */
static void sparse_push_select(const mlfab__worker *worker, const mlfab__sieve *sieve,
                               const sparse_push_piece *piece, uint64_t t, uint64_t *marks) {
  uint64_t asked[MLFAB__PACKET_ELEMENTS / 64];
  uint32_t words = sparse_push_words(piece);
  mlfab_filter_info info = {worker->layout.tensors[piece->tensor].id, (uint32_t)piece->dtype,
                            piece->first, piece->n, t};
  memcpy(asked, marks, words * sizeof *marks);
  sieve->filter.select(sieve->filter.user, &info, sparse_push_residual(sieve, piece), NULL, asked);
  for (uint32_t i = 0; i < words; i++) marks[i] &= asked[i];
}

/* The user's filter needs the sum as an array: adds the tensor's update to its residual, and clears marks.
 * `tour` is at the tensor's first piece. */
static void sparse_push_choose(const mlfab__worker *worker, const mlfab__outgoing *update,
                               const mlfab__sieve *sieve, sparse_push_tour tour, uint64_t t) {
  mlfab__kernel_add(tour.piece.dtype, sieve->residual, sieve->residual, tour.piece.data, 1.0,
                    worker->layout.tensors[tour.piece.tensor].count, 0);
  do {
    sparse_push_select(worker, sieve, &tour.piece, t, tour.marks);
  } while (sparse_push_tour_next(worker, update, &tour));
}

/* Writes the packet of a filtered piece, and updates its residual. */
static uint64_t sparse_push_emit(mlfab__worker *worker, const mlfab__sieve *sieve,
                                 const sparse_push_piece *piece, const mlfab__filter_rule *rule,
                                 const uint8_t *g, const uint64_t *marks, uint8_t *out) {
  mlfab__packet_shape shape = {piece->offset, piece->dtype, rule->half, 0, piece->n};
  uint8_t *values = out;
  mlfab_stats *stats = worker->stats;
  uint32_t bytes = mlfab__packet_begin(out, &shape, marks, &values);
  stats->filter_offered += piece->n;
  stats->filter_sent += mlfab__filter_emit(rule, g, sparse_push_residual(sieve, piece), piece->n,
                                           marks, values, &stats->filter_saturated);
  return bytes;
}

static void sparse_push_write(mlfab__worker *worker, mlfab__outgoing *update, uint64_t t) {
  mlfab__packets *packets = sparse_push_of(worker, update);
  sparse_push_tour tour = {.marks = worker->packets->marks};
  const sparse_push_piece *piece = &tour.piece;
  uint64_t at = 0;
  while (sparse_push_next(worker, update, &tour.walk, &tour.piece)) {
    const mlfab__sieve *sieve = sparse_push_sieve(worker, piece->tensor);
    mlfab__packet_shape shape = {piece->offset, piece->dtype, MLFAB_HALF_NONE, 0, piece->n};
    if (!sieve) {
      at += mlfab__packet_dense(packets->data + at, &shape, piece->data);
      continue;
    }
    mlfab__filter_rule rule;
    sparse_push_rule(worker, sieve, piece->tensor, t, &rule);
    int chosen = !sieve->leaves && sieve->filter.select;
    if (chosen && piece->first == 0) sparse_push_choose(worker, update, sieve, tour, t);
    at += sparse_push_emit(worker, sieve, piece, &rule, chosen ? NULL : piece->data, tour.marks,
                           packets->data + at);
    tour.marks += sparse_push_words(piece);
  }
  packets->bytes = at;
}

static void sparse_push_drop(mlfab__worker *worker, uint32_t tensor) {
  mlfab__sieve *sieve = &worker->packets->sieves[tensor];
  mlfab__free_aligned(worker->env, sieve->residual, worker->layout.tensors[tensor].bytes);
  memset(sieve, 0, sizeof *sieve);
  worker->packets->nsieves--;
}

/* Frees the residuals of removed filters, which this update has sent. */
static void sparse_push_leave(mlfab__worker *worker, const mlfab__outgoing *update) {
  sparse_push_walk walk = {0, 0};
  sparse_push_piece piece;
  while (worker->packets->nsieves > 0 && sparse_push_next(worker, update, &walk, &piece)) {
    const mlfab__sieve *sieve = sparse_push_sieve(worker, piece.tensor);
    if (sieve && sieve->leaves) sparse_push_drop(worker, piece.tensor);
  }
}

static int sparse_push_filter(mlfab__worker *worker, mlfab__outgoing *update, uint64_t t,
                              mlfab_error *error) {
  uint64_t room, words = sparse_push_count_words(worker, update, &room);
  if (sparse_push_marks_room(worker, words + room)) return sparse_push_no_memory(error);
  int code = sparse_push_look(worker, update, t, worker->packets->marks + words, error);
  if (code) return code;
  if (sparse_push_packet_room(worker, update, sparse_push_size(worker, update)))
    return sparse_push_no_memory(error);
  sparse_push_write(worker, update, t);
  sparse_push_leave(worker, update);
  worker->stats->filter_raw_bytes += update->bytes;
  worker->stats->filter_bytes += sparse_push_of(worker, update)->bytes;
  return 0;
}

static int sparse_push_wanted(const mlfab__worker *worker, const mlfab__source *sources,
                              uint32_t n) {
  for (uint32_t i = 0; i < n && worker->packets->nsieves > 0; i++) {
    uint64_t at = sources[i].offset, end = at + sources[i].bytes;
    while (at < end) {
      const mlfab__tensor *tensor = mlfab__layout_tensor_at(&worker->layout, at);
      if (sparse_push_sieve(worker, (uint32_t)(tensor - worker->layout.tensors))) return 1;
      at = tensor->offset + tensor->bytes;
    }
  }
  return 0;
}

static int sparse_push_sifts(const mlfab__worker *worker, const mlfab_buf *buf) {
  const mlfab__tensor *tensor = mlfab__layout_find(&worker->layout, buf->tensor);
  mlfab__source source = {0, worker->layout.bytes, NULL};
  if (tensor) source = (mlfab__source){tensor->offset, tensor->bytes, NULL};
  return sparse_push_wanted(worker, &source, 1);
}

/* --- setting filters --- */

static int sparse_push_check(const mlfab_filter *filter, mlfab_error *error) {
  const struct {
    const char *name;
    double value, most;
  } members[] = {{"half", (double)filter->half, MLFAB_HALF_BF16},
                 {"threshold", filter->threshold, HUGE_VAL},
                 {"decay", filter->decay, FLT_MAX},
                 {"drop", filter->drop, 1.0},
                 {"top", filter->top, 1.0}};
  for (uint32_t i = 0; i < MLFAB__COUNT(members); i++) {
    if (members[i].value >= 0.0 && members[i].value <= members[i].most) continue;
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "set_filter: %s is %g, not between 0 and %g",
                       members[i].name, members[i].value, members[i].most);
  }
  if (filter->drop > 0.0 && filter->drop < 1.0 && !(filter->threshold > 0.0))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "set_filter: drop is %g, but the threshold is 0 and selects nothing; "
                       "HUGE_VAL as the threshold selects everything",
                       filter->drop);
  return 0;
}

/* Refuses a filter that would never send a value of this tensor: every element is below the threshold, and
 * no draw spares any. */
static int sparse_push_check_sends(const mlfab_filter *filter, const mlfab__tensor *tensor,
                                   mlfab_error *error) {
  double most = tensor->dtype == MLFAB_F32 ? (double)FLT_MAX : DBL_MAX;
  int draws = filter->drop > 0.0 && filter->drop < 1.0;
  if (draws || filter->threshold <= most) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                     "set_filter: threshold %g holds every element of tensor %u back for ever; "
                     "with a drop below 1 some travel",
                     filter->threshold, tensor->id);
}

/* Allocates missing residuals, of one tensor or of all; all of them, or MEMORY and none. */
static int sparse_push_add(mlfab__worker *worker, uint32_t first, uint32_t end) {
  const mlfab__layout *layout = &worker->layout;
  if (!worker->packets->sieves)
    worker->packets->sieves =
        mlfab__alloc_array(worker->env, layout->ntensors, sizeof *worker->packets->sieves);
  if (!worker->packets->sieves) return MLFAB_ERR_MEMORY;
  for (uint32_t i = first; i < end; i++) {
    mlfab__sieve *sieve = &worker->packets->sieves[i];
    sieve->fresh = !sieve->residual;
    if (!sieve->fresh) continue;
    sieve->residual = mlfab__alloc_aligned(worker->env, layout->tensors[i].bytes);
    if (sieve->residual) {
      memset(sieve->residual, 0, layout->tensors[i].bytes);
      worker->packets->nsieves++;
      continue;
    }
    while (i-- > first) {
      if (worker->packets->sieves[i].fresh) sparse_push_drop(worker, i);
    }
    return MLFAB_ERR_MEMORY;
  }
  return 0;
}

static void sparse_push_drop_all(mlfab__worker *worker) {
  mlfab__env *env = worker->env;
  struct mlfab__worker_packets *own = worker->packets;
  mlfab__cache_free(worker);
  for (uint32_t i = 0; own->nsieves > 0 && i < worker->layout.ntensors; i++) {
    if (own->sieves[i].residual) sparse_push_drop(worker, i);
  }
  mlfab__free(env, own->sieves, worker->layout.ntensors * sizeof *own->sieves);
  mlfab__free(env, own->marks, own->mark_room * sizeof *own->marks);
  own->sieves = NULL;
  own->marks = NULL;
  own->mark_room = 0;
}

static void sparse_push_free(mlfab__worker *worker) {
  mlfab__env *env = worker->env;
  struct mlfab__worker_packets *own = worker->packets;
  for (uint32_t i = 0; i < MLFAB__WORKER_UPDATES; i++)
    mlfab__free_aligned(env, own->of[i].data, own->of[i].room);
  if (own->came) mlfab__free_aligned(env, own->came, MLFAB__PACKET_ROOM);
  mlfab__free(env, own, sizeof *own);
}

/* Packets go to every server. A server built without this group accepts no packet. */
static int sparse_push_check_servers(const mlfab__worker *worker, const char *what,
                                     mlfab_error *error) {
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (!worker->streams[s].packets && !worker->streams[s].absent)
      return mlfab__error(error, MLFAB_ERR_UNSUPPORTED, (int32_t)s, 1, 0,
                          "not supported: %s, at server %u, which was built without "
                          "MLFAB_WITH_SPARSE",
                          what, s);
  }
  return 0;
}

/* --- sparse updates --- */

static int sparse_push_check_list(const mlfab__worker *worker, const struct mlfab__sparse *sparse,
                                  mlfab_error *error) {
  int code = sparse_push_check_servers(worker, "sparse updates", error);
  if (code) return code;
  const mlfab__tensor *tensor = mlfab__layout_find(&worker->layout, sparse->tensor);
  if (!tensor)
    return MLFAB__FAIL(error, MLFAB_ERR_TENSOR, "push_sparse: there is no tensor %u",
                       sparse->tensor);
  if (worker->define.options.ghost)
    return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED,
                       "not supported: sparse updates of ghost tensors");
  if (sparse->count > 0 && (!sparse->indices || !sparse->values))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "push_sparse: %s is NULL",
                       sparse->indices ? "values" : "indices");
  if (sparse->count > 0 &&
      ((uintptr_t)sparse->indices % sizeof *sparse->indices != 0 ||
       (uintptr_t)sparse->values % mlfab__dtype_bytes((int)tensor->dtype) != 0))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "push_sparse: indices or values are not aligned to their elements");
  for (uint64_t i = 0; i < sparse->count; i++) {
    unsigned long long index = sparse->indices[i], at = i;
    if (index >= tensor->count)
      return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                         "push_sparse: index %llu at position %llu: tensor %u has %llu elements",
                         index, at, sparse->tensor, (unsigned long long)tensor->count);
    if (i > 0 && index <= sparse->indices[i - 1])
      return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                         "push_sparse: index %llu at position %llu does not ascend: %llu is "
                         "before it",
                         index, at, (unsigned long long)sparse->indices[i - 1]);
  }
  int dtype = (int)tensor->dtype;
  if (mlfab__kernel_finite(dtype, sparse->values, sparse->count)) return 0;
  uint64_t bad = 0;
  while (mlfab__kernel_finite(dtype, sparse->values, bad + 1)) bad++;
  return mlfab__error(error, MLFAB_ERR_NOT_FINITE, (int32_t)worker->rank, 0, 0,
                      "push_sparse: the value at position %llu, of element %llu of tensor %u, is "
                      "NaN or infinite: nothing was sent",
                      (unsigned long long)bad, (unsigned long long)sparse->indices[bad],
                      sparse->tensor);
}

/* Takes the values from position `at` on that fit one packet: returns the position after them. */
static uint64_t sparse_push_run(const mlfab__worker *worker, const mlfab__tensor *tensor,
                                const struct mlfab__sparse *sparse, uint64_t at,
                                mlfab__packet_shape *shape) {
  int dtype = (int)tensor->dtype;
  uint32_t width = mlfab__dtype_bytes(dtype);
  uint64_t first = sparse->indices[at], next = at + 1;
  uint64_t offset = tensor->offset + first * width;
  uint64_t end = first + mlfab__min(sparse_push_left(worker, tensor, offset) / width,
                                    sparse_push_most(worker, dtype));
  while (next < sparse->count && sparse->indices[next] < end) next++;
  *shape = (mlfab__packet_shape){offset, dtype, MLFAB_HALF_NONE, 0,
                                 (uint32_t)(sparse->indices[next - 1] - first + 1)};
  return next;
}

static int sparse_push_list(mlfab__worker *worker, mlfab__outgoing *update,
                            const struct mlfab__sparse *sparse, mlfab_error *error) {
  const mlfab__tensor *tensor = mlfab__layout_find(&worker->layout, sparse->tensor);
  uint32_t width = mlfab__dtype_bytes((int)tensor->dtype);
  uint64_t bytes = 0, most = 0, at, next;
  mlfab__packet_shape shape;
  for (at = 0; at < sparse->count; at = next) {
    next = sparse_push_run(worker, tensor, sparse, at, &shape);
    bytes += sparse_push_bound(shape.elements, next - at, width);
    most = mlfab__max(most, next - at);
  }
  if (sparse_push_marks_room(worker, (most + 1) / 2) ||
      sparse_push_packet_room(worker, update, bytes))
    return sparse_push_no_memory(error);
  uint32_t *indices = (uint32_t *)(void *)worker->packets->marks;
  mlfab__packets *packets = sparse_push_of(worker, update);
  packets->bytes = 0;
  for (at = 0; at < sparse->count; at = next) {
    next = sparse_push_run(worker, tensor, sparse, at, &shape);
    for (uint64_t i = at; i < next; i++)
      indices[i - at] = (uint32_t)(sparse->indices[i] - sparse->indices[at]);
    packets->bytes +=
        mlfab__packet_sparse(packets->data + packets->bytes, &shape, indices,
                             (const uint8_t *)sparse->values + at * width, (uint32_t)(next - at));
  }
  return 0;
}

/* --- sending packets --- */

/* Returns the size of the packet at this offset, and its server. */
static uint64_t sparse_push_packet(const mlfab__worker *worker, const mlfab__outgoing *update,
                                   uint64_t at, uint32_t *server_p) {
  mlfab__packet packet;
  const mlfab__packets *packets = sparse_push_of(worker, update);
  uint32_t bytes = mlfab__packet_open(packets->data + at, packets->bytes - at, &packet);
  assert(bytes > 0);
  *server_p = worker->layout.slices[mlfab__layout_slice_at(&worker->layout, packet.offset)].server;
  return bytes;
}

static uint64_t sparse_push_bytes(const mlfab__worker *worker, const mlfab__outgoing *update,
                                  uint32_t server, uint64_t most) {
  uint64_t sum = 0, bytes;
  uint32_t owner;
  for (uint64_t at = 0; at < sparse_push_of(worker, update)->bytes; at += bytes) {
    bytes = sparse_push_packet(worker, update, at, &owner);
    if (owner == server && sum + bytes > most) break;
    if (owner == server) sum += bytes;
  }
  return sum;
}

/* Finds the server's next adjacent packets at or behind `from`: at most a frame, and at most `most` bytes. Returns
 * their size, and their offset in *at_p. */
static uint64_t sparse_push_neighbours(const mlfab__worker *worker, const mlfab__outgoing *update,
                                       uint32_t server, uint64_t from, uint64_t most,
                                       uint64_t *at_p) {
  uint32_t chunk = mlfab__push_chunk_bytes(worker, update, server);
  uint64_t at = from, bytes = 0, sum = 0;
  uint32_t owner = server;
  for (; at < sparse_push_of(worker, update)->bytes; at += bytes) {
    bytes = sparse_push_packet(worker, update, at, &owner);
    if (owner == server) break;
  }
  *at_p = at;
  for (; at < sparse_push_of(worker, update)->bytes; at += bytes) {
    bytes = sparse_push_packet(worker, update, at, &owner);
    int fits = sum + bytes <= (sum > 0 ? mlfab__min(most, chunk) : most);
    if (owner != server || !fits) break;
    sum += bytes;
  }
  return sum;
}

static uint64_t sparse_push_next_piece(const mlfab__worker *worker, const mlfab__outgoing *update,
                                       uint32_t server, const mlfab__part *part, uint64_t most,
                                       const uint8_t **data_p) {
  uint64_t at;
  uint64_t bytes = sparse_push_neighbours(worker, update, server, part->in_source, most, &at);
  *data_p = bytes > 0 ? sparse_push_of(worker, update)->data + at : NULL;
  return bytes;
}

static void sparse_push_advance(const mlfab__worker *worker, const mlfab__outgoing *update,
                                uint32_t server, mlfab__part *part, uint64_t bytes) {
  uint64_t at;
  if (bytes == 0) return;
  sparse_push_neighbours(worker, update, server, part->in_source, 0, &at);
  part->in_source = at + bytes;
}

static int sparse_push_encode_list(mlfab__worker *worker, mlfab__outgoing *update,
                                   const mlfab__push_what *what, uint64_t t, mlfab_error *error) {
  (void)t;
  return sparse_push_list(worker, update, what->sparse, error);
}

static int sparse_push_encode_filtered(mlfab__worker *worker, mlfab__outgoing *update,
                                       const mlfab__push_what *what, uint64_t t,
                                       mlfab_error *error) {
  (void)what;
  return sparse_push_filter(worker, update, t, error);
}

static const mlfab__push_codec sparse_push_listed = {MLFAB__PUSH_PACKED,      0,
                                                     sparse_push_encode_list, sparse_push_bytes,
                                                     sparse_push_next_piece,  sparse_push_advance};
static const mlfab__push_codec sparse_push_filtered = {
    MLFAB__PUSH_PACKED, 1, sparse_push_encode_filtered, sparse_push_bytes, sparse_push_next_piece,
    sparse_push_advance};

static uint64_t sparse_push_shape(const mlfab__outgoing *update) {
  uint64_t shape = mlfab__hash(update->nsources, NULL, 0);
  for (uint32_t i = 0; i < update->nsources; i++) {
    uint64_t stretch[2] = {update->sources[i].offset, update->sources[i].bytes};
    shape = mlfab__hash(shape, stretch, sizeof stretch);
  }
  return shape;
}

static int sparse_push_choose_codec(mlfab__worker *worker, mlfab__outgoing *update,
                                    const mlfab__push_what *what, uint64_t retry_seq, int *again_p,
                                    mlfab_error *error) {
  uint64_t *shape = &sparse_push_of(worker, update)->shape;
  if (what->sparse) {
    update->codec = &sparse_push_listed;
    return 0;
  }
  *again_p = update->kept != 0 && update->kept == retry_seq;
  if (*again_p && *shape != sparse_push_shape(update))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "push: update %llu was of other tensors",
                       (unsigned long long)retry_seq);
  if (!*again_p && ((update->flags & MLFAB__PUSH_INIT) ||
                    !sparse_push_wanted(worker, update->sources, update->nsources)))
    return 0;
  /* Filtering the buffers again would send the residual twice. */
  if (retry_seq && !*again_p)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       "push: the packets of update %llu are not kept any more",
                       (unsigned long long)retry_seq);
  update->codec = &sparse_push_filtered;
  *shape = sparse_push_shape(update);
  return 0;
}

static double sparse_push_norm2(const mlfab__worker *worker, const struct mlfab__sparse *sparse) {
  const mlfab__tensor *tensor = mlfab__layout_find(&worker->layout, sparse->tensor);
  return mlfab__kernel_norm2_by(worker->config->kernels, (int)tensor->dtype, sparse->values,
                                sparse->count);
}

/* --- calls --- */

MLFAB__INTERNAL int mlfab__worker_push_sparse(mlfab__worker *worker, uint32_t tensor,
                                              const uint64_t *indices, const void *values,
                                              uint64_t count, const mlfab_push_options *options,
                                              uint64_t now_ns, mlfab_request *request_p,
                                              mlfab_error *error) {
  const struct mlfab__sparse sparse = {tensor, indices, values, count};
  mlfab_buf whole;
  mlfab__push_what what = {&whole, 1, &sparse};
  memset(&whole, 0, sizeof whole);
  whole.tensor = tensor;
  if (worker->stands) {
    int code = sparse_push_check_list(worker, &sparse, error);
    if (code) return code;
    whole.count = mlfab__layout_find(&worker->layout, tensor)->count;
  }
  return mlfab__push_start(worker, &what, options, now_ns, request_p, error);
}

MLFAB__INTERNAL int mlfab__worker_set_filter(mlfab__worker *worker, uint32_t tensor,
                                             const mlfab_filter *given, mlfab_error *error) {
  const mlfab__layout *layout = &worker->layout;
  mlfab_filter filter;
  memset(&filter, 0, sizeof filter);
  if (!worker->stands)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       "set_filter: there is no model yet: call mlfab_model_start first");
  if (given && given->size < offsetof(mlfab_filter, threshold))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "set_filter: filter.size is not set");
  const mlfab__tensor *one = tensor == MLFAB_ALL ? NULL : mlfab__layout_find(layout, tensor);
  if (!one && tensor != MLFAB_ALL)
    return MLFAB__FAIL(error, MLFAB_ERR_TENSOR, "set_filter: there is no tensor %u", tensor);
  uint32_t first = one ? (uint32_t)(one - layout->tensors) : 0,
           end = one ? first + 1 : layout->ntensors;
  if (!given) {
    for (uint32_t i = first; i < end; i++) {
      if (sparse_push_sieve(worker, i)) worker->packets->sieves[i].leaves = 1;
    }
    return 0;
  }
  memcpy(&filter, given, mlfab__min(given->size, sizeof filter));
  int code = sparse_push_check_servers(worker, "filters", error);
  if (!code) code = sparse_push_check(&filter, error);
  if (code) return code;
  if (worker->define.options.ghost)
    return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED, "not supported: filters on ghost tensors");
  for (uint32_t i = first; i < end; i++) {
    if (layout->tensors[i].dtype == MLFAB_I64)
      return MLFAB__FAIL(error, MLFAB_ERR_DTYPE, "set_filter: tensor %u is int64",
                         layout->tensors[i].id);
    code = sparse_push_check_sends(&filter, &layout->tensors[i], error);
    if (code) return code;
  }
  if (sparse_push_add(worker, first, end))
    return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "set_filter: out of memory for the residual");
  for (uint32_t i = first; i < end; i++) {
    worker->packets->sieves[i].filter = filter;
    worker->packets->sieves[i].leaves = 0;
  }
  return 0;
}

static const mlfab__worker_sparse sparse_push_table = {
    mlfab__sparse_check, mlfab__cache_open,        sparse_push_drop_all, sparse_push_free,
    sparse_push_sifts,   sparse_push_choose_codec, sparse_push_norm2,    mlfab__cache_take};

MLFAB__INTERNAL int mlfab__sparse_worker_attach(mlfab__worker *worker) {
  worker->packets = mlfab__alloc(worker->env, sizeof *worker->packets);
  if (!worker->packets) return MLFAB_ERR_MEMORY;
  worker->sparse = &sparse_push_table;
  return 0;
}
