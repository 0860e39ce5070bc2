/* shm_lend.h - memory that the shared-memory transport lends to peers, or borrows from them. See shm_lend.c. */
#ifndef MLFAB__SHM_LEND_H
#define MLFAB__SHM_LEND_H

#include "shm.h"
#include "shm_memory.h"

#if MLFAB_WITH_SHM

#define SHM_RINGS 25165824u /* 24 MiB: the rings of a node, one a neighbour */
#define SHM_UNIT 65536u     /* of a pool */
#define SHM_POOLED 524288u  /* bytes of a link in the pool, if more than two frames are there */
#define SHM_FILE_MAGIC 0x464d4853u

enum {
  SHM_REFER = 32768, /* shorter bulks are copied: that is cheaper */
  SHM_LENT = 512,    /* maximum references of a link that are not released */
  SHM_LENT_FEW = 64, /* likewise, of a link with a small ring */
  SHM_FILES = 32,    /* maximum files of a peer that are mapped, */
  SHM_PLACES,        /* and its pool, which has the last place */
  SHM_UNITS = 4096   /* of a pool: 256 MiB of addresses */
};

/* The later packets on a life line, each with a descriptor. */
struct shm_file {
  uint32_t magic, place;
  uint64_t number, bytes;
};

struct shm_reference {
  uint64_t number, offset;
};

/* Bytes of this process that the peer may read. */
struct shm_lent {
  uint64_t end; /* position behind the record */
  uint64_t token;
  const uint8_t *at; /* NULL: taken back, or in the pool */
  uint32_t bytes, place;
  bool pooled;          /* in the pool: */
  uint32_t unit, units; /* where; units 0: lost */
};

/* A file of the peer: mapped, or for want of address space read from its descriptor. */
struct shm_view {
  const uint8_t *at; /* or NULL */
  int fd;
  uint64_t number, bytes; /* number 0: none */
  uint32_t borrowed;      /* frames delivered and not released */
};

/* The references of a link, from the first reference on. */
struct shm_refers {
  uint32_t lent_first, lent_count, lent_room; /* of `lent`, a ring */
  uint32_t tokens;           /* number lent with a token, that is not in the pool; */
  uint64_t tokens_end;       /* the position behind the last of them */
  uint32_t pooled;           /* number in the pool, */
  uint64_t pooled_bytes;     /* and their bytes */
  uint64_t told[SHM_PLACES]; /* numbers of own files that the peer has, by place */
  struct shm_view views[SHM_PLACES];
  struct shm_lent lent[];
};

/* The place of bulks that are too large for a ring. */
struct shm_pool {
  uint8_t *at; /* NULL: there is none */
  int fd, read_fd;
  uint64_t number;     /* as of other files, which have smaller numbers */
  uint32_t used, lost; /* units; lost: used by links that have ended */
  uint64_t bits[SHM_UNITS / 64];
};

/* Bytes of a ring to one of so many neighbours. */
static inline uint32_t shm_share(uint64_t neighbours) {
  uint64_t share = SHM_RINGS / mlfab__max(neighbours, 1) / SHM_CONTROL * SHM_CONTROL;
  return (uint32_t)mlfab__min(mlfab__max(share, SHM_RING_LEAST), SHM_RING);
}

/* The bulk of a slot's frame. */
struct shm_seen {
  struct shm_view *view; /* NULL: in the ring */
  uint8_t *bulk;         /* room for the largest bulk, allocated when a view has no mapping */
};

struct shm_lender {
  uint32_t lending;          /* number of links with loans */
  uint32_t neighbours;       /* expected number; 0: unknown */
  mlfab__shm_memory *memory; /* of the context, or NULL */
  struct shm_pool pool;
  uint64_t pools; /* number of pools so far */
  int spare_fd; /* kept so that a peer's file can be received when the process has no descriptor left */
};

#endif

#endif
