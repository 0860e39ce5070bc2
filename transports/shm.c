/* shm.c - carries frames between processes of one host through shared memory.
 *
 * For peers under one kernel: a frame is copied once into a ring that both processes map, its bulk is
 * delivered in place, and no system call is made while both sides are awake. A bulk in memory of mlfab_alloc is not
 * copied: the ring has a reference to it. It does not reach other hosts, does not authenticate beyond "same user, or
 * root", and computes no payload checksums.
 *
 * Addresses: "shm:<host>/<name>", where host is a hash of the boot and the network namespace, and name that
 * of an abstract Unix socket "mlfab:<name>"; "shm:<name>" means this host. Abstract sockets and memfds have
 * no name in a file system: nothing remains, however the processes end.
 *
 * Connecting. The connector sends one packet with three descriptors: the segment (a memfd that it created),
 * its bell (below) and its eventfd. The acceptor checks uid, seals and sizes, maps the segment, and answers
 * with its own bell and eventfd; then the link is up on both sides. The socket stays open as the life line:
 * it ends when the peer ends, however it dies. Besides, it carries the descriptors of files that records refer to.
 *
 * Segment, sealed against shrinking and growing so that no access can fault:
 *
 *    0         control: lane[0] (connector to acceptor), lane[1] (acceptor to connector)
 *    64 KiB    ring of lane 0, at most 2.5 MiB: two of the largest frames, hardly more than a level 2 cache
 *    then      ring of lane 1
 *
 * Each ring is mapped twice in a row, so that every record is contiguous and none has to be split or
 * skipped at the end. Pages are allocated at first use, but a ring that is in use has all of them in time.
 *
 * Size of a ring: 24 MiB by the number of neighbours, at least 128 KiB (shm_share). The connector tells its size, the
 * acceptor answers with the smaller one of both, which holds. The neighbours are the nodes that the options tell, or
 * the links that there are, if these are more. A ring that is smaller than 2.5 MiB carries no record of more than a
 * fourth of it, but for its head: the bulk of such a frame is copied into the sender's pool, and the record refers to
 * it. The pool is one file for all links of a node, of which the pages exist that have been in use at one time. A link
 * may have 512 KiB in it, or two frames, so a peer that does not read does not hold up others. When a link ends
 * whose peer may still read, its units are lost until the others are free, too: then the next pool begins.
 *
 * Record, at a multiple of 64 bytes:
 *
 *    0   u64 word: bit 63, bit 62 if it refers, head bytes << 32, bulk bytes; 0 where no record has been published
 *    8   head (frame header and meta), padded to the next multiple of 64
 *    .   bulk, padded likewise; or in one line the reference: number of a file, offset of the bulk in it
 *
 * Ring invariants. Positions count bytes since the beginning and never wrap; the offset is the position
 * modulo the ring size. Only the producer uses `head`; the consumer publishes `tail`:
 *   (1) tail <= head, and head - tail + 64 <= ring: the word at head belongs to the producer and is 0.
 *   (2) A record is published by one release store of its word, after its bytes and after a zero was
 *       written to the word behind it. So the consumer finds a record by reading the line that holds it,
 *       no index is shared, and a record is either complete or absent, even if its producer is killed at
 *       any instruction.
 *   (3) The consumer reads delivered frames between tail and its own position; it moves tail by a release
 *       store when a frame is released.
 * Nothing read from the segment is trusted: a word must give lengths within the limits of a frame, and a
 * tail must lie between the last one and head, or the link goes DOWN. Both limits keep every access within
 * the two mappings. A head is copied to private memory before it is checked. A hostile peer may change a
 * bulk while it is read, but not its length: code that reads bytes twice copies them first. A reference must lie within
 * a file that the peer has passed, sealed against shrinking; such files are mapped for reading only.
 *
 * References. A bulk that the caller lends (with a token), and whose pages hold nothing else (shm_memory.h), is lent on
 * to the peer until its frame is released: tail has passed its record (`lent`, in the order of sending). The peer is
 * told of a file before the first record that refers to it is published, so it reads the life line when it finds an
 * unknown number. Each end has SHM_FILES places for the other's files; a place is used again when its file is
 * gone and nothing in it is lent. When the bytes become the caller's before they are released (detach, disconnect,
 * DOWN), their pages are renewed: the peer may be stopped while it reads, and goes on with the old ones.
 *
 * Bell. Every node has one page, mapped by all its peers, with one word of bits: ASLEEP (in wait, on this
 * word as a futex), ARMED (the program sleeps on fd()), POLLED (wait sleeps on the sockets, because
 * connections are being made or there is no link yet). 0 means awake.
 *   sleeper:  set the bit; full fence; look at all rings; sleep until the bit is gone
 *   producer: publish, or move tail; ...; full fence; if the word is not 0, take it (exchange with 0)
 *             and make the one system call that ends the sleep
 * One of the two sees the other, so no wake-up is lost; only the side that takes the word makes the call,
 * so there is one call for each sleep. The producer's half (shm_settle) runs once per flush, not per send,
 * and in every poll that finds nothing. A producer without room publishes in `wants` the tail that it waits
 * for. Sleeping on the futex does not watch sockets, so it is divided into slices of 50 ms, after which
 * they are polled.
 *
 * States of a link: TRYING (the peer's queue of connections is full) -> CALLING (packet sent) -> UP, or
 * CALLED (the peer connected, packet awaited) -> UP; FAILED (to be reported); UP -> gone (life line ended:
 * records in the ring are still delivered, then DOWN) -> RETIRED (kept until the frames borrowed from its
 * ring are released).
 *
 * Forks: a child has the descriptors, and none of the mappings (MADV_DONTFORK). It only closes.
 *
 * Threads: wait, wake and fd may run beside the other functions. wait reads the rings under `lock`, which
 * the others take only to change the list of links. */
#include "shm_file.h"
#include "../core/base/base.h"
#include "../core/base/env.h"
#include "../core/wire/wire.h"

#if !MLFAB_WITH_SHM
const mlfab_transport *mlfab_transport_shm(void) { return NULL; }
#else

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* Words are shared between processes, so atomics must not use locks. */
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "atomics take locks");

#define SHM_LINE 64u
#define SHM_CONTROL 65536u /* a multiple of every page size in use */
#define SHM_RING 2621440u  /* 2.5 MiB: the largest ring */
#define SHM_RING_LEAST 131072u
#define SHM_RINGS 25165824u /* 24 MiB: the rings of a node, one a neighbour */
#define SHM_UNIT 65536u     /* of a pool */
#define SHM_POOLED 524288u  /* bytes in the pool of a link that has more than two frames there */
#define SHM_VALID (UINT64_C(1) << 63)
#define SHM_SLICE_NS UINT64_C(50000000)
#define SHM_DEAF_NS UINT64_C(100000000)
#define SHM_MAGIC 0x314d4853u /* "SHM1": the form of shm_hello; the layout is of MLFAB_PROTOCOL */
#define SHM_FILE_MAGIC 0x464d4853u
#define SHM_REFERS (UINT64_C(1) << 62)

enum { SHM_ASLEEP = 1, SHM_ARMED = 2, SHM_POLLED = 4 };
enum shm_state { SHM_TRYING, SHM_CALLING, SHM_CALLED, SHM_FAILED, SHM_UP, SHM_RETIRED };
enum {
  SHM_HALF_MAX = 64,  /* maximum connections without a packet */
  SHM_BURST = 16,     /* frames taken from one link before the next link's turn */
  SHM_NAME_MAX = 90,  /* of an abstract socket, after its prefix */
  SHM_SMALL = 448,    /* bytes of a head that need no large buffer */
  SHM_REFER = 32768,  /* shorter bulks are copied: that is cheaper */
  SHM_LENT = 512,     /* maximum references of a link that are not released */
  SHM_LENT_FEW = 64,  /* likewise, of a link with a small ring */
  SHM_FILES = 32,     /* maximum files of a peer that are mapped, */
  SHM_PLACES,         /* and its pool, which has the last place */
  SHM_UNITS = 4096,   /* of a pool: 256 MiB of addresses */
  SHM_LOOK_EVERY = 64 /* polls with events between two polls of the sockets */
};

_Static_assert(2 * (SHM_LINE + 8 + MLFAB_HEADER_BYTES + MLFAB_META_MAX + MLFAB_BULK_MAX) +
                       SHM_LINE <
                   SHM_RING,
               "the largest ring holds two of the largest frames");
_Static_assert(3 * SHM_LINE + 8 + MLFAB_HEADER_BYTES + MLFAB_META_MAX < SHM_RING_LEAST,
               "every ring holds the largest head with a reference");

/* One direction of a segment. Words of different writers are on different cache lines. */
struct shm_lane {
  _Alignas(64) _Atomic uint64_t tail;  /* consumer: everything below is free */
  _Alignas(64) _Atomic uint64_t wants; /* producer: wake me when tail reaches this; 0: do not */
  _Atomic uint32_t closed;             /* producer: closed the link regularly */
};

struct shm_bell {
  _Alignas(64) _Atomic uint32_t state;
};

/* The first packet on a life line, in both directions. */
struct shm_hello {
  uint32_t magic, control_bytes, ring_bytes, protocol;
};

/* The later ones, each with a descriptor. */
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

/* What a link needs for references, from the first one on. */
struct shm_refers {
  uint32_t lent_first, lent_count, lent_room; /* of `lent`, a ring */
  uint32_t tokens;           /* how many are lent with a token, that is not in the pool; */
  uint64_t tokens_end;       /* the position behind the last of them */
  uint32_t pooled;           /* how many are in the pool, */
  uint64_t pooled_bytes;     /* and their bytes */
  uint64_t told[SHM_PLACES]; /* numbers of own files that the peer has, by place */
  struct shm_view views[SHM_PLACES];
  struct shm_lent lent[];
};

/* Where bulks are that are too large for a ring. */
struct shm_pool {
  uint8_t *at; /* NULL: there is none */
  int fd, read_fd;
  uint64_t number;     /* as of other files; those have smaller ones */
  uint32_t used, lost; /* units; lost: used by links that have ended */
  uint64_t bits[SHM_UNITS / 64];
};

