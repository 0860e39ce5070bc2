#!/usr/bin/env python3
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

from process import (RUN, clean_environment, expect, expect_nothing_left, finish, helper, launch, main, run, shared_memory_names, start,
                     wait_until)
from replicas import BEAT, READ, Cast, Counters, Group, children, free_port, send

SERVER, REPLICA, SCHEDULER = ("server", 0), ("replica", 0), ("scheduler", 0)


class Folder:
    """A folder for a test; afterwards nothing of it may be left in /dev/shm."""

    def __enter__(self):
        self.before = shared_memory_names()
        self.folder = tempfile.TemporaryDirectory()
        return self.folder.name

    def __exit__(self, kind, *_):
        self.folder.cleanup()
        if not kind:
            expect_nothing_left(self.before)


# --- nothing fails ---

def undisturbed(transport, **more):
    for workers in (1, 2, 8):
        for servers in (1, 2):
            with Folder() as folder, Group(folder, transport, workers=workers, servers=servers, **more) as group:
                group.in_sync()
                group.end()
                expect(group.check() == 0, "nothing is lost", group.told())
                expect(not group.errors, "it did not end silently: %d workers, %d servers" % (workers, servers),
                       group.told())


def test_undisturbed_over_tcp():
    undisturbed("--tcp")


def test_undisturbed_over_shared_memory():
    undisturbed("--shm")


def test_undisturbed_with_collectives():
    undisturbed("--shm", collective=True)


# --- kills, each process is started again ---

def one_after_the_other(*options, rounds=1, bound=None, servers=1, collective=False, count=0, **settings):
    """Kills server, replica and scheduler, and whatever serves then, each when all copies are there again."""
    with Folder() as folder, Group(folder, "--verbose", *options, servers=servers, collective=collective,
                                   count=count, **settings) as group:
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
        print("# %s: %d kills, serving again after %s heartbeats, %d applied updates lost"
              % (" ".join(options), len(beats), " ".join("%.1f" % b for b in beats), lost))
        return group


def test_kills_over_tcp():
    one_after_the_other("--tcp", "--set", "div_max=inf")


def test_kills_over_shared_memory():
    one_after_the_other("--shm", "--set", "div_max=inf")


def test_kills_in_lock_step():
    """div_max 0: nothing at all may be lost."""
    one_after_the_other("--tcp", bound=0.0)


def test_kills_within_a_bound():
    """An applied update has norm 10."""
    one_after_the_other("--shm", "--set", "div_max=35", bound=35.0)


def test_kills_of_one_of_two_servers():
    one_after_the_other("--tcp", "--set", "div_max=inf", servers=2, rounds=2)


def test_kills_of_a_large_model():
    """Updates of 1.3 MB, which wait for a plan of the scheduler, also at the copy that takes over."""
    one_after_the_other("--tcp", "--set", "div_max=inf", count=40000)
    one_after_the_other("--shm", "--set", "div_max=inf", count=40000, servers=2)


def test_kills_under_collectives():
    """Server 0 knows who takes part in them: its replica goes on with that."""
    one_after_the_other("--tcp", collective=True)
    one_after_the_other("--shm", "--set", "div_max=inf", collective=True)


def test_votes_are_kept():
    """With vote_dir, all three processes are killed one by one, quickly, and go on."""
    with Folder() as folder, tempfile.TemporaryDirectory() as votes:
        with Group(folder, "--tcp", "--verbose", "--set", "vote_dir=" + votes) as group:
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
    with Folder() as folder:
        counters = Counters(folder, 0)
        counters.tell(READ)
        process = start(RUN, "-n", 1, "--replicas", "sh", "-c", "sleep 2; exec %s %s 10"
                        % (helper("replica_worker"), folder), env=clean_environment(MLFAB_TIMEOUT_MS=10000))
        wait_until(lambda: SERVER in children(process.pid), 10, "there is a server")
        time.sleep(0.5)
        send(children(process.pid)[SERVER], signal.SIGKILL)
        result = finish(process, 60)
        expect(result.code == 0, "it trains", result)
        counters.close()


