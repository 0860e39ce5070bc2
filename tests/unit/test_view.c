/* test_view.c - core/worker/view.c: the worker role's views. The test plays the servers: it sends valid frames, invalid
 * frames, and valid frames at the wrong time.
 *
 * Whatever comes, all memory that was held is given up exactly once, and a view that the caller gets has all of its elements, once,
 * with the bytes that the servers meant. */
#include "core/base/rng.h"
#include "core/reshard/reshard.h"
#include "core/worker/worker.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum {
  SERVERS = 2,
  WIDE = 2001, /* elements of tensor 0, of 8 bytes; a slice has its end and the begin of tensor 1 */
  NARROW = 3003,
  LAST = 501, /* of tensor 2 */
  BYTES = 8 * WIDE + 4 * NARROW + 4 * LAST,
  SLICES = 4,
  FILES = 3,
  EDGE = 64, /* bytes of a file before and behind the model's */
  RUNS = 4096,
  POSTS = 512
};

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

typedef struct posted {
  uint32_t server;
  uint8_t type;
  mlfab__pull pull;
  uint64_t request;
} posted;

static struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__requests requests;
  mlfab__worker worker;
  posted posts[POSTS];
  uint32_t nposts, drops;
  int dropped; /* the last code */
  uint64_t now;
  /* The last PULL to each server. */
  mlfab__pull pull[SERVERS];
  mlfab__segment segments[SERVERS][MLFAB__SEGMENTS_MAX];
  uint64_t fail_at; /* this allocation fails, and all later ones; 0: none */
} f;

static mlfab_view out;
static uint64_t misnumber; /* is added to the number of a file that is told */
static mlfab__view_run runs[RUNS];
static uint32_t nruns;

static void *allocate(void *user, size_t bytes) {
  (void)user;
  return f.fail_at && f.env.allocations >= f.fail_at ? NULL : malloc(bytes);
}
static void release(void *user, void *memory, size_t bytes) {
  (void)user, (void)bytes;
  free(memory);
}

static void post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  uint64_t sinces[SLICES];
  mlfab__pull_cancel cancel;
  (void)self;
  if (type != MLFAB__PULL && type != MLFAB__PULL_CANCEL) return;
  assert_true(peer < SERVERS && f.nposts < POSTS);
  posted *p = &f.posts[f.nposts++];
  p->server = peer;
  p->type = type;
  if (type == MLFAB__PULL) {
    assert_int_equal(mlfab__decode_pull(meta, bytes, &p->pull, f.segments[peer], sinces), 0);
    f.pull[peer] = p->pull;
    p->request = p->pull.request;
  } else {
    assert_int_equal(mlfab__decode_pull_cancel(meta, bytes, &cancel), 0);
    p->request = cancel.request;
  }
}
static void ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer, (void)text;
  assert_true(code == MLFAB_ERR_FRAME || (f.fail_at && code == MLFAB_ERR_MEMORY));
  f.drops++;
  f.dropped = code;
}
static void detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static void event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                  int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

static uint32_t count(uint32_t server, uint8_t type) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < f.nposts; i++)
    n += f.posts[i].server == server && f.posts[i].type == type;
  return n;
}

static void from_server(uint32_t server, uint8_t type, const uint8_t *meta, uint32_t bytes,
                        const void *bulk, uint32_t bulk_bytes) {
  mlfab__frame_in in = {type, bytes, bulk_bytes, meta, bulk};
  mlfab__worker_frame(&f.worker, server, &in, f.now);
}

static void greet(uint32_t server) {
  mlfab__hello_ack m;
  memset(&m, 0, sizeof m);
  m.epoch = 1;
  m.server = server;
  m.eager_bytes = 8192;
  m.generation = 1;
  m.model_stands = 1;
  mlfab__worker_hello(&f.worker, server, &m, f.now);
}

static void again(uint32_t server) {
  mlfab__worker_lost(&f.worker, server, f.now);
  greet(server);
}

