/* tcp_measure.c - measures this host's network for the scheduler: rates of links and of the interface.
 *
 * Measuring begins with the first call of measure. It covers the links that leave this host; for a node
 * that listens at loopback only, all links. Links without traffic are ignored, since one idle peer would
 * otherwise look like a slow network. The outgoing rate comes from the kernel (TCP_INFO). The incoming rate
 * is timed here: a link awaits bytes from the time its socket was found empty inside a large frame until it
 * is found empty elsewhere. All bytes that arrive meanwhile, on any link, show the rate at which this host can receive,
 * or its peers send. */
#include "tcp.h"

#if MLFAB_WITH_TCP

enum {
  TCP_UNSENT_BYTES = 128 << 10,
  TCP_LOAD_BYTES = 1 << 20,    /* bytes in a window that suffice to compute a rate */
  TCP_LOAD_NS = 100000000,     /* time in a window that suffices too */
  TCP_LITTLE_BYTES = 4 << 10,  /* minimum bytes of a link with traffic */
  TCP_INFO_LIMITED = 7,        /* a byte with one bit: the application limited the last sample */
  TCP_INFO_ACKED = 120,        /* u64, bytes */
  TCP_INFO_NOTSENT = 144,      /* u32, unsent bytes in the kernel */
  TCP_INFO_DELIVERY = 160,     /* u64, bytes a second */
  TCP_INFO_BUSY = 168,         /* u64, microseconds with data to send */
  TCP_INFO_RWND_LIMITED = 176, /* u64, microseconds limited by the peer's window */
  TCP_INFO_WANTED = 184
};

/* A link's measurements since the last measure. */
typedef struct tcp_window {
  int shallow;                /* its unsent bytes in the kernel are limited */
  uint8_t had_room, had_none; /* a write took all bytes; a write did not */
  uint64_t moved_in, moved_out;
  uint64_t awaits_ns, awaits_bytes; /* awaiting since, and bytes_in at that time; 0: not awaiting */
  uint64_t awaited_ns, awaited_bytes;
  uint64_t acked, busy_us, stalled_us; /* last values of the kernel */
} tcp_window;

typedef struct tcp_meter {
  tcp_gauge gauge;                    /* tcp.c knows only this part of the object */
  uint64_t measured_ns;               /* last measurement; 0: never */
  uint64_t bytes_in, bytes_out;       /* of measured links */
  uint64_t told_in, told_out;         /* at the last measurement: those, or the interface's */
  uint64_t told_own_in, told_own_out; /* at the last measurement: bytes_in, bytes_out */
  double nominal;
  char ifname[IFNAMSIZ]; /* interface of the published address; "": unknown */
} tcp_meter;

static tcp_meter *tcp_meter_of(const tcp_self *self) { return (tcp_meter *)(void *)self->gauge; }

/* Finds the interface with this address, if it is not the loopback. */
static void tcp_name_interface(tcp_meter *meter, const tcp_endpoint *end) {
  struct ifaddrs *list = NULL;
  if (getifaddrs(&list)) return;
  for (const struct ifaddrs *i = list; i; i = i->ifa_next) {
    tcp_endpoint at;
    if (!i->ifa_addr || i->ifa_flags & IFF_LOOPBACK) continue;
    int kind = i->ifa_addr->sa_family;
    if (kind != AF_INET && kind != AF_INET6) continue;
    memcpy(&at.at, i->ifa_addr, kind == AF_INET ? sizeof at.at.v4 : sizeof at.at.v6);
    if (tcp_same_host(&at, end)) snprintf(meter->ifname, sizeof meter->ifname, "%s", i->ifa_name);
  }
  freeifaddrs(list);
}

/* Does this link count when this host's network is measured? */
static int tcp_counts(const tcp_self *self, const tcp_link *link) {
  tcp_endpoint here, there;
  if (tcp_is_loopback(&self->place)) return 1;
  if (tcp_ends(link->fd, 0, &here) || tcp_ends(link->fd, 1, &there)) return 0;
  return !tcp_is_loopback(&here) && !tcp_same_host(&here, &there);
}

