/* test_shm.c - behaviour of the shared memory transport that the conformance suite cannot see: its rings
 * under stress, hostile peers that write into them, sleepers, killed processes and what they leave behind.
 *
 * The test includes the file under test, so that it can write what only a hostile peer would write. No test
 * asserts a time: a lost wake-up is a wait that runs into its timeout of 60 s, and such waits are counted. */
#define mlfab_transport_shm test_shm_table
#include "../../transports/shm.c"
#undef mlfab_transport_shm

#include "../../transports/shm_lend.h"

#include "../../core/base/rng.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "../testing.h"

#if MLFAB_WITH_SHM

#define RING 2621440u
#define LINE 64u
#define CONTROL 65536u
#define SECONDS UINT64_C(1000000000)

static const mlfab_transport *table;

/* How many names of a folder have this word: other programs of the machine come and go in /dev/shm. */
static int entries(const char *folder, const char *word) {
  int n = 0;
  DIR *dir = opendir(folder);
  if (dir == NULL) return 0;
  for (const struct dirent *entry; (entry = readdir(dir)) != NULL;)
    n += strstr(entry->d_name, word) != NULL;
  closedir(dir);
  return n;
}

/* ---- two ends and their events ---- */

struct end {
  struct shm *t;
  uint32_t link;
  mlfab__env counted;
  mlfab__shm_memory *memory;
  char address[256];
};

static uint32_t neighbours; /* that the next end expects */

static void end_open(struct end *end, const char *listen) {
  mlfab_error error;
  void *self = NULL;
  memset(end, 0, sizeof *end);
  assert_int_equal(mlfab__env_init(&end->counted, NULL), 0);
  end->memory = mlfab__shm_memory_functions()->create(&end->counted);
  mlfab_transport_options options = {.size = sizeof options,
                                     .listen = listen,
                                     .job = "test",
                                     .env = &end->counted.hooks,
                                     .error = &error,
                                     .neighbours = neighbours,
                                     .memory = end->memory};
  assert_int_equal(table->open(&options, &self, end->address), 0);
  end->t = self;
}

static void end_close(struct end *end) {
  table->close(end->t);
  mlfab__shm_memory_functions()->destroy(&end->memory);
}

/* The next event, which must be of this kind. Sleeps in wait. */
static mlfab_io_event end_next(struct end *end, uint32_t kind) {
  mlfab_io_event event;
  while (!table->poll(end->t, &event)) {
    table->flush(end->t);
    table->wait(end->t, 60 * SECONDS);
  }
  if (event.kind != kind)
    fail_msg("event %u instead of %u: %s", event.kind, kind, event.text ? event.text : "");
  return event;
}

static struct end a, b; /* the two ends of most tests */

static void ends_open(void) {
  end_open(&a, "");
  end_open(&b, "");
}

/* One end calls another one. */
static void link_up(struct end *from, struct end *to, const char *address, uint64_t token) {
  assert_int_equal(table->connect(from->t, address, token), 0);
  to->link = end_next(to, MLFAB_IO_UP).link;
  mlfab_io_event up = end_next(from, MLFAB_IO_UP);
  assert_int_equal(up.token, token);
  from->link = up.link;
}

static void pair_open(void) {
  ends_open();
  link_up(&a, &b, b.address, 7);
}

static void pair_close(void) {
  end_close(&a);
  end_close(&b);
}

static int pair(void **state) {
  (void)state;
  pair_open();
  return 0;
}

static int unpair(void **state) {
  (void)state;
  pair_close();
  return 0;
}

static int expect_neighbours(void **state, uint32_t count) {
  (void)state;
  neighbours = count;
  return 0;
}

/* So many neighbours that rings are small. */
static int small(void **state) { return expect_neighbours(state, 129); }
static int large(void **state) { return expect_neighbours(state, 0); }
static int small_pair(void **state) { return small(state) | pair(state); }
static int small_unpair(void **state) { return unpair(state) | large(state); }

/* ---- frames whose bytes all follow from their number ---- */

static _Alignas(64) uint8_t source[MLFAB_BULK_MAX + 8192];

static void source_fill(void) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 5);
  for (size_t i = 0; i < sizeof source; i++) source[i] = (uint8_t)mlfab__rng_next(&prng);
}

struct shape {
  uint32_t meta, bulk, shift;
};

static struct shape shape_of(uint64_t number, uint32_t bulk_max) {
  uint64_t x = mlfab__mix(number + 1), y = mlfab__mix(x), z = mlfab__mix(y);
  static const uint32_t metas[4] = {0, 24, 300, 3000}, bulks[4] = {0, 200, 5000, UINT32_MAX};
  struct shape shape = {.meta = (uint32_t)(y % (metas[x & 3] + 1)),
                        .bulk = (uint32_t)(z % (mlfab__min(bulks[x >> 2 & 3], bulk_max) + 1)),
                        .shift = (uint32_t)(x >> 24 & 4095)};
  if ((x & 0xff00) == 0) shape.meta = MLFAB_META_MAX;
  if ((x & 0xff0000) == 0) shape.bulk = bulk_max;
  return shape;
}

static uint32_t head_of(uint64_t number, struct shape shape, uint8_t *head) {
  mlfab__header header = {.protocol = MLFAB_PROTOCOL,
                          .type = MLFAB__CHUNK,
                          .meta_bytes = shape.meta,
                          .bulk_bytes = shape.bulk,
                          .job = number};
  memcpy(head + 64, source + shape.shift, shape.meta);
  mlfab__wire_seal(head, &header, source + shape.shift);
  return 64 + shape.meta;
}

static int frame_send(struct end *end, uint64_t number, uint32_t bulk_max, uint64_t token) {
  static _Thread_local uint8_t head[64 + MLFAB_META_MAX];
  struct shape shape = shape_of(number, bulk_max);
  uint32_t head_bytes = head_of(number, shape, head);
  return table->send(end->t, end->link, head, head_bytes, shape.bulk ? source + shape.shift : NULL,
                     shape.bulk, token);
}

static void frame_compare(const mlfab_io_event *event, uint64_t number, uint32_t bulk_max) {
  static _Thread_local uint8_t head[64 + MLFAB_META_MAX];
  struct shape shape = shape_of(number, bulk_max);
  uint32_t head_bytes = head_of(number, shape, head);
  assert_int_equal(event->head_bytes, head_bytes);
  assert_int_equal(event->bulk_bytes, shape.bulk);
  assert_true(memcmp(event->head, head, head_bytes) == 0);
  assert_true(shape.bulk == 0 || (uintptr_t)event->bulk % 64 == 0);
  assert_true(shape.bulk == 0 || memcmp(event->bulk, source + shape.shift, shape.bulk) == 0);
}

static void frame_receive(struct end *end, uint64_t number, uint32_t bulk_max) {
  mlfab_io_event event = end_next(end, MLFAB_IO_FRAME);
  frame_compare(&event, number, bulk_max);
  table->release(end->t, &event);
}

static void send_blocking(struct end *end, uint64_t number, uint32_t bulk_max) {
  int code;
  while ((code = frame_send(end, number, bulk_max, 0)) == MLFAB_ERR_AGAIN)
    end_next(end, MLFAB_IO_WRITABLE);
  assert_int_equal(code, 0);
}

/* ---- rings ---- */

struct stream {
  struct end *end;
  uint64_t count;
  uint32_t bulk_max;
};

static void *stream_produce(void *user) {
  struct stream *stream = user;
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 9);
  for (uint64_t i = 0; i < stream->count; i++) {
    send_blocking(stream->end, i, stream->bulk_max);
    if (mlfab__rng_below(&prng, 4) == 0) table->flush(stream->end->t);
  }
  table->flush(stream->end->t);
  return NULL;
}

/* Holds up to four frames back before it releases them; one, where the ring is small. */
static void stream_consume(struct end *end, uint64_t count, uint32_t bulk_max) {
  mlfab_io_event held[4];
  const uint64_t most = end->t->live[0]->ring < RING ? 1 : 4;
  for (uint64_t i = 0; i < count + most; i++) {
    mlfab_io_event *slot = &held[i % most];
    if (i >= most) {
      frame_compare(slot, i - most, bulk_max);
      table->release(end->t, slot);
    }
    if (i < count) *slot = end_next(end, MLFAB_IO_FRAME);
  }
}

