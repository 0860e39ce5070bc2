/* config.c - filling a configuration from the environment. Layer 6: the one place that reads it.
 *
 * Order of precedence: what the caller set, MLFAB_*, torchrun's RANK, WORLD_SIZE, MASTER_ADDR and
 * MASTER_PORT, then the launcher's rank and size (Open MPI, PMI, and Slurm inside a step). */
#include "env.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static int config_bad(mlfab_error *error, const char *name, const char *value, const char *want) {
  return mlfab__error(error, MLFAB_ERR_CONFIG, MLFAB_NO_RANK, 0, 0, "%s='%.100s': %s", name, value,
                      want);
}

/* A whole number in low..high. 1 found, 0 not set, or an error. */
static int config_number(const char *name, uint64_t low, uint64_t high, uint64_t *value_p,
                         mlfab_error *error) {
  const char *text = getenv(name);
  char *end, want[80];
  if (!text || !*text) return 0;
  errno = 0;
  unsigned long long value = strtoull(text, &end, 10);
  /* Digits only: strtoull would take blanks and signs. */
  if (*end || text[0] < '0' || text[0] > '9' || errno || value < low || value > high) {
    snprintf(want, sizeof want, "not a whole number in %llu..%llu", (unsigned long long)low,
             (unsigned long long)high);
    return config_bad(error, name, text, want);
  }
  *value_p = value;
  return 1;
}

static int config_u32(const char *name, uint32_t low, uint32_t high, uint32_t *member,
                      mlfab_error *error) {
  uint64_t value = 0;
  if (*member != 0) return 0;
  int found = config_number(name, low, high, &value, error);
  if (found == 1) *member = (uint32_t)value;
  return found < 0 ? found : 0;
}

static int config_ms(const char *name, uint64_t *member, mlfab_error *error) {
  uint64_t value = 0;
  if (*member != 0) return 0;
  int found = config_number(name, 1, 86400000, &value, error);
  if (found == 1) *member = value * 1000000u;
  return found < 0 ? found : 0;
}

static int config_text(const char *name, char *member, size_t room, mlfab_error *error) {
  const char *text = getenv(name);
  if (member[0] || !text || !*text) return 0;
  if (strlen(text) >= room) return config_bad(error, name, text, "too long");
  memcpy(member, text, strlen(text) + 1);
  return 0;
}

/* As config_text, but what is wrong is not told: errors are logged. */
static int config_secret(const char *name, char *member, size_t room, mlfab_error *error) {
  const char *text = getenv(name);
  if (member[0] || !text || !*text) return 0;
  if (strlen(text) >= room)
    return mlfab__error(error, MLFAB_ERR_CONFIG, MLFAB_NO_RANK, 0, 0,
                        "%s: not 32 hexadecimal digits", name);
  memcpy(member, text, strlen(text) + 1);
  return 0;
}

/* One of the words, by its number; -1 when not set. */
static int config_word(const char *name, const char *const *words, int *choice_p,
                       mlfab_error *error) {
  const char *text = getenv(name);
  char want[96] = "not one of:";
  *choice_p = -1;
  if (!text || !*text) return 0;
  for (int i = 0; words[i]; i++) {
    if (!strcmp(text, words[i])) {
      *choice_p = i;
      return 0;
    }
    size_t at = strlen(want);
    snprintf(want + at, sizeof want - at, " %s", words[i]);
  }
  return config_bad(error, name, text, want);
}

