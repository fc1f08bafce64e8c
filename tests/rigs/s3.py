"""An S3 server on loopback for tests: moto's, in its own process. It checks no credentials."""

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

START_SECONDS = 120.0
POLL_SECONDS = 0.05
# These ports are below those that Linux gives to connections and to servers that leave the choice to it. They are also
# below those at which the ranks of Slurm jobs meet, so nobody takes one between its choice and its use. Each process of
# a test run begins elsewhere, so that two do not choose the same.
_FIRST_PORT, _NUM_PORTS = 10_000, 10_000
_NUMBERS = count(256 * os.getpid())


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
            process.wait(timeout=START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port of the loopback address on which nothing listens now, another one at each call."""
    for number in _NUMBERS:
        port = _FIRST_PORT + number % _NUM_PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the numbers do not end")


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    pause = threading.Event()
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"moto_server ended with code {process.returncode}; install moto[server,s3]")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
        try:
            connection.request("GET", "/moto-api/")
            connection.getresponse()
            return
        except OSError:
            pause.wait(POLL_SECONDS)
        finally:
            connection.close()
    raise RuntimeError(f"moto_server does not answer on port {port} after {START_SECONDS:.0f} s")
