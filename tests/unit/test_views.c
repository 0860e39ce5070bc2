/* test_views.c - core/lend/views.c: a server's views against a literal model. Memory that processes share, the workers and their
 * links are played: a reader sees the pages of the files that it was told of, as they were when they were renewed, or as they are.
 *
 * Whatever is pushed, released and lost in whatever order, each reader that has not said that it is done sees the bytes of the
 * moment of its pull; and when all are done, no block is lost. */
#include "core/base/rng.h"
#include "core/replica/keeper.h"
#include "core/kernels/kernels.h"
#include "core/reshard/reshard.h"
#include "core/lend/lend_wire.h"
#include "core/lend/views.h"

#include "../testing.h"

enum {
  W = 3,
  PAGE = 4096,
  AREAS = 16,
  GENERATIONS = 400, /* of a page */
  SLICE = 131072,
  SLICES = 4,
  BYTES = SLICE * SLICES,
  BLOCK = 65536,
  READERS = 256,
  RUNS = 8192
};

/* --- memory that is shared --- */

typedef struct page {
  uint64_t file;
  uint32_t generation;
  uint8_t **kept; /* what it had at the end of each generation */
} page;

typedef struct area {
  uint8_t *at; /* NULL: there is none */
  uint64_t bytes, stride;
  page *pages;
  int freed, guarded;
} area;

static struct shared {
  area areas[AREAS];
  uint32_t n;
  uint64_t files, pages_per_file; /* of a new area; 0: all of it is one file */
  uint64_t renewed;               /* bytes */
  int blind, nothing;             /* renewing keeps no old pages; there is no shared memory */
} shared;

static area *area_of(const void *at) {
  for (uint32_t i = 0; i < shared.n; i++) {
    area *a = &shared.areas[i];
    if (!a->freed && (uintptr_t)at - (uintptr_t)a->at < a->bytes) return a;
  }
  return NULL;
}

static void *shared_alloc(mlfab__shm_memory *memory, uint64_t bytes, int guarded) {
  (void)memory;
  if (shared.nothing) return NULL;
  assert_true(shared.n < AREAS);
  area *a = &shared.areas[shared.n++];
  a->bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  a->at = aligned_alloc(PAGE, a->bytes);
  a->pages = calloc(a->bytes / PAGE, sizeof *a->pages);
  a->guarded = guarded;
  assert_true(a->at && a->pages && guarded);
  for (uint64_t p = 0; p < a->bytes / PAGE; p++) {
    if (p == 0 || (shared.pages_per_file && p % shared.pages_per_file == 0)) shared.files++;
    a->pages[p].file = shared.files;
  }
  return a->at;
}

static void shared_release(mlfab__shm_memory *memory, void *at, int emptied) {
  (void)emptied;
  area *a = area_of(at);
  (void)memory;
  assert_true(a && a->at == at);
  a->freed = 1; /* who has mapped it may still read */
}

static uint64_t shared_file(mlfab__shm_memory *memory, const void *at, uint64_t *bytes_p) {
  const area *a = area_of(at);
  (void)memory;
  if (!a) return 0;
  uint64_t first = (uint64_t)((const uint8_t *)at - a->at), p = first / PAGE + 1;
  while (p < a->bytes / PAGE && a->pages[p].file == a->pages[first / PAGE].file) p++;
  *bytes_p = p * PAGE - first;
  return a->pages[first / PAGE].file;
}

static int shared_renew(mlfab__shm_memory *memory, const void *at, uint64_t bytes) {
  area *a = area_of(at);
  (void)memory;
  assert_non_null(a);
  uint64_t first = (uint64_t)((const uint8_t *)at - a->at);
  assert_true(bytes > 0 && bytes <= a->bytes - first);
  shared.files++;
  shared.renewed += bytes;
  for (uint64_t p = first / PAGE; p <= (first + bytes - 1) / PAGE; p++) {
    page *one = &a->pages[p];
    one->file = shared.files;
    if (shared.blind) continue;
    if (!one->kept) one->kept = calloc(GENERATIONS, sizeof *one->kept);
    assert_true(one->kept && one->generation < GENERATIONS);
    uint8_t *kept = malloc(PAGE);
    assert_non_null(kept);
    memcpy(kept, a->at + p * PAGE, PAGE);
    one->kept[one->generation++] = kept;
  }
  return 1;
}

static const mlfab__shm_memory_table table = {
    .alloc = shared_alloc, .release = shared_release, .file = shared_file, .renew = shared_renew};

/* All areas are freed. */
static void shared_end(void) {
  for (uint32_t i = 0; i < shared.n; i++) {
    area *a = &shared.areas[i];
    assert_true(a->freed);
    for (uint64_t p = 0; p < a->bytes / PAGE; p++) {
      for (uint32_t g = 0; g < a->pages[p].generation; g++) free(a->pages[p].kept[g]);
      free(a->pages[p].kept);
    }
    free(a->pages);
    free(a->at);
  }
  memset(&shared, 0, sizeof shared);
}

/* A failed test leaves nothing to the next. */
static int clean(void **state) {
  (void)state;
  memset(&shared, 0, sizeof shared);
  return 0;
}

#define CASE(name) TEST_WITH(name, clean, NULL)

