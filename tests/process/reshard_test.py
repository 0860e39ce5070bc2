#!/usr/bin/env python3
# lane: test, soak
# limit: 600
"""Slices move between four servers, one to four and back, while eight workers push and pull: real processes.

MLFAB_SCALE: runs of each kind; 10 in `make soak`, over TCP and over shared memory."""
import re

from process import SCALE, cases, clean_environment, expect, helper, launch, main

MOVES = 16


@cases("--tcp", "--shm")
def test_moving(transport):
    for _ in range(max(1, int(SCALE / 10))):
        result = launch("-n", 8, "-s", 4, transport, helper("elastic"), "move", MOVES,
                        env=clean_environment(MLFAB_TIMEOUT_MS=60000))
        rows = re.findall(r"worker \d+: updates (\d+)", result.out)
        expect(result.code == 0 and len(rows) == 8, "an update was lost or doubled, or a call failed", result)
        expect(all(int(updates) > 0 for updates in rows), "all have pushed", result)


if __name__ == "__main__":
    main(globals())
