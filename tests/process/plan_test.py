#!/usr/bin/env python3
"""mlfab-plan: prints the results of tests/vectors, reports the error in a file and its line, and does not crash
on any file."""
import glob
import math
import os
import random
import re
import tempfile

from process import BUILD, SCALE, Skip, expect, main, run

PLAN = os.path.join(BUILD, "mlfab-plan")
VECTORS = sorted(glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                        "../vectors/mlfabric_*.txt")))

def kind_of(text):
    return re.search(r"^kind (\S+)$", text, re.M).group(1)


def read(path):
    with open(path, encoding="ascii") as file:
        return file.read()


def plan_text(text, *options):
    with tempfile.NamedTemporaryFile("wb", suffix=".txt") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
        file.flush()
        return run(PLAN, file.name, *options)


def expected(text):
    """The records that a planner prints."""
    lines, keep = [], True
    kind = kind_of(text)
    body = text.split("\nexpect\n")[1] if kind != "ssp" else text.split("\nrows ")[1]
    for line in body.splitlines():
        word = line.split()[0]
        if word not in ("g", "m", "x", "r", "res", "c"):
            keep = word != "alt" and not (kind == "ssp" and word.isdigit())
        if keep:
            lines.append(line.split())
    return lines


def same_token(is_there, wanted):
    if is_there == wanted or "/" in wanted:
        return True  # a fraction: the double behind it is compared
    try:
        a, b = float(is_there), float(wanted)
    except ValueError:
        return False
    return math.isclose(a, b, rel_tol=1e-7)


def test_vectors():
    for path in VECTORS:
        text = read(path)
        result = run(PLAN, path)
        expect(result.code == 0 and not result.err, path, result)
        lines = [line.split() for line in result.out.splitlines()]
        wanted = expected(text)
        expect(len(lines) == len(wanted), "%s: %d records, not %d" % (path, len(lines), len(wanted)),
               result)
        for line, want in zip(lines, wanted):
            expect(len(line) == len(want) and all(map(same_token, line, want)),
                   "%s: '%s' where '%s' is expected" % (path, " ".join(line), " ".join(want)))
    print("# %d vectors" % len(VECTORS))
    expect(len(VECTORS) >= 40, "all vectors are there")


