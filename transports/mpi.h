/* mpi.h - the part of MPI that comes before opening the transport: the world of processes and their roles. */
#ifndef MLFAB__MPI_H
#define MLFAB__MPI_H

#include "../core/base/base.h"

#if MLFAB_WITH_MPI /* otherwise unused */
/* Completes a configuration whose `transports` has MLFAB_USE_MPI: rank, workers, servers, roles and coordinator follow
 * from the processes of the communicator (mlfab_transport.h), and progress from MPI's thread level. Initialises MPI
 * if the program has not. Collective over the communicator; waits for the others, at most until the deadline. Errors:
 * STATE (MPI was finalised, or this is the wrong thread), CONFIG (thread level, settings, roles), WORLD (two processes
 * have different settings; the error names the MPI rank), TIMEOUT, MEMORY, IO. */
MLFAB__INTERNAL int mlfab__mpi_prepare(mlfab_config *config, mlfab_error *error);
#endif

#endif
