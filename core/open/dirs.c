/* dirs.c - directories that a configuration names. See dirs.h. */
#include "dirs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

/* A voter that cannot keep its votes fails later, when the others need it; so this tests it now. */
static int dirs_votes(const mlfab_config *c, mlfab_error *error) {
  struct stat status;
  if (!c->vote_dir[0] || (c->roles & MLFAB_ROLE_WORKER)) return 0;
  int number = stat(c->vote_dir, &status)                                         ? errno
               : !S_ISDIR(status.st_mode)                                         ? ENOTDIR
               : faccessat(AT_FDCWD, c->vote_dir, R_OK | W_OK | X_OK, AT_EACCESS) ? errno
                                                                                  : 0;
  return number ? MLFAB__FAIL(error, MLFAB_ERR_IO, "configuration: vote_dir '%.200s': %s",
                              c->vote_dir, mlfab__reason(number))
                : 0;
}

/* Can files be made in this directory? Returns 0, or an errno. It makes a file: a file system may refuse in spite of a
 * right to write. */
static int dirs_probe(const char *dir) {
  char path[MLFAB__TEXT_MAX + 64];
  struct stat status;
  if (stat(dir, &status)) return errno;
  if (!S_ISDIR(status.st_mode)) return ENOTDIR;
  snprintf(path, sizeof path, "%.255s/.mlfab-%ld", dir, (long)getpid());
  int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return errno == EEXIST ? 0 : errno;
  close(fd);
  return unlink(path) ? errno : 0;
}

/* May this fault be over when the first checkpoint is due? Examples: a full disk, a network file system that is away
 * for a moment, a process with too many open files. */
static int dirs_passes(int number) {
  return number == ENOSPC || number == EDQUOT || number == EINTR || number == EIO ||
         number == ESTALE || number == EMFILE || number == ENFILE || number == ETIMEDOUT ||
         number == EAGAIN || number == ENOMEM;
}

/* A directory that can never have checkpoints is an error now: else hours would pass before its user notices. Exempt
 * are files of the caller, which know other directories, and URLs. *doubt_p: an errno to log. */
static int dirs_checkpoints(const mlfab_config *c, int *doubt_p, mlfab_error *error) {
  int serves = (c->roles & (MLFAB_ROLE_SERVER | MLFAB_ROLE_REPLICA)) != 0;
  int files = c->env && MLFAB__HAS(c->env, mlfab_env, files) && c->env->files;
  if (!c->checkpoint_dir[0] || !serves || files || strstr(c->checkpoint_dir, "://")) return 0;
  int number = dirs_probe(c->checkpoint_dir);
  if (dirs_passes(number)) {
    *doubt_p = number;
    return 0;
  }
  return number ? MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                              "configuration: checkpoint_dir '%.200s' is no directory that this "
                              "process can write to: %s",
                              c->checkpoint_dir, mlfab__reason(number))
                : 0;
}

MLFAB__INTERNAL int mlfab__dirs_check(const mlfab_config *config, int asks, int *doubt_p,
                                      mlfab_error *error) {
  int code = dirs_votes(config, error);
  return code || asks ? code : dirs_checkpoints(config, doubt_p, error);
}
