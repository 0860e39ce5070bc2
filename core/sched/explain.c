/* explain.c - the scheduler role: prints its last plans as text. See scheduler.h.
 *
 * Each update or pull has one line, in the order of the plan, with a chart of its transfers over time. '-': to its
 * aggregator. '=': into the server, or for a pull to its worker. Times are seconds from the plan. */
#include "scheduler.h"

#include <stdio.h>

enum { EXPLAIN_COLUMNS = 40 };

/* A text buffer that may be too small: `used` counts the length of the whole text. */
typedef struct explain_text {
  char *at;
  size_t room, used;
} explain_text;

static void explain_put(explain_text *t, const char *format, ...) MLFAB__PRINTF(2, 3);

static void explain_put(explain_text *t, const char *format, ...) {
  va_list arguments;
  size_t left = t->used < t->room ? t->room - t->used : 0;
  va_start(arguments, format);
  int n = mlfab__vformat(left ? t->at + t->used : NULL, left, format, arguments);
  va_end(arguments);
  if (n > 0) t->used += (size_t)n;
}

/* Returns the latest commit: the width of the chart. */
static double explain_span(const mlfab__story *story) {
  double span = 0.0;
  for (uint32_t i = 0; i < story->n; i++) {
    double end = story->told[i].commit;
    if (mlfab__finite(end) && end > span) span = end;
  }
  return span;
}

static uint32_t explain_column(double time, double span) {
  if (!(span > 0.0) || !(time > 0.0)) return 0;
  double column = time / span * EXPLAIN_COLUMNS;
  return column < EXPLAIN_COLUMNS ? (uint32_t)column : EXPLAIN_COLUMNS;
}

static void explain_fill(char *row, double from, double to, double span, char mark) {
  uint32_t first = explain_column(from, span), end = explain_column(to, span);
  if (first == EXPLAIN_COLUMNS) first--;
  if (end == first) end++;
  for (uint32_t i = first; i < end; i++) row[i] = mark;
}

static void explain_picture(explain_text *t, uint32_t kind, const mlfab__told *told, double span) {
  char row[EXPLAIN_COLUMNS + 1];
  memset(row, ' ', EXPLAIN_COLUMNS);
  row[EXPLAIN_COLUMNS] = '\0';
  if (mlfab__finite(told->end)) {
    int sum = told->group && kind == MLFAB__TRANSFER_PUSH;
    if (sum) explain_fill(row, told->start, told->arrive, span, '-');
    explain_fill(row, sum ? told->ready : told->start, told->end, span, '=');
  }
  explain_put(t, " |%s|", row);
}

static const char *explain_why(uint8_t reason) {
  switch (reason) {
    case MLFAB__DEADLINE:
      return "at its deadline";
    case MLFAB__SHORTEST:
      return "shortest";
    case MLFAB__LISTED:
      return "as listed";
    case MLFAB__LOOKAHEAD:
      return "the next would have waited for it";
    case MLFAB__EXPIRED:
      return "too late at any place";
    case MLFAB__UNREACHABLE:
      return "waits: no way there now";
    default:
      return "not planned: out of memory";
  }
}

static void explain_item(explain_text *t, uint32_t kind, const mlfab__told *told, double span) {
  explain_put(t, "%s %llu of worker %u, %.0f bytes", kind == MLFAB__TRANSFER_PUSH ? "push" : "pull",
              (unsigned long long)told->id, told->worker, told->bytes);
  if (told->dropped) {
    explain_put(t, "%s: %s", told->reason == MLFAB__UNREACHABLE ? "" : ", dropped",
                explain_why(told->reason));
  } else if (told->group) {
    explain_put(t, ", group %u at worker %u", told->group, told->aggregator);
  } else {
    explain_put(t, ", direct");
  }
  if (!told->dropped && mlfab__finite(told->end)) {
    explain_put(t, ", start %.9f", told->start);
    if (told->group && kind == MLFAB__TRANSFER_PUSH)
      explain_put(t, ", arrive %.9f, sum from %.9f", told->arrive, told->ready);
    else if (told->group)
      explain_put(t, ", there %.9f", told->arrive);
    explain_put(t, ", end %.9f, commit %.9f", told->end, told->commit);
  }
  if (kind == MLFAB__TRANSFER_PUSH) explain_put(t, ", delay %lld", (long long)told->delay);
  if (!told->dropped) {
    explain_put(t, ", %s", explain_why(told->reason));
    explain_picture(t, kind, told, span);
  }
  explain_put(t, "\n");
}

static void explain_story(explain_text *t, const mlfab__story *story) {
  double span = explain_span(story);
  explain_put(t, "plan %llu at %.9f s: %u %s, ", (unsigned long long)story->serial,
              1e-9 * (double)story->now_ns, story->n,
              story->kind == MLFAB__TRANSFER_PUSH ? "pushes" : "pulls");
  if (story->kind == MLFAB__TRANSFER_PUSH) {
    explain_put(t, "%u servers, backlog %.9f s, ", story->servers, story->backlog);
  } else {
    explain_put(t, "server %u, ", story->server);
  }
  explain_put(t, "%u candidates for peers_out\n", story->candidates);
  for (uint32_t i = 0; i < story->n; i++) explain_item(t, story->kind, &story->told[i], span);
}

static void explain_rate(explain_text *t, const char *name, double rate, double alike) {
  explain_put(t, "%s %.0f bytes/s%s", name, rate >= 0.0 ? rate : alike,
              rate >= 0.0 ? "" : " (not known)");
}

static void explain_host(explain_text *t, const mlfab__scheduler *s, uint32_t host) {
  explain_rate(t, "in", s->hosts[host].in, s->alike_in);
  explain_rate(t, ", out", s->hosts[host].out, s->alike_out);
  explain_put(t, "\n");
}

MLFAB__INTERNAL void mlfab__scheduler_explain(const mlfab__scheduler *scheduler, char *text,
                                              size_t room, size_t *bytes_p) {
  const mlfab__scheduler *s = scheduler;
  explain_text t = {text, room, 0};
  if (room > 0) text[0] = '\0';
  if (s->stories[0].serial == 0 && s->stories[1].serial == 0)
    explain_put(&t, "nothing was planned yet\n");
  for (uint32_t kind = 0; kind < 2; kind++) {
    if (s->stories[kind].serial != 0) explain_story(&t, &s->stories[kind]);
  }
  for (uint32_t k = 0; k < s->servers; k++) {
    explain_put(&t, "server %u%s: ", k, s->served[k].live ? "" : " (no link)");
    explain_host(&t, s, s->served[k].host);
  }
  for (uint32_t w = 0; w < s->workers; w++) {
    uint32_t live = 0;
    for (uint32_t k = 0; k < s->servers; k++) live += s->alive[(size_t)k * s->workers + w];
    if (live == 0) continue;
    explain_put(&t, "worker %u, %u accumulators: ", w, s->stations[w].accumulators);
    explain_host(&t, s, s->stations[w].host);
  }
  if (bytes_p) *bytes_p = t.used + 1;
}
