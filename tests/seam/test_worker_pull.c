/* test_worker_pull.c - the pulls of a worker in a fabric with a scheduler, directly and through distributors; changes of
 * consistency; and frames that do not fit. */
#include "tests/seam/worker_talk.h"

#include "core/base/request.h"

static uint8_t pulled[BYTES];
static uint64_t asked; /* request number of the pull that was heard last */

static mlfab_request pull_all(void) {
  mlfab_request request = CALL(PULL, BUFS(buffer(MLFAB_ALL, pulled)));
  for (uint32_t s = 0; s < SERVERS; s++) HEAR_PULL(SERVER(s), (asked = m->request) > 0);
  return request;
}

static void pull_via(uint32_t s, uint32_t attempt, uint32_t aggregator) {
  SAY(SERVER(s), PULL_VIA, pull_via, .request = asked, .attempt = attempt,
      .aggregator = aggregator);
}

/* Bytes of a slice, all of them `fill`, which is also the version. From a hop, or from the server (NO_NODE). */
static void model(uint32_t hop, uint32_t s, uint32_t attempt, uint64_t at, uint8_t fill,
                  uint32_t flags) {
  uint8_t bulk[SLICE];
  memset(bulk, fill, sizeof bulk);
  if (hop == MLFAB__NO_NODE)
    SAY_BULK(SERVER(s), MODEL, model, bulk, SLICE, .request = asked, .offset = at, .bytes = SLICE,
             .version = fill, .commit = fill, .slice = (uint32_t)(at / SLICE), .flags = flags,
             .epoch = 1);
  else
    SAY_BULK(HOP(hop), HOP_MODEL, hop_model, bulk, SLICE, .request = asked, .offset = at,
             .bytes = SLICE, .version = fill, .commit = fill, .slice = (uint32_t)(at / SLICE),
             .flags = flags, .epoch = 1, .server = s, .attempt = attempt);
}

static void shard(uint32_t hop, uint32_t s, uint32_t attempt, uint8_t fill) {
  for (uint64_t at = s * SHARD; at < (s + 1) * SHARD; at += SLICE)
    model(hop, s, attempt, at, fill, at + SLICE == (s + 1) * SHARD ? MLFAB__MODEL_LAST : 0);
}

static void assert_shard(uint32_t s, uint8_t fill) {
  for (uint32_t i = 0; i < SHARD; i++) assert_int_equal(pulled[s * SHARD + i], fill);
}

/* No frame was refused, and server 1 completes the pull. */
static void complete(mlfab_request request) {
  assert_int_equal(talk_stats().frames_refused, 0);
  PENDING(request);
  shard(MLFAB__NO_NODE, 1, 0, 11);
  HUSH(SERVER(1)); /* the server knows its own answer */
  ENDS(request, 0);
  assert_shard(1, 11);
}

OPEN(test_by_hop) {
  mlfab_request request = pull_all();
  pull_via(0, 4, 3);
  assert_true(talk_linked(HOP(3)));
  shard(3, 0, 4, 9);
  HEAR(SERVER(0), PULL_DONE, pull_done, m->request == asked);
  PENDING(request);
  shard(MLFAB__NO_NODE, 1, 0, 11);
  HUSH(SERVER(1));
  assert_int_equal(ENDS(request, 0).version, 11);
  assert_shard(0, 9);
  assert_shard(1, 11);
  assert_int_equal(talk_stats().pulls_finished, 1);
  shard(3, 0, 5, 1); /* late bytes belong to no request */
  assert_shard(0, 9);
  assert_int_equal(talk_stats().frames_refused, 0);
  assert_false(wanted(3));
  push(MLFAB_ALL); /* computed from what was pulled */
  for (uint32_t s = 0; s < SERVERS; s++)
    HEAR_PUSH(SERVER(s), m->versions == 1 && t->versions[0] == (s ? 11 : 9));
}

