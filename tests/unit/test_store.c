/* test_store.c - core/model/store.c: pieces against a byte-wise oracle, references against a count of
 * places, growth, allocation failures, and the table of options that exclude each other. */
#include "tags.h"

#include "core/base/rng.h"
#include "core/kernels/kernels.h"
#include "core/model/store.h"
#include "core/model/sync.h"
#include "core/sparse/sparse_apply.h"

#include <math.h>
#include "budget.h"
#include "../testing.h"

static mlfab__env env;

static void random_layout(mlfab__rng *prng, uint32_t servers, mlfab__layout *layout) {
  mlfab__tensor_info infos[12];
  uint32_t n = 1 + (uint32_t)mlfab__rng_below(prng, 12);
  for (uint32_t i = 0; i < n; i++) {
    infos[i].id = i;
    infos[i].dtype = 1 + (uint32_t)mlfab__rng_below(prng, 3);
    infos[i].count = 1 + mlfab__rng_below(prng, mlfab__rng_below(prng, 3) ? 40 : 6000);
  }
  uint32_t want = (uint32_t)mlfab__rng_below(prng, 12);
  assert_int_equal(mlfab__layout_build(&env, infos, n, want, servers, 0, 1u << 30, layout, NULL),
                   0);
}

/* The block and the place in it of one byte of the shard, found by counting. */
static void locate(const mlfab__store *s, uint64_t offset, uint32_t *slice, uint32_t *position,
                   uint32_t *at) {
  uint32_t p = 0;
  for (uint32_t i = 0; i < s->nslices; i++) {
    const mlfab__slice *from = &s->layout->slices[s->slices[i].number];
    if (offset - from->offset < from->bytes && offset >= from->offset) {
      *slice = i;
      *position = p + (uint32_t)((offset - from->offset) / s->block_bytes);
      *at = (uint32_t)((offset - from->offset) % s->block_bytes);
      return;
    }
    p += (uint32_t)((from->bytes + s->block_bytes - 1) / s->block_bytes);
  }
  fail_msg("a byte that is in no slice");
}

static void walk_run(const mlfab__store *s, uint64_t begin, uint64_t end, uint64_t limit) {
  for (uint64_t offset = begin; offset < end;) {
    mlfab__piece piece;
    uint32_t slice, position, at;
    mlfab__store_piece(s, offset, limit, &piece);
    assert_true(piece.bytes > 0 && piece.bytes <= limit);
    uint32_t width = mlfab__dtype_bytes(piece.dtype);
    assert_int_equal(piece.count * width, piece.bytes);
    assert_int_equal(piece.tensor->dtype, piece.dtype);
    assert_int_equal(piece.tensor->offset + piece.first * width, offset);
    for (uint32_t i = 0; i < piece.bytes; i += width) {
      locate(s, offset + i, &slice, &position, &at);
      assert_int_equal(piece.slice, slice);
      assert_int_equal(piece.position, position);
      assert_int_equal(piece.at + i, at);
      assert_true(offset + i < piece.tensor->offset + piece.tensor->bytes);
    }
    assert_true(piece.at + piece.bytes <= mlfab__store_block_bytes(s, piece.slice, piece.position));
    offset += piece.bytes;
    if (piece.bytes == limit || offset == end) continue;
    locate(s, offset, &slice, &position, &at);
    assert_true(position != piece.position || offset == piece.tensor->offset + piece.tensor->bytes);
  }
}

/* Walking by pieces visits every byte once, in its place, and every piece is as long as possible. */
static void walk(const mlfab__store *s, uint32_t server, uint64_t limit) {
  uint64_t begin, end = 0, seen = 0;
  for (mlfab__layout_run(s->layout, server, 0, &begin, &end); begin < end;
       mlfab__layout_run(s->layout, server, end, &begin, &end)) {
    walk_run(s, begin, end, limit);
    seen += end - begin;
  }
  assert_int_equal(seen, s->bytes);
}

/* Every slice gets a random owner, so neighbours are separated. */
static void scatter(mlfab__rng *prng, mlfab__layout *layout) {
  uint32_t owner[MLFAB__SLICES_MAX];
  for (uint32_t i = 0; i < layout->nslices; i++)
    owner[i] = (uint32_t)mlfab__rng_below(prng, layout->servers);
  mlfab__layout_assign(layout, owner);
}