TEST_WITH(test_full, pair, unpair) {
  mlfab_io_event event;
  uint64_t sent = 0, got = 0;
  /* Two of the largest frames fit at once, whatever was sent before. */
  for (uint64_t round = 0; round < 50; round++) {
    static uint8_t head[64 + MLFAB_META_MAX];
    uint32_t head_bytes = head_of(round, (struct shape){MLFAB_META_MAX, MLFAB_BULK_MAX, 0}, head);
    for (int k = 0; k < 2; k++)
      assert_int_equal(
          table->send(a.t, a.link, head, head_bytes, source, MLFAB_BULK_MAX, round * 2 + 1), 0);
    assert_int_equal(table->send(a.t, a.link, head, head_bytes, source, MLFAB_BULK_MAX, 0),
                     MLFAB_ERR_AGAIN);
    for (int k = 0; k < 2; k++) assert_int_equal(end_next(&a, MLFAB_IO_SENT).token, round * 2 + 1);
    assert_int_equal(table->poll(a.t, &event), 0); /* no room, so no event */
    for (int k = 0; k < 2; k++) {
      event = end_next(&b, MLFAB_IO_FRAME);
      assert_int_equal(event.bulk_bytes, MLFAB_BULK_MAX);
      table->release(b.t, &event);
    }
    end_next(&a, MLFAB_IO_WRITABLE);
    assert_int_equal(table->poll(a.t, &event), 0);
    assert_int_equal(frame_send(&a, round, 300, 0), 0); /* shifts the offset */
    frame_receive(&b, round, 300);
  }
  /* Small frames: no WRITABLE before a quarter is free. */
  while (frame_send(&a, sent, 3000, 0) == 0) sent++;
  assert_int_equal(frame_send(&a, sent, 3000, 0), MLFAB_ERR_AGAIN);
  while (!table->poll(a.t, &event)) {
    assert_true(got < sent);
    frame_receive(&b, got++, 3000);
  }
  assert_int_equal(event.kind, MLFAB_IO_WRITABLE);
  assert_true(b.t->live[0]->released + RING - a.t->live[0]->head >= RING / 4);
  assert_true(got < sent);
}

TEST_WITH(test_allocations, pair, unpair) {
  uint64_t before = 0;
  for (uint64_t i = 0; i < 3000; i++) {
    if (i == 1000) before = a.t->env.allocations + b.t->env.allocations;
    assert_int_equal(frame_send(&a, i, 100000, i + 1), 0);
    end_next(&a, MLFAB_IO_SENT);
    frame_receive(&b, i, 100000);
  }
  assert_int_equal(a.t->env.allocations + b.t->env.allocations, before);
}
TEST_AGAIN(test_allocations, small_pair, small_unpair);

/* A frame stays valid after its link is gone, until it is released. */
TEST_WITH(test_borrowed_beyond_down, pair, unpair) {
  for (uint64_t i = 0; i < 3; i++) assert_int_equal(frame_send(&a, i, 5000, 0), 0);
  table->disconnect(a.t, a.link);
  mlfab_io_event first = end_next(&b, MLFAB_IO_FRAME), second = end_next(&b, MLFAB_IO_FRAME);
  mlfab_io_event third = end_next(&b, MLFAB_IO_FRAME), down = end_next(&b, MLFAB_IO_DOWN);
  assert_int_equal(down.code, MLFAB_ERR_PEER_CLOSED);
  assert_non_null(strstr(down.text, "closed"));
  frame_compare(&first, 0, 5000);
  table->release(b.t, &first);
  frame_compare(&second, 1, 5000);
  table->release(b.t, &second);
  frame_compare(&third, 2, 5000);
  assert_int_equal(b.t->links, 1);
  table->release(b.t, &third);
  assert_int_equal(b.t->links, 0);
}
TEST_AGAIN(test_borrowed_beyond_down, small_pair, small_unpair);

/* ---- references ---- */

enum { AREA = 3 << 20, CHUNK = 256 << 10 };

static uint8_t *area_alloc(struct end *end, uint64_t bytes) {
  return mlfab__shm_memory_functions()->alloc(end->memory, bytes, 0);
}

/* Sends a frame with this bulk. */
static int bulk_send(struct end *end, const uint8_t *bulk, uint32_t bytes, uint64_t token) {
  uint8_t head[64];
  mlfab__header header = {.protocol = MLFAB_PROTOCOL, .type = MLFAB__CHUNK, .bulk_bytes = bytes};
  mlfab__wire_seal(head, &header, bulk);
  return table->send(end->t, end->link, head, 64, bulk, bytes, token);
}

static int in_ring(const struct end *end, const void *bulk) {
  uintptr_t offset = (uintptr_t)bulk - (uintptr_t)end->t->live[0]->rx;
  return offset < 2 * end->t->live[0]->ring;
}

static void expect_bytes(const mlfab_io_event *event, uint8_t byte) {
  const uint8_t *at = event->bulk;
  for (uint32_t i = 0; i < event->bulk_bytes; i++) assert_int_equal(at[i], byte);
}

static void receive_bytes(struct end *end, int from_ring, uint8_t byte) {
  mlfab_io_event event = end_next(end, MLFAB_IO_FRAME);
  assert_int_equal(in_ring(end, event.bulk), from_ring);
  expect_bytes(&event, byte);
  table->release(end->t, &event);
}

/* What is lent is not copied, and comes back when it is released; all else is copied. */
TEST_WITH(test_references, pair, unpair) {
  mlfab_io_event event;
  uint8_t *area = area_alloc(&a, AREA + 100);
  const struct {
    uint32_t at, bytes;
    int refers;
  } cases[] = {{0, CHUNK, 1},
               {4096, 32768, 1},
               {0, 32760, 0},                  /* small */
               {64, CHUNK, 0},                 /* shares its first page */
               {4096, CHUNK + 8, 0},           /* and its last */
               {AREA - CHUNK, CHUNK + 100, 1}, /* but not behind the end of the area */
               {AREA - MLFAB_BULK_MAX, MLFAB_BULK_MAX, 1}};
  for (int round = 0; round < 200; round++) {
    size_t i = (size_t)round % MLFAB__COUNT(cases);
    memset(area, round, AREA + 100);
    assert_int_equal(bulk_send(&a, area + cases[i].at, cases[i].bytes, (uint64_t)round + 1), 0);
    if (!cases[i].refers) assert_true(table->poll(a.t, &event) && event.kind == MLFAB_IO_SENT);
    assert_int_equal(table->poll(a.t, &event), 0);
    mlfab_io_event frame = end_next(&b, MLFAB_IO_FRAME);
    assert_int_equal(in_ring(&b, frame.bulk), !cases[i].refers);
    assert_int_equal(frame.bulk_bytes, cases[i].bytes);
    expect_bytes(&frame, (uint8_t)round);
    assert_int_equal(table->poll(a.t, &event), 0);
    table->release(b.t, &frame);
    if (cases[i].refers) assert_int_equal(end_next(&a, MLFAB_IO_SENT).token, round + 1);
    assert_int_equal(a.t->lender->lending, 0);
  }
  assert_int_equal(bulk_send(&a, area, CHUNK, 0), 0); /* not lent */
  receive_bytes(&b, 1, 199);
}

/* More references than a link may have: AGAIN, then WRITABLE. */
TEST_WITH(test_many_references, pair, unpair) {
  mlfab_io_event event;
  uint64_t sent = 0;
  uint8_t *area = area_alloc(&a, AREA);
  memset(area, 7, AREA);
  while (bulk_send(&a, area + sent % 8 * CHUNK, CHUNK, sent + 1) == 0) sent++;
  assert_int_equal(sent, SHM_LENT);
  assert_int_equal(table->poll(a.t, &event), 0);
  for (uint64_t i = 0, told = 0; i < sent; i++) {
    int writable = 0;
    receive_bytes(&b, 0, 7);
    while (table->poll(a.t, &event)) {
      if (event.kind == MLFAB_IO_WRITABLE)
        writable = 1;
      else
        assert_int_equal(event.token, ++told);
    }
    assert_int_equal(told, i + 1);
    assert_int_equal(writable, i == SHM_LENT / 2);
  }
}

