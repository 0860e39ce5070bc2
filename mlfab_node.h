/*
 * mlfab_node.h - the node level, below mlfab.h: for a program with its own event loop.
 *
 * A node is a state machine without I/O, clock or threads. Feed it events (mlfab_io_event, mlfab_transport.h) with the
 * present time, carry out the actions that it yields, and call mlfab_node_tick at its deadline. mlfab_open is a driver
 * around a node; examples/04_event_loop.c is another. Other programs do not need this header. mlfab.c has the code.
 *
 * Carry out all actions before you feed the next event. Between mlfab_node_next and mlfab_node_done call nothing else.
 * When a request has ended, carry out the actions that are due before you reuse its memory: one of them may take the
 * memory back from a link (MLFAB_ACTION_DETACH). One thread at a time. Time never goes back.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_NODE_H
#define MLFAB_NODE_H

#include "mlfab_transport.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mlfab_node mlfab_node;

enum mlfab_action_kind {
  MLFAB_ACTION_SEND = 1,       /* link, head, bulk, token */
  MLFAB_ACTION_CONNECT = 2,    /* address, token */
  MLFAB_ACTION_DISCONNECT = 3, /* link: send the accepted frames, then close */
  MLFAB_ACTION_DETACH = 4,     /* link, token: stop borrowing the bulk of that send */
  MLFAB_ACTION_PROBE = 5, /* link, which came UP with MLFAB_CAP_PROBE: call the transport's probe,
                                  and give its result to mlfab_node_done */
  /* file, token: carry the operation out, then feed MLFAB_IO_FILE with the token. It may take long: another thread
   * may do it. A driver without files gives MLFAB_ERR_UNSUPPORTED to mlfab_node_done: then no event follows. */
  MLFAB_ACTION_FILE = 6
};

enum mlfab_file_kind {
  /* Appends head and bulk to the file that is being written under this stream. FIRST creates it as `path`.part, in
   * place of an old one. LAST makes it durable: sync, close, rename to `path`, sync of the directory. After an error
   * the stream is still open: ABORT ends it. */
  MLFAB_FILE_WRITE = 1,
  MLFAB_FILE_ABORT = 2, /* closes and removes the file that is being written under this stream */
  /* `bytes` from `offset` on, in the event's bulk; fewer at the end of the file */
  MLFAB_FILE_READ = 3,
  /* the names in the directory `path` that begin with "checkpoint-", in the event's bulk, each with a newline behind it */
  MLFAB_FILE_LIST = 4,
  MLFAB_FILE_REMOVE = 5 /* removes `path`; a missing file is no error */
};
enum mlfab_file_flags { MLFAB_FILE_FIRST = 1, MLFAB_FILE_LAST = 2 };

/* An operation on a file. At most one of a stream is under way. */
typedef struct mlfab_file_op {
  uint32_t kind;   /* MLFAB_FILE_* */
  uint32_t flags;  /* WRITE */
  uint32_t stream; /* 0..3 */
  uint32_t head_bytes, bulk_bytes;
  uint32_t bytes; /* READ: at most 2 MiB */
  uint64_t offset;
  const char *path;        /* below 512 bytes */
  const void *head, *bulk; /* WRITE: copy them before mlfab_node_done */
} mlfab_file_op;

/* An action that the node asks for. Pointers are valid until mlfab_node_done. */
typedef struct mlfab_action {
  uint32_t kind;
  uint32_t link;
  uint64_t token;   /* send: 0 when there is no bulk, or SENT need not be reported */
  const void *head; /* copy it before mlfab_node_done */
  const void *bulk; /* borrowed until SENT, DOWN, or a detach */
  uint32_t head_bytes, bulk_bytes;
  uint32_t callers; /* send with a token: 1: a caller gets bulk back from a finished request only */
  const char
      *address; /* connect: a list separated by blanks, best first; use the first that a transport
                              of this node reaches */
  const mlfab_file_op *file;
} mlfab_action;

