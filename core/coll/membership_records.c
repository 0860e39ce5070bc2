/* membership_records.c - the membership as records for the other copy of server 0. See membership.h, mirrored.h.
 *
 * Left out: all that follows from the rest (order, list, lead, rate: mlfab__membership_resume), and mere courtesy (the
 * inquiry; the rank named as missing). */
#include "membership.h"

/* Entry members that are one bit in `flags`, from the lowest on. */
/* clang-format off */
#define RECORDS_FLAGS(X) \
  X(alive) X(done) X(asked) X(member) X(ready) X(arena) X(left) X(finished) X(frozen) X(moved) \
  X(well) X(joins) X(open) X(over_well) X(fresh)
/* clang-format on */

static uint32_t records_encode(const void *self, uint32_t record, uint8_t *bytes) {
  const mlfab__membership *m = self;
  if (record == 0) {
    mlfab__membership_state state = {.phase = m->phase,
                                     .epoch = m->epoch,
                                     .freezing = m->freezing,
                                     .kept = m->kept,
                                     .finisher = m->finisher,
                                     .keeper = m->keeper,
                                     .limit = m->limit,
                                     .go = m->go,
                                     .verdict = m->verdict};
    memcpy(state.seek, m->seek, sizeof state.seek);
    return mlfab__encode_membership_state(bytes, &state);
  }
  const mlfab__membership_entry *entry = &m->entries[record - 1];
  mlfab__membership_worker worker = {.lost = entry->lost,
                                     .over_owed = entry->over_owed,
                                     .incarnation = entry->incarnation,
                                     .place = entry->place,
                                     .calls = entry->calls,
                                     .begun = entry->begun,
                                     .ask = entry->ask};
  uint32_t bit = 0;
#define RECORDS_GET(name) worker.flags |= (uint32_t)(entry->name != 0) << bit++;
  RECORDS_FLAGS(RECORDS_GET)
#undef RECORDS_GET
  return mlfab__encode_membership_worker(bytes, &worker);
}

/* Is it a rank, or none? */
static int records_rank(const mlfab__membership *m, int32_t rank) {
  return rank == MLFAB_NO_RANK || (rank >= 0 && (uint32_t)rank < m->workers);
}

static int records_decode_state(mlfab__membership *m, const uint8_t *bytes, uint32_t n, int apply) {
  mlfab__membership_state in;
  if (mlfab__decode_membership_state(bytes, n, &in) || in.phase > MLFAB__MEMBERSHIP_RUNNING ||
      !records_rank(m, in.finisher) || !records_rank(m, in.keeper) ||
      (in.freezing && in.finisher == MLFAB_NO_RANK))
    return MLFAB_ERR_FRAME;
  if (!apply) return 0;
  m->phase = (enum mlfab__membership_phase)in.phase;
  m->epoch = in.epoch;
  m->freezing = in.freezing != 0;
  m->kept = in.kept;
  m->finisher = in.finisher;
  m->keeper = in.keeper;
  m->limit = in.limit;
  memcpy(m->seek, in.seek, sizeof m->seek);
  m->go = in.go;
  m->verdict = in.verdict;
  return 0;
}

static int records_decode(void *self, uint32_t record, const uint8_t *bytes, uint32_t n,
                          int apply) {
  mlfab__membership *m = self;
  mlfab__membership_worker in;
  if (record == 0) return records_decode_state(m, bytes, n, apply);
  if (mlfab__decode_membership_worker(bytes, n, &in)) return MLFAB_ERR_FRAME;
  if (!apply) return 0;
  mlfab__membership_entry *entry = &m->entries[record - 1];
  *entry = (mlfab__membership_entry){.lost = in.lost,
                                     .over_owed = in.over_owed,
                                     .incarnation = in.incarnation,
                                     .place = in.place,
                                     .calls = in.calls,
                                     .begun = in.begun,
                                     .ask = in.ask};
  uint32_t bit = 0;
#define RECORDS_SET(name) entry->name = (uint8_t)(in.flags >> bit++ & 1);
  RECORDS_FLAGS(RECORDS_SET)
#undef RECORDS_SET
  return 0;
}

static void records_begin(void *self) { mlfab__membership_resume(self); }

MLFAB__INTERNAL mlfab__mirrored mlfab__membership_mirrored(mlfab__membership *membership) {
  return (mlfab__mirrored){.name = "membership",
                           .self = membership,
                           .records = 1 + membership->workers,
                           .encode = records_encode,
                           .decode = records_decode,
                           .begin = records_begin,
                           .port = &membership->port,
                           .workers = 1,
                           .touch = &membership->touch};
}
