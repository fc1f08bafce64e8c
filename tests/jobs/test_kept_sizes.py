"""A published name given to a recipe with sizes of its own is pointed out, once and with what to add."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.data.verify import VerifyJob
from jobs.mistakes import kept_sizes
from jobs.recipes import finetune, pretrain
from jobs.resolve import default_job
from pipeline.models.config import ModelConfig
from tests.rigs.processes import patchline

OWN: dict[str, Any] = {"patch": 8, "depth": 4}
ALL = ("--model.patch=8", "--model.depth", "4")


@pytest.mark.parametrize(
    ("model", "words", "kept"),
    [
        (OWN, ("--model.name", "vit_b16"), "patch 8 (16), depth 4 (12); for vit_b16 itself, add --model.patch 16"),
        (OWN, ("--model.name=vit_b16", "--model.depth", "4"), "of vit_b16): patch 8 (16); for"),
        (OWN, ("--model.name=vit_b16", *ALL), ""),
        (OWN, ("--seed", "3"), ""),  # the recipe's own choice
        ({"depth": 12}, ("--model.name=vit_b16",), ""),
        ({}, ("--model.name=vit_b16",), ""),
        (
            OWN | {"name": "vit_b17", "width": 8, "mlp_width": 8, "num_heads": 1},
            ("--model.name", "vit_b17"),
            "--model.name vit_b17 is a name of your own, for the recipe's sizes; did you mean vit_b16?",
        ),
        (OWN | {"name": "mine", "width": 8, "mlp_width": 8, "num_heads": 1}, ("--model.name", "mine"), ""),
    ],
)
def test_sizes_that_a_name_leaves_are_said(model: dict[str, Any], words: tuple[str, ...], kept: str) -> None:
    said = kept_sizes(replace(finetune.RECIPES["cifar10_paper"](), model=ModelConfig(**model)), words)
    assert kept in said
    assert bool(kept) is bool(said)


def test_a_resnet_is_compared_by_its_units() -> None:
    model = ModelConfig(name="bit_r50x1", image_size=32, resnet_units=(1, 1))
    said = kept_sizes(replace(finetune.RECIPES["cifar10_paper"](), model=model), ("--model.name", "bit_r50x1"))
    assert "resnet units 1 1 (3 4 6 3); for bit_r50x1 itself, add --model.resnet-units 3 4 6 3" in said


def test_plans_have_their_own_flags_and_other_jobs_no_model() -> None:
    job = default_job("plan", next(iter(pretrain.RECIPES)))
    small = replace(job, training=replace(job.training, model=ModelConfig(name="vit_b16", depth=4)))
    assert "add --training.model.depth 12" in kept_sizes(small, ("--training.model.name", "vit_b16"))
    assert kept_sizes(VerifyJob(url="x"), ("--model.name", "vit_b16")) == ""


def test_the_command_line_warns(tmp_path: Path) -> None:
    words = ("--initial.weights", str(tmp_path / "none"), "--data.url", "none", "--run-dir", str(tmp_path / "run"))
    ended = patchline("finetune", "digits_48", "--model.name", "vit_b16", "--device", "cpu", *words)
    assert " ".join(ended.errors.split()).count("--model.name vit_b16 leaves the recipe's own sizes") == 1
