/* test_checkpoint.c - checkpoints of simulated fabrics: restored with other numbers of servers and workers, in the middle
 * of a round, after slices have moved, with a scheduler and version tags; links that break; servers whose disks fail, that
 * die, or that read other files than the others. */
#include "job.h"
#include "../unit/memory_disk.h"

#include <math.h>

enum { COUNT = 20000, WORKERS = 3 };

/* A scene has one disk and one model, and opens one fabric after the other. */
static memory_disk *disk, *other; /* other: of one server only, in some scenes */
static mlfab_model_options model;
static world w;
static mlfab_env envs[WORLD_NODES];
static float moved[COUNT], before[COUNT], after[COUNT];

/* How a fabric differs from the usual one. */
typedef struct shape {
  uint32_t workers, servers;
  uint32_t founding,
      absent; /* servers at the beginning, 0: all; a node that never comes, 0: none */
  int copies; /* the server has a replica, and the scheduler is a process */
  uint32_t scheduler, history;
  uint64_t commits;      /* as checkpoint_commits, of servers */
  uint64_t life;         /* fabrics with other numbers draw other numbers */
  memory_disk *last;     /* the last server's, if it has not the same as the others */
  const char *directory; /* NULL: that of the disk */
  void (*log)(void *user, int level, const char *line); /* of servers; or NULL */
  uint32_t log_level;
  int (*conditions)(void *user, const mlfab_sync_state *state); /* of servers; or NULL */
} shape;
#define OPEN(...) open_fabric(&(const shape){__VA_ARGS__})

static void open_node(const shape *s, uint32_t i) {
  static const uint32_t roles[] = {MLFAB_ROLE_WORKER, MLFAB_ROLE_SERVER, MLFAB_ROLE_REPLICA,
                                   MLFAB_ROLE_SCHEDULER};
  mlfab_config c = world_config(&w, s->copies && i > 0 ? 1 : i);
  envs[i] = (mlfab_env){.size = sizeof envs[i], .log_level = s->log_level};
  if (i >= s->workers) {
    envs[i].files = &(s->last && i + 1 == w.nodes ? s->last : disk)->table;
    envs[i].log = s->log;
    c.checkpoint_commits = s->commits;
    c.pull_condition = c.push_condition = s->conditions;
  }
  c.env = &envs[i];
  c.history = s->history;
  c.seed = s->life;
  if (s->founding) {
    c.servers = s->founding;
    c.servers_max = s->servers;
  }
  if (s->copies) {
    c.roles = roles[i];
    c.replicas = 1;
    c.scheduler = MLFAB_SCHEDULER_OWN;
    snprintf(c.coordinator, sizeof c.coordinator, "sim:1,sim:2");
  }
  sim_open(w.sim, i, &c, &w.node[i]);
}

static void open_fabric(const shape *s) {
  world_init(&w, s->workers, s->servers, 1);
  if (s->copies) w.nodes = 4;
  w.config.timeout_ns = 20ull * WORLD_S;
  w.config.scheduler = s->scheduler;
  if (s->scheduler) w.config.eager_bytes = 4096; /* pushes are planned */
  w.config.heartbeat_ns = 100 * WORLD_MS;
  w.config.chunk_bytes = 4096;
  w.config.block_bytes = 8192;
  snprintf(w.config.checkpoint_dir, sizeof w.config.checkpoint_dir, "%s",
           s->directory ? s->directory : "/disk");
  world_network(&w, 1);
  for (uint32_t i = 0; i < w.nodes; i++)
    if (i == 0 || i != s->absent) open_node(s, i);
  for (uint32_t i = 0; i < w.nodes; i++)
    if (i == 0 || i != s->absent) world_await(&w, i);
  for (uint32_t i = 0; i < s->workers; i++)
    OK(w.node[i], mlfab_tensor_add(w.node[i], 1, MLFAB_F32, COUNT));
}

static void start_from(const char *dir) {
  for (int i = 0; i < COUNT; i++) moved[i] = (float)i;
  mlfab_buf buf = {1, 0, moved, COUNT};
  if (dir) OK(w.node[0], mlfab_restore(w.node[0], dir));
  for (uint32_t i = 0; i < w.workers; i++)
    OK(w.node[i], mlfab_model_start(w.node[i], &model, &buf, 1));
}

