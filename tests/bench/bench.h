/* bench.h - shared by the parts of the benchmark.
 *
 * A team is a contestant at work in its own processes: a server and some workers, which wait until the
 * benchmark lets them run a trial, so that several teams can be measured in turns. A player is a kind of
 * contestant: mlfab, a plain socket loop, ZeroMQ ... The processes of a team and the benchmark communicate
 * through one piece of shared memory, the team itself. */
#ifndef MLFAB_BENCH_H
#define MLFAB_BENCH_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum { WORKERS_MAX = 4, WINDOW_MAX = 64, MIB = 1 << 20 };

enum bench_what {
  BENCH_PUSH = 1,   /* arrays of float32 that the server adds to its model, acknowledged */
  BENCH_PULL = 2,   /* the model, to the worker */
  BENCH_STREAM = 3, /* pushes that are not waited for one by one */
  BENCH_VIEW = 4    /* views of the model, each released before the next; nothing is read */
};
enum bench_code { BENCH_PLAIN, BENCH_CRC, BENCH_KEYED, BENCH_TLS, BENCH_ALLOC };
#ifndef MLFAB_BENCH_TLS
#define MLFAB_BENCH_TLS 1 /* 0: OpenSSL is not installed */
#endif
enum bench_transport { BENCH_TCP = 1, BENCH_SHM = 2 };

/* The work of every player in a trial. */
typedef struct bench_job {
  int what, transport;
  int spin;     /* poll forever instead of sleeping */
  int code;     /* mlfab: what protects payloads over TCP; ALLOC: the buffer is of mlfab_alloc */
  size_t bytes; /* of a message */
  uint32_t workers;  /* 1..WORKERS_MAX */
  uint32_t messages; /* per worker and trial */
  uint32_t window;   /* messages in flight at a time */
} bench_job;

struct bench_player;

typedef struct bench_team {
  bench_job job;
  const struct bench_player *player;
  pid_t server, worker[WORKERS_MAX];
  int fd[WORKERS_MAX][2]; /* socket players: one connection per worker, the server's end second */
  char address[128];      /* the server's address, for players that need one */
  _Alignas(64) _Atomic uint32_t ready;
  _Alignas(64) _Atomic uint32_t round;   /* the trial; workers sleep until it changes */
  _Alignas(64) _Atomic uint32_t arrived; /* workers at the start line, summed over all trials */
  _Alignas(64) _Atomic uint32_t done;    /* workers at the finish line, summed over all trials */
  _Alignas(64) _Atomic uint32_t active;  /* a trial is running: spinning is allowed */
  _Alignas(64) _Atomic uint32_t quit, failed;
  _Alignas(64) _Atomic uint32_t asked; /* the server counts its allocations when this changes */
  _Alignas(64) _Atomic uint32_t answered;
  uint64_t begin_ns[WORKERS_MAX], end_ns[WORKERS_MAX];
  uint64_t allocations[WORKERS_MAX + 1]; /* so far; the server's last */
  /* The bare shared-memory loop. */
  _Alignas(64) _Atomic uint32_t ping;
  _Alignas(64) _Atomic uint32_t pong;
  _Alignas(64) unsigned char message[2][64];
} bench_team;

/* A kind of contestant. Its two processes' functions return when the team quits. */
typedef struct bench_player {
  const char *name;
  int grace; /* 1: closes by itself; 0: is killed at the end of the cell */
  /* Called before the processes start; NULL: nothing to prepare. Non-zero: cannot play. */
  int (*prepare)(bench_team *team);
  void (*server)(bench_team *team);
  void (*worker)(bench_team *team, uint32_t rank);
} bench_player;

extern const bench_player bench_mlfab, bench_copy_loop, bench_add_loop, bench_futex_loop,
    bench_zeromq;

/* The result of a trial. */
typedef struct bench_trial {
  double seconds;     /* first worker's start to last worker's end */
  double server_cpu;  /* seconds */
  double worker_cpu;  /* seconds, all workers */
  double allocations; /* of all processes; mlfab only */
} bench_trial;

/* team.c: the benchmark's side. start returns NULL, after printing the reason, when the contestant cannot
 * play. */
bench_team *bench_team_start(const bench_player *player, const bench_job *job);
int bench_team_trial(bench_team *team, bench_trial *trial_p);
int bench_team_idle(bench_team *team, double seconds, bench_trial *trial_p);
void bench_team_stop(bench_team *team);

/* team.c: the side of the team's processes. */
void bench_ready(bench_team *team);
/* Sleeps until a trial starts and all workers are there: returns 1, or 0 after the last trial. */
int bench_next(bench_team *team, uint32_t rank);
void bench_done(bench_team *team, uint32_t rank);
/* Prints the reason, and ends this process as a failure of the team. */
void bench_fail(bench_team *team, const char *who, const char *why);
void bench_futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t timeout_ns);
void bench_futex_wake(_Atomic uint32_t *word);

/* limits.c: the limits of the machine with one core; bytes of one array per second, and seconds per round
 * trip of one cache line between two cores. */
double bench_limit_add(size_t bytes);
double bench_limit_copy(size_t bytes);
double bench_limit_line(void);
void bench_add(float *restrict a, const float *restrict b, size_t n);

/* Zeroed memory whose pages have been touched; ends the process when there is none. */
void *bench_memory(size_t bytes);
uint64_t bench_now_ns(void);
void bench_pin(int cpu); /* this thread; -1: to all */
int bench_cpus(void);

/* memory.c: memory that server and worker allocate with this rule and consistency, in multiples of the
 * model. */
int bench_memory_use(uint32_t rule, uint32_t sync, double *server_p, double *worker_p);

#endif
