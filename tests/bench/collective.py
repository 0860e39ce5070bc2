#!/usr/bin/env python3
"""Allreduce beside Open MPI and Gloo: collective.py BUILD [FILE.tsv] [--only PREFIX] [--seconds S]

Every contestant is a group of processes that stay and sleep while others are measured
(collective_common.h says how they are told). In a cell (a number of ranks, a size) all of them run
a trial each in turns, and so do the limits; what is told is the median of a contestant's trials,
and the median of its ratios with ours in the same turn, since a machine's state changes within
seconds. Slowest rank's time, float32, sum, in place.

   collective/allreduce/HOW/SIZE/RANKS   us a call; HOW: shm (shared memory, the caller's arrays),
                                         shm-alloc (arrays of mlfab_alloc), tcp (no checksum over
                                         payloads), mpi-openmpi, mpi-mpich (mlfab over that MPI),
                                         mpi-openmpi-lend, mpi-mpich-lend (with mpi_lend)

Peers: Open MPI over shared memory (btl vader; at 100 MB also with malloc told to keep its memory)
and over TCP (btl tcp), Gloo's algorithms over TCP; MPICH. Over an MPI, that MPI's own. Those that are not installed are left out.
Limits: see collective_limit.c. It takes a little more than S (110) seconds. Goals: goals.py.

Rows of FILE: name ours unit peer peer_value limit_name limit_value.
SPDX-License-Identifier: MIT
"""
import argparse
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from eager import cpu_seconds

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"4KB": 4 * KIB, "64KB": 64 * KIB, "1MB": MIB, "16MB": 16 * MIB, "100MB": 100 * MIB}
SHARES = {"4KB": 0.1, "64KB": 0.1, "1MB": 0.15, "16MB": 0.25, "100MB": 0.4}  # of the time
RANKS = [2, 4]
TRIAL_S, TRIALS_MIN, TRIALS_MAX, CALLS_MAX = 0.03, 3, 21, 5000
ANSWER_S = 60

# What ours is measured against, and the figure's limit.
PEERS = {
    "shm": (["openmpi-shm", "openmpi-shm-malloc"], "copy"),
    "shm-alloc": (["openmpi-shm", "openmpi-shm-malloc"], "add"),
    "mpi-openmpi": (["openmpi-shm"], "copy"),
    "mpi-mpich": (["mpich"], "copy"),
    "mpi-openmpi-lend": (["openmpi-shm"], "copy"),
    "mpi-mpich-lend": (["mpich"], "copy"),
    "tcp": (["openmpi-tcp", "gloo-ring", "gloo-halving-doubling", "gloo-bcube"], "loopback"),
}
LIMITS = {limit for _, limit in PEERS.values()}


class Failure(Exception):
    pass


class Group:
    """A contestant's processes."""

    def __init__(self, name, ranks, command, env):
        self.name, self.ranks, self.seen = name, ranks, b""
        self.dir = tempfile.mkdtemp(prefix="mlfab-collective-")
        for pipe in ["out"] + ["in.%d" % i for i in range(ranks)]:
            os.mkfifo(os.path.join(self.dir, pipe))
        # Open at both ends here, so that nobody waits in open and nobody sees an end too early.
        self.orders = [os.open(os.path.join(self.dir, "in.%d" % i), os.O_RDWR)
                       for i in range(ranks)]
        self.out = os.open(os.path.join(self.dir, "out"), os.O_RDWR)
        with open(os.path.join(self.dir, "log"), "wb") as log:
            self.process = subprocess.Popen(
                [self.dir if word == "DIR" else word for word in command], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, env=dict(os.environ, **env), start_new_session=True)

    def said(self):
        with open(os.path.join(self.dir, "log"), encoding="utf-8", errors="replace") as log:
            return log.read()[-400:].strip()

    def ask(self, order):
        """Seconds of the slowest rank."""
        for pipe in self.orders:
            os.write(pipe, order.encode() + b"\n")
        until, answers = time.monotonic() + ANSWER_S, []
        while len(answers) < self.ranks:
            if select.select([self.out], [], [], 0.2)[0]:
                lines = (self.seen + os.read(self.out, 4096)).split(b"\n")
                self.seen = lines.pop()
                answers += [line.decode().split()[1] for line in lines]
            elif self.process.poll() is not None:
                raise Failure("ended with %d: %s" % (self.process.returncode, self.said()))
            elif time.monotonic() > until:
                raise Failure("no answer to '%s' within %d s: %s" % (order, ANSWER_S, self.said()))
        if "wrong" in answers:
            raise Failure("a wrong sum after '%s'" % order)
        return max(float(answer) for answer in answers)

    def begin(self, size):
        """The first call of a size; limits have no sum to look at."""
        self.ask("run %d 1" % size if self.name in LIMITS else "check %d" % size)

    def stop(self):
        for pipe in self.orders + [self.out]:
            os.close(pipe)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # what has not ended by itself
        except ProcessLookupError:
            pass
        self.process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


