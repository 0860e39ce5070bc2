#!/usr/bin/env python3
"""Real training over TCP under every consistency model: four workers, one of them four times slower.

    train.py BUILD [BUILD/bench.tsv] [--epochs N]

examples/mnist on the real images where MLFAB_DATA has them, else on its generated task (and says so). Every
model makes the same number of updates; what is told is the time it takes beside BSP's, and the accuracy. Then
per-shard overlap: a model over eight servers, BSP, with the pulls of each shard going on as soon as its
round is complete, and with a barrier of all workers between push and pull (FluentPS fig. 6).

Rows of bench.tsv: name ours unit peer peer_value limit_name limit_value.
SPDX-License-Identifier: MIT
"""
import os
import re
import subprocess
import sys

MODELS = ["bsp", "ssp:3", "dsps:1", "pssp:3:0.3", "dynamic:3", "drop:3", "async"]


def run(build, servers, options, epochs):
    """(seconds of the training, accuracy or None, dropped updates) of one run."""
    command = [os.path.join(build, "mlfab-run"), "-n", "4", "-s", str(servers), "--tcp", "--insecure",
               os.path.join(build, "examples", "mnist"), "--epochs", str(epochs)] + options
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    results = [line.split() for line in done.stdout.splitlines() if " result " in " " + line]
    if done.returncode or not results:
        sys.exit("train: %s ended with %d:\n%s%s" % (" ".join(command), done.returncode,
                                                     done.stdout[-2000:], done.stderr[-2000:]))

    def value(words, name):
        return float(words[words.index(name) + 1])

    seconds = max(value(r, "seconds") for r in results)
    dropped = sum(value(r, "dropped") for r in results)
    found = re.search(r"^(?:\[[^\]]*\] )?accuracy (\S+)", done.stdout, re.M)
    return seconds, float(found.group(1)) if found else None, dropped


def middle(build, servers, options, epochs, trials):
    runs = sorted(run(build, servers, options, epochs) for _ in range(trials))
    return runs[len(runs) // 2]


def main():
    arguments = [a for a in sys.argv[1:] if not a.startswith("--")]
    epochs = float(sys.argv[sys.argv.index("--epochs") + 1]) if "--epochs" in sys.argv else 1.0
    if "--epochs" in sys.argv:
        arguments.remove(sys.argv[sys.argv.index("--epochs") + 1])
    build, rows, bsp = arguments[0], [], None
    print("Training over TCP, 4 workers, worker 3 four times slower, %g epochs" % epochs)
    for model in MODELS:
        seconds, accuracy, dropped = middle(build, 1, ["--sync", model, "--slow", "3:4"], epochs, 1)
        bsp = bsp or seconds
        shown = "%.2f %%" % (100 * accuracy) if accuracy is not None else "generated data"
        print("  %-12s %6.2f s  %.2f of BSP  %s  %d dropped"
              % (model, seconds, seconds / bsp, shown, dropped))
        rows.append(("train/%s/seconds" % model, seconds, "s", "bsp", bsp, "", ""))
        if accuracy is not None:
            rows.append(("train/%s/accuracy" % model, 100 * accuracy, "%", "", "", "", ""))
    with_barrier = middle(build, 8, ["--sync", "bsp", "--barrier"], epochs / 4, 3)[0]
    without = middle(build, 8, ["--sync", "bsp"], epochs / 4, 3)[0]
    print("  8 shards, BSP: %.2f s with one global barrier, %.2f s per shard: %.2f times"
          % (with_barrier, without, with_barrier / without))
    rows.append(("train/overlap", without, "s", "global barrier", with_barrier, "", ""))
    if len(arguments) > 1:
        with open(arguments[1], "a", encoding="utf-8") as file:
            for row in rows:
                file.write("\t".join(str(x) for x in row) + "\n")


if __name__ == "__main__":
    main()
