/* checkpoint.c - checkpoints as a role of every server's node. See checkpoint.h. */
#include "checkpoint.h"

#include "../server/server.h"
#include "lead.h"
#include "restore.h"
#include "writer.h"

typedef struct mlfab__checkpoint {
  mlfab__server *server;
  mlfab_node *node;
  mlfab__port across; /* port to the other servers */
  mlfab__writer writer;
  mlfab__restore restore;
  mlfab__lead *lead;     /* at server 0 */
  mlfab__filer files[3]; /* files of lead, writer and restore */
} mlfab__checkpoint;

/* Sets when the server has to call `due` next. */
static void checkpoint_arm(mlfab__checkpoint *c) {
  int pins = c->writer.phase == MLFAB__WRITER_PINS;
  c->server->save.at = pins ? 0 : c->lead ? c->lead->next_at : MLFAB__NEVER;
}

/* Called when this server's shard is durable, or has failed. */
static void checkpoint_written(void *self, const mlfab__checkpoint_shard *answer) {
  mlfab__checkpoint *c = self;
  if (c->lead) {
    mlfab__lead_answered(c->lead, answer);
    return;
  }
  c->across.ready(c->across.self, 0);
  MLFAB__POST(&c->across, 0, MLFAB__CHECKPOINT_SHARD, checkpoint_shard, answer);
}

static void checkpoint_own(void *self, const mlfab__checkpoint_order *order) {
  mlfab__checkpoint *c = self;
  mlfab__writer_order(&c->writer, order);
  checkpoint_arm(c);
}

/* --- calls of the server --- */

static void checkpoint_due(mlfab__server *server) {
  mlfab__checkpoint *c = server->save.checkpoint;
  mlfab__writer_due(&c->writer);
  if (c->lead) mlfab__lead_by_itself(c->lead, server->now_ns);
  checkpoint_arm(c);
}

static void checkpoint_stop(mlfab__server *server) {
  mlfab__checkpoint *c = server->save.checkpoint;
  int moves = server->move.held;
  mlfab__writer_stop(&c->writer, moves ? MLFAB_ERR_AGAIN : MLFAB_ERR_STATE,
                     moves ? "moves slices" : "has dropped its model");
  if (!moves) mlfab__restore_stop(&c->restore);
  checkpoint_arm(c);
}

static int checkpoint_restores(mlfab__server *server) {
  return mlfab__restore_begin(&server->save.checkpoint->restore);
}

/* --- files --- */

static void checkpoint_writer_event(void *self, const mlfab_io_event *event) {
  mlfab__checkpoint *c = self;
  mlfab__writer_event(&c->writer, event);
}

static void checkpoint_lead_event(void *self, const mlfab_io_event *event) {
  mlfab__checkpoint *c = self;
  mlfab__lead_event(c->lead, event);
}

static void checkpoint_restore_event(void *self, const mlfab_io_event *event) {
  mlfab__checkpoint *c = self;
  c->server->now_ns = c->node->now_ns;
  mlfab__restore_event(&c->restore, event);
}

/* --- the role --- */

static int checkpoint_resume(mlfab__checkpoint *c, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__checkpoint_resume resume;
  if (at.peer != 0 || mlfab__decode_checkpoint_resume(frame->meta, frame->meta_bytes, &resume))
    return MLFAB_ERR_FRAME;
  if (c->restore.phase == MLFAB__RESTORE_IDLE)
    memcpy(c->restore.dir, resume.dir, sizeof c->restore.dir);
  return 1;
}

static int checkpoint_order(mlfab__checkpoint *c, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__checkpoint_order order;
  if (at.peer != 0 || mlfab__decode_checkpoint_order(frame->meta, frame->meta_bytes, &order) ||
      order.number == 0)
    return MLFAB_ERR_FRAME;
  checkpoint_own(c, &order);
  return 1;
}

static int checkpoint_shard(mlfab__checkpoint *c, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__checkpoint_shard shard;
  if (!c->lead || mlfab__decode_checkpoint_shard(frame->meta, frame->meta_bytes, &shard) ||
      shard.server != at.peer || shard.code > 0)
    return MLFAB_ERR_FRAME;
  mlfab__lead_answered(c->lead, &shard);
  return 1;
}

static int checkpoint_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__checkpoint *c = self;
  int worker = at.kind == MLFAB__LINK_WORKER;
  c->server->now_ns = at.now_ns;
  if (worker && frame->type == MLFAB__CHECKPOINT_RESUME) return checkpoint_resume(c, at, frame);
  if (worker && frame->type == MLFAB__CHECKPOINT_ASK && c->lead) {
    mlfab__lead_asked(c->lead, at.peer, frame, at.now_ns);
    return 1;
  }
  if (at.kind != MLFAB__LINK_RESHARD_IN) return 0;
  if (frame->type == MLFAB__CHECKPOINT_ORDER) return checkpoint_order(c, at, frame);
  return frame->type == MLFAB__CHECKPOINT_SHARD ? checkpoint_shard(c, at, frame) : 0;
}

