/* test_telemetry.c - metrics, trace and log of a node: the text against the counters, the recorder against a literal
 * one, and the files of a context that cannot be written. */
#define _DEFAULT_SOURCE
#include "core/api/telemetry.h"
#include "core/coll/coll_wire.h"
#include "core/reshard/reshard_wire.h"
#include "core/sched/sched_wire.h"
#include "core/telemetry/chrome.h"
#include "core/telemetry/metrics.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "../testing.h"

/* --- metrics --- */

static mlfab__snapshot snapshot_of(const char *job) {
  return (mlfab__snapshot){.unix_ns = UINT64_C(1700000000123456789),
                           .opened_unix_ns = UINT64_C(1700000000000000000),
                           .state = 1,
                           .rank = 3,
                           .server = -1,
                           .role = "worker",
                           .job = job,
                           .host = "here",
                           .pid = 77,
                           .waits_for = MLFAB_NO_RANK};
}

static char text[1 << 17];

static int occurrences(const char *of) {
  int n = 0;
  for (const char *at = text; (at = strstr(at, of)) != NULL; at += strlen(of)) n++;
  return n;
}

/* Gives every member a value of its own: each must be in the text exactly once, as a sample. */
TEST(test_every_counter_has_a_family) {
  mlfab__snapshot s = snapshot_of("run");
  size_t members = sizeof s.stats / sizeof(uint64_t);
  for (size_t i = 0; i < members; i++) {
    uint64_t value = UINT64_C(910000000000) + i;
    memcpy((char *)&s.stats + i * sizeof value, &value, sizeof value);
  }
  size_t bytes = mlfab__metrics_text(&s, MLFAB_METRICS_OPENMETRICS, text, sizeof text);
  assert_true(bytes < sizeof text && strlen(text) == bytes);
  for (size_t i = 0; i < members; i++) {
    char value[32];
    snprintf(value, sizeof value, "} %llu\n", 910000000000ull + i);
    if (occurrences(value) != 1)
      fail_msg("member %zu of mlfab_stats is in %d samples", i, occurrences(value));
  }
  assert_string_equal(text + bytes - 6, "# EOF\n");
}

/* The call that a node waits in. process/telemetry_test.py reads all text strictly. */
TEST(test_a_call_is_told) {
  mlfab__snapshot s = snapshot_of("run");
  s.call = "pull";
  s.waits_ns = 1500000;
  s.waits_for = 2;
  mlfab__metrics_text(&s, MLFAB_METRICS_OPENMETRICS, text, sizeof text);
  assert_non_null(strstr(text, "{fabric=\"run\",role=\"worker\",rank=\"3\""));
  assert_non_null(strstr(text, ",call=\"pull\",for=\"worker\",peer=\"2\"} 0.001500\n"));
}

/* The older format: TYPE and HELP have the samples' name, and every other line of the newer one is there. */
TEST(test_the_older_format) {
  mlfab__snapshot s = snapshot_of("run");
  static char wanted[sizeof text], copy[sizeof text];
  char name[64], rest[200], type[16] = "";
  size_t n = 0, bytes = mlfab__metrics_text(&s, MLFAB_METRICS_OPENMETRICS, text, sizeof text);
  memcpy(copy, text, bytes + 1);
  for (char *line = strtok(copy, "\n"); line; line = strtok(NULL, "\n")) {
    if (!strncmp(line, "# UNIT", 6) || !strcmp(line, "# EOF")) continue;
    char word[8] = "";
    if (sscanf(line, "# %7s %63s %199[^\n]", word, name, rest) == 3) {
      if (!strcmp(word, "TYPE")) snprintf(type, sizeof type, "%.15s", rest);
      n += (size_t)snprintf(wanted + n, sizeof wanted - n, "# %s %s%s %s\n", word, name,
                            strcmp(type, "counter") ? "" : "_total", rest);
    } else {
      n += (size_t)snprintf(wanted + n, sizeof wanted - n, "%s\n", line);
    }
  }
  assert_int_equal(mlfab__metrics_text(&s, MLFAB_METRICS_PROMETHEUS, text, sizeof text), n);
  assert_string_equal(text, wanted);
}

