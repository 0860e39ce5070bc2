#!/usr/bin/env python3
# lane: check
# limit: 900
"""mlfab over MPI, with every MPI library for which `make` has built the programs of tests/mpi: the conformance suite,
then jobs of several processes that mpirun starts, with every way to initialise MPI, every place for the roles, and the
mistakes that a job can make; the Fortran example; MPI programs with libmlfab_mpi.so preloaded; and jobs that use mpirun
only to be started."""
import functools
import glob
import os
import re
import shutil

from process import BUILD, Skip, cases, clean_environment, expect, main, run, within

MPIS = sorted(os.path.basename(os.path.dirname(path)) for path in glob.glob(os.path.join(BUILD, "mpi", "*", "world")))
# As root, with more processes than cores, and without a network.
OPTIONS = {
    "openmpi": ["--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,vader", "--mca", "mpi_yield_when_idle", "1",
                "--quiet"],
    "mpich": ["-launcher", "fork"],
}


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
                                    **more)
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


def works(processes, *arguments, workers=None, servers=0, times=1, **more):
    """The job ends well, and every process says what it was."""
    for mpi in every_mpi():
        result = mpirun(mpi, processes, "world", *arguments, **more)
        told = re.findall(r"^ok rank (\d+) of (\d+) as (\w+)", result.out, re.M)
        expect(result.code == 0 and "fail" not in result.out, "%s: %s ends well" % (mpi, arguments), result)
        expect(len(told) == times * processes, "%s: all have worked" % mpi, result)
        expect(sum(what == "server" for _, _, what in told) == times * servers,
               "%s: %d are servers or schedulers" % (mpi, servers), result)
        if workers:
            expect({count for _, count, _ in told} == {str(workers)}, "%s: %d workers" % (mpi, workers), result)


def fails(processes, *arguments, names, text, times=None, **more):
    """Every process (or `times` of them) fails with this error."""
    for mpi in every_mpi():
        result = mpirun(mpi, processes, "world", *arguments, **more)
        told = re.findall(r"^fail (\w+) (-?\d+) (.*)", result.out, re.M)
        expect(result.code != 0, "%s: %s fails" % (mpi, arguments), result)
        expect(len(told) == (processes if times is None else times), "%s: each process fails" % mpi, result)
        for name, _, said in told:
            expect(name == "MLFAB_ERR_" + names and re.search(text, said), "%s: %s, %s" % (mpi, names, text), result)


def test_conformance():
    for mpi in every_mpi():
        if not os.path.exists(os.path.join(BUILD, "mpi", mpi, "conform")):
            raise Skip("libcmocka-dev is not installed")
        result = mpirun(mpi, 1, "conform", timeout=240)
        expect(result.code == 0, "%s: every check passes" % mpi, result)


def test_conformance_between_processes():
    for mpi in every_mpi():
        if not os.path.exists(os.path.join(BUILD, "mpi", mpi, "apart")):
            raise Skip("libcmocka-dev is not installed")
        result = mpirun(mpi, 2, "apart", timeout=240)
        expect(result.code == 0, "%s: every check passes" % mpi, result)


def test_mlfab_initialises_mpi():
    works(4, workers=4)


def test_a_progress_thread_with_multiple():
    works(4, "init=multiple", "progress=thread", workers=4)


def test_by_hand_with_funneled():
    works(4, "init=funneled", workers=4)


def test_by_hand_with_serialized():
    works(3, "init=serialized", "progress=hand", workers=3)


def test_one_process():
    works(1, workers=1)


def test_several_servers():
    works(4, "servers=3", workers=4)


def test_the_last_ranks_are_servers():
    works(6, "dedicated=1", "servers=2", workers=4, servers=2)


def test_any_rank_has_any_role():
    works(6, "dedicated=1", "roles=0s,3s", workers=4, servers=2)
    works(6, "dedicated=1", "scheduler=own", "roles=0c,1s,4s", workers=3, servers=3)
    works(5, "init=multiple", "scheduler=own", "roles=0c", workers=4, servers=1)


