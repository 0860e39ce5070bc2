/* tcp.c - frames over TCP (IPv4, IPv6) and Unix stream sockets.
 *
 * For: carrying whole frames, in order, between processes of one or many hosts. Both ends of a Unix socket must belong
 * to one user, or to root. It does not encrypt, or authenticate beyond that. It reads of frames only as much as
 * mlfab_frame_check and _verify. Its only thread resolves names. It reads a clock only to measure, to resolve a name,
 * or if descriptors are short. All of its state is in its tcp_self.
 *
 * A link is in one of these states; its socket is open from CONNECTING to LINGER only:
 *
 *   RESOLVING   its host name is being resolved           -> CONNECTING, ENDED
 *   CONNECTING  dialled, no answer yet                    -> SHAKING, OPEN, ENDED
 *   SHAKING     connected; the layer's handshake          -> OPEN, ENDED, CONNECTING (another attempt)
 *   STRANGER    accepted, no valid frame received yet     -> OPEN, ENDED (at once: another user)
 *   OPEN        carries frames; told_up: UP was reported  -> ENDED, LINGER
 *   LINGER      disconnected by us: writes its queued output, discards input -> freed, without an event
 *   ENDED       to be reported: as DOWN; as DOWN of link 0 (a call); as REFUSED (a stranger) -> freed
 *
 * A layer (mlfab_transport_options.layer) may stand between frames and sockets. Then every link has a session of the
 * layer. A stranger's handshake comes before its first frame, and both together have TCP_SHAKE_NS.
 *
 * Before admission a peer gets few resources. There are at most TCP_WAITING_ROOM strangers; the oldest is
 * dropped for a new one, or when the process has no descriptor left. A stranger's first frame has at most
 * TCP_FIRST_BYTES, and so has every frame of a connection on which a node joins. A peer that announces more is refused
 * before memory is allocated for the frame.
 *
 * Invariants. A link with an event to report, or with unread input, is in the list `ready`, which poll
 * serves round robin, one event at a time. A link's output is a queue of pieces: copied pieces refer to a counted
 * buffer, borrowed pieces to the caller's memory. A socket is watched for writability only while its last write was
 * incomplete. Input first goes to a stage, a buffer that the link holds only while it contains bytes. Once a header is
 * complete, the frame gets a buffer of its size class, and the rest is read directly into that. In a fabric with a key
 * the header is reported before the rest is read (MLFAB_IO_HEAD). A header that is found in the midst of a frame is
 * reported, too. All buffers come from free lists, last in first out: a stream reuses memory that is in the cache, and
 * idle links hold none. wait shares only `pending` and `listener_paused` with the other functions.
 *
 * Source: design.md §3 (transport, memory is borrowed, closed by default); interface names as in
 * NCCL_SOCKET_IFNAME. */
#include "tcp.h"
#include "../core/base/system.h"

#if MLFAB_WITH_TCP

#ifdef MSG_NOSIGNAL
#define TCP_SEND_FLAGS (MSG_NOSIGNAL | MSG_DONTWAIT)
#else
#define TCP_SEND_FLAGS MSG_DONTWAIT
#endif
#if defined(__linux__)
#define TCP_SOCK_FLAGS (SOCK_CLOEXEC | SOCK_NONBLOCK)
#else
#define TCP_SOCK_FLAGS 0
#endif

#define TCP_BIND_NS 5000000000u /* time to try binding again while the address is taken */

/* Payload bytes of the size classes: control frames, small bulks, blocks, the default chunk and the largest
 * frame. Each bulk begins at a multiple of 64 behind its head. */
static const size_t tcp_class_bytes[TCP_SIZE_CLASSES] = {
    1 << 10, 8 << 10, TCP_BLOCK_BYTES, 260 << 10,
    MLFAB_HEADER_BYTES + MLFAB_META_MAX + MLFAB_BULK_MAX};

#define TCP_BUFFER_HEADER 64u
#define TCP_ROUND64(n) (((size_t)(n) + 63) & ~(size_t)63)

/* --- lists ------------------------------------------------------------------------------------ */

#define TCP_LINK_OF(node, member) ((tcp_link *)(void *)((char *)(node)-offsetof(tcp_link, member)))

static void tcp_list_add(tcp_node *list, tcp_node *node) {
  if (node->next) return;
  node->prev = list->prev;
  node->next = list;
  list->prev->next = node;
  list->prev = node;
}

static void tcp_list_remove(tcp_node *node) {
  if (!node->next) return;
  node->prev->next = node->next;
  node->next->prev = node->prev;
  node->next = node->prev = NULL;
}

static void tcp_ready(tcp_self *self, tcp_link *link) {
  tcp_list_add(&self->ready, &link->ready);
  atomic_store_explicit(&self->pending, 1, memory_order_relaxed);
}

static void tcp_unready(tcp_self *self, tcp_link *link) {
  tcp_list_remove(&link->ready);
  if (self->ready.next == &self->ready)
    atomic_store_explicit(&self->pending, 0, memory_order_relaxed);
}

/* --- buffers ---------------------------------------------------------------------------------- */

static uint8_t *tcp_payload(tcp_buffer *buffer) { return (uint8_t *)buffer + TCP_BUFFER_HEADER; }

/* A buffer with one reference, or NULL. */
static tcp_buffer *tcp_buffer_get(tcp_self *self, size_t bytes) {
  uint32_t k = 0;
  while (tcp_class_bytes[k] < bytes) k++;
  tcp_buffer *buffer = self->free_buffers[k];
  if (buffer) {
    self->free_buffers[k] = buffer->next_free;
    self->free_bytes -= tcp_class_bytes[k];
  } else {
    buffer = mlfab__alloc_aligned(&self->env, TCP_BUFFER_HEADER + tcp_class_bytes[k]);
    if (!buffer) return NULL;
    buffer->size_class = k;
    buffer->node.next = NULL;
    tcp_list_add(&self->buffers, &buffer->node);
  }
  buffer->refs = 1;
  buffer->used = 0;
  return buffer;
}

static void tcp_buffer_free(tcp_self *self, tcp_buffer *buffer) {
  tcp_list_remove(&buffer->node);
  mlfab__free_aligned(&self->env, buffer, TCP_BUFFER_HEADER + tcp_class_bytes[buffer->size_class]);
}

/* Drops the reference and sets it to NULL. */
static void tcp_buffer_put(tcp_self *self, tcp_buffer **buffer_p) {
  tcp_buffer *buffer = *buffer_p;
  *buffer_p = NULL;
  if (!buffer || --buffer->refs) return;
  size_t bytes = tcp_class_bytes[buffer->size_class];
  if (self->free_bytes + bytes > TCP_POOL_BYTES) {
    tcp_buffer_free(self, buffer);
    return;
  }
  self->free_bytes += bytes;
  buffer->next_free = self->free_buffers[buffer->size_class];
  self->free_buffers[buffer->size_class] = buffer;
}

/* --- watching sockets ------------------------------------------------------------------------- */

/* On Linux all sockets are in an epoll set, level triggered, so that wait and poll may use it from two
 * threads. Elsewhere tcp_look passes all slots to poll(); wait must not touch those, and sleeps on the wake
 * pipe for at most a millisecond. Returns 0, or -1 with errno. */
static int tcp_poller_set(tcp_self *self, uint32_t slot, int fd, uint32_t before,
                          uint32_t interest) {
  if (before == interest) return 0;
#if MLFAB_TCP_EPOLL
  struct epoll_event event = {.events = interest, .data.u32 = slot};
  return epoll_ctl(self->poller,
                   !interest ? EPOLL_CTL_DEL
                   : before  ? EPOLL_CTL_MOD
                             : EPOLL_CTL_ADD,
                   fd, &event);
#else
  return (void)self, (void)slot, (void)fd, 0;
#endif
}

static int tcp_watch(tcp_self *self, tcp_link *link, uint32_t interest) {
  int status = tcp_poller_set(self, link->id % TCP_SLOTS, link->fd, link->interest, interest);
  if (!status) link->interest = interest;
  return status;
}

/* Makes the pipe: sleepers wait at one end, and are woken at the other. */
static int tcp_pipe_open(tcp_self *self) {
  int ends[2];
  if (pipe(ends)) return -1;
  self->wake_read = ends[0];
  self->wake_write = ends[1];
  for (int i = 0; i < 2; i++)
    if (fcntl(ends[i], F_SETFL, O_NONBLOCK) || fcntl(ends[i], F_SETFD, FD_CLOEXEC)) return -1;
  return 0;
}

static int tcp_poller_open(tcp_self *self) {
#if MLFAB_TCP_EPOLL
  self->poller = epoll_create1(EPOLL_CLOEXEC);
  self->wake_read = self->wake_write = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  /* A filter of system calls may deny eventfd. */
  if (self->poller < 0 || (self->wake_read < 0 && tcp_pipe_open(self))) return -1;
  return tcp_poller_set(self, TCP_SLOTS, self->wake_read, 0, TCP_WATCH_IN);
#else
  return tcp_pipe_open(self);
#endif
}

/* --- links ------------------------------------------------------------------------------------ */

static tcp_link *tcp_find(tcp_self *self, uint32_t id) {
  uint32_t slot = id % TCP_SLOTS;
  tcp_link *link = slot < self->slot_count ? self->slots[slot].link : NULL;
  return link && link->id == id ? link : NULL;
}

/* Slots are used in turn and at most half of them, so that an id is not reused soon. */
static int tcp_slots_grow(tcp_self *self) {
  if (self->links + 1 >= TCP_SLOTS) return MLFAB_ERR_LIMIT;
  uint64_t need = mlfab__min(mlfab__max(2 * self->links + 3, TCP_SLOTS_LEAST), TCP_SLOTS);
  tcp_slot *slots = mlfab__grow(&self->env, self->slots, &self->slot_count, need, sizeof *slots);
  if (!slots) return MLFAB_ERR_MEMORY;
  self->slots = slots;
  return 0;
}

/* Errors: MEMORY, LIMIT. */
static int tcp_link_new(tcp_self *self, int state, tcp_link **link_p) {
  int status = tcp_slots_grow(self);
  if (status) return status;
  tcp_link *link = mlfab__alloc(&self->env, sizeof *link);
  if (!link) return MLFAB_ERR_MEMORY;
  uint32_t slot = self->slot_next;
  do slot = slot + 1 < self->slot_count ? slot + 1 : 1;
  while (self->slots[slot].link);
  self->slot_next = slot;
  tcp_slot *place = &self->slots[slot];
  place->generation = place->generation % ((1u << (24 - TCP_SLOT_BITS)) - 1) + 1;
  place->link = link;
  self->links++;
  link->id = place->generation << TCP_SLOT_BITS | slot;
  link->fd = -1;
  link->state = (uint8_t)state;
  *link_p = link;
  return 0;
}

static void tcp_pieces_drop(tcp_self *self, tcp_link *link) {
  for (; link->piece_count; link->piece_count--) {
    tcp_buffer_put(self, &link->pieces[link->piece_at].owner);
    link->piece_at = (link->piece_at + 1) % TCP_PIECES;
  }
  link->copied = 0;
  tcp_buffer_put(self, &link->block);
}

static void tcp_input_drop(tcp_self *self, tcp_link *link) {
  tcp_buffer_put(self, &link->stage);
  tcp_buffer_put(self, &link->frame);
  link->stage_at = link->stage_end = link->got = 0;
  link->whole = link->asks = 0;
}

static void tcp_group_leave(tcp_self *self, tcp_link *link) {
  if (link->group.next && link->state == TCP_LINK_STRANGER) self->stranger_count--;
  if (link->group.next && link->state == TCP_LINK_LINGER) self->lingering_count--;
  tcp_list_remove(&link->group);
}

