/* test_version.c - version tags against a list of when each grain changed last, over random histories;
 * TDF's exact case (tests/vectors/tdf.json); and caches that pull while commits continue: none ever lacks
 * an update. MLFAB_SEED=n runs one random history alone, MLFAB_SCALE=100 a hundred times as many. */
#include "tags.h"

#include "core/base/rng.h"

#include "budget.h"
#include "json.h"

enum { BYTES_MAX = 1 << 16, GRAINS_MAX = 1 << 12 };

static mlfab__env env;

/* The number of changed bytes between `from` and `end`. */
static uint64_t changed_bytes(const mlfab__tags *tags, uint64_t since, uint64_t from,
                              uint64_t end) {
  uint64_t sum = 0, begin, stop;
  for (; from < end; from = stop) {
    mlfab__tags_next(tags, since, from, end, &begin, &stop);
    sum += stop - begin;
  }
  return sum;
}

/* ---- a slice, and the last change of each of its grains ---- */

typedef struct history {
  mlfab__rng prng;
  mlfab__tags tags;
  uint64_t bytes, grain, grains, commit;
  uint64_t changed[GRAINS_MAX];
  uint8_t data[BYTES_MAX];
} history;

static uint64_t below(history *h, uint64_t n) { return mlfab__rng_below(&h->prng, n); }

/* Few blocks and many, complete and partial; also slices shorter than a grain. */
static void begin(history *h, uint64_t seed) {
  memset(h, 0, sizeof *h);
  mlfab__rng_seed(&h->prng, seed);
  h->grain = (uint64_t)4 << below(h, 11);
  h->bytes = mlfab__min(BYTES_MAX, h->grain * (1 + below(h, below(h, 3) ? 200 : GRAINS_MAX)));
  if (below(h, 2)) h->bytes -= mlfab__min(h->bytes - 4, below(h, h->grain));
  h->grains = (h->bytes + h->grain - 1) / h->grain;
  assert_int_equal(mlfab__tags_init(&env, &h->tags, h->bytes, h->grain), 0);
  assert_int_equal(h->tags.grains, h->grains);
  assert_int_equal(tags_memory(h->bytes, h->grain), env.bytes);
  h->commit = below(h, 2) ? 0 : mlfab__rng_next(&h->prng) >> below(h, 63);
  if (h->commit > UINT64_MAX / 2) h->commit /= 2;
  h->tags.base = h->commit;
}

static void end(history *h) {
  mlfab__tags_free(&env, &h->tags);
  assert_int_equal(env.bytes, 0);
}

static void random_stretch(history *h, uint64_t *at, uint64_t *n) {
  *at = below(h, h->bytes);
  *n = below(h, below(h, 2) ? mlfab__min(h->bytes - *at + 1, 4 * h->grain) : h->bytes - *at + 1);
  if (below(h, 8) == 0) *at = 0, *n = h->bytes;
}

/* The next commit, which sometimes is so far ahead that tags cannot hold the distance. */
static void next_commit(history *h) {
  h->commit += below(h, 4) ? 1 : 1 + below(h, 5);
  if (below(h, 40) == 0) h->commit += UINT32_MAX - 8 + below(h, 16);
}

/* Changes part of a stretch, or nothing, and marks it in one piece or several. */
static void change(history *h) {
  uint8_t after[BYTES_MAX];
  uint64_t at, n, marked = 0, wanted = 0;
  random_stretch(h, &at, &n);
  memcpy(after, h->data + at, n);
  int kind = (int)below(h, 4);
  for (uint64_t i = 0; i < n && kind > 0; i++) {
    if (kind == 1 ? below(h, 300) == 0 : kind == 2 ? i / 512 % 3 == 0 : 1)
      after[i] = (uint8_t)(after[i] + 1 + below(h, 255));
  }
  next_commit(h);
  for (uint64_t from = 0, piece; from < n || n == 0; from += piece) {
    piece = below(h, 2) ? n - from : mlfab__min(n - from, 1 + below(h, n));
    marked +=
        mlfab__tags_mark(&h->tags, h->data + at + from, after + from, at + from, piece, h->commit);
    for (uint64_t g = (at + from) / h->grain; piece > 0 && g <= (at + from + piece - 1) / h->grain;
         g++) {
      uint64_t first = mlfab__max(g * h->grain, at + from);
      uint64_t stop = mlfab__min((g + 1) * h->grain, at + from + piece);
      if (memcmp(h->data + first, after + (first - at), stop - first) == 0) continue;
      h->changed[g] = h->commit;
      wanted++;
    }
    if (n == 0) break;
  }
  assert_int_equal(marked, wanted);
  memcpy(h->data + at, after, n);
}

