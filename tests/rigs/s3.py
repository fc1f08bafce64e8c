"""An S3 server on loopback for tests: moto's, in its own process. It checks no credentials."""

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

START_SECONDS = 60.0
POLL_SECONDS = 0.05


@contextmanager
def moto_server() -> Iterator[str]:
    """Starts a server on a free port, yields its endpoint once it answers, and stops it by its pid."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_it_answers(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port of the loopback address on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    pause = threading.Event()
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"moto_server ended with code {process.returncode}; install moto[server,s3]")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/moto-api/")
            connection.getresponse()
            return
        except OSError:
            pause.wait(POLL_SECONDS)
        finally:
            connection.close()
    raise RuntimeError(f"moto_server does not answer on port {port} after {START_SECONDS:.0f} s")