/* --- readers --- */

typedef struct run {
  uint64_t offset, bytes;
  const uint8_t *at;
  uint32_t *generations; /* of its pages */
} run;

typedef struct reader {
  uint64_t request; /* 0: free */
  uint32_t worker, nruns;
  int lost;
  run *runs;
  uint8_t *expected;
} reader;

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__server server;
  uint32_t generation[W], incarnation[W], drops;
  uint64_t seq[W], request, bytes, version;
  mlfab__pull_fail fail; /* the last one; request 0: none */
  int ready[W];
  float *model, *update;
  reader readers[READERS];
  mlfab__frame_out out;
  mlfab__view told; /* of the last frame */
  mlfab__view_run runs[MLFAB__VIEW_RUNS_MAX];
  uint8_t meta[MLFAB_META_MAX];
} fixture;

static fixture f;

static void post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)self, (void)peer;
  if (type == MLFAB__PULL_FAIL) assert_int_equal(mlfab__decode_pull_fail(meta, bytes, &f.fail), 0);
}
static void ready(void *self, uint32_t peer) {
  (void)self;
  f.ready[peer] = 1;
}
static void drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer, (void)text;
  assert_int_equal(code, MLFAB_ERR_FRAME);
  f.drops++;
}
static void detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static void event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                  int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

static mlfab__at on(uint32_t worker) { return (mlfab__at){MLFAB__LINK_WORKER, worker, 1000}; }

static void hello(uint32_t worker, uint32_t incarnation) {
  mlfab__hello h = {worker, incarnation, MLFAB_ROLE_WORKER, 0, 0, 0, 0, 0};
  mlfab__hello_ack ack;
  assert_int_equal(mlfab__server_hello(&f.server, worker, &h, &ack, 1000), 0);
  f.generation[worker] = ack.generation;
  f.incarnation[worker] = incarnation;
  f.seq[worker] = ack.top + 1;
}

static void frame(uint32_t worker, uint8_t type, uint32_t bytes, const void *bulk,
                  uint32_t bulk_bytes) {
  mlfab__frame_in in = {type, bytes, bulk_bytes, f.meta, bulk};
  mlfab__server_frame(&f.server, on(worker), &in);
}

static void begin(uint64_t bytes, uint32_t slices, uint32_t block, int shares) {
  mlfab__port port = {&f, post, ready, drop, detach, event, NULL, NULL};
  mlfab__tensor_info info = {0, MLFAB_F32, bytes / 4};
  uint8_t infos[MLFAB__TENSOR_INFO_BYTES];
  mlfab__define d = {.tensors = 1};
  memset(&f, 0, sizeof f);
  f.bytes = bytes;
  f.model = calloc(1, bytes);
  f.update = calloc(1, bytes);
  assert_true(f.model && f.update);
  assert_int_equal(mlfab__env_init(&f.env, NULL), 0);
  mlfab_config_init(&f.config);
  f.config.workers = W;
  f.config.servers = 1;
  f.config.block_bytes = block;
  f.config.eager_bytes =
      bytes < 1 << 20 ? (uint32_t)bytes : 1 << 20; /* most push all of it at once */
  f.config.chunk_bytes = 65536;
  f.config.heartbeat_ns = 500000000;
  f.config.model_max_bytes = 1 << 30;
  assert_int_equal(mlfab__server_init(&f.server, &f.env, &f.config, 0, &port, &f.stats), 0);
  mlfab__reshard_server_init(&f.server);
  if (shares >= 0) assert_int_equal(mlfab__views_attach(&f.server), 0);
  if (shares > 0) mlfab__views_share(&f.server, &table, NULL);
  for (uint32_t w = 0; w < W; w++) hello(w, 1);
  mlfab__encode_tensor_info(infos, &info);
  d.options.slices = slices;
  d.options.consistency.kind = MLFAB_SYNC_ASYNC;
  frame(0, MLFAB__DEFINE, mlfab__encode_define(f.meta, &d), infos, sizeof infos);
  assert_int_equal(f.server.phase, MLFAB__MODEL_STANDS);
  assert_int_equal(f.server.store.nslices, slices);
  for (uint32_t w = 0; w < W; w++) hello(w, 1); /* which renews the credit */
}

static void forget(reader *r) {
  for (uint32_t i = 0; i < r->nruns; i++) free(r->runs[i].generations);
  free(r->runs);
  free(r->expected);
  memset(r, 0, sizeof *r);
}

static void end(void) {
  for (uint32_t i = 0; i < READERS; i++) forget(&f.readers[i]);
  mlfab__server_free(&f.server);
  assert_int_equal(f.env.bytes, 0);
  free(f.model);
  free(f.update);
  shared_end();
}

/* Only the model has blocks. */
static void assert_no_block_is_lost(void) {
  const mlfab__store *store = &f.server.store;
  assert_int_equal(f.server.lending->views, 0);
  assert_int_equal(f.server.lending->lost, 0);
  assert_null(f.server.lending->retired);
  assert_int_equal(store->free_count, store->nblocks - store->positions);
}

static void end_whole(void) {
  assert_no_block_is_lost();
  end();
}

static void settle(void) {
  for (int i = 0; i < 8; i++) mlfab__server_tick(&f.server, 1000);
}

