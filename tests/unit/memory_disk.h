/* memory_disk.h - files in memory for tests: every call can fail, and the machine can stop at any call.
 *
 * An inode has bytes, and those of them that were synced. A directory has names, and those that were synced. A crash
 * loses what was not synced: of bytes always, of names in one of two ways (a system may write names early). */
#ifndef MEMORY_DISK_H
#define MEMORY_DISK_H

#include "mlfab_transport.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>

enum { DISK_FILES = 96, DISK_INODES = 4096 };

typedef struct disk_inode {
  uint8_t *data, *synced;
  size_t bytes, synced_bytes, room; /* room: allocated by writes */
} disk_inode;

typedef struct disk_name {
  char path[200];
  int inode;
} disk_name;

typedef struct memory_disk {
  mlfab_files table;
  pthread_mutex_t lock;
  disk_inode inodes[DISK_INODES];
  int ninodes;
  disk_name now[DISK_FILES], durable[DISK_FILES]; /* empty path: free */
  uint64_t calls;
  uint64_t fail_at; /* this call fails, from 1; 0: none */
  int fail_with; /* an errno; 0: it stops (all later calls fail and change nothing); -1: a short write */
  int stopped, fired;
  uint64_t room; /* bytes that all files may have together; 0: no limit */
  int slow;      /* a write takes so many microseconds */
  /* Files that are far away: what explain says, and writes that last until they are cancelled, 20 s at most. */
  const char *why;
  int hangs;
  _Atomic int cancelled, hung;
} memory_disk;

static inline int disk_enter(memory_disk *d) {
  pthread_mutex_lock(&d->lock);
  d->calls++;
  if (d->fail_at && d->calls == d->fail_at) {
    d->fired = 1;
    if (d->fail_with == 0) d->stopped = 1;
    if (d->fail_with > 0) return -d->fail_with;
  }
  return d->stopped ? -EIO : 0;
}

static inline int64_t disk_leave(memory_disk *d, int64_t result) {
  pthread_mutex_unlock(&d->lock);
  return result;
}

static inline disk_name *disk_find(disk_name *names, const char *path) {
  for (int i = 0; i < DISK_FILES; i++)
    if (names[i].path[0] && !strcmp(names[i].path, path)) return &names[i];
  return NULL;
}

static inline disk_name *disk_add(disk_name *names, const char *path) {
  disk_name *name = disk_find(names, path);
  for (int i = 0; i < DISK_FILES && !name; i++)
    if (!names[i].path[0]) name = &names[i];
  if (!name) abort();
  snprintf(name->path, sizeof name->path, "%s", path);
  return name;
}

static int disk_table_open(void *user, const char *path, int create) {
  memory_disk *d = user;
  int code = disk_enter(d);
  if (code) return (int)disk_leave(d, code);
  disk_name *name = disk_find(d->now, path);
  if (!create) return (int)disk_leave(d, name ? name->inode : -ENOENT);
  if (d->ninodes == DISK_INODES) abort();
  name = disk_add(d->now, path);
  name->inode = d->ninodes++;
  return (int)disk_leave(d, name->inode);
}

/* Are so many more bytes too many? */
static inline int disk_full(const memory_disk *d, size_t bytes) {
  for (int i = 0; i < DISK_FILES && d->room; i++)
    if (d->now[i].path[0]) bytes += d->inodes[d->now[i].inode].bytes;
  return d->room && bytes > d->room;
}

static int64_t disk_table_write(void *user, int file, const void *data, size_t bytes) {
  memory_disk *d = user;
  const struct timespec pause = {0, 1000 * d->slow};
  if (d->slow) thrd_sleep(&pause, NULL);
  for (int i = 0; i < 2000 && d->hangs && !d->cancelled; i++) {
    d->hung = 1;
    thrd_sleep(&(struct timespec){0, 10000000}, NULL);
  }
  if (d->hangs) return -ECANCELED;
  int code = disk_enter(d);
  if (code) return disk_leave(d, code);
  if (d->fail_at == d->calls && d->fail_with == -1) bytes = (bytes + 1) / 2;
  if (disk_full(d, bytes)) return disk_leave(d, -ENOSPC);
  disk_inode *inode = &d->inodes[file];
  if (inode->bytes + bytes >= inode->room) {
    inode->room = 2 * (inode->bytes + bytes + 1);
    inode->data = realloc(inode->data, inode->room);
  }
  memcpy(inode->data + inode->bytes, data, bytes);
  inode->bytes += bytes;
  return disk_leave(d, (int64_t)bytes);
}

static int64_t disk_table_read(void *user, int file, void *data, size_t bytes, uint64_t offset) {
  memory_disk *d = user;
  int code = disk_enter(d);
  if (code) return disk_leave(d, code);
  const disk_inode *inode = &d->inodes[file];
  if (offset >= inode->bytes) return disk_leave(d, 0);
  if (bytes > inode->bytes - offset) bytes = (size_t)(inode->bytes - offset);
  memcpy(data, inode->data + offset, bytes);
  return disk_leave(d, (int64_t)bytes);
}

static int disk_table_sync(void *user, int file) {
  memory_disk *d = user;
  int code = disk_enter(d);
  if (code) return (int)disk_leave(d, code);
  disk_inode *inode = &d->inodes[file];
  inode->synced = realloc(inode->synced, inode->bytes + 1);
  if (inode->bytes > 0) memcpy(inode->synced, inode->data, inode->bytes);
  inode->synced_bytes = inode->bytes;
  return (int)disk_leave(d, 0);
}

