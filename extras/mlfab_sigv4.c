/* mlfab_sigv4.c - computes AWS Signature Version 4 of one request. See mlfab_sigv4.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "mlfab_sigv4.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIGV4_SUM = 32, SIGV4_DATE = 16, SIGV4_SCOPE = 160, SIGV4_NAME = 64 };

/* --- bytes as text --- */

void mlfab__sigv4_hex(const uint8_t *bytes, size_t n, char *hex) {
  static const char digits[] = "0123456789abcdef";
  for (size_t i = 0; i < n; i++) {
    hex[2 * i] = digits[bytes[i] >> 4];
    hex[2 * i + 1] = digits[bytes[i] & 15];
  }
  hex[2 * n] = 0;
}

int mlfab__sigv4_hash(const void *data, size_t bytes, char hex[MLFAB__SIGV4_HEX]) {
  uint8_t sum[SIGV4_SUM];
  if (EVP_Digest(data, bytes, sum, NULL, EVP_sha256(), NULL) != 1) return -1;
  mlfab__sigv4_hex(sum, sizeof sum, hex);
  return 0;
}

static int sigv4_plain(unsigned char c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '-' ||
         c == '.' || c == '_' || c == '~';
}

/* Appends `from`, encoded, at *at_p. `kept` is one more character that stays; 0: none. */
static int sigv4_encode(const char *from, char kept, char *text, size_t room, size_t *at_p) {
  static const char digits[] = "0123456789ABCDEF";
  for (; *from; from++) {
    unsigned char c = (unsigned char)*from;
    int plain = sigv4_plain(c) || (kept && *from == kept);
    if (room - *at_p < (plain ? 2u : 4u)) return -1;
    if (!plain) {
      text[(*at_p)++] = '%';
      text[(*at_p)++] = digits[c >> 4];
    }
    text[(*at_p)++] = plain ? *from : digits[c & 15];
  }
  text[*at_p] = 0;
  return 0;
}

int mlfab__sigv4_path(const char *path, char *text, size_t room) {
  size_t at = 0;
  if (room == 0) return -1;
  text[0] = 0;
  return sigv4_encode(path, '/', text, room, &at);
}

/* --- the order of pairs --- */

/* Compares as if each byte were encoded: an encoded byte begins with "%", which is before all plain characters. */
static int sigv4_compare(const char *a, const char *b) {
  for (; *a && *a == *b; a++, b++) {
  }
  unsigned char x = (unsigned char)*a, y = (unsigned char)*b;
  if (x == y) return 0;
  if (!x || !y) return x ? 1 : -1;
  int px = sigv4_plain(x), py = sigv4_plain(y);
  if (px != py) return px ? 1 : -1;
  return x < y ? -1 : 1;
}

static int sigv4_query_order(const mlfab__sigv4_pair *a, const mlfab__sigv4_pair *b) {
  int order = sigv4_compare(a->name, b->name);
  return order ? order : sigv4_compare(a->value, b->value);
}

/* tolower of the C locale, whatever the locale of the process. */
static char sigv4_lower_letter(char c) {
  return (char)(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
}

/* strcasecmp, likewise. */
static int sigv4_compare_names(const char *a, const char *b) {
  while (*a && sigv4_lower_letter(*a) == sigv4_lower_letter(*b)) a++, b++;
  return (unsigned char)sigv4_lower_letter(*a) - (unsigned char)sigv4_lower_letter(*b);
}

static int sigv4_header_order(const mlfab__sigv4_pair *a, const mlfab__sigv4_pair *b) {
  return sigv4_compare_names(a->name, b->name);
}

/* Sorts; equal pairs keep their order. */
static int sigv4_sort(const mlfab__sigv4_pair *from, uint32_t n, mlfab__sigv4_pair *to,
                      int (*order)(const mlfab__sigv4_pair *, const mlfab__sigv4_pair *)) {
  if (n > MLFAB__SIGV4_PAIRS) return -1;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t at = i;
    for (; at > 0 && order(&to[at - 1], &from[i]) > 0; at--) to[at] = to[at - 1];
    to[at] = from[i];
  }
  return 0;
}

int mlfab__sigv4_query(const mlfab__sigv4_pair *query, uint32_t n, char *text, size_t room) {
  mlfab__sigv4_pair sorted[MLFAB__SIGV4_PAIRS];
  size_t at = 0;
  if (room == 0 || sigv4_sort(query, n, sorted, sigv4_query_order)) return -1;
  text[0] = 0;
  for (uint32_t i = 0; i < n; i++) {
    if (room - at < 3) return -1;
    if (i > 0) text[at++] = '&';
    if (sigv4_encode(sorted[i].name, 0, text, room, &at) || room - at < 2) return -1;
    text[at++] = '=';
    text[at] = 0;
    if (sigv4_encode(sorted[i].value, 0, text, room, &at)) return -1;
  }
  return 0;
}

/* --- the canonical request, which is only hashed --- */

static int sigv4_add(EVP_MD_CTX *sum, const char *text) {
  return EVP_DigestUpdate(sum, text, strlen(text)) != 1;
}

/* Adds a header's value: without spaces around it, and with single spaces inside. */
static int sigv4_add_value(EVP_MD_CTX *sum, const char *value) {
  int bad = 0, started = 0, spaces = 0;
  for (; *value && !bad; value++) {
    if (*value == ' ' || *value == '\t') {
      spaces = started;
      continue;
    }
    if (spaces) bad = EVP_DigestUpdate(sum, " ", 1) != 1;
    spaces = 0;
    started = 1;
    bad = bad || EVP_DigestUpdate(sum, value, 1) != 1;
  }
  return bad;
}

