"""Computes where a run's wall time went over all its starts, and what every restart cost. All functions are pure.

Wall time runs from the first start to the last sign of the run. Each line of the ledger has the totals of the run up to
a moment. Three times are in no line: the time of starts that were killed before the run's first save, the time since
the last line, and what the ledger's accounts do not measure. The running time is the wall time without pauses, in which
the run was saved and stopped by its user.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.runs.starts import Cause, Start, cause_of
from pipeline.training.reporting.ledger import ACCOUNTS
from shards.files.local_files import Line

PAUSED = "paused"
WORDS = {
    "compute": "compute",
    "data_wait": "waiting for data",
    "checkpoint": "checkpoint stall",
    "evaluation": "evaluation",
    "startup": "start-up",
    "restarts": "restarts: lost work and waiting",
    "unsaved": "since the last save",
    "other": "other",
    PAUSED: "paused: saved and stopped",
}


@dataclass(frozen=True, kw_only=True)
class Restart:
    """A start after the first, or a rewind. `step`: the step that it continued from (None: from scratch).
    `lost_steps`: the number of steps that were done and lost, according to the metrics (None: unknown). `seconds`:
    the time of lost work and waiting or, if `cause.is_pause`, of the pause. `startup_seconds`: the start-up time of
    the new start, or the part before it was recorded if it saved nothing. `topology`: the change of ranks, ZeRO
    stage and device, or empty."""

    attempt: str
    cause: Cause
    step: int | None
    lost_steps: int | None
    seconds: float
    startup_seconds: float
    topology: str = ""

    @property
    def lost_seconds(self) -> float:
        """The time of lost work and waiting; 0 after a pause."""
        return 0.0 if self.cause.is_pause else self.seconds


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """The wall time of a run. `parts`: seconds by the names of WORDS, which sum to `wall_seconds`. `unix_begin`: when
    the run began, or None if that is unknown."""

    wall_seconds: float
    parts: dict[str, float]
    restarts: tuple[Restart, ...]
    unix_begin: float | None

    @property
    def running_seconds(self) -> float:
        """The wall time without pauses."""
        return self.wall_seconds - self.parts[PAUSED]


def time_of(lines: Sequence[Line], starts: Sequence[Start], *, unix_end: float | None) -> RunTime:
    """Computes a run's time from the ledger's lines and the starts, both in order. `unix_end`: the time of the last
    sign of the run, or now."""
    begins = [one["unix_time"] - _seconds(one, "total") for one in lines[:1]]
    begins += [start.unix_time - start.total_seconds for start in starts[:1]]
    if not begins:
        return RunTime(wall_seconds=0.0, parts=dict.fromkeys(WORDS, 0.0), restarts=(), unix_begin=None)
    begin = min(begins)
    parts: dict[str, float] = {name: _seconds(lines[-1], name) if lines else 0.0 for name in ACCOUNTS}
    told_at = lines[-1]["unix_time"] if lines else begin
    late = [_began(start, lines) for start in starts if start.unix_time > told_at]
    if lines:
        unrecorded = _before_first(lines[0], starts, begin)
        paused = max(0.0, starts[-1].paused_seconds - parts[PAUSED]) if late else 0.0
        parts[PAUSED] += paused
        parts["restarts"] += unrecorded + max(0.0, late[-1] - told_at - paused if late else 0.0)
    else:
        unrecorded = 0.0
        parts["restarts"] += max(0.0, late[-1] - begin) if len(late) > 1 else 0.0
    told = (told_at - begin) - unrecorded - (sum(_seconds(lines[-1], name) for name in ACCOUNTS) if lines else 0.0)
    parts["other"] = max(0.0, told)
    end = max(told_at, unix_end or told_at)
    parts["unsaved"] = max(0.0, end - max([told_at, *late[-1:]]))
    restarts = (*_restarts(lines, starts), *_rewinds(lines)) if starts else (*_unrecorded(lines), *_rewinds(lines))
    return RunTime(
        wall_seconds=sum(parts.values()),
        parts={name: parts[name] for name in WORDS},
        restarts=tuple(sorted(restarts, key=lambda one: one.attempt)),
        unix_begin=begin,
    )


def _before_first(line: Line, starts: Sequence[Start], begin: float) -> float:
    """Returns the time of starts that saved nothing, before the start that wrote the ledger's first line."""
    is_first = sum(start.unix_time <= line["unix_time"] for start in starts) == 1
    return 0.0 if is_first else max(0.0, line["unix_time"] - _seconds(line, "total") - begin)


