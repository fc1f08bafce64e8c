"""The confusion matrix in a run's report as inline SVG: shares in, markup out. Colours are the page's. Pure."""

import math
import unicodedata
from collections.abc import Sequence

from markupsafe import Markup, escape

from jobs.reports.plots import svg

MOST_CLASSES = 30
_LEAST_LEFT, _LEAST_TOP, _LEAST_RIGHT = 60, 60, 8
_TURN = 55  # degrees of the names of classes
_TEXT_SIZE = 12.5  # pixels, of page.css
_WIDE, _NARROW = 34, 17  # pixels of a cell, of few and of many classes
_MOST_WIDE = 14


def confusion_plot(
    shares: Sequence[Sequence[float]],
    labels: Sequence[str],
    classes: Sequence[str],
    *,
    is_right: Sequence[Sequence[bool]],
) -> Markup:
    """A row for each label, a column for each class of the model; `shares`: of the label's images that the model took
    for the class, 0 to 1. Cells of right answers (`is_right`) have another colour."""
    cell = _WIDE if max(len(labels), len(classes)) <= _MOST_WIDE else _NARROW
    left, top, right = _margins(labels, classes, cell=cell)
    body: list[str] = []
    for column, name in enumerate(classes):
        at = f"translate({left + (column + 0.5) * cell + 4:.1f} {top - 7}) rotate(-{_TURN})"
        body.append(f'<text class="name" transform="{at}">{escape(name)}</text>')
    for row, name in enumerate(labels):
        y = top + row * cell
        body.append(
            f'<text class="name" x="{left - 8}" y="{y + cell / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>'
        )
        for column, share in enumerate(shares[row]):
            x = left + column * cell
            box = (
                f'x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill-opacity="{0.05 + 0.95 * share**0.5:.2f}"'
            )
            body.append(f'<rect class="{"part-1" if is_right[row][column] else "cell"}" {box}/>')
            if share >= 0.005 and cell == _WIDE:
                place = f'x="{x + cell / 2 - 0.5:.1f}" y="{y + cell / 2 + 4:.1f}" text-anchor="middle"'
                body.append(f'<text class="value{" strong" if share > 0.4 else ""}" {place}>{100 * share:.0f}</text>')
    about = f"Confusion matrix of {len(labels)} labels and {len(classes)} classes, in percent of each label's images."
    return svg(about, left + len(classes) * cell + right, top + len(labels) * cell + 4, body)


def _margins(labels: Sequence[str], classes: Sequence[str], *, cell: int) -> tuple[int, int, int]:
    """Room for the whole names left of the cells, above and right of them, where those of classes lean over."""
    left = max([_LEAST_LEFT, *(12 + text_width(name) for name in labels)])
    top = max([_LEAST_TOP, *(24 + math.sin(math.radians(_TURN)) * text_width(name) for name in classes)])
    lean = math.cos(math.radians(_TURN))
    ends = [lean * text_width(name) + 8 - (len(classes) - at - 0.5) * cell for at, name in enumerate(classes)]
    return math.ceil(left), math.ceil(top), math.ceil(max([_LEAST_RIGHT, *(end + 8 for end in ends)]))


def text_width(text: str) -> float:
    """Pixels of a name at most, in the fonts that pages are shown in."""
    return _TEXT_SIZE * sum(_width(one) for one in text)


def _width(character: str) -> float:
    """In widths of an em."""
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF" or character in "MW@%mw…—":
        return 1.0
    return 0.78 if character.isupper() else 0.62
