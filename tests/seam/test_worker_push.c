/* test_worker_push.c - the updates of a worker in a fabric with a scheduler: how they are announced, by which way they go,
 * who holds which bytes, and when the caller gets its buffers back. */
#include "tests/seam/worker_talk.h"

#include "core/base/rng.h"

enum { SLICES = BYTES / SLICE };

/* --- announcing --- */

OPEN(test_announce) {
  mlfab_push_options options = {.size = sizeof options, .scale = 1, .norm = 2.5};
  push_with(MLFAB_ALL, &options);
  for (uint32_t s = 0; s < SERVERS; s++) {
    HEAR_PUSH(SERVER(s), m->flags == MLFAB__PUSH_PLANNED && m->eager == 0 && h->bulk_bytes == 0 &&
                             m->parts == 2 && m->norm >= 2.5 && m->norm <= 2.5);
    HUSH(SERVER(s)); /* nothing follows before the grant */
  }
  /* Clipping measures the norm itself. The small part at server 1 is not planned: the scheduler gets one part only. */
  memset(weights, 0, sizeof weights);
  ((float *)(void *)weights)[0] = 3.0f;
  options.clip_norm = 1e6;
  CALL(PUSH, BUFS(buffer(0, weights), buffer(1, weights)), .options = &options);
  HEAR_PUSH(SERVER(0),
            m->flags == MLFAB__PUSH_PLANNED && m->parts == 1 && m->norm > 4.2 && m->norm < 4.3);
  HEAR_PUSH(SERVER(1), m->flags == 0 && m->eager == 2048 && h->bulk_bytes == 2048);
}

/* The norm of a sparse update is that of its values. */
OPEN(test_clip_sparse) {
  uint64_t indices[3] = {0, 5, 4000};
  float values[3] = {2.0f, 3.0f, 6.0f};
  mlfab_push_options options = {.size = sizeof options, .scale = 1.0, .clip_norm = 3.5};
  CALL(PUSH_SPARSE, .tensor = 0, .indices = indices, .data = values, .count = 3,
       .options = &options);
  HEAR_PUSH(SERVER(0), m->flags == MLFAB__PUSH_PACKED && m->bytes == 40 + 32 /* of two slices */ &&
                           m->norm >= 7.0 && m->norm <= 7.0 && m->scale >= 0.5 && m->scale <= 0.5);
}

OPEN(test_norm_is_checked) {
  const double infinite = 1e308 * 10.0;
  const double wrong[] = {-1.0, infinite, -infinite, infinite - infinite};
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  for (uint32_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    options.norm = wrong[i];
    FAILS(MLFAB_ERR_ARGUMENT, PUSH, BUFS(buffer(0, weights)), .options = &options);
    assert_non_null(strstr(talk_error(), "norm"));
  }
}

/* Scale 0 in options without the mark of MLFAB_PUSH_OPTIONS_INIT is a forgotten member. A scale of 0 that was meant goes. */
OPEN(test_scale_of_nobody) {
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  FAILS(MLFAB_ERR_ARGUMENT, PUSH, BUFS(buffer(0, weights)),
        .options = &(mlfab_push_options){.size = sizeof options});
  assert_non_null(strstr(talk_error(), "scale is 0"));
  assert_non_null(strstr(talk_error(), "MLFAB_PUSH_OPTIONS_INIT"));
  options.scale = 0.0;
  push_with(0, &options);
  HEAR_PUSH(SERVER(0), m->scale >= 0.0 && m->scale <= 0.0);
  push_with(1, &(mlfab_push_options){.size = sizeof options, .scale = -0.0});
  HEAR_PUSH(SERVER(1), m->scale >= 0.0 && m->scale <= 0.0);
}

/* Which large updates are planned. The others come with bytes. */
SCENE(test_what_is_planned) {
  const struct {
    uint32_t scheduler, sync, deterministic, flags;
  } cases[] = {{MLFAB_SCHEDULER_NONE, 0, 0, 0},
               {MLFAB_SCHEDULER_BESIDE, 0, 0, MLFAB__PUSH_PLANNED},
               {MLFAB_SCHEDULER_OWN, MLFAB_SYNC_BSP, 0, MLFAB__PUSH_PLANNED},
               {MLFAB_SCHEDULER_OWN, MLFAB_SYNC_BSP, 1, 0}};
  for (uint32_t i = 0; i < MLFAB__COUNT(cases); i++) {
    mlfab_model_options options = {
        .size = sizeof options, .sync = cases[i].sync, .deterministic = cases[i].deterministic};
    begin(cases[i].scheduler, &options);
    push(MLFAB_ALL);
    for (uint32_t s = 0; s < SERVERS; s++)
      HEAR_PUSH(SERVER(s), m->flags == cases[i].flags && m->eager == (m->flags ? 0 : EAGER));
  }
}

/* Worker 0's first weights wait for no plan. */
SCENE(test_first_weights) {
  mlfab_config config = world(MLFAB_SCHEDULER_BESIDE);
  config.rank = 0;
  talk_init();
  talk_open(&config);
  CALL(TENSOR_ADD, .tensor = 0, .dtype = MLFAB_F32, .count = BYTES / 4);
  CALL(MODEL_START, BUFS(buffer(MLFAB_ALL, weights)),
       .options = &SIZED(mlfab_model_options, .slices = 2));
  for (uint32_t s = 0; s < SERVERS; s++) {
    HEAR(SERVER(s), DEFINE, define, m->first_weights == 1 && m->tensors == 1);
    HEAR_PUSH(SERVER(s), m->flags == MLFAB__PUSH_INIT && m->eager == EAGER && m->seq == 1);
  }
}

