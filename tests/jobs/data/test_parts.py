"""Parts of one packed dataset in every stage that reads one: trained on, scored, measured, swept."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.data.pack import PackJob, run
from shards.sources.kinds import DigitsSource
from tests.rigs.processes import patchline
from tests.rigs.training import losses, pretrain_words

SHORT = ("--steps", "4", "--checkpoint.every-steps", "2", "--threads=1", "--engine.precision=fp32")
PART = ("--data.subset.share=.3", "--data.held-out.share=.2", "--data.lanes=8")


@pytest.fixture(scope="module")
def test_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("test") / "digits-test")
    assert run(PackJob(out=out, source=DigitsSource(split="test"), split="test", samples_per_shard=128)) == 0
    return out


def trained(url: str, run_dir: Path, *more: str) -> str:
    ended = patchline(*pretrain_words(url, run_dir, *SHORT, *more))
    assert ended.code == 0, ended.errors
    return " ".join((ended.errors + ended.output).split())


def answer(*words: str) -> Any:
    ended = patchline(*words, "--json")
    assert ended.code == 0, ended.errors
    return json.loads(ended.output.splitlines()[-1])


def last_metrics(run_dir: Path) -> Any:
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
def test_a_part_is_trained_on_and_another_scored(digits_url: str, test_url: str, tmp_path: Path) -> None:
    """The digits have 1,438 images: 288 are held out, and 345 of the 1,150 others trained on."""
    run_dir = tmp_path / "run"
    said = trained(digits_url, run_dir, *PART, "--evaluation.url", test_url, "--checkpoint.keep-best")
    assert "training on 345 of the 1,438 samples" in said
    assert "288 are held out" in said
    assert "held-out accuracy 0." in said
    last, weights = last_metrics(run_dir), str(run_dir / "weights")
    words = ("evaluate", "--weights", weights, "--device=cpu", "--threads=1", "--data.url")
    for name, images, flags in (
        ("test_", 288, (digits_url, "--held-out.share=.2")),
        (f"eval/{Path(test_url).name}/", 359, (test_url,)),
    ):
        scores = answer(*words, *flags)
        assert scores["num_images"] == images
        assert last[f"{name}accuracy"] == pytest.approx(scores["accuracy"], abs=1e-12)
        assert last[f"{name}loss"] == pytest.approx(scores["loss"], rel=1e-5)
    best = json.loads((run_dir / "best.json").read_text())
    assert best["images"] == 288, "the best checkpoint is by the held-out part"


@pytest.mark.slow
def test_a_run_continues_on_the_same_part_alone(digits_url: str, tmp_path: Path) -> None:
    """Two runs of one part are the same, and another part is named and refused."""
    runs = [tmp_path / "first", tmp_path / "second"]
    for run_dir in runs:
        trained(digits_url, run_dir, *PART)
    assert losses(runs[0]) == losses(runs[1])
    for changed in ("--data.subset.share=.4", "--data.held-out.seed=1"):
        ended = patchline(*pretrain_words(digits_url, runs[0], *SHORT, *PART, changed, "--steps=6", "--extend"))
        assert ended.code == 2, ended.errors
        assert changed[2:].partition("=")[0].replace("-", "_") in ended.errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data.subset.share=1e-9",), "subset.share 1e-09 of the 1,438 samples of"),
        (("--data.subset.count=5000",), "subset.count is 5,000; allowed: at most 1,438"),
        (("--data.subset.per-class=1000",), "fewer than subset.per_class 1000"),
        (("--data.subset.share=.1", "--data.subset.count=5"), "subset.share and subset.count do not go together"),
        (("--data.held-out.count=1438",), "leaves none to train on"),
        (("--data.subset.count=7",), "lanes is 8; allowed: 1 to 7"),
    ],
)
def test_a_subset_of_nothing_is_one_message(
    digits_url: str, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    ended = patchline(*pretrain_words(digits_url, tmp_path / "run", "--data.lanes=8", *flags))
    assert (ended.code, "Traceback" in ended.errors) == (2, False), ended.errors
    assert message in " ".join(ended.errors.split())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_shots_are_taken_of_a_part_and_measured_on_another(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shots = ("--fewshot.url", digits_url, "--fewshot.shots=2", "--fewshot.subset.per-class=20")
    trained(digits_url, run_dir, *shots, "--fewshot.held-out.share=.2")
    words = (str(run_dir), "--data.url", digits_url, "--data.subset.per-class=20", "--data.held-out.share=.2")
    facts = answer("fewshot", *words, "--shots=2", "--device=cpu", "--threads=1")
    assert facts["num_test_images"] == 288
    assert last_metrics(run_dir)["fewshot/2_shots"] == pytest.approx(facts["results"][0]["ridge_mean"], abs=1e-12)
    both = patchline("fewshot", *words, "--data.test-url", digits_url, "--device=cpu")
    assert both.code == 2
    assert "--data.held-out and --data.test-url both say what to measure on" in " ".join(both.errors.split())


@pytest.mark.long
def test_a_sweep_chooses_on_a_part_and_repeats_on_all(digits_url: str, test_url: str, tmp_path: Path) -> None:
    words = [*pretrain_words(digits_url, tmp_path, *SHORT), "--schedule.learning-rate", "0", ".01", "--seeds=1"]
    ended = patchline("sweep", *words, "--data.held-out.share=.2", "--evaluation.url", test_url)
    assert ended.code == 0, ended.errors
    facts = json.loads((tmp_path / "sweep.json").read_text())
    assert facts["held_out"] == ["--data.held-out.share", ".2"]
    for runs, images in ((facts["tries"], 288), (facts["seeds"], 359)):
        for one in runs:
            right = one["accuracy"] * images
            assert right == pytest.approx(round(right), abs=1e-9), "a share of so many images"
            assert answer("ls", str(tmp_path / one["folder"]))["accuracy"] == pytest.approx(one["accuracy"])
