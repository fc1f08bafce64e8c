"""`patchline export` converts a run's weights to each format, and `patchline import` reads them back."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from safetensors.torch import load_file, save_file

from jobs.models.export_weights import ExportJob, run
from jobs.models.import_weights import ImportJob
from jobs.models.import_weights import run as run_import
from jobs.record import read_record
from pipeline.models import ModelConfig, build_model
from pipeline.models.conversion.config import Format
from pipeline.models.weights.folder import open_weights, save_weights
from pipeline.models.weights.usage import DEFAULT_USAGE
from pipeline.shared_settings import EvaluationTransform
from shards.errors import InvalidDataError, UserError
from tests.rigs.limited import limited_patchline

CONFIG = ModelConfig(name="vit_ti16", depth=1, image_size=32, num_classes=3)
LABELS = ("cat", "dog", "Füchsin")


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
    with pytest.raises(UserError, match="where the weights are read from; give another"):
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
