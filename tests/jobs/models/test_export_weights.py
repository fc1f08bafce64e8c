"""`patchline export`: weights that other libraries load, and MODEL_CARD.md: the numbers of the run, code that loads the
weights, and names that are only text."""

import json
import logging
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from safetensors.torch import load_file, save_file

from jobs.models.export_weights import FILE_NAME, Exported, ExportJob, Training, card_text, run, training_of
from jobs.models.import_weights import ImportJob
from jobs.models.import_weights import run as run_import
from jobs.recipes.pretrain import digits_smoke
from jobs.record import read_record
from jobs.reports.points import point_of
from jobs.stages import job_class
from pipeline.data.config import DataConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models import build_model
from pipeline.models.config import MaskedTarget, ModelConfig
from pipeline.models.conversion.config import Format
from pipeline.models.weights.folder import open_weights, save_weights
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage
from pipeline.shared_settings import EvaluationTransform
from pipeline.training.settings.job import TeacherConfig
from pipeline.training.settings.tokens import TokensConfig
from shards.config import HeldOutConfig
from shards.errors import InvalidDataError, UserError
from tests.jobs.models.test_evaluate import weights_that_say
from tests.jobs.reports.test_points import written
from tests.pipeline.models.parity import imported
from tests.rigs.limited import limited_patchline
from tests.rigs.processes import patchline
from tests.rigs.training import FinishedRuns

CONFIG = ModelConfig(name="vit_ti16", depth=1, image_size=32, num_classes=3)
LABELS = ("cat", "dog", "Füchsin")
EXPORTED = Exported(
    name="out",
    written="timm",
    config=ModelConfig(name="vit_ti16", num_classes=3),
    labels=("cat", "dog", "fox"),
    usage=Usage(),
    num_parameters=5_526_000,
)


@pytest.fixture
def job(tmp_path: Path) -> ExportJob:
    """A small weights folder."""
    state = build_model(CONFIG).state_dict()
    save_weights(tmp_path / "weights", config=CONFIG, labels=LABELS, tensor=lambda name: state[name])
    return ExportJob(path=str(tmp_path / "weights"), out=str(tmp_path / "out.npz"))


@pytest.mark.parametrize("written", get_args(Format))
def test_every_format_comes_back(job: ExportJob, tmp_path: Path, written: Format) -> None:
    job = replace(job, format=written, image_size=48, run_dir=str(tmp_path / "run"))
    assert run(job) == 0
    assert read_record(tmp_path / "run" / "job.yaml", stage="export", kind=ExportJob) == job
    assert run_import(ImportJob(path=job.out, out=str(tmp_path / "back"))) == 0
    weights = open_weights(str(tmp_path / "back"))
    assert (weights.config.size, weights.config.image_size) == (CONFIG.size, 48)
    keeps_names = written not in ("vision_transformer", "big_vision")
    assert weights.labels == (LABELS if keeps_names else ("0", "1", "2"))


