#!/usr/bin/env python3
# lane: soak
# limit: 7200
"""Everything at once, for an hour, while each worker pushes, pulls and makes a collective in a loop (mixer.c): pauses of one
process and of all, full disks, slow and lossy links, workers that join, die and come back, copies of servers that die. Every
death that is told must be one that this script caused. All must go on after each event. In the end the model must have each
acknowledged update once.

A fabric begins with three workers; up to six take part. Two of three fabrics have a server, a replica and a scheduler: pushes
are durable, and any of the three may die. The others have two servers, which only pause. The consistency model changes, too.

One case runs on the loopback. The other, which needs root, gives each process a network namespace with a shaped link. netem
makes links slow, late and lossy. If the kernel has no netem, tbf makes them slow, and the script says so. Both run side by side:
MLFAB_SCALE=100 makes it an hour, 1 some seconds."""
import collections
import contextlib
import os
import random
import re
import signal
import tempfile
import threading
import time

from checkpoint_test import numbers
from kill9_test import SEED
from network_test import Network, quietly
from operator_test import small_disk
from process import KEY, RUN, SCALE, cases, clean_environment, expect, free_port, helper, main, send, start, tell, wait_until

SECONDS = max(8.0, 3600.0 * (SCALE - 1) / 99)  # of each case
RUN_SECONDS = 60.0                             # of a fabric, about
WORKERS, MOST, COUNT = 3, 6, 2000         # at first, at a time, elements a worker
BEAT, SILENT = 0.2, 8.0                   # seconds
PAUSES, PAUSES_OF_ALL = (0.3, 1.0, 2.5), (1.0, 3.0, 12.0)
KINDS = "bsp", "ssp", "async"
LINKS = ((1000, 0.1, 0), (100, 1, 0.1), (20, 10, 1), (5, 50, 2))  # Mbit/s, ms, % of packets


class Member:
    """A process, and what it has said."""

    def __init__(self, name, process, mix):
        self.name, self.process, self.mix = name, process, mix
        self.rank = name[1] if name[0] == "worker" else None
        self.started = self.done = self.sums = 0
        self.here = self.stopped = self.killed = False
        self.told, self.finals, self.errors = collections.Counter(), {}, []
        self.threads = [threading.Thread(target=reader, daemon=True) for reader in (self.read, self.read_errors)]
        for thread in self.threads:
            thread.start()

    def read(self):
        for line in self.process.stdout:
            word, *rest = line.split()
            if word == "start":
                self.started += 1
            elif word == "done":
                self.done += 1
            elif word == "sum":
                self.sums += 1
            elif word == "here":
                self.rank, self.here = int(rest[0]), True
            elif word == "dead":
                self.told[rest[0], int(rest[1])] += 1
            elif word == "stopped":
                self.stopped = True
            elif word == "final":
                self.finals[int(rest[0])] = float(rest[1]), float(rest[2])

    def read_errors(self):
        for line in self.process.stderr:
            self.errors.append(line.rstrip())
            match = re.search(r"\b(worker|server) (\d+)(?:: dead\b| is dead)", line)
            if match:
                self.told[match[1], int(match[2])] += 1

    def lives(self):
        return self.process.poll() is None

    def join(self):
        for thread in self.threads:
            thread.join(20)


class Loopback:
    """All on this host."""

    def __enter__(self):
        self.ports = [free_port(), free_port()]
        return self

    def __exit__(self, *_):
        pass

    def address(self, copy):
        return "tcp:127.0.0.1:%d" % self.ports[copy]

    def start(self, _, *command, **settings):
        return start(*command, env=clean_environment(**settings))

    def shape(self, dice):
        return None


class Shaped:
    """A host for each process, whose link changes."""
    netem = None

    def __enter__(self):
        self.network = Network(MOST + 4)
        if Shaped.netem is None:
            Shaped.netem = not quietly("tc", "-n", self.network.name(1), "qdisc", "replace", "dev", "eth0", "root", "netem",
                                       "delay", "1ms").returncode
            tell("links are made slow, late and lossy by netem" if Shaped.netem else
                 "this kernel has no netem: links are slow by tbf, and neither late nor lossy")
        return self

    def __exit__(self, *_):
        self.network.down()

    def address(self, copy):
        return "tcp:10.78.0.%d:7070" % (MOST + 1 + copy)

    def host(self, name):
        role, number = name
        return {"server": MOST + 1 + number, "replica": MOST + 2, "scheduler": MOST + 3}.get(role, 1 + number % MOST)

    def start(self, name, *command, **settings):
        return self.network.start(self.host(name), *command, MLFAB_SOCKET_IFNAME="eth0", **settings)

    def shape(self, dice):
        mbit, ms, loss = dice.choice(LINKS)
        host = dice.randrange(1, MOST + 4)
        if not Shaped.netem:
            self.network.rate(host, mbit)
            return "host %d has %d Mbit/s" % (host, mbit)
        for where in (["tc", "-n", self.network.name(host), "qdisc", "replace", "dev", "eth0"],
                      ["tc", "qdisc", "replace", "dev", self.network.name(host).replace("n", "v")]):
            quietly(*where, "root", "netem", "rate", "%dmbit" % mbit, "delay", "%gms" % ms, "loss", "%g%%" % loss, "limit", "10000")
        return "host %d has %d Mbit/s, %g ms, loses %g %%" % (host, mbit, ms, loss)


