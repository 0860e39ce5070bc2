/* test_talk.c - one conversation of each sort of node: how a scene at the seam is written. */
#include "tests/seam/talk.h"

enum { COUNT = 65536, BYTES = 4 * COUNT };

static float weights[COUNT], into[COUNT];

static const mlfab_buf all = {0, 0, weights, COUNT};

/* A worker beside two servers pushes and pulls; the link to one of them breaks in between. */
SCENE(test_worker) {
  talk_init();
  talk_open(&SIZED(mlfab_config, .rank = 2, .workers = 4, .servers = 2, .eager_bytes = 4096,
                   .chunk_bytes = 16384));
  CALL(TENSOR_ADD, .tensor = 0, .dtype = MLFAB_F32, .count = COUNT);
  talk_stand(&(mlfab_model_options){.size = sizeof(mlfab_model_options), .slices = 2});
  t->hold_sent = 1;
  mlfab_request push = CALL(PUSH, .bufs = &all, .n = 1);
  for (uint32_t s = 0; s < 2; s++)
    HEAR_PUSH(SERVER(s), m->seq == 1 && m->eager == 4096 && h->bulk_bytes == 4096 &&
                             m->segments == 1 && t->segments[0].offset == s * (BYTES / 2) &&
                             t->segments[0].bytes == BYTES / 2);
  HUSH(SERVER(0));
  SAY(SERVER(0), GRANT, grant, .seq = 1, .upto = 20000, .generation = 1);
  HEAR(SERVER(0), CHUNK, chunk,
       m->offset == 4096 && h->bulk_bytes == 20000 - 4096 &&
           h->lent == (const uint8_t *)weights + 4096);
  SAY(SERVER(1), PUSH_ACK, push_ack, .seq = 1, .members = 1, .generation = 1, .version = 1);
  talk_break(SERVER(0));
  PENDING(push);
  talk_back(SERVER(0));
  HEAR_PUSH(SERVER(0), m->seq == 1 && m->generation == 2);
  SAY(SERVER(0), GRANT, grant, .seq = 1, .upto = BYTES / 2, .generation = 2);
  assert_true(talk_skip(SERVER(0)) > 1);
  SAY(SERVER(0), PUSH_ACK, push_ack, .seq = 1, .members = 1, .generation = 2, .version = 2);
  PENDING(push); /* bytes are lent */
  talk_sent_all(SERVER(0), LOAN_LIVE);
  talk_sent_all(SERVER(1), LOAN_LIVE);
  assert_int_equal(ENDS(push, 0).version, 2);
  mlfab_request pull = CALL(PULL, BUFS({0, 0, into, COUNT}));
  HEAR_PULL(SERVER(1), m->request > 0 && m->segments == 1);
  talk_dies(SERVER(0));
  ENDS(pull, MLFAB_ERR_PEER_DEAD);
}

/* A dedicated server, which is server 0 or another one, defines a model, applies an update, and answers a pull. */
static void serve(int rank) {
  static const mlfab__tensor_info tensor = {0, MLFAB_F32, COUNT};
  const uint32_t first = (uint32_t)rank * (BYTES / 2);
  uint8_t list[MLFAB__TENSOR_INFO_BYTES];
  mlfab__encode_tensor_info(list, &tensor);
  talk_init();
  talk_open(&SIZED(mlfab_config, .roles = MLFAB_ROLE_SERVER, .rank = rank, .workers = 3,
                   .servers = 2, .dedicated = 1));
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
