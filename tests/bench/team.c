/* team.c - contestants as processes: started together, run one trial at a time, never waited for longer
 * than some seconds. */
#include "bench.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE_S = 20, LIFE_S = 300 };

uint64_t bench_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int bench_cpus(void) {
  static int cpus;
  cpu_set_t set;
  if (!cpus) cpus = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
  return cpus;
}

void bench_pin(int cpu) {
  static cpu_set_t all;
  static int known;
  cpu_set_t one;
  if (!known) known = sched_getaffinity(0, sizeof all, &all) == 0;
  if (cpu >= 0 && bench_cpus() < 2) return;
  CPU_ZERO(&one);
  /* The n-th of the processors that this process may use. */
  int n = 0;
  for (size_t i = 0; i < CPU_SETSIZE && cpu >= 0; i++) {
    if (CPU_ISSET(i, &all) && n++ == cpu) CPU_SET(i, &one);
  }
  sched_setaffinity(0, sizeof one, cpu >= 0 ? &one : &all);
}

void *bench_memory(size_t bytes) {
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    fprintf(stderr, "bench: out of memory\n");
    _exit(1);
  }
  madvise(memory, bytes, MADV_HUGEPAGE);
  memset(memory, 0, bytes);
  return memory;
}

void bench_futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t timeout_ns) {
  struct timespec t = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
  syscall(SYS_futex, word, FUTEX_WAIT, value, timeout_ns ? &t : NULL, NULL, 0);
}

void bench_futex_wake(_Atomic uint32_t *word) {
  syscall(SYS_futex, word, FUTEX_WAKE, 1 << 20, NULL, NULL, 0);
}

/* ---------------------------------------------------------------------------------------------
 * The side of the processes
 */
void bench_ready(bench_team *team) {
  atomic_fetch_add(&team->ready, 1);
  bench_futex_wake(&team->ready);
}

void bench_fail(bench_team *team, const char *who, const char *why) {
  if (!atomic_exchange(&team->failed, 1)) {
    fprintf(stderr, "bench: %s, %s: %s\n", team->player->name, who, why);
  }
  bench_futex_wake(&team->ready);
  bench_futex_wake(&team->done);
  _exit(1);
}

int bench_next(bench_team *team, uint32_t rank) {
  /* The number of trials of this worker that the finish line has counted. */
  static uint32_t made;
  while (atomic_load(&team->round) == made) {
    if (atomic_load(&team->quit)) return 0;
    bench_futex_wait(&team->round, made, 0);
  }
  made++;
  if (atomic_load(&team->quit)) return 0;
  atomic_fetch_add(&team->arrived, 1);
  while (atomic_load(&team->arrived) < made * team->job.workers) sched_yield();
  team->begin_ns[rank] = bench_now_ns();
  return 1;
}

void bench_done(bench_team *team, uint32_t rank) {
  team->end_ns[rank] = bench_now_ns();
  atomic_fetch_add(&team->done, 1);
  bench_futex_wake(&team->done);
}

/* ---------------------------------------------------------------------------------------------
 * The benchmark's side
 */

/* Two processes of one worker and server get a core each. The system places larger teams, and ZeroMQ, which
 * has I/O threads. */
static pid_t process_start(bench_team *team, int rank) {
  pid_t parent = getpid(), pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  alarm(LIFE_S);
  if (team->job.workers == 1 && team->player != &bench_zeromq) bench_pin(rank < 0 ? 1 : 0);
  if (rank < 0) {
    team->player->server(team);
  } else {
    team->player->worker(team, (uint32_t)rank);
  }
  _exit(0);
}

/* A process of the team that has ended too early, or never started. */
static int somebody_missing(bench_team *team) {
  int status;
  if (atomic_load(&team->failed)) return 1;
  for (int i = -1; i < (int)team->job.workers; i++) {
    pid_t *pid = i < 0 ? &team->server : &team->worker[i];
    if (*pid > 0 && waitpid(*pid, &status, WNOHANG) == 0) continue;
    if (*pid > 0)
      fprintf(stderr, "bench: %s: a process ended (status %d)\n", team->player->name, status);
    *pid = 0;
    return 1;
  }
  return 0;
}

/* Waits until a counter reaches a value; returns 0, or -1 when it cannot any more. */
static int counter_wait(bench_team *team, _Atomic uint32_t *counter, uint32_t value) {
  uint64_t until = bench_now_ns() + (uint64_t)PATIENCE_S * 1000000000u;
  for (uint32_t seen; (seen = atomic_load(counter)) < value;) {
    bench_futex_wait(counter, seen, 100000000);
    if (atomic_load(counter) >= value) break;
    if (somebody_missing(team)) return -1;
    if (bench_now_ns() > until) {
      fprintf(stderr, "bench: %s: no progress for %d s\n", team->player->name, PATIENCE_S);
      return -1;
    }
  }
  return atomic_load(&team->failed) ? -1 : 0;
}

