#!/usr/bin/env python3
"""Log, metrics and trace of real processes: whole files at any time, traces that agree with the counters and with each
other, files that cannot be written, processes that are killed; and mlfab-top."""
import collections
import fcntl
import functools
import glob
import http.server
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
import threading
import time
import urllib.parse
from decimal import Decimal

from curl_test import Server, free_port, get
from process import (BUILD, PATIENCE, RUN, Skip, cases, clean_environment, expect, finish, helper, launch, main, run, start, tell,
                     wait_until)

TOP = os.path.join(BUILD, "mlfab-top")
TRACE_TOOL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/trace.py")


class Folder:
    def __enter__(self):
        self.path = tempfile.mkdtemp(prefix="mlfab-telemetry-")
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)

    def __call__(self, name):
        return os.path.join(self.path, name)

    def environment(self, **more):
        return clean_environment(**{"MLFAB_METRICS": self("m.prom"), "MLFAB_TRACE": self("t.json"),
                                    "MLFAB_METRICS_MS": 20, **more})


# ---- a strict reader of OpenMetrics text

LABELS = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\[\\"n])*)"')
SUFFIX = {"counter": "_total", "gauge": ""}


def parse_metrics(text):
    """{(name, labels): value}, or an AssertionError that names the line."""
    expect(text.endswith("# EOF\n"), "it ends in # EOF", text[-200:])
    samples, families, family = {}, {}, None
    for number, line in enumerate(text.splitlines()[:-1], 1):
        where = "line %d: %s" % (number, line)
        described = re.match(r"# (TYPE|UNIT|HELP) (mlfab_\w+) (.+)$", line)
        if described:
            what, name, rest = described.groups()
            if what == "TYPE":
                expect(name not in families and rest in SUFFIX, "a new family of a known type", where)
                family = families[name] = {"name": name, "TYPE": rest}
            expect(family and family["name"] == name, "the lines of a family stand together", where)
            expect(what == "TYPE" or what not in family, "each line once", where)
            family[what] = rest
            expect(what != "UNIT" or name.endswith("_" + rest), "the name ends in the unit", where)
            continue
        sample = re.match(r"(mlfab_\w+)\{(.*)\} (\d+(?:\.\d+)?)$", line)
        expect(sample and family, "a sample of a family", where)
        name, labels, value = sample.groups()
        expect(name == family["name"] + SUFFIX[family["TYPE"]], "the suffix of its type", where)
        found = LABELS.findall(labels)
        expect(",".join('%s="%s"' % pair for pair in found) == labels, "labels", where)
        expect(len({key for key, _ in found}) == len(found), "each label once", where)
        key = name, tuple(sorted(found))
        expect(key not in samples, "each sample once", where)
        samples[key] = Decimal(value)
    expect(all("HELP" in f for f in families.values()), "every family has help")
    return samples


class Metrics:
    def __init__(self, text):
        self.samples = parse_metrics(text)

    def __getitem__(self, name):
        found = [value for (key, _), value in self.samples.items() if key == "mlfab_" + name]
        expect(len(found) == 1, "one sample of %s" % name, found)
        return int(found[0])

    def labels(self, name):
        return [dict(labels) for (key, labels) in self.samples if key == "mlfab_" + name]


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def all_metrics(folder):
    return {os.path.basename(path)[2:-5]: Metrics(read(path)) for path in glob.glob(folder("m.*.prom"))}


# ---- a strict reader of traces

def slices_by_lane(events):
    lanes = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event))
    return lanes


def parse_trace(text):
    return json.loads(text, parse_float=Decimal, parse_int=Decimal)