TEST(test_labels_are_escaped_and_a_small_room_is_kept) {
  mlfab__snapshot s = snapshot_of("a\"b\\c\nd\x01");
  size_t bytes = mlfab__metrics_text(&s, MLFAB_METRICS_OPENMETRICS, text, sizeof text);
  assert_non_null(strstr(text, "fabric=\"a\\\"b\\\\c\\nd?\""));
  char small[100];
  memset(small, 'x', sizeof small);
  assert_int_equal(mlfab__metrics_text(&s, MLFAB_METRICS_OPENMETRICS, small, 64), bytes);
  assert_int_equal(strlen(small), 63);
  assert_int_equal(small[64], 'x');
}

/* --- names --- */

TEST(test_names_of_files) {
  static const char *const cases[][2] = {
      {"/a/m.prom", "/a/m.worker-3.prom"},    {"/a.b/m", "/a.b/m.worker-3"},
      {"m.tar.gz", "m.tar.worker-3.gz"},      {"/a/.m", "/a/.m.worker-3"},
      {"/a/{node}.prom", "/a/worker-3.prom"}, {"{node}/m-{node}", "worker-3/m-worker-3"},
      {"/a/{node", "/a/{node.worker-3"}};
  char path[MLFAB__TELEMETRY_PATH];
  for (size_t i = 0; i < MLFAB__COUNT(cases); i++) {
    mlfab__telemetry_path(cases[i][0], "worker-3", path);
    assert_string_equal(path, cases[i][1]);
  }
  char lots[256];
  for (size_t i = 0; i + 6 < sizeof lots; i += 6) snprintf(lots + i, sizeof lots - i, "{node}");
  mlfab__telemetry_path(lots, "a-node-with-a-long-name-1234567", path);
  assert_true(strlen(path) < sizeof path);
}

TEST(test_levels_of_the_log) {
  const char *file;
  assert_int_equal(mlfab__telemetry_log("info", &file), MLFAB_LOG_INFO);
  assert_null(file);
  assert_int_equal(mlfab__telemetry_log("debug:/tmp/a:b", &file), MLFAB_LOG_DEBUG);
  assert_string_equal(file, "/tmp/a:b");
  static const char *const bad[] = {"", "loud", "info:", "in", "infos", ":x", "INFO"};
  for (size_t i = 0; i < MLFAB__COUNT(bad); i++)
    assert_int_equal(mlfab__telemetry_log(bad[i], &file), 0);
}

/* --- transfers: both ends agree --- */

static uint8_t meta[MLFAB_META_MAX];

/* The frame as its sender sees it, and as its receiver does. */
static void both_ends(uint8_t type, uint32_t meta_bytes, uint8_t kind_out, uint8_t kind_in,
                      uint32_t from, uint32_t to, uint8_t what, uint64_t number, int arrow,
                      mlfab__trace_transfer *transfer) {
  mlfab__trace_transfer other;
  mlfab__tap_frame out = {.out = 1,
                          .type = type,
                          .kind = kind_out,
                          .peer = to,
                          .incarnation = 9,
                          .meta_bytes = meta_bytes,
                          .bulk_bytes = 8,
                          .meta = meta};
  mlfab__tap_frame in = out;
  in.out = 0;
  in.kind = kind_in;
  in.peer = from;
  mlfab__trace_classify(&out, from, from, transfer);
  mlfab__trace_classify(&in, to, to, &other);
  assert_int_equal(transfer->what, what);
  assert_int_equal(transfer->number, number);
  assert_int_equal(transfer->arrow, arrow);
  assert_int_equal(other.what, what);
  assert_int_equal(other.arrow, arrow);
  assert_true(other.key == transfer->key);
}

