#!/usr/bin/env python3
# lane: check
# limit: 900
"""mlfab over MPI, with every MPI library for which `make` has built the programs of tests/mpi: the conformance suite,
then jobs of several processes that mpirun starts, with every way to initialise MPI, every place for the roles, and the
mistakes that a job can make; the Fortran example; MPI programs with libmlfab_mpi.so preloaded; and jobs that use mpirun
only to be started.

The start of a job needs half a second of processors and more. So a job of JOBS runs several cases, one after the other,
and each test reads the lines of its own cases. Settings that the library reads without MPI are shown with one MPI library
(shared)."""
import functools
import glob
import itertools
import os
import re
import shutil
import threading

from process import BUILD, SCALE, Skip, clean_environment, expect, main, run, tell

MPIS = sorted(os.path.basename(os.path.dirname(path)) for path in glob.glob(os.path.join(BUILD, "mpi", "*", "world")))
# As root, with more processes than cores, and without a network.
OPTIONS = {
    "openmpi": ["--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "self,vader",
                "--mca", "mpi_yield_when_idle", "1", "--quiet"],
    "mpich": ["-launcher", "fork"],
}
MS = 1500  # time after which processes have waited in vain for others; 60000, once more, where the machine was busy
# Name of a job: its processes, the words of world.c for all cases, and those of each case.
JOBS = {
    "none": (3, "", ["large=700000", "servers=3", "scheduler=beside", "transport=mpi+shm", "key=0123456789abcdef0123456789abcdef",
                     "mpi_lend=1 large=700000", "mpi_lend=1 transport=mpi+shm"]),
    "single": (2, "init=single", [""]),
    "funneled": (3, "init=funneled", ["large=700000", "mpi_lend=1 opens=2", "progress=thread", "dedicated=1 mpi_lend=0 cancels=9",
                                      "dedicated=1 mpi_lend=1 cancels=9"]),
    "serialized": (2, "init=serialized progress=hand", [""]),
    "multiple": (3, "init=multiple", [  # a process that is absent leaves MPI with half a communicator: it is the last case
        "2:servers=2", "1:job=other", "2:transport=mpi+shm", "1:workers_max=8",
        "dedicated=1 servers=1 roles=0s,1s", "dedicated=1 servers=3", "roles=1c",
        "join=1", "replicas=1 dedicated=1 scheduler=own", "coordinator=tcp:127.0.0.1:1",
        "progress=thread", "opens=4", "servers=2 mpi_lend=0 cancels=9", "servers=2 mpi_lend=1 cancels=9",
        "new=1 late=1 nap=2600 timeout_ms=30000", "new=1 once=1 opens=2 timeout_ms={ms}",
        "new=1 absent=2 nap=4000 opens=2 timeout_ms={ms}"]),
    "places": (5, "init=multiple", [
        "dedicated=1 servers=2", "dedicated=1 roles=0s,3s", "dedicated=1 scheduler=own roles=0c,1s,4s", "scheduler=own roles=0c",
        "dedicated=1 servers=2 mpi_lend=1", "split=2 opens=2",
        "new=1 absent=1,3 nap=4000 0:timeout_ms={twice} timeout_ms={ms}"]),
    "one": (1, "info=1", [""]),
    "finalised": (2, "init=multiple progress=hand open=1", ["0:mpi_lend=1"]),
    "idle": (2, "", ["idle=3000 spin=0", "idle=3000 spin=20000", "bare=1"]),
}
ONCE, LOCKS = {}, {}


def once(key, function):
    """Calls the function for the first test that asks. Returns its result, or raises its failure, for each of them."""
    with LOCKS.setdefault(key, threading.Lock()):
        if key not in ONCE:
            try:
                ONCE[key] = function()
            except AssertionError as error:
                ONCE[key] = error
    if isinstance(ONCE[key], AssertionError):
        raise ONCE[key]
    return ONCE[key]


def mpirun_of(mpi):
    return "mpirun" if mpi == "default" else "mpirun." + mpi