static void start(uint32_t tags) {
  static uint8_t meta[MLFAB_META_MAX];
  mlfab__port port = {&f, post, ready, drop, detach, event};
  mlfab_env env = {.size = sizeof env, .allocate = allocate, .release = release};
  mlfab_model_options options;
  mlfab_request request;
  mlfab_error error;
  memset(&f, 0, sizeof f);
  memset(held, 0, sizeof held);
  f.now = 1000000000;
  for (uint32_t i = 0; i < BYTES; i++) model[i] = (uint8_t)(i * 7 + i / 251);
  for (uint32_t i = 0; i < FILES; i++) memcpy(files[i] + EDGE, model, BYTES);
  assert_int_equal(mlfab__env_init(&f.env, &env), 0);
  mlfab_config_init(&f.config);
  f.config.workers = 1;
  f.config.servers = SERVERS;
  f.config.chunk_bytes = 65536;
  f.config.eager_bytes = 8192;
  f.config.model_max_bytes = 1 << 30;
  assert_int_equal(
      mlfab__worker_init(&f.worker, &f.env, &f.config, 0, &port, &port, &f.stats, &f.requests), 0);
  mlfab__reshard_worker_attach(&f.worker);
  mlfab__worker_share(&f.worker, &table, NULL);
  assert_int_equal(mlfab__worker_tensor(&f.worker, 0, MLFAB_F64, WIDE, &error), 0);
  assert_int_equal(mlfab__worker_tensor(&f.worker, 1, MLFAB_F32, NARROW, &error), 0);
  assert_int_equal(mlfab__worker_tensor(&f.worker, 2, MLFAB_F32, LAST, &error), 0);
  mlfab_model_options_init(&options);
  options.slices = SLICES;
  options.tags = tags;
  assert_int_equal(mlfab__worker_model(&f.worker, &options, NULL, 0, f.now, &request, &error), 0);
  for (uint32_t s = 0; s < SERVERS; s++) {
    mlfab__frame_out define = {.meta = meta};
    mlfab__define_ack m;
    greet(s);
    assert_int_equal(mlfab__worker_next(&f.worker, s, &define), 1);
    assert_int_equal(define.type, MLFAB__DEFINE);
    mlfab__worker_taken(&f.worker, s, &define);
    memset(&m, 0, sizeof m);
    m.server = s;
    m.packets = 1;
    m.ask = f.worker.define.ask;
    m.options = f.worker.define.options;
    from_server(s, MLFAB__DEFINE_ACK, meta, mlfab__encode_define_ack(meta, &m), NULL, 0);
  }
  assert_int_equal(f.worker.stands, 1);
  mlfab__request_end(&f.requests, mlfab__request_find(&f.requests, request));
  f.nposts = 0;
}

static void begin(void) { start(0); }

static void end(void) {
  mlfab__worker_free(&f.worker);
  mlfab__requests_free(&f.requests);
  assert_int_equal(f.env.bytes, 0);
  assert_int_equal(holds(), 0);
}

static mlfab__request *ask_for(const uint32_t *tensors, uint32_t n) {
  static const uint64_t counts[] = {WIDE, NARROW, LAST};
  mlfab_buf bufs[3];
  mlfab_request request;
  mlfab_error error;
  memset(bufs, 0, sizeof bufs);
  for (uint32_t i = 0; i < n; i++) bufs[i] = (mlfab_buf){tensors[i], 0, NULL, counts[tensors[i]]};
  memset(&out, 0, sizeof out);
  out.size = sizeof out;
  int code = mlfab__worker_pull_view(&f.worker, bufs, n, NULL, &out, f.now, &request, &error);
  if (code) {
    assert_int_equal(code, f.fail_at ? MLFAB_ERR_MEMORY : MLFAB_ERR_LIMIT);
    return NULL;
  }
  return mlfab__request_find(&f.requests, request);
}

static mlfab__request *ask_all(void) {
  static const uint32_t all[] = {0, 1, 2};
  return ask_for(all, 3);
}

/* The address of these bytes of the model in a file. */
static uint8_t *place(uint32_t file, uint64_t offset) { return files[file] + EDGE + offset; }

/* The runs of what a server was asked for, in a file whose bulk is at its begin: each of its segments in two. */
static void list(uint32_t server, uint32_t file) {
  const uint8_t *bulk = files[file];
  nruns = 0;
  for (uint32_t i = 0; i < f.pull[server].segments; i++) {
    const mlfab__segment *s = &f.segments[server][i];
    uint64_t cut = s->bytes / 16 * 8;
    runs[nruns++] = (mlfab__view_run){s->offset, cut, (uint64_t)(place(file, s->offset) - bulk)};
    runs[nruns++] = (mlfab__view_run){s->offset + cut, s->bytes - cut,
                                      (uint64_t)(place(file, s->offset + cut) - bulk)};
  }
}