struct shm_link {
  /* Receiving; first, because an idle poll reads nothing else. */
  uint8_t *rx;
  _Atomic uint32_t rx_offset;
  atomic_bool gone; /* the life line has ended */
  /* Sending. */
  atomic_bool blocked;
  bool touched;   /* is in the list of links whose peer may need a wake-up */
  bool published; /* ... because of a frame; otherwise because of room */
  bool inbound;
  uint32_t ring; /* bytes of each */
  uint32_t most; /* bytes of a record that are not in the pool */
  uint32_t tx_offset;
  uint8_t *tx;
  uint64_t head, tail_seen;
  uint64_t room;          /* blocked: the tail at which there is room; 0: at once */
  _Atomic uint64_t wants; /* copy of tx_lane->wants */
  struct shm_refers *refers;
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
  int32_t code; /* FAILED: why */
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
  struct shm_view *view; /* where the bulk is, or NULL: in the ring */
  uint8_t *bulk;         /* room for the largest bulk, allocated when a view has no mapping */
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
  struct shm_link **live; /* links that are UP; changed under lock */
  struct shm_link **table, **touched;
  uint32_t touched_count, capacity, links, next_number;
  uint32_t blocked_count, lending; /* links that are blocked; that have something lent */
  uint32_t neighbours;             /* that are expected; 0: not known */
  mlfab__shm_memory *memory;       /* of the context, or NULL */
  struct shm_pool pool;
  uint64_t pools; /* that there were */
  struct shm_slot *free_slots, *all_slots;
  struct shm_sent *sent; /* a ring of sent_capacity, a power of two */
  uint32_t sent_first, sent_capacity;
  _Atomic uint32_t sent_count, half_count, failed_count, up_count;
  uint32_t inbound_count;
  struct shm_link *half, *retired;
  struct shm_bell *bell; /* this node's */
  int bell_fd, event_fd, listen_fd, epoll_fd;
  int spare_fd; /* kept so that a peer's file can be received when the process has no descriptor left */
  atomic_bool look; /* sockets may have events */
  atomic_bool woken;
  struct timespec looked;
  _Atomic uint64_t deaf_ns; /* since when connections wait without a descriptor; 0: not */
  uint64_t host;
  _Atomic uint64_t fence;           /* see shm_fence */
  _Atomic uint64_t rings, timeouts; /* wake-ups made, waits that timed out: for tests */
  pthread_mutex_t lock;
  char text[256]; /* text of the last DOWN or REFUSED */
};

/* ---- rings and bells ---- */

/* Orders an earlier publication before the later read of a sleeper's word, and vice versa. */
static inline void shm_fence(struct shm *t) {
#if MLFAB__TSAN
  atomic_fetch_add(&t->fence, 1);
#else
  (void)t;
  atomic_thread_fence(memory_order_seq_cst);
#endif
}

/* Prefetches a line for writing, ownership included. */
static inline void shm_prefetch(const uint8_t *line) {
#if defined(__x86_64__)
  __asm__ volatile("prefetchw %0" : : "m"(*line)); /* the builtin would prefetch for reading only */
#elif defined(__GNUC__)
  __builtin_prefetch(line, 1);
#else
  (void)line;
#endif
}

static inline _Atomic uint64_t *shm_word(uint8_t *ring, uint32_t offset) {
  return (_Atomic uint64_t *)(void *)(ring + offset);
}

static inline uint32_t shm_up(uint32_t bytes) { return (bytes + SHM_LINE - 1) & ~(SHM_LINE - 1); }

static inline uint32_t shm_forward(const struct shm_link *link, uint32_t offset, uint32_t bytes) {
  offset += bytes;
  return offset >= link->ring ? offset - link->ring : offset;
}

/* Bytes of a ring to one of so many neighbours. */
static uint32_t shm_share(uint64_t neighbours) {
  uint64_t share = SHM_RINGS / mlfab__max(neighbours, 1) / SHM_CONTROL * SHM_CONTROL;
  return (uint32_t)mlfab__min(mlfab__max(share, SHM_RING_LEAST), SHM_RING);
}

static void shm_ring(struct shm *t, struct shm_bell *bell, int event_fd) {
  if (atomic_load_explicit(&bell->state, memory_order_relaxed) == 0) return;
  uint32_t state = atomic_exchange(&bell->state, 0);
  uint64_t one = 1;
  if (state == 0) return;
  atomic_fetch_add_explicit(&t->rings, 1, memory_order_relaxed);
  if (state & SHM_ASLEEP)
    syscall(SYS_futex, &bell->state, MLFAB__FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
  /* It does not block; if it fails, the counter is full and the descriptor readable. */
  if ((state & ~(uint32_t)SHM_ASLEEP) && write(event_fd, &one, sizeof one) < 0) return;
}

static inline void shm_touch(struct shm *t, struct shm_link *link) {
  if (link->touched) return;
  link->touched = true;
  t->touched[t->touched_count++] = link;
}

/* Wakes sleeping peers for which a frame was published, or the room made that they want. */
static void shm_settle(struct shm *t) {
  if (t->touched_count == 0) return;
  shm_fence(t);
  for (uint32_t i = 0; i < t->touched_count; i++) {
    struct shm_link *link = t->touched[i];
    uint64_t wants = atomic_load_explicit(&link->rx_lane->wants, memory_order_relaxed);
    if (link->published || (wants != 0 && link->released >= wants))
      shm_ring(t, link->bell, link->event_fd);
    link->touched = link->published = false;
  }
  t->touched_count = 0;
}

/* Would poll find something? May run beside poll, so it takes the lock. */
static bool shm_anything(struct shm *t) {
  bool found = atomic_load(&t->sent_count) != 0 || atomic_load(&t->failed_count) != 0;
  pthread_mutex_lock(&t->lock);
  for (uint32_t i = 0; i < t->live_count && !found; i++) {
    struct shm_link *link = t->live[i];
    uint32_t offset = atomic_load_explicit(&link->rx_offset, memory_order_relaxed);
    found = atomic_load_explicit(shm_word(link->rx, offset), memory_order_acquire) != 0 ||
            atomic_load(&link->gone);
    uint64_t wants = atomic_load(&link->wants);
    if (!found && (wants != 0 || atomic_load(&link->blocked)))
      found = atomic_load(&link->tx_lane->tail) >= wants;
  }
  pthread_mutex_unlock(&t->lock);
  return found;
}

/* ---- the segment and other descriptors ---- */

static void shm_close_fd(int *fd) {
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

/* Writing to an eventfd does not block with O_NONBLOCK; other descriptors might. */
static bool shm_is_eventfd(int fd) {
  char path[40], target[40];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(path, target, sizeof target - 1);
  if (n < 0) return false;
  target[n] = 0;
  return strcmp(target, "anon_inode:[eventfd]") == 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0;
}

static void *shm_map(void *at, size_t bytes, int fd, size_t offset) {
  return mlfab__shm_map(at, bytes, PROT_READ | PROT_WRITE, fd, offset);
}

static size_t shm_mapping(const struct shm_link *link) {
  return SHM_CONTROL + 4 * (size_t)link->ring;
}

/* Maps control and rings, each ring twice in a row. The file may be larger than they are. */
static bool shm_map_segment(struct shm_link *link, int fd) {
  const uint32_t ring = link->ring, control = SHM_CONTROL;
  uint8_t *map =
      mmap(NULL, shm_mapping(link), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return false;
  link->map = map;
  link->most = ring < SHM_RING ? ring / 4 : ring;
  if (shm_map(map, control + ring, fd, 0) == NULL ||
      shm_map(map + control + ring, ring, fd, control) == NULL ||
      shm_map(map + control + 2 * (size_t)ring, ring, fd, control + ring) == NULL ||
      shm_map(map + control + 3 * (size_t)ring, ring, fd, control + ring) == NULL)
    return false; /* shm_free_link unmaps */
  struct shm_lane *lanes = (struct shm_lane *)(void *)map;
  uint8_t *rings[2] = {map + control, map + control + 2 * (size_t)ring};
  link->tx_lane = &lanes[link->inbound];
  link->rx_lane = &lanes[!link->inbound];
  link->tx = rings[link->inbound];
  link->rx = rings[!link->inbound];
  return true;
}

/* ---- the packet of the life line ---- */

static bool shm_packet_post(int fd, void *packet, size_t bytes, const int *fds, uint32_t n) {
  union {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(3 * sizeof(int))];
  } control;
  struct iovec part = {packet, bytes};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  if (n > 0) {
    memset(&control, 0, sizeof control);
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(n * sizeof(int));
    struct cmsghdr *item = CMSG_FIRSTHDR(&message);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(item), fds, n * sizeof(int));
  }
  return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)bytes;
}

static bool shm_packet_send(int fd, const int *fds, uint32_t n, uint32_t ring) {
  struct shm_hello hello = {SHM_MAGIC, SHM_CONTROL, ring, MLFAB_PROTOCOL};
  return shm_packet_post(fd, &hello, sizeof hello, fds, n);
}

/* Receives a packet and its descriptors, as many as `room`; others are closed. Returns what recvmsg does; *count_p: how many
 * there were, UINT32_MAX if something is cut off. */
static ssize_t shm_packet_take(int fd, void *packet, size_t bytes, int *fds, uint32_t room,
                               uint32_t *count_p) {
  union {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(3 * sizeof(int))];
  } control;
  struct iovec part = {packet, bytes};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes};
  message.msg_controllen = sizeof control.bytes;
  ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  uint32_t count = 0;
  int extra = -1;
  *count_p = 0;
  if (n < 0) return n;
  for (struct cmsghdr *item = CMSG_FIRSTHDR(&message); item != NULL;
       item = CMSG_NXTHDR(&message, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= item->cmsg_len; i++, count++) {
      int *to = count < room ? &fds[count] : &extra;
      memcpy(to, CMSG_DATA(item) + i * sizeof(int), sizeof(int));
      if (to == &extra) shm_close_fd(&extra);
    }
  }
  *count_p = message.msg_flags & (MSG_TRUNC | MSG_CTRUNC) ? UINT32_MAX : count;
  return n;
}

/* 0: nothing yet; 1: the packet with `want` descriptors and rings of at most *ring_p; an error: the end, a packet of another
 * protocol, or anything else, whose descriptors are closed. */
