"""Makes the verdict of `patchline verify-resume` on interrupted runs: a table, a JSON object for scripts, and lines
that explain differences.

On the same topology, every loss and every tensor must have the same bits. Another topology adds numbers in another
order, so losses may differ by rounding. They may differ by `tolerance` if it is given, otherwise by ROUNDING or, if
that is more, by four times the largest difference between unbroken runs on these topologies. Tensors are then compared,
but not judged: if a gradient is zero in theory, such as that of a key's bias, Adam turns its rounding error into a full
step.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from jobs.settings.runs import VerifyResumeJob
from pipeline.checkpoints.attempts import read_attempts
from pipeline.runs.comparison import (
    CheckpointComparison,
    LossDifference,
    StoredRun,
    TensorDifference,
    compare_checkpoints,
    different_losses,
)
from shards.output.quantities import plural
from shards.output.terminal import printable_name

ROUNDING = {"fp32": 1e-5, "bf16": 1e-2}  # relative difference of a loss
_TIMES_UNBROKEN = 4.0
_HEADS = ("killed and continued", "kills", "from steps", "losses", "tensors", "verdict")


def resumed_from(run: StoredRun) -> list[int]:
    """Returns the step from which each start of a run continued; 0 for the beginning."""
    return [attempt.resumed_from.step if attempt.resumed_from else 0 for attempt in read_attempts(run.store)]


@dataclass(frozen=True, kw_only=True)
class ResumeOutcome:
    """The comparison of an interrupted run with the unbroken one. `limit`: the largest relative difference of losses
    that is allowed; 0 if the bits must be the same. `checkpoint`: the first checkpoint that differs, or the last one
    compared."""

    title: str
    kills: tuple[str, ...]
    continued_from: tuple[int, ...]
    limit: float
    num_losses: int
    losses: tuple[LossDifference, ...]
    checkpoint_steps: tuple[int, ...]
    checkpoint: CheckpointComparison

    @property
    def is_exact(self) -> bool:
        """Whether there is no difference at all."""
        return not self.losses and not self.checkpoint.num_different

    @property
    def is_right(self) -> bool:
        """Whether all differences are allowed."""
        return self.first_above is None if self.limit else self.is_exact

    @property
    def first_above(self) -> LossDifference | None:
        """The first loss that differs by more than `limit`; None if there is none."""
        return next((each for each in self.losses if each.relative > self.limit), None)

    @property
    def largest(self) -> LossDifference | None:
        """The largest difference of losses; None if there is none."""
        return max(self.losses, key=lambda each: each.relative, default=None)


def outcome_of(
    job: VerifyResumeJob,
    *,
    title: str,
    kills: Sequence[str],
    expected: StoredRun,
    found: StoredRun,
    others: Sequence[StoredRun] = (),
) -> ResumeOutcome:
    """Compares an interrupted run with an unbroken one. `others`: the unbroken runs on the other topologies; if it is
    empty, the bits must be the same."""
    num_losses, losses = different_losses(expected, found)
    steps = _steps_to_compare(job, expected, found)
    compared: list[CheckpointComparison] = []
    for step in steps[-1:] if others else steps:
        compared.append(compare_checkpoints(expected, found, step=step))
        if compared[-1].num_different:
            break
    return ResumeOutcome(
        title=title,
        kills=tuple(kills),
        continued_from=tuple(resumed_from(found)[1:]),
        limit=_limit(job, expected, others) if others else 0.0,
        num_losses=num_losses,
        losses=tuple(losses),
        checkpoint_steps=tuple(each.step for each in compared),
        checkpoint=compared[-1],
    )


def _steps_to_compare(job: VerifyResumeJob, expected: StoredRun, found: StoredRun) -> list[int]:
    """Returns the steps of the checkpoints to compare. With --compare all, these are the steps that both runs have and
    the last step; otherwise only the last step."""
    common = expected.checkpoints().keys() & found.checkpoints().keys()
    return sorted({*common, job.steps}) if job.compare == "all" else [job.steps]


def _limit(job: VerifyResumeJob, expected: StoredRun, others: Sequence[StoredRun]) -> float:
    if job.tolerance:
        return job.tolerance
    _, precision = expected.engine()
    return rounding_of(precision, [loss for other in others for loss in different_losses(expected, other)[1]])


def rounding_of(precision: str, unbroken: Sequence[LossDifference]) -> float:
    """Returns the largest relative difference that counts as rounding. `unbroken`: the differences between runs that
    were not interrupted; infinite ones are ignored."""
    apart = [each.relative for each in unbroken if math.isfinite(each.relative)]
    return max([ROUNDING[precision], *(_TIMES_UNBROKEN * each for each in apart)])


def outcome_table(job: VerifyResumeJob, outcomes: Sequence[ResumeOutcome], *, folder: str | None) -> Table:
    """Returns a table with a line for each interrupted run."""
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


def explanations(outcomes: Sequence[ResumeOutcome]) -> list[str]:
    """Returns lines for each run that differs: where it differs first, and by how much."""
    return [line for one in outcomes if not one.is_exact for line in _explained(one)]


def as_json(job: VerifyResumeJob, outcomes: Sequence[ResumeOutcome], *, folder: str | None) -> dict[str, Any]:
    """Returns the outcomes for scripts, with null for infinite differences."""
    return {
        "recipe": job.recipe,
        "steps": job.steps,
        "same": all(one.is_right for one in outcomes),
        "folder": folder,
        "runs": [_run_as_json(one) for one in outcomes],
    }


def _run_as_json(one: ResumeOutcome) -> dict[str, Any]:
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


def _losses(one: ResumeOutcome) -> str:
    if not one.losses:
        return f"all {one.num_losses} the same bits"
    return f"{len(one.losses)} of {one.num_losses} differ, by {_percent(one.largest)} at most"


def _tensors(one: ResumeOutcome) -> str:
    checkpoint, count = one.checkpoint, len(one.checkpoint_steps)
    if not checkpoint.num_different:
        return f"all {checkpoint.num_tensors} the same bits, in {plural(count, 'checkpoint')}"
    return f"{checkpoint.num_different} of {checkpoint.num_tensors} differ in step {checkpoint.step}"


def _verdict(one: ResumeOutcome) -> str:
    if one.is_exact:
        return "exact"
    if one.is_right:
        return f"equal to rounding (up to {one.limit:.1g})"
    return "DIFFERS"


def _explained(one: ResumeOutcome) -> list[str]:
    """Explains the differences of one run."""
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


def _tensor(one: ResumeOutcome, first: TensorDifference, largest: TensorDifference) -> str:
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
