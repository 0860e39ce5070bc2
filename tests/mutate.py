#!/usr/bin/env python3
"""Checks that the tests can fail: writes a mistake into a copy of one file, compiles that file, links it with the
objects of the build, and runs tests until one fails. The files of the tree are only read.

    mutate.py planted [--sample N] [NUMBER or NAME...]
        The mistakes of tests/planted: all, N that the hash of the tree draws, or these. Each breaks one invariant, and
        a test must notice it: first the test that its patch names, then all others. Prints TAP. Every patch must fit
        its file, whichever are tried.
    mutate.py random [--seed N] [--count N] [--goal 0.95] [--part GLOB] [--no-sanitizers]
    mutate.py random [--tests unit/test_a,sim/test_b] 'core/reshard/reshard.c:400:5:left out' core/sched/order.c:160
        Random mistakes in core/*/*.c and transports/*.c: another comparison or operator, one more or less, a negated
        condition, a statement left out. Or only these: one mistake, or all of a line. Prints undetected mistakes as
        diffs, and the rate; fails when the rate of 100 or more is below the goal. --count is 5 times MLFAB_SCALE.

To plant a bug, break the invariant in a .c file, write `git diff -U1` to tests/planted/NUMBER-a-few-words.patch below
the lines `Breaks: the invariant` and `Test: kind/test_name`, and undo the change.

The tests that execute its line try a random mistake, fastest first. A first run with coverage finds them, and how long
each takes; build/mutate keeps the result until a source changes. One mistake may take --budget seconds of processor
time (100), the module's own test more. Not counted are mistakes whose object file equals the right one, and
those of tests/mutants-equivalent.txt, which cannot change any behaviour. Undetected mistakes are tried again under
sanitizers, as in `make check`. A test that exceeds its time has detected the mistake."""
import argparse
import bisect
import collections
import concurrent.futures
import contextlib
import difflib
import filecmp
import fnmatch
import functools
import glob
import hashlib
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
BUILD = os.environ.get("MLFAB_BUILD", "build")
FOLDER = os.path.join(ROOT, BUILD, "mutate")
KNOWN = os.path.join(ROOT, "tests", "mutants-equivalent.txt")
CC = shlex.split(os.environ.get("CC", "cc"))
CORES = os.cpu_count() or 1
SKIPPED = 77
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"

# ---- tests

KINDS = ["unit", "seam", "sim", "conform", "oom", "extras", "cblas"]
# Tests of the transport over MPI that need no mpirun: their sources and flags.
MPI_TESTS = {"mpi/conform": ("tests/conform/test_conform.c", ["-DCONFORM_%s=%d" % (transport, transport == "MPI")
                                                              for transport in ("TCP", "SHM", "SIM", "MPI")]),
             "mpi/held": ("tests/mpi/held.c", [])}
# Kinds of tests that need some parts compiled with a switch.
SWITCHES = {"mpi": "MLFAB_WITH_MPI", "cblas": "MLFAB_WITH_CBLAS"}
MPICC = next(filter(shutil.which, ("mpicc.mpich", "mpicc.openmpi", "mpicc")), None)


