#!/usr/bin/env python3
# lane: check
# limit: 600
"""A run as its operator meets it: whole jobs of mlfab-run on a machine on which something goes wrong. Some scenes are cases of
other scripts, which are run here, too, so that one script shows all.

| scene | where it is |
|---|---|
| all processes are frozen and thawed | here |
| server and replica are killed, with --on-failure=restart | here |
| workers join a loop of pushes, pulls and collectives | growth_test.py |
| a disk is full for a while | here |
| SIGTERM to all processes; SIGHUP, SIGUSR1 and others | run_test.py |
| Ctrl-Z and fg in a shell | here |
| the address of rank 0 is a name | here |
| a new generation beside an old one | here |
| shared memory cannot be made | here |
| a locale with decimal commas | locale_test.py |
| links in a directory of logs that others share | telemetry_test.py |
| a directory of checkpoints that cannot be written | here; one that is not there: checkpoint_test.py |
| a key file of root, and a range of ports | here; every wrong mode: startup_test.py |

A frame that is cut off or repeated on the way is the matter of tests/seam and tests/sim."""
import contextlib
import os
import pty
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import tempfile
import time

import checkpoint_test
import growth_test
import locale_test
import run_test
import startup_test
import telemetry_test
from fabrics import Group, Watched
from process import (KEY, RUN, cases, children, clean_environment, end, executable, expect, finish, free_port, helper,
                     is_alive, main, send, start, wait_until)

FREEZE = 12.0  # seconds: more than a peer may be silent, and 30 heartbeats of servers with replicas


class Saver(Watched):
    """Workers that train until SIGTERM comes, and then save (saver.c)."""

    def __init__(self, *options, **settings):
        self.up, self.saved = set(), set()
        super().__init__("-n", 2, *options, helper("saver"), 100, **settings)

    def said(self, role, rank, word, rest):
        {"up": self.up, "saved": self.saved}[word].add(rank)

    def trains(self):
        self.until(lambda: len(self.up) == 2, "both workers train")

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.until_end()
        expect(len(self.saved) == 2, "both save the model", self.told())


# ---- a pause of all

def freeze(run, order):
    """Stops all processes of a run for a while. They go on one by one."""
    there = run.processes()
    for pid in there.values():
        send(pid, signal.SIGSTOP)
    time.sleep(FREEZE)
    names = sorted(there, key=lambda name: (name[0] != "worker", name))
    if order == "servers first":
        names.reverse()
    elif order == "any":
        random.shuffle(names)
    for name in names:
        send(there[name], signal.SIGCONT)
        time.sleep(0.02)


@cases(("-s 1 --tcp", "workers first"), ("-s 2 --shm", "servers first"), ("-s 1 --tcp --scheduler=own", "any"))
def test_all_are_frozen(options, order):
    with Saver(*options.split(), MLFAB_HEARTBEAT_MS=500, MLFAB_SILENT_DEATH_MS=10000, MLFAB_TIMEOUT_MS=60000) as run:
        run.trains()
        for _ in range(2):
            freeze(run, order)
        time.sleep(0.5)
        expect(not re.search(r"\bdead\b|PEER_DEAD", run.lines()), "nobody is taken for dead", run.told())
        run.end()


@cases("workers first", "any")
def test_all_are_frozen_with_replicas(order):
    with Group("--tcp", workers=2) as run:
        run.in_sync()
        freeze(run, order)
        run.in_sync()
        run.end()
        run.check()


# ---- a disk

class Checkpoints(Watched):
    """A run whose server writes a checkpoint every few updates; each update adds 1 (checkpointer.c)."""

    def __init__(self, folder, *options, **settings):
        self.folder, self.begins = folder, []
        super().__init__("-n", 1, "--timeout", 110, *options, "--set", "checkpoint_dir=" + folder,
                         "--set", "checkpoint_commits=20", helper("checkpointer"), 20000, **settings)

    def said(self, role, rank, word, rest):
        if word == "begin":
            self.begins.append([int(number) for number in rest.split()])

    def newest(self):
        return checkpoint_test.numbers(os.listdir(self.folder))[-1]

    def writes(self, more=2):
        before = self.newest()
        self.until(lambda: self.newest() >= before + more, "checkpoints are written")


