/* test_lead.c - core/checkpoint/lead.c: server 0 leads checkpoints of two servers, in a directory that the test plays.
 *
 * The files have names and the set in their header. The test looks at what stays, in which order files go, who is ordered and
 * answered, and when. */
#include "../testing.h"

#include "core/checkpoint/lead.h"
#include "core/server/server.h"
#include "ports.h"

enum { SERVERS = 2, WORKERS = 3, FILES = 64, ACTIONS = 16, BEAT = 1000 };
enum { OURS = 7, FOREIGN = 8, LEADER = 55, ANOTHER = 56 }; /* histories; processes that lead */
#define TIMEOUT 1000000u

typedef struct file {
  char name[64];
  uint64_t set;
  int empty, unreadable;
} file;

typedef struct fixture {
  mlfab_node node;
  mlfab__queued_action actions[ACTIONS];
  mlfab__filer filer;
  mlfab_config config;
  mlfab__server server;
  mlfab_stats stats;
  mlfab__lead lead;
  file files[FILES];
  int nfiles;
  char removed[4096]; /* the names, in order */
  int write_fails, list_fails, remove_fails;
  uint32_t ordered[SERVERS];
  mlfab__checkpoint_order order; /* the last one */
  mlfab__checkpoint_done answer; /* the last one */
  uint32_t answered, answers;    /* to this worker; so many */
  int events, lines;
  char line[400];   /* the last one of the log */
  uint32_t without; /* a server that does not take part, or 0 */
} fixture;

static fixture f;

static uint64_t set_of(uint32_t history, uint32_t leader) {
  return (uint64_t)history << 32 | leader;
}

static file *add(const char *name, uint32_t history, uint32_t leader) {
  file *at = &f.files[f.nfiles++];
  assert_true(f.nfiles <= FILES);
  *at = (file){.set = set_of(history, leader)};
  snprintf(at->name, sizeof at->name, "%s", name);
  return at;
}

/* The name of a checkpoint's manifest, or of a server's shard. Valid until the next call. */
static const char *manifest_of(unsigned number) {
  static char name[64];
  snprintf(name, sizeof name, "checkpoint-%08u.manifest", number);
  return name;
}

static const char *shard_of(unsigned number, unsigned server) {
  static char name[64];
  snprintf(name, sizeof name, "checkpoint-%08u-%u-of-%u.shard", number, server, SERVERS);
  return name;
}

/* The files of a checkpoint: a manifest, and a shard of each server. */
static void add_whole(unsigned number, uint32_t history, uint32_t leader) {
  for (unsigned s = 0; s < SERVERS; s++) add(shard_of(number, s), history, leader);
  add(manifest_of(number), history, leader);
}

static int has(const char *name) {
  for (int i = 0; i < f.nfiles; i++)
    if (!strcmp(f.files[i].name, name)) return 1;
  return 0;
}

static int has_shard(unsigned number, unsigned server) { return has(shard_of(number, server)); }

/* Is the manifest of this number there, and are both shards? */
static int has_whole(unsigned number) {
  int n = has(manifest_of(number));
  for (unsigned s = 0; s < SERVERS; s++) n += has_shard(number, s);
  assert_true(n == 0 || n == 1 + SERVERS);
  return n > 0;
}

/* --- the parts that the test plays --- */

static void on_down(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)self;
  assert_int_equal(type, MLFAB__CHECKPOINT_DONE);
  assert_int_equal(mlfab__decode_checkpoint_done(meta, bytes, &f.answer), 0);
  f.answered = peer;
  f.answers++;
}

static void on_across(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)self;
  assert_int_equal(type, MLFAB__CHECKPOINT_ORDER);
  assert_int_equal(mlfab__decode_checkpoint_order(meta, bytes, &f.order), 0);
  f.ordered[peer]++;
}

static void on_own(void *self, const mlfab__checkpoint_order *order) {
  (void)self;
  f.ordered[0]++;
  assert_int_equal(order->number, f.lead.order.number);
}

static void on_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                     int code, const char *text) {
  (void)self, (void)code, (void)text;
  assert_true(rank == 0 && is_server == 1 && incarnation == 0);
  f.events += kind == MLFAB_EVENT_CHECKPOINT;
}

static int on_asks(void *self, uint32_t server) {
  (void)self;
  return f.without == 0 || server != f.without;
}

