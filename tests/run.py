#!/usr/bin/env python3
"""Runs tests, prints the failures and the slowest tests, and ends with `N passed, N failed, N skipped`.

    run.py [--no-skip-but REGEX] [--jobs N] [--timeout S] [--lane NAME] TEST...

TEST is a program (a test binary, or a .py or .sh script), or `name=shell command`; a time limit in
seconds may follow the program or the name behind an @ (`build/tests/sim/seeds@600`).

A script may say more in its first lines: `# lane: check` or `# lane: test, soak` (without it: test), `# limit: 600`
seconds, and `# alone: why`, if it needs the machine for itself. --lane leaves out scripts of other lanes.

A test that prints TAP lines (`ok 1 - name`, `not ok 2 - name`, `ok 3 # SKIP why`) counts one per
line; cmocka is configured to print them. A test that announces no case (`1..0`) has failed. Any other test
counts one: passed with exit status 0, skipped with 77 (its last line is the reason), failed with any other
status.

--jobs: this many tests at a time, the longest first as far as the last run in this build folder tells. Tests that
need the machine alone follow one by one.

--unknown WORD: the TESTs are all tests, and none has this word in its name. It says which are the nearest, and fails.

--no-skip-but (or NO_SKIP_BUT): a skip whose reason does not match counts as failed, so that a
machine that has everything cannot pass by skipping tests.
"""
import argparse
import concurrent.futures
import difflib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

TAP = re.compile(r"^(not )?ok\b[ \t]*(\d*)[ \t]*(?:- )?(.*?)[ \t]*(?:#[ \t]*(SKIP)\b[ \t:]*(.*))?$",
                 re.I)
SKIPPED = 77
TIMES = os.path.join(os.environ.get("MLFAB_BUILD", "build"), "times.json")
SLOWEST = 10


class Test:
    """A test, and its outcome once it has run."""

    def __init__(self, text, timeout):
        self.name, _, command = text.partition("=")
        self.name, _, seconds = self.name.partition("@")
        self.lanes, self.alone = ["test"], ""
        if command:
            self.command = command
        elif self.name.endswith(".py"):
            self.command = [sys.executable, self.name]
        else:
            self.command = [self.name if "/" in self.name else "./" + self.name]
        if not command and self.name.endswith((".py", ".sh")):
            seconds = self.read_head(seconds)
        self.limit = float(seconds or timeout)
        self.passed, self.seconds, self.cpu_seconds = 0, 0.0, 0.0
        self.failed = []   # what failed, a line each
        self.why = {}      # of a case that failed: the lines that follow
        self.skipped = []  # (what, reason)
        self.output = ""

    def read_head(self, seconds):
        """Reads the comments at the beginning of a script; returns its limit."""
        with open(self.name, encoding="utf-8") as file:
            head = "".join(line for _, line in zip(range(20), file))
        said = dict(re.findall(r"^# (lane|limit|alone): *(.*\S)", head, re.M))
        self.lanes, self.alone = said.get("lane", "test").split(", "), said.get("alone", "")
        return seconds or said.get("limit", "")


