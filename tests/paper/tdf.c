/* tdf.c - TDF on real data: how many bytes of pulls and pushes version tags and filters save, and what
 * that costs in accuracy, with rounds and with bounded staleness.
 *
 * For each model and consistency: a baseline without tags and filters; tags alone, whose model must be
 * the baseline's to the bit; then a sweep of thresholds. The setting that saves most and loses no more
 * than half a point (of an error: half a per cent), in the mean over seeds, is what is reported. Settings
 * are chosen by the loss on the test set, as TDF's seem to be.
 *
 * Source: TDF §IV.B, IV.C, Fig. 7 to 10. */
#include "paper.h"
#include "tdf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SWEEP_MAX = 16, SEEDS_MAX = 3, GRADIENTS = 4, CHANGES = 2 };
#define MOST_LOST 0.5
#define DECAY 0.1
#define OVERLAP 0.35 /* of a computation: pushes that end before the slowest worker has computed */

/* What the paper and a separate small model say of a task, and what is tried. Index 0: BSP, 1: SSP. */
typedef struct plan {
  const char *pull[2], *push[2]; /* printed, %; of SSP8 */
  double printed[2][2];          /* the same as numbers: of pulls, of pushes */
  double least_pull, least_push; /* of values alone, BSP */
  const char *small;
  double gradient[GRADIENTS], change[CHANGES]; /* thresholds */
  double ratio;                                /* communication to computation; 0: not tried */
  const char *speedup;
} plan;

static const plan plans[TDF_TASKS] = {
    {.pull = {"75", "74"},
     .push = {"79", "76"},
     .printed = {{75, 74}, {79, 76}},
     .least_pull = 70,
     .least_push = 79,
     .small =
         "; a separate model on generated data: pulls 76 of values, 73 of bytes, pushes 91, 88",
     .gradient = {0, 3e-4, 3e-3, 3e-2},
     .change = {0, 1e-3},
     .ratio = 3.0,
     .speedup = "2.27"},
    {.pull = {"65", "62"},
     .push = {"66", "64"},
     .printed = {{65, 62}, {66, 64}},
     .least_pull = 58,
     .least_push = 66,
     .small =
         "; a separate model on generated data: pulls 63 of values, 60 of bytes, pushes 76, 73",
     .gradient = {0, 0.3, 10, 100},
     .change = {0, 1e-3},
     .ratio = 2.1,
     .speedup = "2.13"},
    {.pull = {"77", "66"},
     .push = {"72", "70"},
     .printed = {{77, 66}, {72, 70}},
     .small = "; the paper's is AlexNet",
     .gradient = {0, 1e-3, 1e-2, 3e-2},
     .change = {0, 1e-3}}};

typedef struct trial {
  tdf_setting setting;
  tdf_outcome outcome[SEEDS_MAX];
  uint32_t seeds;     /* of them are known */
  double loss, worst; /* mean and largest */
} trial;

/* What is known of a task with a consistency model. */
typedef struct study {
  const tdf_task *task;
  const plan *plan;
  uint32_t ssp, seeds, trials;
  trial baseline, tags, zeros, trial[SWEEP_MAX];
  int same; /* tags alone: to the bit */
} study;

static int failures;

static double saved(double raw, double bytes) { return raw > 0 ? 100 * (1 - bytes / raw) : 0; }

/* In points of accuracy, or in per cent of an error. */
static double lost(const study *s, uint32_t seed, const tdf_outcome *o) {
  double base = s->baseline.outcome[seed].quality;
  return s->task->is_error ? 100 * (o->quality / base - 1) : base - o->quality;
}

/* Runs what is missing of a trial. */
static void try_seeds(study *s, trial *t, uint32_t seeds, float *model) {
  double sum = 0;
  if (t != &s->baseline && s->baseline.seeds < seeds) try_seeds(s, &s->baseline, seeds, NULL);
  for (; t->seeds < seeds; t->seeds++)
    failures += tdf_train(s->task, &t->setting, t->seeds + 1, &t->outcome[t->seeds], model);
  for (uint32_t i = 0; i < seeds; i++) {
    double loss = lost(s, i, &t->outcome[i]);
    sum += loss;
    if (i == 0 || loss > t->worst) t->worst = loss;
  }
  t->loss = sum / seeds;
}

