/* job.h - the needs of every simulation: headers, dice, and text. */
#ifndef JOB_H
#define JOB_H

#include "../unit/world.h"

#include "../unit/chance.h"
#include "seeds.h"

#define MS 1000000ull
#define SECOND 1000000000ull

/* --- dice: a number that counts the throws; not chance_below's sequence --- */

static inline uint64_t dice_roll(uint64_t *dice) { return mix((*dice)++); }
static inline uint64_t dice_below(uint64_t *dice, uint64_t n) { return dice_roll(dice) % n; }
static inline int dice_chance(uint64_t *dice, double p) {
  return (double)(dice_roll(dice) >> 11) * 0x1p-53 < p;
}

/* Calls fn(user) so much later. */
static inline void sim_later(mlfab_sim *sim, void (*fn)(void *), void *user, uint64_t in_ns) {
  assert_int_equal(mlfab_sim_at(sim, mlfab_sim_clock(sim) + in_ns, fn, user), 0);
}

/* --- text --- */

/* Prints an event with its time, if one seed runs alone. */
static inline void say(mlfab_sim *sim, const char *format, ...) {
  va_list list;
  if (!seeds_alone() || !seeds_now.again) return;
  printf("%9.3f ms ", (double)mlfab_sim_clock(sim) * 1e-6);
  va_start(list, format);
  vprintf(format, list);
  va_end(list);
  printf("\n");
}

static inline const char *last_text(mlfab *node) {
  static mlfab_error error;
  error.text[0] = 0;
  if (node) mlfab_last_error(node, &error);
  return error.text;
}

#endif
