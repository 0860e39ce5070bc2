/* test_view.c - a worker's views. The test plays the servers: it sends valid frames, invalid frames, and valid frames at the
 * wrong time.
 *
 * Whatever comes, all memory that was held is given up exactly once, and a view that the caller gets has all of its elements,
 * once, with the bytes that the servers meant. */
#define SCENE_ENDS end()
#include "tests/seam/talk.h"

#include "core/api/parts.h"
#include "core/base/rng.h"
#include "core/base/shm_memory.h"
#include "core/lend/lend_wire.h"
#include "core/lend/view.h"
#include "core/model/layout.h"
#include "core/node/node.h"
#include "core/worker/worker.h"

enum {
  SERVERS = 2,
  WIDE = 2001, /* elements of tensor 0, of 8 bytes; a slice has its end and the begin of tensor 1 */
  NARROW = 3003,
  LAST = 501, /* of tensor 2 */
  BYTES = 8 * WIDE + 4 * NARROW + 4 * LAST,
  SLICES = 4,
  FILES = 3,
  EDGE = 64, /* bytes of a file before and behind the model's */
  RUNS = 4096
};
#define TIMEOUT_NS 10000000000u

/* --- memory of other processes --- */

static _Alignas(64) uint8_t files[FILES][EDGE + BYTES + EDGE];
static uint8_t model[BYTES];
static int held[FILES];

static uint64_t number(uint32_t file) { return 100 + file; }

static int memory_hold(mlfab__shm_memory *memory, const void *at, uint64_t bytes, uint64_t file,
                       const uint8_t **from_p, uint64_t *bytes_p) {
  (void)memory;
  for (uint32_t i = 0; i < FILES; i++) {
    uint64_t in = (uint64_t)((uintptr_t)at - (uintptr_t)files[i]);
    if (in >= sizeof files[i] || bytes > sizeof files[i] - in || file != number(i)) continue;
    *from_p = files[i];
    *bytes_p = sizeof files[i];
    held[i]++;
    return 1;
  }
  return 0;
}

static void memory_drop(mlfab__shm_memory *memory, const void *from) {
  (void)memory;
  for (uint32_t i = 0; i < FILES; i++) {
    if (from != files[i]) continue;
    assert_true(held[i]-- > 0);
    return;
  }
  fail_msg("dropped what was not held");
}

static const mlfab__shm_memory_table table = {.hold = memory_hold, .drop = memory_drop};

static int holds(void) {
  int n = 0;
  for (uint32_t i = 0; i < FILES; i++) n += held[i];
  return n;
}

/* --- the worker --- */

static mlfab__layout layout;
static mlfab__env memory; /* of the layout */
static const uint64_t counts[] = {WIDE, NARROW, LAST};

/* Frames to each server: how many of a sort, and the last PULL. */
static struct heard {
  uint32_t pulls, cancels;
  mlfab__pull pull;
  mlfab__segment segments[SLICES * 3];
} servers[SERVERS];

static mlfab_view out;
static uint64_t misnumber; /* is added to the number of a file that is told */
static mlfab__view_run runs[RUNS];
static uint32_t nruns;

static void listen(void) {
  for (uint32_t s = 0; s < SERVERS; s++) {
    struct heard *x = &servers[s];
    for (const talk_frame *f; (f = talk_peer_of(SERVER(s))->first);) {
      if (f->header.type == MLFAB__PULL) {
        HEAR_PULL(SERVER(s), m->segments <= SLICES * 3 && (x->pull = *m, ++x->pulls));
        memcpy(x->segments, t->segments, x->pull.segments * sizeof *x->segments);
      } else if (f->header.type == MLFAB__PULL_CANCEL) {
        HEAR(SERVER(s), PULL_CANCEL, pull_cancel, ++x->cancels);
      } else {
        talk_drop_frame(talk_peer_of(SERVER(s))); /* about updates */
      }
    }
  }
}

/* Nobody tells the node of memory at this seam: the context does, which is above it. */
static void share(const mlfab__shm_memory_table *on) {
  mlfab__view_share(t->node->parts->worker, on, NULL);
}

static void end(void) {
  if (!t->node) return;
  mlfab__layout_free(&memory, &layout);
  talk_close();
  assert_int_equal(holds(), 0);
}

