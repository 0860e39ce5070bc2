/* stochastic_calls.c - a node: stochastic reductions, as they are called. Layer 5. The work is
 * gossip.c's. */
#include "node.h"

#if MLFAB_WITH_STOCHASTIC

MLFAB_API int mlfab_node_stochastic_open(mlfab_node *node, uint64_t count, int dtype,
                                         const mlfab_stochastic_options *options,
                                         uint64_t timeout_ns, uint64_t now_ns, uint32_t *id_p,
                                         mlfab_request *request_p) {
  mlfab_error error;
  if (!node || !id_p || !request_p) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code)
    code = mlfab__gossip_open(&node->comm, count, dtype, options, timeout_ns, node->now_ns, id_p,
                              request_p, &error);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_stochastic_start(mlfab_node *node, uint32_t id, void *data,
                                          uint64_t timeout_ns, uint64_t now_ns,
                                          mlfab_stochastic_info *info_p, mlfab_request *request_p) {
  mlfab_error error;
  if (!node || !request_p) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code)
    code = mlfab__gossip_start(&node->comm, id, data, timeout_ns, node->now_ns, info_p, request_p,
                               &error);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_stochastic_close(mlfab_node *node, uint32_t id, uint64_t now_ns) {
  mlfab_error error;
  if (!node) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code) code = mlfab__gossip_close(&node->comm, id, &error);
  return mlfab__node_return(node, code, &error);
}

#else

static int stochastic_left_out(mlfab_node *node, uint64_t now_ns) {
  mlfab_error error;
  if (!node) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code)
    code = mlfab__error(&error, MLFAB_ERR_UNSUPPORTED, MLFAB_NO_RANK, 0, 0,
                        "stochastic reductions were left out: MLFAB_WITH_STOCHASTIC is 0");
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_stochastic_open(mlfab_node *node, uint64_t count, int dtype,
                                         const mlfab_stochastic_options *options,
                                         uint64_t timeout_ns, uint64_t now_ns, uint32_t *id_p,
                                         mlfab_request *request_p) {
  (void)count, (void)dtype, (void)options, (void)timeout_ns, (void)id_p, (void)request_p;
  return stochastic_left_out(node, now_ns);
}

MLFAB_API int mlfab_node_stochastic_start(mlfab_node *node, uint32_t id, void *data,
                                          uint64_t timeout_ns, uint64_t now_ns,
                                          mlfab_stochastic_info *info_p, mlfab_request *request_p) {
  (void)id, (void)data, (void)timeout_ns, (void)info_p, (void)request_p;
  return stochastic_left_out(node, now_ns);
}

MLFAB_API int mlfab_node_stochastic_close(mlfab_node *node, uint32_t id, uint64_t now_ns) {
  (void)id;
  return stochastic_left_out(node, now_ns);
}

#endif
