/* probe.c - one rank, configured by its environment, that opens, waits at a barrier and closes.
 *
 * Prints one line a step: "open <error name> <side and rank to blame> <text>", then "barrier ..." or "serve ...", and at the
 * end "strangers <refused>". Usage: probe [milliseconds to sleep before the barrier [how it ends]]
 *
 *   quit     it exits with 0, and does not close
 *   fork     as quit, and a child closes its copy before
 *   forked   a child exits with 0 and does not close; then it closes
 *   exec     it executes itself, without arguments */
#include "node.h"

#include <sys/wait.h>

/* Ends the program if the step failed. */
static void told(const char *step, int code, const mlfab_error *error) {
  tell("%s %s %s %d %s", step, code ? mlfab_error_name(code) : "OK",
       error->is_server ? "server" : "worker", code ? (int)error->rank : MLFAB_NO_RANK,
       code ? error->text : "");
  if (code) exit(close_node(1));
}

/* 1: the program is to close. */
static int end(const char *how, char **argv) {
  int child_closes = !strcmp(how, "fork");
  if (!strcmp(how, "exec")) {
    argv[1] = NULL;
    execv(argv[0], argv);
  }
  if (child_closes || !strcmp(how, "forked")) {
    pid_t child = fork();
    if (child == 0) _exit(child_closes ? mlfab_close(&fabric) : 0);
    if (child < 0 || waitpid(child, NULL, 0) < 0) exit(6);
  }
  return strcmp(how, "quit") != 0 && !child_closes;
}

int main(int argc, char **argv) {
  mlfab_error error = {.text = ""};
  mlfab_config config;
  mlfab_stats stats;
  mlfab_config_init(&config);
  int code = mlfab_config_from_env(&config, &error);
  if (!code) code = mlfab_open(&config, &fabric, &error);
  told("open", code, &error);
  mlfab_rank(fabric, &rank, NULL, NULL);
  if (rank >= 0 && argc > 1) nap(atof(argv[1]));
  code = rank < 0 ? mlfab_serve(fabric, 0) : mlfab_barrier(fabric, NULL);
  if (code) mlfab_last_error(fabric, &error);
  told(rank < 0 ? "serve" : "barrier", code, &error);
  if (!mlfab_get_stats(fabric, &stats, sizeof stats))
    tell("strangers %llu", (unsigned long long)stats.strangers_refused);
  return argc > 2 && !end(argv[2], argv) ? 0 : close_node(0);
}
