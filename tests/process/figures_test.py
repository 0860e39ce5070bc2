#!/usr/bin/env python3
"""Figures and lists in the documents are those that commands print and sources have.

A table with figures has a comment above it. `<!-- figures: NAME -->`: the case NAME of this script, or of sizes_test.py (lane
check), runs the command that stands beside the table, and compares each figure, within 2 %. `<!-- measured: COMMAND -->`: a
clock of some machine, which no test can repeat. `<!-- given -->`: settings and arithmetic, which no command prints. docs/paper.md
is what `make paper` writes, and paper_test.py (lane soak) compares it; docs/decisions.md tells of its time."""
import glob
import os
import re
import sys
import tempfile

from process import BUILD, Skip, clean_environment, expect, main, need, run

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
HISTORY = ("docs/paper.md", "docs/decisions.md")
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
COMMENT = re.compile(r"^<!-- (figures|measured|given)(?:: (.*))? -->$")
TOLERANCE = 0.02


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def documents():
    return [os.path.relpath(path, ROOT) for pattern in ("*.md", "docs/*.md", "examples/*.md", "gpu/*.md", "packaging/*.md")
            for path in sorted(glob.glob(os.path.join(ROOT, pattern)))]


class Table:
    """A table of a document: its rows of cells without the head, and the comment above it."""

    def __init__(self, path, line, above, rows):
        self.where = "%s:%d" % (path, line)
        match = COMMENT.match(above)
        self.kind, self.name = match.groups() if match else (None, None)
        self.rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))] for row in rows[2:]]

    def has_figures(self):
        return any(re.match(NUMBER, cell) for row in self.rows for cell in row[1:])


def tables(path):
    lines, found, at = read(path).splitlines(), [], 0
    while at < len(lines):
        if lines[at].startswith("|"):
            end = at
            while end < len(lines) and lines[end].startswith("|"):
                end += 1
            found.append(Table(path, at + 1, lines[at - 1], lines[at:end]))
            at = end
        at += 1
    return found


def table(name):
    found = [t for path in documents() for t in tables(path) if t.kind == "figures" and t.name == name]
    expect(len(found) == 1, "one table is named %s" % name)
    return found[0]


def numbers(text):
    return [float(n.replace(",", "")) for n in re.findall(NUMBER, text)]


def near(told, found):
    return abs(told - found) <= TOLERANCE * abs(found)


def same(where, told, found):
    expect(len(told) == len(found) and all(map(near, told, found)), "%s: %s, and the command prints %s" % (where, told, found))


def printed(*command):
    need(command[0], why="%s is not built")
    result = run(*command, env=clean_environment())
    expect(result.code == 0, "%s ends well" % (command,), result)
    return result.out


def example(name, *arguments):
    return printed(os.path.join(BUILD, "examples", name), *arguments)


def line_of(out, label):
    """The figures behind a label that begins a line."""
    lines = [line for line in out.splitlines() if line.startswith(label)]
    expect(len(lines) == 1, "one line begins with '%s'" % label, out)
    return numbers(lines[0][len(label):])


# ---- tables

def test_filters():
    shown, out = table("filters"), example("07_filters")
    expect(len(shown.rows) == out.count("\n"), "all rows", out)
    for label, *cells in shown.rows:
        same("%s, %s" % (shown.where, label), numbers(" ".join(cells)), line_of(out, label))


def test_consistency():
    """The columns: the fast workers, the oldest model, dropped updates."""
    shown, out = table("consistency"), example("06_consistency")
    for label, *cells in shown.rows:
        fast, _, _, oldest, dropped = line_of(out, label)
        same("%s, %s" % (shown.where, label), numbers(" ".join(cells)), [fast, oldest, dropped])


def simulated(arguments):
    """When the last worker is through."""
    out = printed(os.path.join(BUILD, "mlfab-sim"), *arguments)
    head = re.split(r" {2,}", out.splitlines()[0])
    expect("total s" in head, "a column of the whole time", out)
    return max(numbers(row)[-5] for row in out.splitlines()[1:] if re.match(r" *\d", row))


def test_scheduling():
    """A row begins with its command, or names the difference from the command above it."""
    shown, told = table("scheduling"), 0
    usual = None
    for label, *cells in shown.rows:
        command = re.search(r"`build/(mlfab-sim|examples/05_scheduling)([^`\[]*)", label)
        more = re.search(r"the same (?:with `([^`]*)`|with 4 workers)", label)
        if command and command[1] != "mlfab-sim":
            found = [float(n) for n in re.findall(r": ([\d.]+) updates/s", example("05_scheduling"))]
        elif command or more:
            if command:
                usual = command[2].split()
            words = list(usual)
            if more and more[1]:
                words += more[1].split()
            elif more:
                words[words.index("--workers") + 1] = "4"
            found = [simulated(words), simulated(words + ["--scheduler", "beside"])]
        else:
            expect("network_test" in label or "traffic" in label, "a row of a real network, or with a command", label)
            continue
        told += 1
        same("%s, %s" % (shown.where, label), [numbers(cell)[0] for cell in cells], found)
    expect(told == 4, "four rows have commands in virtual time", shown.rows)


