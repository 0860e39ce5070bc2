/* request.c - the table of requests. See request.h. */
#include "request.h"

#include <stdio.h>

static mlfab__request *request_at(mlfab__requests *table, uint32_t place) {
  if (place < MLFAB__REQUEST_BLOCK) return &table->first[place];
  return &table->blocks[place / MLFAB__REQUEST_BLOCK][place % MLFAB__REQUEST_BLOCK];
}

static void request_free_error(mlfab__requests *table, mlfab__request *request) {
  mlfab__free(table->env, request->error, sizeof *request->error);
  request->error = NULL;
}

MLFAB__INTERNAL void mlfab__requests_free(mlfab__requests *table) {
  for (uint32_t place = 0; place < table->room; place++) {
    mlfab__request *request = request_at(table, place);
    if (request->error) request_free_error(table, request);
  }
  for (int i = 1; i < MLFAB__REQUEST_BLOCKS; i++) {
    mlfab__free(table->env, table->blocks[i], MLFAB__REQUEST_BLOCK * sizeof *table->blocks[i]);
    table->blocks[i] = NULL;
  }
}

MLFAB__INTERNAL int mlfab__request_reserve(mlfab__requests *table) {
  uint32_t block = table->room / MLFAB__REQUEST_BLOCK;
  if (table->free || block == 0) return 0;
  if (block == MLFAB__REQUEST_BLOCKS || !table->env) return MLFAB_ERR_AGAIN;
  if (!table->blocks[block])
    table->blocks[block] =
        mlfab__alloc_array(table->env, MLFAB__REQUEST_BLOCK, sizeof *table->blocks[block]);
  return table->blocks[block] ? 0 : MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL mlfab__request *mlfab__request_open(mlfab__requests *table, int kind, uint32_t slot,
                                                    uint64_t now_ns, uint64_t timeout_ns) {
  if (mlfab__request_reserve(table)) return NULL;
  mlfab__request **bucket = &table->buckets[slot % MLFAB__REQUEST_BUCKETS];
  mlfab__request *request = table->free;
  uint32_t place = request ? request->place : table->room++;
  if (request)
    table->free = request->next;
  else
    request = request_at(table, place);
  memset(request, 0, sizeof *request);
  table->open++;
  request->id = (++table->count * MLFAB__REQUESTS) + place;
  request->kind = (uint8_t)kind;
  request->slot = slot;
  request->place = place;
  request->next = *bucket;
  if (*bucket) (*bucket)->previous = request;
  *bucket = request;
  request->started_ns = now_ns;
  request->deadline_ns = timeout_ns ? mlfab__add_sat(now_ns, timeout_ns) : MLFAB__NEVER;
  request->result.rank = MLFAB_NO_RANK;
  /* Finished requests do not raise it: mlfab__request_due corrects it when it finds none due. */
  if (table->open == 1) table->earliest = MLFAB__NEVER;
  table->earliest = mlfab__min(table->earliest, request->deadline_ns);
  return request;
}

MLFAB__INTERNAL mlfab__request *mlfab__request_find(mlfab__requests *table, mlfab_request id) {
  uint32_t place = (uint32_t)(id % MLFAB__REQUESTS);
  if (id == 0 || place >= table->room) return NULL;
  mlfab__request *request = request_at(table, place);
  return request->kind != MLFAB__REQUEST_FREE && request->id == id ? request : NULL;
}

MLFAB__INTERNAL void mlfab__request_finish(mlfab__requests *table, mlfab__request *request,
                                           int status, int32_t rank, int is_server, uint64_t now_ns,
                                           const char *format, ...) {
  request->done = 1;
  table->to_tell += request->watched;
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
  /* What is no entry of the table is told to nobody later. */
  if (!table->env || mlfab__request_find(table, request->id) != request) return;
  request->error = mlfab__alloc(table->env, sizeof *request->error);
  if (request->error) *request->error = *last;
}

MLFAB__INTERNAL void mlfab__request_recall(mlfab__requests *table, const mlfab__request *request) {
  const mlfab_result *result = &request->result;
  if (request->error)
    table->last = *request->error;
  else if (table->last.code != result->status || table->last.rank != result->rank)
    mlfab__error(&table->last, result->status, MLFAB_NO_RANK, 0, result->waited_ns,
                 "%s (out of memory for more)", mlfab_error_text(result->status));
}

MLFAB__INTERNAL void mlfab__request_end(mlfab__requests *table, mlfab__request *request) {
  if (request->previous)
    request->previous->next = request->next;
  else
    table->buckets[request->slot % MLFAB__REQUEST_BUCKETS] = request->next;
  if (request->next) request->next->previous = request->previous;
  if (request->done) table->to_tell -= request->watched;
  if (request->error) request_free_error(table, request);
  request->kind = MLFAB__REQUEST_FREE;
  request->next = table->free;
  table->free = request;
  table->open--;
}

MLFAB__INTERNAL mlfab__request *mlfab__request_of(mlfab__requests *table, int kind, uint32_t slot,
                                                  const mlfab__request *after) {
  mlfab__request *r = after ? after->next : table->buckets[slot % MLFAB__REQUEST_BUCKETS];
  while (r && (r->kind != kind || r->slot != slot || r->done)) r = r->next;
  return r;
}

MLFAB__INTERNAL mlfab__request *mlfab__request_due(mlfab__requests *table, uint64_t now_ns,
                                                   uint32_t *place_p) {
  if (*place_p == 0 && (table->open == 0 || now_ns < table->earliest)) return NULL;
  while (*place_p < table->room) {
    mlfab__request *r = request_at(table, (*place_p)++);
    if (r->kind != MLFAB__REQUEST_FREE && !r->done && r->deadline_ns <= now_ns) return r;
  }
  table->earliest = MLFAB__NEVER;
  for (uint32_t place = 0; place < table->room; place++) {
    const mlfab__request *r = request_at(table, place);
    if (r->kind != MLFAB__REQUEST_FREE && !r->done)
      table->earliest = mlfab__min(table->earliest, r->deadline_ns);
  }
  return NULL;
}