TEST(test_both_ends_of_a_transfer_have_one_key) {
  mlfab__rng rng;
  mlfab__rng_seed(&rng, 5);
  mlfab__map keys = {0};
  mlfab__env env;
  assert_int_equal(mlfab__env_init(&env, NULL), 0);
  for (uint32_t i = 0; i < 3000; i++) {
    mlfab__trace_transfer t;
    uint64_t number = i + 1, offset = mlfab__rng_below(&rng, 2) * 64;
    uint32_t worker = (uint32_t)mlfab__rng_below(&rng, 100);
    uint32_t server = (uint32_t)mlfab__rng_below(&rng, 10);
    uint32_t last = (uint32_t)mlfab__rng_below(&rng, 2), bytes;
    mlfab__chunk chunk = {number, offset, 7};
    bytes = mlfab__encode_chunk(meta, &chunk);
    both_ends(MLFAB__CHUNK, bytes, MLFAB__LINK_SERVER, MLFAB__LINK_WORKER, worker, server,
              MLFAB__TRACE_PUSH, number, offset == 0, &t);
    uint64_t key = t.key;
    mlfab__segment segment = {0, 64};
    uint64_t version = 3;
    mlfab__push push = {.seq = number,
                        .members = 1,
                        .generation = 7,
                        .bytes = 64,
                        .eager = 64,
                        .parts = 1,
                        .segments = 1,
                        .versions = 1};
    bytes = mlfab__encode_push(meta, &push, &segment, &version);
    both_ends(MLFAB__PUSH, bytes, MLFAB__LINK_SERVER, MLFAB__LINK_WORKER, worker, server,
              MLFAB__TRACE_PUSH, number, 1, &t);
    assert_true(t.key == key); /* the announcement and the chunks are one transfer */
    uint32_t unused;
    assert_false(mlfab__map_get(&keys, key, &unused));
    assert_int_equal(mlfab__map_put(&env, &keys, key, 1), 0);
    mlfab__model model = {.request = number, .offset = offset, .flags = last};
    bytes = mlfab__encode_model(meta, &model);
    both_ends(MLFAB__MODEL, bytes, MLFAB__LINK_WORKER, MLFAB__LINK_SERVER, server, worker,
              MLFAB__TRACE_PULL, number, (int)last, &t);
    assert_false(mlfab__map_get(&keys, t.key, &unused));
    assert_int_equal(mlfab__map_put(&env, &keys, t.key, 1), 0);
    mlfab__hop_model hop = {.request = number, .flags = last, .server = server, .attempt = 4};
    bytes = mlfab__encode_hop_model(meta, &hop);
    both_ends(MLFAB__HOP_MODEL, bytes, MLFAB__LINK_PEER_IN, MLFAB__LINK_PEER, worker, worker + 1,
              MLFAB__TRACE_PULL, number, (int)last, &t);
    mlfab__hop_chunk member = {3, number, offset, 128, server};
    bytes = mlfab__encode_hop_chunk(meta, &member);
    both_ends(MLFAB__HOP_CHUNK, bytes, MLFAB__LINK_PEER, MLFAB__LINK_PEER_IN, worker, worker + 1,
              MLFAB__TRACE_GROUP, number, offset == 0, &t);
    mlfab__forward forward = {number, offset, 128};
    bytes = mlfab__encode_forward(meta, &forward);
    both_ends(MLFAB__FORWARD, bytes, MLFAB__LINK_SERVER, MLFAB__LINK_WORKER, worker, server,
              MLFAB__TRACE_SUM, number, offset == 0, &t);
    mlfab__coll coll = {
        .epoch = 2, .channel = 1, .number = number, .tag = 5, .offset = offset, .total = 128};
    bytes = mlfab__encode_coll(meta, &coll);
    both_ends(MLFAB__COLL, bytes, MLFAB__LINK_PEER, MLFAB__LINK_PEER_IN, worker, worker + 1,
              MLFAB__TRACE_COLL, number, offset == 0, &t);
    mlfab__reshard_server_bytes moved = {.attempt = 1, .slice = i, .kind = 1, .offset = offset};
    bytes = mlfab__encode_reshard_server_bytes(meta, &moved);
    both_ends(MLFAB__RESHARD_SERVER, bytes, MLFAB__LINK_RESHARD, MLFAB__LINK_RESHARD_IN, server,
              server + 1, MLFAB__TRACE_SLICE, i, offset == 0, &t);
    mlfab__trace_classify(&(mlfab__tap_frame){.type = MLFAB__PUSH, .meta_bytes = 3, .meta = meta},
                          0, 0, &t); /* a short meta is not read beyond its end */
    assert_int_equal(t.number, 0);
  }
  mlfab__map_free(&env, &keys);
}