static void start(uint32_t tags, uint32_t sync) {
  const mlfab__tensor_info infos[] = {
      {0, MLFAB_F64, WIDE}, {1, MLFAB_F32, NARROW}, {2, MLFAB_F32, LAST}};
  mlfab_model_options options;
  mlfab_error error;
  end();
  memset(servers, 0, sizeof servers);
  memset(held, 0, sizeof held);
  for (uint32_t i = 0; i < BYTES; i++) model[i] = (uint8_t)(i * 7 + i / 251);
  for (uint32_t i = 0; i < FILES; i++) memcpy(files[i] + EDGE, model, BYTES);
  mlfab_model_options_init(&options);
  options.slices = SLICES;
  options.tags = tags;
  options.sync = sync;
  talk_init();
  t->as_is = 1;
  talk_open(&SIZED(mlfab_config, .roles = MLFAB_ROLE_WORKER, .servers = SERVERS, .dedicated = 1,
                   .eager_bytes = 8192));
  share(&table);
  for (uint32_t i = 0; i < 3; i++)
    CALL(TENSOR_ADD, .tensor = i, .dtype = (int32_t)infos[i].dtype, .count = infos[i].count);
  talk_stand(&options);
  assert_int_equal(mlfab__env_init(&memory, NULL), 0);
  assert_int_equal(
      mlfab__layout_build(&memory, infos, 3, SLICES, SERVERS, 0, 1 << 30, &layout, &error), 0);
}

static void begin(void) { start(0, MLFAB_SYNC_ASYNC); }

static uint32_t drops(void) { return (uint32_t)talk_stats().frames_refused; }

/* Returns 0 when the call fails, which is the case with this code. */
static mlfab_request ask_for(const uint32_t *tensors, uint32_t n, int code) {
  const mlfab_pull_options options = {.size = sizeof options, .timeout_ns = TIMEOUT_NS};
  mlfab_buf bufs[3];
  mlfab_request request = 0;
  for (uint32_t i = 0; i < n; i++) bufs[i] = (mlfab_buf){tensors[i], 0, NULL, counts[tensors[i]]};
  memset(&out, 0, sizeof out);
  out.size = sizeof out;
  const mlfab_call call = SIZED(mlfab_call, .kind = MLFAB_CALL_PULL_VIEW, .bufs = bufs, .n = n,
                                .info_p = &out, .options = &options);
  int got = mlfab_node_submit(t->node, &call, t->now, &request);
  assert_true(got == 0 || got == code);
  talk_run();
  listen();
  return got ? 0 : request;
}

static const uint32_t every[] = {0, 1, 2};

static mlfab_request ask_all(void) {
  mlfab_request request = ask_for(every, 3, 0);
  assert_true(request != 0);
  return request;
}

/* The address of these bytes of the model in a file. */
static uint8_t *place(uint32_t file, uint64_t offset) { return files[file] + EDGE + offset; }

/* The runs of what a server was asked for, in a file whose bulk is at its begin: each of its segments in two. */
static void list(uint32_t server, uint32_t file) {
  const uint8_t *bulk = files[file];
  nruns = 0;
  for (uint32_t i = 0; i < servers[server].pull.segments; i++) {
    const mlfab__segment *s = &servers[server].segments[i];
    uint64_t cut = s->bytes / 16 * 8;
    runs[nruns++] = (mlfab__view_run){s->offset, cut, (uint64_t)(place(file, s->offset) - bulk)};
    runs[nruns++] = (mlfab__view_run){s->offset + cut, s->bytes - cut,
                                      (uint64_t)(place(file, s->offset + cut) - bulk)};
  }
}

static void tell_as(uint32_t server, uint64_t request, uint32_t ask, uint32_t first, uint32_t n,
                    uint32_t flags, const void *bulk, uint32_t bulk_bytes) {
  mlfab__view v = {request, 5 + server, number(FILES), ask, flags, n, 1 + server};
  for (uint32_t i = 0; i < FILES; i++)
    if ((uintptr_t)bulk - (uintptr_t)files[i] < sizeof files[i]) v.file = number(i) + misnumber;
  talk_say(SERVER(server), MLFAB__VIEW, mlfab__encode_view(t->meta, &v, runs + first), bulk,
           bulk_bytes);
  listen();
}

/* Some of the listed runs; the bulk is the begin of a file. */
static void tell(uint32_t server, uint32_t file, uint32_t first, uint32_t n, uint32_t flags) {
  tell_as(server, servers[server].pull.request, servers[server].pull.epoch, first, n, flags,
          files[file], 64);
}

