/* test_shm_coll.c - transports/shm_coll.c: collectives of real processes against a literal sum, over kinds,
 * types, sizes, lists of buffers, shared memory and private memory; the state after a failure; members that
 * die, stop, close early or are hostile.
 *
 * Every member computes all contributions from the seed, adds them up serially and compares bits.
 * MLFAB_SEED=n runs one random case alone, MLFAB_SCALE=100 a hundred times as many. */
#include "../../transports/shm_coll.c"

#include "../../core/base/rng.h"

#include "../testing.h"
#include "scale.h"

#if MLFAB_WITH_SHM

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

enum { MEMBERS = 8, MOST = 70000, LISTS = 5, GARBAGE = 77 };

/* Memory that the processes of a test share. */
struct common {
  mlfab__shm_coll_name names[MLFAB__SHM_COLL_MOST];
  _Atomic uint32_t met, dead, resume; /* dead: a bit for each member that died or was stopped */
};

struct member {
  struct common *common;
  mlfab__env env;
  mlfab__shm_memory *memory;
  mlfab__shm_coll *arena;
  uint32_t n, me;
  uint64_t number, meetings;
  bool mourned; /* the others no longer wait for the dead */
};

/* For the children, in which a failed assertion would not be reported. */
#define CHECK(what)                                                                          \
  do {                                                                                       \
    if (!(what)) {                                                                           \
      fprintf(stderr, "%s:%d: member %u: %s\n", __FILE__, __LINE__, (unsigned)m->me, #what); \
      _exit(1);                                                                              \
    }                                                                                        \
  } while (0)

static void *memory_alloc(mlfab__shm_memory *memory, uint64_t bytes) {
  return mlfab__shm_memory_functions()->alloc(memory, bytes, 0);
}

static void memory_release(mlfab__shm_memory *memory, void *area) {
  mlfab__shm_memory_functions()->release(memory, area, 0);
}

/* A barrier of all members. */
static void meet(struct member *m) {
  m->meetings++;
  atomic_fetch_add(&m->common->met, 1);
  while (atomic_load(&m->common->met) < m->meetings * m->n) sched_yield();
}

static int patient(void *user) {
  struct member *m = user;
  return atomic_load(&m->common->dead) != 0 && !m->mourned ? MLFAB_ERR_PEER_DEAD : 0;
}

static void open_arena(struct member *m) {
  CHECK(mlfab__env_init(&m->env, NULL) == 0);
  m->memory = mlfab__shm_memory_functions()->create(&m->env);
  CHECK(m->memory != NULL);
  CHECK(shm_coll_create(&m->env, m->memory, &m->arena, &m->common->names[m->me]) == 0);
  meet(m);
  CHECK(shm_coll_join(m->arena, m->common->names, m->n, m->me, 1) == 0);
  meet(m);
}

typedef void (*body_fn)(struct member *m, uint64_t seed);

/* Runs `body` in n processes; `killed` has a bit for each that must die of a signal. A stopped member goes
 * on when another one says so. */
static void team(uint32_t n, uint64_t seed, body_fn body, uint32_t killed) {
  pid_t pids[MEMBERS];
  struct common *common =
      mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(common != MAP_FAILED);
  for (uint32_t i = 0; i < n; i++) {
    pids[i] = fork();
    assert_true(pids[i] >= 0);
    if (pids[i] > 0) continue;
    struct member m = {.common = common, .n = n, .me = i};
    alarm(200);
    open_arena(&m);
    body(&m, seed);
    shm_coll_destroy(&m.arena);
    mlfab__shm_memory_functions()->destroy(&m.memory);
    _exit(m.env.bytes != 0 ? 2 : 0);
  }
  for (uint32_t left = n; left > 0;) {
    int status;
    uint32_t i = 0;
    pid_t pid = waitpid(-1, &status, WUNTRACED);
    while (i < n && pids[i] != pid) i++;
    assert_true(i < n);
    if (WIFSTOPPED(status)) {
      atomic_fetch_or(&common->dead, 1u << i);
      while (atomic_load(&common->resume) == 0) sched_yield();
      kill(pid, SIGCONT);
      continue;
    }
    left--;
    if (killed >> i & 1) {
      assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
      atomic_fetch_or(&common->dead, 1u << i);
    } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0, code = WEXITSTATUS(status);
      for (uint32_t j = 0; j < n; j++) kill(pids[j], SIGKILL);
      while (waitpid(-1, &status, 0) > 0) {
      }
      fail_msg("seed %llu, %u members: member %u has failed (signal %d, exit status %d)",
               (unsigned long long)seed, n, i, signal, code);
    }
  }
  munmap(common, sizeof *common);
}

/* ---- the literal operations ---- */

/* An element in all types, and its bytes. */
union element {
  float f;
  double d;
  int64_t i;
  uint16_t h;
  uint8_t bytes[8];
};

static uint16_t to_half(int dtype, float x) { /* small integers only */
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (dtype == MLFAB_BF16 || x == 0.0f) return (uint16_t)(bits >> 16);
  return (uint16_t)((bits >> 16 & 0x8000) | (((bits >> 23 & 0xff) - 112) << 10) |
                    (bits >> 13 & 0x3ff));
}

