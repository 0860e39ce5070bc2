/* config.c - fills a configuration from the environment, which no other file reads.
 *
 * Order of precedence: what the caller set, MLFAB_*, torchrun's RANK, WORLD_SIZE, MASTER_ADDR and
 * MASTER_PORT, then the launcher's rank and size (Open MPI, PMI, and Slurm inside a step), then a rank alone
 * (PMIx, an indexed Job of Kubernetes), which counts where the number of workers is known. */
#include "../base/env.h"
#include "../base/rng.h"
#include "complete.h"
#include "../model/options.h"

#include <errno.h>
#include <math.h>
#include <unistd.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

/* A setting: the member that it sets, and the texts that it takes: a word of a list, a whole number in low..high in
 * `unit`, a real number from 0 to `most`, or a text. */
enum config_kind { CONFIG_NUMBER, CONFIG_REAL, CONFIG_TEXT, CONFIG_SECRET };

typedef struct config_word {
  const char *word; /* NULL: the end of the list */
  uint64_t value;
} config_word;

typedef struct config_setting {
  const char *name; /* the variable's name in lower case, without MLFAB_ */
  uint8_t kind;
  uint16_t at, bytes; /* of the member */
  uint64_t low, high, unit;
  const config_word *words; /* or NULL */
  double most;
  const char *(*word_of)(uint32_t value); /* or NULL: "unknown" behind the last */
} config_setting;

#define CONFIG_WORDS(...) ((const config_word[]){__VA_ARGS__, {NULL, 0}})
#define CONFIG_AT(type, member) \
  (uint16_t) offsetof(type, member), (uint16_t)sizeof(((type *)0)->member)
#define CONFIG_U(name, type, member, low, high, unit) \
  { name, CONFIG_NUMBER, CONFIG_AT(type, member), low, high, unit, NULL, 0, NULL }
#define CONFIG_W(name, type, member, low, high, ...) \
  { name, CONFIG_NUMBER, CONFIG_AT(type, member), low, high, 1, CONFIG_WORDS(__VA_ARGS__), 0, NULL }
#define CONFIG_R(name, type, member, most) \
  { name, CONFIG_REAL, CONFIG_AT(type, member), 0, 0, 1, NULL, most, NULL }
#define CONFIG_N(name, type, member, word_of) \
  { name, CONFIG_NUMBER, CONFIG_AT(type, member), 1, 0, 1, NULL, 0, word_of }
#define CONFIG_T(name, type, member, kind) \
  { name, kind, CONFIG_AT(type, member), 0, 0, 1, NULL, 0, NULL }

enum { CONFIG_MS = 1000000, CONFIG_DAY_MS = 86400000 };
#define CONFIG_HUGE 1.7976931348623157e308
#define CONFIG_INF 0.0 /* "inf" is a value, too */
#define CONFIG_TIME(name, member) CONFIG_U(name, mlfab_config, member, 1, CONFIG_DAY_MS, CONFIG_MS)