def test_a_scheduler_beside_server_0():
    works(4, "scheduler=beside", workers=4)


def test_within_a_host_by_shared_memory():
    works(4, "transport=mpi+shm", workers=4)


def test_an_mpi_that_keeps_buffers():
    for mpi in every_mpi():
        if not os.path.exists(os.path.join(BUILD, "mpi", mpi, "held")):
            raise Skip("libcmocka-dev is not installed")
        result = mpirun(mpi, 1, "held", timeout=120)
        expect(result.code == 0, "%s: every check passes" % mpi, result)


def test_from_the_buffers_of_the_program():
    works(4, "mpi_lend=1", workers=4)
    works(4, "mpi_lend=1", "init=funneled", "opens=2", workers=4, times=2)
    works(6, "dedicated=1", "servers=2", "mpi_lend=1", workers=4, servers=2)
    works(4, "mpi_lend=1", "transport=mpi+shm", workers=4)
    works(2, "init=multiple", "mpi_lend=1", "open=1", workers=2)


def test_cancelled_pushes_whose_buffers_are_overwritten():
    for lend in ("mpi_lend=0", "mpi_lend=1"):
        works(3, lend, "cancels=30", "servers=2", workers=3)
        works(3, lend, "cancels=30", "init=funneled", "dedicated=1", workers=2, servers=1)


def test_a_communicator_of_the_program():
    works(6, "init=multiple", "split=2", "opens=2", workers=3, times=2)


def test_contexts_one_after_the_other():
    works(3, "opens=4", workers=3, times=4)


def test_a_key():
    works(3, "key=0123456789abcdef0123456789abcdef", workers=3)


def test_idle_waiters_use_little():
    """Two ranks without work for 3 s. Each uses 0.1 s of a processor, most of it for looks at MPI, 1,000 a second, and up to
    0.26 s where others want the processors, too. With 20 ms of spinning after each heartbeat it is up to 0.35 s. There is
    no least time: who spins yields, and on a crowded host gets as little as others."""
    for mpi in every_mpi():
        for spin_us, most in ((0, 0.5), (20000, 0.8)):
            result = mpirun(mpi, 2, "world", "idle=3000", "spin=%d" % spin_us)
            told = re.findall(r"^idle (\d+) ([\d.]+)", result.out, re.M)
            expect(result.code == 0 and len(told) == 2, "%s: both tell" % mpi, result)
            for rank, seconds in told:
                expect(float(seconds) < most, "%s, spin %d us: rank %s sleeps" % (mpi, spin_us, rank), result)


def test_what_was_compiled_in():
    result = run(os.path.join(BUILD, "mlfab-run"), "--version")
    expect(re.search("; without:[^;]* mpi", result.out), "a build without MPI", result)
    for mpi in every_mpi():
        result = mpirun(mpi, 1, "world", "info=1")
        with_mpi = re.search(r"^built mlfab .*; with:[^;]* mpi \((Open MPI|MPICH) ([\d.]+)\); without:", result.out, re.M)
        version = run(mpirun_of(mpi), "--version")
        expect(result.code == 0 and with_mpi and with_mpi[2] in version.out, "%s: which MPI" % mpi, (result, version))


def test_the_program_finalises_mpi_first():
    # By hand: MPI_Finalize while a thread is inside MPI is beyond the standard, and MPICH (4.0) drops its lock then.
    works(2, "init=multiple", "progress=hand", "open=1", workers=2)


def test_a_thread_level_that_does_not_suffice():
    fails(2, "init=single", names="CONFIG", text="MPI_THREAD_SINGLE.*MPI_THREAD_FUNNELED")
    fails(2, "init=funneled", "progress=thread", names="CONFIG", text="MPI_THREAD_MULTIPLE.*MPI_THREAD_FUNNELED")


