"""The table of `patchline ls`: a line for each run, as wide as the terminal, and its reasons below it. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.output import advice, fitted, wrapped
from pipeline.runs.facts import RunFacts
from shards.output.terminal import printable_name

_HEADS = ("run", "recipe", "state", "step", "loss", "accuracy", "images/s", "goodput", "seen")
_LEFT = (True, True, True, False, False, False, False, False, False)
_LEAST_NAME, _LEAST_RECIPE = 12, 8
_LATEST_TO_GO = ("goodput", "images/s", "accuracy", "loss")  # columns left out of a narrow terminal, the first first
_GAP, _INDENT = "  ", "    "
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))
Cells = list[str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a line shows of a run."""

    run: str
    recipe: str
    num_steps: int | None
    facts: RunFacts
    reasons: tuple[str, ...]
    state: str = ""
    """Shown instead of the state in `facts`."""


def table_of(rows: Sequence[Row], *, now: float, columns: int) -> str:
    """The lines of the table, none longer than `columns` but commands to paste; names are fitted, control characters in
    them escaped."""
    cells = [_cells(row, now) for row in rows]
    kept = _columns_that_fit(cells, columns)
    widths = _widths(cells, kept, columns)
    lines = [_line([_HEADS[at] for at in kept], kept, widths)]
    for row, own in zip(rows, cells, strict=True):
        shown = [fitted(own[at], width) if at < 2 else own[at] for at, width in zip(kept, widths, strict=True)]
        lines.append(_line(shown, kept, widths))
        for reason in row.reasons:
            width = max(columns - len(_INDENT), _LEAST_NAME)
            is_advice = reason.startswith("> ")
            parts = advice(reason[2:], width) if is_advice else wrapped(reason, width, most_lines=3)
            lines += [f"{_INDENT}{part}" for part in parts]
    return "".join(f"{line}\n" for line in lines)


def _cells(row: Row, now: float) -> Cells:
    facts = row.facts
    step = "" if facts.step is None else f"{facts.step:,}"
    steps = f"/{row.num_steps:,}" if row.num_steps is not None else ""
    return [
        printable_name(row.run),
        printable_name(row.recipe) or "-",
        row.state or facts.state,
        f"{step or '0'}{steps}" if step or steps else "-",
        "-" if facts.loss is None else f"{facts.loss:.4f}" if _is_usual(facts.loss) else f"{facts.loss:.3g}",
        "-" if facts.accuracy is None else f"{facts.accuracy:.3f}",
        "-" if facts.images_per_second is None else f"{facts.images_per_second:,.0f}",
        "-" if facts.goodput is None else f"{facts.goodput:.0%}",
        "-" if facts.last_seen is None else _ago(now - facts.last_seen),
    ]


def _is_usual(loss: float) -> bool:
    return math.isfinite(loss) and 1e-3 <= abs(loss) < 1e4


def _ago(seconds: float) -> str:
    """Such as `12 s ago` or `3 h ago`; a clock of another host may be ahead."""
    unit, name = next(((unit, name) for unit, name in _UNITS if seconds >= unit), (1, "s"))
    return f"{max(0, seconds) // unit:.0f} {name} ago"


def _widest(cells: Sequence[Cells], at: int) -> int:
    return max(len(_HEADS[at]), *(len(row[at]) for row in cells))


def _columns_that_fit(cells: Sequence[Cells], columns: int) -> list[int]:
    """All columns, or as many as a narrow terminal has room for."""
    kept = list(range(len(_HEADS)))
    for name in ("", *_LATEST_TO_GO):
        kept = [at for at in kept if _HEADS[at] != name]
        least = _LEAST_NAME + _LEAST_RECIPE + sum(_widest(cells, at) for at in kept[2:])
        if least + len(_GAP) * (len(kept) - 1) <= columns:
            break
    return kept


def _widths(cells: Sequence[Cells], kept: Sequence[int], columns: int) -> list[int]:
    """Of the columns; the names of runs and recipes share what the others leave."""
    others = [_widest(cells, at) for at in kept[2:]]
    room = max(_LEAST_NAME + _LEAST_RECIPE, columns - sum(others) - len(_GAP) * (len(kept) - 1))
    name, recipe = _widest(cells, 0), _widest(cells, 1)
    if name + recipe > room:
        recipe = min(recipe, max(_LEAST_RECIPE, room // 2, room - name))
        name = min(name, room - recipe)
    return [name, recipe, *others]


def _line(texts: Sequence[str], kept: Sequence[int], widths: Sequence[int]) -> str:
    from rich.cells import cell_len  # noqa: PLC0415 - not needed for help

    padded = []
    for text, at, width in zip(texts, kept, widths, strict=True):
        room = " " * max(0, width - cell_len(text))
        padded.append(text + room if _LEFT[at] else room + text)
    return _GAP.join(padded).rstrip()
