#!/usr/bin/env python3
# lane: check
"""Many processes on one host: how much memory the library takes, as /proc tells it. A page that processes share counts once."""
import os
import re
import subprocess

from process import RUN, Skip, expect, finish, helper, main, start

WORKERS, LIMIT_MB = 128, 8.0
NEEDED_MB = 4000  # while the workers' own buffers are there
MODEL, REDUCED, ROUNDS = 4000000, 4 << 20, 1


def available_mb():
    with open("/proc/meminfo", encoding="ascii") as file:
        return int(re.search(r"MemAvailable: *(\d+) kB", file.read()).group(1)) // 1000


def family(pid):
    """A process and its children."""
    with open("/proc/%d/task/%d/children" % (pid, pid), encoding="ascii") as file:
        return [pid] + [int(child) for child in file.read().split()]


def proportional_mb(pid):
    """The process's own pages, and its part of those that it shares with others."""
    with open("/proc/%d/smaps_rollup" % pid, encoding="ascii") as file:
        return int(re.search(r"^Pss: *(\d+) kB", file.read(), re.M).group(1)) * 1024 / 1e6


def test_128_workers_and_a_server():
    if not os.path.exists("/proc/self/smaps_rollup"):
        raise Skip("this system does not tell the memory of processes")
    if available_mb() < NEEDED_MB:
        raise Skip("%d MB are available, %d are needed" % (available_mb(), NEEDED_MB))
    # So many processes on two cores are silent for seconds.
    job = start(RUN, "-n", WORKERS, "-s", 1, "--set", "heartbeat_ms=3000", helper("crowd"), MODEL, REDUCED, ROUNDS,
                stdin=subprocess.PIPE)
    mb = []
    for line in job.stdout:
        if line.endswith("ready\n"):
            mb = sorted(proportional_mb(pid) for pid in family(job.pid))
            break
    result = finish(job)  # ends their standard input, too
    expect(result.code == 0, "all end well", result)
    expect(len(mb) == WORKERS + 2, "mlfab-run, the workers and the server are there", mb)
    each = sum(mb) / (WORKERS + 1)
    print("# %.2f MB a process; the median is %.2f, the largest %.1f" % (each, mb[len(mb) // 2], mb[-1]))
    expect(each < LIMIT_MB, "%.2f MB a process" % each)


if __name__ == "__main__":
    main(globals())
