/* node.h - a node: its links, joining, liveness. A beat is the heartbeat interval. The roles of a node do its work; the
 * node knows them only through their table (role.h).
 *
 * A link is a transport's connection with a purpose:
 *
 *    NEW      another node called this one. Its first frame tells the kind: JOIN -> JOIN_IN,
 *             HELLO -> WORKER, SCHEDULER, RESHARD_IN or VOTER_IN, MEET -> PEER_IN
 *    CLAIM    the caller asks for a number that another process has: see Numbers
 *    JOIN_IN  at server 0: from a node that joins, until that node has its WELCOME and hangs up
 *    JOIN_OUT from this node to server 0, to join; closed when WELCOME has arrived
 *    SERVER   from our worker role to a server: HELLO, HELLO_ACK, then all other frames
 *    WORKER   from a worker to our server role
 *    PLANNER  from our scheduler role to a server: HELLO, HELLO_ACK, plans; SCHEDULER: its other end
 *    PEER     from our worker role to another worker's node; PEER_IN: its other end. See peer_link.c
 *    RESHARD  from our server role to another server, to move slices: HELLO, HELLO_ACK, the orders
 *             of server 0 and the answers to them, slices; RESHARD_IN: its other end. One link per
 *             direction; only HELLO_ACK goes back. Opened on demand, and kept
 *    VOTER    between the copies of a server and the scheduler; VOTER_IN: its other end. See copies.h
 *
 * Roles of one node talk to each other over pairs of links that no transport sees. Such a link stands until the
 * node closes, and a HELLO from outside cannot replace it. Each link has a queue of control frames; roles keep
 * frames with a bulk (port.h). When a role has returned (role.h), a link that it dropped closes at once, and loses its
 * queue.
 *
 * Strangers. A caller has to show the job in its first frame, and to prove the key in a fabric with a key (guard
 * below). Until then it learns only the reason of a refusal: neither the job (the header omits its hash) nor that a
 * node lives here (no heartbeats). At most nodes + 64 incoming links that no role knows yet (NEW, CLAIM) exist: a newer
 * link displaces the oldest. A NEW link ends after 5 beats of silence, and with a key at the latest 2 s after the call.
 * A CLAIM ends when it is decided. There is one JOIN_IN link per node id: a newer link of the same process replaces it.
 * It ends when its node is silent, or 20 beats after WELCOME was due.
 *
 * Restarts. The name of a job may contain the number of times that its launcher has started it again
 * (mlfab__job_restarts). Processes of two starts of one job belong to different jobs, but one of them is late:
 *
 *    first frame of an older start --> it is refused, FENCED
 *    first frame of a newer start  --> this node ends (mlfab__node_crash), FENCED; the caller calls again, until its deadline
 *
 *  (1) So no process of a start takes part in another one, and the address of server 0 becomes free for the newest.
 *  (2) In a fabric with a key only a process that has proved the key is heard.
 *
 * Numbers. A process identifies itself by a nonce that it draws when it opens. A process that says JOIN or HELLO
 * for a number whose link another process holds makes a claim, and waits. The node probes the holder with a heartbeat
 * that the holder has to answer (BEAT_PROBE, BEAT_ANSWER):
 *
 *    first frame --no link, or the same process, whose old link is closed--> admitted at once
 *         |
 *         +--another process has it--> CLAIM, probe --the holder answers--> refused, RANK_TAKEN
 *                                     |--the holder's link ends--> the first frame is handled again
 *                                     |--5 beats, hand-driven holder: it may compute--> RANK_TAKEN
 *                                     |--5 beats, any other holder--> its link is closed, as above
 *                                     +--the caller hangs up--> forgotten; the probe after 7 beats
 *
 *  (1) A holder that answers keeps its number. Only the answer to the probe counts: other frames may come from before
 *      its death.
 *  (2) The node sends a holder one probe at a time, on behalf of all claims to its number.
 *  (3) The node sends nothing on a CLAIM link until it decides the claim, after 5 beats at most.
 *  (4) A process that calls again does not wait.
 *  (5) At server 0 two kinds of processes have a number and no link. Server 0 calls a dedicated server when another
 *      process says JOIN for its number; a welcomed process has 5 beats to say HELLO. Until that is decided server 0
 *      hangs up on the other process, which calls again.
 *
 * Admission. A node checks the identity in a first frame. Server 0 knows the incarnation and nonce of every node from
 * JOIN; the other nodes know those of the servers from WELCOME. They learn those of workers and of a separate scheduler
 * from HELLO: a greater incarnation is a newer process. They cannot detect an incarnation that server 0 has not issued.
 *
 * Closing. A node that leaves says BYE, keeps reading, and waits until the peer has seen the BYE and hangs up (both do
 * so if both leave). Else a BYE could be lost in a transport's send buffer, or destroyed by frames that the peer sends
 * meanwhile. No node waits for a hand-driven peer, or on links whose end does not mean death (between workers, between
 * servers). If a send finds that the peer has gone, the peer's BYE may still be unread: the node offers that link no
 * more frames until DOWN.
 *
 * Liveness: a node sends a heartbeat on a link if it has sent no other frame there for a beat. A link is in one of
 * these states:
 *
 *    HEARD     a byte came less than 3 beats ago. After 1.5 beats without a frame the node asks the transport at
 *              every look (MLFAB_ACTION_PROBE) for bytes of an incomplete frame: they count, since a slow link takes
 *              long for a frame, and heartbeats wait behind it
 *    SUSPECT   no byte came for 3 beats. The same question tells whether the peer's system answers
 *              -> HEARD with the next byte, LOST
 *    LOST      closed: (a) for 5 beats neither a byte nor an answered probe came; or (b) no byte came
 *              for silent_death_ns; or (c) bytes came for silent_death_ns, and no whole frame
 *
 * So a peer that is stopped or gets no processor time has silent_death_ns. A peer whose host is gone, or whose
 * transport cannot probe, has 5 beats. (a) and (b) hold for links of every kind, except:
 *  - a hand-driven peer: (b) does not apply, and (a) only if the transport can probe. Between workers the node cannot
 *    tell whether the peer is hand-driven: such a link is opened again;
 *  - a link that is closing, a NEW link, and a server's link to its scheduler: closed after 5 beats of silence (from
 *    our BYE on). This loses nothing: without a scheduler, servers grant updates first come, first served;
 *  - a holder whose number is claimed: 5 beats to answer the probe, even if it may be silent for longer otherwise.
 *
 * Pauses. A node that is called 3 beats after its deadline did not run meanwhile: it or its machine was stopped
 * (Ctrl-Z) or frozen (docker pause). Its peers may have been paused with it, so their silence proves nothing:
 *
 *    AWAKE --called late--> suspicion starts anew: every peer counts as heard now --> AWAKE
 *      ^ \--called late again, before it was awake for silent_death_ns--> the pause counts as one beat of silence --\
 *      \-----------------------------------------------------------------------------------------------------------/
 *
 *  (1) Every stamp from which a silence is counted moves: stamps of links, callers, routes, claims and offers here,
 *      stamps of roles in mlfab__role.awake. mlfab__later moves a stamp.
 *  (2) The lease of a copy does not move: another copy may serve since (../replica/vote.h). Deadlines of requests do
 *      not move either.
 *  (3) A node that runs rarely, because its user drives it or its processor is busy, still notices the dead, after few
 *      looks.
 *
 * Pacing. On a slow link a heartbeat, or a vote, must not wait behind bulks for long. So the node measures how many
 * bytes a link takes in a beat. It bounds the bulk of a frame (mlfab__port_chunk), and the sum of bulks that have not
 * left:
 *
 *    FREE --a frame with a bulk and a token is handed over--> TIMED: a fourth of a beat of bulk may follow --it has left-->
 *    FREE, with a new measurement: the bytes up to that frame, and the time that they took
 *
 * A smaller measurement holds at once. A larger measurement counts as at most twice the last. So the first frame of a
 * link goes alone, and a fast link has no bounds after it. A link inside the host has none.
 *
 * Timers. Every deadline of links, workers and routes is a timer in one heap. A timer is armed when its subject begins
 * (a link stands, a worker's link broke); frames do not postpone it. When a timer expires, the node checks the frames
 * heard and sent since, and acts if necessary. Then it arms the timer again for the earliest time of a possible action.
 * Times are rounded up to a quarter of a beat since the node was opened, so that the timers of many links expire
 * together. The timer SCAN is armed only while a role, or a link between workers, waits for an event. Requests and
 * roles report their own deadlines.
 *
 * A broken link is not yet a death: the worker calls again. A server declares it dead if it has not called for 2
 * beats (5 if hand-driven, or with replicas). We declare a server dead if no link to it stood for 5 beats (20 with
 * replicas). Both times start at the break, whatever silence came before: this node itself may have been stopped. After
 * a silence under (a) or (b) the death follows at once, except for a server with replicas.
 *
 * Files, lowest first: link.c (links, their queues and timers, actions); role.c (calls the roles); files.c (operations
 * on files); outbox.c (the next frame to send); claim.c (heartbeats, Numbers, dispatch); peer_link.c (links between
 * workers); growth.c (servers that come and go); server_link.c (routes to servers); inner.c (links inside the node);
 * caller.c (callers of our server role); scheduler_link.c (links to the scheduler); bootstrap.c (joining); copies.c and peers.c (servers with replicas: copies.h);
 * alive.c (Liveness); node.c (events, time, leaving). Lower files call higher files through the rules of link kinds, a
 * table in node.c, and mlfab__copies_table. */