@functools.lru_cache(maxsize=None)
def family(mpi):
    """Whose options mpirun takes."""
    if mpi in OPTIONS:
        return mpi
    return "mpich" if "HYDRA" in run(mpirun_of(mpi), "--version").out else "openmpi"


def mpirun(mpi, processes, program, *arguments, **more):
    timeout = more.pop("timeout", 90)
    preload = more.pop("preload", None)
    rank_0 = more.pop("rank_0", [])  # NAME=VALUE
    each = more.pop("each", [])      # such a list for each process
    environment = clean_environment(OMPI_ALLOW_RUN_AS_ROOT=1, OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1,
                                    HWLOC_COMPONENTS="no_os,stop", **more)  # no search for devices
    exports = []
    if preload:  # for the program only: mpirun itself does not know what it would take
        exports = ["-x", "LD_PRELOAD=" + preload] if family(mpi) == "openmpi" else ["-env", "LD_PRELOAD", preload]
    command = [os.path.join(BUILD, "mpi", mpi, program), *arguments]
    job = ["-n", processes, *exports, *command]
    if rank_0:  # a part of the job that has variables of its own
        job = ["-n", 1, *exports, "env", *rank_0, *command, ":", "-n", processes - 1, *exports, *command]
    if each:
        parts = [[":", "-n", 1, *exports, "env", *variables, *command] for variables in each]
        job = sum(parts, [])[1:]
    return run(mpirun_of(mpi), *OPTIONS[family(mpi)], *job, env=environment, timeout=timeout)


def every_mpi():
    if not MPIS:
        raise Skip("no MPI library is installed (libopenmpi-dev, libmpich-dev)")
    for mpi in MPIS:
        if not shutil.which(mpirun_of(mpi)):
            raise Skip("mpirun of %s is not installed" % mpi)
    return MPIS


def shared(some):
    """Each of these with one MPI library, in turn."""
    return zip(itertools.cycle(every_mpi()), some)


def job(mpi, name, ms):
    processes, words, some = JOBS[name]
    text = " ".join("%s -- %s" % ("" if at else words, case) for at, case in enumerate(some))
    return mpirun(mpi, processes, "world", *text.format(ms=ms, twice=2 * ms).split(), timeout=200 if ms == MS else 400)


def case(mpi, name, words, ms=MS):
    """The lines of a case, how many processes the job has, and its result."""
    result = once((mpi, name, ms), lambda: job(mpi, name, ms))
    return re.findall(r"^%d: (.*)" % JOBS[name][2].index(words), result.out, re.M), JOBS[name][0], result


def works(name, words="", workers=None, servers=0, times=1):
    """The case ends well, and every process tells its role."""
    for mpi in every_mpi():
        lines, processes, result = case(mpi, name, words)
        told = [re.match(r"ok rank \d+ of (\d+) as (\w+)", line) for line in lines if line.startswith("ok")]
        expect(result.code == 0 and not any("fail" in line for line in lines), "%s: %s ends well" % (mpi, words), result)
        expect(lines.count("end 0") == processes and len(told) == times * processes, "%s: all have worked" % mpi, result)
        expect(sum(one[2] == "server" for one in told) == times * servers,
               "%s: %d are servers or schedulers" % (mpi, servers), result)
        expect({one[1] for one in told} == {str(n) for n in workers}, "%s: %s workers" % (mpi, workers), result)


def failures(lines):
    return [re.match(r"fail (\w+) -?\d+ (.*)", line).groups() for line in lines if line.startswith("fail")]


def fails(name, words, names, text, ms=MS, times=None):
    """Every process (or `times` of them) fails with this error."""
    for mpi in every_mpi():
        lines, processes, result = case(mpi, name, words, ms)
        told = failures(lines)
        times = times or processes
        expect(result.code == 0 and "end 0" not in lines, "%s: %s fails" % (mpi, words), result)
        expect(len(told) == times, "%s: each process fails" % mpi, result)
        for error, said in told:
            expect(error == "MLFAB_ERR_" + names and re.search(text, said), "%s: %s, %s" % (mpi, names, text), result)


