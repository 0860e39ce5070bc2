/* test_api_collective.c - collectives as they are called: every wrong call gets its own error and changes nothing,
 * every failure is seen once by every worker, names its rank, and is followed by calls that match again.
 *
 * Nodes live in the simulator; what is right is checked by a sum of all who take part. */
#include "said.h"
#include "../../mlfab_partial.h"
#include "../testing.h"

#include <math.h>

enum { RANKS = 3, COUNT = 40, BUFFERS = 4097 };

static mlfab_collective with(uint32_t op, uint32_t algorithm) {
  return (mlfab_collective){.size = sizeof(mlfab_collective), .op = op, .algorithm = algorithm};
}

static world w; /* of the test that runs */

static void begin_with(uint32_t workers) {
  world_init(&w, workers, 1, 0);
  w.config.timeout_ns = 20ull * WORLD_S;
  w.config.model_max_bytes = 1 << 20;
  world_open(&w, 7);
}

/* What the node said last must hold this text. */
static void said_of(mlfab *node, int code, int32_t rank, const char *text) {
  mlfab_error error;
  assert_int_equal(mlfab_last_error(node, &error), 0);
  if (error.code != code || error.rank != rank || !strstr(error.text, text))
    fail_msg("last error is %s, rank %d, \"%s\"; not rank %d, \"%s\"", mlfab_error_name(error.code),
             (int)error.rank, error.text, (int)rank, text);
}