#ifndef MLFAB__NODE_H
#define MLFAB__NODE_H

#include "../../mlfab_node.h"
#include "../base/heap.h"
#include "../base/map.h"
#include "../base/rng.h"
#include "role.h"

#define MLFAB__NO_LINK 0xffffffffu

enum {
  MLFAB__ROLES_MAX = 16, /* per node: four bits of a token hold the number of the role */
  MLFAB__OUTLETS = 32,   /* ports of all its roles */
  MLFAB__FILERS = 4      /* streams of file operations of all its roles */
};
#define MLFAB__ROLE_SHIFT 60         /* of a token: the bits from here on hold the role */
#define MLFAB__ROLE_VOTER (1u << 16) /* in HELLO, beside MLFAB_ROLE_* */

/* Pairs of links inside a node. */
enum {
  MLFAB__PAIR_SERVER,
  MLFAB__PAIR_PLANNER,
  MLFAB__PAIR_PEER,
  MLFAB__PAIR_RESHARD,
  MLFAB__PAIRS
};

struct mlfab__session; /* ../keys/session.h */

struct mlfab__mirrored; /* mirrored.h */

/* Copies of a server: the server of the configuration, and its replica. */
enum { MLFAB__COPIES = 2, MLFAB__HALT_BEATS = 20 /* no copy serves: the server is dead */ };

enum { MLFAB__PAUSE_BEATS = 3 /* see Pauses */ };

/* The reason why a link was closed: silence, or a reason that the peer has told. */
enum { MLFAB__ENDED_SILENT = 1, MLFAB__ENDED_TOLD = 2 };

/* The WELCOME that is due: the fabric begins, or it has begun before. A crash: a role has asked for it; all links are
 * down. The roles that part: the worker's, or all. */
enum { MLFAB__WELCOME_FIRST = 1, MLFAB__WELCOME_AGAIN = 2 };
enum { MLFAB__CRASH_ASKED = 1, MLFAB__CRASH_DONE = 2 };
enum { MLFAB__PARTS_WORKER = 1, MLFAB__PARTS_ALL = 2 };

/* See Pacing. */
typedef struct mlfab__pace {
  uint64_t per_beat;     /* bytes that the link takes in a beat; 0: not measured yet */
  uint32_t handed, left; /* numbers of frames with a bulk and a token: handed over; left */
  uint32_t blind;        /* large bulks have no token: measuring is impossible */
  uint32_t timed;        /* number of the timed frame (counted as `handed`); 0: none */
  uint64_t since_ns;     /* time at which it was handed over, ... */
  uint64_t upto, behind; /* ... bulk up to its end that had not left, and bulk behind it */
} mlfab__pace;

