/* tdf.h - TDF's experiments: what is trained, and how a run is made and counted. Only mlfab.h is used. */
#ifndef TDF_H
#define TDF_H

#include "mlfab.h"

#include <stdint.h>

enum { TDF_WORKERS = 5, TDF_TENSORS = 4 };

/* A stream of random numbers (splitmix64), and its next in [0, 1). */
uint64_t tdf_next(uint64_t *state);
double tdf_uniform(uint64_t *state);

/* ---- tdf_data.c: models and what they learn from ---- */

/* A model with its data. Its weights are one array, which holds the tensors one behind the other. */
typedef struct tdf_task {
  const char *name;
  const char *missing; /* the file that was not found; NULL: the task can be run */
  uint32_t tensors;
  uint64_t count[TDF_TENSORS], params;
  uint32_t samples, batch; /* batch: of a worker's iteration; 0: its whole part */
  uint32_t iterations;
  double rate;  /* of learning */
  int is_error; /* quality is better when it is less, and a loss is a share of it */
  /* Adds the gradient of n samples, times weight, to g. */
  void (*gradient)(const float *w, const uint32_t *sample, uint32_t n, float weight, float *g);
  void (*first)(uint64_t seed, float *w);
  double (*quality)(const float *w); /* on the test set */
  double (*loss)(const float *w);    /* on the training set; NULL: not told */
} tdf_task;

/* Reads what is there of MLFAB_DATA, or of ~/.cache/mlfab. */
enum tdf_task_kind { TDF_REVIEWS = 0, TDF_RATINGS = 1, TDF_DIGITS = 2, TDF_TASKS = 3 };
void tdf_tasks_read(tdf_task task[TDF_TASKS]);
void tdf_tasks_free(void);

/* ---- tdf_train.c: a run of the library ---- */

typedef struct tdf_setting {
  uint32_t sync;                   /* MLFAB_SYNC_BSP, or MLFAB_SYNC_SSP with staleness 3 */
  uint32_t tags;                   /* elements a version tag; 0: none */
  uint32_t half;                   /* MLFAB_HALF_*, of pushes and pulls */
  double change, threshold, decay; /* phi of parameters, of gradients; d of both */
  double drop;                     /* p; 0: 1 */
  int filtered;                    /* pushes go through the filter */
  uint64_t link_rate;              /* of every host, bytes a second; 0: 10 Gbit/s */
} tdf_setting;

/* Bytes are those of all workers; raw: of what they would be dense. Packets: with their headers and
 * indices. Frames: all that was sent, heartbeats too. */
typedef struct tdf_outcome {
  double quality;
  double push_raw, push_values, push_packets, push_frames;
  double pull_raw, pull_values, pull_packets, pull_frames;
  double seconds; /* of virtual time */
} tdf_outcome;

/* 0, or 1 with what went wrong printed to standard error. model: task->params weights that come out, or NULL. */
int tdf_train(const tdf_task *task, const tdf_setting *setting, uint64_t seed, tdf_outcome *outcome,
              float *model);

#endif
