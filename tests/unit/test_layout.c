/* test_layout.c - core/model/layout.c: the flat model has no gaps and no overlaps, and its look-ups agree with
 * linear scans, for thousands of random models. */
#include "core/base/rng.h"
#include "core/kernels/kernels.h"
#include "core/model/balance.h"

#include "../testing.h"

enum { TENSORS = 40 };

static mlfab__env env;

static const mlfab__tensor *scan_tensor(const mlfab__layout *l, uint64_t offset) {
  for (uint32_t i = 0; i < l->ntensors; i++) {
    const mlfab__tensor *t = &l->tensors[i];
    if (offset >= t->offset && offset - t->offset < t->bytes) return t;
  }
  return NULL;
}

static uint32_t scan_slice(const mlfab__layout *l, uint64_t offset) {
  for (uint32_t i = 0; i < l->nslices; i++) {
    if (offset >= l->slices[i].offset && offset - l->slices[i].offset < l->slices[i].bytes)
      return i;
  }
  return l->nslices;
}

/* 8-byte types first, each group in the order of definition, nothing between them. */
static void check_tensors(const mlfab__layout *l, const mlfab__tensor_info *infos, uint32_t n) {
  uint64_t at = 0;
  assert_int_equal(l->ntensors, n);
  for (uint32_t width = 8; width >= 4; width -= 4) {
    for (uint32_t i = 0; i < n; i++) {
      const mlfab__tensor *t = &l->tensors[i];
      if (mlfab__dtype_bytes((int)infos[i].dtype) != width) continue;
      assert_int_equal(t->id, infos[i].id);
      assert_int_equal(t->dtype, infos[i].dtype);
      assert_int_equal(t->count, infos[i].count);
      assert_int_equal(t->bytes, t->count * width);
      assert_int_equal(t->offset, at);
      assert_int_equal(t->offset % width, 0);
      assert_ptr_equal(mlfab__layout_find(l, t->id), t);
      at += t->bytes;
    }
  }
  assert_int_equal(l->bytes, at);
}

/* Slices are contiguous, begin on cache lines and are about equal; servers' shards are adjacent. */
static void check_slices(const mlfab__layout *l, uint32_t want, uint32_t servers) {
  uint64_t at = 0, least = UINT64_MAX, most = 0;
  uint32_t server = 0;
  assert_in_range(l->nslices, 1, want ? want : 16 * servers);
  for (uint32_t i = 0; i < l->nslices; i++) {
    const mlfab__slice *s = &l->slices[i];
    assert_int_equal(s->offset, at);
    assert_int_equal(s->offset % 64, 0);
    assert_true(s->bytes > 0);
    assert_true(s->server == server || s->server > server);
    assert_true(s->server < servers);
    server = s->server;
    at += s->bytes;
    if (i + 1 == l->nslices) break; /* the last may be shorter */
    least = s->bytes < least ? s->bytes : least;
    most = s->bytes > most ? s->bytes : most;
  }
  assert_int_equal(at, l->bytes);
  if (least != UINT64_MAX) assert_true(most - least <= 64);
  if (l->nslices > 1) assert_true(least >= 4096);
}

/* A new layout gives the active servers adjacent shards of about equal size. */
static void check_shards(const mlfab__layout *l, uint32_t active) {
  uint64_t at = 0;
  uint32_t least = UINT32_MAX, most = 0;
  for (uint32_t s = 0; s < l->servers; s++) {
    uint64_t begin, end;
    uint32_t slices = 0;
    for (uint32_t i = 0; i < l->nslices; i++) slices += l->slices[i].server == s;
    mlfab__layout_run(l, s, 0, &begin, &end);
    assert_int_equal(mlfab__layout_shard_bytes(l, s), end - begin);
    if (s < active) least = slices < least ? slices : least;
    most = slices > most ? slices : most;
    if (slices == 0) {
      assert_int_equal(begin, end);
      continue;
    }
    assert_true(s < active);
    assert_int_equal(begin, at);
    assert_true(end > begin);
    at = end;
  }
  assert_int_equal(at, l->bytes);
  assert_true(most - least <= 1);
}

/* The stretch that mlfab__layout_run must find, slice by slice. */
static void scan_run(const mlfab__layout *l, uint32_t server, uint64_t from, uint64_t *begin,
                     uint64_t *end) {
  *begin = *end = l->bytes;
  for (uint32_t i = 0, found = 0; i < l->nslices; i++) {
    const mlfab__slice *s = &l->slices[i];
    if (s->offset + s->bytes <= from) continue;
    if (s->server != server && found) return;
    if (s->server != server) continue;
    if (!found) *begin = from > s->offset ? from : s->offset;
    found = 1;
    *end = s->offset + s->bytes;
  }
}