def names_of(events):
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def check_trace(events):
    """Checks one node's trace; returns the bytes of its lanes: out, in."""
    names, moved = names_of(events), {"to": 0, "from": 0, "plan": 0}
    lanes = slices_by_lane(events)
    for tid, slices in lanes.items():
        expect(tid in names, "every lane has a name", tid)
        last = Decimal(0)
        for begin, end, event in slices:
            expect(begin >= last and end > begin, "slices of a lane ascend", (names[tid], event))
            last = end
            moved[names[tid].split()[0]] += int(event["args"]["bytes"])
    for event in events:
        if event["ph"] in "sf":
            inside = [s for s in lanes[event["tid"]] if s[0] <= event["ts"] <= s[1]]
            expect(inside, "an arrow begins and ends in a slice", event)
            expect(event["ph"] == "s" or event["bp"] == "e", "it binds to that slice", event)
    expect(not [e for e in events if e["name"] == "records lost"], "nothing was lost")
    return moved["to"], moved["from"]


def check_traces(folder, metrics):
    traces = {os.path.basename(path)[2:-5]: parse_trace(read(path)) for path in glob.glob(folder("t.*.json"))}
    expect(sorted(traces) == sorted(metrics), "a trace for each node", (sorted(traces), sorted(metrics)))
    begun, ended = {}, {}
    for name, events in traces.items():
        out, came = check_trace(events)
        expect(out == metrics[name]["payload_sent_bytes_total"], "all bytes sent are on lanes of " + name, out)
        expect(came == metrics[name]["payload_received_bytes_total"], "so are those received", came)
        expect(len({e["pid"] for e in events}) == 1, "one process", name)
        for event in events:
            if event["ph"] in "sf":
                ends = begun if event["ph"] == "s" else ended
                expect(event["id"] not in ends, "one arrow a transfer", event)
                ends[event["id"]] = event
    expect(len({e[0]["pid"] for e in traces.values()}) == len(traces), "each node is its own process")
    expect(set(begun) == set(ended), "every arrow has both ends", (len(begun), len(ended)))
    for key, event in begun.items():
        expect(event["name"] == ended[key]["name"], "both ends say what it is", event)
        # The sender reads the clock after it has sent, and another process may run first.
        late = event["ts"] - ended[key]["ts"]
        expect(late < 500000, "nothing arrives before it was sent", (event, ended[key]))
    return traces, collections.Counter(e["name"] for e in begun.values())


def stepper(folder, *arguments, ranks=("-n", 3, "-s", 2), **environment):
    result = launch(*ranks, "--timeout", 60, helper("stepper"), *arguments,
                    env=folder.environment(**environment))
    expect(result.code == 0, "it trains", result)
    return result


# ---- metrics and traces of whole runs

def test_traces_agree_with_the_counters():
    with Folder() as folder:
        stepper(folder, 200000, 8)  # 400 kB a server: granted, in two frames
        metrics = all_metrics(folder)
        expect(sorted(metrics) == ["server-0", "server-1", "worker-0", "worker-1", "worker-2"], "five nodes",
               sorted(metrics))
        _, arrows = check_traces(folder, metrics)
        expect(arrows["push"] == 3 * 8 * 2 + 2, "an arrow a push and server, and the first weights", arrows)
        pulls = sum(metrics[s]["pulls_answered_total"] for s in metrics)
        expect(arrows["pull"] == pulls >= 3 * 8 * 2, "an arrow a pull and server", (arrows, pulls))
        for rank in range(3):
            mine = metrics["worker-%d" % rank]
            expect(mine["iterations_total"] == mine["pushes_applied_total"] == 8, "iterations")
            expect(mine["collectives_total"] == 8 and mine["state"] == 3, "collectives; it has closed")
            expect(mine.labels("node_info")[0]["rank"] == str(rank), "its rank")
        delays = [sum(m[name] for m in metrics.values()) for name in ("push_delay_updates_total",
                                                                      "delay_updates_total")]
        expect(delays[0] <= delays[1] <= 2 * delays[0] or delays[1] == 0, "delays of workers and servers", delays)


