/* test_checkpoint.c - checkpoints of simulated fabrics: restored with other numbers of servers and workers, in the middle
 * of a round, after slices have moved, with a scheduler and version tags; links that break; servers whose disks fail, that
 * die, or that read other files than the others. */
#include "job.h"

#include "../unit/memory_disk.h"

enum { COUNT = 20000, WORKERS = 3 };

static void (*logs)(void *user, int level, const char *line); /* of servers; or NULL */
static uint32_t log_level = MLFAB_LOG_WARN;
static uint32_t history; /* of the configuration of servers */
static uint64_t commits; /* likewise */
static const char *directory = "/disk";
static uint64_t life; /* fabrics with other numbers draw other numbers */

typedef struct fabric {
  world w;
  mlfab_env env[WORLD_NODES];
  float moved[COUNT];
} fabric;

/* Opens a fabric; server s has the files of disks[s]. */
static fabric *fabric_open_as(uint32_t workers, uint32_t servers, memory_disk *const *disks,
                              uint32_t scheduler) {
  fabric *f = calloc(1, sizeof *f);
  world *w = &f->w;
  world_init(w, workers, servers, 1);
  w->config.timeout_ns = 20ull * WORLD_S;
  w->config.scheduler = scheduler;
  if (scheduler) w->config.eager_bytes = 4096; /* pushes are planned */
  w->config.heartbeat_ns = 100 * WORLD_MS;
  w->config.chunk_bytes = 4096;
  w->config.block_bytes = 8192;
  snprintf(w->config.checkpoint_dir, sizeof w->config.checkpoint_dir, "%s", directory);
  world_network(w, 1);
  for (uint32_t i = 0; i < w->nodes; i++) {
    mlfab_config c = world_config(w, i);
    f->env[i].size = sizeof f->env[i];
    f->env[i].files = i < workers ? NULL : &disks[i - workers]->table;
    f->env[i].log = i < workers ? NULL : logs;
    f->env[i].log_level = logs ? log_level : 0;
    c.history = history;
    c.checkpoint_commits = i < workers ? 0 : commits;
    c.seed = life;
    c.env = &f->env[i];
    sim_open(w->sim, i, &c, &w->node[i]);
  }
  for (uint32_t i = 0; i < w->nodes; i++) world_await(w, i);
  for (uint32_t i = 0; i < workers; i++)
    OK(w->node[i], mlfab_tensor_add(w->node[i], 1, MLFAB_F32, COUNT));
  return f;
}

static fabric *fabric_open(uint32_t workers, uint32_t servers, memory_disk *const *disks) {
  return fabric_open_as(workers, servers, disks, MLFAB_SCHEDULER_NONE);
}

static void fabric_close(fabric *f) {
  world_close(&f->w);
  free(f);
}

static mlfab_model_options options_of(uint32_t sync) {
  mlfab_model_options o = MLFAB_MODEL_OPTIONS_INIT;
  o.optimizer = MLFAB_OPTIMIZER_MOMENTUM;
  o.gamma = 0.5;
  o.sync = sync;
  return o;
}

static void fabric_model(fabric *f, const mlfab_model_options *o, const char *resume) {
  for (int i = 0; i < COUNT; i++) f->moved[i] = (float)i;
  mlfab_buf buf = {1, 0, f->moved, COUNT};
  if (resume) OK(f->w.node[0], mlfab_restore(f->w.node[0], resume));
  for (uint32_t i = 0; i < f->w.workers; i++)
    OK(f->w.node[i], mlfab_model_start(f->w.node[i], o, &buf, 1));
}

static void fabric_push(fabric *f, uint32_t worker, uint64_t iteration) {
  float u[COUNT];
  for (int i = 0; i < COUNT; i++)
    u[i] = (float)(((uint32_t)i + 3 * worker + (uint32_t)iteration) % 8);
  mlfab_buf buf = {1, 0, u, COUNT};
  mlfab_push_options o = MLFAB_PUSH_OPTIONS_INIT;
  o.iteration = iteration + 1;
  OK(f->w.node[worker], mlfab_push(f->w.node[worker], &buf, 1, &o, NULL));
}

static void fabric_pull(fabric *f, uint32_t worker) {
  mlfab_buf buf = {1, 0, f->moved, COUNT};
  OK(f->w.node[worker], mlfab_pull(f->w.node[worker], &buf, 1, NULL, NULL));
}

static uint64_t fabric_save(fabric *f, uint32_t worker, int wanted) {
  mlfab_checkpoint_info info = {.size = sizeof info};
  EXPECT(f->w.node[worker], mlfab_checkpoint(f->w.node[worker], NULL, &info), wanted);
  if (!wanted) assert_int_equal(info.servers, f->w.servers);
  return info.number;
}