def test_the_run_ends_before_a_copy_is_back():
    """The next process finds nobody to join. It is not waited for, and it is no failure."""
    process = start(RUN, "-n", 1, "--max-workers", 2, "--replicas", helper("stepper"), 100, 50, 0, 20,
                    env=clean_environment(MLFAB_TIMEOUT_MS=20000, MLFAB_HEARTBEAT_MS=400))
    wait_until(lambda: SERVER in children(process.pid), 10, "there is a server")
    time.sleep(0.8)
    send(children(process.pid)[SERVER], signal.SIGKILL)
    result = finish(process, 15)
    expect(result.code == 0 and "it serves" in result.err, "it ends with its worker", result)
    expect(result.err.count("starting server 0 again") == 1, "the copy is started once", result)


# --- stops ---

def stopped(transport, beats):
    """The copy that serves stands still: the other one takes over, and the first becomes its copy."""
    with Folder() as folder, Group(folder, transport, "--set", "div_max=inf") as group:
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
        took_over = len([line for line in group.errors if line.endswith("it serves")])
        expect(took_over == 2 or beats < 12, "each took over from the other once", group.told())


def test_stops_over_tcp():
    stopped("--tcp", 12)


def test_stops_over_shared_memory():
    stopped("--shm", 12)


def test_short_stops():
    stopped("--tcp", 3)


# --- two of three ---

def work(cast, folder, *words, rank=0, **more):
    return cast.start("worker", rank, helper("replica_worker"), folder, 100, *words, **more)


def gone(result, *dead):
    """The worker has failed, and says who is gone."""
    expect(result.code == 1, "the worker fails", result)
    for role in dead:
        name = {"server": r"server 0\b", "replica": "replica", "scheduler": "scheduler"}[role]
        expect(re.search(name, result.err), "its error names the %s" % role, result)


def two_of_three(transport, *dead):
    """Two processes of a group die and stay dead: the group halts, and the worker's error names both."""
    with Folder() as folder, Cast(transport=transport, MLFAB_TIMEOUT_MS=5000) as cast:
        there = {role: cast.start(role) for role in ("server", "replica", "scheduler")}
        worker, counters = work(cast, folder), Counters(folder, 0)
        wait_until(lambda: counters.done_durable > 3 or worker.poll() is not None, 30, "durable pushes")
        for role in dead:
            there[role].send_signal(signal.SIGKILL)
        gone(finish(worker, 30), *dead)
        counters.close()


def test_the_server_and_the_scheduler_die():
    two_of_three("tcp", "server", "scheduler")


def test_the_server_and_its_replica_die():
    two_of_three("shm", "server", "replica")


def test_the_replica_and_the_scheduler_die():
    two_of_three("tcp", "replica", "scheduler")


def test_no_replica_is_in_sync():
    """A durable push fails at its own deadline, and applied ones go on. With a new replica durable ones do, too."""
    with Folder() as folder, Cast(MLFAB_DIV_MAX="inf") as cast:
        there = {role: cast.start(role) for role in ("server", "replica", "scheduler")}
        worker, counters = work(cast, folder, "expires=1500"), Counters(folder, 0)

        def until(condition, what):
            wait_until(lambda: condition() or worker.poll() is not None, 30, what)
            expect(worker.poll() is None, what, finish(worker) if worker.poll() is not None else "")
        until(lambda: counters.done_durable > 3, "durable pushes")
        there["replica"].kill()
        until(lambda: counters.expired > 0, "a durable push expires")
        done, applied = counters.done_durable, counters.done_applied
        until(lambda: counters.expired > 2, "each next one does")
        expect(counters.done_durable == done, "none is answered", counters.done_durable - done)
        expect(counters.done_applied > applied + 3, "applied ones go on", counters.done_applied - applied)
        cast.start("replica")
        until(lambda: counters.done_durable > done + 3, "durable pushes go on")
        counters.tell(READ)
        result = finish(worker, 30)
        expect(result.code == 0, "the worker", result)
        least, most = (float(v) for v in re.search(r"final 0 (\S+) (\S+)", result.out).groups())
        expect(counters.done_durable <= least and most <= counters.started_durable, "what is there", result)
        counters.close()


# --- wrong use ---

def test_a_second_copy():
    """A process that claims the number of a copy that lives is refused, and nobody else notices."""
    with Folder() as folder, Cast(servers=2) as cast:
        for role, number in (("server", 0), ("replica", 0), ("server", 1), ("replica", 1), ("scheduler", 0)):
            cast.start(role, number)
        worker, counters = work(cast, folder), Counters(folder, 0)
        wait_until(lambda: counters.done_durable > 3, 30, "durable pushes")
        for role, number in (("replica", 1), ("server", 1), ("replica", 0)):
            done = counters.done_durable
            second = finish(cast.start(role, number, MLFAB_TIMEOUT_MS=3000), 20)
            named = "%s %d" % (role, number) if role == "server" else "replica of server %d" % number
            expect(second.code == 1 and (named in second.err or "already in use" in second.err),
                   "a second %s is refused" % named, second)
            wait_until(lambda d=done: counters.done_durable > d + 3, 30, "durable pushes go on")
        counters.tell(READ)
        result = finish(worker, 30)
        expect(result.code == 0, "the worker", result)
        counters.close()