static void tell_all(uint32_t server, uint32_t file) {
  list(server, file);
  tell(server, file, 0, nruns, MLFAB__MODEL_LAST);
}

static void refuse(uint32_t server, int code) {
  SAY(SERVER(server), PULL_FAIL, pull_fail, .request = servers[server].pull.request, .code = code);
  listen();
}

/* The server has a new link, or says HELLO_ACK again on the same one. */
static void again(uint32_t server, int same) {
  if (same) {
    SAY(SERVER(server), HELLO_ACK, hello_ack, .server = server, .epoch = 1, .eager_bytes = 8192,
        .generation = talk_peer_of(SERVER(server))->generation, .model_stands = 1);
  } else {
    if (talk_linked(SERVER(server))) talk_break(SERVER(server));
    talk_back(SERVER(server));
  }
  listen();
}

/* The view has these tensors, in order, each element once. */
static void look(const uint32_t *tensors, uint32_t n) {
  static const uint64_t at[] = {0, 8 * WIDE, 8 * WIDE + 4 * NARROW};
  uint32_t k = 0;
  uint64_t next = 0;
  assert_true(out.id != 0 && out.nparts > 0);
  for (uint32_t i = 0; i < out.nparts; i++) {
    const mlfab_view_part *part = &out.parts[i];
    if (next == counts[tensors[k]]) k++, next = 0;
    assert_true(k < n);
    uint32_t width = tensors[k] == 0 ? 8 : 4;
    assert_int_equal(part->tensor, tensors[k]);
    assert_int_equal(part->dtype, tensors[k] == 0 ? MLFAB_F64 : MLFAB_F32);
    assert_int_equal(part->first, next);
    assert_true(part->count > 0 && (uintptr_t)part->data % width == 0);
    assert_memory_equal(part->data, model + at[tensors[k]] + next * width, part->count * width);
    next += part->count;
  }
  assert_true(k == n - 1 && next == counts[tensors[k]]);
}

static void give_up(void) {
  const uint32_t before[SERVERS] = {servers[0].cancels, servers[1].cancels};
  const mlfab_call call = SIZED(mlfab_call, .kind = MLFAB_CALL_VIEW_RELEASE, .count = out.id,
                                .data = (void *)(uintptr_t)out.parts);
  assert_int_equal(mlfab_node_submit(t->node, &call, t->now, NULL), 0);
  talk_run();
  listen();
  for (uint32_t s = 0; s < SERVERS; s++)
    assert_int_equal(servers[s].cancels, before[s] + !out.copied);
  assert_int_equal(mlfab_node_submit(t->node, &call, t->now, NULL), MLFAB_ERR_ARGUMENT);
}

/* The view is out and right; then it is released. */
static void got(mlfab_request request) {
  ENDS(request, 0);
  assert_int_equal(out.copied, 0);
  look(every, 3);
  give_up();
  assert_int_equal(holds(), 0);
}

/* The rest of a test: both servers tell all that they are asked for. */
static void succeed(mlfab_request request) {
  PENDING(request);
  for (uint32_t s = 0; s < SERVERS; s++) tell_all(s, s);
  got(request);
}

static void cancel(mlfab_request request, int status) {
  if (status == MLFAB_ERR_TIMEOUT)
    talk_wait(TIMEOUT_NS);
  else
    talk_cancel(request);
  ENDS(request, status);
  listen();
}

/* Each server has heard so many frames. */
static void heard(uint32_t pulls, uint32_t cancels) {
  for (uint32_t s = 0; s < SERVERS; s++) {
    assert_int_equal(servers[s].pulls, pulls);
    assert_int_equal(servers[s].cancels, cancels);
  }
}

/* --- right frames --- */

SCENE(test_two_servers) {
  begin();
  mlfab_request request = ask_all();
  heard(1, 0);
  for (uint32_t s = 0; s < SERVERS; s++) {
    assert_int_equal(servers[s].pull.flags, MLFAB__PULL_VIEW);
    assert_int_equal(servers[s].pull.epoch, 1);
    assert_true(servers[s].pull.segments > 0);
  }
  tell_all(1, 0);
  PENDING(request);
  assert_int_equal(out.id, 0);
  tell_all(0, 1);
  assert_int_equal(ENDS(request, 0).version, 6);
  assert_int_equal(out.version, 6);
  assert_int_equal(out.copied, 0);
  assert_int_equal(holds(), 2);
  look(every, 3);
  give_up();
  assert_int_equal(holds(), 0);
  /* The next push is computed from the oldest version that it shows. */
  static double zeros[WIDE];
  CALL(PUSH, BUFS({0, 0, zeros, WIDE}, {1, 0, zeros, NARROW}));
  for (uint32_t s = 0; s < SERVERS; s++)
    HEAR_PUSH(SERVER(s), m->versions == 1 && t->versions[0] == 1 + s);
}