static tdf_outcome total(const trial *t) {
  tdf_outcome sum = {0};
  for (uint32_t i = 0; i < t->seeds; i++) {
    const tdf_outcome *o = &t->outcome[i];
    sum.quality += o->quality / t->seeds;
    sum.push_raw += o->push_raw;
    sum.push_values += o->push_values;
    sum.push_packets += o->push_packets;
    sum.push_frames += o->push_frames;
    sum.pull_raw += o->pull_raw;
    sum.pull_values += o->pull_values;
    sum.pull_packets += o->pull_packets;
    sum.pull_frames += o->pull_frames;
    sum.seconds += o->seconds;
  }
  return sum;
}

static double score(const trial *t) {
  tdf_outcome o = total(t);
  return saved(o.push_raw, o.push_packets) + saved(o.pull_raw, o.pull_packets);
}

static tdf_setting filtered(const study *s, double threshold, double change) {
  return (tdf_setting){.sync = s->baseline.setting.sync,
                       .tags = 1,
                       .half = MLFAB_HALF_F16,
                       .threshold = threshold,
                       .change = change,
                       .decay = DECAY,
                       .filtered = 1};
}

static void first_trials(study *s) {
  size_t bytes = s->task->params * sizeof(float);
  float *model[2] = {malloc(bytes), malloc(bytes)};
  if (!model[0] || !model[1]) {
    fprintf(stderr, "paper: out of memory\n");
    exit(1);
  }
  s->baseline.setting.sync = s->ssp ? MLFAB_SYNC_SSP : MLFAB_SYNC_BSP;
  s->zeros.setting = s->tags.setting = s->baseline.setting;
  s->zeros.setting.tags = s->tags.setting.tags = 1;
  s->zeros.setting.filtered = 1;
  try_seeds(s, &s->baseline, 1, model[0]);
  try_seeds(s, &s->tags, 1, model[1]);
  s->same = !memcmp(model[0], model[1], bytes);
  if (!s->ssp && !s->same) {
    fprintf(stderr, "paper: %s: version tags alone change the model\n", s->task->name);
    failures++;
  }
  try_seeds(s, &s->zeros, 1, NULL);
  free(model[0]);
  free(model[1]);
}

/* A grid of both thresholds, and random drop beside one of them. With SSP a commit is one push, and
 * changes too little of what counts for the parameters' threshold to matter but where it is alone. */
static void sweep(study *s) {
  const plan *p = s->plan;
  for (uint32_t i = 0; i < GRADIENTS; i++)
    for (uint32_t k = 0; k < CHANGES && !(s->ssp && i > 0 && k > 0); k++)
      s->trial[s->trials++].setting = filtered(s, p->gradient[i], p->change[k]);
  tdf_setting random = filtered(s, p->gradient[2], 0);
  random.drop = 0.8;
  s->trial[s->trials++].setting = random;
  for (uint32_t i = 0; i < s->trials; i++) try_seeds(s, &s->trial[i], 1, NULL);
}

/* Of the trials that lose little in the mean over all seeds, the one that saves most; or NULL. */
static trial *best(study *s) {
  for (;;) {
    trial *top = NULL;
    for (uint32_t i = 0; i < s->trials; i++) {
      trial *t = &s->trial[i];
      if (t->loss <= MOST_LOST && (!top || score(t) > score(top))) top = t;
    }
    if (!top || top->seeds == s->seeds) return top;
    try_seeds(s, top, s->seeds, NULL);
  }
}

/* ---- the page ---- */

static const char *setting_text(const tdf_setting *set, char text[96]) {
  int n = snprintf(text, 96, "gradients %g, parameters %g", set->threshold, set->change);
  if (set->drop > 0) snprintf(text + n, 96 - (size_t)n, ", random drop %g", set->drop);
  return text;
}

/* Of the first seed, but for what is lost. */
static void trial_line(const study *s, const char *what, const trial *t) {
  char line[256];
  const tdf_outcome *o = &t->outcome[0], *base = &s->baseline.outcome[0];
  snprintf(line, sizeof line, "| %s | %.4g | %.2f (%u) | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f |",
           what, o->quality, t->loss, (unsigned)t->seeds, saved(o->pull_raw, o->pull_values),
           saved(o->pull_raw, o->pull_packets), saved(base->pull_frames, o->pull_frames),
           saved(o->push_raw, o->push_values), saved(o->push_raw, o->push_packets),
           saved(base->push_frames, o->push_frames));
  paper_line(line);
}