static void tell_as(uint32_t server, uint64_t request, uint32_t ask, uint32_t first, uint32_t n,
                    uint32_t flags, const void *bulk, uint32_t bulk_bytes) {
  static uint8_t meta[MLFAB_META_MAX];
  mlfab__view v = {request, 5 + server, number(FILES), ask, flags, n, 1 + server};
  for (uint32_t i = 0; i < FILES; i++) {
    if ((uintptr_t)bulk - (uintptr_t)files[i] < sizeof files[i]) v.file = number(i) + misnumber;
  }
  from_server(server, MLFAB__VIEW, meta, mlfab__encode_view(meta, &v, runs + first), bulk,
              bulk_bytes);
}

/* Some of the listed runs; the bulk is the begin of a file. */
static void tell(uint32_t server, uint32_t file, uint32_t first, uint32_t n, uint32_t flags) {
  tell_as(server, f.pull[server].request, f.pull[server].epoch, first, n, flags, files[file], 64);
}

static void tell_all(uint32_t server, uint32_t file) {
  list(server, file);
  tell(server, file, 0, nruns, MLFAB__MODEL_LAST);
}

/* The view has these tensors, in order, each element once. */
static void look(const uint32_t *tensors, uint32_t n) {
  static const uint64_t counts[] = {WIDE, NARROW, LAST},
                        at[] = {0, 8 * WIDE, 8 * WIDE + 4 * NARROW};
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

static void look_all(void) {
  static const uint32_t all[] = {0, 1, 2};
  look(all, 3);
}

static void give_up(void) {
  mlfab_error error;
  uint32_t cancels[SERVERS];
  for (uint32_t s = 0; s < SERVERS; s++) cancels[s] = count(s, MLFAB__PULL_CANCEL);
  assert_int_equal(mlfab__worker_view_release(&f.worker, out.id, out.parts, &error), 0);
  for (uint32_t s = 0; s < SERVERS; s++)
    assert_int_equal(count(s, MLFAB__PULL_CANCEL), cancels[s] + !out.copied);
  assert_int_equal(mlfab__worker_view_release(&f.worker, out.id, out.parts, &error),
                   MLFAB_ERR_ARGUMENT);
}

/* What is left of the test: both servers tell what they are asked for. */
static void succeed(mlfab__request *request) {
  assert_int_equal(request->done, 0);
  for (uint32_t s = 0; s < SERVERS; s++) tell_all(s, s);
  assert_int_equal(request->done, 1);
  assert_int_equal(request->result.status, 0);
  assert_int_equal(out.copied, 0);
  look_all();
  give_up();
  assert_int_equal(holds(), 0);
}

/* --- right frames --- */

static void test_two_servers(void **state) {
  (void)state;
  begin();
  mlfab__request *request = ask_all();
  for (uint32_t s = 0; s < SERVERS; s++) {
    assert_int_equal(count(s, MLFAB__PULL), 1);
    assert_int_equal(f.pull[s].flags, MLFAB__PULL_VIEW);
    assert_int_equal(f.pull[s].epoch, 1);
    assert_true(f.pull[s].segments > 0);
  }
  tell_all(1, 0);
  assert_int_equal(request->done, 0);
  assert_int_equal(out.id, 0);
  tell_all(0, 1);
  assert_int_equal(request->done, 1);
  assert_int_equal(request->result.status, 0);
  assert_int_equal(request->result.version, 6);
  assert_int_equal(out.version, 6);
  /* The next push is computed from the oldest that it shows. */
  for (uint32_t i = 0; i < f.worker.layout.nslices; i++)
    assert_int_equal(f.worker.pulled[i], 1 + f.worker.layout.slices[i].server);
  assert_int_equal(out.copied, 0);
  assert_int_equal(holds(), 2);
  look_all();
  give_up();
  assert_int_equal(holds(), 0);
  end();
}

/* The fifth is refused; those that nobody releases end with the worker. */
static void test_limit(void **state) {
  (void)state;
  begin();
  for (int i = 0; i < MLFAB_VIEWS_MAX; i++) {
    assert_non_null(ask_all());
    for (uint32_t s = 0; s < SERVERS && i < 3; s++) tell_all(s, s);
  }
  assert_null(ask_all());
  assert_int_equal(holds(), 6);
  end();
}

/* Some tensors, runs of any length in any order, frames of any number of runs, in any files. */
static void random_view(mlfab__rng *prng) {
  static const uint32_t ways[][3] = {{0, 1, 2}, {0, 1}, {1, 2}, {0, 2}, {0}, {1}, {2}, {2, 0}};
  static const uint32_t lengths[] = {3, 2, 2, 2, 1, 1, 1, 2};
  uint32_t way = (uint32_t)mlfab__rng_below(prng, MLFAB__COUNT(ways)), sorted[3];
  f.pull[0].request = f.pull[1].request = 0;
  mlfab__request *request = ask_for(ways[way], lengths[way]);
  assert_non_null(request);
  for (uint32_t k = 0; k < SERVERS; k++) {
    uint32_t s = k ^ (uint32_t)(request->id & 1), file[RUNS];
    if (f.pull[s].request != request->id) continue;
    nruns = 0;
    for (uint32_t i = 0; i < f.pull[s].segments; i++) {
      uint64_t offset = f.segments[s][i].offset, stop = offset + f.segments[s][i].bytes;
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
      file[0] = (uint32_t)mlfab__rng_below(prng, FILES);
      const uint8_t *bulk = files[file[0]] + 8 * mlfab__rng_below(prng, BYTES / 8);
      for (uint32_t j = i; j < i + n; j++)
        runs[j].at =
            (uint64_t)(uintptr_t)place(file[0], runs[j].offset) - (uint64_t)(uintptr_t)bulk;
      assert_int_equal(request->done, 0);
      tell_as(s, request->id, f.pull[s].epoch, i, n, i + n == nruns ? MLFAB__MODEL_LAST : 0, bulk,
              64);
    }
  }
  assert_int_equal(request->done, 1);
  assert_int_equal(request->result.status, 0);
  memcpy(sorted, ways[way], sizeof sorted);
  if (way == 7) sorted[0] = 0, sorted[1] = 2;
  look(sorted, lengths[way]);
  mlfab__request_end(&f.requests, request);
}

static void test_random(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 60; seed++) {
    mlfab__rng prng;
    mlfab__rng_seed(&prng, seed);
    start(seed % 2 ? 0 : 16);
    for (int i = 0; i < 6; i++) {
      f.nposts = 0;
      random_view(&prng);
      if (i < 3) give_up();
    }
    assert_int_equal(f.drops, 0);
    end();
  }
}