/* --- the recorder against a literal one --- */

enum { FRAMES = 4000, PEERS = 5 };

typedef struct frame {
  uint64_t now_ns, number;
  uint32_t peer, bytes;
  int out, first;
} frame;

static frame frames[FRAMES];
static mlfab__trace_record records[4 * FRAMES];

static void show(mlfab__trace *trace, const frame *f) {
  mlfab__chunk chunk = {f->number, f->first ? 0 : 64, 1};
  mlfab__tap_frame shown = {.now_ns = f->now_ns,
                            .out = (uint8_t)f->out,
                            .type = MLFAB__CHUNK,
                            .kind = MLFAB__LINK_SERVER,
                            .peer = f->peer,
                            .bulk_bytes = f->bytes,
                            .meta_bytes = mlfab__encode_chunk(meta, &chunk),
                            .meta = meta};
  trace->tap.frame(trace->tap.self, &shown);
}

/* Does the second frame go on with the first one's run? Both are on one lane, next to each other. */
static int goes_on(const frame *one, const frame *next) {
  return one->number == next->number && next->now_ns <= one->now_ns + MLFAB__TRACE_GAP_NS;
}

static mlfab_node node; /* only what the recorder reads is filled */

static mlfab__trace *recorder(void) {
  mlfab__trace *trace = NULL;
  memset(&node, 0, sizeof node);
  assert_int_equal(mlfab__env_init(&node.env, NULL), 0);
  node.is_worker = 1;
  node.server_number = MLFAB__NO_NODE;
  assert_int_equal(mlfab__trace_open(&node.env, &node, NULL, NULL, &trace), 0);
  assert_ptr_equal(node.tap, &trace->tap);
  return trace;
}

/* The runs of one lane must be those that the frames make when they are read one after another. */
static void check_lane(uint32_t n, uint32_t peer, int out) {
  uint32_t lane = mlfab__trace_lane_of(MLFAB__LINK_SERVER, (uint32_t)out, peer);
  const frame *before = NULL;
  const mlfab__trace_record *run = NULL;
  uint32_t at = 0, named = 0;
  uint64_t bytes = 0, end_ns = 0, arrows = 0, told = 0;
  for (uint32_t i = 0; i < n; i++) {
    const mlfab__trace_record *r = &records[i];
    if (r->lane != lane) continue;
    named += r->kind == MLFAB__TRACE_LANE;
    told += r->kind == (out ? MLFAB__TRACE_FROM : MLFAB__TRACE_TO);
  }
  for (uint32_t i = 0; i < FRAMES; i++) {
    const frame *f = &frames[i];
    if (f->peer != peer || f->out != out) continue;
    arrows += f->first != 0;
    if (!before || !goes_on(before, f)) {
      if (run) assert_int_equal(run->bytes, bytes);
      while (at < n && (records[at].lane != lane || records[at].kind != MLFAB__TRACE_RUN)) at++;
      assert_true(at < n);
      run = &records[at++];
      bytes = 0;
      assert_int_equal(run->number, f->number);
      assert_true(run->at_ns >= end_ns && run->at_ns >= f->now_ns && run->end_ns > run->at_ns);
      assert_true(run->at_ns < f->now_ns + FRAMES); /* no more than 1 ns a frame */
      end_ns = run->end_ns;
    }
    bytes += f->bytes;
    before = f;
  }
  if (run) assert_int_equal(run->bytes, bytes);
  while (at < n && (records[at].lane != lane || records[at].kind != MLFAB__TRACE_RUN)) at++;
  assert_int_equal(at, n);
  assert_int_equal(named, before != NULL);
  assert_int_equal(told, arrows);
}

