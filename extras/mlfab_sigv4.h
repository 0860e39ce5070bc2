/* mlfab_sigv4.h - AWS Signature Version 4 of one request, in S3's form. Internal: mlfab_remote.c signs with it.
 *
 * Pure functions; SHA-256 and HMAC are OpenSSL's. S3's way: the path is encoded once, and "." and ".." in it stay.
 *
 * Invariants
 *  (1) The signed query is sorted by encoded name, then by encoded value. mlfab__sigv4_query writes the same order, so
 *      the sent query is the signed query. A name without a value has a "=" behind it in both.
 *  (2) All given headers are signed: names in lower case, sorted, values without spaces around them and with single
 *      spaces inside; several of one name become one, in the given order.
 *  (3) Functions wipe keys, and data derived from them, before they return.
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
  const char *path;                 /* in its sent form: encoded, "/" at least */
  const mlfab__sigv4_pair *query;   /* not encoded; at most MLFAB__SIGV4_PAIRS */
  const mlfab__sigv4_pair *headers; /* likewise; host and x-amz-date must be among them */
  uint32_t nquery, nheaders;
  const char *payload; /* SHA-256 of the body in hex */
  const char *date;    /* "20150830T123600Z" */
  const char *region, *service, *access_key, *secret_key;
} mlfab__sigv4_request;

/* Writes the value of the header Authorization, at most MLFAB__SIGV4_AUTH bytes. Returns 0; or -1: too many pairs, an
 * invalid date, too little room, or OpenSSL has refused. */
int mlfab__sigv4_sign(const mlfab__sigv4_request *request, char *text, size_t room);
/* Writes the query as it is sent, sorted, without "?". Returns 0 or -1. */
int mlfab__sigv4_query(const mlfab__sigv4_pair *query, uint32_t n, char *text, size_t room);
/* Writes a path or a part of one: encodes every byte except letters, digits, "-._~" and "/". Returns 0 or -1. */
int mlfab__sigv4_path(const char *path, char *text, size_t room);
/* Computes SHA-256 in hex. Returns 0 or -1. */
int mlfab__sigv4_hash(const void *data, size_t bytes, char hex[MLFAB__SIGV4_HEX]);
/* Writes bytes as hex and a zero behind. */
void mlfab__sigv4_hex(const uint8_t *bytes, size_t n, char *hex);

#endif /* MLFAB_SIGV4_H */
