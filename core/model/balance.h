/* balance.h - new owners of slices when servers come or go.
 *
 * Source: FluentPS §III-D (elastic parameter slicing). */
#ifndef MLFAB__BALANCE_H
#define MLFAB__BALANCE_H

#include "layout.h"

/* New owners of slices when servers come or go (active[s] is non-zero for those that stay or come, at least
 * one). Each server gets at most 1.05 times the mean of the active servers, in bytes, and the fewest bytes move. If
 * there are too few slices for that, balances as well as possible, to within 1/64. Ties: the lower number wins. `load`
 * has room for `servers`, `order` for 2 n. The result depends on the arguments only. O(n (log n + servers)). */
MLFAB__INTERNAL void mlfab__layout_balance(const mlfab__slice *slices, uint32_t n,
                                           const uint8_t *active, uint32_t servers, uint32_t *owner,
                                           uint64_t *load, uint32_t *order);

#endif
