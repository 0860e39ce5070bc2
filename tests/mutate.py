#!/usr/bin/env python3
"""Measures how many random mistakes the tests detect. Draws places in core/*/*.c and transports/*.c, writes a
mistake into each (another comparison or operator, one more or less, a negated condition, a statement left
out), builds the one file that has it, and runs the tests that execute its line, fastest first, until one
fails. Prints undetected mistakes as diffs, and the rate; fails when the rate of 100 mutants or more is below the goal.

    mutate.py [--seed N] [--count N] [--goal 0.95] [--jobs N] [--part GLOB] [--no-sanitizers]
    mutate.py [--tests unit/test_a,sim/test_b] 'core/reshard/reshard_server.c:400:5:left out' core/sched/order.c:160
                   only these (one mistake, or all of a line), with these tests instead of the related ones

A first run with coverage finds which tests execute which lines and how long each takes; build/mutate keeps the
result until a source changes. The tests of one mutant may take --budget seconds of processor time (100), the
module's own test more. A mistake whose object file equals that of the right source is not counted, nor are those
of tests/mutants-equivalent.txt, which cannot change any behaviour. Undetected mistakes are tried again under
sanitizers, as in `make check`. A test that exceeds its time has detected the mistake; one that fails must fail
twice, so that flaky tests do not count. MLFAB_SCALE scales the number of mutants: 5 times it. The files of the
tree are only read."""
import argparse
import bisect
import concurrent.futures
import difflib
import fnmatch
import glob
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import threading

import plant

ROOT = plant.ROOT
FOLDER = os.path.join(ROOT, os.environ.get("MLFAB_BUILD", "build"), "mutate")
KNOWN = os.path.join(ROOT, "tests", "mutants-equivalent.txt")
CC = shlex.split(os.environ.get("CC", "cc"))

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

# ---- places

SWAPS = {"comparison": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
         "operator": {"+": "-", "-": "+", "*": "/", "/": "*", "%": "/", "&": "|", "|": "&", "<<": ">>",
                      ">>": "<<", "+=": "-=", "-=": "+=", "|=": "&=", "&=": "|=", "++": "--", "--": "++"},
         "condition": {"&&": "||", "||": "&&"}}
# clang-format puts blanks around binary operators, and none around others.
OPERATOR = re.compile(r"(?<= )(?:<=|>=|==|!=|<<|>>|\+=|-=|\|=|&=|&&|\|\||[<>+\-*/%&|])(?=\s)|\+\+|--")
NUMBER = re.compile(r"(?<![\w.])(?:0[xX][0-9a-fA-F]+|\d+(?:\.\d+)?)[uUlL]*(?![\w.])")
RIGHT = re.compile(r"(?<= )(?:<=?|>=?|==|!=|[-+]?=) (?!NULL)([a-z_][\w.]*(?:->[\w.]+|\[\w+\])*)(?=[;) ])")
ROOM = re.compile(r"\b(?:uint8_t|char) \w+\[$")  # a declared array of bytes: a larger one changes nothing
DECLARED = re.compile(r"(?:const |static |unsigned |struct |enum )*[a-zA-Z_]\w*\s*(?:\s|\*)+[a-zA-Z_]\w*\s*(?:[=;,\[]|$)")


JUDGED = 100  # mutants, at least


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


def bodies(text):
    """The begins and ends of functions."""
    depth = begin = last = 0
    for match in re.finditer(r"[{}]", text):
        if match.group() == "{":
            if depth == 0:
                begin = match.start() if re.search(r"\)\s*$", text[last:match.start()]) else -1
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                last = match.end()
                if begin >= 0:
                    yield begin + 1, match.start()


