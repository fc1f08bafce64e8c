"""docs/order.svg shows the real order: its sample ids are those of SampleOrder.

docs/pos_embed.svg shows the real results of the three modes. docs/pictures.py draws every picture.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from docs import pos_embed_figure
from docs.order_figure import BATCH, LANES, STEPS, WINDOW_BLOCKS, draw, example
from docs.pictures import MOST_BYTES, PICTURES

DOCS = Path(__file__).resolve().parent.parent / "docs"
FIGURE, POSITIONS = DOCS / "order.svg", DOCS / "pos_embed.svg"


def ids_in(figure: Path) -> dict[str, int]:
    """Name of each cell -> the sample id written in it."""
    cells = re.findall(
        r'<g id="((?:packed|permuted|shuffled|batch)-[-\d]+)">\s*<text[^>]*>(\d+)</text>', figure.read_text()
    )
    return {name: int(text) for name, text in cells}


def ids_shown() -> dict[str, int]:
    shown = example()
    rows: dict[str, list[int]] = {f"packed-{block}": ids for block, ids in enumerate(shown.packed)}
    for window, blocks in enumerate(shown.permuted):
        rows |= {f"permuted-{window}-{place}": ids for place, ids in enumerate(blocks)}
    rows |= {f"shuffled-{window}": ids for window, ids in enumerate(shown.shuffled)}
    rows |= {f"batch-{step}": ids for step, ids in enumerate(shown.batches)}
    return {f"{row}-{place}": sample_id for row, ids in rows.items() for place, sample_id in enumerate(ids)}


def test_the_figure_shows_todays_order() -> None:
    assert ids_in(FIGURE) == ids_shown(), "draw it again: python -m docs.pictures order"


def test_it_is_drawn_from_the_order_alone(tmp_path: Path) -> None:
    draw(example(), tmp_path / "order.svg")
    assert ids_in(tmp_path / "order.svg") == ids_shown()


def test_each_step_is_what_the_figure_says() -> None:
    shown = example()
    assert sorted(block for window in shown.permuted for block in window) == shown.packed
    assert all(len(blocks) == WINDOW_BLOCKS for blocks in shown.permuted)
    for blocks, ids in zip(shown.permuted, shown.shuffled, strict=True):
        assert sorted(ids) == sorted(sample_id for block in blocks for sample_id in block)
        assert ids != [sample_id for block in blocks for sample_id in block]
    lanes = np.array(shown.shuffled).reshape(LANES, -1)
    share = BATCH // LANES
    for step, (ids, epochs) in enumerate(zip(shown.batches, shown.epochs, strict=True)):
        for lane in range(LANES):
            part = slice(lane * share, (lane + 1) * share)
            of_this_epoch = [one for one, epoch in zip(ids[part], epochs[part], strict=True) if epoch == 0]
            assert of_this_epoch == lanes[lane, step * share : (step + 1) * share].tolist()
    assert (np.array(shown.epochs[: STEPS - 1]) == 0).all()
    assert sorted(set(shown.epochs[-1])) == [0, 1], "the last batch shows how epochs meet"


def distances_in(figure: Path) -> dict[str, str]:
    """Pair of modes -> the text below its map."""
    return dict(re.findall(r'<g id="apart-([-\w]+)">\s*<text[^>]*>([^<]*)</text>', figure.read_text()))


def curve_in(figure: Path, mode: str) -> list[float]:
    """Heights of a mode's curve, in points from the top of the figure."""
    found = re.search(rf'<g id="curve-{mode}">\s*<path d="M ([^"]*)"', figure.read_text())
    assert found, f"{figure.name} has no curve of {mode}"
    return [float(point.split()[1]) for point in found[1].split("L")]


def test_the_figure_says_how_far_the_modes_are_apart() -> None:
    shown = pos_embed_figure.example()
    expected = {f"{one}-{other}": shown.says(one, other) for one, other in pos_embed_figure.PAIRS}
    assert distances_in(POSITIONS) == expected, "draw it again: python -m docs.pictures pos_embed"
    assert len(set(expected.values())) == 3


def test_its_curves_are_the_first_rows_of_the_maps() -> None:
    shown = pos_embed_figure.example()
    drawn = np.array([curve_in(POSITIONS, mode) for mode in pos_embed_figure.MODES])
    rows = np.array([shown.resampled[mode][pos_embed_figure.ROW] for mode in pos_embed_figure.MODES])
    slope, offset = np.polyfit(rows.reshape(-1), drawn.reshape(-1), 1)
    assert slope < 0, "up is more"
    assert np.allclose(slope * rows + offset, drawn, atol=1e-3), "draw it again: python -m docs.pictures pos_embed"


def test_it_is_drawn_from_the_maps_alone(tmp_path: Path) -> None:
    pos_embed_figure.draw(pos_embed_figure.example(), tmp_path / "pos_embed.svg")
    assert distances_in(tmp_path / "pos_embed.svg") == distances_in(POSITIONS)
    for mode in pos_embed_figure.MODES:
        assert curve_in(tmp_path / "pos_embed.svg", mode) == pytest.approx(curve_in(POSITIONS, mode), abs=1e-3)


def test_one_command_draws_every_picture() -> None:
    pictures = [path for path in DOCS.iterdir() if path.suffix in (".png", ".svg")]
    assert sorted(path.stem for path in pictures) == sorted(name for name in PICTURES if name != "session")
    assert [path.name for path in pictures if path.stat().st_size > MOST_BYTES] == []
