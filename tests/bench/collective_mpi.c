/* collective_mpi.c - Open MPI's allreduce, in place: mpirun -np N bench-collective-mpi DIR */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "collective_common.h"

#include <mpi.h>

static void allreduce(collective_rank *r, size_t count) {
  MPI_Allreduce(MPI_IN_PLACE, r->data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

int main(int argc, char **argv) {
  collective_rank r = {.allreduce = allreduce};
  if (argc < 2) collective_fail("usage", "bench-collective-mpi DIR");
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &r.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &r.ranks);
  r.data = collective_memory();
  collective_serve(&r, argv[1]);
  MPI_Finalize();
  free(r.data);
  return 0;
}
