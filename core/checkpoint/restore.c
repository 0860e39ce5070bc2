/* restore.c - a server loads the newest whole checkpoint of a directory. See restore.h. */
#include "restore.h"

#include "../server/clock_copy.h"

#include <stdio.h>

/* Room for at least one record of any length. */
enum { RESTORE_READ = 1280 << 10 };
_Static_assert(RESTORE_READ >= MLFAB__RECORD_BYTES + MLFAB_META_MAX + MLFAB_BULK_MAX,
               "a whole record has to fit");

MLFAB__INTERNAL void mlfab__restore_init(mlfab__restore *restore, mlfab__env *env,
                                         struct mlfab__server *server, mlfab__filer *filer) {
  *restore = (mlfab__restore){.env = env, .server = server, .filer = filer};
}

/* Frees the data of one checkpoint. */
static void restore_forget(mlfab__restore *restore) {
  mlfab__env *env = restore->env;
  mlfab__free(env, restore->seen, restore->manifest.slices);
  mlfab__free(env, restore->table, restore->table_bytes);
  mlfab__free(env, restore->parts, restore->nparts * sizeof *restore->parts);
  mlfab__free(env, restore->pushed, restore->server->workers * sizeof *restore->pushed);
  mlfab__free(env, restore->words, restore->nwords * sizeof *restore->words);
  restore->seen = restore->table = NULL;
  restore->parts = NULL;
  restore->pushed = NULL;
  restore->words = NULL;
  restore->table_bytes = restore->nparts = 0;
  memset(&restore->manifest, 0, sizeof restore->manifest);
}

static void restore_end(mlfab__restore *restore) {
  mlfab__env *env = restore->env;
  restore_forget(restore);
  mlfab__free(env, restore->names, restore->names_bytes);
  mlfab__free(env, restore->entries, MLFAB__CHECKPOINT_SHARDS_MAX * sizeof *restore->entries);
  restore->names = NULL;
  restore->names_bytes = 0;
  restore->entries = NULL;
  restore->phase = MLFAB__RESTORE_IDLE;
}

MLFAB__INTERNAL void mlfab__restore_stop(mlfab__restore *restore) {
  if (restore->phase == MLFAB__RESTORE_IDLE) return;
  restore->stale = restore->filer->busy;
  restore_end(restore);
}

/* --- errors --- */

static void restore_refuse(mlfab__restore *restore, int code, const char *text) {
  mlfab_error error;
  mlfab__server *server = restore->server;
  restore_end(restore);
  mlfab__error(&error, code, (int32_t)server->number, 1, 0, "restore: %.240s", text);
  mlfab__server_refuse(server, &error);
}

static void restore_no_memory(mlfab__restore *restore) {
  restore_refuse(restore, MLFAB_ERR_MEMORY, "the server is out of memory for the checkpoint");
}

/* The server cannot keep a record, apply an open round, or follow the consistency model. */
static void restore_fail(mlfab__restore *restore, int code) {
  mlfab_error error;
  if (code == MLFAB_ERR_CALLBACK)
    restore_refuse(restore, code, "on_update refuses the open round of the checkpoint");
  else if (mlfab__clock_follows(restore->server, restore->clock.consistency.kind, &error) == code)
    restore_refuse(restore, code, error.text);
  else
    restore_no_memory(restore);
}

static void restore_try(mlfab__restore *restore);

/* Gives this checkpoint up as not whole, and tries the next older one. Once loading has begun, none is left. */
static void restore_bad(mlfab__restore *restore, const char *why) {
  char text[MLFAB__TEXT_MAX];
  snprintf(text, sizeof text, "'%.120s': %.130s", restore->path, why);
  mlfab__log(restore->env, MLFAB_LOG_WARN, "checkpoint %llu cannot be used: %s",
             (unsigned long long)restore->number, text);
  if (restore->phase == MLFAB__RESTORE_LOADS) {
    restore_refuse(restore, MLFAB_ERR_CHECKPOINT, text);
    return;
  }
  if (!restore->why[0]) snprintf(restore->why, sizeof restore->why, "%s", text);
  restore_forget(restore);
  restore_try(restore);
}

/* --- reading --- */

