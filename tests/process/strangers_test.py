#!/usr/bin/env python3
"""A fabric at work while a process without its key connects again and again: nothing is accepted, nothing lost; what
it costs is reported."""
import os
import re
import socket
import statistics
import threading
import time

from process import clean_environment, expect, finish, free_port, helper, main, start

KEY = "0123456789abcdef" * 4
SECONDS, BYTES, A_SECOND, ROUNDS = 1.5, 4 << 20, 1000, 2


def traffic(port, role, rank=0):
    place = dict(COORDINATOR="tcp:127.0.0.1:%d" % port, WORKERS=1, SERVERS=1, DEDICATED=1, RANK=rank, ROLE=role,
                 KEY=KEY, TRANSPORT="tcp", TIMEOUT_MS=30000)
    return start(helper("traffic"), SECONDS, BYTES, 2,
                 env=clean_environment(**{"MLFAB_" + k: v for k, v in place.items()}))


def strangers(port, stop, count):
    """Opens A_SECOND connections a second. Some say nothing, some nonsense, some a frame that is not theirs to send."""
    bad = [b"", os.urandom(200), b"GET / HTTP/1.0\r\n\r\n", b"MLFB" + os.urandom(60)]
    began = time.monotonic()
    while not stop.is_set():
        late = time.monotonic() - began - count[0] / A_SECOND
        if late < 0:
            time.sleep(-late)
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as s:
                s.sendall(bad[count[0] % len(bad)])
        except OSError:
            pass
        count[0] += 1


def applied_a_second(disturbed):
    port, stop, count = free_port(), threading.Event(), [0]
    processes = [traffic(port, "server"), traffic(port, "worker")]
    thread = threading.Thread(target=strangers, args=(port, stop, count))
    began = time.monotonic()
    if disturbed:
        thread.start()
    try:
        worker, server = finish(processes[1]), finish(processes[0])
    finally:
        stop.set()
        if disturbed:
            thread.join()
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    expect(worker.code == 0 and server.code == 0, "both end well", (worker, server))
    told = re.search(r"applied (\d+) dropped 0 seconds (\S+)", worker.out)
    expect(told and "applied %s " % told.group(1) in server.out, "nothing is lost or doubled", (worker, server))
    return int(told.group(1)) / float(told.group(2)), count[0] / (time.monotonic() - began)


def test_a_thousand_bad_connections_a_second():
    quiet, disturbed, rates = [], [], []
    for _ in range(ROUNDS):
        quiet.append(applied_a_second(False)[0])
        rate, connections = applied_a_second(True)
        disturbed.append(rate)
        rates.append(connections)
    ratio = statistics.median(disturbed) / statistics.median(quiet)
    print("# %.0f bad connections a second, of a process on the same host: %.0f of %.0f pushes a second are left (%.0f %%)"
          % (statistics.median(rates), statistics.median(disturbed), statistics.median(quiet), 100 * ratio))


if __name__ == "__main__":
    main(globals())