static float from_half(int dtype, uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float x;
  if (dtype == MLFAB_F16 && (h & 0x7fff) != 0)
    bits = (uint32_t)(h & 0x8000) << 16 | ((uint32_t)(h >> 10 & 31) + 112) << 23 |
           (uint32_t)(h & 0x3ff) << 13;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Member j's contribution at element i. Halves are chosen so that all results are exact. */
static union element brought(int dtype, int op, uint64_t seed, uint32_t j, uint64_t i) {
  uint64_t r = mlfab__mix(seed ^ mlfab__mix(i * 64 + j));
  union element e = {.i = 0};
  double x = (double)(int64_t)r / 9.3e18;
  int small = op == MLFAB_OP_PRODUCT ? (r & 1 ? 1 : -1) : (int)(r % 9) - 4;
  if (dtype == MLFAB_F32) e.f = (float)x * (r & 7 ? 1.0f : 1000.0f);
  if (dtype == MLFAB_F64) e.d = x * (r & 7 ? 1.0 : 1000.0);
  if (dtype == MLFAB_I64) e.i = (int64_t)r;
  if (dtype == MLFAB_F16 || dtype == MLFAB_BF16) e.h = to_half(dtype, (float)small);
  return e;
}

#define PUT(x, y)                                 \
  (op <= MLFAB_OP_MEAN  ? (x) + (y)               \
   : op == MLFAB_OP_MIN ? ((y) < (x) ? (y) : (x)) \
   : op == MLFAB_OP_MAX ? ((y) > (x) ? (y) : (x)) \
                        : (x) * (y))

static union element put_together(int dtype, int op, uint64_t seed, uint32_t n, uint64_t i) {
  union element e = brought(dtype, op, seed, 0, i);
  float h = from_half(dtype, e.h);
  for (uint32_t j = 1; j < n; j++) {
    union element b = brought(dtype, op, seed, j, i);
    float g = from_half(dtype, b.h);
    if (dtype == MLFAB_F32) e.f = PUT(e.f, b.f);
    if (dtype == MLFAB_F64) e.d = PUT(e.d, b.d);
    if (dtype == MLFAB_I64) {
      e.i = op <= MLFAB_OP_MEAN      ? (int64_t)((uint64_t)e.i + (uint64_t)b.i)
            : op == MLFAB_OP_PRODUCT ? (int64_t)((uint64_t)e.i * (uint64_t)b.i)
                                     : PUT(e.i, b.i);
    }
    h = PUT(h, g);
  }
  if (op == MLFAB_OP_MEAN) {
    if (dtype == MLFAB_F32) e.f /= (float)n;
    if (dtype == MLFAB_F64) e.d /= n;
    h /= (float)n;
  }
  if (dtype == MLFAB_F16 || dtype == MLFAB_BF16) e.h = to_half(dtype, h);
  return e;
}

/* ---- a random call ---- */

struct trial {
  int kind, dtype, op;
  uint32_t root, nbufs, width, shared; /* shared: a bit for each member whose memory is shared */
  uint64_t count, seed;
  uint64_t counts[MEMBERS], first[MEMBERS];
};

static uint64_t some_count(mlfab__rng *prng) {
  static const uint64_t special[] = {0, 1, 15, 16, 17, 8191, 8192, 8193, 16384, 65536};
  switch (mlfab__rng_below(prng, 4)) {
    case 0:
      return special[mlfab__rng_below(prng, MLFAB__COUNT(special))];
    case 1:
      return mlfab__rng_below(prng, 300);
    default:
      return mlfab__rng_below(prng, MOST);
  }
}

static struct trial draw(mlfab__rng *prng, uint32_t n) {
  struct trial t = {.kind = 1 + (int)mlfab__rng_below(prng, 5),
                    .dtype = 1 + (int)mlfab__rng_below(prng, 5),
                    .op = (int)mlfab__rng_below(prng, 5),
                    .root = (uint32_t)mlfab__rng_below(prng, n),
                    .nbufs = 1 + (uint32_t)mlfab__rng_below(prng, 2) * LISTS,
                    .count = some_count(prng),
                    .seed = mlfab__rng_next(prng)};
  bool half = t.dtype == MLFAB_F16 || t.dtype == MLFAB_BF16;
  if (t.op == MLFAB_OP_MEAN && (t.dtype == MLFAB_I64 || (half && (n & (n - 1)) != 0)))
    t.op = MLFAB_OP_SUM;
  uint64_t style = mlfab__rng_below(prng, 3);
  t.shared = style == 0 ? 0 : style == 1 ? ~0u : (uint32_t)mlfab__rng_next(prng);
  t.width = half ? 2 : t.dtype == MLFAB_F32 ? 4 : 8;
  if (t.kind == MLFAB__SHM_COLL_BARRIER) t.count = 0;
  if (t.kind == MLFAB__SHM_COLL_REDUCE_SCATTER || t.kind == MLFAB__SHM_COLL_ALLGATHER) {
    t.count = 0;
    for (uint32_t j = 0; j < n; j++) {
      t.first[j] = t.count;
      t.counts[j] = some_count(prng) / n;
      t.count += t.counts[j];
    }
  }
  return t;
}

/* Whether element i is member j's own. */
static bool owns(const struct trial *t, uint32_t j, uint64_t i) {
  if (t->kind == MLFAB__SHM_COLL_BROADCAST) return j == t->root;
  return i >= t->first[j] && i < t->first[j] + t->counts[j];
}

/* The expected value of element i at member `me` afterwards. */
static union element expected(const struct trial *t, uint32_t n, uint32_t me, uint64_t i) {
  uint32_t owner = 0;
  if (t->kind == MLFAB__SHM_COLL_ALLREDUCE ||
      (t->kind == MLFAB__SHM_COLL_REDUCE_SCATTER && owns(t, me, i)))
    return put_together(t->dtype, t->op, t->seed, n, i);
  if (t->kind == MLFAB__SHM_COLL_REDUCE_SCATTER) return brought(t->dtype, t->op, t->seed, me, i);
  while (!owns(t, owner, i)) owner++;
  return brought(t->dtype, t->op, t->seed, owner, i);
}

/* Cuts [0, count) into a list of buffers, some of them empty, with gaps between them. */
static uint64_t cut(const struct trial *t, mlfab__rng *prng, uint8_t *memory, mlfab_vec *bufs) {
  uint64_t left = t->count, bytes = 0;
  for (uint32_t i = 0; i < t->nbufs; i++) {
    uint64_t count = i + 1 == t->nbufs ? left : mlfab__rng_below(prng, left / 2 + 2);
    count = mlfab__min(count, left);
    bufs[i] = (mlfab_vec){memory + bytes, count};
    bytes += (count + 3) * t->width;
    left -= count;
  }
  return bytes;
}

static void fill(const struct member *m, const struct trial *t, const mlfab_vec *bufs) {
  uint64_t i = 0;
  for (uint32_t b = 0; b < t->nbufs; b++) {
    for (uint64_t k = 0; k < bufs[b].count; k++, i++) {
      union element e = brought(t->dtype, t->op, t->seed, m->me, i);
      memcpy((uint8_t *)bufs[b].data + k * t->width, e.bytes, t->width);
    }
    memset((uint8_t *)bufs[b].data + bufs[b].count * t->width, GARBAGE, 3 * t->width);
  }
}

/* The right contents of the member's buffers, one after the other. */
static const uint8_t *whole_result(const struct member *m, const struct trial *t) {
  static uint8_t result[MOST * sizeof(union element)];
  for (uint64_t i = 0; i < t->count; i++) {
    union element e = expected(t, m->n, m->me, i);
    memcpy(result + i * t->width, e.bytes, t->width);
  }
  return result;
}

static void compare(const struct member *m, const struct trial *t, const mlfab_vec *bufs,
                    const uint8_t *result) {
  uint64_t i = 0;
  for (uint32_t b = 0; b < t->nbufs; b++) {
    const uint8_t *at = bufs[b].data;
    for (uint64_t k = 0; k < bufs[b].count; k++, i++, at += t->width) {
      if (memcmp(at, result + i * t->width, t->width) == 0) continue;
      fprintf(stderr, "kind %d dtype %d op %d count %llu of %u members, shared %x: element %llu\n",
              t->kind, t->dtype, t->op, (unsigned long long)t->count, m->n, t->shared,
              (unsigned long long)i);
      CHECK(!"the bits are those of the literal operation");
    }
    for (uint32_t k = 0; k < 3 * t->width; k++) CHECK(at[k] == GARBAGE);
  }
}

static int run(struct member *m, const struct trial *t, const mlfab_vec *bufs,
               uint32_t *culprit_p) {
  bool counted = t->kind == MLFAB__SHM_COLL_REDUCE_SCATTER || t->kind == MLFAB__SHM_COLL_ALLGATHER;
  mlfab__shm_coll_call call = {.number = m->number,
                               .signature = t->seed,
                               .kind = t->kind,
                               .dtype = t->dtype,
                               .op = t->op,
                               .root = t->root,
                               .bufs = bufs,
                               .nbufs = t->nbufs,
                               .count = t->count,
                               .counts = counted ? t->counts : NULL,
                               .pause = patient,
                               .user = m};
  m->number += 1 + (t->seed & 1);
  return shm_coll_run(m->arena, &call, culprit_p);
}

/* Three times in the same memory: by the third time every member has mapped it. */
static void random_call(struct member *m, const struct trial *t, mlfab__rng *cuts) {
  mlfab_vec bufs[LISTS + 1];
  uint32_t culprit;
  mlfab__rng lengths = *cuts;
  uint64_t bytes = cut(t, &lengths, NULL, bufs);
  bool shared = t->shared >> m->me & 1;
  uint8_t *memory = shared ? memory_alloc(m->memory, bytes) : malloc(bytes);
  CHECK(memory != NULL);
  cut(t, cuts, memory, bufs);
  fill(m, t, bufs);
  static uint8_t filled[(MOST + 3 * (LISTS + 1)) * sizeof(union element)];
  const uint8_t *result = whole_result(m, t);
  memcpy(filled, memory, bytes);
  for (int k = 0; k < 3; k++) {
    if (k > 0) memcpy(memory, filled, bytes);
    if (t->seed % 16 == 0) usleep((useconds_t)mlfab__rng_below(cuts, 2000));
    CHECK(run(m, t, bufs, &culprit) == 0);
    compare(m, t, bufs, result);
  }
  if (shared)
    memory_release(m->memory, memory);
  else
    free(memory);
}

static void random_calls(struct member *m, uint64_t seed) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, seed);
  for (int i = 0; i < 6; i++) {
    struct trial t = draw(&prng, m->n);
    mlfab__rng cuts = prng; /* lists may differ between members */
    if (t.seed & 2) mlfab__rng_seed(&cuts, t.seed + m->me);
    random_call(m, &t, &cuts);
  }
}

