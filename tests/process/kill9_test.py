#!/usr/bin/env python3
# lane: test, soak
# limit: 1200
"""kill -9 of a random worker during pushes, again and again, over TCP and over shared memory. With a dedicated
scheduler, the scheduler is killed, too, and so are workers that aggregate for others.

Each worker adds 1.0 to its own element and to all of a large tensor (kill_worker.c). At the end element r must
be between the acknowledged and the started pushes of rank r, over all its processes, and the large tensor must
be uniformly their sum: so no push was lost, applied twice, or applied in part. Barriers must still complete,
and /dev/shm must be as before.

In a loop of pushes, pulls and allreduces (mixer.c) a worker is killed and comes back: a death fails one allreduce of each other
worker, nothing else fails, and all go on, with it, at once.

A third worker pulls. Meanwhile it is stopped and replaced, or killed. Memory that a server lent to it goes to nobody else, so pulls
and views of the others stay whole (puller.c).

MLFAB_SCALE=100 makes the 200 rounds of a transport; a round is one kill. Under a sanitizer each kind of process dies once or
twice over each transport, since workers push all the time. Seeds are printed."""
import os
import random
import signal
import tempfile
import time

from fabrics import Watched
from process import (BUILD, SCALE, cases, environment_of, expect, expect_nothing_left, finish, helper, main, send, shared_memory_names,
                     start, tell, wait_until)

WORKERS = 4
ELEMENTS = 400000  # 1.6 MB: granted, in several chunks, over several slices
SANITIZED = os.path.basename(BUILD) in ("asan", "tsan")
ROUNDS = max(4 if SANITIZED else 10, round(200 * SCALE / 100))
KILLS_A_RUN = 20   # mlfab-run starts a rank again ten times at most
SCHEDULER_KILLS = 6
READERS = 2 if SANITIZED else 4 if SCALE < 10 else 8
SEED = int(os.environ.get("MLFAB_SEED", "1"))
SCHEDULED = ("--scheduler=own", "--server", helper("kill_worker"))


class Fabric(Watched):
    """A run, and what its workers and readers have said."""

    def __init__(self, workers, options, *program):
        self.pid = {}
        self.ready = [0] * WORKERS      # processes that have pushed
        self.started = [0] * WORKERS
        self.done = [0] * WORKERS
        self.barriers = self.added = 0
        self.stopped, self.dead = set(), []
        self.finals = []
        self.torn = []                  # of readers: what is of no commit,
        self.ends = []                  # and how many pulls and copied views each had
        super().__init__("-n", workers, "-s", 1, *options, "--on-failure=restart", "--timeout", 600, *program)

    def said(self, role, rank, word, rest):
        if word == "pid":
            self.pid[rank] = int(rest)
            self.stopped.discard(rank)
        elif word in ("ready", "start", "done"):
            {"ready": self.ready, "start": self.started, "done": self.done}[word][rank] += 1
        elif word == "barrier":
            self.barriers += 1
        elif word == "stopped":
            self.stopped.add(rank)
        elif word == "added":
            self.added += int(rest)
        elif word in ("final", "end"):
            {"final": self.finals, "end": self.ends}[word].append([float(v) for v in rest.split()])
        elif word == "torn":
            self.torn.append((rank, rest))
        elif word == "dead":
            self.dead.append(int(rest))


def kill_one(fabric, rank, dice):
    """Kills a worker at a random moment while it pushes, and waits until it pushes again."""
    lives = fabric.ready[rank]
    time.sleep(dice.random() * 0.15)
    os.kill(fabric.pid[rank], signal.SIGKILL)
    fabric.until(lambda: fabric.ready[rank] > lives, "worker %d is back" % rank)


def kill_scheduler(fabric, dice):
    """Kills the scheduler; pushes continue at once, and it is restarted."""
    def there():
        return fabric.processes().get(("scheduler", 0))

    time.sleep(dice.random() * 0.15)
    pid = wait_until(there, "there is a scheduler")
    os.kill(pid, signal.SIGKILL)
    done = sum(fabric.done)
    fabric.until(lambda: sum(fabric.done) > done + WORKERS, "pushes go on")
    fabric.until(lambda: there() not in (None, pid), "the scheduler is back")


