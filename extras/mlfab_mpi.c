/* mlfab_mpi.c - libmlfab_mpi.so: runs collectives of an MPI program through mlfab, by MPI's profiling interface.
 *
 * Preload it, or link it before the MPI library; the program is not changed:
 *
 *    mpirun -n 4 -x LD_PRELOAD=libmlfab_mpi.so ./program          Open MPI
 *    mpiexec -n 4 -env LD_PRELOAD libmlfab_mpi.so ./program       MPICH
 *
 * It takes MPI_Allreduce, MPI_Iallreduce, MPI_Reduce_scatter, MPI_Allgatherv and MPI_Bcast on MPI_COMM_WORLD, if the
 * rank with the most data has at least MLFAB_MPI_BYTES bytes (65536). In reductions it takes MPI_FLOAT, MPI_DOUBLE and
 * 64-bit integers, with MPI_SUM, MPI_MIN, MPI_MAX and MPI_PROD; in the others all types. All other calls go to MPI
 * unchanged: other communicators, types and operations, small values. All ranks decide alike, because MPI requires
 * equal arguments.
 *
 * By default sums are full, with the same bits in all ranks. Partial reductions (mlfab_partial.h) need
 * MLFAB_MPI_PARTIAL=solo, majority or quorum:<n>, and MLFAB_MPI_PARTIAL_BYTES=<bytes>, which has no default. They
 * replace MPI_Allreduce of MPI_SUM over floating-point numbers of at least that many bytes: the sums are approximate.
 * Integers, other operations and smaller values, like those of a convergence test, are never approximate.
 *
 * MPI_Init and MPI_Init_thread ask for MPI_THREAD_MULTIPLE, so that mlfab can have a progress thread. Without it,
 * MPI_Iallreduce and partial reductions stay with MPI. The environment of mlfab (MLFAB_*, docs/clusters.md) counts; the
 * transport is mpi+shm, or mpi if MLFAB_TRANSPORT says so. If a rank cannot open, all ranks use MPI alone, and one line
 * gives the reason. A failure of a collective is an error of MPI (MPI_ERR_OTHER), by the communicator's error handler.
 * MLFAB_MPI_REPORT=1: every rank reports at MPI_Finalize, or at its exit, how many calls and bytes went through mlfab,
 * or that none did. A program of another MPI library than this was built for ends at MPI_Init, with the reason.
 *
 * States: OFF (before MPI_Init; a rank could not open; after MPI_Finalize) and ON. Calls of several threads follow one
 * another: `lock` is held while a collective begins or runs.
 *
 * It does not see calls of Fortran programs if the MPI library's Fortran interface calls PMPI_* (Open MPI does).
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "mlfab_partial.h"
#include "mlfab_units.h"

#include <mpi.h>

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROFILE_CALL_NS 86400000000000u /* MPI has no deadlines */
enum { PROFILE_OBJECTS = 8, PROFILE_BYTES = 65536 };

enum profile_kind {
  PROFILE_ALLREDUCE,
  PROFILE_IALLREDUCE,
  PROFILE_REDUCE_SCATTER,
  PROFILE_ALLGATHERV,
  PROFILE_BCAST,
  PROFILE_PARTIAL,
  PROFILE_KINDS
};

static const char *const profile_names[PROFILE_KINDS] = {
    "MPI_Allreduce",  "MPI_Iallreduce", "MPI_Reduce_scatter",
    "MPI_Allgatherv", "MPI_Bcast",      "partial MPI_Allreduce"};

/* A partial reduction: arrays of this size and type. */
typedef struct profile_object {
  uint64_t count;
  int dtype;
  uint32_t id;
} profile_object;

static struct {
  mlfab *ctx; /* NULL: OFF */
  pthread_mutex_t lock;
  int rank, size, threads; /* threads: there is a progress thread */
  int reported;
  uint64_t least_bytes;
  uint32_t partial, quorum; /* partial: MLFAB_PARTIAL_*, or 0 */
  uint64_t partial_bytes;
  profile_object objects[PROFILE_OBJECTS];
  uint32_t objects_count;
  uint64_t calls[PROFILE_KINDS], bytes[PROFILE_KINDS];
} profile = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- opening and closing ---- */