/* --- wrong frames --- */

enum wrong {
  BEFORE,
  BEHIND,
  ENDS_BEHIND,
  NO_BYTES,
  WRAPS,
  ENDLESS,
  ODD_ADDRESS,
  ODD_BYTES,
  ODD_OFFSET,
  BEYOND_MODEL,
  OFFSET_WRAPS,
  TWICE,
  OVERLAPS,
  GAP,
  OF_THE_OTHER,
  ONLY_LAST,
  NO_RUNS,
  NO_BULK,
  EMPTY_BULK,
  FRAME_TWICE,
  EMPTY_MODEL,
  SOME_MODEL,
  MALFORMED,
  WRONGS
};

static void send_model(uint32_t server, uint64_t offset, uint32_t bytes) {
  static uint8_t meta[128];
  uint32_t slice = mlfab__layout_slice_at(&f.worker.layout, offset);
  mlfab__model m = {f.pull[server].request, offset, bytes, 1, 1, slice, MLFAB__MODEL_LAST, 1};
  from_server(server, MLFAB__MODEL, meta, mlfab__encode_model(meta, &m),
              bytes ? model + offset : NULL, bytes);
}

/* The frame of server 0, which is the last one, with something wrong. */
static void tell_wrong(enum wrong wrong) {
  static const uint8_t nothing[8];
  mlfab__view_run *r = &runs[1];
  uint32_t flags = MLFAB__MODEL_LAST, from = 0, n;
  list(0, 0);
  uint64_t whole = f.worker.layout.bytes;
  assert_true(nruns >= 2 && r->offset < 8 * WIDE);
  if (wrong == BEFORE) r->at = (uint64_t)0 - 8;
  if (wrong == BEHIND) r->at = sizeof files[0];
  if (wrong == ENDS_BEHIND) r->at = sizeof files[0] - r->bytes + 8;
  if (wrong == NO_BYTES) r->bytes = 0;
  if (wrong == WRAPS) r->at = UINT64_MAX - r->bytes + 9;
  if (wrong == ENDLESS) r->bytes = (uint64_t)0 - 8;
  if (wrong == ODD_ADDRESS) r->at += 4;
  if (wrong == ODD_BYTES) r->bytes -= 4;
  if (wrong == ODD_OFFSET) r->offset += 4, r->at += 4, r->bytes -= 4;
  if (wrong == BEYOND_MODEL) r->offset = whole;
  if (wrong == OFFSET_WRAPS) r->offset = (uint64_t)0 - 8;
  if (wrong == TWICE) runs[nruns++] = *r;
  if (wrong == OVERLAPS) r->offset -= 8, r->at -= 8, r->bytes += 8;
  if (wrong == GAP) r->offset += 8, r->at += 8, r->bytes -= 8;
  if (wrong == OF_THE_OTHER) {
    uint64_t offset = f.segments[1][0].offset;
    runs[nruns++] = (mlfab__view_run){offset, 8, (uint64_t)(place(0, offset) - files[0])};
  }
  n = nruns;
  if (wrong == ONLY_LAST) n--;
  if (wrong == NO_RUNS) n = 0;
  if (wrong == FRAME_TWICE) tell(0, 0, 0, 1, 0);
  if (wrong == EMPTY_MODEL) {
    send_model(0, f.segments[0][0].offset, 0);
  } else if (wrong == SOME_MODEL) {
    send_model(0, f.segments[0][0].offset, 64);
  } else if (wrong == MALFORMED) {
    from_server(0, MLFAB__VIEW, nothing, sizeof nothing, files[0], 64);
  } else {
    tell_as(0, f.pull[0].request, f.pull[0].epoch, from, n, flags,
            wrong == NO_BULK ? NULL : files[0], wrong == NO_BULK || wrong == EMPTY_BULK ? 0 : 64);
  }
}

