/* plain_check.c - the communicator: checks a plain collective before it begins, and makes its signature and its words.
 * See plain.h. */
#include "comm.h"

#include <stdio.h>

MLFAB__INTERNAL int mlfab__plain_adds(const mlfab__comm_call *call) {
  return call->kind == MLFAB__COLLECTIVE_ALLREDUCE ||
         call->kind == MLFAB__COLLECTIVE_REDUCE_SCATTER;
}

/* With a user's reducer the element type does not count. */
MLFAB__INTERNAL uint32_t mlfab__plain_width(const mlfab__comm_call *call) {
  if (mlfab__plain_adds(call) && call->reduce) return call->width;
  return call->dtype || mlfab__plain_adds(call) ? mlfab__element_bytes(call->dtype) : 1;
}

/* --- calls in words --- */

/* Appends the counts of the ranks, as far as there is room: " (counts 1024 x 3, 2048)". Returns the length. */
static size_t plain_words_counts(char *text, size_t n, const uint64_t *counts, uint32_t ranks) {
  enum { MOST = 80 };
  const char *before = " (counts ";
  for (uint32_t r = 0, end; r < ranks; r = end, before = ", ") {
    unsigned long long count = counts[r];
    for (end = r + 1; end < ranks && counts[end] == count;) end++;
    if (n > MOST) {
      n += (size_t)snprintf(text + n, MLFAB__TEXT_MAX - n, ", ...");
      break;
    }
    n += (size_t)snprintf(text + n, MLFAB__TEXT_MAX - n, "%s%llu", before, count);
    if (end > r + 1) n += (size_t)snprintf(text + n, MLFAB__TEXT_MAX - n, " x %u", end - r);
  }
  return n + (size_t)snprintf(text + n, MLFAB__TEXT_MAX - n, ")");
}

MLFAB__INTERNAL const char *mlfab__plain_words(char text[MLFAB__TEXT_MAX],
                                               const mlfab__comm_past *past, uint32_t ranks) {
  const char *algorithm = mlfab__algorithm_name((uint32_t)past->algorithm);
  unsigned long long count = past->count;
  if (past->kind == MLFAB__COLLECTIVE_BARRIER) {
    snprintf(text, MLFAB__TEXT_MAX, "%.60s", past->words);
  } else if (past->user) {
    snprintf(text, MLFAB__TEXT_MAX, "%.60s of %llu elements of %u bytes (its own reducer)",
             past->words, count, past->width);
  } else if (past->kind == MLFAB__COLLECTIVE_BROADCAST) {
    snprintf(text, MLFAB__TEXT_MAX, "%.60s of %llu bytes from worker %d", past->words,
             count * past->width, (int)past->root);
  } else if (past->kind == MLFAB__COLLECTIVE_ALLGATHER) {
    snprintf(text, MLFAB__TEXT_MAX, "%.60s of %llu %s", past->words, count,
             past->dtype ? mlfab__dtype_name(past->dtype) : "bytes");
  } else {
    snprintf(text, MLFAB__TEXT_MAX, "%.60s of %llu %s (%s)", past->words, count,
             mlfab__dtype_name(past->dtype), mlfab__op_name(past->op));
  }
  size_t n = strlen(text);
  if (past->has_counts) n = plain_words_counts(text, n, past->counts, ranks);
  if (past->algorithm != MLFAB_ALGORITHM_AUTO && algorithm)
    n += (size_t)snprintf(text + n, MLFAB__TEXT_MAX - n, ", algorithm %s", algorithm);
  if (past->tag)
    snprintf(text + n, MLFAB__TEXT_MAX - n, ", tag %llu", (unsigned long long)past->tag);
  return text;
}

MLFAB__INTERNAL mlfab__comm_past mlfab__plain_describe(const mlfab__comm_slot *slot) {
  const mlfab__comm_call *call = &slot->call;
  return (mlfab__comm_past){.signature = slot->signature,
                            .count = slot->count,
                            .tag = call->tag,
                            .words = call->words,
                            .dtype = call->dtype,
                            .op = call->op,
                            .width = mlfab__plain_width(call),
                            .root = call->root,
                            .kind = call->kind,
                            .user = mlfab__plain_adds(call) && call->reduce != NULL,
                            .algorithm = call->algorithm,
                            .opens = call->opens != 0,
                            .counts = slot->counts,
                            .has_counts = call->counts != NULL};
}

