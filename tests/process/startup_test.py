#!/usr/bin/env python3
"""Mistakes at startup, with real processes: each gets its own error, which names the rank that made it;
strangers do not disturb; and no process waits longer than the deadline."""
import contextlib
import ctypes
import errno
import os
import platform
import re
import resource
import socket
import struct
import subprocess
import tempfile
import threading
import time

from process import (BUILD, RUN, Skip, address, cases, claim_port, clean_environment, end, executable, expect, finish, finish_all, free_port, helper, launch,
                     main, start, tell, wait_until, within)


ONE, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2
KEYS = {"one": ONE, "other": OTHER, "none": None}


def probe_copy(folder):
    with open(helper("probe"), "rb") as file:
        return executable(folder + "/probe", file.read())


# A sanitizer sees the code and not the settings, and makes each start of a process cost some 0.2 s of a processor. So each way
# through start-up runs once over TCP and once over shared memory there. A Unix socket differs in its address alone.
SANITIZED = os.path.basename(BUILD) in ("asan", "tsan")


def cases_or(few, *arguments):
    """Cases of which a sanitizer sees the first `few`."""
    return cases(*arguments[:few] if SANITIZED else arguments)


over_all = cases_or(2, "tcp", "shm", "unix")


def place(at, **more):
    """The environment of one rank; workers=2 with one dedicated server unless said otherwise."""
    values = dict(COORDINATOR=at, WORKERS=2, SERVERS=1, DEDICATED=1, RANK=0, ROLE="worker",
                  JOB="startup", TIMEOUT_MS=60000)
    if at.startswith("tcp:127."):
        values["KEY"] = ONE  # else TCP is refused
    values.update(more)
    values = {k: v for k, v in values.items() if v is not None}
    return clean_environment(**{"MLFAB_" + k: v for k, v in values.items()})


def probe(at, *arguments, **more):
    return start(helper("probe"), *arguments, env=place(at, **more))


def server(at, **more):
    return probe(at, ROLE="server", **more)


def steps(result):
    """The output of a probe: step -> (error name, side, rank, text)."""
    told = {}
    for line in result.out.splitlines():
        match = re.match(r"(\w+) (\w+) (server|worker) (-?\d+) ?(.*)", line)
        if match:
            told[match.group(1)] = (match.group(2), match.group(3), int(match.group(4)), match.group(5))
    return told


def fails(process, error, *texts, step="open"):
    """It ends, and the step has this error, whose text has these texts."""
    result = finish(process)
    told = steps(result).get(step, ("nothing", "", 0, ""))
    expect(re.fullmatch("MLFAB_ERR_(%s)" % error, told[0]), "the error is " + error, result)
    for text in texts:
        expect(text in told[3], "the text tells '%s'" % text, result)
    expect(ONE not in result.out + result.err and OTHER not in result.out + result.err, "a key is told", result)
    return told


def end_well(*processes):
    for result in finish_all(*processes):
        expect(result.code == 0, "everybody opens and ends well", result)


@over_all
def test_all_come_together(transport):
    at = address(transport)
    end_well(server(at), probe(at), probe(at, RANK=1))


@over_all
def test_two_ranks_with_one_number(transport):
    """The first has five heartbeats to show that it lives: more than a busy machine makes of them."""
    at = address(transport)
    processes = [server(at, HEARTBEAT_MS=10000), probe(at, HEARTBEAT_MS=10000), probe(at, HEARTBEAT_MS=10000)]
    wait_until(lambda: any(p.poll() is not None for p in processes), "one is refused")
    second = [p for p in processes if p.poll() is not None][0]
    fails(second, "RANK_TAKEN", "0")
    expect(second != processes[0] and sum(p.poll() is not None for p in processes) == 1, "it is one of the two")
    end(*processes)


def test_a_rank_outside_the_world():
    at = address("tcp")
    serving = server(at)
    fails(probe(at, RANK=2), "RANK_RANGE", "2")
    end(serving)


