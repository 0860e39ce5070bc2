/* balance.c - new owners of slices. See balance.h. */
#include "balance.h"

#define BALANCE_NOBODY 0xffffffffu

typedef struct balance_work {
  const mlfab__slice *slices;
  uint32_t n, servers;
  const uint8_t *active;
  uint32_t *owner;
  uint64_t *load;
  uint32_t *order; /* all slices, ascending by bytes and number */
  uint32_t *mine;  /* the slices of one server, in the same order */
} balance_work;

static int balance_before_bytes(const void *of, uint32_t i, uint32_t k) {
  const mlfab__slice *s = of;
  return s[i].bytes != s[k].bytes ? s[i].bytes < s[k].bytes : i < k;
}

/* Takes slices from a server until its load is at most `cap`. It keeps as many slices as possible and, for
 * that number, the largest that fit, so that the fewest bytes move. */
static void balance_shed(balance_work *b, uint32_t server, uint64_t cap) {
  uint32_t n = 0, keep = 0;
  uint64_t least = 0; /* sum of the `keep` smallest */
  for (uint32_t i = 0; i < b->n; i++) {
    if (b->owner[b->order[i]] == server) b->mine[n++] = b->order[i];
  }
  while (keep < n && least + b->slices[b->mine[keep]].bytes <= cap)
    least += b->slices[b->mine[keep++]].bytes;
  for (uint32_t i = n; i-- > 0;) {
    uint64_t bytes = b->slices[b->mine[i]].bytes;
    uint64_t others = keep > 0 ? least - b->slices[b->mine[keep - 1]].bytes : 0;
    if (keep > 0 && bytes + others <= cap) {
      cap -= bytes;
      least = others;
      keep--;
    } else {
      b->owner[b->mine[i]] = BALANCE_NOBODY;
      b->load[server] -= bytes;
    }
  }
}

/* Assigns owners so that no server is above `cap`, if possible. Returns the largest load. */
static uint64_t balance_level(balance_work *b, uint64_t cap) {
  uint64_t largest = 0;
  memset(b->load, 0, b->servers * sizeof *b->load);
  for (uint32_t i = 0; i < b->n; i++) {
    uint32_t server = b->slices[i].server;
    int stays = server < b->servers && b->active[server];
    b->owner[i] = stays ? server : BALANCE_NOBODY;
    if (stays) b->load[server] += b->slices[i].bytes;
  }
  for (uint32_t s = 0; s < b->servers; s++) {
    if (b->load[s] > cap) balance_shed(b, s, cap);
  }
  /* The largest slices first, each to the server with the smallest load. */
  for (uint32_t i = b->n; i-- > 0;) {
    uint32_t slice = b->order[i], to = BALANCE_NOBODY;
    if (b->owner[slice] != BALANCE_NOBODY) continue;
    for (uint32_t s = 0; s < b->servers; s++) {
      if (b->active[s] && (to == BALANCE_NOBODY || b->load[s] < b->load[to])) to = s;
    }
    b->owner[slice] = to;
    b->load[to] += b->slices[slice].bytes;
  }
  for (uint32_t s = 0; s < b->servers; s++) largest = mlfab__max(largest, b->load[s]);
  return largest;
}

MLFAB__INTERNAL void mlfab__layout_balance(const mlfab__slice *slices, uint32_t n,
                                           const uint8_t *active, uint32_t servers, uint32_t *owner,
                                           uint64_t *load, uint32_t *order) {
  balance_work b = {slices, n, servers, active, owner, load, order, order + n};
  uint64_t total = 0, members = 0;
  for (uint32_t i = 0; i < n; i++) {
    order[i] = i;
    total += slices[i].bytes;
  }
  for (uint32_t s = 0; s < servers; s++) members += active[s] != 0;
  assert(members > 0);
  mlfab__layout_sort(order, n, balance_before_bytes, slices);
  /* 21/20 of the mean, computed without overflow. */
  uint64_t cap = total / (20 * members) * 21 + total % (20 * members) * 21 / (20 * members);
  uint64_t largest = balance_level(&b, cap);
  /* If there are too few slices: keeps slices in place if the result is within 1/64 of the best. */
  if (largest > cap) balance_level(&b, largest + largest / 64);
}
