"""Whether a run that is there has a job's own values: one rule for chains, sweeps, VTAB and `patchline submit`."""

from collections.abc import Mapping
from typing import Any

from jobs.submittable import place_of
from pipeline.checkpoints.saved_job import STEPS
from pipeline.training.saving.same_run import OF_POSITION, WARMUP, other_values
from shards.schema.differences import Difference, differences, flattened

_READING = ("reading.", "num_threads", "steps_ahead", "memory_limit_bytes", "max_quarantined", "allow_other_decoder")
_HOW_READ = tuple(f"data.{name}" for name in _READING)
_PATHS = ("initial.weights", "evaluation.url", "fewshot.url", "fewshot.test_url")


def run_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, is_done: bool, extends: bool) -> list[Difference]:
    """What differs between a run's recorded job and another one: what `other_values` compares, and the data. Of these:

    seed, global_batch, data  must stay, apart from how the data is read, which training does not compare either
    data.url, data.mix        compared as text: a dataset may move, and the caller decides about its content
    steps                     must stay; more of them are no difference if the job `extends` the run
    schedule.warmup_steps     must stay; not compared if the job `extends` the run, which keeps its own
    model.num_classes         must stay; 0 now stands for what the run took from its dataset
    paths of other inputs     may be written differently (training itself is stricter), but an empty one is no path
    """
    both = flattened(before).keys() & flattened(now).keys()  # older versions had fewer fields
    own = [each for each in differences(before, now) if each.field.startswith((*OF_POSITION, STEPS))]
    found = other_values(before, now, is_done=is_done) + [each for each in own if each.field in both]
    return [each for each in found if not _is_free(each, extends=extends)]


def _is_free(change: Difference, *, extends: bool) -> bool:
    if change.field == STEPS:
        return extends and bool(change.now > change.before)
    if change.field in _PATHS and all(path and isinstance(path, str) for path in (change.before, change.now)):
        return place_of(change.before) == place_of(change.now)
    is_of_data = change.field == "model.num_classes" and change.now == 0
    return is_of_data or change.field.startswith(_HOW_READ) or (extends and change.field == WARMUP)