@cases_or(5, *((transport, *other) for transport in ("tcp", "shm", "unix") for other in (
    ("WORKERS", 3, "3 at worker 1, 2 at server 0"), ("WORKERS_MAX", 4, "4 at worker 1, 2 at server 0"),
    ("SERVERS", 2, "2 at worker 1, 1 at server 0"), ("SCHEDULER", "beside", "beside at worker 1, none at server 0"))))
@within(4000)
def test_worlds_that_disagree(transport, setting, other, here, ms):
    """Each of them names the setting, both values and both ranks; so does server 0 when it waits in vain."""
    at, there = address(transport), "MLFAB_" + setting
    serving = server(at, TIMEOUT_MS=ms, LOG="warn")
    try:
        fails(probe(at, RANK=1, **{setting: other}), "WORLD", there, here)
        result = finish(serving)
        told = steps(result)["open"]
        expect(told[0] == "MLFAB_ERR_TIMEOUT" and there in told[3] and here in told[3], "server 0 tells it, too", result)
        expect(here in result.err, "and logs it at once", result)
    finally:
        end(serving)


@over_all
def test_another_job(transport):
    at = address(transport)
    serving = server(at, JOB="mine")
    fails(probe(at, JOB="yours"), "JOB")
    still = serving.poll() is None
    end(serving)
    expect(still, "the server goes on")


@cases(("one", "none", "the caller has none"), ("none", "one", "this job has none"), ("one", "other", "not this job's"))
@within(4000)
def test_keys_that_differ(here, there, why, ms):
    """Both sides report the error, and neither prints a key."""
    at = address("tcp")
    serving = server(at, TIMEOUT_MS=ms, KEY=KEYS[here], ALLOW_INSECURE=1)
    try:
        fails(probe(at, KEY=KEYS[there], ALLOW_INSECURE=1), "JOB", why, "MLFAB_KEY")
        fails(serving, "TIMEOUT|JOB", why)
    finally:
        end(serving)


def test_one_key():
    at = address("tcp")
    end_well(server(at, KEY=ONE), probe(at, KEY=ONE), probe(at, RANK=1, KEY=ONE))


def test_key_files():
    """A file that others may read, or that is no key, is refused before anything is opened."""
    with tempfile.TemporaryDirectory() as folder:
        def file(name, text, mode=0o600):
            path = os.path.join(folder, name)
            with open(path, "wb") as out:
                out.write(text)
            os.chmod(path, mode)
            return path

        good, other = file("good", ONE.encode() + b"\n"), file("other", OTHER.encode())
        both = file("both", OTHER.encode() + b"\n" + ONE.encode() + b"\n")
        fifo, link = os.path.join(folder, "fifo"), os.path.join(folder, "link")
        os.mkfifo(fifo, 0o600)
        os.symlink(good, link)
        bad = [(file("group", ONE.encode(), 0o660), "others"),
               (file("world", ONE.encode(), 0o604), "others"),
               (file("empty", b""), "empty"), (file("line", b"\n"), "empty"),
               (file("short", b"fifteen-letters"), "shorter than 16"),
               (file("blank", b"sixteen letters and"), "blank"),
               (file("binary", bytes(range(1, 33))), "shorter than 16"),
               (file("zero", ONE.encode() + b"\0" + ONE.encode()), "not a text"),
               (file("long", b"a" * 5000), "longer"), (file("three", b"%s\n" % ONE.encode() * 3), "two keys"),
               (os.path.join(folder, "none"), "No such file"), (folder, "not a regular file"),
               (fifo, "not a regular file"), ("/dev/zero", "not a regular file")]
        if os.geteuid() == 0:
            bad.append((file("theirs", ONE.encode()), "another user"))
            os.chown(bad[-1][0], 65534, 65534)
        for path, why in bad:
            fails(probe(address("tcp"), KEY_FILE=path, TIMEOUT_MS=2000), "CONFIG", path, why)
        # One after the other the processes get the new key; the file counts before the variable.
        for files in ((good, link, good), (both, good, other), (good, both, both)):
            at = address("tcp")
            end_well(server(at, KEY_FILE=files[0]), probe(at, KEY_FILE=files[1], KEY=OTHER),
                     probe(at, RANK=1, KEY_FILE=files[2]))