static void checkpoint_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__checkpoint *c = self;
  int fresh = at.kind == MLFAB__LINK_WORKER && greeting->fresh;
  if (fresh && c->lead) mlfab__lead_fresh(c->lead, at.peer);
  /* The former process of worker 0 asked for a checkpoint; the new one asks again if it wants one. */
  if (fresh && at.peer == 0 && c->restore.phase == MLFAB__RESTORE_IDLE) c->restore.dir[0] = 0;
  if (at.kind != MLFAB__LINK_RESHARD) return;
  if (c->lead) mlfab__lead_up(c->lead, at.peer);
  /* The last answer may have been lost. */
  int answered = c->writer.phase == MLFAB__WRITER_IDLE && c->writer.answer.number != 0;
  if (!c->lead && at.peer == 0 && answered)
    MLFAB__POST(&c->across, 0, MLFAB__CHECKPOINT_SHARD, checkpoint_shard, &c->writer.answer);
}

static void checkpoint_gone(void *self, mlfab__at at, int left) {
  mlfab__checkpoint *c = self;
  if (at.kind == MLFAB__LINK_RESHARD && c->lead) mlfab__lead_gone(c->lead, at.peer, left);
}

static int checkpoint_wants(void *self, mlfab__at at, const char *why) {
  (void)why;
  const mlfab__checkpoint *c = self;
  if (at.kind != MLFAB__LINK_RESHARD) return 0;
  if (c->lead) return mlfab__lead_wants(c->lead, at.peer);
  return at.peer == 0 && c->writer.answer.number != 0;
}

static void checkpoint_tick(void *self, uint64_t now_ns) {
  mlfab__checkpoint *c = self;
  if (c->lead) mlfab__lead_tick(c->lead, now_ns);
}

static uint64_t checkpoint_deadline(const void *self) {
  const mlfab__checkpoint *c = self;
  return c->lead ? mlfab__lead_deadline(c->lead) : MLFAB__NEVER;
}

static void checkpoint_free(void *self) {
  mlfab__checkpoint *c = self;
  if (!c->node) return;
  mlfab__restore_stop(&c->restore);
  mlfab__writer_free(&c->writer);
  if (c->lead) mlfab__lead_free(c->lead);
  mlfab__free(&c->node->env, c->lead, sizeof *c->lead);
}

static const mlfab__role checkpoint_row = {
    .from = MLFAB__CHECKPOINT_ASK,
    .to = MLFAB__CHECKPOINT_RESUME,
    .name = "checkpoint",
    .links = MLFAB__ON(WORKER) | MLFAB__ON(RESHARD) | MLFAB__ON(RESHARD_IN),
    .frame = checkpoint_frame,
    .up = checkpoint_up,
    .gone = checkpoint_gone,
    .wants = checkpoint_wants,
    .tick = checkpoint_tick,
    .deadline = checkpoint_deadline,
    .free = checkpoint_free,
};

static int checkpoint_asks(void *self, uint32_t server) {
  const mlfab__checkpoint *c = self;
  return !c->node->growth || c->node->growth->holds(c->node, server);
}

static int checkpoint_lead(mlfab__checkpoint *c, const mlfab__role *role) {
  mlfab_node *node = c->node;
  c->lead = mlfab__alloc(&node->env, sizeof *c->lead);
  if (!c->lead) return MLFAB_ERR_MEMORY;
  *c->lead = (mlfab__lead){.env = &node->env,
                           .config = &node->config,
                           .server = c->server,
                           .filer = mlfab__files_open(&c->files[0], node, c, checkpoint_lead_event),
                           .down = mlfab__roles_port(node, role, MLFAB__LINK_WORKER),
                           .across = c->across,
                           .self = c,
                           .own = checkpoint_own,
                           .asks = checkpoint_asks,
                           .workers = node->config.workers,
                           .servers = node->config.servers,
                           .asker = MLFAB__NO_NODE,
                           .leader = (uint32_t)node->nonce};
  return mlfab__lead_init(c->lead);
}

MLFAB__INTERNAL int mlfab__checkpoint_attach(mlfab_node *node, mlfab__server *server) {
  static const mlfab__server_saver saver = {checkpoint_due, checkpoint_stop, checkpoint_restores};
  mlfab__role *role = mlfab__roles_add(node, &checkpoint_row, sizeof(mlfab__checkpoint));
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__checkpoint *c = role->self;
  c->server = server;
  c->node = node;
  c->across = mlfab__roles_port(node, role, MLFAB__LINK_RESHARD);
  mlfab__writer_init(&c->writer, &node->env, server,
                     mlfab__files_open(&c->files[1], node, c, checkpoint_writer_event), c,
                     checkpoint_written);
  mlfab__restore_init(&c->restore, &node->env, server,
                      mlfab__files_open(&c->files[2], node, c, checkpoint_restore_event));
  int code = node->is_coordinator ? checkpoint_lead(c, role) : 0;
  if (code) return code;
  server->save.hooks = &saver;
  server->save.checkpoint = c;
  server->save.history = (uint32_t)mlfab__max(mlfab__hash(node->nonce, "history", 7) >> 32, 1);
  checkpoint_arm(c);
  return 0;
}