static int shm_packet_receive(int fd, int *fds, uint32_t want, uint32_t *ring_p) {
  struct shm_hello hello;
  uint32_t count;
  ssize_t n = shm_packet_take(fd, &hello, sizeof hello, fds, want, &count);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (n < 0) return MLFAB_ERR_REFUSED;
  int known = n == (ssize_t)sizeof hello && count != UINT32_MAX && hello.magic == SHM_MAGIC &&
              hello.control_bytes == SHM_CONTROL && hello.ring_bytes % SHM_CONTROL == 0 &&
              hello.ring_bytes >= SHM_RING_LEAST && hello.ring_bytes <= SHM_RING;
  if (known && hello.protocol == MLFAB_PROTOCOL && count == want && hello.ring_bytes <= *ring_p) {
    *ring_p = hello.ring_bytes;
    return 1;
  }
  for (uint32_t i = 0; i < want; i++) shm_close_fd(&fds[i]);
  return !known || hello.protocol == MLFAB_PROTOCOL ? MLFAB_ERR_REFUSED
         : hello.protocol < MLFAB_PROTOCOL          ? MLFAB_ERR_PROTOCOL_OLDER
                                                    : MLFAB_ERR_PROTOCOL_NEWER;
}

/* The same user, or root: other users could read what they are sent. */
static bool shm_trusted(int fd, int *pid_p) {
  struct ucred peer;
  socklen_t bytes = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return false;
  *pid_p = (int)peer.pid;
  return peer.uid == geteuid() || peer.uid == 0;
}

/* ---- links ---- */

static struct shm_link *shm_find(struct shm *t, uint32_t number) {
  return number == 0 || number > t->capacity ? NULL : t->table[number - 1];
}

/* Makes the arrays large enough for one more link, so that nothing later can fail for lack of room. */
static bool shm_reserve(struct shm *t) {
  if (t->links < t->capacity) return true;
  uint32_t capacity = t->capacity == 0 ? 64 : 2 * t->capacity;
  if (capacity >= (1u << 24)) return false;
  struct shm_link **live = mlfab__alloc_array(&t->env, capacity, sizeof *live);
  struct shm_link **table = mlfab__alloc_array(&t->env, capacity, sizeof *table);
  struct shm_link **touched = mlfab__alloc_array(&t->env, capacity, sizeof *touched);
  size_t old = t->capacity * sizeof *live, size = capacity * sizeof *live;
  bool done = live != NULL && table != NULL && touched != NULL;
  if (done) {
    if (old > 0) {
      memcpy(live, t->live, old);
      memcpy(table, t->table, old);
      memcpy(touched, t->touched, old);
    }
    struct shm_link **grown[3] = {live, table, touched};
    pthread_mutex_lock(&t->lock);
    live = t->live, table = t->table, touched = t->touched;
    t->live = grown[0], t->table = grown[1], t->touched = grown[2];
    t->capacity = capacity;
    pthread_mutex_unlock(&t->lock);
    size = old;
  }
  if (live != NULL) mlfab__free(&t->env, live, size);
  if (table != NULL) mlfab__free(&t->env, table, size);
  if (touched != NULL) mlfab__free(&t->env, touched, size);
  return done;
}

/* Creates a half-open link. */
static struct shm_link *shm_new_link(struct shm *t, enum shm_state state, int fd) {
  struct shm_link *link = shm_reserve(t) ? mlfab__alloc(&t->env, sizeof *link) : NULL;
  if (link == NULL) return NULL;
  link->fd = fd;
  link->event_fd = link->segment_fd = -1;
  link->state = state;
  link->inbound = state == SHM_CALLED;
  link->next = t->half;
  t->half = link;
  t->links++;
  t->inbound_count += link->inbound;
  atomic_fetch_add(&t->half_count, 1);
  return link;
}

static void shm_leave_half(struct shm *t, struct shm_link *link) {
  struct shm_link **at = &t->half;
  while (*at != link) at = &(*at)->next;
  *at = link->next;
  t->inbound_count -= link->inbound;
  atomic_fetch_sub(&t->half_count, 1);
  if (link->state == SHM_FAILED) atomic_fetch_sub(&t->failed_count, 1);
}

/* Ends the life line. Removes it from the epoll set explicitly, because a forked child that still holds the
 * socket would otherwise keep it there. */
static void shm_hang_up(struct shm *t, struct shm_link *link) {
  if (link->fd >= 0) epoll_ctl(t->epoll_fd, EPOLL_CTL_DEL, link->fd, NULL);
  shm_close_fd(&link->fd);
}

static void shm_unview(struct shm *t, struct shm_view *view) {
  if (view->at != NULL) mlfab__shm_memory_unmap(t->memory, view->at, view->bytes);
  if (view->number != 0 && view->at == NULL) close(view->fd);
  *view = (struct shm_view){0};
}

static size_t shm_refers_bytes(const struct shm_refers *refers) {
  return sizeof *refers + refers->lent_room * sizeof *refers->lent;
}

static void shm_free_link(struct shm *t, struct shm_link *link) {
  shm_hang_up(t, link);
  shm_close_fd(&link->event_fd);
  shm_close_fd(&link->segment_fd);
  if (link->map != NULL) munmap(link->map, shm_mapping(link));
  if (link->bell != NULL) munmap(link->bell, SHM_CONTROL);
  for (uint32_t i = 0; link->refers != NULL && i < SHM_PLACES; i++)
    shm_unview(t, &link->refers->views[i]);
  if (link->refers != NULL) mlfab__free(&t->env, link->refers, shm_refers_bytes(link->refers));
  t->links--;
  mlfab__free(&t->env, link, sizeof *link);
}

static void shm_drop_half(struct shm *t, struct shm_link *link) {
  shm_leave_half(t, link);
  shm_free_link(t, link);
}

/* From half-open to UP. */
static void shm_establish(struct shm *t, struct shm_link *link, mlfab_io_event *event) {
  shm_leave_half(t, link);
  link->state = SHM_UP;
  while (t->table[t->next_number % t->capacity] != NULL) t->next_number++;
  link->number = t->next_number++ % t->capacity + 1;
  t->table[link->number - 1] = link;
  pthread_mutex_lock(&t->lock);
  t->live[t->live_count++] = link;
  pthread_mutex_unlock(&t->lock);
  atomic_fetch_add(&t->up_count, 1);
  event->kind = MLFAB_IO_UP;
  event->link = link->number;
  event->token = link->token;
}

/* ---- the pool ---- */

static void shm_pool_close(struct shm_pool *pool) {
  if (pool->at != NULL) munmap(pool->at, (size_t)SHM_UNITS * SHM_UNIT);
  shm_close_fd(&pool->read_fd);
  shm_close_fd(&pool->fd);
  *pool = (struct shm_pool){.fd = -1, .read_fd = -1};
}

/* Begins a pool, in the place of one of which all units are lost: a peer that still reads those keeps their pages to itself.
 * false: there are no descriptors or addresses, and the pool is as it was. */
static bool shm_pool_open(struct shm *t) {
  char path[40];
  const size_t bytes = (size_t)SHM_UNITS * SHM_UNIT;
  struct shm_pool pool = {.read_fd = -1, .number = UINT64_C(1) << 63 | (t->pools + 1)};
  pool.fd = mlfab__shm_file("mlfab-pool", bytes, F_SEAL_SEAL);
  if (pool.fd >= 0) {
    snprintf(path, sizeof path, "/proc/self/fd/%d", pool.fd);
    pool.read_fd = open(path, O_RDONLY | O_CLOEXEC); /* so that the peers cannot write */
    pool.at = pool.read_fd >= 0 ? shm_map(NULL, bytes, pool.fd, 0) : NULL;
  }
  if (pool.at == NULL) {
    shm_pool_close(&pool);
    return false;
  }
  shm_pool_close(&t->pool);
  t->pool = pool;
  t->pools++;
  return true;
}

/* The ring that this node wishes a new link to have. */
static uint32_t shm_wish(struct shm *t) {
  uint32_t ring = shm_share(mlfab__max(t->neighbours, t->live_count + 1));
  return ring == SHM_RING || t->pool.at != NULL || shm_pool_open(t) ? ring : SHM_RING;
}

/* The first of n units in a row that are free, the lowest ones, because their pages exist; or SHM_UNITS. */
static uint32_t shm_pool_find(const struct shm_pool *pool, uint32_t n) {
  for (uint32_t i = 0, run = 0; i < SHM_UNITS; i++) {
    if (i % 64 == 0 && pool->bits[i / 64] == UINT64_MAX) {
      run = 0;
      i += 63;
      continue;
    }
    run = pool->bits[i / 64] >> i % 64 & 1 ? 0 : run + 1;
    if (run == n) return i + 1 - n;
  }
  return SHM_UNITS;
}

static void shm_pool_turn(struct shm_pool *pool, uint32_t first, uint32_t n) {
  for (uint32_t i = first; i < first + n; i++) pool->bits[i / 64] ^= UINT64_C(1) << i % 64;
}

/* The peer has the descriptor of the pool. false: not now. */
static bool shm_pool_tell(struct shm *t, struct shm_link *link) {
  struct shm_file file = {SHM_FILE_MAGIC, SHM_FILES, t->pool.number,
                          (uint64_t)SHM_UNITS * SHM_UNIT};
  uint64_t *told = &link->refers->told[SHM_FILES];
  if (*told == file.number) return true;
  if (!shm_packet_post(link->fd, &file, sizeof file, &t->pool.read_fd, 1)) return false;
  *told = file.number;
  return true;
}

/* Bytes in the pool have come back; or, lost, the link has ended, and its peer may still read them. */
static void shm_pool_back(struct shm *t, struct shm_refers *refers, struct shm_lent *lent,
                          bool lost) {
  refers->pooled--;
  refers->pooled_bytes -= lent->bytes;
  if (lost) {
    t->pool.lost += lent->units;
  } else {
    shm_pool_turn(&t->pool, lent->unit, lent->units);
    t->pool.used -= lent->units;
  }
  lent->units = 0;
  if (t->pool.lost > 0 && t->pool.lost == t->pool.used) shm_pool_open(t);
}

/* ---- what is lent ---- */

static struct shm_lent *shm_lent_at(struct shm_refers *refers, uint32_t i) {
  return &refers->lent[(refers->lent_first + i) % refers->lent_room];
}

/* Publishes the tail at which this end has something to do: there is room, or all that is lent has come back. What came back
 * before, it sees when something else wakes it. Nobody waits for what is in the pool. */
