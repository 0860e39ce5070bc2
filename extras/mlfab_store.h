/*
 * mlfab_store.h - checkpoints in a WebDAV server or in S3. Optional; it needs libcurl 7.68 and OpenSSL 1.1.1 or later.
 *
 *    #include "mlfab_store.h"
 *    mlfab_store *store;
 *    mlfab_env env = {.size = sizeof env};
 *    if (mlfab_store_open(NULL, &store, &error)) ...
 *    env.files = mlfab_store_files(store);
 *    config.env = &env;                        (mlfab_open, ..., mlfab_close)
 *    mlfab_store_close(&store);
 *
 *    cc trainer.c mlfab.c mlfab_store.c mlfab_remote.c mlfab_sigv4.c mlfab_http.c -lcurl -lcrypto -lpthread -lm
 *    (beside them mlfab.h, mlfab_transport.h and the headers mlfab_*.h of this folder)
 *
 * Then a directory of checkpoints (checkpoint_dir, resume, mlfab_restore, mlfab_checkpoint_options.dir) may be
 *
 *    https://host/path/     a collection of a WebDAV server that exists: PUT, MOVE, DELETE, GET with Range, PROPFIND
 *    s3://bucket/prefix     objects of S3, or of a server that speaks its protocol (endpoint)
 *
 * and any other directory is a local one, as before. Each process that holds slices of the model needs this: servers,
 * and workers that are servers, too. Of files in a store mlfab reads and writes those of checkpoints only.
 *
 * A file is first written to a temporary file in spool_dir, which needs room for the process's shard, and then sent. So
 * a slow store holds the model's blocks no longer than a local disk does, a failed transfer can be repeated, and memory
 * stays small. A file gets its name only when it is whole: by MOVE from NAME.part, or by S3, whose uploads appear at
 * their end. The next checkpoint removes what a killed process leaves (files NAME.part, unfinished uploads of S3).
 *
 * Transfers run in the thread of checkpoints, never in training. A transfer is repeated if the store is out of reach,
 * or answers 408, 429 or 5xx. Its limits: 6 attempts in a row that move no byte, pauses of 8 s, and timeout_ns plus the
 * time of its bytes at 100 kB/s in all. A restore continues behind its last byte. A refusal of
 * the store is final. mlfab_close ends a transfer. Redirects are not followed.
 *
 * Errors of mlfab_checkpoint, and of mlfab_model_start after mlfab_restore: IO, or TIMEOUT if a later attempt may
 * succeed (a restore then takes no older checkpoint). They have the URL, the method, the status and the store's reason.
 * If a clock is wrong for S3, the error tells by how much.
 *
 * Proxies of the environment are used (https_proxy, http_proxy, no_proxy), except with a password that goes to this host
 * without https. docs/operating.md has the commands.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_STORE_H
#define MLFAB_STORE_H

#include "mlfab.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mlfab_store mlfab_store;

/* A member that is NULL or 0 gets the value of the environment variable that it names, and else the default. */
typedef struct mlfab_store_options {
  uint32_t size;
  uint32_t reserved;
  uint64_t timeout_ns; /* MLFAB_STORE_TIMEOUT_MS; 30 s: see above */
  uint64_t
      part_bytes; /* MLFAB_STORE_PART_BYTES; 16 MiB: a larger file is sent to S3 in parts. AWS wants 5 MiB or more */
  const char *spool_dir; /* TMPDIR; "/var/tmp" */
  const char *ca_file;   /* MLFAB_STORE_CA; trusted certificates in PEM: those of the system */
  /* WebDAV: basic authentication, over https or to this host only. */
  const char *user;     /* MLFAB_STORE_USER */
  const char *password; /* MLFAB_STORE_PASSWORD */
  /* S3. */
  const char *access_key;    /* AWS_ACCESS_KEY_ID */
  const char *secret_key;    /* AWS_SECRET_ACCESS_KEY */
  const char *session_token; /* AWS_SESSION_TOKEN; none */
  const char *region;        /* AWS_REGION, AWS_DEFAULT_REGION; "us-east-1" */
  /* "https://host:port" of another server than AWS's: there the bucket is the first part of the path.
   * AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL. */
  const char *endpoint;
} mlfab_store_options;

/* Makes a store; connects to nothing yet. Copies the options, which may be NULL; error_p may be NULL. Keys and passwords are
 * never logged or in errors, and mlfab_store_close overwrites the copies.
 * Errors: ARGUMENT (with the member), MEMORY, UNSUPPORTED (this libcurl has no HTTP). */
int mlfab_store_open(const mlfab_store_options *options, mlfab_store **store_p,
                     mlfab_error *error_p);

/* The table for env.files, valid until close. One context uses it at a time. In a forked child files and the store can be
 * closed; requests fail there. */
const mlfab_files *mlfab_store_files(mlfab_store *store);

/* After mlfab_close. *store_p becomes NULL; NULL is allowed. */
void mlfab_store_close(mlfab_store **store_p);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_STORE_H */
