/* safetensors.c - reads tensors from a safetensors file, which mlfab_save or another program has written.
 *
 * The file: u64 length of the header; the header, a JSON object from names to {"dtype", "shape", "data_offsets"}; the
 * data. The reader takes any JSON object whose values have these members, in any order, and skips other members. The
 * text of the header comes from outside: `end` bounds every step, and nesting is bounded.
 *
 * Names are compared as they stand in the file: a name with an escape never matches. */
#include "../kernels/kernels.h"
#include "../worker/worker.h"
#include "context.h"
#include "disk.h"

#include <errno.h>
#include <stdio.h>

enum { SAFETENSORS_HEADER = 64 << 20, SAFETENSORS_DEPTH = 16 };

typedef struct safetensors_file {
  const mlfab_files *files;
  int file;
  char *header;
  uint64_t header_bytes;
} safetensors_file;

typedef struct safetensors_text {
  const char *at, *end;
} safetensors_text;

typedef struct safetensors_entry {
  char dtype[8];
  uint64_t count; /* the product of its shape */
  uint64_t begin, end;
  int members; /* bits of the members found */
} safetensors_entry;

/* --- JSON --- */

static void safetensors_blanks(safetensors_text *t) {
  while (t->at < t->end && (*t->at == ' ' || *t->at == '\n' || *t->at == '\t' || *t->at == '\r'))
    t->at++;
}

/* If this character comes next, takes it and returns 1. */
static int safetensors_take(safetensors_text *t, char c) {
  safetensors_blanks(t);
  if (t->at == t->end || *t->at != c) return 0;
  t->at++;
  return 1;
}

/* Reads a string: its characters between the quotes. */
static int safetensors_string(safetensors_text *t, const char **text_p, size_t *bytes_p) {
  if (!safetensors_take(t, '"')) return 0;
  *text_p = t->at;
  while (t->at < t->end && *t->at != '"') t->at += *t->at == '\\' && t->end - t->at > 1 ? 2 : 1;
  if (t->at >= t->end) return 0;
  *bytes_p = (size_t)(t->at - *text_p);
  t->at++;
  return 1;
}

static int safetensors_number(safetensors_text *t, uint64_t *x_p) {
  uint64_t x = 0;
  int digits = 0;
  safetensors_blanks(t);
  for (; t->at < t->end && *t->at >= '0' && *t->at <= '9'; t->at++, digits++) {
    if (digits == 19) return 0;
    x = 10 * x + (uint64_t)(*t->at - '0');
  }
  *x_p = x;
  return digits > 0;
}

/* Skips any value. It counts brackets outside of strings: `depth` is below the bound. */
static int safetensors_skip(safetensors_text *t) {
  const char *text;
  size_t bytes;
  int depth = 0;
  do {
    safetensors_blanks(t);
    if (t->at == t->end) return 0;
    char c = *t->at;
    if (c == '"') {
      if (!safetensors_string(t, &text, &bytes)) return 0;
      continue;
    }
    if (depth == 0 && (c == ',' || c == '}' || c == ']')) return 0;
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    if (depth > SAFETENSORS_DEPTH) return 0;
    t->at++;
    /* A number or a word ends before the next separator. */
    while (depth == 0 && c != '}' && c != ']' && t->at < t->end && !strchr(",}] \n\t\r", *t->at))
      t->at++;
  } while (depth > 0);
  return 1;
}

/* Reads a list of numbers: their product (of an empty list: 1), and the last two. */
static int safetensors_numbers(safetensors_text *t, uint64_t *product_p, uint64_t last[2]) {
  uint64_t product = 1, n = 0, x;
  if (!safetensors_take(t, '[')) return 0;
  last[0] = last[1] = 0;
  if (!safetensors_take(t, ']')) {
    do {
      if (!safetensors_number(t, &x)) return 0;
      if (x > 0 && product > UINT64_MAX / x) return 0;
      product *= x;
      last[0] = last[1];
      last[1] = x;
      n++;
    } while (safetensors_take(t, ','));
    if (!safetensors_take(t, ']')) return 0;
  }
  *product_p = product;
  return n < SAFETENSORS_HEADER;
}

