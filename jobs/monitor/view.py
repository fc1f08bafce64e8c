"""What `patchline watch` shows of a run: read from the ends of its files, and drawn as lines for a terminal."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.cluster.queue_reasons import QueueFinding
from jobs.monitor.logs import shown
from jobs.monitor.run_logs import newest_log
from jobs.monitor.status import Status, state_of
from jobs.output import fitted, wrapped
from jobs.reports.ls import Run, run_at
from pipeline.runs.facts import LEDGER, METRICS
from shards.errors import InvalidDataError
from shards.files.local_files import is_finite, is_step, object_in, read_tail
from shards.output.quantities import clock
from shards.output.terminal import printable_name

if TYPE_CHECKING:
    from rich.text import Text

FINDINGS = "guard.jsonl"  # as in guard.py
_TAIL_BYTES, _LOG_BYTES = 1 << 16, 1 << 14
_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"running": "green", "done": "green", "failed": "red"}  # the others are yellow
_SHARES = (("perf/mfu", "MFU"), ("perf/mfu_of_measured_peak", "of measured peak"))
_LATE_SECONDS = 60.0
_MOST_LOG = 200


@dataclass(frozen=True, kw_only=True)
class View:
    """A run at a moment. Empty or None: not known.

    `losses`: of the last lines of metrics, oldest first. `of_peak`: such as `41% MFU`. `saved`: the step of the last
    checkpoint. `alarm`: the guard's last finding. `status`: what Slurm said `status_age` seconds ago; without an answer
    `complaint` says why. `log`: its last lines, oldest first.
    """

    run: Run
    now: float
    losses: tuple[float, ...] = ()
    of_peak: str = ""
    seconds_left: float | None = None
    saved: int | None = None
    alarm: str = ""
    status: Status | None = None
    status_age: float = 0.0
    complaint: str = ""
    log_name: str = ""
    log: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """The run's state, as its jobs make it."""
        return state_of(self.run, self.status or Status(jobs=(), findings=(), complaint=self.complaint))


def view_of(
    run_dir: Path,
    *,
    root: Path | None = None,
    status: Status | None = None,
    status_age: float = 0.0,
    complaint: str = "",
) -> View | None:
    """The run as it is now; None if it is no run. Files that vanish or are damaged leave gaps. `root`: the folder of
    its chain, to which its name is relative."""
    now = time.time()
    run = run_at(root if root and run_dir.is_relative_to(root) else run_dir, run_dir, now)
    if run is None:
        return None
    lines = _lines(run_dir / METRICS)
    last = lines[-1] if lines else {}
    losses = [line["loss"] for line in lines if is_finite(line.get("loss"))]
    shares = [(last[key], words) for key, words in _SHARES if is_finite(last.get(key))]
    saved = [int(line["step"]) for line in _lines(run_dir / LEDGER)]
    path = newest_log(run_dir, status.jobs if status else ())
    return View(
        run=run,
        now=now,
        losses=tuple(losses),
        of_peak=f"{shares[0][0]:.0%} {shares[0][1]}" if shares else "",
        seconds_left=_seconds_left(run, last.get("step_seconds")),
        saved=saved[-1] if saved else None,
        alarm=_alarm(run_dir),
        status=status,
        status_age=status_age,
        complaint=complaint,
        log_name=path.name if path else "",
        log=_log(path),
    )


def _lines(path: Path) -> list[dict[str, float]]:
    """The usable lines at the end of a file, each with a step."""
    try:
        tail = read_tail(path, most_bytes=_TAIL_BYTES)
    except (OSError, InvalidDataError):
        return []
    found = [object_in(line) for line in tail.data.split(b"\n")] if tail else []
    return [line for line in found if line and is_step(line.get("step"))]


def _alarm(run_dir: Path) -> str:
    lines = _lines(run_dir / FINDINGS)
    if not lines:
        return ""
    kind, action = (str(lines[-1].get(key, "?"))[:40].replace("_", " ") for key in ("kind", "action"))
    return f"guard: step {lines[-1]['step']:,}: {kind}; it did: {action}"


def _seconds_left(run: Run, step_seconds: object) -> float | None:
    step = run.facts.step
    if run.facts.state != "running" or run.num_steps is None or step is None or not is_finite(step_seconds):
        return None
    return max(0.0, (run.num_steps - step) * float(step_seconds))  # type: ignore[arg-type]


def _log(path: Path | None) -> tuple[str, ...]:
    try:
        tail = read_tail(path, most_bytes=_LOG_BYTES) if path else None
    except (OSError, InvalidDataError):
        return ()
    lines = tail.data.rstrip(b"\n").split(b"\n")[-_MOST_LOG:] if tail and tail.data.strip() else []
    return tuple(shown(line) for line in lines)


