/* lead.h - server 0 leads the checkpoints of a fabric.
 *
 * A worker asks for a checkpoint, or so many commits of server 0 have passed. It leads one at a time; another worker
 * gets AGAIN. While it only removes files, a request waits (`waits`).
 *
 *    IDLE --asked--> LISTS --number = largest in the directory + 1--> CLEARS --> AWAITS --all shards are durable--> SEALS
 *     ^                |                                                |          |        the manifest is durable: |
 *     +--error, deadline------------------------------------------------+          |        the checkpoint is whole, |
 *     |                                                                            |        answered                 |
 *     +--------------------- SWEEPS <--error, deadline, a server is dead-----------+---------------------------------+
 *
 * LISTS reads the directory, so that every checkpoint gets a new number, also in a later process. Numbers of attempts that failed
 * are kept in mind, too (`spoilt`): their files may be gone. CLEARS
 * removes what attempts that failed have left, so that they do not fill the disk. AWAITS orders every server to write its
 * shard (CHECKPOINT_ORDER; repeated on a new link), and waits for the answers. SEALS writes the manifest. SWEEPS then
 * removes older checkpoints, except the newest `keep` that have a manifest, and the files of failed attempts. The manifests
 * go first. After an attempt that failed, SWEEPS lists the directory, and removes only the latter.
 *
 * Whose files. A directory may have files of other histories (record.h), and of other processes that lead. So CLEARS, and
 * SWEEPS after a list, first look at the header of each manifest, and of each file without a manifest. They strike the
 * foreign names off the list:
 *
 *    manifest             of another history, or unreadable; with it all files of its number
 *    file without one     of another history, or unreadable; or led by another process, and not there when this process
 *                         listed the directory first (`found`)
 *
 * If a file's number is below the newest manifest on the list, its attempt is over. It stays on the list, also if
 * another process has led it, or if it is empty or an unfinished part.
 *
 * An attempt is dead when nobody can still write its manifest. Conditions: its files are on the list, and its manifest
 * is not. Its number does not belong to server 0's other copy. Every server has answered its order. A server without an
 * answer may still be writing: `owes` is its lowest such number, and files of this number and later numbers stay. Its
 * late answer lets SWEEPS begin. A dead server owes nothing.
 *
 * With a replica. Each copy of server 0 leads for itself, and the copies share no state of the lead. A checkpoint under
 * way begins again when the other copy takes over: workers ask again on their new links, and a server that still writes
 * for the former copy gets another order a beat later. The copies use different numbers (the server odd, its replica
 * even): a file that the former copy still writes belongs to another checkpoint, whole or not.
 *
 * Invariants. (1) A manifest is written only after every shard of its number and set is durable. So a checkpoint with a
 * manifest is whole, whichever process stops, and whenever. (2) A file of a checkpoint is removed only after a newer
 * manifest of its history is durable; the attempt of a file without a manifest must also be dead. (3) A failed attempt
 * leaves older checkpoints unchanged. (4) Each kind of failure (code) gets one log line per minute, and one more when a
 * checkpoint is whole again. A server that leaves is no warning: most runs end so. Every attempt has its event and its
 * answer. */
#ifndef MLFAB__LEAD_H
#define MLFAB__LEAD_H

#include "../node/files.h"
#include "record.h"

struct mlfab__server;

enum mlfab__lead_phase {
  MLFAB__LEAD_IDLE,
  MLFAB__LEAD_LISTS,
  MLFAB__LEAD_CLEARS,
  MLFAB__LEAD_AWAITS,
  MLFAB__LEAD_SEALS,
  MLFAB__LEAD_SWEEPS
};

typedef struct mlfab__lead_seat { /* last answer to a worker */
  uint64_t ask, number, version, bytes;
  int32_t code;
} mlfab__lead_seat;

enum { MLFAB__LEAD_KINDS = 8 };

enum mlfab__lead_step {                    /* step of CLEARS and SWEEPS */
                        MLFAB__LEAD_LOOKS, /* reads headers of manifests */
                        MLFAB__LEAD_LOOKS_REST,
                        MLFAB__LEAD_REMOVES, /* removes manifests */
                        MLFAB__LEAD_REMOVES_REST,
                        MLFAB__LEAD_STEPS
};

