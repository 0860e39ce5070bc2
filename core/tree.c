/* tree.c - allreduce at a worker: its share goes up, the sum comes down. See tree.h. */
#include "tree.h"

#include <stdio.h>

MLFAB__INTERNAL void mlfab__tree_init(mlfab__tree *tree, mlfab__env *env,
                                      const mlfab_config *config, uint32_t rank,
                                      const mlfab__port *up, const mlfab__port *hop,
                                      const mlfab__port *down, mlfab__requests *requests) {
  memset(tree, 0, sizeof *tree);
  tree->env = env;
  tree->config = config;
  tree->rank = rank;
  tree->up = *up;
  tree->hop = *hop;
  tree->down = *down;
  tree->requests = requests;
  tree->missing = MLFAB_NO_RANK;
}

MLFAB__INTERNAL void mlfab__tree_free(mlfab__tree *tree) {
  if (!tree->env) return;
  mlfab__free(tree->env, tree->peers, tree->config->workers * sizeof *tree->peers);
  mlfab__free(tree->env, tree->children, tree->child_room * sizeof *tree->children);
  mlfab__free(tree->env, tree->takers, tree->taker_room * sizeof *tree->takers);
  mlfab__free_aligned(tree->env, tree->stage, tree->stage_room);
  memset(tree, 0, sizeof *tree);
}

/* --- the call, and its end --- */

/* Tells server 0 how the call stands; said again on a new link. */
MLFAB__INTERNAL void mlfab__tree_tell(mlfab__tree *tree) {
  mlfab__reduce reduce = {.ask = tree->asks,
                          .count = tree->bytes / tree->width,
                          .dtype = tree->dtype,
                          .code = tree->gave_up,
                          .rank = tree->blamed};
  uint8_t meta[64];
  if (tree->gave_up) {
    reduce.state = MLFAB__REDUCE_GIVE_UP;
  } else if (tree->number && tree->have == tree->bytes) {
    reduce.state = MLFAB__REDUCE_HAVE;
  }
  tree->up.post(tree->up.self, 0, MLFAB__REDUCE, meta, mlfab__encode_reduce(meta, &reduce));
}

static void tree_forget_lists(mlfab__tree *tree) {
  for (uint32_t i = 0; i < tree->nchildren; i++) tree->peers[tree->children[i].rank].child = 0;
  for (uint32_t i = 0; i < tree->ntakers; i++) tree->peers[tree->takers[i].rank].taker = 0;
  tree->nchildren = tree->ntakers = 0;
}

/* The caller gets its array back: nothing of it is lent any more, and no frame finds a place. */
static void tree_leave(mlfab__tree *tree) {
  if (tree->lent > 0) tree->hop.detach(tree->hop.self, tree->parent, mlfab__tree_token(tree));
  for (uint32_t i = 0; i < tree->ntakers; i++) {
    if (tree->takers[i].lent > 0)
      tree->down.detach(tree->down.self, tree->takers[i].rank, mlfab__tree_token(tree));
  }
  tree_forget_lists(tree);
  tree->lent = 0;
  tree->number = tree->request = 0;
  tree->data = NULL;
}

static void tree_give_up(mlfab__tree *tree, int32_t code, uint32_t rank) {
  if (tree->gave_up) return;
  tree->gave_up = code;
  tree->blamed = (int32_t)rank;
  mlfab__tree_tell(tree);
}

static int tree_check(const mlfab__tree *tree, const void *data, uint64_t count, int dtype,
                      mlfab_error *error) {
  uint32_t width = mlfab__dtype_bytes(dtype);
  if (!data || count == 0)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0, "allreduce: no data");
  if (!width)
    return mlfab__error(error, MLFAB_ERR_DTYPE, MLFAB_NO_RANK, 0, 0,
                        "allreduce: %d is not an element type", dtype);
  if ((uintptr_t)data % width)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "allreduce: data is not aligned to its elements");
  if (count > tree->config->model_max_bytes / width)
    return mlfab__error(error, MLFAB_ERR_LIMIT, MLFAB_NO_RANK, 0, 0,
                        "allreduce: %llu elements, the limit is %llu bytes (model_max_bytes)",
                        (unsigned long long)count,
                        (unsigned long long)tree->config->model_max_bytes);
  if (tree->dead)
    return mlfab__error(error, MLFAB_ERR_PEER_DEAD, 0, 1, 0, "allreduce: server 0 is dead");
  if (tree->request)
    return mlfab__error(error, MLFAB_ERR_AGAIN, MLFAB_NO_RANK, 0, 0,
                        "allreduce: another one is under way");
  return 0;
}

