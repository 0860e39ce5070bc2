#!/usr/bin/env python3
# lane: test, soak
# limit: 1200
"""kill -9 of a random worker during pushes, again and again, over TCP and over shared memory. With a dedicated
scheduler, the scheduler is killed, too, and so are workers that aggregate for others.

Each worker adds 1.0 to its own element and to all of a large tensor (kill_worker.c). At the end element r must
be between the acknowledged and the started pushes of rank r, over all its processes, and the large tensor must
be uniformly their sum: so no push was lost, applied twice, or applied in part. Barriers must still complete,
and /dev/shm must be as before.

A third worker pulls, and is stopped or killed meanwhile: what it was lent of the servers' memory is nobody else's, and what
others pull and view stays whole (puller.c).

MLFAB_SCALE=100 makes the 200 rounds of a transport; a round is one kill. Seeds are printed."""
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time

from process import RUN, SCALE, expect, expect_nothing_left, helper, main, shared_memory_names, start, wait_until

WORKERS = 4
ELEMENTS = 400000  # 1.6 MB: granted, in several chunks, over several slices
ROUNDS = max(10, round(200 * SCALE / 100))
KILLS_A_RUN = 20   # mlfab-run starts a rank again ten times at most
SCHEDULER_KILLS = 6
READERS = 8
SCHEDULED = ("--scheduler=own", "--server", helper("kill_worker"))


class Fabric:
    """One mlfab-run, and the output of its workers."""

    def __init__(self, workers, options, *program):
        self.process = start(RUN, "-n", workers, "-s", 1, *options, "--on-failure=restart",
                             "--timeout", 240, *program)
        self.pid = {}
        self.ready = [0] * WORKERS      # processes that have pushed
        self.started = [0] * WORKERS
        self.done = [0] * WORKERS
        self.barriers = 0
        self.stopped = set()
        self.finals = []
        self.added = 0
        self.torn = []                  # of readers: what is of no commit,
        self.ends = []                  # and how many pulls and copied views each had
        self.errors = []
        self.threads = [threading.Thread(target=self.read, daemon=True),
                        threading.Thread(target=self.read_errors, daemon=True)]
        for thread in self.threads:
            thread.start()

    def read(self):
        for line in self.process.stdout:
            match = re.match(r"\[worker (\d+)\] (\w+) ?(.*)", line)
            if not match:
                continue
            rank, word, rest = int(match.group(1)), match.group(2), match.group(3)
            if word == "pid":
                self.pid[rank] = int(rest)
                self.stopped.discard(rank)
            elif word == "ready":
                self.ready[rank] += 1
            elif word == "start":
                self.started[rank] += 1
            elif word == "done":
                self.done[rank] += 1
            elif word == "barrier":
                self.barriers += 1
            elif word == "stopped":
                self.stopped.add(rank)
            elif word == "added":
                self.added += int(rest)
            elif word == "final":
                self.finals.append([float(v) for v in rest.split()])
            elif word == "torn":
                self.torn.append(line)
            elif word == "end":
                self.ends.append([int(v) for v in rest.split()])

    def read_errors(self):
        for line in self.process.stderr:
            self.errors.append(line.rstrip())

    def told(self):
        return "\n".join(self.errors[-60:])


def kill_one(fabric, rank, dice):
    """Kills a worker at a random moment while it pushes, and waits until it pushes again."""
    lives = fabric.ready[rank]
    time.sleep(dice.random() * 0.15)
    os.kill(fabric.pid[rank], signal.SIGKILL)
    wait_until(lambda: fabric.ready[rank] > lives or fabric.process.poll() is not None, 30,
               lambda: "worker %d is back\n%s" % (rank, fabric.told()))
    expect(fabric.process.poll() is None, "the run goes on", fabric.told())


def scheduler_of(fabric):
    """The scheduler process, or None while it is being restarted."""
    run = fabric.process.pid
    with open("/proc/%d/task/%d/children" % (run, run), encoding="ascii") as file:
        children = [int(child) for child in file.read().split()]
    for child in children:
        try:
            with open("/proc/%d/environ" % child, "rb") as file:
                if b"MLFAB_ROLE=scheduler" in file.read().split(b"\0"):
                    return child
        except OSError:
            pass
    return None


def kill_scheduler(fabric, dice):
    """Kills the scheduler; pushes continue at once, and it is restarted."""
    time.sleep(dice.random() * 0.15)
    pid = scheduler_of(fabric)
    os.kill(pid, signal.SIGKILL)
    done = sum(fabric.done)
    wait_until(lambda: sum(fabric.done) > done + WORKERS or fabric.process.poll() is not None, 30,
               lambda: "pushes go on\n" + fabric.told())
    wait_until(lambda: scheduler_of(fabric) not in (None, pid), 30,
               lambda: "the scheduler is back\n" + fabric.told())