static int profile_say(const char *what, const char *text) {
  fprintf(stderr, "mlfab_mpi: rank %d: %s: %s\n", profile.rank, what, text);
  return -1;
}

/* Reads a size from the environment: a whole number, with a unit or of bytes. Returns 0, or -1 for another text. */
static int profile_bytes_of(const char *name, uint64_t standard, uint64_t *bytes_p) {
  static const mlfab__unit units[] = MLFAB__SIZE_UNITS;
  const char *text = getenv(name);
  *bytes_p = standard;
  if (!text || !*text || !mlfab__units_read(text, units, bytes_p)) return 0;
  return profile_say(name, "not a size, as 65536 or 64KiB (B to TB, KiB to TiB)");
}

static int profile_settings(void) {
  const char *partial = getenv("MLFAB_MPI_PARTIAL");
  char *end = NULL;
  if (profile_bytes_of("MLFAB_MPI_BYTES", PROFILE_BYTES, &profile.least_bytes)) return -1;
  if (profile_bytes_of("MLFAB_MPI_PARTIAL_BYTES", 0, &profile.partial_bytes)) return -1;
  if (!partial || !*partial) return 0;
  if (!strcmp(partial, "solo")) profile.partial = MLFAB_PARTIAL_SOLO;
  if (!strcmp(partial, "majority")) profile.partial = MLFAB_PARTIAL_MAJORITY;
  if (!strncmp(partial, "quorum:", 7)) {
    unsigned long n = strtoul(partial + 7, &end, 10);
    if (!*end && n > 0 && n <= (unsigned long)profile.size) profile.partial = MLFAB_PARTIAL_QUORUM;
    profile.quorum = (uint32_t)n;
  }
  if (!profile.partial)
    return profile_say("MLFAB_MPI_PARTIAL", "not solo, majority or quorum:<number of ranks>");
  if (profile.partial_bytes == 0)
    return profile_say("MLFAB_MPI_PARTIAL",
                       "needs MLFAB_MPI_PARTIAL_BYTES, from which sums may be approximate");
  if (!profile.threads) return profile_say("MLFAB_MPI_PARTIAL", "needs MPI_THREAD_MULTIPLE");
  return 0;
}

/* The settings that decide whether a call is taken must be the same in all ranks. */
static int profile_agree(int ready) {
  uint64_t mine[5] = {(uint64_t)!ready, profile.least_bytes, profile.partial, profile.quorum,
                      profile.partial_bytes};
  uint64_t most[5], least[5];
  PMPI_Allreduce(mine, most, 5, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD);
  PMPI_Allreduce(mine, least, 5, MPI_UINT64_T, MPI_MIN, MPI_COMM_WORLD);
  if (most[0]) return 0; /* that rank has printed the reason */
  if (!memcmp(most, least, sizeof most)) return 1;
  if (profile.rank == 0) profile_say("settings", "MLFAB_MPI_* differ between the ranks");
  return 0;
}

static void profile_close(mlfab **ctx) {
  if (*ctx) mlfab_close(ctx);
}

static int profile_configure(mlfab_config *config) {
  const char *transport = getenv("MLFAB_TRANSPORT");
  mlfab_error error = {.code = 0};
  mlfab_config_init(config);
  config->transports = MLFAB_USE_MPI; /* set, so that no address is looked up */
  if (mlfab_config_from_env(config, &error)) return profile_say("mlfab_open", error.text);
  if (!transport || strcmp(transport, "mpi") != 0) config->transports |= MLFAB_USE_SHM;
  config->coordinator[0] = 0; /* the launcher's value is for mlfab without MPI */
  config->dedicated = config->roles = 0;
  config->scheduler = MLFAB_SCHEDULER_NONE;
  config->servers = 1;
  return 0;
}

