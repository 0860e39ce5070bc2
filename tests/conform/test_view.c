/* test_view.c - views: weights that a worker reads in the servers' memory. Between real processes, over shared memory, and over
 * TCP, where a view is a copy.
 *
 * A view stays as it is: while others push, when slices move to another server, when the server is killed, and when its reader was
 * stopped for so long that the server has given it up. */
#include "child.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

/* Two tensors, each of several blocks, and one that is small; none is a multiple of a page. */
enum { A = 300007, B = 700001, C = 11, SERVERS_MAX = 2, WORKERS_MAX = 2 };

typedef struct job {
  uint32_t workers, spare, servers, transports, colocated, tags,
      block_bytes; /* spare: processes more */
  uint64_t heartbeat_ns;
} job;

/* What the processes of a test share. */
static struct shared {
  volatile int ready, pushed;
  volatile pid_t pids[WORKERS_MAX + SERVERS_MAX + 1];
} * shared;

static const job *now;
static char address[64];

static mlfab *fabric_open(uint32_t role, int32_t rank) {
  mlfab_config config;
  mlfab_config_init(&config);
  config.roles =
      now->colocated && rank < (int32_t)now->servers ? MLFAB_ROLE_SERVER | MLFAB_ROLE_WORKER : role;
  config.rank = rank;
  config.workers = now->workers;
  config.servers = now->servers;
  config.dedicated = !now->colocated;
  config.transports = now->transports;
  config.allow_insecure = 1;
  config.timeout_ns = 30000000000u;
  if (now->heartbeat_ns) config.heartbeat_ns = now->heartbeat_ns;
  if (now->block_bytes) config.block_bytes = now->block_bytes;
  snprintf(config.coordinator, sizeof config.coordinator, "%s", address);
  return child_open(&config);
}

typedef void (*body_fn)(int32_t rank);

static void serve(int32_t number) {
  mlfab *fabric = fabric_open(MLFAB_ROLE_SERVER, number);
  CHECK(mlfab_serve(fabric, 0) == 0);
  CHECK(mlfab_close(&fabric) == 0);
}

static pid_t start(body_fn body, int32_t rank) {
  pid_t pid = fork();
  if (pid != 0) return pid;
  alarm(100);
  body(rank);
  _exit(0);
}

/* Runs the servers, and the workers in `body`; `killed`: a server may have been killed. */
static void play(const char *name, const job *j, body_fn body, int killed) {
  now = j;
  if (j->transports == MLFAB_USE_TCP)
    snprintf(address, sizeof address, "127.0.0.1:%u", free_port());
  else
    snprintf(address, sizeof address, "shm:mlfab-view-%s-%ld", name, (long)getpid());
  memset(shared, 0, sizeof *shared);
  uint32_t servers = j->colocated ? 0 : j->servers, workers = j->workers + j->spare;
  for (uint32_t s = 0; s < servers; s++) shared->pids[s] = start(serve, (int32_t)s);
  for (uint32_t w = 0; w < workers; w++) shared->pids[servers + w] = start(body, (int32_t)w);
  for (uint32_t i = 0; i < servers + workers; i++) {
    uint32_t at = (i + servers) % (servers + workers); /* the workers first */
    int status = 0;
    assert_int_equal(waitpid(shared->pids[at], &status, 0), shared->pids[at]);
    for (uint32_t s = 0; status != 0 && at >= servers && s < servers; s++)
      kill(shared->pids[s], SIGKILL);
    if (!killed || at >= servers) assert_int_equal(status, 0);
  }
}

/* --- the model --- */

static float *memory(void) { return malloc((A + B + C) * sizeof(float)); }

static void list(mlfab_buf bufs[3], float *at) {
  bufs[0] = (mlfab_buf){0, 0, at, A};
  bufs[1] = (mlfab_buf){1, 0, at ? at + A : NULL, B};
  bufs[2] = (mlfab_buf){2, 0, at ? at + A + B : NULL, C};
}

static void model_start(mlfab *fabric) {
  mlfab_model_options options;
  mlfab_model_options_init(&options);
  options.tags = now->tags;
  CHECK(mlfab_tensor_add(fabric, 0, MLFAB_F32, A) == 0);
  CHECK(mlfab_tensor_add(fabric, 1, MLFAB_F32, B) == 0);
  CHECK(mlfab_tensor_add(fabric, 2, MLFAB_F32, C) == 0);
  CHECK(mlfab_model_start(fabric, &options, NULL, 0) == 0);
}

