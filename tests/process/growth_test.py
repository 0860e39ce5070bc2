#!/usr/bin/env python3
"""Workers join a fabric that trains: mlfab-run --join, real processes over TCP and shared memory."""
import os
import re
import signal
import socket
import tempfile
import time

from process import RUN, clean_environment, expect, finish, helper, main, run, start

KEY = "0123456789abcdef" * 4


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def place(transport, name):
    """The address of a fabric."""
    if transport == "--tcp":
        return "tcp:127.0.0.1:%d" % free_port()
    return "%s%s-%d-%d" % ("shm:mlfab-" if transport == "--shm" else "unix:@mlfab-", name, os.getpid(), time.monotonic_ns())


def environment(address, **more):
    return clean_environment(MLFAB_COORDINATOR=address, MLFAB_JOB="growth", MLFAB_KEY=KEY,
                             MLFAB_TIMEOUT_MS=40000, MLFAB_HEARTBEAT_MS=200, **more)


def found(address, *arguments, **more):
    """Starts the fabric: two workers, and room for four."""
    return start(RUN, "-n", 2, "--max-workers", 4, "--no-prefix", *arguments, env=environment(address, **more))


def join(address, *arguments, **more):
    return start(RUN, "--join", address, "--no-prefix", *arguments, env=environment(address, **more))


def rows(*results):
    return re.findall(r"worker (\d+): updates (\d+) mean (\S+)", "".join(r.out for r in results))


def growing(transport, consistency, *more, elements=65536, early=False):
    address = place(transport, consistency)
    if "--replicas" in more:
        address += "," + place(transport, consistency + "-replica")
    settings = {"MLFAB_CONSISTENCY": consistency, "MLFAB_STALENESS": 2}
    program = (helper("joiner"), 4, elements)
    second = join(address, transport, "-n", 2, *program, **settings) if early else None
    first = found(address, *(more or ("-s", 2)), transport, *program, **settings)
    time.sleep(0.2)
    second = second or join(address, transport, "-n", 2, *program, **settings)
    results = [finish(second, 60), finish(first, 60)]
    for result in results:
        expect(result.code == 0 and result.err == "", "it did not end silently", result)
    found_rows = rows(*results)
    expect(sorted(int(r[0]) for r in found_rows) == [0, 1, 2, 3], "other ranks", results)
    expect(all(r[2] == "1.5" and int(r[1]) >= 20 for r in found_rows), "another mean", results)


def test_bulk_synchronous_over_tcp():
    growing("--tcp", "bsp")


def test_bulk_synchronous_over_shared_memory():
    growing("--shm", "bsp")


def test_asynchronous_over_tcp():
    growing("--tcp", "async")


def test_asynchronous_over_shared_memory():
    growing("--shm", "async")


def test_stale_synchronous_over_tcp():
    growing("--tcp", "ssp")


def test_stale_synchronous_over_shared_memory():
    growing("--shm", "ssp")


def test_a_worker_that_serves():
    growing("--tcp", "bsp", "-s", 0)


def test_large_updates_with_a_scheduler():
    growing("--tcp", "bsp", "-s", 2, "--scheduler=beside", elements=300000)


def test_joiners_that_are_there_first():
    growing("--shm", "bsp", early=True)


def test_workers_join_servers_with_replicas():
    growing("--tcp", "bsp", "-s", 2, "--replicas")
    result = finish(found(place("--tcp", "one"), "--replicas", "true"))
    expect(result.code == 1 and "needs the replica's address" in result.err, "one address suffices", result)


def changing(transport, *more):
    """Two servers join, get slices, give them away, and leave when they are told to."""
    address = place(transport, "servers")
    with tempfile.TemporaryDirectory() as folder:
        flag = os.path.join(folder, "emptied")
        first = start(RUN, "-n", 2, "-s", 1, "--max-servers", 3, "--no-prefix", transport, *more,
                      helper("elastic"), 3, flag, env=environment(address))
        servers = [join(address, transport, "--servers", 1) for _ in range(2)]
        deadline = time.time() + 60
        while not os.path.exists(flag) and time.time() < deadline and first.poll() is None:
            time.sleep(0.05)
        for process in servers:
            process.send_signal(signal.SIGTERM)
        results = [finish(p, 60) for p in servers + [first]]
    for result in results:
        expect(result.code == 0 and result.err == "", "it did not end silently", results)
    found_rows = re.findall(r"worker (\d+): rounds (\d+)", results[2].out)
    expect(len(found_rows) == 2 and found_rows[0][1] == found_rows[1][1] and int(found_rows[0][1]) >= 40,
           "other rounds", results)


