/* guard.h - a fabric with a key: every link proves both of its ends before JOIN, HELLO or MEET. Attaches to a node.
 *
 *    caller                                     called node
 *    CHALLENGE: who it is, whom it wants,
 *      nonce, names of its keys          ---->
 *                                        <----  ANSWER: who it is, nonce, its proof, or REFUSE
 *    PROOF: the challenge again, its proof,
 *      then JOIN, HELLO or MEET          ---->
 *
 * After that every frame has a tag (session.h), except on links where the kernels of both ends vouch for the peer
 * (MLFAB_CAP_VOUCHED: a Unix socket or shared memory of this user's processes): there only the proofs are exchanged.
 *
 * A called link is in one of these states:
 *    NEW                 CHALLENGE -> ANSWER, asked; anything else -> refused, stranger
 *    NEW, asked          PROOF, right -> proven; anything else -> refused, stranger
 *    NEW, proven         the frame type that the challenge announced, from the node that it named
 * and a calling one:
 *    NEW                 ANSWER, right and of the wanted node -> PROOF, proven; anything else -> the call failed
 *
 * Invariants
 *  (1) No frame reaches the node or its roles on a link that is not proven.
 *  (2) A frame with a wrong tag closes its link at once and is counted (frames_refused). It changes nothing else.
 *  (3) A caller that is not proven costs its link (below 288 bytes with its timer) and nothing after it: the called
 *      node keeps the number of its nonce only, and reads the rest again in PROOF. It ends after 2 s (alive.c).
 *  (4) REFUSE before the proof may come from anybody. It ends the call, and joining too when it says that the keys
 *      differ; this side does not show its text.
 *  (5) On a link with tags, only the length that the sender has given makes this node wait for a frame. A transport that cuts
 *      frames out of a stream of bytes reports a header before it waits for the rest (MLFAB_IO_HEAD), and again when bytes
 *      in the midst of a frame begin like a header: the next frame's shows that bytes were left out. So whoever repeats,
 *      leaves out or inserts bytes costs the link, within a heartbeat of the sender, and the link is made anew.
 *
 * Keys are wiped when their link or the node is closed. */
#ifndef MLFAB__GUARD_H
#define MLFAB__GUARD_H

#include "../node/node.h"
#include "session.h"

/* Errors: CONFIG, with a text that does not quote the key. */
MLFAB__INTERNAL int mlfab__guard_check(const mlfab_config *config, mlfab_error *error);
/* Takes the key of node->config, which it wipes there. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__guard_attach(mlfab_node *node);

#endif
