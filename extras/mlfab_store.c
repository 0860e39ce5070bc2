/* mlfab_store.c - implements the table of file calls for checkpoints in a WebDAV server or in S3. See mlfab_store.h.
 *
 * For: what core/api/disk.c does with files: a file is written from its beginning to its end, synced, closed and renamed;
 * read in parts; listed; removed. Does not: append to a file that exists, serve other files than checkpoint-*.
 *
 *    FREE --open to write--> SPOOLS --sync--> SENT --close--> WAITS --rename--> FREE
 *      |                        |               |               +--remove--> FREE
 *      |                        +-close---------+- remove, the next open of the same path --> FREE
 *      +--open to read--> READS --close--> FREE
 *
 *                 WebDAV                          S3, up to part_bytes     S3, more
 *    SPOOLS       a temporary file without a name
 *    sync         PUT NAME.part                   nothing                  an upload, all its parts
 *    rename       MOVE NAME.part to NAME          PUT NAME                 the end of the upload
 *    remove       DELETE                          DELETE, or for NAME.part the uploads of NAME are aborted
 *
 * Invariants
 *  (1) A file has its name only after all its bytes are at the server, and at once with all of them.
 *  (2) Data stays in the temporary file until the rename, so every request can be repeated.
 *  (3) Memory: blocks of 64 KB, an answer of at most 16 MB while a directory is listed, and 64 bytes a part of an upload.
 *
 * The table has one thread at a time; the lock is there for mlfab_load, whose caller may be another one.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "mlfab_store.h"
#include "mlfab_transport.h"

#include "mlfab_remote.h"
#include "mlfab_units.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { STORE_FILES = 16, STORE_BASE = 1 << 24, STORE_PATH = 520, STORE_TEXTS = 9 };

static const uint64_t store_timeout_ns = 30000000000u, store_part_bytes = 16u << 20,
                      store_part_least = 64u << 10;

enum store_phase { STORE_FREE, STORE_SPOOLS, STORE_SENT, STORE_WAITS, STORE_READS };

typedef struct store_file {
  enum store_phase phase;
  uint64_t turn; /* the store's at its start: a new file replaces the oldest that waits */
  char path[STORE_PATH];
  mlfab__place place; /* place of the path; for an S3 file being written, without ".part" */
  int spool;          /* a descriptor, or -1 */
  uint64_t bytes;     /* SPOOLS to WAITS: length; READS: the whole length, UINT64_MAX: unknown */
  mlfab__upload upload;
} store_file;

struct mlfab_store {
  mlfab_files table;
  pthread_mutex_t lock;
  pid_t pid; /* in a forked child the lock and the HTTP session belong to the parent */
  mlfab__remote remote;
  char said[MLFAB__REMOTE_WHY]; /* reason of the last failure; "": its errno says all */
  char *texts[STORE_TEXTS];     /* of the options */
  uint64_t turn;
  store_file files[STORE_FILES];
};

/* --- calls --- */

/* In a forked child nobody releases the lock, and the data of the transfer was copied in the middle of a call. So both
 * are left alone. The child may close files and the store; every request fails. */
static void store_check_fork(mlfab_store *store) {
  if (store->pid == getpid()) return;
  store->pid = getpid();
  pthread_mutex_init(&store->lock, NULL);
  store->remote.http = NULL;
  for (int i = 0; i < STORE_FILES; i++) memset(&store->files[i].upload, 0, sizeof(mlfab__upload));
}

static mlfab_store *store_enter(void *user) {
  mlfab_store *store = user;
  store_check_fork(store);
  pthread_mutex_lock(&store->lock);
  store->remote.why[0] = 0;
  return store;
}

static int64_t store_leave(mlfab_store *store, int64_t result) {
  if (result < 0) memcpy(store->said, store->remote.why, sizeof store->said);
  pthread_mutex_unlock(&store->lock);
  return result;
}

static int store_fail(mlfab_store *store, int number, const char *text) {
  snprintf(store->remote.why, sizeof store->remote.why, "%s", text);
  return -number;
}

