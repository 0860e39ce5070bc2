/* graph.h - who sends its model to whom in a stochastic reduce. Layer 2, pure.
 *
 * A[i][j] = 1 iff j sends to i, or i = j; P = A with each row divided by its sum, the node's
 * in-degree. Models agree at the pace of the gap 1 - sigma_2(P), and on their mean only where P is
 * doubly stochastic: all in- and out-degrees are one number. Builders and the check are public:
 * mlfab_graph_build and mlfab_graph_check of mlfab.h. Duplicate edges count once, loops not at all.
 *
 * The gap: sigma_2^2 is an eigenvalue of P'P, found by Householder's tridiagonal form and
 * bisection. With equal degrees d, sigma_1 = 1 and its vector are known, and N A'A - d^2 11' is a matrix of
 * integers whose largest eigenvalue is N d^2 sigma_2^2: sigma_2 = 0 comes out exactly, and a small
 * one with all its digits. Cost: N^2 doubles, and about 4/3 N^3 steps (under a second for 1024).
 *
 * Source: ASAP §4, fig. 2. Departs: the root expander's step is sqrt N rounded half up (the paper
 * does not say), its chain is a directed ring, the star is no graph to reduce over. */
#ifndef MLFAB__GRAPH_H
#define MLFAB__GRAPH_H

#include "../base/env.h"
#include "../../mlfab_partial.h"

enum { MLFAB__GRAPH_NODES_MAX = 1024 };

/* The nodes that send to `node` (incoming 1), or that it sends to (0): ascending, once each,
 * without itself. `peers` has room for nodes - 1. Returns how many. The edges have passed
 * mlfab_graph_check. */
MLFAB__INTERNAL uint32_t mlfab__graph_peers(const mlfab_edge *edges, uint32_t n, uint32_t node,
                                            int incoming, uint32_t *peers);

#endif
