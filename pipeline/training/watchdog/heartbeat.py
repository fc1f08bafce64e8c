"""Notices that a rank hangs: in an exchange, in a read, in an evaluation, or anywhere else.

The main thread says what it does (heartbeat_files.py), which costs it nothing. A thread of every rank writes that to
RUN/heartbeats every few seconds, and sees how long the rank has stood where it is (limits: HangConfig). A rank that has
stood there for too long, and each that waits for it, writes its stacks; one of them says which rank the others wait
for; then all end with exit code 74. Usually the limit is over on all ranks at about the same time, since each step has
an exchange. Only the time in which this thread runs counts: after a suspension, a run continues.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.ranks.environment import TimeLimits
from pipeline.ranks.world import World
from pipeline.training.settings.job import HangConfig
from pipeline.training.watchdog.hang import FOLDER, disk_words, hang_message, is_silent, stacks_path, write_stacks
from pipeline.training.watchdog.heartbeat_files import FOLDER as BEATS
from pipeline.training.watchdog.heartbeat_files import (
    Beat,
    BeatWriter,
    Heard,
    HeartbeatFiles,
    Phase,
    RankProgress,
    error_words,
    limit_seconds,
)
from pipeline.training.watchdog.last_resort import LastResort
from pipeline.training.watchdog.stopping import NOTHING_SAVED, end_now, say

Feed = Callable[[], None]  # says that Python runs
_RETRY = NOTHING_SAVED  # the exit code of a fault outside: the same command continues
_MOST_TICK_SECONDS, _MOST_BEAT_SECONDS = 1.0, 15.0
_MOST_TICKS = 5  # that a pause of this thread counts for: longer, and the machine was busy, or the process suspended
_FLUSH_SECONDS = 10.0  # in which a beat is written, if its storage answers
_GRACE_SECONDS = (2.0, 60.0)  # in which the ranks write their stacks, at least and at most


def time_limits(config: HangConfig) -> TimeLimits:
    """How long the ranks of a run wait for each other. An exchange fails after twice the longest limit, so that the
    heartbeat, which can name a rank, comes first, also while a rank saves alone."""
    longest = max(config.step_seconds, config.other_seconds, 2 * config.join_seconds)
    return TimeLimits(join_seconds=config.join_seconds, exchange_seconds=max(TimeLimits.exchange_seconds, 2 * longest))


class Heartbeat:
    """A context manager around a run, whose thread ends the process if the run hangs."""

    def __init__(self, run_dir: Path, config: HangConfig, progress: RankProgress, *, world: World) -> None:
        self._run_dir, self._config, self._progress, self._world = run_dir, config, progress, world
        least_limit = min(config.step_seconds, config.join_seconds)
        self._tick_seconds = min(_MOST_TICK_SECONDS, least_limit / 20)
        self._beat_seconds = min(_MOST_BEAT_SECONDS, least_limit / 20)
        self._silent_seconds = config.step_seconds / 2
        self._place, self._stood, self._longest = progress.place, 0.0, 0.0
        self._ticked = self._beaten = time.monotonic()
        self._files: HeartbeatFiles | None = None  # once the attempt is known
        self._writer: BeatWriter | None = None
        self._attempt = ""  # the first of this process: after a rewind, ranks begin the next at different times
        self._has_dumped = self._has_said = False
        self._asked_by = self._error = self._trouble = self._todo = self._stacks_fault = ""
        self._stopped_pid, self._has_blamed_disk = 0, False
        self._leave, self._thread = threading.Event(), threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        if self._is_on:
            self._stderr = os.dup(2)  # DeepSpeed points 2 elsewhere for a moment while it is imported
            self._ticked = time.monotonic()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_on:
            self._leave.set()
            self._thread.join()  # for ever, if it is about to end the process: a hung run has no other message
            self._error = error_words(error) if error else ""
            if not self._progress.asked_by and (self._run_dir / "STOP").exists():
                self._progress.asked_by = "the file STOP"
            self._progress.enters(Phase.ENDED)
            self._place, self._stood = self._progress.place, 0.0
            self._beat()
            if self._writer:
                self._writer.close(seconds=_FLUSH_SECONDS)
            os.close(self._stderr)

    @property
    def _is_on(self) -> bool:
        return self._config.step_seconds > 0

    def _run(self) -> None:
        with ExitStack() as stack:
            feed = self._last_resort(stack)
            while not self._leave.wait(self._tick_seconds):
                feed()
                if self._tick(time.monotonic()):
                    self._end(feed)

    def _last_resort(self, stack: ExitStack) -> Feed:
        """Starts the last resort. If the host has no room for another process, the heartbeat works without it."""
        try:
            last_resort = LastResort(seconds=2 * self._config.step_seconds, stderr=self._stderr)
        except OSError as error:
            say(
                f"warning: this rank has no last resort ({error.strerror}): it is not ended if a library keeps Python "
                "from running",
                self._stderr,
            )
            return lambda: None
        return stack.enter_context(closing(last_resort)).feed

    def _tick(self, now: float) -> bool:
        """Counts the time since the last tick, and returns whether the run hangs."""
        passed = min(now - self._ticked, _MOST_TICKS * self._tick_seconds)
        self._ticked = now
        place = self._progress.place
        if place is self._place:
            self._stood += passed
        else:
            if self._place.is_repeated and self._stood <= self._limit:  # longer, it waited for a rank that was saving
                self._longest = max(self._longest, self._stood)
            self._place, self._stood = place, 0.0
        if now - self._beaten < self._beat_seconds and self._asked_by == self._progress.asked_by:
            return False
        self._beaten = now
        self._beat()
        return self._hangs()

    def _hangs(self) -> bool:
        """Whether no rank that is alive has made progress in time. Ranks that do, or save, are waited for."""
        if self._stood <= min(self._config.step_seconds / 2, self._limit):
            return False
        if self._files and self._files.is_hanging():
            return True
        return self._stood > self._limit and not any(map(self._is_in_time, self._others()))

    def _is_in_time(self, other: Heard) -> bool:
        if other.beat is None or is_silent(other, after_seconds=self._silent_seconds):
            return False
        return other.beat.seconds <= other.beat.limit_seconds

    def _end(self, feed: Feed) -> None:
        """Ends the process, after the message."""
        self._dump()
        deadline = time.monotonic() + min(max(self._config.step_seconds / 4, _GRACE_SECONDS[0]), _GRACE_SECONDS[1])
        while time.monotonic() < deadline and not self._all_have_dumped():
            self._pause(feed)
        first = self._first_to_dump()
        if first == self._world.rank:
            self._say()
        while self._files and first < self._world.rank and time.monotonic() < deadline:
            heard = self._files.hear(first).beat
            if heard is None or heard.has_said:
                break
            self._pause(feed)
        end_now(_RETRY)

    def _pause(self, feed: Feed) -> None:
        threading.Event().wait(self._tick_seconds)
        feed()

    def _first_to_dump(self) -> int:
        """The lowest rank that has written its stacks: the one that says the message."""
        lower = (one for one in self._others() if one.rank < self._world.rank)
        return next((one.rank for one in lower if one.beat and one.beat.has_dumped), self._world.rank)

    def _dump(self) -> None:
        path = stacks_path(self._run_dir, rank=self._world.rank, attempt=self._attempt)
        place = f"rank {self._world.rank} stood for {self._stood:.0f} s in {self._place.words()}"
        try:
            if not self._attempt:  # the run has not begun, and may have no folder yet
                self._run_dir.mkdir(parents=True, exist_ok=True)
            write_stacks(path, words=place)
        except OSError as error:
            self._stacks_fault = error.strerror or str(error)
        self._has_dumped = True
        self._beat_now()
        if self._files:
            self._files.say_hanging()

    def _all_have_dumped(self) -> bool:
        """Whether this rank need not wait for another one's stacks: a lower rank does, or all that are alive have
        written theirs."""
        for one in self._others():
            has_dumped = one.beat is not None and one.beat.has_dumped
            if has_dumped and one.rank < self._world.rank:
                return True
            if not has_dumped and not is_silent(one, after_seconds=self._silent_seconds):
                return False
        return True

    def _say(self) -> None:
        heard = [*self._others(), Heard(rank=self._world.rank, beat=self._own_beat(), silent_seconds=0.0)]
        message = hang_message(
            sorted(heard, key=lambda one: one.rank),
            num_ranks=self._world.num_ranks,
            silent_after_seconds=self._silent_seconds,
            stacks=str(self._run_dir / FOLDER),
            stacks_fault=self._stacks_fault,
        )
        if self._stuck_seconds > self._silent_seconds:
            message = f"{disk_words(str(self._run_dir / BEATS), self._stuck_seconds)}, so {message}"
        who = f"rank {self._world.rank}: " if self._world.rank else ""
        say(f"error: {who}{message}", self._stderr)
        self._has_said = True
        self._beat_now()

    def _others(self) -> Iterator[Heard]:
        """The other ranks, as far as they can be heard; read one by one, since there may be many."""
        if self._files:
            for rank in range(self._world.num_ranks):
                if rank != self._world.rank:
                    yield self._files.hear(rank)

    @property
    def _limit(self) -> float:
        return limit_seconds(self._place, self._config, longest_seconds=self._longest)

    def _own_beat(self) -> Beat:
        place, self._asked_by = self._place, self._progress.asked_by
        return Beat(
            rank=self._world.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            attempt=self._attempt,
            phase=place.phase,
            step=place.step,
            batch=place.batch,
            seconds=round(self._stood, 3),
            limit_seconds=round(self._limit, 3),
            has_dumped=self._has_dumped,
            has_said=self._has_said,
            asked_by=self._asked_by,
            error=self._error,
            is_done=self._progress.is_done,
            trouble=self._trouble,
            todo=self._todo,
            unix_time=round(time.time(), 3),
        )

    def _beat_now(self) -> None:
        self._beat()
        if self._writer and self._stuck_seconds <= self._silent_seconds:
            self._writer.flush(seconds=_FLUSH_SECONDS)

    def _beat(self) -> None:
        """Writes a beat, once the job is accepted: a refused command leaves nothing behind."""
        if not self._progress.attempt:
            return
        if self._writer is None:
            self._attempt = self._progress.attempt
            self._files = HeartbeatFiles(self._run_dir, rank=self._world.rank, attempt=self._attempt)
            self._writer = BeatWriter(self._files)
        self._look_at_writer()
        self._writer.put(self._own_beat())
        if self._stuck_seconds > self._silent_seconds and not self._has_blamed_disk:
            self._has_blamed_disk = True
            frozen = disk_words(str(self._run_dir / BEATS), self._stuck_seconds)
            self._warn(f"{frozen}; other ranks do not hear this one")

    def _look_at_writer(self) -> None:
        """Names a checkpoint writer that is stopped the second time that it is seen so: a job that was suspended
        continues with its ranks, and a moment later with their writers."""
        before, self._stopped_pid = self._stopped_pid, self._progress.stopped_writer()
        if not self._stopped_pid or self._stopped_pid != before:
            self._trouble = self._todo = ""
        elif not self._trouble:
            who = f"the checkpoint writer (process {before} on {socket.gethostname()})"
            self._trouble = f"{who} is stopped, as by SIGSTOP, and writes no checkpoint"
            self._todo = f"`kill -CONT {before}` there continues it"
            self._warn(f"{self._trouble}; {self._todo}")

    def _warn(self, words: str) -> None:
        who = f"rank {self._world.rank}: " if self._world.rank else ""
        say(f"warning: {who}{words}", self._stderr)

    @property
    def _stuck_seconds(self) -> float:
        """How long the disk of the heartbeats has not answered this rank."""
        return self._writer.stuck_seconds if self._writer else 0.0
