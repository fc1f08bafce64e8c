"""What `patchline plan` can be asked for: every training recipe, with the dataset it is meant for, and every run."""

from collections.abc import Callable
from pathlib import Path

from jobs.model_jobs import PlanJob
from jobs.recipes import finetune, paper_datasets, paper_finetune, paper_imagenet, paper_jft, pretrain
from jobs.recipes.paper_datasets import PaperDataset
from pipeline.training.config import TrainingJob
from shards.errors import UserError

_UNKNOWN = PaperDataset(name="", num_images=0, num_classes=0)
_DATASETS: dict[str, PaperDataset] = {
    "digits_smoke": paper_datasets.DIGITS,
    "digits_48": paper_datasets.DIGITS,
    "cifar10_small": paper_datasets.CIFAR10,
    "cifar10_48": paper_datasets.CIFAR10,
    **dict.fromkeys(paper_jft.RECIPES, paper_datasets.JFT),
    **{name: paper_datasets.IMAGENET_21K for name in paper_imagenet.RECIPES if "_i21k" in name},
    **{name: paper_datasets.IMAGENET_1K for name in paper_imagenet.RECIPES if "_i1k" in name},
    **{name: paper_datasets.IMAGENET_1K for name in paper_finetune.RECIPES if name.startswith("imagenet_")},
    "cifar10": paper_datasets.CIFAR10,
    "cifar100": paper_datasets.CIFAR100,
    "pets": paper_datasets.PETS,
    "flowers": paper_datasets.FLOWERS,
    "vtab": paper_datasets.VTAB,
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


def of_record(path: Path) -> PlanJob:
    """The plan of a run's job.yaml. UserError where the run is no training."""
    from jobs.record import read_record, stage_of  # noqa: PLC0415 - pydantic and YAML, which lists and help do without

    stage = stage_of(path)
    if stage not in ("pretrain", "finetune"):
        raise UserError(
            f"{path} is a record of the stage {stage!r}; a plan is of pretrain or finetune, give one of these"
        )
    return PlanJob(recipe=str(path), training=read_record(path, stage=stage, kind=TrainingJob))