/* A planned update uses no credit, so it does not wait for credit, even when the server has given more of it than the
 * worker's limit for small updates. */
OPEN(test_planned_takes_no_credit) {
  const mlfab_push_options alone = {.size = sizeof alone, .scale = 1, .clip_norm = 1e9};
  for (uint64_t i = 1; i <= 4; i++) {
    push_with(1, &alone);
    HEAR_PUSH(SERVER(1), m->seq == i && m->eager == 2048);
  }
  push(2);
  HEAR_PUSH(SERVER(1), m->flags == MLFAB__PUSH_PLANNED);
  SAY(SERVER(1), HELLO_ACK, hello_ack, .server = 1, .kind = MLFAB__ACK_CREDIT, .epoch = 1,
      .eager_bytes = BYTES);
  push(2);
  HEAR_PUSH(SERVER(1), m->flags == MLFAB__PUSH_PLANNED && m->eager == 0);
}

/* Updates that wait for the link are merged when their numbers are consecutive and their bytes the same. Planned ones are
 * not merged, because each is placed by itself. */
OPEN(test_merging) {
  mlfab_push_options twice = {.size = sizeof twice, .scale = 2};
  talk_room(SERVER(1), 0);
  push(2);
  push(2);
  push(1);
  push(1);
  talk_cancel(push_with(1, &twice));
  push(1);
  assert_int_equal(talk_stats().pushes_merged, 1);
  talk_room(SERVER(1), -1);
  HEAR_PUSH(SERVER(1), m->seq == 1 && m->members == 1);
  HEAR_PUSH(SERVER(1), m->seq == 2 && m->members == 1);
  HEAR_PUSH(SERVER(1), m->seq == 3 && m->members == 2);
  HUSH(SERVER(1)); /* more may come while the other two are under way */
  SAY(SERVER(1), PUSH_ACK, push_ack, .seq = 3, .members = 2, .generation = 1);
  HEAR_PUSH(SERVER(1), m->seq == 6 && m->members == 1); /* not over the gap of 5 */
}

/* An update of all tensors is merged with another one of all. The same count for one tensor is out of range. */
SCENE(test_merge_of_all) {
  enum { EACH = 1024 };
  const mlfab_config config = world(MLFAB_SCHEDULER_NONE);
  mlfab_buf all = {.tensor = MLFAB_ALL, .data = weights, .count = 2 * EACH}, wrong = all;
  wrong.tensor = 0;
  talk_init();
  talk_open(&config);
  for (uint32_t i = 0; i < 2; i++) CALL(TENSOR_ADD, .tensor = i, .dtype = MLFAB_F32, .count = EACH);
  talk_stand(&SIZED(mlfab_model_options, .slices = 2));
  for (uint32_t s = 0; s < SERVERS; s++) talk_room(SERVER(s), 0);
  for (uint32_t i = 0; i < 3; i++) {
    CALL(PUSH, .bufs = &all, .n = 1);
    FAILS(MLFAB_ERR_SHAPE, PUSH, .bufs = &wrong, .n = 1);
    assert_int_equal(talk_stats().pushes_merged, i);
  }
  talk_room(SERVER(0), -1);
  HEAR_PUSH(SERVER(0), m->seq == 1 && m->members == 3);
}

/* By way of this worker, which grants all of it. */
static void route(uint32_t s, uint64_t seq, uint64_t group, uint32_t hop) {
  via(s, seq, group, hop);
  hop_grant(hop, s, seq, group, SHARD);
}

/* --- the route of an update --- */

OPEN(test_by_hop) {
  mlfab_request request = push_announced();
  for (uint32_t s = 0; s < SERVERS; s++) via(s, 1, 7 + s, 3);
  assert_true(talk_linked(HOP(3))); /* before any grant, because the grant arrives over it */
  assert_false(talk_linked(HOP(2)));
  HUSH(HOP(3));
  hop_grant(3, 0, 1, 7, 20000);
  HEAR(HOP(3), HOP_CHUNK, hop_chunk,
       m->group == 7 && m->seq == 1 && m->offset == 0 && m->server == 0 && m->total == SHARD &&
           h->bulk_bytes == CHUNK && h->lent == weights);
  HEAR(HOP(3), HOP_CHUNK, hop_chunk, m->offset == CHUNK && h->bulk_bytes == 20000 - CHUNK);
  HUSH(HOP(3));
  /* A grant beyond the end means all bytes, and a smaller one changes nothing. */
  hop_grant(3, 1, 1, 8, SHARD + 1000);
  hop_grant(3, 1, 1, 8, 10);
  HEAR(HOP(3), HOP_CHUNK, hop_chunk, m->server == 1 && m->group == 8 && h->lent == weights + SHARD);
  assert_int_equal(talk_skip(HOP(3)), 5);
  hop_grant(3, 0, 1, 7, SHARD);
  talk_skip(HOP(3));
  /* The update ends only when it is decided and the lent bytes of both servers' parts are back. */
  for (uint32_t s = 0; s < SERVERS; s++) ack_reached(s, 1, 0, 4 + s, 3 - s, 0);
  assert_true(talk_lent(HOP(3)) > 2 * LENT - 2);
  for (uint32_t i = 0; i < t->nloans; i++) {
    PENDING(request);
    talk_sent(&t->loans[i]);
  }
  mlfab_result result = ENDS(request, 0);
  assert_true(result.version == 5 && result.delay == 3);
  assert_int_equal(talk_stats().pushes_applied, 1);
  assert_int_equal(t->detached, 0);
  assert_false(wanted(3));
}

