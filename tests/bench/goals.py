#!/usr/bin/env python3
"""The goals of the benchmarks, and which of them are met: goals.py BUILD/bench.tsv

`make bench` ends with this. A line for each goal, in one of these forms:

   NAME: 0.91x the speed of PEER (goal 0.85): met
   NAME: 2.3x the time of PEER (goal 2 at most): missed
   NAME: 11.2 ms (goal 15 at most): met
   NAME: no figure beside PEER (goal 2): not measured

and then how many are met, and those that are missed again. NAME is a row of the file, PEER what was
measured beside it in the same run: a peer, a limit, or another row. Figures are ratios of the medians
in the file. (collective.py prints medians of ratios, which differ a little from these.) The exit
status does not depend on goals: it is 1 when the file cannot be read.
SPDX-License-Identifier: MIT
"""
import fnmatch
import math
import sys

COLUMNS = "name ours unit peer peer_value limit_name limit_value".split()
TIMES = {"us", "ms", "s"}
LEAST, MOST = "least", "most"

BIG = ["1MB", "16MB", "100MB"]
ALL = ["4KB", "64KB"] + BIG
HOWS = ["cached", "kept", "buffer"]


def sizes(names, *goals):
    return dict(zip(names, goals))


# Rows, with {} for a key of the last column; what ours is compared with; the kind; the goals. LEAST is
# a speed, how many times as fast ours is to be, and MOST a time, how many times as long ours may take.
# Of names with | between them, and of a pattern, the best that was measured counts. A unit stands for
# the figure itself.
GOALS = [
    ("push-alloc/shm/{}/1", "add", LEAST, sizes(BIG, 0.85, 0.85, 0.85)),
    ("push/shm/{}/1", "add", LEAST, sizes(BIG, 0.6, 0.7, 0.8)),
    ("pull/shm/{}/1", "memcpy", LEAST, sizes(BIG, 0.9, 0.9, 0.9)),
    ("pull-view/shm/{}/1", "roundtrip/shm/64B/1", MOST, sizes(BIG, 2, 2, 2)),
    ("push/tcp/{}/1", "ZeroMQ", LEAST, {"1MB": 1.2}),
    ("push/tcp/{}/1", "add loop", LEAST, {"1MB": 0.9}),
    ("push-crc/tcp/{}/1", "ZeroMQ", LEAST, {"1MB": 0.9}),
    ("push-crc/tcp/{}/1", "add loop", LEAST, {"1MB": 0.8}),
    ("push-keyed/tcp/{}/1", "GB/s", LEAST, {"1MB": 0.8}),
    ("push/tcp/{}", "copy loop", LEAST, sizes(["1MB/2", "1MB/4", "16MB/2", "16MB/4"], 1, 1, 1, 1)),
    ("roundtrip/{}/64B/1", "cache line", MOST, sizes(["shm", "shm-spin"], 4, 4)),
    ("roundtrip/{}/64B/1", "copy loop", MOST, {"tcp-spin": 1.2}),
    ("collective/allreduce/shm/{}/2", "openmpi-shm", LEAST, sizes(ALL, 2, 3.5, 2, 2.5, 5)),
    ("collective/allreduce/shm/{}/2", "openmpi-shm-malloc", LEAST, {"100MB": 2.5}),
    ("collective/allreduce/shm-alloc/{}/2", "openmpi-shm", LEAST, sizes(ALL, 4, 12, 8, 7, 6)),
    ("collective/allreduce/shm/{}/4", "openmpi-shm", LEAST, sizes(ALL, 2, 2, 1.5, 2, 3)),
    ("collective/allreduce/tcp/{}/2", "openmpi-tcp", LEAST, sizes(ALL, 1.3, 1.25, 1.25, 1.4, 2)),
    ("collective/allreduce/tcp/{}/2", "gloo-*", LEAST, sizes(ALL, 10, 10, 1.5, 1.8, 1.7)),
    ("collective/allreduce/tcp/{}/4", "openmpi-tcp|gloo-*", LEAST, dict.fromkeys(ALL, 1.1)),
    ("plan/servers4/{}", "ms", MOST, {"1000": 15}),
    ("filter/top/{}", "memcpy", LEAST, {"1%": 0.4}),
]
for mpi, peer in [("openmpi", "openmpi-shm"), ("mpich", "mpich")]:
    for lend in ["", "-lend"]:
        for ranks in [2, 4]:
            GOALS.append(("collective/allreduce/mpi-%s%s/{}/%d" % (mpi, lend, ranks), peer, LEAST,
                          dict.fromkeys(BIG, 0.83)))
