/* shm.c - carries frames between processes of one host through shared memory.
 *
 * For peers under one kernel. A frame is copied once, into a ring that both processes map, and its bulk is delivered in
 * place. System calls are needed only when a side sleeps. The transport does not reach other hosts. It authenticates
 * only "same user, or root", and leaves payload checksums out. A bulk in memory of mlfab_alloc, or a bulk too large for
 * a small ring, stays outside the ring, which has a reference to it: shm_lend.c.
 *
 * Addresses: "shm:<host>/<name>". host: a hash of the boot and the network namespace. name: name of an abstract Unix
 * socket "mlfab:<name>". "shm:<name>" means this host. Abstract sockets and memfds have no name in a file system, so
 * they vanish, however the processes end.
 *
 * Connecting. The connector sends one packet with three descriptors: the segment (a memfd that it created),
 * its bell (below) and its eventfd. The acceptor checks uid, seals and sizes, maps the segment, and answers
 * with its own bell and eventfd; then the link is up on both sides. The socket stays open as the life line: it ends
 * when the peer ends, however it dies. The connector tells the size of the rings, at most 2.5 MiB; the acceptor answers
 * with the smaller of both sizes, which holds. A process without shm_lend.c reports itself as plain: it has the largest
 * rings only, and gets no references.
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
 *   (3) The consumer reads delivered frames between tail and its own position. It moves tail by a release store when a
 *       frame is released.
 * Data read from the segment is not trusted. A word must give lengths within the limits of a frame, and a tail must lie
 * between the last tail and head; else the link goes DOWN. Both limits keep every access within the two mappings. A
 * head is copied to private memory before it is checked. A hostile peer may change a bulk while it is read, but not its
 * length: code that reads bytes twice copies them first. A reference must lie within a file that the peer has passed,
 * sealed against shrinking; such files are mapped for reading only.
 *
 * Bell. Every node has one page, mapped by all its peers, with one word of bits. ASLEEP: in wait, on this word as a
 * futex. ARMED: the program sleeps on fd(). POLLED: wait sleeps on the sockets, because connections are being made or
 * there is no link yet. 0: awake.
 *   sleeper:  set the bit; full fence; look at all rings; sleep until the bit is gone
 *   producer: publish, or move tail; ...; full fence; if the word is not 0, take it (exchange with 0)
 *             and make the one system call that ends the sleep
 * One of the two sees the other, so every wake-up arrives. Only the side that takes the word makes the call, so there
 * is one call for each sleep. The producer's half (shm_settle) runs once per flush instead of per send, and in every
 * poll without an event. A producer without room publishes in `wants` the tail that it waits for. Sleeping on the futex
 * does not watch sockets, so it is divided into slices of 50 ms; after each slice they are polled.
 *
 * States of a link: TRYING (the peer's queue of connections is full) -> CALLING (packet sent) -> UP, or
 * CALLED (the peer connected, packet awaited) -> UP; FAILED (to be reported); UP -> gone (life line ended:
 * records in the ring are still delivered, then DOWN) -> RETIRED (kept until the frames borrowed from its
 * ring are released).
 *
 * Forks: a child has the descriptors, but not the mappings (MADV_DONTFORK). It only closes.
 *
 * Threads: wait, wake and fd may run beside the other functions. wait reads the rings under `lock`. The others take it
 * only to change the list of links. */
#include "shm.h"
#include "../core/base/system.h"

#if !MLFAB_WITH_SHM
const mlfab_transport *mlfab_transport_shm(void) { return NULL; }
#else

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

/* Processes share words, so atomics must not use locks. */
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "atomics take locks");

#define SHM_SLICE_NS UINT64_C(50000000)
#define SHM_DEAF_NS UINT64_C(100000000)
#define SHM_MAGIC 0x314d4853u /* "SHM1": the form of shm_hello; MLFAB_PROTOCOL fixes the layout */

enum {
  SHM_HALF_MAX = 64,  /* maximum connections without a packet */
  SHM_BURST = 16,     /* frames taken from one link before the next link's turn */
  SHM_LOOK_EVERY = 64 /* polls with events between two polls of the sockets */
};

_Static_assert(2 * (SHM_LINE + 8 + MLFAB_HEADER_BYTES + MLFAB_META_MAX + MLFAB_BULK_MAX) +
                       SHM_LINE <
                   SHM_RING,
               "the largest ring holds two of the largest frames");
