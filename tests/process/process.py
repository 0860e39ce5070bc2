"""Shared by the tests of real processes: where programs are, ports and names that nobody else has, running mlfab-run, and
cases as TAP."""
import concurrent.futures
import functools
import inspect
import itertools
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback

BUILD = os.path.abspath(os.environ.get("MLFAB_BUILD", "build"))
RUN = os.path.join(BUILD, "mlfab-run")
SCALE = float(os.environ.get("MLFAB_SCALE", "1"))
KEY = "0123456789abcdef" * 4
JOBS = 4        # cases of a script at a time
PATIENCE = 120  # seconds until what should end, or come true, has failed; a busy machine is slow, and nothing is timed


class Skip(Exception):
    """Raised by a case that cannot run here; its text is the reason."""


def need(*programs, why="%s is not installed"):
    """Skips the case unless these programs are there: names, or paths of what `make` builds."""
    for program in programs:
        if not (os.path.exists(program) if "/" in program else shutil.which(program)):
            raise Skip(why % program if "%" in why else why)


def helper(name):
    """The path of the program made from tests/process/NAME.c."""
    return os.path.join(BUILD, "tests", "process", name)


# ---- ports and names

NUMBERS, CLAIMS = itertools.count(), []


def unique(name):
    """A name that no other case has, of this script or another."""
    return "mlfab-%s-%d-%d" % (name, os.getpid(), next(NUMBERS))


@functools.lru_cache(maxsize=None)
def has_loopback():
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            return True
    except OSError:
        return False


def claim_port(port):
    """Makes a port this script's, as free_port says. False: it is another's."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind("\0mlfab-port-%d" % port)
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))
    except OSError:
        claim.close()
        return False
    CLAIMS.append(claim)
    return True


def free_port():
    """A port of loopback, below those that the system gives out. It belongs to this script until the script ends: an
    abstract socket with its number says so to other scripts."""
    if not has_loopback():
        raise Skip("this machine has no loopback network")
    while True:
        port = random.randrange(12000, 32000)
        if claim_port(port):
            return port


def address(transport):
    """A new address where a fabric may meet: "tcp", "shm" or "unix"."""
    if transport == "tcp":
        return "tcp:127.0.0.1:%d" % free_port()
    return ("shm:" if transport == "shm" else "unix:@") + unique("test")


# ---- processes

def clean_environment(**more):
    """This environment without the variables that change a rank's place, colour, transport or heap (run.py)."""
    environment = {k: v for k, v in os.environ.items()
                   if not k.startswith(("MLFAB_", "MALLOC_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_"))
                   and k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE",
                                "MPI_LOCALNRANKS", "JOB_COMPLETION_INDEX",
                                "NO_COLOR")}
    environment.update({k: str(v) for k, v in more.items()})
    return environment


def start(*command, **more):
    if "--tcp" in command and not has_loopback():
        raise Skip("this machine has no loopback network")
    environment = more.pop("env", None) or clean_environment()
    more.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen([str(c) for c in command], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **more)


def executable(path, content):
    """Makes an executable file. Another process writes it: a child that begins at this moment would inherit the open
    file, and nobody can execute a file that is open for writing."""
    subprocess.run(["install", "-m", "755", "/dev/stdin", path], input=content, check=True)
    return path


def without_pauses(err):
    """A busy or frozen machine stops processes for seconds, of which they tell: no test may fail because of that."""
    return "".join(line for line in err.splitlines(True) if "this process did not run for" not in line) if isinstance(err, str) else err


class Result:
    def __init__(self, process, out, err, seconds):
        self.code, self.out, self.err, self.seconds = process.returncode, out, without_pauses(err), seconds

    def __repr__(self):
        return "exit status %s after %.2f s\nstdout:\n%s\nstderr:\n%s" % (
            self.code, self.seconds, self.out, self.err)


def finish(process, timeout=PATIENCE):
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


def end(*processes):
    """Kills those that still run."""
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish_all(*processes):
    """The results of all; none is left."""
    try:
        return [finish(process) for process in processes]
    finally:
        for process in processes:
            if process.returncode is None:
                end(process)


def run(*command, **more):
    timeout = more.pop("timeout", PATIENCE)
    return finish(start(*command, **more), timeout)


def launch(*arguments, **more):
    """Starts mlfab-run with these arguments."""
    return run(RUN, *arguments, **more)


