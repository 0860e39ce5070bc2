/* comm_object.c - the communicator: opens, finds and removes objects. See comm_object.h. */
#include "comm.h"

MLFAB__INTERNAL int mlfab__comm_object_add(mlfab__comm *comm, mlfab__comm_object *object,
                                           const mlfab__comm_kind *kind, void *self,
                                           mlfab_error *error) {
  uint32_t at = 0;
  while (at < MLFAB__COMM_OBJECTS && comm->objects[at]) at++;
  if (at == MLFAB__COMM_OBJECTS)
    return MLFAB__FAIL(error, MLFAB_ERR_LIMIT, "%s: %d objects are open", kind->what,
                       MLFAB__COMM_OBJECTS);
  *object = (mlfab__comm_object){.kind = kind,
                                 .self = self,
                                 .id = ++comm->objects_added,
                                 .missing = MLFAB_NO_RANK,
                                 .stuck_ns = comm->now_ns};
  comm->objects[at] = object;
  return 0;
}

MLFAB__INTERNAL int mlfab__comm_object_open(mlfab__comm *comm, mlfab__comm_object *object,
                                            const mlfab__comm_kind *kind, void *self, uint64_t salt,
                                            uint64_t timeout_ns, uint64_t now_ns,
                                            mlfab_request *request_p, mlfab_error *error) {
  int code = mlfab__comm_object_add(comm, object, kind, self, error);
  if (code) return code;
  const mlfab__comm_call call = {
      .kind = MLFAB__COLLECTIVE_BARRIER, .salt = salt, .opens = object->id, .words = kind->opening};
  mlfab__comm_enter(comm, now_ns); /* it may begin, or fail, at the exit */
  code = mlfab__comm_start(comm, &call, timeout_ns, now_ns, request_p, error);
  if (code)
    mlfab__comm_object_remove(comm, object);
  else
    object->opening = *request_p;
  mlfab__comm_exit(comm);
  return code;
}

MLFAB__INTERNAL int mlfab__comm_object_request(mlfab__comm *comm, const mlfab__comm_object *object,
                                               uint64_t timeout_ns, uint64_t now_ns,
                                               mlfab_request *request_p, mlfab_error *error) {
  int code = mlfab__request_room(comm->requests, MLFAB__REQUEST_COLLECTIVE, error);
  if (code) return code;
  mlfab__request *request =
      mlfab__request_open(comm->requests, MLFAB__REQUEST_COLLECTIVE,
                          MLFAB__COMM_REQUEST(object->id), now_ns, timeout_ns);
  *request_p = request->id;
  return 0;
}

MLFAB__INTERNAL void *mlfab__comm_object_get(mlfab__comm *comm, const mlfab__comm_kind *kind,
                                             uint32_t id, mlfab_error *error) {
  const mlfab__comm_object *object = mlfab__comm_object_find(comm, id);
  if (object && object->kind == kind && !object->closing) return object->self;
  (void)MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: none with the number %u is open", kind->what,
                    id);
  return NULL;
}

MLFAB__INTERNAL void mlfab__comm_object_remove(mlfab__comm *comm, mlfab__comm_object *object) {
  mlfab__comm_enter(comm, 0);
  if (object->channel) {
    mlfab__engine_close(comm, object);
    comm->closed[comm->closed_next++ % MLFAB__COMM_OBJECTS] =
        (mlfab__comm_closed){object->channel, object->kind->ahead, object->upto};
  }
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++)
    if (comm->objects[i] == object) comm->objects[i] = NULL;
  object->id = object->channel = 0;
  mlfab__comm_exit(comm);
}

MLFAB__INTERNAL void mlfab__comm_object_bury(mlfab__comm *comm, mlfab__comm_object *object) {
  mlfab__comm_object_remove(comm, object);
  object->next = comm->graves;
  comm->graves = object;
}