static void check_runs(const mlfab__layout *l, mlfab__rng *prng) {
  uint64_t begin, end, wanted_begin, wanted_end;
  for (uint32_t s = 0; s < l->servers; s++) {
    uint64_t bytes = 0;
    for (int i = 0; i < 40; i++) {
      uint64_t from = mlfab__rng_below(prng, l->bytes + 2);
      if (i % 2) from = l->slices[mlfab__rng_below(prng, l->nslices)].offset;
      scan_run(l, s, from, &wanted_begin, &wanted_end);
      mlfab__layout_run(l, s, from, &begin, &end);
      assert_int_equal(begin, wanted_begin);
      assert_int_equal(end, wanted_end);
    }
    for (uint32_t i = 0; i < l->nslices; i++)
      bytes += l->slices[i].server == s ? l->slices[i].bytes : 0;
    assert_int_equal(mlfab__layout_shard_bytes(l, s), bytes);
  }
}

/* Servers join and leave: slices have arbitrary owners, mostly in short runs. */
static void scatter(mlfab__layout *l, mlfab__rng *prng) {
  uint32_t owner[MLFAB__SLICES_MAX], server = 0;
  for (uint32_t i = 0; i < l->nslices; i++) {
    if (mlfab__rng_below(prng, 3)) server = (uint32_t)mlfab__rng_below(prng, l->servers);
    owner[i] = server;
  }
  mlfab__layout_assign(l, owner);
  for (uint32_t i = 0; i < l->nslices; i++) assert_int_equal(l->slices[i].server, owner[i]);
}

/* The conditions on the stretch, checked element by element. */
static int scan_valid(const mlfab__layout *l, uint32_t server, const mlfab__segment *s) {
  uint64_t end = s->offset + s->bytes;
  if (s->bytes > l->bytes || s->offset > l->bytes - s->bytes) return 0;
  for (uint32_t i = 0; i < l->nslices; i++) {
    const mlfab__slice *slice = &l->slices[i];
    int meets = s->offset < slice->offset + slice->bytes && end > slice->offset;
    if (s->bytes == 0)
      meets = s->offset >= slice->offset && s->offset < slice->offset + slice->bytes;
    if (meets && slice->server != server) return 0;
  }
  for (int i = 0; i < 2; i++) {
    uint64_t at = i ? end : s->offset;
    const mlfab__tensor *t = scan_tensor(l, at);
    if (at == l->bytes && i == 0) return 0;
    if (t && (at - t->offset) % mlfab__dtype_bytes((int)t->dtype)) return 0;
  }
  return 1;
}

static void check_lookups(const mlfab__layout *l, mlfab__rng *prng) {
  for (int i = 0; i < 200; i++) {
    uint64_t at = mlfab__rng_below(prng, l->bytes);
    if (i < 2) at = i ? l->bytes - 1 : 0;
    assert_ptr_equal(mlfab__layout_tensor_at(l, at), scan_tensor(l, at));
    assert_int_equal(mlfab__layout_slice_at(l, at), scan_slice(l, at));
    mlfab__segment s = {at,
                        1 + mlfab__rng_below(prng, mlfab__rng_below(prng, 2) ? 64 : l->bytes + 64)};
    if (i % 2) s.offset -= s.offset % 4, s.bytes += (8 - s.bytes % 8) % 8;
    if (i % 50 == 3) s.bytes = UINT64_MAX - s.offset + 1 + s.offset / 2; /* wraps round */
    uint32_t server = (uint32_t)mlfab__rng_below(prng, l->servers);
    assert_int_equal(mlfab__layout_valid(l, server, &s), scan_valid(l, server, &s));
  }
  for (uint32_t i = 0; i < l->ntensors; i++) {
    const mlfab__tensor *t = &l->tensors[i];
    assert_ptr_equal(mlfab__layout_tensor_at(l, t->offset), t);
    assert_ptr_equal(mlfab__layout_tensor_at(l, t->offset + t->bytes - 1), t);
    assert_null(mlfab__layout_find(l, t->id + 1)); /* ids are even */
  }
}

