/* feed.h - the worker role: copies between a device and the buffers of calls that are under way. */
#ifndef MLFAB__FEED_H
#define MLFAB__FEED_H

#include "worker.h"

/* A pull is about to write these bytes, for the first time or again. */
typedef void mlfab__arrives_fn(void *user, const void *at, uint64_t bytes);

/* May a push of these buffers begin before all of its bytes are there? The worker must send it from the buffers, and need no
 * pass over all of it before. lacks: the bytes from `from` to `to` are not there yet; NULL: all are. Request 0: of the push that
 * is submitted next (a server in the same node gets its frames before the call returns); take it back after that. The
 * caller runs the node's epilogue. */
MLFAB__INTERNAL int mlfab__push_may_lack(const mlfab__worker *worker, const mlfab_buf *bufs,
                                         uint32_t n, const mlfab_push_options *options);
MLFAB__INTERNAL void mlfab__push_lacks(mlfab__worker *worker, mlfab_request request,
                                       const void *from, const void *to);
/* Calls `fn` whenever the pull writes to its buffers. 0: it cannot tell, because it writes from a cache at its end. */
MLFAB__INTERNAL int mlfab__pull_watch(mlfab__worker *worker, mlfab_request request,
                                      mlfab__arrives_fn *fn, void *user);

/* The bytes of a buffer as large as its tensor, or as the model; else 0. *align_p: of its elements. A ghost has no bytes. Also
 * before the model stands. */
MLFAB__INTERNAL uint64_t mlfab__worker_buf_bytes(const mlfab__worker *worker, const mlfab_buf *buf,
                                                 uint32_t *align_p);
/* The bytes of an element of this tensor; 0: there is no such tensor. */
MLFAB__INTERNAL uint32_t mlfab__worker_element_bytes(const mlfab__worker *worker, uint32_t tensor);

#endif
