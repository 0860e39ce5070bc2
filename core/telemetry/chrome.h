/* chrome.h - records of trace.h as Chrome trace events, in JSON.
 *
 * The text is an array with one event a line:
 *
 *    [                       begin: names the process
 *    {...},                  an event each; a file that ends here is taken by Perfetto, too
 *    {...}
 *    ]                       end
 *
 * A node is a process (pid: the node id, so that the files of a fabric can be joined). A lane is a thread, a run is a
 * slice ("X"), an arrow is a flow ("s", "f", with the transfer's key as id). A plan is a slice on a lane of its own
 * beside the lane of its worker. Times are microseconds of the wall clock modulo 2^51 ns (26 days): nodes of one host
 * have one clock; between hosts the times are as good as the hosts' clocks.
 *
 * Source: Trace Event Format (Google), JSON Array Format. */
#ifndef MLFAB__CHROME_H
#define MLFAB__CHROME_H

#include "trace.h"

enum { MLFAB__CHROME_MAX = 1024 }; /* bytes of an event's lines */

typedef struct mlfab__chrome {
  uint32_t pid;
  uint64_t unix_ns, clock_ns; /* the same moment on the wall clock and on the node's clock */
  uint64_t last_ns;           /* the largest time so far, of the node's clock */
} mlfab__chrome;

/* Each writes at most MLFAB__CHROME_MAX bytes, and returns their number. */
MLFAB__INTERNAL size_t mlfab__chrome_begin(const mlfab__chrome *chrome, const char *name,
                                           const char *host, long pid,
                                           char text[MLFAB__CHROME_MAX]);
MLFAB__INTERNAL size_t mlfab__chrome_event(mlfab__chrome *chrome, const mlfab__trace_record *record,
                                           char text[MLFAB__CHROME_MAX]);
/* why: the text at the end of the trace; it has no quotes. */
MLFAB__INTERNAL size_t mlfab__chrome_end(const mlfab__chrome *chrome, const char *why,
                                         char text[MLFAB__CHROME_MAX]);

#endif