static const config_setting config_settings[] = {
    CONFIG_U("workers", mlfab_config, workers, 1, 65536, 1),
    CONFIG_U("workers_max", mlfab_config, workers_max, 1, 65536, 1),
    CONFIG_U("join", mlfab_config, join, 0, 1, 1),
    CONFIG_U("servers", mlfab_config, servers, 1, 4096, 1),
    CONFIG_U("servers_max", mlfab_config, servers_max, 1, 4096, 1),
    CONFIG_U("dedicated", mlfab_config, dedicated, 0, 1, 1),
    CONFIG_U("allow_insecure", mlfab_config, allow_insecure, 0, 1, 1),
    CONFIG_U("order_by_rate", mlfab_config, order_by_rate, 0, 1, 1),
    CONFIG_T("coordinator", mlfab_config, coordinator, CONFIG_TEXT),
    CONFIG_T("job", mlfab_config, job, CONFIG_TEXT),
    CONFIG_T("key", mlfab_config, key, CONFIG_SECRET),
    CONFIG_T("key_file", mlfab_config, key_file, CONFIG_TEXT),
    CONFIG_T("listen", mlfab_config, listen, CONFIG_TEXT),
    CONFIG_T("socket_ifname", mlfab_config, ifname, CONFIG_TEXT),
    CONFIG_TIME("timeout_ms", timeout_ns),
    CONFIG_TIME("heartbeat_ms", heartbeat_ns),
    CONFIG_TIME("silent_death_ms", silent_death_ns),
    CONFIG_U("seed", mlfab_config, seed, 1, UINT64_MAX, 1),
    CONFIG_W("transport", mlfab_config, transports, 1, 0, {"auto", 0}, {"tcp", MLFAB_USE_TCP},
             {"shm", MLFAB_USE_SHM}, {"mpi", MLFAB_USE_MPI},
             {"mpi+shm", MLFAB_USE_MPI | MLFAB_USE_SHM}),
    CONFIG_W("progress", mlfab_config, progress, 1, 0, {"thread", MLFAB_PROGRESS_THREAD},
             {"hand", MLFAB_PROGRESS_HAND}),
    CONFIG_W("kernels", mlfab_config, kernels, 1, 0, {"own", MLFAB_KERNELS_OWN},
             {"cblas", MLFAB_KERNELS_CBLAS}),
    CONFIG_W("payload_crc", mlfab_config, no_payload_crc, 1, 0, {"0", 1}, {"1", 0}),
    CONFIG_W("scheduler", mlfab_config, scheduler, 1, 0, {"none", MLFAB_SCHEDULER_NONE},
             {"beside", MLFAB_SCHEDULER_BESIDE}, {"own", MLFAB_SCHEDULER_OWN}),
    /* From 1 on: no update has a delay below 0. */
    CONFIG_W("delay_bound", mlfab_config, schedule.delay_bound, 1, UINT64_MAX - 1,
             {"none", MLFAB_UNBOUNDED}),
    CONFIG_W("accumulators", mlfab_config, accumulators, 1, 64, {"none", UINT32_MAX}),
    CONFIG_TIME("plan_ahead_ms", schedule.plan_ahead_ns),
    CONFIG_T("checkpoint_dir", mlfab_config, checkpoint_dir, CONFIG_TEXT),
    CONFIG_U("checkpoint_commits", mlfab_config, checkpoint_commits, 1, UINT64_MAX - 1, 1),
    CONFIG_U("checkpoint_keep", mlfab_config, checkpoint_keep, 1, 1000000, 1),
    CONFIG_T("resume", mlfab_config, resume, CONFIG_TEXT),
    CONFIG_U("history", mlfab_config, history, 1, UINT32_MAX, 1),
    CONFIG_T("log", mlfab_config, log, CONFIG_TEXT),
    CONFIG_T("metrics", mlfab_config, metrics, CONFIG_TEXT),
    CONFIG_T("trace", mlfab_config, trace, CONFIG_TEXT),
    CONFIG_U("mpi_lend", mlfab_config, mpi_lend, 0, 1, 1),
    CONFIG_U("metrics_ms", mlfab_config, metrics_ns, 10, CONFIG_DAY_MS, CONFIG_MS),
    CONFIG_U("replicas", mlfab_config, replicas, 0, 1, 1),
    CONFIG_R("div_max", mlfab_config, div_max, CONFIG_INF),
    CONFIG_T("vote_dir", mlfab_config, vote_dir, CONFIG_TEXT),
    CONFIG_W("ack", mlfab_config, ack, 1, 0, {"applied", MLFAB_ACK_APPLIED},
             {"durable", MLFAB_ACK_DURABLE}),
};

static const config_setting config_model[] = {
    CONFIG_N("optimizer", mlfab_model_options, optimizer, mlfab__optimizer_name),
    CONFIG_R("gamma", mlfab_model_options, gamma, 1.0),
    CONFIG_R("beta1", mlfab_model_options, beta1, 1.0),
    CONFIG_R("beta2", mlfab_model_options, beta2, 1.0),
    CONFIG_R("epsilon", mlfab_model_options, epsilon, CONFIG_HUGE),
    CONFIG_R("weight_decay", mlfab_model_options, weight_decay, CONFIG_HUGE),
    CONFIG_N("consistency", mlfab_model_options, consistency.kind, mlfab__sync_name),
    CONFIG_U("staleness", mlfab_model_options, consistency.staleness, 0, INT64_MAX, 1),
    CONFIG_U("need", mlfab_model_options, consistency.need, 1, 65536, 1),
    CONFIG_R("chance", mlfab_model_options, consistency.chance, 1.0),
    CONFIG_R("alpha", mlfab_model_options, consistency.alpha, CONFIG_HUGE),
    CONFIG_U("mean", mlfab_model_options, mean, 0, 1, 1),
    CONFIG_U("slices", mlfab_model_options, slices, 1, 4096, 1),
    CONFIG_U("tags", mlfab_model_options, tags, 1, 65536, 1),
};