def test_a_key_file_of_root():
    """As in a volume of secrets: the group of the process may read it. Other users may not, nor may the group change it."""
    plain_only()
    if os.geteuid() != 0:
        raise Skip("needs root, to be two users")
    user, group = 65534, 54321
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        copy, path = probe_copy(folder), os.path.join(folder, "key")
        with open(path, "w", encoding="ascii") as out:
            out.write(ONE)

        def theirs(owner, mode, **more):
            os.chown(path, owner, group)
            os.chmod(path, mode)
            return start(copy, env=place(address("tcp"), KEY=None, KEY_FILE=path, WORKERS=1, SERVERS=None, DEDICATED=None,
                                         **more), cwd=folder, user=user, group=group, extra_groups=[])

        for mode in (0o640, 0o440, 0o040):
            end_well(theirs(0, mode))
        for owner, mode, why in ((0, 0o644, "others"), (0, 0o660, "others"), (0, 0o650, "others"), (0, 0o641, "others"),
                                 (user, 0o640, "others"), (user + 1, 0o640, "another user"), (0, 0o600, "Permission denied")):
            fails(theirs(owner, mode), "CONFIG", path, why)
        os.chown(path, 0, 0)  # and root itself, whose group is its own
        os.chmod(path, 0o440)
        end_well(probe(address("tcp"), KEY=None, KEY_FILE=path, WORKERS=1, SERVERS=None, DEDICATED=None))


@cases(("unix", [dict(KEY=ONE)], "TIMEOUT", "its socket is root's: root refuses other users"),
       ("tcp", [dict(KEY=None), dict(KEY=OTHER)], "JOB", "MLFAB_KEY"))
@within(3000)
def test_another_user_of_the_host(transport, strangers, error, text, ms):
    """It cannot use a Unix socket, whatever it knows; the rank stays free. Over the loopback everybody can connect; without
    the key that is all."""
    plain_only()
    if os.geteuid() != 0:
        raise Skip("needs root, to be two users")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        at = address(transport)
        copy = probe_copy(folder)
        processes = [server(at, KEY=ONE, TIMEOUT_MS=200000), probe(at, KEY=ONE, TIMEOUT_MS=200000)]
        wait_until(lambda: transport == "tcp" or is_bound(at), "the server listens")
        for more in strangers:
            fails(start(copy, env=place(at, RANK=1, ALLOW_INSECURE=1, TIMEOUT_MS=ms if error == "TIMEOUT" else 60000, **more),
                        cwd=folder, user=65534), error, text)
        end_well(*processes, probe(at, RANK=1, KEY=ONE))


def deny(*names):
    """A filter of system calls, as a container has one, that answers these with EPERM."""
    numbers = {"memfd_create": 319, "eventfd2": 290}
    if platform.machine() != "x86_64":
        raise Skip("the numbers of system calls are those of x86-64")
    code = [(0x20, 0, 0, 0)]  # load the number
    for name in names:
        code += [(0x15, 0, 1, numbers[name]), (0x06, 0, 0, 0x50000 | errno.EPERM)]
    code.append((0x06, 0, 0, 0x7fff0000))
    program = b"".join(struct.pack("=HBBI", *one) for one in code)
    libc = ctypes.CDLL(None, use_errno=True)

    def install():
        text = ctypes.create_string_buffer(program, len(program))
        filters = struct.pack("@HxxxxxxP", len(code), ctypes.addressof(text))
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        if libc.prctl(22, 2, filters, 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
            os._exit(77)

    trial = subprocess.run(["true"], preexec_fn=install, check=False)
    if trial.returncode == 77:
        raise Skip("the system takes no filter of system calls")
    return dict(preexec_fn=install)


def small_files(bytes_):
    """Memory that is shared is a file, and files have a limit."""
    return dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, bytes_)))


def no_proc():
    if os.geteuid() != 0:
        raise Skip("needs root, to hide /proc")
    return dict(prefix=["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"])


