"""Which model a timm state dict belongs to, and what must be known from timm's code or assumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.timm import model_in, open_timm, save_timm
from pipeline.models.conversion.timm_architectures import ARCHITECTURES
from pipeline.models.weights.folder import Weights
from shards.errors import UserError
from tests.pipeline.models.conversion.random_weights import VIT, assumed_of, random_model, tensors_of


def saved(folder: Path) -> Path:
    save_timm(folder, config=VIT, labels=("a", "b", "c"), tensor=tensors_of(random_model(VIT)))
    return folder


def opened(folder: Path) -> Weights:
    description = json.loads((folder / "config.json").read_text())
    return open_timm(open_tensor_file(folder / "model.safetensors"), description, Hints(num_heads=2))


def test_the_first_thing_said_is_what_ours_has_not() -> None:
    """Of a file that also has other problems."""
    file = TensorFile(where="w", shapes={"dist_token": (1, 1, 12)}, read=lambda _: torch.zeros(1))
    with pytest.raises(UserError, match=r"dist_token \[1, 1, 12\] in 'w' is of a distillation"):
        model_in(file, {}, Hints())


@pytest.mark.parametrize("tag", ["", ".webli"])
@pytest.mark.parametrize("architecture", [name for name, each in ARCHITECTURES.items() if each.gelu == "tanh"])
def test_architectures_whose_gelu_is_in_timms_code(tmp_path: Path, architecture: str, tag: str) -> None:
    description = json.loads((saved(tmp_path) / "config.json").read_text())
    description |= {"architecture": architecture + tag, "model_args": {"img_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(description))
    weights = opened(tmp_path)
    assert (weights.config.gelu, assumed_of(weights)) == ("tanh", ())


@pytest.mark.parametrize(
    ("description", "hints", "assumed"),
    [
        pytest.param(
            {}, Hints(num_heads=2, grid_side=4), ("gelu exact", "layer_norm_epsilon 1e-06"), id="a state dict"
        ),
        pytest.param({}, Hints(num_heads=2, gelu="tanh", layer_norm_epsilon=1e-5, grid_side=4), (), id="all given"),
        pytest.param(
            {"model_args": {"num_heads": 2, "act_layer": "gelu", "img_size": 16}},
            Hints(),
            ("layer_norm_epsilon 1e-06",),
            id="said",
        ),
    ],
)
def test_what_is_assumed_is_said(
    tmp_path: Path, description: dict[str, Any], hints: Hints, assumed: tuple[str, ...]
) -> None:
    file = open_tensor_file(saved(tmp_path) / "model.safetensors")
    assert assumed_of(open_timm(file, description, hints)) == assumed


def shapes_of_tiny(rows: int, *, class_token: bool = True, patch: int = 16) -> TensorFile:
    """The shapes in a state dict of one layer of Ti, whose position table has `rows` rows."""
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (192, 3, patch, patch),
        "pos_embed": (1, rows, 192),
        "blocks.0.mlp.fc1.weight": (768, 192),
        "head.weight": (5, 192),
    }
    shapes |= {"cls_token": (1, 1, 192)} if class_token else {}
    return TensorFile(where="w", shapes=shapes, read=lambda _: torch.zeros(1))


@pytest.mark.parametrize(
    ("rows", "side", "others"),
    [
        pytest.param(17, 4, "2 x 8", id="32 x 128 px, a row for the class token"),
        pytest.param(9, 3, "2 x 4", id="32 x 64 px, which without such a row would be 3 x 3"),
        pytest.param(16, 4, "3 x 5", id="48 x 80 px"),
        pytest.param(25, 5, "4 x 6", id="64 x 96 px"),
        pytest.param(225, 15, "14 x 16", id="224 x 256 px"),
        pytest.param(37, 6, "4 x 9", id="64 x 144 px"),
    ],
)
def test_a_table_that_may_be_of_a_rectangle_is_refused(rows: int, side: int, others: str) -> None:
    with pytest.raises(UserError, match=rf"has {rows} rows, which would be .*{others}.*, which .* --grid-side {side}"):
        model_in(shapes_of_tiny(rows), {}, Hints())
    assert model_in(shapes_of_tiny(rows), {}, Hints(grid_side=side)).config.image_size == 16 * side


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (shapes_of_tiny(197), "14 x 14 patches"),
        (
            shapes_of_tiny(196),
            "14 x 14 patches without a row for the class token",
        ),
        (shapes_of_tiny(196, class_token=False), "14 x 14 patches"),
        (shapes_of_tiny(65, patch=4), "8 x 8 patches"),
    ],
)
def test_a_square_of_a_usual_size_is_said(file: TensorFile, said: str) -> None:
    assert str(model_in(file, {}, Hints()).assumed[-1]) == f"position embeddings of a square grid of {said}"


def flat(folder: Path, **changes: Any) -> Path:
    """config.json as timm wrote it before 2023: no pretrained_cfg, everything at the top level."""
    content = json.loads((saved(folder) / "config.json").read_text())
    content |= content.pop("pretrained_cfg")
    content["labels"] = content.pop("label_names")
    del content["model_args"]
    (folder / "config.json").write_text(json.dumps(content | changes))
    return folder


def test_timms_older_flat_config_is_read(tmp_path: Path) -> None:
    weights = opened(flat(tmp_path))
    assert (weights.config.image_size, weights.labels) == (16, ("a", "b", "c"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"input_size": [3, 8, 32]}, "a grid of 2 x 8", id="size"),
    ],
)
def test_what_a_flat_config_says_is_checked(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(flat(tmp_path, **changes))
