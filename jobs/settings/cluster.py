"""The flags of `patchline preflight`, and those of `patchline plan` about nodes: how many, how the queue treats jobs,
how often nodes fail, what they cost.

A configuration only: help and mistakes are answered without loading torch.
"""

from dataclasses import dataclass, fields
from typing import Annotated

from shards.errors import UserError
from shards.schema.config_values import Range, refuse_wrong_values, shown_value

SUFFIXES = (".svg", ".html")


@dataclass(frozen=True, kw_only=True)
class OnNodes:
    """Nodes to plan for, and what is assumed of them."""

    nodes: tuple[Annotated[int, Range(1, 1_000_000)], ...] = ()
    """Numbers of nodes to compare, such as --nodes 8 16 32: for each, S3 traffic, checkpoint interval, goodput, days
    and GPU-hours; empty: none."""
    gpus_per_node: Annotated[int, Range(1, 1024)] = 8
    """GPUs of a node, one for each rank."""
    max_time: Annotated[float, Range(0, 1e6, zero="no limit")] = 0.0
    """Hours after which the queue ends a job, which then continues as another (Slurm's MaxTime); 0: no limit."""
    price: Annotated[float, Range(0, 1e9, zero="not known")] = 0.0
    """Price of a GPU-hour, in any currency; 0: not known, and no cost is shown."""
    failures_per_node_day: Annotated[float, Range(1e-9, 1000)] = 0.0065
    """Failures per node and day (0.0065: Meta's RSC-1, arXiv 2410.21680). Goodput is also shown at other published
    rates."""
    startup_seconds: Annotated[float, Range(0, 1e6)] = 180.0
    """Seconds from a job's start to its first step; 180 is an estimate, RUN/ledger.jsonl has yours."""
    queue_seconds: Annotated[float, Range(0, 1e8)] = 122.0
    """Seconds in the queue before a job continues; 122 was measured for a requeued job in an empty queue (Slurm
    22.05)."""
    restart_seconds: Annotated[float, Range(0, 1e8, zero="300, the queue and the start-up")] = 0.0
    """Seconds from a failure to the next step; 0: 300 until Slurm misses the node (SlurmdTimeout), the wait in the
    queue, and the start-up."""
    writer_gb_per_second: Annotated[float, Range(1e-3, 1e4)] = 1.0
    """GB/s at which a node writes checkpoints; BLOOM's wrote 1.2 (2.3 TB in 40 s on 48 nodes)."""
    image_bytes: Annotated[int, Range(1, 1_000_000_000)] = 110_000
    """Mean bytes of an image; 110,000 is ImageNet's."""
    samples_per_block: Annotated[int, Range(1, 1_000_000)] = 64
    """Images per block of the dataset, which training reads in one request (`pack --samples-per-block`)."""
    out: str = ""
    """File to draw goodput, days and GPU-hours over the nodes in, or the cost over the image size, .svg or .html;
    empty: none."""


def refuse_wrong_nodes(job: OnNodes, *, gpu: str, is_num_gpus_given: bool, is_drawn: bool) -> None:
    """UserError for flags that contradict each other, or say nothing without --nodes. `is_drawn`: --out is for more
    than nodes."""
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
    """What of a cluster to check before the first job is submitted; what is empty is left out."""

    cluster: str = ""
    """YAML file of your cluster's settings, as `patchline example cluster.yaml` prints it; empty: Slurm is left out."""
    run_dir: str = ""
    """Run directory, or a folder above it: a short job on two nodes checks that they share it."""
    url: str = ""
    """Where datasets or checkpoints will be, s3://bucket/prefix: small objects are written below it, and deleted."""
    nodes: Annotated[int, Range(1, 100_000)] = 1
    """Nodes that a job will ask for."""
    deep: bool = False
    """Also run a short job on all nodes: a timed matrix product on each, and an exchange between all."""
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
