#!/usr/bin/env python3
# lane: check
"""Programs for the GPU, the example build/gpu/14_gpu and tests/gpu/gpu_fabric: on the device where there is one, else on the host.
Cases that compare a device with the host take the device's results from other cases."""
import functools
import os
import re
import tempfile
import threading

from process import BUILD, RUN, Skip, clean_environment, expect, finish, main, start, write_mnist

PROGRAM = os.path.join(BUILD, "gpu", "14_gpu")
FABRIC = os.path.join(BUILD, "tests", "gpu", "gpu_fabric")
ALONE = "mlfab: no launcher has set its variables: a world of one worker\n"


def built(program):
    """Only nvcc compiles these programs. That is another reason than a GPU that is missing: they run without one."""
    if not os.path.exists(program):
        raise Skip("nvcc is not installed: %s was not built (it needs no GPU)" % os.path.basename(program))


def once(function):
    """The cases that ask get the result of one call."""
    lock, cached = threading.Lock(), functools.cache(function)

    def result():
        with lock:
            return cached()
    return result


def train(*arguments, workers=0, run=(), status=0, stderr=None, **environment):
    """The output of the example: alone, or as so many workers of mlfab-run with these options."""
    built(PROGRAM)
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


@once
def generated_alone():
    return generated()


def test_generated_alone():
    generated_alone()


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
    device = generated_alone()
    reason = re.search(r"^(no GPU) \((.+)\): computing on the host$", device, re.M)
    if reason:
        raise Skip("no GPU: " + reason[2])
    host = generated(CUDA_VISIBLE_DEVICES="")
    expect("no GPU (" in host, "a hidden device was found", host)
    for (loss, accuracy), (host_loss, host_accuracy) in zip(curve(device), curve(host)):
        expect(abs(loss - host_loss) < 0.01 * host_loss + 0.0002 and abs(accuracy - host_accuracy) < 0.01,
               "the device learns something else", device + host)


def fabric(*arguments, workers=3, servers=2, run=(), status=0, stderr="", **environment):
    """The output of gpu_fabric: workers, and servers of which server 0 has its model on the device."""
    built(FABRIC)
    own = ["--server", FABRIC] if servers > 1 else []
    result = finish(start(RUN, "-n", workers, "-s", servers, *own, *run, FABRIC, *arguments,
                          env=clean_environment(MLFAB_TIMEOUT_MS=60000, **environment)), 120)
    expect(result.code == status, "exit status %d was expected" % status, result)
    expect(result.err == stderr, "stderr holds something else", result)
    places = re.findall(r"no GPU \(.+\): .*host|memory of device \d+$|the model is on the device$", result.out, re.M)
    expect(len(places) == workers + len(own) // 2, "each process says once where its memory is", result)
    return result.out


def cases(out, count):
    """All of so many cases of gpu_fabric were played, and none has failed."""
    lines = re.findall(r"^\[worker 0\] (ok|not ok) (\d+) - ", out, re.M)
    expect(lines == [("ok", str(number + 1)) for number in range(count)], "%d cases" % count, out)


@once
def fabric_of_two():
    return fabric(workers=2)


def test_fabric():
    """SGD, compared with float64. test_fabric_without_a_worker begins with the same three cases, at three workers."""
    cases(fabric_of_two(), 3)


def test_fabric_adam():
    """The two servers have the same bits, one of them on the device."""
    cases(fabric(workers=2, run=["--set", "optimizer=adam"]), 3)


def test_fabric_without_a_worker():
    """One is killed in an allreduce; the others go on."""
    cases(fabric("--kill", run=["--on-failure=continue"], status=137,
                 stderr="mlfab-run: worker 2 was killed by SIGKILL\n"), 4)


def test_fabric_times():
    out = fabric("--time", 4, workers=2, servers=1)
    for row in ("copy, device to device", "push from device memory, staged", "allreduce of device memory, staged"):
        expect(re.search(r"^\[worker 0\] %s +[0-9.]+ ms +[0-9.]+ GB/s" % row, out, re.M), "no row: " + row, out)


def test_fabric_on_a_gpu():
    """Memory of the device, which processes share, and a server's model there."""
    out = fabric_of_two()
    reason = re.search(r"no GPU \((.+)\): ", out)
    if reason:
        raise Skip("no GPU: " + reason[1])
    cases(out, 3)
    expect("the model is on the device" in out, "the server's model is not on the device", out)
    hidden = fabric(workers=2, CUDA_VISIBLE_DEVICES="")
    expect(hidden.count("no GPU (") == 3, "a hidden device was found", hidden)
    cases(hidden, 3)


if __name__ == "__main__":
    main(globals())
