/* alive.c - a node: liveness of its links. See node.h. */
#include "node.h"

#include <stdio.h>

/* The maximum time of a caller for its first frame, or its proof. */
#define ALIVE_STRANGER_NS UINT64_C(2000000000)
/* A shorter pause is not worth a line: a busy machine causes it. */
#define ALIVE_TOLD_NS UINT64_C(2000000000)

/* Closes the link. A peer without another link is dead at the next look, which is due now. */
static void alive_hang_up(mlfab_node *node, uint32_t index, const char *what) {
  mlfab__link *link = &node->links[index];
  char why[96], silent[24];
  snprintf(why, sizeof why, "silent for %s%s",
           mlfab__duration(silent, node->now_ns - link->heard_ns), what);
  link->ended = MLFAB__ENDED_SILENT;
  mlfab__node_hang_up(node, index, why);
}

static void alive_suspect(mlfab_node *node, mlfab__link *link) {
  int server = link->kind == MLFAB__LINK_SERVER;
  char text[64], silent[24];
  if (!link->suspect && (server || link->kind == MLFAB__LINK_WORKER) &&
      !mlfab__claim_is_hand(node, link)) {
    snprintf(text, sizeof text, "suspect, silent for %s",
             mlfab__duration(silent, node->now_ns - link->heard_ns));
    mlfab__node_emit(node, MLFAB_EVENT_SUSPECT, (int32_t)link->peer, server,
                     server ? 0 : node->callers[link->peer].incarnation, 0, text);
  }
  link->suspect = 1;
}

/* The transport's answer for a link that is quiet: node.h has the states and limits. */
MLFAB__INTERNAL void mlfab__alive_probed(mlfab_node *node, uint32_t index, int status) {
  mlfab__link *link = &node->links[index];
  uint64_t limit = 5 * node->config.heartbeat_ns, silent_ns = node->now_ns - link->heard_ns;
  int hand = mlfab__claim_is_hand(node, link), told = status != MLFAB_ERR_UNSUPPORTED;
  /* Another copy may serve instead of a peer that is silent while its system answers. */
  int other = link->kind == MLFAB__LINK_VOTER || link->kind == MLFAB__LINK_VOTER_IN ||
              mlfab__node_has_other(node, link->kind);
  link->probing = 0;
  if (status > 0) { /* a large frame is coming */
    if (link->coming_ns == 0) link->coming_ns = node->now_ns;
    /* Its length may be wrong: it would swallow all later frames. */
    if (!hand && node->now_ns - link->coming_ns >= node->config.silent_death_ns) {
      mlfab__node_hang_up(node, index, "a frame came too slowly");
      return;
    }
    link->heard_ns = link->moved_ns = node->now_ns;
    link->suspect = 0;
    return;
  }
  link->asked_ns = node->now_ns;
  if (silent_ns < 3 * node->config.heartbeat_ns) return;
  link->coming_ns = 0;
  alive_suspect(node, link);
  if (status == 0) link->up_ns = node->now_ns;
  if (node->now_ns - mlfab__max(link->heard_ns, link->up_ns) >= limit && (told || !hand)) {
    alive_hang_up(node, index, told ? ", and its system does not answer" : "");
  } else if (silent_ns >= mlfab__max(limit, other ? 0 : node->config.silent_death_ns) && !hand) {
    alive_hang_up(node, index, "");
  }
}

/* Asks whether bytes of an incomplete frame have come, and whether the peer's system answers. */
static void alive_ask(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  if (!(link->caps & MLFAB_CAP_PROBE)) {
    mlfab__alive_probed(node, index, MLFAB_ERR_UNSUPPORTED);
  } else if (!link->probing) {
    link->probing = 1;
    mlfab__node_act(node, MLFAB_ACTION_PROBE, link->id, 0);
  }
}

/* Moves the stamps of the node itself. */
static void alive_move(mlfab_node *node, uint64_t late_ns, uint64_t now_ns) {
  const mlfab_config *c = &node->config;
  for (uint32_t i = 0; i < node->nlinks; i++) {
    mlfab__link *link = &node->links[i];
    mlfab__later(&link->heard_ns, late_ns, now_ns);
    mlfab__later(&link->moved_ns, late_ns, now_ns);
    mlfab__later(&link->since_ns, late_ns, now_ns);
    mlfab__later(&link->probe_ns, late_ns, now_ns);
    mlfab__later(&link->coming_ns, late_ns, now_ns);
  }
  for (uint32_t w = 0; node->callers && w <= c->workers; w++) {
    mlfab__later(&node->callers[w].heard_ns, late_ns, now_ns);
    mlfab__later(&node->callers[w].lost_ns, late_ns, now_ns);
  }
  for (uint32_t r = 0; r < node->nroutes; r++) {
    mlfab__later(&node->routes[r].heard_ns, late_ns, now_ns);
    mlfab__later(&node->routes[r].connect_ns, late_ns, now_ns);
  }
  for (uint32_t i = 0; node->peers && i < node->nodes; i++) {
    mlfab__later(&node->peers[i].awaited_ns, late_ns, now_ns);
    mlfab__later(&node->peers[i].offered_ns, late_ns, now_ns);
  }
}

