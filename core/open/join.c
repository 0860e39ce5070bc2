/* join.c - opens a context of a process that has no number. See join.h. */
#include "join.h"

#include "../node/growth.h"

enum { JOIN_ATTEMPTS = 8 };

MLFAB__INTERNAL int mlfab__open_join(const mlfab_config *config, const mlfab__open_steps *steps,
                                     mlfab **ctx_p, mlfab_error *error_p) {
  mlfab_error error;
  mlfab_config asking = *config;
  int code = steps->key(&asking, &error); /* once: from here on the key is in `key` */
  if (!code) code = MLFAB_ERR_RANK_TAKEN;
  asking.key_from = NULL;
  asking.key_file[0] = 0;
  mlfab_config whole = asking;
  /* The name of this node, and so the names of its files, are not known yet. */
  asking.log[0] = asking.metrics[0] = asking.trace[0] = 0;
  for (int attempt = 0; attempt < JOIN_ATTEMPTS && code == MLFAB_ERR_RANK_TAKEN; attempt++) {
    mlfab *asker = NULL;
    code = steps->wait(&asking, 1, &asker, &error);
    if (code) break;
    const struct mlfab__joining told = asker->node->growing->told;
    mlfab_abandon(&asker);
    mlfab_config full = whole;
    full.join = 0;
    full.rank = told.rank;
    full.workers = told.workers;
    full.workers_max = told.workers_max;
    full.servers = told.servers;
    full.servers_max = told.servers_max;
    full.dedicated = told.dedicated;
    full.scheduler = told.scheduler;
    full.replicas = told.replicas;
    code = steps->wait(&full, 0, ctx_p, &error);
    steps->forget(&full);
  }
  steps->forget(&asking);
  steps->forget(&whole);
  if (error_p) *error_p = error;
  return code;
}
