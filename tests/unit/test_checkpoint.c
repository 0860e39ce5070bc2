/* test_checkpoint.c - checkpoints of a world of one: the format, training that goes on from one bit by bit, every damage,
 * every file call failing in turn, and a machine that stops at any of them. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "../testing.h"

#include "core/checkpoint/record.h"
#include "kept.h"
#include "memory_disk.h"

#include <fcntl.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#define DIR "/disk"
#define SECOND 1000000000ull

enum { FLOATS = 6000, DOUBLES = 700 };
#define LARGE_BLOCKS UINT64_MAX /* instead of a number of commits: blocks and chunks of 1 MiB */

typedef struct run {
  mlfab *ctx;
  float w[FLOATS];
  double v[DOUBLES];
  mlfab_error error;
  int whole; /* checkpoints */
} run;

static void event(void *user, const mlfab_event_info *info) {
  run *r = user;
  if (info->kind == MLFAB_EVENT_CHECKPOINT && info->code == 0) __atomic_add_fetch(&r->whole, 1, 5);
}

static mlfab_model_options options_of(uint32_t optimizer, uint32_t sync) {
  mlfab_model_options o = MLFAB_MODEL_OPTIONS_INIT;
  o.optimizer = optimizer;
  o.sync = sync;
  o.slices = 5;
  return o;
}

static void *allocate(void *user, size_t bytes) {
  (void)user;
  return kept_allocate(bytes);
}

static void release(void *user, void *memory, size_t bytes) {
  (void)user;
  kept_release(memory, bytes);
}

/* Opens; the model will begin as the newest checkpoint in `resume`, unless NULL. */
static void open_run(run *r, memory_disk *d, const char *resume, uint64_t every) {
  mlfab_config c;
  mlfab_env env;
  memset(r, 0, sizeof *r);
  memset(&env, 0, sizeof env);
  env.size = sizeof env;
  env.files = &d->table;
  env.allocate = allocate;
  env.release = release;
  mlfab_config_init(&c);
  c.env = &env;
  c.on_event = event;
  c.user = r;
  c.timeout_ns = 120 * SECOND;
  c.block_bytes = 4096;
  c.chunk_bytes = 4096;
  c.eager_bytes = 1 << 15; /* a whole update of this model */
  snprintf(c.checkpoint_dir, sizeof c.checkpoint_dir, DIR);
  c.checkpoint_commits = every;
  if (resume) snprintf(c.resume, sizeof c.resume, "%s", resume);
  if (every == LARGE_BLOCKS) c.checkpoint_commits = 0;
  if (every == LARGE_BLOCKS) c.block_bytes = c.chunk_bytes = 1 << 20;
  assert_int_equal(mlfab_open(&c, &r->ctx, &r->error), 0);
}

/* Opens, and defines the model. */
static int start(run *r, memory_disk *d, const char *resume, const mlfab_model_options *o,
                 uint64_t every) {
  open_run(r, d, resume, every);
  assert_int_equal(mlfab_tensor_add(r->ctx, 3, MLFAB_F32, FLOATS), 0);
  assert_int_equal(mlfab_tensor_add(r->ctx, 9, MLFAB_F64, DOUBLES), 0);
  for (int i = 0; i < FLOATS; i++) r->w[i] = (float)i / 100;
  for (int i = 0; i < DOUBLES; i++) r->v[i] = -i / 10.0;
  mlfab_buf bufs[2] = {{3, 0, r->w, FLOATS}, {9, 0, r->v, DOUBLES}};
  int code = mlfab_model_start(r->ctx, o, bufs, 2);
  if (code) mlfab_last_error(r->ctx, &r->error);
  return code;
}

static void stop(run *r) {
  if (r->ctx) mlfab_abandon(&r->ctx);
}

/* Each test uses three processes that train, and two disks. */
static run runs[3];
static memory_disk disks[2];

/* All processes end, and both disks become empty. Returns the first disk. */
static memory_disk *fresh(void) {
  for (int i = 0; i < 3; i++) stop(&runs[i]);
  for (int i = 0; i < 2; i++) {
    disk_free(&disks[i]);
    disk_init(&disks[i]);
  }
  return &disks[0];
}

/* The model begins as the newest checkpoint, of which `loaded` tells. */
static void resume(run *r, memory_disk *d, const mlfab_model_options *o,
                   mlfab_checkpoint_info *loaded) {
  *loaded = (mlfab_checkpoint_info){.size = sizeof *loaded};
  if (start(r, d, DIR, o, 0)) fail_msg("%s", r->error.text);
  assert_int_equal(mlfab_restored(r->ctx, loaded), 0);
}

/* One step: the update depends on the model and on the step. */
static void train(run *r, uint64_t step) {
  float u[FLOATS];
  double x[DOUBLES];
  for (int i = 0; i < FLOATS; i++) u[i] = r->w[i] * 0.25f - (float)(((uint64_t)i + step) % 7);
  for (int i = 0; i < DOUBLES; i++) x[i] = r->v[i] * 0.5 + (double)(((uint64_t)i * step) % 5);
  mlfab_buf update[2] = {{3, 0, u, FLOATS}, {9, 0, x, DOUBLES}};
  mlfab_buf weights[2] = {{3, 0, r->w, FLOATS}, {9, 0, r->v, DOUBLES}};
  mlfab_push_options o = MLFAB_PUSH_OPTIONS_INIT;
  o.scale = -0.125;
  o.iteration = step + 1; /* the number of the iteration goes on */
  if (mlfab_push(r->ctx, update, 2, &o, NULL)) {
    mlfab_last_error(r->ctx, &r->error);
    fail_msg("%s", r->error.text);
  }
  assert_int_equal(mlfab_pull(r->ctx, weights, 2, NULL, NULL), 0);
}