_Static_assert(3 * SHM_LINE + 8 + MLFAB_HEADER_BYTES + MLFAB_META_MAX < SHM_RING_LEAST,
               "every ring holds the largest head with a reference");

/* The first packet on a life line, in both directions. */
struct shm_hello {
  uint32_t magic, control_bytes;
  uint32_t ring_bytes; /* plus SHM_PLAIN: its sender knows no references */
  uint32_t protocol;
};

/* ---- rings and bells ---- */

/* Would poll find an event? May run beside poll, so it takes the lock. */
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

/* Writing to an eventfd does not block with O_NONBLOCK; other descriptors might. */
static bool shm_is_eventfd(int fd) {
  char path[40], target[40];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(path, target, sizeof target - 1);
  if (n < 0) return false;
  target[n] = 0;
  return strcmp(target, "anon_inode:[eventfd]") == 0 && fcntl(fd, F_SETFL, O_NONBLOCK) == 0;
}

static void *shm_map_shared(void *at, size_t bytes, int fd, size_t offset) {
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
  if (shm_map_shared(map, control + ring, fd, 0) == NULL ||
      shm_map_shared(map + control + ring, ring, fd, control) == NULL ||
      shm_map_shared(map + control + 2 * (size_t)ring, ring, fd, control + ring) == NULL ||
      shm_map_shared(map + control + 3 * (size_t)ring, ring, fd, control + ring) == NULL)
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

static bool shm_packet_send(const struct shm *t, int fd, const int *fds, uint32_t n,
                            uint32_t ring) {
  ring += t->lend == NULL ? SHM_PLAIN : 0;
  struct shm_hello hello = {SHM_MAGIC, SHM_CONTROL, ring, MLFAB_PROTOCOL};
  return mlfab__shm_packet_post(fd, &hello, sizeof hello, fds, n);
}

/* Receives the packet. Returns 0: not come yet; 1: it came, with `want` descriptors and rings of at most *ring_p. Else
 * an error, with descriptors closed: the end, another protocol's packet, UNSUPPORTED (one of both is plain, and the
 * rings would be small). */
static int shm_packet_receive(const struct shm *t, struct shm_link *link, int *fds, uint32_t want,
                              uint32_t *ring_p) {
  struct shm_hello hello = {0};
  uint32_t count;
  ssize_t n = mlfab__shm_packet_take(link->fd, &hello, sizeof hello, fds, want, &count);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (n < 0) return MLFAB_ERR_REFUSED;
  link->plain = hello.ring_bytes & SHM_PLAIN;
  hello.ring_bytes &= ~SHM_PLAIN;
  int known = n == (ssize_t)sizeof hello && count != UINT32_MAX && hello.magic == SHM_MAGIC &&
              hello.control_bytes == SHM_CONTROL && hello.ring_bytes % SHM_CONTROL == 0 &&
              hello.ring_bytes >= SHM_RING_LEAST && hello.ring_bytes <= SHM_RING;
  int small = mlfab__min(hello.ring_bytes, *ring_p) < SHM_RING && (link->plain || t->lend == NULL);
  if (known && hello.protocol == MLFAB_PROTOCOL && count == want && hello.ring_bytes <= *ring_p &&
      !small) {
    *ring_p = hello.ring_bytes;
    return 1;
  }
  for (uint32_t i = 0; i < want; i++) mlfab__shm_close_fd(&fds[i]);
  if (!known) return MLFAB_ERR_REFUSED;
  if (hello.protocol == MLFAB_PROTOCOL) return small ? MLFAB_ERR_UNSUPPORTED : MLFAB_ERR_REFUSED;
  return hello.protocol < MLFAB_PROTOCOL ? MLFAB_ERR_PROTOCOL_OLDER : MLFAB_ERR_PROTOCOL_NEWER;
}

/* Is the peer of this user, or root? Other users could read frames sent to them. */
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

/* Makes the three arrays large enough for one more link, so that later steps cannot fail for lack of room. */
static bool shm_reserve(struct shm *t) {
  if (t->links < t->capacity) return true;
  size_t old = t->capacity, capacity = old == 0 ? 64 : 2 * old;
  if (capacity >= (1u << 24)) return false;
  struct shm_link **before = t->live;
  struct shm_link **live = mlfab__alloc_array(&t->env, capacity, 3 * sizeof *live);
  if (live == NULL) return false;
  for (size_t i = 0; i < 3 && old > 0; i++)
    memcpy(live + i * capacity, before + i * old, old * sizeof *live);
  pthread_mutex_lock(&t->lock);
  t->live = live;
  t->table = live + capacity;
  t->touched = live + 2 * capacity;
  t->capacity = (uint32_t)capacity;
  pthread_mutex_unlock(&t->lock);
  mlfab__free(&t->env, before, 3 * old * sizeof *live);
  return true;
}

/* Creates a half-open link. NULL: out of memory, and `fd` is closed. */
static struct shm_link *shm_new_link(struct shm *t, enum shm_state state, int fd) {
  struct shm_link *link = shm_reserve(t) ? mlfab__alloc(&t->env, sizeof *link) : NULL;
  if (link == NULL) {
    close(fd);
    return NULL;
  }
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

static void shm_free_link(struct shm *t, struct shm_link *link) {
  mlfab__shm_hang_up(t, link);
  mlfab__shm_close_fd(&link->event_fd);
  mlfab__shm_close_fd(&link->segment_fd);
  if (link->map != NULL) munmap(link->map, shm_mapping(link));
  if (link->bell != NULL) munmap(link->bell, SHM_CONTROL);
  if (link->refers != NULL) t->lend->free(t, link);
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

/* From UP to RETIRED; frees the link if none of its frames is borrowed. */
static void shm_retire(struct shm *t, struct shm_link *link) {
  uint32_t at = 0;
  mlfab__shm_settle(t);
  pthread_mutex_lock(&t->lock);
  while (t->live[at] != link) at++;
  t->live[at] = t->live[--t->live_count];
  pthread_mutex_unlock(&t->lock);
  if (t->cursor >= t->live_count) t->cursor = 0;
  t->burst = 0;
  atomic_fetch_sub(&t->up_count, 1);
  t->table[link->number - 1] = NULL;
  if (atomic_load(&link->blocked)) t->blocked_count--;
  if (link->refers != NULL) t->lend->take_back(t, link, 0);
  link->state = SHM_RETIRED;
  mlfab__shm_hang_up(t, link);
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
    shm_put_slot(t, slot);
  }
  if (bytes > SHM_SMALL && slot->large == NULL) {
    slot->large = mlfab__alloc(&t->env, MLFAB_HEADER_BYTES + MLFAB_META_MAX);
    if (slot->large == NULL) return NULL;
  }
  *at_p = bytes > SHM_SMALL ? slot->large : slot->small;
  t->free_slots = slot->next;
  return slot;
}

/* Fills an event about the end of a link or a refused connection. Its text is valid until the next such event. */
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

/* Reports the failure of a half-open link: DOWN for our call, REFUSED for the peer's. */
static int shm_give_up(struct shm *t, struct shm_link *link, int code, const char *why,
                       mlfab_io_event *event) {
  event->token = link->token;
  shm_tell(t, event, link->inbound ? MLFAB_IO_REFUSED : MLFAB_IO_DOWN, code, link->pid, why,
           link->address);
  shm_drop_half(t, link);
  return 1;
}

/* ---- connecting ---- */

static bool shm_watch(struct shm *t, int fd, void *what) {
  struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = what};
  return epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

/* Returns the name in "shm:[<host>/]<name>". NULL: it is malformed, or of another host. */
static const char *shm_name(uint64_t host, const char *address) {
  if (address == NULL || strncmp(address, "shm:", 4) != 0) return NULL;
  const char *at = address + 4, *slash = strchr(at, '/');
  if (slash != NULL) {
    size_t digits = strspn(at, "0123456789abcdef");
    if (at + digits != slash || digits > 16 || strtoull(at, NULL, 16) != host) return NULL;
    at = slash + 1;
  }
  size_t n = 0;
  while (at[n] > ' ' && at[n] != '/' && at[n] != 127) n++;
  return at[n] == 0 && n <= SHM_NAME_MAX ? at : NULL;
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
  socklen_t bytes = shm_sockaddr(shm_name(t->host, link->address), &to);
  int fds[3] = {link->segment_fd, t->bell_fd, t->event_fd};
  int code = MLFAB_ERR_REFUSED;
  if (connect(link->fd, (struct sockaddr *)&to, bytes) != 0) {
    if (errno == EAGAIN || errno == EINTR) return;
  } else if (shm_trusted(link->fd, &link->pid) &&
             shm_packet_send(t, link->fd, fds, 3, link->ring)) {
    link->state = SHM_CALLING;
    if (shm_watch(t, link->fd, link)) return;
    code = MLFAB_ERR_IO;
  }
  link->code = code;
  link->state = SHM_FAILED;
  atomic_fetch_add(&t->failed_count, 1);
  atomic_store(&t->look, true);
}

/* Drops the oldest connection without a packet: the last in the list, which grows at the front. Returns 1, or 0 if there
 * is none. */
static int shm_refuse_oldest(struct shm *t, mlfab_io_event *event) {
  struct shm_link *oldest = NULL;
  for (struct shm_link *link = t->half; link != NULL; link = link->next)
    if (link->inbound) oldest = link;
  return oldest != NULL &&
         shm_give_up(t, oldest, MLFAB_ERR_REFUSED, "connected and said nothing ", event);
}

/* Called if a connection waits, and the process has no descriptor left. If no older connection can be dropped, stops
 * watching the listener for a while, since watching would only spin. Returns 1 if a connection was refused. */
static int shm_spare(struct shm *t, mlfab_io_event *event) {
  if (shm_refuse_oldest(t, event)) return 1;
  epoll_ctl(t->epoll_fd, EPOLL_CTL_DEL, t->listen_fd, NULL);
  atomic_store(&t->deaf_ns, mlfab__monotonic(NULL));
  return 0;
}

/* Accepts one connection. Returns 1 if it, or an older connection, was refused. */
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
    shm_tell(t, event, MLFAB_IO_REFUSED, MLFAB_ERR_MEMORY, pid, "found no room", "");
    return 1;
  }
  link->pid = pid;
  return t->inbound_count > SHM_HALF_MAX && shm_refuse_oldest(t, event);
}