static void restore_read(mlfab__restore *restore) {
  mlfab_file_op *op = &restore->filer->op;
  op->kind = MLFAB_FILE_READ;
  op->path = restore->path;
  op->offset = restore->offset;
  op->bytes = RESTORE_READ;
  mlfab__files_ask(restore->filer);
}

static void restore_open(mlfab__restore *restore) {
  restore->reader = (mlfab__reader){.set = restore->set, .model = restore->manifest.slices};
  restore->chain = 0;
  restore->offset = 0;
  if (restore->clocked) restore->clocked = 1;
  mlfab__record_path(restore->path, restore->dir, restore->number, restore->shard,
                     restore->manifest.shards);
  restore_read(restore);
}

/* Begins with the newest checkpoint that is older than the last one tried. */
static void restore_try(mlfab__restore *restore) {
  mlfab__record_name name;
  const char *text;
  size_t at = 0, bytes;
  uint64_t newest = 0;
  int some = 0;
  while (mlfab__record_each(restore->names, restore->names_bytes, &at, &text, &bytes, &name)) {
    some = 1;
    if (name.manifest && !name.part && name.number < restore->number)
      newest = mlfab__max(newest, name.number);
  }
  if (newest == 0) {
    char why[MLFAB__TEXT_MAX];
    snprintf(why, sizeof why, "%s '%.200s'",
             some ? "no manifest of a checkpoint is in" : "there is no checkpoint in",
             restore->dir);
    if (restore->why[0]) snprintf(why, sizeof why, "%s", restore->why);
    restore_refuse(restore, MLFAB_ERR_CHECKPOINT, why);
    return;
  }
  restore->number = newest;
  restore->phase = MLFAB__RESTORE_MANIFEST;
  restore->offset = 0;
  mlfab__record_path(restore->path, restore->dir, newest, 0, 0);
  restore_read(restore);
}

static void restore_list(mlfab__restore *restore) {
  mlfab_file_op *op = &restore->filer->op;
  op->kind = MLFAB_FILE_LIST;
  op->path = restore->dir;
  mlfab__files_ask(restore->filer);
}

MLFAB__INTERNAL int mlfab__restore_begin(mlfab__restore *restore) {
  if (!restore->dir[0]) return 0;
  if (restore->phase != MLFAB__RESTORE_IDLE) return 1;
  restore->number = UINT64_MAX;
  restore->why[0] = 0;
  restore->code = 0;
  restore->entries =
      mlfab__alloc_array(restore->env, MLFAB__CHECKPOINT_SHARDS_MAX, sizeof *restore->entries);
  restore->phase = MLFAB__RESTORE_LISTS;
  if (!restore->entries) {
    restore_no_memory(restore);
    return 1;
  }
  if (!restore->stale) restore_list(restore);
  return 1;
}

/* --- the manifest --- */

static void restore_manifest(mlfab__restore *restore, const mlfab_io_event *event) {
  mlfab__file_record record;
  const char *why = NULL;
  int64_t n = mlfab__record_open(event->bulk, event->bulk_bytes, &record, &why);
  mlfab__checkpoint_manifest *m = &restore->manifest;
  if (n == 0) why = "it is truncated";
  if (!why &&
      ((uint64_t)n != event->bulk_bytes || record.type != MLFAB__RECORD_MANIFEST ||
       record.index != 0 || record.bulk_bytes != 0 ||
       mlfab__decode_checkpoint_manifest(record.meta, record.meta_bytes, m, restore->entries)))
    why = "it is no manifest";
  if (!why && m->number != restore->number) why = "it is the manifest of another checkpoint";
  uint32_t wanted = restore->server->config->history;
  if (!why && wanted && mlfab__record_history(record.set) != wanted)
    why = "it is of another history";
  if (!why && (m->shards == 0 || m->slices == 0 || m->slices > MLFAB__SLICES_MAX))
    why = "it is no manifest";
  if (why) {
    m->slices = 0;
    restore_bad(restore, why);
    return;
  }
  restore->set = record.set;
  restore->seen = mlfab__alloc(restore->env, m->slices);
  if (!restore->seen) {
    restore_no_memory(restore);
    return;
  }
  restore->phase = MLFAB__RESTORE_CHECKS;
  restore->shard = 0;
  restore_open(restore);
}

/* --- records: return NULL, or a text that names the fault --- */