static int disk_table_close(void *user, int file) {
  memory_disk *d = user;
  (void)file;
  return (int)disk_leave(d, disk_enter(d));
}

static int disk_table_rename(void *user, const char *from, const char *to) {
  memory_disk *d = user;
  int code = disk_enter(d);
  if (code) return (int)disk_leave(d, code);
  disk_name *old = disk_find(d->now, from);
  if (!old) return (int)disk_leave(d, -ENOENT);
  int inode = old->inode;
  old->path[0] = 0;
  disk_add(d->now, to)->inode = inode;
  return (int)disk_leave(d, 0);
}

static int disk_table_sync_dir(void *user, const char *path) {
  memory_disk *d = user;
  int code = disk_enter(d);
  (void)path; /* there is one directory */
  if (!code) memcpy(d->durable, d->now, sizeof d->now);
  return (int)disk_leave(d, code);
}

static int64_t disk_table_list(void *user, const char *path, const char *prefix, char *names,
                               size_t room) {
  memory_disk *d = user;
  size_t at = 0;
  int code = disk_enter(d);
  if (code) return disk_leave(d, code);
  if (strcmp(path, "/disk") != 0) return disk_leave(d, -ENOENT);
  for (int i = 0; i < DISK_FILES; i++) {
    const char *slash = strrchr(d->now[i].path, '/');
    if (!slash || strncmp(slash + 1, prefix, strlen(prefix)) != 0) continue;
    at += (size_t)snprintf(names + at, room - at, "%s\n", slash + 1);
  }
  return disk_leave(d, (int64_t)at);
}

static int disk_table_remove(void *user, const char *path) {
  memory_disk *d = user;
  int code = disk_enter(d);
  disk_name *name = code ? NULL : disk_find(d->now, path);
  if (!code && !name) code = -ENOENT;
  if (name) name->path[0] = 0;
  return (int)disk_leave(d, code);
}

static int disk_table_explain(void *user, char *text, size_t room) {
  const memory_disk *d = user;
  if (!d->why) return -1;
  snprintf(text, room, "%s", d->why);
  return 0;
}

static void disk_table_cancel(void *user, int on) {
  memory_disk *d = user;
  d->cancelled = on;
}

static inline void disk_init(memory_disk *d) {
  memset(d, 0, sizeof *d);
  d->table = (mlfab_files){.size = sizeof d->table,
                           .user = d,
                           .open = disk_table_open,
                           .write = disk_table_write,
                           .read = disk_table_read,
                           .sync = disk_table_sync,
                           .close = disk_table_close,
                           .rename = disk_table_rename,
                           .sync_dir = disk_table_sync_dir,
                           .list = disk_table_list,
                           .remove = disk_table_remove,
                           .explain = disk_table_explain,
                           .cancel = disk_table_cancel};
  pthread_mutex_init(&d->lock, NULL);
}

static inline void disk_free(memory_disk *d) {
  for (int i = 0; i < d->ninodes; i++) {
    free(d->inodes[i].data);
    free(d->inodes[i].synced);
  }
  pthread_mutex_destroy(&d->lock);
}

/* The machine starts again. names 1: names were written early. */
static inline void disk_crash(memory_disk *d, int names) {
  if (!names) memcpy(d->now, d->durable, sizeof d->now);
  for (int i = 0; i < d->ninodes; i++) {
    disk_inode *inode = &d->inodes[i];
    if (inode->synced_bytes > 0) memcpy(inode->data, inode->synced, inode->synced_bytes);
    inode->bytes = inode->synced_bytes;
  }
  d->stopped = d->fired = 0;
  d->fail_at = 0;
}

/* How many files have names that contain `text`. */
static inline int disk_count(memory_disk *d, const char *text) {
  int n = 0;
  pthread_mutex_lock(&d->lock);
  for (int i = 0; i < DISK_FILES; i++) n += strstr(d->now[i].path, text) != NULL;
  pthread_mutex_unlock(&d->lock);
  return n;
}

/* Bytes of all files. */
static inline uint64_t disk_used(memory_disk *d) {
  uint64_t bytes = 0;
  pthread_mutex_lock(&d->lock);
  for (int i = 0; i < DISK_FILES; i++)
    if (d->now[i].path[0]) bytes += d->inodes[d->now[i].inode].bytes;
  pthread_mutex_unlock(&d->lock);
  return bytes;
}

/* A file of zeros that is there already. */
static inline void disk_put(memory_disk *d, const char *path, size_t bytes) {
  disk_inode *inode = &d->inodes[d->ninodes];
  inode->data = calloc(1, bytes + 1);
  inode->bytes = bytes;
  disk_add(d->now, path)->inode = d->ninodes++;
}

/* The same bytes under one more name. */
static inline void disk_link(memory_disk *d, const char *from, const char *to) {
  disk_name *name = disk_find(d->now, from);
  if (!name) abort();
  int inode = name->inode;
  disk_add(d->now, to)->inode = inode;
}

static inline disk_inode *disk_file(memory_disk *d, const char *text) {
  for (int i = 0; i < DISK_FILES; i++)
    if (strstr(d->now[i].path, text)) return &d->inodes[d->now[i].inode];
  return NULL;
}

#endif
