/* open.c - opens a context over the compiled-in transports. Top floor: only this file names them; a context is given
 * tables.
 *
 * It opens, best first: the caller's own transport (config.transport); the transports of the list that
 * config.transports names (0: all of them, or none if the caller has its own); and the transport of the coordinator's
 * address. Peers get the address of the last only if config.transports names it. A node publishes its addresses in the
 * same order, and a peer calls those that its transports reach, one after the other, until one answers
 * (../api/calling.c). So a node may reach each peer by another transport. A transport that is not named may fail:
 * shared memory does with two users, without /proc, under a filter of system calls or a limit of file sizes.
 *
 * An address belongs to the transport whose name it begins with ("shm:..."). An address that begins with no name
 * ("host:port", "unix:/path") belongs to the last transport of the list. If there is only the caller's own transport,
 * all addresses belong to it. */
#include "../api/complete.h"
#include "../api/context.h"
#if MLFAB_WITH_MPI
#include "../../transports/mpi.h"
#endif
#if MLFAB_WITH_KEYS
#include "../api/key_source.h"
#endif
#if MLFAB_WITH_LEND || MLFAB_WITH_COLL
#include "areas.h"
#define OPEN_AREAS mlfab__areas_functions
#else
#define OPEN_AREAS NULL
#endif
#if MLFAB_WITH_COLL
#include "../api/calls_coll.h"
#include "../base/shm_coll.h"
#define OPEN_SHARING mlfab__shared_memory()
#define OPEN_SHM_COLL mlfab__shm_coll_functions
#else
#define OPEN_SHARING NULL
#define OPEN_SHM_COLL NULL
#endif

#if MLFAB_WITH_CHECKPOINT
#include "../api/disk.h"
#include "dirs.h"
#define OPEN_FILES mlfab__disk_functions()
#define OPEN_DIRS mlfab__dirs_check
#else
#define OPEN_FILES NULL
#define OPEN_DIRS(config, ask, doubt_p, error) 0
#endif

#if MLFAB_WITH_DEVICE
#include "../api/staging.h"
#endif

#if MLFAB_WITH_GROWTH
#include "join.h"
#endif

#if MLFAB_WITH_TELEMETRY
#include "../api/telemetry.h"
#define OPEN_OBSERVER mlfab__telemetry_observer()
#else
#define OPEN_OBSERVER NULL
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct open_transport {
  uint32_t use; /* MLFAB_USE_* */
  const char *name;
  const char *without;                   /* the switch that leaves it out */
  uint8_t unasked;                       /* 1: opened if the configuration names no transport */
  uint8_t keyless;                       /* 1: its addresses need no key */
  const mlfab_transport *(*table)(void); /* returns NULL if the transport is left out */
  /* Memory that reachable processes may map, and collectives in it; or NULL. */
  const mlfab__context_areas *(*areas)(void);
  const struct mlfab__shm_coll_table *(*coll)(void);
} open_transport;

static const open_transport open_list[] = {
    {MLFAB_USE_SHM, "shm", "MLFAB_WITH_SHM", 1, 1, mlfab_transport_shm, OPEN_AREAS, OPEN_SHM_COLL},
    {MLFAB_USE_MPI, "mpi", "MLFAB_WITH_MPI", 0, 1, mlfab_transport_mpi, NULL, NULL},
    {MLFAB_USE_TCP, "tcp", "MLFAB_WITH_TCP", 1, 0, mlfab_transport_tcp, NULL, NULL},
};

enum { OPEN_COUNT = (int)MLFAB__COUNT(open_list) };
_Static_assert(OPEN_COUNT + 1 <= MLFAB__CONTEXT_TRANSPORTS,
               "the configuration has too many transports");

static int open_begins(const char *address, const char *name) {
  size_t n = strlen(name);
  return !strncmp(address, name, n) && address[n] == ':';
}

/* The name of the transport that the address belongs to. */
static const char *open_owner(const mlfab_config *c, const char *address) {
  if (c->transport && (!c->transports || open_begins(address, c->transport->name)))
    return c->transport->name;
  for (int i = 0; i < OPEN_COUNT; i++) {
    if (open_begins(address, open_list[i].name)) return open_list[i].name;
  }
  return open_list[OPEN_COUNT - 1].name;
}

