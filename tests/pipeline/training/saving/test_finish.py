"""The marker of a finished run; whole runs are in test_run.py."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from jobs.recipes.pretrain import digits_smoke
from pipeline.training.saving.finish import Done, done_from_json, done_to_json, read_done
from pipeline.training.saving.save import saved_job
from shards.files.typed_json import sealed
from tests.rigs.positions import position_at

DONE = Done(
    step=8,
    checkpoint="step-00000008/attempt-0001-aa",
    weights_sha256=hashlib.sha256(b"weights").hexdigest(),
    position=position_at(8),
    job=saved_job(digits_smoke()),
)


def write_marker(run_dir: Path, text: str) -> None:
    (run_dir / "weights").mkdir()
    (run_dir / "weights" / "model.safetensors").write_bytes(b"weights")
    (run_dir / "DONE").write_text(text)


def test_a_marker_says_which_job_is_done(tmp_path: Path) -> None:
    write_marker(tmp_path, done_to_json(DONE))
    assert read_done(tmp_path) == DONE
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"others")
    assert read_done(tmp_path) is None


OTHERS = {name: value for name, value in json.loads(done_to_json(DONE)).items() if name != "digest"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "null", '{"job": {}}', '{"position": 3}'),
        json.dumps(OTHERS),
        sealed(json.dumps(OTHERS | {"later": 1}).encode()).decode(),
        *(
            sealed(json.dumps({other: OTHERS[other] for other in OTHERS if other != name}).encode()).decode()
            for name in OTHERS
        ),
    ],
)
def test_what_is_no_marker_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of json, of pydantic, or our own
        done_from_json(text)


def test_every_bit_of_a_marker_counts(tmp_path: Path) -> None:
    """A marker that is damaged is none: the run verifies its checkpoint and finishes again."""
    data = done_to_json(DONE).encode()
    write_marker(tmp_path, "")
    for bit in range(0, 8 * len(data), 7):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "DONE").write_bytes(changed)
        assert read_done(tmp_path) is None, changed


@pytest.mark.parametrize("name", ["DONE", "weights/model.safetensors"])
def test_a_pipe_is_no_marker(tmp_path: Path, name: str) -> None:
    write_marker(tmp_path, done_to_json(DONE))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert read_done(tmp_path) is None


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"[" * 200_000, b"x" * (17 << 20), sealed(b'{"step": 8}'), done_to_json(DONE).encode()[:-40]],
    ids=["not UTF-8", "nested", "large", "too little", "half"],
)
def test_what_is_no_marker_is_ignored(tmp_path: Path, data: bytes) -> None:
    write_marker(tmp_path, "")
    (tmp_path / "DONE").write_bytes(data)
    assert read_done(tmp_path) is None