/* Called if a connection waits, and descriptors have run out: watching the listener would only spin. Tries accept again
 * when one of our links is gone, and after TCP_PAUSE_NS, because other code in this process uses descriptors, too. */
static void tcp_listener_pause(tcp_self *self) {
  uint64_t now = self->env.hooks.clock(self->env.hooks.user);
  /* Logged when the pause begins, not at every try. */
  if (!self->paused_ns || now - self->paused_ns >= 2 * (uint64_t)TCP_PAUSE_NS)
    mlfab__log(&self->env, MLFAB_LOG_WARN, "%s: %s", self->address, mlfab__reason(errno));
  self->paused_ns = mlfab__max(now, 1);
  if (!tcp_poller_set(self, 0, self->listener, TCP_WATCH_IN, 0))
    atomic_store_explicit(&self->listener_paused, 1, memory_order_relaxed);
}

static void tcp_listener_resume(tcp_self *self) {
  if (!atomic_load_explicit(&self->listener_paused, memory_order_relaxed)) return;
  if (!tcp_poller_set(self, 0, self->listener, 0, TCP_WATCH_IN))
    atomic_store_explicit(&self->listener_paused, 0, memory_order_relaxed);
}

static void tcp_session_end(tcp_self *self, tcp_link *link) {
  if (!link->session) return;
  if (link->fd >= 0) self->layer->finish(link->session);
  self->layer->end(link->session);
  link->session = NULL;
  link->shakes = 0;
}

/* Ends the output: no more bytes follow. */
static void tcp_finish(const tcp_self *self, const tcp_link *link) {
  if (link->session) self->layer->finish(link->session);
  (void)shutdown(link->fd, SHUT_WR);
}

/* Closes the socket and frees the link's buffers; the link remains until its end is reported. Unread input
 * would turn the close into a reset, which destroys data that the peer has not read yet: reads some of it
 * first. */
static void tcp_link_close(tcp_self *self, tcp_link *link) {
  tcp_session_end(self, link);
  if (link->fd >= 0) {
    char discarded[4096];
    (void)tcp_watch(self, link, 0);
    (void)shutdown(link->fd, SHUT_WR);
    for (int i = 0; i < 64 && recv(link->fd, discarded, sizeof discarded, MSG_DONTWAIT) > 0; i++)
      continue;
    (void)close(link->fd);
    link->fd = -1;
    tcp_listener_resume(self);
  }
  tcp_input_drop(self, link);
  tcp_pieces_drop(self, link);
  tcp_group_leave(self, link);
  tcp_list_remove(&link->dirty);
  mlfab__free(&self->env, link->dial, sizeof *link->dial);
  link->dial = NULL;
  if (self->hot == link) self->hot = NULL;
}

static void tcp_link_free(tcp_self *self, tcp_link *link) {
  tcp_link_close(self, link);
  tcp_unready(self, link);
  self->slots[link->id % TCP_SLOTS].link = NULL;
  self->links--;
  if (link->window) self->gauge->closed(self, link);
  mlfab__free(&self->env, link, sizeof *link);
}

/* Ends a link from this side; poll reports it. A server of root closes the connection of another user at once
 * (tcp_accept). The user sees an end of the stream, or a reset if the server had unread bytes: so the text names the
 * reason for both. */
static void tcp_link_end(tcp_self *self, tcp_link *link, int code, const char *why) {
  if (link->roots && code == MLFAB_ERR_PEER_CLOSED)
    why = "its socket is root's: root refuses other users";
  snprintf(link->why, sizeof link->why, "%s", why); /* `why` may belong to the session */
  tcp_link_close(self, link);
  link->state = TCP_LINK_ENDED;
  link->code = code;
  tcp_ready(self, link);
}

static int tcp_code_of(int number) {
  switch (number) {
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case EPIPE:
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENOENT:
      return MLFAB_ERR_PEER_CLOSED;
    case EADDRINUSE:
      return MLFAB_ERR_ADDRESS_IN_USE;
    case EADDRNOTAVAIL:
    case EAFNOSUPPORT:
      return MLFAB_ERR_ADDRESS;
    case ENOMEM:
    case ENOBUFS:
      return MLFAB_ERR_MEMORY;
    case EBADMSG: /* a layer found changed bytes */
      return MLFAB_ERR_CRC;
    default:
      return MLFAB_ERR_IO;
  }
}

static void tcp_link_fail(tcp_self *self, tcp_link *link, int number) {
  const char *why = link->session ? self->layer->why(link->session) : "";
  if (!*why && number == ETIMEDOUT && link->state == TCP_LINK_OPEN)
    why = "nothing that was sent is acknowledged (cut off, or the path loses large packets: MTU)";
  tcp_link_end(self, link, tcp_code_of(number), *why ? why : mlfab__reason(number));
}

/* --- addresses -------------------------------------------------------------------------------- */

/* May this node listen at this endpoint, or call it? */
static int tcp_is_allowed(const tcp_self *self, const tcp_endpoint *end) {
  if (self->allow_insecure || end->at.any.sa_family == AF_UNIX) return 1;
  return self->keyed && tcp_is_loopback(end);
}

static int tcp_is_wildcard(const tcp_endpoint *end) {
  if (end->at.any.sa_family == AF_INET) return end->at.v4.sin_addr.s_addr == htonl(INADDR_ANY);
  return end->at.any.sa_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&end->at.v6.sin6_addr);
}

static in_port_t *tcp_port(tcp_endpoint *end) {
  return end->at.any.sa_family == AF_INET ? &end->at.v4.sin_port : &end->at.v6.sin6_port;
}

/* Sets *end to all addresses of this host: of IPv4 alone, or of both. */
static void tcp_set_wildcard(tcp_endpoint *end, int family, in_port_t port) {
  memset(end, 0, sizeof *end);
  end->at.any.sa_family = (sa_family_t)family;
  end->bytes = family == AF_INET ? sizeof end->at.v4 : sizeof end->at.v6;
  *tcp_port(end) = port;
}

/* The beginning of its hosts' addresses. */
static const char *tcp_scheme(const tcp_self *self) {
  return self->layer ? self->layer->name : "tcp";
}

static const char *tcp_host_text(const tcp_endpoint *end, char text[INET6_ADDRSTRLEN]) {
  size_t bytes;
  const void *host = tcp_host(end, &bytes);
  const char *done = inet_ntop(end->at.any.sa_family, host, text, INET6_ADDRSTRLEN);
  return done ? done : "";
}

static void tcp_format(const tcp_self *self, tcp_endpoint *end, char *text, size_t room) {
  char host[INET6_ADDRSTRLEN];
  snprintf(text, room, end->at.any.sa_family == AF_INET ? "%s:%s:%u" : "%s:[%s]:%u",
           tcp_scheme(self), tcp_host_text(end, host), (unsigned)ntohs(*tcp_port(end)));
}

static int tcp_parse_unix(const char *path, tcp_endpoint *end) {
  struct sockaddr_un *local = &end->at.local;
  size_t bytes = strlen(path), offset = offsetof(struct sockaddr_un, sun_path);
  memset(end, 0, sizeof *end);
  local->sun_family = AF_UNIX;
  if (bytes < 2 || bytes >= sizeof local->sun_path || (path[0] != '/' && path[0] != '@') ||
      strchr(path, ' '))
    return MLFAB_ERR_ADDRESS;
  memcpy(local->sun_path, path, bytes);
  end->bytes = (socklen_t)(offset + bytes + 1);
  if (path[0] == '@') {
#if defined(__linux__)
    local->sun_path[0] = 0;
    end->bytes = (socklen_t)(offset + bytes);
#else
    return MLFAB_ERR_ADDRESS;
#endif
  }
  return 0;
}

/* "host:port" or "[host]:port"; host has 256 bytes, port 6. */
static int tcp_parse_host(const char *text, char *host, char *port) {
  const char *begin = text, *end = strrchr(text, ':');
  if (!end) return MLFAB_ERR_ADDRESS;
  const char *digits = end + 1;
  if (*text == '[') {
    begin++;
    if (end == text || *--end != ']') return MLFAB_ERR_ADDRESS;
  } else if (memchr(text, ':', (size_t)(end - text))) {
    return MLFAB_ERR_ADDRESS; /* IPv6 without brackets would be ambiguous */
  }
  size_t bytes = end > begin ? (size_t)(end - begin) : 0, n = strlen(digits);
  if (!bytes || bytes > 255 || strcspn(begin, " []") < bytes || !n || n > 5 ||
      strspn(digits, "0123456789") != n || strtoul(digits, NULL, 10) > 65535)
    return MLFAB_ERR_ADDRESS;
  memcpy(host, begin, bytes);
  host[bytes] = 0;
  memcpy(port, digits, n + 1);
  return 0;
}

/* Reads an address: "tcp:", the layer's name or nothing before a host, which is not looked up yet, or "unix:". A layer is
 * for hosts only. It also takes their addresses without its name, since these come from launchers. Errors: ADDRESS. */
static int tcp_read(const tcp_self *self, const char *address, tcp_dial *dial) {
  size_t n = strlen(tcp_scheme(self));
  dial->count = dial->next = 0;
  if (!strncmp(address, "unix:", 5)) {
    dial->count = 1;
    return self->layer ? MLFAB_ERR_ADDRESS : tcp_parse_unix(address + 5, &dial->to[0]);
  }
  if (!strncmp(address, "shm:", 4) || !strncmp(address, "sim:", 4) || !strncmp(address, "mpi:", 4))
    return MLFAB_ERR_ADDRESS;
  if (!strncmp(address, tcp_scheme(self), n) && address[n] == ':')
    address += n + 1;
  else if (!strncmp(address, "tcp:", 4))
    address += 4;
  return tcp_parse_host(address, dial->host, dial->port);
}

/* Resolves dial->host. Returns the result of getaddrinfo. */
static int tcp_lookup(tcp_dial *dial, int flags) {
  struct addrinfo hints = {0}, *list = NULL;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  dial->count = dial->next = 0;
  int status = getaddrinfo(dial->host, dial->port, &hints, &list);
  if (status) return status;
  for (struct addrinfo *a = list; a && dial->count < TCP_CANDIDATES; a = a->ai_next) {
    if (a->ai_family != AF_INET && a->ai_family != AF_INET6) continue;
    tcp_endpoint *end = &dial->to[dial->count++];
    memset(end, 0, sizeof *end);
    memcpy(&end->at, a->ai_addr, a->ai_addrlen);
    end->bytes = a->ai_addrlen;
  }
  freeaddrinfo(list);
  return dial->count ? 0 : EAI_NONAME;
}

/* Returns 0 with the addresses, or 1 for a name that must be resolved. Errors: ADDRESS. */
static int tcp_parse(const tcp_self *self, const char *address, tcp_dial *dial) {
  int status = tcp_read(self, address, dial);
  if (status || dial->count) return status;
  return tcp_lookup(dial, AI_NUMERICHOST) != 0; /* numeric addresses need no name server */
}

/* NCCL's syntax: "eth,ib": prefixes; "=eth0,eth1": exact names; "^docker,lo": all other interfaces. */
static int tcp_ifname_fits(const char *list, const char *name) {
  int inverted = *list == '^';
  list += inverted;
  int exact = *list == '=';
  list += exact;
  while (*list) {
    size_t bytes = strcspn(list, ",");
    if (bytes && !strncmp(list, name, bytes) && (!exact || !name[bytes])) return !inverted;
    list += bytes;
    list += *list == ',';
  }
  return inverted;
}

/* Finds addresses at which other hosts may reach this host: addresses of interfaces that are up and fit. If `family` is
 * 0, IPv4 comes before IPv6. Interfaces without a carrier, and IPv4's link-local addresses, count only if `ifname`
 * names them. Returns their number, at most `room`. */