/* Maps the peer's segment and bell; its rings have `ring` bytes. Returns 0, or an error. */
static int shm_map_link(struct shm *t, struct shm_link *link, const int *fds, uint32_t ring) {
  int bell_fd = fds[link->inbound], event_fd = fds[link->inbound + 1];
  if (!mlfab__shm_sealed(bell_fd, SHM_CONTROL) || !shm_is_eventfd(event_fd) ||
      (link->inbound && !mlfab__shm_sealed(fds[0], SHM_CONTROL + 2 * (uint64_t)ring)))
    return MLFAB_ERR_FRAME;
  link->ring = link->inbound && t->lend != NULL && !link->plain
                   ? (uint32_t)mlfab__min(ring, t->lend->wish(t))
                   : ring;
  link->bell = shm_map_shared(NULL, SHM_CONTROL, bell_fd, 0);
  if (link->bell == NULL || !shm_map_segment(link, link->inbound ? fds[0] : link->segment_fd))
    return MLFAB_ERR_MEMORY;
  mlfab__shm_close_fd(&link->segment_fd);
  return 0;
}

/* The text for an error of shm_packet_receive. */
static const char *shm_mismatch(const struct shm *t, int code) {
  if (code == MLFAB_ERR_PROTOCOL_OLDER) return "has an older protocol than this process ";
  if (code == MLFAB_ERR_PROTOCOL_NEWER) return "has a newer protocol than this process ";
  if (code == MLFAB_ERR_REFUSED) return "did not follow the protocol ";
  if (t->lend != NULL)
    return "has no lent memory (MLFAB_WITH_LEND is 0), which the small rings of many processes "
           "need ";
  return "has small rings for many processes, which need lent memory; this process was built "
         "without "
         "it (MLFAB_WITH_LEND is 0) ";
}

