/* session.h - proofs and tags of frames, which two processes that know the fabric's key derive from it.
 *
 * Pure functions, as in RFC 8439: a key for each frame comes from a hash, and a fast checksum with that key covers the
 * bulk. K is the hash of the key's text. All hashes below are BLAKE2b; H(k; x) has the key k.
 *
 *    S               = H(K; challenge, answer except its proof)   64 bytes, never sent
 *    proof of an end = H(S; "mlfab called") or H(S; "mlfab caller")   128 bits
 *    key of an end   = H(S; "mlfab from called") or H(S; "mlfab from caller")   64 bytes
 *    (T, k)          = H(key of the sender; counter, header, meta, and a bulk below MLFAB__TAG_LARGE bytes)
 *    tag of a frame  = T; with a larger bulk, which T does not cover: Poly1305(k; bulk)   128 bits
 *    (m0, m1, m2)    = H(key of the sender; 2^64 - 1)   24 bytes
 *    12 pads         = H(key of the sender; 2^63 + counter / 12)   32 bits each, for 12 counters
 *    code of a header = (m0 + m1 * its meta bytes + m2 * its bulk bytes, mod 2^64) / 2^32, xor the counter's pad
 *
 * Invariants
 *  (1) S covers both nonces, numbers, roles and epochs, and the caller's wish and offered keys. Each end draws a nonce
 *      of its own for each link, so a proof of one link is worthless on all other links.
 *  (2) The proofs and keys of the two ends have different texts: an end refuses its own bytes.
 *  (3) The counter is the number of tagged frames that this end sent on this link before. The counter is not sent. A
 *      frame that is repeated or moved, and a frame after a gap, has a wrong tag.
 *  (4) The tag covers the header (its checksum and the tag itself as zero), the meta and the bulk. The code covers the
 *      lengths and the counter. One of 2^32 forged codes is right, since the function is strongly universal and a pad
 *      serves once. Each wrong code ends a link. After a right code, the receiver awaits the bytes, but checks the tag.
 *  (5) Two frames that leave never share one k; else r of Poly1305 would be known. If the transport refuses a frame,
 *      that frame or another is sealed with the same counter: no byte of the refused frame has left. By (1), two links
 *      never share keys. The header, on which T and k depend, tells which of the two is used. A ghost (no bytes) has
 *      the tag T.
 *  (6) A header with the right code has the lengths that its sender gave to the frame with this counter. If the header
 *      of the next frame stands in the midst of a frame, bytes of that frame were left out.
 *
 * A tag does not encrypt. Members of the fabric are not protected from each other. */
#ifndef MLFAB__SESSION_H
#define MLFAB__SESSION_H

#include "blake2b.h"
#include "keys_wire.h"

enum {
  MLFAB__KEY_LEAST = 16, /* characters of a key's text */
  MLFAB__KEY_MOST = 128,
  MLFAB__TAG_LARGE = 512 /* least bytes of a bulk for which Poly1305 is faster */
};

typedef struct mlfab__fabric_keys { /* wipe after use */
  uint8_t key[2][MLFAB__BLAKE2B_MAX];
  uint64_t name[2]; /* tells which key a process has, but nothing more about the key; not 0 */
  uint32_t count;   /* 1 or 2 keys: own calls use the first; both are accepted */
} mlfab__fabric_keys;

typedef struct mlfab__codes { /* of the headers that one end sends */
  uint64_t mix[3];            /* m0, m1, m2 */
  uint64_t block; /* number of the group of 12 counters whose pads are here; UINT64_MAX: none */
  uint32_t pads[12];
} mlfab__codes;

typedef struct mlfab__session { /* wipe after use */
  uint64_t out[8], in[8]; /* BLAKE2b states after the key of own frames, and of the peer's frames */
  mlfab__codes codes_out, codes_in;
  uint64_t sent, received;    /* tagged frames */
  uint64_t own[2], theirs[2]; /* proofs */
  mlfab__challenge challenge; /* of the caller */
} mlfab__session;

/* Reads one or two keys, separated by a comma. Errors: CONFIG; *why_p gives the reason and does not quote the keys. */
MLFAB__INTERNAL int mlfab__keys_parse(const char *text, mlfab__fabric_keys *keys,
                                      const char **why_p);
/* Finds the first name in the challenge that is among these keys. Returns its place in the challenge (0 or 1), *own_p:
 * its place here; or -1. */
MLFAB__INTERNAL int mlfab__keys_choose(const mlfab__fabric_keys *keys,
                                       const mlfab__challenge *challenge, uint32_t *own_p);
/* Fills all members except the counters and `challenge`, for the calling or the called end. */
MLFAB__INTERNAL void mlfab__session_derive(mlfab__session *session,
                                           const uint8_t key[MLFAB__BLAKE2B_MAX],
                                           const mlfab__challenge *challenge,
                                           const mlfab__answer *answer, int called);
/* The tag of a frame with this counter. bulk: NULL for a ghost. */
MLFAB__INTERNAL void mlfab__session_tag(const uint64_t state[8], uint64_t counter,
                                        const uint8_t *head, uint32_t head_bytes, const void *bulk,
                                        uint32_t bulk_bytes, uint8_t tag[MLFAB__TAG_BYTES]);
/* The code of a header with these lengths. */
MLFAB__INTERNAL uint32_t mlfab__session_code(const uint64_t state[8], mlfab__codes *codes,
                                             uint64_t counter, uint32_t meta_bytes,
                                             uint32_t bulk_bytes);

#endif
