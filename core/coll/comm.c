/* comm.c - the communicator: takes its frames, and watches calls as time passes. See comm.h. */
#include "comm.h"

#include <stdio.h>

MLFAB__INTERNAL int mlfab__comm_init(mlfab__comm *comm, mlfab__env *env, const mlfab_config *config,
                                     uint32_t rank, const mlfab__port *up, const mlfab__port *links,
                                     const mlfab__port *down, mlfab__requests *requests) {
  const mlfab__stream_user user = {comm, mlfab__engine_deliver, mlfab__engine_given_back};
  memset(comm, 0, sizeof *comm);
  comm->env = env;
  comm->config = config;
  comm->requests = requests;
  comm->up = *up;
  comm->rank = rank;
  comm->founders = config->workers;
  comm->missing = comm->left_rank = MLFAB_NO_RANK;
  comm->arena_fd = -1;
  comm->limit = comm->settled = UINT64_MAX;
  comm->settle = mlfab__epoch_settle;
  mlfab__pool_init(&comm->pool, env, MLFAB__COMM_POOL);
  mlfab__streams_init(&comm->streams, env, config, links, down, &user);
  return 0;
}

MLFAB__INTERNAL void mlfab__comm_sweep(void *self) {
  mlfab__comm *comm = self;
  while (comm->graves) {
    mlfab__comm_object *object = comm->graves;
    comm->graves = object->next;
    object->kind->free_self(object->self);
  }
  mlfab__streams_trim(&comm->streams);
}

MLFAB__INTERNAL void mlfab__comm_free(void *self) {
  mlfab__comm *comm = self;
  if (!comm->env) return;
  comm->phase = MLFAB__COMM_ENDING;
  mlfab__streams_free(&comm->streams);
  mlfab__engine_free(comm);
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++) {
    mlfab__comm_object *object = comm->objects[i];
    comm->objects[i] = NULL;
    if (object && object->kind->free_self) object->kind->free_self(object->self);
  }
  mlfab__comm_sweep(comm);
  mlfab__plain_free(comm);
  mlfab__free(comm->env, comm->list, MLFAB__MEMBERSHIP_MEMBERS_MAX * sizeof *comm->list);
  mlfab__comm_no_limit(comm);
  mlfab__pool_drain(&comm->pool);
  memset(comm, 0, sizeof *comm);
}

/* --- frames --- */

/* Server 0 asks if this worker has called a call or round, and which. */
static void comm_on_ask(mlfab__comm *comm, const mlfab__membership_call *in) {
  mlfab__membership_tell tell = {.epoch = in->epoch, .channel = in->channel, .number = in->number};
  if (in->epoch != comm->epoch || comm->phase != MLFAB__COMM_IN) return;
  if (in->channel == 0) {
    mlfab__comm_past past;
    tell.called = in->number < mlfab__comm_called(comm);
    if (mlfab__plain_past(comm, in->number, &past)) {
      tell.signature = past.signature;
      mlfab__plain_words(tell.text, &past, comm->config->workers);
    }
  } else {
    const mlfab__comm_object *object = mlfab__comm_channel_find(comm, in->channel);
    const mlfab__engine_run *run = mlfab__engine_find(comm, in->channel, in->number);
    tell.called =
        object && (!object->kind->called || object->kind->called(object->self, in->number));
    snprintf(tell.text, sizeof tell.text, "round %llu of object %u", (unsigned long long)in->number,
             in->channel);
    if (run) tell.signature = run->signature;
  }
  MLFAB__POST(&comm->up, 0, MLFAB__MEMBERSHIP_TELL, membership_tell, &tell);
}

/* Server 0 reports who has not called a call or round, or epoch 0: the epoch to come. */
static void comm_on_missing(mlfab__comm *comm, const mlfab__membership_missing *in) {
  if (in->epoch == 0) {
    if (comm->phase == MLFAB__COMM_ASKED || comm->phase == MLFAB__COMM_LISTED ||
        comm->phase == MLFAB__COMM_READY || mlfab__comm_moved(comm)) {
      comm->missing = in->rank;
      comm->missing_waits = in->waits != 0;
      comm->others[0] = 0;
      if (in->text[0])
        snprintf(comm->others, sizeof comm->others,
                 "has not made this call since: its last was %.200s", in->text);
    }
    return;
  }
  if (in->epoch != comm->epoch || comm->phase != MLFAB__COMM_IN) return;
  mlfab__comm_object *object = mlfab__comm_channel_find(comm, in->channel);
  mlfab__comm_slot *slot = in->channel ? NULL : mlfab__comm_slot_of(comm, in->number);
  if (object) object->missing = in->rank;
  if (slot) slot->missing = in->rank, slot->missing_waits = in->waits != 0;
}

