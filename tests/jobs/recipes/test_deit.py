"""DeiT's distilled recipes compared with main.py's defaults and README_deit.md, written down independently."""

from dataclasses import replace

import pytest

from jobs.recipes.deit import RECIPES
from pipeline.models.flops import num_parameters
from pipeline.training.settings.job import TeacherConfig

ROWS = [  # recipe, parameters of timm's model of 1000 classes, accuracy
    ("deit_ti16_i1k_distilled", 5_910_800, "74.5 %"),
    ("deit_s16_i1k_distilled", 22_436_432, "81.2 %"),
    ("deit_b16_i1k_distilled", 87_338_192, "83.4 %"),
]


@pytest.mark.parametrize(("name", "parameters", "accuracy"), ROWS)
def test_distilled(name: str, parameters: int, accuracy: str) -> None:
    """--batch-size 256 (x 4) --epochs 300 --opt adamw --lr 5e-4 (x 1024 / 512) --weight-decay 0.05 --sched cosine
    --min-lr 1e-5 --warmup-epochs 5 --drop 0 --drop-path 0.1 --smoothing 0.1 --mixup .8 --cutmix 1.0 --repeated-aug
    --aa rand-m9-mstd0.5-inc1 --train-interpolation bicubic --eval-crop-ratio 0.875 --distillation-type hard
    --distillation-alpha 0.5."""
    job = RECIPES[name]()
    assert num_parameters(replace(job.model, num_classes=1000)) == parameters
    assert (job.model.image_size, job.model.stochastic_depth, job.model.dropout) == (224, 0.1, 0.0)
    assert (job.model.distillation_token, job.model.gelu, job.model.layer_norm_epsilon) == (True, "exact", 1e-6)
    assert (job.steps, job.global_batch, job.schedule.warmup_steps) == (375_300, 1024, 6255)
    assert (job.schedule.learning_rate, job.schedule.decay, job.schedule.final_learning_rate) == (1e-3, "cosine", 1e-5)
    assert (job.optimizer.name, job.optimizer.weight_decay, job.optimizer.epsilon) == ("adamw", 0.05, 1e-8)
    assert (job.loss, job.label_smoothing, job.clip_norm, job.ema_decay) == ("softmax", 0.1, 0.0, 0.0)
    augment, mixup = job.data.augment, job.data.mixup
    assert (mixup.alpha, mixup.cutmix_alpha, mixup.binary_targets) == (0.8, 1.0, False)
    assert (augment.crop, augment.min_area, augment.filter, augment.repeats) == ("random_resized", 0.08, "bicubic", 3)
    assert (job.data.randaugment.num_ops, job.data.randaugment.magnitude) == (2, 9)
    transform = job.evaluation.transform
    assert (transform.mode, transform.short_side, transform.filter) == ("central_crop", 256, "bicubic")
    taught = replace(job, teacher=TeacherConfig(weights="w", target="hard", share=0.5))
    assert taught.model == job.model, "the flags of its command fit it"
    assert accuracy in (RECIPES[name].__doc__ or "")


def test_no_row_is_missing() -> None:
    assert set(RECIPES) == {row[0] for row in ROWS}
