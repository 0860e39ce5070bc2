"""A small S3 in memory, for store_test.py: objects, ranges, lists in pages, uploads in parts. It checks each signature (AWS
Signature Version 4) and the SHA-256 of each body by hmac and hashlib, without any code of the library.

Source: Amazon S3 API Reference."""
import calendar
import hashlib
import hmac
import http.server
import re
import threading
import time
import urllib.parse
from xml.sax.saxutils import escape

AUTHORIZATION = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, "
                           r"SignedHeaders=([a-z0-9;-]+), Signature=([0-9a-f]{64})$")


def quoted(text):
    return urllib.parse.quote(text, safe="-_.~")


def canonical_query(raw):
    """Sorted, by what was sent. Whoever sends another order than this has signed something else than it sent."""
    pairs = []
    for part in filter(None, raw.split("&")):
        name, _, value = part.partition("=")
        pairs.append((quoted(urllib.parse.unquote(name)), quoted(urllib.parse.unquote(value))))
    return "&".join("%s=%s" % pair for pair in sorted(pairs))


def sign(secret, day, region, text):
    key = ("AWS4" + secret).encode()
    for part in (day, region, "s3", "aws4_request", text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key.hex()


class Refusal(Exception):
    def __init__(self, status, code, more=""):
        super().__init__(code)
        self.status, self.code, self.more = status, code, more


class Store:
    """What is in the bucket, and how the server behaves."""

    def __init__(self, key="AKIDEXAMPLE", secret="a/secret+KEY=0123456789", token="", region="us-east-1", page=3,
                 bucket="the-bucket"):
        self.key, self.secret, self.token, self.region, self.page, self.bucket = key, secret, token, region, page, bucket
        self.objects, self.etags, self.uploads, self.lock = {}, {}, {}, threading.RLock()
        self.clock, self.verified, self.parts, self.refusals, self.number = 0, 0, 0, [], 0
        self.fault = lambda handler, method, key, query: None  # "cut", "lost", "hang", or (status, code)
        self.stop = threading.Event()

    def verify(self, method, raw_path, raw_query, headers, body):
        match = AUTHORIZATION.match(headers.get("Authorization", ""))
        if not match:
            raise Refusal(403, "AccessDenied", "<Message>no signature</Message>")
        key, day, region, names, signature = match.groups()
        stamp = headers.get("x-amz-date", "")
        signed = names.split(";")
        sent = [n.lower() for n in headers.keys() if n.lower() == "host" or n.lower().startswith("x-amz-")]
        if signed != sorted(signed) or not set(sent) <= set(signed) or "x-amz-content-sha256" not in signed:
            raise Refusal(403, "AccessDenied", "<Message>headers that are not signed</Message>")
        if key != self.key or region != self.region or stamp[:8] != day:
            raise Refusal(403, "InvalidAccessKeyId")
        if headers.get("x-amz-security-token", "") != self.token:
            raise Refusal(403, "InvalidToken")
        there = time.time() + self.clock
        if abs(calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ")) - there) > 900:
            raise Refusal(403, "RequestTimeTooSkewed", "<ServerTime>%s</ServerTime>" % time.strftime(
                "%Y-%m-%dT%H:%M:%SZ", time.gmtime(there)))
        payload = headers["x-amz-content-sha256"]
        canonical = "\n".join([method, raw_path, canonical_query(raw_query)]
                              + ["%s:%s" % (n, " ".join(headers[n].split())) for n in signed] + ["", names, payload])
        text = "\n".join(["AWS4-HMAC-SHA256", stamp, "%s/%s/s3/aws4_request" % (day, region),
                          hashlib.sha256(canonical.encode()).hexdigest()])
        if not hmac.compare_digest(sign(self.secret, day, region, text), signature):
            raise Refusal(403, "SignatureDoesNotMatch")
        if hashlib.sha256(body).hexdigest() != payload:
            raise Refusal(400, "XAmzContentSHA256Mismatch")
        if raw_query != canonical_query(raw_query):
            raise Refusal(403, "SignatureDoesNotMatch", "<Message>the query is not sorted as it was signed</Message>")
        self.verified += 1

    # --- what the requests do: (status, headers, body) ---

    def keep(self, key, data):
        self.objects[key], self.etags[key] = data, '"%s"' % hashlib.md5(data).hexdigest()

    def list(self, query):
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        keys = [k for k in sorted(self.objects) if k.startswith(prefix) and k > after]
        page, more = keys[:self.page], len(keys) > self.page
        text = "".join("<Contents><Key>%s</Key><Size>%d</Size></Contents>" % (escape(k), len(self.objects[k]))
                       for k in page)
        if more:
            text += "<NextContinuationToken>%s</NextContinuationToken>" % escape(page[-1])
        return 200, {}, "<?xml version=\"1.0\"?>\n<ListBucketResult><IsTruncated>%s</IsTruncated>%s</ListBucketResult>" % (
            "true" if more else "false", text)

    def list_uploads(self, query):
        after = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
        found = sorted((key, number) for number, (key, _) in self.uploads.items()
                       if key.startswith(query.get("prefix", "")) and (key, number) > after)
        page, more = found[:self.page], len(found) > self.page
        text = "".join("<Upload><Key>%s</Key><UploadId>%s</UploadId></Upload>" % (escape(k), escape(n)) for k, n in page)
        if more:
            text += "<NextKeyMarker>%s</NextKeyMarker><NextUploadIdMarker>%s</NextUploadIdMarker>" % page[-1]
        return 200, {}, "<ListMultipartUploadsResult>%s<IsTruncated>%s</IsTruncated></ListMultipartUploadsResult>" % (
            text, "true" if more else "false")

    def get(self, key, headers, only_head):
        if key not in self.objects:
            raise Refusal(404, "NoSuchKey")
        data, etag = self.objects[key], self.etags[key]
        match = re.match(r"bytes=(\d+)-(\d*)$", headers.get("Range", ""))
        if only_head or not match or headers.get("If-Range", etag) != etag:
            return 200, {"ETag": etag}, data
        first = int(match.group(1))
        last = min(int(match.group(2) or len(data)), len(data) - 1)
        if first >= len(data):
            raise Refusal(416, "InvalidRange")
        return 206, {"ETag": etag, "Content-Range": "bytes %d-%d/%d" % (first, last, len(data))}, data[first:last + 1]

    def complete(self, key, number, body):
        if self.uploads.get(number, ("",))[0] != key:
            raise Refusal(404, "NoSuchUpload")
        parts = self.uploads[number][1]
        asked = re.findall(r"<PartNumber>(\d+)</PartNumber><ETag>([^<]+)</ETag>", body.decode())
        if not asked or any(parts.get(int(n), (0, 0))[0] != etag for n, etag in asked):
            raise Refusal(400, "InvalidPart")
        self.keep(key, b"".join(parts[int(n)][1] for n, _ in asked))
        del self.uploads[number]
        return 200, {}, "<CompleteMultipartUploadResult><ETag>\"x-%d\"</ETag></CompleteMultipartUploadResult>" % len(asked)

    def upload(self, method, key, query, body):
        number = query["uploadId"]
        if method == "POST":
            return self.complete(key, number, body)
        if self.uploads.get(number, ("",))[0] != key:
            raise Refusal(404, "NoSuchUpload")
        if method == "DELETE":
            del self.uploads[number]
            return 204, {}, ""
        etag = '"%s"' % hashlib.md5(body).hexdigest()
        self.uploads[number][1][int(query["partNumber"])] = (etag, body)
        self.parts += 1
        return 200, {"ETag": etag}, ""

    def act(self, method, key, query, headers, body):
        if key == "":
            return self.list_uploads(query) if "uploads" in query else self.list(query)
        if "uploadId" in query:
            return self.upload(method, key, query, body)
        if method == "POST" and "uploads" in query:
            self.number += 1
            self.uploads["up&%d" % self.number] = (key, {})
            return 200, {}, "<R><UploadId>up&amp;%d</UploadId></R>" % self.number
        if method == "PUT":
            self.keep(key, body)
            return 200, {"ETag": self.etags[key]}, ""
        if method == "DELETE":
            self.objects.pop(key, None)
            return 204, {}, ""
        return self.get(key, headers, method == "HEAD")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = -1, True

    def log_message(self, *_):
        pass

    def answer(self, status, headers, body, cut=False):
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", len(data))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:len(data) * 2 // 3] if cut else data)
        if cut:
            self.close_connection = True

    def run(self):
        store = self.server.store
        raw_path, _, raw_query = self.path.partition("?")
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # the client was killed
            self.close_connection = True
            return
        bucket, _, key = urllib.parse.unquote(raw_path)[1:].partition("/")
        query = dict(urllib.parse.parse_qsl(raw_query, keep_blank_values=True))
        fault = store.fault(self, self.command, key, query)
        if fault == "hang":
            store.stop.wait(60)
        if fault == "hang":
            self.close_connection = True
            return
        try:
            with store.lock:
                store.verify(self.command, raw_path, raw_query, self.headers, body)
                if bucket != store.bucket:
                    raise Refusal(404, "NoSuchBucket")
                if isinstance(fault, tuple):
                    raise Refusal(*fault)
                answer = store.act(self.command, key, query, self.headers, body)
        except Refusal as refusal:
            with store.lock:
                store.refusals.append(refusal.code)
            answer = (refusal.status, {}, "<?xml version=\"1.0\"?>\n<Error><Code>%s</Code>%s</Error>" % (
                refusal.code, refusal.more))
        if fault == "lost":
            self.close_connection = True
            return
        self.answer(*answer, cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = lambda self: self.run()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """Clients that are killed are part of the tests."""


class S3:
    """`with S3(...) as s3`: a server on loopback; s3.store is what it has, s3.environment what a client needs."""

    def __init__(self, **options):
        self.store = Store(**options)

    def __enter__(self):
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.store = self.store
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()
        self.environment = dict(AWS_ENDPOINT_URL="http://127.0.0.1:%d" % self.server.server_port,
                                AWS_ACCESS_KEY_ID=self.store.key, AWS_SECRET_ACCESS_KEY=self.store.secret,
                                AWS_REGION=self.store.region)
        if self.store.token:
            self.environment["AWS_SESSION_TOKEN"] = self.store.token
        return self

    def __exit__(self, *_):
        self.store.stop.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