def test_settings_that_differ():
    fails(3, "init=multiple", "2:servers=2", names="WORLD", text="servers is 0 at MPI rank 0, 2 at 2")
    fails(3, "init=multiple", "1:job=other", names="JOB", text="MPI ranks 0 and 1 have different jobs")
    fails(3, "init=multiple", "2:transport=mpi+shm", names="WORLD", text="transports is 4 at MPI rank 0, 6 at 2")


def test_one_process_that_cannot_open():
    for mpi in every_mpi():
        result = mpirun(mpi, 3, "world", "init=multiple", "1:workers_max=8")
        told = dict((name, text) for name, text in re.findall(r"^fail MLFAB_ERR_(\w+) -?\d+ (.*)", result.out, re.M))
        expect("workers_max" in told.get("UNSUPPORTED", ""), "%s: its own error" % mpi, result)
        expect("MPI rank 1 cannot open" in told.get("WORLD", ""), "%s: the others are told who" % mpi, result)


def test_roles_that_do_not_fit():
    fails(3, "init=multiple", "dedicated=1", "servers=1", "roles=0s,1s", names="CONFIG", text="2 processes have the role server: MPI ranks 0, 1")
    fails(2, "init=multiple", "dedicated=1", "servers=2", names="CONFIG", text="no worker is left")
    fails(3, "init=multiple", "roles=1c", names="CONFIG", text="1 processes have the role scheduler.*: MPI rank 1$")


def test_what_mpi_cannot_do():
    fails(2, "init=multiple", "join=1", names="UNSUPPORTED", text="fixed")
    fails(2, "init=multiple", "replicas=1", "dedicated=1", "scheduler=own", names="UNSUPPORTED", text="replicas")
    fails(2, "init=multiple", "coordinator=tcp:127.0.0.1:1", names="CONFIG", text="must be empty")


@cases(())
@within(1500)
def test_a_process_that_does_not_open(ms):
    fails(3, "init=multiple", "absent=2", "timeout_ms=%d" % ms, names="TIMEOUT", times=2, timeout=240,
          text="MPI rank 2 has not called mlfab_open.*2 of 3 processes have")
    fails(4, "init=multiple", "absent=1,3", "0:timeout_ms=%d" % (2 * ms), "timeout_ms=%d" % ms, names="TIMEOUT", times=2, timeout=240,
          text="MPI ranks 1, 3 have not called mlfab_open.*2 of 4 processes have")


@cases(())
@within(1500)
def test_a_communicator_over_which_an_open_failed(ms):
    for mpi in every_mpi():
        result = mpirun(mpi, 3, "world", "init=multiple", "absent=2", "timeout_ms=%d" % ms, "opens=2", timeout=240)
        told = re.findall(r"^fail MLFAB_ERR_STATE -?\d+ (.*)", result.out, re.M)
        expect(len(told) == 2 and all("MPI rank 2 has not taken part" in text for text in told),
               "%s: both are told who was missing" % mpi, result)


@cases(())
@within(1500)
def test_a_process_that_does_not_open_again(ms):
    for mpi in every_mpi():
        result = mpirun(mpi, 3, "world", "init=multiple", "once=1", "timeout_ms=%d" % ms, "opens=2", timeout=240)
        told = re.findall(r"^fail MLFAB_ERR_TIMEOUT -?\d+ (.*)", result.out, re.M)
        expect(len(told) == 2 and all("MPI rank 1 has not called mlfab_open" in text for text in told),
               "%s: both are told who is missing" % mpi, result)


def test_a_process_that_opens_late():
    works(3, "init=multiple", "absent=1", "late=2600", "timeout_ms=30000", workers=3)


def test_a_process_that_ends_without_closing_ends_the_job():
    for mpi in every_mpi():
        result = mpirun(mpi, 2, "world", "bare=1")
        if family(mpi) == "openmpi":
            expect(result.code != 0, "%s: the launcher sees that it did not finalise" % mpi, result)


