"""`patchline watch RUN`: a run, its jobs and its log, drawn again every few seconds until q or Ctrl-C.

Where standard output is no terminal, a line every half minute. A thread asks Slurm, so that a controller that does not
answer does not stop the picture.
"""

import os
import select
import shlex
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from jobs import exit_codes
from jobs.screen import put
from jobs.status import Status, refuse_no_run, state_of, status_of
from jobs.watch_view import View, drawn, view_of
from shards.config_values import shown_value, whole_number
from shards.errors import UserError
from shards.pool import Pool
from shards.quantities import clock
from shards.terminal import columns_of, unescaped

USAGE = "patchline watch RUN [--seconds N]"
_SLURM_SECONDS, _LINE_SECONDS = 10.0, 30.0
_ANSWER_SECONDS, _POLL_SECONDS = 15.0, 0.1  # without a terminal, for Slurm's first answer


class Asked:
    """Slurm's last answer about a run, renewed in the background."""

    def __init__(self, run_dir: Path, environ: Mapping[str, str]) -> None:
        self.status: Status | None = None
        self.complaint = ""
        self._run_dir, self._environ = run_dir, environ
        self._at, self._next = 0.0, 0.0
        self._future: Future[Status] | None = None
        self._has_slurm = shutil.which("scontrol", path=environ.get("PATH")) is not None
        self._pool = Pool(1, name="watch")

    def renew(self) -> None:
        """Takes the answer, if there is one, and asks again when it is time. Returns at once."""
        if self._future and self._future.done():
            try:
                self.status, self.complaint, self._at = self._future.result(), "", time.monotonic()
            except UserError as error:
                self.complaint = str(error)
            self._future, self._next = None, time.monotonic() + _SLURM_SECONDS
        if self._has_slurm and not self._future and time.monotonic() >= self._next:
            self._future = self._pool.submit(lambda: status_of(self._run_dir, self._environ))

    @property
    def is_open(self) -> bool:
        """Whether Slurm has been asked, and nothing is known yet."""
        return self._has_slurm and self.status is None and not self.complaint

    @property
    def age(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._at if self.status else 0.0

    def close(self) -> None:
        """Waits for nothing."""
        self._pool.close(seconds=0)


def run(words: list[str], *, environ: Mapping[str, str]) -> int:
    """Shows the run until the user leaves; without a terminal until it has ended. UserError for what is no run."""
    run_dir, seconds = _wish(words)
    refuse_no_run(run_dir)
    if view_of(run_dir) is None:
        words = f"patchline logs {shlex.quote(str(run_dir))}"
        raise UserError(f"{str(run_dir)!r} is of a stage that has no steps to watch; `{words}` shows its log")
    asked = Asked(run_dir, environ)
    try:
        if columns_of(sys.stdout) and sys.stdin.isatty():
            with suppress(KeyboardInterrupt):
                _show(run_dir, asked, seconds)
        else:
            _tell(run_dir, asked)
    finally:
        asked.close()
    return exit_codes.DONE


def _wish(words: list[str]) -> tuple[Path, int]:
    folders, seconds, left = [], 2, iter(words)
    for word in left:
        name, has_value, value = word.partition("=")
        if name == "--seconds":
            given = value if has_value else next(left, "")
            number = whole_number(given)
            if number is None or not 1 <= number <= 3600:
                raise UserError(f"--seconds is {shown_value(given)}; allowed: 1 to 3,600")
            seconds = number
        elif word.startswith("-"):
            raise UserError(f"there is no flag {shown_value(word)}; usage: {USAGE}")
        else:
            folders.append(word)
    if len(folders) != 1:
        raise UserError(f"usage: {USAGE}")
    return Path(folders[0]), seconds


def _view(run_dir: Path, asked: Asked) -> View | None:
    asked.renew()
    return view_of(run_dir, status=asked.status, status_age=asked.age, complaint=asked.complaint)


def _show(run_dir: Path, asked: Asked, seconds: int) -> None:
    from rich.console import Console, Group  # noqa: PLC0415 - not needed for help
    from rich.live import Live  # noqa: PLC0415

    console = Console(file=unescaped(sys.stdout))
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        until = 0.0
        while True:
            view = _view(run_dir, asked)
            if view:
                lines = drawn(view, columns=console.width, rows=console.height)
                live.update(Group(*lines), refresh=True)
            until = time.monotonic() + (seconds if asked.status or asked.complaint else 0.5)
            while (left := until - time.monotonic()) > 0:
                if select.select([keys], [], [], left)[0] and os.read(keys, 64)[:1] in (b"q", b"Q", b""):
                    return


@contextmanager
def _keys() -> Iterator[int]:
    """Standard input, of which each key comes at once and is not shown; Ctrl-C stays what it is."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _tell(run_dir: Path, asked: Asked) -> None:
    """A line now and then, for a log; ends with the run, once no job of it waits or runs."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    while asked.is_open and time.monotonic() < deadline:
        asked.renew()
        time.sleep(_POLL_SECONDS)
    while True:
        view = _view(run_dir, asked)
        if view:
            put(line_of(view) + "\n")
            if view.run.facts.state != "running" and not (view.status and view.status.next_job):
                return
        time.sleep(_LINE_SECONDS)


def line_of(view: View) -> str:
    """The most important of a view."""
    facts = view.run.facts
    words = [
        time.strftime("%H:%M:%S", time.localtime(view.now)),
        state_of(view.run, view.status) if view.status else facts.state,
        f"step {facts.step or 0:,}" + (f"/{view.run.num_steps:,}" if view.run.num_steps else ""),
        "" if facts.loss is None else f"loss {facts.loss:.4g}",
        "" if facts.images_per_second is None else f"{facts.images_per_second:,.0f} images/s",
        "" if view.seconds_left is None else f"{clock(view.seconds_left)} left",
        *(finding.words for finding in (view.status.findings[:1] if view.status else ())),
    ]
    return "  ".join(word for word in words if word)
