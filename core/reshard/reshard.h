/* reshard.h - slices move between servers while workers push and pull: server 0's side.
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
 * FREEZING. Server 0 sends FREEZE to the workers. A worker then announces nothing new, and sends STOP to every server.
 * The server forgets this worker's undecided updates, ends its pulls, and answers with the decided ones (HELLO_ACK, as
 * on a new link). When all have answered, the worker knows its last update that at least one server has decided. It
 * announces the updates up to that one again, if a server has not decided them, and waits until all are decided
 * (reshard_worker.c proves that this ends). Then each of its updates is decided at all its servers or at none, and the
 * worker tells the servers (STOP, drained) and server 0 (FROZEN). Calls of push and pull are still accepted, and wait.
 * Server 0 does not wait for dead workers. It waits for hand-driven workers that compute, because they have not
 * stopped.
 *
 * PREPARING. On MOVE, every server stops the workers that did not take part in FREEZING, and waits until all its blocks
 * are back. From then on its state is fixed (no update, pull or change of models; a round only if SEND
 * orders a flush), whoever dies. It creates a
 * store for its new slices beside the current one. SENDING: it sends the slices that leave it (RESHARD_SERVER) to their
 * new owners: weights, optimizer state, the open round's sum, version and commit. Servers send only
 * after all are ready, so every slice reaches a server with room for it. After a link breaks, the server starts again
 * with the first slice. INSTALLING: all slices have arrived, and the attempt can no longer be aborted. Each server
 * moves the kept slices into the new store and frees the old one. The epoch of a layout is the number of the attempt
 * that installed it.
 *
 * ABORTING: every server drops the new store and continues; its open round may have been applied (flush).
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
 * back, and asks the other servers every heartbeat (MOVED). If any of them answers that it installed the move, server k
 * installs it, too. If any answers that it undid the move, or had not promised and therefore undoes it now, k undoes
 * it. A leaderless server cannot have installed: if all others in reach are leaderless, k undoes the move. If one of
 * them has promised and still has server 0, k waits, because server 0 tells that one the outcome. Server 0 installs
 * last: only after all others have.
 *
 * If server 0 comes back late and finds that k gave the attempt up, it aborts; if others have installed, it goes on. A
 * server that was restarted in the middle does not know the attempt, reports this, and counts as dead. If a server
 * reports on an attempt that is over (it was out of reach at the end), server 0 answers with the outcome. A held server
 * repeats its last answer every heartbeat. While server 0 is out of reach the servers send RESUME to the workers that
 * have lost it, too. So a server is held no longer than the deadline of the attempt, or the time after which the
 * servers that it waits for are out of reach. One case is open: while server 0 is out of reach, two servers that have
 * lost each other may decide differently.
 *
 * RESUME. Workers learn the current layout, divide undecided updates anew, greet the servers (STOP, over), and send
 * their pulls again. A worker sends updates and pulls only to servers that report its own epoch; a server with moving
 * slices reports 0. Workers that come (back) get FREEZE, or RESUME with the owners, after every HELLO.
 *
 * Servers that come and go. An added server (growth.h) is a member of attempts while it owns slices; a first server
 * always, until it has gone without slices. At server 0:
 *
 *    IDLE --an attempt gives it slices: ADOPT, then PREPARE--> takes part --INSTALL--> MEMBER --loses its last slice--> IDLE
 *                                                                |  ^
 *                                                      ABORT: IDLE  +-- dead before INSTALLING: the attempt aborts
 *
 * FREEZE names the servers that get their first slices. A worker is FROZEN only when it has a link to each; if it
 * cannot reach one of them, it reports this, and the attempt aborts. ADOPT carries the definition, the present owners,
 * and the processes that server 0 counts; the workers are frozen, so these counts stay until the end. The server builds
 * the model without slices, and takes the clock of a server that sends it slices. A server without slices is absent (worker.h) for
 * the workers until a RESUME shows its slices: they neither send updates to it nor wait for it. If it gets no slices in
 * an attempt, it may die or leave meanwhile. Server 0 goes on, and the workers drop their empty parts for it. A frozen worker that loses a server decides that only at the end of the
 * attempt, because its slices may have moved. If a server takes no part, it answers a leaderless server that it cannot
 * know.
 *
 * Moved and kept state. Windows (windows.h) stay: every update decided before has a number below every later one, at
 * every server. Progress stays, too: a worker has the same progress at all servers (push.c). A held server loses
 * PROGRESS; a server that did not count has no progress of the workers. Every worker gets an answer to HELLO or STOP
 * before it sends again. It contains the server's value, and a worker that is ahead sends its own again. A slice
 * takes the clock of its new server. If the models or rounds of two servers differ, every server first
 * applies its open round as it is. Otherwise sums go on at their new servers. Version tags do not move: in a new epoch caches fetch everything. A server without slices still
 * takes part in rounds.
 *
 * Invariants. (1) From the first MOVE of an attempt to its end, servers decide nothing. (2) A server installs only
 * after all servers have all their slices. (3) Each update of a frozen worker is decided at all its servers or at none.
 * (4) One attempt at a time; another request meanwhile gets AGAIN.
 *
 * Memory: while slices move, a server has both stores: at most the blocks of the old shard and of the new one.
 * Source: FluentPS §III-D. Departs: there, servers migrate one by one between iterations. */
