#!/usr/bin/env python3
"""Workers join a fabric that trains: mlfab-run --join, real processes over TCP and shared memory."""
import os
import re
import signal
import socket
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
    return "%s%s-%d" % ("shm:mlfab-" if transport == "--shm" else "unix:@mlfab-", name, os.getpid())


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


def test_refusals():
    """Another model, another key, no number left: the joiner fails and says why, and the others train on."""
    address = place("--unix", "refusals")
    first = found(address, "-s", 1, helper("joiner"), 4, MLFAB_CONSISTENCY="bsp")
    other = finish(join(address, helper("joiner"), 4, 1000), 60)
    expect(other.code == 1 and "tensor number 0 is id 0, 1000 x" in other.err, "another model", other)
    stranger = run(RUN, "--join", address, "--no-prefix", helper("joiner"), 4,
                   env=dict(environment(address), MLFAB_KEY="f" * 64))
    expect(stranger.code == 1 and "MLFAB_KEY" in stranger.err, "another key", stranger)
    last = join(address, "-n", 2, helper("joiner"), 4, MLFAB_CONSISTENCY="bsp")
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
    last = join(address, "-n", 2, helper("joiner"), 4, MLFAB_CONSISTENCY="bsp")
    results = [finish(last, 60), finish(first, 60)]
    expect(all(r.code == 0 for r in results), "the others", results)
    expect(len(rows(*results)) == 4, "four workers", results)


def test_wrong_usage():
    for arguments, text in [(("--join", "a", "-s", "1", "x"), "--join starts workers only"),
                            (("--join", "a", "--resume", "d", "x"), "--join starts workers only"),
                            (("--join", "a", "--insecure", "x"), "MLFAB_ALLOW_INSECURE=1"),
                            (("--join", "", "x"), "--join takes the address"),
                            (("-n", "3", "--max-workers", "2", "x"), "--max-workers is below -n")]:
        result = run(RUN, *arguments)
        expect(result.code == 2 and text in result.err, "wrong usage", result)
    lonely = run(RUN, "--join", "unix:@mlfab-nobody", "--no-prefix", helper("joiner"), 4,
                 env=clean_environment(MLFAB_TIMEOUT_MS=300))
    expect(lonely.code == 1 and "no answer from server 0" in lonely.err, "no fabric", lonely)


if __name__ == "__main__":
    main(globals())
