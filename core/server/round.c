/* round.c - the server role: applies a round's sum to the model, a few blocks a tick. See clock.c. */
#include "server.h"

#include "../kernels/kernels.h"

static void round_info(const mlfab__server *server, mlfab_update_info *info) {
  const mlfab__clock *clock = &server->clock;
  memset(info, 0, sizeof *info);
  info->worker = MLFAB__NO_NODE;
  info->members = clock->contributors;
  info->server = server->number;
  info->iteration = clock->v_train;
  info->scale = mlfab__optimizer_linear(&server->optimizer) ? 1.0 : clock->round_scale;
}

/* Does the round's sum have any block of this slice? If so, the whole slice is stepped, so that no result
 * depends on the block size. */
static int round_summed(const mlfab__server *server, uint32_t slice) {
  const mlfab__shard_slice *s = &server->store.slices[slice];
  for (uint32_t p = s->first; p < s->first + s->count; p++) {
    if (server->store.sum[p] != MLFAB__NO_BLOCK) return 1;
  }
  return 0;
}

/* Applies one block of the round's sum; a missing block counts as zeros. */
static int round_block(mlfab__server *server, mlfab_update_info *info, double share, uint32_t slice,
                       uint32_t p) {
  mlfab__store *store = &server->store;
  const mlfab__shard_slice *s = &store->slices[slice];
  info->version = s->version;
  info->commit = s->commit;
  int code = mlfab__blocks_fresh(server, &store->next[p], MLFAB__NO_BLOCK, 0);
  if (!code && store->sum[p] == MLFAB__NO_BLOCK)
    code = mlfab__blocks_fresh(server, &store->sum[p], MLFAB__NO_BLOCK, 1);
  uint64_t at = s->offset + (uint64_t)(p - s->first) * store->block_bytes;
  uint64_t left = mlfab__store_block_bytes(store, slice, p);
  /* If the optimizer cannot take the division into its scale, the sum itself is divided. */
  int divide = server->options.mean &&
               (server->config->on_update || !mlfab__optimizer_linear(&server->optimizer));
  /* A checkpoint holds the undivided sum. */
  if (!code && divide && store->blocks[store->sum[p]].refs > 1)
    code = mlfab__blocks_fresh(server, &store->sum[p], store->sum[p], 1);
  while (left > 0 && !code && !store->ghost) {
    mlfab__piece piece;
    mlfab__store_piece(store, at, left, &piece);
    uint8_t *sum = store->blocks[store->sum[p]].data + piece.at;
    if (divide)
      mlfab__memory_scale(store->memory, server->config->kernels, piece.dtype, sum, share,
                          piece.count);
    code = mlfab__apply_piece(server, info, &piece, sum);
    at += piece.bytes;
    left -= piece.bytes;
  }
  return code;
}

/* Moves the blocks of one slice into the model, or discards them if the round failed. */
static void round_swap(mlfab__server *server, uint32_t slice) {
  mlfab__store *store = &server->store;
  mlfab__shard_slice *s = &store->slices[slice];
  int summed = round_summed(server, slice);
  for (uint32_t p = s->first; p < s->first + s->count; p++) {
    if (server->apply.code) {
      mlfab__store_put(store, &store->next[p], MLFAB__NO_BLOCK);
    } else if (store->next[p] != MLFAB__NO_BLOCK) {
      mlfab__store_put(store, &store->w[p], store->next[p]);
      store->next[p] = MLFAB__NO_BLOCK;
    }
    mlfab__store_put(store, &store->sum[p], MLFAB__NO_BLOCK);
  }
  /* Even a round that was refused may have stepped some state. */
  if (summed) mlfab__store_change(store, slice);
  if (server->apply.code || !summed) return;
  s->version += server->clock.round_members;
  s->commit++;
}

/* Ends the round: swaps, counts, opens the next. */
static void round_close(mlfab__server *server) {
  mlfab__clock *clock = &server->clock;
  if (server->apply.code) clock->refused_round = clock->v_train + 1;
  if (!server->apply.code && clock->round_members > 0) {
    server->stats->commits++;
    if (server->keeper) {
      const mlfab__commit commit = server->keeper->round(server);
      server->keeper->committed(server, &commit);
    }
  }
  for (uint32_t i = 0; i < server->store.nslices; i++) round_swap(server, i);
  for (uint32_t w = 0; w < server->workers; w++) server->peers[w].contributed = 0;
  server->apply.applying = MLFAB__APPLY_NONE;
  clock->contributors = clock->round_members = clock->measured = 0;
  if (!clock->flush) mlfab__clock_step(server);
  clock->flush = 0;
  server->queue.place_due = 1;
  server->serve.due = 1;
}

MLFAB__INTERNAL int mlfab__round_apply(mlfab__server *server, uint64_t budget) {
  mlfab__store *store = &server->store;
  mlfab_update_info info;
  round_info(server, &info);
  double share = mlfab__clock_share(server);
  if (mlfab__optimizer_linear(&server->optimizer) && !server->config->on_update)
    info.scale *= share;
  int plain = !server->config->on_update && mlfab__optimizer_linear(&server->optimizer) &&
              mlfab__optimizer_states(server->optimizer.kind) == 0;
  for (; server->apply.slice < store->nslices && !server->apply.code; server->apply.slice++) {
    const mlfab__shard_slice *slice = &store->slices[server->apply.slice];
    if (server->apply.position < slice->first) server->apply.position = slice->first;
    while (server->apply.position < slice->first + slice->count && !server->apply.code) {
      if (budget == 0) return 0;
      uint32_t p = server->apply.position++;
      /* SGD does not change the model for zeros. */
      if (store->sum[p] == MLFAB__NO_BLOCK && (plain || !round_summed(server, server->apply.slice)))
        continue;
      server->apply.code = round_block(server, &info, share, server->apply.slice, p);
      budget -= mlfab__min(budget, store->block_bytes);
    }
  }
  round_close(server);
  return 1;
}