static uint32_t tcp_interfaces(const char *ifname, int family, tcp_endpoint *ends, uint32_t room) {
  struct ifaddrs *list = NULL;
  uint32_t n = 0;
  if (!ifname || !*ifname) ifname = "^lo,docker,veth,br-,virbr";
  if (getifaddrs(&list)) return 0;
  for (int pass = 0; pass < 2; pass++) {
    const int kind = pass ? AF_INET6 : AF_INET;
    if (family && kind != family) continue;
    for (const struct ifaddrs *i = list; i && n < room; i = i->ifa_next) {
      if (!i->ifa_addr || i->ifa_addr->sa_family != kind || !(i->ifa_flags & IFF_UP) ||
          !tcp_ifname_fits(ifname, i->ifa_name) ||
          (*ifname == '^' && (!(i->ifa_flags & IFF_RUNNING) || i->ifa_flags & IFF_LOOPBACK)))
        continue;
      tcp_endpoint *end = &ends[n];
      memset(end, 0, sizeof *end);
      end->bytes = kind == AF_INET ? sizeof end->at.v4 : sizeof end->at.v6;
      memcpy(&end->at, i->ifa_addr, end->bytes);
      /* Not valid on other hosts. */
      if (kind == AF_INET ? *ifname == '^' && ntohl(end->at.v4.sin_addr.s_addr) >> 16 == 0xa9fe
                          : IN6_IS_ADDR_LINKLOCAL(&end->at.v6.sin6_addr))
        continue;
      n++;
    }
  }
  freeifaddrs(list);
  return n;
}

/* " (ADDRESS, ...)": the addresses of a name, for an error; "" without a name. */
static const char *tcp_tried(const tcp_dial *dial, int named, char *text, size_t room) {
  size_t at = 0;
  text[0] = 0;
  for (uint32_t i = 0; named && i < dial->count && at + INET6_ADDRSTRLEN + 4 < room; i++) {
    char host[INET6_ADDRSTRLEN];
    at += (size_t)snprintf(text + at, room - at, "%s%s", i ? ", " : " (",
                           tcp_host_text(&dial->to[i], host));
  }
  if (at > 0) snprintf(text + at, room - at, ")");
  return text;
}

/* --- sockets ---------------------------------------------------------------------------------- */

/* Makes the socket non-blocking, close-on-exec and without signals. Returns fd, or -1 with errno; then
 * closed. */
static int tcp_socket_prepare(int fd, int family) {
  int one = 1;
  if (fd < 0) return -1;
#if !defined(__linux__)
  if (fcntl(fd, F_SETFL, O_NONBLOCK) || fcntl(fd, F_SETFD, FD_CLOEXEC)) {
    int number = errno;
    (void)close(fd);
    errno = number;
    return -1;
  }
#endif
#ifdef SO_NOSIGPIPE
  (void)setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &one, sizeof one);
