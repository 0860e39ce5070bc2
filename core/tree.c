/* tree.c - allreduce at a worker: its share goes up, the sum comes down. See tree.h. */
#include "tree.h"

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

static int tree_is_root(const mlfab__tree *tree) { return tree->parent == MLFAB__NO_NODE; }

/* Bulks that are lent in this allreduce, on any link. */
static uint64_t tree_token(const mlfab__tree *tree) {
  return MLFAB__TREE_TOKEN | (tree->number & 0xffffffffu);
}

static mlfab__tree_child *tree_child(mlfab__tree *tree, uint32_t peer) {
  uint32_t place = tree->number && tree->peers ? tree->peers[peer].child : 0;
  return place ? &tree->children[place - 1] : NULL;
}

static mlfab__tree_taker *tree_taker(mlfab__tree *tree, uint32_t peer) {
  uint32_t place = tree->number && tree->peers ? tree->peers[peer].taker : 0;
  return place ? &tree->takers[place - 1] : NULL;
}

/* --- the call, and its end --- */

/* Tells server 0 how the call stands; said again on a new link. */
static void tree_tell(mlfab__tree *tree) {
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
  if (tree->lent > 0) tree->hop.detach(tree->hop.self, tree->parent, tree_token(tree));
  for (uint32_t i = 0; i < tree->ntakers; i++) {
    if (tree->takers[i].lent > 0)
      tree->down.detach(tree->down.self, tree->takers[i].rank, tree_token(tree));
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
  tree_tell(tree);
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
  tree_tell(tree);
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
                          "allreduce: %s %d: %s", is_server ? "server" : "worker", (int)rank, why);
  }
}

/* Whom this call waits for, or NO_RANK. */
static int32_t tree_awaits(const mlfab__tree *tree) {
  if (!tree->number || tree->have == tree->bytes) return tree->missing;
  for (uint32_t i = 0; i < tree->nchildren; i++) {
    if (tree->children[i].added < tree->bytes) return (int32_t)tree->children[i].rank;
  }
  return tree_is_root(tree) ? MLFAB_NO_RANK : (int32_t)tree->giver;
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
  if (tree->request || tree->gave_up) tree_tell(tree);
}

MLFAB__INTERNAL void mlfab__tree_dead(mlfab__tree *tree, uint64_t silent_ns, uint64_t now_ns) {
  char text[64];
  memcpy(text, "dead, silent for ", 18);
  mlfab__duration(text + 17, silent_ns);
  tree->dead = 1;
  if (tree->request) tree_end(tree, MLFAB_ERR_PEER_DEAD, 0, 1, now_ns, text);
}

/* --- the way up --- */

/* What of the children's shares may be added: the k-th waits for the one before it. */
static uint64_t tree_limit(const mlfab__tree *tree, uint32_t k) {
  return k == 0 || MLFAB__PLANTED(30) ? tree->bytes : tree->children[k - 1].added;
}

static void tree_add(mlfab__tree *tree, mlfab__tree_child *child, const void *bytes, uint64_t n) {
  uint8_t *at = tree->data + child->added;
  /* Sums that are not finite are everybody's: nobody is refused. */
  (void)mlfab__reduce_add((int)tree->dtype, at, at, bytes, 1.0, n / tree->width, 0);
  child->added += n;
}

static uint8_t *tree_ring(const mlfab__tree *tree, uint32_t k) {
  return tree->stage + (uint64_t)(k - 1) * tree->ring;
}

/* Puts what cannot be added yet into the child's ring. */
static void tree_keep(mlfab__tree *tree, uint32_t k, uint64_t offset, const uint8_t *bytes,
                      uint64_t n) {
  while (n > 0) {
    uint64_t at = offset % tree->ring, part = mlfab__min(n, tree->ring - at);
    memcpy(tree_ring(tree, k) + at, bytes, part);
    offset += part;
    bytes += part;
    n -= part;
  }
}

