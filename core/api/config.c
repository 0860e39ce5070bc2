/* config.c - the settings; fills a configuration from the environment, which no other file reads.
 *
 * Order of precedence: the caller's values, MLFAB_*, torchrun's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Then
 * the launcher's rank and size follow (Open MPI, PMI, and Slurm inside a step). Last is a rank alone (PMIx, an indexed
 * Job of Kubernetes); it counts only if the number of workers is known. */
#include "../base/env.h"
#include "../base/rng.h"
#include "../base/typed.h"
#include "complete.h"
#include "../model/options.h"
#include "../../mlfab_partial.h"
#include "../../mlfab_transport.h"

#include <errno.h>
#include <math.h>
#include <unistd.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

/* A setting: the member that it sets, the texts that it takes, and its meaning. It takes a word of a list, a whole
 * number in low..high, or a time in low..high ms; a real number (high 1: 0 to 1; CONFIG_INF: also inf), or any text. */
enum config_kind { CONFIG_NUMBER, CONFIG_TIMES, CONFIG_REAL, CONFIG_TEXT, CONFIG_SECRET };

typedef struct config_setting {
  const char *name; /* the variable's name in lower case, without MLFAB_ */
  uint8_t kind;
  uint16_t at, bytes; /* of the member */
  uint64_t low, high;
  const mlfab__word *words; /* or NULL */
  const char *meaning;
  const char *standard; /* its default, as a text, or NULL */
} config_setting;

