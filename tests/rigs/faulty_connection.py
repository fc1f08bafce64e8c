"""One connection through the faulty proxy (see faulty_proxy.py), and the faults that can occur on it."""

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

BUFFER_BYTES = 1 << 20
REFUSALS = {
    "500": ("500 Internal Server Error", "InternalError"),
    "502": ("502 Bad Gateway", ""),
    "503": ("503 Slow Down", "SlowDown"),
    "429": ("429 Too Many Requests", "TooManyRequests"),
}
EXPIRED = ("400 Bad Request", "ExpiredToken")
REDIRECTED = ("301 Moved Permanently", "PermanentRedirect")
KINDS = (*REFUSALS, "reset", "short", "stall", "silence", "etag", "range")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`reset` (of the connection), `short` (the body ends early) and `stall` happen after `after_bytes` of the body, by
    default somewhere in it. `silence` is no answer at all; `etag` and `range` are wrong headers."""

    kind: str
    after_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a fault is {self.kind!r}; known are {', '.join(KINDS)}")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A GET of an object: its headers, and the fault that it got ("" if none)."""

    range: str
    if_match: str
    closes: bool
    fault: str


@dataclass(kw_only=True)
class FaultyProxy:
    """`faults` are those of the coming GETs in order (None: no fault). After them, `rates` gives the share of GETs with
    each kind of fault, drawn with `seed`."""

    upstream: str
    endpoint: str = ""
    faults: list[Fault | None] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    expired_keys: frozenset[str] = frozenset()
    num_expired: int = 0  # requests that were refused for it
    region: str = ""  # the region that answers redirect to, whatever is asked
    seen: list[Seen] = field(default_factory=list)
    stalling: threading.Event = field(default_factory=threading.Event)  # set while an answer is stalled
    num_standing: int = 0  # connections that are stalled now
    num_connections: int = 0  # client connections so far
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def next_fault(self) -> Fault | None:
        """The fault of this GET."""
        if self.faults:
            return self.faults.pop(0)
        drawn = self.chance.random()
        for kind, rate in self.rates.items():
            drawn -= rate
            if drawn < 0:
                return Fault(kind=kind)
        return None

    def counts(self) -> Counter[str]:
        """The number of GETs by fault ("" for none)."""
        return Counter(request.fault for request in self.seen)


class _ClosedError(Exception):
    """One side has closed the connection, or it is to be closed."""


@dataclass(kw_only=True)
class _Head:
    """The first line and the headers of a request or an answer, and the bytes received after them."""

    lines: list[str]
    rest: bytes

    def header(self, name: str) -> str:
        for line in self.lines[1:]:
            if line.lower().startswith(f"{name}:"):
                return line.partition(":")[2].strip()
        return ""

    def set_header(self, name: str, value: str) -> None:
        kept = [line for line in self.lines if not line.lower().startswith(f"{name}:")]
        self.lines = [*kept, f"{name}: {value}"]

    def __bytes__(self) -> bytes:
        return "\r\n".join([*self.lines, "", ""]).encode("latin-1")