MLFAB__INTERNAL int mlfab__tree_start(mlfab__tree *tree, void *data, uint64_t count, int dtype,
                                      uint64_t timeout_ns, uint64_t now_ns,
                                      mlfab_request *request_p, mlfab_error *error) {
  int code = tree_check(tree, data, count, dtype, error);
  if (code) return code;
  if (!tree->peers)
    tree->peers = mlfab__alloc_array(tree->env, tree->config->workers, sizeof *tree->peers);
  if (!tree->peers)
    return mlfab__error(error, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, 0, 0, "allreduce: out of memory");
  mlfab__request *request = mlfab__request_open(tree->requests, MLFAB__REQUEST_ALLREDUCE, 0, now_ns,
                                                timeout_ns ? timeout_ns : tree->config->timeout_ns);
  if (!request)
    return mlfab__error(error, MLFAB_ERR_AGAIN, MLFAB_NO_RANK, 0, 0,
                        "allreduce: too many requests are open");
  tree->request = *request_p = request->id;
  tree->asks++;
  tree->data = data;
  tree->dtype = (uint32_t)dtype;
  tree->width = mlfab__dtype_bytes(dtype);
  tree->bytes = count * tree->width;
  tree->missing = MLFAB_NO_RANK;
  tree->gave_up = 0;
  mlfab__tree_tell(tree);
  return 0;
}

/* Ends the call with what server 0, or nobody, has to say. */
static void tree_end(mlfab__tree *tree, int code, int32_t rank, int is_server, uint64_t now_ns,
                     const char *why) {
  mlfab__request *request = mlfab__request_find(tree->requests, tree->request);
  tree_leave(tree);
  if (!request) return;
  if (rank == MLFAB_NO_RANK) {
    mlfab__request_finish(tree->requests, request, code, rank, 0, now_ns, "allreduce: %s", why);
  } else {
    mlfab__request_finish(tree->requests, request, code, rank, is_server, now_ns,
                          "allreduce: %s %d%s %s", is_server ? "server" : "worker", (int)rank,
                          is_server ? "" : ":", why);
  }
}

/* Whom this call waits for, or NO_RANK. */
static int32_t tree_awaits(const mlfab__tree *tree) {
  if (!tree->number || tree->have == tree->bytes) return tree->missing;
  for (uint32_t i = 0; i < tree->nchildren; i++) {
    if (tree->children[i].added < tree->bytes) return (int32_t)tree->children[i].rank;
  }
  return mlfab__tree_is_root(tree) ? MLFAB_NO_RANK : (int32_t)tree->giver;
}

MLFAB__INTERNAL void mlfab__tree_withdraw(mlfab__tree *tree, mlfab__request *request, int code,
                                          uint64_t now_ns) {
  int32_t awaited = tree_awaits(tree);
  char waited[24];
  mlfab__duration(waited, now_ns - request->started_ns);
  const char *what = code == MLFAB_ERR_TIMEOUT ? "the deadline passed" : "cancelled";
  /* The others are told whom it waited for in vain, but not whom it did not want to wait for. */
  int blames = code == MLFAB_ERR_TIMEOUT && awaited != MLFAB_NO_RANK;
  tree_give_up(tree, code, blames ? (uint32_t)awaited : tree->rank);
  tree_leave(tree);
  if (awaited == MLFAB_NO_RANK) {
    mlfab__request_finish(tree->requests, request, code, 0, 1, now_ns,
                          "allreduce: %s after %s awaiting server 0", what, waited);
  } else {
    mlfab__request_finish(tree->requests, request, code, awaited, 0, now_ns,
                          "allreduce: %s after %s awaiting worker %d", what, waited, (int)awaited);
  }
}

