/* session.c - proofs and tags. See session.h. */
#include "session.h"

#include "poly1305.h"

/* The first 16 bytes are the tag of a frame with a small bulk. The others are the key for the tag of a large bulk. */
enum { SESSION_DIGEST = MLFAB__TAG_BYTES + MLFAB__POLY1305_KEY };
/* The first of the numbers that are hashed in the same way as counters of frames. Counters are smaller. */
#define SESSION_PADS (UINT64_C(1) << 63)
#define SESSION_MIX UINT64_MAX

/* Hashes a text and data under a key. */
static void session_hash(void *digest, uint32_t digest_bytes, const void *key, const char *text,
                         const void *data, size_t bytes) {
  mlfab__blake2b s;
  mlfab__blake2b_begin(&s, digest_bytes, key, key ? MLFAB__BLAKE2B_MAX : 0);
  mlfab__blake2b_add(&s, text, strlen(text) + 1);
  mlfab__blake2b_add(&s, data, bytes);
  mlfab__blake2b_end(&s, digest);
}

/* Writes a number as little-endian bytes. */
static void session_number(uint8_t at[8], uint64_t number) {
  for (int i = 0; i < 8; i++) at[i] = (uint8_t)(number >> 8 * i);
}

static uint64_t session_word(const uint8_t *at, int bytes) {
  uint64_t word = 0;
  for (int i = 0; i < bytes; i++) word |= (uint64_t)at[i] << 8 * i;
  return word;
}

/* Hashes a number that is no counter of a frame. */
static void session_hash_number(uint8_t digest[SESSION_DIGEST], const uint64_t state[8],
                                uint64_t number) {
  uint8_t text[8];
  mlfab__blake2b s;
  session_number(text, number);
  mlfab__blake2b_resume(&s, state, SESSION_DIGEST);
  mlfab__blake2b_add(&s, text, sizeof text);
  mlfab__blake2b_end(&s, digest);
}

static void session_codes(mlfab__codes *codes, const uint64_t state[8]) {
  uint8_t digest[SESSION_DIGEST];
  session_hash_number(digest, state, SESSION_MIX);
  for (int i = 0; i < 3; i++) codes->mix[i] = session_word(digest + 8 * i, 8);
  codes->block = UINT64_MAX;
  mlfab__wipe(digest, sizeof digest);
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
    uint64_t *state = own ? session->out : session->in;
    mlfab__blake2b_prepare(state, SESSION_DIGEST, one, sizeof one);
    session_codes(own ? &session->codes_out : &session->codes_in, state);
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
  session_number(first, counter);
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

MLFAB__INTERNAL uint32_t mlfab__session_code(const uint64_t state[8], mlfab__codes *codes,
                                             uint64_t counter, uint32_t meta_bytes,
                                             uint32_t bulk_bytes) {
  uint64_t block = counter / MLFAB__COUNT(codes->pads);
  if (codes->block != block) {
    uint8_t digest[SESSION_DIGEST];
    session_hash_number(digest, state, SESSION_PADS + block);
    for (size_t i = 0; i < MLFAB__COUNT(codes->pads); i++)
      codes->pads[i] = (uint32_t)session_word(digest + 4 * i, 4);
    codes->block = block;
    mlfab__wipe(digest, sizeof digest);
  }
  uint64_t mixed = codes->mix[0] + codes->mix[1] * meta_bytes + codes->mix[2] * bulk_bytes;
  return (uint32_t)(mixed >> 32) ^ codes->pads[counter % MLFAB__COUNT(codes->pads)];
}

#undef SESSION_PADS
#undef SESSION_MIX
