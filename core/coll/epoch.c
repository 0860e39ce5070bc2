/* epoch.c - the communicator: begins and ends epochs. The diagram and the table of transitions are in comm.h. */
#include "comm.h"

#include <stdio.h>

/* Returns the place of the waiting call, else of a call now. Its progress counts updates by their present numbers. */
static mlfab__mark epoch_mark(const mlfab__comm *comm) {
  const mlfab__mark now = mlfab__comm_mark(comm);
  mlfab__mark mark = now;
  if (comm->first < comm->end) mark = (*mlfab__comm_place(comm, comm->first))->mark;
  mark.progress = now.progress - (now.pushes - mark.pushes);
  return mark;
}

static void epoch_say_ready(mlfab__comm *comm) {
  const mlfab__mark mark = epoch_mark(comm);
  const mlfab__membership_ready ready = {comm->epoch, comm->go.arena, mark.progress, mark.barriers,
                                         (int32_t)comm->rank};
  MLFAB__POST(&comm->up, 0, MLFAB__MEMBERSHIP_READY, membership_ready, &ready);
}

static void epoch_say_failed(mlfab__comm *comm) {
  comm->fail.epoch = comm->epoch;
  MLFAB__POST(&comm->up, 0, MLFAB__MEMBERSHIP_FAIL, membership_over, &comm->fail);
}

static void epoch_say_leaving(mlfab__comm *comm) {
  const mlfab__membership_leave leave = {mlfab__comm_stands(comm) ? comm->epoch : 0,
                                         (int32_t)comm->rank, mlfab__comm_called(comm)};
  MLFAB__POST(&comm->up, 0, MLFAB__MEMBERSHIP_LEAVE, membership_leave, &leave);
}

/* --- newcomers --- */

/* Others do not wait for a waiting newcomer. It asks when its updates are decided, again if its first call changes. */
MLFAB__INTERNAL void mlfab__epoch_look_apart(mlfab__comm *comm) {
  const mlfab__counting *counting = &comm->counting;
  int waits = comm->newcomer && !comm->told && comm->phase != MLFAB__COMM_IN && !comm->dead &&
              comm->first < comm->end;
  if (waits && !comm->apart && counting->worker && !counting->idle(counting->worker)) return;
  uint64_t call = waits ? (*mlfab__comm_place(comm, comm->first))->signature : 0;
  if (waits != comm->apart) {
    comm->apart = waits != 0;
    if (waits && counting->worker) counting->apart(counting->worker, MLFAB__APART_CALL);
    if (waits) mlfab__barrier_apart(comm->barrier);
    if (!waits && counting->worker) counting->back(counting->worker, MLFAB__APART_CALL, NULL);
    if (!waits) mlfab__barrier_alone(comm->barrier);
  }
  if (comm->newcomer && comm->phase == MLFAB__COMM_ASKED && call != comm->asked_for)
    mlfab__comm_ask(comm, comm->over_epoch);
}

/* With newcomers, a member is ready when it has called; a newcomer, when the others are and all servers count it. */
MLFAB__INTERNAL void mlfab__epoch_look_ready(mlfab__comm *comm) {
  if (comm->phase != MLFAB__COMM_READY || comm->said) return;
  if (comm->meets && !comm->finishing && !comm->leaving) {
    if (!comm->newcomer && comm->first == comm->end) return;
    if (comm->newcomer && !comm->told) return;
    if (comm->newcomer && comm->counting.worker && !comm->counting.counted(comm->counting.worker))
      return;
  }
  if (comm->newcomer && comm->told)
    mlfab__barrier_here(comm->barrier, comm->met.rank, comm->met.barriers,
                        epoch_mark(comm).barriers);
  comm->said = 1;
  epoch_say_ready(comm);
}

