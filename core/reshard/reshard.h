/* reshard.h - slices move between servers while workers push and pull: server 0's side. Layer 4.
 *
 * A worker asks (RESHARD); server 0 computes who owns what from then on (layout.h) and carries it out
 * as one attempt, with a number of its own:
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
 * FREEZING. Workers get FREEZE. A worker announces nothing new, and says STOP to every server, which
 * forgets what it has not decided of this worker, ends its pulls, and answers with what it has
 * decided (HELLO_ACK, as on a new link). When all have answered, the worker knows its last update
 * that one server at least has decided; up to that one it announces again what is undecided
 * anywhere, and waits for it (reshard_worker.c says why that ends). Then every update of its is decided at all
 * its servers or at none: it tells the servers (STOP, drained) and server 0 (FROZEN). Calls to push
 * and pull are taken all the while, and wait. Dead workers are not waited for; hand-driven ones that
 * compute are, since they have not stopped.
 *
 * PREPARING. Every server (MOVE) stops those workers that were not here to be frozen, waits until
 * nothing of its blocks is lent, holds still from then on - no update, no round, no pull, no change
 * of models, whoever dies - and makes a store of its new slices beside the one that it has. SENDING:
 * it sends the slices that leave it (RESHARD_SERVER) to their new owners: weights, state of the rule, the open
 * round's sum, version and commit, and their clocks. Nobody sends before all are ready, so nothing
 * comes to one that has no room for it. A link that breaks begins again with its first slice.
 * INSTALLING: all is there, and there is no way back: each server puts the kept slices over and lets
 * the old store go. The epoch of the layout is the number of the attempt that installed it.
 *
 * ABORTING: every server drops the new store and goes on as before; nothing has changed.
 *
 * Who is out of reach. A server, and server 0 to a server, is out of reach when it has had no link for
 * five heartbeats, or is silent for as long as node.c says. A server k other than 0:
 *
 *    (free) --PREPARE--> HELD --quiet, room--> READY --SEND--> SENDING --all is there--> PROMISED --INSTALL--> (free)
 *      ^                  |                      |               |                         |
 *      +-- ABORT, or server 0 is out of reach: undone -----------+         server 0 is out of reach
 *      |                                                                                   v
 *      +--------- another one has installed, or none ever will ----------------------- LEADERLESS
 *
 * Server 0 cannot install without the word of k, so up to SENDING k undoes the move by itself. PROMISED,
 * it does not know: LEADERLESS, it takes nothing of this attempt from server 0 any more, not even when that
 * is back, and asks the other servers every heartbeat (MOVED). One that has installed says so, and k
 * installs. One that has undone it, or has not promised and so undoes it now, says that, and k undoes.
 * One that is leaderless as well cannot have installed: when all others in reach are, k undoes. One
 * that is promised and has server 0 is waited for: server 0 tells it. Server 0 itself installs when all
 * others have, so it has not where none of them has.
 *
 * Server 0 that comes back late finds that k has given the attempt up, and leads ABORT; or that others
 * have installed, and goes on. A server that was restarted in the middle has nothing of the attempt, and
 * says so: it counts as dead. What a server says of an attempt that is over (it was out of reach at
 * the end) is answered with the outcome. While it is held a server says every heartbeat what it said
 * last. While server 0 is out of reach the servers tell RESUME to the workers that have lost it, too. So a
 * server is held no longer than the deadline of the attempt, or the time after which those
 * that it waits for are out of reach. Not solved: two servers of which each holds the other to be out
 * of reach while server 0 is, may decide otherwise.
 *
 * RESUME. Workers hear which layout counts, cut what waits anew, greet the servers (STOP, over), and ask
 * their pulls again. A worker sends no update and no pull to a server that has told another epoch
 * than its own; one whose slices are on the move tells 0. Workers that come (back) hear FREEZE, or
 * RESUME with the owners, after every HELLO.
 *
 * What moves and what does not. Windows (windows.h) stay: what was decided before is below every later
 * number, at every server. Progress stays, too: a worker has one at all servers (push.c). PROGRESS that
 * meets a server which is held is lost; so is what a server that did not count does not know. The answer
 * to HELLO or STOP, which every worker gets before it sends again, tells what the server knows, and who
 * is further says so once more. A clock moves with its slices: it becomes one with a clock there that is
 * at the same point, or stands beside it until they have come to the same point (clock.c). Version tags do not move: in a new epoch caches get
 * everything. A server without slices takes part in rounds all the same.
 *
 * Invariants. (1) Between the first MOVE of an attempt and its end no server decides anything. (2) No
 * server installs before all have all their slices. (3) No worker that was frozen has an update that
 * is decided at one of its servers and not at another. (4) One attempt at a time; who asks meanwhile
 * gets AGAIN.
 *
 * Memory: while slices move a server has both stores, at most the old shard's blocks and the new one's.
 * Source: FluentPS §III-D. Departs: there, servers migrate one by one between iterations. */
#ifndef MLFAB__RESHARD_H
#define MLFAB__RESHARD_H

#include "../node/role.h"
#include "../model/layout.h"
#include "reshard_wire.h"

struct mlfab__server;
/* Add the rows of who leads (reshard.c), and of a server (reshard_role.c). The server must outlive them. Errors:
 * MEMORY. */
MLFAB__INTERNAL int mlfab__reshard_attach(struct mlfab_node *node, struct mlfab__server *server);
MLFAB__INTERNAL void mlfab__reshard_server_attach(struct mlfab_node *node,
                                                  struct mlfab__server *server);

/* --- at a server (reshard_server.c) --- */

/* From now on slices leave and come. */
MLFAB__INTERNAL void mlfab__reshard_server_init(struct mlfab__server *server);
/* MOVE came from server 0; MOVED or another frame of another server. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__reshard_server_move(struct mlfab__server *server,
                                               const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL int mlfab__reshard_server_told(struct mlfab__server *server, uint32_t from,
                                               const mlfab__frame_in *frame);
/* That server is out of reach. */
MLFAB__INTERNAL void mlfab__reshard_server_dead(struct mlfab__server *server, uint32_t which);
MLFAB__INTERNAL int mlfab__reshard_server_frame(struct mlfab__server *server, uint32_t from,
                                                const mlfab__frame_in *frame);
/* The next bytes for another server: 1, or 0; they were taken. */
MLFAB__INTERNAL int mlfab__reshard_server_next(struct mlfab__server *server, uint32_t to,
                                               mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__reshard_server_taken(struct mlfab__server *server, uint32_t to,
                                                 const mlfab__frame_out *frame);
/* The link to a server stands, and begins with the first slice. Is it wanted? */
MLFAB__INTERNAL void mlfab__reshard_server_up(struct mlfab__server *server, uint32_t to);
MLFAB__INTERNAL int mlfab__reshard_server_wants(const struct mlfab__server *server, uint32_t to);
/* Goes on when what it waits for is over: after everything that may have changed something. */
MLFAB__INTERNAL void mlfab__reshard_server_check(struct mlfab__server *server);

/* --- at a worker (reshard_worker.c) --- */

struct mlfab__worker;
/* From now on it follows when slices move. */
MLFAB__INTERNAL void mlfab__reshard_worker_attach(struct mlfab__worker *worker);
/* These servers, and no others, shall own slices. */
MLFAB__INTERNAL int mlfab__worker_set_servers(struct mlfab__worker *worker, const uint32_t *servers,
                                              uint32_t n, uint64_t timeout_ns, uint64_t now_ns,
                                              mlfab_request *request_p, mlfab_error *error);

#endif
