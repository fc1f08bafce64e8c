"""Figures: files of the promised names and sizes, the same for the same numbers, and said where they cannot be."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.inspection import figures


def test_files_are_png_and_svg_and_the_same_again(tmp_path: Path) -> None:
    def drawn(folder: Path) -> list[bytes]:
        folder.mkdir()
        generator = torch.Generator().manual_seed(0)
        names = figures.save(figures.filters(torch.randn(10, 4, 4, 3, generator=generator)), folder, "filters")
        distances = torch.rand(12, 3, generator=generator)
        names += figures.save(figures.attention_distances(distances, image_size=224, uniform=0.5), folder, "distance")
        assert names == ["filters.png", "filters.svg", "distance.png", "distance.svg"]
        return [(folder / name).read_bytes() for name in names]

    first, again = drawn(tmp_path / "a"), drawn(tmp_path / "b")
    assert first == again
    with Image.open(tmp_path / "a" / "filters.png") as picture:
        assert picture.width > 600
    assert b"<dc:date>" not in first[1]


def test_images_are_as_bright_as_they_are_looked_at(tmp_path: Path) -> None:
    """The left half of a white image is looked at, the right half is not."""
    images = np.full((1, 40, 40, 3), 255, dtype=np.uint8)
    maps = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    figure = figures.rollouts(images, maps)
    shown = np.asarray(figure.axes[1].images[0].get_array())
    assert shown[:, 0].min() == 255
    assert shown[:, -1].max() == 0


def test_positions_are_shown_one_below_the_other() -> None:
    picture = torch.zeros(8, 8, 3, dtype=torch.uint8)
    figure = figures.positions([("learned: 2 x 2", picture), ("resampled: 3 x 3", picture)])
    assert [axes.get_title() for axes in figure.axes] == ["learned: 2 x 2", "resampled: 3 x 3"]


def test_figures_can_be_read_on_a_phone(tmp_path: Path) -> None:
    """None is so wide that its text has less than 9 pixels where 350 are left for it."""
    picture, images = torch.zeros(8, 8, 3, dtype=torch.uint8), np.zeros((8, 40, 40, 3), dtype=np.uint8)
    made = {
        "filters": figures.filters(torch.rand(28, 4, 4, 3)),
        "positions": figures.positions([("learned: 14 x 14 (224 px)", picture), ("resampled: 24 x 24", picture)]),
        "distance": figures.attention_distances(torch.rand(12, 3), image_size=224, uniform=0.5),
        "rollout": figures.rollouts(images, torch.ones(8, 2, 2)),
    }
    for name, figure in made.items():
        figures.save(figure, tmp_path, name)
        with Image.open(tmp_path / f"{name}.png") as drawn:
            pixels_per_point = drawn.width / figure.get_size_inches()[0] / 72
            texts = [*figure.texts, *(axes.title for axes in figure.axes)]
            sizes = [one.get_fontsize() for one in texts] + [
                one.get_fontsize() for axes in figure.axes if axes.axison for one in axes.get_xticklabels()
            ]
            assert min(sizes) * pixels_per_point * 350 / drawn.width > 9, name
        for one in texts:
            extent = one.get_window_extent()
            assert figure.bbox.x0 <= extent.x0, one.get_text()
            assert extent.x1 <= figure.bbox.x1, one.get_text()


@pytest.mark.parametrize(("least", "ends"), [(16.0, (16, 20)), (1.0, (0, 20)), (20.0, (19, 21))])
def test_distances_and_shares_fill_their_axes(least: float, ends: tuple[float, float]) -> None:
    pixels_Lh = torch.tensor([[least, 20.0], [20.0, 20.0]])
    (axes,) = figures.attention_distances(pixels_Lh, image_size=32, uniform=20.0).axes
    assert axes.get_ylim() == pytest.approx(ends, abs=2)
    lines = {"cosine_similarity": [1.0, least / 20], "same_class": [1.0, 1.0]}
    (axes,) = figures.shift_consistency([0, 1], lines, stride=1).axes
    assert axes.get_ylim() == pytest.approx([end / 20 for end in ends], abs=0.1)
