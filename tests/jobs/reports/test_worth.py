"""What a run cost and is worth, in its report: compute, device-days, the paper's Table 2, and figures."""

import json
import shutil
from pathlib import Path

import pytest

from jobs.reports.worth import COLUMNS, CORE_DAYS, TABLE_2, device_days, worth_of
from pipeline.runs.starts import Left, Start, read_starts
from tests.rigs.processes import patchline
from tests.rigs.training import FinishedRuns, pretrain_words


def start(total_seconds: float, num_ranks: int) -> Start:
    return Start(
        attempt="a",
        unix_time=1e9,
        startup_seconds=1.0,
        total_seconds=total_seconds,
        resumed_from=None,
        num_ranks=num_ranks,
        zero_stage=1,
        device="cpu",
        left=Left(),
    )


def test_device_days_are_of_the_ranks_of_each_start() -> None:
    """Two ranks for half a day, then eight for a quarter."""
    day = 86_400
    assert device_days([start(0, 2), start(day / 2, 8)], wall_seconds=day * 3 / 4) == pytest.approx(1 + 2)
    assert device_days([], wall_seconds=5.0) is None


def test_table_2_is_whole() -> None:
    """Row by row as printed: https://openreview.net/forum?id=YicbFdNTTy, Table 2."""
    assert len(COLUMNS) == len(CORE_DAYS) == 5
    assert {name: " | ".join(row) for name, row in TABLE_2.items()} == {
        "ImageNet": "88.55 ± 0.04 | 87.76 ± 0.03 | 85.30 ± 0.02 | 87.54 ± 0.02 | 88.4 / 88.5",
        "ImageNet-ReaL": "90.72 ± 0.05 | 90.54 ± 0.03 | 88.62 ± 0.05 | 90.54 | 90.55",
        "CIFAR-10": "99.50 ± 0.06 | 99.42 ± 0.03 | 99.15 ± 0.03 | 99.37 ± 0.06 | –",
        "CIFAR-100": "94.55 ± 0.04 | 93.90 ± 0.05 | 93.25 ± 0.05 | 93.51 ± 0.08 | –",
        "Oxford-IIIT Pets": "97.56 ± 0.03 | 97.32 ± 0.11 | 94.67 ± 0.15 | 96.62 ± 0.23 | –",
        "Oxford Flowers-102": "99.68 ± 0.02 | 99.74 ± 0.00 | 99.61 ± 0.02 | 99.63 ± 0.03 | –",
        "VTAB (19 tasks)": "77.63 ± 0.23 | 76.28 ± 0.46 | 72.72 ± 0.21 | 76.29 ± 1.70 | –",
    }
    assert CORE_DAYS == ("2.5k", "0.68k", "0.23k", "9.9k", "12.3k")


