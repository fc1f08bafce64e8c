"""How images are prepared in the papers' recipes, written down independently of them."""

from collections.abc import Iterator

import numpy as np
import pytest

from jobs.recipes import augreg_finetune, paper_finetune, paper_imagenet, paper_jft, paper_vtab
from jobs.recipes.paper_views import CODE, INCEPTION_448, PAPER, PRETRAINING, RESMALL_448, Views
from pipeline.data.augment import Crop, Viewport, evaluation_viewport, training_viewport
from tests.rigs.faults import differs, every_fault

RECIPES = {
    **paper_jft.RECIPES,
    **paper_imagenet.RECIPES,
    **paper_finetune.RECIPES,
    **augreg_finetune.RECIPES,
    **paper_vtab.RECIPES,
}


@pytest.mark.parametrize(
    ("views", "crop", "crop_filter", "evaluation", "short_side", "evaluation_filter"),
    [
        pytest.param(CODE, "inception", "bilinear", "resize", 0, "bilinear", id="vision_transformer"),
        pytest.param(PAPER, "resize_crop", "bilinear", "resize", 0, "bilinear", id="section 4.1: as BiT"),
        pytest.param(
            INCEPTION_448, "inception", "bilinear", "central_crop", 448, "area", id="transfer.py, inception_crop"
        ),
        pytest.param(
            RESMALL_448, "short_side_crop", "area", "central_crop", 448, "area", id="transfer.py, resmall_crop"
        ),
        pytest.param(PRETRAINING, "inception", "bilinear", "central_crop", 0, "area", id="vit_i21k.py"),
    ],
)
def test_each_source(
    views: Views, crop: str, crop_filter: str, evaluation: str, short_side: int, evaluation_filter: str
) -> None:
    training, seen = views.training, views.evaluation
    assert (training.crop, training.filter, training.flip, training.antialias) == (crop, crop_filter, True, False)
    assert (seen.mode, seen.short_side, seen.filter, seen.antialias) == (
        evaluation,
        short_side,
        evaluation_filter,
        False,
    )
    if crop == "inception":
        assert (training.min_area, training.max_area, training.min_ratio, training.max_ratio) == (0.05, 1.0, 0.75, 1.33)


@pytest.mark.parametrize("views", [PAPER, RESMALL_448], ids=["BiT", "big_vision"])
def test_a_crop_of_384_comes_out_of_448(views: Views) -> None:
    crop = Crop(top=0, left=0, height=600, width=600, flip=False)
    viewport = training_viewport(crop, np.zeros(41), config=views.training, size=384)
    assert (viewport.height, viewport.width) == (448, 448)


def test_a_pre_training_is_evaluated_on_224_out_of_256() -> None:
    expected = Viewport(height=256, width=341, top=16, left=58, is_area=True)
    assert evaluation_viewport(375, 500, PRETRAINING.evaluation, size=224) == expected


@every_fault
def test_every_recipe_decodes_whole_images_and_ignores_exif() -> Iterator[str]:
    """As the authors' decoders do."""
    for name, recipe in RECIPES.items():
        job = recipe()
        augment = job.data.augment
        yield from differs(f"{name}: data.augment.scaled_decode", augment.scaled_decode, False)
        yield from differs(f"{name}: data.augment.exif", augment.exif, False)
        yield from differs(f"{name}: evaluation.transform.exif", job.evaluation.transform.exif, False)
        ratio = 1.33 if augment.crop == "inception" else pytest.approx(4 / 3)
        yield from differs(f"{name}: data.augment.max_ratio", augment.max_ratio, ratio)