static int safetensors_member(safetensors_text *t, const char *name, size_t bytes,
                              safetensors_entry *entry) {
  const char *text;
  uint64_t unused, last[2];
  size_t n;
  if (bytes == 5 && !memcmp(name, "dtype", 5)) {
    if (!safetensors_string(t, &text, &n) || n >= sizeof entry->dtype) return 0;
    memcpy(entry->dtype, text, n);
    entry->dtype[n] = 0;
    entry->members |= 1;
    return 1;
  }
  if (bytes == 5 && !memcmp(name, "shape", 5)) {
    entry->members |= 2;
    return safetensors_numbers(t, &entry->count, last);
  }
  if (bytes == 12 && !memcmp(name, "data_offsets", 12)) {
    if (!safetensors_numbers(t, &unused, last)) return 0;
    entry->begin = last[0];
    entry->end = last[1];
    entry->members |= 4;
    return 1;
  }
  return safetensors_skip(t);
}

/* Finds a name in the header. Returns 1; 0: it is absent; -1: the header does not parse. */
static int safetensors_find(const safetensors_file *f, const char *wanted,
                            safetensors_entry *entry) {
  safetensors_text t = {f->header, f->header + f->header_bytes};
  const char *name, *member;
  size_t bytes, n;
  if (!safetensors_take(&t, '{')) return -1;
  if (safetensors_take(&t, '}')) return 0;
  do {
    if (!safetensors_string(&t, &name, &bytes) || !safetensors_take(&t, ':')) return -1;
    if (bytes != strlen(wanted) || memcmp(name, wanted, bytes) != 0) {
      if (!safetensors_skip(&t)) return -1;
      continue;
    }
    memset(entry, 0, sizeof *entry);
    if (!safetensors_take(&t, '{')) return -1;
    do {
      if (!safetensors_string(&t, &member, &n) || !safetensors_take(&t, ':') ||
          !safetensors_member(&t, member, n, entry))
        return -1;
    } while (safetensors_take(&t, ','));
    return safetensors_take(&t, '}') && entry->members == 7 ? 1 : -1;
  } while (safetensors_take(&t, ','));
  return safetensors_take(&t, '}') ? 0 : -1;
}

/* Reports that a call of the file has failed with `number`, a negative errno. */
static int safetensors_failed(const safetensors_file *f, const char *path, const char *what,
                              int number, mlfab_error *error) {
  char why[MLFAB__DISK_TEXT];
  mlfab__disk_explain(f->files, path, number, why, sizeof why);
  return MLFAB__FAIL(error, MLFAB_ERR_IO, "load: '%.120s' cannot be %s: %.110s", path, what, why);
}

/* --- tensors --- */

/* Gives up the lock while it reads the bytes. */
static int safetensors_tensor(mlfab *ctx, const safetensors_file *f, const char *path,
                              const mlfab__tensor_info *tensor, const char *given, void *data,
                              mlfab_error *error) {
  safetensors_entry entry;
  char id[16];
  snprintf(id, sizeof id, "%u", tensor->id);
  const char *name = given ? given : id, *dtype = mlfab__dtype_name((int)tensor->dtype);
  int found = safetensors_find(f, name, &entry);
  if (found < 0)
    return MLFAB__FAIL(error, MLFAB_ERR_CHECKPOINT,
                       "load: '%.150s' is no safetensors file: its header does not parse", path);
  if (!found)
    return MLFAB__FAIL(error, MLFAB_ERR_TENSOR, "load: no tensor '%.60s' is in '%.150s'", name,
                       path);
  if (strcmp(entry.dtype, dtype) != 0)
    return MLFAB__FAIL(error, MLFAB_ERR_DTYPE, "load: tensor '%.60s' is %s in '%.150s', not %s",
                       name, entry.dtype, path, dtype);
  if (entry.count != tensor->count)
    return MLFAB__FAIL(error, MLFAB_ERR_SHAPE,
                       "load: tensor '%.60s' has %llu elements in '%.130s', not %llu", name,
                       (unsigned long long)entry.count, path, (unsigned long long)tensor->count);
  uint64_t bytes = tensor->count * mlfab__dtype_bytes((int)tensor->dtype);
  if (entry.end < entry.begin || entry.end - entry.begin != bytes || entry.end > UINT64_MAX / 2)
    return MLFAB__FAIL(error, MLFAB_ERR_CHECKPOINT,
                       "load: '%.150s' is damaged: the offsets of tensor '%.60s' do not fit", path,
                       name);
  pthread_mutex_unlock(&ctx->lock); /* other threads go on */
  int64_t n = mlfab__disk_read(f->files, f->file, data, bytes, 8 + f->header_bytes + entry.begin);
  pthread_mutex_lock(&ctx->lock);
  if (n < 0) return safetensors_failed(f, path, "read", (int)n, error);
  if ((uint64_t)n < bytes)
    return MLFAB__FAIL(error, MLFAB_ERR_CHECKPOINT, "load: '%.150s' is truncated", path);
  return 0;
}