/* Returns 1 if this node listens at the coordinator's address. */
static int open_coordinates(const mlfab_config *c) {
  if (c->rank != 0 || c->roles == MLFAB_ROLE_SCHEDULER || c->join) return 0;
  return !c->dedicated || c->roles == MLFAB_ROLE_SERVER;
}

/* If `coordinator` has two addresses: chooses the listening address of server 0, or of its replica. */
static void open_meeting(mlfab_config *c) {
  const char *other = strchr(c->coordinator, ',');
  int replica = c->rank == 0 && c->roles == MLFAB_ROLE_REPLICA;
  if (!other || (!replica && !open_coordinates(c))) return;
  size_t n = (size_t)(other - c->coordinator);
  if (replica)
    memcpy(c->listen, other + 1, strlen(other + 1) + 1);
  else
    memcpy(c->listen, c->coordinator, n);
  if (!replica) c->listen[n] = 0;
}

static mlfab__context_choice open_choice(const mlfab_config *c, const mlfab_transport *table,
                                         int publish) {
  mlfab__context_choice choice = {.table = table, .listen = "", .publish = publish};
  if (c->listen[0] && !strcmp(open_owner(c, c->listen), table->name)) choice.listen = c->listen;
  if (open_coordinates(c) && !strchr(c->coordinator, ',') &&
      !strcmp(open_owner(c, c->coordinator), table->name))
    choice.listen = c->coordinator;
  return choice;
}

static int open_own(const mlfab_config *c, mlfab__context_choice *choices, uint32_t *n_p,
                    mlfab_error *error) {
  const mlfab_transport *own = c->transport;
  if (own->abi != MLFAB_TRANSPORT_ABI || own->size < offsetof(mlfab_transport, trouble))
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "the transport was built for another version of mlfab_transport");
  if (own->caps & MLFAB_CAP_VIRTUAL && c->transports)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "transports: the transport '%s' has virtual time, and excludes any other",
                       own->name);
  choices[(*n_p)++] = open_choice(c, own, 1);
  return 0;
}

static int open_missing(const open_transport *t, const char *why, mlfab_error *error) {
  return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED,
                     "%s needs the transport '%s', which was left out (%s=0)", why, t->name,
                     t->without);
}

/* Does the address, or one of two addresses with a comma between them, lead to other hosts? */
static int open_is_remote(const char *address) {
  const char *other = strchr(address, ',');
  if (other && open_is_remote(other + 1)) return 1;
  if (!*address || open_begins(address, "unix")) return 0;
  for (int i = 0; i < OPEN_COUNT; i++)
    if (open_list[i].keyless && open_begins(address, open_list[i].name)) return 0;
  if (open_begins(address, "tcp") || open_begins(address, "tls")) address += 4;
  return strncmp(address, "127.", 4) != 0 && !open_begins(address, "localhost") &&
         !open_begins(address, "[::1]");
}

static int open_choose(const mlfab_config *c, mlfab__context_choice *choices, uint32_t *n_p,
                       mlfab_error *error) {
  uint32_t all = 0;
  uint32_t nodes = c->workers_max + (c->dedicated ? (1 + c->replicas) * c->servers_max : 0);
  nodes += (c->scheduler == MLFAB_SCHEDULER_OWN) + c->join;
  for (int i = 0; i < OPEN_COUNT; i++) all |= open_list[i].use;
  if (c->transports & ~all) return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "unknown transports");
  int code = c->transport ? open_own(c, choices, n_p, error) : 0;
  if (code || nodes == 1 || (c->transport && !c->transports)) return code;
  const char *meeting = open_owner(c, c->coordinator);
  for (int i = 0; i < OPEN_COUNT; i++) {
    const open_transport *t = &open_list[i];
    const mlfab_transport *table = t->table();
    int asked = (c->transports & t->use) != 0, meets = !strcmp(meeting, t->name);
    if (!table && asked) return open_missing(t, "the configuration", error);
    if (!table && meets) return open_missing(t, c->coordinator, error);
    if (!table || (!asked && !meets && (c->transports || !t->unasked))) continue;
    mlfab__context_choice *choice = &choices[(*n_p)++];
    *choice = open_choice(c, table, asked || !c->transports);
    choice->spare = !asked && !meets && !choice->listen[0];
    if (c->coordinator[0] && strcmp(meeting, "mpi") != 0 && !open_is_remote(c->coordinator))
      choice->neighbours = nodes;
    choice->areas = t->areas ? t->areas() : NULL;
    choice->shm_coll = t->coll ? t->coll() : NULL;
  }
  return 0;
}