typedef struct mlfab__link {
  uint8_t kind;
  uint8_t self;             /* one end of a pair inside this node: 1 + its bit in self_due */
  uint8_t greeted;          /* HELLO was answered */
  uint8_t blocked;          /* a send was refused: wait for WRITABLE */
  uint8_t listed;           /* in the ready list */
  uint8_t closing;          /* close when the control queue is empty; incoming frames are ignored */
  uint8_t lingers;          /* likewise, but the peer closes first, after it has read our BYE */
  uint8_t doomed;           /* to close when the role has returned */
  uint8_t welcome;          /* a WELCOME is due: MLFAB__WELCOME_*, or 0 */
  uint8_t suspect, probing; /* silent for 3 beats; the transport is being asked */
  uint8_t ended;            /* MLFAB__ENDED_* */
  uint8_t called;           /* by another node */
  uint8_t turn; /* among the roles on this kind of link that take turns: the role to ask first */
  uint8_t proven, tagged; /* in a fabric with a key: both ends are proven; frames have tags */
  uint32_t id;            /* the driver's id of the link */
  uint32_t caps;
  uint32_t term; /* Copies: term of the copy that serves at one end, in every frame; 0: none */
  /* rank of a worker (workers: the scheduler), number of a server or of a voter, id of a joining node */
  uint32_t peer;
  uint8_t *queue; /* control frames: u32 meta bytes, u32 type, meta, padded to 8 */
  uint32_t queue_begin, queue_end, queue_room;
  mlfab__pace *pace; /* NULL: before the first bulk, and on links without pacing */
  uint64_t heard_ns, sent_ns;
  uint64_t coming_ns; /* time since which bytes come without a whole frame; 0: none */
  uint64_t up_ns;     /* time of the last answered probe: the peer's system was up */
  uint64_t asked_ns;  /* time of the last question to the transport for such bytes that it denied */
  uint64_t moved_ns;  /* time of the last byte that was not part of a heartbeat */
  uint64_t nonce;     /* of the process at the other end, if it has a number */
  uint64_t probe_ns;  /* time of an unanswered BEAT_PROBE to the peer; else 0 */
  uint64_t since_ns;  /* NEW: time at which it came up; JOIN_IN: time at which WELCOME was due */
  /* If not proven yet. Our own call: its token. Called: the number of our nonce, 0 before the challenge. */
  uint64_t pending;
  struct mlfab__session
      *session; /* keys of a link; NULL without a key, and before the proof of a caller */
  /* CLAIM: the link that holds the number (MLFAB__NO_LINK: gone), and the first frame. */
  uint32_t holder;
  uint32_t claim_bytes;
  uint8_t claim_type;
  uint8_t *claim;
} mlfab__link;

/* A caller of our server role: a worker, or the scheduler. */
typedef struct mlfab__caller {
  uint32_t link; /* index, or MLFAB__NO_LINK */
  uint32_t incarnation;
  uint8_t hand, dead, left;
  uint64_t heard_ns; /* kept while there is no link */
  uint64_t lost_ns;  /* time at which its link broke; 0 while it has one */
} mlfab__caller;

/* Server 0's record of another node, by node id. */
typedef struct mlfab__peer {
  uint8_t joined, hand;
  uint8_t fresh; /* present when the fabric was formed, and not replaced since */
  uint32_t link; /* index: JOIN_IN */
  uint32_t incarnation;
  uint64_t nonce;
  uint8_t added;   /* a server that joined the running fabric */
  uint32_t leaves; /* incarnation of a server that has gone and that nobody misses; else 0 */
  /* A free number: time of its offer, and the process that it was offered to; 0: not offered. */
  uint64_t offered_ns, offered_to;
  /* Time since which HELLO is awaited after WELCOME. Dedicated server: time at which server 0 called it
   * because another process claims its number. 0: neither. */
  uint64_t awaited_ns;
  char *addresses; /* MLFAB__ADDRESSES_MAX, or NULL */
} mlfab__peer;

/* Links between workers: peer_link.c fills the table, and is a role. */
typedef struct mlfab__between {
  /* MEET came on a new link. */
  void (*meet)(mlfab_node *node, uint32_t link, const mlfab__frame_in *frame);
  /* Our call to this worker's node: its address; it succeeded (0: it is no longer wanted); it failed. */
  const char *(*address)(const mlfab_node *node, uint64_t rank);
  int (*up)(mlfab_node *node, uint64_t rank, uint32_t link);
  void (*failed)(mlfab_node *node, uint64_t rank, const char *why);
  uint32_t (*link_to)(const mlfab_node *node, int kind, uint32_t peer);
} mlfab__between;

/* The place of a server, as told by WELCOME or MEMBER. */
typedef struct mlfab__place {
  uint8_t vacant; /* no process has the number */
  uint8_t moved;  /* another process than WELCOME told has it; address not known yet */
  /* Its incarnation is that which server 0 gave to the server when it joined; 0: not known yet. */
  mlfab__member_info info;
} mlfab__place;

/* A path of our worker, scheduler or server role to a server. */
typedef struct mlfab__route {
  uint32_t link; /* index, or MLFAB__NO_LINK */
  uint8_t connecting, dead, greeted;
  uint8_t copy;  /* copy of the server that is called, or was called last */
  uint8_t vain;  /* calls before the first greeting that ended before a frame came */
  uint32_t term; /* the largest term that a copy of this server has told */
  uint64_t retry_ns, heard_ns, connect_ns;
  char why[200];  /* the last failure */
  char other[96]; /* the last failure of the other copy */
  char died[128]; /* dead: the cause */
} mlfab__route;

enum mlfab__bootstrap_phase {
  MLFAB__BOOTSTRAP_JOINING,
  MLFAB__BOOTSTRAP_GREETING,
  MLFAB__BOOTSTRAP_READY,
  MLFAB__BOOTSTRAP_FAILED
};

/* Timers. At equal times they expire in this order: node_expire has their functions. */
enum mlfab__timer {
  MLFAB__TIMER_JOIN,
  MLFAB__TIMER_LINK,   /* one per link */
  MLFAB__TIMER_WORKER, /* at a server: one per worker without a link */
  MLFAB__TIMER_ROUTE,  /* one per route without a link */
  MLFAB__TIMER_SCAN
};

typedef struct mlfab__queued_action {
  uint32_t kind, link;
  uint64_t token;
} mlfab__queued_action;

/* The functions of the node for links of one kind. */
typedef struct mlfab__link_rule {
  void (*frame)(mlfab_node *node, uint32_t link, const mlfab__frame_in *frame);
  /* A link is gone: `was` is a copy of it; another link may reuse its index. */
  void (*down)(mlfab_node *node, const mlfab__link *was, uint32_t link, const char *why);
  /* A role wants a link to this peer, and none exists. */
  void (*want)(mlfab_node *node, uint32_t peer);
} mlfab__link_rule;

/* A role's path to its peers of one kind: `self` of its port. */
typedef struct mlfab__outlet {
  mlfab_node *node;
  uint32_t role;
  int kind;
} mlfab__outlet;