/* Opens the context: after MPI_Init, in every rank. */
static void profile_begin(void) {
  mlfab_config config;
  mlfab_error error = {.code = 0};
  mlfab *ctx = NULL;
  int level = MPI_THREAD_SINGLE;
  PMPI_Comm_rank(MPI_COMM_WORLD, &profile.rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &profile.size);
  PMPI_Query_thread(&level);
  profile.threads = level == MPI_THREAD_MULTIPLE;
  /* mlfab_open waits for all ranks. */
  if (!profile_agree(profile_settings() == 0 && profile_configure(&config) == 0)) return;
  int code = mlfab_open(&config, &ctx, &error);
  if (code) profile_say("mlfab_open", error.text);
  if (profile_agree(code == 0))
    profile.ctx = ctx;
  else
    profile_close(&ctx);
}

/* Reports why no call went through mlfab. `on`: it has opened. */
static void profile_report_none(int begun, int on) {
  char text[160];
  if (on)
    snprintf(text, sizeof text,
             "none on MPI_COMM_WORLD had MLFAB_MPI_BYTES (%" PRIu64 ") and types that it takes",
             profile.least_bytes);
  else
    snprintf(
        text, sizeof text, "%s",
        begun ? "it did not open" : "MPI_Init was not called through it (Fortran calls PMPI_*)");
  profile_say("no call went through mlfab", text);
}

/* Reports once. begun: MPI_Init came through here. on: mlfab has opened. */
static void profile_report(int begun, int on) {
  const char *wanted = getenv("MLFAB_MPI_REPORT");
  int any = 0;
  if (!wanted || strcmp(wanted, "1") != 0 || profile.reported) return;
  profile.reported = 1;
  for (int i = 0; i < PROFILE_KINDS; i++) {
    if (!profile.calls[i]) continue;
    any = 1;
    fprintf(stderr, "mlfab_mpi: rank %d: %s: %llu calls, %llu bytes\n", profile.rank,
            profile_names[i], (unsigned long long)profile.calls[i],
            (unsigned long long)profile.bytes[i]);
  }
  if (!any) profile_report_none(begun, on);
}

/* Returns a launcher's number of this process, for the time when MPI cannot be asked. */
static int profile_launched(void) {
  const char *rank = getenv("OMPI_COMM_WORLD_RANK");
  if (!rank) rank = getenv("PMI_RANK");
  return rank ? (int)strtol(rank, NULL, 10) : 0;
}

/* Ends the program if its MPI library is not the one that this was compiled for: its handles have other types, so no
 * call can be passed on. */
static void profile_refuse_others(void) {
  char version[8192 + 1] = "", text[192]; /* limit of all libraries */
  int bytes = 0;
  PMPI_Get_library_version(version, &bytes);
  /* Handles are pointers in Open MPI and its descendants, and numbers in MPICH and its descendants. */
  static const struct {
    const char *words;
    int pointers;
  } libraries[] = {
      {"Open MPI", 1}, {"Spectrum MPI", 1}, {"MPICH", 0}, {"MVAPICH", 0}, {"Intel(R) MPI", 0}};
#ifdef OPEN_MPI
  static const char ours[] = "Open MPI";
  const int pointers = 1;
#else
  static const char ours[] = "MPICH";
  const int pointers = 0;
#endif
  size_t i = 0, n = sizeof libraries / sizeof libraries[0];
  while (i < n && !strstr(version, libraries[i].words)) i++;
  if (i == n || libraries[i].pointers == pointers) return;
  profile.rank = profile_launched();
  version[strcspn(version, ",\n\t")] = 0;
  snprintf(text, sizeof text, "this libmlfab_mpi.so was built for %s, the program has %.80s", ours,
           version);
  profile_say("another MPI library", text);
  exit(1);
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  profile_refuse_others();
  int code = PMPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, provided);
  (void)required;
  if (code == MPI_SUCCESS) profile_begin();
  return code;
}

int MPI_Init(int *argc, char ***argv) {
  int provided;
  return MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided);
}

int MPI_Finalize(void) {
  mlfab *ctx = profile.ctx;
  profile_report(1, ctx != NULL);
  if (ctx) {
    if (profile.objects_count) mlfab_barrier(ctx, NULL); /* the others may still need this rank */
    profile.ctx = NULL;
    profile_close(&ctx);
  }
  return PMPI_Finalize();
}