TEST(test_pieces) {
  static const uint32_t blocks[] = {64, 128, 448, 4096, 1u << 20};
  for (uint64_t seed = 1; seed <= 150; seed++) {
    mlfab__rng prng;
    mlfab__layout layout;
    mlfab__rng_seed(&prng, seed);
    uint32_t servers = 1 + (uint32_t)mlfab__rng_below(&prng, 4);
    random_layout(&prng, servers, &layout);
    if (seed % 2) scatter(&prng, &layout);
    for (uint32_t server = 0; server < servers; server++) {
      mlfab__store s;
      assert_int_equal(mlfab__store_init(&env, &s, NULL, NULL, &layout, server, blocks[seed % 5],
                                         (int)(seed & 1), (uint32_t)(seed % 3), 0),
                       0);
      walk(&s, server, 1u << 30);
      walk(&s, server, 8 * (1 + mlfab__rng_below(&prng, 40)));
      for (uint32_t p = 0; p < s.positions; p++) {
        const uint8_t *data = s.blocks[s.w[p]].data;
        for (uint32_t i = 0; i < s.block_bytes; i++) assert_int_equal(data[i], 0);
      }
      mlfab__store_free(&env, &s);
    }
    mlfab__layout_free(&env, &layout);
    assert_int_equal(env.bytes, 0);
  }
}

/* refs is the number of places that refer to the block; the free list holds exactly the blocks without one. */
static void check_refs(const mlfab__store *s, const uint32_t *pins, uint32_t npins) {
  uint32_t *count = (uint32_t *)calloc(s->nblocks, sizeof *count), free_blocks = 0;
  assert_non_null(count);
  for (uint32_t p = 0; p < s->positions; p++) {
    assert_int_not_equal(s->w[p], MLFAB__NO_BLOCK);
    count[s->w[p]]++;
    if (s->next[p] != MLFAB__NO_BLOCK) count[s->next[p]]++;
    if (s->sum[p] != MLFAB__NO_BLOCK) count[s->sum[p]]++;
  }
  for (uint32_t i = 0; i < npins; i++) count[pins[i]]++;
  for (uint32_t i = 0; i < s->nblocks; i++) assert_int_equal(s->blocks[i].refs, count[i]);
  for (uint32_t b = s->free_head; b != MLFAB__NO_BLOCK; b = s->blocks[b].next_free) {
    assert_int_equal(count[b], 0);
    free_blocks++;
  }
  for (uint32_t i = 0; i < s->nblocks; i++) free_blocks -= count[i] == 0;
  assert_int_equal(free_blocks, 0);
  free(count);
}

enum { PINS = 64 };

/* Random takes, swaps, pins and growth. */
static void shuffle(mlfab__rng *prng, mlfab__store *s) {
  uint32_t pins[PINS], npins = 0;
  for (int turn = 0; turn < 400; turn++) {
    uint32_t p = (uint32_t)mlfab__rng_below(prng, s->positions);
    uint32_t *place = mlfab__rng_below(prng, 2) ? &s->next[p] : &s->sum[p];
    switch (mlfab__rng_below(prng, 5)) {
      case 0: /* a new block in a place */
        if (s->free_head == MLFAB__NO_BLOCK) assert_int_equal(mlfab__store_grow(&env, s), 0);
        mlfab__store_put(s, place, mlfab__store_take(s));
        break;
      case 1: /* commit */
        if (*place == MLFAB__NO_BLOCK) break;
        mlfab__store_put(s, &s->w[p], *place);
        *place = MLFAB__NO_BLOCK;
        break;
      case 2:
        mlfab__store_put(s, place, MLFAB__NO_BLOCK);
        break;
      case 3:
        if (npins == PINS) break;
        pins[npins++] = s->w[p];
        mlfab__store_ref(s, s->w[p]);
        break;
      default:
        if (npins > 0) mlfab__store_unref(s, pins[--npins]);
    }
    check_refs(s, pins, npins);
  }
  while (s->free_head != MLFAB__NO_BLOCK) pins[0] = mlfab__store_take(s);
  assert_int_equal(mlfab__store_take(s), MLFAB__NO_BLOCK);
}

TEST(test_references) {
  for (uint64_t seed = 1; seed <= 40; seed++) {
    mlfab__rng prng;
    mlfab__layout layout;
    mlfab__store s;
    mlfab__rng_seed(&prng, seed);
    random_layout(&prng, 1, &layout);
    assert_int_equal(mlfab__store_init(&env, &s, NULL, NULL, &layout, 0, 256, 1,
                                       (uint32_t)(seed % 3), seed % 4 == 0),
                     0);
    check_refs(&s, NULL, 0);
    shuffle(&prng, &s);
    mlfab__store_free(&env, &s);
    mlfab__layout_free(&env, &layout);
    assert_int_equal(env.bytes, 0);
  }
}