/* Takes the report that the others have called, after so many updates. */
MLFAB__INTERNAL void mlfab__epoch_on_meet(mlfab__comm *comm, const mlfab__membership_ready *in) {
  if (in->epoch != comm->epoch || !comm->newcomer || comm->told) return;
  if (comm->phase != MLFAB__COMM_LISTED && comm->phase != MLFAB__COMM_READY) return;
  const mlfab__mark mark = epoch_mark(comm);
  const uint64_t level = in->progress - mark.pushes;
  comm->told = 1;
  comm->apart = 0;
  comm->met = *in;
  /* The leading newcomer keeps its number. */
  if (comm->counting.worker)
    comm->counting.back(comm->counting.worker, MLFAB__APART_CALL,
                        in->rank == (int32_t)comm->rank ? NULL : &level);
  mlfab__epoch_look_ready(comm);
}

/* --- beginning --- */

static void epoch_begin(mlfab__comm *comm) {
  comm->phase = MLFAB__COMM_IN;
  comm->in_ns = comm->now_ns;
  comm->epochs++;
  comm->newcomer = comm->told = 0;
  mlfab__barrier_among(comm->barrier);
  comm->others[0] = 0;
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++) {
    mlfab__comm_object *object = comm->objects[i];
    if (!object) continue;
    object->missing = MLFAB_NO_RANK;
    object->stuck_ns = comm->now_ns;
    if (object->channel && object->kind->begin) object->kind->begin(object->self);
  }
  comm->later = comm->failing;
  if (comm->finishing && !mlfab__comm_alone(comm))
    mlfab__comm_say_finish(comm, mlfab__comm_called(comm));
  comm->due |= MLFAB__COMM_BEGIN;
}

/* Returns 1 if the members' frames are taken from now on, 0 without memory for the streams. */
static int epoch_take_frames(mlfab__comm *comm) {
  if (!mlfab__streams_begin(&comm->streams, comm->epoch, comm->ranks, comm->members)) return 1;
  comm->later = 1;
  mlfab__comm_fail_memory(comm);
  return 0;
}

/* Forms an epoch of this worker alone. */
static void epoch_form_alone(mlfab__comm *comm) {
  comm->epoch++;
  comm->members = 1;
  comm->me = 0;
  comm->ranks[0] = comm->rank;
  comm->go = (mlfab__membership_go){.epoch = comm->epoch, .round = comm->round};
  comm->phase = MLFAB__COMM_READY;
  if (epoch_take_frames(comm)) epoch_begin(comm);
}

MLFAB__INTERNAL void mlfab__epoch_join(mlfab__comm *comm) {
  if (comm->phase != MLFAB__COMM_OUT || comm->leaving || comm->dead || comm->later) return;
  if (mlfab__comm_alone(comm)) {
    epoch_form_alone(comm);
  } else if (comm->finishing && comm->first == comm->end) {
    mlfab__comm_say_finish(comm, 0);
  } else {
    comm->phase = MLFAB__COMM_ASKED;
    comm->missing = MLFAB_NO_RANK;
    comm->others[0] = 0;
    comm->asked_for = 0;
    if (!comm->newcomer) mlfab__comm_ask(comm, comm->over_epoch);
  }
}

/* --- end --- */

static void epoch_objects_over(mlfab__comm *comm) {
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++) {
    mlfab__comm_object *object = comm->objects[i];
    if (object) object->upto = 0; /* frames of the next epoch may come before it begins here */
    if (object && object->kind->over) object->kind->over(object->self);
    if (comm->closed[i].upto != UINT64_MAX) comm->closed[i].upto = 0;
  }
}

/* Makes a newcomer that was told, and is in no epoch now, ask again, in its barriers, too. */
static void epoch_untold(mlfab__comm *comm) {
  if (comm->told) mlfab__barrier_alone(comm->barrier);
  comm->told = 0;
}

/* Ends all runs and objects with the verdict, and with `calls` all open calls. Otherwise these calls wait, and get
 * numbers of the next epoch, which begin at 0. */