class Connection:
    """A client's connection, and the connection to the server behind it."""

    def __init__(self, proxy: FaultyProxy, client: socket.socket) -> None:
        self.proxy, self.client = proxy, client
        self.server: socket.socket | None = None
        self.loop = asyncio.get_running_loop()
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        _without_delay(client)

    async def run(self) -> None:
        """Serves one request after another, until either side closes."""
        left = b""
        try:
            while True:
                request = await self._head(self.client, left)
                method, path, _ = request.lines[0].split(" ", 2)
                key = request.header("authorization").partition("Credential=")[2].partition("/")[0]
                if key in self.proxy.expired_keys:
                    self.proxy.num_expired += 1
                    await self._refuse(EXPIRED[0], EXPIRED[1] if method != "HEAD" else "")
                    break
                if self.proxy.region:
                    await self._refuse(REDIRECTED[0], REDIRECTED[1] if method != "HEAD" else "")
                    break
                if method != "GET" or "?" in path:
                    await self._pass_on(request)
                    break
                left = request.rest
                await self._get(request)
        except (_ClosedError, OSError):
            pass
        finally:
            self.client.close()
            self._drop_server()

    async def _get(self, request: _Head) -> None:
        fault = self.proxy.next_fault()
        closes = request.header("connection").lower() == "close"
        asked, if_match = request.header("range"), request.header("if-match")
        self.proxy.seen.append(Seen(range=asked, if_match=if_match, closes=closes, fault=fault.kind if fault else ""))
        if fault and fault.kind in REFUSALS:
            await self._refuse(*REFUSALS[fault.kind])
            return
        if fault and fault.kind == "silence":
            await self._stand_still()
        answer = await self._answer(request)
        if fault and fault.kind == "etag":
            answer.set_header("etag", '"00000000000000000000000000000000"')
        if fault and fault.kind == "range" and (content_range := answer.header("content-range")):
            first, last = content_range.split()[1].split("-", 1)
            answer.set_header("content-range", f"bytes {int(first) + 1}-{last}")
        length = int(answer.header("content-length") or 0)
        await self.loop.sock_sendall(self.client, bytes(answer))
        await self._body(answer.rest, length, fault)
        if "close" in (answer.header("connection").lower(), request.header("connection").lower()):
            raise _ClosedError

    async def _refuse(self, status: str, code: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>" if code else ""
        region = f"x-amz-bucket-region: {self.proxy.region}\r\n" if self.proxy.region else ""
        head = f"HTTP/1.1 {status}\r\n{region}Content-Length: {len(body)}\r\nContent-Type: application/xml\r\n\r\n"
        await self.loop.sock_sendall(self.client, (head + body).encode())

    async def _answer(self, request: _Head) -> _Head:
        """The server's answer, over the existing connection or, if the server has closed it, over a new one."""
        for _ in range(2):
            is_old = self.server is not None
            server = self.server or await self._connect()
            try:
                await self.loop.sock_sendall(server, bytes(request))
                return await self._head(server, b"")
            except (_ClosedError, OSError):
                self._drop_server()
                if not is_old:
                    raise
        raise _ClosedError

    async def _body(self, begun: bytes, length: int, fault: Fault | None) -> None:
        """Forwards the server's body, up to a fault within it."""
        stop = length
        if fault and fault.kind in ("reset", "short", "stall"):
            given = self.proxy.chance.randrange(length) if fault.after_bytes is None and length else fault.after_bytes
            stop = min(length, given or 0)
        await self.loop.sock_sendall(self.client, begun[:stop])
        sent = len(begun)
        assert self.server
        if sent < stop:
            self.server.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        while sent < stop:
            count = await self.loop.sock_recv_into(self.server, self.buffer)
            if not count:
                raise _ClosedError
            await self.loop.sock_sendall(self.client, self.buffer[: min(count, stop - sent)])
            sent += count
        if fault and fault.kind == "stall":
            await self._stand_still()
        if fault and fault.kind == "reset":
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault and fault.kind in ("reset", "short"):
            raise _ClosedError

    async def _stand_still(self) -> None:
        """Waits until the client has closed the connection."""
        self.proxy.num_standing += 1
        self.proxy.stalling.set()
        try:
            while await self.loop.sock_recv(self.client, 1):
                pass
        finally:
            self.proxy.num_standing -= 1
        raise _ClosedError

    async def _pass_on(self, request: _Head) -> None:
        """Forwards any other request with its body, and its whole answer."""
        request.set_header("connection", "close")
        server = await self._connect()
        await self.loop.sock_sendall(server, bytes(request) + request.rest)
        upload = self.loop.create_task(self._upload(server))
        try:
            while count := await self.loop.sock_recv_into(server, self.buffer):
                await self.loop.sock_sendall(self.client, self.buffer[:count])
        finally:
            upload.cancel()

    async def _upload(self, server: socket.socket) -> None:
        with suppress(OSError):
            while data := await self.loop.sock_recv(self.client, BUFFER_BYTES):
                await self.loop.sock_sendall(server, data)

    async def _connect(self) -> socket.socket:
        address = urlsplit(self.proxy.upstream)
        self.server = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        _without_delay(self.server)
        await self.loop.sock_connect(self.server, (address.hostname, address.port))
        return self.server

    def _drop_server(self) -> None:
        if self.server:
            self.server.close()
            self.server = None

    async def _head(self, source: socket.socket, begun: bytes) -> _Head:
        while b"\r\n\r\n" not in begun:
            more = await self.loop.sock_recv(source, 64 << 10)
            if not more:
                raise _ClosedError
            begun += more
        text, _, rest = begun.partition(b"\r\n\r\n")
        return _Head(lines=text.decode("latin-1").split("\r\n"), rest=rest)


def _without_delay(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