static const config_setting config_filter[] = {
    CONFIG_R("filter_threshold", mlfab_filter, threshold, CONFIG_HUGE),
    CONFIG_R("filter_decay", mlfab_filter, decay, CONFIG_HUGE),
    CONFIG_R("filter_drop", mlfab_filter, drop, 1.0),
    CONFIG_R("filter_top", mlfab_filter, top, 1.0),
    CONFIG_W("filter_half", mlfab_filter, half, 1, 0, {"none", MLFAB_HALF_NONE},
             {"f16", MLFAB_HALF_F16}, {"bf16", MLFAB_HALF_BF16}),
};

/* --- names --- */

/* Names of `rank` and `role`, which are set apart, and of what other files and programs read. */
static const char *const config_others[] = {"rank", "role"};
static const char *const config_foreign[] = {"data", "build"};

/* Members of structs that have another name as a setting. */
static const char *const config_alias[][2] = {{"sync", "consistency"},
                                              {"ifname", "socket_ifname"},
                                              {"transports", "transport"},
                                              {"roles", "role"},
                                              {"no_payload_crc", "payload_crc"},
                                              {"world_size", "workers"},
                                              {"address", "coordinator"},
                                              {"timeout_ns", "timeout_ms"},
                                              {"heartbeat_ns", "heartbeat_ms"},
                                              {"metrics_ns", "metrics_ms"},
                                              {"silent_death_ns", "silent_death_ms"}};

MLFAB_API const char *mlfab_setting_name(uint32_t index) {
  const uint32_t others = (uint32_t)MLFAB__COUNT(config_others);
  const uint32_t settings = (uint32_t)MLFAB__COUNT(config_settings);
  const uint32_t model = (uint32_t)MLFAB__COUNT(config_model);
  if (index < others) return config_others[index];
  if ((index -= others) < settings) return config_settings[index].name;
  if ((index -= settings) < model) return config_model[index].name;
  index -= model;
  return index < MLFAB__COUNT(config_filter) ? config_filter[index].name : NULL;
}

/* The least number of changed, missing and added characters (Levenshtein), for names of at most 31. */
static uint32_t config_distance(const char *a, const char *b) {
  uint32_t row[32], bytes = (uint32_t)strlen(b);
  if (strlen(a) > 31 || bytes > 31) return UINT32_MAX;
  for (uint32_t k = 0; k <= bytes; k++) row[k] = k;
  for (uint32_t i = 0; a[i]; i++) {
    uint32_t corner = row[0];
    row[0] = i + 1;
    for (uint32_t k = 0; k < bytes; k++) {
      uint32_t changed = corner + (a[i] != b[k]);
      corner = row[k + 1];
      row[k + 1] = (uint32_t)mlfab__min(changed, 1 + mlfab__min(corner, row[k]));
    }
  }
  return row[bytes];
}

MLFAB__INTERNAL const char *mlfab__config_nearest(const char *name) {
  const char *best = NULL, *other;
  uint32_t least = (uint32_t)mlfab__max(1, mlfab__min(3, strlen(name) / 3));
  for (size_t i = 0; i < MLFAB__COUNT(config_alias); i++) {
    if (!strcmp(name, config_alias[i][0])) return config_alias[i][1];
  }
  for (uint32_t i = 0; (other = mlfab_setting_name(i)) != NULL; i++) {
    uint32_t far = config_distance(name, other);
    if (far > least || (best && far == least)) continue;
    best = other;
    least = far;
  }
  /* Else one that has it as its words: "timeout", "threshold". */
  for (uint32_t i = 0; !best && strlen(name) >= 4 && (other = mlfab_setting_name(i)) != NULL; i++) {
    const char *at = strstr(other, name), *end = at ? at + strlen(name) : NULL;
    if (at && (at == other || at[-1] == '_') && (*end == 0 || *end == '_')) best = other;
  }
  return best;
}

/* The variable of a setting. */
static void config_variable_of(const char *setting, char name[64]) {
  memcpy(name, "MLFAB_", 6);
  size_t k = 0;
  for (; setting[k] && k < 57; k++)
    name[6 + k] =
        (char)(setting[k] >= 'a' && setting[k] <= 'z' ? setting[k] - 'a' + 'A' : setting[k]);
  name[6 + k] = 0;
}