MLFAB__INTERNAL void mlfab__tree_hello(mlfab__tree *tree) {
  /* What was given up may not have been heard. */
  if (tree->request || tree->gave_up) mlfab__tree_tell(tree);
}

MLFAB__INTERNAL void mlfab__tree_dead(mlfab__tree *tree, uint64_t now_ns) {
  tree->dead = 1;
  if (tree->request) tree_end(tree, MLFAB_ERR_PEER_DEAD, 0, 1, now_ns, "is dead");
}

/* --- links --- */

/* A child or taker is on a link that is new to it; perhaps before we know of this tree. */
static void tree_met(mlfab__tree *tree, uint32_t peer) {
  const mlfab__tree_peer *p = &tree->peers[peer];
  mlfab__tree_taker *taker = mlfab__tree_taker_of(tree, peer);
  if (!tree->number || p->joined != tree->number) return;
  if (mlfab__tree_child_of(tree, peer)) mlfab__tree_credit(tree, p->child - 1, 1);
  if (!taker) return;
  taker->given = mlfab__min(p->have, tree->have);
  tree->down.ready(tree->down.self, peer);
}

static void tree_join(mlfab__tree *tree, uint32_t peer) {
  mlfab__tree_join join = {tree->number, tree->have};
  uint8_t meta[32];
  tree->hop.post(tree->hop.self, peer, MLFAB__TREE_JOIN, meta,
                 mlfab__encode_tree_join(meta, &join));
}

MLFAB__INTERNAL void mlfab__tree_hop_up(mlfab__tree *tree, uint32_t peer) {
  if (!mlfab__tree_calls(tree, peer)) return;
  if (peer == tree->parent) tree->parent_since_ns = 0;
  if (peer == tree->giver) tree->giver_since_ns = 0;
  tree_join(tree, peer);
}

MLFAB__INTERNAL void mlfab__tree_hop_lost(mlfab__tree *tree, uint32_t peer) {
  if (!mlfab__tree_calls(tree, peer) || peer != tree->parent) return;
  tree->lent = 0;
  tree->granted = 0;
  tree->resumes = 1;
}

MLFAB__INTERNAL int mlfab__tree_hop_missing(mlfab__tree *tree, uint32_t peer, uint64_t now_ns) {
  if (!mlfab__tree_calls(tree, peer)) return 0;
  uint64_t *since = peer == tree->parent ? &tree->parent_since_ns : &tree->giver_since_ns;
  if (*since == 0) *since = now_ns;
  if (now_ns - *since >= MLFAB__TREE_PATIENCE * tree->config->heartbeat_ns)
    tree_give_up(tree, MLFAB_ERR_PEER_DEAD, peer);
  return 1;
}

MLFAB__INTERNAL void mlfab__tree_member_lost(mlfab__tree *tree, uint32_t peer) {
  mlfab__tree_taker *taker = mlfab__tree_taker_of(tree, peer);
  if (!tree->peers) return;
  tree->peers[peer].joined = 0;
  if (taker) taker->lent = 0;
}

/* --- frames --- */

static int tree_grow(mlfab__tree *tree, const mlfab__tree_place *place) {
  uint32_t children = place->children + 1, takers = place->takers + 1;
  if (children > tree->child_room) {
    mlfab__free(tree->env, tree->children, tree->child_room * sizeof *tree->children);
    tree->children = mlfab__alloc_array(tree->env, children, sizeof *tree->children);
    tree->child_room = tree->children ? children : 0;
  }
  if (takers > tree->taker_room) {
    mlfab__free(tree->env, tree->takers, tree->taker_room * sizeof *tree->takers);
    tree->takers = mlfab__alloc_array(tree->env, takers, sizeof *tree->takers);
    tree->taker_room = tree->takers ? takers : 0;
  }
  return tree->children && tree->takers ? 0 : MLFAB_ERR_MEMORY;
}

