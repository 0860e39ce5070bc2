/* record.c - encodes and checks the bytes of a checkpoint's files. See record.h. */
#include "record.h"

#include "../wire/codec.h"

#include <stdio.h>

/* Larger numbers count as foreign: the numbers after them must keep as many digits. */
#define RECORD_NUMBER_MOST 100000000000000000u
#define RECORD_MAGIC 0x4b434c4du /* "MLCK" */

static void record_put16(uint8_t *at, uint16_t x) { wire_number(at, &x, sizeof x); }

MLFAB__INTERNAL void mlfab__record_seal(uint8_t *head, const mlfab__file_record *record) {
  wire_put32(head, RECORD_MAGIC);
  record_put16(head + 4, MLFAB__RECORD_FORMAT);
  record_put16(head + 6, record->type);
  wire_put32(head + 8, record->index);
  wire_put32(head + 12, 0);
  wire_put32(head + 16, record->meta_bytes);
  wire_put32(head + 20, record->bulk_bytes);
  wire_put64(head + 24, record->set);
  uint32_t crc = mlfab__crc32c(0, head + MLFAB__RECORD_BYTES, record->meta_bytes);
  wire_put32(head + 32, mlfab__crc32c(crc, record->bulk, record->bulk_bytes));
  wire_put32(head + 36, mlfab__crc32c(0, head, 36));
}

/* Checks the header: returns NULL, or a text that names the fault. */
static const char *record_header(const uint8_t *at) {
  if (wire_get32(at) != RECORD_MAGIC) return "it is no file of a checkpoint";
  uint16_t format = wire_get16(at + 4);
  if (format < MLFAB__RECORD_FORMAT)
    return "it has an older format, which this version cannot read";
  if (format > MLFAB__RECORD_FORMAT) return "it has a newer format than this version can read";
  if (wire_get32(at + 36) != mlfab__crc32c(0, at, 36)) return "a record's header is damaged";
  if (wire_get32(at + 12) != 0 || wire_get32(at + 16) > MLFAB_META_MAX ||
      wire_get32(at + 20) > MLFAB_BULK_MAX)
    return "a record's header is impossible";
  return NULL;
}

MLFAB__INTERNAL int64_t mlfab__record_open(const uint8_t *at, uint64_t bytes,
                                           mlfab__file_record *record, const char **why_p) {
  if (bytes < MLFAB__RECORD_BYTES) return 0;
  *why_p = record_header(at);
  if (*why_p) return MLFAB_ERR_CHECKPOINT;
  record->type = wire_get16(at + 6);
  record->index = wire_get32(at + 8);
  record->meta_bytes = wire_get32(at + 16);
  record->bulk_bytes = wire_get32(at + 20);
  record->set = wire_get64(at + 24);
  record->meta = at + MLFAB__RECORD_BYTES;
  record->bulk = record->meta + record->meta_bytes;
  uint64_t payload = (uint64_t)record->meta_bytes + record->bulk_bytes;
  if (bytes - MLFAB__RECORD_BYTES < payload) return 0;
  if (wire_get32(at + 32) != mlfab__crc32c(0, record->meta, payload)) {
    *why_p = "a record is damaged";
    return MLFAB_ERR_CRC;
  }
  return (int64_t)(MLFAB__RECORD_BYTES + payload);
}

MLFAB__INTERNAL uint32_t mlfab__record_chain(uint32_t chain, const uint8_t *head) {
  return mlfab__crc32c(chain, head, MLFAB__RECORD_BYTES);
}

/* --- names --- */

/* Reads a number of at most 18 digits at *at_p, and moves *at_p behind it. */
static int record_number(const char **at_p, const char *end, uint64_t *x_p) {
  const char *at = *at_p;
  uint64_t x = 0;
  int digits = 0;
  for (; at < end && *at >= '0' && *at <= '9' && digits < 18; at++, digits++)
    x = 10 * x + (uint64_t)(*at - '0');
  *at_p = at;
  *x_p = x;
  return digits > 0 && x <= RECORD_NUMBER_MOST;
}

static int record_text(const char **at_p, const char *end, const char *text) {
  size_t n = strlen(text);
  if ((size_t)(end - *at_p) < n || memcmp(*at_p, text, n) != 0) return 0;
  *at_p += n;
  return 1;
}

MLFAB__INTERNAL int mlfab__record_parse(const char *name, size_t bytes, mlfab__record_name *out) {
  const char *end = name + bytes;
  uint64_t server = 0, servers = 0;
  memset(out, 0, sizeof *out);
  if (!record_text(&name, end, "checkpoint-") || !record_number(&name, end, &out->number) ||
      out->number == 0)
    return 0;
  out->manifest = record_text(&name, end, ".manifest");
  if (!out->manifest && (!record_text(&name, end, "-") || !record_number(&name, end, &server) ||
                         !record_text(&name, end, "-of-") || !record_number(&name, end, &servers) ||
                         !record_text(&name, end, ".shard") || servers == 0 ||
                         servers > MLFAB__CHECKPOINT_SHARDS_MAX || server >= servers))
    return 0;
  out->part = record_text(&name, end, ".part");
  return name == end;
}

MLFAB__INTERNAL void mlfab__record_path(char path[MLFAB__RECORD_PATH], const char *dir,
                                        uint64_t number, uint32_t server, uint32_t servers) {
  int at = snprintf(path, MLFAB__RECORD_PATH, "%.255s/checkpoint-%08llu", dir,
                    (unsigned long long)number);
  size_t room = MLFAB__RECORD_PATH - (size_t)at;
  if (servers == 0) {
    snprintf(path + at, room, ".manifest");
  } else {
    snprintf(path + at, room, "-%u-of-%u.shard", server, servers);
  }
}

MLFAB__INTERNAL int mlfab__record_each(const char *names, size_t bytes, size_t *at_p,
                                       const char **name_p, size_t *bytes_p,
                                       mlfab__record_name *out) {
  while (*at_p < bytes) {
    const char *name = names + *at_p, *end = memchr(name, '\n', bytes - *at_p);
    size_t n = end ? (size_t)(end - name) : bytes - *at_p;
    *at_p += n + (end != NULL);
    if (!mlfab__record_parse(name, n, out)) continue;
    *name_p = name;
    *bytes_p = n;
    return 1;
  }
  return 0;
}