static void trials_table(const study *s, const trial *chosen) {
  char text[160], set[96];
  snprintf(text, sizeof text, "### %s, %s", s->task->name, s->ssp ? "SSP(3)" : "BSP");
  paper_text(text);
  paper_line(
      "| | quality | lost (seeds) | pulls: values | bytes | frames | pushes: values | bytes | "
      "frames |\n"
      "|---|---|---|---|---|---|---|---|---|");
  trial_line(s, "baseline", &s->baseline);
  trial_line(s, "tags", &s->tags);
  trial_line(s, "tags, no zeros pushed", &s->zeros);
  for (uint32_t i = 0; i < s->trials; i++) {
    const trial *t = &s->trial[i];
    snprintf(text, sizeof text, "%s%s%s", t == chosen ? "**" : "", setting_text(&t->setting, set),
             t == chosen ? "**" : "");
    trial_line(s, text, t);
  }
  paper_line("");
}

static void add_of(const study *s, const char *what, const char *paper, double ours,
                   const char *unit, double least, double most, const char *note) {
  char claim[96];
  snprintf(claim, sizeof claim, "TDF, %s, %s: %s", s->task->name, s->ssp ? "SSP(3)" : "BSP", what);
  add(claim, paper, ours, unit, least, most, note);
}

static void rows_of_tags(const study *s) {
  tdf_outcome tags = total(&s->tags), zeros = total(&s->zeros);
  if (!s->ssp)
    add_of(s, "tags alone: the same model, to the bit", "-", s->same, "", 1, 1,
           "1: it is; rounds are added in the order of ranks");
  add_of(s, "tags alone: bytes of pulls saved", "-", saved(tags.pull_raw, tags.pull_packets), "%",
         0, 0,
         "a tag an element, float32; a stretch that has changed for the most part is "
         "sent dense");
  add_of(s, "zeros alone: bytes of pushes saved", "-", saved(zeros.push_raw, zeros.push_packets),
         "%", 0, 0, "a filter without threshold and halves: gradients of sparse data are sparse");
}

static const char wire[] =
    "indices and headers counted; expected: at least the paper's. It is more, "
    "because values below the threshold are kept and never sent; the rows above "
    "combine it with random drop, as the paper does";

static void rows_of_best(const study *s, const trial *t) {
  const plan *p = s->plan;
  char set[96], note[320];
  tdf_outcome o = total(t);
  double least_pull = s->ssp ? 0 : p->least_pull, least_push = s->ssp ? 0 : p->least_push;
  snprintf(note, sizeof note, "acceptance: at least %g%s", least_pull, p->small);
  add_of(s, "pulls saved, values", p->pull[s->ssp], saved(o.pull_raw, o.pull_values), "%",
         least_pull, least_pull > 0 ? 100 : 0, least_pull > 0 ? note : "elements that changed");
  add_of(s, "pulls saved, bytes of packets", p->pull[s->ssp], saved(o.pull_raw, o.pull_packets),
         "%", p->printed[0][s->ssp], 100, wire);
  snprintf(note, sizeof note, "acceptance: at least %g", least_push);
  add_of(s, "pushes saved, values", p->push[s->ssp], saved(o.push_raw, o.push_values), "%",
         least_push, least_push > 0 ? 100 : 0, least_push > 0 ? note : "elements that were sent");
  add_of(s, "pushes saved, bytes of packets", p->push[s->ssp], saved(o.push_raw, o.push_packets),
         "%", p->printed[1][s->ssp], 100, wire);
  snprintf(
      note, sizeof note, "thresholds: %s; half precision; baseline %.4g; worst of %u seeds %.2f",
      setting_text(&t->setting, set), total(&s->baseline).quality, (unsigned)t->seeds, t->worst);
  /* No lower bound: a filter may as well win. */
  add_of(s, s->task->is_error ? "error gained" : "accuracy lost", "0.5", t->loss,
         s->task->is_error ? "% of RMSE" : "points", -1e12, MOST_LOST, note);
}