/* Does something read this variable? `setting`: its name in lower case, without MLFAB_. */
static int config_is_known(const char *setting) {
  const char *name;
  if (!strncmp(setting, "with_", 5)) return 1; /* switches of the build */
  if (!strncmp(setting, "mpi_", 4) || !strncmp(setting, "store_", 6)) return 1; /* of extras/ */
  for (size_t i = 0; i < MLFAB__COUNT(config_foreign); i++) {
    if (!strcmp(setting, config_foreign[i])) return 1;
  }
  for (uint32_t i = 0; (name = mlfab_setting_name(i)) != NULL; i++) {
    if (!strcmp(setting, name)) return 1;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__config_stray(char *const *variables, uint32_t *at_p, char *text,
                                        size_t room) {
  for (; variables && variables[*at_p]; ++*at_p) {
    const char *variable = variables[*at_p];
    size_t bytes = strcspn(variable, "=");
    char setting[32], name[64];
    if (strncmp(variable, "MLFAB_", 6) != 0 || bytes < 7 || bytes - 6 >= sizeof setting ||
        !variable[bytes] || !variable[bytes + 1])
      continue;
    int upper = 1;
    for (size_t k = 6; k < bytes; k++) {
      upper &= variable[k] < 'a' || variable[k] > 'z';
      setting[k - 6] =
          (char)(variable[k] >= 'A' && variable[k] <= 'Z' ? variable[k] - 'A' + 'a' : variable[k]);
    }
    setting[bytes - 6] = 0;
    if (upper && config_is_known(setting)) continue;
    const char *nearest = config_is_known(setting) ? setting : mlfab__config_nearest(setting);
    if (!nearest) continue; /* no misspelling: a script's or a test's own */
    config_variable_of(nearest, name);
    snprintf(text, room, "the variable %.*s has no meaning; the nearest is %s", (int)bytes,
             variable, name);
    ++*at_p;
    return 1;
  }
  return 0;
}

/* --- one setting --- */

static int config_bad(mlfab_error *error, const char *name, const char *value, const char *want) {
  return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "%s='%.100s': %s", name, value, want);
}

/* A whole number in low..high. */
static int config_number(const char *name, const char *text, uint64_t low, uint64_t high,
                         uint64_t *value_p, mlfab_error *error) {
  char *end, want[80];
  errno = 0;
  unsigned long long value = strtoull(text, &end, 10);
  /* Digits only: strtoull would take blanks and signs. */
  if (*end || text[0] < '0' || text[0] > '9' || errno || value < low || value > high) {
    snprintf(want, sizeof want, "not a whole number in %llu..%llu", (unsigned long long)low,
             (unsigned long long)high);
    return config_bad(error, name, text, want);
  }
  *value_p = value;
  return 0;
}

static int config_real(const char *name, const char *text, double most, double *value_p,
                       mlfab_error *error) {
  char *end, want[80];
  double value = mlfab__real(text, &end);
  int open = most == CONFIG_INF;
  if (open) most = CONFIG_HUGE;
  if (open && !strcmp(text, "inf")) {
    value = HUGE_VAL;
  } else if (*end || text[0] < '0' || text[0] > '9' || !mlfab__finite(value) || value > most) {
    mlfab__format(want, sizeof want,
                  open                 ? "not a number from 0 on, nor inf"
                  : most < CONFIG_HUGE ? "not a number from 0 to %g"
                                       : "not a number from 0 on",
                  most);
    return config_bad(error, name, text, want);
  }
  *value_p = value;
  return 0;
}

/* One of the words, or a number where the setting has a range. */
static int config_choice(const config_setting *s, const char *name, const char *text,
                         uint64_t *value_p, mlfab_error *error) {
  char want[160] = "not one of:";
  for (const config_word *w = s->words; w && w->word; w++) {
    if (!strcmp(text, w->word)) return *value_p = w->value, 0;
    size_t at = strlen(want);
    snprintf(want + at, sizeof want - at, " %s", w->word);
  }
  for (uint32_t v = 0; s->word_of && strcmp(s->word_of(v), "unknown") != 0; v++) {
    if (!strcmp(text, s->word_of(v))) return *value_p = v, 0;
    size_t at = strlen(want);
    snprintf(want + at, sizeof want - at, " %s", s->word_of(v));
  }
  if (s->word_of == mlfab__optimizer_name && !strcasecmp(text, "adamw"))
    snprintf(want + strlen(want), sizeof want - strlen(want),
             ". AdamW is adam with a weight_decay above 0");
  if (s->low > s->high) return config_bad(error, name, text, want);
  int code = config_number(name, text, s->low, s->high, value_p, error);
  *value_p *= code ? 1 : s->unit;
  return code;
}

/* Sets the member from a text. Errors use `name`; then nothing has changed. */
static int config_put(void *base, const config_setting *s, const char *name, const char *text,
                      mlfab_error *error) {
  char *member = (char *)base + s->at;
  uint64_t value = 0;
  double real = 0.0;
  uint32_t small;
  int code = 0;
  switch (s->kind) {
    case CONFIG_TEXT:
      if (strlen(text) >= s->bytes) return config_bad(error, name, text, "too long");
      memcpy(member, text, strlen(text) + 1);
      return 0;
    case CONFIG_SECRET: /* the error does not quote it: errors are logged */
      if (strlen(text) >= s->bytes)
        return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "%s: longer than two keys can be", name);
      memcpy(member, text, strlen(text) + 1);
      return 0;
    case CONFIG_REAL:
      code = config_real(name, text, s->most, &real, error);
      if (!code) memcpy(member, &real, sizeof real);
      return code;
    default:
      code = config_choice(s, name, text, &value, error);
      small = (uint32_t)value;
      if (!code)
        memcpy(member, s->bytes == sizeof small ? (void *)&small : (void *)&value, s->bytes);
      return code;
  }
}

