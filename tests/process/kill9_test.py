#!/usr/bin/env python3
"""kill -9 of a random worker during pushes, again and again, over TCP and over shared memory.

Each worker adds 1.0 to its own element and to all of a large tensor (kill_worker.c). At the end
element r must lie between the pushes of rank r that were acknowledged and those that were started,
over all its lives, and the large tensor must be uniformly the sum of all: so nothing was lost, applied
twice, or applied in part. Barriers must go on being released, and /dev/shm must be as before.

MLFAB_SCALE=100 makes the 200 rounds of a transport; a round is one kill. Seeds are printed."""
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time

from process import RUN, SCALE, expect, helper, main, shared_memory_names, start, wait_until

WORKERS = 4
ELEMENTS = 400000  # 1.6 MB: granted, in several chunks, over several slices
ROUNDS = max(10, round(200 * SCALE / 100))
KILLS_A_RUN = 20   # mlfab-run starts a rank again ten times at most


class Fabric:
    """One mlfab-run, and what its workers have said."""

    def __init__(self, option, folder):
        self.process = start(RUN, "-n", WORKERS, "-s", 1, option, "--on-failure=restart",
                             "--timeout", 240, helper("kill_worker"), folder, ELEMENTS)
        self.pid = {}
        self.ready = [0] * WORKERS      # lives that came as far as pushing
        self.started = [0] * WORKERS
        self.done = [0] * WORKERS
        self.barriers = 0
        self.stopped = set()
        self.finals = []
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
            elif word == "final":
                self.finals.append([float(v) for v in rest.split()])

    def read_errors(self):
        for line in self.process.stderr:
            self.errors.append(line.rstrip())

    def told(self):
        return "\n".join(self.errors[-60:])


def kill_one(fabric, rank, dice):
    """Kills a worker at a random moment of its pushing, and waits until it pushes again."""
    lives = fabric.ready[rank]
    time.sleep(dice.random() * 0.15)
    os.kill(fabric.pid[rank], signal.SIGKILL)
    wait_until(lambda: fabric.ready[rank] > lives or fabric.process.poll() is not None, 30,
               lambda: "worker %d is back\n%s" % (rank, fabric.told()))
    expect(fabric.process.poll() is None, "the run goes on", fabric.told())


def one_run(option, kills, seed):
    dice = random.Random(seed)
    before = shared_memory_names()
    with tempfile.TemporaryDirectory() as folder:
        fabric = Fabric(option, folder)
        try:
            wait_until(lambda: all(fabric.ready) or fabric.process.poll() is not None, 60,
                       lambda: "all workers push\n" + fabric.told())
            victims = [rank for rank in range(WORKERS) for _ in range(9)]
            dice.shuffle(victims)
            for rank in victims[:kills]:
                kill_one(fabric, rank, dice)
            barriers = fabric.barriers
            wait_until(lambda: fabric.barriers >= barriers + WORKERS, 60,
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
    check(fabric, option, seed)
    left = shared_memory_names() - before
    expect(not left, "nothing is left in /dev/shm", left)
    return sum(fabric.done)


def check(fabric, option, seed):
    about = "%s, seed %d\nstarted %s\ndone    %s\nfinal   %s\n%s" % (
        option, seed, fabric.started, fabric.done, fabric.finals, fabric.told())
    expect(len(fabric.finals) == WORKERS, "every worker has read the model", about)
    expect(all(final == fabric.finals[0] for final in fabric.finals), "all read the same", about)
    small, (least, most) = fabric.finals[0][:WORKERS], fabric.finals[0][WORKERS:]
    for rank in range(WORKERS):
        expect(fabric.done[rank] <= small[rank], "no acknowledged update is lost", about)
        expect(small[rank] <= fabric.started[rank], "none is applied twice", about)
    expect(least == most == sum(small), "none is applied in part", about)


def rounds(option):
    left, updates, seed = ROUNDS, 0, int(os.environ.get("MLFAB_SEED", "1"))
    while left > 0:
        kills = min(left, KILLS_A_RUN)
        updates += one_run(option, kills, seed)
        left -= kills
        seed += 1
    print("# %s: %d kills, %d acknowledged updates" % (option[2:], ROUNDS, updates))
    sys.stdout.flush()


def test_kill_9_over_tcp():
    rounds("--tcp")


def test_kill_9_over_shared_memory():
    rounds("--shm")


if __name__ == "__main__":
    main(globals())
