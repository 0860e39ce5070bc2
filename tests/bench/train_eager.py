#!/usr/bin/env python3
"""eagerSGD's trainings with 8 real processes: train_eager.py BUILD [FILE.tsv] [--steps N]

Hyperplane regression with one random worker delayed in every step (§6.2.1, fig. 10; all times a tenth of
the paper's: a step of 31 ms, which is what its figures imply, delays of 20, 30 and 40 ms), and a
784-64-10 network on MNIST with all workers skewed by 5 to 40 ms, shifted after every step (§6.2.3, which
has ResNet-32 on CIFAR-10). Without MNIST in MLFAB_DATA the images are generated, and this says so. A
computation is real, and filled up with sleep, so that eight processes can share two cores.

On the hyperplane solo and majority get every round's result once, in order (MLFAB_PARTIAL_QUEUED), so that models
stay equal; solo/latest gets the newest one, as in the paper, and models are made equal every 32 steps, since
what a worker never saw spoils them. On images it is the newest, and every 100 steps.

   eager/train/hyperplane/DELAYms/HOW   steps a second; peer: full, synchronous; limit: c + d/8 a step
   eager/train/images/HOW               the same; and .../loss, .../accuracy

Rows of FILE: name ours unit peer peer_value limit_name limit_value. Goals are only printed.
SPDX-License-Identifier: MIT
"""
import argparse
import glob
import os
import subprocess
import sys
import time

from eager import cpu_seconds

RANKS, COMPUTE_MS, DELAYS_MS = 8, 31, [20, 30, 40]
PRINTED = {20: 1.50, 30: 1.75, 40: 2.01}
IMAGE_COMPUTE_MS, IMAGE_DELAY_MS = 10, 5


def run(build, mode, steps, *options):
    """{seconds, in_time, not_seen, loss or accuracy} of a training."""
    command = [os.path.join(build, "mlfab-run"), "-n", str(RANKS), "-s", "0", "--shm",
               "--no-prefix", os.path.join(build, "bench-eager_train"), "--mode", mode,
               "--steps", str(steps)] + list(map(str, options))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120 + steps)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or len(lines) != 1:
        sys.exit("train_eager: %s ended with %d:\n%s%s" % (
            " ".join(command), done.returncode, done.stdout[-2000:], done.stderr[-2000:]))
    return dict(zip(lines[0][1::2], map(float, lines[0][2::2])))


def tell(how, found, full, note):
    quality = "loss %.4f" % found["loss"] if "loss" in found else \
        "accuracy %.2f %%" % (100 * found["accuracy"])
    print("  %-16s %7.2f s  %.2fx  %s  in time %3.0f %%  results not seen %4.1f %%  %s" % (
        how, found["seconds"], full["seconds"] / found["seconds"], quality,
        100 * found["in_time"], 100 * found["not_seen"], note), flush=True)


def hyperplane(build, steps, rows):
    print("Hyperplane regression, %d processes, %d steps, %d ms a step" % (RANKS, steps, COMPUTE_MS))
    for delay in DELAYS_MS:
        print(" one random worker %d ms later in every step" % delay)
        bound = (COMPUTE_MS + delay) / (COMPUTE_MS + delay / RANKS)
        full = None
        for how in ["full", "solo", "majority", "solo/latest"]:
            results = ["--resync", 32] if how == "solo/latest" else ["--queued"]
            found = run(build, how.split("/")[0], steps, "--compute", COMPUTE_MS, "--delay", delay,
                        *results)
            full = full or found
            note = {"solo": "goal %.2f, paper %.2f" % (0.9 * bound, PRINTED[delay]),
                    "majority": "paper 1.34" if delay == 20 else ""}.get(how, "")
            if how != "full":
                note += "  loss %+.2f %%, goal 2" % (100 * (found["loss"] / full["loss"] - 1))
            tell(how, found, full, note)
            name = "eager/train/hyperplane/%dms/%s" % (delay, how)
            rate = 1e3 / (COMPUTE_MS + (delay if how == "full" else delay / RANKS))
            rows.append((name, steps / found["seconds"], "steps/s", "full",
                         steps / full["seconds"], "without waiting", rate))
            rows.append((name + "/loss", found["loss"], "mse", "full", full["loss"], "noise", 4))


def images(build, steps, rows):
    folder = os.environ.get("MLFAB_DATA") or os.path.expanduser("~/.cache/mlfab")
    real = glob.glob(os.path.join(folder, "mnist", "train-images-idx3-ubyte*"))
    print("%s, %d processes, all skewed by %d to %d ms, %d steps" % (
        "MNIST" if real else "Generated images (no MNIST in MLFAB_DATA)", RANKS, IMAGE_DELAY_MS,
        RANKS * IMAGE_DELAY_MS, steps))
    full = None
    for how in ["full", "majority", "4", "solo"]:
        found = run(build, how, steps, "--task", "digits" if real else "generated", "--resync", 100,
                    "--compute", IMAGE_COMPUTE_MS, "--delay", IMAGE_DELAY_MS)
        full = full or found
        name = "quorum(4)" if how == "4" else how
        tell(name, found, full, "paper 1.29" if how == "majority" else "")
        name = "eager/train/images/" + name
        rows.append((name, steps / found["seconds"], "steps/s", "full", steps / full["seconds"],
                     "", ""))
        rows.append((name + "/accuracy", 100 * found["accuracy"], "%", "full",
                     100 * full["accuracy"], "", ""))


def main():
    parser = argparse.ArgumentParser(prog="train_eager.py")
    parser.add_argument("build")
    parser.add_argument("tsv", nargs="?")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--only", choices=["hyperplane", "images"])
    options = parser.parse_args()
    rows, began, before = [], time.monotonic(), cpu_seconds()
    if options.only != "images":
        hyperplane(options.build, options.steps, rows)
    if options.only != "hyperplane":
        images(options.build, 2 * options.steps, rows)
    print("Others took %.0f %% of one of %d processors"
          % (100 * max(0, (cpu_seconds() - before) / (time.monotonic() - began)), os.cpu_count()))
    if options.tsv:
        with open(options.tsv, "a", encoding="utf-8") as file:
            for row in rows:
                file.write("\t".join("%.6g" % x if isinstance(x, float) else str(x) for x in row)
                           + "\n")


if __name__ == "__main__":
    main()
