/* disk.c - a context carries out file operations. See disk.h. */
#include "disk.h"

#include "../base/system.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

enum { DISK_LIST_BYTES = 1 << 20, DISK_READ_MAX = 2 << 20 };

/* --- the system's files --- */

/* O_EXCL follows no link, either. */
MLFAB__INTERNAL int mlfab__disk_create(const char *path) {
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  int fd = open(path, flags, 0666);
  if (fd < 0 && errno == EEXIST && unlink(path) == 0) fd = open(path, flags, 0666);
  return fd < 0 ? -errno : fd;
}

static int disk_open(void *user, const char *path, int create) {
  (void)user;
  if (create) return mlfab__disk_create(path);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  return fd < 0 ? -errno : fd;
}

/* Writing beyond the limit of file sizes raises SIGXFSZ, which the thread blocks. */
static int64_t disk_write(void *user, int file, const void *data, size_t bytes) {
  (void)user;
  ssize_t n = write(file, data, bytes);
  return n < 0 ? -errno : n;
}

static int64_t disk_pread(void *user, int file, void *data, size_t bytes, uint64_t offset) {
  (void)user;
  ssize_t n = pread(file, data, bytes, (off_t)offset);
  return n < 0 ? -errno : n;
}

static int disk_sync(void *user, int file) {
  (void)user;
  return fsync(file) ? -errno : 0;
}

static int disk_close(void *user, int file) {
  (void)user;
  return close(file) ? -errno : 0;
}

static int disk_rename(void *user, const char *from, const char *to) {
  (void)user;
  return rename(from, to) ? -errno : 0;
}

static int disk_sync_dir(void *user, const char *path) {
  (void)user;
  int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return -errno;
  int code = fsync(fd) ? -errno : 0;
  close(fd);
  /* A file system that cannot sync directories (CIFS, some FUSE). Linux gives EOPNOTSUPP the number of ENOTSUP. */
  return code == -EINVAL || code == -ENOTSUP ? 0 : code;
}

static int64_t disk_list(void *user, const char *path, const char *prefix, char *names,
                         size_t room) {
  (void)user;
  DIR *dir = opendir(path);
  if (!dir) return -errno;
  int64_t code = 0;
  size_t at = 0;
  for (;;) {
    errno = 0;
    const struct dirent *entry = readdir(dir);
    if (!entry) {
      code = errno ? -errno : (int64_t)at;
      break;
    }
    size_t n = strlen(entry->d_name);
    if (strncmp(entry->d_name, prefix, strlen(prefix)) != 0 || strchr(entry->d_name, '\n'))
      continue;
    if (n + 1 > room - at) {
      code = -ERANGE;
      break;
    }
    memcpy(names + at, entry->d_name, n);
    names[at + n] = '\n';
    at += n + 1;
  }
  closedir(dir);
  return code;
}

static int disk_remove(void *user, const char *path) {
  (void)user;
  return unlink(path) ? -errno : 0;
}

MLFAB__INTERNAL const mlfab_files *mlfab__disk_system(void) {
  static const mlfab_files files = {.size = sizeof files,
                                    .open = disk_open,
                                    .write = disk_write,
                                    .read = disk_pread,
                                    .sync = disk_sync,
                                    .close = disk_close,
                                    .rename = disk_rename,
                                    .sync_dir = disk_sync_dir,
                                    .list = disk_list,
                                    .remove = disk_remove};
  return &files;
}

/* --- operations: 0, or a negative errno --- */

/* Repeats a call that a signal has interrupted. close is not repeated: the descriptor is gone. */
#define DISK_REPEAT(result, call) \
  do {                            \
    (result) = (call);            \
  } while ((result) == -EINTR)

static int disk_write_all(const mlfab_files *files, int file, const uint8_t *data, size_t bytes) {
  while (bytes > 0) {
    int64_t n;
    DISK_REPEAT(n, files->write(files->user, file, data, bytes));
    if (n < 0) return (int)n;
    if (n == 0 || (uint64_t)n > bytes) return -EIO;
    data += n;
    bytes -= (size_t)n;
  }
  return 0;
}

/* The directory of a path: "." without one. */
static void disk_dir(const char *path, char dir[MLFAB__DISK_PATH]) {
  const char *slash = strrchr(path, '/');
  size_t n = slash ? (size_t)(slash - path) : 0;
  snprintf(dir, MLFAB__DISK_PATH, "%.*s", (int)(n > 0 ? n : 1), slash ? path : ".");
}

static int disk_close_file(const mlfab_files *files, mlfab__disk_job *job) {
  int file = job->file;
  job->file = -1;
  int code = files->close(files->user, file);
  return code == -EINTR ? 0 : code;
}