def test_means_of_vtab_are_those_that_are_whole(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    run_dir = shutil.copytree(finished_runs.get(1), tmp_path / "run")
    (run_dir / "vtab").mkdir()
    facts = {"tasks": {}, "natural": 0.5, "specialized": None, "structured": "0.4", "mean": 0.25}
    facts |= {"deviations": {"natural": None, "specialized": 0.5, "mean": 0.125}}
    (run_dir / "vtab" / "vtab.json").write_text(json.dumps(facts))
    assert worth_of(run_dir, wall_seconds=1.0).vtab == (("natural", 0.5, None), ("VTAB (19 tasks)", 0.25, 0.125))
    assert patchline("report", str(run_dir)).code == 0
    page = (run_dir / "report.html").read_text()
    assert "this run, natural tasks" in page
    assert "76.29 ± 1.70" in page
    assert "<strong>25.00 ± 12.50</strong>" in page
    (run_dir / "vtab" / "vtab.json").write_text("[1]")
    assert worth_of(run_dir, wall_seconds=1.0).vtab == ()


@pytest.mark.slow
def test_the_report_has_the_papers_row_and_the_figures(digits_url: str, tmp_path: Path) -> None:
    """Digits under the name of CIFAR-10: the row is chosen by the name of the dataset."""
    shutil.copytree(digits_url, tmp_path / "cifar10-test")
    run_dir, scored = tmp_path / "run", ("--evaluation.url", str(tmp_path / "cifar10-test"))
    assert patchline(*pretrain_words(digits_url, run_dir, *scored)).code == 0
    assert patchline("inspect", str(run_dir), "--device=cpu").code == 0
    (run_dir / "inspect" / "rollout.png").write_bytes(b"<svg onload=alert(1)>")  # no PNG
    assert patchline("report", str(run_dir)).code == 0
    page = (run_dir / "report.html").read_text()
    assert "CIFAR-10, beside the paper&#39;s Table 2" in page or "CIFAR-10, beside the paper's Table 2" in page
    assert page.count('<img class="figure" src="data:image/png;base64,') == 2
    worth = worth_of(run_dir, wall_seconds=100.0)
    assert worth.point is not None
    assert worth.point.accuracy is not None
    assert f"{100 * worth.point.accuracy:.2f}" in page
    assert worth.device_days == device_days(read_starts(run_dir), wall_seconds=100.0)


def test_the_papers_row_is_of_the_dataset_and_not_of_the_part_that_is_held_out(digits_url: str, tmp_path: Path) -> None:
    """With both, the accuracy of the run is that of the held-out part."""
    shutil.copytree(digits_url, tmp_path / "cifar10-test")
    run_dir = tmp_path / "seeds" / "0"
    scored = ("--evaluation.url", str(tmp_path / "cifar10-test"), "--data.held-out.share", ".1", "--steps", "4")
    assert patchline(*pretrain_words(digits_url, run_dir, *scored)).code == 0
    facts = {
        "seeds": [{"folder": f"seeds/{seed}"} for seed in range(2)],
        "mean": 0.5,
        "deviation": 0.1,
        "score": "accuracy",
    }
    (tmp_path / "sweep.json").write_text(json.dumps(facts))
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/cifar10-test/accuracy"] != last["test_accuracy"]
    worth = worth_of(run_dir, wall_seconds=1.0)
    assert (worth.dataset, worth.accuracy) == ("CIFAR-10", last["eval/cifar10-test/accuracy"])
    assert patchline("report", str(run_dir)).code == 0
    page = (run_dir / "report.html").read_text()
    assert f"<strong>{100 * last['eval/cifar10-test/accuracy']:.2f}</strong>" in page
    assert f"<strong>{100 * last['test_accuracy']:.2f}</strong>" not in page
    assert "accuracy on the part that is held out 50.00 ± 10.00 %" in page
    assert "<strong>50.00" not in page, "the mean of a sweep is of the same part"


def test_a_run_that_is_damaged_has_reasons(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished_runs.get(1), copy)
    assert worth_of(copy, wall_seconds=1.0).dataset == "", "it was not scored"
    record = (copy / "job.yaml").read_text()
    (copy / "job.yaml").write_text(record.replace("  steps: ", "  steps: x"))
    worth = worth_of(copy, wall_seconds=1.0)
    assert worth.point is None
    assert "its cost is not known" in worth.reasons[0]


@pytest.mark.parametrize(
    ("score", "metric"),
    [
        ({"score": "accuracy"}, "accuracy"),
        ({}, None),
        ({"score": "mean_per_class"}, "mean_per_class"),
        ({"score": "<b>"}, None),
    ],
)
def test_the_metric_of_the_repetitions_is_the_sweeps(tmp_path: Path, score: dict[str, str], metric: str | None) -> None:
    (tmp_path / "seeds" / "0").mkdir(parents=True)
    facts = {"seeds": [{"folder": f"seeds/{seed}"} for seed in range(2)], "mean": 0.5, "deviation": 0.1} | score
    (tmp_path / "sweep.json").write_text(json.dumps(facts))
    found = worth_of(tmp_path / "seeds" / "0", wall_seconds=1.0).repeats
    assert (found.metric if found else None) == metric