TEST(test_random) {
  uint64_t from = test_number("MLFAB_SEED", 1), runs = test_seed() ? 1 : test_cases(20);
  for (uint64_t seed = from; seed < from + runs; seed++)
    team(1 + (uint32_t)(seed % MEMBERS), seed, random_calls, 0);
}

static struct trial plain(uint64_t count, uint64_t seed) {
  return (struct trial){.kind = MLFAB__SHM_COLL_ALLREDUCE,
                        .dtype = MLFAB_F32,
                        .nbufs = 1,
                        .width = 4,
                        .count = count,
                        .seed = seed};
}

/* ---- many small ones, and large ones in one shared memory ---- */

static void many_calls(struct member *m, uint64_t seed) {
  uint64_t calls = seed, size = m->n;
  int64_t *data = memory_alloc(m->memory, size * 8);
  uint32_t culprit;
  CHECK(data != NULL);
  for (uint64_t i = 0; i < size; i++) data[i] = m->me == 0;
  for (uint64_t k = 0; k < calls; k++) {
    mlfab_vec buf = {data, size};
    struct trial t = {.kind = MLFAB__SHM_COLL_ALLREDUCE,
                      .dtype = MLFAB_I64,
                      .nbufs = 1,
                      .count = size,
                      .seed = 2 * k};
    data[k % size] += (int64_t)(k * m->me);
    uint64_t before = (uint64_t)data[(k + 1) % size] * m->n;
    CHECK(run(m, &t, &buf, &culprit) == 0);
    if (size > 1 && k > 0) CHECK((uint64_t)data[(k + 1) % size] == before);
    if (m->n > 1) CHECK(k > 0 || data[size - 1] == 1);
  }
}

