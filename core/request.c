/* request.c - the table of requests. See request.h. */
#include "request.h"

#include <stdio.h>

MLFAB__INTERNAL mlfab__request *mlfab__request_open(mlfab__requests *table, int kind, uint32_t slot,
                                                    uint64_t now_ns, uint64_t timeout_ns) {
  if (table->open == MLFAB__REQUESTS) return NULL;
  /* The handle's low part is its place; places are tried from the last one on. */
  uint64_t place = table->count % MLFAB__REQUESTS;
  while (table->entries[place].kind != MLFAB__REQUEST_FREE) place = (place + 1) % MLFAB__REQUESTS;
  mlfab__request *request = &table->entries[place];
  memset(request, 0, sizeof *request);
  table->open++;
  request->id = (++table->count * MLFAB__REQUESTS) + place;
  request->kind = (uint8_t)kind;
  request->slot = slot;
  request->started_ns = now_ns;
  request->deadline_ns = timeout_ns ? mlfab__add_sat(now_ns, timeout_ns) : MLFAB__NEVER;
  request->result.rank = MLFAB_NO_RANK;
  return request;
}

MLFAB__INTERNAL mlfab__request *mlfab__request_find(mlfab__requests *table, mlfab_request id) {
  mlfab__request *request = &table->entries[id % MLFAB__REQUESTS];
  return id != 0 && request->kind != MLFAB__REQUEST_FREE && request->id == id ? request : NULL;
}

MLFAB__INTERNAL void mlfab__request_finish(mlfab__requests *table, mlfab__request *request,
                                           int status, int32_t rank, int is_server, uint64_t now_ns,
                                           const char *format, ...) {
  request->done = 1;
  request->result.status = status;
  request->result.rank = rank;
  request->result.waited_ns = now_ns - request->started_ns;
  if (status == 0) return;
  mlfab_error *last = &table->last;
  last->code = status;
  last->rank = rank;
  last->is_server = is_server;
  last->reserved = 0;
  last->waited_ns = request->result.waited_ns;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last->text, sizeof last->text, format, arguments);
  va_end(arguments);
}

MLFAB__INTERNAL void mlfab__request_end(mlfab__requests *table, mlfab__request *request) {
  request->kind = MLFAB__REQUEST_FREE;
  table->open--;
}

MLFAB__INTERNAL uint64_t mlfab__request_deadline(const mlfab__requests *table) {
  uint64_t deadline = MLFAB__NEVER;
  if (table->open == 0) return deadline;
  for (uint32_t i = 0; i < MLFAB__REQUESTS; i++) {
    const mlfab__request *request = &table->entries[i];
    if (request->kind == MLFAB__REQUEST_FREE || request->done) continue;
    deadline = mlfab__min(deadline, request->deadline_ns);
  }
  return deadline;
}
