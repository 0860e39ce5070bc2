#!/usr/bin/env python3
# lane: check
"""Functions have a caller, and members of structs are read by some expression: in the whole mlfab.c, and in each profile but for
a number. The linker says which functions remain without a caller; clang's syntax tree has each use of a member."""
import os
import re
import shutil
import subprocess
import sys
import tempfile

from process import expect, main, need

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
import amalgamate  # noqa: E402

# The most functions and members without a use. The whole has none. A number of a profile only falls.
CEILINGS = {"": (0, 0), "core": (19, 72), "coll": (74, 84), "minimal": (6, 111)}
# These have a use outside mlfab.c, or none by intention.
FUNCTIONS = set(re.findall(r"mlfab__\w+", amalgamate.STUBS))  # lines of absent parts call them
for program in ["transports/sim.c", "tools/mlfab-plan.c", "tools/replicate.c"]:  # the simulator, and a tool that links the parts
    FUNCTIONS |= set(re.findall(r"\bmlfab__\w+(?=\()", amalgamate.read(program)))
MEMBERS = {
    "mlfab__role.name", "mlfab__mirrored.name",  # a debugger shows them
    "mlfab__moment_room.states",  # compared with its struct
    "packet_stage.i64", "packet_stage.word", "tcp_endpoint.storage",  # unions: room and alignment
    "mlfab__transfer.from", "mlfab__transfer.to", "mlfab__transfer.available", "mlfab__transfer.end",  # mlfab-plan prints these
    "mlfab__candidate.id", "mlfab__candidate.norm", "mlfab__ordered.end", "mlfab__planned.start", "mlfab__planned.ready",
    "shm.fence", "mlfab__shm_coll.fence",  # only ThreadSanitizer needs them
}
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


def do(*command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    expect(result.returncode == 0, " ".join(command), result.stderr)
    return result


def uncalled(path):
    """Names of functions that nothing reaches from a public function."""
    compiler = os.environ.get("CC", "cc").split()
    made = path + ".o"
    do(*compiler, "-std=c11", "-O0", "-fno-inline", "-ffunction-sections", "-fPIC", "-I" + ROOT, "-c", path, "-o", made)
    said = do(*compiler, "-shared", "-Wl,--gc-sections,--print-gc-sections", made, "-o", path + ".so", "-lpthread", "-lm").stderr
    return sorted(set(re.findall(r"'\.text\.(\w+)'", said)) - FUNCTIONS)


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


def unread(path):
    tree = path + ".tree"
    with open(tree, "w", encoding="utf-8") as file:
        subprocess.run(["clang", "-std=c11", "-I" + ROOT, "-fsyntax-only", "-Xclang", "-ast-dump", "-fno-color-diagnostics", path],
                       stdout=file, check=True)
    with open(tree, encoding="utf-8", errors="replace") as file:
        known, found = members(file)
    expect(len(known) > 500, "clang has shown %d members" % len(known))
    return found


def judge(profile, find, ceiling, what):
    folder = tempfile.mkdtemp()
    try:
        found = find(source(profile, folder))
    finally:
        shutil.rmtree(folder)
    name = "the profile " + profile if profile else "mlfab.c"
    expect(len(found) <= ceiling, "%s has %d %s, more than %d: %s" % (name, len(found), what, ceiling, " ".join(found)))
    print("# %s: %d %s" % (name, len(found), what), flush=True)


def test_functions_have_a_caller(profile):
    need("cc")
    judge(profile, uncalled, CEILINGS[profile][0], "functions without a caller")


def test_members_have_a_use(profile):
    need("clang")
    judge(profile, unread, CEILINGS[profile][1], "members without a use")


def test_that_it_finds_one():
    need("clang", "cc")
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "mlfab.c")
    with open(path, "w", encoding="utf-8") as file:
        file.write("struct a { int used, written, unused; };\n"
                   "static __attribute__((unused)) int lost(void) { return 1; }\n"
                   "static __attribute__((unused)) int lost_too(void) { return lost(); }\n"
                   "int kept(struct a *a);\n"
                   "int kept(struct a *a) { a->written = 1; return a->used; }\n")
    try:
        expect(uncalled(path) == ["lost", "lost_too"], "the functions without a caller", uncalled(path))
        with open(path + ".tree", "w", encoding="utf-8") as file:
            subprocess.run(["clang", "-fsyntax-only", "-Xclang", "-ast-dump", "-fno-color-diagnostics", path], stdout=file, check=True)
        with open(path + ".tree", encoding="utf-8") as file:
            found = members(file)[1]
        expect(found == ["a.unused", "a.written"], "the members without a use", found)
    finally:
        shutil.rmtree(folder)


test_functions_have_a_caller.arguments = test_members_have_a_use.arguments = [("",)] + [(name,) for name in amalgamate.PROFILES]

if __name__ == "__main__":
    main(globals())