def statements(text, begin, end):
    """The begins and ends of statements that can be left out, and of conditions."""
    at = depth = 0
    at = begin
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
    """All possible mistakes in a file: (line, column, name, begin, end, replacement)"""
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        source = file.read()
    text = blanked(source)
    found = []
    for begin, end in bodies(text):
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
        listed.append(("%s:%d:%d:%s" % (path, line, first - starts[line - 1] + 1, kind), path, line, kind,
                      source[:first] + instead + source[last:], source))
    return listed


def wanted(arguments):
    """The mistakes to try, in random order: each kind as often as the others."""
    sources = [os.path.relpath(path, ROOT) for path in sorted(glob.glob(ROOT + "/core/*/*.c") +
                                                              glob.glob(ROOT + "/transports/*.c"))]
    if arguments.mutants:
        found = []
        for name in arguments.mutants:
            path = name.split(":")[0]
            these = [p for p in places(path) if name in (p[0], "%s:%d" % (path, p[2]), path)]
            if not these:
                sys.exit("there is no such mutant now: " + name)
            found += these
        return found, len(found)
    kinds = {}
    for path in sources:
        if fnmatch.fnmatch(path, arguments.part):
            for place in places(path):
                kinds.setdefault(place[3], []).append(place)
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
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        before = file.read().split("\n")[:line]
    heads = (re.match(r"[A-Za-z_][^;=]*?(\w+)\(", text) for text in reversed(before))
    return next((head.group(1) for head in heads if head), "")


def equivalent():
    """(file, line, line with the mistake) -> why it changes nothing. For a line that a file has more than once the
    key also names the function: `file:function`."""
    known = {}
    with open(KNOWN, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and not line.startswith("#"):
                part = [p.strip() for p in line.split(" ||| ")]
                if len(part) != 4:
                    sys.exit("%s:%d: four fields between ` ||| ` are wanted" % (KNOWN, number))
                path = part[0].split(":")[0]
                with open(os.path.join(ROOT, path), encoding="utf-8") as source:
                    times = sum(text.strip() == part[1] for text in source)
                if times > 1 and path == part[0]:
                    sys.exit("%s:%d: %s has this line %d times: name the function" % (KNOWN, number, path, times))
                known[tuple(part[:3])] = part[3]
    return known


def changed(place):
    """The lines that differ, before and after, in the form of the list of equivalent mutants."""
    before, after = place[5].split("\n"), place[4].split("\n")
    pairs = [(b.strip(), a.strip()) for b, a in zip(before, after) if b != a]
    return " ".join(b for b, _ in pairs), " ".join(a for _, a in pairs)


# ---- building

def run(command, cwd, check=True):
    return subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, check=check)


def copy_tree(to):
    shutil.rmtree(to, ignore_errors=True)
    for folder in ["core", "transports"] + ["tests/" + kind for kind in plant.KINDS]:
        if os.path.isdir(os.path.join(ROOT, folder)):
            shutil.copytree(os.path.join(ROOT, folder), os.path.join(to, folder))
    for header in ("mlfab.h", "mlfab_node.h", "mlfab_sim.h"):
        shutil.copy(os.path.join(ROOT, header), to)


def compile_c(tree, source, target, *flags):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    run([*CC, "-std=c11", "-w", *flags, "-I.", "-c", "-o", target, source], tree)


def link(target, objects, *flags):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    run([*CC, *flags, "-o", target, *objects, "-lcmocka", "-lpthread", "-lm"], ROOT)


def parts_of(tree):
    return sorted(os.path.relpath(p, tree) for p in glob.glob(tree + "/core/*/*.c") +
                  glob.glob(tree + "/transports/*.c"))


def flat(source):
    return source[:-2].replace("/", "-")