def source_of(profile):
    """The path of mlfab.c of a profile, which make has built, or of all of it."""
    path = os.path.join(ROOT if profile == "all" else os.path.join(BUILD, "profiles", profile), "mlfab.c")
    need(path, why="%s is not built")
    return path


def test_lines():
    """sizes_test.py compares the text."""
    shown = table("sizes")
    expect([row[0] for row in shown.rows] == ["minimal", "coll", "core", "all"], "all profiles", shown.rows)
    for profile, lines, _ in shown.rows:
        with open(source_of(profile), encoding="utf-8") as file:
            same("%s, %s" % (shown.where, profile), numbers(lines), [file.read().count("\n")])


def test_plan():
    """docs/scheduler.md shows lines of a plan that are printed, in this order; dots stand for others."""
    text = read("docs/scheduler.md")
    command = re.search(r"^    build/(mlfab-plan \S+ --human)\n\n((?:    .*\n)+)", text, re.M)
    expect(command, "the page has the command and its output")
    program, file, *options = command[1].split()
    out = printed(os.path.join(BUILD, program), os.path.join(ROOT, file), *options)
    expect(not re.search(r"delay -", out), "no delay is negative", out)
    shown, at = [line[4:] for line in command[2].splitlines()], 0
    expect(shown[-1].strip() == "..." and len(shown) > 4, "some lines", shown)
    for line in shown:
        if line.strip() != "...":
            expect(line + "\n" in out[at:], "the line is printed, in this order: '%s'" % line, out)
            at = out.index(line + "\n", at) + len(line)


def compiled(folder, text):
    """A program of a document, built without a warning in an empty folder."""
    compiler = os.environ.get("CC", "cc").split()
    need(compiler[-1])
    library = [path for path in (os.path.join(BUILD, name) for name in ("libmlfab.a", "libparts.a")) if os.path.exists(path)]
    if not library:
        raise Skip("no library is built")
    program = os.path.join(folder, "program")
    with open(program + ".c", "w", encoding="utf-8") as file:
        file.write(text)
    made = run(*compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-I" + ROOT, "-o", program, program + ".c", library[0],
               "-lpthread", "-lm", timeout=120)
    expect(made.code == 0, "it compiles without a warning", made)
    return program


def test_the_trainers_of_porting():
    """docs/porting.md: its diffs fit its program, have as many lines as it says, and all programs learn the same line."""
    need("patch")
    text = read("docs/porting.md")
    base, diffs = re.search(r"```c\n(.*?)```", text, re.S)[1], re.findall(r"```diff\n(.*?)```", text, re.S)
    shown = re.search(r"^    (loss \d.*)$", text, re.M)[1]
    told = [int(n) for n in re.findall(r"(\d+) more lines", text)]
    expect(len(diffs) == len(told) == 2 and max(told) <= 15, "two diffs", told)
    with tempfile.TemporaryDirectory() as folder:
        expect(printed(compiled(folder, base)) == shown + "\n", "one process")
        for diff, more in zip(diffs, told):
            added = len(re.findall(r"^\+(?!\+\+)", diff, re.M)) - len(re.findall(r"^-(?!--)", diff, re.M))
            expect(added == more, "%d more lines" % more, added)
            with open(folder + "/line.c", "w", encoding="utf-8") as file:
                file.write(base)
            with open(folder + "/diff", "w", encoding="utf-8") as file:
                file.write(diff)
            fits = run("patch", "-s", "-F", "0", folder + "/line.c", folder + "/diff")
            expect(fits.code == 0, "the diff fits", fits)
            with open(folder + "/line.c", encoding="utf-8") as file:
                program = compiled(folder, file.read())
            expect(printed(program) == shown + "\n", "a world of one")
            for servers in ("0", "1"):
                out = printed(os.path.join(BUILD, "mlfab-run"), "-n", "4", "-s", servers, "--no-prefix", "--set", "consistency=bsp", program)
                expect(out == 4 * (shown + "\n"), "four workers", out)


