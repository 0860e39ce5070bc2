#!/usr/bin/env python3
"""Draws the pictures of docs/img with gnuplot: plots.py [BUILD] [--to FOLDER] [--only NAME]...

It reads BUILD/bench.tsv (make bench) and BUILD/paper.tsv (make paper), and runs four examples. A picture whose data are missing
stays as it is, and a line says so. One colour is one kind in all pictures."""
import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys

BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#1f6feb", "#d97706", "#1a7f37", "#8250df", "#cf222e", "#8c959f"
WIDTH, FONT, BYTES_MOST = 480, "sans-serif,14", 60000
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)"


class Missing(Exception):
    """Data of a picture that are not there, with the command that makes them."""


def rows_of(path, command, least):
    """The rows of a file of tab-separated values, without its head."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = [line.rstrip("\n").split("\t") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise Missing("%s cannot be read (%s); %s writes it" % (path, getattr(error, "strerror", None) or "no text", command)) from error
    short = [number for number, row in enumerate(rows, 1) if len(row) < least]
    if short:
        raise Missing("%s:%d has fewer than %d columns; %s writes it" % (path, short[0], least, command))
    return rows


def printed(*command):
    """What a program prints."""
    if not os.path.exists(command[0]):
        raise Missing("%s is not built; make tools examples builds it" % command[0])
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        raise Missing("%s ended with %d: %s" % (" ".join(command), done.returncode, done.stderr.strip()[-200:]))
    return done.stdout


def found(pattern, text, what):
    rows = re.findall(pattern, text, re.M)
    if not rows:
        raise Missing("%s prints no row that this script knows" % what)
    return rows


def quoted(text):
    return '"%s"' % text.replace("\\", "\\\\").replace('"', '\\"')


def block(name, rows):
    """Data that stand in gnuplot's script."""
    return "$%s << EOD\n%s\nEOD\n" % (name, "\n".join("\t".join(map(str, row)) for row in rows))


