/* request.c - the table of requests. See request.h. */
#include "request.h"

#include <stdio.h>

/* Names of the calls, by kind of request. */
static const char *const request_calls[] = {[MLFAB__REQUEST_PUSH] = "push",
                                            [MLFAB__REQUEST_PULL] = "pull",
                                            [MLFAB__REQUEST_MODEL] = "model_start",
                                            [MLFAB__REQUEST_BARRIER] = "barrier",
                                            [MLFAB__REQUEST_JOIN] = "finish",
                                            [MLFAB__REQUEST_SYNC] = "set_sync",
                                            [MLFAB__REQUEST_RESLICE] = "set_servers",
                                            [MLFAB__REQUEST_COLLECTIVE] = "collective",
                                            [MLFAB__REQUEST_CHECKPOINT] = "checkpoint"};

MLFAB__INTERNAL const char *mlfab__request_call(int kind) { return request_calls[kind]; }

/* The entry of a place below `room`, or of the first unused one. */
#define REQUEST_AT(table, place) \
  (&(table)->blocks[(place) / MLFAB__REQUEST_BLOCK][(place) % MLFAB__REQUEST_BLOCK])

MLFAB__INTERNAL void mlfab__requests_free(mlfab__requests *table) {
  for (int i = 1; i < MLFAB__REQUEST_BLOCKS; i++) {
    mlfab__free(table->env, table->blocks[i], MLFAB__REQUEST_BLOCK * sizeof *table->blocks[i]);
    table->blocks[i] = NULL;
  }
}

