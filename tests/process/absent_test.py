#!/usr/bin/env python3
# lane: test
"""tools/absent.py takes members as 0: the rest of small functions, and its refusals."""
import os
import re
import subprocess
import sys
import tempfile

from process import expect, main

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
from tools import absent  # noqa: E402

STRUCTS = """\
typedef struct mlfab__table {
  int (*turn)(int by);
} mlfab__table;

typedef struct mlfab__box {
  int size;
  const mlfab__table *lid; /* or NULL */
  int open, weight;
} mlfab__box;

static int turns;
static int turn(int by) { return turns += by; }
"""
# A body of `static int f(mlfab__box *b, int x)`, and what is left of it without box.lid and box.open.
BODIES = [
    ("if (b->lid) x++; return x;", "return x;"),
    ("if (!b->lid) x++; return x;", "x++; return x;"),
    ("if (b->lid) { x++; } else { x--; } return x;", "x--; return x;"),
    ("if (b->lid) x++; else if (x) x--; return x;", "if (x) x--; return x;"),
    ("if (x && b->lid) x++; return x;", "return x;"),
    ("if (x || b->lid) x++; return x;", "if (x) x++; return x;"),
    ("if (x && !b->lid && b->size) x++; return x;", "if (x && b->size) x++; return x;"),
    ("if (b->lid != NULL) x++; return b->lid == NULL;", "return 1;"),
    ("return b->lid ? b->lid->turn(x) : x;", "return x;"),
    ("return x + (b->lid ? 1 : 0);", "return x;"),
    ("return x | (b->open ? 2 : 0) | b->size;", "return x | b->size;"),
    ("return b->size + b->open;", "return b->size;"),
    ("int shut = !b->open; return shut ? x : 2 * x;", "int shut = 1; return shut ? x : 2 * x;"),
    ("int shut = b->open;\n  if (shut) x++; return x;", "return x;"),
    ("if (x > 3) return b->lid->turn(x); return x;", "return x;"),
    ("switch (x) { case 1: x = b->lid->turn(x); break; default: x++; } return x;",
     "switch (x) { case 1: break; default: x++; } return x;"),
    ("while (b->open) x++; for (int i = 0; b->lid && i < 3; i++) x++; return x;", "return x;"),
    ("for (int i = 0; !b->lid && i < 3; i++) x++; return x;", "for (int i = 0; i < 3; i++) x++; return x;"),
    ("b->open = 0; b->lid = NULL; return x;", "return x;"),
    ("b->size = b->open = 0; return x;", "b->size = 0; return x;"),
    ("if (!b->open) return x; x += 7; return x;", "return x;"),
    ("if (x == b->open || b->size == 0) x = 4; return x;", "if (x == 0 || b->size == 0) x = 4; return x;"),
    ("mlfab__box *other = b;\n  if (other->lid) x = 9;\n  return x;", "return x;"),
    ("if (x) { if (b->lid) x = 2; } else { x = 3; } return x;", "if (!x) { x = 3; } return x;"),
]
REFUSED = [
    ("b->lid = x ? NULL : (const mlfab__table *)b; return x;", "an absent member is set"),
    ("b->open = x; return x;", "an absent member is set"),
    ("if (turn(x) && b->lid) x++; return x;", "a call stands before"),
    ("return x & b->open;", "the address, or bits, of an absent member"),
    ("int *at = &b->open; return *at + x;", "the address, or bits, of an absent member"),
    ("if (turn(x)) x = b->lid->turn(x); return x;", "cannot run"),
    ("if (turn(x)) b->open = 0; return x;", "nothing is left behind"),
]


def flat(text):
    """Without spaces, except between two words."""
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text)


def reduced(body):
    """The rest of a function's body, and the problems."""
    source = STRUCTS + "static int f(mlfab__box *b, int x) {\n  %s\n}\n\nint g(mlfab__box *b, int x) { return f(b, x) + turn(1); }\n" % body
    text, problems = absent.without(source, [("mlfab__box", "lid"), ("mlfab__box", "open")])
    found = re.search(r"(?s)static int f\(.*?\) \{(.*?)\}\n\nint g", text)
    return text, found.group(1) if found else "", problems


RUN = """
#define RUN(n) \\
  for (int x = -1; x < 6; x++) { \\
    mlfab__box_##n b = {.size = x % 3}; \\
    int y = g_##n(&b, x); \\
    printf("%d %d %d%c", y, b.size, turns_##n, x == 5 ? '\\n' : ' '); \\
  }
"""