/* The fifth is refused; those that nobody releases end with the worker. */
SCENE(test_limit) {
  begin();
  for (int i = 0; i < MLFAB_VIEWS_MAX; i++) {
    ask_all();
    for (uint32_t s = 0; s < SERVERS && i < 3; s++) tell_all(s, s);
  }
  assert_true(ask_for(every, 3, MLFAB_ERR_LIMIT) == 0);
  assert_int_equal(holds(), 6);
}

/* Some tensors, runs of any length in any order, frames of any number of runs, in any files. */
static void random_view(mlfab__rng *prng) {
  static const struct {
    uint32_t n, asked[3], sorted[3];
  } ways[] = {{3, {0, 1, 2}, {0, 1, 2}},
              {2, {0, 1}, {0, 1}},
              {2, {1, 2}, {1, 2}},
              {2, {0, 2}, {0, 2}},
              {1, {0}, {0}},
              {1, {1}, {1}},
              {1, {2}, {2}},
              {2, {2, 0}, {0, 2}}};
  uint32_t way = (uint32_t)mlfab__rng_below(prng, MLFAB__COUNT(ways)), asked[SERVERS];
  for (uint32_t s = 0; s < SERVERS; s++) asked[s] = servers[s].pulls;
  mlfab_request request = ask_for(ways[way].asked, ways[way].n, 0);
  for (uint32_t k = 0; k < SERVERS; k++) {
    uint32_t s = k ^ (uint32_t)(request & 1);
    const struct heard *x = &servers[s];
    if (x->pulls == asked[s]) continue;
    nruns = 0;
    for (uint32_t i = 0; i < x->pull.segments; i++) {
      uint64_t offset = x->segments[i].offset, stop = offset + x->segments[i].bytes;
      while (offset < stop) {
        uint32_t width = offset < 8 * WIDE ? 8 : 4;
        uint64_t n = width * (1 + mlfab__rng_below(prng, mlfab__rng_below(prng, 2) ? 9 : 2000));
        n = mlfab__min(n, stop - offset);
        if (offset < 8 * WIDE && offset + n > 8 * WIDE && n % 8 && mlfab__rng_below(prng, 2))
          n = 8 * WIDE - offset;
        runs[nruns++] = (mlfab__view_run){offset, n, 0};
        offset += n;
      }
    }
    for (uint32_t i = nruns; i > 1; i--) {
      uint32_t j = (uint32_t)mlfab__rng_below(prng, i);
      mlfab__view_run was = runs[j];
      runs[j] = runs[i - 1];
      runs[i - 1] = was;
    }
    for (uint32_t i = 0, n; i < nruns; i += n) {
      n = 1 + (uint32_t)mlfab__rng_below(prng, mlfab__min(nruns - i, MLFAB__VIEW_RUNS_MAX));
      uint32_t file = (uint32_t)mlfab__rng_below(prng, FILES);
      const uint8_t *bulk = files[file] + 8 * mlfab__rng_below(prng, BYTES / 8);
      for (uint32_t j = i; j < i + n; j++)
        runs[j].at = (uint64_t)(uintptr_t)place(file, runs[j].offset) - (uint64_t)(uintptr_t)bulk;
      PENDING(request);
      tell_as(s, x->pull.request, x->pull.epoch, i, n, i + n == nruns ? MLFAB__MODEL_LAST : 0, bulk,
              64);
    }
  }
  ENDS(request, 0);
  look(ways[way].sorted, ways[way].n);
}

SCENE(test_random) {
  for (uint64_t seed = 1; seed <= 60; seed++) {
    mlfab__rng prng;
    mlfab__rng_seed(&prng, seed);
    start(seed % 2 ? 0 : 16, MLFAB_SYNC_ASYNC);
    for (int i = 0; i < 6; i++) {
      random_view(&prng);
      if (i < 3) give_up();
    }
    assert_int_equal(drops(), 0);
  }
}

/* --- wrong frames --- */

