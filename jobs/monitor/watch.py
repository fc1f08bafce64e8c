"""`patchline watch RUN|CHAIN`: draws a run, its jobs and its log, and updates the screen every two seconds
(`--seconds`) until q or Ctrl-C.

For a chain, it draws the chain's table, and below it the run that is running. Without a terminal, it writes a line
every half minute. Only the ends of a run's files are read. A thread asks Slurm, so that the screen is still updated
while the controller does not answer.
"""

import math
import os
import select
import shlex
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jobs import exit_codes
from jobs.arguments import only_word, take_own_flags
from jobs.chains.state import is_chain
from jobs.chains.status import ChainStatus, lines_of, runs_of, status_of_chain
from jobs.monitor.ask import refuse_no_run
from jobs.monitor.logs import newest_log, shown
from jobs.monitor.status import Status, state_of, status_of
from jobs.output import fitted, put, wrapped
from jobs.reports.ls import Run, run_at
from jobs.stages import usage_of
from pipeline.runs.facts import SILENT_SECONDS
from pipeline.shared_settings import METRICS_FILE
from pipeline.training.reporting.ledger import FILE_NAME as LEDGER
from shards.config_values import Range
from shards.errors import Finding, InvalidDataError, UserError
from shards.files.local_files import is_finite, is_step, object_in, read_tail
from shards.output.quantities import clock
from shards.output.terminal import columns_of, printable_name, unescaped
from shards.pool import Pool

if TYPE_CHECKING:
    from rich.text import Text

FINDINGS = "guard.jsonl"  # the guard's findings
_TAIL_BYTES, _LOG_BYTES = 1 << 16, 1 << 14
_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"running": "green", "done": "green", "failed": "red"}  # other states are yellow
_SHARES = (("perf/mfu", "MFU"), ("perf/mfu_of_measured_peak", "of measured peak"))
_LATE_SECONDS = 60.0  # an answer from Slurm that is older than this is shown with its age
_MOST_LOG = 200
_MOST_RUNS = 256
_RUNNING = "running"
_SLURM_SECONDS, _LINE_SECONDS = 10.0, 30.0
_ANSWER_SECONDS, _POLL_SECONDS = 15.0, 0.1  # without a terminal: the wait for Slurm's first answer


@dataclass(frozen=True, kw_only=True)
class WatchFlags:
    """The flags of the command. `seconds` is the time between two updates of the screen."""

    seconds: Annotated[int, Range(1, 3600)] = 2


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What Slurm and the files said at one moment. `run_dir` is the run to draw (None: no run of the chain is running),
    `status` the run's jobs (None: Slurm was not asked), and `chain` the chain (None: a run is watched)."""

    run_dir: Path | None
    status: Status | None
    chain: ChainStatus | None = None


@dataclass(frozen=True, kw_only=True)
class View:
    """A run at one moment. A value that is not known is empty or None.

    `losses`: the losses in the last lines of the metrics, oldest first. `of_peak`: the GPU utilisation, such as `41%
    MFU`. `saved`: the step of the last checkpoint. `alarm`: the guard's last finding. `status`: what Slurm said
    `status_age` seconds ago. `complaint`: why Slurm does not answer. `log`: the log's last lines, oldest first.
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
        """The run's state, taking its jobs into account."""
        return state_of(self.run, self.status or Status(jobs=(), findings=(), complaint=self.complaint))


def run(words: list[str], *, environ: Mapping[str, str]) -> int:
    """Shows the run or chain until the user leaves or, without a terminal, until it ends. Raises UserError for a folder
    that is neither."""
    flags, others = take_own_flags(WatchFlags, words)
    folder = Path(only_word(others, usage=usage_of("watch")))
    if not is_chain(folder):
        refuse_no_run(folder)
        if view_of(folder) is None:
            command = f"patchline logs {shlex.quote(str(folder))}"
            raise UserError(f"{str(folder)!r} is of a stage that has no steps to watch; `{command}` shows its log")
    asked = Asked(folder, environ)
    try:
        if columns_of(sys.stdout) and sys.stdin.isatty():
            with suppress(KeyboardInterrupt):
                _show(asked, flags.seconds)
        else:
            _tell(asked)
    finally:
        asked.close()
    return exit_codes.DONE


