"""Fine-tuning of BiT's ResNets by BiT-HyperRule: "Big Transfer" (Kolesnikov et al., 2020) and big_transfer's
bit_hyperrule.py.

All recipes have SGD with momentum 0.9 at rate .003, batch 512, no weight decay and no clipping. Everything else depends
on the number and the size of the images. There are 500 steps below 20,000 images, 10,000 below 500,000, and 20,000
otherwise; the learning rate falls to a tenth three times. From 20,000 images on, there is mixup of 0.1. Images below
96 x 96 are resized to 160 x 160 and cut to a random 128 x 128, others to 512 x 512 and 480 x 480 (the paper has 448 and
384 for all models but R152x4). Images are flipped at random, and resized directly for an evaluation.
The ViT paper fine-tunes its ResNets both in this way and by its own sweep (--model.name bit_r50x1 with
paper_finetune.py's recipes), and reports the better result (appendix B.1.1).
The recipes differ from BiT in mixup, which has one weight per pair here and one per batch in BiT. BiT's TensorFlow and
JAX code trains on 98 % of CIFAR and 99 % of ImageNet (--data.held-out.share .02 or .01), flips every image rather than
half of them, and leaves the last batch out of evaluations; its PyTorch code does none of this, but resizes with
antialiasing.
The model is R50x1; --model.name takes another. Expected values are for weights from ImageNet-21k (BiT-M).
Command of each: patchline finetune RECIPE --initial.weights WEIGHTS --data.url URL --run-dir DIR (RECIPE_smoke: tiny)
"""

from dataclasses import replace

from jobs.recipes import recipes_in
from jobs.recipes.paper_finetune import transfer_job, warmup_steps_of
from jobs.recipes.paper_images import CIFAR10, CIFAR100, FLOWERS, IMAGENET_1K, PAPER, PETS, PaperDataset
from pipeline.data.config import MixupConfig
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig

_RATE = 0.003
_SMALL_SET, _MEDIUM_SET = 20_000, 500_000


def imagenet_bit() -> TrainingJob:
    """ImageNet at 480 px by BiT-HyperRule, 20,000 steps.

    Source: big_transfer's bit_hyperrule.py. Expected: 80.68 % with R50x1, 85.15 % with R152x2 (its README).
    """
    return _hyper_rule(IMAGENET_1K, image_size=480, resize_pixels=512)


def cifar10_bit() -> TrainingJob:
    """CIFAR-10 at 128 px by BiT-HyperRule, 10,000 steps.

    Source: big_transfer's bit_hyperrule.py. Expected: close to its README's 97.4 % with R50x1 and 98.5 % with R152x2,
    which were measured with batch 128 and rate .001.
    """
    return _hyper_rule(CIFAR10, image_size=128, resize_pixels=160)


def cifar100_bit() -> TrainingJob:
    """CIFAR-100 at 128 px by BiT-HyperRule, 10,000 steps.

    Source: big_transfer's bit_hyperrule.py. Expected: close to its README's 86.6 % with R50x1 and 91.3 % with R152x2,
    which were measured with batch 128 and rate .001.
    """
    return _hyper_rule(CIFAR100, image_size=128, resize_pixels=160)


def pets_bit() -> TrainingJob:
    """Oxford-IIIT Pets at 480 px by BiT-HyperRule, 500 steps, without mixup.

    Source: big_transfer's bit_hyperrule.py. Expected: not published for these models.
    """
    return _hyper_rule(PETS, image_size=480, resize_pixels=512)


def flowers_bit() -> TrainingJob:
    """Oxford Flowers-102 at 480 px by BiT-HyperRule, 500 steps, without mixup.

    Source: big_transfer's bit_hyperrule.py. Expected: not published for these models.
    """
    return _hyper_rule(FLOWERS, image_size=480, resize_pixels=512)


def _hyper_rule(dataset: PaperDataset, *, image_size: int, resize_pixels: int) -> TrainingJob:
    num_images = dataset.num_images
    steps, stairs = _steps_of(num_images)
    job = transfer_job(
        "bit_r50x1", num_images=num_images, steps=steps, learning_rate=_RATE, views=PAPER, image_size=image_size
    )
    return replace(
        job,
        data=replace(
            job.data,
            augment=replace(job.data.augment, resize_pixels=resize_pixels),
            mixup=MixupConfig(alpha=0.1 if num_images >= _SMALL_SET else 0.0),
        ),
        clip_norm=0.0,
        schedule=ScheduleConfig(
            learning_rate=_RATE, decay="staircase", stair_steps=stairs, warmup_steps=warmup_steps_of(num_images)
        ),
    )


def _steps_of(num_images: int) -> tuple[int, tuple[int, int, int]]:
    """Returns the number of steps, and the last step before each fall of the rate."""
    if num_images < _SMALL_SET:
        return 500, (200, 300, 400)
    if num_images < _MEDIUM_SET:
        return 10_000, (3000, 6000, 9000)
    return 20_000, (6000, 12_000, 18_000)


RECIPES = recipes_in(globals())