/* Element i grows by 1 + i % 5. */
static void push(mlfab *fabric) {
  static float *update;
  mlfab_buf bufs[3];
  if (!update) {
    update = memory();
    for (uint32_t i = 0; i < A + B + C; i++) update[i] = (float)(1 + i % 5);
  }
  list(bufs, update);
  CHECK(mlfab_push(fabric, bufs, 3, NULL, NULL) == 0);
}

/* All elements of the tensors first..first+n-1, each once, after `pushes`. */
static int shows(const mlfab_view *view, uint32_t first, uint32_t n, int pushes) {
  static const uint32_t counts[] = {A, B, C}, at[] = {0, A, A + B};
  uint64_t next = 0;
  uint32_t tensor = first;
  for (uint32_t p = 0; p < view->nparts; p++) {
    const mlfab_view_part *part = &view->parts[p];
    if (next == counts[tensor]) tensor++, next = 0;
    if (tensor >= first + n || part->tensor != tensor || part->first != next ||
        part->dtype != MLFAB_F32)
      return 0;
    for (uint64_t i = 0; i < part->count; i++) {
      float is = ((const float *)part->data)[i];
      if (is != (float)(1 + (at[tensor] + next + i) % 5) * (float)pushes) return 0;
    }
    next += part->count;
  }
  return tensor == first + n - 1 && next == counts[tensor];
}

static mlfab_view look(mlfab *fabric, uint32_t first, uint32_t n) {
  mlfab_view view = {.size = sizeof view};
  mlfab_buf bufs[3];
  list(bufs, NULL);
  CHECK(mlfab_pull_view(fabric, bufs + first, n, NULL, &view) == 0);
  return view;
}

static void leave(mlfab *fabric) {
  CHECK(mlfab_barrier(fabric, NULL) == 0);
  CHECK(mlfab_close(&fabric) == 0);
}

/* --- views over commits --- */

static void over_commits(int32_t rank) {
  mlfab *fabric = fabric_open(MLFAB_ROLE_WORKER, rank);
  mlfab_view views[MLFAB_VIEWS_MAX];
  mlfab_buf bufs[3];
  float *w = memory();
  model_start(fabric);
  for (int round = 0; round < 3 && rank == 0; round++) {
    int pushes = round * MLFAB_VIEWS_MAX;
    for (int i = 0; i < MLFAB_VIEWS_MAX; i++) {
      views[i] = look(fabric, (uint32_t)i % 3, i == 3 ? 3 : 3 - (uint32_t)i % 3);
      push(fabric);
    }
    for (int i = 0; i < MLFAB_VIEWS_MAX; i++) {
      CHECK(shows(&views[i], (uint32_t)i % 3, i == 3 ? 3 : 3 - (uint32_t)i % 3, pushes + i));
      /* The eleven elements of tensor 2 are too few to be read in place. */
      if (i != 2 && !now->block_bytes) CHECK(views[i].copied == !(now->transports & MLFAB_USE_SHM));
    }
    mlfab_view more = {.size = sizeof more};
    list(bufs, w);
    CHECK(mlfab_pull_view(fabric, bufs, 3, NULL, &more) == MLFAB_ERR_LIMIT);
    CHECK(strstr(last(fabric), "4 views are out") != NULL);
    CHECK(mlfab_pull(fabric, bufs, 3, NULL, NULL) == 0);
    CHECK(w[0] == (float)(pushes + MLFAB_VIEWS_MAX));
    for (int i = 0; i < MLFAB_VIEWS_MAX; i++) {
      mlfab_view again = views[i];
      CHECK(mlfab_view_release(fabric, &views[i]) == 0);
      CHECK(views[i].id == 0 && views[i].parts == NULL);
      CHECK(mlfab_view_release(fabric, &views[i]) == MLFAB_ERR_ARGUMENT);
      CHECK(mlfab_view_release(fabric, &again) == MLFAB_ERR_ARGUMENT);
      CHECK(strstr(last(fabric), "released before") != NULL);
    }
  }
  free(w);
  leave(fabric);
}