@functools.lru_cache(None)
def package(what, *names):
    """What pkg-config says of packages; None: one is not installed."""
    if not shutil.which("pkg-config"):
        return None
    result = subprocess.run(["pkg-config", what, *names], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return result.stdout.decode().split() if result.returncode == 0 else None


BLAS = next((name for name in ("openblas", "cblas") if package("--libs", name) is not None), "openblas")
# Tests that link more than the parts: files of extras, and packages.
MORE = [("extras/test_tls", ["tls"], ["libssl", "libcrypto"]), ("extras/test_curl", ["curl", "http"], ["libcurl"]),
        ("extras/", ["store", "remote", "sigv4", "http"], ["libcurl", "libssl", "libcrypto"]), ("cblas/", [], [BLAS])]


def more_of(test):
    return next(((extras, names) for of, extras, names in MORE if test.startswith(of)), ([], []))


def lacks(test):
    """Why this machine cannot build a test, or ""."""
    names = more_of(test)[1]
    if test in MPI_TESTS:
        return "" if MPICC else "no MPI library is installed"
    return "%s is not installed" % " or ".join(names) if names and package("--libs", *names) is None else ""


def lacks_cmocka():
    text = "".join("#include <%s.h>\n" % name for name in ("stdarg", "stddef", "stdint", "setjmp", "cmocka"))
    return subprocess.run([*CC, "-E", "-"], input=text.encode(), stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL).returncode


@functools.lru_cache(None)
def text_of(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def files(*patterns):
    return [os.path.relpath(path, ROOT) for pattern in patterns
            for path in sorted(glob.glob(os.path.join(ROOT, pattern)))]


def parts():
    return files("core/*/*.c", "transports/*.c")


def refuse(why):
    print("mutate.py: " + why, file=sys.stderr)
    sys.exit(2)


def source_of(test):
    return MPI_TESTS[test][0] if test in MPI_TESTS else "tests/%s.c" % test


def kind_of(test):
    return test.split("/")[0]


def all_tests():
    tests = [path[len("tests/"):-2] for kind in KINDS for path in files("tests/%s/test_*.c" % kind)]
    return [test for test in tests if not lacks(test)]


def own_test(path):
    return "unit/test_" + os.path.basename(path)[:-2]


INCLUDE = re.compile(r"#include \"(?:\.\./)*((?:core/\w+|transports|extras|tools)/\w+\.c)\"")


def included(path):
    """The parts that a file includes as text."""
    return INCLUDE.findall(text_of(path))


# ---- building and running

class Mine(threading.local):
    """What a thread has for itself: a folder, and the processor time that its commands have taken."""

    def __init__(self):
        os.makedirs(FOLDER, exist_ok=True)
        self.folder, self.spent = tempfile.TemporaryDirectory(dir=FOLDER), 0.0

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def finish(self, process):
        """Waits for a process. Returns its status."""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        self.spent += used.ru_utime + used.ru_stime
        return process.returncode

    def run(self, command):
        with tempfile.TemporaryFile() as messages:
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages)
            if self.finish(process):
                messages.seek(0)
                raise subprocess.CalledProcessError(process.returncode, command, messages.read())

    def fails(self, program, seconds, cpu_seconds=None):
        """Returns how a test fails: "" or "hangs"; None when it passes or skips. One "not ok" is enough: what is left
        of the test does not run."""
        limits = "ulimit -c 0; %s exec \"$0\"" % ("ulimit -S -t %d;" % cpu_seconds if cpu_seconds else "")
        process = subprocess.Popen(["sh", "-c", limits, program], cwd=ROOT, stdin=subprocess.DEVNULL,
                                   env=dict(os.environ, CONFORM_FIRST="1", CMOCKA_MESSAGE_OUTPUT="TAP"),
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)

        def kill():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        hangs = threading.Timer(seconds, kill)
        hangs.start()
        failed = any(line.startswith(b"not ok") for line in process.stdout)
        in_time = not hangs.finished.is_set()
        hangs.cancel()
        if failed:
            kill()
        code = self.finish(process)
        kill()
        process.stdout.close()
        if not in_time or code == -signal.SIGXCPU:
            return "hangs"
        return "" if failed or code not in (0, SKIPPED) else None


MINE = Mine()


def compiler(kind):
    return ["env", "MPICH_CC=" + shlex.join(CC), "OMPI_CC=" + shlex.join(CC), MPICC] if kind == "mpi" else CC


class Variant:
    """A build: its objects, and how to make more of their kind."""

    def __init__(self, build, flags, *arguments):
        self.build, self.flags, self.arguments = build, flags, arguments
        self.lock, self.made, self.switched = threading.RLock(), set(), {}
        self.folder = tempfile.TemporaryDirectory(dir=FOLDER)

    def compile(self, path, text, target, kind="", more=()):
        """Compiles this text of a file, for a test of this kind."""
        flags = [*self.flags, *more, *(["-D%s=1" % SWITCHES[kind]] if kind in SWITCHES else [])]
        flags += ["-iquote" + os.path.dirname(name) for name in [path, *included(path)]]
        for of, _, names in MORE:
            if of.split("/")[0] in (kind, path.split("/")[0]):
                flags += package("--cflags", *names) or []
        with open(MINE.path("changed.c"), "w", encoding="utf-8") as file:
            file.write('#line 1 "%s"\n%s' % (path, text))
        MINE.run([*compiler(kind), "-std=c11", "-w", *flags, "-I.", "-c", "-o", target, MINE.path("changed.c")])
        return target

    def link_line(self, test):
        """What a test links besides the parts: {source: object}, and libraries."""
        (extras, names), kind, source = more_of(test), kind_of(test), source_of(test)
        with self.lock:
            if kind in SWITCHES and kind not in self.switched:
                self.switched[kind] = {
                    part: self.compile(part, text_of(part), "%s/%s-%s" % (self.folder.name, kind, flat(part)), kind)
                    for part in parts() if SWITCHES[kind] in text_of(part)}
        objects = {"extras/mlfab_%s.c" % name: "%s/extras/mlfab_%s.o" % (self.build, name) for name in extras}
        objects.update(self.switched.get(kind, {}))
        objects = {path: made for path, made in objects.items() if path not in included(source)}
        objects[source] = "%s/%s.o" % (self.build, source[:-2])
        return objects, ["-lcmocka", *(package("--libs", *names) if names else []), "-lpthread", "-lm"]

    def need(self, tests):
        """Lets make build what these tests link."""
        wanted = {path for test in tests if test not in MPI_TESTS for path in self.link_line(test)[0].values()}
        wanted = {path for path in wanted if not path.startswith(self.folder.name)} | {self.build + "/libparts.a"}
        with self.lock:
            targets = sorted(wanted - self.made)
            if targets:
                environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
                subprocess.run(["make", "-C", ROOT, "-s", "-j%d" % CORES, "BUILD=" + self.build, *self.arguments,
                                *targets], env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
                self.made.update(targets)

    def link(self, test, texts, made, *flags):
        """Links a test with changed files, {path: text}. made keeps their objects: {(path, kind or ""): object}."""
        self.need([test])
        (objects, libraries), kind, source = self.link_line(test), kind_of(test), source_of(test)
        inlined = INCLUDE.sub(lambda include: texts.get(include[1], include[0]), text_of(source))
        if inlined != text_of(source) or test in MPI_TESTS:
            objects[source] = self.compile(source, inlined, MINE.path("test.o"), kind, MPI_TESTS.get(test, ("", []))[1])
        own = kind if kind in SWITCHES else ""
        for path in set(texts) - set(included(source)):
            if (path, own) not in made:
                made[path, own] = self.compile(path, texts[path], MINE.path(own + flat(path)), own)
            objects[path] = made[path, own]
        MINE.run([*compiler(kind), *self.flags, *flags, "-o", MINE.path("test"), *objects.values(),
                  self.build + "/libparts.a", *libraries])
        return MINE.path("test")

    def notice(self, tests, texts, made, seconds, twice=True):
        """The first of these tests that detects the changes, or "". seconds: how long tests take. twice: a test must
        fail again, unless it hangs, so that a flaky one does not count."""
        for test in tests:
            program, takes = self.link(test, texts, made), seconds.get(test, 30)
            limits = 30 + 6 * takes, int(4 + 4 * takes) if twice else None
            how = MINE.fails(program, *limits)
            if how == "" and twice:
                how = MINE.fails(program, *limits)
            if how is not None:
                return test + (", which " + how if how else "")
        return ""


def flat(path):
    return path[:-2].replace("/", "-") + ".o"


# ---- planted bugs

class Patch:
    """A file of tests/planted."""

    def __init__(self, path):
        self.path, self.name = path, os.path.basename(path)[:-len(".patch")]
        head, *sections = text_of(path).split("--- a/")
        self.test = "".join(re.findall(r"^Test: (\S+)$", head, re.M))
        self.texts, self.fault = {}, ""  # the changed files; why it cannot be tried
        if not (re.search(r"^Breaks: \S", head, re.M) and self.test and re.match(r"\d+-", self.name) and sections):
            self.fault = "it needs a number, the lines `Breaks: the invariant` and `Test: kind/test_name`, and a change"
        elif not os.path.exists(os.path.join(ROOT, source_of(self.test))):
            self.fault = "its test %s does not exist: name another in its line `Test:`" % self.test
        for section in sections:
            self.fault = self.fault or self.change(section)

    def change(self, section):
        """Makes the changes of one file. Returns why it cannot: the lines of each have to stand there exactly once."""
        path = "".join(re.findall(r"^\+\+\+ b/(\S+\.c)$", section, re.M))
        if not os.path.isfile(os.path.join(ROOT, path)):
            return "it changes something else than a .c file of the tree"
        text = "\n" + text_of(path)
        for hunk in re.split(r"^@@.*\n", section, flags=re.M)[1:]:
            lines = [line for line in hunk.splitlines(True) if line[0] in " +-"]
            old, new = ("\n" + "".join(line[1:] for line in lines if line[0] != but) for but in "+-")
            if text.count(old) != 1:
                return "it does not fit %s, which has these lines %d times: `%s`; make the change there anew, and " \
                    "write it with `git diff -U1` (or -U3)" % (path, text.count(old), " / ".join(old.split("\n")[1:-1]))
            text = text.replace(old, new)
        self.texts[path] = text[1:]
        return ""


def chosen_patches(arguments, patches):
    """The patches to try: those that are named, or drawn."""
    chosen = []
    for name in arguments.bugs:
        these = [p for p in patches if name == p.name or name.lstrip("0") == p.name.split("-")[0].lstrip("0")]
        if not these:
            refuse("there is no planted bug %s in tests/planted" % name)
        chosen += these
    if not arguments.sample:
        return chosen or patches
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD^{tree}"], stdout=subprocess.PIPE,
                         stderr=subprocess.DEVNULL) if shutil.which("git") else None
    seed = git.stdout.decode().strip() if git and git.returncode == 0 else digest(parts())
    drawn = random.Random(seed).sample(patches, min(arguments.sample, len(patches)))
    drawn.sort(key=lambda patch: patch.name)
    print("# drawn by the tree %s; again: python3 tests/mutate.py planted %s"
          % (seed[:12], " ".join(patch.name.split("-")[0] for patch in drawn)))
    return drawn


def try_planted(variant, patch, seconds):
    """Whether a test noticed a planted bug, and what to say."""
    if lacks(patch.test):
        return True, " # SKIP " + lacks(patch.test)
    began, everything = MINE.spent, all_tests()
    likely = [test for test in [*map(own_test, patch.texts), "sim/test_faults"] if test in everything]
    try:
        who = variant.notice(dict.fromkeys([patch.test, *likely, *everything]), patch.texts, {}, seconds, False)
    except subprocess.CalledProcessError as error:
        return False, ": it does not build: " + error.output.decode("utf-8", "replace").partition("\n")[0]
    return bool(who), ": noticed by %s%s, after %.1f s of processor time" % (
        who, "" if who.split(",")[0] == patch.test else " and not by " + patch.test, MINE.spent - began) \
        if who else ": no test notices it"


def planted(arguments):
    patches = [Patch(path) for path in files("tests/planted/*.patch")]
    chosen = chosen_patches(arguments, patches)
    unfit, chosen = [patch for patch in patches if patch.fault], [patch for patch in chosen if not patch.fault]
    if not unfit and lacks_cmocka():
        print("libcmocka-dev is not installed")
        return SKIPPED
    print("1..%d" % (len(unfit) + 1 + len(chosen)), flush=True)
    for at, patch in enumerate(unfit, 1):
        print("not ok %d - %s: %s" % (at, patch.path, patch.fault), flush=True)
    pool, variant, seconds = concurrent.futures.ThreadPoolExecutor(arguments.jobs), Variant(BUILD, ["-O1"]), {}

    def right(test):
        began = time.monotonic()
        who = variant.notice([test], {}, {}, {}, False)
        seconds[test] = time.monotonic() - began
        return who

    tests = sorted({patch.test for patch in chosen if not lacks(patch.test)})
    variant.need(tests)
    fail = [test for test, who in zip(tests, pool.map(right, tests)) if who]
    fail = [test for test in fail if right(test)]  # alone: it may have several threads, and deadlines
    print("%sok %d - without a bug all pass%s"
          % ("not " if fail else "", len(unfit) + 1, ": not " + ", ".join(fail) if fail else ""), flush=True)
    failures = len(unfit) + len(fail)
    results = pool.map(lambda patch: try_planted(variant, patch, seconds), chosen)
    for at, (patch, (noticed, text)) in enumerate(zip(chosen, results), len(unfit) + 2):
        failures += not noticed
        print("%sok %d - planted bug %s%s" % ("" if noticed else "not ", at, patch.name, text), flush=True)
    return 2 if unfit else 1 if failures else 0


# ---- random mistakes

SWAPS = {"comparison": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
         "operator": {"+": "-", "-": "+", "*": "/", "/": "*", "%": "/", "&": "|", "|": "&", "<<": ">>",
                      ">>": "<<", "+=": "-=", "-=": "+=", "|=": "&=", "&=": "|=", "++": "--", "--": "++"},
         "condition": {"&&": "||", "||": "&&"}}
# clang-format puts blanks around binary operators, and none around others.
OPERATOR = re.compile(r"(?<= )(?:<=|>=|==|!=|<<|>>|\+=|-=|\|=|&=|&&|\|\||[<>+\-*/%&|])(?=\s)|\+\+|--")
NUMBER = re.compile(r"(?<![\w.])(?:0[xX][0-9a-fA-F]+|\d+(?:\.\d+)?)[uUlL]*(?![\w.])")
RIGHT = re.compile(r"(?<= )(?:<=?|>=?|==|!=|[-+]?=) (?!NULL)([a-z_][\w.]*(?:->[\w.]+|\[\w+\])*)(?=[;) ])")
ROOM = re.compile(r"\b(?:uint8_t|char) \w+\[$")  # a declared array of bytes: a larger one changes nothing
# Functions, whose last brace stands at the beginning of a line, or in their only one.
BODY = re.compile(r"^\w[^;{}=]*\) \{(?:([^\n]*)\}$|\n(.*?)^\}$)", re.M | re.S)
DECLARED = re.compile(r"(?:(?:const|static|unsigned|struct|enum) )*[a-zA-Z_]\w*\s*(?:\s|\*)+[a-zA-Z_]\w*\s*(?:[=;,\[]|$)")
JUDGED = 100  # mistakes, at least
# A mistake: its name, its place, and what the text from `begin` to `end` becomes.
Place = collections.namedtuple("Place", "name path line kind begin end instead")


def blanked(text):
    """The text with comments, strings and preprocessor lines blanked; lengths and lines stay."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match.group())
    text = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", blank, text, flags=re.S)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)


def closing(text, at):
    """The position after the parenthesis that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    return len(text)


def statements(text, begin, end):
    """The begins and ends of statements that can be left out, and of conditions."""
    at, depth = begin, 0
    for i in range(begin, end):
        depth += (text[i] in "([") - (text[i] in ")]")
        if depth or text[i] not in ";{}":
            continue
        while text[i] != "}":
            at += len(text[at:i]) - len(text[at:i].lstrip())
            head = re.match(r"(?:else\b|case\b[^:]*:|default:|do\b)\s*", text[at:i])
            test = re.match(r"(?:if|while|for)\s*(?=\()", text[at:i])
            if not head and not test:
                break
            if test:
                behind = closing(text, at + test.end())
                if not test.group().startswith("for"):
                    yield "negated", at + test.end() + 1, behind - 1
                at = behind
            else:
                at += head.end()
        what = text[at:i].strip()
        if text[i] == ";" and what and not re.match(r"(?:return|goto|assert|\(void\)|_Static)\b|\(void\)", what) \
                and not DECLARED.match(what):
            yield "left out", at, i
        at = i + 1


def places(path):
    """All possible mistakes in a file."""
    source = text_of(path)
    text = blanked(source)
    found = []
    for begin, end in (body.span(body.lastindex) for body in BODY.finditer(text)):
        for match in OPERATOR.finditer(text, begin, end):
            for kind, swaps in SWAPS.items():
                if match.group() in swaps:
                    found.append((kind, *match.span(), swaps[match.group()]))
        for match in NUMBER.finditer(text, begin, end):
            if not ROOM.search(text, text.rfind("\n", 0, match.start()), match.start()):
                found.append(("one more", *match.span(), "(%s + 1)" % match.group()))
            if match.group().strip("uUlL0.xX"):
                found.append(("one less", *match.span(), "(%s - 1)" % match.group()))
        for match in RIGHT.finditer(text, begin, end):
            for kind, sign in ("one more", "+"), ("one less", "-"):
                found.append((kind, match.end(), match.end(), " %s 1" % sign))
        for kind, first, last in statements(text, begin, end):
            whole = source[first:last]
            lines = "\n" * whole.count("\n")
            found.append((kind, first, last, "!(%s)" % whole if kind == "negated" else lines))
    starts = [0] + [m.end() for m in re.finditer("\n", source)]
    listed = []
    for kind, first, last, instead in sorted(found):
        line = bisect.bisect_right(starts, first)
        name = "%s:%d:%d:%s" % (path, line, first - starts[line - 1] + 1, kind)
        listed.append(Place(name, path, line, kind, first, last, instead))
    return listed


def wrong(place):
    right = text_of(place.path)
    return right[:place.begin] + place.instead + right[place.end:]


def wanted(arguments):
    """The mistakes to try, in random order: each kind as often as the others."""
    if arguments.mutants:
        found = []
        for name in arguments.mutants:
            path = name.split(":")[0]
            there = places(path) if os.path.isfile(os.path.join(ROOT, path)) else []
            these = [p for p in there if name in (p.name, "%s:%d" % (path, p.line), path)]
            if not these:
                refuse("there is no mistake %s: name one as FILE:LINE:COLUMN:KIND, or all of a line as FILE:LINE" % name)
            found += these
        return found, len(found)
    kinds = {}
    for path in parts():
        if fnmatch.fnmatch(path, arguments.part):
            for place in places(path):
                kinds.setdefault(place.kind, []).append(place)
    dice = random.Random(arguments.seed)
    for kind in sorted(kinds):
        dice.shuffle(kinds[kind])
    order = []
    while any(kinds.values()):
        kind = dice.choice([kind for kind in sorted(kinds) if kinds[kind]])
        order.append(kinds[kind].pop())
    return order, arguments.count


def function_at(path, line):
    """The name of the function that contains a line."""
    before = text_of(path).split("\n")[:line]
    heads = (re.match(r"[A-Za-z_][^;=]*?(\w+)\(", text) for text in reversed(before))
    return next((head.group(1) for head in heads if head), "")


def equivalent():
    """(file, line, line with the mistake) -> why it changes nothing. For a line that a file has more than once the
    key also names the function: `file:function`."""
    known = {}
    for number, line in enumerate(text_of(KNOWN).splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            part = [p.strip() for p in line.split(" ||| ")]
            if len(part) != 4:
                sys.exit("%s:%d: four fields between ` ||| ` are wanted" % (KNOWN, number))
            path = part[0].split(":")[0]
            times = sum(text.strip() == part[1] for text in text_of(path).split("\n"))
            if times > 1 and path == part[0]:
                sys.exit("%s:%d: %s has this line %d times: name the function" % (KNOWN, number, path, times))
            known[tuple(part[:3])] = part[3]
    return known


def changed(place):
    """The lines that differ, before and after, in the form of the list of equivalent mutants."""
    before, after = text_of(place.path).split("\n"), wrong(place).split("\n")
    pairs = [(b.strip(), a.strip()) for b, a in zip(before, after) if b != a]
    return " ".join(b for b, _ in pairs), " ".join(a for _, a in pairs)


# ---- which tests execute a line

# Children of a test end with _exit(), which writes no counts; a limit on file sizes may prevent that, too.
LEAVE = """#include <sys/resource.h>
void __gcov_dump(void), __real__exit(int), __wrap__exit(int);
void __wrap__exit(int code) {
  struct rlimit files;
  getrlimit(RLIMIT_FSIZE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_FSIZE, &files);
  __gcov_dump();
  __real__exit(code);
}
"""


def digest(paths):
    return hashlib.sha256("".join(map(text_of, paths)).encode()).hexdigest()


def cover(variant, test):
    """The processor time of a test, and the lines that it executes: {file: [line]}; None when it fails.
    `file + "*"` lists every line with code."""
    data, lines = MINE.path("data"), {}
    with open(MINE.path("leave.c"), "w", encoding="utf-8") as file:
        file.write(LEAVE)
    program = variant.link(test, {}, {}, MINE.path("leave.c"), "-Wl,--wrap=_exit")
    shutil.rmtree(data, ignore_errors=True)
    os.makedirs(data)
    began = MINE.spent
    process = subprocess.Popen([program], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL,
                               env=dict(os.environ, GCOV_PREFIX=data, GCOV_PREFIX_STRIP=str(ROOT.count("/"))))
    if MINE.finish(process):
        return None
    counts = [os.path.relpath(path, data) for path in glob.glob(data + "/**/*.gcda", recursive=True)]
    counts = [count for count in counts if os.path.exists(os.path.join(ROOT, count[:-5] + ".gcno"))]
    for count in counts:
        shutil.copy(os.path.join(ROOT, count[:-5] + ".gcno"), os.path.dirname(os.path.join(data, count)))
    reports = subprocess.run(["gcov", "-j", "-t", *counts], cwd=data, stdout=subprocess.PIPE, check=True,
                             stderr=subprocess.DEVNULL).stdout.decode().splitlines() if counts else []
    for file in (file for report in reports for file in json.loads(report)["files"]):
        name = os.path.normpath(file["file"])
        if re.match(r"(core/\w+|transports)/\w+\.c$", name):
            for line in file["lines"]:
                lines.setdefault(name + "*", set()).add(line["line_number"])
                if line["count"]:
                    lines.setdefault(name, set()).add(line["line_number"])
    return {"seconds": MINE.spent - began, "lines": {name: sorted(of) for name, of in lines.items()}}


def coverage(pool):
    """test -> the result of cover(). A test that fails is tried once more, because otherwise the mistakes that only it
    detects would count as undetected."""
    kept_at, kept = FOLDER + "/coverage.json", {}
    if os.path.exists(kept_at):
        with open(kept_at, encoding="utf-8") as file:
            kept = json.load(file)
    common = digest(parts() + files("*.h", "core/*/*.h", "transports/*.h", "tests/*/*.h"))
    digests = {test: common + digest([source_of(test)]) for test in all_tests()}
    known = {test: kept[test] for test in digests if kept.get(test, {}).get("digest") == digests[test]}
    missing = [test for test in digests if test not in known]
    if missing:
        variant = Variant(BUILD + "/coverage", ["-O1", "--coverage"], "CFLAGS=-O1 --coverage", "SAN=")
        variant.need(missing)
        for test, found in zip(missing, pool.map(lambda test: cover(variant, test) or cover(variant, test), missing)):
            if found is None:
                print("# %s fails without a mistake, and is left out" % test)
            else:
                known[test] = dict(found, digest=digests[test])
        with open(kept_at, "w", encoding="utf-8") as file:
            json.dump(known, file)
    return known


def related(covered, path, line, budget):
    """The tests that execute a line (the last line with code of a longer statement), fastest first: as many as fit into
    the budget, and always the module's own."""
    tests, spent = [], 0.0
    for test, found in sorted(covered.items(), key=lambda item: item[1]["seconds"]):
        if found["lines"] is not None:
            code, done = found["lines"].get(path + "*", []), found["lines"].get(path, [])
            at = bisect.bisect_right(code, line)
            if at == 0 or code[at - 1] < line - 8 or code[at - 1] not in done:
                continue
        spent += found["seconds"]
        if spent <= budget or test == own_test(path):
            tests.append(test)
    return tests


# ---- one mutant

def try_random(place, plain, sanitized, covered, known, budget):
    """The test that detects a mistake ("": none does, None: it is not a mistake), and a remark. An undetected one is
    tried again under sanitizers, as in `make check`: an access out of bounds may have no effect otherwise."""
    path, texts, lines = place.path, {place.path: wrong(place)}, changed(place)
    reason = known.get((path, *lines)) or known.get(("%s:%s" % (path, function_at(path, place.line)), *lines))
    if reason:
        return None, "equivalent: " + reason
    seconds = {test: found["seconds"] for test, found in covered.items()}
    try:
        kinds = ["", *(kind for kind, switch in SWITCHES.items()
                       if switch in text_of(path) and kind in map(kind_of, covered))]
        made = {(path, kind): plain.compile(path, texts[path], MINE.path("wrong%s.o" % kind), kind) for kind in kinds}
        if all(filecmp.cmp(made[path, kind], plain.compile(path, text_of(path), MINE.path("right.o"), kind),
                           shallow=False) for kind in kinds):
            return None, "the same code"
        tests = related(covered, path, place.line, budget)
        who = plain.notice(tests, texts, made, seconds)
        if not who and sanitized:
            who = sanitized.notice(tests, texts, {}, seconds)
            who += " under sanitizers" if who else ""
        return who, "%d tests ran" % len(tests)
    except subprocess.CalledProcessError:
        return None, "does not build"


def mutants(arguments):
    if lacks_cmocka():
        print("libcmocka-dev is not installed")
        return SKIPPED
    order, count = wanted(arguments)
    pool, plain = concurrent.futures.ThreadPoolExecutor(arguments.jobs), Variant(BUILD, ["-O2"])
    sanitized = None if arguments.no_sanitizers else Variant(
        BUILD + "/asan", ["-O1", "-g", *SANITIZERS.split()], "CFLAGS=-O1 -g -fno-omit-frame-pointer", "SAN=" + SANITIZERS)
    # Tests that are named count as executing everything.
    covered = {test: {"seconds": 30.0, "lines": None} for test in arguments.tests.split(",") if test}
    if covered and plain.notice(covered, {}, {}, {}):
        sys.exit("%s fails without a mistake" % plain.notice(covered, {}, {}, {}))
    tried = functools.partial(try_random, plain=plain, sanitized=sanitized, covered=covered or coverage(pool),
                              known=equivalent(), budget=arguments.budget)
    noticed = hung = alive = none = 0
    running, upcoming = {}, iter(order)
    while noticed + alive < count:
        for place in itertools.islice(upcoming, min(arguments.jobs, count - noticed - alive) - len(running)):
            running[pool.submit(tried, place)] = place
        if not running:
            break
        for job in concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)[0]:
            place, (who, why) = running.pop(job), job.result()
            none += who is None
            noticed += bool(who)
            hung += bool(who) and who.endswith("hangs")
            alive += who == ""
            print("%s: %s" % (place.name, "no test notices it: " + why if who == "" else
                              "noticed by " + who if who else "not counted: " + why))
            if who == "":
                texts = text_of(place.path).splitlines(True), wrong(place).splitlines(True)
                print("".join(difflib.unified_diff(*texts, "a/" + place.path, "b/" + place.path)), end="")
                print("# again: python3 tests/mutate.py random '%s'" % place.name)
            sys.stdout.flush()
    rate = noticed / (noticed + alive) if noticed + alive else 1.0
    print("%d mutants with seed %d: %d noticed (%d by a test that hangs), %d not: %.1f %%; %d more change nothing "
          "or do not build" % (noticed + alive, arguments.seed, noticed, hung, alive, 100 * rate, none))
    # The rate of a few mutants is printed and not judged: it is too uncertain.
    return 1 if rate < arguments.goal and noticed + alive >= JUDGED else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="changes", required=True)
    bugs, drawn = commands.add_parser("planted"), commands.add_parser("random")
    bugs.add_argument("--sample", type=int, default=0)
    bugs.add_argument("bugs", nargs="*")
    drawn.add_argument("--seed", type=int, default=int(os.environ.get("MLFAB_SEED", "1")))
    drawn.add_argument("--count", type=int, default=max(1, int(5 * float(os.environ.get("MLFAB_SCALE", "1")))))
    drawn.add_argument("--goal", type=float, default=0.95)
    drawn.add_argument("--part", default="*")
    drawn.add_argument("--tests", default="")
    drawn.add_argument("--budget", type=float, default=100.0)
    drawn.add_argument("--no-sanitizers", action="store_true")
    drawn.add_argument("mutants", nargs="*")
    for command in bugs, drawn:
        command.add_argument("--jobs", type=int, default=CORES)
    arguments = parser.parse_args()
    os.environ["MLFAB_SCALE"] = "1"
    os.environ.pop("MLFAB_SEED", None)
    try:
        sys.exit(planted(arguments) if arguments.changes == "planted" else mutants(arguments))
    except subprocess.CalledProcessError as error:
        sys.exit("Bail out! `%s` fails" % shlex.join(error.cmd)[:200])


if __name__ == "__main__":
    main()