@contextlib.contextmanager
def small_disk():
    """A directory, and functions that fill its disk and free it again."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = shutil.which("mount") and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder],
                                                           stderr=subprocess.DEVNULL, check=False).returncode == 0
        ballast = os.path.join(folder, "ballast")

        def limit(run, bytes_):
            """Without a disk of its own: the servers can write no file that is longer."""
            for (role, _), pid in run.processes().items():
                if role == "server":
                    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (bytes_ or hard, hard))

        def fill(run):
            if not mounted:
                limit(run, 4096)
                return
            with open(ballast, "ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))

        def free(run):
            os.remove(ballast) if mounted else limit(run, None)

        try:
            yield folder, fill, free
        finally:
            if mounted:
                subprocess.run(["umount", "-l", folder], check=False)


def test_a_disk_that_is_full_for_a_while():
    """Training goes on, one line says why nothing is written, nothing is left behind, and then checkpoints go on."""
    with small_disk() as (folder, fill, free):
        with Checkpoints(folder, "-s", 1, "--on-failure=continue") as run:
            run.writes()
            # Again and again: a checkpoint that is removed just then makes room for the next.
            run.until(lambda: fill(run) or "a checkpoint failed" in run.lines(), "a checkpoint fails")
            time.sleep(0.5)
            expect(run.lines().count("a checkpoint failed") <= 2, "a line a minute", run.told())
            names = os.listdir(folder)
            numbers = {int(n) for n in re.findall(r"checkpoint-(\d+)\.", "\n".join(names))}
            expect(len(numbers - set(checkpoint_test.numbers(names))) <= 1, "no files but those of an attempt under way", names)
            free(run)
            run.writes()
            run.process.send_signal(signal.SIGTERM)
            run.until_end(status=None)
            newest = run.newest()
        with Checkpoints(folder, "-s", 1, "--resume", folder) as run:
            run.until(lambda: run.begins, "it goes on from the newest")
            expect(run.begins[0][0] == newest and run.begins[0][1] == run.begins[0][3] > 0, "the newest", run.begins)


def unprivileged(folder, *programs):
    """Copies of programs in a folder that every user can read: who starts them, and where they are."""
    if os.geteuid() != 0:
        return {}, programs
    os.chmod(folder, 0o755)
    copies = []
    for program in programs:
        with open(program, "rb") as file:
            copies.append(executable(os.path.join(folder, os.path.basename(program)), file.read()))
    return dict(cwd=folder, user=65534, group=65534, extra_groups=[]), copies


def test_a_directory_that_cannot_be_written():
    """Told once, at the beginning, by name."""
    with tempfile.TemporaryDirectory() as folder:
        who, (launcher, program) = unprivileged(folder, RUN, helper("stepper"))
        closed = os.path.join(folder, "closed")
        os.mkdir(closed, 0o555)
        for setting, code, text in (("checkpoint_dir=%s", 1, "checkpoint_dir '%s'"), ("trace=%s/t.json", 0, "trace: cannot write '%s"),
                                    ("metrics=%s/m.prom", 0, "metrics: cannot write '%s"), ("log=warn:%s/log", 0, "log: cannot write '%s")):
            result = finish(start(launcher, "-n", 1, "-s", 1, "--set", setting % closed, program, 100, 20, env=clean_environment(),
                                  **who))
            told = [line for line in result.err.splitlines() if text % closed in line]
            nodes = {line.split("]")[0] for line in told}
            expect(result.code == code and told and len(told) == len(nodes), setting, result)
            expect(all("Permission denied" in line for line in told), "why", result)


# ---- all copies of a server are lost

@cases(("server", "replica"), ("server", "replica", "scheduler"))
def test_server_and_replica_are_killed(*dead):
    """The run goes on from its newest checkpoint, or ends with an error. It never begins anew with zeros."""
    with tempfile.TemporaryDirectory() as folder:
        with Checkpoints(folder, "--replicas", "--on-failure=restart", "--set", "ack=durable", MLFAB_HEARTBEAT_MS=400,
                         MLFAB_TIMEOUT_MS=60000) as run:
            run.writes()
            there, newest = run.processes(), run.newest()
            for role in dead:
                send(there[role, 0], signal.SIGKILL)
            wait_until(lambda: len(run.begins) > 1 or run.ended(), lambda: "it goes on, or ends\n" + run.told())
            if run.ended():
                run.join()
                expect(run.process.returncode not in (0, 124) and "server" in run.lines(), "it ends with an error", run.told())
            else:
                number, version = run.begins[1][:2]
                expect(number >= newest and version > 0, "it goes on from checkpoint %d or later" % newest,
                       "%s\n%s" % (run.begins, run.told()))
        expect(checkpoint_test.numbers(os.listdir(folder))[-1] >= newest, "the checkpoints are kept", os.listdir(folder))


# ---- a terminal

def test_ctrl_z_and_fg():
    """In an interactive shell: all processes stop and go on, and the run ends well."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("sh", ["sh", "-i"], clean_environment(PS1="", ENV="", TERM="dumb", NO_COLOR=1))
    shown = ""

    def shows(*texts):
        def look():
            nonlocal shown
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 65536).decode("utf-8", "replace")
            return all(text in shown for text in texts)
        wait_until(look, lambda: "it shows %s: %s" % (texts, shown))

    def write(text):
        os.write(terminal, text.encode())

    try:
        write("%s -n 2 -s 1 %s 100\n" % (RUN, helper("saver")))
        shows("[worker 0] up", "[worker 1] up")
        (launcher,) = run_test.children(pid)
        everybody = [launcher, *children(launcher).values()]
        expect(len(everybody) == 4, "two workers, a server and mlfab-run", everybody)
        write("\x1a")
        wait_until(lambda: all(run_test.state(one) == "T" for one in everybody), "all stop")
        write("fg\n")
        wait_until(lambda: all(run_test.state(one) != "T" for one in everybody), "all go on")
        send(launcher, signal.SIGTERM)
        shows("[worker 0] saved", "[worker 1] saved")
        wait_until(lambda: not is_alive(launcher), "it ends")  # until then it reads what is typed, for worker 0
        write("echo ended with $?.\n")
        shows("ended with 0.")
    finally:
        send(pid, signal.SIGKILL)
        os.close(terminal)
        os.waitpid(pid, 0)


