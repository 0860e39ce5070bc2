/* filter.c - how fast updates are filtered and packed: bench-filter [FILE.tsv] [--quick]
 *
 * A dense gradient of 100 MB of float32 and its residual, from memory into packets, one core. Figures are
 * bytes of the array that is filtered, converted or added to, a second. Beside each: the rate at which
 * memcpy copies such an array in the same run, which is the limit, and the portable kernels (of unpacking:
 * a dense addition of the same array). All take a trial each in turns; medians are reported.
 *
 *    filter/f16/P%   threshold, half precision, packets; P of 100 elements survive
 *    filter/f32/P%   the same with values as they are; -drawn: with a random policy as well
 *    filter/top/P%   the largest P of 100, exactly
 *    filter/change   the parameter filter
 *    half/...        float32 to halves and back
 *    unpack/f16/P%   what was packed added to the model
 *
 * It links the parts, since none of this is in the public header, and so is a program of its own; rows are
 * appended to FILE.tsv in the format of bench.c. */
#include "core/sparse/filter.h"
#include "core/kernels/half.h"
#include "core/kernels/packet.h"
#include "core/base/rng.h"
#include "core/kernels/kernels.h"
#include "single.h"

enum { STRETCH = MLFAB__FILTER_STRETCH, WORDS = STRETCH / 64, TRIALS_MAX = 31 };

static uint64_t n; /* elements */
static int trials;
static float *gradient, *residual, *model, *other;
static uint8_t *packets;
static uint64_t *marks, *scratch;
static uint64_t packed;

typedef struct cell {
  char name[32];
  int half, level;
  double share, p; /* share of elements kept; 0..1 */
} cell;

static mlfab__filter_rule rule_of(const cell *c) {
  /* Magnitudes are uniform in 0..1; of those below tau, 1 - p are sent as well. */
  double tau = c->p > 0 ? (1 - c->share) / c->p : 0;
  return (mlfab__filter_rule){MLFAB_F32, c->half, tau, c->p < 1 ? c->p : 1, 1, 1};
}

/* Outside the timing: removes the residual of the previous trial. */
static void clear_residual(void) { memset(residual, 0, n * sizeof *residual); }

static void filter_pack(const cell *c) {
  mlfab__filter_rule rule = rule_of(c);
  uint64_t keep[WORDS], saturated = 0;
  packed = 0;
  for (uint64_t at = 0; at < n; at += STRETCH) {
    uint32_t count = (uint32_t)mlfab__min(n - at, STRETCH);
    mlfab__packet_shape shape = {at * 4, MLFAB_F32, c->half, 0, count};
    uint8_t *values = NULL;
    uint32_t kept =
        mlfab__filter_mark_with(c->level, &rule, gradient + at, residual + at, at, count, keep);
    require(kept != MLFAB__FILTER_REFUSED, "refused");
    packed += mlfab__packet_begin(packets + packed, &shape, keep, &values);
    mlfab__filter_emit_with(c->level, &rule, gradient + at, residual + at, count, keep, values,
                            &saturated);
  }
}

/* As a worker does: looks at everything, so that a NaN would change nothing, and then writes. */
static void top_pack(const cell *c) {
  mlfab__filter_rule rule = {MLFAB_F32, c->half, 0, 1, 1, 1};
  uint64_t saturated = 0, k = (uint64_t)((double)n * c->share);
  mlfab__filter_choice choice;
  packed = 0;
  mlfab__filter_choose(&choice, MLFAB_F32, gradient, residual, n, k, scratch);
  for (uint64_t at = 0; at < n; at += STRETCH)
    require(mlfab__filter_look(&choice, &rule, at, (uint32_t)mlfab__min(n - at, STRETCH),
                               marks + at / 64),
            "finite");
  require(mlfab__filter_settle(&choice, marks), "not settled");
  for (uint64_t at = 0; at < n; at += STRETCH) {
    uint32_t count = (uint32_t)mlfab__min(n - at, STRETCH);
    mlfab__packet_shape shape = {at * 4, MLFAB_F32, c->half, 0, count};
    uint8_t *values = NULL;
    packed += mlfab__packet_begin(packets + packed, &shape, marks + at / 64, &values);
    mlfab__filter_emit_with(c->level, &rule, gradient + at, residual + at, count, marks + at / 64,
                            values, &saturated);
  }
}

static void store_halves(const cell *c) {
  mlfab__half_store_with(c->level, c->half, (uint16_t *)(void *)packets, gradient, n);
}

static void load_halves(const cell *c) {
  mlfab__half_load_with(c->level, c->half, model, (const uint16_t *)(const void *)packets, n);
}

static void change(const cell *c) {
  mlfab__filter_change_with(c->level, MLFAB_F32, gradient, other, n, 0.01);
}

