/* lead.c - server 0 leads the checkpoints of a fabric: numbers, orders, manifests, removal. See lead.h. */
#include "lead.h"

#include "../server/server.h"

#include <stdio.h>

enum { LEAD_KEEP = 2, LEAD_HEAD = MLFAB__RECORD_BYTES + MLFAB_META_MAX, LEAD_REMOVAL = 1 };
#define LEAD_MINUTE 60000000000u

MLFAB__INTERNAL int mlfab__lead_init(mlfab__lead *lead) {
  lead->seats = mlfab__alloc_array(lead->env, lead->workers, sizeof *lead->seats);
  lead->answered = mlfab__alloc(lead->env, lead->servers);
  lead->owes = mlfab__alloc_array(lead->env, lead->servers, sizeof *lead->owes);
  lead->shard = mlfab__alloc_array(lead->env, lead->servers, sizeof *lead->shard);
  lead->entries = mlfab__alloc_array(lead->env, lead->servers, sizeof *lead->entries);
  lead->next_at =
      lead->config->checkpoint_commits ? lead->config->checkpoint_commits : MLFAB__NEVER;
  int all = lead->seats && lead->answered && lead->owes && lead->shard && lead->entries;
  return all ? 0 : MLFAB_ERR_MEMORY;
}

static void lead_forget_names(mlfab__lead *lead) {
  mlfab__free(lead->env, lead->names, lead->names_bytes);
  lead->names = NULL;
  lead->names_bytes = 0;
}

MLFAB__INTERNAL void mlfab__lead_free(mlfab__lead *lead) {
  if (!lead->env) return;
  lead_forget_names(lead);
  mlfab__free(lead->env, lead->head, LEAD_HEAD);
  mlfab__free(lead->env, lead->seats, lead->workers * sizeof *lead->seats);
  mlfab__free(lead->env, lead->answered, lead->servers);
  mlfab__free(lead->env, lead->owes, lead->servers * sizeof *lead->owes);
  mlfab__free(lead->env, lead->shard, lead->servers * sizeof *lead->shard);
  mlfab__free(lead->env, lead->entries, lead->servers * sizeof *lead->entries);
}

/* --- answers --- */

static void lead_answer(mlfab__lead *lead, uint32_t worker, const mlfab__checkpoint_done *done) {
  MLFAB__POST(&lead->down, worker, MLFAB__CHECKPOINT_DONE, checkpoint_done, done);
}

/* Does a failure of this kind need a line in the log? If so, counts it as logged from now on. */
static int lead_news(mlfab__lead *lead, int kind) {
  uint64_t now_ns = lead->filer->node->now_ns;
  mlfab__lead_said *said = &lead->said[0];
  for (uint32_t i = 0; i < MLFAB__LEAD_KINDS; i++) {
    if (lead->said[i].until_ns < said->until_ns) said = &lead->said[i];
    if (lead->said[i].kind != kind) continue;
    said = &lead->said[i];
    break;
  }
  if (said->kind == kind && now_ns < said->until_ns) return 0;
  *said = (mlfab__lead_said){kind, mlfab__add_sat(now_ns, LEAD_MINUTE)};
  return 1;
}

static void lead_log(mlfab__lead *lead, const char *text) {
  unsigned long long failures = lead->failures;
  if (!lead->done.code) {
    if (lead->told)
      mlfab__log(lead->env, MLFAB_LOG_WARN, "checkpoints succeed again after %llu failure%s: %s",
                 failures, failures == 1 ? "" : "s", text);
    else
      mlfab__log(lead->env, MLFAB_LOG_INFO, "%s", text);
    lead->failures = 0;
    lead->told = 0;
    return;
  }
  lead->failures++;
  if (lead->done.code == MLFAB_ERR_CLOSED) { /* as at the end of most runs */
    mlfab__log(lead->env, MLFAB_LOG_INFO, "%s", text);
    return;
  }
  if (!lead_news(lead, lead->done.code)) return;
  lead->told = 1;
  if (failures > 0)
    mlfab__log(lead->env, MLFAB_LOG_WARN, "%s (%llu before it failed, too)", text, failures);
  else
    mlfab__log(lead->env, MLFAB_LOG_WARN, "%s", text);
}