/* --- files --- */

static void store_free(store_file *file) {
  if (file->spool >= 0) close(file->spool);
  mlfab__remote_forget(&file->upload);
  memset(file, 0, sizeof *file);
  file->spool = -1;
}

/* Returns the file with this handle: NULL for a local file. */
static store_file *store_at(mlfab_store *store, int handle) {
  if (handle < STORE_BASE || handle >= STORE_BASE + STORE_FILES) return NULL;
  return &store->files[handle - STORE_BASE];
}

/* Returns the file that was written under this path. */
static store_file *store_find(mlfab_store *store, const char *path) {
  for (int i = 0; i < STORE_FILES; i++) {
    store_file *file = &store->files[i];
    if (file->phase != STORE_FREE && file->phase != STORE_READS && !strcmp(file->path, path))
      return file;
  }
  return NULL;
}

/* Returns a free file; else the oldest that waits, which nobody has renamed. NULL: all are in use. */
static store_file *store_new(mlfab_store *store) {
  store_file *oldest = NULL;
  for (int i = 0; i < STORE_FILES; i++) {
    store_file *file = &store->files[i];
    if (file->phase == STORE_FREE) return file;
    if (file->phase == STORE_WAITS && (!oldest || file->turn < oldest->turn)) oldest = file;
  }
  if (oldest) store_free(oldest);
  return oldest;
}

/* Makes a temporary file without a name: it vanishes with its process. Returns a descriptor or a negative errno. */
static int store_spool(mlfab_store *store) {
  char path[512];
  const char *dir = store->remote.options.spool_dir;
  int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 && snprintf(path, sizeof path, "%s/mlfab-XXXXXX", dir) < (int)sizeof path) {
    fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0) unlink(path);
  }
  if (fd >= 0) return fd;
  int number = errno;
  snprintf(store->remote.why, sizeof store->remote.why, "a temporary file in '%.80s': %s", dir,
           mlfab__http_reason(number));
  return -number;
}

static int store_has_suffix(const char *path, const char *suffix) {
  size_t n = strlen(path), k = strlen(suffix);
  return n > k && !strcmp(path + n - k, suffix);
}

/* Finds the place of a file; in S3 NAME.part is NAME, which does not exist before its end. */
static int store_place(mlfab_store *store, const char *path, mlfab__place *place) {
  const char *name = strrchr(path, '/');
  if (strlen(path) >= STORE_PATH || !name || strncmp(name + 1, "checkpoint-", 11) != 0)
    return store_fail(store, EINVAL, "in a store only files of checkpoints are read and written");
  int code = mlfab__remote_place(&store->remote, path, 0, place);
  if (!code && place->s3 && store_has_suffix(place->key, ".part"))
    place->key[strlen(place->key) - 5] = 0;
  return code;
}

static int store_open_file(mlfab_store *store, const char *path, int create) {
  mlfab__place place;
  int code = store_place(store, path, &place), spool = -1;
  if (code) return code;
  store_file *file = create ? store_find(store, path) : NULL;
  if (file && file->phase == STORE_WAITS) store_free(file);
  file = store_new(store);
  if (!file) return store_fail(store, ENFILE, "too many files of the store are open");
  if (create && (spool = store_spool(store)) < 0) return spool;
  file->phase = create ? STORE_SPOOLS : STORE_READS;
  file->turn = ++store->turn;
  file->place = place;
  file->spool = spool;
  file->bytes = create ? 0 : UINT64_MAX;
  memcpy(file->path, path, strlen(path) + 1);
  return STORE_BASE + (int)(file - store->files);
}

static int store_open(void *user, const char *path, int create) {
  mlfab_store *store = store_enter(user);
  const mlfab_files *local = mlfab_files_system();
  int code = mlfab__remote_knows(path) ? store_open_file(store, path, create)
                                       : local->open(local->user, path, create);
  return (int)store_leave(store, code);
}

