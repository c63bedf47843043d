"""A proxy between workers and a store's server, which delays, fails and remembers too long."""

import contextlib
import http.client
import random
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHUNK = 32_768  # bytes of one request, before another one has its turn
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Faults:
    """What the proxy does to requests at this moment.

    Attributes:
      delay: seconds before each answer.
      failing: probability of an error, half of them after the request has reached the store.
      stale: unless 0, lists are answered as they were when they were first asked for.
      bandwidth: bytes per second in each direction, which all requests share.
    """

    def __init__(self, seed: int):
        self.delay, self.failing, self.stale = 0.0, 0.0, 0.0
        self.bandwidth = float("inf")
        self.up, self.down = threading.Lock(), threading.Lock()
        self.conditional = threading.Lock()  # stores decide a conditional put as one; moto does not
        self.lists: dict[str, tuple[int, list, bytes]] = {}
        self.random = random.Random(seed)

    def carry(self, link: threading.Lock, size: int) -> None:
        """Takes as long as these bytes do; requests at the same time take turns."""
        for start in range(0, size if self.bandwidth < float("inf") else 0, CHUNK):
            with link:
                time.sleep(min(CHUNK, size - start) / self.bandwidth)

    def last(self, name: str, value: float, seconds: float) -> None:
        """One of them is so for some seconds."""
        self.lists.clear()
        setattr(self, name, value)
        time.sleep(seconds)
        setattr(self, name, 0.0)


def serve(upstream: tuple[str, int], faults: Faults) -> ThreadingHTTPServer:
    """A server on a free port of this machine, in threads of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(faults.delay)
            faults.carry(faults.up, len(body))
            fails = faults.random.random() < faults.failing
            if fails and faults.random.random() < 0.5:
                return self.reply(503, [], b"")
            status, headers, content = self.ask(body)
            if fails:  # the store did what it was asked, and nobody hears of it
                return self.reply(503, [], b"")
            faults.carry(faults.down, len(content))
            return self.reply(status, headers, content)

        def ask(self, body: bytes):
            query = urllib.parse.urlsplit(self.path).query
            listing = self.command == "GET" and ("list-type=" in query or "comp=list" in query)
            if listing and faults.stale and self.path in faults.lists:
                return faults.lists[self.path]
            is_conditional = "If-None-Match" in self.headers
            with faults.conditional if is_conditional else contextlib.nullcontext():
                answer = self.forward(body)
            if listing and faults.stale:
                faults.lists[self.path] = answer
            return answer

        def forward(self, body: bytes):
            connection = http.client.HTTPConnection(*upstream, timeout=30)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            answer = response.status, response.getheaders(), response.read()
            connection.close()
            return answer

        def reply(self, status: int, headers, body: bytes):
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in HOP_BY_HOP | {"date", "server"}:
                    self.send_header(name, value)
            length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # connections that are not accepted yet

        def handle_error(self, request, client_address):
            """A worker that was killed in the middle of a request is no news."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