#define CONFIG_WORDS(...) ((const mlfab__word[]){__VA_ARGS__, {NULL, 0}})
#define CONFIG_ROW(name, kind, type, member, low, high, words, ...)                             \
  {                                                                                             \
    name, kind, (uint16_t)offsetof(mlfab_##type, member),                                       \
        (uint16_t)sizeof(((mlfab_##type *)0)->member), low, high, words, .meaning = __VA_ARGS__ \
  }
#define CONFIG_U(name, type, member, low, high, ...) \
  CONFIG_ROW(name, CONFIG_NUMBER, type, member, low, high, NULL, __VA_ARGS__)
#define CONFIG_W(name, type, member, low, high, meaning, ...) \
  CONFIG_ROW(name, CONFIG_NUMBER, type, member, low, high, CONFIG_WORDS(__VA_ARGS__), meaning)
#define CONFIG_R(name, type, member, high, meaning) \
  CONFIG_ROW(name, CONFIG_REAL, type, member, 0, high, NULL, meaning)
#define CONFIG_T(name, type, member, kind, ...) \
  CONFIG_ROW(name, kind, type, member, 0, 0, NULL, __VA_ARGS__)
#define CONFIG_TIME(name, member, low, ...) \
  CONFIG_ROW(name, CONFIG_TIMES, config, member, low, 86400000, NULL, __VA_ARGS__)
#define CONFIG_OPTIMIZER(kind, name, ...) {#name, MLFAB_OPTIMIZER_##kind},
#define CONFIG_SYNC(kind, name, ...) {#name, MLFAB_SYNC_##kind},
enum { CONFIG_MS = 1000000 };
#define CONFIG_HUGE UINT64_MAX
#define CONFIG_INF 0

/* They are set apart: see config_role and config_rank. */
enum { CONFIG_RANK, CONFIG_ROLE };
static const config_setting config_others[] = {
    CONFIG_U("rank", config, rank, 0, INT32_MAX, "number of this worker or server"),
    CONFIG_W("role", config, roles, 1, 0, "part of this process", {"worker", MLFAB_ROLE_WORKER},
             {"server", MLFAB_ROLE_SERVER}, {"scheduler", MLFAB_ROLE_SCHEDULER},
             {"replica", MLFAB_ROLE_REPLICA}),
};

static const config_setting config_settings[] = {
    CONFIG_U("workers", config, workers, 1, 65536, "workers at the beginning", "1"),
    CONFIG_U("workers_max", config, workers_max, 1, 65536, "most workers at a time"),
    CONFIG_U("join", config, join, 0, 1, "1: joins a fabric that runs"),
    CONFIG_U("servers", config, servers, 1, 4096, "servers at the beginning", "1"),
    CONFIG_U("servers_max", config, servers_max, 1, 4096, "most servers at a time"),
    CONFIG_U("dedicated", config, dedicated, 0, 1, "1: servers are processes of their own"),
    CONFIG_U("allow_insecure", config, allow_insecure, 0, 1, "1: TCP works without a key"),
    CONFIG_U("order_by_rate", config, order_by_rate, 0, 1, "1: fast hosts come first in a ring"),
    CONFIG_T("coordinator", config, coordinator, CONFIG_TEXT, "address of server 0"),
    CONFIG_T("job", config, job, CONFIG_TEXT, "name of the fabric", "mlfab"),
    CONFIG_T("key", config, key, CONFIG_SECRET, "16 to 128 characters that all nodes have"),
    CONFIG_T("key_file", config, key_file, CONFIG_TEXT, "file with the key, of this user alone"),
    CONFIG_T("listen", config, listen, CONFIG_TEXT, "address of this node"),
    CONFIG_T("socket_ifname", config, ifname, CONFIG_TEXT, "for TCP: eth, ^docker, =eth0,eth1"),
    CONFIG_TIME("timeout_ms", timeout_ns, 1, "deadline of a call, joining included", "5min"),
    CONFIG_TIME("heartbeat_ms", heartbeat_ns, 1, "a peer is dead after 5 without a byte", "500"),
    CONFIG_TIME("silent_death_ms", silent_death_ns, 1, "limit for a peer that is stopped", "30s"),
    CONFIG_U("seed", config, seed, 1, UINT64_MAX, "of random choices", "1"),
    CONFIG_W("transport", config, transports, 1, 0, "what carries the bytes", {"auto", 0},
             {"tcp", MLFAB_USE_TCP}, {"shm", MLFAB_USE_SHM}, {"mpi", MLFAB_USE_MPI},
             {"mpi+shm", MLFAB_USE_MPI | MLFAB_USE_SHM}),
    CONFIG_W("progress", config, progress, 1, 0, "what moves data: a thread, or calls alone",
             {"thread", MLFAB_PROGRESS_THREAD}, {"hand", MLFAB_PROGRESS_HAND}),
    CONFIG_W("kernels", config, kernels, 1, 0, "what adds numbers", {"own", MLFAB_KERNELS_OWN},
             {"cblas", MLFAB_KERNELS_CBLAS}),
    CONFIG_W("payload_crc", config, no_payload_crc, 1, 0, "1: checksums of data over TCP", {"0", 1},
             {"1", 0}),
    CONFIG_W("scheduler", config, scheduler, 1, 0, "who plans large pushes and pulls",
             {"none", MLFAB_SCHEDULER_NONE}, {"beside", MLFAB_SCHEDULER_BESIDE},
             {"own", MLFAB_SCHEDULER_OWN}),
    CONFIG_W("delay_bound", config, schedule.delay_bound, 1, UINT64_MAX - 1,
             "drops updates that come so many versions late, or none", {"none", MLFAB_UNBOUNDED}),
    CONFIG_W("accumulators", config, accumulators, 1, 64, "sums for others at a time, or none (2)",
             {"none", UINT32_MAX}),
    CONFIG_TIME("plan_ahead_ms", schedule.plan_ahead_ns, 1, "plans if the link is booked for less"),
    CONFIG_T("checkpoint_dir", config, checkpoint_dir, CONFIG_TEXT, "directory of checkpoints"),
    CONFIG_U("checkpoint_commits", config, checkpoint_commits, 1, INT64_MAX,
             "commits before the next"),
    CONFIG_U("checkpoint_keep", config, checkpoint_keep, 1, 1000000, "checkpoints that stay (2)"),
    CONFIG_T("resume", config, resume, CONFIG_TEXT, "directory whose newest checkpoint is loaded"),
    CONFIG_U("history", config, history, 1, UINT32_MAX, "loads checkpoints of this history only"),
    CONFIG_T("log", config, log, CONFIG_TEXT, "error, warn, info or debug; or LEVEL:FILE"),
    CONFIG_T("metrics", config, metrics, CONFIG_TEXT, "file of counters, for mlfab-top"),
    CONFIG_T("trace", config, trace, CONFIG_TEXT, "file of transfers, for ui.perfetto.dev"),
    CONFIG_U("mpi_lend", config, mpi_lend, 0, 1, "1: MPI sends large data without a copy"),
    CONFIG_TIME("metrics_ms", metrics_ns, 10, "time between two writes of the metrics", "1s"),
    CONFIG_U("replicas", config, replicas, 0, 1, "1: each server has a replica"),
    CONFIG_R("div_max", config, div_max, CONFIG_INF, "largest distance of a replica"),
    CONFIG_T("vote_dir", config, vote_dir, CONFIG_TEXT, "directory of votes about servers"),
    CONFIG_W("ack", config, ack, 1, 0, "what ends a push, with replicas",
             {"applied", MLFAB_ACK_APPLIED}, {"durable", MLFAB_ACK_DURABLE}),
};

static const config_setting config_model[] = {
    CONFIG_W("optimizer", model_options, optimizer, 1, 0, "rule of updates",
             MLFAB__OPTIMIZERS(CONFIG_OPTIMIZER){NULL, 0}),
    CONFIG_R("gamma", model_options, gamma, 1, "momentum, nesterov; below 1"),
    CONFIG_R("beta1", model_options, beta1, 1, "adam, lion: decay of the mean; below 1"),
    CONFIG_R("beta2", model_options, beta2, 1, "adam, rmsprop, lion: decay; below 1"),
    CONFIG_R("epsilon", model_options, epsilon, CONFIG_HUGE, "added to divisors"),
    CONFIG_R("weight_decay", model_options, weight_decay, CONFIG_HUGE, "decay of weights"),
    CONFIG_W("consistency", model_options, consistency.kind, 1, 0, "when a pull waits",
             MLFAB__SYNCS(CONFIG_SYNC){NULL, 0}),
    CONFIG_U("staleness", model_options, consistency.staleness, 0, INT64_MAX, "iterations ahead"),
    CONFIG_U("need", model_options, consistency.need, 1, 65536, "drop: pushes of a round"),
    CONFIG_R("chance", model_options, consistency.chance, 1, "pssp: probability of a wait"),
    CONFIG_R("alpha", model_options, consistency.alpha, CONFIG_HUGE, "pssp_dynamic: weight"),
    CONFIG_U("mean", model_options, mean, 0, 1, "1: the mean of a round, not the sum"),
    CONFIG_U("slices", model_options, slices, 1, 4096,
             "parts of the model, of all servers (16 each)"),
    CONFIG_U("tags", model_options, tags, 1, 65536, "elements of a tag, a power of two"),
};

static const config_setting config_filter[] = {
    CONFIG_R("filter_threshold", filter, threshold, CONFIG_HUGE, "holds smaller elements back"),
    CONFIG_R("filter_decay", filter, decay, CONFIG_HUGE, "how the threshold falls"),
    CONFIG_R("filter_drop", filter, drop, 1, "probability that one is held back"),
    CONFIG_R("filter_top", filter, top, 1, "share of elements that travels"),
    CONFIG_W("filter_half", filter, half, 1, 0, "16 bits an element", {"none", MLFAB_HALF_NONE},
             {"f16", MLFAB_HALF_F16}, {"bf16", MLFAB_HALF_BF16}),
};

enum { CONFIG_OTHERS, CONFIG_SETTINGS, CONFIG_MODEL, CONFIG_FILTER, CONFIG_TABLES };
static const struct {
  const config_setting *rows;
  size_t n, bytes; /* of the struct, which begins with its size */
  const char *set;
} config_tables[] = {
    {config_others, 2, sizeof(mlfab_config), "mlfab_config_set"},
    {config_settings, MLFAB__COUNT(config_settings), sizeof(mlfab_config), "mlfab_config_set"},
    {config_model, MLFAB__COUNT(config_model), sizeof(mlfab_model_options),
     "mlfab_model_options_set"},
    {config_filter, MLFAB__COUNT(config_filter), sizeof(mlfab_filter), "mlfab_filter_set"}};

/* --- names --- */

/* Members of structs that have quite another name as a setting. */
static const char *const config_alias[][2] = {
    {"sync", "consistency"}, {"world_size", "workers"}, {"address", "coordinator"}};

/* Setting `index` of all tables, or NULL; *table_p: its table. */
static const config_setting *config_at(uint32_t index, int *table_p) {
  for (*table_p = 0; *table_p < CONFIG_TABLES; index -= (uint32_t)config_tables[(*table_p)++].n)
    if (index < config_tables[*table_p].n) return &config_tables[*table_p].rows[index];
  return NULL;
}

MLFAB_API const char *mlfab_setting_name(uint32_t index) {
  int table;
  const config_setting *s = config_at(index, &table);
  return s ? s->name : NULL;
}

MLFAB__INTERNAL const char *mlfab__config_nearest(const char *name) {
  const char *best = NULL, *other;
  uint32_t least = UINT32_MAX;
  for (size_t i = 0; i < MLFAB__COUNT(config_alias); i++) {
    if (!strcmp(name, config_alias[i][0])) return config_alias[i][1];
  }
  for (uint32_t i = 0; (other = mlfab_setting_name(i)) != NULL; i++) {
    uint32_t far = mlfab__misspelt(name, other);
    if (far >= least) continue;
    best = other;
    least = far;
  }
  /* Else a setting that contains the name as words: "timeout", "threshold". */
  for (uint32_t i = 0; !best && strlen(name) >= 4 && (other = mlfab_setting_name(i)) != NULL; i++) {
    const char *at = strstr(other, name), *end = at ? at + strlen(name) : NULL;
    if (at && (at == other || at[-1] == '_') && (*end == 0 || *end == '_')) best = other;
  }
  return best;
}

/* Copies n characters with the letters of the other case: `first` is 'a' or 'A', of those that change. */
static void config_case(char *to, const char *from, size_t n, char first) {
  for (size_t k = 0; k < n; k++)
    to[k] = (char)(from[k] >= first && from[k] <= first + 25 ? from[k] ^ 32 : from[k]);
  to[n] = 0;
}

/* The variable of a setting. */
static void config_variable_of(const char *setting, char name[64]) {
  snprintf(name, 64, "MLFAB_");
  config_case(name + 6, setting, mlfab__min(strlen(setting), 57), 'a');
}

/* Does any code read this variable? `setting`: its name in lower case, without MLFAB_. */
static int config_is_known(const char *setting) {
  const char *name;
  if (!strncmp(setting, "with_", 5)) return 1; /* switches of the build */
  if (!strncmp(setting, "mpi_", 4) || !strncmp(setting, "store_", 6)) return 1; /* of extras/ */
  if (!strcmp(setting, "data") || !strcmp(setting, "build")) return 1;          /* of programs */
  for (uint32_t i = 0; (name = mlfab_setting_name(i)) != NULL; i++) {
    if (!strcmp(setting, name)) return 1;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__config_stray(char *const *variables, uint32_t *at_p, char *text,
                                        size_t room) {
  for (; variables && variables[*at_p]; ++*at_p) {
    const char *variable = variables[*at_p], *nearest = NULL;
    size_t bytes = strcspn(variable, "=");
    char setting[32], name[64] = "";
    if (strncmp(variable, "MLFAB_", 6) != 0 || bytes < 7 || bytes - 6 >= sizeof setting ||
        !variable[bytes] || !variable[bytes + 1])
      continue;
    config_case(setting, variable + 6, bytes - 6, 'A');
    nearest = config_is_known(setting) ? setting : mlfab__config_nearest(setting);
    if (nearest) config_variable_of(nearest, name);
    /* Without a near name, the variable is a script's or a test's own. */
    if (!nearest || (strlen(name) == bytes && !strncmp(name, variable, bytes))) continue;
    snprintf(text, room, "the variable %.*s has no meaning; the nearest is %s", (int)bytes,
             variable, name);
    ++*at_p;
    return 1;
  }
  return 0;
}

/* --- initial values --- */

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

/* --- one setting --- */

static int config_bad(mlfab_error *error, const char *name, const char *value, const char *want) {
  return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "%s='%.100s': %s", name, value, want);
}

/* A whole number in low..high. */
static int config_number(const char *name, const char *text, uint64_t low, uint64_t high,
                         uint64_t *value_p, mlfab_error *error) {
  char *end;
  errno = 0;
  unsigned long long value = strtoull(text, &end, 10);
  /* Digits only: strtoull would take blanks and signs. */
  if (*end || text[0] < '0' || text[0] > '9' || errno || value < low || value > high)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "%s='%.100s': not a whole number in %llu..%llu",
                       name, text, (unsigned long long)low, (unsigned long long)high);
  *value_p = value;
  return 0;
}

static int config_real(const config_setting *s, const char *name, const char *text, double *value_p,
                       mlfab_error *error) {
  char *end;
  double value = mlfab__real(text, &end);
  if (s->high == CONFIG_INF && !strcmp(text, "inf")) return *value_p = HUGE_VAL, 0;
  if (*end || text[0] < '0' || text[0] > '9' || !mlfab__finite(value) ||
      (s->high == 1 && value > 1.0))
    return config_bad(error, name, text,
                      s->high == CONFIG_INF ? "not a number from 0 on (or inf)"
                      : s->high == 1        ? "not a number from 0 to 1"
                                            : "not a number from 0 on");
  *value_p = value;
  return 0;
}

/* Word i of a setting and its value, or NULL. */
static const char *config_word_at(const config_setting *s, uint32_t i, uint64_t *value_p) {
  *value_p = s->words ? s->words[i].value : 0;
  return s->words ? s->words[i].word : NULL;
}

/* One of the words, or a number where the setting has a range. */
static int config_choice(const config_setting *s, const char *name, const char *text,
                         uint64_t *value_p, mlfab_error *error) {
  char want[160] = "not one of:";
  const char *word;
  for (uint32_t i = 0; (word = config_word_at(s, i, value_p)) != NULL; i++) {
    size_t at = strlen(want);
    if (!strcmp(text, word)) return 0;
    snprintf(want + at, sizeof want - at, " %s", word);
  }
  if (!strcmp(s->name, "optimizer") && !strcasecmp(text, "adamw"))
    snprintf(want + strlen(want), sizeof want - strlen(want),
             ". AdamW is adam with a weight_decay above 0");
  if (s->low > s->high) return config_bad(error, name, text, want);
  return config_number(name, text, s->low, s->high, value_p, error);
}

/* A time in low..high ms; a bare number counts ms. */
static int config_time(const config_setting *s, const char *name, const char *text,
                       uint64_t *value_p, mlfab_error *error) {
  char *end;
  double ms = mlfab__real(text, &end) * mlfab__unit_of(end, mlfab__times, CONFIG_MS) / CONFIG_MS;
  /* A bare number has digits only. */
  if (text[0] < '0' || text[0] > '9' || (!*end && text[strspn(text, "0123456789")]) ||
      !(ms >= (double)s->low && ms <= (double)s->high))
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "%s='%.100s': not a time from %ums to 24h (" MLFAB__TIMES ")", name, text,
                       (unsigned)s->low);
  *value_p = (uint64_t)(ms * CONFIG_MS + 0.5);
  return 0;
}

/* Sets the member from a text. Errors use `name`, and leave the member unchanged. */
static int config_put(void *base, const config_setting *s, const char *name, const char *text,
                      mlfab_error *error) {
  char *member = (char *)base + s->at;
  uint64_t value = 0;
  double real = 0.0;
  uint32_t small;
  int code = 0;
  if (s->kind == CONFIG_REAL) {
    code = config_real(s, name, text, &real, error);
    if (!code) memcpy(member, &real, sizeof real);
  } else if (s->kind < CONFIG_REAL) {
    code = s->kind == CONFIG_TIMES ? config_time(s, name, text, &value, error)
                                   : config_choice(s, name, text, &value, error);
    small = (uint32_t)value;
    if (!code) memcpy(member, s->bytes == sizeof small ? (void *)&small : (void *)&value, s->bytes);
  } else if (strlen(text) < s->bytes) {
    memcpy(member, text, strlen(text) + 1);
  } else if (s->kind == CONFIG_SECRET) { /* the error does not quote it: errors are logged */
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "%s: longer than two keys can be", name);
  } else {
    return config_bad(error, name, text, "too long");
  }
  return code;
}

MLFAB__INTERNAL const char *mlfab__config_members(mlfab_config *config) {
  for (size_t i = 0; i < MLFAB__COUNT(config_settings); i++) {
    const config_setting *s = &config_settings[i];
    const char *member = (const char *)config + s->at;
    if (s->kind >= CONFIG_TEXT && !memchr(member, 0, s->bytes))
      return "a text of the configuration has no terminating zero byte";
    if (s->standard && !memcmp(member, "\0\0\0\0\0\0\0", s->kind < CONFIG_TEXT ? s->bytes : 1))
      (void)config_put(config, s, s->name, s->standard, NULL);
  }
  return NULL;
}

static int config_set(void *base, int table, const char *name, const char *value,
                      mlfab_error *error) {
  uint32_t bytes = 0;
  if (base) memcpy(&bytes, base, sizeof bytes);
  if (!name || !value || bytes != config_tables[table].bytes)
    return MLFAB__FAIL(
        error, MLFAB_ERR_ARGUMENT,
        "the struct, the name or the value is NULL, or the struct was not initialised");
  int of = CONFIG_TABLES;
  const config_setting *s;
  const char *nearest = mlfab__config_nearest(name);
  for (uint32_t i = 0; (s = config_at(i, &of)) != NULL && strcmp(s->name, name) != 0;) i++;
  if (s && of == table) return config_put(base, s, name, value, error);
  if (s)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "%s='%.100s': there is no such setting in this struct: %s has it", name,
                       value, config_tables[of].set);
  return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "%s='%.100s': there is no such setting%s%s", name,
                     value, nearest ? "; the nearest is " : "", nearest ? nearest : "");
}