/* Adds what is in the rings as far as it goes, from the k-th child on. Returns the first that it changed nothing of. */
static uint32_t tree_drain(mlfab__tree *tree, uint32_t k) {
  for (; k < tree->nchildren; k++) {
    mlfab__tree_child *child = &tree->children[k];
    uint64_t before = child->added, end = mlfab__min(child->received, tree_limit(tree, k));
    while (child->added < end) {
      uint64_t at = child->added % tree->ring;
      tree_add(tree, child, tree_ring(tree, k) + at,
               mlfab__min(end - child->added, tree->ring - at));
    }
    if (child->added == before) break;
  }
  return k;
}

/* How far a child may send: no further ahead of the one before it than its ring takes, nor of the last than the window. */
static void tree_grant(mlfab__tree *tree, uint32_t k, int resume) {
  mlfab__tree_child *child = &tree->children[k];
  uint64_t upto = mlfab__min(tree->bytes, tree_limit(tree, k) + (k > 0 ? tree->ring : 0));
  upto = mlfab__min(upto, tree->complete + MLFAB__TREE_WINDOW);
  if (tree->peers[child->rank].joined != tree->number) return;
  /* Not for every crumb, unless it is the last or the child has nothing to send. */
  uint64_t step = mlfab__min(tree->ring ? tree->ring / 2 : 1, MLFAB__TREE_WINDOW / 4);
  int worth =
      upto - child->granted >= step || upto == tree->bytes || child->granted == child->received;
  if (!resume && (upto <= child->granted || !worth)) return;
  child->granted = mlfab__max(child->granted, upto);
  mlfab__tree_grant grant = {tree->number, child->received, child->granted};
  uint8_t meta[32];
  tree->down.post(tree->down.self, child->rank, MLFAB__TREE_GRANT, meta,
                  mlfab__encode_tree_grant(meta, &grant));
}

/* More of the sum is here: it goes on to those who take it from us. */
static void tree_has(mlfab__tree *tree, uint64_t have) {
  tree->have = have;
  for (uint32_t i = 0; i < tree->ntakers; i++)
    tree->down.ready(tree->down.self, tree->takers[i].rank);
  if (have == tree->bytes) tree_tell(tree);
}

/* More is complete here: all children, in their order, have added it. */
static void tree_progress(mlfab__tree *tree) {
  uint64_t complete = tree->nchildren ? tree->children[tree->nchildren - 1].added : tree->bytes;
  if (complete == tree->complete) return;
  tree->complete = complete;
  if (tree_is_root(tree)) {
    tree_has(tree, complete);
  } else {
    tree->hop.ready(tree->hop.self, tree->parent);
  }
}

static void tree_took(mlfab__tree *tree, uint32_t k, const uint8_t *bytes, uint64_t n) {
  mlfab__tree_child *child = &tree->children[k];
  uint64_t direct = 0, before = tree->complete;
  if (child->added == child->received) direct = mlfab__min(n, tree_limit(tree, k) - child->added);
  if (direct > 0) tree_add(tree, child, bytes, direct);
  if (n > direct) tree_keep(tree, k, child->received + direct, bytes + direct, n - direct);
  child->received += n;
  uint32_t last = direct > 0 ? tree_drain(tree, k + 1) : k;
  tree_progress(tree);
  /* The credit of those changes whose predecessor has moved; of all, when the window has. */
  int window = tree->complete != before;
  for (uint32_t i = window ? 0 : k; i < tree->nchildren && (window || i <= last); i++)
    tree_grant(tree, i, 0);
}

/* Bytes of a child's share. */
static void tree_from_child(mlfab__tree *tree, uint32_t peer, const mlfab__frame_in *frame) {
  mlfab__tree_bytes in;
  const mlfab__tree_child *child = tree_child(tree, peer);
  if (mlfab__decode_tree_bytes(frame->meta, frame->meta_bytes, &in)) {
    tree->down.drop(tree->down.self, peer, MLFAB_ERR_FRAME, "a TREE_UP that does not parse");
    return;
  }
  if (!tree->number || in.number != tree->number) return;
  if (!child || tree->peers[peer].joined != tree->number || !frame->bulk ||
      in.offset != child->received || frame->bulk_bytes > child->granted - in.offset ||
      frame->bulk_bytes % tree->width) {
    tree->down.drop(tree->down.self, peer, MLFAB_ERR_FRAME, "a share's bytes out of place");
    return;
  }
  tree_took(tree, tree->peers[peer].child - 1, frame->bulk, frame->bulk_bytes);
}

