#!/usr/bin/env python3
# limit: 600
"""Servers with replicas in real processes: killed with SIGKILL, stopped and continued, and set up wrongly.

Each worker counts the updates that were to be durable and those that were to be applied (replica_worker.c), and the model
counts the same: no durable update may be missing, none may be there twice, and of the applied ones at most as many may be
missing as div_max allows, and as stats.updates_lost says."""
import os
import re
import shutil
import signal
import socket
import tempfile
import time

from fabrics import BEAT, READ, Cast, Counters, Group, Watched
from process import (KEY, RUN, address, cases, children, clean_environment, expect, finish, helper, launch, main, run, send,
                     start, tell, wait_until, within)

SERVER, REPLICA, SCHEDULER = ("server", 0), ("replica", 0), ("scheduler", 0)


# --- nothing fails ---

@cases(*((transport, workers, servers, collective) for transport, collective in (("--tcp", 0), ("--shm", 0), ("--shm", 1))
         for workers, servers in ((1, 2), (2, 1), (8, 2))))
def test_undisturbed(transport, workers, servers, collective):
    """With heartbeats of a second nobody takes over only because the machine is busy."""
    with Group(transport, workers=workers, servers=servers, collective=collective, MLFAB_HEARTBEAT_MS=1000) as group:
        group.in_sync()
        group.end()
        expect(group.check() == 0, "nothing is lost", group.told())
        expect(not group.errors, "it did not end silently", group.told())


# --- kills, each process is started again ---

def one_after_the_other(transport, div_max, rounds=1, servers=1, **more):
    """Kills server, replica and scheduler, and whatever serves then, each when all copies are there again."""
    bound = None if div_max == "inf" else float(div_max)
    with Group("--verbose", transport, "--set", "div_max=" + div_max, servers=servers, **more) as group:
        beats = []
        for number in range(rounds):
            for role in ("server", "replica", "scheduler", "replica", "server"):
                name = role, 0 if role == "scheduler" else (number + 1) % servers
                group.in_sync()
                when, pids = group.kill(name)
                beats.append(group.serves_after(when))
                group.replaced(name, pids=pids)
        group.in_sync()
        group.end()
        lost = group.check(bound=bound)
        tell("%s, div_max %s: %d kills, serving again after %s heartbeats, %d applied updates lost"
             % (transport, div_max, len(beats), " ".join("%.1f" % b for b in beats), lost))


@cases(("--tcp", "inf"), ("--shm", "inf"), ("--tcp", "0"), ("--shm", "35"))
def test_kills(transport, div_max):
    """div_max 0 is lock step: nothing at all may be lost. An applied update has norm 10."""
    one_after_the_other(transport, div_max)


def test_kills_of_one_of_two_servers():
    one_after_the_other("--tcp", "inf", servers=2, rounds=2)


@cases(("--tcp", 1), ("--shm", 2))
def test_kills_of_a_large_model(transport, servers):
    """Updates of 1.3 MB, which wait for a plan of the scheduler, also at the copy that takes over."""
    one_after_the_other(transport, "inf", count=40000, servers=servers)


@cases(("--tcp", "0"), ("--shm", "inf"))
def test_kills_under_collectives(transport, div_max):
    """Server 0 knows who takes part in them: its replica goes on with that."""
    one_after_the_other(transport, div_max, collective=True)


def test_votes_are_kept():
    """With vote_dir, all three processes are killed one by one, quickly, and go on."""
    with tempfile.TemporaryDirectory() as votes, Group("--tcp", "--verbose", "--set", "vote_dir=" + votes) as group:
        for name in (SCHEDULER, SERVER, REPLICA, SCHEDULER):
            group.in_sync()
            _, pids = group.kill(name)
            group.replaced(name, pids=pids)
        group.in_sync()
        group.end()
        expect(group.check() == 0, "nothing is lost", group.told())
        files = os.listdir(votes)
        expect(len(files) == 3 and all(f.startswith("votes-") for f in files), "a file for each voter", files)


