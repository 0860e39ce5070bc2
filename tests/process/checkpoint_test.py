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

from fabrics import Watched
from process import RUN, SCALE, cases, clean_environment, expect, finish, helper, kill_run, launch, main, send, start, \
    wait_until

ELEMENTS = 150000  # 1.2 MB: several blocks, and several chunks a block
LIVES = max(4, round(60 * SCALE / 100))


def numbers(names):
    """Those of checkpoints that have a manifest, the newest last; 0 stands for none."""
    found = (re.search(r"checkpoint-(\d+)\.manifest$", name) for name in names)
    return sorted(int(match.group(1)) for match in found if match) or [0]


def live(command, environment, names, dice):
    """One run, killed while it writes. Returns what worker 0 said at its beginning."""
    before = numbers(names())[-1]
    process = start(*command, env=environment)
    line = ""
    try:
        while "] begin" not in line:
            line = process.stdout.readline()
            expect(line, "it goes on", finish(process) if not line else "")
        wait_until(lambda: numbers(names())[-1] > before + 1, "two checkpoints")
        time.sleep(dice.random() * 0.1)
    finally:
        error = kill_run(process) if process.poll() is None else ""
    return [int(word) for word in line.split()[-5:]], error


def lives(command, names, seed, environment=None, after=lambda: None):
    """Runs that go on from each other's checkpoints, with one to three servers: command(servers, commits, resumes)."""
    dice, version = random.Random(seed), 0
    for number in range(LIVES):
        newest = numbers(names())[-1]
        begin, error = live(command(dice.choice([1, 2, 3]), dice.choice([2, 7, 20]), number > 0),
                            environment or clean_environment(), names, dice)
        what = "seed %d, life %d: %s\n%s" % (seed, number, begin, error)
        expect(begin[0] == newest, "the newest checkpoint, %d, is loaded" % newest, what)
        expect(begin[1] == begin[3], "the largest element is the version", what)
        expect(begin[4] <= 48, "a slice has one value", what)
        expect(begin[1] >= version, "it does not go back behind %d" % version, what)
        if number > 0:
            expect("checkpoint %d, version" % newest in error, "mlfab-run says which one it is", what)
        version = begin[1]
        after()


@cases(("--tcp", 1), ("--shm", 2))
def test_killed(transport, seed):
    with tempfile.TemporaryDirectory() as folder:
        def command(servers, commits, resumes):
            return [RUN, "-n", 2, "-s", servers, transport, *(["--resume", folder] if resumes else []), "--set",
                    "checkpoint_dir=" + folder, "--set", "checkpoint_commits=%d" % commits, "--set", "timeout_ms=60000",
                    helper("checkpointer"), ELEMENTS]

        lives(command, lambda: os.listdir(folder), seed,
              after=lambda: expect(len(numbers(os.listdir(folder))) <= 3, "older ones are removed", os.listdir(folder)))


def test_nothing_to_resume():
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("", "there is no checkpoint in '%s'" % folder), ("/no", "No such file or directory")):
            result = launch("-n", 1, "--resume", folder + name, helper("checkpointer"), 1000)
            expect(result.code == 1 and text in result.err, "it says why", result)


def test_no_directory():
    """A directory that does not exist ends the run at once; one that goes away is a line a minute, and one at the end."""
    with tempfile.TemporaryDirectory() as folder:
        at = folder + "/run"
        settings = ["-n", 1, "--set", "checkpoint_dir=" + at, "--set", "checkpoint_commits=1", "--on-failure=continue"]
        result = launch(*settings, helper("checkpointer"), 1000)
        expect(result.code == 1 and "checkpoint_dir '%s'" % at in result.err and "No such file" in result.err,
               "it says which directory", result)
        os.mkdir(at)
        result = launch(*settings, helper("checkpointer"), 1000, 500, at)
        expect(result.code == 0, "training goes on", result)
        expect(1 <= result.err.count("server 0] a checkpoint failed") <= 1 + result.seconds / 60, "a line a minute", result)
        expect(len(re.findall(r"no checkpoint was made: all \d+ failed. The last: .*No such file", result.err)) == 1,
               "it is repeated at the end", result)


class Lost(Watched):
    """A run that begins again when its model is lost. In its directory are checkpoints of another run."""

    def __init__(self, folder, commits, *options):
        self.folder, self.begins = folder, []
        at = ["--set", "checkpoint_dir=" + folder, "--set"]
        other = start(RUN, "-n", 1, *at, "checkpoint_commits=20", helper("checkpointer"), 1000)
        try:
            wait_until(lambda: self.numbers()[-1] > 0, "the other run has a checkpoint")
        finally:
            kill_run(other)
        self.foreign = {name for name in os.listdir(folder) if any("-%08d" % n in name for n in self.numbers())}
        super().__init__("-n", 1, "-s", 1, *options, "--verbose", "--on-failure=restart", "--set", "heartbeat_ms=200", *at,
                         "checkpoint_commits=%d" % commits, helper("checkpointer"), 1000)

    def numbers(self):
        return numbers(os.listdir(self.folder))

    def said(self, role, rank, word, rest):
        if word == "begin":
            self.begins.append([int(x) for x in rest.split()])

    def kill(self, roles):
        there = self.processes()
        for role in roles:
            send(there[role, 0], signal.SIGKILL)  # mlfab-run may have ended it since


@cases(("server",), ("server", "replica"), ("server", "scheduler"), ("server", "replica", "scheduler"))
def test_the_model_is_lost(*dead):
    """The run goes on from its newest checkpoint, and not from the first weights."""
    with tempfile.TemporaryDirectory() as folder, Lost(folder, 20, *["--replicas"] * (len(dead) > 1)) as run:
        first = run.numbers()[-1]
        # mlfab-run has heard of the last but one: the next is not begun before that.
        run.until(lambda: sum(n > first for n in run.numbers()) >= 2, "two checkpoints")
        newest = run.numbers()[-1]
        run.kill(dead)
        run.until(lambda: len(run.begins) == 2, "it begins again")
        number, version, _, most, _ = run.begins[1]
        expect(run.begins[0][0] == 0 and number >= newest and version == most > 0, "it goes on", run.begins)
        run.until(lambda: run.numbers()[-1] > number, "it makes checkpoints again")
        expect(run.foreign <= set(os.listdir(folder)), "those of the other run stay", os.listdir(folder))
        expect("the model is lost" in run.lines(), "it says so", run.told())
        run.process.terminate()
        run.until_end(128 + signal.SIGTERM)


@cases(("server",), ("server", "replica"))
def test_nothing_to_go_on_from(*dead):
    """A run without a checkpoint of its own ends."""
    with tempfile.TemporaryDirectory() as folder, Lost(folder, 10 ** 9, *["--replicas"] * (len(dead) > 1)) as run:
        run.until(lambda: run.begins and "all ranks have joined" in run.lines(), "it begins")
        run.kill(dead)
        run.until_end(128 + signal.SIGKILL)
        expect("made no whole checkpoint to go on from" in run.lines(), "it says why", run.told())
        expect(len(run.begins) == 1 and run.foreign <= set(os.listdir(folder)), "it has not begun again", run.begins)


if __name__ == "__main__":
    main(globals())
