/* test_config.c - configurations from the environment: every variable, who wins, and what is said of
 * values that are wrong. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* setenv */
#endif
#include "mlfab.h"

#include <math.h>
#include <unistd.h>
#include "../testing.h"

/* All variables that the library reads begin so. */
static const char *const prefixes[] = {
    "MLFAB_", "RANK=",  "WORLD_SIZE=", "MASTER_", "LOCAL_WORLD_",  "OMPI_",       "PMI_",
    "PMIX_",  "SLURM_", "MPI_",        "JOB_",    "TORCHELASTIC_", "GROUP_WORLD_"};

extern char **environ;

static void unset_all(void) {
  for (char **at = environ; *at;) {
    size_t i = 0;
    while (i < sizeof prefixes / sizeof prefixes[0] &&
           strncmp(*at, prefixes[i], strlen(prefixes[i])) != 0)
      i++;
    if (i == sizeof prefixes / sizeof prefixes[0]) {
      at++;
      continue;
    }
    char name[256];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(*at, "="), *at);
    unsetenv(name); /* which moves the others down */
  }
}

static mlfab_config c, fresh; /* what is filled; initial values */
static mlfab_error error;

/* The environment is exactly these "NAME=value" strings; fills c, which starts as `given`, or as NULL says: fresh. */
static int fill(const mlfab_config *given, const char *const *set) {
  unset_all();
  for (; *set; set++) {
    char name[256];
    size_t n = strcspn(*set, "=");
    assert_true(n < sizeof name);
    memcpy(name, *set, n);
    name[n] = 0;
    setenv(name, *set + n + 1, 1);
  }
  mlfab_config_init(&fresh);
  c = given ? *given : fresh;
  memset(&error, 0, sizeof error);
  return mlfab_config_from_env(&c, &error);
}

#define ENV(...) ((const char *const[]){__VA_ARGS__, NULL})
static void fill_well(const char *const *set) {
  if (fill(NULL, set)) fail_msg("%s", error.text);
}
#define FILL(...) fill_well(ENV(__VA_ARGS__))
/* c has these values, and is fresh otherwise. */
#define WANT(...)                             \
  do {                                        \
    mlfab_config want = fresh;                \
    __VA_ARGS__;                              \
    assert_memory_equal(&c, &want, sizeof c); \
  } while (0)

TEST(test_nothing) {
  FILL("MLFAB_UNKNOWN=5");
  WANT();
  /* Empty values are as if they were not set. */
  FILL("MLFAB_RANK=", "MLFAB_WORKERS=", "MLFAB_ROLE=", "MASTER_ADDR=", "RANK=", "MLFAB_JOB=");
  WANT();
}

TEST(test_each) {
  FILL("MLFAB_RANK=3", "MLFAB_WORKERS=7", "MLFAB_SERVERS=2", "MLFAB_COORDINATOR=tcp:127.0.0.1:9",
       "MLFAB_JOB=mine", "MLFAB_LISTEN=tcp:127.0.0.1:0", "MLFAB_SOCKET_IFNAME=^docker",
       "MLFAB_ALLOW_INSECURE=1", "MLFAB_TRANSPORT=tcp", "MLFAB_PROGRESS=hand",
       "MLFAB_TIMEOUT_MS=1500", "MLFAB_HEARTBEAT_MS=20", "MLFAB_PAYLOAD_CRC=0", "MLFAB_SEED=99",
       "MLFAB_KEY=00112233445566778899aabbccddeeff", "MLFAB_KEY_FILE=/run/key",
       "MLFAB_SILENT_DEATH_MS=7000");
  WANT(strcpy(want.key, "00112233445566778899aabbccddeeff"), strcpy(want.key_file, "/run/key"),
       strcpy(want.coordinator, "tcp:127.0.0.1:9"), strcpy(want.job, "mine"),
       strcpy(want.listen, "tcp:127.0.0.1:0"), strcpy(want.ifname, "^docker"), want.rank = 3,
       want.workers = 7, want.servers = 2, want.allow_insecure = 1, want.transports = MLFAB_USE_TCP,
       want.progress = MLFAB_PROGRESS_HAND, want.timeout_ns = 1500000000u,
       want.heartbeat_ns = 20000000, want.silent_death_ns = 7000000000u, want.no_payload_crc = 1,
       want.seed = 99);
  FILL("MLFAB_DEDICATED=1", "MLFAB_ROLE=server", "MLFAB_TRANSPORT=shm", "MLFAB_PROGRESS=thread",
       "MLFAB_PAYLOAD_CRC=1", "MLFAB_ALLOW_INSECURE=0");
  WANT(want.dedicated = 1, want.roles = MLFAB_ROLE_SERVER, want.transports = MLFAB_USE_SHM,
       want.progress = MLFAB_PROGRESS_THREAD);
  FILL("MLFAB_DEDICATED=1", "MLFAB_ROLE=worker", "MLFAB_TRANSPORT=auto");
  WANT(want.dedicated = 1, want.roles = MLFAB_ROLE_WORKER);
  FILL("MLFAB_ROLE=scheduler", "MLFAB_SCHEDULER=own", "MLFAB_DELAY_BOUND=7",
       "MLFAB_PLAN_AHEAD_MS=150", "MLFAB_ACCUMULATORS=3");
  WANT(mlfab_schedule_init(&want.schedule), want.schedule.delay_bound = 7,
       want.schedule.plan_ahead_ns = 150000000, want.roles = MLFAB_ROLE_SCHEDULER,
       want.scheduler = MLFAB_SCHEDULER_OWN, want.accumulators = 3);
  FILL("MLFAB_SCHEDULER=beside", "MLFAB_DELAY_BOUND=none", "MLFAB_ACCUMULATORS=none",
       "MLFAB_ORDER_BY_RATE=1");
  WANT(mlfab_schedule_init(&want.schedule), want.schedule.delay_bound = MLFAB_UNBOUNDED,
       want.order_by_rate = 1, want.scheduler = MLFAB_SCHEDULER_BESIDE,
       want.accumulators = UINT32_MAX);
  FILL("MLFAB_CHECKPOINT_DIR=/there", "MLFAB_CHECKPOINT_COMMITS=50", "MLFAB_CHECKPOINT_KEEP=3",
       "MLFAB_RESUME=/here");
  WANT(strcpy(want.checkpoint_dir, "/there"), strcpy(want.resume, "/here"),
       want.checkpoint_commits = 50, want.checkpoint_keep = 3);
  FILL("MLFAB_TRANSPORT=mpi");
  WANT(want.transports = MLFAB_USE_MPI);
  FILL("MLFAB_TRANSPORT=mpi+shm");
  WANT(want.transports = MLFAB_USE_MPI | MLFAB_USE_SHM);
  FILL("MLFAB_SCHEDULER=none");
  WANT(want.scheduler = MLFAB_SCHEDULER_NONE);
}

