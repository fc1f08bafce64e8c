"""`patchline report`: shows what a run did, as text and on an HTML page without scripts. The run may still be running.

`kind_of` decides how each curve is shown: its title, its unit, and the format of its values.
"""

import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from jobs import exit_codes
from jobs.output import WIDTH, fitted, put, refuse_no_page, wrapped, write_page
from jobs.reports.facts import ReportFacts, gather
from jobs.reports.worth import COLUMNS, CORE_DAYS, TABLE_2, ScoreSheet, Worth, read_scores, worth_of
from jobs.settings.runs import ReportJob
from pipeline.runs.curves import Curve
from pipeline.runs.time import PAUSED, WORDS, Restart
from shards.files.local_files import is_finite
from shards.output.quantities import duration, number, percent, plural, share, short_time, size
from shards.output.terminal import command_lines, printable_name
from shards.pages.page import Axis, Frame, labelled, log_ticks, page, shown, svg, ticks

_LOG_RATIO = 50  # a curve is drawn on a log scale if its highest value is more than this many times its lowest
_BAR_WIDTH, _BAR_HEIGHT = 1100, 46
_STEP_TITLES = {
    "time/data_wait": "Step: waiting for data",
    "time/to_device": "Step: copy to the device",
    "time/forward_backward": "Step: forward and backward",
    "time/communication": "Step: communication",
    "time/optimizer": "Step: optimiser",
    "time/checkpoint": "Step: checkpoint stall",
    "time/evaluation": "Step: evaluation",
    "time/other": "Step: other",
    "time/step": "Step: all of it",
    "ranks/data_wait": "Longest of all ranks: waiting for data",
    "ranks/own_step": "Longest of all ranks: step without communication",
    "ranks/own_step_median": "Median of all ranks: step without communication",
    "ranks/checkpoint": "Longest of all ranks: checkpoint stall",
    "memory/resident_bytes": "Resident memory",
    "memory/allocated_peak_bytes": "Memory of tensors, at most",
    "memory/reserved_peak_bytes": "Memory held by the allocator, at most",
}
__all__ = ["ReportJob", "run"]
log = logging.getLogger(__name__)
_NAME, _MOST_CONFUSIONS = "report.html", 5
_MOST_RESTARTS, _MOST_CAUSES = 5, 8  # the most that the text shows


def run(job: ReportJob) -> int:
    """Writes the page, prints the summary, and returns 0."""
    run_dir = Path(job.run)
    out = Path(job.out) if job.out else run_dir / _NAME
    if job.out:
        refuse_no_page(out, name=_NAME)
    facts = gather(run_dir)
    worth = worth_of(run_dir, running_seconds=facts.time.running_seconds, curves=facts.curves)
    scores = read_scores(run_dir)
    page = render(facts, worth, scores)
    write_page(out, page)
    put(summary(facts, scores))
    log.info("%s: %s, opens in any browser", out, size(len(page)))
    return exit_codes.DONE


def summary(
    facts: ReportFacts,
    scores: ScoreSheet = ScoreSheet(),  # noqa: B008 - it is frozen
) -> str:
    """Returns the report as text with lines of at most 80 columns, but for long words of a command. It begins with the
    run's state and what the model confuses."""
    lines = [*_outcome(facts), *_confusions(scores)]
    first = "".join(f"{part}\n" for line in lines for part in _fit(line))
    if words := confusions_command(facts, scores):
        first += "".join(f"{line}\n" for line in command_lines("no confusions yet: ", words, columns=WIDTH))
    lines = _time(facts)
    lines += _restart_lines(facts.time.restarts)
    for finding in facts.findings[:10]:
        lines.append(f"guard: step {finding['step']:,}: {finding['kind'].replace('_', ' ')}, {finding['action']}")
    lines += [f"guard: {len(facts.findings) - 10:,} more"] if len(facts.findings) > 10 else []
    if facts.quarantine.num_lines:
        bad = facts.quarantine
        reason = f", {bad.reasons[0][0]}" if bad.reasons else ""
        lines.append(f"quarantine: {plural(bad.num_samples or bad.num_lines, 'sample')}{reason}")
    lines += [f"data: {name} {value}" for name, value in facts.data if name == "fingerprint"]
    lines += [f"note: {note}" for note in facts.notes]
    return first + "".join(f"{part}\n" for line in lines for part in _fit(line))


