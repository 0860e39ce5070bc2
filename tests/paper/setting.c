/* setting.c - the stragglers: compute and network settings of MLfabric §7, from a seed.
 *
 * Every number is a function of (seed, what, which, when) alone: two algorithms that reach the same
 * iteration or the same second have the same slow workers and links.
 *
 * Source: MLfabric §7, "Background compute and network load". */
#include "paper.h"

const paper_compute paper_c1 = {"C1", 0.10, 2}, paper_c2 = {"C2", 0.10, 4},
                    paper_c3 = {"C3", 0.04, 2};
const paper_network paper_n1 = {"N1", {0, 0, 0, 0.1, 0.9}},
                    paper_n2 = {"N2", {0, 0.1, 0.1, 0.1, 0.7}},
                    paper_n3 = {"N3", {0.5, 0, 0, 0, 0.5}},
                    paper_skewed = {"skewed", {0.2, 0, 0, 0, 0.8}};
const double paper_gbps[LEVELS] = {1, 2.5, 3.3, 5, 10};

enum { COMPUTE_MS = 100 };

/* splitmix64 of its arguments, in [0, 1). */
static double draw(uint64_t seed, uint64_t what, uint64_t which, uint64_t when) {
  uint64_t word[4] = {seed, what, which, when}, x = 0;
  for (int i = 0; i < 4; i++) {
    x = (x ^ word[i]) + 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    x ^= x >> 31;
  }
  return (double)(x >> 11) / 9007199254740992.0;
}

uint64_t paper_compute_ns(const paper_compute *c, uint64_t seed, uint32_t worker, uint64_t step) {
  double ms = COMPUTE_MS * (draw(seed, 1, worker, step) < c->share ? c->factor : 1.0);
  return (uint64_t)(ms * MS);
}

uint64_t paper_slowest_ns(const paper_compute *c, uint64_t seed, uint64_t step) {
  uint64_t slowest = 0;
  for (uint32_t i = 0; i < WORKERS; i++) {
    uint64_t ns = paper_compute_ns(c, seed, i, step);
    if (ns > slowest) slowest = ns;
  }
  return slowest;
}

uint32_t paper_level(const paper_network *n, uint64_t seed, uint32_t host, uint32_t out,
                     uint64_t period) {
  double x = draw(seed, 2 + out, host, period);
  uint32_t level = 0;
  while (level + 1 < LEVELS && x >= n->share[level]) x -= n->share[level++];
  return level;
}

uint64_t paper_rate(const paper_network *n, uint64_t seed, uint32_t host, uint32_t out,
                    uint64_t period) {
  return (uint64_t)(paper_gbps[paper_level(n, seed, host, out, period)] * 0.1 * FULL_RATE + 0.5);
}