/* What the caller set stays, whatever the environment says. */
TEST(test_explicit_wins) {
  mlfab_config given;
  mlfab_config_init(&given);
  given.rank = 1;
  given.workers = 2;
  given.servers = 1;
  given.transports = MLFAB_USE_SHM;
  given.progress = MLFAB_PROGRESS_HAND;
  given.timeout_ns = given.heartbeat_ns = 77000000;
  given.seed = 5;
  given.allow_insecure = 1;
  strcpy(given.coordinator, "shm:here");
  strcpy(given.job, "given");
  strcpy(given.key_file, "/given/key");
  strcpy(given.key, "ffffffffffffffffffffffffffffffff");
  strcpy(given.listen, "shm:there");
  strcpy(given.ifname, "lo");
  given.scheduler = MLFAB_SCHEDULER_OWN;
  given.accumulators = 1;
  mlfab_schedule_init(&given.schedule);
  given.schedule.delay_bound = 3;
  given.schedule.plan_ahead_ns = 5;
  assert_int_equal(
      fill(&given, ENV("MLFAB_RANK=9", "MLFAB_WORKERS=20", "MLFAB_SERVERS=4", "MLFAB_TRANSPORT=tcp",
                       "MLFAB_PROGRESS=thread", "MLFAB_TIMEOUT_MS=5", "MLFAB_HEARTBEAT_MS=6",
                       "MLFAB_SEED=7", "MLFAB_COORDINATOR=tcp:x:1", "MLFAB_JOB=env",
                       "MLFAB_LISTEN=tcp:y:1", "MLFAB_KEY=00112233445566778899aabbccddeeff",
                       "MLFAB_KEY_FILE=/run/key", "MLFAB_SOCKET_IFNAME=eth", "MASTER_ADDR=z",
                       "MASTER_PORT=1", "RANK=8", "WORLD_SIZE=30", "MLFAB_SCHEDULER=beside",
                       "MLFAB_DELAY_BOUND=9", "MLFAB_PLAN_AHEAD_MS=8", "MLFAB_ACCUMULATORS=7")),
      0);
  assert_memory_equal(&c, &given, sizeof c);
}

static void rank_is(const char *const *set, int32_t rank, uint32_t workers) {
  fill_well(set);
  assert_int_equal(c.rank, rank);
  assert_int_equal(c.workers, workers);
}

/* One source gives both numbers: MLFAB_*, torchrun, Open MPI, PMI, Slurm inside a step. */
TEST(test_precedence) {
#define MLFAB_ "MLFAB_RANK=1", "MLFAB_WORKERS=11"
#define TORCH_ "RANK=2", "WORLD_SIZE=12"
#define OMPI_ "OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=13"
#define PMI_ "PMI_RANK=4", "PMI_SIZE=14"
#define SLURM_ "SLURM_PROCID=5", "SLURM_NTASKS=15"
  rank_is(ENV(SLURM_, PMI_, OMPI_, TORCH_, MLFAB_, "SLURM_STEP_ID=0"), 1, 11);
  rank_is(ENV(SLURM_, PMI_, OMPI_, TORCH_, "SLURM_STEP_ID=0"), 2, 12);
  rank_is(ENV(SLURM_, PMI_, OMPI_, "SLURM_STEP_ID=0"), 3, 13);
  rank_is(ENV(SLURM_, PMI_, "SLURM_STEP_ID=0"), 4, 14);
  rank_is(ENV(SLURM_, "SLURM_STEP_ID=0"), 5, 15);
  rank_is(ENV(SLURM_), 0, 0); /* a batch script is not a step */
  /* Nor is the shell that salloc starts, nor what runs beside a job. */
  rank_is(ENV(SLURM_, "SLURM_STEP_ID=4294967290"), 0, 0);
  rank_is(ENV(SLURM_, "SLURM_STEP_ID=4294967292"), 0, 0);
  /* A rank alone counts where the number of workers is known, and above 1. */
  rank_is(ENV("JOB_COMPLETION_INDEX=6"), 0, 0);
  rank_is(ENV("JOB_COMPLETION_INDEX=6", "MLFAB_WORKERS=1"), 0, 1);
  rank_is(ENV("JOB_COMPLETION_INDEX=6", "MLFAB_WORKERS=16"), 6, 16);
  rank_is(ENV("JOB_COMPLETION_INDEX=6", "MLFAB_WORKERS=16", "MLFAB_RANK=2"), 2, 16);
  rank_is(ENV("JOB_COMPLETION_INDEX=6", TORCH_), 2, 12);
  rank_is(ENV("PMIX_RANK=7"), 0, 0);
  rank_is(ENV("PMIX_RANK=7", "MLFAB_WORKERS=16", "JOB_COMPLETION_INDEX=6"), 7, 16);
  rank_is(ENV("PMIX_RANK=7", OMPI_), 3, 13);
  rank_is(ENV("MLFAB_WORKERS=40", TORCH_), 2, 40);
  rank_is(ENV("RANK=0", "WORLD_SIZE=1"), 0, 1);
#undef MLFAB_
#undef TORCH_
#undef OMPI_
#undef PMI_
#undef SLURM_
}

