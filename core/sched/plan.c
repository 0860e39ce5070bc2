/* plan.c - plans a batch: calls order.h, then group.h, and reports each update. See plan.h. */
#include "plan.h"

MLFAB__INTERNAL void mlfab__planner_init(mlfab__planner *planner, mlfab__env *env) {
  memset(planner, 0, sizeof *planner);
  planner->env = env;
}

static void plan_free_arrays(mlfab__planner *p) {
  mlfab__free(p->env, p->ordered, p->room * sizeof *p->ordered);
  mlfab__free(p->env, p->grouped, p->room * sizeof *p->grouped);
  mlfab__free(p->env, p->order, p->room * sizeof *p->order);
  p->ordered = NULL;
  p->grouped = NULL;
  p->order = NULL;
  p->room = 0;
}

MLFAB__INTERNAL void mlfab__planner_free(mlfab__planner *planner) {
  if (planner->env == NULL) return;
  plan_free_arrays(planner);
  mlfab__order_free(&planner->orderer, planner->env);
  mlfab__group_free(&planner->grouper, planner->env);
  memset(planner, 0, sizeof *planner);
}

static int plan_reserve(mlfab__planner *p, uint32_t n) {
  if (n <= p->room && p->room > 0) return 0;
  plan_free_arrays(p);
  p->room = n < 8 ? 8 : n;
  p->ordered = mlfab__alloc_array(p->env, p->room, sizeof *p->ordered);
  p->grouped = mlfab__alloc_array(p->env, p->room, sizeof *p->grouped);
  p->order = mlfab__alloc_array(p->env, p->room, sizeof *p->order);
  if (p->ordered && p->grouped && p->order) return 0;
  plan_free_arrays(p); /* the next call allocates again */
  return MLFAB_ERR_MEMORY;
}

/* Computes the order, or takes the list as it is. Leaves no reservation. */
static int plan_order(mlfab__planner *p, mlfab__network *net, const mlfab__batch *batch,
                      uint32_t *applied_p) {
  if (batch->list) {
    for (uint32_t i = 0; i < batch->n; i++) {
      p->ordered[i] = (mlfab__ordered){.update = i, .reason = MLFAB__LISTED};
    }
    *applied_p = batch->n;
    return 0;
  }
  mlfab__order_input in = {.updates = batch->updates,
                           .n = batch->n,
                           .server = batch->server,
                           .servers = batch->servers,
                           .delay_bound = batch->delay_bound,
                           .version = batch->version};
  uint32_t mark = mlfab__network_mark(net);
  int code = mlfab__order_deadlines(&p->orderer, net, &in, p->ordered, applied_p);
  mlfab__network_undo(net, mark);
  return code;
}

/* The entry of one update; `position`: from 1, or one behind the last for dropped updates. */
static mlfab__planned plan_entry(const mlfab__batch *batch, uint32_t update, uint8_t reason,
                                 uint32_t position) {
  const mlfab__candidate *c = &batch->updates[update];
  double never = mlfab__network_never();
  /* dl(g) - position is the number of versions left; the delay counts from the other end. */
  int64_t age = mlfab__order_deadline(batch->version, position - (int64_t)1, c->version);
  return (mlfab__planned){.update = update,
                          .fate = MLFAB__PLAN_DROPPED,
                          .reason = reason,
                          .start = c->available,
                          .arrive = never,
                          .ready = never,
                          .end = never,
                          .commit = never,
                          .delay = age};
}

/* Writes the applied updates in the order of commits, then those that Alg. 3 could not place, as dropped,
 * then the other dropped updates. */
static uint32_t plan_write(const mlfab__planner *p, const mlfab__batch *batch, uint32_t ordered,
                           mlfab__planned *out) {
  uint32_t applied = 0;
  while (applied < ordered && p->grouped[applied].number > 0) applied++;
  for (uint32_t i = 0; i < batch->n; i++) {
    const mlfab__ordered *o = &p->ordered[i];
    uint32_t position = (i < applied ? i : applied) + 1;
    uint8_t reason = i >= applied && i < ordered ? MLFAB__UNREACHABLE : o->reason;
    out[i] = plan_entry(batch, o->update, reason, position);
    if (i >= applied) continue;
    const mlfab__grouped *g = &p->grouped[i];
    out[i].fate = MLFAB__PLAN_APPLIED;
    out[i].group = g->q;
    out[i].group_number = g->number;
    out[i].arrive = g->arrive;
    out[i].ready = g->ready;
    out[i].end = g->end;
    out[i].commit = g->commit;
  }
  return applied;
}

MLFAB__INTERNAL int mlfab__plan_batch(mlfab__planner *planner, mlfab__network *net,
                                      const mlfab__batch *batch, mlfab__planned *out,
                                      uint32_t *applied_p, mlfab__group_choice *choice_p) {
  mlfab__group_choice choice;
  uint32_t ordered = 0;
  int code = plan_reserve(planner, batch->n);
  if (!code) code = plan_order(planner, net, batch, &ordered);
  if (code) return code;
  for (uint32_t i = 0; i < ordered; i++) planner->order[i] = planner->ordered[i].update;
  mlfab__group_input in = {.updates = batch->updates,
                           .order = planner->order,
                           .n = ordered,
                           .server = batch->server,
                           .servers = batch->servers,
                           .aggregators = batch->aggregators,
                           .k = batch->k,
                           .start = batch->backlog,
                           .cut = batch->cut};
  code = mlfab__group_plan(&planner->grouper, net, &in, batch->best, planner->grouped, &choice);
  if (code) return code;
  *applied_p = plan_write(planner, batch, ordered, out);
  if (choice_p) *choice_p = choice;
  return 0;
}