/* Rings for all children but the first. Without memory for them nothing comes early. */
static void tree_rings(mlfab__tree *tree) {
  uint64_t rings = tree->nchildren > 1 ? tree->nchildren - 1 : 0;
  tree->ring = rings ? mlfab__min(MLFAB__TREE_RING_MAX, MLFAB__TREE_STAGE / rings) : 0;
  tree->ring = mlfab__min(tree->ring, tree->bytes + 63) / 64 * 64;
  uint64_t room = rings * tree->ring;
  if (room <= tree->stage_room) return;
  mlfab__free_aligned(tree->env, tree->stage, tree->stage_room);
  tree->stage = mlfab__alloc_aligned(tree->env, room);
  tree->stage_room = tree->stage ? room : 0;
  if (!tree->stage) tree->ring = 0;
}

/* Enters the lists. Errors: FRAME. */
static int tree_lists(mlfab__tree *tree, const mlfab__tree_place *place, const uint32_t *ranks) {
  for (uint32_t i = 0; i < place->children + place->takers; i++) {
    mlfab__tree_peer *peer = ranks[i] < tree->config->workers ? &tree->peers[ranks[i]] : NULL;
    int child = i < place->children;
    if (!peer || ranks[i] == tree->rank || (child ? peer->child : peer->taker))
      return MLFAB_ERR_FRAME;
    if (child) {
      tree->children[tree->nchildren] = (mlfab__tree_child){.rank = ranks[i]};
      peer->child = ++tree->nchildren;
    } else {
      tree->takers[tree->ntakers] = (mlfab__tree_taker){.rank = ranks[i]};
      peer->taker = ++tree->ntakers;
    }
  }
  return 0;
}

static int tree_fits(const mlfab__tree *tree, uint32_t to) {
  return to < tree->config->workers && to != tree->rank;
}

/* The tree stands: calls go out, and the bytes that are complete already. */
static void tree_begin(mlfab__tree *tree, const mlfab__tree_place *place) {
  tree->number = place->number;
  tree->parent = place->parent;
  tree->giver = place->giver;
  tree->parent_since_ns = tree->giver_since_ns = 0;
  tree->resumes = 1;
  tree->granted = tree->sent = tree->sent_most = tree->complete = tree->have = 0;
  tree->missing = MLFAB_NO_RANK;
  tree_rings(tree);
  for (uint32_t i = 0; i < tree->nchildren; i++) tree_met(tree, tree->children[i].rank);
  for (uint32_t i = 0; i < tree->ntakers; i++) {
    if (!mlfab__tree_child_of(tree, tree->takers[i].rank)) tree_met(tree, tree->takers[i].rank);
  }
  if (!mlfab__tree_is_root(tree)) {
    tree_join(tree, tree->parent);
    tree->hop.ready(tree->hop.self, tree->parent);
    if (tree->giver != tree->parent) {
      tree_join(tree, tree->giver);
      tree->hop.ready(tree->hop.self, tree->giver);
    }
  }
  mlfab__tree_progress(tree);
}

static void tree_placed(mlfab__tree *tree, const mlfab__frame_in *frame) {
  mlfab__tree_place place;
  uint32_t *ranks = NULL;
  int code = mlfab__decode_tree_place(frame->meta, frame->meta_bytes, &place, NULL);
  if (!code && (!tree->request || place.ask != tree->asks)) return; /* of a call that is over */
  if (!code && tree->number == place.number) return;                /* said again */
  int root = place.parent == MLFAB__NO_NODE && place.giver == MLFAB__NO_NODE;
  uint32_t n = code ? 0 : place.children + place.takers;
  if (!code && (tree->number || place.number == 0 || (root && n == 0) ||
                (!root && (!tree_fits(tree, place.parent) || !tree_fits(tree, place.giver)))))
    code = MLFAB_ERR_FRAME;
  if (!code && n > 0) ranks = mlfab__alloc_array(tree->env, n, sizeof *ranks);
  if (!code && ((n > 0 && !ranks) || tree_grow(tree, &place))) {
    tree_give_up(tree, MLFAB_ERR_MEMORY, tree->rank);
  } else if (!code) {
    if (n > 0) mlfab__decode_tree_place(frame->meta, frame->meta_bytes, &place, ranks);
    code = tree_lists(tree, &place, ranks);
    if (!code) tree_begin(tree, &place);
    if (code) tree_forget_lists(tree);
  }
  mlfab__free(tree->env, ranks, n * sizeof *ranks);
  if (!code) return;
  tree->up.drop(tree->up.self, 0, MLFAB_ERR_FRAME, "a TREE that does not fit this node");
  tree_give_up(tree, MLFAB_ERR_FRAME, tree->rank);
}