def again(function):
    """Processes are to tell each other something before one of them has waited in vain for MS. A busy machine may need
    longer: then the job runs once more, with 60 s. A job in which nobody waited in vain has failed."""
    def twice():
        try:
            function(MS)
        except AssertionError as error:
            if "MLFAB_ERR_TIMEOUT" not in str(error):
                raise
            tell("%s: not within %d ms: %s" % (function.__name__, MS, str(error).partition("\n")[0]))
            function(60000)
    twice.__name__ = function.__name__
    return twice


def test_conformance():
    """Within a process. Frames that MPI copies go between two processes, with every MPI library, in the next test."""
    for mpi in every_mpi():
        if not os.path.exists(os.path.join(BUILD, "mpi", mpi, "conform")):
            raise Skip("libcmocka-dev is not installed")
        only = {} if mpi == MPIS[0] else {"CONFORM_ONLY": "mpi-lend"}
        result = mpirun(mpi, 1, "conform", timeout=240, MLFAB_SCALE=SCALE / 5, **only)
        expect(result.code == 0, "%s: every check passes" % mpi, result)


def test_conformance_between_processes():
    for mpi in every_mpi():
        if not os.path.exists(os.path.join(BUILD, "mpi", mpi, "apart")):
            raise Skip("libcmocka-dev is not installed")
        result = mpirun(mpi, 2, "apart", timeout=240, MLFAB_SCALE=SCALE / 5)
        expect(result.code == 0, "%s: every check passes" % mpi, result)


def test_mlfab_initialises_mpi():
    works("none", "large=700000", workers=[3])


def test_a_progress_thread_with_multiple():
    works("multiple", "progress=thread", workers=[3])


def test_by_hand_with_funneled():
    works("funneled", "large=700000", workers=[3])


def test_by_hand_with_serialized():
    works("serialized", workers=[2])


def test_one_process():
    works("one", workers=[1])


def test_several_servers():
    works("none", "servers=3", workers=[3])


def test_the_last_ranks_are_servers():
    works("places", "dedicated=1 servers=2", workers=[3], servers=2)


def test_any_rank_has_any_role():
    works("places", "dedicated=1 roles=0s,3s", workers=[3], servers=2)
    works("places", "dedicated=1 scheduler=own roles=0c,1s,4s", workers=[2], servers=3)
    works("places", "scheduler=own roles=0c", workers=[4], servers=1)


def test_a_scheduler_beside_server_0():
    works("none", "scheduler=beside", workers=[3])


def test_within_a_host_by_shared_memory():
    works("none", "transport=mpi+shm", workers=[3])


def test_an_mpi_that_keeps_buffers():
    for mpi in every_mpi():
        if not os.path.exists(os.path.join(BUILD, "mpi", mpi, "held")):
            raise Skip("libcmocka-dev is not installed")
        result = mpirun(mpi, 1, "held", timeout=120)
        expect(result.code == 0, "%s: every check passes" % mpi, result)


def test_from_the_buffers_of_the_program():
    works("none", "mpi_lend=1 large=700000", workers=[3])
    works("funneled", "mpi_lend=1 opens=2", workers=[3], times=2)
    works("places", "dedicated=1 servers=2 mpi_lend=1", workers=[3], servers=2)
    works("none", "mpi_lend=1 transport=mpi+shm", workers=[3])
    works("finalised", "0:mpi_lend=1", workers=[2])


def test_cancelled_pushes_whose_buffers_are_overwritten():
    for lend in 0, 1:
        works("multiple", "servers=2 mpi_lend=%d cancels=9" % lend, workers=[3])
        works("funneled", "dedicated=1 mpi_lend=%d cancels=9" % lend, workers=[2], servers=1)


def test_a_communicator_of_the_program():
    works("places", "split=2 opens=2", workers=[2, 3], times=2)


