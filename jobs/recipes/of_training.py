"""Turns a training job, from any recipe or file, into the jobs of `patchline plan` and `patchline verify-resume`."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Literal

from jobs.recipes import (
    augreg,
    augreg_finetune,
    bit_finetune,
    bit_imagenet,
    deit,
    deit3,
    deit3_finetune,
    finetune,
    paper_ablations,
    paper_finetune,
    paper_imagenet,
    paper_images,
    paper_jft,
    paper_vtab,
    plain_vit,
    pretrain,
    sam,
    scaling,
)
from jobs.recipes.paper_images import PaperDataset
from jobs.settings.runs import PlanJob, VerifyResumeJob
from pipeline.training.settings.job import TrainingJob

_UNKNOWN = PaperDataset(name="", num_images=0, num_classes=0)
_TRANSFERS = {  # by the first word of a fine-tuning recipe's name
    "imagenet": paper_images.IMAGENET_1K,
    "cifar10": paper_images.CIFAR10,
    "cifar100": paper_images.CIFAR100,
    "pets": paper_images.PETS,
    "flowers": paper_images.FLOWERS,
}
_FINETUNING = (
    *(*paper_finetune.RECIPES, *augreg_finetune.RECIPES),
    *(*bit_finetune.RECIPES, *deit3_finetune.RECIPES),
)
_DATASETS: dict[str, PaperDataset] = {
    "digits_smoke": paper_images.DIGITS,
    "digits_48": paper_images.DIGITS,
    "cifar10_small": paper_images.CIFAR10,
    "cifar10_48": paper_images.CIFAR10,
    "cifar10_plain": paper_images.CIFAR10,
    **dict.fromkeys((*paper_jft.RECIPES, *paper_ablations.RECIPES, "masked_patches"), paper_images.JFT),
    **{f"masked_patches_{name}": paper_images.JFT for name in ("100k", "15", "parts", "pixels")},
    "masked_patches_i1k_100k": paper_images.IMAGENET_1K,
    **{name: paper_images.IMAGENET_21K for name in paper_imagenet.RECIPES if "_i21k" in name},
    **{name: paper_images.IMAGENET_1K for name in paper_imagenet.RECIPES if "_i1k" in name},
    **{name: paper_images.IMAGENET_21K_AUGREG for name in augreg.RECIPES if "_i21k" in name},
    **{name: paper_images.IMAGENET_1K_99 for name in (*augreg.RECIPES, *plain_vit.RECIPES) if "_i1k" in name},
    **dict.fromkeys(scaling.RECIPES, paper_images.JFT_3B),
    **dict.fromkeys((*bit_imagenet.RECIPES, *deit.RECIPES, *sam.RECIPES), paper_images.IMAGENET_1K),
    **{name: paper_images.IMAGENET_21K for name in deit3.RECIPES if "_i21k" in name},
    **{name: paper_images.IMAGENET_1K for name in deit3.RECIPES if "_i1k" in name},
    **{name: _TRANSFERS[name.split("_")[0]] for name in _FINETUNING},
    **paper_vtab.DATASETS,
}
RECIPES = {**pretrain.RECIPES, **finetune.RECIPES}
COMMAND_FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {}
)  # help shows the same commands for all of these recipes


def plan_of(word: str, training: TrainingJob) -> PlanJob:
    """Returns the plan job for a training job. `word`: the recipe or file that the training job is from. The dataset is
    known only for recipes."""
    data = _DATASETS.get(word, _UNKNOWN)
    return PlanJob(
        recipe=word, training=training, dataset=data.name, num_images=data.num_images, num_classes=data.num_classes
    )


def trial_of(word: str, training: TrainingJob, *, command: Literal["pretrain", "finetune"]) -> VerifyResumeJob:
    """Returns the verify-resume job, which checks in a temporary folder that a training job resumes. `word`: the recipe
    or file that the training job is from."""
    own = {field.name: getattr(training, field.name) for field in fields(TrainingJob)}
    return VerifyResumeJob(**{**own, "run_dir": ""}, recipe=word, command=command)