static void meets_at(const char *address, const char *const *set) {
  fill_well(set);
  assert_string_equal(c.coordinator, address);
}

TEST(test_master) {
#define NODE7 "MASTER_ADDR=node7", "MASTER_PORT=29500"
  meets_at("tcp:node7:29500", ENV(NODE7));
  meets_at("tcp:[::1]:29500",
           ENV("MASTER_ADDR=::1", "MASTER_PORT=29500", "MLFAB_ALLOW_INSECURE=1"));
  meets_at("tcp:[::1]:1", ENV("MASTER_ADDR=[::1]", "MASTER_PORT=1", "MLFAB_KEY_FILE=/key"));
  /* Where all are on one host, and nothing protects TCP, they meet at a Unix socket. */
  char socket[64];
  snprintf(socket, sizeof socket, "unix:@mlfab-%u-29500", (unsigned)geteuid());
  meets_at(socket, ENV("MASTER_ADDR=127.0.0.1", "MASTER_PORT=29500"));
  meets_at(socket, ENV(NODE7, "RANK=1", "WORLD_SIZE=4", "LOCAL_WORLD_SIZE=4"));
  meets_at("tcp:node7:29500", ENV(NODE7, "RANK=1", "WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2"));
  meets_at("tcp:localhost:29500",
           ENV("MASTER_ADDR=localhost", "MASTER_PORT=29500", "MLFAB_KEY=0123456789abcdef"));
  meets_at("unix:/x", ENV(NODE7, "MLFAB_COORDINATOR=unix:/x"));
  meets_at("", ENV("MASTER_PORT=29500"));          /* alone it says nothing */
  meets_at("", ENV(NODE7, "MLFAB_TRANSPORT=mpi")); /* MPI needs none */
#undef NODE7
}

/* `name`: of the socket where the processes meet; NULL: none. */
static void meets(const char *name, const char *const *set) {
  char socket[128] = "";
  if (name) snprintf(socket, sizeof socket, "unix:@mlfab-%u-%s", (unsigned)geteuid(), name);
  meets_at(socket, set);
}

/* Processes that Open MPI or Slurm has started on one host meet without an address; others do not. */
TEST(test_one_host) {
#define OMPI_ "OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4"
#define SLURM_ "SLURM_PROCID=1", "SLURM_NTASKS=4", "SLURM_JOB_ID=77"
#define PMI_ "PMI_RANK=1", "PMI_SIZE=4"
#define LOCAL_ "OMPI_COMM_WORLD_LOCAL_SIZE=4"
#define NODE_ "SLURM_STEP_ID=3", "SLURM_STEP_NUM_NODES=1"
  meets("pmix-123", ENV(OMPI_, LOCAL_, "PMIX_NAMESPACE=123"));
  meets("pmix-prterun-a-b-7@1", ENV(OMPI_, LOCAL_, "PMIX_NAMESPACE=prterun-a/b,7@1"));
  meets(NULL, ENV(OMPI_, "OMPI_COMM_WORLD_LOCAL_SIZE=2", "PMIX_NAMESPACE=123"));
  meets(NULL, ENV(OMPI_, "PMIX_NAMESPACE=123"));
  meets(NULL, ENV(OMPI_, LOCAL_));
  meets(NULL,
        ENV(OMPI_, LOCAL_,
            "PMIX_NAMESPACE=0123456789012345678901234567890123456789012345678901234567890123"));
  meets(NULL, ENV(OMPI_, LOCAL_, "PMIX_NAMESPACE=1", "MLFAB_TRANSPORT=mpi"));
  meets(NULL, ENV(OMPI_, LOCAL_, "PMIX_NAMESPACE=1", "MLFAB_JOIN=1"));
  meets("slurm-77.3", ENV(SLURM_, NODE_));
  meets(NULL, ENV(SLURM_, "SLURM_STEP_ID=3", "SLURM_STEP_NUM_NODES=2"));
  meets(NULL, ENV(SLURM_, "SLURM_STEP_ID=3"));
  /* The other components may be on other hosts. */
  meets(NULL, ENV(SLURM_, NODE_, "SLURM_HET_SIZE=2"));
  meets(NULL, ENV(SLURM_, NODE_, "SLURM_HET_JOB_ID=77"));
  meets(NULL, ENV(SLURM_, "SLURM_STEP_ID=4294967290", "SLURM_STEP_NUM_NODES=1"));
  meets(NULL, ENV("SLURM_PROCID=0", "SLURM_NTASKS=1", "SLURM_JOB_ID=77", NODE_));
  /* srun --mpi=pmi2, and an mpiexec inside a step. */
  meets("slurm-77.3", ENV(PMI_, SLURM_, NODE_));
  meets(NULL, ENV(PMI_, SLURM_, NODE_, "MPI_LOCALNRANKS=4"));
  meets(NULL, ENV("MLFAB_RANK=1", "MLFAB_WORKERS=4", "SLURM_JOB_ID=77", NODE_));
#undef LOCAL_
#undef NODE_
#undef OMPI_
#undef SLURM_
#undef PMI_
}