TEST(test_many) {
  team(2, mlfab__min(test_cases_few(2500, 25000, 100000), 100000), many_calls, 0);
  team(4, mlfab__min(test_cases_few(1000, 5000, 10000), 10000), many_calls, 0);
}

/* The same vector in many rounds; each member is sometimes slow. */
static void large_calls(struct member *m, uint64_t seed) {
  enum { COUNT = 100000, CALLS = 12 }; /* 13 rounds where members copy */
  uint64_t room = COUNT * sizeof(int64_t);
  int64_t *own = malloc(room), *shared = memory_alloc(m->memory, room);
  uint32_t culprit;
  CHECK(own != NULL && shared != NULL);
  for (uint64_t k = 0; k < CALLS; k++) {
    int64_t *data = (seed + k * m->me) % 3 == 0 ? own : shared;
    mlfab_vec buf = {data, COUNT};
    struct trial t = {.kind = MLFAB__SHM_COLL_ALLREDUCE,
                      .dtype = MLFAB_I64,
                      .nbufs = 1,
                      .count = COUNT,
                      .seed = k};
    for (uint64_t i = 0; i < COUNT; i++) data[i] = (int64_t)(i * (m->me + k));
    if ((k + m->me) % m->n == 0) usleep(3000);
    CHECK(run(m, &t, &buf, &culprit) == 0);
    uint64_t factor = m->n * (m->n - 1) / 2 + m->n * k;
    for (uint64_t i = 0; i < COUNT; i++) CHECK((uint64_t)data[i] == i * factor);
    memset(data, 0xff, room); /* no member reads it any more, or its sum would be wrong */
    t.kind = MLFAB__SHM_COLL_BROADCAST;
    t.root = (uint32_t)(k % m->n);
    if (t.root == m->me) memset(data, (int)k, room);
    CHECK(run(m, &t, &buf, &culprit) == 0);
    for (uint64_t i = 0; i < COUNT; i++) CHECK((uint64_t)data[i] == k * 0x0101010101010101u);
    memset(data, 0xff, room);
  }
  free(own);
}

TEST(test_large) {
  for (uint32_t n = 2; n <= 5; n++) team(n, n, large_calls, 0);
}

/* The number of mappings of segments and of shared memory. */
static int count_mappings(void) {
  FILE *file = fopen("/proc/self/maps", "r");
  char line[512];
  int n = 0;
  if (file == NULL) return -1;
  while (fgets(line, sizeof line, file) != NULL) n += strstr(line, "memfd:mlfab-") != NULL;
  fclose(file);
  return n;
}

/* The others unmap released memory: a segment, the slots and a vector of each member are left. */
static void releases(struct member *m, uint64_t seed) {
  void *other = NULL;
  for (uint64_t k = 0; k < 30; k++) {
    uint64_t count = 100 + seed * k;
    int64_t *data = memory_alloc(m->memory, count * 8);
    struct trial t = plain(2 * count, 2 * k); /* as float32 */
    mlfab_vec buf = {data, 2 * count};
    uint32_t culprit;
    CHECK(data != NULL);
    for (int i = 0; i < 4; i++) CHECK(run(m, &t, &buf, &culprit) == 0);
    CHECK(m->arena->lent != NULL);
    int mappings = count_mappings();
    CHECK(mappings >= 3 * (int)m->n && mappings <= 3 * (int)m->n + (other != NULL));
    if (other != NULL) memory_release(m->memory, other);
    memory_release(m->memory, data);
    /* takes the released entry */
    other = (k + m->me) % 3 == 0 ? memory_alloc(m->memory, 10) : NULL;
  }
}

TEST(test_releases) {
  team(2, 500, releases, 0);
  team(4, 0, releases, 0);
}

/* ---- failures ---- */