static int save(run *r, mlfab_checkpoint_info *info) {
  *info = (mlfab_checkpoint_info){.size = sizeof *info};
  int code = mlfab_checkpoint(r->ctx, NULL, info);
  if (code) mlfab_last_error(r->ctx, &r->error);
  return code;
}

static void same(const run *a, const run *b) {
  assert_memory_equal(a->w, b->w, sizeof a->w);
  assert_memory_equal(a->v, b->v, sizeof a->v);
}

/* Training from a checkpoint is training that was never interrupted; also from a checkpoint that began as one. `then`: a
 * consistency model that is set first, or NULL. */
static void continues(const mlfab_model_options *o, const mlfab_sync *then) {
  static run at;
  memory_disk *d = fresh();
  run *a = &runs[0], *b = &runs[1];
  mlfab_checkpoint_info info, loaded;
  assert_int_equal(start(a, d, NULL, o, 0), 0);
  if (then) assert_int_equal(mlfab_set_sync(a->ctx, then, MLFAB_ALL, 0), 0);
  for (uint64_t step = 0; step < 4; step++) train(a, step);
  assert_int_equal(save(a, &info), 0);
  assert_int_equal(info.number, 1);
  assert_int_equal(info.version, 4);
  assert_int_equal(info.servers, 1);
  assert_true(info.bytes > sizeof a->w + sizeof a->v);
  at = *a; /* the state of the model now */
  for (uint64_t step = 4; step < 8; step++) train(a, step);
  for (uint64_t number = 1; number <= 2; number++) {
    resume(b, d, o, &loaded);
    same(b, &at); /* not the first weights */
    assert_int_equal(loaded.number, number);
    assert_int_equal(loaded.version, 4);
    if (number == 2) break;
    assert_int_equal(save(b, &info), 0);
    stop(b);
  }
  for (uint64_t step = 4; step < 8; step++) train(b, step);
  same(a, b);
}

/* Every optimizer, with rounds and without. */
TEST(test_continues) {
  for (uint32_t optimizer = 0; optimizer < MLFAB_OPTIMIZER_COUNT; optimizer++) {
    for (uint32_t sync = MLFAB_SYNC_ASYNC; sync <= MLFAB_SYNC_SSP; sync++) {
      mlfab_model_options o = options_of(optimizer, sync);
      continues(&o, NULL);
    }
  }
}

/* A consistency model that was set later is in the file. */
TEST(test_changed_clock) {
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_MOMENTUM, MLFAB_SYNC_BSP);
  continues(&o, &(mlfab_sync){.size = sizeof(mlfab_sync), .kind = MLFAB_SYNC_SSP, .staleness = 3});
}

/* A worker's window is in the file: how many updates are decided, and which were applied. */
TEST(test_windows) {
  memory_disk *d = fresh();
  run *a = &runs[0];
  mlfab_checkpoint_info info;
  mlfab__checkpoint_worker worker = {0};
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC);
  assert_int_equal(start(a, d, NULL, &o, 0), 0);
  for (uint64_t step = 0; step < 5; step++) train(a, step);
  a->w[0] = (float)HUGE_VAL;
  mlfab_buf wrong[1] = {{3, 0, a->w, FLOATS}};
  assert_int_equal(mlfab_push(a->ctx, wrong, 1, NULL, NULL), MLFAB_ERR_NOT_FINITE);
  assert_int_equal(save(a, &info), 0);
  const disk_inode *file = disk_file(d, ".shard");
  uint64_t at = 0;
  while (at < file->bytes) {
    mlfab__file_record record;
    const char *why = NULL;
    int64_t n = mlfab__record_open(file->data + at, file->bytes - at, &record, &why);
    assert_true(n > 0);
    if (record.type == MLFAB__RECORD_WORKER)
      assert_int_equal(mlfab__decode_checkpoint_worker(record.meta, record.meta_bytes, &worker), 0);
    at += (uint64_t)n;
  }
  assert_int_equal(worker.incarnation, 1);
  assert_int_equal(worker.top, 7);                  /* the first weights are the first */
  assert_int_equal(worker.applied[0] & 0x7f, 0x7e); /* all but the last */
}

/* Updates that come while a checkpoint is written are not in it. */
TEST(test_moment) {
  static const uint32_t kinds[] = {MLFAB_OPTIMIZER_SGD, MLFAB_OPTIMIZER_ADAM};
  for (int k = 0; k < 2; k++) {
    memory_disk *d = fresh();
    run *a = &runs[0], *b = &runs[1], *c = &runs[2];
    mlfab_model_options o = options_of(kinds[k], MLFAB_SYNC_BSP);
    assert_int_equal(start(a, d, NULL, &o, 0), 0);
    uint64_t step = 0;
    d->slow = 500;
    for (int round = 0; round < 3; round++) {
      mlfab_request request;
      mlfab_checkpoint_info info = {.size = sizeof info};
      train(a, step++);
      assert_int_equal(mlfab_checkpoint_start(a->ctx, NULL, &info, &request), 0);
      for (int i = 0; i < 200; i++) train(a, step++);
      assert_int_equal(mlfab_wait(a->ctx, request, 0, NULL), 0);
      assert_true(info.version > 0 && info.version <= step);
      mlfab_checkpoint_info loaded;
      resume(b, d, &o, &loaded);
      /* The same number of undisturbed steps. */
      memory_disk *none = &disks[1];
      assert_int_equal(start(c, none, NULL, &o, 0), 0);
      for (uint64_t i = 0; i < info.version; i++) train(c, i);
      same(b, c);
      for (uint64_t i = info.version; i < info.version + 3; i++) {
        train(b, i);
        train(c, i);
      }
      same(b, c);
      stop(b);
      stop(c);
    }
  }
}

