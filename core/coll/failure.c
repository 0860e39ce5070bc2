/* failure.c - the communicator: what its task graphs (engine.c) and its epochs (comm.c) have in common: how a
 * failure is noted, which takes effect when no frame or call is being worked on; objects and open calls
 * by their numbers. See comm.h. */
#include "comm.h"

#include <stdio.h>

MLFAB__INTERNAL void mlfab__comm_set_verdict(mlfab__comm *comm, int code, int32_t rank,
                                             int is_server, const char *text) {
  memset(&comm->verdict, 0, sizeof comm->verdict);
  comm->verdict.code = code;
  comm->verdict.rank = rank;
  comm->verdict.is_server = is_server;
  snprintf(comm->verdict.text, sizeof comm->verdict.text, "%s", text);
}

MLFAB__INTERNAL void mlfab__comm_enter(mlfab__comm *comm, uint64_t now_ns) {
  comm->depth++;
  if (now_ns) comm->now_ns = now_ns;
}

MLFAB__INTERNAL void mlfab__comm_exit(mlfab__comm *comm) {
  comm->depth--;
  if (comm->depth == 0 && comm->failing) comm->act(comm);
}

MLFAB__INTERNAL void mlfab__comm_fail(mlfab__comm *comm, int code, int32_t rank, const char *text) {
  if (comm->failing || comm->ending || comm->dead) return;
  if (rank == MLFAB_NO_RANK) rank = (int32_t)comm->rank; /* as server 0 tells the others */
  comm->failing = 1;
  comm->fail.code = code;
  comm->fail.rank = rank;
  snprintf(comm->fail.text, sizeof comm->fail.text, "%s", text);
  mlfab__comm_set_verdict(comm, code, rank, 0, text);
  mlfab__comm_enter(comm, 0);
  mlfab__comm_exit(comm);
}

MLFAB__INTERNAL void mlfab__comm_fail_memory(mlfab__comm *comm) {
  char text[64];
  snprintf(text, sizeof text, "worker %u is out of memory", comm->rank);
  mlfab__comm_fail(comm, MLFAB_ERR_MEMORY, (int32_t)comm->rank, text);
}

MLFAB__INTERNAL void mlfab__comm_stuck(mlfab__comm *comm, uint32_t channel, uint64_t number) {
  const mlfab__membership_call call = {comm->epoch, channel, number};
  if (comm->phase != MLFAB__COMM_IN || comm->config->workers == 1) return;
  MLFAB__POST(&comm->up, 0, MLFAB__MEMBERSHIP_STUCK, membership_call, &call);
}

/* --- by number --- */

/* Where the slot of a call stands. */
MLFAB__INTERNAL mlfab__comm_slot **mlfab__comm_place(const mlfab__comm *comm, uint64_t serial) {
  return &comm->slots[serial % MLFAB__COMM_CALLS];
}

/* The open call of this number, or NULL. */
MLFAB__INTERNAL mlfab__comm_slot *mlfab__comm_slot_of(const mlfab__comm *comm, uint64_t number) {
  uint64_t serial = comm->base + number;
  return number < comm->end - comm->base && serial >= comm->first ? *mlfab__comm_place(comm, serial)
                                                                  : NULL;
}

MLFAB__INTERNAL int mlfab__comm_awaits(mlfab__comm *comm, uint64_t number) {
  mlfab__comm_slot *slot = mlfab__comm_slot_of(comm, number);
  if (slot && slot->state == MLFAB__SLOT_OUTSIDE) slot->wanted = 1;
  return slot != NULL || number >= comm->end - comm->base;
}

MLFAB__INTERNAL int mlfab__comm_gives(const mlfab__comm *comm, uint32_t member, uint64_t number) {
  return !comm->finished || comm->finished[member] > number || MLFAB__PLANTED(99);
}

MLFAB__INTERNAL uint32_t mlfab__comm_givers(const mlfab__comm *comm, uint64_t number) {
  uint32_t n = 0;
  for (uint32_t m = 0; m < comm->members; m++) n += (uint32_t)mlfab__comm_gives(comm, m, number);
  return n;
}

MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_object_find(mlfab__comm *comm, uint32_t id) {
  for (uint32_t i = 0; id && i < MLFAB__COMM_OBJECTS; i++) {
    if (comm->objects[i].id == id) return &comm->objects[i];
  }
  return NULL;
}

MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_channel_find(mlfab__comm *comm, uint32_t channel) {
  for (uint32_t i = 0; channel && i < MLFAB__COMM_OBJECTS; i++) {
    if (comm->objects[i].id && comm->objects[i].channel == channel) return &comm->objects[i];
  }
  return NULL;
}
