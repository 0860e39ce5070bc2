/* key_source.c - gets the fabric's key from a function, a file, or a text. See key_source.h. */
#include "key_source.h"

#include "../base/env.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* Returns NULL, or why this file keeps no secret. Root may give the key to a group, as in a volume of secrets. */
static const char *key_file_bad(const struct stat *info) {
  if (!S_ISREG(info->st_mode)) return "is not a regular file";
  int roots = info->st_uid == 0;
  if (!roots && info->st_uid != geteuid()) return "belongs to another user, who is not root";
  if (info->st_mode & (S_IRWXO | (roots ? S_IWGRP | S_IXGRP : S_IRWXG)))
    return roots ? "may be used by others (chmod 640; its group may only read)"
                 : "may be used by others (chmod 600)";
  if (info->st_size == 0) return "is empty";
  return NULL;
}

/* Reads at most room bytes; -1 and errno after an error. */
static ssize_t key_read(int fd, char *text, size_t room) {
  size_t n = 0;
  while (n < room) {
    ssize_t got = read(fd, text + n, room - n);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -1;
    if (got == 0) break;
    n += (size_t)got;
  }
  return (ssize_t)n;
}

/* Makes a text with a comma of one or two lines. */
static int key_lines(mlfab_config *c, char *text, size_t n, mlfab_error *error) {
  if (n >= sizeof c->key || memchr(text, 0, n))
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "key_file %s is longer than two keys, or not a text", c->key_file);
  while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r')) n--;
  for (size_t i = 0; i < n; i++)
    if (text[i] == '\n') text[i] = ',';
  memcpy(c->key, text, n);
  c->key[n] = 0;
  if (n > 0) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "key_file %s is empty", c->key_file);
}

static int key_from_file(mlfab_config *c, mlfab_error *error) {
  char text[sizeof c->key];
  struct stat info;
  /* A FIFO would wait for a writer. */
  int fd = open(c->key_file, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0 || fstat(fd, &info)) {
    int number = errno;
    if (fd >= 0) close(fd);
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "key_file %s cannot be opened: %s", c->key_file,
                       mlfab__reason(number));
  }
  const char *bad = key_file_bad(&info);
  ssize_t n = bad ? 0 : key_read(fd, text, sizeof text);
  int number = errno;
  close(fd);
  if (bad) return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "key_file %s %s", c->key_file, bad);
  int code = n < 0 ? MLFAB__FAIL(error, MLFAB_ERR_IO, "key_file %s cannot be read: %s", c->key_file,
                                 mlfab__reason(number))
                   : key_lines(c, text, (size_t)n, error);
  mlfab__wipe(text, sizeof text);
  return code;
}

static int key_from_function(mlfab_config *c, mlfab_error *error) {
  mlfab__wipe(c->key, sizeof c->key);
  int code = c->key_from(c->key_user, c->key, sizeof c->key);
  c->key[sizeof c->key - 1] = 0;
  if (code) return MLFAB__FAIL(error, code, "configuration: key_from failed");
  return c->key[0] ? 0
                   : MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "configuration: key_from gave no key");
}

/* Draws entropy; a simulation stays the same for a seed. */
static int key_entropy(mlfab_config *c, mlfab_error *error) {
  if (c->transport && c->transport->caps & MLFAB_CAP_VIRTUAL) return 0;
  int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  ssize_t n = fd < 0 ? -1 : key_read(fd, (char *)c->entropy, sizeof c->entropy);
  if (fd >= 0) close(fd);
  if (n == (ssize_t)sizeof c->entropy) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_IO, "no random bytes for the proofs of a key");
}

MLFAB__INTERNAL void mlfab__key_forget(mlfab_config *config) {
  mlfab__wipe(config->key, sizeof config->key);
  mlfab__wipe(config->entropy, sizeof config->entropy);
}

MLFAB__INTERNAL int mlfab__key_source(mlfab_config *config, mlfab_error *error) {
  mlfab__fabric_keys keys;
  const char *why;
  int code = 0;
  if (config->key_from)
    code = key_from_function(config, error);
  else if (config->key_file[0])
    code = key_from_file(config, error);
  if (code || !config->key[0]) return code;
  code = mlfab__keys_parse(config->key, &keys, &why);
  mlfab__wipe(&keys, sizeof keys);
  if (!code) return key_entropy(config, error);
  if (config->key_from) return MLFAB__FAIL(error, code, "configuration: key_from: %s", why);
  if (config->key_file[0])
    return MLFAB__FAIL(error, code, "key_file %s: %s", config->key_file, why);
  return MLFAB__FAIL(error, code, "configuration: key (MLFAB_KEY): %s", why);
}