/* An update of these segments: element i grows by 1 + i % 7. */
static void push(uint32_t worker, const mlfab__segment *segments, uint32_t n) {
  uint64_t version = UINT64_MAX; /* no delay */
  mlfab__push p = {.seq = f.seq[worker]++,
                   .members = 1,
                   .versions = 1,
                   .segments = n,
                   .generation = f.generation[worker],
                   .scale = 1.0};
  for (uint32_t i = 0; i < n; i++) {
    for (uint64_t k = 0; k < segments[i].bytes / 4; k++) {
      uint64_t element = segments[i].offset / 4 + k;
      f.update[p.bytes / 4 + k] = (float)(1 + element % 7);
      f.model[element] += f.update[p.bytes / 4 + k];
    }
    p.bytes += segments[i].bytes;
  }
  p.eager = (uint32_t)p.bytes;
  p.progress = p.seq - 1;
  uint64_t applied = f.stats.updates_applied;
  frame(worker, MLFAB__PUSH, mlfab__encode_push(f.meta, &p, segments, &version), f.update, p.eager);
  for (int i = 0; i < 8 && f.stats.updates_applied == applied; i++)
    mlfab__server_tick(&f.server, 1000);
  assert_int_equal(f.stats.updates_applied, applied + 1);
}

static void push_all(uint32_t worker) { push(worker, &(mlfab__segment){0, f.bytes}, 1); }

static void ask(uint32_t worker, uint64_t request, const mlfab__segment *segments, uint32_t n,
                uint32_t flags) {
  mlfab__pull pull = {request, f.seq[worker] - 1, 3, flags, n, 0};
  f.fail.request = 0;
  f.ready[worker] = 0;
  frame(worker, MLFAB__PULL, mlfab__encode_pull(f.meta, &pull, segments, NULL), NULL, 0);
}

static void cancel(uint32_t worker, uint64_t request) {
  mlfab__pull_cancel c = {request};
  frame(worker, MLFAB__PULL_CANCEL, mlfab__encode_pull_cancel(f.meta, &c), NULL, 0);
}

/* The link takes the next frame; `token`: its bulk is lent, and comes back at once. */
static int step(uint32_t worker) {
  memset(&f.out, 0, sizeof f.out);
  f.out.meta = f.meta;
  if (!mlfab__server_next(&f.server, on(worker), &f.out)) return 0;
  mlfab__server_taken(&f.server, on(worker), &f.out);
  if (f.out.token) mlfab__server_sent(&f.server, on(worker), f.out.token);
  if (f.out.type != MLFAB__VIEW) return 1;
  assert_int_equal(mlfab__decode_view(f.out.meta, f.out.meta_bytes, &f.told, f.runs), 0);
  assert_int_equal(f.told.ask, 3);
  assert_int_equal(f.out.bulk_bytes, MLFAB__VIEW_LEAST);
  assert_int_equal((uintptr_t)f.out.bulk % 8, 0);
  assert_true(f.told.runs > 0);
  uint64_t row, file = shared_file(NULL, f.out.bulk, &row);
  assert_true(file != 0 && f.told.file == file && row >= f.out.bulk_bytes);
  for (uint32_t i = 0; i < f.told.runs; i++) {
    const uint8_t *at = (const uint8_t *)(uintptr_t)((uintptr_t)f.out.bulk + f.runs[i].at);
    assert_true(shared_file(NULL, at, &row) == file && row >= f.runs[i].bytes);
  }
  return 1;
}

static void next_is(uint32_t worker, uint8_t type) {
  assert_int_equal(step(worker), 1);
  assert_int_equal(f.out.type, type);
}

/* A reader maps what the last frame tells. */
static void map(reader *r) {
  r->runs = realloc(r->runs, (r->nruns + f.told.runs) * sizeof *r->runs);
  assert_non_null(r->runs);
  for (uint32_t i = 0; i < f.told.runs; i++) {
    run *one = &r->runs[r->nruns++];
    one->offset = f.runs[i].offset;
    one->bytes = f.runs[i].bytes;
    one->at = (const uint8_t *)(uintptr_t)((uintptr_t)f.out.bulk + f.runs[i].at);
    const area *a = area_of(one->at);
    uint64_t first = (uint64_t)(one->at - a->at) / PAGE,
             last = ((uint64_t)(one->at - a->at) + one->bytes - 1) / PAGE;
    one->generations = malloc((last - first + 1) * sizeof *one->generations);
    assert_non_null(one->generations);
    for (uint64_t p = first; p <= last; p++) one->generations[p - first] = a->pages[p].generation;
  }
}

/* Its bytes are those of the moment of its pull, and all that it asked for. */
static void look(const reader *r) {
  for (uint32_t i = 0; i < r->nruns; i++) {
    const run *one = &r->runs[i];
    const area *a = shared.areas;
    while ((uintptr_t)one->at - (uintptr_t)a->at >= a->bytes) a++;
    uint64_t at = (uint64_t)(one->at - a->at), first = at / PAGE, done = 0;
    while (done < one->bytes) {
      const page *p = &a->pages[(at + done) / PAGE];
      uint32_t generation = one->generations[(at + done) / PAGE - first];
      uint64_t in = (at + done) % PAGE, n = mlfab__min(PAGE - in, one->bytes - done);
      const uint8_t *is = generation == p->generation ? one->at + done : p->kept[generation] + in;
      assert_memory_equal(is, r->expected + one->offset + done, n);
      done += n;
    }
  }
}

