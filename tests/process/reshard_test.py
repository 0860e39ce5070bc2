#!/usr/bin/env python3
# lane: test, soak
# limit: 600
"""Slices move between four servers, one to four and back, while eight workers push and pull: real processes.

MLFAB_SCALE: runs of each kind; 10 in `make soak`, over TCP and over shared memory."""
import re

from process import SCALE, clean_environment, expect, helper, launch, main


def moving(transport, times):
    total = 0
    for _ in range(times):
        result = launch("-n", 8, "-s", 4, transport, helper("mover"), 2, 60000,
                        env=clean_environment(MLFAB_TIMEOUT_MS=30000), timeout=120)
        rows = re.findall(r"worker (\d+): applied (\d+) moves (\d+)", result.out)
        expect(result.code == 0 and len(rows) == 8, "an update was lost or doubled, or a call failed",
               result)
        moves = max(int(row[2]) for row in rows)
        expect(moves > 0 and all(int(row[1]) > 0 for row in rows), "nothing moved", result)
        total += moves
    print("# %d moves" % total)


def test_moving_over_tcp():
    moving("--tcp", max(1, int(SCALE / 10)))


def test_moving_over_shared_memory():
    moving("--shm", max(1, int(SCALE / 10)))


if __name__ == "__main__":
    main(globals())
