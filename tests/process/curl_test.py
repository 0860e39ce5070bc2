#!/usr/bin/env python3
# lane: check
# limit: 900
"""extras/mlfab_curl.c with real servers on loopback: prometheus-node-exporter (it is killed and started again while a node
trains; in a network namespace beside real traffic of others) and prometheus-pushgateway; promtool reads what is pushed."""
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request

import network_test
from process import (BUILD, Skip, clean_environment, expect, finish, free_port, main, run, shared_memory_names, start, tell,
                     wait_until)

BEFORE = shared_memory_names()
WATCH = os.path.join(BUILD, "tests", "extras", "curl_watch")
EXPORTER, GATEWAY = "prometheus-node-exporter", "prometheus-pushgateway"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def needed(*programs):
    if not os.path.exists(WATCH):
        raise Skip("libcurl4-openssl-dev is not installed")
    for program in programs:
        if not shutil.which(program):
            raise Skip("%s is not installed" % program)


def get(url):
    try:
        with DIRECT.open(url, timeout=60) as answer:
            return answer.read().decode()
    except OSError:
        return None


class Server:
    """A server of Debian at a port of loopback, until it is told to end."""

    def __init__(self, port, path, *command, prefix=()):
        self.url = "http://127.0.0.1:%d" % port
        self.process = subprocess.Popen([*prefix, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        if not prefix:
            wait_until(lambda: get(self.url + path), "%s answers" % command[0])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def longer(function):
    """A case in which a node does things again and again for some seconds, the last argument times as long. A busy machine may
    need longer: then the case is run once more. A failure of never() is final."""
    def twice():
        try:
            function(1)
        except AssertionError as error:
            tell("%s: not within its time: %s" % (function.__name__, str(error).partition("\n")[0]))
            function(6)
    twice.__name__ = function.__name__
    return twice


def never(condition, what, result=""):
    """A failure, however slow the machine is."""
    if condition:
        raise RuntimeError("%s\n%s" % (what, result))


def exporter(port, *more, prefix=()):
    return Server(port, "/metrics", EXPORTER, "--web.listen-address=127.0.0.1:%d" % port, "--collector.disable-defaults",
                  "--collector.netdev", "--collector.netclass", *more, prefix=prefix)


LO = "--collector.netdev.device-exclude=^$"  # without it Debian's node_exporter hides lo


def node(seconds, *what, prefix=(), **place):
    place = {"MLFAB_SCHEDULER": "beside", "MLFAB_HEARTBEAT_MS": 200, "MLFAB_WORKERS": 1, "MLFAB_RANK": 0, **place}
    return start(*prefix, WATCH, seconds, *what, env=clean_environment(**place))


def states(result):
    """The lines of curl_watch as dictionaries."""
    all_of = []
    for line in result.out.splitlines():
        words = line.split()
        if words[:1] == ["state"]:
            all_of.append({k: v if k == "device" else float(v) for k, v in zip(words[1::2], words[2::2])})
    return all_of


class Traffic(threading.Thread):
    """Moves bytes over loopback at about this rate until it is stopped."""

    def __init__(self, bytes_per_s):
        super().__init__(daemon=True)
        self.rate, self.ended = bytes_per_s, False
        self.sender, self.receiver = self.pair()
        self.start()

    @staticmethod
    def pair():
        listener = socket.create_server(("127.0.0.1", 0))
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        listener.close()
        return sender, receiver

    def run(self):
        threading.Thread(target=self.take, daemon=True).start()
        block = bytes(int(self.rate / 50))
        began, sent = time.monotonic(), 0
        while not self.ended:
            self.sender.sendall(block)
            sent += len(block)
            time.sleep(max(0, began + sent / self.rate - time.monotonic()))
        self.sender.close()

    def take(self):
        while self.receiver.recv(1 << 20):
            pass
        self.receiver.close()

    def stop(self):
        self.ended = True
        self.join()


@longer
def test_a_real_exporter_dies_and_comes_back(times):
    needed(EXPORTER)
    port = free_port()
    traffic = Traffic(40e6)
    try:
        first = exporter(port, LO)
        process = node(8 * times, "monitor", first.url + "/metrics", "lo")
        time.sleep(3 * times)
        first.__exit__()
        time.sleep(2 * times)
        with exporter(port, LO):
            result = finish(process)
    finally:
        traffic.stop()
    never(result.code != 0, "it does not train to the end", result)
    seen = states(result)
    busy = [s for s in seen if s["device"] == "lo" and s["other_in"] > 4e6 and s["other_out"] > 4e6]
    expect(len(busy) >= 5, "it sees the traffic of others", result)
    dead = [i for i, s in enumerate(seen) if s["failures"] >= 3 and not s["alive"]]
    expect(dead and seen[dead[-1]]["other_in"] == 0, "when the exporter is dead, nothing is known of others", result)
    expect(seen[-1]["alive"] and seen[-1]["other_in"] > 4e6, "it comes back", result)
    expect(seen[dead[-1]]["steps"] > seen[dead[0]]["steps"] and seen[-1]["longest_ms"] < 3000, "training goes on meanwhile",
           result)
    lines = result.err.splitlines()
    expect(len(lines) == 2 and "GET http://127.0.0.1:%d/metrics, for the network traffic of this host" % port in lines[0]
           and "node_exporter answers again" in lines[1], "one line each time", result)
    left = {n for n in shared_memory_names() - BEFORE if n.startswith("mlfab-traffic")}
    never(left, "it leaves something", left)


@longer
def test_debian_hides_lo(times):
    needed(EXPORTER)
    with exporter(free_port()) as server:
        result = finish(node(times, "monitor", server.url + "/metrics", "lo"))
        expect(result.code == 0 and "has no node_network_*_bytes_total of the interface lo" in result.err,
               "it says which interface is not there", result)
        real = [d for d in os.listdir("/sys/class/net") if os.path.exists("/sys/class/net/%s/device" % d)]
        result = finish(node(2 * times, "monitor", server.url + "/metrics"))
        if real:
            expect(states(result)[-1]["device"] in real, "it takes a real interface: %s" % real, result)


def counted_exporter(space, port):
    return exporter(port, prefix=("ip", "netns", "exec", space))


@longer
def test_others_on_a_shaped_link(times):
    """Host 1 trains with the server of host 2 (25 MB/s links). What the two move is theirs; what a third host sends is not."""
    needed(EXPORTER)
    net = network_test.Network(3)
    processes = []
    try:
        one, two, three = net.name(1), net.name(2), net.name(3)
        port = free_port()
        place = dict(MLFAB_COORDINATOR="tcp:10.78.0.2:7801", MLFAB_WORKERS=1, MLFAB_SERVERS=1, MLFAB_DEDICATED=1,
                     MLFAB_JOB="others-%d" % os.getpid(), MLFAB_KEY="k" * 32, MLFAB_TIMEOUT_MS=30000)
        with counted_exporter(one, port):
            processes.append(node(8 * times, prefix=("ip", "netns", "exec", two), MLFAB_ROLE="server", MLFAB_RANK=0, **place))
            processes.append(node(8 * times, "monitor", "http://127.0.0.1:%d/metrics" % port, prefix=("ip", "netns", "exec", one),
                                  MLFAB_ROLE="worker", MLFAB_RANK=0, **place))
            time.sleep(4.5 * times)
            processes.append(start("ip", "netns", "exec", three, "python3", "-c", FLOOD, 6 * times, env=clean_environment()))
            result = finish(processes[1])
            server = finish(processes[0])
    finally:
        for p in processes:
            if p.poll() is None:
                p.kill()
            p.communicate()
        net.down()
    never(result.code != 0 or server.code != 0, "one ends badly", (result, server))
    seen = states(result)
    alone = [s for s in seen if s["scrapes"] >= 8 and s["in"] > 1e6][:12]
    expect(len(alone) >= 5 and all(s["device"] == "eth0" for s in alone), "it measures", result)
    quiet = sorted(s["other_in"] / s["in"] for s in alone)[len(alone) // 2]
    expect(quiet < 0.15, "what this fabric moves is not others': %.2f" % quiet, result)
    expect(max(s["other_in"] for s in seen[-12:]) > 3e6, "what others move is", result)


FLOOD = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    for _ in range(10):
        s.sendto(bytes(1400), ("10.78.0.1", 9))
    time.sleep(0.0014)
"""


# ---- the Pushgateway

def gateway(port):
    return Server(port, "/-/ready", GATEWAY, "--web.listen-address=127.0.0.1:%d" % port,
                  "--persistence.file=")  # Debian's default is a file in /var/lib


def promtool_reads(text):
    with tempfile.TemporaryFile("w+") as file:
        file.write(text)
        file.seek(0)
        result = run("promtool", "check", "metrics", stdin=file)
    expect(result.code == 0 and not result.out + result.err, "promtool has nothing to say", result)


@longer
def test_a_real_pushgateway(times):
    needed(GATEWAY, "promtool")
    with gateway(free_port()) as server:
        result = finish(node(2 * times, "push", server.url, "night/run", MLFAB_JOB="fabric-7"))
        never(result.code != 0, "it ends badly", result)
        expect(result.err == "", "it ends silently", result)
        expect(states(result)[-1]["taken"] >= 3 and states(result)[-1]["failed"] == 0, "it pushes", result)
        text = get(server.url + "/metrics")
        ours = [line for line in text.splitlines() if line.startswith("mlfab_")]
        expect(len(ours) > 50, "the Pushgateway has the metrics", text)
        for line in ours:
            never(not all(label in line for label in ('job="night/run"', 'fabric="fabric-7"', 'node="worker-0"', 'role="worker+server"')),
                  "a label is missing", line)
        expect(float(re.search(r"^mlfab_pushes_applied_total\{.*\} (\S+)$", text, re.M).group(1))
               == states(result)[-1]["steps"], "the last push has the last numbers", text)
        promtool_reads("".join(line + "\n" for line in text.splitlines() if "mlfab_" in line))
        result = finish(node(times, "push", server.url, "night/run", "remove", MLFAB_JOB="fabric-7"))
        expect(result.code == 0 and result.err == "", "it removes its metrics and ends silently", result)
        wait_until(lambda: "mlfab_" not in (get(server.url + "/metrics") or "mlfab_"),
                   "the Pushgateway, which answers before it removes, has removed them")


@longer
def test_a_pushgateway_that_comes_late(times):
    needed(GATEWAY)
    port = free_port()
    process = node(5 * times, "push", "http://me:secret@127.0.0.1:%d" % port)
    time.sleep(1.5 * times)
    with gateway(port):
        result = finish(process)
    never("secret" in result.err, "it tells the secret", result)
    seen = states(result)
    expect(result.code == 0 and seen[-1]["failed"] >= 3 and seen[-1]["taken"] >= 3, "it goes on trying", result)
    lines = result.err.splitlines()
    expect(len(lines) == 2 and "push: PUT http://127.0.0.1:%d/metrics/job/mlfab" % port in lines[0]
           and "takes metrics again" in lines[1], "one line each time", result)


if __name__ == "__main__":
    main(globals(), jobs=1)