static void on_log(void *user, int level, const char *line) {
  (void)user;
  if (level > MLFAB_LOG_WARN) return;
  f.lines++;
  snprintf(f.line, sizeof f.line, "%s", line);
}

static void on_done(void *self, const mlfab_io_event *event) { mlfab__lead_event(self, event); }

/* No error if it is gone. */
static void remove_file(const char *path) {
  const char *name = strrchr(path, '/') + 1;
  strcat(f.removed, name);
  strcat(f.removed, "\n");
  for (int i = 0; i < f.nfiles; i++) {
    if (strcmp(f.files[i].name, name) != 0) continue;
    f.files[i] = f.files[--f.nfiles];
    return;
  }
}

/* Carries out one operation. */
static void operate(void) {
  static char list[8192];
  static uint8_t head[MLFAB__RECORD_BYTES];
  const mlfab_file_op *op = &f.filer.op;
  mlfab_io_event event = {.kind = MLFAB_IO_FILE};
  f.filer.busy = 0;
  f.node.actions_count = 0;
  if (op->kind == MLFAB_FILE_LIST) {
    assert_string_equal(op->path, f.lead.order.dir);
    list[0] = 0;
    for (int i = 0; i < f.nfiles; i++) {
      strcat(list, f.files[i].name);
      strcat(list, "\n");
    }
    event.bulk = list;
    event.bulk_bytes = (uint32_t)strlen(list);
    if (f.list_fails) event.code = MLFAB_ERR_IO;
  } else if (op->kind == MLFAB_FILE_READ) {
    const file *at = NULL;
    for (int i = 0; i < f.nfiles; i++)
      if (!strcmp(f.files[i].name, strrchr(op->path, '/') + 1)) at = &f.files[i];
    assert_non_null(at);
    mlfab__file_record record = {.type = MLFAB__RECORD_HEAD, .set = at->set};
    mlfab__record_seal(head, &record);
    event.bulk = head;
    event.bulk_bytes = at->empty ? 0 : sizeof head;
    if (at->unreadable) event.code = MLFAB_ERR_IO;
  } else if (op->kind == MLFAB_FILE_REMOVE) {
    if (f.remove_fails)
      event.code = MLFAB_ERR_IO;
    else
      remove_file(op->path);
  } else if (op->kind == MLFAB_FILE_WRITE) {
    if (f.write_fails)
      event.code = MLFAB_ERR_IO;
    else
      add(strrchr(op->path, '/') + 1, OURS, LEADER);
  }
  if (event.code) event.bulk_bytes = 0;
  mlfab__lead_event(&f.lead, &event);
}

static void run(void) {
  for (int i = 0; f.filer.busy; i++) {
    assert_true(i < 1000);
    operate();
  }
}

static void begin(void) {
  static const mlfab__env none;
  mlfab_env hooks = {.size = sizeof hooks, .log = on_log, .log_level = MLFAB_LOG_DEBUG};
  memset(&f, 0, sizeof f);
  f.node.env = none;
  assert_int_equal(mlfab__env_init(&f.node.env, &hooks), 0);
  f.node.actions = f.actions;
  f.node.actions_room = ACTIONS;
  f.node.now_ns = 5;
  mlfab__files_open(&f.filer, &f.node, &f.lead, on_done);
  mlfab_config_init(&f.config);
  f.config.heartbeat_ns = BEAT;
  f.config.timeout_ns = TIMEOUT;
  f.server.phase = MLFAB__MODEL_STANDS;
  f.server.save.history = OURS;
  f.server.stats = &f.stats;
  f.lead.env = &f.node.env;
  f.lead.config = &f.config;
  f.lead.server = &f.server;
  f.lead.filer = &f.filer;
  f.lead.down = (mlfab__port){.post = on_down, .ready = no_ready, .event = on_event};
  f.lead.across = (mlfab__port){.post = on_across, .ready = no_ready};
  f.lead.own = on_own;
  f.lead.asks = on_asks;
  f.lead.leader = LEADER;
  f.lead.workers = WORKERS;
  f.lead.servers = SERVERS;
  f.lead.asker = MLFAB__NO_NODE;
}

static void init(void) { assert_int_equal(mlfab__lead_init(&f.lead), 0); }

static void start(void) {
  begin();
  init();
}

static void end(void) {
  mlfab__lead_free(&f.lead);
  assert_int_equal(f.node.env.bytes, 0);
}