/* Updates routed to an aggregator are not sent over the server's link, and its grants have no effect. */
OPEN(test_grant_of_the_server) {
  push_first();
  via(0, 1, 7, 3);
  grant(0, 1, SHARD);
  HUSH(HOP(3));
  hop_grant(3, 0, 1, 7, CHUNK);
  grant(0, 1, SHARD);
  assert_int_equal(talk_skip(HOP(3)), 1);
  HUSH(SERVER(0));
  /* Direct: starts at the first byte after a grant. */
  via(0, 1, 8, MLFAB__NO_NODE);
  assert_int_equal(t->detached, 1);
  HUSH(SERVER(0));
  grant(0, 1, 30000);
  HEAR(SERVER(0), CHUNK, chunk, m->offset == 0);
  assert_int_equal(talk_skip(SERVER(0)), 2);
  HUSH(HOP(3));
  assert_false(wanted(3));
}

/* From one aggregator to another and back: the first one's bytes are taken back; if they are reported all the same, the
 * report does not count for the bytes that are lent now. */
OPEN(test_hop_and_back) {
  mlfab_request request = push_first();
  talk_room(HOP(3), 2);
  route(0, 1, 7, 3);
  assert_int_equal(talk_skip(HOP(3)), 2);
  via(0, 1, 8, 2);
  assert_int_equal(t->detached, 2);
  assert_int_equal(talk_lent(HOP(3)), 0);
  talk_room(HOP(3), -1);
  HUSH(HOP(3));
  HUSH(HOP(2));
  talk_room(HOP(2), 1);
  hop_grant(2, 0, 1, 8, SHARD);
  HEAR(HOP(2), HOP_CHUNK, hop_chunk, m->offset == 0 && m->group == 8);
  route(0, 1, 9, 3);
  assert_int_equal(talk_skip(HOP(3)), 6);
  ack(0, 1, 0);
  assert_int_equal(talk_sent_all(HOP(3), LOAN_DETACHED), 2);
  assert_int_equal(talk_sent_all(HOP(2), LOAN_DETACHED), 1);
  PENDING(request);
  assert_int_equal(talk_sent_all(HOP(3), LOAN_LIVE), LENT);
  ENDS(request, 0);
}

/* The same aggregator with a new number: starts at the first byte, and the lent bytes stay lent. */
OPEN(test_group_begins_anew) {
  mlfab_request request = push_first();
  route(0, 1, 7, 3);
  assert_int_equal(talk_skip(HOP(3)), 6);
  via(0, 1, 8, 3);
  assert_int_equal(t->detached, 0);
  hop_grant(3, 0, 1, 7, SHARD); /* the old number */
  HUSH(HOP(3));
  hop_grant(3, 0, 1, 8, SHARD);
  HEAR(HOP(3), HOP_CHUNK, hop_chunk, m->offset == 0 && m->group == 8);
  talk_skip(HOP(3));
  ack(0, 1, 0);
  assert_int_equal(talk_lent(HOP(3)), 2 * LENT);
  for (uint32_t i = 0; i < 2 * LENT; i++) {
    PENDING(request);
    talk_sent(&t->loans[i]);
  }
  ENDS(request, 0);
}

/* The aggregator's grant arrives before the server's VIA: the worker adopts the route, and does not restart when VIA
 * arrives. */
MET(test_adopted) {
  push_first();
  via(0, u, 5, 2);
  talk_room(HOP(2), 1);
  talk_room(HOP(3), 1);
  hop_grant(2, 0, u, 5, SHARD);
  assert_int_equal(talk_skip(HOP(2)), 1);
  hop_grant(3, 0, u, 9, SHARD);
  assert_int_equal(t->detached, 1);
  talk_room(HOP(2), -1);
  HEAR(HOP(3), HOP_CHUNK, hop_chunk, m->offset == 0);
  via(0, u, 6, 4); /* a route in between, which the server announced earlier */
  hop_grant(2, 0, u, 5, SHARD);
  hop_grant(4, 0, u, 6, SHARD);
  hop_grant(4, 0, u, 9, SHARD); /* another update's */
  HUSH(HOP(2));
  HUSH(HOP(4));
  via(0, u, 9, 3);
  talk_room(HOP(3), 1);
  HEAR(HOP(3), HOP_CHUNK, hop_chunk, m->group == 9 && m->offset == CHUNK);
  assert_int_equal(wanted(2) + wanted(4), 0);
  via(0, u, 10, MLFAB__NO_NODE);
  talk_room(HOP(3), -1);
  hop_grant(3, 0, u, 9, SHARD);
  hop_grant(3, 0, u, 10, SHARD);
  HUSH(HOP(3));
  assert_false(wanted(3));
}

/* A stream was reset between a grant and its arrival. A server that then grants directly, because it never put the update
 * into a group, is obeyed. */