/* The bytes that arrive are those that were given, though their owner uses them otherwise as soon as it may: after detach
 * (one token of several), after disconnect, and after it has closed. The receiver reads late. */
TEST(test_taken_back) {
  for (int how = 0; how < 4; how++) {
    pair_open();
    uint8_t *area = area_alloc(&a, AREA);
    for (uint32_t i = 0; i < 8; i++) {
      memset(area + i * CHUNK, (int)i + 1, CHUNK);
      assert_int_equal(bulk_send(&a, area + i * CHUNK, CHUNK, how == 0 ? 1 + i / 2 : 5), 0);
    }
    mlfab_io_event held = end_next(&b, MLFAB_IO_FRAME);
    if (how == 0) {
      for (uint64_t token = 1; token <= 4; token += 2) {
        assert_int_equal(table->detach(a.t, a.link, token), 0);
        memset(area + (token - 1) * 2 * CHUNK, 99, 2 * CHUNK);
      }
    } else if (how < 3) {
      if (how == 1) assert_int_equal(table->detach(a.t, a.link, 5), 0);
      if (how == 2) table->disconnect(a.t, a.link);
      memset(area, 99, 8 * CHUNK);
    } else {
      table->close(a.t);
      mlfab__shm_memory_functions()->destroy(&a.memory);
    }
    expect_bytes(&held, 1);
    for (uint32_t i = 1; i < 8; i++) {
      table->release(b.t, &held);
      held = end_next(&b, MLFAB_IO_FRAME);
      expect_bytes(&held, (uint8_t)(i + 1));
    }
    table->release(b.t, &held);
    for (uint64_t i = 0; i < 4 && how == 0; i++)
      assert_int_equal(end_next(&a, MLFAB_IO_SENT).token, i < 2 ? 2 : 4);
    for (uint32_t i = 0; i < AREA && how == 0; i++)
      assert_int_equal(area[i], i >= 8 * CHUNK ? 0 : i / CHUNK / 2 % 2 ? i / CHUNK + 1 : 99);
    if (how < 2) {
      mlfab_io_event event;
      assert_int_equal(table->poll(a.t, &event), 0);
      assert_int_equal(a.t->lender->lending, 0);
      /* The new pages can be lent, too. */
      assert_int_equal(bulk_send(&a, area, CHUNK, 9), 0);
      receive_bytes(&b, 0, 99);
    }
    if (how < 3)
      pair_close();
    else
      end_close(&b);
  }
}
TEST_AGAIN(test_taken_back, small, large);

/* Areas whose addresses are next to each other are lent one after the other, and taken back together. */
TEST_WITH(test_neighbours, pair, unpair) {
  uint8_t *areas[8], *low = NULL;
  for (int i = 0; i < 8; i++) areas[i] = area_alloc(&a, CHUNK);
  for (int i = 0; i < 64 && low == NULL; i++)
    if (areas[i / 8] + CHUNK == areas[i % 8]) low = areas[i / 8];
  assert_non_null(low); /* the system hands out addresses in a row */
  memset(low, 3, 2 * CHUNK);
  for (uint32_t i = 0; i < 2; i++) assert_int_equal(bulk_send(&a, low + i * CHUNK, CHUNK, 5), 0);
  assert_int_equal(table->detach(a.t, a.link, 5), 0);
  memset(low, 99, 2 * CHUNK);
  for (uint32_t i = 0; i < 2; i++) receive_bytes(&b, 0, 3);
}

/* A receiver without address space reads a file instead of mapping it. */
TEST_WITH(test_not_mapped, pair, unpair) {
  uint8_t *area = area_alloc(&a, AREA);
  for (int round = 0; round < 3; round++) {
    memset(area, round, AREA);
    assert_int_equal(bulk_send(&a, area + CHUNK, CHUNK, 1), 0);
    receive_bytes(&b, 0, (uint8_t)round);
    end_next(&a, MLFAB_IO_SENT);
    struct shm_view *view = &b.t->live[0]->refers->views[0];
    mlfab__shm_span span;
    if (round > 0) continue;
    assert_int_equal(mlfab__shm_memory_find(a.memory, area, AREA, &span), 1);
    mlfab__shm_memory_unmap(b.t->lender->memory, view->at, view->bytes);
    view->at = NULL;
    view->fd = dup(span.fd);
  }
}

/* Memory comes and goes: places of files are used again, and no descriptor and no mapping is left. */
TEST_WITH(test_files, pair, unpair) {
  uint8_t *areas[SHM_FILES + 4];
  int descriptors = entries("/proc/self/fd", "");
  for (int round = 0; round < 5; round++) {
    for (uint32_t i = 0; i < SHM_FILES + 4; i++) {
      areas[i] = area_alloc(&a, CHUNK);
      memset(areas[i], (int)i, CHUNK);
      assert_int_equal(bulk_send(&a, areas[i], CHUNK, 1), 0);
      receive_bytes(&b, i >= SHM_FILES, (uint8_t)i); /* there are no places for more files */
      end_next(&a, MLFAB_IO_SENT);
    }
    for (uint32_t i = 0; i < SHM_FILES + 4; i++)
      mlfab__shm_memory_functions()->release(a.memory, areas[i], 0);
  }
  assert_int_equal(entries("/proc/self/fd", ""), descriptors);
}

enum { MOST = 256 };
static int taken[MOST], ntaken;
static struct rlimit before_taking;

/* Takes all descriptors that this process may have. */
static void take_descriptors(void) {
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &before_taking), 0);
  struct rlimit few = before_taking;
  few.rlim_cur = mlfab__min(few.rlim_cur, MOST);
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
  while (ntaken < MOST && (taken[ntaken] = dup(0)) >= 0) ntaken++;
}

static void give_descriptors_back(void) {
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &before_taking), 0);
  while (ntaken > 0) close(taken[--ntaken]);
}

/* A receiver that has no descriptor left maps what its peer passes; a sender that has none copies. */
TEST(test_files_without_descriptors) {
  for (int sender = 0; sender < 2; sender++) {
    pair_open();
    uint8_t *area = area_alloc(&a, CHUNK);
    memset(area, 9, CHUNK);
    if (!sender) assert_int_equal(bulk_send(&a, area, CHUNK, 1), 0);
    take_descriptors();
    if (sender) assert_int_equal(bulk_send(&a, area, CHUNK, 1), 0);
    receive_bytes(&b, sender, 9);
    give_descriptors_back();
    end_next(&a, MLFAB_IO_SENT);
    pair_close();
  }
}

/* A thread that waits is woken by the release of what it has lent. */
static void *late_release(void *user) {
  struct end *end = user;
  for (int i = 0; i < 2000; i++) {
    mlfab_io_event event = end_next(end, MLFAB_IO_FRAME);
    if (i % 50 == 0) usleep(2000);
    table->release(end->t, &event);
    table->flush(end->t);
  }
  return NULL;
}

TEST_WITH(test_return_wakes, pair, unpair) {
  pthread_t thread;
  uint8_t *area = area_alloc(&a, CHUNK);
  assert_int_equal(pthread_create(&thread, NULL, late_release, &b), 0);
  for (uint64_t i = 0; i < 2000; i++) {
    assert_int_equal(bulk_send(&a, area, CHUNK, i + 1), 0);
    table->flush(a.t);
    assert_int_equal(end_next(&a, MLFAB_IO_SENT).token, i + 1);
  }
  pthread_join(thread, NULL);
  assert_int_equal(atomic_load(&a.t->timeouts) + atomic_load(&b.t->timeouts), 0);
}

/* ---- sleepers ---- */

enum { PINGS = 20000 };

