/* reshard.h - slices move between servers while workers push and pull: server 0's side. Layer 4.
 *
 * A worker sends a request (RESHARD). Server 0 computes the new owners (layout.h) and carries the move out as one
 * attempt, which has a number:
 *
 *    IDLE --RESHARD--> FREEZING --all workers FROZEN--> PREPARING --all--> SENDING --all--> INSTALLING
 *     ^                   |                                 |                 |                |
 *     |                   |                                 +-----+-----------+                |
 *     |                   |                                       | dead server, deadline,     |
 *     |                   +---- deadline ---------+               v no memory                  |
 *     |                                           |           ABORTING                         |
 *     |                                           v               |                            |
 *     +------- RESUME to the workers, RESHARD_DONE -+---------------+----------------------------+
 *
 * FREEZING. Server 0 sends FREEZE to the workers. A worker announces nothing new, and sends STOP to every server.
 * The server forgets what it has not decided of this worker, ends the worker's pulls, and answers with what it has
 * decided (HELLO_ACK, as on a new link). When all have answered, the worker knows the last of its updates that at
 * least one server has decided. Up to that one it announces again the updates that are undecided at some server,
 * and waits until they are decided (reshard_worker.c proves that this ends). Then each of its updates is decided at
 * all its servers or at none, and the worker tells the servers (STOP, drained) and server 0 (FROZEN). Calls of push
 * and pull are accepted all the while, and wait. Server 0 does not wait for dead workers. It waits for hand-driven
 * workers that compute, because they have not stopped.
 *
 * PREPARING. On MOVE, every server stops the workers that did not take part in FREEZING and waits until none of its
 * blocks is lent. From then on its state is fixed: no update, no round, no pull, no change of models, whoever dies.
 * It creates a store for its new slices beside the current one. SENDING: it sends the slices that leave it
 * (RESHARD_SERVER) to their new owners: weights, optimizer state, the open round's sum, version and commit, and
 * their clocks. No server sends before all are ready, so no slice reaches a server without room for it. After a
 * link breaks, the server starts again with the first slice. INSTALLING: all slices have arrived, and the attempt
 * cannot be aborted any more. Each server moves the kept slices into the new store and frees the old one. The epoch
 * of a layout is the number of the attempt that installed it.
 *
 * ABORTING: every server drops the new store and goes on as before; nothing has changed.
 *
 * Out of reach. A server is out of reach when it has had no link for five heartbeats, or has been silent for too
 * long (node.h, Liveness). The same holds for server 0, as seen by a server. The states of a server k other than 0:
 *
 *    (free) --PREPARE--> HELD --quiet, room--> READY --SEND--> SENDING --all arrived--> PROMISED --INSTALL--> (free)
 *      ^                  |                      |               |                         |
 *      +-- ABORT, or server 0 is out of reach: undone -----------+         server 0 is out of reach
 *      |                                                                                   v
 *      +--------- another server has installed, or none ever will ------------------ LEADERLESS
 *
 * Server 0 cannot install without k's answer, so up to SENDING k undoes the move by itself. In PROMISED it does not
 * know the outcome. In LEADERLESS it accepts nothing about this attempt from server 0 any more, even if server 0 is
 * back, and asks the other servers every heartbeat (MOVED). A server that has installed says so, and k installs. A
 * server that has undone the move, or has not promised and therefore undoes it now, says so, and k undoes it. A
 * server that is leaderless too cannot have installed: when all others in reach are leaderless, k undoes the move.
 * k waits for a server that has promised and still has server 0, because server 0 will tell that one. Server 0
 * itself installs after all others have, so it has not installed if none of them has.
 *
 * If server 0 comes back late and finds that k gave the attempt up, it aborts; if others have installed, it goes
 * on. A server that was restarted in the middle does not know the attempt, says so, and counts as dead. If a server
 * reports on an attempt that is over (it was out of reach at the end), server 0 answers with the outcome. A held
 * server repeats its last answer every heartbeat. While server 0 is out of reach the servers send RESUME to the
 * workers that have lost it, too. So a server is held no longer than the deadline of the attempt, or the time after
 * which the servers that it waits for are out of reach. Not solved: two servers that each take the other to be out
 * of reach while server 0 is out of reach may decide differently.
 *
 * RESUME. Workers learn the current layout, divide undecided updates anew, greet the servers (STOP, over), and send
 * their pulls again. A worker sends no update and no pull to a server that reports another epoch than its own; a
 * server whose slices are moving reports 0. Workers that come (back) get FREEZE, or RESUME with the owners, after
 * every HELLO.
 *
 * Servers that come and go. A late server (node.h, Growth) is a member of attempts exactly while it owns slices; a first
 * server always, until it has gone without slices. At server 0:
 *
 *    IDLE --an attempt gives it slices: ADOPT, then PREPARE--> takes part --INSTALL--> MEMBER --loses its last slice--> IDLE
 *                                                                |  ^
 *                                                      ABORT: IDLE  +-- dead before INSTALLING: the attempt aborts
 *
 * FREEZE names the servers that get their first slices. A worker is FROZEN only when it has a link to each; if it
 * cannot reach one, it says so, and the attempt aborts. ADOPT carries the definition, the present owners, and whom server 0
 * counts; the workers are frozen, so nobody's counting changes until the end. The server builds the model with no
 * slices; its first clock is the first one that arrives. At the workers the server is absent (worker.h) until RESUME
 * shows that it owns slices, and again when it owns none: they send it no updates, and nobody waits for it. A server
 * that dies or leaves without slices, and gets none, is no fault of the attempt: server 0 goes on without it, and the
 * workers forget their parts for it, which had no bytes. A frozen worker that loses a server decides that only at the end
 * of the attempt, because its slices may have moved. A server that takes no part answers a leaderless one that it
 * cannot know.
 *
 * Moved and kept state. Windows (windows.h) stay: every update decided before has a number below every later one,
 * at every server. Progress stays, too: a worker has the same progress at all servers (push.c). PROGRESS that
 * reaches a held server is lost, and a server that did not count does not know a worker's progress. The answer to
 * HELLO or STOP, which every worker gets before it sends again, contains the server's value, and a worker that is
 * ahead sends its own again. A clock moves with its slices: it joins a clock there that is at the same point, or
 * stands beside it until both have come to the same point (clock.c). Version tags do not move: in a new epoch
 * caches fetch everything. A server without slices still takes part in rounds.
 *
 * Invariants. (1) Between the first MOVE of an attempt and its end no server decides anything. (2) No server
 * installs before all servers have all their slices. (3) No frozen worker has an update that is decided at one of
 * its servers and not at another. (4) One attempt at a time; another request meanwhile gets AGAIN.
 *
 * Memory: while slices move, a server has both stores: at most the blocks of the old shard and of the new one.
 * Source: FluentPS §III-D. Departs: there, servers migrate one by one between iterations. */
