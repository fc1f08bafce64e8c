"""Decides which jobs may continue a run: which fields must stay the same, and how more steps change the learning rate.

    where and how it runs          may change at any time; results stay equal to rounding, or exactly
    what is measured while it runs may change until the run is done
    steps                          more steps need --extend, because the schedule depends on their number
    all else                       must stay the same

The seed, the batch and everything under `data` are compared through the position of the stream, so a dataset may move.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.checkpoints.manifest import STEPS, SavedJob
from pipeline.data.position import StreamPosition, is_of_decoder
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.schedule import learning_rate
from shards.config_values import Difference, as_lines, differences, flattened
from shards.errors import UserError

_IMAGE_SIZE = "image_size"  # a field of the position; not compared, because the model has it, too
WARMUP = "schedule.warmup_steps"
OF_POSITION = ("seed", "global_batch", "data.")
_TEACHER, _DIGEST = "teacher.weights", "teacher.sha256"
_WHERE_AND_HOW = (
    *("run_dir", "device", "threads", "micro_batch", "log_every_steps", "max_skipped_updates"),
    *("norms_every_steps", "similarity_every_steps"),
    _TEACHER,  # may move; its digest must stay
    *("checkpoint.", "engine.", "guard.", "hang.", "loggers."),
)
_MEASURED = ("evaluation.", "fewshot.")
_PRECISION, _UNDECIDED = "engine.precision", "auto"


def refuse_changes(
    saved: SavedJob,
    stands_at: StreamPosition,
    *,
    job: TrainingJob,
    start: StreamPosition,
    is_done: bool = False,
    extend: bool = False,
) -> None:
    """Raises UserError, which names what differs, if a job may not continue a run, or is not the job of a run that is
    done.

    `saved`, `stands_at`: the job and the position of a checkpoint or of a DONE marker. `start`: the position before the
    first batch of `job`. The ranks and the engine (stage, precision, compilation, activation checkpointing) may change:
    results stay equal to rounding.
    """
    changed = _differences(saved, job, is_done=is_done)
    moved = stands_at.differences(start, allow_other_decoder=job.data.allow_other_decoder)
    changed += [change for change in moved if change.field != _IMAGE_SIZE]
    _refuse_other_steps(saved, job, step=stands_at.next_step, extend=extend, others=changed)
    if changed:
        hint = "; --data.allow-other-decoder accepts other versions" if any(map(is_of_decoder, changed)) else ""
        ended = "holds a run that finished with other values"
        how = ended if is_done else "holds a run that cannot be continued with other values"
        message = f"{job.run_dir} {how}:\n{as_lines(changed)}\nUse the same values, or another --run-dir{hint}"
        if is_done or any(change.field.startswith("model.") for change in changed):
            raise UserError(message)
        lines, flags = _new_run(saved, job, step=stands_at.next_step)
        raise UserError("\n".join([message, *lines]), flags=flags)


def _new_run(saved: SavedJob, job: TrainingJob, *, step: int) -> tuple[list[str], tuple[str, ...]]:
    """Returns lines that say how to keep the progress of a run whose other values are needed, and the flags of a new
    run that begins with its weights. If the batch has changed, the new run has the steps that see the remaining images,
    and a warm-up and a cooldown that fit them."""
    before, lines, folder = saved.job["global_batch"], list[str](), job.run_dir.rstrip("/")
    weights, steps = f"{folder}-weights-{step}", saved.job[STEPS]
    if before != job.global_batch:
        lines.append(
            f"If only the memory or the number of ranks has changed, keep --global-batch {before}: --micro-batch and "
            "the ranks may change at any time."
        )
        steps = max(1, round((steps - step) * before / job.global_batch))
    lines.append(
        "To keep the weights of this run, but not its optimiser and its learning rate, take them out and start a new "
        "run from them:"
    )
    lines.append(shlex.join(["patchline", "weights", folder, "--out", weights]))
    flags = ("--steps", str(steps), *_fitting(job, steps), "--initial.weights", weights, "--initial.no-new-head")
    return lines, (*flags, "--run-dir", f"{folder}-from-{step}")


def _fitting(job: TrainingJob, steps: int) -> tuple[str, ...]:
    """Returns the flags of a warm-up and a cooldown in proportion to `steps`; none if the job's own fit."""
    warmup, cooldown = job.schedule.warmup_steps, job.schedule.cooldown_steps
    if warmup < steps and warmup + cooldown <= steps:
        return ()
    flags = ("--schedule.warmup-steps", str(warmup * steps // job.steps))
    if not cooldown:
        return flags
    return (*flags, "--schedule.cooldown-steps", str(math.ceil(cooldown * steps / job.steps)))


def _differences(saved: SavedJob, job: TrainingJob, *, is_done: bool) -> list[Difference]:
    """Returns the fields that differ between two jobs, apart from their data and their steps."""
    before = {
        "model": saved.model,
        "loss": saved.loss,
        "optimizer": {"name": saved.optimizer},
        "ema_decay": saved.ema_decay,
    }
    now = {
        "model": asdict(job.model),
        "loss": job.loss,
        "optimizer": {"name": job.optimizer.name},
        "ema_decay": job.ema_decay,
    }
    others = other_values(saved.job, asdict(job), is_done=is_done)
    return differences(before, now) + [change for change in others if change.field not in flattened(before)]


def _refuse_other_steps(
    saved: SavedJob, job: TrainingJob, *, step: int, extend: bool, others: Sequence[Difference]
) -> None:
    """Raises UserError if the job has fewer steps than the run has reached, or another number of steps without
    `extend`. The message also lists `others`, except for the warm-up, which follows from the steps, and which --extend
    keeps."""
    before = saved.job[STEPS]
    if step > job.steps:
        raise UserError(
            f"{job.run_dir} has {step} steps already, --steps is {job.steps}; give {step} or more, or another --run-dir"
        )
    if job.steps == before or (job.steps > before and extend):
        return
    hint = "; to continue it with more steps, add --extend" if job.steps > before else ""
    other_steps = Difference(field=STEPS, before=before, now=job.steps)
    changed = [other_steps, *(other for other in others if other.field != WARMUP)]
    raise UserError(
        f"{job.run_dir} holds a run of another length:\n{as_lines(changed)}\n"
        f"The learning rate depends on it. Use the same value, or another --run-dir{hint}"
    )


def other_values(before: Mapping[str, Any], now: Mapping[str, Any], *, is_done: bool) -> list[Difference]:
    """Returns the fields, apart from `steps`, that must stay the same but differ between a run's recorded job and
    another job. `is_done`: whether the run is done. A teacher is compared by its digest or, if one of the jobs has none
    because no run has filled it in or because it has no teacher, by its path."""
    was, is_now = flattened(before), flattened(now)
    free = (*OF_POSITION, *_WHERE_AND_HOW, *(() if is_done else _MEASURED))
    is_precision_fixed = is_done and is_now[_PRECISION] != _UNDECIDED

    def compared(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in values.items()
            if (name != STEPS and not name.startswith(free)) or (name == _PRECISION and is_precision_fixed)
        }

    found = differences(compared(was), compared(is_now))
    if _DIGEST in (each.field for each in found) and not (was.get(_DIGEST) and is_now.get(_DIGEST)):
        paths = ({_TEACHER: values.get(_TEACHER, "")} for values in (was, is_now))
        found = [each for each in found if each.field != _DIGEST] + differences(*paths)
    return found


def extension(before: Mapping[str, Any], job: TrainingJob, *, step: int) -> str:
    """Returns text about the learning rate of a run that continues at `step` with more steps than before; empty if the
    number of steps has not grown."""
    num_steps = before[STEPS]
    if job.steps <= num_steps:
        return ""
    was = learning_rate(max(0, step - 1), config=job.schedule, num_steps=num_steps)
    will_be = learning_rate(step, config=job.schedule, num_steps=job.steps)
    return (
        f"extended from {num_steps} to {job.steps} steps: step {step} had the learning rate {was:.3g}, "
        f"step {step + 1} will have {will_be:.3g} ({job.schedule.decay} schedule over {job.steps} steps)"
    )