#endif
  if (family != AF_UNIX) (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

/* Sets how long the kernel waits for the peer to accept data; 0: as long as the peer answers. While a link is up, the
 * node decides instead: to the kernel, a host that is gone looks like a process that does not read. */
static void tcp_patience(int fd, unsigned timeout_ms) {
#ifdef TCP_USER_TIMEOUT
  (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
#else
  (void)fd;
  (void)timeout_ms;
#endif
}

static int tcp_socket(int family) {
  return tcp_socket_prepare(socket(family, SOCK_STREAM | TCP_SOCK_FLAGS, 0), family);
}

/* Removes a stale socket file: after the death of its owner, it would keep the address in use for ever. Returns 1 if
 * removed. */
static int tcp_unlink_stale(const tcp_endpoint *end) {
  struct stat info;
  const char *path = end->at.local.sun_path;
  if (end->at.any.sa_family != AF_UNIX || !path[0] || lstat(path, &info) || !S_ISSOCK(info.st_mode))
    return 0;
  int fd = tcp_socket(AF_UNIX);
  if (fd < 0) return 0;
  int stale = connect(fd, &end->at.any, end->bytes) && errno == ECONNREFUSED;
  (void)close(fd);
  return stale && !unlink(path);
}

static int tcp_bind(tcp_self *self, const tcp_endpoint *end) {
  int one = 1, zero = 0, family = end->at.any.sa_family;
  self->listener = tcp_socket(family);
  if (self->listener < 0) return -1;
  if (family != AF_UNIX)
    (void)setsockopt(self->listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (family == AF_INET6 && tcp_is_wildcard(end)) /* IPv4, too */
    (void)setsockopt(self->listener, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
  if (bind(self->listener, &end->at.any, end->bytes) &&
      (errno != EADDRINUSE || !tcp_unlink_stale(end) ||
       bind(self->listener, &end->at.any, end->bytes)))
    return -1;
  if (family == AF_UNIX && end->at.local.sun_path[0]) {
    struct stat info;
    snprintf(self->path, sizeof self->path, "%s", end->at.local.sun_path);
    if (lstat(self->path, &info)) return -1;
    self->path_device = info.st_dev;
    self->path_inode = info.st_ino;
  }
  if (listen(self->listener, SOMAXCONN)) return -1;
  return tcp_poller_set(self, 0, self->listener, 0, TCP_WATCH_IN);
}

/* Binds the first of the addresses that this host has, at the first port that is free. Callers try all of the addresses.
 * Returns 0 or errno. */
static int tcp_bind_first(tcp_self *self, const tcp_dial *dial, uint32_t ports) {
  int number = EADDRNOTAVAIL;
  for (uint32_t i = 0; i < dial->count && number != EADDRINUSE; i++) {
    tcp_endpoint end = dial->to[i];
    for (uint32_t k = 0; k == 0 || (k < ports && number == EADDRINUSE); k++) {
      if (k > 0) *tcp_port(&end) = htons((uint16_t)(ntohs(*tcp_port(&end)) + 1));
      if (!tcp_bind(self, &end)) return 0;
      number = errno;
      if (self->listener >= 0) (void)close(self->listener);
      self->listener = -1;
    }
  }
  return number;
}

/* Binds again while a process that ends still has the address: for at most TCP_BIND_NS, and half of the deadline. If
 * this is a restart of the job, the former process probably has the address, and ends when it meets this process: half
 * of the deadline. A Unix socket is free when its process has closed it; so, if this is no restart, another job has it.
 * Returns 0 or errno. */
static int tcp_bind_patiently(tcp_self *self, const mlfab_transport_options *options,
                              const tcp_dial *dial, uint32_t ports) {
  size_t run;
  int restarts = options->job && mlfab__job_restarts(options->job, &run) > 0, number;
  uint64_t begin = mlfab__monotonic(NULL), limit = options->timeout_ns / 2;
  if (!restarts)
    limit = dial->to[0].at.any.sa_family == AF_UNIX ? 0 : mlfab__min(limit, TCP_BIND_NS);
  while ((number = tcp_bind_first(self, dial, ports)) != 0) {
    if (number != EADDRINUSE || mlfab__monotonic(NULL) - begin >= limit) return number;
    (void)poll(NULL, 0, TCP_BIND_PAUSE_MS);
  }
  return 0;
}

/* Sets self->address to the addresses under which others reach the listener. */
static void tcp_publish(tcp_self *self, const mlfab_transport_options *options,
                        const char *wanted) {
  tcp_endpoint ends[TCP_PLACES];
  uint32_t n = 1;
  size_t at = 0;
  (void)tcp_ends(self->listener, 0, &ends[0]);
  int family = ends[0].at.any.sa_family;
  self->place = ends[0];
  if (family == AF_UNIX) {
    snprintf(self->address, sizeof self->address, "%s", wanted);
    return;
  }
  in_port_t port = *tcp_port(&ends[0]);
  if (tcp_is_wildcard(&ends[0])) {
    self->anywhere = !options->ifname || !*options->ifname;
    n = tcp_interfaces(options->ifname, family == AF_INET ? AF_INET : 0, ends, TCP_PLACES);
    if (n == 0) { /* only the loopback is there; the listener takes IPv4, too */
      n = 1;
      tcp_set_wildcard(&ends[0], AF_INET, port);
      ends[0].at.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    }
  }
  for (uint32_t i = 0; i < n && at + INET6_ADDRSTRLEN + 16 < sizeof self->address; i++) {
    if (i > 0) self->address[at++] = ' ';
    *tcp_port(&ends[i]) = port;
    tcp_format(self, &ends[i], self->address + at, sizeof self->address - at);
    at += strlen(self->address + at);
  }
  self->place = ends[0];
}

#define TCP_INSECURE_TEXT                                                               \
  "%s: without a key anybody who reaches it could take part; give all processes a key " \
  "(MLFAB_KEY_FILE, MLFAB_KEY), use a Unix socket (unix:), or set allow_insecure "      \
  "(MLFAB_ALLOW_INSECURE=1)"

static void tcp_wake_drain(tcp_self *self) {
  uint64_t count[8];
  while (read(self->wake_read, count, sizeof count) == (ssize_t)sizeof count) continue;
}

static int tcp_milliseconds(uint64_t ns) {
  return ns >= (uint64_t)INT_MAX * 1000000u ? INT_MAX : (int)((ns + 999999u) / 1000000u);
}

/* --- names ------------------------------------------------------------------------------------ */

static void tcp_question_free(tcp_question *question) {
  pthread_mutex_destroy(&question->lock);
  free(question);
}

static void *tcp_question_thread(void *argument) {
  tcp_question *question = argument;
  uint64_t one = 1;
  question->status = tcp_lookup(&question->dial, 0);
  pthread_mutex_lock(&question->lock);
  int left = question->state == TCP_LEFT;
  /* A full pipe wakes the reader too. */
  if (!left && write(question->wake, &one, sizeof one) < 0) left = 0;
  if (!left) question->state = TCP_ANSWERED;
  pthread_mutex_unlock(&question->lock);
  if (left) tcp_question_free(question);
  return NULL;
}

/* Errors: MEMORY, IO (no thread). */
static int tcp_ask(tcp_self *self, const tcp_dial *dial, uint64_t now_ns) {
  pthread_attr_t attributes;
  pthread_t thread;
  tcp_question *question = calloc(1, sizeof *question);
  if (!question) return MLFAB_ERR_MEMORY;
  question->dial = *dial;
  question->wake = self->wake_write;
  question->since = now_ns;
  pthread_mutex_init(&question->lock, NULL);
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  int code = mlfab__thread_start(&thread, &attributes, tcp_question_thread, question);
  pthread_attr_destroy(&attributes);
  if (!code)
    self->question = question;
  else
    tcp_question_free(question);
  return code;
}

static int tcp_is_answered(const tcp_self *self) {
  if (!self->question) return 0;
  pthread_mutex_lock(&self->question->lock);
  int answered = self->question->state == TCP_ANSWERED;
  pthread_mutex_unlock(&self->question->lock);
  return answered;
}

/* Abandons the transport's question. */
static void tcp_unask(tcp_self *self) {
  tcp_question *question = self->question;
  self->question = NULL;
  if (!question) return;
  pthread_mutex_lock(&question->lock);
  int answered = question->state == TCP_ANSWERED;
  if (!answered) question->state = TCP_LEFT;
  pthread_mutex_unlock(&question->lock);
  if (answered) tcp_question_free(question);
}

/* Drops the addresses that need allow_insecure; returns how many are left. */
static uint32_t tcp_keep_safe(const tcp_self *self, tcp_dial *dial) {
  uint32_t safe = 0;
  for (uint32_t i = 0; i < dial->count; i++)
    if (tcp_is_allowed(self, &dial->to[i])) dial->to[safe++] = dial->to[i];
  return dial->count = safe;
}

static void tcp_dial_next(tcp_self *self, tcp_link *link, int number);

/* Takes the answer for the name of this link. */
static void tcp_name_answered(tcp_self *self, tcp_link *link) {
  const tcp_question *question = self->question;
  if (question->status) {
    tcp_link_end(self, link, MLFAB_ERR_ADDRESS, gai_strerror(question->status));
    return;
  }
  *link->dial = question->dial;
  if (!tcp_keep_safe(self, link->dial)) {
    mlfab__log(&self->env, MLFAB_LOG_ERROR, TCP_INSECURE_TEXT, link->name);
    tcp_link_end(self, link, MLFAB_ERR_INSECURE, mlfab_error_text(MLFAB_ERR_INSECURE));
    return;
  }
  link->state = TCP_LINK_CONNECTING;
  tcp_dial_next(self, link, 0);
}

/* Serves the links that wait for names. An answer without a waiting link is kept for a moment, because a connect that
 * timed out is usually repeated. */
static void tcp_names(tcp_self *self) {
  uint64_t now = self->env.hooks.clock(self->env.hooks.user);
  int answered = tcp_is_answered(self), taken = 0, status = 0;
  tcp_link *first = NULL;
  self->names = 0;
  for (uint32_t i = 1; i < self->slot_count; i++) {
    tcp_link *link = self->slots[i].link;
    if (!link || link->state != TCP_LINK_RESOLVING) continue;
    if (answered && !strcmp(self->question->dial.host, link->dial->host) &&
        !strcmp(self->question->dial.port, link->dial->port)) {
      tcp_name_answered(self, link);
      taken = 1;
    } else if (now - link->asked_ns >= TCP_NAME_NS) {
      tcp_link_end(self, link, MLFAB_ERR_TIMEOUT, "its name is not resolved yet");
    } else {
      self->names++;
      if (!first || link->asked_ns < first->asked_ns) first = link;
    }
  }
  if (answered && (status = self->question->status) != 0) self->ask_ns = now + TCP_ASK_NS;
  if (answered && (taken || status || first || now - self->question->since >= 2 * TCP_NAME_NS))
    tcp_unask(self);
  if (!first || self->question || now < self->ask_ns) return;
  status = tcp_ask(self, first->dial, now);
  if (status) tcp_link_end(self, first, status, mlfab_error_text(status));
}

/* Waits for the name of this node's own address, according to mlfab_transport_options.timeout_ns. */
static int tcp_await_name(tcp_self *self, const mlfab_transport_options *options, tcp_dial *dial) {
  uint64_t now = mlfab__monotonic(NULL), begin = now;
  uint64_t limit = options->timeout_ns ? options->timeout_ns : UINT64_MAX;
  const char *why = "its name is not resolved yet";
  int code = MLFAB_ERR_TIMEOUT, failed = 0;
  for (; code && !failed && now - begin < limit; now = mlfab__monotonic(NULL)) {
    if (!self->question && now >= self->ask_ns) failed = tcp_ask(self, dial, now);
    if (failed) why = mlfab_error_text(code = failed);
    uint64_t left = limit - (now - begin);
    struct pollfd entry = {.fd = self->wake_read, .events = POLLIN};
    if (!failed) (void)poll(&entry, 1, tcp_milliseconds(mlfab__min(left, TCP_ASK_NS / 5)));
    if (!tcp_is_answered(self)) continue;
    tcp_wake_drain(self);
    int status = self->question->status;
    if (!status) *dial = self->question->dial;
    if (status) why = gai_strerror(status);
    code = status ? MLFAB_ERR_ADDRESS : 0;
    failed = status && !options->timeout_ns;
    self->ask_ns = mlfab__monotonic(NULL) + TCP_ASK_NS;
    tcp_unask(self);
  }
  tcp_unask(self);
  self->ask_ns = 0;
  return !code ? 0
               : mlfab__error(options->error, code, MLFAB_NO_RANK, 0, now - begin,
                              "listen at %s: %s", options->listen, why);
}

/* --- listening --------------------------------------------------------------------------------- */

/* A name of this transport only, for a node that may not use TCP. */
static void tcp_name_socket(const tcp_self *self, char *text, size_t room) {
#if defined(__linux__)
  static const char place[] = "@";
#else
  static const char place[] =
      "/tmp/"; /* no abstract names: a file, which stays if the process is killed */
#endif
  snprintf(text, room, "unix:%smlfab-%ld-%llx", place, (long)self->pid,
           (unsigned long long)mlfab__monotonic(NULL));
}

/* Listens everywhere; with IPv4 alone if there is no IPv6. */
static void tcp_anywhere(tcp_dial *dial) {
  if (tcp_is_wildcard(&dial->to[0]) && dial->to[0].at.any.sa_family == AF_INET6)
    tcp_set_wildcard(&dial->to[dial->count++], AF_INET, *tcp_port(&dial->to[0]));
}

/* The name of this host mostly also names its loopback ("127.0.1.1 host"). Other hosts, which know another address for
 * it, would then call in vain. So addresses of the network go first. If there is none, the node listens at all
 * addresses of this host, and logs that. */
static void tcp_leave_home(const tcp_self *self, tcp_dial *dial) {
  tcp_endpoint away[TCP_CANDIDATES];
  uint32_t n = 0;
  char text[160];
  if (!self->allow_insecure || !strcmp(dial->host, "localhost")) return;
  for (uint32_t i = 0; i < dial->count; i++)
    if (!tcp_is_loopback(&dial->to[i])) away[n++] = dial->to[i];
  if (n > 0) {
    memcpy(dial->to, away, n * sizeof *away);
    dial->count = n;
    return;
  }
  tcp_tried(dial, 1, text, sizeof text);
  mlfab__log(&self->env, MLFAB_LOG_WARN,
             "this host's own name '%s' is %.*s here, which no other host reaches (/etc/hosts): "
             "listening at all addresses of this host",
             dial->host, (int)strlen(text) - 3, text + 2);
  tcp_set_wildcard(&dial->to[0], AF_INET6, *tcp_port(&dial->to[0]));
  dial->count = 1;
  tcp_anywhere(dial);
}

static int tcp_listen(tcp_self *self, const mlfab_transport_options *options) {
  const char *wanted = options->listen ? options->listen : "";
  const char *ifname = options->ifname ? options->ifname : "";
  tcp_endpoint found;
  char own[64];
  if (!*wanted) {
    wanted = "tcp:127.0.0.1:0";
    if (!self->allow_insecure && !self->keyed) {
      tcp_name_socket(self, own, sizeof own);
      wanted = own;
    }
    if (self->allow_insecure && *ifname && tcp_interfaces(ifname, 0, &found, 1) == 0)
      return MLFAB__FAIL(options->error, MLFAB_ERR_ADDRESS,
                         "no interface that is up and has an address fits ifname \"%s\"", ifname);
    if (self->allow_insecure) wanted = "tcp:[::]:0"; /* tcp_anywhere */
  }
  tcp_dial dial;
  memset(&dial, 0, sizeof dial);
  char first[256];
  mlfab__address_port(wanted, strlen(wanted), 0, first, sizeof first);
  int status = tcp_parse(self, first, &dial);
  if (status < 0)
    return MLFAB__FAIL(options->error, status, "listen at %s: %s", wanted,
                       mlfab__address_fault(wanted));
  int named = status > 0;
  if (named) status = tcp_await_name(self, options, &dial);
  if (status) return status;
  if (!tcp_keep_safe(self, &dial))
    return MLFAB__FAIL(options->error, MLFAB_ERR_INSECURE, TCP_INSECURE_TEXT, wanted);
  if (!options->listen || !*options->listen) tcp_anywhere(&dial);
  if (named) tcp_leave_home(self, &dial);
  int number =
      tcp_bind_patiently(self, options, &dial, mlfab__address_ports(wanted, strlen(wanted)));
  if (number) {
    char tried[160];
    return MLFAB__FAIL(options->error, tcp_code_of(number), "listen at %s%s: %s", wanted,
                       tcp_tried(&dial, named, tried, sizeof tried), mlfab__reason(number));
  }
  tcp_publish(self, options, wanted);
  return 0;
}

/* Is the peer of this Unix socket our user's, or root's? Another user could read frames sent to it, or impersonate a
 * rank. The kernel recorded the user and the process at connect or listen. */
static int tcp_trusts(tcp_link *link, uid_t *uid_p) {
#if defined(__linux__)
  struct ucred peer;
  socklen_t bytes = sizeof peer;
  if (getsockopt(link->fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes)) return 0;
  link->pid = peer.pid;
  *uid_p = peer.uid;
#else
  gid_t gid;
  if (getpeereid(link->fd, uid_p, &gid)) return 0;
#endif
  return *uid_p == geteuid() || *uid_p == 0;
}

/* The stranger to drop for another connection: the oldest without unread input, because a stranger with input may be
 * waiting for us. NULL if there is none. */
static tcp_link *tcp_stalest(const tcp_self *self) {
  for (tcp_node *at = self->strangers.next; at != &self->strangers; at = at->next) {
    tcp_link *link = TCP_LINK_OF(at, group);
    struct pollfd words = {.fd = link->fd, .events = POLLIN};
    if (link->stage || link->frame || poll(&words, 1, 0) != 1) return link;
  }
  return NULL;
}

static void tcp_turn_out(tcp_self *self, tcp_link *link) {
  tcp_link_end(self, link, MLFAB_ERR_LIMIT, "sent no frame and was dropped for a newer connection");
}

/* The process has no descriptor left: drops the oldest stranger, or a lingering link. Links that have sent
 * a frame stay. */
static int tcp_spare(tcp_self *self) {
  tcp_link *stalest = tcp_stalest(self);
  if (stalest) {
    tcp_turn_out(self, stalest);
    return 1;
  }
  if (self->lingering.next == &self->lingering) return 0;
  tcp_link_free(self, TCP_LINK_OF(self->lingering.next, group));
  return 1;
}

/* Returns 0 if memory is short: the link has ended. */
static int tcp_session_begin(tcp_self *self, tcp_link *link, int called) {
  link->since_ns = self->env.hooks.clock(self->env.hooks.user);
  link->shakes = 1;
  if (!self->layer->begin(self->layer_user, link->fd, called, link->attempt, &link->session))
    return 1;
  tcp_link_end(self, link, MLFAB_ERR_MEMORY, "out of memory");
  return 0;
}

/* Accepts connections. While the waiting room is full of strangers with unread input, further connections
 * wait in the kernel. */
static void tcp_accept(tcp_self *self) {
  for (int i = 0; i < TCP_ACCEPTS; i++) {
    tcp_link *stalest = NULL;
    if (self->stranger_count == TCP_WAITING_ROOM && (stalest = tcp_stalest(self)) == NULL) return;
    tcp_endpoint from;
    memset(&from, 0, sizeof from);
    from.bytes = sizeof from.at.storage;
#if defined(__linux__)
    int fd = accept4(self->listener, &from.at.any, &from.bytes, TCP_SOCK_FLAGS);
#else
    int fd = accept(self->listener, &from.at.any, &from.bytes);
#endif
    if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) {
      /* The kernel reserves a descriptor first, and fails even if no connection is waiting. */
      struct pollfd waiting = {.fd = self->listener, .events = POLLIN};
      int code = errno;
      if (poll(&waiting, 1, 0) != 1) return;
      if (tcp_spare(self)) continue;
      errno = code;
      tcp_listener_pause(self);
    }
    if (fd < 0) return;
    tcp_link *link;
    uid_t uid;
    fd = tcp_socket_prepare(fd, from.at.any.sa_family);
    if (fd < 0) continue;
    if (tcp_link_new(self, TCP_LINK_STRANGER, &link)) {
      (void)close(fd);
      continue;
    }
    link->fd = fd;
    link->small = 1;
    link->local = from.at.any.sa_family == AF_UNIX;
    if (self->gauge) self->gauge->opened(self, link);
    if (link->local)
      snprintf(link->name, sizeof link->name, "a peer at %.100s", self->address);
    else
      tcp_format(self, &from, link->name, sizeof link->name);
    if (stalest) tcp_turn_out(self, stalest);
    tcp_list_add(&self->strangers, &link->group);
    self->stranger_count++;
    if (link->local && !tcp_trusts(link, &uid))
      tcp_link_end(self, link, MLFAB_ERR_REFUSED, "is another user's process");
    else if ((!self->layer || tcp_session_begin(self, link, 1)) &&
             tcp_watch(self, link, TCP_WATCH_IN))
      tcp_link_fail(self, link, errno);
  }
}

/* --- connecting ------------------------------------------------------------------------------- */

static void tcp_opened(tcp_self *self, tcp_link *link) {
  mlfab__free(&self->env, link->dial, sizeof *link->dial);
  link->dial = NULL;
  tcp_group_leave(self, link);
  link->readable = link->session != NULL; /* it may have read ahead */
  link->state = TCP_LINK_OPEN;
  tcp_patience(link->fd, 0);
  if (self->gauge) self->gauge->opened(self, link);
  if (tcp_watch(self, link, TCP_WATCH_IN)) {
    link->state = TCP_LINK_CONNECTING;
    tcp_link_fail(self, link, errno);
    return;
  }
  tcp_ready(self, link);
}

/* Goes on with the layer's handshake: 1 when it is done. Else it waits for the socket, has dialled again, or has ended
 * the link. */
static int tcp_shake(tcp_self *self, tcp_link *link) {
  int out = 0, status = self->layer->shake(link->session, &out);
  if (status == 0) {
    link->shakes = 0;
    return 1;
  }
  link->readable = 0;
  if (status == MLFAB_ERR_AGAIN) {
    if (tcp_watch(self, link, TCP_WATCH_IN | (out ? TCP_WATCH_OUT : 0u)))
      tcp_link_fail(self, link, errno);
  } else if (status == MLFAB_ERR_REFUSED && link->state == TCP_LINK_SHAKING) {
    link->attempt++;
    link->dial->next--;
    tcp_group_leave(self, link);
    tcp_session_end(self, link);
    link->state = TCP_LINK_CONNECTING;
    tcp_dial_next(self, link, ECONNREFUSED);
  } else {
    tcp_link_end(self, link, status, self->layer->why(link->session));
  }
  return 0;
}

static void tcp_connected(tcp_self *self, tcp_link *link) {
  uid_t uid = geteuid();
  if (link->local && !tcp_trusts(link, &uid)) {
    tcp_link_end(self, link, MLFAB_ERR_REFUSED, "another user's process listens there");
    return;
  }
  link->roots = uid != geteuid();
  if (self->layer) {
    link->state = TCP_LINK_SHAKING;
    tcp_list_add(&self->shaking, &link->group);
    if (!tcp_session_begin(self, link, 0) || !tcp_shake(self, link)) return;
  }
  tcp_opened(self, link);
}

/* Tries the remaining addresses. `number`: errno of the last failure. */
static void tcp_dial_next(tcp_self *self, tcp_link *link, int number) {
  for (;; number = errno) {
    if (link->fd >= 0) {
      (void)tcp_watch(self, link, 0);
      (void)close(link->fd);
      link->fd = -1;
    }
    if (link->dial->next == link->dial->count) break;
    const tcp_endpoint *to = &link->dial->to[link->dial->next++];
    link->local = to->at.any.sa_family == AF_UNIX;
    link->fd = tcp_socket(to->at.any.sa_family);
    if (link->fd < 0) continue;
    tcp_patience(link->fd, TCP_USER_TIMEOUT_MS);
    if (!connect(link->fd, &to->at.any, to->bytes)) {
      tcp_connected(self, link);
      return;
    }
    if ((errno == EINPROGRESS || errno == EINTR) && !tcp_watch(self, link, TCP_WATCH_OUT)) return;
  }
  char tried[100], why[160];
  int named = link->asked_ns != 0;
  tcp_tried(link->dial, named, tried, sizeof tried);
  snprintf(why, sizeof why, "%.50s%s", mlfab__reason(number), tried);
  tcp_link_end(self, link, tcp_code_of(number), why);
}

/* Takes the result of a connect. Dialling an unused port of the ephemeral range can connect a socket to itself
 * (simultaneous open), which counts as refused. */
static void tcp_dial_answered(tcp_self *self, tcp_link *link) {
  int number = 0;
  socklen_t bytes = sizeof number;
  tcp_endpoint here, there;
  if (getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &number, &bytes)) number = errno;
  if (!number && (tcp_ends(link->fd, 0, &here) || tcp_ends(link->fd, 1, &there))) number = errno;
  if (!number && !link->local && !memcmp(&here, &there, sizeof here)) number = ECONNREFUSED;
  if (number)
    tcp_dial_next(self, link, number);
  else
    tcp_connected(self, link);
}

static int tcp_connect(void *opaque, const char *address, uint64_t token) {
  tcp_self *self = opaque;
  tcp_link *link = NULL;
  tcp_dial *dial = mlfab__alloc(&self->env, sizeof *dial);
  if (!dial) return MLFAB_ERR_MEMORY;
  int status = tcp_parse(self, address, dial), named = status > 0;
  if (status < 0) {
    mlfab__log(&self->env, MLFAB_LOG_WARN, "connect to %s: does not parse", address);
  } else if (!named && !tcp_keep_safe(self, dial)) {
    mlfab__log(&self->env, MLFAB_LOG_ERROR, TCP_INSECURE_TEXT, address);
    status = MLFAB_ERR_INSECURE;
  }
  if (status >= 0)
    status = tcp_link_new(self, named ? TCP_LINK_RESOLVING : TCP_LINK_CONNECTING, &link);
  if (status) {
    mlfab__free(&self->env, dial, sizeof *dial);
    return status;
  }
  for (uint32_t i = 1; i < self->slot_count; i++) {
    tcp_link *old = self->slots[i].link;
    if (old && old != link && token && old->token == token && !old->told_up)
      tcp_link_free(self, old);
  }
  link->dial = dial;
  link->token = token;
  snprintf(link->name, sizeof link->name, "%s", address);
  if (named) {
    link->asked_ns = self->env.hooks.clock(self->env.hooks.user);
    tcp_names(self);
  } else {
    tcp_dial_next(self, link, 0);
  }
  return 0;
}

static int tcp_reach(void *opaque, const char *address) {
  tcp_dial dial;
  return !tcp_read(opaque, address, &dial) && (dial.count || strtoul(dial.port, NULL, 10) > 0);
}

/* --- output ----------------------------------------------------------------------------------- */

static int tcp_out_low(const tcp_link *link) {
  return link->piece_count < TCP_PIECES / 2 && link->copied < TCP_OUT_BYTES / 2 &&
         link->sent_count < TCP_PIECES / 2;
}

/* Every borrowed piece may become a token in `sent`, so `sent` has room for twice as many. */
static int tcp_out_full(const tcp_link *link) {
  return link->piece_count + 2 > TCP_PIECES || link->sent_count >= TCP_SENT_TOKENS / 2 ||
         link->copied >= TCP_OUT_BYTES;
}

static void tcp_piece_add(tcp_link *link, const void *data, size_t bytes, uint64_t token,
                          tcp_buffer *owner) {
  tcp_piece *last =
      &link->pieces[(link->piece_at + link->piece_count + TCP_PIECES - 1) % TCP_PIECES];
  if (owner) link->copied += bytes;
  if (link->piece_count && owner && last->owner == owner && last->data + last->bytes == data) {
    last->bytes += bytes;
    return;
  }
  tcp_piece *piece = &link->pieces[(link->piece_at + link->piece_count++) % TCP_PIECES];
  piece->data = data;
  piece->bytes = bytes;
  piece->token = token;
  piece->owner = owner;
  if (owner) owner->refs++;
}

static void tcp_token_sent(tcp_link *link, uint64_t token) {
  if (token) link->sent[(link->sent_at + link->sent_count++) % TCP_SENT_TOKENS] = token;
}

static void tcp_out_advance(tcp_self *self, tcp_link *link, size_t bytes) {
  while (bytes) {
    tcp_piece *piece = &link->pieces[link->piece_at];
    size_t n = bytes < piece->bytes ? bytes : piece->bytes;
    piece->data += n;
    piece->bytes -= n;
    bytes -= n;
    if (piece->owner) link->copied -= n;
    if (piece->bytes) return;
    if (!piece->owner) tcp_token_sent(link, piece->token);
    tcp_buffer_put(self, &piece->owner);
    link->piece_at = (link->piece_at + 1) % TCP_PIECES;
    link->piece_count--;
  }
}

/* Returns as sendmsg does. */
static ssize_t tcp_put(const tcp_self *self, const tcp_link *link, struct iovec *iov,
                       uint32_t count) {
  struct msghdr message = {0};
  if (link->session) return self->layer->send(link->session, iov, (int)count);
  message.msg_iov = iov;
  message.msg_iovlen = count;
  return sendmsg(link->fd, &message, TCP_SEND_FLAGS);
}

/* Writes as much as possible. A failure is reported only after the input that is still there. */
static void tcp_write(tcp_self *self, tcp_link *link) {
  int full = 0;
  size_t moved = 0;
  tcp_list_remove(&link->dirty);
  while (link->piece_count && !full) {
    struct iovec iov[TCP_PIECES];
    size_t bytes = 0;
    for (uint32_t i = 0; i < link->piece_count; i++) {
      const tcp_piece *piece = &link->pieces[(link->piece_at + i) % TCP_PIECES];
      iov[i].iov_base = (void *)(uintptr_t)piece->data;
      iov[i].iov_len = piece->bytes;
      bytes += piece->bytes;
    }
    ssize_t n = tcp_put(self, link, iov, link->piece_count);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS && errno != ENOMEM) {
      link->write_failed = errno;
      tcp_pieces_drop(self, link);
      link->readable = 1;
      tcp_ready(self, link);
      break;
    }
    if (n > 0) tcp_out_advance(self, link, (size_t)n);
    if (n > 0) moved += (size_t)n;
    full = n < 0 || (size_t)n < bytes;
  }
  if (link->window) self->gauge->wrote(self, link, moved, full);
  if (!link->piece_count) tcp_buffer_put(self, &link->block);
  if (tcp_watch(self, link, TCP_WATCH_IN | (full ? TCP_WATCH_OUT : 0u)) && full) {
    link->write_failed = errno; /* no event would report writability */
    link->readable = 1;
    tcp_ready(self, link);
  }
  if (link->state == TCP_LINK_LINGER && !full) tcp_finish(self, link);
  if (link->sent_count || (link->refused && tcp_out_low(link))) tcp_ready(self, link);
}

/* Returns a buffer for `bytes` of contiguous copied output: the block, or a separate buffer if they are too many for a
 * block. NULL: out of memory. The caller gets a reference. */
static tcp_buffer *tcp_out_room(tcp_self *self, tcp_link *link, size_t bytes) {
  if (bytes > TCP_BLOCK_BYTES) return tcp_buffer_get(self, bytes);
  if (!link->block || link->block->used + bytes > TCP_BLOCK_BYTES) {
    tcp_buffer *block = tcp_buffer_get(self, TCP_BLOCK_BYTES);
    if (!block) return NULL;
    tcp_buffer_put(self, &link->block);
    link->block = block;
  }
  link->block->refs++;
  return link->block;
}

static void tcp_out_copy(tcp_link *link, tcp_buffer *owner, const void *data, size_t bytes) {
  uint8_t *to = tcp_payload(owner) + owner->used;
  memcpy(to, data, bytes);
  owner->used += bytes;
  tcp_piece_add(link, to, bytes, 0, owner);
}

static int tcp_send(void *opaque, uint32_t id, const void *head, uint32_t head_bytes,
                    const void *bulk, uint32_t bulk_bytes, uint64_t token) {
  tcp_self *self = opaque;
  tcp_link *link = tcp_find(self, id);
  if (!link || link->state != TCP_LINK_OPEN) return MLFAB_ERR_PEER_CLOSED;
  int small = bulk_bytes && bulk_bytes <= TCP_COPY_BYTES, copy = bulk_bytes && (small || !token);
  if (tcp_out_full(link) && link->dirty.next) tcp_write(self, link);
  if (link->write_failed) return MLFAB_ERR_PEER_CLOSED;
  if (tcp_out_full(link)) {
    link->refused = 1;
    return MLFAB_ERR_AGAIN;
  }
  tcp_buffer *own = NULL, *block = tcp_out_room(self, link, head_bytes + (small ? bulk_bytes : 0u));
  if (block && copy && !small) {
    own = tcp_buffer_get(self, bulk_bytes);
    if (!own) tcp_buffer_put(self, &block);
  }
  if (!block) return MLFAB_ERR_MEMORY;
  tcp_out_copy(link, block, head, head_bytes);
  if (small) tcp_out_copy(link, block, bulk, bulk_bytes);
  if (own) tcp_out_copy(link, own, bulk, bulk_bytes);
  if (bulk_bytes && !copy) tcp_piece_add(link, bulk, bulk_bytes, token, NULL);
  if (!bulk_bytes || copy) {
    tcp_token_sent(link, token);
    if (token) tcp_ready(self, link);
  }
  tcp_buffer_put(self, &block);
  tcp_buffer_put(self, &own);
  /* While the socket is full, EPOLLOUT triggers the write. */
  if (link->interest & TCP_WATCH_OUT) return 0;
  tcp_list_add(&self->dirty, &link->dirty);
  if (link->piece_count >= TCP_GATHER_PIECES || link->copied >= TCP_OUT_BYTES / 2)
    tcp_write(self, link);
  return 0;
}

static void tcp_flush(void *opaque) {
  tcp_self *self = opaque;
  while (self->dirty.next != &self->dirty) tcp_write(self, TCP_LINK_OF(self->dirty.next, dirty));
}

/* Copies the borrowed bytes with this token; 0: all. Several sends may have the same token: the chunks of an update do.
 * Errors: MEMORY. */
static int tcp_pieces_detach(tcp_self *self, tcp_link *link, uint64_t token) {
  for (uint32_t i = 0; i < link->piece_count; i++) {
    tcp_piece *piece = &link->pieces[(link->piece_at + i) % TCP_PIECES];
    if (piece->owner || (token && piece->token != token)) continue;
    tcp_buffer *own = tcp_buffer_get(self, piece->bytes);
    if (!own) return MLFAB_ERR_MEMORY;
    memcpy(tcp_payload(own), piece->data, piece->bytes);
    piece->data = tcp_payload(own);
    piece->owner = own;
    link->copied += piece->bytes;
  }
  return 0;
}

static int tcp_detach(void *opaque, uint32_t id, uint64_t token) {
  tcp_link *link = tcp_find(opaque, id);
  return link && token ? tcp_pieces_detach(opaque, link, token) : 0;
}

/* Later polls write the accepted output that the socket does not take at once, from copies. If memory for a copy is
 * short, the link ends here. */
static void tcp_disconnect(void *opaque, uint32_t id) {
  tcp_self *self = opaque;
  tcp_link *link = tcp_find(self, id);
  if (!link) return;
  if (link->state == TCP_LINK_OPEN && !link->write_failed) tcp_write(self, link);
  if (link->state != TCP_LINK_OPEN || link->write_failed || tcp_pieces_detach(self, link, 0)) {
    tcp_link_free(self, link);
    return;
  }
  tcp_input_drop(self, link);
  link->sent_count = link->refused = 0;
  link->state = TCP_LINK_LINGER;
  tcp_patience(link->fd, TCP_USER_TIMEOUT_MS);
  if (!link->piece_count) tcp_finish(self, link);
  if (self->lingering_count == TCP_WAITING_ROOM)
    tcp_link_free(self, TCP_LINK_OF(self->lingering.next, group));
  tcp_list_add(&self->lingering, &link->group);
  self->lingering_count++;
  link->readable = 1;
  tcp_ready(self, link);
}

/* --- input ------------------------------------------------------------------------------------ */

static void tcp_stage_shrink(tcp_self *self, tcp_link *link) {
  if (link->stage_at != link->stage_end) return;
  tcp_buffer_put(self, &link->stage);
  link->stage_at = link->stage_end = 0;
}

/* The address for byte `got` of the frame. *room_p: the number of bytes that fit there. */
static uint8_t *tcp_frame_at(const tcp_link *link, size_t *room_p) {
  uint8_t *base = tcp_payload(link->frame);
  if (link->got < link->head_bytes) {
    *room_p = link->head_bytes - link->got;
    return base + link->got;
  }
  size_t in_bulk = link->got - link->head_bytes;
  *room_p = link->bulk_bytes - in_bulk;
  return base + TCP_ROUND64(link->head_bytes) + in_bulk;
}

/* Sends a bare header of our protocol to a peer with another protocol, so that it, too, can report which side is
 * older. */
static void tcp_answer_protocol(const tcp_self *self, const tcp_link *link) {
  uint8_t head[MLFAB_HEADER_BYTES];
  mlfab__header header = {0};
  struct iovec iov = {head, sizeof head};
  header.type = MLFAB__HEARTBEAT;
  mlfab__wire_seal(head, &header, NULL);
  (void)!tcp_put(self, link, &iov, 1);
}

/* Without a layer: do the received bytes begin like a record of TLS? Then an alert of TLS ("protocol version") tells
 * the caller that there is no TLS here. */
static int tcp_is_tls(const tcp_self *self, const tcp_link *link) {
  static const uint8_t alert[] = {21, 3, 3, 0, 2, 2, 70};
  if (self->layer || link->frame || link->stage_end - link->stage_at < sizeof alert) return 0;
  const uint8_t *at = tcp_payload(link->stage) + link->stage_at;
  if (at[0] < 20 || at[0] > 23 || at[1] != 3 || at[2] > 4) return 0;
  if (link->state == TCP_LINK_STRANGER) (void)!send(link->fd, alert, sizeof alert, TCP_SEND_FLAGS);
  return 1;
}

/* Do the staged bytes begin unlike any frame? Enough of them for tcp_is_tls, too. */
static int tcp_is_foreign(const tcp_link *link) {
  static const uint8_t magic[4] = {MLFAB__MAGIC & 0xff, MLFAB__MAGIC >> 8 & 0xff,
                                   MLFAB__MAGIC >> 16 & 0xff, MLFAB__MAGIC >> 24};
  return !link->frame && link->stage && link->stage_end - link->stage_at >= 2 * sizeof magic &&
         memcmp(tcp_payload(link->stage) + link->stage_at, magic, sizeof magic) != 0;
}

/* The text for a link to another program, with that program's own words. */
static const char *tcp_foreign(const tcp_link *link, char text[128]) {
  enum { QUOTED = 40 };
  const uint8_t *at = tcp_payload(link->stage) + link->stage_at;
  size_t bytes = mlfab__min(link->stage_end - link->stage_at, QUOTED);
  size_t n = (size_t)snprintf(text, 128, "it is another program: it says \"");
  for (size_t i = 0; i < bytes && at[i] != '\r' && at[i] != '\n'; i++)
    text[n++] = (char)(at[i] >= ' ' && at[i] < 127 ? at[i] : '.');
  text[n++] = '"';
  text[n] = 0;
  return text;
}

/* Ends the input: a frame does not parse, or the peer has closed. */
static void tcp_input_end(tcp_self *self, tcp_link *link, int code) {
  char text[128];
  if (tcp_is_tls(self, link))
    tcp_link_end(self, link, MLFAB_ERR_JOB,
                 "it speaks TLS, and this process does not (config.transport)");
  else if (tcp_is_foreign(link))
    tcp_link_end(self, link, code, tcp_foreign(link, text));
  else
    tcp_link_end(self, link, code, mlfab_error_text(code));
}

/* Consumes the stage's bytes. Returns 1 if a frame is complete and valid, 0 if it needs more bytes, or an error. */
static int tcp_frame_advance(tcp_self *self, tcp_link *link) {
  size_t staged = link->stage_end - link->stage_at;
  int begins = !link->frame;
  if (begins) {
    uint64_t header[MLFAB_HEADER_BYTES / 8];
    if (tcp_is_foreign(link)) return MLFAB_ERR_FRAME; /* it may be shorter than a header */
    if (staged < sizeof header) return 0;
    memcpy(header, tcp_payload(link->stage) + link->stage_at, sizeof header);
    int status = mlfab_frame_check(header, &link->head_bytes, &link->bulk_bytes);
    int foreign = status == MLFAB_ERR_PROTOCOL_OLDER || status == MLFAB_ERR_PROTOCOL_NEWER;
    if (foreign && link->state == TCP_LINK_STRANGER) tcp_answer_protocol(self, link);
    if (status) return status;
    if (link->small && (uint64_t)link->head_bytes + link->bulk_bytes > TCP_FIRST_BYTES)
      return MLFAB_ERR_LIMIT;
    link->frame = tcp_buffer_get(self, TCP_ROUND64(link->head_bytes) + link->bulk_bytes);
    if (!link->frame) return MLFAB_ERR_MEMORY;
    link->got = 0;
    if (link->bulk_bytes >= TCP_LARGE_BYTES)
      link->large = 8;
    else if (link->large)
      link->large--;
  }
  size_t all = (size_t)link->head_bytes + link->bulk_bytes;
  while (staged && link->got < all) {
    size_t room;
    uint8_t *to = tcp_frame_at(link, &room);
    size_t n = staged < room ? staged : room;
    memcpy(to, tcp_payload(link->stage) + link->stage_at, n);
    link->stage_at += n;
    link->got += n;
    staged -= n;
  }
  tcp_stage_shrink(self, link);
  if (link->got < all) {
    if (begins && self->keyed && !self->layer && link->state == TCP_LINK_OPEN)
      link->asks = TCP_ASKS_FRAME;
    return 0;
  }
  const uint8_t *head = tcp_payload(link->frame);
  int status = mlfab_frame_verify(head, link->head_bytes, head + TCP_ROUND64(link->head_bytes),
                                  link->bulk_bytes);
  return status ? status : 1;
}

/* Returns as recvmsg does. */
static ssize_t tcp_take(const tcp_self *self, const tcp_link *link, struct iovec *iov,
                        size_t count) {
  struct msghdr message = {0};
  if (link->session) return self->layer->receive(link->session, iov, (int)count);
  if (count == 1) return recv(link->fd, iov->iov_base, iov->iov_len, MSG_DONTWAIT);
  message.msg_iov = iov;
  message.msg_iovlen = count;
  return recvmsg(link->fd, &message, MSG_DONTWAIT);
}

/* Reads the rest of the frame, and some bytes behind it, in one call: many while frames are small, few while they are
 * large, because these are copied. Returns as recv does, or a negative errno; fewer bytes than requested mean that the
 * socket is empty. */
static ssize_t tcp_fill(tcp_self *self, tcp_link *link, int *drained_p) {
  struct iovec iov[3];
  size_t count = 0, in_frame = 0;
  if (link->frame) {
    size_t got = link->got, all = (size_t)link->head_bytes + link->bulk_bytes;
    for (; link->got < all; link->got += iov[count++].iov_len)
      iov[count].iov_base = tcp_frame_at(link, &iov[count].iov_len);
    link->got = got;
    in_frame = all - got;
  }
  if (!link->stage && !(link->stage = tcp_buffer_get(self, TCP_BLOCK_BYTES))) return -ENOMEM;
  uint8_t *stage = tcp_payload(link->stage);
  size_t kept = link->stage_end - link->stage_at; /* less than a header */
  if (kept && link->stage_at) memmove(stage, stage + link->stage_at, kept);
  link->stage_at = 0;
  link->stage_end = kept;
  size_t gulp = link->large ? TCP_GULP_BYTES : TCP_BLOCK_BYTES - kept;
  iov[count].iov_base = stage + kept;
  iov[count++].iov_len = gulp;
  ssize_t n;
  do n = tcp_take(self, link, iov, count);
  while (n < 0 && errno == EINTR);
  if (n < 0) n = errno == EWOULDBLOCK ? -EAGAIN : -errno;
  if (n > 0) {
    size_t direct = (size_t)n < in_frame ? (size_t)n : in_frame;
    link->fed = 1;
    if (link->window) self->gauge->got(self, link, (size_t)n);
    link->got += direct;
    link->stage_end += (size_t)n - direct;
    /* A layer that has failed since reports it in the next call. */
    *drained_p =
        (size_t)n < in_frame + gulp && !(link->session && *self->layer->why(link->session));
  }
  tcp_stage_shrink(self, link);
  return n;
}

/* For an incomplete frame, of which `got` bytes had come before the last read: did that read begin like a header? */
static void tcp_look_midst(tcp_self *self, tcp_link *link, size_t got) {
  uint8_t *to = (uint8_t *)self->midst;
  uint32_t head_bytes, bulk_bytes;
  size_t now = link->got, left = MLFAB_HEADER_BYTES;
  if (!self->keyed || self->layer || link->state != TCP_LINK_OPEN || now - got < left) return;
  for (link->got = got; left > 0;) {
    size_t room, n;
    const uint8_t *at = tcp_frame_at(link, &room);
    n = mlfab__min(room, left);
    memcpy(to, at, n);
    to += n;
    left -= n;
    link->got += n;
  }
  link->got = now;
  if (mlfab_frame_check(self->midst, &head_bytes, &bulk_bytes) == 0) link->asks = TCP_ASKS_MIDST;
}

/* Reads until a frame is complete or the socket is empty; ends the link on errors. */
static void tcp_receive(tcp_self *self, tcp_link *link) {
  if (link->shakes && !tcp_shake(self, link)) return;
  for (;;) {
    int status = tcp_frame_advance(self, link);
    if (status > 0) {
      link->whole = 1;
      link->roots = 0;
    }
    if (status < 0) tcp_input_end(self, link, status);
    if (status || link->asks) return;
    if (!link->readable) break;
    int drained = 0, midst = link->frame != NULL;
    size_t got = link->got;
    ssize_t n = tcp_fill(self, link, &drained);
    int number = n > 0 ? 0 : n < 0 && n != -EAGAIN ? (int)-n : link->write_failed;
    if (number)
      tcp_link_fail(self, link, number);
    else if (n == 0)
      tcp_input_end(self, link, MLFAB_ERR_PEER_CLOSED);
    if (number || n == 0) return;
    if (n < 0 || drained) link->readable = 0;
    if (n < 0) break;
    if (midst && link->got < (size_t)link->head_bytes + link->bulk_bytes)
      tcp_look_midst(self, link, got);
  }
  if (link->window) self->gauge->empty(self, link);
}

/* Discards the input of a link that we have closed, until its end. */
static void tcp_linger(tcp_self *self, tcp_link *link) {
  for (int i = 0; i < 16; i++) {
    int drained = 0;
    ssize_t n = tcp_fill(self, link, &drained);
    tcp_input_drop(self, link);
    if (n > 0) continue;
    if (n != -EAGAIN || link->write_failed) tcp_link_free(self, link);
    return;
  }
}

/* --- events ----------------------------------------------------------------------------------- */

/* Makes one pass over all sockets: notes readable sockets, writes to writable sockets. */
static void tcp_noted(tcp_self *self, uint32_t slot, int in, int out) {
  if (slot == 0) {
    tcp_accept(self);
    return;
  }
  tcp_link *link = slot < self->slot_count ? self->slots[slot].link : NULL;
  if (!link || link->fd < 0) return;
  if (link->state == TCP_LINK_CONNECTING) {
    tcp_dial_answered(self, link);
    return;
  }
  if (link->state == TCP_LINK_SHAKING) {
    if (tcp_shake(self, link)) tcp_opened(self, link);
    return;
  }
  if (out && link->shakes)
    in = 1;
  else if (out)
    tcp_write(self, link);
  if (in) {
    link->readable = 1;
    tcp_ready(self, link);
  }
}

/* Ends the links of this list whose handshake takes too long, except links that may have been waiting for us. */
static void tcp_overdue(tcp_self *self, tcp_node *list, const char *why) {
  uint64_t now = self->env.hooks.clock(self->env.hooks.user);
  for (tcp_node *at = list->next, *next; at != list; at = next) {
    tcp_link *link = TCP_LINK_OF(at, group);
    next = at->next;
    if (!link->readable && !link->whole && now - link->since_ns >= TCP_SHAKE_NS)
      tcp_link_end(self, link, MLFAB_ERR_TIMEOUT, why);
  }
}

static void tcp_look(tcp_self *self) {
  self->turns = 0;
  if (atomic_load_explicit(&self->listener_paused, memory_order_relaxed) &&
      self->env.hooks.clock(self->env.hooks.user) - self->paused_ns >= TCP_PAUSE_NS)
    tcp_listener_resume(self);
  if (self->names || self->question) tcp_names(self);
#if MLFAB_TCP_EPOLL
  struct epoll_event events[64];
  int n = epoll_wait(self->poller, events, MLFAB__COUNT(events), 0);
  for (int i = 0; i < n; i++)
    tcp_noted(self, events[i].data.u32, (events[i].events & ~(uint32_t)EPOLLOUT) != 0,
              (events[i].events & EPOLLOUT) != 0);
#else
  struct pollfd polled[TCP_SLOTS_LEAST];
  for (uint32_t first = 0; first < self->slot_count; first += TCP_SLOTS_LEAST) {
    for (uint32_t i = 0; i < TCP_SLOTS_LEAST; i++) {
      const tcp_link *link = self->slots[first + i].link;
      polled[i] = (struct pollfd){.fd = -1};
      if (link && link->interest) polled[i] = (struct pollfd){link->fd, (short)link->interest, 0};
    }
    if (!first && !atomic_load_explicit(&self->listener_paused, memory_order_relaxed))
      polled[0] = (struct pollfd){self->listener, POLLIN, 0};
    (void)poll(polled, TCP_SLOTS_LEAST, 0);
    for (uint32_t i = 0; i < TCP_SLOTS_LEAST; i++) {
      int events = polled[i].revents;
      if (events) tcp_noted(self, first + i, (events & ~POLLOUT) != 0, (events & POLLOUT) != 0);
    }
  }
#endif
  if (!self->layer) return;
  tcp_overdue(self, &self->shaking, "it did not answer the handshake in time");
  tcp_overdue(self, &self->strangers, "its handshake, or its first frame, did not come in time");
}

/* Reports how a link ended, and frees it. */
static int tcp_tell_end(tcp_self *self, tcp_link *link, mlfab_io_event *event) {
  int called = !link->told_up && !link->small; /* a stranger's frames are small */
  event->kind = link->told_up || called ? MLFAB_IO_DOWN : MLFAB_IO_REFUSED;
  event->link = link->told_up ? link->id : 0;
  event->token = called ? link->token : 0;
  event->code = link->code;
  snprintf(self->text, sizeof self->text, "%s%s: %s", called ? "connect to " : "", link->name,
           link->why);
  event->text = self->text;
  tcp_link_free(self, link);
  return 1;
}

/* The address at which the listener is reached by the route of this call, in self->text; or NULL. */
static const char *tcp_reached_at(tcp_self *self, const tcp_link *link) {
  tcp_endpoint here, listens;
  if (!self->anywhere || !link->token || tcp_ends(self->listener, 0, &listens) ||
      tcp_ends(link->fd, 0, &here) || tcp_is_loopback(&here))
    return NULL;
  int mapped = here.at.any.sa_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&here.at.v6.sin6_addr);
  if (listens.at.any.sa_family == AF_INET && here.at.any.sa_family != AF_INET) return NULL;
  if (mapped || (here.at.any.sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&here.at.v6.sin6_addr)))
    return NULL;
  *tcp_port(&here) = *tcp_port(&listens);
  self->place = here;
  tcp_format(self, &here, self->text, sizeof self->text);
  return self->text;
}