TEST(test_runs_against_a_literal_reading) {
  mlfab__rng rng;
  for (uint64_t seed = 1; seed <= 40; seed++) {
    mlfab__trace *trace = recorder();
    uint64_t now = 1000, sent = 0, found = 0;
    uint32_t n = 0;
    mlfab__rng_seed(&rng, seed);
    for (uint32_t i = 0; i < FRAMES; i++) {
      static const uint64_t steps[] = {0, 0, 0, 1, 1000, 900000, 2000000};
      now += steps[mlfab__rng_below(&rng, MLFAB__COUNT(steps))];
      frames[i] = (frame){now,
                          1 + mlfab__rng_below(&rng, 3),
                          (uint32_t)mlfab__rng_below(&rng, PEERS),
                          1 + (uint32_t)mlfab__rng_below(&rng, 1000),
                          (int)mlfab__rng_below(&rng, 2),
                          mlfab__rng_below(&rng, 3) == 0};
      show(trace, &frames[i]);
      sent += frames[i].bytes;
      if (mlfab__rng_below(&rng, 500) == 0)
        n += mlfab__trace_take(trace, now, records + n, (uint32_t)mlfab__rng_below(&rng, 100));
    }
    n += mlfab__trace_take(trace, MLFAB__NEVER, records + n, 4 * FRAMES - n);
    assert_int_equal(trace->lost, 0);
    for (uint32_t i = 0; i < n; i++)
      if (records[i].kind == MLFAB__TRACE_RUN) found += records[i].bytes;
    assert_int_equal(found, sent);
    for (uint32_t lane = 0; lane < 2 * PEERS; lane++) check_lane(n, lane / 2, (int)lane % 2);
    mlfab__trace_close(&trace, &node);
    assert_null(node.tap);
  }
  assert_int_equal(node.env.bytes, 0);
}

TEST(test_what_does_not_fit_is_counted) {
  mlfab__trace *trace = recorder();
  enum { MANY = MLFAB__TRACE_RECORDS + 1000 };
  static mlfab__trace_record taken[MLFAB__TRACE_RECORDS];
  for (uint32_t i = 0; i < MANY; i++) /* a run each */
    show(trace, &(frame){.now_ns = i, .number = i + 1, .bytes = 10, .out = 1});
  uint64_t bytes = 0, lost = 0;
  for (uint32_t round = 0; round < 3; round++) {
    uint32_t n = mlfab__trace_take(trace, MLFAB__NEVER, taken, MLFAB__TRACE_RECORDS);
    for (uint32_t i = 0; i < n; i++) {
      if (taken[i].kind == MLFAB__TRACE_RUN) bytes += taken[i].bytes;
      if (taken[i].kind == MLFAB__TRACE_LOST) lost += taken[i].bytes;
    }
  }
  assert_int_equal(bytes + trace->lost_bytes, 10 * (uint64_t)MANY);
  assert_int_equal(lost * 10, trace->lost_bytes);
  assert_true(lost >= 1000);
  mlfab__trace_close(&trace, &node);
}

TEST(test_plans_of_a_lane_do_not_overlap) {
  mlfab__rng rng;
  mlfab__rng_seed(&rng, 8);
  mlfab__trace *trace = recorder();
  uint64_t ends[MLFAB__TRACE_SLOTS] = {0};
  for (uint64_t i = 1; i <= 2000; i++) {
    uint64_t start = i * 100;
    mlfab__tap_plan plan = {.id = i,
                            .serial = i,
                            .start_ns = start,
                            .worker = 2,
                            .bytes = 5,
                            .end_ns = start + mlfab__rng_below(&rng, 250),
                            .aggregator = MLFAB__NO_NODE,
                            .dropped = i % 50 == 0};
    trace->tap.plan(trace->tap.self, &plan);
  }
  uint32_t n = mlfab__trace_take(trace, MLFAB__NEVER, records, 4 * FRAMES), plans = 0, drops = 0;
  for (uint32_t i = 0; i < n; i++) {
    const mlfab__trace_record *r = &records[i];
    uint32_t slot = (r->lane >> 20) % MLFAB__TRACE_SLOTS;
    drops += r->kind == MLFAB__TRACE_DROP;
    if (r->kind != MLFAB__TRACE_PLAN) continue;
    plans++;
    assert_true(r->at_ns >= ends[slot] && r->end_ns > r->at_ns);
    assert_int_equal(r->at_ns, r->number * 100); /* there were slots enough: nothing was moved */
    ends[slot] = r->end_ns;
  }
  assert_int_equal(plans, 1960);
  assert_int_equal(drops, 40);
  mlfab__trace_close(&trace, &node);
}

