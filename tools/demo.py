#!/usr/bin/env python3
"""make demo: four workers and a parameter server train a real model, as real processes.

Four runs of build/examples/mnist under build/mlfab-run: asynchronous over TCP, the same over shared
memory, then one worker made four times slower, asynchronous and bulk-synchronous. While one runs its
progress is shown; at the end stands a table. Exits 1 when a run fails, or when one of the first two
ends with a poor model. Standard library only.

SPDX-License-Identifier: MIT
"""
import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

ACCURACY_WANTED = 0.96  # of the test images, in the first two runs, which end between 97 and 98 %
LOSS_WANTED = 0.05      # of the zero model's loss, if the data are generated


class Screen:
    """A live line on a terminal; elsewhere a plain line every few seconds."""

    def __init__(self):
        self.live = sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb"
        self.colour = self.live and not os.environ.get("NO_COLOR")
        self.told = 0.0

    def paint(self, code, text):
        return f"\033[{code}m{text}\033[0m" if self.colour else text

    def progress(self, text):
        now = time.monotonic()
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write("\r" + text[:width].ljust(width))
            sys.stdout.flush()
        elif now - self.told >= 3:
            print(text, flush=True)
            self.told = now

    def line(self, text=""):
        if self.live:
            sys.stdout.write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
        print(text, flush=True)


class Run:
    """One run of the trainer: its command, the output of its workers, and its exit."""

    def __init__(self, title, epochs, launcher, options):
        self.title, self.epochs = title, epochs
        self.launcher, self.options = launcher, options
        self.progress, self.results, self.other = {}, {}, []
        self.final = {}
        self.error = None

    def command(self, args):
        return ([os.path.join(args.build, "mlfab-run"), "-n", str(args.workers), "-s", "1"]
                + self.launcher + [os.path.join(args.build, "examples", "mnist"),
                                   "--epochs", str(self.epochs)] + self.options)

    def take(self, line):
        """Parses a line of output, which may begin with the launcher's "[worker 2] "."""
        words = re.sub(r"^\[[^\]]*\] ", "", line.rstrip("\n")).split()
        pairs = words[1:] if words and words[0] in ("progress", "result") else words
        values = {}
        try:
            values = {pairs[i]: float(pairs[i + 1]) for i in range(0, len(pairs), 2)}
        except (IndexError, ValueError):
            words = []
        if words and words[0] == "progress" and "rank" in values:
            self.progress[int(values["rank"])] = values
        elif words and words[0] == "result" and "rank" in values:
            self.results[int(values["rank"])] = values
        elif words and words[0] in ("accuracy", "loss"):
            self.final = values
        elif line.strip():
            self.other = (self.other + [line.rstrip("\n")])[-30:]

    def status(self, seconds):
        if not self.progress:
            return f"  {self.title}: starting, {seconds:.0f} s"
        latest = self.progress.values()
        epoch = min(max(p.get("epoch", 0) for p in latest), self.epochs)
        loss = sum(p.get("loss", 0) for p in latest) / len(self.progress)
        rate = sum(p.get("images_per_s", 0) for p in latest)
        steps = " ".join(f"{int(self.progress[r].get('step', 0))}" for r in sorted(self.progress))
        return (f"  {self.title}: epoch {epoch:.2f} of {self.epochs:g}, loss {loss:.4f}, "
                f"{rate:,.0f} samples/s, updates by worker {steps}, {seconds:.0f} s")

    # What the table shows.
    def total(self, name):
        return sum(r.get(name, 0) for r in self.results.values())

    def largest(self, name):
        return max((r.get(name, 0) for r in self.results.values()), default=0)

    def quality(self):
        if "accuracy" in self.final:
            return f"{100 * self.final['accuracy']:.2f} %"
        return f"loss {self.final['loss']:.4f}" if "loss" in self.final else "-"

    def poor(self):
        if "accuracy" in self.final:
            return self.final["accuracy"] < ACCURACY_WANTED
        return self.final["loss"] > LOSS_WANTED * self.final.get("zero_loss", 0)


def read_lines(stream, lines):
    for line in stream:
        lines.put(line)
    lines.put(None)


def stop(process):
    """Ends a run for good: the launcher passes the signal on to its processes."""
    for number, wait_s in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
            return
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            continue


def execute(run, args, screen):
    """Runs it, showing progress; sets run.error when it fails."""
    begin = time.monotonic()
    lines = queue.Queue()
    process = subprocess.Popen(run.command(args), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace",
                               start_new_session=True)
    threading.Thread(target=read_lines, args=(process.stdout, lines), daemon=True).start()
    screen.told = time.monotonic() - 1
    try:
        while True:
            try:
                line = lines.get(timeout=0.2)
                if line is None:
                    break
                run.take(line)
            except queue.Empty:
                pass
            seconds = time.monotonic() - begin
            screen.progress(run.status(seconds))
            if seconds > args.limit:
                run.error = f"stopped after {args.limit:g} s"
                break
        if run.error is None:
            status = process.wait(10)
            if status != 0:
                run.error = f"exit status {status}"
            elif len(run.results) != args.workers or not run.final:
                run.error = "a worker did not report its result"
    except subprocess.TimeoutExpired:
        run.error = "the launcher did not end"
    finally:
        stop(process)