static int safetensors_buf(mlfab *ctx, const safetensors_file *f, const char *path,
                           const mlfab_buf *buf, const char *name, mlfab_error *error) {
  const mlfab__worker *worker = ctx->node->parts->worker;
  uint64_t at = 0;
  int found = 0;
  for (uint32_t i = 0; i < worker->ntensors; i++) {
    const mlfab__tensor_info copy = worker->tensors[i], *tensor = &copy; /* others may add some */
    int all = buf->tensor == MLFAB_ALL;
    if (!all && tensor->id != buf->tensor) continue;
    found = 1;
    if (all && tensor->dtype != worker->tensors[0].dtype)
      return MLFAB__FAIL(error, MLFAB_ERR_DTYPE, "load: MLFAB_ALL needs tensors of one type");
    if (!buf->data || at + tensor->count > buf->count || (!all && tensor->count != buf->count))
      return MLFAB__FAIL(error, buf->data ? MLFAB_ERR_SHAPE : MLFAB_ERR_ARGUMENT,
                         "load: the buffer of tensor %u is NULL, or has another number of elements",
                         tensor->id);
    uint8_t *to = (uint8_t *)buf->data + at * mlfab__dtype_bytes((int)tensor->dtype);
    int code = safetensors_tensor(ctx, f, path, tensor, all ? NULL : name, to, error);
    if (code) return code;
    at += tensor->count;
  }
  if (!found)
    return MLFAB__FAIL(error, MLFAB_ERR_TENSOR, "load: there is no tensor %u", buf->tensor);
  if (at != buf->count)
    return MLFAB__FAIL(error, MLFAB_ERR_SHAPE, "load: the buffer has %llu elements, not %llu",
                       (unsigned long long)buf->count, (unsigned long long)at);
  return 0;
}

/* Reads the header. */
static int safetensors_open(mlfab__env *env, safetensors_file *f, const char *path,
                            mlfab_error *error) {
  uint8_t head[8];
  do f->file = f->files->open(f->files->user, path, 0);
  while (f->file == -EINTR);
  if (f->file < 0) return safetensors_failed(f, path, "opened", f->file, error);
  int64_t n = mlfab__disk_read(f->files, f->file, head, sizeof head, 0);
  for (int i = 0; i < 8 && n == 8; i++) f->header_bytes |= (uint64_t)head[i] << (8 * i);
  if (n >= 0 && (n < 8 || f->header_bytes == 0 || f->header_bytes > SAFETENSORS_HEADER)) {
    f->header_bytes = 0;
    return MLFAB__FAIL(error, MLFAB_ERR_CHECKPOINT, "load: '%.150s' is no safetensors file", path);
  }
  if (n > 0) {
    f->header = mlfab__alloc(env, f->header_bytes);
    if (!f->header) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "load: out of memory");
    n = mlfab__disk_read(f->files, f->file, f->header, f->header_bytes, 8);
  }
  if (n < 0) return safetensors_failed(f, path, "read", (int)n, error);
  if ((uint64_t)n < f->header_bytes)
    return MLFAB__FAIL(error, MLFAB_ERR_CHECKPOINT, "load: '%.150s' is truncated", path);
  return 0;
}

static int safetensors_load(mlfab *ctx, const char *path, const mlfab_buf *bufs, uint32_t n,
                            const char *const *names) {
  const mlfab__worker *worker = ctx->node->parts->worker;
  mlfab_error *error = &ctx->node->requests.last;
  safetensors_file f = {.files = ctx->hooks.files ? ctx->hooks.files : mlfab__disk_system(),
                        .file = -1};
  if (!worker) return MLFAB__FAIL(error, MLFAB_ERR_STATE, "load: this node is not a worker");
  if (!path || (n > 0 && !bufs))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "load: %s is NULL", path ? "bufs" : "path");
  int code = safetensors_open(&ctx->env, &f, path, error);
  for (uint32_t i = 0; i < n && !code; i++)
    code = safetensors_buf(ctx, &f, path, &bufs[i], names ? names[i] : NULL, error);
  mlfab__free(&ctx->env, f.header, f.header_bytes);
  if (f.file >= 0) f.files->close(f.files->user, f.file);
  return code;
}

MLFAB_API int mlfab_load(mlfab *ctx, const char *path, const mlfab_buf *bufs, uint32_t n,
                         const char *const *names) {
  CONTEXT_LOOK(ctx, safetensors_load(ctx, path, bufs, n, names));
}
