"""The head's constant, which a model adds outside of its bias: on every way in and out of weights it counts once.

Each way is compared by its logits: those of the model that had the constant, or of the weights that were read.
"""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

from jobs.models.import_weights import run as import_weights
from jobs.settings.models import ImportJob
from patchline import load_model
from pipeline.checkpoints.stored import read_best
from pipeline.models import Model, ModelConfig, unfilled_model
from pipeline.models.conversion.config import Change, Format, Hints
from pipeline.models.conversion.convert import changed
from pipeline.models.conversion.open_any import open_any
from pipeline.models.weights.fit import fit_weights
from pipeline.models.weights.folder import Weights, filled_model, open_weights, write_folder
from pipeline.models.weights.safetensors import TensorByName
from tests.pipeline.models.conversion import random_weights
from tests.pipeline.models.conversion.random_weights import VIT
from tests.pipeline.models.conversion.test_convert import exported, hints_for
from tests.pipeline.models.weights.test_folder import LABELS, config_of, initial_of, random_model, saved
from tests.rigs.processes import patchline
from tests.rigs.training import FinishedRuns, losses, pretrain_words, run

CONSTANTS = (0.0, -10.0, -6.9)
IMAGES = torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
SIGMOID = ("--loss", "sigmoid", "--engine.precision", "fp32", "--evaluation.every-steps", "8")


def filled(config: ModelConfig, tensor: TensorByName) -> Model:
    model = unfilled_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensor(name))
    return model.eval()


def with_constant(folder: Path, model: Model) -> Weights:
    """A folder whose config.json names a constant that is not in its bias, as users' own code may write it."""
    state, config = model.state_dict(), model.config
    described = {field: getattr(config, field) for field in config.__dataclass_fields__}
    description = {"format": 1, "model": described, "labels": list(LABELS), "usage": {}}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    write_folder(folder, description=description, shapes=shapes, tensors=state.items())
    weights = open_weights(str(folder))
    assert weights.config.head_bias == config.head_bias
    return weights


@pytest.mark.parametrize(("was", "now"), list(product(CONSTANTS, CONSTANTS)))
@pytest.mark.parametrize("is_folded", [True, False])
def test_a_head_that_is_kept_says_the_same_under_any_constant(
    tmp_path: Path, was: float, now: float, is_folded: bool
) -> None:
    model, target = random_model(head_bias=was), config_of(head_bias=now)
    weights = open_weights(saved(tmp_path, model)) if is_folded else with_constant(tmp_path, model)
    tensor = fit_weights(weights, target, initial=initial_of(target), new_head=False)
    torch.testing.assert_close(filled(target, tensor)(IMAGES), model(IMAGES), atol=1e-5, rtol=0)


def test_a_head_of_colours_that_is_kept_says_the_same(tmp_path: Path) -> None:
    model = random_model(masked_patches=True, num_classes=512, head_bias=-6.9)
    target = replace(model.config, head_bias=-10.0)
    weights = open_weights(saved(tmp_path, model, tuple(map(str, range(512)))))
    tensor = fit_weights(weights, target, initial=initial_of(target), new_head=False)
    torch.testing.assert_close(filled(target, tensor)(IMAGES), model(IMAGES), atol=1e-5, rtol=0)


