"""A web server on loopback whose answers, good and bad, are set by the test."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebServer:
    """`pages` maps a path to its answers; `asked` counts the requests for each path."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.pages: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.asked: Counter[str] = Counter()

    def serve(self, path: str, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> str:
        """Sets the body of an answer; returns its URL."""

        def answer(request: BaseHTTPRequestHandler) -> None:
            request.send_response(status)
            for name, text in ({"Content-Length": str(len(body))} | (headers or {})).items():
                request.send_header(name, text)
            request.end_headers()
            request.wfile.write(body)

        self.pages[path] = answer
        return self.url + path

    def serve_in_turn(self, path: str, *paths: str) -> str:
        """Answers like other paths, one after another; the last one is repeated."""

        def answer(request: BaseHTTPRequestHandler) -> None:
            self.pages[paths[min(self.asked[path], len(paths)) - 1]](request)

        self.pages[path] = answer
        return self.url + path


@contextmanager
def web_server() -> Iterator[WebServer]:
    """Runs a server in a thread until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked[self.path] += 1
            if self.path in served.pages:
                served.pages[self.path](self)
            else:
                self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = WebServer(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
