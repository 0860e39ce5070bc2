/* shm_link.c - writes rings, bells and life lines of the shared-memory transport's links. See shm.h, and shm.c. */
#include "shm.h"

#if MLFAB_WITH_SHM

#include <limits.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

MLFAB__INTERNAL void mlfab__shm_fence(struct shm *t) {
#if MLFAB__TSAN
  atomic_fetch_add(&t->fence, 1);
#else
  (void)t;
  atomic_thread_fence(memory_order_seq_cst);
#endif
}

/* Prefetches a line for writing, ownership included. */
static inline void shm_link_prefetch(const uint8_t *line) {
#if defined(__x86_64__)
  __asm__ volatile("prefetchw %0" : : "m"(*line)); /* the builtin would prefetch for reading only */
#elif defined(__GNUC__)
  __builtin_prefetch(line, 1);
#else
  (void)line;
#endif
}

MLFAB__INTERNAL void mlfab__shm_ring(struct shm *t, struct shm_bell *bell, int event_fd) {
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

MLFAB__INTERNAL void mlfab__shm_settle(struct shm *t) {
  if (t->touched_count == 0) return;
  mlfab__shm_fence(t);
  for (uint32_t i = 0; i < t->touched_count; i++) {
    struct shm_link *link = t->touched[i];
    uint64_t wants = atomic_load_explicit(&link->rx_lane->wants, memory_order_relaxed);
    if (link->published || (wants != 0 && link->released >= wants))
      mlfab__shm_ring(t, link->bell, link->event_fd);
    link->touched = link->published = false;
  }
  t->touched_count = 0;
}

MLFAB__INTERNAL void mlfab__shm_close_fd(int *fd) {
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

union shm_control {
  struct cmsghdr header;
  char bytes[CMSG_SPACE(3 * sizeof(int))];
};

MLFAB__INTERNAL bool mlfab__shm_packet_post(int fd, void *packet, size_t bytes, const int *fds,
                                            uint32_t n) {
  union shm_control control;
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

MLFAB__INTERNAL ssize_t mlfab__shm_packet_take(int fd, void *packet, size_t bytes, int *fds,
                                               uint32_t room, uint32_t *count_p) {
  union shm_control control;
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
      if (to == &extra) mlfab__shm_close_fd(&extra);
    }
  }
  *count_p = message.msg_flags & (MSG_TRUNC | MSG_CTRUNC) ? UINT32_MAX : count;
  return n;
}

/* Ends the life line. Removes it from the epoll set explicitly: else a forked child that still holds the socket would
 * keep it there. */
MLFAB__INTERNAL void mlfab__shm_hang_up(struct shm *t, struct shm_link *link) {
  if (link->fd >= 0) epoll_ctl(t->epoll_fd, EPOLL_CTL_DEL, link->fd, NULL);
  mlfab__shm_close_fd(&link->fd);
}

MLFAB__INTERNAL void mlfab__shm_lose(struct shm *t, struct shm_link *link, int code) {
  link->code = code;
  mlfab__shm_hang_up(t, link);
  atomic_store(&link->gone, true);
}

/* Asks for a wake-up when there is room, or when all lent bytes have come back. */
MLFAB__INTERNAL void mlfab__shm_want(struct shm *t, struct shm_link *link) {
  uint64_t wants = atomic_load_explicit(&link->blocked, memory_order_relaxed) ? link->room : 0;
  if (link->refers != NULL) wants = t->lend->wants(link, wants);
  if (wants == atomic_load_explicit(&link->wants, memory_order_relaxed)) return;
  atomic_store_explicit(&link->tx_lane->wants, wants, memory_order_relaxed);
  atomic_store(&link->wants, wants);
}

MLFAB__INTERNAL bool mlfab__shm_see_tail(struct shm_link *link) {
  uint64_t tail = atomic_load_explicit(&link->tx_lane->tail, memory_order_acquire);
  if (tail < link->tail_seen || tail > link->head || tail % SHM_LINE != 0) {
    link->code = MLFAB_ERR_FRAME;
    atomic_store(&link->gone, true);
    return false;
  }
  link->tail_seen = tail;
  return true;
}

MLFAB__INTERNAL int mlfab__shm_block(struct shm *t, struct shm_link *link, uint64_t room) {
  link->room = room;
  if (!atomic_exchange(&link->blocked, true)) t->blocked_count++;
  mlfab__shm_want(t, link);
  return MLFAB_ERR_AGAIN;
}

/* The slow path: reads the consumer's tail, and if there is still no room, publishes the tail to wait for. */
static int shm_link_full(struct shm *t, struct shm_link *link, uint32_t bytes) {
  if (!mlfab__shm_see_tail(link)) return MLFAB_ERR_PEER_CLOSED;
  if (link->head - link->tail_seen + bytes + SHM_LINE <= link->ring) return 0;
  uint64_t need = mlfab__max(bytes + SHM_LINE, link->ring / 4);
  return mlfab__shm_block(t, link, link->head + need - link->ring);
}

/* Makes room to record one more SENT. */
static bool shm_link_sent_room(struct shm *t) {
  uint32_t count = atomic_load_explicit(&t->sent_count, memory_order_relaxed);
  if (count < t->sent_capacity) return true;
  uint32_t capacity = count == 0 ? 64 : 2 * count;
  struct shm_sent *sent = mlfab__alloc_array(&t->env, capacity, sizeof *sent);
  if (sent == NULL) return false;
  for (uint32_t i = 0; i < count; i++) sent[i] = t->sent[(t->sent_first + i) & (count - 1)];
  mlfab__free(&t->env, t->sent, count * sizeof *sent);
  t->sent = sent;
  t->sent_first = 0;
  t->sent_capacity = capacity;
  return true;
}

MLFAB__INTERNAL int mlfab__shm_room(struct shm *t, struct shm_link *link, uint32_t bytes,
                                    uint64_t token) {
  if (MLFAB__UNLIKELY(link->head - link->tail_seen + bytes + SHM_LINE > link->ring)) {
    int code = shm_link_full(t, link, bytes);
    if (code != 0) return code;
  }
  return token != 0 && !shm_link_sent_room(t) ? mlfab__shm_block(t, link, 0) : 0;
}

/* The line that the consumer polls is written last, at once: written earlier, it would move to the consumer's cache half-way. */
MLFAB__INTERNAL void mlfab__shm_publish(struct shm *t, struct shm_link *link, const uint8_t *head,
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
  shm_link_prefetch(link->tx + next + SHM_LINE);
  shm_link_prefetch(link->tx + next + 2 * SHM_LINE);
}

MLFAB__INTERNAL void mlfab__shm_sent(struct shm *t, uint32_t link, uint64_t token) {
  uint32_t count = atomic_load_explicit(&t->sent_count, memory_order_relaxed);
  t->sent[(t->sent_first + count) & (t->sent_capacity - 1)] = (struct shm_sent){link, token};
  atomic_store(&t->sent_count, count + 1);
}

#endif
