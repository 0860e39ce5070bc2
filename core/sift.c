/* sift.c - the worker role: updates of which only some values travel. See worker.h.
 *
 * A filter holds back what is not worth sending in a residual of its tensor, which the next update
 * takes along; a sparse update is told by the caller element by element. Both become packets (pack.h)
 * when the push is made, so that the caller's buffers are its own again. The packets of an update
 * stand in the order of the flat model, whoever's they are: a server's are picked out on the way.
 *
 * Encoding goes in three steps, so that what fails changes nothing: look at every value and mark what
 * is sent; get the memory; write, and leave the rest to the residuals.
 *
 * A filtered update that was applied nowhere keeps its packets for a retry: it sends the same again,
 * and touches no residual. To filter the same buffers once more would send what was held back twice.
 *
 * Source: TDF §4.2, 4.3. */
#include "worker.h"

#include "filter.h"
#include "reduce.h"

#include <float.h>
#include <math.h>

enum { SIFT_LEAST = 64 }; /* elements of a packet, however short frames are */

/* A stretch that one packet can have: of one slice and one tensor. */
typedef struct sift_piece {
  uint64_t offset; /* in the flat model, bytes */
  uint64_t first;  /* its first element, counted in the tensor */
  uint32_t tensor; /* index in the layout */
  uint32_t n;
  int dtype;
  const uint8_t *data; /* the caller's */
} sift_piece;

typedef struct sift_walk {
  uint32_t source;
  uint64_t in_source;
} sift_walk;

static uint64_t sift_pad(uint64_t bytes) { return (bytes + 7) & ~(uint64_t)7; }

/* Elements of a packet that a frame can hold in any case. */
static uint64_t sift_most(const mlfab__worker *worker, int dtype) {
  uint64_t room = (uint64_t)worker->config->chunk_bytes - MLFAB__PACK_HEADER;
  uint64_t most = room * 8 / (8 * mlfab__dtype_bytes(dtype) + 1);
  return mlfab__max(SIFT_LEAST, mlfab__min(MLFAB__PACK_ELEMENTS, most & ~(uint64_t)63));
}

/* Bytes behind `offset` that are of the same tensor and slice. */
static uint64_t sift_left(const mlfab__worker *worker, const mlfab__tensor *tensor,
                          uint64_t offset) {
  const mlfab__layout *layout = &worker->layout;
  const mlfab__slice *slice = &layout->slices[mlfab__layout_slice_at(layout, offset)];
  return mlfab__min(tensor->offset + tensor->bytes, slice->offset + slice->bytes) - offset;
}

