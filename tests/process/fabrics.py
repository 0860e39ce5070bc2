"""Shared by the tests that kill and stop processes: runs of mlfab-run that are watched, what workers of servers with replicas
count (replica_worker.c), and processes of a fabric that are started one by one."""
import os
import re
import signal
import struct
import tempfile
import threading
import time

from process import (KEY, RUN, address, children, clean_environment, end, expect, expect_nothing_left, helper, send,
                     shared_memory_names, start, wait_until, without_pauses)

BEAT = 0.2  # seconds; a server with replicas is dead if no copy serves for 20 heartbeats
WORDS = ("control", "pid", "lives", "started_durable", "done_durable", "started_applied", "done_applied", "lost",
         "last_start", "last_done", "stopped", "sums", "expired")
STOP, READ = 1, 2


class Watched:
    """One mlfab-run. Threads read its outputs: each line of a rank's goes to said()."""

    def __init__(self, *arguments, **settings):
        self.errors = []
        self.process = start(RUN, *arguments, env=clean_environment(**settings))
        self.threads = [threading.Thread(target=read, daemon=True) for read in (self.read, self.read_errors)]
        for thread in self.threads:
            thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self.ended():
            for pid in self.processes().values():
                send(pid, signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(20)
            except Exception:  # it hangs
                self.process.kill()
                self.process.wait()
        self.join()

    def read(self):
        for line in self.process.stdout:
            match = re.match(r"\[(\w+) (\d+)\] (\w+) ?(.*)", line)
            if match:
                self.said(match[1], int(match[2]), match[3], match[4])

    def read_errors(self):
        for line in self.process.stderr:
            if without_pauses(line):
                self.errors.append(line.rstrip())

    def said(self, role, rank, word, rest):
        pass

    def told(self):
        """The last lines, for a failure."""
        return "\n".join(self.errors[-80:])

    def lines(self):
        """All lines: a quick machine may write hundreds before a test looks."""
        return "\n".join(self.errors)

    def join(self):
        for thread in self.threads:
            thread.join(10)

    def ended(self):
        return self.process.poll() is not None

    def until(self, condition, what):
        """Waits for what the run is to do while it goes on."""
        wait_until(lambda: condition() or self.ended(), lambda: "%s\n%s" % (what, self.told()))
        if self.ended():
            self.join()
        expect(not self.ended(), "the run ended before: %s" % what, self.told())

    def until_end(self, status=0):
        wait_until(self.ended, lambda: "all end\n" + self.told())
        self.join()
        expect(status is None or self.process.returncode == status, "exit status %s" % self.process.returncode, self.told())

    def processes(self):
        return children(self.process.pid)


class Counters:
    """The counters of one worker (replica_worker.c). They are there before its process, and survive it."""

    def __init__(self, folder, rank):
        self.file = os.open("%s/%d" % (folder, rank), os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self.file, 8 * len(WORDS))

    def __getattr__(self, name):
        at = WORDS.index(name)
        return struct.unpack("Q", os.pread(self.file, 8, 8 * at))[0]

    def tell(self, control):
        os.pwrite(self.file, struct.pack("Q", control), 0)

    def close(self):
        os.close(self.file)


class Group(Watched):
    """A run with replicas, whose workers push and count until they are told to stop. It leaves nothing in /dev/shm."""

    def __init__(self, *options, workers=2, servers=1, count=0, collective=False, paced=True, **settings):
        count = count or (100 if servers == 1 else 4000)  # a small tensor is not cut
        self.workers, self.servers, self.count = workers, servers, count
        self.before, self.folder = shared_memory_names(), tempfile.TemporaryDirectory()
        self.counters = [Counters(self.folder.name, rank) for rank in range(workers)]
        self.finals, self.killed = [], {}  # killed: by name, processes that were replaced
        settings.setdefault("MLFAB_HEARTBEAT_MS", int(BEAT * 1000))
        settings.setdefault("MLFAB_TIMEOUT_MS", 60000)
        self.beat = settings["MLFAB_HEARTBEAT_MS"] / 1000
        super().__init__("-n", workers, "-s", servers, "--replicas", "--timeout", 400, *options, helper("replica_worker"),
                         self.folder.name, count, *["collective"] * collective, *["paced"] * paced, **settings)

    def __exit__(self, kind, *_):
        super().__exit__()
        for counters in self.counters:
            counters.close()
        self.folder.cleanup()
        if not kind:
            expect_nothing_left(self.before)

    def said(self, role, rank, word, rest):
        if word == "final":
            of, *values = rest.split()
            self.finals.append((rank, int(of), tuple(map(float, values))))

    def told(self):
        return "\n".join(["%s" % [(c.started_durable, c.done_durable, c.started_applied, c.done_applied, c.lost)
                                  for c in self.counters], "finals %s" % self.finals, super().told()])

    def serves(self, more=3):
        """Every worker has pushed since."""
        then = [c.done_applied for c in self.counters]
        self.until(lambda: all(c.done_applied >= t + more for c, t in zip(self.counters, then)), "applied pushes")

    def in_sync(self, more=3):
        """Durable pushes go on: all copies are there."""
        then = [c.done_durable for c in self.counters]
        self.until(lambda: all(c.done_durable >= t + more for c, t in zip(self.counters, then)), "durable pushes")

    def kill(self, *names, number=signal.SIGKILL):
        """Returns the time (CLOCK_MONOTONIC, ns), and the pids of before."""
        before = self.processes()
        pids = [before[name] for name in names]
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        for pid in pids:
            send(pid, number)
        return now, pids

    def serves_after(self, when):
        """How many heartbeats after `when` a push was done at every worker that had begun since."""
        self.until(lambda: self.served_after(when), "pushes begin and end")
        return self.served_after(when)

    def served_after(self, when):
        """The same so far, or None. Later pushes count too, so call it again and again."""
        done = [(c.last_done - when) / (self.beat * 1e9) for c in self.counters if c.last_start >= when]
        return max(done) if len(done) == self.workers else None

    def votes(self, name):
        """How often a process of this name has begun to vote, of all its shards: it has read what it had stored, or has
        been told what it had forgotten."""
        return len([line for line in self.errors
                    if line.startswith("[%s %d] # votes: " % name) and line.endswith("it votes from now on")])

    def serving(self, server):
        """The name of the copy that serves a shard, by what copies have said: it takes --verbose to see that."""
        said = [re.match(r"\[(server|replica) %d\] # server %d: it serves$" % (server, server), line)
                for line in self.errors]
        return [match.group(1) for match in said if match][-1], server

    def replaced(self, *names, pids=()):
        """mlfab-run has started these again, and they vote again: it takes --verbose to see that."""
        self.until(lambda: all(self.processes().get(name) not in (None, pid) for name, pid in zip(names, pids)),
                   "%s are started again" % (names,))
        for name in names:
            if name[0] == "worker":
                continue
            self.killed[name] = self.killed.get(name, 0) + 1
            want = self.killed[name] * (self.servers if name[0] == "scheduler" else 1)
            self.until(lambda n=name, v=want: self.votes(n) >= v, "%s %d votes again" % name)

    def end(self):
        """Stops the workers, and waits until all have ended with 0."""
        for c in self.counters:
            c.tell(STOP)
        self.until(lambda: all(c.stopped for c in self.counters), "all workers have stopped")
        for c in self.counters:
            c.tell(READ)
        self.until_end()

    def check(self, killed_workers=False, bound=None):
        """Compares the model with the answers that the workers got. Returns how many applied updates were lost. bound: the
        largest norm of the updates that are lost when another copy begins to serve. A busy machine changes copies more often
        than the test kills them, so the changes are counted in the log (--verbose)."""
        expect(len(self.finals) == self.workers * self.workers, "every worker has read the model", self.told())
        model = {}
        for _, rank, values in self.finals:
            expect(model.setdefault(rank, values) == values, "all read the same", self.told())
        lost, square = 0, 0.0
        for rank, c in enumerate(self.counters):
            least, most, applied_least, applied_most = model[rank]
            expect(c.done_durable <= least and most <= c.started_durable,
                   "worker %d: no durable update is lost, none is applied twice" % rank, self.told())
            expect(applied_most <= c.started_applied, "worker %d: none is applied twice" % rank, self.told())
            missing = c.done_applied - applied_least
            if not killed_workers:
                expect(least == most == c.done_durable, "worker %d: durable ones" % rank, self.told())
                if self.servers == 1:
                    expect(missing == c.lost, "worker %d: %g are missing, stats.updates_lost is %d"
                           % (rank, missing, c.lost), self.told())
                expect(missing <= c.lost, "worker %d: more is lost than it was told" % rank, self.told())
            lost += max(0, missing)
            square += self.count * max(0, missing) ** 2
        if bound is not None:
            times = sum(bool(re.match(r"\[\w+ \d+\] # server \d+: it serves$", line)) for line in self.errors) - self.servers
            expect(square ** 0.5 <= bound * times, "a loss of norm %g in %d times" % (square ** 0.5, times), self.told())
        return lost


class Cast:
    """The processes of one fabric, started one by one: nobody starts them again. Its folder has the workers' counters."""

    def __init__(self, workers=1, servers=1, transport="tcp", **settings):
        self.transport = transport
        self.coordinator = address(transport) + "," + address(transport)
        self.settings = dict({"MLFAB_COORDINATOR": self.coordinator, "MLFAB_JOB": "cast", "MLFAB_KEY": KEY,
                              "MLFAB_WORKERS": workers, "MLFAB_SERVERS": servers, "MLFAB_DEDICATED": 1,
                              "MLFAB_REPLICAS": 1, "MLFAB_SCHEDULER": "own", "MLFAB_TRANSPORT": transport,
                              "MLFAB_HEARTBEAT_MS": int(BEAT * 1000), "MLFAB_TIMEOUT_MS": 60000}, **settings)
        self.all, self.there, self.folder = [], {}, tempfile.TemporaryDirectory()
        self.counters = Counters(self.folder.name, 0)

    def start(self, role, rank=0, *program, **more):
        program = program or (RUN, "--mlfab-run-server", "quiet")
        process = start(*program, env=clean_environment(**dict(self.settings, MLFAB_ROLE=role, MLFAB_RANK=rank,
                                                               **more)))
        self.all.append(process)
        self.there[role, rank] = process
        return process

    def work(self, *words, **more):
        """Starts server, replica, scheduler and worker, as far as they are not there."""
        for server in range(self.settings["MLFAB_SERVERS"]):
            for name in ("server", server), ("replica", server), ("scheduler", 0):
                if name not in self.there:
                    self.start(*name)
        return self.start("worker", 0, helper("replica_worker"), self.folder.name, 100, "paced", *words, **more)

    def until(self, condition, what):
        """Waits for what is to come true while the worker works."""
        worker = self.there["worker", 0]
        wait_until(lambda: condition() or worker.poll() is not None, what)
        expect(worker.poll() is None, what, worker.communicate() if worker.poll() is not None else "")

    def in_sync(self, more=3):
        done = self.counters.done_durable
        self.until(lambda: self.counters.done_durable > done + more, "durable pushes go on")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        end(*self.all)
        self.counters.close()
        self.folder.cleanup()
