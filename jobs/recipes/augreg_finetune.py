"""Fine-tuning of AugReg's B/32 as in big_vision's configs/transfer.py, whose docstring publishes the results.

The steps, learning rates, warm-up, clipping and optimiser are those of "An Image is Worth 16x16 Words"
(paper_finetune.py). Images are prepared as in big_vision: an inception crop, or for CIFAR a random 384 out of a short
side of 448; evaluation takes the central 384 out of a short side of 448 (paper_images.py). The learning rate is the
best on held-out images. There is no dropout (vision_transformer's configs/augreg.py). Expected values are means of 5
runs on the test split, from the weights `howto-i21k-B/32`:
gs://vit_models/augreg/B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz. big_vision trains on 98 % of CIFAR,
99 % of ImageNet and 90 % of Pets and Flowers, and keeps SGD's momentum in bf16 (momentum_hp).
Command of the evaluation: patchline evaluate DIR --data.url URL-test
Command of each: patchline finetune RECIPE --initial.weights WEIGHTS --data.url URL --run-dir DIR (RECIPE_smoke: tiny)
"""

from jobs.recipes import recipes_in
from jobs.recipes.paper_finetune import transfer_job
from jobs.recipes.paper_images import CIFAR10, CIFAR100, FLOWERS, IMAGENET_1K, INCEPTION_448, PETS, RESMALL_448
from pipeline.training.settings.job import TrainingJob

_MODEL = "vit_b32"


def imagenet_384_augreg() -> TrainingJob:
    """ImageNet at 384 px with AugReg's B/32: inception crop, rate .03.

    Source: big_vision's configs/transfer.py. Expected: 83.27 % (83.22 to 83.33).
    """
    return transfer_job(
        _MODEL, num_images=IMAGENET_1K.num_images, steps=20_000, learning_rate=0.03, views=INCEPTION_448
    )


def cifar10_augreg() -> TrainingJob:
    """CIFAR-10 at 384 px with AugReg's B/32: random crop out of 448 px, rate .003.

    Source: big_vision's configs/transfer.py. Expected: 98.55 % (98.46 to 98.6).
    """
    return transfer_job(_MODEL, num_images=CIFAR10.num_images, steps=10_000, learning_rate=0.003, views=RESMALL_448)


def cifar100_augreg() -> TrainingJob:
    """CIFAR-100 at 384 px with AugReg's B/32: random crop out of 448 px, rate .01.

    Source: big_vision's configs/transfer.py. Expected: 91.35 % (91.09 to 91.62).
    """
    return transfer_job(_MODEL, num_images=CIFAR100.num_images, steps=10_000, learning_rate=0.01, views=RESMALL_448)


def pets_augreg() -> TrainingJob:
    """Oxford-IIIT Pets at 384 px with AugReg's B/32: inception crop, rate .003.

    Source: big_vision's configs/transfer.py. Expected: 93.78 % (93.62 to 94.00).
    """
    return transfer_job(_MODEL, num_images=PETS.num_images, steps=500, learning_rate=0.003, views=INCEPTION_448)


def flowers_augreg() -> TrainingJob:
    """Oxford Flowers-102 at 384 px with AugReg's B/32: inception crop, rate .003.

    Source: big_vision's configs/transfer.py. Expected: 99.43 % (99.42 to 99.45).
    """
    return transfer_job(_MODEL, num_images=FLOWERS.num_images, steps=500, learning_rate=0.003, views=INCEPTION_448)


RECIPES = recipes_in(globals())