/* Finds the key, in the place that the configuration gives. With a key, the given addresses may belong to any host. */
static int open_key(mlfab_config *c, mlfab_error *error) {
#if MLFAB_WITH_KEYS
  int code = mlfab__key_source(c, error);
  if (!code && c->key[0] && (open_is_remote(c->coordinator) || open_is_remote(c->listen)))
    c->allow_insecure = 1;
  return code;
#else
  if (!c->key[0] && !c->key_file[0] && !c->key_from) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED,
                     "configuration: a key (MLFAB_KEY) needs the code of keys, which was left out "
                     "(MLFAB_WITH_KEYS is 0); mlfab-run --insecure makes none");
#endif
}

static void open_forget(mlfab_config *c) {
#if MLFAB_WITH_KEYS
  mlfab__key_forget(c);
#else
  (void)c;
#endif
}

/* Over MPI the communicator defines the world. Replaces *config_p by a copy, in `made`, with that world. */
static int open_world(const mlfab_config **config_p, mlfab_config *made, mlfab_error *error) {
  const mlfab_config *given = *config_p;
  /* mlfab__config_complete reports a wrong size. */
  if (!given || !MLFAB__HAS(given, mlfab_config, entropy) || given->size > 1 << 20) return 0;
  if (!(given->transports & MLFAB_USE_MPI)) {
    if (memchr(given->coordinator, 0, sizeof given->coordinator) &&
        open_begins(given->coordinator, "mpi"))
      return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                         "coordinator: over MPI (transports: MLFAB_USE_MPI) it must be empty");
    return 0;
  }
#if MLFAB_WITH_MPI
  memset(made, 0, sizeof *made);
  memcpy(made, given, mlfab__min(given->size, sizeof *made));
  *config_p = made;
  if (made->transport)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "transports: MLFAB_USE_MPI excludes a transport of the caller");
  return mlfab__mpi_prepare(made, error);
#else
  (void)made;
  return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED,
                     "the configuration needs the transport 'mpi', which was left out "
                     "(MLFAB_WITH_MPI=0)");
#endif
}

/* --- messages to mlfab-run ---
 *
 * _MLFAB_OPENED is "PATH" or "PATH PLACE": a pipe, and the place of this rank in mlfab-run's table. A context that was
 * opened writes 'o' and the place; when it is closed or abandoned, it writes 'c' and the place. It keeps the pipe open in
 * between, since a program may change its environment or its user. A forked child writes nothing about the contexts of
 * its parent. A program that is executed does not have the pipe, and opens it anew. */

/* If the pipe is full, the message is lost. */
static void open_say(const mlfab *ctx, char kind) {
  char text[16];
  int n = snprintf(text, sizeof text, "%c%s", kind, ctx->place);
  if (write(ctx->report, text, (size_t)n) < 0) return;
}

static void open_closed(mlfab *ctx, int child) {
  if (!child) open_say(ctx, 'c');
  close(ctx->report);
}

static void open_tell(mlfab *ctx) {
  const char *told = getenv("_MLFAB_OPENED");
  char path[MLFAB__TEXT_MAX];
  struct stat status;
  if (!told || strlen(told) >= sizeof path) return;
  memcpy(path, told, strlen(told) + 1);
  char *place = strchr(path, ' ');
  if (place) *place++ = 0;
  /* Opens as a reader, too: a write then cannot end this process with SIGPIPE when mlfab-run is gone. */
  int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return;
  if (fstat(fd, &status) || !S_ISFIFO(status.st_mode)) {
    close(fd);
    return;
  }
  snprintf(ctx->place, sizeof ctx->place, "%.7s", place ? place : "");
  ctx->report = fd;
  ctx->freed = open_closed;
  open_say(ctx, 'o');
}