def test_plan_beside_fact():
    with Folder() as folder:
        stepper(folder, 200000, 6, ranks=("-n", 4, "-s", 1, "--scheduler", "beside"))
        metrics = all_metrics(folder)
        traces, arrows = check_traces(folder, metrics)
        events = traces["server-0"]
        names = names_of(events)
        planned = [e for e in events if e["ph"] == "X" and e["cat"] == "plan"]
        expect(planned and all(names[e["tid"]].startswith("plan for worker") for e in planned), "plans", planned)
        expect(metrics["server-0"]["plans_made_total"] > 0, "it plans")
        # Every planned update came, directly or as a member of a group.
        facts = set()
        for name, trace in traces.items():
            own = names_of(trace)
            for e in trace:
                if e["ph"] == "X" and e["cat"] in ("push", "member") and own[e["tid"]].startswith("from worker"):
                    facts.add((own[e["tid"]].split()[2], e["name"].split()[1]))
        pushes = {(names[e["tid"]].split()[3], e["name"].split()[1]) for e in planned if e["name"].startswith("push")}
        expect(len(pushes) == 4 * 6, "all updates were planned once", len(pushes))
        expect(pushes <= facts, "each planned update came", pushes - facts)
        # Beside each other: the plan's lane stands directly before the worker's.
        order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
        by_order = [names[tid] for tid in sorted(order, key=order.get)]
        at = by_order.index("plan for worker 2")
        expect("from worker 2" in by_order[at:at + 5], "plan beside fact", by_order)


def test_metrics_are_whole_at_any_time():
    """A busy machine may give this process little time beside the others: then they make more steps."""
    enough = (read_while_written(steps) for steps in (150, 600, 2400))
    expect(any(enough), "it is read while it is written")


def read_while_written(steps):
    """Have all files been read often enough?"""
    with Folder() as folder:
        process = start(RUN, "-n", 2, "--timeout", 60, helper("stepper"), 1000, steps, 0, 5,
                        env=folder.environment(MLFAB_METRICS_MS=10))
        reads, written = 0, set()
        while process.poll() is None:
            for path in glob.glob(folder("m.*.prom")):
                metrics = Metrics(read(path))
                written.add((path, [v for (k, _), v in metrics.samples.items()
                                    if k == "mlfab_written_timestamp_seconds"][0]))
                reads += 1
            time.sleep(random.random() * 0.005)
        result = finish(process)
        expect(result.code == 0, "it ends well", result)
        expect(not glob.glob(folder("*.part")), "nothing is left beside them")
        enough = reads > 20 and len(written) > 5
        if not enough:
            tell("test_metrics_are_whole_at_any_time: not within %d steps" % steps)
        return enough


def needed(program):
    if not shutil.which(program):
        raise Skip("%s is not installed" % program)


def test_promtool_takes_them():
    needed("promtool")
    with Folder() as folder:
        stepper(folder, 1000, 3)
        result = subprocess.run(["promtool", "check", "metrics"], input=read(folder("m.worker-1.prom")), text=True,
                                capture_output=True, check=False, timeout=60)
        # It reads the older text format only, where the help of a counter has the name of its sample, with _total. So it
        # parses, and 3 is its exit status for this advice.
        advice = (result.stdout + result.stderr).splitlines()
        expect(result.returncode == 3 and len(advice) > 50, "promtool", (result.returncode, advice))
        expect(all(re.match(r"mlfab_\w+_total no help text$", line) for line in advice), "no other advice", advice)


class Web(http.server.SimpleHTTPRequestHandler):
    """The files of `directory`, as docs/operating.md says."""
    extensions_map = {".prom": "application/openmetrics-text; version=1.0.0; charset=utf-8"}

    def log_message(self, *_):
        pass


