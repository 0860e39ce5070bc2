/* mlfab_http.h - one HTTP request with limits. Internal: mlfab_curl.c and mlfab_store.c use it. Only mlfab_http.c makes
 * handles of libcurl.
 *
 * A session (mlfab__http) is used by one thread at a time, and keeps its connections open between requests. A request
 * runs to its end in the thread that calls mlfab__http_run.
 *
 *    (open) --> IDLE --run--> RUNS --answer, limit, deadline or stop--> IDLE --close--> gone
 *                 ^------------------------------------------------------|
 *
 * Invariants
 *  (1) Only http and https, also in redirects, and never from https to http. The only files that it reads are ca_file
 *      and the certificates of the TLS library.
 *  (2) Everything is bounded: the whole time, a time without a byte, the answer's head (64 KiB), its body, redirects.
 *      Bodies are never decompressed.
 *  (3) The user's `write` gets bytes of a successful answer only, each byte once, in order, with its place in the
 *      resource. It never gets the body of a redirect or of an error.
 *  (4) A 200 or 206 whose body ends before its announced length is an error.
 *  (5) An error names the method, the URL without user, password and query, the status, and the awaited data.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_HTTP_H
#define MLFAB_HTTP_H

#include "mlfab.h"

typedef struct mlfab__http mlfab__http;

enum mlfab__http_flags {
  MLFAB__HTTP_DIRECT = 1, /* ignores http_proxy and the like */
  /* Uses a new connection: on a kept one, libcurl silently repeats the request if the server closes it without an
   * answer. */
  MLFAB__HTTP_FRESH = 2
};

enum { MLFAB__HTTP_KEPT = 8192, MLFAB__HTTP_HEADERS = 32 };

typedef struct mlfab__http_request {
  const char *method; /* "GET", "HEAD", "PUT", "POST", "DELETE", "MOVE", ...; NULL: "GET" */
  const char *
      url; /* http://... or https://..., sent as it is (".." is kept); user:password@ gives basic authentication */
  const char *awaited; /* for errors: "the metrics of this host" */
  /* "Name: value" each, at most MLFAB__HTTP_HEADERS; "Name:" removes a header that libcurl adds. They go to redirects,
   * too: give no secret together with `redirects`. */
  const char *const *headers;
  uint32_t nheaders;
  uint32_t flags;     /* MLFAB__HTTP_* */
  uint32_t redirects; /* limit of followed redirects; 0: none. Not with a body */
  uint32_t reserved;
  /* Status codes that mean success besides 2xx, ended by 0; NULL: none. Their bodies are kept, not written. */
  const uint16_t *accepted;
  /* The body to send: body_bytes from memory, or from `read`. `read` writes at most `room` bytes of the body from
   * `offset` on and returns their number (0 before the end is an error), or MLFAB_ERR_*, which ends the request with
   * that code. PUT and POST send a body, even an empty one; other methods do if body_bytes is not 0. It may be read
   * again from an earlier offset (a kept connection was closed). */
  const void *body;
  uint64_t body_bytes;
  int64_t (*read)(void *user, void *data, size_t room, uint64_t offset);
  /* Takes bytes of the answer's body from `offset` of the resource on; returns 0, or MLFAB_ERR_*, which ends the request
   * with that code. NULL: the body is kept in the answer, up to MLFAB__HTTP_KEPT - 1 bytes. */
  int (*write)(void *user, const void *data, size_t bytes, uint64_t offset);
  /* Called now and then, and at the end, with the bytes sent and received of the bodies, and the length of the answer's
   * body, 0 if it is unknown. Non-zero ends the request (CANCELLED). NULL: not called. */
  int (*progress)(void *user, uint64_t sent, uint64_t received, uint64_t length);
  void *user;
  /* The part of the resource to get: range_bytes from range_first on; range_bytes 0: to the end; both 0: all. A server
   * that ignores it answers 200, and `write` begins at offset 0. */
  uint64_t range_first, range_bytes;
  const char *if_range; /* an ETag: the part only of this version, else all; NULL: none */
  uint64_t body_most;   /* limit of the answer, bytes; 0: 1 MiB. One byte more is LIMIT */
  uint64_t timeout_ns;  /* for the whole request; 0: 30 s */
  uint64_t stall_ns;    /* without a byte in either direction, in whole seconds; 0: 10 s */
  const char *ca_file;  /* trusted PEM certificates; NULL: those of the system */
} mlfab__http_request;

typedef struct mlfab__http_answer {
  int32_t status; /* status of the last answer; 0: there was none */
  uint32_t
      retryable; /* after an error: 1 if the same request may succeed later (no connection, time, 408, 429, 5xx) */
  uint64_t received;  /* bytes of the body */
  uint64_t first;     /* offset of the first byte in the resource */
  uint64_t total;     /* length of the whole resource; UINT64_MAX: unknown */
  char etag[128];     /* with its quotes, "" if there is none or it is longer */
  char date[64];      /* the server's Date */
  char location[512]; /* target of a redirect that was not followed */
  uint64_t retry_after_s;
  /* Body if there is no `write`, or after an error: zero-terminated, cut after MLFAB__HTTP_KEPT - 1 bytes. */
  size_t kept;
  char body[MLFAB__HTTP_KEPT];
} mlfab__http_answer;

/* A session. Errors: MEMORY, UNSUPPORTED (this libcurl has no HTTP). */
int mlfab__http_open(mlfab__http **http_p);
/* NULL does nothing. */
void mlfab__http_close(mlfab__http *http);

/* Runs a request to its end. Fills answer_p even if it fails; error_p may be NULL. Errors: ARGUMENT (the URL or a
 * member), ADDRESS (the host does not resolve), IO (connection or TLS failed, the answer broke off), REFUSED (no status
 * of success; a forbidden redirect), TIMEOUT, LIMIT (the answer is larger), CANCELLED (stop, or `progress`), MEMORY,
 * codes of `read` and `write`. */
int mlfab__http_run(mlfab__http *http, const mlfab__http_request *request,
                    mlfab__http_answer *answer_p, mlfab_error *error_p);

/* From any thread: ends the running request and every later one at once with CANCELLED. */
void mlfab__http_stop(mlfab__http *http);

/* The URL without user, password, query and fragment, for people; control characters become '?'. */
void mlfab__http_name(const char *url, char *text, size_t room);

/* strncasecmp and strerror in the C locale, whatever the locale of the process. The text of the second is valid until
 * this thread's next call. */
int mlfab__http_compare(const char *a, const char *b, size_t most);
const char *mlfab__http_reason(int number);

/* Fills an error, and returns its code. */
int mlfab__http_fail(mlfab_error *error_p, int code, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

#endif /* MLFAB_HTTP_H */