/* Opens a node, which begins to join. `addresses`: of this node's transports, separated by blanks, best first.
 * Errors: of mlfab_open, except those of I/O. */
MLFAB_API int mlfab_node_open(const mlfab_config *config, const char *addresses, uint64_t now_ns,
                              mlfab_node **node_p, mlfab_error *error_p);
MLFAB_API void mlfab_node_close(mlfab_node **node_p);
/* Feeds an event. A bad frame is no error here: the node disconnects the peer and counts it. */
MLFAB_API void mlfab_node_event(mlfab_node *node, const mlfab_io_event *event, uint64_t now_ns);
/* Runs timers, and background work one block at a time. */
MLFAB_API void mlfab_node_tick(mlfab_node *node, uint64_t now_ns);
/* Returns 1 with the next action, or 0. It returns the same action until mlfab_node_done. */
MLFAB_API int mlfab_node_next(mlfab_node *node, uint64_t now_ns, mlfab_action *action_p);
/* The result of the action: 0; MLFAB_ERR_AGAIN (a send found no room: the node repeats it after MLFAB_IO_WRITABLE); or
 * another error (the node gives the link up). */
MLFAB_API void mlfab_node_done(mlfab_node *node, const mlfab_action *action, int status,
                               uint64_t now_ns);
/* The time by which mlfab_node_tick must be called. */
MLFAB_API uint64_t mlfab_node_deadline(const mlfab_node *node);
/* 0 while joining, 1 when the fabric is complete, or the error that ended it. */
MLFAB_API int mlfab_node_ready(const mlfab_node *node, mlfab_error *error_p);

/* The calls of mlfab.h, sections 7 to 10, and of mlfab_partial.h. Each kind has the name, rules and errors of a
 * function there. Beside it: the members of mlfab_call that it takes. */
enum mlfab_call_kind {
  /* Complete when mlfab_node_submit returns; they have no request. */
  MLFAB_CALL_TENSOR_ADD = 1,   /* tensor, dtype, count */
  MLFAB_CALL_SET_FILTER = 2,   /* tensor; options: mlfab_filter or NULL */
  MLFAB_CALL_SET_SCHEDULE = 3, /* options: mlfab_schedule */
  /* The others have a request. */
  MLFAB_CALL_MODEL_START = 4, /* bufs, n; options: mlfab_model_options or NULL */
  MLFAB_CALL_PUSH = 5, /* bufs, n; options: mlfab_push_options or NULL; request_p may be NULL */
  MLFAB_CALL_PUSH_SPARSE = 6,  /* tensor, indices, data (read only), count; else as PUSH */
  MLFAB_CALL_PULL = 7,         /* bufs, n; options: mlfab_pull_options or NULL */
  MLFAB_CALL_FINISH = 8,       /* timeout_ns */
  MLFAB_CALL_SET_SYNC = 9,     /* server, timeout_ns; options: mlfab_sync */
  MLFAB_CALL_SET_SERVERS = 10, /* servers, n, timeout_ns */
  /* Section 10. options of the first five: mlfab_collective or NULL. */
  MLFAB_CALL_ALLREDUCE = 11,      /* vecs, n, dtype */
  MLFAB_CALL_REDUCE_SCATTER = 12, /* data, counts, dtype */
  MLFAB_CALL_ALLGATHER = 13,      /* data, counts, dtype */
  MLFAB_CALL_BROADCAST = 14,      /* root, data, count (bytes) */
  MLFAB_CALL_BARRIER = 15,        /* of the options the timeout only */
  /* mlfab_partial.h. The object is open when the request has ended with 0; close it when the request has failed. */
  MLFAB_CALL_PARTIAL_OPEN = 16,   /* count, dtype, id_p; options: mlfab_partial_options */
  MLFAB_CALL_PARTIAL_REDUCE = 17, /* id, data, timeout_ns, info_p: mlfab_partial_info or NULL */
  MLFAB_CALL_PARTIAL_FLUSH = 18,  /* id, data, timeout_ns */
  MLFAB_CALL_PARTIAL_CLOSE = 19,  /* id; no request */
  /* Open when the request has ended with 0; then ask STATE whether the workers have a valid graph. */
  MLFAB_CALL_STOCHASTIC_OPEN = 20,  /* as PARTIAL_OPEN; options: mlfab_stochastic_options */
  MLFAB_CALL_STOCHASTIC_STATE = 21, /* id; no request. Closes the object where they have none */
  /* id, data, timeout_ns, info_p: mlfab_stochastic_info or NULL */
  MLFAB_CALL_STOCHASTIC_REDUCE = 22,
  MLFAB_CALL_STOCHASTIC_CLOSE = 23, /* id; no request */
  /* options: mlfab_checkpoint_options or NULL; info_p: mlfab_checkpoint_info or NULL */
  MLFAB_CALL_CHECKPOINT = 24,
  MLFAB_CALL_RESTORE = 25,   /* data: the directory, a text that it reads only; no request */
  MLFAB_CALL_PULL_VIEW = 26, /* bufs, n, info_p: mlfab_view; options: mlfab_pull_options or NULL */
  MLFAB_CALL_VIEW_RELEASE = 27 /* count: the view's id, data: its parts; no request */
};

