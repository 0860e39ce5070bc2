/* guard.h - a fabric with a key: every link proves both of its ends before JOIN, HELLO or MEET. Attaches to a node.
 *
 *    caller                                     called node
 *    CHALLENGE: who it is, whom it wants,
 *      nonce, names of its keys          ---->
 *                                        <----  ANSWER: who it is, nonce, its proof, or REFUSE
 *    PROOF: the challenge again, its proof,
 *      then JOIN, HELLO or MEET          ---->
 *
 * After that every frame has a tag (session.h). Exception: if the kernels of both ends vouch for the peer
 * (MLFAB_CAP_VOUCHED: a Unix socket or shared memory of this user's processes), only the proofs are exchanged.
 *
 * A called link is in one of these states:
 *    NEW                 CHALLENGE -> ANSWER, asked; anything else -> refused, stranger
 *    NEW, asked          PROOF, right -> proven; anything else -> refused, stranger
 *    NEW, proven         the frame type that the challenge announced, from the node that it named
 * and a calling one:
 *    NEW                 ANSWER, right and of the wanted node -> PROOF, proven; anything else -> the call failed
 *
 * Invariants
 *  (1) A frame reaches the node and its roles only on a link that is proven.
 *  (2) A frame with a wrong tag closes its link at once and is counted (frames_refused). It changes nothing else.
 *  (3) A caller that is not proven costs only its link (below 288 bytes with its timer), for as long as the link lasts.
 *      The called node keeps the number of its nonce, and reads the rest again in PROOF. It ends after 2 s (alive.c).
 *  (4) REFUSE before the proof may come from anybody. It ends the call, and joining, too, if it says that the keys
 *      differ. This side does not show its text.
 *  (5) On a link with tags, this node waits for a frame only of the length that the sender has given. A transport that
 *      cuts frames out of a stream of bytes reports a header before it waits for the rest (MLFAB_IO_HEAD). It reports
 *      again when bytes within a frame begin like a header: the next frame's header shows that bytes were left out.
 *      So altered, repeated or missing bytes end only the link, within a heartbeat of the sender; it is made anew.
 *
 * Keys are wiped when their link or the node is closed. */
#ifndef MLFAB__GUARD_H
#define MLFAB__GUARD_H

#include "../node/node.h"
#include "session.h"

/* Errors: CONFIG, with a text that does not quote the key. */
MLFAB__INTERNAL int mlfab__guard_check(const mlfab_config *config, mlfab_error *error);
/* Takes the key out of node->config, and wipes it there. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__guard_attach(mlfab_node *node);

#endif
