/* held.c - an MPI that keeps a buffer for as long as the test says, or waits for processes that do not come. In one
 * process.
 *
 * The functions below take MPI's place by its profiling interface. `hold`: a send from this memory does not end before
 * `let_go`. `world_of`: communicators seem to have so many processes, and the last one never opens. */
#include "tests/conform/conform.h"
#include "../testing.h"

#include <mpi.h>

#include <stdatomic.h>

enum { ELEMENTS = 1 << 18, BYTES = 4 * ELEMENTS, HELD = 64 };

/* ---- the MPI ---- */

static const uint8_t *hold_from, *hold_to;
static atomic_int holding;
static MPI_Request held[HELD];
static int held_count;
static int world_of, here_sent, here_told;
static int
    all_come; /* world_of: the duplicate is made, and later every process tells what it has said */
static int *gathered, gathering; /* where, and how often MPI is asked before */
static int has_said;             /* what this process tells */
static MPI_Comm programs;        /* the program's communicator */
static int failing;              /* MPI_Isend fails */
static int deaf;                 /* MPI_Irecv fails */

static void hold(const void *memory, size_t bytes) {
  hold_from = memory;
  hold_to = hold_from + bytes;
  held_count = 0;
  atomic_store(&holding, 1);
}

static void let_go(void) { atomic_store(&holding, 0); }

int MPI_Isend(const void *buffer, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request) {
  const uint8_t *at = buffer;
  if (world_of) {
    here_sent += comm == programs;
    return PMPI_Isend(NULL, 0, MPI_BYTE, MPI_PROC_NULL, tag, MPI_COMM_SELF, request);
  }
  if (failing) return MPI_ERR_OTHER;
  int code = PMPI_Isend(buffer, count, type, to, tag, comm, request);
  if (atomic_load(&holding) && at >= hold_from && at < hold_to && held_count < HELD)
    held[held_count++] = *request;
  return code;
}

int MPI_Irecv(void *buffer, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request *request) {
  if (deaf) return MPI_ERR_OTHER;
  return PMPI_Irecv(buffer, count, type, from, tag, comm, request);
}

static int is_held(MPI_Request request) {
  for (int i = 0; i < held_count; i++)
    if (held[i] == request) return 1;
  return 0;
}

int MPI_Testsome(int n, MPI_Request requests[], int *done_p, int done[], MPI_Status statuses[]) {
  static MPI_Request shown[4096];
  if (!atomic_load(&holding) || n > 4096) return PMPI_Testsome(n, requests, done_p, done, statuses);
  for (int i = 0; i < n; i++) shown[i] = is_held(requests[i]) ? MPI_REQUEST_NULL : requests[i];
  int code = PMPI_Testsome(n, shown, done_p, done, statuses);
  if (*done_p == MPI_UNDEFINED) *done_p = 0;
  for (int i = 0; i < n; i++)
    if (!is_held(requests[i])) requests[i] = shown[i];
  return code;
}

int MPI_Comm_size(MPI_Comm comm, int *size) {
  if (!world_of) return PMPI_Comm_size(comm, size);
  *size = world_of;
  return MPI_SUCCESS;
}

int MPI_Comm_idup(MPI_Comm comm, MPI_Comm *copy, MPI_Request *request) {
  if (world_of && all_come) return PMPI_Comm_dup(comm, copy);
  if (world_of) return MPI_SUCCESS;
  return PMPI_Comm_idup(comm, copy, request);
}

int MPI_Iallgather(const void *from, int count, MPI_Datatype type, void *to, int to_count,
                   MPI_Datatype to_type, MPI_Comm comm, MPI_Request *request) {
  if (!world_of) return PMPI_Iallgather(from, count, type, to, to_count, to_type, comm, request);
  gathered = to;
  gathering = 20;
  return MPI_SUCCESS;
}

int MPI_Test(MPI_Request *request, int *done, MPI_Status *status) {
  if (!world_of) return PMPI_Test(request, done, status);
  *done = all_come && (!gathered || --gathering == 0);
  if (*done && gathered) has_said = gathered[0];
  for (int r = 1; *done && gathered && r < world_of; r++) gathered[r] = 1;
  return MPI_SUCCESS;
}