def drawn(view: View, *, columns: int, rows: int) -> "list[Text]":
    """Draws at most `rows` lines of at most `columns` cells: the run, its jobs, and the end of its log in what is
    left."""
    lines = [*_head(view, columns), *_slurm(view, columns)][: max(1, rows - 2)]
    room = rows - len(lines) - 3
    if room > 0 and view.log:
        lines += [_text(""), _text(f"log: {view.log_name}", "bold")]
        lines += [_text(fitted(line, columns)) for line in view.log[-room:]]
    lines += [_text("")] * (rows - 1 - len(lines))
    lines.append(_text("q or Ctrl-C leaves; the run goes on", "dim"))
    for line in lines:
        line.truncate(columns, overflow="ellipsis")
    return lines


def drawn_chain(
    above: Sequence[str], view: View | None, *, columns: int, rows: int, complaint: str = ""
) -> "list[Text]":
    """A chain's table above the run that runs now, or alone. A complaint that no run shows is below the table."""
    lines = [_text(line, "" if line[:1] == " " else "bold") for line in above]
    if view:
        lines += [_text(""), *drawn(view, columns=columns, rows=max(2, rows - len(lines) - 1))]
    else:
        lines += [_text(part, "yellow") for part in wrapped(complaint, columns, most_lines=2)] if complaint else []
        lines += [_text("")] * (rows - 1 - len(lines)) + [_text("q or Ctrl-C leaves; the chain goes on", "dim")]
    for line in lines:
        line.truncate(columns, overflow="ellipsis")
    return lines[:rows]


def _head(view: View, columns: int) -> "list[Text]":
    run, facts = view.run, view.run.facts
    name = f"{printable_name(run.path)}  {printable_name(run.recipe.words()) if run.recipe else ''}"
    clock_now = time.strftime("%H:%M:%S", time.localtime(view.now))
    state = view.state
    first = _text(fitted(name, max(1, columns - len(state) - len(clock_now) - 4)), "bold")
    first.append(f"  {state}", style=_COLOURS.get(state, "yellow"))
    first.append(clock_now.rjust(max(1, columns - first.cell_len)))
    numbers = [
        *facts.readings(),
        view.of_peak,
        "" if facts.goodput is None else f"goodput {facts.goodput:.0%}",
        "" if view.saved is None else f"saved step {view.saved:,}",
    ]
    seen = "" if facts.last_seen is None else f"last sign of life {clock(max(0.0, view.now - facts.last_seen))} ago"
    told = wrapped("   ".join(word for word in numbers if word), columns, most_lines=2)
    lines = [first, _progress(view, columns), *(_text(part) for part in told)]
    if len(view.losses) > 1:
        bars = sparkline(view.losses[-max(1, columns - 6) :])
        lines.append(_text("loss  ").append(bars, style="cyan"))
    if seen:
        is_late = facts.state == "running" and view.now - (facts.last_seen or 0) > _LATE_SECONDS
        lines.append(_text(seen, "red" if is_late else "dim"))
    if facts.ranks:
        lines += [_text(part) for part in wrapped(f"ranks: {printable_name(facts.ranks)}", columns, most_lines=2)]
    lines += [_text(fitted(view.alarm, columns), "yellow")] if view.alarm else []
    for reason in run.reasons:
        lines += [_text(part, "red") for part in wrapped(reason, columns, most_lines=2)]
    return lines


def _progress(view: View, columns: int) -> "Text":
    step, most = view.run.facts.step or 0, view.run.num_steps
    if not most:
        return _text("no step yet" if view.run.facts.step is None else f"step {step:,}")
    share = min(1.0, step / most)
    left = "" if view.seconds_left is None else f"  {clock(view.seconds_left)} left"
    words = f" step {step:,}/{most:,}  {share:.1%}{left}"
    room = max(0, columns - len(words))
    done = round(share * room)
    return _text("━" * done, "green").append("━" * (room - done), style="dim").append(fitted(words, columns))


def sparkline(values: Sequence[float]) -> str:
    """A bar of eighths for each value, the lowest value the lowest bar."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low and math.isfinite(high - low) else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _slurm(view: View, columns: int) -> "list[Text]":
    lines = [_text("")]
    if view.complaint:
        lines += [_text(part, "yellow") for part in wrapped(view.complaint, columns, most_lines=2)]
    if view.status is None:
        return lines if view.complaint else []
    age = f", {clock(view.status_age)} ago" if view.status_age > _LATE_SECONDS else ""
    lines.append(_text(f"Slurm{age}", "bold"))
    if not view.status.findings:
        lines.append(_text("no job of this run waits or runs", "dim"))
    for finding in view.status.findings:
        lines += _of_finding(finding, columns)
    return lines


def _of_finding(finding: QueueFinding, columns: int) -> "list[Text]":
    lines = [_text(part) for part in wrapped(finding.words, columns, most_lines=2)]
    if finding.todo:
        lines += [_text(part, "yellow") for part in wrapped(f"> {finding.todo}", columns, most_lines=2)]
    return lines


def _text(words: str, style: str = "") -> "Text":
    from rich.text import Text  # noqa: PLC0415 - not needed for help

    return Text(words, style=style, no_wrap=True, overflow="crop")