/* Only the newest route counts, whichever frame announces it first. */
MET(test_ways) {
  mlfab_request request = pull_all();
  memset(pulled, 0, sizeof pulled);
  pull_via(0, 4, 3);
  model(2, 0, 4, 0, 1, 0);              /* another one's */
  model(3, 0, 3, 0, 2, 0);              /* an older attempt */
  model(MLFAB__NO_NODE, 0, 0, 0, 3, 0); /* the server's own older attempt */
  assert_int_equal(pulled[0], 0);
  model(3, 0, 4, 0, 4, 0);
  assert_int_equal(pulled[4095], 4);
  model(2, 0, 6, 0, 6, 0); /* the distributor's frame arrives before the server's PULL_VIA */
  assert_int_equal(pulled[0], 6);
  pull_via(0, 5, 4);
  assert_int_equal(wanted(3) + wanted(4), 0);
  pull_via(0, 6, 2);
  model(MLFAB__NO_NODE, 0, 0, 0, 3, MLFAB__MODEL_LAST);
  assert_int_equal(pulled[0], 6);
  model(2, 0, 6, SLICE, 6, 0);
  assert_int_equal(pulled[SLICE], 6);
  pull_via(0, 7, MLFAB__NO_NODE); /* direct in the end: frames of a distributor do not count */
  model(2, 0, 6, 2 * SLICE, 6, 0);
  assert_int_equal(pulled[2 * SLICE], 0);
  shard(MLFAB__NO_NODE, 0, 0, 7);
  assert_shard(0, 7);
  assert_false(wanted(2));
  complete(request);
}

/* The distributor's link breaks after part of the shard: frames may be lost, so the part is void. */
MET(test_hop_lost) {
  mlfab_request request = pull_all();
  pull_via(0, 4, 3);
  assert_true(wanted(3)); /* it broke before any frame: they may arrive on another link */
  model(3, 0, 4, 0, 4, 0);
  assert_int_equal(pulled[0], 4);
  assert_false(wanted(3));
  pull_via(0, 5, 3);
  talk_wait(BEAT / 2);
  shard(3, 0, 4, 5); /* of the lost attempt */
  assert_int_equal(pulled[0], 4);
  HUSH(SERVER(0));
  assert_true(wanted(3)); /* none of this attempt has arrived */
  shard(3, 0, 5, 6);
  assert_shard(0, 6);
  HEAR(SERVER(0), PULL_DONE, pull_done, m->request == asked);
  complete(request);
}

/* Requested again on a new link: a former distributor's older attempt does not count. */
MET(test_asked_again) {
  mlfab_request request = pull_all();
  pull_via(0, 4, 3);
  model(3, 0, 4, 0, 4, 0);
  talk_break(SERVER(0));
  talk_back(SERVER(0));
  HEAR(SERVER(0), PULL_CANCEL, pull_cancel, m->request == asked);
  HEAR_PULL(SERVER(0), m->request == asked);
  shard(3, 0, 4, 5);
  assert_int_equal(pulled[0], 4);
  HUSH(SERVER(0));
  assert_false(wanted(3));
  pull_via(0, 6, MLFAB__NO_NODE);
  shard(MLFAB__NO_NODE, 0, 0, 8);
  assert_shard(0, 8);
  complete(request);
}

/* The shard may become complete while the server's link is down: then it is not requested again. */
OPEN(test_without_server) {
  mlfab_request request = pull_all();
  pull_via(0, 4, 3);
  talk_break(SERVER(0));
  shard(3, 0, 4, 5);
  assert_shard(0, 5);
  talk_back(SERVER(0));
  HUSH(SERVER(0));
  complete(request);
}

MET(test_ends) {
  /* The deadline passes: both servers are told, and the distributor's link is not wanted any more. */
  const mlfab_pull_options options = {.size = sizeof options, .timeout_ns = 2000000000};
  mlfab_request request = CALL(PULL, BUFS(buffer(MLFAB_ALL, pulled)), .options = &options);
  for (uint32_t s = 0; s < SERVERS; s++) HEAR_PULL(SERVER(s), (asked = m->request) > 0);
  pull_via(0, 4, 3);
  model(3, 0, 4, 0, 4, 0);
  talk_wait(2000000000);
  ENDS(request, MLFAB_ERR_TIMEOUT);
  assert_string_equal(talk_error(),
                      "pull: the deadline passed after 2 s awaiting server 0 by way of worker 3");
  for (uint32_t s = 0; s < SERVERS; s++)
    HEAR(SERVER(s), PULL_CANCEL, pull_cancel, m->request == asked);
  memset(pulled, 0, sizeof pulled);
  shard(3, 0, 4, 5);
  pull_via(0, 5, 3);
  assert_int_equal(pulled[0], 0);
  assert_false(wanted(3));
  /* The next pull has the same slot, but its own routes. */
  uint64_t before = asked;
  request = pull_all();
  pull_via(0, 2, 3);
  talk_wait(BEAT / 2);
  uint64_t now = asked;
  asked = before;
  shard(3, 0, 4, 5);
  asked = now;
  assert_int_equal(pulled[0], 0);
  shard(3, 0, 2, 6);
  assert_shard(0, 6);
  HEAR(SERVER(0), PULL_DONE, pull_done, m->request == asked);
  /* Its other server dies. */
  pull_via(1, 2, 3);
  talk_dies(SERVER(1));
  assert_int_equal(ENDS(request, MLFAB_ERR_PEER_DEAD).rank, 1);
  assert_false(wanted(3));
}