/* Sets the members that equal those of `initial` from the environment. */
static int config_environment(void *base, const void *initial, int table, mlfab_error *error) {
  int code = 0;
  for (size_t i = 0; i < config_tables[table].n && !code; i++) {
    const config_setting *s = &config_tables[table].rows[i];
    char name[64];
    config_variable_of(s->name, name);
    const char *text = getenv(name);
    int given = memcmp((const char *)base + s->at, (const char *)initial + s->at, s->bytes) != 0;
    if (text && *text && !given) code = config_put(base, s, name, text, error);
  }
  return code;
}

/* --- rank, role, coordinator --- */

/* Call it after `dedicated` and `join` are set: the role of a server depends on them. */
static int config_role(mlfab_config *c, const char *name, const char *text, mlfab_error *error) {
  uint64_t roles = 0;
  int code = config_choice(&config_others[CONFIG_ROLE], name, text, &roles, error);
  if (code) return code;
  int alone = c->dedicated || c->join;
  if ((roles == MLFAB_ROLE_SERVER || roles == MLFAB_ROLE_REPLICA) && !alone)
    return config_bad(error, name, text, "needs MLFAB_DEDICATED=1, or MLFAB_JOIN=1");
  if (roles == MLFAB_ROLE_SCHEDULER || alone) c->roles = (uint32_t)roles;
  return 0;
}