def end_group(process):
    """Ends the test and all processes that it started: they have a session of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def execute(test):
    """Runs the command; returns its exit status, or None if it exceeded its limit."""
    # Simulations free and take the same memory thousands of times: glibc would give it back to the system each time, and
    # AddressSanitizer would keep 256 MB of it from use.
    environment = dict({"MALLOC_TRIM_THRESHOLD_": "100000000", "MALLOC_MMAP_THRESHOLD_": "30000000",
                        "MALLOC_TOP_PAD_": "1000000", "ASAN_OPTIONS": "quarantine_size_mb=64"}, **os.environ)
    environment.update(CMOCKA_MESSAGE_OUTPUT="TAP", PYTHONUNBUFFERED="1")
    began = time.monotonic()
    process = subprocess.Popen(test.command, shell=isinstance(test.command, str), env=environment,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    late = threading.Event()
    timer = threading.Timer(test.limit, lambda: (late.set(), end_group(process)))
    timer.start()
    # A process that the test leaves behind may hold the pipe, so the end of the test itself is watched.
    ended = []

    def watch():
        _, status, used = os.wait4(process.pid, 0)
        ended.extend((os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime))
        end_group(process)

    watcher = threading.Thread(target=watch)
    watcher.start()
    test.output = process.stdout.read().decode("utf-8", "replace")
    watcher.join()
    timer.cancel()
    process.stdout.close()
    process.returncode, test.cpu_seconds = ended
    test.seconds = time.monotonic() - began
    return None if late.is_set() else process.returncode


def run(test):
    try:
        code = execute(test)
    except OSError as error:
        test.failed.append("cannot be run: %s" % error.strerror)
        return test
    taps, about = 0, []
    for line in test.output.splitlines():
        match = TAP.match(line)
        if not match:
            about.append(line[:200])
            continue
        about = []
        bad, number, title, directive, reason = match.groups()
        taps += 1
        title = title or "case " + number
        if directive and directive.upper() == "SKIP":
            # cmocka writes the name of a skipped case where others write the reason.
            test.skipped.append((title, reason or "no reason given"))
        elif bad:
            test.failed.append(title)
            test.why[title] = about
        else:
            test.passed += 1

    if code is None:
        test.failed.append("not finished after %g s" % test.limit)
    elif code < 0:
        try:
            test.failed.append("killed by %s" % signal.Signals(-code).name)
        except ValueError:
            test.failed.append("killed by signal %d" % -code)
    elif taps == 0:
        if re.search(r"^1\.\.0\b(?! *# *SKIP)", test.output, re.M | re.I):
            test.failed.append("it ran no case")
        elif code == 0:
            test.passed = 1
        elif code == SKIPPED:
            lines = test.output.strip().splitlines() or ["no reason given"]
            test.skipped.append((test.name, lines[-1]))
        else:
            test.failed.append("exit status %d" % code)
    elif code not in (0, SKIPPED) and not test.failed:
        test.failed.append("exit status %d although no case failed" % code)
    return test


def report(test, allowed):
    """Prints one line per test; a failing one in full."""
    if allowed:
        for what, reason in list(test.skipped):
            if not allowed.search(reason):
                test.skipped.remove((what, reason))
                test.failed.append("%s: skipped, which is not allowed here: %s" % (what, reason))
    word = "FAIL" if test.failed else "ok" if test.passed else "skip"
    counts = "%d passed" % test.passed
    if test.failed:
        counts += ", %d failed" % len(test.failed)
    if test.skipped:
        counts += ", %d skipped" % len(test.skipped)
    print("%-4s  %-44s %-24s %7.2f s %7.2f cpu" % (word, test.name, counts, test.seconds, test.cpu_seconds))
    if test.failed:
        for line in test.output.rstrip().splitlines():
            # The failing cases are easier to find without the passing ones.
            if not re.match(r"^ok\b(?!.*# ?SKIP)", line):
                print("      | " + line)
        for line in test.failed:
            print("      failed: " + line)
    sys.stdout.flush()


def known_times():
    """name -> seconds, of earlier runs."""
    try:
        with open(TIMES, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def keep_times(times, tests):
    times.update((test.name, round(test.seconds, 2)) for test in tests)
    try:
        with open(TIMES, "w", encoding="utf-8") as file:
            json.dump(times, file, indent=0, sort_keys=True)
    except OSError:
        pass  # only the order of the next run depends on it


def nearest(word, tests):
    """What to type instead of a word that no test has in its name: tests whose names, and then whose paths, are like it."""
    def bare(path):
        return re.sub(r"^test_|_test$", "", os.path.splitext(os.path.basename(path))[0])

    def like(one, other):
        return difflib.SequenceMatcher(None, one, other).ratio()

    near = sorted((t for t in tests if like(bare(word), bare(t)) > 0.5), key=lambda t: (like(bare(word), bare(t)), like(word, t)))
    return "no test has \"%s\" in its name: %s" % (word, "the nearest are " + ", ".join(near[:-4:-1]) if near else
                                                   "they are tests/*/test_*.c and tests/*/*_test.py")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-skip-but", default=os.environ.get("NO_SKIP_BUT", ""))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--lane", default="")
    parser.add_argument("--unknown", default="")
    parser.add_argument("tests", nargs="+")
    arguments = parser.parse_args()
    if arguments.unknown:
        sys.exit("run.py: " + nearest(arguments.unknown, arguments.tests))
    allowed = re.compile(arguments.no_skip_but, re.I) if arguments.no_skip_but else None

    began = time.monotonic()
    tests = [Test(text, arguments.timeout) for text in arguments.tests]
    # A command has no lane: whoever passes it wants it.
    tests = [t for t in tests if isinstance(t.command, str) or not t.name.endswith((".py", ".sh"))
             or not arguments.lane or arguments.lane in t.lanes]
    times = known_times()
    tests.sort(key=lambda test: -times.get(test.name, test.limit))
    for some, jobs in ([t for t in tests if not t.alone], arguments.jobs), ([t for t in tests if t.alone], 1):
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for future in concurrent.futures.as_completed([pool.submit(run, test) for test in some]):
                report(future.result(), allowed)
    keep_times(times, tests)

    print("\nSlowest, in seconds of the clock and of processors:")
    for test in sorted(tests, key=lambda test: -test.seconds)[:SLOWEST]:
        print("  %7.2f %7.2f  %s" % (test.seconds, test.cpu_seconds, test.name))
    skips = [(t.name, what, reason) for t in tests for what, reason in t.skipped]
    if skips:
        print("\nSkipped:")
        for name, what, reason in skips:
            print("  %s: %s" % (name if what == name else name + ", " + what, reason))
    again = [(t.name, line[2:]) for t in tests for line in t.output.splitlines() if re.match(r"# \w+: not within ", line)]
    if again:
        print("\nNeeded a second try:")
        for name, line in again:
            print("  %s: %s" % (name, line[:200]))
    failures = [(t.name, line, t.why.get(line, [])) for t in tests for line in t.failed]
    if failures:
        print("\nFailed:")
        for name, line, why in failures:
            print("\n".join(["  %s: %s" % (name, line)] + ["      | " + text for text in (why if len(why) < 12 else why[:6] + why[-5:])]))
    print("\n%d tests took %.0f s, and %.0f s of processors" % (len(tests), time.monotonic() - began,
                                                          sum(t.cpu_seconds for t in tests)))
    print("%d passed, %d failed, %d skipped"
          % (sum(t.passed for t in tests), len(failures), len(skips)))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