def test_fortran():
    for mpi in every_mpi():
        if not os.path.exists(os.path.join(BUILD, "mpi", mpi, "13_mpi")):
            raise Skip("no Fortran compiler for %s (gfortran)" % mpi)
        result = mpirun(mpi, 4, "13_mpi")
        expect(result.code == 0, "%s: it finds the line" % mpi, result)
        expect(re.search(r"workers 4: y =  3.000 x \+  1.000", result.out), "%s: it says so" % mpi, result)


def preloaded(mpi, processes, *arguments, program="plain", **more):
    """plain with libmlfab_mpi.so, or `linked`, which has it; the result, and {(rank, call): calls through mlfab}."""
    library = os.path.join(BUILD, "mpi", mpi, "libmlfab_mpi.so") if program == "plain" else None
    result = mpirun(mpi, processes, program, *arguments, preload=library, MLFAB_MPI_REPORT=1, **more)
    told = re.findall(r"mlfab_mpi: rank (\d+): ([\w ]+): (\d+) calls, \d+ bytes", result.err)
    return result, {(int(rank), call): int(calls) for rank, call, calls in told}


def test_an_mpi_program_alone():
    for mpi in every_mpi():
        result = mpirun(mpi, 3, "plain")
        expect(result.code == 0 and "all is right" in result.out, "%s: its sums are right" % mpi, result)
        expect("mlfab" not in result.err, "%s: without mlfab" % mpi, result)


def test_an_mpi_program_unchanged():
    counts = {"MPI_Allreduce": 4, "MPI_Iallreduce": 2, "MPI_Reduce_scatter": 2, "MPI_Allgatherv": 5, "MPI_Bcast": 1}
    for mpi in every_mpi():
        for mode, program in (("all", "plain"), ("init", "plain"), ("all", "linked")):
            result, told = preloaded(mpi, 3, mode, program=program)
            expect(result.code == 0 and "all is right" in result.out, "%s: its sums are right" % mpi, result)
            expect(told == {(r, call): n for r in range(3) for call, n in counts.items()},
                   "%s: the calls went through mlfab, and no others" % mpi, result)


def test_types_that_differ_between_the_ranks():
    for mpi in every_mpi():
        result, told = preloaded(mpi, 3, "mixed")
        expect(result.code == 0 and "all is right" in result.out, "%s: each receives in its way" % mpi, result)
        expect(told == {(r, "MPI_Allgatherv"): 1 for r in range(3)}, "%s: by mlfab" % mpi, result)


def test_sizes_that_are_left_to_mpi():
    for mpi in every_mpi():
        result, told = preloaded(mpi, 2, MLFAB_MPI_BYTES="100MB")
        expect(result.code == 0 and "all is right" in result.out and not told, "%s: all went to MPI" % mpi, result)


def test_a_report_of_nothing():
    """It is written also where no call was large enough, mlfab did not open, or the program ends without MPI_Finalize."""
    for mpi in every_mpi():
        for settings, why in ((dict(MLFAB_MPI_BYTES=10 ** 8), r"had MLFAB_MPI_BYTES \(100000000\)"),
                              (dict(MLFAB_MPI_BYTES="96MiB"), r"had MLFAB_MPI_BYTES \(100663296\)"),
                              (dict(MLFAB_MPI_BYTES="many"), "it did not open")):
            result, told = preloaded(mpi, 2, **settings)
            ranks = re.findall(r"^mlfab_mpi: rank (\d): no call went through mlfab: .*%s" % why, result.err, re.M)
            expect(result.code == 0 and sorted(ranks) == ["0", "1"] and not told, "%s: each rank says so" % mpi, result)