def test_prometheus_takes_them():
    needed("prometheus")
    with Folder() as folder:
        stepper(folder, 1000, 3)
        metrics = all_metrics(folder)
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Web, directory=folder.path))
        web.handle_error = lambda *_: None  # a scrape that was given up
        threading.Thread(target=web.serve_forever, daemon=True).start()
        where = ["127.0.0.1:%d" % web.server_address[1]]
        with open(folder("prometheus.yml"), "w", encoding="ascii") as file:  # JSON is YAML
            json.dump({"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": [
                {"job_name": name, "metrics_path": "/m.%s.prom" % name, "static_configs": [{"targets": where}]}
                for name in metrics]}, file)
        port = free_port()
        try:
            with Server(port, "/-/ready", "prometheus", "--config.file=" + folder("prometheus.yml"),
                        "--storage.tsdb.path=" + folder("data"),
                        "--web.listen-address=127.0.0.1:%d" % port) as server:
                def query(text):
                    answer = get(server.url + "/api/v1/query?query=" + urllib.parse.quote(text))
                    return json.loads(answer)["data"]["result"] if answer else []

                wait_until(lambda: len(query("up == 1")) == len(metrics), lambda: "five targets: %s" % query("up"))

                def steps():
                    return {one["metric"]["rank"]: one["value"][1] for one in query('mlfab_iterations_total{role="worker"}')}

                def samples(name):
                    found = {}
                    for one in query('{__name__=~"mlfab_.+",job="%s"}' % name):
                        labels = [pair for pair in one["metric"].items() if pair[0] not in ("__name__", "job", "instance")]
                        found[one["metric"]["__name__"], tuple(sorted(labels))] = float(one["value"][1])
                    return found

                # A scrape that takes longer than half a second fails, and all samples are away until the next one.
                wait_until(lambda: steps() == {"0": "3", "1": "3", "2": "3"}, lambda: "the iterations of three workers: %s" % steps())
                for name, of_node in metrics.items():
                    wanted = {(key, tuple(sorted(labels))): float(value) for (key, labels), value in of_node.samples.items()}
                    wait_until(lambda n=name, w=wanted: samples(n) == w,
                               lambda n=name, w=wanted: "every sample of %s: %s" % (n, set(samples(n).items()) ^ set(w.items())))
        finally:
            web.shutdown()
            web.server_close()


# ---- whom they wait for

def test_waits_for_whom():
    with Folder() as folder:
        process = start(RUN, "-n", 3, "--timeout", 60, "--set", "consistency=bsp", helper("stepper"), 1000, 100000,
                        env=folder.environment(MLFAB_TRACE=""))
        try:
            wait_until(lambda: len(glob.glob(folder("m.worker-*.prom"))) == 3, "metrics")
            wait_until(lambda: all_metrics(folder)["worker-1"]["iterations_total"] > 2, "steps")
            pid = int(all_metrics(folder)["worker-1"].labels("node_info")[0]["pid"])
            os.kill(pid, signal.SIGSTOP)
            told = wait_until(lambda: [w for w in all_metrics(folder)["worker-0"].labels("waits_seconds")
                                       if w.get("peer") == "1"], lambda: read(folder("m.worker-0.prom")))
            expect(told[0]["for"] == "worker" and told[0]["call"] in ("pull", "collective"), "whom", told)
            top = run(TOP, "--count", 1, folder("m.*.prom"))
            expect(re.search(r"^worker 0 +ready .* (pull|collective) [\d.]+ s, for worker 1$", top.out, re.M), "top",
                   top)
            os.kill(pid, signal.SIGCONT)
        finally:
            process.terminate()
            finish(process)


# ---- files that cannot be written, and processes that die

def test_a_path_that_cannot_be_written():
    with Folder() as folder:
        # 200 ms: many attempts
        result = stepper(folder, 1000, 20, 0, 10, MLFAB_METRICS=folder("none/m.prom"), MLFAB_TRACE=folder("none/t.json"),
                         MLFAB_LOG="error:" + folder("none/log"), ranks=("-n", 2, "-s", 1))
        said = [line for line in result.err.splitlines() if "cannot write" in line]
        for what in ("log", "metrics", "trace"):
            expect(len([line for line in said if what + ": cannot" in line]) == 3, "one line a file and node", result)
        expect(all("No such file or directory; " in line for line in said), "why", result)


