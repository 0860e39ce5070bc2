/* slab.c - memory of the host for the blocks of a server's shards. See slab.h. */
#include "slab.h"

/* The least size of a new area: only written pages take memory. */
enum { SLAB_LEAST_BYTES = 32 << 20, SLAB_LEAST = 64 };
/* Blocks of more bytes begin at a page, so that renewing whole blocks divides none of them between files. */
enum { SLAB_LARGE = 32768, SLAB_PAGE = 4096 };

static void slab_free_area(mlfab__env *env, const mlfab__slab_areas *slab, mlfab__slab_area *area) {
  if (area->at && area->shared)
    slab->on->release(slab->memory, area->at, slab->empties);
  else
    mlfab__free_aligned(env, area->at, area->count * area->stride);
  mlfab__free(env, area->free, area->count * sizeof *area->free);
  mlfab__free(env, area, sizeof *area);
}

static mlfab__slab_area *slab_new_area(mlfab__env *env, mlfab__slab_areas *slab, uint64_t stride,
                                       uint32_t count) {
  if (count > SIZE_MAX / 2 / stride) return NULL;
  mlfab__slab_area *area = mlfab__alloc(env, sizeof *area);
  if (!area) return NULL;
  area->stride = stride;
  area->count = count;
  area->free = mlfab__alloc_array(env, count, sizeof *area->free);
  if (area->free && slab->on) area->at = slab->on->alloc(slab->memory, count * stride, 1);
  area->shared = area->at != NULL;
  if (area->free && !area->at) area->at = mlfab__alloc_aligned(env, count * stride);
  if (!area->at) {
    slab_free_area(env, slab, area);
    return NULL;
  }
  for (uint32_t i = 0; i < count; i++) area->free[i] = count - 1 - i;
  area->next = slab->areas;
  slab->areas = area;
  return area;
}

MLFAB__INTERNAL uint8_t *mlfab__slab_take(mlfab__env *env, mlfab__slab *self, uint32_t bytes,
                                          uint32_t more) {
  mlfab__slab_areas *slab = (mlfab__slab_areas *)self;
  uint32_t unit = bytes > SLAB_LARGE ? SLAB_PAGE : 64;
  uint64_t stride = ((uint64_t)bytes + unit - 1) / unit * unit;
  mlfab__slab_area *area = slab->areas;
  while (area && (area->stride != stride || area->used == area->count)) area = area->next;
  if (!area) {
    uint64_t least = slab->on ? mlfab__min(SLAB_LEAST, SLAB_LEAST_BYTES / stride) : 0;
    area = slab_new_area(env, slab, stride, (uint32_t)mlfab__max((uint64_t)more + 1, least));
  }
  if (!area) return NULL;
  return area->at + area->free[area->count - ++area->used] * stride;
}

MLFAB__INTERNAL void mlfab__slab_give(mlfab__env *env, mlfab__slab *self, uint8_t *at) {
  mlfab__slab_areas *slab = (mlfab__slab_areas *)self;
  if (!at) return;
  mlfab__slab_area **link = &slab->areas;
  while ((uintptr_t)at - (uintptr_t)(*link)->at >= (*link)->count * (*link)->stride)
    link = &(*link)->next;
  mlfab__slab_area *area = *link;
  area->free[area->count - area->used--] = (uint32_t)((uint64_t)(at - area->at) / area->stride);
  if (area->used > 0) return;
  *link = area->next;
  slab_free_area(env, slab, area);
}