def test_the_diffs_of_trainers():
    """docs/trainers.md: each diff has as many more lines as the page says, at most 15."""
    text = read("docs/trainers.md")
    told = [int(n) for n in re.findall(r"(\d+) more lines", text)]
    more = [len(re.findall(r"^\+", diff, re.M)) - len(re.findall(r"^-", diff, re.M)) for diff in re.findall(r"```diff\n(.*?)```", text, re.S)]
    expect(len(more) == 2 and told == more and max(more) <= 15, "two diffs", (told, more))


def test_the_first_program():
    """The README's program compiles, and prints the loss that stands below it; two processes print another one, which ends as low."""
    text = read("README.md")
    source = re.search(r"save this as `trainer.c`:\n\n```c\n(.*?)```", text, re.S)
    shown = re.search(r"prints this loss.*\n\n((?:    step .*\n)+)", text)
    expect(source and shown, "the README has a program and its output")
    with tempfile.TemporaryDirectory() as folder:
        trainer = compiled(folder, source[1])
        told = [line.strip() for line in shown[1].splitlines()]
        expect(printed(trainer).splitlines() == told, "it prints the README's lines")
        two = run(os.path.join(BUILD, "mlfab-run"), "-n", "2", "-s", "0", "--no-prefix", trainer, env=clean_environment())
        expect(two.code == 0 and numbers(two.out.splitlines()[-1])[-1] < 0.01, "two workers learn the line", two)


def test_tables_say_where_their_figures_come_from():
    sources = "".join(read("tests/process/%s_test.py" % name) for name in ("figures", "sizes"))
    names = []
    for path in documents():
        for found in tables(path):
            if path in HISTORY:
                continue
            expect(found.kind or not found.has_figures(), "%s: a table with figures, and no comment says whose" % found.where)
            if found.kind == "figures":
                names.append(found.name)
                expect('table("%s")' % found.name in sources, "%s: a test compares it" % found.where)
    expect(len(names) == len(set(names)) and len(names) >= 5, "each name is of one table", names)


# ---- lists

def amalgamation():
    sys.path.insert(0, ROOT)
    import amalgamate
    return amalgamate


def test_floors():
    """CONTRIBUTING.md has the groups and the modules of amalgamate.py, each on its floor, in the table and in the picture."""
    source, text = amalgamation(), read("CONTRIBUTING.md")
    floors = source.GROUPS + [{"transports": source.TRANSPORTS}] + [source.TOP]
    rows = {m[2]: (int(m[1]), m[3]) for m in re.finditer(r"^\| (\d+) \| `(\w+)` \| (.*) \|$", text, re.M)}
    picture = re.search(r"```\n( *\d+ .*?)```", text, re.S)[1]
    shown = {}
    for line in picture.splitlines():
        floor = re.match(r" *(\d+)  (\w+)", line)
        if floor:
            shown[floor[2]] = int(floor[1])
    expect(sorted(rows) == sorted(group for floor in floors for group in floor), "all groups", sorted(rows))
    for number, groups in enumerate(floors):
        expect(any(shown.get(group) == number for group in groups), "floor %d of the picture" % number, shown)
        for group, modules in groups.items():
            expect(rows[group][0] == number, "%s is on floor %d" % (group, number), rows[group])
            expect(re.search(r"\b%s\b" % group, picture), "the picture has %s" % group, picture)
            expect(shown.get(group, number) == number, "the picture has %s on floor %d" % (group, number), picture)
            told = set(re.findall(r"`(\w+)`", rows[group][1]))
            # Wires, roles and calls are told once for all groups.
            silent = {m for m in modules.split() if re.search(r"_wire$|_role$|^calls_", m)}
            expect(told <= set(modules.split()), "%s has no other modules" % group, told - set(modules.split()))
            expect(set(modules.split()) <= told | silent, "%s: all modules" % group, set(modules.split()) - told)


def test_architecture():
    """docs/architecture.md has each frame once; its files exist, and those of a step have the functions beside them."""
    text = read("docs/architecture.md")
    listed = re.findall(r"X\(([A-Z_]+), \d+, [01]\)", read("core/wire/wire.h"))
    part = text[text.index("## All frames"):text.index("## Five questions")]
    told = [name for row in re.findall(r"^\| ([A-Z_, ]+) \|", part, re.M) for name in row.split(", ")]
    expect(len(listed) > 50 and sorted(told) == sorted(listed), "all frames", set(told) ^ set(listed))
    steps = re.findall(r"^\| .* \| (`.*\.c`) \| (`.*`) \|$", text, re.M)
    expect(len(steps) >= 10, "the steps of a push", steps)
    for files, functions in steps:
        sources = "".join(read(os.path.join("core", file)) for file in re.findall(r"`([^`]+)`", files))
        for name in re.findall(r"`([^`]+)`", functions):
            expect(re.search(r"\b%s\(" % name, sources), "%s has %s" % (files, name))
    everything = "".join(read(os.path.relpath(path, ROOT)) for path in glob.glob(os.path.join(ROOT, "core", "*", "*.c")))
    for name in re.findall(r"`((?:mlfab__|[a-z]+_)[a-z_]+)`", text):
        expect(re.search(r"\b%s\b" % name, everything) or name == "open_list", "a function %s" % name)