/* Receives the packet of a half-open link, or its end. Returns 1 if there is an event. */
static int shm_meet(struct shm *t, struct shm_link *link, mlfab_io_event *event) {
  int fds[3] = {-1, -1, -1}, own[2] = {t->bell_fd, t->event_fd};
  uint32_t own_segment = link->inbound ? 1 : 0; /* descriptors before bell and eventfd */
  uint32_t ring = link->inbound ? SHM_RING : link->ring;
  int got = shm_packet_receive(t, link, fds, 2 + own_segment, &ring);
  if (got == 0) return 0;
  if (got < 0) {
    if (link->inbound && got != MLFAB_ERR_REFUSED)
      shm_packet_send(t, link->fd, NULL, 0, SHM_RING); /* so that the peer can report it, too */
    return shm_give_up(t, link, got, shm_mismatch(t, got), event);
  }
  link->event_fd = fds[own_segment + 1];
  int code = shm_map_link(t, link, fds, ring);
  if (link->inbound) close(fds[0]);
  close(fds[own_segment]);
  if (code != 0) return shm_give_up(t, link, code, "passed something that cannot be mapped", event);
  /* Who is answered takes the link for one that stands. So the memory comes before the answer. */
  bool refers = t->lend != NULL && !link->plain;
  if (refers) code = t->lend->meet(t, link, false);
  if (code == 0 && link->inbound && !shm_packet_send(t, link->fd, own, 2, link->ring))
    code = MLFAB_ERR_REFUSED;
  if (code == 0 && refers) code = t->lend->meet(t, link, true);
  if (code != 0)
    return shm_give_up(t, link, code, code == MLFAB_ERR_MEMORY ? "found no room" : "went away",
                       event);
  shm_establish(t, link, event);
  return 1;
}

