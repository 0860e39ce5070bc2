/* record.h - the bytes of a checkpoint's files: records. Pure functions.
 *
 * A checkpoint is the manifest `checkpoint-NNNNNNNN.manifest` and one file `checkpoint-NNNNNNNN-S-of-M.shard` for each
 * server. A file is a sequence of records; all numbers are little-endian:
 *
 *    0  u32 magic "MLCK"            16  u32 meta bytes
 *    4  u16 format, 2               20  u32 bulk bytes
 *    6  u16 type                    24  u64 set
 *    8  u32 index in its file       32  u32 CRC32C of meta and bulk
 *   12  u32 zero                    36  u32 CRC32C of the 36 bytes before
 *   40  meta (state.h), then bulk
 *
 * A shard's file: HEAD, DEFINE (a DEFINE frame's meta, its table as bulk), CLOCK, WORKER for each worker,
 * then for each slice SLICE and its BYTES, then END. The manifest's file: MANIFEST.
 *
 * `set` is one number for all files of an attempt: its upper half is the history of the model, its lower half a random
 * number of the process of server 0 that led the attempt. With the number, files of two attempts never mix. A history
 * is drawn when a model begins. A model that continues from one of its checkpoints or copies keeps it. The manifest has
 * the length of each shard file, and its chain: a CRC32C over the headers of its records, which cover all other bytes.
 *
 * Invariant: any change of any byte of a file, and any other length, is an error of record_open, or a wrong chain or
 * length. */
#ifndef MLFAB__RECORD_H
#define MLFAB__RECORD_H

#include "checkpoint_wire.h"
#include "state.h"

enum { MLFAB__RECORD_FORMAT = 2, MLFAB__RECORD_BYTES = 40 };

/* Writes the header of a record in front of the meta at head + 40. Ignores record->meta. */
MLFAB__INTERNAL void mlfab__record_seal(uint8_t *head, const mlfab__file_record *record);
/* Reads the record at the start of `bytes` bytes. Returns its length; 0 when more bytes are needed; or CHECKPOINT or CRC,
 * with the reason in *why_p (static). */
MLFAB__INTERNAL int64_t mlfab__record_open(const uint8_t *at, uint64_t bytes,
                                           mlfab__file_record *record, const char **why_p);
/* Returns the chain continued with this record's header. Initially 0. */
MLFAB__INTERNAL uint32_t mlfab__record_chain(uint32_t chain, const uint8_t *head);

static inline uint32_t mlfab__record_history(uint64_t set) { return (uint32_t)(set >> 32); }

/* --- names --- */

enum { MLFAB__RECORD_NAME = 64, MLFAB__RECORD_PATH = MLFAB__TEXT_MAX + MLFAB__RECORD_NAME };

/* The parts of a file name. `part`: the file was being written. */
typedef struct mlfab__record_name {
  uint64_t number;
  int manifest, part;
} mlfab__record_name;

/* Returns 1 if the `bytes` bytes are the name of a checkpoint's file. */
MLFAB__INTERNAL int mlfab__record_parse(const char *name, size_t bytes, mlfab__record_name *out);
/* Writes dir, "/" and the name of a shard's file, or of the manifest (servers 0). */
MLFAB__INTERNAL void mlfab__record_path(char path[MLFAB__RECORD_PATH], const char *dir,
                                        uint64_t number, uint32_t server, uint32_t servers);
/* Walks a list of names, each ended by a newline: finds the next name of a checkpoint's file from *at_p on (initially
 * 0); returns 0 after the last. *name_p: its text, *bytes_p long. */
MLFAB__INTERNAL int mlfab__record_each(const char *names, size_t bytes, size_t *at_p,
                                       const char **name_p, size_t *bytes_p,
                                       mlfab__record_name *out);

#endif