def test_who_is_missing():
    """The error of server 0 has the number of the server whose replica is missing."""
    with Cast(servers=2) as cast, Folder() as folder:
        server = cast.start("server", MLFAB_TIMEOUT_MS=3000)  # the others wait longer
        for role, number in (("server", 1), ("replica", 0), ("scheduler", 0)):
            cast.start(role, number)
        work(cast, folder)
        result = finish(server, 20)
        expect(result.code == 1 and "still missing: the replica of server 1" in result.err,
               "it names the replica", result)


def silent_listener():
    """Takes connections, and says nothing."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(50)
    return listener


def test_server_0_finds_no_replica():
    """While it forms a fabric it calls there. Its error says why that led to nothing, and it ends by its deadline."""
    with silent_listener() as listener:
        here = "tcp:127.0.0.1:%d," % free_port()
        for other, text in (("tcp:127.0.0.1:%d" % free_port(), "Connection refused"),
                            ("tcp:no-such-host.invalid:9", "no-such-host.invalid:9: "),
                            ("tcp:127.0.0.1:%d" % listener.getsockname()[1], "said nothing"),
                            ("tcp:10.255.255.1:9", "")):
            with Cast(MLFAB_TIMEOUT_MS=2000, MLFAB_COORDINATOR=here + other) as cast:
                result = finish(cast.start("server"), 10)
                expect(result.code == 1 and "still missing: worker 0" in result.err, "it waits: " + other, result)
                expect("the replica at " + other in result.err and text in result.err or not text, "it says why", result)


def test_strangers_at_the_address_of_the_replica():
    for settings, text in ((dict(MLFAB_JOB="other"), "different names"), (dict(MLFAB_KEY="f" * 64), "key is not this job's")):
        with Cast(**settings) as other, Cast(MLFAB_TIMEOUT_MS=5000) as cast:
            address = cast.coordinator.split(",")[1]
            other.settings["MLFAB_COORDINATOR"] = address + ",tcp:127.0.0.1:%d" % free_port()
            other.start("server")
            result = finish(cast.start("server"), 10)
            expect(result.code == 1 and text in result.err and address + " (the address of its replica)" in result.err,
                   "server 0 names it", result)


def test_a_second_server_0_at_another_address():
    """It cannot know that there is one; the error has what the replica says."""
    with Folder() as folder, Cast() as cast:
        for role in ("server", "replica", "scheduler"):
            cast.start(role)
        worker, counters = work(cast, folder), Counters(folder, 0)
        wait_until(lambda: counters.done_durable > 3, 30, "durable pushes")
        other = "tcp:127.0.0.1:%d,%s" % (free_port(), cast.coordinator.split(",")[1])
        second = finish(cast.start("server", MLFAB_COORDINATOR=other, MLFAB_TIMEOUT_MS=2000), 10)
        expect(second.code == 1 and "the server serves" in second.err, "it is told who serves", second)
        counters.tell(READ)
        expect(finish(worker, 30).code == 0, "nobody else notices")
        counters.close()


def test_other_settings():
    """div_max is a copy's own; that there are replicas is the fabric's."""
    with Folder() as folder, Cast() as cast:
        cast.start("server", MLFAB_DIV_MAX="inf")
        cast.start("replica", MLFAB_DIV_MAX=5)
        cast.start("scheduler")
        worker, counters = work(cast, folder), Counters(folder, 0)
        wait_until(lambda: counters.done_durable > 3, 30, "durable pushes")
        counters.tell(READ)
        expect(finish(worker, 30).code == 0, "the worker")
        counters.close()
    with Cast(MLFAB_TIMEOUT_MS=3000) as cast:
        server = cast.start("server")
        other = finish(cast.start("scheduler", MLFAB_REPLICAS=0), 20)
        expect(other.code == 1 and "replicas" in other.err, "a scheduler of a fabric without replicas", other)
        server.kill()


def refused(text, role="server", **settings):
    values = dict({"MLFAB_COORDINATOR": "tcp:127.0.0.1:9,tcp:127.0.0.1:10", "MLFAB_JOB": "x", "MLFAB_KEY": "0" * 64,
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
    with Folder() as folder, Cast(MLFAB_VOTE_DIR=folder + "/none", MLFAB_TIMEOUT_MS=4000) as cast:
        there = [cast.start(role) for role in ("server", "replica", "scheduler")]
        for process in there:
            result = finish(process, 10)
            expect(result.code == 1 and "vote_dir" in result.err and "/none" in result.err, "it says why", result)
        result = finish(work(cast, folder), 10)
        expect(result.code == 1 and "vote_dir" not in result.err, "the worker finds nobody", result)


def test_a_directory_that_cannot_be_written():
    """No vote is granted that was not stored: nothing takes over, and all say why."""
    with Folder() as folder, tempfile.TemporaryDirectory() as outer:
        votes = outer + "/votes"
        os.mkdir(votes)
        with Cast(MLFAB_VOTE_DIR=votes, MLFAB_TIMEOUT_MS=10000) as cast:
            there = [cast.start(role) for role in ("server", "replica", "scheduler")]
            worker, counters = work(cast, folder), Counters(folder, 0)
            wait_until(lambda: counters.done_durable > 3 or worker.poll() is not None, 30, "durable pushes")
            shutil.rmtree(votes)
            there[0].kill()
            result = finish(worker, 30)
            expect(result.code == 1 and "vote_dir" in result.err, "the worker fails", result)
            for process in there:
                process.kill()
            told = [process.communicate()[1] for process in there]
            expect(any("votes: cannot write" in text and votes in text for text in told), "they say why", told)
            counters.close()


# --- checkpoints ---

def versions(folder, kind):
    """The versions of the commits of worker 0's pushes that were answered; the last line may be cut."""
    with open(folder + "/0.versions", encoding="ascii") as file:
        return [int(line[2:]) for line in file if line.startswith(kind) and line.endswith("\n")]