/* Ends the attempt: tells the asker, the log and the events. */
static void lead_tell(mlfab__lead *lead) {
  const mlfab__checkpoint_done *done = &lead->done;
  char text[MLFAB__TEXT_MAX + 64];
  if (done->code)
    snprintf(text, sizeof text, "a checkpoint failed: %s", done->text);
  else
    snprintf(text, sizeof text,
             "checkpoint %llu is whole: version %llu, %llu bytes in %.160s (history %u)",
             (unsigned long long)done->number, (unsigned long long)done->version,
             (unsigned long long)done->bytes, lead->order.dir, lead->server->save.history);
  lead_log(lead, text);
  lead->down.event(lead->down.self, MLFAB_EVENT_CHECKPOINT, 0, 1, 0, done->code, text);
  if (lead->asker == MLFAB__NO_NODE) return;
  mlfab__lead_seat *seat = &lead->seats[lead->asker];
  *seat = (mlfab__lead_seat){done->ask, done->number, done->version, done->bytes, done->code};
  lead_answer(lead, lead->asker, done);
}

/* After a failed attempt: asks for the list of its files; `kind` ABORT: first ends the writing of its manifest. */
static void lead_clean(mlfab__lead *lead, uint32_t kind) {
  mlfab_file_op *op = &lead->filer->op;
  lead->phase = MLFAB__LEAD_SWEEPS;
  op->kind = kind;
  op->path = lead->order.dir;
  mlfab__files_ask(lead->filer);
}

static void lead_fail(mlfab__lead *lead, int code, int32_t rank, const char *text) {
  enum mlfab__lead_phase phase = lead->phase;
  int left = phase == MLFAB__LEAD_AWAITS || phase == MLFAB__LEAD_SEALS; /* there may be files */
  lead->done.code = code;
  lead->done.rank = rank;
  lead->done.is_server = 1;
  snprintf(lead->done.text, sizeof lead->done.text, "%.255s", text);
  lead->phase = MLFAB__LEAD_IDLE;
  lead_forget_names(lead);
  for (uint32_t s = 0; s < lead->servers && left; s++) {
    if (lead->answered[s]) continue;
    if (lead->owes[s] == 0) lead->owes[s] = lead->order.number;
  }
  if (left) lead->spoilt = lead->order.number;
  lead_tell(lead);
  if (left) lead_clean(lead, phase == MLFAB__LEAD_SEALS ? MLFAB_FILE_ABORT : MLFAB_FILE_LIST);
}

static void lead_file_failed(mlfab__lead *lead, const char *doing, const char *path,
                             const mlfab_io_event *event) {
  char text[MLFAB__TEXT_MAX + 64];
  snprintf(text, sizeof text, "server 0 cannot %s '%.120s': %.110s", doing, path,
           event->text ? event->text : mlfab_error_text(event->code));
  lead_fail(lead, event->code, 0, text);
}

/* --- beginning --- */

static void lead_begin(mlfab__lead *lead, uint32_t asker, uint32_t keep, const char *dir,
                       uint64_t timeout_ns, uint64_t now_ns) {
  mlfab_file_op *op = &lead->filer->op;
  lead->asker = asker;
  lead->keep = keep                            ? keep
               : lead->config->checkpoint_keep ? lead->config->checkpoint_keep
                                               : LEAD_KEEP;
  lead->deadline_ns = mlfab__add_sat(now_ns, timeout_ns ? timeout_ns : lead->config->timeout_ns);
  if (strcmp(lead->order.dir, dir) != 0) {
    lead->listed = 0;
    memset(lead->owes, 0, lead->servers * sizeof *lead->owes);
  }
  memset(&lead->order, 0, sizeof lead->order);
  snprintf(lead->order.dir, sizeof lead->order.dir, "%.255s", dir);
  lead->phase = MLFAB__LEAD_LISTS;
  op->kind = MLFAB_FILE_LIST;
  op->path = lead->order.dir;
  mlfab__files_ask(lead->filer);
}

static const char *lead_dir(const mlfab__lead *lead, const mlfab__checkpoint_ask *ask) {
  return ask->dir[0] ? ask->dir : lead->config->checkpoint_dir;
}

