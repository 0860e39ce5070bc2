/* files.h - operations on files, which a role asks for and the driver carries out. */
#ifndef MLFAB__FILES_H
#define MLFAB__FILES_H

#include "node.h"

/* Begins a stream in the memory of a role. At most MLFAB__FILERS of a node. Returns `filer`. */
MLFAB__INTERNAL mlfab__filer *mlfab__files_open(mlfab__filer *filer, mlfab_node *node, void *self,
                                                void (*done)(void *self,
                                                             const mlfab_io_event *event));
/* Yields filer->op as an action, unless one is under way. */
MLFAB__INTERNAL void mlfab__files_ask(mlfab__filer *filer);

#endif