/* --- checks --- */

static int plain_check_refuse(mlfab_error *error, int code, const mlfab__comm_call *call,
                              const char *what) {
  return MLFAB__FAIL(error, code, "%s: %s", call->words, what);
}

static int plain_check_type(const mlfab__comm_call *call, mlfab_error *error) {
  if (call->kind == MLFAB__COLLECTIVE_BARRIER) return 0;
  if (mlfab__plain_adds(call) && call->reduce) {
    if (call->width >= 1 && call->width <= 65536) return 0;
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "%s: element_bytes is %u, and must be 1..65536 with a reducer", call->words,
                       call->width);
  }
  if (!mlfab__plain_width(call))
    return MLFAB__FAIL(error, MLFAB_ERR_DTYPE, "%s: %d is not an element type", call->words,
                       call->dtype);
  if (!mlfab__plain_adds(call)) return 0;
  if (call->op < MLFAB_OP_SUM || call->op > MLFAB_OP_PRODUCT)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "%s: %d is not an operation (MLFAB_OP_SUM ... MLFAB_OP_PRODUCT)",
                       call->words, call->op);
  if (call->op == MLFAB_OP_MEAN && call->dtype == MLFAB_I64)
    return plain_check_refuse(error, MLFAB_ERR_UNSUPPORTED, call,
                              "MLFAB_OP_MEAN cannot be used with MLFAB_I64");
  return 0;
}

static int plain_check_buffer(const mlfab__comm_call *call, uint32_t i, mlfab_error *error) {
  const mlfab_vec *vec = &call->vecs[i];
  uint32_t width = mlfab__plain_width(call), line = width & (0u - width);
  assert(width > 0 && "the type was checked before");
  if (vec->count > 0 && !vec->data)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: buffer %u is NULL and has %llu elements",
                       call->words, i, (unsigned long long)vec->count);
  if ((uintptr_t)vec->data % (line < 8 ? line : 8))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: buffer %u is not aligned to its elements",
                       call->words, i);
  return 0;
}

/* Sorts indices of buffers by address (Shell's sort). Lists are mostly sorted already. */
static void plain_check_sort(const mlfab__comm_call *call, uint16_t *order, uint32_t n) {
  for (uint32_t gap = 1093; gap > 0; gap /= 3) {
    for (uint32_t i = gap; i < n; i++) {
      uint16_t buf = order[i];
      uint32_t at = i;
      uintptr_t data = (uintptr_t)call->vecs[buf].data;
      for (; at >= gap && (uintptr_t)call->vecs[order[at - gap]].data > data; at -= gap)
        order[at] = order[at - gap];
      order[at] = buf;
    }
  }
}

/* Returns the bytes of an input: an allgather reads this worker's block, a broadcast reads the root's only. */
static uint64_t plain_check_input_bytes(const mlfab__comm *comm, const mlfab__comm_call *call,
                                        uint32_t i) {
  uint64_t count = call->vecs[i].count;
  if (call->kind == MLFAB__COLLECTIVE_ALLGATHER) count = call->counts[comm->rank];
  if (call->kind == MLFAB__COLLECTIVE_BROADCAST && call->root != (int32_t)comm->rank) count = 0;
  return count * mlfab__plain_width(call);
}

/* An input must not overlap a buffer; `order` sorts the buffers by address. */
static int plain_check_input(const mlfab__comm *comm, const mlfab__comm_call *call, uint32_t i,
                             const uint16_t *order, uint32_t n, mlfab_error *error) {
  uintptr_t from = (uintptr_t)call->inputs[i];
  uint64_t bytes = plain_check_input_bytes(comm, call, i);
  uint32_t low = 0, high = n;
  if (bytes == 0) return 0;
  if (!from) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: input %u is NULL", call->words, i);
  /* Finds the first buffer that ends after the input begins. */
  MLFAB__SEARCH(low, high, at,
                (uintptr_t)call->vecs[order[at]].data +
                        call->vecs[order[at]].count * mlfab__plain_width(call) <=
                    from)
  if (low == n || (uintptr_t)call->vecs[order[low]].data >= from + bytes) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: input %u and buffer %u overlap", call->words,
                     i, order[low]);
}