static int sift_next(const mlfab__worker *worker, const mlfab__outgoing *update, sift_walk *walk,
                     sift_piece *piece) {
  if (walk->source == update->nsources) return 0;
  const mlfab__source *source = &update->sources[walk->source];
  uint64_t offset = source->offset + walk->in_source;
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(&worker->layout, offset);
  uint32_t width = mlfab__dtype_bytes((int)tensor->dtype);
  uint64_t bytes =
      mlfab__min(sift_left(worker, tensor, offset), sift_most(worker, (int)tensor->dtype) * width);
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

static uint32_t sift_words(const sift_piece *piece) { return (piece->n + 63) / 64; }

/* The tensor's filter, or NULL. */
static mlfab__sieve *sift_sieve(const mlfab__worker *worker, uint32_t tensor) {
  mlfab__sieve *sieve = worker->nsieves > 0 ? &worker->sieves[tensor] : NULL;
  return sieve && sieve->residual ? sieve : NULL;
}

static uint8_t *sift_residual(const mlfab__sieve *sieve, const sift_piece *piece) {
  return sieve->residual + piece->first * mlfab__dtype_bytes(piece->dtype);
}

static void sift_rule(const mlfab__worker *worker, const mlfab__sieve *sieve, uint32_t tensor,
                      uint64_t t, mlfab__filter_rule *rule) {
  const mlfab_filter *filter = &sieve->filter;
  const mlfab__tensor *its = &worker->layout.tensors[tensor];
  uint32_t names[2] = {worker->rank, its->id};
  memset(rule, 0, sizeof *rule);
  rule->dtype = (int)its->dtype;
  rule->seed = mlfab__hash(worker->config->seed, names, sizeof names);
  rule->t = t;
  if (sieve->leaves) return; /* all of it */
  rule->half = (int)filter->half;
  if (filter->threshold > 0.0) {
    rule->tau = mlfab__filter_threshold(filter->threshold, filter->decay, t);
    rule->p = filter->drop > 0.0 ? filter->drop : 1.0;
  }
}

/* --- memory --- */

static int sift_marks_room(mlfab__worker *worker, uint64_t words) {
  if (words <= worker->mark_room) return 0;
  mlfab__free(worker->env, worker->marks, worker->mark_room * sizeof *worker->marks);
  worker->marks = mlfab__alloc_array(worker->env, words, sizeof *worker->marks);
  worker->mark_room = worker->marks ? words : 0;
  return worker->marks ? 0 : MLFAB_ERR_MEMORY;
}

static int sift_packet_room(mlfab__worker *worker, mlfab__outgoing *update, uint64_t bytes) {
  if (bytes <= update->packet_room) return 0;
  mlfab__free_aligned(worker->env, update->packets, update->packet_room);
  update->packets = mlfab__alloc_aligned(worker->env, bytes);
  update->packet_room = update->packets ? bytes : 0;
  return update->packets ? 0 : MLFAB_ERR_MEMORY;
}

static int sift_no_memory(mlfab_error *error) {
  return mlfab__error(error, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, 0, 0,
                      "push: out of memory for the packets of an update");
}

/* The most bytes of a packet that has `kept` of its elements, `width` bytes each. */
static uint64_t sift_bound(uint32_t elements, uint64_t kept, uint32_t width) {
  if (kept == 0) return 0;
  uint64_t marks = mlfab__min(sift_pad((elements + 7) / 8), sift_pad(2 * kept));
  return MLFAB__PACK_HEADER + marks + sift_pad(kept * width);
}

/* --- filters --- */

static int sift_refuse(const mlfab__worker *worker, const sift_piece *piece,
                       const mlfab__filter_rule *rule, const uint8_t *residual,
                       mlfab_error *error) {
  uint32_t width = mlfab__dtype_bytes(piece->dtype), i = 0;
  for (uint64_t keep; i + 1 < piece->n; i++) {
    const uint8_t *g = piece->data + (size_t)i * width;
    int bad = rule ? mlfab__filter_mark(rule, g, residual + (size_t)i * width, piece->first + i, 1,
                                        &keep) == MLFAB__FILTER_REFUSED
                   : !mlfab__reduce_finite(piece->dtype, g, 1);
    if (bad) break;
  }
  return mlfab__error(error, MLFAB_ERR_NOT_FINITE, (int32_t)worker->rank, 0, 0,
                      "push: element %llu of tensor %u is NaN or infinite%s: nothing was sent",
                      (unsigned long long)(piece->first + i),
                      worker->layout.tensors[piece->tensor].id,
                      rule ? ", what was held back before added" : "");
}

static uint64_t sift_count_words(const mlfab__worker *worker, const mlfab__outgoing *update) {
  uint64_t words = 0;
  sift_walk walk = {0, 0};
  sift_piece piece;
  while (sift_next(worker, update, &walk, &piece)) {
    if (sift_sieve(worker, piece.tensor)) words += sift_words(&piece);
  }
  return words;
}

/* Marks what is sent; *bytes_p: no more bytes become of it. Changes nothing else. */
static int sift_look(mlfab__worker *worker, const mlfab__outgoing *update, uint64_t t,
                     uint64_t *bytes_p, mlfab_error *error) {
  uint64_t *marks = worker->marks;
  sift_walk walk = {0, 0};
  sift_piece piece;
  mlfab__filter_rule rule;
  *bytes_p = 0;
  while (sift_next(worker, update, &walk, &piece)) {
    const mlfab__sieve *sieve = sift_sieve(worker, piece.tensor);
    uint32_t width = mlfab__dtype_bytes(piece.dtype);
    if (!sieve) {
      if (!mlfab__reduce_finite(piece.dtype, piece.data, piece.n))
        return sift_refuse(worker, &piece, NULL, NULL, error);
      *bytes_p += sift_bound(piece.n, piece.n, width);
      continue;
    }
    sift_rule(worker, sieve, piece.tensor, t, &rule);
    const uint8_t *residual = sift_residual(sieve, &piece);
    uint32_t kept = mlfab__filter_mark(&rule, piece.data, residual, piece.first, piece.n, marks);
    if (kept == MLFAB__FILTER_REFUSED) return sift_refuse(worker, &piece, &rule, residual, error);
    *bytes_p += sift_bound(piece.n, kept, rule.half ? 2 : width);
    marks += sift_words(&piece);
  }
  return 0;
}

/* Asks the user's own filter about a piece; it can only clear marks. */
static void sift_select(const mlfab__worker *worker, const mlfab__sieve *sieve,
                        const sift_piece *piece, uint64_t t, uint64_t *marks) {
  uint64_t asked[MLFAB__PACK_ELEMENTS / 64];
  uint32_t words = sift_words(piece);
  mlfab_filter_info info = {worker->layout.tensors[piece->tensor].id, (uint32_t)piece->dtype,
                            piece->first, piece->n, t};
  memcpy(asked, marks, words * sizeof *marks);
  sieve->filter.select(sieve->filter.user, &info, sift_residual(sieve, piece), NULL, asked);
  for (uint32_t i = 0; i < words; i++) marks[i] &= asked[i];
}

/* Filters that need all of a tensor: its update is added to the residual at once, and marks are
 * cleared. `walk` is behind the tensor's first piece. */
static void sift_choose(const mlfab__worker *worker, const mlfab__outgoing *update,
                        const mlfab__sieve *sieve, sift_walk walk, sift_piece piece, uint64_t t,
                        uint64_t *marks) {
  const mlfab_filter *filter = &sieve->filter;
  const mlfab__tensor *tensor = &worker->layout.tensors[piece.tensor];
  mlfab__filter_cut cut;
  mlfab__reduce_add(piece.dtype, sieve->residual, sieve->residual, piece.data, 1.0, tensor->count,
                    0);
  uint64_t k = (uint64_t)(filter->top * (double)tensor->count);
  if (filter->top > 0.0)
    mlfab__filter_kth(piece.dtype, sieve->residual, tensor->count,
                      mlfab__max(1, mlfab__min(k, tensor->count)), &cut);
  uint32_t index = piece.tensor;
  do {
    if (filter->top > 0.0)
      mlfab__filter_top(piece.dtype, sift_residual(sieve, &piece), piece.n, &cut, marks);
    if (filter->select) sift_select(worker, sieve, &piece, t, marks);
    marks += sift_words(&piece);
  } while (sift_next(worker, update, &walk, &piece) && piece.tensor == index);
}

/* Writes the packet of a filtered piece, and its residual. */
static uint64_t sift_emit(mlfab__worker *worker, const mlfab__sieve *sieve, const sift_piece *piece,
                          const mlfab__filter_rule *rule, const uint8_t *g, const uint64_t *marks,
                          uint8_t *out) {
  mlfab__pack_shape shape = {piece->offset, piece->dtype, rule->half, 0, piece->n};
  uint8_t *values = out;
  mlfab_stats *stats = worker->stats;
  uint32_t bytes = mlfab__pack_begin(out, &shape, marks, &values);
  stats->filter_offered += piece->n;
  stats->filter_sent += mlfab__filter_emit(rule, g, sift_residual(sieve, piece), piece->n, marks,
                                           values, &stats->filter_saturated);
  if (MLFAB__PLANTED(54)) memset(sift_residual(sieve, piece), 0, mlfab__dtype_bytes(piece->dtype));
  return bytes;
}

static void sift_write(mlfab__worker *worker, mlfab__outgoing *update, uint64_t t) {
  uint64_t *marks = worker->marks, at = 0;
  sift_walk walk = {0, 0};
  sift_piece piece;
  while (sift_next(worker, update, &walk, &piece)) {
    const mlfab__sieve *sieve = sift_sieve(worker, piece.tensor);
    mlfab__pack_shape shape = {piece.offset, piece.dtype, MLFAB_HALF_NONE, 0, piece.n};
    if (!sieve) {
      at += mlfab__pack_dense(update->packets + at, &shape, piece.data);
      continue;
    }
    mlfab__filter_rule rule;
    sift_rule(worker, sieve, piece.tensor, t, &rule);
    int chosen = !sieve->leaves && (sieve->filter.top > 0.0 || sieve->filter.select);
    if (chosen && piece.first == 0) sift_choose(worker, update, sieve, walk, piece, t, marks);
    at += sift_emit(worker, sieve, &piece, &rule, chosen ? NULL : piece.data, marks,
                    update->packets + at);
    marks += sift_words(&piece);
  }
  update->packet_bytes = at;
}

static void sift_drop(mlfab__worker *worker, uint32_t tensor) {
  mlfab__sieve *sieve = &worker->sieves[tensor];
  mlfab__free_aligned(worker->env, sieve->residual, worker->layout.tensors[tensor].bytes);
  memset(sieve, 0, sizeof *sieve);
  worker->nsieves--;
}

/* Residuals that the update has taken along to the last bit. */
static void sift_leave(mlfab__worker *worker, const mlfab__outgoing *update) {
  sift_walk walk = {0, 0};
  sift_piece piece;
  while (worker->nsieves > 0 && sift_next(worker, update, &walk, &piece)) {
    const mlfab__sieve *sieve = sift_sieve(worker, piece.tensor);
    if (sieve && sieve->leaves) sift_drop(worker, piece.tensor);
  }
}

MLFAB__INTERNAL int mlfab__sift_encode(mlfab__worker *worker, mlfab__outgoing *update, uint64_t t,
                                       mlfab_error *error) {
  uint64_t bytes;
  if (sift_marks_room(worker, sift_count_words(worker, update))) return sift_no_memory(error);
  int code = sift_look(worker, update, t, &bytes, error);
  if (code) return code;
  if (sift_packet_room(worker, update, bytes)) return sift_no_memory(error);
  sift_write(worker, update, t);
  sift_leave(worker, update);
  worker->stats->filter_raw_bytes += update->bytes;
  worker->stats->filter_bytes += update->packet_bytes;
  return 0;
}

MLFAB__INTERNAL int mlfab__sift_wanted(const mlfab__worker *worker, const mlfab__source *sources,
                                       uint32_t n) {
  for (uint32_t i = 0; i < n && worker->nsieves > 0; i++) {
    uint64_t at = sources[i].offset, end = at + sources[i].bytes;
    while (at < end) {
      const mlfab__tensor *tensor = mlfab__layout_tensor_at(&worker->layout, at);
      if (sift_sieve(worker, (uint32_t)(tensor - worker->layout.tensors))) return 1;
      at = tensor->offset + tensor->bytes;
    }
  }
  return 0;
}

/* --- setting filters --- */

static int sift_check(const mlfab_filter *filter, mlfab_error *error) {
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
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "set_filter: %s is %g, not between 0 and %g", members[i].name,
                        members[i].value, members[i].most);
  }
  if (filter->drop > 0.0 && filter->drop < 1.0 && !(filter->threshold > 0.0))
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "set_filter: drop is %g, but the threshold is 0 and selects nothing; "
                        "HUGE_VAL as the threshold selects everything",
                        filter->drop);
  return 0;
}

