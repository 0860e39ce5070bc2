/* blocks.c - the server role: blocks pinned by pulls, and spare blocks. See server.h. */
#include "server.h"

MLFAB__INTERNAL void mlfab__blocks_unpin(mlfab__server *server, mlfab__server_pull *pull) {
  if (pull->slice == MLFAB__NO_BLOCK) return;
  uint32_t n = server->store.slices[pull->slice].count;
  for (uint32_t i = 0; i < n; i++) mlfab__store_unref(&server->store, pull->pinned[i]);
  pull->slice = MLFAB__NO_BLOCK;
}

MLFAB__INTERNAL void mlfab__blocks_pin(mlfab__server *server, mlfab__server_pull *pull,
                                       uint32_t slice) {
  const mlfab__shard_slice *s = &server->store.slices[slice];
  for (uint32_t i = 0; i < s->count; i++) {
    pull->pinned[i] = server->store.w[s->first + i];
    mlfab__store_ref(&server->store, pull->pinned[i]);
  }
  pull->slice = slice;
  pull->version = s->version;
  pull->commit = mlfab__store_label(s);
  pull->restart_segment = pull->segment;
  pull->restart_in_segment = pull->in_segment;
}

MLFAB__INTERNAL void mlfab__blocks_restart(mlfab__server *server, mlfab__server_pull *pull) {
  if (pull->slice == MLFAB__NO_BLOCK) return;
  mlfab__blocks_unpin(server, pull);
  pull->segment = pull->restart_segment;
  pull->in_segment = pull->restart_in_segment;
  server->stats->pulls_restarted++;
}

MLFAB__INTERNAL void mlfab__blocks_unpin_all(mlfab__server *server) {
  /* While a commit is hidden, pulls have nothing but what they have pinned. */
  int keeps = mlfab__server_shows(server) != MLFAB__SHOWS_ALL;
  for (mlfab__server_pull *pull = server->serve.first; pull && !keeps; pull = pull->next)
    mlfab__blocks_restart(server, pull);
}

MLFAB__INTERNAL uint32_t mlfab__blocks_spare(mlfab__server *server) {
  mlfab__store *store = &server->store;
  if (store->free_count == 0) mlfab__blocks_unpin_all(server);
  /* Blocks still in use are lent to transports: a bounded number of chunks a worker. */
  if (store->free_count == 0 && mlfab__store_grow(server->env, store)) return MLFAB__NO_BLOCK;
  return mlfab__store_take(store);
}

MLFAB__INTERNAL int mlfab__blocks_fresh(mlfab__server *server, uint32_t *place, uint32_t from,
                                        int fill) {
  mlfab__store *store = &server->store;
  uint32_t block = mlfab__blocks_spare(server);
  if (block == MLFAB__NO_BLOCK) return MLFAB_ERR_MEMORY;
  uint8_t *data = store->blocks[block].data;
  if (fill && data && from != MLFAB__NO_BLOCK)
    mlfab__memory_copy(store->memory, data, store->blocks[from].data, store->block_bytes);
  if (fill && data && from == MLFAB__NO_BLOCK)
    mlfab__memory_zero(store->memory, data, store->block_bytes);
  mlfab__store_put(store, place, block);
  return 0;
}

/* Blocks that were lent to lost links are free. */
MLFAB__INTERNAL void mlfab__blocks_drop_orphans(mlfab__server *server) {
  for (uint32_t i = 0; i < server->serve.norphans; i++)
    mlfab__store_unref(&server->store, server->serve.orphans[i]);
  server->serve.norphans = 0;
}

MLFAB__INTERNAL void mlfab__blocks_retire(mlfab__server *server) {
  int read = server->serve.norphans > 0;
  mlfab__blocks_drop_orphans(server);
  if (server->lender)
    server->lender->retire(server, read);
  else
    mlfab__store_free(server->env, &server->store);
}

/* Takes back the blocks lent to a link. The node may have given up the link only now. Then the transport has not been told yet, and
 * the peer may still read the blocks. So the server writes nothing to them before the next tick. (It may, when it loses a worker twice before a tick and has
 * no memory for the longer list.) */
MLFAB__INTERNAL void mlfab__blocks_unlend(mlfab__server *server, uint32_t worker) {
  mlfab__server_peer *peer = &server->peers[worker];
  if (peer->nsends == 0) return;
  uint32_t *orphans = mlfab__grow(server->env, server->serve.orphans, &server->serve.orphan_room,
                                  (uint64_t)server->serve.norphans + peer->nsends, sizeof *orphans);
  if (orphans) server->serve.orphans = orphans;
  for (uint32_t i = 0; i < peer->nsends; i++) {
    if (orphans)
      orphans[server->serve.norphans++] = peer->sends[i];
    else
      mlfab__store_unref(&server->store, peer->sends[i]);
  }
  peer->nsends = 0;
}
