/* tdf_data.c - three models and their data: logistic regression on words of movie reviews, matrix
 * factorisation of ratings, and a network for MNIST's digits.
 *
 * Data are looked for in MLFAB_DATA or in ~/.cache/mlfab, as they are or gzipped:
 * derived/movie_reviews.{train,test}.libsvm (label index:value ...), mf/real_matrix.{tr,te}.txt (row
 * column rating), mnist/ (the original idx files). What is not there is not made up.
 *
 * Source: TDF §IV.A: logistic regression, matrix factorisation and AlexNet; of a worker's data an
 * iteration takes a tenth, nearly all, and 256. Departs: the data are smaller, and so is the network. */
enum { HIDDEN = 128 };
#include "../bench/digits.h"
#include "tdf.h"

enum { WORDS = 18408, RANK = 8 };
enum { PIECES_MAX = 1 << 20, ROWS_MAX = 1 << 16 };
#define DECAY 0.2f /* of factors, a rating */

uint64_t tdf_next(uint64_t *state) { return digits_next(state); }

double tdf_uniform(uint64_t *state) { return (double)(tdf_next(state) >> 11) / 9007199254740992.0; }

static void draw(uint64_t seed, float *w, uint64_t n, double spread) {
  for (uint64_t i = 0; i < n; i++) w[i] = (float)(spread * (2 * tdf_uniform(&seed) - 1));
}

/* ---- files ---- */

/* ---- reviews: weights of WORDS, and a constant ---- */

typedef struct texts {
  uint32_t n, *from; /* text i has pieces from[i] to from[i + 1] */
  uint32_t *word;
  float *value, *label; /* label: 1 or -1 */
} texts;

static texts reviews[2]; /* to learn from, and to test with */

static void texts_free(texts *t) {
  free(t->from);
  free(t->word);
  free(t->value);
  free(t->label);
  memset(t, 0, sizeof *t);
}

static int texts_read(texts *t, const char *name) {
  source s;
  if (!source_open(&s, name)) return 0;
  t->from = allocate(ROWS_MAX + 1, sizeof *t->from);
  t->label = allocate(ROWS_MAX, sizeof *t->label);
  t->word = allocate(PIECES_MAX, sizeof *t->word);
  t->value = allocate(PIECES_MAX, sizeof *t->value);
  char *line = NULL;
  size_t room = 0;
  uint32_t at = 0;
  while (t->n < ROWS_MAX && getline(&line, &room, s.file) > 0) {
    char *rest = line;
    t->label[t->n++] = strtol(line, &rest, 10) > 0 ? 1.0f : -1.0f;
    for (char *colon; at < PIECES_MAX; at++) {
      long word = strtol(rest, &colon, 10); /* from 1 */
      if (*colon != ':' || word < 1 || word > WORDS) break;
      t->word[at] = (uint32_t)word - 1;
      t->value[at] = strtof(colon + 1, &rest);
    }
    t->from[t->n] = at;
  }
  free(line);
  source_close(&s);
  return t->n > 0;
}

static float text_score(const texts *t, uint32_t i, const float *w) {
  float sum = w[WORDS];
  for (uint32_t k = t->from[i]; k < t->from[i + 1]; k++) sum += t->value[k] * w[t->word[k]];
  return sum;
}

static void reviews_gradient(const float *w, const uint32_t *sample, uint32_t n, float weight,
                             float *g) {
  const texts *t = &reviews[0];
  for (uint32_t s = 0; s < n; s++) {
    uint32_t i = sample[s];
    float y = t->label[i], by = -weight * y / (1 + expf(y * text_score(t, i, w)));
    for (uint32_t k = t->from[i]; k < t->from[i + 1]; k++) g[t->word[k]] += by * t->value[k];
    g[WORDS] += by;
  }
}

static void reviews_first(uint64_t seed, float *w) { draw(seed, w, WORDS + 1, 0); }

static double reviews_quality(const float *w) {
  uint32_t right = 0;
  for (uint32_t i = 0; i < reviews[1].n; i++)
    right += text_score(&reviews[1], i, w) * reviews[1].label[i] > 0;
  return 100.0 * right / reviews[1].n;
}