static int config_has(const config_setting *settings, size_t n, const char *name) {
  size_t i = 0;
  while (i < n && strcmp(settings[i].name, name) != 0) i++;
  return i < n;
}

static int config_set(void *base, const config_setting *settings, size_t n, const char *name,
                      const char *value, mlfab_error *error) {
  if (!base || !name || !value)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "the struct, the name or the value is NULL");
  for (size_t i = 0; i < n; i++) {
    if (!strcmp(settings[i].name, name)) return config_put(base, &settings[i], name, value, error);
  }
  char want[120] = "there is no such setting";
  const char *nearest = mlfab__config_nearest(name);
  if (nearest && !strcmp(nearest, name))
    snprintf(want, sizeof want, "there is no such setting in this struct: %s has it",
             config_has(config_model, MLFAB__COUNT(config_model), name) ? "mlfab_model_options_set"
             : config_has(config_filter, MLFAB__COUNT(config_filter), name) ? "mlfab_filter_set"
                                                                            : "mlfab_config_set");
  else if (nearest)
    snprintf(want, sizeof want, "there is no such setting; the nearest is %s", nearest);
  return config_bad(error, name, value, want);
}

/* Sets the members that equal those of `initial` from the environment. */
static int config_environment(void *base, const void *initial, const config_setting *settings,
                              size_t n, mlfab_error *error) {
  int code = 0;
  for (size_t i = 0; i < n && !code; i++) {
    const config_setting *s = &settings[i];
    char name[64];
    config_variable_of(s->name, name);
    const char *text = getenv(name);
    int given = memcmp((const char *)base + s->at, (const char *)initial + s->at, s->bytes) != 0;
    if (text && *text && !given) code = config_put(base, s, name, text, error);
  }
  return code;
}

/* --- rank, role, coordinator --- */

static const config_setting config_roles = CONFIG_W(
    "role", mlfab_config, roles, 1, 0, {"worker", MLFAB_ROLE_WORKER}, {"server", MLFAB_ROLE_SERVER},
    {"scheduler", MLFAB_ROLE_SCHEDULER}, {"replica", MLFAB_ROLE_REPLICA});

/* Call it after `dedicated` and `join` are set: they say what the role of a server means. */
static int config_role(mlfab_config *c, const char *name, const char *text, mlfab_error *error) {
  uint64_t roles = 0;
  int code = config_choice(&config_roles, name, text, &roles, error);
  if (code) return code;
  int alone = c->dedicated || c->join;
  if ((roles == MLFAB_ROLE_SERVER || roles == MLFAB_ROLE_REPLICA) && !alone)
    return config_bad(error, name, text, "needs MLFAB_DEDICATED=1, or MLFAB_JOIN=1");
  if (roles == MLFAB_ROLE_SCHEDULER || alone) c->roles = (uint32_t)roles;
  return 0;
}