/* Returns 0 if a checkpoint can begin now, or a code, with a text. */
static int lead_refuse(const mlfab__lead *lead, const char *dir, char *text, size_t room) {
  const mlfab__server *server = lead->server;
  int code = 0;
  int busy = lead->phase != MLFAB__LEAD_IDLE && lead->phase != MLFAB__LEAD_SWEEPS;
  if (server->phase != MLFAB__MODEL_STANDS) {
    code = MLFAB_ERR_STATE;
    snprintf(text, room, "there is no model");
  } else if (!dir[0]) {
    code = MLFAB_ERR_STATE;
    snprintf(text, room, "no directory was given, and server 0 has none (checkpoint_dir)");
  } else if (busy || lead->waits) {
    code = MLFAB_ERR_AGAIN;
    snprintf(text, room, "another checkpoint is being made");
  }
  return code;
}

/* Begins a request; `worker` MLFAB__NO_NODE: one by itself. */
static void lead_serve(mlfab__lead *lead, uint32_t worker, const mlfab__checkpoint_ask *ask,
                       uint64_t now_ns) {
  lead->waits = 0;
  lead->done =
      (mlfab__checkpoint_done){.ask = ask->ask, .rank = MLFAB_NO_RANK, .servers = lead->servers};
  lead_forget_names(lead);
  lead_begin(lead, worker, ask->keep, lead_dir(lead, ask), ask->timeout_ns, now_ns);
}

static void lead_serve_waiting(mlfab__lead *lead) {
  if (lead->waits) lead_serve(lead, lead->waiter, &lead->wanted, lead->filer->node->now_ns);
}

static void lead_wait_or_serve(mlfab__lead *lead, uint32_t worker, const mlfab__checkpoint_ask *ask,
                               uint64_t now_ns) {
  if (!lead->filer->busy) {
    lead_serve(lead, worker, ask, now_ns);
    return;
  }
  lead->waits = 1;
  lead->waiter = worker;
  lead->wanted = *ask;
}

MLFAB__INTERNAL void mlfab__lead_asked(mlfab__lead *lead, uint32_t worker,
                                       const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__checkpoint_ask ask;
  mlfab__lead_seat *seat = &lead->seats[worker];
  if (mlfab__port_refuse(
          &lead->down, worker, frame,
          mlfab__decode_checkpoint_ask(frame->meta, frame->meta_bytes, &ask) || ask.ask == 0))
    return;
  mlfab__checkpoint_done done = {.ask = ask.ask, .rank = MLFAB_NO_RANK, .servers = lead->servers};
  if (ask.ask <= seat->ask) { /* a link has lost the answer */
    done.code = seat->code;
    done.number = seat->number;
    done.version = seat->version;
    done.bytes = seat->bytes;
    if (lead->asker == worker && lead->done.ask == ask.ask) done = lead->done;
    lead_answer(lead, worker, &done);
    return;
  }
  int under_way = lead->phase != MLFAB__LEAD_IDLE && lead->phase != MLFAB__LEAD_SWEEPS;
  if (under_way && lead->asker == worker && lead->done.ask == ask.ask) return;
  if (lead->waits && lead->waiter == worker && lead->wanted.ask == ask.ask) return;
  done.code = lead_refuse(lead, lead_dir(lead, &ask), done.text, sizeof done.text);
  if (done.code) {
    lead_answer(lead, worker, &done);
  } else {
    lead_wait_or_serve(lead, worker, &ask, now_ns);
  }
}

MLFAB__INTERNAL void mlfab__lead_by_itself(mlfab__lead *lead, uint64_t now_ns) {
  char text[MLFAB__TEXT_MAX];
  uint64_t commits = lead->server->stats->commits;
  if (commits < lead->next_at) return;
  lead->next_at = commits + lead->config->checkpoint_commits;
  /* The last checkpoint is not ready: leaves this one out. */
  if (lead_refuse(lead, lead->config->checkpoint_dir, text, sizeof text)) return;
  const mlfab__checkpoint_ask ask = {.ask = 0};
  lead_wait_or_serve(lead, MLFAB__NO_NODE, &ask, now_ns);
}

MLFAB__INTERNAL void mlfab__lead_fresh(mlfab__lead *lead, uint32_t worker) {
  memset(&lead->seats[worker], 0, sizeof lead->seats[worker]);
  if (lead->asker == worker) lead->asker = MLFAB__NO_NODE; /* the asking process is gone */
  if (lead->waiter == worker) lead->waits = 0;
}

