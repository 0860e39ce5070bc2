#!/usr/bin/env python3
"""Partial allreduces of 32 real processes over shared memory: eager.py BUILD [FILE.tsv] [--rounds N]

eagerSGD's microbenchmark (§6.1, fig. 8, 9): the ranks call one after the other, 5 ms apart instead of
1 ms, since 32 processes share the few cores of this machine; the mean latency of a call beside that of
a full allreduce, and how many ranks were active. eager_ranks.c says how the sums name them. N: rounds of
majority (128; the spread of its mean needs 512, which take 90 s more). The rest takes 30 s.

   eager/HOW/SIZE   ms a call, mean over ranks and rounds; peer: a full allreduce of the same size;
                    limit: what waiting alone costs, by the ranks that were active

Rows of FILE: name ours unit peer peer_value limit_name limit_value. Ends with 1 when a sum was wrong, or
fewer ranks active than a quorum asks for; goals are only printed.
SPDX-License-Identifier: MIT
"""
import argparse
import os
import resource
import subprocess
import sys
import time

RANKS, STEP_MS = 32, 5
SIZES = {"64B": 64, "4KB": 4096, "64KB": 65536}
# (how, size, rounds); 0: as many as asked for.
CASES = [("full", "64B", 8), ("full", "4KB", 8), ("full", "64KB", 8),
         ("solo", "64B", 24), ("solo", "4KB", 24), ("solo", "64KB", 24),
         ("majority", "64B", 0), ("8", "64B", 24), ("16", "64B", 24), ("16", "64KB", 24)]


def measure(build, rounds):
    """{(how, size): (mean ms, median ms, wrong, [active ranks of each round])}"""
    cases = ["%s:%d:%d" % (how, SIZES[size], count or rounds) for how, size, count in CASES]
    command = [os.path.join(build, "mlfab-run"), "-n", str(RANKS), "-s", "0", "--shm",
               "--no-prefix", os.path.join(build, "bench-eager_ranks"), str(STEP_MS)] + cases
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          timeout=120 + rounds)
    lines = [line.split() for line in done.stdout.splitlines() if " wrong " in line]
    if done.returncode or len(lines) != len(CASES):
        sys.exit("eager: %s ended with %d:\n%s%s" % (" ".join(command), done.returncode,
                                                     done.stdout[-2000:], done.stderr[-2000:]))
    return {(how, size): (float(words[2]), float(words[4]), int(words[6]), list(map(int, words[8:])))
            for (how, size, _), words in zip(CASES, lines)}


def waiting(active):
    """Mean ms that the ranks wait when a round begins with so many, and takes no time."""
    return sum(m * (m - 1) / 2 / RANKS * STEP_MS for m in active) / len(active)


def cpu_seconds():
    """Of all processors, and of programs that have ended."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _, _, irq, softirq = map(int, stat.readline().split()[1:8])
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return busy - ended.ru_utime - ended.ru_stime


def goals(how, size, ratio, active):
    """What the figures are to be, in words."""
    texts, mean = [], sum(active) / len(active)
    if how == "solo":
        texts = ["goal 20", "active %.2f, goal 2 at most" % mean]
    elif how == "majority":
        expected = (RANKS - 1) / 2 * STEP_MS / waiting(active)
        spread = ((RANKS ** 2 - 1) / 12 / len(active)) ** 0.5
        texts = ["goal 1.9 to 3.0", "%.2f by the active ranks" % expected,
                 "active %.1f, goal %.1f +- %.1f" % (mean, (RANKS + 1) / 2, 3 * spread)]
    elif how != "full":
        law = RANKS * (RANKS - 1) / (int(how) * (int(how) - 1))
        texts = ["%.2f by the law" % law, "active %d at least" % min(active)]
    return ["%.2fx" % ratio] + texts


def main():
    parser = argparse.ArgumentParser(prog="eager.py")
    parser.add_argument("build")
    parser.add_argument("tsv", nargs="?")
    parser.add_argument("--rounds", type=int, default=128)
    options = parser.parse_args()
    failures, rows = 0, []
    began, before = time.monotonic(), cpu_seconds()
    found = measure(options.build, options.rounds)
    others = (cpu_seconds() - before) / (time.monotonic() - began)
    print("Partial allreduces, %d processes on %d processors over shared memory, %d ms apart; others "
          "took %.0f %% of one" % (RANKS, os.cpu_count(), STEP_MS, 100 * max(0, others)))
    for (how, size), (mean, median, wrong, active) in found.items():
        full = found[("full", size)][0]
        name = "quorum(%s)" % how if how.isdigit() else how
        print("%-24s %9.4g ms (median %.4g)  %s" % (
            "eager/%s/%s" % (name, size), mean, median,
            "; ".join(goals(how, size, full / mean, active)) if how != "full" else ""))
        if wrong:
            print("  %d sums or notes were wrong" % wrong)
        failures += wrong > 0 or (how.isdigit() and min(active) < int(how))
        if how == "full":
            rows.append((name, size, mean, "-", "-", (RANKS - 1) / 2 * STEP_MS))
        else:
            rows.append((name, size, mean, "full", "%.6g" % full, waiting(active)))
    if options.tsv:
        with open(options.tsv, "a", encoding="utf-8") as file:
            for name, size, mean, peer, value, limit in rows:
                file.write("eager/%s/%s\t%.6g\tms\t%s\t%s\twaiting\t%.6g\n"
                           % (name, size, mean, peer, value, limit))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