typedef struct mlfab__lead_said { /* a kind of failure in the log */
  int kind;                       /* a code; 1: a file cannot be removed; 0: none */
  uint64_t until_ns;              /* until then the log gets no other line of this kind */
} mlfab__lead_said;

typedef struct mlfab__lead {
  mlfab__env *env;
  const mlfab_config *config;
  const struct mlfab__server *server;
  mlfab__filer *filer;
  mlfab__port down, across; /* ports to workers; to servers */
  void *self;
  void (*own)(void *self,
              const mlfab__checkpoint_order *order); /* the order to this server itself */
  uint32_t leader;                                   /* random number of this process */
  enum mlfab__lead_phase phase;
  /* Does this server take part? Added servers do so only while they have slices. */
  int (*asks)(void *self, uint32_t server);
  uint32_t workers, servers;
  mlfab__lead_seat *seats;
  int waits; /* a request waits for the removal of files: */
  uint32_t waiter;
  mlfab__checkpoint_ask wanted;
  /* The checkpoint being made. */
  uint32_t asker; /* a worker, or MLFAB__NO_NODE: by itself */
  uint32_t keep;
  uint64_t deadline_ns;
  uint64_t again_ns; /* AWAITS: when to order again; 0: never */
  mlfab__checkpoint_order order;
  mlfab__checkpoint_done done;
  uint8_t *answered; /* by server */
  uint64_t *owes;    /* by server: the first failed attempt that it has not answered; 0: none */
  uint64_t whole;    /* number of the last checkpoint that this process completed */
  uint32_t *shard;   /* by server: its shard's number among the shards */
  uint32_t shards;   /* number of servers that take part */
  mlfab__checkpoint_entry *entries; /* by shard */
  uint32_t awaited;                 /* number of servers that have not answered */
  uint32_t epoch;
  char *names; /* the directory's list */
  uint32_t names_bytes;
  int listed;     /* this process has listed order.dir before ... */
  uint64_t found; /* ... and found this largest number */
  enum mlfab__lead_step step;
  size_t name_at;               /* next name for the step */
  mlfab__record_name looked_at; /* LOOKS, LOOKS_REST: the file being read ... */
  char *looked_name;            /* ... and its place in the list */
  uint64_t oldest;              /* CLEARS, SWEEPS: oldest number that stays */
  mlfab__lead_said said[MLFAB__LEAD_KINDS];
  uint64_t failures; /* attempts that failed since the last whole checkpoint */
  int told;          /* one of them is in the log */
  uint64_t spoilt;   /* number of the last attempt that failed */
  uint64_t next_at;  /* number of commits at which the next one begins by itself */
  char path[MLFAB__RECORD_PATH + 8];
  uint8_t *head; /* head of the manifest's file, allocated on demand */
} mlfab__lead;

/* The caller sets all members up to `seed` before. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__lead_init(mlfab__lead *lead);
MLFAB__INTERNAL void mlfab__lead_free(mlfab__lead *lead);
/* asked: takes CHECKPOINT_ASK from a worker. by_itself: for the configured number of commits. */
MLFAB__INTERNAL void mlfab__lead_asked(mlfab__lead *lead, uint32_t worker,
                                       const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__lead_by_itself(mlfab__lead *lead, uint64_t now_ns);
/* answered: a server's answer. gone: it is dead, or has left. up: its link stands. wants: is a link to it needed? */
MLFAB__INTERNAL void mlfab__lead_answered(mlfab__lead *lead, const mlfab__checkpoint_shard *shard);
MLFAB__INTERNAL void mlfab__lead_gone(mlfab__lead *lead, uint32_t server, int left);
MLFAB__INTERNAL void mlfab__lead_up(mlfab__lead *lead, uint32_t server);
MLFAB__INTERNAL int mlfab__lead_wants(const mlfab__lead *lead, uint32_t server);
/* Notes that a new process has this worker's rank. */
MLFAB__INTERNAL void mlfab__lead_fresh(mlfab__lead *lead, uint32_t worker);
MLFAB__INTERNAL void mlfab__lead_tick(mlfab__lead *lead, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__lead_deadline(const mlfab__lead *lead);
/* Takes the end of its file operation. */
MLFAB__INTERNAL void mlfab__lead_event(mlfab__lead *lead, const mlfab_io_event *event);

#endif