class Mix:
    """One fabric."""

    def __init__(self, place, seed, disk):
        self.dice, self.place, self.disk = random.Random(seed), place, disk
        self.replicas, self.kind = seed % 3 != 2, KINDS[seed // 3 % 3]
        self.folder, self.members, self.kills, self.history = tempfile.TemporaryDirectory(), [], collections.Counter(), []
        self.full, self.joined = False, MOST
        self.settings = {"MLFAB_COORDINATOR": ",".join(place.address(k) for k in range(1 + self.replicas)), "MLFAB_JOB": "mix",
                         "MLFAB_KEY": KEY, "MLFAB_WORKERS": WORKERS, "MLFAB_WORKERS_MAX": MOST, "MLFAB_DEDICATED": 1,
                         "MLFAB_SERVERS": 1 if self.replicas else 2, "MLFAB_TRANSPORT": "tcp", "MLFAB_TIMEOUT_MS": 100000,
                         "MLFAB_HEARTBEAT_MS": int(BEAT * 1000), "MLFAB_SILENT_DEATH_MS": int(SILENT * 1000),
                         "MLFAB_CONSISTENCY": self.kind, "MLFAB_CHECKPOINT_DIR": disk[0], "MLFAB_CHECKPOINT_COMMITS": 50}
        if self.replicas:
            self.settings.update(MLFAB_REPLICAS=1, MLFAB_SCHEDULER="own", MLFAB_ACK="durable",
                                 MLFAB_LOG="info:" + self.folder.name + "/log")

    def add(self, role, number, **more):
        program = (RUN, "--mlfab-run-server", "quiet")
        if role == "worker":
            program = (helper("mixer"), self.folder.name, COUNT, *(["comes"] if self.history else []))
        process = self.place.start((role, number), *program, MLFAB_ROLE=role,
                                   **(more or {"MLFAB_RANK": number}), **self.settings)
        self.members.append(Member((role, number), process, self))
        return self.members[-1]

    def living(self, *roles):
        return [m for m in self.members if m.lives() and m.name[0] in roles]

    def report(self):
        lines = ["seed of %s, %s; %s" % (self.kind, "replicas" if self.replicas else "two servers", self.folder.name)]
        lines += self.history[-30:]
        for m in self.members:
            lines.append("%s %d%s: rank %s, started %d, done %d, sums %d, told %s, status %s" % (
                *m.name, " (killed)" if m.killed else "", m.rank, m.started, m.done, m.sums, dict(m.told), m.process.poll()))
            lines += ["    " + line for line in m.errors[-6:]]
        return "\n".join(lines)

    def until(self, condition, what):
        def failed():
            return [m for m in self.members if not m.lives() and not m.killed]

        wait_until(lambda: condition() or failed(), lambda: "%s\n%s" % (what, self.report()))
        expect(not failed(), "a process ended before: " + what, self.report())

    def begin(self):
        for number in range(self.settings["MLFAB_SERVERS"]):
            self.add("server", number)
        if self.replicas:
            self.add("replica", 0)
            self.add("scheduler", 0)
        for number in range(WORKERS):
            self.add("worker", number)
        self.goes_on("the beginning")

    def goes_on(self, what):
        """Every worker that lives has pushed since, and been in a collective. With replicas pushes are durable: both copies are
        in step."""
        self.history.append(what)
        now = {m: (m.done, m.sums) for m in self.living("worker")}
        self.until(lambda: all(m.done >= done + 3 and m.sums > sums for m, (done, sums) in now.items()), "all go on after " + what)
        self.check_deaths()

    def check_deaths(self):
        """Each member tells of the deaths that this script has caused, and of no other. A copy that paused may be replaced."""
        for m in self.members:
            for name, times in m.told.items():
                if name[0] == "worker" or not self.replicas:
                    expect(times <= self.kills[name], "a false death: %s %d, as %s %d says" % (*name, *m.name), self.report())

    # ---- what happens

    def pause(self, members, seconds):
        for m in members:
            send(m.process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        self.dice.shuffle(members)
        for m in members:
            send(m.process.pid, signal.SIGCONT)
            time.sleep(0.01)

    def pause_one(self):
        m = self.dice.choice(self.living("worker", "server", "replica", "scheduler"))
        seconds = self.dice.choice(PAUSES)
        self.pause([m], seconds)
        self.goes_on("a pause of %s %d for %g s" % (*m.name, seconds))

    def pause_all(self):
        seconds = self.dice.choice(PAUSES_OF_ALL[:2] if SCALE < 10 else PAUSES_OF_ALL)
        self.pause(self.living("worker", "server", "replica", "scheduler"), seconds)
        self.goes_on("a pause of all for %g s" % seconds)

    def kill(self, m):
        m.killed = True
        self.kills["server" if m.name[0] == "replica" else m.name[0], m.rank if m.name[0] == "worker" else m.name[1]] += 1
        send(m.process.pid, signal.SIGKILL)
        m.process.wait()

    def kill_worker(self):
        """One of the first comes back with its rank; a joiner does not."""
        m = self.dice.choice([m for m in self.living("worker") if m.here])
        self.kill(m)
        self.goes_on("a kill of worker %d" % m.rank)
        if m.rank < WORKERS:
            again = self.add("worker", m.rank)
            self.until(lambda: again.here, "worker %d is back" % m.rank)
            self.goes_on("its return")

    def join(self):
        if len(self.living("worker")) == MOST:
            return
        self.joined += 1
        joiner = self.add("worker", self.joined, MLFAB_JOIN=1)
        self.until(lambda: joiner.here, "a worker joins")
        self.goes_on("worker %d joined" % joiner.rank)

    def kill_copy(self):
        if not self.replicas:
            return
        m = self.dice.choice(self.living("server", "replica", "scheduler"))
        votes = self.votes(m)
        self.kill(m)
        self.add(*m.name)
        self.goes_on("a kill of %s" % m.name[0])
        self.until(lambda: self.votes(m) > votes, "%s votes again" % m.name[0])
        self.goes_on("its return")

    def votes(self, m):
        """How often this process has begun to vote, as its log tells."""
        name = "log.scheduler" if m.name[0] == "scheduler" else "log.%s-%d" % m.name
        with open(os.path.join(self.folder.name, name), encoding="utf-8") as log:
            return log.read().count("it votes from now on")

    def fill_disk(self):
        (self.disk[2] if self.full else self.disk[1])(self)
        self.full = not self.full
        self.goes_on("the disk is full" if self.full else "the disk is free")

    def processes(self):
        return {m.name: m.process.pid for m in self.living("server", "replica")}

    def reshape(self):
        what = self.place.shape(self.dice)
        if what:
            self.goes_on(what)

    # ---- the end

    def finish(self):
        if self.full:
            self.fill_disk()
        before = numbers(os.listdir(self.disk[0]))[-1]
        self.until(lambda: numbers(os.listdir(self.disk[0]))[-1] > before, "checkpoints are written again")
        workers = self.living("worker")
        for name, ready in ("stop", lambda: all(m.stopped for m in workers)), ("read", lambda: all(not m.lives() for m in workers)):
            open(os.path.join(self.folder.name, name), "w", encoding="ascii").close()
            wait_until(lambda: ready() or any(m.process.poll() for m in workers), lambda: "all %s\n%s" % (name, self.report()))
        servers = [m for m in self.members if m.name[0] != "worker" and not m.killed]
        wait_until(lambda: not any(m.lives() for m in servers), lambda: "all servers end\n" + self.report())
        for m in self.members:
            m.join()
        expect(all(m.process.returncode == 0 for m in self.members if not m.killed), "all end well", self.report())
        self.check_deaths()
        finals = workers[0].finals
        expect(len(finals) == MOST and all(m.finals == finals for m in workers), "all read the same model",
               "%s\n%s" % ([m.finals for m in workers], self.report()))
        for rank in range(MOST):
            lives = [m for m in self.members if m.name[0] == "worker" and m.rank == rank]
            started, done = sum(m.started for m in lives), sum(m.done for m in lives)
            least, most = finals[rank]
            expect(done <= least and most <= started, "rank %d: %d updates were acknowledged, %d begun; the model has %g to %g"
                   % (rank, done, started, least, most), self.report())

    def run(self, until):
        events = [self.pause_one, self.pause_all, self.kill_worker, self.join, self.join, self.kill_copy, self.fill_disk, self.reshape]
        try:
            self.begin()
            turn = []
            while time.monotonic() < until:
                turn = turn or self.dice.sample(events, len(events))
                turn.pop()()
            self.finish()
        finally:
            for m in self.members:
                send(m.process.pid, signal.SIGCONT)
            for m in self.members:
                with contextlib.suppress(ValueError, OSError):
                    m.process.kill()
                    m.process.wait()
            self.folder.cleanup()


@cases("loopback", "shaped links")
def test_all_of_it(where):
    place, seed, events, updates = {"loopback": Loopback, "shaped links": Shaped}[where], SEED, 0, 0
    over = time.monotonic() + SECONDS
    while seed == SEED or time.monotonic() < over:
        with place() as one, small_disk() as disk:
            mix = Mix(one, seed, disk)
            mix.run(min(over, time.monotonic() + RUN_SECONDS))
        seed, events, updates = seed + 1, events + len(mix.history), updates + sum(m.done for m in mix.members)
    tell("%s: %d fabrics, %d events, %d acknowledged updates, none lost, none doubled, no false death"
         % (where, seed - SEED, events, updates))


if __name__ == "__main__":
    main(globals(), jobs=2)
