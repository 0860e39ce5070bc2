#!/usr/bin/env python3
"""The programs of examples/: each runs as its header says, must succeed and must print what it promises."""
import glob
import os
import re
import shutil
import tempfile

from process import BUILD, RUN, Skip, clean_environment, expect, finish, main, start

EXAMPLES = os.path.join(BUILD, "examples")
ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))


def example(name, *arguments, workers=0, servers=1, run=(), status=0):
    """The output of a program: alone, or as so many workers of mlfab-run with these options."""
    program = os.path.join(EXAMPLES, name)
    if not os.path.exists(program):
        raise Skip("the examples are not built")
    launcher = [RUN, "-n", workers, "-s", servers, *run] if workers else []
    result = finish(start(*launcher, program, *arguments,
                          env=clean_environment(MLFAB_TIMEOUT_MS=30000)))
    expect(result.code == status, "%s failed" % name, result)
    return result.out


def test_hello_sim():
    out = example("02_hello_sim")
    expect("every weight is 6" in out, "the sum is wrong", out)


def test_push_pull():
    out = example("01_push_pull", workers=2)
    expect(len(re.findall(r"pulled 30 and 15, expected 30 and 15", out)) == 2,
           "both workers pull the sum", out)


def test_trainer():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        out = example("03_trainer", path, workers=4)
        expect(os.path.getsize(path) > 20 * 4, "the model was not saved", out)
    weights = re.search(r"weights 1, 2, 3 are (\S+) (\S+) (\S+)", out)
    expect(weights and all(abs(float(w) - k) < 0.05 for k, w in enumerate(weights.groups(), 1)),
           "it has not learned", out)


def test_event_loop():
    out = example("04_event_loop")
    expect("pulled 1 after" in out, "the pull is wrong", out)


def test_scheduling():
    """The exit status says that no gradient was lost; this test also checks that the scheduler was faster."""
    out = example("05_scheduling")
    lines = re.findall(r": ([\d.]+) updates/s, delays up to (\d+)\n.* (\d+) added to the next", out)
    expect(len(lines) == 2, "two runs", out)
    (direct, _, kept), (planned, delay, folded) = lines
    expect(float(planned) > 1.2 * float(direct), "the scheduler is not faster", out)
    expect(int(delay) < 16 and int(kept) == 0 and int(folded) > 0, "the bound has no effect", out)
    expect(re.search(r"^push .*, group 1 at worker", out, re.M) or
           re.search(r"^pull .*, group 1 at worker", out, re.M), "no group", out)


def test_consistency():
    """The more a worker waits, the less stale its model is, and the other way round."""
    out = example("06_consistency")
    rows = re.findall(r"^(\S.*?) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", out, re.M)
    expect(len(rows) == 6, "six runs", out)
    fast, _, waited, oldest, dropped = ({row[0]: int(row[i]) for row in rows} for i in range(1, 6))
    expect(oldest["bulk-synchronous"] == 0 and oldest["stale synchronous, 3"] <= 3,
           "a bound does not hold", out)
    expect(fast["asynchronous"] < fast["stale synchronous, 3"] <= fast["bulk-synchronous"]
           and waited["asynchronous"] < waited["bulk-synchronous"], "nobody waits", out)
    expect(dropped["drop-stragglers, 5 of 6"] > 0 and
           fast["drop-stragglers, 5 of 6"] < fast["bulk-synchronous"], "nothing is dropped", out)
    expect(fast["bulk-, then asynchronous"] < fast["bulk-synchronous"],
           "the change has no effect", out)


def test_filters():
    out = example("07_filters")
    rows = re.findall(r"pushes +([\d.]+) MB  pulls +([\d.]+) MB  loss at the end ([\d.]+)", out)
    expect(len(rows) == 5, "five runs", out)
    pushes, pulls, loss = ([float(row[i]) for row in rows] for i in range(3))
    expect(pushes[2] < pushes[1] < pushes[0] and pulls[4] < pulls[3] < pulls[2],
           "nothing is saved", out)
    expect(max(loss) < 1.01 * min(loss), "it learns worse", out)


def test_partial_collectives():
    """The exit status says that no contribution was lost. This test also checks that steps of solo end without the slow
    worker."""
    out = example("09_partial_collectives", workers=4, servers=0)
    took = {name: int(ms) for name, ms in re.findall(r"(\S+) +(\d+) ms, ", out)}
    expect(len(took) == 4 and out.count("nothing was lost") == 3, "four forms", out)
    expect(re.search(r"solo .*active:.*[0-3.]*\.[0-3.]*", out), "solo waits for the slow worker", out)
    expect(re.search(r"solo .*\d\.", out), "the slow worker is in every sum of solo", out)