static void test_wrong(void **state) {
  (void)state;
  for (uint32_t wrong = 0; wrong < WRONGS; wrong++) {
    for (int others = 0; others < 2; others++) {
      begin();
      mlfab__request *request = ask_all();
      if (others) tell_all(1, 1);
      tell_wrong((enum wrong)wrong);
      if (f.drops != 1 || request->done) fail_msg("wrong %u is accepted", wrong);
      assert_int_equal(out.id, 0);
      /* The link is dropped, and everything of this server is asked for again. */
      again(0);
      assert_int_equal(holds(), others);
      assert_int_equal(count(0, MLFAB__PULL), 2);
      assert_int_equal(count(1, MLFAB__PULL), 1);
      assert_int_equal(f.pull[0].epoch, 2);
      tell_all(0, 2);
      if (!others) tell_all(1, 1);
      assert_int_equal(request->done, 1);
      assert_int_equal(holds(), 2);
      look_all();
      give_up();
      assert_int_equal(holds(), 0);
      assert_int_equal(f.drops, 1);
      end();
    }
  }
}

/* What was not asked for: other tensors' bytes in the same slices. */
static void test_not_asked_for(void **state) {
  (void)state;
  static const uint32_t narrow[] = {1};
  begin();
  mlfab__request *request = ask_for(narrow, 1);
  uint32_t s = f.pull[0].request ? 0 : 1;
  list(s, 0);
  runs[0].offset -= 4;
  runs[0].at -= 4;
  runs[0].bytes += 4;
  tell(s, 0, 0, nruns, MLFAB__MODEL_LAST);
  assert_int_equal(f.drops, 1);
  assert_int_equal(request->done, 0);
  mlfab__worker_withdraw(&f.worker, request, MLFAB_ERR_TIMEOUT, f.now);
  assert_int_equal(holds(), 0);
  end();
}

/* No server fills the memory. */
static void test_too_many_runs(void **state) {
  (void)state;
  begin();
  mlfab__request *request = ask_all();
  list(0, 0);
  for (uint32_t i = 1; i < MLFAB__VIEW_RUNS_MAX; i++) runs[i] = runs[0];
  for (uint32_t i = 0; i < 1024; i++) tell(0, 0, 0, MLFAB__VIEW_RUNS_MAX, 0);
  assert_int_equal(f.drops, 0);
  assert_int_equal(holds(), 1024);
  tell(0, 0, 0, 1, 0);
  assert_int_equal(f.drops, 1);
  again(0);
  assert_int_equal(holds(), 0);
  succeed(request);
  end();
}