static void job_is(const char *job, const char *const *set) {
  fill_well(set);
  assert_string_equal(c.job, job);
}

/* The name of the job says which run this is, and which start of it. */
TEST(test_job) {
#define TORCH "TORCHELASTIC_RUN_ID=here"
#define COUNT "TORCHELASTIC_RESTART_COUNT=2"
  job_is("mine", ENV("MLFAB_JOB=mine", TORCH, COUNT, "SLURM_JOB_ID=7"));
  job_is("torch-here~2", ENV(TORCH, COUNT));
  job_is("torch-here~2", ENV(TORCH, COUNT, "GROUP_WORLD_SIZE=1"));
  job_is("torch-here~0",
         ENV(TORCH, COUNT, "GROUP_WORLD_SIZE=2")); /* each agent has its own count */
  job_is("torch-here~0", ENV(TORCH));
  /* torchrun's default is the same for all runs; the port is not. */
  job_is("torch-29500~2",
         ENV("TORCHELASTIC_RUN_ID=none", "MASTER_ADDR=h", "MASTER_PORT=29500", COUNT));
  job_is("mlfab~2", ENV("TORCHELASTIC_RUN_ID=none", COUNT));
  job_is("slurm-7~0", ENV("TORCHELASTIC_RUN_ID=none", "SLURM_JOB_ID=7"));
  job_is("mlfab~2", ENV(COUNT));
  job_is("", ENV("TORCHELASTIC_RESTART_COUNT=0"));
  job_is("slurm-7~0", ENV("SLURM_JOB_ID=7"));
  job_is("slurm-7~3", ENV("SLURM_JOB_ID=7", "SLURM_RESTART_COUNT=3"));
  /* Each component of a heterogeneous job may see a number of its own, and all see the first one's. */
  job_is("slurm-7~0", ENV("SLURM_JOB_ID=8", "SLURM_HET_JOB_ID=7", "SLURM_HET_SIZE=2"));
  job_is("slurm-7~1", ENV("SLURM_JOB_ID=8", "SLURM_PACK_JOB_ID=7", "SLURM_RESTART_COUNT=1"));
  job_is("slurm-7-torch-here~3002", ENV("SLURM_JOB_ID=7", "SLURM_RESTART_COUNT=3", TORCH, COUNT));
  /* Names that are too long differ where they are cut, too. */
  static const char first[] =
      "TORCHELASTIC_RUN_ID=a-very-long-name-of-a-run-that-nobody-wants-to-read-1";
  static const char second[] =
      "TORCHELASTIC_RUN_ID=a-very-long-name-of-a-run-that-nobody-wants-to-read-2";
  char before[sizeof c.job];
  fill_well(ENV(first, COUNT));
  strcpy(before, c.job);
  fill_well(ENV(second, COUNT));
  assert_string_not_equal(before, c.job);
  assert_string_equal(before + strlen(before) - 2, "~2");
  /* Two runs of torchrun with one port do not meet at one socket. */
  meets("29500-torch-x", ENV("RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29500",
                             "TORCHELASTIC_RUN_ID=x"));
#undef TORCH
#undef COUNT
}

/* Several nodes, and nobody has said where they meet. */
static void no_address(const char *name, const char *value, const char *const *set) {
  mlfab *fabric = NULL;
  fill_well(set);
  assert_int_equal(mlfab_open_env(&fabric, &error), MLFAB_ERR_CONFIG);
  if (!strstr(error.text, name) || !strstr(error.text, value) ||
      !strstr(error.text, "MLFAB_COORDINATOR"))
    fail_msg("\"%s\" does not name %s, %s and MLFAB_COORDINATOR", error.text, name, value);
}

TEST(test_no_address) {
  no_address("OMPI_COMM_WORLD_SIZE", "'8'",
             ENV("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=8"));
  no_address("PMI_SIZE", "'8'", ENV("PMI_RANK=0", "PMI_SIZE=8", "MPI_LOCALNRANKS=4"));
  no_address("SLURM_STEP_NODELIST", "'node[1-2]'",
             ENV("SLURM_PROCID=1", "SLURM_NTASKS=8", "SLURM_STEP_ID=0", "SLURM_JOB_ID=7",
                 "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_NODELIST=node[1-2]"));
  no_address("WORLD_SIZE", "'8'", ENV("RANK=0", "WORLD_SIZE=8"));
  no_address("coordinator", "", ENV("MLFAB_WORKERS=8", "JOB_COMPLETION_INDEX=3"));
}

/* What is wrong is refused, named with its value, and the configuration stays as it was. */
static void bad(const char *name, const char *value, const char *const *set) {
  int code = fill(NULL, set);
  if (code != MLFAB_ERR_CONFIG) fail_msg("%s=%s gives %s", name, value, mlfab_error_name(code));
  if (!strstr(error.text, name) || !strstr(error.text, value))
    fail_msg("\"%s\" does not name %s and %s", error.text, name, value);
  assert_memory_equal(&c, &fresh, sizeof c);
  assert_int_equal(mlfab_config_from_env(&c, NULL), MLFAB_ERR_CONFIG);
}