/* The k-th allocation fails, for every k: MLFAB_ERR_MEMORY, and no leak. */
TEST(test_memory) {
  budget memory = {0, 0};
  int code = MLFAB_ERR_MEMORY;
  mlfab__rng prng;
  mlfab__layout layout;
  mlfab_env hooks = budget_env(&memory);
  mlfab__rng_seed(&prng, 3);
  random_layout(&prng, 1, &layout);
  for (uint64_t k = 0; code; k++) {
    mlfab__env poor;
    mlfab__store s;
    assert_int_equal(mlfab__env_init(&poor, &hooks), 0);
    memory.left = k;
    code = mlfab__store_init(&poor, &s, NULL, NULL, &layout, 0, 4096, 1, 2, 0);
    if (!code) {
      uint32_t blocks = s.nblocks, spare = s.free_count;
      for (uint64_t few = 0; few < 2; few++) {
        memory.left = few;
        assert_int_equal(mlfab__store_grow(&poor, &s), MLFAB_ERR_MEMORY);
      }
      assert_int_equal(s.nblocks, blocks);
      memory.left = 2;
      assert_int_equal(mlfab__store_grow(&poor, &s), 0);
      assert_int_equal(s.free_count, spare + 1);
      /* Blocks taken until then are freed with the rest. */
      int tagged = 0;
      for (uint64_t n = 0; !tagged; n += 1 + n / 4) {
        memory.left = n;
        tagged = mlfab__store_tag(&poor, &s, 4) == 0;
        mlfab__store_free(&poor, &s);
        assert_int_equal(poor.bytes, 0);
        memory.left = 100000;
        assert_int_equal(mlfab__store_init(&poor, &s, NULL, NULL, &layout, 0, 4096, 1, 2, 0), 0);
      }
      mlfab__store_free(&poor, &s);
    }
    assert_int_equal(poor.bytes, 0);
  }
  assert_int_equal(code, 0);
  mlfab__layout_free(&env, &layout);
}

static int check(uint32_t rule, uint32_t sync, uint32_t mean, uint32_t deterministic,
                 uint32_t dtype, mlfab_error *error) {
  mlfab_model_options o = {0};
  mlfab__tensor_info info[] = {{1, MLFAB_F32, 4}, {2, dtype, 4}};
  mlfab__layout layout;
  mlfab__optimizer made;
  o.size = sizeof o;
  o.optimizer = rule;
  o.gamma = 0.9, o.adadelay_c = 1.0, o.beta1 = 0.9, o.beta2 = 0.999, o.epsilon = 1e-8;
  o.consistency.kind = sync;
  o.mean = mean;
  o.deterministic = deterministic;
  assert_int_equal(mlfab__layout_build(&env, info, 2, 0, 1, 0, 1u << 30, &layout, NULL), 0);
  int code = mlfab__store_check(&o, &layout, &made, error);
  mlfab__layout_free(&env, &layout);
  return code;
}

/* Every pair of options, and the text for those that exclude each other. */
TEST(test_options) {
  mlfab_error error;
  const uint32_t rules = MLFAB_OPTIMIZER_COUNT + 1;
  for (uint32_t i = 0; i < rules * 8 * 2 * 2 * 3; i++) {
    uint32_t rule = i % rules < MLFAB_OPTIMIZER_COUNT ? i % rules : 1000, rest = i / rules,
             sync = rest % 8, mean = rest / 8 % 2, det = rest / 16 % 2, dtype = 1 + rest / 32;
    int bad = rule >= MLFAB_OPTIMIZER_COUNT || (det && sync != MLFAB_SYNC_BSP) ||
              (mean && sync != MLFAB_SYNC_BSP && sync != MLFAB_SYNC_DROP) ||
              (dtype == MLFAB_I64 && (mean || rule != MLFAB_OPTIMIZER_SGD));
    assert_int_equal(check(rule, sync, mean, det, dtype, &error), bad ? MLFAB_ERR_UNSUPPORTED : 0);
    if (bad) assert_true(strlen(error.text) > 10);
  }
}