static void answer_is(int code, const char *words) {
  assert_int_equal(f.answer.code, code);
  if (!strstr(f.answer.text, words)) fail_msg("'%s' has no '%s'", f.answer.text, words);
}

static void ask_in(const char *dir, uint32_t worker, uint64_t number, uint32_t keep) {
  mlfab__checkpoint_ask a = {.ask = number, .keep = keep};
  snprintf(a.dir, sizeof a.dir, "%s", dir);
  uint8_t meta[MLFAB__META_PLAIN];
  mlfab__frame_in frame = {.type = MLFAB__CHECKPOINT_ASK, .meta = meta};
  frame.meta_bytes = mlfab__encode_checkpoint_ask(meta, &a);
  mlfab__lead_asked(&f.lead, worker, &frame, f.node.now_ns);
}

static void ask(uint32_t worker, uint64_t number, uint32_t keep) {
  ask_in("/d", worker, number, keep);
}

/* The last answer went to this worker. */
static void answered(uint32_t worker, int code) {
  assert_int_equal(f.answered, worker);
  assert_int_equal(f.answer.code, code);
}

/* The last answer tells that both servers have made the checkpoint with this number. */
static void made(uint64_t number) {
  assert_int_equal(f.answer.code, 0);
  assert_int_equal(f.answer.number, number);
  assert_int_equal(f.answer.version, 21);
  assert_int_equal(f.answer.bytes, 201);
  assert_int_equal(f.answer.servers, SERVERS);
}

/* A server has written its shard of this attempt, or has not. */
static void write_shard(uint32_t server, uint64_t number, int code) {
  mlfab__checkpoint_shard s = {.number = number,
                               .set = f.lead.order.set,
                               .bytes = 100 + server,
                               .version = 20 + server,
                               .server = server,
                               .epoch = 3,
                               .code = code};
  if (!code) add(shard_of((unsigned)number, server), OURS, LEADER);
  if (code) snprintf(s.text, sizeof s.text, "has no room");
  mlfab__lead_answered(&f.lead, &s);
}

static void shard(uint32_t server, int code) { write_shard(server, f.lead.order.number, code); }

/* All operations on files are carried out, up to the orders to the servers or an error. */
static void ask_and_run(uint32_t worker, uint64_t number, uint32_t keep) {
  ask(worker, number, keep);
  run();
}

/* Both servers write their shards, and the manifest follows. */
static void write_all(void) {
  shard(1, 0);
  shard(0, 0);
  run();
}

/* A whole checkpoint, of the next request of worker 1. */
static void make(uint32_t keep) {
  static uint64_t asks;
  ask_and_run(1, ++asks, keep);
  assert_int_equal(f.lead.phase, MLFAB__LEAD_AWAITS);
  write_all();
  assert_int_equal(f.lead.phase, MLFAB__LEAD_IDLE);
  assert_int_equal(f.answer.code, 0);
}