def by_cause(restarts: Sequence[Restart]) -> list[tuple[str, list[Restart]]]:
    """Returns each kind of cause with its restarts, beginning with the kind that cost the most time."""
    found: dict[str, list[Restart]] = {}
    for one in restarts:
        found.setdefault(one.cause.kind, []).append(one)
    return sorted(found.items(), key=lambda item: -sum(one.lost_seconds + one.startup_seconds for one in item[1]))


def _restart_lines(restarts: Sequence[Restart]) -> list[str]:
    """Returns lines about the last `_MOST_RESTARTS` restarts. If there are more restarts, their total cost and the cost
    of each cause come first."""
    lines = []
    if len(restarts) > _MOST_RESTARTS:
        causes = by_cause(restarts)
        lines.append(f"{plural(len(restarts), 'restart')}: {_cost_of(restarts)}")
        lines += [f"    {len(own):,} x {kind}: {_cost_of(own)}" for kind, own in causes[:_MOST_CAUSES]]
        rest = [one for _, own in causes[_MOST_CAUSES:] for one in own]
        lines += [f"    {len(rest):,} x other causes: {_cost_of(rest)}"] if rest else []
    for one in restarts[-_MOST_RESTARTS:]:
        origin = "scratch" if one.step is None else f"step {one.step:,}"
        lines.append(f"restart {one.attempt.partition('-')[0]} from {origin}: {one.cause.words}")
        lines.append(f"    {_cost_of([one])}")
        lines += [f"    topology {one.topology}"] if one.topology else []
    return lines


def _cost_of(restarts: Sequence[Restart]) -> str:
    """Returns what restarts cost, such as `cost 12 s, 3 steps lost, start-up 4 s`, or how long a pause was."""
    startup = f"start-up {duration(sum(one.startup_seconds for one in restarts))}"
    if all(one.cause.is_pause for one in restarts):
        return f"paused {duration(sum(one.seconds for one in restarts))}, {startup}"
    lost = [one.lost_steps for one in restarts if one.lost_steps is not None]
    steps = f", {plural(sum(lost), 'step')} lost" if lost else ""
    return f"cost {duration(sum(one.lost_seconds for one in restarts))}{steps}, {startup}"


def _outcome(facts: ReportFacts) -> list[str]:
    """Returns lines on the run's state, its steps and speed, and its loss and accuracy."""
    found, loss, accuracy = facts.run, facts.curves.named("loss"), facts.curves.named("test_accuracy")
    step = f"{found.step or 0:,}" + (f"/{facts.num_steps:,}" if facts.num_steps else "")
    parts = [f"step {step}"]
    took = duration(facts.time.running_seconds)
    parts += [f"{plural(facts.num_images, 'image')} in {took}"] if facts.num_images else []
    rate = found.images_per_second
    parts += [f"{rate:,.0f} images/s"] if rate is not None and math.isfinite(rate) else []
    lines = [f"{facts.name}: {facts.stage} of {facts.recipe.words()}, {found.state}"]
    lines += [facts.last_try] if facts.last_try else []
    lines.append(", ".join(parts))
    if found.loss is not None:
        at, least = loss.extreme(most=False) if loss else (0, found.loss)
        lines.append(f"loss {found.loss:.4g}" + (f", least {least:.4g} at step {at:,}" if loss else ""))
    if found.accuracy is not None:
        at, best = accuracy.extreme(most=True) if accuracy else (0, found.accuracy)
        words = " ".join(filter(None, (f"accuracy {found.accuracy:.3f}", facts.scored_on)))
        lines.append(words + (f", best {best:.3f} at step {at:,}" if accuracy else ""))
    return lines


def _confusions(scores: ScoreSheet) -> list[str]:
    """Returns lines with the most frequent confusions of an evaluation; no lines if there was no evaluation."""
    if not scores.classes or not scores.scores:
        return []
    found = scores.classes.confusions()
    whose = f"of {scores.weights} " if scores.weights else ""
    head = f"confusions {whose}on {scores.dataset}, accuracy {scores.scores.accuracy:.4f}"
    if not found:
        return [f"{head}: none"]
    rows = [(fitted(label, 24), fitted(said, 24), count, part) for label, said, count, part in found[:_MOST_CONFUSIONS]]
    label_width, said_width = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return [head] + [
        f"    {label:{label_width}} taken for {said:{said_width}}{plural(count, 'image'):>14}{share(part):>9}"
        for label, said, count, part in rows
    ]