static void next_epoch(struct member *m, uint32_t epoch) {
  meet(m);
  CHECK(shm_coll_join(m->arena, m->common->names, m->n, m->me, epoch) == 0);
  m->number = 0;
  meet(m);
}

/* One member has another signature: all blame the same member, and no buffer changes. */
static void mismatch(struct member *m, uint64_t seed) {
  static float data[MOST];
  for (uint32_t odd = 0; odd < m->n; odd++) {
    uint64_t count = seed % 2 ? 100 : MOST;
    uint32_t culprit = 99, blamed = m->n == 2 ? 1 : odd;
    mlfab_vec buf = {data, m->me == odd ? count / 2 : count};
    struct trial t = plain(buf.count, m->me == odd ? 2 : 4);
    for (uint64_t i = 0; i < buf.count; i++) data[i] = (float)m->me;
    CHECK(run(m, &t, &buf, &culprit) == MLFAB_ERR_MISMATCH);
    CHECK(culprit == blamed);
    for (uint64_t i = 0; i < buf.count; i++) CHECK(data[i] == (float)m->me);
    CHECK(run(m, &t, &buf, &culprit) == MLFAB_ERR_STATE);
    next_epoch(m, 2 + odd);
    random_calls(m, seed);
  }
}

TEST(test_mismatch) {
  for (uint32_t n = 2; n <= 5; n++) {
    team(n, 2 * n, mismatch, 0);
    team(n, 2 * n + 1, mismatch, 0);
  }
}

/* One or two members have a NaN. */
static void refusal(struct member *m, uint64_t seed) {
  static float data[MOST];
  uint64_t count = seed % 2 ? 100 : MOST;
  for (uint32_t bad = 0; bad < m->n; bad++) {
    uint32_t culprit = 99, nan = 0x7fc00000;
    mlfab_vec buf = {data, count};
    mlfab__shm_coll_call call = {.signature = 1,
                                 .kind = MLFAB__SHM_COLL_ALLREDUCE,
                                 .dtype = MLFAB_F32,
                                 .refuse = 1,
                                 .bufs = &buf,
                                 .nbufs = 1,
                                 .count = count,
                                 .pause = patient,
                                 .user = m};
    for (uint64_t i = 0; i < count; i++) data[i] = (float)m->me;
    if (m->me >= bad) memcpy(&data[count - 1 - bad], &nan, sizeof nan);
    CHECK(shm_coll_run(m->arena, &call, &culprit) == MLFAB_ERR_NOT_FINITE);
    CHECK(culprit == bad);
    for (uint64_t i = 0; i + m->n < count; i++) CHECK(data[i] == (float)m->me);
    next_epoch(m, 2 + bad);
    call.refuse = 0;
    CHECK(shm_coll_run(m->arena, &call, &culprit) == 0);
    CHECK(data[count - 1 - bad] != data[count - 1 - bad]);
    next_epoch(m, 100 + bad);
  }
}

TEST(test_refusal) {
  for (uint64_t seed = 2; seed < 8; seed++) team((uint32_t)(2 + seed % 3), seed, refusal, 0);
}

/* The others continue without the victim, in a new epoch. */
static void go_on_without(struct member *m, uint32_t victim) {
  mlfab__shm_coll_name rest[MEMBERS];
  uint32_t n = 0;
  for (uint32_t j = 0; j < m->n; j++) {
    if (j != victim) rest[n++] = m->common->names[j];
  }
  if (m->me > victim) m->me--;
  uint32_t before = 2 * m->n;
  m->n = n;
  atomic_fetch_add(&m->common->met, 1);
  while (atomic_load(&m->common->met) < before + n) sched_yield();
  CHECK(shm_coll_join(m->arena, rest, n, m->me, 2) == 0);
  m->number = 0;
  m->mourned = true;
  atomic_fetch_add(&m->common->met, 1);
  while (atomic_load(&m->common->met) < before + 2 * n) sched_yield();
}

/* A child sends this process a signal soon, at an arbitrary point. */
static void expect(int signal, uint64_t most_us, uint64_t seed) {
  pid_t self = getpid();
  if (fork() != 0) return;
  usleep((useconds_t)(mlfab__mix(seed) % most_us));
  kill(self, signal);
  _exit(0);
}

/* Member `seed` mod n is killed, after some calls or at an arbitrary point. */
static void death(struct member *m, uint64_t seed) {
  static float data[8 * MOST];
  uint32_t victim = (uint32_t)(seed % m->n), culprit;
  struct trial t = plain(seed % 4 == 0 ? 50 : 8 * MOST, 2);
  mlfab_vec buf = {data, t.count};
  int code = 0;
  if (m->me == victim && seed % 2) {
    for (uint64_t i = 0; i < mlfab__mix(seed) % 50; i++) CHECK(run(m, &t, &buf, &culprit) == 0);
    kill(getpid(), SIGKILL);
  }
  if (m->me == victim) expect(SIGKILL, 20000, seed);
  while (code == 0) code = run(m, &t, &buf, &culprit);
  CHECK(code == MLFAB_ERR_PEER_DEAD);
  go_on_without(m, victim);
  random_calls(m, seed);
}

TEST(test_death) {
  uint64_t runs = test_cases(16);
  for (uint64_t seed = 0; seed < runs; seed++) {
    uint32_t n = (uint32_t)(2 + seed / 4 % 3);
    team(n, seed, death, 1u << seed % n);
  }
}