static const char *tree_why(int code) {
  switch (code) {
    case MLFAB_ERR_PEER_DEAD:
      return "dead, says server 0";
    case MLFAB_ERR_PEER_CLOSED:
      return "has closed";
    case MLFAB_ERR_TIMEOUT:
      return "another worker's deadline passed while it waited for this one";
    case MLFAB_ERR_CANCELLED:
      return "has withdrawn its call";
    default:
      return mlfab_error_text(code);
  }
}

/* What the one to blame calls it with, and what this worker or the others do. */
static const char *tree_shape(const mlfab__tree *tree, const mlfab__reduce_done *in,
                              char text[160]) {
  int mine = in->rank == (int32_t)tree->rank;
  unsigned long long own = tree->bytes / mlfab__max(tree->width, 1), other = in->count;
  const char *own_type = mlfab__dtype_name((int)tree->dtype);
  const char *other_type = mlfab__dtype_name((int)in->dtype);
  snprintf(text, 160, "calls it with %llu %s, %s with %llu %s", mine ? own : other,
           mine ? own_type : other_type, mine ? "others" : "this worker", mine ? other : own,
           mine ? other_type : own_type);
  return text;
}

static void tree_over(mlfab__tree *tree, const mlfab__reduce_done *in, uint64_t now_ns) {
  if (in->ask != tree->asks) return;
  if (in->code == MLFAB_ERR_AGAIN) {
    tree->missing = in->rank;
    return;
  }
  int32_t code = in->code;
  char text[160];
  tree->gave_up = 0; /* heard */
  if (code == 0 && tree->number && tree->have < tree->bytes) code = MLFAB_ERR_INTERNAL;
  if (!tree->request) return;
  const char *why = code == MLFAB_ERR_SHAPE ? tree_shape(tree, in, text) : tree_why(code);
  tree_end(tree, code, in->rank, 0, now_ns, why);
}

MLFAB__INTERNAL int mlfab__tree_server_frame(mlfab__tree *tree, const mlfab__frame_in *frame,
                                             uint64_t now_ns) {
  mlfab__reduce_done done;
  if (frame->type == MLFAB__TREE) {
    tree_placed(tree, frame);
  } else if (frame->type != MLFAB__REDUCE_DONE) {
    return 0;
  } else if (mlfab__decode_reduce_done(frame->meta, frame->meta_bytes, &done)) {
    tree->up.drop(tree->up.self, 0, MLFAB_ERR_FRAME, "a REDUCE_DONE that does not parse");
  } else {
    tree_over(tree, &done, now_ns);
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__tree_hop_frame(mlfab__tree *tree, uint32_t peer,
                                          const mlfab__frame_in *frame) {
  if (frame->type == MLFAB__TREE_GRANT) {
    mlfab__tree_granted(tree, peer, frame);
  } else if (frame->type == MLFAB__TREE_DOWN) {
    mlfab__tree_from_giver(tree, peer, frame);
  } else {
    return 0;
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__tree_member_frame(mlfab__tree *tree, uint32_t peer,
                                             const mlfab__frame_in *frame) {
  mlfab__tree_join join;
  if (frame->type == MLFAB__TREE_UP) {
    mlfab__tree_from_child(tree, peer, frame);
  } else if (frame->type != MLFAB__TREE_JOIN) {
    return 0;
  } else if (mlfab__decode_tree_join(frame->meta, frame->meta_bytes, &join)) {
    tree->down.drop(tree->down.self, peer, MLFAB_ERR_FRAME, "a TREE_JOIN that does not parse");
  } else if (tree->peers) {
    tree->peers[peer].joined = join.number;
    tree->peers[peer].have = join.have;
    tree_met(tree, peer);
  }
  return 1;
}
