"""`patchline compare RUN...`: accuracy over compute and over data of several runs, as one page and a table.

Figures 3, 4 and 5 of "An Image is Worth 16x16 Words". It reads the runs' own files, and changes nothing.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import exit_codes
from jobs.arguments import take_own_flags
from jobs.output import PAGES, put, refuse_no_page, write_page
from jobs.reports.compare_facts import Point, gather, point_json, told_apart
from jobs.reports.compare_page import render
from jobs.reports.ls import folders_below
from jobs.stages import usage_of
from shards.errors import UserError
from shards.output.quantities import plural
from shards.output.terminal import printable_name
from shards.schema.config_values import shown_value

log = logging.getLogger(__name__)
_NAME, _MOST_POINTS, _MOST_NOTES, _MOST_DIFFERING = "compare.html", 2000, 3, 6
_NUMBERS = (3, 4)  # columns of the table that are aligned to the right


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """The flags of the command: the page that is written, or, with `json`, none."""

    out: str | None = None
    json: bool = False


def run(words: list[str]) -> int:
    """Writes the page and prints the table (with --json, only one JSON object for each point). UserError if there is no
    run in the folders, or the page cannot be written."""
    flags, folders = take_own_flags(CompareFlags, words)
    if unknown := next((word for word in folders if word.startswith("-")), ""):
        raise UserError(f"unknown flag {shown_value(unknown)}; usage: {usage_of('compare')}")
    if not folders:
        raise UserError(f"no run is given; usage: {usage_of('compare')}")
    if flags.out is not None:
        _refuse_no_page(flags.out)
    out = Path(flags.out or _NAME)
    points, notes = _points(folders)
    if not points:
        raise _nothing(folders, notes)
    for note in notes:
        log.warning("left out: %s", printable_name(note))
    if flags.json:
        put("".join(f"{json.dumps(point_json(one), allow_nan=False)}\n" for one in points))
        return exit_codes.DONE
    page = render(points, notes)
    write_page(out, page)
    put(point_table(points))
    log.info("%s: %s, opens in any browser", printable_name(str(out)), plural(len(points), "point"))
    return exit_codes.DONE


def point_table(points: Sequence[Point]) -> str:
    """A line for each point."""
    rows = [
        (
            "run",
            "model",
            "scored on",
            "images",
            "exaFLOPs",
            "accuracy",
            "best",
            "few-shot",
            "also scored",
            "what differs",
        )
    ]
    rows += [
        (
            printable_name(one.name),
            printable_name(one.line),
            printable_name(one.dataset) or "-",
            "-" if one.num_images is None else f"{one.num_images:,}",
            "-" if one.exaflops is None else f"{one.exaflops:.3g}",
            _score(one.accuracy, one.deviation),
            _score(one.best_accuracy, one.best_deviation),
            ", ".join(f"{shots}: {value:.3f}" for shots, value in one.fewshot.items()) or "-",
            "; ".join(printable_name(more.words()) for more in one.also) or "-",
            _differs(one.differs),
        )
        for one in points
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        sized = zip(row, widths, strict=True)
        cells = [cell.rjust(width) if at in _NUMBERS else cell.ljust(width) for at, (cell, width) in enumerate(sized)]
        lines.append(f"{'  '.join(cells).rstrip()}\n")
    return "".join(lines)


def _differs(settings: Sequence[str]) -> str:
    """The first settings in which the run differs; the page has more."""
    more = len(settings) - _MOST_DIFFERING
    shown = [printable_name(one) for one in settings[:_MOST_DIFFERING]] + ([f"and {more} more"] if more > 0 else [])
    return ", ".join(shown) or "-"


def _nothing(folders: Sequence[str], notes: Sequence[str]) -> UserError:
    """The error for folders without a point; the notes say what was there."""
    listed, give = ", ".join(map(repr, folders)), "give run directories or folders of them"
    if not notes:
        return UserError(f"no training run in {listed}, down to 3 levels; {give}")
    shown = "; ".join(map(printable_name, notes[:_MOST_NOTES]))
    more = f"; and {len(notes) - _MOST_NOTES} more" if len(notes) > _MOST_NOTES else ""
    return UserError(f"nothing to compare in {listed}: {shown}{more}; {give}, of a sweep its own folder")


def _score(value: float | None, deviation: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")


def _refuse_no_page(out: str) -> None:
    """UserError if the page cannot have this name, or would replace something else."""
    if Path(out).suffix.lower() not in PAGES:
        raise UserError(f"--out is {shown_value(out)}; allowed: the name of an .html file")
    refuse_no_page(Path(out), name=_NAME)


def _points(folders: Sequence[str]) -> tuple[list[Point], list[str]]:
    """The points of all runs in these folders, each once."""
    points, notes, seen = list[Point](), list[str](), set[Path]()
    for given in folders:
        root = Path(given)
        new = [folder for folder in folders_below(root) if folder.resolve() not in seen]
        seen |= {folder.resolve() for folder in new}
        found, told = gather(new, root=root)
        points, notes = [*points, *found], [*notes, *told]
    if len(points) > _MOST_POINTS:
        raise UserError(f"{len(points):,} runs; allowed: at most {_MOST_POINTS:,} in one comparison")
    return told_apart(points), notes
