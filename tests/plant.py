#!/usr/bin/env python3
"""Checks that the tests can fail: plants each bug in the sources (MLFAB__PLANTED(n) breaks one invariant when
the program runs with MLFAB_PLANT=n), and passes when some test fails then. Prints TAP.

    plant.py [--every N] [NUMBER...]      all bugs, every N-th of them, or these

One build with -DMLFAB_PLANT contains all bugs; it has to pass without one. The test that probably fails is run
first, all others only when it passes."""
import concurrent.futures
import contextlib
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
FOLDER = os.path.join(os.environ.get("MLFAB_BUILD", "build"), "plant")
# The programs with MPI, which are in a folder of their own; "" where no MPI library is installed.
MPI = next(("mpi/%s/conform" % mpi for mpi in ("mpich", "openmpi") if shutil.which("mpicc." + mpi)), "")
HELD = MPI.replace("conform", "held")
# Likewise with cblas.
CBLAS = any(shutil.which("pkg-config") and subprocess.run(["pkg-config", "--exists", name]).returncode == 0
            for name in ("openblas", "cblas"))
KINDS = ["unit", "seam", "sim", "oracle", "conform", "oom", "extras"] + (["cblas"] if CBLAS else [])
# The likely test of a bug, or of a part whose own test has another name; the simulator detects most others.
LIKELY = {16: "sim/test_schedule",
          17: "sim/test_schedule",
          31: "unit/test_serve",
          32: "unit/test_serve",
          **{number: "unit/test_config" for number in range(265, 268)},
          51: "unit/test_api_filters",
          64: "sim/test_collective",
          72: "conform/test_conform",
          74: "unit/test_alive",
          75: "unit/test_alive",
          77: "unit/test_server",
          81: "sim/test_reshard",
          86: "unit/test_sparse_apply",
          88: "unit/test_guest",
          89: "unit/test_guest",
          90: "unit/test_guest",
          91: "unit/test_queue",
          92: "unit/test_queue",
          95: "unit/test_node",
          82: "unit/test_node",
          84: "unit/test_api",
          85: "unit/test_node",
          **{number: "sim/test_succession" for number in (232, 233, 235)},
          **{number: "sim/test_servers" for number in (234, 236)},
          96: "unit/test_node",
          97: "unit/test_node",
          98: "unit/test_tcp",
          99: "sim/test_collective",
          100: "unit/test_api_collective",
          120: "sim/test_growth",
          121: "sim/test_growth",
          122: "sim/test_growth",
          123: "sim/test_growth",
          124: "unit/test_growth",
          125: "unit/test_growth",
          126: "sim/test_growth",
          150: "sim/test_servers",
          151: "sim/test_servers",
          152: "sim/test_servers",
          153: "sim/test_servers",
          154: "unit/test_reshard_server",
          155: "sim/test_checkpoint",
          127: "unit/test_membership",
          **{number: "unit/test_checkpoint" for number in range(106, 113)},
          109: "sim/test_checkpoint",
          145: "unit/test_moment",
          146: "unit/test_moment",
          147: "unit/test_collect",
          148: "unit/test_collect",
          149: "unit/test_moment",
          **{number: "unit/test_mirror" for number in (157, 158, 159, 161, 162, 163, 164)},
          **{number: "sim/test_failover" for number in (214, 218, 226, 227)},
          **{number: "unit/test_distance" for number in (211, 212, 216)},
          **{number: "unit/test_keeper" for number in (217, 224, 225, 231)},
          **{number: "unit/test_voter" for number in (219, 220, 228, 229)},
          **{number: "unit/test_worker" for number in (221, 222)},
          210: "unit/test_copy",
          213: "unit/test_copy",
          223: "unit/test_copy",
          215: "unit/test_vote",
          230: "sim/test_failover",
          300: "sim/test_failover",
          301: "sim/test_failover",
          302: "unit/test_vote",
          303: "sim/test_failover",
          304: "sim/test_failover",
          312: "unit/test_views",
          315: "unit/test_serve",
          116: "unit/test_blake2b",
          **{number: MPI for number in range(170, 173)},
          **{number: HELD for number in range(270, 276)},
          **{number: "unit/test_resident" for number in range(276, 278)},
          **{number: "unit/test_device" for number in range(280, 287)},
          **{number: "unit/test_device_direct" for number in range(287, 290)},
          **{number: "unit/test_telemetry" for number in range(190, 194)},
          202: "extras/test_tls_conform",
          204: "extras/test_tls",
          205: "extras/test_tls",
          **{number: "cblas/" + test if CBLAS else ""
             for number, test in ((240, "test_split"), (241, "test_kernels"), (242, "test_fabric"),
                                  (243, "test_kernels"), (244, "test_kernels"))},
          245: "extras/test_curl",
          246: "extras/test_curl",
          247: "unit/test_monitor",
          "mlfab_tls": "extras/test_tls",
          "mlfab_http": "extras/test_curl",
          "mlfab_remote": "extras/test_store",
          "mlfab_sigv4": "extras/test_sigv4",
          248: "unit/test_checkpoint",
          249: "unit/test_checkpoint",
          "session": "unit/test_guard",
          "group": "unit/test_order",
          "kernels": "unit/test_combine",
          "image": "unit/test_image",
          "distributor": "unit/test_aggregator",
          "barrier": "unit/test_api_collective",
          "engine": "seam/test_comm",
          "plain_check": "seam/test_comm",
          "epoch": "seam/test_comm",
          "trees": "seam/test_comm",
          "stream": "seam/test_comm",
          "batch": "unit/test_scheduler",
          "push": "unit/test_worker",
          "pull": "unit/test_worker",
          "clock": "sim/test_consistency",
          "peer_link": "unit/test_api_collective",
          "delta": "unit/test_sparse_apply",
          "reshard_server": "sim/test_reshard",
          "reshard_worker": "sim/test_reshard",
          "reshard": "sim/test_reshard"}