static const char *const wrongs[] = {
    "before",      "behind",      "ends behind",  "no bytes",     "wraps",        "endless",
    "odd address", "odd bytes",   "odd offset",   "beyond model", "offset wraps", "twice",
    "overlaps",    "gap",         "of the other", "only last",    "no runs",      "no bulk",
    "empty bulk",  "frame twice", "empty model",  "some model",   "malformed"};

static void send_model(uint32_t server, uint64_t offset, uint64_t bytes, int last) {
  SAY_BULK(SERVER(server), MODEL, model, bytes ? model + offset : NULL, (uint32_t)bytes,
           .request = servers[server].pull.request, .offset = offset, .bytes = bytes, .version = 3,
           .commit = 3, .slice = mlfab__layout_slice_at(&layout, offset),
           .flags = last ? MLFAB__MODEL_LAST : 0, .epoch = 1);
  listen();
}

/* The frame of server 0, which is the last one, with something wrong. */
static void tell_wrong(const char *wrong) {
#define IS(what) !strcmp(wrong, what)
  mlfab__view_run *r = &runs[1];
  const struct heard *x = &servers[0];
  uint32_t n;
  list(0, 0);
  assert_true(nruns >= 2 && r->offset < 8 * WIDE);
  if (IS("before")) r->at = (uint64_t)0 - 8;
  if (IS("behind")) r->at = sizeof files[0];
  if (IS("ends behind")) r->at = sizeof files[0] - r->bytes + 8;
  if (IS("no bytes")) r->bytes = 0;
  if (IS("wraps")) r->at = UINT64_MAX - r->bytes + 9;
  if (IS("endless")) r->bytes = (uint64_t)0 - 8;
  if (IS("odd address")) r->at += 4;
  if (IS("odd bytes")) r->bytes -= 4;
  if (IS("odd offset")) r->offset += 4, r->at += 4, r->bytes -= 4;
  if (IS("beyond model")) r->offset = layout.bytes;
  if (IS("offset wraps")) r->offset = (uint64_t)0 - 8;
  if (IS("twice")) runs[nruns++] = *r;
  if (IS("overlaps")) r->offset -= 8, r->at -= 8, r->bytes += 8;
  if (IS("gap")) r->offset += 8, r->at += 8, r->bytes -= 8;
  if (IS("of the other")) {
    uint64_t offset = servers[1].segments[0].offset;
    runs[nruns++] = (mlfab__view_run){offset, 8, (uint64_t)(place(0, offset) - files[0])};
  }
  n = IS("no runs") ? 0 : nruns - (IS("only last"));
  if (IS("frame twice")) tell(0, 0, 0, 1, 0);
  if (IS("empty model") || IS("some model")) {
    send_model(0, x->segments[0].offset, IS("some model") ? 64 : 0, 1);
  } else if (IS("malformed")) {
    memset(t->meta, 0, 8);
    talk_say(SERVER(0), MLFAB__VIEW, 8, files[0], 64);
  } else {
    tell_as(0, x->pull.request, x->pull.epoch, 0, n, MLFAB__MODEL_LAST,
            IS("no bulk") ? NULL : files[0], IS("no bulk") || IS("empty bulk") ? 0 : 64);
  }
}

/* The link is dropped, and everything of this server is asked for again. */
SCENE(test_wrong) {
  for (uint32_t i = 0; i < MLFAB__COUNT(wrongs); i++) {
    for (int others = 0; others < 2; others++) {
      begin();
      mlfab_request request = ask_all();
      if (others) tell_all(1, 1);
      tell_wrong(wrongs[i]);
      if (drops() != 1 || talk_linked(SERVER(0))) fail_msg("%s: accepted", wrongs[i]);
      PENDING(request);
      assert_int_equal(out.id, 0);
      again(0, 0);
      assert_int_equal(holds(), others);
      assert_int_equal(servers[0].pulls, 2);
      assert_int_equal(servers[1].pulls, 1);
      assert_int_equal(servers[0].pull.epoch, 2);
      tell_all(0, 2);
      if (!others) tell_all(1, 1);
      assert_int_equal(holds(), 2);
      got(request);
      assert_int_equal(drops(), 1);
    }
  }
}