/* Ends a period of awaiting. The caller's time may be slightly before its beginning. */
static void tcp_awaited(const tcp_meter *meter, tcp_window *window, uint64_t now_ns) {
  if (now_ns > window->awaits_ns) window->awaited_ns += now_ns - window->awaits_ns;
  window->awaited_bytes += meter->bytes_in - window->awaits_bytes;
  window->awaits_ns = 0;
}

static void tcp_awaits(const tcp_meter *meter, tcp_window *window, uint64_t now_ns) {
  window->awaits_ns = mlfab__max(now_ns, 1);
  window->awaits_bytes = meter->bytes_in;
}

/* Will the peer certainly send more? Reads the clock only if that has changed. */
static void tcp_empty(tcp_self *self, tcp_link *link) {
  tcp_window *window = link->window;
  int awaits = link->frame ? link->bulk_bytes >= TCP_LARGE_BYTES
                           : window->awaits_ns && link->stage_end > link->stage_at;
  if (awaits == (window->awaits_ns != 0)) return;
  uint64_t now = self->env.hooks.clock(self->env.hooks.user);
  if (awaits)
    tcp_awaits(tcp_meter_of(self), window, now);
  else
    tcp_awaited(tcp_meter_of(self), window, now);
}

static void tcp_got(tcp_self *self, tcp_link *link, size_t bytes) {
  tcp_meter_of(self)->bytes_in += bytes;
  link->window->moved_in += bytes;
}

static void tcp_wrote(tcp_self *self, tcp_link *link, size_t bytes, int full) {
  tcp_meter_of(self)->bytes_out += bytes;
  link->window->moved_out += bytes;
  *(full ? &link->window->had_none : &link->window->had_room) = 1;
}

static void tcp_link_opened(tcp_self *self, tcp_link *link) {
  if (link->window || !tcp_counts(self, link)) return;
  link->window = mlfab__alloc(&self->env, sizeof *link->window);
  link->unmeasured = !link->window;
}

static void tcp_link_closed(tcp_self *self, tcp_link *link) {
  if (link) {
    mlfab__free(&self->env, link->window, sizeof *link->window);
    return;
  }
  mlfab__free(&self->env, tcp_meter_of(self), sizeof(tcp_meter));
  self->gauge = NULL;
}

/* Is this enough to compute a rate? A few packets at once, or the initial burst of a token bucket, are not. */
static int tcp_is_load(uint64_t bytes, uint64_t ns) {
  if (ns == 0) return 0; /* no time, no rate */
  return bytes >= TCP_LOAD_BYTES || (ns >= TCP_LOAD_NS && bytes >= TCP_LITTLE_BYTES);
}

#if defined(__linux__) && defined(TCP_INFO)
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define TCP_INFO_LIMITED_BIT 0x80u
#else
#define TCP_INFO_LIMITED_BIT 1u
#endif

/* The rate at which the peer received this link's bytes. 0: unknown, or limited by the application; negative: limited
 * by the peer, which did not read. *active_p: the link is sending now. The kernel's own rate covers the last round
 * trip: too low at the end of a transfer, and too high at its beginning. Bytes over busy time are too low by the cost
 * of slow start and small frames; if all writes were accepted, they give the application's rate. Under load both are
 * too low, so the larger is used. */
