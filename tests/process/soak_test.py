#!/usr/bin/env python3
# lane: soak
# limit: 3600
"""Processes of every role are killed, restarted and stopped for seconds beside eight busy loops, over TCP and
over shared memory. No living process may be declared dead: each reported death must be one that this script
caused. Pushes continue after each event, and no acknowledged one is lost.

A run has four workers (kill_worker.c), two servers and a dedicated scheduler. mlfab-run restarts workers and
the scheduler. A killed server ends its run, which must report it, and the next run takes its place.
MLFAB_SCALE=100 makes it 30 minutes, 1 some seconds. The busy loops end by themselves when this script is
killed.

Then fabrics of three servers with replicas: processes of every role are killed, one at a time or two of different groups
of three, and started again, and copies are stopped. No durable update may be lost, none may be applied twice, and nothing
may be left. The script prints the wait of applied pushes in heartbeats of 200 ms: from a kill or a stop until every worker has
the answer to a later push. Copies that served and copies that stood by have lines of their own. No time is judged,
but a push without an answer at its deadline, a minute, is a failure. MLFAB_SCALE=100 makes 2,000 kills, 200 of them two at a
time, and 200 stops; 1 makes 40 and 4."""
import os
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time

from fabrics import Group
from kill9_test import SEED, WORKERS, end_writers, writers
from process import SCALE, cases, expect, is_alive, main, send, tell, wait_until