/* Frames that come too late, or are of something else, change nothing. */
static void test_ignored(void **state) {
  (void)state;
  static uint8_t weights[BYTES];
  mlfab_buf buf = {1, 0, weights, NARROW};
  mlfab_request ordinary;
  mlfab_error error;
  begin();
  mlfab__request *request = ask_all();
  uint64_t id = request->id;
  list(0, 0);
  tell_as(0, id + 1, 1, 0, nruns, MLFAB__MODEL_LAST, files[0], 64);
  tell_as(0, 0, 1, 0, nruns, MLFAB__MODEL_LAST, files[0], 64);
  tell_as(0, id, 0, 0, nruns, MLFAB__MODEL_LAST, files[0], 64);
  tell_as(0, id, 2, 0, nruns, MLFAB__MODEL_LAST, files[0], 64);
  assert_int_equal(holds(), 0);
  tell(0, 0, 0, nruns, MLFAB__MODEL_LAST);
  tell(0, 0, 0, nruns, MLFAB__MODEL_LAST);
  tell(0, 0, 0, nruns, 0);
  assert_int_equal(holds(), 1);
  assert_int_equal(request->done, 0);
  tell_all(1, 1);
  tell(1, 1, 0, nruns, MLFAB__MODEL_LAST);
  assert_int_equal(holds(), 2);
  look_all();
  give_up();
  tell(1, 1, 0, nruns, MLFAB__MODEL_LAST);
  assert_int_equal(mlfab__worker_pull(&f.worker, &buf, 1, NULL, f.now, &ordinary, &error), 0);
  for (uint32_t s = 0; s < SERVERS; s++) {
    list(s, 0);
    tell_as(s, ordinary, 0, 0, nruns, MLFAB__MODEL_LAST, files[0], 64);
    tell_as(s, ordinary, 1, 0, nruns, MLFAB__MODEL_LAST, files[0], 64);
  }
  assert_int_equal(mlfab__request_find(&f.requests, ordinary)->done, 0);
  assert_int_equal(holds(), 0);
  assert_int_equal(f.drops, 0);
  end();
}

/* --- links and withdrawals --- */

static void test_link_before(void **state) {
  (void)state;
  for (int same = 0; same < 2; same++) {
    begin();
    mlfab__request *request = ask_all();
    list(0, 0);
    tell(0, 0, 0, nruns - 1, 0);
    assert_int_equal(holds(), 1);
    if (same)
      greet(0); /* a HELLO_ACK on the same link */
    else
      again(0);
    assert_int_equal(holds(), 0);
    assert_int_equal(count(0, MLFAB__PULL_CANCEL), 1);
    assert_int_equal(count(0, MLFAB__PULL), 2);
    /* What the cancelled one told is void. */
    tell_as(0, request->id, 1, 0, nruns, MLFAB__MODEL_LAST, files[0], 64);
    assert_int_equal(holds(), 0);
    succeed(request);
    assert_int_equal(f.drops, 0);
    end();
  }
}

static void test_link_after(void **state) {
  (void)state;
  for (int same = 0; same < 2; same++) {
    for (int ends = 0; ends < 3; ends++) {
      begin();
      mlfab__request *request = ask_all();
      tell_all(0, 0);
      if (same)
        greet(0);
      else
        again(0);
      assert_int_equal(holds(), 1);
      assert_int_equal(count(0, MLFAB__PULL), 1);
      assert_int_equal(count(0, MLFAB__PULL_CANCEL), 0);
      if (ends == 0) {
        tell_all(1, 1);
        assert_int_equal(request->done, 1);
        look_all();
        give_up();
      } else {
        int code = ends == 1 ? MLFAB_ERR_TIMEOUT : MLFAB_ERR_CANCELLED;
        mlfab__worker_withdraw(&f.worker, request, code, f.now);
        assert_int_equal(request->result.status, code);
        /* Both have to know: one has a view, the other a pull. */
        for (uint32_t s = 0; s < SERVERS; s++) assert_int_equal(count(s, MLFAB__PULL_CANCEL), 1);
        tell_all(1, 1);
      }
      assert_int_equal(holds(), 0);
      assert_int_equal(f.drops, 0);
      end();
    }
  }
}

static void test_dead(void **state) {
  (void)state;
  for (uint32_t dead = 0; dead < SERVERS; dead++) {
    begin();
    mlfab__request *request = ask_all();
    tell_all(0, 0);
    mlfab__worker_lost(&f.worker, dead, f.now);
    mlfab__worker_dead(&f.worker, dead, f.now);
    if (dead == 1) {
      assert_int_equal(request->result.status, MLFAB_ERR_PEER_DEAD);
      assert_int_equal(count(0, MLFAB__PULL_CANCEL), 1);
    } else {
      tell_all(1, 1);
      assert_int_equal(request->result.status, 0);
      look_all();
      give_up();
    }
    assert_int_equal(request->done, 1);
    assert_int_equal(holds(), 0);
    end();
  }
}

static void test_renumbered(void **state) {
  (void)state;
  begin();
  mlfab__request *request = ask_all();
  list(0, 0);
  tell(0, 0, 0, 1, 0);
  mlfab__pull_renumber(&f.worker, 0, 0);
  assert_int_equal(holds(), 0);
  assert_int_equal(count(0, MLFAB__PULL_CANCEL), 1);
  assert_int_equal(count(0, MLFAB__PULL), 2);
  tell_as(0, request->id, 1, 1, nruns - 1, 0, files[0], 64);
  assert_int_equal(holds(), 0);
  succeed(request);
  end();
}