/* Handles a program whose MPI_Finalize did not come through here. */
__attribute__((destructor)) static void profile_exit(void) {
  int used = 0, begun = profile.size > 0;
  PMPI_Initialized(&used);
  if (!used) return; /* a shell, or another program without MPI */
  if (!begun) profile.rank = profile_launched();
  profile_report(begun, profile.ctx != NULL);
}

/* ---- selection of calls ---- */

/* Returns mlfab's element type, or 0. */
static int profile_dtype(MPI_Datatype type) {
  if (type == MPI_FLOAT) return MLFAB_F32;
  if (type == MPI_DOUBLE) return MLFAB_F64;
  if (type == MPI_INT64_T || type == MPI_LONG_LONG || (type == MPI_LONG && sizeof(long) == 8))
    return MLFAB_I64;
  return 0;
}

/* Returns mlfab's operation, or -1. */
static int profile_op(MPI_Op op) {
  return op == MPI_SUM    ? MLFAB_OP_SUM
         : op == MPI_MIN  ? MLFAB_OP_MIN
         : op == MPI_MAX  ? MLFAB_OP_MAX
         : op == MPI_PROD ? MLFAB_OP_PRODUCT
                          : -1;
}

static uint64_t profile_bytes(int dtype) { return dtype == MLFAB_F32 ? 4 : 8; }

static int profile_takes(MPI_Comm comm, uint64_t bytes) {
  return profile.ctx && comm == MPI_COMM_WORLD && bytes > 0 && bytes >= profile.least_bytes;
}

/* Returns the bytes of an element, or 0. */
static uint64_t profile_size(MPI_Datatype type) {
  MPI_Count size = 0;
  if (type == MPI_DATATYPE_NULL || PMPI_Type_size_x(type, &size) != MPI_SUCCESS) return 0;
  return size > 0 ? (uint64_t)size : 0;
}

/* Returns 1 for a predefined type without gaps. */
static int profile_plain(MPI_Datatype type) {
  int integers, addresses, types, combiner;
  MPI_Aint low, extent;
  if (PMPI_Type_get_envelope(type, &integers, &addresses, &types, &combiner) != MPI_SUCCESS ||
      combiner != MPI_COMBINER_NAMED)
    return 0;
  PMPI_Type_get_extent(type, &low, &extent);
  return (uint64_t)extent == profile_size(type);
}

/* Copies elements to bytes without gaps (pack: 1), or from there (0). Works in pieces, as MPI counts bytes by int.
 * Returns a code of MPI. */
static int profile_copy(char *data, int count, MPI_Datatype type, char *packed, int pack) {
  uint64_t size = profile_size(type);
  MPI_Aint low, extent;
  int code = MPI_SUCCESS, most = size > 0 ? (int)(INT32_MAX / size) : 0;
  if (count <= 0 || size == 0) return code;
  if (most == 0) {
    profile_say("a derived type", "an element has more than 2 GiB");
    PMPI_Comm_call_errhandler(MPI_COMM_WORLD, MPI_ERR_TYPE);
    return MPI_ERR_TYPE;
  }
  PMPI_Type_get_extent(type, &low, &extent);
  for (int i = 0, n = 0; i < count && code == MPI_SUCCESS; i += n) {
    char *at = data + i * extent, *bytes = packed + (uint64_t)i * size;
    int place = 0;
    n = count - i < most ? count - i : most;
    code = pack ? PMPI_Pack(at, n, type, bytes, n * (int)size, &place, MPI_COMM_WORLD)
                : PMPI_Unpack(bytes, n * (int)size, &place, at, n, type, MPI_COMM_WORLD);
  }
  return code;
}

/* Ends a call: counts it, or turns a failure into an error of MPI. */
static int profile_done(int code, enum profile_kind kind, uint64_t bytes, MPI_Comm comm) {
  mlfab_error error = {.code = 0};
  profile.calls[kind]++;
  profile.bytes[kind] += bytes;
  if (!code) return MPI_SUCCESS;
  mlfab_last_error(profile.ctx, &error);
  profile_say(profile_names[kind], error.text);
  PMPI_Comm_call_errhandler(comm, MPI_ERR_OTHER);
  return MPI_ERR_OTHER;
}