def test_contexts_one_after_the_other():
    works("multiple", "opens=4", workers=[3], times=4)


def test_a_key():
    works("none", "key=0123456789abcdef0123456789abcdef", workers=[3])


def test_idle_waiters_use_little():
    """Two ranks without work for 3 s. Each uses 0.1 s of a processor, most of it for looks at MPI, 1,000 a second, and up to
    0.26 s where others want the processors, too. With 20 ms of spinning after each heartbeat it is up to 0.35 s. There is
    no least time: who spins yields, and on a crowded host gets as little as others."""
    for mpi in every_mpi():
        for spin_us, most in ((0, 0.5), (20000, 0.8)):
            lines, _, result = case(mpi, "idle", "idle=3000 spin=%d" % spin_us)
            told = [line.split()[1:] for line in lines if line.startswith("idle")]
            expect(lines.count("end 0") == 2 and len(told) == 2, "%s: both tell" % mpi, result)
            for rank, seconds in told:
                expect(float(seconds) < most, "%s, spin %d us: rank %s sleeps" % (mpi, spin_us, rank), result)


def test_what_was_compiled_in():
    result = run(os.path.join(BUILD, "mlfab-run"), "--version")
    expect(re.search("; without:[^;]* mpi", result.out), "a build without MPI", result)
    for mpi in every_mpi():
        _, _, result = case(mpi, "one", "")
        with_mpi = re.search(r"^built mlfab .*; with:[^;]* mpi \((Open MPI|MPICH) ([\d.]+)\); without:", result.out, re.M)
        version = run(mpirun_of(mpi), "--version")
        expect(result.code == 0 and with_mpi and with_mpi[2] in version.out, "%s: which MPI" % mpi, (result, version))


def test_the_program_finalises_mpi_first():
    # By hand: MPI_Finalize while a thread is inside MPI is beyond the standard, and MPICH (4.0) drops its lock then.
    works("finalised", "0:mpi_lend=1", workers=[2])


def test_a_thread_level_that_does_not_suffice():
    fails("single", "", names="CONFIG", text="MPI_THREAD_SINGLE.*MPI_THREAD_FUNNELED")
    fails("funneled", "progress=thread", names="CONFIG", text="MPI_THREAD_MULTIPLE.*MPI_THREAD_FUNNELED")


def test_settings_that_differ():
    fails("multiple", "2:servers=2", names="WORLD", text="servers is 0 at MPI rank 0, 2 at 2")
    fails("multiple", "1:job=other", names="JOB", text="MPI ranks 0 and 1 have different jobs")
    fails("multiple", "2:transport=mpi+shm", names="WORLD", text="transports is 4 at MPI rank 0, 6 at 2")


def test_one_process_that_cannot_open():
    for mpi in every_mpi():
        lines, _, result = case(mpi, "multiple", "1:workers_max=8")
        told = dict(failures(lines))
        expect("end 0" not in lines, "%s: none opens" % mpi, result)
        expect("workers_max" in told.get("MLFAB_ERR_UNSUPPORTED", ""), "%s: its own error" % mpi, result)
        expect("MPI rank 1 cannot open" in told.get("MLFAB_ERR_WORLD", ""), "%s: the others are told who" % mpi, result)


def test_roles_that_do_not_fit():
    fails("multiple", "dedicated=1 servers=1 roles=0s,1s", names="CONFIG", text="2 processes have the role server: MPI ranks 0, 1")
    fails("multiple", "dedicated=1 servers=3", names="CONFIG", text="no worker is left")
    fails("multiple", "roles=1c", names="CONFIG", text="1 processes have the role scheduler.*: MPI rank 1$")


def test_what_mpi_cannot_do():
    fails("multiple", "join=1", names="UNSUPPORTED", text="fixed")
    fails("multiple", "replicas=1 dedicated=1 scheduler=own", names="UNSUPPORTED", text="replicas")
    fails("multiple", "coordinator=tcp:127.0.0.1:1", names="CONFIG", text="must be empty")