/* node.h, Pauses. */
MLFAB__INTERNAL void mlfab__alive_look(mlfab_node *node, uint64_t due_ns, uint64_t now_ns) {
  uint64_t beat = node->config.heartbeat_ns;
  uint64_t last_ns = mlfab__max(node->now_ns, due_ns);
  if (now_ns <= last_ns || now_ns - last_ns < MLFAB__PAUSE_BEATS * beat) return;
  uint64_t late_ns = now_ns - last_ns - beat,
           awake_ns = last_ns - node->opened_ns - node->asleep_ns;
  node->asleep_ns += late_ns;
  if (awake_ns >= node->anew_ns) {
    char paused[24];
    if (node->config.progress != MLFAB_PROGRESS_HAND && now_ns - last_ns >= ALIVE_TOLD_NS)
      mlfab__log(&node->env, MLFAB_LOG_WARN,
                 "this process did not run for %s: it ignores the silence of peers up to now",
                 mlfab__duration(paused, now_ns - last_ns));
    node->anew_ns = mlfab__add_sat(
        awake_ns, mlfab__max(node->config.silent_death_ns, MLFAB__HALT_BEATS * beat));
    late_ns = MLFAB__NEVER;
  }
  alive_move(node, late_ns, now_ns);
  MLFAB__EACH_ROLE(role, node, awake) role->awake(role->self, late_ns, now_ns);
}

/* The time of quiet after which every look asks about the link. Heartbeats come more often. */
static uint64_t alive_quiet_ns(const mlfab_node *node, const mlfab__link *link) {
  return (link->caps & MLFAB_CAP_PROBE ? 3 : 6) * node->config.heartbeat_ns / 2;
}

/* The earliest time at which a link may need an action. */
static uint64_t alive_due_ns(const mlfab_node *node, const mlfab__link *link) {
  uint64_t beat = node->config.heartbeat_ns;
  if (link->probe_ns != 0) return node->now_ns;
  if (link->kind == MLFAB__LINK_CLAIM) return node->now_ns + beat;
  if (link->kind != MLFAB__LINK_NEW)
    return mlfab__min(link->heard_ns + alive_quiet_ns(node, link), link->sent_ns + beat);
  return mlfab__min(link->heard_ns + 5 * beat,
                    node->now_ns + beat); /* until then it may have a kind */
}

static void alive_look_at_link(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  uint64_t beat = node->config.heartbeat_ns;
  int known = link->kind != MLFAB__LINK_NEW && link->kind != MLFAB__LINK_CLAIM;
  if (known && node->now_ns - link->sent_ns >= beat && link->queue_begin == link->queue_end)
    mlfab__claim_heartbeat(node, index, MLFAB__BEAT, node->now_ns);
  mlfab__claim_scan(node, index);
  /* The holder decides how long a claim waits. */
  if (link->kind == MLFAB__LINK_FREE || link->kind == MLFAB__LINK_CLAIM) return;
  uint64_t silent = node->now_ns - link->heard_ns;
  if (link->kind == MLFAB__LINK_NEW || link->kind == MLFAB__LINK_SCHEDULER || link->closing) {
    int overdue = node->guard && link->kind == MLFAB__LINK_NEW && link->called &&
                  node->now_ns - link->since_ns >= ALIVE_STRANGER_NS;
    if (silent < 5 * beat && !overdue) return;
    mlfab__node_hang_up(node, index,
                        link->closing                   ? "closed"
                        : link->kind == MLFAB__LINK_NEW ? "said nothing; it may be another program"
                                                        : "silent");
  } else if (link->kind == MLFAB__LINK_JOIN_IN && mlfab__bootstrap_overdue(node, link)) {
    mlfab__node_hang_up(node, index, "did not close its joining connection");
  } else if (silent >= alive_quiet_ns(node, link)) {
    alive_ask(node, index);
  }
}

MLFAB__INTERNAL void mlfab__alive_scan(mlfab_node *node, uint32_t index) {
  alive_look_at_link(node, index);
  const mlfab__link *link = &node->links[index];
  if (link->kind == MLFAB__LINK_FREE) return;
  uint64_t due_ns = alive_due_ns(node, link), late_ns = link->since_ns + ALIVE_STRANGER_NS;
  int stranger =
      node->guard && link->kind == MLFAB__LINK_NEW && link->called && late_ns > node->now_ns;
  if (stranger && late_ns < mlfab__node_round(node, due_ns))
    mlfab__node_arm_at(node, MLFAB__TIMER_LINK, index, late_ns);
  else
    mlfab__node_arm(node, MLFAB__TIMER_LINK, index, due_ns);
}
