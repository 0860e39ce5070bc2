#!/usr/bin/env python3
"""The words of errors and logs: every constant or variable that a text names exists."""
import glob
import os
import re

from process import cases, expect, main

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCES = [path for folder in ("core", "transports", "tools", "extras", "gpu")
           for path in glob.glob(ROOT + "/" + folder + "/**/*.[ch]*", recursive=True) if path.endswith((".c", ".h", ".cu"))]
TEXT = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
NAME = re.compile(r"MLFAB_[A-Z0-9_]*[A-Z0-9](?:_?\*)?")


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def without_comments(source):
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.S)
    return re.sub(r"^\s*(//|#include).*$", "", source, flags=re.M)


def constants():
    """Names of the headers, and switches, which only comments of mlfab.h have."""
    switches = set(re.findall(r"\bMLFAB_WITH_[A-Z]+", read(ROOT + "/mlfab.h")))
    header = "".join(without_comments(read(path)) for path in glob.glob(ROOT + "/*.h"))
    return switches | set(re.findall(r"\bMLFAB_[A-Z0-9_]+", header)) | {
        "MLFAB_ERR_" + name for name in re.findall(r"\bX\((\w+), -\d+", header)}


def variables():
    """Names of settings as variables, and of variables that a program reads by name."""
    config = read(ROOT + "/core/api/config.c")
    names = {"MLFAB_" + name.upper() for name in re.findall(r'CONFIG_\w\("(\w+)"', config) + ["rank", "role"]}
    names |= {"MLFAB_" + name.upper() for name in re.findall(r'CONFIG_TIME\("(\w+)"', config)}
    for path in SOURCES:  # of extras and tools: a text that is a name is the argument of getenv
        if "/extras/" in path or "/tools/" in path:
            names |= {text for text in TEXT.findall(without_comments(read(path))) if NAME.fullmatch(text)}
    return names


CONSTANTS, VARIABLES = constants(), variables()
CALLS = ("/core/coll/", "/core/worker/", "/core/sparse/", "/core/model/")  # they know no variables


def unknown(text, path=""):
    """The names in a text that stand for nothing. A name that ends with * stands for those that begin so."""
    names = CONSTANTS if any(part in path for part in CALLS) else CONSTANTS | VARIABLES
    for name in NAME.findall(text):
        begin = name.rstrip("*")
        exact = begin == name
        if not (name in names if exact else any(n.startswith(begin) for n in names)):
            yield name


def test_that_it_finds_one():
    expect(list(unknown("MLFAB_MEAN cannot be used; MLFAB_NOTIFY_*", "/core/coll/plain.c")) == ["MLFAB_MEAN", "MLFAB_NOTIFY_*"], "two that do not exist")
    expect(not list(unknown("MLFAB_OP_MEAN, MLFAB_STOCHASTIC_*, MLFAB_KEY")), "three that do")


@cases("core", "transports", "tools", "extras", "gpu")
def test_texts_name_what_exists(folder):
    exempt = {"MLFAB_ERR_UNKNOWN", "MLFAB_OPENED"}  # of mlfab_error_name; between mlfab-run and the library
    wrong = ["%s: %s" % (os.path.relpath(path, ROOT), name) for path in SOURCES
             if os.path.relpath(path, ROOT).startswith(folder + "/")
             for text in TEXT.findall(without_comments(read(path))) for name in unknown(text, path)
             if name not in exempt and not (name == "MLFAB_ERR" and text == "MLFAB_ERR_")
             and not (name == "MLFAB_WITH" and "MLFAB_WITH_%s" in text)]
    expect(not wrong, "unknown: " + ", ".join(wrong))


if __name__ == "__main__":
    main(globals())