/* Large updates are applied in several steps, and follow each other closely: a checkpoint waits for the end of one, and has
 * all of it. */
TEST(test_large_updates) {
  enum { LARGE = 3000000, UPDATES = 6 }; /* 12 MB: three steps */
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_ADAM, MLFAB_SYNC_ASYNC);
  float *w = calloc(LARGE, sizeof *w), *u = calloc(LARGE, sizeof *u);
  float *want = calloc((size_t)LARGE * (UPDATES + 1), sizeof *want);
  for (int i = 0; i < LARGE; i++) u[i] = (float)(i % 5 - 2);
  mlfab_buf weights = {2, 0, w, LARGE}, update = {2, 0, u, LARGE};
  for (int life = 0; life < 4; life++) {
    memory_disk *d = fresh();
    run *r = &runs[0];
    mlfab_checkpoint_info info = {.size = sizeof info};
    mlfab_request pushed[UPDATES], saved;
    for (int resumed = 0; resumed < 1 + (life > 0); resumed++) {
      open_run(r, d, resumed ? DIR : NULL, LARGE_BLOCKS);
      assert_int_equal(mlfab_tensor_add(r->ctx, 2, MLFAB_F32, LARGE), 0);
      assert_int_equal(mlfab_model_start(r->ctx, &o, resumed ? &weights : NULL, (uint32_t)resumed),
                       0);
      if (resumed) assert_memory_equal(w, want + info.version * LARGE, LARGE * sizeof *w);
      for (uint64_t i = info.version; i < UPDATES && (life == 0 || resumed); i++) {
        assert_int_equal(mlfab_push(r->ctx, &update, 1, NULL, NULL), 0);
        assert_int_equal(mlfab_pull(r->ctx, &weights, 1, NULL, NULL), 0);
        if (life == 0)
          memcpy(want + (i + 1) * LARGE, w, LARGE * sizeof *w);
        else
          assert_memory_equal(w, want + (i + 1) * LARGE, LARGE * sizeof *w);
      }
      if (life > 0 && !resumed) {
        for (int i = 0; i < UPDATES; i++) {
          assert_int_equal(mlfab_push_start(r->ctx, &update, 1, NULL, &pushed[i]), 0);
          if (i == life - 1)
            assert_int_equal(mlfab_checkpoint_start(r->ctx, NULL, &info, &saved), 0);
        }
        for (int i = 0; i < UPDATES; i++)
          assert_int_equal(mlfab_wait(r->ctx, pushed[i], 0, NULL), 0);
        assert_int_equal(mlfab_wait(r->ctx, saved, 0, NULL), 0);
      }
      stop(r);
    }
  }
  free(w);
  free(u);
  free(want);
}

/* By itself every so many commits; only the newest stay. */
TEST(test_by_itself) {
  memory_disk *d = fresh();
  run *a = &runs[0], *b = &runs[1];
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_MOMENTUM, MLFAB_SYNC_ASYNC);
  assert_int_equal(start(a, d, NULL, &o, 3), 0);
  for (uint64_t step = 0; step < 24; step++) {
    train(a, step);
    for (int i = 0; i < 5000 && __atomic_load_n(&a->whole, 5) < (int)(step + 1) / 3; i++)
      mlfab_progress(a->ctx, 1000000);
  }
  for (int i = 0; i < 2000 && disk_count(d, ".shard") > 2; i++) mlfab_progress(a->ctx, 1000000);
  assert_int_equal(disk_count(d, ".manifest"), 2);
  assert_int_equal(disk_count(d, ".shard"), 2);
  assert_int_equal(disk_count(d, ".part"), 0);
  mlfab_checkpoint_info loaded;
  resume(b, d, &o, &loaded);
  assert_int_equal(loaded.number, 8);
  assert_int_equal(loaded.version, 24);
  same(a, b);
}

/* The newest checkpoint has version 2, the one before 1. */
static void two_checkpoints(memory_disk *d, const mlfab_model_options *o) {
  run *a = &runs[2];
  mlfab_checkpoint_info info;
  assert_int_equal(start(a, d, NULL, o, 0), 0);
  for (uint64_t step = 0; step < 2; step++) {
    train(a, step);
    assert_int_equal(save(a, &info), 0);
  }
  stop(a);
}

/* Which checkpoint is loaded; a negative code when none is, with its error in `r`. */
static int loads(run *r, memory_disk *d, const mlfab_model_options *o) {
  mlfab_checkpoint_info info = {.size = sizeof info};
  int code = start(r, d, DIR, o, 0);
  if (!code) code = mlfab_restored(r->ctx, &info);
  stop(r);
  return code ? code : (int)info.number;
}

