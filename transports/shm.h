/* shm.h - common declarations of the shared-memory transport; shm.c has the contracts of rings, bells and links.
 *
 * shm_link.c writes to rings and life lines, shm_lend.c has references and the pool, shm.c has the rest. */
#ifndef MLFAB__SHM_H
#define MLFAB__SHM_H

#include "shm_file.h"
#include "../core/base/base.h"
#include "../core/base/env.h"
#include "../core/wire/wire.h"

typedef struct mlfab__shm_lend mlfab__shm_lend;

#if MLFAB_WITH_SHM
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>
#include <time.h>

#define SHM_LINE 64u
#define SHM_CONTROL 65536u /* a multiple of every page size in use */
#define SHM_RING 2621440u  /* 2.5 MiB: the largest ring */
#define SHM_RING_LEAST 131072u
#define SHM_VALID (UINT64_C(1) << 63)
#define SHM_REFERS (UINT64_C(1) << 62)
#define SHM_PLAIN 1u /* in a hello */

enum { SHM_ASLEEP = 1, SHM_ARMED = 2, SHM_POLLED = 4 };
enum shm_state { SHM_TRYING, SHM_CALLING, SHM_CALLED, SHM_FAILED, SHM_UP, SHM_RETIRED };
enum {
  SHM_NAME_MAX = 90, /* of an abstract socket, after its prefix */
  SHM_SMALL = 448    /* bytes of a head that need no large buffer */
};

/* One direction of a segment. Words of different writers are on different cache lines. */
struct shm_lane {
  _Alignas(64) _Atomic uint64_t tail;  /* consumer: all below is free */
  _Alignas(64) _Atomic uint64_t wants; /* producer: wake me when tail reaches this; 0: do not */
  _Atomic uint32_t closed;             /* producer: closed the link regularly */
};

struct shm_bell {
  _Alignas(64) _Atomic uint32_t state;
};

struct shm_link {
  /* Receiving; first, because an idle poll reads nothing else. */
  uint8_t *rx;
  _Atomic uint32_t rx_offset;
  atomic_bool gone; /* the life line has ended */
  /* Sending. */
  atomic_bool blocked;
  bool touched;   /* 1: in the list of links with peers that may need a wake-up */
  bool published; /* ... because of a frame; otherwise because of room */
  bool inbound;
  bool plain;    /* the peer knows no references */
  uint32_t ring; /* bytes of each ring */
  uint32_t tx_offset;
  uint8_t *tx;
  uint64_t head, tail_seen;
  uint64_t room;             /* blocked: the tail at which there is room; 0: at once */
  _Atomic uint64_t wants;    /* copy of tx_lane->wants */
  struct shm_refers *refers; /* of shm_lend.c, from the first reference on; or NULL */
  struct shm_lane *tx_lane, *rx_lane;
  struct shm_bell *bell; /* the peer's */
  int event_fd;          /* the peer's */
  int fd;                /* life line */
  int segment_fd;        /* until it is mapped */
  uint64_t rx_position;  /* behind the last frame delivered */
  uint64_t released;
  uint32_t borrowed; /* frames delivered and not released */
  uint32_t number;   /* 0 until UP */
  enum shm_state state;
  int32_t code; /* FAILED: the reason */
  int pid;
  uint64_t token;
  uint8_t *map;
  struct shm_link *next;                   /* in the list of half-open or retired links */
  char address[4 + 17 + SHM_NAME_MAX + 1]; /* the address dialled; "" for an inbound link */
};

/* Besides the ring, a FRAME event borrows a slot with the private copy of its head. */
struct shm_slot {
  struct shm_slot *next, *all;
  struct shm_link *link;
  struct shm_seen *seen; /* of shm_lend.c, from the first reference on; or NULL */
  uint64_t end;          /* position behind the record */
  uint8_t *large;        /* room for the largest head, allocated at first use */
  _Alignas(16) uint8_t small[SHM_SMALL];
};

struct shm_sent {
  uint32_t link; /* 0: no longer to be reported */
  uint64_t token;
};

struct shm {
  mlfab__env env;
  pid_t pid; /* process that opened the transport */
  uint32_t live_count, cursor, burst, busy;
  struct shm_link **live; /* links that are UP; changed under lock. The next two share its memory */
  struct shm_link **table, **touched;
  uint32_t touched_count, capacity, links, next_number;
  uint32_t blocked_count;
  const mlfab__shm_lend *lend; /* NULL: left out */
  struct shm_lender *lender;   /* its state */
  struct shm_slot *free_slots, *all_slots;
  struct shm_sent *sent; /* a ring of sent_capacity, a power of two */
  uint32_t sent_first, sent_capacity;
  _Atomic uint32_t sent_count, half_count, failed_count, up_count;
  uint32_t inbound_count;
  struct shm_link *half, *retired;
  struct shm_bell *bell; /* this node's */
  int bell_fd, event_fd, listen_fd, epoll_fd;
  atomic_bool look; /* sockets may have events */
  atomic_bool woken;
  struct timespec looked;
  _Atomic uint64_t deaf_ns; /* time since which connections wait without a descriptor; 0: none */
  uint64_t host;
  _Atomic uint64_t fence;           /* see shm_fence */
  _Atomic uint64_t rings, timeouts; /* wake-ups made, waits that timed out: for tests */
  pthread_mutex_t lock;
  char text[256]; /* text of the last DOWN or REFUSED */
};

