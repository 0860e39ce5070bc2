/* disk.h - a context carries out file operations (mlfab_node.h) in a thread of its own.
 *
 * Each stream has one job:
 *
 *    FREE --begin, by the thread that drives--> ASKED --the disk's thread--> RUNS --> ENDED --take--> FREE
 *
 * The thread starts with the first job. Without threads (a simulation) `begin` runs the job itself.
 *
 * Invariants. (1) A job's buffers belong to the driving thread while it is FREE or ENDED, else to the disk's thread.
 * Only the driving thread allocates. (2) Jobs run one at a time, in the order of their streams' turns. (3) If a WRITE
 * with LAST has ended without an error, its file is durable: the file was synced before it was renamed, and its
 * directory afterwards. */
#ifndef MLFAB__DISK_H
#define MLFAB__DISK_H

#include "context.h"

#include <pthread.h>
#include <stdatomic.h>

enum { MLFAB__DISK_STREAMS = 4, MLFAB__DISK_PATH = 520, MLFAB__DISK_TEXT = 160 };

enum mlfab__disk_phase { MLFAB__DISK_FREE, MLFAB__DISK_ASKED, MLFAB__DISK_RUNS, MLFAB__DISK_ENDED };

typedef struct mlfab__disk_job {
  enum mlfab__disk_phase phase;
  uint64_t token;
  mlfab_file_op op; /* its path and its memory are these: */
  char path[MLFAB__DISK_PATH];
  uint8_t *memory; /* WRITE: head and bulk; READ and LIST: the result */
  size_t room, bytes;
  int32_t code; /* the result */
  char text[MLFAB__DISK_TEXT];
  /* The file that is being written. */
  int file; /* or -1 */
  char part[MLFAB__DISK_PATH];
} mlfab__disk_job;

typedef struct mlfab__disk {
  mlfab__env *env;
  const mlfab_files *files;
  void *self;
  void (*ended)(void *self); /* in the disk's thread: a job has ended. NULL: no thread */
  pthread_mutex_t lock;      /* of the phases, `stop` and `runs` */
  pthread_cond_t asked;
  pthread_t thread;
  int runs, stop;
  uint32_t turn;         /* the stream to look at first */
  uint32_t jobs;         /* number of jobs that are not FREE; for the driving thread */
  _Atomic uint32_t news; /* number of jobs that are ENDED */
  mlfab__disk_job job[MLFAB__DISK_STREAMS];
} mlfab__disk;

/* files: NULL means the system's. */
MLFAB__INTERNAL void mlfab__disk_init(mlfab__disk *disk, mlfab__env *env, const mlfab_files *files,
                                      void *self, void (*ended)(void *self));
/* Cancels the running job, and waits for it; the others do not begin. In a forked child (`child`) there is no thread.
 * Files that are being written are closed and stay: their names mark them as incomplete. */
MLFAB__INTERNAL void mlfab__disk_free(mlfab__disk *disk, int child);
/* Begins an operation, whose memory it copies. Errors: MEMORY, AGAIN (the stream has one), ARGUMENT, IO (no thread). */
MLFAB__INTERNAL int mlfab__disk_begin(mlfab__disk *disk, const mlfab_file_op *op, uint64_t token);
/* Takes the next ended job: 1, with its event. The event's memory is valid until the stream's next operation. */
MLFAB__INTERNAL int mlfab__disk_take(mlfab__disk *disk, mlfab_io_event *event_p);
/* Reads `bytes` from `offset` on, in the caller's thread, and repeats interrupted reads. Returns the number of bytes
 * (fewer at the end of the file), or a negative errno. */
MLFAB__INTERNAL int64_t mlfab__disk_read(const mlfab_files *files, int file, void *data,
                                         size_t bytes, uint64_t offset);
/* Writes the reason why a call of the table failed with `code`, a negative errno. */
MLFAB__INTERNAL void mlfab__disk_explain(const mlfab_files *files, const char *path, int code,
                                         char *text, size_t room);
/* Creates a file that no other process has open. An older file or link with this name is removed first; the file that a
 * link names stays. Returns a descriptor, or a negative errno. */
MLFAB__INTERNAL int mlfab__disk_create(const char *path);
/* The functions above, for a context. */
MLFAB__INTERNAL const mlfab__context_files *mlfab__disk_functions(void);
/* The system's files. */
MLFAB__INTERNAL const mlfab_files *mlfab__disk_system(void);

#endif
