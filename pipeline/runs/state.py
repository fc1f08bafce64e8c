"""The state of a run, from what is in its folder. Pure.

    done            the DONE marker is that of the recorded number of steps
    running         the process of its first rank is there, or wrote a heartbeat a moment ago, and has not ended
    stopped         it ended with a checkpoint of its last step: the same command continues
    failed          it ended otherwise, hangs, or has had no heartbeat for longer than a running one has
    never started   nothing but its record is there

Rank 0 writes what a reader needs, and a run lives no longer than any of its ranks. On the host of rank 0, its process
decides; elsewhere only what it writes.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.training.watchdog.rank_progress import Phase, Place
from shards.output.quantities import duration

State = Literal["running", "done", "stopped", "failed", "never started"]
STATES: tuple[State, ...] = ("running", "done", "stopped", "failed", "never started")
SILENT_SECONDS = 60.0  # heartbeats come every 15 s at the longest
GONE_SECONDS = 20.0  # for a process that is not on this host any more
QUIET_SECONDS = 300.0  # between two lines of metrics, for a run without heartbeats
_FIRST_BEAT_SECONDS = 30.0  # after a start; it comes after 15 s at the latest


@dataclass(frozen=True, kw_only=True)
class LastBeat:
    """What the file of rank 0 says, and its age in seconds. `is_gone`: its host is this one, which has no process of
    this number. `is_hanging`: a rank of its attempt told that one hangs. `asked_by`, `error`, `trouble`: as in the
    file."""

    place: Place
    age_seconds: float
    is_gone: bool = False
    is_hanging: bool = False
    asked_by: str = ""
    error: str = ""
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class LastStart:
    """The last start on record, its age in seconds, and whether the process of its first rank is there; None: that
    cannot be told here."""

    attempt: str
    host: str
    age_seconds: float
    is_there: bool | None


@dataclass(frozen=True, kw_only=True)
class Signs:
    """What is in a run's folder. None: it is missing, or cannot be used.

    `num_steps`: of the job. `done_step`: in the DONE marker. `saved_step`: in the ledger. `told_step`: in the metrics.
    `quiet_seconds`: since the metrics or the ledger were written. `has_attempts`: the run has begun at least once.
    """

    num_steps: int | None = None
    done_step: int | None = None
    saved_step: int | None = None
    told_step: int | None = None
    quiet_seconds: float | None = None
    beat: LastBeat | None = None
    start: LastStart | None = None
    has_attempts: bool = False


def state_of(signs: Signs) -> tuple[State, str]:
    """The state, and what explains it; empty for states that explain themselves."""
    if signs.done_step is not None and (signs.num_steps is None or signs.done_step >= signs.num_steps):
        return "done", ""
    if signs.start and signs.start.is_there is not None:
        return _by_process(signs, is_there=signs.start.is_there)
    if signs.beat and not _began_again(signs, signs.beat):
        return _by_beat(signs, signs.beat)
    has_steps = (signs.told_step, signs.saved_step, signs.done_step) != (None, None, None)
    if not (has_steps or signs.beat or signs.start):
        return ("failed", "ended before its first step was reported") if signs.has_attempts else ("never started", "")
    if signs.quiet_seconds is not None and signs.quiet_seconds < QUIET_SECONDS:
        return "running", _without_a_beat(signs)
    return _ended(signs, signs.told_step)


def _by_process(signs: Signs, *, is_there: bool) -> tuple[State, str]:
    """The state by rank 0's process, on its host. Its heartbeat, if there is one, says how it ended."""
    beat = signs.beat
    if beat and beat.is_hanging:
        return _by_beat(signs, beat)
    if beat and beat.place.phase is Phase.ENDED:
        return _ended(signs, beat.place.step)
    if not is_there:
        if not beat and _ended(signs, signs.told_step)[0] == "stopped":
            return "stopped", ""  # a run without heartbeats
        where = f"last in {beat.place.words()}" if beat else "before its first heartbeat"
        return "failed", f"its process is gone, {where}; {_standing(signs)}"
    if beat and beat.age_seconds > SILENT_SECONDS:
        return "running", f"no heartbeat for {duration(beat.age_seconds)}: its process is there, perhaps suspended"
    return "running", ""


def _without_a_beat(signs: Signs) -> str:
    """What is known of a start on another host that has none."""
    start = signs.start
    if start is None or start.age_seconds < _FIRST_BEAT_SECONDS:
        return ""
    where = f" on {start.host}" if start.host else ""
    return f"started{where} {duration(start.age_seconds)} ago, without a heartbeat; last seen as shown"


def _began_again(signs: Signs, beat: LastBeat) -> bool:
    """Whether the heartbeat is that of an earlier start: the first of a start comes seconds after its first steps."""
    is_over = beat.place.phase is Phase.ENDED or beat.age_seconds > SILENT_SECONDS
    return (
        is_over and signs.quiet_seconds is not None and signs.quiet_seconds < min(SILENT_SECONDS, beat.age_seconds - 2)
    )


def _by_beat(signs: Signs, beat: LastBeat) -> tuple[State, str]:
    if beat.place.phase is Phase.ENDED:
        return _ended(signs, beat.place.step)
    if beat.is_hanging:
        return "failed", f"hung in {beat.place.words()}; the stacks are in stacks/"
    if beat.age_seconds > (GONE_SECONDS if beat.is_gone else SILENT_SECONDS):
        why = "its process is gone" if beat.is_gone else f"no heartbeat for {duration(beat.age_seconds)}"
        return "failed", f"{why}, last in {beat.place.words()}; {_standing(signs)}"
    return "running", ""


def _ended(signs: Signs, last_step: int | None) -> tuple[State, str]:
    """The state of a run that ended by itself. A stop saves the step that it ends with."""
    if signs.saved_step is not None and last_step is not None and signs.saved_step >= last_step > 0:
        return "stopped", ""
    where = f"in step {last_step:,}" if last_step else "before its first step"
    error = f": {signs.beat.error}" if signs.beat and signs.beat.error else ""
    return "failed", f"ended {where}; {_standing(signs)}{error}"


def _standing(signs: Signs) -> str:
    return "nothing is saved" if signs.saved_step is None else f"step {signs.saved_step:,} is saved"
