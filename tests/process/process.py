"""Shared by the tests of real processes: where programs are, cases as TAP, running mlfab-run."""
import concurrent.futures
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
import traceback

BUILD = os.path.abspath(os.environ.get("MLFAB_BUILD", "build"))
RUN = os.path.join(BUILD, "mlfab-run")
SCALE = float(os.environ.get("MLFAB_SCALE", "1"))


class Skip(Exception):
    """Raised by a case that cannot run here; its text is the reason."""


def helper(name):
    """The path of the program made from tests/process/NAME.c."""
    return os.path.join(BUILD, "tests", "process", name)


def clean_environment(**more):
    """This environment without the variables that change a rank's place, colour or transport."""
    environment = {k: v for k, v in os.environ.items()
                   if not k.startswith(("MLFAB_", "OMPI_", "PMI_", "PMIX_", "SLURM_"))
                   and k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE",
                                "MPI_LOCALNRANKS", "JOB_COMPLETION_INDEX",
                                "NO_COLOR")}
    environment.update({k: str(v) for k, v in more.items()})
    return environment


def start(*command, **more):
    environment = more.pop("env", None) or clean_environment()
    more.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen([str(c) for c in command], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **more)


class Result:
    def __init__(self, process, out, err, seconds):
        self.code, self.out, self.err, self.seconds = process.returncode, out, err, seconds

    def __repr__(self):
        return "exit status %s after %.2f s\nstdout:\n%s\nstderr:\n%s" % (
            self.code, self.seconds, self.out, self.err)


def finish(process, timeout=60):
    """Returns the exit status and output of a process. One that does not end is killed, and that is a failure."""
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError("%s did not end in %g s\nstdout:\n%s\nstderr:\n%s"
                             % (process.args, timeout, out, err)) from None
    return Result(process, out, err, time.monotonic() - began)


def run(*command, **more):
    timeout = more.pop("timeout", 60)
    return finish(start(*command, **more), timeout)


def launch(*arguments, **more):
    """Starts mlfab-run with these arguments."""
    return run(RUN, *arguments, **more)


def expect(condition, what, result=""):
    if not condition:
        raise AssertionError("%s\n%s" % (what, result))


def is_alive(pid):
    """1 while the process exists and is not a zombie."""
    try:
        with open("/proc/%d/stat" % pid, encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds, what):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError("waited %g s in vain: %s" % (seconds, what() if callable(what) else what))


def shared_memory_names():
    """Names in /dev/shm but for those of the MPI libraries, with which another program may come and go meanwhile."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith(("vader_segment.", "sm_segment.", "mpich_"))}


def expect_nothing_left(before):
    """Names in /dev/shm that are new since `before` go away. Another test may have names of its own for a while."""
    left, until = shared_memory_names() - before, time.monotonic() + 60
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left &= shared_memory_names()
    expect(not left, "nothing is left in /dev/shm", left)


def write_mnist(folder, prefix, count, seed):
    """Files of MNIST's format: random sparse images, whose label follows from where their bright square is."""
    rng = random.Random(seed)
    pixels, labels = bytearray(), bytearray()
    for _ in range(count):
        label = rng.randrange(10)
        image = bytearray(784)
        for _ in range(60):
            image[rng.randrange(784)] = rng.randrange(256)
        for y in range(6):
            for x in range(6):
                image[(4 + 12 * (label // 5) + y) * 28 + 1 + 5 * (label % 5) + x] = rng.randrange(128, 256)
        pixels += image
        labels.append(label)
    with open(os.path.join(folder, prefix + "-images-idx3-ubyte"), "wb") as file:
        file.write(struct.pack(">IIII", 2051, count, 28, 28) + pixels)
    with open(os.path.join(folder, prefix + "-labels-idx1-ubyte"), "wb") as file:
        file.write(struct.pack(">II", 2049, count) + labels)


def alone(why):
    """Marks a case that needs the machine for itself, and says why."""
    def mark(function):
        function.alone = why
        return function
    return mark


def result_of(function):
    """The TAP line of a case, without its number, and the lines of a failure."""
    title = function.__name__[5:].replace("_", " ")
    try:
        function()
        return True, title, []
    except Skip as skip:
        return True, "%s # SKIP %s" % (title, skip), []
    except Exception as error:  # an exception fails this case only
        text = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        return False, title, text.splitlines()


def main(namespace, jobs=1):
    """Runs every function test_* of a module and prints TAP; arguments pick some by a pattern. jobs: so many cases run at a
    time, and then, one by one, those that are marked with alone()."""
    pattern = re.compile("|".join(sys.argv[1:]))
    cases = [function for name, function in namespace.items() if name.startswith("test_") and pattern.search(name)]
    print("1..%d" % len(cases), flush=True)
    failures = number = 0
    for some, threads in ([c for c in cases if not hasattr(c, "alone")], jobs), ([c for c in cases if hasattr(c, "alone")], 1):
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for future in concurrent.futures.as_completed([pool.submit(result_of, case) for case in some]):
                passed, title, lines = future.result()
                number, failures = number + 1, failures + (not passed)
                print("\n".join(["%sok %d - %s" % ("" if passed else "not ", number, title)] + ["# " + line for line in lines]),
                      flush=True)
    sys.exit(1 if failures else 0)