/* --- shards --- */

static void lead_order(mlfab__lead *lead, uint32_t server) {
  mlfab__checkpoint_order order = lead->order;
  order.index = lead->shard[server];
  MLFAB__POST(&lead->across, server, MLFAB__CHECKPOINT_ORDER, checkpoint_order, &order);
}

/* Do this copy's checkpoints have such numbers? A former copy of server 0 may still write under its own. */
static int lead_own(const mlfab__lead *lead, uint64_t number) {
  int replica = lead->config->roles == MLFAB_ROLE_REPLICA;
  return !lead->config->replicas || (int)(number & 1) != replica;
}

/* Called when CLEARS is over: orders the shards. */
static void lead_orders(mlfab__lead *lead) {
  lead->phase = MLFAB__LEAD_AWAITS;
  lead->again_ns = 0;
  lead->shards = 0;
  for (uint32_t s = 0; s < lead->servers; s++) {
    lead->answered[s] = s > 0 && !lead->asks(lead->self, s);
    if (!lead->answered[s]) lead->shard[s] = lead->shards++;
  }
  lead->awaited = lead->order.shards = lead->done.servers = lead->shards;
  for (uint32_t s = 1; s < lead->servers; s++) {
    if (lead->answered[s]) continue;
    lead->across.ready(lead->across.self, s);
    lead_order(lead, s); /* without a link this is lost: mlfab__lead_up repeats it */
  }
  lead->own(lead->self, &lead->order);
}

MLFAB__INTERNAL int mlfab__lead_wants(const mlfab__lead *lead, uint32_t server) {
  return lead->phase == MLFAB__LEAD_AWAITS && !lead->answered[server];
}

MLFAB__INTERNAL void mlfab__lead_up(mlfab__lead *lead, uint32_t server) {
  if (mlfab__lead_wants(lead, server)) lead_order(lead, server);
}

MLFAB__INTERNAL void mlfab__lead_gone(mlfab__lead *lead, uint32_t server, int left) {
  char text[64];
  lead->owes[server] = 0;
  if (!mlfab__lead_wants(lead, server)) return;
  snprintf(text, sizeof text, "server %u %s", server, left ? "has left" : "is dead");
  int unasked = left && lead->asker == MLFAB__NO_NODE;
  lead_fail(lead, unasked ? MLFAB_ERR_CLOSED : MLFAB_ERR_PEER_DEAD, (int32_t)server, text);
  lead->owes[server] = 0;
}

/* All shards are durable: writes the manifest, which makes the checkpoint whole. */
static void lead_seal(mlfab__lead *lead) {
  mlfab_file_op *op = &lead->filer->op;
  if (!lead->head) lead->head = mlfab__alloc(lead->env, LEAD_HEAD);
  if (!lead->head) {
    lead_fail(lead, MLFAB_ERR_MEMORY, 0, "server 0 is out of memory for the manifest");
    return;
  }
  const mlfab__checkpoint_manifest manifest = {.number = lead->order.number,
                                               .version = lead->done.version,
                                               .bytes = lead->done.bytes,
                                               .epoch = lead->epoch,
                                               .slices = lead->server->layout.nslices,
                                               .shards = lead->shards};
  mlfab__file_record record = {.type = MLFAB__RECORD_MANIFEST, .set = lead->order.set};
  record.meta_bytes =
      mlfab__encode_checkpoint_manifest(lead->head + MLFAB__RECORD_BYTES, &manifest, lead->entries);
  mlfab__record_seal(lead->head, &record);
  mlfab__record_path(lead->path, lead->order.dir, lead->order.number, 0, 0);
  lead->phase = MLFAB__LEAD_SEALS;
  *op = (mlfab_file_op){.kind = MLFAB_FILE_WRITE,
                        .flags = MLFAB_FILE_FIRST | MLFAB_FILE_LAST,
                        .stream = op->stream,
                        .path = lead->path,
                        .head = lead->head,
                        .head_bytes = MLFAB__RECORD_BYTES + record.meta_bytes};
  mlfab__files_ask(lead->filer);
}

