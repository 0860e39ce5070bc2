/* shm_file.c - memory that processes of one host share: its files and mappings. */
#include "shm_file.h"

#if MLFAB_WITH_SHM

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
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

MLFAB__INTERNAL int mlfab__shm_sealed(int fd, uint64_t bytes) {
  const int both = F_SEAL_SHRINK | F_SEAL_GROW;
  struct stat status;
  int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & both) == both && fstat(fd, &status) == 0 &&
         status.st_size == (off_t)bytes;
}

MLFAB__INTERNAL void *mlfab__shm_map(void *at, uint64_t bytes, int protection, int fd,
                                     uint64_t from) {
  void *map =
      mmap(at, bytes, protection, MAP_SHARED | (at != NULL ? MAP_FIXED : 0), fd, (off_t)from);
  if (map == MAP_FAILED) return NULL;
  madvise(map, bytes, MADV_DONTFORK);
  return map;
}

#endif