@pytest.mark.parametrize("written", get_args(Format))
def test_a_head_that_another_format_kept_says_the_same(tmp_path: Path, written: Format) -> None:
    config = replace(VIT, head_bias=-6.9)
    weights, target = open_any(str(exported(tmp_path, config, written)), hints_for(written)), config
    tensor = fit_weights(weights, target, initial=initial_of(target), new_head=False)
    expected = random_weights.random_model(config)(IMAGES)
    torch.testing.assert_close(filled(target, tensor)(IMAGES), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("was", CONSTANTS)
def test_a_new_head_says_the_targets_constant(tmp_path: Path, was: float) -> None:
    target = config_of(head_bias=-10.0)
    weights = with_constant(tmp_path, random_model(head_bias=was))
    tensor = fit_weights(weights, target, initial=initial_of(target), new_head=True)
    assert torch.equal(filled(target, tensor)(IMAGES), torch.full((4, 3), -10.0))


def test_a_constant_outside_the_bias_is_read_converted_and_imported(tmp_path: Path) -> None:
    model = random_model(head_bias=-10.0)
    weights = with_constant(tmp_path / "weights", model)
    torch.testing.assert_close(filled_model(weights)(IMAGES), model(IMAGES))
    torch.testing.assert_close(filled(*changed(weights, Change()))(IMAGES), model(IMAGES))
    assert import_weights(ImportJob(path=str(tmp_path / "weights"), out=str(tmp_path / "imported"))) == 0
    torch.testing.assert_close(filled_model(open_any(str(tmp_path / "imported"), Hints()))(IMAGES), model(IMAGES))


def test_a_new_head_of_zeros_keeps_no_constant(tmp_path: Path) -> None:
    """--new-head promises a head of zeros; -10 of a head that is gone would be a prior of another task."""
    weights = with_constant(tmp_path, random_model(head_bias=-10.0))
    assert not filled(*changed(weights, Change(new_head=True, num_classes=3)))(IMAGES).any()


@pytest.fixture(scope="module")
def first(finished_runs: FinishedRuns, digits_url: str) -> Path:
    """A run under sigmoid and the constant -10, scored on its digits at steps 8 and 16."""
    return finished_runs.get(1, *SIGMOID, "--model.head-bias", "-10", "--evaluation.url", digits_url)


@pytest.mark.slow
def test_a_run_starts_where_the_one_before_ended(first: Path, digits_url: str, tmp_path: Path) -> None:
    """With the constant of the first run and with another, at a rate that changes nothing."""
    for constant in ("-10", "-6.9"):
        run_dir = tmp_path / constant
        words = pretrain_words(digits_url, run_dir, *SIGMOID, "--model.head-bias", constant, "--steps", "1")
        words += ["--initial.weights", str(first), "--initial.no-new-head", "--schedule.learning-rate", "1e-12"]
        assert run([*words, "--schedule.warmup-steps", "0"], num_ranks=1, log_dir=tmp_path) == 0
        (loss,) = losses(run_dir).values()
        assert abs(loss - losses(first)[16]) < 1, "another batch of digits, but not another constant"
        assert_same_logits(run_dir, first)


@pytest.mark.slow
def test_a_runs_weights_score_as_the_run_did_with_its_constant(first: Path, digits_url: str, tmp_path: Path) -> None:
    by_step = {line["step"]: line for line in map(json.loads, (first / "metrics.jsonl").open())}
    for step in (8, 16):
        out = tmp_path / f"at-{step}"
        assert patchline("weights", str(first), "--step", str(step), "--out", str(out)).code == 0
        words = ("evaluate", "--weights", str(out), "--data.url", digits_url, "--loss", "sigmoid")
        found = json.loads(patchline(*words, "--json", "--device", "cpu").output)
        assert found["loss"] == pytest.approx(by_step[step]["test_loss"], rel=1e-5)
    assert_same_logits(tmp_path / "at-16", first)
    best = read_best(first)
    assert best is not None
    assert patchline("weights", str(first), "--best", "--out", str(tmp_path / "best")).code == 0
    assert_same_logits(tmp_path / "best", tmp_path / f"at-{best.step}")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    (_, likely), *_ = load_model(first, device="cpu").predict(image)
    logits_1K = filled_model(open_weights(str(first)))(torch.from_numpy(np.asarray(image).copy())[None])
    assert likely == pytest.approx(float(logits_1K.detach().sigmoid().max()), abs=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_under_its_own_constant_only(first: Path, digits_url: str, tmp_path: Path) -> None:
    """And the weights of its checkpoints are those of the constant that they were trained with, whatever a record that
    was edited since says."""
    run_dir = tmp_path / "run"
    shutil.copytree(first, run_dir)
    words = ("--evaluation.url", digits_url, "--steps", "20")
    other = patchline(*pretrain_words(digits_url, run_dir, *SIGMOID, *words, "--model.head-bias", "-6.9"), "--extend")
    assert (other.code, "model.head_bias" in other.errors) == (2, True), other.errors
    record = run_dir / "job.yaml"
    edited = record.read_text().replace("head_bias: -10.0", "head_bias: -6.9")
    assert edited != record.read_text()
    record.write_text(edited)
    assert patchline("weights", str(run_dir), "--out", str(tmp_path / "out")).code == 0
    assert_same_logits(tmp_path / "out", first)


def assert_same_logits(found: Path, expected: Path) -> None:
    images = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    outputs = [filled_model(open_weights(str(folder)))(images) for folder in (found, expected)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
