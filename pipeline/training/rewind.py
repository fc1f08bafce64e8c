"""Goes back to a checkpoint from before a finding of the guard, and leaves out the data around that finding.

The engine is filled again in place, as in a new process. Before that, a new attempt is recorded with the data steps
that it leaves out, so that a run killed at any moment resumes as it would have continued. Checkpoints that the previous
attempt saved after the chosen one no longer count, even if their save is still running.
"""

import logging
from dataclasses import dataclass

from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.checkpoints.manifest import CheckpointManifest
from pipeline.data.position import Skipped, StepRange, range_around, step_of
from pipeline.training.guard import FILE_NAME, BadStep, add_finding
from pipeline.training.loop import Loop
from pipeline.training.settings.job import GuardConfig, TrainingJob
from pipeline.training.start import fill_from_checkpoint
from shards.errors import WillNotSucceedError

log = logging.getLogger(__name__)
MOST_IN_PLACE = 3  # the most rewinds to one checkpoint


@dataclass(frozen=True, kw_only=True)
class RewindPlan:
    """The data steps to skip, and the last step whose checkpoint was not trained on any of them."""

    skip: StepRange
    last_step: int


def plan_rewind(finding: BadStep, skipped: Skipped, *, config: GuardConfig) -> RewindPlan:
    """Returns where to go back to, for a run that has left out the data steps `skipped` so far."""
    skip = range_around(finding.data_step, length=config.skip_steps, skipped=skipped)
    return RewindPlan(skip=skip, last_step=step_of(skip.first, skipped))


def why_not(plan: RewindPlan, skipped: Skipped, found: CheckpointManifest | None, *, config: GuardConfig) -> str:
    """Returns why the run cannot be rewound to the checkpoint `found`; empty if it can. `found` is None if there is no
    checkpoint to go back to."""
    if len(skipped) >= config.max_rewinds:
        return f"it was rewound {len(skipped)} times already, and --guard.max-rewinds is {config.max_rewinds}"
    if found is None:
        return f"no checkpoint of step {plan.last_step} or before is there to rewind to"
    num_in_place = sum(one.first >= found.position.data_step for one in skipped)
    if num_in_place >= MOST_IN_PLACE:
        return f"{num_in_place} rewinds to the checkpoint of step {found.id.step} did not help"
    return ""


def rewind(loop: Loop, checkpoints: Checkpoints, finding: BadStep) -> CheckpointManifest:
    """Fills the loop's engine from an earlier checkpoint, under a new attempt, and returns its manifest. Raises
    WillNotSucceedError, and writes the evidence to RUN/guard.jsonl, if the run cannot be rewound. Collective."""
    loop.saving.settle()
    with loop.controls.ledger.time("startup"), loop.controls.stopping.writing():
        checkpoints.refuse_if_overtaken()
        plan, found = _register(loop.job, checkpoints, finding)
        fill_from_checkpoint(loop.train_step.gradients.engine, checkpoints, found, job=loop.job)
    loop.controls.ledger.resume()
    if checkpoints.world.is_first:
        _write_down(loop, checkpoints, finding, plan, found)
    return found


def _register(job: TrainingJob, checkpoints: Checkpoints, finding: BadStep) -> tuple[RewindPlan, CheckpointManifest]:
    """Records the rewind by beginning an attempt that skips the data steps. Raises WillNotSucceedError if the run
    cannot be rewound."""
    skipped = checkpoints.attempt.skipped
    plan = plan_rewind(finding, skipped, config=job.guard)
    while True:
        found = checkpoints.newest(at_most=plan.last_step)
        reason = why_not(plan, skipped, found, config=job.guard)
        if reason or not found:
            if checkpoints.world.is_first:
                add_finding(job.run_dir, finding, action="ended")
            raise WillNotSucceedError(f"{finding.words()}; {reason}. {_advice(job)}")
        if checkpoints.begin_attempt(found, skip=plan.skip):
            return plan, found


def _advice(job: TrainingJob) -> str:
    return (
        f"{job.run_dir}/{FILE_NAME} has the evidence: look at the samples of its positions, lower "
        "--schedule.learning-rate or set --clip-norm; --guard.max-rewinds and --guard.spike-z allow more"
    )


def _write_down(
    loop: Loop, checkpoints: Checkpoints, finding: BadStep, plan: RewindPlan, found: CheckpointManifest
) -> None:
    """Records the rewind in RUN/guard.jsonl, the ledger and the log."""
    job, ledger, skip = loop.job, loop.controls.ledger, plan.skip
    details = {"rewound_to": found.id.step, "first_skipped": skip.first, "end_skipped": skip.end}
    add_finding(job.run_dir, finding, action="rewound", **details)
    ledger.append(
        checkpoints.run_dir, step=found.id.step, attempt=found.id.attempt, rewind={"from": finding.step, **details}
    )
    log.warning(
        "%s; rewound to the checkpoint of step %d, data steps %d to %d are skipped (rewind %d of at most %d)",
        *(finding.words(), found.id.step, skip.first, skip.end - 1),
        *(len(checkpoints.attempt.skipped), job.guard.max_rewinds),
    )