def test_the_server_dies_before_all_have_joined():
    """There is no fabric yet, so the next process forms it."""
    with tempfile.TemporaryDirectory() as folder:
        counters = Counters(folder, 0)
        counters.tell(READ)
        process = start(RUN, "-n", 1, "--replicas", "sh", "-c", "while [ ! -e %s/go ]; do sleep 0.05; done; exec %s %s 10"
                        % (folder, helper("replica_worker"), folder), env=clean_environment(MLFAB_TIMEOUT_MS=60000))
        wait_until(lambda: SERVER in children(process.pid), "there is a server")
        time.sleep(0.3)
        pid = children(process.pid)[SERVER]
        send(pid, signal.SIGKILL)
        wait_until(lambda: children(process.pid).get(SERVER, pid) != pid, "there is another one")
        open(folder + "/go", "w", encoding="ascii").close()
        result = finish(process)
        expect(result.code == 0, "it trains", result)
        counters.close()


def test_the_run_ends_before_a_copy_is_back():
    """The next process finds nobody to join. Nobody waits for it, and the run ends well. On a busy machine the worker may end
    before the kill: then there are more steps."""
    expect(any(dies_before_the_end(steps) for steps in (50, 200, 800)), "the server is killed while the worker trains")


def dies_before_the_end(steps):
    """Was the server killed before the worker had made its steps?"""
    began = []
    with Watched("-n", 1, "--max-workers", 2, "--replicas", helper("stepper"), 100, steps, 0, 20, MLFAB_TIMEOUT_MS=60000,
                 MLFAB_HEARTBEAT_MS=400) as job:
        job.said = lambda role, rank, word, rest: began.append(word)
        wait_until(lambda: "began" in began, "the worker trains")
        there = job.processes()
        if SERVER in there and ("worker", 0) in there:
            send(there[SERVER], signal.SIGKILL)
        job.until_end()
        if "starting server 0 again" not in job.lines():
            tell("test_the_run_ends_before_a_copy_is_back: not within %d steps" % steps)
            return False
        expect("it serves" in job.lines(), "it ends with its worker", job.told())
        expect(job.lines().count("starting server 0 again") == 1, "the copy is started once", job.told())
        return True


# --- stops ---

@cases(("--tcp", 12), ("--shm", 12), ("--tcp", 3))
def test_stops(transport, beats):
    """The copy that serves stands still: the other one takes over, and the first becomes its copy. A short stop changes
    nothing."""
    with Group(transport, "--set", "div_max=inf") as group:
        group.in_sync()
        for name in (SERVER, REPLICA):
            when, _ = group.kill(name, number=signal.SIGSTOP)
            until = time.monotonic() + beats * BEAT
            if beats >= 12:
                group.serves_after(when)
            time.sleep(max(0.0, until - time.monotonic()))
            group.kill(name, number=signal.SIGCONT)
            group.in_sync()
        group.end()
        group.check()
        expect(not any(re.search("killed|exited|dead", line) for line in group.errors), "nobody dies", group.told())
        took_over = {line.split("]")[0] for line in group.errors if line.endswith("it serves")}
        expect(took_over == {"[server 0", "[replica 0"} or beats < 12, "each took over from the other", group.told())


# --- two of three ---

def gone(result, *dead):
    """The worker has failed, and says who is gone."""
    expect(result.code == 1, "the worker fails", result)
    for role in dead:
        name = {"server": r"server 0\b", "replica": "replica", "scheduler": "scheduler"}[role]
        expect(re.search(name, result.err), "its error names the %s" % role, result)


@cases(("tcp", "server", "scheduler"), ("shm", "server", "replica"), ("tcp", "replica", "scheduler"))
def test_two_of_three_die(transport, *dead):
    """Two processes of a group die and stay dead: the group halts, and the worker's error names both."""
    with Cast(transport=transport) as cast:
        worker = cast.work()
        cast.in_sync()
        for role in dead:
            cast.there[role, 0].kill()
        gone(finish(worker), *dead)


