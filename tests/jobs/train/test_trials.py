"""What is known of the runs that a command starts. That they run is tested in test_sweep.py and test_vtab.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.train.trials import Trial, make_room, refuse_others, run_all, score_of
from shards.errors import UserError
from tests.jobs.reports.test_ls import make
from tests.rigs.fake_runs import finish, override, runs_are_over_at_once


def trial(folder: Path, *words: str) -> Trial:
    given = ("pretrain", "digits_smoke", "--data.url=d", *words, f"--run-dir={folder}")
    return Trial(folder=folder, values=(), words=given)


def test_what_a_folder_says(tmp_path: Path) -> None:
    assert score_of(trial(tmp_path / "none"), override).state == "never started"
    run_dir = make(tmp_path / "half", step=10)
    (run_dir / "metrics.jsonl").open("a").write('{"step": 10, "test_accuracy": 0.5}\n')
    found = score_of(trial(tmp_path / "half"), override)
    assert found.state not in ("done", "never started")
    assert found.accuracy is None, "of an unfinished run"
    done = trial(tmp_path / "done", "--seed=1")
    finish(list(done.words), 0.5)
    assert (score_of(done, override).state, score_of(done, override).accuracy) == ("done", 0.5)


def test_the_score_is_of_the_weights_that_the_run_ends_with(tmp_path: Path) -> None:
    """And by the metric that the sweep asks for."""
    averaged, raw = trial(tmp_path / "averaged", "--ema-decay=.9"), trial(tmp_path / "raw")
    more = {"test_mean_per_class": 0.2, "test_ema_accuracy": 0.3, "test_ema_mean_per_class": 0.4}
    for each in (averaged, raw):
        finish(list(each.words), 0.1, **more)
    assert [score_of(each, override).accuracy for each in (raw, averaged)] == [0.1, 0.3]
    by_class = [replace(each, metric="mean_per_class") for each in (raw, averaged)]
    assert [score_of(each, override).accuracy for each in by_class] == [0.2, 0.4]
    finish(list(averaged.words), 0.1)
    found = score_of(averaged, override)
    assert (found.state, found.accuracy) == ("done", None)
    assert "no score of the weights that it ended with" in found.why


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        (("--seed=2",), "seed: before 0, now 2"),
        (("--steps=50",), "steps: before 60, now 50"),
        (("--steps=50", "--extend"), "steps: before 60, now 50"),
        (("--schedule.learning-rate=.5",), "schedule.learning_rate: before 0.003, now 0.5"),
        (("--data.held-out.share=.1",), "data.held_out.share: before 0.0, now 0.1"),
        (("--initial.weights=w",), "initial.weights: before '', now w"),
        (("--evaluation.url=t",), "evaluation.url: before '', now t"),
    ],
)
def test_a_run_with_other_values_is_not_taken_over(tmp_path: Path, more: tuple[str, ...], changed: str) -> None:
    finish(list(trial(tmp_path / "r", "--steps=60", "--schedule.learning-rate=.003").words), 0.5)
    same = trial(tmp_path / "r", "--steps=60", "--schedule.learning-rate=.003", "--threads=1")
    assert score_of(same, override).accuracy == 0.5
    refuse_others([same], override)
    other = trial(tmp_path / "r", "--steps=60", "--schedule.learning-rate=.003", *more)
    assert (score_of(other, override).state, score_of(other, override).accuracy) == ("never started", None)
    with pytest.raises(UserError, match="r holds a run with other values:\n") as raised:
        refuse_others([same, other], override)
    assert changed in str(raised.value)


def test_a_mix_may_move_and_keeps_its_weights(tmp_path: Path) -> None:
    mixed = ("--data.url=", "--data.mix", "a", "1", "b", "2")
    finish(list(trial(tmp_path / "r", *mixed).words), 0.5)
    refuse_others([trial(tmp_path / "r", *mixed[:2], "c", "1", "d", "2")], override)
    for other in ((*mixed[:5], "3"), mixed[:4], ("--data.url=d",)):
        with pytest.raises(UserError, match=r"data\.mix: before \[\[a, 1\.0\], \[b, 2\.0\]\], now "):
            refuse_others([trial(tmp_path / "r", *other)], override)


def test_what_is_done_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where a dataset has moved, the run itself compares its content; and a longer run is one to extend."""
    first, second = trial(tmp_path / "1"), trial(tmp_path / "2", "--steps=60")
    started = runs_are_over_at_once(monkeypatch, lambda _: 0.5)
    for _ in range(2):
        assert run_all([first, second], {}, override) == 0
        assert started == [str(tmp_path / "1"), str(tmp_path / "2")]
    moved, longer = trial(tmp_path / "1", "--data.url=e"), trial(tmp_path / "2", "--steps=70", "--extend")
    refuse_others([moved, longer], override)
    assert run_all([moved, longer], {}, override) == 0
    assert started[2:] == [str(tmp_path / "1"), str(tmp_path / "2")]


def test_room_is_made_for_what_differs_in_free_fields_alone(tmp_path: Path) -> None:
    seed = trial(tmp_path / "s" / "seeds" / "0", "--schedule.learning-rate=.1")
    for number in (1, 2):
        finish([*seed.words, f"--schedule.learning-rate={number}"], number / 10)
        with pytest.raises(UserError, match="other values"):
            make_room([seed], override, free={"steps"})
        assert seed.folder.is_dir()
        make_room([seed], override, free={"schedule.learning_rate"})
        assert not seed.folder.exists()
    make_room([seed], override, free=())
    finish(list(seed.words), 0.3)
    make_room([seed], override, free={"schedule.learning_rate"})
    assert score_of(seed, override).accuracy == 0.3
    assert sorted(path.name for path in (tmp_path / "s" / "earlier").iterdir()) == ["seeds-0", "seeds-0-2"]