def planted():
    """The number of each planted bug, and the files that contain it."""
    numbers = {}
    for path in sorted(glob.glob(ROOT + "/core/*/*.c") + glob.glob(ROOT + "/transports/*.c")
                       + glob.glob(ROOT + "/extras/*.c")):
        with open(path, encoding="utf-8") as file:
            for n in re.findall(r"MLFAB__PLANTED\((\d+)\)", file.read()):
                numbers.setdefault(int(n), set()).add(os.path.relpath(path, ROOT))
    return numbers


def make(*targets):
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}
    subprocess.run(["make", "-C", ROOT, "-s", "-j%d" % (os.cpu_count() or 1), "BUILD=" + FOLDER,
                    "WERROR=", "CFLAGS=-O1", "CPPFLAGS=-DMLFAB_PLANT", *targets],
                   env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   stderr=subprocess.PIPE, check=True)


def likely(number, files):
    tests = [LIKELY[number]] if number in LIKELY else []
    for file in sorted(files):
        part = os.path.basename(file)[:-2]
        own = LIKELY.get(part, "unit/test_" + part)
        if os.path.exists("%s/tests/%s.c" % (ROOT, own)):
            tests.append(own)
    return tests + ["sim/test_faults"]


def all_tests():
    return [os.path.relpath(source, ROOT + "/tests")[:-2] for kind in KINDS
            for source in sorted(glob.glob("%s/tests/%s/*.c" % (ROOT, kind)))]


def fails(program, seconds, cpu_seconds=None, number=0):
    """Returns how a test fails with this bug: "" or "hangs"; None when it passes or skips. One "not ok" is enough:
    what is left of the test does not run. tests/mutate.py uses it too."""
    limits = "ulimit -c 0; %s exec \"$0\"" % ("ulimit -S -t %d;" % cpu_seconds if cpu_seconds else "")
    process = subprocess.Popen(["sh", "-c", limits, os.path.abspath(program)], cwd=ROOT,
                               env=dict(os.environ, CONFORM_FIRST="1", MLFAB_PLANT=str(number)),
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, start_new_session=True)

    def kill():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    hangs = threading.Timer(seconds, kill)
    hangs.start()
    failed = any(line.startswith(b"not ok") for line in process.stdout)
    in_time = not hangs.finished.is_set()
    hangs.cancel()
    if failed:
        kill()
    code = process.wait()
    kill()
    process.stdout.close()
    if not in_time or code == -signal.SIGXCPU:
        return "hangs"
    return "" if failed or code not in (0, 77) else None


def place(test):
    """The program of a test, in the folder of the build."""
    return test if test in (MPI, HELD) else "tests/" + test


def notices(test, number):
    program = os.path.join(ROOT, FOLDER, place(test))
    if not os.path.exists(program):
        return None
    how = fails(program, 300, None, number)
    return None if how is None else test + (", which " + how if how else "")


def noticed_by(number, files):
    """The result of one bug: whether a test noticed it, and what to say."""
    if LIKELY.get(number) == "":
        return 1, "# SKIP no %s library is installed" % ("BLAS" if number in range(240, 245) else "MPI")
    first, began = likely(number, files), time.monotonic()
    for test in first + [test for test in all_tests() if test not in first]:
        who = notices(test, number)
        if who:
            return 1, "noticed by %s, after %.0f s" % (who, time.monotonic() - began)
    return 0, "no test notices it"


def main():
    bugs = planted()
    arguments, every = sys.argv[1:], 1
    if arguments[:1] == ["--every"]:
        every, arguments = int(arguments[1]), arguments[2:]
    numbers = [int(n) for n in arguments] or sorted(bugs)[::every]
    shutil.rmtree(os.path.join(ROOT, FOLDER), ignore_errors=True)
    print("1..%d" % (len(numbers) + 1), flush=True)
    try:
        make("tests-built", *(["%s/%s" % (FOLDER, program) for program in (MPI, HELD)] if MPI else []))
    except subprocess.CalledProcessError as error:
        print("Bail out! the build with planted bugs fails")
        print(error.stderr.decode("utf-8", "replace"), file=sys.stderr)
        sys.exit(1)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        tests = sorted({likely(number, bugs[number])[0] for number in numbers if LIKELY.get(number) != ""})
        together = [test for test in tests if not test.startswith(("extras/", "conform/"))]
        fail = [test for test, who in zip(together, pool.map(lambda test: notices(test, 0), together)) if who]
        # As in the other runs: these have several threads, and deadlines.
        fail += [test for test in tests if test not in together and notices(test, 0) and notices(test, 0)]
        print("%sok 1 - without a bug all pass%s" % ("not " if fail else "", ": not " + ", ".join(fail) if fail else ""),
              flush=True)
        failures = len(fail)
        results = pool.map(lambda number: noticed_by(number, bugs[number]), numbers)
        for at, (number, (noticed, text)) in enumerate(zip(numbers, results), 2):
            failures += not noticed
            print("%sok %d - planted bug %d: %s" % ("" if noticed else "not ", at, number, text), flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
