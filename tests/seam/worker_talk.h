/* worker_talk.h - the world of the tests of a worker: worker 1 of five, and two dedicated servers.
 *
 * A server has a shard of 64 KiB. Tensor 0 is the first shard; 1, of 2 KiB, and 2 are the second. A shard is five chunks
 * that are lent to the transport and one of 4 KiB, which is copied. */
#ifndef WORKER_TALK_H
#define WORKER_TALK_H

#include "tests/seam/talk.h"

enum { RANK = 1, WORKERS = 5, SERVERS = 2, SHARD = 65536, BYTES = SHARD * SERVERS, CHUNK = 12288 };
enum { LENT = 5, EAGER = 8192, SLICE = 4096 };
#define BEAT 1000000000u

static const uint64_t tensor_counts[] = {SHARD / 4, 512, SHARD / 4 - 512};
static uint8_t weights[BYTES];
static uint64_t u; /* number of the update that was announced last */

static mlfab_config world(uint32_t scheduler) {
  return SIZED(mlfab_config, .roles = MLFAB_ROLE_WORKER, .rank = RANK, .workers = WORKERS,
               .servers = SERVERS, .dedicated = 1, .scheduler = scheduler, .chunk_bytes = CHUNK,
               .eager_bytes = EAGER, .heartbeat_ns = BEAT);
}

/* Opens the worker with a model of 32 slices. Loans are reported by hand. */
static void begin_with(const mlfab_config *config, const mlfab_model_options *options) {
  mlfab_model_options cut = {.size = sizeof cut};
  if (options) cut = *options;
  cut.slices = BYTES / SLICE;
  talk_init();
  t->hold_sent = 1;
  u = 0;
  talk_open(config);
  for (uint32_t i = 0; i < 3; i++)
    CALL(TENSOR_ADD, .tensor = i, .dtype = MLFAB_F32, .count = tensor_counts[i]);
  talk_stand(&cut);
}

static inline void begin(uint32_t scheduler, const mlfab_model_options *options) {
  const mlfab_config config = world(scheduler);
  begin_with(&config, options);
}

static inline int open_worker(void **state) {
  (void)state;
  begin(MLFAB_SCHEDULER_BESIDE, NULL);
  return 0;
}

static inline int close_worker(void **state) {
  (void)state;
  for (uint32_t s = 0; s < SERVERS; s++) HUSH(SERVER(s));
  talk_close();
  return 0;
}

static inline mlfab_buf buffer(uint32_t tensor, void *data) {
  return OF(mlfab_buf, .tensor = tensor, .data = data,
            .count = tensor == MLFAB_ALL ? BYTES / 4 : tensor_counts[tensor]);
}

static inline mlfab_request push_with(uint32_t tensor, const mlfab_push_options *options) {
  mlfab_buf buf = buffer(tensor, weights);
  return CALL(PUSH, .bufs = &buf, .n = 1, .options = options);
}

static inline mlfab_request push(uint32_t tensor) { return push_with(tensor, NULL); }

/* An update of both shards, which both servers hear of. */
static inline mlfab_request push_announced(void) {
  mlfab_request request = push(MLFAB_ALL);
  for (uint32_t s = 0; s < SERVERS; s++) HEAR_PUSH(SERVER(s), (u = m->seq) > 0);
  return request;
}

/* An update of the first shard only. */
static inline mlfab_request push_first(void) {
  mlfab_request request = push(0);
  HEAR_PUSH(SERVER(0), (u = m->seq) > 0);
  return request;
}

static inline uint32_t generation(uint32_t s) { return talk_peer_of(SERVER(s))->generation; }

static inline void via(uint32_t s, uint64_t seq, uint64_t group, uint32_t aggregator) {
  SAY(SERVER(s), VIA, via, .seq = seq, .group = group, .generation = generation(s),
      .aggregator = aggregator);
}

static inline void grant(uint32_t s, uint64_t seq, uint64_t upto) {
  SAY(SERVER(s), GRANT, grant, .seq = seq, .upto = upto, .generation = generation(s));
}

static inline void hop_grant(uint32_t hop, uint32_t s, uint64_t seq, uint64_t group,
                             uint64_t upto) {
  SAY(HOP(hop), HOP_GRANT, hop_grant, .server = s, .seq = seq, .group = group, .upto = upto);
}

/* `reached`: the iteration from which the server goes on counting. */
static inline void ack_reached(uint32_t s, uint64_t seq, int code, uint64_t version, uint64_t delay,
                               uint64_t reached) {
  SAY(SERVER(s), PUSH_ACK, push_ack, .seq = seq, .members = 1, .generation = generation(s),
      .code = code, .version = version, .delay = delay, .v_train = reached);
}

static inline void ack(uint32_t s, uint64_t seq, int code) { ack_reached(s, seq, code, 1, 0, 0); }

/* Does the node wish for a link to this worker? It calls again within half a beat if it has lost one. */
static inline int wanted(uint32_t hop) {
  if (talk_linked(HOP(hop))) talk_break(HOP(hop));
  *talk_away(HOP(hop)) = 0;
  talk_wait(BEAT / 2);
  return talk_linked(HOP(hop));
}

/* The node has links to these workers, and no wish for them: an update that is dropped was to go there. */
static inline void meet(void) {
  static const uint32_t hops[] = {2, 3, 4};
  mlfab_request request = push_first();
  for (uint32_t i = 0; i < 3; i++) {
    via(0, u, 1 + i, hops[i]);
    talk_wait(BEAT / 2);
    assert_true(talk_linked(HOP(hops[i])));
  }
  ack(0, u, MLFAB_ERR_DROPPED);
  ENDS(request, MLFAB_ERR_DROPPED);
}

static inline int open_met_worker(void **state) {
  open_worker(state);
  meet();
  return 0;
}

#define OPEN(name) SCENE_WITH(name, open_worker, close_worker)
#define MET(name) SCENE_WITH(name, open_met_worker, close_worker)

#endif