static int set_up(void **state) {
  (void)state;
  start();
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  end();
  return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

/* --- what stays --- */

/* The newest `keep` stay. Older ones go, their manifests first. */
TEST(test_keeps) {
  for (uint32_t keep = 0; keep <= 4; keep++) {
    for (uint32_t configured = 0; configured <= 1; configured++) {
      begin();
      f.config.checkpoint_keep = configured;
      init();
      for (unsigned n = 1; n <= 5; n++) add_whole(n, OURS, ANOTHER);
      make(keep);
      uint32_t kept = keep ? keep : configured ? 1 : 2;
      made(6);
      for (unsigned n = 1; n <= 6; n++) assert_int_equal(has_whole(n), n + kept > 6);
      const char *last = strstr(f.removed, ".manifest"), *shards = strstr(f.removed, ".shard");
      for (const char *at = last; at; at = strstr(at + 1, ".manifest")) last = at;
      assert_true(!last || last < shards);
      end();
    }
  }
}

/* A checkpoint of another history stays, and is none of those that are kept. So does one with a manifest that nobody can read. */
CASE(test_foreign) {
  add_whole(2, OURS, ANOTHER);
  add_whole(3, OURS, ANOTHER);
  add_whole(4, FOREIGN, ANOTHER);
  add_whole(5, OURS, ANOTHER);
  for (int i = 0; i < f.nfiles; i++)
    if (!strcmp(f.files[i].name, "checkpoint-00000005.manifest")) f.files[i].unreadable = 1;
  add(shard_of(1, 0), FOREIGN, ANOTHER);
  add(shard_of(1, 1), OURS, ANOTHER); /* its attempt is over */
  add("another.file", FOREIGN, ANOTHER);
  make(2);
  assert_int_equal(f.answer.number, 6);
  assert_int_equal(has_whole(2), 0);
  for (unsigned n = 3; n <= 6; n++) assert_true(has_whole(n));
  assert_true(has_shard(1, 0) && !has_shard(1, 1) && has("another.file"));
}

/* Files without a manifest: of attempts that are over they go before the next begins. Of one that another process may still make
 * they stay. */
CASE(test_orphans) {
  add_whole(4, OURS, ANOTHER);
  add(shard_of(3, 0), OURS, ANOTHER);
  add(shard_of(5, 0), OURS, ANOTHER); /* it was there at the first look */
  add("checkpoint-00000006-0-of-2.shard.part", OURS, ANOTHER);
  add("checkpoint-00000007-0-of-2.shard.part", OURS, ANOTHER)->empty = 1;
  add(shard_of(2, 1), OURS, ANOTHER)->empty = 1;
  add("checkpoint-00000002-0-of-2.shard.part", OURS, ANOTHER)->unreadable = 1;
  ask_and_run(1, 1000, 3);
  assert_int_equal(f.lead.phase, MLFAB__LEAD_AWAITS);
  assert_int_equal(f.lead.order.number, 8);
  assert_false(has_shard(3, 0) || has_shard(5, 0) || has_shard(2, 1));
  assert_false(has("checkpoint-00000006-0-of-2.shard.part") ||
               has("checkpoint-00000002-0-of-2.shard.part"));
  /* Empty, and newer than all manifests: somebody may have just begun. */
  assert_true(has("checkpoint-00000007-0-of-2.shard.part"));
  write_all();
  assert_false(has("checkpoint-00000007-0-of-2.shard.part"));
  assert_true(has_whole(4) && has_whole(8));

  /* Another process begins one beside us. */
  add(shard_of(20, 0), OURS, ANOTHER);
  add(shard_of(21, 0), OURS, LEADER);
  add(shard_of(7, 0), OURS, ANOTHER);
  ask_and_run(1, 1001, 3);
  assert_int_equal(f.lead.order.number, 22);
  assert_true(has_shard(20, 0) && !has_shard(21, 0) && !has_shard(7, 0));
  write_all();
  assert_int_equal(f.answer.code, 0);
  assert_true(has_whole(22));
}

/* --- failures --- */

/* A server that has not answered may still write: the files of that attempt and of later ones stay until it answers. */
TEST(test_owes) {
  for (int dies = 0; dies < 2; dies++) {
    start();
    add_whole(1, OURS, ANOTHER);
    ask_and_run(1, 1, 0);
    shard(0, 0);
    add("checkpoint-00000002-1-of-2.shard.part", OURS, LEADER);
    f.node.now_ns += TIMEOUT;
    mlfab__lead_tick(&f.lead, f.node.now_ns - 1);
    assert_int_equal(f.answers, 0);
    mlfab__lead_tick(&f.lead, f.node.now_ns);
    answer_is(MLFAB_ERR_TIMEOUT, "server 1 has not written its shard in time");
    assert_int_equal(f.answer.rank, 1);
    run();
    assert_true(has_shard(2, 0));
    /* The next attempt has another number, and fails as well. */
    ask_and_run(1, 2, 0);
    assert_int_equal(f.lead.order.number, 3);
    shard(0, MLFAB_ERR_IO);
    run();
    answer_is(MLFAB_ERR_IO, "server 0 has no room");
    assert_true(has_shard(2, 0));
    assert_int_equal(f.lead.phase, MLFAB__LEAD_IDLE);
    add("checkpoint-00000003-1-of-2.shard.part", OURS, LEADER);
    if (dies) {
      mlfab__lead_gone(&f.lead, 1, 0);
      run();
      ask(1, 3, 0);
    } else {
      write_shard(1, 2, MLFAB_ERR_IO);
    }
    run();
    assert_true(has_whole(1) && !has_shard(2, 0));
    assert_false(has("checkpoint-00000002-1-of-2.shard.part") ||
                 has("checkpoint-00000003-1-of-2.shard.part"));
    end();
  }
}

/* An answer that comes late begins a look at the directory only after a failure, and only while nothing else is done. */
CASE(test_late_answers) {
  make(0);
  uint64_t asked = f.filer.asked;
  write_shard(1, f.lead.order.number, 0);
  f.nfiles--;
  assert_int_equal(f.filer.asked, asked);
  ask_and_run(2, 1, 0);
  shard(1, MLFAB_ERR_IO);
  run();
  asked = f.filer.asked;
  write_shard(0, f.lead.order.number, MLFAB_ERR_IO);
  assert_int_equal(f.filer.asked, asked + 1);
  write_shard(0, f.lead.order.number, MLFAB_ERR_IO); /* again, while the list is awaited */
  assert_int_equal(f.filer.asked, asked + 1);
  run();
  assert_int_equal(f.lead.phase, MLFAB__LEAD_IDLE);
  /* The next attempt awaits its own shards. */
  ask_and_run(2, 2, 0);
  asked = f.filer.asked;
  write_shard(1, f.lead.order.number - 1, MLFAB_ERR_IO);
  assert_int_equal(f.lead.phase, MLFAB__LEAD_AWAITS);
  assert_int_equal(f.filer.asked, asked);
  /* Only with a replica a server may still write for another lead. */
  shard(1, MLFAB_ERR_AGAIN);
  assert_int_equal(f.answer.code, MLFAB_ERR_AGAIN);
  run();
}

/* Nobody writes for this lead in another directory. */
CASE(test_another_directory) {
  ask_and_run(1, 1, 0);
  shard(0, MLFAB_ERR_IO); /* server 1 owes its answer */
  run();
  add(shard_of(5, 1), OURS, LEADER);
  ask_and_run(1, 2, 0);
  assert_true(has_shard(5, 1));
  shard(0, MLFAB_ERR_IO);
  run();
  ask_in("/e", 1, 3, 0);
  run();
  assert_false(has_shard(5, 1));
}

CASE(test_a_server_dies) {
  ask_and_run(1, 1, 0);
  shard(0, 0);
  mlfab__lead_gone(&f.lead, 1, 0);
  answer_is(MLFAB_ERR_PEER_DEAD, "server 1 is dead");
  assert_int_equal(f.answer.rank, 1);
  run();
  assert_int_equal(f.nfiles, 0); /* it cannot write any more */
  ask(1, 1, 0);                  /* the answer was lost */
  assert_int_equal(f.answers, 2);
  answer_is(MLFAB_ERR_PEER_DEAD, "server 1 is dead");
  assert_int_equal(f.events, 1);
}

CASE(test_slices_that_move) {
  ask_and_run(1, 1, 0);
  mlfab__checkpoint_shard s = {
      .number = f.lead.order.number, .set = f.lead.order.set, .server = 1, .epoch = 1};
  mlfab__lead_answered(&f.lead, &s);
  assert_int_equal(f.answers, 0);
  s.server = 0;
  s.epoch = 2;
  mlfab__lead_answered(&f.lead, &s);
  answer_is(MLFAB_ERR_AGAIN, "slices have moved meanwhile");
  run();
}

/* Errors of the disk: of the list, and of the manifest, whose files go. One line for each kind and minute. */
CASE(test_disk) {
  uint64_t number = 0;
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < 3; i++) {
      f.list_fails = 1;
      ask_and_run(1, ++number, 0);
      answer_is(MLFAB_ERR_IO, "cannot list '/d'");
      f.list_fails = 0;
    }
    assert_int_equal(f.lines, round + 1);
    assert_int_equal(strstr(f.line, "before it failed, too") != NULL, round > 0);
    f.node.now_ns += 60000000000u - 1;
    f.list_fails = 1;
    ask_and_run(1, ++number, 0);
    f.list_fails = 0;
    assert_int_equal(f.lines, round + 1);
    f.node.now_ns++;
  }
  f.write_fails = 1;
  ask_and_run(1, ++number, 0);
  write_all();
  answer_is(MLFAB_ERR_IO, "cannot write '/d/checkpoint-00000001.manifest'");
  assert_int_equal(f.nfiles, 0);
  assert_int_equal(f.lines, 3); /* a minute has passed */
  assert_non_null(strstr(f.line, "(8 before it failed, too)"));
  f.write_fails = 0;
  ask_and_run(1, ++number, 0);
  assert_int_equal(f.lead.order.number, 2); /* the number is not used again */
  write_all();
  assert_int_equal(f.lines, 4);
  assert_non_null(strstr(f.line, "checkpoints succeed again after 9 failures"));
  /* A file that cannot be removed: one line for all. */
  f.remove_fails = 1;
  add_whole(1, OURS, ANOTHER);
  ask_and_run(1, ++number, 1);
  write_all();
  assert_int_equal(f.answer.code, 0);
  assert_int_equal(f.lines, 5);
  assert_non_null(strstr(f.line, "cannot be removed"));
}

