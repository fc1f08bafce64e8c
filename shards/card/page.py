"""Makes the card as one HTML page: turns the facts into what the template shows."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shards.card import plots
from shards.card.facts import CardFacts
from shards.card.tally import SIDE_STEPS, Tally, quantile
from shards.index import KINDS, left_out_words
from shards.order import ORDER_VERSION
from shards.output.quantities import plural
from shards.pages.page import page, shown, without_users_and_queries

LISTED_SIZES = 16
SMALL_PIXELS = 96  # smaller pictures are enlarged without smoothing
MOST_BARS = 40  # up to this many classes have a bar each; more are drawn as a curve
MOST_SEARCHED = 50_000  # about 2 MB if names have a usual length
LISTED = 12
MOST_MODES = 12
_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WebP"}
_MODES = {
    "L": "greyscale",
    "LA": "greyscale with transparency",
    "I;16": "greyscale of 16 bits",
    "1": "black and white",
    "P": "with a palette",
    "RGBA": "RGB with transparency",
    "": "of unknown mode",
}
# How a stored image is turned upright, by its EXIF orientation.
_TURNS = {
    2: "mirrored",
    3: "by 180°",
    4: "by 180° and mirrored",
    5: "by 90° anticlockwise and mirrored",
    6: "by 90° clockwise",
    7: "by 90° clockwise and mirrored",
    8: "by 90° anticlockwise",
}


@dataclass(frozen=True, kw_only=True)
class Use:
    """What to do next with a dataset: a title, and commands, each with a sentence about it."""

    title: str
    commands: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class BarRow:
    """A row of a table: name, count, and the length of its bar in percent of the longest."""

    name: str
    count: int
    percent: float


def render(facts: CardFacts, *, use: Use | None = None) -> bytes:
    """Returns the page in UTF-8. Equal facts and use give equal bytes."""
    groups = {kind: [group for group in facts.quarantine if group.kind == kind] for kind in KINDS}
    counts = {kind: sum(group.count for group in found) for kind, found in groups.items()}
    values = {
        "facts": facts,
        "tally": facts.tally,
        "title": title_of(facts.url),
        "shard_bytes": int(facts.manifest.shard_column("num_bytes").sum()),
        "order_version": ORDER_VERSION,
        "classes": class_facts(facts),
        "images": _images(facts.tally),
        "image_words": image_words(facts.tally, facts.modes),
        "together": _together(facts),
        "refused": groups["refused"] + groups["unlabeled"],
        "duplicates": groups["duplicate"],
        "overlaps": groups["evaluation"],
        "of_other_split": groups["split"],
        "left_out": left_out_words(counts),
        "num_refused": counts["refused"],
        "settings": [(name, _setting(value)) for name, value in _dotted(facts.plan.settings)],
        "small_pixels": SMALL_PIXELS,
        "use": use,
    }
    return page("shards.card", "card.html.j2", values, script="card.js")


def title_of(url: str) -> str:
    """Returns the last part of a dataset's URL, without anything that could be a password."""
    last = without_users_and_queries(url).rstrip("/").rpartition("/")[2]
    return last.rpartition("@")[2] or "dataset"


def class_facts(facts: CardFacts) -> dict[str, object]:
    """Returns what the page says about the classes: the largest and the smallest, how samples are distributed, and a
    list to search."""
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


def _rows(facts: CardFacts, order: NDArray[np.int64]) -> list[BarRow]:
    counts = [int(facts.class_counts[place]) for place in order.tolist()]
    longest = max([1, *counts])
    return [
        BarRow(name=facts.class_names[place], count=count, percent=100 * count / longest)
        for place, count in zip(order.tolist(), counts, strict=True)
    ]


def searched_of(num_classes: int) -> str:
    """Returns a text that says which classes a search covers."""
    if num_classes <= MOST_SEARCHED:
        return plural(num_classes, "class")
    return f"the {MOST_SEARCHED:,} largest of {num_classes:,} classes"


def _to_search(facts: CardFacts, order: NDArray[np.int64]) -> str:
    """Returns one line per class, largest first: label, number of samples, name. `shown` leaves no tab or line break in
    a name."""
    counts, names = facts.class_counts, facts.class_names
    return "\n".join(f"{place}\t{counts[place]}\t{shown(names[place])}" for place in order[:MOST_SEARCHED].tolist())


def _images(tally: Tally) -> dict[str, object]:
    if not tally.num_images:
        return {"sizes": [], "num_sizes": 0}
    sizes = tally.sizes.most_common(LISTED_SIZES)
    middle = [quantile(tally.sides.sum(axis=axis), 0.5) / SIDE_STEPS for axis in (1, 0)]
    most = sizes[0][1]
    one_size = len(tally.sizes) == 1
    return {
        "sizes": [BarRow(name=f"{w:,} × {h:,}", count=n, percent=100 * n / most) for (h, w), n in sizes],
        "num_sizes": len(tally.sizes),
        "median_height": sizes[0][0][0] if one_size else round(2 ** middle[0]),
        "median_width": sizes[0][0][1] if one_size else round(2 ** middle[1]),
        "resolution": "" if one_size else plots.resolution(tally),
        "bytes": plots.byte_sizes(tally),
        "aspects": "" if one_size else plots.aspects(tally),
        "labels": [(number, int(n)) for number, n in enumerate(tally.labels_a_sample) if n],
    }


def image_words(tally: Tally, modes: Counter[str]) -> str:
    """Describes the images: "500 JPEG; 486 RGB, 14 greyscale; 1 with EXIF rotation (by 90° clockwise)"."""
    formats = [f"{count:,} {_FORMATS.get(ext, shown(ext))}" for ext, count in tally.exts.most_common()]
    is_one = len(modes) == 1
    named = [
        f"{'all' if is_one else f'{count:,}'} {_MODES.get(mode, shown(mode))}"
        for mode, count in modes.most_common(MOST_MODES)
    ]
    return "; ".join(", ".join(words) for words in (formats, named, list(_rotations(tally))) if words)


def _rotations(tally: Tally) -> Iterator[str]:
    turns = {turn: int(count) for turn, count in enumerate(tally.orientations) if turn in _TURNS and count}
    if mirrored := turns.pop(2, 0):
        yield f"{mirrored:,} mirrored by EXIF"
    if len(turns) == 1:
        turn, count = turns.popitem()
        yield f"{count:,} with EXIF rotation ({_TURNS[turn]})"
    elif turns:
        details = ", ".join(f"{count:,} {_TURNS[turn]}" for turn, count in turns.items())
        yield f"{sum(turns.values()):,} with EXIF rotation ({details})"


def _together(facts: CardFacts) -> str:
    tally = facts.tally
    if not tally.is_multi_label or len(tally.top_classes) < 2:
        return ""
    return plots.together(tally, [shown(facts.class_names[label], 22) for label in tally.top_classes.tolist()])


def _dotted(settings: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in sorted(settings.items()):
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _setting(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    if value is None or value == "":
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