static void sigv4_lower(const char *name, char *lower) {
  size_t i = 0;
  for (; name[i] && i < SIGV4_NAME - 1; i++) lower[i] = sigv4_lower_letter(name[i]);
  lower[i] = 0;
}

static int sigv4_add_headers(EVP_MD_CTX *sum, const mlfab__sigv4_pair *sorted, uint32_t n) {
  char lower[SIGV4_NAME];
  int bad = 0;
  for (uint32_t i = 0; i < n && !bad; i++) {
    int goes_on = i > 0 && sigv4_compare_names(sorted[i - 1].name, sorted[i].name) == 0;
    sigv4_lower(sorted[i].name, lower);
    if (goes_on) {
      bad = sigv4_add(sum, ",");
    } else {
      bad = (i > 0 && sigv4_add(sum, "\n")) || sigv4_add(sum, lower) || sigv4_add(sum, ":");
    }
    bad = bad || sigv4_add_value(sum, sorted[i].value);
  }
  return bad || sigv4_add(sum, "\n\n");
}

/* "host;x-amz-date" */
static int sigv4_names(const mlfab__sigv4_pair *sorted, uint32_t n, char *text, size_t room) {
  char lower[SIGV4_NAME];
  size_t at = 0;
  text[0] = 0;
  for (uint32_t i = 0; i < n; i++) {
    if (i > 0 && sigv4_compare_names(sorted[i - 1].name, sorted[i].name) == 0) continue;
    sigv4_lower(sorted[i].name, lower);
    int k = snprintf(text + at, room - at, "%s%s", at ? ";" : "", lower);
    if (k < 0 || (size_t)k >= room - at) return -1;
    at += (size_t)k;
  }
  return 0;
}

static int sigv4_canonical(const mlfab__sigv4_request *r, const mlfab__sigv4_pair *sorted,
                           const char *names, char hex[MLFAB__SIGV4_HEX]) {
  char query[4096];
  uint8_t sum[SIGV4_SUM];
  if (mlfab__sigv4_query(r->query, r->nquery, query, sizeof query)) return -1;
  EVP_MD_CTX *ctx = EVP_MD_CTX_new();
  if (!ctx) return -1;
  int bad = EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) != 1 || sigv4_add(ctx, r->method) ||
            sigv4_add(ctx, "\n") || sigv4_add(ctx, r->path) || sigv4_add(ctx, "\n") ||
            sigv4_add(ctx, query) || sigv4_add(ctx, "\n") ||
            sigv4_add_headers(ctx, sorted, r->nheaders) || sigv4_add(ctx, names) ||
            sigv4_add(ctx, "\n") || sigv4_add(ctx, r->payload) ||
            EVP_DigestFinal_ex(ctx, sum, NULL) != 1;
  EVP_MD_CTX_free(ctx);
  if (!bad) mlfab__sigv4_hex(sum, sizeof sum, hex);
  return bad ? -1 : 0;
}

/* --- the signature --- */

static int sigv4_hmac(uint8_t key[SIGV4_SUM], size_t key_bytes, const char *text,
                      uint8_t out[SIGV4_SUM]) {
  unsigned bytes = SIGV4_SUM;
  return HMAC(EVP_sha256(), key, (int)key_bytes, (const unsigned char *)text, strlen(text), out,
              &bytes) == NULL;
}

/* HMAC in a chain: date, region, service, "aws4_request", and then the text to sign. */
static int sigv4_chain(const mlfab__sigv4_request *r, const char *to_sign,
                       char hex[MLFAB__SIGV4_HEX]) {
  char day[9];
  uint8_t first[256], a[SIGV4_SUM], b[SIGV4_SUM];
  int n = snprintf((char *)first, sizeof first, "AWS4%s", r->secret_key);
  int bad = n < 0 || (size_t)n >= sizeof first;
  snprintf(day, sizeof day, "%.8s", r->date);
  bad = bad || sigv4_hmac(first, (size_t)n, day, a) || sigv4_hmac(a, sizeof a, r->region, b) ||
        sigv4_hmac(b, sizeof b, r->service, a) || sigv4_hmac(a, sizeof a, "aws4_request", b) ||
        sigv4_hmac(b, sizeof b, to_sign, a);
  if (!bad) mlfab__sigv4_hex(a, sizeof a, hex);
  OPENSSL_cleanse(first, sizeof first);
  OPENSSL_cleanse(a, sizeof a);
  OPENSSL_cleanse(b, sizeof b);
  return bad ? -1 : 0;
}

int mlfab__sigv4_sign(const mlfab__sigv4_request *r, char *text, size_t room) {
  mlfab__sigv4_pair sorted[MLFAB__SIGV4_PAIRS];
  char names[512], scope[SIGV4_SCOPE], hex[MLFAB__SIGV4_HEX], to_sign[320];
  if (strlen(r->date) != SIGV4_DATE ||
      sigv4_sort(r->headers, r->nheaders, sorted, sigv4_header_order) ||
      sigv4_names(sorted, r->nheaders, names, sizeof names) ||
      sigv4_canonical(r, sorted, names, hex))
    return -1;
  int n = snprintf(scope, sizeof scope, "%.8s/%s/%s/aws4_request", r->date, r->region, r->service);
  if (n < 0 || (size_t)n >= sizeof scope) return -1;
  snprintf(to_sign, sizeof to_sign, "AWS4-HMAC-SHA256\n%s\n%s\n%s", r->date, scope, hex);
  if (sigv4_chain(r, to_sign, hex)) return -1;
  n = snprintf(text, room, "AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%s",
               r->access_key, scope, names, hex);
  return n < 0 || (size_t)n >= room ? -1 : 0;
}