def draw(folder, name, title, height, script):
    head = "\n".join(["set terminal svg size %d,%d fixed noenhanced font '%s' background rgb 'white'" % (WIDTH, height, FONT),
                      "set datafile separator '\\t'", "set encoding utf8", "set tics nomirror out", "set border 3 lc rgb '#57606a'",
                      "set grid x lc rgb '#d0d7de' lt 1", "set key top center outside horizontal samplen 1 width 1", ""])
    done = subprocess.run(["gnuplot"], input=head + script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", check=False)
    if done.returncode or done.stderr.strip():
        sys.exit("plots.py: gnuplot does not draw %s: %s" % (name, done.stderr.strip()[-400:]))
    # A screen reader tells the title. Marks that are not used, empty groups and values that are SVG's own are left out.
    text = re.sub(r"<title>Gnuplot</title>", "<title>%s</title>" % title, done.stdout, count=1)
    text = re.sub(r"<filter id=.*?</filter>", "", text.replace(' stroke-linecap="butt" stroke-linejoin="miter"', ""), flags=re.S)
    unused = set(re.findall(r"id='(gpPt\d+)'", text)) - set(re.findall(r"xlink:href='#(gpPt\d+)'", text))
    text = re.sub(r"<(path|circle|use)\b[^>]*id='(gpPt\d+)'[^>]*/>\n", lambda m: "" if m[2] in unused else m[0], text)
    text = "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"
    text = re.sub(r"<g [^>]*>\n</g>\n", "", re.sub(r" *'/>", "'/>", text))
    if len(text) > BYTES_MOST:
        sys.exit("plots.py: %s would have %d bytes, more than %d" % (name, len(text), BYTES_MOST))
    with open(os.path.join(folder, name + ".svg"), "w", encoding="utf-8") as file:
        file.write(text)


# ---- forms

def bars(groups, kinds, unit, left, log=False):
    """Groups of horizontal bars: (label, {kind: value}); kinds: {kind: colour}. Returns the script and its height."""
    at, tics, boxes, numbers = 0.0, [], {kind: [] for kind in kinds}, []
    most = max(value for _, values in groups for value in values.values())
    least = min(value for _, values in groups for value in values.values())
    base = 10.0 ** (len(str(int(1 / least))) * -1) if log and least < 1 else 1.0 if log else 0.0
    for label, values in groups:
        begin = at
        for kind in kinds:
            if kind in values:
                boxes[kind].append(((base + values[kind]) / 2, at, base, values[kind], at - 0.42, at + 0.42))
                numbers.append((values[kind], at, "%.3g" % values[kind] if values[kind] < 1000 else "%.0f" % values[kind]))
                at += 1
        tics.append("%s %g" % (quoted(label), (begin + at - 1) / 2))
        at += 0.7
    used = [kind for kind in kinds if boxes[kind]]
    script = "".join(block("b%d" % i, boxes[kind]) for i, kind in enumerate(used)) + block("n", numbers)
    script += "set lmargin %d\nset xlabel %s\nset yrange [%g:-0.8]\nset ytics (%s) scale 0\nset style fill solid\n" % (
        left, quoted(unit), at - 0.2, ", ".join(tics))
    script += "set logscale x\nset xrange [%g:%g]\n" % (base, most * 3) if log else "set xrange [0:%g]\n" % (most * 1.16)
    script += "plot " + ", ".join("$b%d using 1:2:3:4:5:6 with boxxyerror lc rgb '%s' title %s" % (i, kinds[kind], quoted(kind))
                                  for i, kind in enumerate(used))
    return script + ", $n using 1:2:3 with labels left offset 0.4,0 font ',12' notitle\n", int(90 + at * 17)


def beside(rows, unit, left, log=False):
    """A line for each row: the paper's point or range, and ours. (label, paper, ours), the paper's as a pair."""
    values = [value for _, (low, high), ours in rows for value in (low, high, ours) if value > 0]
    script = block("paper", [(low, i, high) for i, (_, (low, high), _) in enumerate(rows)])
    script += block("ours", [(ours, i) for i, (_, _, ours) in enumerate(rows)])
    script += "set lmargin %d\nset xlabel %s\nset yrange [%g:-0.6]\nset ytics (%s) scale 0\nset grid y\n" % (
        left, quoted(unit), len(rows) - 0.4, ", ".join("%s %d" % (quoted(label), i) for i, (label, _, _) in enumerate(rows)))
    script += ("set logscale x\nset xrange [%g:%g]\n" % (min(values) / 1.6, max(values) * 1.6) if log else
               "set xrange [0:%g]\n" % (max(values) * 1.08))
    script += ("plot $paper using 1:2:($3-$1):(0) with vectors nohead lw 5 lc rgb '%s' notitle, "
               "$paper using 3:2 with points pt 7 ps 1.4 lc rgb '%s' notitle, "
               "$paper using 1:2 with points pt 7 ps 1.4 lc rgb '%s' title 'the paper', "
               "$ours using 1:2 with points pt 13 ps 0.9 lc rgb '%s' title 'ours'\n" % (ORANGE, ORANGE, ORANGE, BLUE))
    return "set key maxrows 1 width 0\n" + script, max(112 + 25 * len(rows), 170)


# ---- speed

def speed(data):
    """Bytes a second, of the medians of bench.tsv."""
    rows, groups = rows_of(data.path("bench.tsv"), "make bench", 7), []
    kinds = {"mlfab": BLUE, "copy loop": GREY, "ZeroMQ": ORANGE, "Open MPI": GREEN, "Gloo": PURPLE}
    peers = (("copy loop", "copy loop"), ("ZeroMQ", "ZeroMQ"), ("openmpi-*", "Open MPI"), ("gloo-*", "Gloo"))
    for label, name, size in (("push 16 MB, memory", "push/shm/16MB/1", 0), ("push 16 MB, TCP", "push/tcp/16MB/1", 0),
                              ("push 100 MB, memory", "push/shm/100MB/1", 0), ("push 100 MB, TCP", "push/tcp/100MB/1", 0),
                              ("pull 100 MB, memory", "pull/shm/100MB/1", 0),
                              ("reduce 16 MB, memory", "collective/allreduce/shm/16MB/2", 16 << 20),
                              ("reduce 16 MB, TCP", "collective/allreduce/tcp/16MB/2", 16 << 20)):
        values = {}
        for _, ours, _, peer, theirs, *_ in (row for row in rows if row[0] == name):
            values["mlfab"] = size / float(ours) / 1e3 if size else float(ours)
            kind = next((k for pattern, k in peers if fnmatch.fnmatch(peer, pattern)), None)
            if kind and theirs != "-":
                values[kind] = max(values.get(kind, 0), size / float(theirs) / 1e3 if size else float(theirs))
        if values:
            groups.append((label, values))
    if not groups:
        raise Missing("%s has none of the rows; make bench writes them" % data.path("bench.tsv"))
    return ("Speed beside peers", *bars(groups, kinds, "GB of the tensor a second", 21))


# ---- make paper

def claims(data, *patterns):
    """Rows of paper.tsv that have figures of both: (label, (low, high), ours). A pattern: (of the claim, label)."""
    rows, chosen = rows_of(data.path("paper.tsv"), "make paper", 5), []
    for pattern, label in patterns:
        for claim, paper, ours, *_ in rows:
            match, told = re.fullmatch(pattern, claim), [float(n) for n in re.findall(NUMBER, paper)]
            if match and told and re.fullmatch(NUMBER, ours):
                chosen.append((match.expand(label), (told[0], told[-1]), float(ours)))
    if not chosen:
        raise Missing("%s has none of the rows; make paper writes them" % data.path("paper.tsv"))
    return chosen


def paper_speedup(data):
    rows = claims(data, (r"Table 2, (C\d-N\d): .*", r"\1"))
    return ("Table 2: speed-up over the ring", *beside(rows, "times as fast as a ring", 8))


def paper_rounds(data):
    rows = claims(data, (r"MLfabric-S / ring of 2 flows, (C\d-N\d)", r"\1"))
    return ("A round of MLfabric-S beside the ring", *beside(rows, "time of a round, ring = 1", 8))


def paper_tree(data):
    rows = claims(data, (r"ResNet-152: communication of MLfabric-S", "MLfabric-S"),
                  (r"ResNet-152: tree of (\w+), store and forward", r"\1, stored"),
                  (r"ResNet-152: tree of (\w+), pipelined, (up|both)\b.*", r"\1, pipelined, \2"))
    rows = [(label, (low / 1e3, high / 1e3), ours / 1e3) for label, (low, high), ours in rows]
    return ("Communication of ResNet-152", *beside(rows, "seconds of communication a round", 22))


def paper_replica(data):
    rows = claims(data, (r"replica, Div_max (\d+): overhead", r"beside server, \1"),
                  (r"replica on a host of its own, Div_max (\d+): overhead", r"own host, \1"),
                  (r"checkpoint every (\d+) updates: overhead", r"checkpoint, \1"), (r"MPI, checkpoint.*overhead", "MPI checkpoint"))
    return ("The price of a replica", *beside(rows, "minutes more, of the whole training", 18, log=True))


def paper_sums(data):
    rows = claims(data, (r"Fig. 9: .*, Div_max 600", "beside the server"), (r"... Div_max 600, the .*", "host of its own"),
                  (r"... Div_max 600, as written", "as written"))
    return ("Fig. 9: updates in a transfer to the replica", *beside(rows, "updates in a transfer", 17))


def paper_links(data):
    rows = claims(data, (r"(MLfabric-S|Tree) ?(?:of ranks)?, into links of (2.5) Gbps", r"\1"))
    return ("Fig. 8: messages over links of 2.5 Gbps", *beside(rows, "% of the messages, at 2.5 Gbps", 13))


def paper_pulls(data):
    rows = claims(data, (r"Table IV, (soft|lazy), (PSSP [\d.]+|SSP|dynamic)(?:, only the fastest)?", r"\1 \2"))
    return ("Table IV: delayed pulls", *beside(rows, "delayed pulls in 100 iterations", 15, log=True))


def paper_eager(data):
    rows, script, plots, sizes = rows_of(data.path("paper.tsv"), "make paper", 5), "", [], []
    nets = ("2 us, 10 GB/s", "40 us, 2 GB/s", "150 us, 1 GB/s")
    for kind, colour in (("solo", BLUE), ("majority", GREEN)):
        for dash, net in enumerate(nets, 1):
            points = [(match[1], row[2]) for row in rows
                      for match in [re.fullmatch(r"%s, (\d+ \w+), %s: full / %s" % (re.escape(net), kind, kind), row[0])] if match]
            if not points:
                raise Missing("%s lacks rows of eagerSGD; make paper writes them" % data.path("paper.tsv"))
            sizes = [size for size, _ in points]
            script += block("%s%d" % (kind, dash), [(i, value) for i, (_, value) in enumerate(points)])
            plots.append("$%s%d using 1:2 with linespoints lw 2 pt %d ps 0.8 lc rgb '%s' title %s" % (
                kind, dash, (7, 5, 9)[dash - 1], colour, quoted("%s, %s" % (kind, net))))
        told = next(re.findall(NUMBER, row[1])[0] for row in rows if row[0].endswith("full / " + kind) and re.search(NUMBER, row[1]))
        plots.append("%s with lines lw 2 dt 2 lc rgb '%s' title 'the paper: %s, %s times'" % (told, ORANGE, kind, told))
    script += "set logscale y\nset yrange [1:60000]\nset xrange [-0.2:%g]\nset xtics (%s)\nset grid y\nset key top center outside vertical maxrows 8\n" % (
        len(sizes) - 0.8, ", ".join("%s %d" % (quoted(size), i) for i, size in enumerate(sizes)))
    return "Partial allreduces", script + "set xlabel 'size of the allreduce'\nset ylabel 'times as fast as a full one'\nplot " + ", ".join(plots) + "\n", 470


def paper_gap(data):
    rows = claims(data, (r"ASAP fig. 2: gap, (.*), (\d+) nodes", r"\1, \2"))
    return ("ASAP fig. 2: spectral gap", *beside(rows, "gap (1: all know all after one step)", 17))


def paper_reduces(data):
    rows = claims(data, (r"ASAP fig. 8: (\S+), reduces with (?:all )?(\d)(?: or more)?", r"\1, \2 inputs"))
    return ("ASAP fig. 8: full reduces", *beside(rows, "% of the reduces", 20))


# ---- examples

def lanes(data):
    """Example 05: a lane for each worker, without a scheduler and with it."""
    file = data.path("05.tsv")
    printed(data.path("examples/05_scheduling"), file)
    rows = rows_of(file, "build/examples/05_scheduling", 5)
    colours, script = {"push": BLUE, "pull": GREEN, "dropped": RED}, "set multiplot layout 2,1\nset style fill solid 0.85\nunset grid\n"
    for run, title in (("0", "without a scheduler"), ("1", "with a scheduler")):
        for kind in colours:
            boxes = [(begin, end, int(worker) - 0.4, int(worker) + 0.4) for which, worker, what, begin, end in rows
                     if which == run and what == kind and float(begin) < 800 and float(end) > 0]
            script += block(kind + run, boxes or [("nan",) * 4])
        script += "set title %s\nset yrange [11.6:-0.6]\nset ytics 0,1,11 font ',11'\nset ylabel 'worker'\nset xrange [0:800]\nset xlabel %s\n" % (
            quoted(title), quoted("ms of virtual time" if run == "1" else ""))
        script += ("unset key\n" if run == "1" else "set key top center outside horizontal samplen 1 width -2\n") + "plot " + ", ".join(
            "$%s%s using (($1+$2)/2):(($3+$4)/2):1:2:3:4 with boxxyerror lc rgb '%s' title '%s'" % (
                kind, run, colour, kind if kind != "dropped" else "dropped push") for kind, colour in colours.items()) + "\n"
    return "Transfers of twelve workers", script + "unset multiplot\n", 620


def staleness(data):
    """Example 06: when the fast workers are through, over the oldest model that a pull brought."""
    rows = found(r"^(\S.*?) +(\d+) +\d+ +\d+ +(\d+) +\d+$", printed(data.path("examples/06_consistency")), "06_consistency")
    script = block("p", [(oldest, ms, name) for name, ms, oldest in rows])
    places = {"bulk-synchronous": "left offset 0,1.2", "stale": "left offset 0.8,-0.6", "probabilistic": "left offset 0.8,0.1",
              "bulk-, then": "right offset -0.8,1", "drop": "right offset -0.8,-0.8", "asynchronous": "right offset -0.8,-0.8"}
    script += "set xrange [-1:48]\nset yrange [0:2100]\nset grid y\nunset key\nset xlabel 'oldest model that a pull brought, in updates behind'\nset ylabel 'ms until the fast workers end'\n"
    plots = ["$p using 1:2 with points pt 7 ps 1 lc rgb '%s'" % BLUE]
    for name, ms, oldest in rows:
        place = next((p for word, p in places.items() if name.startswith(word)), "left offset 0.8,0")
        script += "set label %s at %s,%s %s font ',12'\n" % (quoted(name), oldest, ms, place)
    return "Time over staleness", script + "plot " + ", ".join(plots) + "\n", 340


def filters(data):
    rows = found(r"^(\S.*?) +pushes +([\d.]+) MB  pulls +([\d.]+) MB", printed(data.path("examples/07_filters")), "07_filters")
    names = {"no zeros, half precision": "no zeros, half", "and a parameter filter, half": "and parameters, half"}
    groups = [(names.get(name, name), {"pushes": float(pushes), "pulls": float(pulls)}) for name, pushes, pulls in rows]
    return ("Bytes of each filter", *bars(groups, {"pushes": BLUE, "pulls": GREEN}, "MB on the network (logarithmic)", 20, log=True))


def server_dies(data):
    """Example 12: the loss of a training whose server is killed, and of one in which nothing dies."""
    server = data.path("examples/12_server_dies")
    out = printed(data.path("mlfab-run"), "-n", "3", "--replicas", "--no-prefix", "--set", "heartbeat_ms=100", "--server", server, server)
    rows = found(r"^ *(\d+) +([\d.]+) +([\d.]+) +([\d.]+) s ", out, "12_server_dies")
    killed, waited = max(((row[0], float(row[3])) for row in rows), key=lambda row: row[1])
    script = block("p", rows) + "set logscale y\nset grid y\nset format y '%g'\nset xlabel 'step'\nset ylabel 'loss'\n"
    script += "set arrow from %s, graph 0 to %s, graph 1 nohead dt 2 lw 2 lc rgb '%s'\n" % (killed, killed, RED)
    script += "set label %s at %s, graph 0.95 left offset 0.7,0 textcolor rgb '%s'\n" % (quoted("server killed, %.1f s pause" % waited), killed, RED)
    return "Loss while the server dies", script + ("plot $p using 1:3 with lines lw 6 lc rgb '%s' title 'if nothing died', "
        "$p using 1:2 with linespoints pt 7 ps 0.7 lw 2 lc rgb '%s' title 'with the death'\n" % (ORANGE, BLUE)), 340


PICTURES = {"speed": speed, "paper-speedup": paper_speedup, "paper-rounds": paper_rounds, "paper-tree": paper_tree, "paper-links": paper_links, "paper-replica": paper_replica, "paper-sums": paper_sums,
            "paper-pulls": paper_pulls, "paper-eager": paper_eager, "paper-gap": paper_gap, "paper-reduces": paper_reduces,
            "lanes": lanes, "staleness": staleness, "filters": filters, "server-dies": server_dies}


class Data:
    def __init__(self, build):
        self.build = build

    def path(self, name):
        return os.path.join(self.build, name)


def main():
    parser = argparse.ArgumentParser(prog="plots.py", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("build", nargs="?", default="build")
    parser.add_argument("--to", default="docs/img", metavar="FOLDER")
    parser.add_argument("--only", action="append", choices=sorted(PICTURES), metavar="NAME", help="one of: " + ", ".join(PICTURES))
    arguments = parser.parse_args()
    if not shutil.which("gnuplot"):
        sys.exit("plots.py: gnuplot was not found; Debian has it in the package gnuplot-nox.")
    if not os.path.isdir(arguments.to):
        sys.exit("plots.py: %s is not a folder" % arguments.to)
    drawn = 0
    for name in arguments.only or PICTURES:
        try:
            title, script, height = PICTURES[name](Data(arguments.build))
        except Missing as missing:
            print("%s.svg stays as it is: %s" % (name, missing), file=sys.stderr)
            continue
        except ValueError as error:
            print("%s.svg stays as it is: its data have a value that is no number (%s)" % (name, error), file=sys.stderr)
            continue
        draw(arguments.to, name, title, height, script)
        drawn += 1
    print("%d of %d pictures drawn into %s" % (drawn, len(arguments.only or PICTURES), arguments.to))
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