static int64_t store_write_spool(mlfab_store *store, store_file *file, const void *data,
                                 size_t bytes) {
  if (file->phase != STORE_SPOOLS) return -EBADF;
  ssize_t n = pwrite(file->spool, data, bytes, (off_t)file->bytes);
  if (n >= 0) {
    file->bytes += (uint64_t)n;
    return n;
  }
  int number = errno;
  snprintf(store->remote.why, sizeof store->remote.why, "a temporary file in '%.80s': %s",
           store->remote.options.spool_dir, mlfab__http_reason(number));
  return -number;
}

static int64_t store_write(void *user, int handle, const void *data, size_t bytes) {
  mlfab_store *store = store_enter(user);
  const mlfab_files *local = mlfab_files_system();
  store_file *file = store_at(store, handle);
  return store_leave(store, file ? store_write_spool(store, file, data, bytes)
                                 : local->write(local->user, handle, data, bytes));
}

static int64_t store_read_file(mlfab_store *store, store_file *file, void *data, size_t bytes,
                               uint64_t offset) {
  if (file->phase != STORE_READS) return -EBADF;
  if (bytes == 0 || offset >= file->bytes) return 0;
  uint64_t total;
  int64_t n = mlfab__remote_get(&store->remote, &file->place, data, bytes, offset, &total);
  if (n >= 0 && total != UINT64_MAX) file->bytes = total;
  return n;
}

static int64_t store_read(void *user, int handle, void *data, size_t bytes, uint64_t offset) {
  mlfab_store *store = store_enter(user);
  const mlfab_files *local = mlfab_files_system();
  store_file *file = store_at(store, handle);
  return store_leave(store, file ? store_read_file(store, file, data, bytes, offset)
                                 : local->read(local->user, handle, data, bytes, offset));
}

/* --- sending --- */

static int64_t store_on_read(void *user, void *data, size_t room, uint64_t offset) {
  const store_file *file = user;
  ssize_t n;
  do n = pread(file->spool, data, room, (off_t)offset);
  while (n < 0 && errno == EINTR);
  return n < 0 ? MLFAB_ERR_IO : n;
}

static int store_sync_file(mlfab_store *store, store_file *file) {
  const mlfab__source source = {.read = store_on_read, .user = file, .bytes = file->bytes};
  int code = 0;
  if (file->phase != STORE_SPOOLS) return -EBADF;
  if (!file->place.s3)
    code = mlfab__remote_put(&store->remote, &file->place, &source);
  else if (file->bytes > store->remote.options.part_bytes)
    code = mlfab__remote_upload(&store->remote, &file->place, &source, &file->upload);
  if (!code) file->phase = STORE_SENT;
  return code;
}

static int store_sync(void *user, int handle) {
  mlfab_store *store = store_enter(user);
  const mlfab_files *local = mlfab_files_system();
  store_file *file = store_at(store, handle);
  return (int)store_leave(store,
                          file ? store_sync_file(store, file) : local->sync(local->user, handle));
}

/* Gives up a file that was not sent; a sent file stays until it is renamed or removed. */
static int store_close_file(store_file *file) {
  if (file->phase == STORE_FREE || file->phase == STORE_WAITS) return -EBADF;
  if (file->phase == STORE_SENT)
    file->phase = STORE_WAITS;
  else
    store_free(file);
  return 0;
}

static int store_close(void *user, int handle) {
  mlfab_store *store = store_enter(user);
  const mlfab_files *local = mlfab_files_system();
  store_file *file = store_at(store, handle);
  return (int)store_leave(store, file ? store_close_file(file) : local->close(local->user, handle));
}

