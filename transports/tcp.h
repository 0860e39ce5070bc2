/* tcp.h - the links of the TCP transport, for all of its files. See tcp.c. */
#ifndef MLFAB__TCP_H
#define MLFAB__TCP_H

#include "../core/base/base.h"
#include "../core/base/env.h"
#include "../core/base/text.h"
#include "../core/wire/wire.h"

#if MLFAB_WITH_TCP

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* 0 builds the variant for other systems on Linux, too, for tests. */
#ifndef MLFAB_TCP_EPOLL
#if defined(__linux__)
#define MLFAB_TCP_EPOLL 1
#else
#define MLFAB_TCP_EPOLL 0
#endif
#endif

#if MLFAB_TCP_EPOLL
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#endif

enum {
  TCP_SIZE_CLASSES = 5,
  TCP_BLOCK_CLASS = 2,        /* size class of stages and of blocks of copied output */
  TCP_BLOCK_BYTES = 68 << 10, /* holds the largest head */
  TCP_POOL_BYTES = 64 << 20,  /* more free buffers go back to the allocator */
  TCP_PIECES = 64,            /* maximum pieces of a link's output */
  TCP_SENT_TOKENS = 128,      /* twice the pieces: see tcp_send */
  TCP_COPY_BYTES = 8 << 10,   /* bulks up to this size are copied, which is cheaper than a piece */
  TCP_OUT_BYTES = 256 << 10,  /* limit of a link's copied output, exceeded by at most one frame */
  TCP_GATHER_PIECES = 32,     /* send writes at once beyond this, or TCP_OUT_BYTES / 2 */
  TCP_GULP_BYTES = 4 << 10,   /* read-ahead past a large frame; small because it is copied twice */
  TCP_LARGE_BYTES = 16 << 10, /* a frame with this bulk is large */
  TCP_WAITING_ROOM = 64,      /* maximum number of strangers, and of lingering links */
  TCP_FIRST_BYTES = 4 << 10,  /* maximum frame before admission; JOIN is the longest */
  TCP_ACCEPTS = 16,           /* connections accepted in one pass */
  TCP_TURNS = 8,              /* events between two passes over the sockets */
  TCP_LOOK_EVERY = 8,         /* polls without events between two passes, with one link */
  TCP_SLOT_BITS = 14,         /* of a link's id; the other bits count the slot's generations */
  TCP_SLOTS_LEAST = 64,
  TCP_SLOTS = 1 << TCP_SLOT_BITS, /* slot 0 is the listener */
  TCP_CANDIDATES = 8,             /* maximum addresses of one host name */
  TCP_PLACES = 4,                 /* maximum addresses that a node publishes */
  TCP_USER_TIMEOUT_MS = 2500,     /* for connecting, and for output left at disconnect */
  TCP_NAME_NS = 1000000000, /* a connect waits this long for its name; an answer, for a connect */
  TCP_ASK_NS = 500000000,   /* pause after a name that did not resolve */
  TCP_BIND_PAUSE_MS = 50,
  TCP_PAUSE_NS = 100000000, /* pause of the listener without descriptors */
  TCP_SHAKE_NS =
      2000000000,        /* for the handshake of a layer, and a stranger's first frame behind it */
  TCP_WATCH_IN = POLLIN, /* on Linux EPOLLIN and EPOLLOUT are the same numbers */
  TCP_WATCH_OUT = POLLOUT
};

enum tcp_asks {
  TCP_ASKS_FRAME = 1, /* the header of `frame`, which is incomplete */
  TCP_ASKS_MIDST = 2  /* the header `midst`, which came in the midst of `frame` */
};

enum tcp_state {
  TCP_LINK_RESOLVING = 1,
  TCP_LINK_CONNECTING,
  TCP_LINK_SHAKING,
  TCP_LINK_STRANGER,
  TCP_LINK_OPEN,
  TCP_LINK_LINGER,
  TCP_LINK_ENDED
};

typedef struct tcp_node {
  struct tcp_node *next, *prev; /* NULL: in no list */
} tcp_node;

/* The payload begins 64 bytes behind its address. */
typedef struct tcp_buffer {
  tcp_node node; /* in `buffers`, which has all */
  struct tcp_buffer *next_free;
  uint32_t size_class, refs;
  size_t used; /* of an output block */
} tcp_buffer;

typedef struct tcp_piece {
  const uint8_t *data;
  size_t bytes;
  uint64_t token;    /* of a borrowed piece */
  tcp_buffer *owner; /* NULL: borrowed */
} tcp_piece;