static void touch(history *h) {
  uint64_t at, n;
  random_stretch(h, &at, &n);
  next_commit(h);
  tags_touch(&h->tags, at, n, h->commit);
  for (uint64_t i = 0; i < n; i++) h->changed[(at + i) / h->grain] = h->commit;
}

/* A coarse tag is the largest of its fine ones. */
static void check_levels(const history *h) {
  for (uint64_t b = 0; b * 64 < h->grains; b++) {
    uint32_t most = 0;
    for (uint64_t g = 64 * b; g < 64 * b + 64; g++) {
      if (g >= h->grains) assert_int_equal(h->tags.fine[g], 0);
      if (h->tags.fine[g] > most) most = h->tags.fine[g];
    }
    assert_int_equal(h->tags.coarse[b], most);
  }
}

/* Does a cache with version `since` lack grain g? */
static int lacks(const history *h, uint64_t since, uint64_t g) {
  return since == 0 || since < h->tags.base || (g < h->grains && h->changed[g] > since);
}

static uint64_t some_since(history *h) {
  uint64_t back = below(h, 3) ? below(h, 12) : below(h, (uint64_t)UINT32_MAX + 20);
  if (below(h, 8) == 0) return below(h, 2) ? 0 : h->tags.base;
  return h->commit > back ? h->commit - back : 0;
}

static void check_next(history *h, uint64_t since) {
  uint64_t from, n, begin, stop;
  random_stretch(h, &from, &n);
  uint64_t end = from + n;
  for (uint64_t at = from;; at = stop) {
    mlfab__tags_next(&h->tags, since, at, end, &begin, &stop);
    assert_true(begin >= at && stop <= end && begin <= stop);
    for (uint64_t i = at; i < begin; i++) assert_false(lacks(h, since, i / h->grain));
    for (uint64_t i = begin; i < stop; i++) assert_true(lacks(h, since, i / h->grain));
    if (begin == stop) break;
    /* It could not be longer. */
    if (stop < end) assert_false(lacks(h, since, stop / h->grain));
  }
  assert_int_equal(begin, end);
}

static void check_bitmap(history *h, uint64_t since) {
  static uint64_t keep[GRAINS_MAX / 64 + 2];
  uint64_t at = below(h, h->bytes);
  if (below(h, 2)) at -= at % h->grain;
  uint64_t n = below(h, (h->bytes - at + h->grain - 1) / h->grain + 1), words = (n + 63) / 64;
  memset(keep, 0x55, sizeof keep);
  mlfab__tags_bitmap(&h->tags, since, at, n, keep);
  for (uint64_t g = 0; g < 64 * words; g++) {
    uint64_t first = (at + g * h->grain) / h->grain;
    int wanted = lacks(h, since, first) || (at % h->grain && lacks(h, since, first + 1));
    assert_int_equal(keep[g / 64] >> g % 64 & 1, g < n && wanted);
  }
  assert_true(keep[words] == 0x5555555555555555u);
}

/* Against a literal count over every n-th block, which are all where there are few. */
static void check_estimate(history *h, uint64_t since) {
  uint64_t at = below(h, h->bytes), end = at + 1 + below(h, h->bytes - at);
  uint64_t first = at / h->grain, last = (end - 1) / h->grain, blocks = last / 64 - first / 64 + 1;
  uint64_t stride = blocks / 16 | 1, changed = 0, seen = 0, looked = 0, touched = 0;
  for (uint64_t block = first / 64; block <= last / 64; block += stride, looked++) {
    uint64_t before = changed;
    for (uint64_t g = mlfab__max(first, 64 * block); g <= mlfab__min(last, 64 * block + 63); g++) {
      changed += lacks(h, since, g) != 0;
      seen++;
    }
    touched += changed > before;
  }
  mlfab__tags_share share = mlfab__tags_estimate(&h->tags, since, at, end);
  assert_true(looked <= 31);
  assert_int_equal(share.grains, 256 * changed / seen);
  assert_int_equal(share.blocks, 256 * touched / looked);
}