/* A fabric with a new model, or with the newest checkpoint of the disk. */
static void begin_fabric(const shape *s, const char *dir) {
  open_fabric(s);
  start_from(dir);
}
#define BEGIN(...) begin_fabric(&(const shape){__VA_ARGS__}, NULL)
#define RESTORE(...) begin_fabric(&(const shape){__VA_ARGS__}, "/disk")

/* A checkpoint is to be restored, and cannot be, for this reason. */
static void refuse_to_start(int code, const char *reason) {
  OK(w.node[0], mlfab_restore(w.node[0], "/disk"));
  EXPECT(w.node[0], mlfab_model_start(w.node[0], &model, NULL, 0), code);
  assert_non_null(strstr(last_text(w.node[0]), reason));
}

static void push(uint32_t worker, uint64_t iteration) {
  float u[COUNT];
  for (int i = 0; i < COUNT; i++)
    u[i] = (float)(((uint32_t)i + 3 * worker + (uint32_t)iteration) % 8);
  mlfab_buf buf = {1, 0, u, COUNT};
  mlfab_push_options o = MLFAB_PUSH_OPTIONS_INIT;
  o.iteration = iteration + 1;
  OK(w.node[worker], mlfab_push(w.node[worker], &buf, 1, &o, NULL));
}

/* All workers' updates of the iterations `from` to `to` - 1. */
static void push_all(uint64_t from, uint64_t to) {
  for (uint64_t i = from; i < to; i++)
    for (uint32_t worker = 0; worker < w.workers; worker++) push(worker, i);
}

static void pull(uint32_t worker) {
  mlfab_buf buf = {1, 0, moved, COUNT};
  OK(w.node[worker], mlfab_pull(w.node[worker], &buf, 1, NULL, NULL));
}

static void pull_and_keep(uint32_t worker, float *kept) {
  pull(worker);
  memcpy(kept, moved, sizeof moved);
}

static void pull_the_same(uint32_t worker, const float *kept) {
  pull(worker);
  assert_memory_equal(moved, kept, sizeof moved);
}

/* A checkpoint of so many servers. Returns its number. */
static uint64_t save_of(uint32_t servers, uint32_t worker) {
  mlfab_checkpoint_info info = {.size = sizeof info};
  OK(w.node[worker], mlfab_checkpoint(w.node[worker], NULL, &info));
  assert_int_equal(info.servers, servers);
  return info.number;
}

static uint64_t save(uint32_t worker) { return save_of(w.servers, worker); }

/* Checkpoints of a fabric that is over, of one update more each. */
static void leave_checkpoints(uint32_t workers, uint32_t servers, uint64_t n) {
  BEGIN(.workers = workers, .servers = servers);
  for (uint64_t i = 0; i < n; i++) {
    push(0, i);
    save(0);
  }
  world_close(&w);
}

static void fail_to_save(int code) {
  EXPECT(w.node[0], mlfab_checkpoint(w.node[0], NULL, NULL), code);
}

/* The checkpoint that was restored; 0: none. */
static uint64_t restored(void) {
  mlfab_checkpoint_info info = {.size = sizeof info};
  OK(w.node[0], mlfab_restored(w.node[0], &info));
  return info.number;
}

/* Worker 0's last error names this server, and has these words. */
static void blames(int32_t server, const char *words) {
  mlfab_error error;
  mlfab_last_error(w.node[0], &error);
  assert_int_equal(error.rank, server);
  assert_int_equal(error.is_server, 1);
  if (!strstr(error.text, words)) fail_msg("'%s' has no '%s'", error.text, words);
}

static void move_slices(uint32_t worker, const uint32_t *servers, uint32_t n) {
  OK(w.node[worker], mlfab_set_servers(w.node[worker], servers, n, 0));
}

static void rest(uint64_t ns) { mlfab_sim_run(w.sim, ns); }
static void close_fabric(void) { world_close(&w); }

/* --- files --- */

static memory_disk *disk_new(void) {
  memory_disk *d = calloc(1, sizeof *d);
  disk_init(d);
  return d;
}

static void disk_drop(memory_disk **d) {
  if (*d) disk_free(*d);
  free(*d);
  *d = NULL;
}

static int set_up(void **state) {
  (void)state;
  disk = disk_new();
  model = (mlfab_model_options)MLFAB_MODEL_OPTIONS_INIT;
  model.optimizer = MLFAB_OPTIMIZER_MOMENTUM;
  model.gamma = 0.5;
  model.sync = MLFAB_SYNC_ASYNC;
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  disk_drop(&disk);
  disk_drop(&other);
  return 0;
}