static void look_all(void) {
  for (uint32_t i = 0; i < READERS; i++)
    if (f.readers[i].request) look(&f.readers[i]);
}

static void push_and_look(uint32_t worker) {
  push_all(worker);
  look_all();
}

static reader *place(uint32_t worker, uint64_t request) {
  reader *r = f.readers;
  while (r->request) assert_true(++r < f.readers + READERS);
  r->request = request;
  r->worker = worker;
  r->expected = malloc(f.bytes);
  assert_non_null(r->expected);
  memcpy(r->expected, f.model, f.bytes);
  return r;
}

/* The whole view, or NULL when the pull has failed. */
static reader *view(uint32_t worker, const mlfab__segment *segments, uint32_t n) {
  uint64_t wanted = 0, got = 0;
  ask(worker, ++f.request, segments, n, MLFAB__PULL_VIEW);
  if (f.fail.request) {
    assert_int_equal(f.fail.request, f.request);
    assert_int_equal(step(worker), 0);
    return NULL;
  }
  assert_int_equal(f.ready[worker], 1);
  reader *r = place(worker, f.request);
  do {
    assert_int_equal(step(worker), 1);
    assert_int_equal(f.out.type, MLFAB__VIEW);
    assert_int_equal(f.told.request, r->request);
    map(r);
  } while (!(f.told.flags & MLFAB__MODEL_LAST));
  assert_int_equal(step(worker), 0);
  for (uint32_t i = 0; i < n; i++) wanted += segments[i].bytes;
  for (uint32_t i = 0; i < r->nruns; i++) got += r->runs[i].bytes;
  assert_int_equal(got, wanted);
  return r;
}

static reader *view_all(uint32_t worker) { return view(worker, &(mlfab__segment){0, f.bytes}, 1); }

static void no_view(uint32_t worker, int code) {
  assert_null(view_all(worker));
  assert_int_equal(f.fail.code, code);
}

static void release(reader *r) {
  cancel(r->worker, r->request);
  forget(r);
}

static void lose(uint32_t worker) {
  mlfab__server_lost(&f.server, worker, 1000);
  for (uint32_t i = 0; i < READERS; i++)
    if (f.readers[i].request && f.readers[i].worker == worker) f.readers[i].lost = 1;
}

/* --- single cases --- */

/* The server lends the bulks of a plain pull, so that a transport can refer to them. It does not lend to a link of this host what
 * is below 32 KiB, nor a model of 64 MiB when there is one worker. */
CASE(test_plain) {
  static const struct {
    uint32_t workers, bytes;
    int local, shares, lent;
  } cases[] = {{W, 65536, 1, 1, 1}, {W, 32764, 1, 1, 0}, {W, 32764, 0, 1, 1}, {W, 32764, 1, 0, 1},
               {1, 65536, 1, 1, 0}, {1, 65536, 0, 1, 1}, {1, 65536, 1, 0, 1}};
  for (size_t i = 0; i < MLFAB__COUNT(cases); i++) {
    mlfab__segment some = {0, cases[i].bytes};
    begin(cases[i].bytes < 32768 ? 8 << 20 : 64 << 20, SLICES, 1 << 20, cases[i].shares);
    f.server.peers[0].local = (uint8_t)cases[i].local;
    f.server.workers = cases[i].workers;
    ask(0, 1, &some, 1, 0);
    assert_int_equal(step(0), 1);
    assert_int_equal(f.out.bulk_bytes, cases[i].bytes);
    assert_int_equal(f.out.token != 0, cases[i].lent);
    f.server.workers = W;
    end_whole();
  }
}

CASE(test_limit) {
  begin(BYTES, SLICES, BLOCK, 1);
  reader *views[MLFAB_VIEWS_MAX];
  for (uint32_t i = 0; i < MLFAB_VIEWS_MAX; i++) {
    views[i] = view_all(1);
    assert_non_null(views[i]);
    assert_int_equal(f.told.version, 2 * i);
    push_all(0);
    push_and_look(2);
  }
  no_view(1, MLFAB_ERR_LIMIT);
  assert_non_null(view_all(2)); /* each worker has as many */
  look_all();
  release(views[2]);
  views[2] = view_all(1);
  assert_non_null(views[2]);
  look_all();
  for (uint32_t i = 0; i < READERS; i++)
    if (f.readers[i].request) release(&f.readers[i]);
  assert_no_block_is_lost();
  assert_int_equal(shared.renewed, 0);
  assert_int_equal(f.stats.pulls_answered, MLFAB_VIEWS_MAX + 2);
  end();
}