/* The same of one variable, which is set alone: NAME=value. */
static void bad_alone(const char *text) {
  char name[64];
  const char *value = strchr(text, '=') + 1;
  snprintf(name, sizeof name, "%.*s", (int)(value - 1 - text), text);
  bad(name, value, ENV(text));
}

TEST(test_bad_values) {
  static const char *const numbers[] = {
      "MLFAB_WORKERS",        "MLFAB_SERVERS",    "MLFAB_DEDICATED",
      "MLFAB_ALLOW_INSECURE", "MLFAB_TIMEOUT_MS", "MLFAB_HEARTBEAT_MS",
      "MLFAB_SEED",           "MLFAB_RANK",       "MLFAB_SILENT_DEATH_MS"};
  static const char *const wrong[] = {"x",  "-1", "1.5", "3 ",
                                      " 3", "+3", "0x2", "99999999999999999999"};
  const char *const *alone = ENV(
      "MLFAB_WORKERS=0", "MLFAB_WORKERS=65537", "MLFAB_SERVERS=4097", "MLFAB_DEDICATED=2",
      "MLFAB_TIMEOUT_MS=0", "MLFAB_RANK=2147483648", "MLFAB_RANK=1", "MLFAB_ROLE=boss",
      "MLFAB_ROLE=server", "MLFAB_ROLE=planner", "MLFAB_TRANSPORT=smoke", "MLFAB_PROGRESS=never",
      "MLFAB_PAYLOAD_CRC=yes", "MLFAB_SCHEDULER=above", "MLFAB_DELAY_BOUND=0",
      "MLFAB_DELAY_BOUND=-1", "MLFAB_PLAN_AHEAD_MS=soon", "MLFAB_ACCUMULATORS=65",
      "MLFAB_ORDER_BY_RATE=2", "RANK=5", "PMI_RANK=5", "MASTER_ADDR=h");
  char text[400], longer[300];
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
    for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
      snprintf(text, sizeof text, "%s=%s", numbers[i], wrong[k]);
      bad_alone(text);
    }
  for (; *alone; alone++) bad_alone(*alone);
  bad("WORLD_SIZE", "many", ENV("RANK=0", "WORLD_SIZE=many"));
  bad("RANK", "zero", ENV("RANK=zero", "WORLD_SIZE=1"));
  bad("OMPI_COMM_WORLD_SIZE", "-3", ENV("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=-3"));
  bad("SLURM_NTASKS", "?", ENV("SLURM_PROCID=1", "SLURM_NTASKS=?", "SLURM_STEP_ID=1"));
  bad("RANK", "4", ENV("RANK=4", "WORLD_SIZE=4"));
  bad("WORLD_SIZE", "4", ENV("RANK=4", "WORLD_SIZE=4"));
  bad("OMPI_COMM_WORLD_RANK", "9", ENV("OMPI_COMM_WORLD_RANK=9", "OMPI_COMM_WORLD_SIZE=8"));
  bad("SLURM_PROCID", "2", ENV("SLURM_PROCID=2", "SLURM_NTASKS=2", "SLURM_STEP_ID=1"));
  bad("WORLD_SIZE", "4", ENV("WORLD_SIZE=4", "PMI_RANK=0", "PMI_SIZE=4"));
  bad("JOB_COMPLETION_INDEX", "?", ENV("JOB_COMPLETION_INDEX=?", "MLFAB_WORKERS=2"));
  bad("MASTER_PORT", "http", ENV("MASTER_ADDR=h", "MASTER_PORT=http"));
  bad("MASTER_PORT", "65536", ENV("MASTER_ADDR=h", "MASTER_PORT=65536"));
  memset(longer, 'a', sizeof longer - 1);
  longer[sizeof longer - 1] = 0;
  snprintf(text, sizeof text, "MASTER_ADDR=%s", longer);
  bad("MASTER_ADDR", "aaaa", ENV(text, "MASTER_PORT=5"));
  snprintf(text, sizeof text, "MLFAB_JOB=%s", longer);
  bad("MLFAB_JOB", "aaaa", ENV(text));
  snprintf(text, sizeof text, "MLFAB_COORDINATOR=%s", longer);
  bad("MLFAB_COORDINATOR", "aaaa", ENV(text));
  /* A key is not told, wrong or not. */
  snprintf(text, sizeof text, "MLFAB_KEY=%s", longer);
  assert_int_equal(fill(NULL, ENV(text)), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "MLFAB_KEY"));
  assert_null(strstr(error.text, "aaaa"));
}

TEST(test_uninitialised) {
  memset(&c, 0, sizeof c);
  assert_int_equal(mlfab_config_from_env(&c, NULL), MLFAB_ERR_ARGUMENT);
}

