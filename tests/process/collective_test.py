#!/usr/bin/env python3
"""Collectives of real processes, over TCP and over shared memory. One worker forgets to call, makes another
call, is killed in the call or leaves: all others get one error that names it; afterwards calls match again."""
import re
import tempfile

from process import SCALE, cases, expect, helper, launch, main

TRANSPORTS = ("--tcp", "--shm")


def scene(name, transport, workers, victim, restart=False, servers=1):
    """The sums and the failures (code, rank, text) of each worker."""
    with tempfile.TemporaryDirectory() as folder:
        result = launch("-n", workers, "-s", servers, transport, "--on-failure=" + ("restart" if restart else "continue"),
                        helper("collective"), name, victim, folder)
    sums, failures = [[] for _ in range(workers)], [[] for _ in range(workers)]
    for rank, line in re.findall(r"^\[worker (\d+)\] (.*)$", result.out, re.M):
        word, _, rest = line.partition(" ")
        if word == "sum":
            sums[int(rank)].append(int(rest))
        elif word == "fail":
            code, who, text = rest.split(" ", 2)
            failures[int(rank)].append((code, int(who), text))
        else:
            expect(False, "rank %s said: %s" % (rank, line), result)
    return sums, failures, result


@cases(*((name, code, *place) for name, code in
         (("forget", "TIMEOUT"), ("size", "MISMATCH"), ("kind", "MISMATCH"), ("nan", "NOT_FINITE"), ("kill", "PEER_DEAD"),
          ("leave", "PEER_CLOSED"))
         for place in (("--tcp", 2, 1), ("--shm", 3, 0), ("--tcp", 4, 2), ("--shm", 2, 1), ("--tcp", 3, 0), ("--shm", 4, 2))))
def test_one_misbehaves(name, code, transport, workers, victim):
    sums, failures, result = scene(name, transport, workers, victim)
    survivors = workers - (name in ("kill", "leave"))
    for rank in range(workers):
        gone = rank == victim and survivors < workers
        expect(sums[rank] == ([workers] if gone else [workers, survivors]),
               "worker %d does not have its sums, but %r" % (rank, sums[rank]), result)
        if gone:
            continue
        # Of one that is killed it may hear twice: a peer cannot reach it, and it is dead.
        expect(1 <= len(failures[rank]) <= 1 + (name == "kill"), "worker %d has other failures" % rank, result)
        for was, who, text in failures[rank]:
            expect(was == "MLFAB_ERR_" + code and who == victim and "worker %d" % victim in text,
                   "worker %d blames worker %d for %s: %s" % (rank, who, was, text), result)


@cases(*((*one, transport) for transport in TRANSPORTS for one in
         (("begin", 4, 1, 3), ("alone", 4, 1, 4), ("threads", 3, 2, 4), ("begin", 8, 5, 3), ("polls", 3, 1, 2), ("busy", 2, 1, 3))))
def test_all_goes_well(name, workers, victim, wanted, transport):
    """Whoever does not wait, has all the data, calls in two threads, only asks for its numbers, or calls without a pause."""
    sums, failures, result = scene(name, transport, workers, victim, servers=0 if name == "busy" else 1)
    expect(result.code == 0 and not any(failures), "%s failed" % name, result)
    expect(all(s == [workers] * wanted for s in sums), "sums are %r" % sums, result)


def test_one_finds_all_there():
    sums, failures, result = scene("early", "--tcp", 2, 1)
    expect(sums == [[2, 2, 2]] * 2 and failures == [[]] * 2, "%r, %r" % (sums, failures), result)


def test_one_fails_at_once():
    sums, failures, result = scene("refused", "--tcp", 2, 1)
    said = [[(code, who) for code, who, _ in of] for of in failures]
    expect(said == [[("MLFAB_ERR_NOT_FINITE", 1)]] * 2 and sums == [[2, 2]] * 2,
           "%r, %r" % (sums, failures), result)


@cases(*((transport, workers, victim) for transport in TRANSPORTS for workers in (2, 8) for victim in (0, 1)))
def test_all_finish_one_by_one(transport, workers, victim):
    """No call fails, and every mean is that of the workers that still have data."""
    sums, failures, result = scene("finish", transport, workers, victim)
    ends = [20 + 15 * (workers - 1 - r if victim == 0 else r) for r in range(workers)]
    expect(sums == [[workers, n] for n in ends] and failures == [[]] * workers, "%r, %r" % (sums, failures), result)


@cases(*TRANSPORTS)
def test_all_close_at_once(transport):
    for _ in range(max(2, round(5 * SCALE / 10))):
        test_all_goes_well("quick", 3, 0, 1, transport)


@cases(*TRANSPORTS)
def test_one_comes_back(transport):
    """The others see it die, and meet it again when it calls; if they have an object open, their epoch ends. Then all open an
    object, though they have opened different numbers of them."""
    sums, failures, result = scene("back", transport, 3, 1, restart=True)
    for rank in (0, 2):
        codes = [f[0] for f in failures[rank]]
        expect(codes in (["MLFAB_ERR_PEER_DEAD"], ["MLFAB_ERR_PEER_DEAD", "MLFAB_ERR_AGAIN"]) and
               all(f[1] == 1 for f in failures[rank]), "worker %d: %r" % (rank, failures[rank]), result)
    expect(sums == [[3, 3, 3, 3]] * 3, "sums are %r" % sums, result)


if __name__ == "__main__":
    main(globals())
