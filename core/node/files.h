/* files.h - operations on files, which a role asks for and the driver carries out. */
#ifndef MLFAB__FILES_H
#define MLFAB__FILES_H

#include "node.h"

/* A role's stream of file operations. */
typedef struct mlfab__filer {
  mlfab_node *node;
  struct mlfab__filer *next;
  void *self;
  /* The operation has ended; `file` holds the bytes read, and is valid during the call. It may ask for the next. */
  void (*done)(void *self, const mlfab_io_event *event);
  mlfab_file_op op; /* its pointers belong to the role, which leaves them alone until `done` */
  uint64_t asked;   /* operations so far */
  int busy;
} mlfab__filer;

/* Begins a stream in the memory of a role; a node has at most MLFAB__FILERS. Returns `filer`. */
MLFAB__INTERNAL mlfab__filer *mlfab__files_open(mlfab__filer *filer, mlfab_node *node, void *self,
                                                void (*done)(void *self,
                                                             const mlfab_io_event *event));
/* Yields filer->op as an action if none is under way. */
MLFAB__INTERNAL void mlfab__files_ask(mlfab__filer *filer);

#endif