#ifndef MLFAB__RESHARD_H
#define MLFAB__RESHARD_H

#include "../node/role.h"
#include "../model/balance.h"
#include "reshard_wire.h"

struct mlfab__server;
/* Add the row of server 0's lead (reshard.c), and that of a server (reshard_role.c). The server must
 * outlive them. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__reshard_attach(struct mlfab_node *node, struct mlfab__server *server);
MLFAB__INTERNAL void mlfab__reshard_server_attach(struct mlfab_node *node,
                                                  struct mlfab__server *server);

/* --- at a server (reshard_server.c) --- */

/* Enables moves at this server. */
MLFAB__INTERNAL void mlfab__reshard_server_init(struct mlfab__server *server);
/* MOVE from server 0. MOVED from another server. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__reshard_server_move(struct mlfab__server *server,
                                               const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL int mlfab__reshard_server_told(struct mlfab__server *server, uint32_t from,
                                               const mlfab__frame_in *frame);
/* ADOPT from server 0: this server is to get its first slices. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__reshard_server_adopt(struct mlfab__server *server,
                                                const mlfab__frame_in *frame, uint64_t now_ns);
/* A server is out of reach. */
MLFAB__INTERNAL void mlfab__reshard_server_dead(struct mlfab__server *server, uint32_t which);
MLFAB__INTERNAL int mlfab__reshard_server_frame(struct mlfab__server *server, uint32_t from,
                                                const mlfab__frame_in *frame);
/* The next bytes for another server: 1, or 0; taken: they were sent. frame: bytes or a clock from another server. */
MLFAB__INTERNAL int mlfab__reshard_server_next(struct mlfab__server *server, uint32_t to,
                                               mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__reshard_server_taken(struct mlfab__server *server, uint32_t to,
                                                 const mlfab__frame_out *frame);
/* The link to a server stands: send from the first slice again. wants: is a link to it needed? */
MLFAB__INTERNAL void mlfab__reshard_server_up(struct mlfab__server *server, uint32_t to);
MLFAB__INTERNAL int mlfab__reshard_server_wants(const struct mlfab__server *server, uint32_t to);
/* The slices have changed: frees the arrays of pulls that are sized for the old ones. */
MLFAB__INTERNAL void mlfab__serve_resize(struct mlfab__server *server);
/* Takes the next step if nothing stands in its way any more. Called after everything that may have changed state. */
MLFAB__INTERNAL void mlfab__reshard_server_check(struct mlfab__server *server);

/* --- at a worker (reshard_worker.c) --- */

struct mlfab__worker;
/* Enables moves at this worker. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__reshard_worker_attach(struct mlfab__worker *worker);
/* Only these servers shall own slices. */
MLFAB__INTERNAL int mlfab__worker_set_servers(struct mlfab__worker *worker, const uint32_t *servers,
                                              uint32_t n, uint64_t timeout_ns, uint64_t now_ns,
                                              mlfab_request *request_p, mlfab_error *error);

/* recut.c: the layout has other owners. push, pull: divide undecided updates, and pulls, anew. change: sends a change of
 * consistency to all servers again. */
MLFAB__INTERNAL void mlfab__push_recut(struct mlfab__worker *worker, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__pull_recut(struct mlfab__worker *worker, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__worker_change_again(struct mlfab__worker *worker);

#endif
