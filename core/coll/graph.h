/* graph.h - the graph of a stochastic reduce: which node sends its model to which. stochastic.c calls it. Pure.
 *
 * A[i][j] = 1 iff j sends to i, or i = j; P = A with each row divided by its sum, the node's in-degree. Models agree at
 * the pace of the gap 1 - sigma_2(P). They agree on their mean only if P is doubly stochastic: all in- and out-degrees
 * are equal. Builders and the check are public: mlfab_graph_build and mlfab_graph_check of mlfab.h. Duplicate edges
 * count once, loops do not count.
 *
 * The gap: sigma_2^2 is an eigenvalue of P'P, found by Householder's tridiagonal form and bisection. With equal degrees
 * d, sigma_1 = 1 and its vector are known. N A'A - d^2 11' is a matrix of integers with the largest eigenvalue N d^2
 * sigma_2^2: so sigma_2 = 0 is exact, and a small sigma_2 has all its digits. Cost: N^2 doubles, and about 4/3 N^3
 * steps (under a second for 1024).
 *
 * Source: ASAP §4, fig. 2. Departs: the root expander's step is sqrt N rounded half up (the paper leaves this open),
 * its chain is a directed ring, and the star is missing, because one cannot reduce over it. */
#ifndef MLFAB__GRAPH_H
#define MLFAB__GRAPH_H

#include "../base/env.h"
#include "../../mlfab_partial.h"

enum { MLFAB__GRAPH_NODES_MAX = 1024 };

/* Finds the nodes that send to `node` (incoming 1), or to which it sends (0): ascending, once each, without itself.
 * `peers` has room for nodes - 1. Returns their number. The edges must have passed mlfab_graph_check. */
MLFAB__INTERNAL uint32_t mlfab__graph_peers(const mlfab_edge *edges, uint32_t n, uint32_t node,
                                            int incoming, uint32_t *peers);

#endif
