/* comm_object.c - the communicator: objects. See comm_object.h. */
#include "comm.h"

MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_object_add(mlfab__comm *comm,
                                                           const mlfab__comm_object *object) {
  mlfab__comm_object *entry = comm->objects;
  while (entry < comm->objects + MLFAB__COMM_OBJECTS && entry->id) entry++;
  if (entry == comm->objects + MLFAB__COMM_OBJECTS) return NULL;
  *entry = *object;
  entry->id = ++comm->objects_added;
  entry->channel = 0;
  entry->upto = 0;
  entry->missing = MLFAB_NO_RANK;
  entry->stuck_ns = comm->now_ns;
  return entry;
}

MLFAB__INTERNAL int mlfab__comm_object_open(mlfab__comm *comm, const mlfab__comm_object *object,
                                            const char *opening, uint64_t salt, uint64_t timeout_ns,
                                            uint64_t now_ns, mlfab__comm_object **object_p,
                                            mlfab_request *request_p, mlfab_error *error) {
  mlfab__comm_object *entry = mlfab__comm_object_add(comm, object);
  *object_p = entry;
  if (!entry)
    return MLFAB__FAIL(error, MLFAB_ERR_LIMIT, "%s: %d objects are open", object->what,
                       MLFAB__COMM_OBJECTS);
  const mlfab__comm_call call = {
      .kind = MLFAB__COLLECTIVE_BARRIER, .salt = salt, .opens = entry->id, .words = opening};
  int code = mlfab__comm_start(comm, &call, timeout_ns, now_ns, request_p, error);
  if (!code) return 0;
  mlfab__comm_object_remove(comm, entry);
  *object_p = NULL;
  return code;
}

MLFAB__INTERNAL int mlfab__comm_object_request(mlfab__comm *comm, const mlfab__comm_object *object,
                                               uint64_t timeout_ns, uint64_t now_ns,
                                               mlfab_request *request_p, mlfab_error *error) {
  mlfab__request *request = mlfab__request_open(comm->requests, MLFAB__REQUEST_COLLECTIVE,
                                                MLFAB__COMM_REQUEST(object->id), now_ns,
                                                timeout_ns ? timeout_ns : comm->config->timeout_ns);
  if (!request)
    return MLFAB__FAIL(error, MLFAB_ERR_AGAIN,
                       "%s: too many requests are open: end some with mlfab_wait or mlfab_test",
                       object->what);
  *request_p = request->id;
  return 0;
}

MLFAB__INTERNAL void *mlfab__comm_object_self(mlfab__comm *comm, uint32_t id,
                                              void (*kind)(void *self)) {
  const mlfab__comm_object *object = mlfab__comm_object_find(comm, id);
  return object && object->free_self == kind ? object->self : NULL;
}

MLFAB__INTERNAL void mlfab__comm_object_remove(mlfab__comm *comm, mlfab__comm_object *object) {
  mlfab__comm_enter(comm, 0);
  if (object->channel) {
    mlfab__engine_close(comm, object);
    comm->closed[comm->closed_next++ % MLFAB__COMM_OBJECTS] =
        (mlfab__comm_closed){object->channel, object->ahead, object->upto};
  }
  object->id = object->channel = 0;
  mlfab__comm_exit(comm);
}

MLFAB__INTERNAL void mlfab__comm_bury(mlfab__comm *comm, mlfab__comm_grave *grave) {
  grave->next = comm->graves;
  comm->graves = grave;
}

MLFAB__INTERNAL int32_t mlfab__comm_missing(const mlfab__comm *comm,
                                            const mlfab__comm_object *object) {
  return comm->phase == MLFAB__COMM_IN ? object->missing : comm->missing;
}
