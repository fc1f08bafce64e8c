"""`patchline plan`: what a training recipe costs, before anything is packed, booked or started."""

from rich.table import Table

from jobs import exit_codes
from jobs.model_jobs import PlanJob
from jobs.screen import show_table
from pipeline.training.cost import Cost, cost_of
from shards.terminal import printable_name

__all__ = ["PlanJob", "operations", "rows_of", "run"]

_LEAST_SHOWN = 0.001
Rows = list[tuple[str, str]]


def run(job: PlanJob) -> int:
    """Prints the table."""
    cost = cost_of(job.training, num_images=job.num_images, num_classes=job.num_classes, days=job.days)
    title = printable_name(f"patchline plan {job.recipe}".rstrip())
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows_of(job, cost):
        table.add_row(name, printable_name(value))
    show_table(table)
    return exit_codes.DONE


def rows_of(job: PlanJob, cost: Cost) -> Rows:
    """The table's rows: name and value, numbers with units."""
    training, model = job.training, job.training.model
    images = f"{job.num_images:,} images" if job.num_images else "images not known (--num-images)"
    classes = model.num_classes or job.num_classes
    labels = f"{classes:,} classes" if classes else "classes not known (--num-classes)"
    head = f"{cost.num_head_parameters:,} of them in the head" if classes else "without the head"
    epochs = f"{cost.num_epochs:,.2f}" if cost.num_epochs is not None else "not known (--num-images)"
    return [
        ("model", f"{model.name} at {model.image_size} px"),
        ("dataset", f"{job.dataset or 'yours'}: {images}, {labels}"),
        ("parameters", f"{cost.num_parameters:,} ({head})"),
        ("forward, per image", _flops_of_forward(cost.forward_flops)),
        ("training, per image", f"{_flops_of_training(cost.train_flops)} (three forward passes)"),
        ("steps", f"{cost.num_steps:,} of {training.global_batch:,} images"),
        ("epochs", epochs),
        ("images seen", f"{cost.num_images_seen:,}"),
        ("the whole run", operations(cost.total_exaflops)),
        (f"for {job.days:g} days", _required_rate(cost)),
    ]


def operations(exaflops: float) -> str:
    """In exaFLOPs, as in the paper's table, or in a smaller unit if that would round to nothing."""
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
    """Decimals to show: none from 100 on, as in the paper's table; below, at least three digits."""
    return 0 if number >= 100 else 1 if number >= 10 else 4
