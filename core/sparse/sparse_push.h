/* sparse_push.h - the worker role: updates sent as packets (sparse_push.c). For calls_sparse.c and compose.c. */
#ifndef MLFAB__SPARSE_PUSH_H
#define MLFAB__SPARSE_PUSH_H

#include "../worker/worker.h"

/* The filter of a tensor, and the values that it holds back. */
typedef struct mlfab__sieve {
  mlfab_filter filter;
  uint8_t *residual; /* as large as the tensor; NULL: no filter */
  uint8_t leaves;    /* the filter was removed: the next update includes the residual */
  uint8_t fresh;     /* the current call created the residual */
} mlfab__sieve;

/* The packets of an update, ascending; the next update of its slot reuses them. */
typedef struct mlfab__packets {
  uint8_t *data;
  uint64_t room, bytes;
  uint64_t shape; /* filtered: hash of its stretches */
} mlfab__packets;

/* The filters and packets of a worker. */
struct mlfab__worker_packets {
  mlfab__sieve *sieves; /* by tensor of the layout, from the first filter on */
  uint32_t nsieves;     /* number of residuals */
  uint64_t *marks;      /* scratch: bitmaps of the elements of an update to send */
  uint64_t mark_room;
  mlfab__packets of[MLFAB__WORKER_UPDATES]; /* by slot */
  uint8_t *came; /* packets of the incoming frame: MLFAB__PACKET_ROOM, allocated on first use */
  struct mlfab__cache *cache; /* cache of a model with version tags; else NULL */
};

/* Pushes a sparse update of one tensor; copies the values. */
MLFAB__INTERNAL int mlfab__worker_push_sparse(mlfab__worker *worker, uint32_t tensor,
                                              const uint64_t *indices, const void *values,
                                              uint64_t count, const mlfab_push_options *options,
                                              uint64_t now_ns, mlfab_request *request_p,
                                              mlfab_error *error);
/* Sets the filter of a tensor, or of all; NULL: removes it. */
MLFAB__INTERNAL int mlfab__worker_set_filter(mlfab__worker *worker, uint32_t tensor,
                                             const mlfab_filter *filter, mlfab_error *error);

/* open, free, take: cache.c, called through mlfab__worker_sparse. cached: the cached values of a tensor. */
MLFAB__INTERNAL int mlfab__cache_open(mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__cache_free(mlfab__worker *worker);
MLFAB__INTERNAL int mlfab__cache_take(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                                      const mlfab__model *model, const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__worker_cached(const mlfab__worker *worker, uint32_t tensor,
                                         const void **data_p, uint64_t *count_p,
                                         mlfab_error *error);

/* Attaches the group: the worker then accepts packets. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__sparse_worker_attach(mlfab__worker *worker);

#endif