def _seconds(line: Line, account: str) -> float:
    """Returns an account's seconds in a line of the ledger. `total` is computed as the sum of the accounts."""
    seconds = line["seconds"]
    return float(sum(seconds[name] for name in ACCOUNTS) if account == "total" else seconds[account])


def _before(lines: Sequence[Line], unix_time: float) -> Line | None:
    """Returns the last line that had been written at this time, or None."""
    return next((line for line in reversed(lines) if line["unix_time"] <= unix_time), None)


def _began(start: Start, lines: Sequence[Line]) -> float:
    """Returns the time at which a start began, which is before it was recorded."""
    base = _before(lines, start.unix_time)
    return start.unix_time - max(0.0, start.startup_seconds - (_seconds(base, "startup") if base else 0.0))


def _restarts(lines: Sequence[Line], starts: Sequence[Start]) -> list[Restart]:
    found = []
    for before, start in pairwise(starts):
        base = _before(lines, start.unix_time)
        since = max(base["unix_time"] if base else 0.0, _began(before, lines))
        own = next((line for line in lines if line["attempt"] == start.attempt and "rewind" not in line), None)
        startup = _seconds(own, "startup") if own else start.startup_seconds
        startup -= _seconds(base, "startup") if base else 0.0
        attempts = {line["attempt"] for line in lines if before.unix_time < line["unix_time"] <= start.unix_time}
        last_attempt = start.left.attempt if start.left.attempt in attempts else before.attempt
        now, was = topology_of(start), topology_of(before)
        reached = max(start.left.reached, start.left.step if start.left.attempt == last_attempt else 0)
        found.append(
            Restart(
                attempt=start.attempt,
                cause=cause_of(start.left, resumed_from=start.resumed_from, attempt_before=last_attempt),
                step=start.resumed_from,
                lost_steps=max(0, start.left.reached - (start.resumed_from or 0)) if reached else None,
                seconds=max(0.0, _began(start, lines) - since),
                startup_seconds=max(0.0, startup),
                topology=f"{was} -> {now}" if now != was else "",
            )
        )
    return found


def topology_of(start: Start) -> str:
    """Returns the topology of a start as text, such as `2 ranks, ZeRO-1, cpu`."""
    return f"{start.num_ranks} rank{'s' * (start.num_ranks != 1)}, ZeRO-{start.zero_stage}, {start.device}"


def _rewinds(lines: Sequence[Line]) -> list[Restart]:
    found = []
    for before, line in pairwise(lines):
        rewind = line.get("rewind")
        if isinstance(rewind, dict):
            reached = rewind.get("from")
            found.append(
                Restart(
                    attempt=str(line.get("attempt")),
                    cause=Cause("rewound by the guard", "rewound by the guard"),
                    step=line["step"],
                    lost_steps=max(0, reached - line["step"]) if type(reached) is int else None,
                    seconds=max(0.0, _seconds(line, "restarts") - _seconds(before, "restarts")),
                    startup_seconds=0.0,
                )
            )
    return found


def _unrecorded(lines: Sequence[Line]) -> list[Restart]:
    """Returns the restarts that saved something, for a run whose starts.jsonl is lost."""
    return [
        Restart(
            attempt=str(line.get("attempt")),
            cause=Cause("unknown", "unknown: starts.jsonl is missing"),
            step=None,
            lost_steps=None,
            seconds=max(0.0, _seconds(line, "restarts") - _seconds(before, "restarts")),
            startup_seconds=max(0.0, _seconds(line, "startup") - _seconds(before, "startup")),
        )
        for before, line in pairwise(lines)
        if line.get("attempt") != before.get("attempt") and "rewind" not in line and "rewind" not in before
    ]
