"""A sweep as a step of a chain: its units, and the best values in the words of the second."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.chains.done import failed_alone, hopeless
from jobs.chains.state import ChainJob, ChainPlan, plan_json
from jobs.chains.steps import ChainConfig, StepConfig, Unit, resolved, units_of
from jobs.train.trials import TrialScore
from shards.errors import UserError, WillNotSucceedError
from shards.files.typed_json import read_record
from tests.rigs.fake_runs import finish, override

GRID = ("--schedule.learning-rate", ".01", ".03", "--select-on", "held", "--seeds=2", "--evaluation.url=test")


def units(folder: Path, *sweep: str, weights: tuple[tuple[str, ...], ...] = ()) -> tuple[Unit, ...]:
    first = StepConfig(name="first", stage="pretrain", recipe="digits_smoke", flags=("--data.url=d",), variants=weights)
    step = StepConfig(
        name="tune", stage="finetune", recipe="digits_48", flags=("--data.url=d",), weights="first", sweep=sweep
    )
    after = StepConfig(name="scores", stage="evaluate", weights="tune", flags=("--data.url=d",))
    return units_of(ChainConfig(folder=str(folder), steps=(first, step, after)))


def test_tries_and_repetitions(tmp_path: Path) -> None:
    _, tries, seeds, scores = units(tmp_path, *GRID)
    assert [(one.name, one.after, one.may_fail) for one in (tries, seeds)] == [
        ("tune.tries", ("first",), True),
        ("tune.seeds", ("tune.tries",), False),
    ]
    assert tries.run_dirs() == [f"{tmp_path}/tune/tries/learning-rate={rate}" for rate in (".01", ".03")]
    assert seeds.run_dirs() == [f"{tmp_path}/tune/seeds/{seed}" for seed in (0, 1)]
    assert f"--initial.weights={tmp_path}/first/weights" in " ".join(tries.words[0]).replace("weights ", "weights=")
    assert tries.words[1][-1] == "--evaluation.url=held"
    assert scores.after == ("tune.seeds",)
    assert [[word for word in words if "seeds/" in word] for words in scores.words] == [
        [f"{tmp_path}/tune/seeds/{seed}/weights"] for seed in (0, 1)
    ]
    (_, only, _) = units(tmp_path, "--seeds=2", "--evaluation.url=test")
    assert (only.name, only.num_tasks) == ("tune.seeds", 2)
    plan = ChainPlan(name="c", units=(tries, seeds), rounds=1, chdir="/", command=("p",))
    assert read_record(ChainPlan, plan_json(plan)) == plan


def test_the_best_values_are_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tries, seeds, _ = units(tmp_path, *GRID)
    accuracies: dict[str, float | None] = {"learning-rate=.01": 0.5, "learning-rate=.03": 0.6}
    monkeypatch.setattr(
        "jobs.chains.steps.score_of",
        lambda trial, _: TrialScore(trial=trial, state="done", accuracy=accuracies[trial.folder.name]),
    )
    assert resolved(tries, override) is tries
    found = resolved(seeds, override)
    assert all("--schedule.learning-rate=.03" in words for words in found.words)
    assert found.run_dirs() == seeds.run_dirs()
    assert replace(found, words=seeds.words) == seeds
    accuracies.update(dict.fromkeys(accuracies))
    with pytest.raises(WillNotSucceedError, match=re.escape(f"no try of the sweep {tmp_path}/tune has a score")):
        resolved(seeds, override)


def test_what_was_run_with_other_values_is_put_aside_or_refused(tmp_path: Path) -> None:
    _, tries, seeds, _ = units(tmp_path, *GRID)
    for number, words in enumerate(tries.words):
        finish(list(words), number / 10)
    finish(list(seeds.words[0]), 0.9)  # with the first rate, which is not the best
    assert "--schedule.learning-rate=.03" in resolved(seeds, override).words[0]
    assert not Path(seeds.run_dirs()[0]).exists()
    assert (tmp_path / "tune" / "earlier" / "seeds-0" / "DONE").exists()
    finish([*tries.words[0], "--seed=7"], 0.5)
    with pytest.raises(WillNotSucceedError, match=r"rate=\.01 holds a run with other values:\n  seed: before 7"):
        resolved(seeds, override)


def test_a_try_that_cannot_succeed_ends_alone(tmp_path: Path) -> None:
    _, tries, seeds, _ = units(tmp_path, *GRID)
    for unit in (tries, seeds):
        for number, run_dir in enumerate(map(Path, unit.run_dirs())):
            (run_dir / "submit").mkdir(parents=True)
            end = "at fault" if number else "requeued"
            (run_dir / "submit" / "tries.jsonl").write_text(json.dumps({"end": end}) + "\n")
    jobs = [ChainJob(unit="u", kind="job", round=0, tag="t", job=1, tasks=(0, 1), marks=(0, 0))]
    assert failed_alone(tries, jobs) == {1}
    assert hopeless(tries, jobs, state=tmp_path) == ""
    assert failed_alone(seeds, jobs) == set()
    assert "ended with a mistake" in hopeless(seeds, jobs, state=tmp_path)
    assert hopeless(seeds, jobs, state=tmp_path).endswith(f"see its log in {tmp_path}/jobs")
    again = [replace(jobs[0], marks=(0, 100))]
    assert failed_alone(tries, again) == set(), "it ended before these jobs were submitted"


def test_a_job_without_a_run_directory_has_its_log_there_too(tmp_path: Path) -> None:
    verify = Unit(name="verify", step="verify", stage="verify", words=(("verify", "data"),))
    record = tmp_path / "jobs" / "t" / "patchline-verify" / "submit" / "tries.jsonl"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"end": "at fault"}) + "\n")
    jobs = [ChainJob(unit="u", kind="job", round=0, tag="t", job=1, tasks=(0,), marks=(0,))]
    assert hopeless(verify, jobs, state=tmp_path).endswith(f"see its log in {tmp_path}/jobs")


def test_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="step tune: a sweep is of one command, and its `weights:` are of 2 runs"):
        units(tmp_path, *GRID, weights=(("--steps=1",), ("--steps=2",)))
    with pytest.raises(UserError, match="step tune: a sweep in jobs takes no --phase, --part or --dry-run"):
        units(tmp_path, *GRID, "--phase=tries")
    with pytest.raises(UserError, match="step x: sweep is of pretrain and finetune, without variants and links"):
        StepConfig(name="x", stage="evaluate", sweep=("--seeds=2",))
