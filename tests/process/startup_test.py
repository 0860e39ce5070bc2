#!/usr/bin/env python3
"""Mistakes at startup, with real processes: each gets its own error, which names the rank that made it;
strangers do not disturb; and no process waits longer than the deadline."""
import os
import re
import shutil
import socket
import tempfile
import time

from process import (RUN, Skip, clean_environment, expect, finish, helper, main, start, wait_until)


ONE, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def place(port_or_address, **more):
    """The environment of one rank; workers=2 with one dedicated server unless said otherwise."""
    address = ("tcp:127.0.0.1:%d" % port_or_address if isinstance(port_or_address, int)
               else port_or_address)
    values = dict(COORDINATOR=address, WORKERS=2, SERVERS=1, DEDICATED=1, RANK=0, ROLE="worker",
                  JOB="startup", TIMEOUT_MS=15000)
    if address.startswith("tcp:127."):
        values["KEY"] = ONE  # else TCP is refused
    values.update(more)
    values = {k: v for k, v in values.items() if v is not None}
    return clean_environment(**{"MLFAB_" + k: v for k, v in values.items()})


def probe(address, *arguments, **more):
    return start(helper("probe"), *arguments, env=place(address, **more))


def server(address, **more):
    return probe(address, ROLE="server", **more)


def end(*processes):
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def steps(result):
    """The output of a probe: step -> (error name, side, rank, milliseconds, text)."""
    told = {}
    for line in result.out.splitlines():
        match = re.match(r"(\w+) (\w+) (server|worker) (-?\d+) (\d+) ?(.*)", line)
        if match:
            told[match.group(1)] = (match.group(2), match.group(3), int(match.group(4)),
                                    int(match.group(5)), match.group(6))
    return told


def opened(process, timeout=60):
    result = finish(process, timeout)
    expect("open" in steps(result), "it tells how opening went", result)
    return steps(result)["open"], result


def addresses():
    return [free_port(), "shm:mlfab-test-%d-%d" % (os.getpid(), time.monotonic_ns()),
            "unix:@mlfab-test-%d-%d" % (os.getpid(), time.monotonic_ns())]


def test_all_come_together():
    for address in addresses():
        processes = [server(address), probe(address), probe(address, RANK=1)]
        for process in processes:
            result = finish(process)
            expect(result.code == 0, "everybody opens and ends well: %s" % address, result)


def test_two_ranks_with_one_number():
    for address in addresses():
        processes = [server(address), probe(address, 2000, TIMEOUT_MS=4000)]
        time.sleep(0.3)
        second = probe(address, TIMEOUT_MS=4000)
        told, result = opened(second)
        end(*processes)
        expect(told[0] == "MLFAB_ERR_RANK_TAKEN", "the second is refused", result)
        expect("0" in told[4], "the text names the rank", result)


def test_a_rank_outside_the_world():
    port = free_port()
    processes = [server(port)]
    told, result = opened(probe(port, RANK=2))
    end(*processes)
    expect(told[0] == "MLFAB_ERR_RANK_RANGE", "refused", result)
    expect("2" in told[4], "the text names the rank", result)


def test_worlds_that_disagree():
    for address in addresses():
        processes = [server(address, WORKERS=2)]
        told, result = opened(probe(address, WORKERS=3))
        end(*processes)
        expect(told[0] == "MLFAB_ERR_WORLD", "refused", result)
        expect("2" in told[4] and "3" in told[4], "the text names both worlds", result)


def test_another_job():
    for address in addresses():
        processes = [server(address, JOB="mine")]
        told, result = opened(probe(address, JOB="yours", TIMEOUT_MS=5000))
        still = processes[0].poll() is None
        end(*processes)
        expect(told[0] == "MLFAB_ERR_JOB", "refused", result)
        expect(still, "the server goes on")