static mlfab_collective profile_options(int op, const void *const *input) {
  mlfab_collective options;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.op = (uint32_t)op;
  options.timeout_ns = PROFILE_CALL_NS;
  options.inputs = input && *input != MPI_IN_PLACE ? input : NULL;
  return options;
}

/* ---- partial reductions ---- */

static int profile_is_partial(int dtype, int op, uint64_t bytes) {
  return profile.partial && bytes >= profile.partial_bytes && op == MLFAB_OP_SUM &&
         dtype != MLFAB_I64;
}

/* Returns the object for arrays like these; all ranks open it at the same call. NULL: too many, *code_p is 0. */
static profile_object *profile_object_of(uint64_t count, int dtype, int *code_p) {
  *code_p = 0;
  for (uint32_t i = 0; i < profile.objects_count; i++) {
    profile_object *object = &profile.objects[i];
    if (object->count == count && object->dtype == dtype) return object;
  }
  if (profile.objects_count == PROFILE_OBJECTS) return NULL;
  mlfab_partial_options options;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.mode = profile.partial;
  options.quorum = profile.quorum;
  options.op = MLFAB_OP_SUM;
  options.timeout_ns = PROFILE_CALL_NS;
  profile_object *object = &profile.objects[profile.objects_count];
  *object = (profile_object){count, dtype, 0};
  *code_p = mlfab_partial_open(profile.ctx, count, dtype, &options, &object->id);
  if (*code_p) return NULL;
  profile.objects_count++;
  return object;
}

/* ---- the calls ---- */

static int profile_allreduce(const void *in, void *out, uint64_t count, int dtype, int op) {
  mlfab_collective options = profile_options(op, &in);
  mlfab_vec vec = {out, count};
  int code = 0;
  uint64_t bytes = count * profile_bytes(dtype);
  profile_object *object =
      profile_is_partial(dtype, op, bytes) ? profile_object_of(count, dtype, &code) : NULL;
  if (code) return profile_done(code, PROFILE_PARTIAL, bytes, MPI_COMM_WORLD);
  if (!object) {
    code = mlfab_allreduce_list(profile.ctx, &vec, 1, dtype, &options);
    return profile_done(code, PROFILE_ALLREDUCE, bytes, MPI_COMM_WORLD);
  }
  if (in != MPI_IN_PLACE) memcpy(out, in, bytes);
  code = mlfab_partial_reduce(profile.ctx, object->id, out, PROFILE_CALL_NS, NULL);
  return profile_done(code, PROFILE_PARTIAL, bytes, MPI_COMM_WORLD);
}

int MPI_Allreduce(const void *in, void *out, int count, MPI_Datatype type, MPI_Op op,
                  MPI_Comm comm) {
  int dtype = profile_dtype(type), how = profile_op(op);
  uint64_t bytes = count > 0 ? (uint64_t)count * profile_bytes(dtype) : 0;
  if (!dtype || how < 0 || !profile_takes(comm, bytes))
    return PMPI_Allreduce(in, out, count, type, op, comm);
  pthread_mutex_lock(&profile.lock);
  int code = profile_allreduce(in, out, (uint64_t)count, dtype, how);
  pthread_mutex_unlock(&profile.lock);
  return code;
}

/* A request of MPI that mlfab ends: a generalized one. mlfab reads `input` until then. */
typedef struct profile_request {
  MPI_Request request;
  const void *input;
  int code;
} profile_request;

static int profile_query(void *state, MPI_Status *status) {
  const profile_request *r = state;
  PMPI_Status_set_elements(status, MPI_BYTE, 0);
  PMPI_Status_set_cancelled(status, 0);
  status->MPI_SOURCE = MPI_UNDEFINED;
  status->MPI_TAG = MPI_UNDEFINED;
  return r->code ? MPI_ERR_OTHER : MPI_SUCCESS;
}

static int profile_free(void *state) {
  free(state);
  return MPI_SUCCESS;
}

static int profile_cancel(void *state, int complete) {
  (void)state, (void)complete; /* a collective cannot be cancelled */
  return MPI_SUCCESS;
}

/* Runs in mlfab's progress thread, or in a thread inside a call. */
static void profile_ended(void *user, mlfab_request request, const mlfab_result *result) {
  profile_request *r = user;
  (void)request;
  r->code = result->status;
  PMPI_Grequest_complete(r->request);
}