typedef struct tcp_endpoint {
  socklen_t bytes;
  union {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un local;
    struct sockaddr_storage storage;
  } at;
} tcp_endpoint;

/* The endpoints of an address text, in the order of trying. */
typedef struct tcp_dial {
  uint32_t count, next;
  tcp_endpoint to[TCP_CANDIDATES];
  char host[256], port[6];
} tcp_dial;

/* getaddrinfo may block for long and cannot be cancelled, so a detached thread calls it: one at a time for
 * each transport, and close does not wait for it. libc allocates the question, because the hooks may be gone before the
 * thread ends. Its states, under `lock`:
 *
 *   ASKED     the thread runs                                        -> ANSWERED, LEFT
 *   ANSWERED  the thread has finished; the transport frees it
 *   LEFT      the transport was closed; the thread frees it */
typedef struct tcp_question {
  pthread_mutex_t lock;
  enum { TCP_ASKED, TCP_ANSWERED, TCP_LEFT } state;
  int wake;       /* ASKED: descriptor to write to when answered */
  int status;     /* of getaddrinfo */
  uint64_t since; /* ASKED: start time; ANSWERED: when the transport saw it */
  tcp_dial dial;
} tcp_question;

typedef struct tcp_link {
  int fd;
  uint32_t id, interest;
  pid_t pid; /* the peer's, at a Unix socket; 0: unknown */
  uint8_t state, told_up, readable;
  uint8_t local;   /* a Unix socket */
  uint8_t whole;   /* `frame` is complete and verified */
  uint8_t small;   /* its peer is not admitted: TCP_FIRST_BYTES a frame */
  uint8_t refused; /* a send was refused, so a WRITABLE event is due */
  uint8_t large;   /* counts down from the last large frame */
  uint8_t asks;    /* a header has to be reported: TCP_ASKS_* */
  uint8_t fed;     /* bytes have come since the last probe */
  uint8_t roots;   /* we are not root, have dialled a socket of root, and await the first frame */
  int32_t write_failed;  /* errno after which sending is impossible */
  uint64_t token;        /* of connect */
  tcp_node ready, dirty; /* dirty: has output that no write was tried for */
  tcp_node group;        /* in `shaking`, `strangers` or `lingering` */
  void *session;         /* of the layer; NULL: none */
  uint64_t since_ns;     /* with a session: when it began */
  uint32_t attempt;      /* of the layer's handshake, at this address */
  uint8_t shakes;        /* the handshake is not done */

  tcp_buffer *stage;
  size_t stage_at, stage_end;
  tcp_buffer *frame;
  uint32_t head_bytes, bulk_bytes;
  size_t got; /* bytes received of head and bulk */

  tcp_piece pieces[TCP_PIECES]; /* a ring */
  uint32_t piece_at, piece_count;
  size_t copied;     /* bytes in copied pieces */
  tcp_buffer *block; /* place of the next copy */
  uint64_t sent[TCP_SENT_TOKENS];
  uint32_t sent_at, sent_count;

  struct tcp_window *window; /* NULL: it is not measured */
  int unmeasured;            /* for lack of memory */

  tcp_dial *dial;    /* while connecting */
  uint64_t asked_ns; /* RESOLVING: time of its beginning */
  int32_t code;
  char name[120]; /* the peer's address */
  char why[160];
} tcp_link;

typedef struct tcp_slot {
  tcp_link *link;
  uint32_t generation;
} tcp_slot;

typedef struct tcp_self {
  mlfab__env env;
  pid_t pid; /* process that opened the transport */
  uint32_t allow_insecure, keyed;
  const mlfab_layer *layer; /* or NULL */
  void *layer_user;
  int poller, wake_read, wake_write, listener;
  atomic_uint listener_paused; /* a connection found no descriptor ... */
  atomic_uint pending;         /* `ready` is not empty */
  uint64_t paused_ns;          /* ... since this time */
  tcp_question *question;      /* or NULL */
  uint64_t ask_ns;             /* no new question before this time */
  uint32_t names;              /* lower bound of the RESOLVING links at the last pass */
  atomic_uint coarse;          /* epoll_pwait2 fails: an older kernel, or a seccomp filter */
  tcp_slot *slots;
  uint32_t slot_count, slot_next, links;
  tcp_node ready, dirty, shaking, strangers, lingering;
  uint32_t stranger_count, lingering_count;
  uint32_t turns;                /* events since the last pass */
  uint32_t idle;                 /* polls without events */
  tcp_link *hot;                 /* link of the last frame: polled before a pass over all others */
  const struct tcp_gauge *gauge; /* NULL: links are not measured */
  tcp_endpoint place;            /* of the published address */
  tcp_node buffers;
  tcp_buffer *free_buffers[TCP_SIZE_CLASSES];
  size_t free_bytes;
  dev_t path_device; /* of the Unix socket's file, so that close removes no other file */
  ino_t path_inode;
  uint64_t midst[MLFAB_HEADER_BYTES / 8]; /* a header that is being reported */
  char path[sizeof(((struct sockaddr_un *)0)->sun_path) + 1];
  char address[256];
  int anywhere;   /* it listens at all addresses of this host, and no setting has chosen one */
  char text[300]; /* text of the last event */
} tcp_self;