/* Who starts processes, in the order in which they are asked. `size` NULL: the launcher tells a rank only, also of
 * processes that are strangers. Then the rank counts only if the number of workers is known. */
enum config_launcher {
  CONFIG_MLFAB,
  CONFIG_TORCHRUN,
  CONFIG_OPENMPI,
  CONFIG_PMI,
  CONFIG_SLURM,
  CONFIG_PMIX,
  CONFIG_KUBERNETES,
  CONFIG_NOBODY
};

static const struct {
  const char *rank, *size;
} config_launchers[CONFIG_NOBODY] = {{"MLFAB_RANK", "MLFAB_WORKERS"},
                                     {"RANK", "WORLD_SIZE"},
                                     {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                     {"PMI_RANK", "PMI_SIZE"},
                                     {"SLURM_PROCID", "SLURM_NTASKS"},
                                     {"PMIX_RANK", NULL},
                                     {"JOB_COMPLETION_INDEX", NULL}};

/* The value of a variable; NULL also for an empty one. */
static const char *config_variable(const char *name) {
  const char *text = name ? getenv(name) : NULL;
  return text && *text ? text : NULL;
}

/* Returns 1 in a process that srun has started. Batch scripts and the shell that salloc starts have SLURM_PROCID, too;
 * Slurm numbers such steps from 4294967291 on. */
static int config_is_task(void) {
  const char *step = config_variable("SLURM_STEP_ID");
  return step && strtoull(step, NULL, 10) < 0xfffffff0u;
}

/* The first launcher that gives a rank. `workers`: their number, if it is known otherwise. */
static enum config_launcher config_launcher(uint32_t workers) {
  int i = CONFIG_MLFAB;
  for (; i < CONFIG_NOBODY; i++) {
    if (!config_variable(config_launchers[i].rank)) continue;
    if (i == CONFIG_SLURM && !config_is_task()) continue;
    if (config_launchers[i].size || workers > 1) break;
  }
  return (enum config_launcher)i;
}

/* Takes rank and size from the launcher. */
static int config_rank(mlfab_config *c, int rank_given, mlfab_error *error) {
  enum config_launcher from = config_launcher(c->workers);
  uint64_t rank = 0, size = 0;
  const char *lost = config_variable("WORLD_SIZE");
  if (from > CONFIG_TORCHRUN && lost)
    return config_bad(error, "WORLD_SIZE", lost, "is set, but RANK is not");
  const char *name = from == CONFIG_NOBODY ? NULL : config_launchers[from].rank;
  const char *text = config_variable(name);
  if (!text) return 0;
  const char *world = config_variable(config_launchers[from].size);
  int code = config_number(name, text, 0, INT32_MAX, &rank, error);
  if (code) return code;
  if (!rank_given) c->rank = (int32_t)rank;
  if (c->workers || c->transports & MLFAB_USE_MPI) return 0;
  const char *variable = config_launchers[from].size;
  char want[80];
  snprintf(want, sizeof want, "is set, but %s is not", variable);
  if (!world) return config_bad(error, name, text, want);
  code = config_number(variable, world, 1, 65536, &size, error);
  if (code) return code;
  c->workers = (uint32_t)size;
  /* Dedicated servers have numbers of their own. */
  if (from == CONFIG_MLFAB || rank < size) return 0;
  snprintf(want, sizeof want, "with %s=%s the ranks are 0..%u", variable, world,
           (unsigned)size - 1);
  return config_bad(error, name, text, want);
}

/* A count of restarts, or 0. */
static uint64_t config_count(const char *name) {
  const char *text = config_variable(name);
  return text ? mlfab__min(strtoull(text, NULL, 10), 65535) : 0;
}

/* The number of the job. The components of a heterogeneous job (formerly: a pack) share that of the first. */
static const char *config_slurm_job(void) {
  const char *het = config_variable("SLURM_HET_JOB_ID");
  if (!het) het = config_variable("SLURM_PACK_JOB_ID");
  return het ? het : config_variable("SLURM_JOB_ID");
}

/* Writes the launchers' name of the run into `job`, 64 bytes; "": they have no name for it. */
static void config_run(char *job) {
  const char *slurm = config_slurm_job(), *torch = config_variable("TORCHELASTIC_RUN_ID");
  char name[512];
  const char *at = config_variable("MLFAB_COORDINATOR"), *port = at ? strrchr(at, ':') : NULL;
  /* torchrun's default, which its runs on this host share. Their ports differ, but each restart may have another. */
  if (torch && !strcmp(torch, "none"))
    torch = port && !strchr(port, '-') ? NULL : config_variable("MASTER_PORT");
  snprintf(name, sizeof name, "%s%.200s%s%s%.200s", slurm ? "slurm-" : "", slurm ? slurm : "",
           slurm && torch ? "-" : "", torch ? "torch-" : "", torch ? torch : "");
  size_t n = strlen(name);
  if (n > 48) /* room for the restarts */
    snprintf(name + 30, sizeof name - 30, "-%016llx", (unsigned long long)mlfab__hash(0, name, n));
  memcpy(job, name, strlen(name) + 1);
}

/* Names the job if nobody has named it: the name of the run, and the number of its restarts by launchers
 * (mlfab__job_restarts). On several hosts each agent of torchrun has its own count, so there that count is ignored. */
static void config_job(mlfab_config *c) {
  const char *agents = config_variable("GROUP_WORLD_SIZE");
  uint64_t slurm = config_count("SLURM_RESTART_COUNT"), torch = 0;
  char run[64];
  if (c->job[0]) return;
  if (!agents || !strcmp(agents, "1")) torch = config_count("TORCHELASTIC_RESTART_COUNT");
  config_run(run);
  /* A new start of the whole is later than all starts inside the former one. */
  uint64_t restarts =
      config_variable("TORCHELASTIC_RESTART_COUNT") ? 1000 * slurm + mlfab__min(torch, 999) : slurm;
  if (run[0] || restarts)
    snprintf(c->job, sizeof c->job, "%.50s~%u", run[0] ? run : "mlfab",
             (unsigned)mlfab__min(restarts, 65535));
}

/* Are all processes on this host? The launcher gives the number of processes here, or the address is the loopback's. */
static int config_is_one_host(const char *host) {
  static const char *const counts[][2] = {{"LOCAL_WORLD_SIZE", "WORLD_SIZE"},
                                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"},
                                          {"MPI_LOCALNRANKS", "PMI_SIZE"}};
  for (size_t i = 0; i < MLFAB__COUNT(counts); i++) {
    const char *here = getenv(counts[i][0]), *all = getenv(counts[i][1]);
    if (here && all && *here) return !strcmp(here, all);
  }
  return !strcmp(host, "localhost") || !strncmp(host, "127.", 4) || !strcmp(host, "::1") ||
         !strcmp(host, "[::1]");
}

/* A Unix socket needs no key: the kernel tells whose process is at the other end. All processes of the run have the
 * same `name`, and no other run of this user on this host. 0: the name is too long for an address. */
static int config_meet_here(mlfab_config *c, const char *name) {
#if defined(__linux__)
  static const char place[] = "@";
#else
  static const char place[] = "/tmp/";
#endif
  if (strlen(name) > 64) return 0;
  int n = snprintf(c->coordinator, sizeof c->coordinator, "unix:%smlfab-%u-", place,
                   (unsigned)geteuid());
  for (char *to = c->coordinator + n; (*to = *name) != 0; to++, name++) {
    if (*to == '/' || *to == ',') *to = '-'; /* a comma is between two addresses */
  }
  return 1;
}

/* Lets processes that Open MPI or Slurm has started on one host meet at a socket named after the launcher's job. */
static void config_meet(mlfab_config *c) {
  char name[256];
  enum config_launcher from = config_launcher(c->workers);
  const char *job = config_variable("PMIX_NAMESPACE"), *step = config_variable("SLURM_STEP_ID");
  const char *nodes = config_variable("SLURM_STEP_NUM_NODES");
  if (c->coordinator[0] || c->workers < 2) return;
  if (from == CONFIG_OPENMPI && job && config_is_one_host("")) {
    snprintf(name, sizeof name, "pmix-%s", job);
    (void)config_meet_here(c, name);
  }
  /* PMI's variables come from srun (--mpi=pmi2), or from an mpiexec inside the step, which gives local ranks, too. */
  if (from != CONFIG_SLURM && (from != CONFIG_PMI || config_variable("MPI_LOCALNRANKS"))) return;
  job = config_slurm_job();
  /* A component of a heterogeneous job is told of its own nodes only. */
  if (config_variable("SLURM_HET_SIZE") || job != config_variable("SLURM_JOB_ID")) return;
  if (!config_is_task() || !job || !nodes || strcmp(nodes, "1") != 0) return;
  snprintf(name, sizeof name, "slurm-%s.%s", job, step);
  (void)config_meet_here(c, name);
}

static int config_master(mlfab_config *c, mlfab_error *error) {
  const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
  uint64_t number = 0;
  if (c->coordinator[0] || !host || !*host) return 0;
  if (!port || !*port)
    return config_bad(error, "MASTER_ADDR", host, "is set, but MASTER_PORT is not");
  int code = config_number("MASTER_PORT", port, 1, 65535, &number, error);
  if (code) return code;
  if (!c->key[0] && !c->key_file[0] && !c->key_from && !c->allow_insecure &&
      config_is_one_host(host)) {
    char name[96], run[64];
    config_run(run);
    snprintf(name, sizeof name, "%u%s%s", (unsigned)number, run[0] ? "-" : "", run);
    return (void)config_meet_here(c, name), 0;
  }
  int bare6 = strchr(host, ':') && host[0] != '[';
  int n = snprintf(c->coordinator, sizeof c->coordinator, bare6 ? "tcp:[%s]:%u" : "tcp:%s:%u", host,
                   (unsigned)number);
  if (n < (int)sizeof c->coordinator) return 0;
  c->coordinator[0] = 0;
  return config_bad(error, "MASTER_ADDR", host, "too long");
}

MLFAB_API int mlfab_config_from_env(mlfab_config *config, mlfab_error *error_p) {
  if (!config || config->size != sizeof *config)
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT, "config is NULL or was not initialised");
  mlfab_config c = *config, initial;
  const char *role = getenv("MLFAB_ROLE");
  int rank_given = c.rank != 0;
  mlfab_config_init(&initial);
  /* Size 0 means all defaults; settings of the environment need the real values. */
  if (c.schedule.size == 0) mlfab_schedule_init(&c.schedule);
  int code = config_environment(&c, &initial, CONFIG_SETTINGS, error_p);
  if (!code) config_job(&c);
  if (!code && c.roles == 0 && role && *role) code = config_role(&c, "MLFAB_ROLE", role, error_p);
  if (!code && !c.join) code = config_rank(&c, rank_given, error_p); /* else server 0 tells */
  /* Over MPI nobody needs an address. */
  if (!code && !(c.transports & MLFAB_USE_MPI)) {
    code = config_master(&c, error_p);
    if (!code && !c.join) config_meet(&c);
  }
  if (!code) *config = c;
  return code;
}