static int open_start(const mlfab_config *config, int ask, mlfab **ctx_p, mlfab_error *error_p) {
  mlfab_error error;
  mlfab_config c, world;
  mlfab__context_choice choices[MLFAB__CONTEXT_TRANSPORTS];
  uint32_t n = 0;
  int doubt = 0;
  memset(&error, 0, sizeof error);
  memset(&c, 0, sizeof c);
  error.rank = MLFAB_NO_RANK;
  int code = ctx_p ? open_world(&config, &world, &error)
                   : MLFAB__FAIL(&error, MLFAB_ERR_ARGUMENT, "ctx_p is NULL");
  if (!code) code = mlfab__config_complete(config, &c, &error);
  if (!code && c.join && !ask && MLFAB_WITH_GROWTH)
    code = MLFAB__FAIL(&error, MLFAB_ERR_UNSUPPORTED,
                       "open_start: joining (config.join) waits for server 0: call mlfab_open");
  if (!code) code = OPEN_DIRS(&c, ask, &doubt, &error);
  if (!code) open_meeting(&c);
  if (!code) code = open_key(&c, &error);
  if (!code) code = open_choose(&c, choices, &n, &error);
  if (!code)
    code = mlfab__context_open(&c, choices, n, mlfab_node_open, OPEN_SHARING, OPEN_OBSERVER,
                               OPEN_FILES, ctx_p, &error);
  if (!code) open_tell(*ctx_p);
  if (!code && doubt)
    mlfab__log(&(*ctx_p)->node->env, MLFAB_LOG_WARN,
               "checkpoint_dir '%.200s' cannot be written to now: %s", c.checkpoint_dir,
               mlfab__reason(doubt));
#if MLFAB_WITH_DEVICE
  if (!code) mlfab__staging_guard(*ctx_p);
#endif
  open_forget(&c);
  if (config == &world) open_forget(&world);
  if (error_p) *error_p = error;
  return code;
}

static int open_test_ready(mlfab *ctx, void *what) {
  (void)what;
  return mlfab_node_ready(ctx->node, NULL) != 0;
}

MLFAB_API int mlfab_open_start(const mlfab_config *config, mlfab **ctx_p, mlfab_error *error_p) {
  return open_start(config, 0, ctx_p, error_p);
}

static int open_wait(const mlfab_config *config, int ask, mlfab **ctx_p, mlfab_error *error_p) {
  mlfab *ctx = NULL;
  int code = open_start(config, ask, &ctx, error_p);
  if (code) return code;
  mlfab__context_enter(ctx);
  /* The node has the deadline for joining, and its error says which ranks are missing. */
  mlfab__context_until(ctx, MLFAB__NEVER, open_test_ready, NULL);
  code = mlfab_node_ready(ctx->node, error_p);
  if (code != 1 && error_p) mlfab__context_trouble(ctx, error_p);
  (void)mlfab__context_leave(ctx, 0);
  if (code == 1) {
    *ctx_p = ctx;
    return 0;
  }
  mlfab_abandon(&ctx);
  return code;
}

MLFAB_API int mlfab_open(const mlfab_config *config, mlfab **ctx_p, mlfab_error *error_p) {
  if (!ctx_p) return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT, "ctx_p is NULL");
#if MLFAB_WITH_GROWTH
  static const mlfab__open_steps steps = {open_key, open_wait, open_forget};
  /* An older header's configuration has another layout: open_wait refuses it. */
  if (config && MLFAB__HAS(config, mlfab_config, entropy) && config->join == 1)
    return mlfab__open_join(config, &steps, ctx_p, error_p);
#endif
  return open_wait(config, 0, ctx_p, error_p);
}

extern char **environ;

/* Worker 0 alone warns of misspelt variables: mostly, all ranks have the same variables. */
static void open_warn(const mlfab_config *c) {
  char text[200];
  uint32_t at = 0;
  if (c->rank != 0 || (c->roles & ~(uint32_t)MLFAB_ROLE_WORKER)) return;
  while (mlfab__config_stray(environ, &at, text, sizeof text)) fprintf(stderr, "mlfab: %s\n", text);
}

MLFAB_API int mlfab_open_env(mlfab **ctx_p, mlfab_error *error_p) {
  mlfab_config config;
  mlfab_config_init(&config);
  int code = mlfab_config_from_env(&config, error_p);
  if (!code) open_warn(&config);
  if (!code) code = mlfab__config_has_address(&config, error_p);
  if (!code) code = mlfab_open(&config, ctx_p, error_p);
  open_forget(&config);
  if (code) return code;
  (*ctx_p)->from_env = 1;
  if (config.workers == 0 && config.rank == 0 && config.coordinator[0] == 0 && !config.join &&
      !(config.transports & MLFAB_USE_MPI))
    fprintf(stderr, "mlfab: no launcher has set its variables: a world of one worker\n");
  return 0;
}