def is_alive(pid):
    """1 while the process exists and is not a zombie."""
    try:
        with open("/proc/%d/stat" % pid, encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def environment_of(pid):
    """The environment with which the process began."""
    with open("/proc/%d/environ" % pid, "rb") as file:
        return dict(entry.split("=", 1) for entry in os.fsdecode(file.read()).split("\0") if "=" in entry)


def children(pid):
    """The processes that mlfab-run `pid` has started: (role, number) -> pid."""
    found = {}
    try:
        with open("/proc/%d/task/%d/children" % (pid, pid), encoding="ascii") as file:
            numbers = [int(child) for child in file.read().split()]
    except OSError:
        return found
    for child in numbers:
        try:
            values = environment_of(child)
            found[values["MLFAB_ROLE"], int(values["MLFAB_RANK"])] = child
        except (OSError, KeyError):
            pass
    return found


def kill_run(process):
    """kill -9 of an mlfab-run, and so of all its ranks. Returns what it had said on stderr."""
    ranks = children(process.pid).values()
    process.kill()
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    process.wait()
    wait_until(lambda: not any(map(is_alive, ranks)), "its ranks die with it")
    return error


# ---- what is expected

def tell(text):
    """A comment, in one piece beside those of other cases."""
    sys.stdout.write("# %s\n" % text)
    sys.stdout.flush()


def expect(condition, what, result=""):
    if not condition:
        raise AssertionError("%s\n%s" % (what, result))


def wait_until(condition, what):
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError("waited %g s in vain: %s" % (PATIENCE, what() if callable(what) else what))


def shared_memory_names():
    """The library's names in /dev/shm. It has none but those of extras/mlfab_curl.c."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if name.startswith("mlfab")}


def expect_nothing_left(before):
    """Names in /dev/shm that are new since `before` go away. Another test may have names of its own for a while."""
    wait_until(lambda: not shared_memory_names() - before, "nothing is left in /dev/shm")


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


# ---- cases

def cases(*arguments):
    """Runs the function once for each of these arguments, a value or a tuple. Each is a case."""
    def mark(function):
        function.arguments = [a if isinstance(a, tuple) else (a,) for a in arguments]
        return function
    return mark


def within(ms):
    """A case in which processes are to tell each other something before one of them has waited in vain for `ms`, the last
    argument. A busy machine may need longer: then the case is run once more, with 60 s. A case that fails earlier has failed."""
    def mark(function):
        def twice(*arguments):
            begin = time.monotonic()
            try:
                function(*arguments, ms)
            except AssertionError as error:
                if time.monotonic() - begin < ms / 1000:
                    raise
                tell("%s: not within %d ms: %s" % (function.__name__, ms, str(error).partition("\n")[0]))
                function(*arguments, 60000)
        twice.__name__ = function.__name__
        return twice
    return mark


def alone(why):
    """Marks a case that needs the machine for itself, and says why."""
    def mark(function):
        function.alone = why
        return function
    return mark


def result_of(function, arguments):
    """Has the case passed, its TAP line without its number, and the lines of a failure."""
    title = function.__name__[5:].replace("_", " ")
    if arguments:
        title += ": " + " ".join(str(a).strip("-") for a in arguments if isinstance(a, (str, int)))
    try:
        function(*arguments)
        return True, title, []
    except Skip as skip:
        return True, "%s # SKIP %s" % (title, skip), []
    except Exception as error:  # an exception fails this case only
        text = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        return False, title, text.splitlines()


def main(namespace, each=(), jobs=JOBS):
    """Runs every function test_* of a module and prints TAP; arguments pick some by a pattern, and --jobs N says how many run
    at a time (jobs). Those marked with alone() follow, one by one. each: the arguments of functions that have no cases()."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under nohup, since processes inherit what is ignored
    words = sys.argv[1:]
    jobs = int(words.pop(words.index("--jobs") + 1)) if "--jobs" in words else jobs
    pattern = re.compile("|".join(word for word in words if word != "--jobs"))
    found = []
    for function in [f for name, f in namespace.items() if name.startswith("test_") and pattern.search(name)]:
        plain = not inspect.signature(function).parameters
        found += [(function, a) for a in getattr(function, "arguments", [()] if plain else [(e,) for e in each])]
    print("1..%d" % len(found), flush=True)
    failures = number = 0
    for apart, threads in (False, jobs), (True, 1):
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            some = [pool.submit(result_of, *case) for case in found if hasattr(case[0], "alone") == apart]
            for future in concurrent.futures.as_completed(some):
                passed, title, lines = future.result()
                number, failures = number + 1, failures + (not passed)
                print("\n".join(["%sok %d - %s" % ("" if passed else "not ", number, title)] + ["# " + line for line in lines]),
                      flush=True)
    sys.exit(1 if failures else 0)