class Asked:
    """The last answer about a run or a chain. A thread renews it."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.is_chain = is_chain(folder)
        has_slurm = shutil.which("scontrol", path=environ.get("PATH")) is not None
        self.answer = Snapshot(run_dir=None if self.is_chain else folder, status=None)
        self.complaint = ""
        self.root = folder.absolute() if self.is_chain else None
        self._folder, self._environ = folder, environ if has_slurm else None
        self._at, self._next = 0.0, 0.0
        self._future: Future[Snapshot] | None = None
        self._asks = has_slurm or self.is_chain
        self._pool = Pool(1, name="watch")

    def renew(self) -> None:
        """Takes the thread's answer if there is a new one, and starts the next query when it is due. Returns at
        once."""
        if self._future and self._future.done():
            try:
                self.answer, self._at = self._future.result(), time.monotonic()
                self.complaint = self.answer.chain.complaint if self.answer.chain else ""
            except UserError as error:
                self.complaint = str(error)
            self._future, self._next = None, time.monotonic() + _SLURM_SECONDS
        if self._asks and not self._future and time.monotonic() >= self._next:
            self._future = self._pool.submit(lambda: answer_of(self._folder, self._environ))

    @property
    def is_open(self) -> bool:
        """Whether there is neither an answer nor an error yet."""
        return self._asks and not self._at and not self.complaint

    @property
    def is_unanswered(self) -> bool:
        """Whether there has been no answer yet, so that a job may be pending or running."""
        return self._asks and not self._at

    @property
    def silence(self) -> str:
        """The reason why there is no newer answer, or an empty string if nothing is wrong."""
        return self.complaint or "Slurm has not answered yet" * self.is_open

    @property
    def age(self) -> float:
        """The seconds since the last answer; 0 if there was none."""
        return time.monotonic() - self._at if self._at else 0.0

    def close(self) -> None:
        """Ends the thread without waiting for an answer."""
        self._pool.close(seconds=0)


def answer_of(folder: Path, environ: Mapping[str, str] | None) -> Snapshot:
    """Returns the snapshot of a run or a chain. If `environ` is None, Slurm is not called. Raises UserError if Slurm
    does not answer about a run, or if the chain cannot be read."""
    if not is_chain(folder):
        return Snapshot(run_dir=folder, status=status_of(folder, environ) if environ is not None else None)
    chain = status_of_chain(folder, environ)
    run_dir, can_ask = run_of(chain), environ is not None and not chain.complaint
    return Snapshot(run_dir=run_dir, status=status_of(run_dir, environ) if run_dir and can_ask else None, chain=chain)


def run_of(chain: ChainStatus) -> Path | None:
    """Returns the chain's run to draw: the running one or, if several are running, the one with the latest sign of
    life. If no run is running, for example between two tries, returns a run of a running step, or None if there is
    none."""
    now, found = time.time(), []
    names = {step.name for step in chain.steps if step.state == _RUNNING}
    for path, unit in list(runs_of(chain.folder).items())[:_MOST_RUNS]:
        run = run_at(path, path, now)
        if run and (run.facts.state == _RUNNING or unit in names):
            found.append((run.facts.state == _RUNNING, run.facts.last_seen or 0.0, path))
    return max(found)[2] if found else None


def _show(asked: Asked, seconds: int) -> None:
    from rich.console import Console, Group  # noqa: PLC0415 - not needed for help
    from rich.live import Live  # noqa: PLC0415

    console = Console(file=unescaped(sys.stdout))
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        until = 0.0
        while True:
            lines = _lines(asked, console.width, console.height)
            if lines:
                live.update(Group(*lines), refresh=True)
            until = time.monotonic() + (0.5 if asked.is_open else seconds)
            while (left := until - time.monotonic()) > 0:
                if select.select([keys], [], [], left)[0] and os.read(keys, 64)[:1] in (b"q", b"Q", b""):
                    return


@contextmanager
def _keys() -> Iterator[int]:
    """Makes standard input deliver each key at once, without echo. Ctrl-C still interrupts."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _tell(asked: Asked) -> None:
    """Writes a line every half minute, for a log. Returns once no job of the run or chain is pending or running."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    while asked.is_open and (asked.is_chain or time.monotonic() < deadline):
        asked.renew()
        time.sleep(_POLL_SECONDS)
    while True:
        view, chain = _view(asked), asked.answer.chain
        silence = f"  ({asked.silence})" if asked.silence else ""
        if chain:
            line = time.strftime("%H:%M:%S  ") + chain_line(chain)
            put(f"{line}{f': {line_of(view, has_time=False)}' if view else ''}{silence}\n")
        elif view:
            put(f"{line_of(view)}{silence}\n")
        if is_over(view, chain, is_unanswered=asked.is_unanswered):
            return
        time.sleep(_LINE_SECONDS)


def is_over(view: View | None, chain: ChainStatus | None, *, is_unanswered: bool) -> bool:
    """Whether no job is pending or running. While there is no answer yet, only a completed run counts as over."""
    if chain:
        return chain.is_over
    state = view.run.facts.state if view else "running"
    if is_unanswered:
        return state == "done"
    return state != "running" and not (view and view.status and view.status.next_job)


def line_of(view: View, *, has_time: bool = True) -> str:
    """Returns the most important facts of a view in one line."""
    facts = view.run.facts
    words = [
        time.strftime("%H:%M:%S", time.localtime(view.now)) if has_time else printable_name(view.run.path),
        view.state,
        f"step {facts.step or 0:,}" + (f"/{view.run.num_steps:,}" if view.run.num_steps else ""),
        "" if facts.loss is None else f"loss {facts.loss:.4g}",
        "" if facts.images_per_second is None else f"{facts.images_per_second:,.0f} images/s",
        "" if view.seconds_left is None else f"{clock(view.seconds_left)} left",
        *(map(printable_name, facts.reasons[:1]) if facts.state == "running" else ()),
        *(finding.found for finding in (view.status.findings[:1] if view.status else ())),
    ]
    return "  ".join(word for word in words if word)


def chain_line(chain: ChainStatus) -> str:
    """Returns the chain's progress in one line."""
    done = sum(step.state == "complete" for step in chain.steps)
    going = [
        f"{step.name} {step.state}" for step in chain.steps if step.state not in ("complete", "waits for its turn")
    ]
    return "  ".join([f"{done}/{len(chain.steps)} steps complete", chain.ending or ", ".join(going[:4])]).rstrip()