ABSENT = "new=1 absent=2 nap=4000 opens=2 timeout_ms={ms}"


@again
def test_a_process_that_does_not_open(ms):
    for mpi in every_mpi():
        lines, _, result = case(mpi, "multiple", ABSENT, ms)
        told = [text for name, text in failures(lines) if name == "MLFAB_ERR_TIMEOUT"]
        expect(result.code == 0 and "end 0" not in lines and len(told) == 2, "%s: both fail" % mpi, result)
        for text in told:
            expect(re.search("MPI rank 2 has not called mlfab_open.*2 of 3 processes have", text), "%s: who is missing" % mpi, result)
    fails("places", "new=1 absent=1,3 nap=4000 0:timeout_ms={twice} timeout_ms={ms}", names="TIMEOUT", times=3, ms=ms,
          text="MPI ranks 1, 3 have not called mlfab_open.*3 of 5 processes have")


@again
def test_a_communicator_over_which_an_open_failed(ms):
    for mpi in every_mpi():
        lines, _, result = case(mpi, "multiple", ABSENT, ms)
        told = [text for name, text in failures(lines) if name == "MLFAB_ERR_STATE"]
        expect(len(told) == 2 and all("MPI rank 2 has not taken part" in text for text in told),
               "%s: both are told who was missing" % mpi, result)


@again
def test_a_process_that_does_not_open_again(ms):
    for mpi in every_mpi():
        lines, _, result = case(mpi, "multiple", "new=1 once=1 opens=2 timeout_ms={ms}", ms)
        told = failures(lines)
        expect(len(told) == 2 and all(name == "MLFAB_ERR_TIMEOUT" and "MPI rank 1 has not called mlfab_open" in text
                                      for name, text in told), "%s: both are told who is missing" % mpi, result)


def test_a_process_that_opens_late():
    works("multiple", "new=1 late=1 nap=2600 timeout_ms=30000", workers=[3])


def test_a_process_that_ends_without_closing_ends_the_job():
    for mpi in every_mpi():
        lines, processes, result = case(mpi, "idle", "bare=1")
        expect(sum(line.startswith("ok") for line in lines) == processes, "%s: it has worked" % mpi, result)
        if family(mpi) == "openmpi":
            expect(result.code != 0, "%s: the launcher sees that it did not finalise" % mpi, result)


def test_fortran():
    for mpi in every_mpi():
        if not os.path.exists(os.path.join(BUILD, "mpi", mpi, "13_mpi")):
            raise Skip("no Fortran compiler for %s (gfortran)" % mpi)
        result = mpirun(mpi, 2, "13_mpi")
        expect(result.code == 0, "%s: it finds the line" % mpi, result)
        expect(re.search(r"workers 2: y =  3.000 x \+  1.000", result.out), "%s: it says so" % mpi, result)


def preloaded(mpi, processes, *arguments, program="plain", **more):
    """plain with libmlfab_mpi.so, or `linked`, which has it; the result, and {(rank, call): calls through mlfab}."""
    library = os.path.join(BUILD, "mpi", mpi, "libmlfab_mpi.so") if program == "plain" else None
    result = mpirun(mpi, processes, program, *arguments, preload=library, MLFAB_MPI_REPORT=1, **more)
    told = re.findall(r"mlfab_mpi: rank (\d+): ([\w ]+): (\d+) calls, \d+ bytes", result.err)
    return result, {(int(rank), call): int(calls) for rank, call, calls in told}


def test_an_mpi_program_alone():
    for mpi in every_mpi():
        result = mpirun(mpi, 2, "plain", "all")
        expect(result.code == 0 and "all: all is right" in result.out, "%s: its sums are right" % mpi, result)
        expect("mlfab" not in result.err, "%s: without mlfab" % mpi, result)


COUNTS = {"MPI_Allreduce": 4, "MPI_Iallreduce": 2, "MPI_Reduce_scatter": 2, "MPI_Allgatherv": 5, "MPI_Bcast": 1}