/* The node is closed while a distributor has sent some of the model. */
OPEN(test_close) {
  pull_all();
  pull_via(0, 4, 3);
  model(3, 0, 4, 0, 4, 0);
}

/* A server tells whom it waits for, which an expired deadline then names, unless this server has answered since. */
OPEN(test_state) {
  static const char text[] = ", the slowest, at server 1: SSP: V_train is 3";
  const mlfab_pull_options options = {.size = sizeof options, .timeout_ns = 2000000000};
  for (uint32_t at = 2; at-- > 0;) {
    mlfab_request request = CALL(PULL, BUFS(buffer(MLFAB_ALL, pulled)), .options = &options);
    for (uint32_t s = 0; s < SERVERS; s++) HEAR_PULL(SERVER(s), (asked = m->request) > 0);
    mlfab__waiting waiting = {.request = asked, .kind = MLFAB__REQUEST_PULL, .rank = 2};
    memset(waiting.text, 'x', sizeof waiting.text - 1);
    if (at) memcpy(waiting.text, text, sizeof text);
    talk_say(SERVER(at), MLFAB__WAITING, mlfab__encode_waiting(t->meta, &waiting), NULL, 0);
    if (!at) shard(MLFAB__NO_NODE, 0, 0, 1);
    talk_wait(2000000000);
    assert_int_equal(ENDS(request, MLFAB_ERR_TIMEOUT).rank, at ? 2 : 1);
    assert_string_equal(
        talk_error(), at ? "pull: the deadline passed after 2 s awaiting worker 2, the slowest, at "
                           "server 1: SSP: V_train is 3"
                         : "pull: the deadline passed after 2 s awaiting server 1");
    for (uint32_t s = 0; s < SERVERS; s++) talk_skip(SERVER(s));
  }
}

/* --- bad frames --- */

/* The node has hung up for this reason. It calls again, and asks again. */
static void refused(uint32_t who, const char *text) {
  assert_false(talk_linked(who));
  if (!strstr(t->log, text)) fail_msg("%s\ninstead of: %s", t->log, text);
  for (uint32_t i = 0; i < 8 && !talk_linked(who); i++) talk_wait(BEAT / 8);
  talk_skip(who);
}

