"""Plain ViT-S/16 on ImageNet-1k: "Better plain ViT baselines for ImageNet-1k" (Beyer, Zhai and Kolesnikov, 2022) and
big_vision's configs/vit_s16_i1k.py. It is the cheapest published result that can show that training works.

The model has fixed sines as positions, the mean of all tokens, the hidden tanh layer, softmax loss and no dropout.
Images get an inception crop, a flip, RandAugment of 2 operations at 10, and mixup 0.2. Training has batch 1024, Adam at
1e-3 with 10,000 steps of warm-up and cosine decay, clipping at 1, and weight decay 1e-4 that follows the schedule (0.1
in PyTorch's terms). The run trains on 99 % of the training set and is scored on the rest and on --evaluation.url every
2,500 steps. The number of steps is computed for 1,268,355 images; for a copy of another size, give the --steps that
`patchline plan RECIPE --num-images N` names.
The held-out part and the precision differ: big_vision holds out the last 1 % in TFDS's order; we hold out whole blocks
by a hash. Its model computes in fp32, which TPUs multiply in bf16, and keeps Adam's first moment in bf16 (here:
--optimizer.first-moment bf16). Here activations are bf16, and moments, master weights, head and loss fp32. Images are
prepared as in paper_images.py.
Command of each: patchline pretrain RECIPE --data.url URL --run-dir DIR (RECIPE_smoke: the same, tiny, on a CPU)
"""

from dataclasses import replace

from jobs.recipes import recipes_in
from jobs.recipes.paper_images import IMAGENET_1K_99, PRETRAINING, PUBLISHED
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.data.config import AugmentConfig, DataConfig, MixupConfig, RandAugmentConfig
from pipeline.models.config import ModelConfig
from pipeline.training.settings.job import EngineConfig, OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig, steps_of
from shards.config import HeldOutConfig

_BATCH = 1024
_MIXUP = MixupConfig(alpha=0.2)
_OPTIMIZER = OptimizerConfig(name="adamw", weight_decay=1e-4, decay_scale="schedule")


def vit_s16_i1k_plain() -> TrainingJob:
    """Plain ViT-S/16 on ImageNet-1k from scratch, 90 epochs.

    Source: big_vision's configs/vit_s16_i1k.py. Expected: 76.5 % on the validation split at 224 px (the same file), in
    6 to 7 hours on a TPUv3-8.
    """
    return _plain(epochs=90)


def vit_s16_i1k_plain_300ep() -> TrainingJob:
    """Plain ViT-S/16 on ImageNet-1k from scratch, 300 epochs.

    Source: as vit_s16_i1k_plain, with its total_epochs 300. Expected: 80 % on the validation split at 224 px (the
    abstract of the paper), in less than a day on a TPUv3-8.
    """
    return _plain(epochs=300)


def cifar10_plain() -> TrainingJob:
    """The plain recipe on CIFAR-10: a ViT of 1.2 M parameters with patches of 4 px, fp32, 90 epochs. OURS.

    Source: ours, after vit_s16_i1k_plain: the same kind of model, loss, mixup and optimiser; batch 256, crops of 40 %
    of the area or more, and a warm-up of 9 % of the steps, as in that recipe. No RandAugment: its shifts of 100 pixels
    and its squares of 80 would leave a third of images of 32 px grey. Expected: 67.1 % with --steps 3906
    --schedule.warmup-steps 351, 20 epochs (docs/benchmarks.md); the full 90 epochs were not trained.
    """
    return TrainingJob(
        model=ModelConfig(
            name="vit",
            image_size=32,
            num_classes=0,
            patch=4,
            depth=6,
            width=128,
            mlp_width=512,
            num_heads=4,
            pooling="average",
            representation=True,
            position="sincos2d",
        ),
        data=DataConfig(
            lanes=32,
            window_blocks=4,
            augment=AugmentConfig(min_area=0.4, flip=True),
            mixup=_MIXUP,
        ),
        steps=17_578,
        global_batch=256,
        clip_norm=1.0,
        optimizer=_OPTIMIZER,
        schedule=ScheduleConfig(learning_rate=1e-3, decay="cosine", warmup_steps=1580),
        engine=EngineConfig(zero_stage=1, precision="fp32"),
        checkpoint=CheckpointConfig(every_steps=500),
        log_every_steps=10,
    )


def _plain(*, epochs: int) -> TrainingJob:
    return replace(
        PUBLISHED,
        model=ModelConfig(
            name="vit_s16",
            image_size=224,
            num_classes=0,
            pooling="average",
            representation=True,
            position="sincos2d",
        ),
        data=DataConfig(
            held_out=HeldOutConfig(share=0.01),
            augment=PRETRAINING.training,
            randaugment=RandAugmentConfig(num_ops=2, magnitude=10),
            mixup=_MIXUP,
        ),
        steps=steps_of(epochs, num_images=IMAGENET_1K_99.num_images, global_batch=_BATCH),
        global_batch=_BATCH,
        clip_norm=1.0,
        optimizer=_OPTIMIZER,
        schedule=ScheduleConfig(learning_rate=1e-3, decay="cosine", warmup_steps=10_000),
        evaluation=replace(PUBLISHED.evaluation, every_steps=2500),
    )


RECIPES = recipes_in(globals())
