/* votes.c - a build with replicas and without checkpoints has no file for votes: opening says so. */
#include "mlfab.h"

#include <stdio.h>
#include <string.h>

int main(void) {
  mlfab *ctx = NULL;
  mlfab_error error;
  mlfab_config config;
  mlfab_config_init(&config);
  config.replicas = config.dedicated = 1;
  config.workers = config.servers = 1;
  config.scheduler = MLFAB_SCHEDULER_OWN;
  snprintf(config.coordinator, sizeof config.coordinator, "127.0.0.1:9 127.0.0.1:10");
  snprintf(config.vote_dir, sizeof config.vote_dir, ".");
  int code = mlfab_open(&config, &ctx, &error);
  if (code == MLFAB_ERR_UNSUPPORTED && strstr(error.text, "vote_dir (MLFAB_VOTE_DIR)") &&
      strstr(error.text, "MLFAB_WITH_CHECKPOINT is 0"))
    return 0;
  fprintf(stderr, "%s: %s\n", mlfab_error_name(code), error.text);
  return 1;
}