/* --- requests --- */

CASE(test_requests) {
  f.server.phase = MLFAB__MODEL_STANDS - 1;
  ask(1, 1, 0);
  assert_int_equal(f.answer.code, MLFAB_ERR_STATE);
  f.server.phase = MLFAB__MODEL_STANDS;
  for (unsigned n = 1; n <= 3; n++) add_whole(n, OURS, ANOTHER);
  ask_and_run(1, 2, 0);
  uint32_t answers = f.answers;
  ask(1, 2, 0); /* again, on a new link */
  assert_int_equal(f.answers, answers);
  ask(2, 1, 0);
  answered(2, MLFAB_ERR_AGAIN);
  /* An order that was lost with its link is repeated to those who have not answered. */
  uint32_t ordered = f.ordered[1];
  mlfab__lead_up(&f.lead, 1);
  assert_int_equal(f.ordered[1], ordered + 1);
  assert_int_equal(f.order.index, 1);
  assert_int_equal(f.order.shards, SERVERS);
  assert_true(mlfab__lead_wants(&f.lead, 1));
  shard(1, 0);
  assert_false(mlfab__lead_wants(&f.lead, 1));
  mlfab__lead_up(&f.lead, 1);
  assert_int_equal(f.ordered[1], ordered + 1);
  shard(0, 0);
  for (answers = f.answers; f.answers == answers;) operate();
  /* Files are being removed: worker 2 waits, worker 0 does not. */
  answered(1, 0);
  assert_int_equal(f.lead.phase, MLFAB__LEAD_SWEEPS);
  assert_true(f.filer.busy);
  ask(2, 2, 0);
  assert_int_equal(f.lead.waits, 1);
  ask(2, 2, 0);
  assert_int_equal(f.answered, 1);
  ask(0, 1, 0);
  answered(0, MLFAB_ERR_AGAIN);
  /* The answer is kept. */
  ask(1, 2, 0);
  answered(1, 0);
  made(4);
  run();
  assert_int_equal(f.lead.phase, MLFAB__LEAD_AWAITS);
  assert_int_equal(f.lead.asker, 2);
  /* Who asked is replaced: nobody is answered. */
  mlfab__lead_fresh(&f.lead, 2);
  answers = f.answers;
  write_all();
  assert_int_equal(f.answers, answers);
  assert_int_equal(f.events, 2);
  /* The last answer of worker 1 still is. */
  ask(1, 2, 0);
  answered(1, 0);
  made(4);
}