#define SCENE(name) TEST_WITH(name, set_up, tear_down)

/* The disk has so many files whose names contain this. */
static void has(int n, const char *name) { assert_int_equal(disk_count(disk, name), n); }

/* One more name, as if an attempt with this number had left it: the bytes are those of `from`. */
static void leave(const char *from, const char *name) {
  char paths[2][64];
  snprintf(paths[0], sizeof paths[0], "/disk/checkpoint-%s", from);
  snprintf(paths[1], sizeof paths[1], "/disk/checkpoint-%s", name);
  disk_link(disk, paths[0], paths[1]);
}

/* --- scenes --- */

/* A round goes on where it was: the updates that were in it count, and only
 * worker 0's is still awaited. */
SCENE(test_servers) {
  model.sync = MLFAB_SYNC_BSP;
  BEGIN(.workers = WORKERS, .servers = 2);
  push_all(0, 3);
  for (uint32_t i = 1; i < WORKERS; i++) push(i, 3);
  pull_and_keep(0, before);
  assert_int_equal(save(2), 1);
  has(2, "-of-2.shard");
  push(0, 3);
  pull(1);
  push_all(4, 5);
  pull_and_keep(0, after);
  close_fabric();
  for (uint32_t servers = 1; servers <= 4; servers++) {
    RESTORE(.workers = WORKERS, .servers = servers);
    for (uint32_t s = 0; s < servers; s++)
      assert_true(world_saw(&w, MLFAB_EVENT_RESTORED, (int32_t)s, 1));
    pull_the_same(0, before);
    push(0, 3); /* completes round 3 */
    push_all(4, 5);
    pull_the_same(0, after);
    /* And a checkpoint of that. */
    save(1);
    close_fabric();
    for (uint32_t others = 1; others <= 3; others += 2) {
      RESTORE(.workers = WORKERS, .servers = others);
      pull_the_same(1, after);
      close_fabric();
    }
    /* The first one is the only one again. */
    for (int i = 0; i < DISK_FILES; i++)
      if (!strstr(disk->now[i].path, "-00000001")) disk->now[i].path[0] = 0;
  }
}

static int push_ones(uint32_t worker, float last) {
  float u[COUNT];
  mlfab_buf buf = {1, 0, u, COUNT};
  for (int i = 0; i < COUNT; i++) u[i] = 1.0f;
  u[COUNT - 1] = last;
  return mlfab_push(w.node[worker], &buf, 1, NULL, NULL);
}

/* One of two servers refused an update of the open round. One server takes both shards, so it applies both rounds as they
 * are: the mean counts no worker whose update is missing. */
SCENE(test_rounds_differ) {
  model.sync = MLFAB_SYNC_BSP;
  model.optimizer = MLFAB_OPTIMIZER_SGD;
  model.mean = 1;
  BEGIN(.workers = WORKERS, .servers = 2);
  OK(w.node[0], push_ones(0, 1.0f));
  EXPECT(w.node[1], push_ones(1, HUGE_VALF), MLFAB_ERR_NOT_FINITE);
  save(2);
  close_fabric();
  RESTORE(.workers = WORKERS, .servers = 1);
  OK(w.node[2], push_ones(2, 1.0f)); /* completes round 0 */
  for (int updates = 2; updates <= 3; updates++) {
    pull(0);
    for (int i = 0; i < COUNT; i++) assert_true(moved[i] == (float)(i + updates));
    for (uint32_t i = 0; i < WORKERS; i++) OK(w.node[i], push_ones(i, 1.0f));
  }
  close_fabric();
}

static int always(void *user, const mlfab_sync_state *state) {
  (void)user, (void)state;
  return 1;
}

/* The consistency model was changed while the fabric ran. Servers without conditions cannot follow a model by conditions. Rounds
 * that need more updates than there are workers now go on with all workers. */
