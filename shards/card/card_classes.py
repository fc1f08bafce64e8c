"""The classes on a dataset's card: the largest and the smallest, how they are spread, and a list to search."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shards.card import card_plots as plots
from shards.card.card import CardFacts
from shards.card.card_words import counted, shown

MOST_BARS = 40  # classes that are drawn by name; more are a curve
MOST_SEARCHED = 50_000  # at most 2 MB of usual names
LISTED = 12


@dataclass(frozen=True, kw_only=True)
class ClassRow:
    """A line of a table: name, count, and the length of its bar in percent of the longest."""

    name: str
    count: int
    percent: float


def class_facts(facts: CardFacts) -> dict[str, object]:
    """What the page says about the classes."""
    counts = facts.class_counts
    filled = counts[counts > 0]
    shares = filled / max(int(filled.sum()), 1)
    order = np.argsort(-counts, kind="stable")
    is_even = bool(filled.size) and int(filled.min()) == int(filled.max())
    few = len(counts) <= MOST_BARS
    return {
        "most": int(filled.max()) if filled.size else 0,
        "least": int(filled.min()) if filled.size else 0,
        "median": float(np.median(counts)) if counts.size else 0.0,
        "empty": int((counts == 0).sum()),
        "is_even": is_even,
        "effective": float(np.exp(-(shares * np.log(shares)).sum())),
        "all": _rows(facts, order) if few else [],
        "largest": [] if few or is_even else _rows(facts, order[:LISTED]),
        "smallest": [] if few or is_even else _rows(facts, order[: filled.size][::-1][:LISTED]),
        "to_search": _to_search(facts, order),
        "num_searched": searched_of(len(counts)),
        "curves": [] if few or is_even or not filled.size else [plots.rank_curve(counts), plots.coverage(counts)],
    }


def _rows(facts: CardFacts, order: NDArray[np.int64]) -> list[ClassRow]:
    longest = max(int(facts.class_counts[order].max()), 1) if order.size else 1
    return [
        ClassRow(name=facts.class_names[place], count=int(facts.class_counts[place]),
            percent=100 * int(facts.class_counts[place]) / longest)
        for place in order.tolist()
    ]  # fmt: skip


def searched_of(num_classes: int) -> str:
    """Which classes a search covers."""
    if num_classes <= MOST_SEARCHED:
        return counted(num_classes, "class", "classes")
    return f"the {MOST_SEARCHED:,} largest of {num_classes:,} classes"


def _to_search(facts: CardFacts, order: NDArray[np.int64]) -> str:
    """One line per class, largest first: label, number of samples, name. No name has a tab or a line break in it."""
    counts, names = facts.class_counts, facts.class_names
    return "\n".join(f"{place}\t{counts[place]}\t{shown(names[place])}" for place in order[:MOST_SEARCHED].tolist())