static double tcp_delivery(const tcp_link *link, uint64_t elapsed_ns, int *active_p) {
  tcp_window *window = link->window;
  uint8_t info[TCP_INFO_WANTED];
  socklen_t room = sizeof info;
  *active_p = 0;
  if (getsockopt(link->fd, IPPROTO_TCP, TCP_INFO, info, &room) || room < sizeof info) return 0;
  uint64_t acked = tcp_info_number(info + TCP_INFO_ACKED, 8), bytes = acked - window->acked;
  uint64_t busy_us = tcp_info_number(info + TCP_INFO_BUSY, 8), us = busy_us - window->busy_us;
  uint64_t stalled_us = tcp_info_number(info + TCP_INFO_RWND_LIMITED, 8);
  uint64_t stalled_ns = (stalled_us - window->stalled_us) * 1000;
  window->acked = acked;
  window->busy_us = busy_us;
  window->stalled_us = stalled_us;
  if (stalled_ns > elapsed_ns / 4) return -1;
  if (info[TCP_INFO_LIMITED] & TCP_INFO_LIMITED_BIT || !tcp_is_load(bytes, us * 1000)) return 0;
  double rate = window->had_none ? (double)bytes * 1e6 / (double)us : 0;
  *active_p = tcp_info_number(info + TCP_INFO_UNACKED, 4) &&
              (link->piece_count || tcp_info_number(info + TCP_INFO_NOTSENT, 4));
  double last = *active_p ? (double)tcp_info_number(info + TCP_INFO_DELIVERY, 8) : 0;
  return last > rate ? last : rate;
}
#undef TCP_INFO_LIMITED_BIT

#else
static double tcp_delivery(const tcp_link *link, uint64_t elapsed_ns, int *active_p) {
  (void)link, (void)elapsed_ns;
  *active_p = 0;
  return 0;
}
#endif

/* Adds one link's window to this host's measurement, and begins the link's next window. */
static void tcp_link_measure(const tcp_meter *meter, const tcp_link *link, uint64_t now_ns,
                             mlfab_measure *m, double *together_p) {
  tcp_window *window = link->window;
  uint64_t most = m->elapsed_ns - m->elapsed_ns / 8;
  int awaits = window->awaits_ns != 0, full = !window->had_room && link->interest & TCP_WATCH_OUT;
  if (awaits) tcp_awaited(meter, window, now_ns);
  if (window->moved_in >= TCP_LITTLE_BYTES && window->awaited_ns >= most) m->limited_in = 0;
  if (window->moved_in >= TCP_LITTLE_BYTES &&
      tcp_is_load(window->awaited_bytes, window->awaited_ns)) {
    double rate = (double)window->awaited_bytes * 1e9 / (double)window->awaited_ns;
    if (rate > m->delivery_in) m->delivery_in = rate;
  }
  int active; /* always queried: the kernel may still be sending after the last write */
  double rate = tcp_delivery(link, m->elapsed_ns, &active);
  if (active && rate > 0) *together_p += rate;
  if (rate > m->delivery_out) m->delivery_out = rate;
  if (full && rate >= 0 && window->moved_out >= TCP_LITTLE_BYTES) m->limited_out = 0;
  window->moved_in = window->moved_out = window->awaited_ns = window->awaited_bytes = 0;
  window->had_none = (link->interest & TCP_WATCH_OUT) != 0;
  window->had_room = !window->had_none;
  if (awaits) tcp_awaits(meter, window, now_ns);
}

/* Bytes that the interface has received and sent. /proc/net shows this process's network namespace; /sys
 * may not. 0: unavailable. */
static int tcp_interface_bytes(const char *name, uint64_t *in_p, uint64_t *out_p) {
  char line[512];
  size_t bytes = strlen(name);
  int found = 0;
  FILE *file = bytes ? fopen("/proc/net/dev", "re") : NULL;
  while (file && !found && fgets(line, sizeof line, file)) {
    const char *at = line + strspn(line, " ");
    char *end = NULL;
    if (strncmp(at, name, bytes) != 0 || at[bytes] != ':') continue;
    at += bytes + 1;
    /* the first of eight counters of input, and of output */
    for (int i = 0; i < 9; i++, at = end) {
      uint64_t number = strtoull(at, &end, 10);
      if (end == at) break;
      if (i == 0) *in_p = number;
      if (i == 8) *out_p = number, found = 1;
    }
  }
  if (file) (void)fclose(file);
  return found;
}

