"""The verdict of `patchline verify-resume` on one interrupted run.

On the same topology every loss and every tensor must have the same bits. Another topology adds up in another order, so
its losses may differ by rounding: by `tolerance`, or by ROUNDING, which the tests of elastic continuation hold in fp32,
or by a few times what unbroken runs on the same topologies differ by, if that is more. Tensors are then compared, but
not judged: Adam turns the rounding of a gradient that is zero in theory, such as that of a key's bias, into whole
steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.settings.models import VerifyResumeJob
from jobs.train.killed_runs import resumed_from
from pipeline.runs.comparison import (
    CheckpointComparison,
    LossDifference,
    StoredRun,
    compare_checkpoints,
    different_losses,
)

ROUNDING = {"fp32": 1e-5, "bf16": 1e-2}  # relative, of a loss
_TIMES_UNBROKEN = 4.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An interrupted run beside its unbroken twin. `limit`: the largest relative difference of losses that is allowed.
    `checkpoint`: the first one that differs, or the last one compared."""

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
        """Whether it is what was promised."""
        return self.first_above is None if self.limit else self.is_exact

    @property
    def first_above(self) -> LossDifference | None:
        """The first loss that differs by more than is allowed."""
        return next((each for each in self.losses if each.relative > self.limit), None)

    @property
    def largest(self) -> LossDifference | None:
        """The largest difference of losses."""
        return max(self.losses, key=lambda each: each.relative, default=None)


def outcome_of(
    job: VerifyResumeJob,
    *,
    title: str,
    kills: Sequence[str],
    expected: StoredRun,
    found: StoredRun,
    others: Sequence[StoredRun] = (),
) -> Outcome:
    """`others`: the unbroken runs of the other topologies; none if there is only one, whose bits must be the same."""
    num_losses, losses = different_losses(expected, found)
    steps = _steps_to_compare(job, expected, found)
    compared: list[CheckpointComparison] = []
    for step in steps[-1:] if others else steps:
        compared.append(compare_checkpoints(expected, found, step=step))
        if compared[-1].num_different:
            break
    return Outcome(
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
    """The steps of checkpoints that both runs have; the last one is compared in any case."""
    common = expected.checkpoints().keys() & found.checkpoints().keys()
    return sorted({*common, job.steps}) if job.compare == "all" else [job.steps]


def _limit(job: VerifyResumeJob, expected: StoredRun, others: Sequence[StoredRun]) -> float:
    if job.tolerance:
        return job.tolerance
    _, precision = expected.engine()
    return rounding_of(precision, [loss for other in others for loss in different_losses(expected, other)[1]])


def rounding_of(precision: str, unbroken: Sequence[LossDifference]) -> float:
    """The largest relative difference that counts as rounding. `unbroken`: between runs that were never interrupted;
    where one of them has no finite loss, nothing follows for the others."""
    apart = [each.relative for each in unbroken if math.isfinite(each.relative)]
    return max([ROUNDING[precision], *(_TIMES_UNBROKEN * each for each in apart)])