/* Buffers must overlap neither each other nor an input. */
static int plain_check_overlap(const mlfab__comm *comm, const mlfab__comm_call *call,
                               mlfab_error *error) {
  uint16_t order[MLFAB__COMM_BUFS];
  uint32_t n = 0, width = mlfab__plain_width(call);
  int code = 0;
  for (uint32_t i = 0; i < call->n; i++)
    if (call->vecs[i].count > 0) order[n++] = (uint16_t)i;
  plain_check_sort(call, order, n);
  for (uint32_t i = 1; i < n; i++) {
    const mlfab_vec *low = &call->vecs[order[i - 1]], *high = &call->vecs[order[i]];
    if ((uintptr_t)high->data - (uintptr_t)low->data < low->count * width)
      return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: buffers %u and %u overlap", call->words,
                         order[i - 1], order[i]);
  }
  for (uint32_t i = 0; call->inputs && i < call->n && !code; i++)
    code = plain_check_input(comm, call, i, order, n, error);
  return code;
}

/* *count_p: elements of all buffers together. */
static int plain_check_buffers(const mlfab__comm *comm, const mlfab__comm_call *call,
                               uint64_t *count_p, mlfab_error *error) {
  uint32_t width = (uint32_t)mlfab__max(mlfab__plain_width(call), 1);
  uint64_t count = 0, blocks = 0;
  if (call->n > MLFAB__COMM_BUFS)
    return MLFAB__FAIL(error, MLFAB_ERR_LIMIT, "%s: %u buffers, the limit is %d", call->words,
                       call->n, MLFAB__COMM_BUFS);
  for (uint32_t i = 0; i < call->n; i++) {
    int wrong = plain_check_buffer(call, i, error);
    if (wrong) return wrong;
    count = mlfab__add_sat(count, call->vecs[i].count);
  }
  for (uint32_t r = 0; call->counts && r < comm->config->workers; r++)
    blocks = mlfab__add_sat(blocks, call->counts[r]);
  if (call->counts && (blocks != count || call->n != 1))
    return plain_check_refuse(error, MLFAB_ERR_ARGUMENT, call, "counts are not those of the data");
  int code = mlfab__comm_check_count(comm, call->words, count, width, error);
  *count_p = count;
  return code ? code : plain_check_overlap(comm, call, error);
}

static int plain_check_is_member(const mlfab__comm *comm, uint32_t rank) {
  for (uint32_t i = 0; i < comm->members; i++) {
    if (comm->ranks[i] == rank) return 1;
  }
  return 0;
}

MLFAB__INTERNAL int32_t mlfab__plain_stranger(const mlfab__comm *comm,
                                              const mlfab__comm_call *call) {
  if (call->kind == MLFAB__COLLECTIVE_BROADCAST &&
      !plain_check_is_member(comm, (uint32_t)call->root))
    return call->root;
  if (!call->counts || comm->members == comm->config->workers) return MLFAB_NO_RANK;
  for (uint32_t r = 0; r < comm->config->workers; r++) {
    if (call->counts[r] > 0 && !plain_check_is_member(comm, r)) return (int32_t)r;
  }
  return MLFAB_NO_RANK;
}

static int plain_check_ranks(const mlfab__comm *comm, const mlfab__comm_call *call,
                             mlfab_error *error) {
  if (call->kind == MLFAB__COLLECTIVE_BROADCAST &&
      (call->root < 0 || (uint32_t)call->root >= comm->config->workers))
    return mlfab__error(error, MLFAB_ERR_RANK_RANGE, call->root, 0, 0,
                        "%s: root %d is not one of %u workers", call->words, (int)call->root,
                        comm->config->workers);
  /* A verdict that this worker has not seen is the better explanation, and comes first. */
  int32_t stranger = comm->phase == MLFAB__COMM_IN && !comm->owed
                         ? mlfab__plain_stranger(comm, call)
                         : (int32_t)MLFAB_NO_RANK;
  if (stranger != MLFAB_NO_RANK)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, stranger, 0, 0,
                        "%s: worker %d does not take part any more, and is the root or has a block",
                        call->words, (int)stranger);
  return 0;
}

MLFAB__INTERNAL mlfab__algorithm_task mlfab__plain_task(const mlfab__comm_call *call,
                                                        uint64_t count, uint32_t members) {
  return (mlfab__algorithm_task){
      .kind = call->kind,
      .algorithm = call->algorithm,
      .ordered = call->ordered && call->reduce,
      .mean = mlfab__plain_adds(call) && !call->reduce && call->op == MLFAB_OP_MEAN,
      .members = members,
      .width = mlfab__plain_width(call),
      .count = count,
      .segment = MLFAB__COMM_SEGMENT,
      .after = MLFAB__DAG_NONE};
}