def test_a_full_disk():
    with Folder() as folder:
        # 16 kB a file at most: the metrics fit, the trace does not.
        script = 'ulimit -f 32; exec "$0" "$@"'  # blocks of 512 bytes
        result = launch("-n", 2, "-s", 0, "--tcp", "--timeout", 60, "sh", "-c", script, helper("stepper"), 1000, 300,
                        env=folder.environment())
        expect(result.code == 0, "it trains", result)
        said = [line for line in result.err.splitlines() if "cannot write" in line]
        expect(len(said) == 2 and all("trace" in s and "File too large" in s for s in said), "one line", result)
        for path in glob.glob(folder("m.*.prom")):
            Metrics(read(path))
        # 4 kB: nothing fits; no file is left half written.
        with Folder() as second:
            result = launch("-n", 1, "-s", 0, "--tcp", "--timeout", 60, "sh", "-c", script.replace("32", "8"),
                            helper("stepper"), 1000, 10, env=second.environment())
            expect(result.code == 0 and "metrics: cannot write" in result.err, "one line", result)
            expect(not glob.glob(second("m.*")), "no part", os.listdir(second.path))


def test_a_killed_process():
    with Folder() as folder:
        process = start(RUN, "-n", 2, "--timeout", 60, "--on-failure", "continue", helper("stepper"), 1000, 100000,
                        env=folder.environment())
        try:
            wait_until(lambda: len(all_metrics(folder)) == 3 and
                       all_metrics(folder)["worker-1"]["iterations_total"] > 20, "steps")
            pid = int(all_metrics(folder)["worker-1"].labels("node_info")[0]["pid"])
            os.kill(pid, signal.SIGKILL)
            top = wait_until(lambda: [line for line in run(TOP, "--count", 1, folder("m.*.prom")).out.splitlines()
                                      if re.match("worker 1 +dead", line)], "top says that it is dead")
            expect(top[0].endswith("-"), "it waits for nobody", top)
        finally:
            process.terminate()
            finish(process)
        Metrics(read(folder("m.worker-1.prom")))
        lines = read(folder("t.worker-1.json")).splitlines()
        expect(lines[0] == "[" and len(lines) > 20, "its trace", lines[:3])
        for line in lines[1:-1]:
            json.loads(line.rstrip(","))
        joined = run("python3", TRACE_TOOL, "join", *glob.glob(folder("t.*.json")))
        expect(joined.code == 0, "join", joined)
        pids = {event["pid"] for event in json.loads(joined.out)}
        expect(len(pids) == 3, "the files of all nodes, one of them cut off", pids)
        picture = run("python3", TRACE_TOOL, "svg", *glob.glob(folder("t.*.json")))
        expect(picture.out.startswith("<svg") and picture.out.count("<rect") > 20, "a picture", picture.err)
        legend = picture.out[picture.out.rindex("<rect"):]
        expect("in milliseconds" in picture.out and 'height="12"' in legend and legend.count("<text") == 1, "labels and a legend", legend)


# ---- the log

