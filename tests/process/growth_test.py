#!/usr/bin/env python3
"""Workers and servers join a fabric that trains: mlfab-run --join, real processes over TCP and shared memory."""
import os
import re
import signal
import tempfile
import time

from process import (KEY, RUN, address, cases, clean_environment, end, expect, finish, finish_all, helper, main, run, start,
                     wait_until)

WORKER = (helper("elastic"), "join", 4)  # one of four


def environment(at, **more):
    return clean_environment(MLFAB_COORDINATOR=at, MLFAB_JOB="growth", MLFAB_KEY=KEY,
                             MLFAB_TIMEOUT_MS=60000, MLFAB_HEARTBEAT_MS=1000, **more)


def found(at, *arguments, **more):
    """Starts the fabric: two workers, and room for four."""
    return start(RUN, "-n", 2, "--max-workers", 4, "--no-prefix", *arguments, env=environment(at, **more))


def join(at, *arguments, **more):
    return start(RUN, "--join", at, "--no-prefix", *arguments, env=environment(at, **more))


def end_well(*processes):
    """All end with 0. Their output, and what they say on stderr."""
    results = finish_all(*processes)
    expect(all(result.code == 0 for result in results), "one failed", results)
    return "".join(result.out for result in results), "".join(result.err for result in results)


def end_silently(*processes):
    out, err = end_well(*processes)
    expect(err == "", "it did not end silently", err)
    return out


def expect_four(out, least=20):
    rows = re.findall(r"worker (\d+): updates (\d+) mean (\S+)", out)
    expect(sorted(int(r[0]) for r in rows) == [0, 1, 2, 3], "other ranks", out)
    expect(all(r[2] == "1.5" and int(r[1]) >= least for r in rows), "another mean", out)


@cases(*((t, c, "-s", 2) for t in ("tcp", "shm") for c in ("bsp", "async", "ssp")), ("tcp", "bsp", "-s", 0),
       ("tcp", "bsp", "-s", 2, "--scheduler=beside"), ("tcp", "bsp", "-s", 2, "--replicas"), ("shm", "bsp", "early"))
def test_workers_join(transport, consistency, *more):
    """With a scheduler, updates are large. "early": the joiners are there first."""
    at, early, program = address(transport), "early" in more, WORKER
    if "--replicas" in more:
        at += "," + address(transport)
    if "--scheduler=beside" in more:
        program += (300000,)
    settings = {"MLFAB_CONSISTENCY": consistency, "MLFAB_STALENESS": 2}
    options = ("-s", 2) if early else more
    begin = [lambda: found(at, *options, "--" + transport, *program, **settings),
             lambda: join(at, "--" + transport, "-n", 2, *program, **settings)]
    processes = []
    for one in begin[::-1] if early else begin:
        processes.append(one())
        time.sleep(0.2)
    expect_four(end_silently(*processes))


@cases(("tcp", "bsp"), ("shm", "ssp"))
def test_workers_join_a_loop(transport, consistency):
    """Each step has a push, a pull and an allreduce; two workers join, one after the other."""
    at, program, settings = address(transport), (helper("elastic"), "loop", 4), {"MLFAB_CONSISTENCY": consistency}
    first = found(at, "-s", 2, "--" + transport, *program, **settings)
    joiners = [join(at, "--" + transport, *program, **settings) for _ in range(2)]
    expect_four(end_silently(first, *joiners))


def test_a_replica_without_an_address():
    result = finish(found(address("tcp"), "--replicas", "true"))
    expect(result.code == 1 and "needs the replica's address" in result.err, "one address suffices", result)


@cases(("tcp",), ("shm",), ("shm", "--scheduler=own"))
def test_servers_join(transport, *more):
    """Two servers join, get slices, give them away, and leave when they are told to."""
    at = address(transport)
    with tempfile.TemporaryDirectory() as folder:
        first = start(RUN, "-n", 2, "-s", 1, "--max-servers", 3, "--no-prefix", "--" + transport, *more,
                      helper("elastic"), "servers", 3, folder, env=environment(at))
        servers = [join(at, "--" + transport, "--servers", 1) for _ in range(2)]
        try:
            wait_until(lambda: os.path.exists(folder + "/emptied") or first.poll() is not None, "they have given slices away")
            for process in servers:
                process.send_signal(signal.SIGTERM)
        except AssertionError:
            end(first, *servers)
            raise
        rows = re.findall(r"worker \d+: updates (\d+)", end_silently(*servers, first))
    expect(len(rows) == 2 and rows[0] == rows[1] and int(rows[0]) >= 40, "other rounds", rows)


