/* mlfab_sigv4.h - AWS Signature Version 4 of one request, as S3 wants it. Internal: what mlfab_store.c signs with.
 *
 * Pure functions; SHA-256 and HMAC are OpenSSL's. S3's way: the path is encoded once, and "." and ".." in it stay.
 *
 * Invariants
 *  (1) The signed query is sorted by encoded name, then by encoded value, and mlfab__sigv4_query writes that same order: what is
 *      sent is what is signed. A name without a value has a "=" behind it in both.
 *  (2) All headers given are signed: names in lower case, sorted, values without spaces around them and with single
 *      ones in them; several of one name are one, in the order given.
 *  (3) Keys and what is derived from them are wiped before a function returns.
 *
 * Source: Amazon S3 API Reference, "Signature Calculations for the Authorization Header".
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_SIGV4_H
#define MLFAB_SIGV4_H

#include <stddef.h>
#include <stdint.h>

enum { MLFAB__SIGV4_PAIRS = 16, MLFAB__SIGV4_HEX = 65, MLFAB__SIGV4_AUTH = 1024 };

typedef struct mlfab__sigv4_pair {
  const char *name, *value;
} mlfab__sigv4_pair;

typedef struct mlfab__sigv4_request {
  const char *method;
  const char *path;                 /* as it is sent: encoded, "/" at least */
  const mlfab__sigv4_pair *query;   /* not encoded; at most MLFAB__SIGV4_PAIRS */
  const mlfab__sigv4_pair *headers; /* likewise; host and x-amz-date must be among them */
  uint32_t nquery, nheaders;
  const char *payload; /* SHA-256 of the body in hex */
  const char *date;    /* "20150830T123600Z" */
  const char *region, *service, *access_key, *secret_key;
} mlfab__sigv4_request;

/* Writes the value of the header Authorization, at most MLFAB__SIGV4_AUTH bytes. 0; -1: too many pairs, a date that is
 * none, no room, or OpenSSL has refused. */
int mlfab__sigv4_sign(const mlfab__sigv4_request *request, char *text, size_t room);
/* Writes the query as it is sent, sorted, without "?". 0 or -1. */
int mlfab__sigv4_query(const mlfab__sigv4_pair *query, uint32_t n, char *text, size_t room);
/* Writes a path or a part of one: every byte but letters, digits, "-._~" and "/" encoded. 0 or -1. */
int mlfab__sigv4_path(const char *path, char *text, size_t room);
/* SHA-256 in hex. 0 or -1. */
int mlfab__sigv4_hash(const void *data, size_t bytes, char hex[MLFAB__SIGV4_HEX]);
/* Writes bytes as hex and a zero behind. */
void mlfab__sigv4_hex(const uint8_t *bytes, size_t n, char *hex);

#endif /* MLFAB_SIGV4_H */
