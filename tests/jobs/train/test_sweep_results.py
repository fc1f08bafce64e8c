"""Which runs of a sweep count, after the sweep was run again with other values or fewer seeds."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.reports.points import gather
from jobs.reports.worth import worth_of
from jobs.train import sweep
from jobs.train.sweep_results import is_repetition, read_sweep, sweep_of
from tests.jobs.reports.test_points import written
from tests.rigs.fake_runs import finish, override, runs_are_over_at_once
from tests.rigs.processes import patchline

RATES = ("--schedule.learning-rate", "0.003", "0.01")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of rate .01, then two of .03: seeds/2 still has .01. The accuracy of a run is its rate, and more."""
    folder = tmp_path_factory.mktemp("made") / "sw"
    words = ["finetune", "digits_48", "--data.held-out.share=.1", "--evaluation.url=t", "--run-dir", str(folder)]
    words += ["--data.url=d", "--initial.weights=w", *RATES]
    with pytest.MonkeyPatch.context() as monkeypatch:
        runs_are_over_at_once(monkeypatch, lambda job: job.schedule.learning_rate + job.seed / 1000)
        for more in (["--seeds=3"], ["0.03", "--seeds=2"]):
            assert sweep.run([*words, *more], override=override, environ={}) == 0
    assert sorted(path.name for path in (folder / "seeds").iterdir()) == ["0", "1", "2"]
    return folder


@pytest.fixture
def swept(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "sw")


def all_of(root: Path) -> tuple[dict[str, Any], list[str]]:
    points, notes = gather([path.parent for path in sorted(root.rglob("job.yaml"))], root=root)
    return {one.name: (one.accuracy, one.deviation, one.num_runs) for one in points}, notes


def test_a_comparison_has_the_mean_of_the_sweep_alone(swept: Path) -> None:
    facts = json.loads((swept / "sweep.json").read_text())
    points, notes = all_of(swept.parent)
    assert points == {"sw": (facts["mean"], facts["deviation"], 2)}
    assert notes == [
        "sw: 6 runs of the sweep that are not its repetitions: earlier/seeds-0, earlier/seeds-1, seeds/2 and 3 more"
    ]


def test_a_repetition_that_was_replaced_since_is_left_out(swept: Path) -> None:
    """Of a sweep that has begun again, and was interrupted before it wrote its results."""
    words = ["finetune", "digits_48", "--evaluation.url=t", "--data.url=d", "--initial.weights=w", "--seed=1"]
    finish([*words, "--schedule.learning-rate=.05", f"--run-dir={swept}/seeds/1"], 0.5)
    points, _ = all_of(swept.parent)
    assert points == {"sw": (0.03, None, 1)}


@pytest.mark.parametrize(("run", "has_mean"), [("seeds/0", True), ("seeds/2", False), ("earlier/seeds-0", False)])
def test_a_report_has_the_mean_of_its_own_values_alone(swept: Path, run: str, has_mean: bool) -> None:
    assert (worth_of(swept / run, wall_seconds=1.0).repeats is not None) is has_mean


def test_a_folder_of_tries_says_why_nothing_is_compared(swept: Path) -> None:
    ended = patchline("compare", f"{swept}/tries")
    assert ended.code == 2
    said = " ".join(ended.errors.split())
    assert (
        f"nothing to compare in '{swept}/tries': {swept}: 3 runs of the sweep that are not its repetitions: tries/"
        in said
    )
    assert "give run directories or folders of them, of a sweep its own folder" in said
    assert "no training run" not in said


def test_folders_are_found_however_they_are_written(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(swept / "seeds" / "0")
    assert sweep_of(Path()) == sweep_of(Path("../2")) == swept
    assert sweep_of(Path("../..")) is None
    facts = read_sweep(swept)
    assert [is_repetition(Path(name), facts) for name in (".", "../1", "../2", "../../tries/learning-rate=0.03")] == [
        *(True, True, False, False)
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"seeds": 3}', '{"seeds": [1, {"folder": 2}]}'])
def test_a_damaged_table_lists_nothing(swept: Path, text: str) -> None:
    (swept / "sweep.json").write_text(text)
    assert not is_repetition(swept / "seeds" / "0", read_sweep(swept))
    points, notes = all_of(swept.parent)
    assert points == {}
    assert len(notes) == 1


def test_runs_of_no_sweep_are_points_of_their_own(tmp_path: Path) -> None:
    for name in ("seeds/0", "tries/a", "earlier/b"):
        written(tmp_path / name)
    assert sorted(all_of(tmp_path)[0]) == ["earlier/b", "seeds/0", "tries/a"]


def test_a_try_of_text_has_the_values_of_its_record(tmp_path: Path) -> None:
    run = written(tmp_path / "seeds" / "0")
    for values, is_same in (
        ({"--model.name": "vit"}, True),
        ({"--model.name": "vit_b16"}, False),
        ({"--seed": "00"}, True),
        ({"--data.url": "moved"}, True),
        ({"--new.flag": "x"}, True),
        ([], False),
    ):
        facts: dict[str, Any] = {"seeds": [{"folder": "seeds/0", "values": values}]}
        assert is_repetition(run, facts) is is_same, values
