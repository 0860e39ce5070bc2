/* fuzz_pack.c - packets from strangers: for any bytes, no read is out of bounds, and an accepted packet can
 * be unpacked.
 *
 * libFuzzer calls LLVMFuzzerTestOneInput. Built with -DFUZZ_MAIN it is a program that makes packets,
 * damages them and also tries random bytes: fuzz_pack [ROUNDS [SEED]], or as many rounds as fit into
 * MLFAB_FUZZ_SECONDS. */
#include "core/kernels/packet.h"
#include "core/base/rng.h"
#include "tests/unit/scale.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static void require(int holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "fuzz_pack: %s\n", what);
  abort();
}

/* A copy of exactly this size, so that a sanitizer detects a read behind it. */
static void *exactly(size_t bytes) {
  void *copy = malloc(bytes > 0 ? bytes : 1);
  require(copy != NULL, "out of memory");
  return copy;
}

static uint64_t accepted;

static void unpack(const mlfab__packet *p) {
  size_t room = (size_t)p->elements * (p->dtype == MLFAB_F32 ? 4 : 8);
  uint8_t *w = exactly(room);
  mlfab__packet_cursor cursor = {0, 0};
  uint32_t first, n, sum = 0, end = 0;
  mlfab__unpack_dense(p, w);
  mlfab__unpack_store(p, w);
  require(!mlfab__unpack_add(p, w, 0.5) || p->dtype == MLFAB_I64 || mlfab__unpack_finite(p),
          "a sum without its terms");
  while (mlfab__unpack_run(p, &cursor, &first, &n)) {
    require(n > 0 && first >= end && first + n <= p->elements, "a run");
    end = first + n;
    sum += n;
  }
  require(sum == p->count, "the runs are not what is kept");
  free(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  mlfab__packet p;
  uint8_t *copy = exactly(bytes);
  if (bytes > 0) memcpy(copy, data, bytes);
  for (size_t at = 0; at <= bytes;) { /* packets follow one another */
    uint32_t taken = mlfab__packet_open(copy + at, bytes - at, &p);
    if (taken == 0) break;
    require(taken <= bytes - at && taken % 8 == 0, "the bytes of a packet");
    require(taken <= mlfab__packet_bound(p.elements, p.dtype) + 2 * (uint64_t)p.kept, "its bound");
    unpack(&p);
    accepted++;
    at += taken;
  }
  free(copy);
  return 0;
}

#ifdef FUZZ_MAIN
#include <time.h>

enum { ELEMENTS = 300, ROOM = 2 * (24 + 40 + ELEMENTS * 8) };

static size_t random_packet(mlfab__rng *prng, uint8_t *out) {
  static double values[ELEMENTS];
  uint64_t keep[ELEMENTS / 64 + 1] = {0};
  mlfab__packet_shape shape = {.dtype = 1 + (int)mlfab__rng_below(prng, 3)};
  shape.half = shape.dtype == MLFAB_I64 ? 0 : (int)mlfab__rng_below(prng, 3);
  shape.offset = mlfab__rng_below(prng, 1000) * 8;
  shape.grain_log2 = (uint32_t)mlfab__rng_below(prng, 6);
  shape.elements = 1 + (uint32_t)mlfab__rng_below(prng, ELEMENTS);
  uint32_t grains = ((shape.elements - 1) >> shape.grain_log2) + 1;
  uint64_t share = 1 + mlfab__rng_below(prng, 40);
  for (uint32_t g = 0; g < grains; g++)
    if (mlfab__rng_below(prng, share) == 0) keep[g / 64] |= (uint64_t)1 << g % 64;
  for (uint32_t i = 0; i < ELEMENTS; i++) values[i] = (double)mlfab__rng_below(prng, 1000);
  return mlfab__packet_marked(out, &shape, values, keep, (int)mlfab__rng_below(prng, 2));
}

/* Changes a bit, a byte, or one number of the header, cuts it, or replaces everything. */
static size_t damage(mlfab__rng *prng, uint8_t *out, size_t bytes) {
  size_t at = (size_t)mlfab__rng_below(prng, bytes);
  uint32_t number = (uint32_t)mlfab__rng_below(prng, 70000);
  switch (mlfab__rng_below(prng, 6)) {
    case 0:
      out[at] ^= (uint8_t)(1u << mlfab__rng_below(prng, 8));
      return bytes;
    case 1:
      out[at] = (uint8_t)mlfab__rng_next(prng);
      return bytes;
    case 2:
      if (bytes >= 24) memcpy(out + 8 + 4 * mlfab__rng_below(prng, 3), &number, 4);
      return bytes;
    case 3:
      if (bytes >= 24) out[20 + mlfab__rng_below(prng, 4)] = (uint8_t)mlfab__rng_below(prng, 20);
      return bytes;
    case 4:
      return at + 1;
    default:
      for (size_t i = mlfab__rng_below(prng, 2) ? 24 : 0; i < bytes; i++)
        out[i] = (uint8_t)mlfab__rng_next(prng);
      return bytes;
  }
}

int main(int argc, char **argv) {
  static uint64_t room[ROOM / 8 + 1];
  uint8_t *out = (uint8_t *)room;
  uint64_t seconds = test_number("MLFAB_FUZZ_SECONDS", 0);
  uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 10) : seconds ? 0 : 200000;
  uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1, done = 0;
  time_t end = time(NULL) + (time_t)seconds;
  while (rounds > 0 ? done < rounds : time(NULL) < end) {
    for (int k = 0; k < 1000 && (rounds == 0 || done < rounds); k++, done++) {
      mlfab__rng prng;
      mlfab__rng_seed(&prng, mlfab__mix(seed) + done);
      size_t bytes = random_packet(&prng, out);
      bytes += random_packet(&prng, out + bytes);
      if (bytes == 0) continue;
      uint64_t before = accepted;
      LLVMFuzzerTestOneInput(out, bytes);
      require(accepted > before, "a valid packet is accepted");
      for (uint64_t n = 1 + mlfab__rng_below(&prng, 4); n > 0; n--) {
        bytes = damage(&prng, out, bytes);
        LLVMFuzzerTestOneInput(out, bytes);
      }
    }
  }
  printf("fuzz_pack: %" PRIu64 " rounds from seed %" PRIu64 "; accepted %" PRIu64 " packets\n",
         done, seed, accepted);
  return 0;
}
#endif