def quantity(n_bytes):
    for unit in ("B", "KB", "MB", "GB"):
        if n_bytes < 1000 or unit == "GB":
            return f"{n_bytes:.3g} {unit}" if n_bytes < 1000 else f"{n_bytes:,.0f} {unit}"
        n_bytes /= 1000


def row(run):
    """A line of the table; its second half is only meaningful when the run succeeded."""
    if run.error:
        return [run.title, "failed"] + ["-"] * 6
    updates = run.total("updates")
    return [run.title, run.quality(), f"{run.largest('seconds'):.1f} s", f"{updates:,.0f}",
            f"{run.total('delay_sum') / max(updates, 1):.2f}", f"{run.largest('delay_max'):.0f}",
            quantity(run.total("bytes_sent")), quantity(run.total("bytes_received"))]


def table(runs, screen):
    model = "accuracy" if any("accuracy" in r.final for r in runs) else "model"
    rows = [["run", model, "time", "updates", "mean delay", "max delay", "pushed", "pulled"]]
    rows += [row(run) for run in runs]
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    for number, cells in enumerate(rows):
        text = "  ".join(c.ljust(w) if i == 0 else c.rjust(w)
                         for i, (c, w) in enumerate(zip(cells, widths)))
        screen.line(screen.paint("1", text) if number == 0 else text)
        if number == 0:
            screen.line("-" * len(text))


def data_find():
    """The folder with MNIST, and the place that named it, or None; the search order is that of examples/mnist.c."""
    places = [("MLFAB_DATA", os.environ["MLFAB_DATA"])] if os.environ.get("MLFAB_DATA") else [
        ("~/.cache/mlfab", os.path.expanduser("~/.cache/mlfab"))]
    for name, folder in places:
        base = os.path.join(folder, "mnist", "train-images-idx3-ubyte")
        if os.path.exists(base) or os.path.exists(base + ".gz"):
            return name, folder
    return None


def plan(args):
    slow = ["--slow", f"{args.workers - 1}:{args.factor:g}"]
    slowed = f"worker {args.workers - 1} {args.factor:g}x slower"
    return [
        Run("TCP, asynchronous", args.epochs, ["--tcp"], []),
        Run("shared memory, asynchronous", args.epochs, ["--shm"], []),
        Run(f"{slowed}, asynchronous", args.slow_epochs, ["--tcp"], slow),
        Run(f"{slowed}, bulk-synchronous", args.slow_epochs, ["--tcp"], slow + ["--sync", "bsp"]),
    ]


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", default="build", help="where mlfab-run and examples/ are")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=float, help="of the first two runs")
    parser.add_argument("--slow-epochs", type=float, help="of the other two")
    parser.add_argument("--factor", type=float, default=4, help="how much slower one worker is")
    parser.add_argument("--limit", type=float, default=120, help="seconds until a run is stopped")
    return parser.parse_args()


def main():
    args = parse()
    screen = Screen()
    for program in ("mlfab-run", os.path.join("examples", "mnist")):
        if not os.path.exists(os.path.join(args.build, program)):
            print(f"demo: {os.path.join(args.build, program)} is missing; type make first")
            return 1
    found = data_find()
    if found:
        screen.line(f"Training a 784-128-10 network on MNIST ({found[0]}: {found[1]}), "
                    f"{args.workers} workers and 1 server.")
    else:
        screen.line("No MNIST in MLFAB_DATA or ~/.cache/mlfab (a folder mnist/ with the idx files; "
                    "tools/mlfab-fetch mnist gets them): "
                    f"training an\n8,192-dimensional generated hyperplane instead, {args.workers} "
                    "workers and 1 server.")
    # An epoch of the hyperplane is shorter than one of MNIST.
    args.epochs = args.epochs or (4 if found else 20)
    args.slow_epochs = args.slow_epochs or (3 if found else 12)
    runs = plan(args)
    bad = 0
    for number, run in enumerate(runs):
        execute(run, args, screen)
        if run.error is None and number < 2 and run.poor():
            bad += 1
            screen.line(screen.paint("31", f"  {run.title}: {run.quality()} is a poor model"))
        elif run.error:
            bad += 1
            screen.line(screen.paint("31", f"  {run.title}: {run.error}"))
            for line in run.other:
                screen.line("    " + line)
        else:
            screen.line(f"  {run.title}: {run.quality()}, {run.largest('seconds'):.1f} s")
    screen.line()
    table(runs, screen)
    asynchronous, bulk = runs[2], runs[3]
    if not asynchronous.error and not bulk.error:
        ratio = bulk.largest("seconds") / max(asynchronous.largest("seconds"), 1e-9)
        screen.line(f"\nWith a worker {args.factor:g} times slower, bulk-synchronous took "
                    f"{ratio:.1f} times as long as asynchronous for as many updates.")
    screen.line(screen.paint("31", f"{bad} of {len(runs)} runs failed.") if bad
                else screen.paint("32", "All runs ended well."))
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print()
        sys.exit(130)
