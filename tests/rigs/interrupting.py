"""Runs a command as a terminal does, in its own process group, for tests that send real signals."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from jobs.cli import main
from shards.store import open_store
from tests.rigs.faulty_connection import FaultyProxy
from tests.rigs.faulty_proxy import faulty_proxy
from tests.rigs.forks import forks

DEADLINE_SECONDS = 120.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Command:
    """A running command, forked from the server that has loaded the project."""

    process: BaseProcess
    errors: Path

    @property
    def said(self) -> str:
        """Its standard error so far."""
        return self.errors.read_text() if self.errors.exists() else ""

    def wait_until(self, is_so: Callable[[], bool], *, seconds: float = DEADLINE_SECONDS) -> None:
        """Waits. TimeoutError if the condition does not become true in time, or the command has ended."""
        pause, deadline = threading.Event(), time.monotonic() + seconds
        while True:
            code = self.process.exitcode  # first: its last act may be what is waited for
            if is_so():
                return
            if time.monotonic() > deadline or code is not None:
                raise TimeoutError(f"it did not come to that, exit code {code}: {self.said}")
            pause.wait(_POLL_SECONDS)

    def wait_until_said(self, text: str) -> None:
        """Waits until it has written this text."""
        self.wait_until(lambda: text in self.said)

    def signal(self, number: int) -> None:
        """Sends a signal to the whole group, as a terminal does."""
        assert self.process.pid
        os.killpg(self.process.pid, number)

    def end(self, *, seconds: float = DEADLINE_SECONDS) -> int:
        """Waits for its exit code. TimeoutError if it does not end in time."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            raise TimeoutError(f"it does not end: {self.said}")
        return self.process.exitcode


def _nothing() -> None:
    """What is done before a command that nothing has to precede."""


@contextmanager
def started(
    errors: Path,
    *words: str,
    environ: Mapping[str, str] | None = None,
    is_forked: bool = True,
    before: Callable[[], None] = _nothing,
) -> Iterator[Command]:
    """`patchline WORDS` while the block runs. Not forked, it reads what torch's compiler reads once, such as CXX.

    `before`, a function of a module, is called first in the command's process.
    """
    everything = {**os.environ, **(environ or {})}
    context = forks() if is_forked else multiprocessing.get_context("spawn")
    process = context.Process(target=_as_terminal, args=(list(words), everything, errors, before))
    process.start()
    command = Command(process=process, errors=errors)
    try:
        command.wait_until(errors.exists)
        yield command
    finally:
        if process.exitcode is None and process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


@contextmanager
def behind_a_proxy(folder: str, bucket: str) -> Iterator[tuple[str, FaultyProxy]]:
    """A copy of a dataset in a bucket, and a proxy through which a command with its endpoint reads it."""
    url = f"s3://{bucket}/data"
    store = open_store(url)
    for path in Path(folder).rglob("*"):
        if path.is_file():
            store.write(path.relative_to(folder).as_posix(), path.read_bytes())
    with faulty_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        yield url, proxy


def _as_terminal(words: list[str], environ: dict[str, str], errors: Path, before: Callable[[], None]) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whoever started the server may have blocked some
    os.environ.clear()
    os.environ.update(environ)
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    before()
    sys.exit(main(words))
