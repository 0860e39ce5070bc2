/* calls_checkpoint.c - checkpoints, and weights that are saved in a file. */
#include "../base/rng.h"
#include "../checkpoint/checkpoint.h"
#include "../worker/worker.h"
#include "context.h"
#include "disk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

MLFAB__INTERNAL int mlfab__calls_checkpoint(const mlfab__call_in *in) {
  const mlfab_call *c = in->call;
  mlfab__checkpoint_role *role = in->node->parts->checkpoint;
  if (c->kind == MLFAB_CALL_RESTORE) return mlfab__checkpoint_from(role, c->data, in->error);
  return mlfab__checkpoint_start(role, c->options, c->info_p, in->node->now_ns, in->request_p,
                                 in->error);
}

MLFAB_API int mlfab_checkpoint(mlfab *ctx, const mlfab_checkpoint_options *options,
                               mlfab_checkpoint_info *info_p) {
  SUBMIT(CHECKPOINT, NULL, .options = options, .info_p = info_p);
}

MLFAB_API int mlfab_checkpoint_start(mlfab *ctx, const mlfab_checkpoint_options *options,
                                     mlfab_checkpoint_info *info_p, mlfab_request *request_p) {
  SUBMIT_START(CHECKPOINT, request_p, .options = options, .info_p = info_p);
}

MLFAB_API int mlfab_restore(mlfab *ctx, const char *dir) {
  SUBMIT_AT_ONCE(RESTORE, .data = (void *)(uintptr_t)dir);
}

static int calls_restored(mlfab_node *node, mlfab_checkpoint_info *info_p) {
  mlfab_error error;
  int code = mlfab__node_enter(node, node->now_ns, 1, &error);
  if (!code) code = mlfab__checkpoint_loaded(node->parts->checkpoint, info_p, &error);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_restored(mlfab *ctx, mlfab_checkpoint_info *info_p) {
  CONTEXT_LOOK(ctx, calls_restored(ctx->node, info_p));
}

MLFAB_API const mlfab_files *mlfab_files_system(void) { return mlfab__disk_system(); }

/* --- saving --- */

/* Writes the safetensors header: one JSON object with offsets into the data behind it. The data have the layout of the
 * flat model, where every element is aligned. Returns its bytes. */
static size_t calls_save_header(const mlfab__layout *layout, char *text, size_t room) {
  size_t at = 0;
  for (uint32_t i = 0; i < layout->ntensors; i++) {
    const mlfab__tensor *t = &layout->tensors[i];
    const char *name = t->dtype == MLFAB_F32 ? "F32" : t->dtype == MLFAB_F64 ? "F64" : "I64";
    int n = snprintf(text ? text + at : NULL, text ? room - at : 0,
                     "%s\"%u\":{\"dtype\":\"%s\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}",
                     i ? "," : "{", t->id, name, (unsigned long long)t->count,
                     (unsigned long long)t->offset, (unsigned long long)(t->offset + t->bytes));
    at += (size_t)n;
  }
  if (text) memcpy(text + at, "}", 2);
  return at + 1;
}

/* Creates a file beside `path` that has no other writer, with the mode of an ordinary new file (mkstemp's is the
 * owner's alone). Returns its descriptor, or -1 with errno. */
static int calls_save_beside(const char *path, char *name, size_t room) {
  uint64_t salt = (uint64_t)(uintptr_t)&room; /* differs between threads */
  int fd = -1;
  errno = EEXIST;
  for (uint64_t i = 0; fd < 0 && errno == EEXIST && i < 1000; i++) {
    int n = snprintf(name, room, "%s.%ld-%08x.part", path, (long)getpid(),
                     (unsigned)(mlfab__mix(salt + i) >> 32));
    if (n < 0 || (size_t)n >= room) {
      errno = ENAMETOOLONG;
      return -1;
    }
    fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  }
  return fd;
}

static int calls_save_write(int fd, const uint8_t *data, size_t bytes) {
  while (bytes > 0) {
    ssize_t n = write(fd, data, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    data += n;
    bytes -= (size_t)n;
  }
  return fsync(fd);
}

/* Writes beside the file, then renames. A reader sees the old file or the new file. Of simultaneous writes, the last
 * rename wins. */
static int calls_save_store(const char *path, const void *data, size_t bytes) {
  char name[4096];
  struct rlimit most; /* writing beyond it raises SIGXFSZ, which belongs to the program */
  if (getrlimit(RLIMIT_FSIZE, &most) == 0 && bytes > most.rlim_cur) {
    errno = EFBIG;
    return MLFAB_ERR_IO;
  }
  int fd = calls_save_beside(path, name, sizeof name);
  if (fd < 0) return MLFAB_ERR_IO;
  int failed = calls_save_write(fd, data, bytes), why = errno;
  if (close(fd) && !failed) failed = 1, why = errno;
  if (!failed && rename(name, path)) failed = 1, why = errno;
  if (!failed) return 0;
  unlink(name);
  errno = why;
  return MLFAB_ERR_IO;
}

MLFAB_API int mlfab_save(mlfab *ctx, const char *path) {
  CONTEXT_CHECK(ctx);
  if (!path) return mlfab__context_null(ctx, "save: path");
  mlfab__context_enter(ctx);
  const mlfab__worker *worker = ctx->node->parts->worker;
  mlfab_error *last = &ctx->node->requests.last;
  int code = 0;
  if (!worker || !worker->stands || worker->define.options.ghost) {
    code = MLFAB__FAIL(last, MLFAB_ERR_STATE, "save: there is no model with bytes here");
    return mlfab__context_leave(ctx, code);
  }
  const mlfab__layout *layout = &worker->layout;
  size_t header = calls_save_header(layout, NULL, 0), padded = (header + 7) / 8 * 8;
  size_t bytes = 8 + padded + layout->bytes;
  uint8_t *file = mlfab__alloc_aligned(&ctx->env, bytes + 1);
  mlfab_buf *bufs = mlfab__alloc_array(&ctx->env, layout->ntensors, sizeof *bufs);
  if (!file || !bufs) code = MLFAB__FAIL(last, MLFAB_ERR_MEMORY, "save: out of memory");
  if (!code) {
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)padded >> (8 * i));
    calls_save_header(layout, (char *)file + 8, padded + 1);
    memset(file + 8 + header, ' ', padded - header);
    for (uint32_t i = 0; i < layout->ntensors; i++) {
      const mlfab__tensor *t = &layout->tensors[i];
      bufs[i].tensor = t->id;
      bufs[i].count = t->count;
      bufs[i].data = file + 8 + padded + t->offset;
    }
    const mlfab_call pull = {
        .size = sizeof pull, .kind = MLFAB_CALL_PULL, .bufs = bufs, .n = layout->ntensors};
    code = mlfab__submit(ctx, &pull, 1, NULL, NULL);
  }
  pthread_mutex_unlock(&ctx->lock); /* other threads go on while this thread writes */
  errno = 0;
  int failed = !code && (ctx->hooks.store ? ctx->hooks.store(ctx->hooks.user, path, file, bytes)
                                          : calls_save_store(path, file, bytes));
  int number = errno;
  pthread_mutex_lock(&ctx->lock);
  if (failed)
    code = MLFAB__FAIL(last, MLFAB_ERR_IO, "save: '%.200s' cannot be written: %s", path,
                       number ? mlfab__reason(number) : "env.store failed");
  mlfab__free(&ctx->env, bufs, layout->ntensors * sizeof *bufs);
  mlfab__free_aligned(&ctx->env, file, bytes + 1);
  return mlfab__context_leave(ctx, code);
}