static void test_over_commits(void **state) {
  (void)state;
  play("commits", &(job){.workers = 1, .servers = 1, .transports = MLFAB_USE_SHM}, over_commits, 0);
}

static void test_several_servers(void **state) {
  (void)state;
  play("servers", &(job){.workers = 1, .servers = 2, .transports = MLFAB_USE_SHM}, over_commits, 0);
}

static void test_small_blocks(void **state) {
  (void)state;
  play("blocks",
       &(job){.workers = 1, .servers = 1, .transports = MLFAB_USE_SHM, .block_bytes = 4096},
       over_commits, 0);
}

static void test_tags(void **state) {
  (void)state;
  play("tags", &(job){.workers = 1, .servers = 2, .transports = MLFAB_USE_SHM, .tags = 256},
       over_commits, 0);
}

static void test_same_process(void **state) {
  (void)state;
  play("same", &(job){.workers = 2, .servers = 1, .transports = MLFAB_USE_SHM, .colocated = 1},
       over_commits, 0);
}

static void test_copies(void **state) {
  (void)state;
  play("tcp", &(job){.workers = 1, .servers = 2, .transports = MLFAB_USE_TCP}, over_commits, 0);
  play("tcptags", &(job){.workers = 1, .servers = 1, .transports = MLFAB_USE_TCP, .tags = 256},
       over_commits, 0);
}

/* --- bad input --- */

static void bad_input(int32_t rank) {
  mlfab *fabric = fabric_open(MLFAB_ROLE_WORKER, rank);
  mlfab_view view = {.size = sizeof view}, old = {.size = 8}, made = {.size = sizeof made};
  mlfab_pull_options flags = {.size = sizeof flags, .flags = MLFAB_PULL_FULL};
  mlfab_buf bufs[3], unknown = {7, 0, NULL, 1}, wrong = {0, 0, NULL, A - 1};
  list(bufs, NULL);
  CHECK(mlfab_pull_view(fabric, bufs, 3, NULL, &view) == MLFAB_ERR_STATE);
  model_start(fabric);
  CHECK(mlfab_pull_view(fabric, bufs, 3, NULL, NULL) == MLFAB_ERR_ARGUMENT);
  CHECK(mlfab_pull_view(fabric, bufs, 3, NULL, &old) == MLFAB_ERR_ARGUMENT);
  CHECK(mlfab_pull_view(fabric, NULL, 0, NULL, &view) == MLFAB_ERR_ARGUMENT);
  CHECK(mlfab_pull_view(fabric, &unknown, 1, NULL, &view) == MLFAB_ERR_TENSOR);
  CHECK(mlfab_pull_view(fabric, &wrong, 1, NULL, &view) == MLFAB_ERR_SHAPE);
  CHECK(mlfab_pull_view(fabric, bufs, 3, &flags, &view) == MLFAB_ERR_ARGUMENT);
  CHECK(mlfab_view_release(fabric, NULL) == MLFAB_ERR_ARGUMENT);
  CHECK(mlfab_view_release(fabric, &view) == MLFAB_ERR_ARGUMENT);
  CHECK(view.id == 0 && view.nparts == 0);
  /* Of another context: with a number that this one has, too. */
  view = look(fabric, 0, 3);
  mlfab_view_part part = view.parts[0];
  made.id = view.id;
  made.parts = &part;
  CHECK(mlfab_view_release(fabric, &made) == MLFAB_ERR_ARGUMENT);
  CHECK(shows(&view, 0, 3, 0));
  CHECK(mlfab_view_release(fabric, &view) == 0);
  /* A view that is never released ends with the context. */
  look(fabric, 0, 3);
  leave(fabric);
}

static void test_bad_input(void **state) {
  (void)state;
  play("bad", &(job){.workers = 1, .servers = 1, .transports = MLFAB_USE_SHM}, bad_input, 0);
}

/* --- a server that is killed --- */