static void shm_want(struct shm_link *link) {
  uint64_t wants = atomic_load_explicit(&link->blocked, memory_order_relaxed) ? link->room : 0;
  if (link->refers != NULL && link->refers->tokens > 0) {
    uint64_t end = link->refers->tokens_end;
    if (wants == 0 || end < wants) wants = end;
  }
  if (wants == atomic_load_explicit(&link->wants, memory_order_relaxed)) return;
  atomic_store_explicit(&link->tx_lane->wants, wants, memory_order_relaxed);
  atomic_store(&link->wants, wants);
}

/* Reads the consumer's tail. false: it is impossible, and the link goes DOWN. */
static bool shm_see_tail(struct shm_link *link) {
  uint64_t tail = atomic_load_explicit(&link->tx_lane->tail, memory_order_acquire);
  if (tail < link->tail_seen || tail > link->head || tail % SHM_LINE != 0) {
    link->code = MLFAB_ERR_FRAME;
    atomic_store(&link->gone, true);
    return false;
  }
  link->tail_seen = tail;
  return true;
}

/* Forgets the first bytes lent. Returns their token, or 0. */
static uint64_t shm_lent_over(struct shm *t, struct shm_link *link) {
  struct shm_refers *refers = link->refers;
  struct shm_lent *lent = shm_lent_at(refers, 0);
  if (lent->pooled && lent->units > 0) shm_pool_back(t, refers, lent, false);
  if (!lent->pooled) refers->tokens--;
  refers->lent_first = (refers->lent_first + 1) % refers->lent_room;
  if (--refers->lent_count == 0) t->lending--;
  shm_want(link);
  return lent->token;
}

/* Ends what is lent with this token (0: all) and is not released. The pages are renewed, neighbours together; if the peer's
 * process is gone, nobody reads them. 0, or MEMORY: some is still lent. With token 0 nothing is afterwards: the peer may then read
 * what is written to pages for which there was no memory. */
static int shm_take_back(struct shm *t, struct shm_link *link, uint64_t token) {
  struct shm_refers *refers = link->refers;
  if (refers == NULL || refers->lent_count == 0) return 0;
  bool read = link->pid <= 0 || kill(link->pid, 0) == 0 || errno == EPERM;
  uint64_t released = shm_see_tail(link) ? link->tail_seen : 0;
  for (uint32_t i = 0, n; i < refers->lent_count; i += n) {
    struct shm_lent *first = shm_lent_at(refers, i);
    uint64_t bytes = first->bytes;
    n = 1;
    if (token == 0 && first->units > 0 && first->end > released && read)
      shm_pool_back(t, refers, first, true);
    if (first->at == NULL || first->end <= released || (token != 0 && first->token != token))
      continue;
    for (; i + n < refers->lent_count; n++) {
      const struct shm_lent *next = shm_lent_at(refers, i + n);
      if (next->at != first->at + bytes || (token != 0 && next->token != token)) break;
      bytes += next->bytes;
    }
    if (read && !mlfab__shm_memory_renew(t->memory, first->at, bytes)) {
      if (token != 0) return MLFAB_ERR_MEMORY;
      continue;
    }
    for (uint32_t k = 0; k < n; k++) {
      struct shm_lent *lent = shm_lent_at(refers, i + k);
      lent->at = NULL;
      lent->token = 0;
    }
  }
  while (token == 0 && refers->lent_count > 0) shm_lent_over(t, link);
  return 0;
}

/* From UP to RETIRED; frees the link if none of its frames is borrowed. */
static void shm_retire(struct shm *t, struct shm_link *link) {
  uint32_t at = 0;
  shm_settle(t);
  pthread_mutex_lock(&t->lock);
  while (t->live[at] != link) at++;
  t->live[at] = t->live[--t->live_count];
  pthread_mutex_unlock(&t->lock);
  if (t->cursor >= t->live_count) t->cursor = 0;
  t->burst = 0;
  atomic_fetch_sub(&t->up_count, 1);
  t->table[link->number - 1] = NULL;
  if (atomic_load(&link->blocked)) t->blocked_count--;
  shm_take_back(t, link, 0);
  link->state = SHM_RETIRED;
  shm_hang_up(t, link);
  if (link->borrowed == 0) {
    shm_free_link(t, link);
    return;
  }
  link->next = t->retired;
  t->retired = link;
}

/* ---- slots and events ---- */

static void shm_put_slot(struct shm *t, struct shm_slot *slot) {
  slot->next = t->free_slots;
  t->free_slots = slot;
}

/* A slot with room for `bytes` at *at_p. NULL: out of memory. */
static struct shm_slot *shm_get_slot(struct shm *t, uint32_t bytes, uint8_t **at_p) {
  struct shm_slot *slot = t->free_slots;
  if (slot == NULL) {
    slot = mlfab__alloc(&t->env, sizeof *slot);
    if (slot == NULL) return NULL;
    slot->all = t->all_slots;
    t->all_slots = slot;
    slot->next = t->free_slots;
    t->free_slots = slot;
  }
  if (bytes > SHM_SMALL && slot->large == NULL) {
    slot->large = mlfab__alloc(&t->env, MLFAB_HEADER_BYTES + MLFAB_META_MAX);
    if (slot->large == NULL) return NULL;
  }
  *at_p = bytes > SHM_SMALL ? slot->large : slot->small;
  t->free_slots = slot->next;
  return slot;
}

/* Fills an event about the end of a link or a refused connection. Its text is valid until the next one. */
static void shm_tell(struct shm *t, mlfab_io_event *event, uint32_t kind, int code, int pid,
                     const char *why, const char *address) {
  char who[32] = "";
  if (pid > 0) snprintf(who, sizeof who, "pid %d ", pid);
  snprintf(t->text, sizeof t->text, "shm: %s%s%s", who, why, address);
  event->kind = kind;
  event->code = code;
  event->text = t->text;
}

static int shm_down(struct shm *t, struct shm_link *link, int code, const char *why,
                    mlfab_io_event *event) {
  event->link = link->number;
  shm_tell(t, event, MLFAB_IO_DOWN, code, link->pid, why, "");
  shm_retire(t, link);
  return 1;
}

/* A half-open link has failed: reports DOWN for ours, REFUSED for theirs. */
static int shm_give_up(struct shm *t, struct shm_link *link, int code, const char *why,
                       mlfab_io_event *event) {
  event->token = link->token;
  shm_tell(t, event, link->inbound ? MLFAB_IO_REFUSED : MLFAB_IO_DOWN, code, link->pid, why,
           link->address);
  shm_drop_half(t, link);
  return 1;
}

/* ---- connecting ---- */

