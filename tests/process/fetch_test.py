#!/usr/bin/env python3
# lane: check
"""mlfab-fetch against a server of this test, which breaks off, lies and loops. Nothing comes from the internet: the files are
generated, and the list of the tool itself is compared with its own format only."""
import gzip
import hashlib
import http.server
import os
import random
import re
import shutil
import signal
import struct
import tempfile
import threading
import time

from process import BUILD, Skip, clean_environment, expect, finish, main, run, start, wait_until

FETCH = os.path.abspath("tools/mlfab-fetch")
MNIST = os.path.join(BUILD, "examples", "mnist")


class Handler(http.server.BaseHTTPRequestHandler):
    """/good/NAME knows parts; what other first folders do is in `answer`."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        site = self.server.site
        _, how, name = self.path.split("/")
        site.requests.append((how, name, self.headers.get("Range")))
        data = site.files.get(name)
        if data is None or how == "missing":
            self.head(404, 0)
            return
        first = 0
        part = re.match(r"bytes=(\d+)-$", self.headers.get("Range") or "")
        if part and how not in ("whole",):
            first = int(part.group(1))
            if first >= len(data):
                self.head(416, 0)
                return
        self.answer(how, name, data, first)

    def head(self, status, length, **more):
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for key, value in more.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()

    def answer(self, how, name, data, first):
        site = self.server.site
        if how == "moved":
            self.head(302, 0, Location="/good/" + name)
            return
        if how == "file":
            self.head(302, 0, Location="file://" + site.secret)
            return
        if how == "busy" and len([r for r in site.requests if r[0] == "busy"]) < 3:
            self.head(503, 0)
            return
        if how == "endless":
            self.head(200, None, Connection="close")
            self.close_connection = True
            try:
                while True:
                    self.wfile.write(data)
            except OSError:
                return
        body = data[first:]
        if how == "liar":
            body = bytes(b ^ 1 for b in body)
        if how == "short":
            body = data[first:len(data) // 2]
        if first:
            self.head(206, len(body), Content_Range="bytes %d-%d/%d" % (first, first + len(body) - 1, len(data)))
        else:
            self.head(200, len(body))
        if how == "cut":  # a third of the file at a time
            self.wfile.write(body[:len(data) // 3 + 1])
            self.wfile.flush()
            self.close_connection = True
            if len(body) > len(data) // 3 + 1:
                self.connection.shutdown(2)
            return
        if how == "slow":
            try:
                for at in range(0, len(body), 1000):
                    self.wfile.write(body[at:at + 1000])
                    self.wfile.flush()
                    time.sleep(0.02)
            except OSError:
                pass
            return
        self.wfile.write(body)


class Site:
    """Files at a port of loopback, a folder to load them into, and their list."""

    def __init__(self, **files):
        self.files = {name.replace("_", "."): data for name, data in files.items()}
        self.requests = []
        self.folder = tempfile.mkdtemp(prefix="mlfab-fetch-")
        self.secret = os.path.join(self.folder, "secret")
        with open(self.secret, "wb") as file:
            file.write(self.files[sorted(self.files)[0]])
        self.to = os.path.join(self.folder, "a", "b")
        self.list = os.path.join(self.folder, "list")
        with open(self.list, "w", encoding="ascii") as file:
            file.write("# of this test\n\n")
            for name, data in sorted(self.files.items()):
                file.write("%s %d %s\n" % (hashlib.sha256(data).hexdigest(), len(data), name))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.site = self
        self.server.handle_error = lambda *_: None  # a connection that the tool has reset
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, how):
        return "http://127.0.0.1:%d/%s/" % (self.server.server_address[1], how)

    def arguments(self, *hows, more=()):
        return [FETCH, "set", "--list", self.list, "--to", self.to, "--pause", "0.01",
                *[word for how in hows for word in ("--from", self.url(how))], *more]

    def fetch(self, *hows, more=(), **environment):
        return run(*self.arguments(*hows, more=more), env=clean_environment(no_proxy="127.0.0.1", **environment))

    def path(self, name):
        return os.path.join(self.to, name)

    def read(self, name):
        try:
            with open(self.path(name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def put(self, name, data):
        os.makedirs(self.to, exist_ok=True)
        with open(self.path(name), "wb") as file:
            file.write(data)

    def expect_all(self, result):
        expect(result.code == 0 and "all of set is in " + self.to in result.out, "all files are there", result)
        for name, data in self.files.items():
            expect(self.read(name) == data, "%s is right" % name, result)
        expect(sorted(os.listdir(self.to)) == sorted(self.files), "nothing else is there", os.listdir(self.to))


def noise(n, seed=1):
    return random.Random(seed).randbytes(n)


def test_sizes_and_what_is_there():
    sizes = [0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 128, 70000]
    with Site(**{"f%d" % n: noise(n, n) for n in sizes}) as site:
        site.expect_all(site.fetch("good"))
        before = len(site.requests)
        result = site.fetch("good")
        site.expect_all(result)
        expect(len(site.requests) == before and result.out.count(": there") == len(sizes), "it asks for nothing again", result)


def test_a_truncated_download_goes_on():
    with Site(a=noise(300000)) as site:
        result = site.fetch("cut")
        site.expect_all(result)
        ranges = [r[2] for r in site.requests]
        expect(ranges == [None, "bytes=100001-", "bytes=200002-"], "it goes on where it stopped: %s" % ranges, result)
        expect(result.out.count("broke off") == 2, "it says so", result)


def test_a_killed_download_goes_on_in_the_next_run():
    with Site(a=noise(300000)) as site:
        process = start(*site.arguments("slow"), env=clean_environment(no_proxy="127.0.0.1"))
        part = site.path("a.part")
        wait_until(lambda: os.path.exists(part) and os.path.getsize(part) >= 20000, "a part of the file")
        second = site.fetch("good")
        expect(second.code == 1 and "another process is loading it" in second.out, "two do not write one file", second)
        process.send_signal(signal.SIGKILL)
        finish(process)
        had = os.path.getsize(part)
        expect(site.read("a") is None and 0 < had < 300000, "there is only a part")
        result = site.fetch("good")
        site.expect_all(result)
        expect(site.requests[-1] == ("good", "a", "bytes=%d-" % had), "it asks for the rest: %s" % (site.requests[-1],), result)


def test_parts_that_do_not_fit():
    data = noise(300000)
    for part, how in ((noise(1000, 7), "good"), (noise(300000, 7), "good"), (noise(400000, 7), "good"), (data, "missing"),
                      (data[:1000], "whole")):
        with Site(a=data) as site:
            site.put("a.part", part)
            site.expect_all(site.fetch(how))


def test_servers_that_lie():
    data = noise(100000)
    for how, text in (("liar", "the SHA-256 is not that of the list"), ("endless", "more than 100000 bytes"),
                      ("short", "has 50000 bytes, not 100000"), ("missing", "the answer is 404"), ("file", "the answer is 302")):
        with Site(a=data) as site:
            result = site.fetch(how)
            expect(result.code == 1 and text in result.out and site.read("a") is None, "%s: %s" % (how, text), result)
            site.expect_all(site.fetch(how, "good"))  # the second place has it


def test_passwords_are_not_shown():
    with Site(a=noise(1000)) as site:
        for how in ("short", "missing", "liar", "endless", "moved"):
            site.secret_url = site.url(how).replace("//", "//me:open-sesame@")
            result = run(FETCH, "set", "--list", site.list, "--to", site.to, "--from", site.secret_url, "--force",
                         env=clean_environment(no_proxy="127.0.0.1"))
            expect("sesame" not in result.out + result.err, "the password is in an error", result)


def test_redirects_and_pauses():
    with Site(a=noise(1000), b=noise(2000)) as site:
        site.expect_all(site.fetch("moved"))
    with Site(a=noise(1000)) as site:
        result = site.fetch("busy")
        site.expect_all(result)
        expect(result.out.count("the answer is 503") == 2, "it tries again", result)
    with Site(a=noise(1000)) as site:
        result = run(FETCH, "set", "--list", site.list, "--to", site.to, "--pause", "0.01", "--retries", "2", "--from",
                     "http://127.0.0.1:1/")
        expect(result.code == 1 and result.out.count("127.0.0.1:1/a: ") == 3, "it gives up", result)


def test_another_file_of_this_name():
    with Site(a=noise(1000)) as site:
        site.put("a", b"my own")
        result = site.fetch("good")
        expect(result.code == 1 and "another file of this name" in result.out and site.read("a") == b"my own", "it stays",
               result)
        site.expect_all(site.fetch("good", more=["--force"]))


def test_what_is_no_file():
    for name, text in (("a", "another file of this name"), ("a.part", "is not a file")):
        with Site(a=noise(1000)) as site:
            os.makedirs(site.to)
            os.mkfifo(site.path(name))
            process = start(*site.arguments("good", more=["--retries", "0"]), env=clean_environment(no_proxy="127.0.0.1"))
            wait_until(lambda: process.poll() is not None, "an end in spite of a pipe called %s" % name)
            result = finish(process)
            expect(result.code == 1 and text in result.out, "%s is a pipe" % name, result)


def test_bad_input():
    with Site(a=noise(10)) as site:
        for line in ("x 1 y", "a" * 64 + " 1 ../y", "a" * 64 + " -1", "A" * 64 + " 1 y", "a" * 64 + " 1 .part"):
            with open(site.list, "w", encoding="ascii") as file:
                file.write(line + "\n")
            result = site.fetch("good")
            expect(result.code == 2 and "line 1: not `SHA256 BYTES NAME`" in result.err, line, result)
        for arguments in ((), ("other",), ("mnist", "x"), ("../x",), ("mnist", "--what"), ("mnist", "--pause", "x"), ("mnist", "--pause", "nan"),
                          ("other", "--list", site.list)):
            expect(run(FETCH, *arguments, env=clean_environment(HOME="/nonexistent")).code == 2, str(arguments))
        file_in_the_way = os.path.join(site.folder, "list", "x")
        result = run(FETCH, "mnist", "--to", file_in_the_way, "--from", site.url("good"))
        expect(result.code == 1 and "Not a directory" in result.out, "a folder that cannot be made", result)


def test_disk_full():
    if not os.path.exists("/dev/full"):
        raise Skip("there is no /dev/full")
    with Site(a=noise(1000)) as site:
        limited = "ulimit -f 1; trap '' XFSZ; exec \"$@\""
        site.files["a"] = noise(300000)
        with open(site.list, "w", encoding="ascii") as file:
            file.write("%s 300000 a\n" % hashlib.sha256(site.files["a"]).hexdigest())
        result = run("sh", "-c", limited, "sh", *site.arguments("good"), env=clean_environment(no_proxy="127.0.0.1"))
        expect(result.code == 1 and "File too large" in result.out, "it says why", result)
        site.expect_all(site.fetch("good"))


def idx(kind, *shape):
    return struct.pack(">HBB%dI" % len(shape), 0, 8, len(shape), *shape) + bytes(
        random.Random(kind).choices(range(10), k=shape[0] * (784 if len(shape) == 3 else 1)))


def test_the_example_finds_what_was_loaded():
    files = {"train-images-idx3-ubyte.gz": idx(1, 512, 28, 28), "train-labels-idx1-ubyte.gz": idx(2, 512),
             "t10k-images-idx3-ubyte.gz": idx(3, 64, 28, 28), "t10k-labels-idx1-ubyte.gz": idx(4, 64)}
    with Site(**{name: gzip.compress(data) for name, data in files.items()}) as site:
        for name, variables in (("data", {"MLFAB_DATA": site.folder + "/data"}), (".cache/mlfab", {"HOME": site.folder})):
            environment = clean_environment(no_proxy="127.0.0.1", **variables)
            result = run(FETCH, "mnist", "--list", site.list, "--from", site.url("good"), env=environment)
            expect(result.code == 0 and "all of mnist is in %s/%s/mnist" % (site.folder, name) in result.out, "it is there",
                   result)
            result = run(MNIST, "--epochs", "1", env=environment)
            expect(result.code == 0 and "hyperplane" not in result.out and "accuracy" in result.out, "it trains on it", result)


if __name__ == "__main__":
    main(globals(), jobs=4)
