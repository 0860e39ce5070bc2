#!/usr/bin/env python3
"""Collectives of real processes, over TCP and over shared memory. One worker forgets to call, makes another
call, is killed in the call or leaves: all others get one error, in time, that names it; afterwards calls
match again."""
import re
import tempfile
import time

from process import expect, helper, launch, main

LIMITS_MS = {"forget": 1600, "size": 1000, "kind": 1500, "nan": 1000, "kill": 4500, "leave": 1500}


def scene(name, transport, workers, victim, *more, restart=False, servers=1):
    """The sums and the failures of each worker."""
    began = time.monotonic()
    result = launch("-n", workers, "-s", servers, transport,
                    "--on-failure=" + ("restart" if restart else "continue"), "--timeout", 60,
                    helper("collective"), name, victim, *more, timeout=90)
    sums, failures = [[] for _ in range(workers)], [[] for _ in range(workers)]
    for rank, line in re.findall(r"^\[worker (\d+)\] (.*)$", result.out, re.M):
        word, _, rest = line.partition(" ")
        if word == "sum":
            sums[int(rank)].append(int(rest))
        elif word == "fail":
            code, who, ms, text = rest.split(" ", 3)
            failures[int(rank)].append((code, int(who), float(ms), text))
        else:
            expect(False, "rank %s said: %s" % (rank, line), result)
    print("# %s %s, %d workers: %.1f s" % (name, transport, workers, time.monotonic() - began))
    return sums, failures, result


def fails(name, code, transport, workers, victim, survivors):
    sums, failures, result = scene(name, transport, workers, victim)
    for rank in range(workers):
        gone = rank == victim and survivors < workers
        expect(sums[rank] == ([workers] if gone else [workers, survivors]),
               "worker %d does not have its sums, but %r" % (rank, sums[rank]), result)
        if gone:
            continue
        expect(len(failures[rank]) == 1, "worker %d has %d failures" % (rank, len(failures[rank])), result)
        was, who, ms, text = failures[rank][0]
        expect(was == code and who == victim and "worker %d" % victim in text,
               "worker %d blames worker %d for %s: %s" % (rank, who, was, text), result)
        if rank != victim or name != "forget":
            expect(ms < LIMITS_MS[name], "worker %d heard of it after %.0f ms" % (rank, ms), result)


def everywhere(name, code, gone=False):
    for transport in ("--tcp", "--shm"):
        for workers, victim in ((2, 1), (3, 0), (4, 2)):
            fails(name, code, transport, workers, victim, workers - 1 if gone else workers)


def test_one_forgets_to_call():
    everywhere("forget", "MLFAB_ERR_TIMEOUT")


def test_one_calls_with_another_size():
    everywhere("size", "MLFAB_ERR_MISMATCH")


def test_one_calls_something_else():
    everywhere("kind", "MLFAB_ERR_MISMATCH")


def test_one_has_a_nan():
    everywhere("nan", "MLFAB_ERR_NOT_FINITE")


def test_one_is_killed_inside():
    everywhere("kill", "MLFAB_ERR_PEER_DEAD", gone=True)


def test_one_leaves():
    everywhere("leave", "MLFAB_ERR_PEER_CLOSED", gone=True)


def goes_well(name, workers, victim, wanted):
    for transport in ("--tcp", "--shm"):
        sums, failures, result = scene(name, transport, workers, victim)
        expect(result.code == 0 and not any(failures), "%s failed" % name, result)
        expect(all(s == [workers] * wanted for s in sums), "sums are %r" % sums, result)


def test_one_does_not_wait():
    goes_well("begin", 4, 1, 3)


def test_one_does_not_wait_and_has_all():
    goes_well("alone", 4, 1, 4)


def test_one_finds_all_there():
    with tempfile.TemporaryDirectory() as folder:
        sums, failures, result = scene("early", "--tcp", 2, 1, folder)
    expect(sums == [[2, 2, 2]] * 2 and failures == [[]] * 2, "%r, %r" % (sums, failures), result)


def test_one_fails_at_once():
    with tempfile.TemporaryDirectory() as folder:
        sums, failures, result = scene("refused", "--tcp", 2, 1, folder)
    said = [[(code, who) for code, who, _, _ in of] for of in failures]
    expect(said == [[("MLFAB_ERR_NOT_FINITE", 1)]] * 2 and sums == [[2, 2]] * 2,
           "%r, %r" % (sums, failures), result)


def test_one_only_asks_for_its_numbers():
    for transport in ("--tcp", "--shm"):
        sums, failures, result = scene("polls", transport, 3, 1)
        expect(sums == [[3, 3]] * 3 and failures == [[]] * 3, "%r, %r" % (sums, failures), result)


def test_calls_one_upon_the_other():
    for transport in ("--tcp", "--shm"):
        sums, failures, result = scene("busy", transport, 2, 1, servers=0)
        expect(sums == [[2, 2, 2]] * 2 and failures == [[]] * 2, "%r, %r" % (sums, failures), result)


def test_two_threads_of_each():
    goes_well("threads", 3, 2, 4)


def test_eight_workers():
    goes_well("begin", 8, 5, 3)


def test_all_finish_one_by_one():
    """No call fails, and every mean is that of the workers that still have data."""
    for transport in ("--tcp", "--shm"):
        for workers in (2, 8):
            for victim in (0, 1):
                sums, failures, result = scene("finish", transport, workers, victim)
                ends = [20 + 15 * (workers - 1 - r if victim == 0 else r) for r in range(workers)]
                expect(sums == [[workers, n] for n in ends] and failures == [[]] * workers,
                       "%r, %r" % (sums, failures), result)


def test_all_close_at_once():
    for _ in range(5):
        goes_well("quick", 3, 0, 1)


def test_one_comes_back():
    """The others see it die, and end their epoch again when it calls. Then all open an object, though they have
    opened different numbers of them."""
    for transport in ("--tcp", "--shm"):
        with tempfile.TemporaryDirectory() as folder:
            sums, failures, result = scene("back", transport, 3, 1, folder, restart=True)
        for rank in (0, 2):
            codes = [f[0] for f in failures[rank]]
            expect(codes in (["MLFAB_ERR_PEER_DEAD", "MLFAB_ERR_AGAIN"], ["MLFAB_ERR_AGAIN"]) and
                   all(f[1] == 1 for f in failures[rank]), "worker %d: %r" % (rank, failures[rank]),
                   result)
            expect(sums[rank] == [3, 3, 3, 3], "sums are %r" % sums[rank], result)
        expect(sums[1] == [3, 3, 3, 3], "sums of the one that came back: %r" % sums[1], result)


if __name__ == "__main__":
    main(globals(), jobs=4)