static int profile_start(const void *in, void *out, uint64_t count, int dtype, int op,
                         MPI_Request *request) {
  profile_request *r = calloc(1, sizeof *r);
  mlfab_request id = 0;
  mlfab_vec vec = {out, count};
  if (!r) return MPI_ERR_NO_MEM;
  r->input = in;
  mlfab_collective options = profile_options(op, &r->input);
  int code = PMPI_Grequest_start(profile_query, profile_free, profile_cancel, r, &r->request);
  if (code != MPI_SUCCESS) {
    free(r);
    return code;
  }
  *request = r->request;
  code = mlfab_allreduce_start(profile.ctx, &vec, 1, dtype, &options, &id);
  if (!code) code = mlfab_on_done(profile.ctx, id, profile_ended, r);
  profile_done(code, PROFILE_IALLREDUCE, count * profile_bytes(dtype), MPI_COMM_WORLD);
  if (!code) return MPI_SUCCESS;
  r->code = code; /* the request reports it */
  return PMPI_Grequest_complete(r->request);
}

int MPI_Iallreduce(const void *in, void *out, int count, MPI_Datatype type, MPI_Op op,
                   MPI_Comm comm, MPI_Request *request) {
  int dtype = profile_dtype(type), how = profile_op(op);
  uint64_t bytes = count > 0 ? (uint64_t)count * profile_bytes(dtype) : 0;
  if (!dtype || how < 0 || !profile.threads || !profile_takes(comm, bytes))
    return PMPI_Iallreduce(in, out, count, type, op, comm, request);
  pthread_mutex_lock(&profile.lock);
  int code = profile_start(in, out, (uint64_t)count, dtype, how, request);
  pthread_mutex_unlock(&profile.lock);
  return code;
}

/* Returns the counts of all ranks for mlfab, in parts of so many, and their sum; NULL without memory. */
static uint64_t *profile_counts(const int *counts, uint64_t unit, uint64_t *sum_p) {
  uint64_t *all = calloc((size_t)profile.size, sizeof *all);
  *sum_p = 0;
  for (int r = 0; all && r < profile.size; r++) {
    all[r] = counts[r] > 0 ? (uint64_t)counts[r] * unit : 0;
    *sum_p += all[r];
  }
  return all;
}

int MPI_Reduce_scatter(const void *in, void *out, const int *counts, MPI_Datatype type, MPI_Op op,
                       MPI_Comm comm) {
  int dtype = profile_dtype(type), how = profile_op(op), code;
  uint64_t sum = 0, before = 0, bytes = profile_bytes(dtype);
  uint64_t *all = dtype && how >= 0 && profile.ctx && comm == MPI_COMM_WORLD
                      ? profile_counts(counts, 1, &sum)
                      : NULL;
  int takes = all && profile_takes(comm, sum * bytes);
  /* mlfab reduces in place, but MPI must not write the input. */
  char *work = takes ? malloc(sum * bytes) : NULL;
  if (takes && !work) {
    free(all);
    return profile_done(MLFAB_ERR_MEMORY, PROFILE_REDUCE_SCATTER, 0, comm);
  }
  if (!takes) {
    free(all);
    return PMPI_Reduce_scatter(in, out, counts, type, op, comm);
  }
  mlfab_collective options = profile_options(how, NULL);
  for (int r = 0; r < profile.rank; r++) before += all[r];
  memcpy(work, in == MPI_IN_PLACE ? out : in, sum * bytes);
  pthread_mutex_lock(&profile.lock);
  code = mlfab_reduce_scatter(profile.ctx, work, all, dtype, &options);
  code = profile_done(code, PROFILE_REDUCE_SCATTER, sum * bytes, comm);
  pthread_mutex_unlock(&profile.lock);
  if (code == MPI_SUCCESS) memcpy(out, work + before * bytes, all[profile.rank] * bytes);
  free(work);
  free(all);
  return code;
}

/* One rank's part of a gather. */
typedef struct profile_block {
  char *at;
  int count;
  MPI_Datatype type;
} profile_block;

