"""Lists the stages in a table: what each is for, what its second word is, and which flags its help shows.

A new stage is a module of jobs/ with `run(job) -> exit code`, its job's dataclass in a module that loads nothing heavy,
and an entry in STAGES. Commands in TOOLS run no job: they show jobs, submit them, or look after runs, and parse their
own flags (`jobs/arguments.py`). The tables name modules instead of importing them, so that a command loads only its own
module.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

WITH_SMOKE = ("pretrain", "finetune")
_TRAINING = (
    *("--steps", "--global-batch", "--micro-batch", "--schedule.learning-rate", "--schedule.warmup-steps"),
    *("--model.image-size", "--engine.precision", "--checkpoint.every-steps", "--evaluation.url"),
    *("--evaluation.every-steps", "--device"),
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A command that runs a job. Its second word is a recipe or sets one field of the job. Some stages take no second
    word."""

    summary: str
    module: str
    """The module that has `run`."""
    job: tuple[str, str]
    """Module and name of the job's dataclass."""
    recipes: str = ""
    """The module that has RECIPES (name -> function that returns a job), if the second word is a recipe or a YAML
    file."""
    field: str = ""
    """The job's field that the second word sets, in a stage without recipes."""
    takes_file: bool = False
    """Whether the second word may be a YAML file with every field instead."""
    is_optional: bool = False
    """Whether the second word may be missing."""
    more: str = ""
    """The job's field that takes the words after the second one that belong to no flag."""
    starts_programs: bool = False
    """Whether `run` starts programs, so that it needs the environment."""
    loads_torch: bool = False
    """Whether `run` loads torch. This takes seconds, so the command first says that it is starting."""
    required: tuple[str | tuple[str, ...], ...] = ()
    """Flags that must have a value, if the job has them. In a group of flags, only the first one that the job has must
    have a value."""
    usual: tuple[str, ...] = ()
    """Flags that --help shows; --help-all shows the others, too. Empty: --help shows all flags."""
    examples: tuple[str, ...] = ()
    """Commands, without the first word `patchline`."""

    @property
    def usage(self) -> str:
        """The words after the command in its usage line."""
        if self.recipes:
            return "RECIPE|FILE.yaml"
        if not self.field or self.is_optional:
            return ""
        words = f"{self.field.upper()}|FILE.yaml" if self.takes_file else self.field.upper()
        return f"{words} {self.more.removesuffix('s').upper()}..." if self.more else words


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A command that runs no job."""

    summary: str
    takes: str
    """The words that follow the command, as its usage shows them."""
    module: str
    """The module that has `run`."""
    given: tuple[str, ...] = ()
    """The arguments of `run` besides the words: `command` (the tool's name), `environ`, or `override` (the function
    that applies the flags of a job)."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """The tool's own flags, and how its usage shows each."""
    is_about_jobs: bool = True
    """Whether the words describe a job, so that any of the job's flags may follow; otherwise `flags` lists all
    flags."""
    examples: tuple[str, ...] = ()
    """Commands, without the first word `patchline`."""

    @property
    def usage(self) -> str:
        """What follows the command, as its usage shows it."""
        return " ".join([self.takes, *self.flags.values()])