/* Any byte flipped, any length: the older one is loaded. */
TEST(test_damage) {
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC);
  memory_disk *d = fresh();
  run *r = &runs[0];
  two_checkpoints(d, &o);
  assert_int_equal(loads(r, d, &o), 2);
  static const char *const names[] = {"00000002.manifest", "00000002-0-of-1.shard"};
  for (int f = 0; f < 2; f++) {
    disk_inode *inode = disk_file(d, names[f]);
    assert_non_null(inode);
    size_t step = f == 0 ? 1 : inode->bytes / 60 + 1;
    for (size_t i = 0; i < inode->bytes; i += i < 400 ? 1 + (f == 1) * 2 : step) {
      inode->data[i] ^= (uint8_t)(1u << i % 8);
      assert_int_equal(loads(r, d, &o), 1);
      inode->data[i] ^= (uint8_t)(1u << i % 8);
    }
    size_t whole = inode->bytes;
    for (size_t n = 0; n < whole; n += n < 200 && f == 0 ? 1 : whole / 30 + 1) {
      inode->bytes = n;
      assert_int_equal(loads(r, d, &o), 1);
    }
    inode->bytes = whole - 1;
    assert_int_equal(loads(r, d, &o), 1);
    inode->data = realloc(inode->data, whole + 1);
    inode->data[whole] = 0;
    inode->bytes = whole + 1;
    assert_int_equal(loads(r, d, &o), 1);
    inode->bytes = whole;
  }
  assert_int_equal(loads(r, d, &o), 2);
}

static void refused(memory_disk *d, const mlfab_model_options *o, int code, const char *text) {
  run *r = &runs[0];
  assert_int_equal(loads(r, d, o), code);
  if (!strstr(r->error.text, text)) fail_msg("'%s' is not in: %s", text, r->error.text);
}

static void move_file(memory_disk *d, const char *from, const char *to) {
  disk_name *name = disk_find(d->now, from);
  assert_non_null(name);
  int inode = name->inode;
  name->path[0] = 0;
  disk_add(d->now, to)->inode = inode;
}

/* Each mistake has its own error. */
TEST(test_refused) {
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_MOMENTUM, MLFAB_SYNC_BSP), other;
  memory_disk *d = fresh(), *mixed = &disks[1];
  two_checkpoints(d, &o);
  two_checkpoints(mixed, &o);
  static const char *const one = DIR "/checkpoint-00000001.manifest",
                           *const shard1 = DIR "/checkpoint-00000001-0-of-1.shard",
                           *const two = DIR "/checkpoint-00000002.manifest",
                           *const shard2 = DIR "/checkpoint-00000002-0-of-1.shard";
  other = o;
  other.optimizer = MLFAB_OPTIMIZER_SGD;
  refused(d, &other, MLFAB_ERR_CONFIG, "the optimizer is sgd, in the checkpoint momentum");
  other = o;
  other.gamma = 0.5;
  refused(d, &other, MLFAB_ERR_CONFIG, "gamma is 0.5, in the checkpoint 0.9");
  other = o;
  other.sync = MLFAB_SYNC_ASYNC;
  refused(d, &other, MLFAB_ERR_CONFIG, "the consistency (async)");
  other = o;
  other.slices = 4;
  refused(d, &other, MLFAB_ERR_CONFIG, "slices is 4, in the checkpoint 5");
  /* Another model's checkpoint. */
  run *r = &runs[0];
  assert_int_equal(start(r, d, NULL, &o, 0), 0);
  stop(r);
  open_run(r, d, NULL, 0);
  assert_int_equal(mlfab_tensor_add(r->ctx, 3, MLFAB_F32, FLOATS + 1), 0);
  assert_int_equal(mlfab_tensor_add(r->ctx, 9, MLFAB_F64, DOUBLES), 0);
  assert_int_equal(mlfab_restore(r->ctx, DIR), 0);
  assert_int_equal(mlfab_model_start(r->ctx, &o, NULL, 0), MLFAB_ERR_MODEL);
  mlfab_last_error(r->ctx, &r->error);
  if (!strstr(r->error.text, "tensor number 0 is id 3")) fail_msg("%s", r->error.text);
  assert_non_null(strstr(r->error.text, "tensor number 0 is id 3, 6001 x "));
  assert_non_null(strstr(r->error.text, "the checkpoint's is id 3, 6000 x "));
  /* Then without. */
  assert_int_equal(mlfab_restore(r->ctx, ""), 0);
  assert_int_equal(mlfab_model_start(r->ctx, &o, NULL, 0), 0);
  assert_int_equal(mlfab_restore(r->ctx, DIR), MLFAB_ERR_STATE);
  stop(r);
  /* A shard of another attempt, with the same number. */
  disk_inode *mine = disk_file(d, "00000002-0"), kept = *mine,
             *theirs = disk_file(mixed, "00000002-0");
  *mine = *theirs;
  disk_find(d->now, one)->path[0] = 0;
  refused(d, &o, MLFAB_ERR_CHECKPOINT, "belongs to another checkpoint");
  *mine = kept;
  /* A definition of the model twice: it is not kept twice. */
  mlfab__file_record record;
  const char *why = NULL;
  size_t first = (size_t)mlfab__record_open(kept.data, kept.bytes, &record, &why);
  size_t n = (size_t)mlfab__record_open(kept.data + first, kept.bytes - first, &record, &why);
  assert_int_equal(record.type, MLFAB__RECORD_DEFINE);
  *mine = (disk_inode){.data = malloc(first + 2 * n), .bytes = first + 2 * n};
  memcpy(mine->data, kept.data, first + n);
  memcpy(mine->data + first + n, kept.data + first, n);
  record.index++;
  mlfab__record_seal(mine->data + first + n, &record);
  refused(d, &o, MLFAB_ERR_CHECKPOINT, "two definitions of the model");
  free(mine->data);
  *mine = kept;
  /* A definition without a tensor. */
  mlfab__define define;
  (void)mlfab__record_open(kept.data + first, kept.bytes - first, &record, &why);
  assert_int_equal(mlfab__decode_define(record.meta, record.meta_bytes, &define), 0);
  define.tensors = 0;
  *mine = (disk_inode){.data = malloc(first + n), .bytes = first + n - record.bulk_bytes};
  memcpy(mine->data, kept.data, first);
  record.meta_bytes = mlfab__encode_define(mine->data + first + MLFAB__RECORD_BYTES, &define);
  record.bulk_bytes = 0;
  mlfab__record_seal(mine->data + first, &record);
  refused(d, &o, MLFAB_ERR_CHECKPOINT, "its definition of the model does not parse");
  free(mine->data);
  *mine = kept;
  /* A shard, or the manifest, under another name. */
  move_file(d, shard1, "/disk/checkpoint-00000003-0-of-1.shard");
  move_file(d, two, "/disk/checkpoint-00000003.manifest");
  refused(d, &o, MLFAB_ERR_CHECKPOINT, "it is the manifest of another checkpoint");
  move_file(d, "/disk/checkpoint-00000003.manifest", two);
  move_file(d, shard2, "/disk/elsewhere");
  refused(d, &o, MLFAB_ERR_CHECKPOINT, "cannot be read: No such file");
  move_file(d, "/disk/elsewhere", shard2);
  /* Another format, no format, no checkpoint at all. */
  disk_inode *manifest = disk_file(d, "00000002.manifest");
  manifest->data[4] = 0;
  refused(d, &o, MLFAB_ERR_CHECKPOINT, "an older format");
  manifest->data[4] = 9;
  refused(d, &o, MLFAB_ERR_CHECKPOINT, "a newer format");
  manifest->data[0] = 'X';
  refused(d, &o, MLFAB_ERR_CHECKPOINT, "no file of a checkpoint");
  disk_find(d->now, two)->path[0] = 0;
  refused(d, &o, MLFAB_ERR_CHECKPOINT, "no manifest of a checkpoint is in '/disk'");
  memset(d->now, 0, sizeof d->now);
  refused(d, &o, MLFAB_ERR_CHECKPOINT, "there is no checkpoint in '/disk'");
  d->fail_at = d->calls + 1;
  d->fail_with = EACCES;
  refused(d, &o, MLFAB_ERR_IO, "cannot list '/disk': Permission denied");
}

