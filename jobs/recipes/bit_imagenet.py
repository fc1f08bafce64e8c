"""Pre-training of ResNet-18 and 34 in BiT's form on ImageNet-1k, with the settings of BiT-S ("Big Transfer", Kolesnikov
et al., 2020, section 3.3).

The settings are SGD with momentum 0.9 at rate 0.03 for every 256 images, batch 4096, weight decay 1e-4, 5,000 steps of
warm-up, 90 epochs, a tenth of the rate after 30, 60 and 80 epochs, inception crop, flip, and 224 px. The number of
steps is computed for 1,281,167 images.
[unverified]: whether these settings suit these models. Neither BiT nor the ViT paper trains ResNets below 50 layers.
"Deep Residual Learning" does, with batch norm and post-activation, batch 256, rate 0.1 and 600,000 iterations.
[unverified], not published: how BiT-S is evaluated (here as in big_vision's configs/bit_i1k.py), and whether biases and
norms decay (here they do not). big_vision's bit_i1k.py has other values: a rate of 0.1 for every 256 images, 1,000
steps of warm-up, cosine decay, clipping at 1.
Command of each: patchline pretrain RECIPE --data.url URL --run-dir DIR (RECIPE_smoke: the same, tiny, on a CPU)
"""

from dataclasses import replace

from jobs.recipes import recipes_in
from jobs.recipes.paper_images import IMAGENET_1K, PRETRAINING, PUBLISHED
from pipeline.data.config import DataConfig
from pipeline.models.config import ModelConfig
from pipeline.training.settings.job import OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig, steps_of

_BATCH = 4096
_EPOCHS, _FALLS = 90, (30, 60, 80)  # BiT-S: the number of epochs, and those after which the rate falls


def bit_r18x1_i1k() -> TrainingJob:
    """ResNet-18 in BiT's form on ImageNet-1k, 90 epochs.

    Source: BiT-S's values [unverified for this model]. Expected: not published. With batch norm and post-activation,
    ResNet-18 has 69.76 % (torchvision), and 72.12 % over ten crops ("Deep Residual Learning", Table 2).
    """
    return _bit_s("bit_r18x1")


def bit_r34x1_i1k() -> TrainingJob:
    """ResNet-34 in BiT's form on ImageNet-1k, 90 epochs.

    Source: BiT-S's values [unverified for this model]. Expected: not published. With batch norm and post-activation,
    ResNet-34 has 73.31 % (torchvision), and 74.97 % over ten crops ("Deep Residual Learning", Table 2).
    """
    return _bit_s("bit_r34x1")


def _bit_s(name: str) -> TrainingJob:
    steps = steps_of(_EPOCHS, num_images=IMAGENET_1K.num_images, global_batch=_BATCH)
    return replace(
        PUBLISHED,
        model=ModelConfig(name=name, image_size=224, num_classes=0),
        data=DataConfig(augment=PRETRAINING.training),
        steps=steps,
        global_batch=_BATCH,
        clip_norm=0.0,
        optimizer=OptimizerConfig(name="sgd", momentum=0.9, weight_decay=1e-4),
        schedule=ScheduleConfig(
            learning_rate=0.03 * _BATCH / 256,
            decay="staircase",
            warmup_steps=5_000,
            stair_steps=tuple(steps * fall // _EPOCHS for fall in _FALLS),
        ),
    )


RECIPES = recipes_in(globals())