/* Takes an answer that nobody awaits: if its attempt failed, its files can go, now or with the next attempt. */
static void lead_unawaited(mlfab__lead *lead, const mlfab__checkpoint_shard *shard) {
  int idle = lead->phase == MLFAB__LEAD_IDLE && !lead->filer->busy;
  if (idle && shard->number > lead->whole) lead_clean(lead, MLFAB_FILE_LIST);
}

MLFAB__INTERNAL void mlfab__lead_answered(mlfab__lead *lead, const mlfab__checkpoint_shard *shard) {
  char text[MLFAB__TEXT_MAX + 32];
  uint64_t *owes = &lead->owes[shard->server];
  if (shard->number >= *owes) *owes = 0;
  if (shard->number != lead->order.number || shard->set != lead->order.set ||
      !mlfab__lead_wants(lead, shard->server)) {
    lead_unawaited(lead, shard);
    return;
  }
  if (shard->code == MLFAB_ERR_AGAIN && lead->config->replicas && shard->server > 0) {
    /* The server still writes for a replaced copy of server 0. */
    lead->again_ns = lead->filer->node->now_ns + lead->config->heartbeat_ns;
    return;
  }
  lead->answered[shard->server] = 1;
  lead->awaited--;
  if (shard->code) {
    snprintf(text, sizeof text, "server %u %s", shard->server, shard->text);
    lead_fail(lead, shard->code, (int32_t)shard->server, text);
    return;
  }
  int first = lead->awaited + 1 == lead->shards;
  if (!first && shard->epoch != lead->epoch) {
    lead_fail(lead, MLFAB_ERR_AGAIN, (int32_t)shard->server, "slices have moved meanwhile");
    return;
  }
  lead->epoch = shard->epoch;
  lead->entries[lead->shard[shard->server]] = (mlfab__checkpoint_entry){shard->bytes, shard->chain};
  lead->done.version = mlfab__max(lead->done.version, shard->version);
  lead->done.bytes += shard->bytes;
  if (lead->awaited == 0) lead_seal(lead);
}

/* --- removing --- */

/* Takes the names in the directory: returns 0, or MEMORY. */
static int lead_take_names(mlfab__lead *lead, const mlfab_io_event *event) {
  lead_forget_names(lead);
  if (event->bulk_bytes == 0) return 0;
  lead->names = mlfab__alloc(lead->env, event->bulk_bytes);
  if (!lead->names) return MLFAB_ERR_MEMORY;
  lead->names_bytes = event->bulk_bytes;
  memcpy(lead->names, event->bulk, event->bulk_bytes);
  return 0;
}

/* Returns the newest number below `end` whose manifest is in the list, or 0. */
static uint64_t lead_newest(const mlfab__lead *lead, uint64_t end) {
  mlfab__record_name name;
  const char *text;
  size_t at = 0, bytes;
  uint64_t newest = 0;
  while (mlfab__record_each(lead->names, lead->names_bytes, &at, &text, &bytes, &name))
    if (name.manifest && !name.part && name.number < end) newest = mlfab__max(newest, name.number);
  return newest;
}

/* Returns the number of the oldest checkpoint that stays. */
static uint64_t lead_oldest(const mlfab__lead *lead) {
  uint64_t oldest = lead->order.number, before;
  for (uint32_t kept = 1; kept < lead->keep && (before = lead_newest(lead, oldest)) > 0; kept++)
    oldest = before;
  return oldest;
}

static int lead_has_manifest(const mlfab__lead *lead, uint64_t number) {
  return lead_newest(lead, number + 1) == number;
}

/* Does the file belong to a dead attempt? */
static int lead_orphan(const mlfab__lead *lead, const mlfab__record_name *file) {
  if (!lead_own(lead, file->number)) return 0;
  for (uint32_t s = 0; s < lead->servers; s++)
    if (lead->owes[s] && file->number >= lead->owes[s]) return 0;
  return file->part || !lead_has_manifest(lead, file->number);
}

/* Does the present step concern this file? */
static int lead_due(const mlfab__lead *lead, const mlfab__record_name *file) {
  int manifest = file->manifest && !file->part;
  switch (lead->step) {
    case MLFAB__LEAD_LOOKS:
      return manifest;
    case MLFAB__LEAD_LOOKS_REST:
      return !manifest && !lead_has_manifest(lead, file->number);
    default:
      return manifest == (lead->step == MLFAB__LEAD_REMOVES) &&
             (file->number < lead->oldest || lead_orphan(lead, file));
  }
}

