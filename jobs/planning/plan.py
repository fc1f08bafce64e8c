"""`patchline plan`: computes what a training recipe costs, before anything is packed, booked or started."""

import json
import math
from dataclasses import asdict, replace

from rich.table import Table

from jobs import exit_codes
from jobs.output import put, show_table
from jobs.planning.scaling import (
    at_sizes,
    cores_of_host,
    forecast_of,
    host_limit,
    in_plan,
    node_rows,
    node_tables,
    scaling_advice,
    size_table,
    sources_of,
)
from jobs.recipes import pretrain
from jobs.recipes.of_training import plan_of
from jobs.settings.runs import PlanJob
from pipeline.models.flops import attention_tiles
from pipeline.planning.forecast import COPY_BYTES_PER_SECOND, Cost, Forecast, cost_of
from pipeline.training.settings.schedule import steps_of
from pipeline.training.settings.tokens import TokensConfig, models_of, num_patches_at, phases_of
from pipeline.training.zero.batch_plan import shared_lanes, times_read
from shards.errors import UserError
from shards.output.quantities import DAY_SECONDS, duration, plural, size
from shards.output.terminal import printable_name

__all__ = ["PlanJob", "forecast_rows", "operations", "rows_of", "run"]

_SELECTIVE = ", about 1% slower by the lowering for an H200, which the rate leaves out"
"""What selective recomputation costs: 8 ms of ViT-H/14's step of 588 ms (docs/benchmarks.md)."""
_LEAST_SHOWN = 0.001
_LEAST_GIGABYTES, _LEAST_DAYS = 10**7, 0.1
Rows = list[tuple[str, str]]


def run(job: PlanJob) -> int:
    """Prints the plan as tables or, with --json, as one JSON object. With --out, also writes a plot."""
    try:
        cost = cost_of(job.training, num_images=job.num_images, num_classes=job.num_classes, days=job.days)
        found = forecast_of(job, cost, num_gpus=job.num_gpus) if job.gpu and not job.nodes else None
        nodes = node_rows(job, cost) if job.nodes else []
    except UserError as error:
        raise UserError(in_plan(str(error), job)) from None
    sizes = at_sizes(job)
    if job.out:
        from jobs.planning.plot import write_plot  # noqa: PLC0415 - only needed for --out

        write_plot(job, nodes, sizes)
    if job.json:
        told = {
            "cost": asdict(cost),
            "forecast": asdict(found) if found else None,
            "nodes": [asdict(one) for one in nodes],
        }
        told["image_sizes"] = [asdict(one) for one in sizes]
        put(json.dumps(told, allow_nan=False) + "\n")
        return exit_codes.DONE
    title = printable_name(f"patchline plan {job.recipe}".rstrip())
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in [*rows_of(job, cost), *(forecast_rows(found, job, cost) if found else [])]:
        table.add_row(name, printable_name(value))
    more = [*(node_tables(job, cost, nodes) if nodes else ()), *([size_table(job, sizes)] if sizes else ())]
    for one in (table, *more):
        show_table(one)
    return exit_codes.DONE


def rows_of(job: PlanJob, cost: Cost) -> Rows:
    """Returns the table's rows: names, and values with their units."""
    training, model = job.training, job.training.model
    images = f"{job.num_images:,} images" if job.num_images else "images not known (--num-images)"
    classes = model.num_classes or job.num_classes
    labels = f"{classes:,} classes" if classes else "classes not known (--num-classes)"
    head = f"{cost.num_head_parameters:,} of them in the head" if classes else "without the head"
    passes = (
        "one forward pass, and the head's gradients" if training.optimizer.freeze_backbone else "three forward passes"
    )
    if training.tokens.patch_sizes:
        passes += ", the mean over the patch sizes"
    if training.optimizer.sam_rho:
        passes += "; all of it twice, for SAM"
    if training.teacher.weights:
        passes += "; and the teacher's forward pass, once"
    return [
        ("model", f"{model.name} at {model.image_size} px"),
        *([("tokens", said)] if job.gpu and (said := _tile_of_class_token(job)) else []),
        ("dataset", f"{job.dataset or 'yours'}: {images}, {labels}"),
        ("parameters", f"{cost.num_parameters:,} ({head})"),
        ("forward, per image", _flops_of_forward(cost.forward_flops)),
        ("training, per image", f"{_flops_of_training(cost.train_flops)} ({passes})"),
        *([("tokens while training", said)] if (said := _tokens_while_training(job, cost)) else []),
        ("steps", f"{cost.num_steps:,} of {training.global_batch:,} images"),
        ("epochs", _epochs(job, cost)),
        ("images seen", f"{cost.num_images_seen:,}"),
        ("the whole run", operations(cost.total_exaflops)),
        (f"for {job.days:g} days", _required_rate(cost)),
    ]


