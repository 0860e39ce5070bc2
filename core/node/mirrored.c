/* mirrored.c - a part of a server whose state the other copy has, too. See mirrored.h. */
#include "mirrored.h"

#include "node.h"

MLFAB__INTERNAL void mlfab__mirrored_add(mlfab_node *node, const mlfab__mirrored *part) {
  if (node->copies) node->copies->mirrored(node, part);
}
