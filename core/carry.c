/* carry.c - allreduce at a worker: shares on their way up, the sum on its way down. See tree.h. */
#include "tree.h"

/* --- the way up --- */

/* What of the children's shares may be added: the k-th waits for the one before it. */
static uint64_t carry_limit(const mlfab__tree *tree, uint32_t k) {
  return k == 0 || MLFAB__PLANTED(30) ? tree->bytes : tree->children[k - 1].added;
}

static void carry_add(mlfab__tree *tree, mlfab__tree_child *child, const void *bytes, uint64_t n) {
  uint8_t *at = tree->data + child->added;
  /* Sums that are not finite are everybody's: nobody is refused. */
  (void)mlfab__reduce_add((int)tree->dtype, at, at, bytes, 1.0, n / tree->width, 0);
  child->added += n;
}

static uint8_t *carry_ring(const mlfab__tree *tree, uint32_t k) {
  return tree->stage + (uint64_t)(k - 1) * tree->ring;
}

/* Puts what cannot be added yet into the child's ring. */
static void carry_keep(mlfab__tree *tree, uint32_t k, uint64_t offset, const uint8_t *bytes,
                       uint64_t n) {
  while (n > 0) {
    uint64_t at = offset % tree->ring, part = mlfab__min(n, tree->ring - at);
    memcpy(carry_ring(tree, k) + at, bytes, part);
    offset += part;
    bytes += part;
    n -= part;
  }
}

/* Adds what is in the rings as far as it goes, from the k-th child on. Returns the first that it
 * changed nothing of. */
static uint32_t carry_drain(mlfab__tree *tree, uint32_t k) {
  for (; k < tree->nchildren; k++) {
    mlfab__tree_child *child = &tree->children[k];
    uint64_t before = child->added, end = mlfab__min(child->received, carry_limit(tree, k));
    while (child->added < end) {
      uint64_t at = child->added % tree->ring;
      carry_add(tree, child, carry_ring(tree, k) + at,
                mlfab__min(end - child->added, tree->ring - at));
    }
    if (child->added == before) break;
  }
  return k;
}

/* How far a child may send: no further ahead of the one before it than its ring takes, nor of the
 * last than the window. */