/* Errors of the call. */
TEST(test_arguments) {
  memory_disk *d = fresh();
  run *r = &runs[0];
  mlfab_checkpoint_info info = {.size = sizeof info};
  mlfab_checkpoint_options how = {.size = sizeof how, .dir = "/nowhere"};
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC);
  assert_int_equal(mlfab_checkpoint(NULL, NULL, NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_restore(NULL, DIR), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_restored(NULL, &info), MLFAB_ERR_ARGUMENT);
  assert_int_equal(start(r, d, NULL, &o, 0), 0);
  assert_int_equal(mlfab_restored(r->ctx, NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_restored(r->ctx, &info), 0);
  assert_int_equal(info.number, 0);
  assert_int_equal(mlfab_checkpoint(r->ctx, &how, NULL), MLFAB_ERR_IO);
  mlfab_last_error(r->ctx, &r->error);
  assert_non_null(
      strstr(r->error.text, "checkpoint: server 0 cannot list '/nowhere': No such file"));
  how.size = 0;
  assert_int_equal(mlfab_checkpoint(r->ctx, &how, NULL), MLFAB_ERR_ARGUMENT);
  char longer[400];
  memset(longer, 'x', sizeof longer);
  longer[399] = 0;
  how = (mlfab_checkpoint_options){.size = sizeof how, .dir = longer};
  assert_int_equal(mlfab_checkpoint(r->ctx, &how, NULL), MLFAB_ERR_ARGUMENT);
  info.size = 0;
  assert_int_equal(mlfab_checkpoint(r->ctx, NULL, &info), MLFAB_ERR_ARGUMENT);
  how = (mlfab_checkpoint_options){.size = sizeof how, .keep = 1};
  for (int i = 0; i < 3; i++) assert_int_equal(mlfab_checkpoint(r->ctx, &how, NULL), 0);
  /* The older one goes after the call has returned. */
  for (int i = 0; i < 200 && disk_count(d, ".shard") > 1; i++) mlfab_progress(r->ctx, 10000000);
  assert_int_equal(disk_count(d, ".shard"), 1);
  assert_int_equal(disk_count(d, "00000003"), 2);
}

/* Trains two steps with a checkpoint after each, on a disk whose k-th call from then on fails. Returns how many
 * checkpoints were whole. */
static int attempt(memory_disk *d, const mlfab_model_options *o, uint64_t k, int with) {
  run *r = &runs[0];
  mlfab_checkpoint_info info;
  int whole = 0;
  assert_int_equal(start(r, d, NULL, o, 0), 0);
  train(r, 0);
  assert_int_equal(save(r, &info), 0);
  d->fail_at = d->calls + k;
  d->fail_with = with;
  for (uint64_t step = 1; step < 3; step++) {
    train(r, step);
    int code = save(r, &info);
    if (code && code != MLFAB_ERR_AGAIN) {
      assert_int_equal(code, MLFAB_ERR_IO);
      assert_non_null(strstr(r->error.text, "server 0"));
    }
    if (!code) whole = (int)step;
  }
  stop(r);
  return whole;
}

/* Every call fails in turn: an error, or none where a call is repeated; the newest whole checkpoint loads. */
TEST(test_calls_fail) {
  static const int with[] = {ENOSPC, EIO, EINTR, -1};
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_MOMENTUM, MLFAB_SYNC_ASYNC);
  for (int w = 0; w < 4; w++) {
    int fired = 1;
    for (uint64_t k = 1; fired; k++) {
      memory_disk *d = fresh();
      run *r = &runs[0];
      mlfab_checkpoint_info info;
      int whole = attempt(d, &o, k, with[w]);
      fired = d->fired;
      if (with[w] == EINTR || with[w] == -1) assert_int_equal(whole, 2);
      d->fail_at = 0;
      resume(r, d, &o, &info);
      assert_true((int)info.version >= whole + 1);
    }
  }
}