def test_no_replica_is_in_sync():
    """A durable push fails at its own deadline, and applied ones go on. With a new replica durable ones do, too."""
    with Cast(MLFAB_DIV_MAX="inf") as cast:
        worker, counters = cast.work("expires=1500"), cast.counters
        cast.in_sync()
        expired = counters.expired
        cast.there[REPLICA].kill()
        cast.until(lambda: counters.expired > expired, "a durable push expires")
        done, applied = counters.done_durable, counters.done_applied
        cast.until(lambda: counters.expired > expired + 2, "each next one does")
        expect(counters.done_durable == done, "none is answered", counters.done_durable - done)
        expect(counters.done_applied > applied + 3, "applied ones go on", counters.done_applied - applied)
        cast.start("replica")
        cast.in_sync()
        counters.tell(READ)
        result = finish(worker)
        expect(result.code == 0, "the worker", result)
        least, most = (float(v) for v in re.search(r"final 0 (\S+) (\S+)", result.out).groups())
        expect(counters.done_durable <= least and most <= counters.started_durable, "what is there", result)


# --- wrong use ---

def ends_well(cast):
    cast.counters.tell(READ)
    result = finish(cast.there["worker", 0])
    expect(result.code == 0, "nobody else notices", result)


def test_a_second_copy():
    """A process that claims the number of a copy that lives is refused, and nobody else notices. The copy has five heartbeats to
    show that it lives: more than a busy machine makes of them."""
    with Cast(servers=2, MLFAB_HEARTBEAT_MS=2000) as cast:
        cast.work()
        cast.in_sync()
        for role, number in (("replica", 1), ("server", 1), ("replica", 0)):
            second = finish(cast.start(role, number))
            named = "%s %d" % (role, number) if role == "server" else "replica of server %d" % number
            expect(second.code == 1 and (named in second.err or "already in use" in second.err),
                   "a second %s is refused" % named, second)
            cast.in_sync()
        ends_well(cast)


@cases(())
@within(5000)
def test_who_is_missing(ms):
    """The error of server 0 has the number of the server whose replica is missing."""
    with Cast(servers=2, MLFAB_TIMEOUT_MS=100000) as cast:
        server = cast.start("server", MLFAB_TIMEOUT_MS=ms)  # the others wait longer
        cast.there["replica", 1] = None
        cast.work()
        result = finish(server)
        expect(result.code == 1 and "still missing: the replica of server 1" in result.err, "it names the replica", result)


