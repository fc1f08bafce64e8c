"""A proxy before an S3 server that breaks bodies off: the fault that botocore never retries."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class CuttingProxy:
    """`cuts` has the bytes to send of each coming GET's body before the connection is closed; then all pass.

    `ranges` collects the Range headers of the GETs seen ("" where there was none).
    """

    upstream: str
    endpoint: str = ""
    cuts: list[int] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)


@contextmanager
def cutting_proxy(upstream: str) -> Iterator[CuttingProxy]:
    """Runs in a thread until the block ends."""
    proxy = CuttingProxy(upstream=upstream)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(proxy))
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler_of(proxy: CuttingProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            connection = http.client.HTTPConnection(urlsplit(proxy.upstream).netloc, timeout=30)
            connection.request("GET", self.path, headers=dict(self.headers))
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            proxy.ranges.append(self.headers.get("Range", ""))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[: proxy.cuts.pop(0)] if proxy.cuts else body)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
            """Quiet."""

    return Handler