static void *ping_answer(void *user) {
  struct end *end = user;
  for (uint64_t i = 0; i < PINGS; i++) {
    frame_receive(end, i, 0);
    assert_int_equal(frame_send(end, i, 0, 0), 0);
    table->flush(end->t);
  }
  return NULL;
}

/* The side that asks sleeps in wait, or on the descriptor. */
static void ping(int on_descriptor) {
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, ping_answer, &b), 0);
  for (uint64_t i = 0; i < PINGS; i++) {
    mlfab_io_event event;
    assert_int_equal(frame_send(&a, i, 0, 0), 0);
    table->flush(a.t);
    while (!table->poll(a.t, &event)) {
      struct pollfd one = {table->fd(a.t), POLLIN, 0};
      table->flush(a.t);
      if (!on_descriptor) {
        table->wait(a.t, 60 * SECONDS);
        continue;
      }
      if (!table->arm(a.t, 1)) assert_int_equal(poll(&one, 1, 60000), 1);
      table->arm(a.t, 0);
    }
    assert_int_equal(event.kind, MLFAB_IO_FRAME);
    table->release(a.t, &event);
  }
  pthread_join(thread, NULL);
  assert_int_equal(atomic_load(&a.t->timeouts) + atomic_load(&b.t->timeouts), 0);
}

TEST_WITH(test_no_lost_wake, pair, unpair) {
  ping(0);
  assert_true(atomic_load(&a.t->rings) <= PINGS + 2); /* at most one system call per sleep */
}
TEST_AGAIN(test_no_lost_wake, small_pair, small_unpair);

TEST_WITH(test_descriptor, pair, unpair) { ping(1); }

/* wait runs beside a thread that opens and closes links, and beside wake. */
static void *wake_often(void *user) {
  struct end *end = user;
  for (int i = 0; i < 1000; i++) table->wake(end->t);
  return NULL;
}

static atomic_bool waiter_stop;

static void *wait_often(void *user) {
  struct end *end = user;
  while (!atomic_load(&waiter_stop)) table->wait(end->t, SECONDS / 1000);
  return NULL;
}

TEST(test_wait_beside) {
  pthread_t waiter, waker;
  ends_open();
  atomic_store(&waiter_stop, false);
  pthread_create(&waiter, NULL, wait_often, &a);
  pthread_create(&waker, NULL, wake_often, &a);
  for (int i = 0; i < 100; i++) {
    link_up(&b, &a, a.address, 1);
    assert_int_equal(frame_send(&b, 1, 1000, 0), 0);
    table->flush(b.t);
    mlfab_io_event got = end_next(&a, MLFAB_IO_FRAME);
    table->release(a.t, &got);
    table->disconnect(b.t, b.link);
    end_next(&a, MLFAB_IO_DOWN);
  }
  atomic_store(&waiter_stop, true);
  table->wake(a.t);
  pthread_join(waiter, NULL);
  pthread_join(waker, NULL);
  pair_close();
}
TEST_AGAIN(test_wait_beside, small, large);

/* ---- processes that die ---- */

static bool socket_stands(const char *address) {
  char line[512];
  const char *name = strchr(address, '/') + 1;
  bool found = false;
  FILE *file = fopen("/proc/net/unix", "r");
  while (file != NULL && fgets(line, sizeof line, file) != NULL)
    found |= strstr(line, name) != NULL;
  if (file != NULL) fclose(file);
  return found;
}

/* Runs in a child: connects and sends until it is killed. */
static void child_stream(const char *address) {
  struct end end;
  end_open(&end, "");
  if (table->connect(end.t, address, 1) != 0) _exit(1);
  end.link = end_next(&end, MLFAB_IO_UP).link;
  for (uint64_t i = 0;; i++) {
    send_blocking(&end, i, 30000);
    if (i % 8 == 0) table->flush(end.t);
  }
}

TEST(test_killed) {
  int before = entries("/dev/shm", "mlfab");
  for (int round = 0; round < 10; round++) {
    struct end end;
    mlfab_io_event event = {0};
    uint64_t got = 0;
    int status;
    char pid[32];
    end_open(&end, "");
    pid_t child = fork();
    if (child == 0) {
      alarm(60);
      child_stream(end.address);
    }
    end_next(&end, MLFAB_IO_UP);
    while (got < 100 + 37 * (uint64_t)round) frame_receive(&end, got++, 30000);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &status, 0), child);
    for (;;) { /* complete frames arrive after its death, then DOWN */
      if (!table->poll(end.t, &event)) {
        table->wait(end.t, 60 * SECONDS);
        continue;
      }
      if (event.kind == MLFAB_IO_DOWN) break;
      assert_int_equal(event.kind, MLFAB_IO_FRAME);
      frame_compare(&event, got++, 30000);
      table->release(end.t, &event);
    }
    assert_int_equal(event.code, MLFAB_ERR_PEER_CLOSED);
    snprintf(pid, sizeof pid, "pid %d ", (int)child);
    assert_non_null(strstr(event.text, pid));
    assert_int_equal(atomic_load(&end.t->timeouts), 0);
    end_close(&end);
    assert_false(socket_stands(end.address));
  }
  assert_int_equal(entries("/dev/shm", "mlfab"), before);
}
TEST_AGAIN(test_killed, small, large);

/* ---- hostile peers ---- */

/* Number of slots for headers that frames have, which nobody has released. */
static int slots_taken(const struct shm *t) {
  int n = 0;
  for (const struct shm_slot *slot = t->all_slots; slot != NULL; slot = slot->all) n++;
  for (const struct shm_slot *slot = t->free_slots; slot != NULL; slot = slot->next) n--;
  return n;
}

/* Expects b to report DOWN after the test has written into a's segment. */
static void expect_down(struct end *end, int code) {
  mlfab_io_event event = end_next(end, MLFAB_IO_DOWN);
  assert_int_equal(event.link, end->link);
  assert_int_equal(event.code, code);
  assert_int_equal(end->t->live_count, 0);
}

TEST(test_hostile_word) {
  const uint64_t valid = UINT64_C(1) << 63;
  const uint64_t words[] = {1,
                            UINT64_C(64) << 32,                       /* not valid */
                            valid,                                    /* no head */
                            valid | UINT64_C(63) << 32,               /* too short */
                            valid | UINT64_C(65601) << 32,            /* too long */
                            valid | UINT64_C(64) << 32 | 0xffffffffu, /* bulk too large */
                            valid | UINT64_C(64) << 32 | (MLFAB_BULK_MAX + 1),
                            valid | UINT64_C(65) << 32, /* differs from the frame's header */
                            valid | UINT64_C(64) << 32 | 1,
                            UINT64_MAX};
  for (size_t i = 0; i < MLFAB__COUNT(words); i++) {
    uint8_t head[64];
    pair_open();
    struct shm_link *link = a.t->live[0];
    head_of(1, (struct shape){0, 0, 0}, head);
    memcpy(link->tx + 8, head, 64);
    atomic_store(shm_word(link->tx, 0), words[i]);
    expect_down(&b, MLFAB_ERR_FRAME);
    assert_int_equal(slots_taken(b.t), 0);
    pair_close();
  }
}
TEST_AGAIN(test_hostile_word, small, large);

TEST_WITH(test_hostile_head, pair, unpair) {
  uint8_t head[64];
  head_of(1, (struct shape){0, 0, 0}, head);
  head[30] ^= 1; /* the header's checksum no longer fits */
  assert_int_equal(table->send(a.t, a.link, head, 64, NULL, 0, 0), 0);
  expect_down(&b, MLFAB_ERR_CRC);
  assert_int_equal(slots_taken(b.t), 0);
}

TEST(test_hostile_tail) {
  const uint64_t tails[] = {UINT64_MAX, RING * UINT64_C(4), 3, 0};
  for (size_t i = 0; i < MLFAB__COUNT(tails); i++) {
    mlfab_io_event event;
    int code = 0;
    pair_open();
    /* so that the tail has moved, and the other side knows it */
    for (uint64_t k = 0; k < 600; k++) {
      send_blocking(&a, k, 60000);
      while (b.t->live_count > 0 && table->poll(b.t, &event)) table->release(b.t, &event);
    }
    atomic_store(&b.t->live[0]->rx_lane->tail, tails[i]);
    for (uint64_t k = 0; k < 1000 && (code == 0 || code == MLFAB_ERR_AGAIN); k++)
      code = frame_send(&a, k, 60000, 0);
    assert_int_equal(code, MLFAB_ERR_PEER_CLOSED);
    expect_down(&a, MLFAB_ERR_FRAME);
    pair_close();
  }
}