STAGES = {
    "pack": Stage(
        summary="pack images into verified WebDataset shards",
        module="jobs.data.pack",
        job=("jobs.settings.data", "PackJob"),
        recipes="jobs.recipes.pack",
        required=(("--source.files", "--source.path", "--source.root"), "--out"),
        usual=(
            *("--split", "--split-test", "--source.class-level", "--labels-file", "--labels.numbers"),
            *("--samples-per-shard", "--samples-per-block", "--workers", "--max-quarantined"),
            *("--resize.short-side", "--resize.convert", "--dedup.duplicates", "--dedup.against", "--phase"),
            *("--part",),
        ),
        examples=(
            "pack folder --source.root photos --split-test 0.2 --out data/photos --workers 8",
            "pack folder --source.root photos --out s3://bucket/photos --resize.short-side 512",
        ),
    ),
    "index": Stage(
        summary="index existing WebDataset tars in place",
        module="jobs.data.index",
        job=("jobs.settings.data", "IndexJob"),
        field="url",
        takes_file=True,
        required=("--url",),
        examples=("index s3://bucket/tars --index-url s3://mine/index", "index 'tars/train-{0000..1023}.tar'"),
    ),
    "verify": Stage(
        summary="check a dataset against its manifest",
        module="jobs.data.verify",
        job=("jobs.settings.data", "VerifyJob"),
        field="url",
        takes_file=True,
        required=("--url",),
        examples=("verify data/photos", "verify s3://bucket/photos --deep --workers 8"),
    ),
    "card": Stage(
        summary="write an HTML page that shows what is in a dataset",
        module="jobs.data.card",
        job=("jobs.settings.data", "CardJob"),
        field="url",
        takes_file=True,
        required=("--url",),
        examples=("card data/photos",),
    ),
    "pretrain": Stage(
        summary="pre-train; the same command resumes the run",
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
        module="jobs.train.pretrain",
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
        module="jobs.models.evaluate",
        job=("jobs.settings.models", "EvaluateJob"),
        field="weights",
        takes_file=True,
        loads_torch=True,
        required=("--weights", "--data.url"),
        examples=(
            "evaluate runs/digits --data.url data/digits-test",
            "evaluate timm_folder --data.url data/photos-test --run-dir scores/timm",
        ),
    ),
    "fewshot": Stage(
        summary="measure a run's representation with a few images per class",
        module="jobs.models.fewshot",
        job=("jobs.settings.models", "FewshotJob"),
        field="weights",
        takes_file=True,
        loads_torch=True,
        required=("--weights", "--data.url"),
        examples=(
            "fewshot runs/digits --data.url data/digits",
            "fewshot runs/digits --data.url data/digits --shots 5 10 --seeds 5 --probe",
        ),
    ),
    "predict": Stage(
        summary="predict the classes of images with a run's weights",
        module="jobs.models.predict",
        job=("jobs.settings.models", "PredictJob"),
        field="weights",
        more="images",
        required=("--weights",),
        examples=("predict runs/digits/weights a.png b.jpg --top 3", "predict runs/digits photos --json"),
    ),
    "inspect": Stage(
        summary="draw what a model has learned: filters, positions, attention",
        module="jobs.models.inspect",
        job=("jobs.settings.models", "InspectJob"),
        field="weights",
        takes_file=True,
        required=("--weights",),
        examples=("inspect runs/vit --images photos",),
    ),
    "plan": Stage(
        summary="show what a recipe costs: parameters, operations, memory, days",
        module="jobs.planning.plan",
        job=("jobs.settings.runs", "PlanJob"),
        recipes="jobs.recipes.of_training",
        usual=(
            *("--gpu", "--num-gpus", "--nodes", "--gpus-per-node", "--max-time", "--price"),
            *("--failures-per-node-day", "--out", "--days", "--num-images", "--num-classes"),
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
        module="jobs.train.verify_resume",
        job=("jobs.settings.runs", "VerifyResumeJob"),
        starts_programs=True,
        recipes="jobs.recipes.of_training",
        loads_torch=True,
        required=("--data.url",),
        usual=(
            *("--steps", "--kills", "--ranks", "--stages", "--compare", "--tolerance", "--run-dir", "--keep"),
            *("--json", "--initial.weights", "--global-batch", "--checkpoint.every-steps"),
            *("--engine.deterministic", "--device"),
        ),
        examples=(
            "verify-resume vit_b16_i1k --data.url data/imagenet --run-dir /shared --ranks 8",
            "verify-resume digits_smoke --data.url data/digits --ranks 1 2 --stages 1 2 3",
        ),
    ),
    "ls": Stage(
        summary="list the runs in a folder: state, step, loss, accuracy, speed",
        module="jobs.reports.ls",
        job=("jobs.settings.runs", "LsJob"),
        field="dir",
        required=("--dir",),
        examples=("ls runs", "ls runs --sort accuracy", "ls /shared/runs --json"),
    ),
    "report": Stage(
        summary="show what a run did: curves, time, restarts; write report.html",
        module="jobs.reports.report",
        job=("jobs.settings.runs", "ReportJob"),
        field="run",
        required=("--run",),
        examples=("report runs/digits", "report runs/digits --out digits.html"),
    ),
    "weights": Stage(
        summary="take the weights out of any checkpoint of a run",
        module="jobs.models.weights",
        job=("jobs.settings.models", "WeightsJob"),
        field="run",
        required=("--run", "--out"),
        examples=(
            "weights runs/digits --out weights/digits-newest",
            "weights runs/digits --step 275 --raw --out weights/digits-275",
            "weights runs/digits --best --out weights/digits-best",
        ),
    ),
    "import": Stage(
        summary="import weights from .npz, timm or Hugging Face",
        module="jobs.models.import_weights",
        job=("jobs.settings.models", "ImportJob"),
        field="path",
        takes_file=True,
        required=("--path", "--out"),
        examples=(
            "import ViT-B_16.npz --out weights/vit_b16",
            "import hf_folder --out weights/hf --image-size 384",
            "import runs/digits --out weights/digits-16 --patch 16",
        ),
    ),
    "export": Stage(
        summary="export a run's weights to .npz, timm or Hugging Face",
        module="jobs.models.export_weights",
        job=("jobs.settings.models", "ExportJob"),
        field="path",
        takes_file=True,
        required=("--path", "--out"),
        examples=("export runs/digits/weights --out digits_hf --format hugging_face",),
    ),
    "doctor": Stage(
        summary="check this machine, or say what went wrong with a run",
        module="jobs.monitor.doctor",
        job=("jobs.settings.runs", "DoctorJob"),
        starts_programs=True,
        field="run",
        is_optional=True,
        examples=(
            "doctor",
            "doctor runs/digits",
            "doctor --folder /shared/runs --s3-url s3://bucket/prefix",
            "doctor --json",
            "doctor --gpu --out h100.json",
        ),
    ),
    "preflight": Stage(
        summary="check a cluster: Slurm's limits, S3, a shared run directory, nodes",
        module="jobs.cluster.preflight",
        job=("jobs.settings.runs", "PreflightJob"),
        starts_programs=True,
        examples=(
            "preflight --cluster cluster.yaml --run-dir /shared/runs --url s3://bucket/prefix --nodes 8",
            "preflight --cluster cluster.yaml --nodes 8 --deep",
        ),
    ),
    "demo": Stage(
        summary="run the whole pipeline on real images in five minutes",
        module="jobs.train.demo",
        job=("jobs.settings.runs", "DemoJob"),
        starts_programs=True,
        examples=("demo", "demo --run-dir /tmp/demo --num-ranks 1"),
    ),
    "example": Stage(
        summary="print an example cluster.yaml or chain.yaml, for you to edit",
        module="jobs.example",
        job=("jobs.example", "ExampleJob"),
        field="name",
        required=("--name",),
        examples=("example cluster.yaml > cluster.yaml", "example chain.yaml > chain.yaml"),
    ),
    "completion": Stage(
        summary="print a completion script for your shell",
        module="jobs.completion",
        job=("jobs.completion", "CompletionJob"),
        field="shell",
        required=("--shell",),
        examples=('completion bash  # eval "$(patchline completion bash)" in ~/.bashrc', "completion zsh"),
    ),
}

TOOLS = {
    "show": Tool(
        summary="print a recipe or file with every field, as YAML",
        takes="[STAGE] RECIPE|FILE|RUN",
        module="jobs.reports.show",
        given=("command", "override"),
        examples=("show digits_smoke", "show my.yaml --schedule.learning-rate 1e-4", "show finetune cifar10"),
    ),
    "diff": Tool(
        summary="list the fields in which two recipes, files or runs differ",
        takes="[STAGE] A B",
        module="jobs.reports.show",
        given=("command", "override"),
        examples=("diff vit_b16_i21k vit_b16_i21k_augreg", "diff my.yaml runs/mine"),
    ),
    "submit": Tool(
        summary="submit a stage, or a chain of stages, to Slurm",
        takes="STAGE RECIPE|CHAIN.yaml",
        flags={
            "--cluster": "--cluster FILE",
            "--nodes": "[--nodes N]",
            "--time": "[--time LIMIT]",
            "--links": "[--links K]",
            "--spares": "[--spares K]",
            "--dry-run": "[--dry-run",
            "--full": "[--full]]",
        },
        module="jobs.chains.submit",
        given=("override", "environ"),
        examples=(
            "submit pretrain vit_h14_jft --cluster cluster.yaml --nodes 8 --data.url URL --run-dir /shared/h14",
            "submit pretrain vit_h14_jft --cluster cluster.yaml --dry-run --data.url URL --run-dir /shared/h14",
            "submit chain.yaml --cluster cluster.yaml",
            "submit sweep finetune imagenet_384 --schedule.learning-rate .003 .01 --cluster cluster.yaml ...",
        ),
    ),
    "sweep": Tool(
        summary="try values of flags, then repeat the best with several seeds",
        takes="pretrain|finetune RECIPE",
        flags={
            "--run-dir": "--run-dir DIR [--any.field A B C ...]",
            "--data.held-out.share": "[--data.held-out.share X]",
            "--select-on": "[--select-on URL]",
            "--score": "[--score accuracy|mean_per_class]",
            "--seeds": "[--seeds N]",
            "--phase": "[--phase tries|seeds",
            "--part": "[--part I/N]]",
            "--dry-run": "[--dry-run]",
        },
        module="jobs.train.sweep",
        given=("override", "environ"),
        examples=(
            "sweep finetune cifar10 --schedule.learning-rate .003 .01 .03 .06 --data.held-out.share .02 "
            "--initial.weights runs/vit/weights --data.url data/cifar10 --evaluation.url data/cifar10-test "
            "--run-dir runs/sweep",
            "sweep finetune cifar10 --seeds 5 --initial.weights runs/vit/weights --data.url data/cifar10 "
            "--evaluation.url data/cifar10-test --run-dir runs/five-seeds",
        ),
    ),
    "vtab": Tool(
        summary="fine-tune on the tasks of VTAB-1k, and show their mean",
        takes="WEIGHTS",
        flags={
            "--data-root": "--data-root URL",
            "--run-dir": "--run-dir DIR",
            "--tasks": "[--tasks NAME ...]",
            "--seeds": "[--seeds N]",
        },
        module="jobs.train.vtab",
        given=("override", "environ"),
        examples=("vtab runs/vit/weights --data-root data/vtab --run-dir runs/vit-vtab",),
    ),
    "compare": Tool(
        summary="draw accuracy over compute and data of runs, on one page",
        takes="RUN|FOLDER ...",
        flags={"--out": "[--out FILE.html]", "--json": "[--json]"},
        module="jobs.reports.compare",
        is_about_jobs=False,
        examples=("compare runs/study", "compare runs/b16 runs/l16 --out b16-l16.html", "compare runs --json"),
    ),
    "status": Tool(
        summary="show where runs and chains stand, and what their jobs wait for",
        takes="[RUN|CHAIN ...]",
        flags={"--json": "[--json]"},
        module="jobs.monitor.status",
        given=("environ",),
        is_about_jobs=False,
        examples=("status /shared/h14", "status /shared/runs/* --json"),
    ),
    "watch": Tool(
        summary="watch a run or a chain, its jobs and its log, drawn again",
        takes="RUN|CHAIN",
        flags={"--seconds": "[--seconds N]"},
        module="jobs.monitor.watch",
        given=("environ",),
        is_about_jobs=False,
        examples=("watch /shared/h14", "watch /shared/birds"),
    ),
    "logs": Tool(
        summary="show the last lines of a run's job, of all ranks or of one",
        takes="RUN",
        flags={"--rank": "[--rank N]", "--lines": "[--lines N]", "--follow": "[--follow]"},
        module="jobs.monitor.logs",
        given=("environ",),
        is_about_jobs=False,
        examples=("logs /shared/h14 --rank 3", "logs /shared/h14 --follow"),
    ),
    "stop": Tool(
        summary="ask a run to save and stop, and to stay stopped",
        takes="RUN",
        module="jobs.monitor.ask",
        given=("command", "environ"),
        is_about_jobs=False,
        examples=("stop /shared/h14",),
    ),
    "save": Tool(
        summary="ask a run to save a checkpoint now, and to continue training",
        takes="RUN",
        module="jobs.monitor.ask",
        given=("command", "environ"),
        is_about_jobs=False,
        examples=("save /shared/h14",),
    ),
    "cancel": Tool(
        summary="cancel all jobs of a run or a chain, waiting or running",
        takes="RUN|CHAIN",
        module="jobs.monitor.ask",
        given=("command", "environ"),
        is_about_jobs=False,
        examples=("cancel /shared/h14", "cancel /shared/birds"),
    ),
}

COMMANDS: Mapping[str, Stage | Tool] = {**STAGES, **TOOLS}


def usage_of(name: str) -> str:
    """Returns the usage line of a command."""
    return f"patchline {name} {COMMANDS[name].usage}"


def job_class(stage: str) -> Any:
    """Returns the dataclass of a stage's jobs."""
    module, name = STAGES[stage].job
    return getattr(importlib.import_module(module), name)


def commands_of(stage: str, recipe: str) -> list[str]:
    """Returns the commands that help shows for a recipe, without the first word `patchline`."""
    flags: Mapping[str, tuple[str, ...]] = importlib.import_module(STAGES[stage].recipes).COMMAND_FLAGS
    return [f"{stage} {recipe} {each}" for each in flags.get(recipe) or flags.get("", ())]


def recipes_of(stage: str) -> Mapping[str, Callable[[], Any]]:
    """Returns the recipes of a stage by name. The stage must take recipes."""
    recipes: Mapping[str, Callable[[], Any]] = importlib.import_module(STAGES[stage].recipes).RECIPES
    return recipes