def test_servers_over_tcp():
    changing("--tcp")


def test_servers_over_shared_memory():
    changing("--shm")


def test_servers_and_a_scheduler():
    changing("--shm", "--scheduler=own")


def test_a_server_without_slices():
    """It joins, nobody uses it, and it ends with the workers."""
    address = place("--unix", "idle")
    first = found(address, "-s", 1, "--max-servers", 2, helper("joiner"), 4, MLFAB_CONSISTENCY="bsp")
    server = join(address, "--servers", 1)
    time.sleep(0.3)
    second = join(address, "-n", 2, helper("joiner"), 4, MLFAB_CONSISTENCY="bsp")
    results = [finish(p, 60) for p in (second, first, server)]
    expect(all(r.code == 0 and r.err == "" for r in results), "it did not end silently", results)


def test_no_room_for_a_server():
    address = place("--unix", "room")
    first = found(address, "-s", 1, helper("joiner"), 4, MLFAB_CONSISTENCY="async")
    other = finish(join(address, "--servers", 1), 60)
    expect(other.code == 1 and "no number for one more server: servers is 1, servers_max 1" in other.err,
           "no room", other)
    results = [finish(join(address, "-n", 2, helper("joiner"), 4, MLFAB_CONSISTENCY="async"), 60), finish(first, 60)]
    expect(all(r.code == 0 for r in results), "the others", results)


def test_refusals():
    """Another model, another key, no number left: the joiner fails and says why, and the others train on."""
    address = place("--unix", "refusals")
    first = found(address, "-s", 1, helper("joiner"), 4, MLFAB_CONSISTENCY="bsp")
    other = finish(join(address, helper("joiner"), 4, 1000), 60)
    expect(other.code == 1 and "tensor number 0 is id 0, 1000 x" in other.err, "another model", other)
    stranger = run(RUN, "--join", address, "--no-prefix", helper("joiner"), 4,
                   env=dict(environment(address), MLFAB_KEY="f" * 64))
    expect(stranger.code == 1 and "MLFAB_KEY" in stranger.err, "another key", stranger)
    last = join(address, "-n", 2, helper("joiner"), 4, MLFAB_CONSISTENCY="bsp", JOINER_HEIR=1)
    results = [finish(last, 60), finish(first, 60)]
    expect(all(r.code == 0 for r in results), "the others", results)
    expect(len(rows(*results)) == 4, "four workers", results)


def test_a_joiner_that_dies():
    """kill -9 of a joiner in the middle: the others go on, and a third one takes its part."""
    address = place("--unix", "dies")
    first = found(address, "-s", 2, helper("joiner"), 4, MLFAB_CONSISTENCY="bsp")
    victim = start(helper("joiner"), 4, env=environment(address, MLFAB_JOIN=1, MLFAB_CONSISTENCY="bsp"))
    time.sleep(0.3)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    last = join(address, "-n", 2, helper("joiner"), 4, MLFAB_CONSISTENCY="bsp", JOINER_HEIR=1)
    results = [finish(last, 60), finish(first, 60)]
    expect(all(r.code == 0 for r in results), "the others", results)
    expect(len(rows(*results)) == 4, "four workers", results)


def test_wrong_usage():
    for arguments, text in [(("--join", "a", "-s", "1", "x"), "--join takes --servers, or workers"),
                            (("--join", "a", "--resume", "d", "x"), "--join starts workers or servers only"),
                            (("-n", "1", "-s", "2", "--max-servers", "1", "x"), "--max-servers is below -s"),
                            (("-n", "1", "-s", "0", "--max-servers", "1", "x"), "does not go with -s 0"),
                            (("--join", "a", "--insecure", "x"), "MLFAB_ALLOW_INSECURE=1"),
                            (("--join", "", "x"), "--join takes the address"),
                            (("-n", "3", "--max-workers", "2", "x"), "--max-workers is below -n")]:
        result = run(RUN, *arguments)
        expect(result.code == 2 and text in result.err, "wrong usage", result)
    lonely = run(RUN, "--join", "unix:@mlfab-nobody", "--no-prefix", helper("joiner"), 4,
                 env=clean_environment(MLFAB_TIMEOUT_MS=300))
    expect(lonely.code == 1 and "no answer from server 0" in lonely.err, "no fabric", lonely)


if __name__ == "__main__":
    main(globals(), jobs=4)