/* A worker, a server, its replica, and the scheduler. */
static fabric *fabric_open_copies(memory_disk *d) {
  static const uint32_t roles[] = {MLFAB_ROLE_WORKER, MLFAB_ROLE_SERVER, MLFAB_ROLE_REPLICA,
                                   MLFAB_ROLE_SCHEDULER};
  fabric *f = calloc(1, sizeof *f);
  world *w = &f->w;
  world_init(w, 1, 1, 1);
  w->nodes = 4;
  w->config.timeout_ns = 20ull * WORLD_S;
  w->config.heartbeat_ns = 100 * WORLD_MS;
  snprintf(w->config.checkpoint_dir, sizeof w->config.checkpoint_dir, "/disk");
  world_network(w, 1);
  for (uint32_t i = 0; i < w->nodes; i++) {
    mlfab_config c = world_config(w, i < 1 ? i : 1);
    f->env[i].size = sizeof f->env[i];
    f->env[i].files = i < 1 ? NULL : &d->table;
    c.env = &f->env[i];
    c.seed = life;
    c.roles = roles[i];
    c.replicas = 1;
    c.scheduler = MLFAB_SCHEDULER_OWN;
    snprintf(c.coordinator, sizeof c.coordinator, "sim:1,sim:2");
    sim_open(w->sim, i, &c, &w->node[i]);
  }
  for (uint32_t i = 0; i < w->nodes; i++) world_await(w, i);
  OK(w->node[0], mlfab_tensor_add(w->node[0], 1, MLFAB_F32, COUNT));
  return f;
}

static uint64_t number_of(fabric *f) {
  mlfab_checkpoint_info info = {.size = sizeof info};
  OK(f->w.node[0], mlfab_restored(f->w.node[0], &info));
  return info.number;
}

static memory_disk *disk_new(void) {
  memory_disk *d = calloc(1, sizeof *d);
  disk_init(d);
  return d;
}

static void disk_drop(memory_disk *d) {
  disk_free(d);
  free(d);
}

/* Rounds 0 to 2, and of round 3 the updates of workers 1 and 2. */
static void to_round_3(fabric *f) {
  for (uint64_t r = 0; r < 3; r++)
    for (uint32_t i = 0; i < WORKERS; i++) fabric_push(f, i, r);
  for (uint32_t i = 1; i < WORKERS; i++) fabric_push(f, i, 3);
}

/* A round goes on where it was: the updates that were in it count, and only
 * worker 0's is still awaited. */
static void test_servers(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_BSP);
  memory_disk *d = disk_new();
  memory_disk *same[4] = {d, d, d, d};
  fabric *f = fabric_open(WORKERS, 2, same);
  fabric_model(f, &o, NULL);
  to_round_3(f);
  fabric_pull(f, 0);
  float *before = malloc(sizeof f->moved), *after = malloc(sizeof f->moved);
  memcpy(before, f->moved, sizeof f->moved);
  assert_int_equal(fabric_save(f, 2, 0), 1);
  assert_int_equal(disk_count(d, "-of-2.shard"), 2);
  fabric_push(f, 0, 3);
  fabric_pull(f, 1);
  for (uint32_t i = 0; i < WORKERS; i++) fabric_push(f, i, 4);
  fabric_pull(f, 0);
  memcpy(after, f->moved, sizeof f->moved);
  fabric_close(f);
  for (uint32_t servers = 1; servers <= 4; servers++) {
    f = fabric_open(WORKERS, servers, same);
    fabric_model(f, &o, "/disk");
    for (uint32_t s = 0; s < servers; s++)
      assert_true(world_saw(&f->w, MLFAB_EVENT_RESTORED, (int32_t)s, 1));
    fabric_pull(f, 0);
    assert_memory_equal(f->moved, before, sizeof f->moved);
    fabric_push(f, 0, 3); /* completes round 3 */
    for (uint32_t i = 0; i < WORKERS; i++) fabric_push(f, i, 4);
    fabric_pull(f, 0);
    assert_memory_equal(f->moved, after, sizeof f->moved);
    /* And a checkpoint of that. */
    fabric_save(f, 1, 0);
    fabric_close(f);
    for (uint32_t other = 1; other <= 3; other += 2) {
      f = fabric_open(WORKERS, other, same);
      fabric_model(f, &o, "/disk");
      fabric_pull(f, 1);
      assert_memory_equal(f->moved, after, sizeof f->moved);
      fabric_close(f);
    }
    /* The first one is the only one again. */
    for (int i = 0; i < DISK_FILES; i++)
      if (!strstr(d->now[i].path, "-00000001")) d->now[i].path[0] = 0;
  }
  free(before);
  free(after);
  disk_drop(d);
}

