#!/usr/bin/env python3
"""Real processes over TLS (extras/mlfab_tls.c): they train, refuse what has not their key, and say nothing in clear. Between
them stands a process that changes, records and repeats their bytes."""
import os
import random
import re
import select
import socket
import ssl
import struct
import threading
import time

from process import BUILD, RUN, Skip, clean_environment, expect, finish, main, run, start

TRAINER = os.path.join(BUILD, "tests", "extras", "tls_trainer")
KEY = "0123456789abcdef" * 4
JOB = "the-name-of-this-job"
FIRST = 123456


def needed():
    if not os.path.exists(TRAINER):
        raise Skip("libssl-dev is not installed")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def node(port, rounds, rank=0, workers=1, role="", **more):
    place = dict(MLFAB_COORDINATOR="tls:127.0.0.1:%d" % port, MLFAB_WORKERS=workers, MLFAB_SERVERS=1,
                 MLFAB_RANK=rank, MLFAB_JOB=JOB, MLFAB_KEY=KEY, MLFAB_TIMEOUT_MS=30000, MLFAB_HEARTBEAT_MS=1000)
    if role:
        place.update(MLFAB_DEDICATED=1, MLFAB_ROLE=role)
    place.update(more)
    return start(TRAINER, rounds, env=clean_environment(**place))


