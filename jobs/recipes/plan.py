"""Recipes of `patchline plan`: every training recipe, with the dataset that it is meant for."""

from collections.abc import Callable

from jobs.recipes import (
    augreg,
    augreg_finetune,
    augreg_released,
    bit_finetune,
    bit_imagenet,
    deit3,
    finetune,
    paper_ablations,
    paper_datasets,
    paper_finetune,
    paper_imagenet,
    paper_jft,
    paper_vtab,
    plain_vit,
    pretrain,
    scaling,
)
from jobs.recipes.paper_datasets import PaperDataset
from jobs.settings.models import PlanJob
from pipeline.training.settings.job import TrainingJob

_UNKNOWN = PaperDataset(name="", num_images=0, num_classes=0)
_TRANSFERS = {  # by the first word of a fine-tuning recipe
    "imagenet": paper_datasets.IMAGENET_1K,
    "cifar10": paper_datasets.CIFAR10,
    "cifar100": paper_datasets.CIFAR100,
    "pets": paper_datasets.PETS,
    "flowers": paper_datasets.FLOWERS,
}
_AUGREG = (*augreg.RECIPES, *augreg_released.RECIPES)
_FINETUNING = (*paper_finetune.RECIPES, *augreg_finetune.RECIPES, *bit_finetune.RECIPES)
_DATASETS: dict[str, PaperDataset] = {
    "digits_smoke": paper_datasets.DIGITS,
    "digits_48": paper_datasets.DIGITS,
    "cifar10_small": paper_datasets.CIFAR10,
    "cifar10_48": paper_datasets.CIFAR10,
    "cifar10_plain": paper_datasets.CIFAR10,
    **dict.fromkeys((*paper_jft.RECIPES, *paper_ablations.RECIPES, "masked_patches"), paper_datasets.JFT),
    **{f"masked_patches_{name}": paper_datasets.JFT for name in ("100k", "15", "parts", "pixels")},
    "masked_patches_i1k_100k": paper_datasets.IMAGENET_1K,
    **{name: paper_datasets.IMAGENET_21K for name in paper_imagenet.RECIPES if "_i21k" in name},
    **{name: paper_datasets.IMAGENET_1K for name in paper_imagenet.RECIPES if "_i1k" in name},
    **{name: paper_datasets.IMAGENET_21K_AUGREG for name in _AUGREG if "_i21k" in name},
    **{name: paper_datasets.IMAGENET_1K_99 for name in (*_AUGREG, *plain_vit.RECIPES) if "_i1k" in name},
    **dict.fromkeys(scaling.RECIPES, paper_datasets.JFT_3B),
    **dict.fromkeys(bit_imagenet.RECIPES, paper_datasets.IMAGENET_1K),
    **{name: paper_datasets.IMAGENET_21K for name in deit3.RECIPES if "_i21k" in name},
    **{name: paper_datasets.IMAGENET_1K for name in deit3.RECIPES if "_i1k" in name},
    **{name: _TRANSFERS[name.split("_")[0]] for name in _FINETUNING},
    **paper_vtab.DATASETS,
}


def _planned(name: str, recipe: Callable[[], TrainingJob]) -> Callable[[], PlanJob]:
    """The plan's recipe of a training recipe; its help is that recipe's."""
    data = _DATASETS.get(name, _UNKNOWN)

    def plan() -> PlanJob:
        return PlanJob(
            recipe=name,
            training=recipe(),
            dataset=data.name,
            num_images=data.num_images,
            num_classes=data.num_classes,
        )

    plan.__doc__ = recipe.__doc__
    return plan


RECIPES: dict[str, Callable[[], PlanJob]] = {
    name: _planned(name, recipe) for name, recipe in {**pretrain.RECIPES, **finetune.RECIPES}.items()
}


def of_training(word: str, training: TrainingJob) -> PlanJob:
    """The plan of a job that is not one of our recipes: its dataset is unknown."""
    return PlanJob(recipe=word, training=training)