/* Each end of a Unix socket has asked the kernel for the user of the other end (tcp_trusts). */
static int tcp_tell_up(tcp_self *self, tcp_link *link, mlfab_io_event *event) {
  if (link->local) event->caps = MLFAB_CAP_VOUCHED;
  event->text = tcp_reached_at(self, link);
  link->told_up = 1;
  event->kind = MLFAB_IO_UP;
  event->token = link->token;
  return 1;
}

static int tcp_tell_frame(tcp_self *self, tcp_link *link, mlfab_io_event *event) {
  event->kind = MLFAB_IO_FRAME;
  event->head = tcp_payload(link->frame);
  event->head_bytes = link->head_bytes;
  event->bulk_bytes = link->bulk_bytes;
  event->bulk = link->bulk_bytes ? tcp_payload(link->frame) + TCP_ROUND64(link->head_bytes) : NULL;
  event->opaque = link->frame; /* with its reference */
  link->frame = NULL;
  link->whole = 0;
  self->hot = link;
  return 1;
}

static int tcp_tell_head(const tcp_self *self, tcp_link *link, mlfab_io_event *event) {
  int midst = link->asks == TCP_ASKS_MIDST;
  event->kind = MLFAB_IO_HEAD;
  event->head = midst ? (const void *)self->midst : tcp_payload(link->frame);
  event->head_bytes = MLFAB_HEADER_BYTES;
  event->token = (uint64_t)midst;
  link->asks = 0;
  return 1;
}