/* Functions of a fabric with a key for links that a transport sees. NULL functions: none. */
typedef struct mlfab__guard {
  /* Our call is up. The function calls mlfab__node_call_up when both ends are proven, or closes the link. */
  void (*call)(mlfab_node *node, uint32_t link, uint64_t token);
  /* Returns 1: the frame comes from a proven end, go on; 0: it was taken or refused, and the link may be gone. */
  int (*frame)(mlfab_node *node, uint32_t link, const mlfab_io_event *event,
               const mlfab__header *header);
  /* The header of an incomplete frame came (MLFAB_IO_HEAD). The link may be gone afterwards. */
  void (*head)(mlfab_node *node, uint32_t link, const mlfab_io_event *event);
  /* Writes the text for a link on which bytes came that differ from those that the peer sent. */
  void (*altered)(const mlfab_node *node, const mlfab__link *link, char *text, size_t room);
  /* Puts code and tag into a frame for a tagged link. sent: a transport has taken it. */
  void (*seal)(const mlfab__link *link, uint8_t *head, uint32_t head_bytes, const void *bulk,
               uint32_t bulk_bytes);
  void (*sent)(mlfab__link *link);
  /* end: wipes and frees the session of a link. The next: the node's keys. */
  void (*end)(mlfab_node *node, mlfab__link *link);
  void (*free)(mlfab_node *node);
} mlfab__guard;

/* A node's file operations: files.c. */
typedef struct mlfab__files_table {
  /* op: the operation of an action. The others: an operation has ended; the driver did not begin one. */
  const mlfab_file_op *(*op)(mlfab_node *node, uint64_t token);
  void (*event)(mlfab_node *node, const mlfab_io_event *event);
  void (*refused)(mlfab_node *node, uint64_t token, int status);
} mlfab__files_table;

/* A fabric whose servers have replicas: copies.c. */
typedef struct mlfab__copies_table {
  /* Makes node->replica, and counts routes and places. Errors: MEMORY. free: frees it. */
  int (*open)(mlfab_node *node);
  void (*free)(mlfab_node *node);
  /* The voter of a route; voters' routes stand behind all others. */
  uint32_t (*voter)(const mlfab_node *node, uint32_t route);
  /* Adds a part of a server that both copies have: mirrored.h. */
  void (*mirrored)(mlfab_node *node, const struct mlfab__mirrored *part);

  /* Callers. hello: 1 if a voter sent it, or it was turned away. newer: compares this term of a server with the last;
   * 1: larger, 0: equal, -1: smaller, and turned away. issued: server 0's record of the sender may be missing.
   * answered: HELLO_ACK was sent. */
  int (*hello)(mlfab_node *node, uint32_t link, const mlfab__hello *hello,
               const mlfab__frame_in *frame);
  int (*newer)(mlfab_node *node, uint32_t link, mlfab__route *route, uint32_t term);
  void (*issued)(const mlfab_node *node, mlfab__peer *peer, const mlfab__hello *hello);
  void (*answered)(mlfab_node *node, uint32_t link);
  /* member: a worker's MEMBER; 0, or an error. changed: the record of this node may have changed. */
  int (*member)(mlfab_node *node, uint32_t link, const mlfab__frame_in *frame);
  void (*changed)(mlfab_node *node, uint32_t id);
  /* May this worker, which has no link, be declared dead? */
  int (*judges)(mlfab_node *node, mlfab__caller *caller);

  /* Routes. toggle: the next call goes to the other copy. greeted: HELLO_ACK came; returns 0 if its copy was replaced.
   * place: PLACE came; errors: FRAME. why: reasons of both copies. admitted: is this node ready, as far as voters are
   * concerned? */
  void (*toggle)(mlfab_node *node, uint32_t route);
  int (*greeted)(mlfab_node *node, uint32_t link, mlfab__route *route, const mlfab__hello_ack *ack);
  int (*place)(mlfab_node *node, const mlfab__frame_in *frame);
  void (*why)(const mlfab__route *route, char text[128]);
  int (*admitted)(const mlfab_node *node);

  /* Joining. judge: judges a JOIN of `who`, as bootstrap_compare. rejects: returns 1 if the node with this id (NO_NODE:
   * not known yet) has to call again. welcome: WELCOME is due to that node. welcomed: this node got WELCOME. */
  int (*judge)(const mlfab_node *node, const mlfab__join *join, const char *who, char *text,
               size_t room);
  int (*rejects)(mlfab_node *node, uint32_t link, uint32_t id);
  void (*welcome)(mlfab_node *node, uint32_t id);
  void (*welcomed)(mlfab_node *node);
} mlfab__copies_table;

/* Processes that come while the fabric runs, if they may: growth.h. */
typedef struct mlfab__growth {
  /* asks: a process without a number asks server 0 for one. told: server 0's answer to this process. */
  void (*asks)(mlfab_node *node, uint32_t link, const mlfab__join *ask);
  void (*told)(mlfab_node *node, uint32_t link, const mlfab__frame_in *frame);
  /* Server 0. spares: can the fabric spare the state of this server? came: another process has taken the number of such
   * a server. left: the process with this incarnation has gone and is spared; for roles, from `settle` on. */
  int (*spares)(const mlfab_node *node, uint32_t server);
  void (*came)(mlfab_node *node, uint32_t server);
  void (*left)(mlfab_node *node, uint32_t server, uint32_t incarnation);
  void (*settle)(mlfab_node *node);
  /* Server 0: sets `counts`, which tells whether the fabric would miss the state of a server. Without it: yes. */
  void (*judge)(mlfab_node *node, int (*counts)(void *self, uint32_t server), void *self);
  /* Does this server hold part of the model? An added server does only while it has slices. */
  int (*holds)(const mlfab_node *node, uint32_t server);
  /* tell: informs the node at the other end of this link. member: server 0 reports that a server has joined the running
   * fabric (JOINED), or has gone and is not missed (LEFT). known: the list of servers is complete. */
  void (*tell)(mlfab_node *node, uint32_t link);
  void (*member)(mlfab_node *node, const mlfab__member *member);
  void (*known)(mlfab_node *node);
  void (*free)(mlfab_node *node);
} mlfab__growth;

struct mlfab__parts; /* the parts of a node, defined in a higher layer */