SCENE(test_changed_models) {
  const mlfab_sync conditions = {.size = sizeof(mlfab_sync), .kind = MLFAB_SYNC_USER};
  const mlfab_sync rounds = {.size = sizeof(mlfab_sync), .kind = MLFAB_SYNC_DROP, .need = 3};
  model.sync = MLFAB_SYNC_SSP;
  BEGIN(.workers = 3, .servers = 1, .conditions = always);
  OK(w.node[0], mlfab_set_sync(w.node[0], &conditions, 0, 0));
  save(0);
  close_fabric();
  OPEN(.workers = 2, .servers = 1);
  refuse_to_start(MLFAB_ERR_UNSUPPORTED, "no pull_condition");
  close_fabric();
  RESTORE(.workers = 3, .servers = 1, .conditions = always);
  OK(w.node[0], mlfab_set_sync(w.node[0], &rounds, 0, 0));
  save(0);
  close_fabric();
  RESTORE(.workers = 2, .servers = 1);
  pull_and_keep(0, before);
  OK(w.node[0], push_ones(0, 1.0f));
  OK(w.node[1], push_ones(1, 1.0f));
  pull(0);
  for (int i = 0; i < COUNT; i++) assert_true(moved[i] == before[i] + 2.0f);
  close_fabric();
}

/* Fewer and more workers; slices that have moved. */
SCENE(test_shapes) {
  const uint32_t second = 1, both[] = {0, 1};
  model.sync = MLFAB_SYNC_SSP;
  BEGIN(.workers = 2, .servers = 2);
  push_all(0, 3);
  move_slices(0, &second, 1);
  pull_and_keep(0, before);
  save(0);
  close_fabric();
  for (uint32_t workers = 1; workers <= 3; workers++) {
    RESTORE(.workers = workers, .servers = 2);
    for (uint32_t i = 0; i < workers; i++) pull_the_same(i, before);
    /* Slices move on. */
    move_slices(0, &second, 1);
    push_all(2 + workers, 3 + workers);
    move_slices(0, both, 2);
    pull_and_keep(0, before);
    save(workers - 1);
    close_fabric();
  }
}

/* A server that joins and has no slices takes no part; with slices it does; and the numbers of those that take part may
 * have gaps. */
SCENE(test_servers_that_join) {
  const uint32_t to[] = {0, 3};
  model.sync = MLFAB_SYNC_BSP;
  model.slices = 4;
  BEGIN(.workers = 2, .servers = 4, .founding = 2, .absent = 4); /* server 2 never comes */
  push_all(0, 1);
  save_of(2, 0);
  move_slices(1, to, 2);
  push_all(1, 2);
  save_of(3, 0); /* 0, 1, 3 */
  has(3, "-of-3.shard");
  pull_and_keep(0, before);
  close_fabric();
  RESTORE(.workers = 2, .servers = 2);
  pull_the_same(1, before);
  close_fabric();
}

/* With a scheduler, and with versions tags: what a restored model sends is what
 * the caches lack. */
SCENE(test_scheduled) {
  model.tags = 64;
  BEGIN(.workers = 3, .servers = 2, .scheduler = MLFAB_SCHEDULER_BESIDE);
  push_all(0, 3);
  save(1);
  pull_and_keep(0, before);
  push_all(3, 4);
  pull_and_keep(0, after);
  close_fabric();
  RESTORE(.workers = 3, .servers = 2, .scheduler = MLFAB_SCHEDULER_BESIDE);
  pull_the_same(2, before);
  for (uint32_t i = 0; i < 3; i++) {
    push(i, 3);
    pull(i);
  }
  assert_memory_equal(moved, after, sizeof moved);
  close_fabric();
}

/* Connections break at any frame, and their last frames are lost or repeated:
 * each request is carried out once, and answered with what it has done. */
static int whole; /* checkpoints that succeeded */

static void links_break(uint64_t seed) {
  const mlfab_sim_options faults = {.size = sizeof faults,
                                    .seed = seed,
                                    .loss = seed % 2 ? 0.1 : 0.02,
                                    .duplicate = seed % 3 ? 0.05 : 0.0};
  uint64_t last = 0;
  disk_drop(&disk);
  disk = disk_new();
  BEGIN(.workers = 2, .servers = 3);
  assert_int_equal(mlfab_sim_set_faults(w.sim, &faults), 0);
  for (int i = 0; i < 6; i++) {
    mlfab_checkpoint_info info = {.size = sizeof info};
    push((uint32_t)i % 2, (uint64_t)i / 2);
    int code = mlfab_checkpoint(w.node[i % 2], NULL, &info);
    assert_true(code == 0 || code == MLFAB_ERR_AGAIN || code == MLFAB_ERR_PEER_DEAD ||
                code == MLFAB_ERR_TIMEOUT);
    if (code) continue;
    whole++;
    assert_true(info.number > last && info.version >= (uint64_t)i / 2);
    last = info.number;
    char name[64];
    snprintf(name, sizeof name, "%08llu.manifest", (unsigned long long)info.number);
    has(1, name);
    has(0, ".part");
  }
  close_fabric();
  if (last == 0) return;
  RESTORE(.workers = 1, .servers = 2);
  close_fabric();
}

