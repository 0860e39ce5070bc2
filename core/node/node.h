/* node.h - a node: its links, joining, liveness. A beat is the interval of heartbeats. What the node is for is in
 * its roles, which it knows by their table only (role.h).
 *
 * A link is a transport's connection with a purpose:
 *
 *    NEW      somebody called us; its first frame tells who it is: JOIN -> JOIN_IN, HELLO -> WORKER,
 *             SCHEDULER or RESHARD_IN, MEET -> PEER_IN
 *    CLAIM    it wants a number that another process has: see Numbers
 *    JOIN_IN  a node that joins, at server 0, until it has its WELCOME and hangs up
 *    JOIN_OUT we join; closed when WELCOME is here
 *    SERVER   from our worker role to a server: HELLO, HELLO_ACK, then everything
 *    WORKER   from a worker to our server role
 *    PLANNER  from our scheduler role to a server: HELLO, HELLO_ACK, plans; SCHEDULER: its other end
 *    PEER     from our worker role to another worker's node, as an aggregator or
 *             in collectives: MEET, then updates up and the model down, and messages up;
 *             PEER_IN: its other end. Opened when it is wanted: server 0 is asked WHERE, and says THERE
 *    RESHARD  from our server role to another server, when slices move: HELLO, HELLO_ACK, what server 0
 *             leads and its answers, slices; RESHARD_IN: its other end. One for each direction; nothing but
 *             HELLO_ACK goes back. Opened when it is wanted, and kept
 *
 * Roles of one node talk to each other over pairs of links that no transport sees; such a link stands
 * until the node closes, and nobody outside can say HELLO in its place. Frames to go stand in two
 * places: control frames in a queue of the link; frames with a bulk in the roles, which are asked when
 * the link has room. Roles are never called from inside themselves: what they ask of links (drop,
 * detach) is done when they have returned. A link that is given up so goes at once, with its queue.
 *
 * Strangers. Until its first frame has shown the job and the secret, the other end of a link is told
 * nothing but why it is refused: neither the job (its hash in the header is left out) nor that somebody
 * lives here (no heartbeats). Of links that somebody else called and that no role knows yet (NEW, CLAIM)
 * there are as many as nodes and 64 at most: the oldest goes for a newer one, a NEW one after 5 beats of
 * silence, a CLAIM when it is decided. JOIN_IN there is one a node id: a newer one of the same process
 * takes its place. It ends with its node's silence, or 20 beats after WELCOME was due.
 *
 * Numbers. A process shows who it is by a nonce that it draws when it opens. Whoever says JOIN or HELLO
 * for a number whose link another process holds makes a claim, and waits; the holder is asked by a
 * heartbeat that it has to answer (BEAT_PROBE, BEAT_ANSWER):
 *
 *    first frame --nobody has a link, or the same process: its old one goes--> admitted at once
 *         |
 *         +--another process has--> CLAIM, the holder is asked --it answers--> refused, RANK_TAKEN
 *                                     |--the holder's link ends--> its first frame is looked at again
 *                                     |--5 beats, hand-driven holder: it may compute--> RANK_TAKEN
 *                                     |--5 beats, any other holder--> its link is given up, as above
 *                                     +--the caller hangs up--> forgotten; the question after 7 beats
 *
 *  (1) A holder that answers keeps its number; only the answer to the question counts, not what a
 *      process sent before it died.
 *  (2) A holder is asked once at a time, for all who claim its number.
 *  (3) A claim is told nothing until it is decided, which takes 5 beats at most.
 *  (4) A process that calls again does not wait.
 *  (5) At server 0 two kinds of processes have a number and no link: a server of its own is called when
 *      another process says JOIN for it; whoever was welcomed has 5 beats to say HELLO. Until that is
 *      decided the other process is hung up, and calls again.
 *  (6) Whoever says MEET speaks on at once, and so does not wait: it is turned away and the holder is
 *      asked, whose link is given up unless it answers within 2 beats; meanwhile the caller calls again,
 *      for as long as it has something to say.
 *
 * Who may be what. What a first frame says of its sender is checked against what this node was told:
 * server 0 knows everybody's incarnation and nonce from JOIN; the others know those of the servers from
 * WELCOME. Of workers, and of a scheduler of its own, they learn from HELLO: a greater incarnation is a
 * newer process, and nothing there tells one that server 0 has not issued.
 *
 * Closing. Whoever leaves says BYE, reads on, and waits until the peer, which has seen it, hangs up
 * (both do when both leave): so a BYE is neither lost in what a transport has not sent yet, nor
 * destroyed by frames that the peer sends meanwhile. Nobody waits for a hand-driven peer, nor on links
 * whose end is no death (between workers, between servers). Where a send finds the peer gone, its BYE may
 * still be unread: such a link is offered nothing more, like one without room, until DOWN.
 *
 * Liveness: a heartbeat when nothing else was sent. A link is in one of these states:
 *
 *    HEARD     a frame came less than 3 beats ago
 *    SUSPECT   none came for longer. The transport is asked (MLFAB_ACTION_PROBE), at every look, whether
 *              the far side's system answers -> HEARD with the next frame, LOST
 *    LOST      hung up: (a) nothing has spoken for the far side for 5 beats, neither a frame nor an
 *              answered probe; or (b) no frame came for silent_death_ns
 *
 * So a peer that is stopped or crowded out has silent_death_ns, and one whose host is gone, or of
 * which the transport knows nothing, 5 beats. (a) and (b) hold for links of every kind, but:
 *  - (b) not for a hand-driven peer, nor (a) where the transport knows nothing of it. Between workers
 *    nobody is known to be hand-driven: such a link is opened anew;
 *  - a link that is closing, one of a stranger (NEW) and that of a server to its scheduler are hung up
 *    after 5 beats of silence (from our BYE on): nothing is lost with them (updates are granted first
 *    come, first served without a scheduler);
 *  - a holder whose number is claimed has 5 beats to answer, however long it may be silent otherwise.
 * Timers. Every deadline of links, workers and routes is a timer in one heap. A timer is armed when what it
 * watches begins (a link stands, a worker's link broke), and never put off by a frame: when it expires, the
 * node looks at what was heard and sent since, acts or not, and arms it again for the earliest time at
 * which there can be something to do. Times are rounded up to a quarter of a beat since the node was opened, so
 * that the timers of many links expire together. The timer SCAN stands only while a role, or a link
 * between workers, has something to wait for. Requests and roles tell their own deadlines.
 *
 * A broken link is not yet a death: the worker calls again, and is dead to a server when it has not
 * for 2 beats (5 when hand-driven); a server is dead to us when no link to it stood for 5. They begin
 * with the break, however long it was silent before: we may have been stopped ourselves. After a silence
 * under (a) or (b) the death follows at once.
 *
 * Files, lowest first: link.c (links, their queues and timers, actions), role.c (asks the roles), outbox.c (what
 * is sent next), claim.c (heartbeats, Numbers, dispatch), peer_link.c (links between workers), server_link.c (our ways
 * to servers), inner.c (links inside the node), caller.c (who calls our server role), bootstrap.c (joining),
 * alive.c (Liveness), node.c (events, time, leaving). What is below calls what is above by the rules of link
 * kinds, a table that node.c fills. */