/* Takes the next event of this link: 1, or 0. */
static int tcp_link_event(tcp_self *self, tcp_link *link, mlfab_io_event *event) {
  memset(event, 0, sizeof *event);
  event->link = link->id;
  if (link->state == TCP_LINK_LINGER) return tcp_linger(self, link), 0;
  if (link->state == TCP_LINK_OPEN) {
    if (!link->told_up) return tcp_tell_up(self, link, event);
    if (link->sent_count) {
      event->kind = MLFAB_IO_SENT;
      event->token = link->sent[link->sent_at];
      link->sent_at = (link->sent_at + 1) % TCP_SENT_TOKENS;
      link->sent_count--;
      return 1;
    }
    if (link->refused && tcp_out_low(link)) {
      link->refused = 0;
      event->kind = MLFAB_IO_WRITABLE;
      return 1;
    }
  }
  if ((link->state == TCP_LINK_OPEN || link->state == TCP_LINK_STRANGER) && !link->whole)
    tcp_receive(self, link);
  if (link->state == TCP_LINK_ENDED) return tcp_tell_end(self, link, event);
  if (link->asks) return tcp_tell_head(self, link, event);
  if (!link->whole) return 0;
  if (link->state == TCP_LINK_OPEN) return tcp_tell_frame(self, link, event);
  mlfab__header first;
  mlfab__wire_open(tcp_payload(link->frame), &first);
  link->small = first.type == MLFAB__JOIN;
  tcp_group_leave(self, link);
  link->state = TCP_LINK_OPEN;
  return tcp_tell_up(self, link, event);
}