static double reviews_loss(const float *w) {
  double sum = 0;
  for (uint32_t i = 0; i < reviews[0].n; i++)
    sum += log1p(exp(-(double)(reviews[0].label[i] * text_score(&reviews[0], i, w))));
  return sum / reviews[0].n;
}

/* ---- ratings: factors and a bias of every row, then of every column ---- */

typedef struct ratings_of {
  uint32_t n, *row, *column; /* numbers of the rows and columns that are learned from; or */
  float *rating;             /* UINT32_MAX */
} ratings_of;

static ratings_of ratings[2];
static uint32_t ratings_rows, ratings_columns;
static float ratings_mean;

static void ratings_free(ratings_of *r) {
  free(r->row);
  free(r->column);
  free(r->rating);
  memset(r, 0, sizeof *r);
}

static int ratings_read(ratings_of *r, const char *name) {
  source s;
  if (!source_open(&s, name)) return 0;
  r->row = allocate(ROWS_MAX, sizeof *r->row);
  r->column = allocate(ROWS_MAX, sizeof *r->column);
  r->rating = allocate(ROWS_MAX, sizeof *r->rating);
  char line[128];
  while (r->n < ROWS_MAX && fgets(line, sizeof line, s.file)) {
    char *rest;
    unsigned long row = strtoul(line, &rest, 10), column = strtoul(rest, &rest, 10);
    if (row >= ROWS_MAX || column >= ROWS_MAX) continue;
    r->row[r->n] = (uint32_t)row;
    r->column[r->n] = (uint32_t)column;
    r->rating[r->n++] = strtof(rest, NULL);
  }
  source_close(&s);
  return r->n > 0;
}

/* Numbers from 0 for what the training set has, so that the model has no part that nobody trains. */
static uint32_t renumber(uint32_t *learn, uint32_t n, uint32_t *test, uint32_t m) {
  uint32_t *number = allocate(ROWS_MAX, sizeof *number), last = 0;
  for (uint32_t i = 0; i < n; i++) {
    if (!number[learn[i]]) number[learn[i]] = ++last;
    learn[i] = number[learn[i]] - 1;
  }
  for (uint32_t i = 0; i < m; i++) test[i] = number[test[i]] - 1; /* 0: wraps to UINT32_MAX */
  free(number);
  return last;
}

static const float *factors(const float *w, const ratings_of *r, uint32_t i, int column) {
  uint32_t which = column ? ratings_rows + r->column[i] : r->row[i];
  return w + (size_t)which * (RANK + 1);
}

static float ratings_score(const float *a, const float *b) {
  float sum = ratings_mean;
  if (a) sum += a[RANK];
  if (b) sum += b[RANK];
  for (uint32_t k = 0; a && b && k < RANK; k++) sum += a[k] * b[k];
  return sum;
}

static void ratings_gradient(const float *w, const uint32_t *sample, uint32_t n, float weight,
                             float *g) {
  const ratings_of *r = &ratings[0];
  for (uint32_t s = 0; s < n; s++) {
    uint32_t i = sample[s];
    const float *a = factors(w, r, i, 0), *b = factors(w, r, i, 1);
    float *ga = g + (a - w), *gb = g + (b - w), error = ratings_score(a, b) - r->rating[i];
    for (uint32_t k = 0; k < RANK; k++) {
      ga[k] += weight * (error * b[k] + DECAY * a[k]);
      gb[k] += weight * (error * a[k] + DECAY * b[k]);
    }
    ga[RANK] += weight * (error + DECAY * a[RANK]);
    gb[RANK] += weight * (error + DECAY * b[RANK]);
  }
}

static void ratings_first(uint64_t seed, float *w) {
  draw(seed, w, (uint64_t)(ratings_rows + ratings_columns) * (RANK + 1), 0.1);
}

static double ratings_quality(const float *w) {
  const ratings_of *r = &ratings[1];
  double sum = 0;
  for (uint32_t i = 0; i < r->n; i++) {
    const float *a = r->row[i] == UINT32_MAX ? NULL : factors(w, r, i, 0);
    const float *b = r->column[i] == UINT32_MAX ? NULL : factors(w, r, i, 1);
    double error = (double)(ratings_score(a, b) - r->rating[i]);
    sum += error * error;
  }
  return sqrt(sum / r->n);
}

/* ---- digits ---- */

static images digits[2];