/* Fewer and more workers; slices that have moved. */
static void test_shapes(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_SSP);
  memory_disk *d = disk_new();
  memory_disk *same[3] = {d, d, d};
  const uint32_t second = 1, both[] = {0, 1};
  fabric *f = fabric_open(2, 2, same);
  fabric_model(f, &o, NULL);
  for (uint64_t r = 0; r < 3; r++)
    for (uint32_t i = 0; i < 2; i++) fabric_push(f, i, r);
  OK(f->w.node[0], mlfab_set_servers(f->w.node[0], &second, 1, 0));
  fabric_pull(f, 0);
  float *before = malloc(sizeof f->moved);
  memcpy(before, f->moved, sizeof f->moved);
  fabric_save(f, 0, 0);
  fabric_close(f);
  for (uint32_t workers = 1; workers <= 3; workers++) {
    f = fabric_open(workers, 2, same);
    fabric_model(f, &o, "/disk");
    for (uint32_t i = 0; i < workers; i++) {
      fabric_pull(f, i);
      assert_memory_equal(f->moved, before, sizeof f->moved);
    }
    /* Slices move on. */
    OK(f->w.node[0], mlfab_set_servers(f->w.node[0], &second, 1, 0));
    for (uint32_t i = 0; i < workers; i++) fabric_push(f, i, 2 + workers);
    OK(f->w.node[0], mlfab_set_servers(f->w.node[0], both, 2, 0));
    fabric_pull(f, 0);
    memcpy(before, f->moved, sizeof f->moved);
    fabric_save(f, workers - 1, 0);
    fabric_close(f);
  }
  free(before);
  disk_drop(d);
}

/* A server that joins and has no slices takes no part; with slices it does; and the numbers of those that take part may
 * have gaps. */
static void test_servers_that_join(void **state) {
  (void)state;
  mlfab_model_options o = options_of(MLFAB_SYNC_BSP);
  o.slices = 4;
  memory_disk *d = disk_new();
  memory_disk *same[4] = {d, d, d, d};
  mlfab_checkpoint_info info = {.size = sizeof info};
  uint32_t to[] = {0, 3};
  fabric *f = calloc(1, sizeof *f);
  world *w = &f->w;
  world_init(w, 2, 4, 1);
  w->config.timeout_ns = 20ull * WORLD_S;
  w->config.heartbeat_ns = 100 * WORLD_MS;
  snprintf(w->config.checkpoint_dir, sizeof w->config.checkpoint_dir, "/disk");
  world_network(w, 1);
  for (uint32_t i = 0; i < w->nodes; i++) {
    mlfab_config c = world_config(w, i);
    c.servers = 2;
    c.servers_max = 4;
    f->env[i].size = sizeof f->env[i];
    f->env[i].files = i < 2 ? NULL : &same[i - 2]->table;
    c.env = &f->env[i];
    if (i != 4) sim_open(w->sim, i, &c, &w->node[i]); /* server 2 never comes */
  }
  for (uint32_t i = 0; i < w->nodes; i++)
    if (i != 4) world_await(w, i);
  for (uint32_t i = 0; i < 2; i++)
    OK(w->node[i], mlfab_tensor_add(w->node[i], 1, MLFAB_F32, COUNT));
  fabric_model(f, &o, NULL);
  for (uint32_t i = 0; i < 2; i++) fabric_push(f, i, 0);
  OK(w->node[0], mlfab_checkpoint(w->node[0], NULL, &info));
  assert_int_equal(info.servers, 2);
  OK(w->node[1], mlfab_set_servers(w->node[1], to, 2, 0));
  for (uint32_t i = 0; i < 2; i++) fabric_push(f, i, 1);
  OK(w->node[0], mlfab_checkpoint(w->node[0], NULL, &info));
  assert_int_equal(info.servers, 3); /* 0, 1, 3 */
  assert_int_equal(disk_count(d, "-of-3.shard"), 3);
  fabric_pull(f, 0);
  float *before = malloc(sizeof f->moved);
  memcpy(before, f->moved, sizeof f->moved);
  fabric_close(f);
  f = fabric_open(2, 2, same);
  fabric_model(f, &o, "/disk");
  fabric_pull(f, 1);
  assert_memory_equal(f->moved, before, sizeof f->moved);
  fabric_close(f);
  free(before);
  disk_drop(d);
}

/* With a scheduler, and with versions tags: what a restored model sends is what
 * the caches lack. */
static void test_scheduled(void **state) {
  (void)state;
  mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  o.tags = 64;
  memory_disk *d = disk_new();
  memory_disk *same[2] = {d, d};
  fabric *f = fabric_open_as(3, 2, same, MLFAB_SCHEDULER_BESIDE);
  fabric_model(f, &o, NULL);
  for (uint64_t r = 0; r < 3; r++)
    for (uint32_t i = 0; i < 3; i++) fabric_push(f, i, r);
  fabric_save(f, 1, 0);
  fabric_pull(f, 0);
  float *before = malloc(sizeof f->moved), *after = malloc(sizeof f->moved);
  memcpy(before, f->moved, sizeof f->moved);
  for (uint32_t i = 0; i < 3; i++) fabric_push(f, i, 3);
  fabric_pull(f, 0);
  memcpy(after, f->moved, sizeof f->moved);
  fabric_close(f);
  f = fabric_open_as(3, 2, same, MLFAB_SCHEDULER_BESIDE);
  fabric_model(f, &o, "/disk");
  fabric_pull(f, 2);
  assert_memory_equal(f->moved, before, sizeof f->moved);
  for (uint32_t i = 0; i < 3; i++) {
    fabric_push(f, i, 3);
    fabric_pull(f, i);
  }
  assert_memory_equal(f->moved, after, sizeof f->moved);
  fabric_close(f);
  free(before);
  free(after);
  disk_drop(d);
}

