/* mlfab_remote.h - files at a WebDAV server and objects in S3: single operations, repeated if that helps. Internal:
 * mlfab_store.c uses it. mlfab_http.h runs the requests.
 *
 * An operation has a deadline: timeout_ns plus the time that its bytes need at REMOTE_RATE. Within it a request is
 * repeated if mlfab_http.h reports that it may succeed later, at most REMOTE_ATTEMPTS times in a row without a byte of
 * progress:
 *
 *    request --success--> done
 *       ^ |---refused, cancelled, attempts or time used up--> failed
 *       +-pause (250 ms, twice as long each time up to 8 s, half of it random; at least Retry-After)
 *
 * Invariants
 *  (1) A repeated request has the effect of one: PUT, DELETE and parts name their place. After MOVE and the end of an
 *      upload, whose answers may be lost, a 404 counts as success if the file now has its name and length.
 *  (2) Each S3 request is signed anew, with a SHA-256 of its body, and sent exactly as it was signed.
 *  (3) `why` never contains a password, a key or a signature.
 *
 * One thread at a time uses a remote; `cancelled` is the exception. Functions return 0 or more, or a negative errno
 * with its reason in `why`: ENOENT; EACCES (401, 403); ENOSPC (507); EFBIG (413, an endless answer); ETIMEDOUT (out of
 * reach until the deadline); ECANCELED; ENOMEM; EINVAL (the path); EIO.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_REMOTE_H
#define MLFAB_REMOTE_H

#include "mlfab_http.h"
#include "mlfab_store.h"

enum {
  MLFAB__REMOTE_WHY = 160,
  MLFAB__REMOTE_URL = 2048,
  MLFAB__REMOTE_KEY = 600,
  MLFAB__REMOTE_PARTS = 10000, /* S3's limit of parts of an upload */
  MLFAB__REMOTE_ETAG = 64,
  MLFAB__REMOTE_ID = 512
};

typedef struct mlfab__remote {
  mlfab_store_options options; /* complete; whoever made it owns the texts */
  mlfab__http *http;
  int cancelled; /* atomic */
  unsigned dice;
  char why[MLFAB__REMOTE_WHY]; /* reason of the last failed operation; "": none has failed */
  mlfab__http_answer answer;
} mlfab__remote;

/* A file's place. */
typedef struct mlfab__place {
  int s3;
  char key[MLFAB__REMOTE_KEY]; /* S3: not encoded; WebDAV: all behind the host, as it is sent */
  char root[300]; /* "https://host:port", for S3 followed by "/bucket" if the path has it */
} mlfab__place;

/* Bytes to send. `read` as in mlfab_http.h. */
typedef struct mlfab__source {
  int64_t (*read)(void *user, void *data, size_t room, uint64_t offset);
  void *user;
  uint64_t bytes;
} mlfab__source;

/* An upload to S3 in parts. Zeros: none. */
typedef struct mlfab__upload {
  char id[MLFAB__REMOTE_ID];
  uint32_t parts, parts_most;
  char (*etags)[MLFAB__REMOTE_ETAG]; /* parts_most of them */
} mlfab__upload;

/* Is the path a URL that a remote knows? */
int mlfab__remote_knows(const char *path);
/* Finds the place of a path; `directory` 1: of a directory, whose key is "" or ends with "/". */
int mlfab__remote_place(mlfab__remote *remote, const char *path, int directory,
                        mlfab__place *place);

/* Reads up to `bytes` from `offset` on: returns their number. *total_p: the whole length. */
int64_t mlfab__remote_get(mlfab__remote *remote, const mlfab__place *place, void *data,
                          size_t bytes, uint64_t offset, uint64_t *total_p);
int mlfab__remote_put(mlfab__remote *remote, const mlfab__place *place,
                      const mlfab__source *source);
/* For WebDAV. `bytes`: length of the file. */
int mlfab__remote_move(mlfab__remote *remote, const mlfab__place *from, const mlfab__place *to,
                       uint64_t bytes);
int mlfab__remote_delete(mlfab__remote *remote, const mlfab__place *place);
/* Lists names in a directory that begin with `prefix`, each ended by a newline, and in S3 NAME.part for each unfinished
 * upload of NAME: returns the bytes. ERANGE: more than `room`. */
int64_t mlfab__remote_list(mlfab__remote *remote, const mlfab__place *directory, const char *prefix,
                           char *names, size_t room);

/* For S3: sends all parts; then the object appears. After an error the upload stays until it is aborted. */
int mlfab__remote_upload(mlfab__remote *remote, const mlfab__place *place,
                         const mlfab__source *source, mlfab__upload *upload);
int mlfab__remote_complete(mlfab__remote *remote, const mlfab__place *place, mlfab__upload *upload,
                           uint64_t bytes);
/* For S3: aborts all unfinished uploads of this object. */
int mlfab__remote_abort(mlfab__remote *remote, const mlfab__place *place);
void mlfab__remote_forget(mlfab__upload *upload);

#endif /* MLFAB_REMOTE_H */
