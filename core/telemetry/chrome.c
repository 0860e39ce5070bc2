/* chrome.c - records as Chrome trace events. See chrome.h. */
#include "chrome.h"

#include <stdio.h>

#define CHROME_TIMES (((uint64_t)1 << 51) - 1)

static const char *const chrome_names[] = {
    [MLFAB__TRACE_OTHER] = "frames", [MLFAB__TRACE_PUSH] = "push",
    [MLFAB__TRACE_PULL] = "pull",    [MLFAB__TRACE_GROUP] = "member",
    [MLFAB__TRACE_SUM] = "sum",      [MLFAB__TRACE_COLL] = "collective",
    [MLFAB__TRACE_SLICE] = "slice"};

/* The peer at the other end, by kind of link, and the use of the link. */
static const struct {
  const char *peer, *use;
} chrome_links[MLFAB__LINK_KINDS] = {[MLFAB__LINK_FREE] = {"node", ""},
                                     [MLFAB__LINK_NEW] = {"node", " (new)"},
                                     [MLFAB__LINK_CLAIM] = {"node", " (claim)"},
                                     [MLFAB__LINK_JOIN_IN] = {"node", " (joins)"},
                                     [MLFAB__LINK_JOIN_OUT] = {"server", " (joining)"},
                                     [MLFAB__LINK_SERVER] = {"server", ""},
                                     [MLFAB__LINK_WORKER] = {"worker", ""},
                                     [MLFAB__LINK_PLANNER] = {"server", " (plans)"},
                                     [MLFAB__LINK_SCHEDULER] = {"scheduler", ""},
                                     [MLFAB__LINK_PEER] = {"worker", " (called)"},
                                     [MLFAB__LINK_PEER_IN] = {"worker", " (caller)"},
                                     [MLFAB__LINK_RESHARD] = {"server", " (moves, called)"},
                                     [MLFAB__LINK_RESHARD_IN] = {"server", " (moves, caller)"}};

static size_t chrome_length(int n) {
  return n < 0 ? 0 : mlfab__min((uint64_t)n, MLFAB__CHROME_MAX - 1);
}

/* A time as microseconds with three decimals. */
static const char *chrome_time(const mlfab__chrome *c, uint64_t at_ns, char buffer[40]) {
  /* Modulo 2^64: at_ns may be smaller. Modulo 26 days: readers store the number as a double. */
  uint64_t ns = (c->unix_ns + (at_ns - c->clock_ns)) & CHROME_TIMES;
  snprintf(buffer, 40, "%llu.%03llu", (unsigned long long)(ns / 1000),
           (unsigned long long)(ns % 1000));
  return buffer;
}

/* A text without characters that JSON would escape. */
static void chrome_plain(const char *from, char *to, size_t room) {
  size_t n = 0;
  for (; from[n] && n + 1 < room; n++)
    to[n] = from[n] < 32 || from[n] > 126 || from[n] == '"' || from[n] == '\\' ? '?' : from[n];
  to[n] = 0;
}

MLFAB__INTERNAL size_t mlfab__chrome_begin(const mlfab__chrome *c, const char *name,
                                           const char *host, long pid,
                                           char text[MLFAB__CHROME_MAX]) {
  char plain[128];
  chrome_plain(host, plain, sizeof plain);
  return chrome_length(
      snprintf(text, MLFAB__CHROME_MAX,
               "[\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%u,\"tid\":0,\"args\":{\"name\":"
               "\"%s (%s, pid %ld)\"}},\n"
               "{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":%u,\"tid\":0,\"args\":"
               "{\"sort_index\":%u}},\n",
               (unsigned)c->pid, name, plain, pid, (unsigned)c->pid, (unsigned)c->pid));
}

/* The lanes of one peer stand together: plans, then received frames, then sent frames. */
static size_t chrome_lane(const mlfab__chrome *c, uint32_t lane, char text[MLFAB__CHROME_MAX]) {
  uint32_t peer = lane & 0xfffffu, out = (lane >> 20) % MLFAB__TRACE_SLOTS;
  uint32_t kind = (lane >> 20) / MLFAB__TRACE_SLOTS, order;
  char name[96];
  if (kind >= MLFAB__LINK_KINDS) {
    order = out;
    snprintf(name, sizeof name, out ? "plan for worker %u (%u)" : "plan for worker %u",
             (unsigned)peer, (unsigned)out + 1);
  } else {
    order = MLFAB__TRACE_SLOTS + kind * 2 + out;
    snprintf(name, sizeof name, "%s %s %u%s", out ? "to" : "from", chrome_links[kind].peer,
             (unsigned)peer, chrome_links[kind].use);
  }
  return chrome_length(snprintf(
      text, MLFAB__CHROME_MAX,
      "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%u,\"tid\":%u,\"args\":{\"name\":\"%s\"}},\n"
      "{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":%u,\"tid\":%u,\"args\":"
      "{\"sort_index\":%u}},\n",
      (unsigned)c->pid, (unsigned)lane, name, (unsigned)c->pid, (unsigned)lane,
      (unsigned)(peer * 64 + order)));
}