def another_user():
    if os.geteuid() != 0:
        raise Skip("needs root, to be two users")
    return dict(user=65534, group=65534, extra_groups=[])


MISSING = dict(memfd=lambda: deny("memfd_create"), eventfd=lambda: deny("eventfd2"), both=lambda: deny("memfd_create", "eventfd2"),
               no_file=lambda: small_files(0), small_file=lambda: small_files(1 << 20), no_proc=no_proc, another_user=another_user)


SAYS_WHY = dict(memfd="this node does without shm: ", eventfd="this node does without shm: ", both="this node does without shm: ",
                no_file="this node does without shm: ", small_file="File too large", no_proc="does not tell which host",
                another_user="nobody of this user listens")


def plain_only():
    if SANITIZED:
        raise Skip("it is about rights and limits; a sanitizer itself needs /proc, files and the rights of its user")


@cases(*((name, rank, at) for name in MISSING for rank in (0, 1) for at in ("tcp", "unix")
         if (name, at) != ("another_user", "unix")))
def test_without_shared_memory(name, rank, at):
    """One of the ranks cannot use it. All come together over TCP or a Unix socket, and a line says why."""
    plain_only()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        at, copy, processes = address(at), probe_copy(folder), []
        for r in (0, 1):
            how = MISSING[name]() if r == rank else dict(user=65533) if name == "another_user" else {}
            processes.append(start(*how.pop("prefix", []), copy, cwd=folder, env=place(
                at, RANK=r, KEY=ONE, DEDICATED=None, SERVERS=1, LOG="warn"), **how))
        said = ""
        for result in finish_all(*processes):
            expect(result.code == 0, "everybody opens and ends well", result)
            said += result.err
        # A rank that may not make large files can still accept those of the other one.
        expect((SAYS_WHY[name] in said or (name, rank) == ("small_file", 0)) and said.count("warn") <= 2, "a line says why", said)


def is_bound(at):
    with open("/proc/net/unix", encoding="ascii") as names:
        return at.replace("unix:", "") + "\n" in names.read()


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        fails(server("tcp:127.0.0.1:%d" % taken.getsockname()[1]), "ADDRESS_IN_USE")
    at = address("unix")
    first = server(at)
    wait_until(lambda: is_bound(at), "the first server listens")
    fails(probe(at, RANK=7), "RANK_RANGE")
    fails(server(at), "ADDRESS_IN_USE")
    end(first)


def free_range(count):
    """A first port that is followed by free ones."""
    while True:
        first = free_port()
        if all(claim_port(port) for port in range(first + 1, first + count)):
            return first


@contextlib.contextmanager
def taken_range(count):
    """The first port of a range whose first two are taken, and their listeners. Another program may take a port at any time."""
    while True:
        first = free_range(count)
        with contextlib.ExitStack() as stack:
            try:
                listeners = [stack.enter_context(socket.create_server(("127.0.0.1", first + i))) for i in (0, 1)]
            except OSError as error:
                tell(error)
                continue
            yield first, listeners
            return


@cases_or(1, {"KEY": ONE}, {"ALLOW_INSECURE": 1, "KEY": None})
def test_a_range_of_ports(more):
    """Behind a program that says nothing, one that says something else, and the server of another job."""

    def talk(listener):
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.sendall(b"SSH-2.0-another\r\n")

    others = dict(more, JOB="other", KEY=more["KEY"] and OTHER)
    with taken_range(6) as (first, (_, chatty)):
        at = "tcp:127.0.0.1:%d-%d" % (first, first + 5)
        threading.Thread(target=talk, args=(chatty,), daemon=True).start()
        elsewhere = server(at, **others)
        wait_until(lambda: listens(first + 2), "the other job listens")
        processes = [server(at, **more), probe(at, **more), probe(at, RANK=1, **more)]
        end_well(*processes)
        expect(elsewhere.poll() is None, "the other job still waits")
        end_well(elsewhere, probe(at, **others), probe(at, RANK=1, **others))