bench_team *bench_team_start(const bench_player *player, const bench_job *job) {
  bench_team *team =
      mmap(NULL, sizeof *team, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (team == MAP_FAILED) return NULL;
  team->job = *job;
  team->player = player;
  memset(team->fd, -1, sizeof team->fd);
  int bad = player->prepare && player->prepare(team);
  if (!bad) {
    team->server = process_start(team, -1);
    for (uint32_t i = 0; i < job->workers; i++) team->worker[i] = process_start(team, (int)i);
    bad = counter_wait(team, &team->ready, job->workers + 1);
  }
  if (bad) {
    bench_team_stop(team);
    return NULL;
  }
  return team;
}

static double cpu_seconds(pid_t pid) {
  clockid_t id;
  struct timespec t;
  if (clock_getcpuclockid(pid, &id) || clock_gettime(id, &t)) return 0;
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double cpu_of_workers(const bench_team *team) {
  double sum = 0;
  for (uint32_t i = 0; i < team->job.workers; i++) sum += cpu_seconds(team->worker[i]);
  return sum;
}

/* Allocations so far; the server is asked, workers have reported at the end of their trial. */
static double allocations_so_far(bench_team *team) {
  double sum = 0;
  if (team->player != &bench_mlfab) return 0;
  uint32_t asked = atomic_fetch_add(&team->asked, 1) + 1;
  bench_futex_wake(&team->asked);
  if (counter_wait(team, &team->answered, asked)) return 0;
  for (uint32_t i = 0; i < team->job.workers; i++) sum += (double)team->allocations[i];
  return sum + (double)team->allocations[WORKERS_MAX];
}

int bench_team_trial(bench_team *team, bench_trial *trial_p) {
  double allocations = allocations_so_far(team);
  double server = cpu_seconds(team->server), workers = cpu_of_workers(team);
  atomic_store(&team->active, 1);
  uint32_t round = atomic_fetch_add(&team->round, 1) + 1;
  bench_futex_wake(&team->round);
  int status = counter_wait(team, &team->done, round * team->job.workers);
  atomic_store(&team->active, 0);
  if (status) return status;
  trial_p->server_cpu = cpu_seconds(team->server) - server;
  trial_p->worker_cpu = cpu_of_workers(team) - workers;
  trial_p->allocations = allocations_so_far(team) - allocations;
  uint64_t begin = UINT64_MAX, end = 0;
  for (uint32_t i = 0; i < team->job.workers; i++) {
    if (team->begin_ns[i] < begin) begin = team->begin_ns[i];
    if (team->end_ns[i] > end) end = team->end_ns[i];
  }
  trial_p->seconds = (double)(end - begin) * 1e-9;
  return 0;
}

int bench_team_idle(bench_team *team, double seconds, bench_trial *trial_p) {
  double server = cpu_seconds(team->server), workers = cpu_of_workers(team);
  uint64_t begin = bench_now_ns();
  usleep((useconds_t)(seconds * 1e6));
  trial_p->server_cpu = cpu_seconds(team->server) - server;
  trial_p->worker_cpu = cpu_of_workers(team) - workers;
  trial_p->seconds = (double)(bench_now_ns() - begin) * 1e-9;
  trial_p->allocations = 0;
  return somebody_missing(team);
}

/* Ends a process: after a few seconds if it may close by itself, else at once. */
static void process_end(pid_t pid, uint64_t until_ns) {
  while (pid > 0 && bench_now_ns() < until_ns && waitpid(pid, NULL, WNOHANG) == 0) usleep(1000);
  if (pid > 0 && kill(pid, SIGKILL) == 0) waitpid(pid, NULL, 0);
}

void bench_team_stop(bench_team *team) {
  atomic_store(&team->quit, 1);
  atomic_fetch_add(&team->round, 1);
  bench_futex_wake(&team->round);
  atomic_fetch_add(&team->asked, 1);
  bench_futex_wake(&team->asked);
  int grace_s = team->player->grace && !atomic_load(&team->failed) ? 3 : 0;
  uint64_t until = bench_now_ns() + (uint64_t)grace_s * 1000000000u;
  for (uint32_t i = 0; i < team->job.workers; i++) process_end(team->worker[i], until);
  process_end(team->server, until);
  for (uint32_t i = 0; i < WORKERS_MAX; i++) {
    for (int end = 0; end < 2; end++) {
      if (team->fd[i][end] >= 0) close(team->fd[i][end]);
    }
  }
  munmap(team, sizeof *team);
}