def test_for_people():
    for path in VECTORS:
        text = read(path)
        if kind_of(text) in ("divergence", "momentum"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            chart = os.path.join(folder, "chart.svg")
            result = run(PLAN, path, "--human", "--best", "--svg", chart)
            expect(result.code == 0 and not result.err, path, result)
            if kind_of(text) == "batch":
                ids = re.findall(r"^update (\d+)", text, re.M)
                for number in ids:
                    expect(re.search(r"update %s of node \d+(, delay|: dropped)" % number, result.out),
                           "%s tells of update %s" % (path, number), result)
            if kind_of(text) != "ssp":
                svg = read(chart)
                expect(svg.startswith("<svg ") and svg.endswith("</svg>\n"), "a chart", svg)
                kinds = set(re.findall(r'height="12" fill="(#\w+)"', svg))  # of the legend
                expect(kinds == set(re.findall(r'fill="(#\w+)" stroke="white"', svg)), "one colour a kind, in the legend", svg)
                expect("Time from left to right, in the unit of the file" in svg, "labels", svg)
    result = run(PLAN, [p for p in VECTORS if p.endswith("fig6.txt") and "10_3" not in p][0], "--human")
    for text in ("in group 5 at aggregator 2, starts at 0, there at 3; the sum starts at 3, ends at 5",
                 "3 directly; all are there at 5", "node 7 in 1111"):
        expect(text in result.out, text, result)
    result = run(PLAN, [p for p in VECTORS if p.endswith("fig3b.txt")][0], "--human")
    for text in ("the replica gets 1 of 2 updates, the last at 3; it may be 4 apart then, at most 4 before",
                 "the last update at the server waits for it until 3, and is applied at 4, not 2",
                 "update 2: to the replica with the next batch", "update 1 for the replica, node 0 to 3"):
        expect(text in result.out, text, result)


def test_cut():
    """With aggregators that cut through no plan ends later, and some end earlier."""
    earlier = 0
    for path in VECTORS:
        if kind_of(read(path)) != "batch":
            continue
        ends = []
        for options in ([], ["--cut"]):
            result = run(PLAN, path, *options)
            expect(result.code == 0 and not result.err, path, result)
            ends.append(float(re.search(r"^partition \d+ \S+ (\S+)$", result.out, re.M).group(1)))
        expect(ends[1] <= ends[0], "%s: %g, and %g cutting through" % (path, ends[0], ends[1]))
        earlier += ends[1] < ends[0]
    expect(earlier >= 3, "cutting through is worth something")
    result = run(PLAN, [p for p in VECTORS if p.endswith("probe_max_size.txt")][0], "--human", "--cut")
    expect("(members may be late)" in result.out, "a plan with late members", result)


def edited(old, new, name="fig6"):
    text = read([p for p in VECTORS if p.endswith("_%s.txt" % name)][0])
    expect(re.search(old, text, re.M), "the vector has " + old)
    return re.sub(old, new, text, count=1, flags=re.M)


def test_refusals():
    cases = [
        ("^egress 0 1 0 100$", "egress 0 1 0 -1", "a rate is negative: -1"),
        ("^egress 0 1 0 100$", "egress 0 1 0 nan", "a rate is NaN"),
        ("^egress 0 1 0 100$", "egress 0 1 0 inf", "a rate is infinite"),
        ("^egress 0 1 0 100$", "egress 0 1 0 ten", "a rate: `ten` is not a number"),
        ("^egress 0 1 0 100$", "egress 0 2 0 100 0 5", "the times of the steps do not ascend"),
        ("^egress 0 1 0 100$", "egress 0 1 1 100", "the first step begins at 1, not at 0"),
        ("^egress 0 1 0 100$", "egress 0 2 0 100", "`egress` has 4 values where 6 belong"),
        ("^egress 1 1 0 100$", "egress 0 1 0 100", "a second line `egress 0`"),
        ("^tau_max 10$", "tau_max 0", "tau_max 0 admits nothing"),
        ("^tau_max 10$", "tau_max -3", "tau_max -3 admits nothing"),
        ("^tau_max 10$", "tau_max many", "tau_max: `many` is not a whole number"),
        ("^tau_max 10$", "tau_min 10", "unknown keyword `tau_min` in a batch"),
        ("^nodes 10$", "nodes 0", "a network without nodes"),
        ("^nodes 10$", "nodes 1000000000", "nodes: 1000000000 is not in 0..100000"),
        ("^nodes 10$", "nodes 99999999999999999999", "is not in 0..100000"),
        ("^updates 7$", "updates 100001", "updates: 100001 is not in 0..100000"),
        ("^updates 7$", "updates 8", "`punted` where a line `update` belongs"),
        ("^update 2 1 ", "update 1 1 ", "id 1 is used twice"),
        ("^update 2 1 ", "update 2 10 ", "node: 10 is not in 0..9"),
        ("^update 2 1 0 109 1 1 12$", "update 2 1 0 109 1 2 12 12", "has 8 values where 7 belong"),
        ("^update 2 1 0 109 1 1 12$", "update 2 1 0 109 1 1 nan", "size is NaN"),
        ("^aggregator 2 9$", "aggregator 3 9", "aggregator: 3 is not in 2..2"),
        ("^mode order$", "mode chaos", "mode `chaos` is neither order nor list"),
        ("^kind batch$", "kind bench", "kind `bench` is not one of"),
        ("^kind batch\n", "", "`nodes` where a line `kind` belongs"),
        ("^server 1 7$", "server 0", "the number of servers: 0 is not in"),
    ]
    for old, new, message in cases:
        result = plan_text(edited(old, new))
        expect(result.code == 2, new, result)
        expect(re.search(r"^mlfab-plan: \S+:\d+: .*" + re.escape(message), result.err),
               "%s: %s" % (new, message), result)
    replicas = [
        ("^div_max 9$", "div_max -1", "div_max is negative: -1"),
        ("^div_max 9$", "div_max nan", "div_max is NaN"),
        ("^gamma 9/10 0.9$", "gamma 1.5", "gamma 1.5 is above 1"),
        ("^gamma 9/10 0.9$", "gamma -0.5", "gamma is negative"),
        ("^h0 1$", "h0 inf", "h0 is infinite"),
        ("^replica 1 3$", "replica 2 3 3", "a replica of 2 parts for 1 servers"),
        ("^replica 1 3$\n", "", "updates are `punted`, and there is no `replica`"),
        ("^replica 1 3$", "replica 1 3\nreplica 1 4", "a second line `replica`"),
        ("^pupdate 101 ", "pupdate 1 ", "id 1 is used twice"),
        ("^pupdate 101 0 0 0 5 ", "pupdate 101 0 0 0 -5 ", "norm is negative"),
    ]
    for old, new, message in replicas:
        result = plan_text(edited(old, new, "punted_first"))
        expect(result.code == 2 and message in result.err, "%s: %s" % (new, message), result)
    for old, new, message in [("^p 2 1$", "p 2 3", "the replica's updates: 3 is not in 0..2"),
                              ("^norms 2 3 2$", "norms 2 3 -2", "norm 2 is negative"),
                              ("^gr 1 2 2 1 1$", "gr 1 3 2 1 1", "the size of a group: 3 is not in 1..2")]:
        result = plan_text(edited(old, new, "eq7_8_10_11"))
        expect(result.code == 2 and message in result.err, "%s: %s" % (new, message), result)
    line = edited("^tau_max 10$", "tau_max 0")
    number = line.splitlines().index("tau_max 0") + 1
    expect(":%d: tau_max 0" % number in plan_text(line).err, "the line's number")


def test_extremes():
    for old, new, outcome in [
            ("^ingress 7 1 0 12$", "ingress 7 1 0 0", "order 0 7"),
            ("^tau_max 10$", "tau_max inf", "order 7 0"),
            ("^tau_max 10$", "tau_max 1", "order 7 0"),
            ("^v_init 20$", "v_init 118", "order 1 6"),
            ("^div_max 1000000000$", "div_max inf", "replicate 0"),
            ("^div_max 1000000000$", "div_max 0", "replicate 1"),
            ("^aggregators 2\naggregator 1 8\naggregator 2 9$", "aggregators 0", "partition 7 7 7"),
            ("^updates 7\n(update.*\n){7}", "updates 0\n", "order 0 0"),
            ("^updates 7\n(update.*\n){6}", "updates 1\n", "order 1 0")]:
        result = plan_text(edited(old, new))
        expect(result.code == 0, new, result)
        expect(outcome in result.out.splitlines(), "%s: %s" % (new, outcome), result)


def test_truncated_files():
    text = edited("^kind batch$", "kind batch").split("\nexpect")[0].splitlines(keepends=True)
    for lines in range(len(text)):
        result = plan_text("".join(text[:lines]))
        expect(result.code == 2 and "mlfab-plan: " in result.err, "%d lines" % lines, result)
    expect("the file ends before" in plan_text("".join(text)).err, "all but the end")


def test_arguments():
    expect(run(PLAN).code == 2, "no file")
    expect(run(PLAN, "--help").code == 0, "help")
    result = run(PLAN, "/nonexistent/file")
    expect(result.code == 2 and "No such file" in result.err, "a file that is not there", result)
    result = run(PLAN, VECTORS[0], "--frobnicate")
    expect(result.code == 2 and "--frobnicate" in result.err, "an unknown option", result)


def mutated(dice, text):
    data = bytearray(text.encode())
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(data) + 1)
        what = dice.randrange(6)
        if what == 0:
            data[at:at + 1] = bytes([dice.randrange(256)])
        elif what == 1:
            del data[at:at + dice.randint(1, 40)]
        elif what == 2:
            data[at:at] = dice.choice([b" ", b"\n", b"-", b"e99", b"0", b"inf", b"nan", b"\0", b"99999"])
        elif what == 3:
            lines = bytes(data).splitlines(keepends=True)
            a, b = dice.randrange(len(lines)), dice.randrange(len(lines))
            lines[a], lines[b] = lines[b], lines[a]
            data = bytearray(b"".join(lines))
        elif what == 4:
            numbers = [m.span() for m in re.finditer(rb"\d+", bytes(data))]
            if numbers:
                start, end = dice.choice(numbers)
                data[start:end] = dice.choice([b"0", b"1", b"7", b"-1", b"1e300", b"1e-300", b"65536",
                                               b"4294967296", b"9223372036854775807"])
        else:
            del data[at:]
        if not data:
            data = bytearray(b"\n")
    return bytes(data)


def test_mutated_files():
    dice = random.Random(1)
    texts = [read(path) for path in VECTORS]
    for number in range(max(240, round(200 * SCALE))):
        text = mutated(dice, dice.choice(texts).split("\nexpect")[0] + "\nend\n")
        options = dice.choice([[], ["--human"], ["--svg"], ["--best", "--human"], ["--cut"]])
        result = plan_text(text, *options)
        if result.code not in (0, 2) or (result.code == 2) != ("mlfab-plan: " in result.err):
            with open("plan-crash.txt", "wb") as file:
                file.write(text)
            expect(False, "mutation %d, kept in plan-crash.txt" % number, result)


if not os.path.exists(PLAN):
    def test_vectors():
        raise Skip("mlfab-plan is not built")

if __name__ == "__main__":
    main(globals())