MET(test_adopted_too_late) {
  push_first();
  talk_break(SERVER(0));
  hop_grant(3, 0, u, 7, SHARD); /* nothing is sent while the stream is down */
  HUSH(HOP(3));
  talk_room(SERVER(0), 0);
  talk_back(SERVER(0));
  hop_grant(3, 0, u, 7, SHARD); /* not announced again yet */
  HUSH(HOP(3));
  talk_room(SERVER(0), -1);
  HEAR_PUSH(SERVER(0), m->generation == 2);
  talk_room(HOP(3), 1);
  hop_grant(3, 0, u, 7, SHARD);
  assert_int_equal(talk_skip(HOP(3)), 1);
  grant(0, u, SHARD);
  assert_int_equal(t->detached, 1);
  assert_int_equal(talk_skip(SERVER(0)), 6);
  talk_room(HOP(3), -1);
  hop_grant(3, 0, u, 7, SHARD);
  HUSH(HOP(3));
  grant(0, u, SHARD);
  HUSH(SERVER(0));
  assert_false(wanted(3));
}

/* VIA frames of a former stream, for decided updates, and for unknown ones. */
MET(test_old_words) {
  push_announced();
  SAY(SERVER(0), VIA, via, .seq = u, .group = 7, .generation = 0, .aggregator = 3);
  via(0, u + 1, 7, 3);
  hop_grant(3, 0, u + 1, 7, SHARD);
  ack(0, u, 0);
  route(0, u, 8, 3);
  HUSH(HOP(3));
  assert_false(wanted(3));
  assert_true(talk_linked(SERVER(0)));
  assert_int_equal(talk_stats().frames_refused, 0);
}

/* Both parts at hop 3, all bytes lent. */
static mlfab_request push_by_hop(void) {
  mlfab_request request = push_announced();
  for (uint32_t s = 0; s < SERVERS; s++) {
    route(s, 1, 7, 3);
  }
  assert_int_equal(talk_skip(HOP(3)), 12);
  return request;
}

OPEN(test_server_lost) {
  mlfab_request request = push_by_hop();
  talk_break(SERVER(0));
  assert_int_equal(t->detached, LENT); /* the other server's part stays lent */
  assert_int_equal(talk_lent(HOP(3)), LENT);
  talk_back(SERVER(0));
  HEAR_PUSH(SERVER(0), m->generation == 2 && m->flags == MLFAB__PUSH_PLANNED && m->parts == 2);
  route(0, 1, 9, 2);
  assert_int_equal(talk_skip(HOP(2)), 6);
  ack(0, 1, 0);
  ack(1, 1, 0);
  talk_sent_all(HOP(2), LOAN_LIVE);
  PENDING(request);
  talk_sent_all(HOP(3), LOAN_LIVE);
  ENDS(request, 0);
}

OPEN(test_server_dead) {
  mlfab_request request = push_by_hop();
  ack(1, 1, 0);
  for (uint32_t i = 0; i < t->nloans; i++)
    if (t->loans[i].data >= weights + SHARD) talk_sent(&t->loans[i]);
  PENDING(request);
  talk_dies(SERVER(0));
  assert_int_equal(t->detached, LENT);
  ENDS(request, MLFAB_ERR_PEER_DEAD);
}

/* Another copy of server 0 answers: what the former one had applied and this one has not is counted once. */
SCENE(test_another_copy) {
  mlfab_config config = world(MLFAB_SCHEDULER_OWN);
  config.replicas = 1;
  begin_with(&config, NULL);
  for (uint64_t i = 1; i <= 5; i++) {
    push_announced();
    for (uint32_t s = 0; s < SERVERS; s++) ack(s, i, 0);
  }
  const struct {
    uint32_t term;
    uint64_t taken, lost;
  } links[] = {
      {1, 5, 0}, {1, 3, 0}, /* the same copy, which knows of more by now than it has said */
      {2, 3, 2}, {2, 3, 2}, {3, 3, 2}, {4, 2, 3}};
  t->ack.top = 5;
  t->ack.applied[0] = 31;
  for (uint32_t i = 0; i < MLFAB__COUNT(links); i++) {
    talk_break(SERVER(0));
    t->ack.term = links[i].term;
    t->ack.taken = links[i].taken;
    talk_back(SERVER(0));
    talk_skip(SERVER(0));
    assert_int_equal(talk_stats().updates_lost, links[i].lost);
  }
}

/* The error of a DURABLE update says that it may have been applied already, and waits for the replica. */
SCENE(test_withdraw_durable) {
  mlfab_config config = world(MLFAB_SCHEDULER_OWN);
  config.replicas = 1;
  begin_with(&config, NULL);
  mlfab_request request = push_with(
      MLFAB_ALL,
      &SIZED(mlfab_push_options, .scale = 1, .ack = MLFAB_ACK_DURABLE, .timeout_ns = 1500000000));
  for (uint32_t s = 0; s < SERVERS; s++)
    HEAR_PUSH(SERVER(s), m->flags == (MLFAB__PUSH_PLANNED | MLFAB__PUSH_DURABLE));
  talk_wait(1500000000);
  ENDS(request, MLFAB_ERR_IN_DOUBT);
  assert_string_equal(
      talk_error(),
      "update 1: the deadline passed after 1.5 s awaiting server 0 to apply it, and "
      "its replica to have it; it is not known yet whether it was");
}

