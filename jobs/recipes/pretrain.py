"""Small pre-training recipes for any machine, and masked patch prediction ("An Image is Worth 16x16 Words", appendix
B.1.2). The papers' other recipes are in paper_jft.py, paper_imagenet.py, paper_ablations.py, augreg.py, plain_vit.py,
bit_imagenet.py, deit.py, deit3.py, sam.py and scaling.py, and those for your own photographs in photos.py.

Command of each: patchline pretrain RECIPE --data.url URL --run-dir DIR (RECIPE_smoke: the same, tiny, on a CPU)
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from jobs.recipes import (
    augreg,
    bit_imagenet,
    deit,
    deit3,
    paper_ablations,
    paper_imagenet,
    paper_jft,
    photos,
    plain_vit,
    recipes_in,
    sam,
    scaling,
)
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.data.config import AugmentConfig, DataConfig
from pipeline.models.config import MEAN_COLOURS, MaskedTarget, ModelConfig, num_masked_outputs
from pipeline.training.settings.job import EngineConfig, OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig

# The flags of each recipe's command in help; "" stands for all recipes that are not named.
COMMAND_FLAGS: Mapping[str, tuple[str, ...]] = {
    "": ("--data.url URL --run-dir DIR",),
    **dict.fromkeys(("cifar10_small", "cifar10_plain"), ("--data.url URL --evaluation.url URL-test --run-dir DIR",)),
    **dict.fromkeys(
        (
            *("vit_b16_i1k", "vit_b32_i1k", "vit_l16_i1k", "vit_l32_i1k", "vit_s16_i1k_plain"),
            *("vit_s16_i1k_plain_300ep", "bit_r18x1_i1k", "bit_r34x1_i1k", "deit3_s16_i1k", "deit3_b16_i1k"),
            *("vit_ti16_i1k_augreg", "vit_s32_i1k_augreg", "vit_s16_i1k_augreg", "vit_b32_i1k_augreg"),
            *("vit_b16_i1k_augreg", "vit_l16_i1k_augreg", "vit_s16_i1k_augreg_released"),
            *("vit_b32_i1k_augreg_released", "vit_b16_i1k_augreg_released", "vit_b16_i1k_sam", "vit_s16_i1k_sam"),
        ),
        ("--data.url URL --evaluation.url URL-val --run-dir DIR",),
    ),
    **dict.fromkeys(
        ("masked_patches_15", "masked_patches_parts", "masked_patches_pixels", "vit_g14_jft3b", "vit_bigg14_jft3b"),
        ("--data.url URL --fewshot.url URL --run-dir DIR",),
    ),
    **dict.fromkeys(
        ("deit_ti16_i1k_distilled", "deit_s16_i1k_distilled", "deit_b16_i1k_distilled"),
        (
            "--data.url URL --evaluation.url URL-val --run-dir DIR --teacher.weights WEIGHTS --teacher.target hard "
            "--teacher.share 0.5",
        ),
    ),
    "vit_shapes_jft": ("--model.depth 16 --data.url URL --run-dir DIR",),
}
# Position embeddings start larger than the paper's 0.02, because they cannot grow enough in a few hundred steps.
_TINY = ModelConfig(
    name="vit",
    image_size=32,
    num_classes=0,
    patch=8,
    depth=4,
    width=128,
    mlp_width=512,
    num_heads=4,
    position_std=0.3,
)


def digits_smoke() -> TrainingJob:
    """A ViT of 0.8 M parameters on 1,438 handwritten digits at 32 px: the whole pipeline in half a minute on two cores.

    Source: ours, sized for scikit-learn's load_digits. Expected: 95 % or more on the test split after 300 steps.
    """
    return TrainingJob(
        model=_TINY,
        data=DataConfig(
            lanes=8,
            window_blocks=2,
            augment=AugmentConfig(min_area=0.75, min_ratio=0.9, max_ratio=1.11, flip=False),
        ),
        steps=300,
        global_batch=128,
        clip_norm=1.0,
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.05),
        schedule=ScheduleConfig(learning_rate=1e-3, decay="cosine", warmup_steps=30),
        engine=EngineConfig(zero_stage=1, precision="auto"),
        checkpoint=CheckpointConfig(every_steps=25),
    )


def cifar10_small() -> TrainingJob:
    """A ViT of 1.2 M parameters on CIFAR-10 from scratch, fp32, 45 epochs: three quarters of an hour on two cores.

    Source: ours. Expected: 69 % on the test split after 30 epochs (a small ViT without pre-training).
    """
    return TrainingJob(
        model=replace(_TINY, depth=6),
        data=DataConfig(lanes=32, window_blocks=4, augment=AugmentConfig(min_area=0.4, flip=True)),
        steps=8800,
        global_batch=256,
        clip_norm=1.0,
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.05),
        schedule=ScheduleConfig(learning_rate=1e-3, decay="cosine", warmup_steps=500),
        engine=EngineConfig(zero_stage=1, precision="fp32"),
        checkpoint=CheckpointConfig(every_steps=500),
        log_every_steps=10,
    )


def photos_smoke() -> TrainingJob:
    """A small ViT at 64 px on photographs of any size, with the paper's inception crop, to test a folder of images.

    Source: ours. Expected: the loss falls below ln(classes) within 100 steps on a few hundred photographs.
    """
    return TrainingJob(
        model=ModelConfig(
            name="vit", image_size=64, num_classes=0, patch=16, depth=4, width=192, mlp_width=768, num_heads=3
        ),
        data=DataConfig(lanes=8, window_blocks=2, augment=AugmentConfig(min_area=0.05)),
        steps=100,
        global_batch=64,
        clip_norm=1.0,
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.05),
        schedule=ScheduleConfig(learning_rate=1e-3, decay="cosine", warmup_steps=10),
        engine=EngineConfig(zero_stage=1, precision="auto"),
        checkpoint=CheckpointConfig(every_steps=50),
    )


def masked_patches() -> TrainingJob:
    """ViT-B/16 by masked patch prediction, without labels: 14 epochs of JFT-300M.

    Source: section 4.6 and appendix B.1.2; weight decay and augmentation [unverified]: those of the JFT models.
    Expected: 79.9 % on ImageNet after fine-tuning, 2 % above training from scratch. The labels of the dataset are not
    used.
    """
    job = paper_jft.vit_b16_jft()
    return replace(
        job,
        model=ModelConfig(name="vit_b16", image_size=224, num_classes=MEAN_COLOURS, masked_patches=True),
        steps=1_000_000,
        loss="softmax",
        schedule=ScheduleConfig(learning_rate=2e-4, decay="cosine", warmup_steps=10_000),
    )


def masked_patches_100k() -> TrainingJob:
    """ViT-B/16 by masked patch prediction, the first 100,000 steps on JFT-300M.

    Source: appendix B.1.2, which found that more steps add little. It does not say whether the schedule ended at this
    step; here it does. Expected: not published; "similar" to masked_patches.
    """
    return replace(masked_patches(), steps=100_000)


def masked_patches_i1k_100k() -> TrainingJob:
    """ViT-B/16 by masked patch prediction on ImageNet-1k, 100,000 steps: 320 epochs.

    Source: appendix B.1.2, which reports similar gains on ImageNet, but not the number of steps; here it is that of
    masked_patches_100k [unverified]. Expected: not published.
    """
    return masked_patches_100k()


def masked_patches_15() -> TrainingJob:
    """ViT-B/16 by masked patch prediction with 15 % of the patches corrupted, as in BERT.

    Source: appendix B.1.2, which names no other change. Expected: no figure is published; few-shot scores were slightly
    worse than with half of the patches.
    """
    job = masked_patches()
    return replace(job, model=replace(job.model, masked_share=0.15))


def masked_patches_parts() -> TrainingJob:
    """ViT-B/16 by masked patch prediction of a 4 x 4 version of each patch: 16 predictions of 512 colours.

    Source: appendix B.1.2, target (2). Expected: no figure is published; it "worked quite well", but the mean colour of
    masked_patches had the best few-shot scores.
    """
    return _masked("parts")


def masked_patches_pixels() -> TrainingJob:
    """ViT-B/16 by masked patch prediction of all pixels of each patch, by mean squared error.

    Source: appendix B.1.2, target (3): L2 on 256 pixels of 3 channels. Their scale is not published; here they are as
    the model sees them, in [-1, 1] [unverified]. Expected: no figure is published; slightly worse than the other two.
    """
    return _masked("pixels")


def _masked(target: MaskedTarget) -> TrainingJob:
    job = masked_patches()
    num_outputs = num_masked_outputs(target, side=job.model.stride)
    return replace(job, model=replace(job.model, masked_target=target, num_classes=num_outputs))


RECIPES: dict[str, Callable[[], TrainingJob]] = {
    **recipes_in(globals()),
    **paper_jft.RECIPES,
    **paper_imagenet.RECIPES,
    **augreg.RECIPES,
    **paper_ablations.RECIPES,
    **plain_vit.RECIPES,
    **photos.RECIPES,
    **bit_imagenet.RECIPES,
    **deit.RECIPES,
    **deit3.RECIPES,
    **sam.RECIPES,
    **scaling.RECIPES,
}