#ifndef MLFAB__RESHARD_H
#define MLFAB__RESHARD_H

#include "../node/role.h"
#include "../model/balance.h"
#include "reshard_wire.h"

struct mlfab__server;
/* Add the roles of server 0's lead (reshard.c), and of a server (reshard_role.c). The server must outlive them. Errors:
 * MEMORY. */
MLFAB__INTERNAL int mlfab__reshard_attach(struct mlfab_node *node, struct mlfab__server *server);
MLFAB__INTERNAL void mlfab__reshard_server_attach(struct mlfab_node *node,
                                                  struct mlfab__server *server);

/* --- at a server (reshard_server.c) --- */

/* Enables moves at this server. */
MLFAB__INTERNAL void mlfab__reshard_server_init(struct mlfab__server *server);
/* move: takes MOVE from server 0. moved: takes MOVED from another server. MOVED from another server. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__reshard_server_move(struct mlfab__server *server,
                                               const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL int mlfab__reshard_server_told(struct mlfab__server *server, uint32_t from,
                                               const mlfab__frame_in *frame);
/* Takes ADOPT from server 0: this server is about to get its first slices. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__reshard_server_adopt(struct mlfab__server *server,
                                                const mlfab__frame_in *frame, uint64_t now_ns);
/* Notes that a server is out of reach. */
MLFAB__INTERNAL void mlfab__reshard_server_dead(struct mlfab__server *server, uint32_t which);
MLFAB__INTERNAL int mlfab__reshard_server_frame(struct mlfab__server *server, uint32_t from,
                                                const mlfab__frame_in *frame);
/* next: makes the next bytes for another server, and returns 1, or 0. taken: they were sent. frame: takes bytes or a
 * clock from another server. */
MLFAB__INTERNAL int mlfab__reshard_server_next(struct mlfab__server *server, uint32_t to,
                                               mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__reshard_server_taken(struct mlfab__server *server, uint32_t to,
                                                 const mlfab__frame_out *frame);
/* up: the link to a server stands, so it sends from the first slice again. wants: is a link to it needed? */
MLFAB__INTERNAL void mlfab__reshard_server_up(struct mlfab__server *server, uint32_t to);
MLFAB__INTERNAL int mlfab__reshard_server_wants(const struct mlfab__server *server, uint32_t to);
/* Call it after the slices have changed: frees the arrays of pulls, whose size is that of the old slices. */
MLFAB__INTERNAL void mlfab__serve_resize(struct mlfab__server *server);
/* Takes the next step if nothing prevents it. Call it after everything that may have changed state. */
MLFAB__INTERNAL void mlfab__reshard_server_check(struct mlfab__server *server);

/* --- at a worker (reshard_worker.c) --- */

struct mlfab__worker;
/* Enables moves at this worker. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__reshard_worker_attach(struct mlfab__worker *worker);
/* Asks server 0 to let only these servers own slices. */
MLFAB__INTERNAL int mlfab__worker_set_servers(struct mlfab__worker *worker, const uint32_t *servers,
                                              uint32_t n, uint64_t timeout_ns, uint64_t now_ns,
                                              mlfab_request *request_p, mlfab_error *error);

/* recut.c, for a layout with other owners. push, pull: divide undecided updates, and pulls, anew. change: sends a
 * change of consistency to all servers again. */
MLFAB__INTERNAL void mlfab__push_recut(struct mlfab__worker *worker, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__pull_recut(struct mlfab__worker *worker, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__worker_change_again(struct mlfab__worker *worker);

#endif