/* Every setting by its name; what is wrong is named, and changes nothing. */
TEST(test_set) {
  static const struct {
    const char *name, *value, *bad;
  } rows[] = {{"workers", "4", "0"},
              {"servers", "2", "x"},
              {"dedicated", "1", "2"},
              {"rank", "3", "-1"},
              {"role", "server", "boss"},
              {"coordinator", "shm:x", NULL},
              {"timeout_ms", "500", "0"},
              {"transport", "tcp", "udp"},
              {"progress", "hand", "foot"},
              {"payload_crc", "0", "yes"},
              {"seed", "7", "0"},
              {"scheduler", "own", "above"},
              {"delay_bound", "12", "0"},
              {"accumulators", "none", "65"},
              {"div_max", "2.5", "-1"},
              {"div_max", "1e3", "nan"},
              {"div_max", "inf", "-inf"},
              {"ack", "durable", "lost"},
              {"kernels", "cblas", "mkl"},
              {"timeout_ms", "90s", "90sec"},
              {"heartbeat_ms", "250ms", "900us"},
              {"metrics_ms", "0.5s", "9ms"},
              {"timeout_ms", "2min", "25h"},
              {"timeout_ms", "1.5s", "-1s"},
              {"timeout_ms", "1h", "ms"},
              {"timeout_ms", "1000", "1e99s"},
              {"plan_ahead_ms", "150000us", "5 ms"},
              {"heartbeat_ms", "1000000ns", ""}};
  mlfab_config before;
  mlfab_config_init(&c);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    before = c;
    assert_int_equal(mlfab_config_set(&c, rows[i].name, rows[i].value, &error), 0);
    assert_memory_not_equal(&c, &before, sizeof c);
    before = c;
    if (!rows[i].bad) continue;
    assert_int_equal(mlfab_config_set(&c, rows[i].name, rows[i].bad, &error), MLFAB_ERR_CONFIG);
    assert_non_null(strstr(error.text, rows[i].name));
    assert_non_null(strstr(error.text, rows[i].bad));
    assert_memory_equal(&c, &before, sizeof c);
  }
  assert_int_equal(c.workers, 4);
  assert_int_equal(c.rank, 3);
  assert_int_equal(c.roles, MLFAB_ROLE_SERVER);
  assert_int_equal(c.timeout_ns, 1000000000);
  assert_int_equal(c.heartbeat_ns, 1000000);
  assert_int_equal(c.metrics_ns, 500000000);
  assert_int_equal(c.schedule.plan_ahead_ns, 150000000);
  assert_int_equal(c.no_payload_crc, 1);
  assert_int_equal(c.schedule.delay_bound, 12);
  assert_int_equal(c.accumulators, UINT32_MAX);
  assert_true(c.div_max == HUGE_VAL);
  static const char *const unknown[][3] = {
      {"worker", "4", "there is no such setting; the nearest is workers"},
      {"sync", "bsp", "the nearest is consistency"},
      {"consistency", "bsp", "no such setting in this struct: mlfab_model_options_set has it"},
      {"filter_top", "0.5", "mlfab_filter_set has it"},
      {"something_else_again", "4", ""}};
  for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
    int code = mlfab_config_set(&c, unknown[i][0], unknown[i][1], &error);
    assert_int_equal(code, MLFAB_ERR_CONFIG);
    assert_non_null(strstr(error.text, unknown[i][2]));
  }
  assert_null(strstr(error.text, "nearest"));
  assert_int_equal(mlfab_config_set(NULL, "workers", "4", &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_config_set(&c, NULL, "4", &error), MLFAB_ERR_ARGUMENT);
  memset(&c, 0, sizeof c);
  assert_int_equal(mlfab_config_set(&c, "workers", "4", &error), MLFAB_ERR_ARGUMENT);
}

/* Every name is accepted by one of the three functions, and none twice. */
TEST(test_setting_names) {
  const char *name;
  uint32_t n = 0;
  for (; (name = mlfab_setting_name(n)) != NULL; n++)
    for (uint32_t k = 0; k < n; k++) assert_string_not_equal(name, mlfab_setting_name(k));
  assert_true(n > 50);
  assert_null(mlfab_setting_name(UINT32_MAX));
}

/* Does one of the three structs take this value? */
static int taken(const char *name, const char *value) {
  mlfab_model_options o;
  mlfab_filter f = {.size = sizeof f};
  mlfab_config_init(&fresh);
  mlfab_model_options_init(&o);
  return !mlfab_config_set(&fresh, name, value, NULL) ||
         !mlfab_model_options_set(&o, name, value, NULL) ||
         !mlfab_filter_set(&f, name, value, NULL);
}

#define OPTIMIZERS "sgd momentum adadelay adam rmsprop adagrad nesterov lion"

/* The texts that a setting takes, its default, its meaning: each is there, and the default is a value that it takes. */
TEST(test_setting_texts) {
  static const char *const rows[][3] = {
      {"rank", "a whole number in 0..2147483647", "0"},
      {"timeout_ms", "a time from 1ms to 24h (ns, us, ms, s, min, h)", "300000ms"},
      {"metrics_ms", "a time from 10ms to 24h (ns, us, ms, s, min, h)", "1000ms"},
      {"plan_ahead_ms", "a time from 1ms to 24h (ns, us, ms, s, min, h)", "-"},
      {"role", "one of: worker server scheduler replica", "-"},
      {"payload_crc", "one of: 0 1", "1"},
      {"delay_bound", "a whole number in 1..18446744073709551614", "none"},
      {"job", "a text", "mlfab"},
      {"key", "a text", "-"},
      {"div_max", "a number from 0 on (or inf)", "0"},
      {"optimizer", "one of: " OPTIMIZERS, "sgd"},
      {"transport", "one of: auto tcp shm mpi mpi+shm", "auto"},
      {"consistency", "one of: async bsp ssp dsps drop pssp pssp_dynamic user", "async"},
      {"beta2", "a number from 0 to 1", "0.999"},
      {"filter_half", "one of: none f16 bf16", "none"}};
  const char *name;
  char text[256], wanted[256];
  size_t found = 0;
  for (uint32_t i = 0; (name = mlfab_setting_name(i)) != NULL; i++) {
    assert_int_equal(mlfab_setting_text(i, text, sizeof text), 0);
    char *value = strchr(text, '\t'), *meaning = value ? strchr(value + 1, '\t') : NULL;
    assert_non_null(meaning);
    assert_true(value > text && meaning > value + 1 && strlen(meaning) > 4 &&
                !strchr(meaning + 1, '\t'));
    /* The role of a server needs `dedicated`. */
    if (!strncmp(text, "one of: ", 8) && strcmp(name, "role") != 0) {
      for (const char *word = text + 8; word < value; word += strcspn(word, " \t") + 1) {
        snprintf(wanted, sizeof wanted, "%.*s", (int)strcspn(word, " \t"), word);
        if (!taken(name, wanted)) fail_msg("%s: not %s", name, wanted);
      }
    }
    snprintf(wanted, sizeof wanted, "%.*s", (int)(meaning - value - 1), value + 1);
    if (strcmp(wanted, "-") != 0 && !taken(name, wanted)) fail_msg("%s: not %s", name, wanted);
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
      if (strcmp(rows[k][0], name) != 0) continue;
      snprintf(wanted, sizeof wanted, "%s\t%s\t", rows[k][1], rows[k][2]);
      assert_memory_equal(text, wanted, strlen(wanted));
      found++;
    }
  }
  assert_int_equal(found, sizeof rows / sizeof rows[0]);
  assert_int_equal(mlfab_setting_text(UINT32_MAX, text, sizeof text), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_setting_text(0, NULL, 0), MLFAB_ERR_ARGUMENT);
}

