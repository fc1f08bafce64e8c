"""SAM's recipes compared with what is known of "When Vision Transformers Outperform ResNets", written down
independently."""

from dataclasses import replace

import pytest

from jobs.recipes.paper_imagenet import vit_b16_i1k
from jobs.recipes.sam import RECIPES
from jobs.recipes.shorter import smoke

ROWS = [("vit_b16_i1k_sam", "vit_b16", 0.2, "79.9 %"), ("vit_s16_i1k_sam", "vit_s16", 0.1, "78.1 %")]


@pytest.mark.parametrize(("name", "model", "rho", "accuracy"), ROWS)
def test_imagenet_1k(name: str, model: str, rho: float, accuracy: str) -> None:
    """vit_i1k_gsam_no_aug.py: batch_size 4096, num_epochs 300, lr 0.003, warmup_steps 10_000, grad_clip_norm 1.0,
    "paper used 0.3, effective wd=0.3*lr", decode_jpeg_and_inception_crop(224)|flip_lr, rep_size False."""
    job = RECIPES[name]()
    assert (job.model.name, job.model.image_size, job.model.representation) == (model, 224, False)
    assert (job.steps, job.global_batch) == (round(300 * 1_281_167 / 4096), 4096)
    optimizer, schedule = job.optimizer, job.schedule
    assert (optimizer.name, optimizer.sam_rho, optimizer.weight_decay, optimizer.decay_scale) == (
        *("adamw", rho, 0.3),
        "rate",
    )
    assert (schedule.learning_rate, schedule.warmup_steps, job.clip_norm) == (3e-3, 10_000, 1.0)
    augment = job.data.augment
    assert (augment.crop, augment.min_area, augment.flip) == ("inception", 0.05, True)
    assert (job.data.mixup.is_on, job.data.randaugment.num_ops, job.engine.zero_stage) == (False, 0, 1)
    assert accuracy in (RECIPES[name].__doc__ or "")
    assert smoke(job).optimizer == job.optimizer


def test_without_sam_it_is_the_papers_run() -> None:
    job, without = RECIPES["vit_b16_i1k_sam"](), vit_b16_i1k()
    optimizer, model = replace(job.optimizer, sam_rho=0.0), replace(job.model, representation=True)
    assert replace(job, optimizer=optimizer, model=model) == without


def test_no_row_is_missing() -> None:
    assert set(RECIPES) == {row[0] for row in ROWS}
    assert all(RECIPES[name].__name__ == name for name in RECIPES)
