/* build_info.c - the list of compiled-in features, as a text. Top floor: it names all switches. */
#include "../base/base.h"
#if MLFAB_WITH_CBLAS
#include <cblas.h>
#endif
#if MLFAB_WITH_MPI
#include <mpi.h>
#endif

#define BUILD_TEXT_OF(x) #x
#define BUILD_TEXT(x) BUILD_TEXT_OF(x)

/* BUILD_ON(1, " name") is the name, and BUILD_ON(0, " name") nothing; BUILD_OFF the reverse. */
#define BUILD_ON_0(name)
#define BUILD_ON_1(name) name
#define BUILD_ON_OF(on, name) BUILD_ON_##on(name)
#define BUILD_ON(on, name) BUILD_ON_OF(on, name)
#define BUILD_OFF_0(name) name
#define BUILD_OFF_1(name)
#define BUILD_OFF_OF(on, name) BUILD_OFF_##on(name)
#define BUILD_OFF(on, name) BUILD_OFF_OF(on, name)

#if defined(OPEN_MPI)
#define BUILD_MPI                                                                                 \
  " (Open MPI " BUILD_TEXT(OMPI_MAJOR_VERSION) "." BUILD_TEXT(OMPI_MINOR_VERSION) "." BUILD_TEXT( \
      OMPI_RELEASE_VERSION) ")"
#elif defined(MPICH_VERSION)
#define BUILD_MPI " (MPICH " MPICH_VERSION ")"
#else
#define BUILD_MPI ""
#endif

/* OPENBLAS_VERSION is " OpenBLAS 0.3.21 ". The program may load another version at its start. */
#if defined(OPENBLAS_VERSION)
#define BUILD_CBLAS " (compiled with" OPENBLAS_VERSION "headers)"
#else
#define BUILD_CBLAS " (not OpenBLAS)"
#endif

#if defined(__clang__)
#define BUILD_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define BUILD_COMPILER "gcc " __VERSION__
#else
#define BUILD_COMPILER "another compiler"
#endif

/* Every switch; `of` is BUILD_ON or BUILD_OFF. */
#define BUILD_SWITCHES(of)                                                                       \
  of(MLFAB_WITH_TCP, " tcp") of(MLFAB_WITH_SHM, " shm") of(MLFAB_WITH_PUSH, " push")             \
      of(MLFAB_WITH_COLL, " coll") of(MLFAB_WITH_PARTIAL, " partial")                            \
          of(MLFAB_WITH_STOCHASTIC, " stochastic") of(MLFAB_WITH_DAG, " dag")                    \
              of(MLFAB_WITH_SCHED, " sched") of(MLFAB_WITH_SPARSE, " sparse")                    \
                  of(MLFAB_WITH_RESHARD, " reshard") of(MLFAB_WITH_GROWTH, " growth")            \
                      of(MLFAB_WITH_REPLICA, " replica") of(MLFAB_WITH_KEYS, " keys") of(        \
                          MLFAB_WITH_CHECKPOINT, " checkpoint") of(MLFAB_WITH_DEVICE, " device") \
                          of(MLFAB_WITH_TELEMETRY, " telemetry") of(MLFAB_WITH_LEND, " lend")

MLFAB_API const char *mlfab_build_info(void) {
  return "mlfab " MLFAB_VERSION ", protocol " BUILD_TEXT(MLFAB_PROTOCOL) "; with:" BUILD_SWITCHES(
      BUILD_ON) BUILD_ON(MLFAB_WITH_MPI, " mpi" BUILD_MPI)
      BUILD_ON(MLFAB_WITH_CBLAS, " cblas" BUILD_CBLAS) "; without:" BUILD_SWITCHES(BUILD_OFF)
          BUILD_OFF(MLFAB_WITH_MPI, " mpi")
              BUILD_OFF(MLFAB_WITH_CBLAS, " cblas") "; compiled by " BUILD_COMPILER;
}