SCENE(test_links_break) {
  whole = 0;
  seeds_run("checkpoint", test_cases(25), links_break);
  assert_true(seeds_alone() || whole > 4 * (int)test_cases(25));
}

/* A server whose disk fails, or that is dead, is named; the older checkpoint
 * stays. */
SCENE(test_failures) {
  leave_checkpoints(2, 2, 1);
  other = disk_new();
  BEGIN(.workers = 2, .servers = 2, .last = other);
  other->stopped = 1;
  fail_to_save(MLFAB_ERR_IO);
  blames(1, "checkpoint: server 1 cannot write '/disk/checkpoint-00000002-1-of-2.shard'");
  has(1, ".manifest");
  /* The next attempt removes what this one has left. */
  other->stopped = 0;
  save(1);
  has(0, "-00000002");
  has(2, ".manifest");
  mlfab_abandon(&w.node[3]);
  fail_to_save(MLFAB_ERR_PEER_DEAD);
  blames(1, "");
  close_fabric();
}

/* The second shard of the newest checkpoint is damaged: the older one is loaded, from its first shard on. */
SCENE(test_damaged_shard) {
  leave_checkpoints(2, 2, 2);
  disk_file(disk, "00000002-1-of-2.shard")->data[100] ^= 1;
  RESTORE(.workers = 2, .servers = 2);
  assert_int_equal(restored(), 1);
  close_fabric();
}

/* A disk is full for a while. An attempt that fails leaves nothing. Files of a process that was killed go before the next
 * attempt, which would not fit beside them. */
SCENE(test_full_disk) {
  BEGIN(.workers = 2, .servers = 2);
  push(0, 0);
  save(0);
  uint64_t one = disk_used(disk);
  /* Too little at the end of any of its three files. */
  for (int i = 1; i < 8; i++) {
    disk->room = one + one * (uint64_t)i / 8;
    if (i == 7) disk->room = 2 * one - 1;
    fail_to_save(MLFAB_ERR_IO);
    assert_non_null(strstr(last_text(w.node[0]), "No space left"));
    rest(WORLD_S);
    assert_true(disk_used(disk) == one);
    has(3, "checkpoint-");
  }
  disk->room = 2 * one;
  save(1);
  has(2, ".manifest");
  close_fabric();
  /* A former process of this history was killed: a file that was being written, shards without a manifest, a manifest's
   * beginning. */
  leave("00000001-0-of-2.shard", "00000020-0-of-2.shard");
  leave("00000001-1-of-2.shard", "00000020-1-of-2.shard.part");
  leave("00000001.manifest", "00000020.manifest.part");
  disk_put(disk, "/disk/of-somebody-else", 1);
  disk->room = 3 * one + 1;
  RESTORE(.workers = 1, .servers = 2);
  assert_true(save(0) > 20);
  has(0, "-00000020");
  has(2, ".manifest");
  has(1, "of-somebody-else");
  close_fabric();
  RESTORE(.workers = 1, .servers = 2);
  close_fabric();
}

/* Exchanges four letters of the names that contain `of`: these files are away, or back. */
static void rename_files(const char *of, const char *letters) {
  for (int i = 0; i < DISK_FILES; i++)
    if (strstr(disk->now[i].path, of)) memcpy(disk->now[i].path + strlen("/disk/"), letters, 4);
}

