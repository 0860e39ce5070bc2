/* version.c - what version tags cost: bench-version [FILE.tsv] [--quick]
 *
 * A slice of 100 MB of float32, with tags for every element and for every 256, one core; the limit is
 * the rate, or the time, at which memcpy copies it in the same run. All take a trial each in turns;
 * medians are reported.
 *
 *    version/mark/B/WHAT    compares before and after, tags what differs: GB of the slice a second;
 *                           WHAT: none, clustered (1 % in 16 places), scattered (1 % one by one), all
 *    version/next/B/WHAT    finds all runs that changed: ms; the peer looks at every tag
 *    version/bitmap/B/WHAT  the same as bits
 *
 * It links the parts, since none of this is in the public header, and so is a program of its own; rows are
 * appended to FILE.tsv in the format of bench.c. */
#include "core/base/rng.h"
#include "single.h"
#include "tests/unit/tags.h"

enum { TRIALS_MAX = 31, CLUSTERS = 16 };
enum { NONE, CLUSTERED, SCATTERED, ALL, KINDS };
static const char *const kinds[KINDS] = {"none", "clustered", "scattered", "all"};

static uint64_t n; /* elements */
static int trials;
static uint32_t *before, *after, *other;
static uint64_t *keep, sink; /* results, so that the search is not optimised away */
static mlfab__env env;
static mlfab__tags tags;

static void change(int kind) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 1);
  memcpy(after, before, n * 4);
  if (kind == CLUSTERED) {
    for (uint64_t c = 0; c < CLUSTERS; c++) {
      for (uint64_t i = 0; i < n / 100 / CLUSTERS; i++) after[c * (n / CLUSTERS) + i]++;
    }
  }
  for (uint64_t i = 0; i < n && kind >= SCATTERED; i++) {
    after[i] += kind == ALL || mlfab__rng_below(&prng, 100) == 0;
  }
}

static void mark(void) { sink += mlfab__tags_mark(&tags, before, after, 0, n * 4, 2); }

static void next(void) {
  uint64_t begin, stop;
  for (uint64_t at = 0; at < n * 4; at = stop) {
    mlfab__tags_next(&tags, 1, at, n * 4, &begin, &stop);
    sink += stop - begin;
  }
}

static void bitmap(void) {
  mlfab__tags_bitmap(&tags, 1, 0, tags.grains, keep);
  sink += keep[0];
}

/* As in TDF. */
static void every_tag(void) {
  for (uint64_t g = 0; g < tags.grains; g++) sink += tags.fine[g] > 1;
}

static void copy(void) { memcpy(other, after, n * 4); }

/* Both contestants and the limit take turns; medians, in seconds. */
static void measure(void (*const what[3])(void), double medians[3]) {
  double times[3][TRIALS_MAX];
  for (int t = -1; t < trials; t++) {
    for (int i = 0; i < 3; i++) {
      double begin = cpu_now();
      if (what[i]) what[i]();
      times[i][t < 0 ? 0 : t] = cpu_now() - begin;
    }
  }
  for (int i = 0; i < 3; i++) medians[i] = median(times[i], trials);
}

static void report_rate(uint64_t grain, int kind) {
  void (*const what[3])(void) = {mark, copy, NULL};
  double medians[3], bytes = (double)n * 4 * 1e-9;
  char name[64];
  measure(what, medians);
  double rate = bytes / medians[0], limit = bytes / medians[1];
  snprintf(name, sizeof name, "version/mark/%llu/%s", (unsigned long long)grain, kinds[kind]);
  printf("%-30s %8.2f GB/s       memcpy %.2f GB/s (%.0f %%)\n", name, rate, limit,
         100 * rate / limit);
  row(name, rate, "GB/s", NULL, 0, "memcpy", limit);
}

static void report_time(const char *search, void (*find)(void), uint64_t grain, int kind) {
  void (*const what[3])(void) = {find, copy, every_tag};
  double medians[3];
  char name[64];
  measure(what, medians);
  double ms = medians[0] * 1e3, limit = medians[1] * 1e3, every = medians[2] * 1e3;
  snprintf(name, sizeof name, "version/%s/%llu/%s", search, (unsigned long long)grain, kinds[kind]);
  printf("%-30s %8.3f ms         every tag %.3f ms; memcpy %.2f ms (%.2f %%)\n", name, ms, every,
         limit, 100 * ms / limit);
  row(name, ms, "ms", "every-tag", every, "memcpy", limit);
}

static void cells(uint64_t grain) {
  for (int kind = 0; kind < KINDS; kind++) {
    require(mlfab__tags_init(&env, &tags, n * 4, grain * 4) == 0, "out of memory");
    tags_touch(&tags, 0, n * 4, 1);
    change(kind);
    report_rate(grain, kind);
    if (kind == CLUSTERED || kind == SCATTERED) {
      report_time("next", next, grain, kind);
      report_time("bitmap", bitmap, grain, kind);
    }
    mlfab__tags_free(&env, &tags);
  }
}

int main(int argc, char **argv) {
  single_open(argc, argv);
  n = quick ? 2500000 : 25000000;
  trials = quick ? 5 : 15;
  mlfab__env_init(&env, NULL);
  before = memory(n * 4);
  after = memory(n * 4);
  other = memory(n * 4);
  keep = memory(n / 8 + 8);
  cells(256);
  cells(1);
  free(before);
  free(after);
  free(other);
  free(keep);
  single_close();
  return sink == 0;
}