def _fit(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    return [f"{indent}{part}" for part in wrapped(line.lstrip(), WIDTH - len(indent))]


def _time(facts: ReportFacts) -> list[str]:
    """Returns lines on where the time went. The shares are of the running time, so a pause has none."""
    wall, running = facts.time.wall_seconds, facts.time.running_seconds
    if not wall:
        return []
    lines = [f"wall time {duration(wall)}"]
    for name, seconds in facts.time.parts.items():
        part = "" if name == PAUSED else f"{seconds / max(running, 1e-9):>8.1%}"
        lines += [f"    {WORDS[name]:32}{duration(seconds):>14}{part}"] if seconds >= 0.0005 * wall else []
    return [*lines, f"ranks: {facts.run.ranks}"] if facts.run.ranks else lines


def render(facts: ReportFacts, worth: Worth, scores: ScoreSheet) -> bytes:
    """Returns the page in UTF-8. Equal facts give equal bytes."""
    marks = sorted({one.step for one in facts.time.restarts if one.step})
    running = {name: seconds for name, seconds in facts.time.parts.items() if name != PAUSED}
    values = {
        "facts": facts,
        "worth": worth,
        "scores": scores,
        "columns": COLUMNS,
        "table_2": TABLE_2,
        "core_days": CORE_DAYS,
        "bar": time_bar(running, WORDS),
        "running": running,
        "paused_seconds": facts.time.parts[PAUSED],
        "words": WORDS,
        "curves": shown_curves(facts.curves.curves, marks=marks, is_cost=False),
        "costs": shown_curves(facts.curves.curves, marks=marks, is_cost=True),
        "num_marks": len(marks),
        "causes": by_cause(facts.time.restarts),
        "value_words": value_words,
        "confusions_command": printable_name(shlex.join(confusions_command(facts, scores))),
        "loss": facts.curves.named("loss"),
        "accuracy": facts.curves.named("test_accuracy"),
    }
    return page("jobs.reports", "report.html.j2", values)


def confusions_command(facts: ReportFacts, scores: ScoreSheet) -> list[str]:
    """Returns the words of the command that finds the confusions of a completed classifier, on the dataset that its
    accuracy is of. Empty if they are known, or if the run is not a completed classifier."""
    is_open = facts.run.state == "done" and facts.run.accuracy is not None and not scores.scores and not scores.reasons
    return ["patchline", "evaluate", facts.path, "--data.url", facts.evaluation_url or "URL"] if is_open else []


def value_words(value: object) -> str:
    """Returns a value from a file as text. It should be a number, but a damaged file may contain anything."""
    return number(value) if is_finite(value) else shown(str(value)[:40], 16)  # type: ignore[arg-type]


def time_bar(parts: Mapping[str, float], words: Mapping[str, str]) -> Markup:
    """Draws a bar of `parts`, which are seconds by name. `words` describes each part. The CSS classes are part-0,
    part-1 and so on, in the order of `parts`."""
    total = sum(parts.values()) or 1.0
    body, at = [], 0.0
    for place, seconds in enumerate(parts.values()):
        width = seconds / total * _BAR_WIDTH
        if width:
            body.append(f'<rect class="part-{place}" x="{at:.2f}" y="0" width="{width:.2f}" height="{_BAR_HEIGHT}"/>')
        at += width
    told = ", ".join(f"{words[name]} {share(seconds, total)}" for name, seconds in parts.items() if seconds)
    return svg(f"Where the time went: {told}.", _BAR_WIDTH, _BAR_HEIGHT, body, is_flat=True)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a curve is shown. `unit`: the name of its axis. `text`: a function that formats a value. `is_cost`: whether
    the curve shows what a step costs instead of the quality of the model. `may_be_log`: whether to use a log scale if
    the values span a wide range. A schedule keeps a linear scale, on which its shape is recognised."""

    title: str
    unit: str
    text: Callable[[float], str] = number
    is_cost: bool = False
    may_be_log: bool = True


@dataclass(frozen=True, kw_only=True)
class ShownCurve:
    """A curve on the page, with the words below it."""

    title: str
    plot: Markup
    words: str
    samples: tuple[tuple[int, str], ...]


_KINDS = {
    "loss": Kind(title="Training loss", unit="loss"),
    "test_accuracy": Kind(title="Accuracy on the held-out dataset", unit="accuracy", text=percent),
    "test_loss": Kind(title="Loss on the held-out dataset", unit="loss"),
    "learning_rate": Kind(title="Learning rate", unit="learning rate", may_be_log=False),
    "grad_norm": Kind(title="Gradient norm", unit="norm"),
    "images_per_second": Kind(title="Throughput", unit="images/s"),
    "data_wait_share": Kind(title="Waiting for data", unit="share of the step", text=percent, is_cost=True),
    "perf/mfu": Kind(title="Model FLOP utilisation", unit="share of the data sheet's peak", text=percent),
    "perf/mfu_of_measured_peak": Kind(
        title="Model FLOP utilisation, measured", unit="share of the measured peak", text=percent
    ),
}


def kind_of(name: str) -> Kind:
    """Returns how a curve of this name is shown."""
    if name in _KINDS:
        return _KINDS[name]
    group, _, rest = name.partition("/")
    if group == "eval":
        dataset, _, score = rest.rpartition("/")
        averaged = " of the averaged weights" if score.startswith("ema_") else ""
        return Kind(title=f"Accuracy on {dataset}{averaged}", unit="accuracy", text=percent)
    if group == "fewshot":
        return Kind(title=f"{rest.removesuffix('_shots')}-shot accuracy", unit="accuracy", text=percent)
    title = _STEP_TITLES.get(name, name)
    if group in ("time", "ranks"):
        return Kind(title=title, unit="time per step", text=short_time, is_cost=True)
    if name.startswith("memory/") and name.endswith("bytes"):
        return Kind(title=title, unit="bytes", text=size, is_cost=True)
    return Kind(title=title, unit=name, is_cost=True)


def shown_curves(curves: Sequence[Curve], *, marks: Sequence[int], is_cost: bool) -> list[ShownCurve]:
    """Returns the curves of one section, in order. Costs that are always zero are left out."""
    found = [(one, kind_of(one.name)) for one in curves]
    return [
        _shown(one, kind, marks=marks)
        for one, kind in found
        if kind.is_cost == is_cost and not (is_cost and not any(one.values))
    ]


def _shown(curve: Curve, kind: Kind, *, marks: Sequence[int]) -> ShownCurve:
    if len(curve.values) == 1:  # a plot would show only a dot
        words = f"{kind.text(curve.values[0])} at step {curve.steps[0]:,}"
        return ShownCurve(title=kind.title, plot=Markup(), words=words, samples=())
    (least_at, least), (most_at, most) = curve.extreme(most=False), curve.extreme(most=True)
    words = f"Least {kind.text(least)} at step {least_at:,}, most {kind.text(most)} at step {most_at:,}"
    not_finite = f"; {curve.num_not_finite:,} not finite" if curve.num_not_finite else ""
    return ShownCurve(
        title=kind.title,
        plot=curve_plot(curve, kind, marks=marks),
        words=f"{words}{not_finite}.",
        samples=tuple((step, kind.text(value)) for step, value in curve.samples()),
    )


def curve_plot(curve: Curve, kind: Kind, *, marks: Sequence[int] = ()) -> Markup:
    """Draws the curve over the steps, with a dashed line at each step of `marks`."""
    first, last = curve.steps[0], curve.steps[-1]
    low, high = curve.extreme(most=False)[1], curve.extreme(most=True)[1]
    is_log = kind.may_be_log and low > 0 and high / low > _LOG_RATIO
    values = labelled(log_ticks(low, high) if is_log else ticks(low, high), kind.text)
    values = [(value, label.replace(".0 ", " ")) for value, label in values]  # 460.0 MB is too wide for a phone
    frame = Frame(
        x=Axis(name="step", low=first, high=last, ticks=labelled(ticks(first, last, is_whole=True))),
        y=Axis(name=kind.unit, low=low, high=high, ticks=values, is_log=is_log, margin=0.05),
    )
    drawn = [frame.mark(at) for at in marks if first < at < last]
    points = curve.envelope()
    drawn.append(frame.dot(*points[0], "bar", radius=3) if len(points) == 1 else frame.line(points, "curve thin"))
    about = (
        f"{curve.name} over steps {first:,} to {last:,}: from {kind.text(curve.values[0])} to "
        f"{kind.text(curve.values[-1])}, least {kind.text(low)}, most {kind.text(high)}."
    )
    return frame.svg(about, drawn)
