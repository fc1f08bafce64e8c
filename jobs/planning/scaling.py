"""Makes the tables of `patchline plan`: costs by number of nodes and by image size.

The products of attention grow with the square of the number of tokens, that is, with the fourth power of the image's
side (with axial attention, the third power). Everything else in a layer grows with the number of tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from jobs.arguments import with_flags_of_group
from jobs.flags import flags_of
from jobs.output import WIDTH
from jobs.settings.runs import PlanJob
from pipeline.models.activations import activations_of
from pipeline.models.flops import attention_flops, forward_flops
from pipeline.planning.cluster_plan import Cluster, NodesPlan, plan_nodes
from pipeline.planning.forecast import Cost, Forecast, forecast
from pipeline.planning.host_cores import IMAGE_SECONDS, MEASURED_PIXELS, PROCESS_IMAGES_PER_SECOND, HostCores
from pipeline.planning.rates import rates_from
from pipeline.planning.step_time import Network, gpu_named
from pipeline.training.fitting.fit import with_recomputed
from pipeline.training.fitting.memory import pass_of
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.tokens import TokensConfig
from shards.errors import UserError
from shards.output.quantities import DAY_SECONDS, duration, plural, short_count, size

_EFFICIENT = 0.5  # the share of a step that is spent on computing
_MOST_DOUBLED = 8  # to find an efficient batch, fewer doublings than this are tried
_LEAST = 0.1  # numbers from here on have at most two decimals
_MOST = 999_999.5  # numbers from _LEAST up to this are written in full


def node_rows(job: PlanJob, cost: Cost) -> list[NodesPlan]:
    """Returns the plan for each number of nodes, in ascending order. Raises UserError for a number on which the job
    does not run."""
    cluster = _cluster(job)
    rows = []
    for num_nodes in sorted(job.nodes):
        gpu_named(job.gpu)  # an unknown GPU is refused here, so that the message names no number of nodes
        try:
            found = forecast_of(job, cost, num_gpus=num_nodes * job.gpus_per_node)
        except UserError as error:
            raise UserError(f"--nodes {num_nodes}: {error}") from None
        rows.append(plan_nodes(found, cluster, num_nodes=num_nodes))
    return rows


def forecast_of(job: PlanJob, cost: Cost, *, num_gpus: int) -> Forecast:
    """Returns the forecast of the job on this number of GPUs. Raises UserError as `forecast` does."""
    return forecast(
        job.training,
        cost,
        gpu=job.gpu,
        num_gpus=num_gpus,
        rates=rates_from(job.measured, gpu=job.gpu, mfu=job.mfu),
        num_classes=job.num_classes,
        network=Network(gpus_per_node=job.gpus_per_node, gbits=job.network_gbits),
    )


def in_plan(text: str, job: PlanJob) -> str:
    """Returns the message with the names that flags of the training job have in this command, such as
    --training.data.lanes."""
    return with_flags_of_group(text, flags_of(job.training), group="training")


def _cluster(job: PlanJob) -> Cluster:
    return Cluster(
        gpus_per_node=job.gpus_per_node,
        limit_seconds=job.max_time * 3600.0,
        price=job.price,
        failures_per_node_day=job.failures_per_node_day,
        startup_seconds=job.startup_seconds,
        queue_seconds=job.queue_seconds,
        restart_seconds=job.restart_seconds,
        writer_bytes_per_second=job.writer_gb_per_second * 1e9,
        image_bytes=job.image_bytes,
        samples_per_block=job.samples_per_block,
        lanes=job.training.data.lanes,
    )


def node_tables(job: PlanJob, cost: Cost, rows: Sequence[NodesPlan]) -> list[Table]:
    """Returns the tables with a row for each number of nodes."""
    return [
        _time_table(job, rows),
        _step_table(job, cost, rows),
        _store_table(job, rows),
        _goodput_table(rows),
    ]


def _step_table(job: PlanJob, cost: Cost, rows: Sequence[NodesPlan]) -> Table:
    most = rows[-1].num_gpus
    mfus = [plan.speeds.usual.mfu for plan in rows]
    compute = " to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(mfus), max(mfus))))
    caption = (
        f"per GPU: images of a step; compute: at {compute} of nominal operations; host: the GPU waits for its process "
        f"to launch them; exchange: between ranks, with {job.network_gbits:,g} Gbit/s of network per node "
        "(--network-gbits), after the backward pass. MFU: of the whole step. "
        f"{scaling_advice(job, cost, num_gpus=most)} Host: {host_limit(forecast_of(job, cost, num_gpus=most))}."
    )
    columns = {
        "nodes": [f"{plan.num_nodes:,}" for plan in rows],
        "GPUs": [f"{plan.num_gpus:,}" for plan in rows],
        "per GPU": [f"{plan.images_per_gpu:,}" for plan in rows],
        "compute ms": [few(1e3 * plan.step.compute) for plan in rows],
        "host ms": [few(1e3 * plan.step.host) for plan in rows],
        "exchange ms": [few(1e3 * plan.step.communication) for plan in rows],
        "step ms": [few(1e3 * plan.step.seconds) for plan in rows],
        "MFU, %": [_percent(plan.mfu_reached) for plan in rows],
    }
    return _numbers("a step", caption, columns)


def sources_of(found: Sequence[Forecast | NodesPlan]) -> str:
    """Returns where the rates of these forecasts are from, and what of them nobody has measured."""
    said = list(dict.fromkeys(one.speeds.source for one in found))
    other = dict.fromkeys(f"{one.micro_batch:,}" for one in found if one.micro_batch != one.speeds.micro_batch > 0)
    if other:
        said.append(f"nobody has measured {' or '.join(other)} images a pass")
    if any(one.num_gpus > 1 for one in found):
        said.append("exchanges between ranks are a forecast, which nobody has measured")
    return "; ".join(said)


def host_limit(found: Forecast) -> str:
    """Returns a sentence that says with how many images, and on how many GPUs, a GPU waits for its host."""
    took = _range_of([few(1e3 * seconds) for seconds in found.launch_seconds])
    fewest = _range_of([f"{math.ceil(number):,}" for number in found.images_per_launch])
    return (
        f"{took} ms to launch a pass; with fewer than {fewest} images a GPU waits for it, which is on more than "
        f"{gpus_before_host(found)}. {found.speeds.host_source}"
    )


def gpus_before_host(found: Forecast) -> str:
    """Returns on how many GPUs, at least and at most, a GPU has so many images that it never waits for its host."""
    batch = found.fit.plan.global_batch
    usual, fewest = (max(1, int(batch / number)) for number in found.images_per_launch)
    return f"{_range_of([f'{fewest:,}', f'{usual:,}'])} GPUs"


def _range_of(texts: Sequence[str]) -> str:
    """Returns `17 to 51`, or `17` if both are equal."""
    return " to ".join(dict.fromkeys(texts))


def scaling_advice(job: PlanJob, cost: Cost, *, num_gpus: int) -> str:
    """Returns a sentence that says up to how many GPUs strong scaling works and, if `num_gpus` is more, what to do."""
    training, batch = job.training, job.training.global_batch
    numbers = [2**power for power in range(int(math.log2(batch)) + 1) if batch % 2**power == 0]
    efficient = [number for number in numbers if _compute_share(job, cost, training, number) >= _EFFICIENT]
    said = f"At a batch of {batch:,}, less than half of a step computes on any number of GPUs"
    if efficient:
        said = f"At a batch of {batch:,}, at least half of a step computes on up to {plural(max(efficient), 'GPU')}"
    if _compute_share(job, cost, training, num_gpus) >= _EFFICIENT:
        return f"{said}."
    larger = (replace(training, global_batch=batch * 2**power) for power in range(1, _MOST_DOUBLED))
    for other in larger:
        if (share := _compute_share(job, cost, other, num_gpus)) >= _EFFICIENT:
            fewer = "fewer GPUs or " if num_gpus > 1 else ""
            return (
                f"{said}; on {num_gpus:,}, take {fewer}a larger batch: of {other.global_batch:,}, {share:.0%} of the "
                "step computes (--training.global-batch; with a learning rate of its own)."
            )
    return f"{said}; take fewer." if num_gpus > 1 else f"{said}."


def _compute_share(job: PlanJob, cost: Cost, training: TrainingJob, num_gpus: int) -> float:
    """Returns the share of a step that is spent on computing, from 0 to 1; 0 if the job does not fit."""
    try:
        return forecast_of(replace(job, training=training), cost, num_gpus=num_gpus).step.compute_share
    except UserError:
        return 0.0


def cores_of_host(cores: HostCores | None, training: TrainingJob) -> str:
    """Returns the cores that a host needs to feed its GPUs, with the source, and whether known hosts have as many."""
    image_size, data = training.model.image_size, training.data
    if cores is None:
        return f"not known: decoding was measured at {MEASURED_PIXELS} px, and costs much less at {image_size} px"
    low, high = (f"{1e3 * seconds:.2f}" for seconds in IMAGE_SECONDS)
    needed = f"{cores.least:,} to {cores.most:,}" if cores.least < cores.most else f"{cores.most:,}"
    said = f"{needed} for {cores.images_per_second:,.0f} images/s: {low} ms of CPU time each "
    said += f"(photographs of ImageNet, on an AMD EPYC) to {high} (generated pictures, on an H200's host), and one "
    said += "core for each rank's process."
    if image_size > MEASURED_PIXELS:
        said += f" Measured at {MEASURED_PIXELS} px: {image_size} px cost more."
    if data.randaugment.num_ops or data.augment.three_augment or data.augment.color_jitter:
        said += " Measured with crops and flips: this recipe's augmentation costs more."
    if cores.is_process_slower:
        said += f" No process has yet prepared more than {PROCESS_IMAGES_PER_SECOND:,} images/s for its rank."
    if not cores.known_host:
        return said
    has = f"has {cores.known_cores:,} for {plural(cores.num_ranks, 'GPU')}"
    if cores.known_cores >= cores.most:
        return f"{said} A {cores.known_host} {has}."
    short = "TOO FEW" if cores.known_cores < cores.least else "perhaps too few"
    return f"{said} A {cores.known_host} {has}: {short}; pack smaller images (--resize.short-side 256)."


def _time_table(job: PlanJob, rows: Sequence[NodesPlan]) -> Table:
    limit = f"jobs of at most {job.max_time:g} hours" if job.max_time else "no limit of the queue (--max-time)"
    first = rows[0]
    caption = (
        f"{job.failures_per_node_day:g} failures per node and day, {duration(first.restart_seconds)} to restart, "
        f"{duration(job.startup_seconds)} of start-up; {limit}. days: with failures and the queue; pieces: jobs that "
        "the limit alone makes; GPU-hours: the forecast of what the whole run takes (`patchline submit ... --dry-run` "
        "shows the most that each job may take, its GPUs for its whole time limit). Without evaluation and waits for "
        f"data. images/s: {sources_of(rows)}."
    )
    ranges = {
        plan.num_nodes: (few(plan.least_images_per_second), few(plan.most_images_per_second))
        for plan in rows
        if plan.least_images_per_second < plan.most_images_per_second
    }
    if ranges:
        told = ", ".join(f"{least} to {most} on {num_nodes:,}" for num_nodes, (least, most) in ranges.items())
        caption += f" From the least to the most: {told}."
    busiest = max(rows, key=lambda plan: plan.images_per_second / plan.num_nodes)
    caption += f" Cores of a host: {cores_of_host(busiest.cores, job.training)}"
    columns = {
        "nodes": [f"{plan.num_nodes:,}" for plan in rows],
        "GPUs": [f"{plan.num_gpus:,}" for plan in rows],
        "images/s": [few(plan.images_per_second) for plan in rows],
        "goodput": [f"{_percent(plan.outcome.goodput)} %" for plan in rows],
        "failures": [few(plan.outcome.num_failures) for plan in rows],
        "pieces": [f"{plan.outcome.num_pieces:,}" for plan in rows],
        "days": [few(plan.days) for plan in rows],
        "GPU-hours": [few(plan.gpu_hours) for plan in rows],
        **({"cost": [few(plan.cost) for plan in rows]} if job.price else {}),
    }
    return _numbers(f"on nodes of {job.gpus_per_node} x {job.gpu}", caption, columns)


def _store_table(job: PlanJob, rows: Sequence[NodesPlan]) -> Table:
    first = rows[0].traffic
    shared = [f"{plan.num_nodes:,}" for plan in rows if plan.traffic.times_read > 1]
    caption = (
        f"images of {job.image_bytes:,} bytes (--image-bytes) in blocks of {job.samples_per_block}: "
        f"{size(round(first.read_bytes))} per request. upload: checkpoints on average; peak: while one is written "
        f"({job.writer_gb_per_second:g} GB/s per node)."
    )
    if shared:
        lanes = job.training.data.lanes
        caption += (
            f" With {', '.join(shared)} nodes ranks share lanes and read them several times: take a multiple of the "
            f"ranks that divides the batch as --training.data.lanes (now {lanes})."
        )
        if rows[-1].num_gpus > lanes:
            caption += " A run does not begin with more ranks than lanes."
    traffic = [plan.traffic for plan in rows]
    columns = {
        "nodes": [f"{plan.num_nodes:,}" for plan in rows],
        "S3 GB/s": [few(one.read_bytes_per_second / 1e9) for one in traffic],
        "requests/s": [few(one.reads_per_second) for one in traffic],
        "save every": [duration(plan.interval_seconds) for plan in rows],
        "stall s": [few(plan.stall_seconds) for plan in rows],
        "commit s": [few(plan.commit_seconds) for plan in rows],
        "upload GB/s": [few(one.upload_bytes_per_second / 1e9) for one in traffic],
        "peak": [few(one.peak_upload_bytes_per_second / 1e9) for one in traffic],
    }
    return _numbers("store and checkpoints", caption, columns)


def _goodput_table(rows: Sequence[NodesPlan]) -> Table:
    caption = (
        "Percent of the wall time that trains, at published failures per node and day: 0.00234 and 0.0065 on Meta's "
        "two clusters and 0.0237 of jobs of 1,024 GPUs there (arXiv 2410.21680), 0.00379 for Llama 3 "
        "(arXiv 2407.21783), 0.016 for OPT-175B (its logbook)."
    )
    columns = {
        "nodes": [f"{plan.num_nodes:,}" for plan in rows],
        "above": [_percent(plan.outcome.goodput) for plan in rows],
        **{name: [_percent(plan.goodputs[name]) for plan in rows] for name in rows[0].goodputs},
    }
    return _numbers("goodput at published failure rates, %", caption, columns)


def _numbers(title: str, caption: str, columns: Mapping[str, Sequence[str]]) -> Table:
    """Returns a table of numbers, made from the cells of each column. It is as wide as a usual terminal."""
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        width=WIDTH,
    )
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def few(number: float) -> str:
    """Returns a number as text: below 0.1 with two significant digits, from a million on in short form, otherwise with
    at most two decimals."""
    if 0 < number < _LEAST:
        return f"{number:.2g}"
    if number >= _MOST:
        return short_count(number)
    digits = 0 if number >= 100 else 1 if number >= 10 else 2
    return f"{number:,.{digits}f}"


def summary(job: PlanJob, rows: Sequence[NodesPlan]) -> str:
    """Returns a description of the plot in words: the time and goodput with the fewest and with the most nodes."""
    first, last = rows[0], rows[-1]
    parts = [
        f"{plural(plan.num_nodes, 'node')}: {duration(plan.days * DAY_SECONDS)}, goodput "
        f"{_percent(plan.outcome.goodput)} %"
        for plan in ((first, last) if len(rows) > 1 else (first,))
    ]
    return f"{job.recipe or 'A run'} on {job.gpus_per_node} x {job.gpu} per node. {'; '.join(parts)}."


@dataclass(frozen=True, kw_only=True)
class AtSize:
    """The cost of an image with this side, in pixels: the number of tokens (0 for a BiT ResNet), the operations of a
    forward pass, how many of these operations are in the products of attention, and the bytes that training needs for
    the image."""

    image_size: int
    num_tokens: int
    forward_flops: int
    attention_flops: int
    activation_bytes: int


def at_sizes(job: PlanJob) -> list[AtSize]:
    """Returns the cost at each of `--image-sizes`, in ascending order. Raises UserError for a size that is not a
    multiple of the patch."""
    training = replace(job.training, tokens=TokensConfig())  # of whole images
    model = replace(training.model, num_classes=training.model.num_classes or max(1, job.num_classes))
    stride = 1 if model.is_bit else model.stride
    if training.engine.activation_checkpointing == "auto":  # what is decided depends on the GPU
        training = with_recomputed(training, "off")
    how = pass_of(training, is_on_gpu=True, element_bytes=4 if training.engine.precision == "fp32" else 2)
    found = []
    for side in sorted(job.image_sizes):
        if side % stride:
            lower, upper = side // stride * stride, -(-side // stride) * stride
            sizes = f"{lower} or {upper}" if lower else str(upper)
            raise UserError(f"--image-sizes has {side}, not a multiple of the patch ({stride} px); take {sizes}")
        at = replace(model, image_size=side)
        kept = activations_of(at, how)
        num_tokens = 0 if at.is_bit else at.num_prefix_tokens + at.grid[0] * at.grid[1]
        found.append(
            AtSize(
                image_size=side,
                num_tokens=num_tokens,
                forward_flops=forward_flops(at),
                attention_flops=attention_flops(at),
                activation_bytes=kept.image_bytes + kept.working_bytes,
            )
        )
    return found


def size_table(job: PlanJob, found: Sequence[AtSize]) -> Table:
    """Returns a table with a row for each image size."""
    kind = "fp32" if job.training.engine.precision == "fp32" else "bf16"
    checkpointing = job.training.engine.activation_checkpointing
    recomputed = "" if checkpointing in ("off", "auto") else f" and activation checkpointing {checkpointing}"
    model = job.training.model
    is_axial = not model.is_bit and model.attention == "axial"
    growth = "tokens times those of a row and a column" if is_axial else "square of the tokens"
    caption = (
        f"attention: the share of its two products, which grow with the {growth}. memory: what training "
        f"keeps and needs for one image more, in {kind}{recomputed}, before torch.compile saves some of it."
    )
    columns = {
        "px": [f"{at.image_size:,}" for at in found],
        "tokens": [f"{at.num_tokens:,}" if at.num_tokens else "-" for at in found],
        "GFLOP": [few(at.forward_flops / 1e9) for at in found],
        "times": [f"{at.forward_flops / found[0].forward_flops:.2f}" for at in found],
        "attention": [f"{at.attention_flops / at.forward_flops:.1%}" for at in found],
        "memory MB": [few(at.activation_bytes / 1e6) for at in found],
    }
    return _numbers("over the image size", caption, columns)