static const char *restore_head(mlfab__restore *restore, const mlfab__checkpoint_head *head) {
  if (head->number != restore->number || head->server != restore->shard ||
      head->servers != restore->manifest.shards || head->epoch != restore->manifest.epoch ||
      head->slices != restore->manifest.slices)
    return "its name is that of another file of a checkpoint";
  return NULL;
}

/* CHECKS: keeps the first shard's definition. */
static void restore_define(mlfab__restore *restore, const mlfab__define *define,
                           const mlfab__file_record *record) {
  if (restore->phase != MLFAB__RESTORE_CHECKS || restore->shard > 0) return;
  restore->define = *define;
  restore->table = mlfab__alloc(restore->env, record->bulk_bytes);
  if (!restore->table) {
    restore->code = MLFAB_ERR_MEMORY;
    return;
  }
  restore->table_bytes = record->bulk_bytes;
  memcpy(restore->table, record->bulk, record->bulk_bytes);
}

/* Takes the clock of the shard file being read, if it is the first, or of another model or round; sums that are loaded are
 * then applied as they are. Else adds the workers of its open round. */
static void restore_clock_here(mlfab__restore *restore) {
  mlfab__server *server = restore->server;
  const mlfab__clock_record *in = &restore->clock;
  mlfab__clock_record here;
  uint32_t words[MLFAB__RESHARD_SERVER_WORDS_MAX];
  if (restore->clocked == 2 || restore->code) return;
  mlfab__clock_told(server, &here, words);
  double scale = mlfab__clock_scale(server, &here), other = mlfab__clock_scale(server, in);
  int joins = restore->clocked &&
              mlfab__clock_round(&here, words) == mlfab__clock_round(in, restore->words) &&
              !(scale != 0.0 && other != 0.0 && scale != other);
  restore->differs |= restore->clocked && !joins;
  restore->clocked = 2;
  if (joins) {
    mlfab__clock_unite(server, in, restore->words);
  } else {
    restore->code = mlfab__clock_flush(server);
    mlfab__clock_take(server, in, restore->words);
  }
}

static void restore_clock(mlfab__restore *restore, mlfab__reader_item *item) {
  mlfab__clock_record *clock = &item->is.clock;
  if (restore->phase != MLFAB__RESTORE_LOADS) return;
  /* The number of workers may have changed. */
  memset(restore->words, 0, restore->nwords * sizeof *restore->words);
  memcpy(restore->words, item->words,
         mlfab__min(clock->words, restore->nwords) * sizeof *restore->words);
  clock->words = restore->nwords;
  restore->clock = *clock;
  restore->code = mlfab__clock_follows(restore->server, clock->consistency.kind, NULL);
  /* A server without slices has a clock, too. */
  if (restore->server->store.nslices == 0 && !restore->clocked) restore_clock_here(restore);
}

static void restore_worker(mlfab__restore *restore, const mlfab__checkpoint_worker *worker) {
  if (restore->phase != MLFAB__RESTORE_LOADS || worker->worker >= restore->server->workers) return;
  uint64_t *pushed = &restore->pushed[worker->worker];
  *pushed = mlfab__max(*pushed, worker->pushed);
}

static const char *restore_slice(mlfab__restore *restore, const mlfab__checkpoint_slice *slice) {
  if (restore->phase == MLFAB__RESTORE_CHECKS)
    return restore->seen[slice->slice]++ ? "it has a slice that another shard has, too" : NULL;
  mlfab__store *store = &restore->server->store;
  uint32_t local = store->local[slice->slice];
  if (local == MLFAB__NO_SLICE) return NULL;
  restore_clock_here(restore);
  store->slices[local].version = slice->version;
  store->slices[local].commit = slice->commit;
  if (store->tags) store->tags->moved(store, local);
  return NULL;
}

static const char *restore_image(mlfab__restore *restore, const mlfab__checkpoint_bytes *bytes,
                                 const mlfab__file_record *record) {
  if (restore->phase != MLFAB__RESTORE_LOADS) return NULL;
  mlfab__store *store = &restore->server->store;
  uint32_t local = store->local[bytes->slice];
  if (local == MLFAB__NO_SLICE) return NULL;
  const mlfab__image_chunk chunk = {.slice = local,
                                    .kind = bytes->kind,
                                    .offset = bytes->offset,
                                    .bytes = record->bulk_bytes,
                                    .last = bytes->last != 0};
  int code = mlfab__image_take(restore->env, store, &restore->parts[local], &chunk, record->bulk);
  if (code == MLFAB_ERR_MEMORY) restore->code = code;
  return code && code != MLFAB_ERR_MEMORY ? "the bytes of a slice are not those of this model"
                                          : NULL;
}