/* Gathers into `work`, block behind block, then puts the blocks at their places. `bytes`: size of every block. */
static int profile_allgatherv(profile_block in, profile_block out, const int *places,
                              const uint64_t *bytes, char *work) {
  mlfab_collective options = profile_options(0, NULL);
  uint64_t size = profile_size(out.type), at = 0, sum = 0;
  MPI_Aint low, extent;
  int code;
  for (int r = 0; r < profile.size; sum += bytes[r++])
    if (r == profile.rank) at = sum;
  PMPI_Type_get_extent(out.type, &low, &extent);
  out.count = (int)(bytes[profile.rank] / size);
  if (in.at == MPI_IN_PLACE)
    in = (profile_block){out.at + places[profile.rank] * extent, out.count, out.type};
  /* It is an error if a program sends more than the others receive. */
  uint64_t room = bytes[profile.rank], unit = profile_size(in.type);
  if (unit && in.count > 0 && (uint64_t)in.count > room / unit) in.count = (int)(room / unit);
  code = profile_copy(in.at, in.count, in.type, work + at, 1);
  if (code != MPI_SUCCESS) return code;
  code = mlfab_allgather(profile.ctx, work, bytes, MLFAB_BYTES, &options);
  code = profile_done(code, PROFILE_ALLGATHERV, sum, MPI_COMM_WORLD);
  for (int r = 0; r < profile.size && code == MPI_SUCCESS; work += bytes[r++])
    code = profile_copy(out.at + places[r] * extent, (int)(bytes[r] / size), out.type, work, 0);
  return code;
}

/* All ranks agree only on the number of bytes of each block of a gather: a type that is plain here may be a derived
 * type elsewhere. So bytes decide if a call is taken, and all ranks pack and unpack. */
int MPI_Allgatherv(const void *in, int count, MPI_Datatype in_type, void *out, const int *counts,
                   const int *places, MPI_Datatype out_type, MPI_Comm comm) {
  uint64_t sum = 0, size = profile.ctx && comm == MPI_COMM_WORLD ? profile_size(out_type) : 0;
  uint64_t *bytes = size ? profile_counts(counts, size, &sum) : NULL;
  int code;
  if (!bytes || !profile_takes(comm, sum)) {
    code = PMPI_Allgatherv(in, count, in_type, out, counts, places, out_type, comm);
  } else {
    char *work = malloc(sum);
    pthread_mutex_lock(&profile.lock);
    code = work ? profile_allgatherv((profile_block){(char *)(uintptr_t)in, count, in_type},
                                     (profile_block){out, 0, out_type}, places, bytes, work)
                : profile_done(MLFAB_ERR_MEMORY, PROFILE_ALLGATHERV, 0, comm);
    pthread_mutex_unlock(&profile.lock);
    free(work);
  }
  free(bytes);
  return code;
}

/* Here, too, all ranks agree only on the number of bytes. */
int MPI_Bcast(void *data, int count, MPI_Datatype type, int root, MPI_Comm comm) {
  if (!profile.ctx || comm != MPI_COMM_WORLD || count <= 0 || root < 0 || root >= profile.size)
    return PMPI_Bcast(data, count, type, root, comm);
  uint64_t bytes = (uint64_t)count * profile_size(type);
  if (!profile_takes(comm, bytes)) return PMPI_Bcast(data, count, type, root, comm);
  int plain = profile_plain(type), sends = root == profile.rank, code = MPI_SUCCESS;
  char *work = plain ? data : malloc(bytes);
  if (!work) return profile_done(MLFAB_ERR_MEMORY, PROFILE_BCAST, 0, comm);
  if (!plain && sends) code = profile_copy(data, count, type, work, 1);
  if (code == MPI_SUCCESS) {
    mlfab_collective options = profile_options(0, NULL);
    pthread_mutex_lock(&profile.lock);
    code = mlfab_broadcast(profile.ctx, root, work, bytes, &options);
    code = profile_done(code, PROFILE_BCAST, bytes, comm);
    pthread_mutex_unlock(&profile.lock);
  }
  if (!plain && !sends && code == MPI_SUCCESS) code = profile_copy(data, count, type, work, 0);
  if (!plain) free(work);
  return code;
}
