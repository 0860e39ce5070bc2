/* mlfab-fetch.c - gets the data of the examples.
 *
 *    mlfab-fetch mnist            into $MLFAB_DATA/mnist, or ~/.cache/mlfab/mnist, where the examples look
 *
 * A file is loaded into NAME.part. When it is whole and has its SHA-256 it is renamed to NAME, so what has its name is
 * right. A download that breaks off goes on where it stopped, in this run or the next. Other sets: --list and --from.
 *
 * Invariants: never more bytes than the list says are written; no file is replaced without --force; two processes do not
 * write one file (the second one ends). Names of files have no slash. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "../extras/mlfab_http.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *const usage_text =
    "usage: mlfab-fetch SET [options]\n"
    "Gets the files of a set, checks their SHA-256, and goes on with what is there already. SET: "
    "mnist\n"
    "\n"
    "  --to DIR        where to ($MLFAB_DATA/SET, or ~/.cache/mlfab/SET)\n"
    "  --from URL      where the files are, instead of the set's own places; again: another place\n"
    "  --list FILE     the files: lines `SHA256 BYTES NAME`; SET is any name then, and needs "
    "--from\n"
    "  --force         replaces a file that is there and is another one\n"
    "  --retries N     attempts without a new byte before it gives up (5)\n"
    "  --pause S       before the second attempt, then twice as long each time (1)\n"
    "  --ca FILE       trusted certificates (those of the system)\n"
    "  --plain         lines instead of a bar, as it prints where the output is no terminal\n"
    "  --help          this text\n"
    "\n"
    "Exit status: 0 when all files are there, 1 when one is not, 2 for wrong usage.\n";

enum { PATH_ROOM = 4096, NAME_ROOM = 128, FILES = 64, PLACES = 8, BLOCK = 65536 };
static const uint64_t day_ns = UINT64_C(86400000000000);

typedef struct entry {
  char sha256[65];
  uint64_t bytes;
  char name[NAME_ROOM];
} entry;

static const entry mnist_files[] = {
    {"440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9912422,
     "train-images-idx3-ubyte.gz"},
    {"3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28881,
     "train-labels-idx1-ubyte.gz"},
    {"8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1648877,
     "t10k-images-idx3-ubyte.gz"},
    {"f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4542,
     "t10k-labels-idx1-ubyte.gz"}};
static const char *const mnist_places[] = {"https://ossci-datasets.s3.amazonaws.com/mnist/",
                                           "https://storage.googleapis.com/cvdf-datasets/mnist/"};

typedef struct fetch {
  entry files[FILES];
  size_t nfiles;
  const char *places[PLACES];
  size_t nplaces;
  const char *ca_file;
  char folder[PATH_ROOM];
  int force, plain;
  unsigned retries;
  double pause_s;
  mlfab__http *http;
  /* The file that is loaded. */
  const entry *one;
  int file, error;     /* error: errno of a write */
  uint64_t have;       /* bytes of it that are there */
  uint64_t began_with; /* when the attempt began */
  double began_s, shown_s;
  int bar; /* a bar stands on the line */
} fetch;

/* --- SHA-256 (FIPS 180-4) --- */

typedef struct sha256 {
  uint32_t state[8];
  uint64_t bytes;
  uint8_t block[64];
} sha256;

static const uint32_t sha256_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotated(uint32_t x, unsigned n) { return x >> n | x << (32 - n); }

static void sha256_block(sha256 *s) {
  uint32_t w[64], v[8];
  for (size_t i = 0; i < 16; i++)
    w[i] = (uint32_t)s->block[4 * i] << 24 | (uint32_t)s->block[4 * i + 1] << 16 |
           (uint32_t)s->block[4 * i + 2] << 8 | s->block[4 * i + 3];
  for (size_t i = 16; i < 64; i++) {
    uint32_t a = rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3;
    uint32_t b = rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + a + w[i - 7] + b;
  }
  memcpy(v, s->state, sizeof v);
  for (size_t i = 0; i < 64; i++) {
    uint32_t e = rotated(v[4], 6) ^ rotated(v[4], 11) ^ rotated(v[4], 25);
    uint32_t t = v[7] + e + ((v[4] & v[5]) ^ (~v[4] & v[6])) + sha256_k[i] + w[i];
    uint32_t a = rotated(v[0], 2) ^ rotated(v[0], 13) ^ rotated(v[0], 22);
    uint32_t u = a + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
    memmove(v + 1, v, 7 * sizeof v[0]);
    v[4] += t;
    v[0] = t + u;
  }
  for (size_t i = 0; i < 8; i++) s->state[i] += v[i];
}