class Variant:
    """All parts and tests as objects of one kind: correct ones to link with, or those that count coverage."""

    def __init__(self, name, pool, tests, *flags):
        self.tree, self.folder, self.flags = FOLDER + "/tree", FOLDER + "/" + name, flags
        parts = parts_of(self.tree)
        jobs = [pool.submit(compile_c, self.tree, part, self.part(part), *flags) for part in parts]
        jobs += [pool.submit(compile_c, self.tree, "tests/%s.c" % test, self.test(test), *self.of_test(test))
                 for test in tests]
        for job in jobs:
            job.result()
        self.archive = self.folder + "/libparts.a"
        if os.path.exists(self.archive):
            os.remove(self.archive)
        run(["ar", "rcs", self.archive, *[self.part(part) for part in parts]], ROOT)

    def part(self, source):
        return "%s/%s.o" % (self.folder, flat(source))

    def test(self, test):
        return "%s/%s.o" % (self.folder, flat("tests/%s.c" % test))

    def mutant(self, tree, source):
        """Compiles the changed file of a tree with the flags of this variant."""
        compile_c(tree, source, tree + "/mutant.o", *self.flags)
        return tree + "/mutant.o"

    def of_test(self, test):
        """The flags for a test: one that includes a part is compiled with --coverage, too."""
        return self.flags if included(test) else [f for f in self.flags if f != "--coverage"]


def included(test):
    with open("%s/tests/%s.c" % (ROOT, test), encoding="utf-8") as file:
        return re.findall(r"#include \"(?:\.\./)*((?:core|transports)/\w+\.c)\"", file.read())


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


def digest(test):
    """A hash of all that a test's coverage depends on: the sources, and the files that the test includes."""
    total = hashlib.sha256()
    paths = sorted(glob.glob(ROOT + "/core/*/*.[ch]") + glob.glob(ROOT + "/transports/*.[ch]")) + glob.glob(ROOT + "/*.h")
    more = ["%s/tests/%s.c" % (ROOT, test)]
    while more:
        path = os.path.normpath(more.pop())
        if path in paths or not os.path.exists(path):
            continue
        paths.append(path)
        with open(path, encoding="utf-8") as file:
            more += [os.path.join(os.path.dirname(path), name) for name in re.findall(r"#include \"(.*)\"", file.read())]
    for path in paths:
        with open(path, "rb") as file:
            total.update(file.read())
    return total.hexdigest()


def cover(variant, test):
    """The result of cover_once(). A test that fails is tried once more, because otherwise the mistakes that only it
    detects would count as undetected."""
    return cover_once(variant, test) or cover_once(variant, test)


def cover_once(variant, test):
    """The processor time of a test, and the lines that it executes: {file: [line]}; None when it fails.
    `file + "*"` lists every line with code."""
    program, data = "%s/%s" % (variant.folder, flat(test + ".c")), "%s/%s.data" % (variant.folder, flat(test + ".c"))
    link(program, [variant.test(test), variant.archive, variant.folder + "/leave.o"], "--coverage", "-Wl,--wrap=_exit")
    shutil.rmtree(data, ignore_errors=True)
    os.makedirs(data)
    process = subprocess.Popen([program], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL,
                               env=dict(os.environ, GCOV_PREFIX=data, GCOV_PREFIX_STRIP="99", MLFAB_SCALE="1"))
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = status
    if status:
        return None
    counts = sorted(glob.glob(data + "/*.gcda"))
    for count in counts:
        shutil.copy("%s/%s.gcno" % (variant.folder, os.path.basename(count)[:-5]), data)
    lines = {}
    for report in run(["gcov", "-j", "-t", *counts], data).stdout.decode().splitlines() if counts else []:
        for file in json.loads(report)["files"]:
            name = os.path.normpath(file["file"])
            if re.match(r"(core|transports)/\w+\.c$", name):
                for line in file["lines"]:
                    lines.setdefault(name + "*", set()).add(line["line_number"])
                    if line["count"]:
                        lines.setdefault(name, set()).add(line["line_number"])
    shutil.rmtree(data)
    return {"seconds": used.ru_utime + used.ru_stime, "lines": {name: sorted(of) for name, of in lines.items()}}


