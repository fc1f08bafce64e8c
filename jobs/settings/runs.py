"""Defines the jobs that plan, try, check and list runs: the settings of `plan`, `verify-resume`, `demo`, `ls`,
`report`, `doctor` and `preflight`.

The module has only configurations, so that help and error messages appear without loading torch. The settings of
training are in pipeline/training/settings/job.py.
"""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from jobs.settings import CheckedJob, NumNodes
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.training.settings.job import TrainingJob
from shards.config_values import Range, refuse_wrong_values, shown_value
from shards.errors import UserError

SUFFIXES = (".svg", ".html")
GPU_NAMES = ("a100", "a100-40", "h100", "h200", "b200", "l40s", "rtx4090")  # those that a plan can have
TRIAL_STEPS = 20  # steps of verify-resume without --steps, unless the recipe has fewer
SortColumn = Literal["run", "recipe", "state", "step", "loss", "accuracy", "images", "goodput", "seen"]


@dataclass(frozen=True, kw_only=True)
class OnNodes:
    """Nodes to plan for, and assumptions about them."""

    nodes: tuple[Annotated[int, Range(1, 1_000_000)], ...] = ()
    """Numbers of nodes to compare, such as --nodes 8 16 32: for each, S3 traffic, checkpoint interval, goodput, days
    and GPU-hours; empty: none."""
    gpus_per_node: Annotated[int, Range(1, 1024)] = 8
    """GPUs of a node, one for each rank."""
    max_time: Annotated[float, Range(0, 1e6, zero="no limit")] = 0.0
    """Hours after which Slurm ends a job and another job continues the run (Slurm's MaxTime); 0: no limit."""
    price: Annotated[float, Range(0, 1e9, zero="not known")] = 0.0
    """Price of a GPU-hour, in any currency; 0: not known, and no cost is shown."""
    failures_per_node_day: Annotated[float, Range(1e-9, 1000)] = CheckpointConfig.failures_per_node_day
    """Failures per node and day (0.0065: Meta's RSC-1, arXiv 2410.21680). Goodput is also shown at other published
    rates."""
    startup_seconds: Annotated[float, Range(0, 1e6)] = 180.0
    """Seconds from a job's start to its first step; 180 is an estimate, and RUN/ledger.jsonl has the seconds of your
    runs."""
    queue_seconds: Annotated[float, Range(0, 1e8)] = 122.0
    """Seconds in the queue before a job continues; 122 was measured for a requeued job in an empty queue (Slurm
    22.05)."""
    restart_seconds: Annotated[float, Range(0, 1e8, zero="300, the queue and the start-up")] = 0.0
    """Seconds from a failure to the next step; 0: the sum of 300 (until Slurm misses the node, SlurmdTimeout), the wait
    in the queue, and the start-up."""
    writer_gb_per_second: Annotated[float, Range(1e-3, 1e4)] = 1.0
    """GB/s at which a node writes checkpoints; BLOOM's nodes wrote 1.2 (2.3 TB in 40 s on 48 nodes)."""
    image_bytes: Annotated[int, Range(1, 1_000_000_000)] = 110_000
    """Mean bytes of an image; 110,000 is ImageNet's."""
    samples_per_block: Annotated[int, Range(1, 1_000_000)] = 64
    """Images per block of the dataset, which training reads in one request (`pack --samples-per-block`)."""
    out: str = ""
    """File for a plot of goodput, days and GPU-hours over the nodes, or of the cost over the image size, .svg or .html;
    empty: none."""


def refuse_wrong_nodes(job: OnNodes, *, gpu: str, is_num_gpus_given: bool, is_drawn: bool) -> None:
    """Raises UserError if flags contradict each other or need another flag, if node counts repeat, or if --out is not
    an .svg or .html file. `is_drawn`: whether --out has an effect without --nodes."""
    if job.out and not job.out.lower().endswith(SUFFIXES):
        raise UserError(f"--out is {job.out!r}; allowed: a name that ends in {' or '.join(SUFFIXES)}")
    for field in fields(OnNodes):
        value = getattr(job, field.name)
        if not job.nodes and value != field.default and not (is_drawn and field.name == "out"):
            flag = f"--{field.name.replace('_', '-')}"
            said = flag if value is True else f"{flag} {value}"
            raise UserError(f"{said} says nothing without --nodes; add --nodes 8, or yours")
    if not job.nodes:
        return
    shown = f"--nodes {' '.join(map(str, job.nodes))}"
    if not gpu:
        raise UserError(f"{shown} says nothing without --gpu; add --gpu h100, or yours")
    if is_num_gpus_given:
        raise UserError(f"{shown} with --num-gpus: nodes have --gpus-per-node GPUs each; leave out --num-gpus")
    if len(set(job.nodes)) != len(job.nodes):
        raise UserError(f"--nodes is {shown_value(job.nodes)}; allowed: different numbers, such as --nodes 8 16 32")