/* Who starts processes, in the order in which they are asked. `size` NULL: the launcher tells a rank only, and also of
 * processes that have nothing to do with each other, so the rank counts only where the number of workers is known. */
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
} config_launchers[CONFIG_NOBODY] = {
    [CONFIG_MLFAB] = {"MLFAB_RANK", "MLFAB_WORKERS"},
    [CONFIG_TORCHRUN] = {"RANK", "WORLD_SIZE"},
    [CONFIG_OPENMPI] = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    [CONFIG_PMI] = {"PMI_RANK", "PMI_SIZE"},
    [CONFIG_SLURM] = {"SLURM_PROCID", "SLURM_NTASKS"},
    [CONFIG_PMIX] = {"PMIX_RANK", NULL},
    [CONFIG_KUBERNETES] = {"JOB_COMPLETION_INDEX", NULL}};

/* The value of a variable; NULL also for an empty one. */
static const char *config_variable(const char *name) {
  const char *text = name ? getenv(name) : NULL;
  return text && *text ? text : NULL;
}

/* 1 in a process that srun has started. Batch scripts and the shell that salloc starts have SLURM_PROCID, too; Slurm
 * numbers such steps from 4294967291 on. */
static int config_is_task(void) {
  const char *step = config_variable("SLURM_STEP_ID");
  return step && strtoull(step, NULL, 10) < 0xfffffff0u;
}

/* The first launcher that tells a rank. `workers`: their number, when it is known otherwise. */
static enum config_launcher config_launcher(uint32_t workers) {
  int i = CONFIG_MLFAB;
  for (; i < CONFIG_NOBODY; i++) {
    if (!config_variable(config_launchers[i].rank)) continue;
    if (i == CONFIG_SLURM && !config_is_task()) continue;
    if (config_launchers[i].size || workers > 1) break;
  }
  return (enum config_launcher)i;
}

/* Rank and size from the launcher. */
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
  if (!world && from == CONFIG_MLFAB)
    return config_bad(error, name, text, "is set, but MLFAB_WORKERS is not");
  if (!world)
    return config_bad(error, name, text,
                      "is set, but the variable with the number of processes is not");
  code = config_number(config_launchers[from].size, world, 1, 65536, &size, error);
  if (code) return code;
  c->workers = (uint32_t)size;
  if (from == CONFIG_MLFAB || rank < size)
    return 0; /* dedicated servers have numbers of their own */
  char want[80];
  snprintf(want, sizeof want, "with %s=%u the ranks are 0..%u", config_launchers[from].size,
           (unsigned)size, (unsigned)size - 1);
  return config_bad(error, name, text, want);
}

/* A count of restarts, or 0. */
static uint64_t config_count(const char *name) {
  const char *text = config_variable(name);
  return text ? mlfab__min(strtoull(text, NULL, 10), 65535) : 0;
}

/* The number of the job: the components of a heterogeneous one (once: a pack) share that of the first. */
static const char *config_slurm_job(void) {
  const char *het = config_variable("SLURM_HET_JOB_ID");
  if (!het) het = config_variable("SLURM_PACK_JOB_ID");
  return het ? het : config_variable("SLURM_JOB_ID");
}

/* The name of the run, as its launchers know it, in `job` with 64 bytes; "": they have no name for it. */
static void config_run(char *job) {
  const char *slurm = config_slurm_job(), *torch = config_variable("TORCHELASTIC_RUN_ID");
  char name[512];
  /* torchrun's default, which all its runs on this host would share. Their ports differ. */
  if (torch && !strcmp(torch, "none")) torch = config_variable("MASTER_PORT");
  snprintf(name, sizeof name, "%s%.200s%s%s%.200s", slurm ? "slurm-" : "", slurm ? slurm : "",
           slurm && torch ? "-" : "", torch ? "torch-" : "", torch ? torch : "");
  size_t n = strlen(name);
  if (n > 48) /* room for the restarts */
    snprintf(name + 30, sizeof name - 30, "-%016llx", (unsigned long long)mlfab__hash(0, name, n));
  memcpy(job, name, strlen(name) + 1);
}

/* The name of the job where nobody has given one: that of the run, and how often its launchers have started it again
 * (mlfab__job_restarts). Agents of torchrun on several hosts count each for itself, so there that count tells nothing. */
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

/* Are all processes on this host? The launcher tells how many it has started here, or the address is the loopback's. */
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

/* A Unix socket, which needs no key: the kernel tells whose process is at the other end. `name`: the same in all
 * processes of the run, and in no other run of this user on this host. 0 when it is too long for an address. */
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