/* A server tells of other tensors' bytes in the same slices, which nobody asked for. */
SCENE(test_not_asked_for) {
  begin();
  mlfab_request request = ask_for(every + 1, 1, 0);
  uint32_t s = servers[0].pulls ? 0 : 1;
  list(s, 0);
  runs[0].offset -= 4;
  runs[0].at -= 4;
  runs[0].bytes += 4;
  tell(s, 0, 0, nruns, MLFAB__MODEL_LAST);
  assert_int_equal(drops(), 1);
  cancel(request, MLFAB_ERR_CANCELLED);
  assert_int_equal(holds(), 0);
}

/* No server fills the memory. */
SCENE(test_too_many_runs) {
  begin();
  mlfab_request request = ask_all();
  list(0, 0);
  for (uint32_t i = 1; i < MLFAB__VIEW_RUNS_MAX; i++) runs[i] = runs[0];
  for (uint32_t i = 0; i < 1024; i++) tell(0, 0, 0, MLFAB__VIEW_RUNS_MAX, 0);
  assert_int_equal(drops(), 0);
  assert_int_equal(holds(), 1024);
  tell(0, 0, 0, 1, 0);
  assert_int_equal(drops(), 1);
  again(0, 0);
  assert_int_equal(holds(), 0);
  succeed(request);
}

/* Frames that come too late, or are of something else, change nothing. */
SCENE(test_ignored) {
  static float weights[NARROW];
  begin();
  mlfab_request request = ask_all();
  uint64_t id = servers[0].pull.request;
  list(0, 0);
  const uint64_t others[][2] = {
      {id + 1, 1}, {0, 1}, {id, 0}, {id, 2}}; /* of a pull, and how often it was asked */
  for (uint32_t i = 0; i < 4; i++)
    tell_as(0, others[i][0], (uint32_t)others[i][1], 0, nruns, MLFAB__MODEL_LAST, files[0], 64);
  assert_int_equal(holds(), 0);
  tell(0, 0, 0, nruns, MLFAB__MODEL_LAST);
  tell(0, 0, 0, nruns, MLFAB__MODEL_LAST);
  tell(0, 0, 0, nruns, 0);
  assert_int_equal(holds(), 1);
  PENDING(request);
  tell_all(1, 1);
  tell(1, 1, 0, nruns, MLFAB__MODEL_LAST);
  assert_int_equal(holds(), 2);
  got(request);
  tell(1, 1, 0, nruns, MLFAB__MODEL_LAST);
  mlfab_request ordinary = CALL(PULL, BUFS({1, 0, weights, NARROW}));
  listen();
  for (uint32_t s = 0; s < SERVERS; s++) {
    list(s, 0);
    for (uint32_t ask = 0; ask < 2; ask++)
      tell_as(s, servers[s].pull.request, ask, 0, nruns, MLFAB__MODEL_LAST, files[0], 64);
  }
  PENDING(ordinary);
  assert_int_equal(holds(), 0);
  assert_int_equal(drops(), 0);
}

/* --- links and withdrawals --- */

SCENE(test_link_before) {
  for (int same = 0; same < 2; same++) {
    begin();
    mlfab_request request = ask_all();
    list(0, 0);
    tell(0, 0, 0, nruns - 1, 0);
    assert_int_equal(holds(), 1);
    again(0, same);
    assert_int_equal(holds(), 0);
    assert_int_equal(servers[0].cancels, 1);
    assert_int_equal(servers[0].pulls, 2);
    /* A frame about the cancelled one is void. */
    tell_as(0, servers[0].pull.request, 1, 0, nruns, MLFAB__MODEL_LAST, files[0], 64);
    assert_int_equal(holds(), 0);
    succeed(request);
    assert_int_equal(drops(), 0);
  }
}

SCENE(test_link_after) {
  static const int ends[] = {0, MLFAB_ERR_TIMEOUT, MLFAB_ERR_CANCELLED};
  for (int same = 0; same < 2; same++) {
    for (int i = 0; i < 3; i++) {
      begin();
      mlfab_request request = ask_all();
      tell_all(0, 0);
      again(0, same);
      assert_int_equal(holds(), 1);
      heard(1, 0);
      if (i == 0) {
        tell_all(1, 1);
        got(request);
      } else {
        cancel(request, ends[i]);
        heard(1, 1); /* both have to know: one has a view, the other a pull */
        tell_all(1, 1);
      }
      assert_int_equal(holds(), 0);
      assert_int_equal(drops(), 0);
    }
  }
}