/* The machine stops at every call in turn, and loses what was not synced. */
TEST(test_stops) {
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_MOMENTUM, MLFAB_SYNC_ASYNC);
  for (int names = 0; names < 2; names++) {
    int fired = 1;
    for (uint64_t k = 1; fired; k++) {
      memory_disk *d = fresh();
      run *r = &runs[0], *all = &runs[1];
      mlfab_checkpoint_info info;
      int whole = attempt(d, &o, k, 0);
      fired = d->fired;
      disk_crash(d, names);
      resume(r, d, &o, &info);
      assert_true((int)info.version >= whole + 1 && info.version <= 3);
      memory_disk *none = &disks[1];
      assert_int_equal(start(all, none, NULL, &o, 0), 0);
      for (uint64_t step = 0; step < info.version; step++) train(all, step);
      same(r, all);
      /* And it goes on: the next checkpoint has a number of its own. */
      train(r, info.version);
      uint64_t before = info.number;
      assert_int_equal(save(r, &info), 0);
      assert_true(info.number > before);
    }
  }
}

/* --- safetensors --- */

static void file_put(memory_disk *d, const char *path, const char *header, size_t data_bytes) {
  disk_inode *inode = &d->inodes[d->ninodes];
  size_t n = strlen(header);
  inode->bytes = 8 + n + data_bytes;
  inode->data = calloc(1, inode->bytes);
  for (int i = 0; i < 8; i++) inode->data[i] = (uint8_t)(n >> (8 * i));
  memcpy(inode->data + 8, header, n);
  for (size_t i = 0; i < data_bytes / 4; i++) {
    float x = (float)i;
    memcpy(inode->data + 8 + n + 4 * i, &x, 4);
  }
  disk_add(d->now, path)->inode = d->ninodes++;
}

static int load(run *r, const char *header, size_t data_bytes, memory_disk *d, const char *name) {
  float x[4] = {0};
  const mlfab_buf buf = {5, 0, x, 4};
  file_put(d, "/disk/w", header, data_bytes);
  int code = mlfab_load(r->ctx, "/disk/w", &buf, 1, name ? &name : NULL);
  if (code) mlfab_last_error(r->ctx, &r->error);
  for (int i = 0; i < 4 && !code; i++) assert_true(x[i] == (float)(i + 2));
  return code;
}

/* What mlfab_save writes, and what others write; what is no such file. */
TEST(test_load) {
  static const char *const good[] = {
      "{\"5\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[8,24]}}",
      " { \"__metadata__\" : {\"a\\\"}\":\"b\"} , \"5\" : { \"data_offsets\" : [ 8 , 24 ] , "
      "\"shape\" : [2, 2], \"more\": [[{\"x\":1.5e3}], null, true], \"dtype\" : \"F32\" } } ",
      "{\"a\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[0,2]},\"5\":{\"dtype\":\"F32\","
      "\"shape\":[4,1],\"data_offsets\":[8,24]}}"};
  static const struct {
    int code;
    const char *header;
  } bad[] = {
      {MLFAB_ERR_TENSOR, "{}"},
      {MLFAB_ERR_TENSOR, "{\"6\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[8,24]}}"},
      {MLFAB_ERR_DTYPE, "{\"5\":{\"dtype\":\"F64\",\"shape\":[4],\"data_offsets\":[8,24]}}"},
      {MLFAB_ERR_SHAPE, "{\"5\":{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[8,28]}}"},
      {MLFAB_ERR_CHECKPOINT, "{\"5\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[8,25]}}"},
      {MLFAB_ERR_CHECKPOINT, "{\"5\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[24,8]}}"},
      {MLFAB_ERR_CHECKPOINT, "{\"5\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[80,96]}}"},
      {MLFAB_ERR_CHECKPOINT, "{\"5\":{\"dtype\":\"F32\",\"shape\":[4]}}"},
      {MLFAB_ERR_CHECKPOINT, "{\"5\":{\"dtype\":\"F32\",\"shape\":[4"},
      {MLFAB_ERR_CHECKPOINT, "{\"5\":"},
      {MLFAB_ERR_CHECKPOINT, "[]"},
      {MLFAB_ERR_CHECKPOINT, "{\"a\":[[[[[[[[[[[[[[[[[[[[[[]]"},
      {MLFAB_ERR_CHECKPOINT, "{\"5"},
      {MLFAB_ERR_CHECKPOINT, ""}};
  memory_disk *d = fresh();
  run *r = &runs[0];
  mlfab_config c;
  open_run(r, d, NULL, 0);
  assert_int_equal(mlfab_tensor_add(r->ctx, 5, MLFAB_F32, 4), 0);
  for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
    if (load(r, good[i], 24, d, NULL)) fail_msg("%s", r->error.text);
    /* Any shorter file is refused. */
    size_t whole = disk_file(d, "/w")->bytes;
    for (size_t n = 0; n < whole; n++) {
      float x[4];
      const mlfab_buf buf = {5, 0, x, 4};
      disk_file(d, "/w")->bytes = n;
      assert_int_equal(mlfab_load(r->ctx, "/disk/w", &buf, 1, NULL), MLFAB_ERR_CHECKPOINT);
    }
  }
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    int code = load(r, bad[i].header, 24, d, NULL);
    if (code != bad[i].code) fail_msg("%s: %s", bad[i].header, mlfab_error_name(code));
  }
  assert_int_equal(
      load(r, "{\"l.w\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[8,24]}}", 24, d, "l.w"),
      0);
  float x[4];
  mlfab_buf buf = {5, 0, x, 3};
  assert_int_equal(mlfab_load(r->ctx, "/disk/w", &buf, 1, NULL), MLFAB_ERR_SHAPE);
  buf = (mlfab_buf){6, 0, x, 4};
  assert_int_equal(mlfab_load(r->ctx, "/disk/w", &buf, 1, NULL), MLFAB_ERR_TENSOR);
  assert_int_equal(mlfab_load(r->ctx, NULL, &buf, 1, NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_load(r->ctx, "/disk/none", &buf, 1, NULL), MLFAB_ERR_IO);
  stop(r);
  /* A file of mlfab_save's. */
  char path[64];
  snprintf(path, sizeof path, "/tmp/mlfab-test-%d.safetensors", (int)getpid());
  mlfab_config_init(&c);
  mlfab_model_options o = options_of(0, 0);
  assert_int_equal(start(r, d, NULL, &o, 0), 0);
  assert_int_equal(mlfab_save(r->ctx, path), 0);
  stop(r);
  assert_int_equal(mlfab_open(&c, &r->ctx, &r->error), 0);
  assert_int_equal(mlfab_tensor_add(r->ctx, 3, MLFAB_F32, FLOATS), 0);
  assert_int_equal(mlfab_tensor_add(r->ctx, 9, MLFAB_F64, DOUBLES), 0);
  memset(r->w, 0, sizeof r->w);
  mlfab_buf bufs[2] = {{3, 0, r->w, FLOATS}, {9, 0, r->v, DOUBLES}};
  assert_int_equal(mlfab_load(r->ctx, path, bufs, 2, NULL), 0);
  unlink(path);
  for (int i = 0; i < FLOATS; i++) assert_true(r->w[i] == (float)i / 100);
  assert_int_equal(mlfab_model_start(r->ctx, NULL, bufs, 2), 0);
}

