/* checkpoint_worker.c - checkpoints as a role of a worker's node (links SERVER). See checkpoint.h. */
#include "../node/node.h"
#include "../worker/worker.h"
#include "checkpoint.h"

#include <stdio.h>

static void checkpoint_worker_ask(const mlfab__checkpoint_role *role) {
  MLFAB__POST(&role->port, 0, MLFAB__CHECKPOINT_ASK, checkpoint_ask, &role->ask);
}

static void checkpoint_worker_say(const mlfab__checkpoint_role *role, uint32_t server) {
  mlfab__checkpoint_resume resume;
  memcpy(resume.dir, role->resume, sizeof resume.dir);
  MLFAB__POST(&role->port, server, MLFAB__CHECKPOINT_RESUME, checkpoint_resume, &resume);
}

/* --- calls --- */

static int checkpoint_worker_refuse(const mlfab__checkpoint_role *role,
                                    const mlfab_checkpoint_options *options,
                                    const mlfab_checkpoint_info *info, mlfab_error *error) {
  if (options && !MLFAB__HAS(options, mlfab_checkpoint_options, keep))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "checkpoint: options.size is not set");
  if (info && !MLFAB__HAS(info, mlfab_checkpoint_info, bytes))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "checkpoint: info_p->size is not set");
  if (!role->worker->stands)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       "checkpoint: there is no model yet: call mlfab_model_start first");
  if (role->request)
    return MLFAB__FAIL(error, MLFAB_ERR_AGAIN,
                       "checkpoint: another call of this worker is under way");
  return mlfab__worker_reaches(role->worker, 0, "checkpoint", error);
}

MLFAB__INTERNAL int mlfab__checkpoint_start(mlfab__checkpoint_role *role,
                                            const mlfab_checkpoint_options *options,
                                            mlfab_checkpoint_info *info, uint64_t now_ns,
                                            mlfab_request *request_p, mlfab_error *error) {
  mlfab_checkpoint_options o = {.size = sizeof o};
  int code = checkpoint_worker_refuse(role, options, info, error);
  if (code) return code;
  if (options) memcpy(&o, options, mlfab__min(options->size, sizeof o));
  if (o.dir && (strlen(o.dir) >= sizeof role->ask.dir || mlfab__url_tells(o.dir)))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "checkpoint: dir has more than %u bytes, or a user or a password",
                       (unsigned)sizeof role->ask.dir - 1);
  code = mlfab__request_room(role->requests, MLFAB__REQUEST_CHECKPOINT, error);
  if (code) return code;
  if (o.timeout_ns == 0) o.timeout_ns = role->config->timeout_ns;
  mlfab__request *request =
      mlfab__request_open(role->requests, MLFAB__REQUEST_CHECKPOINT, 0, now_ns, o.timeout_ns);
  role->request = *request_p = request->id;
  role->info = info;
  role->ask.ask++;
  role->ask.keep = o.keep;
  /* Server 0 gives up a little earlier, so that it can name the process that it waited for. */
  role->ask.timeout_ns = o.timeout_ns - o.timeout_ns / 8;
  snprintf(role->ask.dir, sizeof role->ask.dir, "%s", o.dir ? o.dir : "");
  checkpoint_worker_ask(role);
  return 0;
}

MLFAB__INTERNAL int mlfab__checkpoint_from(mlfab__checkpoint_role *role, const char *dir,
                                           mlfab_error *error) {
  mlfab__worker *worker = role->worker;
  if (!dir || strlen(dir) >= sizeof role->resume || mlfab__url_tells(dir))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "restore: dir is NULL, or has more than %u bytes, or a user or a password",
                       (unsigned)sizeof role->resume - 1);
  if (worker->rank != 0 || worker->table)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       worker->rank ? "restore: only worker 0 says how the model begins"
                                    : "restore: the model was started before");
  memset(role->resume, 0, sizeof role->resume);
  memcpy(role->resume, dir, strlen(dir));
  worker->restores = dir[0] != 0;
  for (uint32_t s = 0; s < worker->servers; s++) checkpoint_worker_say(role, s);
  return 0;
}

MLFAB__INTERNAL int mlfab__checkpoint_loaded(const mlfab__checkpoint_role *role,
                                             mlfab_checkpoint_info *info_p, mlfab_error *error) {
  const mlfab__worker *worker = role->worker;
  if (!info_p || !MLFAB__HAS(info_p, mlfab_checkpoint_info, bytes))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "restored: info_p is NULL, or its size is not set");
  if (!worker->stands)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       "restored: there is no model yet: call mlfab_model_start first");
  info_p->servers = worker->founding;
  info_p->number = worker->restored;
  info_p->version = worker->restored_version;
  info_p->bytes = 0;
  return 0;
}