def test_a_server_without_slices():
    """It joins, nobody uses it, and it ends with the workers."""
    at = address("unix")
    with tempfile.TemporaryDirectory() as folder:
        first = found(at, "-s", 1, "--max-servers", 2, *WORKER, MLFAB_CONSISTENCY="bsp")
        server = join(at, "--servers", 1, MLFAB_LOG="info:" + folder + "/log")
        log = folder + "/log.server-1"
        wait_until(lambda: server.poll() is not None or os.path.exists(log) and "joined" in open(log).read(), "it joins")
        expect_four(end_silently(join(at, "-n", 2, *WORKER, MLFAB_CONSISTENCY="bsp"), first, server))


def test_no_room_for_a_server():
    at = address("unix")
    first = found(at, "-s", 1, *WORKER, MLFAB_CONSISTENCY="async")
    other = finish(join(at, "--servers", 1))
    expect(other.code == 1 and "no number for one more server: servers is 1, servers_max 1" in other.err,
           "no room", other)
    expect_four(end_silently(join(at, "-n", 2, *WORKER, MLFAB_CONSISTENCY="async"), first))


def heirs(at, first):
    """Two more workers, of which one may have the rank of one that died."""
    expect_four(end_well(join(at, "-n", 2, *WORKER, MLFAB_CONSISTENCY="bsp", JOINER_HEIR=1), first)[0], least=1)


def test_refusals():
    """Another model, another key, no number left: the joiner fails and says why, and the others train on."""
    at = address("unix")
    first = found(at, "-s", 1, *WORKER, MLFAB_CONSISTENCY="bsp")
    other = finish(join(at, *WORKER, 1000))
    expect(other.code == 1 and "tensor number 0 is id 0, 1000 x" in other.err, "another model", other)
    stranger = run(RUN, "--join", at, "--no-prefix", *WORKER, env=dict(environment(at), MLFAB_KEY="f" * 64))
    expect(stranger.code == 1 and "MLFAB_KEY" in stranger.err, "another key", stranger)
    heirs(at, first)


def test_a_joiner_that_dies():
    """kill -9 of a joiner in the middle: the others go on, and a third one takes its part."""
    at = address("unix")
    first = found(at, "-s", 2, *WORKER, MLFAB_CONSISTENCY="bsp")
    victim = start(*WORKER, env=environment(at, MLFAB_JOIN=1, MLFAB_CONSISTENCY="bsp"))
    expect(victim.stdout.readline() == "began\n", "it trains")
    time.sleep(0.1)
    end(victim)
    heirs(at, first)


def test_wrong_usage():
    for arguments, text in [(("--join", "a", "-s", "1", "x"), "--join takes --servers, or workers"),
                            (("--join", "a", "--resume", "d", "x"), "--join starts workers or servers only"),
                            (("-n", "1", "-s", "2", "--max-servers", "1", "x"), "--max-servers is below -s"),
                            (("-n", "1", "-s", "0", "--max-servers", "1", "x"), "does not go with -s 0"),
                            (("--join", "a", "--insecure", "x"), "MLFAB_ALLOW_INSECURE=1"),
                            (("--join", "", "x"), "--join='': its ADDRESS is empty"),
                            (("-n", "3", "--max-workers", "2", "x"), "--max-workers is below -n")]:
        result = run(RUN, *arguments)
        expect(result.code == 2 and text in result.err, "wrong usage", result)
    lonely = run(RUN, "--join", "unix:@mlfab-nobody", "--no-prefix", *WORKER, env=clean_environment(MLFAB_TIMEOUT_MS=300))
    expect(lonely.code == 1 and "no answer from server 0" in lonely.err, "no fabric", lonely)


if __name__ == "__main__":
    main(globals())