/* Connections break at any frame, and their last frames are lost or repeated:
 * each request is carried out once, and answered with what it has done. */
static int whole; /* checkpoints that succeeded */

static void links_break(uint64_t seed) {
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  const mlfab_sim_options faults = {.size = sizeof faults,
                                    .seed = seed,
                                    .loss = seed % 2 ? 0.1 : 0.02,
                                    .duplicate = seed % 3 ? 0.05 : 0.0};
  memory_disk *d = disk_new();
  memory_disk *same[3] = {d, d, d};
  uint64_t last = 0;
  fabric *f = fabric_open(2, 3, same);
  fabric_model(f, &o, NULL);
  assert_int_equal(mlfab_sim_set_faults(f->w.sim, &faults), 0);
  for (int i = 0; i < 6; i++) {
    mlfab *node = f->w.node[i % 2];
    mlfab_checkpoint_info info = {.size = sizeof info};
    fabric_push(f, (uint32_t)i % 2, (uint64_t)i / 2);
    int code = mlfab_checkpoint(node, NULL, &info);
    assert_true(code == 0 || code == MLFAB_ERR_AGAIN || code == MLFAB_ERR_PEER_DEAD ||
                code == MLFAB_ERR_TIMEOUT);
    if (code) continue;
    whole++;
    assert_true(info.number > last && info.version >= (uint64_t)i / 2);
    last = info.number;
    char name[64];
    snprintf(name, sizeof name, "%08llu.manifest", (unsigned long long)info.number);
    assert_int_equal(disk_count(d, name), 1);
    assert_int_equal(disk_count(d, ".part"), 0);
  }
  fabric_close(f);
  if (last > 0) {
    f = fabric_open(1, 2, same);
    fabric_model(f, &o, "/disk");
    fabric_close(f);
  }
  disk_drop(d);
}

static void test_links_break(void **state) {
  (void)state;
  whole = 0;
  seeds_run("checkpoint", test_cases(25), links_break);
  assert_true(seeds_alone() || whole > 4 * (int)test_cases(25));
}

/* A server whose disk fails, or that is dead, is named; the older checkpoint
 * stays. */
static void test_failures(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  memory_disk *d = disk_new(), *bad = disk_new();
  memory_disk *disks[2] = {d, bad}, *same[2] = {d, d};
  mlfab_error error;
  fabric *f = fabric_open(2, 2, same);
  fabric_model(f, &o, NULL);
  fabric_push(f, 0, 0);
  fabric_save(f, 0, 0);
  fabric_close(f);
  f = fabric_open(2, 2, disks);
  fabric_model(f, &o, NULL);
  bad->stopped = 1;
  fabric_save(f, 0, MLFAB_ERR_IO);
  mlfab_last_error(f->w.node[0], &error);
  assert_int_equal(error.rank, 1);
  assert_int_equal(error.is_server, 1);
  assert_non_null(strstr(error.text,
                         "checkpoint: server 1 cannot write "
                         "'/disk/checkpoint-00000002-1-of-2.shard'"));
  assert_int_equal(disk_count(d, ".manifest"), 1);
  /* The next attempt removes what this one has left. */
  bad->stopped = 0;
  fabric_save(f, 1, 0);
  assert_int_equal(disk_count(d, "-00000002"), 0);
  assert_int_equal(disk_count(d, ".manifest"), 2);
  mlfab_abandon(&f->w.node[3]);
  fabric_save(f, 0, MLFAB_ERR_PEER_DEAD);
  mlfab_last_error(f->w.node[0], &error);
  assert_int_equal(error.rank, 1);
  assert_int_equal(error.is_server, 1);
  fabric_close(f);
  disk_drop(d);
  disk_drop(bad);
}

/* A disk is full for a while. An attempt that fails leaves nothing. Files of a process that was killed go before the next
 * attempt, which would not fit beside them. */
