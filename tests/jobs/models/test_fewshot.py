"""`patchline fewshot` on packed digits: its table, its file and its messages."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.data import pack
from jobs.models.fewshot import FewshotJob, run, score_table
from jobs.record import read_record
from pipeline.evaluation.config import FewshotImages
from pipeline.evaluation.fewshot import FewshotScores, ShotScores
from pipeline.models import ModelConfig, build_model
from pipeline.models.weights.folder import save_weights
from shards.errors import InvalidDataError, UserError
from shards.sources.digits import DigitsSource
from tests.rigs.processes import patchline


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The test split of the digits as both splits: 359 images at URL and at URL-test."""
    folder = tmp_path_factory.mktemp("digits")
    for name in ("digits", "digits-test"):
        job = pack.PackJob(out=str(folder / name), source=DigitsSource(split="test"), split="test")
        assert pack.run(job) == 0
    return str(folder / "digits")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Initial weights of a tiny model: their representation is a random projection."""
    config = ModelConfig(
        name="vit", image_size=16, patch=4, depth=1, width=32, mlp_width=32, num_heads=2, num_classes=10
    )
    state, folder = build_model(config).state_dict(), tmp_path_factory.mktemp("weights") / "weights"
    save_weights(folder, config=config, labels=tuple("0123456789"), tensor=lambda name: state[name])
    return str(folder)


def test_scores_are_said_on_standard_output_and_written(tmp_path: Path, url: str, weights: str) -> None:
    run_dir = tmp_path / "few"
    words = (weights, "--data.url", url, "--shots", "1", "5", "--run-dir", str(run_dir), "--device", "cpu", "--probe")
    ended = patchline("fewshot", *words)
    assert (ended.code, "Traceback" in ended.errors) == (0, False), ended.errors
    facts = json.loads((run_dir / "fewshot.json").read_text())
    assert (facts["num_classes"], facts["num_test_images"], facts["width"]) == (10, 359, 32)
    assert facts["chance"] == pytest.approx(40 / 359), "the share of the most frequent label, as in evaluate"
    assert (facts["data_url"], facts["test_url"], facts["l2"]) == (url, f"{url}-test", 1024.0)
    first, second, head, *rows = ended.output.splitlines()
    assert first == f"{weights} on {url}-test"
    assert second == "10 classes (chance 0.1114), 359 test images, representation of 32"
    assert head == "shots     images         accuracy     linear probe"
    for row, result in zip(rows, facts["results"], strict=True):
        assert len(result["ridge"]) == len(result["probe"]) == 3
        cells = [f"{result[f'{kind}_mean']:.4f} ± {result[f'{kind}_deviation']:.4f}" for kind in ("ridge", "probe")]
        assert row.split(None, 2) == [str(result["shots"]), str(10 * result["shots"]), "  ".join(cells)]
    assert 0.1 < facts["results"][0]["ridge_mean"] < facts["results"][1]["ridge_mean"]
    assert read_record(run_dir / "job.yaml", stage="fewshot", kind=FewshotJob).shots == (1, 5)
    again = patchline("fewshot", str(run_dir / "job.yaml"), "--run-dir", str(tmp_path / "again"), "--json")
    assert again.code == 0, again.errors
    assert json.loads(again.output) == facts


@pytest.mark.long
def test_two_processes_have_the_same_scores(url: str, weights: str) -> None:
    words = (weights, "--data.url", url, "--shots", "5", "--seeds", "2", "--json", "--device", "cpu")
    one, two = (json.loads(patchline("fewshot", *words, *more).output) for more in ((), ("--processes", "2")))
    assert one == two


def test_a_table_without_a_probe() -> None:
    scores = FewshotScores(
        num_classes=1000,
        num_test_images=50_000,
        chance=0.001,
        width=1280,
        results=(ShotScores(shots=10, ridge=(0.5, 0.7)),),
    )
    assert score_table("w", scores, test_url="u").splitlines()[2:] == [
        "shots     images         accuracy",
        "   10     10,000  0.6000 ± 0.1414",
    ]


def test_one_seed_has_no_deviation() -> None:
    scores = FewshotScores(
        num_classes=10,
        num_test_images=5,
        chance=0.4,
        width=32,
        results=(ShotScores(shots=1, ridge=(0.5,), probe=(0.25,)),),
    )
    lines = score_table("w", scores, test_url="u").splitlines()
    assert lines[1].endswith("representation of 32 (one seed: no deviation)")
    assert lines[-1].split() == ["1", "10", "0.5000", "0.2500"]
    assert lines[-1].endswith("0.2500")
    assert len(lines[-1]) == len(lines[-2]), "the columns stay where they are"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"weights": "/nowhere"}, "no weights at '/nowhere'", id="gone"),
        pytest.param({"shots": (100,)}, "images of class '.', fewer than --shots 100", id="too many shots"),
    ],
)
def test_what_is_missing(url: str, weights: str, fields: dict[str, object], message: str) -> None:
    job = FewshotJob(weights=weights, data=FewshotImages(url=url), device="cpu")
    with pytest.raises(UserError, match=message):
        run(replace(job, **fields))  # type: ignore[arg-type]


def test_a_dataset_without_a_test_split_is_named(url: str, weights: str) -> None:
    job = FewshotJob(weights=weights, data=FewshotImages(url=f"{url}-test"), device="cpu")
    with pytest.raises(UserError, match=r"no dataset to measure on at .*digits-test-test': give it as --data.test-url"):
        run(job)


def test_representations_that_are_not_finite_have_no_score(tmp_path: Path, url: str, weights: str) -> None:
    """Finite weights can give them: a sum of large products overflows."""
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "config.json").write_bytes((Path(weights) / "config.json").read_bytes())
    tensors = load_file(Path(weights) / "model.safetensors")
    tensors["norm.weight"] = torch.full_like(tensors["norm.weight"], 3e38)
    save_file(tensors, tmp_path / "w" / "model.safetensors")
    job = FewshotJob(weights=str(tmp_path / "w"), data=FewshotImages(url=url), shots=(1,), device="cpu")
    with pytest.raises(InvalidDataError, match=r"the representations by .* are not finite"):
        run(job)


def test_scores_that_cannot_be_written(tmp_path: Path, url: str, weights: str) -> None:
    (tmp_path / "run" / "fewshot.json").mkdir(parents=True)
    job = FewshotJob(weights=weights, data=FewshotImages(url=url), shots=(1,), device="cpu")
    with pytest.raises(UserError, match=r"cannot write .*run/fewshot.json': Is a directory; give another --run-dir"):
        run(replace(job, run_dir=str(tmp_path / "run")))
    assert not list((tmp_path / "run").glob("*.part"))


TRAINED = (
    *("--steps=6", "--schedule.warmup-steps=0", "--device=cpu", "--threads=1", "--engine.precision=fp32"),
    *("--fewshot.every-steps=3", "--fewshot.shots", "2", "4"),
)
TWO_RANKS = ("--processes=2", "--engine.zero-stage=3", "--fewshot.probe")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), pytest.param(TWO_RANKS, marks=pytest.mark.long)], ids=["one", "two"])
def test_training_measures_the_same(tmp_path: Path, url: str, more: tuple[str, ...]) -> None:
    """At the end of training, the scores are those of the weights that it leaves; of two ranks, which shard the
    parameters, too. They need no held-out dataset."""
    run_dir = tmp_path / "run"
    words = ("digits_smoke", "--data.url", url, "--run-dir", str(run_dir), "--fewshot.url", url, *TRAINED, *more)
    ended = patchline("pretrain", *words)
    assert ended.code == 0, ended.errors
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    scored = {line["step"]: line for line in lines if "fewshot/2_shots" in line}
    assert list(scored) == [3, 6]
    assert "few-shot accuracy, 2 shots 0." in " ".join((ended.errors + ended.output).split()) or more
    words = (
        str(run_dir),
        "--data.url",
        url,
        "--shots",
        "2",
        "4",
        "--run-dir",
        str(tmp_path),
        "--device=cpu",
        "--probe",
    )
    assert patchline("fewshot", *words, "--threads=1").code == 0
    facts = json.loads((tmp_path / "fewshot.json").read_text())
    for result in facts["results"]:
        name = f"fewshot/{result['shots']}_shots"
        assert scored[6][name] == pytest.approx(result["ridge_mean"], abs=1e-12)
        assert (f"{name}_probe" in scored[6]) is bool(more)


def test_what_does_not_fit_is_refused_before_training(tmp_path: Path, url: str) -> None:
    words = ("digits_smoke", "--data.url", url, "--run-dir", str(tmp_path / "r"), "--device=cpu")
    for more, message in (
        (("--fewshot.url", url, "--fewshot.shots", "400"), "400"),
        (("--fewshot.url", f"{url}-test"), "give it as --fewshot.test-url"),
        (("--fewshot.every-steps", "5"), "say nothing without fewshot.url"),
        (("--fewshot.shots", "5", "5"), "shots"),
    ):
        ended = patchline("pretrain", *words, *more)
        assert (ended.code, "Traceback" in ended.errors) == (2, False), ended.errors
        assert message in " ".join(ended.errors.split())
    assert not (tmp_path / "r" / "metrics.jsonl").exists()
