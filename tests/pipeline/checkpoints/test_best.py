"""RUN/best.json: read back as it was written, and nothing else is taken for one."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints.best import Best, read_best, write_best
from shards.errors import InvalidDataError
from shards.files.typed_json import sealed

BEST = Best(
    step=8,
    checkpoint="step-00000008/attempt-0001-aaaaaaaa",
    accuracy=0.75,
    loss=0.5,
    images=4,
    dataset="cd" * 32,
)


def with_scores(accuracy: float, loss: float) -> Best:
    return Best(**{**asdict(BEST), "accuracy": accuracy, "loss": loss})


def test_it_is_read_back(tmp_path: Path) -> None:
    assert read_best(tmp_path) is None
    write_best(tmp_path, BEST)
    assert read_best(tmp_path) == BEST
    write_best(tmp_path, with_scores(1.0, 0.0))
    assert read_best(tmp_path) == with_scores(1.0, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]


@pytest.mark.parametrize(
    ("accuracy", "loss", "is_better"),
    [
        pytest.param(0.8, 9.0, True, id="accuracy comes first"),
        pytest.param(0.75, 0.4, True, id="a tie goes to the lower loss"),
        pytest.param(0.75, 0.5, False, id="the same again"),
        pytest.param(0.7, 0.1, False, id="worse"),
    ],
)
def test_the_better_of_two(accuracy: float, loss: float, is_better: bool) -> None:
    assert with_scores(accuracy, loss).is_better_than(BEST) == is_better


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 9}, "allowed: one of step 9"),
        ({"step": 0}, "step is 0"),
        ({"step": "8"}, "step is '8'"),
        ({"checkpoint": "../../etc"}, "allowed: step-N/attempt-TOKEN"),
        ({"checkpoint": "step-00000008/attempt-0001-aaaaaaaa/.."}, "allowed: step-N/attempt-TOKEN"),
        ({"accuracy": 1.5}, "accuracy is 1.5"),
        ({"loss": "low"}, "loss is 'low'"),
        ({"more": 1}, "'more' is no field"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "best.json").write_bytes(sealed(json.dumps(asdict(BEST) | change).encode()))
    with pytest.raises(InvalidDataError, match=message):
        read_best(tmp_path)


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"step": 8')
    with pytest.raises(InvalidDataError, match=r"best\.json cannot be read"):
        read_best(tmp_path)
    (tmp_path / "best.json").unlink()
    (tmp_path / "best.json").mkdir()
    with pytest.raises(InvalidDataError, match=r"best\.json cannot be read"):
        read_best(tmp_path)


def test_every_single_bit_counts(tmp_path: Path) -> None:
    """With another accuracy, a worse checkpoint could take its place."""
    write_best(tmp_path, BEST)
    data = (tmp_path / "best.json").read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "best.json").write_bytes(changed)
        with pytest.raises(InvalidDataError, match=r"best\.json cannot be read"):
            read_best(tmp_path)