SCENE(test_dead) {
  for (uint32_t dead = 0; dead < SERVERS; dead++) {
    begin();
    mlfab_request request = ask_all();
    tell_all(0, 0);
    talk_dies(SERVER(dead));
    listen();
    if (dead == 1) {
      ENDS(request, MLFAB_ERR_PEER_DEAD);
      assert_int_equal(servers[0].cancels, 1);
    } else {
      tell_all(1, 1);
      ENDS(request, 0);
      look(every, 3);
    }
    assert_int_equal(holds(), dead ? 0 : 2);
  }
}

/* Rounds went on without this worker: its update has another number, and the view that waits for it is asked for again. */
SCENE(test_renumbered) {
  static double zeros[WIDE];
  start(0, MLFAB_SYNC_BSP);
  CALL(PUSH, BUFS({0, 0, zeros, WIDE}, {1, 0, zeros, NARROW}, {2, 0, zeros, LAST}));
  mlfab_request request = ask_all();
  list(0, 0);
  tell(0, 0, 0, 1, 0);
  assert_int_equal(holds(), 1);
  SAY(SERVER(1), PUSH_ACK, push_ack, .seq = 1, .members = 1, .generation = 1, .v_train = 9);
  listen();
  assert_int_equal(holds(), 0);
  assert_int_equal(servers[0].cancels, 1);
  assert_int_equal(servers[0].pulls, 2);
  tell_as(0, servers[0].pull.request, 1, 1, nruns - 1, 0, files[0], 64); /* of the first one */
  assert_int_equal(holds(), 0);
  succeed(request);
}

/* The slices have these owners now; servers that have stopped the worker let it go on. */
static void move(const uint32_t owners[SLICES]) {
  SAY_LIST(SERVER(0), RESUME, resume, owners, .attempt = 1, .epoch = 2, .slices = SLICES);
  for (uint32_t kind = MLFAB__STOP_BEGIN; kind <= MLFAB__STOP_OVER; kind += 2) {
    for (uint32_t s = 0; s < SERVERS; s++) {
      while (talk_peer_of(SERVER(s))->first->header.type == MLFAB__PULL_CANCEL)
        HEAR(SERVER(s), PULL_CANCEL, pull_cancel, ++servers[s].cancels);
      HEAR(SERVER(s), STOP, stop, m->kind == kind);
    }
    for (uint32_t s = 0; s < SERVERS; s++)
      SAY(SERVER(s), HELLO_ACK, hello_ack, .server = s, .epoch = 2, .eager_bytes = 8192,
          .generation = 1, .model_stands = 1,
          .kind = kind == MLFAB__STOP_BEGIN ? MLFAB__ACK_STOP : MLFAB__ACK_ALIVE,
          .stopped = kind == MLFAB__STOP_BEGIN);
    if (kind == MLFAB__STOP_BEGIN) assert_int_equal(holds(), 0);
  }
  mlfab__layout_assign(&layout, owners);
  listen();
}

/* Slices move: the servers end what they have of the view, and are asked anew. */
SCENE(test_moved) {
  for (uint32_t told = 0; told < 3; told++) {
    begin();
    mlfab_request request = ask_all();
    uint32_t owners[SLICES];
    if (told > 0) tell_all(0, 0);
    if (told > 1) {
      list(1, 1);
      tell(1, 1, 0, 1, 0);
    }
    for (uint32_t i = 0; i < SLICES; i++) owners[i] = !layout.slices[i].server || i == 0;
    move(owners);
    heard(2, 1);
    succeed(request);
    assert_int_equal(drops(), 0);
  }
}

/* All slices leave a server that had told. */
SCENE(test_moved_away) {
  static const uint32_t owners[SLICES] = {1, 1, 1, 1};
  begin();
  mlfab_request request = ask_all();
  tell_all(0, 0);
  move(owners);
  assert_int_equal(servers[0].pulls, 1);
  assert_int_equal(servers[0].cancels, 1);
  tell_all(1, 2);
  assert_int_equal(holds(), 1);
  got(request);
}

/* --- copies --- */