static int request_reserve(mlfab__requests *table) {
  uint32_t block = table->room / MLFAB__REQUEST_BLOCK;
  table->blocks[0] = table->first;
  if (table->free || block == 0) return 0;
  if (block == MLFAB__REQUEST_BLOCKS || !table->env) return MLFAB_ERR_AGAIN;
  if (!table->blocks[block])
    table->blocks[block] =
        mlfab__alloc_array(table->env, MLFAB__REQUEST_BLOCK, sizeof *table->blocks[block]);
  return table->blocks[block] ? 0 : MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL int mlfab__request_room(mlfab__requests *table, int kind, mlfab_error *error) {
  int code = request_reserve(table);
  if (!code) return 0;
  return MLFAB__FAIL(error, code, "%s: %s", request_calls[kind],
                     code == MLFAB_ERR_MEMORY
                         ? "out of memory"
                         : "too many requests are open: end some with mlfab_wait or mlfab_test");
}

MLFAB__INTERNAL mlfab__request *mlfab__request_open(mlfab__requests *table, int kind, uint32_t slot,
                                                    uint64_t now_ns, uint64_t timeout_ns) {
  if (request_reserve(table)) return NULL;
  mlfab__request **bucket = &table->buckets[slot % MLFAB__REQUEST_BUCKETS];
  mlfab__request *request = table->free;
  uint32_t place = request ? request->place : table->room++;
  if (request)
    table->free = request->next;
  else
    request = REQUEST_AT(table, place);
  memset(request, 0, offsetof(mlfab__request, blame.text));
  request->blame.text[0] = 0;
  table->open++;
  request->id = (++table->count * MLFAB__REQUESTS) + place;
  request->kind = (uint8_t)kind;
  request->slot = slot;
  request->place = place;
  request->next = *bucket;
  if (*bucket) (*bucket)->previous = request;
  *bucket = request;
  request->started_ns = now_ns;
  if (timeout_ns == 0) timeout_ns = table->timeout_ns;
  request->deadline_ns = timeout_ns ? mlfab__add_sat(now_ns, timeout_ns) : MLFAB__NEVER;
  request->result.rank = request->blame.rank = MLFAB_NO_RANK;
  /* Finished requests do not raise `earliest`: mlfab__request_due corrects it if no request is due. */
  if (table->open == 1) table->earliest = MLFAB__NEVER;
  table->earliest = mlfab__min(table->earliest, request->deadline_ns);
  return request;
}

MLFAB__INTERNAL mlfab__request *mlfab__request_find(mlfab__requests *table, mlfab_request id) {
  uint32_t place = (uint32_t)(id % MLFAB__REQUESTS);
  if (id == 0 || place >= table->room) return NULL;
  mlfab__request *request = REQUEST_AT(table, place);
  return request->kind != MLFAB__REQUEST_FREE && request->id == id ? request : NULL;
}

MLFAB__INTERNAL void mlfab__request_finish(mlfab__requests *table, mlfab__request *request,
                                           int status, int32_t rank, int is_server, uint64_t now_ns,
                                           const char *format, ...) {
  if (!request || request->done) return;
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
  last->reserved = 1;
  last->waited_ns = request->result.waited_ns;
  va_list arguments;
  va_start(arguments, format);
  mlfab__vformat(last->text, sizeof last->text, format, arguments);
  va_end(arguments);
  request->blame.is_server = is_server != 0;
  memcpy(request->blame.text, last->text, sizeof last->text);
}

MLFAB__INTERNAL void mlfab__request_recall(mlfab__requests *table, const mlfab__request *request) {
  const mlfab_result *result = &request->result;
  mlfab__error(&table->last, result->status, result->rank, request->blame.is_server,
               result->waited_ns, "%s", request->blame.text);
}

MLFAB__INTERNAL void mlfab__request_succeed(mlfab__requests *table, mlfab__request *request,
                                            uint64_t now_ns) {
  mlfab__request_finish(table, request, 0, MLFAB_NO_RANK, 0, now_ns, "%s", "");
}

MLFAB__INTERNAL void mlfab__request_dead(mlfab__requests *table, mlfab__request *request,
                                         uint32_t server, uint64_t now_ns) {
  if (request)
    mlfab__request_finish(table, request, MLFAB_ERR_PEER_DEAD, (int32_t)server, 1, now_ns,
                          "%s: server %u is dead", request_calls[request->kind], server);
}

MLFAB__INTERNAL void mlfab__request_blame(mlfab__request *request, int32_t rank, int is_server,
                                          const char *format, ...) {
  mlfab__blame *blame = &request->blame;
  blame->rank = rank;
  blame->is_server = is_server != 0;
  va_list arguments;
  va_start(arguments, format);
  mlfab__vformat(blame->text, sizeof blame->text, format, arguments);
  va_end(arguments);
}

MLFAB__INTERNAL void mlfab__request_told(mlfab__requests *table, int kind, mlfab_request id,
                                         uint32_t by, int32_t rank, const char *text) {
  mlfab__request *r = id ? mlfab__request_find(table, id) : mlfab__request_of(table, kind, 0, NULL);
  for (; r && r->kind == kind && !r->done; r = id ? NULL : mlfab__request_of(table, kind, 0, r)) {
    r->blame.by = by;
    mlfab__request_blame(r, rank, 0, "%s", text);
  }
}

/* " awaiting worker 3", or "" if that is not known. */
static const char *request_whom(char text[32], const mlfab__blame *blame) {
  text[0] = 0;
  if (blame->rank != MLFAB_NO_RANK)
    snprintf(text, 32, " awaiting %s %d", blame->is_server ? "server" : "worker", (int)blame->rank);
  return text;
}

MLFAB__INTERNAL void mlfab__request_expire(mlfab__requests *table, mlfab__request *request,
                                           int code, uint64_t now_ns) {
  const mlfab__blame *blame = &request->blame;
  char number[24] = "", waited[24], whom[32];
  if (request->kind == MLFAB__REQUEST_PUSH)
    snprintf(number, sizeof number, " %llu", (unsigned long long)request->result.seq);
  mlfab__request_finish(
      table, request, blame->in_doubt ? MLFAB_ERR_IN_DOUBT : code, blame->rank, blame->is_server,
      now_ns, "%s%s: %s after %s%s%s",
      request->kind == MLFAB__REQUEST_PUSH ? "update" : request_calls[request->kind], number,
      code == MLFAB_ERR_TIMEOUT ? "the deadline passed" : "cancelled",
      mlfab__duration(waited, now_ns - request->started_ns), request_whom(whom, blame),
      blame->text);
}

MLFAB__INTERNAL int mlfab__request_pending(mlfab__requests *table, mlfab_request id,
                                           uint64_t now_ns) {
  const mlfab__request *request = mlfab__request_find(table, id);
  if (!request || request->done) return MLFAB_ERR_REQUEST;
  const mlfab__blame *blame = &request->blame;
  uint64_t since_ns = now_ns - request->started_ns;
  char waited[24], whom[32];
  return mlfab__error(&table->last, MLFAB_ERR_TIMEOUT, blame->rank, blame->is_server, since_ns,
                      "wait: the timeout passed; the %s is still open after %s%s%s",
                      request_calls[request->kind], mlfab__duration(waited, since_ns),
                      request_whom(whom, blame), blame->text);
}

MLFAB__INTERNAL void mlfab__request_end(mlfab__requests *table, mlfab__request *request) {
  if (request->previous)
    request->previous->next = request->next;
  else
    table->buckets[request->slot % MLFAB__REQUEST_BUCKETS] = request->next;
  if (request->next) request->next->previous = request->previous;
  if (request->done) table->to_tell -= request->watched;
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
    mlfab__request *r = REQUEST_AT(table, *place_p);
    ++*place_p;
    if (r->kind != MLFAB__REQUEST_FREE && !r->done && r->deadline_ns <= now_ns) return r;
  }
  table->earliest = MLFAB__NEVER;
  for (uint32_t place = 0; place < table->room; place++) {
    const mlfab__request *r = REQUEST_AT(table, place);
    if (r->kind != MLFAB__REQUEST_FREE && !r->done)
      table->earliest = mlfab__min(table->earliest, r->deadline_ns);
  }
  return NULL;
}
