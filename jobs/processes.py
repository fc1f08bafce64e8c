"""`--processes N`: runs a command as N ranks on this machine; their parent passes signals on to them."""

import json
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from jobs import exit_codes
from jobs.ranks import Ranks, log_of, start_ranks
from shards.errors import UserError
from shards.output.terminal import message_text

log = logging.getLogger(__name__)
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SECOND_INTERRUPT_SECONDS = 2.0  # that the ranks have to end by themselves
_TAIL_LINES, _MOST_TAILS = 20, 2


def must_start(processes: int, environ: Mapping[str, str]) -> bool:
    """Whether this process has to start the ranks; if not, it is the only rank or one of several. UserError if torchrun
    or srun has started another number."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        starter, size = "torchrun", environ["WORLD_SIZE"]
    elif "SLURM_PROCID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        starter, size = "srun", environ["SLURM_STEP_NUM_TASKS"]
    else:
        return processes > 1
    if processes > 1 and size != str(processes):
        raise UserError(
            f"--processes is {processes}, but {starter} has started {size} ranks, of which this is one; leave out "
            f"--processes, or start patchline without {starter}"
        )
    return False


def run_ranks(words: list[str], *, num_ranks: int, environ: Mapping[str, str], run_dir: str) -> int:
    """Runs `patchline WORDS` on `num_ranks` ranks to its end and returns the run's exit code."""
    with _log_dir(run_dir) as log_dir, _heard() as heard:
        sizes = [_size(log_of(log_dir, rank)) for rank in range(num_ranks)]
        ranks = start_ranks(words, num_ranks=num_ranks, environ=environ, log_dir=log_dir)
        code = ranks.wait(each_time=_PassingOn(ranks, heard).pass_on)
        for line in _last_words(ranks, log_dir, sizes):
            sys.stderr.write(message_text(line) + "\n")
    if code == exit_codes.USER_MISTAKE and run_dir:
        _leave_nothing(Path(run_dir))
    return code if code >= 0 else 128 - code


class _PassingOn:
    """Passes incoming signals on to the ranks."""

    def __init__(self, ranks: Ranks, heard: deque[int]) -> None:
        self._ranks, self._heard = ranks, heard
        self._num_interrupts, self._kill_at = 0, float("inf")

    def pass_on(self) -> None:
        """Passes on the signals since the last call. Ranks that outlive the second Ctrl-C are killed."""
        while self._heard:
            number = self._heard.popleft()
            self._num_interrupts += number == signal.SIGINT
            if number == signal.SIGINT and self._num_interrupts == 2:
                self._kill_at = time.monotonic() + _SECOND_INTERRUPT_SECONDS
            self._ranks.signal(number)
        if time.monotonic() > self._kill_at:
            self._ranks.kill()


@contextmanager
def _heard() -> Iterator[deque[int]]:
    """Collects the signals that arrive while this is open."""
    heard: deque[int] = deque()

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(number)

    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, hear)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _log_dir(run_dir: str) -> Iterator[Path]:
    """RUN/logs, or a temporary folder if the command has no run directory."""
    if not run_dir:
        with tempfile.TemporaryDirectory(prefix="patchline-") as folder:
            yield Path(folder)
        return
    run = Path(run_dir)
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        (run / "logs").mkdir(exist_ok=True)
    except OSError as error:
        message = f"cannot make {run}: {error.strerror}; give --run-dir a folder that this user may write to"
        raise UserError(message) from error
    yield run / "logs"


def _leave_nothing(run: Path) -> None:
    """Removes the logs, and an empty run directory, of a command that was refused before the run began."""
    if not (run / "job.yaml").exists():
        shutil.rmtree(run / "logs")
        if not any(run.iterdir()):
            run.rmdir()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _last_words(ranks: Ranks, log_dir: Path, sizes: list[int]) -> Iterator[str]:
    """The last lines of the ranks that failed first. Rank 0's lines are on the terminal, and so is a mistake that
    rank 0 has found, too."""
    codes = [process.returncode for process in ranks.processes]
    for rank in ranks.failed[:_MOST_TAILS]:
        is_said = codes[rank] == codes[0] == exit_codes.USER_MISTAKE
        if rank == 0 or is_said or codes[rank] in (exit_codes.CONTINUE, exit_codes.INTERRUPTED):
            continue
        path = log_of(log_dir, rank)
        with path.open("rb") as log:
            log.seek(sizes[rank])
            lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        how = f"was killed by {signal.Signals(-codes[rank]).name}" if codes[rank] < 0 else f"ended with {codes[rank]}"
        yield f"rank {rank} {how}" + (f"; the last lines of {path}:" if lines else "; it wrote nothing")
        yield from (f"  {line}" for line in lines)


def tell_torchrun(path: Path) -> None:
    """Writes what torchrun shows for a rank that stopped to be continued, which torchrun takes for a failure. Where
    that is not possible, the exit code counts all the same."""
    says = "no failure: stopped with a committed checkpoint (exit code 75); run the same command to continue"
    content = {"message": says, "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        path.write_text(json.dumps({"message": content}))
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        log.warning("TORCHELASTIC_ERROR_FILE cannot be written: %s", error)