def test_log_to_a_file_and_to_stderr():
    with Folder() as folder:
        stepper(folder, 1000, 3, MLFAB_LOG="info:" + folder("log"))
        said = read(folder("log.server-0"))
        for line in said.splitlines():
            expect(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z (INFO |WARN ) server-0: \S", line), "form", line)
        expect("worker 2: joined" in said, "what happened", said)
        result = stepper(folder, 1000, 3, MLFAB_LOG="info", ranks=("-n", 2, "-s", 0))
        expect(re.search(r"^\[worker 0\] \S+Z INFO  worker-0: worker 1: joined$", result.err, re.M), "stderr", result)
        result = stepper(folder, 1000, 3, MLFAB_LOG="info:" + folder("none/log"), ranks=("-n", 2, "-s", 0))
        expect("log: cannot write '%s'" % folder("none/log.worker-0") in result.err, "why", result)
        expect("worker 1: joined" in result.err, "its lines go to stderr", result)
    for name, value in (("LOG", "loud"), ("METRICS_MS", "5")):
        result = launch("-n", 1, "-s", 0, helper("stepper"), 10, 1,
                        env=clean_environment(**{"MLFAB_" + name: value}))
        expect(result.code != 0 and value in result.err, "it names the value", result)


def link_to(kind, target, path):
    """A name that leads to another file."""
    (os.link if kind == "hard" else os.symlink)(target, path)


@cases("soft", "hard")
def test_links_of_others_lead_nowhere(kind):
    """In a directory in which others may write, none of our files changes the file that their link names."""
    with Folder() as folder:
        precious = folder("precious")
        with open(precious, "w", encoding="ascii") as file:
            file.write("precious\n")
        for name in ("log.worker-0", "t.worker-0.json", "m.worker-0.prom"):
            link_to(kind, precious, folder(name))
        # The names of parts: the shell's process becomes the trainer, so its number is known.
        command = 'for p in "$1/m.worker-0.prom.$$.part"; do ln %s "$0" "$p"; done; shift; exec "$@"' % (
            "-s" if kind == "soft" else "")
        result = launch("-n", 1, "-s", 0, "--timeout", 60, "sh", "-c", command, precious, folder.path, helper("stepper"),
                        1000, 3, env=folder.environment(MLFAB_LOG="info:" + folder("log")))
        expect(result.code == 0, "it trains", result)
        expect(read(precious) == "precious\n", "the file is as it was", read(precious))
        why = "is a symbolic link" if kind == "soft" else "has a second name"
        expect(re.search(r"log: cannot write '%s': .*%s" % (re.escape(folder("log.worker-0")), why), result.err), "log", result)
        if kind == "soft":
            expect(re.search(r"trace: cannot write '%s': .*%s" % (re.escape(folder("t.worker-0.json")), why), result.err),
                   "trace", result)
        else:
            parse_trace(read(folder("t.worker-0.json")))
        expect(not os.path.islink(folder("m.worker-0.prom")), "the metrics replace the link")
        Metrics(read(folder("m.worker-0.prom")))


def test_files_that_are_none():
    """A FIFO, which nobody reads, delays nothing."""
    with Folder() as folder:
        for name in ("log.worker-0", "t.worker-0.json"):
            os.mkfifo(folder(name))
        result = stepper(folder, 1000, 3, MLFAB_LOG="info:" + folder("log"), ranks=("-n", 1, "-s", 0))
        for what in ("log", "trace"):
            expect(re.search(what + ": cannot write '.*': it is not a regular file", result.err), what, result)


def test_a_file_of_an_earlier_run():
    """The log is appended to, the trace is new."""
    with Folder() as folder:
        for _ in range(2):
            stepper(folder, 1000, 3, MLFAB_LOG="info:" + folder("log"), ranks=("-n", 1, "-s", 0))
        said = read(folder("log.worker-0"))
        parse_trace(read(folder("t.worker-0.json")))
        expect(len({line[:27] for line in said.splitlines()}) >= 2, "lines of both runs", said)


def test_a_joiner_has_its_own_files():
    with Folder() as folder:
        address = "unix:@mlfab-telemetry-%d" % os.getpid()
        environment = folder.environment(MLFAB_CONSISTENCY="async")
        process = start(RUN, "-n", 1, "-s", 0, "--max-workers", 2, "--timeout", 60, "sh", "-c",
                        'echo "$MLFAB_COORDINATOR $MLFAB_JOB $MLFAB_KEY" >"$0"; exec "$@"', folder("where"),
                        helper("stepper"), 1000, 10 ** 6, 0, 1, env=environment)
        try:
            wait_until(lambda: os.path.exists(folder("m.worker-0.prom")), address)
            coordinator, job, key = read(folder("where")).split()
            joiner = run(helper("stepper"), 1000, 3, timeout=60,
                         env=dict(environment, MLFAB_JOIN="1", MLFAB_COORDINATOR=coordinator, MLFAB_JOB=job,
                                  MLFAB_KEY=key))
            metrics = all_metrics(folder)
            expect("worker-1" in metrics, "a file of the joiner", joiner)
            expect(metrics["worker-0"]["state"] == 1, "the other one's stays", joiner)
        finally:
            process.terminate()
            finish(process)


# ---- mlfab-top

def test_top_in_lines():
    with Folder() as folder:
        stepper(folder, 200000, 5)
        result = run(TOP, "--count", 1, folder("m.*.prom"))
        expect(result.code == 0, "exit status", result)
        lines = result.out.splitlines()
        expect("5 nodes" in lines[0] and lines[1].split()[:3] == ["NODE", "STATE", "STEP"], "heading", result)
        expect([line.split()[:4] for line in lines[2:]] ==
               [["worker", "0", "closed", "5"], ["worker", "1", "closed", "5"], ["worker", "2", "closed", "5"],
                ["server", "0", "closed", "5"], ["server", "1", "closed", "5"]], "a line a node", result)
        same = run(TOP, "--count", 1, env=folder.environment())
        expect(same.out.splitlines()[1:] == lines[1:], "the files that MLFAB_METRICS names", same)
        same = run(TOP, "--count", 1, env=folder.environment(MLFAB_METRICS=folder("m.{node}.prom")))
        expect(same.out.splitlines()[1:] == lines[1:], "likewise", same)
    expect(run(TOP, "--count", 1, "/nowhere/*.prom").code == 1, "no file")
    for wrong in (["--interval", "0"], ["--count", "x"], ["--nonsense"], []):
        result = run(TOP, *wrong)
        expect(result.code == 2 and result.err.startswith("mlfab-top: ") and result.err.count("\n") == 1, "one line", result)


def test_top_survives_any_file():
    with Folder() as folder:
        stepper(folder, 1000, 3)
        whole = open(folder("m.worker-0.prom"), "rb").read()
        rng = random.Random(3)
        for i in range(150):
            damaged = bytearray(whole)
            for _ in range(rng.randrange(1, 40)):
                damaged[rng.randrange(len(damaged))] = rng.choice(b'\x00\x1b"\\{}=,\n 9e-')
            cut = bytes(damaged[:rng.randrange(len(damaged))]) if i % 3 == 0 else bytes(damaged)
            with open(folder("d.%d.prom" % i), "wb") as file:
                file.write(cut + (b"# EOF\n" if i % 2 else b""))
        result = run(TOP, "--count", 1, folder("*.prom"))
        expect(result.code == 0 and "worker 2" in result.out, "it goes on", result)
        expect("\x1b" not in result.out, "no control character of a file reaches the terminal", repr(result.out))


def test_top_on_a_terminal():
    with Folder() as folder:
        stepper(folder, 1000, 3)
        controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 6, 60, 0, 0))
        before = termios.tcgetattr(terminal)
        process = subprocess.Popen([TOP, "--interval", "0.2", folder("m.*.prom")], stdin=terminal, stdout=terminal,
                                   stderr=terminal, env=clean_environment(TERM="xterm"))
        shown = b""
        until = time.monotonic() + PATIENCE
        while shown.count(b"\x1b[H") < 3 and time.monotonic() < until:
            if select.select([controller], [], [], 0.1)[0]:
                shown += os.read(controller, 65536)
        os.write(controller, b"q")
        expect(process.wait(timeout=PATIENCE) == 0, "q ends it")
        while select.select([controller], [], [], 0.2)[0]:
            shown += os.read(controller, 65536)
        expect(b"worker 0" in shown and b"... and 2 more" in shown, "as many rows as fit", shown)
        expect(shown.rstrip().endswith(b"\x1b[?25h\x1b[?1049l"), "it leaves the terminal as it was", shown[-100:])
        expect(termios.tcgetattr(terminal) == before, "and its settings")
        table = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown.split(b"\x1b[H")[1])
        expect(max(len(line) for line in table.split(b"\r\n")) <= 60, "no row is wider than the terminal", table)
        os.close(controller)
        os.close(terminal)


if __name__ == "__main__":
    main(globals(), jobs=4)
