#!/usr/bin/env python3
"""compare.py PAPER PAGE: is the page that PAPER (build/paper) writes the one in docs/paper.md? Words are equal, figures within
2 %. Rows of data sets need MLFAB_DATA, and are left out without it. Prints one line for each difference."""
import difflib
import os
import re
import subprocess
import sys
import tempfile

NUMBER = r"\d[\d,]*(?:\.\d+)?"
TOLERANCE = 0.02


def words(line):
    return re.sub(NUMBER + "|#+", "0", line)


def figures(line):
    return [float(n.replace(",", "")) for n in re.findall(NUMBER, line)]


def differ(ours, theirs):
    if words(ours) != words(theirs):
        return True
    # A last digit may be rounded otherwise.
    return any(abs(a - b) > max(TOLERANCE * abs(b), 0.011) for a, b in zip(figures(ours), figures(theirs)))


def main(program, page):
    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, "paper.md")
        status = subprocess.run([program, os.path.join(folder, "paper.tsv"), made], stdout=subprocess.DEVNULL, check=False)
        with open(made, encoding="utf-8") as file:
            now = [line for line in file.read().splitlines() if line]
    with open(page, encoding="utf-8") as file:
        then = [line for line in file.read().splitlines() if line]
    found = 0
    for tag, i, j, k, m in difflib.SequenceMatcher(None, [words(x) for x in then], [words(x) for x in now], False).get_opcodes():
        if tag == "delete" and not os.environ.get("MLFAB_DATA") and all("TDF" in line or "|" in line for line in then[i:j]):
            continue
        rows = list(zip(then[i:j], now[k:m])) if tag == "equal" else [("\n".join(then[i:j]), "\n".join(now[k:m]))]
        for old, new in rows:
            if tag != "equal" or differ(old, new):
                found += 1
                print("the page: %s\nnow:      %s" % (old, new))
    print("%d differences" % found)
    return 1 if found or status.returncode else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