/* --- events --- */

TEST(test_events_are_whole_lines) {
  char event[MLFAB__CHROME_MAX];
  mlfab__chrome chrome = {.pid = 4, .unix_ns = UINT64_C(1700000000000000000), .clock_ns = 500};
  size_t n = mlfab__chrome_begin(&chrome, "worker-3", "ho\"st\n", 12, event);
  assert_int_equal(n, strlen(event));
  assert_non_null(strstr(event, "worker-3 (ho?st?, pid 12)"));
  for (int kind = MLFAB__TRACE_LANE; kind <= MLFAB__TRACE_LOST; kind++) {
    for (int what = MLFAB__TRACE_OTHER; what <= MLFAB__TRACE_SLICE; what++) {
      mlfab__trace_record r = {.at_ns = UINT64_MAX - 5,
                               .end_ns = UINT64_MAX,
                               .key = UINT64_MAX,
                               .number = UINT64_MAX,
                               .bytes = UINT64_MAX,
                               .more = UINT64_MAX,
                               .lane = mlfab__trace_lane_of(MLFAB__LINK_KINDS, 3, 0xfffff),
                               .who = 1,
                               .kind = (uint8_t)kind,
                               .what = (uint8_t)what};
      n = mlfab__chrome_event(&chrome, &r, event);
      assert_int_equal(n, strlen(event));
      assert_true(n < MLFAB__CHROME_MAX - 1 && event[0] == '{');
      assert_string_equal(event + n - 3, "},\n");
    }
  }
  /* 1500 ns after the moment that both clocks know */
  mlfab__trace_record r = {.at_ns = 2000,
                           .end_ns = 3250,
                           .number = 6 * MLFAB__REQUESTS + 5,
                           .bytes = 7,
                           .more = 1,
                           .kind = MLFAB__TRACE_RUN,
                           .what = MLFAB__TRACE_PULL};
  mlfab__chrome_event(&chrome, &r, event);
  uint64_t ns = (UINT64_C(1700000000000001500)) % (UINT64_C(1) << 51);
  char wanted[96];
  snprintf(wanted, sizeof wanted, "\"pull 6\",\"cat\":\"pull\",\"ts\":%llu.%03llu,\"dur\":1.250,",
           (unsigned long long)(ns / 1000), (unsigned long long)(ns % 1000));
  assert_non_null(strstr(event, wanted));
}

/* --- the files of a context --- */

static char folder[64];
static char said[4096];
static int lines;

static void on_log(void *user, int level, const char *line) {
  (void)user, (void)level;
  lines++;
  snprintf(said, sizeof said, "%s", line);
}

static void nap(long ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&t, NULL);
}

static void read_file(const char *name) {
  char path[128];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "r");
  text[0] = 0;
  if (!file) return;
  text[fread(text, 1, sizeof text - 1, file)] = 0;
  fclose(file);
}

static mlfab_config alone(void) {
  mlfab_config c;
  mlfab_config_init(&c);
  c.metrics_ns = 10000000;
  return c;
}

/* The text has this sample of the node. */
static void told(const char *name, int value) {
  char wanted[160];
  snprintf(wanted, sizeof wanted,
           "%s{fabric=\"mlfab\",role=\"worker+server\",rank=\"0\",server=\"0\"} %d\n", name, value);
  if (!strstr(text, wanted)) fail_msg("there is no %s", wanted);
}

