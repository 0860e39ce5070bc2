/* budget.h - an allocator that gives so many pieces of memory, and counts the bytes that are out. */
#ifndef BUDGET_H
#define BUDGET_H

#include "../../mlfab.h"

#include <stdlib.h>

typedef struct budget {
  uint64_t left; /* pieces */
  int64_t bytes;
} budget;

static inline void *budget_allocate(void *user, size_t bytes) {
  budget *b = (budget *)user;
  if (b->left == 0) return NULL;
  b->left--;
  b->bytes += (int64_t)bytes;
  return malloc(bytes);
}

static inline void budget_release(void *user, void *memory, size_t bytes) {
  ((budget *)user)->bytes -= (int64_t)bytes;
  free(memory);
}

static inline mlfab_env budget_env(budget *b) {
  return (mlfab_env){
      .size = sizeof(mlfab_env), .user = b, .allocate = budget_allocate, .release = budget_release};
}

#endif