/* Slices have moved. An update that one server has decided is not sent to another one. */
OPEN(test_lost_in_a_move) {
  uint32_t owners[SLICES];
  for (uint32_t i = 0; i < SLICES; i++) owners[i] = i / (SLICES / SERVERS);
  for (uint32_t at = 0; at < SERVERS; at++) { /* the server that has decided it */
    mlfab_request request = push_announced();
    ack(at, u, 0);
    PENDING(request);
    talk_resume(at + 1, owners, SLICES, (const uint64_t[SERVERS]){u - 1, u - 1});
    ENDS(request, MLFAB_ERR_PARTIAL);
  }
}

/* A server joins the running fabric, and gets slices: it takes updates then. It has the model from server 0. */
SCENE(test_server_comes) {
  uint32_t owners[SLICES];
  mlfab_config config = world(MLFAB_SCHEDULER_BESIDE);
  config.servers_max = SERVERS + 1;
  begin_with(&config, NULL);
  t->ack.model_stands = 0;
  SAY(SERVER(0), MEMBER, member, .node = WORKERS + SERVERS, .incarnation = 77,
      .kind = MLFAB_EVENT_JOINED, .addresses = "talk:s2");
  assert_true(talk_linked(SERVER(2)));
  push_announced();
  for (uint32_t s = 0; s < SERVERS; s++) ack(s, u, 0);
  HUSH(SERVER(2));
  for (uint32_t i = 0; i < SLICES; i++) owners[i] = i % 3;
  SAY_LIST(SERVER(0), RESUME, resume, owners, .attempt = 1, .epoch = 2, .slices = SLICES);
  for (uint32_t s = 0; s < SERVERS; s++) {
    HEAR(SERVER(s), STOP, stop, m->kind == MLFAB__STOP_BEGIN);
    SAY(SERVER(s), HELLO_ACK, hello_ack, .server = s, .epoch = 2, .generation = 1,
        .model_stands = 1, .top = u, .stopped = 1, .kind = MLFAB__ACK_STOP);
  }
  for (uint32_t s = 0; s <= SERVERS; s++) {
    HEAR(SERVER(s), STOP, stop, m->kind == MLFAB__STOP_OVER);
    SAY(SERVER(s), HELLO_ACK, hello_ack, .server = s, .epoch = 2, .generation = 1,
        .model_stands = 1, .top = s < SERVERS ? u : 0);
    HUSH(SERVER(s)); /* no DEFINE */
  }
  push(MLFAB_ALL);
  for (uint32_t s = 0; s <= SERVERS; s++) HEAR_PUSH(SERVER(s), m->seq == 2 && m->parts == 3);
}

/* The deadline passes: every link returns its bytes at once, and frames that cross WITHDRAW change nothing. */
OPEN(test_withdraw) {
  const mlfab_push_options options = {.size = sizeof options, .scale = 1, .timeout_ns = 1500000000};
  mlfab_request request = push_with(MLFAB_ALL, &options);
  int status = 1;
  for (uint32_t s = 0; s < SERVERS; s++) HEAR_PUSH(SERVER(s), m->seq == 1);
  route(0, 1, 7, 3);
  grant(1, 1, SHARD);
  assert_int_equal(talk_skip(HOP(3)), 6);
  assert_int_equal(talk_skip(SERVER(1)), 6);
  talk_wait(1500000000);
  assert_int_equal(t->detached, 2 * LENT);
  ENDS(request, MLFAB_ERR_IN_DOUBT);
  assert_string_equal(talk_error(),
                      "update 1: the deadline passed after 1.5 s awaiting server 0 to apply it by "
                      "way of worker 3; it is not known yet whether it was");
  for (uint32_t s = 0; s < SERVERS; s++) HEAR(SERVER(s), WITHDRAW, withdraw, m->seq == 1);
  via(0, 1, 8, 2);
  hop_grant(3, 0, 1, 7, SHARD);
  grant(1, 1, SHARD);
  HUSH(HOP(3));
  HUSH(SERVER(1));
  assert_int_equal(talk_sent_all(HOP(3), LOAN_DETACHED), LENT);
  for (uint32_t s = 0; s < SERVERS; s++) ack(s, 1, MLFAB_ERR_WITHDRAWN);
  assert_int_equal(mlfab_node_push_status(t->node, 1, &status), 0);
  assert_int_equal(status, MLFAB_ERR_WITHDRAWN);
  assert_int_equal(wanted(2) + wanted(3), 0);
}

/* A node leaves while bytes are lent: its links close, and nothing borrows them any more. */
OPEN(test_close) {
  push_by_hop();
  mlfab_node_leave(t->node, t->now);
  talk_wait(2 * (uint64_t)BEAT);
  assert_false(talk_linked(HOP(3)) || talk_linked(SERVER(0)));
  assert_int_equal(talk_lent(HOP(3)), 0);
  for (uint32_t s = 0; s < SERVERS; s++) HEAR(SERVER(s), BYE, bye, m->code == 0);
}

/* A reused slot tells its own bulks from those of the previous update. */
OPEN(test_slot_used_again) {
  for (uint64_t seq = 1; seq <= 2; seq++) {
    mlfab_request request = push_first();
    route(0, seq, 6 + seq, 3);
    talk_skip(HOP(3));
    if (seq == 1) {
      talk_cancel(request);
      HEAR(SERVER(0), WITHDRAW, withdraw, m->seq == 1);
      ack(0, 1, MLFAB_ERR_WITHDRAWN);
      continue;
    }
    ack(0, seq, 0);
    assert_int_equal(talk_sent_all(HOP(3), LOAN_DETACHED), LENT);
    PENDING(request);
    assert_int_equal(talk_sent_all(HOP(3), LOAN_LIVE), LENT);
    ENDS(request, 0);
  }
}

