"""Starts the ranks of one stage on this machine, each a process of its own that can be waited for or killed."""

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.world import free_port

_GRACE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The running processes of one stage, in rank order."""

    processes: tuple[subprocess.Popen[bytes], ...]

    def poll(self) -> bool:
        """True while any rank runs."""
        return any(process.poll() is None for process in self.processes)

    def kill(self) -> None:
        """SIGKILL to every rank at once: what a power cut or the out-of-memory killer does."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def wait(self) -> int:
        """Waits for all ranks; 0 or the first code that is not. When one fails, the others are ended."""
        while self.poll():
            if any(process.poll() not in (None, 0) for process in self.processes):
                self._end_the_rest()
                break
            time.sleep(0.05)
        codes = [process.wait() for process in self.processes]
        return next((code for code in codes if code != 0), 0)

    def _end_the_rest(self) -> None:
        deadline = time.monotonic() + _GRACE_SECONDS
        while self.poll() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()


def start_ranks(words: list[str], *, num_ranks: int, environ: Mapping[str, str], log_dir: Path) -> Ranks:
    """`patchline WORDS` on `num_ranks` processes. Rank 0 keeps the terminal, the others write to log_dir/rank-N.log."""
    log_dir.mkdir(parents=True, exist_ok=True)
    shared = {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    shared["LOCAL_WORLD_SIZE"] = str(num_ranks)
    processes = []
    for rank in range(num_ranks):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-P", "-m", "jobs.cli", *words]  # -P: the current folder may have a jobs/, too
        if rank == 0:
            processes.append(subprocess.Popen(command, env=own))
        else:
            with (log_dir / f"rank-{rank}.log").open("ab") as log:
                processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
    return Ranks(processes=tuple(processes))