/* Overwrites everything that a peer can write with random bytes, again and again: no access outside the
 * mapping, and every call returns. */
TEST(test_hostile_noise) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 3);
  for (int round = 0; round < 300; round++) {
    mlfab_io_event event;
    pair_open();
    struct shm_link *hand = a.t->live[0];
    for (int step = 0; step < 20 && b.t->live_count > 0; step++) {
      uint64_t what = mlfab__rng_below(&prng, 4), value = mlfab__rng_next(&prng);
      if (what == 0) value >>= mlfab__rng_below(&prng, 64);
      size_t at = (size_t)mlfab__rng_below(&prng, what == 0 ? 64 : 4096) & ~(size_t)7;
      uint8_t *ring = mlfab__rng_below(&prng, 2) ? hand->tx : hand->map;
      frame_send(&a, (uint64_t)step, 2000, 0);
      atomic_store((_Atomic uint64_t *)(void *)(ring + at), value);
      atomic_store(&hand->bell->state, (uint32_t)value);
      frame_send(&b, (uint64_t)step, 100000, 0);
      table->flush(b.t);
      for (int k = 0; k < 10 && table->poll(b.t, &event); k++)
        if (event.kind == MLFAB_IO_FRAME) table->release(b.t, &event);
      table->wait(b.t, 1000);
    }
    pair_close();
  }
}
TEST_AGAIN(test_hostile_noise, small, large);

/* References to what was not passed, or beyond it; files that are not sealed, or of another size; a file in the place of one
 * that is being read; other packets on the life line. */
TEST(test_hostile_reference) {
  for (int i = 0; i < 12; i++) {
    struct shm_reference reference = {0, 0};
    uint8_t head[64];
    pair_open();
    uint8_t *area = area_alloc(&a, AREA);
    assert_int_equal(bulk_send(&a, area, CHUNK, 1), 0);
    mlfab_io_event held = end_next(&b, MLFAB_IO_FRAME);
    struct shm_link *link = a.t->live[0];
    reference.number = link->refers->told[0];
    static const uint64_t offsets[] = {
        0, 0, AREA - CHUNK + 8, UINT64_MAX - 7, UINT64_MAX / 2 + 1 - CHUNK, 4};
    if (i == 0) reference.number++;
    if (i == 1) reference.number = 0;
    if (i < 6) reference.offset = offsets[i];
    if (i >= 6) {
      struct shm_file file = {SHM_FILE_MAGIC, i == 6 ? 0 : 1, reference.number + 1, AREA};
      int fd = memfd_create("test", MFD_ALLOW_SEALING), fds[2] = {fd, fd};
      assert_int_equal(ftruncate(fd, i == 7 ? AREA - 4096 : AREA), 0);
      if (i != 8) assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
      if (i == 9) file.place = SHM_PLACES;
      if (i == 10) file.bytes = 0;
      assert_true(mlfab__shm_packet_post(link->fd, &file, sizeof file, fds, i == 11 ? 2 : 1));
      close(fd);
      reference.number++;
    }
    mlfab__header header = {.protocol = MLFAB_PROTOCOL, .type = MLFAB__CHUNK, .bulk_bytes = CHUNK};
    mlfab__wire_seal(head, &header, area);
    memcpy(link->tx + link->tx_offset + shm_up(8 + 64), &reference, sizeof reference);
    mlfab__shm_publish(a.t, link, head, 64, shm_up(8 + 64) + LINE,
                       SHM_VALID | SHM_REFERS | UINT64_C(64) << 32 | CHUNK);
    expect_down(&b, MLFAB_ERR_FRAME);
    assert_int_equal(slots_taken(b.t), 1);
    expect_bytes(&held, 0); /* still mapped */
    table->release(b.t, &held);
    assert_int_equal(slots_taken(b.t), 0);
    pair_close();
  }
}
TEST_AGAIN(test_hostile_reference, small, large);

/* A peer that passes files without end: few of them are looked at at a time. */
TEST_WITH(test_hostile_files, pair, unpair) {
  int fd = mlfab__shm_file("test", 4096, 0), life = a.t->live[0]->fd;
  struct shm_file file = {SHM_FILE_MAGIC, 0, 1, 4096};
  while (file.number < 1000 && mlfab__shm_packet_post(life, &file, sizeof file, &fd, 1))
    file.number++;
  assert_true(file.number > 2 * SHM_FILES + 1);
  b.t->lend->hear(b.t, b.t->live[0]);
  assert_int_equal(b.t->live[0]->refers->views[0].number, 2 * SHM_FILES);
  close(fd);
}

/* ---- strangers ---- */

static int stranger(const struct end *end) {
  struct sockaddr_un to;
  socklen_t bytes = shm_sockaddr(strchr(end->address, '/') + 1, &to);
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  assert_int_equal(connect(fd, (struct sockaddr *)(void *)&to, bytes), 0);
  return fd;
}

/* `end` connects, with token 5, to a peer that the test plays. Returns the peer's socket. */
static int played_peer(struct end *end) {
  static int count;
  char name[64], address[80];
  struct sockaddr_un at;
  int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  snprintf(name, sizeof name, "played-%d-%d", (int)getpid(), count++);
  snprintf(address, sizeof address, "shm:%s", name);
  socklen_t bytes = shm_sockaddr(name, &at);
  assert_int_equal(bind(listener, (struct sockaddr *)(void *)&at, bytes), 0);
  assert_int_equal(listen(listener, 1), 0);
  assert_int_equal(table->connect(end->t, address, 5), 0);
  int fd = accept(listener, NULL, NULL);
  assert_true(fd >= 0);
  close(listener);
  return fd;
}

/* Passes these descriptors in an otherwise correct packet; they must be refused. */
static void stranger_passes(struct end *end, int segment, int bell, int event_fd, uint32_t ring) {
  int fd = stranger(end), fds[3] = {segment, bell, event_fd};
  assert_true(shm_packet_send(end->t, fd, fds, 3, ring));
  assert_non_null(end_next(end, MLFAB_IO_REFUSED).text);
  close(fd);
}

/* A caller passes a segment for two rings, a bell, a descriptor of events. */
static void passes_make(int fds[3], uint32_t ring) {
  fds[0] = mlfab__shm_file("s", CONTROL + 2 * (uint64_t)ring, F_SEAL_SEAL);
  fds[1] = mlfab__shm_file("b", CONTROL, F_SEAL_SEAL);
  fds[2] = eventfd(0, EFD_CLOEXEC);
}

TEST(test_strangers) {
  struct end end, peer;
  mlfab_io_event event;
  int fds[100], good[3], refused = 0;
  end_open(&end, "");
  int garbage = stranger(&end), silent = stranger(&end), unsealed = memfd_create("x", MFD_CLOEXEC);
  assert_int_equal(send(garbage, "hello there, stranger", 21, 0), 21);
  end_next(&end, MLFAB_IO_REFUSED);
  close(silent);
  end_next(&end, MLFAB_IO_REFUSED);
  close(garbage);
  passes_make(good, RING);
  int small = mlfab__shm_file("t", 4096, F_SEAL_SEAL), pipes[2];
  int open_before = entries("/proc/self/fd", "");
  assert_int_equal(pipe(pipes), 0);
  assert_int_equal(ftruncate(unsealed, CONTROL + 2 * RING), 0);
  stranger_passes(&end, unsealed, good[1], good[2], SHM_RING);
  stranger_passes(&end, small, good[1], good[2], SHM_RING);
  stranger_passes(&end, good[0], small, good[2], SHM_RING);
  stranger_passes(&end, good[0], good[1], pipes[1], SHM_RING);
  stranger_passes(&end, pipes[0], good[1], good[2], SHM_RING);
  /* the passed descriptors are closed */
  assert_int_equal(entries("/proc/self/fd", ""), open_before + 2);
  /* A hundred strangers that send nothing: the oldest are closed, and a peer still connects. */
  for (int i = 0; i < 100; i++) {
    fds[i] = stranger(&end);
    while (table->poll(end.t, &event)) refused += event.kind == MLFAB_IO_REFUSED;
  }
  assert_int_equal(refused, 100 - 64);
  end_open(&peer, "");
  assert_int_equal(table->connect(peer.t, end.address, 3), 0);
  end_next(&end, MLFAB_IO_REFUSED);
  end_next(&end, MLFAB_IO_UP);
  end_next(&peer, MLFAB_IO_UP);
  for (int i = 0; i < 100; i++) close(fds[i]);
  for (int i = 0; i < 3; i++) close(good[i]);
  close(small), close(unsealed), close(pipes[0]), close(pipes[1]);
  end_close(&end);
  end_close(&peer);
}