/* Frames in two files, cancelled or lost at each place. */
CASE(test_in_the_middle) {
  mlfab__segment all = {0, BYTES};
  for (int taken = 0; taken <= 8; taken++) {
    for (int how = 0; how < 3; how++) {
      shared.pages_per_file = BLOCK / PAGE;
      begin(BYTES, SLICES, BLOCK, 1);
      ask(1, 7, &all, 1, MLFAB__PULL_VIEW);
      for (int i = 0; i < taken; i++) {
        assert_int_equal(step(1), 1);
        assert_int_equal(f.told.flags, i == 7 ? MLFAB__MODEL_LAST : 0);
      }
      if (taken == 8) assert_int_equal(step(1), 0);
      if (how == 0) {
        cancel(1, 7);
        cancel(1, 7);
      } else {
        lose(1);
      }
      assert_int_equal(f.server.lending->lost, how > 0 && taken == 8);
      if (how == 2) hello(1, 1);
      assert_int_equal(step(1), 0);
      settle();
      assert_no_block_is_lost();
      /* Only what the worker knows all of can be read. */
      assert_int_equal(shared.renewed, how > 0 && taken == 8 ? BYTES : 0);
      if (how == 1) hello(1, 1);
      ask(1, 7, &all, 1, MLFAB__PULL_VIEW);
      assert_int_equal(step(1), 1);
      cancel(1, 7);
      assert_no_block_is_lost();
      assert_int_equal(f.drops, 0);
      end();
    }
  }
}

CASE(test_lost) {
  begin(BYTES, SLICES, BLOCK, 1);
  reader *lost[3], *other = view_all(2);
  for (uint32_t i = 0; i < 3; i++) {
    lost[i] = view_all(1);
    push_all(0);
  }
  lose(1);
  assert_int_equal(f.server.lending->lost, 3);
  assert_int_equal(shared.renewed, 0);
  for (uint32_t i = 0; i < 10; i++) push_all(0); /* with ticks, or without */
  look_all();
  settle();
  assert_int_equal(shared.renewed, 3 * BYTES);
  assert_int_equal(f.server.lending->views, 1);
  for (uint32_t i = 0; i < 10; i++) push_all(2);
  look_all();
  hello(1, 1);
  cancel(1, lost[0]->request); /* too late: no effect */
  release(other);
  end_whole();
}

/* A new view has to be a copy until the pages of a lost one are renewed; one of the same number is another. */
CASE(test_lost_places) {
  mlfab__segment all = {0, BYTES};
  begin(BYTES, SLICES, BLOCK, 1);
  for (uint32_t i = 0; i < MLFAB_VIEWS_MAX; i++) {
    view_all(1);
    push_all(0);
  }
  lose(1);
  hello(1, 2); /* another process, with the same numbers */
  f.request = 0;
  no_view(1, MLFAB_ERR_UNSUPPORTED);
  assert_int_equal(f.server.lending->lost, MLFAB_VIEWS_MAX);
  settle();
  assert_int_equal(shared.renewed, MLFAB_VIEWS_MAX * BYTES);
  f.request = 0;
  for (uint32_t i = 0; i < MLFAB_VIEWS_MAX; i++) {
    assert_non_null(view_all(1));
    push_and_look(0);
  }
  no_view(1, MLFAB_ERR_LIMIT);
  cancel(1, MLFAB_VIEWS_MAX);
  lose(1);
  hello(1, 3);
  /* The lost view 1 is in front of the new one. */
  ask(1, 1, &all, 1, MLFAB__PULL_VIEW);
  assert_int_equal(step(1), 1);
  reader *r = place(1, 1);
  map(r);
  assert_int_equal(f.told.flags, MLFAB__MODEL_LAST);
  settle();
  for (uint32_t i = 0; i < 10; i++) push_all(0);
  look_all();
  assert_int_equal(f.server.lending->views, 1);
  cancel(1, 1);
  end_whole();
}

CASE(test_same_number) {
  mlfab__segment all = {0, BYTES};
  begin(BYTES, SLICES, BLOCK, 1);
  view_all(1);
  lose(1);
  hello(1, 1);
  /* Lost and not renewed yet: the worker has not heard of it, and asks again. */
  ask(1, f.request, &all, 1, MLFAB__PULL_VIEW);
  push_all(0);
  assert_int_equal(step(1), 1);
  assert_int_equal(f.told.flags, MLFAB__MODEL_LAST);
  settle();
  assert_int_equal(f.server.lending->views, 1);
  assert_int_equal(f.server.lending->lost, 0);
  look_all();
  /* The server refuses a second PULL with the number of a view that is out. */
  ask(1, f.request, &all, 1, MLFAB__PULL_VIEW);
  assert_int_equal(f.drops, 1);
  ask(1, f.request, &all, 1, 0);
  assert_int_equal(f.drops, 2);
  assert_int_equal(step(1), 0);
  cancel(1, f.request);
  end_whole();
}

CASE(test_left) {
  for (int lost = 0; lost < 2; lost++) {
    begin(BYTES, SLICES, BLOCK, 1);
    for (uint32_t i = 0; i < MLFAB_VIEWS_MAX; i++) view_all(1), push_all(0);
    if (lost) mlfab__server_lost(&f.server, 1, 1000);
    mlfab__server_gone(&f.server, 1, 1, 1000);
    push_all(0);
    settle();
    assert_no_block_is_lost();
    /* Views that were lost before may be another process's. */
    assert_int_equal(shared.renewed, lost ? MLFAB_VIEWS_MAX * BYTES : 0);
    shared.renewed = 0;
    hello(1, 2);
    view_all(1);
    mlfab__server_gone(&f.server, 1, 0, 1000); /* it is dead, which may be an error */
    assert_int_equal(f.server.lending->lost, 1);
    settle();
    assert_no_block_is_lost();
    assert_int_equal(shared.renewed, BYTES);
    end();
  }
}