/* Slices move: the servers end what they have of the view, and are asked anew. */
static void test_moved(void **state) {
  (void)state;
  for (uint32_t told = 0; told < 3; told++) {
    begin();
    mlfab__request *request = ask_all();
    uint32_t owners[SLICES];
    if (told > 0) tell_all(0, 0);
    if (told > 1) {
      list(1, 1);
      tell(1, 1, 0, 1, 0);
    }
    for (uint32_t i = 0; i < SLICES; i++) owners[i] = !f.worker.layout.slices[i].server || i == 0;
    mlfab__layout_assign(&f.worker.layout, owners);
    mlfab__pull_recut(&f.worker, f.now);
    assert_int_equal(holds(), 0);
    for (uint32_t s = 0; s < SERVERS; s++) {
      assert_int_equal(count(s, MLFAB__PULL_CANCEL), 1);
      mlfab__pull_again(&f.worker, s);
      assert_int_equal(count(s, MLFAB__PULL_CANCEL), 1);
      assert_int_equal(count(s, MLFAB__PULL), 2);
    }
    succeed(request);
    assert_int_equal(f.drops, 0);
    end();
  }
}

/* All slices leave a server that had told; then the pull is withdrawn, or goes on. */
static void test_moved_away(void **state) {
  (void)state;
  static const uint32_t owners[SLICES] = {1, 1, 1, 1};
  begin();
  mlfab__request *request = ask_all();
  tell_all(0, 0);
  mlfab__layout_assign(&f.worker.layout, owners);
  mlfab__pull_recut(&f.worker, f.now);
  for (uint32_t s = 0; s < SERVERS; s++) mlfab__pull_again(&f.worker, s);
  assert_int_equal(count(0, MLFAB__PULL), 1);
  assert_int_equal(count(0, MLFAB__PULL_CANCEL), 1);
  tell_all(1, 2);
  assert_int_equal(request->done, 1);
  assert_int_equal(holds(), 1);
  look_all();
  give_up();
  end();
}

/* --- copies --- */

static void send_copy(mlfab__request *request) {
  for (uint32_t s = 0; s < SERVERS; s++) {
    uint32_t n = f.pull[s].segments;
    assert_int_equal(f.pull[s].flags, 0);
    for (uint32_t i = 0; i < n; i++) {
      uint64_t at = f.segments[s][i].offset, stop = at + f.segments[s][i].bytes;
      while (at < stop) {
        uint8_t meta[128];
        uint32_t slice = mlfab__layout_slice_at(&f.worker.layout, at);
        const mlfab__slice *in = &f.worker.layout.slices[slice];
        uint64_t bytes = mlfab__min(stop, in->offset + in->bytes) - at;
        int last = i == n - 1 && at + bytes == stop;
        mlfab__model m = {request->id, at, bytes, 3, 3, slice, last ? MLFAB__MODEL_LAST : 0, 1};
        assert_int_equal(request->done, 0);
        from_server(s, MLFAB__MODEL, meta, mlfab__encode_model(meta, &m), model + at,
                    (uint32_t)bytes);
        at += bytes;
      }
    }
  }
  assert_int_equal(request->done, 1);
  assert_int_equal(request->result.status, 0);
  assert_int_equal(out.copied, 1);
  assert_int_equal(out.nparts, 3);
  look_all();
  give_up();
  assert_int_equal(holds(), 0);
  assert_int_equal(f.drops, 0);
}

static void refuse(uint32_t server, int code) {
  uint8_t meta[512];
  mlfab__pull_fail fail;
  memset(&fail, 0, sizeof fail);
  fail.request = f.pull[server].request;
  fail.code = code;
  from_server(server, MLFAB__PULL_FAIL, meta, mlfab__encode_pull_fail(meta, &fail), NULL, 0);
}