def writers(options, folder):
    """A fabric whose workers push; soak_test.py starts it, too."""
    return Fabric(WORKERS, options, helper("kill_worker"), folder, ELEMENTS)


def end_writers(fabric, folder):
    """All stop, and read the model when all have stopped."""
    open(folder + "/stop", "w", encoding="ascii").close()
    fabric.until(lambda: len(fabric.stopped) == WORKERS, "all workers have stopped")
    open(folder + "/read", "w", encoding="ascii").close()
    fabric.until_end()


def one_run(options, kills, seed):
    dice = random.Random(seed)
    before, scheduled = shared_memory_names(), "--scheduler=own" in options
    with tempfile.TemporaryDirectory() as folder, writers(options, folder) as fabric:
        fabric.until(lambda: all(fabric.ready), "all workers push")
        victims = [rank for rank in range(WORKERS) for _ in range(9)]
        dice.shuffle(victims)
        for number, rank in enumerate(victims[:kills]):
            if scheduled and number % 3 == 2 and number < 3 * SCHEDULER_KILLS:
                kill_scheduler(fabric, dice)
            else:
                kill_one(fabric, rank, dice)
        barriers = fabric.barriers
        fabric.until(lambda: fabric.barriers >= barriers + (3 if scheduled else 1) * WORKERS, "barriers are released")
        end_writers(fabric, folder)
    check(fabric, options, seed)
    expect_nothing_left(before)
    return sum(fabric.done), fabric.added


def check(fabric, options, seed):
    about = "%s, seed %d\nstarted %s\ndone    %s\nfinal   %s\n%s" % (
        " ".join(options[:2]), seed, fabric.started, fabric.done, fabric.finals, fabric.told())
    expect(len(fabric.finals) == WORKERS, "every worker has read the model", about)
    expect(all(final == fabric.finals[0] for final in fabric.finals), "all read the same", about)
    small, (least, most) = fabric.finals[0][:WORKERS], fabric.finals[0][WORKERS:]
    for rank in range(WORKERS):
        expect(fabric.done[rank] <= small[rank], "no acknowledged update is lost", about)
        expect(small[rank] <= fabric.started[rank], "none is applied twice", about)
    expect(least == most == sum(small), "none is applied in part", about)


@cases(("--tcp",), ("--shm",), ("--tcp", *SCHEDULED), ("--shm", *SCHEDULED))
def test_kill_9(*options):
    """With SCHEDULED, of workers and scheduler."""
    left, updates, added, seed = ROUNDS, 0, 0, SEED
    while left > 0:
        kills = min(left, KILLS_A_RUN)
        done, grouped = one_run(options, kills, seed)
        updates, added, left, seed = updates + done, added + grouped, left - kills, seed + 1
    tell("%s: %d kills, %d acknowledged updates, %d added up on the way" % (" ".join(options[:2]), ROUNDS, updates, added))
    expect(added > 0 or len(options) == 1 or ROUNDS < 10, "aggregators add up")


class Mixers(Watched):
    """Workers that push, pull and make an allreduce in each step. A process that comes later knows that others train."""

    def __init__(self, workers, *options, **settings):
        self.folder = tempfile.TemporaryDirectory()
        self.sums, self.failed, self.heres = ([0] * workers for _ in range(3))
        self.started, self.done, self.finals = [0] * workers, [0] * workers, {}
        self.stopped = set()
        program = 'F=%s; touch $F/$MLFAB_RANK; exec %s $F 100 $(cat $F/$MLFAB_RANK; echo comes > $F/$MLFAB_RANK)' % (
            self.folder.name, helper("mixer"))
        super().__init__("-n", workers, "-s", 1, *options, "--on-failure=restart", "--timeout", 300, "sh", "-c", program, **settings)

    def __exit__(self, *_):
        super().__exit__()
        self.folder.cleanup()

    def said(self, role, rank, word, rest):
        counts = {"sum": self.sums, "told": self.failed, "here": self.heres, "start": self.started, "done": self.done}
        if word in counts:
            counts[word][rank] += 1
        elif word == "stopped":
            self.stopped.add(rank)
        elif word == "final":
            of, least, most = rest.split()
            self.finals.setdefault(int(of), set()).update((float(least), float(most)))

    def goes_on(self):
        then = list(self.sums)
        self.until(lambda: all(s > t + 5 for s, t in zip(self.sums, then)), "all make allreduces")

    def ends(self):
        for name, there in (("stop", lambda: len(self.stopped) == len(self.sums)), ("read", self.ended)):
            open(self.folder.name + "/" + name, "w", encoding="ascii").close()
            wait_until(lambda: there() or self.ended(), name)
        self.until_end()


