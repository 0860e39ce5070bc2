#!/usr/bin/env python3
# lane: check
# limit: 600
"""Checkpoints in a WebDAV server (nginx, over TLS, with a password) and in S3 (store_s3.py, which checks every signature):
they are made and loaded again by another number of servers, whatever the server does and whenever a run is killed.

A push adds 1 to every element (tests/extras/store_trainer.c), so the elements are the versions of their slices: the largest
must be the version that the checkpoint has."""
import http.server
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time

from process import BUILD, RUN, SCALE, Skip, clean_environment, expect, finish, free_port, kill_run, main, start, wait_until
from store_s3 import S3

os.environ["no_proxy"] = "localhost,127.0.0.1"
TRAINER = os.path.join(BUILD, "tests", "extras", "store_trainer")
ELEMENTS = 150000  # 1.2 MB: several blocks
USER, PASSWORD = "trainer", "open-sesame/9"
LIVES = max(4, round(40 * SCALE / 100))
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
MODULES = ["/usr/lib/nginx/modules", "/usr/lib64/nginx/modules", "/usr/share/nginx/modules"]


def needed():
    if not os.path.exists(TRAINER):
        raise Skip("libcurl4-openssl-dev or libssl-dev is not installed")


def certificates(folder):
    """A certificate authority of its own, and localhost's certificate by it."""
    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.PIPE)
    with open(folder + "/names", "w", encoding="ascii") as file:
        file.write("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("ca", "other"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj",
                "/CN=" + name, "-keyout", name + ".key", "-out", name + ".pem")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost", "-keyout",
            "host.key", "-out", "host.csr")
    openssl("x509", "-req", "-in", "host.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", "names", "-out", "host.pem")