/* A worker that trains alone: pushes and pulls once. */
static void train(mlfab *ctx) {
  float w[4] = {0}, u[4] = {1, 2, 3, 4};
  mlfab_buf weights = {0, 0, w, 4}, update = {0, 0, u, 4};
  assert_int_equal(mlfab_tensor_add(ctx, 0, MLFAB_F32, 4), 0);
  assert_int_equal(mlfab_model_start(ctx, NULL, &weights, 1), 0);
  assert_int_equal(mlfab_push(ctx, &update, 1, NULL, NULL), 0);
  assert_int_equal(mlfab_pull(ctx, &weights, 1, NULL, NULL), 0);
  assert_true(w[3] == 4.0f);
}

/* The file that is there is replaced, not written to: who has it open reads it on, whole. */
TEST(test_metrics_are_replaced) {
  char path[128];
  mlfab_config c = alone();
  mlfab *ctx = NULL;
  snprintf(c.metrics, sizeof c.metrics, "%s/{node}.prom", folder);
  snprintf(path, sizeof path, "%s/worker-0.prom", folder);
  FILE *old = fopen(path, "w+");
  assert_non_null(old);
  fputs("old", old);
  fflush(old);
  assert_int_equal(mlfab_open(&c, &ctx, NULL), 0);
  train(ctx);
  assert_int_equal(mlfab_close(&ctx), 0);
  char kept[8] = "";
  rewind(old);
  assert_int_equal(fread(kept, 1, sizeof kept - 1, old), 3);
  assert_string_equal(kept, "old");
  fclose(old);
  read_file("worker-0.prom");
  told("mlfab_pushes_applied_total", 1);
  told("mlfab_iterations_total", 1);
  told("mlfab_state", 3); /* closed */
}

/* The thread is held up by the context's lock, which it needs for metrics; lines beyond the ring are counted. */
TEST(test_lines_that_do_not_fit_are_counted) {
  mlfab_config c = alone();
  mlfab *ctx = NULL;
  snprintf(c.log, sizeof c.log, "info:%s/log", folder);
  snprintf(c.metrics, sizeof c.metrics, "%s/m.prom", folder);
  assert_int_equal(mlfab_open(&c, &ctx, NULL), 0);
  mlfab__context_enter(ctx);
  nap(200);
  for (int i = 0; i < 300; i++) mlfab__log(&ctx->node->env, MLFAB_LOG_INFO, "line %d.", i);
  mlfab__log(&ctx->node->env, MLFAB_LOG_DEBUG, "too fine");
  (void)mlfab__context_leave(ctx, 0);
  assert_int_equal(mlfab_close(&ctx), 0);
  read_file("log.worker-0");
  int kept = occurrences(" INFO  worker-0: line ");
  const char *dropped = strstr(text, " WARN  worker-0: log: ");
  int count = dropped ? atoi(dropped + strlen(" WARN  worker-0: log: ")) : 0;
  assert_true(kept >= 256 && kept <= 300);
  assert_true(kept + count >= 300 && kept + count < 304); /* closing may say something, too */
  assert_non_null(strstr(text, "line 255.\n"));
  assert_null(strstr(text, "too fine"));
}

/* The caller's hook gets its own levels, the file those that were asked for. */
TEST(test_the_callers_hook_is_kept) {
  mlfab_env env = {.size = sizeof env, .log = on_log, .log_level = MLFAB_LOG_WARN};
  mlfab_config c = alone();
  mlfab *ctx = NULL;
  c.env = &env;
  lines = 0;
  snprintf(c.log, sizeof c.log, "debug:%s/both", folder);
  assert_int_equal(mlfab_open(&c, &ctx, NULL), 0);
  mlfab__context_enter(ctx);
  mlfab__log(&ctx->node->env, MLFAB_LOG_DEBUG, "fine");
  mlfab__log(&ctx->node->env, MLFAB_LOG_WARN, "coarse");
  (void)mlfab__context_leave(ctx, 0);
  assert_int_equal(mlfab_close(&ctx), 0);
  assert_int_equal(lines, 1);
  assert_string_equal(said, "coarse");
  read_file("both.worker-0");
  assert_non_null(strstr(text, " DEBUG worker-0: fine\n"));
  assert_non_null(strstr(text, " WARN  worker-0: coarse\n"));
}