#ifndef MLFAB__NODE_H
#define MLFAB__NODE_H

#include "../../mlfab_node.h"
#include "../base/heap.h"
#include "../base/map.h"
#include "../base/rng.h"
#include "role.h"

#define MLFAB__NO_LINK 0xffffffffu

enum {
  MLFAB__ROLES_MAX = 15, /* of a node: four bits of a token tell which */
  MLFAB__OUTLETS = 32    /* ports that its roles have */
};
#define MLFAB__ROLE_SHIFT 60 /* of a token: above it, the role */

/* Pairs of links inside a node. */
enum {
  MLFAB__PAIR_SERVER,
  MLFAB__PAIR_PLANNER,
  MLFAB__PAIR_PEER,
  MLFAB__PAIR_RESHARD,
  MLFAB__PAIRS
};

typedef struct mlfab__link {
  uint8_t kind;
  uint8_t self;             /* an end of a pair inside this node: 1 + its bit in self_due */
  uint8_t greeted;          /* HELLO was answered */
  uint8_t blocked;          /* a send was refused: wait for WRITABLE */
  uint8_t listed;           /* in the ready list */
  uint8_t closing;          /* close when the control queue is empty; what comes is not looked at */
  uint8_t lingers;          /* likewise, but the peer closes first: it has read our BYE then */
  uint8_t doomed;           /* to be given up when the role has returned */
  uint8_t welcome;          /* a WELCOME is to be sent */
  uint8_t suspect, probing; /* it is silent; the transport is being asked */
  uint8_t silent;           /* it is hung up for that */
  uint8_t called;           /* by somebody else */
  uint8_t turn; /* of the roles on this kind of link: the first to be asked for a frame */
  uint32_t id;  /* the driver's number */
  uint32_t caps;
  uint32_t
      peer; /* rank of a worker (workers: the scheduler), number of a server, node that joins */
  uint8_t *queue; /* control frames: u32 meta bytes, u32 type, meta, padded to 8 */
  uint32_t queue_begin, queue_end, queue_room;
  uint64_t heard_ns, sent_ns;
  uint64_t up_ns;    /* when a probe was answered last: the far side's system was up */
  uint64_t nonce;    /* of the process at the other end, where it has a number */
  uint64_t probe_ns; /* when it was asked whether it lives, and has not answered; else 0 */
  uint64_t since_ns; /* NEW: it is up; JOIN_IN: WELCOME is due */
  /* A claim: the link that holds the number (MLFAB__NO_LINK: no longer), and the first frame. */
  uint32_t holder;
  uint32_t claim_bytes;
  uint8_t claim_type;
  uint8_t *claim;
} mlfab__link;