def coverage(jobs):
    """test -> the result of cover()"""
    os.makedirs(FOLDER, exist_ok=True)
    kept_at, kept, known = FOLDER + "/coverage.json", {}, {}
    if os.path.exists(kept_at):
        with open(kept_at, encoding="utf-8") as file:
            kept = json.load(file)
    for test in plant.all_tests():
        if test in kept and kept[test]["digest"] == digest(test):
            known[test] = kept[test]
    missing = [test for test in plant.all_tests() if test not in known]
    if missing:
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            variant = Variant("coverage", pool, missing, "-O1", "--coverage")
            with open(FOLDER + "/tree/leave.c", "w", encoding="utf-8") as file:
                file.write(LEAVE)
            compile_c(FOLDER + "/tree", "leave.c", variant.folder + "/leave.o")
            for test, found in zip(missing, pool.map(lambda test: cover(variant, test), missing)):
                if found is None:
                    print("# %s fails without a mistake, and is left out" % test)
                else:
                    known[test] = dict(found, digest=digest(test))
        with open(kept_at, "w", encoding="utf-8") as file:
            json.dump(known, file)
    return known


def named(tests):
    """A result like cover()'s, for tests that count as executing everything in no time."""
    return {test: {"seconds": 30.0 + at, "lines": None} for at, test in enumerate(tests)}


def related(covered, path, line):
    """The tests that execute a line (the last line with code of a longer statement), fastest first."""
    tests = []
    for test, found in covered.items():
        if found["lines"] is None:
            tests.append(test)
            continue
        code, done = found["lines"].get(path + "*", []), found["lines"].get(path, [])
        at = bisect.bisect_right(code, line)
        if at and code[at - 1] >= line - 8:
            place = bisect.bisect_left(done, code[at - 1])
            if place < len(done) and done[place] == code[at - 1]:
                tests.append(test)
    return sorted(tests, key=lambda test: covered[test]["seconds"])


def affordable(tests, own, covered, budget):
    """The tests to run: as many as fit into the budget, and always the module's own."""
    spent, chosen = 0.0, []
    for test in tests:
        spent += covered[test]["seconds"]
        if spent <= budget or test in own:
            chosen.append(test)
    return chosen


# ---- one mutant

class Bench:
    """The trees in which mutants are built, one per thread. Undetected mutants are tried again under sanitizers, as in
    `make check`: an access out of bounds may have no effect otherwise."""

    def __init__(self, pool, covered, budget, sanitizes):
        self.covered, self.known, self.budget = covered, equivalent(), budget
        self.sanitizes = sanitizes
        self.plain = Variant("right", pool, list(covered), "-O2")
        for test, found in covered.items():
            if found["lines"] is None and self.tested(self.plain, FOLDER, self.plain.archive, "", [test]):
                sys.exit("%s fails without a mistake" % test)
        self.sanitized, self.own, self.lock, self.made = None, threading.local(), threading.Lock(), 0

    def tree(self):
        if not hasattr(self.own, "tree"):
            with self.lock:
                self.own.tree, self.made = "%s/bench%d" % (FOLDER, self.made), self.made + 1
            copy_tree(self.own.tree)
        return self.own.tree

    def with_sanitizers(self):
        with self.lock:
            if self.sanitized is None:
                with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                    self.sanitized = Variant("sanitized", pool, list(self.covered), "-O1", "-g", *SANITIZERS)
        return self.sanitized

    def noticed_by(self, place):
        """The test that detects a mistake ("": none does, None: it is not a mistake), and a remark."""
        name, path, line, _, source, right = place
        lines = changed(place)
        reason = self.known.get((path, *lines)) or \
            self.known.get(("%s:%s" % (path, function_at(path, line)), *lines))
        if reason:
            return None, "equivalent: " + reason
        tree = self.tree()
        with open(os.path.join(tree, path), "w", encoding="utf-8") as file:
            file.write(source)
        try:
            part = self.plain.mutant(tree, path)
            with open(part, "rb") as one, open(self.plain.part(path), "rb") as other:
                if one.read() == other.read():
                    return None, "the same code"
            tests = affordable(related(self.covered, path, line), plant.likely(None, [path]), self.covered,
                               self.budget)
            who = self.tested(self.plain, tree, part, path, tests)
            if not who and tests and self.sanitizes:
                sanitized = self.with_sanitizers()
                who = self.tested(sanitized, tree, sanitized.mutant(tree, path), path, tests)
                who += " under sanitizers" if who else ""
            return who, "%d tests ran" % len(tests)
        except subprocess.CalledProcessError:
            return None, "does not build"
        finally:
            with open(os.path.join(tree, path), "w", encoding="utf-8") as file:
                file.write(right)

    def tested(self, variant, tree, part, path, tests):
        """The first of these tests that detects the part, or \"\"."""
        for test in tests:
            takes = self.covered[test]["seconds"]
            program, object_file = tree + "/test", variant.test(test)
            if path in included(test):
                object_file = tree + "/test.o"
                compile_c(tree, "tests/%s.c" % test, object_file, *variant.flags)
            link(program, [object_file, part, variant.archive], *variant.flags)
            # It must fail twice, unless it hangs: a flaky test does not count.
            for _ in range(2):
                how = plant.fails(program, 60 + 20 * takes, int(4 + 4 * takes))
                if how != "":
                    break
            if how is not None:
                return test + (", which " + how if how else "")
        return ""


