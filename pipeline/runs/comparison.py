"""Compares two runs of one job: their losses step by step, and the tensors of their checkpoints.

Values are equal if they have the same bits. Differences are relative: for losses, to the larger of the two; for
tensors, the norm of the difference over the norm of the expected tensor. One tensor of each run is in memory at a time,
besides what RankFiles holds.
"""

import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.checkpoints.attempts import FAULTS
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId, CheckpointManifest, manifest_from_json
from pipeline.checkpoints.rank_file_in import open_checkpoint
from pipeline.checkpoints.stored import standing_in
from pipeline.shared_settings import METRICS_FILE
from pipeline.training.reporting.ledger import last_saved
from shards.config_values import shown_value
from shards.errors import InvalidDataError
from shards.files.local_files import each_line, is_finite, is_step
from shards.files.looks import patiently
from shards.store import Store


@dataclass(frozen=True, kw_only=True)
class LossDifference:
    """The losses of one step in two runs. None means that a run's metrics have no loss for this step."""

    step: int
    expected: float | None
    found: float | None

    @property
    def relative(self) -> float:
        """The relative difference, which is infinite if a loss is missing or not finite."""
        if self.expected is None or self.found is None:
            return math.inf
        largest = max(abs(self.expected), abs(self.found))
        difference = abs(self.expected - self.found) / largest if largest else 0.0
        return difference if math.isfinite(difference) else math.inf


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor that differs between two checkpoints. `num_elements`: how many of its elements differ. `element`: the
    first of these, counted from 0. `expected` and `found`: its values."""

    step: int
    slot: str
    name: str
    relative: float
    num_elements: int
    element: int
    expected: float
    found: float


@dataclass(frozen=True, kw_only=True)
class CheckpointComparison:
    """How the checkpoints of one step differ between two runs. `first`: the first tensor, in the model's order, that
    differs. `largest`: the tensor with the largest relative difference."""

    step: int
    num_tensors: int
    num_different: int
    first: TensorDifference | None
    largest: TensorDifference | None


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run directory, and the store with its checkpoints."""

    run_dir: Path
    store: Store

    def checkpoints(self) -> dict[int, CheckpointId]:
        """Returns the standing checkpoints (pipeline/checkpoints/stored.py) by step, in ascending order."""
        standing = standing_in(self.store, recorded=last_saved(self.run_dir))
        return {each.step: each for each in sorted(standing, key=lambda each: each.step)}

    def engine(self) -> tuple[int, str]:
        """Returns the micro-batch and the precision that the newest checkpoint records. Raises InvalidDataError if no
        checkpoint records them."""
        try:
            newest = list(self.checkpoints().values())[-1]
            record = manifest_from_json(self.store.read(f"{newest.folder}/{MANIFEST_NAME}")).record
            micro_batch, precision = (record["engine"][name] for name in ("micro_batch", "precision"))
        except (*FAULTS, LookupError, TypeError) as error:
            raise InvalidDataError(f"{self.store.url} has no checkpoint that says how it was computed") from error
        if type(micro_batch) is not int or micro_batch < 1 or precision not in ("bf16", "fp32"):
            raise InvalidDataError(f"{newest.folder} was computed in {shown_value((micro_batch, precision))}")
        return micro_batch, precision

    def losses(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns the steps that have a loss in the run's metrics, in ascending order, and their losses. They take 16
        bytes per step, since a run may have millions of steps. Raises FileNotFoundError if the file is missing."""
        path, steps, losses = self.run_dir / METRICS_FILE, array("q"), array("d")
        patiently(path, path.stat)
        for _, _, line in each_line(path):
            loss: Any = line.get("loss") if line else None
            if line and is_step(line.get("step")) and (isinstance(loss, float) or is_finite(loss)):
                steps.append(line["step"])
                losses.append(loss)
        steps.reverse()  # so that np.unique finds the last of equal steps
        losses.reverse()
        unique, places = np.unique(np.frombuffer(steps, dtype=np.int64), return_index=True)
        return unique, np.frombuffer(losses, dtype=np.float64)[places]


def different_losses(expected: StoredRun, found: StoredRun) -> tuple[int, list[LossDifference]]:
    """Returns the number of steps that were compared, and the steps whose losses do not have the same bits, in
    order."""
    runs = expected.losses(), found.losses()
    steps = np.union1d(*(own for own, _ in runs))
    has, values = [np.isin(steps, own, assume_unique=True) for own, _ in runs], np.zeros((2, len(steps)))
    for run, (_, losses) in enumerate(runs):
        values[run, has[run]] = losses
    before, after = values.view(np.int64)
    different = np.flatnonzero((has[0] != has[1]) | (before != after))
    pairs = ([float(values[run, at]) if has[run][at] else None for run in (0, 1)] for at in different)
    return len(steps), [
        LossDifference(step=int(steps[at]), expected=one, found=other)
        for at, (one, other) in zip(different, pairs, strict=True)
    ]


def compare_checkpoints(expected: StoredRun, found: StoredRun, *, step: int) -> CheckpointComparison:
    """Compares every tensor of both checkpoints of a step: masters, moments and EMA. Raises InvalidDataError if a
    checkpoint cannot be read, or if the two do not have the same tensors."""
    opened = [open_checkpoint(run.store, _of_step(run, step)) for run in (expected, found)]
    different: list[TensorDifference] = []
    num_tensors = 0
    for name, slot in _tensors_of(opened[0][0], opened[1][0]):
        num_tensors += 1
        one, other = (files.tensor(name, slot=slot) for _, files in opened)
        difference = different_tensor(one, other, step=step, slot=slot, name=name)
        different += [difference] if difference else []
    return CheckpointComparison(
        step=step,
        num_tensors=num_tensors,
        num_different=len(different),
        first=next(iter(different), None),
        largest=max(different, key=lambda each: each.relative, default=None),
    )


def different_tensor(
    expected: torch.Tensor, found: torch.Tensor, *, step: int, slot: str, name: str
) -> TensorDifference | None:
    """Returns how two float32 tensors of the same shape differ, or None if they have the same bits."""
    one, other = expected.flatten(), found.flatten()
    wrong = one.view(torch.int32) != other.view(torch.int32)
    num_wrong = int(wrong.sum())
    if not num_wrong:
        return None
    element = int(wrong.to(torch.uint8).argmax())
    norm, difference = (float(torch.linalg.vector_norm(each.double())) for each in (one, other.double() - one.double()))
    relative = difference / norm if norm else math.inf if difference else 0.0
    return TensorDifference(
        step=step,
        slot=slot,
        name=name,
        relative=relative if math.isfinite(relative) else math.inf,
        num_elements=num_wrong,
        element=element,
        expected=float(one[element]),
        found=float(other[element]),
    )


def _of_step(run: StoredRun, step: int) -> CheckpointId:
    found = run.checkpoints().get(step)
    if found is None:
        raise InvalidDataError(f"the run in {str(run.run_dir)!r} has no checkpoint of step {step} in {run.store.url}")
    return found


def _tensors_of(expected: CheckpointManifest, other: CheckpointManifest) -> list[tuple[str, str]]:
    """Returns the names and slots of the tensors, in the model's order. Raises InvalidDataError if the two checkpoints
    do not have the same tensors and shapes."""
    before, after = (
        {(name, slot): tensor.shape for name, tensor in manifest.tensors.items() for slot in tensor.slots}
        for manifest in (expected, other)
    )
    for each in [*before, *after]:
        if before.get(each) != after.get(each):
            name, slot = each
            shapes = " and ".join(str(found.get(each, "no shape")) for found in (before, after))
            raise InvalidDataError(
                f"the checkpoints of step {expected.id.step} have the {slot} of {shown_value(name)} in {shapes}"
            )
    return list(before)