def unchanged(mpi):
    """All kinds of calls, and then a gather with mixed types."""
    return once((mpi, "unchanged"), lambda: preloaded(mpi, 3, "all", "mixed"))


def test_an_mpi_program_unchanged():
    """Preloaded, with MPI_Init_thread; and linked, with MPI_Init."""
    for mpi in every_mpi():
        result, told = unchanged(mpi)
        expect("all: all is right" in result.out, "%s: its sums are right" % mpi, result)
        expect(told == {(r, call): n + (call == "MPI_Allgatherv") for r in range(3) for call, n in COUNTS.items()},
               "%s: the calls went through mlfab, and no others" % mpi, result)
        result, told = preloaded(mpi, 3, "init", "all", program="linked")
        expect(result.code == 0 and "all: all is right" in result.out, "%s: linked: its sums are right" % mpi, result)
        expect(told == {(r, call): n for r in range(3) for call, n in COUNTS.items()}, "%s: linked: the same calls" % mpi, result)


def test_types_that_differ_between_the_ranks():
    for mpi in every_mpi():
        result, told = unchanged(mpi)
        expect(result.code == 0 and "mixed: all is right" in result.out, "%s: each receives in its way" % mpi, result)
        expect(all(told.get((r, "MPI_Allgatherv")) == COUNTS["MPI_Allgatherv"] + 1 for r in range(3)), "%s: by mlfab" % mpi, result)


def left_to_mpi():
    """Results of programs whose calls are all too small, and the reason in the report of each rank."""
    return [(mpi, preloaded(mpi, 2, "all", MLFAB_MPI_BYTES=size), r"had MLFAB_MPI_BYTES \(%d\)" % number)
            for mpi, (size, number) in shared((("100MB", 10 ** 8), ("96MiB", 96 << 20)))]


def test_sizes_that_are_left_to_mpi():
    for mpi, (result, told), _ in once("left", left_to_mpi):
        expect(result.code == 0 and "all is right" in result.out and not told, "%s: all went to MPI" % mpi, result)


def test_a_report_of_nothing():
    """It is written also where no call was large enough, mlfab did not open, or the program ends without MPI_Finalize."""
    for mpi, (result, told), why in once("left", left_to_mpi) + [(*some, "it did not open") for some in once("mistakes", mistaken)]:
        ranks = re.findall(r"^mlfab_mpi: rank (\d): no call went through mlfab: .*%s" % why, result.err, re.M)
        count = 2 if "had" in why else len(MISTAKES[every_mpi().index(mpi)::len(MPIS)])
        expect(sorted(ranks) == [str(r) for r in range(count)] and not told, "%s: each rank says so" % mpi, result)


def test_another_mpi_library():
    """Preloaded into a program of another one, it ends it and says why."""
    for mpi in every_mpi():
        for other in MPIS:
            if family(other) == family(mpi):
                continue
            library = os.path.join(BUILD, "mpi", other, "libmlfab_mpi.so")
            result = mpirun(mpi, 2, "plain", "sums", preload=library)
            expect(result.code != 0 and "signal" not in result.err, "%s: it ends" % mpi, result)
            expect(re.search(r"^mlfab_mpi: rank \d: another MPI library: this libmlfab_mpi.so was built for (Open MPI|MPICH), "
                             r"the program has (MPICH|Open MPI)", result.err, re.M), "%s: a sentence" % mpi, result)


def partial(mpi, mode, *programs, least):
    """A loop of 20 partial sums, in which every decision is exact. Returns the values of the sums, too."""
    result, told = preloaded(mpi, 3, *programs, MLFAB_MPI_PARTIAL=mode, MLFAB_MPI_PARTIAL_BYTES=least)
    steps = [float(value) for value in re.findall(r"^step \d+: (\S+)", result.out, re.M)]
    expect(result.code == 0 and len(steps) == 20, "%s: %s: every decision is exact" % (mpi, mode), result)
    return result, told, steps


