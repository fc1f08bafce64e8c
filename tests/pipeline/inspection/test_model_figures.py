"""The figures of models whose answer is known: sinusoids, and shifts that change nothing without positions."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.evaluation.predictor import Predictor
from pipeline.inspection.model_figures import (
    consistency,
    draw_attention,
    draw_filters,
    draw_positions,
    draw_shifts,
    shifts_for,
)
from pipeline.inspection.weight_pictures import similarities
from pipeline.models import ModelConfig, build_model
from pipeline.models.vit import ViT
from pipeline.models.weights.usage import Usage
from shards.errors import UserError
from tests.pipeline.models.test_vit import random_model

BIT = ModelConfig(name="bit_r50x1", num_classes=5, resnet_units=(1, 1), image_size=32)


def predictor_of(model: Any) -> Predictor:
    labels = tuple(map(str, range(5)))
    return Predictor(model=model, config=model.config, labels=labels, usage=Usage(), device=torch.device("cpu"))


def photographs(folder: Path, num: int) -> list[Path]:
    """Images of noise, of several sizes."""
    rng, paths = np.random.default_rng(0), []
    for number in range(num):
        paths.append(folder / f"{number:03d}.png")
        Image.fromarray(rng.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)).save(paths[-1])
    return paths


@pytest.mark.parametrize(
    ("fields", "files"),
    [
        ({}, ["filters", "positions"]),
        ({"position": "learned_2d"}, ["filters", "positions"]),
        ({"position": "sincos2d"}, ["filters", "positions"]),
        ({"position": "none"}, ["filters"]),
        ({"position": "relative"}, ["filters"]),
        ({"patch": 1, "resnet_units": (1, 1), "image_size": 16}, ["positions"]),
    ],
)
def test_what_a_model_has_is_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], files: list[str]
) -> None:
    model = random_model(**fields)
    with caplog.at_level(logging.INFO):
        found = [draw_filters(model, tmp_path), draw_positions(model, tmp_path, resample_to=0)]
    names = [name for one in found for name in one.get("files", [])]
    assert names == [f"{name}.{kind}" for name in files for kind in ("png", "svg")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert len([one for one in caplog.messages if "so " in one]) == 2 - len(files)


def test_positions_are_resampled_to_the_papers_ratio_or_as_asked(tmp_path: Path) -> None:
    model = random_model()  # 3 x 3 patches of 4 px
    assert draw_positions(model, tmp_path, resample_to=0)["positions"] == {"image_size": 12, "resampled_to": 20}
    assert draw_positions(model, tmp_path, resample_to=36)["positions"]["resampled_to"] == 36
    with pytest.raises(UserError, match=r"--resample-to is 30, not a multiple of the patch .4 px.; take 28 or 32"):
        draw_positions(model, tmp_path, resample_to=30)


@pytest.mark.long
def test_distances_are_means_over_all_images_in_whatever_batches(tmp_path: Path) -> None:
    model = random_model()
    paths = photographs(tmp_path, 19)  # more than a batch
    found = draw_attention(predictor_of(model), model, paths, tmp_path)["attention"]
    assert found["num_images"] == 19
    each = [draw_attention(predictor_of(model), model, [path], tmp_path)["attention"] for path in paths]
    expected = np.mean([one["mean_distance_pixels"] for one in each], axis=0)
    np.testing.assert_allclose(found["mean_distance_pixels"], expected, rtol=1e-5)


def test_axial_heads_are_compared_with_one_that_looks_everywhere_in_its_line(tmp_path: Path) -> None:
    model = random_model(attention="axial", pooling="average", depth=1)
    found = draw_attention(predictor_of(model), model, photographs(tmp_path, 1), tmp_path)["attention"]
    assert found["uniform_distance_pixels"] == pytest.approx(4 * (3 * 3 - 1) / (3 * 3))
    assert np.shape(found["mean_distance_pixels"]) == (2, 3)


def sinusoids() -> ViT:
    """Row y and column x of 3 x 3 patches: cosine and sine of y / 4, y / 2, x / 4 and x / 2."""
    model = random_model(width=8, num_heads=1)
    y_HW, x_HW = torch.meshgrid(torch.arange(3.0), torch.arange(3.0), indexing="ij")
    angles_HW4 = torch.stack([y_HW / 4, y_HW / 2, x_HW / 4, x_HW / 2], dim=-1)
    assert model.embed.position is not None
    with torch.no_grad():
        model.embed.position[0, 1:] = torch.cat([angles_HW4.cos(), angles_HW4.sin()], dim=-1).reshape(9, 8)
    return model


def test_sinusoids_have_the_known_similarity_and_keep_it_at_the_corners() -> None:
    """Corners are aligned when positions are resampled."""
    model = sinusoids()
    tables = {side: model.embed.positions((side, side)) for side in (3, 5)}
    similar = {
        side: similarities(table[0].detach(), grid=(side, side)) for side, table in tables.items() if table is not None
    }
    for (a_y, a_x), (b_y, b_x) in [((0, 0), (0, 0)), ((0, 0), (2, 1)), ((1, 2), (0, 0)), ((2, 2), (0, 1))]:
        y, x = a_y - b_y, a_x - b_x
        expected = np.mean([np.cos(y / 4), np.cos(y / 2), np.cos(x / 4), np.cos(x / 2)])
        assert float(similar[3][a_y, a_x, b_y, b_x]) == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(similar[5][::4, ::4, ::4, ::4], similar[3][::2, ::2, ::2, ::2])


@pytest.mark.parametrize("model", [random_model(), build_model(BIT)], ids=["vit", "bit"])
def test_shifts_start_with_the_image_itself(tmp_path: Path, model: Any) -> None:
    found = draw_shifts(predictor_of(model), photographs(tmp_path, 19), tmp_path)  # more than a batch
    shifts = found["shifts"]
    assert found["files"] == ["shifts.png", "shifts.svg"]
    assert (shifts["num_images"], shifts["pixels"][0]) == (19, 0)
    assert (shifts["cosine_similarity"][0], shifts["same_class"][0]) == (pytest.approx(1, abs=1e-6), 1)
    assert all(0 <= share <= 1 for share in shifts["same_class"])
    assert len(shifts["pixels"]) == len(shifts["cosine_similarity"]) == len(shifts["same_class"])


def similar_at(shifts: range, **fields: Any) -> torch.Tensor:
    """Of images that repeat after their own width, so that a shift by a patch moves each patch to the next place."""
    model = random_model(pooling="average", **fields)  # 3 x 3 patches of 4 px
    if model.embed.position is not None:
        with torch.no_grad():
            model.embed.position.mul_(20)
    size = model.config.image_size
    rows = torch.randint(0, 256, (2, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    images = torch.cat([rows, rows], dim=2)
    images = torch.cat([images, images], dim=1)[:, :, : 2 * size]
    return consistency(model, images, shifts).similar


def test_shifts_by_whole_patches_change_nothing_without_positions() -> None:
    without = similar_at(range(0, 9, 2), position="none")
    assert without[[0, 2, 4]] == pytest.approx(torch.ones(3, 2).numpy(), abs=1e-5)
    assert without[[1, 3]].max() < 0.9999
    learned = similar_at(range(0, 9, 2))
    assert learned[0] == pytest.approx(torch.ones(2).numpy(), abs=1e-5)
    assert learned[[1, 2, 3, 4]].max() < 0.9999


@pytest.mark.parametrize(
    ("image_size", "stride", "last", "num"),
    [(224, 16, 32, 17), (224, 32, 64, 17), (32, 4, 8, 9), (12, 4, 6, 7), (1, 1, 1, 2), (518, 14, 28, 15)],
)
def test_shifts_reach_two_patches(image_size: int, stride: int, last: int, num: int) -> None:
    shifts = shifts_for(image_size, stride=stride)
    assert (shifts[0], shifts[-1], len(shifts)) == (0, last, num)