/* The directory answers too late: with its list, or about a file of a dead attempt. */
TEST(test_directory_too_slow) {
  static const char *const whys[] = {"server 0 has not listed the directory in time",
                                     "server 0 has not removed the files of failed checkpoints in "
                                     "time"};
  for (int clears = 0; clears < 2; clears++) {
    start();
    add(shard_of(1, 0), OURS, LEADER + 1);
    ask(1, 1, 2);
    if (clears) operate();
    assert_int_equal(f.lead.phase, clears ? MLFAB__LEAD_CLEARS : MLFAB__LEAD_LISTS);
    assert_true(f.filer.busy);
    assert_int_equal(mlfab__lead_deadline(&f.lead), f.node.now_ns + TIMEOUT);
    mlfab__lead_tick(&f.lead, f.node.now_ns + TIMEOUT - 1);
    assert_int_equal(f.answers, 0);
    mlfab__lead_tick(&f.lead, f.node.now_ns + TIMEOUT);
    assert_int_equal(f.answers, 1);
    answer_is(MLFAB_ERR_TIMEOUT, whys[clears]);
    run();
    end();
  }
}

static void start_by_itself(void) {
  begin();
  f.config.checkpoint_commits = 10;
  snprintf(f.config.checkpoint_dir, sizeof f.config.checkpoint_dir, "/own");
  init();
}