/* --- drops --- */

/* Each server's verdict on an update of both, and the end of the update. */
OPEN(test_verdicts) {
  enum { DROP = MLFAB_ERR_DROPPED, DEAD = MLFAB_ERR_PEER_DEAD };
  enum { NOT_FINITE = MLFAB_ERR_NOT_FINITE, CALLBACK = MLFAB_ERR_CALLBACK };
  static const char *const texts[] = {
      "dropped by the plan at server 0: its delay would be 31",
      "dropped by the plan at server 1: its delay would be 31; 1 of 2 servers applied their "
      "parts: only what was dropped may be pushed again"};
  const struct {
    int codes[2];
    uint64_t delays[2];
    int status;
    int32_t rank;
    uint32_t applied, refused;
    uint64_t delay;
  } cases[] = {{{DROP, DROP}, {31, 40}, DROP, 0, 0, 2, 40},
               /* Pushing it again would apply a part twice. */
               {{0, DROP}, {3, 31}, MLFAB_ERR_PARTIAL, 1, 1, 1, 3},
               /* Any other error outweighs the drop, whichever server reports first. */
               {{DROP, NOT_FINITE}, {31, 0}, NOT_FINITE, RANK, 0, 2, 0},
               {{NOT_FINITE, DROP}, {0, 31}, NOT_FINITE, RANK, 0, 2, 0},
               {{DROP, CALLBACK}, {31, 0}, CALLBACK, 1, 0, 2, 0},
               {{CALLBACK, DROP}, {0, 31}, CALLBACK, 0, 0, 2, 0},
               {{DROP, DEAD}, {31, 0}, DEAD, 1, 0, 2, 0},
               {{DEAD, DROP}, {0, 31}, DEAD, 0, 0, 2, 0}};
  for (uint32_t i = 0; i < MLFAB__COUNT(cases); i++) {
    mlfab_request request = push_announced();
    char text[256];
    int status = 0;
    for (uint32_t s = 0; s < SERVERS; s++) {
      PENDING(request);
      ack_reached(s, u, cases[i].codes[s], cases[i].codes[s] ? 0 : 12, cases[i].delays[s], 0);
    }
    mlfab_result result = ENDS(request, cases[i].status);
    assert_int_equal(result.rank, cases[i].rank);
    assert_int_equal(result.applied, cases[i].applied);
    assert_int_equal(result.refused, cases[i].refused);
    assert_int_equal(result.delay, cases[i].delay);
    assert_int_equal(result.version, result.applied ? 12 : 0);
    snprintf(text, sizeof text, "update %u: %s", i + 1, texts[i % 2]);
    if (i < 2) assert_string_equal(talk_error(), text);
    assert_int_equal(mlfab_node_push_status(t->node, u, &status), 0);
    assert_int_equal(status, cases[i].status);
    assert_int_equal(talk_stats().updates_dropped, 1);
    assert_int_equal(talk_stats().pushes_refused, i + 1);
  }
  /* The first was applied nowhere: it may be pushed again, under a new number. */
  push_with(MLFAB_ALL, &SIZED(mlfab_push_options, .scale = 1, .retry_seq = 1));
  for (uint32_t s = 0; s < SERVERS; s++) HEAR_PUSH(SERVER(s), m->seq == MLFAB__COUNT(cases) + 1);
}

/* No caller waits for it. */
OPEN(test_dropped_and_abandoned) {
  mlfab_buf buf = buffer(0, weights);
  const mlfab_call call = {.size = sizeof call, .kind = MLFAB_CALL_PUSH, .bufs = &buf, .n = 1};
  assert_int_equal(mlfab_node_submit(t->node, &call, t->now, NULL), 0);
  talk_run();
  HEAR_PUSH(SERVER(0), m->seq == 1);
  ack_reached(0, 1, MLFAB_ERR_DROPPED, 0, 9, 0);
  assert_string_equal(talk_error(),
                      "update 1: dropped by the plan at server 0: its delay would be 9");
  assert_int_equal(talk_stats().updates_dropped, 1);
}

/* Updates without a part for a server count there too. The worker tells it when it begins to count, on a new link, and when
 * its answer shows that it does not know; while it does not count, never. */
OPEN(test_progress_of_others) {
  for (uint64_t i = 1; i <= 3; i++) {
    push_first();
    ack_reached(0, i, 0, 1, 0, i);
  }
  push_announced();
  ack_reached(0, 4, 0, 1, 0, 4);
  ack_reached(1, 4, 0, 1, 0, 1); /* it knows of this one only */
  HUSH(SERVER(1));
  for (int i = 0; i < 2; i++) SAY(SERVER(1), SYNC_ACK, sync_ack, .counts = 1);
  HEAR(SERVER(1), PROGRESS, progress, m->progress == 4);
  HUSH(SERVER(1));
  push(0);
  for (uint32_t s = 0; s < SERVERS; s++) /* also for an update without bytes for it */
    HEAR_PUSH(SERVER(s), m->progress == 4 && m->segments == 1 - s);
  ack_reached(1, 5, 0, 1, 0, 2);
  HEAR(SERVER(1), PROGRESS, progress, m->progress == 5);
  ack_reached(0, 5, 0, 1, 0, 5);
  HUSH(SERVER(1));
  t->ack.top = 5;
  t->ack.applied[0] = 31;
  talk_break(SERVER(1));
  talk_back(SERVER(1));
  HEAR(SERVER(1), PROGRESS, progress, m->progress == 5);
}