def test_another_mpi_library():
    """Preloaded into a program of another one, it ends it and says why."""
    for mpi in every_mpi():
        for other in MPIS:
            if family(other) == family(mpi):
                continue
            library = os.path.join(BUILD, "mpi", other, "libmlfab_mpi.so")
            result = mpirun(mpi, 2, "plain", preload=library)
            expect(result.code != 0 and "signal" not in result.err, "%s: it ends" % mpi, result)
            expect(re.search(r"^mlfab_mpi: rank \d: another MPI library: this libmlfab_mpi.so was built for (Open MPI|MPICH), "
                             r"the program has (MPICH|Open MPI)", result.err, re.M), "%s: a sentence" % mpi, result)


def test_partial_sums_where_they_are_asked_for():
    for mpi in every_mpi():
        for mode in ("solo", "majority", "quorum:2", "quorum:3"):
            result, told = preloaded(mpi, 3, "loop", MLFAB_MPI_PARTIAL=mode, MLFAB_MPI_PARTIAL_BYTES=100000)
            steps = [float(value) for value in re.findall(r"^step \d+: (\S+)", result.out, re.M)]
            expect(result.code == 0 and len(steps) == 20, "%s: %s: every decision is exact" % (mpi, mode), result)
            expect(all(told.get((r, "partial MPI_Allreduce")) == 20 for r in range(3)), "%s: by mlfab" % mpi, result)
            expect(not any(call == "MPI_Allreduce" for _, call in told), "%s: nothing else" % mpi, result)
            if mode == "quorum:3":
                expect(set(steps) == {3.0}, "%s: all ranks are waited for" % mpi, result)
        result, told = preloaded(mpi, 3, "all", MLFAB_MPI_PARTIAL="quorum:3", MLFAB_MPI_PARTIAL_BYTES=500000)
        expect(result.code == 0 and "all is right" in result.out, "%s: only sums of floats, and large" % mpi, result)
        expect(told[0, "partial MPI_Allreduce"] == 1 and told[0, "MPI_Allreduce"] == 3, "%s: one of four" % mpi, result)


def test_settings_of_the_profile_that_cannot_be():
    """Each process of a job has another mistake, and says its own."""
    mistakes = [(["MLFAB_MPI_PARTIAL=solo"], "needs MLFAB_MPI_PARTIAL_BYTES"),
                (["MLFAB_MPI_PARTIAL=most", "MLFAB_MPI_PARTIAL_BYTES=1"], "not solo, majority or quorum"),
                *((["MLFAB_MPI_BYTES=" + text], "not a size, as 65536 or 64KiB")
                  for text in ("many", "64kb", "MB", "-1", "1.5MB", "20000000TB", "99999999999999999999"))]
    for mpi in every_mpi():
        for some in (mistakes[at:at + 3] for at in range(0, len(mistakes), 3)):
            result, told = preloaded(mpi, len(some), each=[variables for variables, _ in some])
            expect(result.code == 0 and "all is right" in result.out and not told, "%s: MPI goes on alone" % mpi, result)
            for rank, (_, text) in enumerate(some):
                expect(re.search(r"^mlfab_mpi: rank %d: .*%s" % (rank, text), result.err, re.M), "%s: rank %d says why" % (mpi, rank), result)


def test_settings_of_the_profile_that_differ():
    """The calls of a rank that takes other ones would never meet those of the others: all go to MPI."""
    for mpi in every_mpi():
        for settings, text, times in ((["MLFAB_MPI_BYTES=1000000"], "rank 0: settings: MLFAB_MPI_\\* differ between", 1),
                                      (["MLFAB_MPI_PARTIAL=solo", "MLFAB_MPI_PARTIAL_BYTES=1"], "MLFAB_MPI_\\* differ", 1),
                                      (["MLFAB_JOB=other"], "mlfab_open: mpi: MPI ranks 0 and 1 have different jobs", 3),
                                      (["MLFAB_TRANSPORT=mpi"], "mlfab_open: .*: transports is 4 at MPI rank 0, 6 at 1", 3),
                                      (["MLFAB_SEED=many"], "rank 0: mlfab_open: MLFAB_SEED=.many.: not a whole number", 1)):
            result, told = preloaded(mpi, 3, rank_0=settings)
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