CONFIGURATION = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
{load}
events {{ worker_connections 64; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port} ssl;
    ssl_certificate {folder}/host.pem; ssl_certificate_key {folder}/host.key;
    auth_basic "checkpoints"; auth_basic_user_file {folder}/users;
    client_max_body_size 0;
    location / {{
      root {folder}/root;
      dav_methods PUT DELETE MOVE; dav_ext_methods PROPFIND OPTIONS; dav_access user:rw;
    }}
    location /limited/ {{
      root {folder}/root; client_max_body_size 100k;
      dav_methods PUT DELETE MOVE; dav_ext_methods PROPFIND OPTIONS;
    }}
    location /read/ {{ root {folder}/root; dav_ext_methods PROPFIND OPTIONS; }}
  }}
}}
"""


class Nginx:
    """`with Nginx() as dav`: a WebDAV server with TLS on loopback; dav.url, dav.root, dav.environment."""

    def __enter__(self):
        program = shutil.which("nginx", path=PATH)
        module = next((m + "/ngx_http_dav_ext_module.so" for m in MODULES
                       if os.path.exists(m + "/ngx_http_dav_ext_module.so")), None)
        if not program or not module:
            raise Skip("nginx or libnginx-mod-http-dav-ext is not installed")
        if not shutil.which("openssl"):
            raise Skip("openssl is not installed")
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = self.temporary.name
        self.root = self.folder + "/root"
        self.port = free_port()
        for name in ("run", "limited", "read"):
            os.makedirs("%s/%s" % (self.root, name))
        certificates(self.folder)
        with open(self.folder + "/users", "w", encoding="ascii") as file:
            file.write("%s:{PLAIN}%s\n" % (USER, PASSWORD))
        with open(self.folder + "/nginx.conf", "w", encoding="ascii") as file:
            file.write(CONFIGURATION.format(folder=self.folder, port=self.port, load="load_module %s;" % module))
        self.command = [program, "-p", self.folder, "-c", self.folder + "/nginx.conf"]
        self.process = None
        self.start()
        self.url = "https://localhost:%d/run" % self.port
        self.environment = dict(MLFAB_STORE_CA=self.folder + "/ca.pem", MLFAB_STORE_USER=USER,
                                MLFAB_STORE_PASSWORD=PASSWORD)
        return self

    def start(self):
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        wait_until(self.answers, "nginx")

    def answers(self):
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self):
        self.process.terminate()
        self.process.wait(20)

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.temporary.cleanup()

    def names(self, folder="run"):
        return sorted(os.listdir(os.path.join(self.root, folder)))


def command(rounds, directory="", servers=1, workers=2, resume="", commits=0, explicit="", transport="--tcp", elements=ELEMENTS,
            timeout_ms=60000):
    """mlfab-run with servers that have the store, too."""
    settings = ["--set", "checkpoint_dir=" + directory] if directory else []
    settings += ["--set", "checkpoint_commits=%d" % commits] if commits else []
    settings += ["--resume", resume] if resume else []
    trainer = [TRAINER, elements, rounds] + ([explicit] if explicit else [])
    return [RUN, "-n", workers, "-s", servers, transport, "--timeout", 100, "--set", "timeout_ms=%d" % timeout_ms, "--server",
            TRAINER, *settings, *trainer]


def train(place, rounds, *arguments, **more):
    """Runs it to its end. No output may contain a secret."""
    environment = dict(place.environment, **more.pop("env", {}))
    result = finish(start(*command(rounds, *arguments, **more), env=clean_environment(**environment)), 110)
    for secret in (PASSWORD, environment.get("AWS_SECRET_ACCESS_KEY"), environment.get("AWS_SESSION_TOKEN"), "Signature="):
        expect(not secret or secret not in result.out + result.err, "no secret is shown", result)
    return result


def begin_of(result):
    match = re.search(r"begin (\d+) (\d+) (-?\d+) (-?\d+) (\d+)", result.out)
    expect(match, "it began", result)
    return [int(word) for word in match.groups()]


def expect_made(result, number=None):
    expect(result.code == 0, "it succeeds", result)
    match = re.search(r"checkpoint (\d+)", result.out)
    expect(match and (number is None or int(match.group(1)) == number), "a checkpoint is made", result)


def expect_loaded(result, number, version):
    begin = begin_of(result)
    expect(result.code == 0 and begin[:2] == [number, version] and begin[2] == begin[3] == version,
           "checkpoint %d of version %d is loaded" % (number, version), result)


def expect_refused(result, *texts):
    expect(result.code != 0, "it fails", result)
    for text in texts:
        expect(re.search(text, result.err), "it says '%s'" % text, result)


# --- WebDAV: nginx


def test_dav_other_servers():
    needed()
    with Nginx() as dav:
        expect_made(train(dav, 4, servers=2, explicit=dav.url))
        names = dav.names()
        expect(len([n for n in names if n.endswith(".manifest")]) == 1 and not any(n.endswith(".part") for n in names),
               "the whole files are there", names)
        expect_loaded(train(dav, 3, servers=3, resume=dav.url + "/", explicit=dav.url + "/"), 1, 8)
        expect_loaded(train(dav, 1, servers=1, resume=dav.url), 2, 14)
        # What is there is what a local directory has: it can be copied.
        local = train(dav, 1, servers=2, resume=dav.root + "/run", env={"STORE_OFF": 1})
        expect_loaded(local, 2, 14)
        with open(dav.folder + "/access.log", encoding="ascii", errors="replace") as file:
            log = file.read()
        expect('"MOVE /run/checkpoint-' in log and re.search(r'"GET /run/checkpoint-\S+ HTTP/1.1" 206', log),
               "files are moved, and read in parts", log)
        # Nothing there: a new directory, and none.
        os.mkdir(dav.root + "/empty")
        base = dav.url[:-3]
        expect_refused(train(dav, 1, resume=base + "empty"), "there is no checkpoint in '%sempty'" % base)
        expect_refused(train(dav, 1, resume=base + "none"), "cannot list '%snone': PROPFIND: the answer is 404" % base)
        expect_refused(train(dav, 1, explicit=base + "none"), "%snone" % base, "the answer is 40")


def test_dav_every_n_and_keep():
    needed()
    with Nginx() as dav:
        process = start(*command(0, dav.url, servers=2, commits=20, transport="--shm"),
                        env=clean_environment(**dav.environment))
        try:
            wait_until(lambda: (numbers(dav.names()) or [0])[-1] >= 4, "four checkpoints")
        finally:
            kill_run(process)
        settled(dav.names)
        names = dav.names()
        expect(len(numbers(names)) <= 3 and len(names) <= 12, "older ones are removed", names)
        begin = begin_of(train(dav, 1, servers=1, resume=dav.url))
        expect(begin[1] == begin[3] >= 20, "the newest is loaded", begin)


def test_dav_refusals():
    needed()
    with Nginx() as dav:
        base = dav.url[:-3]
        expect_made(train(dav, 2, explicit=dav.url), 1)
        expect_refused(train(dav, 2, resume=dav.url, env={"MLFAB_STORE_PASSWORD": "not-it"}),
                       "cannot list '%s': PROPFIND: the answer is 401 Unauthorized" % dav.url)
        for wrong in (dav.folder + "/other.pem", "/does/not/exist"):
            result = train(dav, 2, resume=dav.url, env={"MLFAB_STORE_CA": wrong})
            expect_refused(result, "cannot list '%s': PROPFIND: .*(certificate|CA)" % dav.url)
            expect(result.seconds < 20 and "attempts" not in result.err, "it is not repeated", result)
        result = train(dav, 2, explicit=base + "limited")
        expect_refused(result, "MLFAB_ERR_IO: .*server 0.*'%slimited/checkpoint-.*': PUT: .*413" % base)
        expect_refused(train(dav, 2, explicit=base + "read"), "'%sread/checkpoint-.*': PUT: .*40[35]" % base)
        for url in ("https://%s:%s@localhost:%d/run" % (USER, PASSWORD.replace("/", "%2F"), dav.port),):
            expect_refused(train(dav, 1, explicit=url), "user or a password")
        expect_loaded(train(dav, 1, resume=dav.url), 1, 4)


def test_dav_is_away():
    """A restore does not take an older checkpoint because the server is away, and waits for one that comes back."""
    needed()
    with Nginx() as dav:
        expect_made(train(dav, 2, explicit=dav.url), 1)
        dav.stop()
        result = train(dav, 1, resume=dav.url, env={"MLFAB_STORE_TIMEOUT_MS": 2000})
        expect_refused(result, "MLFAB_ERR_TIMEOUT", "cannot list '%s': PROPFIND: .* attempts in " % dav.url)
        timer = threading.Timer(1.5, dav.start)
        timer.start()
        result = train(dav, 1, resume=dav.url)
        timer.join()
        expect_loaded(result, 1, 4)


def test_dav_disk_is_full():
    needed()
    with Nginx() as dav:
        full = dav.root + "/full"
        os.mkdir(full)
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", full], capture_output=True, text=True)
        if mount.returncode:  # no file system to fill: test_store.c has a server that says 507
            raise Skip("a tmpfs cannot be mounted in this mount namespace: " + mount.stderr.strip().split("\n")[0])
        try:
            url = dav.url[:-3] + "full"
            expect_made(train(dav, 2, explicit=url), 1)
            # nginx says 500 where its copy of the file into this file system fails.
            expect_refused(train(dav, 2, resume=url, explicit=url), "'%s/checkpoint-.*': PUT: the answer is 50[07] " % url)
            expect_loaded(train(dav, 1, resume=url), 1, 4)
        finally:
            subprocess.run(["umount", full], check=True)


# --- kill -9


def settled(names):
    """A request that the store has may end after the run that sent it."""
    seen = None
    while seen != names():
        seen = names()
        time.sleep(0.3)


def live(place, directory, manifests, number, servers, dice, writes):
    """One run, killed after up to 0.6 s, as soon as writes() is true. Returns the first numbers of worker 0."""
    before = (manifests() or [0])[-1]
    process = start(*command(0, directory, servers, resume=directory if number else "", commits=dice.choice([2, 7, 20]),
                             transport="--tcp"), env=clean_environment(**place.environment))
    try:
        line = ""
        while "] begin" not in line:
            line = process.stdout.readline()
            if not line:
                raise AssertionError("it ended: %r" % finish(process))
        wait_until(lambda: (manifests() or [0])[-1] > before + 1, "two checkpoints")
        time.sleep(dice.random() * 0.6)
        wait_until(writes, "it writes")
    finally:
        error = kill_run(process) if process.poll() is None else ""
    settled(manifests)
    return [int(word) for word in line.split()[-5:]], error


def lives(place, directory, manifests, seed, after=lambda: None, writes=lambda: True):
    dice = random.Random(seed)
    version = 0
    for number in range(LIVES):
        newest = (manifests() or [0])[-1]
        begin, error = live(place, directory, manifests, number, dice.choice([1, 2, 3]), dice, writes)
        what = "seed %d, life %d: %s\n%s" % (seed, number, begin, error)
        expect(begin[0] == newest, "the newest checkpoint, %d, is loaded" % newest, what)
        expect(begin[1] == begin[3] and begin[4] <= 48, "the largest element is the version", what)
        expect(begin[1] >= version, "it does not go back behind %d" % version, what)
        version = begin[1]
        after()


def numbers(names):
    found = (re.search(r"checkpoint-(\d+)\.manifest$", name) for name in names)
    return sorted(int(match.group(1)) for match in found if match)


def test_killed_with_dav():
    needed()
    with Nginx() as dav:
        lives(dav, dav.url, lambda: numbers(dav.names()), 3)
        expect_made(train(dav, 1, resume=dav.url, explicit=dav.url, env={"STORE_WAIT": 2}))
        expect(not [n for n in dav.names() if n.endswith(".part")], "nothing is left of them", dav.names())


def test_killed_with_s3():
    needed()
    with S3() as s3:
        s3.environment["MLFAB_STORE_PART_BYTES"] = 65536
        s3.store.fault = lambda handler, m, k, q: time.sleep(0.02 if "partNumber" in q else 0)
        left = []
        lives(s3, "s3://the-bucket/a/run", lambda: numbers(list(s3.store.objects)), 4,
              lambda: left.append(len(s3.store.uploads)), lambda: len(left) % 2 or s3.store.uploads)
        expect_made(train(s3, 1, resume="s3://the-bucket/a/run", explicit="s3://the-bucket/a/run", env={"STORE_WAIT": 2}))
        print("# %d requests, %d parts, uploads that were left: %s" % (s3.store.verified, s3.store.parts, left))
        expect(any(left), "runs were killed in the middle of an upload", left)
        expect(not s3.store.uploads and s3.store.parts > 10, "nothing is left of them", s3.store.uploads)
        expect(not [r for r in s3.store.refusals if r not in ("NoSuchKey", "NoSuchUpload")], "all was signed", s3.store.refusals)


# --- S3


def test_s3_other_servers():
    needed()
    for token in ("", "a/session+token==" * 20):
        with S3(token=token, region="eu-west-3") as s3:
            url = "s3://the-bucket/a run+1/x"
            expect_made(train(s3, 4, servers=2, explicit=url), 1)
            expect_loaded(train(s3, 3, servers=3, resume=url + "/", explicit=url, env={"MLFAB_STORE_PART_BYTES": 100000}), 1, 8)
            expect(s3.store.parts > 10, "it was sent in parts", s3.store.parts)
            expect_loaded(train(s3, 1, servers=1, resume=url), 2, 14)
            expect(not s3.store.uploads and all(k.startswith("a run+1/x/checkpoint-") for k in s3.store.objects),
                   "only whole objects", list(s3.store.objects))
            expect(s3.store.verified > 20 and not s3.store.refusals, "all was signed", s3.store.refusals)
            expect_refused(train(s3, 1, resume="s3://the-bucket/b"), "there is no checkpoint in 's3://the-bucket/b'")
            # The bucket itself.
            expect_made(train(s3, 1, explicit="s3://the-bucket"), 1)
            expect_loaded(train(s3, 1, resume="s3://the-bucket/"), 1, 2)


def test_s3_refusals():
    needed()
    with S3() as s3:
        url = "s3://the-bucket/run"
        expect_made(train(s3, 2, explicit=url), 1)
        said = "cannot list '%s': GET: the answer is 403 Forbidden, " % url
        expect_refused(train(s3, 1, resume=url, env={"AWS_SECRET_ACCESS_KEY": "another"}), said + "SignatureDoesNotMatch")
        expect_refused(train(s3, 1, resume=url, env={"AWS_REGION": "mars-1"}), said + "InvalidAccessKeyId")
        expect_refused(train(s3, 1, resume=url, env={"AWS_SESSION_TOKEN": "old"}), said + "InvalidToken")
        expect_refused(train(s3, 1, resume=url, env={"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}),
                       "no keys for S3 .AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY")
        expect_refused(train(s3, 1, resume=url, env={"AWS_ACCESS_KEY_ID": ""}), "need each other")
        expect_refused(train(s3, 1, resume="s3://another-bucket/run"), "404 Not Found, NoSuchBucket")
        expect_refused(train(s3, 1, resume="s3://x/run"), "it is not s3://BUCKET/PREFIX")
        expect_refused(train(s3, 1, resume=url, env={"STORE_OFF": 1}), "a URL needs env.files that know it")
        for clock, text in ((5000, "behind"), (-90000, "ahead of")):
            s3.store.clock = clock
            expect_refused(train(s3, 1, resume=url), r"RequestTimeTooSkewed: this host's clock is (%d|%d|%d) s %s the server's" % (
                abs(clock), abs(clock) - 1, abs(clock) + 1, text))
            result = train(s3, 1, explicit=url)
            expect_refused(result, "MLFAB_ERR_IO: .*'%s.*RequestTimeTooSkewed" % url)
        s3.store.clock = 0
        expect_loaded(train(s3, 1, resume=url), 1, 4)


def test_s3_an_upload_fails():
    """Whatever request of a checkpoint is refused, the one before is there."""
    needed()
    with S3() as s3:
        url = "s3://the-bucket/run"
        s3.environment["MLFAB_STORE_PART_BYTES"] = 400000
        expect_made(train(s3, 2, servers=2, explicit=url), 1)
        cases = [lambda m, k, q: m == "PUT" and "partNumber" in q and q["partNumber"] != "1",
                 lambda m, k, q: m == "POST" and "uploads" in q,
                 lambda m, k, q: m == "POST" and "uploadId" in q,
                 lambda m, k, q: m == "PUT" and k.endswith(".manifest")]
        for case in cases:
            s3.store.fault = lambda handler, m, k, q, case=case: (403, "AccessDenied") if case(m, k, q) else None
            result = train(s3, 1, servers=2, resume=url, explicit=url)
            expect_refused(result, "MLFAB_ERR_IO: .*server [01].*'%s/checkpoint-.*': P.*403 Forbidden, AccessDenied" % url)
            s3.store.fault = lambda handler, m, k, q: None
            expect_loaded(train(s3, 1, servers=1, resume=url), 1, 4)
        expect_made(train(s3, 2, servers=2, resume=url, explicit=url, env={"STORE_WAIT": 2}))
        expect(not s3.store.uploads, "nothing is left of them", s3.store.uploads)


def test_s3_that_fails_now_and_then():
    """A third of the requests fails: refused for now, cut, or carried out and not answered."""
    needed()
    with S3() as s3:
        dice, counts = random.Random(5), {"cut": 0, "lost": 0, "503": 0}
        lock = threading.Lock()

        def fault(handler, method, key, query):
            with lock:
                kind = dice.choice(["", "", "", "", "cut", "lost", "503", ""])
                if not kind:
                    return None
                counts[kind] += 1
                return (503, "SlowDown") if kind == "503" else kind

        url = "s3://the-bucket/run"
        s3.environment["MLFAB_STORE_PART_BYTES"] = 400000
        s3.store.fault = fault
        for number in range(3):
            expect_made(train(s3, 2, servers=1 + number % 2, explicit=url, resume=url if number else ""), 1 + number)
        s3.store.fault = lambda *_: None
        expect_loaded(train(s3, 1, resume=url), 3, 12)
        print("# %s" % counts)
        expect(sum(counts.values()) > 10, "requests failed", counts)


def test_s3_that_hangs_does_not_stop_training():
    needed()
    with S3() as s3:
        s3.store.fault = lambda handler, m, k, q: "hang" if m in ("PUT", "POST") else None
        result = train(s3, 300, "s3://the-bucket/run", servers=1, commits=10, elements=1000)
        expect(result.code == 0 and result.seconds < 25, "it trains, and ends", result)
        longest = float(re.search(r"pushed ([\d.]+)", result.out).group(1))
        expect(longest < 5, "no push waits for the store", result)
        result = train(s3, 3, explicit="s3://the-bucket/run", timeout_ms=3000)
        expect_refused(result, "checkpoint: MLFAB_ERR_TIMEOUT: .*(server 0 has not written its shard in time|awaiting server 0)")
        expect(result.seconds < 15, "at its deadline", result)


# --- servers that misbehave, told by their URL


class Bad(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def run(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(self.command + " " + self.path)
        self.close_connection = True
        if "redirect" in self.path:
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
        elif "endless" in self.path:
            self.send_response(207)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"<D:href>/checkpoint-1.manifest</D:href>" * 1000)
            except OSError:
                pass
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"\x00\xff<html>")

    do_GET = do_PUT = do_PROPFIND = run


def test_servers_that_are_none():
    needed()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bad)
    server.daemon_threads, server.requests, server.environment = True, [], {}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        url = "http://127.0.0.1:%d/" % server.server_port
        for path, text in (("redirect", "the answer is 302 Found, a redirect to file:///etc/passwd"),
                           ("endless", "more than 16777216 bytes"), ("html", "the answer is 200, not 207")):
            result = train(server, 1, resume=url + path)
            expect_refused(result, "cannot list '%s%s': PROPFIND: .*%s" % (url, path, text))
            expect(result.seconds < 20, "at once", result)
        expect(len(server.requests) == 3, "each is asked once", server.requests)
        result = train(server, 1, resume=url, env={"MLFAB_STORE_USER": "me", "MLFAB_STORE_PASSWORD": PASSWORD})
        expect_refused(result, "200, not 207")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    main(globals(), jobs=1)