@cases(("--tcp", "bsp"), ("--shm", "bsp"), ("--tcp", "ssp"))
def test_a_worker_comes_back_in_a_loop(transport, consistency):
    dice, kills, before = random.Random(SEED), 1 if SANITIZED else max(3, round(6 * SCALE / 10)), shared_memory_names()
    with Mixers(3, transport, MLFAB_CONSISTENCY=consistency, MLFAB_HEARTBEAT_MS=1000) as fabric:
        fabric.goes_on()
        for _ in range(kills):
            victim = dice.randrange(1, 3)
            lives = fabric.heres[victim]
            time.sleep(dice.random() * 0.2)
            os.kill(fabric.processes()["worker", victim], signal.SIGKILL)
            fabric.until(lambda: fabric.heres[victim] > lives, "worker %d is back" % victim)
            fabric.goes_on()
        fabric.ends()
    about = "failed %s, started %s, done %s, finals %s\n%s" % (fabric.failed, fabric.started, fabric.done, fabric.finals,
                                                              fabric.told())
    expect(all(f <= kills for f in fabric.failed) and sum(fabric.heres) == 3 + kills, "more fails than one call a death", about)
    for rank in range(3):
        expect(all(fabric.done[rank] <= value <= fabric.started[rank] for value in fabric.finals[rank]),
               "an update of worker %d is lost or doubled" % rank, about)
    expect_nothing_left(before)


def stop_or_kill(fabric, stops, folder, dice):
    """Kills the third reader at a random moment. Before that, it may be stopped until another process has taken its
    number: the server asks the stopped process, and hears nothing. Silence alone proves nothing on a busy machine."""
    victim = fabric.pid.pop(2)
    time.sleep(dice.random() * 0.2)
    if stops:
        send(victim, signal.SIGSTOP)
        result = finish(start(helper("puller"), folder, env=environment_of(victim)))
        expect(result.code == 0 and "end 1 " in result.out, "the other process reads once", result)
        send(victim, signal.SIGCONT)
        time.sleep(0.1)
    send(victim, signal.SIGKILL)  # unless it has ended by itself


def test_a_reader_that_is_stopped_or_killed():
    """What the others pull and view stays whole, and is in place again after each loss."""
    dice = random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as once:
        open(once + "/stop", "w", encoding="ascii").close()
        with Fabric(3, ("--shm", "--server", helper("puller")), helper("puller"), folder) as fabric:
            for number in range(READERS + 1):
                fabric.until(lambda: len(fabric.pid) == 3, "all read")
                if number < READERS:
                    stop_or_kill(fabric, number % 2 == 0, once, dice)
            open(folder + "/stop", "w", encoding="ascii").close()
            fabric.until_end()
    about = "seed %d\ntorn %s\nends %s\n%s" % (SEED, fabric.torn, fabric.ends, fabric.told())
    expect(not fabric.torn, "what is pulled is of one commit", about)
    expect(len(fabric.ends) == 3, "all have pulled", about)
    expect(set(fabric.dead) <= {2}, "only victims are declared dead", "%s\n%s" % (fabric.dead, about))
    # A view is a copy when pages are renewed between the making of its answer and its sending: at most once a loss.
    expect(all(copied <= READERS for _, copied in fabric.ends), "views are in place again", about)


if __name__ == "__main__":
    main(globals())
