"""Two runs compared: to the bit, by numbers, and on the real checkpoints of a run beside itself."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.runs.comparison import (
    LossDifference,
    StoredRun,
    compare_checkpoints,
    different_losses,
    different_tensor,
)
from shards.errors import InvalidDataError
from shards.store import open_store
from tests.rigs.training import STEPS, FinishedRuns


def stored(run_dir: Path) -> StoredRun:
    return StoredRun(run_dir=run_dir, store=open_store(str(run_dir / "checkpoints")))


def with_losses(folder: Path, losses: dict[int, float]) -> StoredRun:
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return stored(folder)


def test_losses_are_compared_by_their_bits(tmp_path: Path) -> None:
    one = with_losses(tmp_path / "one", {1: 2.0, 2: 0.1, 3: 0.0, 4: 1.0, 5: math.nan})
    two = with_losses(tmp_path / "two", {1: 2.0, 2: 0.1 + 2**-56, 3: -0.0, 5: math.nan, 6: 1.0})
    num_steps, found = different_losses(one, two)
    assert (num_steps, [each.step for each in found]) == (6, [2, 3, 4, 6])
    assert found[0].relative == pytest.approx(2**-56 / 0.1, rel=0.2)
    assert [each.relative for each in found[1:]] == [0.0, math.inf, math.inf]


@pytest.mark.parametrize(("expected", "found"), [(math.nan, 1.0), (1.0, math.inf), (None, 1.0), (1.0, None)])
def test_what_is_not_finite_or_missing_differs_without_end(expected: float | None, found: float | None) -> None:
    assert LossDifference(step=1, expected=expected, found=found).relative == math.inf


def test_a_tensor_differs_by_a_bit() -> None:
    one = torch.tensor([[1.0, 2.0], [math.nan, 0.0]])
    assert different_tensor(one, one.clone(), step=1, slot="master", name="a") is None
    other = one.clone()
    other[1, 1] = -0.0
    found = different_tensor(one, other, step=1, slot="master", name="a")
    assert found is not None
    assert (found.num_elements, found.element) == (1, 3)
    three, four = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    found = different_tensor(three, four, step=1, slot="master", name="a")
    assert found is not None
    assert found.relative == pytest.approx(0.1)
    assert (found.expected, found.found) == (4.0, 4.5)


def test_real_checkpoints(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    one = stored(finished_runs.get(2, "--engine.zero-stage", "1"))
    shutil.copytree(one.run_dir, tmp_path / "copy")
    same = compare_checkpoints(one, stored(tmp_path / "copy"), step=STEPS)
    assert (same.num_different, same.first, same.num_tensors > 30) == (0, None, True)
    assert different_losses(one, stored(tmp_path / "copy")) == (STEPS, [])
    assert list(one.checkpoints()) == [4, 8, 12, 16]
    other = stored(finished_runs.get(1))
    found = compare_checkpoints(one, other, step=STEPS)
    assert found.first is not None
    assert found.largest is not None
    assert 0 < found.first.relative <= found.largest.relative
    assert one.engine()[0] == 16
    with pytest.raises(InvalidDataError, match="has no checkpoint of step 5 in"):
        compare_checkpoints(one, other, step=5)