/* Refuses what would never let anything of this tensor travel: every element is below the threshold,
 * and the random policy spares none. */
static int sift_check_sends(const mlfab_filter *filter, const mlfab__tensor *tensor,
                            mlfab_error *error) {
  double most = tensor->dtype == MLFAB_F32 ? (double)FLT_MAX : DBL_MAX;
  int draws = filter->drop > 0.0 && filter->drop < 1.0;
  if (draws || filter->threshold <= most) return 0;
  return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                      "set_filter: threshold %g holds every element of tensor %u back for ever; "
                      "with a drop below 1 some travel",
                      filter->threshold, tensor->id);
}

/* The residuals that are missing, of one tensor or of all; without memory, none of them. */
static int sift_add(mlfab__worker *worker, uint32_t first, uint32_t end) {
  const mlfab__layout *layout = &worker->layout;
  if (!worker->sieves)
    worker->sieves = mlfab__alloc_array(worker->env, layout->ntensors, sizeof *worker->sieves);
  if (!worker->sieves) return MLFAB_ERR_MEMORY;
  for (uint32_t i = first; i < end; i++) {
    mlfab__sieve *sieve = &worker->sieves[i];
    sieve->fresh = !sieve->residual;
    if (!sieve->fresh) continue;
    sieve->residual = mlfab__alloc_aligned(worker->env, layout->tensors[i].bytes);
    if (sieve->residual) {
      memset(sieve->residual, 0, layout->tensors[i].bytes);
      worker->nsieves++;
      continue;
    }
    while (i-- > first) {
      if (worker->sieves[i].fresh) sift_drop(worker, i);
    }
    return MLFAB_ERR_MEMORY;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__worker_set_filter(mlfab__worker *worker, uint32_t tensor,
                                             const mlfab_filter *given, mlfab_error *error) {
  const mlfab__layout *layout = &worker->layout;
  mlfab_filter filter;
  memset(&filter, 0, sizeof filter);
  if (!worker->stands)
    return mlfab__error(error, MLFAB_ERR_STATE, MLFAB_NO_RANK, 0, 0,
                        "set_filter: before the model exists");
  if (given && given->size < offsetof(mlfab_filter, threshold))
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "set_filter: filter.size is not set");
  const mlfab__tensor *one = tensor == MLFAB_ALL ? NULL : mlfab__layout_find(layout, tensor);
  if (!one && tensor != MLFAB_ALL)
    return mlfab__error(error, MLFAB_ERR_TENSOR, MLFAB_NO_RANK, 0, 0,
                        "set_filter: there is no tensor %u", tensor);
  uint32_t first = one ? (uint32_t)(one - layout->tensors) : 0,
           end = one ? first + 1 : layout->ntensors;
  if (!given) {
    for (uint32_t i = first; i < end; i++) {
      if (sift_sieve(worker, i)) worker->sieves[i].leaves = 1;
    }
    return 0;
  }
  memcpy(&filter, given, mlfab__min(given->size, sizeof filter));
  int code = sift_check(&filter, error);
  if (code) return code;
  if (worker->define.ghost)
    return mlfab__error(error, MLFAB_ERR_UNSUPPORTED, MLFAB_NO_RANK, 0, 0,
                        "not supported: filters on ghost tensors");
  for (uint32_t i = first; i < end; i++) {
    if (layout->tensors[i].dtype == MLFAB_I64)
      return mlfab__error(error, MLFAB_ERR_DTYPE, MLFAB_NO_RANK, 0, 0,
                          "set_filter: tensor %u is int64", layout->tensors[i].id);
    code = sift_check_sends(&filter, &layout->tensors[i], error);
    if (code) return code;
  }
  if (sift_add(worker, first, end))
    return mlfab__error(error, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, 0, 0,
                        "set_filter: out of memory for what is held back");
  for (uint32_t i = first; i < end; i++) {
    worker->sieves[i].filter = filter;
    worker->sieves[i].leaves = 0;
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__sift_free(mlfab__worker *worker) {
  mlfab__env *env = worker->env;
  for (uint32_t i = 0; worker->nsieves > 0 && i < worker->layout.ntensors; i++) {
    if (worker->sieves[i].residual) sift_drop(worker, i);
  }
  mlfab__free(env, worker->sieves, worker->layout.ntensors * sizeof *worker->sieves);
  mlfab__free(env, worker->marks, worker->mark_room * sizeof *worker->marks);
  worker->sieves = NULL;
  worker->marks = NULL;
  worker->mark_room = 0;
}

/* --- sparse updates --- */

MLFAB__INTERNAL int mlfab__sift_check(const mlfab__worker *worker, const mlfab__sparse *sparse,
                                      mlfab_error *error) {
  const mlfab__tensor *tensor = mlfab__layout_find(&worker->layout, sparse->tensor);
  if (!tensor)
    return mlfab__error(error, MLFAB_ERR_TENSOR, MLFAB_NO_RANK, 0, 0,
                        "push_sparse: there is no tensor %u", sparse->tensor);
  if (worker->define.ghost)
    return mlfab__error(error, MLFAB_ERR_UNSUPPORTED, MLFAB_NO_RANK, 0, 0,
                        "not supported: sparse updates of ghost tensors");
  if (sparse->count > 0 && (!sparse->indices || !sparse->values))
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0, "push_sparse: %s is NULL",
                        sparse->indices ? "values" : "indices");
  if (sparse->count > 0 &&
      ((uintptr_t)sparse->indices % sizeof *sparse->indices != 0 ||
       (uintptr_t)sparse->values % mlfab__dtype_bytes((int)tensor->dtype) != 0))
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "push_sparse: indices or values are not aligned to their elements");
  for (uint64_t i = 0; i < sparse->count; i++) {
    unsigned long long index = sparse->indices[i], at = i;
    if (index >= tensor->count)
      return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                          "push_sparse: index %llu at position %llu: tensor %u has %llu elements",
                          index, at, sparse->tensor, (unsigned long long)tensor->count);
    if (i > 0 && index <= sparse->indices[i - 1])
      return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                          "push_sparse: index %llu at position %llu does not ascend: %llu is "
                          "before it",
                          index, at, (unsigned long long)sparse->indices[i - 1]);
  }
  int dtype = (int)tensor->dtype;
  if (mlfab__reduce_finite(dtype, sparse->values, sparse->count)) return 0;
  uint64_t bad = 0;
  while (mlfab__reduce_finite(dtype, sparse->values, bad + 1)) bad++;
  return mlfab__error(error, MLFAB_ERR_NOT_FINITE, (int32_t)worker->rank, 0, 0,
                      "push_sparse: the value at position %llu, of element %llu of tensor %u, is "
                      "NaN or infinite: nothing was sent",
                      (unsigned long long)bad, (unsigned long long)sparse->indices[bad],
                      sparse->tensor);
}