def listens(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


@cases(())
@within(3000)
def test_a_range_of_ports_in_vain(ms):
    """All are taken; or the job is not there, and the last reason is told; or it is no range."""
    with taken_range(2) as (first, _):
        at = "tcp:127.0.0.1:%d-%d" % (first, first + 1)
        fails(server(at), "ADDRESS_IN_USE", at)
    elsewhere = server(at, JOB="other")
    try:
        fails(probe(at, TIMEOUT_MS=ms), "TIMEOUT", at, "127.0.0.1:%d: the jobs have different names" % first)
    finally:
        end(elsewhere)
    fails(server("tcp:127.0.0.1:%d-%d" % (first + 1, first)), "ADDRESS", "does not parse")


@cases_or(1, (ONE, OTHER, "not this job's (MLFAB_KEY)"), (ONE, None, "the caller has none (MLFAB_KEY)"))
def test_a_range_of_ports_and_a_wrong_key(here, there, why):
    """It is this job's server 0: the error comes at once, not at the deadline."""
    first = free_range(3)
    at = "tcp:127.0.0.1:%d-%d" % (first, first + 2)
    serving = server(at, KEY=here, ALLOW_INSECURE=1)
    fails(probe(at, KEY=there, ALLOW_INSECURE=1), "JOB", why)
    expect(serving.poll() is None, "the server waits for its own ranks")
    end(serving)


def test_a_host_that_does_not_resolve():
    """It may come to be known until the deadline."""
    fails(probe("tcp:no-such-host.invalid:1234", ALLOW_INSECURE=1, TIMEOUT_MS=2000), "TIMEOUT", "no-such-host.invalid")


@cases((0, "ADDRESS"), (1, "TIMEOUT"))
def test_a_master_that_does_not_resolve(rank, error):
    """Rank 0 cannot listen there, the others do not reach it; all wait until the deadline, and name it."""
    fails(start(helper("probe"), env=clean_environment(
        RANK=rank, WORLD_SIZE=2, MASTER_ADDR="no-such-host.invalid", MASTER_PORT=1234, MLFAB_KEY=ONE,
        MLFAB_TIMEOUT_MS=2000)), error, "tcp:no-such-host.invalid:1234")


def test_an_address_that_does_not_parse():
    """Of a worker and of server 0, which listens there."""
    for at, why in (("tcp:127.0.0.1", "has no port"), ("tcp:127.0.0.1:", "has no port"), ("tcp:[::1]", "has no port"),
                    ("tcp:127.0.0.1:99999", "1..65535"), ("pigeon:coop", ""), ("tcp:", "does not parse")):
        fails(probe(at, TIMEOUT_MS=5000), "ADDRESS|CONFIG", why)
        if not SANITIZED:
            fails(server(at, TIMEOUT_MS=5000), "ADDRESS|CONFIG", why)


@cases((b"HTTP/1.0 400 Bad request syntax\r\nServer: x\r\n\r\n", 'another program: it says "HTTP/1.0 400 Bad request syntax"', True),
       (b"SSH-2.0-another\r\n", 'another program: it says "SSH-2.0-another"', False),
       (b"\x00\xff" * 5, 'another program: it says "."', True), (b"", "", True),
       (b"", "said nothing; it may be another program", False))
@within(4000)
def test_another_program_at_the_address(says, why, closes, ms):
    """It is named, and called ever less often."""
    held = []

    def talk(listener):
        while True:
            try:
                held.append(listener.accept()[0])
                held[-1].sendall(says)
                if closes:
                    held[-1].close()
            except OSError:
                return

    why = why.replace('"."', '"' + "." * 10 + '"')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=talk, args=(listener,), daemon=True).start()
        at = "tcp:127.0.0.1:%d" % listener.getsockname()[1]
        sure = "another program answers at %s (" % at if says or closes else ""
        fails(probe(at, TIMEOUT_MS=ms), "TIMEOUT", why, sure)
        expect(len(held) <= 8 + ms / 1000, "it is called %d times in %d ms" % (len(held), ms))