/* Worker 0 warns once of each variable that nothing reads, and of no other. */
TEST(test_stray_variables) {
  mlfab *ctx = NULL;
  char text[2048];
  FILL("MLFAB_SYNC=bsp", "MLFAB_OPTIMISER=adam", "MLFAB_SERVERS=1", "MLFAB_WORKERS=1");
  setenv("MLFAB_QUITE_UNLIKE_ALL", "secret", 1);
  setenv("MLFAB_TIMEOUT", "secret", 1);
  setenv("MLFAB_MPI_REPORT", "1", 1);
  FILE *caught = tmpfile();
  assert_non_null(caught);
  int before = dup(STDERR_FILENO);
  fflush(stderr);
  dup2(fileno(caught), STDERR_FILENO);
  int code = mlfab_open_env(&ctx, &error);
  fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before);
  static const char *const stray[] = {"MLFAB_SYNC", "MLFAB_OPTIMISER", "MLFAB_QUITE_UNLIKE_ALL",
                                      "MLFAB_TIMEOUT", "MLFAB_MPI_REPORT"};
  for (size_t i = 0; i < sizeof stray / sizeof *stray; i++) unsetenv(stray[i]);
  assert_int_equal(code, 0);
  mlfab_close(&ctx);
  rewind(caught);
  size_t n = fread(text, 1, sizeof text - 1, caught);
  fclose(caught);
  text[n] = 0;
  assert_non_null(strstr(text, "MLFAB_SYNC has no meaning; the nearest is MLFAB_CONSISTENCY"));
  assert_non_null(strstr(text, "MLFAB_OPTIMISER has no meaning; the nearest is MLFAB_OPTIMIZER"));
  assert_non_null(strstr(text, "MLFAB_TIMEOUT has no meaning; the nearest is MLFAB_TIMEOUT_MS"));
  assert_null(strstr(text, "QUITE_UNLIKE_ALL")); /* no misspelling */
  assert_null(strstr(text, "secret"));
  assert_null(strstr(text, "MPI_REPORT"));
  assert_null(strstr(text, "MLFAB_WORKERS"));
}

/* A rank without the number of ranks, and the reverse. */
TEST(test_half_a_world) {
  mlfab *ctx = NULL;
  assert_int_equal(fill(NULL, ENV("MLFAB_RANK=0", "WORLD_SIZE=4")), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "MLFAB_WORKERS is not"));
  FILL("MLFAB_RANK=1", "MLFAB_JOIN=1"); /* server 0 tells a joiner its rank */
  FILL("MLFAB_WORKERS=2",
       "MLFAB_COORDINATOR=unix:@half-a-world"); /* the caller may know its rank */
  assert_int_equal(mlfab_open_env(&ctx, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "MLFAB_WORKERS='2': is set, but MLFAB_RANK is not"));
  mlfab_config given = fresh;
  given.workers = 4;
  assert_int_equal(fill(&given, ENV("MLFAB_RANK=3")), 0);
  assert_int_equal(c.rank, 3);
}

/* PSSP whose chance nobody gives would let every pull through. */
TEST(test_pssp_without_chance) {
  mlfab_model_options o = MLFAB_MODEL_OPTIONS_INIT;
  setenv("MLFAB_CONSISTENCY", "pssp", 1);
  unsetenv("MLFAB_CHANCE");
  assert_int_equal(mlfab_model_options_from_env(&o, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "MLFAB_CHANCE"));
  setenv("MLFAB_CHANCE", "0", 1); /* meant */
  assert_int_equal(mlfab_model_options_from_env(&o, &error), 0);
  unsetenv("MLFAB_CONSISTENCY");
  unsetenv("MLFAB_CHANCE");
}