/* So many commits have passed. */
static void commits(uint64_t n) {
  f.stats.commits = n;
  mlfab__lead_by_itself(&f.lead, f.node.now_ns);
}

/* By itself: each time so many commits have passed, unless one is under way. */
TEST(test_by_itself) {
  start_by_itself();
  commits(9);
  assert_int_equal(f.lead.phase, MLFAB__LEAD_IDLE);
  commits(12);
  assert_string_equal(f.lead.order.dir, "/own");
  run();
  assert_int_equal(f.lead.phase, MLFAB__LEAD_AWAITS);
  assert_int_equal(mlfab__lead_deadline(&f.lead), f.node.now_ns + TIMEOUT);
  commits(22); /* left out */
  write_all();
  commits(31);
  assert_int_equal(f.lead.phase, MLFAB__LEAD_IDLE);
  commits(32);
  assert_int_equal(f.lead.phase, MLFAB__LEAD_LISTS);
  assert_int_equal(f.answers, 0);
  run();
  assert_int_equal(f.lead.order.number, 2);
  end();
}

/* A server leaves. An attempt by itself ends with an event, and without a warning. A worker that asked has an answer. */
TEST(test_a_server_leaves) {
  for (int asked = 0; asked < 2; asked++) {
    start_by_itself();
    if (asked)
      ask(1, 1, 0);
    else
      commits(10);
    run();
    assert_int_equal(f.lead.phase, MLFAB__LEAD_AWAITS);
    mlfab__lead_gone(&f.lead, 1, 1);
    assert_int_equal(f.answers, asked);
    assert_int_equal(f.events, 1);
    assert_int_equal(f.lines, asked);
    assert_int_equal(f.lead.failures, 1);
    if (asked) answer_is(MLFAB_ERR_PEER_DEAD, "server 1 has left");
    shard(0, 0);
    run();
    assert_int_equal(f.lead.phase, MLFAB__LEAD_IDLE);
    assert_int_equal(f.nfiles, 0);
    end();
  }
}

/* Only servers with slices take part. */
CASE(test_without_a_server) {
  f.without = 1;
  ask_and_run(1, 1, 0);
  assert_int_equal(f.ordered[1], 0);
  assert_int_equal(f.lead.order.shards, 1);
  assert_false(mlfab__lead_wants(&f.lead, 1));
  shard(0, 0);
  run();
  assert_int_equal(f.answer.code, 0);
  assert_int_equal(f.answer.servers, 1);
}

/* --- with a replica --- */

/* Each copy has numbers of its own, and leaves the other's files alone. A server that still writes for the former copy is
 * ordered again a beat later. */
TEST(test_copies) {
  for (int replica = 0; replica < 2; replica++) {
    for (unsigned there = 4; there <= 5; there++) {
      begin();
      f.config.replicas = 1;
      f.config.roles = replica ? MLFAB_ROLE_REPLICA : MLFAB_ROLE_SERVER;
      init();
      add_whole(there, OURS, ANOTHER);
      add(shard_of(2, 0), OURS, ANOTHER);
      add(shard_of(3, 0), OURS, ANOTHER);
      ask_and_run(1, 1, 4);
      assert_int_equal(f.lead.order.number, there + 1 + (there % 2 == (replica ? 0 : 1)));
      assert_int_equal(has_shard(2, 0), !replica);
      assert_int_equal(has_shard(3, 0), replica);
      uint32_t ordered = f.ordered[1];
      shard(1, MLFAB_ERR_AGAIN);
      assert_int_equal(f.answers, 0);
      assert_int_equal(mlfab__lead_deadline(&f.lead), f.node.now_ns + BEAT);
      f.node.now_ns += BEAT;
      mlfab__lead_tick(&f.lead, f.node.now_ns - 1);
      assert_int_equal(f.ordered[1], ordered);
      mlfab__lead_tick(&f.lead, f.node.now_ns);
      assert_int_equal(f.ordered[1], ordered + 1);
      assert_int_equal(f.ordered[0], 1);
      assert_int_equal(mlfab__lead_deadline(&f.lead), 5 + TIMEOUT);
      write_all();
      assert_int_equal(f.answer.code, 0);
      assert_true(has_whole(there));
      end();
    }
  }
}

TESTS(NULL, NULL)
