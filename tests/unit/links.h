/* links.h - links between communicators in a test: frames that wait, in the order in which they were sent. And the
 * fields that the worlds of test_comm, test_partial_run and test_stochastic have in common; members.h works on them. */
#ifndef MLFAB_TEST_LINKS_H
#define MLFAB_TEST_LINKS_H

#include "core/base/rng.h"
#include "core/coll/membership.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { BEAT = 4000 };

typedef struct message {
  uint8_t type;
  uint8_t *meta, *bulk; /* bulk: as it was when the link took it */
  const void *lent;     /* where it lies, when it is lent; or NULL */
  uint32_t meta_bytes, bulk_bytes;
  uint64_t token;
} message;

typedef struct pipe { /* one direction of a link; a ring */
  message *frames;
  unsigned begin, count, room;
} pipe;

typedef struct link { /* of a worker to another */
  int stands, wanted, dropped;
  pipe there, back;
} link;

/* The fields of a worker. Its link to server 0 stands if `up`. Its barrier sends nothing. */
#define MEMBER_FIELDS            \
  mlfab__comm comm;              \
  mlfab__barrier_worker barrier; \
  mlfab__requests requests;      \
  int alive, up;                 \
  uint32_t incarnation;          \
  pipe to_server, from_server

/* Of a world of `most` workers at most. peers_out: links of the first to the second. fails: one allocation in so many
 * fails; 0: none; asked: allocations. */
#define WORLD_FIELDS(most)      \
  mlfab__env env;               \
  mlfab_config config;          \
  mlfab__membership membership; \
  worker workers[most];         \
  link peers_out[most][most];   \
  uint32_t n, fails, drops;     \
  uint64_t now, tick_ns, asked; \
  mlfab__rng prng

static inline void *copy(const void *from, uint32_t bytes) {
  void *to = malloc(bytes + (size_t)(bytes == 0));
  assert_non_null(to);
  if (bytes > 0) memcpy(to, from, bytes);
  return to;
}

static inline void pipe_put(pipe *p, uint8_t type, const void *meta, uint32_t meta_bytes,
                            const void *bulk, uint32_t bulk_bytes, uint64_t token) {
  if (p->count == p->room) {
    unsigned room = p->room ? 2 * p->room : 16;
    message *frames = calloc(room, sizeof *frames);
    assert_non_null(frames);
    for (unsigned i = 0; i < p->count; i++) frames[i] = p->frames[(p->begin + i) % p->room];
    free(p->frames);
    p->frames = frames;
    p->room = room;
    p->begin = 0;
  }
  message *m = &p->frames[(p->begin + p->count++) % p->room];
  *m = (message){.type = type, .meta_bytes = meta_bytes, .bulk_bytes = bulk_bytes, .token = token};
  m->meta = copy(meta, meta_bytes);
  if (!bulk) return;
  m->bulk = copy(bulk, bulk_bytes);
  if (token) m->lent = bulk;
}

static inline void message_free(message *m) {
  free(m->meta);
  free(m->bulk);
}

static inline message pipe_take(pipe *p) {
  message m = p->frames[p->begin];
  p->begin = (p->begin + 1) % p->room;
  p->count--;
  return m;
}

static inline void pipe_cut(pipe *p) {
  while (p->count > 0) {
    message m = pipe_take(p);
    message_free(&m);
  }
}

static inline void pipe_free(pipe *p) {
  pipe_cut(p);
  free(p->frames);
  memset(p, 0, sizeof *p);
}

static inline mlfab__frame_in frame_of(const message *m) {
  if (m->lent) assert_memory_equal(m->bulk, m->lent, m->bulk_bytes);
  return (mlfab__frame_in){m->type, m->meta_bytes, m->bulk_bytes, m->meta, m->bulk};
}

#endif