MLFAB__INTERNAL int mlfab__config_has_address(const mlfab_config *config, mlfab_error *error) {
  enum config_launcher from = config_launcher(config->workers);
  const char *name = from == CONFIG_NOBODY ? NULL : config_launchers[from].size;
  const char *workers = config_variable("MLFAB_WORKERS");
  int numbered = config->roles == MLFAB_ROLE_SERVER || config->roles == MLFAB_ROLE_REPLICA
                     ? config->servers > 1
                     : config->roles != MLFAB_ROLE_SCHEDULER && config->workers > 1;
  if (from == CONFIG_NOBODY && workers && numbered && !config->join &&
      !(config->transports & MLFAB_USE_MPI))
    return config_bad(error, "MLFAB_WORKERS", workers, "is set, but MLFAB_RANK is not");
  if (config->coordinator[0] || config->workers < 2 || config->join ||
      config->transports & MLFAB_USE_MPI)
    return 0;
  if (from == CONFIG_SLURM && config_variable("SLURM_STEP_NODELIST")) name = "SLURM_STEP_NODELIST";
  if (!config_variable(name)) return 0; /* mlfab_open reports that there is no scheduler */
  return config_bad(
      error, name, getenv(name),
      "and no address of rank 0: set MLFAB_COORDINATOR for all to tcp:HOST:PORT, with "
      "its host, or on one host to unix:@any-name");
}