/* Who calls our server role: a worker, or the scheduler. */
typedef struct mlfab__caller {
  uint32_t link; /* index, or MLFAB__NO_LINK */
  uint32_t incarnation;
  uint8_t hand, dead, left;
  uint64_t heard_ns; /* also while there is no link */
  uint64_t lost_ns;  /* when its link broke, 0 while it has one */
} mlfab__caller;

/* What this node knows of another, by node id. */
typedef struct mlfab__peer {
  uint8_t joined, hand;
  uint32_t link; /* index: JOIN_IN */
  uint32_t incarnation;
  uint64_t nonce;
  /* Since when HELLO is awaited after WELCOME; of a server of its own, since when it is called, as
   * another process wants its number. 0: not. */
  uint64_t awaited_ns;
  char *addresses; /* MLFAB__ADDRESSES_MAX, or NULL */
} mlfab__peer;

/* Our worker role's way to an aggregator's node; made when it is first wanted. */
typedef struct mlfab__peer_link {
  uint32_t link; /* index, or MLFAB__NO_LINK */
  uint8_t asked, connecting;
  uint32_t asked_by; /* asked: id of the link to server 0 that has the question */
  uint64_t since_ns, retry_ns;
  char addresses[MLFAB__ADDRESSES_MAX];
} mlfab__peer_link;

/* Our worker role's, scheduler role's or server role's way to a server. */
typedef struct mlfab__route {
  uint32_t link; /* index, or MLFAB__NO_LINK */
  uint8_t connecting, dead, greeted;
  uint64_t retry_ns, heard_ns, connect_ns;
  uint8_t hand;
  /* That server 0 gave to the server when the fabric was made, and that it drew; 0: not told yet. */
  uint32_t incarnation;
  uint64_t nonce;
  char addresses[MLFAB__ADDRESSES_MAX];
  char why[128];  /* the last failure */
  char died[128]; /* dead: of what */
} mlfab__route;

enum mlfab__bootstrap_phase {
  MLFAB__BOOTSTRAP_JOINING,
  MLFAB__BOOTSTRAP_GREETING,
  MLFAB__BOOTSTRAP_READY,
  MLFAB__BOOTSTRAP_FAILED
};

/* Timers, in the order in which those of one time expire. */
enum mlfab__timer {
  MLFAB__TIMER_JOIN,
  MLFAB__TIMER_LINK,   /* of each link */
  MLFAB__TIMER_WORKER, /* of each worker without a link, at a server */
  MLFAB__TIMER_ROUTE,  /* of each route without a link */
  MLFAB__TIMER_SCAN
};

typedef struct mlfab__queued_action {
  uint32_t kind, link;
  uint64_t token;
} mlfab__queued_action;