def _tokens_while_training(job: PlanJob, cost: Cost) -> str:
    """Returns the patches of an image in each phase of the run, for each size that they may have, and the operations of
    all steps relative to whole images. Empty if all steps have all patches, of one size, of images of one size."""
    training = job.training
    if training.tokens == TokensConfig():
        return ""
    tokens, models, said = training.tokens, models_of(training.tokens, training.model), list[str]()
    of_models = [phases_of(tokens, model, num_steps=training.steps) for model in models]
    for alike in zip(*of_models, strict=True):  # a phase, with each patch size
        at = f"up to step {alike[0].end:,}: {alike[0].image_size} px"
        if not training.model.is_bit:
            counts = []
            for phase, model in zip(alike, models, strict=True):
                num_patches = num_patches_at(phase.image_size, model)
                counts.append(f"{num_patches if phase.num_stay is None else phase.num_stay:,} of {num_patches:,}")
            at += f", {_any_of(counts)} patches"
        said.append(at)
    whole_images = "whole images"
    if tokens.patch_sizes:
        said.insert(0, f"each step draws patches of {_any_of([str(patch) for patch in tokens.patch_sizes])} px")
        whole_images += f" in patches of {training.model.size.patch} px"
    whole = replace(training, tokens=TokensConfig())
    flops = cost_of(whole, num_images=job.num_images, num_classes=job.num_classes, days=job.days).train_flops
    return f"{'; '.join(said)}: {cost.train_flops / flops:.2f} times the operations of {whole_images}"


def _any_of(words: list[str]) -> str:
    """Returns the words as text such as `8, 16 or 32`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _tile_of_class_token(job: PlanJob) -> str:
    """Returns advice about a class token that fills one more tile of attention; empty if it fills none."""
    model = job.training.model
    if model.is_bit or model.attention == "axial" or model.pooling != "token":
        return ""
    if model.distillation_token:  # it goes with the class token
        return ""
    num_tokens = model.num_prefix_tokens + math.prod(model.grid)
    tiles, without = attention_tiles(num_tokens), attention_tiles(num_tokens - 1)
    if tiles == without:
        return ""
    advice = "--training.model.pooling average has no class token, and may need another learning rate"
    if make := pretrain.RECIPES.get(f"{job.recipe}_average"):
        rate = make().schedule.learning_rate
        advice = (
            f"the recipe {job.recipe}_average has no class token, a linear classifier and a learning rate of {rate:g}"
        )
    return (
        f"{num_tokens:,} fill {plural(tiles, 'tile')} of 128 in a GPU's attention, {num_tokens - 1:,} would fill "
        f"{without:,}: {advice}"
    )


def _epochs(job: PlanJob, cost: Cost) -> str:
    """Returns the number of epochs as text. For a dataset of another size, also says how many steps keep the recipe's
    number of epochs."""
    if cost.num_epochs is None:
        return "not known (--num-images)"
    meant = _epochs_meant(job.recipe, job.training.steps)
    if not meant:
        return f"{cost.num_epochs:,.2f}"
    steps = steps_of(meant, num_images=job.num_images, global_batch=job.training.global_batch)
    return f"{cost.num_epochs:,.2f}" + (
        "" if steps == cost.num_steps else f" (the recipe's {meant}: --training.steps {steps})"
    )


def _epochs_meant(recipe: str, steps: int) -> int:
    """Returns the number of epochs of a pre-training recipe on its own dataset. Returns 0 if `recipe` is not a
    pre-training recipe, the number is not whole, or `steps` is not the recipe's own."""
    if recipe not in pretrain.RECIPES:
        return 0
    own = plan_of(recipe, pretrain.RECIPES[recipe]())
    if not own.num_images or own.training.steps != steps:
        return 0
    epochs = steps * own.training.global_batch / own.num_images
    is_whole = abs(epochs - round(epochs)) * own.num_images <= own.training.global_batch
    return round(epochs) if is_whole else 0