def diff(place):
    before, after = place[5].splitlines(True), place[4].splitlines(True)
    return "".join(difflib.unified_diff(before, after, "a/" + place[1], "b/" + place[1])).rstrip("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(os.environ.get("MLFAB_SEED", "1")))
    parser.add_argument("--count", type=int,
                        default=max(1, int(5 * float(os.environ.get("MLFAB_SCALE", "1")))))
    parser.add_argument("--goal", type=float, default=0.95)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--part", default="*")
    parser.add_argument("--tests", default="")
    parser.add_argument("--budget", type=float, default=100.0)
    parser.add_argument("--no-sanitizers", action="store_true")
    parser.add_argument("mutants", nargs="*")
    arguments = parser.parse_args()
    os.environ["MLFAB_SCALE"] = "1"
    os.environ.pop("MLFAB_SEED", None)
    order, count = wanted(arguments)
    copy_tree(FOLDER + "/tree")
    covered = named(arguments.tests.split(",")) if arguments.tests else coverage(arguments.jobs)
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        bench = Bench(pool, covered, arguments.budget, not arguments.no_sanitizers)
        noticed = hung = alive = none = 0
        running, upcoming = {}, iter(order)
        while noticed + alive < count:
            while len(running) < min(arguments.jobs, count - noticed - alive):
                place = next(upcoming, None)
                if place is None:
                    break
                running[pool.submit(bench.noticed_by, place)] = place
            if not running:
                break
            for job in concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)[0]:
                place, (who, why) = running.pop(job), job.result()
                none += who is None
                noticed += bool(who)
                hung += bool(who) and who.endswith("hangs")
                alive += who == ""
                print("%s: %s" % (place[0], "no test notices it: " + why if who == "" else
                                  "noticed by " + who if who else "not counted: " + why))
                if who == "":
                    print("%s\n# again: python3 tests/mutate.py '%s'" % (diff(place), place[0]))
                sys.stdout.flush()
    rate = noticed / (noticed + alive) if noticed + alive else 1.0
    print("%d mutants with seed %d: %d noticed (%d by a test that hangs), %d not: %.1f %%; %d more change nothing "
          "or do not build" % (noticed + alive, arguments.seed, noticed, hung, alive, 100 * rate, none))
    # The rate of a few mutants is printed and not judged: it is too uncertain.
    sys.exit(1 if rate < arguments.goal and noticed + alive >= JUDGED else 0)


if __name__ == "__main__":
    main()