/* Makes the written file durable, and only then gives it its name. */
static int disk_commit(const mlfab_files *files, mlfab__disk_job *job) {
  char dir[MLFAB__DISK_PATH];
  int code = 0;
  DISK_REPEAT(code, files->sync(files->user, job->file));
  if (!code) code = disk_close_file(files, job);
  if (!code) DISK_REPEAT(code, files->rename(files->user, job->part, job->path));
  disk_dir(job->path, dir);
  if (!code) DISK_REPEAT(code, files->sync_dir(files->user, dir));
  if (!code) job->part[0] = 0;
  return code;
}

static int disk_run_write(const mlfab_files *files, mlfab__disk_job *job) {
  if (job->op.flags & MLFAB_FILE_FIRST) {
    if (job->file >= 0) disk_close_file(files, job);
    snprintf(job->part, sizeof job->part, "%.512s.part", job->path);
    DISK_REPEAT(job->file, files->open(files->user, job->part, 1));
    if (job->file < 0) {
      int code = job->file;
      job->file = -1;
      job->part[0] = 0;
      return code;
    }
  }
  if (job->file < 0) return -EBADF;
  int code = disk_write_all(files, job->file, job->memory, job->bytes);
  return code || !(job->op.flags & MLFAB_FILE_LAST) ? code : disk_commit(files, job);
}

static int disk_run_abort(const mlfab_files *files, mlfab__disk_job *job) {
  int code = 0;
  if (job->file >= 0) disk_close_file(files, job);
  if (job->part[0]) DISK_REPEAT(code, files->remove(files->user, job->part));
  job->part[0] = 0;
  return code == -ENOENT ? 0 : code;
}

MLFAB__INTERNAL int64_t mlfab__disk_read(const mlfab_files *files, int file, void *data,
                                         size_t bytes, uint64_t offset) {
  size_t at = 0;
  while (at < bytes) {
    int64_t n;
    DISK_REPEAT(n, files->read(files->user, file, (uint8_t *)data + at, bytes - at, offset + at));
    if (n < 0) return n;
    if ((uint64_t)n > bytes - at) return -EIO;
    if (n == 0) break;
    at += (size_t)n;
  }
  return (int64_t)at;
}

MLFAB__INTERNAL void mlfab__disk_explain(const mlfab_files *files, const char *path, int code,
                                         char *text, size_t room) {
  if (MLFAB__HAS(files, mlfab_files, explain) && files->explain &&
      files->explain(files->user, text, room) == 0)
    return;
  if (files == mlfab__disk_system() && strstr(path, "://"))
    snprintf(text, room, "a URL needs env.files that know it (extras/mlfab_store.h)");
  else
    snprintf(text, room, "%s", mlfab__reason(-code));
}

static int disk_run_read(const mlfab_files *files, mlfab__disk_job *job) {
  int file;
  DISK_REPEAT(file, files->open(files->user, job->path, 0));
  if (file < 0) return file;
  int64_t n = mlfab__disk_read(files, file, job->memory, job->op.bytes, job->op.offset);
  files->close(files->user, file);
  if (n < 0) return (int)n;
  job->bytes = (size_t)n;
  return 0;
}

static int disk_run_list(const mlfab_files *files, mlfab__disk_job *job) {
  int64_t n;
  DISK_REPEAT(
      n, files->list(files->user, job->path, "checkpoint-", (char *)job->memory, DISK_LIST_BYTES));
  if (n < 0) return (int)n;
  if (n > DISK_LIST_BYTES) return -EIO;
  job->bytes = (size_t)n;
  return 0;
}

static void disk_run(const mlfab_files *files, mlfab__disk_job *job) {
  int code = 0;
  switch (job->op.kind) {
    case MLFAB_FILE_WRITE:
      code = disk_run_write(files, job);
      break;
    case MLFAB_FILE_ABORT:
      code = disk_run_abort(files, job);
      break;
    case MLFAB_FILE_READ:
      code = disk_run_read(files, job);
      break;
    case MLFAB_FILE_LIST:
      code = disk_run_list(files, job);
      break;
    default:
      DISK_REPEAT(code, files->remove(files->user, job->path));
      if (code == -ENOENT) code = 0;
  }
  job->code = code == -ETIMEDOUT ? MLFAB_ERR_TIMEOUT : code ? MLFAB_ERR_IO : 0;
  if (code) mlfab__disk_explain(files, job->path, code, job->text, sizeof job->text);
}

/* --- the thread --- */

static void disk_cancel(const mlfab_files *files, int on) {
  if (MLFAB__HAS(files, mlfab_files, cancel) && files->cancel) files->cancel(files->user, on);
}