MLFAB_API int mlfab_config_set(mlfab_config *config, const char *name, const char *value,
                               mlfab_error *error_p) {
  if (config && config->size == sizeof *config && name && value && !strcmp(name, "role"))
    return config_role(config, name, value, error_p);
  int rank = name && !strcmp(name, "rank");
  return config_set(config, rank ? CONFIG_OTHERS : CONFIG_SETTINGS, name, value, error_p);
}

MLFAB_API int mlfab_model_options_set(mlfab_model_options *options, const char *name,
                                      const char *value, mlfab_error *error_p) {
  int code = config_set(options, CONFIG_MODEL, name, value, error_p);
  if (!code) options->consistency.size = sizeof options->consistency;
  return code;
}

MLFAB_API int mlfab_model_options_from_env(mlfab_model_options *options, mlfab_error *error_p) {
  const mlfab_model_options initial = MLFAB_MODEL_OPTIONS_INIT;
  if (!options || options->size != sizeof *options)
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT, "the options are NULL or were not initialised");
  mlfab_model_options made = *options;
  /* With `sync` set, the caller has chosen the consistency model. */
  int chosen = made.sync != 0 && made.consistency.size == 0;
  int code = config_environment(&made, &initial, CONFIG_MODEL, error_p);
  if (code) return code;
  if (made.consistency.kind == MLFAB_SYNC_PSSP &&
      made.consistency.kind != options->consistency.kind && !config_variable("MLFAB_CHANCE") &&
      !(options->consistency.chance > 0.0))
    return config_bad(error_p, "MLFAB_CONSISTENCY", "pssp",
                      "needs MLFAB_CHANCE: without it no pull waits");
  if (chosen) made.consistency = options->consistency;
  if (!chosen) made.consistency.size = sizeof made.consistency;
  *options = made;
  return 0;
}

