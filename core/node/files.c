/* files.c - a node: operations on files. See files.h.
 *
 * The node does no I/O: a role asks for an operation, the node yields it as an action, and the driver reports its end
 * as an event. A token is the operation's number in its stream times MLFAB__FILERS, plus the stream's number. So a late
 * or repeated report matches no operation. */
#include "files.h"

static uint64_t files_token(const mlfab__filer *filer) {
  return filer->asked * MLFAB__FILERS + filer->op.stream;
}

/* The stream that a token names, or NULL. */
static mlfab__filer *files_named(const mlfab_node *node, uint64_t token) {
  mlfab__filer *filer = node->filers;
  while (filer && filer->op.stream != token % MLFAB__FILERS) filer = filer->next;
  return filer;
}

static const mlfab_file_op *files_op(mlfab_node *node, uint64_t token) {
  return &files_named(node, token)->op;
}

static void files_event(mlfab_node *node, const mlfab_io_event *event) {
  mlfab__filer *filer = files_named(node, event->token);
  if (!filer || !filer->busy || event->token != files_token(filer)) return;
  filer->busy = 0;
  filer->done(filer->self, event);
}

static void files_refused(mlfab_node *node, uint64_t token, int status) {
  const mlfab_io_event event = {.kind = MLFAB_IO_FILE,
                                .token = token,
                                .code = status,
                                .text = status == MLFAB_ERR_UNSUPPORTED
                                            ? "the program that drives this node has no files"
                                            : mlfab_error_text(status)};
  files_event(node, &event);
}

MLFAB__INTERNAL mlfab__filer *mlfab__files_open(mlfab__filer *filer, mlfab_node *node, void *self,
                                                void (*done)(void *self,
                                                             const mlfab_io_event *event)) {
  static const mlfab__files_table table = {files_op, files_event, files_refused};
  uint32_t stream = node->filers ? node->filers->op.stream + 1 : 0;
  assert(stream < MLFAB__FILERS);
  *filer = (mlfab__filer){.node = node, .next = node->filers, .self = self, .done = done};
  filer->op.stream = stream;
  node->filers = filer;
  node->files = &table;
  return filer;
}

MLFAB__INTERNAL void mlfab__files_ask(mlfab__filer *filer) {
  if (filer->busy) return;
  filer->busy = 1;
  filer->asked++;
  mlfab__node_act(filer->node, MLFAB_ACTION_FILE, 0, files_token(filer));
}