/* One view a tick, and of a large one 64 MiB. */
CASE(test_budget) {
  enum { LARGE = 80 << 20, TICK = 64 << 20 };
  shared.blind = 1;
  begin(LARGE, 8, 1 << 20, 1);
  assert_non_null(view_all(1));
  mlfab__segment part = {4096 + 4, 1 << 20};
  assert_non_null(view(1, &part, 1));
  lose(1);
  uint64_t renewed[] = {TICK, LARGE, LARGE + (2 << 20)};
  for (uint32_t i = 0; i < MLFAB__COUNT(renewed); i++) {
    assert_int_equal(f.server.lending->lost, i < 2 ? 2 : 1);
    mlfab__server_tick(&f.server, 1000);
    assert_int_equal(shared.renewed, renewed[i]); /* whole blocks */
  }
  end_whole();
}

/* Blocks of whole pages stay in one file, so that later views are no copies. */
CASE(test_partial_and_lost) {
  begin(BYTES, SLICES, BLOCK, 1);
  mlfab__segment part = {40, 3 * BLOCK};
  assert_non_null(view(1, &part, 1));
  push_all(0);
  lose(1);
  settle();
  for (uint32_t i = 0; i < 5; i++) {
    assert_non_null(view_all(2));
    push_and_look(0);
    for (uint32_t r = 0; r < READERS; r++)
      if (f.readers[r].request && !f.readers[r].lost) release(&f.readers[r]);
  }
  end_whole();
}

/* More runs than a frame has. */
CASE(test_many_runs) {
  enum { N = 1500, SMALL = 64, AT = 1 << 18 };
  static mlfab__segment odd[N];
  begin(BYTES, 1, SMALL, 1);
  for (uint32_t i = 0; i < N; i++) odd[i] = (mlfab__segment){AT + 2 * SMALL * i, SMALL};
  reader *before = view_all(2); /* so that blocks are not written in place */
  push(0, odd, N);
  reader *r = view_all(1);
  assert_non_null(r);
  assert_true(r->nruns > 2 * MLFAB__VIEW_RUNS_MAX && r->nruns < RUNS);
  push_and_look(0);
  /* Without a stretch of 32 KiB no transport refers to it. */
  mlfab__segment last = {AT, MLFAB__VIEW_LEAST};
  assert_null(view(2, &last, 1));
  assert_int_equal(f.fail.code, MLFAB_ERR_UNSUPPORTED);
  last.bytes = MLFAB__VIEW_LEAST + 4;
  assert_null(view(2, &last, 1));
  release(before);
  release(r);
  end_whole();
}

CASE(test_refused) {
  mlfab__segment all = {0, BYTES}, beyond = {0, BYTES + 4};
  begin(BYTES, SLICES, BLOCK, 1);
  uint64_t since[SLICES] = {1, 1, 1, 1};
  uint32_t drops = 0;
  for (uint32_t flags = 2; flags != 0; flags <<= 1) {
    ask(1, 1, &all, 1, flags);
    ask(1, 1, &all, 1, flags | MLFAB__PULL_VIEW);
    assert_int_equal(f.drops, drops += 2);
  }
  mlfab__pull pull = {1, 0, 1, MLFAB__PULL_VIEW, 1, SLICES};
  frame(1, MLFAB__PULL, mlfab__encode_pull(f.meta, &pull, &all, since), NULL, 0);
  assert_int_equal(f.drops, ++drops);
  ask(1, 0, &all, 1, MLFAB__PULL_VIEW);
  assert_int_equal(f.drops, ++drops);
  ask(1, 1, &beyond, 1, MLFAB__PULL_VIEW);
  assert_int_equal(f.drops, ++drops);
  assert_no_block_is_lost();
  /* Nothing: an ordinary answer. */
  ask(1, 1, NULL, 0, MLFAB__PULL_VIEW);
  next_is(1, MLFAB__MODEL);
  cancel(2, 99);
  assert_int_equal(f.drops, drops);
  end();
}

/* A server that was built without views refuses one, and its blocks are not in a slab. */
CASE(test_without) {
  mlfab__segment all = {0, BYTES};
  begin(BYTES, SLICES, BLOCK, -1);
  push_all(0);
  no_view(1, MLFAB_ERR_UNSUPPORTED);
  ask(1, 99, &all, 1, 0);
  next_is(1, MLFAB__MODEL);
  assert_memory_equal(f.out.bulk, f.model, f.out.bulk_bytes);
  mlfab__server_sent(&f.server, on(1), f.out.token);
  lose(1);
  settle();
  assert_null(f.server.store.slab);
  end();
}

CASE(test_not_shared) {
  for (int how = 0; how < 2; how++) {
    shared.nothing = how;
    begin(BYTES, SLICES, BLOCK, how); /* without a table; without descriptors */
    no_view(1, MLFAB_ERR_UNSUPPORTED);
    mlfab__segment all = {0, BYTES};
    ask(1, f.request, &all, 1, 0); /* which the worker does then */
    next_is(1, MLFAB__MODEL);
    cancel(1, f.request);
    end_whole();
  }
}