MLFAB_API int mlfab_filter_set(mlfab_filter *filter, const char *name, const char *value,
                               mlfab_error *error_p) {
  return config_set(filter, CONFIG_FILTER, name, value, error_p);
}

MLFAB_API int mlfab_filter_from_env(mlfab_filter *filter, mlfab_error *error_p) {
  const mlfab_filter initial = {.size = sizeof initial};
  if (!filter || filter->size != sizeof *filter)
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT, "the filter is NULL or was not initialised");
  mlfab_filter made = *filter;
  int code = config_environment(&made, &initial, CONFIG_FILTER, error_p);
  if (!code) *filter = made;
  return code;
}

/* --- for people, and for bindings --- */

/* The value of a member as a text; "-": none gives it. */
static void config_say_value(const config_setting *s, const char *member, char text[64]) {
  uint32_t small;
  uint64_t value, given;
  double real;
  const char *word = s->kind < CONFIG_TEXT ? NULL : *member ? member : "-";
  memcpy(&small, member, sizeof small);
  value = small;
  if (s->bytes == sizeof value) memcpy(&value, member, sizeof value);
  memcpy(&real, &value, sizeof real);
  if (s->kind == CONFIG_TIMES) value /= CONFIG_MS;
  for (uint32_t i = 0; !word && (word = config_word_at(s, i, &given)) != NULL && given != value;
       i++)
    word = NULL;
  if (s->kind == CONFIG_REAL)
    mlfab__format(text, 64, "%g", real);
  else if (word || value < s->low || value > s->high)
    snprintf(text, 64, "%.63s", word ? word : "-");
  else
    snprintf(text, 64, "%llu%s", (unsigned long long)value, s->kind == CONFIG_TIMES ? "ms" : "");
}

