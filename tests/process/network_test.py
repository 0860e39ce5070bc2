#!/usr/bin/env python3
# lane: check
"""A real network: hosts in network namespaces behind shaped links (root, iproute2). Compares direct
asynchronous pushes with scheduled ones: throughput, delay and utilisation of the server's link. Times are
reported, not asserted; the sum, the delay bound and the exit of every process are asserted. The benefit of
scheduling is asserted in virtual time, with the same set-up: test_scheduled_against_direct in
tests/sim/test_schedule.c.

    MLFAB_NETWORK_SECONDS=20 tests/process/network_test.py      longer runs, for figures"""
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time

import process
from process import Skip, cases, expect, finish, helper, within

WORKERS, SERVER, SCHEDULER = 8, 9, 10  # hosts 1..8 are workers
RATE, SLOW = 200, 50                   # Mbit/s
BYTES, BOUND, IN_FLIGHT = 4000000, 30, 2
SECONDS = float(os.environ.get("MLFAB_NETWORK_SECONDS", "6"))
TAG = "mf%d" % (os.getpid() % 100000)


def quietly(*command):
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, check=False)


def must(*command):
    result = quietly(*command)
    if result.returncode:
        raise Skip("network namespaces with shaped links cannot be made here: %s: %s"
                   % (" ".join(command), result.stderr.strip()[:120]))
    return result.stdout