static const char *restore_record(mlfab__restore *restore, const mlfab__file_record *record) {
  mlfab__reader_item item;
  const char *why = mlfab__reader_take(&restore->reader, record, &item);
  if (why) return why;
  switch (record->type) {
    case MLFAB__RECORD_HEAD:
      return restore_head(restore, &item.is.head);
    case MLFAB__RECORD_DEFINE:
      restore_define(restore, &item.is.define, record);
      return NULL;
    case MLFAB__RECORD_CLOCK:
      restore_clock(restore, &item);
      return NULL;
    case MLFAB__RECORD_WORKER:
      restore_worker(restore, &item.is.worker);
      return NULL;
    case MLFAB__RECORD_SLICE:
      return restore_slice(restore, &item.is.slice);
    case MLFAB__RECORD_IMAGE:
      return restore_image(restore, &item.is.bytes, record);
    default:
      return NULL;
  }
}

/* --- does it fit the model of worker 0? --- */

MLFAB__INTERNAL int mlfab__restore_equal(const mlfab_sync *a, const mlfab_sync *b) {
  unsigned uses = mlfab__sync_uses(a->kind);
  return a->kind == b->kind && (!(uses & MLFAB__SYNC_STALENESS) || a->staleness == b->staleness) &&
         (!(uses & MLFAB__SYNC_MAX) || a->staleness_max == b->staleness_max) &&
         (!(uses & MLFAB__SYNC_NEED) || a->need == b->need) &&
         (!(uses & MLFAB__SYNC_SOFT) || a->soft == b->soft) &&
         (!(uses & MLFAB__SYNC_DRAWS) || a->only_fastest == b->only_fastest) &&
         (!(uses & MLFAB__SYNC_LATE) || a->keep_late == b->keep_late) &&
         (!(uses & MLFAB__SYNC_CHANCE) || a->chance == b->chance) &&
         (!(uses & MLFAB__SYNC_ALPHA) || a->alpha == b->alpha);
}

static int restore_differs(const char *name, double stored, double given, mlfab_error *error) {
  if (stored <= given && stored >= given) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "%s is %g, in the checkpoint %g", name, given,
                     stored);
}

static const char *restore_optimizer(uint32_t kind) {
#define RESTORE_NAME(kind, name, ...) [MLFAB_OPTIMIZER_##kind] = #name,
  static const char *const names[] = {MLFAB__OPTIMIZERS(RESTORE_NAME)};
  return kind < MLFAB__COUNT(names) ? names[kind] : "unknown";
}

/* Compares the options on which the state depends. */
static int restore_options(const mlfab_model_options *stored, const mlfab_model_options *given,
                           mlfab_error *error) {
  int code = 0;
  if (stored->optimizer != given->optimizer)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "the optimizer is %s, in the checkpoint %s",
                       restore_optimizer(given->optimizer), restore_optimizer(stored->optimizer));
  mlfab__optimizer before, after;
  code = mlfab__optimizer_init(&before, stored, error);
  if (!code) code = mlfab__optimizer_init(&after, given, error);
#define RESTORE_SAME(name) \
  if (!code) code = restore_differs(#name, before.name, after.name, error)
  RESTORE_SAME(gamma);
  RESTORE_SAME(adadelay_c);
  RESTORE_SAME(beta1);
  RESTORE_SAME(beta2);
  RESTORE_SAME(epsilon);
  RESTORE_SAME(weight_decay);
  if (!code) code = restore_differs("mean", stored->mean, given->mean, error);
  if (!code)
    code = restore_differs("deterministic", stored->deterministic, given->deterministic, error);
  if (!code && given->slices > 0)
    code = restore_differs("slices", stored->slices, given->slices, error);
  if (code || mlfab__restore_equal(&stored->consistency, &given->consistency)) return code;
  return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                     "the consistency (%s) or a member of it differs from the checkpoint's (%s)",
                     mlfab__sync_name(given->consistency.kind),
                     mlfab__sync_name(stored->consistency.kind));
}