/* A checkpoint removes files of its own history only, and only of attempts that are over. */
SCENE(test_histories) {
  BEGIN(.workers = 1, .servers = 2);
  push(0, 0);
  for (uint64_t i = 1; i <= 3; i++) assert_int_equal(save(0), i);
  pull_and_keep(0, before);
  close_fabric();
  /* Attempts of the first history, which may still be under way, and a name without bytes. */
  leave("00000003-0-of-2.shard", "00000005-0-of-2.shard");
  leave("00000003-1-of-2.shard", "00000005-1-of-2.shard.part");
  leave("00000003-0-of-2.shard", "00000020-0-of-2.shard");
  disk_put(disk, "/disk/checkpoint-00000021-0-of-2.shard.part", 0);
  int files = disk_count(disk, "checkpoint-");
  /* A new model, which nothing connects with it, also when an attempt of its own fails. */
  BEGIN(.workers = 1, .servers = 2, .life = 2);
  assert_int_equal(save(0), 22);
  disk->room = disk_used(disk) + 1;
  fail_to_save(MLFAB_ERR_IO);
  disk->room = 0;
  for (uint64_t i = 24; i <= 26; i++) assert_int_equal(save(0), i);
  rest(WORLD_S);
  /* The empty file is gone. Two checkpoints of three files have come. */
  has(files - 1 + 6, "checkpoint-");
  has(3, "-00000025");
  has(3, "-00000026");
  close_fabric();
  /* Another process goes on from the first history, and knows its files. The history is known from a checkpoint of it. */
  rename_files("-00000026", "away");
  rename_files("-00000025", "away");
  RESTORE(.workers = 1, .servers = 2, .life = 3);
  assert_int_equal(restored(), 3);
  pull_the_same(0, before);
  rename_files("/disk/away", "chec");
  assert_int_equal(save(0), 27);
  has(0, "-00000005");
  has(0, "-00000020");
  has(0, "-00000002");
  /* A process of the same history that lives on: its attempt is left alone until a larger number is whole. */
  leave("00000003-0-of-2.shard", "00000030-0-of-2.shard");
  assert_int_equal(save(0), 31);
  has(1, "-00000030");
  assert_int_equal(save(0), 32);
  has(0, "-00000030");
  rest(WORLD_S);
  /* Two of each history. */
  has(4, ".manifest");
  has(12, "checkpoint-");
  close_fabric();
}

#define COPIES .workers = 1, .servers = 1, .copies = 1

/* A replica that takes over goes on with the history that it has copied, here that of a checkpoint. */
SCENE(test_history_of_a_copy) {
  BEGIN(COPIES, .life = 2);
  assert_int_equal(save(0), 1);
  close_fabric();
  RESTORE(COPIES);
  assert_int_equal(restored(), 1);
  push(0, 0);
  rest(WORLD_S);
  assert_int_equal(mlfab_sim_crash(w.sim, 1), 0);
  for (uint64_t i = 1; i <= 3; i++) assert_int_equal(save(0), 2 * i);
  rest(WORLD_S);
  has(0, "-00000001");
  has(2, ".manifest");
  close_fabric();
}

/* A server that is told a history begins as the newest checkpoint of this one, or not at all. */
static char history_line[256];

static void keep_history(void *user, int level, const char *line) {
  (void)user;
  (void)level;
  if (strstr(line, "(history "))
    snprintf(history_line, sizeof history_line, "%s", strstr(line, "(history "));
}

SCENE(test_one_history) {
  uint32_t histories[2];
  for (uint64_t i = 0; i < 2; i++) {
    BEGIN(.workers = 1, .servers = 2, .life = i + 1, .log = keep_history,
          .log_level = MLFAB_LOG_INFO);
    push(0, 0);
    save(0);
    assert_int_equal(sscanf(history_line, "(history %u)", &histories[i]), 1);
    close_fabric();
  }
  assert_true(histories[0] != histories[1]);
  for (uint32_t i = 0; i < 2; i++) {
    RESTORE(.workers = 1, .servers = 2, .history = histories[i]);
    assert_int_equal(restored(), i + 1);
    close_fabric();
  }
  OPEN(.workers = 1, .servers = 2, .history = histories[0] ^ histories[1]);
  refuse_to_start(MLFAB_ERR_CHECKPOINT, "it is of another history");
  close_fabric();
}

/* The directory of a call counts, also one of a single character, and also where server 0 has none of its own. */
SCENE(test_directories) {
  mlfab_checkpoint_options how = {.size = sizeof how, .dir = "."};
  for (int own = 0; own < 2; own++) {
    BEGIN(.workers = 1, .servers = 1, .life = (uint64_t)own + 2, .directory = own ? "/disk" : "");
    mlfab *node = w.node[0];
    how.dir = ".";
    EXPECT(node, mlfab_checkpoint(node, &how, NULL), MLFAB_ERR_IO);
    assert_non_null(strstr(last_text(node), "server 0 cannot list '.'"));
    fail_to_save(own ? 0 : MLFAB_ERR_STATE);
    how.dir = "/disk";
    OK(node, mlfab_checkpoint(node, &how, NULL));
    has(1 + 2 * own, ".manifest");
    close_fabric();
  }
}

