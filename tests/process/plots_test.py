#!/usr/bin/env python3
"""tools/plots.py draws from the files of make bench and make paper. A picture stays as it is if its data are missing or wrong.
If gnuplot is missing, one sentence says so. The pictures of docs/img are small, and a page shows each of them."""
import glob
import os
import re
import sys
import tempfile
import xml.dom.minidom

from process import expect, main, need, run

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
PLOTS = os.path.join(ROOT, "tools", "plots.py")
BENCH = ("name ours unit peer peer_value limit_name limit_value\npush/shm/16MB/1 6.1 GB/s ZeroMQ 3.9 add 11\n"
         "collective/allreduce/tcp/16MB/2 11500 us gloo-ring 18700 loopback 9000\n"
         "collective/allreduce/tcp/16MB/2 11500 us gloo-bcube 22000 loopback 9000\n").replace(" ", "\t")


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def plots(build, folder, *names, **environment):
    return run(sys.executable, PLOTS, build, "--to", folder, *(word for name in names for word in ("--only", name)),
               env=dict(os.environ, **environment))


def picture(path):
    text = read(path)
    titles = xml.dom.minidom.parseString(text).getElementsByTagName("title")
    expect(len(text) <= 60000, "%s is small: %d bytes" % (path, len(text)))
    expect(titles and titles[0].firstChild.data != "Gnuplot", "%s has a title" % path)
    return text


def test_without_gnuplot():
    with tempfile.TemporaryDirectory() as folder:
        result = plots(folder, folder, PATH=folder)
        expect(result.code == 1 and result.err == "plots.py: gnuplot was not found; Debian has it in the package gnuplot-nox.\n",
               "one sentence", result)


def test_speed():
    need("gnuplot")
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/bench.tsv", "w", encoding="utf-8") as file:
            file.write(BENCH)
        result = plots(folder, folder, "speed")
        expect(result.code == 0 and not result.err, "it draws", result)
        text = picture(folder + "/speed.svg")
        # 16 MiB in 11.5 ms, and in the better of Gloo's times.
        for word in ("mlfab", "ZeroMQ", "Gloo", "6.1", "3.9", "1.46", "0.897", "GB of the tensor a second"):
            expect("<text>%s</text>" % word in re.sub("> +", ">", text), "the picture has %s" % word, text)
        expect("Open MPI" not in text, "the legend has kinds with data only", text)


def test_the_paper():
    """All pictures of the paper, from a file with their rows only."""
    need("gnuplot")
    rows = ["Table 2, C1-N1: ring of 2 flows / MLfabric-A-30\t1.74\t0.78", "MLfabric-S / ring of 2 flows, C1-N1\t1.2 to 2\t1.67",
            "Fig. 9: updates in a transfer to the replica, Div_max 600\t5.6\t6.29", "Tree of ranks, into links of 2.5 Gbps\t9\t8.15",
            "ResNet-152: communication of MLfabric-S\t2380\t4064", "replica, Div_max 30: overhead\t16\t34.9",
            "Table IV, soft, SSP\t4002\t6211", "ASAP fig. 2: gap, chain, 6 nodes\t.1\t0.13", "ASAP fig. 8: BSP, reduces with 5 or more\t77\t99.7"]
    rows += ["%s, 64 B, %s: full / %s\t%s\t3" % (net, kind, kind, told) for net in ("2 us, 10 GB/s", "40 us, 2 GB/s", "150 us, 1 GB/s")
             for kind, told in (("solo", "53.32"), ("majority", "2.46"))]
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/paper.tsv", "w", encoding="utf-8") as file:
            file.write("claim\tpaper\tours\tunit\tnote\n" + "".join(row + "\tx\t\n" for row in rows))
        names = [os.path.basename(path)[:-4] for path in glob.glob(os.path.join(ROOT, "docs", "img", "paper-*.svg"))]
        expect(len(names) >= 10, "all figures", names)
        result = plots(folder, folder, *names)
        expect(result.code == 0 and not result.err and result.out.startswith("%d of %d " % (len(names), len(names))), "all are drawn", result)
        for name in names:
            expect("paper" in picture("%s/%s.svg" % (folder, name)), "%s: a legend" % name)


def test_bad_data():
    """A picture stays as it is, and a line tells why."""
    need("gnuplot")
    cases = ((None, "cannot be read (No such file"), ("", "has none of the rows"), (b"\xff\xfe\0", "cannot be read (no text)"),
             ("name\tours\n", "has fewer than 7 columns"), (BENCH.replace("6.1", "fast"), "a value that is no number"), ("folder", "Is a directory"))
    for data, why in cases:
        with tempfile.TemporaryDirectory() as folder:
            file = folder + "/bench.tsv"
            if data == "folder":
                os.mkdir(file)
            elif data is not None:
                with open(file, "wb") as out:
                    out.write(data if isinstance(data, bytes) else data.encode())
            result = plots(folder, folder, "speed")
            expect(result.code == 1 and result.err.startswith("speed.svg stays as it is: ") and why in result.err
                   and result.err.count("\n") == 1, why, result)
            expect(not os.path.exists(folder + "/speed.svg"), "no picture", result)
    result = plots("/nowhere", "/nowhere/else")
    expect(result.code == 1 and result.err == "plots.py: /nowhere/else is not a folder\n", "a folder that is missing", result)


def test_pages_show_all_pictures():
    pages = {path: read(path) for pattern in ("*.md", "docs/*.md") for path in glob.glob(os.path.join(ROOT, pattern))}
    shown = {os.path.normpath(os.path.join(os.path.dirname(path), link)) for path, text in pages.items()
             for link in re.findall(r"!\[[^\]]+\]\(([^):]+\.svg)\)", text)}
    pictures = set(glob.glob(os.path.join(ROOT, "docs", "**", "*.svg"), recursive=True))
    expect(shown == pictures and len(pictures) >= 15, "pages and pictures", shown ^ pictures)
    for path in sorted(pictures):
        picture(path)


if __name__ == "__main__":
    main(globals())