/* Numbers out of range, and filters with options that do not apply to them. */
TEST(test_numbers) {
  static const struct {
    uint32_t tags, half, ghost;
    double threshold, decay;
    uint32_t dtype;
    int code;
    const char *text;
  } cases[] = {
      {0, 0, 0, 0.0, 0.0, MLFAB_F32, 0, NULL},
      {1, 2, 0, 0.5, 7.0, MLFAB_F64, 0, NULL},
      {65536, 0, 0, 0.0, 0.0, MLFAB_I64, 0, NULL},
      {3, 0, 0, 0.0, 0.0, MLFAB_F32, MLFAB_ERR_CONFIG,
       "tags is 3: not 0 or a power of two up to 65536"},
      {131072, 0, 0, 0.0, 0.0, MLFAB_F32, MLFAB_ERR_CONFIG,
       "tags is 131072: not 0 or a power of two up to 65536"},
      {0, 3, 0, 0.0, 0.0, MLFAB_F32, MLFAB_ERR_CONFIG, "pull_half is 3: not one of MLFAB_HALF_*"},
      {0, 0, 0, -0.5, 0.0, MLFAB_F32, MLFAB_ERR_CONFIG,
       "change_threshold is -0.5: not 0 or more, and finite"},
      {0, 0, 0, INFINITY, 0.0, MLFAB_F32, MLFAB_ERR_CONFIG,
       "change_threshold is inf: not 0 or more, and finite"},
      {0, 0, 0, 0.0, -1.0, MLFAB_F32, MLFAB_ERR_CONFIG,
       "change_decay is -1: not 0 or more, and finite"},
      {8, 0, 1, 0.0, 0.0, MLFAB_F32, MLFAB_ERR_UNSUPPORTED,
       "not supported: ghost with tags: there are no bytes that change"},
      {0, 1, 0, 0.0, 0.0, MLFAB_I64, MLFAB_ERR_UNSUPPORTED,
       "not supported: int64 tensors (tensor 2) with pull_half (16-bit parameters)"},
      {0, 0, 0, 0.1, 0.0, MLFAB_I64, MLFAB_ERR_UNSUPPORTED,
       "not supported: int64 tensors (tensor 2) with change_threshold (a parameter filter)"},
  };
  for (size_t i = 0; i < MLFAB__COUNT(cases); i++) {
    mlfab_model_options o = {0};
    mlfab__tensor_info info[] = {{1, MLFAB_F32, 4}, {2, cases[i].dtype, 4}};
    mlfab__layout layout;
    mlfab__optimizer made;
    mlfab_error error;
    o.size = sizeof o;
    o.tags = cases[i].tags;
    o.pull_half = cases[i].half;
    o.ghost = cases[i].ghost;
    o.change_threshold = cases[i].threshold;
    o.change_decay = cases[i].decay;
    assert_int_equal(mlfab__layout_build(&env, info, 2, 0, 1, 0, 1u << 30, &layout, NULL), 0);
    assert_int_equal(mlfab__store_check(&o, &layout, &made, &error), 0);
    assert_int_equal(mlfab__sparse_check(&o, &layout, &error), cases[i].code);
    if (cases[i].code) assert_string_equal(error.text, cases[i].text);
    mlfab__layout_free(&env, &layout);
  }
}

/* No grain is smaller than an element of the slice. */
TEST(test_grains) {
  for (uint64_t seed = 1; seed <= 200; seed++) {
    mlfab__rng prng;
    mlfab__layout layout;
    mlfab__store s;
    mlfab__rng_seed(&prng, seed);
    random_layout(&prng, 1, &layout);
    uint32_t tags = 1u << mlfab__rng_below(&prng, 17);
    assert_int_equal(mlfab__store_init(&env, &s, NULL, NULL, &layout, 0, 4096, 0, 0, 0), 0);
    uint64_t before = env.bytes, wanted = 0;
    assert_int_equal(mlfab__store_tag(&env, &s, tags), 0);
    for (uint32_t i = 0; i < s.nslices; i++) {
      uint64_t smallest = 8, largest = 0;
      for (uint32_t k = 0; k < layout.ntensors; k++) {
        const mlfab__tensor *t = &layout.tensors[k];
        if (t->offset >= s.slices[i].offset + s.slices[i].bytes ||
            t->offset + t->bytes <= s.slices[i].offset)
          continue;
        smallest = mlfab__min(smallest, mlfab__dtype_bytes((int)t->dtype));
        largest = mlfab__max(largest, mlfab__dtype_bytes((int)t->dtype));
      }
      uint64_t grain = mlfab__store_tags_of(&s, i)->grain_bytes;
      assert_int_equal(grain, mlfab__max(tags * smallest, largest));
      wanted += tags_memory(s.slices[i].bytes, grain);
    }
    assert_int_equal(env.bytes - before, wanted + sizeof *s.tags + s.nslices * sizeof(mlfab__tags));
    mlfab__store_free(&env, &s);
    mlfab__layout_free(&env, &layout);
    assert_int_equal(env.bytes, 0);
  }
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
