"""The stages of the command line: what each is for, what its second word is, and what its help shows first.

A new stage is a module of jobs/ with `run(job) -> exit code`, its job's dataclass in a module that loads nothing heavy,
and an entry in STAGES. The table names modules instead of importing them: a command loads only its own.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jobs.stage import Stage
from jobs.tools import TOOLS

RECIPE, URL, PATH, OF_WEIGHTS = "RECIPE|FILE.yaml", "URL|FILE.yaml", "PATH|FILE.yaml", "WEIGHTS|FILE.yaml"
WITH_FILE = (URL, PATH, OF_WEIGHTS)  # a value, or a file
WEIGHTS = "WEIGHTS IMAGE..."  # the second word, and the words after it without a flag
RUN = "RUN"
WITH_SMOKE = ("pretrain", "finetune")


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
        module="jobs.data.pack",
        job=("jobs.settings.data", "PackJob"),
        recipes="jobs.recipes.pack",
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
        module="jobs.data.index",
        job=("jobs.settings.data", "IndexJob"),
        required=("--url",),
        examples=("index s3://bucket/tars --index-url s3://mine/index", "index 'tars/train-{0000..1023}.tar'"),
    ),
    "verify": Stage(
        summary="check a dataset against its manifest",
        second=URL,
        module="jobs.data.verify",
        job=("jobs.settings.data", "VerifyJob"),
        required=("--url",),
        examples=("verify data/photos", "verify s3://bucket/photos --deep --workers 8"),
    ),
    "card": Stage(
        summary="write an HTML page that shows what is in a dataset",
        second=URL,
        module="jobs.data.card",
        job=("jobs.settings.data", "CardJob"),
        required=("--url",),
        examples=("card data/photos",),
    ),
    "pretrain": Stage(
        summary="pre-train; the same command resumes the run",
        second=RECIPE,
        module="jobs.train.pretrain",
        job=("pipeline.training.settings.job", "TrainingJob"),
        recipes="jobs.recipes.pretrain",
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
        module="jobs.train.finetune",
        job=("pipeline.training.settings.job", "TrainingJob"),
        recipes="jobs.recipes.finetune",
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
        module="jobs.models.evaluate",
        job=("jobs.settings.models", "EvaluateJob"),
        recipes="jobs.recipes.evaluate",
        loads_torch=True,
        required=("--weights", "--data.url"),
        examples=("evaluate resize --weights runs/digits/weights --data.url data/digits-test",),
    ),
    "fewshot": Stage(
        summary="measure a run's representation with a few images per class",
        second=OF_WEIGHTS,
        module="jobs.models.fewshot",
        job=("jobs.settings.models", "FewshotJob"),
        loads_torch=True,
        required=("--weights", "--data.url"),
        examples=(
            "fewshot runs/digits --data.url data/digits",
            "fewshot runs/digits --data.url data/digits --shots 5 10 --seeds 5 --probe",
        ),
    ),
    "predict": Stage(
        summary="predict the classes of images with a run's weights",
        second=WEIGHTS,
        module="jobs.models.predict",
        job=("jobs.models.predict", "PredictJob"),
        required=("--weights",),
        examples=("predict runs/digits/weights a.png b.jpg --top 3", "predict runs/digits photos/*.jpg --json"),
    ),
    "inspect": Stage(
        summary="draw what a model has learned: filters, positions, attention",
        second=OF_WEIGHTS,
        module="jobs.models.inspect",
        job=("jobs.models.inspect", "InspectJob"),
        required=("--weights",),
        examples=("inspect runs/vit --images photos",),
    ),
    "plan": Stage(
        summary="show what a recipe costs: parameters, operations, memory, days",
        second=RECIPE,
        module="jobs.planning.plan",
        job=("jobs.settings.models", "PlanJob"),
        recipes="jobs.recipes.plan",
        usual=(
            *("--gpu", "--num-gpus", "--nodes", "--gpus-per-node", "--max-time", "--price"),
            *("--failures-per-node-day", "--simulate", "--out", "--days", "--num-images", "--num-classes"),
            "--training.steps",
            "--training.global-batch",
            "--training.model.name",
            "--training.model.image-size",
        ),
        examples=(
            "plan vit_h14_jft --gpu h100 --num-gpus 64",
            "plan vit_h14_jft --gpu h200 --nodes 1 8 16 32",
            "plan runs/digits/job.yaml --days 30",
        ),
    ),
    "verify-resume": Stage(
        summary="kill a short run of a recipe, continue it, and compare every bit",
        second=RECIPE,
        module="jobs.train.verify_resume",
        job=("jobs.settings.models", "VerifyResumeJob"),
        recipes="jobs.recipes.verify_resume",
        loads_torch=True,
        required=("--data.url",),
        usual=(
            "--steps",
            "--kills",
            "--ranks",
            "--stages",
            "--compare",
            "--tolerance",
            "--run-dir",
            "--keep",
            "--json",
            "--initial.weights",
            "--global-batch",
            "--checkpoint.every-steps",
            "--engine.deterministic",
            "--device",
        ),
        examples=(
            "verify-resume vit_b16_i1k --data.url data/imagenet --run-dir /shared --ranks 8",
            "verify-resume digits_smoke --data.url data/digits --ranks 1 2 --stages 1 2 3",
        ),
    ),
    "ls": Stage(
        summary="list the runs in a folder: state, step, loss, accuracy, speed",
        second="DIR",
        module="jobs.reports.ls",
        job=("jobs.settings.models", "LsJob"),
        required=("--dir",),
        examples=("ls runs", "ls runs --sort accuracy", "ls /shared/runs --json"),
    ),
    "report": Stage(
        summary="show what a run did: curves, time, restarts; write report.html",
        second=RUN,
        module="jobs.reports.report",
        job=("jobs.settings.models", "ReportJob"),
        required=("--run",),
        examples=("report runs/digits", "report runs/digits --out digits.html"),
    ),
    "weights": Stage(
        summary="take the weights out of any checkpoint of a run",
        second=RUN,
        module="jobs.models.weights",
        job=("jobs.settings.models", "WeightsJob"),
        required=("--run", "--out"),
        examples=(
            "weights runs/digits --out weights/digits-newest",
            "weights runs/digits --step 275 --raw --out weights/digits-275",
            "weights runs/digits --best --out weights/digits-best",
        ),
    ),
    "import": Stage(
        summary="import weights from .npz, timm or Hugging Face",
        second=PATH,
        module="jobs.models.import_weights",
        job=("jobs.settings.models", "ImportJob"),
        required=("--path", "--out"),
        examples=("import ViT-B_16.npz --out weights/vit_b16", "import hf_folder --out weights/hf --image-size 384"),
    ),
    "export": Stage(
        summary="export a run's weights to .npz, timm or Hugging Face",
        second=PATH,
        module="jobs.models.export_weights",
        job=("jobs.settings.models", "ExportJob"),
        required=("--path", "--out"),
        examples=("export runs/digits/weights --out digits_hf --format hugging_face",),
    ),
    "doctor": Stage(
        summary="check this machine, or say what went wrong with a run",
        second="",
        module="jobs.monitor.doctor",
        job=("jobs.settings.models", "DoctorJob"),
        examples=(
            "doctor",
            "doctor runs/digits",
            "doctor --folder /shared/runs --s3-url s3://bucket/prefix",
            "doctor --json",
        ),
    ),
    "preflight": Stage(
        summary="check a cluster: Slurm's limits, S3, a shared run directory, nodes",
        second="",
        module="jobs.cluster.preflight",
        job=("jobs.settings.cluster", "PreflightJob"),
        examples=(
            "preflight --cluster cluster.yaml --run-dir /shared/runs --url s3://bucket/prefix --nodes 8",
            "preflight --cluster cluster.yaml --nodes 8 --deep",
        ),
    ),
    "demo": Stage(
        summary="run the whole pipeline on real images in five minutes",
        second="",
        module="jobs.train.demo",
        job=("jobs.settings.models", "DemoJob"),
        examples=("demo", "demo --run-dir /tmp/demo --num-ranks 1"),
    ),
    "completion": Stage(
        summary="print a completion script for your shell",
        second="SHELL",
        module="jobs.completion",
        job=("jobs.completion", "CompletionJob"),
        required=("--shell",),
        examples=('completion bash  # eval "$(patchline completion bash)" in ~/.bashrc', "completion zsh"),
    ),
}

COMMANDS = {**STAGES, **TOOLS}


def job_class(stage: str) -> Any:
    """The dataclass of a stage's jobs."""
    module, name = STAGES[stage].job
    return getattr(importlib.import_module(module), name)


def recipes_of(stage: str) -> Mapping[str, Callable[[], Any]]:
    """The recipes of a stage that takes recipes, by name."""
    recipes: Mapping[str, Callable[[], Any]] = importlib.import_module(STAGES[stage].recipes).RECIPES
    return recipes