@cases("refuses", "has no name", "is silent", "is far away")
@within(4000)
def test_server_0_finds_no_replica(how, ms):
    """While it forms a fabric it calls there. Its error says why that led to nothing, and it ends by its deadline."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections, and says nothing
        other, text = {"refuses": (address("tcp"), "Connection refused"),
                       "has no name": ("tcp:no-such-host.invalid:9", "no-such-host.invalid:9: "),
                       "is silent": ("tcp:127.0.0.1:%d" % listener.getsockname()[1], "said nothing"),
                       "is far away": ("tcp:10.255.255.1:9", "")}[how]
        with Cast(MLFAB_TIMEOUT_MS=ms, MLFAB_COORDINATOR=address("tcp") + "," + other) as cast:
            result = finish(cast.start("server"))
            expect(result.code == 1 and "still missing: worker 0" in result.err, "it waits: " + other, result)
            expect("the replica at " + other in result.err and text in result.err or not text, "it says why", result)


@cases(("MLFAB_JOB", "other", "different names"), ("MLFAB_KEY", "f" * 64, "key is not this job's"))
@within(5000)
def test_strangers_at_the_address_of_the_replica(name, value, text, ms):
    with Cast(**{name: value, "MLFAB_TIMEOUT_MS": 100000}) as other, Cast(MLFAB_TIMEOUT_MS=ms) as cast:
        at = cast.coordinator.split(",")[1]
        other.settings["MLFAB_COORDINATOR"] = at + "," + address("tcp")
        other.start("server")
        result = finish(cast.start("server"))
        expect(result.code == 1 and text in result.err and at + " (the address of its replica)" in result.err,
               "server 0 names it", result)


@cases(())
@within(3000)
def test_a_second_server_0_at_another_address(ms):
    """It cannot know that there is one; the error has what the replica says."""
    with Cast() as cast:
        cast.work()
        cast.in_sync()
        other = address("tcp") + "," + cast.coordinator.split(",")[1]
        second = finish(cast.start("server", MLFAB_COORDINATOR=other, MLFAB_TIMEOUT_MS=ms))
        expect(second.code == 1 and "the server serves" in second.err, "it is told who serves", second)
        ends_well(cast)


def test_other_settings():
    """div_max is a copy's own; that there are replicas is the fabric's."""
    with Cast() as cast:
        cast.start("server", MLFAB_DIV_MAX="inf")
        cast.start("replica", MLFAB_DIV_MAX=5)
        cast.work()
        cast.in_sync()
        ends_well(cast)
    with Cast() as cast:
        cast.start("server")
        other = finish(cast.start("scheduler", MLFAB_REPLICAS=0))
        expect(other.code == 1 and "replicas" in other.err, "a scheduler of a fabric without replicas", other)


def refused(text, role="server", **settings):
    values = dict({"MLFAB_COORDINATOR": "tcp:127.0.0.1:9,tcp:127.0.0.1:10", "MLFAB_JOB": "x", "MLFAB_KEY": KEY,
                   "MLFAB_WORKERS": 1, "MLFAB_SERVERS": 1, "MLFAB_DEDICATED": 1, "MLFAB_REPLICAS": 1,
                   "MLFAB_SCHEDULER": "own", "MLFAB_ROLE": role, "MLFAB_RANK": 0, "MLFAB_TIMEOUT_MS": 2000}, **settings)
    result = run(RUN, "--mlfab-run-server", "quiet",
                 env=clean_environment(**{k: v for k, v in values.items() if v is not None}))
    expect(result.code == 1 and text in result.err.lower(), "%s %s" % (role, settings), result)


def test_wrong_settings():
    refused("scheduler", MLFAB_SCHEDULER="beside")
    refused("scheduler", MLFAB_SCHEDULER="none")
    refused("dedicated", MLFAB_DEDICATED=0, MLFAB_ROLE=None)
    refused("div_max", MLFAB_DIV_MAX=-1)
    refused("div_max", MLFAB_DIV_MAX="nan")
    refused("replica", role="replica", MLFAB_REPLICAS=0)
    refused("div_max needs replicas", MLFAB_REPLICAS=0, MLFAB_DIV_MAX="inf")
    refused("vote_dir needs replicas", MLFAB_REPLICAS=0, MLFAB_VOTE_DIR="/tmp")
    refused("replicas", MLFAB_REPLICAS=2)
    refused("servers_max", MLFAB_SERVERS_MAX=2)
    for arguments, text in [(("--scheduler=beside",), "--replicas needs --scheduler=own"),
                            (("-s", 0), "--replicas does not go with -s 0"),
                            (("--max-servers", 2), "--replicas does not go with --max-servers"),
                            (("--set", "div_max=-1"), "div_max"), (("--set", "div_max=nan"), "div_max")]:
        result = launch("-n", 1, "--replicas", *arguments, helper("replica_worker"), "/tmp", 1)
        expect(result.code in (1, 2) and text in result.err, "mlfab-run %s" % (arguments,), result)
    result = launch("-n", 1, "--replicas", "--delay-bound", 9, helper("stepper"), 100, 2)
    expect(result.code == 0, "--replicas brings a scheduler, so there may be a delay bound", result)


def test_a_directory_that_is_not_there():
    """Each voter refuses it when it opens, not when its vote is needed. Workers have no votes."""
    with Cast(MLFAB_VOTE_DIR="/nonexistent/none") as cast:
        worker = cast.work(MLFAB_TIMEOUT_MS=2000)
        for name in (SERVER, REPLICA, SCHEDULER):
            result = finish(cast.there[name])
            expect(result.code == 1 and "vote_dir" in result.err and "/none" in result.err, "it says why", result)
        result = finish(worker)
        expect(result.code == 1 and "vote_dir" not in result.err, "the worker finds nobody", result)


@cases(())
@within(10000)
def test_a_directory_that_cannot_be_written(ms):
    """No vote is granted that was not stored: nothing takes over, and all say why."""
    with tempfile.TemporaryDirectory() as outer:
        votes = outer + "/votes"
        os.mkdir(votes)
        with Cast(MLFAB_VOTE_DIR=votes, MLFAB_TIMEOUT_MS=ms) as cast:
            worker = cast.work()
            cast.in_sync()
            shutil.rmtree(votes)
            cast.there[SERVER].kill()
            result = finish(worker)
            expect(result.code == 1 and "vote_dir" in result.err, "the worker fails", result)
            for name in (REPLICA, SCHEDULER):
                cast.there[name].kill()
            told = [cast.there[name].communicate()[1] for name in (SERVER, REPLICA, SCHEDULER)]
            expect(any("votes: cannot write" in text and votes in text for text in told), "they say why", told)


# --- checkpoints ---

def versions(folder, kind):
    """The versions of the commits of worker 0's pushes that were answered; the last line may be cut."""
    with open(folder + "/0.versions", encoding="ascii") as file:
        return [int(line[2:]) for line in file if line.startswith(kind) and line.endswith("\n")]


