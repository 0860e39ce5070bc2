/* plain.c - an MPI program that knows nothing of mlfab and asserts its own results: mpirun -n N plain MODE...
 *
 * Run it as it is, and with libmlfab_mpi.so preloaded. Modes, which follow one another:
 *
 *    all     every kind of call
 *    sums    a part of them
 *    loop    allreduces of floats, all of one size, for partial reductions
 *    wide    the same with doubles
 *    mixed   a gather whose receive types differ between the ranks: MPI allows it, and MPICH 4.0 alone fails
 *    init    MPI_Init instead of MPI_Init_thread
 *
 * Exit status: 1, after a line, if a value is wrong; 2 without a mode, or with another one. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <mpi.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 100000, SMALL = 3, STEPS = 20 };

static int rank, size;
static float f32[COUNT], f32_out[COUNT];
static double f64[COUNT];
static int64_t i64[COUNT];
static int words[COUNT];

static void check(const char *what, double is, double should) {
  if (is == should) return;
  printf("rank %d: %s is %g, not %g\n", rank, what, is, should);
  fflush(stdout);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static double triangle(void) { return size * (size - 1) / 2.0; }

static void test_sums(void) {
  for (int i = 0; i < COUNT; i++) {
    f32[i] = (float)(rank + i % 5);
    f64[i] = rank * 2.0;
    i64[i] = (INT64_C(1) << 40) + rank;
    words[i] = rank + i;
  }
  MPI_Allreduce(f32, f32_out, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, f64, COUNT, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, i64, COUNT, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, words, COUNT, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  for (int i = 0; i < COUNT; i++) {
    check("an input", (double)f32[i], rank + i % 5);
    check("a float", (double)f32_out[i], triangle() + size * (i % 5));
    check("a double", f64[i], 2 * triangle());
    check("an int64", (double)i64[i], (double)(size * (INT64_C(1) << 40)) + triangle());
    check("an int", words[i], triangle() + (double)size * i);
  }
  MPI_Allreduce(f32, f32_out, COUNT, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
  for (int i = 0; i < COUNT; i++) check("a maximum", (double)f32_out[i], size - 1 + i % 5);
  double small[SMALL] = {1, 2, rank};
  MPI_Allreduce(MPI_IN_PLACE, small, SMALL, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  check("a small sum", small[2], triangle());
}

static void test_part(void) {
  MPI_Comm part;
  int members;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, 0, &part);
  MPI_Comm_size(part, &members);
  for (int i = 0; i < COUNT; i++) f32[i] = 1;
  MPI_Allreduce(f32, f32_out, COUNT, MPI_FLOAT, MPI_SUM, part);
  for (int i = 0; i < COUNT; i++) check("a sum of a part", (double)f32_out[i], members);
  MPI_Comm_free(&part);
}

/* Rank 0 waits for a message that the others send after they have begun the second sum. */
static void test_nonblocking(void) {
  MPI_Request requests[2];
  static double more[COUNT];
  int ball = 0;
  for (int i = 0; i < COUNT; i++) {
    f32[i] = (float)rank;
    more[i] = 1;
  }
  if (rank == 0 && size > 1) MPI_Recv(&ball, 1, MPI_INT, 1, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  MPI_Iallreduce(f32, f32_out, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &requests[0]);
  MPI_Iallreduce(MPI_IN_PLACE, more, COUNT, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, &requests[1]);
  if (rank == 1) MPI_Send(&ball, 1, MPI_INT, 0, 5, MPI_COMM_WORLD);
  MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
  MPI_Wait(&requests[1], MPI_STATUS_IGNORE);
  for (int i = 0; i < COUNT; i++) {
    check("a sum that was waited for", (double)f32_out[i], triangle());
    check("the second one", more[i], size);
  }
}

/* Rank r has 10000 (r + 1) elements. */
static void test_scatter(int in_place) {
  int counts[64], all = 0;
  for (int r = 0; r < size; r++) all += counts[r] = 10000 * (r + 1);
  for (int i = 0; i < all; i++) f64[i] = i + rank;
  double *mine = in_place ? f64 : malloc((size_t)counts[rank] * sizeof *mine);
  if (!mine) MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Reduce_scatter(in_place ? MPI_IN_PLACE : f64, mine, counts, MPI_DOUBLE, MPI_SUM,
                     MPI_COMM_WORLD);
  int first = 5000 * rank * (rank + 1);
  for (int i = 0; i < counts[rank]; i++)
    check("a scattered sum", mine[i], size * (double)(first + i) + triangle());
  if (in_place) return;
  for (int i = 0; i < all; i++) check("an input", f64[i], i + rank);
  free(mine);
}

enum gather {
  GATHER_SAME,     /* MPI_INT everywhere */
  GATHER_IN_PLACE, /* what a rank gives lies at its place */
  GATHER_SECONDS,  /* every rank sends every second element of an array */
  GATHER_WIDE,     /* every rank leaves a gap behind each element that it receives */
  GATHER_NOTHING,  /* rank 0 gives nothing, and has no array */
  GATHER_MIXED     /* rank 0 receives as with WIDE, the others as with SAME */
};

/* Blocks lie in reverse order, with a gap behind each. */
static void test_gather(enum gather how) {
  int counts[64], places[64], at = 0, stride = 1;
  static int mine[COUNT];
  if (how == GATHER_WIDE || (how == GATHER_MIXED && rank == 0)) stride = 2;
  for (int r = size - 1; r >= 0; r--) {
    counts[r] = how == GATHER_NOTHING && r == 0 ? 0 : 9000 + r;
    places[r] = at;
    at += counts[r] + 7;
  }
  MPI_Datatype seconds, wide;
  MPI_Type_vector(counts[rank], 1, 2, MPI_INT, &seconds);
  MPI_Type_commit(&seconds);
  MPI_Type_create_resized(MPI_INT, 0, 2 * sizeof(int), &wide);
  MPI_Type_commit(&wide);
  for (int i = 0; i < COUNT; i++) words[i] = mine[i] = -1;
  int *from = how == GATHER_IN_PLACE ? words + places[rank] : mine;
  for (int i = 0; i < counts[rank]; i++) from[how == GATHER_SECONDS ? 2 * i : i] = 100 * rank + i;
  const void *in = how == GATHER_IN_PLACE ? MPI_IN_PLACE : counts[rank] ? mine : NULL;
  int one = how == GATHER_SECONDS;
  MPI_Allgatherv(in, one ? 1 : counts[rank], one ? seconds : MPI_INT, words, counts, places,
                 stride == 2 ? wide : MPI_INT, MPI_COMM_WORLD);
  for (int r = 0; r < size; r++) {
    int *block = words + stride * places[r];
    for (int i = 0; i < counts[r]; i++) check("a gathered word", block[stride * i], 100 * r + i);
    for (int i = 0; stride == 2 && i < counts[r]; i++) check("a small gap", block[2 * i + 1], -1);
    for (int i = 0; i < 7; i++) check("a gap", block[stride * counts[r] + i], -1);
  }
  MPI_Type_free(&wide);
  MPI_Type_free(&seconds);
}

/* The root sends every second element; the others receive them as an array. */
static void test_broadcast(void) {
  MPI_Datatype pairs;
  int root = size - 1;
  MPI_Type_vector(COUNT / 2, 1, 2, MPI_INT, &pairs);
  MPI_Type_commit(&pairs);
  for (int i = 0; i < COUNT; i++) words[i] = rank == root ? i : -1;
  if (rank == root)
    MPI_Bcast(words, 1, pairs, root, MPI_COMM_WORLD);
  else
    MPI_Bcast(words, COUNT / 2, MPI_INT, root, MPI_COMM_WORLD);
  for (int i = 0; i < COUNT / 2 && rank != root; i++) check("a broadcast word", words[i], 2 * i);
  MPI_Type_free(&pairs);
}

/* What a trainer does: a large sum, and an exact decision whether to stop. */
static void test_loop(int wide) {
  for (int step = 0; step < STEPS; step++) {
    int on = step + 1 < STEPS, all;
    for (int i = 0; i < COUNT; i++) f32[i] = 1;
    for (int i = 0; i < COUNT; i++) f64[i] = 1;
    if (wide)
      MPI_Allreduce(MPI_IN_PLACE, f64, COUNT, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    else
      MPI_Allreduce(f32, f32_out, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    double first = wide ? f64[0] : (double)f32_out[0];
    for (int i = 1; i < COUNT; i++) check("an element", wide ? f64[i] : (double)f32_out[i], first);
    MPI_Allreduce(&on, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    check("the decision", all, on * size);
    if (rank == 0) printf("step %d: %g\n", step, first);
  }
}

static void test_all(void) {
  test_sums();
  test_part();
  test_nonblocking();
  test_scatter(0);
  test_scatter(1);
  for (int how = 0; how < GATHER_MIXED; how++) test_gather((enum gather)how);
  test_broadcast();
}

static void test(const char *mode) {
  if (!strcmp(mode, "all"))
    test_all();
  else if (!strcmp(mode, "sums"))
    test_sums();
  else if (!strcmp(mode, "loop"))
    test_loop(0);
  else if (!strcmp(mode, "wide"))
    test_loop(1);
  else if (!strcmp(mode, "mixed"))
    test_gather(GATHER_MIXED);
  else if (!strcmp(mode, "init"))
    return;
  else
    MPI_Abort(MPI_COMM_WORLD, 2);
  if (rank == 0) printf("%s: all is right\n", mode);
  fflush(stdout);
}

int main(int argc, char **argv) {
  int level, init = 0;
  for (int i = 1; i < argc; i++) init |= !strcmp(argv[i], "init");
  if (init)
    MPI_Init(&argc, &argv);
  else
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (argc < 2) test("");
  for (int i = 1; i < argc; i++) test(argv[i]);
  MPI_Finalize();
  return 0;
}