/* Handles an event of a link's socket. If the link is UP, this is its end, or a packet for shm_lend.c. */
static int shm_life(struct shm *t, struct shm_link *link, mlfab_io_event *event) {
  uint8_t said;
  if (link->state != SHM_UP) return shm_meet(t, link, event);
  if (t->lend != NULL)
    t->lend->hear(t, link);
  else {
    ssize_t n = recv(link->fd, &said, 1, MSG_DONTWAIT);
    if (n >= 0 || (errno != EAGAIN && errno != EINTR))
      mlfab__shm_lose(t, link, n > 0 ? MLFAB_ERR_FRAME : 0);
  }
  return 0;
}

/* Polls the sockets; handles a limited number, so that connections cannot delay frames. */
static int shm_look(struct shm *t, mlfab_io_event *event) {
  struct epoll_event ready;
  uint64_t count;
  atomic_store(&t->look, false);
  uint64_t deaf_ns = atomic_load_explicit(&t->deaf_ns, memory_order_relaxed);
  if (deaf_ns != 0 && mlfab__monotonic(NULL) - deaf_ns >= SHM_DEAF_NS &&
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

/* A hash that is equal in all processes that can reach each other's abstract sockets. */
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
      mlfab__shm_close_fd(&link->fd);
      link->map = NULL;
      link->bell = NULL;
    }
  }
  t->bell = NULL;
}

static void shm_stop(void *self) {
  struct shm *t = self;
  if (t->pid != getpid()) shm_disown(t);
  while (t->half != NULL) shm_drop_half(t, t->half);
  while (t->live_count > 0) {
    struct shm_link *link = t->live[t->live_count - 1];
    atomic_store(&link->tx_lane->closed, 1);
    mlfab__shm_hang_up(t, link);
    mlfab__shm_ring(t, link->bell, link->event_fd);
    link->borrowed = 0;
    if (link->refers != NULL) t->lend->free(t, link); /* the memory is freed with the context */
    shm_retire(t, link);
  }
  while (t->retired != NULL) {
    struct shm_link *link = t->retired;
    t->retired = link->next;
    shm_free_link(t, link);
  }
  if (t->lender != NULL) t->lend->close(t);
  while (t->all_slots != NULL) {
    struct shm_slot *slot = t->all_slots;
    t->all_slots = slot->all;
    mlfab__free(&t->env, slot->large, MLFAB_HEADER_BYTES + MLFAB_META_MAX);
    mlfab__free(&t->env, slot, sizeof *slot);
  }
  mlfab__free(&t->env, t->live, 3 * (size_t)t->capacity * sizeof *t->live);
  mlfab__free(&t->env, t->sent, t->sent_capacity * sizeof *t->sent);
  if (t->bell != NULL) munmap(t->bell, SHM_CONTROL);
  mlfab__shm_close_fd(&t->bell_fd);
  mlfab__shm_close_fd(&t->event_fd);
  mlfab__shm_close_fd(&t->listen_fd);
  mlfab__shm_close_fd(&t->epoll_fd);
  pthread_mutex_destroy(&t->lock);
  mlfab__env env = t->env;
  mlfab__free(&env, t, sizeof *t);
}