TEST(test_random_models) {
  for (uint64_t seed = 1; seed <= 1500; seed++) {
    mlfab__rng prng;
    mlfab__tensor_info infos[TENSORS];
    mlfab__layout layout;
    mlfab__rng_seed(&prng, seed);
    uint32_t n = 1 + (uint32_t)mlfab__rng_below(&prng, TENSORS);
    uint32_t servers = 1 + (uint32_t)mlfab__rng_below(&prng, 8), uniform = 0;
    uint32_t active = (uint32_t)mlfab__rng_below(&prng, servers + 1);
    uint32_t want = mlfab__rng_below(&prng, 2) ? 0 : 1 + (uint32_t)mlfab__rng_below(&prng, 200);
    uint32_t base = (uint32_t)mlfab__rng_next(&prng) % 1000000 * 2,
             mixed = (uint32_t)mlfab__rng_below(&prng, 2);
    for (uint32_t i = 0; i < n; i++) {
      infos[i].id = base + 2 * ((i * 17) % 41);
      infos[i].dtype = 1 + (uint32_t)mlfab__rng_below(&prng, mixed ? 3 : 1);
      infos[i].count = 1 + mlfab__rng_below(&prng, mlfab__rng_below(&prng, 4) ? 30 : 20000);
      uniform = i == 0 || uniform == infos[i].dtype ? infos[i].dtype : 0;
      if (uniform == 0 && i > 0) mixed = 2;
    }
    for (uint32_t i = 0; i < n; i++) uniform = infos[i].dtype == infos[0].dtype ? uniform : 0;
    assert_int_equal(
        mlfab__layout_build(&env, infos, n, want, servers, active, 1u << 30, &layout, NULL), 0);
    assert_int_equal(layout.uniform_dtype, uniform);
    check_tensors(&layout, infos, n);
    check_slices(&layout, want, servers);
    check_shards(&layout, active ? active : servers);
    check_lookups(&layout, &prng);
    check_runs(&layout, &prng);
    scatter(&layout, &prng);
    check_lookups(&layout, &prng);
    check_runs(&layout, &prng);
    mlfab__layout_free(&env, &layout);
    assert_int_equal(env.bytes, 0);
  }
}

static int build(const mlfab__tensor_info *infos, uint32_t n, uint32_t servers, uint64_t max,
                 mlfab_error *error) {
  mlfab__layout layout;
  int code = mlfab__layout_build(&env, infos, n, 0, servers, 0, max, &layout, error);
  if (!code) mlfab__layout_free(&env, &layout);
  assert_int_equal(env.bytes, 0);
  return code;
}