/* Writes the name of a transfer. A pull has the number of its request (request.h, invariant 1), or a distributor's. */
static int chrome_name(const mlfab__trace_record *r, char name[64]) {
  unsigned long long number = r->number & ~MLFAB__SPREAD_BIT;
  if (r->what == MLFAB__TRACE_PULL && number == r->number) number /= MLFAB__REQUESTS;
  if (r->what == MLFAB__TRACE_OTHER) return snprintf(name, 64, "frames");
  return snprintf(name, 64, "%s %llu", chrome_names[r->what], number);
}

static size_t chrome_slice(const mlfab__chrome *c, const mlfab__trace_record *r, const char *name,
                           char text[MLFAB__CHROME_MAX]) {
  char at[40], via[32] = "";
  unsigned long long ns = r->end_ns - r->at_ns;
  if (r->kind == MLFAB__TRACE_PLAN && r->who != MLFAB__NO_NODE)
    snprintf(via, sizeof via, ",\"aggregator\":%u", (unsigned)r->who);
  return chrome_length(snprintf(
      text, MLFAB__CHROME_MAX,
      "{\"ph\":\"X\",\"name\":\"%s\",\"cat\":\"%s\",\"ts\":%s,\"dur\":%llu.%03llu,\"pid\":%u,"
      "\"tid\":%u,\"args\":{\"bytes\":%llu,\"%s\":%llu%s}},\n",
      name, r->kind == MLFAB__TRACE_PLAN ? "plan" : chrome_names[r->what],
      chrome_time(c, r->at_ns, at), ns / 1000, ns % 1000, (unsigned)c->pid, (unsigned)r->lane,
      (unsigned long long)r->bytes, r->kind == MLFAB__TRACE_PLAN ? "delay" : "frames",
      (unsigned long long)r->more, via));
}

static size_t chrome_arrow(const mlfab__chrome *c, const mlfab__trace_record *r,
                           char text[MLFAB__CHROME_MAX]) {
  char at[40];
  int to = r->kind == MLFAB__TRACE_TO;
  return chrome_length(snprintf(
      text, MLFAB__CHROME_MAX,
      "{\"ph\":\"%s\",%s\"name\":\"%s\",\"cat\":\"transfer\",\"id\":\"0x%llx\",\"ts\":%s,"
      "\"pid\":%u,\"tid\":%u},\n",
      to ? "f" : "s", to ? "\"bp\":\"e\"," : "", chrome_names[r->what], (unsigned long long)r->key,
      chrome_time(c, r->at_ns, at), (unsigned)c->pid, (unsigned)r->lane));
}

static size_t chrome_instant(const mlfab__chrome *c, const mlfab__trace_record *r, const char *name,
                             char text[MLFAB__CHROME_MAX]) {
  char at[40];
  if (r->kind == MLFAB__TRACE_LOST)
    return chrome_length(
        snprintf(text, MLFAB__CHROME_MAX,
                 "{\"ph\":\"i\",\"name\":\"records lost\",\"cat\":\"lost\",\"s\":\"p\",\"ts\":%s,"
                 "\"pid\":%u,\"tid\":0,\"args\":{\"records\":%llu}},\n",
                 chrome_time(c, c->last_ns, at), (unsigned)c->pid, (unsigned long long)r->bytes));
  return chrome_length(snprintf(
      text, MLFAB__CHROME_MAX,
      "{\"ph\":\"i\",\"name\":\"%s dropped\",\"cat\":\"plan\",\"s\":\"t\",\"ts\":%s,\"pid\":%u,"
      "\"tid\":%u,\"args\":{\"delay\":%llu}},\n",
      name, chrome_time(c, r->at_ns, at), (unsigned)c->pid, (unsigned)r->lane,
      (unsigned long long)r->more));
}

MLFAB__INTERNAL size_t mlfab__chrome_event(mlfab__chrome *c, const mlfab__trace_record *r,
                                           char text[MLFAB__CHROME_MAX]) {
  char name[64];
  if (r->kind == MLFAB__TRACE_LANE) return chrome_lane(c, r->lane, text);
  chrome_name(r, name);
  if (r->kind != MLFAB__TRACE_LOST && r->kind != MLFAB__TRACE_PLAN)
    c->last_ns = mlfab__max(c->last_ns, r->at_ns);
  if (r->kind == MLFAB__TRACE_RUN || r->kind == MLFAB__TRACE_PLAN)
    return chrome_slice(c, r, name, text);
  if (r->kind == MLFAB__TRACE_FROM || r->kind == MLFAB__TRACE_TO) return chrome_arrow(c, r, text);
  return chrome_instant(c, r, name, text);
}

MLFAB__INTERNAL size_t mlfab__chrome_end(const mlfab__chrome *c, const char *why,
                                         char text[MLFAB__CHROME_MAX]) {
  char at[40];
  return chrome_length(
      snprintf(text, MLFAB__CHROME_MAX,
               "{\"ph\":\"i\",\"name\":\"%s\",\"cat\":\"end\",\"s\":\"p\",\"ts\":%s,\"pid\":%u,"
               "\"tid\":0}\n]\n",
               why, chrome_time(c, c->last_ns, at), (unsigned)c->pid));
}