/* Opens the node's own descriptors. 0, ADDRESS_IN_USE or IO. */
static int shm_open_fds(struct shm *t, const char *name) {
  struct sockaddr_un at;
  socklen_t bytes = shm_sockaddr(name, &at);
  t->bell_fd = mlfab__shm_file("mlfab-bell", SHM_CONTROL, F_SEAL_SEAL);
  t->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  t->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (t->bell_fd < 0 || t->event_fd < 0 || t->epoll_fd < 0 || t->listen_fd < 0) return MLFAB_ERR_IO;
  t->bell = shm_map_shared(NULL, SHM_CONTROL, t->bell_fd, 0);
  if (t->bell == NULL) return MLFAB_ERR_IO;
  if (bind(t->listen_fd, (struct sockaddr *)&at, bytes) != 0)
    return errno == EADDRINUSE ? MLFAB_ERR_ADDRESS_IN_USE : MLFAB_ERR_IO;
  if (listen(t->listen_fd, SOMAXCONN) != 0 || !shm_watch(t, t->listen_fd, &t->listen_fd) ||
      !shm_watch(t, t->event_fd, &t->event_fd))
    return MLFAB_ERR_IO;
  return 0;
}

static int shm_start(const mlfab_transport_options *options, void **self_p, char *address) {
  mlfab__env env;
  char made[48];
  const char *name = "";
  uint64_t host = 0, random = 0;
  int code = mlfab__env_init(&env, options->env);
  if (code != 0) return MLFAB__FAIL(options->error, code, "shm: bad env");
  if (!shm_host(&host))
    return MLFAB__FAIL(options->error, MLFAB_ERR_IO, "shm: /proc does not tell which host this is");
  if (options->listen != NULL && *options->listen) name = shm_name(host, options->listen);
  if (name == NULL)
    return MLFAB__FAIL(options->error, MLFAB_ERR_ADDRESS, "shm: cannot listen at %.100s",
                       options->listen);
  if (name[0] == 0) {
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
      random = (uint64_t)time(NULL);
    snprintf(made, sizeof made, "%ld-%016llx", (long)getpid(), (unsigned long long)random);
    name = made;
  }
  struct shm *t = mlfab__alloc(&env, sizeof *t);
  if (t == NULL) return MLFAB__FAIL(options->error, MLFAB_ERR_MEMORY, "shm: out of memory");
  t->env = env;
  t->lend = mlfab__shm_lend_table();
  t->pid = getpid();
  t->host = host;
  t->bell_fd = t->event_fd = t->listen_fd = t->epoll_fd = -1;
  pthread_mutex_init(&t->lock, NULL);
  code = shm_open_fds(t, name);
  int why = errno;
  if (code == 0 && t->lend != NULL && (code = t->lend->open(t, options)) != 0) why = ENOMEM;
  if (code != 0) {
    shm_stop(t);
    return MLFAB__FAIL(options->error, code, "shm: listening at shm:%s: %s", name,
                       mlfab__reason(why));
  }
  snprintf(address, 256, "shm:%016llx/%s", (unsigned long long)host, name);
  *self_p = t;
  return 0;
}

static int shm_reach(void *self, const char *address) {
  const char *name = shm_name(((struct shm *)self)->host, address);
  return name != NULL && name[0] != 0;
}

static int shm_connect(void *self, const char *address, uint64_t token) {
  struct shm *t = self;
  if (!shm_reach(self, address)) return MLFAB_ERR_ADDRESS;
  for (struct shm_link *old = t->half; old != NULL; old = old->next) {
    if (old->inbound || old->token != token) continue;
    shm_drop_half(t, old);
    break;
  }
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return MLFAB_ERR_IO;
  struct shm_link *link = shm_new_link(t, SHM_TRYING, fd);
  if (link == NULL) return MLFAB_ERR_MEMORY;
  link->token = token;
  snprintf(link->address, sizeof link->address, "%s", address);
  link->ring = t->lend != NULL ? t->lend->wish(t) : SHM_RING;
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
  mlfab__shm_hang_up(t, link);
  mlfab__shm_ring(t, link->bell, link->event_fd);
  shm_retire(t, link);
}