/* The next job that was asked for, or NULL. With the lock. */
static mlfab__disk_job *disk_next(mlfab__disk *disk) {
  for (uint32_t i = 0; i < MLFAB__DISK_STREAMS; i++) {
    mlfab__disk_job *job = &disk->job[(disk->turn + i) % MLFAB__DISK_STREAMS];
    if (job->phase != MLFAB__DISK_ASKED) continue;
    disk->turn = (disk->turn + i + 1) % MLFAB__DISK_STREAMS;
    return job;
  }
  return NULL;
}

static void *disk_thread(void *argument) {
  mlfab__disk *disk = argument;
  pthread_mutex_lock(&disk->lock);
  while (!disk->stop) {
    mlfab__disk_job *job = disk_next(disk);
    if (!job) {
      pthread_cond_wait(&disk->asked, &disk->lock);
      continue;
    }
    job->phase = MLFAB__DISK_RUNS;
    pthread_mutex_unlock(&disk->lock);
    disk_run(disk->files, job);
    pthread_mutex_lock(&disk->lock);
    job->phase = MLFAB__DISK_ENDED;
    atomic_fetch_add(&disk->news, 1);
    pthread_mutex_unlock(&disk->lock);
    disk->ended(disk->self);
    pthread_mutex_lock(&disk->lock);
  }
  pthread_mutex_unlock(&disk->lock);
  return NULL;
}

static int disk_start(mlfab__disk *disk) {
  int code = mlfab__thread_start(&disk->thread, NULL, disk_thread, disk);
  disk->runs = !code;
  return code;
}

/* --- calls of the thread that drives --- */

MLFAB__INTERNAL void mlfab__disk_init(mlfab__disk *disk, mlfab__env *env, const mlfab_files *files,
                                      void *self, void (*ended)(void *self)) {
  memset(disk, 0, sizeof *disk);
  disk->env = env;
  disk->files = files ? files : mlfab__disk_system();
  disk->self = self;
  disk->ended = ended;
  pthread_mutex_init(&disk->lock, NULL);
  pthread_cond_init(&disk->asked, NULL);
  for (uint32_t i = 0; i < MLFAB__DISK_STREAMS; i++) disk->job[i].file = -1;
}

MLFAB__INTERNAL void mlfab__disk_free(mlfab__disk *disk, int child) {
  if (!disk->env) return;
  if (disk->runs && !child) {
    pthread_mutex_lock(&disk->lock);
    disk->stop = 1;
    pthread_cond_signal(&disk->asked);
    pthread_mutex_unlock(&disk->lock);
    disk_cancel(disk->files, 1);
    pthread_join(disk->thread, NULL);
    disk_cancel(disk->files, 0);
  }
  for (uint32_t i = 0; i < MLFAB__DISK_STREAMS; i++) {
    mlfab__disk_job *job = &disk->job[i];
    if (job->file >= 0) disk->files->close(disk->files->user, job->file);
    mlfab__free(disk->env, job->memory, job->room);
  }
  /* In a child it would wait for a thread that waited there at the fork. */
  if (!child || !disk->runs) pthread_cond_destroy(&disk->asked);
  if (!child || !disk->runs) pthread_mutex_destroy(&disk->lock);
  disk->env = NULL;
}

static int disk_room(mlfab__disk *disk, mlfab__disk_job *job, size_t bytes) {
  if (bytes <= job->room) return 0;
  uint8_t *memory = mlfab__alloc(disk->env, bytes);
  if (!memory) return MLFAB_ERR_MEMORY;
  mlfab__free(disk->env, job->memory, job->room);
  job->memory = memory;
  job->room = bytes;
  return 0;
}

/* Copies the operation into its job. */
static int disk_fill(mlfab__disk *disk, mlfab__disk_job *job, const mlfab_file_op *op) {
  size_t head = op->kind == MLFAB_FILE_WRITE ? op->head_bytes : 0;
  size_t bulk = op->kind == MLFAB_FILE_WRITE ? op->bulk_bytes : 0;
  size_t room = op->kind == MLFAB_FILE_READ   ? op->bytes
                : op->kind == MLFAB_FILE_LIST ? DISK_LIST_BYTES
                                              : head + bulk;
  if (disk_room(disk, job, room)) return MLFAB_ERR_MEMORY;
  job->op = *op;
  job->op.path = job->path;
  job->op.head = job->op.bulk = NULL;
  job->code = 0;
  job->text[0] = 0;
  if (op->kind != MLFAB_FILE_ABORT) snprintf(job->path, sizeof job->path, "%s", op->path);
  if (head > 0) memcpy(job->memory, op->head, head);
  if (bulk > 0) memcpy(job->memory + head, op->bulk, bulk);
  job->bytes = head + bulk;
  return 0;
}

