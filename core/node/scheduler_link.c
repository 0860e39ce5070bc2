/* scheduler_link.c - a node: links between servers and the scheduler, PLANNER and SCHEDULER. See node.h. */
#include "scheduler_link.h"

/* HELLO of the scheduler on a new link to our server role. */
static int scheduler_link_hello(mlfab_node *node, uint32_t index, const mlfab__hello *hello,
                                const mlfab__frame_in *frame) {
  uint32_t self = node->config.workers;
  if (node->is_scheduler)
    return mlfab__node_refuse(node, index, MLFAB_ERR_RANK_TAKEN, 0,
                              "the scheduler is beside server 0");
  int own = node->config.scheduler == MLFAB_SCHEDULER_OWN;
  if (hello->node != (own ? node->nodes - 1 : mlfab__node_of_server(node, 0)))
    return mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                              "a HELLO of a node that is no scheduler");
  if (hello->incarnation < node->callers[self].incarnation ||
      !mlfab__caller_issued(node, hello, own ? MLFAB__NO_NODE : 0))
    return mlfab__node_refuse(node, index, MLFAB_ERR_FENCED, MLFAB_NO_RANK,
                              "a newer scheduler is here");
  if (mlfab__claim_ask(node, index, node->callers[self].link, hello->nonce, frame))
    return MLFAB_ERR_AGAIN;
  mlfab__caller_admit(node, index, MLFAB__LINK_SCHEDULER, self, hello)->incarnation =
      hello->incarnation;
  int code = mlfab__caller_greet(node, index, MLFAB__LINK_SCHEDULER, self, hello);
  if (!code)
    mlfab__node_emit(node, MLFAB_EVENT_SCHEDULER_BACK, 0, 0, hello->incarnation, 0,
                     "scheduler here: it plans from now on");
  return code;
}

/* The servers grant by themselves until the scheduler is back. */
static void scheduler_link_down(mlfab_node *node, const mlfab__link *was, uint32_t link,
                                const char *why) {
  mlfab__caller *caller = &node->callers[was->peer];
  (void)why;
  if (caller->link != link) return;
  caller->link = MLFAB__NO_LINK;
  if (node->leaving == MLFAB__PARTS_ALL) return;
  mlfab__roles_lost(node, was->kind, was->peer);
  mlfab__node_emit(node, MLFAB_EVENT_SCHEDULER_LOST, 0, 0, caller->incarnation, MLFAB_ERR_PEER_DEAD,
                   "scheduler lost: first come, first served");
}

MLFAB__INTERNAL void mlfab__scheduler_link_attach(mlfab_node *node) {
  node->scheduler_hello = scheduler_link_hello;
  node->rules[MLFAB__LINK_PLANNER] = node->rules[MLFAB__LINK_SERVER];
  node->rules[MLFAB__LINK_SCHEDULER] =
      (mlfab__link_rule){mlfab__caller_frame, scheduler_link_down, NULL};
}