@dataclass(frozen=True, kw_only=True)
class PreflightJob:
    """What to check on a cluster before the first job is submitted. An empty field leaves out its check."""

    cluster: str = ""
    """YAML file of your cluster's settings, as `patchline example cluster.yaml` prints it; empty: Slurm is left out."""
    run_dir: str = ""
    """Run directory, or a folder above it: a short job on two nodes checks that they share it."""
    url: str = ""
    """Where datasets or checkpoints will be, s3://bucket/prefix: small objects are written below it, and deleted."""
    nodes: NumNodes = 1
    """Nodes that a job will ask for."""
    deep: bool = False
    """Also run a short job on all nodes, which times a matrix product on each and an exchange between all."""
    wait_seconds: Annotated[int, Range(1, 86_400)] = 60
    """How long these short jobs may wait in the queue."""
    json: bool = False
    """Write the checks to standard output as one JSON object, for scripts."""
    out: str = ""
    """File to write the same JSON object to; empty: none."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        if self.url and not self.url.startswith("s3://"):
            raise UserError(f"--url is {shown_value(self.url)}; allowed: s3://bucket/prefix, or nothing")
        for flag, is_given in (("--deep", self.deep), ("--run-dir", self.run_dir)):
            if is_given and not self.cluster:
                raise UserError(f"{flag} says nothing without --cluster; add --cluster cluster.yaml")


@dataclass(frozen=True, kw_only=True)
class PlanJob(OnNodes):
    """The job to plan, and the dataset that it is meant for."""

    recipe: str = ""
    """Name to show in the table's title."""
    training: TrainingJob = TrainingJob()
    """Training job to plan."""
    dataset: str = ""
    """Name of the dataset to show in the table."""
    num_images: Annotated[int, Range(0, zero="not known")] = 0
    """Images of the training split; 0: not known."""
    num_classes: Annotated[int, Range(0, zero="not known")] = 0
    """Classes of the training split; 0: not known."""
    days: Annotated[float, Range(above=0)] = 7.0
    """Days that the run may take."""
    gpu: str = ""
    """GPU to plan the memory and the time of the run for: a100, a100-40, h100, h200, b200, l40s or rtx4090; empty:
    none."""
    num_gpus: Annotated[int, Range(1)] = 8
    """Number of these GPUs, one for each rank."""
    mfu: Annotated[float, Range(0, 1, zero="as measured")] = 0.0
    """Share of a GPU's nominal operations that it reaches while it computes (MFU). Exchanges between GPUs are not
    included. 0: as measured with this model on this GPU; where nobody has, 0.28, which NVIDIA published for ViT-g/14
    on H100 nodes (NeMo; 0.43 on A100)."""
    measured: str = ""
    """Result of `patchline doctor --gpu --out FILE` on your GPU, which counts before those that Patchline has; empty:
    none."""
    network_gbits: Annotated[float, Range(0.1, 1e6)] = 3200.0
    """Gbit/s of all network adapters of a node together; 3,200 is eight of 400 Gb/s. It has an effect only beyond one
    node."""
    image_sizes: tuple[Annotated[int, Range(1, 16_384)], ...] = ()
    """Image sizes in pixels, such as 224 384 512, at which to compare the operations and the memory of an image."""
    json: bool = False
    """Write the plan to standard output as one JSON object, for scripts."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        for name in ("num_gpus", "mfu", "measured", "network_gbits"):
            value = getattr(self, name)
            if not self.gpu and value != getattr(PlanJob, name):
                raise UserError(
                    f"--{name.replace('_', '-')} {value} says nothing without --gpu; add --gpu h100, or yours"
                )
        if self.measured and self.mfu:
            raise UserError(f"--measured {self.measured} says nothing with --mfu {self.mfu}; leave out one of them")
        if len(set(self.image_sizes)) != len(self.image_sizes):
            shown = shown_value(self.image_sizes)
            raise UserError(f"--image-sizes is {shown}; allowed: different sizes, such as --image-sizes 224 384 512")
        refuse_wrong_nodes(
            self,
            gpu=self.gpu,
            is_num_gpus_given=self.num_gpus != PlanJob.num_gpus,
            is_drawn=bool(self.image_sizes),
        )


@dataclass(frozen=True, kw_only=True)
class VerifyResumeJob(TrainingJob):
    """The training job whose continuation is verified, with the flags of training and of `verify-resume`."""

    kills: Annotated[int, Range(1, 1000)] = 3
    """Times that each run is killed with SIGKILL, in saves and between them."""
    ranks: tuple[Annotated[int, Range(1, 1024)], ...] = (1,)
    """Numbers of ranks on this machine to try."""
    stages: tuple[Annotated[int, Range(1, 3)], ...] = ()
    """ZeRO stages to try; empty: that of --engine.zero-stage."""
    kill_seed: Annotated[int, Range(0)] = 0
    """Seed for the moments at which the runs are killed."""
    compare: Literal["all", "last"] = "all"
    """Checkpoints to keep and compare: all, which finds the first step that differs, or last, which needs little disk
    space."""
    tolerance: Annotated[float, Range(0, 1, zero="1e-5 in fp32, 1e-2 in bf16")] = 0.0
    """Largest relative difference of losses that counts as rounding if the topology changes; on the same topology, the
    bits must be the same. 0: 1e-5 in fp32, 1e-2 in bf16, or four times the difference between unbroken runs if that is
    more."""
    run_dir: str = ""
    """Folder in which a temporary folder is made for the runs; empty: the system's folder for temporary files."""
    keep: bool = False
    """Keep the runs; they are always kept if they differ."""
    json: bool = False
    """Write the result to standard output as one JSON object, for scripts."""
    recipe: str = PlanJob.recipe
    command: Literal["pretrain", "finetune"] = "pretrain"
    """Stage that trains the recipe."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ranks", "stages"):
            given = getattr(self, name)
            if len(set(given)) != len(given) or (name == "ranks" and not given):
                raise UserError(
                    f"--{name} is {shown_value(given)}; allowed: one or more different numbers, such as --{name} 1 2"
                )
        if self.kills >= self.steps:
            raise UserError(f"--kills is {self.kills} with --steps {self.steps}; allowed: fewer kills than steps")


@dataclass(frozen=True, kw_only=True)
class LsJob(CheckedJob):
    """The settings of `patchline ls`: the folder of the runs, and their order."""

    dir: str = ""
    """Folder to look for runs in, three levels down; or a run directory."""
    sort: SortColumn = "seen"
    """Column to sort by, best or latest first; rows without a value come last."""
    reverse: bool = False
    """Sort the other way round."""
    json: bool = False
    """Write one JSON object per line and run to standard output, for scripts."""


@dataclass(frozen=True, kw_only=True)
class ReportJob(CheckedJob):
    """Which run to report on, and where to write the page."""

    run: str = ""
    """Run directory; the run may still be training."""
    out: str = ""
    """HTML file to write; empty: RUN/report.html."""


@dataclass(frozen=True, kw_only=True)
class DoctorJob(CheckedJob):
    """What to check in addition to the machine itself."""

    run: str = ""
    """Run directory. The command then says what went wrong with this run, instead of checking the machine."""
    folder: str = "."
    """Folder whose disk is checked, such as the one for runs or datasets."""
    s3_url: str = ""
    """Objects to list, s3://bucket/prefix; empty: S3 is left out."""
    seconds: Annotated[float, Range(1, 600)] = 60.0
    """Longest time that a check may take; one that takes longer is a fault."""
    gpu: bool = False
    """Measure training on this machine's GPU part by part, in about twenty minutes, instead of checking the machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """With --gpu, where to measure; cpu tries every part at a small size."""
    data_url: str = ""
    """With --gpu, the packed dataset that the loader is measured on; empty: 256 generated pictures."""
    out: str = "gpu.json"
    """With --gpu, the file of results; a page that draws them is written beside it. Parts that the file already has
    from the same device are not measured again."""
    json: bool = PreflightJob.json


@dataclass(frozen=True, kw_only=True)
class DemoJob(CheckedJob):
    """The length of the demo's runs, and their number of processes."""

    run_dir: str = "demo-run"
    """Folder for everything that the demo writes; emptied first if an earlier demo made it."""
    steps: Annotated[int, Range(1)] = 300
    """Training steps of the pre-training run."""
    finetune_steps: Annotated[int, Range(1)] = 100
    """Training steps of the fine-tuning run."""
    num_ranks: Annotated[int, Range(1)] = 2
    """Processes that train together."""
    least_accuracy: Annotated[float, Range(0, 1)] = 0.95
    """Accuracy after fine-tuning, 0 to 1, below which the demo has failed."""
