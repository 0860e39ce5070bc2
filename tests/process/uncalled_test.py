#!/usr/bin/env python3
# lane: check
"""Functions have a caller, and members of structs are read by some expression: in the whole mlfab.c, and in each profile but for
a number. clang's syntax tree has each call, and each use of a member."""
import os
import re
import subprocess
import sys
import tempfile

from process import expect, main, need

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
import amalgamate  # noqa: E402

# The most functions and members without a use. The whole has none. A number of a profile only falls.
CEILINGS = {"": (0, 0), "core": (11, 59), "coll": (40, 68), "minimal": (1, 71)}
# These have a use outside mlfab.c, or none by intention.
FUNCTIONS = set(re.findall(r"mlfab__\w+", amalgamate.STUBS))  # lines of absent parts call them
for program in ["transports/sim.c", "tools/mlfab-plan.c", "tools/replicate.c"]:  # the simulator, and a tool that links the parts
    FUNCTIONS |= set(re.findall(r"\bmlfab__\w+(?=\()", amalgamate.read(program)))
MEMBERS = {
    "mlfab__role.name", "mlfab__mirrored.name",  # a debugger shows them
    "mlfab__moment_room.states",  # compared with its struct
    "packet_stage.i64", "packet_stage.word", "tcp_endpoint.storage", "shm_control.header",  # unions: room and alignment
    "mlfab__kernels.combine",  # read as an element of an array
    "mlfab__transfer.from", "mlfab__transfer.to", "mlfab__transfer.available", "mlfab__transfer.end",  # mlfab-plan prints these
    "mlfab__candidate.id", "mlfab__candidate.norm", "mlfab__ordered.end", "mlfab__planned.start", "mlfab__planned.ready",
    "shm.fence", "mlfab__shm_coll.fence",  # only ThreadSanitizer needs them
}
FUNCTION = re.compile(r"^[|`]-FunctionDecl .*? (\w+) '.*'((?: static| extern| inline)*)$")
NODE = re.compile(r"^([| `-]*)(\w+) (0x\w+)(.*)")


def source(profile, folder):
    """Writes mlfab.c, of a profile or whole, to a folder; returns its path."""
    library = {path: part for path, part in amalgamate.list_parts().items() if part.module != amalgamate.SIMULATOR}
    text = (amalgamate.profile_text(library, profile) if profile
            else amalgamate.join(library, amalgamate.LIBRARY_TITLE, "mlfab.h"))
    path = os.path.join(folder, "mlfab.c")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def uncalled(tree):
    """Names of functions that nothing reaches from a public function, or from a variable outside functions, of a syntax
    tree's lines. Those of the system's headers begin with _. Inline functions do not count: a header has them for all."""
    refers, defined, public, here = {"": set()}, set(), set(), ""
    for line in tree:
        if line[1:2] == "-":
            function = FUNCTION.match(line)
            here, words = (function[1], function[2]) if function else ("", "")
            static, inline = " static" in words, " inline" in words
            refers.setdefault(here, set())
        elif here and line.startswith("-CompoundStmt", 3):
            if not static:
                public.add(here)
            elif not inline:
                defined.add(here)
        if " Function 0x" in line:
            refers[here].update(re.findall(r" Function 0x\w+ '(\w+)'", line))
    reached, ahead = set(), refers[""] | public
    while ahead:
        name = ahead.pop()
        reached.add(name)
        ahead |= refers.get(name, set()) - reached
    return sorted(name for name in defined - reached - FUNCTIONS if not name.startswith("_"))


def members(tree):
    """(all members of internal structs, those that nothing reads), as STRUCT.MEMBER, of a syntax tree's lines."""
    declared, read, records = {}, set(), []
    file, before = "", None
    for line in tree:
        node = NODE.match(line)
        if not node:
            continue
        depth, kind, address, rest = len(node[1]), node[2], node[3], node[4]
        for place in re.findall(r"([^\s<>:]+):\d+:\d+", rest.split("'")[0]):
            file = file if place == "line" else place
        while records and records[-1][0] >= depth:
            records.pop()
        if kind == "RecordDecl":
            name = re.search(r" (?:struct|union) (?!definition)(\w+)(?: definition)?$", rest)
            records.append((depth, name[1] if name else records[-1][1] if records else "?"))
        elif kind == "FieldDecl" and records and file.endswith("mlfab.c"):
            name = re.search(r"(\w+) '", rest)
            if name and re.match(r"mlfab__|(?!mlfab_|\?)", records[-1][1]):
                declared[address] = records[-1][1] + "." + name[1]
        elif kind == "MemberExpr":
            member = rest.rsplit(" ", 1)[-1].strip()
            assigned = before and before[2] == "BinaryOperator" and before[4].endswith("'='") and len(before[1]) == depth - 2
            if member in declared and not assigned:
                read.add(member)
        before = node
    return set(declared.values()), sorted({name for at, name in declared.items() if at not in read} - MEMBERS)


def syntax_tree(path):
    """The lines of a file's tree."""
    need("clang")
    with open(path + ".tree", "w", encoding="utf-8") as file:
        subprocess.run(["clang", "-std=c11", "-I" + ROOT, "-fsyntax-only", "-Xclang", "-ast-dump", "-fno-color-diagnostics", path],
                       stdout=file, check=True)
    with open(path + ".tree", encoding="utf-8", errors="replace") as file:
        return file.readlines()


def test_all_has_a_use(profile):
    with tempfile.TemporaryDirectory() as folder:
        tree = syntax_tree(source(profile, folder))
    name = "the profile " + profile if profile else "mlfab.c"
    known, unread = members(tree)
    expect(len(known) > 500, "clang has shown %d members" % len(known))
    for found, ceiling, what in zip((uncalled(tree), unread), CEILINGS[profile],
                                    ("functions without a caller", "members without a use")):
        expect(len(found) <= ceiling, "%s has %d %s, more than %d: %s" % (name, len(found), what, ceiling, " ".join(found)))
        print("# %s: %d %s" % (name, len(found), what), flush=True)


def test_that_it_finds_one():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "mlfab.c")
        with open(path, "w", encoding="utf-8") as file:
            file.write("struct a { int used, written, unused; };\n"
                       "static __attribute__((unused)) int lost(void) { return 1; }\n"
                       "static __attribute__((unused)) int lost_too(void) { return lost(); }\n"
                       "static int reached(void) { return 1; }\n"
                       "static int (*const table[])(void) = {reached};\n"
                       "int kept(struct a *a);\n"
                       "int kept(struct a *a) { a->written = 1; return a->used + table[0](); }\n")
        tree = syntax_tree(path)
    expect(uncalled(tree) == ["lost", "lost_too"], "the functions without a caller", uncalled(tree))
    expect(members(tree)[1] == ["a.unused", "a.written"], "the members without a use", members(tree)[1])


test_all_has_a_use.arguments = [("",)] + [(name,) for name in amalgamate.PROFILES]

if __name__ == "__main__":
    main(globals())