static int config_schedule(mlfab_config *c, mlfab_error *error) {
  static const char *const scheduler[] = {"none", "beside", "own", NULL};
  int choice = -1;
  uint64_t value = 0;
  /* Of this size it means all defaults, and so it would after the environment, too. */
  if (c->schedule.size == 0) mlfab_schedule_init(&c->schedule);
  int code = config_word("MLFAB_SCHEDULER", scheduler, &choice, error);
  if (!code && choice > 0 && c->scheduler == 0) c->scheduler = (uint32_t)choice;
  const char *bound = getenv("MLFAB_DELAY_BOUND"), *room = getenv("MLFAB_ACCUMULATORS");
  if (!code && bound && *bound && strcmp(bound, "none") != 0 &&
      c->schedule.delay_bound == MLFAB_UNBOUNDED) {
    /* Not from 0 on: no update has a delay below 0. */
    int found = config_number("MLFAB_DELAY_BOUND", 1, UINT64_MAX - 1, &value, error);
    if (found < 0) return found;
    c->schedule.delay_bound = value;
  }
  if (!code && room && !strcmp(room, "none") && c->accumulators == 0) {
    c->accumulators = UINT32_MAX;
  } else if (!code) {
    code = config_u32("MLFAB_ACCUMULATORS", 1, 64, &c->accumulators, error);
  }
  uint64_t ahead = 0;
  if (!code) code = config_ms("MLFAB_PLAN_AHEAD_MS", &ahead, error);
  if (!code && ahead && c->schedule.plan_ahead_ns == 0) c->schedule.plan_ahead_ns = ahead;
  return code;
}

static int config_words(mlfab_config *c, mlfab_error *error) {
  static const char *const role[] = {"worker", "server", "scheduler", NULL};
  static const char *const transport[] = {"auto", "tcp", "shm", NULL};
  static const char *const progress[] = {"thread", "hand", NULL};
  static const char *const crc[] = {"0", "1", NULL};
  int choice = -1, code = config_word("MLFAB_ROLE", role, &choice, error);
  if (code) return code;
  if (choice == 2 && c->roles == 0) c->roles = MLFAB_ROLE_SCHEDULER;
  if (choice >= 0 && c->roles == 0 && c->dedicated)
    c->roles = choice ? MLFAB_ROLE_SERVER : MLFAB_ROLE_WORKER;
  if (choice == 1 && !c->dedicated)
    return config_bad(error, "MLFAB_ROLE", "server", "needs MLFAB_DEDICATED=1");
  code = config_word("MLFAB_TRANSPORT", transport, &choice, error);
  if (code) return code;
  if (choice > 0 && c->transports == 0) c->transports = choice == 1 ? MLFAB_USE_TCP : MLFAB_USE_SHM;
  code = config_word("MLFAB_PROGRESS", progress, &choice, error);
  if (code) return code;
  if (choice >= 0 && c->progress == 0)
    c->progress = choice ? MLFAB_PROGRESS_HAND : MLFAB_PROGRESS_THREAD;
  code = config_word("MLFAB_PAYLOAD_CRC", crc, &choice, error);
  if (!code && choice == 0) c->no_payload_crc = 1;
  return code;
}

