/* lead.h - server 0 leads the checkpoints of a fabric. Layer 4.
 *
 * A worker asks for a checkpoint, or so many commits of server 0 have passed. One at a time; another worker gets AGAIN.
 * While only files are being removed, it waits (`waits`).
 *
 *    IDLE --asked--> LISTS --number = largest in the directory + 1--> AWAITS --all shards are durable--> SEALS
 *     ^                |                                                |   the manifest is durable: |
 *     |                +----- error, deadline, a server is dead --------+   the checkpoint is whole, answered
 *     +------------------------------------------------------- SWEEPS <------------------------------+
 *
 * LISTS reads the directory, so that no number is ever used again, not by a process that comes later either. AWAITS
 * orders every server to write its shard (CHECKPOINT_ORDER; repeated on a new link), and waits for the answers. SEALS
 * writes the manifest. SWEEPS removes the files of older checkpoints, but for the newest `keep` ones that have a
 * manifest, and what attempts that failed have left: the manifests first.
 *
 * With a replica. The lead is not at both copies of server 0. A checkpoint that is under way when the other copy takes
 * over is begun again: workers ask again on their new links, and a server that still writes for the former copy is
 * ordered again a beat later. The copies use numbers of their own (the server odd ones, its replica even ones), so what
 * the former one may still write is another checkpoint, whole or not.
 *
 * Invariants. (1) A manifest is written only after every shard of its number and set is durable. So a checkpoint with a
 * manifest is whole, whenever which process stops. (2) A file is removed only after a newer manifest is durable. (3) A
 * failed attempt changes nothing about older checkpoints. */
#ifndef MLFAB__LEAD_H
#define MLFAB__LEAD_H

#include "../node/node.h"
#include "record.h"

struct mlfab__server;

enum mlfab__lead_phase {
  MLFAB__LEAD_IDLE,
  MLFAB__LEAD_LISTS,
  MLFAB__LEAD_AWAITS,
  MLFAB__LEAD_SEALS,
  MLFAB__LEAD_SWEEPS
};

typedef struct mlfab__lead_seat { /* a worker: its last answer */
  uint64_t ask, number, version, bytes;
  int32_t code;
} mlfab__lead_seat;

typedef struct mlfab__lead {
  mlfab__env *env;
  const mlfab_config *config;
  const struct mlfab__server *server;
  mlfab__filer *filer;
  mlfab__port down, across; /* to workers; to servers */
  void *self;
  void (*own)(void *self,
              const mlfab__checkpoint_order *order); /* the order to this server itself */
  uint64_t seed;
  enum mlfab__lead_phase phase;
  /* Does this server take part? Late servers only while they have slices. */
  int (*asks)(void *self, uint32_t server);
  uint32_t workers, servers;
  mlfab__lead_seat *seats;
  int waits; /* a request waits until files are removed: */
  uint32_t waiter;
  mlfab__checkpoint_ask wanted;
  /* The one that is being made. */
  uint32_t asker; /* a worker, or MLFAB__NO_NODE: by itself */
  uint32_t keep;
  uint64_t began_ns, deadline_ns;
  uint64_t again_ns; /* AWAITS: when to order again; 0: not */
  mlfab__checkpoint_order order;
  mlfab__checkpoint_done done;
  uint8_t *answered;                /* by server */
  uint32_t *shard;                  /* by server: number of its shard, of those that take part */
  uint32_t shards;                  /* number of servers that take part */
  mlfab__checkpoint_entry *entries; /* by shard */
  uint32_t awaited;                 /* number of servers that have not answered */
  uint32_t epoch;
  char *names; /* the directory's list */
  uint32_t names_bytes;
  size_t name_at;   /* SWEEPS: the next to look at ... */
  int sweeps_rest;  /* ... 0: for manifests */
  uint64_t oldest;  /* SWEEPS: checkpoints before this one go */
  uint64_t next_at; /* number of commits at which the next begins by itself */
  char path[MLFAB__RECORD_PATH + 8];
  uint8_t *head; /* of the manifest's file, on demand */
} mlfab__lead;

/* All members up to `seed` are set. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__lead_init(mlfab__lead *lead);
MLFAB__INTERNAL void mlfab__lead_free(mlfab__lead *lead);
/* CHECKPOINT_ASK from a worker. by_itself: so many commits have passed. */
MLFAB__INTERNAL void mlfab__lead_asked(mlfab__lead *lead, uint32_t worker,
                                       const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__lead_by_itself(mlfab__lead *lead, uint64_t now_ns);
/* A server's answer. gone: it is dead. up: the link to it stands. wants: is a link to it needed? */
MLFAB__INTERNAL void mlfab__lead_answered(mlfab__lead *lead, const mlfab__checkpoint_shard *shard);
MLFAB__INTERNAL void mlfab__lead_gone(mlfab__lead *lead, uint32_t server);
MLFAB__INTERNAL void mlfab__lead_up(mlfab__lead *lead, uint32_t server);
MLFAB__INTERNAL int mlfab__lead_wants(const mlfab__lead *lead, uint32_t server);
/* A new process has this worker's rank. */
MLFAB__INTERNAL void mlfab__lead_fresh(mlfab__lead *lead, uint32_t worker);
MLFAB__INTERNAL void mlfab__lead_tick(mlfab__lead *lead, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__lead_deadline(const mlfab__lead *lead);
/* Its file operation has ended. */
MLFAB__INTERNAL void mlfab__lead_event(mlfab__lead *lead, const mlfab_io_event *event);

#endif