static void epoch_end(mlfab__comm *comm, int calls, enum mlfab__comm_phase next) {
  comm->phase = MLFAB__COMM_ENDING;
  comm->failing = 0;
  mlfab__streams_end(&comm->streams);
  mlfab__engine_end_all(comm, comm->verdict.code);
  if (calls) {
    comm->owed = 1;
    mlfab__plain_end_all(comm);
  }
  epoch_objects_over(comm);
  comm->base = comm->begun = comm->first;
  epoch_untold(comm);
  comm->left = 0;
  mlfab__comm_no_limit(comm);
  comm->phase = next;
}

/* Takes a failure of ours into effect, and reports it: now or, if no epoch is listed, as soon as one is. */
static void epoch_fail(mlfab__comm *comm) {
  int stands = mlfab__comm_stands(comm), alone = mlfab__comm_alone(comm);
  epoch_end(comm, 1, alone ? MLFAB__COMM_OUT : stands ? MLFAB__COMM_FAILED : comm->phase);
  if (stands && !alone) {
    epoch_say_failed(comm);
  } else {
    comm->untold = !alone && !comm->newcomer;
    mlfab__epoch_join(comm);
  }
}

MLFAB__INTERNAL void mlfab__epoch_settle(mlfab__comm *comm) {
  comm->depth = 1;
  while (comm->failing || comm->due) {
    uint8_t due = comm->due;
    comm->due = 0;
    if (comm->failing) {
      epoch_fail(comm);
      continue;
    }
    mlfab__epoch_look_apart(comm);
    mlfab__plain_begin_waiting(comm);
    mlfab__epoch_look_ready(comm);
    if (!comm->failing) mlfab__comm_check_moved(comm);
    if (due & MLFAB__COMM_JOIN) mlfab__epoch_join(comm);
  }
  mlfab__epoch_look_apart(comm);
  comm->depth = 0;
}

static int32_t epoch_first_finished(const mlfab__comm *comm) {
  int32_t rank = MLFAB_NO_RANK;
  for (uint32_t m = 0; m < comm->members && comm->finished; m++)
    if (comm->finished[m] != UINT64_MAX &&
        (rank == MLFAB_NO_RANK || (int32_t)comm->ranks[m] < rank))
      rank = (int32_t)comm->ranks[m];
  return rank;
}

/* Renews the epoch: all members have ended its calls. A later call still fails with an earlier verdict. */
static void epoch_renew(mlfab__comm *comm, enum mlfab__comm_phase next) {
  const mlfab_error earlier = comm->verdict;
  char text[MLFAB__TEXT_MAX];
  int32_t rank = epoch_first_finished(comm);
  if (rank == MLFAB_NO_RANK)
    snprintf(text, sizeof text, "a worker has joined while this was under way");
  else
    snprintf(text, sizeof text, "worker %d has finished while this was under way", (int)rank);
  mlfab__comm_set_verdict(comm, MLFAB_ERR_PEER_CLOSED, rank, 0, text);
  epoch_end(comm, 0, next);
  if (comm->owed) comm->verdict = earlier;
  comm->over_epoch = (uint32_t)mlfab__max(comm->over_epoch, comm->epoch);
  comm->missing = MLFAB_NO_RANK;
}

/* --- frames --- */

/* Takes the members as listed: returns 0, or an error if the list is wrong. */
static int epoch_take_members(mlfab__comm *comm, const mlfab__membership_list *list,
                              const mlfab__membership_member *members) {
  uint32_t me = list->members;
  if (list->members == 0) return MLFAB_ERR_FRAME;
  for (uint32_t i = 0; i < list->members; i++) {
    if (members[i].rank >= comm->config->workers) return MLFAB_ERR_FRAME;
    for (uint32_t k = 0; k < i; k++) {
      if (members[k].rank == members[i].rank) return MLFAB_ERR_FRAME;
    }
    if (members[i].rank == comm->rank) me = i;
  }
  if (me == list->members) return MLFAB_ERR_FRAME;
  comm->members = list->members;
  comm->me = me;
  for (uint32_t i = 0; i < list->members; i++) comm->ranks[i] = members[i].rank;
  return 0;
}

/* Do all share this host, and have memory for each other? */
static int epoch_has_arena(const mlfab__comm *comm) {
  for (uint32_t i = 0; i < comm->members; i++) {
    if (!comm->list[i].arena_nonce || comm->list[i].host != comm->list[comm->me].host) return 0;
  }
  return 1;
}