static int tcp_poll(void *opaque, mlfab_io_event *event) {
  tcp_self *self = opaque;
  if (self->turns >= TCP_TURNS) {
    tcp_look(self);
  } else if (self->ready.next == &self->ready && self->hot) {
    self->hot->readable = 1;
    tcp_ready(self, self->hot);
  }
  for (int looked = 0;; looked = 1) {
    while (self->ready.next != &self->ready) {
      tcp_link *link = TCP_LINK_OF(self->ready.next, ready);
      tcp_unready(self, link);
      if (!tcp_link_event(self, link, event)) continue;
      self->turns++;
      link = tcp_find(self, event->link);
      if (link) tcp_ready(self, link); /* to the end of the list: it may have more */
      return 1;
    }
    if (looked) return 0;
    /* With one link and no input, the pass over all sockets is skipped in most polls; wait still returns
     * for everything. */
    if (self->links == 1 && self->hot && ++self->idle % TCP_LOOK_EVERY != 0) return 0;
    tcp_look(self);
  }
}

static void tcp_release(void *opaque, const mlfab_io_event *event) {
  tcp_buffer *buffer = event->opaque;
  tcp_buffer_put(opaque, &buffer);
}

/* --- sleeping --------------------------------------------------------------------------------- */

static void tcp_wait(void *opaque, uint64_t timeout_ns) {
  tcp_self *self = opaque;
  if (!timeout_ns || atomic_load_explicit(&self->pending, memory_order_relaxed)) return;
  if (atomic_load_explicit(&self->listener_paused, memory_order_relaxed))
    timeout_ns = mlfab__min(timeout_ns, TCP_PAUSE_NS);
#if MLFAB_TCP_EPOLL
  struct epoll_event events[16];
  int n = -1;
#if defined(SYS_epoll_pwait2) && defined(__LP64__)
  struct timespec timeout;
  timeout.tv_sec = (time_t)mlfab__min(timeout_ns / 1000000000u, INT_MAX);
  timeout.tv_nsec = (long)(timeout_ns % 1000000000u);
  errno = EINTR;
  if (!atomic_load_explicit(&self->coarse, memory_order_relaxed))
    n = (int)syscall(SYS_epoll_pwait2, self->poller, events, (int)MLFAB__COUNT(events), &timeout,
                     NULL, (size_t)0);
  if (n < 0 && errno != EINTR) atomic_store_explicit(&self->coarse, 1, memory_order_relaxed);
  if (n < 0 && atomic_load_explicit(&self->coarse, memory_order_relaxed))
#endif
    n = epoll_wait(self->poller, events, MLFAB__COUNT(events), tcp_milliseconds(timeout_ns));
  for (int i = 0; i < n; i++)
    if (events[i].data.u32 == TCP_SLOTS) tcp_wake_drain(self);
#else
  struct pollfd entry = {.fd = self->wake_read, .events = POLLIN};
  if (poll(&entry, 1, tcp_milliseconds(mlfab__min(timeout_ns, 1000000u))) > 0) tcp_wake_drain(self);
#endif
}

