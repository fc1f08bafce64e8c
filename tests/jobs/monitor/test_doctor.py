"""`patchline doctor` on this machine: a table, JSON, and an exit code that says whether there is a fault."""

import json
from pathlib import Path

import pytest

from tests.rigs.processes import patchline

NAMES = ["Python", "libraries", "DeepSpeed", "cores", "memory", "shared memory", "open files"]
PROBED = ["GPU", "driver", "bf16", "threads", "JPEG decoder", "disk"]


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("_no_gpu")
def test_a_machine_without_a_fault(tmp_path: Path, s3_bucket: str) -> None:
    words = ("--folder", str(tmp_path), "--s3-url", f"s3://{s3_bucket}/x", "--json")
    ended = patchline("doctor", *words)
    found = json.loads(ended.output)
    assert [one["name"] for one in found["checks"]] == [*NAMES, *PROBED, "S3"]
    assert all(one["status"] == "ok" or one["todo"] for one in found["checks"])
    assert (ended.code, found["counts"]["fault"]) == (0, 0), found
    assert sum(found["counts"].values()) == len(found["checks"])


def test_a_fault_is_exit_code_1_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no libcudart')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = patchline("doctor", "--folder", "/proc")
    assert ended.code == 1
    shown = " ".join(ended.output.split())
    assert "FAULT torch the check ended with exit code 1: ImportError: no libcudart > import torch by hand" in shown
    assert "FAULT disk /proc cannot be written to" in shown
    assert shown.endswith(("warning", "warnings"))
    assert "2 faults, " in shown or "3 faults, " in shown  # the decoder may need torch
    assert "Traceback" not in ended.output + ended.errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--s3-url", "data"), "--s3-url is 'data'; give s3://bucket/prefix"),
        (("--seconds", "0"), "--seconds is 0; allowed: 1 to 600"),
        (("--deep",), "unknown flag --deep of patchline doctor"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    ended = patchline("doctor", *words)
    assert ended.code == 2
    assert message in " ".join(ended.errors.split())