/* What the node does on links of a kind. */
typedef struct mlfab__link_rule {
  void (*frame)(mlfab_node *node, uint32_t link, const mlfab__frame_in *frame);
  /* A link is gone: `was` is what it was; its index may be taken again. */
  void (*down)(mlfab_node *node, const mlfab__link *was, uint32_t link, const char *why);
  /* A role wants a link to this peer, and there is none. */
  void (*want)(mlfab_node *node, uint32_t peer);
} mlfab__link_rule;

/* How a role reaches its peers of one kind: what its port points at. */
typedef struct mlfab__outlet {
  mlfab_node *node;
  uint32_t role;
  int kind;
} mlfab__outlet;

struct mlfab__parts; /* what a node is composed of: known above */

struct mlfab_node {
  mlfab__env env;
  mlfab_config config; /* complete: no member is at its default */
  mlfab_stats stats;
  mlfab__requests requests;
  uint64_t job, secret[2];
  uint32_t id, nodes, incarnation, epoch;
  uint32_t server_number; /* or MLFAB__NO_NODE */
  int is_worker, is_server, is_coordinator, is_scheduler;
  mlfab__role roles[MLFAB__ROLES_MAX];
  uint32_t nroles;
  uint32_t noutlets;
  /* Roles by kind of link; those of them that send there. */
  uint8_t on[MLFAB__LINK_KINDS][MLFAB__ROLES_MAX], non[MLFAB__LINK_KINDS];
  uint8_t first[MLFAB__LINK_KINDS][MLFAB__FRAME_TYPES]; /* in `on`: who is asked first for a type */
  uint8_t senders[MLFAB__LINK_KINDS][MLFAB__ROLES_MAX], nsenders[MLFAB__LINK_KINDS];
  uint8_t settles[MLFAB__ROLES_MAX], idles[MLFAB__ROLES_MAX]; /* those with the function */
  uint8_t out_turn; /* OUT_ROLE: the frame's role, by its place among those on the link */
  uint32_t nsettles, nidles;
  mlfab__outlet outlets[MLFAB__OUTLETS];
  const mlfab__link_rule *rules; /* by kind of link */
  struct mlfab__parts *parts;    /* parts_bytes of it, freed with the node; not looked at here */
  size_t parts_bytes;
  char addresses[MLFAB__ADDRESSES_MAX];
  /* Joining. */
  enum mlfab__bootstrap_phase phase;
  mlfab_error failure;
  uint64_t opened_ns, join_retry_ns, missing_ns, nonce;
  uint32_t join_link;
  int join_connecting;
  uint32_t joined, incarnations; /* server 0: nodes that have joined; largest incarnation issued */
  char join_why[160], missing[128];
  const char *strange; /* why the last stranger was refused, or NULL */
  uint8_t *welcome;
  uint32_t welcome_bytes, welcome_count;
  mlfab__peer *peers;           /* by node id; server 0 only */
  mlfab__route *routes;         /* by server: the worker role's, the scheduler role's, the server
                                     role's */
  mlfab__caller *callers;       /* by rank, then the scheduler; server role only */
  uint32_t *reshard_links;      /* by server: it has called our server role */
  mlfab__peer_link **peers_out; /* by rank; worker role only */
  uint32_t *hops, nhops, hops_room; /* the ranks that have one */
  uint32_t *peer_in_links;          /* by rank; aggregator role only */
  /* Links. */
  mlfab__link *links;
  uint32_t nlinks;
  uint32_t first_free; /* no link before this one can be taken */
  mlfab__map by_id;
  mlfab__heap timers; /* JOIN, SCAN, one a route, one a worker (server role only), one a link */
  uint32_t *ready;    /* ring of link indexes */
  uint32_t ready_begin, ready_count;
  mlfab__queued_action *actions;
  uint32_t actions_begin, actions_count, actions_room;
  uint32_t pairs[MLFAB__PAIRS][2]; /* the asking end and the other, or MLFAB__NO_LINK */
  int doomed;                      /* a link is */
  uint32_t claims;                 /* links that are claims */
  int closed;                      /* no call begins any more: its context is being closed */
  int hops_short;                  /* one was wanted, and there was no memory for it */
  int claim_due;                   /* one is to be looked at again */
  uint32_t self_due;               /* the ends of pairs that may have something to carry, as bits */
  int self_lost;                   /* the inner links broke */
  int self_more;                   /* they have more to carry than one look may */
  /* The action that was yielded last. */
  enum {
    MLFAB__OUT_NONE,
    MLFAB__OUT_CONTROL,
    MLFAB__OUT_WELCOME,
    MLFAB__OUT_ROLE,
    MLFAB__OUT_ACTION
  } out;
  uint32_t out_role; /* OUT_ROLE: whose frame it is */
  uint32_t out_link;
  mlfab__frame_out frame;
  mlfab_action action;
  uint8_t *head; /* 64 + MLFAB_META_MAX */
  uint64_t now_ns;
  /* 1: the worker role, 2: all of it. Parting: it takes no calls any more, but finishes what other
   * workers wait for, until part_ns at most; leaving: it has said goodbye. */
  int parting, leaving;
  uint64_t part_ns;
};

