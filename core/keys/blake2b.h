/* blake2b.h - BLAKE2b with a key: a hash that can be computed only with the key.
 *
 * It does not encrypt. A digest has 1 to 64 bytes, a key 0 to 64 (0: a plain hash). The state depends on the key: wipe
 * the state and the key after use.
 *
 * Source: RFC 7693. Cost: 0.8 to 1.4 GB/s a core. */
#ifndef MLFAB__BLAKE2B_H
#define MLFAB__BLAKE2B_H

#include "../base/base.h"

#define MLFAB__BLAKE2B_BLOCK 128u
#define MLFAB__BLAKE2B_MAX 64u /* bytes of a digest, and of a key */

typedef struct mlfab__blake2b {
  uint64_t h[8];
  uint64_t bytes; /* bytes hashed so far, without those in `block`; below 2^64 */
  uint32_t held;  /* bytes in `block`; it is hashed when more bytes follow */
  uint32_t digest_bytes;
  uint8_t block[MLFAB__BLAKE2B_BLOCK];
} mlfab__blake2b;

MLFAB__INTERNAL void mlfab__blake2b_begin(mlfab__blake2b *s, uint32_t digest_bytes, const void *key,
                                          uint32_t key_bytes);
MLFAB__INTERNAL void mlfab__blake2b_add(mlfab__blake2b *s, const void *data, size_t bytes);
/* Writes the digest, and wipes the state. */
MLFAB__INTERNAL void mlfab__blake2b_end(mlfab__blake2b *s, void *digest);

/* Writes the state after the key was hashed, 64 bytes: for many digests under one key. It hashes the key's block, so at
 * least one byte has to be added after `resume`. */
MLFAB__INTERNAL void mlfab__blake2b_prepare(uint64_t h[8], uint32_t digest_bytes, const void *key,
                                            uint32_t key_bytes);
MLFAB__INTERNAL void mlfab__blake2b_resume(mlfab__blake2b *s, const uint64_t h[8],
                                           uint32_t digest_bytes);

/* Overwrites memory, even if the compiler sees that nobody reads it again. */
MLFAB__INTERNAL void mlfab__wipe(void *memory, size_t bytes);
/* Returns 1 if the two are equal. The time does not depend on the contents. */
MLFAB__INTERNAL int mlfab__same_secret(const void *a, const void *b, size_t bytes);

#endif
