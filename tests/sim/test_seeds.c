/* test_seeds.c - seeds.h: the seeds that run, and bad input; and seeds.txt: each line names a test that exists. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* setenv */
#endif
#include "seeds.h"

#include <glob.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t ran[64];
static uint32_t nran;
static int twice;

static void collect(uint64_t seed) {
  assert_true(nran < 64);
  ran[nran++] = seed;
  twice += seeds_again();
  assert_false(seeds_again());
}

/* Runs three seeds of the test `name` with this environment. */
static void run(const char *name, const char *seed, const char *first) {
  setenv("MLFAB_SEED", seed, 1);
  setenv("MLFAB_SEED_FIRST", first, 1);
  nran = 0;
  twice = 0;
  seeds_run_of(__FILE__, name, 3, collect);
}

TEST(test_ranges) {
  run("dag", "", "");
  const uint64_t plain[] = {2400, 1, 2, 3}; /* what seeds.txt lists comes first */
  assert_int_equal(nran, 4);
  assert_memory_equal(ran, plain, sizeof plain);
  assert_int_equal(twice, 2);
  run("dag", "", "3000001");
  const uint64_t lane[] = {3000001, 3000002, 3000003};
  assert_int_equal(nran, 3);
  assert_memory_equal(ran, lane, sizeof lane);
  assert_int_equal(twice, 1);
  run("dag", "7", "3000001");
  assert_true(nran == 1 && ran[0] == 7 && twice == 1);
  run("nobody", "", "");
  assert_true(nran == 3 && ran[0] == 1);
}

/* Runs a program with this environment; returns its exit status, and in `text` its words. */
static int hear(const char *seed, const char *first, char *text, size_t room) {
  int ends[2], status;
  size_t n = 0;
  ssize_t got;
  assert_int_equal(pipe(ends), 0);
  pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[1], 2);
    run("dag", seed, first);
    _exit(0);
  }
  close(ends[1]);
  while ((got = read(ends[0], text + n, room - 1 - n)) > 0) n += (size_t)got;
  text[n] = 0;
  close(ends[0]);
  assert_int_equal(waitpid(pid, &status, 0), pid);
  return WEXITSTATUS(status);
}

TEST(test_refused) {
  static const char *const bad[] = {"0", "-1", "1x", "x", " 5", "+5", "", "99999999999999999999"};
  char text[256], want[256];
  for (size_t i = 0; i < 2 * sizeof bad / sizeof *bad; i++) {
    const char *number = bad[i / 2];
    const int status = hear(i % 2 ? number : "", i % 2 ? "" : number, text, sizeof text);
    snprintf(want, sizeof want, "%s=%s: a number from 1 on is wanted\n",
             i % 2 ? "MLFAB_SEED" : "MLFAB_SEED_FIRST", number);
    assert_int_equal(status, *number ? 2 : 0);
    assert_string_equal(text, *number ? want : "");
  }
}

/* Does a program of tests/sim run seeds for a test of this name? */
static int exists(const char *name) {
  char call[64], line[512];
  glob_t files;
  int found = 0;
  snprintf(call, sizeof call, "seeds_run(\"%s\",", name);
  assert_int_equal(glob("tests/sim/test_*.c", 0, NULL, &files), 0);
  for (size_t i = 0; i < files.gl_pathc && !found; i++) {
    FILE *file = fopen(files.gl_pathv[i], "r");
    while (file && !found && fgets(line, sizeof line, file)) found = strstr(line, call) != NULL;
    if (file) fclose(file);
  }
  globfree(&files);
  return found;
}

TEST(test_list) {
  enum { MOST = 158 }; /* of seeds_next */
  char line[256], name[32];
  unsigned long long seed;
  int text = 0, number = 0;
  FILE *file = seeds_open();
  if (!file) skip(); /* it was not started in the root of the tree */
  while (fgets(line, sizeof line, file)) {
    number++;
    if (line[0] == '#') continue;
    if (sscanf(line, "%31[a-z] %llu %n", name, &seed, &text) != 2 || seed < 1 || !line[text])
      fail_msg("seeds.txt, line %d: a test, a seed and a text are wanted", number);
    if (strlen(line) > MOST)
      fail_msg("seeds.txt, line %d: more than %d characters", number, (int)MOST);
    if (!exists(name))
      fail_msg("seeds.txt, line %d: no test of tests/sim runs seeds of '%s'", number, name);
  }
  fclose(file);
}

TESTS(NULL, NULL)