MLFAB__INTERNAL int mlfab__disk_begin(mlfab__disk *disk, const mlfab_file_op *op, uint64_t token) {
  if (op->stream >= MLFAB__DISK_STREAMS || op->kind == 0 || op->kind > MLFAB_FILE_REMOVE ||
      op->bytes > DISK_READ_MAX ||
      (op->kind != MLFAB_FILE_ABORT && (!op->path || strlen(op->path) >= MLFAB__DISK_PATH - 8)))
    return MLFAB_ERR_ARGUMENT;
  mlfab__disk_job *job = &disk->job[op->stream];
  pthread_mutex_lock(&disk->lock);
  int code = job->phase == MLFAB__DISK_FREE ? 0 : MLFAB_ERR_AGAIN;
  pthread_mutex_unlock(&disk->lock);
  if (!code) code = disk_fill(disk, job, op);
  if (!code && disk->ended && !disk->runs) code = disk_start(disk);
  if (code) return code;
  job->token = token;
  disk->jobs++;
  if (!disk->ended) {
    disk_run(disk->files, job);
    job->phase = MLFAB__DISK_ENDED;
    atomic_fetch_add(&disk->news, 1);
    return 0;
  }
  pthread_mutex_lock(&disk->lock);
  job->phase = MLFAB__DISK_ASKED;
  pthread_cond_signal(&disk->asked);
  pthread_mutex_unlock(&disk->lock);
  return 0;
}

MLFAB__INTERNAL int mlfab__disk_take(mlfab__disk *disk, mlfab_io_event *event_p) {
  mlfab__disk_job *job = NULL;
  if (atomic_load(&disk->news) == 0) return 0;
  pthread_mutex_lock(&disk->lock);
  for (uint32_t i = 0; i < MLFAB__DISK_STREAMS && !job; i++)
    if (disk->job[i].phase == MLFAB__DISK_ENDED) job = &disk->job[i];
  if (job) job->phase = MLFAB__DISK_FREE;
  pthread_mutex_unlock(&disk->lock);
  if (!job) return 0;
  atomic_fetch_sub(&disk->news, 1);
  disk->jobs--;
  int reads = job->op.kind == MLFAB_FILE_READ || job->op.kind == MLFAB_FILE_LIST;
  memset(event_p, 0, sizeof *event_p);
  event_p->kind = MLFAB_IO_FILE;
  event_p->token = job->token;
  event_p->code = job->code;
  event_p->text = job->code ? job->text : NULL;
  event_p->bulk = reads ? job->memory : NULL;
  event_p->bulk_bytes = reads ? (uint32_t)job->bytes : 0;
  return 1;
}

/* --- of a context --- */

/* Called in the disk's thread when a file operation has ended. */
static void disk_ended(void *self) {
  mlfab *ctx = self;
  pthread_mutex_lock(&ctx->lock);
  if (ctx->sleeping) mlfab__context_wake(ctx);
  mlfab__context_tell(ctx);
  pthread_cond_broadcast(&ctx->changed);
  pthread_mutex_unlock(&ctx->lock);
}

static int disk_do(mlfab *ctx, const mlfab_action *action) {
  if (!ctx->disk) {
    ctx->disk = mlfab__alloc(&ctx->env, sizeof *ctx->disk);
    if (!ctx->disk) return MLFAB_ERR_MEMORY;
    /* A simulation has no threads: operations end at once. */
    mlfab__disk_init(ctx->disk, &ctx->env, ctx->hooks.files, ctx,
                     ctx->simulated ? NULL : disk_ended);
  }
  return mlfab__disk_begin(ctx->disk, action->file, action->token);
}

static int disk_events(mlfab *ctx, uint64_t now) {
  mlfab_io_event event;
  int moved = 0;
  while (mlfab__disk_take(ctx->disk, &event)) {
    mlfab_node_event(ctx->node, &event, now);
    moved = 1;
  }
  return moved;
}

static int disk_waits(const mlfab *ctx) {
  const mlfab__disk *disk = ctx->disk;
  return disk->jobs == 0 ? 0 : atomic_load(&disk->news) == 0 ? 1 : 2;
}

static void disk_delete(mlfab *ctx, int child) {
  mlfab__disk_free(ctx->disk, child);
  mlfab__free(&ctx->env, ctx->disk, sizeof *ctx->disk);
}

MLFAB__INTERNAL const mlfab__context_files *mlfab__disk_functions(void) {
  static const mlfab__context_files table = {disk_do, disk_events, disk_waits, disk_delete};
  return &table;
}
