/* test_api.c - every wrong call gets its own error, none is fatal, and the state stays as it was.
 *
 * Fabrics of several nodes live in the simulator, where deadlines and deaths cost no time; real
 * sockets are used only where the error is about them. After each batch of wrong calls the model
 * must hold the same bits, and a right call must still work. */
#define _GNU_SOURCE 1 /* setenv */
#include "mlfab_node.h"
#include "said.h"
#include "../testing.h"

#include <poll.h>
#include <sys/wait.h>
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

static int barrier_of(mlfab_node *node, mlfab_request *request_p) {
  const mlfab_call call = {.size = sizeof call, .kind = MLFAB_CALL_BARRIER};
  return mlfab_node_submit(node, &call, 0, request_p);
}

enum { COUNT = 3000, LARGE = 300000 };

/* --- a fabric with a model of one tensor 5 --- */

/* Of the test that runs. */
static world w;
static struct {
  int dtype;
  uint64_t count;
} f;
static float data[COUNT];
static mlfab_buf whole = {5, 0, data, COUNT};

static uint64_t width(int dtype) { return dtype == MLFAB_F32 ? 4 : 8; }

static void set(int dtype, void *a, uint64_t i, double x) {
  if (dtype == MLFAB_F32) ((float *)a)[i] = (float)x;
  if (dtype == MLFAB_F64) ((double *)a)[i] = x;
  if (dtype == MLFAB_I64) ((int64_t *)a)[i] = (int64_t)x;
}

static double at(const void *a, uint64_t i) {
  return f.dtype == MLFAB_F32 ? (double)((const float *)a)[i] : ((const double *)a)[i];
}

static void *numbers(int dtype, uint64_t count, double first, double step) {
  void *a = malloc(count * width(dtype));
  assert_non_null(a);
  for (uint64_t i = 0; i < count; i++) set(dtype, a, i, first + step * (double)(i % 97));
  return a;
}

static mlfab_buf buf(uint32_t id, void *at, uint64_t count) {
  return (mlfab_buf){id, 0, at, count};
}

static void begin(uint32_t workers, uint32_t servers, uint32_t dedicated) {
  memset(&f, 0, sizeof f);
  memset(data, 0, sizeof data);
  world_init(&w, workers, servers, dedicated);
  f.dtype = MLFAB_F32;
  f.count = COUNT;
}

static void ones(void) {
  for (int i = 0; i < COUNT; i++) data[i] = 1.0f;
}

static mlfab_model_options rules(uint32_t rule, uint32_t sync) {
  mlfab_model_options o = MLFAB_MODEL_OPTIONS_INIT;
  o.optimizer = rule;
  o.sync = sync;
  return o;
}

static void model(const mlfab_model_options *options) {
  for (uint32_t k = 0; k < w.workers; k++) {
    void *first = numbers(f.dtype, f.count, 1, 0.5);
    mlfab_buf b = buf(5, first, f.count);
    OK(w.node[k], mlfab_tensor_add(w.node[k], 5, f.dtype, f.count));
    OK(w.node[k], mlfab_model_start(w.node[k], options, &b, 1));
    free(first);
  }
}

/* A fabric whose workers have started the model. Returns worker 0. */
static mlfab *start(uint32_t workers, uint32_t servers, uint32_t dedicated,
                    const mlfab_model_options *options) {
  begin(workers, servers, dedicated);
  world_open(&w, 1);
  model(options);
  return w.node[0];
}

static int end(void **state) {
  (void)state;
  world_close(&w);
  return 0;
}

static mlfab *start_large(uint32_t workers, uint32_t servers, uint32_t dedicated, uint64_t seed) {
  begin(workers, servers, dedicated);
  f.count = LARGE;
  world_open(&w, seed);
  model(NULL);
  return w.node[0];
}

static mlfab *start_rounds(uint32_t workers, uint32_t servers, uint32_t dedicated) {
  const mlfab_model_options o = rules(MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_BSP);
  return start(workers, servers, dedicated, &o);
}

/* A fabric without a model. Returns node 0. */
static mlfab *start_empty(uint32_t workers, uint32_t servers, uint32_t dedicated) {
  begin(workers, servers, dedicated);
  world_open(&w, 1);
  return w.node[0];
}

/* A test whose fabric is closed behind it. */
#define FABRIC_TEST(name) TEST_WITH(name, NULL, end)

static mlfab_collective within(uint64_t timeout_ns) {
  return (mlfab_collective){.size = sizeof(mlfab_collective), .timeout_ns = timeout_ns};
}

static mlfab_push_options scaled(double scale) {
  mlfab_push_options o = MLFAB_PUSH_OPTIONS_INIT;
  o.scale = scale;
  return o;
}

/* The whole model as node k sees it. */
static void *pulled(uint32_t k) {
  void *a = malloc(f.count * width(f.dtype));
  mlfab_buf b = buf(5, a, f.count);
  assert_non_null(a);
  OK(w.node[k], mlfab_pull(w.node[k], &b, 1, NULL, NULL));
  return a;
}

/* Each weight that node k sees is larger than before by so much. */
static void grown(uint32_t k, int count, const float *before, float by) {
  float *after = (float *)pulled(k);
  for (int i = 0; i < count; i++) assert_true(after[i] == before[i] + by);
  free(after);
}

/* The last error names this rank. Returns it. */
static mlfab_error blames(mlfab *node, int32_t rank, int is_server) {
  mlfab_error error;
  OK(node, mlfab_last_error(node, &error));
  assert_int_equal(error.rank, rank);
  assert_int_equal(error.is_server != 0, is_server);
  return error;
}

/* The model holds these bits, which are freed; then a right push and pull work. */
static void unchanged(void *before) {
  void *after = pulled(0), *u = numbers(f.dtype, f.count, 1, 0);
  mlfab_buf b = buf(5, u, f.count);
  assert_memory_equal(before, after, f.count * width(f.dtype));
  OK(w.node[0], mlfab_push(w.node[0], &b, 1, NULL, NULL));
  free(after);
  after = pulled(0);
  assert_memory_not_equal(before, after, f.count * width(f.dtype));
  free(before);
  free(after);
  free(u);
}

/* --- NULL and nonsense --- */

TEST(test_null_context) {
  mlfab *none = NULL;
  mlfab_config config;
  mlfab_error error;
  mlfab_request request;
  mlfab_stats stats;
  uint64_t at;
  int done, fd;
  mlfab_config_init(NULL);
  mlfab_config_init(&config);
  assert_int_not_equal(mlfab_open(NULL, &none, &error), 0);
  assert_true(error.text[0] != 0);
  assert_int_equal(mlfab_close(&none), MLFAB_ERR_CLOSED);
  assert_int_equal(mlfab_abandon(&none), MLFAB_ERR_CLOSED);
  WRONG_ALL(mlfab_config_from_env(NULL, &error), mlfab_config_from_env(NULL, NULL),
            mlfab_open(&config, NULL, &error), mlfab_open_start(&config, NULL, NULL),
            mlfab_is_ready(NULL, NULL), mlfab_close(NULL), mlfab_abandon(NULL),
            mlfab_rank(NULL, NULL, NULL, NULL), mlfab_last_error(NULL, &error),
            mlfab_tensor_add(NULL, 1, MLFAB_F32, 1), mlfab_model_start(NULL, NULL, NULL, 0),
            mlfab_save(NULL, "x"), mlfab_push(NULL, NULL, 0, NULL, NULL),
            mlfab_push_start(NULL, NULL, 0, NULL, &request), mlfab_pull(NULL, NULL, 0, NULL, NULL),
            mlfab_pull_start(NULL, NULL, 0, NULL, &request), mlfab_test(NULL, 1, &done, NULL),
            mlfab_wait(NULL, 1, 0, NULL), mlfab_cancel(NULL, 1), mlfab_push_status(NULL, 1, &done),
            mlfab_flush(NULL, 0), mlfab_fd(NULL, &fd), mlfab_progress(NULL, 0),
            mlfab_deadline(NULL, &at), mlfab_barrier(NULL, NULL),
            mlfab_broadcast(NULL, 0, &fd, 4, NULL), mlfab_finish(NULL, 0), mlfab_serve(NULL, 0),
            mlfab_get_stats(NULL, &stats, sizeof stats));
}

static void call_says(mlfab_node *node, const mlfab_call *call, mlfab_request *request_p,
                      const char *text) {
  mlfab_error error;
  assert_int_equal(mlfab_node_submit(node, call, 0, request_p), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_node_last_error(node, &error), 0);
  assert_string_equal(error.text, text);
}

/* Descriptors that are no call of any kind. */
static void check_calls(mlfab_node *node) {
  static const uint32_t opens[] = {MLFAB_CALL_PARTIAL_OPEN, MLFAB_CALL_STOCHASTIC_OPEN};
  mlfab_request request = 7;
  mlfab_error error;
  mlfab_call call = {.kind = MLFAB_CALL_BARRIER};
  call_says(node, NULL, &request, "call is NULL");
  call_says(node, &call, &request, "call.size is not set");
  call.size = sizeof call;
  for (int i = 0; i < 3; i++) {
    call.kind = i == 0 ? 0 : i == 1 ? MLFAB_CALL_VIEW_RELEASE + 1 : UINT32_MAX;
    call_says(node, &call, &request, "call.kind is unknown");
  }
  for (int i = 0; i < 2; i++) {
    call.kind = opens[i];
    call_says(node, &call, &request, "id_p is NULL");
  }
  /* Every kind that has a request says so; the others and pushes need no place for it. */
  for (call.kind = 1; call.kind <= MLFAB_CALL_STOCHASTIC_CLOSE; call.kind++) {
    int code = mlfab_node_submit(node, &call, 0, NULL);
    assert_int_equal(mlfab_node_last_error(node, &error), 0);
    if (code == MLFAB_ERR_ARGUMENT && !strcmp(error.text, "request_p is NULL")) continue;
    assert_true(call.kind <= MLFAB_CALL_PUSH_SPARSE || call.kind == MLFAB_CALL_PARTIAL_CLOSE ||
                call.kind == MLFAB_CALL_STOCHASTIC_STATE ||
                call.kind == MLFAB_CALL_STOCHASTIC_CLOSE);
  }
  assert_int_equal(request, 7);
}

