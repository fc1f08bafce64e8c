"""`patchline report`: what a run did, in a few lines and as one HTML page. It reads a run, also one that is running."""

import logging
from pathlib import Path

from jobs import exit_codes
from jobs.out_file import refuse_no_page, write_page
from jobs.output import WIDTH, put, wrapped
from jobs.reports.facts import ReportFacts, gather
from jobs.reports.report_page import render
from jobs.reports.scores import read_scores
from jobs.reports.worth import worth_of
from jobs.settings.models import ReportJob
from pipeline.runs.time import WORDS
from shards.output.quantities import duration, plural, size

__all__ = ["ReportJob", "run"]

log = logging.getLogger(__name__)
_NAME = "report.html"


def run(job: ReportJob) -> int:
    """Writes the page, prints the summary; returns 0."""
    run_dir = Path(job.run)
    out = Path(job.out) if job.out else run_dir / _NAME
    if job.out:
        refuse_no_page(out, name=_NAME)
    facts = gather(run_dir)
    worth = worth_of(run_dir, wall_seconds=facts.time.wall_seconds)
    page = render(facts, worth, read_scores(run_dir))
    write_page(out, page)
    put(summary(facts))
    log.info("%s: %s, opens in any browser", out, size(len(page)))
    return exit_codes.DONE


def summary(facts: ReportFacts) -> str:
    """The report in lines of at most 80 columns."""
    found = facts.run
    step = f"{found.step or 0:,}" + (f"/{facts.num_steps:,}" if facts.num_steps else "")
    lines = [
        f"{facts.name}: {facts.stage} of {facts.recipe.words()}, {found.state}",
        ", ".join([f"step {step}", *found.readings()]),
    ]
    lines += _time(facts)
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


def _fit(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    return [f"{indent}{part}" for part in wrapped(line.lstrip(), WIDTH - len(indent))]


def _time(facts: ReportFacts) -> list[str]:
    wall = facts.time.wall_seconds
    if not wall:
        return []
    parts = [(name, seconds) for name, seconds in facts.time.parts.items() if seconds >= 0.0005 * wall]
    return [f"wall time {duration(wall)}"] + [
        f"    {WORDS[name]:32}{duration(seconds):>14}{seconds / wall:>8.1%}" for name, seconds in parts
    ]