def contestants(build, ranks):
    """{name: (command, environment)} of all that can play, and what is left out."""
    def program(name):
        return os.path.join(build, name)

    run = [program("mlfab-run"), "-n", str(ranks), "-s", "0", "--no-prefix"]
    ours, limit = program("bench-collective_ours"), program("bench-collective_limit")
    mpi, gloo = program("bench-collective_mpi"), program("bench-collective_gloo")
    found = {
        "shm": (run + ["--shm", ours, "DIR"], {}),
        "shm-alloc": (run + ["--shm", ours, "DIR", "alloc"], {}),
        "tcp": (run + ["--tcp", "--insecure", ours, "DIR"], {"MLFAB_PAYLOAD_CRC": "0"}),
        "copy": ([limit, "copy", str(ranks), "DIR"], {}),
        "add": ([limit, "add", str(ranks), "DIR"], {}),
        "loopback": ([limit, "tcp", str(ranks), "DIR"], {}),
    }
    missing = []
    if os.path.exists(mpi) and shutil.which("mpirun"):
        # In a folder of its own: several that start and end at a time take away each other's.
        launch = ["mpirun", "-np", str(ranks), "--mca", "orte_tmpdir_base", "DIR",
                  "--mca", "pml", "ob1"]
        if os.geteuid() == 0:
            launch.append("--allow-run-as-root")
        if ranks > os.cpu_count():
            launch += ["--oversubscribe", "--bind-to", "none"]
        shared = launch + ["--mca", "btl", "vader,self", mpi, "DIR"]
        found["openmpi-shm"] = (shared, {})
        found["openmpi-shm-malloc"] = (shared, {"MALLOC_MMAP_THRESHOLD_": str(1 << 30),
                                                "MALLOC_TRIM_THRESHOLD_": str(1 << 30)})
        found["openmpi-tcp"] = (launch + ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include",
                                          "lo", mpi, "DIR"], {})
        over = program("mpi/openmpi/bench-collective_ours")
        if os.path.exists(over):
            for name, lend in (("mpi-openmpi", "0"), ("mpi-openmpi-lend", "1")):
                found[name] = (launch + ["--mca", "btl", "vader,self", "-x", "MLFAB_TRANSPORT=mpi",
                                         "-x", "MLFAB_MPI_LEND=" + lend, over, "DIR"], {})
    else:
        missing.append("Open MPI (libopenmpi-dev)")
    mpich = program("mpi/mpich/bench-collective_mpi")
    if os.path.exists(mpich):
        launch = ["mpirun.mpich", "-launcher", "fork", "-n", str(ranks)]
        found["mpich"] = (launch + [mpich, "DIR"], {})
        for name, lend in (("mpi-mpich", "0"), ("mpi-mpich-lend", "1")):
            found[name] = (launch + [program("mpi/mpich/bench-collective_ours"), "DIR"],
                           {"MLFAB_TRANSPORT": "mpi", "MLFAB_MPI_LEND": lend})
    else:
        missing.append("MPICH (libmpich-dev)")
    if os.path.exists(gloo):
        for algorithm in ["ring", "halving-doubling", "bcube"]:
            found["gloo-" + algorithm] = ([gloo, str(ranks), algorithm, "DIR"], {})
    else:
        missing.append("Gloo (libgloo-dev)")
    return found, missing