def test_stochastic_reduce():
    """Sparse graphs agree later, and learn as well with fewer bytes."""
    out = example("10_stochastic_reduce", workers=8, servers=0)
    rows = re.findall(r"gap ([\d.]+): agree after +(\d+) steps, have learned after +(\d+), +(\d+) bytes",
                      out)
    expect(len(rows) == 3, "three graphs", out)
    gap, agree, learned, sent = ([float(row[i]) for row in rows] for i in range(4))
    expect(gap[0] > gap[1] > gap[2] and agree[0] == 1 and agree[0] < agree[1] < agree[2],
           "the gap does not tell", out)
    expect(max(learned) < 1.5 * min(learned) and sent == [7 * 64, 2 * 64, 64], "learning", out)


def test_comes_and_goes():
    """A worker is killed; the others go on, with it when it is back, or without it."""
    end = r"weights \.\.\. 5\.000 6\.000 7\.000, the same everywhere after 300 steps"
    out = example("11_comes_and_goes", workers=4, run=["--on-failure=restart"])
    expect(len(re.findall(end, out)) == 4, "worker 2 is not back", out)
    out = example("11_comes_and_goes", workers=4, run=["--on-failure=continue"], status=137)
    expect(len(re.findall(end, out)) == 3 and len(re.findall(r"goes on after: .*worker 2", out)) == 3,
           "the others do not go on", out)


def test_server_dies():
    """A server is killed; nothing that was answered DURABLE is lost, and workers only wait. Without a bound on the
    distance of the replica, and with the answer APPLIED, updates may be lost, and the training goes on. The server is dead if no
    copy serves for 20 heartbeats, 8 s: more than a busy machine needs."""
    server = os.path.join(EXAMPLES, "12_server_dies")
    options = ["--replicas", "--set", "heartbeat_ms=400", "--server", server]
    out = example("12_server_dies", workers=3, run=options)
    waited, lost, difference = re.search(r"waited longest in step \d+: (\S+) s.*\n.* updates (\d+) are lost. "
                                         r"The curves differ by at most (\S+) %", out).groups()
    expect(float(waited) > 0.2 and int(lost) == 0 and float(difference) < 1, "the training is another one", out)
    out = example("12_server_dies", workers=3, run=options + ["--set", "ack=applied", "--set", "div_max=inf"])
    expect("The curves differ by at most" in out, "it does not end", out)


def test_local_steps():
    out = example("15_local_steps", workers=4)
    loss = [float(x) for x in re.findall(r"steps of each worker, loss ([\d.]+)", out)]
    expect(len(loss) == 13 and loss[-1] < 0.02 and all(b < a for a, b in zip(loss, loss[1:])), "it has not learned", out)


def test_diloco():
    """Few bytes and little time, and the model is better."""
    out = example("16_diloco")
    rows = re.findall(r"^\S.*? +([\d.]+) MB +([\d.]+) s +loss ([\d.]+)$", out, re.M)
    expect(len(rows) == 3, "three ways", out)
    bytes_sent, seconds, loss = ([float(row[i]) for row in rows] for i in range(3))
    expect(40 * bytes_sent[1] < bytes_sent[0] and 3 * bytes_sent[2] < bytes_sent[1], "bytes", out)
    expect(20 * seconds[1] < seconds[0] and seconds[2] < seconds[1], "time", out)
    expect(loss[1] < 1.2 * loss[0] and 2 * loss[2] < loss[0], "it learns worse", out)


def test_each_alone():
    """Each is built in a fresh folder by the command of its first lines, from itself, example.h, the headers and objects."""
    objects = [os.path.join(BUILD, name) for name in ("mlfab.o", "mlfab_sim.o")]
    if "san" in BUILD or not all(map(os.path.exists, objects)):
        raise Skip("the objects are not built, or need a sanitizer")
    sources = sorted(glob.glob(os.path.join(ROOT, "examples", "[0-9]*.c")))
    expect(len(sources) >= 14, "all examples", sources)
    for source in sources:
        with open(source, encoding="utf-8") as file:
            command = re.search(r"^ \* Build: +(cc -O2 -o (\w+) .*)$", file.read(), re.M)
        expect(command and command[2] + ".c" == os.path.basename(source), "%s says how it is built" % source)
        with tempfile.TemporaryDirectory() as folder:
            for path in [source, os.path.join(ROOT, "examples", "example.h"), *glob.glob(os.path.join(ROOT, "mlfab*.h")), *objects]:
                shutil.copy(path, folder)
            made = finish(start("sh", "-c", "cd '%s' && %s" % (folder, command[1].replace("cc -O2", "cc -O1 -Wall -Wextra -Werror"))))
            expect(made.code == 0 and os.path.exists(os.path.join(folder, command[2])), command[1], made)


if __name__ == "__main__":
    main(globals(), jobs=4)