def table_lines(chain: ChainStatus, *, columns: int, most: int) -> list[str]:
    """Returns the chain's table in at most `most` lines. If it is longer, complete steps are left out, and then the end
    is cut off."""
    lines = lines_of(chain, columns=columns)
    if len(lines) > most:
        lines = lines_of(chain, columns=columns, is_short=True)
    if len(lines) > most > 0:
        lines = [*lines[: most - 1], f"    ... {len(lines) - most + 1} more lines in `patchline status`"]
    return lines[:most]


def _view(asked: Asked) -> View | None:
    """Returns the view of the run, or None for a chain without a run to draw."""
    asked.renew()
    answer = asked.answer
    if answer.run_dir is None:
        return None
    return view_of(answer.run_dir, root=asked.root, status=answer.status, status_age=asked.age, complaint=asked.silence)


def _lines(asked: Asked, columns: int, rows: int) -> "list[Text]":
    """Returns the lines of the screen. A chain's table takes at most half of the screen if a run is drawn below it."""
    view, chain = _view(asked), asked.answer.chain
    if chain is None:
        return drawn(view, columns=columns, rows=rows) if view else []
    most = rows // 2 if view else rows - 2
    above = table_lines(chain, columns=columns, most=max(1, most))
    return drawn_chain(above, view, columns=columns, rows=rows, complaint=asked.complaint)