def writers(options, folder):
    """A fabric whose workers push; soak_test.py starts it, too."""
    return Fabric(WORKERS, options, helper("kill_worker"), folder, ELEMENTS)


def one_run(options, kills, seed):
    dice = random.Random(seed)
    before = shared_memory_names()
    with tempfile.TemporaryDirectory() as folder:
        fabric = writers(options, folder)
        scheduled = "--scheduler=own" in options
        try:
            wait_until(lambda: all(fabric.ready) or fabric.process.poll() is not None, 60,
                       lambda: "all workers push\n" + fabric.told())
            victims = [rank for rank in range(WORKERS) for _ in range(9)]
            dice.shuffle(victims)
            for number, rank in enumerate(victims[:kills]):
                if scheduled and number % 3 == 2 and number < 3 * SCHEDULER_KILLS:
                    kill_scheduler(fabric, dice)
                else:
                    kill_one(fabric, rank, dice)
            barriers = fabric.barriers
            wait_until(lambda: fabric.barriers >= barriers + (3 if scheduled else 1) * WORKERS, 60,
                       lambda: "barriers are released\n" + fabric.told())
            open(folder + "/stop", "w", encoding="ascii").close()
            wait_until(lambda: len(fabric.stopped) == WORKERS or fabric.process.poll() is not None,
                       60, lambda: "all workers have stopped\n" + fabric.told())
            open(folder + "/read", "w", encoding="ascii").close()
            wait_until(lambda: fabric.process.poll() is not None, 60,
                       lambda: "all end, finals %s\n%s" % (fabric.finals, fabric.told()))
            for thread in fabric.threads:
                thread.join(10)
        finally:
            if fabric.process.poll() is None:
                fabric.process.terminate()
                fabric.process.wait(20)
    expect(fabric.process.returncode == 0, "exit status %s" % fabric.process.returncode,
           fabric.told())
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


def rounds(*options):
    left, updates, added, seed = ROUNDS, 0, 0, int(os.environ.get("MLFAB_SEED", "1"))
    while left > 0:
        kills = min(left, KILLS_A_RUN)
        done, grouped = one_run(options, kills, seed)
        updates += done
        added += grouped
        left -= kills
        seed += 1
    print("# %s: %d kills, %d acknowledged updates, %d added up on the way"
          % (" ".join(options[:2]), ROUNDS, updates, added))
    sys.stdout.flush()
    return added


def test_kill_9_over_tcp():
    rounds("--tcp")


def test_kill_9_over_shared_memory():
    rounds("--shm")


def test_kill_9_of_workers_and_scheduler_over_tcp():
    expect(rounds("--tcp", *SCHEDULED) > 0, "aggregators add up")


def test_kill_9_of_workers_and_scheduler_over_shared_memory():
    expect(rounds("--shm", *SCHEDULED) > 0, "aggregators add up")


def stop_or_kill(fabric, stops, dice):
    """Kills the third reader at a random moment, perhaps after it was stopped until the server has declared it dead."""
    victim = fabric.pid.pop(2)
    time.sleep(dice.random() * 0.2)
    with contextlib.suppress(ProcessLookupError):  # after that it ends by itself
        if stops:
            os.kill(victim, signal.SIGSTOP)
            time.sleep(0.6)
            os.kill(victim, signal.SIGCONT)
            time.sleep(0.1)
        os.kill(victim, signal.SIGKILL)


def test_a_reader_that_is_stopped_or_killed():
    """What the others pull and view stays whole, and is in place again after each loss."""
    seed = int(os.environ.get("MLFAB_SEED", "1"))
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        fabric = Fabric(3, ("--shm", "--server", helper("puller")), helper("puller"), folder)
        try:
            for number in range(READERS + 1):
                wait_until(lambda: len(fabric.pid) == 3 or fabric.process.poll() is not None, 60,
                           lambda: "all read\n" + fabric.told())
                expect(fabric.process.poll() is None, "the run goes on", fabric.told())
                if number < READERS:
                    stop_or_kill(fabric, number % 2 == 0, dice)
            open(folder + "/stop", "w", encoding="ascii").close()
            wait_until(lambda: fabric.process.poll() is not None, 60,
                       lambda: "all end\n" + fabric.told())
            for thread in fabric.threads:
                thread.join(10)
        finally:
            if fabric.process.poll() is None:
                fabric.process.terminate()
                fabric.process.wait(20)
    about = "seed %d\ntorn %s\nends %s\n%s" % (seed, fabric.torn, fabric.ends, fabric.told())
    expect(fabric.process.returncode == 0, "exit status %s" % fabric.process.returncode, about)
    expect(not fabric.torn, "what is pulled is of one commit", about)
    expect(len(fabric.ends) == 3, "all have pulled", about)
    # A view is a copy when pages are renewed between the making of its answer and its sending: at most once a loss.
    expect(all(copied <= READERS for _, copied in fabric.ends), "views are in place again", about)


if __name__ == "__main__":
    main(globals())