@pytest.mark.parametrize(
    ("transform", "written", "says"),
    [
        (EvaluationTransform(), "timm", "timm resizes images with antialiasing, and this run's evaluation without"),
        (EvaluationTransform(), "hugging_face", "transformers resizes images with antialiasing, and this run's"),
        (EvaluationTransform(filter="area"), "hugging_face", "this run's evaluation by areas"),
        (EvaluationTransform(filter="area"), "timm", ""),
        (EvaluationTransform(antialias=True), "timm", ""),
        (EvaluationTransform(antialias=True), "hugging_face", ""),
        (EvaluationTransform(), "big_vision", ""),
        (EvaluationTransform(antialias=True, border=2), "timm", "timm cuts off no border, and this run's evaluation"),
        (EvaluationTransform(border=2), "hugging_face", "transformers cuts off no border"),
    ],
)
def test_what_another_librarys_evaluation_cannot_do_is_said(
    job: ExportJob, caplog: pytest.LogCaptureFixture, transform: EvaluationTransform, written: Format, says: str
) -> None:
    state = build_model(CONFIG).state_dict()
    usage = replace(DEFAULT_USAGE, transform=transform)
    save_weights(Path(job.path), config=CONFIG, labels=LABELS, tensor=lambda name: state[name], usage=usage)
    with caplog.at_level(logging.INFO):
        assert run(replace(job, format=written)) == 0
    assert says in caplog.text
    assert ("antialiasing" in caplog.text or "border" in caplog.text) is bool(says)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"out": ""}, "--out is missing", id="no out"),
        pytest.param(
            {"path": "gone"}, "no weights at 'gone': there is no such.*patchline import reads: a timm", id="no weights"
        ),
        pytest.param({"num_classes": 7}, "give --new-head to drop it", id="a head that does not fit"),
        pytest.param({"out": "folder", "format": "big_vision"}, "is a file that ends in .npz", id="npz"),
    ],
)
def test_mistakes_leave_nothing_behind(job: ExportJob, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(replace(job, **change))  # type: ignore[arg-type]
    assert not Path(job.out).exists()


def test_weights_are_not_written_over_themselves(job: ExportJob) -> None:
    with pytest.raises(UserError, match="where the weights are read from; give another"):
        run(replace(job, out=job.path))


@pytest.mark.parametrize("written", get_args(Format))
def test_the_same_again_is_no_fault_and_anything_else_is_refused_unless_asked_for(
    job: ExportJob, written: Format
) -> None:
    job = replace(job, format=written)
    other = replace(job, image_size=48)
    assert (run(job), run(job)) == (0, 0)
    with pytest.raises(UserError, match=r"has other content: .*--overwrite"):
        run(other)
    assert run(job) == 0  # it is unchanged
    assert run(other, overwrite=True) == 0
    assert run(other) == 0


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_weights_of_a_run_are_not_replaced_by_their_export(tmp_path: Path, overwrite: bool) -> None:
    """RUN stands for RUN/weights, which the DONE marker vouches for."""
    state = build_model(CONFIG).state_dict()
    save_weights(tmp_path / "weights", config=CONFIG, labels=LABELS, tensor=lambda name: state[name])
    job = ExportJob(path=str(tmp_path), out=str(tmp_path / "weights"), format="patchline", image_size=48)
    with pytest.raises(UserError):
        run(job, overwrite=overwrite)
    assert open_weights(str(tmp_path)).config.image_size == 32


@pytest.mark.parametrize("written", get_args(Format))
def test_values_that_are_not_finite_are_not_exported(job: ExportJob, tmp_path: Path, written: Format) -> None:
    path = Path(job.path) / "model.safetensors"
    tensors = load_file(path)
    tensors["blocks.0.mlp.dense1.weight"][3, 4] = float("-inf")
    save_file(tensors, path)
    with pytest.raises(InvalidDataError, match=r"dense1.weight in the weights at .* has 1 values of 147,456 that are"):
        run(replace(job, format=written))
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        pytest.param("export", {"depth": 10**9}, "model.depth is 1000000000; allowed: 1 to 1,000", id="depth"),
        pytest.param("export", {"depth": 1000}, "config.json says 1000 layers, model.safetensors has", id="layers"),
        pytest.param("export", {"width": 2**62}, "model.width is .*; allowed: 1 to 65,536", id="width"),
        pytest.param("export", {"num_classes": 10**9}, "num_classes is .* to 10,000,000", id="classes"),
        pytest.param("export", {"image_size": 10**9}, "image_size is .* to 16,384", id="pixels"),
        pytest.param("import", {"depth": 10**9}, "model.depth is 1000000000", id="import"),
    ],
)
def test_sizes_without_end_cost_no_memory_and_no_time(
    job: ExportJob, stage: str, change: dict[str, int], message: str
) -> None:
    path = Path(job.path) / "config.json"
    description = json.loads(path.read_text())
    description["model"] |= change
    path.write_text(json.dumps(description))
    ended = limited_patchline(stage, job.path, "--out", job.out)
    assert (ended.code, "Traceback" in ended.errors) == (2, False), ended.errors
    assert re.search(message, ended.errors), ended.errors


def test_hugging_faces_config_without_end(job: ExportJob) -> None:
    assert run(replace(job, format="hugging_face", out=str(Path(job.out).with_suffix("")))) == 0
    path = Path(job.out).with_suffix("") / "config.json"
    description = json.loads(path.read_text())
    for change in ({"num_hidden_layers": 10**9}, {"num_attention_heads": 10**9}, {"image_size": 10**9}):
        path.write_text(json.dumps(description | change))
        ended = limited_patchline("import", str(path.parent), "--out", job.out)
        assert (ended.code, "Traceback" in ended.errors) == (2, False), ended.errors


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


def test_a_card_names_the_teacher_sam_and_what_was_done_to_images(tmp_path: Path) -> None:
    teacher = TeacherConfig(
        weights="/home/somebody/runs/large_`b`/weights", share=0.5, temperature=2.0, sha256="a" * 64
    )
    job = digits_smoke()
    fields = {
        "teacher": teacher,
        "tokens": TokensConfig(
            patch_sizes=(4, 8), patch_dropout=0.5, whole_steps=3, image_sizes=(8, 16), size_steps=(20, 40)
        ),
        "data": replace(job.data, augment=replace(job.data.augment, repeats=3)),
        "optimizer": replace(job.optimizer, sam_rho=0.2),
    }
    training = of_a_run(tmp_path / "a", {"test_accuracy": 0.5}, model={"distillation_token": True}, **fields)
    card = card_text(EXPORTED, training)
    for line in (
        "- Teacher: `large_'b'`; its probabilities at temperature 2.0 are the target for 0.5 of the loss, for the "
        "distillation token (sha256 aaaaaaaaaaaa...)",
        "- SAM: rho 0.2",
        "- Patch sizes: 4, 8 px, of which each step draws one",
        "- Smaller images first: 8 px up to step 20, 16 px up to step 40",
        "- Repeated augmentation: 3 views of each image",
        "- Patch dropout: 0.5 of the patches of each image, but none in the last 3 steps",
    ):
        assert f"{line}\n" in card, card
    assert "somebody" not in card
    plain = card_text(EXPORTED, of_a_run(tmp_path / "b", {"test_accuracy": 0.5}))
    assert not [word for word in ("Teacher", "SAM", "Patch", "Smaller", "Repeated") if f"- {word}" in plain]


def test_a_model_that_was_changed_has_no_scores_of_the_run(tmp_path: Path) -> None:
    training = of_a_run(tmp_path, {"test_accuracy": 0.5}, evaluation=EvaluationConfig(url="d/test"))
    card = card_text(replace(EXPORTED, is_changed=True), training)
    assert "Not known: the head, the resolution or the patch size was changed after the run." in card
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
