"""What `patchline verify-resume` says: a table, an object for scripts, and a line for each difference. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from jobs.settings.models import VerifyResumeJob
from jobs.train.resume_verdict import Outcome
from pipeline.runs.comparison import LossDifference, TensorDifference
from shards.output.quantities import plural
from shards.output.terminal import printable_name

_HEADS = ("killed and continued", "kills", "from steps", "losses", "tensors", "verdict")


def table_of(job: VerifyResumeJob, outcomes: Sequence[Outcome], *, folder: str | None) -> Table:
    """A line for each interrupted run."""
    title = printable_name(f"patchline verify-resume {job.recipe}".rstrip())
    caption = printable_name(f"{job.steps} steps each" + (f"; the runs are in {folder}" if folder else ""))
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for head in _HEADS:
        table.add_column(head, overflow="fold")
    for one in outcomes:
        table.add_row(
            one.title,
            str(len(one.kills)),
            ", ".join(map(str, one.continued_from)),
            _losses(one),
            _tensors(one),
            _verdict(one),
        )
    return table


def explanations(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each run that differs: where first, and by how much."""
    return [line for one in outcomes if not one.is_exact for line in _explained(one)]


def as_json(job: VerifyResumeJob, outcomes: Sequence[Outcome], *, folder: str | None) -> dict[str, Any]:
    """Differences that are infinite are null."""
    return {
        "recipe": job.recipe,
        "steps": job.steps,
        "same": all(one.is_right for one in outcomes),
        "folder": folder,
        "runs": [_run_as_json(one) for one in outcomes],
    }


def _run_as_json(one: Outcome) -> dict[str, Any]:
    checkpoint = one.checkpoint
    return {
        "run": one.title,
        "right": one.is_right,
        "exact": one.is_exact,
        "kills": list(one.kills),
        "continued_from": list(one.continued_from),
        "tolerance": one.limit,
        "losses": one.num_losses,
        "losses_different": len(one.losses),
        "first_loss": _finite(one.losses[0]) if one.losses else None,
        "first_loss_above_tolerance": _finite(one.first_above) if one.first_above else None,
        "largest_loss_difference": _finite(one.largest) if one.largest else None,
        "checkpoints_compared": list(one.checkpoint_steps),
        "tensors": checkpoint.num_tensors,
        "tensors_different": checkpoint.num_different,
        "first_tensor": _finite(checkpoint.first) if checkpoint.first else None,
        "largest_tensor_difference": _finite(checkpoint.largest) if checkpoint.largest else None,
    }


def _finite(difference: LossDifference | TensorDifference) -> dict[str, Any]:
    values = {**asdict(difference), "relative": difference.relative}
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()}  # fmt: skip


def _losses(one: Outcome) -> str:
    if not one.losses:
        return f"all {one.num_losses} the same bits"
    return f"{len(one.losses)} of {one.num_losses} differ, by {_percent(one.largest)} at most"


def _tensors(one: Outcome) -> str:
    checkpoint, count = one.checkpoint, len(one.checkpoint_steps)
    if not checkpoint.num_different:
        return f"all {checkpoint.num_tensors} the same bits, in {plural(count, 'checkpoint')}"
    return f"{checkpoint.num_different} of {checkpoint.num_tensors} differ in step {checkpoint.step}"


def _verdict(one: Outcome) -> str:
    if one.is_exact:
        return "exact"
    if one.is_right:
        return f"equal to rounding (up to {one.limit:.1g})"
    return "DIFFERS"


def _explained(one: Outcome) -> list[str]:
    """In the order in which it happened."""
    lines = []
    if one.losses:
        first = one.first_above or one.losses[0]
        above = " above rounding" if one.limit and one.first_above else ""
        lines.append(
            f"{one.title}: the first loss that differs{above} is that of step {first.step}: {_value(first.expected)} "
            f"unbroken, {_value(first.found)} continued; the largest difference is {_percent(one.largest)}, "
            f"in step {one.largest.step if one.largest else first.step}"
        )
    if one.checkpoint.first and one.checkpoint.largest:
        lines.append(f"{one.title}: {_tensor(one, one.checkpoint.first, one.checkpoint.largest)}")
    return lines


def _tensor(one: Outcome, first: TensorDifference, largest: TensorDifference) -> str:
    checkpoint = one.checkpoint
    if one.limit:
        return (
            f"of the {checkpoint.num_tensors} tensors in step {checkpoint.step}, the {largest.slot} of {largest.name} "
            f"differs most, by {largest.relative:.1e} of its norm"
        )
    earlier = "" if one.checkpoint_steps[0] == checkpoint.step else "; those saved before are the same"
    return (
        f"the first checkpoint that differs is that of step {checkpoint.step}{earlier}: the {first.slot} of "
        f"{first.name} is the first of {plural(checkpoint.num_different, 'tensor')} out of {checkpoint.num_tensors}; "
        f"element {first.element} is {first.expected!r} unbroken and {first.found!r} continued"
    )


def _percent(difference: LossDifference | None) -> str:
    return f"{difference.relative:.1e}" if difference and math.isfinite(difference.relative) else "an unknown amount"


def _value(loss: float | None) -> str:
    return "no line" if loss is None else repr(loss)
