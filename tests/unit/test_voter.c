/* test_voter.c - core/replica/voter.c and votes.c: the scheduler's votes on several shards, on a disk whose calls fail, are late, or
 * end with the machine.
 *
 * What is granted is checked when it is told: a file that is durable then has it. A voter that starts again on its file
 * remembers all that it has granted; on none, on one of another fabric, or on a damaged one, it grants nothing before both
 * others have told it what they know. */
#include "../testing.h"

#include "core/api/disk.h"
#include "core/base/rng.h"
#include "core/replica/votes.h"
#include "memory_disk.h"

enum { SHARDS = 3, BEAT = 1000, ACTIONS = 64, EVENTS = 120 };

typedef struct fixture {
  mlfab_node node;
  mlfab__queued_action actions[ACTIONS];
  mlfab__voters voters;
  memory_disk *files;
  mlfab__disk disk;
  mlfab__rng rng;
  uint64_t seed, now, clock[SHARDS][2];
  uint32_t granted[SHARDS]; /* the largest epoch that was told */
  uint64_t grants;
} fixture;

static fixture f;
static uint64_t failures, restarts, late;

static uint64_t below(uint64_t n) { return mlfab__rng_below(&f.rng, n); }

/* What the machine would find after a crash, of this shard: an epoch; 0: none. */
static uint32_t durable_epoch(uint32_t shard) {
  mlfab__file_record record;
  mlfab__votes_head votes;
  mlfab__vote_record has;
  const char *why = NULL;
  for (int i = 0; i < DISK_FILES; i++) {
    const disk_name *name = &f.files->durable[i];
    const disk_inode *inode = &f.files->inodes[name->inode];
    if (!name->path[0] || strcmp(name->path, f.voters.votes->path) != 0) continue;
    if (mlfab__record_open(inode->synced, inode->synced_bytes, &record, &why) <= 0) return 0;
    if (mlfab__decode_votes_head(record.meta, record.meta_bytes, &votes)) return 0;
    mlfab__decode_vote_record(record.bulk + shard * MLFAB__VOTE_RECORD_BYTES, &has);
    return has.epoch;
  }
  return 0;
}

static void on_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  mlfab__vote_frame frame;
  (void)self, (void)peer;
  if (type != MLFAB__VOTE) return;
  assert_int_equal(mlfab__decode_vote_frame(meta, bytes, &frame), 0);
  if (frame.message.kind != MLFAB__VOTE_GRANT) return;
  if (durable_epoch(frame.shard) < frame.message.record.epoch)
    fail_msg("seed %llu: epoch %u of shard %u is granted, the disk has %u",
             (unsigned long long)f.seed, frame.message.record.epoch, frame.shard,
             durable_epoch(frame.shard));
  if (f.granted[frame.shard] < frame.message.record.epoch)
    f.granted[frame.shard] = frame.message.record.epoch;
  f.grants++;
}

/* The disk does what it was asked for. */
static void drive(void) {
  mlfab_io_event event;
  while (f.node.actions_count > 0) {
    uint64_t token = f.actions[f.node.actions_begin % ACTIONS].token;
    f.node.actions_begin = (f.node.actions_begin + 1) % ACTIONS;
    f.node.actions_count--;
    const mlfab_file_op *op = f.node.files->op(&f.node, token);
    assert_int_equal(mlfab__disk_begin(&f.disk, op, token), 0);
    assert_int_equal(mlfab__disk_take(&f.disk, &event), 1);
    failures += event.code != 0;
    f.node.files->event(&f.node, &event);
    mlfab__voters_settle(&f.voters);
  }
}

static void look(uint64_t ns) {
  f.now += ns;
  f.node.now_ns = f.now;
  mlfab__voters_tick(&f.voters);
  mlfab__voters_settle(&f.voters);
}

static void on_log(void *user, int level, const char *line) { (void)user, (void)level, (void)line; }

static void open_voter(int fresh) {
  const mlfab__port port = {.post = on_post};
  const mlfab_env quiet = {.size = sizeof quiet, .log = on_log};
  memset(&f.node, 0, sizeof f.node);
  assert_int_equal(mlfab__env_init(&f.node.env, &quiet), 0);
  f.node.config.servers = SHARDS;
  f.node.config.heartbeat_ns = BEAT;
  snprintf(f.node.config.vote_dir, sizeof f.node.config.vote_dir, "/disk");
  f.node.phase = MLFAB__BOOTSTRAP_READY;
  f.node.voter = 2 * SHARDS;
  f.node.fabric = 7;
  f.node.fresh = fresh;
  f.node.nonce = ++restarts;
  f.node.actions = f.actions;
  f.node.actions_room = ACTIONS;
  assert_int_equal(
      mlfab__voters_init(&f.voters, &f.node, &port, &port, 0, SHARDS, mlfab__votes_disk()), 0);
  mlfab__disk_init(&f.disk, &f.node.env, &f.files->table, NULL, NULL);
}

