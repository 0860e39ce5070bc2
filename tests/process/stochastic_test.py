#!/usr/bin/env python3
"""Stochastic reduce between real processes, over TCP and over shared memory: ASAP's figure 8 (the share of
reduces with all inputs), and the effect on the others when one dies or does not call. Rates are only
printed, because the processes share the cores (tests/sim/test_stochastic.c compares them)."""
import re

from process import SCALE, clean_environment, expect, helper, launch, main

WORKERS = 8
MODES = {1: "NOTIFY_ACK", 2: "BSP", 3: "ASYNC"}
ITERATIONS = max(50, round(150 * SCALE))  # of a worker
ELEMENTS, MICROSECONDS = 6000, 30000      # 24 kB a model, seven times; mean computation


def shares(mode, transport):
    result = launch("-n", WORKERS, "-s", 1, transport, helper("stochastic"), "shares", mode,
                    ITERATIONS, ELEMENTS, MICROSECONDS, timeout=200)
    rows = [list(map(float, row.split())) for row in re.findall(r"shares (.*)", result.out)]
    expect(result.code == 0 and len(rows) == WORKERS, "%s failed" % MODES[mode], result)
    reduces = sum(row[0] for row in rows)
    write = sum(row[2] for row in rows) / WORKERS
    inputs = [sum(row[5 + i] for row in rows) for i in range(WORKERS)]
    found = {"full": 100 * inputs[-1] / reduces, "five": 100 * sum(inputs[5:]) / reduces,
             "torn": sum(row[3] for row in rows), "rate": sum(row[0] / row[1] for row in rows)}
    print("# %s%s, W = %.2f: of %d reduces all 7 inputs in %.1f %%, 5 and more in %.1f %%, "
          "%d torn, %.0f reduces/s" % (MODES[mode], transport, write / MICROSECONDS, reduces,
                                       found["full"], found["five"], found["torn"], found["rate"]))
    return found


def figure_8(transport):
    ack, bsp, free = (shares(mode, transport) for mode in MODES)
    expect(ack["full"] == 100 and ack["torn"] == 0, "NOTIFY_ACK averages all inputs, always")
    expect(bsp["full"] < 100 and free["full"] < 100, "BSP and ASYNC do not")
    expect(free["five"] < 95, "ASYNC has most inputs although speeds differ", free)


def test_inputs_over_shared_memory():
    figure_8("--shm")


def test_inputs_over_tcp():
    figure_8("--tcp")


def failure(what, transport, code, senders, survivors, text):
    result = launch("-n", 5, "-s", 1, transport, "--on-failure=continue", helper("stochastic"),
                    "fail", what, 50000, timeout=100,
                    env=clean_environment(MLFAB_TIMEOUT_MS=20000))
    failed = re.findall(r"failed (\w+) (-?\d+) (\d+) (.*)", result.out)
    expect(len(failed) == survivors, "everybody sees one failure", result)
    for name, rank, iterations, said in failed:
        expect(name in code and rank == "2", "it names the rank", result)
        expect(int(iterations) <= 24 and text in said, "it says why, and soon", result)
    expect(re.findall(r"\bon (\d)", result.out) == [str(senders)] * survivors, "they go on", result)


def test_one_dies():
    for transport in ("--shm", "--tcp"):
        failure("die", transport, ("MLFAB_ERR_PEER_DEAD", "MLFAB_ERR_PEER_CLOSED"), 2, 4, "")


def test_one_does_not_call():
    for transport in ("--shm", "--tcp"):
        failure("sleep", transport, ("MLFAB_ERR_TIMEOUT",), 2, 5, "worker 2 has not called it")


if __name__ == "__main__":
    main(globals(), jobs=4)