/* Asks for the next file operation of CLEARS or SWEEPS; returns 0 if none is left. */
static int lead_acts(mlfab__lead *lead) {
  const char *text;
  size_t bytes;
  for (; lead->step < MLFAB__LEAD_STEPS; lead->step++, lead->name_at = 0) {
    while (mlfab__record_each(lead->names, lead->names_bytes, &lead->name_at, &text, &bytes,
                              &lead->looked_at)) {
      if (!lead_due(lead, &lead->looked_at)) continue;
      mlfab_file_op *op = &lead->filer->op;
      snprintf(lead->path, sizeof lead->path, "%.255s/%.*s", lead->order.dir, (int)bytes, text);
      lead->looked_name = lead->names + (text - lead->names);
      op->kind = lead->step < MLFAB__LEAD_REMOVES ? MLFAB_FILE_READ : MLFAB_FILE_REMOVE;
      op->path = lead->path;
      op->offset = 0;
      op->bytes = MLFAB__RECORD_BYTES;
      mlfab__files_ask(lead->filer);
      return 1;
    }
  }
  return 0;
}

/* Replace a name's first letter. STRUCK: foreign. LATER: perhaps foreign; irrelevant after the next manifest. */
enum { LEAD_STRUCK = '-', LEAD_LATER = '~' };

/* Takes the header of a file: strikes the file off the list if it is foreign. */
static void lead_looked(mlfab__lead *lead, const mlfab_io_event *event) {
  mlfab__file_record record = {.set = 0};
  mlfab__record_name name;
  const mlfab__record_name *file = &lead->looked_at;
  const char *text, *why;
  size_t at = 0, bytes;
  int manifest = lead->step == MLFAB__LEAD_LOOKS;
  /* The list has unfinished uploads, too, but nobody can read them. */
  int empty = event->code ? file->part : event->bulk_bytes < MLFAB__RECORD_BYTES;
  int read = !event->code && mlfab__record_open(event->bulk, event->bulk_bytes, &record, &why) >= 0;
  int mine = read && mlfab__record_history(record.set) == lead->server->save.history;
  int older = file->number < lead_newest(lead, MLFAB__NEVER);
  if (!manifest && empty) mine = older;
  if (!manifest && (uint32_t)record.set != lead->leader)
    mine = mine && (older || file->number <= lead->found);
  if (mine) return;
  /* Unfinished parts may go once a newer manifest is there. */
  if (!manifest) *lead->looked_name = empty ? LEAD_LATER : LEAD_STRUCK;
  while (manifest && mlfab__record_each(lead->names, lead->names_bytes, &at, &text, &bytes, &name))
    if (name.number == file->number) lead->names[text - lead->names] = LEAD_STRUCK;
}

/* Continues CLEARS or SWEEPS, or ends it. */
static void lead_sweep(mlfab__lead *lead) {
  if (lead_acts(lead)) return;
  if (lead->phase == MLFAB__LEAD_CLEARS) {
    lead_orders(lead);
    return;
  }
  lead->phase = MLFAB__LEAD_IDLE;
  lead_forget_names(lead);
  lead_serve_waiting(lead);
}

/* Begins to remove old files; `oldest` 0: only the files of failed attempts, from a new list. */
static void lead_sweep_from(mlfab__lead *lead, uint64_t oldest) {
  lead->oldest = oldest;
  lead->name_at = 0;
  /* The new manifest is newer than all names of the list. */
  for (size_t at = 0; oldest != 0 && at < lead->names_bytes; at++)
    if (lead->names[at] == LEAD_LATER && (at == 0 || lead->names[at - 1] == '\n'))
      lead->names[at] = 'c';
  lead->step = oldest == 0 ? MLFAB__LEAD_LOOKS : MLFAB__LEAD_REMOVES;
  lead_sweep(lead);
}