def view_of(
    run_dir: Path,
    *,
    root: Path | None = None,
    status: Status | None = None,
    status_age: float = 0.0,
    complaint: str = "",
) -> View | None:
    """Returns the run as it is now; None if the folder is not a run. If files vanish or are damaged, their values are
    left out. If `root`, the chain's folder, is given, the run's name is relative to it."""
    now = time.time()
    run = run_at(root if root and run_dir.is_relative_to(root) else run_dir, run_dir, now)
    if run is None:
        return None
    lines = _usable_lines(run_dir / METRICS_FILE)
    last = lines[-1] if lines else {}
    losses = [line["loss"] for line in lines if is_finite(line.get("loss"))]
    shares = [(last[key], words) for key, words in _SHARES if is_finite(last.get(key))]
    saved = [int(line["step"]) for line in _usable_lines(run_dir / LEDGER)]
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
        log=_log_end(path),
    )


def _usable_lines(path: Path) -> list[dict[str, float]]:
    """Returns the lines at the end of a file that have a step."""
    try:
        tail = read_tail(path, most_bytes=_TAIL_BYTES)
    except (OSError, InvalidDataError):
        return []
    found = [object_in(line) for line in tail.data.split(b"\n")] if tail else []
    return [line for line in found if line and is_step(line.get("step"))]


def _alarm(run_dir: Path) -> str:
    lines = _usable_lines(run_dir / FINDINGS)
    if not lines:
        return ""
    kind, action = (str(lines[-1].get(key, "?"))[:40].replace("_", " ") for key in ("kind", "action"))
    return f"guard: step {lines[-1]['step']:,}: {kind}; it did: {action}"


def _seconds_left(run: Run, step_seconds: object) -> float | None:
    step = run.facts.step
    if run.facts.state != "running" or run.num_steps is None or step is None or not is_finite(step_seconds):
        return None
    return max(0.0, (run.num_steps - step) * float(step_seconds))  # type: ignore[arg-type]


def _log_end(path: Path | None) -> tuple[str, ...]:
    try:
        tail = read_tail(path, most_bytes=_LOG_BYTES) if path else None
    except (OSError, InvalidDataError):
        return ()
    lines = tail.data.rstrip(b"\n").split(b"\n")[-_MOST_LOG:] if tail and tail.data.strip() else []
    return tuple(shown(line) for line in lines)


def drawn(view: View, *, columns: int, rows: int) -> "list[Text]":
    """Draws the run, its jobs and, in the remaining rows, the end of its log: at most `rows` lines of at most `columns`
    cells."""
    lines = [*_head(view, columns), *_slurm(view, columns)][: max(1, rows - 2)]
    room = rows - len(lines) - 3
    if room > 0 and view.log:
        lines += [_text(""), _text(f"log: {view.log_name}", "bold")]
        lines += [_text(fitted(line, columns)) for line in view.log[-room:]]
    lines += [_text("")] * (rows - 1 - len(lines))
    lines.append(_text("q or Ctrl-C leaves; the run continues", "dim"))
    for line in lines:
        line.truncate(columns, overflow="ellipsis")
    return lines


def drawn_chain(
    above: Sequence[str], view: View | None, *, columns: int, rows: int, complaint: str = ""
) -> "list[Text]":
    """Draws a chain's table. Below it, draws the running run or, if there is none, the reason why Slurm does not
    answer."""
    lines = [_text(line, "" if line[:1] == " " else "bold") for line in above]
    if view:
        lines += [_text(""), *drawn(view, columns=columns, rows=max(2, rows - len(lines) - 1))]
    else:
        lines += [_text(part, "yellow") for part in wrapped(complaint, columns, most_lines=2)] if complaint else []
        lines += [_text("")] * (rows - 1 - len(lines)) + [_text("q or Ctrl-C leaves; the chain continues", "dim")]
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
        is_late = facts.state == "running" and view.now - (facts.last_seen or 0) > SILENT_SECONDS
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
    """Returns a bar for each value, in one of eight heights. The lowest value has the lowest bar."""
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


def _of_finding(finding: Finding, columns: int) -> "list[Text]":
    lines = [_text(part) for part in wrapped(finding.found, columns, most_lines=2)]
    if finding.todo:
        lines += [_text(part, "yellow") for part in wrapped(f"> {finding.todo}", columns, most_lines=2)]
    return lines


def _text(words: str, style: str = "") -> "Text":
    from rich.text import Text  # noqa: PLC0415 - not needed for help

    return Text(words, style=style, no_wrap=True, overflow="crop")
