"""Ends the process if a stop cannot wait until the end of a step, whatever the main thread is doing.

A signal (signals.py) is a stop request, and the loop acts on it at the end of the step. A thread checks that it does.
The thread notices signals even while the main thread is in a collective or a compilation (signals.py). After INT, TERM
or HUP:

    before the first step              ends at once: there is nothing to lose
    in a step                          10 s to reach its end, or the time of two steps if that is longer
    waiting for data, or evaluating    a rank that runs alone gives up after 5 s and saves; with others, as in a step
    while something is written         waits until it is complete
    at the second INT                  ends at once

USR1 and USR2 come well ahead of the end, and have no deadline.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from types import FrameType, TracebackType
from typing import Self

from pipeline.training.watchdog.rank_progress import Phase, RankProgress
from pipeline.training.watchdog.signals import SignalWatcher
from shards.output.terminal import message_text

# As in jobs/exit_codes.py, which may not be imported from here.
CONTINUE, NOTHING_SAVED, INTERRUPTED = 75, 74, 130
DEADLINE_SECONDS = 10.0
WAIT_SECONDS = 5.0  # then a wait for data is given up, so that there is time left to save
_POLL_SECONDS = 0.1
_DEMANDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class WaitGivenUpError(Exception):
    """A stop request came first: what was waited for is no longer needed."""


class _Phase(Enum):
    STARTING, STEP, WRITING = "starting", "step", "writing"


class Stopping:
    """Context manager for a run's main thread. In others it does nothing, as Python allows no handlers there. What the
    main thread says of its progress also goes to `progress`, for the heartbeat."""

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
            self._stderr = os.dup(2)  # DeepSpeed points 2 elsewhere for a moment while it is imported
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
    def exit_code(self) -> int:
        """The exit code of a run that ends now: 75 if a checkpoint is committed, else 130 after Ctrl-C, else 74."""
        if self.saved_step is not None:
            return CONTINUE
        return INTERRUPTED if self._num_interrupts else NOTHING_SAVED

    def saved(self, step: int) -> None:
        """A checkpoint of this step is committed."""
        self.saved_step = step

    def step_begins(self, step: int = 0) -> None:
        """A step begins, the first or the next: from now on a stop waits for its end. `step`: from 1 on."""
        now = time.monotonic()
        if self._num_steps > 1:  # the first compiles
            self._longest_seconds = max(self._longest_seconds, now - self._reached)
        self._num_steps += 1
        self._phase, self._reached = _Phase.STEP, now
        self.progress.step_begins(step)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A checkpoint is written inside: there is no deadline. One that is written in the background has none of its
        own: before the run ends, it is waited for inside this."""
        is_over = self._phase is _Phase.WRITING
        self._phase = _Phase.WRITING
        self.progress.enters(Phase.SAVING)
        yield
        self._phase, self._reached = _Phase.WRITING if is_over else _Phase.STEP, time.monotonic()
        self.progress.enters(Phase.FINISHING if is_over else Phase.COMPUTING)

    def finishing(self) -> None:
        """The last step is done: there is no deadline for what is still to be written."""
        self._phase = _Phase.WRITING
        self.progress.enters(Phase.FINISHING)

    @contextmanager
    def giving_up(self, doing: str) -> Iterator[None]:
        """What is done inside can be given up: 5 s after the signal it raises WaitGivenUpError.

        Not with several ranks: the others are in a collective, and would take this one's save for its contribution.
        """
        self._doing, self._can_give_up = doing, self._is_alone
        try:
            yield
        finally:
            self._doing, self._can_give_up = "", False

    def standing(self) -> str:
        """What is saved, and what the same command does."""
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
            what = "finishing and saving this step" if self._phase is _Phase.STEP else "finishing what is being written"
            more = " (Ctrl-C again ends at once)" if number == signal.SIGINT else f" ({signal.Signals(number).name})"
            say(f"stopping: {what}{more}", self._stderr)

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
    """A line on standard error, without taking any lock; it replaces a terminal's live line."""
    with suppress(OSError):  # without a reader, or on a full disk, the end must come all the same
        clear = f"\r{' ' * (os.get_terminal_size(stderr).columns - 1)}\r" if os.isatty(stderr) else ""
        line = f"{clear}{time.strftime('%H:%M:%S')} {message_text(message)}\n"
        os.write(stderr, line.encode(errors="backslashreplace"))


def end_now(code: int) -> None:
    """Ends the process without another line of Python."""
    os._exit(code)
