"""A proxy in front of an S3 server that truncates bodies (a fault that botocore never retries), refuses requests, holds
uploads back, changes a byte of them on the way, or leaves objects out of listings."""

import http.client
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_LISTED = re.compile(rb"<Contents>.*?<Key>(.*?)</Key>.*?</Contents>", re.DOTALL)


@dataclass
class CuttingProxy:
    """`cuts` has the number of body bytes to send for each coming GET before the connection is closed; later GETs pass.

    `ranges` collects the Range headers of the GETs ("" if there was none). `parts` is the number of parts of multipart
    uploads that pass; later parts wait until the proxy ends, and set `holding`. `uploads` is the same for whole objects
    of checkpoints; held ones are stored first if `stores_held`. `flips`: changes one bit of every upload's body.
    `hides` says of an object's key whether listings leave it out, as those of a store that lists late. `refuses` is the
    status and the code with which every request is refused, and `halves` cuts every body in half.

    `num_requests` counts requests of any kind. The one with the number `stop_at`, if that is not 0, sets `stopped` and
    gets no answer until `goes_on` is set; the store has it first if `stores_stopped`, and never otherwise.
    """

    upstream: str
    endpoint: str = ""
    cuts: list[int] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    parts: int = 1 << 30
    uploads: int = 1 << 30
    stores_held: bool = False
    flips: bool = False
    hides: Callable[[str], bool] = lambda _: False
    refuses: tuple[int, str] | None = None
    halves: bool = False
    num_requests: int = 0
    stop_at: int = 0
    stores_stopped: bool = False
    stopped: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)
    holding: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stop_at_request(self, number: int, *, is_stored: bool) -> None:
        """Counts from 0 again, and stops at this request."""
        with self.lock:
            self.num_requests, self.stop_at, self.stores_stopped = 0, number, is_stored
            self.stopped.clear()
            self.goes_on.clear()

    def must_stop(self) -> bool:
        """Counts a request; whether it is the one to stop at."""
        with self.lock:
            self.num_requests += 1
            return self.num_requests == self.stop_at

    def hold(self, path: str) -> bool:
        """Whether this upload waited until the end of the proxy, and must not be forwarded."""
        with self.lock:
            self.parts -= "partNumber=" in path
            self.uploads -= "/step-" in path
            is_held = ("partNumber=" in path and self.parts < 0) or ("/step-" in path and self.uploads < 0)
        if not is_held:
            return False
        self.holding.set()
        self.ended.wait()
        return True


@contextmanager
def cutting_proxy(upstream: str, *, port: int = 0) -> Iterator[CuttingProxy]:
    """Runs the proxy in a thread until the block ends. `port`: 0 for a free one."""
    proxy = CuttingProxy(upstream=upstream)
    server = ThreadingHTTPServer(("127.0.0.1", port), lambda *args: _Handler(proxy, *args))
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, proxy: CuttingProxy, *args: Any) -> None:
        self.proxy = proxy
        super().__init__(*args)  # answers the requests of a connection

    def do_GET(self) -> None:
        self.proxy.ranges.append(self.headers.get("Range", ""))
        self._pass_on(b"", cuts=self.proxy.cuts)

    def _listed(self, content: bytes) -> bytes:
        """A listing without the objects that are hidden."""
        if b"<ListBucketResult" not in content[:500]:
            return content
        return _LISTED.sub(lambda found: b"" if self.proxy.hides(unquote(found[1].decode())) else found[0], content)

    def do_HEAD(self) -> None:
        self._pass_on(b"")

    def do_DELETE(self) -> None:
        self._pass_on(b"")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.proxy.stores_held and self.proxy.uploads <= 0:
            self._forward(body)
        if self.proxy.hold(self.path):
            self.close_connection = True
            return
        self._pass_on(bytes([body[0] ^ 1]) + body[1:] if self.proxy.flips and body else body)

    def do_POST(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _pass_on(self, body: bytes, *, cuts: list[int] | None = None) -> None:
        """Forwards the request and returns the answer, with its body truncated by the first of `cuts`."""
        if self.proxy.must_stop():
            if self.proxy.stores_stopped:
                self._forward(body)
            self.proxy.stopped.set()
            self.proxy.goes_on.wait()
            self.close_connection = True
            return
        if self.proxy.refuses:
            self._refuse(*self.proxy.refuses)
            return
        response, content = self._forward(body)
        content = self._listed(content) if self.command == "GET" else content
        if self.proxy.halves and cuts == []:
            cuts = [len(content) // 2]
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                is_changed = name.lower() == "content-length" and self.command == "GET"
                self.send_header(name, str(len(content)) if is_changed else value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content[: cuts.pop(0)] if cuts else content)
        self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else content)
        self.close_connection = True

    def _forward(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        connection = http.client.HTTPConnection(urlsplit(self.proxy.upstream).netloc, timeout=120)
        connection.request(self.command, self.path, body=body or None, headers=headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response, content

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Logs nothing."""