/* ---- small rings ---- */

TEST(test_share) {
  uint32_t last = RING;
  for (uint64_t n = 0; n < 5000; n++) {
    uint32_t share = shm_share(n);
    assert_true(share <= last && share >= 2 * CONTROL && share % CONTROL == 0);
    assert_int_equal(share == RING, n <= 9);
    /* No more than the budget, and no less by more than what rounding takes. */
    assert_true(n * share <= 24u << 20 || share == 2 * CONTROL);
    assert_true(n * (share + CONTROL) > 24u << 20 || share == RING);
    last = share;
  }
  assert_int_equal(shm_share(129), 2 * CONTROL);
  assert_int_equal(shm_share(UINT64_MAX), 2 * CONTROL);
}

/* Both ends use the smaller size; links that are there already count, too. */
TEST(test_agreed) {
  static const uint32_t expected[4][2] = {{0, 0}, {0, 33}, {33, 0}, {20, 129}};
  for (size_t i = 0; i < MLFAB__COUNT(expected); i++) {
    neighbours = expected[i][0];
    end_open(&a, "");
    neighbours = expected[i][1];
    end_open(&b, "");
    neighbours = 0;
    for (uint32_t links = 1; links <= 30; links++) {
      link_up(&a, &b, b.address, links);
      const struct shm_link *ours = a.t->live[links - 1], *theirs = b.t->live[links - 1];
      uint64_t most = mlfab__max(links, mlfab__max(expected[i][0], expected[i][1]));
      assert_int_equal(ours->ring, shm_share(most));
      assert_int_equal(theirs->ring, shm_share(most));
    }
    pair_close();
  }
}

/* All is released, and polled: nothing is in the pool. */
static void expect_pool_empty(struct end *end) {
  mlfab_io_event event;
  while (table->poll(end->t, &event)) continue;
  for (size_t i = 0; i < MLFAB__COUNT(end->t->lender->pool.bits); i++)
    assert_int_equal(end->t->lender->pool.bits[i], 0);
  assert_int_equal(end->t->lender->pool.used + end->t->lender->pool.lost, 0);
  assert_int_equal(end->t->lender->lending, 0);
}

TEST(test_stress) {
  static const struct {
    uint32_t neighbours, bulk, ring;
    uint64_t count;
    int wraps;
  } cases[] = {{0, 100, RING, 3000, 0},
               {0, 60000, RING, 3000, 1},
               {0, MLFAB_BULK_MAX / 2, RING, 300, 1},
               {129, 30000, 2 * CONTROL, 3000, 1},
               {129, 200000, 2 * CONTROL, 3000, 1},
               {129, MLFAB_BULK_MAX, 2 * CONTROL, 500, 1}};
  for (size_t k = 0; k < MLFAB__COUNT(cases); k++) {
    pthread_t thread;
    neighbours = cases[k].neighbours;
    pair_open();
    struct stream stream = {&a, cases[k].count, cases[k].bulk};
    assert_int_equal(pthread_create(&thread, NULL, stream_produce, &stream), 0);
    stream_consume(&b, stream.count, stream.bulk_max);
    pthread_join(thread, NULL);
    assert_int_equal(a.t->live[0]->ring, cases[k].ring);
    if (cases[k].wraps) assert_true(a.t->live[0]->head > 2 * cases[k].ring);
    assert_int_equal(atomic_load(&a.t->timeouts) + atomic_load(&b.t->timeouts), 0);
    expect_pool_empty(&a);
    pair_close();
  }
  neighbours = 0;
}

/* Two of the largest bulks are under way at once, in the lowest places of the pool, and half a MiB of others. */
TEST_WITH(test_small_full, small_pair, small_unpair) {
  mlfab_io_event event;
  for (uint32_t round = 0; round < 40; round++) {
    const uint32_t bytes = round % 2 ? MLFAB_BULK_MAX : 131072 - 64, most = round % 2 ? 2 : 4;
    for (uint32_t k = 0; k < most; k++)
      assert_int_equal(bulk_send(&a, source + k * 64, bytes, round + 1), 0);
    assert_int_equal(bulk_send(&a, source, bytes, round + 1), MLFAB_ERR_AGAIN);
    assert_int_equal(bulk_send(&a, source, 1000, 0), 0); /* small ones pass */
    /* They are copied, so the buffer comes back at once. */
    for (uint32_t k = 0; k < most; k++)
      assert_int_equal(end_next(&a, MLFAB_IO_SENT).token, round + 1);
    assert_int_equal(table->poll(a.t, &event), 0); /* no room, so no event */
    for (uint32_t k = 0; k < most; k++) {
      event = end_next(&b, MLFAB_IO_FRAME);
      assert_int_equal(event.bulk_bytes, bytes);
      assert_false(in_ring(&b, event.bulk));
      assert_true(memcmp(event.bulk, source + k * 64, bytes) == 0);
      table->release(b.t, &event);
      if (k == 0) end_next(&a, MLFAB_IO_WRITABLE);
    }
    event = end_next(&b, MLFAB_IO_FRAME);
    assert_true(in_ring(&b, event.bulk));
    table->release(b.t, &event);
    assert_int_equal(a.t->lender->pool.bits[1] | a.t->lender->pool.bits[2], 0);
    expect_pool_empty(&a);
  }
}

/* A link ends while its peer reads from the pool: the peer goes on reading what was sent, though others are sent more. */
TEST_WITH(test_small_lost, small_pair, small_unpair) {
  struct end c;
  const uint32_t first = a.link;
  end_open(&c, "");
  link_up(&a, &c, c.address, 8);
  const uint32_t second = a.link;
  mlfab_io_event held[2], event;
  a.link = first;
  assert_int_equal(bulk_send(&a, source, 100000, 0), 0);
  assert_int_equal(bulk_send(&a, source + 64, MLFAB_BULK_MAX, 0), 0);
  for (int i = 0; i < 2; i++) held[i] = end_next(&b, MLFAB_IO_FRAME);
  a.link = second;
  assert_int_equal(bulk_send(&a, source, 65536, 0), 0);
  uint64_t number = a.t->lender->pool.number;
  table->disconnect(a.t, first);
  assert_int_equal(a.t->lender->pool.lost, 18);
  for (uint32_t round = 0; round < 30; round++) {
    assert_int_equal(bulk_send(&a, source + 128 + 64 * round, MLFAB_BULK_MAX, 0), 0);
    for (int k = 0; k < (round == 0 ? 2 : 1); k++) {
      event = end_next(&c, MLFAB_IO_FRAME);
      if (event.bulk_bytes == MLFAB_BULK_MAX)
        assert_true(memcmp(event.bulk, source + 128 + 64 * round, MLFAB_BULK_MAX) == 0);
      table->release(c.t, &event);
    }
    while (table->poll(a.t, &event)) continue;
    /* Nothing else is in it: the next pool begins. */
    assert_int_equal(a.t->lender->pool.number, number + 1);
  }
  expect_pool_empty(&a);
  assert_true(memcmp(held[0].bulk, source, 100000) == 0);
  assert_true(memcmp(held[1].bulk, source + 64, MLFAB_BULK_MAX) == 0);
  end_next(&b, MLFAB_IO_DOWN);
  for (int i = 0; i < 2; i++) table->release(b.t, &held[i]);
  end_close(&c);
}

