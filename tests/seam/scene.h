/* scene.h - SCENE(name) begins a test. A file is a list of scenes; main runs them in this order. */
#ifndef SCENE_H
#define SCENE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static struct CMUnitTest scene_list[64];
static uint32_t scene_count;

static inline void scene_add(struct CMUnitTest test) {
  if (scene_count == sizeof scene_list / sizeof *scene_list) abort();
  scene_list[scene_count++] = test;
}

#define BEFORE_MAIN __attribute__((constructor)) static void
/* Adds a test to the list: its function, what runs before and after it, and its first state. */
#define SCENE_ADD(name, ...) \
  BEFORE_MAIN name##_joins(void) { scene_add((struct CMUnitTest){#name, __VA_ARGS__}); }
#define SCENE_WITH(name, before, after)      \
  static void name(void **state);            \
  SCENE_ADD(name, name, before, after, NULL) \
  static void name(void **state __attribute__((unused)))
/* A header that plays peers defines what ends a scene. */
#ifndef SCENE_ENDS
#define SCENE_ENDS (void)0
#endif
#define SCENE(name)                       \
  static void name##_is_played(void);     \
  static void name(void **state) {        \
    (void)state;                          \
    name##_is_played();                   \
    SCENE_ENDS;                           \
  }                                       \
  SCENE_ADD(name, name, NULL, NULL, NULL) \
  static void name##_is_played(void)

/* A struct with these members. SIZED: and with its size. */
#define OF(type, ...) ((type){__VA_ARGS__})
#define SIZED(type, ...) ((type){.size = sizeof(type), __VA_ARGS__})

/* A frame of this type is decoded as m, and handled. */
#define ON_FRAME(type, meta, bytes, TYPE, name, ...)           \
  do {                                                         \
    mlfab__##name m_, *m = &m_;                                \
    if ((type) != MLFAB__##TYPE) break;                        \
    assert_int_equal(mlfab__decode_##name(meta, bytes, m), 0); \
    __VA_ARGS__;                                               \
  } while (0)

/* Words given to the program choose the scenes with one of them in their names. */
int main(int argc, char **argv) {
  uint32_t chosen = argc > 1 ? 0 : scene_count;
  for (uint32_t i = 0; argc > 1 && i < scene_count; i++) {
    int word = 1;
    while (word < argc && !strstr(scene_list[i].name, argv[word])) word++;
    if (word < argc) scene_list[chosen++] = scene_list[i];
  }
  if (!chosen) fprintf(stderr, "no scene of this program has such a name\n");
  return chosen ? _cmocka_run_group_tests("scenes", scene_list, chosen, NULL, NULL) : 2;
}

#endif