/* Rounds went on without this worker: its next update belongs to the open round at all servers, and pulls wait for that
 * round. */
SCENE(test_dropped_late) {
  static uint8_t into[BYTES];
  begin(MLFAB_SCHEDULER_NONE,
        &(mlfab_model_options){
            .size = sizeof(mlfab_model_options),
            .sync = MLFAB_SYNC_DROP,
            .consistency = {.size = sizeof(mlfab_sync), .kind = MLFAB_SYNC_DROP, .need = 2}});
  mlfab_request request = push_announced();
  ack_reached(0, 1, MLFAB_ERR_DROPPED, 0, 0, 7);
  HEAR(SERVER(1), PROGRESS, progress, m->progress == 6);
  ack_reached(1, 1, MLFAB_ERR_DROPPED, 0, 0, 1); /* it does not know that yet */
  HEAR(SERVER(1), PROGRESS, progress, m->progress == 7);
  ENDS(request, MLFAB_ERR_DROPPED);
  assert_string_equal(talk_error(), "update 1: too late at server 0: iteration 0 was complete");
  push(MLFAB_ALL);
  for (uint32_t s = 0; s < SERVERS; s++) HEAR_PUSH(SERVER(s), m->progress == 7);
  CALL(PULL, BUFS(buffer(MLFAB_ALL, into)));
  for (uint32_t s = 0; s < SERVERS; s++) HEAR_PULL(SERVER(s), m->progress == 8);
  ack_reached(0, 2, 0, 0, 0, 9);                         /* late, but kept */
  HEAR(SERVER(1), PROGRESS, progress, m->progress == 8); /* before the update in progress there */
  HEAR(SERVER(1), PULL_CANCEL, pull_cancel, m->request > 0);
  HEAR_PULL(SERVER(1), m->progress == 9); /* it must see that update, which has another number */
  ack_reached(1, 2, 0, 0, 0, 9);
  HUSH(SERVER(0));
  HUSH(SERVER(1));
  push(MLFAB_ALL);
  for (uint32_t s = 0; s < SERVERS; s++) HEAR_PUSH(SERVER(s), m->progress == 9);
}

/* The answer to an update that was not applied is lost: the window in HELLO_ACK tells whether it was dropped and may be
 * retried, whatever the consistency model is now. */
SCENE(test_lost_drop) {
  for (uint32_t i = 0; i < 4; i++) {
    uint32_t dropped = i % 2;
    begin(MLFAB_SCHEDULER_NONE,
          &SIZED(mlfab_model_options,
                 .consistency = {.size = sizeof(mlfab_sync),
                                 .kind = i < 2 ? MLFAB_SYNC_ASYNC : MLFAB_SYNC_DROP,
                                 .need = 1}));
    mlfab_request request = push_announced();
    t->ack.top = 1;
    t->ack.dropped[0] = dropped;
    for (uint32_t s = 0; s < SERVERS; s++) talk_break(SERVER(s));
    for (uint32_t s = 0; s < SERVERS; s++) talk_back(SERVER(s));
    ENDS(request, dropped ? MLFAB_ERR_DROPPED : MLFAB_ERR_REFUSED);
    if (dropped)
      assert_string_equal(talk_error(), "update 1: dropped by server 0, whose answer is lost");
  }
}

/* The caller's count is compared with the library's before anything is sent. */
OPEN(test_progress_is_checked) {
  mlfab_push_options options = {.size = sizeof options, .scale = 1.0};
  for (options.iteration = 1; options.iteration < 5; options.iteration++) {
    char text[80];
    mlfab_push_options wrong = options;
    wrong.iteration++;
    snprintf(text, sizeof text, "push: iteration is %u, this worker's next is %u",
             (unsigned)wrong.iteration, (unsigned)options.iteration);
    FAILS(MLFAB_ERR_ARGUMENT, PUSH, BUFS(buffer(MLFAB_ALL, weights)), .options = &wrong);
    assert_string_equal(talk_error(), text);
    HUSH(SERVER(0));
    push_with(MLFAB_ALL, &options);
    for (uint32_t s = 0; s < SERVERS; s++) HEAR_PUSH(SERVER(s), m->seq == options.iteration);
    if (options.iteration == 3) ack(0, 1, 0); /* one server has decided, which changes nothing */
  }
}

/* --- bytes --- */