/* All but the first and the last have said HERE, once this process has, or (`all_come`) before. */
int MPI_Iprobe(int source, int tag, MPI_Comm comm, int *found, MPI_Status *status) {
  if (!world_of) return PMPI_Iprobe(source, tag, comm, found, status);
  *found = (here_sent > 0 || gathered) && here_told < world_of - 2;
  if (*found) status->MPI_SOURCE = ++here_told;
  return MPI_SUCCESS;
}

int MPI_Recv(void *buffer, int count, MPI_Datatype type, int source, int tag, MPI_Comm comm,
             MPI_Status *status) {
  if (world_of) return MPI_SUCCESS;
  return PMPI_Recv(buffer, count, type, source, tag, comm, status);
}

/* ---- two ends ---- */

static mlfab_env env = {.size = sizeof env, .clock = conform_now, .log = conform_log};
static uint8_t *data, *should;
static uint64_t timeout_ns;
static MPI_Comm *over; /* the ends' communicator; NULL: MPI_COMM_WORLD */

static void *open_end(uint32_t lend, char *address) {
  mlfab_error error = {.code = 0};
  mlfab_transport_options options = {.size = sizeof options,
                                     .listen = "",
                                     .env = &env,
                                     .error = &error,
                                     .user = over,
                                     .lend = lend,
                                     .timeout_ns = timeout_ns};
  void *self = NULL;
  if (mlfab_transport_mpi()->open(&options, &self, address)) fail_msg("%s", error.text);
  return self;
}

typedef struct pair {
  void *from, *to;
  uint32_t link;
  int sent, frames,
      down;       /* events: SENT at `from`; frames with the right bytes, and DOWN, at `to` */
  char text[256]; /* of the last DOWN */
} pair;

static pair p; /* of the test that runs */

static void look(void) {
  const mlfab_transport *mpi = mlfab_transport_mpi();
  mlfab_io_event event;
  for (int i = 0; i < 2; i++) {
    void *self = i ? p.to : p.from;
    while (self && mpi->poll(self, &event)) {
      if (event.kind == MLFAB_IO_UP && !i) p.link = event.link;
      p.sent += event.kind == MLFAB_IO_SENT;
      p.down += event.kind == MLFAB_IO_DOWN;
      if (event.kind == MLFAB_IO_DOWN) snprintf(p.text, sizeof p.text, "%s", event.text);
      if (event.kind == MLFAB_IO_FRAME && event.bulk_bytes) {
        assert_int_equal(event.bulk_bytes, BYTES);
        assert_memory_equal(event.bulk, should, BYTES);
        p.frames++;
      }
      mpi->release(self, &event);
    }
  }
}

static void look_for(int ms) {
  for (int i = 0; i < ms; i++, usleep(1000)) look();
}

static void send_frame(uint32_t bytes) {
  const mlfab_transport *mpi = mlfab_transport_mpi();
  uint8_t head[128] = {0};
  conform_seal(head, 64, bytes ? data : NULL, bytes, 0);
  int code = bytes ? mpi->lend(p.from, p.link, head, 128, data, bytes, 7)
                   : mpi->send(p.from, p.link, head, 128, NULL, 0, 0);
  assert_int_equal(code, 0);
}

static void begin(uint32_t lend) {
  char from[256], to[256];
  p = (pair){.from = open_end(lend, from), .to = open_end(0, to)};
  for (int i = 0; i < BYTES; i++) data[i] = should[i] = (uint8_t)(i * 31 + i / 251);
  assert_int_equal(mlfab_transport_mpi()->connect(p.from, to, 1), 0);
  for (int i = 0; i < 5000 && !p.link; i++) look_for(1);
  assert_int_not_equal(p.link, 0);
  send_frame(0);
}

static void end(void) {
  if (p.from) mlfab_transport_mpi()->close(p.from);
  mlfab_transport_mpi()->close(p.to);
}

/* MPI keeps a frame that was lent to it. */
static void begin_held(void) {
  begin(1);
  hold(data, BYTES);
  send_frame(BYTES);
}