/* The pages of one block may belong to two files: then the view has two runs of it. No transport refers to small parts. */
CASE(test_block_in_two_files) {
  shared.pages_per_file = 3 * BLOCK / PAGE + 4;
  begin(BYTES, SLICES, BLOCK, 1);
  mlfab__segment part = {2 * BLOCK - 40, 2 * BLOCK};
  reader *all = view_all(1), *some = view(2, &part, 1);
  assert_true(all && some);
  assert_int_equal(all->nruns, 3); /* files */
  push_and_look(0);
  release(all);
  assert_non_null(view_all(1));
  push(0, &part, 1);
  look_all();
  lose(1);
  settle(); /* which renews whole blocks */
  push_and_look(0);
  release(some);
  end_whole();
  shared.pages_per_file = MLFAB__VIEW_LEAST / PAGE;
  begin(BYTES, SLICES, BLOCK, 1);
  no_view(1, MLFAB_ERR_UNSUPPORTED);
  end_whole();
}

/* --- commits that are hidden --- */

static enum mlfab__shows showing;
static enum mlfab__shows keeper_shows(const mlfab__server *server) {
  (void)server;
  return showing;
}
static int keeper_may(mlfab__server *server, const mlfab__commit *commit) {
  (void)server, (void)commit;
  return 1;
}
static void keeper_committed(mlfab__server *server, const mlfab__commit *commit) {
  (void)server, (void)commit;
}
static int keeper_defers(mlfab__server *server, uint32_t worker, uint32_t flags,
                         const mlfab__push_ack *ack) {
  (void)server, (void)worker, (void)flags, (void)ack;
  return 0;
}

CASE(test_hidden) {
  static const mlfab__server_keeper keeper = {.may = keeper_may,
                                              .committed = keeper_committed,
                                              .defers = keeper_defers,
                                              .shows = keeper_shows};
  mlfab__segment all = {0, BYTES};
  for (int limit = 0; limit < 2; limit++) {
    begin(BYTES, SLICES, BLOCK, 1);
    for (int i = 0; limit && i < MLFAB_VIEWS_MAX; i++) view_all(1);
    f.server.keeper = &keeper;
    for (int hides = 0; hides < 2; hides++) {
      showing = hides ? MLFAB__SHOWS_NOTHING : MLFAB__SHOWS_PINNED;
      push_all(0);
      ask(1, 70 + (uint64_t)hides, &all, 1, MLFAB__PULL_VIEW);
      assert_int_equal(step(1), 0);
    }
    f.ready[1] = 0;
    showing = MLFAB__SHOWS_ALL;
    mlfab__keeper_offer(&f.server);
    if (limit) {
      assert_int_equal(f.fail.code, MLFAB_ERR_LIMIT);
      assert_null(f.server.serve.first);
    } else {
      assert_int_equal(f.ready[1], 1);
      showing = MLFAB__SHOWS_PINNED; /* the next commit: what is pinned goes */
      push_all(0);
      for (uint64_t request = 70; request < 72; request++) {
        assert_int_equal(step(1), 1);
        assert_int_equal(f.told.request, request);
        assert_int_equal(f.told.version, 2);
        assert_int_equal(f.told.flags, MLFAB__MODEL_LAST);
        cancel(1, request);
      }
    }
    f.server.keeper = NULL;
    end();
  }
}

/* --- the store is retired --- */

static void move(uint32_t step_, uint32_t attempt) {
  uint32_t owners[SLICES] = {0, 0, 0, 0};
  uint8_t meta[256];
  mlfab__move m = {attempt, step_, 0, step_ == MLFAB__MOVE_PREPARE ? SLICES : 0};
  mlfab__frame_in in = {MLFAB__MOVE, mlfab__encode_move(meta, &m, owners), 0, meta, NULL};
  assert_int_equal(mlfab__reshard_server_move(&f.server, &in, 1000), 0);
  mlfab__reshard_server_check(&f.server);
}

/* A new store, although all slices stay. */
static void renew_store(uint32_t attempt) {
  f.server.move.across = (mlfab__port){&f, post, ready, drop, detach, event, NULL, NULL};
  move(MLFAB__MOVE_PREPARE, attempt);
  move(MLFAB__MOVE_SEND, attempt);
  move(MLFAB__MOVE_INSTALL, attempt);
  assert_int_equal(f.server.epoch, attempt);
  for (uint32_t w = 0; w < W; w++) {
    mlfab__hello_ack ack;
    mlfab__server_hello_ack(&f.server, w, 3, &ack); /* which renews the credit */
    f.generation[w] = f.server.peers[w].generation;
  }
}

