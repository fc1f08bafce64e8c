"""Small fine-tuning recipes: higher resolution, resampled position embeddings, a new zero head, SGD with momentum,
cosine decay, no weight decay, and clipping at 1 ("An Image is Worth 16x16 Words", Table 4 and appendix B.1.1). The
papers' recipes are in paper_finetune.py, augreg_finetune.py, bit_finetune.py, deit3_finetune.py and paper_vtab.py.

Command of each: patchline finetune RECIPE --initial.weights WEIGHTS --data.url URL --run-dir DIR (RECIPE_smoke: tiny)
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from jobs.recipes import (
    augreg_finetune,
    bit_finetune,
    deit3_finetune,
    paper_finetune,
    paper_vtab,
    photos,
    pretrain,
    recipes_in,
)
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.data.config import AugmentConfig
from pipeline.training.settings.job import OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig

# The flags of each recipe's command in help; "" stands for all recipes that are not named.
COMMAND_FLAGS: Mapping[str, tuple[str, ...]] = {
    "": ("--initial.weights WEIGHTS --data.url URL --run-dir DIR",),
    **dict.fromkeys(("digits_48", "cifar10_48"), ("--initial.weights RUN/weights --data.url URL --run-dir DIR",)),
}
_SGD = OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.0)


def digits_48() -> TrainingJob:
    """The digits_smoke model fine-tuned from 32 to 48 px (4 x 4 -> 6 x 6 patches).

    Source: the paper's fine-tuning, sized for the digits. Expected: 95 % or more on the test split.
    """
    job = pretrain.digits_smoke()
    return replace(
        job,
        model=replace(job.model, image_size=48),
        data=replace(job.data, augment=AugmentConfig(min_area=0.8, min_ratio=0.9, max_ratio=1.11, flip=False)),
        steps=100,
        clip_norm=1.0,
        optimizer=_SGD,
        schedule=ScheduleConfig(learning_rate=0.03, decay="cosine", warmup_steps=10),
        checkpoint=CheckpointConfig(every_steps=50),
    )


def cifar10_48() -> TrainingJob:
    """The cifar10_small model fine-tuned from 32 to 48 px.

    Source: the paper's CIFAR-10 fine-tuning (batch 512, SGD, cosine), shortened. Expected: a few points above the
    accuracy before fine-tuning.
    """
    job = pretrain.cifar10_small()
    return replace(
        job,
        model=replace(job.model, image_size=48),
        data=replace(job.data, augment=AugmentConfig(min_area=0.6, flip=True)),
        steps=500,
        global_batch=512,
        clip_norm=1.0,
        optimizer=_SGD,
        schedule=ScheduleConfig(learning_rate=0.03, decay="cosine", warmup_steps=50),
        checkpoint=CheckpointConfig(every_steps=250),
    )


RECIPES: dict[str, Callable[[], TrainingJob]] = {
    **photos.FINETUNE_RECIPES,
    **recipes_in(globals()),
    **paper_finetune.RECIPES,
    **augreg_finetune.RECIPES,
    **bit_finetune.RECIPES,
    **deit3_finetune.RECIPES,
    **paper_vtab.RECIPES,
}