def results(texts):
    """The results of g of each text for some arguments: a line of each. One program has all of them, with names of their own."""
    own = [re.sub(r"\b(f|g|turns?|mlfab__\w+)\b", r"\1_%d" % n, text) for n, text in enumerate(texts)]
    runs = "".join("  RUN(%d)\n" % n for n in range(len(texts)))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "f")
        with open(path + ".c", "w", encoding="utf-8") as file:
            file.write("#include <stddef.h>\n#include <stdio.h>\n%s%sint main(void) {\n%s  return 0;\n}\n" % ("\n".join(own), RUN, runs))
        subprocess.run([os.environ.get("CC", "cc").split()[-1], "-Wno-unused", "-o", path, path + ".c"], check=True)
        return subprocess.run([path], check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()


def test_what_is_left(body, left):
    text, got, problems = reduced(body)
    expect(not problems, "no problem in `%s`" % body, problems)
    expect(flat(got) == flat(left), "`%s` leaves `%s`" % (body, left), got)
    expect("lid" not in text and "open" not in absent.masked(text) and "mlfab__table" not in text, "declarations are gone", text)


test_what_is_left.arguments = BODIES


def test_same_results():
    """A reduced function gives the results of the whole function if the members are 0."""
    # With x = 1 the whole function of the others crashes.
    bodies = [body for body, _ in BODIES if "x = b->lid->turn" not in body and "return b->lid->turn(x); return" not in body]
    whole = [STRUCTS + "static int f(mlfab__box *b, int x) {\n  %s\n}\nint g(mlfab__box *b, int x) { return f(b, x) + turn(1); }\n" % body for body in bodies]
    lines = results(whole + [reduced(body)[0] for body in bodies])
    expect(len(lines) == 2 * len(bodies), "a line for each", lines)
    for body, one, other in zip(bodies, lines, lines[len(bodies):]):
        expect(one == other and len(one.split()) == 21, "`%s` gives the same" % body, (one, other))


def test_refused(body, why):
    problems = reduced(body)[2]
    expect(any(why in problem for problem in problems), "`%s` is refused: %s" % (body, why), problems)


test_refused.arguments = REFUSED


def test_uncalled_functions_go():
    source = STRUCTS + ("static int inner(int x) { return x + 1; }\nstatic int f(mlfab__box *b, int x) {\n  if (b->open) x = inner(x);\n"
                        "  return x;\n}\n\nint g(mlfab__box *b, int x) { return f(b, x) + turn(1); }\n")
    text, problems = absent.without(source, [("mlfab__box", "open")])
    expect(not problems and "inner" not in text and "lid" in text, "inner has no caller", text)


def test_unknown_members():
    problems = absent.without(STRUCTS, [("mlfab__box", "colour"), ("bag", "size")])[1]
    expect(len(problems) == 2, "a member and a struct that do not exist", problems)


def test_prototypes():
    """A prototype goes if the body stands before the first use; its comment then stands at the first body of its group."""
    source = ("/* one: adds 1. two: adds 2. */\nstatic int one(int x);\nstatic int two(int x);\n\n/* Used too early. */\n"
              "static int three(int x);\n/* Adds 4. */\nstatic int four(int x);\n\nint early(int x) { return three(x); }\n\n"
              "static int two(int x) { return x + 2; }\n\n/* See above. */\nstatic int one(int x) { return x + 1; }\n\n"
              "static int three(int x) { return one(two(x)); }\n\nstatic int four(int x) { return x + 4; }\n"
              "int all(int x) { return four(early(x)); }\n")
    text = absent.stated_once(source)
    expect(text.lstrip() == "/* Used too early. */\nstatic int three(int x);\n\nint early(int x) { return three(x); }\n\n"
           "/* one: adds 1. two: adds 2. */\nstatic int two(int x) { return x + 2; }\n\n/* See above. */\n"
           "static int one(int x) { return x + 1; }\n\nstatic int three(int x) { return one(two(x)); }\n\n"
           "/* Adds 4. */\nstatic int four(int x) { return x + 4; }\nint all(int x) { return four(early(x)); }\n",
           "prototypes that are needed stay", text)


if __name__ == "__main__":
    main(globals())