TEST(test_model_and_filter) {
  mlfab_model_options o = MLFAB_MODEL_OPTIONS_INIT, before;
  mlfab_filter f = {.size = sizeof f};
  assert_int_equal(mlfab_model_options_set(&o, "optimizer", "adam", &error), 0);
  assert_int_equal(mlfab_model_options_set(&o, "weight_decay", "0.01", &error), 0);
  assert_int_equal(mlfab_model_options_set(&o, "beta1", "0", &error), 0);
  assert_int_equal(mlfab_model_options_set(&o, "consistency", "ssp", &error), 0);
  assert_int_equal(mlfab_model_options_set(&o, "staleness", "3", &error), 0);
  assert_int_equal(o.optimizer, MLFAB_OPTIMIZER_ADAM);
  assert_true(o.weight_decay == 0.01 && o.beta1 == 0.0 && o.beta2 == 0.999);
  assert_int_equal(o.consistency.kind, MLFAB_SYNC_SSP);
  assert_int_equal(o.consistency.staleness, 3);
  assert_int_equal(o.consistency.size, sizeof o.consistency);
  before = o;
  static const char *const wrong[][2] = {
      {"optimizer", "lamb"},  {"beta1", "1.5"},     {"beta1", "-0.5"},
      {"beta1", "nan"},       {"epsilon", "1e999"}, {"gamma", "0.5x"},
      {"consistency", "SSP"}, {"staleness", "-1"},  {"learning_rate", "1"}};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    assert_int_equal(mlfab_model_options_set(&o, wrong[i][0], wrong[i][1], &error),
                     MLFAB_ERR_CONFIG);
    assert_non_null(strstr(error.text, wrong[i][0]));
    assert_non_null(strstr(error.text, wrong[i][1]));
    assert_memory_equal(&o, &before, sizeof o);
  }
  assert_int_equal(mlfab_filter_set(&f, "filter_threshold", "0.25", &error), 0);
  assert_int_equal(mlfab_filter_set(&f, "filter_half", "bf16", &error), 0);
  assert_true(f.threshold == 0.25 && f.half == MLFAB_HALF_BF16);
  assert_int_equal(mlfab_filter_set(&f, "filter_top", "2", &error), MLFAB_ERR_CONFIG);
  /* From the environment, where the program has left the initial values. */
  setenv("MLFAB_OPTIMIZER", "rmsprop", 1);
  setenv("MLFAB_CONSISTENCY", "bsp", 1);
  setenv("MLFAB_FILTER_DECAY", "2", 1);
  setenv("MLFAB_FILTER_THRESHOLD", "9", 1);
  assert_int_equal(mlfab_model_options_from_env(&o, &error), 0);
  assert_memory_equal(&o, &before, sizeof o);
  mlfab_model_options_init(&o);
  assert_int_equal(mlfab_model_options_from_env(&o, &error), 0);
  assert_int_equal(o.optimizer, MLFAB_OPTIMIZER_RMSPROP);
  assert_int_equal(o.consistency.kind, MLFAB_SYNC_BSP);
  mlfab_model_options_init(&o);
  o.sync = MLFAB_SYNC_SSP;
  assert_int_equal(mlfab_model_options_from_env(&o, &error), 0);
  assert_int_equal(o.sync, MLFAB_SYNC_SSP);
  assert_int_equal(o.consistency.kind, 0);
  assert_int_equal(o.consistency.size, 0);
  assert_int_equal(mlfab_filter_from_env(&f, &error), 0);
  assert_true(f.threshold == 0.25 && f.decay == 2.0);
  setenv("MLFAB_OPTIMIZER", "best", 1);
  mlfab_model_options_init(&o);
  assert_int_equal(mlfab_model_options_from_env(&o, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "MLFAB_OPTIMIZER"));
  assert_null(strstr(error.text, "AdamW")); /* a hint for whom it may help */
  assert_int_equal(o.optimizer, MLFAB_OPTIMIZER_SGD);
  setenv("MLFAB_OPTIMIZER", "AdamW", 1);
  assert_int_equal(mlfab_model_options_from_env(&o, &error), MLFAB_ERR_CONFIG);
  assert_string_equal(error.text, "MLFAB_OPTIMIZER='AdamW': not one of: " OPTIMIZERS
                                  ". AdamW is adam with a weight_decay above 0");
  static const char *const names_set[] = {"MLFAB_OPTIMIZER", "MLFAB_CONSISTENCY",
                                          "MLFAB_FILTER_DECAY", "MLFAB_FILTER_THRESHOLD"};
  for (size_t i = 0; i < 4; i++) unsetenv(names_set[i]);
}

/* Members moved after the last size of a configuration without them: such a struct is refused by its size, never read. */
TEST(test_old_layout) {
  enum { OLD = 3152 };
  mlfab_config config;
  mlfab *ctx = NULL;
  mlfab_config_init(&config);
  assert_true(config.size > OLD);
  for (uint32_t size = 1; size < sizeof config; size = size == 1 ? OLD : size + 64) {
    char text[64];
    config.size = size;
    assert_int_equal(mlfab_open(&config, &ctx, &error), MLFAB_ERR_CONFIG);
    snprintf(text, sizeof text, "config.size is %u, that of another mlfab.h; ", (unsigned)size);
    assert_non_null(strstr(error.text, text));
    assert_int_equal(mlfab_config_set(&config, "rank", "0", &error), MLFAB_ERR_ARGUMENT);
    assert_int_equal(mlfab_config_from_env(&config, &error), MLFAB_ERR_ARGUMENT);
  }
  /* Its other members are not read: no key is looked for. */
  config.size = OLD;
  config.join = 1;
  snprintf(config.key_file, sizeof config.key_file, "/absent");
  assert_int_equal(mlfab_open(&config, &ctx, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "config.size is 3152, that of another mlfab.h; "));
  config.join = 0;
  config.key_file[0] = 0;
  config.size = sizeof config + 64; /* of a later version */
  assert_int_equal(mlfab_open(&config, &ctx, &error), 0);
  assert_int_equal(mlfab_close(&ctx), 0);
}

TESTS(NULL, NULL)