struct mlfab_node {
  mlfab__env env;
  mlfab_config config; /* complete; `workers` is workers_max, and `servers` servers_max */
  uint32_t founders;   /* workers that the fabric begins with: the lowest ranks */
  uint32_t founding;   /* servers that it begins with: the lowest numbers */
  int running;         /* the fabric had begun when this node joined */
  int added;           /* this server joined the running fabric */
  const struct mlfab__growth *growth; /* NULL: nobody comes later */
  struct mlfab__growing *growing;     /* its state */
  mlfab_stats stats;
  mlfab__requests requests;
  uint64_t job;      /* hash of its name without restarts, plus the restarts: see Restarts */
  uint32_t restarts; /* number of restarts of the job by its launcher */
  const struct mlfab__tap *tap; /* observer of this node (tap.h), or NULL */
  /* Shows it a frame. sender: the incarnation of the sender. */
  void (*show)(const mlfab_node *node, const mlfab__link *link, int out, uint32_t sender,
               const mlfab__frame_in *frame);
  const mlfab__guard *guard; /* NULL: no key */
  void *guard_self;
  uint32_t id, nodes, incarnation, epoch;
  uint32_t server_number; /* or MLFAB__NO_NODE */
  uint32_t voter;         /* this node's number among the voters, or MLFAB__NO_NODE */
  uint32_t term;          /* a serving copy: term of its record when it began to serve */
  int fresh;              /* as in WELCOME */
  uint64_t fabric;        /* as in WELCOME */
  int is_worker, is_server, is_coordinator, is_scheduler;
  int is_replica, standby;           /* standby: a copy that does not serve */
  const mlfab__copies_table *copies; /* NULL: servers have no replicas */
  struct mlfab__copies *replica;     /* copies.h */
  int ended;                         /* the copy that serves has closed */
  int crashes;                       /* MLFAB__CRASH_*, or 0 */
  mlfab__role roles[MLFAB__ROLES_MAX];
  uint32_t nroles;
  uint32_t noutlets;
  /* Roles by kind of link; among them, the roles that send on it. */
  uint8_t on[MLFAB__LINK_KINDS][MLFAB__ROLES_MAX], non[MLFAB__LINK_KINDS];
  /* index into `on`: the first role to ask for a frame type */
  uint8_t first[MLFAB__LINK_KINDS][MLFAB__FRAME_TYPES];
  uint8_t senders[MLFAB__LINK_KINDS][MLFAB__ROLES_MAX], nsenders[MLFAB__LINK_KINDS];
  uint8_t nurgent[MLFAB__LINK_KINDS]; /* number of the first `senders`, which do not take turns */
  uint8_t settles[MLFAB__ROLES_MAX], idles[MLFAB__ROLES_MAX]; /* roles with the function */
  uint8_t out_turn; /* OUT_ROLE: the value of the link's `turn` once the frame is taken */
  uint32_t nsettles, nidles;
  struct mlfab__filer *filers;     /* the newest stream first; they belong to roles */
  const mlfab__files_table *files; /* NULL: no role has a stream */
  mlfab__outlet outlets[MLFAB__OUTLETS];
  mlfab__link_rule rules[MLFAB__LINK_KINDS];
  /* HELLO of the scheduler came on a new link: scheduler_link.c. NULL: there is no scheduler. */
  int (*scheduler_hello)(mlfab_node *node, uint32_t link, const mlfab__hello *hello,
                         const mlfab__frame_in *frame);
  struct mlfab__parts *parts; /* parts_bytes long, freed with the node; opaque here */
  size_t parts_bytes;
  char addresses[MLFAB__ADDRESSES_MAX];
  /* Joining. */
  enum mlfab__bootstrap_phase phase;
  mlfab_error failure;
  uint64_t opened_ns, join_retry_ns, missing_ns, nonce;
  uint64_t asleep_ns; /* Pauses: their sum so far; */
  uint64_t anew_ns;   /* the awake time after which suspicion may start anew next */
  uint32_t join_link;
  int meets;                          /* this node is server 0, and the fabric is formed here */
  int join_other;                     /* the next call is to the replica of server 0 */
  uint32_t join_ports, join_turns[2]; /* ports of the called address; calls of each */
  int join_said;                      /* a process at one of the ports has told a reason against */
  uint32_t join_vain; /* calls since the last frame that were answered, and ended without one */
  char join_address[256];
  int join_connecting;
  uint32_t joined, incarnations; /* server 0: nodes that have joined; largest incarnation issued */
  char join_why[160], missing[128];
  const char *strange; /* the reason why the last stranger was refused, or NULL */
  uint64_t misfits; /* processes with other settings than this node; reason of the last refusal */
  char misfit[232];
  uint8_t *welcome;
  uint32_t welcome_bytes, welcome_count;
  mlfab__peer *peers;        /* by node id; server 0 only */
  uint32_t nplaces, nroutes; /* numbers of places and routes */
  mlfab__place *places;      /* by server; then of the replicas; then of the scheduler that votes */
  mlfab__route *routes;      /* by server: the worker role's, the scheduler role's, the server
                                     role's */
  mlfab__caller *callers;    /* by rank, then the scheduler; server role only */
  uint32_t *reshard_links;   /* by server: its link to our server role */
  uint32_t *voter_links;     /* by voter: its link to ours; voters only */
  const mlfab__between *between; /* NULL: no role uses links between workers */
  void *between_self;
  /* Links. */
  mlfab__link *links;
  uint32_t nlinks;
  uint32_t first_free; /* all links before this one are in use */
  mlfab__map by_id;
  /* JOIN, SCAN, one per route, one per worker (server role only), one per link */
  mlfab__heap timers;
  uint32_t *ready; /* ring of link indexes */
  uint32_t ready_begin, ready_count;
  mlfab__queued_action *actions;
  uint32_t actions_begin, actions_count, actions_room;
  uint32_t pairs[MLFAB__PAIRS][2]; /* the asking end and the other end, or MLFAB__NO_LINK */
  int doomed;                      /* some link is doomed */
  uint32_t claims;                 /* number of CLAIM links */
  int closed;                      /* no new call may begin: the context is being closed */
  int claim_due;                   /* some claim has to be handled again */
  uint32_t self_due;               /* bits: ends of pairs that may have frames to carry */
  int self_lost;                   /* the inner links broke */
  int self_more;                   /* inner links have more frames than one run carries */
  /* The last action that was yielded. */
  enum {
    MLFAB__OUT_NONE,
    MLFAB__OUT_CONTROL,
    MLFAB__OUT_WELCOME,
    MLFAB__OUT_ROLE,
    MLFAB__OUT_ACTION
  } out;
  uint32_t out_role; /* OUT_ROLE: the role of the frame */
  uint32_t out_link;
  mlfab__frame_out frame;
  mlfab_action action;
  uint8_t *head; /* 64 + MLFAB_META_MAX */
  uint64_t now_ns;
  /* MLFAB__PARTS_*, or 0. Parting: the node takes no more calls, but finishes work that other workers wait
   * for, until part_ns at most; leaving: it has said BYE. */
  int parting, leaving;
  uint64_t part_ns;
};