static void test_full_disk(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  memory_disk *d = disk_new();
  memory_disk *same[2] = {d, d};
  mlfab_error error;
  fabric *f = fabric_open(2, 2, same);
  fabric_model(f, &o, NULL);
  fabric_push(f, 0, 0);
  fabric_save(f, 0, 0);
  uint64_t one = disk_used(d);
  /* Too little at the end of any of its three files. */
  for (int i = 1; i < 8; i++) {
    d->room = one + one * (uint64_t)i / 8;
    if (i == 7) d->room = 2 * one - 1;
    fabric_save(f, 0, MLFAB_ERR_IO);
    mlfab_last_error(f->w.node[0], &error);
    assert_non_null(strstr(error.text, "No space left"));
    mlfab_sim_run(f->w.sim, WORLD_S);
    assert_true(disk_used(d) == one);
    assert_int_equal(disk_count(d, "checkpoint-"), 3);
  }
  d->room = 2 * one;
  fabric_save(f, 1, 0);
  assert_int_equal(disk_count(d, ".manifest"), 2);
  fabric_close(f);
  /* A former process of this history was killed: a file that was being written, shards without a manifest, a manifest's
   * beginning. */
  d->room = 2 * one;
  disk_link(d, "/disk/checkpoint-00000001-0-of-2.shard", "/disk/checkpoint-00000020-0-of-2.shard");
  disk_link(d, "/disk/checkpoint-00000001-1-of-2.shard",
            "/disk/checkpoint-00000020-1-of-2.shard.part");
  disk_link(d, "/disk/checkpoint-00000001.manifest", "/disk/checkpoint-00000020.manifest.part");
  disk_put(d, "/disk/of-somebody-else", 1);
  d->room += one + 1;
  f = fabric_open(1, 2, same);
  fabric_model(f, &o, "/disk");
  assert_true(fabric_save(f, 0, 0) > 20);
  assert_int_equal(disk_count(d, "-00000020"), 0);
  assert_int_equal(disk_count(d, ".manifest"), 2);
  assert_int_equal(disk_count(d, "of-somebody-else"), 1);
  fabric_close(f);
  f = fabric_open(1, 2, same);
  fabric_model(f, &o, "/disk");
  fabric_close(f);
  disk_drop(d);
}

/* A checkpoint removes files of its own history only, and only of attempts that are over. */
static void test_histories(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  memory_disk *d = disk_new();
  memory_disk *same[2] = {d, d};
  fabric *f = fabric_open(1, 2, same);
  fabric_model(f, &o, NULL);
  fabric_push(f, 0, 0);
  for (uint64_t i = 1; i <= 3; i++) assert_int_equal(fabric_save(f, 0, 0), i);
  fabric_pull(f, 0);
  float *first = malloc(sizeof f->moved);
  memcpy(first, f->moved, sizeof f->moved);
  fabric_close(f);
  /* Attempts of the first history, which may still be under way, and a name without bytes. */
  disk_link(d, "/disk/checkpoint-00000003-0-of-2.shard", "/disk/checkpoint-00000005-0-of-2.shard");
  disk_link(d, "/disk/checkpoint-00000003-1-of-2.shard",
            "/disk/checkpoint-00000005-1-of-2.shard.part");
  disk_link(d, "/disk/checkpoint-00000003-0-of-2.shard", "/disk/checkpoint-00000020-0-of-2.shard");
  disk_put(d, "/disk/checkpoint-00000021-0-of-2.shard.part", 0);
  int before = disk_count(d, "checkpoint-");
  /* A new model, which nothing connects with it, also when an attempt of its own fails. */
  life = 2;
  f = fabric_open(1, 2, same);
  fabric_model(f, &o, NULL);
  assert_int_equal(fabric_save(f, 0, 0), 22);
  d->room = disk_used(d) + 1;
  fabric_save(f, 0, MLFAB_ERR_IO);
  d->room = 0;
  for (uint64_t i = 24; i <= 26; i++) assert_int_equal(fabric_save(f, 0, 0), i);
  mlfab_sim_run(f->w.sim, WORLD_S);
  /* The empty file is gone. Two checkpoints of three files have come. */
  assert_int_equal(disk_count(d, "checkpoint-"), before - 1 + 6);
  assert_int_equal(disk_count(d, "-00000025"), 3);
  assert_int_equal(disk_count(d, "-00000026"), 3);
  fabric_close(f);
  /* Another process goes on from the first history, and knows its files. The history is known from a checkpoint of it. */
  for (int i = 0; i < DISK_FILES; i++)
    if (strstr(d->now[i].path, "-00000026") || strstr(d->now[i].path, "-00000025"))
      memmove(d->now[i].path + strlen("/disk/"), "away", 4);
  life = 3;
  f = fabric_open(1, 2, same);
  fabric_model(f, &o, "/disk");
  assert_int_equal(number_of(f), 3);
  fabric_pull(f, 0);
  assert_memory_equal(f->moved, first, sizeof f->moved);
  for (int i = 0; i < DISK_FILES; i++)
    if (strncmp(d->now[i].path, "/disk/away", 10) == 0) memcpy(d->now[i].path + 6, "chec", 4);
  life = 0;
  assert_int_equal(fabric_save(f, 0, 0), 27);
  assert_int_equal(disk_count(d, "-00000005"), 0);
  assert_int_equal(disk_count(d, "-00000020"), 0);
  assert_int_equal(disk_count(d, "-00000002"), 0);
  /* A process of the same history that lives on: its attempt is left alone until a larger number is whole. */
  disk_link(d, "/disk/checkpoint-00000003-0-of-2.shard", "/disk/checkpoint-00000030-0-of-2.shard");
  assert_int_equal(fabric_save(f, 0, 0), 31);
  assert_int_equal(disk_count(d, "-00000030"), 1);
  assert_int_equal(fabric_save(f, 0, 0), 32);
  assert_int_equal(disk_count(d, "-00000030"), 0);
  mlfab_sim_run(f->w.sim, WORLD_S);
  /* Two of each history. */
  assert_int_equal(disk_count(d, ".manifest"), 4);
  assert_int_equal(disk_count(d, "checkpoint-"), 12);
  fabric_close(f);
  free(first);
  disk_drop(d);
}

