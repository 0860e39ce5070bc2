/* files.c - a node: operations on files. See node.h.
 *
 * The node does no I/O: a role asks for an operation, the node yields it as an action, and the driver reports its end
 * as an event. A token is the operation's number in its stream times MLFAB__FILERS, plus the stream's. So a late or
 * repeated report matches nothing. */
#include "node.h"

MLFAB__INTERNAL mlfab__filer *mlfab__files_open(mlfab_node *node, void *self,
                                                void (*done)(void *self,
                                                             const mlfab_io_event *event)) {
  assert(node->nfilers < MLFAB__FILERS);
  mlfab__filer *filer = &node->filers[node->nfilers];
  *filer = (mlfab__filer){.node = node, .self = self, .done = done};
  filer->op.stream = node->nfilers++;
  return filer;
}

static uint64_t files_token(const mlfab__filer *filer) {
  return filer->asked * MLFAB__FILERS + filer->op.stream;
}

MLFAB__INTERNAL void mlfab__files_ask(mlfab__filer *filer) {
  if (filer->busy) return;
  filer->busy = 1;
  filer->asked++;
  mlfab__node_act(filer->node, MLFAB_ACTION_FILE, 0, files_token(filer));
}

MLFAB__INTERNAL const mlfab_file_op *mlfab__files_op(mlfab_node *node, uint64_t token) {
  return &node->filers[token % MLFAB__FILERS].op;
}

MLFAB__INTERNAL void mlfab__files_event(mlfab_node *node, const mlfab_io_event *event) {
  mlfab__filer *filer = &node->filers[event->token % MLFAB__FILERS];
  if (!filer->busy || event->token != files_token(filer)) return;
  filer->busy = 0;
  filer->done(filer->self, event);
}

MLFAB__INTERNAL void mlfab__files_refused(mlfab_node *node, uint64_t token, int status) {
  const mlfab_io_event event = {.kind = MLFAB_IO_FILE,
                                .token = token,
                                .code = status,
                                .text = status == MLFAB_ERR_UNSUPPORTED
                                            ? "the program that drives this node has no files"
                                            : mlfab_error_text(status)};
  mlfab__files_event(node, &event);
}
