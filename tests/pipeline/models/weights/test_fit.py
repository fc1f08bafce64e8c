"""Weights of another size: other heads, grids and patch sizes, and what is refused."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.arguments import values_of, with_values
from jobs.flags import flags_of
from pipeline.models import ModelConfig, build_model
from pipeline.models.config import Mode
from pipeline.models.patches import resized_patches
from pipeline.models.positions import resample_axis_embeddings, resample_position_embeddings
from pipeline.models.weights.fit import fit_weights
from pipeline.models.weights.folder import HEAD, HEADS, open_weights
from shards.errors import UserError
from tests.pipeline.models.weights.test_folder import TINY, config_of, initial_of, random_model, saved

HYBRID: dict[str, Any] = TINY | {"patch": 1, "resnet_units": (1, 1), "image_size": 16}


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A job that has only a model."""

    model: ModelConfig


FAMILIES = {
    "a ViT": config_of(),
    "a hybrid": config_of(resnet_units=(1,), patch=1),
    "a BiT ResNet": ModelConfig(name="bit_r50x1", image_size=32, num_classes=3, resnet_units=(1,)),
}


@pytest.mark.parametrize(
    ("fields", "grid"),
    [
        pytest.param({"num_classes": 5}, (4, 4), id="other classes"),
        pytest.param({"num_classes": 5, "image_size": 24}, (6, 6), id="other classes at a higher resolution"),
        pytest.param({"image_size": 8}, (2, 2), id="a lower resolution"),
    ],
)
@pytest.mark.parametrize("representation", [False, True])
def test_fine_tuning_takes_all_but_the_head(
    tmp_path: Path, fields: dict[str, Any], grid: tuple[int, int], representation: bool
) -> None:
    model, target = random_model(representation=representation), config_of(**fields)
    tensor = fit_weights(open_weights(saved(tmp_path, model)), target, initial=initial_of(target), new_head=True)
    state = model.state_dict()
    for name, wanted in build_model(target).state_dict().items():
        assert tensor(name).shape == wanted.shape
        if name in HEAD:
            assert not tensor(name).any(), "a new head is zero"
        elif name == "embed.position":
            expected = resample_position_embeddings(state[name][0], from_grid=(4, 4), to_grid=grid)
            assert torch.equal(tensor(name)[0], expected)
        else:
            assert torch.equal(tensor(name), state[name]), name


@pytest.mark.parametrize(
    ("source", "target_size"),
    [
        pytest.param(ModelConfig(**TINY | {"position": "none"}), 24, id="no positions"),
        pytest.param(ModelConfig(**TINY | {"position": "learned_2d"}), 24, id="2-D positions"),
        pytest.param(ModelConfig(**TINY | {"position": "sincos2d"}), 24, id="fixed sines"),
        pytest.param(ModelConfig(**TINY | {"position_at": "layers"}), 24, id="positions at each layer"),
        pytest.param(
            ModelConfig(**TINY | {"position_at": "layers", "position": "learned_2d"}), 24, id="2-D, each layer"
        ),
        pytest.param(ModelConfig(**TINY | {"pooling": "average"}), 24, id="no class token"),
        pytest.param(ModelConfig(**TINY | {"position": "rope2d", "num_heads": 3}), 24, id="rotary positions"),
        pytest.param(ModelConfig(**TINY | {"pooling": "attention", "qk_norm": True}), 24, id="attention pooling"),
        pytest.param(ModelConfig(**TINY | {"layer_scale": 0.1, "registers": 2}), 24, id="LayerScale, registers"),
        pytest.param(ModelConfig(**TINY | {"distillation_token": True}), 24, id="a distillation token"),
        pytest.param(ModelConfig(**HYBRID), 24, id="hybrid"),
        pytest.param(ModelConfig(name="bit_r50x1", num_classes=3, resnet_units=(1, 1)), 448, id="BiT"),
    ],
)
@pytest.mark.parametrize("mode", ["paper", "bicubic"])
def test_every_model_fits_another_image_size(tmp_path: Path, source: ModelConfig, target_size: int, mode: Mode) -> None:
    model, target = build_model(source, seed=3), replace(source, image_size=target_size, num_classes=5)
    weights = open_weights(saved(tmp_path, model))
    tensor, state = (
        fit_weights(weights, target, initial=initial_of(target), new_head=True, mode=mode),
        model.state_dict(),
    )
    for name, wanted in build_model(target).state_dict().items():
        assert tensor(name).shape == wanted.shape
        if name.endswith((".position_x", ".position_y")):
            assert torch.equal(tensor(name), resample_axis_embeddings(state[name], length=6, mode=mode))
        elif name.endswith(".position"):
            prefix, grids = source.num_class_tokens, {"from_grid": source.grid, "to_grid": target.grid}
            expected = resample_position_embeddings(state[name][0], **grids, mode=mode, num_prefix_tokens=prefix)
            assert torch.equal(tensor(name)[0], expected)
            assert torch.equal(tensor(name)[0, :prefix], state[name][0, :prefix])
        elif name in HEADS:
            assert not tensor(name).any(), "a new head is zero"
        else:
            assert torch.equal(tensor(name), state[name]), name


