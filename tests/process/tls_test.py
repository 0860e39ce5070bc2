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

from process import (BUILD, KEY, RUN, cases, clean_environment, expect, finish_all, free_port, main, need, run, start,
                     tell, wait_until)
from startup_test import free_range

TRAINER = os.path.join(BUILD, "tests", "extras", "tls_trainer")
JOB = "the-name-of-this-job"
FIRST = 123456


def node(port, rounds, rank=0, workers=1, role="", **more):
    need(TRAINER, why="libssl-dev is not installed")
    place = dict(MLFAB_COORDINATOR="tls:127.0.0.1:%d" % port, MLFAB_WORKERS=workers, MLFAB_SERVERS=1,
                 MLFAB_RANK=rank, MLFAB_JOB=JOB, MLFAB_KEY=KEY, MLFAB_TIMEOUT_MS=60000, MLFAB_HEARTBEAT_MS=1000)
    if role:
        place.update(MLFAB_DEDICATED=1, MLFAB_ROLE=role)
    place.update(more)
    return start(TRAINER, rounds, env=clean_environment(**place))


def call(port):
    """A connection, as soon as somebody listens."""
    def once():
        try:
            return socket.create_connection(("127.0.0.1", port), 20)
        except ConnectionRefusedError:
            return None

    return wait_until(once, "somebody listens")


def expect_silent(results, workers, rounds):
    for r in results:
        expect(r.code == 0 and r.err == "", "a node ends silently with 0", r)
    expect(re.search(r"^weights %d$" % (FIRST + rounds * workers * (workers + 1) // 2), results[0].out, re.M),
           "every update is applied once", results[0])


@cases(1, 2, 8)
def test_workers_end_silently(workers):
    port = free_port()
    expect_silent(finish_all(*(node(port, 5, rank, workers) for rank in range(workers))), workers, 5)


def test_dedicated_server_and_mlfab_run():
    port = free_port()
    expect_silent(finish_all(*(node(port, 5, rank, 2, "worker") for rank in (0, 1)), node(port, 5, 0, 2, "server")), 2, 5)
    result = run(RUN, "-n", 2, "-s", 1, "--tcp", "--server", TRAINER, TRAINER, 5)
    expect(result.code == 0 and "weights %d" % (FIRST + 15) in result.out, "mlfab-run starts it", result)


def test_key_is_needed():
    result = finish_all(node(free_port(), 1, 0, 2, MLFAB_KEY=""))[0]
    expect(result.code == 1 and "MLFAB_ERR_CONFIG: transport tls: it needs a key (MLFAB_KEY_FILE" in result.err,
           "TLS without a key is refused", result)


def refused(port, text, **more):
    """A worker that does not belong here is told so."""
    result = finish_all(node(port, 1, 1, 2, "worker", **more))[0]
    expect(result.code == 1 and "MLFAB_ERR_JOB" in result.err and text in result.err, "it is refused, and told why", result)


def test_wrong_key_and_plain_tcp_are_refused_by_name():
    port = free_range(2)
    processes = [node(port, 3, 0, 2, "server", TLS_TELL=1), node(port, 3, 0, 2, "worker")]
    try:
        refused(port, "the caller's key is not this job's (MLFAB_KEY)", MLFAB_KEY="another-key-than-the-others")
        refused(port, "the caller's key is not this job's (MLFAB_KEY)", MLFAB_KEY="another-key-than-the-others",
                MLFAB_COORDINATOR="tls:127.0.0.1:%d-%d" % (port, port + 1))  # at once: another port is no remedy
        refused(port, "it speaks TLS, and this process does not", TLS_OFF=1, MLFAB_COORDINATOR="tcp:127.0.0.1:%d" % port)
        # A process that has the new key first belongs here.
        processes.append(node(port, 3, 1, 2, "worker", MLFAB_KEY="a-new-key-that-comes," + KEY))
    finally:
        results = finish_all(*processes)
    expect(int(re.search(r"refused (\d+)", results[0].out).group(1)) >= 2, "they are counted", results[0])
    expect_silent([results[1], results[0], results[2]], 2, 3)


def test_a_server_with_plain_tcp_says_so():
    port = free_port()
    server = node(port, 1, 0, 1, "server", TLS_OFF=1, MLFAB_COORDINATOR="tcp:127.0.0.1:%d" % port)
    try:
        refused(port, "it speaks plain TCP, and this process TLS", MLFAB_WORKERS=1, MLFAB_RANK=0)
    finally:
        server.kill()
        finish_all(server)


class Middle(threading.Thread):
    """Passes connections on to a port, records them, and changes one byte of each while `flips` is above 0. While it is held it
    stops when it has passed much on."""

    def __init__(self, port, flips=0, held=False):
        super().__init__(daemon=True)
        self.to, self.flips, self.flipped, self.random = port, flips, 0, random.Random(4)
        self.seen, self.stop, self.held = [], False, held
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.start()

    def run(self):
        pairs = {}
        while not self.stop:
            if self.held and self.full():
                time.sleep(0.01)
                continue
            for s in select.select([self.listener] + list(pairs), [], [], 0.05)[0]:
                if s is self.listener:
                    self.accept(pairs)
                elif s in pairs:
                    self.move(pairs, s)
        for s in pairs:
            s.close()
        self.listener.close()

    def full(self):
        return [record for record in self.seen if len(record[0]) > 5000]

    def accept(self, pairs):
        near, _ = self.listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self.to), 20)
        except OSError:
            near.close()
            return
        for s in near, far:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