/* Returns 0, FRAME, or 1: the frame belongs to another role. */
static int comm_take_frame(mlfab__comm *comm, const mlfab__frame_in *frame) {
#define COMM_FRAME(TYPE, name, handle)                                                     \
  case TYPE: {                                                                             \
    mlfab__##name in;                                                                      \
    if (mlfab__decode_##name(frame->meta, frame->meta_bytes, &in)) return MLFAB_ERR_FRAME; \
    handle(comm, &in);                                                                     \
    return 0;                                                                              \
  }
  switch (frame->type) {
    case MLFAB__MEMBERSHIP_LIST:
      return mlfab__epoch_on_list(comm, frame);
    case MLFAB__TREE_PLAN:
      return mlfab__plain_on_tree(comm, frame);
    case MLFAB__MEMBERSHIP_OWED:
      return mlfab__comm_on_owed(comm, frame);
      COMM_FRAME(MLFAB__MEMBERSHIP_FREEZE, membership_finish, mlfab__comm_on_freeze)
      COMM_FRAME(MLFAB__MEMBERSHIP_SETTLE, membership_finish, mlfab__comm_on_settle)
      COMM_FRAME(MLFAB__MEMBERSHIP_GO, membership_go, mlfab__epoch_on_go)
      COMM_FRAME(MLFAB__MEMBERSHIP_READY, membership_ready, mlfab__epoch_on_meet)
      COMM_FRAME(MLFAB__MEMBERSHIP_OVER, membership_over, mlfab__epoch_on_over)
      COMM_FRAME(MLFAB__MEMBERSHIP_LEFT, membership_leave, mlfab__epoch_on_left)
      COMM_FRAME(MLFAB__MEMBERSHIP_ASK, membership_call, comm_on_ask)
      COMM_FRAME(MLFAB__MEMBERSHIP_MISSING, membership_missing, comm_on_missing)
    default:
      return 1;
  }
#undef COMM_FRAME
}

MLFAB__INTERNAL int mlfab__comm_server_frame(mlfab__comm *comm, const mlfab__frame_in *frame,
                                             uint64_t now_ns) {
  mlfab__comm_enter(comm, now_ns);
  int code = comm_take_frame(comm, frame);
  mlfab__comm_exit(comm);
  if (code == MLFAB_ERR_FRAME)
    comm->up.drop(comm->up.self, 0, MLFAB_ERR_FRAME,
                  "a frame of the membership that does not parse");
  return code != 1;
}

MLFAB__INTERNAL int mlfab__comm_member_frame(mlfab__comm *comm, uint32_t rank,
                                             const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__comm_enter(comm, now_ns);
  int ours = mlfab__stream_member_frame(&comm->streams, rank, frame);
  mlfab__comm_exit(comm);
  return ours;
}

MLFAB__INTERNAL int mlfab__comm_peer_frame(mlfab__comm *comm, uint32_t rank,
                                           const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__comm_enter(comm, now_ns);
  int ours = mlfab__stream_peer_frame(&comm->streams, rank, frame);
  if (comm->finishing) comm->due |= MLFAB__COMM_BEGIN; /* it may be the last acknowledgement */
  mlfab__comm_exit(comm);
  return ours;
}

MLFAB__INTERNAL void mlfab__comm_hello(mlfab__comm *comm) {
  if (!comm->dead && !mlfab__comm_alone(comm)) mlfab__epoch_say_again(comm);
}

MLFAB__INTERNAL int mlfab__comm_quiet(const void *self) {
  const mlfab__comm *comm = self;
  if (!mlfab__comm_stands(comm)) return 1;
  if (comm->first < comm->end || mlfab__engine_moves(comm)) return 0;
  if (comm->finishing && comm->phase == MLFAB__COMM_IN && !mlfab__comm_moved(comm) &&
      !mlfab__comm_alone(comm) && mlfab__comm_called(comm) <= comm->limit)
    return 0;
  return mlfab__streams_quiet(&comm->streams);
}

/* --- calls that are open for long --- */

/* Reports the first call if it seems to be stuck: later calls may wait for it. */
static void comm_look_at_calls(mlfab__comm *comm) {
  mlfab__comm_slot *first = comm->first < comm->end ? *mlfab__comm_place(comm, comm->first) : NULL;
  if (!first || comm->now_ns - first->stuck_ns < comm->config->heartbeat_ns) return;
  first->stuck_ns = comm->now_ns;
  mlfab__comm_stuck(comm, 0, mlfab__comm_number(first));
}

/* Does the same for an object with an open request. */
static void comm_look_at_object(mlfab__comm *comm, mlfab__comm_object *object,
                                const mlfab__request *request) {
  uint64_t beat = comm->config->heartbeat_ns;
  uint64_t since = mlfab__max(request->started_ns, comm->in_ns);
  const mlfab__engine_run *run = mlfab__engine_oldest(comm, object->channel);
  if (comm->left && comm->now_ns - mlfab__max(since, comm->left_ns) >= 2 * beat) {
    mlfab__comm_fail(comm, MLFAB_ERR_PEER_CLOSED, comm->left_rank, "worker %d has left",
                     (int)comm->left_rank);
  } else if ((run || object->kind->frame) &&
             comm->now_ns - mlfab__max(since, object->stuck_ns) >= beat) {
    object->stuck_ns = comm->now_ns;
    mlfab__comm_stuck(comm, object->channel, run ? run->number : object->waits_for);
  }
}

static void comm_look_at_objects(mlfab__comm *comm) {
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++) {
    mlfab__comm_object *object = comm->objects[i];
    uint32_t slot = object ? MLFAB__COMM_REQUEST(object->id) : 0;
    mlfab__request *r = NULL;
    while (object && !comm->failing &&
           (r = mlfab__request_of(comm->requests, MLFAB__REQUEST_COLLECTIVE, slot, r)))
      comm_look_at_object(comm, object, r);
  }
}