static void epoch_list(mlfab__comm *comm) {
  memset(&comm->go, 0, sizeof comm->go);
  comm->phase = MLFAB__COMM_LISTED;
  comm->left = comm->said = comm->told = 0;
  if (epoch_take_frames(comm) && !epoch_has_arena(comm)) mlfab__comm_mapped(comm, 0);
}

MLFAB__INTERNAL int mlfab__epoch_on_list(mlfab__comm *comm, const mlfab__frame_in *frame) {
  mlfab__membership_list list;
  uint64_t bytes = MLFAB__MEMBERSHIP_MEMBERS_MAX * sizeof *comm->list;
  mlfab__membership_member *members = mlfab__alloc(comm->env, bytes);
  if (!members) {
    comm->list_lost = 1;
    mlfab__log(comm->env, MLFAB_LOG_ERROR, "collectives: no memory for the list of members");
    return 0;
  }
  int code = mlfab__decode_membership_list(frame->meta, frame->meta_bytes, &list, members);
  int fresh = !code && (comm->phase == MLFAB__COMM_ASKED || mlfab__comm_moved(comm)) &&
              list.epoch > comm->over_epoch && list.epoch > comm->epoch;
  if (fresh && comm->phase == MLFAB__COMM_IN) epoch_renew(comm, MLFAB__COMM_ASKED);
  if (fresh) code = epoch_take_members(comm, &list, members);
  if (fresh && !code) comm->meets = list.newcomers > 0;
  if (!fresh || code) {
    mlfab__free(comm->env, members, bytes);
    return code;
  }
  mlfab__free(comm->env, comm->list, bytes);
  comm->list = members;
  comm->epoch = list.epoch;
  if (comm->phase == MLFAB__COMM_FAILED || comm->untold) {
    /* A failure of calls that waited, or of the former epoch, which nobody can fail any more. */
    if (comm->phase != MLFAB__COMM_FAILED) comm->untold = 0;
    comm->phase = MLFAB__COMM_FAILED;
    epoch_say_failed(comm);
  } else {
    epoch_list(comm);
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__comm_mapped(mlfab__comm *comm, int ok) {
  if (comm->phase != MLFAB__COMM_LISTED) return;
  comm->go.arena = ok ? MLFAB__ARENA_USED : MLFAB__ARENA_NONE;
  comm->phase = MLFAB__COMM_READY;
  mlfab__epoch_look_ready(comm);
}

MLFAB__INTERNAL void mlfab__epoch_on_go(mlfab__comm *comm, const mlfab__membership_go *go) {
  if (comm->phase != MLFAB__COMM_READY || go->epoch != comm->epoch) return;
  comm->go = *go;
  comm->go.arena = go->arena ? MLFAB__ARENA_USED : MLFAB__ARENA_NONE;
  comm->objects_opened = mlfab__max(comm->objects_opened, go->objects);
  epoch_begin(comm);
}

/* Takes the verdict. Calls that have failed here already ignore it. */
MLFAB__INTERNAL void mlfab__epoch_on_over(mlfab__comm *comm, const mlfab__membership_over *over) {
  int told = comm->phase == MLFAB__COMM_FAILED || comm->untold;
  if (over->epoch <= comm->over_epoch) return;
  comm->over_epoch = over->epoch;
  comm->due |= MLFAB__COMM_BEGIN;
  if (comm->phase == MLFAB__COMM_OUT) return;
  if (over->code == 0) { /* it has not begun, or is over for a worker that has finished */
    if (comm->phase == MLFAB__COMM_IN)
      epoch_renew(comm, MLFAB__COMM_OUT);
    else
      epoch_untold(comm);
    comm->said = 0;
    mlfab__streams_end(&comm->streams);
  } else {
    if (comm->said) comm->newcomer = 0; /* all count it, and its call has failed with theirs */
    if (comm->phase != MLFAB__COMM_FAILED) comm->untold = 0;
    if (!told || comm->owed) mlfab__comm_set_verdict(comm, over->code, over->rank, 0, over->text);
    if (!told) epoch_end(comm, 1, MLFAB__COMM_OUT);
  }
  comm->phase = MLFAB__COMM_OUT;
  mlfab__epoch_join(comm);
}

/* A member has left: fails the calls from the first one that it has not called. */
MLFAB__INTERNAL void mlfab__epoch_on_left(mlfab__comm *comm, const mlfab__membership_leave *in) {
  if (!mlfab__comm_stands(comm) || in->epoch != comm->epoch || in->rank == (int32_t)comm->rank)
    return;
  if (!comm->left || in->calls < comm->left_calls ||
      (in->calls == comm->left_calls && in->rank < comm->left_rank)) {
    comm->left_calls = in->calls;
    comm->left_rank = in->rank;
  }
  if (!comm->left) comm->left_ns = comm->now_ns;
  comm->left = 1;
  if (comm->phase != MLFAB__COMM_IN) return;
  for (uint64_t number = comm->left_calls; number < mlfab__comm_called(comm); number++) {
    const mlfab__comm_slot *slot = mlfab__comm_slot_of(comm, number);
    if (slot) mlfab__plain_fail(comm, slot, MLFAB_ERR_PEER_CLOSED, comm->left_rank, "has left");
  }
}

MLFAB__INTERNAL void mlfab__epoch_say_again(mlfab__comm *comm) {
  switch (comm->phase) {
    case MLFAB__COMM_ASKED:
      if (!comm->newcomer || comm->asked_for) mlfab__comm_ask(comm, comm->over_epoch);
      break;
    case MLFAB__COMM_READY:
      if (comm->said) epoch_say_ready(comm);
      break;
    case MLFAB__COMM_FAILED:
      epoch_say_failed(comm);
      break;
    default:;
  }
  if (comm->finishing && comm->phase == MLFAB__COMM_IN && mlfab__comm_called(comm) <= comm->limit) {
    mlfab__comm_say_finish(comm, mlfab__comm_called(comm));
  } else if (comm->finishing && comm->phase == MLFAB__COMM_OUT) {
    mlfab__comm_say_finish(comm, 0);
  } else if (mlfab__comm_moved(comm)) {
    mlfab__comm_ask(comm, comm->epoch);
  }
  if (comm->leaving) epoch_say_leaving(comm);
  mlfab__plain_ask_trees(comm);
}

/* --- this worker leaves; server 0 dies --- */

MLFAB__INTERNAL void mlfab__comm_leave(void *self) {
  mlfab__comm *comm = self;
  if (comm->leaving) return;
  comm->leaving = 1;
  mlfab__streams_leave(&comm->streams);
  if (comm->phase == MLFAB__COMM_OUT || mlfab__comm_alone(comm)) return;
  mlfab__epoch_look_ready(comm);
  epoch_say_leaving(comm);
  if (comm->phase != MLFAB__COMM_ASKED) return;
  char text[64];
  snprintf(text, sizeof text, "worker %u takes no further part", comm->rank);
  comm->untold = 0;
  mlfab__comm_set_verdict(comm, MLFAB_ERR_CANCELLED, (int32_t)comm->rank, 0, text);
  mlfab__comm_enter(comm, 0);
  epoch_end(comm, 1, MLFAB__COMM_OUT);
  mlfab__comm_exit(comm);
}

MLFAB__INTERNAL void mlfab__comm_dead(mlfab__comm *comm, uint64_t now_ns) {
  if (comm->dead) return;
  comm->dead = 1;
  if (mlfab__comm_alone(comm)) return;
  comm->untold = 0;
  mlfab__comm_set_verdict(comm, MLFAB_ERR_PEER_DEAD, 0, 1, "server 0 is dead");
  mlfab__comm_enter(comm, now_ns);
  epoch_end(comm, 1, MLFAB__COMM_OUT);
  mlfab__comm_exit(comm);
  comm->owed = 0; /* check_state tells every later call */
}