TEST(test_random_histories) {
  static history h;
  uint64_t moved = 0;
  for (SEEDS(seed, 300)) {
    begin(&h, seed);
    for (int step = 0; step < 20; step++) {
      uint64_t base = h.tags.base;
      if (below(&h, 4)) change(&h);
      if (below(&h, 4) == 0) touch(&h);
      moved += h.tags.base != base;
      check_levels(&h);
      for (int i = 0; i < 3; i++) {
        uint64_t since = some_since(&h);
        check_next(&h, since);
        check_bitmap(&h, since);
        check_estimate(&h, since);
      }
    }
    end(&h);
  }
  if (testing_whole()) assert_true(moved > 100);
}

/* ---- no lost update ---- */

enum { CACHES = 4 };

typedef struct cache {
  uint8_t data[BYTES_MAX], pinned[BYTES_MAX];
  uint64_t commit;  /* the version that it holds */
  uint64_t pinning; /* the version after the pull in progress; 0: none */
  uint64_t at;      /* progress of that pull */
  int by_bitmap;
} cache;

/* Some more bytes of a pull: the grains that the tags select now, from the pinned snapshot. */
static uint64_t pull_some(history *h, cache *c) {
  uint64_t stop = mlfab__min(h->bytes, c->at + 1 + below(h, h->bytes)), sent = 0, begin, end;
  if (c->by_bitmap) {
    uint64_t keep[GRAINS_MAX / 64], n = (stop - c->at + h->grain - 1) / h->grain;
    mlfab__tags_bitmap(&h->tags, c->commit, c->at, n, keep);
    for (uint64_t g = 0; g < n; g++) {
      if (!(keep[g / 64] >> g % 64 & 1)) continue;
      begin = c->at + g * h->grain;
      end = mlfab__min(stop, begin + h->grain);
      memcpy(c->data + begin, c->pinned + begin, end - begin);
      sent += end - begin;
    }
  } else {
    for (uint64_t at = c->at; at < stop; at = end) {
      mlfab__tags_next(&h->tags, c->commit, at, stop, &begin, &end);
      memcpy(c->data + begin, c->pinned + begin, end - begin);
      sent += end - begin;
    }
  }
  c->at = stop;
  return sent;
}

/* A pull pins, reads tags piece by piece while commits continue, and ends: then the cache equals the pinned
 * snapshot, bit for bit. */
TEST(test_no_lost_update) {
  static history h;
  static cache caches[CACHES];
  uint64_t ended = 0, whole = 0, sent = 0;
  for (SEEDS(seed, 60)) {
    begin(&h, seed);
    for (int i = 0; i < CACHES; i++) {
      memset(caches[i].data, 0xee, h.bytes); /* an empty cache */
      caches[i].commit = caches[i].pinning = 0;
    }
    next_commit(&h);
    tags_touch(&h.tags, 0, h.bytes, h.commit);
    for (int step = 0; step < 150; step++) {
      cache *c = &caches[below(&h, CACHES)];
      if (below(&h, 3) == 0) {
        change(&h);
      } else if (c->pinning == 0) {
        memcpy(c->pinned, h.data, h.bytes);
        c->pinning = h.commit;
        c->at = 0;
        c->by_bitmap = (int)below(&h, 2);
      } else {
        sent += pull_some(&h, c);
        if (c->at < h.bytes) continue;
        c->commit = c->pinning;
        c->pinning = 0;
        assert_memory_equal(c->data, c->pinned, h.bytes);
        ended++;
        whole += h.bytes;
      }
    }
    end(&h);
  }
  if (!testing_whole()) return;
  assert_true(ended > 800);
  assert_true(sent < whole / 10 * 9); /* and less than everything was sent */
}

/* ---- TDF's exact case ---- */

/* The next list after a key, or its only number. */
static uint32_t numbers(const char *at, const char *key, uint64_t *out, uint32_t most) {
  double list[64] = {json_number(at, key)};
  const char *value = json_find(at, key);
  int is_list = value[strspn(value, " \n")] == '[';
  uint32_t n = is_list ? json_numbers(value, list, most, NULL) : 1;
  for (uint32_t i = 0; i < n; i++) out[i] = (uint64_t)list[i];
  return n;
}