/* The call ends with this code, and the node says whose rank is to blame, and why. */
#define BLAMED(node, call, code, rank, text) \
  do {                                       \
    world_expect(node, call, code, #call);   \
    said_of(node, code, rank, text);         \
  } while (0)
#define WRONG(node, call, code, text) BLAMED(node, call, code, MLFAB_NO_RANK, text)

/* The calls of all workers succeed. */
static void all_end(const mlfab_request *requests) {
  for (uint32_t i = 0; i < RANKS; i++) OK(w.node[i], mlfab_wait(w.node[i], requests[i], 0, NULL));
}

/* An allreduce of one element. */
static int one_start(uint32_t i, void *x, int dtype, const mlfab_collective *o,
                     mlfab_request *request_p) {
  mlfab_vec one = {x, 1};
  return mlfab_allreduce_start(w.node[i], &one, 1, dtype, o, request_p);
}

static int sum_start(uint32_t i, int64_t *x, mlfab_request *request_p) {
  return one_start(i, x, MLFAB_I64, NULL, request_p);
}

/* A collective of which only the end matters. */
static int small_start(uint32_t i, mlfab_request *request_p) {
  static int64_t memory[64];
  static uint32_t used;
  return sum_start(i, &memory[used++ % 64], request_p);
}

/* All nodes that are there add up, by all kinds of calls, and it is right. */
static void adds_up(void) {
  int64_t data[WORLD_NODES][2], sum = 0, many[WORLD_NODES][WORLD_NODES];
  uint64_t counts[WORLD_NODES] = {0};
  mlfab_request requests[WORLD_NODES][3];
  for (uint32_t i = 0; i < w.workers; i++)
    if (w.node[i]) counts[i] = 1, sum += 1 << i;
  for (uint32_t i = 0; i < w.workers; i++) {
    mlfab_vec vecs[3] = {{&data[i][0], 1}, {NULL, 0}, {&data[i][1], 1}};
    data[i][0] = 1 << i;
    data[i][1] = 2 << i;
    if (!w.node[i]) continue;
    uint64_t mine = 0;
    for (uint32_t r = 0; r < w.workers; r++) {
      many[i][mine] = r == i ? 100 + (int64_t)i : -1;
      mine += counts[r];
    }
    OK(w.node[i], mlfab_allreduce_start(w.node[i], vecs, 3, MLFAB_I64, NULL, &requests[i][0]));
    OK(w.node[i], mlfab_barrier_start(w.node[i], NULL, &requests[i][1]));
    OK(w.node[i],
       mlfab_allgather_start(w.node[i], many[i], counts, MLFAB_I64, NULL, &requests[i][2]));
  }
  for (uint32_t i = 0; i < w.workers; i++)
    for (int k = 0; k < 3 && w.node[i]; k++)
      OK(w.node[i], mlfab_wait(w.node[i], requests[i][k], 0, NULL));
  for (uint32_t i = 0; i < w.workers; i++) {
    uint64_t at = 0;
    if (!w.node[i]) continue;
    assert_true(data[i][0] == sum && data[i][1] == 2 * sum);
    for (uint32_t r = 0; r < w.workers; r++)
      if (counts[r]) assert_true(many[i][at++] == 100 + (int64_t)r);
  }
}

static int begin(void **state) {
  (void)state;
  begin_with(RANKS);
  return 0;
}

/* In an epoch. */
static int begin_added(void **state) {
  (void)begin(state);
  adds_up();
  return 0;
}

static int end(void **state) {
  (void)state;
  world_close(&w);
  return 0;
}

static int added_end(void **state) {
  adds_up();
  return end(state);
}

/* A test that begins its world itself. */
#define WORLD_TEST(name) TEST_WITH(name, NULL, end)
/* A test of RANKS workers, after which collectives are right. */
#define WORKERS_TEST(name) TEST_WITH(name, begin, added_end)
/* The same, before which there are collectives, too. */
#define ADDED_TEST(name) TEST_WITH(name, begin_added, added_end)

/* --- wrong calls --- */

static void add(void *user, void *inout, const void *in, uint64_t count) {
  (void)user, (void)inout, (void)in, (void)count;
}

TEST(test_null) {
  void *memory = NULL;
  mlfab_request r;
  WRONG_ALL(mlfab_allreduce(NULL, &memory, 1, MLFAB_I64, NULL),
            mlfab_allreduce_list(NULL, NULL, 0, 0, NULL),
            mlfab_allreduce_start(NULL, NULL, 0, 0, NULL, &r),
            mlfab_reduce_scatter(NULL, NULL, NULL, 0, NULL),
            mlfab_reduce_scatter_start(NULL, NULL, NULL, 0, NULL, &r),
            mlfab_allgather(NULL, NULL, NULL, 0, NULL),
            mlfab_allgather_start(NULL, NULL, NULL, 0, NULL, &r),
            mlfab_broadcast_start(NULL, 0, NULL, 0, NULL, &r), mlfab_barrier_start(NULL, NULL, &r),
            mlfab_alloc(NULL, 1, &memory), mlfab_free(NULL, NULL));
}

WORKERS_TEST(test_wrong_buffers) {
  static float data[BUFFERS];
  mlfab_vec one = {data, COUNT}, many[BUFFERS];
  mlfab_request r = 0;
  mlfab *n = w.node[0];
  for (int i = 0; i < BUFFERS; i++) many[i] = (mlfab_vec){data + i, 1};
  WRONG(n, mlfab_allreduce_list(n, NULL, 1, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT,
        "an allreduce: the list of buffers is NULL");
  WRONG(n, mlfab_allreduce_list(n, NULL, 0, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT, "no elements");
  WRONG(n, mlfab_allreduce_list(n, many, BUFFERS, MLFAB_F32, NULL), MLFAB_ERR_LIMIT,
        "4097 buffers");
  one.count = 0;
  WRONG(n, mlfab_allreduce_list(n, &one, 1, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT, "no elements");
  one.count = UINT64_MAX / 2;
  WRONG(n, mlfab_allreduce_list(n, &one, 1, MLFAB_F32, NULL), MLFAB_ERR_LIMIT, "model_max_bytes");
  one = (mlfab_vec){NULL, 3};
  WRONG(n, mlfab_allreduce_list(n, &one, 1, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT,
        "buffer 0 is NULL and has 3 elements");
  one = (mlfab_vec){(char *)data + 2, 3};
  WRONG(n, mlfab_allreduce_list(n, &one, 1, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT, "not aligned");
  many[7].data = data + 3;
  WRONG(n, mlfab_allreduce_list(n, many, 9, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT, "overlap");
  one = (mlfab_vec){data, 3};
  WRONG(n, mlfab_allreduce_start(n, &one, 1, MLFAB_F32, NULL, NULL), MLFAB_ERR_ARGUMENT,
        "request_p is NULL");
  WRONG(n, mlfab_allreduce(n, NULL, 5, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT, "NULL");
  WRONG(n, mlfab_allreduce(n, data, 0, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT, "no elements");
  WRONG(n, mlfab_broadcast_start(n, 0, data, 0, NULL, &r), MLFAB_ERR_ARGUMENT, "no elements");
  WRONG(n, mlfab_broadcast_start(n, 0, NULL, 8, NULL, &r), MLFAB_ERR_ARGUMENT, "NULL");
  BLAMED(n, mlfab_broadcast_start(n, RANKS, data, 8, NULL, &r), MLFAB_ERR_RANK_RANGE, RANKS,
         "root 3 is not one of 3 workers");
  EXPECT(n, mlfab_broadcast_start(n, -1, data, 8, NULL, &r), MLFAB_ERR_RANK_RANGE);
  assert_true(r == 0);
}

WORKERS_TEST(test_wrong_types) {
  static double data[COUNT];
  mlfab_vec one = {data, 3};
  mlfab_collective o = with(0, 0);
  uint64_t counts[RANKS] = {1, 2, 0};
  mlfab *n = w.node[0];
  for (int dtype = -1; dtype < 8; dtype++) {
    if (dtype >= MLFAB_F32 && dtype <= MLFAB_BF16) continue;
    WRONG(n, mlfab_allreduce_list(n, &one, 1, dtype, NULL), MLFAB_ERR_DTYPE,
          "is not an element type");
    WRONG(n, mlfab_reduce_scatter(n, data, counts, dtype, NULL), MLFAB_ERR_DTYPE, "element type");
    if (dtype == MLFAB_BYTES) continue;
    WRONG(n, mlfab_allgather(n, data, counts, dtype, NULL), MLFAB_ERR_DTYPE, "element type");
  }
  o.op = 5;
  WRONG(n, mlfab_allreduce_list(n, &one, 1, MLFAB_F64, &o), MLFAB_ERR_ARGUMENT,
        "5 is not an operation");
  o.op = UINT32_MAX;
  WRONG(n, mlfab_allreduce_list(n, &one, 1, MLFAB_F64, &o), MLFAB_ERR_ARGUMENT, "not an operation");
  o = with(MLFAB_OP_MEAN, 0);
  WRONG(n, mlfab_allreduce_list(n, &one, 1, MLFAB_I64, &o), MLFAB_ERR_UNSUPPORTED,
        "MLFAB_OP_MEAN cannot be used with MLFAB_I64");
  o = with(0, MLFAB_ALGORITHM_COUNT);
  EXPECT(n, mlfab_allreduce_list(n, &one, 1, MLFAB_F64, &o), MLFAB_ERR_ARGUMENT);
  o = with(0, 255);
  WRONG(n, mlfab_allreduce_list(n, &one, 1, MLFAB_F64, &o), MLFAB_ERR_ARGUMENT,
        "255 is not an algorithm");
  o = with(0, 256);
  EXPECT(n, mlfab_allreduce_list(n, &one, 1, MLFAB_F64, &o), MLFAB_ERR_ARGUMENT);
  o = with(0, 0);
  o.reduce = add;
  WRONG(n, mlfab_allreduce_list(n, &one, 1, 0, &o), MLFAB_ERR_ARGUMENT, "element_bytes is 0");
  o.element_bytes = 65537;
  WRONG(n, mlfab_allreduce_list(n, &one, 1, 0, &o), MLFAB_ERR_ARGUMENT, "65537");
  o.element_bytes = 8;
  o.refuse_nan = 1;
  WRONG(n, mlfab_allreduce_list(n, &one, 1, 0, &o), MLFAB_ERR_UNSUPPORTED,
        "refuse_nan with a reducer");
  o = with(0, MLFAB_ALGORITHM_PLANNED);
  WRONG(n, mlfab_reduce_scatter(n, data, counts, MLFAB_F64, &o), MLFAB_ERR_UNSUPPORTED,
        "algorithm 5");
  WRONG(n, mlfab_allgather(n, data, counts, MLFAB_F64, &o), MLFAB_ERR_UNSUPPORTED, "algorithm 5");
  o.reduce = add;
  o.element_bytes = 8;
  o.ordered = 1;
  WRONG(n, mlfab_allreduce_list(n, &one, 1, 0, &o), MLFAB_ERR_UNSUPPORTED, "algorithm 5");
  o = with(0, MLFAB_ALGORITHM_TREE);
  WRONG(n, mlfab_allgather(n, data, counts, MLFAB_F64, &o), MLFAB_ERR_UNSUPPORTED, "algorithm 4");
}

WORKERS_TEST(test_wrong_blocks) {
  static float data[COUNT];
  uint64_t counts[RANKS] = {0, 0, 0};
  mlfab *n = w.node[1];
  WRONG(n, mlfab_reduce_scatter(n, data, NULL, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT,
        "a reduce-scatter: counts is NULL");
  WRONG(n, mlfab_allgather(n, data, NULL, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT,
        "an allgather: counts is NULL");
  WRONG(n, mlfab_allgather(n, data, counts, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT, "no elements");
  counts[0] = counts[2] = UINT64_MAX;
  WRONG(n, mlfab_allgather(n, data, counts, MLFAB_F32, NULL), MLFAB_ERR_LIMIT, "model_max_bytes");
  counts[0] = counts[2] = 1;
  WRONG(n, mlfab_reduce_scatter(n, NULL, counts, MLFAB_F32, NULL), MLFAB_ERR_ARGUMENT, "NULL");
}

/* What a caller of an older header does not have is not looked at. */
WORKERS_TEST(test_older_options) {
  int64_t data[RANKS];
  mlfab_request requests[RANKS];
  mlfab_collective o;
  for (uint32_t size = 4; size <= offsetof(mlfab_collective, algorithm); size += 4) {
    for (uint32_t i = 0; i < RANKS; i++) {
      memset(&o, 0xa5, sizeof o);
      o.size = size;
      o.op = MLFAB_OP_MAX;
      data[i] = i + 1;
      OK(w.node[i], one_start(i, &data[i], MLFAB_I64, &o, &requests[i]));
    }
    all_end(requests);
    for (uint32_t i = 0; i < RANKS; i++) assert_true(data[i] == (size >= 8 ? 3 : 6));
  }
}

/* 1,024 calls are open at once, of which only the first ones have begun. */
WORKERS_TEST(test_many_at_once) {
  enum { OPEN = 1024 };
  static mlfab_request requests[RANKS][OPEN];
  mlfab_request more = 0;
  for (uint32_t i = 0; i < RANKS; i++) {
    for (int k = 0; k < OPEN; k++) OK(w.node[i], small_start(i, &requests[i][k]));
    if (i == 0)
      WRONG(w.node[i], small_start(i, &more), MLFAB_ERR_AGAIN, "1024 collectives are under way");
  }
  for (uint32_t i = 0; i < RANKS; i++)
    for (int k = 0; k < OPEN; k++) OK(w.node[i], mlfab_wait(w.node[i], requests[i][k], 0, NULL));
}

/* A list of 4,096 buffers, one element each, in whatever order they lie in memory; two that overlap are named. */
WORKERS_TEST(test_long_list) {
  enum { BUFS = 4096 };
  static int64_t data[RANKS][BUFS];
  static mlfab_vec bufs[RANKS][BUFS + 1];
  mlfab_request requests[RANKS];
  for (uint32_t i = 0; i < RANKS; i++) {
    for (uint32_t k = 0; k < BUFS; k++) {
      uint32_t at = i == 0 ? k : i == 1 ? BUFS - 1 - k : k * 1001 % BUFS; /* a permutation */
      data[i][at] = (int64_t)(k * (i + 1));
      bufs[i][k] = (mlfab_vec){&data[i][at], 1};
    }
  }
  mlfab_vec twice = bufs[1][7];
  twice.data = bufs[1][4000].data;
  bufs[1][BUFS] = bufs[1][7];
  WRONG(w.node[1],
        mlfab_allreduce_start(w.node[1], bufs[1], BUFS + 1, MLFAB_I64, NULL, &requests[1]),
        MLFAB_ERR_LIMIT, "4097 buffers, the limit is 4096");
  bufs[1][7] = twice;
  WRONG(w.node[1], mlfab_allreduce_start(w.node[1], bufs[1], BUFS, MLFAB_I64, NULL, &requests[1]),
        MLFAB_ERR_ARGUMENT, "overlap");
  bufs[1][7] = bufs[1][BUFS];
  for (uint32_t i = 0; i < RANKS; i++)
    OK(w.node[i], mlfab_allreduce_start(w.node[i], bufs[i], BUFS, MLFAB_I64, NULL, &requests[i]));
  all_end(requests);
  for (uint32_t i = 0; i < RANKS; i++)
    for (uint32_t k = 0; k < BUFS; k++) assert_true(*(int64_t *)bufs[i][k].data == (int64_t)k * 6);
}

/* Barriers wait for everybody, in their order, and are apart from collectives: any number is open, none is
 * failed by a death, and one that was withdrawn is called again. */
TEST_WITH(test_barriers, begin, end) {
  enum { OPEN = 20 };
  mlfab_request requests[RANKS][OPEN];
  mlfab_collective o = with(0, 0);
  mlfab_result result;
  int done = 0;
  for (uint32_t i = 0; i < RANKS; i++)
    for (int k = 0; k < (i == 2 ? 7 : OPEN); k++)
      OK(w.node[i], mlfab_barrier_start(w.node[i], NULL, &requests[i][k]));
  for (int k = 0; k < 7; k++) OK(w.node[0], mlfab_wait(w.node[0], requests[0][k], 0, NULL));
  for (int k = 7; k < OPEN; k++) {
    OK(w.node[0], mlfab_test(w.node[0], requests[0][k], &done, &result));
    assert_false(done);
  }
  OK(w.node[0], mlfab_cancel(w.node[0], requests[0][9]));
  EXPECT(w.node[0], mlfab_wait(w.node[0], requests[0][9], 0, NULL), MLFAB_ERR_CANCELLED);
  OK(w.node[0], mlfab_barrier_start(w.node[0], NULL, &requests[0][9]));
  o.timeout_ns = WORLD_S;
  mlfab_request late;
  OK(w.node[1], mlfab_barrier_start(w.node[1], &o, &late));
  BLAMED(w.node[1], mlfab_wait(w.node[1], late, 0, NULL), MLFAB_ERR_TIMEOUT, 2, "worker 2");
  OK(w.node[0], mlfab_sim_crash(w.sim, 2));
  w.node[2] = NULL;
  for (uint32_t i = 0; i < 2; i++)
    for (int k = i == 0 ? 7 : 0; k < OPEN; k++)
      OK(w.node[i], mlfab_wait(w.node[i], requests[i][k], 0, NULL));
}

/* Equal calls in another order: told, with both tags, instead of a wrong sum. */
WORKERS_TEST(test_tags) {
  float data[RANKS][2] = {{1, 1}, {1, 1}, {1, 1}};
  mlfab_request requests[RANKS][2];
  mlfab_collective o = with(MLFAB_OP_SUM, 0);
  mlfab_result result;
  for (int round = 0; round < 2; round++) {
    for (uint32_t i = 0; i < RANKS; i++) {
      for (uint32_t k = 0; k < 2; k++) {
        uint32_t which = round && i == 1 ? 1 - k : k;
        o.tag = 70 + which;
        OK(w.node[i], one_start(i, &data[i][which], MLFAB_F32, &o, &requests[i][k]));
      }
    }
    for (uint32_t i = 0; i < RANKS; i++) {
      for (uint32_t k = 0; k < 2; k++) {
        int code = mlfab_wait(w.node[i], requests[i][k], 0, &result);
        assert_int_equal(code, round ? MLFAB_ERR_MISMATCH : 0);
        if (round) said_of(w.node[i], MLFAB_ERR_MISMATCH, 1, "tag 71");
        if (round) said_of(w.node[i], MLFAB_ERR_MISMATCH, 1, "tag 70");
      }
    }
    if (!round) assert_true(data[2][0] == 3 && data[1][1] == 3);
  }
}

/* Blocks of bytes, of any length. */
WORKERS_TEST(test_bytes) {
  uint8_t data[RANKS][64], own[RANKS][64];
  const uint64_t counts[RANKS] = {3, 0, 46};
  mlfab_request requests[RANKS];
  memset(data, 0, sizeof data);
  for (uint32_t i = 0; i < RANKS; i++) {
    mlfab_collective o = with(0, 0);
    const void *input = own[i];
    memset(own[i], 'a' + (int)i, sizeof own[i]);
    o.inputs = &input;
    OK(w.node[i], mlfab_allgather_start(w.node[i], data[i], counts, MLFAB_BYTES, &o, &requests[i]));
  }
  all_end(requests);
  for (uint32_t i = 0; i < RANKS; i++)
    for (uint32_t k = 0; k < 50; k++) assert_int_equal(data[i][k], k < 3 ? 'a' : k < 49 ? 'c' : 0);
  const mlfab_vec one = {data[0], 1};
  WRONG(w.node[0], mlfab_allreduce_list(w.node[0], &one, 1, MLFAB_BYTES, NULL), MLFAB_ERR_DTYPE,
        "6 is not an element type");
}

/* From inputs that are only read, into other buffers; overlap is refused and changes nothing. */
TEST_WITH(test_inputs, begin, end) {
  int64_t data[RANKS][6];
  static const int64_t from[6] = {1, 2, 3, 4, 5, 6};
  mlfab_request requests[RANKS];
  mlfab_collective o = with(MLFAB_OP_SUM, 0);
  memset(data, 0x77, sizeof data);
  for (uint32_t i = 0; i < RANKS; i++) {
    const void *inputs[2] = {from + 3, from};
    const mlfab_vec vecs[2] = {{data[i], 3}, {data[i] + 3, 3}};
    o.inputs = inputs;
    OK(w.node[i], mlfab_allreduce_start(w.node[i], vecs, 2, MLFAB_I64, &o, &requests[i]));
  }
  all_end(requests);
  for (uint32_t i = 0; i < RANKS; i++)
    for (uint32_t k = 0; k < 6; k++) assert_true(data[i][k] == 3 * from[(k + 3) % 6]);
  const void *bad[2] = {data[0] + 1, from};
  const mlfab_vec vecs[2] = {{data[0] + 3, 3}, {data[0], 2}};
  o.inputs = bad;
  WRONG(w.node[0], mlfab_allreduce_list(w.node[0], vecs, 2, MLFAB_I64, &o), MLFAB_ERR_ARGUMENT,
        "input 0 and buffer 1 overlap");
  bad[0] = NULL;
  WRONG(w.node[0], mlfab_allreduce_list(w.node[0], vecs, 2, MLFAB_I64, &o), MLFAB_ERR_ARGUMENT,
        "input 0 is NULL");
  assert_true(data[0][3] == 3 * from[0]);
  float x = 3;
  mlfab *only = w.node[0];
  assert_int_equal(mlfab_allreduce_mean(only, NULL, 1), MLFAB_ERR_ARGUMENT);
  for (uint32_t i = 1; i < RANKS; i++) OK(w.node[i], mlfab_finish(w.node[i], 0));
  OK(only, mlfab_allreduce_mean(only, &x, 1));
  assert_true(x == 3);
}

WORLD_TEST(test_wrong_states) {
  float x = 1;
  mlfab_request r;
  world_init(&w, 2, 1, 1);
  world_open(&w, 3);
  WRONG(w.node[2], mlfab_allreduce(w.node[2], &x, 1, MLFAB_F32, NULL), MLFAB_ERR_STATE,
        "this node is not a worker");
  WRONG(w.node[2], mlfab_barrier_start(w.node[2], NULL, &r), MLFAB_ERR_STATE, "not a worker");
  adds_up();
  OK(w.node[0], mlfab_finish(w.node[0], 0));
  WRONG(w.node[0], mlfab_allreduce(w.node[0], &x, 1, MLFAB_F32, NULL), MLFAB_ERR_STATE,
        "has finished");
  /* The other one goes on alone, and is told so. */
  uint32_t ranks[2] = {9, 9}, n = 0;
  OK(w.node[1], mlfab_present(w.node[1], ranks, 2, &n));
  assert_true(n == 1 && ranks[0] == 1 && ranks[1] == 9);
  WRONG(w.node[1], mlfab_present(w.node[1], NULL, 1, &n), MLFAB_ERR_ARGUMENT, "ranks is NULL");
  EXPECT(w.node[2], mlfab_present(w.node[2], ranks, 2, &n), MLFAB_ERR_STATE);
  OK(w.node[1], mlfab_allreduce(w.node[1], &x, 1, MLFAB_F32, NULL));
  assert_true(x == 1.0f);
}

/* --- failures --- */

ADDED_TEST(test_deadline) {
  int64_t x = 1;
  mlfab_request r;
  mlfab_vec one = {&x, 1};
  mlfab_collective o = with(0, 0);
  o.timeout_ns = 4ull * WORLD_S;
  uint64_t since = mlfab_sim_clock(w.sim);
  OK(w.node[1], mlfab_allreduce_start(w.node[1], &one, 1, MLFAB_I64, NULL, &r));
  BLAMED(w.node[0], mlfab_allreduce_list(w.node[0], &one, 1, MLFAB_I64, &o), MLFAB_ERR_TIMEOUT, 2,
         "worker 2 has not called it");
  assert_true(mlfab_sim_clock(w.sim) - since < 5ull * WORLD_S);
  BLAMED(w.node[1], mlfab_wait(w.node[1], r, 0, NULL), MLFAB_ERR_TIMEOUT, 2,
         "worker 2 has not called it");
  mlfab_sim_run(w.sim, WORLD_S);
  /* The one that was missing hears of it once, in whatever it calls next. */
  BLAMED(w.node[2], small_start(2, &r), MLFAB_ERR_TIMEOUT, 2, "worker 2 has not called it");
}

ADDED_TEST(test_cancel) {
  int64_t x[RANKS] = {0};
  mlfab_request r[RANKS];
  for (uint32_t i = 1; i < RANKS; i++) OK(w.node[i], sum_start(i, &x[i], &r[i]));
  OK(w.node[1], mlfab_cancel(w.node[1], r[1]));
  EXPECT(w.node[1], mlfab_wait(w.node[1], r[1], 0, NULL), MLFAB_ERR_CANCELLED);
  BLAMED(w.node[2], mlfab_wait(w.node[2], r[2], 0, NULL), MLFAB_ERR_CANCELLED, 1,
         "withdrawn by worker 1");
  EXPECT(w.node[0], small_start(0, &r[0]), MLFAB_ERR_CANCELLED);
}

/* Of the two kinds of sizes that there are the rarer one is to blame. */
TEST(test_sizes_differ) {
  static float data[RANKS][COUNT];
  mlfab_request r[RANKS];
  for (uint32_t odd = 0; odd < RANKS; odd++) {
    for (int how = 0; how < 4; how++) {
      begin_with(RANKS);
      adds_up();
      for (uint32_t i = 0; i < RANKS; i++) {
        mlfab_vec one = {data[i], COUNT - 1};
        mlfab_collective o = with(0, 0);
        uint64_t wrong = i == odd;
        if (how == 0) one.count += wrong;
        if (how == 1 && wrong) o.op = MLFAB_OP_MIN;
        if (how == 2 && wrong) o.algorithm = MLFAB_ALGORITHM_RING;
        OK(w.node[i], how == 3 && wrong
                          ? mlfab_broadcast_start(w.node[i], (int32_t)(odd + 1) % RANKS, data[i], 8,
                                                  NULL, &r[i])
                          : mlfab_allreduce_start(w.node[i], &one, 1, MLFAB_F32, &o, &r[i]));
      }
      for (uint32_t i = 0; i < RANKS; i++) {
        BLAMED(w.node[i], mlfab_wait(w.node[i], r[i], 0, NULL), MLFAB_ERR_MISMATCH, (int32_t)odd,
               "an allreduce of 39 F32 (SUM)");
        if (how == 2)
          said_of(w.node[i], MLFAB_ERR_MISMATCH, (int32_t)odd,
                  "39 F32 (SUM), algorithm RING, worker");
      }
      adds_up();
      world_close(&w);
    }
  }
}

/* Allgathers whose blocks differ, with the same sum; the text has both lists. */
ADDED_TEST(test_blocks_differ) {
  static float data[RANKS][COUNT];
  uint64_t even[RANKS] = {4, 4, 4}, odd[RANKS] = {4, 7, 1};
  mlfab_request r[RANKS];
  for (uint32_t i = 0; i < RANKS; i++)
    OK(w.node[i],
       mlfab_allgather_start(w.node[i], data[i], i == 2 ? odd : even, MLFAB_F32, NULL, &r[i]));
  for (uint32_t i = 0; i < RANKS; i++) {
    BLAMED(w.node[i], mlfab_wait(w.node[i], r[i], 0, NULL), MLFAB_ERR_MISMATCH, 2,
           "worker 2 has called an allgather of 12 F32 (counts 4, 7, 1)");
    said_of(w.node[i], MLFAB_ERR_MISMATCH, 2, "worker 0 an allgather of 12 F32 (counts 4 x 3)");
  }
}

/* One worker is in a barrier, the others in a collective: each deadline says where the other waits, before the first epoch and
 * in it. */
TEST(test_barrier_and_collective) {
  for (int within = 0; within < 2; within++) {
    int64_t x[RANKS] = {0};
    mlfab_request r[RANKS];
    mlfab_collective o = with(0, 0);
    begin_with(RANKS);
    if (within) adds_up();
    o.timeout_ns = 10ull * WORLD_S;
    for (uint32_t i = 0; i < RANKS; i++)
      OK(w.node[i], i == 1 ? mlfab_barrier_start(w.node[i], &o, &r[i])
                           : one_start(i, &x[i], MLFAB_I64, &o, &r[i]));
    BLAMED(w.node[1], mlfab_wait(w.node[1], r[1], 0, NULL), MLFAB_ERR_TIMEOUT, 0,
           "worker 0, which waits in a collective instead");
    BLAMED(w.node[0], mlfab_wait(w.node[0], r[0], 0, NULL), MLFAB_ERR_TIMEOUT, 1,
           "worker 1 waits in a barrier instead");
    world_close(&w);
  }
}

ADDED_TEST(test_not_finite) {
  float x[RANKS] = {1, NAN, 1};
  mlfab_request r[RANKS];
  mlfab_collective o = with(0, 0);
  o.refuse_nan = 1;
  for (uint32_t i = 0; i < RANKS; i++)
    EXPECT(w.node[i], one_start(i, &x[i], MLFAB_F32, &o, &r[i]), i == 1 ? MLFAB_ERR_NOT_FINITE : 0);
  said_of(w.node[1], MLFAB_ERR_NOT_FINITE, 1, "NaN or infinity");
  for (uint32_t i = 0; i < RANKS; i += 2)
    BLAMED(w.node[i], mlfab_wait(w.node[i], r[i], 0, NULL), MLFAB_ERR_NOT_FINITE, 1,
           "worker 1 has NaN or infinity");
  adds_up();
  /* Else it is a number like any other. */
  for (uint32_t i = 0; i < RANKS; i++) OK(w.node[i], one_start(i, &x[i], MLFAB_F32, NULL, &r[i]));
  all_end(r);
  for (uint32_t i = 0; i < RANKS; i++) assert_true(isnan(x[i]));
}

WORLD_TEST(test_death) {
  int64_t x[4] = {0};
  uint64_t counts[4] = {1, 1, 1, 1};
  mlfab_request r[4];
  begin_with(4);
  adds_up();
  for (uint32_t i = 0; i < 3; i++) OK(w.node[i], sum_start(i, &x[i], &r[i]));
  OK(w.node[0], mlfab_sim_crash(w.sim, 2));
  w.node[2] = NULL;
  for (uint32_t i = 0; i < 2; i++)
    BLAMED(w.node[i], mlfab_wait(w.node[i], r[i], 0, NULL), MLFAB_ERR_PEER_DEAD, 2, "worker 2");
  mlfab_sim_run(w.sim, WORLD_S);
  EXPECT(w.node[3], small_start(3, &r[3]), MLFAB_ERR_PEER_DEAD);
  adds_up();
  /* Who is not there has no block, and is no root. */
  BLAMED(w.node[1], mlfab_allgather(w.node[1], x, counts, MLFAB_I64, NULL), MLFAB_ERR_ARGUMENT, 2,
         "does not take part");
  EXPECT(w.node[1], mlfab_broadcast_start(w.node[1], 2, x, 8, NULL, &r[1]), MLFAB_ERR_ARGUMENT);
  adds_up();
}

/* Closing in good order: what it has called is finished, what follows fails once. */
ADDED_TEST(test_leaving) {
  int64_t x[RANKS] = {1, 2, 4};
  mlfab_request r[RANKS];
  for (uint32_t i = 0; i < RANKS; i++) OK(w.node[i], sum_start(i, &x[i], &r[i]));
  OK(w.node[2], mlfab_wait(w.node[2], r[2], 0, NULL));
  assert_int_equal(mlfab_close(&w.node[2]), 0);
  for (uint32_t i = 0; i < 2; i++) {
    OK(w.node[i], mlfab_wait(w.node[i], r[i], 0, NULL));
    assert_true(x[i] == 7);
  }
  for (uint32_t i = 0; i < 2; i++) {
    int code = sum_start(i, &x[i], &r[i]);
    if (!code) code = mlfab_wait(w.node[i], r[i], 0, NULL);
    BLAMED(w.node[i], code, MLFAB_ERR_PEER_CLOSED, 2, "worker 2");
  }
}

/* --- one alone, memory --- */

WORLD_TEST(test_world_of_one) {
  double data[4] = {1, 2, 3, 4};
  uint64_t counts[1] = {4};
  mlfab_vec two[2] = {{data, 1}, {data + 2, 2}};
  mlfab_request r[2];
  mlfab_stats stats;
  begin_with(1);
  mlfab *n = w.node[0];
  for (uint32_t op = MLFAB_OP_SUM; op <= MLFAB_OP_PRODUCT; op++) {
    for (uint32_t algorithm = 0; algorithm < MLFAB_ALGORITHM_COUNT; algorithm++) {
      mlfab_collective o = with(op, algorithm);
      OK(n, mlfab_allreduce_list(n, two, 2, MLFAB_F64, &o));
    }
  }
  OK(n, mlfab_allreduce(n, data, 4, MLFAB_F64, NULL));
  OK(n, mlfab_reduce_scatter(n, data, counts, MLFAB_F64, NULL));
  OK(n, mlfab_allgather(n, data, counts, MLFAB_F64, NULL));
  OK(n, mlfab_broadcast_start(n, 0, data, sizeof data, NULL, &r[0]));
  OK(n, mlfab_wait(n, r[0], 0, NULL));
  for (int i = 0; i < 4; i++) assert_true(data[i] == i + 1.0);
  data[2] = INFINITY;
  mlfab_collective o = with(0, 0);
  o.refuse_nan = 1;
  EXPECT(n, mlfab_allreduce_list(n, two, 2, MLFAB_F64, &o), MLFAB_ERR_NOT_FINITE);
  OK(n, mlfab_allreduce_list(n, two, 2, MLFAB_F64, NULL));
  OK(n, mlfab_get_stats(n, &stats, sizeof stats));
  assert_true(stats.collectives == 5 * MLFAB_ALGORITHM_COUNT + 5 && stats.frames_sent == 0);
  OK(n, mlfab_barrier_start(n, NULL, &r[1]));
  OK(n, mlfab_wait(n, r[1], 0, NULL));
}

/* A program built with an older header gets what it has room for, and its size stays. */
TEST(test_older_info) {
  mlfab *ctx = NULL;
  mlfab_error error;
  mlfab_config config;
  mlfab_partial_options options = {.size = sizeof options, .mode = MLFAB_PARTIAL_SOLO};
  mlfab_partial_info info;
  float x = 1.0f;
  uint32_t id = 0;
  mlfab_config_init(&config);
  assert_int_equal(mlfab_open(&config, &ctx, &error), 0);
  assert_int_equal(mlfab_partial_open(ctx, 1, MLFAB_F32, &options, &id), 0);
  memset(&info, 0xee, sizeof info);
  info.size = offsetof(mlfab_partial_info, workers);
  assert_int_equal(mlfab_partial_reduce(ctx, id, &x, 0, &info), 0);
  assert_int_equal(info.size, offsetof(mlfab_partial_info, workers));
  assert_int_equal(info.active, 1);
  assert_int_equal(info.workers, 0xeeeeeeee);
  assert_int_equal(mlfab_close(&ctx), 0);
}

TEST(test_memory) {
  void *some = NULL, *more = NULL;
  begin_with(2);
  mlfab *n = w.node[0];
  WRONG(n, mlfab_alloc(n, 0, &some), MLFAB_ERR_ARGUMENT, "alloc: 0 bytes");
  WRONG(n, mlfab_alloc(n, 8, NULL), MLFAB_ERR_ARGUMENT, "memory_p is NULL");
  WRONG(n, mlfab_alloc(n, UINT64_MAX, &some), MLFAB_ERR_MEMORY, "out of memory for");
  EXPECT(n, mlfab_alloc(n, UINT64_MAX / 2, &some), MLFAB_ERR_MEMORY);
  assert_null(some);
  WRONG(n, mlfab_free(n, NULL), MLFAB_ERR_ARGUMENT, "does not come from mlfab_alloc");
  WRONG(n, mlfab_free(n, &w), MLFAB_ERR_ARGUMENT, "does not come from mlfab_alloc");
  for (uint64_t bytes = 1; bytes < 100000; bytes = bytes * 7 + 1) {
    OK(n, mlfab_alloc(n, bytes, &some));
    OK(n, mlfab_alloc(n, bytes, &more));
    assert_true((uintptr_t)some % 64 == 0 && (uintptr_t)more % 64 == 0);
    for (uint64_t i = 0; i < bytes; i++) assert_true(((char *)some)[i] == 0);
    memset(some, 1, bytes);
    memset(more, 2, bytes);
    for (uint64_t i = 0; i < bytes; i++) assert_true(((char *)some)[i] == 1);
    WRONG(w.node[1], mlfab_free(w.node[1], some), MLFAB_ERR_ARGUMENT, "of this context");
    OK(n, mlfab_free(n, some));
    WRONG(n, mlfab_free(n, some), MLFAB_ERR_ARGUMENT, "does not come from mlfab_alloc");
  }
  adds_up();
  world_close(&w); /* frees the rest */
}

/* --- the order of members --- */

typedef struct word {
  uint32_t letters;
  char text[WORLD_NODES];
} word;

/* Writes what is in `in` before what is in inout. */
static void append(void *user, void *inout, const void *in, uint64_t count) {
  (void)user;
  for (uint64_t i = 0; i < count; i++) {
    word *right = (word *)inout + i, both = ((const word *)in)[i];
    memcpy(both.text + both.letters, right->text, right->letters);
    both.letters += right->letters;
    *right = both;
  }
}

static void spells(const char *wanted) {
  word words[WORLD_NODES];
  mlfab_request requests[WORLD_NODES];
  mlfab_collective o = with(0, 0);
  o.reduce = append;
  o.element_bytes = sizeof(word);
  o.ordered = 1;
  for (uint32_t i = 0; i < w.workers; i++) {
    mlfab_vec vec = {&words[i], 1};
    words[i] = (word){1, {(char)('a' + i)}};
    OK(w.node[i], mlfab_allreduce_start(w.node[i], &vec, 1, 0, &o, &requests[i]));
  }
  for (uint32_t i = 0; i < w.workers; i++) {
    OK(w.node[i], mlfab_wait(w.node[i], requests[i], 0, NULL));
    if (strncmp(words[i].text, wanted, sizeof words[i].text) != 0)
      fail_msg("%.8s, not %s", words[i].text, wanted);
  }
}

/* Hosts with more bandwidth come first where that is asked for, from the next epoch on. */
TEST(test_order_by_rate) {
  float x = NAN;
  mlfab_vec one = {&x, 1};
  mlfab_collective o = with(0, 0);
  for (uint32_t by_rate = 0; by_rate < 2; by_rate++) {
    world_init(&w, 4, 1, 0);
    w.config.order_by_rate = by_rate;
    world_open(&w, 7);
    spells("abcd");
    for (uint32_t i = 0; i < w.workers; i++)
      OK(w.node[i], mlfab_set_link(w.node[i], 1e9, i == 2 ? 8e8 : i == 1 ? 1e8 : 2e8));
    spells("abcd");
    o.refuse_nan = 1; /* ends the epoch */
    EXPECT(w.node[3], mlfab_allreduce_list(w.node[3], &one, 1, MLFAB_F32, &o),
           MLFAB_ERR_NOT_FINITE);
    for (uint32_t i = 0; i < 3; i++)
      EXPECT(w.node[i], mlfab_allreduce_list(w.node[i], &one, 1, MLFAB_F32, NULL),
             MLFAB_ERR_NOT_FINITE);
    spells(by_rate ? "cadb" : "abcd");
    world_close(&w);
  }
}

/* Worker 1 asks server 0 where the others are, and its link breaks with the question on it. It asks
 * again as soon as there is another link, and not when its patience with server 0 has run out. */
WORKERS_TEST(test_question_is_lost) {
  const mlfab_sim_options lossy = {.size = sizeof lossy, .loss = 1.0};
  mlfab_request requests[RANKS];
  float data[RANKS] = {7};
  uint64_t since = 0;
  mlfab_stats stats;
  for (uint32_t i = 0; i < RANKS; i++)
    OK(w.node[i], mlfab_broadcast_start(w.node[i], 0, &data[i], 4, NULL, &requests[i]));
  all_end(requests);
  for (uint32_t i = 0; i < RANKS; i++) {
    const uint32_t rank = (i + 1) % RANKS;
    OK(w.node[rank], one_start(rank, &data[rank], MLFAB_F32, NULL, &requests[rank]));
    if (rank != 1) continue;
    assert_int_equal(mlfab_sim_set_faults(w.sim, &lossy), 0);
    mlfab_sim_run(w.sim, WORLD_MS);
    assert_int_equal(mlfab_sim_set_faults(w.sim, NULL), 0);
    since = mlfab_sim_clock(w.sim);
  }
  all_end(requests);
  OK(w.node[1], mlfab_get_stats(w.node[1], &stats, sizeof stats));
  assert_true(data[0] == 21 && data[1] == 21 && data[2] == 21);
  assert_true(stats.reconnects > 0 && mlfab_sim_clock(w.sim) - since < 500 * WORLD_MS);
}

TESTS(NULL, NULL)
