#!/usr/bin/env python3
"""kill -9 of a whole run while it writes checkpoints by itself, again and again; each next run goes on from the newest
one, with another number of servers.

A push adds 1 to every element (checkpointer.c), so the elements are the versions of their slices: the largest must be the
version that the checkpoint has, and no life may go back behind what the one before had begun with.
The newest manifest in the directory must be the one that is loaded: what has a manifest is whole."""
import os
import random
import re
import signal
import tempfile
import time

from process import RUN, SCALE, expect, finish, helper, launch, main, start, wait_until

ELEMENTS = 150000  # 1.2 MB: several blocks, and several chunks a block
LIVES = max(6, round(60 * SCALE / 100))


def manifests(folder):
    names = (re.fullmatch(r"checkpoint-(\d+)\.manifest", name) for name in os.listdir(folder))
    return sorted(int(match.group(1)) for match in names if match)


def live(folder, servers, resume, transport, dice):
    """One run, killed while it writes. Returns what worker 0 said at its beginning."""
    before = manifests(folder)
    resumes = ["--resume", folder] if resume else []
    process = start(RUN, "-n", 2, "-s", servers, transport, "--timeout", 60, *resumes, "--set",
                    "checkpoint_dir=" + folder, "--set", "checkpoint_commits=%d" % dice.choice([2, 7, 20]),
                    "--set", "timeout_ms=20000", helper("checkpointer"), ELEMENTS)
    try:
        line = ""
        while "] begin" not in line:
            line = process.stdout.readline()
            if not line:
                raise AssertionError("it ended: %r" % finish(process))
        wait_until(lambda: (manifests(folder) or [0])[-1] > (before or [0])[-1] + 1, 30, "two checkpoints")
        time.sleep(dice.random() * 0.1)
    finally:
        os.kill(process.pid, signal.SIGKILL)  # and its children with it
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    process.wait()
    time.sleep(0.2)
    return [int(word) for word in line.split()[-5:]], error


def lives(transport, seed):
    dice = random.Random(seed)
    version = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(LIVES):
            newest = (manifests(folder) or [0])[-1]
            servers = dice.choice([1, 2, 3])
            begin, error = live(folder, servers, number > 0, transport, dice)
            what = "seed %d, life %d: %s\n%s" % (seed, number, begin, error)
            expect(begin[0] == newest, "the newest checkpoint, %d, is loaded" % newest, what)
            expect(begin[1] == begin[3], "the largest element is the version", what)
            expect(begin[4] <= 48, "a slice has one value", what)
            expect(begin[1] >= version, "it does not go back behind %d" % version, what)
            if number > 0:
                expect("checkpoint %d, version" % newest in error, "mlfab-run says which one it is", what)
            version = begin[1]
            expect(len(manifests(folder)) <= 3, "older ones are removed", manifests(folder))


def test_killed_over_tcp():
    lives("--tcp", 1)


def test_killed_over_shared_memory():
    lives("--shm", 2)


def test_nothing_to_resume():
    with tempfile.TemporaryDirectory() as folder:
        result = launch("-n", 1, "--resume", folder, "--timeout", 30, helper("checkpointer"), 1000)
        expect(result.code == 1 and "there is no checkpoint in '%s'" % folder in result.err, "it says so", result)
        result = launch("-n", 1, "--resume", folder + "/no", "--timeout", 30, helper("checkpointer"), 1000)
        expect(result.code == 1 and "No such file or directory" in result.err, "it says why", result)


if __name__ == "__main__":
    main(globals())