/* The values from position `at` on that one packet can have: returns where the next begins. */
static uint64_t sift_run(const mlfab__worker *worker, const mlfab__tensor *tensor,
                         const mlfab__sparse *sparse, uint64_t at, mlfab__pack_shape *shape) {
  int dtype = (int)tensor->dtype;
  uint32_t width = mlfab__dtype_bytes(dtype);
  uint64_t first = sparse->indices[at], next = at + 1;
  uint64_t offset = tensor->offset + first * width;
  uint64_t end =
      first + mlfab__min(sift_left(worker, tensor, offset) / width, sift_most(worker, dtype));
  while (next < sparse->count && sparse->indices[next] < end) next++;
  *shape = (mlfab__pack_shape){offset, dtype, MLFAB_HALF_NONE, 0,
                               (uint32_t)(sparse->indices[next - 1] - first + 1)};
  return next;
}

MLFAB__INTERNAL int mlfab__sift_sparse(mlfab__worker *worker, mlfab__outgoing *update,
                                       const mlfab__sparse *sparse, mlfab_error *error) {
  const mlfab__tensor *tensor = mlfab__layout_find(&worker->layout, sparse->tensor);
  uint32_t width = mlfab__dtype_bytes((int)tensor->dtype);
  uint64_t bytes = 0, most = 0, at, next;
  mlfab__pack_shape shape;
  for (at = 0; at < sparse->count; at = next) {
    next = sift_run(worker, tensor, sparse, at, &shape);
    bytes += sift_bound(shape.elements, next - at, width);
    most = mlfab__max(most, next - at);
  }
  if (sift_marks_room(worker, (most + 1) / 2) || sift_packet_room(worker, update, bytes))
    return sift_no_memory(error);
  uint32_t *indices = (uint32_t *)(void *)worker->marks;
  update->packet_bytes = 0;
  for (at = 0; at < sparse->count; at = next) {
    next = sift_run(worker, tensor, sparse, at, &shape);
    for (uint64_t i = at; i < next; i++)
      indices[i - at] = (uint32_t)(sparse->indices[i] - sparse->indices[at]);
    update->packet_bytes +=
        mlfab__pack_sparse(update->packets + update->packet_bytes, &shape, indices,
                           (const uint8_t *)sparse->values + at * width, (uint32_t)(next - at));
  }
  return 0;
}