/* A call. Members that its kind does not take are ignored. */
typedef struct mlfab_call {
  uint32_t size;
  uint32_t kind; /* MLFAB_CALL_* */
  const void
      *options; /* of the type beside the kind; with the timeout, where it has a timeout_ns */
  const mlfab_buf *bufs;
  const mlfab_vec *vecs;
  const uint32_t *servers;
  uint32_t n; /* of bufs, vecs or servers */
  uint32_t tensor, server;
  int32_t dtype, root;
  uint32_t id; /* of an object */
  void *data;
  uint64_t count;
  const uint64_t *counts, *indices;
  uint32_t *id_p;
  void *info_p;
  uint64_t timeout_ns;
} mlfab_call;

/* Checks a call and begins it; never waits. It reads *call before it returns, and borrows what the members point to as
 * the function of mlfab.h does. *request_p, if the kind has a request, is for mlfab_node_test. Errors: of that
 * function; ARGUMENT also for an unknown kind. */
MLFAB_API int mlfab_node_submit(mlfab_node *node, const mlfab_call *call, uint64_t now_ns,
                                mlfab_request *request_p);
MLFAB_API int mlfab_node_cached(mlfab_node *node, uint32_t tensor, const void **data_p,
                                uint64_t *count_p);
MLFAB_API int mlfab_node_set_link(mlfab_node *node, double in_bytes_per_s, double out_bytes_per_s,
                                  uint64_t now_ns);
MLFAB_API int mlfab_node_set_other_traffic(mlfab_node *node, double in_bytes_per_s,
                                           double out_bytes_per_s, double speed_bytes_per_s,
                                           uint64_t now_ns);
MLFAB_API int mlfab_node_explain(const mlfab_node *node, char *text, size_t room, size_t *bytes_p);
MLFAB_API int mlfab_node_leave(mlfab_node *node, uint64_t now_ns); /* says goodbye on all links */
MLFAB_API int mlfab_node_test(mlfab_node *node, mlfab_request request, int *done_p,
                              mlfab_result *result_p);
MLFAB_API int mlfab_node_cancel(mlfab_node *node, mlfab_request request, uint64_t now_ns);
MLFAB_API int mlfab_node_push_status(mlfab_node *node, uint64_t seq, int *status_p);
MLFAB_API int mlfab_node_last_error(const mlfab_node *node, mlfab_error *error_p);
MLFAB_API int mlfab_node_stats(const mlfab_node *node, mlfab_stats *stats_p, size_t size);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_NODE_H */