/* A frame, cut or with an extra byte. */
static void cut(uint32_t who, uint8_t type, uint32_t bytes, const char *text) {
  for (uint32_t n = 0; n <= bytes + 1; n++) {
    if (n == bytes) continue;
    talk_say(who, type, n, NULL, 0);
    refused(who, text);
  }
}
#define CUT(who, TYPE, name, ...)                                                       \
  cut(who, MLFAB__##TYPE, mlfab__encode_##name(t->meta, &(mlfab__##name){__VA_ARGS__}), \
      "a malformed " #TYPE)

/* A pull by way of worker 3, so that the node wishes for that link. */
OPEN(test_frames_that_do_not_parse) {
  pull_all();
  pull_via(0, 4, 3);
  talk_wait(BEAT / 2);
  CUT(SERVER(1), VIA, via, 1, 7, 1, 3);
  CUT(SERVER(1), PULL_VIA, pull_via, 1, 7, 3);
  CUT(SERVER(1), SYNC_ACK, sync_ack, 0);
  CUT(HOP(3), HOP_GRANT, hop_grant, 7, 1, SHARD, 0);
  CUT(HOP(3), HOP_MODEL, hop_model, .request = 1, .version = 1, .commit = 1, .server = 4);
  for (uint32_t type = 1; type < MLFAB__FRAME_TYPES; type++) {
    if (!strcmp(mlfab__frame_name((uint8_t)type), "UNKNOWN") || type == MLFAB__HOP_GRANT ||
        type == MLFAB__HOP_MODEL || type == MLFAB__HEARTBEAT || type == MLFAB__BYE ||
        type == MLFAB__REFUSE || type == MLFAB__COLL || type == MLFAB__COLL_ACK)
      continue;
    talk_say(HOP(3), (uint8_t)type, 0, NULL, 0);
    refused(HOP(3), type < MLFAB__MODEL || type > MLFAB__HOP_MODEL
                        ? "a frame that no role of this node takes"
                        : "a frame that no aggregator sends");
  }
}

OPEN(test_frames_that_do_not_fit) {
  CALL(PUSH, BUFS(buffer(0, weights), buffer(1, weights)));
  HEAR_PUSH(SERVER(0), (u = m->seq) > 0);
  talk_skip(SERVER(1));
  pull_all();
  pull_via(0, 4, 3);
  talk_wait(BEAT / 2);
  via(0, u, 0, 3);
  refused(SERVER(0), "a malformed VIA");
  via(0, u, 7, WORKERS);
  refused(SERVER(0), "a malformed VIA");
  via(1, u, 7, 3);
  refused(SERVER(1), "a VIA for an update that is not planned");
  SAY(SERVER(0), PULL_VIA, pull_via, .request = asked, .attempt = 0, .aggregator = 3);
  refused(SERVER(0), "a malformed PULL_VIA");
  pull_via(0, 1, WORKERS);
  refused(SERVER(0), "a malformed PULL_VIA");
  pull_via(0, 5, 3);
  hop_grant(3, 1, u, 7, 10);
  refused(HOP(3), "a HOP_GRANT for an update that is not planned");
  hop_grant(3, 0, u, 0, 10);
  refused(HOP(3), "a malformed HOP_GRANT");
  hop_grant(3, SERVERS, u, 7, 10);
  refused(HOP(3), "a malformed HOP_GRANT");
  model(3, SERVERS, 1, 0, 1, 0);
  refused(HOP(3), "a malformed HOP_MODEL");
}

/* Model bytes outside the shard, the slice or the request, or none at all. */
OPEN(test_model_that_does_not_fit) {
  static const uint8_t bulk[SLICE] = {1};
  mlfab_request request = CALL(PULL, BUFS(buffer(0, pulled)));
  HEAR_PULL(SERVER(0), (asked = m->request) > 0);
  memset(pulled, 0, sizeof pulled);
  const struct {
    uint64_t offset, bytes;
    uint32_t slice;
    int ghost;
  } wrong[] = {
      {SHARD, SLICE, 16, 0}, /* not asked for */
      {4000, 100, 0, 0},     /* beyond the end of its slice */
      {0, 64, 1, 0},         /* of another slice */
      {0, 64, 1000, 0},      {0, 64, 0, 1},
  };
  for (uint32_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    pull_via(0, 2 + i, 3); /* so that the node wishes for the link */
    talk_wait(BEAT / 2);
    SAY_BULK(HOP(3), HOP_MODEL, hop_model, wrong[i].ghost ? NULL : bulk, (uint32_t)wrong[i].bytes,
             .request = asked, .offset = wrong[i].offset, .bytes = wrong[i].bytes, .version = 1,
             .commit = 1, .slice = wrong[i].slice, .attempt = 2 + i);
    refused(HOP(3), "a HOP_MODEL frame that was not asked for");
  }
  uint64_t first = asked;
  pull_all();
  pull_via(0, 2, 3);
  talk_wait(BEAT / 2);
  SAY_BULK(HOP(3), HOP_MODEL, hop_model, bulk, SLICE, .request = asked, .offset = SHARD,
           .bytes = SLICE, .version = 1, .commit = 1, .slice = SHARD / SLICE, .attempt = 2);
  refused(HOP(3), "a HOP_MODEL frame that was not asked for"); /* another server's */
  asked = first;
  pull_via(0, 10, MLFAB__NO_NODE);
  SAY_BULK(SERVER(0), MODEL, model, NULL, 64, .request = asked, .bytes = 64, .version = 1,
           .commit = 1, .flags = MLFAB__MODEL_LAST);
  refused(SERVER(0), "a MODEL frame that was not asked for");
  for (uint32_t i = 0; i < BYTES; i++) assert_int_equal(pulled[i], 0);
  PENDING(request);
}

/* --- a change of consistency --- */

static mlfab_request change(uint32_t server) {
  const mlfab_sync sync = {.size = sizeof sync, .kind = MLFAB_SYNC_SSP, .staleness = 3};
  return CALL(SET_SYNC, .options = &sync, .server = server, .timeout_ns = 3000000000);
}

static void changed(uint32_t s, uint64_t ask, int code) {
  mlfab__sync_ack m = {.ask = ask, .code = code};
  snprintf(m.text, sizeof m.text, "%s", code ? "it does not like it" : "");
  talk_say(SERVER(s), MLFAB__SYNC_ACK, mlfab__encode_sync_ack(t->meta, &m), NULL, 0);
}

static void hear_change(uint32_t s, uint64_t ask) {
  HEAR(SERVER(s), SYNC, sync_ask,
       m->ask == ask && m->consistency.kind == MLFAB_SYNC_SSP && m->consistency.staleness == 3);
}

static void end_change(mlfab_request request, int code, int32_t rank, const char *text) {
  assert_int_equal(ENDS(request, code).rank, rank);
  if (code) assert_string_equal(talk_error(), text);
}

OPEN(test_set_sync) {
  mlfab_request request = change(MLFAB_ALL);
  for (uint32_t s = 0; s < SERVERS; s++) hear_change(s, 1);
  changed(0, 0, 0); /* news only */
  changed(1, 1, 0);
  changed(1, 1, 0); /* repeated */
  PENDING(request);
  changed(0, 1, 0);
  end_change(request, 0, MLFAB_NO_RANK, NULL);
  /* One server only; its answer to another request does not count. */
  request = change(1);
  hear_change(1, 2);
  HUSH(SERVER(0));
  changed(1, 1, 0);
  changed(0, 2, 0);
  PENDING(request);
  SAY(SERVER(1), SYNC_ACK, sync_ack, .ask = 2, .counts = 1);
  end_change(request, 0, MLFAB_NO_RANK, NULL);
  HEAR(SERVER(1), PROGRESS, progress, m->progress == 0); /* it counts now */
  request = change(1);
  hear_change(1, 3);
  changed(1, 3, 0); /* and no more */
  end_change(request, 0, MLFAB_NO_RANK, NULL);
  talk_break(SERVER(1));
  talk_back(SERVER(1));
}

OPEN(test_set_sync_fails) {
  uint64_t ask = 0;
  mlfab_request request = change(MLFAB_ALL);
  for (uint32_t s = 0; s < SERVERS; s++) hear_change(s, 1);
  changed(1, ++ask, MLFAB_ERR_UNSUPPORTED);
  changed(0, ask, MLFAB_ERR_LIMIT); /* the first error is reported */
  end_change(request, MLFAB_ERR_UNSUPPORTED, 1, "set_sync: server 1: it does not like it");
  request = change(MLFAB_ALL);
  for (uint32_t s = 0; s < SERVERS; s++) hear_change(s, 2);
  changed(0, ++ask, 0);
  talk_wait(3000000000);
  end_change(request, MLFAB_ERR_TIMEOUT, 1,
             "set_sync: the deadline passed after 3 s awaiting server 1; it may still change "
             "there");
  changed(1, ask, 0);
  /* On a new link the request is repeated, but only to servers that have not answered. */
  request = change(MLFAB_ALL);
  for (uint32_t s = 0; s < SERVERS; s++) hear_change(s, 3);
  changed(0, ++ask, 0);
  for (uint32_t s = 0; s < SERVERS; s++) talk_break(SERVER(s));
  for (uint32_t s = 0; s < SERVERS; s++) talk_back(SERVER(s));
  HUSH(SERVER(0));
  hear_change(1, 3);
  changed(1, ask, 0);
  end_change(request, 0, MLFAB_NO_RANK, NULL);
  /* A server whose link is down gets the request when it is back; or never. */
  const mlfab_sync sync = {.size = sizeof sync, .kind = MLFAB_SYNC_SSP, .staleness = 3};
  talk_break(SERVER(1));
  request = CALL(SET_SYNC, .options = &sync, .server = 1);
  talk_dies(SERVER(1));
  end_change(request, MLFAB_ERR_PEER_DEAD, 1, "set_sync: server 1 is dead: nobody answers");
  request = change(0); /* which does not need it */
  hear_change(0, 5);
  changed(0, 5, 0);
  end_change(request, 0, MLFAB_NO_RANK, NULL);
}

OPEN(test_set_sync_is_checked) {
  mlfab_sync sync = {.size = sizeof sync, .kind = MLFAB_SYNC_SSP, .staleness = -1};
  const struct {
    const mlfab_sync *sync;
    uint32_t server;
    int code;
    const char *text;
  } wrong[] = {{NULL, 0, MLFAB_ERR_ARGUMENT, "sync is NULL"},
               {&sync, 0, MLFAB_ERR_ARGUMENT, "staleness"},
               {&sync, SERVERS, MLFAB_ERR_ARGUMENT, "set_sync: there is no server 2, there are 2"}};
  for (uint32_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    FAILS(wrong[i].code, SET_SYNC, .options = wrong[i].sync, .server = wrong[i].server);
    assert_non_null(strstr(talk_error(), wrong[i].text));
  }
  HUSH(SERVER(0));
  mlfab_request request = change(0);
  hear_change(0, 1);
  sync.staleness = 0;
  FAILS(MLFAB_ERR_AGAIN, SET_SYNC, .options = &sync, .server = 1);
  PENDING(request);
}
