"""The confusion matrix in a run's report as inline SVG: shares in, markup out. Colours are the page's. Pure."""

from collections.abc import Sequence

from markupsafe import Markup, escape

from jobs.report_plots import svg

MOST_CLASSES = 30
_LEFT, _TOP, _RIGHT = 130, 96, 46
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
    body: list[str] = []
    for column, name in enumerate(classes):
        at = f"translate({_LEFT + (column + 0.5) * cell + 4:.1f} {_TOP - 7}) rotate(-55)"
        body.append(f'<text class="name" transform="{at}">{escape(name)}</text>')
    for row, name in enumerate(labels):
        y = _TOP + row * cell
        body.append(
            f'<text class="name" x="{_LEFT - 8}" y="{y + cell / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>'
        )
        for column, share in enumerate(shares[row]):
            x = _LEFT + column * cell
            box = (
                f'x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill-opacity="{0.05 + 0.95 * share**0.5:.2f}"'
            )
            body.append(f'<rect class="{"part-1" if is_right[row][column] else "cell"}" {box}/>')
            if share >= 0.005 and cell == _WIDE:
                place = f'x="{x + cell / 2 - 0.5:.1f}" y="{y + cell / 2 + 4:.1f}" text-anchor="middle"'
                body.append(f'<text class="value{" strong" if share > 0.4 else ""}" {place}>{100 * share:.0f}</text>')
    about = f"Confusion matrix of {len(labels)} labels and {len(classes)} classes, in percent of each label's images."
    return svg(about, _LEFT + len(classes) * cell + _RIGHT, _TOP + len(labels) * cell + 4, body)