/* Many links, some of whose peers do not read: the others go on. */
TEST_WITH(test_small_many, small, large) {
  enum { LINKS = 40 };
  uint32_t links[LINKS];
  ends_open();
  for (uint32_t i = 0; i < LINKS; i++) {
    link_up(&a, &b, b.address, i);
    links[i] = a.link;
  }
  for (uint32_t i = 0; i < LINKS; i++) {
    int code;
    a.link = links[i];
    do code = bulk_send(&a, source, MLFAB_BULK_MAX, 0);
    while (code == 0);
    assert_int_equal(code, MLFAB_ERR_AGAIN);
  }
  assert_int_equal(a.t->lender->pool.used, 2 * LINKS * 16);
  mlfab_io_event event;
  for (uint32_t i = 0; i < 2 * LINKS; i++) {
    event = end_next(&b, MLFAB_IO_FRAME);
    assert_true(memcmp(event.bulk, source, MLFAB_BULK_MAX) == 0);
    table->release(b.t, &event);
  }
  for (uint32_t i = 0; i < LINKS; i++) end_next(&a, MLFAB_IO_WRITABLE);
  expect_pool_empty(&a);
  pair_close();
}

/* From now on it does without references, as a process that was built without them. */
static void end_plain(struct end *end) {
  end->t->lend->close(end->t);
  end->t->lend = NULL;
}

/* One of two processes does without references: bulks are copied both ways, and rings are large. If it is asked for a small
 * ring, both learn why there is none. */
TEST(test_plain) {
  for (int i = 0; i < 4; i++) {
    struct end *one = i & 1 ? &a : &b, *other = i & 1 ? &b : &a;
    neighbours = i < 2 ? 0 : 129;
    ends_open();
    neighbours = 0;
    end_plain(one);
    if (i == 2) { /* a has a small ring for b */
      assert_int_equal(table->connect(a.t, b.address, 7), 0);
      mlfab_io_event told[2] = {end_next(&b, MLFAB_IO_REFUSED), end_next(&a, MLFAB_IO_DOWN)};
      for (int k = 0; k < 2; k++) {
        assert_int_equal(told[k].code, MLFAB_ERR_UNSUPPORTED);
        assert_non_null(strstr(told[k].text, "MLFAB_WITH_LEND"));
      }
      pair_close();
      continue;
    }
    link_up(&a, &b, b.address, 7);
    assert_int_equal(a.t->live[0]->ring, RING);
    uint8_t *area = area_alloc(other, MLFAB_BULK_MAX);
    memset(area, 3, MLFAB_BULK_MAX);
    assert_int_equal(bulk_send(other, area, MLFAB_BULK_MAX, 1), 0);
    assert_int_equal(bulk_send(one, area, MLFAB_BULK_MAX, 2), 0);
    assert_int_equal(end_next(other, MLFAB_IO_SENT).token, 1);
    assert_int_equal(end_next(one, MLFAB_IO_SENT).token, 2);
    receive_bytes(other, 1, 3);
    receive_bytes(one, 1, 3);
    if (i == 1) { /* it may say nothing more on the life line */
      assert_int_equal(send(other->t->live[0]->fd, "x", 1, MSG_NOSIGNAL), 1);
    } else { /* nor send a reference */
      struct shm_link *link = other->t->live[0];
      uint64_t word = SHM_VALID | SHM_REFERS | (uint64_t)64 << 32 | 40000;
      atomic_store(shm_word(link->tx, link->tx_offset), word);
    }
    assert_int_equal(end_next(one, MLFAB_IO_DOWN).code, MLFAB_ERR_FRAME);
    pair_close();
  }
}

/* Sizes that a ring cannot have, from a peer that connects, and in an answer. */
TEST_WITH(test_hostile_size, small, large) {
  static const uint32_t sizes[] = {0, CONTROL, 2 * CONTROL + 4096, RING + CONTROL, UINT32_MAX};
  struct end end;
  end_open(&end, "");
  for (size_t i = 0; i < MLFAB__COUNT(sizes) + 1; i++) {
    uint32_t size = i < MLFAB__COUNT(sizes) ? sizes[i] : 2 * CONTROL;
    int fds[3];
    passes_make(fds, RING);
    /* The last one would do, but the file has another size. */
    stranger_passes(&end, fds[0], fds[1], fds[2], size);

    int fd = played_peer(&end);
    /* Larger than what was asked for. */
    assert_true(
        shm_packet_send(end.t, fd, &fds[1], 2, i < MLFAB__COUNT(sizes) ? size : 3 * CONTROL));
    end_next(&end, MLFAB_IO_DOWN);
    close(fd);
    for (int k = 0; k < 3; k++) close(fds[k]);
  }
  end_close(&end);
}

/* Processes of two builds: each learns that the other one's protocol is older or newer than its own. */
TEST(test_protocol) {
  struct end end;
  end_open(&end, "");
  for (int newer = 0; newer < 2; newer++) {
    struct shm_hello hello = {SHM_MAGIC, SHM_CONTROL, SHM_RING,
                              MLFAB_PROTOCOL - 1 + 2u * (uint32_t)newer},
                     answer;
    int code = newer ? MLFAB_ERR_PROTOCOL_NEWER : MLFAB_ERR_PROTOCOL_OLDER;
    const char *word = newer ? "newer" : "older";
    int fd = stranger(&end);
    assert_int_equal(send(fd, &hello, sizeof hello, 0), sizeof hello);
    mlfab_io_event event = end_next(&end, MLFAB_IO_REFUSED);
    assert_int_equal(event.code, code);
    assert_non_null(strstr(event.text, word));
    assert_int_equal(recv(fd, &answer, sizeof answer, 0), sizeof answer);
    assert_int_equal(answer.protocol, MLFAB_PROTOCOL);
    close(fd);

    fd = played_peer(&end);
    assert_int_equal(send(fd, &hello, sizeof hello, 0), sizeof hello);
    event = end_next(&end, MLFAB_IO_DOWN);
    assert_int_equal(event.token, 5);
    assert_int_equal(event.code, code);
    assert_non_null(strstr(event.text, word));
    close(fd);
  }
  end_close(&end);
}

/* Without a free descriptor a stranger that has sent nothing is closed for the new caller. When there is
 * none, the caller waits, and does not keep a sleeper awake. */
TEST(test_no_descriptors) {
  struct end end;
  mlfab_io_event event;
  int callers[2] = {-1, -1};
  end_open(&end, "");
  for (uint32_t waiting = 0; waiting < 2; waiting++) {
    int refused = 0;
    if (waiting) callers[0] = stranger(&end);
    while (table->poll(end.t, &event)) continue;
    take_descriptors();
    close(taken[--ntaken]);
    callers[1] = stranger(&end);
    for (int i = 0; i < 20; i++) {
      atomic_store(&end.t->look, true);
      if (table->poll(end.t, &event)) refused += event.kind == MLFAB_IO_REFUSED;
    }
    struct pollfd sleeper = {.fd = table->fd(end.t), .events = POLLIN};
    assert_int_equal(poll(&sleeper, 1, 0), 0);
    assert_int_equal(refused, waiting);
    assert_int_equal(atomic_load(&end.t->half_count), waiting);
    give_descriptors_back();
    for (int i = 0; i < 10000 && atomic_load(&end.t->half_count) == 0; i++) {
      atomic_store(&end.t->look, true);
      while (table->poll(end.t, &event)) continue;
      usleep(1000);
    }
    assert_int_equal(atomic_load(&end.t->half_count), 1); /* it was admitted in the end */
    close(callers[1]);
    if (waiting) close(callers[0]);
    for (int i = 0; i < 20 && atomic_load(&end.t->half_count) > 0; i++) {
      atomic_store(&end.t->look, true);
      table->poll(end.t, &event);
    }
    assert_int_equal(atomic_load(&end.t->half_count), 0);
  }
  end_close(&end);
}