/* Measures links: tcp_measure.c. Links that count have a window. */
typedef struct tcp_gauge {
  void (*opened)(tcp_self *self, tcp_link *link);
  /* wrote: so many bytes were written; full: the socket is full. read: so many bytes were read. */
  void (*wrote)(tcp_self *self, tcp_link *link, size_t bytes, int full);
  void (*got)(tcp_self *self, tcp_link *link, size_t bytes);
  void (*empty)(tcp_self *self, tcp_link *link);  /* the socket is */
  void (*closed)(tcp_self *self, tcp_link *link); /* NULL: the transport closes */
} tcp_gauge;

/* The function `measure` of the table. The first call begins to measure. */
MLFAB__INTERNAL int mlfab__tcp_measure(void *opaque, uint64_t now_ns, mlfab_measure *measure_p);

/* Sets *end to the address of a socket, or of its peer. Returns 0, or -1 with errno. */
static inline int tcp_ends(int fd, int peer, tcp_endpoint *end) {
  memset(end, 0, sizeof *end);
  end->bytes = sizeof end->at.storage;
  if (peer) return getpeername(fd, &end->at.any, &end->bytes);
  return getsockname(fd, &end->at.any, &end->bytes);
}

/* The address without the port, and its number of bytes: IPv4 or IPv6. */
static inline const void *tcp_host(const tcp_endpoint *end, size_t *bytes_p) {
  int v4 = end->at.any.sa_family == AF_INET;
  *bytes_p = v4 ? sizeof end->at.v4.sin_addr : sizeof end->at.v6.sin6_addr;
  return v4 ? (const void *)&end->at.v4.sin_addr : (const void *)&end->at.v6.sin6_addr;
}

static inline int tcp_same_host(const tcp_endpoint *a, const tcp_endpoint *b) {
  size_t bytes;
  const void *host = tcp_host(a, &bytes);
  int family = a->at.any.sa_family;
  return family == b->at.any.sa_family && family != AF_UNIX &&
         !memcmp(host, tcp_host(b, &bytes), bytes);
}

static inline int tcp_is_loopback(const tcp_endpoint *end) {
  if (end->at.any.sa_family == AF_UNIX) return 1;
  if (end->at.any.sa_family == AF_INET) return ntohl(end->at.v4.sin_addr.s_addr) >> 24 == 127;
  const struct in6_addr *v6 = &end->at.v6.sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(v6) || (IN6_IS_ADDR_V4MAPPED(v6) && v6->s6_addr[12] == 127);
}

/* Offsets in the kernel's struct tcp_info, which only grows; C libraries declare an old prefix of it.
 * Kernels before 4.10 return less. */
enum {
  TCP_INFO_RETRANSMITS = 2, /* a byte: consecutive expiries of the retransmission timer */
  TCP_INFO_PROBES = 3,      /* a byte: unanswered probes of a closed window */
  TCP_INFO_SND_MSS = 16,    /* u32 */
  TCP_INFO_UNACKED = 24,    /* u32, segments in flight */
  TCP_INFO_LAST_SENT = 44,  /* u32, milliseconds since data were (re)sent */
  TCP_INFO_LAST_RECV = 52,  /* u32, milliseconds since data have come */
  TCP_INFO_LAST_ACK = 56,   /* u32, milliseconds since the last acknowledgement */
  TCP_INFO_PROBE_WANTED = 60
};

static inline uint64_t tcp_info_number(const uint8_t *at, size_t bytes) {
  uint64_t large = 0;
  uint32_t small = 0;
  if (bytes == sizeof large) return memcpy(&large, at, sizeof large), large;
  return memcpy(&small, at, sizeof small), small;
}

#endif /* MLFAB_WITH_TCP */

#endif
