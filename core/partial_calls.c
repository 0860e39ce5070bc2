/* partial_calls.c - a node: partial reductions, as they are called. Layer 5. The work is
 * eager.c's. */
#include "node.h"

MLFAB_API int mlfab_node_partial_open(mlfab_node *node, uint64_t count, int dtype,
                                      const mlfab_partial_options *options, uint64_t timeout_ns,
                                      uint64_t now_ns, uint32_t *id_p, mlfab_request *request_p) {
  mlfab_error error;
  if (!node || !id_p || !request_p) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code)
    code = mlfab__eager_open(&node->comm, count, dtype, options, timeout_ns, node->now_ns, id_p,
                             request_p, &error);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_partial_start(mlfab_node *node, uint32_t id, void *data,
                                       uint64_t timeout_ns, uint64_t now_ns,
                                       mlfab_partial_info *info_p, mlfab_request *request_p) {
  mlfab_error error;
  if (!node || !request_p) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code)
    code = mlfab__eager_start(&node->comm, id, data, timeout_ns, node->now_ns, info_p, request_p,
                              &error);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_partial_flush(mlfab_node *node, uint32_t id, void *data,
                                       uint64_t timeout_ns, uint64_t now_ns,
                                       mlfab_request *request_p) {
  mlfab_error error;
  if (!node || !request_p) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code)
    code = mlfab__eager_flush(&node->comm, id, data, timeout_ns, node->now_ns, request_p, &error);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_partial_resync(mlfab_node *node, uint32_t id, void *model, uint64_t count,
                                        int dtype, uint64_t timeout_ns, uint64_t now_ns,
                                        mlfab_request *request_p) {
  mlfab_error error;
  if (!node || !request_p) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code)
    code = mlfab__eager_resync(&node->comm, id, model, count, dtype, timeout_ns, node->now_ns,
                               request_p, &error);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_partial_close(mlfab_node *node, uint32_t id, uint64_t now_ns) {
  mlfab_error error;
  if (!node) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code) code = mlfab__eager_close(&node->comm, id, &error);
  return mlfab__node_return(node, code, &error);
}