/* The model began as a checkpoint, whose slices are others than this worker's options would make. Errors: MEMORY. */
static int checkpoint_worker_recut(mlfab__worker *worker, uint32_t cut) {
  mlfab__layout layout;
  mlfab__env *env = worker->env;
  int code = mlfab__layout_build(env, worker->tensors, worker->ntensors, cut, worker->servers,
                                 worker->define.options.active, worker->config->model_max_bytes,
                                 &layout, NULL);
  if (code) return code;
  uint64_t *pulled = mlfab__alloc_array(env, layout.nslices, sizeof *pulled);
  if (!pulled) {
    mlfab__layout_free(env, &layout);
    return MLFAB_ERR_MEMORY;
  }
  if (worker->mover) worker->mover->assign(worker, &layout);
  mlfab__free(env, worker->pulled, worker->layout.nslices * sizeof *worker->pulled);
  mlfab__layout_free(env, &worker->layout);
  worker->layout = layout;
  worker->pulled = pulled;
  return 0;
}

/* Takes over which checkpoint the model began as. Errors: MEMORY; CHECKPOINT with a text when the servers have loaded
 * different ones, or one has loaded none. */
MLFAB__INTERNAL int mlfab__checkpoint_began(mlfab__worker *worker, uint32_t server,
                                            const mlfab__define_ack *ack, char *text, size_t room) {
  int first = 1;
  for (uint32_t s = 0; s < worker->servers; s++) first &= !worker->streams[s].defined;
  if (!first && ack->restored != worker->restored) {
    snprintf(
        text, room,
        "model_start: server %u has loaded checkpoint %llu, another server checkpoint %llu (0: "
        "none)",
        server, (unsigned long long)ack->restored, (unsigned long long)worker->restored);
    return MLFAB_ERR_CHECKPOINT;
  }
  if (first) worker->restored_version = 0;
  worker->restored = ack->restored;
  worker->restored_version = mlfab__max(worker->restored_version, ack->restored_version);
  if (ack->cut == 0 || ack->cut == worker->layout.nslices) return 0;
  int code = checkpoint_worker_recut(worker, ack->cut);
  if (code) snprintf(text, room, "model_start: out of memory for the slices of the checkpoint");
  return code;
}

/* --- the role --- */

static void checkpoint_worker_done(mlfab__checkpoint_role *role, const mlfab__frame_in *frame,
                                   uint64_t now_ns) {
  mlfab__checkpoint_done done;
  if (MLFAB__MALFORMED(&role->port, 0, frame, checkpoint_done, &done)) return;
  mlfab__request *request = mlfab__request_find(role->requests, role->request);
  if (!role->request || done.ask != role->ask.ask) return;
  role->request = 0;
  if (request && !done.code) request->result.version = done.version;
  if (role->info && !done.code) {
    role->info->servers = done.servers;
    role->info->number = done.number;
    role->info->version = done.version;
    role->info->bytes = done.bytes;
  }
  mlfab__request_finish(role->requests, request, done.code, done.rank, (int)done.is_server, now_ns,
                        "checkpoint: %s",
                        done.text[0] || !done.code ? done.text : mlfab_error_text(done.code));
}

static int checkpoint_worker_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  if (at.peer != 0 || frame->type != MLFAB__CHECKPOINT_DONE) return 0;
  checkpoint_worker_done(self, frame, at.now_ns);
  return 1;
}

static void checkpoint_worker_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  const mlfab__checkpoint_role *role = self;
  if (greeting->ack->kind >= MLFAB__ACK_CREDIT) return;
  if (role->resume[0]) checkpoint_worker_say(role, at.peer);
  if (at.peer == 0 && role->request) checkpoint_worker_ask(role);
}

static void checkpoint_worker_gone(void *self, mlfab__at at, int left) {
  mlfab__checkpoint_role *role = self;
  (void)left;
  if (at.peer != 0 || !role->request) return;
  mlfab__request_dead(role->requests, mlfab__request_find(role->requests, role->request), 0,
                      at.now_ns);
  role->request = 0;
}

static void checkpoint_worker_withdraw(void *self, mlfab__request *request, int code,
                                       uint64_t now_ns) {
  mlfab__checkpoint_role *role = self;
  if (role->request == request->id) role->request = 0;
  mlfab__request_blame(request, 0, 1, "; the checkpoint may still become whole");
  mlfab__request_expire(role->requests, request, code, now_ns);
}

static const mlfab__role checkpoint_worker_row = {
    .from = MLFAB__CHECKPOINT_ASK,
    .to = MLFAB__CHECKPOINT_RESUME,
    .name = "checkpoint worker",
    .links = MLFAB__ON(SERVER),
    .requests = MLFAB__SERVES(CHECKPOINT),
    .frame = checkpoint_worker_frame,
    .up = checkpoint_worker_up,
    .gone = checkpoint_worker_gone,
    .withdraw = checkpoint_worker_withdraw,
};

MLFAB__INTERNAL int mlfab__checkpoint_worker_attach(mlfab_node *node,
                                                    mlfab__checkpoint_role **role_p) {
  mlfab__role *row = mlfab__roles_add(node, &checkpoint_worker_row, sizeof(mlfab__checkpoint_role));
  if (!row) return MLFAB_ERR_MEMORY;
  mlfab__checkpoint_role *role = row->self;
  role->port = mlfab__roles_port(node, row, MLFAB__LINK_SERVER);
  role->config = &node->config;
  role->requests = &node->requests;
  if (node->config.rank == 0) memcpy(role->resume, node->config.resume, sizeof role->resume);
  *role_p = role;
  return 0;
}