static uint32_t kept(void) {
  char whom[64] = "";
  uint32_t n = mlfab_transport_mpi()->keeps(p.from, whom, sizeof whom);
  if (n) assert_string_equal(whom, "MPI rank 0");
  return n;
}

TEST(test_sent_when_mpi_has_let_go) {
  begin_held();
  look_for(50);
  assert_int_equal(p.frames, 1); /* MPI has delivered it, and does not say so */
  assert_int_equal(p.sent, 0);
  assert_int_equal(kept(), 0);
  let_go();
  look_for(50);
  assert_int_equal(p.sent, 1);
  end();
}

TEST(test_without_the_option_it_is_a_copy) {
  begin(0);
  send_frame(BYTES);
  memset(data, 0, BYTES);
  look_for(50);
  assert_int_equal(p.sent, 1);
  assert_int_equal(p.frames, 1);
  end();
}

TEST(test_detach_while_in_flight) {
  begin_held();
  assert_int_equal(mlfab_transport_mpi()->detach(p.from, p.link, 8), 0);
  assert_int_equal(kept(), 0); /* another token */
  assert_int_equal(mlfab_transport_mpi()->detach(p.from, p.link, 7), 0);
  assert_int_equal(kept(), 1);
  look_for(50);
  assert_int_equal(kept(), 1);
  let_go();
  look_for(50);
  assert_int_equal(kept(), 0);
  assert_int_equal(p.sent, 0);
  assert_int_equal(p.frames, 1);
  end();
}

TEST(test_disconnect_while_in_flight) {
  begin_held();
  mlfab_transport_mpi()->disconnect(p.from, p.link);
  assert_int_equal(kept(), 1);
  let_go();
  look_for(50);
  assert_int_equal(kept(), 0);
  assert_int_equal(p.frames, 1);
  assert_int_equal(p.down, 1);
  end();
}

TEST(test_down_while_in_flight) {
  begin_held();
  mlfab_transport_mpi()->close(p.to);
  p.to = NULL;
  look_for(50);
  assert_int_equal(p.down, 1);
  assert_int_equal(kept(), 1);
  let_go();
  look_for(50);
  assert_int_equal(kept(), 0);
  mlfab_transport_mpi()->close(p.from);
}

static void *let_go_soon(void *began) {
  usleep(200000);
  *(uint64_t *)began = conform_now(NULL);
  let_go();
  return NULL;
}

TEST(test_close_while_in_flight) {
  pthread_t thread;
  uint64_t let_ns = 0;
  begin_held();
  assert_int_equal(pthread_create(&thread, NULL, let_go_soon, &let_ns), 0);
  mlfab_transport_mpi()->close(p.from);
  uint64_t closed_ns = conform_now(NULL);
  memset(data, 0, BYTES); /* the caller's again */
  pthread_join(thread, NULL);
  assert_true(let_ns > 0 && closed_ns >= let_ns);
  p.from = NULL;
  look_for(50);
  assert_int_equal(p.frames, 1);
  end();
}

static char logged[512];

static void keep_log(void *user, int level, const char *line) {
  (void)user;
  if (level == MLFAB_LOG_ERROR) snprintf(logged, sizeof logged, "%s", line);
}

TEST(test_close_when_mpi_does_not_let_go) {
  timeout_ns = 100000000;
  env.log = keep_log;
  env.log_level = MLFAB_LOG_ERROR;
  begin_held();
  mlfab_transport_mpi()->close(p.from);
  p.from = NULL;
  if (!strstr(logged, "MPI rank 0 has not taken")) fail_msg("%s", logged);
  look_for(20);
  let_go();
  look_for(50); /* nobody's loan ends */
  assert_int_equal(p.frames, 1);
  end();
  timeout_ns = 0;
  env.log = conform_log;
}

/* ---- two contexts, whose transport is MPI by another name ---- */

static int other_open(const mlfab_transport_options *options, void **self_p, char *address) {
  mlfab_transport_options own = *options;
  char listen[256] = "", made[256];
  if (options->listen[0]) snprintf(listen, sizeof listen, "mpi:%s", options->listen + 5);
  own.listen = listen;
  own.user = NULL;
  int code = mlfab_transport_mpi()->open(&own, self_p, made);
  if (!code) snprintf(address, 256, "held:%.240s", made + 4);
  return code;
}