def end(processes):
    """The results of all; none is left."""
    try:
        return [finish(p) for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                p.kill()
                p.communicate()


def expect_silent(results, workers, rounds):
    for r in results:
        expect(r.code == 0 and r.err == "", "a node ends silently with 0", r)
    expect(re.search(r"^weights %d$" % (FIRST + rounds * workers * (workers + 1) // 2), results[0].out, re.M),
           "every update is applied once", results[0])


def test_one_two_and_eight_workers_end_silently():
    needed()
    for workers in (1, 2, 8):
        port = free_port()
        expect_silent(end([node(port, 5, rank, workers) for rank in range(workers)]), workers, 5)


def test_dedicated_server_and_mlfab_run():
    needed()
    port = free_port()
    results = end([node(port, 5, rank, 2, "worker") for rank in (0, 1)] + [node(port, 5, 0, 2, "server")])
    expect_silent(results, 2, 5)
    result = run(RUN, "-n", 2, "-s", 1, "--tcp", "--server", TRAINER, TRAINER, 5)
    expect(result.code == 0 and "weights %d" % (FIRST + 15) in result.out, "mlfab-run starts it", result)


def test_key_is_needed():
    needed()
    result = end([node(free_port(), 1, 0, 2, MLFAB_KEY="")])[0]
    expect(result.code == 1 and "MLFAB_ERR_CONFIG: transport tls: it needs a key (MLFAB_KEY_FILE" in result.err,
           "TLS without a key is refused", result)


def refused(port, text, **more):
    """A worker that does not belong here is told so at once."""
    began = time.monotonic()
    result = end([node(port, 1, 1, 2, "worker", **more)])[0]
    expect(result.code == 1 and "MLFAB_ERR_JOB" in result.err and text in result.err and time.monotonic() - began < 5,
           "a worker is refused, and told why", result)


def test_wrong_key_and_plain_tcp_are_refused_by_name():
    needed()
    port = free_port()
    processes = [node(port, 3, 0, 2, "server", TLS_TELL=1), node(port, 3, 0, 2, "worker")]
    try:
        time.sleep(0.3)
        refused(port, "the caller's key is not this job's (MLFAB_KEY)", MLFAB_KEY="another-key-than-the-others")
        refused(port, "it speaks TLS, and this process does not", TLS_OFF=1, MLFAB_COORDINATOR="tcp:127.0.0.1:%d" % port)
        # A process that has the new key first belongs here.
        processes.append(node(port, 3, 1, 2, "worker", MLFAB_KEY="a-new-key-that-comes," + KEY))
    finally:
        results = end(processes)
    expect(int(re.search(r"refused (\d+)", results[0].out).group(1)) >= 2, "they are counted", results[0])
    expect_silent([results[1], results[0], results[2]], 2, 3)
    port = free_port()
    processes = [node(port, 1, 0, 1, "server", TLS_OFF=1, MLFAB_COORDINATOR="tcp:127.0.0.1:%d" % port)]
    try:
        time.sleep(0.3)
        result = end([node(port, 1, 0, 1, "worker")])[0]
        expect("MLFAB_ERR_JOB" in result.err and "it speaks plain TCP, and this process TLS" in result.err,
               "a caller with TLS is told of a server without", result)
    finally:
        processes[0].kill()
        end(processes)


class Middle(threading.Thread):
    """Passes connections on to a port, records them, and changes one byte of each while `flips` is above 0."""

    def __init__(self, port, flips=0):
        super().__init__(daemon=True)
        self.to, self.flips, self.flipped, self.random = port, flips, 0, random.Random(4)
        self.seen, self.stop = [], False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.start()

    def run(self):
        pairs = {}
        while not self.stop:
            for s in select.select([self.listener] + list(pairs), [], [], 0.05)[0]:
                if s is self.listener:
                    self.accept(pairs)
                elif s in pairs:
                    self.move(pairs, s)
        for s in pairs:
            s.close()
        self.listener.close()

    def accept(self, pairs):
        near, _ = self.listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self.to), 1)
        except OSError:
            near.close()
            return
        record = [bytearray(), bytearray()]
        flip = None
        if self.flips > 0:  # in the handshake of every other one: a caller whose key is refused twice gives up
            self.flips -= 1
            flip = (self.random.randrange(2), int(10 ** self.random.uniform(3.3 if len(self.seen) % 2 else 0, 5)))
        self.seen.append(record)
        pairs[near], pairs[far] = (far, 0, record, flip), (near, 1, record, flip)

    def move(self, pairs, s):
        other, side, record, flip = pairs[s]
        try:
            data = bytearray(s.recv(1 << 16))
            at = flip[1] - len(record[side]) if flip and flip[0] == side else -1
            if 0 <= at < len(data):
                data[at] ^= 1 << self.random.randrange(8)
                self.flipped += 1
            record[side] += data
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for x in (s, other):
                pairs.pop(x, None)
                x.close()


def through_the_middle(rounds, flips=0, meanwhile=None, **more):
    """A server and a worker that calls it through the middle. Returns the middle, and what each of the two refused."""
    port = free_port()
    middle = Middle(port, flips)
    server = node(port, rounds, 0, 1, "server", TLS_TELL=1, **more)
    worker = node(port, rounds, 0, 1, "worker", TLS_TELL=1, TLS_THROUGH=middle.port, **more)
    try:
        if meanwhile:
            meanwhile(port, middle, worker)
    finally:
        results = end([worker, server])
        middle.stop = True
        middle.join()
    expect_silent(results, 1, rounds)
    return middle, [int(re.search(r"refused (\d+)", r.out).group(1)) for r in results]


def test_changed_bytes_change_nothing():
    needed()
    middle, counts = through_the_middle(60, flips=20)
    expect(middle.flipped >= 10 and sum(counts) >= middle.flipped // 2, "connections were disturbed, and counted",
           (middle.flipped, counts, len(middle.seen)))
    print("# %d bytes changed in %d connections, %d refused" % (middle.flipped, len(middle.seen), sum(counts)))


def test_nothing_is_in_clear():
    needed()
    weight = struct.pack("<f", FIRST + 1)
    for off in ({}, {"TLS_OFF": 1}):
        if off:
            port = free_port()
            off["MLFAB_COORDINATOR"] = "tcp:127.0.0.1:%d" % port
            middle = Middle(port)
            results = end([node(port, 3, 0, 1, "worker", TLS_THROUGH=middle.port, **off),
                           node(port, 3, 0, 1, "server", **off)])
            middle.stop = True
            middle.join()
            expect_silent(results, 1, 3)
        else:
            middle, _ = through_the_middle(3)
        traffic = b"\n".join(bytes(side) for record in middle.seen for side in record)
        expect(len(traffic) > 3 * 4 * 30000, "everything went through the middle", len(traffic))
        found = [text in traffic for text in (JOB.encode(), weight * 4, b"MLFB")]
        # The job's name is not sent by a keyed fabric at all; the weights and the frames are, in clear, over TCP.
        expect(found[1:] == [bool(off)] * 2 and not (found[0] and not off), "only TCP shows what is sent", found)
        expect(KEY.encode() not in traffic, "nobody sends the key")


def test_repeated_traffic_is_refused():
    needed()
    sent = [0]

    def repeat(port, middle, worker):
        until = time.monotonic() + 20
        while sent[0] < 20 and worker.poll() is None and time.monotonic() < until:
            full = [r for r in middle.seen if len(r[0]) > 5000]
            if not full:
                time.sleep(0.01)
                continue
            with socket.create_connection(("127.0.0.1", port), 5) as s:
                try:
                    s.sendall(bytes(full[-1][0][:5000]))
                    s.settimeout(5)
                    while s.recv(4096):
                        pass
                except OSError:
                    pass
            sent[0] += 1

    _, counts = through_the_middle(400, meanwhile=repeat)
    expect(sent[0] >= 5 and counts[1] >= sent[0], "what was repeated is refused and counted", (sent, counts))


def test_other_versions_are_refused():
    needed()
    port = free_port()
    server = node(port, 1, 0, 1, "server", TLS_TELL=1)
    try:
        time.sleep(0.3)
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.minimum_version = context.maximum_version = version
            try:
                with socket.create_connection(("127.0.0.1", port), 5) as s, context.wrap_socket(s):
                    raise AssertionError("a client without the key got through")
            except ssl.SSLError as error:
                expect("ALERT" in str(error).upper(), "it is told so by an alert", error)
    finally:
        results = end([node(port, 1, 0, 1, "worker"), server])
    expect(int(re.search(r"refused (\d+)", results[1].out).group(1)) >= 2, "they are counted", results[1])
    expect_silent(results, 1, 1)


if __name__ == "__main__":
    main(globals(), jobs=4)
