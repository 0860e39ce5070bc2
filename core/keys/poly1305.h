/* poly1305.h - Poly1305: a checksum that can be computed only with its key. A key serves for one message.
 *
 * The key consists of two numbers, r and s. An attacker who sees two messages with one key can forge a third: draw a
 * new key for each message (session.h does). The function does not encrypt. It wipes r and the powers of r.
 *
 * Source: RFC 8439 §2.5; Bernstein, "The Poly1305-AES message-authentication code", 2005. Cost: 5.3 GB/s
 * with AVX2, 1.6 without (one core of a Xeon, 256 KiB that are in its cache). */
#ifndef MLFAB__POLY1305_H
#define MLFAB__POLY1305_H

#include "../base/base.h"

enum { MLFAB__POLY1305_KEY = 32, MLFAB__POLY1305_TAG = 16 };

/* data: not NULL. */
MLFAB__INTERNAL void mlfab__poly1305(const uint8_t key[MLFAB__POLY1305_KEY], const void *data,
                                     size_t bytes, uint8_t tag[MLFAB__POLY1305_TAG]);
/* The same with a chosen code path, for tests. level: 0 portable, 1 with AVX2; at most the level of this processor. */
MLFAB__INTERNAL void mlfab__poly1305_with(int level, const uint8_t key[MLFAB__POLY1305_KEY],
                                          const void *data, size_t bytes,
                                          uint8_t tag[MLFAB__POLY1305_TAG]);
MLFAB__INTERNAL int mlfab__poly1305_level(void);

#endif