/* --- packets on their way --- */

/* The packet at this place: its bytes, and whose it is. */
static uint64_t sift_packet(const mlfab__worker *worker, const mlfab__outgoing *update, uint64_t at,
                            uint32_t *server_p) {
  mlfab__packet packet;
  uint32_t bytes = mlfab__pack_open(update->packets + at, update->packet_bytes - at, &packet);
  assert(bytes > 0);
  *server_p = worker->layout.slices[mlfab__layout_slice_at(&worker->layout, packet.offset)].server;
  return bytes;
}

MLFAB__INTERNAL uint64_t mlfab__sift_bytes(const mlfab__worker *worker,
                                           const mlfab__outgoing *update, uint32_t server,
                                           uint64_t most) {
  uint64_t sum = 0, bytes;
  uint32_t owner;
  for (uint64_t at = 0; at < update->packet_bytes; at += bytes) {
    bytes = sift_packet(worker, update, at, &owner);
    if (owner == server && sum + bytes > most) break;
    if (owner == server) sum += bytes;
  }
  return sum;
}

MLFAB__INTERNAL uint64_t mlfab__sift_piece(const mlfab__worker *worker,
                                           const mlfab__outgoing *update, uint32_t server,
                                           uint64_t from, uint64_t most, uint64_t *at_p) {
  uint64_t at = from, bytes = 0, sum = 0;
  uint32_t owner = server;
  for (; at < update->packet_bytes; at += bytes) {
    bytes = sift_packet(worker, update, at, &owner);
    if (owner == server) break;
  }
  *at_p = at;
  for (; at < update->packet_bytes; at += bytes) {
    bytes = sift_packet(worker, update, at, &owner);
    int fits = sum + bytes <= (sum > 0 ? mlfab__min(most, worker->config->chunk_bytes) : most);
    if (owner != server || !fits) break;
    sum += bytes;
  }
  return sum;
}