/* A replica that takes over goes on with the history that it has copied, here that of a checkpoint. */
static void test_history_of_a_copy(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  memory_disk *d = disk_new();
  life = 2;
  fabric *f = fabric_open_copies(d);
  fabric_model(f, &o, NULL);
  assert_int_equal(fabric_save(f, 0, 0), 1);
  fabric_close(f);
  life = 0;
  f = fabric_open_copies(d);
  fabric_model(f, &o, "/disk");
  assert_int_equal(number_of(f), 1);
  fabric_push(f, 0, 0);
  mlfab_sim_run(f->w.sim, WORLD_S);
  assert_int_equal(mlfab_sim_crash(f->w.sim, 1), 0);
  for (uint64_t i = 1; i <= 3; i++) assert_int_equal(fabric_save(f, 0, 0), 2 * i);
  mlfab_sim_run(f->w.sim, WORLD_S);
  assert_int_equal(disk_count(d, "-00000001"), 0);
  assert_int_equal(disk_count(d, ".manifest"), 2);
  fabric_close(f);
  disk_drop(d);
}

/* A server that is told a history begins as the newest checkpoint of this one, or not at all. */
static char history_line[256];

static void keep_history(void *user, int level, const char *line) {
  (void)user;
  (void)level;
  if (strstr(line, "(history "))
    snprintf(history_line, sizeof history_line, "%s", strstr(line, "(history "));
}

static void test_one_history(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  memory_disk *d = disk_new();
  memory_disk *same[2] = {d, d};
  uint32_t histories[2];
  mlfab_error error;
  for (int i = 0; i < 2; i++) {
    logs = keep_history;
    life = (uint64_t)i + 1;
    log_level = MLFAB_LOG_INFO;
    fabric *f = fabric_open(1, 2, same);
    logs = NULL;
    log_level = MLFAB_LOG_WARN;
    fabric_model(f, &o, NULL);
    fabric_push(f, 0, 0);
    fabric_save(f, 0, 0);
    assert_int_equal(sscanf(history_line, "(history %u)", &histories[i]), 1);
    fabric_close(f);
  }
  life = 0;
  assert_true(histories[0] != histories[1]);
  for (int i = 0; i < 2; i++) {
    history = histories[i];
    fabric *f = fabric_open(1, 2, same);
    fabric_model(f, &o, "/disk");
    assert_int_equal(number_of(f), i + 1);
    fabric_close(f);
  }
  history = histories[0] ^ histories[1];
  fabric *f = fabric_open(1, 2, same);
  OK(f->w.node[0], mlfab_restore(f->w.node[0], "/disk"));
  EXPECT(f->w.node[0], mlfab_model_start(f->w.node[0], &o, NULL, 0), MLFAB_ERR_CHECKPOINT);
  mlfab_last_error(f->w.node[0], &error);
  assert_non_null(strstr(error.text, "it is of another history"));
  history = 0;
  fabric_close(f);
  disk_drop(d);
}

/* The directory of a call counts, also one of a single character, and also where server 0 has none of its own. */
static void test_directories(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  memory_disk *d = disk_new();
  memory_disk *same[1] = {d};
  mlfab_checkpoint_options how = {.size = sizeof how, .dir = "."};
  mlfab_error error;
  for (int own = 0; own < 2; own++) {
    directory = own ? "/disk" : "";
    life = (uint64_t)own + 2;
    fabric *f = fabric_open(1, 1, same);
    mlfab *node = f->w.node[0];
    fabric_model(f, &o, NULL);
    how.dir = ".";
    EXPECT(node, mlfab_checkpoint(node, &how, NULL), MLFAB_ERR_IO);
    mlfab_last_error(node, &error);
    assert_non_null(strstr(error.text, "server 0 cannot list '.'"));
    EXPECT(node, mlfab_checkpoint(node, NULL, NULL), own ? 0 : MLFAB_ERR_STATE);
    how.dir = "/disk";
    OK(node, mlfab_checkpoint(node, &how, NULL));
    assert_int_equal(disk_count(d, ".manifest"), 1 + 2 * own);
    directory = "/disk";
    life = 0;
    fabric_close(f);
  }
  disk_drop(d);
}

/* A server that has not answered when an attempt fails may still be writing: the files of that attempt stay until it has
 * answered. */