static int store_rename_file(mlfab_store *store, const char *from, const char *to) {
  mlfab__remote *remote = &store->remote;
  mlfab__place place;
  store_file *file = store_find(store, from);
  int code = store_place(store, to, &place);
  if (code) return code;
  if (!file || file->phase != STORE_WAITS)
    return store_fail(store, ENOENT, "it was not written by this process");
  const mlfab__source source = {.read = store_on_read, .user = file, .bytes = file->bytes};
  if (!place.s3)
    code = mlfab__remote_move(remote, &file->place, &place, file->bytes);
  else if (strcmp(file->place.root, place.root) != 0 || strcmp(file->place.key, place.key) != 0)
    return store_fail(store, EINVAL, "S3: only NAME.part can be renamed, to NAME");
  else if (file->upload.parts > 0)
    code = mlfab__remote_complete(remote, &place, &file->upload, file->bytes);
  else
    code = mlfab__remote_put(remote, &place, &source);
  if (!code) store_free(file);
  return code;
}

static int store_rename(void *user, const char *from, const char *to) {
  mlfab_store *store = store_enter(user);
  const mlfab_files *local = mlfab_files_system();
  int far = mlfab__remote_knows(from);
  if (far != mlfab__remote_knows(to)) return (int)store_leave(store, -EXDEV);
  return (int)store_leave(
      store, far ? store_rename_file(store, from, to) : local->rename(local->user, from, to));
}

/* --- directories --- */

static int store_sync_dir(void *user, const char *path) {
  const mlfab_files *local = mlfab_files_system();
  (void)user;
  return mlfab__remote_knows(path) ? 0 : local->sync_dir(local->user, path);
}

static int64_t store_list_dir(mlfab_store *store, const char *path, const char *prefix, char *names,
                              size_t room) {
  mlfab__place place;
  int code = mlfab__remote_place(&store->remote, path, 1, &place);
  return code ? code : mlfab__remote_list(&store->remote, &place, prefix, names, room);
}

static int64_t store_list(void *user, const char *path, const char *prefix, char *names,
                          size_t room) {
  mlfab_store *store = store_enter(user);
  const mlfab_files *local = mlfab_files_system();
  return store_leave(store, mlfab__remote_knows(path)
                                ? store_list_dir(store, path, prefix, names, room)
                                : local->list(local->user, path, prefix, names, room));
}

static int store_remove_file(mlfab_store *store, const char *path) {
  mlfab__place place;
  int code = store_place(store, path, &place);
  if (code) return code;
  store_file *file = store_find(store, path);
  if (file) store_free(file);
  return place.s3 && store_has_suffix(path, ".part") ? mlfab__remote_abort(&store->remote, &place)
                                                     : mlfab__remote_delete(&store->remote, &place);
}

static int store_remove(void *user, const char *path) {
  mlfab_store *store = store_enter(user);
  const mlfab_files *local = mlfab_files_system();
  return (int)store_leave(store, mlfab__remote_knows(path) ? store_remove_file(store, path)
                                                           : local->remove(local->user, path));
}

static int store_explain(void *user, char *text, size_t room) {
  mlfab_store *store = user;
  store_check_fork(store);
  pthread_mutex_lock(&store->lock);
  int some = store->said[0] != 0;
  if (some) snprintf(text, room, "%s", store->said);
  pthread_mutex_unlock(&store->lock);
  return some ? 0 : -1;
}

/* Works without the lock, which the running call has. */
static void store_cancel(void *user, int on) {
  mlfab_store *store = user;
  __atomic_store_n(&store->remote.cancelled, on, __ATOMIC_RELEASE);
}

static const mlfab_files store_table = {.size = sizeof store_table,
                                        .open = store_open,
                                        .write = store_write,
                                        .read = store_read,
                                        .sync = store_sync,
                                        .close = store_close,
                                        .rename = store_rename,
                                        .sync_dir = store_sync_dir,
                                        .list = store_list,
                                        .remove = store_remove,
                                        .explain = store_explain,
                                        .cancel = store_cancel};

/* --- options --- */

/* Returns the text of an option, or of the first of two variables that is set and not empty. */
static const char *store_text(const char *given, const char *first, const char *second) {
  if (given) return given;
  const char *value = first ? getenv(first) : NULL;
  if ((!value || !value[0]) && second) value = getenv(second);
  return value && value[0] ? value : NULL;
}

