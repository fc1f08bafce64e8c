"""`patchline report`: what a run did, in a few lines and as one HTML page. It reads a run, also one that is running."""

import logging
import math
from pathlib import Path

from jobs import exit_codes
from jobs.output import WIDTH, fitted, put, refuse_no_page, wrapped, write_page
from jobs.reports.facts import ReportFacts, gather
from jobs.reports.report_page import lacks_confusions, render
from jobs.reports.scores import NO_SCORES, ScoreSheet, read_scores
from jobs.reports.worth import worth_of
from jobs.settings.models import ReportJob
from pipeline.runs.time import WORDS
from shards.output.quantities import duration, plural, share, size

__all__ = ["ReportJob", "run"]

log = logging.getLogger(__name__)
_NAME, _MOST_CONFUSIONS = "report.html", 5


def run(job: ReportJob) -> int:
    """Writes the page, prints the summary; returns 0."""
    run_dir = Path(job.run)
    out = Path(job.out) if job.out else run_dir / _NAME
    if job.out:
        refuse_no_page(out, name=_NAME)
    facts = gather(run_dir)
    worth = worth_of(run_dir, wall_seconds=facts.time.wall_seconds)
    scores = read_scores(run_dir)
    page = render(facts, worth, scores)
    write_page(out, page)
    put(summary(facts, scores))
    log.info("%s: %s, opens in any browser", out, size(len(page)))
    return exit_codes.DONE


def summary(facts: ReportFacts, scores: ScoreSheet = NO_SCORES) -> str:
    """The report in lines of at most 80 columns: first the outcome and what the model confuses."""
    lacks = lacks_confusions(facts, scores)
    lines = [*_outcome(facts), *_confusions(scores), *([lacks] if lacks else []), *_time(facts)]
    for one in facts.time.restarts:
        origin = "scratch" if one.step is None else f"step {one.step:,}"
        lines.append(f"restart {one.attempt.partition('-')[0]} from {origin}: {one.cause}")
        lost = "" if one.lost_steps is None else f", {plural(one.lost_steps, 'step')} lost"
        lines.append(f"    cost {duration(one.seconds)}{lost}, start-up {duration(one.startup_seconds)}")
        lines += [f"    topology {one.topology}"] if one.topology else []
    for finding in facts.findings[:10]:
        lines.append(f"guard: step {finding['step']:,}: {finding['kind'].replace('_', ' ')}, {finding['action']}")
    lines += [f"guard: {len(facts.findings) - 10:,} more"] if len(facts.findings) > 10 else []
    if facts.quarantine.num_lines:
        bad = facts.quarantine
        reason = f", {bad.reasons[0][0]}" if bad.reasons else ""
        lines.append(f"quarantine: {plural(bad.num_samples or bad.num_lines, 'sample')}{reason}")
    lines += [f"data: {name} {value}" for name, value in facts.data if name == "fingerprint"]
    lines += [f"note: {note}" for note in facts.notes]
    return "".join(f"{part}\n" for line in lines for part in _fit(line))


def _outcome(facts: ReportFacts) -> list[str]:
    """How the run ended, how far it came, and how good it is."""
    found, loss, accuracy = facts.run, facts.curves.named("loss"), facts.curves.named("test_accuracy")
    step = f"{found.step or 0:,}" + (f"/{facts.num_steps:,}" if facts.num_steps else "")
    parts = [f"step {step}"]
    parts += [f"{plural(facts.num_images, 'image')} in {duration(facts.time.wall_seconds)}"] if facts.num_images else []
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
    """The most frequent confusions of an evaluation; nothing without one."""
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
    wall = facts.time.wall_seconds
    if not wall:
        return []
    parts = [(name, seconds) for name, seconds in facts.time.parts.items() if seconds >= 0.0005 * wall]
    lines = [f"wall time {duration(wall)}"] + [
        f"    {WORDS[name]:32}{duration(seconds):>14}{seconds / wall:>8.1%}" for name, seconds in parts
    ]
    return [*lines, f"ranks: {facts.run.ranks}"] if facts.run.ranks else lines
