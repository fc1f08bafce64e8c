"""Which fields of a job make it the run that it is, and what more steps mean for its learning rate.

    where and how it is run      may change at any time: they change results to rounding, or not at all
    what is measured on the way  may change until the run is done
    steps                        more of them are a decision of their own, --extend: the schedule is a function of them
    all else                     must stay

What the data state fixes (the seed, the batch, all that is under `data`) is compared by it: a dataset may move.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.training.config import TrainingJob
from pipeline.training.schedule import learning_rate
from shards.differences import Difference, differences, flattened

STEPS = "steps"
_OF_DATA_STATE = ("seed", "global_batch", "data.")
_WHERE_AND_HOW = (
    *("run_dir", "device", "threads", "micro_batch", "log_every_steps", "max_skipped_updates"),
    *("checkpoint.", "engine."),
)
_MEASURED = ("evaluation.",)
_PRECISION, _UNDECIDED = "engine.precision", "auto"


def other_values(before: Mapping[str, Any], now: Mapping[str, Any], *, is_done: bool) -> list[Difference]:
    """What differs between a run's recorded job and another one, without `steps`. Fields that only one of them knows,
    as it is of another version, are passed over."""
    was, is_now = flattened(before), flattened(now)
    free = (*_OF_DATA_STATE, *_WHERE_AND_HOW, *(() if is_done else _MEASURED))
    both = [name for name in was if name in is_now and name != STEPS and not name.startswith(free)]
    if is_done and _PRECISION in was and is_now.get(_PRECISION, _UNDECIDED) != _UNDECIDED:
        both.append(_PRECISION)
    return differences({name: was[name] for name in both}, {name: is_now[name] for name in both})


def extension(before: Mapping[str, Any], job: TrainingJob, *, step: int) -> str:
    """What happens to the learning rate of a run that is continued at `step` with more steps than before; empty where
    it is not."""
    num_steps = before.get(STEPS)
    if num_steps is None or job.steps <= num_steps:
        return ""
    was = learning_rate(max(0, step - 1), config=job.schedule, num_steps=num_steps)
    will_be = learning_rate(step, config=job.schedule, num_steps=job.steps)
    return (
        f"extended from {num_steps} to {job.steps} steps: step {step} had the learning rate {was:.3g}, "
        f"step {step + 1} will have {will_be:.3g} ({job.schedule.decay} schedule over {job.steps} steps)"
    )