/* References to memory that is lent, and the pool for small rings: shm_lend.c. */
struct mlfab__shm_lend {
  /* open: makes t->lender of a transport. Errors: MEMORY. close: called when all links are gone. */
  int (*open)(struct shm *t, const mlfab_transport_options *options);
  void (*close)(struct shm *t);
  /* wish: wanted bytes of a new link's rings. meet: both ends have agreed on them, and the peer is not plain. Its first
   * call takes the memory. The second (`tell`) follows the answer, and tells the peer of the pool. Errors: MEMORY,
   * REFUSED. free: called when the link is freed, or the transport closed. */
  uint32_t (*wish)(struct shm *t);
  int (*meet)(struct shm *t, struct shm_link *link, bool tell);
  void (*free)(struct shm *t, struct shm_link *link);
  /* Called when the life line has packets, or has ended. */
  void (*hear)(struct shm *t, struct shm_link *link);
  /* As `send` of the transport's table, for a bulk. 1: copy it into the ring. */
  int (*send)(struct shm *t, struct shm_link *link, const void *head, uint32_t head_bytes,
              const void *bulk, uint32_t bulk_bytes, uint64_t token);
  /* The tail at which this end has work to do. room: that tail for its ring, or 0. */
  uint64_t (*wants)(const struct shm_link *link, uint64_t room);
  /* see: a record refers to a bulk: *bulk_p is its reference, and becomes the bulk. Returns 1; 0: memory is short, try
   * again later; or an error of the peer. unsee: the frame is released. */
  int (*see)(struct shm *t, struct shm_slot *slot, uint32_t bytes, const uint8_t **bulk_p);
  void (*unsee)(struct shm_slot *slot);
  /* back: 1: a SENT event for bytes that a peer has released. take_back: as detach; token 0: all, as the link ends. */
  int (*back)(struct shm *t, mlfab_io_event *event);
  int (*take_back)(struct shm *t, struct shm_link *link, uint64_t token);
};

static inline _Atomic uint64_t *shm_word(uint8_t *ring, uint32_t offset) {
  return (_Atomic uint64_t *)(void *)(ring + offset);
}

static inline uint32_t shm_up(uint32_t bytes) { return (bytes + SHM_LINE - 1) & ~(SHM_LINE - 1); }

static inline uint32_t shm_forward(const struct shm_link *link, uint32_t offset, uint32_t bytes) {
  offset += bytes;
  return offset >= link->ring ? offset - link->ring : offset;
}

static inline void shm_touch(struct shm *t, struct shm_link *link) {
  if (link->touched) return;
  link->touched = true;
  t->touched[t->touched_count++] = link;
}

/* NULL when MLFAB_WITH_LEND is 0. */
MLFAB__INTERNAL const mlfab__shm_lend *mlfab__shm_lend_table(void);

/* shm_link.c - orders an earlier publication before the later read of a sleeper's word, and vice versa. */
MLFAB__INTERNAL void mlfab__shm_fence(struct shm *t);
/* ring: wakes a peer that sleeps at its bell. settle: wakes peers that have got a frame, or room that they want. */
MLFAB__INTERNAL void mlfab__shm_ring(struct shm *t, struct shm_bell *bell, int event_fd);
MLFAB__INTERNAL void mlfab__shm_settle(struct shm *t);
MLFAB__INTERNAL void mlfab__shm_close_fd(int *fd);
MLFAB__INTERNAL bool mlfab__shm_packet_post(int fd, void *packet, size_t bytes, const int *fds,
                                            uint32_t n);
/* Receives a packet and its descriptors, as many as `room`; others are closed. Returns the result of recvmsg; *count_p:
 * number of descriptors, UINT32_MAX if any part is cut off. */
MLFAB__INTERNAL ssize_t mlfab__shm_packet_take(int fd, void *packet, size_t bytes, int *fds,
                                               uint32_t room, uint32_t *count_p);
/* hang_up: ends the life line. lose: the same after its end (code 0) or a fault of the peer; poll reports DOWN. */
MLFAB__INTERNAL void mlfab__shm_hang_up(struct shm *t, struct shm_link *link);
MLFAB__INTERNAL void mlfab__shm_lose(struct shm *t, struct shm_link *link, int code);
/* Publishes the tail at which this end has work to do. */
MLFAB__INTERNAL void mlfab__shm_want(struct shm *t, struct shm_link *link);
/* Reads the consumer's tail. false: it is impossible, and the link goes DOWN. */
MLFAB__INTERNAL bool mlfab__shm_see_tail(struct shm_link *link);
/* Reports WRITABLE when the tail has reached `room`. Returns AGAIN. */
MLFAB__INTERNAL int mlfab__shm_block(struct shm *t, struct shm_link *link, uint64_t room);
/* Is there room for a record, and, if there is a token, for one more SENT? Returns 0, AGAIN or PEER_CLOSED. */
MLFAB__INTERNAL int mlfab__shm_room(struct shm *t, struct shm_link *link, uint32_t bytes,
                                    uint64_t token);
/* Publishes a record, whose bulk or reference is in its place. sent: its bulk is free at once. */
MLFAB__INTERNAL void mlfab__shm_publish(struct shm *t, struct shm_link *link, const uint8_t *head,
                                        uint32_t head_bytes, uint32_t bytes, uint64_t word);
MLFAB__INTERNAL void mlfab__shm_sent(struct shm *t, uint32_t link, uint64_t token);
#endif

#endif
