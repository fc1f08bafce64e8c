"""Stops a run on request: by a signal from Slurm or a person, or by a marker file in the run directory.

A signal is a stop request; its handler only sets a flag. The ranks agree on requests in the reduction that every step
makes anyway, so no rank saves alone. The training loop acts on them at the end of the step. If a step does not end, a
thread ends the process. That thread notices signals even while the main thread is in a collective or a compilation,
when no Python handler runs, because Python's C handler itself writes a signal's number to the wakeup descriptor. After
INT, TERM or HUP:

    before the first step              ends at once: there is nothing to lose
    in a step                          10 s to reach its end, or the time of two steps if that is longer; with several
                                       ranks, at most two more steps follow, until all ranks know
    waiting for data, or evaluating    a rank that runs alone gives up after 5 s and saves; with others, as in a step
    while something is written         waits until it is complete
    at the second INT                  ends at once

USR1 and USR2 are sent well before the job ends, and have no deadline.
"""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from pipeline.training.watchdog.heartbeat_files import Phase, RankProgress
from shards.errors import disk_fault
from shards.files.looks import RepeatedLook
from shards.output.terminal import message_text

_LEAVE = b"\0"
log = logging.getLogger(__name__)
_File = tuple[int, int]  # the inode of a file, and the time of its last change in nanoseconds
_EXIT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The same codes as in jobs/exit_codes.py, which must not be imported here.
CONTINUE, NOTHING_SAVED, INTERRUPTED = 75, 74, 130
DEADLINE_SECONDS = 10.0
WAIT_SECONDS = 5.0  # after this, a wait for data is given up, so that there is time to save
_POLL_SECONDS = 0.1
_DEMANDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class SignalWatcher:
    """Calls `notice(numbers)` in a thread, with the numbers of the signals that came.

    `notice` returns the seconds after which it is called again even if no signal comes, or None to wait for a signal.
    """

    def __init__(self, notice: Callable[[bytes], float | None], *, name: str) -> None:
        self._notice = notice
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. Raises ValueError if it is not called in the main thread."""
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Restores the wakeup descriptor, and returns once the thread has ended."""
        signal.set_wakeup_fd(self._before)
        os.write(self._write_end, _LEAVE)
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _watch(self) -> None:
        seconds: float | None = None
        while True:
            ready, _, _ = select.select([self._read_end], [], [], seconds)
            numbers = os.read(self._read_end, 1024) if ready else b""
            if _LEAVE in numbers:
                return
            seconds = self._notice(numbers)


class StopRequest(IntEnum):
    """What a rank is asked to do. All ranks act on the highest request that any of them has."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_EXIT = 2


def install(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> dict[signal.Signals, Any]:
    """Sets a handler for these signals, and returns the previous handlers. A signal that is ignored, as HUP is under
    nohup and INT in a background shell, stays ignored. USR1 and USR2 are an exception, since slurm/stage.sbatch ignores
    them on behalf of torchrun. Outside the main thread, no handler is set, since Python allows none there."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    caught = [number for number in numbers if number in _WARNINGS or signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in caught}