@cases("tcp", "shm")
@within(4000)
def test_too_few_descriptors(transport, ms):
    """The process that runs out of them says so."""
    at = address(transport)
    serving = start("sh", "-c", "ulimit -n %d; exec %s" % (9 if transport == "shm" else 7, helper("probe")),
                    env=place(at, ROLE="server", TIMEOUT_MS=ms, TRANSPORT=transport))
    others = [probe(at, TIMEOUT_MS=100000), probe(at, RANK=1, TIMEOUT_MS=100000)]
    try:
        fails(serving, "TIMEOUT", "no descriptors left", "ulimit -n is ")
    finally:
        end(*others)


@cases(())
@within(2000)
def test_no_route(ms):
    """In a network without interfaces."""
    if os.geteuid() != 0:
        raise Skip("needs root, for a network of its own")
    nowhere = start("unshare", "--net", helper("probe"),
                    env=place("tcp:192.0.2.1:1234", ALLOW_INSECURE=1, KEY=ONE, TRANSPORT="tcp", TIMEOUT_MS=ms))
    fails(nowhere, "TIMEOUT", "192.0.2.1:1234: Network is unreachable")


def test_tcp_needs_a_key():
    """Or allow_insecure. Without either, only processes of this user are reached, over their own sockets."""
    for more in ({}, {"ROLE": "server"}):
        fails(probe(address("tcp"), KEY=None, TIMEOUT_MS=5000, **more), "INSECURE", "MLFAB_KEY")
    at = address("unix")
    end_well(server(at, TRANSPORT="tcp"), probe(at, TRANSPORT="tcp"), probe(at, RANK=1, TRANSPORT="tcp"))


def launched(rank, variables=("RANK", "WORLD_SIZE"), **more):
    """One of two ranks, with the variables of a launcher."""
    return start(helper("probe"), env=clean_environment(**{variables[0]: rank, variables[1]: 2, "MLFAB_TIMEOUT_MS": 60000},
                                                        **more))