static void sha256_init(sha256 *s) {
  static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memcpy(s->state, first, sizeof first);
  s->bytes = 0;
}

static void sha256_add(sha256 *s, const uint8_t *data, size_t bytes) {
  while (bytes > 0) {
    size_t at = (size_t)(s->bytes % 64), n = 64 - at < bytes ? 64 - at : bytes;
    memcpy(s->block + at, data, n);
    s->bytes += n;
    data += n;
    bytes -= n;
    if (s->bytes % 64 == 0) sha256_block(s);
  }
}

static void sha256_end(sha256 *s, char hex[65]) {
  static const uint8_t padding[64] = {0x80};
  uint8_t length[8];
  uint64_t bits = s->bytes * 8;
  for (size_t i = 0; i < 8; i++) length[i] = (uint8_t)(bits >> (56 - 8 * i));
  sha256_add(s, padding, (size_t)(s->bytes % 64 < 56 ? 56 - s->bytes % 64 : 120 - s->bytes % 64));
  sha256_add(s, length, 8);
  for (size_t i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", (unsigned)s->state[i]);
}

/* --- what it says --- */

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_s(double seconds) {
  struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  nanosleep(&t, NULL);
}

/* A line about the present file, in place of the bar. */
static void say(fetch *f, FILE *to, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void say(fetch *f, FILE *to, const char *format, ...) {
  va_list arguments;
  if (f->bar) printf("\r\033[K");
  f->bar = 0;
  fflush(stdout);
  if (to == stderr) fprintf(to, "mlfab-fetch: ");
  if (f->one) fprintf(to, "%s: ", f->one->name);
  va_start(arguments, format);
  vfprintf(to, format, arguments);
  va_end(arguments);
  fputc('\n', to);
  fflush(to);
}

/* How far it is: a bar ten times a second, or a line every ten seconds. */
static int show(void *user, uint64_t sent, uint64_t received, uint64_t length) {
  static const char full[] = "########################################";
  fetch *f = user;
  struct winsize size = {0, 0, 0, 0};
  double now = now_s(), done = f->one->bytes ? (double)f->have / (double)f->one->bytes : 1;
  double rate = now > f->began_s ? (double)(f->have - f->began_with) / (now - f->began_s) : 0;
  (void)sent, (void)received, (void)length;
  if (now - f->shown_s < (f->plain ? 10 : 0.1)) return 0;
  f->shown_s = now;
  if (f->plain) {
    say(f, stdout, "%.0f %%, %.1f of %.1f MB, %.1f MB/s", 100 * done, (double)f->have * 1e-6,
        (double)f->one->bytes * 1e-6, rate * 1e-6);
    return 0;
  }
  int columns = !ioctl(1, TIOCGWINSZ, &size) && size.ws_col ? size.ws_col : 80;
  int room = columns - (int)strlen(f->one->name) - 40, width = room > 40 ? 40 : room < 0 ? 0 : room;
  int marks = (int)(done * width);
  printf("\r%s [%.*s%*s] %3.0f %%  %.1f MB  %.1f MB/s\033[K", f->one->name, marks, full,
         width - marks, "", 100 * done, (double)f->have * 1e-6, rate * 1e-6);
  fflush(stdout);
  f->bar = 1;
  return 0;
}

/* --- one file --- */

/* 1: the file has the bytes and the SHA-256 of its entry; 0: it has not; -1: it cannot be read (errno). */
static int is_right(int file, const entry *one) {
  static uint8_t block[BLOCK];
  struct stat info;
  sha256 sum;
  char hex[65];
  uint64_t at = 0;
  if (fstat(file, &info)) return -1;
  if (!S_ISREG(info.st_mode)) return 0;
  if ((uint64_t)info.st_size != one->bytes) return 0;
  sha256_init(&sum);
  for (;;) {
    ssize_t n = pread(file, block, sizeof block, (off_t)at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) break;
    sha256_add(&sum, block, (size_t)n);
    at += (uint64_t)n;
  }
  sha256_end(&sum, hex);
  return at == one->bytes && !strcmp(hex, one->sha256);
}

/* Bytes of the file from `offset` on. A server that does not know parts begins at 0 again. */
static int take(void *user, const void *data, size_t bytes, uint64_t offset) {
  fetch *f = user;
  const char *at = data;
  if (offset != f->have && ftruncate(f->file, (off_t)offset)) f->error = errno;
  f->have = offset;
  if (offset < f->began_with) f->began_with = offset;
  if (offset + bytes > f->one->bytes) return MLFAB_ERR_LIMIT;
  while (bytes > 0 && !f->error) {
    ssize_t n = pwrite(f->file, at, bytes, (off_t)f->have);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      f->error = n < 0 ? errno : ENOSPC;
      break;
    }
    at += n;
    bytes -= (size_t)n;
    f->have += (uint64_t)n;
  }
  return f->error ? MLFAB_ERR_IO : 0;
}

/* Begins the file anew. */
static void forget(fetch *f) {
  if (ftruncate(f->file, 0)) f->error = errno;
  f->have = 0;
}

/* One attempt at one place. 0: it has all bytes. Errors: as mlfab__http_run; *again_p: a later one may succeed. */
static int attempt(fetch *f, const char *place, uint32_t *again_p, mlfab_error *error) {
  static mlfab__http_answer answer;
  static const uint16_t no_such_part[] = {416, 0};
  char url[PATH_ROOM], name[160];
  mlfab__http_request r;
  size_t n = strlen(place);
  snprintf(url, sizeof url, "%s%s%s", place, n && place[n - 1] == '/' ? "" : "/", f->one->name);
  memset(&r, 0, sizeof r);
  r.url = url;
  r.awaited = "the file";
  r.redirects = 5;
  r.accepted = f->have > 0 ? no_such_part : NULL;
  r.write = take;
  r.progress = show;
  r.user = f;
  r.range_first = f->have;
  r.body_most = f->one->bytes ? f->one->bytes : 1;
  r.timeout_ns = day_ns;
  r.stall_ns = 30000000000u;
  r.ca_file = f->ca_file;
  f->began_with = f->have;
  f->began_s = now_s();
  f->error = 0;
  int code = mlfab__http_run(f->http, &r, &answer, error);
  *again_p = answer.retryable;
  if (code) return code;
  if (answer.status == 416) { /* the server's file is shorter than what is here */
    forget(f);
    *again_p = 1;
    return mlfab__http_fail(error, MLFAB_ERR_IO,
                            "the file at the server is shorter than what is here");
  }
  if (f->have == f->one->bytes) return 0;
  *again_p = 0;
  mlfab__http_name(place, name, sizeof name);
  return mlfab__http_fail(error, MLFAB_ERR_IO, "%s has %llu bytes, not %llu", name,
                          (unsigned long long)f->have, (unsigned long long)f->one->bytes);
}

/* Loads the file from a place, attempt by attempt. 0: it is right. */
static int load_from(fetch *f, const char *place) {
  mlfab_error error;
  unsigned failures = 0;
  double pause = f->pause_s;
  int restarted = 0;
  memset(&error, 0, sizeof error);
  for (;;) {
    uint64_t had = f->have;
    uint32_t again = 0;
    int code = f->have == f->one->bytes && had > 0 ? 0 : attempt(f, place, &again, &error);
    if (!code && is_right(f->file, f->one) == 1) return 0;
    if (!code) {
      forget(f);
      say(f, stderr, "the SHA-256 is not that of the list%s",
          had > 0 ? "; from the beginning" : "");
      if (had == 0 || restarted || f->error) return 1;
      restarted = 1; /* what was there may have been of another file */
      continue;
    }
    if (f->error) {
      say(f, stderr, "it cannot be written: %s", strerror(f->error));
      return 1;
    }
    say(f, stderr, "%s", error.text);
    failures = f->have > had ? 1 : failures + 1;
    if (f->have > had) pause = f->pause_s;
    if (!again || failures > f->retries) return 1;
    say(f, stdout, "again in %.2g s, from byte %llu on", pause, (unsigned long long)f->have);
    sleep_s(pause);
    pause = pause < 30 ? 2 * pause : 60;
  }
}

/* Opens NAME.part for this process alone. 0 or 1. */
static int open_part(fetch *f, const char *part) {
  struct stat info;
  f->file = open(part, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
  if (f->file < 0 || fstat(f->file, &info)) {
    say(f, stderr, "%s: %s", part, strerror(errno));
    return 1;
  }
  if (!S_ISREG(info.st_mode)) {
    say(f, stderr, "%s is not a file", part);
    return 1;
  }
  if (flock(f->file, LOCK_EX | LOCK_NB)) {
    say(f, stderr, "another process is loading it");
    return 1;
  }
  f->have = (uint64_t)info.st_size;
  f->error = 0;
  if (f->have > f->one->bytes) forget(f);
  if (f->have > 0) say(f, stdout, "goes on from byte %llu", (unsigned long long)f->have);
  return 0;
}

/* Loads a file that is not there. 0 or 1. */
static int load(fetch *f, const char *path) {
  char part[PATH_ROOM + 8];
  int failed = 1;
  double since = now_s();
  snprintf(part, sizeof part, "%s.part", path);
  f->shown_s = since;
  if (!open_part(f, part)) {
    for (size_t i = 0; failed && i < f->nplaces && !f->error; i++)
      failed = load_from(f, f->places[i]);
    if (!failed && (fsync(f->file) || rename(part, path))) {
      say(f, stderr, "%s: %s", path, strerror(errno));
      failed = 1;
    }
    if (failed && f->have == 0) unlink(part);
    if (!failed) say(f, stdout, "%.1f MB, %.1f s", (double)f->one->bytes * 1e-6, now_s() - since);
  }
  if (f->file >= 0) close(f->file);
  return failed;
}

/* 0: the file is there and right. */
static int get(fetch *f, const entry *one) {
  char path[PATH_ROOM];
  f->one = one;
  if (snprintf(path, sizeof path, "%s/%s", f->folder, one->name) >= (int)sizeof path) {
    say(f, stderr, "the path is too long");
    return 1;
  }
  int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), right = 0;
  if (file >= 0) right = is_right(file, one);
  if (file >= 0) close(file);
  if (right == 1) {
    say(f, stdout, "there");
    return 0;
  }
  if (right == 0 && file < 0 && errno != ENOENT) right = -1;
  if (right == -1) {
    say(f, stderr, "%s: %s", path, strerror(errno));
    return 1;
  }
  if (file >= 0 && !f->force) {
    say(f, stderr, "there is another file of this name in %s (--force replaces it)", f->folder);
    return 1;
  }
  return load(f, path);
}

/* --- the command line --- */

/* Makes a folder and those above it. 0, or an errno. */
static int make_folder(const char *path) {
  char name[PATH_ROOM];
  snprintf(name, sizeof name, "%s", path);
  for (char *at = name + 1; *at; at++) {
    if (*at != '/') continue;
    *at = 0;
    if (mkdir(name, 0777) && errno != EEXIST) return errno;
    *at = '/';
  }
  return mkdir(name, 0777) && errno != EEXIST ? errno : 0;
}

static int is_name(const char *name) { return *name && *name != '.' && !strchr(name, '/'); }

/* Reads `SHA256 BYTES NAME` lines. 0 or 1. */
static int read_list(fetch *f, const char *path) {
  char line[512];
  unsigned number = 0;
  FILE *file = fopen(path, "re");
  if (!file) {
    fprintf(stderr, "mlfab-fetch: %s: %s\n", path, strerror(errno));
    return 1;
  }
  f->nfiles = 0;
  while (fgets(line, sizeof line, file)) {
    char sum[66] = "", name[NAME_ROOM] = "";
    unsigned long long bytes = 0;
    number++;
    if (line[0] == '#' || line[strspn(line, " \t\r\n")] == 0) continue;
    int n = sscanf(line, "%65s %llu %127s", sum, &bytes, name);
    if (n != 3 || strlen(sum) != 64 || strspn(sum, "0123456789abcdef") != 64 || !is_name(name) ||
        f->nfiles == FILES || bytes > INT64_MAX) {
      fprintf(stderr, "mlfab-fetch: %s, line %u: not `SHA256 BYTES NAME` (at most %d files)\n",
              path, number, FILES);
      (void)fclose(file);
      return 1;
    }
    entry *one = &f->files[f->nfiles++];
    memcpy(one->sha256, sum, sizeof one->sha256);
    memcpy(one->name, name, sizeof name);
    one->bytes = bytes;
  }
  (void)fclose(file);
  return 0;
}

static int wrong(const char *text) {
  fprintf(stderr, "mlfab-fetch: %s\n\n%s", text, usage_text);
  return 2;
}

/* Files and places of a set that is known here. */
static int known_set(fetch *f, const char *set) {
  if (strcmp(set, "mnist") != 0) return 0;
  memcpy(f->files, mnist_files, sizeof mnist_files);
  f->nfiles = sizeof mnist_files / sizeof mnist_files[0];
  for (size_t i = 0; i < 2 && !f->nplaces; i++) f->places[i] = mnist_places[i];
  if (!f->nplaces) f->nplaces = 2;
  return 1;
}

/* Where the examples look. 0: neither variable is set. */
static int choose_folder(fetch *f, const char *to, const char *set) {
  const char *data = getenv("MLFAB_DATA"), *home = getenv("HOME");
  if (to)
    snprintf(f->folder, sizeof f->folder, "%s", to);
  else if (data && *data)
    snprintf(f->folder, sizeof f->folder, "%s/%s", data, set);
  else if (home && *home)
    snprintf(f->folder, sizeof f->folder, "%s/.cache/mlfab/%s", home, set);
  return f->folder[0] != 0;
}

int main(int argc, char **argv) {
  static const struct option options[] = {{"to", 1, NULL, 't'},      {"from", 1, NULL, 'f'},
                                          {"list", 1, NULL, 'l'},    {"force", 0, NULL, 'F'},
                                          {"ca", 1, NULL, 'c'},      {"plain", 0, NULL, 'p'},
                                          {"retries", 1, NULL, 'r'}, {"pause", 1, NULL, 's'},
                                          {"help", 0, NULL, 'h'},    {NULL, 0, NULL, 0}};
  static fetch f;
  const char *to = NULL, *list = NULL;
  char *end = NULL;
  int option, failed = 0;
  f.retries = 5;
  f.pause_s = 1;
  f.plain = !isatty(1);
  while ((option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
    if (option == 'h') return printf("%s", usage_text) < 0;
    if (option == '?') return wrong("an option that it does not have");
    if (option == 't') to = optarg;
    if (option == 'l') list = optarg;
    if (option == 'c') f.ca_file = optarg;
    if (option == 'F') f.force = 1;
    if (option == 'p') f.plain = 1;
    if (option == 'f' && f.nplaces == PLACES) return wrong("more than 8 places");
    if (option == 'f') f.places[f.nplaces++] = optarg;
    if (option == 'r') f.retries = (unsigned)strtoul(optarg, &end, 10);
    if (option == 's') f.pause_s = strtod(optarg, &end);
    if ((option == 'r' || option == 's') && (end == optarg || *end || *optarg == '-'))
      return wrong("--retries and --pause want a number");
  }
  if (optind + 1 != argc || !is_name(argv[optind])) return wrong("name one set");
  if (!(f.pause_s <= 3600)) return wrong("--pause is above an hour");
  if (!known_set(&f, argv[optind]) && !list)
    return wrong("only mnist is known; others need --list");
  if (list && read_list(&f, list)) return 2;
  if (!f.nplaces) return wrong("--list of another set needs --from");
  if (!choose_folder(&f, to, argv[optind]))
    return wrong("--to, as neither MLFAB_DATA nor HOME is set");
  int code = make_folder(f.folder);
  if (code) {
    fprintf(stderr, "mlfab-fetch: %s: %s\n", f.folder, strerror(code));
    return 1;
  }
  if (mlfab__http_open(&f.http)) {
    fprintf(stderr, "mlfab-fetch: libcurl cannot be used\n");
    return 1;
  }
  for (size_t i = 0; i < f.nfiles; i++) failed += get(&f, &f.files[i]);
  f.one = NULL;
  if (!failed) say(&f, stdout, "all of %s is in %s", argv[optind], f.folder);
  mlfab__http_close(f.http);
  return failed > 0;
}