@pytest.mark.parametrize("patch", [2, 8])
def test_patches_of_another_size_are_resized_if_that_is_asked_for(tmp_path: Path, patch: int) -> None:
    model, target = random_model(), config_of(patch=patch)
    weights, state = open_weights(saved(tmp_path, model)), model.state_dict()
    with pytest.raises(UserError):
        fit_weights(weights, target, initial=initial_of(target), new_head=True)
    tensor = fit_weights(weights, target, initial=initial_of(target), new_head=True, resize_patches=True)
    for name, wanted in build_model(target).state_dict().items():
        found = tensor(name)
        assert found.shape == wanted.shape
        if name == "embed.patch.weight":
            assert torch.equal(found, resized_patches(state[name], from_side=4, to_side=patch))
        elif name == "embed.position":
            expected = resample_position_embeddings(state[name][0], from_grid=(4, 4), to_grid=target.grid)
            assert torch.equal(found[0], expected)
        elif name not in HEAD:
            assert torch.equal(found, state[name]), name


def test_without_a_new_head_the_head_is_kept(tmp_path: Path) -> None:
    model, target = random_model(representation=True), config_of(representation=True, image_size=24)
    tensor = fit_weights(open_weights(saved(tmp_path, model)), target, initial=initial_of(target), new_head=False)
    for name in (*HEAD, "representation.weight", "representation.bias"):
        assert torch.equal(tensor(name), model.state_dict()[name])


@pytest.mark.parametrize(
    ("fields", "new_head", "messages"),
    [
        pytest.param(
            {"num_classes": 5},
            False,
            ("head.weight is [3, 12], the model needs [5, 12]", "head.bias is [3], the model needs [5]"),
            id="other classes with the old head",
        ),
        pytest.param(
            {"width": 16},
            True,
            (
                "embed.position is [1, 17, 12], the model needs [1, 17, 16]",
                "embed.patch.weight is [12, 48], the model needs [16, 48]",
                "; and ",
                "--model.width",
            ),
            id="another width: the first eight are listed",
        ),
        pytest.param(
            {"depth": 3},
            True,
            ("blocks.2.norm1.weight [12] is not there", "blocks.2.attention.qkv.weight [36, 12] is not there"),
            id="a layer more",
        ),
        pytest.param({"depth": 1}, True, ("blocks.1.norm1.weight [12] is not in the model",), id="a layer less"),
        pytest.param({"patch": 8}, True, ("embed.patch.weight is [12, 48], the model needs [12, 192]",), id="patch"),
        pytest.param(
            {"representation": True}, False, ("representation.weight [12, 12] is not there",), id="a hidden layer"
        ),
    ],
)
def test_what_does_not_fit_is_named_with_both_shapes(
    tmp_path: Path, fields: dict[str, Any], new_head: bool, messages: tuple[str, ...]
) -> None:
    weights, target = open_weights(saved(tmp_path / "w", random_model())), config_of(**fields)
    with pytest.raises(UserError) as caught:
        fit_weights(weights, target, initial=initial_of(target), new_head=new_head)
    for message in (str(tmp_path / "w"), *messages):
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            {
                "position": "rope2d",
                "num_heads": 3,
                "registers": 2,
                "pooling": "average",
                "gelu": "exact",
                "layer_norm_epsilon": 1e-5,
                "rotary_places": "centred",
                "rotary_temperature": 10_000.0,
                "layer_scale": 1e-4,
            },
            id="as DINOv3",
        ),
        pytest.param(
            {"depth": 1, "gelu": "quick", "mlp": "swiglu", "first_norm": True, "last_norm": "none"}, id="sizes"
        ),
        pytest.param({"pooling": "average", "attention": "axial", "qk_norm": True, "gelu": "exact"}, id="axial"),
        pytest.param({"representation": True, "position": "none", "gelu": "exact"}, id="the head is kept"),
        pytest.param(HYBRID | {"resnet_epsilons": "timm", "registers": 1}, id="hybrid"),
    ],
)
def test_the_flags_in_a_refusal_are_all_that_is_needed(tmp_path: Path, source: dict[str, Any]) -> None:
    """Once they came in two refusals: what changes a shape, and then what changes the arithmetic alone."""
    weights = open_weights(saved(tmp_path, build_model(ModelConfig(**TINY | source), seed=3)))
    target = replace(ModelConfig(**HYBRID) if "resnet_units" in source else config_of(), name=weights.config.name)
    with pytest.raises(UserError) as caught:
        fit_weights(weights, target, initial=initial_of(target), new_head=False)
    (words,) = re.findall("Give ((?:--model[^ ]+ (?:[^- ][^ ]*)? ?)+)", str(caught.value).replace(",", " "))
    given = Holder(model=target)
    values = values_of(words.split(), list(flags_of(given)), command=("finetune", "mine"))
    changed = with_values(given, values).model
    fit_weights(weights, changed, initial=initial_of(changed), new_head=False)