CASE(test_retired) {
  /* Released from the first, or from the last; the link is lost; or never. */
  for (int how = 0; how < 4; how++) {
    begin(BYTES, SLICES, BLOCK, 1);
    reader *views[3] = {0};
    push_all(0);
    for (uint32_t i = 0; i < 3; i++) {
      views[i] = view_all(1);
      assert_non_null(views[i]);
      /* The present blocks are read, or former ones. */
      if (i == 1) push_all(0);
      look_all();
      renew_store(i + 2);
      for (int k = 0; k < 6; k++) push_and_look(0);
    }
    for (uint32_t i = 0; i < 3 && how < 2; i++) {
      release(views[how ? 2 - i : i]);
      push_and_look(0);
    }
    if (how == 2) {
      lose(1);
      settle();
      push_and_look(0);
      assert_int_equal(shared.renewed, 3 * BYTES);
    }
    if (how < 3) assert_no_block_is_lost();
    end();
  }
}

/* The model is dropped while views are out. */
CASE(test_model_dropped) {
  for (int how = 0; how < 2; how++) {
    begin(BYTES, SLICES, BLOCK, 1);
    reader *r = view_all(1);
    push_all(0);
    reader *s = view_all(2);
    push_all(0);
    mlfab__serve_resize(&f.server);
    mlfab__server_unbuild(&f.server);
    assert_int_equal(f.server.phase, MLFAB__NO_MODEL);
    look_all();
    if (how) {
      release(s);
      look_all();
      release(r);
      assert_null(f.server.lending->slab.areas);
      assert_null(f.server.lending->retired);
    }
    end();
  }
}

/* --- random cases --- */

static uint32_t random_segments(mlfab__rng *prng, mlfab__segment *segments) {
  uint32_t n = 0;
  for (uint32_t s = 0; s < SLICES; s++) {
    if (mlfab__rng_below(prng, 3) == 0) continue;
    mlfab__segment *last = n > 0 ? &segments[n - 1] : NULL;
    if (last && last->offset + last->bytes == (uint64_t)s * SLICE)
      last->bytes += SLICE;
    else
      segments[n++] = (mlfab__segment){(uint64_t)s * SLICE, SLICE};
  }
  if (n > 0 && mlfab__rng_below(prng, 3) == 0) {
    uint64_t cut = 4 * mlfab__rng_below(prng, 8000);
    segments[0].offset += cut;
    segments[0].bytes -= cut;
  }
  return n;
}

static reader *random_reader(mlfab__rng *prng) {
  reader *found = NULL;
  uint64_t n = 0;
  for (uint32_t i = 0; i < READERS; i++) {
    reader *r = &f.readers[i];
    if (r->request && !r->lost && mlfab__rng_below(prng, ++n) == 0) found = r;
  }
  return found;
}

static void random_link(mlfab__rng *prng, uint32_t worker) {
  uint64_t how = mlfab__rng_below(prng, 4);
  if (how > 0) {
    lose(worker);
    if (mlfab__rng_below(prng, 2)) mlfab__server_tick(&f.server, 1000);
    hello(worker, f.incarnation[worker] + (how == 1));
    return;
  }
  mlfab__server_gone(&f.server, worker, 1, 1000);
  for (uint32_t i = 0; i < READERS; i++)
    if (f.readers[i].request && f.readers[i].worker == worker && !f.readers[i].lost)
      forget(&f.readers[i]);
  hello(worker, f.incarnation[worker] + 1);
}

static void random_ask(mlfab__rng *prng, uint32_t worker, const mlfab__segment *segments,
                       uint32_t n) {
  if (mlfab__rng_below(prng, 4) > 0) {
    view(worker, segments, n);
    return;
  }
  ask(worker, ++f.request, segments, n, MLFAB__PULL_VIEW);
  for (uint64_t i = mlfab__rng_below(prng, 3); i > 0; i--) step(worker);
  if (mlfab__rng_below(prng, 2))
    cancel(worker, f.request);
  else
    lose(worker), hello(worker, f.incarnation[worker]);
}

CASE(test_random) {
  for (uint64_t seed = 1; seed <= (test_scale() < 1.0 ? 6 : 12); seed++) {
    mlfab__segment segments[SLICES];
    mlfab__rng prng;
    uint32_t attempt = 1;
    mlfab__rng_seed(&prng, seed);
    shared.pages_per_file = seed % 3 == 0 ? 2 * BLOCK / PAGE : seed % 3 == 1 ? BLOCK / PAGE : 0;
    begin(BYTES, SLICES, BLOCK, 1);
    for (int i = 0; i < 250; i++) {
      uint32_t worker = (uint32_t)mlfab__rng_below(&prng, W), n = random_segments(&prng, segments);
      uint64_t what = mlfab__rng_below(&prng, 40);
      reader *r = what < 12 ? random_reader(&prng) : NULL;
      if (r)
        release(r);
      else if (what < 24 && n > 0)
        random_ask(&prng, worker, segments, n);
      else if (what < 38 && n > 0)
        push(worker, segments, n);
      else if (what == 38)
        random_link(&prng, worker);
      else if (seed % 2 && attempt < 6 && mlfab__rng_below(&prng, 3) == 0)
        renew_store(++attempt);
      else
        mlfab__server_tick(&f.server, 1000);
      look_all();
    }
    for (reader *r; (r = random_reader(&prng)) != NULL;) release(r);
    settle();
    settle();
    push_and_look(0);
    assert_no_block_is_lost();
    assert_int_equal(f.drops, 0);
    end();
  }
}

TESTS(NULL, NULL)