def test_a_launcher_on_one_host():
    """torchrun's variables are enough, without a key: the processes meet at a Unix socket."""
    for more in ({"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "this-host.invalid", "LOCAL_WORLD_SIZE": "2"}):
        port = free_port()
        end_well(*(launched(rank, MASTER_PORT=port, **more) for rank in (0, 1)))


def test_a_pipe_is_told():
    """mlfab-run wants to know whether a worker has opened: a byte in the pipe that it names when it
    opens, and when it closes, each with what follows the name. No other file is written to."""
    with tempfile.TemporaryDirectory() as folder:
        pipe, file = os.path.join(folder, "pipe"), os.path.join(folder, "file")
        os.mkfifo(pipe)
        with open(file, "w", encoding="ascii") as out:
            out.write("mine")
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        for at, place, told in ((dict(), "", b"oc"), (dict(MLFAB_RANK=1), "", b""),
                                (dict(MLFAB_WORKERS=1, MLFAB_RANK=0), " 0000012", b"o0000012c0000012")):
            result = finish(start(helper("probe"), env=clean_environment(_MLFAB_OPENED=pipe + place, **at)))
            expect((result.code == 0) == (told != b""), "it opens, or does not", result)
            expect(os.read(reader, 99) == told, "it tells that it has opened and closed", result)
        os.close(reader)
        for path in file, pipe, os.path.join(folder, "none"):  # nobody reads the pipe
            end_well(start(helper("probe"), env=clean_environment(_MLFAB_OPENED=path)))
        with open(file, encoding="ascii") as kept:
            expect(kept.read() == "mine", "a file stays as it is")
        expect(not os.path.exists(os.path.join(folder, "none")), "and none is made")


@cases("fit", "effective")
def test_a_checkpoint_directory_is_tried(user):
    """Rights of the effective user count. That a disk is full now is only logged."""
    plain_only()
    if os.geteuid() != 0:
        raise Skip("needs root, to be another user")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        copy, saves = probe_copy(folder), os.path.join(folder, "saves")
        os.mkdir(saves, 0o700)
        os.chown(saves, 65534, 65534)
        if user == "effective":  # a program with the bit s: its effective user is the owner
            os.chown(copy, 65534, 65534)
            os.chmod(copy, 0o4755)
            end_well(start(copy, cwd=folder, env=clean_environment(MLFAB_CHECKPOINT_DIR=saves), user=65533, group=65533, extra_groups=[]))
        else:
            fails(start(copy, cwd=folder, env=clean_environment(MLFAB_CHECKPOINT_DIR=saves), user=65533, group=65533, extra_groups=[]),
                  "CONFIG", saves, "Permission denied")
            full = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o nr_inodes=1 none "$0" && exec "$@"', saves]
            result = finish(start(*full, copy, env=clean_environment(MLFAB_CHECKPOINT_DIR=saves, MLFAB_LOG="warn")))
            expect(result.code == 0 and "cannot be written to now: No space left on device" in result.err, "a warning", result)


def generation(number, rank, at, *arguments, **more):
    """One of two ranks of a start of a job."""
    return start(helper("probe"), *arguments, env=clean_environment(**dict(dict(
        RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, GROUP_WORLD_SIZE=1, TORCHELASTIC_RUN_ID="none",
        TORCHELASTIC_RESTART_COUNT=number, MLFAB_TIMEOUT_MS=60000, **at), **more)))


def starts(transport):
    port = free_port()
    if transport == "unix":
        return dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    return dict(MLFAB_COORDINATOR="tcp:127.0.0.1:%d" % port, MLFAB_KEY=ONE)


BOTH = "of restart 0, and restart 1 is here"


@cases_or(1, "unix", "tcp")
def test_a_job_that_is_started_again(transport):
    """Ranks of the former start are still here. The one with the address ends when the new start calls it, and the new
    rank 0 binds until the address is free."""
    at = starts(transport)
    old = [generation(0, 0, at), generation(0, 1, at, 10 ** 6)]
    expect(old[0].stdout.readline().startswith("open OK"), "the former start opens")
    new = [generation(1, rank, at) for rank in (0, 1)]
    fails(old[0], "FENCED", BOTH, step="barrier")
    end_well(*new)
    end(old[1])


@cases_or(1, "unix", "tcp")
def test_a_start_that_is_late(transport):
    """A process of a former start meets the new one: it ends at once, and the new one does not notice."""
    at = starts(transport)
    new = generation(1, 0, at)
    fails(generation(0, 1, at), "FENCED", BOTH, "'torch-%d'" % at["MASTER_PORT"] if transport == "unix" else "'mlfab'")
    expect(new.poll() is None, "the new start waits for its own rank")
    end_well(new, generation(1, 1, at))


@cases_or(1, "unix", "tcp")
def test_a_former_start_ends(transport):
    """Server 0 of the former start waits for a rank, and the new start calls it."""
    at = starts(transport)
    old = generation(0, 0, at)
    new = generation(1, 1, at)
    fails(old, "FENCED", BOTH)
    end_well(generation(1, 0, at), new)


def test_jobs_without_a_name():
    """Two runs that a launcher calls 'none', at one range of ports: neither takes the other's ranks."""
    first = free_range(4)
    at = {"MLFAB_COORDINATOR": "tcp:127.0.0.1:%d-%d" % (first, first + 3), "MLFAB_KEY": ONE, "MASTER_ADDR": "127.0.0.1"}
    end_well(*(generation(0, rank, at, MASTER_PORT=port) for rank in (0, 1) for port in (29500, 29501)))


def test_two_jobs_at_one_port():
    """Two runs of a launcher that tells both of one port of this host."""
    at = starts("unix")
    end_well(*(generation(0, rank, at, TORCHELASTIC_RUN_ID=run) for rank in (0, 1) for run in ("one", "two")))


@cases_or(1, ("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"),
       ("SLURM_PROCID", "SLURM_NTASKS"))
def test_launchers_variables(*names):
    port = free_port()
    end_well(*(launched(rank, names, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, SLURM_STEP_ID=0) for rank in (0, 1)))


def test_a_world_of_one():
    """It needs nothing. Outside a step Slurm is not asked."""
    for more in ({}, dict(SLURM_PROCID=0, SLURM_NTASKS=2), dict(SLURM_PROCID=0, SLURM_NTASKS=2, SLURM_STEP_ID=4294967290)):
        end_well(start(helper("probe"), env=clean_environment(**more)))


def test_another_host_needs_allow_insecure():
    # 192.0.2.0/24 is reserved for documentation: no host answers, and nothing must be sent.
    fails(probe("tcp:192.0.2.1:1234", TIMEOUT_MS=5000), "INSECURE")


def test_variables_that_make_no_sense():
    for name, value in (("RANK", "first"), ("WORKERS", "0x"), ("ROLE", "king"),
                        ("TRANSPORT", "pigeon"), ("TIMEOUT_MS", "soon")):
        fails(probe(address("unix"), **{name: value}), "CONFIG", "MLFAB_" + name, value)


@over_all
@within(2000)
def test_a_missing_rank_is_named(transport, ms):
    at = address(transport)
    serving = server(at, TIMEOUT_MS=100000)
    try:
        text = fails(probe(at, RANK=0, TIMEOUT_MS=ms), "TIMEOUT")[3]
    finally:
        end(serving)
    expect(re.search(r"\b1\b", text), "names the missing rank", text)


@over_all
def test_no_server_at_all(transport):
    fails(probe(address(transport), TIMEOUT_MS=1500), "TIMEOUT")


@over_all
def test_a_server_killed_while_workers_wait(transport):
    at = address(transport)
    served, waiting, busy = server(at), probe(at, RANK=0), probe(at, 10 ** 6, RANK=1)
    line = waiting.stdout.readline()
    expect(line.startswith("open OK"), "opened", line)
    time.sleep(0.5)  # mostly it waits at the barrier by then; if not, the error is the same
    served.kill()
    told = fails(waiting, "PEER_DEAD", "server 0", step="barrier")
    end(served, busy)
    expect(told[1:3] == ("server", 0), "the blame", told)


@over_all
def test_a_worker_killed_while_another_waits_releases_the_barrier(transport):
    at = address(transport)
    served, waiting, busy = server(at), probe(at, RANK=0), probe(at, 10 ** 6, RANK=1)
    for process in waiting, busy:
        process.stdout.readline()
    busy.kill()
    result = finish(waiting)
    end(served, busy)
    expect(steps(result)["barrier"][0] == "OK", "without the dead one", result)


STRANGERS = [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00",
             b"\x00" * 64, b"\xff" * 4096, b"SSH-2.0-scan\r\n", b"MLFA", os.urandom(200)]


def test_strangers_do_not_disturb_start_up():
    port, held = free_port(), []
    at = "tcp:127.0.0.1:%d" % port
    processes = [server(at), probe(at, RANK=0)]

    def knock(bytes_):
        try:
            s = socket.create_connection(("127.0.0.1", port), timeout=20)
        except ConnectionRefusedError:
            return False
        try:
            s.sendall(bytes_)
        except OSError:
            pass
        held.append(s)
        return True

    wait_until(lambda: knock(b""), "the server listens")
    for bytes_ in STRANGERS * 3:
        knock(bytes_)
    for s in held[::2]:  # some hang up, others stay
        s.close()
    for result in finish_all(probe(at, RANK=1), *processes):
        expect(result.code == 0, "the fabric came together and ended well", result)
        for step, told in steps(result).items():
            expect(told[0] == "OK", step, result)
    for s in held:
        s.close()


@cases_or(4, *((option, servers) for servers in (2, 0, 1) for option in ("--tcp", "--shm", "--no-prefix")))
def test_mlfab_run_starts_a_fabric(option, servers):
    result = launch("-n", 3, "-s", servers, option, helper("probe"))
    expect(result.code == 0, "it ends well", result)
    expect(len(re.findall("barrier OK", result.out)) == 3, "all were at the barrier", result)


if __name__ == "__main__":
    main(globals(), jobs=8)  # most of them wait