/* Server 1 does not hear server 0, so these attempts time out. Then it hears all of it. */
static void save_too_late(int attempts, const char *name, int n) {
  const mlfab_checkpoint_options how = {.size = sizeof how, .timeout_ns = 30 * WORLD_MS};
  assert_int_equal(mlfab_sim_partition(w.sim, 2, 3, 1), 0);
  for (int i = 0; i < attempts; i++)
    EXPECT(w.node[0], mlfab_checkpoint(w.node[0], &how, NULL), MLFAB_ERR_TIMEOUT);
  rest(20 * WORLD_MS);
  has(n, name);
  assert_int_equal(mlfab_sim_partition(w.sim, 2, 3, 0), 0);
  rest(5ull * WORLD_S);
}

/* A server that has not answered when an attempt fails may still be writing: the files of that attempt stay until it has
 * answered. */
SCENE(test_late_server) {
  BEGIN(.workers = 2, .servers = 2);
  push(0, 0);
  save(0);
  save_too_late(1, "-00000002-0-of-2.shard", 1);
  has(0, "-00000002");
  has(3, "checkpoint-");
  assert_true(save(0) > 2);
  rest(WORLD_S);
  /* Two attempts fail, and the server carries out both orders late. */
  has(6, "checkpoint-");
  save_too_late(2, "-0-of-2.shard", 4);
  has(6, "checkpoint-");
  save(0);
  rest(WORLD_S);
  has(6, "checkpoint-");
  close_fabric();
}

static int said_failed; /* lines of checkpoints that failed */

static void count_line(void *user, int level, const char *line) {
  (void)user;
  said_failed += level == MLFAB_LOG_WARN && strstr(line, "a checkpoint failed") != NULL;
}

/* Server 1 is ordered to write its shard, and leaves or dies before it does. */
static void end_run(int (*ends)(mlfab **), uint64_t lines) {
  said_failed = 0;
  BEGIN(.workers = 1, .servers = 2, .commits = 1, .log = count_line, .log_level = MLFAB_LOG_WARN);
  push(0, 0);
  while (disk_count(disk, "-0-of-2.shard") == 0) assert_int_equal(mlfab_sim_step(w.sim), 1);
  has(0, "-1-of-2.shard");
  assert_int_equal(ends(&w.node[2]), 0);
  rest(2ull * WORLD_S);
  assert_int_equal(said_failed, lines);
  has(0, ".manifest");
  close_fabric();
}

SCENE(test_run_ends) { end_run(mlfab_close, 0); }

SCENE(test_server_dies) { end_run(mlfab_abandon, 1); }

/* Servers that read different directories do not load different checkpoints
 * unnoticed. */
SCENE(test_disagree) {
  leave_checkpoints(1, 2, 2);
  other = disk_new();
  for (int i = 0; i < DISK_FILES; i++) { /* a copy of the first one */
    if (!strstr(disk->now[i].path, "-00000001")) continue;
    const disk_inode *from = &disk->inodes[disk->now[i].inode];
    disk_inode *to = &other->inodes[other->ninodes];
    to->data = malloc(from->bytes);
    memcpy(to->data, from->data, from->bytes);
    to->bytes = from->bytes;
    disk_add(other->now, disk->now[i].path)->inode = other->ninodes++;
  }
  OPEN(.workers = 1, .servers = 2, .last = other);
  refuse_to_start(MLFAB_ERR_CHECKPOINT, "has loaded checkpoint");
  close_fabric();
}

/* Worker 0 asked for a checkpoint and died before it defined the model: its next process has not asked for one. */
SCENE(test_asker_dies) {
  leave_checkpoints(1, 1, 1);
  OPEN(.workers = 1, .servers = 1);
  OK(w.node[0], mlfab_restore(w.node[0], "/disk"));
  rest(WORLD_S);
  assert_int_equal(mlfab_sim_crash(w.sim, 0), 0);
  rest(2ull * WORLD_S);
  mlfab_config c = world_config(&w, 0);
  sim_open(w.sim, 0, &c, &w.node[0]);
  world_await(&w, 0);
  OK(w.node[0], mlfab_tensor_add(w.node[0], 1, MLFAB_F32, COUNT));
  start_from(NULL);
  assert_int_equal(restored(), 0);
  pull(0);
  for (int i = 0; i < COUNT; i++) assert_true(moved[i] == (float)i);
  close_fabric();
}

TESTS(NULL, NULL)