static void test_late_server(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  memory_disk *d = disk_new();
  memory_disk *same[2] = {d, d};
  mlfab_checkpoint_options how = {.size = sizeof how, .timeout_ns = 30 * WORLD_MS};
  fabric *f = fabric_open(2, 2, same);
  mlfab *node = f->w.node[0];
  fabric_model(f, &o, NULL);
  fabric_push(f, 0, 0);
  fabric_save(f, 0, 0);
  assert_int_equal(mlfab_sim_partition(f->w.sim, 2, 3, 1), 0);
  EXPECT(node, mlfab_checkpoint(node, &how, NULL), MLFAB_ERR_TIMEOUT);
  mlfab_sim_run(f->w.sim, 20 * WORLD_MS);
  assert_int_equal(disk_count(d, "-00000002-0-of-2.shard"), 1);
  assert_int_equal(mlfab_sim_partition(f->w.sim, 2, 3, 0), 0);
  mlfab_sim_run(f->w.sim, 5ull * WORLD_S);
  assert_int_equal(disk_count(d, "-00000002"), 0);
  assert_int_equal(disk_count(d, "checkpoint-"), 3);
  assert_true(fabric_save(f, 0, 0) > 2);
  mlfab_sim_run(f->w.sim, WORLD_S);
  /* Two attempts fail, and the server carries out both orders late. */
  assert_int_equal(disk_count(d, "checkpoint-"), 6);
  assert_int_equal(mlfab_sim_partition(f->w.sim, 2, 3, 1), 0);
  for (int i = 0; i < 2; i++) EXPECT(node, mlfab_checkpoint(node, &how, NULL), MLFAB_ERR_TIMEOUT);
  mlfab_sim_run(f->w.sim, 20 * WORLD_MS);
  assert_int_equal(disk_count(d, "-0-of-2.shard"), 4);
  assert_int_equal(mlfab_sim_partition(f->w.sim, 2, 3, 0), 0);
  mlfab_sim_run(f->w.sim, 5ull * WORLD_S);
  assert_int_equal(disk_count(d, "checkpoint-"), 6);
  fabric_save(f, 0, 0);
  mlfab_sim_run(f->w.sim, WORLD_S);
  assert_int_equal(disk_count(d, "checkpoint-"), 6);
  fabric_close(f);
  disk_drop(d);
}

/* With replicas, the other copy of server 0 may still write the manifest of its attempt, with even numbers here: its files
 * stay until they are older than what is kept. */
static void test_other_copy(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  memory_disk *d = disk_new();
  fabric *f = fabric_open_copies(d);
  fabric_model(f, &o, NULL);
  assert_int_equal(fabric_save(f, 0, 0), 1);
  disk_link(d, "/disk/checkpoint-00000001-0-of-1.shard", "/disk/checkpoint-00000004-0-of-1.shard");
  disk_link(d, "/disk/checkpoint-00000001.manifest", "/disk/checkpoint-00000004.manifest.part");
  disk_link(d, "/disk/checkpoint-00000001.manifest", "/disk/checkpoint-00000003-0-of-1.shard.part");
  assert_int_equal(fabric_save(f, 0, 0), 5);
  mlfab_sim_run(f->w.sim, WORLD_S);
  assert_int_equal(disk_count(d, "-00000003"), 0);
  assert_int_equal(disk_count(d, "-00000004"), 2);
  assert_int_equal(fabric_save(f, 0, 0), 7);
  mlfab_sim_run(f->w.sim, WORLD_S);
  assert_int_equal(disk_count(d, "-00000004"), 0);
  assert_int_equal(disk_count(d, ".manifest"), 2);
  fabric_close(f);
  disk_drop(d);
}

/* A checkpoint that fails again and again is one line in the log each minute, and one when it is whole again. The events
 * are for each. */
static int said_failed, said_again;

static void count_line(void *user, int level, const char *line) {
  (void)user;
  said_failed += level == MLFAB_LOG_WARN && strstr(line, "a checkpoint failed") != NULL;
  said_again += level == MLFAB_LOG_WARN && strstr(line, "succeed again after") != NULL;
}

static void test_log(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  memory_disk *d = disk_new();
  memory_disk *disks[1] = {d};
  said_failed = said_again = 0;
  logs = count_line;
  fabric *f = fabric_open(1, 1, disks);
  logs = NULL;
  fabric_model(f, &o, NULL);
  fabric_push(f, 0, 0);
  fabric_save(f, 0, 0);
  assert_int_equal(said_failed + said_again, 0);
  d->room = 1;
  for (int i = 0; i < 5; i++) fabric_save(f, 0, MLFAB_ERR_IO);
  assert_int_equal(said_failed, 1);
  mlfab_sim_run(f->w.sim, 61ull * WORLD_S);
  for (int i = 0; i < 5; i++) fabric_save(f, 0, MLFAB_ERR_IO);
  assert_int_equal(said_failed, 2);
  d->room = 0;
  for (int i = 0; i < 3; i++) fabric_save(f, 0, 0);
  assert_int_equal(said_failed, 2);
  assert_int_equal(said_again, 1);
  fabric_close(f);
  disk_drop(d);
}