/* Processes of one host that Open MPI or Slurm has started meet at a socket with the name of the launcher's job. */
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
  /* PMI's variables are srun's own (--mpi=pmi2), or those of an mpiexec inside the step, which tells of local ranks. */
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
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT, "config is NULL or was not initialised");
  }
  mlfab_config c = *config, initial;
  const char *role = getenv("MLFAB_ROLE");
  int rank_given = c.rank != 0;
  mlfab_config_init(&initial);
  /* Size 0 means all defaults; settings of the environment need the real ones. */
  if (c.schedule.size == 0) mlfab_schedule_init(&c.schedule);
  int code =
      config_environment(&c, &initial, config_settings, MLFAB__COUNT(config_settings), error_p);
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
  if (!config_variable(name)) return 0; /* mlfab_open says that there is none */
  return config_bad(
      error, name, getenv(name),
      "and no address of rank 0: set MLFAB_COORDINATOR for all to tcp:HOST:PORT, with "
      "its host, or on one host to unix:@any-name");
}

MLFAB_API int mlfab_config_set(mlfab_config *config, const char *name, const char *value,
                               mlfab_error *error_p) {
  uint64_t rank = 0;
  if (config && config->size != sizeof *config)
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT, "config was not initialised");
  if (config && name && value && !strcmp(name, "role"))
    return config_role(config, name, value, error_p);
  if (!config || !name || !value || strcmp(name, "rank") != 0)
    return config_set(config, config_settings, MLFAB__COUNT(config_settings), name, value, error_p);
  int code = config_number(name, value, 0, INT32_MAX, &rank, error_p);
  if (!code) config->rank = (int32_t)rank;
  return code;
}

MLFAB_API int mlfab_model_options_set(mlfab_model_options *options, const char *name,
                                      const char *value, mlfab_error *error_p) {
  if (options && options->size != sizeof *options)
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT, "the options were not initialised");
  int code = config_set(options, config_model, MLFAB__COUNT(config_model), name, value, error_p);
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
  int code = config_environment(&made, &initial, config_model, MLFAB__COUNT(config_model), error_p);
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
  if (filter && filter->size != sizeof *filter)
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT, "the filter was not initialised");
  return config_set(filter, config_filter, MLFAB__COUNT(config_filter), name, value, error_p);
}

MLFAB_API int mlfab_filter_from_env(mlfab_filter *filter, mlfab_error *error_p) {
  const mlfab_filter initial = {.size = sizeof initial};
  if (!filter || filter->size != sizeof *filter)
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT, "the filter is NULL or was not initialised");
  mlfab_filter made = *filter;
  int code =
      config_environment(&made, &initial, config_filter, MLFAB__COUNT(config_filter), error_p);
  if (!code) *filter = made;
  return code;
}

/* --- for bindings --- */

#define CONFIG_S(name) \
  { #name, sizeof(mlfab_##name) }

static const struct {
  const char *name;
  size_t bytes;
} config_structs[] = {
    CONFIG_S(error),
    CONFIG_S(buf),
    CONFIG_S(files),
    CONFIG_S(env),
    CONFIG_S(schedule),
    CONFIG_S(config),
    CONFIG_S(sync),
    CONFIG_S(sync_state),
    CONFIG_S(model_options),
    CONFIG_S(checkpoint_options),
    CONFIG_S(checkpoint_info),
    CONFIG_S(push_options),
    CONFIG_S(pull_options),
    CONFIG_S(result),
    CONFIG_S(filter_info),
    CONFIG_S(filter),
    CONFIG_S(collective),
    CONFIG_S(vec),
    CONFIG_S(partial_options),
    CONFIG_S(partial_info),
    CONFIG_S(edge),
    CONFIG_S(graph_info),
    CONFIG_S(stochastic_options),
    CONFIG_S(stochastic_info),
    CONFIG_S(stats),
    CONFIG_S(update_info),
    CONFIG_S(pull_info),
    CONFIG_S(event_info),
    CONFIG_S(measure),
    CONFIG_S(io_event),
    CONFIG_S(transport_options),
    CONFIG_S(transport),
    CONFIG_S(layer),
};

MLFAB_API size_t mlfab_struct_size(const char *name) {
  for (size_t i = 0; name && i < MLFAB__COUNT(config_structs); i++) {
    if (!strcmp(name, config_structs[i].name)) return config_structs[i].bytes;
  }
  return 0;
}
