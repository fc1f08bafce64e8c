"""Ranks of one stage, as `jobs.ranks` starts them, but forked from the server that has loaded everything."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

from jobs.ranks import Ranks
from tests.rigs.forks import forks
from tests.rigs.s3 import free_port

GOES_ON = "goes-on"
_STANDS_SECONDS, _POLL_SECONDS = 300.0, 0.01  # longer than the kill is waited for


class Fork:
    """A forked process with the interface of subprocess.Popen."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its id."""
        pid = self._process.pid
        assert pid is not None, "a fork has begun"
        return pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; -SIGNAL if a signal ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same as `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal to a running process."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Handed:
    """A file of this process, passed to the fork: standard error as pytest captures it now."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[object]]:
        return _taken, (reduction.DupFd(self.number),)


def _taken(handed: Any) -> int:
    return int(handed.detach())


def fork_ranks(
    words: list[str],
    *,
    num_ranks: int,
    environ: Mapping[str, str],
    log_dir: Path,
    more_words: Mapping[int, list[str]] | None = None,
    stands_after: int = 0,
) -> Ranks:
    """Runs `patchline WORDS` on `num_ranks` processes. Rank 0 keeps the terminal, the others write to
    log_dir/rank-N.log. `more_words`: for some ranks only. `stands_after`: a run waits to be killed, or for the file
    log_dir/GOES_ON, once this step is in its metrics (0: it does not)."""
    log_dir.mkdir(parents=True, exist_ok=True)
    shared = {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    processes = []
    for rank in range(num_ranks):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (log_dir / f"rank-{rank}.log").open("ab") as log:
            files = (1, 2) if rank == 0 else (log.fileno(), log.fileno())
            handed = [_Handed(number) for number in files]
            all_words = [*words, *(more_words or {}).get(rank, [])]
            stands = (stands_after, log_dir.absolute() / GOES_ON)
            process = forks().Process(target=_as_rank, args=(all_words, own, Path.cwd(), *stands, *handed))
            process.start()
        processes.append(Fork(process))
    return Ranks(processes=cast("tuple[subprocess.Popen[bytes], ...]", tuple(processes)))


def _as_rank(
    words: list[str], environ: dict[str, str], folder: Path, stands_after: int, goes_on: Path, output: int, errors: int
) -> None:
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    from jobs.cli import main  # noqa: PLC0415  # the server has loaded it; this process need not

    if stands_after:
        _stand_after(stands_after, goes_on)
    sys.exit(main(words))


def _stand_after(num_steps: int, goes_on: Path) -> None:
    """Rank 0, which writes the metrics, waits after this step until the file is there, and the other ranks for it."""
    from pipeline.training.reporting.metrics import Metrics  # noqa: PLC0415  # as above

    write = Metrics.write

    def write_and_stand(metrics: Metrics, step: int, values: Mapping[str, float]) -> None:
        write(metrics, step, values)
        pause, end = threading.Event(), time.monotonic() + _STANDS_SECONDS
        while step >= num_steps and not goes_on.exists() and time.monotonic() < end:
            pause.wait(_POLL_SECONDS)

    Metrics.write = write_and_stand  # type: ignore[assignment,method-assign]
