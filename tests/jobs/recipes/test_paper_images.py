"""How images are prepared in the papers' recipes, written down independently; and recipes of JFT and ImageNet-21k are
read once by any number of ranks from 8 to 512, within a host's memory."""

from collections.abc import Iterator

import numpy as np
import pytest

from jobs.recipes import augreg_finetune, paper_finetune, paper_imagenet, paper_jft, paper_vtab, pretrain
from jobs.recipes.paper_images import CODE, INCEPTION_448, PAPER, PRETRAINING, RESMALL_448, Views
from pipeline.data.augment import Crop, Viewport, evaluation_viewport, training_viewport
from pipeline.training.zero.batch_plan import shared_lanes, times_read
from shards.order import SampleOrder
from shards.reading.windows import window_bound_bytes
from shards.sample_rows import BlockTable
from tests.rigs.faults import differs, every_fault

IMAGE_BYTES, BLOCK = 110_000, 64
NUM_BLOCKS = 20_000  # 1.3 million images: more of them need no more memory
OF_PAPERS = {
    **paper_jft.RECIPES,
    **paper_imagenet.RECIPES,
    **paper_finetune.RECIPES,
    **augreg_finetune.RECIPES,
    **paper_vtab.RECIPES,
}


@every_fault
def test_recipes_of_large_datasets_serve_8_to_512_ranks() -> Iterator[str]:
    sizes = np.full(NUM_BLOCKS, BLOCK)
    ends = np.cumsum(sizes * IMAGE_BYTES)
    blocks = BlockTable(
        shard=np.zeros(NUM_BLOCKS, dtype=np.int64),
        first_byte=ends - sizes * IMAGE_BYTES,
        end_byte=ends,
        first_sample_id=np.cumsum(sizes) - sizes,
        num_samples=sizes,
        read_bytes=sizes * IMAGE_BYTES,
    )
    bounds = dict[tuple[int, int, int, int], int]()
    for name in (name for name in pretrain.RECIPES if "_jft" in name or "_i21k" in name):
        job = pretrain.RECIPES[name]()
        data, batch = job.data, job.global_batch
        if data.lanes * data.window_blocks < 256:
            yield f"{name} shuffles {data.lanes * data.window_blocks} blocks, fewer than by default"
        for num_ranks in (8, 16, 32, 64, 128, 256, 512):
            if shared_lanes(data.lanes, data.window_blocks, num_ranks=num_ranks):
                yield f"{name} is refused on {num_ranks} ranks"
            if times_read(data.lanes, num_ranks=num_ranks) > 1.12:
                yield f"{name} is read {times_read(data.lanes, num_ranks=num_ranks)} times by {num_ranks} ranks"
            key = (data.lanes, data.window_blocks, batch, num_ranks)
            if key not in bounds:
                order = SampleOrder(sizes, seed=1, lanes=data.lanes, window_blocks=data.window_blocks)
                bounds[key] = window_bound_bytes(
                    blocks, order, batch_size=batch, num_ranks=num_ranks, batches_in_use=data.steps_ahead
                )
            if 8 * bounds[key] > data.memory_limit_bytes:
                yield f"{name} may read ahead {8 * bounds[key] / 1e9:.1f} GB on a host of 8 of {num_ranks} ranks"


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
    for name, recipe in OF_PAPERS.items():
        job = recipe()
        augment = job.data.augment
        yield from differs(f"{name}: data.augment.scaled_decode", augment.scaled_decode, False)
        yield from differs(f"{name}: data.augment.exif", augment.exif, False)
        yield from differs(f"{name}: evaluation.transform.exif", job.evaluation.transform.exif, False)
        ratio = 1.33 if augment.crop == "inception" else pytest.approx(4 / 3)
        yield from differs(f"{name}: data.augment.max_ratio", augment.max_ratio, ratio)