/* mlfab_metrics and mlfab_log: with and without files. */
TEST(test_text_and_lines_by_hand) {
  mlfab_env env = {.size = sizeof env, .log = on_log};
  mlfab_config c = alone();
  mlfab *ctx = NULL;
  size_t bytes = 0;
  assert_int_equal(mlfab_metrics(NULL, 0, NULL, 0, NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_open(&c, &ctx, NULL), 0);
  train(ctx);
  assert_int_equal(mlfab_metrics(ctx, 2, text, sizeof text, &bytes), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_metrics(ctx, 0, NULL, 8, &bytes), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_metrics(ctx, MLFAB_METRICS_PROMETHEUS, NULL, 0, &bytes), 0);
  size_t whole = bytes;
  assert_int_equal(mlfab_metrics(ctx, MLFAB_METRICS_PROMETHEUS, text, sizeof text, &bytes), 0);
  assert_true(bytes <= whole + 64 && whole <= bytes + 64); /* waits and times differ in length */
  assert_int_equal(strlen(text) + 1, bytes);
  assert_non_null(strstr(text, "# TYPE mlfab_commits_total counter\n"));
  told("mlfab_state", 1);
  assert_int_equal(mlfab_log(ctx, MLFAB_LOG_ERROR, "nobody hears it"), 0);
  assert_int_equal(mlfab_close(&ctx), 0);
  c.env = &env;
  lines = 0;
  snprintf(c.log, sizeof c.log, "error:%s/hand", folder);
  assert_int_equal(mlfab_open(&c, &ctx, NULL), 0);
  assert_int_equal(mlfab_log(ctx, MLFAB_LOG_INFO, "fine"), 0);
  assert_int_equal(lines, 0);
  assert_int_equal(mlfab_log(ctx, MLFAB_LOG_WARN, "two\nlines"), 1); /* the hook's level */
  assert_string_equal(said, "two?lines");
  assert_int_equal(mlfab_log(ctx, MLFAB_LOG_ERROR, "coarse"), 1);
  assert_int_equal(lines, 2);
  assert_int_equal(mlfab_log(ctx, 0, "x"), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_log(ctx, 5, "x"), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_log(ctx, 1, NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_close(&ctx), 0);
  read_file("hand.worker-0");
  assert_int_equal(occurrences("\n"), 1);
  assert_non_null(strstr(text, " ERROR worker-0: coarse\n"));
}

TEST(test_mistakes_are_refused) {
  mlfab_config c = alone();
  mlfab *ctx = NULL;
  mlfab_node *made = NULL;
  mlfab_error error;
  snprintf(c.log, sizeof c.log, "loud");
  assert_int_equal(mlfab_open(&c, &ctx, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "log='loud': not error, warn, info or debug"));
  c = alone();
  c.metrics_ns = 9999999;
  assert_int_equal(mlfab_open(&c, &ctx, &error), MLFAB_ERR_CONFIG);
  c = alone();
  snprintf(c.trace, sizeof c.trace, "t.json");
  assert_int_equal(mlfab_node_open(&c, "", 0, &made, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "only mlfab_open writes log, metrics and trace"));
  memset(c.metrics, 'x', sizeof c.metrics);
  assert_int_equal(mlfab_open(&c, &ctx, &error), MLFAB_ERR_CONFIG);
  assert_int_equal(mlfab_config_set(&c, "metrics_ms", "9", &error), MLFAB_ERR_CONFIG);
}

static int begin(void **state) {
  (void)state;
  snprintf(folder, sizeof folder, "/tmp/mlfab-telemetry-XXXXXX");
  return mkdtemp(folder) ? 0 : -1;
}

static int end(void **state) {
  (void)state;
  char command[128];
  snprintf(command, sizeof command, "rm -r '%s'", folder);
  return system(command);
}

TESTS(begin, end)
