/* windows.h - records which updates were decided, and how: each update is decided at most once.
 *
 * A worker's window is part of the model's state: it is kept beside the weights, and moved, replicated and
 * checkpointed with them. A server decides a worker's updates in the order of their sequence numbers. So `top` tells
 * which updates are decided. Bitmaps of the last 256 tell which of these were applied, and which dropped. A worker has
 * fewer than 256 in flight. */
#ifndef MLFAB__WINDOWS_H
#define MLFAB__WINDOWS_H

#include "../base/env.h"

enum { MLFAB__WINDOW = 256 }; /* updates recorded; at least as many as can be in flight */

typedef struct mlfab__window {
  uint64_t top;        /* every update up to this number is decided */
  uint64_t applied[4]; /* bit i: update top - i was applied */
  uint64_t dropped[4]; /* bit i: update top - i was dropped */
  uint64_t taken;      /* number of updates applied, in all */
  uint32_t incarnation;
} mlfab__window;

typedef struct mlfab__windows {
  mlfab__window *windows; /* one a worker */
  uint32_t workers;
} mlfab__windows;

enum mlfab__decision {
  MLFAB__UNDECIDED = 0,
  MLFAB__APPLIED = 1,
  MLFAB__NOT_APPLIED = 2, /* not applied for another reason, or older than the window */
  MLFAB__DROPPED = 3
};

MLFAB__INTERNAL int mlfab__windows_init(mlfab__env *env, mlfab__windows *windows, uint32_t workers);
MLFAB__INTERNAL void mlfab__windows_free(mlfab__env *env, mlfab__windows *windows);
/* Registers a worker's incarnation: a newer incarnation begins with an empty window. Errors: FENCED if it is older. */
MLFAB__INTERNAL int mlfab__windows_admit(mlfab__windows *windows, uint32_t worker,
                                         uint32_t incarnation);
/* Returns the decision on updates seq .. seq + members - 1, which were sent as one. */
MLFAB__INTERNAL enum mlfab__decision mlfab__windows_ask(const mlfab__window *window, uint64_t seq,
                                                        uint32_t members);
/* Records the decision, and all skipped updates before them as not applied. seq > top. code: 0 (applied),
 * or the reason. */
MLFAB__INTERNAL void mlfab__windows_decide(mlfab__window *window, uint64_t seq, uint32_t members,
                                           int code);

#endif