/* Copies a text. Errors: ARGUMENT (a line break), MEMORY. */
static int store_copy(mlfab_store *store, int i, const char *name, const char *value,
                      const char **to, mlfab_error *error_p) {
  *to = NULL;
  if (!value) return 0;
  if (strpbrk(value, "\r\n"))
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "store: %s has a line break", name);
  store->texts[i] = strdup(value);
  *to = store->texts[i];
  return *to ? 0 : mlfab__http_fail(error_p, MLFAB_ERR_MEMORY, "store: out of memory");
}

static int store_copy_texts(mlfab_store *store, const mlfab_store_options *o,
                            mlfab_error *error_p) {
  mlfab_store_options *own = &store->remote.options;
  const struct {
    const char *name, *value, **to;
  } texts[STORE_TEXTS] = {
      {"spool_dir", store_text(o->spool_dir, "TMPDIR", NULL), &own->spool_dir},
      {"ca_file", store_text(o->ca_file, "MLFAB_STORE_CA", NULL), &own->ca_file},
      {"user", store_text(o->user, "MLFAB_STORE_USER", NULL), &own->user},
      {"password", store_text(o->password, "MLFAB_STORE_PASSWORD", NULL), &own->password},
      {"access_key", store_text(o->access_key, "AWS_ACCESS_KEY_ID", NULL), &own->access_key},
      {"secret_key", store_text(o->secret_key, "AWS_SECRET_ACCESS_KEY", NULL), &own->secret_key},
      {"session_token", store_text(o->session_token, "AWS_SESSION_TOKEN", NULL),
       &own->session_token},
      {"region", store_text(o->region, "AWS_REGION", "AWS_DEFAULT_REGION"), &own->region},
      {"endpoint", store_text(o->endpoint, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
       &own->endpoint}};
  int code = 0;
  for (int i = 0; i < STORE_TEXTS && !code; i++)
    code = store_copy(store, i, texts[i].name, texts[i].value, texts[i].to, error_p);
  if (!own->spool_dir) own->spool_dir = "/var/tmp";
  if (!own->region) own->region = "us-east-1";
  return code;
}

/* Checks "http[s]://host[:port]", and removes a "/" behind it. */
static int store_check_endpoint(mlfab_store *store) {
  char *endpoint = store->texts[STORE_TEXTS - 1];
  if (!endpoint) return 0;
  if (mlfab__http_compare(endpoint, "http://", 7) != 0 &&
      mlfab__http_compare(endpoint, "https://", 8) != 0)
    return -1;
  char *host = strstr(endpoint, "://") + 3;
  size_t n = strcspn(host, "/?#@ ");
  if (host[n] == '/' && host[n + 1] == 0) host[n] = 0;
  return n > 0 && host[n] == 0 && strlen(endpoint) < 200 ? 0 : -1;
}

static const mlfab__unit store_times[] = {{"", 1000000},         {"ns", 1},
                                          {"us", 1000},          {"ms", 1000000},
                                          {"s", 1000000000},     {"min", 60000000000u},
                                          {"h", 3600000000000u}, {NULL, 0}};
static const mlfab__unit store_sizes[] = MLFAB__SIZE_UNITS;

/* Reads a variable if the option is not set: a whole number above 0, with or without a unit. */
static int store_number(const char *name, const mlfab__unit *units, uint64_t *value_p) {
  const char *text = store_text(NULL, name, NULL);
  uint64_t value;
  if (*value_p || !text) return 0;
  if (mlfab__units_read(text, units, &value) || value == 0) return -1;
  *value_p = value;
  return 0;
}

static int store_check(mlfab_store *store, mlfab_error *error_p) {
  mlfab_store_options *own = &store->remote.options;
  const char *wrong = NULL;
  if (store_number("MLFAB_STORE_TIMEOUT_MS", store_times, &own->timeout_ns))
    wrong = "MLFAB_STORE_TIMEOUT_MS is not a time above 0, as 30000 or 30s (ns, us, ms, s, min, h)";
  if (store_number("MLFAB_STORE_PART_BYTES", store_sizes, &own->part_bytes))
    wrong = "MLFAB_STORE_PART_BYTES is not a size above 0, as 5MB or 16MiB (B to TB, KiB to TiB)";
  if (own->timeout_ns == 0) own->timeout_ns = store_timeout_ns;
  if (own->part_bytes == 0) own->part_bytes = store_part_bytes;
  if (own->part_bytes < store_part_least || own->part_bytes > (uint64_t)5 << 30)
    wrong = "part_bytes is not from 64 KiB to 5 GiB";
  if (own->timeout_ns > (uint64_t)86400 * 1000000000u) wrong = "timeout_ns is more than a day";
  if (store_check_endpoint(store)) wrong = "endpoint is not http[s]://HOST[:PORT]";
  if (strspn(own->region, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") !=
          strlen(own->region) ||
      strlen(own->region) > 40)
    wrong = "region is not a name";
  if (!own->access_key != !own->secret_key)
    wrong = "access_key and secret_key (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) need each other";
  if (own->access_key && strlen(own->access_key) > 128) wrong = "access_key is too long";
  if (own->secret_key && strlen(own->secret_key) > 200) wrong = "secret_key is too long";
  if (own->session_token && strlen(own->session_token) > 4000) wrong = "session_token is too long";
  if ((own->password && !own->user) || (own->user && strchr(own->user, ':')))
    wrong = "password without user (MLFAB_STORE_USER), or a user with ':'";
  if (own->user && strlen(own->user) + strlen(own->password ? own->password : "") > 500)
    wrong = "user and password are too long";
  return wrong ? mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "store: %s", wrong) : 0;
}

int mlfab_store_open(const mlfab_store_options *options, mlfab_store **store_p,
                     mlfab_error *error_p) {
  mlfab_store_options given;
  memset(&given, 0, sizeof given);
  if (!store_p) return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "store: store_p is NULL");
  if (options && (options->size < offsetof(mlfab_store_options, timeout_ns) ||
                  options->size > 1 << 20 || options->reserved))
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "store: options.size is not set");
  if (options) memcpy(&given, options, options->size < sizeof given ? options->size : sizeof given);
  mlfab_store *store = calloc(1, sizeof *store);
  if (!store) return mlfab__http_fail(error_p, MLFAB_ERR_MEMORY, "store: out of memory");
  store->table = store_table;
  store->table.user = store;
  store->pid = getpid();
  pthread_mutex_init(&store->lock, NULL);
  for (int i = 0; i < STORE_FILES; i++) store->files[i].spool = -1;
  store->remote.options.size = sizeof store->remote.options;
  store->remote.options.timeout_ns = given.timeout_ns;
  store->remote.options.part_bytes = given.part_bytes;
  store->remote.dice = (unsigned)getpid() ^ (unsigned)time(NULL);
  int code = store_copy_texts(store, &given, error_p);
  if (!code) code = store_check(store, error_p);
  if (!code) {
    code = mlfab__http_open(&store->remote.http);
    if (code) mlfab__http_fail(error_p, code, "store: libcurl cannot be used");
  }
  if (code)
    mlfab_store_close(&store);
  else
    *store_p = store;
  return code;
}

const mlfab_files *mlfab_store_files(mlfab_store *store) { return &store->table; }

void mlfab_store_close(mlfab_store **store_p) {
  mlfab_store *store = store_p ? *store_p : NULL;
  if (!store) return;
  *store_p = NULL;
  store_check_fork(store);
  for (int i = 0; i < STORE_FILES; i++) store_free(&store->files[i]);
  mlfab__http_close(store->remote.http);
  for (int i = 0; i < STORE_TEXTS; i++) {
    if (store->texts[i]) OPENSSL_cleanse(store->texts[i], strlen(store->texts[i]));
    free(store->texts[i]);
  }
  pthread_mutex_destroy(&store->lock);
  OPENSSL_cleanse(store, sizeof *store);
  free(store);
}
