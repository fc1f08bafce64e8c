"""Pre-training on JFT-3B: "Scaling Vision Transformers" (Zhai et al., 2022), as in big_vision's train_vit_g.py.

The recipes take the following from that file: the sizes of Table 2, 224 px, pooling by attention, positions with an
initial deviation of 1 / sqrt(width) (models/vit.py), sigmoid loss summed over classes with a head bias of -10, batch
16,384, one million steps, the rate of 8e-4 with 10,000 steps of warm-up, decay by rsqrt at a timescale of 10,000 and a
cooldown of 50,000 steps, big_vision's Adafactor (factored second moments, whose decay rises to 0.999, and a momentum of
0.9 in bf16), clipping at 1, weight decay of 0.03 x 8e-4 that follows the schedule, 100 times as much of it for the
head's matrix, inception crop, flip, and the central 224 of a short side of 256 to evaluate.
Images are prepared as in paper_images.py. JFT-3B is not public; the paper says "nearly three billion" images. The
recipes have not been trained here.
Command of each: patchline pretrain RECIPE --data.url URL --run-dir DIR (RECIPE_smoke: the same, tiny, on a CPU)
"""

from dataclasses import replace

from jobs.recipes import recipes_in
from jobs.recipes.paper_images import PRETRAINING, PUBLISHED, for_many_ranks
from pipeline.data.config import DataConfig
from pipeline.models.config import SIZES, ModelConfig
from pipeline.training.settings.job import OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig

_LEARNING_RATE = 8e-4


def vit_g14_jft3b() -> TrainingJob:
    """ViT-g/14 on JFT-3B, 1,000,000 steps.

    Source: big_vision's train_vit_g.py. Expected: the file gives no figure.
    """
    return _jft_3b("vit_g14")


def vit_bigg14_jft3b() -> TrainingJob:
    """ViT-G/14 on JFT-3B, 1,000,000 steps.

    Source: big_vision's train_vit_g.py with its variant G/14. Expected: 90.45 % on ImageNet after fine-tuning and
    84.86 % with 10 images per class (the abstract); the steps behind these figures are not in the file [unverified].
    """
    return _jft_3b("vit_bigg14")


def _jft_3b(name: str) -> TrainingJob:
    return replace(
        PUBLISHED,
        model=ModelConfig(
            name=name,
            image_size=224,
            num_classes=0,
            pooling="attention",
            position_std=SIZES[name].width ** -0.5,
            head_bias=-10.0,
        ),
        data=for_many_ranks(DataConfig(augment=PRETRAINING.training)),
        steps=1_000_000,
        global_batch=16_384,
        loss="sigmoid",
        clip_norm=1.0,
        optimizer=OptimizerConfig(
            name="adafactor",
            first_moment="bf16",
            weight_decay=0.03 * _LEARNING_RATE,
            decay_scale="schedule",
            head_decay=100.0,
        ),
        schedule=ScheduleConfig(
            learning_rate=_LEARNING_RATE, decay="rsqrt", warmup_steps=10_000, timescale=10_000, cooldown_steps=50_000
        ),
    )


RECIPES = recipes_in(globals())