static void send_copy(mlfab_request request) {
  for (uint32_t s = 0; s < SERVERS; s++) {
    const struct heard *x = &servers[s];
    uint32_t n = x->pull.segments;
    assert_int_equal(x->pull.flags, 0);
    for (uint32_t i = 0; i < n; i++) {
      uint64_t at = x->segments[i].offset, stop = at + x->segments[i].bytes;
      while (at < stop) {
        const mlfab__slice *in = &layout.slices[mlfab__layout_slice_at(&layout, at)];
        uint64_t bytes = mlfab__min(stop, in->offset + in->bytes) - at;
        PENDING(request);
        send_model(s, at, bytes, i == n - 1 && at + bytes == stop);
        at += bytes;
      }
    }
  }
  ENDS(request, 0);
  assert_int_equal(out.copied, 1);
  assert_int_equal(out.nparts, 3);
  look(every, 3);
  give_up();
  assert_int_equal(holds(), 0);
  assert_int_equal(drops(), 0);
}

SCENE(test_copies) {
  enum { NOT_HELD, OTHER_FILE, NO_TABLE, REFUSED, BOTH_REFUSED, SOME_NOT_HELD, LATE, HOWS };
  static uint8_t elsewhere[64];
  for (int how = 0; how < HOWS; how++) {
    begin();
    mlfab_request request = ask_all();
    if (how == NO_TABLE) share(NULL);
    if (how == REFUSED || how == LATE) tell_all(1, 1);
    list(0, 0);
    misnumber = how == OTHER_FILE;
    if (how == SOME_NOT_HELD) tell(0, 0, 0, 1, 0);
    if (how == REFUSED || how == BOTH_REFUSED)
      refuse(0, MLFAB_ERR_UNSUPPORTED);
    else
      tell_as(0, servers[0].pull.request, 1, 0, nruns, MLFAB__MODEL_LAST,
              how == NO_TABLE || how == OTHER_FILE ? files[0] : elsewhere, 64);
    misnumber = 0;
    if (how == BOTH_REFUSED) refuse(1, MLFAB_ERR_UNSUPPORTED);
    assert_int_equal(holds(), 0);
    PENDING(request);
    heard(2, 1);
    if (how == LATE) {
      list(1, 1);
      tell_as(1, servers[1].pull.request, 1, 0, nruns, MLFAB__MODEL_LAST, files[1], 64);
      assert_int_equal(holds(), 0);
      again(1, 0); /* which asks again for what a copy lacks */
      assert_int_equal(servers[1].pulls, 3);
    }
    send_copy(request);
  }
}

SCENE(test_refused) {
  begin();
  mlfab_request request = ask_all();
  tell_all(0, 0);
  refuse(1, MLFAB_ERR_LIMIT);
  ENDS(request, MLFAB_ERR_LIMIT);
  assert_int_equal(servers[0].cancels, 1);
  assert_int_equal(holds(), 0);
  /* A copy that is withdrawn frees its memory. */
  request = ask_all();
  refuse(1, MLFAB_ERR_UNSUPPORTED);
  send_model(0, servers[0].segments[0].offset, 64, 0);
  cancel(request, MLFAB_ERR_TIMEOUT);
  for (int i = 0; i < MLFAB_VIEWS_MAX; i++) ask_all();
}

/* Every allocation fails once, from the call on: an error, or a link that is given up; and nothing is held. */
SCENE(test_memory) {
  for (int copies = 0; copies < 2; copies++) {
    int refused = 0, given_up = 0, done = 0;
    for (uint64_t k = 0; !done; k++) {
      assert_true(k < 100);
      begin();
      t->fail_from = t->calls + 1 + k;
      mlfab_request request = ask_for(every, 3, MLFAB_ERR_MEMORY);
      for (uint32_t s = 0; request && s < SERVERS - (uint32_t)copies; s++) {
        if (!talk_linked(SERVER(s)) || servers[s].pulls == 0) continue;
        if (copies)
          refuse(0, MLFAB_ERR_UNSUPPORTED);
        else
          tell_all(s, s);
      }
      int failed = t->calls >= t->fail_from, ended = 0;
      mlfab_result result = {.status = 0};
      t->fail_from = 0;
      if (request) assert_int_equal(mlfab_node_test(t->node, request, &ended, &result), 0);
      refused += !request || result.status;
      given_up += request && !ended && drops() > 0;
      done = request && !failed;
      if (result.status) assert_int_equal(result.status, MLFAB_ERR_MEMORY);
      if (request && !ended && !(copies && done)) cancel(request, MLFAB_ERR_CANCELLED);
      if (done && copies) send_copy(request);
      if (ended && !result.status) {
        look(every, 3);
        give_up();
      }
      assert_int_equal(holds(), 0);
    }
    assert_true(refused > 0);
    assert_true(copies || given_up > 0);
  }
}