/* Time of rounds over links on which communication takes `ratio` times as long as computation. */
static void rows_of_speed(const study *s, const trial *chosen) {
  const plan *p = s->plan;
  double compute = s->baseline.outcome[0].seconds;
  tdf_setting base = s->baseline.setting, best = chosen->setting;
  tdf_outcome slow, fast;
  char note[160];
  /* Pushes of all go in through the server's link, then its pulls go out. */
  double bytes = 2.0 * sizeof(float) * (double)s->task->params * TDF_WORKERS * s->task->iterations;
  base.link_rate = best.link_rate = (uint64_t)(bytes / ((p->ratio + OVERLAP) * compute));
  failures += tdf_train(s->task, &base, 1, &slow, NULL);
  failures += tdf_train(s->task, &best, 1, &fast, NULL);
  double r = slow.seconds / compute - 1,
         part = (fast.push_frames + fast.pull_frames) / (slow.push_frames + slow.pull_frames);
  double expected = (r + 1) / (r * part + 1);
  snprintf(note, sizeof note,
           "communication %.1f times computation; of all bytes %.1f %% are left; expected %.2f", r,
           100 * part, expected);
  add_of(s, "speed-up over slow links", p->speedup, slow.seconds / fast.seconds, "x",
         0.85 * expected, 1.15 * expected, note);
}

static void study_run(const tdf_task *task, const plan *p, uint32_t ssp, uint32_t seeds) {
  study *s = calloc(1, sizeof *s);
  if (!s) {
    fprintf(stderr, "paper: out of memory\n");
    exit(1);
  }
  *s = (study){.task = task, .plan = p, .ssp = ssp, .seeds = seeds};
  first_trials(s);
  sweep(s);
  const trial *chosen = best(s);
  trials_table(s, chosen);
  paper_table();
  rows_of_tags(s);
  if (chosen) {
    rows_of_best(s, chosen);
    if (!ssp && p->ratio > 0) rows_of_speed(s, chosen);
  } else {
    add_of(s, "a setting that loses no more than 0.5", "-", 0, "", 1, 1, "none of the sweep does");
  }
  free(s);
}

static void skip(const tdf_task *task, const plan *p) {
  char claim[96], note[160], printed[32];
  snprintf(claim, sizeof claim, "TDF, %s: pulls, pushes saved", task->name);
  snprintf(printed, sizeof printed, "%s, %s", p->pull[0], p->push[0]);
  snprintf(note, sizeof note, "SKIPPED: no %s in MLFAB_DATA, nor in ~/.cache/mlfab", task->missing);
  paper_table();
  paper_row row = {claim, "%", printed, NAN, 0, 0, note};
  paper_add(&row);
}

int paper_tdf(uint32_t seeds) {
  tdf_task task[TDF_TASKS];
  paper_text(
      "# TDF: bytes of pulls and pushes\n\n"
      "Five workers and a server run in the simulator, with real data:\n\n"
      "- LR: logistic regression on the words of movie reviews, 18,408 features; an "
      "iteration takes a tenth of a worker's reviews.\n- MF: matrix factorisation of "
      "5,000 ratings; an iteration takes all of a worker's ratings.\n- MNIST: a "
      "784-128-10 network in the place of AlexNet; an iteration takes 32 images.\n\n"
      "Tables show the quality (accuracy in per cent, or RMSE), the loss against the "
      "baseline (points, or per cent of RMSE), and the saving of pulls and pushes in "
      "per cent: of values alone; of bytes with all indices and headers; of all bytes "
      "that the server and the workers sent, with heartbeats. Thresholds are divided "
      "by 1 + 0.1 ln t. With filters, pulls and pushes have half precision. The "
      "setting in bold loses little in the mean of all seeds, on the test set, and "
      "saves most.");
  tdf_tasks_read(task);
  for (uint32_t i = 0; i < TDF_TASKS; i++) {
    for (uint32_t ssp = 0; ssp < 2 && !task[i].missing; ssp++)
      study_run(&task[i], &plans[i], ssp, seeds < SEEDS_MAX ? seeds : SEEDS_MAX);
    if (task[i].missing) skip(&task[i], &plans[i]);
  }
  tdf_tasks_free();
  return failures;
}