def test_files_exist():
    """Files that documents name; docs/promises.md names those of tests/ without the folder."""
    folders = "|".join(sorted(set(os.listdir(ROOT) + os.listdir(os.path.join(ROOT, "tests"))) - {"build"}))
    for path in set(documents()) - set(HISTORY):
        for file in re.findall(r"`((?:%s)/[\w/.]+\.(?:c|h|py|sh|cu|f90))\b" % folders, read(path)):
            expect(any(os.path.exists(os.path.join(ROOT, below, file)) for below in ("", "tests")), "%s: %s" % (path, file))


def test_benches_exist():
    """The scripts of the benchmark start programs that make builds: bench-NAME of tests/bench/NAME.c or .cc."""
    for script in sorted(glob.glob(os.path.join(ROOT, "tests/bench/*.py"))):
        for name in re.findall(r"bench-(\w[\w-]*)", read(os.path.relpath(script, ROOT))):
            expect(glob.glob(os.path.join(ROOT, "tests/bench", name + ".c*")), "bench-%s of %s" % (name, script))


def test_recipes_have_the_version():
    version = re.search(r'^#define MLFAB_VERSION "(.*)"', read("mlfab.h"), re.M)[1]
    for path, pattern in (("packaging/debian/changelog", r"^mlfab \((.*)-\d+\)"), ("packaging/meson/mlfab.wrap", r"mlfab-([\d.]+)\.tar"),
                          ("packaging/meson/packagefiles/mlfab/meson.build", r"version : '(.*?)'"), ("packaging/README.md", r"mlfab-([\d.]+)\.tar"),
                          ("packaging/spack/package.py", r'version\("([\d.]+)"\)'), ("CHANGELOG.md", r"^## ([\d.]+)")):
        found = re.search(pattern, read(path), re.M)
        expect(found and found[1] == version, "%s: version %s" % (path, version), found and found[0])


def test_what_the_lanes_do():
    """CONTRIBUTING.md tells the numbers of the Makefile."""
    text, make = " ".join(read("CONTRIBUTING.md").split()), read("Makefile")
    sample = re.search(r"planted --sample (\d+)", make)[1]
    expect("`make check` tries %s of them" % sample in text, "%s planted bugs" % sample)
    goal = round(100 * float(re.search(r"mutate.py random --goal ([\d.]+)", make)[1]))
    promised = " ".join(read("docs/promises.md").split())
    expect("`make soak` fails below %d %%" % goal in promised, "%d %% of the mutants" % goal)
    for place, words in (("MLFAB_PLAYED=1 ", "played devices from "), ("in_asan = ", "ASan from "), ("in_tsan = ", "TSan from "),
                         ("@36000=", "soak from ")):
        millions = re.search(place + r".*?\$\(call seeds,(\d+)\)", make)[1]
        expect("%s%s,000,001" % (words, millions) in text, "the first seed of " + place)


def test_sections_of_the_manual():
    """The contents at the top of mlfab.h are its sections."""
    text = read("mlfab.h")
    contents = text[:text.index("* 1. A complete program")]
    told = sorted(int(n) for line in contents.splitlines() for n in re.findall(r"(?<=  )(\d+)  [a-z]", line))
    heads = [int(n) for n in re.findall(r"^ \* (\d+)\. [A-Z]", text, re.M)]
    expect(heads == list(range(1, len(heads) + 1)), "numbered sections", heads)
    expect(told == heads, "each is in the contents", told)
    for path in documents():
        for number in re.findall(r"section (\d+) of `mlfab.h`", read(path)):
            expect(int(number) in heads, "%s: section %s" % (path, number))


def test_links_lead_somewhere():
    """Links to files of the repository, and to headings of documents."""
    for path in documents():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", read(path), flags=re.S)):
            file, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            full = os.path.join(os.path.dirname(path), file) if file else path
            expect(os.path.exists(os.path.join(ROOT, full)), "%s: %s" % (path, target))
            if anchor and full.endswith(".md"):
                heads = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-")
                         for head in re.findall(r"^#+ (.*)$", read(full), re.M)]
                expect(anchor in heads, "%s: %s" % (path, target), heads)


if __name__ == "__main__":
    main(globals(), jobs=2)
