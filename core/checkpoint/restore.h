/* restore.h - a server loads the newest whole checkpoint of a directory.
 *
 * Every server does so by itself. All come to the same checkpoint, because all read the same files (if not, workers
 * notice: DEFINE_ACK has its number).
 *
 *    IDLE --worker 0 defines a model--> LISTS --> MANIFEST <--next older one--+
 *      ^                                             | it is in order         | missing, damaged, of another set, ...
 *      |                                             v                        |
 *      |                                           CHECKS (every byte of every shard) --+
 *      |                                             | all are in order, the model's definition fits
 *      |                                             v
 *      +----- the model stands ---------------- LOADS (the slices that this server owns)
 *      +----- refused: no whole one, another model, an error while it loads
 *
 * CHECKS reads all shards, so that no server starts to load a checkpoint that another server would refuse. The model
 * must have as many slices as the checkpoint; the present number of servers determines the owner of each. Each server
 * takes its slices from any shard that has them, and the clock of one of these shards. If their open rounds differ, it applies them
 * as they are. Windows are checked, and
 * not used: after a restart of the fabric all workers are new processes, whose windows are empty (windows.h).
 *
 * Invariants. (1) Only a whole checkpoint is loaded. (2) Until the model stands, the server has none: after an error
 * worker 0 may define another model. */
#ifndef MLFAB__RESTORE_H
#define MLFAB__RESTORE_H

#include "../model/image.h"
#include "../node/files.h"
#include "reader.h"
#include "record.h"

struct mlfab__server;

enum mlfab__restore_phase {
  MLFAB__RESTORE_IDLE,
  MLFAB__RESTORE_LISTS,
  MLFAB__RESTORE_MANIFEST,
  MLFAB__RESTORE_CHECKS,
  MLFAB__RESTORE_LOADS
};

typedef struct mlfab__restore {
  mlfab__env *env;
  struct mlfab__server *server;
  mlfab__filer *filer;
  char dir[MLFAB__TEXT_MAX]; /* directory from worker 0; "": a new model */
  enum mlfab__restore_phase phase;
  int stale;       /* the running operation belongs to an attempt that has ended */
  uint64_t number; /* the checkpoint; in the directory, the newest below the last one tried */
  char *names;
  uint32_t names_bytes;
  char path[MLFAB__RECORD_PATH];
  char why[MLFAB__TEXT_MAX]; /* first fault found */
  int32_t code;
  /* Data of the checkpoint. */
  uint64_t set;
  mlfab__checkpoint_manifest manifest;
  mlfab__checkpoint_entry *entries; /* room for MLFAB__CHECKPOINT_SHARDS_MAX */
  mlfab__define define;             /* definition of the first shard, and its table */
  uint8_t *table;
  uint32_t table_bytes;
  uint8_t *seen; /* by slice: an earlier shard had it; manifest.slices of them */
  /* The present shard's file. */
  mlfab__reader reader;
  uint32_t shard, chain;
  uint64_t offset; /* file offset of the next record */
  /* LOADS. */
  mlfab__image_part *parts; /* by slice of the store; nparts of them */
  uint32_t nparts;
  uint64_t *pushed; /* by worker */
  int clocked;      /* a clock has been restored: 1; the present shard's has been looked at: 2 */
  int differs;      /* the open rounds of two shards differ */
  mlfab__clock_record clock; /* the present shard's */
  uint32_t *words, nwords;
} mlfab__restore;

MLFAB__INTERNAL void mlfab__restore_init(mlfab__restore *restore, mlfab__env *env,
                                         struct mlfab__server *server, mlfab__filer *filer);
/* Starts when worker 0 has defined a model. Returns 1: the model will be restored (perhaps this is under way); 0: no
 * directory. */
MLFAB__INTERNAL int mlfab__restore_begin(mlfab__restore *restore);
/* Stops: the model is freed. */
MLFAB__INTERNAL void mlfab__restore_stop(mlfab__restore *restore);
/* 1 when both (complete) describe the same model; members that the kind does not use are ignored. */
MLFAB__INTERNAL int mlfab__restore_equal(const mlfab_sync *a, const mlfab_sync *b);
/* Takes the end of its file operation. */
MLFAB__INTERNAL void mlfab__restore_event(mlfab__restore *restore, const mlfab_io_event *event);

#endif
