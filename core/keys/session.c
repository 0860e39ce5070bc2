/* session.c - proofs and tags. See session.h. */
#include "session.h"

#include "poly1305.h"

/* The first 16 bytes are the tag of a frame with a small bulk, the others a key for that of a large one. */
enum { SESSION_DIGEST = MLFAB__TAG_BYTES + MLFAB__POLY1305_KEY };

/* Hashes a text and data under a key. */
static void session_hash(void *digest, uint32_t digest_bytes, const void *key, const char *text,
                         const void *data, size_t bytes) {
  mlfab__blake2b s;
  mlfab__blake2b_begin(&s, digest_bytes, key, key ? MLFAB__BLAKE2B_MAX : 0);
  mlfab__blake2b_add(&s, text, strlen(text) + 1);
  mlfab__blake2b_add(&s, data, bytes);
  mlfab__blake2b_end(&s, digest);
}

MLFAB__INTERNAL int mlfab__keys_parse(const char *text, mlfab__fabric_keys *keys,
                                      const char **why_p) {
  memset(keys, 0, sizeof *keys);
  for (;;) {
    size_t n = 0;
    while (text[n] > ' ' && text[n] < 127 && text[n] != ',') n++;
    *why_p = n < MLFAB__KEY_LEAST  ? "a key is shorter than 16 characters"
             : n > MLFAB__KEY_MOST ? "a key is longer than 128 characters"
                                   : "a key has a character that is not printable, or a blank";
    if (n < MLFAB__KEY_LEAST || n > MLFAB__KEY_MOST || (text[n] && text[n] != ',')) break;
    uint8_t *key = keys->key[keys->count];
    session_hash(key, MLFAB__BLAKE2B_MAX, NULL, "mlfab fabric key", text, n);
    session_hash(&keys->name[keys->count], 8, key, "mlfab name of the key", NULL, 0);
    keys->name[keys->count] |= 1;
    keys->count++;
    if (!text[n]) return 0;
    *why_p = "there are more than two keys";
    if (keys->count == 2) break;
    text += n + 1;
  }
  mlfab__wipe(keys, sizeof *keys);
  return MLFAB_ERR_CONFIG;
}

MLFAB__INTERNAL int mlfab__keys_choose(const mlfab__fabric_keys *keys,
                                       const mlfab__challenge *challenge, uint32_t *own_p) {
  for (int i = 0; i < 2; i++) {
    for (uint32_t k = 0; k < keys->count; k++) {
      if (challenge->keys[i] != keys->name[k]) continue;
      *own_p = k;
      return i;
    }
  }
  return -1;
}

MLFAB__INTERNAL void mlfab__session_derive(mlfab__session *session,
                                           const uint8_t key[MLFAB__BLAKE2B_MAX],
                                           const mlfab__challenge *challenge,
                                           const mlfab__answer *answer, int called) {
  uint8_t said[2 * MLFAB__KEYS_META], secret[MLFAB__BLAKE2B_MAX], one[MLFAB__BLAKE2B_MAX];
  mlfab__answer bare = *answer;
  bare.proof[0] = bare.proof[1] = 0;
  uint32_t n = mlfab__encode_challenge(said, challenge);
  n += mlfab__encode_answer(said + n, &bare);
  session_hash(secret, sizeof secret, key, "mlfab link", said, n);
  for (int end = 0; end < 2; end++) { /* 0: the caller, 1: the called node */
    int own = end == called;
    session_hash(own ? session->own : session->theirs, 16, secret,
                 end ? "mlfab called" : "mlfab caller", NULL, 0);
    session_hash(one, sizeof one, secret, end ? "mlfab from called" : "mlfab from caller", NULL, 0);
    mlfab__blake2b_prepare(own ? session->out : session->in, SESSION_DIGEST, one, sizeof one);
  }
  mlfab__wipe(secret, sizeof secret);
  mlfab__wipe(one, sizeof one);
}

MLFAB__INTERNAL void mlfab__session_tag(const uint64_t state[8], uint64_t counter,
                                        const uint8_t *head, uint32_t head_bytes, const void *bulk,
                                        uint32_t bulk_bytes, uint8_t tag[MLFAB__TAG_BYTES]) {
  uint8_t first[8 + MLFAB_HEADER_BYTES], digest[SESSION_DIGEST];
  int large = bulk_bytes >= MLFAB__TAG_LARGE;
  mlfab__blake2b s;
  for (int i = 0; i < 8; i++) first[i] = (uint8_t)(counter >> 8 * i);
  memcpy(first + 8, head, MLFAB_HEADER_BYTES);
  mlfab__wire_untag(first + 8);
  mlfab__blake2b_resume(&s, state, sizeof digest);
  mlfab__blake2b_add(&s, first, sizeof first);
  mlfab__blake2b_add(&s, head + MLFAB_HEADER_BYTES, head_bytes - MLFAB_HEADER_BYTES);
  if (bulk && !large) mlfab__blake2b_add(&s, bulk, bulk_bytes);
  mlfab__blake2b_end(&s, digest);
  memcpy(tag, digest, MLFAB__TAG_BYTES);
  if (bulk && large) mlfab__poly1305(digest + MLFAB__TAG_BYTES, bulk, bulk_bytes, tag);
  mlfab__wipe(digest, sizeof digest);
}