static void test_copies(void **state) {
  (void)state;
  enum { NOT_HELD, OTHER_FILE, NO_TABLE, REFUSED, BOTH_REFUSED, SOME_NOT_HELD, LATE, HOWS };
  static uint8_t elsewhere[64];
  for (int how = 0; how < HOWS; how++) {
    begin();
    mlfab__request *request = ask_all();
    if (how == NO_TABLE) mlfab__worker_share(&f.worker, NULL, NULL);
    if (how == REFUSED || how == LATE) tell_all(1, 1);
    list(0, 0);
    misnumber = how == OTHER_FILE;
    if (how == SOME_NOT_HELD) tell(0, 0, 0, 1, 0);
    if (how == REFUSED || how == BOTH_REFUSED) {
      refuse(0, MLFAB_ERR_UNSUPPORTED);
    } else {
      tell_as(0, request->id, 1, 0, nruns, MLFAB__MODEL_LAST,
              how == NO_TABLE || how == OTHER_FILE ? files[0] : elsewhere, 64);
    }
    misnumber = 0;
    if (how == BOTH_REFUSED) refuse(1, MLFAB_ERR_UNSUPPORTED);
    assert_int_equal(holds(), 0);
    assert_int_equal(request->done, 0);
    for (uint32_t s = 0; s < SERVERS; s++) {
      assert_int_equal(count(s, MLFAB__PULL_CANCEL), 1);
      assert_int_equal(count(s, MLFAB__PULL), 2);
    }
    if (how == LATE) {
      list(1, 1);
      tell_as(1, request->id, 1, 0, nruns, MLFAB__MODEL_LAST, files[1], 64);
      assert_int_equal(holds(), 0);
      again(1); /* which asks again for what a copy lacks */
      assert_int_equal(count(1, MLFAB__PULL), 3);
    }
    send_copy(request);
    end();
  }
}

static void test_refused(void **state) {
  (void)state;
  begin();
  mlfab__request *request = ask_all();
  tell_all(0, 0);
  refuse(1, MLFAB_ERR_LIMIT);
  assert_int_equal(request->result.status, MLFAB_ERR_LIMIT);
  assert_int_equal(count(0, MLFAB__PULL_CANCEL), 1);
  assert_int_equal(holds(), 0);
  /* A copy that is withdrawn frees its memory. */
  request = ask_all();
  refuse(1, MLFAB_ERR_UNSUPPORTED);
  send_model(0, f.segments[0][0].offset, 64);
  mlfab__worker_withdraw(&f.worker, request, MLFAB_ERR_TIMEOUT, f.now);
  assert_int_equal(request->result.status, MLFAB_ERR_TIMEOUT);
  for (int i = 0; i < MLFAB_VIEWS_MAX; i++) assert_non_null(ask_all());
  end();
}

/* Every allocation fails once, from the call on: an error, and nothing is held. */
static void test_memory(void **state) {
  (void)state;
  for (int copies = 0; copies < 2; copies++) {
    uint64_t base = 0;
    int succeeded = 0;
    for (uint64_t k = 0; !succeeded; k++) {
      begin();
      base = f.env.allocations;
      f.fail_at = base + k;
      mlfab__request *request = ask_all();
      for (uint32_t s = 0; request && !request->done && s < SERVERS; s++) {
        if (copies && s == 0) refuse(0, MLFAB_ERR_UNSUPPORTED);
        if (!copies) tell_all(s, s);
      }
      if (request && !request->done && f.drops) {
        assert_int_equal(f.dropped, MLFAB_ERR_MEMORY);
        mlfab__worker_withdraw(&f.worker, request, MLFAB_ERR_TIMEOUT, f.now);
      } else if (request && request->done && request->result.status) {
        assert_int_equal(request->result.status, MLFAB_ERR_MEMORY);
      } else if (request && copies) {
        uint32_t n = (uint32_t)f.drops;
        assert_int_equal(n, 0);
        if (f.env.allocations < f.fail_at) {
          send_copy(request);
          succeeded = 1;
        } else {
          mlfab__worker_withdraw(&f.worker, request, MLFAB_ERR_TIMEOUT, f.now);
        }
      } else if (request) {
        look_all();
        give_up();
        succeeded = 1;
      }
      assert_int_equal(holds(), 0);
      end();
      assert_true(k < 100);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_two_servers),   cmocka_unit_test(test_limit),
      cmocka_unit_test(test_random),        cmocka_unit_test(test_wrong),
      cmocka_unit_test(test_not_asked_for), cmocka_unit_test(test_too_many_runs),
      cmocka_unit_test(test_ignored),       cmocka_unit_test(test_link_before),
      cmocka_unit_test(test_link_after),    cmocka_unit_test(test_dead),
      cmocka_unit_test(test_renumbered),    cmocka_unit_test(test_moved),
      cmocka_unit_test(test_moved_away),    cmocka_unit_test(test_copies),
      cmocka_unit_test(test_refused),       cmocka_unit_test(test_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
