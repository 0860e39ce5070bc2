#!/usr/bin/env python3
# lane: check
"""cblas in real processes: fabrics with config.kernels, nodes that differ, builds without it, and the MNIST trainer, which
multiplies by cblas_sgemm where it is."""
import array
import json
import os
import re
import struct
import tempfile

from process import (BUILD, KEY, RUN, address, cases, clean_environment, expect, finish_all, helper, main, need, run, start,
                     within, write_mnist)

CBLAS_RUN = os.path.join(BUILD, "cblas", "mlfab-run")
PROGRAM = os.path.join(BUILD, "cblas", "01_push_pull")
WORKER = (helper("elastic"), "join", 3, 4096)


def build_with_cblas():
    need(PROGRAM, why="libopenblas-dev is not installed")


def shell(script):
    return ["sh", "-c", script, PROGRAM]


@cases(*((t, k) for t in ("--tcp", "--shm") for k in ("own", "cblas")))
def test_push_and_pull(transport, kernels):
    build_with_cblas()
    result = run(CBLAS_RUN, "-n", 2, "-s", 2, transport, "--set", "kernels=" + kernels, PROGRAM)
    expect(result.code == 0, "it ends well", result)
    expect(len(re.findall("pulled 30 and 15, expected 30 and 15", result.out)) == 2, "another sum", result)


@cases(0, 1)
@within(5000)
def test_a_rank_that_differs(deterministic, ms):
    """Worker 1 is told its rank and both settings; the others wait for it until their deadline."""
    build_with_cblas()
    result = run(CBLAS_RUN, "-n", 2, "--tcp", "--set", "kernels=cblas",
                 *shell('[ $MLFAB_RANK = 0 ] || export MLFAB_KERNELS=own; exec "$0"'),
                 env=clean_environment(MLFAB_TIMEOUT_MS=ms, MLFAB_DETERMINISTIC=deterministic, MLFAB_CONSISTENCY="bsp"))
    expect(result.code != 0, "it runs", result)
    expect(re.search(r"\[worker 1\].* the configurations differ: kernels \(MLFAB_KERNELS\) is own at worker 1, "
                     "cblas at server 0", result.err), "the text", result)


def test_a_process_that_joins():
    build_with_cblas()
    at = address("unix")
    environment = clean_environment(MLFAB_COORDINATOR=at, MLFAB_JOB="cblas", MLFAB_KEY=KEY, MLFAB_TIMEOUT_MS=60000)
    # Without cblas; its two workers wait for a third.
    fabric = start(RUN, "-n", 2, "--max-workers", 3, "--no-prefix", *WORKER, env=environment)
    joiners = [start(CBLAS_RUN, "--join", at, "--no-prefix", "--set", "kernels=" + kernels, *program, env=environment)
               for kernels, program in (("cblas", [PROGRAM]), ("own", WORKER))]
    stranger, friend, result = finish_all(*joiners, fabric)
    expect(stranger.code != 0 and "kernels (MLFAB_KERNELS) is cblas at a process that joins, own at server 0"
           in stranger.err, "the stranger", stranger)
    expect(friend.code == 0 and result.code == 0, "the fabric goes on", [friend, result])


def test_a_build_without_it():
    result = run(RUN, "-n", 1, "-s", 0, "--set", "kernels=cblas", os.path.join(BUILD, "examples", "01_push_pull"))
    expect(result.code != 0 and "kernels (MLFAB_KERNELS) is cblas, which was left out (MLFAB_WITH_CBLAS is 0)"
           in result.err, "the text", result)
    result = run(RUN, "-n", 1, "--set", "kernels=mkl", "true")
    expect(result.code == 2 and "mkl" in result.err, "an unknown name", result)


def test_version():
    result = run(RUN, "--version")
    expect(result.code == 0 and re.match(r"mlfab \d+\.\d+\.\d+, protocol \d+; with: .*; without: .* cblas; "
                                         r"compiled by \S.*\n$", result.out), "without", result)
    build_with_cblas()
    result = run(CBLAS_RUN, "--version")
    expect(re.search(r"; with: [^;]* cblas \([^)]+\); without: ", result.out), "with", result)


# ---- the MNIST trainer

def weights(path):
    with open(path, "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        header, data = json.loads(file.read(length)), file.read()
    tensors = {name: t["data_offsets"] for name, t in header.items() if name != "__metadata__"}
    return {name: array.array("f", data[begin:end]) for name, (begin, end) in tensors.items()}


def test_mnist():
    """64 steps with cblas_sgemm and with loops: the weights agree but for rounding, and it has learned. A step's rounding
    errors are of some 1e-7 times the gradient, and steps of 0.1 do not amplify them much."""
    program = os.path.join(BUILD, "examples", "mnist")
    need(program, why="the examples are not built")
    with tempfile.TemporaryDirectory() as data:
        os.mkdir(data + "/mnist")
        write_mnist(data + "/mnist", "train", 1024, 1)
        write_mnist(data + "/mnist", "t10k", 256, 2)
        models = []
        for option in ([], ["--loops"]):
            path = data + "/model"
            result = run(RUN, "-n", 1, "-s", 1, program, "--epochs", 2, "--sync", "bsp", "--save", path, *option,
                         env=clean_environment(MLFAB_DATA=data))
            expect(result.code == 0, "it failed", result)
            accuracy = re.search(r"accuracy ([\d.]+)", result.out)
            expect(accuracy and float(accuracy[1]) > 0.8, "it has not learned", result)
            models.append(weights(path))
    expect(models[0].keys() == models[1].keys() and len(models[0]) == 4, "four tensors", models[0].keys())
    apart = max(abs(a - b) for name in models[0] for a, b in zip(models[0][name], models[1][name]))
    with_cblas = os.path.exists(PROGRAM)
    expect(apart < 1e-4 and (apart > 0) == with_cblas, "the weights are %g apart" % apart)


if __name__ == "__main__":
    main(globals())
