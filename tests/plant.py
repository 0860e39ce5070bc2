#!/usr/bin/env python3
"""A test that cannot fail proves nothing: plants each bug that the sources know (MLFAB__PLANTED(n) breaks
one invariant when built with -DMLFAB_PLANT=n), and passes when some test notices it. Prints TAP."""
import glob
import os
import re
import subprocess
import sys

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
BUILD = os.environ.get("MLFAB_BUILD", "build")
# The simulator sees most; the first that notices ends the search.
KINDS = ["sim", "unit", "oracle", "conform", "oom"]


def planted():
    numbers = set()
    for path in glob.glob(ROOT + "/core/*.c") + glob.glob(ROOT + "/transports/*.c"):
        with open(path, encoding="utf-8") as file:
            numbers.update(int(n) for n in re.findall(r"MLFAB__PLANTED\((\d+)\)", file.read()))
    return sorted(numbers)


def build(number):
    """The tests with the bug in them."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}
    folder = "%s/plant%d" % (BUILD, number)
    subprocess.run(["make", "-C", ROOT, "-s", "-j%d" % (os.cpu_count() or 1), "BUILD=" + folder,
                    "WERROR=", "CPPFLAGS=-DMLFAB_PLANT=%d" % number, "tests-built"],
                   env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   stderr=subprocess.PIPE, check=True)
    return os.path.join(ROOT, folder, "tests")


def noticed_by(folder):
    for kind in KINDS:
        for source in sorted(glob.glob("%s/tests/%s/*.c" % (ROOT, kind))):
            program = os.path.join(folder, kind, os.path.basename(source)[:-2])
            if not os.path.exists(program):
                continue
            try:
                result = subprocess.run([program], stdin=subprocess.DEVNULL, cwd=ROOT,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        timeout=300, check=False)
                if result.returncode not in (0, 77):
                    return "%s/%s" % (kind, os.path.basename(program))
            except subprocess.TimeoutExpired:
                return "%s/%s, which hangs" % (kind, os.path.basename(program))
    return None


def main():
    numbers = [int(n) for n in sys.argv[1:]] or planted()
    failures = 0
    print("1..%d" % len(numbers))
    for at, number in enumerate(numbers, 1):
        try:
            who = noticed_by(build(number))
            failures += not who
            print("%sok %d - planted bug %d: %s" % ("" if who else "not ", at, number,
                                                    "noticed by " + who if who else
                                                    "no test notices it"))
        except subprocess.CalledProcessError as error:
            failures += 1
            print("not ok %d - planted bug %d does not build" % (at, number))
            for line in error.stderr.decode("utf-8", "replace").splitlines():
                print("# " + line)
        sys.stdout.flush()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
