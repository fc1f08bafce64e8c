"""`patchline sweep`: the tries, the best with several seeds, and what is shown and written of them."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.reports.points import gather
from jobs.reports.worth import worth_of
from jobs.train import sweep
from jobs.train.sweep import is_repetition, read_sweep, sweep_of
from shards.errors import UserError
from tests.jobs.reports.test_ls import CHECKOUT
from tests.jobs.reports.test_points import written
from tests.rigs.fake_runs import finish, override, runs_are_over_at_once
from tests.rigs.forks import ONE_THREAD
from tests.rigs.processes import patchline
from tests.rigs.training import pretrain_words

SHORT = ("--steps", "40", "--schedule.warmup-steps", "0")
RATES = ("--schedule.learning-rate", "0", "0.01")
GRID = ("--schedule.learning-rate", "0.003", "0.01")


def words_of(url: str, folder: Path, *more: str) -> list[str]:
    words = [*pretrain_words(url, folder, *SHORT), *more]
    return ["sweep", *words]


@pytest.mark.long
def test_the_best_value_is_chosen_and_repeated(digits_url: str, tmp_path: Path) -> None:
    """An interrupt saves the running run; the same command continues it, and does nothing once all are done."""
    folder = tmp_path / "a sweep"
    words = words_of(digits_url, folder, *RATES, "--select-on", digits_url, "--seeds=2")
    words += ["--evaluation.url", digits_url]
    first = folder / "tries" / "learning-rate=0"
    seeds_first = patchline(*words, "--phase=seeds")
    assert seeds_first.code == 2
    assert "2 of 2 tries are not done, the first 'tries/learning-rate=0' (never started)" in seeds_first.errors
    assert not folder.exists(), "nothing was run"
    command = [sys.executable, "-m", "jobs.cli", *words]
    process = subprocess.Popen(
        command, cwd=CHECKOUT, env={**os.environ, **ONE_THREAD}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 120
    while not ((first / "metrics.jsonl").exists() and (first / "metrics.jsonl").stat().st_size):  # a step was made
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors.decode()
    assert "tries/learning-rate=0 ended with 75; the same command continues it" in " ".join(errors.decode().split())
    for _ in range(2):
        ended = patchline(*words)
        assert ended.code == 0, ended.errors
        lines = ended.output.splitlines()
        assert [line.split()[0] for line in lines[:4]] == [
            *("tries/learning-rate=0", "tries/learning-rate=0.01", "seeds/0", "seeds/1")
        ]
        assert lines[1].endswith("best")
        assert lines[4].startswith("mean of 2: ")
    assert ended.errors.count("done before") == 4
    found = json.loads((folder / "sweep.json").read_text())
    assert found["best"] == {"--schedule.learning-rate": "0.01"}
    scores = [one["accuracy"] for one in found["seeds"]]
    assert found["mean"] == sum(scores) / 2
    again = patchline(*shlex.split(found["seeds"][0]["command"])[1:])
    assert again.code == 0, "the command beside each score is that of its run"


def test_what_will_run_is_shown(digits_url: str, tmp_path: Path) -> None:
    words = words_of(digits_url, tmp_path / "s", *RATES, "--select-on=x", "--evaluation.url=y", "--dry-run")
    ended = patchline(*words)
    assert ended.code == 0, ended.errors
    lines = ended.output.splitlines()
    assert [line.partition("--run-dir=")[2] for line in lines] == [
        *(f"{tmp_path}/s/tries/learning-rate={rate} --evaluation.url=x" for rate in ("0", "0.01")),
        *(f"{tmp_path}/s/seeds/{seed} --seed={seed}" for seed in range(3)),
    ]
    assert not (tmp_path / "s").exists()


def test_dry_runs_show_the_best_values_once_they_are_known(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    runs_are_over_at_once(monkeypatch, lambda job: job.schedule.learning_rate)
    words = ["finetune", "digits_48", "--data.held-out.share=.1", "--evaluation.url=t", "--run-dir", str(tmp_path)]
    words += ["--seeds=1", "--data.url=d", "--initial.weights=w", "--schedule.learning-rate", ".001", ".003"]

    def shown() -> tuple[str, bool]:
        caplog.clear()
        assert sweep.run([*words, "--dry-run"], override=override, environ={}) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert "/seeds/0" in last
        return last.partition("--schedule.learning-rate=")[2].split()[0], "here the first stand for them" in caplog.text

    assert shown() == (".001", True)
    assert sweep.run([*words, "--phase=tries"], override=override, environ={}) == 0
    capsys.readouterr()
    assert shown() == (".003", False)


def test_a_choice_on_the_dataset_of_the_final_score_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["finetune", "digits_48", "--data.url=d", "--initial.weights=w", "--run-dir=s", *RATES, "--dry-run"]
    for select_on, is_said in (("t/", True), (f"{tmp_path}/t", True), ("t2", False)):
        caplog.clear()
        sweep.run([*words, "--evaluation.url=t", "--select-on", select_on], override=override, environ={})
        assert ("so its score is too high" in caplog.text) is is_said, select_on


def test_a_shortened_warm_up_is_said_by_each_run_alone(tmp_path: Path) -> None:
    """Not whenever the sweep looks at a run."""
    words = ["sweep", "finetune", "digits_48", "--data.url=d", "--initial.weights=w", "--evaluation.url=t", "--steps=8"]
    words += ["--run-dir", str(tmp_path / "s"), *RATES, "--data.held-out.share=.1", "--dry-run"]
    ended = patchline(*words)
    assert ended.code == 0, ended.errors
    assert "warm-up" not in ended.errors


def test_the_help_has_every_option_of_a_sweep() -> None:
    said = " ".join(patchline("sweep", "--help").output.split())
    for option in ("--score", "--phase", "--part", "--data.held-out.share", "--select-on", "--seeds", "--dry-run"):
        assert option in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((*RATES, "--select-on=x"), "--evaluation.url is missing: the dataset on which the runs with the best values"),
        (("--schedule.learning-rate", "1", "x", "--select-on=x"), "'x'"),
        (("--schedule.learnin-rate", "1"), "unknown flag"),
        (("--steps", "5", "0", "--select-on=x"), "steps"),
    ],
)
def test_what_a_run_would_refuse_is_refused_first(
    digits_url: str, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    ended = patchline(*words_of(digits_url, tmp_path / "s", *more))
    assert (ended.code, "Traceback" in ended.errors) == (2, False)
    assert message in " ".join(ended.errors.split())
    assert not (tmp_path / "s").exists()


def test_usage() -> None:
    assert "usage: patchline sweep pretrain|finetune RECIPE" in " ".join(patchline("sweep", "pack", "x").errors.split())


def test_a_better_value_is_repeated_in_place_of_the_former_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its repetitions have the same folders. What was there is kept, and its score is not taken over."""
    started = runs_are_over_at_once(monkeypatch, lambda job: job.schedule.learning_rate)
    words = ["finetune", "digits_48", "--data.held-out.share=.1", "--evaluation.url=t", "--run-dir", str(tmp_path)]
    words += ["--seeds=2", "--data.url=d", "--initial.weights=w", "--schedule.learning-rate", ".001"]
    for more, num_runs in ((("0.003",), 4), (("0.003",), 0), (("0.003", "0.03"), 3), (("0.003", "0.03"), 0)):
        del started[:]
        assert sweep.run([*words, *more], override=override, environ={}) == 0
        found = json.loads((tmp_path / "sweep.json").read_text())
        best = float(more[-1])
        assert len(started) == num_runs
        assert float(found["best"]["--schedule.learning-rate"]) == found["mean"] == best
        assert [one["accuracy"] for one in found["seeds"]] == [best, best]
        assert all(f"--schedule.learning-rate={more[-1]}" in one["command"] for one in found["seeds"])
    assert sorted(path.name for path in (tmp_path / "earlier").iterdir()) == ["seeds-0", "seeds-1"]
    before = (tmp_path / "sweep.json").read_bytes()
    for other in ("--initial.weights=v", "--data.held-out.share=.2", "--steps=7"):
        with pytest.raises(UserError, match=r"learning-rate=\.001 holds a run with other values"):
            sweep.run([*words, "0.003", "0.03", other], override=override, environ={})
    assert (tmp_path / "sweep.json").read_bytes() == before
    assert not started


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of rate .01, then two of .03: seeds/2 still has .01. The accuracy of a run is its rate, and more."""
    folder = tmp_path_factory.mktemp("made") / "sw"
    words = ["finetune", "digits_48", "--data.held-out.share=.1", "--evaluation.url=t", "--run-dir", str(folder)]
    words += ["--data.url=d", "--initial.weights=w", *GRID]
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
    assert (worth_of(swept / run, running_seconds=1.0).repeats is not None) is has_mean


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
