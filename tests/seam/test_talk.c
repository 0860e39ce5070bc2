/* test_talk.c - conversations of a server and of a scheduler, which call and are called. */
#include "tests/seam/talk.h"

enum { COUNT = 65536, BYTES = 4 * COUNT };

static float weights[COUNT];

/* A dedicated server, which is server 0 or another one, defines a model, applies an update, and answers a pull. */
static void serve(int rank) {
  static const mlfab__tensor_info tensor = {0, MLFAB_F32, COUNT};
  const uint32_t first = (uint32_t)rank * (BYTES / 2);
  uint8_t list[MLFAB__TENSOR_INFO_BYTES];
  mlfab__encode_tensor_info(list, &tensor);
  TALK(.roles = MLFAB_ROLE_SERVER, .rank = rank, .workers = 3, .servers = 2, .dedicated = 1);
  for (uint32_t w = 0; w < 3; w++)
    SAY_BULK(WORKER(w), DEFINE, define, list, sizeof list, .ask = 1, .tensors = 1,
             .options = {.slices = 2});
  for (uint32_t w = 0; w < 3; w++) {
    HEAR(WORKER(w), HELLO_ACK, hello_ack, m->model_stands == 1 && m->eager_bytes > 0);
    HEAR(WORKER(w), DEFINE_ACK, define_ack, m->code == 0);
    talk_skip(WORKER(w));
  }
  for (uint32_t i = 0; i < COUNT; i++) weights[i] = (float)i;
  SAY_PUSH(WORKER(1), weights, BYTES / 2, SEGMENTS({first, BYTES / 2}), VERSIONS(0), .seq = 1,
           .eager = BYTES / 2);
  HEAR(WORKER(1), PUSH_ACK, push_ack, m->seq == 1 && m->code == 0 && m->version == 1);
  SAY_PULL(WORKER(2), SEGMENTS({first, 4096}), NO_VERSIONS, .request = 5);
  HEAR(WORKER(2), MODEL, model,
       m->request == 5 && m->version == 1 && h->bulk_bytes == 4096 &&
           memcmp(h->bulk, weights, 4096) == 0);
  HUSH(WORKER(2));
  SAY_PUSH(WORKER(0), NULL, 0, SEGMENTS({first + 2, 4096}), VERSIONS(0), .seq = 1);
  assert_false(talk_linked(WORKER(0))); /* no element begins there */
  assert_non_null(strstr(t->log, "given up"));
}

SCENE(test_server) {
  serve(0);
  serve(1);
}

/* A scheduler process calls the servers. */
SCENE(test_scheduler) {
  talk_init();
  t->by_hand = 1;
  talk_open(&SIZED(mlfab_config, .roles = MLFAB_ROLE_SCHEDULER, .workers = 3, .servers = 2,
                   .scheduler = MLFAB_SCHEDULER_OWN));
  HEAR(GATE, JOIN, join, m->roles == MLFAB_ROLE_SCHEDULER && m->workers == 3);
  talk_say_welcome();
  for (uint32_t s = 0; s < 2; s++) {
    HEAR(SERVER(s), HELLO, hello, m->node == 3 && m->incarnation == t->welcome.incarnation);
    assert_int_equal(mlfab_node_ready(t->node, NULL), 0);
    talk_greet(SERVER(s));
  }
  assert_int_equal(mlfab_node_ready(t->node, NULL), 1);
}
