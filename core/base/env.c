/* env.c - memory, log and error records on top of a node's hooks.
 *
 * Only the default allocator uses the C library's state. Clocks and files belong to the caller.
 *
 * Invariants: `bytes` is the sum of all memory allocated and not yet freed, so it is 0 for a node that has
 * freed everything. Nothing is locked: an env belongs to one node. */
#include "env.h"

#include <stdio.h>
#include <stdlib.h>

#define ENV_ALIGNMENT 64u /* a cache line, and the widest vector */

static void *env_default_allocate(void *user, size_t bytes) {
  (void)user;
  return malloc(bytes);
}

static void env_default_release(void *user, void *memory, size_t bytes) {
  (void)user;
  (void)bytes;
  free(memory);
}

MLFAB__INTERNAL int mlfab__env_init(mlfab__env *env, const mlfab_env *given) {
  memset(env, 0, sizeof *env);
  if (given != NULL) {
    size_t known = given->size < sizeof env->hooks ? given->size : sizeof env->hooks;
    /* A size too small for the first members was never set. */
    if (known < offsetof(mlfab_env, user)) return MLFAB_ERR_CONFIG;
    memcpy(&env->hooks, given, known);
  }
  env->hooks.size = (uint32_t)sizeof env->hooks;
  if (env->hooks.log_level == 0) env->hooks.log_level = MLFAB_LOG_WARN;
  if ((env->hooks.allocate == NULL) != (env->hooks.release == NULL)) return MLFAB_ERR_CONFIG;
  if (env->hooks.allocate == NULL) {
    env->hooks.allocate = env_default_allocate;
    env->hooks.release = env_default_release;
  }
  return 0;
}

static void *env_allocate(mlfab__env *env, size_t bytes) {
  void *memory = env->hooks.allocate(env->hooks.user, bytes);
  env->allocations++;
  if (memory != NULL) env->bytes += bytes;
  return memory;
}

MLFAB__INTERNAL void *mlfab__alloc(mlfab__env *env, size_t bytes) {
  void *memory = bytes == 0 ? NULL : env_allocate(env, bytes);
  if (memory != NULL) memset(memory, 0, bytes);
  return memory;
}

MLFAB__INTERNAL void *mlfab__alloc_array(mlfab__env *env, size_t count, size_t size) {
  if (size != 0 && count > SIZE_MAX / size) return NULL;
  return mlfab__alloc(env, count * size);
}

MLFAB__INTERNAL void mlfab__free(mlfab__env *env, void *memory, size_t bytes) {
  if (memory == NULL) return;
  assert(env->bytes >= bytes);
  env->bytes -= bytes;
  env->hooks.release(env->hooks.user, memory, bytes);
}

MLFAB__INTERNAL void *mlfab__grow(mlfab__env *env, void *old, uint32_t *room_p, uint64_t need,
                                  size_t size) {
  if (old != NULL && need <= *room_p) return old;
  if (need > UINT32_MAX / 2) return NULL;
  uint64_t room = mlfab__max(mlfab__max(need, 2 * (uint64_t)*room_p), 8);
  void *grown = mlfab__alloc_array(env, room, size);
  if (grown == NULL) return NULL;
  if (old != NULL) {
    memcpy(grown, old, *room_p * size);
    mlfab__free(env, old, *room_p * size);
  }
  *room_p = (uint32_t)room;
  return grown;
}

/* The hooks guarantee 16-byte alignment only. The original address is stored right before the aligned one;
 * the slack always has room for it. */
#define ENV_SLACK (ENV_ALIGNMENT + sizeof(void *))

MLFAB__INTERNAL void *mlfab__alloc_aligned(mlfab__env *env, size_t bytes) {
  if (bytes == 0 || bytes > SIZE_MAX - ENV_SLACK) return NULL;
  unsigned char *memory = env_allocate(env, bytes + ENV_SLACK);
  if (memory == NULL) return NULL;
  unsigned char *aligned = memory + sizeof(void *);
  aligned += (ENV_ALIGNMENT - (uintptr_t)aligned % ENV_ALIGNMENT) % ENV_ALIGNMENT;
  memcpy(aligned - sizeof(void *), &memory, sizeof memory);
  return aligned;
}

MLFAB__INTERNAL void mlfab__free_aligned(mlfab__env *env, void *memory, size_t bytes) {
  void *original;
  if (memory == NULL) return;
  memcpy(&original, (unsigned char *)memory - sizeof(void *), sizeof original);
  mlfab__free(env, original, bytes + ENV_SLACK);
}

/* Removes a doubled beginning ("push: push: ..."): a text that quotes another text may have it. */
static void env_begin_once(char *text) {
  const char *colon = strstr(text, ": ");
  size_t bytes = colon ? (size_t)(colon - text) + 2 : 0;
  while (bytes > 0 && !strncmp(text, text + bytes, bytes))
    memmove(text, text + bytes, strlen(text + bytes) + 1);
}

MLFAB__INTERNAL int mlfab__error(mlfab_error *error, int code, int32_t rank, int is_server,
                                 uint64_t waited_ns, const char *format, ...) {
  va_list arguments;
  if (error == NULL) return code;
  memset(error, 0, sizeof *error);
  error->code = code;
  error->rank = rank;
  error->is_server = is_server != 0;
  error->waited_ns = waited_ns;
  va_start(arguments, format);
  mlfab__vformat(error->text, sizeof error->text, format, arguments);
  va_end(arguments);
  env_begin_once(error->text);
  return code;
}

MLFAB__INTERNAL void mlfab__log(const mlfab__env *env, int level, const char *format, ...) {
  char line[512];
  va_list arguments;
  if (env->hooks.log == NULL || level > (int)env->hooks.log_level) return;
  va_start(arguments, format);
  mlfab__vformat(line, sizeof line, format, arguments);
  va_end(arguments);
  env_begin_once(line);
  env->hooks.log(env->hooks.user, level, line);
}

MLFAB__INTERNAL const char *mlfab__duration(char buffer[24], uint64_t ns) {
  static const char *const names[] = {"ns", "us", "ms", "s"};
  uint64_t unit = 1;
  unsigned which = 0;
  for (; which < 3 && ns / unit >= 1000; which++) unit *= 1000;
  /* One decimal below 100, truncated, so that 999.99 ms is not printed as 1000 ms. */
  uint64_t whole = ns / unit, tenth = unit == 1 ? 0 : ns % unit / (unit / 10);
  if (whole < 100 && tenth != 0)
    snprintf(buffer, 24, "%u.%u %s", (unsigned)whole, (unsigned)tenth, names[which]);
  else
    snprintf(buffer, 24, "%llu %s", (unsigned long long)whole, names[which]);
  return buffer;
}