# ---- addresses and generations

def test_the_name_of_rank_0():
    """It may have several addresses, as localhost has."""
    result = finish(start(RUN, "-n", 2, "--max-workers", 2, helper("probe"), env=clean_environment(
        MLFAB_COORDINATOR="tcp:localhost:%d" % free_port(), MLFAB_KEY=KEY, MLFAB_TIMEOUT_MS=60000)))
    expect(result.code == 0 and result.out.count("barrier OK") == 2, "all meet", result)


def test_a_key_file_of_root_and_a_range_of_ports():
    """The run is another user's, who may read the file through a group. The first ports are taken."""
    with tempfile.TemporaryDirectory() as folder:
        who, (launcher, program) = unprivileged(folder, RUN, helper("probe"))
        key = os.path.join(folder, "key")
        with open(key, "w", encoding="ascii") as file:
            file.write(KEY + "\n")
        os.chmod(key, 0o440 if who else 0o400)
        if who:
            os.chown(key, 0, 54321)
            who["extra_groups"] = [54321]
        with startup_test.taken_range(4) as (first, _):
            result = finish(start(launcher, "-n", 2, "--max-workers", 2, program, env=clean_environment(
                MLFAB_COORDINATOR="tcp:127.0.0.1:%d-%d" % (first, first + 3), MLFAB_KEY_FILE=key, MLFAB_TIMEOUT_MS=60000), **who))
        expect(result.code == 0 and result.out.count("barrier OK") == 2, "all meet", result)
        expect(KEY not in result.out + result.err, "the key is told nowhere", result)


def generation(at, count, rank, **more):
    return start(helper("stepper"), 100, 400, 0, 10, env=clean_environment(
        MLFAB_COORDINATOR=at, MLFAB_KEY=KEY, MLFAB_WORKERS=count, MLFAB_RANK=rank, MLFAB_TIMEOUT_MS=20000, **more))


def test_a_new_generation_beside_the_old_one():
    """With other ranks, at the same address. It trains by itself, or says why it does not; the old one is not disturbed."""
    at = "tcp:127.0.0.1:%d" % free_port()
    old = [generation(at, 3, rank) for rank in range(3)]
    new = []
    try:
        expect(old[0].stdout.readline() == "began\n", "the old one trains")
        new = [generation(at, 2, rank) for rank in range(2)]
        results = [finish(process) for process in new]
        for rank, result in enumerate(results):
            expect(result.code == 0 or re.search(r"ADDRESS_IN_USE|WORLD|JOB|GENERATION|TIMEOUT", result.err),
                   "new rank %d says why it ends" % rank, result)
        expect(len({result.code for result in results}) == 1, "both do the same", results)
        for rank, process in enumerate(old):
            result = finish(process)
            expect(result.code == 0, "old rank %d ends well" % rank, result)
    finally:
        end(*old, *new)


@cases("", "--tcp")
def test_files_are_limited(option):
    """ulimit -f, as a job manager may set it: shared memory cannot be made. The run ends well, and a line of each node at most
    names the reason."""
    result = finish(start("sh", "-c", 'ulimit -f 64; exec "$@"', "sh", RUN, "-n", 2, "-s", 1, *option.split(), "--timeout", 60,
                          helper("stepper"), 300000, 20))
    expect(result.code == 0, "it ends well", result)
    lines = [line for line in result.err.splitlines() if "shared memory" in line or "shm" in line]
    expect(len(lines) == len({line.split("]")[0] for line in lines}), "one line a node at most", result)


# ---- scenes of other scripts

@cases("SIGTERM to all", "signals that end nothing", "workers join a loop", "decimal commas", "links in a shared directory",
       "a missing directory of checkpoints", "wrong modes of a key file")
def test_elsewhere(scene):
    {"SIGTERM to all": lambda: run_test.test_helpers_outlive_the_workers("-s", 1, "--replicas"),
     "signals that end nothing": lambda: [run_test.test_signals_that_end_nothing(name) for name in ("HUP", "USR1", "USR2")],
     "workers join a loop": lambda: growth_test.test_workers_join_a_loop("tcp", "bsp"),
     "decimal commas": locale_test.test_a_locale_with_decimal_commas,
     "links in a shared directory": lambda: [telemetry_test.test_links_of_others_lead_nowhere(kind) for kind in ("soft", "hard")],
     "a missing directory of checkpoints": checkpoint_test.test_no_directory,
     "wrong modes of a key file": startup_test.test_a_key_file_of_root}[scene]()


if __name__ == "__main__":
    main(globals(), jobs=4)