static void close_voter(void) {
  mlfab__voters_free(&f.voters);
  mlfab__disk_free(&f.disk, 0);
}

static void begin(uint64_t seed) {
  memset(&f, 0, sizeof f);
  f.seed = seed;
  mlfab__rng_seed(&f.rng, seed);
  f.files = calloc(1, sizeof *f.files);
  assert_non_null(f.files);
  disk_init(f.files);
  open_voter(1);
  look(BEAT);
  drive();
}

static void end(void) {
  close_voter();
  disk_free(f.files);
  free(f.files);
}

static mlfab__vote *vote_of(uint32_t shard) { return &f.voters.shards[shard].vote; }

/* A copy of a shard says something. */
static void say(uint32_t shard, uint32_t copy, mlfab__vote_message *message) {
  uint8_t meta[MLFAB_META_MAX];
  message->known = 1;
  message->nonce = 100 + copy;
  message->sent_ns = ++f.clock[shard][copy];
  const mlfab__vote_frame out = {shard, *message};
  const mlfab__frame_in in = {
      .type = MLFAB__VOTE, .meta_bytes = mlfab__encode_vote_frame(meta, &out), .meta = meta};
  assert_int_equal(mlfab__voters_frame(&f.voters, copy * SHARDS + shard, &in), 0);
  mlfab__voters_settle(&f.voters);
}

/* Copy A, which serves, asks for the next record; the first one, with which every fabric begins, is in no file. */
static void ask(uint32_t shard) {
  uint32_t floor = f.voters.shards[shard].vote.floor; /* a DENY has told it */
  uint32_t most = f.granted[shard] > floor ? f.granted[shard] : floor;
  uint32_t epoch = (most > 0 ? most : 1) + 1 + (uint32_t)below(2);
  mlfab__vote_message message = {.kind = MLFAB__VOTE_ASK,
                                 .floor = epoch,
                                 .record = {epoch, MLFAB__VOTER_A, 1u << MLFAB__VOTER_A},
                                 .bond = {1, MLFAB__VOTER_A, 1u << MLFAB__VOTER_A}};
  say(shard, MLFAB__VOTER_A, &message);
}

/* What the others know: all that was granted. */
static void tell(uint32_t shard, uint32_t copy) {
  uint32_t epoch = f.granted[shard] > 0 ? f.granted[shard] : 1;
  mlfab__vote_message message = {.kind = MLFAB__VOTE_BEAT,
                                 .floor = epoch,
                                 .bond = {epoch, MLFAB__VOTER_A, 1u << MLFAB__VOTER_A}};
  say(shard, copy, &message);
}

/* A voter that does not know grants nothing to one, and knows when it has heard both. */
static void learn(uint32_t shard) {
  uint64_t grants = f.grants;
  assert_false(vote_of(shard)->known);
  ask(shard);
  drive();
  tell(shard, MLFAB__VOTER_A);
  ask(shard);
  drive();
  assert_int_equal(f.grants, grants);
  assert_false(vote_of(shard)->known);
  tell(shard, MLFAB__VOTER_B);
  assert_true(vote_of(shard)->known);
}

/* Another process. remembers: its file is whole. */
static void start_again(int remembers) {
  for (int i = 0; i < 4 && f.voters.phase != MLFAB__VOTERS_VOTE; i++) {
    look(BEAT);
    drive();
  }
  assert_int_equal(f.voters.phase, MLFAB__VOTERS_VOTE);
  for (uint32_t s = 0; s < SHARDS; s++) {
    if (remembers && f.granted[s] > 0) assert_true(vote_of(s)->known);
    if (!vote_of(s)->known) learn(s);
    assert_true(vote_of(s)->floor >= f.granted[s]);
  }
}

static void calm(void) {
  f.files->fail_at = 0;
  f.files->stopped = f.files->fired = 0;
}

/* The process or the machine stops. names: as in disk_crash. */
static void crash(int machine, int names) {
  close_voter();
  if (machine) disk_crash(f.files, names);
  calm();
  open_voter(0);
  start_again(1);
}