/* --- link.c: links, queues, timers, actions --- */

#define MLFAB__TOKEN_JOIN 1u
#define MLFAB__TOKEN_SERVER \
  2u /* + index of the route; after the routes: + rank of the other worker */

/* The heartbeat interval; at most half a second until the fabric is complete, because joining has its own deadline. */
MLFAB__INTERNAL uint64_t mlfab__node_beat(const mlfab_node *node);
/* When a call follows one that has failed. `vain`: so many in a row have met a program that is no node. */
MLFAB__INTERNAL uint64_t mlfab__node_retry(const mlfab_node *node, uint32_t vain);
/* The route for links of this kind to a server; kinds without routes of their own use that of SERVER. The
 * server of a route. */
MLFAB__INTERNAL uint32_t mlfab__node_route_of(const mlfab_node *node, int kind, uint32_t server);
MLFAB__INTERNAL uint32_t mlfab__node_server_of(const mlfab_node *node, uint32_t route);
/* Does a link of this kind lead to a server with a replica, so that the other copy may be called? */
MLFAB__INTERNAL int mlfab__node_has_other(const mlfab_node *node, int kind);
/* The place of the server of a route. */
MLFAB__INTERNAL mlfab__place *mlfab__node_place(const mlfab_node *node, uint32_t route);
/* The node id of a server. The name of a node in messages: "worker 3", "server 1". */
MLFAB__INTERNAL uint32_t mlfab__node_of_server(const mlfab_node *node, uint32_t server);
MLFAB__INTERNAL const char *mlfab__node_name(const mlfab_node *node, uint32_t id, char buffer[32]);
/* Adds an address to a node's list, in front of addresses of the same listener (of the same scheme and port). */
MLFAB__INTERNAL void mlfab__node_add_address(char list[MLFAB__ADDRESSES_MAX], const char *address);
/* Call it if a role cannot go on. When the role has returned, the node hangs up on all links and ends all requests with
 * this error. It then takes no more links, and all calls return the error. */
MLFAB__INTERNAL void mlfab__node_crash(mlfab_node *node, int code, const char *text);
/* Ends joining with this error; no effect if the node is ready or has failed. */
MLFAB__INTERNAL void mlfab__node_fail(mlfab_node *node, int code, int32_t rank, int is_server,
                                      const char *text);
MLFAB__INTERNAL void mlfab__node_emit(mlfab_node *node, uint32_t kind, int32_t rank, int is_server,
                                      uint32_t incarnation, int code, const char *text);

/* The index of a timer in the heap. The earliest time at or after at_ns at which timers expire. */
MLFAB__INTERNAL uint32_t mlfab__node_timer(const mlfab_node *node, enum mlfab__timer kind,
                                           uint32_t index);
MLFAB__INTERNAL uint64_t mlfab__node_round(const mlfab_node *node, uint64_t at_ns);
MLFAB__INTERNAL void mlfab__node_arm_at(mlfab_node *node, enum mlfab__timer kind, uint32_t index,
                                        uint64_t at_ns);
/* Arms a timer for this time, rounded up, but later than now. */
MLFAB__INTERNAL void mlfab__node_arm(mlfab_node *node, enum mlfab__timer kind, uint32_t index,
                                     uint64_t at_ns);

/* Reserves memory for open. Errors: MEMORY. Frees the memory of all links. */
MLFAB__INTERNAL int mlfab__node_reserve(mlfab_node *node);
MLFAB__INTERNAL void mlfab__node_free_links(mlfab_node *node);
/* The link with this driver id, and its index; or NULL. A free entry, or MLFAB__NO_LINK when out of memory. */
MLFAB__INTERNAL mlfab__link *mlfab__node_link(mlfab_node *node, uint32_t id, uint32_t *index_p);
MLFAB__INTERNAL uint32_t mlfab__node_new_link(mlfab_node *node);
MLFAB__INTERNAL void mlfab__node_free_link(mlfab_node *node, uint32_t index);
/* The index of the link of this kind to, or from, this peer, or MLFAB__NO_LINK. */
MLFAB__INTERNAL uint32_t mlfab__node_link_to(const mlfab_node *node, int kind, uint32_t peer);
MLFAB__INTERNAL void mlfab__node_act(mlfab_node *node, uint32_t kind, uint32_t link,
                                     uint64_t token);
MLFAB__INTERNAL void mlfab__node_post(mlfab_node *node, uint32_t link, uint8_t type,
                                      const void *meta, uint32_t bytes);
MLFAB__INTERNAL void mlfab__node_ready_link(mlfab_node *node, uint32_t link);
/* The link's claim is over: it becomes NEW again. */
MLFAB__INTERNAL void mlfab__node_unclaim(mlfab_node *node, mlfab__link *link);
/* Tells the users of a link that it is gone. */
MLFAB__INTERNAL void mlfab__node_link_down(mlfab_node *node, uint32_t index, const char *why);
/* Closes a link, which the transport will not report as DOWN. Only for links that a transport sees. */
MLFAB__INTERNAL void mlfab__node_hang_up(mlfab_node *node, uint32_t index, const char *why);
/* Closes a link when the roles have returned. The second function also logs and counts a breach of the protocol. */
MLFAB__INTERNAL void mlfab__node_doom(mlfab_node *node, uint32_t index);
MLFAB__INTERNAL void mlfab__node_drop(mlfab_node *node, uint32_t index, int code, const char *text);
/* Sends the reason, then closes. Returns `code`. */
MLFAB__INTERNAL int mlfab__node_refuse(mlfab_node *node, uint32_t link, int code, int32_t rank,
                                       const char *text);
MLFAB__INTERNAL int mlfab__node_refuse_as(mlfab_node *node, uint32_t link, enum mlfab__cause cause,
                                          int code, int32_t rank, const char *text);

/* --- role.c: the roles --- */

/* Loops over the roles that have this function: `role` takes each value in turn. */
#define MLFAB__EACH_ROLE(role, node, function)                                                 \
  for (const mlfab__role *role = (node)->roles; role < &(node)->roles[(node)->nroles]; role++) \
    if (role->function)

/* Adds a row, with `bytes` zeroed bytes as its self (0: none yet). Returns NULL only if memory for them is lacking.
 * Rows keep the order in which they were added, and take effect with mlfab__roles_list. */
MLFAB__INTERNAL mlfab__role *mlfab__roles_add(mlfab_node *node, const mlfab__role *row,
                                              size_t bytes);