MLFAB__INTERNAL void mlfab__tree_credit(mlfab__tree *tree, uint32_t k, int resume) {
  mlfab__tree_child *child = &tree->children[k];
  uint64_t upto = mlfab__min(tree->bytes, carry_limit(tree, k) + (k > 0 ? tree->ring : 0));
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
static void carry_has(mlfab__tree *tree, uint64_t have) {
  tree->have = have;
  for (uint32_t i = 0; i < tree->ntakers; i++)
    tree->down.ready(tree->down.self, tree->takers[i].rank);
  if (have == tree->bytes) mlfab__tree_tell(tree);
}

/* More is complete here: all children, in their order, have added it. */
MLFAB__INTERNAL void mlfab__tree_progress(mlfab__tree *tree) {
  uint64_t complete = tree->nchildren ? tree->children[tree->nchildren - 1].added : tree->bytes;
  if (complete == tree->complete) return;
  tree->complete = complete;
  if (mlfab__tree_is_root(tree)) {
    carry_has(tree, complete);
  } else {
    tree->hop.ready(tree->hop.self, tree->parent);
  }
}

static void carry_took(mlfab__tree *tree, uint32_t k, const uint8_t *bytes, uint64_t n) {
  mlfab__tree_child *child = &tree->children[k];
  uint64_t direct = 0, before = tree->complete;
  if (child->added == child->received) direct = mlfab__min(n, carry_limit(tree, k) - child->added);
  if (direct > 0) carry_add(tree, child, bytes, direct);
  if (n > direct) carry_keep(tree, k, child->received + direct, bytes + direct, n - direct);
  child->received += n;
  uint32_t last = direct > 0 ? carry_drain(tree, k + 1) : k;
  mlfab__tree_progress(tree);
  /* The credit of those changes whose predecessor has moved; of all, when the window has. */
  int window = tree->complete != before;
  for (uint32_t i = window ? 0 : k; i < tree->nchildren && (window || i <= last); i++)
    mlfab__tree_credit(tree, i, 0);
}

/* Bytes of a child's share. */
MLFAB__INTERNAL void mlfab__tree_from_child(mlfab__tree *tree, uint32_t peer,
                                            const mlfab__frame_in *frame) {
  mlfab__tree_bytes in;
  const mlfab__tree_child *child = mlfab__tree_child_of(tree, peer);
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
  carry_took(tree, tree->peers[peer].child - 1, frame->bulk, frame->bulk_bytes);
}

MLFAB__INTERNAL void mlfab__tree_granted(mlfab__tree *tree, uint32_t peer,
                                         const mlfab__frame_in *frame) {
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
MLFAB__INTERNAL void mlfab__tree_from_giver(mlfab__tree *tree, uint32_t peer,
                                            const mlfab__frame_in *frame) {
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
  carry_has(tree, in.offset + frame->bulk_bytes);
}

/* --- what goes out --- */

static int carry_frame(const mlfab__tree *tree, mlfab__frame_out *frame, uint8_t type,
                       uint64_t from, uint64_t to) {
  if (from >= to) return 0;
  mlfab__tree_bytes bytes = {tree->number, from};
  uint64_t chunk = mlfab__max(tree->config->chunk_bytes / 64 * 64, 64);
  frame->type = type;
  frame->meta_bytes = mlfab__encode_tree_bytes(frame->meta, &bytes);
  frame->bulk = tree->data + from;
  frame->bulk_bytes = (uint32_t)mlfab__min(to - from, chunk);
  frame->token = frame->bulk_bytes > MLFAB__TREE_COPY ? mlfab__tree_token(tree) : 0;
  return 1;
}

MLFAB__INTERNAL int mlfab__tree_next_up(mlfab__tree *tree, uint32_t peer, mlfab__frame_out *frame) {
  if (!mlfab__tree_calls(tree, peer) || peer != tree->parent || tree->resumes) return 0;
  return carry_frame(tree, frame, MLFAB__TREE_UP, tree->sent,
                     mlfab__min(tree->granted, tree->complete));
}

MLFAB__INTERNAL void mlfab__tree_taken_up(mlfab__tree *tree, const mlfab__frame_out *frame) {
  tree->sent += frame->bulk_bytes;
  tree->sent_most = mlfab__max(tree->sent_most, tree->sent);
  if (frame->token != 0) tree->lent++;
}

MLFAB__INTERNAL int mlfab__tree_next_down(mlfab__tree *tree, uint32_t peer,
                                          mlfab__frame_out *frame) {
  const mlfab__tree_taker *taker = mlfab__tree_taker_of(tree, peer);
  if (!taker || tree->peers[peer].joined != tree->number) return 0;
  return carry_frame(tree, frame, MLFAB__TREE_DOWN, taker->given, tree->have);
}

MLFAB__INTERNAL void mlfab__tree_taken_down(mlfab__tree *tree, uint32_t peer,
                                            const mlfab__frame_out *frame) {
  mlfab__tree_taker *taker = mlfab__tree_taker_of(tree, peer);
  if (!taker) return;
  taker->given += frame->bulk_bytes;
  if (frame->token != 0) taker->lent++;
}

MLFAB__INTERNAL int mlfab__tree_sent(mlfab__tree *tree, uint32_t peer, int hop, uint64_t token) {
  if ((token & MLFAB__TREE_TOKEN) != MLFAB__TREE_TOKEN) return 0;
  mlfab__tree_taker *taker = mlfab__tree_taker_of(tree, peer);
  if (!tree->number || token != mlfab__tree_token(tree)) return 1; /* taken back meanwhile */
  if (hop && peer == tree->parent && tree->lent > 0) tree->lent--;
  if (!hop && taker && taker->lent > 0) taker->lent--;
  return 1;
}