SECONDS = max(16.0, 1800.0 * SCALE / 100)  # in all
RUN_SECONDS = 90.0                         # a run
BUSY = 8
KILLS = 8                                  # of a rank in a run: mlfab-run starts it again ten times
STOPS = (0.3, 1.0, 3.0, 4.0, 8.0)          # seconds; 2.5 are five heartbeats
SERVERS = 2
GROUP_KILLS = max(40, round(2000 * SCALE / 100))  # of processes of fabrics with replicas, over both transports
GROUP_STOPS = max(4, GROUP_KILLS // 10)
GROUP_RUN = 40                                    # kills in a run
GROUP_BEAT_MS = 200  # a server is dead if no copy serves for 20 of them, and a busy machine needs more than a second
GROUP_SERVERS = 3
GROUP_WORKERS = 3


class Busy:
    """Busy loops, each of which ends by itself."""

    def __enter__(self):
        self.loops = [subprocess.Popen(["timeout", str(int(SECONDS * 3 + 300)), "sh", "-c",
                                        "while :; do :; done"], start_new_session=True)
                      for _ in range(BUSY)]

    def __exit__(self, *_):
        for loop in self.loops:
            os.killpg(loop.pid, signal.SIGKILL)
            loop.wait()


class Soak:
    def __init__(self, transport, seed, folder):
        self.dice = random.Random(seed)
        self.fabric = writers(("-s", SERVERS, transport, "--scheduler=own"), folder)
        self.folder = folder
        self.killed = {}  # (role, number) -> how often
        self.stops = 0

    def goes_on(self, what):
        """Checks that every worker has pushed since."""
        done = list(self.fabric.done)
        self.fabric.until(lambda: all(now > then for now, then in zip(self.fabric.done, done)), "pushes go on after " + what)

    def stop_some(self):
        """Stops one or two processes at a time, of any role."""
        there = self.fabric.processes()
        names = self.dice.sample(sorted(there), min(len(there), self.dice.randint(1, 2)))
        try:
            for name in names:
                send(there[name], signal.SIGSTOP)
            time.sleep(self.dice.choice(STOPS) if self.stops else 4.0)
        finally:
            for name in names:
                send(there[name], signal.SIGCONT)
        self.stops += len(names)
        self.goes_on("a stop of %s" % names)

    def kill_one(self, role):
        choices = [name for name in sorted(self.fabric.processes())
                   if name[0] == role and self.killed.get(name, 0) < KILLS]
        if not choices:
            return
        name = self.dice.choice(choices)
        pid, lives = self.fabric.processes()[name], self.fabric.ready[name[1] % WORKERS]
        self.killed[name] = self.killed.get(name, 0) + 1
        send(pid, signal.SIGKILL)
        self.fabric.until(lambda: self.fabric.processes().get(name) not in (None, pid), "%s is started again" % (name,))
        if role == "worker":
            self.fabric.until(lambda: self.fabric.ready[name[1]] > lives, "%s pushes again" % (name,))
        self.goes_on("a kill of %s %d" % name)

    def kill_server(self):
        """The only copy of its shard is lost: the run ends, and names the server."""
        name = "server", self.dice.randrange(SERVERS)
        self.killed[name] = 1
        send(self.fabric.processes()[name], signal.SIGKILL)
        self.fabric.until_end(status=None)
        expect("server %d" % name[1] in self.fabric.lines(), "it says why it ends", self.fabric.told())

    def end_well(self):
        end_writers(self.fabric, self.folder)
        expect(len(self.fabric.finals) == WORKERS, "every worker has read the model", self.fabric.told())
        small = self.fabric.finals[0]
        for rank in range(WORKERS):
            expect(self.fabric.done[rank] <= small[rank] <= self.fabric.started[rank],
                   "worker %d: no acknowledged update is lost, none is applied twice" % rank,
                   (self.fabric.started, self.fabric.done, small))

    def check_deaths(self):
        """No process is reported dead more often than it died; no rank fails by itself."""
        told = {}
        for line in self.fabric.errors:
            match = re.match(r"(?:\[([^\]]*)\] )?.*?\b(worker|server) (\d+)(?:: dead\b| is dead)", line)
            if match:
                name = match.group(2), int(match.group(3))
                key = match.group(1), name
                told[key] = told.get(key, 0) + 1
                expect(told[key] <= self.killed.get(name, 0), "a false death: " + line,
                       self.fabric.told())
        return sum(told.values())

    def run(self, until, kills_server):
        with self.fabric:
            self.fabric.until(lambda: all(self.fabric.ready), "all workers push")
            while time.monotonic() < until or not self.stops:
                self.stop_some()
                if time.monotonic() < until:
                    self.kill_one(self.dice.choice(("worker", "worker", "scheduler")))
                self.check_deaths()
            self.kill_server() if kills_server else self.end_well()
            return self.check_deaths()


@cases("--tcp", "--shm")
def test_nobody_is_taken_for_dead(transport):
    end, runs, stops, kills, updates, deaths = time.monotonic() + SECONDS / 2, 0, 0, 0, 0, 0
    with Busy():
        while runs < 2 or time.monotonic() < end:
            until = min(end, time.monotonic() + (RUN_SECONDS if SECONDS > 4 * RUN_SECONDS else SECONDS / 4))
            with tempfile.TemporaryDirectory() as folder:
                one = Soak(transport, SEED + runs, folder)
                deaths += one.run(until, runs % 2 == 1)
            runs, stops, kills = runs + 1, stops + one.stops, kills + sum(one.killed.values())
            updates += sum(one.fabric.done)
    tell("%s: %d runs, %d stops, %d kills, %d deaths told, all of them true, %d acknowledged updates"
         % (transport, runs, stops, kills, deaths, updates))


class Copies:
    """One run with replicas: its processes are killed and stopped."""

    def __init__(self, transport, seed):
        self.dice = random.Random(seed)
        self.group = Group(transport, "--verbose", "--set", "div_max=inf", "--on-failure=restart",
                           workers=GROUP_WORKERS, servers=GROUP_SERVERS, paced=False, MLFAB_HEARTBEAT_MS=GROUP_BEAT_MS)
        self.killed = {}
        self.pids = set()
        self.beats, self.kills, self.pairs, self.stops, self.durable = [], 0, 0, 0, 0  # beats: what, how many, which

    def choose(self, roles):
        there = [name for name in sorted(self.group.processes())
                 if name[0] in roles and self.killed.get(name, 0) < KILLS]
        return self.dice.choice(there) if there else None

    def victims(self, two):
        """One process, or two copies of different servers."""
        if not two:
            roles = ("server", "replica", "server", "replica", "scheduler", "worker")
            first = self.choose((self.dice.choice(roles),))
            return [first] if first else []
        first, second = self.choose(("server", "replica")), self.choose(("server", "replica"))
        return [first, second] if first and second and first[1] != second[1] else []

    def what(self, *names):
        """What these processes are, before something happens to them."""
        if names[0][0] == "scheduler":
            return "the scheduler"
        serve = [name == self.group.serving(name[1]) for name in names]
        if len(names) == 2:
            return "two copies, %d of which served" % sum(serve)
        return "the copy that served" if serve[0] else "the copy that stood by"

    def kill(self, two):
        names = self.victims(two)
        if not names:
            return 0
        self.group.in_sync()
        self.pids.update(self.group.processes().values())
        time.sleep(self.dice.random() * 0.1)
        what = None if names[0][0] == "worker" else "kill of " + self.what(*names)
        when, pids = self.group.kill(*names)
        for name in names:
            self.killed[name] = self.killed.get(name, 0) + 1
        if what:
            self.beats.append((what, self.group.serves_after(when), " and ".join("%s %d" % n for n in names)))
        self.group.replaced(*names, pids=pids)
        self.kills += len(names)
        self.pairs += two
        return len(names)

    def stop(self):
        name = self.choose(("server", "replica", "scheduler"))
        self.group.in_sync()
        what = self.what(name)
        when, _ = self.group.kill(name, number=signal.SIGSTOP)
        beats = self.dice.choice((3, 6, 12))
        until, served = time.monotonic() + beats * self.group.beat, None
        while time.monotonic() < until:
            served = served or self.group.served_after(when)
            time.sleep(0.001)
        self.group.kill(name, number=signal.SIGCONT)
        self.beats.append(("stop of " + what, served or self.group.serves_after(when), "%s %d for %d" % (*name, beats)))
        self.stops += 1

    def run(self, kills, stops):
        with self.group:
            self.group.in_sync()
            idle = 0
            while self.kills < kills and idle < 50:
                two = 10 * self.pairs < self.kills and self.dice.random() < 0.5
                idle = 0 if self.kill(two) else idle + 1
                if self.stops * kills < stops * self.kills:
                    self.stop()
            self.group.in_sync()
            self.pids.update(self.group.processes().values())
            self.group.end()
            self.group.check(killed_workers=True)
            failed = [line for line in self.group.errors if re.search(r"(durable|applied) push: ", line)]
            expect(not failed, "every push was answered by its deadline", "\n".join(failed) + "\n" + self.group.told())
            self.durable = sum(c.done_durable for c in self.group.counters)
        wait_until(lambda: not any(map(is_alive, self.pids)), "no process is left")


@cases("--tcp", "--shm")
def test_copies_are_killed(transport):
    seed, kills, pairs, stops, beats, updates, total = SEED, 0, 0, 0, [], 0, GROUP_KILLS // 2
    while kills < total:
        one = Copies(transport, seed)
        share = min(GROUP_RUN, total - kills)
        one.run(share, max(1, GROUP_STOPS * share // GROUP_KILLS))
        kills, pairs, stops, seed = kills + one.kills, pairs + one.pairs, stops + one.stops, seed + 1
        updates, beats = updates + one.durable, beats + one.beats
        expect(one.kills > 0, "something is killed")
    tell("%s with replicas: %d kills, %d times two at a time, %d stops, %d durable updates, 0 lost, 0 doubled"
         % (transport, kills, pairs, stops, updates))
    for what in sorted({one[0] for one in beats}):
        waits = sorted(one[1:] for one in beats if one[0] == what)
        tell("%s, %s: %d times, pushes again after %.1f heartbeats (median), at most %.1f (%s)"
             % (transport, what, len(waits), statistics.median(wait for wait, _ in waits), *waits[-1]))


if __name__ == "__main__":
    main(globals(), jobs=1)  # its busy loops are for one run at a time