MLFAB__INTERNAL int mlfab__comm_peer_missing(mlfab__comm *comm, uint32_t rank, const char *why,
                                             uint64_t now_ns) {
  char waited[24];
  uint64_t since;
  if (!comm->streams.epoch || !mlfab__stream_peer_missing(&comm->streams, rank, now_ns, &since))
    return 0;
  if (now_ns - since >= MLFAB__COMM_PATIENCE * comm->config->heartbeat_ns) {
    comm->now_ns = now_ns;
    mlfab__comm_fail(comm, MLFAB_ERR_PEER_DEAD, (int32_t)rank,
                     "worker %u cannot be reached, says worker %u after %s%s%.100s", rank,
                     comm->rank, mlfab__duration(waited, now_ns - since), *why ? ": " : "", why);
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__comm_waits(const void *self) {
  const mlfab__comm *comm = self;
  return comm->phase != MLFAB__COMM_OUT || comm->later || comm->streams.epoch;
}

MLFAB__INTERNAL void mlfab__comm_tick(void *self, uint64_t now_ns) {
  mlfab__comm *comm = self;
  mlfab__comm_enter(comm, now_ns);
  if (comm->phase == MLFAB__COMM_IN) {
    comm_look_at_calls(comm);
    comm_look_at_objects(comm);
  }
  if (comm->list_lost) {
    comm->list_lost = 0;
    if ((comm->phase == MLFAB__COMM_ASKED && (!comm->newcomer || comm->apart)) ||
        mlfab__comm_moved(comm))
      mlfab__comm_ask(comm, comm->over_epoch);
  }
  if (comm->later && comm->phase == MLFAB__COMM_OUT) {
    comm->later = 0;
    mlfab__epoch_join(comm);
  }
  if (comm->streams.epoch) mlfab__streams_tick(&comm->streams);
  comm->due |= MLFAB__COMM_BEGIN; /* streams may have become quiet */
  mlfab__comm_exit(comm);
}