/* Its labels are update numbers, and a pull that stored `next` requests those from it on. Here the cache
 * sends the last one that it has, which is one less. */
TEST(test_versioned_pull) {
  uint64_t version[64], since, wanted[64], begin, stop, next;
  mlfab__tags tags;
  json_read("tests/vectors/tdf.json");
  const char *part = json_find(json, "versioned_pull");
  uint32_t n = numbers(part, "versions", version, 64), count = 0;
  assert_int_equal(numbers(part, "pull since", &since, 1), 1);
  uint32_t nwanted = numbers(part, "indices returned", wanted, 64);
  assert_true(n > 0 && nwanted > 0);
  assert_int_equal(mlfab__tags_init(&env, &tags, 4 * n, 4), 0);
  for (uint64_t seq = 1; seq <= 15; seq++) {
    for (uint32_t i = 0; i < n; i++) {
      if (version[i] == seq) tags_touch(&tags, 4 * i, 4, seq);
    }
  }
  for (uint64_t at = 0; at < 4 * n; at = stop) {
    mlfab__tags_next(&tags, since - 1, at, 4 * n, &begin, &stop);
    for (; begin < stop; begin += 4) assert_int_equal(begin / 4, wanted[count++]);
  }
  assert_int_equal(count, nwanted);
  /* The cache has everything up to the server's number then: it lacks nothing. */
  assert_int_equal(numbers(part, "next", &next, 1), 1);
  assert_int_equal(changed_bytes(&tags, next - 1, 0, 4 * n), 0);
  mlfab__tags_free(&env, &tags);
}

/* ---- edges ---- */

/* Values that are equal bit for bit have not changed; +0 and -0 differ, a NaN equals itself. */
TEST(test_bits_decide) {
  mlfab__tags tags;
  float before[4] = {0.0f, 1.0f, 0.0f, 2.0f}, after[4] = {-0.0f, 1.0f, 0.0f, 2.0f};
  uint32_t nan = 0x7fc00001;
  memcpy(&before[2], &nan, 4);
  memcpy(&after[2], &nan, 4);
  assert_int_equal(mlfab__tags_init(&env, &tags, sizeof before, 4), 0);
  assert_int_equal(mlfab__tags_mark(&tags, before, after, 0, sizeof before, 1), 1);
  assert_int_equal(tags.fine[0], 1);
  mlfab__tags_free(&env, &tags);
}

/* The largest distance that a tag holds, and the next one. */
TEST(test_base_moves) {
  mlfab__tags tags;
  assert_int_equal(mlfab__tags_init(&env, &tags, 4096, 64), 0);
  tags_touch(&tags, 0, 64, 7);
  tags_touch(&tags, 64, 64, UINT32_MAX);
  assert_int_equal(tags.base, 0);
  assert_int_equal(changed_bytes(&tags, 7, 0, 4096), 64);
  assert_int_equal(changed_bytes(&tags, UINT32_MAX, 0, 4096), 0);
  tags_touch(&tags, 128, 64, (uint64_t)UINT32_MAX + 1);
  assert_int_equal(tags.base, UINT32_MAX);
  assert_int_equal(changed_bytes(&tags, UINT32_MAX, 0, 4096), 64);
  assert_int_equal(changed_bytes(&tags, UINT32_MAX - 1u, 0, 4096), 4096);
  assert_int_equal(changed_bytes(&tags, (uint64_t)UINT32_MAX + 1, 0, 4096), 0);
  mlfab__tags_free(&env, &tags);
}

TEST(test_memory_runs_out) {
  budget memory = {0, 0};
  mlfab_env hooks = budget_env(&memory);
  mlfab__env poor;
  mlfab__tags tags;
  assert_int_equal(mlfab__env_init(&poor, &hooks), 0);
  for (uint32_t n = 0; n < 2; n++) {
    memory.left = n;
    assert_int_equal(mlfab__tags_init(&poor, &tags, 4096, 64), MLFAB_ERR_MEMORY);
    assert_int_equal(poor.bytes, 0);
  }
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
