"""Notices that a rank hangs: in an exchange, in a read, in an evaluation, or anywhere else.

The main thread reports what it does (heartbeat_files.py), at almost no cost. On every rank, a thread writes this report
to RUN/heartbeats every few seconds, and watches how long the rank has been at the same place (for the limits, see
HangConfig). If a rank has been there for too long, it writes its stacks, and so does each rank that waits for it. One
of them reports for which rank the others wait. Then all end with exit code 74. Usually all ranks exceed the limit at
about the same time, since each step has an exchange. Only the time in which the heartbeat's thread runs counts, so a
run continues after a suspension.
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
from pipeline.training.watchdog.hang import (
    FOLDER,
    disk_words,
    hang_message,
    is_silent,
    main_stack,
    stacks_path,
    write_stacks,
)
from pipeline.training.watchdog.heartbeat_files import FOLDER as BEATS
from pipeline.training.watchdog.heartbeat_files import (
    STOP_FILE,
    Beat,
    BeatWriter,
    DiskWork,
    Heard,
    HeartbeatFiles,
    Phase,
    RankProgress,
    Result,
    error_words,
    limit_seconds,
)
from pipeline.training.watchdog.last_resort import LastResort, file_calls
from pipeline.training.watchdog.stopping import NOTHING_SAVED, end_now, say
from shards.files.looks import Look, look_once

Feed = Callable[[str], None]  # tells the last resort that Python runs, and what the rank waits for
_RETRY = NOTHING_SAVED  # the exit code for a fault that the run did not cause: the same command continues it
_MOST_TICK_SECONDS, _MOST_BEAT_SECONDS = 1.0, 15.0
# The most ticks that a pause of the heartbeat's thread counts for. In a longer pause, the machine was busy or the
# process was suspended.
_MOST_TICKS = 5
_FLUSH_SECONDS = 10.0  # how long to wait for a beat to be written
_SAY_SECONDS = 5.0  # how long to wait for a line on standard error, which may be a file on a disk, too
_NO_ANSWER = "it does not answer"
_GRACE_SECONDS = (2.0, 60.0)  # the least and the most time for ranks to write their stacks


def time_limits(config: HangConfig) -> TimeLimits:
    """Returns how long the ranks of a run wait for each other. An exchange fails only after twice the longest limit, so
    that the heartbeat, which can name a rank, comes first, even while one rank saves alone."""
    longest = max(config.step_seconds, config.other_seconds, 2 * config.join_seconds)
    return TimeLimits(join_seconds=config.join_seconds, exchange_seconds=max(TimeLimits.exchange_seconds, 2 * longest))


class Heartbeat:
    """A context manager for a run. Its thread ends the process if the run hangs."""

    def __init__(self, run_dir: Path, config: HangConfig, progress: RankProgress, *, world: World) -> None:
        self._run_dir, self._config, self._progress, self._world = run_dir, config, progress, world
        least_limit = min(config.step_seconds, config.join_seconds)
        self._tick_seconds = min(_MOST_TICK_SECONDS, least_limit / 20)
        self._beat_seconds = min(_MOST_BEAT_SECONDS, least_limit / 20)
        self._silent_seconds = config.step_seconds / 2
        self._place, self._stood, self._longest = progress.place, 0.0, 0.0
        self._ticked = self._beaten = time.monotonic()
        self._files: HeartbeatFiles | None = None  # set once the attempt is known
        self._writer: BeatWriter | None = None
        self._attempt = ""  # this process's first attempt; after a rewind, ranks begin the next one at different times
        self._has_dumped = self._has_said = False
        self._asked_by = self._error = self._trouble = self._todo = self._stacks_fault = ""
        self._stopped_pid, self._has_blamed_disk = 0, False
        self._feed: Feed = lambda _: None
        self._disk = DiskWork(tick=lambda: self._feed(self._disk_words()), tick_seconds=self._tick_seconds)
        self._voice = DiskWork()
        self._calls: dict[str, tuple[float, str]] = {}  # the file call that each thread is in, and since when
        self._leave, self._thread = threading.Event(), threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        if self._is_on:
            self._stderr = os.dup(2)  # DeepSpeed redirects descriptor 2 for a moment while it is imported
            self._ticked = time.monotonic()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_on:
            asked_by = self._progress.asked_by  # STOP is looked for while the thread still watches
            if not asked_by and look_once(self._run_dir / "STOP") is Look.THERE:
                asked_by = STOP_FILE
            self._leave.set()
            # If the thread is ending the process, this call never returns, so the thread's message stays the only one.
            self._thread.join()
            self._error = error_words(error) if error else ""
            self._progress.asked_by = self._progress.asked_by or asked_by
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
            self._feed = self._last_resort(stack)
            while not self._leave.wait(self._tick_seconds):
                self._feed(self._disk_words())
                if self._tick(time.monotonic()):
                    self._end()

    def _last_resort(self, stack: ExitStack) -> Feed:
        """Starts the last resort, and returns what feeds it. If no other process can be started, the heartbeat works
        without it."""
        try:
            last_resort = LastResort(seconds=2 * self._config.step_seconds, stderr=self._stderr)
        except OSError as error:
            self._tell(
                f"warning: this rank has no last resort ({error.strerror}): it is not ended if a library keeps Python "
                "from running"
            )
            return lambda _: None
        return stack.enter_context(closing(last_resort)).feed

    def _tick(self, now: float) -> bool:
        """Counts the time since the last tick, and returns whether the run hangs."""
        passed = min(now - self._ticked, _MOST_TICKS * self._tick_seconds)
        self._ticked = now
        place = self._progress.place
        if place is self._place:
            self._stood += passed
        else:
            # If it took longer than the limit, the rank waited for another one that was saving.
            if self._place.is_repeated and self._stood <= self._limit:
                self._longest = max(self._longest, self._stood)
            self._place, self._stood = place, 0.0
        if now - self._beaten < self._beat_seconds and self._asked_by == self._progress.asked_by:
            return False
        self._beaten = now
        self._calls = {key: self._calls.get(key, (now, words)) for key, words in file_calls().items()}
        self._beat()
        return self._hangs()

    def _hangs(self) -> bool:
        """Returns whether the run hangs: another rank has said so, or this rank is over its limit and no other rank is
        alive and within its own. A rank that is saving may have a longer limit, and is waited for. If the disk does not
        answer, only this rank's own limit counts."""
        if self._stood <= min(self._config.step_seconds / 2, self._limit):
            return False
        if self._files and self._asked(self._files.is_hanging, otherwise=False):
            return True
        return self._stood > self._limit and not self._asked(self._is_any_in_time, otherwise=False)

    def _is_any_in_time(self) -> bool:
        return any(map(self._is_in_time, self._others()))

    def _is_in_time(self, other: Heard) -> bool:
        if other.beat is None or is_silent(other, after_seconds=self._silent_seconds):
            return False
        return other.beat.seconds <= other.beat.limit_seconds

    def _asked(self, work: Callable[[], Result], *, otherwise: Result) -> Result:
        """Returns the result of `work()`, which uses the disk; `otherwise` if the disk does not answer in time."""
        return self._disk.ask(work, otherwise=otherwise, seconds=self._silent_seconds)

    def _end(self) -> None:
        """Writes the stacks, waits for the other ranks' stacks and for the message, and ends the process."""
        self._dump()
        deadline = time.monotonic() + min(max(self._config.step_seconds / 4, _GRACE_SECONDS[0]), _GRACE_SECONDS[1])
        while time.monotonic() < deadline and not self._asked(self._all_have_dumped, otherwise=True):
            self._pause()
        first = self._asked(self._first_to_dump, otherwise=self._world.rank)
        if first == self._world.rank:
            self._say()
        while first < self._world.rank and time.monotonic() < deadline:
            if not self._asked(lambda: self._will_say(first), otherwise=False):
                break
            self._pause()
        end_now(_RETRY)

    def _pause(self) -> None:
        threading.Event().wait(self._tick_seconds)
        self._feed(self._disk_words())

    def _will_say(self, rank: int) -> bool:
        """Returns whether another rank will write the message but has not done so yet."""
        heard = self._files.hear(rank).beat if self._files else None
        return heard is not None and not heard.has_said

    def _first_to_dump(self) -> int:
        """Returns the lowest rank that has written its stacks, which is the one that writes the message."""
        lower = (one for one in self._others() if one.rank < self._world.rank)
        return next((one.rank for one in lower if one.beat and one.beat.has_dumped), self._world.rank)

    def _dump(self) -> None:
        self._stacks_fault = self._asked(self._write_stacks, otherwise=_NO_ANSWER)
        self._has_dumped = True
        self._beat_now()
        if self._files:
            self._asked(self._files.say_hanging, otherwise=None)

    def _write_stacks(self) -> str:
        """Writes this rank's stacks. Returns why that failed, or ""."""
        path = stacks_path(self._run_dir, rank=self._world.rank, attempt=self._attempt)
        place = f"rank {self._world.rank} stood for {self._stood:.0f} s in {self._place.words()}"
        try:
            if not self._attempt:  # the run has not begun, so it may not have a folder yet
                self._run_dir.mkdir(parents=True, exist_ok=True)
            write_stacks(path, words=place)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _all_have_dumped(self) -> bool:
        """Returns whether this rank need not wait for other ranks' stacks: a lower rank has written its own and does
        the waiting, or all ranks that are alive have written theirs."""
        for one in self._others():
            has_dumped = one.beat is not None and one.beat.has_dumped
            if has_dumped and one.rank < self._world.rank:
                return True
            if not has_dumped and not is_silent(one, after_seconds=self._silent_seconds):
                return False
        return True

    def _say(self) -> None:
        nobody: tuple[Heard, ...] = ()
        others = self._asked(lambda: tuple(self._others()), otherwise=nobody)
        heard = [*others, Heard(rank=self._world.rank, beat=self._own_beat(), silent_seconds=0.0)]
        message = hang_message(
            sorted(heard, key=lambda one: one.rank),
            num_ranks=self._world.num_ranks,
            silent_after_seconds=self._silent_seconds,
            stacks=str(self._run_dir / FOLDER),
            stacks_fault=self._stacks_fault,
        )
        if disk := self._disk_words():
            message = f"{disk}, so {message}"
        if self._stacks_fault == _NO_ANSWER:
            message += f"\nThe stack of its main thread, the innermost call first:\n{main_stack()}"
        who = f"rank {self._world.rank}: " if self._world.rank else ""
        self._tell(f"error: {who}{message}")
        self._has_said = True
        self._beat_now()

    def _others(self) -> Iterator[Heard]:
        """Yields what is heard from the other ranks. Their files are read one by one, since there may be many."""
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
        """Writes a beat, unless the attempt has not begun: a refused command must leave no files behind."""
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
            self._warn(f"{self._disk_words()}; other ranks do not hear this one")

    def _look_at_writer(self) -> None:
        """Warns of a stopped checkpoint writer when it is seen stopped for the second time in a row. When a suspended
        job continues, its ranks run a moment before their writers."""
        before, self._stopped_pid = self._stopped_pid, self._progress.stopped_writer()
        if not self._stopped_pid or self._stopped_pid != before:
            self._trouble = self._todo = ""
        elif not self._trouble:
            self._trouble = (
                f"the checkpoint writer (process {before} on {socket.gethostname()}) is stopped, as by SIGSTOP, and "
                "writes no checkpoint"
            )
            self._todo = f"`kill -CONT {before}` there continues it"
            self._warn(f"{self._trouble}; {self._todo}")

    def _warn(self, words: str) -> None:
        who = f"rank {self._world.rank}: " if self._world.rank else ""
        self._tell(f"warning: {who}{words}")

    def _tell(self, words: str) -> None:
        self._voice.ask(lambda: say(words, self._stderr), otherwise=None, seconds=_SAY_SECONDS)

    def _disk_words(self) -> str:
        """Returns which disk does not answer, for how long, and in which calls; empty if none is known to be silent."""
        stuck, now = self._stuck_seconds, time.monotonic()
        waits = [(now - since, words) for since, words in self._calls.values() if now - since > self._silent_seconds]
        if not waits and stuck <= self._silent_seconds:
            return ""
        is_ours = stuck > self._silent_seconds
        folder = self._run_dir / BEATS if is_ours else Path(waits[0][1].partition(" of ")[2]).parent
        seconds = max([stuck, *(seconds for seconds, _ in waits)])
        return disk_words(str(folder), seconds, [words for _, words in waits])

    @property
    def _stuck_seconds(self) -> float:
        """How long the disk with the heartbeats has not answered this rank."""
        return self._writer.stuck_seconds if self._writer else 0.0