def whole(saved):
    return len([name for name in os.listdir(saved) if name.endswith(".manifest")])


def resume_after(transport, *dead):
    """A group of which two are gone ends; the next run goes on from its newest checkpoint, whose version it says. What
    that loses are the updates of later versions, and no others."""
    with Folder() as folder, Folder() as second, tempfile.TemporaryDirectory() as saved:
        with Cast(transport=transport, MLFAB_TIMEOUT_MS=5000, MLFAB_CHECKPOINT_DIR=saved,
                  MLFAB_CHECKPOINT_COMMITS=20) as cast:
            there = {role: cast.start(role) for role in ("server", "replica", "scheduler")}
            worker, counters = work(cast, folder, "versions"), Counters(folder, 0)
            wait_until(lambda: whole(saved) >= 2 or worker.poll() is not None, 30, "two checkpoints")
            for role in dead:
                there[role].kill()
            gone(finish(worker, 30), *dead)
        done = {"d": counters.done_durable, "a": counters.done_applied}
        counters.close()
        with Group(second, "--" + transport, "--resume", saved, workers=1) as group:
            group.in_sync()
            group.end()
            told = re.search(r"checkpoint \d+, version (\d+), loaded", group.told())
            expect(told, "it says which version it goes on from", group.told())
            at, model, ours = int(told.group(1)), group.finals[0][2], group.counters[0]
            restored = {"d": model[0] - ours.done_durable, "a": model[2] - ours.done_applied}
        later = {kind: [v for v in versions(folder, kind) if v > at] for kind in done}
        print("# %s killed: %d updates answered, goes on from version %d, which loses %d durable and %d applied ones"
              % (" and ".join(dead), sum(done.values()), at, len(later["d"]), len(later["a"])))
        for kind, answered in done.items():
            expect(len(versions(folder, kind)) == answered, "a line for each", (kind, answered))
            # One that had no answer may be in the checkpoint, too.
            expect(max(0, answered - restored[kind]) == len(later[kind]) and restored[kind] <= answered + 1,
                   "lost is what was made after the checkpoint", (kind, answered, restored, at, later))


def test_resume_without_the_server_and_its_replica():
    resume_after("tcp", "server", "replica")


def test_resume_without_the_server_and_the_scheduler():
    resume_after("shm", "server", "scheduler")


def test_resume_without_the_replica_and_the_scheduler():
    resume_after("tcp", "replica", "scheduler")


if __name__ == "__main__":
    main(globals(), jobs=4)
