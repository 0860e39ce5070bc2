/* request.c - the table of requests. See request.h. */
#include "request.h"

#include <stdio.h>

MLFAB__INTERNAL mlfab__request *mlfab__request_next(mlfab__requests *table, uint32_t from) {
  for (uint64_t left = from < MLFAB__REQUESTS ? table->used >> from : 0; left != 0;
       left >>= 1, from++) {
    if (left & 1) return &table->entries[from];
  }
  return NULL;
}

MLFAB__INTERNAL mlfab__request *mlfab__request_open(mlfab__requests *table, int kind, uint32_t slot,
                                                    uint64_t now_ns, uint64_t timeout_ns) {
  if (table->open == MLFAB__REQUESTS) return NULL;
  uint64_t place = 0;
  while ((table->used >> place) & 1) place++;
  mlfab__request *request = &table->entries[place];
  memset(request, 0, sizeof *request);
  table->used |= (uint64_t)1 << place;
  table->open++;
  request->id = (++table->count * MLFAB__REQUESTS) + place;
  request->kind = (uint8_t)kind;
  request->slot = slot;
  request->started_ns = now_ns;
  request->deadline_ns = timeout_ns ? mlfab__add_sat(now_ns, timeout_ns) : MLFAB__NEVER;
  request->result.rank = MLFAB_NO_RANK;
  /* What is done does not push it back: a scan that finds nothing due corrects it. */
  if (table->open == 1) table->earliest = MLFAB__NEVER;
  table->earliest = mlfab__min(table->earliest, request->deadline_ns);
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
  table->used &= ~((uint64_t)1 << (request - table->entries));
  table->open--;
}

MLFAB__INTERNAL void mlfab__request_schedule(mlfab__requests *table) {
  table->earliest = MLFAB__NEVER;
  for (mlfab__request *r = mlfab__request_next(table, 0); r;
       r = mlfab__request_next(table, (uint32_t)(r - table->entries) + 1)) {
    if (!r->done) table->earliest = mlfab__min(table->earliest, r->deadline_ns);
  }
}
