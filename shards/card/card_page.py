"""The card as one HTML page: no scripts, no requests; whatever a name contains, it is only text."""

import base64
import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from shards.card import card_plots as plots
from shards.card.card import CardFacts, QuarantineGroup
from shards.card.card_tally import ASPECT_OCTAVES, ASPECT_STEPS, BYTE_STEPS, SIDE_STEPS, Tally, quantile
from shards.images.thumbnails import Thumbnail

TEMPLATE = "card.html.j2"
MOST_BARS = 40  # classes that are drawn by name; more are a curve
LISTED, LISTED_SIZES = 12, 16
NAME_CHARACTERS = 90
SMALL_PIXELS = 96  # smaller pictures are enlarged pixel by pixel

_USER_AND_PASSWORD = re.compile(r"(\w+://)[^/\s]*@")
_QUERY = re.compile(r"(\w+://[^\s?#]*)[?#]\S*")
_TURNS = {
    2: "mirrored",
    3: "upside down",
    4: "upside down, mirrored",
    5: "on its side, mirrored",
    6: "on its right side",
    7: "on its side, mirrored",
    8: "on its left side",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table: name, count, and the length of its bar in percent of the longest."""

    name: str
    count: int
    percent: float


def render(facts: CardFacts) -> bytes:
    """The page, UTF-8. Equal facts give equal bytes."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"shown": shown, "bytes": byte_text, "picture": picture, "share": share_text}
    template = environment.from_string(resources.files("shards.card").joinpath(TEMPLATE).read_text("utf-8"))
    groups = {kind: [group for group in facts.quarantine if group.kind == kind] for kind in _KINDS}
    page = template.render(
        facts=facts,
        tally=facts.tally,
        title=title_of(facts.url),
        classes=_classes(facts),
        images=_images(facts.tally),
        together=_together(facts),
        refused=groups["refused"],
        duplicates=groups["duplicate"],
        overlaps=groups["evaluation"],
        counts={kind: _count(found) for kind, found in groups.items()},
        settings=[(name, _setting(value)) for name, value in _dotted(facts.plan.settings)],
        small_pixels=SMALL_PIXELS,
    )
    return page.encode("utf-8", "backslashreplace")


_KINDS = ("refused", "duplicate", "evaluation")


def title_of(url: str) -> str:
    """The last part of a dataset's URL, without anything that could be a password."""
    last = _without_secrets(url).rstrip("/").rpartition("/")[2]
    return last.rpartition("@")[2] or "dataset"


def shown(text: str, most: int = NAME_CHARACTERS) -> str:
    """`text` as it may be shown: no password, no control or direction-changing characters, the middle of long ones
    left out. Escaping for HTML is left to the template."""
    plain = "".join(
        character
        if unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        else _escaped(character)
        for character in _without_secrets(text)
    )
    return plain if len(plain) <= most else f"{plain[: most // 2]}…{plain[-(most // 2) :]}"


def byte_text(count: float) -> str:
    """A number of bytes in decimal units, three digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            value = count / size
            return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {unit}"
    return f"{count:.0f} B"


def share_text(count: int, total: int) -> str:
    """A share in percent, such that a few of many are not shown as nothing."""
    percent = 100 * count / max(total, 1)
    if count and percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.{0 if percent in (0, 100) else 1 if percent >= 1 else 2}f} %"


def picture(thumbnail: Thumbnail) -> Markup:
    """A data URI of the JPEG."""
    return Markup("data:image/jpeg;base64,") + base64.b64encode(thumbnail.data).decode("ascii")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _without_secrets(text: str) -> str:
    return _QUERY.sub(r"\1", _USER_AND_PASSWORD.sub(r"\1", text))


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


def _count(groups: list[QuarantineGroup]) -> int:
    return sum(group.count for group in groups)


def _classes(facts: CardFacts) -> dict[str, object]:
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
        "curves": [] if few or is_even or not filled.size else [plots.rank_curve(counts), plots.coverage(counts)],
    }


def _rows(facts: CardFacts, order: NDArray[np.int64]) -> list[Row]:
    longest = max(int(facts.class_counts[order].max()), 1) if order.size else 1
    return [
        Row(name=facts.class_names[place], count=int(facts.class_counts[place]),
            percent=100 * int(facts.class_counts[place]) / longest)
        for place in order.tolist()
    ]  # fmt: skip


def _images(tally: Tally) -> dict[str, object]:
    if not tally.num_images:
        return {"sizes": [], "num_sizes": 0}
    sizes = tally.sizes.most_common(LISTED_SIZES)
    middle = [quantile(tally.sides.sum(axis=axis), 0.5) / SIDE_STEPS for axis in (1, 0)]
    most = sizes[0][1]
    one_size = len(tally.sizes) == 1
    return {
        "sizes": [Row(name=f"{w:,} × {h:,}", count=n, percent=100 * n / most) for (h, w), n in sizes],
        "num_sizes": len(tally.sizes),
        "median_height": sizes[0][0][0] if one_size else round(2 ** middle[0]),
        "median_width": sizes[0][0][1] if one_size else round(2 ** middle[1]),
        "resolution": "" if one_size else _resolution(tally),
        "bytes": _byte_sizes(tally),
        "aspects": "" if one_size else _aspects(tally),
        "turns": [(_TURNS[turn], int(n)) for turn, n in enumerate(tally.orientations) if turn > 1 and n],
        "labels": [(number, int(n)) for number, n in enumerate(tally.labels_a_sample) if n],
    }


def _resolution(tally: Tally) -> Markup:
    height, width = np.flatnonzero(tally.sides.any(axis=1)), np.flatnonzero(tally.sides.any(axis=0))
    spans = [
        f"{2 ** (int(used[0]) / SIDE_STEPS):.0f} to {2 ** ((int(used[-1]) + 1) / SIDE_STEPS):.0f}"
        for used in (width, height)
    ]
    about = f"Sizes of the images: width from about {spans[0]}, height from about {spans[1]} pixels."
    return plots.density(tally.sides, steps=SIDE_STEPS, about=about)


def _byte_sizes(tally: Tally) -> Markup:
    used = np.flatnonzero(tally.byte_sizes)
    # two bins of a sixteenth of an octave to a bar, at least an octave and a half in all
    first = int(used[0]) // 2 * 2 - 4
    last = max(int(used[-1]) // 2 * 2 + 6, first + 3 * BYTE_STEPS // 2)
    first = max(first, 0)
    bars = tally.byte_sizes[first : first + (last - first) // 2 * 2].reshape(-1, 2).sum(axis=1)
    edges = first / BYTE_STEPS, (first + 2 * len(bars)) / BYTE_STEPS
    median = quantile(tally.byte_sizes, 0.5) / BYTE_STEPS
    low, high = tally.bytes_range
    return plots.histogram(
        bars,
        edges,
        ticks=plots.byte_ticks(*edges),
        name="bytes an image (log)",
        about=f"Bytes an image: from {byte_text(low)} to {byte_text(high)}, median about {byte_text(2**median)}.",
        marks=[(median, f"median {byte_text(2**median)}")],
    )


def _aspects(tally: Tally) -> Markup:
    middle = ASPECT_OCTAVES // 2 * ASPECT_STEPS
    used = np.flatnonzero(tally.aspects)
    reach = min(max(middle - int(used[0]), int(used[-1]) - middle, ASPECT_STEPS) + 2, middle - 1)
    edges = -(reach + 0.5) / ASPECT_STEPS, (reach + 0.5) / ASPECT_STEPS
    wide, square = int(tally.aspects[middle + 1 :].sum()), int(tally.aspects[middle])
    total = tally.num_images
    parts = share_text(wide, total), share_text(square, total), share_text(total - wide - square, total)
    about = "Width to height: {} wide, {} square or nearly, {} tall.".format(*parts)
    bars = tally.aspects[middle - reach : middle + reach + 1]
    return plots.histogram(bars, edges, ticks=plots.aspect_ticks(*edges), name="width : height (log)", about=about)


def _together(facts: CardFacts) -> Markup | str:
    tally = facts.tally
    if not tally.is_multi_label or len(tally.top_classes) < 2:
        return ""
    shares = tally.together / np.maximum(np.diag(tally.together), 1)[:, None]
    names = [shown(facts.class_names[label], 22) for label in tally.top_classes.tolist()]
    return plots.heat_map(shares, names, about=f"How often the {len(names)} most frequent labels occur together.")
