/* test_outbox.c - the pacing of core/node/outbox.c (node.h, Pacing): bulks leave the link, or are taken back, in any order.
 * A link that holds no bulk takes the next one. */
#include "../testing.h"

#include "../../core/base/rng.h"
#include "../../core/node/node.h"

enum { RUNS = 300, STEPS = 200, HELD = 64 };

static mlfab__rng prng;

static int next(void *self, mlfab__at at, mlfab__frame_out *frame) {
  static uint64_t token;
  (void)self, (void)at;
  frame->bulk_bytes = 1 + (uint32_t)mlfab__rng_below(&prng, 300000);
  frame->token = mlfab__rng_below(&prng, 8) ? ++token : 0;
  return 1;
}

static void taken(void *self, mlfab__at at, const mlfab__frame_out *frame) {
  (void)self, (void)at, (void)frame;
}

static void begin(mlfab_node *node) {
  memset(node, 0, sizeof *node);
  assert_int_equal(mlfab__env_init(&node->env, NULL), 0);
  node->config.chunk_bytes = 262144;
  node->config.heartbeat_ns = 100000000;
  node->now_ns = 1;
  node->roles[0].next = next;
  node->roles[0].taken = taken;
  node->nsenders[MLFAB__LINK_PEER] = 1;
  uint32_t index = mlfab__node_new_link(node);
  assert_int_equal(index, 0);
  node->links[0].kind = MLFAB__LINK_PEER;
  node->links[0].greeted = 1;
  node->links[0].caps = MLFAB_CAP_PROBE;
}

static void end(mlfab_node *node) { mlfab__node_free_links(node); }

TEST(test_a_link_without_bulks_takes_the_next) {
  static mlfab_node node;
  mlfab__rng_seed(&prng, test_number("MLFAB_SEED", 1));
  for (int run = 0; run < RUNS; run++) {
    int held = 0; /* bulks with a token that are neither gone nor taken back */
    begin(&node);
    for (int step = 0; step < STEPS; step++) {
      node.now_ns += mlfab__rng_below(&prng, 20000000);
      switch (mlfab__rng_below(&prng, 4)) {
        case 0:
          if (held == 0) break;
          held--;
          mlfab__outbox_left(&node, 0);
          break;
        case 1:
          if (held == 0) break;
          held--;
          mlfab__outbox_detached(&node, 0);
          break;
        default:
          if (held == HELD || !mlfab__outbox_yield(&node, 0)) break;
          held += node.frame.token != 0;
          mlfab__outbox_taken(&node);
      }
      if (held == 0) assert_true(mlfab__outbox_yield(&node, 0));
    }
    end(&node);
  }
}

TESTS(NULL, NULL)