static uint64_t shm_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static bool shm_watch(struct shm *t, int fd, void *what) {
  struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = what};
  return epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static socklen_t shm_sockaddr(const char *name, struct sockaddr_un *to) {
  memset(to, 0, sizeof *to);
  to->sun_family = AF_UNIX;
  int n = snprintf(to->sun_path + 1, sizeof to->sun_path - 1, "mlfab:%s", name);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* Continues one of our connects as far as possible. poll reports failures. */
static void shm_call(struct shm *t, struct shm_link *link) {
  struct sockaddr_un to;
  const char *slash = strchr(link->address, '/');
  socklen_t bytes = shm_sockaddr(slash != NULL ? slash + 1 : link->address + 4, &to);
  int fds[3] = {link->segment_fd, t->bell_fd, t->event_fd};
  int code = MLFAB_ERR_REFUSED;
  if (connect(link->fd, (struct sockaddr *)&to, bytes) != 0) {
    if (errno == EAGAIN || errno == EINTR) return;
  } else if (shm_trusted(link->fd, &link->pid) && shm_packet_send(link->fd, fds, 3, link->ring)) {
    link->state = SHM_CALLING;
    if (shm_watch(t, link->fd, link)) return;
    code = MLFAB_ERR_IO;
  }
  link->code = code;
  link->state = SHM_FAILED;
  atomic_fetch_add(&t->failed_count, 1);
  atomic_store(&t->look, true);
}

/* A connection waits, and the process has no descriptor left: drops the oldest connection without a packet.
 * If there is none, stops watching the listener for a while, since watching would only spin. 1 when a
 * connection was refused. */
static int shm_spare(struct shm *t, mlfab_io_event *event) {
  struct shm_link *oldest = NULL;
  for (struct shm_link *link = t->half; link != NULL; link = link->next)
    if (link->inbound) oldest = link;
  if (oldest != NULL)
    return shm_give_up(t, oldest, MLFAB_ERR_REFUSED, "connected and said nothing ", event);
  epoll_ctl(t->epoll_fd, EPOLL_CTL_DEL, t->listen_fd, NULL);
  atomic_store(&t->deaf_ns, shm_now());
  return 0;
}

/* Accepts one connection; 1 when it, or an older one, was refused. */
static int shm_accept(struct shm *t, mlfab_io_event *event) {
  int pid = 0, fd = accept4(t->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
    return shm_spare(t, event);
  if (fd < 0) return 0;
  if (!shm_trusted(fd, &pid)) {
    close(fd);
    shm_tell(t, event, MLFAB_IO_REFUSED, MLFAB_ERR_REFUSED, pid, "is another user's", "");
    return 1;
  }
  struct shm_link *link = shm_new_link(t, SHM_CALLED, fd);
  if (link == NULL || !shm_watch(t, fd, link)) {
    if (link != NULL) shm_drop_half(t, link);
    if (link == NULL) close(fd);
    shm_tell(t, event, MLFAB_IO_REFUSED, MLFAB_ERR_MEMORY, pid, "found no room", "");
    return 1;
  }
  link->pid = pid;
  if (t->inbound_count <= SHM_HALF_MAX) return 0;
  struct shm_link *oldest = NULL; /* the last in the list, which grows at the front */
  for (link = t->half; link != NULL; link = link->next)
    if (link->inbound) oldest = link;
  return shm_give_up(t, oldest, MLFAB_ERR_REFUSED, "connected and said nothing ", event);
}

/* What a link needs for references. NULL: out of memory. */
static struct shm_refers *shm_refers(struct shm *t, struct shm_link *link) {
  const struct shm_refers made = {.lent_room = link->ring < SHM_RING ? SHM_LENT_FEW : SHM_LENT};
  if (link->refers == NULL) {
    link->refers = mlfab__alloc(&t->env, shm_refers_bytes(&made));
    if (link->refers != NULL) link->refers->lent_room = made.lent_room;
  }
  return link->refers;
}

/* Maps what the peer has passed, whose rings are of `ring` bytes. 0, or why not. */
static int shm_map_link(struct shm *t, struct shm_link *link, const int *fds, uint32_t ring) {
  int bell_fd = fds[link->inbound], event_fd = fds[link->inbound + 1];
  if (!mlfab__shm_sealed(bell_fd, SHM_CONTROL) || !shm_is_eventfd(event_fd) ||
      (link->inbound && !mlfab__shm_sealed(fds[0], SHM_CONTROL + 2 * (uint64_t)ring)))
    return MLFAB_ERR_FRAME;
  link->ring = link->inbound ? (uint32_t)mlfab__min(ring, shm_wish(t)) : ring;
  link->bell = shm_map(NULL, SHM_CONTROL, bell_fd, 0);
  if (link->bell == NULL || !shm_map_segment(link, link->inbound ? fds[0] : link->segment_fd))
    return MLFAB_ERR_MEMORY;
  shm_close_fd(&link->segment_fd);
  if (link->ring == SHM_RING) return 0;
  return shm_refers(t, link) != NULL && (t->pool.at != NULL || shm_pool_open(t)) ? 0
                                                                                 : MLFAB_ERR_MEMORY;
}

/* Receives the packet of a half-open link, or its end. 1 when there is an event. */
static int shm_meet(struct shm *t, struct shm_link *link, mlfab_io_event *event) {
  static const char older[] = "has an older protocol than this process ";
  static const char newer[] = "has a newer protocol than this process ";
  int fds[3] = {-1, -1, -1}, own[2] = {t->bell_fd, t->event_fd};
  uint32_t own_segment = link->inbound ? 1 : 0; /* descriptors before bell and eventfd */
  uint32_t ring = link->inbound ? SHM_RING : link->ring;
  int got = shm_packet_receive(link->fd, fds, 2 + own_segment, &ring);
  if (got == 0) return 0;
  if (got == MLFAB_ERR_PROTOCOL_OLDER || got == MLFAB_ERR_PROTOCOL_NEWER) {
    if (link->inbound)
      shm_packet_send(link->fd, NULL, 0, SHM_RING); /* so that the peer can say it, too */
    return shm_give_up(t, link, got, got == MLFAB_ERR_PROTOCOL_OLDER ? older : newer, event);
  }
  if (got < 0) return shm_give_up(t, link, got, "did not follow the protocol ", event);
  link->event_fd = fds[own_segment + 1];
  int code = shm_map_link(t, link, fds, ring);
  if (link->inbound) close(fds[0]);
  close(fds[own_segment]);
  if (code != 0) return shm_give_up(t, link, code, "passed something that cannot be mapped", event);
  if (link->inbound && !shm_packet_send(link->fd, own, 2, link->ring))
    return shm_give_up(t, link, MLFAB_ERR_REFUSED, "went away", event);
  if (link->ring < SHM_RING && !shm_pool_tell(t, link))
    return shm_give_up(t, link, MLFAB_ERR_REFUSED, "went away", event);
  shm_establish(t, link, event);
  return 1;
}

/* The peer passes a file, which takes the place of one that it has used before. 0, or why it is refused. */
static int shm_pass(struct shm *t, struct shm_link *link, const struct shm_file *file, int *fd_p) {
  int fd = *fd_p;
  struct shm_refers *refers = shm_refers(t, link);
  if (refers == NULL) return MLFAB_ERR_MEMORY;
  if (file->magic != SHM_FILE_MAGIC || file->place >= SHM_PLACES || file->number == 0 ||
      file->bytes == 0 || file->bytes > INT64_MAX || !mlfab__shm_sealed(fd, file->bytes))
    return MLFAB_ERR_FRAME;
  struct shm_view *view = &refers->views[file->place];
  if (view->borrowed > 0) return MLFAB_ERR_FRAME;
  shm_unview(t, view);
  const uint8_t *map = mlfab__shm_memory_map(t->memory, fd, file->bytes, file->number);
  *view = (struct shm_view){map, fd, file->number, file->bytes, 0};
  if (map == NULL) *fd_p = -1; /* the view has it */
  return 0;
}

/* Reads what the life line has, up to the file with this number, if it is not 0, and a limited number of packets: a peer may send
 * without end. The end of the line, or anything that must not be there, ends the link, and shm_scan reports DOWN at the end of the
 * ring. */
static void shm_hear(struct shm *t, struct shm_link *link, uint64_t number) {
  for (int i = 0; i < 2 * SHM_FILES && link->fd >= 0; i++) {
    struct shm_file file;
    uint32_t count;
    int fd = -1, code = 0;
    shm_close_fd(&t->spare_fd);
    ssize_t n = shm_packet_take(link->fd, &file, sizeof file, &fd, 1, &count);
    int why = n < 0 ? errno : 0;
    if (n > 0)
      code =
          n == (ssize_t)sizeof file && count == 1 ? shm_pass(t, link, &file, &fd) : MLFAB_ERR_FRAME;
    shm_close_fd(&fd);
    t->spare_fd = fcntl(t->epoll_fd, F_DUPFD_CLOEXEC, 0);
    if (n > 0 && code == 0 && file.number == number) return;
    if (why == EINTR || (n > 0 && code == 0)) continue;
    if (why == EAGAIN) return;
    link->code = code;
    shm_hang_up(t, link);
    atomic_store(&link->gone, true);
  }
}

/* A link's socket has an event. */
static int shm_life(struct shm *t, struct shm_link *link, mlfab_io_event *event) {
  if (link->state != SHM_UP) return shm_meet(t, link, event);
  shm_hear(t, link, 0);
  return 0;
}

/* Polls the sockets; handles a limited number, so that connections cannot delay frames. */
static int shm_look(struct shm *t, mlfab_io_event *event) {
  struct epoll_event ready;
  uint64_t count;
  atomic_store(&t->look, false);
  uint64_t deaf_ns = atomic_load_explicit(&t->deaf_ns, memory_order_relaxed);
  if (deaf_ns != 0 && shm_now() - deaf_ns >= SHM_DEAF_NS &&
      shm_watch(t, t->listen_fd, &t->listen_fd))
    atomic_store(&t->deaf_ns, 0);
  for (int i = 0; i < 16; i++) {
    int found = 0;
    if (epoll_wait(t->epoll_fd, &ready, 1, 0) != 1) break;
    if (ready.data.ptr == &t->listen_fd) {
      found = shm_accept(t, event);
    } else if (ready.data.ptr == &t->event_fd) {
      if (read(t->event_fd, &count, sizeof count) < 0) continue;
    } else {
      found = shm_life(t, ready.data.ptr, event);
    }
    if (!found) continue;
    atomic_store(&t->look, true); /* there may be more */
    return 1;
  }
  for (struct shm_link *link = t->half; link != NULL; link = link->next) {
    if (link->state == SHM_TRYING) shm_call(t, link);
    if (link->state == SHM_FAILED)
      return shm_give_up(t, link, link->code, "nobody of this user listens at ", event);
  }
  return 0;
}

/* ---- the table's functions ---- */

/* Splits "shm:[<host>/]<name>": 0, or ADDRESS. */
static int shm_parse(const char *address, uint64_t *host_p, bool *has_host_p,
                     char name[SHM_NAME_MAX + 1]) {
  if (address == NULL || strncmp(address, "shm:", 4) != 0) return MLFAB_ERR_ADDRESS;
  const char *at = address + 4, *slash = strchr(at, '/');
  uint64_t host = 0;
  for (; slash != NULL && at < slash; at++) {
    static const char digits[] = "0123456789abcdef";
    const char *digit = strchr(digits, *at);
    if (digit == NULL || slash - at > 16) return MLFAB_ERR_ADDRESS;
    host = host << 4 | (uint64_t)(digit - digits);
  }
  if (slash != NULL) at = slash + 1;
  size_t n = strlen(at);
  if (n > SHM_NAME_MAX) return MLFAB_ERR_ADDRESS;
  for (size_t i = 0; i < n; i++)
    if (at[i] <= ' ' || at[i] == '/' || at[i] == 127) return MLFAB_ERR_ADDRESS;
  memcpy(name, at, n + 1);
  *host_p = host;
  *has_host_p = slash != NULL;
  return 0;
}

/* A hash of what all processes share that can reach each other's abstract sockets. */
static bool shm_host(uint64_t *host_p) {
  char text[160];
  int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  ssize_t boot = fd < 0 ? -1 : read(fd, text, 64);
  if (fd >= 0) close(fd);
  if (boot <= 0) return false;
  ssize_t net = readlink("/proc/self/ns/net", text + boot, 64);
  if (net <= 0) return false;
  *host_p = mlfab__hash(0, text, (size_t)(boot + net));
  return true;
}

/* In a forked child the mappings do not exist, and the descriptors refer to the parent's connections. */
static void shm_disown(struct shm *t) {
  while (t->live_count > 0) {
    struct shm_link *link = t->live[--t->live_count];
    link->next = t->retired;
    t->retired = link;
  }
  for (int i = 0; i < 2; i++) {
    for (struct shm_link *link = i ? t->retired : t->half; link != NULL; link = link->next) {
      shm_close_fd(&link->fd);
      link->map = NULL;
      link->bell = NULL;
      for (uint32_t k = 0; link->refers != NULL && k < SHM_PLACES; k++)
        if (link->refers->views[k].at != NULL) link->refers->views[k] = (struct shm_view){0};
      if (link->refers != NULL) link->refers->lent_count = 0;
    }
  }
  t->bell = NULL;
  t->pool.at = NULL;
}

static void shm_stop(void *self) {
  struct shm *t = self;
  if (t->pid != getpid()) shm_disown(t);
  while (t->half != NULL) shm_drop_half(t, t->half);
  while (t->live_count > 0) {
    struct shm_link *link = t->live[t->live_count - 1];
    atomic_store(&link->tx_lane->closed, 1);
    shm_hang_up(t, link);
    shm_ring(t, link->bell, link->event_fd);
    link->borrowed = 0;
    if (link->refers != NULL && link->refers->lent_count > 0) t->lending--;
    if (link->refers != NULL)
      link->refers->lent_count = 0; /* the memory is freed with the context */
    shm_retire(t, link);
  }
  while (t->retired != NULL) {
    struct shm_link *link = t->retired;
    t->retired = link->next;
    shm_free_link(t, link);
  }
  while (t->all_slots != NULL) {
    struct shm_slot *slot = t->all_slots;
    t->all_slots = slot->all;
    if (slot->large != NULL) mlfab__free(&t->env, slot->large, MLFAB_HEADER_BYTES + MLFAB_META_MAX);
    if (slot->bulk != NULL) mlfab__free_aligned(&t->env, slot->bulk, MLFAB_BULK_MAX);
    mlfab__free(&t->env, slot, sizeof *slot);
  }
  if (t->capacity > 0) {
    mlfab__free(&t->env, t->live, t->capacity * sizeof *t->live);
    mlfab__free(&t->env, t->table, t->capacity * sizeof *t->table);
    mlfab__free(&t->env, t->touched, t->capacity * sizeof *t->touched);
  }
  if (t->sent != NULL) mlfab__free(&t->env, t->sent, t->sent_capacity * sizeof *t->sent);
  if (t->bell != NULL) munmap(t->bell, SHM_CONTROL);
  shm_pool_close(&t->pool);
  shm_close_fd(&t->spare_fd);
  shm_close_fd(&t->bell_fd);
  shm_close_fd(&t->event_fd);
  shm_close_fd(&t->listen_fd);
  shm_close_fd(&t->epoll_fd);
  pthread_mutex_destroy(&t->lock);
  mlfab__env env = t->env;
  mlfab__free(&env, t, sizeof *t);
}

/* Opens the node's own descriptors. 0, ADDRESS_IN_USE or IO. */
static int shm_open_fds(struct shm *t, const char *name) {
  struct sockaddr_un at;
  socklen_t bytes = shm_sockaddr(name, &at);
  t->bell_fd = mlfab__shm_file("mlfab-bell", SHM_CONTROL, F_SEAL_SEAL);
  if (t->bell_fd < 0) return MLFAB_ERR_IO;
  t->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  t->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (t->bell_fd < 0 || t->event_fd < 0 || t->epoll_fd < 0 || t->listen_fd < 0) return MLFAB_ERR_IO;
  t->bell = shm_map(NULL, SHM_CONTROL, t->bell_fd, 0);
  if (t->bell == NULL) return MLFAB_ERR_IO;
  if (bind(t->listen_fd, (struct sockaddr *)&at, bytes) != 0)
    return errno == EADDRINUSE ? MLFAB_ERR_ADDRESS_IN_USE : MLFAB_ERR_IO;
  if (listen(t->listen_fd, SOMAXCONN) != 0 || !shm_watch(t, t->listen_fd, &t->listen_fd) ||
      !shm_watch(t, t->event_fd, &t->event_fd))
    return MLFAB_ERR_IO;
  t->spare_fd = fcntl(t->epoll_fd, F_DUPFD_CLOEXEC, 0);
  return 0;
}

static int shm_start(const mlfab_transport_options *options, void **self_p, char *address) {
  mlfab__env env;
  char name[SHM_NAME_MAX + 1] = "";
  uint64_t host = 0, wanted, random = 0;
  bool has_host = false;
  int code = mlfab__env_init(&env, options->env);
  if (code != 0) return MLFAB__FAIL(options->error, code, "shm: bad env");
  if (!shm_host(&host))
    return MLFAB__FAIL(options->error, MLFAB_ERR_IO, "shm: /proc does not tell which host this is");
  if (options->listen != NULL && options->listen[0] != 0 &&
      (shm_parse(options->listen, &wanted, &has_host, name) != 0 || (has_host && wanted != host)))
    return MLFAB__FAIL(options->error, MLFAB_ERR_ADDRESS, "shm: cannot listen at %.100s",
                       options->listen);
  if (name[0] == 0) {
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
      random = (uint64_t)time(NULL);
    snprintf(name, sizeof name, "%ld-%016llx", (long)getpid(), (unsigned long long)random);
  }
  struct shm *t = mlfab__alloc(&env, sizeof *t);
  if (t == NULL) return MLFAB__FAIL(options->error, MLFAB_ERR_MEMORY, "shm: out of memory");
  t->env = env;
  t->memory = options->size >= offsetof(mlfab_transport_options, memory) + sizeof options->memory
                  ? options->memory
                  : NULL;
  if (MLFAB__HAS(options, mlfab_transport_options, neighbours)) t->neighbours = options->neighbours;
  t->pool.fd = t->pool.read_fd = -1;
  t->pid = getpid();
  t->host = host;
  t->bell_fd = t->event_fd = t->listen_fd = t->epoll_fd = t->spare_fd = -1;
  pthread_mutex_init(&t->lock, NULL);
  code = shm_open_fds(t, name);
  if (code != 0) {
    int why = errno;
    shm_stop(t);
    return MLFAB__FAIL(options->error, code, "shm: listening at shm:%s: %s", name,
                       mlfab__reason(why));
  }
  snprintf(address, 256, "shm:%016llx/%s", (unsigned long long)host, name);
  *self_p = t;
  return 0;
}

static int shm_reach(void *self, const char *address) {
  struct shm *t = self;
  char name[SHM_NAME_MAX + 1];
  uint64_t host;
  bool has_host;
  if (shm_parse(address, &host, &has_host, name) != 0 || name[0] == 0) return 0;
  return !has_host || host == t->host;
}

static int shm_connect(void *self, const char *address, uint64_t token) {
  struct shm *t = self;
  char name[SHM_NAME_MAX + 1];
  uint64_t host;
  bool has_host;
  if (shm_parse(address, &host, &has_host, name) != 0 || name[0] == 0 ||
      (has_host && host != t->host))
    return MLFAB_ERR_ADDRESS;
  for (struct shm_link *old = t->half; old != NULL; old = old->next) {
    if (old->inbound || old->token != token) continue;
    shm_drop_half(t, old);
    break;
  }
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return MLFAB_ERR_IO;
  struct shm_link *link = shm_new_link(t, SHM_TRYING, fd);
  if (link == NULL) {
    close(fd);
    return MLFAB_ERR_MEMORY;
  }
  link->token = token;
  snprintf(link->address, sizeof link->address, "%s", address);
  link->ring = shm_wish(t);
  link->segment_fd =
      mlfab__shm_file("mlfab-link", SHM_CONTROL + 2 * (uint64_t)link->ring, F_SEAL_SEAL);
  if (link->segment_fd < 0) {
    int why = errno;
    shm_drop_half(t, link);
    errno = why;
    return MLFAB_ERR_IO;
  }
  shm_call(t, link);
  return 0;
}

static void shm_disconnect(void *self, uint32_t number) {
  struct shm *t = self;
  struct shm_link *link = shm_find(t, number);
  if (link == NULL) return;
  for (uint32_t i = 0, n = atomic_load(&t->sent_count); i < n; i++) {
    struct shm_sent *sent = &t->sent[(t->sent_first + i) & (t->sent_capacity - 1)];
    if (sent->link == number) sent->link = 0;
  }
  /* The peer must see the flag and the end when it wakes, and it is woken in any case. */
  atomic_store(&link->tx_lane->closed, 1);
  shm_hang_up(t, link);
  shm_ring(t, link->bell, link->event_fd);
  shm_retire(t, link);
}

/* Reports WRITABLE when the tail has reached `room`. */
static int shm_block(struct shm *t, struct shm_link *link, uint64_t room) {
  link->room = room;
  if (!atomic_exchange(&link->blocked, true)) t->blocked_count++;
  shm_want(link);
  return MLFAB_ERR_AGAIN;
}

/* The slow path of send: reads the consumer's tail, and if there is still no room, publishes the tail to
 * wait for. 0, AGAIN or PEER_CLOSED. */
static int shm_room(struct shm *t, struct shm_link *link, uint32_t bytes) {
  if (!shm_see_tail(link)) return MLFAB_ERR_PEER_CLOSED;
  if (link->head - link->tail_seen + bytes + SHM_LINE <= link->ring) return 0;
  uint64_t need = mlfab__max(bytes + SHM_LINE, link->ring / 4);
  return shm_block(t, link, link->head + need - link->ring);
}

/* Makes room to record one more SENT. */
static bool shm_sent_room(struct shm *t) {
  uint32_t count = atomic_load_explicit(&t->sent_count, memory_order_relaxed);
  if (count < t->sent_capacity) return true;
  uint32_t capacity = count == 0 ? 64 : 2 * count;
  struct shm_sent *sent = mlfab__alloc_array(&t->env, capacity, sizeof *sent);
  if (sent == NULL) return false;
  for (uint32_t i = 0; i < count; i++) sent[i] = t->sent[(t->sent_first + i) & (count - 1)];
  if (t->sent != NULL) mlfab__free(&t->env, t->sent, count * sizeof *sent);
  t->sent = sent;
  t->sent_first = 0;
  t->sent_capacity = capacity;
  return true;
}

/* A place for one more own file, or SHM_FILES. */
static uint32_t shm_place(struct shm *t, const struct shm_refers *refers) {
  uint64_t lent = 0; /* places with something lent, as bits */
  for (uint32_t i = 0; i < refers->lent_count; i++)
    lent |= UINT64_C(1) << refers->lent[(refers->lent_first + i) % refers->lent_room].place;
  for (uint32_t i = 0; i < SHM_FILES; i++) {
    if (refers->told[i] == 0) return i;
    if (!(lent >> i & 1) && !mlfab__shm_memory_has(t->memory, refers->told[i])) return i;
  }
  return SHM_FILES;
}

/* Tells the peer of a file. Returns its place, or SHM_FILES: not now. */
static uint32_t shm_tell_file(struct shm *t, struct shm_link *link, const mlfab__shm_span *span) {
  char path[40];
  uint32_t place = shm_place(t, link->refers);
  if (place == SHM_FILES) return SHM_FILES;
  snprintf(path, sizeof path, "/proc/self/fd/%d", span->fd);
  int fd = open(path, O_RDONLY | O_CLOEXEC); /* so that the peer cannot write */
  struct shm_file file = {SHM_FILE_MAGIC, place, span->number, span->file_bytes};
  bool told = fd >= 0 && shm_packet_post(link->fd, &file, sizeof file, &fd, 1);
  shm_close_fd(&fd);
  if (!told) return SHM_FILES;
  link->refers->told[place] = span->number;
  return place;
}

/* May the frame refer to this bulk? 1: *lent_p and *reference_p are filled; 0: no, copy it; or AGAIN. */
static int shm_refer(struct shm *t, struct shm_link *link, const void *bulk, uint32_t bytes,
                     struct shm_lent *lent, struct shm_reference *reference) {
  mlfab__shm_span span;
  uint32_t place = 0;
  if (!mlfab__shm_memory_find(t->memory, bulk, bytes, &span) || span.offset % 8 != 0 || !span.alone)
    return 0;
  struct shm_refers *refers = shm_refers(t, link);
  if (refers == NULL) return 0;
  if (refers->lent_count == refers->lent_room)
    return shm_block(t, link, shm_lent_at(refers, refers->lent_room / 2)->end);
  while (place < SHM_FILES && refers->told[place] != span.number) place++;
  if (place == SHM_FILES) place = shm_tell_file(t, link, &span);
  if (place == SHM_FILES) return 0;
  *reference = (struct shm_reference){span.number, span.offset};
  *lent = (struct shm_lent){.at = bulk, .bytes = bytes, .place = place};
  return 1;
}

/* May the link have so many bytes more in the pool? */
static bool shm_pool_room(const struct shm_refers *refers, uint32_t bytes) {
  return refers->lent_count < refers->lent_room &&
         (refers->pooled < 2 || refers->pooled_bytes + bytes <= SHM_POOLED);
}

/* Copies a bulk into the pool. 0: *lent_p and *reference_p are filled; or AGAIN, PEER_CLOSED. */
static int shm_pool_put(struct shm *t, struct shm_link *link, const void *bulk, uint32_t bytes,
                        struct shm_lent *lent, struct shm_reference *reference) {
  struct shm_refers *refers = link->refers;
  const uint32_t units = (bytes + SHM_UNIT - 1) / SHM_UNIT;
  if (!shm_pool_room(refers, bytes)) {
    if (!shm_see_tail(link)) return MLFAB_ERR_PEER_CLOSED;
    const struct shm_lent *first = shm_lent_at(refers, 0);
    for (; refers->lent_count > 0 && first->pooled && first->end <= link->tail_seen;
         first = shm_lent_at(refers, 0))
      shm_lent_over(t, link);
    if (!shm_pool_room(refers, bytes)) return shm_block(t, link, first->end);
  }
  uint32_t unit = shm_pool_find(&t->pool, units);
  if (unit == SHM_UNITS || !shm_pool_tell(t, link)) return shm_block(t, link, 0);
  memcpy(t->pool.at + (size_t)unit * SHM_UNIT, bulk, bytes);
  shm_pool_turn(&t->pool, unit, units);
  t->pool.used += units;
  refers->pooled++;
  refers->pooled_bytes += bytes;
  *reference = (struct shm_reference){t->pool.number, (uint64_t)unit * SHM_UNIT};
  *lent = (struct shm_lent){
      .bytes = bytes, .place = SHM_FILES, .pooled = true, .unit = unit, .units = units};
  return 0;
}

/* Publishes a record, whose bulk or reference is in its place. The line that the consumer polls is written last, at once:
 * written earlier, it would move to the consumer's cache half-way. */
static void shm_publish(struct shm *t, struct shm_link *link, const uint8_t *head,
                        uint32_t head_bytes, uint32_t bytes, uint64_t word) {
  uint8_t *at = link->tx + link->tx_offset;
  uint32_t next = shm_forward(link, link->tx_offset, bytes);
  memcpy(at + SHM_LINE, head + (SHM_LINE - 8), head_bytes - (SHM_LINE - 8));
  atomic_store_explicit(shm_word(link->tx, next), 0, memory_order_relaxed);
  memcpy(at + 8, head, SHM_LINE - 8);
  atomic_store_explicit(shm_word(link->tx, link->tx_offset), word, memory_order_release);
  link->tx_offset = next;
  link->head += bytes;
  shm_touch(t, link);
  link->published = true;
  shm_prefetch(link->tx + next + SHM_LINE);
  shm_prefetch(link->tx + next + 2 * SHM_LINE);
}

/* The record that has just been published refers to these bytes. */
static void shm_lend(struct shm *t, struct shm_link *link, struct shm_lent *lent, uint64_t token) {
  struct shm_refers *refers = link->refers;
  lent->end = link->head;
  lent->token = token;
  *shm_lent_at(refers, refers->lent_count) = *lent;
  if (refers->lent_count++ == 0) t->lending++;
  if (lent->pooled) return;
  refers->tokens++;
  refers->tokens_end = lent->end;
  shm_want(link);
}

static int shm_send(void *self, uint32_t number, const void *head, uint32_t head_bytes,
                    const void *bulk, uint32_t bulk_bytes, uint64_t token) {
  struct shm *t = self;
  struct shm_link *link = shm_find(t, number);
  struct shm_lent lent;
  struct shm_reference reference;
  if (link == NULL || atomic_load_explicit(&link->gone, memory_order_relaxed))
    return MLFAB_ERR_PEER_CLOSED;
  if (head_bytes < MLFAB_HEADER_BYTES || head_bytes > MLFAB_HEADER_BYTES + MLFAB_META_MAX ||
      bulk_bytes > MLFAB_BULK_MAX)
    return MLFAB_ERR_LIMIT;
  if (bulk_bytes > 0 && bulk == NULL) return MLFAB_ERR_ARGUMENT; /* a ghost */
  int refers = token != 0 && bulk_bytes >= SHM_REFER && t->memory != NULL
                   ? shm_refer(t, link, bulk, bulk_bytes, &lent, &reference)
                   : 0;
  if (refers < 0) return refers;
  uint32_t front = shm_up(8 + head_bytes), bytes = front + (refers ? SHM_LINE : shm_up(bulk_bytes));
  bool pooled = bytes > link->most && bulk_bytes > 0 && !refers;
  if (pooled) bytes = front + SHM_LINE;
  if (MLFAB__UNLIKELY(link->head - link->tail_seen + bytes + SHM_LINE > link->ring)) {
    int code = shm_room(t, link, bytes);
    if (code != 0) return code;
  }
  if (token != 0 && !refers && !shm_sent_room(t)) return shm_block(t, link, 0);
  if (pooled) {
    int code = shm_pool_put(t, link, bulk, bulk_bytes, &lent, &reference);
    if (code != 0) return code;
  }
  uint8_t *at = link->tx + link->tx_offset + front;
  if (refers || pooled)
    memcpy(at, &reference, sizeof reference);
  else if (bulk_bytes > 0)
    memcpy(at, bulk, bulk_bytes);
  shm_publish(
      t, link, head, head_bytes, bytes,
      SHM_VALID | (refers || pooled ? SHM_REFERS : 0) | (uint64_t)head_bytes << 32 | bulk_bytes);
  if (refers || pooled) shm_lend(t, link, &lent, pooled ? 0 : token);
  if (token != 0 && !refers) {
    uint32_t count = atomic_load_explicit(&t->sent_count, memory_order_relaxed);
    t->sent[(t->sent_first + count) & (t->sent_capacity - 1)] = (struct shm_sent){number, token};
    atomic_store(&t->sent_count, count + 1);
  }
  return 0;
}

static void shm_flush(void *self) { shm_settle(self); }

/* Where a record's bulk is, if it is a reference: the view, or NULL when the peer has not passed such bytes. */
static struct shm_view *shm_look_up(struct shm *t, struct shm_link *link,
                                    const struct shm_reference *reference, uint32_t bytes) {
  for (int heard = 0; heard < 2; heard++) {
    for (uint32_t i = 0; link->refers != NULL && i < SHM_PLACES; i++) {
      struct shm_view *view = &link->refers->views[i];
      if (view->number != reference->number || reference->number == 0) continue;
      return reference->offset % 8 == 0 && reference->offset <= view->bytes &&
                     bytes <= view->bytes - reference->offset
                 ? view
                 : NULL;
    }
    if (heard == 0) shm_hear(t, link, reference->number);
  }
  return NULL;
}

/* The bytes of a view. NULL: no memory for a copy. */
static const uint8_t *shm_see(struct shm *t, struct shm_slot *slot, uint64_t offset,
                              uint32_t bytes) {
  if (slot->view->at != NULL) return slot->view->at + offset;
  if (slot->bulk == NULL) slot->bulk = mlfab__alloc_aligned(&t->env, MLFAB_BULK_MAX);
  for (uint32_t done = 0; slot->bulk != NULL && done < bytes;) {
    ssize_t n = pread(slot->view->fd, slot->bulk + done, bytes - done, (off_t)(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return NULL; /* its size is sealed: the system is short of memory */
    done += (uint32_t)n;
  }
  return slot->bulk;
}

/* Takes the record announced by `word`. 0 only when memory is short: tried again later. */
static int shm_take(struct shm *t, struct shm_link *link, uint64_t word, mlfab_io_event *event) {
  uint32_t offset = atomic_load_explicit(&link->rx_offset, memory_order_relaxed);
  uint32_t head_bytes = (uint32_t)(word >> 32) & 0x3fffffffu, bulk_bytes = (uint32_t)word;
  uint32_t checked_head = 0, checked_bulk = 0;
  bool refers = (word & SHM_REFERS) != 0;
  uint8_t *head;
  if ((word & SHM_VALID) == 0 || head_bytes < MLFAB_HEADER_BYTES ||
      head_bytes > MLFAB_HEADER_BYTES + MLFAB_META_MAX || bulk_bytes > MLFAB_BULK_MAX)
    return shm_down(t, link, MLFAB_ERR_FRAME, "wrote an impossible record", event);
  struct shm_slot *slot = shm_get_slot(t, head_bytes, &head);
  if (slot == NULL) return 0;
  memcpy(head, link->rx + offset + 8, head_bytes);
  int code = mlfab_frame_check(head, &checked_head, &checked_bulk);
  if (code == 0 && (checked_head != head_bytes || checked_bulk != bulk_bytes))
    code = MLFAB_ERR_FRAME;
  if (code != 0) {
    shm_put_slot(t, slot);
    return shm_down(t, link, code, "sent a frame that does not parse", event);
  }
  uint32_t front = shm_up(8 + head_bytes), bytes = front + (refers ? SHM_LINE : shm_up(bulk_bytes));
  const uint8_t *bulk = link->rx + offset + front;
  slot->view = NULL;
  if (refers) {
    struct shm_reference reference;
    memcpy(&reference, bulk, sizeof reference);
    slot->view = shm_look_up(t, link, &reference, bulk_bytes);
    if (slot->view == NULL) {
      shm_put_slot(t, slot);
      code = link->code != 0 ? link->code : MLFAB_ERR_FRAME;
      return shm_down(t, link, code, "referred to memory that it has not passed", event);
    }
    bulk = shm_see(t, slot, reference.offset, bulk_bytes);
    if (bulk == NULL) {
      shm_put_slot(t, slot);
      return 0;
    }
    slot->view->borrowed++;
  }
  link->rx_position += bytes;
  link->borrowed++;
  slot->link = link;
  slot->end = link->rx_position;
  event->kind = MLFAB_IO_FRAME;
  event->link = link->number;
  event->head = head;
  event->head_bytes = head_bytes;
  event->bulk = bulk_bytes > 0 ? bulk : NULL;
  event->bulk_bytes = bulk_bytes;
  event->opaque = slot;
  atomic_store_explicit(&link->rx_offset, shm_forward(link, offset, bytes), memory_order_relaxed);
  return 1;
}

/* Polls each link once, beginning with that of the last frame. */
static int shm_scan(struct shm *t, mlfab_io_event *event) {
  for (uint32_t i = 0, n = t->live_count; i < n; i++) {
    struct shm_link *link = t->live[t->cursor];
    uint32_t offset = atomic_load_explicit(&link->rx_offset, memory_order_relaxed);
    uint64_t word = atomic_load_explicit(shm_word(link->rx, offset), memory_order_acquire);
    if (word != 0) {
      if (++t->burst >= SHM_BURST) {
        t->burst = 0;
        t->cursor = t->cursor + 1 < n ? t->cursor + 1 : 0;
      }
      return shm_take(t, link, word, event);
    }
    if (MLFAB__UNLIKELY(atomic_load_explicit(&link->gone, memory_order_acquire))) {
      bool closed = atomic_load(&link->rx_lane->closed) != 0;
      if (link->code != 0)
        return shm_down(t, link, link->code, "broke the rules of the ring", event);
      return shm_down(t, link, MLFAB_ERR_PEER_CLOSED, closed ? "closed the link" : "is gone",
                      event);
    }
    t->burst = 0;
    t->cursor = t->cursor + 1 < n ? t->cursor + 1 : 0;
  }
  return 0;
}

/* Finds a link that has room again. */
static int shm_unblock(struct shm *t, mlfab_io_event *event) {
  for (uint32_t i = 0; i < t->live_count; i++) {
    struct shm_link *link = t->live[i];
    if (!atomic_load(&link->blocked) || atomic_load(&link->tx_lane->tail) < link->room) continue;
    atomic_store(&link->blocked, false);
    t->blocked_count--;
    shm_want(link);
    event->kind = MLFAB_IO_WRITABLE;
    event->link = link->number;
    return 1;
  }
  return 0;
}

/* Finds bytes that a peer has released. */
static int shm_return(struct shm *t, mlfab_io_event *event) {
  for (uint32_t i = 0; i < t->live_count; i++) {
    struct shm_link *link = t->live[i];
    while (link->refers != NULL && link->refers->lent_count > 0) {
      if (shm_lent_at(link->refers, 0)->end > link->tail_seen && !shm_see_tail(link)) break;
      if (shm_lent_at(link->refers, 0)->end > link->tail_seen) break;
      uint64_t token = shm_lent_over(t, link);
      if (token == 0) continue;
      event->kind = MLFAB_IO_SENT;
      event->link = link->number;
      event->token = token;
      return 1;
    }
  }
  return 0;
}

/* Work that is not needed in every poll. Polls the sockets when requested, while connections are being
 * made, and at every tick of the coarse clock, which is cheap to read. */
static int shm_idle(struct shm *t, mlfab_io_event *event) {
  struct timespec now;
  shm_settle(t);
  if (t->blocked_count > 0 && shm_unblock(t, event)) return 1;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  if (now.tv_nsec == t->looked.tv_nsec && now.tv_sec == t->looked.tv_sec &&
      atomic_load_explicit(&t->half_count, memory_order_relaxed) == 0 &&
      !atomic_load_explicit(&t->look, memory_order_relaxed))
    return 0;
  t->looked = now;
  return shm_look(t, event);
}

static int shm_poll(void *self, mlfab_io_event *event) {
  struct shm *t = self;
  *event = (mlfab_io_event){0};
  for (uint32_t n; (n = atomic_load_explicit(&t->sent_count, memory_order_relaxed)) > 0;) {
    struct shm_sent sent = t->sent[t->sent_first];
    t->sent_first = (t->sent_first + 1) & (t->sent_capacity - 1);
    atomic_store_explicit(&t->sent_count, n - 1, memory_order_relaxed);
    if (sent.link == 0) continue;
    event->kind = MLFAB_IO_SENT;
    event->link = sent.link;
    event->token = sent.token;
    return 1;
  }
  if (MLFAB__UNLIKELY(t->lending > 0) && shm_return(t, event)) return 1;
  if (MLFAB__UNLIKELY(++t->busy >= SHM_LOOK_EVERY)) {
    t->busy = 0;
    if (shm_idle(t, event)) return 1;
  }
  if (shm_scan(t, event)) return 1;
  return shm_idle(t, event);
}

static void shm_release(void *self, const mlfab_io_event *event) {
  struct shm *t = self;
  struct shm_slot *slot = event->opaque;
  if (slot == NULL) return;
  struct shm_link *link = slot->link;
  uint64_t end = slot->end;
  if (slot->view != NULL) slot->view->borrowed--;
  shm_put_slot(t, slot);
  link->borrowed--;
  if (MLFAB__UNLIKELY(link->state == SHM_RETIRED)) {
    if (link->borrowed > 0) return;
    struct shm_link **at = &t->retired;
    while (*at != link) at = &(*at)->next;
    *at = link->next;
    shm_free_link(t, link);
    return;
  }
  link->released = end;
  atomic_store_explicit(&link->rx_lane->tail, end, memory_order_release);
  shm_touch(t, link);
  /* Wakes a producer that waits for room as soon as there is enough, not only at the next flush. */
  uint64_t wants = atomic_load_explicit(&link->rx_lane->wants, memory_order_relaxed);
  if (MLFAB__UNLIKELY(wants != 0 && end >= wants)) shm_settle(t);
}

/* The life line may outlive its process when a forked child holds it, so this checks the process. A pid of
 * another namespace is 0 here. */
static int shm_probe(void *self, uint32_t number) {
  const struct shm_link *link = shm_find(self, number);
  if (link == NULL || atomic_load(&link->gone)) return MLFAB_ERR_AGAIN;
  return link->pid <= 0 || kill(link->pid, 0) == 0 || errno == EPERM ? 0 : MLFAB_ERR_AGAIN;
}

static int shm_detach(void *self, uint32_t number, uint64_t token) {
  struct shm_link *link = shm_find(self, number);
  return link == NULL || token == 0 ? 0 : shm_take_back(self, link, token);
}

/* Sleeps while the bell's word is `state`; with `polled`, until a socket has an event. */
static void shm_sleep(struct shm *t, uint32_t state, bool polled, uint64_t ns) {
  if (polled) {
    struct epoll_event event;
    epoll_wait(t->epoll_fd, &event, 1, (int)((ns + 999999) / 1000000));
    return;
  }
  struct timespec span = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
  syscall(SYS_futex, &t->bell->state, MLFAB__FUTEX_WAIT, state, &span, NULL, 0);
}

static void shm_wait(void *self, uint64_t timeout_ns) {
  struct shm *t = self;
  struct epoll_event event;
  if (atomic_load(&t->deaf_ns) != 0) timeout_ns = mlfab__min(timeout_ns, SHM_DEAF_NS);
  uint64_t now = shm_now(), end = mlfab__add_sat(now, timeout_ns);
  bool polled = atomic_load(&t->half_count) > 0 || atomic_load(&t->up_count) == 0;
  uint32_t bit = polled ? SHM_POLLED : SHM_ASLEEP;
  uint32_t state = atomic_fetch_or(&t->bell->state, bit) | bit;
  shm_fence(t);
  bool found = atomic_exchange(&t->woken, false) || shm_anything(t);
  while (!found && now < end) {
    shm_sleep(t, state, polled, mlfab__min(end - now, SHM_SLICE_NS));
    state = atomic_load(&t->bell->state);
    found = (state & bit) == 0 || atomic_exchange(&t->woken, false) ||
            epoll_wait(t->epoll_fd, &event, 1, 0) == 1 ||
            (polled && atomic_load(&t->half_count) > 0);
    now = shm_now();
  }
  if (!found) atomic_fetch_add(&t->timeouts, 1);
  atomic_fetch_and(&t->bell->state, ~bit);
  atomic_store(&t->look, true);
}

static void shm_wake(void *self) {
  struct shm *t = self;
  atomic_store(&t->woken, true);
  shm_ring(t, t->bell, t->event_fd);
}

static int shm_fd(void *self) { return ((struct shm *)self)->epoll_fd; }

static int shm_arm(void *self, int on) {
  struct shm *t = self;
  uint64_t count;
  if (on) {
    atomic_fetch_or(&t->bell->state, SHM_ARMED);
    shm_fence(t);
    return atomic_load(&t->woken) || shm_anything(t);
  }
  atomic_fetch_and(&t->bell->state, ~(uint32_t)SHM_ARMED);
  atomic_store(&t->woken, false);
  atomic_store(&t->look, true);
  /* another descriptor ended the sleep */
  if (read(t->event_fd, &count, sizeof count) < 0) return 0;
  return 0;
}

const mlfab_transport *mlfab_transport_shm(void) {
  static const mlfab_transport table = {sizeof table,
                                        MLFAB_TRANSPORT_ABI,
                                        "shm",
                                        MLFAB_CAP_RELIABLE | MLFAB_CAP_LOCAL | MLFAB_CAP_CHECKED |
                                            MLFAB_CAP_PROBE | MLFAB_CAP_VOUCHED,
                                        0,
                                        shm_start,
                                        shm_stop,
                                        shm_reach,
                                        shm_connect,
                                        shm_disconnect,
                                        shm_send,
                                        shm_flush,
                                        shm_poll,
                                        shm_release,
                                        shm_detach,
                                        shm_wait,
                                        shm_wake,
                                        shm_fd,
                                        shm_arm,
                                        NULL, /* there is no network link to measure */
                                        shm_probe,
                                        NULL,
                                        NULL,
                                        NULL};
  return &table;
}

#endif