static void without_server(int32_t rank) {
  mlfab *fabric = fabric_open(MLFAB_ROLE_WORKER, rank);
  model_start(fabric);
  push(fabric);
  mlfab_view view = look(fabric, 0, 3);
  push(fabric);
  kill(shared->pids[0], SIGKILL);
  nap(50);
  mlfab_buf bufs[3];
  float *w = memory();
  list(bufs, w);
  CHECK(mlfab_pull(fabric, bufs, 3, NULL, NULL) == MLFAB_ERR_PEER_DEAD);
  CHECK(shows(&view, 0, 3, 1));
  CHECK(mlfab_view_release(fabric, &view) == 0);
  free(w);
  mlfab_abandon(&fabric);
}

static void test_server_killed(void **state) {
  (void)state;
  play("killed",
       &(job){.workers = 1, .servers = 1, .transports = MLFAB_USE_SHM, .heartbeat_ns = 50000000},
       without_server, 1);
}

/* --- a reader that is stopped until another process has taken its place --- */

/* Rank 2 is a process that waits, and then claims the rank of the reader. */
static void stopped(int32_t rank) {
  while (rank == 2 && shared->ready < 2) nap(1);
  mlfab *fabric = fabric_open(MLFAB_ROLE_WORKER, rank % 2);
  model_start(fabric);
  if (rank == 0) {
    push(fabric);
    mlfab_view view = look(fabric, 0, 3);
    CHECK(!view.copied && shows(&view, 0, 3, 1));
    shared->ready = 1;
    while (!shared->pushed) nap(1);
    CHECK(shows(&view, 0, 3, 1));
    _exit(0); /* the fabric has given it up */
  }
  if (rank == 2) shared->ready = 3;
  while (rank == 1 && !shared->ready) nap(1);
  if (rank == 1) kill(shared->pids[1], SIGSTOP);
  if (rank == 1) shared->ready = 2;
  while (shared->ready < 3) nap(1);
  nap(200); /* the server renews pages in ticks */
  for (int i = 0; i < 8 && rank == 1; i++) push(fabric);
  if (rank == 1) shared->pushed = 1;
  kill(shared->pids[1], SIGCONT);
  while (!shared->pushed) nap(1);
  nap(300);
  mlfab_abandon(&fabric);
  kill(shared->pids[0], SIGKILL);
}

static void test_reader_stopped(void **state) {
  (void)state;
  play("stopped",
       &(job){.workers = 2,
              .spare = 1,
              .servers = 1,
              .transports = MLFAB_USE_SHM,
              .heartbeat_ns = 150000000},
       stopped, 1);
}

/* --- slices that move --- */

static void moves(int32_t rank) {
  static const uint32_t one[] = {0}, both[] = {0, 1};
  mlfab *fabric = fabric_open(MLFAB_ROLE_WORKER, rank);
  model_start(fabric);
  mlfab_view views[3];
  push(fabric);
  views[0] = look(fabric, 0, 3);
  CHECK(mlfab_set_servers(fabric, one, 1, 0) == 0);
  push(fabric);
  views[1] = look(fabric, 0, 3);
  CHECK(mlfab_set_servers(fabric, both, 2, 0) == 0);
  push(fabric);
  views[2] = look(fabric, 0, 3);
  for (int i = 0; i < 5; i++) push(fabric);
  for (int i = 0; i < 3; i++) CHECK(shows(&views[i], 0, 3, i + 1));
  CHECK(mlfab_view_release(fabric, &views[1]) == 0);
  CHECK(mlfab_view_release(fabric, &views[0]) == 0);
  for (int i = 0; i < 5; i++) push(fabric);
  CHECK(shows(&views[2], 0, 3, 3));
  CHECK(mlfab_view_release(fabric, &views[2]) == 0);
  views[0] = look(fabric, 0, 3);
  CHECK(shows(&views[0], 0, 3, 13));
  leave(fabric);
}

static void test_moves(void **state) {
  (void)state;
  play("moves", &(job){.workers = 1, .servers = 2, .transports = MLFAB_USE_SHM}, moves, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_over_commits),   cmocka_unit_test(test_several_servers),
      cmocka_unit_test(test_small_blocks),   cmocka_unit_test(test_tags),
      cmocka_unit_test(test_same_process),   cmocka_unit_test(test_copies),
      cmocka_unit_test(test_bad_input),      cmocka_unit_test(test_server_killed),
      cmocka_unit_test(test_reader_stopped), cmocka_unit_test(test_moves),
  };
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  return cmocka_run_group_tests_name("views", tests, NULL, NULL);
}
