/* digits.h - a network for MNIST's digits, and its data: of the papers' experiments and of the benchmarks. The includer
 * defines HIDDEN, the number of hidden units.
 *
 * Data are looked for in MLFAB_DATA or in ~/.cache/mlfab, as they are or gzipped. */
#ifndef TESTS_DIGITS_H
#define TESTS_DIGITS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INPUTS = 784, CLASSES = 10 };

/* splitmix64 */
static inline uint64_t digits_next(uint64_t *state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

/* ---- files ---- */

static inline void *allocate(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return memory;
}

typedef struct source {
  FILE *file;
  int piped;
} source;

static inline int source_open(source *s, const char *name) {
  const char *data = getenv("MLFAB_DATA"), *home = getenv("HOME");
  char path[1024], packed[1040], command[1060];
  int own = data && *data;
  snprintf(path, sizeof path, "%s%s/%s",
           own    ? data
           : home ? home
                  : "",
           own ? "" : "/.cache/mlfab", name);
  s->file = fopen(path, "rb");
  s->piped = s->file == NULL;
  if (!s->piped) return 1;
  /* The name stands in quotes in the command, so one that holds a quote is not taken. */
  snprintf(packed, sizeof packed, "%s.gz", path);
  if (access(packed, R_OK) || strchr(packed, '\'')) return 0;
  snprintf(command, sizeof command, "gzip -dc '%s'", packed);
  s->file = popen(command, "r");
  return s->file != NULL;
}

static inline void source_close(source *s) {
  if (s->piped) {
    pclose(s->file);
  } else {
    fclose(s->file);
  }
}

/* ---- the network: W1 (a row an input), b1, W2 (a row a hidden unit), b2; rectified linear ---- */

enum { W1 = 0, B1 = W1 + INPUTS * HIDDEN, W2 = B1 + HIDDEN, B2 = W2 + HIDDEN * CLASSES };
enum { DIGITS_PARAMS = B2 + CLASSES };

typedef struct images {
  uint32_t n;
  unsigned char *pixels, *label;
} images;

/* Records behind a header, whose second word is their number. */
static inline unsigned char *idx_read(const char *name, size_t header, size_t record,
                                      uint32_t *n_p) {
  source s;
  unsigned char head[16] = {0}, *bytes = NULL;
  if (!source_open(&s, name)) return NULL;
  if (fread(head, 1, header, s.file) == header) {
    *n_p = (uint32_t)head[4] << 24 | (uint32_t)head[5] << 16 | (uint32_t)head[6] << 8 | head[7];
    if (*n_p > 0 && *n_p <= 1000000) bytes = allocate(*n_p, record);
    if (bytes && fread(bytes, record, *n_p, s.file) != *n_p) {
      free(bytes);
      bytes = NULL;
    }
  }
  source_close(&s);
  return bytes;
}

static inline int images_read(images *set, const char *pixels, const char *labels) {
  uint32_t n = 0;
  set->pixels = idx_read(pixels, 16, INPUTS, &set->n);
  set->label = set->pixels ? idx_read(labels, 8, 1, &n) : NULL;
  int good = set->label && n == set->n;
  for (uint32_t i = 0; good && i < n; i++) good = set->label[i] < CLASSES;
  return good;
}

static inline void add_scaled(float *restrict y, float a, const float *restrict x, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) y[i] += a * x[i];
}

static inline void digits_forward(const unsigned char *pixels, const float *w, float *hidden,
                                  float *out) {
  memcpy(hidden, w + B1, HIDDEN * sizeof *hidden);
  memcpy(out, w + B2, CLASSES * sizeof *out);
  for (uint32_t i = 0; i < INPUTS; i++)
    if (pixels[i])
      add_scaled(hidden, (float)pixels[i] / 255.0f, w + W1 + (size_t)i * HIDDEN, HIDDEN);
  for (uint32_t j = 0; j < HIDDEN; j++) {
    if (hidden[j] < 0) hidden[j] = 0;
    add_scaled(out, hidden[j], w + W2 + (size_t)j * CLASSES, CLASSES);
  }
}

/* Logits become the gradient of the cross entropy in them. */
static inline void soften(float *out, unsigned label) {
  float largest = out[0], sum = 0;
  for (uint32_t k = 1; k < CLASSES; k++) largest = out[k] > largest ? out[k] : largest;
  for (uint32_t k = 0; k < CLASSES; k++) sum += out[k] = expf(out[k] - largest);
  for (uint32_t k = 0; k < CLASSES; k++) out[k] /= sum;
  out[label] -= 1;
}

/* Adds the gradient of one image, times weight, to g. */
static inline void digits_add_gradient(const float *w, const unsigned char *pixels, unsigned label,
                                       float weight, float *g) {
  float hidden[HIDDEN], out[CLASSES], back[HIDDEN];
  digits_forward(pixels, w, hidden, out);
  soften(out, label);
  for (uint32_t k = 0; k < CLASSES; k++) out[k] *= weight;
  for (uint32_t j = 0; j < HIDDEN; j++) {
    const float *row = w + W2 + (size_t)j * CLASSES;
    back[j] = 0;
    for (uint32_t k = 0; hidden[j] > 0 && k < CLASSES; k++) back[j] += row[k] * out[k];
    add_scaled(g + W2 + (size_t)j * CLASSES, hidden[j], out, CLASSES);
  }
  add_scaled(g + B2, 1, out, CLASSES);
  add_scaled(g + B1, 1, back, HIDDEN);
  for (uint32_t i = 0; i < INPUTS; i++)
    if (pixels[i]) add_scaled(g + W1 + (size_t)i * HIDDEN, (float)pixels[i] / 255.0f, back, HIDDEN);
}

/* The share of images that the network tells right. */
static inline double digits_right(const images *set, const float *w) {
  uint32_t right = 0;
  for (uint32_t i = 0; i < set->n; i++) {
    float hidden[HIDDEN], out[CLASSES];
    uint32_t best = 0;
    digits_forward(set->pixels + (size_t)i * INPUTS, w, hidden, out);
    for (uint32_t k = 1; k < CLASSES; k++) best = out[k] > out[best] ? k : best;
    right += best == set->label[i];
  }
  return (double)right / set->n;
}

#endif
