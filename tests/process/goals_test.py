#!/usr/bin/env python3
"""tests/bench/goals.py: goals that are met, missed and not measured are told apart, and none makes it fail."""
import os
import sys
import tempfile

from process import expect, main, run

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench")
sys.path.insert(0, BENCH)
import goals  # noqa: E402

HEAD = "name ours unit peer peer_value limit_name limit_value"


def written(lines, head=HEAD):
    """A file of these rows, with _ for a space in a field."""
    file = tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="utf-8")
    rows = [line.replace(" ", "\t").replace("_", " ") for line in lines]
    file.write("\n".join([head.replace(" ", "\t")] + rows) + "\n")
    file.flush()
    return file


def judged(lines, *table):
    with written(lines) as file:
        return goals.report(goals.read(file.name), table)


def one(lines, peer, kind, goal):
    """What is said of row a."""
    return judged(lines, ("{}", peer, kind, {"a": goal}))[0]


def same(found, wanted):
    expect(found == wanted, "'%s' instead of '%s'" % (found, wanted))


def test_speeds_and_times():
    rate, time = ["a 2 GB/s add_loop 4 memcpy 8"], ["a 2 us mpi 4 line 0.5"]
    same(one(rate, "add loop", goals.LEAST, 0.5), "a: 0.5x the speed of add loop (goal 0.5): met")
    same(one(rate, "memcpy", goals.LEAST, 0.3), "a: 0.25x the speed of memcpy (goal 0.3): missed")
    same(one(rate, "memcpy", goals.MOST, 4), "a: 4x the time of memcpy (goal 4 at most): met")
    same(one(rate, "GB/s", goals.LEAST, 2.1), "a: 2 GB/s (goal 2.1): missed")
    same(one(time, "mpi", goals.LEAST, 2), "a: 2x the speed of mpi (goal 2): met")
    same(one(time, "line", goals.MOST, 3.9), "a: 4x the time of line (goal 3.9 at most): missed")
    same(one(time, "us", goals.MOST, 2), "a: 2 us (goal 2 at most): met")


def test_beside_another_row():
    lines = ["a 5 us - - - -", "b 2 us - - - -", "c 9 GB/s - - - -"]
    same(one(lines, "b", goals.MOST, 2), "a: 2.5x the time of b (goal 2 at most): missed")
    same(one(lines, "c", goals.MOST, 2), "a: no figure beside c (goal 2 at most): not measured")


def test_best_of_several():
    times = ["a 2 us mpi 3 - -", "a 2 us gloo-ring 5 - -", "a 2 us gloo-tree 4 - -"]
    same(one(times, "gloo-*", goals.LEAST, 2), "a: 2x the speed of gloo-tree (goal 2): met")
    same(one(times, "mpi|gloo-*", goals.LEAST, 2), "a: 1.5x the speed of mpi (goal 2): missed")
    same(one(["a 2 1/s x 1 - -", "a 2 1/s y 4 - -"], "x|y", goals.LEAST, 1),
         "a: 0.5x the speed of y (goal 1): missed")


def test_not_measured():
    text = "a: no figure beside p (goal 1): not measured"
    for lines in [[], ["b 1 us p 1 - -"], ["a 1 us - - - -"], ["a 1 us p - - -"], ["a 1 us p nan - -"],
                  ["a 1 us p 0 - -"], ["a 0 us p 1 - -"], ["a 1 us q 1 - -"], ["a 1 s  1  1"]]:
        same(one(lines, "p", goals.LEAST, 1), text)
    same(one([], "p|q", goals.MOST, 1), "a: no figure beside p or q (goal 1 at most): not measured")


def test_a_row_that_is_measured_again():
    same(one(["a 1 us p 1 - -", "a 2 us p 6 - -"], "p", goals.LEAST, 2), "a: 3x the speed of p (goal 2): met")
    same(one(["a 1 us p 1 - -", "a 2 us q 6 - -"], "p", goals.LEAST, 2),
         "a: no figure beside p (goal 2): not measured")


def test_summary():
    lines = ["a 1 us p 1 - -", "b 1 us p 3 - -", "d 2 us p 1 - -"]
    table = [("{}", "p", goals.LEAST, {"a": 2, "b": 2}), ("{}", "p", goals.MOST, {"c": 1, "d": 1})]
    missed = ["a: 1x the speed of p (goal 2): missed", "d: 2x the time of p (goal 1 at most): missed"]
    found = judged(lines, *table)
    same(found[4:], ["goals: 1 met, 2 missed, 1 not measured"] + ["  " + line for line in missed])
    same([line for line in found[:4] if line.endswith(": missed")], missed)
    same(judged(lines, ("{}", "p", goals.LEAST, {"b": 2}))[1:], ["goals: 1 met, 0 missed"])


def test_goals_are_different():
    """A goal that is in the table twice would be counted twice."""
    names = [(name.format(key), peer) for name, peer, _, wanted in goals.GOALS for key in wanted]
    expect(len(set(names)) == len(names), "a goal is there twice", names)


def test_script():
    script = os.path.join(BENCH, "goals.py")
    count = sum(len(wanted) for _, _, _, wanted in goals.GOALS)
    with written(["push/tcp/1MB/1 1 GB/s ZeroMQ 2 add 10"]) as file:
        result = run(sys.executable, script, file.name)
    expect(result.code == 0 and not result.err, "a goal that is missed is no failure", result)
    for text in ("push/tcp/1MB/1: 0.5x the speed of ZeroMQ (goal 1.2): missed\n",
                 "push/tcp/1MB/1: no figure beside add loop (goal 0.9): not measured\n",
                 "goals: 0 met, 1 missed, %d not measured\n" % (count - 1)):
        expect(text in result.out, text, result)
    with written([], head="name ours") as file:
        result = run(sys.executable, script, file.name)
    expect(result.code == 1 and "the first line" in result.err, "a file of another kind", result)
    with written(["a 1 us"]) as file:
        result = run(sys.executable, script, file.name)
    expect(result.code == 1 and ":2: 3 fields instead of 7" in result.err, "a row cut off", result)
    result = run(sys.executable, script, os.path.join(BENCH, "nothing.tsv"))
    expect(result.code == 1 and "No such file" in result.err, "a file that is not there", result)


if __name__ == "__main__":
    main(globals())
