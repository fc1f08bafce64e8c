"""What all fine-tuning recipes of the papers share: "An Image is Worth 16x16 Words", Table 4 and appendix B.1.1.

SGD with momentum 0.9, cosine decay, batch 512, no weight decay, clipping at 1, softmax loss; both layers of the head
are dropped for one zero-initialised linear layer.
"""

from jobs.recipes.paper_views import Views
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.data.config import DataConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models.config import ModelConfig
from pipeline.training.settings.job import EngineConfig, OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig

_SMALL_SET = 20_000
_DROPPED = ("vit_l16", "vit_h14", "r50_vit_b16", "r50_vit_l32")


def warmup_steps_of(num_images: int) -> int:
    """Steps of warm-up for a set of this size: 100 below 20,000 images, else 500.

    Source: big_transfer's bit_hyperrule.py. The released code of the ViT paper has 500 (vit_jax/configs/common.py), 100
    for small sets (augreg.py), and big_vision's transfer.py the same two.
    """
    return 100 if num_images < _SMALL_SET else 500


def dropout_of(name: str) -> float:
    """The dropout rate with which the published code fine-tunes a model that was not trained by AugReg.

    Source: vision_transformer, vit_jax/configs/models.py: 0.1 for L/16, H/14, R50+B/16 and R50+L/32, 0 for B/16, B/32
    and L/32; their README of 2021 says that the better of the two was chosen for each. It does not know other hybrids:
    0 here. AugReg's weights are always fine-tuned without (configs/augreg.py).
    """
    return 0.1 if name in _DROPPED else 0.0


def transfer_job(
    name: str, *, num_images: int, steps: int, learning_rate: float, views: Views, image_size: int = 384
) -> TrainingJob:
    """The fine-tuning of the model of this name on a set of `num_images` images."""
    return TrainingJob(
        model=ModelConfig(name=name, image_size=image_size, num_classes=0, dropout=dropout_of(name)),
        data=DataConfig(augment=views.training),
        steps=steps,
        global_batch=512,
        loss="softmax",
        clip_norm=1.0,
        optimizer=OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.0),
        schedule=ScheduleConfig(learning_rate=learning_rate, decay="cosine", warmup_steps=warmup_steps_of(num_images)),
        engine=EngineConfig(zero_stage=1, precision="bf16"),
        checkpoint=CheckpointConfig(every_steps=500),
        evaluation=EvaluationConfig(transform=views.evaluation),
        log_every_steps=10,
    )
