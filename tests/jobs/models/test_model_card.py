"""MODEL_CARD.md: the numbers of the run, code that loads the weights, and names that are only text."""

import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.models.export_weights import FILE_NAME, Exported, Training, card_text, training_of
from jobs.record import read_record
from jobs.reports.points import point_of
from jobs.stages import job_class
from pipeline.data.config import DataConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models.config import MaskedTarget, ModelConfig
from pipeline.models.conversion.config import Format
from pipeline.models.weights.usage import Usage
from shards.config import HeldOutConfig
from tests.jobs.models.test_evaluate import weights_that_say
from tests.jobs.reports.test_compare_facts import written
from tests.pipeline.models.parity import imported
from tests.rigs.processes import patchline
from tests.rigs.training import FinishedRuns

EXPORTED = Exported(
    name="out",
    written="timm",
    config=ModelConfig(name="vit_ti16", num_classes=3),
    labels=("cat", "dog", "fox"),
    usage=Usage(),
    num_parameters=5_526_000,
)


def front_matter(card: str) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load(card.split("---\n")[1])
    return found


def dataset_in(card: str) -> str:
    """Of its model-index."""
    index: Any = front_matter(card)["model-index"]
    return str(index[0]["results"][0]["dataset"]["name"])


@pytest.mark.parametrize("kind", ["patchline", "timm", "hugging_face"])
def test_the_code_in_the_card_loads_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Format) -> None:
    """Executed as it stands in the card, in the folder that the weights' folder is in."""
    weights, out = weights_that_say(tmp_path / "weights", 3), tmp_path / "out"
    ended = patchline("export", weights, "--out", str(out), "--format", kind)
    assert ended.code == 0, ended.errors
    card = (out / FILE_NAME).read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    if kind != "patchline":
        imported("timm" if kind == "timm" else "transformers")
    (tmp_path / "card.py").write_text(code.replace('model.predict("photo.jpg")', ""))
    assert runpy.run_path(str(tmp_path / "card.py"))["model"] is not None
    assert "Not known: the run that made these weights was not there" in card
    library = {"timm": "timm", "hugging_face": "transformers"}.get(kind)
    assert front_matter(card).get("library_name") == library