static void unpack(const cell *c) {
  mlfab__packet packet;
  if (c->level == 0) { /* the other contestant */
    mlfab__kernel_add(MLFAB_F32, model, model, gradient, 0.5, n, 0);
    return;
  }
  for (uint64_t at = 0; at < packed;) {
    uint32_t bytes = mlfab__packet_open(packets + at, packed - at, &packet);
    require(bytes > 0 && mlfab__unpack_finite(&packet), "a packet");
    require(mlfab__unpack_add(&packet, model + packet.offset / 4, 0.5), "not finite");
    at += bytes;
  }
}

static double timed(void (*work)(const cell *), const cell *c) {
  clear_residual();
  double begin = cpu_now();
  work(c);
  return cpu_now() - begin;
}

static void report(const cell *c, double ours, double limit, const char *peer, double value) {
  printf("%-24s %9.2f GB/s       memcpy %.2f (%.2fx)", c->name, ours, limit, ours / limit);
  if (value > 0) printf("  %s %.2f (%.2fx)", peer, value, ours / value);
  printf("\n");
  row(c->name, ours, "GB/s", peer, value, "memcpy", limit);
}

/* All contestants' trials in turns; the first one of each is a warm-up and is not counted. */
static void measure(const cell *c, void (*work)(const cell *), const char *peer) {
  double ours[TRIALS_MAX], theirs[TRIALS_MAX], copy[TRIALS_MAX];
  double bytes = (double)n * sizeof *gradient * 1e-9;
  cell slow = *c;
  slow.level = 0;
  for (int t = -1; t < trials; t++) {
    int at = t < 0 ? 0 : t;
    double begin = cpu_now();
    memcpy(other, gradient, n * sizeof *gradient);
    copy[at] = cpu_now() - begin;
    ours[at] = timed(work, c);
    if (peer) theirs[at] = timed(work, &slow);
  }
  report(c, bytes / median(ours, trials), bytes / median(copy, trials), peer,
         peer ? bytes / median(theirs, trials) : 0);
}

static void all_cells(void) {
  static const int percent[] = {1, 10, 100};
  int level = mlfab__kernel_level();
  for (int half = MLFAB_HALF_F16; half >= MLFAB_HALF_NONE; half--)
    for (size_t i = 0; i < sizeof percent / sizeof *percent; i++) {
      cell c = {.half = half, .level = level, .share = percent[i] / 100.0, .p = 1};
      snprintf(c.name, sizeof c.name, "filter/%s/%d%%", half ? "f16" : "f32", percent[i]);
      measure(&c, filter_pack, "portable");
    }
  measure(&(cell){"filter/f16-drawn/10%", MLFAB_HALF_F16, level, 0.1, 0.95}, filter_pack,
          "portable");
  measure(&(cell){"filter/top/1%", MLFAB_HALF_F16, level, 0.01, 1}, top_pack, NULL);
  measure(&(cell){"filter/change", 0, level, 0, 1}, change, "portable");
  measure(&(cell){"half/store/f16", MLFAB_HALF_F16, level, 1, 1}, store_halves, "portable");
  measure(&(cell){"half/load/f16", MLFAB_HALF_F16, level, 1, 1}, load_halves, "portable");
  measure(&(cell){"half/store/bf16", MLFAB_HALF_BF16, level, 1, 1}, store_halves, "portable");
  measure(&(cell){"half/load/bf16", MLFAB_HALF_BF16, level, 1, 1}, load_halves, "portable");
  for (size_t i = 0; i < sizeof percent / sizeof *percent; i++) {
    cell c = {.half = MLFAB_HALF_F16, .level = level, .share = percent[i] / 100.0, .p = 1};
    snprintf(c.name, sizeof c.name, "unpack/f16/%d%%", percent[i]);
    clear_residual();
    filter_pack(&c);
    c.level = 1;
    measure(&c, unpack, "dense add");
  }
}

int main(int argc, char **argv) {
  mlfab__rng prng;
  single_open(argc, argv);
  n = (uint64_t)(100 << 20) / sizeof *gradient;
  trials = quick ? 3 : 9;
  gradient = memory(n * sizeof *gradient);
  residual = memory(n * sizeof *residual);
  model = memory(n * sizeof *model);
  other = memory(n * sizeof *other);
  packets = memory((n / STRETCH + 1) * mlfab__packet_bound(STRETCH, MLFAB_F32));
  marks = memory((n / 64 + 1) * sizeof *marks);
  scratch = memory(mlfab__filter_choice_words(MLFAB_F32, n, n / 64 + 1) * sizeof *scratch);
  mlfab__rng_seed(&prng, 1);
  for (uint64_t i = 0; i < n; i++) {
    gradient[i] = (float)(2 * mlfab__rng_unit(&prng) - 1);
    if (gradient[i] == 0) gradient[i] = 1;
    model[i] = gradient[i];
  }
  printf("Kernels: %s.\n", mlfab__kernel_level() == 2   ? "AVX-512"
                           : mlfab__kernel_level() == 1 ? "AVX2"
                                                        : "portable");
  all_cells();
  single_close();
  return 0;
}