static int plain_check_algorithm(const mlfab__comm *comm, const mlfab__comm_call *call,
                                 uint64_t count, mlfab_error *error) {
  if (!mlfab__algorithm_name((uint32_t)call->algorithm))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: %d is not an algorithm (MLFAB_ALGORITHM_*)",
                       call->words, call->algorithm);
  if (call->algorithm == MLFAB_ALGORITHM_AUTO || call->kind == MLFAB__COLLECTIVE_BARRIER) return 0;
  mlfab__algorithm_task task = mlfab__plain_task(call, count, comm->config->workers);
  if (call->algorithm == MLFAB_ALGORITHM_PLANNED
          ? call->kind == MLFAB__COLLECTIVE_ALLREDUCE && !task.ordered
          : mlfab__algorithm_cost(&task, call->algorithm, 1.0, 1.0, 1.0) >= 0.0)
    return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED, "%s: cannot be done by algorithm %d",
                     call->words, call->algorithm);
}

MLFAB__INTERNAL int mlfab__plain_check(const mlfab__comm *comm, const mlfab__comm_call *call,
                                       uint64_t *count_p, mlfab_error *error) {
  *count_p = 0;
  int code = mlfab__comm_check_state(comm, call->words, error);
  if (!code) code = plain_check_type(call, error);
  if (!code && call->kind != MLFAB__COLLECTIVE_BARRIER)
    code = plain_check_buffers(comm, call, count_p, error);
  if (!code) code = plain_check_ranks(comm, call, error);
  if (!code) code = plain_check_algorithm(comm, call, *count_p, error);
  return code;
}

/* --- its data --- */

MLFAB__INTERNAL int mlfab__plain_finite(const mlfab__comm *comm, const mlfab__comm_call *call,
                                        uint32_t unit) {
  uint64_t from = 0;
  int brings = call->kind != MLFAB__COLLECTIVE_BROADCAST || (uint32_t)call->root == comm->rank;
  if (!call->refuse_nan || !brings || !call->dtype || (mlfab__plain_adds(call) && call->reduce))
    return 1;
  if (call->kind != MLFAB__COLLECTIVE_ALLGATHER) {
    for (uint32_t i = 0; i < call->n; i++) {
      if (!mlfab__elements_finite(call->dtype, call->vecs[i].data,
                                  call->vecs[i].count * unit / mlfab__plain_width(call)))
        return 0;
    }
    return 1;
  }
  for (uint32_t r = 0; r < comm->rank; r++) from += call->counts[r];
  return mlfab__elements_finite(
      call->dtype, (const uint8_t *)call->vecs[0].data + from * mlfab__plain_width(call),
      call->counts[comm->rank]);
}

MLFAB__INTERNAL void mlfab__plain_take_inputs(const mlfab__comm *comm,
                                              const mlfab__comm_call *call) {
  for (uint32_t i = 0; call->inputs && i < call->n; i++) {
    uint64_t bytes = plain_check_input_bytes(comm, call, i), at = 0;
    for (uint32_t r = 0; call->kind == MLFAB__COLLECTIVE_ALLGATHER && r < comm->rank; r++)
      at += call->counts[r] * mlfab__plain_width(call);
    if (bytes > 0) memcpy((uint8_t *)call->vecs[i].data + at, call->inputs[i], bytes);
  }
}

MLFAB__INTERNAL uint64_t mlfab__plain_signature(const mlfab__comm *comm,
                                                const mlfab__comm_call *call, uint64_t count) {
  int own = mlfab__plain_adds(call) && call->reduce != NULL;
  const uint64_t of[] = {call->kind,
                         own ? 0 : (uint64_t)call->dtype,
                         own || !mlfab__plain_adds(call) ? 0 : (uint64_t)call->op,
                         (uint64_t)own,
                         own && call->ordered,
                         mlfab__plain_width(call),
                         count,
                         call->kind == MLFAB__COLLECTIVE_BROADCAST ? (uint64_t)call->root : 0,
                         call->algorithm,
                         call->tag,
                         call->salt};
  uint64_t hash = mlfab__hash(0, of, sizeof of);
  if (call->counts)
    hash = mlfab__hash(hash, call->counts, comm->config->workers * sizeof *call->counts);
  return hash ? hash : 1;
}