/* --- link.c: links, queues, timers, actions --- */

#define MLFAB__TOKEN_JOIN 1u
#define MLFAB__TOKEN_SERVER \
  2u /* + index of the route; behind the routes: + rank of the aggregator */

/* A heartbeat; until the fabric is complete a short one at most, since joining has its own deadline. */
MLFAB__INTERNAL uint64_t mlfab__node_beat(const mlfab_node *node);
MLFAB__INTERNAL uint32_t mlfab__node_routes(const mlfab_node *node);
/* The route of links of this kind to a server: 0 for other kinds. The server that a route leads to. */
MLFAB__INTERNAL uint32_t mlfab__node_route_of(const mlfab_node *node, int kind, uint32_t server);
MLFAB__INTERNAL uint32_t mlfab__node_server_of(const mlfab_node *node, uint32_t route);
/* The node id of a server. How people call a node: "worker 3", "server 1". */
MLFAB__INTERNAL uint32_t mlfab__node_of_server(const mlfab_node *node, uint32_t server);
MLFAB__INTERNAL const char *mlfab__node_name(const mlfab_node *node, uint32_t id, char buffer[32]);
/* Joining has failed, unless it is over. */
MLFAB__INTERNAL void mlfab__node_fail(mlfab_node *node, int code, int32_t rank, int is_server,
                                      const char *text);
MLFAB__INTERNAL void mlfab__node_emit(mlfab_node *node, uint32_t kind, int32_t rank, int is_server,
                                      uint32_t incarnation, int code, const char *text);

/* Timers: the heap's number of one; the next time at which timers expire, from this one on. */
MLFAB__INTERNAL uint32_t mlfab__node_timer(const mlfab_node *node, enum mlfab__timer kind,
                                           uint32_t index);
MLFAB__INTERNAL uint64_t mlfab__node_round(const mlfab_node *node, uint64_t at_ns);
MLFAB__INTERNAL void mlfab__node_arm_at(mlfab_node *node, enum mlfab__timer kind, uint32_t index,
                                        uint64_t at_ns);
/* Expires at this time, rounded up, but not at once. */
MLFAB__INTERNAL void mlfab__node_arm(mlfab_node *node, enum mlfab__timer kind, uint32_t index,
                                     uint64_t at_ns);

/* Memory that opening needs. Errors: MEMORY. What links have, freed. */
MLFAB__INTERNAL int mlfab__node_reserve(mlfab_node *node);
MLFAB__INTERNAL void mlfab__node_free_links(mlfab_node *node);
/* The link with the driver's number, and its index; NULL. A free entry, or MLFAB__NO_LINK when out of memory. */
MLFAB__INTERNAL mlfab__link *mlfab__node_link(mlfab_node *node, uint32_t id, uint32_t *index_p);
MLFAB__INTERNAL uint32_t mlfab__node_new_link(mlfab_node *node);
MLFAB__INTERNAL void mlfab__node_free_link(mlfab_node *node, uint32_t index);
/* The index of the link of this kind to, or from, this peer, or MLFAB__NO_LINK. */
MLFAB__INTERNAL uint32_t mlfab__node_link_to(const mlfab_node *node, int kind, uint32_t peer);
MLFAB__INTERNAL void mlfab__node_act(mlfab_node *node, uint32_t kind, uint32_t link,
                                     uint64_t token);