static void tcp_wake(void *opaque) {
  tcp_self *self = opaque;
  uint64_t one = 1;
  /* A full pipe wakes the reader too. */
  if (write(self->wake_write, &one, sizeof one) < 0) return;
}

static int tcp_fd(void *opaque) { return ((const tcp_self *)opaque)->poller; }

static int tcp_arm(void *opaque, int on) {
  tcp_self *self = opaque;
  if (!on) tcp_wake_drain(self);
  self->idle =
      TCP_LOOK_EVERY - 1; /* a program that slept on the descriptor needs a pass in its next poll */
  return self->ready.next != &self->ready;
}

/* --- probing ---------------------------------------------------------------------------------- */

/* Reads the kernel's struct tcp_info: 1, or 0 on a system that has none. */
static int tcp_kernel_info(int fd, uint8_t info[TCP_INFO_PROBE_WANTED]) {
#if defined(__linux__) && defined(TCP_INFO)
  socklen_t room = TCP_INFO_PROBE_WANTED;
  return !getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &room) && room == TCP_INFO_PROBE_WANTED;
#else
  return (void)fd, (void)info, 0;
#endif
}

/* AGAIN if retransmitted data is unanswered: an acknowledgement older than the last transmission does not answer it.
 * The kernel knows the connection's round trip time, so its timer tells when an answer is due. While the peer answers,
 * a closed window (its process is not reading) is ignored. */
static int tcp_probe_network(int fd) {
  uint8_t info[TCP_INFO_PROBE_WANTED];
  if (!tcp_kernel_info(fd, info) ||
      !tcp_info_number(info + TCP_INFO_SND_MSS, 4)) /* a system that does not fill the structure */
    return MLFAB_ERR_UNSUPPORTED;
  int newer =
      tcp_info_number(info + TCP_INFO_LAST_ACK, 4) <= tcp_info_number(info + TCP_INFO_LAST_SENT, 4);
  return info[TCP_INFO_PROBES] || (info[TCP_INFO_RETRANSMITS] && !newer) ? MLFAB_ERR_AGAIN : 0;
}

/* Returns 1: sent data are not acknowledged, though repeated; 2: data come; 3: both; 0: neither, or unknown. */
static unsigned tcp_look_at_path(const tcp_link *link) {
  enum {
    REPEATED = 4,
    FRESH_MS = 1000
  }; /* repeated for 3 s: data come that are newer than the loss */
  uint8_t info[TCP_INFO_PROBE_WANTED];
  if (!link || link->state != TCP_LINK_OPEN || link->local || !tcp_kernel_info(link->fd, info))
    return 0;
  unsigned lost =
      info[TCP_INFO_RETRANSMITS] >= REPEATED && tcp_info_number(info + TCP_INFO_UNACKED, 4);
  return lost | (tcp_info_number(info + TCP_INFO_LAST_RECV, 4) < FRESH_MS ? 2 : 0);
}

/* An open Unix socket is enough, except if the peer's process has died and only a child of it holds the socket. */
static int tcp_probe_local(const tcp_link *link) {
  return link->pid > 0 && kill(link->pid, 0) && errno == ESRCH ? MLFAB_ERR_AGAIN : 0;
}

static int tcp_probe(void *opaque, uint32_t id) {
  tcp_link *link = tcp_find(opaque, id);
  if (!link || link->state != TCP_LINK_OPEN || link->write_failed) return MLFAB_ERR_AGAIN;
  int fed = link->fed && (link->frame || link->stage);
  link->fed = 0;
  if (fed) return 1;
  return link->local ? tcp_probe_local(link) : tcp_probe_network(link->fd);
}

/* Detects paths that lose large packets: a link gets no data through to a host from which data come. */
static int tcp_trouble(void *opaque, char *text, size_t room) {
  const tcp_self *self = opaque;
  tcp_endpoint there, other;
  for (uint32_t i = 0; i < self->slot_count; i++) {
    const tcp_link *lost = self->slots[i].link;
    if (!(tcp_look_at_path(lost) & 1) || tcp_ends(lost->fd, 1, &there)) continue;
    for (uint32_t k = 0; k < self->slot_count; k++) {
      const tcp_link *link = self->slots[k].link;
      if (!(tcp_look_at_path(link) & 2) || tcp_ends(link->fd, 1, &other) ||
          !tcp_same_host(&there, &other))
        continue;
      snprintf(
          text, room,
          "small packets pass on the path to %.60s, and large ones are lost: compare the MTU of "
          "all interfaces on it",
          lost->name);
      return 1;
    }
  }
  return 0;
}

/* --- open and close --------------------------------------------------------------------------- */

/* In a forked child the descriptors refer to the parent's connections: a shutdown or a change of the epoll
 * set would affect these. */
static void tcp_disown(tcp_self *self) {
  for (uint32_t i = 1; i < self->slot_count; i++) {
    tcp_link *link = self->slots[i].link;
    if (!link || link->fd < 0) continue;
    (void)close(link->fd);
    link->fd = -1;
  }
  self->path[0] = 0;
}

static void tcp_close(void *opaque) {
  tcp_self *self = opaque;
  struct stat info;
  if (self->pid != getpid())
    tcp_disown(self);
  else
    tcp_unask(self); /* a child has no thread that could answer or release the lock */
  for (uint32_t i = 1; i < self->slot_count; i++)
    if (self->slots[i].link) tcp_link_free(self, self->slots[i].link);
  if (self->gauge) self->gauge->closed(self, NULL);
  if (self->listener >= 0) (void)close(self->listener);
  if (self->path[0] && !lstat(self->path, &info) && info.st_dev == self->path_device &&
      info.st_ino == self->path_inode)
    (void)unlink(self->path);
  if (self->wake_read >= 0) (void)close(self->wake_read);
  if (self->wake_write >= 0 && self->wake_write != self->wake_read) (void)close(self->wake_write);
  if (self->poller >= 0) (void)close(self->poller);
  if (self->layer) self->layer->close(self->layer_user);
  while (self->buffers.next != &self->buffers)
    tcp_buffer_free(self, (tcp_buffer *)(void *)self->buffers.next);
  mlfab__free(&self->env, self->slots, self->slot_count * sizeof *self->slots);
  mlfab__env env = self->env;
  mlfab__free(&env, self, sizeof *self);
}

static int tcp_open(const mlfab_transport_options *options, void **self_p, char *address) {
  mlfab__env env;
  int status = mlfab__env_init(&env, options->env);
  if (status) return status;
  tcp_self *self = mlfab__alloc(&env, sizeof *self);
  if (!self) return MLFAB__FAIL(options->error, MLFAB_ERR_MEMORY, "out of memory");
  self->env = env;
  self->pid = getpid();
  self->allow_insecure = options->allow_insecure;
  self->keyed = MLFAB__HAS(options, mlfab_transport_options, keyed) && options->keyed;
  if (MLFAB__HAS(options, mlfab_transport_options, layer_user)) self->layer = options->layer;
  if (self->layer) self->layer_user = options->layer_user;
  self->poller = self->wake_read = self->wake_write = self->listener = -1;
  tcp_node *lists[] = {&self->ready,     &self->dirty,     &self->shaking,
                       &self->strangers, &self->lingering, &self->buffers};
  for (size_t i = 0; i < MLFAB__COUNT(lists); i++) lists[i]->next = lists[i]->prev = lists[i];
  status = tcp_slots_grow(self);
  if (status)
    MLFAB__FAIL(options->error, status, "out of memory");
  else if (tcp_poller_open(self))
    status =
        MLFAB__FAIL(options->error, MLFAB_ERR_IO, "watching sockets: %s", mlfab__reason(errno));
  else
    status = tcp_listen(self, options);
  if (status) {
    self->layer = NULL; /* it still belongs to the caller */
    tcp_close(self);
    return status;
  }
  memcpy(address, self->address, sizeof self->address);
  *self_p = self;
  return 0;
}

MLFAB_API const mlfab_transport *mlfab_transport_tcp(void) {
  static const mlfab_transport table = {.size = sizeof table,
                                        .abi = MLFAB_TRANSPORT_ABI,
                                        .name = "tcp",
                                        .caps = MLFAB_CAP_CHECKED | MLFAB_CAP_PROBE,
                                        .open = tcp_open,
                                        .close = tcp_close,
                                        .reach = tcp_reach,
                                        .connect = tcp_connect,
                                        .disconnect = tcp_disconnect,
                                        .send = tcp_send,
                                        .flush = tcp_flush,
                                        .poll = tcp_poll,
                                        .release = tcp_release,
                                        .detach = tcp_detach,
                                        .wait = tcp_wait,
                                        .wake = tcp_wake,
                                        .fd = tcp_fd,
                                        .arm = tcp_arm,
                                        .measure = mlfab__tcp_measure,
                                        .probe = tcp_probe,
                                        .trouble = tcp_trouble};
  return &table;
}

#undef TCP_SEND_FLAGS
#undef TCP_SOCK_FLAGS
#undef TCP_BUFFER_HEADER
#undef TCP_ROUND64
#undef TCP_LINK_OF
#undef TCP_INSECURE_TEXT

#else

MLFAB_API const mlfab_transport *mlfab_transport_tcp(void) { return NULL; }

#endif
