/* divergence.c - the divergence bound, and the ledger that keeps it. See divergence.h. */
#include "divergence.h"

#include <math.h>

/* ---- arithmetic that rounds up, for numbers >= 0 ---- */

static double divergence_next(double x) {
  uint64_t bits;
  if (!mlfab__finite(x)) return x;
  memcpy(&bits, &x, sizeof bits);
  bits++;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static double divergence_add(double a, double b) {
  double large = a > b ? a : b, small = a > b ? b : a;
  double sum = mlfab__network_exact(large + small);
  if (!mlfab__finite(sum)) return sum;
  /* The lost part is a double, as `large` is the larger number. */
  double lost = mlfab__network_exact(small - mlfab__network_exact(sum - large));
  return lost > 0 ? divergence_next(sum) : sum;
}

static double divergence_times(double a, double b) {
  if (!(a > 0) || !(b > 0)) return 0;
  double product = mlfab__network_exact(a * b);
  if (!mlfab__finite(product)) return product;
  if (product < 1e-280) return divergence_next(product); /* perhaps no double holds the lost part */
  return fma(a, b, -product) > 0 ? divergence_next(product) : product;
}

static double divergence_affine(double a, double x, double c) {
  return divergence_add(divergence_times(a, x), c);
}

/* By bits: -ffast-math assumes that no comparison sees a NaN or an infinity. */
static int divergence_is_norm(double x) { return mlfab__finite(x) && x >= 0; }

static int divergence_is_infinite(double x) {
  double never = mlfab__network_never();
  return memcmp(&x, &never, sizeof x) == 0;
}

MLFAB__INTERNAL double mlfab__divergence_norm(double squares, uint64_t n, double scale) {
  if (!mlfab__finite(squares) || !mlfab__finite(scale)) return squares + scale;
  /* Each square and each of n - 1 sums lost at most 2^-53 of itself, or was below the normal numbers. */
  double loss = ((double)n + 2) * 0x1p-52;
  double sum = divergence_add(squares, divergence_times(squares, loss));
  sum = divergence_add(sum, (double)n * 0x1p-1022);
  return divergence_times(divergence_next(sqrt(sum)), fabs(scale));
}

/* ---- the ledger ---- */

MLFAB__INTERNAL int mlfab__divergence_check(double gamma, double div_max) {
  if (!divergence_is_norm(gamma) || gamma > 1) return MLFAB_ERR_ARGUMENT;
  return divergence_is_norm(div_max) || divergence_is_infinite(div_max) ? 0 : MLFAB_ERR_ARGUMENT;
}

MLFAB__INTERNAL int mlfab__divergence_init(mlfab__divergence *d, double gamma, double div_max,
                                           uint64_t commit, double history) {
  int code = mlfab__divergence_check(gamma, div_max);
  if (code || !divergence_is_norm(history)) return MLFAB_ERR_ARGUMENT;
  memset(d, 0, sizeof *d);
  d->gamma = gamma;
  d->div_max = div_max;
  d->committed = d->acknowledged = d->start = commit;
  d->history = d->base = history;
  return 0;
}

static mlfab__divergence_entry *divergence_at(mlfab__divergence *d, uint32_t i) {
  return &d->ring[(d->first + i) % MLFAB__DIVERGENCE_ENTRIES];
}

static int divergence_admits(const mlfab__divergence *d, double norm, double decay) {
  if (!divergence_is_norm(norm)) return 0;
  if (d->acknowledged > d->committed || divergence_is_infinite(d->div_max)) return 1;
  double after = divergence_add(d->bound, divergence_affine(decay, d->history, norm));
  return mlfab__finite(after) && after <= d->div_max;
}

MLFAB__INTERNAL int mlfab__divergence_may(const mlfab__divergence *d, double norm) {
  return divergence_admits(d, norm, d->gamma);
}

MLFAB__INTERNAL int mlfab__divergence_may_part(const mlfab__divergence *d, double norm) {
  return divergence_admits(d, norm, 1);
}

/* Merges each pair of neighbours into one entry. */
static void divergence_merge(mlfab__divergence *d) {
  uint32_t pairs = d->n / 2;
  for (uint32_t i = 0; i < pairs; i++) {
    mlfab__divergence_entry e = *divergence_at(d, 2 * i), f = *divergence_at(d, 2 * i + 1);
    e.last = f.last;
    e.a = divergence_affine(f.a, e.g, e.a);
    e.c = divergence_add(e.c, divergence_affine(f.a, e.d, f.c));
    e.g = divergence_times(f.g, e.g);
    e.d = divergence_affine(f.g, e.d, f.d);
    *divergence_at(d, i) = e;
  }
  if (d->n % 2) *divergence_at(d, pairs) = *divergence_at(d, d->n - 1);
  d->n -= pairs;
}

static int divergence_record(mlfab__divergence *d, double norm, double decay) {
  if (!divergence_is_norm(norm)) return MLFAB_ERR_ARGUMENT;
  mlfab__divergence_entry e = {.a = d->gamma, .c = norm, .g = decay, .d = norm};
  double step = divergence_affine(e.a, d->history, e.c);
  e.last = ++d->committed;
  d->history = divergence_affine(e.g, d->history, e.d);
  if (d->committed <= d->acknowledged) {
    d->base = d->history;
    d->start = d->committed;
    return 0;
  }
  d->bound = divergence_add(d->bound, step);
  if (d->n == MLFAB__DIVERGENCE_ENTRIES) divergence_merge(d);
  *divergence_at(d, d->n++) = e;
  return 0;
}

MLFAB__INTERNAL int mlfab__divergence_append(mlfab__divergence *d, double norm) {
  return divergence_record(d, norm, d->gamma);
}

MLFAB__INTERNAL int mlfab__divergence_append_part(mlfab__divergence *d, double norm) {
  return divergence_record(d, norm, 1);
}

/* Computes bound and history again from `base`. Smaller old values stay: they are valid, and the rounding of merged
 * entries may make the new ones larger. */
static void divergence_sum(mlfab__divergence *d) {
  double history = d->base, bound = 0;
  for (uint32_t i = 0; i < d->n; i++) {
    const mlfab__divergence_entry *e = divergence_at(d, i);
    bound = divergence_add(bound, divergence_affine(e->a, history, e->c));
    history = divergence_affine(e->g, history, e->d);
  }
  if (bound < d->bound) d->bound = bound;
  if (history < d->history) d->history = history;
  if (d->n == 0) {
    d->bound = 0;
    d->base = d->history;
  }
}

MLFAB__INTERNAL void mlfab__divergence_acked(mlfab__divergence *d, uint64_t r) {
  if (r <= d->acknowledged) return;
  d->acknowledged = r;
  while (d->n > 0 && d->ring[d->first].last <= r) {
    const mlfab__divergence_entry *e = &d->ring[d->first];
    d->base = divergence_affine(e->g, d->base, e->d);
    d->start = e->last;
    d->first = (d->first + 1) % MLFAB__DIVERGENCE_ENTRIES;
    d->n--;
  }
  divergence_sum(d);
}

MLFAB__INTERNAL void mlfab__divergence_measured(mlfab__divergence *d, uint64_t r, double norm) {
  if (r != d->start || !divergence_is_norm(norm) || norm >= d->base) return;
  d->base = norm;
  divergence_sum(d);
}