static void tree_granted(mlfab__tree *tree, uint32_t peer, const mlfab__frame_in *frame) {
  mlfab__tree_grant in;
  if (mlfab__decode_tree_grant(frame->meta, frame->meta_bytes, &in)) {
    tree->hop.drop(tree->hop.self, peer, MLFAB_ERR_FRAME, "a TREE_GRANT that does not parse");
    return;
  }
  if (!tree->number || in.number != tree->number || peer != tree->parent) return;
  uint64_t from = tree->resumes ? in.from : tree->sent;
  if (from > tree->sent_most || from % tree->width || in.upto < from || in.upto > tree->bytes ||
      in.upto % tree->width) {
    tree->hop.drop(tree->hop.self, peer, MLFAB_ERR_FRAME, "a grant out of place");
    return;
  }
  tree->resumes = 0;
  tree->sent = from;
  tree->granted = mlfab__max(tree->granted, in.upto);
  tree->hop.ready(tree->hop.self, peer);
}

/* --- the way down --- */

/* Bytes of the sum: they take the place of the share that is in them. */
static void tree_from_giver(mlfab__tree *tree, uint32_t peer, const mlfab__frame_in *frame) {
  mlfab__tree_bytes in;
  if (mlfab__decode_tree_bytes(frame->meta, frame->meta_bytes, &in)) {
    tree->hop.drop(tree->hop.self, peer, MLFAB_ERR_FRAME, "a TREE_DOWN that does not parse");
    return;
  }
  if (!tree->number || in.number != tree->number) return;
  if (peer != tree->giver || !frame->bulk || in.offset != tree->have ||
      frame->bulk_bytes > tree->sent_most - in.offset) {
    tree->hop.drop(tree->hop.self, peer, MLFAB_ERR_FRAME, "a sum's bytes out of place");
    return;
  }
  memcpy(tree->data + in.offset, frame->bulk, frame->bulk_bytes);
  tree_has(tree, in.offset + frame->bulk_bytes);
}

/* --- links --- */

