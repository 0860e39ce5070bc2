/* windows.h - which updates were decided, and how: at most once, whatever is repeated. Layer 3.
 *
 * The window of a worker is part of the model's state: it is kept beside the weights, and moves,
 * is replicated and is checkpointed with them. A server decides a worker's updates in the order of
 * their sequence numbers, so one number (`top`) tells what is decided, and bitmaps of the last 256
 * tell which of them were applied, and which were dropped; a worker has fewer than that in flight. */
#ifndef MLFAB__WINDOWS_H
#define MLFAB__WINDOWS_H

#include "../base/env.h"

enum { MLFAB__WINDOW = 256 }; /* updates remembered; at least all that can be in flight */

typedef struct mlfab__window {
  uint64_t top;        /* every update up to here is decided */
  uint64_t applied[4]; /* bit i: update top - i was applied */
  uint64_t dropped[4]; /* bit i: update top - i was dropped: not applied, with that reason */
  uint32_t incarnation;
} mlfab__window;

typedef struct mlfab__windows {
  mlfab__window *windows; /* one a worker */
  uint32_t workers;
} mlfab__windows;

enum mlfab__decision {
  MLFAB__UNDECIDED = 0,
  MLFAB__APPLIED = 1,
  MLFAB__NOT_APPLIED = 2, /* for another reason than the next, or forgotten */
  MLFAB__DROPPED = 3
};

MLFAB__INTERNAL int mlfab__windows_init(mlfab__env *env, mlfab__windows *windows, uint32_t workers);
MLFAB__INTERNAL void mlfab__windows_free(mlfab__env *env, mlfab__windows *windows);
/* A worker of this incarnation is here: a newer one begins with an empty window.
 * Errors: FENCED for an older one. */
MLFAB__INTERNAL int mlfab__windows_admit(mlfab__windows *windows, uint32_t worker,
                                         uint32_t incarnation);
/* What is known of updates seq .. seq + members - 1, which were sent as one. */
MLFAB__INTERNAL enum mlfab__decision mlfab__windows_ask(const mlfab__window *window, uint64_t seq,
                                                        uint32_t members);
/* Decides them, and with them as not applied whatever was skipped before them. seq > top. code: 0
 * (applied), or why not. */
MLFAB__INTERNAL void mlfab__windows_decide(mlfab__window *window, uint64_t seq, uint32_t members,
                                           int code);

#endif