/* Files that are far away: they explain, what cannot be reached is not damaged, and a close does not wait for them. */
TEST(test_far_files) {
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC);
  memory_disk *d = fresh();
  run *r = &runs[0];
  two_checkpoints(d, &o);
  mlfab_checkpoint_info info;
  d->why = "GET: HTTP 503 after 5 attempts in 30 s";
  d->fail_with = ETIMEDOUT;
  for (uint64_t call = 1; call <= 4; call++) {
    d->fail_at = d->calls + call;
    refused(d, &o, MLFAB_ERR_TIMEOUT, d->why);
  }
  /* Another error of a file: the older checkpoint is loaded. */
  d->fail_with = EIO;
  d->fail_at = d->calls + 2;
  assert_int_equal(loads(r, d, &o), 1);
  d->fail_at = d->calls + 1;
  refused(d, &o, MLFAB_ERR_IO, "cannot list '/disk': GET: HTTP 503 after 5 attempts in 30 s");
  /* A table of before has neither of the two. */
  d->table.size = offsetof(mlfab_files, explain);
  d->fail_at = d->calls + 1;
  refused(d, &o, MLFAB_ERR_IO, "cannot list '/disk': Input/output error");
  d->table.size = sizeof d->table;
  d->fail_at = 0;
  assert_int_equal(start(r, d, NULL, &o, 0), 0);
  train(r, 0);
  d->hangs = 1;
  mlfab_request request;
  mlfab_checkpoint_options how = {.size = sizeof how, .dir = DIR};
  info.size = sizeof info;
  assert_int_equal(mlfab_checkpoint_start(r->ctx, &how, &info, &request), 0);
  for (int i = 0; i < 500 && !d->hung; i++) mlfab_progress(r->ctx, 10000000);
  assert_int_equal(d->hung, 1);
  struct timespec began, now;
  clock_gettime(CLOCK_MONOTONIC, &began);
  stop(r);
  clock_gettime(CLOCK_MONOTONIC, &now);
  assert_true(now.tv_sec - began.tv_sec < 5);
  assert_int_equal(d->cancelled, 0);
}

/* Directories that are URLs: not without files that know them, and not with a password. */
TEST(test_urls) {
  memory_disk *d = fresh();
  run *r = &runs[0];
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC);
  mlfab_checkpoint_options how = {.size = sizeof how, .dir = "https://host/run"};
  mlfab_config c;
  mlfab_config_init(&c);
  snprintf(c.checkpoint_dir, sizeof c.checkpoint_dir, "https://me:secret@host/run");
  assert_int_equal(mlfab_open(&c, &r->ctx, &r->error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(r->error.text, "user or password"));
  assert_null(strstr(r->error.text, "secret"));
  char at[] = "/tmp/mlfab-of@run-XXXXXX"; /* no password */
  assert_non_null(mkdtemp(at));
  snprintf(c.checkpoint_dir, sizeof c.checkpoint_dir, "%s", at);
  d->table = *mlfab_files_system();
  open_run(r, d, NULL, 0);
  assert_int_equal(mlfab_restore(r->ctx, "https://me@host"), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_restore(r->ctx, "https://host/me@here"), 0);
  assert_int_equal(mlfab_restore(r->ctx, ""), 0);
  stop(r);
  assert_int_equal(mlfab_open(&c, &r->ctx, &r->error), 0);
  assert_int_equal(mlfab_tensor_add(r->ctx, 3, MLFAB_F32, FLOATS), 0);
  mlfab_buf buf = {3, 0, r->w, FLOATS};
  assert_int_equal(mlfab_model_start(r->ctx, &o, &buf, 1), 0);
  assert_int_equal(mlfab_checkpoint(r->ctx, &how, NULL), MLFAB_ERR_IO);
  mlfab_last_error(r->ctx, &r->error);
  assert_non_null(strstr(r->error.text, "a URL needs env.files that know it"));
  how.dir = "https://me:sec/ret@host/run"; /* somebody forgot to escape it */
  assert_int_equal(mlfab_checkpoint(r->ctx, &how, NULL), MLFAB_ERR_ARGUMENT);
  stop(r);
  rmdir(at);
}