/* Server 1 is ordered to write its shard, and leaves, because the run ends: nobody hears of it. If the server dies, a line
 * says so. */
static void test_run_ends(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  for (int dies = 0; dies < 2; dies++) {
    memory_disk *d = disk_new();
    memory_disk *same[2] = {d, d};
    said_failed = 0;
    logs = count_line;
    commits = 1;
    fabric *f = fabric_open(1, 2, same);
    logs = NULL;
    commits = 0;
    fabric_model(f, &o, NULL);
    fabric_push(f, 0, 0);
    while (disk_count(d, "-0-of-2.shard") == 0) assert_int_equal(mlfab_sim_step(f->w.sim), 1);
    assert_int_equal(disk_count(d, "-1-of-2.shard"), 0);
    assert_int_equal((dies ? mlfab_abandon : mlfab_close)(&f->w.node[2]), 0);
    mlfab_sim_run(f->w.sim, 2ull * WORLD_S);
    assert_int_equal(said_failed, dies);
    assert_int_equal(disk_count(d, ".manifest"), 0);
    fabric_close(f);
    disk_drop(d);
  }
}

/* Servers that read different directories do not load different checkpoints
 * unnoticed. */
static void test_disagree(void **state) {
  (void)state;
  const mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  memory_disk *d = disk_new(), *old = disk_new();
  memory_disk *same[2] = {d, d}, *disks[2] = {d, old};
  mlfab_error error;
  fabric *f = fabric_open(1, 2, same);
  fabric_model(f, &o, NULL);
  fabric_push(f, 0, 0);
  fabric_save(f, 0, 0);
  fabric_push(f, 0, 1);
  fabric_save(f, 0, 0);
  fabric_close(f);
  for (int i = 0; i < DISK_FILES; i++) { /* a copy of the first one */
    if (!strstr(d->now[i].path, "-00000001")) continue;
    const disk_inode *from = &d->inodes[d->now[i].inode];
    disk_inode *to = &old->inodes[old->ninodes];
    to->data = malloc(from->bytes);
    memcpy(to->data, from->data, from->bytes);
    to->bytes = from->bytes;
    disk_add(old->now, d->now[i].path)->inode = old->ninodes++;
  }
  f = fabric_open(1, 2, disks);
  mlfab *node = f->w.node[0];
  OK(node, mlfab_restore(node, "/disk"));
  EXPECT(node, mlfab_model_start(node, &o, NULL, 0), MLFAB_ERR_CHECKPOINT);
  mlfab_last_error(node, &error);
  assert_non_null(strstr(error.text, "has loaded checkpoint"));
  fabric_close(f);
  disk_drop(d);
  disk_drop(old);
}

/* Worker 0 asked for a checkpoint and died before it defined the model: its next process has not asked for one. */
static void test_asker_dies(void **state) {
  (void)state;
  memory_disk *disk = disk_new();
  mlfab_model_options o = options_of(MLFAB_SYNC_ASYNC);
  mlfab_checkpoint_info info = {.size = sizeof info};
  fabric *f = fabric_open(1, 1, &disk);
  fabric_model(f, &o, NULL);
  fabric_push(f, 0, 0);
  fabric_save(f, 0, 0);
  fabric_close(f);
  f = fabric_open(1, 1, &disk);
  OK(f->w.node[0], mlfab_restore(f->w.node[0], "/disk"));
  mlfab_sim_run(f->w.sim, WORLD_S);
  assert_int_equal(mlfab_sim_crash(f->w.sim, 0), 0);
  mlfab_sim_run(f->w.sim, 2ull * WORLD_S);
  mlfab_config c = world_config(&f->w, 0);
  sim_open(f->w.sim, 0, &c, &f->w.node[0]);
  world_await(&f->w, 0);
  OK(f->w.node[0], mlfab_tensor_add(f->w.node[0], 1, MLFAB_F32, COUNT));
  fabric_model(f, &o, NULL);
  OK(f->w.node[0], mlfab_restored(f->w.node[0], &info));
  assert_int_equal(info.number, 0);
  fabric_pull(f, 0);
  for (int i = 0; i < COUNT; i++) assert_true(f->moved[i] == (float)i);
  fabric_close(f);
  disk_drop(disk);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_servers),           cmocka_unit_test(test_shapes),
      cmocka_unit_test(test_servers_that_join), cmocka_unit_test(test_scheduled),
      cmocka_unit_test(test_links_break),       cmocka_unit_test(test_failures),
      cmocka_unit_test(test_full_disk),         cmocka_unit_test(test_late_server),
      cmocka_unit_test(test_other_copy),        cmocka_unit_test(test_log),
      cmocka_unit_test(test_run_ends),          cmocka_unit_test(test_directories),
      cmocka_unit_test(test_history_of_a_copy), cmocka_unit_test(test_histories),
      cmocka_unit_test(test_one_history),       cmocka_unit_test(test_disagree),
      cmocka_unit_test(test_asker_dies),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