/* Compares tensors and options. Errors: MODEL, CONFIG, MEMORY. */
static int restore_fits(mlfab__restore *restore, mlfab_error *error) {
  const mlfab__server_peer *first = &restore->server->peers[0];
  uint32_t n = restore->define.tensors;
  if (!first->definition) return MLFAB__FAIL(error, MLFAB_ERR_STATE, "worker 0 has gone");
  mlfab__tensor_info *stored = mlfab__alloc_array(restore->env, n, sizeof *stored);
  if (!stored) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for the definition");
  for (uint32_t i = 0; i < n; i++)
    mlfab__decode_tensor_info(restore->table + (size_t)i * MLFAB__TENSOR_INFO_BYTES, &stored[i]);
  int code = mlfab__server_compare(stored, n, "the checkpoint's", first->definition,
                                   first->define.tensors, error);
  mlfab__free(restore->env, stored, n * sizeof *stored);
  restore->define.options.size = sizeof restore->define.options;
  restore->define.options.consistency.size = sizeof restore->define.options.consistency;
  return code ? code : restore_options(&restore->define.options, &first->define.options, error);
}

/* Ends CHECKS: builds the model, and reads all shards once more. */
static void restore_load(mlfab__restore *restore) {
  mlfab__server *server = restore->server;
  mlfab_error error;
  uint32_t slices = restore->manifest.slices;
  for (uint32_t i = 0; i < slices; i++) {
    if (restore->seen[i]) continue;
    restore_bad(restore, "no shard has all slices");
    return;
  }
  int code = restore_fits(restore, &error);
  const mlfab__server_peer *first = &server->peers[0];
  if (!code) code = mlfab__server_build(server, &first->define, first->definition, slices, &error);
  if (!code && server->layout.nslices != slices)
    code = MLFAB__FAIL(&error, MLFAB_ERR_CHECKPOINT,
                       "the model cannot be divided into the checkpoint's %u slices", slices);
  if (code) {
    restore_refuse(restore, code, error.text);
    return;
  }
  restore->nwords = (server->workers + 31) / 32;
  restore->nparts = server->store.nslices;
  restore->pushed = mlfab__alloc_array(restore->env, server->workers, sizeof *restore->pushed);
  restore->words = mlfab__alloc_array(restore->env, restore->nwords, sizeof *restore->words);
  if (restore->nparts > 0)
    restore->parts = mlfab__alloc_array(restore->env, restore->nparts, sizeof *restore->parts);
  if (!restore->pushed || !restore->words || (restore->nparts > 0 && !restore->parts)) {
    restore_no_memory(restore);
    return;
  }
  restore->phase = MLFAB__RESTORE_LOADS;
  restore->clocked = restore->differs = 0;
  restore->shard = 0;
  restore_open(restore);
}

/* Slices and clocks are loaded: the model stands. */
static void restore_stands(mlfab__server *server, uint64_t number, uint64_t version) {
  server->phase = MLFAB__MODEL_STANDS;
  server->first_weights_incarnation = 0;
  server->norm_commits = 0;
  server->save.restored = number;
  server->save.restored_version = version;
  server->greets = 1;
  /* Every worker is a new process: it continues with the open round, or with the next round if the old process's update
   * is in the open round. */
  for (uint32_t w = 0; w < server->workers; w++) {
    mlfab__server_peer *peer = &server->peers[w];
    peer->pushed = peer->decided = mlfab__clock_join(server, w);
  }
  mlfab__clock_members(server);
  if (server->policy) server->policy->told(server);
  mlfab__server_advance(server);
}

/* Ends LOADS: the model stands. */
static void restore_finish(mlfab__restore *restore) {
  mlfab__server *server = restore->server;
  char text[MLFAB__TEXT_MAX + 64];
  for (uint32_t i = 0; i < restore->nparts; i++) {
    if (restore->parts[i].done) continue;
    restore_bad(restore, "the bytes of a slice are not all there");
    return;
  }
  int code = restore->differs ? mlfab__clock_flush(server) : 0;
  if (code) {
    restore_fail(restore, code);
    return;
  }
  for (uint32_t w = 0; w < server->workers; w++) server->peers[w].pushed = restore->pushed[w];
  uint64_t number = restore->number, version = restore->manifest.version;
  server->save.history = mlfab__record_history(restore->set);
  snprintf(text, sizeof text, "checkpoint %llu, version %llu, loaded from %.160s",
           (unsigned long long)number, (unsigned long long)version, restore->dir);
  restore_end(restore);
  mlfab__log(restore->env, MLFAB_LOG_INFO, "%s", text);
  server->port.event(server->port.self, MLFAB_EVENT_RESTORED, (int32_t)server->number, 1, 0, 0,
                     text);
  restore_stands(server, number, version);
}