MLFAB__INTERNAL void mlfab__node_connect(mlfab_node *node, uint64_t token);
MLFAB__INTERNAL void mlfab__node_post(mlfab_node *node, uint32_t link, uint8_t type,
                                      const void *meta, uint32_t bytes);
MLFAB__INTERNAL void mlfab__node_ready_link(mlfab_node *node, uint32_t link);
/* It claims nothing any more. */
MLFAB__INTERNAL void mlfab__node_unclaim(mlfab_node *node, mlfab__link *link);
/* The link is gone: whoever used it hears of it. */
MLFAB__INTERNAL void mlfab__node_link_down(mlfab_node *node, uint32_t index, const char *why);
/* Closes a link of ours: nobody reports it down. Not one inside the node. */
MLFAB__INTERNAL void mlfab__node_hang_up(mlfab_node *node, uint32_t index, const char *why);
/* Gives a link up when the roles have returned; the same for a peer that broke the protocol. */
MLFAB__INTERNAL void mlfab__node_doom(mlfab_node *node, uint32_t index);
MLFAB__INTERNAL void mlfab__node_drop(mlfab_node *node, uint32_t index, int code, const char *text);
/* Says why, then closes. */
MLFAB__INTERNAL void mlfab__node_refuse(mlfab_node *node, uint32_t link, int code, int32_t rank,
                                        const char *text);

/* --- role.c: the roles --- */

/* A row more, with `bytes` bytes of zeros as its self (0: none yet); NULL only without memory for those. Rows
 * stand in the order in which they were added, and count when mlfab__roles_list is called. */
MLFAB__INTERNAL mlfab__role *mlfab__roles_add(mlfab_node *node, const mlfab__role *row,
                                              size_t bytes);
MLFAB__INTERNAL void mlfab__roles_list(mlfab_node *node);
/* The role's way to its peers of this kind. */
MLFAB__INTERNAL mlfab__port mlfab__roles_port(mlfab_node *node, const mlfab__role *role, int kind);
MLFAB__INTERNAL void mlfab__roles_free(mlfab_node *node);

/* As the functions of mlfab__role, of all roles on links of this kind. frame: gives the link up when nobody
 * takes it. hello: the first error. */