MLFAB_API int mlfab_setting_text(uint32_t index, char *text, size_t room) {
  int table;
  const config_setting *s = config_at(index, &table);
  const mlfab_model_options model = MLFAB_MODEL_OPTIONS_INIT;
  const mlfab_filter filter = {.size = sizeof filter};
  mlfab_config initial;
  mlfab_error error = {.text = "': not a text"};
  char value[64];
  if (!s || !text) return MLFAB_ERR_ARGUMENT;
  mlfab_config_init(&initial);
  (void)mlfab__config_members(&initial);
  initial.workers_max = initial.servers_max = 1;
  const void *of[] = {&initial, &initial, &model, &filter};
  config_say_value(s, (const char *)of[table] + s->at, value);
  (void)config_put(&initial, s, "", "?",
                   &error); /* a text is set; else the error lists the values */
  snprintf(text, room, "%s\t%s\t%s", strstr(error.text, "': not ") + 7, value, s->meaning);
  return 0;
}

#define CONFIG_STRUCTS(X)                                                                    \
  X(error), X(buf), X(files), X(env), X(schedule), X(config), X(sync), X(sync_state),        \
      X(model_options), X(checkpoint_options), X(checkpoint_info), X(push_options),          \
      X(pull_options), X(result), X(filter_info), X(filter), X(collective), X(vec),          \
      X(partial_options), X(partial_info), X(edge), X(graph_info), X(stochastic_options),    \
      X(stochastic_info), X(stats), X(update_info), X(pull_info), X(event_info), X(measure), \
      X(io_event), X(transport_options), X(transport), X(layer)
#define CONFIG_S(of) \
  { #of, sizeof(mlfab_##of) }

static const struct {
  const char *name;
  size_t bytes;
} config_structs[] = {CONFIG_STRUCTS(CONFIG_S)};

MLFAB_API size_t mlfab_struct_size(const char *name) {
  for (size_t i = 0; name && i < MLFAB__COUNT(config_structs); i++) {
    if (!strcmp(name, config_structs[i].name)) return config_structs[i].bytes;
  }
  return 0;
}
