#!/usr/bin/env python3
# lane: check
# limit: 900
"""Figures of the documents, by commands that take longer than those of figures_test.py: the profiles' text, the memory of the
roles, and the gain by a scheduler in virtual time."""
import os
import re
import shutil
import tempfile

from figures_test import near, numbers, printed, read, same, source_of, table
from process import BUILD, SCALE, Skip, clean_environment, expect, main, need, run


def compiler():
    """gcc, as the table says; with ccache, where it is installed."""
    need("gcc")
    said = run("gcc", "--version").out
    if "Free Software Foundation" not in said:
        raise Skip("gcc is another compiler here: " + said.split("\n")[0])
    return ["ccache", "gcc"] if shutil.which("ccache") else ["gcc"]


def test_text():
    """Of the smallest profile, gcc -O2; in a full soak of all."""
    shown = table("sizes")
    need("size")
    with tempfile.TemporaryDirectory() as folder:
        for profile, _, text in shown.rows if SCALE >= 100 else shown.rows[:1]:
            made = os.path.join(folder, profile + ".o")
            result = run(*compiler(), "-std=c11", "-O2", "-c", "-o", made, source_of(profile), timeout=600)
            expect(result.code == 0, profile, result)
            same("%s, %s: text" % (shown.where, profile), numbers(text),
                 [int(run("size", made).out.splitlines()[1].split()[0]) / 1e3])


def test_memory():
    """Rows memory/ of the benchmark. The rows of the table are roles; its columns are optimizers."""
    shown, bench = table("memory"), os.path.join(BUILD, "bench")
    need(bench, why="build/bench is not built")
    found = dict(re.findall(r"^memory/(\S+) +([\d.]+) x model", printed(bench, "--only", "memory/"), re.M))
    expect(len(found) >= 16, "all roles, consistency models and optimizers", found)
    columns = [("plain", "adadelay"), ("momentum",), ("adam",)]
    rows = {"server, asynchronous": "server/async-%s", "server, bulk-synchronous or drop-stragglers": "server/bsp-%s"}
    for role, *cells in shown.rows:
        for cell, rules in zip(cells, columns):
            for rule in rules:
                for name in [rows[role] % rule] if role in rows else ["worker/async-%s" % rule, "worker/bsp-%s" % rule]:
                    expect(near(float(cell), float(found[name])), "%s, %s: %s, and %s prints %s"
                           % (shown.where, role, cell, name, found[name]))


def test_the_gain_by_a_scheduler():
    """docs/scheduler.md has the spread over seeds."""
    least, most = map(float, re.search(r"gives ([\d.]+) to ([\d.]+) times as many updates", read("docs/scheduler.md")).groups())
    program = os.path.join(BUILD, "tests", "sim", "test_schedule")
    need(program, why="libcmocka-dev is not installed")
    out = run(program, env=clean_environment(MLFAB_SEED=1), timeout=600).out
    times = [float(n) for n in re.findall(r"scheduled: ([\d.]+) times", out)]
    expect(times and all(0.98 * least <= n <= 1.02 * most for n in times), "%g to %g times" % (least, most), times)


if __name__ == "__main__":
    main(globals(), jobs=2)
