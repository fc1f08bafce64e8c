"""The card as one HTML page. It makes no network request and runs one script, which its content security policy names
by hash; names are only ever text, whatever they contain."""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import jinja2
import numpy as np
from markupsafe import Markup

from shards.card import card_plots as plots
from shards.card.card import CardFacts, QuarantineGroup
from shards.card.card_classes import ClassRow, class_facts
from shards.card.card_tally import ASPECT_OCTAVES, ASPECT_STEPS, BYTE_STEPS, SIDE_STEPS, Tally, quantile
from shards.card.card_words import byte_text, counted, image_words, paragraphs, share_text, shown, title_of
from shards.images.thumbnails import Thumbnail
from shards.index import KINDS

TEMPLATE = "card.html.j2"
SCRIPT = "card.js"
STYLE = "page.css"
LISTED_SIZES = 16
SMALL_PIXELS = 96  # smaller pictures are enlarged pixel by pixel


@dataclass(frozen=True, kw_only=True)
class Use:
    """What can be done with a dataset next: a title, a sentence and the command."""

    title: str
    about: str
    command: str


def render(facts: CardFacts, *, use: Use | None = None) -> bytes:
    """The page, UTF-8. Equal facts and use give equal bytes."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"shown": shown, "bytes": byte_text, "picture": picture, "share": share_text}
    environment.filters |= {"counted": counted, "paragraphs": paragraphs}
    template, script = environment.from_string(_packaged(TEMPLATE)), _packaged(SCRIPT)
    groups = {kind: [group for group in facts.quarantine if group.kind == kind] for kind in KINDS}
    page = template.render(
        facts=facts,
        tally=facts.tally,
        title=title_of(facts.url),
        classes=class_facts(facts),
        images=_images(facts.tally),
        image_words=image_words(facts.tally, facts.modes),
        together=_together(facts),
        refused=groups["refused"] + groups["unlabeled"],
        duplicates=groups["duplicate"],
        overlaps=groups["evaluation"],
        counts={kind: _count(found) for kind, found in groups.items()},
        settings=[(name, _setting(value)) for name, value in _dotted(facts.plan.settings)],
        small_pixels=SMALL_PIXELS,
        use=use,
        style=page_style(),
        script=Markup(script),  # noqa: S704 - a file of this package
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )
    return page.encode("utf-8", "backslashreplace")


def page_style() -> Markup:
    """The style of our pages: light and dark, wide and narrow, on paper."""
    return Markup(_packaged(STYLE))  # noqa: S704 - a file of this package


def _packaged(name: str) -> str:
    return resources.files("shards.card").joinpath(name).read_text("utf-8")


def picture(thumbnail: Thumbnail) -> Markup:
    """A data URI of the JPEG."""
    return Markup("data:image/jpeg;base64,") + base64.b64encode(thumbnail.data).decode("ascii")


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


def _images(tally: Tally) -> dict[str, object]:
    if not tally.num_images:
        return {"sizes": [], "num_sizes": 0}
    sizes = tally.sizes.most_common(LISTED_SIZES)
    middle = [quantile(tally.sides.sum(axis=axis), 0.5) / SIDE_STEPS for axis in (1, 0)]
    most = sizes[0][1]
    one_size = len(tally.sizes) == 1
    return {
        "sizes": [ClassRow(name=f"{w:,} × {h:,}", count=n, percent=100 * n / most) for (h, w), n in sizes],
        "num_sizes": len(tally.sizes),
        "median_height": sizes[0][0][0] if one_size else round(2 ** middle[0]),
        "median_width": sizes[0][0][1] if one_size else round(2 ** middle[1]),
        "resolution": "" if one_size else _resolution(tally),
        "bytes": _byte_sizes(tally),
        "aspects": "" if one_size else _aspects(tally),
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
    # two bins of a sixteenth of an octave per bar, at least an octave and a half in all
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
        name="bytes per image (log)",
        about=f"Bytes per image: from {byte_text(low)} to {byte_text(high)}, median about {byte_text(2**median)}.",
        marks=[(median, f"median {byte_text(2**median)}")],
    )


def _aspects(tally: Tally) -> Markup:
    middle = ASPECT_OCTAVES // 2 * ASPECT_STEPS
    used = np.flatnonzero(tally.aspects)
    reach = min(max(middle - int(used[0]), int(used[-1]) - middle, ASPECT_STEPS) + 2, middle - 1)
    edges = -(reach + 0.5) / ASPECT_STEPS, (reach + 0.5) / ASPECT_STEPS
    wide, square = int(tally.aspects[middle + 1 :].sum()), int(tally.aspects[middle])
    total = tally.num_images
    texts = share_text(wide, total), share_text(square, total), share_text(total - wide - square, total)
    about = "Width to height: {} wide, {} square or nearly, {} tall.".format(*texts)
    bars = tally.aspects[middle - reach : middle + reach + 1]
    return plots.histogram(bars, edges, ticks=plots.aspect_ticks(*edges), name="width : height (log)", about=about)


def _together(facts: CardFacts) -> Markup | str:
    tally = facts.tally
    if not tally.is_multi_label or len(tally.top_classes) < 2:
        return ""
    shares = tally.together / np.maximum(np.diag(tally.together), 1)[:, None]
    names = [shown(facts.class_names[label], 22) for label in tally.top_classes.tolist()]
    return plots.heat_map(shares, names, about=f"How often the {len(names)} most frequent labels occur together.")
