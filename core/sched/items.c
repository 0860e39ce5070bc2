/* items.c - the scheduler role: items, their legs, and the rates of hosts. See scheduler.h.
 *
 * Used by scheduler.c, batch.c and arrange.c. */
#include "scheduler.h"

MLFAB__INTERNAL double mlfab__scheduler_rate(const mlfab__scheduler *s, uint32_t host, int out) {
  double rate = out ? s->hosts[host].out : s->hosts[host].in;
  if (rate >= 0.0) return rate;
  return out ? s->alike_out : s->alike_in;
}

MLFAB__INTERNAL void mlfab__scheduler_append(mlfab__scheduler *s, mlfab__list *list, uint32_t i) {
  mlfab__item *item = &s->items[i];
  item->previous = list->last;
  item->next = MLFAB__NO_ITEM;
  *(list->last == MLFAB__NO_ITEM ? &list->first : &s->items[list->last].next) = i;
  list->last = i;
  s->listed++;
}

MLFAB__INTERNAL void mlfab__scheduler_unlink(mlfab__scheduler *s, mlfab__list *list, uint32_t i) {
  const mlfab__item *item = &s->items[i];
  *(item->previous == MLFAB__NO_ITEM ? &list->first : &s->items[item->previous].next) = item->next;
  *(item->next == MLFAB__NO_ITEM ? &list->last : &s->items[item->next].previous) = item->previous;
  s->listed--;
}

MLFAB__INTERNAL void mlfab__scheduler_place(mlfab__scheduler *s, uint32_t item) {
  mlfab__scheduler_unlink(s, &s->waiting, item);
  mlfab__scheduler_append(s, &s->placed, item);
  s->items[item].placed = 1;
  s->items[item].serial = s->serial;
}

MLFAB__INTERNAL uint64_t mlfab__scheduler_ns(double seconds) {
  double ns = seconds * 1e9;
  return ns < 1.8e19 ? (ns > 0.0 ? (uint64_t)ns : 0) : MLFAB__NEVER;
}

MLFAB__INTERNAL double mlfab__scheduler_left(const mlfab__leg *leg, uint64_t now_ns) {
  if (leg->lost) return leg->left;
  double now = 1e-9 * (double)(now_ns - mlfab__min(leg->since_ns, now_ns)), left = 0.0;
  for (uint32_t k = 0; k < leg->n; k++) {
    const mlfab__stretch *piece = &leg->stretches[k];
    if (now < piece->to)
      left += piece->rate * (piece->to - (now > piece->from ? now : piece->from));
  }
  return left < leg->left ? left : leg->left;
}

MLFAB__INTERNAL mlfab__leg *mlfab__scheduler_crossing(mlfab__scheduler *s, uint32_t item,
                                                      uint32_t server) {
  const mlfab__item *it = &s->items[item];
  mlfab__item_part *part = mlfab__scheduler_part(s, item, server);
  if (part->state != MLFAB__ITEM_PLACED || it->dropped) return NULL;
  if (it->group == 0) return &part->own;
  if (s->counted[server] == it->group) return NULL;
  s->counted[server] = it->group;
  return &part->sum;
}