/* Rank and size from the first source that has a rank. */
static int config_rank(mlfab_config *c, int rank_given, mlfab_error *error) {
  static const char *const sources[][2] = {{"MLFAB_RANK", "MLFAB_WORKERS"},
                                           {"RANK", "WORLD_SIZE"},
                                           {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                           {"PMI_RANK", "PMI_SIZE"},
                                           {"SLURM_PROCID", "SLURM_NTASKS"}};
  for (size_t i = 0; i < MLFAB__COUNT(sources); i++) {
    uint64_t rank = 0, size = 0;
    const char *text = getenv(sources[i][0]);
    if (i == 1 && (!text || !*text) && getenv(sources[i][1]) && *getenv(sources[i][1])) {
      return config_bad(error, sources[i][1], getenv(sources[i][1]),
                        "is set, but not RANK beside it");
    }
    if (!text || !*text || (i == 4 && !getenv("SLURM_STEP_ID"))) continue;
    int found = config_number(sources[i][0], 0, INT32_MAX, &rank, error);
    if (found < 0) return found;
    if (!rank_given) c->rank = (int32_t)rank;
    if (c->workers) return 0;
    found = config_number(sources[i][1], 1, 65536, &size, error);
    if (found < 0) return found;
    if (found == 0 && i > 0)
      return config_bad(error, sources[i][0], text,
                        "is set, but not the size of the world beside it");
    if (found == 1) c->workers = (uint32_t)size;
    return 0;
  }
  return 0;
}

static int config_master(mlfab_config *c, mlfab_error *error) {
  const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
  uint64_t number = 0;
  if (c->coordinator[0] || !host || !*host) return 0;
  if (!port || !*port) return config_bad(error, "MASTER_ADDR", host, "is set, but not MASTER_PORT");
  int found = config_number("MASTER_PORT", 1, 65535, &number, error);
  if (found < 0) return found;
  int bare6 = strchr(host, ':') && host[0] != '[';
  int n = snprintf(c->coordinator, sizeof c->coordinator, bare6 ? "tcp:[%s]:%u" : "tcp:%s:%u", host,
                   (unsigned)number);
  if (n < (int)sizeof c->coordinator) return 0;
  c->coordinator[0] = 0;
  return config_bad(error, "MASTER_ADDR", host, "too long");
}

MLFAB_API void mlfab_config_init(mlfab_config *config) {
  if (!config) return;
  memset(config, 0, sizeof *config);
  config->size = sizeof *config;
  mlfab_schedule_init(&config->schedule);
}

MLFAB_API void mlfab_schedule_init(mlfab_schedule *schedule) {
  if (!schedule) return;
  memset(schedule, 0, sizeof *schedule);
  schedule->size = sizeof *schedule;
  schedule->delay_bound = MLFAB_UNBOUNDED;
}

MLFAB_API int mlfab_config_from_env(mlfab_config *config, mlfab_error *error_p) {
  if (!config || config->size != sizeof *config) {
    return mlfab__error(error_p, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "config is NULL or was not initialised");
  }
  mlfab_config c = *config;
  int rank_given = c.rank != 0;
  int code = config_u32("MLFAB_WORKERS", 1, 65536, &c.workers, error_p);
  if (!code) code = config_u32("MLFAB_SERVERS", 1, 4096, &c.servers, error_p);
  if (!code) code = config_u32("MLFAB_DEDICATED", 0, 1, &c.dedicated, error_p);
  if (!code) code = config_u32("MLFAB_ALLOW_INSECURE", 0, 1, &c.allow_insecure, error_p);
  if (!code) code = config_u32("MLFAB_ORDER_BY_RATE", 0, 1, &c.order_by_rate, error_p);
  if (!code) code = config_text("MLFAB_COORDINATOR", c.coordinator, sizeof c.coordinator, error_p);
  if (!code) code = config_text("MLFAB_JOB", c.job, sizeof c.job, error_p);
  if (!code) code = config_secret("MLFAB_JOB_SECRET", c.secret, sizeof c.secret, error_p);
  if (!code) code = config_text("MLFAB_LISTEN", c.listen, sizeof c.listen, error_p);
  if (!code) code = config_text("MLFAB_SOCKET_IFNAME", c.ifname, sizeof c.ifname, error_p);
  if (!code) code = config_ms("MLFAB_TIMEOUT_MS", &c.timeout_ns, error_p);
  if (!code) code = config_ms("MLFAB_HEARTBEAT_MS", &c.heartbeat_ns, error_p);
  if (!code) code = config_ms("MLFAB_SILENT_DEATH_MS", &c.silent_death_ns, error_p);
  uint64_t seed = 0;
  int found = code ? 0 : config_number("MLFAB_SEED", 1, UINT64_MAX, &seed, error_p);
  if (found < 0) code = found;
  if (found == 1 && c.seed == 0) c.seed = seed;
  if (!code) code = config_words(&c, error_p);
  if (!code) code = config_schedule(&c, error_p);
  if (!code) code = config_rank(&c, rank_given, error_p);
  if (!code) code = config_master(&c, error_p);
  if (!code) *config = c;
  return code;
}
