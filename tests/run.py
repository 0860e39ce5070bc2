#!/usr/bin/env python3
"""Runs tests, prints the failures, and ends with `N passed, N failed, N skipped`.

    run.py [--no-skip-but REGEX] [--jobs N] [--timeout S] TEST... [--alone TEST...]

TEST is a program (a test binary, or a .py or .sh script), or `name=shell command`; a time limit in
seconds may follow the program or the name behind an @ (`build/tests/sim/seeds@600`).

A test that prints TAP lines (`ok 1 - name`, `not ok 2 - name`, `ok 3 # SKIP why`) counts one per
line; cmocka is configured to print them. A test that announces no case (`1..0`) has failed. Any other test
counts one: passed with exit status 0, skipped with 77 (its last line is the reason), failed with any other
status.

--jobs: this many tests at a time; those after --alone follow one by one.

--no-skip-but (or MLFAB_NO_SKIP_BUT): a skip whose reason does not match counts as failed, so that a
machine that has everything cannot pass by skipping tests.
"""
import argparse
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import time

TAP = re.compile(r"^(not )?ok\b[ \t]*(\d*)[ \t]*(?:- )?(.*?)[ \t]*(?:#[ \t]*(SKIP)\b[ \t:]*(.*))?$",
                 re.I)
SKIPPED = 77


class Outcome:
    def __init__(self, name):
        self.name, self.passed, self.seconds = name, 0, 0.0
        self.failed = []   # what failed, a line each
        self.skipped = []  # (what, reason)
        self.output = ""


def split(test):
    """name, command, seconds or None"""
    name, _, command = test.partition("=")
    name, _, seconds = name.partition("@")
    if not command:
        if name.endswith(".py"):
            command = [sys.executable, name]
        else:
            command = [name if "/" in name else "./" + name]
    return name, command, float(seconds) if seconds else None


def end_group(process):
    """Ends the test and all processes that it started: they have a session of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run(test, timeout):
    name, command, seconds = split(test)
    outcome = Outcome(name)
    limit = seconds or timeout
    environment = dict(os.environ, CMOCKA_MESSAGE_OUTPUT="TAP", PYTHONUNBUFFERED="1")
    began = time.monotonic()
    late = False
    try:
        process = subprocess.Popen(command, shell=isinstance(command, str), env=environment,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        outcome.failed.append("cannot be run: %s" % error.strerror)
        return outcome
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        late = True
        end_group(process)
        output, _ = process.communicate()
    end_group(process)
    outcome.seconds = time.monotonic() - began
    outcome.output = output.decode("utf-8", "replace")

    taps = 0
    for line in outcome.output.splitlines():
        match = TAP.match(line)
        if not match:
            continue
        bad, number, title, directive, reason = match.groups()
        taps += 1
        title = title or "case " + number
        if directive and directive.upper() == "SKIP":
            # cmocka writes the name of a skipped case where others write the reason.
            outcome.skipped.append((title, reason or "no reason given"))
        elif bad:
            outcome.failed.append(title)
        else:
            outcome.passed += 1

    code = process.returncode
    if late:
        outcome.failed.append("not finished after %g s" % limit)
    elif code < 0:
        try:
            outcome.failed.append("killed by %s" % signal.Signals(-code).name)
        except ValueError:
            outcome.failed.append("killed by signal %d" % -code)
    elif taps == 0:
        if re.search(r"^1\.\.0\b(?! *# *SKIP)", outcome.output, re.M | re.I):
            outcome.failed.append("it ran no case")
        elif code == 0:
            outcome.passed = 1
        elif code == SKIPPED:
            lines = outcome.output.strip().splitlines() or ["no reason given"]
            outcome.skipped.append((name, lines[-1]))
        else:
            outcome.failed.append("exit status %d" % code)
    elif code not in (0, SKIPPED) and not outcome.failed:
        outcome.failed.append("exit status %d although no case failed" % code)
    return outcome


def report(outcome, allowed):
    """Prints one line per test; a failing one in full."""
    if allowed:
        for what, reason in list(outcome.skipped):
            if not allowed.search(reason):
                outcome.skipped.remove((what, reason))
                outcome.failed.append("%s: skipped, which is not allowed here: %s" % (what, reason))
    word = "FAIL" if outcome.failed else "ok" if outcome.passed else "skip"
    counts = "%d passed" % outcome.passed
    if outcome.failed:
        counts += ", %d failed" % len(outcome.failed)
    if outcome.skipped:
        counts += ", %d skipped" % len(outcome.skipped)
    print("%-4s  %-44s %-24s %7.2f s" % (word, outcome.name, counts, outcome.seconds))
    if outcome.failed:
        for line in outcome.output.rstrip().splitlines():
            # The failing cases are easier to find without the passing ones.
            if not re.match(r"^ok\b(?!.*# ?SKIP)", line):
                print("      | " + line)
        for line in outcome.failed:
            print("      failed: " + line)
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-skip-but", default=os.environ.get("MLFAB_NO_SKIP_BUT", ""))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--alone", nargs="*", default=[])
    arguments = parser.parse_args()
    if not arguments.tests + arguments.alone:
        parser.error("no tests")
    allowed = re.compile(arguments.no_skip_but, re.I) if arguments.no_skip_but else None

    outcomes = []
    for tests, jobs in (arguments.tests, arguments.jobs), (arguments.alone, 1):
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(run, test, arguments.timeout) for test in tests]
            for future in concurrent.futures.as_completed(futures):
                outcomes.append(future.result())
                report(outcomes[-1], allowed)

    skips = [(o.name, what, reason) for o in outcomes for what, reason in o.skipped]
    if skips:
        print("\nSkipped:")
        for name, what, reason in skips:
            print("  %s: %s" % (name if what == name else name + ", " + what, reason))
    failures = [(o.name, line) for o in outcomes for line in o.failed]
    if failures:
        print("\nFailed:")
        for name, line in failures:
            print("  %s: %s" % (name, line))
    print("\n%d passed, %d failed, %d skipped"
          % (sum(o.passed for o in outcomes), len(failures), len(skips)))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