static int shm_send(void *self, uint32_t number, const void *head, uint32_t head_bytes,
                    const void *bulk, uint32_t bulk_bytes, uint64_t token) {
  struct shm *t = self;
  struct shm_link *link = shm_find(t, number);
  if (link == NULL || atomic_load_explicit(&link->gone, memory_order_relaxed))
    return MLFAB_ERR_PEER_CLOSED;
  if (head_bytes < MLFAB_HEADER_BYTES || head_bytes > MLFAB_HEADER_BYTES + MLFAB_META_MAX ||
      bulk_bytes > MLFAB_BULK_MAX)
    return MLFAB_ERR_LIMIT;
  if (bulk_bytes > 0 && bulk == NULL) return MLFAB_ERR_ARGUMENT; /* a ghost */
  uint32_t front = shm_up(8 + head_bytes), bytes = front + shm_up(bulk_bytes);
  if (bytes > SHM_RING_LEAST / 4 && bulk_bytes > 0 && t->lend != NULL) {
    int code = t->lend->send(t, link, head, head_bytes, bulk, bulk_bytes, token);
    if (code <= 0) return code;
  }
  int code = mlfab__shm_room(t, link, bytes, token);
  if (code != 0) return code;
  if (bulk_bytes > 0) memcpy(link->tx + link->tx_offset + front, bulk, bulk_bytes);
  mlfab__shm_publish(t, link, head, head_bytes, bytes,
                     SHM_VALID | (uint64_t)head_bytes << 32 | bulk_bytes);
  if (token != 0) mlfab__shm_sent(t, number, token);
  return 0;
}

static void shm_flush(void *self) { mlfab__shm_settle(self); }