/* A member is stopped in a call on shared memory, is declared dead, and resumes when the others have
 * finished that call without it. It must not write into memory that belongs to the callers again, nor into
 * slots, and its own call must fail. */
static void stop(struct member *m, uint64_t seed) {
  enum { COUNT = 4 * MOST };
  uint32_t victim = (uint32_t)(seed % m->n), culprit;
  bool shared = seed / m->n % 4 != 3;
  int64_t *data = shared ? memory_alloc(m->memory, COUNT * 8) : malloc(COUNT * 8);
  struct trial t = {
      .kind = MLFAB__SHM_COLL_ALLREDUCE, .dtype = MLFAB_I64, .nbufs = 1, .count = COUNT};
  mlfab_vec buf = {data, COUNT};
  int code = 0;
  CHECK(data != NULL);
  for (uint32_t i = 0; code == 0; i++) {
    if (m->me == victim && i == 3) expect(SIGSTOP, 5000, seed);
    for (uint64_t k = 0; k < COUNT; k += 512) data[k] = 1;
    code = run(m, &t, &buf, &culprit);
  }
  CHECK(code == MLFAB_ERR_PEER_DEAD);
  if (m->me == victim) return;
  go_on_without(m, victim);
  memset(data, GARBAGE, COUNT * 8);
  if (m->me == 0) atomic_store(&m->common->resume, 1);
  /* For a while; all members agree on its end. */
  struct trial one = {
      .kind = MLFAB__SHM_COLL_ALLREDUCE, .dtype = MLFAB_I64, .nbufs = 1, .count = 1};
  int64_t on = 1;
  mlfab_vec vote = {&on, 1};
  for (uint64_t end = mlfab__monotonic(NULL) + 20000000; on > 0;) {
    random_calls(m, seed);
    on = mlfab__monotonic(NULL) < end;
    CHECK(run(m, &one, &vote, &culprit) == 0);
  }
  for (uint64_t i = 0; i < COUNT; i++) CHECK(data[i] == GARBAGE * INT64_C(0x0101010101010101));
}

TEST(test_stop) {
  for (uint64_t i = 0; i < test_cases(12); i++) {
    uint64_t seed = 7 * i;
    team((uint32_t)(2 + seed / 8 % 3), seed, stop, 0);
  }
}

/* A member closes when it has finished, while others may still look for its door. */
static void early(struct member *m, uint64_t seed) {
  float data[16] = {0};
  uint32_t culprit;
  struct trial t = plain(16, seed);
  mlfab_vec buf = {data, 16};
  if (m->me != 0) usleep(1000);
  CHECK(run(m, &t, &buf, &culprit) == 0);
}

TEST(test_early) {
  for (uint64_t seed = 0; seed < 30; seed++) team(3, seed, early, 0);
}

/* ---- within one process: what only a broken or hostile member would do ---- */

struct pair {
  mlfab__env env;
  mlfab__shm_memory *memories[2];
  mlfab__shm_coll *arenas[2];
  mlfab__shm_coll_name names[2];
};

/* The entry of the file of these bytes. */
static uint32_t pair_publish(struct pair *pair, uint32_t i, const void *at) {
  mlfab__shm_span span;
  return shm_coll_entry(pair->arenas[i], at, 1, &span);
}

static void pair_open(struct pair *pair) {
  assert_int_equal(mlfab__env_init(&pair->env, NULL), 0);
  for (uint32_t i = 0; i < 2; i++) {
    pair->memories[i] = mlfab__shm_memory_functions()->create(&pair->env);
    assert_non_null(pair->memories[i]);
    assert_int_equal(
        shm_coll_create(&pair->env, pair->memories[i], &pair->arenas[i], &pair->names[i]), 0);
  }
  for (uint32_t i = 0; i < 2; i++)
    assert_int_equal(shm_coll_join(pair->arenas[i], pair->names, 2, i, 7), 0);
}

static void pair_close(struct pair *pair) {
  for (uint32_t i = 0; i < 2; i++) {
    shm_coll_destroy(&pair->arenas[i]);
    mlfab__shm_memory_functions()->destroy(&pair->memories[i]);
  }
  assert_int_equal(pair->env.bytes, 0);
}

TEST(test_names) {
  struct pair pair;
  mlfab__shm_coll *a;
  pair_open(&pair);
  a = pair.arenas[0];
  for (int i = 0; i < 6; i++) {
    mlfab__shm_coll_name names[2] = {pair.names[0], pair.names[1]};
    int fd = -1;
    if (i == 0) names[1].nonce ^= 1;
    if (i == 1) names[1].bytes += 4096;
    if (i == 2) names[1].fd = 1000;
    if (i == 3) names[1].pid = 0x3fffffff;
    if (i >= 4) { /* a true copy, but resizable; not a segment */
      fd = memfd_create("test", MFD_ALLOW_SEALING);
      assert_int_equal(ftruncate(fd, (off_t)names[1].bytes), 0);
      if (i == 4)
        assert_int_equal(write(fd, pair.arenas[1]->own, names[1].bytes), names[1].bytes);
      else
        assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
      names[1].fd = fd;
    }
    assert_int_equal(shm_coll_join(a, names, 2, 0, 8), MLFAB_ERR_UNSUPPORTED);
    if (fd >= 0) close(fd);
    assert_int_equal(shm_coll_join(a, pair.names, 2, 0, 9), 0);
  }
  assert_int_equal(shm_coll_join(a, pair.names, 65, 0, 10), MLFAB_ERR_UNSUPPORTED);
  mlfab__shm_coll_call call = {.kind = MLFAB__SHM_COLL_BARRIER};
  assert_int_equal(shm_coll_run(a, &call, NULL), MLFAB_ERR_STATE);
  pair_close(&pair);
}