TEST(test_refusals) {
  mlfab_error error;
  mlfab__tensor_info twice[] = {{5, MLFAB_F32, 2}, {9, MLFAB_F64, 2}, {5, MLFAB_I64, 2}};
  mlfab__tensor_info all[] = {{MLFAB_ALL, MLFAB_F32, 2}}, none[] = {{1, MLFAB_F32, 0}};
  mlfab__tensor_info type[] = {{1, MLFAB_F32, 1}, {2, 4, 1}};
  mlfab__tensor_info large[] = {{1, MLFAB_F32, 256}, {2, MLFAB_F32, 1}};
  mlfab__tensor_info wraps[] = {{1, MLFAB_F64, 8}, {2, MLFAB_F64, UINT64_MAX / 8}};
  assert_int_equal(build(twice, 3, 1, 1 << 20, &error), MLFAB_ERR_TENSOR);
  assert_non_null(strstr(error.text, "5"));
  assert_int_equal(build(all, 1, 1, 1 << 20, &error), MLFAB_ERR_TENSOR);
  assert_int_equal(build(none, 1, 1, 1 << 20, &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(build(type, 2, 1, 1 << 20, &error), MLFAB_ERR_DTYPE);
  assert_int_equal(build(large, 1, 1, 1024, &error), 0);
  assert_int_equal(build(large, 2, 1, 1024, &error), MLFAB_ERR_LIMIT);
  assert_non_null(strstr(error.text, "tensor 2"));
  assert_int_equal(build(wraps, 2, 1, UINT64_MAX, &error), MLFAB_ERR_LIMIT);
  assert_int_equal(build(large, 0, 1, 1024, &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(build(large, 1, 0, 1024, &error), MLFAB_ERR_ARGUMENT);
  mlfab__layout layout;
  assert_int_equal(mlfab__layout_build(&env, large, 1, 0, 2, 3, 1024, &layout, &error),
                   MLFAB_ERR_ARGUMENT);
  assert_non_null(strstr(error.text, "active: 3"));
}

/* --- balance --- */

/* n slices as a layout cuts them: of nearly equal size, the last one a little shorter. */
static uint64_t random_slices(mlfab__rng *prng, mlfab__slice *slices, uint32_t n,
                              uint32_t servers) {
  uint64_t lines = n * (64 + mlfab__rng_below(prng, 600)) + mlfab__rng_below(prng, n), at = 0;
  for (uint32_t i = 0; i < n; i++) {
    slices[i].offset = at;
    slices[i].bytes = (lines * (i + 1) / n - lines * i / n) * 64;
    if (i + 1 == n) slices[i].bytes -= mlfab__rng_below(prng, 64) / 4 * 4;
    slices[i].server = (uint32_t)mlfab__rng_below(prng, servers);
    at += slices[i].bytes;
  }
  return at;
}

static uint32_t random_active(mlfab__rng *prng, uint8_t *active, uint32_t servers) {
  uint32_t members = 0;
  for (uint32_t s = 0; s < servers; s++) members += active[s] = mlfab__rng_below(prng, 3) > 0;
  if (members > 0) return members;
  active[mlfab__rng_below(prng, servers)] = 1;
  return 1;
}

/* The largest load, and the bytes that move; the owner of every slice must be active. */
static uint64_t weigh(const mlfab__slice *slices, uint32_t n, const uint8_t *active,
                      const uint32_t *owner, uint64_t *moved) {
  uint64_t load[64] = {0}, largest = 0;
  *moved = 0;
  for (uint32_t i = 0; i < n; i++) {
    assert_true(active[owner[i]]);
    load[owner[i]] += slices[i].bytes;
    if (load[owner[i]] > largest) largest = load[owner[i]];
    if (owner[i] != slices[i].server) *moved += slices[i].bytes;
  }
  return largest;
}

/* Tries all assignments: the smallest possible largest load, and the fewest bytes that move with no load
 * above `cap`. */
static void try_all(const mlfab__slice *slices, uint32_t n, const uint8_t *active, uint32_t servers,
                    uint64_t cap, uint64_t *least, uint64_t *fewest) {
  uint32_t owner[8] = {0}, i = 0;
  *least = *fewest = UINT64_MAX;
  while (i < n) {
    uint64_t moved;
    int fits = 1;
    for (uint32_t k = 0; k < n; k++) fits = fits && active[owner[k]];
    if (fits) {
      uint64_t largest = weigh(slices, n, active, owner, &moved);
      if (largest < *least) *least = largest;
      if (largest <= cap && moved < *fewest) *fewest = moved;
    }
    for (i = 0; i < n && ++owner[i] == servers; i++) owner[i] = 0;
  }
}

TEST(test_balance_against_all) {
  uint32_t met = 0;
  for (uint64_t seed = 1; seed <= 600; seed++) {
    mlfab__rng prng;
    mlfab__slice slices[8];
    uint8_t active[4];
    uint32_t owner[8], order[16];
    uint64_t load[4], moved, least, fewest;
    mlfab__rng_seed(&prng, seed);
    uint32_t n = 1 + (uint32_t)mlfab__rng_below(&prng, seed % 20 ? 6 : 8);
    uint32_t servers = 1 + (uint32_t)mlfab__rng_below(&prng, 4);
    uint64_t total = random_slices(&prng, slices, n, servers);
    uint32_t members = random_active(&prng, active, servers);
    uint64_t cap = total * 21 / (20 * members);
    mlfab__layout_balance(slices, n, active, servers, owner, load, order);
    uint64_t largest = weigh(slices, n, active, owner, &moved);
    try_all(slices, n, active, servers, cap, &least, &fewest);
    met += least <= cap;
    if (least > cap) {
      assert_true(largest <= least + least / 64 + 64);
      try_all(slices, n, active, servers, largest, &least, &fewest);
    } else {
      assert_true(largest <= cap);
    }
    if (moved != fewest) print_message("seed %u\n", (unsigned)seed);
    assert_int_equal(moved, fewest);
  }
  assert_in_range(met, 150, 500);
}

/* The default number of slices and more, while servers join and leave again and again. */
TEST(test_balance_bound) {
  for (uint64_t seed = 1; seed <= 3000; seed++) {
    static mlfab__slice slices[2048];
    static uint32_t owner[2048], order[4096];
    mlfab__rng prng;
    uint8_t active[32];
    uint64_t load[32], moved;
    mlfab__rng_seed(&prng, seed);
    uint32_t servers = 1 + (uint32_t)mlfab__rng_below(&prng, 32);
    uint32_t n = (uint32_t)(16 + mlfab__rng_below(&prng, 48)) * servers;
    uint64_t total = random_slices(&prng, slices, n, servers);
    for (int change = 0; change < 4; change++) {
      uint32_t members = random_active(&prng, active, servers);
      uint64_t cap = total * 21 / (20 * members), least = 0, excess = 0;
      uint64_t before[32] = {0};
      for (uint32_t i = 0; i < n; i++) before[slices[i].server] += slices[i].bytes;
      mlfab__layout_balance(slices, n, active, servers, owner, load, order);
      uint64_t largest = weigh(slices, n, active, owner, &moved);
      uint64_t slice = slices[0].bytes + 64;
      if (n / members >= 21) assert_true(largest <= cap);
      assert_true(largest <= mlfab__max(cap, (n + members - 1) / members * slice * 65 / 64));
      /* Slices of inactive servers and those beyond the bound must move; at most one slice more per
       * overloaded server may move. */
      for (uint32_t s = 0; s < servers; s++) {
        least += active[s] ? 0 : before[s];
        if (active[s] && before[s] > mlfab__max(cap, largest))
          excess += before[s] - mlfab__max(cap, largest) + slice;
      }
      assert_in_range(moved, least, least + excess);
      for (uint32_t i = 0; i < n; i++) slices[i].server = owner[i];
    }
  }
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