/* Takes the record announced by `word`. Returns 0 only if memory is short: tried again later. */
static int shm_take(struct shm *t, struct shm_link *link, uint64_t word, mlfab_io_event *event) {
  uint32_t offset = atomic_load_explicit(&link->rx_offset, memory_order_relaxed);
  uint32_t head_bytes = (uint32_t)(word >> 32) & 0x3fffffffu, bulk_bytes = (uint32_t)word;
  uint32_t checked_head = 0, checked_bulk = 0;
  bool refers = (word & SHM_REFERS) != 0;
  uint8_t *head;
  if ((word & SHM_VALID) == 0 || (refers && t->lend == NULL) || head_bytes < MLFAB_HEADER_BYTES ||
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
  slot->link = link;
  code = refers ? t->lend->see(t, slot, bulk_bytes, &bulk) : 1;
  if (code <= 0) {
    shm_put_slot(t, slot);
    return code == 0 ? 0
                     : shm_down(t, link, code, "referred to memory that it has not passed", event);
  }
  link->rx_position += bytes;
  link->borrowed++;
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

static inline void shm_next(struct shm *t) {
  t->burst = 0;
  t->cursor = t->cursor + 1 < t->live_count ? t->cursor + 1 : 0;
}

/* Polls each link once, beginning with that of the last frame. */
static int shm_scan(struct shm *t, mlfab_io_event *event) {
  for (uint32_t i = 0, n = t->live_count; i < n; i++) {
    struct shm_link *link = t->live[t->cursor];
    uint32_t offset = atomic_load_explicit(&link->rx_offset, memory_order_relaxed);
    uint64_t word = atomic_load_explicit(shm_word(link->rx, offset), memory_order_acquire);
    if (word != 0) {
      if (++t->burst >= SHM_BURST) shm_next(t);
      return shm_take(t, link, word, event);
    }
    if (MLFAB__UNLIKELY(atomic_load_explicit(&link->gone, memory_order_acquire))) {
      bool closed = atomic_load(&link->rx_lane->closed) != 0;
      if (link->code != 0)
        return shm_down(t, link, link->code, "broke the rules of the ring", event);
      return shm_down(t, link, MLFAB_ERR_PEER_CLOSED, closed ? "closed the link" : "is gone",
                      event);
    }
    shm_next(t);
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
    mlfab__shm_want(t, link);
    event->kind = MLFAB_IO_WRITABLE;
    event->link = link->number;
    return 1;
  }
  return 0;
}

/* Does work that not every poll needs. Polls the sockets when requested, while connections are being made, and at every
 * tick of the coarse clock, which is cheap to read. */
static int shm_idle(struct shm *t, mlfab_io_event *event) {
  struct timespec now;
  if (t->touched_count > 0) mlfab__shm_settle(t);
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
  if (t->lend != NULL && t->lend->back(t, event)) return 1;
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
  if (slot->seen != NULL) t->lend->unsee(slot);
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
  if (MLFAB__UNLIKELY(wants != 0 && end >= wants)) mlfab__shm_settle(t);
}

/* A forked child may hold the life line of a dead process, so this checks the process. A pid of another namespace is 0
 * here. */
static int shm_probe(void *self, uint32_t number) {
  const struct shm_link *link = shm_find(self, number);
  if (link == NULL || atomic_load(&link->gone)) return MLFAB_ERR_AGAIN;
  return link->pid <= 0 || kill(link->pid, 0) == 0 || errno == EPERM ? 0 : MLFAB_ERR_AGAIN;
}

static int shm_detach(void *self, uint32_t number, uint64_t token) {
  struct shm_link *link = shm_find(self, number);
  if (link == NULL || link->refers == NULL || token == 0) return 0;
  return ((struct shm *)self)->lend->take_back(self, link, token);
}

static void shm_wait(void *self, uint64_t timeout_ns) {
  struct shm *t = self;
  struct epoll_event event;
  if (atomic_load(&t->deaf_ns) != 0) timeout_ns = mlfab__min(timeout_ns, SHM_DEAF_NS);
  uint64_t now = mlfab__monotonic(NULL), end = mlfab__add_sat(now, timeout_ns);
  bool polled = atomic_load(&t->half_count) > 0 || atomic_load(&t->up_count) == 0;
  uint32_t bit = polled ? SHM_POLLED : SHM_ASLEEP;
  uint32_t state = atomic_fetch_or(&t->bell->state, bit) | bit;
  mlfab__shm_fence(t);
  bool found = atomic_exchange(&t->woken, false) || shm_anything(t);
  while (!found && now < end) {
    /* Sleeps until a socket has an event, or while the bell's word is `state`. */
    struct timespec span = {0, (long)mlfab__min(end - now, SHM_SLICE_NS)};
    if (polled)
      epoll_wait(t->epoll_fd, &event, 1, (int)((span.tv_nsec + 999999) / 1000000));
    else
      syscall(SYS_futex, &t->bell->state, MLFAB__FUTEX_WAIT, state, &span, NULL, 0);
    state = atomic_load(&t->bell->state);
    found = (state & bit) == 0 || atomic_exchange(&t->woken, false) ||
            epoll_wait(t->epoll_fd, &event, 1, 0) == 1 ||
            (polled && atomic_load(&t->half_count) > 0);
    now = mlfab__monotonic(NULL);
  }
  if (!found) atomic_fetch_add(&t->timeouts, 1);
  atomic_fetch_and(&t->bell->state, ~bit);
  atomic_store(&t->look, true);
}

static void shm_wake(void *self) {
  struct shm *t = self;
  atomic_store(&t->woken, true);
  mlfab__shm_ring(t, t->bell, t->event_fd);
}

static int shm_fd(void *self) { return ((struct shm *)self)->epoll_fd; }

static int shm_arm(void *self, int on) {
  struct shm *t = self;
  uint64_t count;
  if (on) {
    atomic_fetch_or(&t->bell->state, SHM_ARMED);
    mlfab__shm_fence(t);
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
  static const mlfab_transport table = {.size = sizeof table,
                                        .abi = MLFAB_TRANSPORT_ABI,
                                        .name = "shm",
                                        .caps = MLFAB_CAP_RELIABLE | MLFAB_CAP_LOCAL |
                                                MLFAB_CAP_CHECKED | MLFAB_CAP_PROBE |
                                                MLFAB_CAP_VOUCHED,
                                        .open = shm_start,
                                        .close = shm_stop,
                                        .reach = shm_reach,
                                        .connect = shm_connect,
                                        .disconnect = shm_disconnect,
                                        .send = shm_send,
                                        .flush = shm_flush,
                                        .poll = shm_poll,
                                        .release = shm_release,
                                        .detach = shm_detach,
                                        .wait = shm_wait,
                                        .wake = shm_wake,
                                        .fd = shm_fd,
                                        .arm = shm_arm,
                                        .probe = shm_probe};
  return &table;
}

#endif