/* Packets are not cut, wherever a grant ends; a packet that is not granted whole waits. */
OPEN(test_packets_by_hop) {
  static uint64_t indices[SHARD / 4];
  static float values[SHARD / 4];
  for (uint32_t i = 0; i < SHARD / 4; i++) indices[i] = i, values[i] = 1.0f;
  mlfab_request request =
      CALL(PUSH_SPARSE, .tensor = 0, .indices = indices, .data = values, .count = SHARD / 4);
  memset(values, 0, sizeof values);
  /* Sixteen slices of 4 KiB, a packet each. */
  const uint32_t one = 24 + SLICE, all = 16 * one;
  HEAR_PUSH(SERVER(0), m->flags == (MLFAB__PUSH_PACKED | MLFAB__PUSH_PLANNED) && m->bytes == all);
  via(0, 1, 7, 3);
  hop_grant(3, 0, 1, 7, one - 1);
  HUSH(HOP(3));
  hop_grant(3, 0, 1, 7, one);
  HEAR(HOP(3), HOP_CHUNK, hop_chunk, h->bulk_bytes == one && m->offset == 0 && m->total == all);
  hop_grant(3, 0, 1, 7, UINT64_MAX);
  for (uint64_t at = one; at < all; at += t->heard->bulk_bytes)
    HEAR(HOP(3), HOP_CHUNK, hop_chunk,
         m->offset == at && h->bulk_bytes % one == 0 && h->bulk_bytes <= CHUNK);
  HUSH(HOP(3));
  /* The group starts again without this update: it goes directly, from its first packet. */
  via(0, 1, 8, MLFAB__NO_NODE);
  grant(0, 1, 2 * one + 5);
  float first;
  HEAR(SERVER(0), CHUNK, chunk, m->offset == 0 && h->bulk_bytes == 2 * one);
  memcpy(&first, t->heard->bulk + 24, 4);
  assert_true(first >= 1.0f && first <= 1.0f);
  HUSH(SERVER(0));
  grant(0, 1, all);
  talk_skip(SERVER(0));
  talk_sent_all(SERVER(0), LOAN_LIVE);
  talk_sent_all(HOP(3), LOAN_DETACHED);
  ack(0, 1, 0);
  ENDS(request, 0);
}

static const uint32_t tensor_at[4] = {0, SHARD, SHARD + 2048, BYTES};

/* What server `s` must get of an update of these tensors: its bytes and its segments. */
static uint64_t scan_part(const uint32_t *owners, uint32_t tensors, uint32_t s, uint8_t *bytes,
                          mlfab__segment *segments, uint32_t *nsegments) {
  uint64_t n = 0, last = UINT64_MAX;
  *nsegments = 0;
  for (uint32_t i = 0; i < 3; i++) {
    for (uint64_t at = tensor_at[i]; (tensors & 1u << i) && at < tensor_at[i + 1]; at += 4) {
      if (owners[at / SLICE] != s) continue;
      memcpy(bytes + n, weights + at, 4);
      n += 4;
      if (last != at) segments[(*nsegments)++] = (mlfab__segment){at, 0};
      segments[*nsegments - 1].bytes += 4;
      last = at + 4;
    }
  }
  return n;
}

/* One part: announced, granted step by step, until all of it has arrived. */
/* Returns its number, or 0 when the server has no part. */
static uint64_t check_part(mlfab__rng *prng, const uint32_t *owners, uint32_t tensors, uint32_t s) {
  static uint8_t wanted_bytes[BYTES], got[BYTES];
  static mlfab__segment segments[MLFAB__SEGMENTS_MAX];
  uint32_t n;
  uint64_t bytes = scan_part(owners, tensors, s, wanted_bytes, segments, &n), granted = 0, seq = 0;
  if (bytes == 0) return 0;
  HEAR_PUSH(SERVER(s), (seq = m->seq, granted = m->eager, 1) && m->bytes == bytes &&
                           m->segments == n &&
                           !memcmp(t->segments, segments, n * sizeof *segments));
  for (uint64_t at = 0;;) {
    memcpy(got + at, t->heard->bulk ? t->heard->bulk : weights, t->heard->bulk_bytes);
    at += t->heard->bulk_bytes;
    assert_true(at <= granted);
    if (at == bytes) break;
    if (at == granted) {
      HUSH(SERVER(s));
      granted = mlfab__min(bytes, granted + 4 + 4 * mlfab__rng_below(prng, SHARD / 4));
      grant(s, seq, granted);
    }
    HEAR(SERVER(s), CHUNK, chunk, m->offset == at);
  }
  assert_memory_equal(got, wanted_bytes, bytes);
  talk_sent_all(SERVER(s), LOAN_LIVE);
  ack(s, seq, 0);
  return seq;
}

/* Servers have joined and left: a server's slices are scattered; it gets those and nothing else. */
OPEN(test_scattered_slices) {
  mlfab__rng prng;
  uint64_t tops[SERVERS] = {0};
  mlfab__rng_seed(&prng, 3);
  for (uint32_t i = 0; i < BYTES; i += 4) {
    float x = (float)(i + 1);
    memcpy(weights + i, &x, 4);
  }
  for (uint32_t round = 1; round <= 400; round++) {
    uint32_t owners[SLICES], server = 0, tensors = 1 + round % 7, n = 0;
    mlfab_buf bufs[3];
    for (uint32_t i = 0; i < SLICES; i++) {
      if (mlfab__rng_below(&prng, 2)) server = (uint32_t)mlfab__rng_below(&prng, SERVERS);
      owners[i] = server;
    }
    talk_resume(round, owners, SLICES, tops);
    for (uint32_t i = 0; i < 3; i++)
      if (tensors & 1u << i) bufs[n++] = buffer(i, weights + tensor_at[i]);
    mlfab_request request = CALL(PUSH, .bufs = bufs, .n = n);
    for (uint32_t s = 0; s < SERVERS; s++)
      tops[s] = mlfab__max(tops[s], check_part(&prng, owners, tensors, s));
    ENDS(request, 0);
  }
}
