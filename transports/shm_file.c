/* shm_file.c - memfds that processes of one host share. */
#include "shm_file.h"

#if MLFAB_WITH_SHM

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

MLFAB__INTERNAL int mlfab__shm_file(const char *name, uint64_t bytes, int seals) {
  struct rlimit most;
  if (getrlimit(RLIMIT_FSIZE, &most) == 0 && bytes > most.rlim_cur) {
    errno = EFBIG;
    return -1;
  }
  int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return -1;
  if (ftruncate(fd, (off_t)bytes) == 0 &&
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | seals) == 0)
    return fd;
  int why = errno;
  close(fd);
  errno = why;
  return -1;
}

#endif