static int other_reach(void *self, const char *address) {
  (void)self;
  return !strncmp(address, "held:", 5);
}

static int other_connect(void *self, const char *address, uint64_t token) {
  char at[256];
  snprintf(at, sizeof at, "mpi:%.240s", address + 5);
  return mlfab_transport_mpi()->connect(self, at, token);
}

static mlfab_transport other;
static mlfab *nodes[2];

static void *open_node(void *place) {
  int rank = (int)(intptr_t)place;
  mlfab_config c;
  mlfab_error error = {.code = 0};
  mlfab_config_init(&c);
  c.workers = 2;
  c.rank = rank;
  c.transport = &other;
  c.transports = MLFAB_USE_SHM;
  c.mpi_lend = 1;
  c.progress = MLFAB_PROGRESS_THREAD;
  snprintf(c.coordinator, sizeof c.coordinator, "held:0/1000");
  if (rank == 0) snprintf(c.listen, sizeof c.listen, "held:0/1000");
  if (mlfab_open(&c, &nodes[rank], &error)) fail_msg("%s", error.text);
  return NULL;
}

static void *start_model(void *place) {
  mlfab *ctx = nodes[(intptr_t)place];
  float *weights = calloc(ELEMENTS, sizeof *weights);
  mlfab_buf buf = {0, 0, weights, ELEMENTS};
  assert_int_equal(mlfab_tensor_add(ctx, 0, MLFAB_F32, ELEMENTS), 0);
  assert_int_equal(mlfab_model_start(ctx, NULL, &buf, 1), 0);
  free(weights);
  return NULL;
}

static void both(void *(*what)(void *)) {
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, what, NULL), 0);
  what((void *)(intptr_t)1);
  pthread_join(thread, NULL);
}

static void *close_node(void *place) {
  mlfab_close(&nodes[(intptr_t)place]);
  return NULL;
}

static void open_nodes(void) {
  other = *mlfab_transport_mpi();
  other.name = "held";
  other.open = other_open;
  other.reach = other_reach;
  other.connect = other_connect;
  both(open_node);
  both(start_model);
}

static atomic_int told;

static void tell(void *user, mlfab_request request, const mlfab_result *result) {
  (void)user, (void)request, (void)result;
  atomic_store(&told, 1);
}

/* All weights are equal: of the update, all or nothing was added. Returns their value. */
static float weight(mlfab *ctx) {
  float *weights = calloc(ELEMENTS, sizeof *weights);
  mlfab_buf buf = {0, 0, weights, ELEMENTS};
  assert_int_equal(mlfab_pull(ctx, &buf, 1, NULL, NULL), 0);
  float first = weights[0];
  for (int i = 1; i < ELEMENTS; i++) assert_true(weights[i] == first);
  free(weights);
  return first;
}

TEST(test_a_cancelled_push_keeps_its_buffer) {
  mlfab_request push = 0;
  mlfab_error error = {.code = 0};
  mlfab_result result;
  int done = 1;
  open_nodes();
  for (int again = 0; again < 2; again++) {
    float *update = (float *)(void *)data, before = weight(nodes[1]);
    mlfab_buf buf = {0, 0, update, ELEMENTS};
    for (int i = 0; i < ELEMENTS; i++) update[i] = 3;
    hold(data, BYTES);
    assert_int_equal(mlfab_push_start(nodes[1], &buf, 1, NULL, &push), 0);
    usleep(100000); /* MPI has some of it */
    assert_int_equal(mlfab_cancel(nodes[1], push), 0);
    assert_int_equal(mlfab_test(nodes[1], push, &done, NULL), 0);
    assert_int_equal(done, 0);
    if (again) {
      atomic_store(&told, 0);
      assert_int_equal(mlfab_on_done(nodes[1], push, tell, NULL), 0);
      usleep(100000);
      assert_int_equal(atomic_load(&told), 0);
    } else {
      assert_int_equal(mlfab_wait(nodes[1], push, 50000000, NULL), MLFAB_ERR_TIMEOUT);
      mlfab_last_error(nodes[1], &error);
      if (!strstr(error.text, "MPI rank 0 has not taken")) fail_msg("%s", error.text);
      assert_int_equal(mlfab_flush(nodes[1], 300000000), MLFAB_ERR_TIMEOUT);
      mlfab_last_error(nodes[1], &error);
      if (!strstr(error.text, "MPI rank 0 has not taken")) fail_msg("%s", error.text);
    }
    let_go();
    if (again) {
      for (int i = 0; i < 60000 && !atomic_load(&told); i++) usleep(1000);
      assert_int_equal(atomic_load(&told), 1);
    } else {
      int code = mlfab_wait(nodes[1], push, 0, &result);
      assert_true(code == 0 || code == MLFAB_ERR_CANCELLED || code == MLFAB_ERR_IN_DOUBT);
    }
    memset(data, 0x55, BYTES); /* the caller's again */
    float now = weight(nodes[0]);
    assert_true(now == before || now == before + 3);
  }
  both(close_node);
}