/* Called when an operation of CLEARS or SWEEPS has ended. */
static void lead_swept(mlfab__lead *lead, const mlfab_io_event *event) {
  uint32_t kind = lead->filer->op.kind;
  if (kind == MLFAB_FILE_ABORT) {
    lead_clean(lead, MLFAB_FILE_LIST);
  } else if (kind == MLFAB_FILE_LIST) {
    /* Without a list, the next attempt removes it. */
    if (!event->code) (void)lead_take_names(lead, event);
    lead_sweep_from(lead, 0);
  } else if (kind == MLFAB_FILE_READ) {
    lead_looked(lead, event);
    lead_sweep(lead);
  } else {
    if (event->code && lead_news(lead, LEAD_REMOVAL))
      mlfab__log(lead->env, MLFAB_LOG_WARN, "'%s' cannot be removed: %s", lead->path,
                 event->text ? event->text : mlfab_error_text(event->code));
    lead_sweep(lead);
  }
}

/* LISTS: takes the names in the directory. */
static void lead_number(mlfab__lead *lead, const mlfab_io_event *event) {
  mlfab__record_name name;
  const char *text;
  size_t at = 0, bytes;
  uint64_t largest = 0;
  if (lead_take_names(lead, event)) {
    lead_fail(lead, MLFAB_ERR_MEMORY, 0, "server 0 is out of memory for the directory");
    return;
  }
  while (mlfab__record_each(lead->names, lead->names_bytes, &at, &text, &bytes, &name))
    largest = mlfab__max(largest, name.number);
  if (!lead->listed) lead->found = largest;
  lead->listed = 1;
  largest = mlfab__max(largest, lead->spoilt) + 1;
  if (!lead_own(lead, largest)) largest++;
  lead->order.number = lead->done.number = largest;
  lead->order.set = (uint64_t)lead->server->save.history << 32 | lead->leader;
  lead->phase = MLFAB__LEAD_CLEARS;
  lead_sweep_from(lead, 0);
}

/* SEALS: called when the manifest is durable. */
static void lead_whole(mlfab__lead *lead) {
  lead->phase = MLFAB__LEAD_SWEEPS;
  lead->whole = lead->order.number;
  lead_tell(lead);
  lead_sweep_from(lead, lead_oldest(lead));
}

MLFAB__INTERNAL void mlfab__lead_event(mlfab__lead *lead, const mlfab_io_event *event) {
  switch (lead->phase) {
    case MLFAB__LEAD_LISTS:
      if (event->code)
        lead_file_failed(lead, "list", lead->order.dir, event);
      else
        lead_number(lead, event);
      break;
    case MLFAB__LEAD_SEALS:
      if (!event->code) {
        lead_whole(lead);
        break;
      }
      lead_file_failed(lead, "write", lead->path, event);
      break;
    case MLFAB__LEAD_CLEARS:
    case MLFAB__LEAD_SWEEPS:
      lead_swept(lead, event);
      break;
    default: /* an operation of an attempt that is over */
      lead_serve_waiting(lead);
  }
}

/* --- time --- */

MLFAB__INTERNAL uint64_t mlfab__lead_deadline(const mlfab__lead *lead) {
  if (lead->phase == MLFAB__LEAD_LISTS || lead->phase == MLFAB__LEAD_CLEARS)
    return lead->deadline_ns;
  if (lead->phase != MLFAB__LEAD_AWAITS) return MLFAB__NEVER;
  return lead->again_ns ? mlfab__min(lead->again_ns, lead->deadline_ns) : lead->deadline_ns;
}

/* Repeats the orders that nobody has answered. */
static void lead_order_again(mlfab__lead *lead) {
  lead->again_ns = 0;
  for (uint32_t s = 1; s < lead->servers; s++)
    if (mlfab__lead_wants(lead, s)) lead_order(lead, s);
}

MLFAB__INTERNAL void mlfab__lead_tick(mlfab__lead *lead, uint64_t now_ns) {
  char text[96];
  uint32_t s = 0;
  if (now_ns < mlfab__lead_deadline(lead)) return;
  if (now_ns < lead->deadline_ns) {
    lead_order_again(lead);
    return;
  }
  if (lead->phase == MLFAB__LEAD_AWAITS)
    while (s < lead->servers && lead->answered[s]) s++;
  snprintf(text, sizeof text, "server %u has not %s in time", s,
           lead->phase == MLFAB__LEAD_AWAITS   ? "written its shard"
           : lead->phase == MLFAB__LEAD_CLEARS ? "removed the files of failed checkpoints"
                                               : "listed the directory");
  lead_fail(lead, MLFAB_ERR_TIMEOUT, (int32_t)s, text);
}