class Network:
    """Hosts 1..n, 10.78.0.k, on one bridge; every link shaped in both directions."""

    def __init__(self, hosts, before=(), v6=False):
        """before: commands of ip at each host, for interfaces that come before eth0. v6: eth0 has no IPv4."""
        if os.geteuid() != 0:
            raise Skip("network namespaces need root")
        if quietly("ip", "-V").returncode or quietly("tc", "-V").returncode:
            raise Skip("ip and tc (iproute2) are not installed")
        self.hosts, self.before, self.v6 = hosts, before, v6
        try:
            self.up()
        except Exception:
            self.down()
            raise

    def name(self, host):
        return "%sn%d" % (TAG, host)

    def up(self):
        bridge = TAG + "b"
        must("ip", "link", "add", bridge, "type", "bridge")
        must("ip", "link", "set", bridge, "up")
        for k in range(1, self.hosts + 1):
            space, outer = self.name(k), "%sv%d" % (TAG, k)
            must("ip", "netns", "add", space)
            for command in self.before:
                must("ip", "-n", space, *command.split())
            must("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            must("ip", "link", "set", outer, "master", bridge, "up")
            if self.v6:
                must("ip", "-n", space, "addr", "add", "fd78::%d/64" % k, "dev", "eth0", "nodad")
            else:
                must("ip", "-n", space, "addr", "add", "10.78.0.%d/24" % k, "dev", "eth0")
            must("ip", "-n", space, "link", "set", "lo", "up")
            must("ip", "-n", space, "link", "set", "eth0", "up")
            self.rate(k, RATE)

    def rate(self, host, mbit):
        for where in (["tc", "-n", self.name(host), "qdisc", "replace", "dev", "eth0"],
                      ["tc", "qdisc", "replace", "dev", "%sv%d" % (TAG, host)]):
            must(*where, "root", "tbf", "rate", "%dmbit" % mbit, "burst", "64kb", "latency", "100ms")

    def wide(self, host, mbit, delay_ms, loss):
        """A link of a wide area, out of this host only."""
        must("tc", "-n", self.name(host), "qdisc", "replace", "dev", "eth0", "root", "netem", "rate", "%dmbit" % mbit,
             "delay", "%dms" % delay_ms, "loss", "%d%%" % loss, "limit", "1000")

    def received(self, host):
        text = must("ip", "-n", self.name(host), "-s", "link", "show", "eth0")
        return int(re.search(r"RX:[^\n]*\n\s+(\d+)", text).group(1))

    def start(self, host, *command, **environment):
        return process.start("ip", "netns", "exec", self.name(host), *command,
                             env=process.clean_environment(**environment))

    def down(self):
        for k in range(1, self.hosts + 1):
            quietly("ip", "netns", "del", self.name(k))
            shutil.rmtree("/etc/netns/" + self.name(k), ignore_errors=True)
            quietly("ip", "link", "del", "%sv%d" % (TAG, k))
        quietly("ip", "link", "del", TAG + "b")


class Slow(threading.Thread):
    """Two workers' links run at a quarter of the rate; every two seconds another two."""

    def __init__(self, network):
        super().__init__(daemon=True)
        self.network, self.done, self.dice = network, threading.Event(), random.Random(7)

    def run(self):
        slow = []
        while not self.done.is_set():
            for host in slow:
                self.network.rate(host, RATE)
            slow = self.dice.sample(range(1, WORKERS + 1), 2)
            for host in slow:
                self.network.rate(host, SLOW)
            self.done.wait(2.0)
        for host in slow:
            self.network.rate(host, RATE)


def fabric(network, scheduled, **more):
    """All processes of a fabric: [(name, process)]."""
    common = dict(MLFAB_WORKERS=WORKERS, MLFAB_SERVERS=1, MLFAB_DEDICATED=1, MLFAB_ALLOW_INSECURE=1,
                  MLFAB_COORDINATOR="tcp:10.78.0.%d:7070" % SERVER, MLFAB_TRANSPORT="tcp",
                  MLFAB_SOCKET_IFNAME="eth0", MLFAB_TIMEOUT_MS=60000, **more)
    if scheduled:
        common.update(MLFAB_SCHEDULER="own", MLFAB_DELAY_BOUND=BOUND)
    command = [helper("traffic"), str(SECONDS), str(BYTES), str(IN_FLIGHT)]
    nodes = [("server", network.start(SERVER, *command, MLFAB_ROLE="server", MLFAB_RANK=0, **common))]
    if scheduled:
        nodes.append(("scheduler", network.start(SCHEDULER, *command, MLFAB_ROLE="scheduler",
                                                 MLFAB_RANK=0, **common)))
    for rank in range(WORKERS):
        nodes.append(("worker %d" % rank,
                      network.start(rank + 1, *command, MLFAB_ROLE="worker", MLFAB_RANK=rank,
                                    **common)))
    return nodes


def measure(network, scheduled, meanwhile=None):
    """Runs a fabric to its end. Returns applied, dropped, the largest delay, seconds, the utilisation of the
    server's in-link in the middle, and the output of server and scheduler."""
    slow = Slow(network)
    slow.start()
    nodes = fabric(network, scheduled)
    try:
        time.sleep(2.0)
        before, since = network.received(SERVER), time.monotonic()
        if meanwhile:
            nodes += meanwhile(network, nodes)
        time.sleep(max(1.0, SECONDS - 2.0 - (time.monotonic() - since)))
        busy = (network.received(SERVER) - before) / (time.monotonic() - since) / (RATE * 125000.0)
        applied = dropped = largest = 0
        said, total, delays = [], None, [0] * 64
        for name, running in nodes:
            if running.returncode is not None:
                continue  # it was ended on purpose
            result = finish(running, 120)
            expect(result.code == 0, "%s failed" % name, result)
            match = re.search(r"^worker.*applied (\d+) dropped (\d+) seconds ([\d.]+) "
                              r"delay_max (\d+) delays (.*)$", result.out, re.M)
            if match:
                applied += int(match.group(1))
                dropped += int(match.group(2))
                largest = max(largest, int(match.group(4)))
                delays = [a + int(b) for a, b in zip(delays, match.group(5).split())]
            match = re.search(r"^sum: (\d+)$", result.out, re.M)
            total = int(match.group(1)) if match else total
            said += [line for line in result.out.splitlines() if line.startswith("s") and
                     not line.startswith("sum")]
    finally:
        slow.done.set()
        slow.join()
        for _, running in nodes:
            running.kill()
    expect(total == applied, "the model counts %s updates, %d were acknowledged" % (total, applied),
           "\n".join(said))
    return dict(applied=applied, dropped=dropped, largest=largest, busy=busy, said=said,
                delays=delays)


def report(name, m):
    times = 100.0 * SECONDS / max(1, m["applied"])
    print("# %s: %.1f updates/s, %.1f s per 100, %d dropped, largest delay %d, server's in-link %.0f %%"
          " busy" % (name, m["applied"] / SECONDS, times, m["dropped"], m["largest"],
                     100.0 * m["busy"]))
    print("#   delays: " + " ".join("%d:%d" % (d, n) for d, n in enumerate(m["delays"]) if n))
    for line in m["said"]:
        print("#   " + line)
    sys.stdout.flush()


def test_scheduled_against_direct():
    network = Network(SCHEDULER)
    try:
        direct = measure(network, False)
        scheduled = measure(network, True)
    finally:
        network.down()
    report("direct", direct)
    report("scheduled", scheduled)
    print("# %.2f times more updates a second; the goal is 2" % (scheduled["applied"] / max(1, direct["applied"])))
    expect(scheduled["largest"] < BOUND, "a delay of %d, the bound is %d"
           % (scheduled["largest"], BOUND))
    expect(scheduled["applied"] > 0 and direct["applied"] > 0, "nothing came through")


def slow_fabric(network, floats, beat_ms, **more):
    """A worker and a server: first weights, two pushes and a pull of `floats` over the slow link. Returns both results."""
    common = dict(MLFAB_WORKERS=1, MLFAB_SERVERS=1, MLFAB_DEDICATED=1, MLFAB_RANK=0, MLFAB_ALLOW_INSECURE=1,
                  MLFAB_COORDINATOR="tcp:10.78.0.1:7070", MLFAB_TRANSPORT="tcp", MLFAB_SOCKET_IFNAME="eth0",
                  MLFAB_HEARTBEAT_MS=beat_ms, **{"MLFAB_TIMEOUT_MS": 60000, **more})
    nodes = [network.start(host, helper("slow"), str(floats), MLFAB_ROLE=role, **common)
             for host, role in ((1, "server"), (2, "worker"))]
    try:
        return [finish(node, 150) for node in nodes]
    finally:
        for node in nodes:
            node.kill()


def on_a_slow_link(shape, floats, beat_ms):
    network = Network(2)
    try:
        for host in (1, 2):
            shape(network, host)
        server, worker = slow_fabric(network, floats, beat_ms)
    finally:
        network.down()
    for result in (server, worker):
        expect(result.code == 0, "work over a slow link ends", (server, worker))
        expect("silent" not in result.err, "nobody seems dead", (server, worker))
    print("# " + worker.out.strip())
    sent, again = map(int, re.search(r"sent (\d+) reconnects (\d+)", worker.out).groups())
    expect(again == 0, "no link breaks", worker)
    expect(sent < 3 * 4 * floats * 1.5, "nothing is sent again", worker)


def test_a_chunk_takes_longer_than_three_heartbeats():
    """A busy machine may stop a process for several short heartbeats, so they are not short, and the link is slow."""
    on_a_slow_link(lambda network, host: network.rate(host, 3), 200000, 200)


def test_a_wide_area():
    """1 Mbit/s, 100 ms one way, 2 % loss."""
    on_a_slow_link(lambda network, host: network.wide(host, 1, 100, 2), 40000, 500)


@cases(())
@within(15000)
def test_large_packets_are_lost(ms):
    """A bridge with a smaller MTU drops large packets and tells nobody; heartbeats and headers pass. The error says it."""
    network = Network(2)
    try:
        for host in (1, 2):
            must("ip", "-n", network.name(host), "link", "set", "eth0", "gso_max_segs", "1")
            must("ip", "link", "set", "%sv%d" % (TAG, host), "mtu", "700")
        results = slow_fabric(network, 300000, 500, MLFAB_TIMEOUT_MS=ms)
    finally:
        network.down()
    worker = results[1]
    expect(worker.code != 0, "no large frame passes", results)
    expect("compare the MTU of all interfaces" in worker.err + worker.out, "the cause", results)


def test_scheduler_killed_and_started_again():
    def kill(network, nodes):
        victim = dict(nodes)["scheduler"]
        victim.kill()
        victim.communicate()
        time.sleep(1.0)
        again = fabric_scheduler(network)
        return [("the second scheduler", again)]

    network = Network(SCHEDULER)
    try:
        m = measure(network, True, kill)
    finally:
        network.down()
    report("scheduler killed", m)
    expect(m["largest"] < BOUND, "a delay of %d, the bound is %d" % (m["largest"], BOUND))
    plans = [int(n) for line in m["said"] for n in re.findall(r"plans (\d+)", line)]
    expect(plans and plans[-1] > 0, "the second scheduler did not plan", m["said"])


def come_together(network, coordinator, hosts=(1, 2, 3), **more):
    """A worker a host, each of them a server, too: each calls all others at the addresses that they have published."""
    nodes = [network.start(host, helper("probe"), MLFAB_RANK=rank, MLFAB_WORKERS=len(hosts), MLFAB_SERVERS=len(hosts), MLFAB_KEY="k" * 32,
                           MLFAB_COORDINATOR=coordinator, MLFAB_TIMEOUT_MS=60000, MLFAB_LOG="warn", **more)
             for rank, host in enumerate(hosts)]
    results = process.finish_all(*nodes)
    for result in results:
        expect(result.code == 0, "a rank finds all others", result)
    return results


USB = "link add usb0 type veth peer name usb1", "link set usb1 up", "link set usb0 up"
CABLE = "link add wan0 type veth peer name wan1", "addr add 192.168.8.2/24 dev wan0", "link set wan0 up"


@process.cases(("a network of its own", USB + ("addr add 192.168.7.2/24 dev usb0",), False),
               ("link-local", USB + ("addr add 169.254.3.2/16 dev usb0",), False),
               ("no carrier", CABLE, False),
               ("only link-local and no carrier but IPv6", USB + CABLE + ("addr add 169.254.3.2/16 dev usb0",), True),
               ("IPv4 leads nowhere", USB + ("addr add 192.168.7.2/24 dev usb0",), True))
def test_interfaces_that_lead_nowhere(_, before, v6):
    """The first interface that is up is not the one that leads to the others."""
    network = Network(3, before, v6)
    try:
        come_together(network, "tcp:[fd78::1]:7070" if v6 else "tcp:10.78.0.1:7070")
    finally:
        network.down()


def test_a_name_that_is_loopback_at_home():
    """As Debian's /etc/hosts has it. Other hosts know the name's real address; rank 0 says what is wrong, and goes on."""
    network = Network(3, USB + ("addr add 192.168.7.2/24 dev usb0",))  # rank 1 calls over the loopback
    try:
        for host in (1, 2, 3):
            os.makedirs("/etc/netns/" + network.name(host))
            with open("/etc/netns/%s/hosts" % network.name(host), "w", encoding="ascii") as hosts:
                hosts.write("127.0.0.1 localhost\n%s first\n" % ("127.0.1.1" if host == 1 else "10.78.0.1"))
        results = come_together(network, "tcp:first:7070", (1, 1, 2, 3))
        expect("'first' is 127.0.1.1" in results[0].err, "rank 0 reports it", results[0])
    finally:
        network.down()


@cases(())
@within(8000)
def test_no_way_names_the_addresses(ms):
    """A firewall lets in what server 0 needs only. The errors of others name the addresses that were tried."""
    network = Network(3, USB + ("addr add 192.168.7.2/24 dev usb0",))
    try:
        must("ip", "-n", network.name(3), "route", "add", "blackhole", "10.78.0.2/32")
        must("ip", "-n", network.name(2), "route", "add", "blackhole", "10.78.0.3/32")
        nodes = [network.start(host, helper("probe"), MLFAB_RANK=host - 1, MLFAB_WORKERS=3, MLFAB_SERVERS=3, MLFAB_KEY="k" * 32,
                               MLFAB_COORDINATOR="tcp:10.78.0.1:7070", MLFAB_TIMEOUT_MS=ms) for host in (1, 2, 3)]
        result = process.finish_all(*nodes)[2]
        expect(result.code != 0 and "tcp:10.78.0.2:" in result.out and "tcp:192.168.7.2:" in result.out,
               "the error names both addresses of rank 1", result)
    finally:
        network.down()


def fabric_scheduler(network):
    return network.start(SCHEDULER, helper("traffic"), "0", str(BYTES), MLFAB_WORKERS=WORKERS,
                         MLFAB_SERVERS=1, MLFAB_DEDICATED=1, MLFAB_ALLOW_INSECURE=1,
                         MLFAB_COORDINATOR="tcp:10.78.0.%d:7070" % SERVER, MLFAB_TRANSPORT="tcp",
                         MLFAB_SOCKET_IFNAME="eth0", MLFAB_TIMEOUT_MS=60000, MLFAB_RANK=0,
                         MLFAB_SCHEDULER="own", MLFAB_DELAY_BOUND=BOUND, MLFAB_ROLE="scheduler")


if __name__ == "__main__":
    process.main(globals(), jobs=1)