class Bench:
    def __init__(self, options):
        self.options, self.failures, self.figures = options, 0, 0
        self.groups = {}
        self.file = open(options.tsv, "a", encoding="utf-8") if options.tsv else None

    def lost(self, name, ranks, why):
        """A contestant that cannot go on."""
        self.groups.pop(name).stop()
        print("%s, %d ranks: failed: %s" % (name, ranks, why))
        self.failures += name in PEERS

    def each(self, names, ranks, what):
        """{name: what(group)} of those that did it."""
        done = {}
        for name in names:
            try:
                if name in self.groups:
                    done[name] = what(self.groups[name])
            except Failure as failure:
                self.lost(name, ranks, str(failure))
        return done

    def cell(self, ranks, size, hows):
        """The rows of a size: {name: [seconds a call, of each turn]}."""
        data, calls = SIZES[size], {}
        names = [n for how in hows for n in [how] + PEERS[how][0] + [PEERS[how][1]]]
        names = [n for n in dict.fromkeys(names) if n != "openmpi-shm-malloc" or size == "100MB"]

        def calibrate(group):
            group.begin(data)
            count = 1
            for _ in range(3):
                seconds = group.ask("run %d %d" % (data, count)) / count
                count = max(1, min(CALLS_MAX, int(TRIAL_S / max(seconds, 1e-9))))
                if seconds > TRIAL_S / 2:
                    break
            calls[group.name] = count

        def trial(group):
            count = calls[group.name]
            return group.ask("run %d %d" % (data, count)) / count

        end = time.monotonic() + self.options.seconds * SHARES[size] / len(RANKS)
        self.each(names, ranks, calibrate)
        times = {}
        for turn in range(TRIALS_MAX):
            if turn >= TRIALS_MIN and time.monotonic() > end:
                break
            # Forwards and backwards, so that nobody always comes behind the same one.
            for name, seconds in self.each(names[::1 - 2 * (turn % 2)], ranks, trial).items():
                times.setdefault(name, []).append(seconds)
        return {name: t for name, t in times.items() if name in self.groups}

    def report(self, how, size, ranks, times):
        name = "collective/allreduce/%s/%s/%d" % (how, size, ranks)
        ours, rows = times[how], []
        peers, limit = PEERS[how]
        bound = statistics.median(times[limit]) * 1e6 if limit in times else None
        value = statistics.median(ours) * 1e6
        line = "%-37s %9.4g us  %s" % (name, value, limit)
        line += " %.4g (%.2fx)" % (bound, value / bound) if bound else " -"
        here = {peer: times[peer] for peer in peers if peer in times}
        rows = [(peer, "%.6g" % (statistics.median(t) * 1e6)) for peer, t in here.items()]
        gloo = [peer for peer in here if peer.startswith("gloo")]
        if gloo:
            here["best of Gloo"] = here[min(gloo, key=lambda peer: statistics.median(here[peer]))]
        for peer, seconds in here.items():
            line += "  %s %.4g (%.2fx)" % (peer, statistics.median(seconds) * 1e6,
                                           statistics.median(s / o for s, o in zip(seconds, ours)))
        print(line, flush=True)
        self.figures += 1
        for peer, microseconds in rows or [("-", "-")]:
            if self.file:
                self.file.write("%s\t%.6g\tus\t%s\t%s\t%s\t%s\n" % (
                    name, value, peer, microseconds, limit if bound else "-",
                    "%.6g" % bound if bound else "-"))

    def wanted(self, ranks, size):
        return [how for how in PEERS if ("collective/allreduce/%s/%s/%d" % (how, size, ranks))
                .startswith(self.options.only)]

    def run(self, ranks):
        found, missing = contestants(self.options.build, ranks)
        cells = [(size, self.wanted(ranks, size)) for size in SIZES]
        if missing and ranks == RANKS[0]:
            print("Left out, since not installed (make deps-check): %s" % ", ".join(missing))
        needed = {n for _, hows in cells for how in hows
                  for n in [how, PEERS[how][1]] + PEERS[how][0]}
        try:
            for name, (command, env) in found.items():
                if name in needed:
                    self.groups[name] = Group(name, ranks, command, env)
            self.each(list(self.groups), ranks, lambda group: group.begin(SIZES["4KB"]))
            for size, hows in cells:
                times = self.cell(ranks, size, hows)
                for how in hows:
                    if how in times:
                        self.report(how, size, ranks, times)
        finally:
            for group in self.groups.values():
                group.stop()
            self.groups = {}


def main():
    parser = argparse.ArgumentParser(prog="collective.py")
    parser.add_argument("build")
    parser.add_argument("tsv", nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=110)
    bench = Bench(parser.parse_args())
    print("Allreduce, us a call, beside the limit (ours / limit) and each peer (times that ours is "
          "faster); %d processors" % os.cpu_count())
    began, before = time.monotonic(), cpu_seconds()
    for ranks in RANKS:
        bench.run(ranks)
    took, after = time.monotonic() - began, cpu_seconds()
    if bench.file:
        bench.file.close()
    others = after - before
    print("%d figures, %d failed; %.0f s, in which other programs took %.0f %% of one processor"
          % (bench.figures, bench.failures, took, 100 * max(0, others) / took))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
