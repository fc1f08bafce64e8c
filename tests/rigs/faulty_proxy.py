"""A proxy in front of an S3 server that spoils answers to GETs of objects, as listed or at random.

`faulty_proxy` runs in a thread, for tests. `faulty_proxy_process` runs in its own process, for benchmarks, so that its
time is not counted as the client's. It is cheap: bodies go from socket to socket through one buffer. Requests are
forwarded unchanged (their signature covers the host that the client named). All requests except GETs of objects use
their own connections.
"""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.rigs.faulty_connection import Connection, FaultyProxy

START_SECONDS = 60.0
CHECKOUT = Path(__file__).resolve().parents[2]


@contextmanager
def faulty_proxy(upstream: str, *, rates: dict[str, float] | None = None, seed: int = 0) -> Iterator[FaultyProxy]:
    """Runs the proxy in a thread until the block ends."""
    proxy = FaultyProxy(upstream=upstream, rates=rates or {}, seed=seed)
    with closing(socket.create_server(("127.0.0.1", 0), backlog=512)) as listener:
        proxy.endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        loop = asyncio.new_event_loop()
        serving = loop.create_task(_serve(proxy, listener))
        thread = threading.Thread(target=_run, args=(loop, serving), name="faulty-proxy")
        thread.start()
        try:
            yield proxy
        finally:
            loop.call_soon_threadsafe(serving.cancel)
            thread.join()


@dataclass(kw_only=True)
class ProxyProcess:
    """The proxy's endpoint and, once it has ended, its GETs by fault and its CPU-seconds."""

    endpoint: str
    counts: dict[str, int] = field(default_factory=dict)
    cpu_seconds: float = 0.0


@contextmanager
def faulty_proxy_process(upstream: str, *, rates: dict[str, float], seed: int = 0) -> Iterator[ProxyProcess]:
    """As `faulty_proxy`, in its own process."""
    words = [sys.executable, "-m", "tests.rigs.faulty_proxy", upstream, json.dumps(rates), str(seed)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)
    assert process.stdin
    assert process.stdout
    running = ProxyProcess(endpoint=process.stdout.readline().strip())
    try:
        yield running
    finally:
        process.stdin.close()
        ended = process.stdout.read()
        process.wait(START_SECONDS)
        if ended:
            running.counts, running.cpu_seconds = json.loads(ended)


def _run(loop: asyncio.AbstractEventLoop, serving: "asyncio.Task[None]") -> None:
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(serving)
    loop.close()


async def _serve(proxy: FaultyProxy, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    async with asyncio.TaskGroup() as tasks:
        while True:
            client, _ = await loop.sock_accept(listener)
            proxy.num_connections += 1
            tasks.create_task(Connection(proxy, client).run())


def _main(upstream: str, rates: str, seed: str) -> None:
    """Prints the endpoint, and at the end of standard input the proxy's counts."""
    with faulty_proxy(upstream, rates=json.loads(rates), seed=int(seed)) as proxy:
        sys.stdout.write(proxy.endpoint + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    sys.stdout.write(json.dumps([dict(proxy.counts()), time.process_time()]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
