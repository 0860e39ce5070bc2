/* windows.c - records which updates were decided. See windows.h. */
#include "windows.h"

MLFAB__INTERNAL int mlfab__windows_init(mlfab__env *env, mlfab__windows *windows,
                                        uint32_t workers) {
  windows->workers = workers;
  windows->windows = mlfab__alloc_array(env, workers, sizeof *windows->windows);
  return windows->windows ? 0 : MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL void mlfab__windows_free(mlfab__env *env, mlfab__windows *windows) {
  mlfab__free(env, windows->windows, windows->workers * sizeof *windows->windows);
  memset(windows, 0, sizeof *windows);
}

MLFAB__INTERNAL int mlfab__windows_admit(mlfab__windows *windows, uint32_t worker,
                                         uint32_t incarnation) {
  mlfab__window *window = &windows->windows[worker];
  if (incarnation < window->incarnation) return MLFAB_ERR_FENCED;
  if (incarnation > window->incarnation) {
    memset(window, 0, sizeof *window);
    window->incarnation = incarnation;
  }
  return 0;
}

MLFAB__INTERNAL enum mlfab__decision mlfab__windows_ask(const mlfab__window *window, uint64_t seq,
                                                        uint32_t members) {
  uint64_t last = seq + members - 1;
  if (last > window->top) return MLFAB__UNDECIDED;
  uint64_t back = window->top - last;
  /* Older than the window: it must never be applied again, and workers wait only for newer updates. */
  if (back >= MLFAB__WINDOW) return MLFAB__NOT_APPLIED;
  if (window->applied[back / 64] >> (back % 64) & 1) return MLFAB__APPLIED;
  return window->dropped[back / 64] >> (back % 64) & 1 ? MLFAB__DROPPED : MLFAB__NOT_APPLIED;
}

/* Shifts a bitmap by `by` updates. */
static void windows_shift(uint64_t bits[4], uint64_t by) {
  if (by >= MLFAB__WINDOW) {
    memset(bits, 0, 4 * sizeof bits[0]);
    return;
  }
  if (by == 1) { /* nearly always */
    for (int i = 3; i > 0; i--) bits[i] = bits[i] << 1 | bits[i - 1] >> 63;
    bits[0] <<= 1;
    return;
  }
  uint32_t words = (uint32_t)(by / 64), rest = (uint32_t)(by % 64);
  for (int i = 3; i >= 0; i--) {
    uint64_t high = (uint32_t)i >= words ? bits[(uint32_t)i - words] : 0;
    uint64_t low = (uint32_t)i >= words + 1 ? bits[(uint32_t)i - words - 1] : 0;
    bits[i] = rest ? (high << rest) | (low >> (64 - rest)) : high;
  }
}

MLFAB__INTERNAL void mlfab__windows_decide(mlfab__window *window, uint64_t seq, uint32_t members,
                                           int code) {
  uint64_t last = seq + members - 1;
  assert(last > window->top);
  windows_shift(window->applied, last - window->top);
  windows_shift(window->dropped, last - window->top);
  window->top = last;
  if (code != 0 && code != MLFAB_ERR_DROPPED) return;
  if (code == 0) window->taken += members;
  uint64_t *bits = code == 0 ? window->applied : window->dropped;
  for (uint32_t i = 0; i < members && i < MLFAB__WINDOW; i++)
    bits[i / 64] |= (uint64_t)1 << (i % 64);
}