/* Stands before the C library's: fails for directories with `directory_sync`, unless that is 0. */
static _Atomic int directory_sync;

int fsync(int fd) {
  struct stat status;
  if (!directory_sync || fstat(fd, &status) || !S_ISDIR(status.st_mode)) return fdatasync(fd);
  errno = directory_sync;
  return -1;
}

/* File systems that cannot sync a directory have checkpoints, too; an error of the disk is one. */
TEST(test_directories_without_sync) {
  static const int without[] = {EINVAL, EOPNOTSUPP, ENOTSUP};
  mlfab_model_options o = options_of(MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC);
  memory_disk *d = fresh();
  run *r = &runs[0];
  mlfab_checkpoint_options how = {.size = sizeof how, .keep = 1};
  char dir[] = "/tmp/mlfab-test-XXXXXX", command[64];
  assert_non_null(mkdtemp(dir));
  d->table = *mlfab_files_system();
  how.dir = dir;
  assert_int_equal(start(r, d, NULL, &o, 0), 0);
  for (size_t i = 0; i < sizeof without / sizeof without[0]; i++) {
    directory_sync = without[i];
    assert_int_equal(mlfab_checkpoint(r->ctx, &how, NULL), 0);
  }
  directory_sync = EIO;
  assert_int_equal(mlfab_checkpoint(r->ctx, &how, NULL), MLFAB_ERR_IO);
  mlfab_last_error(r->ctx, &r->error);
  assert_non_null(strstr(r->error.text, "Input/output error"));
  directory_sync = 0;
  stop(r);
  snprintf(command, sizeof command, "rm -r '%s'", dir);
  assert_int_equal(system(command), 0);
}

/* A directory that cannot have checkpoints is an error of open, at a server; a worker alone does not need it. */
TEST(test_directory_at_open) {
  static const struct {
    const char *dir, *why;
  } wrong[] = {{"/nowhere/run", "No such file"}, {"/dev/null", "Not a directory"}, {"/proc", ""}};
  run *r = &runs[0];
  mlfab_config c;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    mlfab_config_init(&c);
    snprintf(c.checkpoint_dir, sizeof c.checkpoint_dir, "%s", wrong[i].dir);
    assert_int_equal(mlfab_open(&c, &r->ctx, &r->error), MLFAB_ERR_CONFIG);
    assert_null(r->ctx);
    assert_non_null(strstr(r->error.text, "checkpoint_dir '"));
    assert_non_null(strstr(r->error.text, wrong[i].dir));
    assert_non_null(strstr(r->error.text, wrong[i].why));
  }
  /* Nothing stays of the trial; and a URL is not tried. */
  char dir[] = "/tmp/mlfab-test-XXXXXX";
  assert_non_null(mkdtemp(dir));
  const char *const right[] = {dir, "https://host/run"};
  for (int i = 0; i < 2; i++) {
    mlfab_config_init(&c);
    snprintf(c.checkpoint_dir, sizeof c.checkpoint_dir, "%s", right[i]);
    assert_int_equal(mlfab_open(&c, &r->ctx, &r->error), 0);
    stop(r);
  }
  assert_int_equal(rmdir(dir), 0);
}

/* A part takes the place of what has its name: an older part, or a link, whose file stays as it is. */
TEST(test_parts_and_links) {
  const mlfab_files *files = mlfab_files_system();
  char dir[] = "/tmp/mlfab-parts-XXXXXX", precious[64], part[64], text[16] = "";
  struct stat info;
  assert_non_null(mkdtemp(dir));
  snprintf(precious, sizeof precious, "%s/precious", dir);
  snprintf(part, sizeof part, "%s/x.part", dir);
  int fd = open(precious, O_RDWR | O_CREAT, 0600);
  assert_int_equal(write(fd, "precious", 8), 8);
  for (int kind = 0; kind < 3; kind++) {
    if (kind == 0) assert_int_equal(symlink(precious, part), 0);
    if (kind == 1) assert_int_equal(link(precious, part), 0);
    int file = files->open(files->user, part, 1);
    assert_true(file >= 0);
    assert_int_equal(files->write(files->user, file, "new", 3), 3);
    assert_int_equal(files->close(files->user, file), 0);
    assert_int_equal(lstat(part, &info), 0);
    assert_true(S_ISREG(info.st_mode) && info.st_size == 3);
    assert_int_equal(pread(fd, text, sizeof text, 0), 8);
    assert_memory_equal(text, "precious", 8);
    if (kind < 2) assert_int_equal(files->remove(files->user, part), 0);
  }
  close(fd);
  assert_true(!unlink(part) && !unlink(precious));
  assert_int_equal(mkdir(part, 0700), 0);
  assert_true(files->open(files->user, part, 1) < 0);
  assert_true(!rmdir(part) && !rmdir(dir));
}

static int end(void **state) {
  (void)state;
  fresh();
  return 0;
}

TESTS(NULL, end)
