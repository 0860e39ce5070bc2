#!/usr/bin/env python3
"""The example of the GPU, build/gpu/14_gpu: on the device where there is one, else on the host."""
import os
import re
import tempfile

from process import BUILD, RUN, Skip, clean_environment, expect, finish, main, start, write_mnist

PROGRAM = os.path.join(BUILD, "gpu", "14_gpu")
ALONE = "mlfab: no launcher has set its variables: a world of one worker\n"


def train(*arguments, workers=0, run=(), status=0, stderr=None, **environment):
    """The output of the example: alone, or as so many workers of mlfab-run with these options."""
    if not os.path.exists(PROGRAM):
        raise Skip("no GPU example: nvcc was not found")
    launcher = [RUN, "-n", workers, "-s", 1, *run] if workers else []
    result = finish(start(*launcher, PROGRAM, *arguments,
                          env=clean_environment(MLFAB_TIMEOUT_MS=30000, **environment)))
    expect(result.code == status, "exit status %d was expected" % status, result)
    if stderr is None:
        stderr = "" if workers else ALONE
    expect(result.err == stderr, "stderr holds something else", result)
    if status == 0:
        places = re.findall(r"no GPU \(.+\): computing on the host$|computing on device \d+, \S.*$",
                            result.out, re.M)
        expect(len(places) == max(workers, 1), "each worker says once where it computes", result)
    return result.out


def curve(out):
    """The loss and the accuracy at first and after each epoch."""
    return [(float(loss), float(accuracy))
            for loss, accuracy in re.findall(r"loss (\S+), accuracy (\S+?),?(?: .*)?$", out, re.M)]


def generated(**more):
    """Trains on 3,000 generated images; returns the output."""
    out = train("--generated", "--images", 3000, **more)
    expect("generated: 3000 images" in out, "other data", out)
    points = curve(out)
    expect(len(points) == 3, "two epochs", out)
    expect(points[2][0] < points[0][0] / 3 and points[2][1] > 0.9, "it has not learned", out)
    return out


def test_generated_alone():
    generated()


def test_generated_two_workers():
    generated(workers=2)


def test_generated_in_rounds_over_tcp():
    generated(workers=2, run=["--tcp"], MLFAB_CONSISTENCY="bsp")


def test_without_files():
    """It says that it does not find MNIST, and where, and generates images."""
    out = train("--images", 3000, MLFAB_DATA="/nonexistent")
    expect("no MNIST in /nonexistent/mnist\ngenerated: 3000 images" in out, "it does not say so", out)


def test_mnist():
    """Files of MNIST's format, which have to be read."""
    with tempfile.TemporaryDirectory() as data:
        os.mkdir(data + "/mnist")
        write_mnist(data + "/mnist", "train", 3000, 1)
        write_mnist(data + "/mnist", "t10k", 500, 2)
        out = train("--epochs", 6, workers=2, MLFAB_DATA=data)
    expect("MNIST: 3000 images, and 500 for the test" in out, "other data", out)
    expect(len(curve(out)) == 7 and curve(out)[6][1] > 0.9, "it has not learned", out)


def test_has_not_learned():
    """One step is not enough, and the exit status says so."""
    out = train("--generated", "--images", 64, "--epochs", 1, status=1,
                stderr=ALONE + "14_gpu: it has not learned\n")
    expect(len(curve(out)) == 2, "one epoch", out)


def test_on_a_gpu():
    """The device and the host learn the same, but for rounding."""
    device = generated()
    reason = re.search(r"^(no GPU) \((.+)\): computing on the host$", device, re.M)
    if reason:
        raise Skip("no GPU: " + reason[2])
    host = generated(CUDA_VISIBLE_DEVICES="")
    expect("no GPU (" in host, "a hidden device was found", host)
    for (loss, accuracy), (host_loss, host_accuracy) in zip(curve(device), curve(host)):
        expect(abs(loss - host_loss) < 0.01 * host_loss + 0.0002 and abs(accuracy - host_accuracy) < 0.01,
               "the device learns something else", device + host)


if __name__ == "__main__":
    main(globals())
