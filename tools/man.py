#!/usr/bin/env python3
"""Prints the man page of a tool, made from its help: man.py PROGRAM VERSION"""
import os
import re
import subprocess
import sys


def escape(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def parts(text):
    """The usage, the paragraphs, and the options between them."""
    usage, _, rest = text.partition("\n\n")
    before, rows, after = [], [], []
    for block in rest.strip("\n").split("\n\n"):
        if re.search(r"^  -", block, re.M):
            for line in block.splitlines():
                match = re.match(r"  (-.*?)(?:  +(\S.*))?$", line)
                if match:
                    rows.append([match[1], match[2] or ""])
                elif rows:
                    rows[-1][1] = (rows[-1][1] + " " + line.strip()).strip()
        else:
            (after if rows else before).append(block)
    return usage, before, rows, after


def main():
    program, version = sys.argv[1:]
    name = os.path.basename(program)
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=True, env=dict(os.environ, COLUMNS="80")).stdout
    usage, before, rows, after = parts(text)
    about = re.split(r"[.:](?:\s|$)", " ".join(before[0].split()), maxsplit=1)[0]
    out = ['.TH %s 1 "" "mlfab %s"' % (name.upper(), version), ".SH NAME", escape("%s - %s" % (name, about[0].lower() + about[1:])),
           ".SH SYNOPSIS", ".nf"]
    out += [escape(line) for line in re.sub(r"^usage: |^ {7}", "", usage, flags=re.M).splitlines()] + [".fi", ".SH DESCRIPTION"]
    out += [line for block in before for line in (".PP", escape(" ".join(block.split())))] + [".SH OPTIONS"]
    out += [line for option, meaning in rows for line in (".TP", ".B " + escape(option), escape(meaning))]
    for block in after:
        title, colon, words = block.partition(":")
        heading = colon and len(title) < 30 and "\n" not in title
        out += [".SH " + title.upper() if heading else ".PP"]
        out += [".PP\n" + escape(line) for line in re.sub(r"\n(?![A-Z]+: )", " ", words.strip()).splitlines()] if title == "Columns" else [escape(" ".join((words if heading else block).split()))]
    print("\n".join(out))


if __name__ == "__main__":
    main()