TEST(test_null_node) {
  mlfab_node *none = NULL;
  mlfab_config config;
  mlfab_error error;
  mlfab_request request;
  mlfab_result result;
  mlfab_stats stats;
  mlfab_action action;
  mlfab_io_event event;
  int done;
  memset(&event, 0, sizeof event);
  memset(&action, 0, sizeof action);
  mlfab_config_init(&config);
  assert_int_equal(mlfab_node_open(&config, "", 0, NULL, &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_node_open(NULL, "", 0, &none, &error), MLFAB_ERR_ARGUMENT);
  assert_null(none);
  mlfab_node_close(NULL);
  mlfab_node_close(&none);
  mlfab_node_event(NULL, &event, 0);
  mlfab_node_tick(NULL, 0);
  mlfab_node_done(NULL, &action, 0, 0);
  assert_int_equal(mlfab_node_next(NULL, 0, &action), 0);
  assert_true(mlfab_node_deadline(NULL) == UINT64_MAX);
  assert_int_equal(mlfab_node_ready(NULL, &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(barrier_of(NULL, &request), MLFAB_ERR_ARGUMENT);
  WRONG_ALL(mlfab_node_leave(NULL, 0), mlfab_node_test(NULL, 1, &done, &result),
            mlfab_node_cancel(NULL, 1, 0), mlfab_node_push_status(NULL, 1, &done),
            mlfab_node_last_error(NULL, &error), mlfab_node_stats(NULL, &stats, sizeof stats));
  /* A node that is there, and outputs that are not. */
  assert_int_equal(mlfab_node_open(&config, NULL, 0, &none, NULL), 0);
  mlfab_node_event(none, NULL, 0);
  mlfab_node_done(none, NULL, 0, 0);
  mlfab_node_done(none, &action, 0, 0); /* nothing was yielded */
  event.kind = 99;
  mlfab_node_event(none, &event, 0);
  event.kind = MLFAB_IO_FRAME, event.link = 7; /* no such link */
  mlfab_node_event(none, &event, 0);
  assert_int_equal(mlfab_node_next(none, 0, NULL), 0);
  assert_int_equal(barrier_of(none, NULL), MLFAB_ERR_ARGUMENT);
  check_calls(none);
  assert_int_equal(mlfab_node_last_error(none, NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_node_stats(none, NULL, 8), MLFAB_ERR_ARGUMENT);
  mlfab_node_close(&none);
  mlfab_node_close(&none);
}

TEST(test_null_transport_and_sim) {
  mlfab_sim *sim = NULL;
  mlfab *none = NULL;
  mlfab_error error;
  uint64_t hash;
  uint32_t a, b;
  uint8_t header[64] = {0};
  assert_int_equal(mlfab_frame_check(NULL, &a, &b), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_frame_check(header, NULL, &b), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_frame_check(header, &a, NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_frame_check(header, &a, &b), MLFAB_ERR_FRAME);
  assert_int_not_equal(mlfab_frame_verify(NULL, 64, NULL, 0), 0);
  assert_int_equal(mlfab_sim_create(NULL, &sim), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_sim_step(NULL), 0);
  mlfab_sim_run(NULL, 5);
  mlfab_sim_destroy(NULL);
  mlfab_sim_destroy(&sim);
  assert_true(mlfab_sim_clock(NULL) == 0);
  assert_null(mlfab_sim_host(NULL, 0));
  WRONG_ALL(mlfab_sim_open(NULL, 0, NULL, &none, &error), mlfab_sim_at(NULL, 0, NULL, NULL),
            mlfab_sim_set_rate(NULL, 0, 1, 1), mlfab_sim_partition(NULL, 0, 1, 1),
            mlfab_sim_pause(NULL, 0, 1), mlfab_sim_crash(NULL, 0),
            mlfab_sim_on_crash(NULL, 0, NULL, NULL), mlfab_sim_trace_hash(NULL, &hash));
}

/* --- opening --- */

static int refused_once(const mlfab_config *config, const char *text) {
  mlfab *ctx = NULL;
  mlfab_error error;
  int code = mlfab_open(config, &ctx, &error);
  assert_null(ctx);
  if (!strstr(error.text, text)) fail_msg("\"%s\" does not say \"%s\"", error.text, text);
  assert_int_equal(error.code, code);
  return code;
}

static int refused(const mlfab_config *config, const char *text) {
  mlfab *ctx = NULL;
  int code = refused_once(config, text);
  assert_int_equal(mlfab_open(config, &ctx, NULL), code); /* nobody needs to hear why */
  return code;
}

static mlfab_schedule schedule_of(uint64_t bound) {
  mlfab_schedule s;
  mlfab_schedule_init(&s);
  s.delay_bound = bound;
  return s;
}

TEST(test_configurations) {
  mlfab_config good, c;
  mlfab_config_init(&good);
#define BAD(code, text, ...) \
  c = good, __VA_ARGS__;     \
  assert_int_equal(refused(&c, text), MLFAB_ERR_##code)
  BAD(CONFIG, "size", c.size = 0);
  BAD(RANK_RANGE, "rank 1", c.rank = 1);
  BAD(RANK_RANGE, "rank -1", c.rank = -1);
  BAD(RANK_RANGE, "rank 3", c.workers = 3, c.rank = 3);
  BAD(RANK_RANGE, "rank 2", c.dedicated = 1, c.servers = 2, c.rank = 2, c.roles = 2);
  BAD(CONFIG, "coordinator", c.workers = 2);
  BAD(CONFIG, "servers", c.servers = 2);
  BAD(CONFIG, "65536", c.workers = 65537);
  BAD(CONFIG, "65536", c.workers_max = 65537);
  BAD(CONFIG, "servers_max is below servers", c.workers_max = 65536, c.servers = 2,
      c.servers_max = 1);
  BAD(CONFIG, "roles", c.roles = 16);
  BAD(CONFIG, "roles", c.roles = MLFAB_ROLE_SERVER);
  BAD(CONFIG, "dedicated", c.dedicated = 1, c.roles = 3);
  BAD(CONFIG, "chunk_bytes", c.chunk_bytes = 100);
  BAD(CONFIG, "chunk_bytes", c.chunk_bytes = 1u << 21);
  BAD(CONFIG, "block_bytes", c.block_bytes = 100);
  BAD(CONFIG, "eager_bytes", c.eager_bytes = 100);
  BAD(CONFIG, "merge_max", c.merge_max = 129);
  BAD(CONFIG, "progress", c.progress = 9);
  BAD(CONFIG, "transports", c.transports = 9);
  BAD(CONFIG, "heartbeat_ns", c.heartbeat_ns = 5);
  BAD(CONFIG, "text", memset(c.job, 'x', sizeof c.job));
  BAD(ADDRESS, "pigeon", c.workers = 2, strcpy(c.coordinator, "carrier:pigeon"));
  good.scheduler = MLFAB_SCHEDULER_BESIDE;
  BAD(CONFIG, "unknown scheduler", c.scheduler = 3);
  BAD(CONFIG, "scheduler = MLFAB_SCHEDULER_OWN", c.roles = MLFAB_ROLE_SCHEDULER);
  BAD(CONFIG, "no other role", c.roles = MLFAB_ROLE_SCHEDULER | MLFAB_ROLE_WORKER);
  BAD(CONFIG, "rank of the scheduler process", c.scheduler = MLFAB_SCHEDULER_OWN,
      c.roles = MLFAB_ROLE_SCHEDULER, c.rank = 1, c.workers = 2);
  BAD(CONFIG, "coordinator", c.scheduler = MLFAB_SCHEDULER_OWN);
  BAD(CONFIG, "delay below 0", c.schedule = schedule_of(0));
  BAD(CONFIG, "schedule.size", c.schedule = schedule_of(4), c.schedule.size = 2);
  BAD(CONFIG, "64 accumulators", c.accumulators = 65);
#undef BAD
}

static int give_key(void *user, char *key, size_t room) {
  const char *text = user;
  if (!text) return MLFAB_ERR_IO;
  snprintf(key, room, "%s", text);
  return 0;
}

/* The key may come from a function, which counts before the other sources. No error quotes it. */
TEST(test_key_from) {
  mlfab_config c;
  mlfab_error error;
  mlfab *ctx = NULL;
  mlfab_config_init(&c);
  c.key_from = give_key;
  strcpy(c.key, "short");
  strcpy(c.key_file, "/no/such/file");
  assert_int_equal(refused(&c, "key_from failed"), MLFAB_ERR_IO);
  c.key_user = (void *)(uintptr_t) "";
  assert_int_equal(refused(&c, "no key"), MLFAB_ERR_CONFIG);
  c.key_user = (void *)(uintptr_t) "only-so-long";
  assert_int_equal(mlfab_open(&c, &ctx, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "shorter than 16"));
  assert_null(strstr(error.text, "only-so"));
  c.key_user = (void *)(uintptr_t) "0123456789abcdef";
  assert_int_equal(mlfab_open(&c, &ctx, &error), 0);
  mlfab_close(&ctx);
  c.key_from = NULL;
  assert_int_equal(refused(&c, "/no/such/file"), MLFAB_ERR_CONFIG);
  c.key_file[0] = 0;
  assert_int_equal(refused(&c, "MLFAB_KEY"), MLFAB_ERR_CONFIG);
}

/* Binds a TCP port of loopback and listens; returns it. */
static int take_port(int *fd_p) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t n = sizeof a;
  *fd_p = socket(AF_INET, SOCK_STREAM, 0);
  setsockopt(*fd_p, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
  assert_int_equal(bind(*fd_p, (struct sockaddr *)&a, sizeof a), 0);
  assert_int_equal(listen(*fd_p, 1), 0);
  assert_int_equal(getsockname(*fd_p, (struct sockaddr *)&a, &n), 0);
  return ntohs(a.sin_port);
}
/* Of two workers that meet there. */
static mlfab_config networked(int port) {
  mlfab_config c;
  mlfab_config_init(&c);
  c.workers = 2;
  c.transports = MLFAB_USE_TCP;
  strcpy(c.key, "the-key-of-this-test");
  snprintf(c.coordinator, sizeof c.coordinator, "tcp:127.0.0.1:%d", port);
  return c;
}

TEST(test_sockets) {
  char port[24];
  int fd;
  mlfab_config good = networked(take_port(&fd)), c;
  good.timeout_ns = 300 * (uint64_t)WORLD_MS;
  snprintf(port, sizeof port, "%s", strrchr(good.coordinator, ':') + 1);
  assert_int_equal(refused(&good, port), MLFAB_ERR_ADDRESS_IN_USE);
  c = good;
  /* A label of more than 63 letters, which no name server is asked for. */
  strcpy(c.coordinator,
         "tcp:xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx:4000");
  /* The answer comes before the deadline, unless the machine is very busy. */
  int code = MLFAB_ERR_TIMEOUT;
  for (c.timeout_ns = 100 * WORLD_MS; code == MLFAB_ERR_TIMEOUT; c.timeout_ns *= 2) {
    assert_true(c.timeout_ns < 60ull * WORLD_S);
    code = refused_once(&c, "xxxxxxx");
  }
  assert_int_equal(code, MLFAB_ERR_ADDRESS);
  c.timeout_ns = good.timeout_ns;
  c.rank = 1; /* a name may come to be known while joining lasts */
  assert_int_equal(refused(&c, "xxxxxxx"), MLFAB_ERR_TIMEOUT);
  c = good;
  c.key[0] = 0;
  assert_int_equal(refused(&c, "MLFAB_KEY"), MLFAB_ERR_INSECURE);
  strcpy(c.coordinator, "tcp:0.0.0.0:4000");
  assert_int_equal(refused(&c, "allow_insecure"), MLFAB_ERR_INSECURE);
  strcpy(c.coordinator, "tcp:192.0.2.1:4000");
  c.rank = 1;
  assert_int_equal(refused(&c, "allow_insecure"), MLFAB_ERR_INSECURE);
  strcpy(c.coordinator, "tcp:127.0.0.1");
  assert_int_equal(refused(&c, "127.0.0.1"), MLFAB_ERR_ADDRESS);
  close(fd);
  /* Nobody is there: the deadline passes, and the text says who was awaited. */
  c = good;
  c.rank = 1;
  assert_int_equal(refused(&c, "server 0"), MLFAB_ERR_TIMEOUT);
}

static void open_node(uint32_t i) {
  mlfab_config c = world_config(&w, i);
  sim_open(w.sim, i, &c, &w.node[i]);
}

/* The outcome of joining: 1, or an error whose text has these words. */
static void joins(mlfab *node, int wanted, const char *text) {
  mlfab_error error = {0};
  int ready;
  while ((ready = mlfab_is_ready(node, &error)) == 0) assert_true(mlfab_sim_step(w.sim));
  if (ready != wanted || !strstr(error.text, text))
    fail_msg("%s \"%s\" instead of %s \"%s\"", mlfab_error_name(ready), error.text,
             mlfab_error_name(wanted), text);
}

/* A world with a host for one that is no part of it. */
static void begin_with_host(uint32_t workers, uint32_t servers, uint32_t dedicated, uint64_t seed) {
  begin(workers, servers, dedicated);
  w.nodes++;
  world_network(&w, seed);
  w.nodes--;
}

/* Opens two nodes. These settings make the second one a misfit: it gets this error, and the first node goes on. */
static void misfit(uint32_t workers, const char *const *settings, int code, const char *text) {
  mlfab *stranger = NULL;
  mlfab_error error;
  begin_with_host(workers, 1, 0, 1);
  open_node(0);
  if (workers == 3) {
    open_node(1);
    mlfab_sim_run(w.sim, 10 * WORLD_MS);
  }
  mlfab_config c = world_config(&w, 1);
  c.timeout_ns = 4 * (uint64_t)WORLD_S;
  for (; *settings; settings += 2)
    assert_int_equal(mlfab_config_set(&c, settings[0], settings[1], &error), 0);
  assert_int_equal(mlfab_sim_open(w.sim, w.nodes, &c, &stranger, &error), 0);
  joins(stranger, code, text);
  /* A call on what never joined gets the same error, and is not fatal. */
  assert_int_equal(mlfab_barrier(stranger, NULL), code);
  mlfab_abandon(&stranger);
  for (uint32_t i = 1; i < w.nodes; i++)
    if (!w.node[i]) open_node(i);
  for (uint32_t i = 0; i < w.nodes; i++) world_await(&w, i);
  world_close(&w);
}

TEST(test_misfits) {
#define WITH(...) ((const char *const[]){__VA_ARGS__, NULL})
  misfit(2, WITH("workers", "5"), MLFAB_ERR_WORLD,
         "processes) is 5 at worker 1, 2 at server 0 (worker 0's process)");
  misfit(2, WITH("servers", "2"), MLFAB_ERR_WORLD,
         "servers (MLFAB_SERVERS) is 2 at worker 1, 1 at server 0");
  misfit(2, WITH("dedicated", "1", "role", "worker"), MLFAB_ERR_WORLD,
         "(MLFAB_DEDICATED) is 1 at worker 1, 0 at server 0");
  misfit(2, WITH("job", "another"), MLFAB_ERR_JOB, "job");
  misfit(2, WITH("key", "0123456789abcdef0123456789abcdef"), MLFAB_ERR_JOB,
         "this job has none (MLFAB_KEY)");
  misfit(3, WITH(NULL), MLFAB_ERR_RANK_TAKEN, "worker 1");
  misfit(3, WITH("coordinator", "sim:1"), MLFAB_ERR_REFUSED, "not server 0");
#undef WITH
}

/* A second server under the number of one that lives is refused, whoever has called it before; one that comes
 * when the first is gone is not. */
TEST(test_second_server) {
  for (uint32_t gone = 0; gone < 2; gone++) {
    mlfab *second = NULL;
    mlfab_error error;
    begin_with_host(2, 2, 1, 1 + gone);
    for (uint32_t i = 0; i < w.nodes; i++) open_node(i);
    for (uint32_t i = 0; i < w.nodes; i++) world_await(&w, i);
    if (gone) assert_int_equal(mlfab_sim_crash(w.sim, 3), 0);
    for (uint32_t again = 0; again < 2; again++) {
      mlfab_config c = world_config(&w, 3);
      c.timeout_ns = 10 * (uint64_t)WORLD_S;
      assert_int_equal(mlfab_sim_open(w.sim, w.nodes, &c, &second, &error), 0);
      joins(second, gone ? 1 : MLFAB_ERR_RANK_TAKEN,
            gone ? "" : "server 1 is another process that is here already");
      mlfab_abandon(&second);
      mlfab_sim_run(w.sim, 20 * (uint64_t)WORLD_S);
      if (gone) break;
    }
    if (gone) w.node[3] = NULL;
    assert_int_equal(world_saw(&w, MLFAB_EVENT_DEAD, 1, 1), gone);
    world_close(&w);
  }
}

/* Joining ends at its deadline, and names who is missing. */
FABRIC_TEST(test_missing) {
  begin(4, 1, 0);
  w.config.timeout_ns = 5 * (uint64_t)WORLD_S;
  world_network(&w, 1);
  for (uint32_t i = 0; i < 2; i++) open_node(i);
  for (uint32_t i = 0; i < 2; i++) {
    joins(w.node[i], MLFAB_ERR_TIMEOUT, "worker 2, worker 3");
    assert_in_range(mlfab_sim_clock(w.sim), 5 * (uint64_t)WORLD_S, 6 * (uint64_t)WORLD_S);
  }
}

FABRIC_TEST(test_close_twice) {
  (void)start_empty(1, 1, 0);
  assert_int_equal(mlfab_close(&w.node[0]), 0);
  assert_null(w.node[0]);
  assert_int_equal(mlfab_close(&w.node[0]), MLFAB_ERR_CLOSED);
}

/* --- the model --- */

FABRIC_TEST(test_definition) {
  float first[4] = {1, 2, 3, 4}, more[5];
  mlfab_buf good = buf(5, first, 4);
  mlfab_model_options o;
  mlfab *n = start_empty(1, 1, 0);
  EXPECT(n, mlfab_tensor_add(n, 5, 0, 4), MLFAB_ERR_DTYPE);
  REFUSED(n, mlfab_tensor_add(n, 5, 4, 4), MLFAB_ERR_DTYPE, "tensor 5");
  EXPECT(n, mlfab_tensor_add(n, 5, MLFAB_F32, 0), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_tensor_add(n, MLFAB_ALL, MLFAB_F32, 1), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_model_start(n, NULL, NULL, 0), MLFAB_ERR_ARGUMENT); /* no tensors */
  OK(n, mlfab_tensor_add(n, 5, MLFAB_F32, 4));
  REFUSED(n, mlfab_tensor_add(n, 5, MLFAB_F32, 4), MLFAB_ERR_TENSOR, "5");
  /* First weights that do not fit, options that do not exist: the model can still be started. */
  EXPECT(n, mlfab_model_start(n, NULL, NULL, 1), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_model_start(n, NULL, &good, 0), MLFAB_ERR_ARGUMENT);
#define BAD_BUF(code, ...) EXPECT(n, mlfab_model_start(n, NULL, &(mlfab_buf){__VA_ARGS__}, 1), code)
  BAD_BUF(MLFAB_ERR_SHAPE, 5, 0, more, 5);
  BAD_BUF(MLFAB_ERR_TENSOR, 6, 0, first, 4);
  BAD_BUF(MLFAB_ERR_ARGUMENT, 5, 0, NULL, 4);
#undef BAD_BUF
#define TRY(rule, sync, change, code, text) \
  o = rules(rule, sync), change;            \
  REFUSED(n, mlfab_model_start(n, &o, &good, 1), MLFAB_ERR_##code, text)
  enum { sgd = MLFAB_OPTIMIZER_SGD, momentum = MLFAB_OPTIMIZER_MOMENTUM };
  TRY(sgd, MLFAB_SYNC_ASYNC, o.mean = 1, UNSUPPORTED, "mean");
  TRY(sgd, MLFAB_SYNC_ASYNC, o.deterministic = 1, UNSUPPORTED, "deterministic");
  TRY(9, MLFAB_SYNC_ASYNC, (void)0, UNSUPPORTED, "optimizer");
  TRY(sgd, 9, (void)0, ARGUMENT, "kind of consistency");
  TRY(momentum, MLFAB_SYNC_ASYNC, o.gamma = 1.0, CONFIG, "gamma");
  TRY(momentum, MLFAB_SYNC_ASYNC, o.gamma = -0.5, CONFIG, "gamma");
  TRY(momentum, MLFAB_SYNC_ASYNC, o.gamma = (double)NAN, CONFIG, "gamma");
  TRY(MLFAB_OPTIMIZER_ADAM, MLFAB_SYNC_ASYNC, o.beta2 = 1.5, CONFIG, "beta2");
  TRY(sgd, MLFAB_SYNC_ASYNC, o.slices = 4097, LIMIT, "slices");
  TRY(sgd, MLFAB_SYNC_ASYNC, o.size = 0, ARGUMENT, "size");
#undef TRY
  OK(n, mlfab_model_start(n, NULL, &good, 1));
  EXPECT(n, mlfab_model_start(n, NULL, &good, 1), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_tensor_add(n, 7, MLFAB_F32, 4), MLFAB_ERR_STATE);
  f.count = 4;
  unchanged(pulled(0));
}

FABRIC_TEST(test_int64_options) {
  begin(1, 1, 0);
  f.dtype = MLFAB_I64;
  world_open(&w, 1);
  mlfab *n = w.node[0];
  OK(n, mlfab_tensor_add(n, 5, MLFAB_I64, f.count));
  mlfab_model_options o = rules(MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_BSP);
  o.mean = 1;
  REFUSED(n, mlfab_model_start(n, &o, NULL, 0), MLFAB_ERR_UNSUPPORTED, "mean with int64");
  o = rules(MLFAB_OPTIMIZER_MOMENTUM, MLFAB_SYNC_ASYNC);
  REFUSED(n, mlfab_model_start(n, &o, NULL, 0), MLFAB_ERR_UNSUPPORTED, "int64");
  OK(n, mlfab_model_start(n, NULL, NULL, 0));
  void *u = numbers(MLFAB_I64, f.count, 1, 1), *before = pulled(0);
  mlfab_buf b = buf(5, u, f.count);
  mlfab_push_options p = scaled(0.5);
  EXPECT(n, mlfab_push(n, &b, 1, &p, NULL), MLFAB_ERR_DTYPE);
  p.scale = 1e300;
  EXPECT(n, mlfab_push(n, &b, 1, &p, NULL), MLFAB_ERR_DTYPE);
  p = scaled(1);
  p.clip_norm = 1;
  EXPECT(n, mlfab_push(n, &b, 1, &p, NULL), MLFAB_ERR_DTYPE);
  unchanged(before);
  free(u);
}

/* Workers that define something else are told the first difference; they may try again. */
FABRIC_TEST(test_other_models) {
  mlfab *a = start_empty(2, 1, 0), *b = w.node[1];
  OK(a, mlfab_tensor_add(a, 1, MLFAB_F32, 10));
  OK(a, mlfab_tensor_add(a, 2, MLFAB_F64, 20));
  OK(a, mlfab_model_start(a, NULL, NULL, 0));
  OK(b, mlfab_tensor_add(b, 1, MLFAB_F32, 10));
  REFUSED(b, mlfab_model_start(b, NULL, NULL, 0), MLFAB_ERR_MODEL, "1 tensors, worker 0's has 2");
  OK(b, mlfab_tensor_add(b, 2, MLFAB_F64, 21));
  REFUSED(b, mlfab_model_start(b, NULL, NULL, 0), MLFAB_ERR_MODEL, "id 2, 21");
  mlfab_model_options o = rules(MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC);
  o.slices = 3;
  EXPECT(b, mlfab_model_start(b, &o, NULL, 0), MLFAB_ERR_MODEL);
  OK(a, mlfab_push(a, &(mlfab_buf){1, 0, (float[10]){1}, 10}, 1, NULL, NULL));
}

/* --- pushes and pulls that cannot be --- */

static void wrong_lists(mlfab *n, int (*call)(mlfab *, const mlfab_buf *, uint32_t)) {
  mlfab_buf list[2] = {{5, 0, data, COUNT}, {5, 0, data, COUNT}}, b = list[0];
  EXPECT(n, call(n, NULL, 1), MLFAB_ERR_ARGUMENT);
  EXPECT(n, call(n, &b, 0), MLFAB_ERR_ARGUMENT);
  EXPECT(n, call(n, list, 2), MLFAB_ERR_ARGUMENT);
  b.data = NULL;
  EXPECT(n, call(n, &b, 1), MLFAB_ERR_ARGUMENT);
  b = buf(6, data, COUNT);
  REFUSED(n, call(n, &b, 1), MLFAB_ERR_TENSOR, "6");
  b = buf(5, data, COUNT - 1);
  REFUSED(n, call(n, &b, 1), MLFAB_ERR_SHAPE, "2999");
  said(n, MLFAB_ERR_SHAPE, "3000");
  b = buf(MLFAB_ALL, data, COUNT + 1);
  REFUSED(n, call(n, &b, 1), MLFAB_ERR_SHAPE,
          "the model (MLFAB_ALL) has 3000 elements, the buffer has 3001");
  b = buf(5, (float *)(uintptr_t)((uintptr_t)data + 1), COUNT);
  REFUSED(n, call(n, &b, 1), MLFAB_ERR_ARGUMENT,
          "the buffer of tensor 5 is not aligned to its elements");
  b = buf(MLFAB_ALL, data, UINT64_MAX);
  EXPECT(n, call(n, &b, 1), MLFAB_ERR_SHAPE);
}

static int call_push(mlfab *n, const mlfab_buf *b, uint32_t count) {
  return mlfab_push(n, b, count, NULL, NULL);
}
static int call_push_start(mlfab *n, const mlfab_buf *b, uint32_t count) {
  mlfab_request request = 77;
  int code = mlfab_push_start(n, b, count, NULL, &request);
  assert_int_equal(request, 77);
  return code;
}
static int call_push_forget(mlfab *n, const mlfab_buf *b, uint32_t count) {
  return mlfab_push_start(n, b, count, NULL, NULL);
}
static int call_pull(mlfab *n, const mlfab_buf *b, uint32_t count) {
  return mlfab_pull(n, b, count, NULL, NULL);
}
static int call_pull_start(mlfab *n, const mlfab_buf *b, uint32_t count) {
  mlfab_request request;
  return mlfab_pull_start(n, b, count, NULL, &request);
}

FABRIC_TEST(test_before_the_model) {
  mlfab_request request;
  mlfab *n = start_empty(2, 1, 1), *server = w.node[2];
  EXPECT(n, mlfab_push(n, &whole, 1, NULL, NULL), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_push_start(n, &whole, 1, NULL, &request), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_pull(n, &whole, 1, NULL, NULL), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_save(n, "/nowhere"), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_serve(n, 0), MLFAB_ERR_STATE);
  /* A dedicated server is no worker. */
  EXPECT(server, mlfab_push(server, &whole, 1, NULL, NULL), MLFAB_ERR_STATE);
  EXPECT(server, mlfab_tensor_add(server, 1, MLFAB_F32, 1), MLFAB_ERR_STATE);
  EXPECT(server, mlfab_barrier(server, NULL), MLFAB_ERR_STATE);
  EXPECT(server, mlfab_flush(server, 0), MLFAB_ERR_STATE);
  EXPECT(server, mlfab_save(server, "/nowhere"), MLFAB_ERR_STATE);
  model(NULL);
  unchanged(pulled(0));
}

FABRIC_TEST(test_wrong_lists) {
  mlfab *n = start(1, 1, 0, NULL);
  void *before = pulled(0);
  ones();
  wrong_lists(n, call_push);
  wrong_lists(n, call_push_start);
  wrong_lists(n, call_push_forget);
  wrong_lists(n, call_pull);
  wrong_lists(n, call_pull_start);
  EXPECT(n, mlfab_pull_start(n, &whole, 1, NULL, NULL), MLFAB_ERR_ARGUMENT);
  OK(n, mlfab_flush(n, 0));
  unchanged(before);
}

/* MLFAB_ALL names one array: not where tensors have several types. */
FABRIC_TEST(test_mixed_types) {
  mlfab_buf b = {MLFAB_ALL, 0, data, 4};
  mlfab *n = start_empty(1, 1, 0);
  OK(n, mlfab_tensor_add(n, 1, MLFAB_F32, 2));
  OK(n, mlfab_tensor_add(n, 2, MLFAB_F64, 2));
  EXPECT(n, mlfab_model_start(n, NULL, &b, 1), MLFAB_ERR_DTYPE);
  OK(n, mlfab_model_start(n, NULL, NULL, 0));
  EXPECT(n, mlfab_push(n, &b, 1, NULL, NULL), MLFAB_ERR_DTYPE);
  REFUSED(n, mlfab_pull(n, &b, 1, NULL, NULL), MLFAB_ERR_DTYPE, "MLFAB_ALL");
}

FABRIC_TEST(test_wrong_options) {
  mlfab *n = start(1, 1, 0, NULL);
  void *before = pulled(0);
  ones();
  mlfab_push_options o;
#define TRY(member, value, text) \
  o = scaled(1);                 \
  o.member = value;              \
  REFUSED(n, mlfab_push(n, &whole, 1, &o, NULL), MLFAB_ERR_ARGUMENT, text)
  TRY(size, 0, "size");
  TRY(scale, (double)NAN, "scale");
  TRY(scale, (double)INFINITY, "scale");
  TRY(clip_norm, -1.0, "clip_norm");
  TRY(clip_norm, (double)NAN, "clip_norm");
  TRY(flags, 64, "flags");
  TRY(retry_seq, 999, "999");
#undef TRY
  mlfab_pull_options p = {0};
  REFUSED(n, mlfab_pull(n, &whole, 1, &p, NULL), MLFAB_ERR_ARGUMENT, "size");
  unchanged(before);
}

FABRIC_TEST(test_requests) {
  static mlfab_request many[1024];
  mlfab_request request;
  mlfab_result result;
  int done = 0, status = 0, fd;
  uint64_t at;
  mlfab *n = start(2, 1, 1, NULL);
  EXPECT(n, mlfab_wait(n, 0, 0, NULL), MLFAB_ERR_REQUEST);
  EXPECT(n, mlfab_wait(n, 12345, 0, NULL), MLFAB_ERR_REQUEST);
  EXPECT(n, mlfab_test(n, 12345, &done, NULL), MLFAB_ERR_REQUEST);
  EXPECT(n, mlfab_cancel(n, 12345), MLFAB_ERR_REQUEST);
  OK(n, mlfab_push_start(n, &whole, 1, NULL, &request));
  EXPECT(n, mlfab_test(n, request, NULL, NULL), MLFAB_ERR_ARGUMENT);
  REFUSED(n, mlfab_wait(n, request, 1, NULL), MLFAB_ERR_TIMEOUT, "still open");
  OK(n, mlfab_wait(n, request, 0, &result));
  EXPECT(n, mlfab_wait(n, request, 0, NULL), MLFAB_ERR_REQUEST);
  EXPECT(n, mlfab_test(n, request, &done, NULL), MLFAB_ERR_REQUEST);
  EXPECT(n, mlfab_cancel(n, request), MLFAB_ERR_REQUEST);
  EXPECT(n, mlfab_push_status(n, result.seq, NULL), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_push_status(n, 0, &status), MLFAB_ERR_REQUEST);
  OK(n, mlfab_push_status(n, result.seq, &status));
  assert_int_equal(status, 0);
  EXPECT(n, mlfab_fd(n, &fd), MLFAB_ERR_UNSUPPORTED); /* the simulator has none */
  OK(n, mlfab_deadline(n, &at));
  OK(n, mlfab_rank(n, NULL, NULL, NULL));
  /* No more than 1,024 that nobody waited for. */
  for (int i = 0; i < 1024; i++) {
    if (i % 64 == 0) OK(n, mlfab_flush(n, 0)); /* so many updates may be under way */
    OK(n, mlfab_push_start(n, &whole, 1, NULL, &many[i]));
  }
  EXPECT(n, mlfab_push_start(n, &whole, 1, NULL, &request), MLFAB_ERR_AGAIN);
  EXPECT(n, mlfab_barrier(n, NULL), MLFAB_ERR_AGAIN);
  EXPECT(n, mlfab_pull_start(n, &whole, 1, NULL, &request), MLFAB_ERR_AGAIN);
  for (int i = 1023; i >= 512; i--) OK(n, mlfab_wait(n, many[i], 0, NULL));
  for (int i = 512; i < 1024; i++) { /* in their places */
    if (i % 64 == 0) OK(n, mlfab_flush(n, 0));
    EXPECT(n, mlfab_test(n, many[i], &done, NULL), MLFAB_ERR_REQUEST);
    OK(n, mlfab_push_start(n, &whole, 1, NULL, &many[i]));
  }
  for (int i = 0; i < 1024; i++) OK(n, mlfab_wait(n, many[i], 0, NULL));
  unchanged(pulled(0));
}

/* --- what is not finite --- */

typedef struct poison {
  uint32_t rule, sync;
  int dtype;
  uint64_t count;
  uint32_t servers;
} poison;

/* Worker 1's update has one bad element at `where`; worker 2's good ones stand around it. */
static void poisoned(const poison *p, double bad, uint64_t where) {
  mlfab_request request[3];
  mlfab_result result[3];
  int status;
  begin(3, p->servers, 1);
  f.dtype = p->dtype;
  f.count = p->count;
  world_open(&w, 1 + where);
  mlfab_model_options o = rules(p->rule, p->sync);
  model(&o);
  void *good = numbers(p->dtype, p->count, 1, 0.25), *zero = numbers(p->dtype, p->count, 0, 0);
  void *u = numbers(p->dtype, p->count, 3, 1), *before;
  mlfab_buf b = buf(5, u, p->count), g = buf(5, good, p->count), z = buf(5, zero, p->count);
  set(p->dtype, u, where, bad);
  int rounds = p->sync == MLFAB_SYNC_BSP;
  mlfab_push_options scale = scaled(-0.5);
  /* In rounds all push: zeros beside the bad one, so that the model must stay as it is. */
  before = pulled(0);
  OK(w.node[1], mlfab_push_start(w.node[1], &b, 1, &scale, &request[1]));
  for (uint32_t k = 0; k < 3 && rounds; k += 2)
    OK(w.node[k], mlfab_push_start(w.node[k], &z, 1, &scale, &request[k]));
  EXPECT(w.node[1], mlfab_wait(w.node[1], request[1], 0, &result[1]), MLFAB_ERR_NOT_FINITE);
  for (uint32_t k = 0; k < 3 && rounds; k += 2)
    OK(w.node[k], mlfab_wait(w.node[k], request[k], 0, NULL));
  said(w.node[1], MLFAB_ERR_NOT_FINITE, "worker 1");
  (void)blames(w.node[1], 1, 0);
  assert_int_equal(result[1].rank, 1);
  assert_true(result[1].refused >= 1);
  OK(w.node[1], mlfab_push_status(w.node[1], result[1].seq, &status));
  assert_int_equal(status, MLFAB_ERR_NOT_FINITE);
  assert_true(world_saw(&w, MLFAB_EVENT_REFUSED_UPDATE, 1, 0));
  void *after = pulled(0);
  /* Servers decide separately: only with one is nothing applied at all. */
  if (p->servers == 1) assert_memory_equal(before, after, p->count * width(p->dtype));
  free(before);
  /* The good ones of others, before and behind it, are applied as if it had never been. */
  before = after;
  if (!rounds) {
    OK(w.node[2], mlfab_push_start(w.node[2], &g, 1, &scale, &request[2]));
    OK(w.node[1], mlfab_push_start(w.node[1], &b, 1, &scale, &request[1]));
    OK(w.node[0], mlfab_push_start(w.node[0], &g, 1, &scale, &request[0]));
    OK(w.node[0], mlfab_wait(w.node[0], request[0], 0, NULL));
    EXPECT(w.node[1], mlfab_wait(w.node[1], request[1], 0, NULL), MLFAB_ERR_NOT_FINITE);
    OK(w.node[2], mlfab_wait(w.node[2], request[2], 0, NULL));
    after = pulled(0);
    for (uint64_t i = 0; i < p->count && p->rule == MLFAB_OPTIMIZER_SGD && p->servers == 1; i++)
      assert_true(fabs(at(before, i) - (1 + 0.25 * (double)(i % 97)) - at(after, i)) < 1e-4);
    free(after);
  }
  for (uint64_t i = 0; i < p->count; i++) assert_true(at(before, i) - at(before, i) == 0.0);
  free(before);
  free(good);
  free(zero);
  free(u);
  world_close(&w);
}

/* Small ones lie whole in memory, large ones come in granted chunks; first, middle, last element. */
TEST(test_not_finite) {
  static const uint32_t kinds[] = {MLFAB_OPTIMIZER_SGD, MLFAB_OPTIMIZER_MOMENTUM,
                                   MLFAB_OPTIMIZER_ADAM};
  static const uint64_t counts[] = {7, COUNT, LARGE};
  const double bad[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
  int turn = 0;
  for (uint32_t r = 0; r < 3; r++) {
    for (uint32_t sync = 0; sync < 2; sync++) {
      for (int dtype = MLFAB_F32; dtype <= MLFAB_F64; dtype++) {
        for (int c = 0; c < 3; c++, turn++) {
          uint64_t where[] = {0, counts[c] / 2, counts[c] - 1};
          poison p = {kinds[r], sync, dtype, counts[c], 1 + (uint32_t)(turn % 5 == 0)};
          for (int i = 0; i < 3; i++) {
            if (c == 2 && i != turn % 3) continue; /* the large ones one place each */
            poisoned(&p, bad[(turn + i) % 3], where[i]);
          }
        }
      }
    }
  }
}

/* A pushed difference, and small pushes that could be merged with good ones. */
FABRIC_TEST(test_not_finite_merged) {
  float good[8] = {1, 1, 1, 1, 1, 1, 1, 1}, bad[8] = {1, 1, 1, (float)NAN, 1, 1, 1, 1};
  mlfab_request request[40];
  begin(1, 1, 1);
  f.count = 8;
  world_open(&w, 1);
  model(NULL);
  mlfab *n = w.node[0];
  mlfab_buf g = buf(5, good, 8), b = buf(5, bad, 8);
  float *before = (float *)pulled(0);
  for (int i = 0; i < 40; i++)
    OK(n, mlfab_push_start(n, i % 10 == 5 ? &b : &g, 1, NULL, &request[i]));
  for (int i = 0; i < 40; i++)
    EXPECT(n, mlfab_wait(n, request[i], 0, NULL), i % 10 == 5 ? MLFAB_ERR_NOT_FINITE : 0);
  float *after = (float *)pulled(0);
  for (int i = 0; i < 8; i++) assert_true(after[i] == before[i] + 36.0f);
  /* Nobody waits for it: flush tells, once. */
  OK(n, mlfab_push_start(n, &b, 1, NULL, NULL));
  EXPECT(n, mlfab_flush(n, 0), MLFAB_ERR_NOT_FINITE);
  OK(n, mlfab_flush(n, 0));
  free(after);
  free(before);
  unchanged(pulled(0));
}

/* --- callbacks that refuse --- */

typedef struct judge {
  int refuse, calls;
} judge;

static int judge_update(void *user, const mlfab_update_info *info, uint32_t tensor, int dtype,
                        uint64_t first, uint64_t count, void *at, const void *sum) {
  judge *j = (judge *)user;
  float *weights = (float *)at;
  (void)info, (void)tensor, (void)dtype;
  j->calls++;
  for (uint64_t i = 0; i < count; i++) weights[i] += ((const float *)sum)[i];
  return j->refuse && first + count == COUNT; /* with the last stretch, when most is done */
}

static int judge_pull(void *user, const mlfab_pull_info *info) {
  judge *j = (judge *)user;
  (void)info;
  j->calls++;
  return j->refuse;
}

TEST(test_update_callback) {
  for (uint32_t sync = 0; sync < 2; sync++) {
    judge j = {0};
    mlfab_request request[2];
    begin(2, 1, 1);
    w.config.on_update = judge_update;
    w.config.user = &j;
    w.config.on_event = (mlfab_event_fn)NULL;
    w.config.block_bytes = 1024;
    world_open(&w, 1);
    w.config.user = NULL;
    mlfab_model_options o = rules(MLFAB_OPTIMIZER_SGD, sync);
    model(&o);
    void *before = pulled(0), *u = numbers(MLFAB_F32, COUNT, 1, 1), *got = pulled(1);
    mlfab_buf b = buf(5, u, COUNT), g = buf(5, got, COUNT);
    j.refuse = 1;
    for (uint32_t k = 0; k < 2; k++)
      OK(w.node[k], mlfab_push_start(w.node[k], &b, 1, NULL, &request[k]));
    for (uint32_t k = 0; k < 2; k++) {
      /* Rounds are judged when they are whole: what says so is the pull of the round. */
      int code = mlfab_wait(w.node[k], request[k], 0, NULL);
      EXPECT(w.node[k], code, sync ? 0 : MLFAB_ERR_CALLBACK);
    }
    for (uint32_t k = 0; k < 2 && sync; k++)
      REFUSED(w.node[k], mlfab_pull(w.node[k], &g, 1, NULL, NULL), MLFAB_ERR_CALLBACK, "server 0");
    /* Once said, the model can be had: as it was. */
    for (uint32_t k = 0; k < 2; k++) {
      void *after = pulled(k);
      assert_memory_equal(before, after, COUNT * sizeof(float));
      free(after);
    }
    assert_true(j.calls >= 12); /* the stretches of two updates, or of one round */
    j.refuse = 0;
    for (uint32_t k = 0; k < 2; k++)
      OK(w.node[k], mlfab_push_start(w.node[k], &b, 1, NULL, &request[k]));
    for (uint32_t k = 0; k < 2; k++) OK(w.node[k], mlfab_wait(w.node[k], request[k], 0, NULL));
    OK(w.node[1], mlfab_pull(w.node[1], &g, 1, NULL, NULL));
    for (int i = 0; i < COUNT; i++) {
      float want = ((float *)before)[i] + 2 * ((float *)u)[i];
      assert_true(fabsf(((float *)got)[i] - want) < 1e-3f);
    }
    free(before);
    free(u);
    free(got);
    world_close(&w);
  }
}

FABRIC_TEST(test_pull_callback) {
  judge j = {0};
  begin(1, 2, 1);
  w.config.on_pull = judge_pull;
  w.config.on_event = NULL;
  w.config.user = &j;
  world_open(&w, 1);
  model(NULL);
  void *before = pulled(0);
  j.refuse = 1;
  REFUSED(w.node[0], mlfab_pull(w.node[0], &whole, 1, NULL, NULL), MLFAB_ERR_CALLBACK, "callback");
  j.refuse = 0;
  unchanged(before);
}

/* --- deadlines --- */

/* Does a call on a node at some virtual time, while another call waits. */
typedef struct later {
  mlfab *node;
  int (*call)(struct later *);
  void *data;
  uint64_t bytes; /* of a barrier: its time */
  int32_t root;
  int code;
} later;

static int later_barrier(later *l) {
  const mlfab_collective soon = within(l->bytes);
  return mlfab_barrier(l->node, &soon);
}
static int later_broadcast(later *l) {
  return mlfab_broadcast(l->node, l->root, l->data, l->bytes, NULL);
}
static int later_abandon(later *l) { return mlfab_abandon(l->data); }

static void later_fn(void *user) { ((later *)user)->code = ((later *)user)->call(user); }

static void do_later(later *l, uint64_t in_ns) {
  l->code = 12345;
  assert_int_equal(mlfab_sim_at(w.sim, mlfab_sim_clock(w.sim) + in_ns, later_fn, l), 0);
}

static void both_later(later l[2]) {
  do_later(&l[0], 2 * WORLD_MS);
  do_later(&l[1], 3 * WORLD_MS);
}

/* They end well. */
static void both_ended(const later l[2]) {
  mlfab_sim_run(w.sim, WORLD_S);
  for (int i = 0; i < 2; i++) assert_int_equal(l[i].code, 0);
}

/* Whatever a call refuses, the last error is that call's, with a text. */
FABRIC_TEST(test_errors_have_texts) {
  mlfab_error error;
  start(1, 1, 1, NULL);
  mlfab *n = w.node[0], *server = w.node[1];
  int status = 0;
#define TELLS(node, call, wanted, text)                           \
  EXPECT(node, mlfab_wait(node, 99, 0, NULL), MLFAB_ERR_REQUEST); \
  REFUSED(node, call, wanted, text)
  TELLS(n, mlfab_test(n, 7, NULL, NULL), MLFAB_ERR_ARGUMENT, "done_p");
  TELLS(n, mlfab_fd(n, NULL), MLFAB_ERR_ARGUMENT, "fd_p");
  TELLS(n, mlfab_deadline(n, NULL), MLFAB_ERR_ARGUMENT, "at_ns_p");
  TELLS(n, mlfab_get_stats(n, NULL, 8), MLFAB_ERR_ARGUMENT, "stats_p");
  TELLS(n, mlfab_save(n, NULL), MLFAB_ERR_ARGUMENT, "path");
  TELLS(n, mlfab_push_status(n, 1, NULL), MLFAB_ERR_ARGUMENT, "status_p");
  TELLS(server, mlfab_push_status(server, 1, &status), MLFAB_ERR_STATE, "not a worker");
  TELLS(n, mlfab_push_status(n, 100000, &status), MLFAB_ERR_REQUEST, "update 100000");
  TELLS(n, mlfab_explain(n, NULL, 8, NULL), MLFAB_ERR_ARGUMENT, "text");
  TELLS(n, mlfab_explain(n, NULL, 0, NULL), MLFAB_ERR_STATE, "scheduler");
#undef TELLS
  assert_int_equal(mlfab_last_error(n, NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_last_error(n, &error), 0);
}

/* Structs of an older header: the library does not read behind their size. */
FABRIC_TEST(test_older_structs) {
  mlfab_model_options o;
  memset(&o, 0x5a, sizeof o);
  o.size = offsetof(mlfab_model_options, slices);
  o.optimizer = MLFAB_OPTIMIZER_SGD;
  o.sync = MLFAB_SYNC_ASYNC;
  o.mean = o.deterministic = 0;
  mlfab *n = start(1, 1, 1, &o);
  float *before = (float *)pulled(0);
  ones();
  mlfab_push_options push;
  memset(&push, 0x5a, sizeof push);
  push.size = offsetof(mlfab_push_options, flags);
  push.scale = 2.0;
  OK(n, mlfab_push(n, &whole, 1, &push, NULL));
  mlfab_pull_options pull;
  memset(&pull, 0x5a, sizeof pull);
  pull.size = offsetof(mlfab_pull_options, timeout_ns);
  pull.flags = 0;
  OK(n, mlfab_pull(n, &whole, 1, &pull, NULL));
  for (int i = 0; i < COUNT; i++) assert_true(data[i] == before[i] + 2.0f);
  free(before);
}

/* Two requests of one thread that fail: whoever waits for one is told of that one. */
FABRIC_TEST(test_errors_of_requests) {
  mlfab_pull_options p = {.size = sizeof p};
  mlfab_request request[2];
  mlfab *n = start_rounds(2, 1, 1);
  OK(n, mlfab_push(n, &whole, 1, NULL, NULL));
  for (uint64_t i = 0; i < 2; i++) {
    p.timeout_ns = (3 + 2 * i) * WORLD_S;
    OK(n, mlfab_pull_start(n, &whole, 1, &p, &request[i]));
  }
  mlfab_sim_run(w.sim, 6ull * WORLD_S);
  REFUSED(n, mlfab_wait(n, request[0], 0, NULL), MLFAB_ERR_TIMEOUT, "3 s");
  REFUSED(n, mlfab_wait(n, request[1], 0, NULL), MLFAB_ERR_TIMEOUT, "5 s");
  /* One that fails while nobody waits for it, or while another call succeeds, is not of the thread's last call. */
  mlfab_buf wrong = buf(71, data, COUNT);
  p.timeout_ns = WORLD_S;
  OK(n, mlfab_pull_start(n, &whole, 1, &p, &request[0]));
  mlfab_sim_run(w.sim, WORLD_S / 10); /* the server says whom the pull waits for */
  REFUSED(n, mlfab_wait(n, request[0], WORLD_S / 10, NULL), MLFAB_ERR_TIMEOUT,
          "the pull is still open");
  said(n, MLFAB_ERR_TIMEOUT, "awaiting worker 1");
  EXPECT(n, mlfab_push(n, &wrong, 1, NULL, NULL), MLFAB_ERR_TENSOR);
  mlfab_sim_run(w.sim, 4ull * WORLD_S);
  said(n, MLFAB_ERR_TENSOR, "71");
  OK(n, mlfab_progress(n, 0) < 0);
  said(n, MLFAB_ERR_TENSOR, "71");
  REFUSED(n, mlfab_wait(n, request[0], 0, NULL), MLFAB_ERR_TIMEOUT, "1 s");
  /* Without a timeout of its own a call has the configuration's, which is 300 s. */
  uint64_t began = mlfab_sim_clock(w.sim);
  REFUSED(n, mlfab_pull(n, &whole, 1, NULL, NULL), MLFAB_ERR_TIMEOUT, "worker 1");
  assert_in_range(mlfab_sim_clock(w.sim) - began, 300ull * WORLD_S, 301ull * WORLD_S);
}

/* Threads of one context each have their own last error. */
typedef struct mistaken {
  mlfab *node;
  uint32_t tensor;
  pthread_barrier_t *meet;
  int right;
} mistaken;

static void *make_mistakes(void *user) {
  mistaken *m = (mistaken *)user;
  float four[4] = {0};
  mlfab_buf b = buf(m->tensor, four, 4);
  char text[32];
  mlfab_error error;
  snprintf(text, sizeof text, "tensor %u", m->tensor);
  for (int i = 0; i < 100; i++) {
    int code = mlfab_push(m->node, &b, 1, NULL, NULL);
    pthread_barrier_wait(m->meet); /* both have failed before either asks */
    int asked = mlfab_last_error(m->node, &error);
    m->right +=
        code == MLFAB_ERR_TENSOR && !asked && error.code == code && strstr(error.text, text);
    pthread_barrier_wait(m->meet);
  }
  return NULL;
}

TEST(test_errors_of_threads) {
  mlfab_config config;
  mlfab_error error;
  mlfab *n = NULL;
  pthread_t thread[2];
  pthread_barrier_t meet;
  mlfab_config_init(&config);
  assert_int_equal(mlfab_open(&config, &n, &error), 0);
  OK(n, mlfab_tensor_add(n, 5, MLFAB_F32, 4));
  OK(n, mlfab_model_start(n, NULL, NULL, 0));
  assert_int_equal(pthread_barrier_init(&meet, NULL, 2), 0);
  mistaken m[2] = {{n, 71, &meet, 0}, {n, 92, &meet, 0}};
  for (int i = 0; i < 2; i++)
    assert_int_equal(pthread_create(&thread[i], NULL, make_mistakes, &m[i]), 0);
  for (int i = 0; i < 2; i++) assert_int_equal(pthread_join(thread[i], NULL), 0);
  for (int i = 0; i < 2; i++) assert_int_equal(m[i].right, 100);
  pthread_barrier_destroy(&meet);
  assert_int_equal(mlfab_close(&n), 0);
}

/* A pull whose round another worker never completes ends at its deadline and says what it awaited. */
FABRIC_TEST(test_pull_deadline) {
  mlfab_pull_options p = {.size = sizeof p, .timeout_ns = 3 * (uint64_t)WORLD_S};
  mlfab_result result;
  mlfab *n = start_rounds(2, 1, 1);
  OK(n, mlfab_push(n, &whole, 1, NULL, NULL));
  uint64_t began = mlfab_sim_clock(w.sim);
  EXPECT(n, mlfab_pull(n, &whole, 1, &p, &result), MLFAB_ERR_TIMEOUT);
  uint64_t took = mlfab_sim_clock(w.sim) - began;
  assert_in_range(took, 3 * (uint64_t)WORLD_S, 3 * (uint64_t)WORLD_S + 10 * WORLD_MS);
  said(n, MLFAB_ERR_TIMEOUT, "worker 1");
  said(n, MLFAB_ERR_TIMEOUT, "server 0");
  said(n, MLFAB_ERR_TIMEOUT, "3 s");
  assert_in_range(blames(n, 1, 0).waited_ns, 3 * (uint64_t)WORLD_S,
                  3 * (uint64_t)WORLD_S + 10 * WORLD_MS);
  assert_int_equal(result.rank, 1);
  /* When the other does push, everything goes on. */
  OK(w.node[1], mlfab_push(w.node[1], &whole, 1, NULL, NULL));
  OK(n, mlfab_pull(n, &whole, 1, &p, NULL));
}

/* A flush and a serve that end at their deadline name who was awaited. */
FABRIC_TEST(test_flush_and_serve_deadlines) {
  mlfab_request request;
  start(2, 1, 1, NULL);
  mlfab *n = w.node[0], *server = w.node[2];
  assert_int_equal(mlfab_sim_partition(w.sim, 0, 2, 1), 0);
  OK(n, mlfab_push_start(n, &whole, 1, NULL, &request));
  REFUSED(n, mlfab_flush(n, (uint64_t)WORLD_S), MLFAB_ERR_TIMEOUT,
          "after 1 s server 0 has not decided the oldest of 1 updates");
  (void)blames(n, 0, 1);
  assert_int_equal(mlfab_sim_partition(w.sim, 0, 2, 0), 0);
  OK(n, mlfab_flush(n, 0));
  OK(n, mlfab_wait(n, request, 0, NULL));
  mlfab_sim_crash(w.sim, 0);
  w.node[0] = NULL;
  REFUSED(server, mlfab_serve(server, 4 * (uint64_t)WORLD_S), MLFAB_ERR_TIMEOUT,
          "after 4 s worker 1 has not left");
  (void)blames(server, 1, 0);
}

FABRIC_TEST(test_barrier_deadline) {
  const mlfab_collective soon = within(2 * (uint64_t)WORLD_S);
  (void)start_empty(3, 1, 0);
  for (int turn = 0; turn < 3; turn++) {
    later first = {.node = w.node[0], .call = later_barrier, .bytes = WORLD_S};
    do_later(&first, WORLD_MS);
    REFUSED(w.node[2], mlfab_barrier(w.node[2], &soon), MLFAB_ERR_TIMEOUT, "worker 1");
    (void)blames(w.node[2], 1, 0);
    assert_int_equal(first.code, MLFAB_ERR_TIMEOUT);
    /* It can be tried again, by all. */
    later again[2] = {{.node = w.node[2], .call = later_barrier},
                      {.node = w.node[0], .call = later_barrier}};
    both_later(again);
    OK(w.node[1], mlfab_barrier(w.node[1], NULL));
    both_ended(again);
  }
}

/* A call that has failed, or the next one: whoever has its bytes, or sent them, goes on. */
static int heard(mlfab *n, int code) {
  const mlfab_collective soon = within(WORLD_S);
  uint8_t got[8];
  mlfab_sim_run(w.sim, WORLD_S);
  return code ? code : mlfab_broadcast(n, 2, got, sizeof got, &soon);
}

FABRIC_TEST(test_broadcast) {
  const mlfab_collective soon = within(WORLD_S);
  uint8_t mine[5000], theirs[5000], third[5000];
  begin(3, 1, 0);
  w.config.model_max_bytes = 6000;
  world_open(&w, 1);
  mlfab *n = w.node[0];
  REFUSED(n, mlfab_broadcast(n, 3, mine, 8, NULL), MLFAB_ERR_RANK_RANGE, "root 3");
  EXPECT(n, mlfab_broadcast(n, -1, mine, 8, NULL), MLFAB_ERR_RANK_RANGE);
  EXPECT(n, mlfab_broadcast(n, 0, NULL, 8, NULL), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_broadcast(n, 0, mine, 0, NULL), MLFAB_ERR_ARGUMENT);
  REFUSED(n, mlfab_broadcast(n, 0, mine, 6001, NULL), MLFAB_ERR_LIMIT, "6001");
  /* Sizes that differ: everybody is told who it was, the root, which sends and goes on, with its next
   * call at the latest. */
  later l[2] = {
      {.node = w.node[1], .call = later_broadcast, .data = theirs, .bytes = 4999, .root = 2},
      {.node = w.node[2], .call = later_broadcast, .data = third, .bytes = 5000, .root = 2}};
  both_later(l);
  REFUSED(n, heard(n, mlfab_broadcast(n, 2, mine, 5000, NULL)), MLFAB_ERR_MISMATCH,
          "worker 1 has called a broadcast of 4999 bytes from worker 2, worker 0 a broadcast of "
          "5000 bytes from worker 2");
  assert_int_equal(blames(n, 1, 0).code, MLFAB_ERR_MISMATCH);
  for (int i = 0; i < 2; i++)
    REFUSED(l[i].node, heard(l[i].node, l[i].code), MLFAB_ERR_MISMATCH,
            "worker 1 has called a broadcast of 4999 bytes from worker 2");
  /* Roots that differ are another broadcast each: refused the same way. */
  l[0].bytes = 5000, l[0].root = 0;
  both_later(l);
  REFUSED(n, heard(n, mlfab_broadcast(n, 2, mine, 5000, NULL)), MLFAB_ERR_MISMATCH,
          "5000 bytes from worker 0, worker 0 a broadcast of 5000 bytes from worker 2");
  for (int i = 0; i < 2; i++) EXPECT(l[i].node, heard(l[i].node, l[i].code), MLFAB_ERR_MISMATCH);
  /* And the next one works. */
  for (int i = 0; i < 5000; i++) mine[i] = (uint8_t)(i * 7), theirs[i] = third[i] = 0;
  l[0].root = l[1].root = 0;
  both_later(l);
  OK(n, mlfab_broadcast(n, 0, mine, 5000, NULL));
  both_ended(l);
  assert_memory_equal(mine, theirs, 5000);
  assert_memory_equal(mine, third, 5000);
  /* The root never comes: the deadline names it, also to the root, when it does. */
  l[0].root = l[1].root = 2;
  do_later(&l[0], 2 * WORLD_MS);
  REFUSED(n, mlfab_broadcast(n, 2, mine, 5000, &soon), MLFAB_ERR_TIMEOUT, "worker 2");
  mlfab_sim_run(w.sim, WORLD_S);
  EXPECT(w.node[1], l[0].code, MLFAB_ERR_TIMEOUT);
  EXPECT(w.node[2], mlfab_broadcast(w.node[2], 2, third, 5000, NULL), MLFAB_ERR_TIMEOUT);
  /* It can be tried again. */
  memset(mine, 0, sizeof mine);
  third[77] = 9;
  both_later(l);
  OK(n, mlfab_broadcast(n, 2, mine, 5000, NULL));
  both_ended(l);
  assert_memory_equal(mine, third, 5000);
  assert_memory_equal(theirs, third, 5000);
}

/* The root dies while others wait for its bytes. */
FABRIC_TEST(test_broadcast_root_dies) {
  uint8_t got[100], more[100];
  mlfab *n = (start_empty(3, 1, 0), w.node[1]);
  later l = {.call = later_abandon, .data = &w.node[2]},
        other = {.node = w.node[0], .call = later_broadcast, .data = more, .bytes = 100, .root = 2};
  do_later(&other, WORLD_MS);
  do_later(&l, 100 * WORLD_MS);
  REFUSED(n, mlfab_broadcast(n, 2, got, 100, NULL), MLFAB_ERR_PEER_DEAD, "worker 2");
}

FABRIC_TEST(test_finish) {
  start_rounds(2, 1, 1);
  mlfab *n = w.node[1];
  OK(n, mlfab_finish(n, 0));
  EXPECT(n, mlfab_finish(n, 0), MLFAB_ERR_STATE);
  REFUSED(n, mlfab_push(n, &whole, 1, NULL, NULL), MLFAB_ERR_STATE, "mlfab_finish");
  EXPECT(n, mlfab_push_start(n, &whole, 1, NULL, NULL), MLFAB_ERR_STATE);
  OK(n, mlfab_pull(n, &whole, 1, NULL, NULL));
  /* Rounds and barriers do not wait for it. */
  for (int i = 0; i < 3; i++) {
    OK(w.node[0], mlfab_push(w.node[0], &whole, 1, NULL, NULL));
    OK(w.node[0], mlfab_pull(w.node[0], &whole, 1, NULL, NULL));
  }
  OK(w.node[0], mlfab_barrier(w.node[0], NULL));
}

/* --- being told --- */

typedef struct told {
  mlfab *node;
  mlfab_buf update;
  int calls, status, wait, alloc, close;
  mlfab_request next;
} told;

static void told_of(void *user, mlfab_request request, const mlfab_result *result) {
  told *t = user;
  mlfab *copy = t->node;
  int done;
  t->calls++;
  t->status = result->status;
  if (t->calls > 1) return;
  assert_int_equal(mlfab_test(t->node, request, &done, NULL), MLFAB_ERR_REQUEST);
  t->wait = mlfab_push(t->node, &t->update, 1, NULL, NULL);
  void *memory = NULL;
  t->alloc = mlfab_alloc(t->node, 64, &memory);
  t->close = mlfab_close(&copy);
  assert_int_equal(mlfab_push_start(t->node, &t->update, 1, NULL, &t->next), 0);
  assert_int_equal(mlfab_on_done(t->node, t->next, told_of, t), 0);
}

/* A function is called once when a request has finished; it starts others, and may not wait. */
TEST(test_on_done) {
  double values[COUNT] = {1};
  told t = {.update = buf(5, values, COUNT)};
  mlfab_request request;
  mlfab_model_options o = rules(MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC);
  start(1, 1, 1, &o);
  mlfab *n = t.node = w.node[0];
  OK(n, mlfab_push_start(n, &t.update, 1, NULL, &request));
  EXPECT(n, mlfab_on_done(n, request, NULL, NULL), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_on_done(n, request + 1, told_of, &t), MLFAB_ERR_REQUEST);
  OK(n, mlfab_on_done(n, request, told_of, &t));
  for (int k = 0; k < 100 && t.calls < 2; k++) OK(n, mlfab_flush(n, 0));
  assert_true(t.calls == 2 && t.status == 0);
  assert_true(t.wait == MLFAB_ERR_STATE && t.alloc == MLFAB_ERR_STATE &&
              t.close == MLFAB_ERR_STATE);
  EXPECT(n, mlfab_wait(n, request, 0, NULL), MLFAB_ERR_REQUEST);
  /* One that is over already, and one that is withdrawn. */
  OK(n, mlfab_push_start(n, &t.update, 1, NULL, &request));
  OK(n, mlfab_flush(n, 0));
  OK(n, mlfab_on_done(n, request, told_of, &t));
  assert_int_equal(t.calls, 3);
  OK(n, mlfab_push_start(n, &t.update, 1, NULL, &request));
  OK(n, mlfab_on_done(n, request, told_of, &t)); /* not told of: the context is closed */
  world_close(&w);
  assert_true(mlfab_struct_size("config") == sizeof(mlfab_config));
  assert_true(mlfab_struct_size("result") == sizeof(mlfab_result));
  assert_true(mlfab_struct_size("mlfab_config") == 0 && mlfab_struct_size(NULL) == 0);
}

/* --- deaths --- */

/* The server is gone without a word: all who wait for it are told within 5 heartbeats and some. */
static void server_dies(int call, uint64_t heartbeat) {
  static float large[LARGE];
  mlfab_vec vec = {large, 1000};
  begin(2, 2, 1);
  f.count = LARGE;
  w.config.heartbeat_ns = heartbeat;
  world_open(&w, 1);
  mlfab_model_options o = rules(MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_BSP);
  model(&o);
  mlfab *n = w.node[0];
  mlfab_buf b = buf(5, large, LARGE);
  uint32_t victim = call % 2 ? 2 : 3; /* server 0 keeps what workers do together */
  later l = {.call = later_abandon, .data = &w.node[victim]};
  uint64_t start = mlfab_sim_clock(w.sim), die = call == 2 ? 200000 : 20 * WORLD_MS;
  if (call == 0) OK(n, mlfab_push(n, &b, 1, NULL, NULL));
  do_later(&l, die);
  if (call == 0) EXPECT(n, mlfab_pull(n, &b, 1, NULL, NULL), MLFAB_ERR_PEER_DEAD);
  if (call == 1) EXPECT(n, mlfab_barrier(n, NULL), MLFAB_ERR_PEER_DEAD);
  if (call == 2) EXPECT(n, mlfab_push(n, &b, 1, NULL, NULL), MLFAB_ERR_PEER_DEAD);
  if (call == 3) EXPECT(n, mlfab_broadcast(n, 1, large, 4000, NULL), MLFAB_ERR_PEER_DEAD);
  if (call == 5) EXPECT(n, mlfab_allreduce(n, large, 1000, MLFAB_F32, NULL), MLFAB_ERR_PEER_DEAD);
  if (call == 7) EXPECT(n, mlfab_allreduce_list(n, &vec, 1, MLFAB_F32, NULL), MLFAB_ERR_PEER_DEAD);
  uint64_t took = mlfab_sim_clock(w.sim) - start;
  assert_in_range(took, 1, 6 * heartbeat + die + 50 * WORLD_MS);
  (void)blames(n, (int32_t)victim - 2, 1);
  char name[64];
  snprintf(name, sizeof name,
           call == 2 ? "server %u, which is dead: " : "server %u is dead: ", (unsigned)victim - 2);
  said(n, MLFAB_ERR_PEER_DEAD, name);
  said(n, MLFAB_ERR_PEER_DEAD, "nobody listens there");
  assert_true(world_saw(&w, MLFAB_EVENT_DEAD, (int32_t)victim - 2, 1));
  /* From now on this is said at once, and what it died of. */
  if (call == 7) EXPECT(n, mlfab_allreduce_list(n, &vec, 1, MLFAB_F32, NULL), MLFAB_ERR_PEER_DEAD);
  said(n, MLFAB_ERR_PEER_DEAD, "nobody listens there");
  REFUSED(n, mlfab_push(n, &b, 1, NULL, NULL), MLFAB_ERR_PEER_DEAD, "nobody listens there");
  REFUSED(n, mlfab_pull(n, &b, 1, NULL, NULL), MLFAB_ERR_PEER_DEAD, "nobody listens there");
  world_close(&w);
}

TEST(test_server_dies) {
  for (int call = 0; call < 8; call++) {
    if (call == 4 || call == 6) continue;
    server_dies(call, 500 * (uint64_t)WORLD_MS);
    server_dies(call, 50 * (uint64_t)WORLD_MS);
  }
}

/* A worker that dies is named in an event, and rounds and barriers go on without it. */
FABRIC_TEST(test_worker_dies) {
  start_rounds(3, 1, 1);
  later l = {.call = later_abandon, .data = &w.node[1]},
        other = {.node = w.node[2], .call = later_barrier};
  do_later(&l, 10 * WORLD_MS);
  OK(w.node[0], mlfab_push(w.node[0], &whole, 1, NULL, NULL));
  OK(w.node[2], mlfab_push(w.node[2], &whole, 1, NULL, NULL));
  OK(w.node[0], mlfab_pull(w.node[0], &whole, 1, NULL, NULL));
  assert_true(mlfab_sim_clock(w.sim) < 4 * (uint64_t)WORLD_S);
  assert_true(world_saw(&w, MLFAB_EVENT_DEAD, 1, 0));
  do_later(&other, WORLD_MS);
  OK(w.node[0], mlfab_barrier(w.node[0], NULL));
  mlfab_sim_run(w.sim, WORLD_S);
  assert_int_equal(other.code, 0);
}

/* --- withdrawing --- */

/* Cancelled under way: in doubt, until the server says; then a retry keeps the identity. */
TEST(test_cancel) {
  static float u[LARGE];
  mlfab_request request;
  mlfab_result result, again;
  int status = 0, done = 0;
  for (int i = 0; i < LARGE; i++) u[i] = 1.0f;
  for (uint64_t delay = 0; delay < 2500000; delay += 100000) {
    mlfab *n = start_large(1, 1, 1, 1 + delay);
    mlfab_buf b = buf(5, u, LARGE);
    float *before = (float *)pulled(0);
    OK(n, mlfab_push_start(n, &b, 1, NULL, &request));
    mlfab_sim_run(w.sim, delay);
    OK(n, mlfab_cancel(n, request));
    OK(n, mlfab_cancel(n, request)); /* twice is no harm */
    OK(n, mlfab_test(n, request, &done, &result));
    assert_true(done);
    assert_true(result.status == 0 || result.status == MLFAB_ERR_IN_DOUBT ||
                result.status == MLFAB_ERR_CANCELLED);
    EXPECT(n, mlfab_cancel(n, request), MLFAB_ERR_REQUEST);
    mlfab_push_options retry = scaled(1);
    retry.retry_seq = result.seq;
    if (result.status == MLFAB_ERR_IN_DOUBT) {
      OK(n, mlfab_push_status(n, result.seq, &status));
      if (status == MLFAB_ERR_IN_DOUBT)
        EXPECT(n, mlfab_push(n, &b, 1, &retry, NULL), MLFAB_ERR_AGAIN);
    }
    OK(n, mlfab_flush(n, 0));
    OK(n, mlfab_push_status(n, result.seq, &status));
    assert_true(status == 0 || status == MLFAB_ERR_WITHDRAWN);
    if (result.status == 0) assert_int_equal(status, 0);
    if (result.status == MLFAB_ERR_CANCELLED) assert_int_equal(status, MLFAB_ERR_WITHDRAWN);
    grown(0, LARGE, before, status == 0 ? 1.0f : 0.0f);
    /* The retry: whatever happened to the first, it is applied once. */
    OK(n, mlfab_push(n, &b, 1, &retry, &again));
    if (status == 0) assert_int_equal(again.seq, result.seq);
    grown(0, LARGE, before, 1.0f);
    free(before);
    world_close(&w);
  }
}

/* A push that misses its deadline behind a partition is in doubt, and resolved when it heals. */
FABRIC_TEST(test_push_deadline) {
  mlfab_push_options o = scaled(1);
  mlfab_result result;
  int status;
  mlfab *n = start(2, 1, 1, NULL);
  ones();
  float *before = (float *)pulled(1);
  assert_int_equal(mlfab_sim_partition(w.sim, 0, 2, 1), 0);
  o.timeout_ns = WORLD_S;
  REFUSED(n, mlfab_push(n, &whole, 1, &o, &result), MLFAB_ERR_IN_DOUBT, "server 0");
  said(n, MLFAB_ERR_IN_DOUBT, "1 s");
  OK(n, mlfab_push_status(n, result.seq, &status));
  assert_int_equal(status, MLFAB_ERR_IN_DOUBT);
  assert_int_equal(mlfab_sim_partition(w.sim, 0, 2, 0), 0);
  mlfab_sim_run(w.sim, 2 * (uint64_t)WORLD_S);
  OK(n, mlfab_push_status(n, result.seq, &status));
  assert_true(status == 0 || status == MLFAB_ERR_WITHDRAWN);
  grown(1, COUNT, before, status == 0 ? 1.0f : 0.0f);
  o.retry_seq = result.seq;
  o.timeout_ns = 0;
  OK(n, mlfab_push(n, &whole, 1, &o, NULL));
  grown(1, COUNT, before, 1.0f);
  free(before);
}

/* A pull that is cancelled leaves others alone. */
FABRIC_TEST(test_cancel_pull) {
  static float large[LARGE];
  mlfab_request request;
  mlfab *n = start_large(1, 2, 1, 1);
  mlfab_buf b = buf(5, large, LARGE);
  for (uint64_t delay = 0; delay < 2000000; delay += 250000) {
    OK(n, mlfab_pull_start(n, &b, 1, NULL, &request));
    mlfab_sim_run(w.sim, delay);
    OK(n, mlfab_cancel(n, request));
    int code = mlfab_wait(n, request, 0, NULL);
    assert_true(code == 0 || code == MLFAB_ERR_CANCELLED);
    EXPECT(n, mlfab_wait(n, request, 0, NULL), MLFAB_ERR_REQUEST);
  }
  unchanged(pulled(0));
}

/* A path that cannot be written; the model goes on. */
FABRIC_TEST(test_save) {
  start(1, 1, 0, NULL);
  REFUSED(w.node[0], mlfab_save(w.node[0], "/no/such/folder/model"), MLFAB_ERR_IO,
          "/no/such/folder/model");
  char longer[5000] = "/tmp/";
  memset(longer + 5, 'x', sizeof longer - 6);
  longer[sizeof longer - 1] = 0;
  REFUSED(w.node[0], mlfab_save(w.node[0], longer), MLFAB_ERR_IO, strerror(ENAMETOOLONG));
  unchanged(pulled(0));
}

/* A node that closes while its link is full waits until its goodbye has room: it has left, not died. The
 * goodbye has its whole time, even if the server has been silent for almost five beats. */
static void close_when_full(uint64_t silent_ns) {
  enum { MANY = 1 << 20 };
  static float u[MANY];
  mlfab_buf update = {MLFAB_ALL, 0, u, MANY};
  mlfab_sim_options o = {
      .size = sizeof o, .hosts = 3, .buffer_bytes = 300000, .rate_bytes_per_s = 100000000};
  begin(2, 1, 1);
  assert_int_equal(mlfab_sim_create(&o, &w.sim), 0);
  for (uint32_t i = 0; i < w.nodes; i++) open_node(i);
  for (uint32_t i = 0; i < w.nodes; i++) world_await(&w, i);
  for (int i = 0; i < 2; i++) {
    OK(w.node[i], mlfab_tensor_add(w.node[i], 0, MLFAB_F32, MANY));
    OK(w.node[i], mlfab_model_start(w.node[i], NULL, NULL, 0));
  }
  OK(w.node[1], mlfab_push_start(w.node[1], &update, 1, NULL, NULL));
  mlfab_sim_run(w.sim, 3 * WORLD_MS);
  if (silent_ns > 0) {
    assert_int_equal(mlfab_sim_pause(w.sim, 2, silent_ns), 0);
    mlfab_sim_run(w.sim, silent_ns - 500 * WORLD_MS);
  }
  OK(NULL, mlfab_close(&w.node[1]));
  mlfab_sim_run(w.sim, 3 * (uint64_t)WORLD_S);
  assert_true(world_saw(&w, MLFAB_EVENT_LEFT, 1, 0));
  assert_false(world_saw(&w, MLFAB_EVENT_DEAD, 1, 0));
  world_close(&w);
}

TEST(test_close_when_full) {
  close_when_full(0);
  close_when_full(2800 * (uint64_t)WORLD_MS);
}

/* --- the calls of a fabric with a scheduler --- */

FABRIC_TEST(test_without_a_scheduler) {
  char text[64];
  mlfab_schedule s = schedule_of(5);
  (void)start_empty(2, 1, 1);
  REFUSED(w.node[0], mlfab_set_schedule(w.node[0], &s), MLFAB_ERR_STATE,
          "set_schedule: this fabric has no scheduler");
  OK(w.node[0], mlfab_set_link(w.node[0], 1e6, 1e6)); /* collectives choose by it */
  EXPECT(w.node[2], mlfab_set_link(w.node[2], 1e6, 1e6), MLFAB_ERR_STATE);
  REFUSED(
      w.node[0], mlfab_set_other_traffic(w.node[0], 1, 1, 1), MLFAB_ERR_STATE,
      "set_other_traffic: links are not measured: there is neither a scheduler nor order_by_rate");
  EXPECT(w.node[0], mlfab_explain(w.node[0], text, sizeof text, NULL), MLFAB_ERR_STATE);
}

FABRIC_TEST(test_schedule_calls) {
  static const double odd[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
  static const double fine[] = {0, 1e-300, 1e300, -1, -0.0};
  char text[4096], small[8];
  size_t bytes = 0, again = 0;
  mlfab_schedule s = schedule_of(5);
  begin(2, 1, 0);
  w.config.scheduler = MLFAB_SCHEDULER_BESIDE;
  world_open(&w, 3);
  mlfab *a = w.node[0], *b = w.node[1];
  EXPECT(NULL, mlfab_set_schedule(NULL, &s), MLFAB_ERR_ARGUMENT);
  EXPECT(a, mlfab_set_schedule(a, NULL), MLFAB_ERR_ARGUMENT);
  s.delay_bound = 0;
  REFUSED(b, mlfab_set_schedule(b, &s), MLFAB_ERR_ARGUMENT, "no update has a delay below 0");
  s.delay_bound = 1;
  s.size = 4;
  EXPECT(b, mlfab_set_schedule(b, &s), MLFAB_ERR_ARGUMENT);
  s.size = sizeof s;
  s.best = 9;
  EXPECT(b, mlfab_set_schedule(b, &s), MLFAB_ERR_ARGUMENT);
  s.best = 0;
  OK(b, mlfab_set_schedule(b, &s));
  s.delay_bound = MLFAB_UNBOUNDED;
  OK(a, mlfab_set_schedule(a, &s));
  EXPECT(NULL, mlfab_set_link(NULL, 1, 1), MLFAB_ERR_ARGUMENT);
  for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
    EXPECT(b, mlfab_set_link(b, odd[i], 1), MLFAB_ERR_ARGUMENT);
    EXPECT(b, mlfab_set_link(b, 1, odd[i]), MLFAB_ERR_ARGUMENT);
  }
  for (size_t i = 0; i < sizeof fine / sizeof fine[0]; i++)
    OK(b, mlfab_set_link(b, fine[i], fine[i]));
  EXPECT(NULL, mlfab_set_other_traffic(NULL, 1, 1, 0), MLFAB_ERR_ARGUMENT);
  for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
    EXPECT(b, mlfab_set_other_traffic(b, odd[i], 1, 0), MLFAB_ERR_ARGUMENT);
    EXPECT(b, mlfab_set_other_traffic(b, 1, odd[i], 0), MLFAB_ERR_ARGUMENT);
    EXPECT(b, mlfab_set_other_traffic(b, 1, 1, odd[i]), MLFAB_ERR_ARGUMENT);
  }
  EXPECT(b, mlfab_set_other_traffic(b, 1, -1, 0), MLFAB_ERR_ARGUMENT);
  for (size_t i = 0; i < 3; i++) OK(b, mlfab_set_other_traffic(b, fine[i], fine[i], fine[i]));
  EXPECT(NULL, mlfab_explain(NULL, text, sizeof text, NULL), MLFAB_ERR_ARGUMENT);
  EXPECT(a, mlfab_explain(a, NULL, 5, NULL), MLFAB_ERR_ARGUMENT);
  EXPECT(b, mlfab_explain(b, text, sizeof text, NULL), MLFAB_ERR_STATE);
  OK(a, mlfab_explain(a, NULL, 0, &bytes));
  OK(a, mlfab_explain(a, text, sizeof text, &again));
  assert_int_equal(bytes, again);
  assert_int_equal(strlen(text) + 1, bytes);
  OK(a, mlfab_explain(a, small, sizeof small, &again));
  assert_int_equal(bytes, again);
  assert_int_equal(strlen(small), sizeof small - 1);
  assert_int_equal(strncmp(small, text, sizeof small - 1), 0);
  model(NULL);
}

/* Rounds drop nothing: no bound with them, whichever comes first. */
FABRIC_TEST(test_bound_with_rounds) {
  mlfab_model_options rounds = {.size = sizeof rounds, .sync = MLFAB_SYNC_BSP};
  mlfab_schedule s = schedule_of(5);
  begin(1, 1, 0);
  w.config.scheduler = MLFAB_SCHEDULER_BESIDE;
  world_open(&w, 3);
  model(&rounds);
  EXPECT(w.node[0], mlfab_set_schedule(w.node[0], &s), MLFAB_ERR_UNSUPPORTED);
  s.delay_bound = MLFAB_UNBOUNDED;
  OK(w.node[0], mlfab_set_schedule(w.node[0], &s));
  world_close(&w);
  begin(1, 1, 0);
  w.config.scheduler = MLFAB_SCHEDULER_BESIDE;
  w.config.schedule = schedule_of(5);
  world_open(&w, 3);
  OK(w.node[0], mlfab_tensor_add(w.node[0], 5, MLFAB_F32, COUNT));
  EXPECT(w.node[0], mlfab_model_start(w.node[0], &rounds, NULL, 0), MLFAB_ERR_UNSUPPORTED);
}

/* mlfab_open_env: what the program leaves open is the environment's. */
TEST(test_open_env) {
  static const char *const names[] = {"MLFAB_WORKERS", "MLFAB_OPTIMIZER", "MLFAB_GAMMA"};
  static const char *const values[] = {"1", "momentum", "0.5"};
  mlfab *fabric = NULL;
  mlfab_error error;
  float weight[1] = {0}, u[1] = {1};
  mlfab_buf weights = {MLFAB_ALL, 0, weight, 1}, update = {MLFAB_ALL, 0, u, 1};
  for (int i = 0; i < 3; i++) setenv(names[i], values[i], 1);
  assert_int_equal(mlfab_open_env(&fabric, &error), 0);
  OK(fabric, mlfab_tensor_add(fabric, 0, MLFAB_F32, 1));
  setenv("MLFAB_OPTIMIZER", "best", 1);
  REFUSED(fabric, mlfab_model_start(fabric, NULL, NULL, 0), MLFAB_ERR_CONFIG,
          "MLFAB_OPTIMIZER='best'");
  setenv("MLFAB_OPTIMIZER", "momentum", 1);
  OK(fabric, mlfab_model_start(fabric, NULL, NULL, 0));
  for (int i = 0; i < 2; i++) OK(fabric, mlfab_push(fabric, &update, 1, NULL, NULL));
  OK(fabric, mlfab_pull(fabric, &weights, 1, NULL, NULL));
  assert_true(weight[0] == 2.5f);
  assert_int_equal(mlfab_close(&fabric), 0);
  setenv("MLFAB_WORKERS", "none", 1);
  assert_int_equal(mlfab_open_env(&fabric, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "MLFAB_WORKERS='none'"));
  assert_null(fabric);
  for (int i = 0; i < 3; i++) unsetenv(names[i]);
}

/* The process before this one still has the address for a while. */
TEST(test_address_taken_for_a_while) {
  int gate[2], fd, port = take_port(&fd);
  assert_int_equal(pipe(gate), 0);
  pid_t child = fork();
  if (child == 0) { /* it ends 200 ms after the parent has given up the address */
    char c;
    close(gate[1]);
    (void)!read(gate[0], &c, 1);
    poll(NULL, 0, 200);
    _exit(0);
  }
  assert_true(child > 0);
  close(fd);
  close(gate[0]);
  close(gate[1]);
  mlfab_config c = networked(port);
  mlfab_error error;
  mlfab *ctx = NULL;
  c.timeout_ns = 20000000000u;
  int code = mlfab_open_start(&c, &ctx, &error);
  if (code) fail_msg("%s", error.text);
  mlfab_abandon(&ctx);
  assert_int_equal(waitpid(child, NULL, 0), child);
}

TESTS(NULL, NULL)