static void digits_gradient(const float *w, const uint32_t *sample, uint32_t n, float weight,
                            float *g) {
  for (uint32_t s = 0; s < n; s++)
    digits_add_gradient(w, digits[0].pixels + (size_t)sample[s] * INPUTS,
                        digits[0].label[sample[s]], weight, g);
}

static void digits_first(uint64_t seed, float *w) {
  memset(w, 0, DIGITS_PARAMS * sizeof *w);
  draw(seed, w + W1, INPUTS * HIDDEN, sqrt(6.0 / INPUTS));
  draw(seed + 1, w + W2, HIDDEN * CLASSES, sqrt(6.0 / HIDDEN));
}

static double digits_quality(const float *w) { return 100.0 * digits_right(&digits[1], w); }

/* ---- all of them ---- */

static void read_reviews(tdf_task *task) {
  *task = (tdf_task){.name = "LR",
                     .tensors = 1,
                     .count = {WORDS + 1},
                     .batch = 36,
                     .iterations = 400,
                     .rate = 5,
                     .gradient = reviews_gradient,
                     .first = reviews_first,
                     .quality = reviews_quality,
                     .loss = reviews_loss};
  if (!texts_read(&reviews[0], "derived/movie_reviews.train.libsvm"))
    task->missing = "derived/movie_reviews.train.libsvm.gz";
  if (!texts_read(&reviews[1], "derived/movie_reviews.test.libsvm"))
    task->missing = "derived/movie_reviews.test.libsvm.gz";
  task->samples = reviews[0].n;
}

static void read_ratings(tdf_task *task) {
  ratings_of *learn = &ratings[0], *test = &ratings[1];
  *task = (tdf_task){.name = "MF",
                     .tensors = 2,
                     .iterations = 600,
                     .rate = 0.002,
                     .is_error = 1,
                     .gradient = ratings_gradient,
                     .first = ratings_first,
                     .quality = ratings_quality};
  if (!ratings_read(learn, "mf/real_matrix.tr.txt")) task->missing = "mf/real_matrix.tr.txt";
  if (!ratings_read(test, "mf/real_matrix.te.txt")) task->missing = "mf/real_matrix.te.txt";
  if (task->missing) return;
  ratings_rows = renumber(learn->row, learn->n, test->row, test->n);
  ratings_columns = renumber(learn->column, learn->n, test->column, test->n);
  double sum = 0;
  for (uint32_t i = 0; i < learn->n; i++) sum += (double)learn->rating[i];
  ratings_mean = (float)(sum / learn->n);
  task->count[0] = (uint64_t)ratings_rows * (RANK + 1);
  task->count[1] = (uint64_t)ratings_columns * (RANK + 1);
  task->samples = learn->n;
}

static void read_digits(tdf_task *task) {
  *task = (tdf_task){.name = "MNIST network",
                     .tensors = 4,
                     .count = {B1 - W1, W2 - B1, B2 - W2, CLASSES},
                     .batch = 32,
                     .iterations = 150,
                     .rate = 0.2,
                     .gradient = digits_gradient,
                     .first = digits_first,
                     .quality = digits_quality};
  if (!images_read(&digits[0], "mnist/train-images-idx3-ubyte", "mnist/train-labels-idx1-ubyte"))
    task->missing = "mnist/train-*-ubyte.gz";
  if (!images_read(&digits[1], "mnist/t10k-images-idx3-ubyte", "mnist/t10k-labels-idx1-ubyte"))
    task->missing = "mnist/t10k-*-ubyte.gz";
  task->samples = digits[0].n;
}

void tdf_tasks_read(tdf_task task[TDF_TASKS]) {
  read_reviews(&task[TDF_REVIEWS]);
  read_ratings(&task[TDF_RATINGS]);
  read_digits(&task[TDF_DIGITS]);
  for (uint32_t i = 0; i < TDF_TASKS; i++)
    for (uint32_t t = 0; t < task[i].tensors; t++) task[i].params += task[i].count[t];
}

void tdf_tasks_free(void) {
  for (uint32_t i = 0; i < 2; i++) {
    texts_free(&reviews[i]);
    ratings_free(&ratings[i]);
    free(digits[i].pixels);
    free(digits[i].label);
    memset(&digits[i], 0, sizeof digits[i]);
  }
}