def test_keys_that_differ():
    """Both sides report the error, and neither prints a key."""
    for here, there, why in ((ONE, None, "the caller has none"), (None, ONE, "this job has none"),
                             (ONE, OTHER, "not this job's")):
        one, two = ({"KEY": s, "ALLOW_INSECURE": 1} for s in (here, there))
        port = free_port()
        serving = server(port, TIMEOUT_MS=3000, **one)
        told, result = opened(probe(port, TIMEOUT_MS=5000, **two))
        expect(told[0] == "MLFAB_ERR_JOB", "refused", result)
        expect(why in told[4] and "MLFAB_KEY" in told[4], "the caller says why", result)
        serving = finish(serving)
        expect(why in steps(serving)["open"][4], "the server says why", serving)
        for text in (result.out, result.err, serving.out, serving.err):
            expect(ONE not in text and OTHER not in text, "a key is told", text)


def test_one_key():
    port = free_port()
    processes = [server(port, KEY=ONE), probe(port, KEY=ONE),
                 probe(port, RANK=1, KEY=ONE)]
    for process in processes:
        result = finish(process)
        expect(result.code == 0, "everybody opens and ends well", result)


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
        bad = [(file("group", ONE.encode(), 0o640), "others"),
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
            told, result = opened(probe(free_port(), KEY_FILE=path, TIMEOUT_MS=2000))
            expect(told[0] == "MLFAB_ERR_CONFIG" and path in told[4] and why in told[4], why, result)
            expect(ONE not in told[4], "a key is told", result)
        # One after the other the processes get the new key; the file counts before the variable.
        for files in ((good, link, good), (both, good, other), (good, both, both)):
            port = free_port()
            processes = [server(port, KEY_FILE=files[0]), probe(port, KEY_FILE=files[1], KEY=OTHER),
                         probe(port, RANK=1, KEY_FILE=files[2])]
            for process in processes:
                result = finish(process)
                expect(result.code == 0, "everybody opens and ends well", result)


def test_another_user_of_the_host():
    """Another user cannot use a Unix socket, whatever it knows; the rank stays free."""
    if os.geteuid() != 0:
        raise Skip("needs root, to be two users")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        copy = shutil.copy(helper("probe"), folder)
        address = "unix:@mlfab-test-%d-%d" % (os.getpid(), time.monotonic_ns())
        processes = [server(address, KEY=ONE), probe(address, KEY=ONE)]
        stranger = start(copy, env=place(address, RANK=1, TIMEOUT_MS=1500, KEY=ONE),
                         cwd=folder, preexec_fn=lambda: os.setresuid(65534, 65534, 65534))
        told, result = opened(stranger)
        expect(told[0] == "MLFAB_ERR_TIMEOUT", "it does not join", result)
        expect("its socket is root's, who refuses other users" in told[4], "the text says why", result)
        processes.append(probe(address, RANK=1, KEY=ONE))
        for process in processes:
            result = finish(process)
            expect(result.code == 0, "everybody opens and ends well", result)


def test_another_user_over_tcp():
    """Over the loopback everybody can connect; without the key that is all."""
    if os.geteuid() != 0:
        raise Skip("needs root, to be two users")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        copy, port = shutil.copy(helper("probe"), folder), free_port()
        processes = [server(port, KEY=ONE), probe(port, KEY=ONE)]
        for more in ({"KEY": None}, {"KEY": OTHER}):
            stranger = start(copy, env=place(port, RANK=1, TIMEOUT_MS=5000, ALLOW_INSECURE=1, **more),
                             cwd=folder, preexec_fn=lambda: os.setresuid(65534, 65534, 65534))
            told, result = opened(stranger)
            expect(told[0] == "MLFAB_ERR_JOB" and "MLFAB_KEY" in told[4], "it is refused", result)
        processes.append(probe(port, RANK=1, KEY=ONE))
        for process in processes:
            result = finish(process)
            expect(result.code == 0, "everybody opens and ends well", result)


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        told, result = opened(server(taken.getsockname()[1], TIMEOUT_MS=5000))
    expect(told[0] == "MLFAB_ERR_ADDRESS_IN_USE", "refused", result)


def test_a_host_that_does_not_resolve():
    told, result = opened(probe("tcp:no-such-host.invalid:1234", ALLOW_INSECURE=1,
                                TIMEOUT_MS=2000))
    expect(told[0] == "MLFAB_ERR_TIMEOUT", "it may come to be known until the deadline", result)
    expect("no-such-host.invalid" in told[4], "the text names it", result)


def test_a_master_that_does_not_resolve():
    """Rank 0 cannot listen there, the others do not reach it; all wait until the deadline, and name it."""
    for rank, error in ((0, "MLFAB_ERR_ADDRESS"), (1, "MLFAB_ERR_TIMEOUT")):
        told, result = opened(start(helper("probe"), env=clean_environment(
            RANK=rank, WORLD_SIZE=2, MASTER_ADDR="no-such-host.invalid", MASTER_PORT=1234, MLFAB_KEY=ONE,
            MLFAB_TIMEOUT_MS=2000)))
        expect(told[0] == error and "tcp:no-such-host.invalid:1234" in told[4], "rank %d names it" % rank, result)


def test_an_address_that_does_not_parse():
    for address in ("tcp:127.0.0.1", "tcp:127.0.0.1:99999", "pigeon:coop", "tcp:"):
        told, result = opened(probe(address, TIMEOUT_MS=5000))
        expect(told[0] in ("MLFAB_ERR_ADDRESS", "MLFAB_ERR_CONFIG"), address, result)


def test_tcp_needs_a_key():
    """Or allow_insecure. Without either, only processes of this user are reached, over their own sockets."""
    for more in ({"KEY": None}, {"KEY": None, "ROLE": "server"}):
        told, result = opened(probe(free_port(), TIMEOUT_MS=5000, **more))
        expect(told[0] == "MLFAB_ERR_INSECURE" and "MLFAB_KEY" in told[4], "refused", result)
    address = "unix:@mlfab-test-%d-%d" % (os.getpid(), time.monotonic_ns())
    processes = [server(address, TRANSPORT="tcp"), probe(address, TRANSPORT="tcp"),
                 probe(address, RANK=1, TRANSPORT="tcp")]
    for process in processes:
        result = finish(process)
        expect(result.code == 0, "everybody opens and ends well", result)


def test_a_launcher_on_one_host():
    """torchrun's variables are enough, without a key: the processes meet at a Unix socket."""
    for more in ({"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "this-host.invalid", "LOCAL_WORLD_SIZE": "2"}):
        port = free_port()
        processes = [start(helper("probe"), env=clean_environment(
            RANK=rank, WORLD_SIZE=2, MASTER_PORT=port, MLFAB_TIMEOUT_MS=15000, **more)) for rank in (0, 1)]
        for process in processes:
            result = finish(process)
            expect(result.code == 0, "everybody opens and ends well", result)


def test_another_host_needs_allow_insecure():
    # 192.0.2.0/24 is reserved for documentation: no host answers, and nothing must be sent.
    told, result = opened(probe("tcp:192.0.2.1:1234", TIMEOUT_MS=5000))
    expect(told[0] == "MLFAB_ERR_INSECURE", "refused", result)


def test_variables_that_make_no_sense():
    for name, value in (("RANK", "first"), ("WORKERS", "0x"), ("ROLE", "king"),
                        ("TRANSPORT", "pigeon"), ("TIMEOUT_MS", "soon")):
        told, result = opened(probe(free_port(), **{name: value}))
        expect(told[0] == "MLFAB_ERR_CONFIG", "refused", result)
        expect("MLFAB_" + name in told[4] and value in told[4], "variable and value", result)


def test_a_missing_rank_is_named():
    for address in addresses():
        processes = [server(address, TIMEOUT_MS=3000)]
        told, result = opened(probe(address, RANK=0, TIMEOUT_MS=2000))
        end(*processes)
        expect(told[0] == "MLFAB_ERR_TIMEOUT", "the deadline", result)
        expect(re.search(r"worker 1\b|rank 1\b|\b1\b", told[4]), "names the missing rank", result)
        expect(told[3] < 6000, "in time", result)


def test_no_server_at_all():
    for address in addresses():
        told, result = opened(probe(address, TIMEOUT_MS=1500))
        expect(told[0] == "MLFAB_ERR_TIMEOUT", "the deadline", result)
        expect(told[3] < 5000, "in time", result)


def test_a_server_killed_while_workers_wait():
    for address in addresses():
        served = server(address)
        waiting = probe(address, RANK=0)
        busy = probe(address, 20000, RANK=1)
        line = waiting.stdout.readline()
        expect(line.startswith("open OK"), "opened", line)
        time.sleep(0.5)
        served.kill()
        began = time.monotonic()
        result = finish(waiting)
        seconds = time.monotonic() - began
        end(served, busy)
        told = steps(result).get("barrier")
        expect(told, "the barrier ends", result)
        expect(told[0] == "MLFAB_ERR_PEER_DEAD", "the error", result)
        expect(told[1:3] == ("server", 0), "the blame", result)
        expect("server 0" in told[4], "the text names it", result)
        print("# %s: told %.2f s after the kill" % (address, seconds))
        expect(seconds < 15, "within the deadline", result)


def test_a_worker_killed_while_another_waits_releases_the_barrier():
    for address in addresses():
        served = server(address)
        waiting = probe(address, RANK=0)
        busy = probe(address, 30000, RANK=1)
        waiting.stdout.readline()
        busy.stdout.readline()
        busy.kill()
        result = finish(waiting)
        told = steps(result)["barrier"]
        end(served, busy)
        expect(told[0] == "OK", "without the dead one", result)


STRANGERS = [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00",
             b"\x00" * 64, b"\xff" * 4096, b"SSH-2.0-scan\r\n", b"MLFA", os.urandom(200)]


def test_strangers_do_not_disturb_start_up():
    port = free_port()
    served = server(port)
    first = probe(port, RANK=0)
    held = []

    def knock(bytes_):
        try:
            s = socket.create_connection(("127.0.0.1", port), timeout=2)
        except ConnectionRefusedError:
            return False
        try:
            s.sendall(bytes_)
        except OSError:
            pass
        held.append(s)
        return True

    wait_until(lambda: knock(b""), 10, "the server listens")
    for bytes_ in STRANGERS * 3:
        knock(bytes_)
    for s in held[::2]:  # some hang up, others stay
        s.close()
    second = probe(port, RANK=1)
    for process in (first, second, served):
        result = finish(process)
        expect(result.code == 0, "the fabric came together and ended well", result)
        for step, told in steps(result).items():
            expect(told[0] == "OK", step, result)
    for s in held:
        s.close()


def test_mlfab_run_starts_a_fabric():
    for option in ("--tcp", "--shm", None):
        for servers in (0, 1, 2):
            arguments = [option] if option else []
            result = finish(start(RUN, "-n", 3, "-s", servers, *arguments, helper("probe")))
            expect(result.code == 0, "%s, %d servers" % (option, servers), result)
            expect(result.out.count("] barrier OK") == 3, "all were at the barrier", result)


def test_launchers_variables():
    for names in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
                  ("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        port = free_port()
        processes = []
        for rank in (0, 1):
            environment = clean_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                                            SLURM_STEP_ID=0, MLFAB_TIMEOUT_MS=10000)
            environment.update({names[0]: str(rank), names[1]: "2"})
            processes.append(start(helper("probe"), env=environment))
        for process in processes:
            result = finish(process)
            expect(result.code == 0 and result.out.count(" OK ") == 2, names[0], result)


def test_outside_a_step_slurm_is_not_asked():
    for more in ({}, {"SLURM_STEP_ID": 4294967290}):
        result = finish(start(helper("probe"), env=clean_environment(SLURM_PROCID=0, SLURM_NTASKS=2, **more)))
        expect(result.code == 0, "a world of one", result)


def test_a_world_of_one_needs_nothing():
    result = finish(start(helper("probe"), env=clean_environment()))
    expect(result.code == 0, "opens", result)


if __name__ == "__main__":
    main(globals(), jobs=4)