def through_the_middle(rounds, flips=0, meanwhile=None):
    """A server and a worker that calls it through the middle. Returns the middle, and what each of the two refused."""
    port = free_port()
    middle = Middle(port, flips, held=meanwhile is not None)
    server = node(port, rounds, 0, 1, "server", TLS_TELL=1)
    worker = node(port, rounds, 0, 1, "worker", TLS_TELL=1, TLS_THROUGH=middle.port)
    try:
        if meanwhile:
            wait_until(middle.full, "much was passed on")
            meanwhile(port, middle)
            middle.held = False
    finally:
        results = finish_all(worker, server)
        middle.stop = True
        middle.join()
    expect_silent(results, 1, rounds)
    return middle, [int(re.search(r"refused (\d+)", r.out).group(1)) for r in results]


def test_changed_bytes_change_nothing():
    middle, counts = through_the_middle(60, flips=20)
    expect(middle.flipped >= 10 and sum(counts) >= middle.flipped // 2, "connections were disturbed, and counted",
           (middle.flipped, counts, len(middle.seen)))
    tell("%d bytes changed in %d connections, %d refused" % (middle.flipped, len(middle.seen), sum(counts)))


@cases(0, 1)
def test_nothing_is_in_clear(plain):
    weight = struct.pack("<f", FIRST + 1)
    if plain:
        port = free_port()
        off, middle = dict(TLS_OFF=1, MLFAB_COORDINATOR="tcp:127.0.0.1:%d" % port), Middle(port)
        results = finish_all(node(port, 3, 0, 1, "worker", TLS_THROUGH=middle.port, **off), node(port, 3, 0, 1, "server", **off))
        middle.stop = True
        middle.join()
        expect_silent(results, 1, 3)
    else:
        middle, _ = through_the_middle(3)
    traffic = b"\n".join(bytes(side) for record in middle.seen for side in record)
    expect(len(traffic) > 3 * 4 * 30000, "everything went through the middle", len(traffic))
    found = [text in traffic for text in (JOB.encode(), weight * 4, b"MLFB")]
    # The job's name is not sent by a keyed fabric at all; the weights and the frames are, in clear, over TCP.
    expect(found[1:] == [bool(plain)] * 2 and not (found[0] and not plain), "only TCP shows what is sent", found)
    expect(KEY.encode() not in traffic, "nobody sends the key")


def test_repeated_traffic_is_refused():
    def repeat(port, middle):
        for _ in range(20):
            with call(port) as s:
                try:
                    s.sendall(bytes(middle.full()[-1][0][:5000]))
                    while s.recv(4096):
                        pass
                except OSError:
                    pass

    _, counts = through_the_middle(20, meanwhile=repeat)
    expect(counts[1] >= 20, "what was repeated is refused and counted", counts)


@cases("TLSv1_2", "TLSv1_3")
def test_other_versions_are_refused(name):
    port, version = free_port(), ssl.TLSVersion[name]
    server = node(port, 1, 0, 1, "server", TLS_TELL=1)
    try:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = context.maximum_version = version
        try:
            with call(port) as s, context.wrap_socket(s):
                raise AssertionError("a client without the key got through")
        except ssl.SSLError as error:
            expect("ALERT" in str(error).upper(), "it is told so by an alert", error)
    finally:
        results = finish_all(node(port, 1, 0, 1, "worker"), server)
    expect(int(re.search(r"refused (\d+)", results[1].out).group(1)) >= 1, "it is counted", results[1])
    expect_silent(results, 1, 1)


if __name__ == "__main__":
    main(globals())
