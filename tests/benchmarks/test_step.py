"""The step benchmark trains models of one size on the same images, and says which aims were met."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.step import ON_CPU, ON_GPU, Case, aims, cases, measured, table
from benchmarks.step_arms import TIMM_NAMES
from benchmarks.torchvision_operators import import_torchvision
from pipeline.models import ModelConfig
from pipeline.models.flops import forward_flops, num_parameters

OPTIONS = ["--device", "cpu", "--rounds", "3", "--steps", "1"]
ARMS = ("ours", "timm", "timm, tanh", "zero1")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All arms on two images of 32 px, for real."""
    case = Case(model="vit_ti16", image_size=32, batch=2, compiled=False, arms=ARMS)
    return measured(case, OPTIONS, tmp_path_factory.mktemp("step") / "report")


@pytest.mark.long
def test_every_arm_is_measured_in_every_round(report: dict[str, Any]) -> None:
    assert set(report["images_per_second"]) == set(ARMS)
    for figures in (report["images_per_second"], report["cpu_seconds_an_image"]):
        assert all(len(rounds) == 3 and min(rounds) > 0 for rounds in figures.values())
    assert min(report["peak_bytes"].values()) > 100e6


@pytest.mark.long
def test_ours_starts_where_a_zero_head_does_with_and_without_zero(report: dict[str, Any]) -> None:
    for arm in ("ours", "zero1"):
        assert report["first_losses"][arm] == pytest.approx(torch.log(torch.tensor(1000.0)).item(), abs=1e-4)


@pytest.mark.long
def test_the_work_is_the_models(report: dict[str, Any]) -> None:
    assert report["train_flops_an_image"] == 3 * forward_flops(ModelConfig(name="vit_ti16", image_size=32))


@pytest.mark.parametrize("name", TIMM_NAMES)
def test_timms_model_is_of_the_same_size(name: str) -> None:
    import_torchvision()
    timm = importlib.import_module("timm")
    with torch.device("meta"):
        theirs = timm.create_model(TIMM_NAMES[name], num_classes=1000)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == num_parameters(ModelConfig(name=name))


@pytest.mark.long
def test_an_arm_that_fails_is_said_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(model="vit_ti16", image_size=32, batch=2, compiled=False, arms=("ours", "theirs"), separate=True)
    found = measured(case, OPTIONS, tmp_path / "report")
    assert list(found["images_per_second"]) == ["ours"]
    assert "vit_ti16 at 32, eager, theirs" in capsys.readouterr().out


def test_aims_compare_rounds_side_by_side() -> None:
    rates = {"ours": [10.0, 22.0, 11.0], "timm": [10.0, 20.0, 10.0], "timm, tanh": [5.0, 10.0, 5.0]}
    found = {case.name: {"images_per_second": rates} for case in ON_CPU}
    rows = [aim.row() for aim in aims(found)]
    assert [row["aim"] for row in rows] == ["at least 1", "at least 1", "at least 1.05", "at least 1.05"] * 2
    assert rows[0]["found"][1] == pytest.approx(1.1)
    assert all(row["met"] for row in rows)


def test_a_gpu_is_shown_by_its_share_of_the_peak() -> None:
    """450 images/s of ViT-H/14 at 224 px are 57 % of 790 TFLOP/s."""
    case = next(case for case in ON_GPU if case.compiled and case.image_size == 224)
    found = {
        "images_per_second": {"zero1": [450.0] * 3},
        "cpu_seconds_an_image": {"zero1": [0.001] * 3},
        "peak_bytes": {"zero1": 60_000_000_000},
        "train_flops_an_image": 3 * forward_flops(ModelConfig(name="vit_h14")),
        "device": "a GPU",
    }
    assert "| 60.00 | 45.7% | 57.2% |" in table({case.name: found})
    assert [aim.row()["met"] for aim in aims({case.name: found})] == [True]


def test_cases_are_chosen_by_words_of_their_names() -> None:
    assert cases("cpu", "") == list(ON_CPU)
    assert [case.name for case in cases("cuda", "at 518, compiled")] == ["vit_h14 at 518, compiled"]
    with pytest.raises(SystemExit, match="'at 7' is in none of: vit_s16 at 224, eager"):
        cases("cpu", "at 7")