/* Acts as member 1 while member 0 waits for it. */
struct player {
  struct pair *pair;
  int calls;
};

static int withdraw(void *user) {
  struct player *player = user;
  struct shm_coll_segment *own = player->pair->arenas[1]->own;
  if (player->calls++ > 0) return MLFAB_ERR_CANCELLED;
  atomic_store(&own->doors[0].word, 0);
  atomic_store(&own->step, (UINT64_C(8) << 40) + 1000);
  return 0;
}

/* A call of member 0, which waits for the simulated member 1. */
static mlfab__shm_coll_call played_call(struct player *player, const mlfab_vec *buf) {
  return (mlfab__shm_coll_call){.signature = 5,
                                .kind = MLFAB__SHM_COLL_ALLREDUCE,
                                .dtype = MLFAB_F32,
                                .bufs = buf,
                                .nbufs = 1,
                                .count = buf->count,
                                .pause = withdraw,
                                .user = player};
}

static void play_door(struct pair *pair) {
  struct shm_coll_segment *own = pair->arenas[1]->own;
  own->doors[0].offer.signature = 5;
  atomic_store(&own->doors[0].word, (UINT64_C(8) << 40) + 1);
}

/* Member 1's door is withdrawn before member 0 has finished reading: member 0 does not use what it read,
 * withdraws its own door, and replaces pages that member 1 may still write to; their contents are kept. */
static void withdrawn(uint64_t bytes, uint64_t from, bool whole) {
  enum { FLOATS = 65536, BYTES = FLOATS * 4 };
  struct pair pair;
  struct player player = {&pair, 0};
  uint32_t culprit, generation;
  pair_open(&pair);
  struct shm_coll_segment *own = pair.arenas[0]->own;
  uint8_t *memory = memory_alloc(pair.memories[0], bytes);
  assert_non_null(memory);
  assert_int_equal(pair_publish(&pair, 0, memory), 1);
  mlfab_vec buf = {memory + from, FLOATS};
  mlfab__shm_coll_call call = played_call(&player, &buf);
  memset(memory, GARBAGE, bytes);
  assert_int_equal(shm_coll_join(pair.arenas[1], pair.names, 2, 1, 8), 0);
  generation = atomic_load(&own->entries[1].generation);
  atomic_store(&pair.arenas[1]->own->mapped[0][1], generation);
  struct shm_coll_peer *seen = &pair.arenas[1]->peers[0];
  assert_true(shm_coll_view(seen, 1, generation));
  play_door(&pair);
  assert_int_equal(shm_coll_run(pair.arenas[0], &call, &culprit), MLFAB_ERR_CANCELLED);
  assert_int_equal(player.calls, 2);
  assert_non_null(pair.arenas[0]->lent);
  assert_int_equal(atomic_load(&own->doors[0].word), 0);
  memset(seen->views[1].at + from, 9, BYTES);
  seen->slots->in[0][0] = 9;
  assert_int_not_equal(memory[from], 9);
  assert_int_not_equal(memory[from + BYTES - 1], 9);
  for (uint64_t i = 0; i < bytes; i++) {
    if (i < from || i >= from + BYTES) assert_int_equal(memory[i], GARBAGE);
  }
  assert_int_equal(pair.arenas[0]->peers[0].slots->in[0][0], 0);
  /* Other pages of the memory are still in the file. */
  assert_int_equal(atomic_load(&own->entries[1].generation), whole ? 0 : generation);
  mlfab__shm_span span;
  assert_int_equal(shm_coll_entry(pair.arenas[0], memory + from, BYTES, &span), whole ? 1 : 2);
  assert_true(span.alone && span.offset == 0);
  /* Member 1 has joined the next epoch before: it finds the new pages. */
  assert_int_equal(shm_coll_join(pair.arenas[0], pair.names, 2, 0, 8), 0);
  assert_int_equal(shm_coll_run(pair.arenas[1], &call, &culprit), MLFAB_ERR_CANCELLED);
  assert_int_equal(seen->views[0].generation, atomic_load(&own->entries[0].generation));
  pair_close(&pair);
}

TEST(test_withdrawn) {
  withdrawn(65536 * 4, 0, true);
  withdrawn(65536 * 4 + 63, 0, false); /* the last page has no byte of the vector */
  withdrawn(65536 * 8, 0, false);
  withdrawn(65536 * 8, 65536, false);
  withdrawn(65536 * 5 + 20, 65536, false);
}

/* Pages that also hold other data are not lent. */
TEST(test_not_lent) {
  static const uint64_t places[][2] = {
      {65536 * 4 + 64, 0}, {65536 * 8, 64}, {65536 * 8, 65536 + 64}};
  for (uint32_t i = 0; i < MLFAB__COUNT(places); i++) {
    struct pair pair;
    struct player player = {&pair, 1};
    uint32_t culprit;
    pair_open(&pair);
    struct shm_coll_segment *own = pair.arenas[0]->own;
    uint8_t *memory = memory_alloc(pair.memories[0], places[i][0]);
    assert_int_equal(pair_publish(&pair, 0, memory), 1);
    mlfab_vec buf = {memory + places[i][1], 65535}; /* one element less than whole pages */
    mlfab__shm_coll_call call = played_call(&player, &buf);
    atomic_store(&pair.arenas[1]->own->mapped[0][1], atomic_load(&own->entries[1].generation));
    play_door(&pair);
    assert_int_equal(shm_coll_run(pair.arenas[0], &call, &culprit), MLFAB_ERR_CANCELLED);
    assert_null(pair.arenas[0]->lent);
    pair_close(&pair);
  }
}