/* ---- errors ---- */

/* The bulk of a frame cannot be received: the frame is not reported, and all links end. */
TEST(test_a_receive_that_fails) {
  PMPI_Comm_dup(MPI_COMM_SELF, &programs);
  over = &programs;
  begin(0);
  deaf = 1;
  send_frame(BYTES);
  look_for(20);
  deaf = 0;
  assert_int_equal(p.down, 2);
  assert_int_equal(p.frames, 0);
  if (!strstr(p.text, "MPI_Irecv between MPI ranks 0 and 0 failed")) fail_msg("%s", p.text);
  end();
  over = NULL;
}

/* After this one nothing goes over MPI_COMM_WORLD. */
TEST(test_a_call_of_mpi_that_fails) {
  begin_held();
  mlfab_transport_mpi()->detach(p.from, p.link, 7);
  assert_int_equal(kept(), 1);
  failing = 1;
  send_frame(0);
  look_for(20);
  assert_int_equal(p.down, 2);
  if (!strstr(p.text, "MPI_Isend between MPI ranks 0 and 0 failed")) fail_msg("%s", p.text);
  assert_int_equal(kept(), 0); /* nothing more can be known */
  failing = 0;
  let_go();
  end();
}

/* ---- opening ---- */

/* Opens over a communicator that seems to have four processes. */
static int open_four(uint64_t wait_ns, void **end_p, mlfab_error *error) {
  char address[256];
  mlfab_transport_options options = {.size = sizeof options,
                                     .listen = "",
                                     .env = &env,
                                     .error = error,
                                     .user = &programs,
                                     .timeout_ns = wait_ns};
  PMPI_Comm_dup(MPI_COMM_SELF, &programs);
  here_sent = here_told = 0;
  gathered = NULL;
  world_of = 4;
  int code = mlfab_transport_mpi()->open(&options, end_p, address);
  world_of = 0;
  return code;
}

TEST(test_who_is_missing) {
  void *end = NULL;
  mlfab_error error = {.code = 0};
  int code = open_four(200000000, &end, &error);
  assert_int_equal(code, MLFAB_ERR_TIMEOUT);
  if (!strstr(error.text, "MPI rank 3 has not called mlfab_open")) fail_msg("%s", error.text);
  assert_int_equal(here_sent, 3);
}

/* This process comes last: the duplicate is made before it hears the others. It says nothing over the program's
 * communicator any more, because nobody would take it there. */
TEST(test_no_message_is_left) {
  void *end = NULL;
  mlfab_error error = {.code = 0};
  all_come = 1;
  int code = open_four(5000000000, &end, &error);
  all_come = 0;
  if (code) fail_msg("%s", error.text);
  assert_non_null(gathered);
  assert_int_equal(has_said, 0);
  assert_int_equal(here_sent, 0);
  mlfab_transport_mpi()->close(end);
}

int main(int argc, char **argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  data = malloc(BYTES);
  should = malloc(BYTES);
  if (!data || !should || level != MPI_THREAD_MULTIPLE) return 1;
  int failed = testing_run(argc - 1, argv + 1, NULL, NULL);
  free(data);
  free(should);
  MPI_Finalize();
  return failed != 0;
}