/* A child or taker is on a link that is new to it; perhaps before we know of this tree. */
static void tree_met(mlfab__tree *tree, uint32_t peer) {
  const mlfab__tree_peer *p = &tree->peers[peer];
  mlfab__tree_taker *taker = tree_taker(tree, peer);
  if (!tree->number || p->joined != tree->number) return;
  if (tree_child(tree, peer)) tree_grant(tree, p->child - 1, 1);
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

static int tree_calls(const mlfab__tree *tree, uint32_t peer) {
  return tree->number && !tree_is_root(tree) && (peer == tree->parent || peer == tree->giver);
}

MLFAB__INTERNAL void mlfab__tree_hop_up(mlfab__tree *tree, uint32_t peer) {
  if (!tree_calls(tree, peer)) return;
  if (peer == tree->parent) tree->parent_since_ns = 0;
  if (peer == tree->giver) tree->giver_since_ns = 0;
  tree_join(tree, peer);
}

MLFAB__INTERNAL void mlfab__tree_hop_lost(mlfab__tree *tree, uint32_t peer) {
  if (!tree_calls(tree, peer) || peer != tree->parent) return;
  tree->lent = 0;
  tree->granted = 0;
  tree->resumes = 1;
}

MLFAB__INTERNAL int mlfab__tree_hop_missing(mlfab__tree *tree, uint32_t peer, uint64_t now_ns) {
  if (!tree_calls(tree, peer)) return 0;
  uint64_t *since = peer == tree->parent ? &tree->parent_since_ns : &tree->giver_since_ns;
  if (*since == 0) *since = now_ns;
  if (now_ns - *since >= MLFAB__TREE_PATIENCE * tree->config->heartbeat_ns)
    tree_give_up(tree, MLFAB_ERR_PEER_DEAD, peer);
  return 1;
}

MLFAB__INTERNAL void mlfab__tree_member_lost(mlfab__tree *tree, uint32_t peer) {
  mlfab__tree_taker *taker = tree_taker(tree, peer);
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
    if (!tree_child(tree, tree->takers[i].rank)) tree_met(tree, tree->takers[i].rank);
  }
  if (!tree_is_root(tree)) {
    tree_join(tree, tree->parent);
    tree->hop.ready(tree->hop.self, tree->parent);
    if (tree->giver != tree->parent) {
      tree_join(tree, tree->giver);
      tree->hop.ready(tree->hop.self, tree->giver);
    }
  }
  tree_progress(tree);
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
    case MLFAB_ERR_SHAPE:
      return "calls it with another count or type than others";
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

static void tree_over(mlfab__tree *tree, const mlfab__reduce_done *in, uint64_t now_ns) {
  if (in->ask != tree->asks) return;
  if (in->code == MLFAB_ERR_AGAIN) {
    tree->missing = in->rank;
    return;
  }
  int32_t code = in->code;
  tree->gave_up = 0; /* heard */
  if (code == 0 && tree->number && tree->have < tree->bytes) code = MLFAB_ERR_INTERNAL;
  if (tree->request) tree_end(tree, code, in->rank, 0, now_ns, tree_why(code));
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
    tree_granted(tree, peer, frame);
  } else if (frame->type == MLFAB__TREE_DOWN) {
    tree_from_giver(tree, peer, frame);
  } else {
    return 0;
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__tree_member_frame(mlfab__tree *tree, uint32_t peer,
                                             const mlfab__frame_in *frame) {
  mlfab__tree_join join;
  if (frame->type == MLFAB__TREE_UP) {
    tree_from_child(tree, peer, frame);
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

/* --- what goes out --- */

static int tree_frame(const mlfab__tree *tree, mlfab__frame_out *frame, uint8_t type, uint64_t from,
                      uint64_t to) {
  if (from >= to) return 0;
  mlfab__tree_bytes bytes = {tree->number, from};
  uint64_t chunk = mlfab__max(tree->config->chunk_bytes / 64 * 64, 64);
  frame->type = type;
  frame->meta_bytes = mlfab__encode_tree_bytes(frame->meta, &bytes);
  frame->bulk = tree->data + from;
  frame->bulk_bytes = (uint32_t)mlfab__min(to - from, chunk);
  frame->token = frame->bulk_bytes > MLFAB__TREE_COPY ? tree_token(tree) : 0;
  return 1;
}

MLFAB__INTERNAL int mlfab__tree_next_up(mlfab__tree *tree, uint32_t peer, mlfab__frame_out *frame) {
  if (!tree_calls(tree, peer) || peer != tree->parent || tree->resumes) return 0;
  return tree_frame(tree, frame, MLFAB__TREE_UP, tree->sent,
                    mlfab__min(tree->granted, tree->complete));
}

MLFAB__INTERNAL void mlfab__tree_taken_up(mlfab__tree *tree, const mlfab__frame_out *frame) {
  tree->sent += frame->bulk_bytes;
  tree->sent_most = mlfab__max(tree->sent_most, tree->sent);
  if (frame->token != 0) tree->lent++;
}

MLFAB__INTERNAL int mlfab__tree_next_down(mlfab__tree *tree, uint32_t peer,
                                          mlfab__frame_out *frame) {
  const mlfab__tree_taker *taker = tree_taker(tree, peer);
  if (!taker || tree->peers[peer].joined != tree->number) return 0;
  return tree_frame(tree, frame, MLFAB__TREE_DOWN, taker->given, tree->have);
}

MLFAB__INTERNAL void mlfab__tree_taken_down(mlfab__tree *tree, uint32_t peer,
                                            const mlfab__frame_out *frame) {
  mlfab__tree_taker *taker = tree_taker(tree, peer);
  if (!taker) return;
  taker->given += frame->bulk_bytes;
  if (frame->token != 0) taker->lent++;
}

MLFAB__INTERNAL int mlfab__tree_sent(mlfab__tree *tree, uint32_t peer, int hop, uint64_t token) {
  if ((token & MLFAB__TREE_TOKEN) != MLFAB__TREE_TOKEN) return 0;
  mlfab__tree_taker *taker = tree_taker(tree, peer);
  if (!tree->number || token != tree_token(tree)) return 1; /* taken back meanwhile */
  if (hop && peer == tree->parent && tree->lent > 0) tree->lent--;
  if (!hop && taker && taker->lent > 0) taker->lent--;
  return 1;
}