@pytest.mark.slow
def test_numbers_are_those_of_the_run(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    run_dir, out = finished_runs.scored(), tmp_path / "out"
    assert patchline("export", str(run_dir / "weights"), "--out", str(out), "--format=timm").code == 0
    training = training_of(str(run_dir / "weights"))
    assert training is not None
    card, point = (out / FILE_NAME).read_text(), training.point
    assert point.accuracy is not None
    for words in (
        f"- Accuracy on `digits`: {100 * point.accuracy:.2f} %",
        f"- 2-shot accuracy: {100 * point.fewshot[2]:.2f} %",
        "- Images of pre-training: 1,438",
        "- Steps: 16 of 32 images",
        "- Classes: `0`, `1`",
    ):
        assert words in card
    assert all(str(path) not in card for path in (tmp_path, run_dir)), "no path of the machine"
    index = front_matter(card)["model-index"]
    assert isinstance(index, list)
    assert index[0]["results"][0]["metrics"] == [{"type": "accuracy", "value": round(point.accuracy, 6)}]
    again = patchline("export", str(run_dir / "weights"), "--out", str(out), "--format=timm")
    assert again.code == 0, "the same again is no other content"


def test_a_run_without_scores_says_so(finished_runs: FinishedRuns) -> None:
    training = training_of(str(finished_runs.get(1)))
    assert "The run was not scored." in card_text(EXPORTED, training)
    assert "model-index" not in front_matter(card_text(EXPORTED, training))


def test_other_weights_in_a_runs_folder_get_none_of_its_numbers(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    """Those of an earlier checkpoint; only RUN and RUN/weights are what the run was scored with at its end."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(finished_runs.get(1), run_dir)
    assert patchline("weights", str(run_dir), "--step=4", "--out", str(run_dir / "w4")).code == 0
    ended = patchline("export", str(run_dir / "w4"), "--out", str(out), "--format=timm")
    assert ended.code == 0, ended.errors
    assert "Not known" in (out / FILE_NAME).read_text()
    assert training_of(str(run_dir / "weights")) is not None
    assert training_of(str(run_dir)) is not None


def test_a_run_that_has_gone_on_since_says_nothing_of_its_old_weights(
    finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(1), run_dir)
    record = (run_dir / "job.yaml").read_text()
    (run_dir / "job.yaml").write_text(record.replace("  steps: 16", "  steps: 32"))
    assert training_of(str(run_dir / "weights")) is None


def of_a_run(folder: Path, scores: dict[str, float], **fields: Any) -> Training:
    """A run with these scores on its last line."""
    written(folder, [scores], **fields)
    job = read_record(folder / "job.yaml", stage="pretrain", kind=job_class("pretrain"))
    return Training(point=point_of(folder, name="run"), job=job)


def test_a_score_on_a_held_out_part_is_not_that_of_the_training_set(tmp_path: Path) -> None:
    part, other = DataConfig(url="d/digits", held_out=HeldOutConfig(share=0.1)), EvaluationConfig(url="d/other")
    card = card_text(EXPORTED, of_a_run(tmp_path, {"test_accuracy": 0.5}, data=part, evaluation=other))
    assert dataset_in(card) == "digits, 10 % held out"
    assert "- Accuracy on `digits, 10 % held out`, which was not trained on: 50.00 %" in card


def test_averaged_weights_have_only_their_own_accuracy(tmp_path: Path) -> None:
    on, raw = EvaluationConfig(url="d/test"), {"test_accuracy": 0.5, "fewshot/5_shots": 0.25}
    card = card_text(
        EXPORTED, of_a_run(tmp_path / "a", raw | {"test_ema_accuracy": 0.75}, evaluation=on, ema_decay=0.9)
    )
    assert "- Accuracy on `test`: 75.00 %" in card
    assert "- 5-shot accuracy of the raw weights, not of these averaged ones: 25.00 %" in card
    assert dataset_in(card) == "test"
    card = card_text(EXPORTED, of_a_run(tmp_path / "b", raw, evaluation=on, ema_decay=0.9))
    assert "- Accuracy of the raw weights, not of these averaged ones, on `test`: 50.00 %" in card
    assert "model-index" not in front_matter(card)


def test_a_model_that_was_changed_has_no_scores_of_the_run(tmp_path: Path) -> None:
    training = of_a_run(tmp_path, {"test_accuracy": 0.5}, evaluation=EvaluationConfig(url="d/test"))
    card = card_text(replace(EXPORTED, is_changed=True), training)
    assert "Not known: the head or the resolution was changed after the run." in card
    assert "model-index" not in front_matter(card)
    assert "50.00" not in card


def test_the_title_says_sizes_that_are_not_the_published_ones() -> None:
    config = replace(EXPORTED.config, depth=4)
    assert "# `vit_ti16, depth 4` at 224 px" in card_text(replace(EXPORTED, config=config), None)


def test_names_are_only_text() -> None:
    evil = "`](x)\n# Head\n---\nlicense: mit\x1b[31m"
    card = card_text(replace(EXPORTED, labels=(evil,)), None)
    assert "\n# Head" not in card
    assert "\x1b" not in card
    assert card.count("---\n") == 2
    assert "`](x)" not in card


def test_a_damaged_record_leaves_the_card_without_training(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("stage: [")
    assert training_of(str(tmp_path / "weights")) is None


@pytest.mark.parametrize(
    ("target", "num_classes", "output"),
    [
        ("mean", 512, "for each patch, 512 logits"),
        ("parts", 8192, "for each patch, 8,192 logits; probabilities by softmax over the 512 mean colours of each"),
        ("pixels", 768, "for each patch, the 768 values of its pixels, scaled to -1 to 1"),
    ],
)
def test_weights_of_masked_patches_classify_nothing(target: MaskedTarget, num_classes: int, output: str) -> None:
    config = ModelConfig(name="vit_ti16", num_classes=num_classes, masked_patches=True, masked_target=target)
    card = card_text(replace(EXPORTED, config=config, written="patchline", labels=("red 0 green 0 blue 0",)), None)
    assert front_matter(card)["pipeline_tag"] == "image-feature-extraction"
    assert output in card
    assert "patchline fewshot out --data.url DATASET" in card
    assert not any(word in card for word in ("predict(", "Classes", "image-classification"))
