"""The precision of a run: the decision as a table, and small runs that start, resume and are given another one."""

import json
import platform
import shutil
from pathlib import Path

import pytest
import yaml

from pipeline.ranks.devices import Bf16
from pipeline.training.device_choices import choose_precision
from tests.rigs.processes import Ended, patchline
from tests.rigs.training import pretrain_words

FAST = Bf16(is_native=True, reason="this CPU computes bf16 natively (AMX)")
SLOW = Bf16(is_native=False, reason="this CPU (AVX2) computes bf16 8 times slower than fp32")
EVERY_STEP = ("--checkpoint.every-steps", "1")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@pytest.mark.parametrize(
    ("wanted", "recorded", "device", "precision", "message", "is_warning"),
    [
        ("auto", "", FAST, "bf16", f"precision bf16: {FAST.reason}", False),
        ("auto", "", SLOW, "fp32", f"precision fp32: {SLOW.reason}", False),
        ("auto", "bf16", FAST, "bf16", "precision bf16, as when the run started", False),
        ("auto", "fp32", SLOW, "fp32", "precision fp32, as when the run started", False),
        ("auto", "fp32", FAST, "fp32", f"precision fp32, as when the run started, though {FAST.reason}", False),
        ("auto", "bf16", SLOW, "bf16", f"precision bf16, as when the run started, though {SLOW.reason}", True),
        ("fp32", "", SLOW, "fp32", "", False),
        ("fp32", "bf16", FAST, "fp32", "precision fp32, as the job says (the run began with bf16)", False),
        ("bf16", "", FAST, "bf16", "", False),
        ("bf16", "bf16", FAST, "bf16", "", False),
        ("bf16", "fp32", FAST, "bf16", "precision bf16, as the job says (the run began with fp32)", False),
        (
            *("bf16", "", SLOW, "bf16"),
            f"precision bf16, as the job says, though {SLOW.reason}; --engine.precision auto would take fp32",
            True,
        ),
        ("bf16", "bf16", SLOW, "bf16", f"precision bf16, as the job says, though {SLOW.reason}", True),
    ],
)
def test_choices(wanted: str, recorded: str, device: Bf16, precision: str, message: str, is_warning: bool) -> None:
    choice = choose_precision(wanted, recorded=recorded, bf16=device)  # type: ignore[arg-type]
    assert (choice.precision, choice.message, choice.is_warning) == (precision, message, is_warning)


def words(url: str, run_dir: Path, *more: str) -> list[str]:
    return pretrain_words(url, run_dir, "--steps", "2", "--schedule.warmup-steps", "0", *EVERY_STEP, *more)


def cut_back(run_dir: Path) -> None:
    """Leaves the run as a kill after the first of two steps would have."""
    shutil.rmtree(run_dir / "checkpoints" / "step-00000002")
    shutil.rmtree(run_dir / "weights")
    (run_dir / "DONE").unlink()


def recorded(run_dir: Path) -> set[str]:
    """The precision in the job's record and in every checkpoint."""
    manifests = [json.loads(path.read_text()) for path in run_dir.glob("checkpoints/step-*/*/MANIFEST.json")]
    job = yaml.safe_load((run_dir / "job.yaml").read_text())["job"]
    return {job["engine"]["precision"], *(manifest["record"]["engine"]["precision"] for manifest in manifests)}


def lines_about_it(ended: Ended) -> list[str]:
    assert ended.code == 0, ended.errors
    return [line.partition(" ")[2] for line in ended.errors.splitlines() if "precision" in line]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_a_cpu_with_avx2_alone_takes_fp32_and_the_run_keeps_it_elsewhere(digits_url: str, run_dir: Path) -> None:
    begun = patchline(*words(digits_url, run_dir), environ=AVX2)
    assert lines_about_it(begun) == [f"precision fp32: {SLOW.reason}"]
    assert recorded(run_dir) == {"fp32"}
    cut_back(run_dir)
    continued = patchline(*words(digits_url, run_dir), environ=dict.fromkeys(AVX2, ""))
    (line,) = lines_about_it(continued)
    assert line.startswith("precision fp32, as when the run started")
    assert recorded(run_dir) == {"fp32"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_bf16_is_obeyed_where_it_is_slow_with_one_warning(digits_url: str, run_dir: Path) -> None:
    begun = patchline(*words(digits_url, run_dir, "--engine.precision", "bf16"), environ=AVX2)
    (line,) = lines_about_it(begun)
    assert line == (f"precision bf16, as the job says, though {SLOW.reason}; --engine.precision auto would take fp32")
    cut_back(run_dir)
    continued = patchline(*words(digits_url, run_dir), environ=AVX2)
    assert lines_about_it(continued) == [f"precision bf16, as when the run started, though {SLOW.reason}"]
    assert recorded(run_dir) == {"bf16"}