class Signals:
    """A context manager, inside which USR1, USR2, TERM, INT (Ctrl-C) and HUP (a closed terminal) are requests to save
    and exit. The file RUN/STOP is such a request, too, and RUN/SAVE is a request to save."""

    def __init__(self, run_dir: Path, *, watch_markers: bool) -> None:
        self._save = run_dir / "SAVE"
        todo = "the run goes on and looks again at every step; until then, a signal stops it"
        self._stop_look = RepeatedLook(run_dir / "STOP", todo=todo)
        self._save_look = RepeatedLook(self._save, todo="the run goes on and looks again at every step")
        self._watch_markers = watch_markers
        self._asked = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._is_over = False
        self._served: _File | None = None
        self._again = False
        self._ignored: _File | None = None

    def __enter__(self) -> Self:
        self._before = install(_EXIT_SIGNALS, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # After the last barrier, a rank that ends first must not end this one (torchrun would send TERM).
            signal.signal(number, signal.SIG_IGN if self._is_over else handler)

    def request(self) -> StopRequest:
        """Returns what this rank is asked to do now."""
        if self._asked.is_set():
            return StopRequest.SAVE_AND_EXIT
        if self._watch_markers and self._stop_look.status():
            return StopRequest.SAVE_AND_EXIT
        asked = self._marker() if self._watch_markers else None
        return StopRequest.SAVE if self._again or (asked and asked != self._served) else StopRequest.NOTHING

    def over(self) -> None:
        """Records that everything is committed and all ranks know it. The signals are ignored once the context has
        ended."""
        self._is_over = True

    def save_again(self) -> None:
        """Asks for a save at the next step."""
        self._again = True

    def saving(self) -> None:
        """Records that a save begins. If RUN/SAVE exists now, this is the save that it asks for."""
        self._again = False
        self._served = self._marker() if self._watch_markers else None

    def not_saved(self) -> None:
        """Records that the save failed, so that RUN/SAVE still asks for one."""
        self._served = None

    def saved(self) -> None:
        """Records that the save is committed. RUN/SAVE is deleted, unless it was written after the save began."""
        served, self._served = self._served, None
        if served and served == self._marker():
            try:
                self._save.unlink(missing_ok=True)
            except OSError as error:
                if disk_fault(error):
                    self._served = served  # it is deleted after the next save
                    return
                self._ignored = served  # it is a folder, or belongs to somebody else
                log.warning(
                    "%s cannot be deleted (%s) and is ignored; to ask for a save again, remove it first",
                    *(self._save, error.strerror),
                )

    def _marker(self) -> _File | None:
        """Returns the inode and time of RUN/SAVE, which tell a repeated request from the first; None if the file is
        missing or ignored."""
        found = self._save_look.status()
        if found is None or (self._ignored and found.st_ino == self._ignored[0]):
            return None
        return found.st_ino, found.st_mtime_ns

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._asked.set()


class WaitGivenUpError(Exception):
    """A wait was given up because of a stop request."""


class _Phase(Enum):
    STARTING, STEP, WRITING = "starting", "step", "writing"


class Stopping:
    """A context manager for a run's main thread, which ends the process if a requested stop takes too long. In other
    threads it does nothing, since Python allows no handlers there. What the main thread reports here also goes to
    `progress`, for the heartbeat."""

    def __init__(self, *, rank: int = 0, num_ranks: int = 1) -> None:
        self.rank, self._is_alone = rank, num_ranks == 1
        self.saved_step: int | None = None
        self.progress = RankProgress()
        self._phase, self._doing, self._can_give_up = _Phase.STARTING, "", False
        self._reached = self._asked_at = 0.0
        self._num_steps, self._longest_seconds, self._num_interrupts = 0, 0.0, 0
        self._watcher: SignalWatcher | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._main = threading.get_ident()
            self._stderr = os.dup(2)  # DeepSpeed redirects descriptor 2 for a moment while it is imported
            self._alarm_before = signal.signal(signal.SIGALRM, self._give_up)
            self._watcher = SignalWatcher(self._notice_all, name="stopping")
            self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher:
            self._watcher.stop()
            signal.signal(signal.SIGALRM, self._alarm_before)
            os.close(self._stderr)

    @property
    def is_asked(self) -> bool:
        """Whether INT, TERM or HUP has come."""
        return self._asked_at > 0

    @property
    def may_stop_alone(self) -> bool:
        """Whether a signal has asked a rank that runs alone to stop, which needs no other's consent."""
        return self._is_alone and bool(self.progress.asked_by)

    @property
    def exit_code(self) -> int:
        """The exit code of a run that ends now: 75 if a checkpoint is committed, else 130 after Ctrl-C, else 74."""
        if self.saved_step is not None:
            return CONTINUE
        return INTERRUPTED if self._num_interrupts else NOTHING_SAVED

    def saved(self, step: int) -> None:
        """Records that a checkpoint of this step is committed."""
        self.saved_step = step

    def step_begins(self, step: int = 0) -> None:
        """Records that a step begins. From now on, a stop waits for the end of the step. `step`: its number, from 1
        on."""
        now = time.monotonic()
        if self._num_steps > 1:  # the first step may compile
            self._longest_seconds = max(self._longest_seconds, now - self._reached)
        self._num_steps += 1
        self._phase, self._reached = _Phase.STEP, now
        self.progress.step_begins(step)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Records that a checkpoint is written inside the `with` block, where a stop has no deadline. A checkpoint that
        is written in the background is waited for inside such a block before the run ends."""
        is_over = self._phase is _Phase.WRITING
        self._phase = _Phase.WRITING
        self.progress.enters(Phase.SAVING)
        yield
        self._phase, self._reached = _Phase.WRITING if is_over else _Phase.STEP, time.monotonic()
        self.progress.enters(Phase.FINISHING if is_over else Phase.COMPUTING)

    def finishing(self) -> None:
        """Records that the last step is done. There is no deadline for what is still to be written."""
        self._phase = _Phase.WRITING
        self.progress.enters(Phase.FINISHING)

    @contextmanager
    def giving_up(self, doing: str) -> Iterator[None]:
        """Allows a stop request to interrupt the work inside the `with` block: 5 s after the signal, WaitGivenUpError
        is raised there. `doing`: what is done, for messages.

        With several ranks nothing is interrupted: the others are in a collective, with which this rank's collective for
        saving would be mixed up.
        """
        self._doing, self._can_give_up = doing, self._is_alone
        try:
            yield
        finally:
            self._doing, self._can_give_up = "", False

    def standing(self) -> str:
        """Returns a text that says what is saved, and what the same command would do."""
        if self.saved_step is None:
            return "nothing has been saved yet; the same command starts from the beginning"
        return f"step {self.saved_step} is saved; run the same command to continue"

    def _give_up(self, _number: int, _frame: FrameType | None) -> None:
        if self._can_give_up:
            self._can_give_up = False
            raise WaitGivenUpError(self._doing)

    def _notice_all(self, numbers: bytes) -> float | None:
        for number in numbers:
            self._notice(number)
        if self.is_asked:
            self._check(time.monotonic())
        return _POLL_SECONDS if self.is_asked else None

    def _notice(self, number: int) -> None:
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                self._end(INTERRUPTED, f"ended at once; {self.standing()}")
        if number in _DEMANDS and not self.is_asked:
            self._asked_at = time.monotonic()
        elif number not in _WARNINGS:
            return
        self.progress.asked_by = self.progress.asked_by or signal.Signals(number).name
        if self.rank == 0 and self._phase is not _Phase.STARTING:
            what = self._what_is_to_come() if self._phase is _Phase.STEP else "finishing what is being written"
            more = " (Ctrl-C again ends at once)" if number == signal.SIGINT else f" ({signal.Signals(number).name})"
            say(f"stopping: {what}{more}", self._stderr)

    def _what_is_to_come(self) -> str:
        """Returns what the run still does after a stop request in a step."""
        place = self.progress.place
        if place.phase is Phase.EVALUATING:
            return f"leaving out the rest of the evaluation, and saving step {place.step:,}"
        if self._is_alone:
            return f"finishing and saving step {place.step:,}"
        return f"finishing step {place.step:,} and at most 2 more, until all ranks know, and saving"

    def _check(self, now: float) -> None:
        """Ends the process if its time is up."""
        if self._phase is _Phase.STARTING:
            self._end(self.exit_code, f"stopped before the first step; {self.standing()}")
        waited = now - max(self._asked_at, self._reached)
        if self._phase is _Phase.STEP and self._can_give_up and waited > WAIT_SECONDS:
            signal.pthread_kill(self._main, signal.SIGALRM)
        limit = max(DEADLINE_SECONDS, 2 * self._longest_seconds)
        if self._phase is _Phase.STEP and waited > limit:
            doing = f", {self._doing}" if self._doing else ""
            self._end(self.exit_code, f"the current step did not end within {limit:.0f} s{doing}; {self.standing()}")

    def _end(self, code: int, message: str) -> None:
        if self.rank == 0 or self._phase is _Phase.STEP:
            say(message if self.rank == 0 else f"rank {self.rank}: {message}", self._stderr)
        end_now(code)


def say(message: str, stderr: int = 2) -> None:
    """Writes a line to standard error without taking any lock. On a terminal, it replaces the live line."""
    with suppress(OSError):  # the process must end even if there is no reader or the disk is full
        clear = f"\r{' ' * (os.get_terminal_size(stderr).columns - 1)}\r" if os.isatty(stderr) else ""
        line = f"{clear}{time.strftime('%H:%M:%S')} {message_text(message)}\n"
        os.write(stderr, line.encode(errors="backslashreplace"))


def end_now(code: int) -> None:
    """Ends the process without running any more Python."""
    os._exit(code)