@cases(("tcp", "server", "replica"), ("shm", "server", "scheduler"), ("tcp", "replica", "scheduler"))
def test_resume_without(transport, *dead):
    """A group of which two are gone ends; the next run goes on from its newest checkpoint, whose version it says. What
    that loses are the updates of later versions, and no others."""
    with tempfile.TemporaryDirectory() as saved, Cast(transport=transport, MLFAB_CHECKPOINT_DIR=saved,
                                                      MLFAB_CHECKPOINT_COMMITS=20) as cast:
        worker = cast.work("versions")
        cast.until(lambda: len([n for n in os.listdir(saved) if n.endswith(".manifest")]) >= 2, "two checkpoints")
        for role in dead:
            cast.there[role, 0].kill()
        gone(finish(worker), *dead)
        done = {"d": cast.counters.done_durable, "a": cast.counters.done_applied}
        with Group("--" + transport, "--resume", saved, workers=1) as group:
            group.in_sync()
            group.end()
            told = re.search(r"checkpoint \d+, version (\d+), loaded", group.lines())
            expect(told, "it says which version it goes on from", group.told())
            at, model, ours = int(told.group(1)), group.finals[0][2], group.counters[0]
            restored = {"d": model[0] - ours.done_durable, "a": model[2] - ours.done_applied}
        answered = {kind: versions(cast.folder.name, kind) for kind in done}
        later = {kind: len([v for v in answered[kind] if v > at]) for kind in done}
        tell("%s killed: %d updates answered, goes on from version %d, which loses %d durable and %d applied ones"
             % (" and ".join(dead), sum(done.values()), at, later["d"], later["a"]))
        for kind, count in done.items():
            expect(len(answered[kind]) == count, "a line for each", (kind, count))
            # One that had no answer may be in the checkpoint, too.
            expect(max(0, count - restored[kind]) == later[kind] and restored[kind] <= count + 1,
                   "lost is what was made after the checkpoint", (kind, count, restored, at, later))


if __name__ == "__main__":
    main(globals())
