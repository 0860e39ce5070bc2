/* telemetry.h - a context writes its log, metrics and trace: a thread, and the names of its files.
 *
 *    (open: paths, log hook) --attach: the node is observed--> (start: the thread runs)
 *         --stop: last metrics, end of the trace--> only log lines --free: the thread ends--> gone
 *
 * The log hook copies a line into a ring; the thread writes it. For metrics and trace the thread takes the context's
 * lock while it copies; it formats and writes without the lock.
 *
 * Invariants. (1) Only this thread touches the files: a slow or full disk delays no other thread. The thread blocks
 * SIGXFSZ, so this signal has no effect. (2) The thread never takes the context's lock while it holds its own: the log
 * hook takes them in the other order. (3) A reader of the metrics sees a whole file: it is written beside, then
 * renamed. (4) Everything is bounded: lines and records that do not fit are counted, and the count is written. (5) A
 * forked child writes nothing. */
#ifndef MLFAB__TELEMETRY_H
#define MLFAB__TELEMETRY_H

#include "context.h"

enum { MLFAB__TELEMETRY_PATH = 512 };

/* The table for mlfab__context_open. */
MLFAB__INTERNAL const mlfab__context_observer *mlfab__telemetry_observer(void);
/* The file of this node: "{node}" is replaced by its name, or the name goes before the last dot of the file's name. */
MLFAB__INTERNAL void mlfab__telemetry_path(const char *given, const char *node,
                                           char path[MLFAB__TELEMETRY_PATH]);
/* Reads "LEVEL" or "LEVEL:FILE". Returns the level, or 0: it is neither. *file_p: the file's name, or NULL. */
MLFAB__INTERNAL int mlfab__telemetry_log(const char *text, const char **file_p);

#endif