for transport in ["shm", "tcp"]:
    for tags in [256, 1]:
        GOALS.append(("tagged/%s/%d/all/{}" % (transport, tags), "full-pull", MOST,
                      sizes(HOWS, 1.05, 1.1, 1.1)))
    GOALS.append(("tagged/%s/1/scattered/{}" % transport, "full-pull", MOST, dict.fromkeys(HOWS, 1.1)))


class Row:
    """A row of the benchmark, with everything that was measured beside it."""

    def __init__(self, ours, unit):
        self.ours, self.unit, self.others = ours, unit, {}


def number(text):
    """A figure that others can be divided by, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def read(path):
    """{name: Row}. A row that was measured again replaces what there was."""
    rows = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        if file.readline().rstrip("\n").split("\t") != COLUMNS:
            sys.exit("goals: the first line of %s is not that of a bench.tsv" % path)
        for at, line in enumerate(file, 2):
            fields = line.rstrip("\n").split("\t")
            if len(fields) != len(COLUMNS):
                sys.exit("goals: %s:%d: %d fields instead of %d" % (path, at, len(fields), len(COLUMNS)))
            name, ours, unit = fields[0], number(fields[1]), fields[2]
            if ours is None:
                rows.pop(name, None)
                continue
            if name not in rows or rows[name].ours != ours:
                rows[name] = Row(ours, unit)
            for other, value in [(fields[3], number(fields[4])), (fields[5], number(fields[6]))]:
                if value is not None:
                    rows[name].others[other] = value
    return rows


def compared(rows, name, patterns):
    """(speed, whom): how many times as fast a row is as the best of those it is compared with."""
    if name not in rows:
        return None
    row, found = rows[name], []
    known = {other: r.ours for other, r in rows.items() if r.unit == row.unit}
    known.update(row.others)
    known[row.unit] = 1.0
    for other, value in known.items():
        if any(fnmatch.fnmatchcase(other, pattern) for pattern in patterns.split("|")):
            found.append((value / row.ours if row.unit in TIMES else row.ours / value, other))
    return min(found) if found else None


def judge(rows, name, patterns, kind, goal):
    """(verdict, line) of one goal."""
    found = compared(rows, name, patterns)
    wanted = "goal %g%s" % (goal, " at most" if kind == MOST else "")
    if not found:
        beside = " or ".join(patterns.split("|"))
        return "not measured", "%s: no figure beside %s (%s): not measured" % (name, beside, wanted)
    speed, whom = found
    figure = speed if kind == LEAST else 1 / speed
    verdict = "met" if (figure >= goal if kind == LEAST else figure <= goal) else "missed"
    if whom == rows[name].unit:
        told = "%.4g %s" % (rows[name].ours, whom)
    else:
        told = "%.4gx the %s of %s" % (figure, "speed" if kind == LEAST else "time", whom)
    return verdict, "%s: %s (%s): %s" % (name, told, wanted, verdict)


def report(rows, table):
    """All lines."""
    judged = [judge(rows, name.format(key), patterns, kind, goal)
              for name, patterns, kind, goals in table for key, goal in goals.items()]
    verdicts = [verdict for verdict, _ in judged]
    unknown = verdicts.count("not measured")
    lines = [line for _, line in judged]
    lines.append("goals: %d met, %d missed%s" % (verdicts.count("met"), verdicts.count("missed"),
                                                 ", %d not measured" % unknown if unknown else ""))
    return lines + ["  " + line for verdict, line in judged if verdict == "missed"]


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: goals.py BUILD/bench.tsv")
    try:
        rows = read(sys.argv[1])
    except OSError as error:
        sys.exit("goals: %s: %s" % (sys.argv[1], error.strerror))
    print("\n".join(report(rows, GOALS)))


if __name__ == "__main__":
    main()