def test_partial_sums_where_they_are_asked_for():
    for mpi, mode in shared(("solo", "majority", "quorum:2")):
        result, told, _ = partial(mpi, mode, "loop", least=100000)
        expect(told == {(r, "partial MPI_Allreduce"): 20 for r in range(3)}, "%s: %s: by mlfab, and nothing else" % (mpi, mode), result)
    for mpi in every_mpi():
        result, told, steps = partial(mpi, "quorum:3", "wide", "all", least=500000)
        expect(set(steps) == {3.0}, "%s: all ranks are waited for" % mpi, result)
        expect("all: all is right" in result.out, "%s: only sums of floats, and large" % mpi, result)
        expect(told[0, "partial MPI_Allreduce"] == 20 + 1 and told[0, "MPI_Allreduce"] == 3, "%s: one of four" % mpi, result)


MISTAKES = [(["MLFAB_MPI_PARTIAL=solo"], "needs MLFAB_MPI_PARTIAL_BYTES"),
            (["MLFAB_MPI_PARTIAL=most", "MLFAB_MPI_PARTIAL_BYTES=1"], "not solo, majority or quorum"),
            *((["MLFAB_MPI_BYTES=" + text], "not a size, as 65536 or 64KiB")
              for text in ("many", "64kb", "MB", "-1", "1.5MB", "20000000TB", "99999999999999999999"))]


def mistaken():
    """Each process of a job has another mistake; each MPI library has a part of them."""
    some = every_mpi()
    return [(mpi, preloaded(mpi, 0, "sums", each=[variables for variables, _ in MISTAKES[at::len(some)]]))
            for at, mpi in enumerate(some)]


def test_settings_of_the_profile_that_cannot_be():
    """Each process says its own mistake."""
    for at, (mpi, (result, told)) in enumerate(once("mistakes", mistaken)):
        expect(result.code == 0 and "all is right" in result.out and not told, "%s: MPI goes on alone" % mpi, result)
        for rank, (_, text) in enumerate(MISTAKES[at::len(MPIS)]):
            expect(re.search(r"^mlfab_mpi: rank %d: .*%s" % (rank, text), result.err, re.M), "%s: rank %d says why" % (mpi, rank), result)


def test_settings_of_the_profile_that_differ():
    """The calls of a rank that takes other ones would never meet those of the others: all go to MPI."""
    for mpi, (settings, text, times) in shared((
            (["MLFAB_MPI_BYTES=1000000"], "rank 0: settings: MLFAB_MPI_\\* differ between", 1),
            (["MLFAB_MPI_PARTIAL=solo", "MLFAB_MPI_PARTIAL_BYTES=1"], "MLFAB_MPI_\\* differ", 1),
            (["MLFAB_JOB=other"], "mlfab_open: mpi: MPI ranks 0 and 1 have different jobs", 2),
            (["MLFAB_TRANSPORT=mpi"], "mlfab_open: .*: transports is 4 at MPI rank 0, 6 at 1", 2),
            (["MLFAB_SEED=many"], "rank 0: mlfab_open: MLFAB_SEED=.many.: not a whole number", 1))):
        result, told = preloaded(mpi, 2, "sums", rank_0=settings)
        expect(result.code == 0 and "all is right" in result.out and not told, "%s: MPI goes on alone" % mpi, result)
        expect(len(re.findall(text, result.err)) == times, "%s: it is said why" % mpi, result)


def test_a_launcher_only():
    """A program without MPI, which mpirun starts: the variables of the launcher give ranks."""
    for mpi in every_mpi():
        result = mpirun(mpi, 3, os.path.join(BUILD, "examples", "01_push_pull"),
                        MLFAB_COORDINATOR="unix:@mlfab-mpi-%s-%d" % (mpi, os.getpid()))
        expect(result.code == 0 and result.out.count("expected 60 and 30") == 3, "%s: three workers" % mpi, result)


if __name__ == "__main__":
    main(globals(), jobs=2)
