"""The stages of the command line: what each is for, what its second word is, and what its help shows first.

A new stage is a module of jobs/ with `run(job) -> exit code`, an entry in STAGES, and its job's dataclass, STAGEJob, in
a module that loads nothing heavy: the stage's own, or one that `types` names.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

RECIPE, URL, PATH = "RECIPE|FILE.yaml", "URL|FILE.yaml", "PATH|FILE.yaml"
WEIGHTS = "WEIGHTS IMAGE..."  # the second word, and what follows it without a flag
JOB = "RECIPE|FILE|RUN"
WITH_SMOKE = ("pretrain", "finetune")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One word of the command line. `module` and `types` are names below jobs/."""

    summary: str
    second: str
    """What the second word is; empty: there is none."""
    module: str = ""
    """Where `run` is, if the module is not called as the stage (`import` is a word of Python's)."""
    types: str = ""
    """Where STAGEJob is, if not in the same module; stages of recipes take the recipe's type."""
    loads_torch: bool = False
    """Whether `run` loads torch: the command says that it starts before the seconds this takes."""
    required: tuple[str, ...] = ()
    """Flags that must be given where the job has them and they are empty; of several between bars, the first it has."""
    usual: tuple[str, ...] = ()
    """Flags that --help shows, the others are shown by --help-all; empty: all."""
    examples: tuple[str, ...] = ()
    """Commands, without the first word `patchline`."""

    @property
    def field(self) -> str:
        """The job's field that the second word fills, where it is no recipe: `url` of URL|FILE.yaml."""
        return self.second.replace("|", " ").partition(" ")[0].lower()


_TRAINING = (
    "--steps",
    "--global-batch",
    "--micro-batch",
    "--schedule.learning-rate",
    "--schedule.warmup-steps",
    "--model.image-size",
    "--engine.precision",
    "--checkpoint.every-steps",
    "--evaluation.url",
    "--evaluation.every-steps",
    "--device",
)

STAGES = {
    "pack": Stage(
        summary="pack images into verified WebDataset shards",
        second=RECIPE,
        types="dataset_jobs",
        required=("--source.files|--source.path|--source.root", "--out"),
        usual=(
            "--split",
            "--labels-file",
            "--samples-per-shard",
            "--samples-per-block",
            "--workers",
            "--max-quarantined",
            "--resize.short-side",
            "--resize.convert",
            "--dedup.duplicates",
            "--dedup.against",
            "--phase",
            "--part",
        ),
        examples=(
            "pack folder --source.root photos --out data/photos --workers 8",
            "pack folder --source.root photos --out s3://bucket/photos --resize.short-side 512",
        ),
    ),
    "index": Stage(
        summary="index existing WebDataset tars in place",
        second=URL,
        types="dataset_jobs",
        required=("--url",),
        examples=("index s3://bucket/tars --index-url s3://mine/index", "index 'tars/train-{0000..1023}.tar'"),
    ),
    "verify": Stage(
        summary="check a dataset against its manifest",
        second=URL,
        types="dataset_jobs",
        required=("--url",),
        examples=("verify data/photos", "verify s3://bucket/photos --deep --workers 8"),
    ),
    "card": Stage(
        summary="write an HTML page that shows what is in a dataset",
        second=URL,
        types="dataset_jobs",
        required=("--url",),
        examples=("card data/photos",),
    ),
    "pretrain": Stage(
        summary="pre-train; the same command resumes the run",
        second=RECIPE,
        types="model_jobs",
        loads_torch=True,
        required=("--data.url", "--run-dir"),
        usual=_TRAINING,
        examples=(
            "pretrain digits_smoke --data.url data/digits --run-dir runs/digits",
            "pretrain runs/digits/job.yaml --run-dir runs/again",
        ),
    ),
    "finetune": Stage(
        summary="fine-tune a run's weights, usually at higher resolution",
        second=RECIPE,
        types="model_jobs",
        loads_torch=True,
        required=("--initial.weights", "--data.url", "--run-dir"),
        usual=_TRAINING,
        examples=(
            "finetune digits_48 --initial.weights runs/digits/weights --data.url data/digits --run-dir runs/digits-48",
        ),
    ),
    "evaluate": Stage(
        summary="measure the accuracy of a run's weights on a dataset",
        second=RECIPE,
        types="model_jobs",
        loads_torch=True,
        required=("--weights", "--data.url"),
        examples=("evaluate resize --weights runs/digits/weights --data.url data/digits-test",),
    ),
    "predict": Stage(
        summary="predict the classes of images with a run's weights",
        second=WEIGHTS,
        required=("--weights",),
        examples=("predict runs/digits/weights a.png b.jpg --top 3", "predict runs/digits photos/*.jpg --json"),
    ),
    "plan": Stage(
        summary="show what a recipe costs: parameters, operations, images/s",
        second=RECIPE,
        types="model_jobs",
        usual=(
            "--days",
            "--num-images",
            "--num-classes",
            "--training.steps",
            "--training.global-batch",
            "--training.model.name",
            "--training.model.image-size",
        ),
        examples=("plan vit_h14_jft --days 30", "plan runs/digits/job.yaml"),
    ),
    "import": Stage(
        summary="import weights from .npz, timm or Hugging Face",
        second=PATH,
        module="import_weights",
        types="model_jobs",
        required=("--path", "--out"),
        examples=("import ViT-B_16.npz --out weights/vit_b16", "import hf_folder --out weights/hf --image-size 384"),
    ),
    "export": Stage(
        summary="export a run's weights to .npz, timm or Hugging Face",
        second=PATH,
        module="export_weights",
        types="model_jobs",
        required=("--path", "--out"),
        examples=("export runs/digits/weights --out digits_hf --format hugging_face",),
    ),
    "demo": Stage(
        summary="run the whole pipeline on real images in five minutes",
        second="",
        types="model_jobs",
        examples=("demo", "demo --run-dir /tmp/demo --num-ranks 1"),
    ),
    "completion": Stage(
        summary="print a completion script for your shell",
        second="SHELL",
        required=("--shell",),
        examples=('completion bash  # eval "$(patchline completion bash)" in ~/.bashrc', "completion zsh"),
    ),
}

# About jobs; they read their words themselves.
TOOLS = {
    "show": Stage(
        summary="print a recipe or file with every field, as YAML",
        second=f"[STAGE] {JOB}",
        examples=("show digits_smoke", "show my.yaml --schedule.learning-rate 1e-4", "show finetune cifar10"),
    ),
    "diff": Stage(
        summary="list the fields in which two recipes, files or runs differ",
        second="[STAGE] A B",
        examples=("diff vit_b16_i21k vit_b16_i21k_augreg", "diff my.yaml runs/mine"),
    ),
}
COMMANDS = {**STAGES, **TOOLS}


def types_of(stage: str) -> ModuleType:
    """The module that has the dataclass of a stage's job; it loads nothing heavy."""
    entry = STAGES[stage]
    return importlib.import_module(f"jobs.{entry.types or entry.module or stage}")


def recipes_of(stage: str) -> Mapping[str, Callable[[], Any]]:
    """Name -> recipe, of a stage whose second word is one."""
    recipes: Mapping[str, Callable[[], Any]] = importlib.import_module(f"jobs.recipes.{stage}").RECIPES
    return recipes
