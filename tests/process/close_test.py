#!/usr/bin/env python3
# lane: test, soak
"""A run that succeeds prints nothing and exits with 0: every kind of last call, 1 to 32 workers, with and
without dedicated servers, over both transports.

MLFAB_SCALE: from 100 on, as in `make soak`, everything 20 times; below it every kind of call once."""
import itertools
import random
import time

from process import SCALE, cases, expect, helper, launch, main, run, tell

WORKERS = (1, 2, 8, 32)
TRANSPORTS = ("--tcp", "--shm")


def last_calls():
    return run(helper("closer")).out.split()


def cells():
    """(workers, transport, last call): all combinations, or a sample, which changes every day."""
    if SCALE >= 100:
        return 20 * list(itertools.product(WORKERS, TRANSPORTS, last_calls()))
    chance = random.Random(int(time.time()) // 86400)
    few = [(chance.choice(WORKERS[:3]), chance.choice(TRANSPORTS), last) for last in last_calls()]
    return few + [(WORKERS[3], transport, chance.choice(last_calls())) for transport in TRANSPORTS]


def close(workers, servers, transport, last):
    """Seconds."""
    result = launch("-n", workers, "-s", servers, transport, helper("closer"), last)
    expect(result.code == 0 and not result.err and not result.out,
           "%d workers, %d servers, %s, %s: a run that ends well says something"
           % (workers, servers, transport, last), result)
    return result.seconds


@cases(1, 0)
def test_with_servers(servers):
    """With one of its own, and with workers that serve."""
    took = [(close(workers, servers, transport, last), workers, transport, last)
            for workers, transport, last in cells()]
    tell("%d runs, the longest: %.2f s, %d workers, %s, %s" % ((len(took),) + max(took)))


@cases(*TRANSPORTS)
def test_with_two_servers(transport):
    for last in ("nothing", "push", "push_start", "everything"):
        close(8, 2, transport, last)


if __name__ == "__main__":
    main(globals())