/* Called when the present shard was read to its end. */
static void restore_next(mlfab__restore *restore) {
  const mlfab__checkpoint_entry *entry = &restore->entries[restore->shard];
  if (restore->offset != entry->bytes || restore->chain != entry->chain) {
    restore_bad(restore, "it is not the shard that the manifest names");
    return;
  }
  restore->shard++;
  if (restore->shard < restore->manifest.shards)
    restore_open(restore);
  else if (restore->phase == MLFAB__RESTORE_CHECKS)
    restore_load(restore);
  else
    restore_finish(restore);
}

/* Takes the next bytes of the present shard. An incomplete record is read again. */
static void restore_bytes(mlfab__restore *restore, const mlfab_io_event *event) {
  const uint8_t *at = event->bulk;
  uint64_t left = event->bulk_bytes;
  const char *why = NULL;
  int64_t n = 0;
  while (!restore->code) {
    mlfab__file_record record;
    n = mlfab__record_open(at, left, &record, &why);
    if (n > 0) why = restore_record(restore, &record);
    if (n <= 0 || why) break;
    restore->chain = mlfab__record_chain(restore->chain, at);
    restore->offset += (uint64_t)n;
    at += n;
    left -= (uint64_t)n;
  }
  if (restore->code) {
    restore_fail(restore, restore->code);
  } else if (why) {
    restore_bad(restore, why);
  } else if (event->bulk_bytes == RESTORE_READ) {
    restore_read(restore);
  } else if (left > 0 || !mlfab__reader_ended(&restore->reader)) {
    restore_bad(restore, mlfab__reader_ended(&restore->reader) ? "it is longer than it should be"
                                                               : "it is truncated");
  } else {
    restore_next(restore);
  }
}

/* LISTS: takes the names in the directory. */
static void restore_listed(mlfab__restore *restore, const mlfab_io_event *event) {
  char text[MLFAB__TEXT_MAX];
  if (event->code) {
    snprintf(text, sizeof text, "cannot list '%.120s': %.110s", restore->dir,
             event->text ? event->text : mlfab_error_text(event->code));
    restore_refuse(restore, event->code, text);
    return;
  }
  if (event->bulk_bytes > 0) {
    restore->names = mlfab__alloc(restore->env, event->bulk_bytes);
    if (!restore->names) {
      restore_no_memory(restore);
      return;
    }
    restore->names_bytes = event->bulk_bytes;
    memcpy(restore->names, event->bulk, event->bulk_bytes);
  }
  restore_try(restore);
}

MLFAB__INTERNAL void mlfab__restore_event(mlfab__restore *restore, const mlfab_io_event *event) {
  char text[MLFAB__TEXT_MAX];
  if (restore->stale) {
    restore->stale = 0;
    if (restore->phase == MLFAB__RESTORE_LISTS) restore_list(restore);
  } else if (restore->phase == MLFAB__RESTORE_LISTS) {
    restore_listed(restore, event);
  } else if (restore->phase != MLFAB__RESTORE_IDLE && event->code && event->code != MLFAB_ERR_IO) {
    /* The operation did not happen: the file may be intact. */
    snprintf(text, sizeof text, "cannot read '%.120s': %.110s", restore->path,
             event->text ? event->text : mlfab_error_text(event->code));
    restore_refuse(restore, event->code, text);
  } else if (restore->phase != MLFAB__RESTORE_IDLE && event->code) {
    snprintf(text, sizeof text, "cannot be read: %.110s",
             event->text ? event->text : mlfab_error_text(event->code));
    restore_bad(restore, text);
  } else if (restore->phase == MLFAB__RESTORE_MANIFEST) {
    restore_manifest(restore, event);
  } else if (restore->phase != MLFAB__RESTORE_IDLE) {
    restore_bytes(restore, event);
  }
}
