"""The loop benchmark trains one model from one set of batches in both arms, and says which aims were met."""

from typing import Any

import pytest

from benchmarks.loop import ARMS, ON_CPU, ON_GPU, Case, aims, measured, table
from benchmarks.loop_arms import SIZES

OPTIONS = ["--device", "cpu", "--rounds", "2", "--steps", "2"]
TINY = Case(model="vit_tiny", precision="fp32", batch=4, most_overhead=0.5)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both arms on two real ranks."""
    return measured(TINY, OPTIONS, tmp_path_factory.mktemp("loop") / "report", num_ranks=2)


@pytest.mark.long
def test_both_arms_are_measured_in_every_round(report: dict[str, Any]) -> None:
    assert report["num_ranks"] == 2
    for figure in ("images_per_second", "cpu_seconds_an_image"):
        assert {arm: len(found) for arm, found in report[figure].items()} == dict.fromkeys(ARMS, 2)
        assert min(value for found in report[figure].values() for value in found) > 0
    assert all(0 < share < 1 for share in report["overhead"])


@pytest.mark.long
def test_both_arms_start_from_the_same_weights_and_batches(report: dict[str, Any]) -> None:
    assert report["first_losses"]["ours"] == pytest.approx(report["first_losses"]["ddp"], abs=1e-5)


def test_aims_compare_rounds_side_by_side() -> None:
    report = {
        "images_per_second": {"ours": [9.7, 19.5, 9.9], "ddp": [10.0, 20.0, 10.0]},
        "cpu_seconds_an_image": {"ours": [1.0] * 3, "ddp": [1.0] * 3},
        "overhead": [0.03, 0.01, 0.01],
        "first_losses": {"ours": 6.9, "ddp": 6.9},
    }
    ratio, work, overhead = [aim.row() for aim in aims({ON_CPU[0].name: report}, ON_CPU[:1])]
    assert (ratio["found"][1], ratio["met"]) == (0.975, True)
    assert (work["found"][1], work["met"]) == (1.0, True)
    assert (overhead["found"][1], overhead["met"]) == (0.01, True)
    assert f"| {ON_CPU[0].name}: ddp | 10 (10 to 15) |" in table({ON_CPU[0].name: report})
    failed, *_ = [aim.row() for aim in aims({ON_CPU[0].name: {"failed": "no memory"}}, ON_CPU[:1])]
    assert failed["met"] is None


def test_every_case_has_its_model() -> None:
    assert {case.model for case in (*ON_CPU, *ON_GPU)} <= SIZES.keys()