def forecast_rows(found: Forecast, job: PlanJob, cost: Cost) -> Rows:
    """Returns the rows that only a plan on GPUs has."""
    plan, memory, budget = found.fit.plan, found.fit.memory, found.budget
    parts = {
        "weights": memory.weights,
        "gradients and buffers": memory.gradients,
        "fp32 masters": memory.masters,
        "optimiser's moments": memory.moments,
        "EMA": memory.average,
        "images": memory.images,
        "activations": memory.activations,
        "teacher": memory.teacher,
        "reserve": budget.reserve_bytes,
    }
    free = budget.bytes - memory.peak
    parts["free" if free >= 0 else "more than there is"] = abs(free)
    doubt = f"; {in_plan(found.fit.reason, job)}" if found.fit.is_warning else ""
    step = found.step
    rates = (found.images_per_second, found.least_images_per_second, found.most_images_per_second)
    rate = _with_range("{:,.0f} images/s", *rates)
    rate += f" at {_percent(found.mfu_reached)} of nominal operations"
    if found.hfu > found.mfu_reached:
        rate += f" (MFU; {_percent(found.hfu)} with the recomputed ones)"
    days = _with_range("{}", *(_days(found.days * rates[0] / each) for each in (rates[0], rates[2], rates[1])))
    shares = (step.compute / step.seconds, step.host / step.seconds, step.communication / step.seconds)
    compute, host, exchange = (_percent(share) for share in shares)
    of_step = (
        f"{_seconds(step.seconds)}: {compute} computes at {found.mfu:.0%} of nominal operations, {host} waits for the "
        f"host, {exchange} for exchanges between ranks. {scaling_advice(job, cost, num_gpus=plan.num_ranks)}"
    )
    lanes = job.training.data.lanes
    times = times_read(lanes, num_ranks=plan.num_ranks)
    reads = f"{times:.3g} times an epoch: {plan.num_ranks:,} ranks share {plural(lanes, 'lane')}; take a multiple of "
    reads += "the ranks that divides the batch as --training.data.lanes"
    if wrong := shared_lanes(lanes, job.training.data.window_blocks, num_ranks=plan.num_ranks):
        reads = f"a run does not begin so: {in_plan(wrong, job)}"
    stall = f"{found.stall_seconds:,.3f} s" if found.stall_seconds >= _LEAST_SHOWN else "less than 1 ms"
    return [
        (f"on {plan.num_ranks:,} x {found.gpu}", f"{budget.total_bytes / 1e9:,.1f} GB of memory on each"),
        *((f"  {name}", _gigabytes(num_bytes)) for name, num_bytes in parts.items() if num_bytes),
        (
            "micro-batch",
            f"{plan.micro_batch:,} x {plural(plan.accumulation, 'pass')} x {plural(plan.num_ranks, 'rank')}{doubt}",
        ),
        *([("recomputed", _recomputed_words(found))] if found.choices else []),
        ("predicted rate", rate),
        ("  source", sources_of([found])),
        ("a step", of_step),
        ("  host", host_limit(found)),
        ("cores of a host", cores_of_host(found.cores, job.training)),
        ("predicted time", f"{days}, without evaluation, checkpoints and restarts"),
        *([("dataset read", reads)] if times > 1 else []),
        ("checkpoint", f"{size(found.checkpoint_bytes)}, {_gigabytes(memory.saved)} per rank"),
        (
            "  stall",
            f"{stall} for the copy of a rank's state at {COPY_BYTES_PER_SECOND / 1e9:.0f} GB/s",
        ),
    ]


def _recomputed_words(found: Forecast) -> str:
    """Returns what the backward pass computes again, and what each choice would cost in memory and operations."""
    each = []
    for how, (activations, share) in found.choices.items():
        cost = f", at {share:.2f} times the operations" if share > 1 else ""
        each.append(f"{_gigabytes(activations)} with {how}{_SELECTIVE if how == 'selective' else cost}")
    setting = "--training.engine.activation-checkpointing"
    return f"{found.recomputed} ({setting}); activations take {'; '.join(each)}"


def _with_range(form: str, usual: object, least: object, most: object) -> str:
    """Returns a figure as text, with its range if there is one: `435 images/s (429 to 438)`."""
    number = form.partition(" ")[0]
    low, high = number.format(least), number.format(most)
    return form.format(usual) + (f" ({low.removesuffix(' days')} to {high})" if low != high else "")


def _gigabytes(num_bytes: int) -> str:
    """Returns the size in GB, or in a smaller unit if it is less than 0.01 GB."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= _LEAST_GIGABYTES else size(num_bytes)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share == 0 or share >= _LEAST_SHOWN else "less than 0.1%"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.1f} ms"


def _days(days: float) -> str:
    if days >= _LEAST_DAYS:
        return f"{days:,.2f} days"
    return duration(days * DAY_SECONDS) if days * DAY_SECONDS >= 1 else "less than 1 s"


def operations(exaflops: float) -> str:
    """Returns the number of operations in exaFLOPs, as in Table 6 of the ViT paper, or in a smaller unit if it would
    round to zero."""
    for unit, in_one in (("exaFLOPs", 1.0), ("petaFLOPs", 1e3), ("teraFLOPs", 1e6)):
        if exaflops * in_one >= _LEAST_SHOWN:
            return f"{exaflops * in_one:,.{_digits(exaflops * in_one)}f} {unit}"
    return f"{exaflops * 1e9:,.4f} gigaFLOPs"


def _flops_of_forward(flops: float) -> str:
    return f"{flops / 1e9:,.1f} GFLOP" if flops >= 1e9 else f"{flops / 1e6:,.1f} MFLOP"


def _flops_of_training(flops: float) -> str:
    return f"{flops / 1e12:,.4f} TFLOP" if flops >= 1e10 else f"{flops / 1e9:,.4f} GFLOP"


def _required_rate(cost: Cost) -> str:
    images, teraflops = cost.images_per_second, cost.teraflops_per_second
    images_shown = f"{images:,.0f}" if images >= 10 else f"{images:.3g}"
    flops_shown = f"{teraflops:,.1f} TFLOP/s" if teraflops >= 1 else f"{teraflops * 1e3:.3g} GFLOP/s"
    return f"{images_shown} images/s, {flops_shown}"


def _digits(number: float) -> int:
    """Returns the number of decimals to show: none from 100 on, as in the paper's table, and more for smaller
    numbers."""
    return 0 if number >= 100 else 1 if number >= 10 else 4