/* Doors that name memory that does not exist, or ranges outside it. */
TEST(test_hostile) {
  static float data[MOST];
  mlfab_vec buf = {data, MOST};
  for (uint64_t seed = 0; seed < test_cases_few(8, 64, 200); seed++) {
    struct pair pair;
    struct player player = {&pair, 1};
    uint32_t culprit = 9;
    mlfab__rng prng;
    mlfab__rng_seed(&prng, seed);
    pair_open(&pair);
    mlfab__shm_coll_call call = played_call(&player, &buf);
    struct shm_coll_segment *own = pair.arenas[1]->own;
    struct shm_coll_offer *offer = &own->doors[0].offer;
    void *memory = memory_alloc(pair.memories[1], MOST * 4);
    assert_int_equal(pair_publish(&pair, 1, memory), 1);
    memset(own->entries + 2, 0xff, sizeof own->entries - 2 * sizeof own->entries[0]);
    offer->direct = 1;
    offer->entry = (uint32_t)mlfab__rng_next(&prng);
    offer->offset = mlfab__rng_next(&prng) * 8;
    offer->generation = own->entries[1].generation;
    if (seed % 8 == 0) offer->entry %= SHM_COLL_MEMORIES;
    if (seed % 8 >= 1) offer->entry = 1;
    if (seed % 8 == 2) offer->offset = 8 * (1 + mlfab__rng_below(&prng, MOST));
    if (seed % 8 == 3) offer->offset = 0, own->entries[1].bytes += 4096;
    if (seed % 8 == 4) offer->offset = 0, offer->generation++;
    if (seed % 8 == 5) offer->offset = 0, offer->entry = 0;
    play_door(&pair);
    assert_int_equal(shm_coll_run(pair.arenas[0], &call, &culprit), MLFAB_ERR_FRAME);
    assert_int_equal(culprit, 1);
    memset(own->entries + 2, 0, sizeof own->entries - 2 * sizeof own->entries[0]);
    pair_close(&pair);
  }
}

/* A member without descriptors cannot map the others' shared memory; the calls copy instead. */
static void no_descriptors(struct member *m, uint64_t seed) {
  struct rlimit limit = {0, 0};
  float *data = memory_alloc(m->memory, MOST * sizeof *data);
  struct trial t = plain(seed % 2 ? 100 : MOST, 2);
  mlfab_vec buf = {data, t.count};
  uint32_t culprit;
  CHECK(data != NULL);
  if (m->me == 1) CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  for (int k = 0; k < 5; k++) {
    for (uint64_t i = 0; i < t.count; i++) data[i] = (float)m->me;
    CHECK(run(m, &t, &buf, &culprit) == 0);
    for (uint64_t i = 0; i < t.count; i++) CHECK(data[i] == (float)(m->n * (m->n - 1) / 2));
    CHECK(m->arena->lent == NULL || m->me == 1);
  }
}

TEST(test_no_descriptors) {
  for (uint64_t seed = 0; seed < 4; seed++) team((uint32_t)(2 + seed / 2), seed, no_descriptors, 0);
}

static int count_descriptors(void) {
  DIR *dir = opendir("/proc/self/fd");
  int n = 0;
  assert_non_null(dir);
  while (readdir(dir) != NULL) n++;
  closedir(dir);
  return n;
}

/* Opening, joining and sharing leave no mapping and no descriptor, also when descriptors run out. */
TEST(test_leaks) {
  int descriptors = 0;
  for (int i = 0; i < 20; i++) {
    struct pair pair;
    void *memories[2 * (MLFAB__SHM_FILES - 1)]; /* and the slots */
    pair_open(&pair);
    for (uint32_t k = 0; k < MLFAB__COUNT(memories); k++) {
      memories[k] = memory_alloc(pair.memories[k & 1], 1000 + k);
      assert_non_null(memories[k]);
      assert_int_equal((uintptr_t)memories[k] % 4096, 0);
      for (uint32_t b = 0; b < 1000 + k; b++) assert_int_equal(((uint8_t *)memories[k])[b], 0);
      assert_int_equal(pair_publish(&pair, k & 1, memories[k]), k / 2 + 1);
    }
    assert_null(memory_alloc(pair.memories[0], 100000));
    for (uint32_t k = 0; k < MLFAB__COUNT(memories); k += 3)
      memory_release(pair.memories[k & 1], memories[k]);
    assert_int_equal(shm_coll_join(pair.arenas[0], pair.names, 2, 0, 8), 0);
    assert_int_equal(shm_coll_join(pair.arenas[0], pair.names, 1, 0, 9), 0);
    pair_close(&pair);
    assert_int_equal(count_mappings(), 0);
    if (i == 0) descriptors = count_descriptors();
  }
  assert_int_equal(count_descriptors(), descriptors);
}

TESTS(NULL, NULL)

#else

#include <stdio.h>

int main(void) {
  puts("SKIP: shared memory is not compiled in");
  return 77;
}

#endif
