#!/usr/bin/env python3
"""Stochastic reduce between real processes, over TCP and over shared memory: ASAP's figure 8 (the share of
reduces with all inputs), and the effect on the others when one dies or does not call. Rates are only
printed, because the processes share the cores (tests/sim/test_stochastic.c compares them)."""
import re

from process import SCALE, cases, clean_environment, expect, helper, launch, main, tell

WORKERS = 8
ACK, BSP, ASYNC = 1, 2, 3
NAMES = {ACK: "NOTIFY_ACK", BSP: "BSP", ASYNC: "ASYNC"}
ITERATIONS = max(50, round(1.5 * SCALE))  # of a worker
ELEMENTS, MICROSECONDS = 6000, 30000      # 24 kB a model, seven times; mean computation


@cases(*((mode, transport) for mode in NAMES for transport in ("--shm", "--tcp")))
def test_inputs(mode, transport):
    result = launch("-n", WORKERS, "-s", 1, transport, helper("stochastic"), "shares", mode,
                    ITERATIONS, ELEMENTS, MICROSECONDS)
    rows = [list(map(float, row.split())) for row in re.findall(r"shares (.*)", result.out)]
    expect(result.code == 0 and len(rows) == WORKERS, "%s failed" % NAMES[mode], result)
    reduces, torn = sum(row[0] for row in rows), sum(row[3] for row in rows)
    inputs = [sum(row[5 + i] for row in rows) for i in range(WORKERS)]
    full, five = 100 * inputs[-1] / reduces, 100 * sum(inputs[5:]) / reduces
    tell("%s%s, W = %.2f: of %d reduces all 7 inputs in %.1f %%, 5 and more in %.1f %%, %d torn, %.0f reduces/s"
         % (NAMES[mode], transport, sum(row[2] for row in rows) / WORKERS / MICROSECONDS, reduces, full, five, torn,
            sum(row[0] / row[1] for row in rows)))
    if mode == ACK:
        expect(full == 100 and torn == 0, "NOTIFY_ACK averages all inputs, always", result)
    else:
        expect(full < 100, "BSP and ASYNC do not", result)
    if mode == ASYNC:
        expect(five < 95, "ASYNC has most inputs although speeds differ", result)


@cases(*((*one, transport) for transport in ("--shm", "--tcp") for one in
         (("die", "MLFAB_ERR_PEER_(DEAD|CLOSED)", 4, ""), ("sleep", "MLFAB_ERR_TIMEOUT", 5, "worker 2 has not called it"))))
def test_one_fails(what, code, survivors, text, transport):
    """It dies, or does not call."""
    result = launch("-n", 5, "-s", 1, transport, "--on-failure=continue", helper("stochastic"), "fail", what, 50000,
                    env=clean_environment(MLFAB_TIMEOUT_MS=60000))
    failed = re.findall(r"failed (\w+) (-?\d+) (\d+) (.*)", result.out)
    expect(len(failed) == survivors, "everybody sees one failure", result)
    for name, rank, iterations, said in failed:
        expect(re.fullmatch(code, name) and rank == "2", "it names the rank", result)
        expect(int(iterations) <= 24 and text in said, "it says why, and soon", result)
    expect(re.findall(r"\bon (\d)", result.out) == ["2"] * survivors, "they go on", result)


if __name__ == "__main__":
    main(globals())