MLFAB__INTERNAL void mlfab__roles_frame(mlfab_node *node, uint32_t link,
                                        const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__roles_hello(mlfab_node *node, int kind, uint32_t peer,
                                       mlfab__greeting *greeting);
MLFAB__INTERNAL void mlfab__roles_up(mlfab_node *node, int kind, uint32_t peer,
                                     mlfab__greeting *greeting);
MLFAB__INTERNAL void mlfab__roles_lost(mlfab_node *node, int kind, uint32_t peer);
MLFAB__INTERNAL void mlfab__roles_gone(mlfab_node *node, int kind, uint32_t peer, int left);
MLFAB__INTERNAL int mlfab__roles_want(const mlfab_node *node, int kind, uint32_t peer);
/* The bulk with this token, role included, came back from a transport. */
MLFAB__INTERNAL void mlfab__roles_returned(mlfab_node *node, int kind, uint32_t peer,
                                           uint64_t token);
MLFAB__INTERNAL void mlfab__roles_withdraw(mlfab_node *node, mlfab__request *request, int code);
/* Tells all roles that this worker takes no further part. May others want something of one at any time? */
MLFAB__INTERNAL void mlfab__roles_leave(mlfab_node *node);
MLFAB__INTERNAL void mlfab__roles_finish(mlfab_node *node);
MLFAB__INTERNAL int mlfab__roles_finished(const mlfab_node *node);
MLFAB__INTERNAL int mlfab__roles_serve(const mlfab_node *node);
/* Tells all roles what this host's links carry. */
MLFAB__INTERNAL void mlfab__roles_capacity(mlfab_node *node, double in, double out);

/* --- outbox.c: what is sent next --- */

/* Fills node->frame with what this link is to send next; the meta lies in node->head. 1, or 0. It was taken:
 * the state of whoever yielded it moves on. */
MLFAB__INTERNAL int mlfab__outbox_yield(mlfab_node *node, uint32_t index);
MLFAB__INTERNAL void mlfab__outbox_taken(mlfab_node *node);

/* --- claim.c: heartbeats, and numbers that two processes want --- */

MLFAB__INTERNAL void mlfab__node_dispatch(mlfab_node *node, uint32_t index,
                                          const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__claim_heartbeat(mlfab_node *node, uint32_t index, uint32_t kind,
                                            uint64_t sent_ns);
/* Asks the process at the other end whether it lives, unless that is being asked. */
MLFAB__INTERNAL void mlfab__claim_probe(mlfab_node *node, uint32_t index);
/* Does the process that said this on a new link get a number whose link is `holder`? 1 at once: nobody
 * has it, or the same process (its old link still stands). 0: it waits, or was refused. */
MLFAB__INTERNAL int mlfab__claim_ask(mlfab_node *node, uint32_t index, uint32_t holder,
                                     uint64_t nonce, const mlfab__frame_in *frame);
/* Claims whose number is free, or another's by now, are heard anew. */
MLFAB__INTERNAL void mlfab__claim_again(mlfab_node *node);
/* A probe that nobody answers for long. */
MLFAB__INTERNAL void mlfab__claim_scan(mlfab_node *node, uint32_t index);
/* Is the node at the other end driven by hand, as far as anybody knows? */
MLFAB__INTERNAL int mlfab__claim_is_hand(const mlfab_node *node, const mlfab__link *link);

/* --- peer_link.c: links between workers --- */

/* The link to this worker's node is wanted. */
MLFAB__INTERNAL void mlfab__peer_link_want(mlfab_node *node, uint32_t rank);
/* Server 0: WHERE on this link is answered. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__peer_link_where(mlfab_node *node, uint32_t link,
                                           const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__peer_link_there(mlfab_node *node, const mlfab__member *there);
/* Our call came through (1, or 0 when it is not wanted any more), or failed. */
MLFAB__INTERNAL int mlfab__peer_link_up(mlfab_node *node, uint64_t rank, uint32_t link);
MLFAB__INTERNAL void mlfab__peer_link_failed(mlfab_node *node, uint64_t rank);
/* MEET came on a new link. */
MLFAB__INTERNAL void mlfab__peer_link_meet(mlfab_node *node, uint32_t link,
                                           const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__peer_link_frame(mlfab_node *node, uint32_t link,
                                            const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__peer_link_down(mlfab_node *node, const mlfab__link *was, uint32_t link,
                                           const char *why);
MLFAB__INTERNAL void mlfab__peer_link_scan(mlfab_node *node);

/* --- inner.c: links inside the node --- */

/* A pair of links. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__inner_pair(mlfab_node *node, uint32_t which, int asking,
                                      uint32_t asking_peer, int other, uint32_t other_peer);
/* The pair stands: its roles greet each other; `fresh`: for the first time. */
MLFAB__INTERNAL void mlfab__inner_greet(mlfab_node *node, uint32_t which, int fresh);
/* All pairs, after they broke. */
MLFAB__INTERNAL void mlfab__inner_greet_again(mlfab_node *node);
/* They broke, for want of memory: the roles forget what was under way. */
MLFAB__INTERNAL void mlfab__inner_lose(mlfab_node *node);
/* The links to this node's own server role. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__inner_begin(mlfab_node *node);
/* Carries what the roles of this node have for each other. */
MLFAB__INTERNAL void mlfab__inner_run(mlfab_node *node);

/* --- server_link.c: our ways to servers --- */

/* Does a role of this node use the route? */
MLFAB__INTERNAL int mlfab__server_link_wanted(const mlfab_node *node, uint32_t route);
MLFAB__INTERNAL void mlfab__server_link_call(mlfab_node *node, uint32_t route);
/* A server answers our call: says who we are. The call came to nothing. */
MLFAB__INTERNAL void mlfab__server_link_up(mlfab_node *node, uint32_t route, uint32_t link);
MLFAB__INTERNAL void mlfab__server_link_failed(mlfab_node *node, uint32_t route, const char *why);
MLFAB__INTERNAL void mlfab__server_link_frame(mlfab_node *node, uint32_t link,
                                              const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__server_link_down(mlfab_node *node, const mlfab__link *was,
                                             uint32_t link, const char *why);
/* Opens the link to another server's server role, or to our own, where there is none. */
MLFAB__INTERNAL void mlfab__server_link_across(mlfab_node *node, uint32_t server);
MLFAB__INTERNAL void mlfab__server_link_scan(mlfab_node *node, uint32_t route);
/* Looks whether every server has greeted us: then the node is ready. */
MLFAB__INTERNAL void mlfab__server_link_check(mlfab_node *node);
/* Opens the ways to all servers. */
MLFAB__INTERNAL void mlfab__server_link_begin(mlfab_node *node);
/* The last error names a server that "is dead": says what it died of, too. */
MLFAB__INTERNAL void mlfab__server_link_say_why(mlfab_node *node);

/* --- caller.c: who calls our server role --- */

/* Memory. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__caller_init(mlfab_node *node);
/* HELLO on a new link. */
MLFAB__INTERNAL void mlfab__caller_hello(mlfab_node *node, uint32_t link,
                                         const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__caller_frame(mlfab_node *node, uint32_t link,
                                         const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__caller_down(mlfab_node *node, const mlfab__link *was, uint32_t link,
                                        const char *why);
/* A worker is gone for good, or until it calls again. */
MLFAB__INTERNAL void mlfab__caller_gone(mlfab_node *node, uint32_t worker, int left);
/* The workers have their time to call from now on. One without a link is dead when that is over. */
MLFAB__INTERNAL void mlfab__caller_await(mlfab_node *node);
MLFAB__INTERNAL void mlfab__caller_scan(mlfab_node *node, uint32_t worker);

/* --- bootstrap.c: joining --- */

/* The secret's 128 bits, zeros for an empty text. Errors: CONFIG. */
MLFAB__INTERNAL int mlfab__secret_parse(const char *text, uint64_t secret[2]);
MLFAB__INTERNAL void mlfab__bootstrap_start(mlfab_node *node);
/* A joining link is up; a connect with a joining token failed, or the link is down. */
MLFAB__INTERNAL void mlfab__bootstrap_up(mlfab_node *node, uint32_t link);
MLFAB__INTERNAL void mlfab__bootstrap_failed(mlfab_node *node, const char *why);
MLFAB__INTERNAL void mlfab__bootstrap_frame(mlfab_node *node, uint32_t link,
                                            const mlfab__frame_in *frame);
/* A link of a node that joins, or ours, is gone. */
MLFAB__INTERNAL void mlfab__bootstrap_down(mlfab_node *node, const mlfab__link *was, uint32_t link,
                                           const char *why);
MLFAB__INTERNAL void mlfab__bootstrap_tick(mlfab_node *node);
/* Does a node that was welcomed keep its JOIN_IN link for too long? */
MLFAB__INTERNAL int mlfab__bootstrap_overdue(const mlfab_node *node, const mlfab__link *link);

/* --- alive.c: liveness --- */

/* What the transport knows of a link that is suspect. */
MLFAB__INTERNAL void mlfab__alive_probed(mlfab_node *node, uint32_t index, int status);
/* A link's timer: looks, and arms it again. */
MLFAB__INTERNAL void mlfab__alive_scan(mlfab_node *node, uint32_t index);

/* --- node.c: events, time, leaving --- */

/* A node without roles. Then its roles are added; then it begins. mlfab_node_close at any time after.
 * Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__node_make(const mlfab_config *complete, mlfab__env *env,
                                     const char *addresses, uint64_t now_ns, mlfab_node **node_p);
MLFAB__INTERNAL void mlfab__node_begin(mlfab_node *node);
/* Around every call of the API. Enter: whether this node may call now (`worker`: it has to be one);
 * errors as of mlfab_push. Return: keeps the error for mlfab_node_last_error, does what the call has
 * set off, and returns its code. */
MLFAB__INTERNAL int mlfab__node_enter(mlfab_node *node, uint64_t now_ns, int worker,
                                      mlfab_error *error);
MLFAB__INTERNAL int mlfab__node_return(mlfab_node *node, int code, const mlfab_error *error);
/* A scheduler of its own: every server has closed or died. */
MLFAB__INTERNAL int mlfab__node_finished(const mlfab_node *node);
/* The worker role says goodbye, the server role stays until mlfab_node_leave. */
MLFAB__INTERNAL void mlfab__node_stop_working(mlfab_node *node, uint64_t now_ns);

#endif
