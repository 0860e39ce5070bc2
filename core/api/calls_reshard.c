/* calls_reshard.c - moving slices between servers. */
#include "../reshard/reshard.h"
#include "context.h"

MLFAB__INTERNAL int mlfab__calls_reshard(const mlfab__call_in *in) {
  const mlfab_call *c = in->call;
  return mlfab__worker_set_servers(in->node->parts->worker, c->servers, c->n, c->timeout_ns,
                                   in->node->now_ns, in->request_p, in->error);
}

MLFAB_API int mlfab_set_servers(mlfab *ctx, const uint32_t *servers, uint32_t n,
                                uint64_t timeout_ns) {
  SUBMIT(SET_SERVERS, NULL, .servers = servers, .n = n, .timeout_ns = timeout_ns);
}