static void event(void) {
  static const int with[] = {EIO, ENOSPC, -1, 0};
  switch (below(16)) {
    case 0:
      crash((int)below(2), (int)below(2));
      break;
    case 1:
    case 2:
      calm();
      f.files->fail_at = f.files->calls + 1 + below(8);
      f.files->fail_with = with[below(4)];
      break;
    case 3:
      calm();
      break;
    case 4:
    case 5:
    case 6:
      look(BEAT / 2 + below(BEAT));
      break;
    case 7:
    case 8:
    case 9:
      drive();
      break;
    default:
      late += f.voters.votes->filer.busy != 0;
      ask((uint32_t)below(SHARDS));
  }
}

TEST(test_disks) {
  uint64_t n = test_cases(300), grants = 0;
  for (SEEDS(seed, 300)) {
    begin(seed);
    for (int i = 0; i < EVENTS; i++) event();
    calm();
    /* The disk works again: every shard gets its grant. */
    for (uint32_t s = 0; s < SHARDS; s++) {
      uint64_t before = f.grants;
      for (int i = 0; i < 8 && f.grants == before; i++) {
        look(2 * BEAT);
        drive();
        ask(s);
        drive();
      }
      if (f.grants == before) fail_msg("seed %llu: no grant", (unsigned long long)seed);
    }
    grants += f.grants;
    end();
  }
  print_message(
      "%llu seeds: %llu grants, %llu file operations failed, %llu asked while the disk wrote\n",
      (unsigned long long)n, (unsigned long long)grants, (unsigned long long)failures,
      (unsigned long long)late);
  if (testing_whole()) assert_true(grants > n && failures > n && late > n);
}

/* A file of votes exists, and the process has ended. */
static void prepare(uint64_t seed) {
  begin(seed);
  for (uint32_t s = 0; s < SHARDS; s++) {
    ask(s);
    drive();
    assert_true(f.granted[s] > 0);
  }
  close_voter();
}

TEST(test_another_fabric) {
  prepare(1);
  open_voter(0);
  f.node.fabric = 8;
  look(BEAT);
  drive();
  for (uint32_t s = 0; s < SHARDS; s++) assert_false(vote_of(s)->known);
  start_again(0);
  end();
}

/* No byte of the file may be wrong, missing, or too many. */
TEST(test_damage) {
  prepare(2);
  disk_inode *file = disk_file(f.files, "votes-");
  assert_non_null(file);
  size_t bytes = file->bytes;
  for (size_t i = 0; i < 2 * bytes + 1; i++) {
    uint8_t *at = i < bytes ? file->data + i : NULL;
    if (at) *at ^= (uint8_t)(1u << i % 8);
    if (!at) file->bytes = i - bytes;
    if (i == 2 * bytes) file->bytes = bytes + 1; /* there is room for one more */
    open_voter(0);
    look(BEAT);
    drive();
    for (uint32_t s = 0; s < SHARDS; s++) assert_false(vote_of(s)->known);
    close_voter();
    if (at) *at ^= (uint8_t)(1u << i % 8);
    file->bytes = bytes;
  }
  open_voter(0);
  start_again(1);
  end();
}

/* A file that cannot be read is none; and frames of strangers are refused. */
TEST(test_others) {
  uint8_t meta[MLFAB_META_MAX];
  prepare(3);
  open_voter(0);
  f.files->fail_at = f.files->calls + 2; /* the first reading call */
  f.files->fail_with = EIO;
  look(BEAT);
  drive();
  calm();
  for (uint32_t s = 0; s < SHARDS; s++) assert_false(vote_of(s)->known);
  mlfab__vote_frame out = {.shard = SHARDS};
  mlfab__frame_in in = {
      .type = MLFAB__VOTE, .meta_bytes = mlfab__encode_vote_frame(meta, &out), .meta = meta};
  assert_int_equal(mlfab__voters_frame(&f.voters, 0, &in), MLFAB_ERR_FRAME);
  out.shard = 1; /* of a copy of another shard */
  in.meta_bytes = mlfab__encode_vote_frame(meta, &out);
  assert_int_equal(mlfab__voters_frame(&f.voters, 0, &in), MLFAB_ERR_FRAME);
  in.meta_bytes--;
  assert_int_equal(mlfab__voters_frame(&f.voters, 1, &in), MLFAB_ERR_FRAME);
  end();
}

TESTS(NULL, NULL)