MLFAB__INTERNAL void mlfab__roles_list(mlfab_node *node);
/* The role's port to its peers of this kind. */
MLFAB__INTERNAL mlfab__port mlfab__roles_port(mlfab_node *node, const mlfab__role *role, int kind);
MLFAB__INTERNAL void mlfab__roles_free(mlfab_node *node);

/* Call the functions of mlfab__role of all roles on links of this kind. frame: drops the link if no role
 * takes the frame. hello: returns the first error. */
MLFAB__INTERNAL void mlfab__roles_frame(mlfab_node *node, uint32_t link,
                                        const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__roles_hello(mlfab_node *node, int kind, uint32_t peer,
                                       mlfab__greeting *greeting);
MLFAB__INTERNAL void mlfab__roles_up(mlfab_node *node, int kind, uint32_t peer,
                                     mlfab__greeting *greeting);
MLFAB__INTERNAL void mlfab__roles_lost(mlfab_node *node, int kind, uint32_t peer);
MLFAB__INTERNAL void mlfab__roles_gone(mlfab_node *node, int kind, uint32_t peer, int left);
MLFAB__INTERNAL int mlfab__roles_want(const mlfab_node *node, int kind, uint32_t peer,
                                      const char *why);
/* Takes a bulk that a transport returned; its token includes the role. */
MLFAB__INTERNAL void mlfab__roles_returned(mlfab_node *node, int kind, uint32_t peer,
                                           uint64_t token);
MLFAB__INTERNAL void mlfab__roles_withdraw(mlfab_node *node, mlfab__request *request, int code);
/* May other nodes need a role at any time? */
MLFAB__INTERNAL int mlfab__roles_serve(const mlfab_node *node);

/* --- outbox.c: the next frame to send --- */

/* Fills node->frame with the next frame for this link; its meta is in node->head. Returns 1, or 0 when
 * there is none. taken: the frame was sent; advances its source. */
MLFAB__INTERNAL int mlfab__outbox_yield(mlfab_node *node, uint32_t index);
MLFAB__INTERNAL void mlfab__outbox_taken(mlfab_node *node);
/* Pacing. left: a frame with a token has left. detached: a loan was taken back, and its report may never come: counting
 * begins anew. chunk: the maximum bulk of a frame. */
MLFAB__INTERNAL void mlfab__outbox_left(mlfab_node *node, uint32_t index);
MLFAB__INTERNAL void mlfab__outbox_detached(mlfab_node *node, uint32_t index);
MLFAB__INTERNAL uint32_t mlfab__outbox_chunk(const mlfab_node *node, const mlfab__link *link);

/* --- claim.c: heartbeats, and numbers claimed by two processes --- */

MLFAB__INTERNAL void mlfab__node_dispatch(mlfab_node *node, uint32_t index,
                                          const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__claim_heartbeat(mlfab_node *node, uint32_t index, uint32_t kind,
                                            uint64_t sent_ns);
/* Sends BEAT_PROBE to the process at the other end if no probe is unanswered. */
MLFAB__INTERNAL void mlfab__claim_probe(mlfab_node *node, uint32_t index);
/* May the sender of this frame, on a new link, have the number of the link `holder`? Returns 0: the number is free, or the
 * holder is an older link of the same process. AGAIN: the sender waits. Other errors: the sender was refused. */
MLFAB__INTERNAL int mlfab__claim_ask(mlfab_node *node, uint32_t index, uint32_t holder,
                                     uint64_t nonce, const mlfab__frame_in *frame);
/* Handles the first frames of claims again if the holder has lost its link. */
MLFAB__INTERNAL void mlfab__claim_again(mlfab_node *node);
/* Acts on a probe that was not answered in time. */
MLFAB__INTERNAL void mlfab__claim_scan(mlfab_node *node, uint32_t index);
/* Is the node at the other end known to be hand-driven? */
MLFAB__INTERNAL int mlfab__claim_is_hand(const mlfab_node *node, const mlfab__link *link);

/* --- inner.c: links inside the node --- */

/* Creates a pair of links. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__inner_pair(mlfab_node *node, uint32_t which, int asking,
                                      uint32_t asking_peer, int other, uint32_t other_peer);
/* Makes the roles of a pair, which stands now, greet each other. fresh: for the first time. */
MLFAB__INTERNAL void mlfab__inner_greet(mlfab_node *node, uint32_t which, int fresh);
/* Greets again over all pairs after a break. */
MLFAB__INTERNAL void mlfab__inner_greet_again(mlfab_node *node);
/* Breaks the inner links, for lack of memory: the roles forget frames under way. */
MLFAB__INTERNAL void mlfab__inner_lose(mlfab_node *node);
/* Creates the links to this node's own server role. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__inner_begin(mlfab_node *node);
/* Carries frames between the roles of this node. */
MLFAB__INTERNAL void mlfab__inner_run(mlfab_node *node);

/* --- server_link.c: routes to servers --- */

/* Does a role of this node use the route? */
MLFAB__INTERNAL int mlfab__server_link_wanted(const mlfab_node *node, uint32_t route);
MLFAB__INTERNAL void mlfab__server_link_call(mlfab_node *node, uint32_t route);
/* A call to a server succeeded: sends HELLO. A call failed. */
MLFAB__INTERNAL void mlfab__server_link_up(mlfab_node *node, uint32_t route, uint32_t link);
MLFAB__INTERNAL void mlfab__server_link_failed(mlfab_node *node, uint32_t route, const char *why);
MLFAB__INTERNAL void mlfab__server_link_frame(mlfab_node *node, uint32_t link,
                                              const mlfab__frame_in *frame);
/* Does a process have this number, as far as this node knows? */
MLFAB__INTERNAL int mlfab__server_link_here(const mlfab_node *node, uint32_t server);
MLFAB__INTERNAL void mlfab__server_link_down(mlfab_node *node, const mlfab__link *was,
                                             uint32_t link, const char *why);
/* Opens the link to the server role of another server, or to our own, if there is none. */
MLFAB__INTERNAL void mlfab__server_link_across(mlfab_node *node, uint32_t server);
MLFAB__INTERNAL void mlfab__server_link_scan(mlfab_node *node, uint32_t route);
/* Makes the node ready if every server has answered HELLO. */
MLFAB__INTERNAL void mlfab__server_link_check(mlfab_node *node);
/* Opens the routes to all servers. */
MLFAB__INTERNAL void mlfab__server_link_begin(mlfab_node *node);
/* If the last error ends in "is dead" and names a server, appends the cause of death. */
MLFAB__INTERNAL void mlfab__server_link_say_why(mlfab_node *node);

/* --- caller.c: callers of our server role --- */

/* Allocates. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__caller_init(mlfab_node *node);
/* Takes HELLO on a new link. Returns 0, AGAIN if a claim has to wait, or the code of a refusal. */
MLFAB__INTERNAL int mlfab__caller_hello(mlfab_node *node, uint32_t link,
                                        const mlfab__frame_in *frame);
/* Did server 0 issue this incarnation and nonce to that node, as far as this server knows? `server`: the number of the
 * sender, or MLFAB__NO_NODE. */
MLFAB__INTERNAL int mlfab__caller_issued(const mlfab_node *node, const mlfab__hello *hello,
                                         uint32_t server);
/* From now on the process on this link has the number of a caller. */
MLFAB__INTERNAL mlfab__caller *mlfab__caller_admit(mlfab_node *node, uint32_t link, int kind,
                                                   uint32_t number, const mlfab__hello *hello);
/* Answers HELLO of another process than a worker. Returns the code of a refusal, or 0. */
MLFAB__INTERNAL int mlfab__caller_greet(mlfab_node *node, uint32_t link, int kind, uint32_t peer,
                                        const mlfab__hello *hello);
MLFAB__INTERNAL void mlfab__caller_frame(mlfab_node *node, uint32_t link,
                                         const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__caller_down(mlfab_node *node, const mlfab__link *was, uint32_t link,
                                        const char *why);
/* Marks a worker as left or dead, until it calls again. */
MLFAB__INTERNAL void mlfab__caller_gone(mlfab_node *node, uint32_t worker, int left);
/* The first worker that has neither left nor died, or MLFAB__NO_NODE. */
MLFAB__INTERNAL uint32_t mlfab__caller_awaited(const mlfab_node *node);
/* Starts the time in which all workers have to call: afterwards a worker without a link is dead. */
MLFAB__INTERNAL void mlfab__caller_await(mlfab_node *node);
MLFAB__INTERNAL void mlfab__caller_scan(mlfab_node *node, uint32_t worker);

/* --- bootstrap.c: joining --- */

MLFAB__INTERNAL void mlfab__bootstrap_start(mlfab_node *node);
/* A JOIN with the settings of the world only. */
MLFAB__INTERNAL mlfab__join mlfab__bootstrap_world(const mlfab_node *node);
/* up: the connection for joining is up. failed: it failed, or broke. */
MLFAB__INTERNAL void mlfab__bootstrap_up(mlfab_node *node, uint32_t link);
MLFAB__INTERNAL void mlfab__bootstrap_failed(mlfab_node *node, const char *why);
/* The callee has ended the connection before it sent a frame: it is another program. The next calls come ever later. */
MLFAB__INTERNAL void mlfab__bootstrap_foreign(mlfab_node *node);
/* A process at one of several ports is not this job's server 0. Returns 1: the caller hangs up, and the next port is
 * tried; 0: there is only one port, or another reason, such as a wrong key of this job. */
MLFAB__INTERNAL int mlfab__bootstrap_elsewhere(mlfab_node *node, enum mlfab__cause cause,
                                               const char *why);
/* The callee of the call for joining, for an error: "server 0". Returns `name`. */
#define MLFAB__CALLEE 176
MLFAB__INTERNAL const char *mlfab__bootstrap_callee(const mlfab_node *node,
                                                    char name[MLFAB__CALLEE]);
MLFAB__INTERNAL void mlfab__bootstrap_frame(mlfab_node *node, uint32_t link,
                                            const mlfab__frame_in *frame);
/* Takes the end of a joining node's link, or of our own link for joining. */
MLFAB__INTERNAL void mlfab__bootstrap_down(mlfab_node *node, const mlfab__link *was, uint32_t link,
                                           const char *why);
MLFAB__INTERNAL void mlfab__bootstrap_tick(mlfab_node *node);
/* Does the fabric begin without this node? */
MLFAB__INTERNAL int mlfab__bootstrap_may_be_absent(const mlfab_node *node, uint32_t id);
/* Has a welcomed node kept its JOIN_IN link for too long? */
MLFAB__INTERNAL int mlfab__bootstrap_overdue(const mlfab_node *node, const mlfab__link *link);

/* --- alive.c: liveness --- */

/* Takes the transport's answer for a link that is suspect. */
MLFAB__INTERNAL void mlfab__alive_probed(mlfab_node *node, uint32_t index, int status);
/* Called if `now_ns` comes long after the last look. Detects whether this process was paused. */
MLFAB__INTERNAL void mlfab__alive_look(mlfab_node *node, uint64_t due_ns, uint64_t now_ns);
/* A link's timer: checks the link, and arms the timer again. */
MLFAB__INTERNAL void mlfab__alive_scan(mlfab_node *node, uint32_t index);

/* --- node.c: events, time, leaving --- */

/* Our call stands, and with a key both ends are proven: sends JOIN, HELLO or MEET. */
MLFAB__INTERNAL void mlfab__node_call_up(mlfab_node *node, uint64_t token, uint32_t link);
/* Refuses a stranger. Logs the first refusals, and then ever fewer, as warnings. */
MLFAB__INTERNAL void mlfab__node_turn_away(mlfab_node *node, uint32_t link, enum mlfab__cause cause,
                                           const char *why);

/* Creates a node without roles; `copies` if its servers have replicas. Add its roles, then begin. mlfab_node_close may
 * be called at any time afterwards. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__node_make(const mlfab_config *complete, mlfab__env *env,
                                     const char *addresses, const mlfab__copies_table *copies,
                                     uint64_t now_ns, mlfab_node **node_p);
MLFAB__INTERNAL void mlfab__node_begin(mlfab_node *node);
/* These two enclose every call of the API. enter: may this node call now (`worker`: only a worker may)? Errors as of
 * mlfab_push. return: keeps the error for mlfab_node_last_error, does the work that the call caused, and returns its
 * code. */
MLFAB__INTERNAL int mlfab__node_enter(mlfab_node *node, uint64_t now_ns, int worker,
                                      mlfab_error *error);
MLFAB__INTERNAL int mlfab__node_return(mlfab_node *node, int code, const mlfab_error *error);
/* For a separate scheduler: has every server closed or died? */
MLFAB__INTERNAL int mlfab__node_finished(const mlfab_node *node);
/* The worker role says BYE; the server role stays until mlfab_node_leave. */
MLFAB__INTERNAL void mlfab__node_stop_working(mlfab_node *node, uint64_t now_ns);

#endif