/* A number of the interface from /sys, or -1. */
static long tcp_interface_number(const char *name, const char *what) {
  char path[IFNAMSIZ + 64];
  long number = -1;
  snprintf(path, sizeof path, "/sys/class/net/%s/%s", name, what);
  FILE *file = fopen(path, "re");
  if (!file) return -1;
  if (fgets(path, sizeof path, file)) number = strtol(path, NULL, 10);
  (void)fclose(file);
  return number;
}

/* The interface's nominal speed, bytes a second, or 0. Virtual interfaces report arbitrary speeds (veth: 10
 * Gbit/s), and /sys may show another network namespace. */
static double tcp_nominal(const char *name) {
  char device[IFNAMSIZ + 64];
  snprintf(device, sizeof device, "/sys/class/net/%s/device", name);
  if (!*name || access(device, F_OK) ||
      tcp_interface_number(name, "ifindex") != (long)if_nametoindex(name))
    return 0;
  long megabits = tcp_interface_number(name, "speed");
  return megabits > 0 ? (double)megabits * 125000.0 : 0;
}

/* Called for measured links only, that is, in fabrics with a scheduler. There the order of output matters, and the
 * kernel's queue cannot be reordered. Without a limit the queue would take whole models, and share the link among all
 * of them. */
static void tcp_link_shallow(const tcp_link *link) {
#ifdef TCP_NOTSENT_LOWAT
  unsigned bytes = TCP_UNSENT_BYTES;
  if (!link->window->shallow)
    (void)setsockopt(link->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, sizeof bytes);
#endif
  link->window->shallow = 1;
}

/* NULL: out of memory, so nothing is measured yet. */
static tcp_meter *tcp_meter_begin(tcp_self *self) {
  tcp_meter *meter = mlfab__alloc(&self->env, sizeof *meter);
  if (!meter) return NULL;
  meter->gauge = (tcp_gauge){tcp_link_opened, tcp_wrote, tcp_got, tcp_empty, tcp_link_closed};
  self->gauge = &meter->gauge;
  if (!tcp_is_loopback(&self->place)) tcp_name_interface(meter, &self->place);
  meter->nominal = tcp_nominal(meter->ifname);
  for (uint32_t i = 1; i < self->slot_count; i++) {
    tcp_link *link = self->slots[i].link;
    if (link && (link->state == TCP_LINK_OPEN || link->state == TCP_LINK_STRANGER))
      tcp_link_opened(self, link);
  }
  return meter;
}

MLFAB__INTERNAL int mlfab__tcp_measure(void *opaque, uint64_t now_ns, mlfab_measure *measure_p) {
  tcp_self *self = opaque;
  tcp_meter *meter = self->gauge ? tcp_meter_of(self) : tcp_meter_begin(self);
  mlfab_measure m = {.limited_in = 1, .limited_out = 1};
  double together = 0;
  if (!meter || now_ns <= meter->measured_ns) return 0;
  uint64_t in = meter->bytes_in, out = meter->bytes_out;
  int first = !meter->measured_ns;
  if (meter->ifname[0] && !tcp_interface_bytes(meter->ifname, &in, &out)) {
    meter->ifname[0] = 0;
    first = 1;
  }
  m.elapsed_ns = now_ns - meter->measured_ns;
  m.nominal = meter->nominal;
  m.bytes_in = in - meter->told_in;
  m.bytes_out = out - meter->told_out;
  m.own_in = meter->bytes_in - meter->told_own_in;
  m.own_out = meter->bytes_out - meter->told_own_out;
  meter->told_own_in = meter->bytes_in;
  meter->told_own_out = meter->bytes_out;
  meter->measured_ns = now_ns;
  meter->told_in = in;
  meter->told_out = out;
  for (uint32_t i = 1; i < self->slot_count; i++) {
    tcp_link *link = self->slots[i].link;
    if (link && link->unmeasured) tcp_link_opened(self, link);
    if (link && link->state == TCP_LINK_OPEN && link->window) {
      tcp_link_shallow(link);
      tcp_link_measure(meter, link, now_ns, &m, &together);
    }
  }
  if (together > m.delivery_out) m.delivery_out = together;
  if (first) return 0;
  *measure_p = m;
  return 1;
}

#endif