/* ---- addresses ---- */

TEST(test_addresses) {
  char name[64], other[300];
  mlfab_error error;
  void *self;
  snprintf(name, sizeof name, "shm:test-%ld", (long)getpid());
  end_open(&a, name);
  end_open(&b, "");
  assert_true(strchr(a.address, '/') != NULL && strcmp(strchr(a.address, '/') + 1, name + 4) == 0);
  assert_int_equal(table->reach(b.t, a.address), 1);
  assert_int_equal(table->reach(b.t, name), 1);
  memcpy(other, a.address, sizeof a.address);
  other[4] = other[4] == '0' ? '1' : '0';
  const char *unreachable[] = {other,
                               "tcp:127.0.0.1:5",
                               "shm:",
                               "shm:12/",
                               "shm:xyz/name",
                               "shm:a b",
                               "shm:1/2/3",
                               "",
                               "shm:00000000000000000001/name"};
  for (size_t i = 0; i < MLFAB__COUNT(unreachable); i++) {
    assert_int_equal(table->reach(b.t, unreachable[i]), 0);
    assert_int_equal(table->connect(b.t, unreachable[i], 1), MLFAB_ERR_ADDRESS);
  }
  mlfab_transport_options options = {
      .size = sizeof options, .listen = name, .env = &a.counted.hooks, .error = &error};
  assert_int_equal(table->open(&options, &self, other), MLFAB_ERR_ADDRESS_IN_USE);
  assert_int_equal(error.code, MLFAB_ERR_ADDRESS_IN_USE);
  /* By its short name; and a node with itself. */
  link_up(&b, &a, name, 1);
  assert_int_equal(table->connect(a.t, a.address, 2), 0);
  end_next(&a, MLFAB_IO_UP);
  end_next(&a, MLFAB_IO_UP);
  pair_close();
}

/* The k-th allocation fails: an error or silence, never a crash or a leak. */
static long fail_in;

static void *failing_allocate(void *user, size_t bytes) {
  (void)user;
  if (fail_in-- == 0) return NULL;
  return malloc(bytes);
}

static void failing_release(void *user, void *memory, size_t bytes) {
  (void)user, (void)bytes;
  free(memory);
}

static const mlfab_env failing = {
    .size = sizeof failing, .allocate = failing_allocate, .release = failing_release};

TEST(test_no_memory) {
  for (long k = 0; k < 20; k++) {
    mlfab_error error;
    void *self = NULL;
    mlfab_io_event event;
    int got = 0;
    end_open(&a, "");
    memset(&b, 0, sizeof b);
    fail_in = k;
    mlfab_transport_options options = {.size = sizeof options,
                                       .listen = "",
                                       .env = &failing,
                                       .error = &error,
                                       .neighbours = neighbours};
    if (table->open(&options, &self, b.address) != 0) {
      assert_int_equal(error.code, MLFAB_ERR_MEMORY);
      end_close(&a);
      continue;
    }
    b.t = self;
    for (int i = 0; i < 1000 && got < 50; i++) {
      if (a.link == 0 && i % 10 == 0) assert_int_equal(table->connect(a.t, b.address, 1), 0);
      while (table->poll(a.t, &event))
        if (event.kind == MLFAB_IO_UP) a.link = event.link;
      if (a.link != 0 && frame_send(&a, (uint64_t)i, 2000, 0) == 0) table->flush(a.t);
      if (b.link == 0) table->wait(b.t, SECONDS / 1000); /* wait looks at sockets */
      while (table->poll(b.t, &event)) {
        if (event.kind == MLFAB_IO_UP) b.link = event.link;
        if (event.kind == MLFAB_IO_FRAME) got++;
        if (event.kind == MLFAB_IO_FRAME) table->release(b.t, &event);
        if (b.link != 0) frame_send(&b, 1, 100, 5);
      }
    }
    assert_int_equal(got, 50);
    pair_close();
  }
}
TEST_AGAIN(test_no_memory, small, large);

/* An acceptor that lacks memory for a small ring hangs up. An answer would make the caller believe in the link. */
TEST_WITH(test_small_answer, small, large) {
  const uint32_t size = 2 * CONTROL;
  int refused = 0, answered = 0;
  for (long k = 0; k < 8; k++) {
    struct end end = {0};
    mlfab_error error;
    void *self = NULL;
    uint8_t byte;
    fail_in = -1;
    mlfab_transport_options options = {
        .size = sizeof options, .env = &failing, .error = &error, .neighbours = neighbours};
    assert_int_equal(table->open(&options, &self, end.address), 0);
    end.t = self;
    int fds[3], fd = stranger(&end);
    passes_make(fds, size);
    assert_true(shm_packet_send(end.t, fd, fds, 3, size));
    fail_in = k;
    mlfab_io_event event = {0};
    for (int i = 0; i < 100 && !table->poll(end.t, &event); i++) table->wait(end.t, SECONDS / 1000);
    fail_in = -1;
    if (event.kind == MLFAB_IO_UP) {
      answered++;
      assert_true(recv(fd, &byte, 1, MSG_DONTWAIT) == 1);
    } else { /* it has not even accepted the connection, or has hung up */
      refused += event.kind == MLFAB_IO_REFUSED;
      assert_true(recv(fd, &byte, 1, MSG_DONTWAIT) <= 0);
    }
    close(fd);
    for (int i = 0; i < 3; i++) close(fds[i]);
    end_close(&end);
  }
  assert_true(refused > 0 && answered > 0);
}

/* Runs in a child: connects, sends the pid of a child of its own, which inherits the life line, and ends
 * when it reads a byte. */
static void child_with_child(const char *address, int tell, int end_with) {
  struct end end;
  char byte;
  end_open(&end, "");
  if (table->connect(end.t, address, 1) != 0) _exit(1);
  (void)end_next(&end, MLFAB_IO_UP);
  pid_t child = fork();
  for (; child == 0;) pause();
  if (write(tell, &child, sizeof child) != sizeof child || read(end_with, &byte, 1) != 1) _exit(1);
  _exit(0);
}

/* A stopped peer answers probes, because its process exists. A peer that died does not, even if a child of
 * its holds its descriptors. */
TEST(test_probe) {
  int told[2], tell[2];
  pid_t heir = 0;
  struct end end;
  assert_int_equal(pipe(told) | pipe(tell), 0);
  end_open(&end, "");
  assert_true(table->caps & MLFAB_CAP_PROBE);
  assert_int_equal(table->probe(end.t, 1), MLFAB_ERR_AGAIN);
  pid_t child = fork();
  if (child == 0) child_with_child(end.address, told[1], tell[0]);
  end.link = end_next(&end, MLFAB_IO_UP).link;
  assert_int_equal(read(told[0], &heir, sizeof heir), sizeof heir);
  assert_int_equal(kill(child, SIGSTOP), 0);
  assert_int_equal(table->probe(end.t, end.link), 0);
  assert_int_equal(kill(child, SIGCONT), 0);
  assert_int_equal(write(tell[1], "x", 1), 1);
  assert_int_equal(waitpid(child, NULL, 0), child);
  assert_int_equal(table->probe(end.t, end.link), MLFAB_ERR_AGAIN);
  assert_int_equal(kill(heir, SIGKILL), 0);
  (void)end_next(&end, MLFAB_IO_DOWN);
  assert_int_equal(table->probe(end.t, end.link), MLFAB_ERR_AGAIN);
  end_close(&end);
  for (int i = 0; i < 2; i++) close(told[i]), close(tell[i]);
}

/* A link within the host uses no network, so there is nothing to measure. */
TEST(test_local) {
  assert_int_equal(table->abi, MLFAB_TRANSPORT_ABI);
  assert_int_equal(table->size, sizeof *table);
  assert_true(table->caps & MLFAB_CAP_LOCAL);
  assert_null(table->measure);
}

static int begin(void **state) {
  (void)state;
  table = test_shm_table();
  source_fill();
  return 0;
}

TESTS(begin, NULL)

#else

int main(void) {
  puts("SKIP: shared memory is not compiled in");
  return 77;
}

#endif
