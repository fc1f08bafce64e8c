"""The names and shapes of a Vision Transformer in each dialect, written down, and compared with timm's own reader.

The table of sines that big_vision does not store has known values, and cases for which it is not defined.
"""

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pipeline.models import ModelConfig
from pipeline.models.conversion.npz import Dialect, save_npz
from pipeline.models.conversion.npz_vit import (
    BIG_VISION,
    TABLE,
    VISION_TRANSFORMER,
    NpzNames,
    layout,
    sincos_table,
    with_table,
)
from pipeline.models.conversion.tensor_file import TensorFile
from shards.errors import UserError
from tests.pipeline.models.conversion.random_weights import (
    HYBRID,
    MAP,
    REPRESENTATION,
    VIT,
    arrays_in,
    random_model,
    tensors_of,
)
from tests.pipeline.models.parity import difference, random_images

Shapes = dict[str, tuple[int, ...]]


def norm(name: str) -> Shapes:
    return {f"{name}/scale": (12,), f"{name}/bias": (12,)}


def expected_shapes(names: NpzNames, num_positions: int) -> Shapes:
    """The shapes of REPRESENTATION: 4 x 4 patches of 4 px, width 12, two heads of 6, MLP width 20, 3 classes."""
    shapes: Shapes = {"embedding/kernel": (4, 4, 3, 12), "embedding/bias": (12,), "cls": (1, 1, 12)}
    shapes |= {names.position: (1, num_positions, 12)}
    for number in range(2):
        block = f"Transformer/encoderblock_{number}/"
        shapes |= norm(f"{block}LayerNorm_0") | norm(block + names.second_norm)
        for part in ("query", "key", "value"):
            shapes[f"{block}{names.attention}/{part}/kernel"] = (12, 2, 6)
            shapes[f"{block}{names.attention}/{part}/bias"] = (2, 6)
        shapes |= {f"{block}{names.attention}/out/kernel": (2, 6, 12), f"{block}{names.attention}/out/bias": (12,)}
        shapes |= {f"{block}{names.mlp}/Dense_0/kernel": (12, 20), f"{block}{names.mlp}/Dense_0/bias": (20,)}
        shapes |= {f"{block}{names.mlp}/Dense_1/kernel": (20, 12), f"{block}{names.mlp}/Dense_1/bias": (12,)}
    shapes |= norm("Transformer/encoder_norm")
    shapes |= {"pre_logits/kernel": (12, 12), "pre_logits/bias": (12,), "head/kernel": (12, 3), "head/bias": (3,)}
    return {names.prefix + name: shape for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("dialect", "names", "num_positions", "some"),
    [
        pytest.param(
            "vision_transformer",
            VISION_TRANSFORMER,
            17,
            "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel",
            id="vision_transformer: LayerNorm_0, attention 1, LayerNorm_2, MlpBlock_3",
        ),
        pytest.param(
            "big_vision",
            BIG_VISION,
            16,
            "params/Transformer/encoderblock_1/MultiHeadDotProductAttention_0/query/kernel",
            id="big_vision: numbers by kind, no row for the class token",
        ),
    ],
)
def test_names_and_shapes(tmp_path: Path, dialect: Dialect, names: NpzNames, num_positions: int, some: str) -> None:
    path = tmp_path / "weights.npz"
    save_npz(path, config=REPRESENTATION, tensor=tensors_of(random_model(REPRESENTATION)), dialect=dialect)
    arrays = arrays_in(path)
    assert some in arrays
    assert {name: array.shape for name, array in arrays.items()} == expected_shapes(names, num_positions)
    assert {str(array.dtype) for array in arrays.values()} == {"float32"}


def test_names_and_shapes_of_attention_pooling(tmp_path: Path) -> None:
    save_npz(tmp_path / "w.npz", config=MAP, tensor=tensors_of(random_model(MAP)), dialect="big_vision")
    attention, head = "MAPHead_0/MultiHeadDotProductAttention_0", "params/MAPHead_0/"
    expected: Shapes = {"MAPHead_0/probe": (1, 1, 12), **norm("MAPHead_0/LayerNorm_0")}
    for part in ("query", "key", "value"):
        expected |= {f"{attention}/{part}/kernel": (12, 2, 6), f"{attention}/{part}/bias": (2, 6)}
    expected |= {f"{attention}/out/kernel": (2, 6, 12), f"{attention}/out/bias": (12,)}
    expected |= {"MAPHead_0/MlpBlock_0/Dense_0/kernel": (12, 20), "MAPHead_0/MlpBlock_0/Dense_0/bias": (20,)}
    expected |= {"MAPHead_0/MlpBlock_0/Dense_1/kernel": (20, 12), "MAPHead_0/MlpBlock_0/Dense_1/bias": (12,)}
    found = {name: array.shape for name, array in arrays_in(tmp_path / "w.npz").items() if name.startswith(head)}
    assert found == {f"params/{name}": shape for name, shape in expected.items()}


def test_names_of_a_hybrid() -> None:
    places = layout(HYBRID, VISION_TRANSFORMER)
    names = {name for place in places.values() for name in place.names}
    assert {"conv_root/kernel", "gn_root/scale", "block1/unit1/conv_proj/kernel", "block1/unit1/gn_proj/bias"} <= names
    assert {"block2/unit2/conv3/kernel", "block2/unit2/gn3/scale"} <= names
    assert "block2/unit2/conv_proj/kernel" not in names
    assert places["embed.resnet.stages.0.0.norm_out.weight"].names == ("block1/unit1/gn3/scale",)


@pytest.mark.parametrize(
    ("dialect", "config", "arguments"),
    [
        ("vision_transformer", VIT, {}),
        ("big_vision", VIT, {}),
        ("big_vision", MAP, {"global_pool": "map", "class_token": False}),
    ],
    ids=["vision_transformer", "big_vision", "attention pooling"],
)
def test_timm_reads_our_file(
    timm: ModuleType, tmp_path: Path, dialect: Dialect, config: ModelConfig, arguments: dict[str, Any]
) -> None:
    """timm's independent reader gets the same logits from our file."""
    model = random_model(config)
    save_npz(tmp_path / "w.npz", config=config, tensor=tensors_of(model), dialect=dialect)
    sizes: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2}
    sizes |= {"mlp_ratio": 20 / 12, "num_classes": 3, "act_layer": "gelu_tanh"}
    sizes |= {"no_embed_class": dialect == "big_vision", **arguments}
    other = timm.create_model("vit_base_patch16_224", **sizes)
    with torch.no_grad():
        other.load_pretrained(str(tmp_path / "w.npz"))
    assert difference(model, other.eval(), random_images(16, 16)) < 2e-5


@pytest.mark.long
def test_timm_reads_our_hybrids_file(timm: ModuleType, tmp_path: Path) -> None:
    config = ModelConfig(name="r50_vit_b16", image_size=32, num_classes=3, depth=1, width=24, mlp_width=48, num_heads=2)
    model = random_model(replace(config, resnet_epsilons="timm"))
    save_npz(tmp_path / "w.npz", config=config, tensor=tensors_of(model), dialect="vision_transformer")
    sizes: dict[str, Any] = {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 2, "mlp_ratio": 2.0}
    other = timm.create_model("vit_base_r50_s16_224", **sizes, num_classes=3, act_layer="gelu_tanh")
    with torch.no_grad():
        other.load_pretrained(str(tmp_path / "w.npz"))
    assert difference(model, other.eval(), random_images(32, 32)) < 2e-5


def test_the_table_of_sines_has_values_worked_out_by_hand() -> None:
    """Width 8 has two frequencies, 1 and 1 / 10000; the patch in row 1 and column 2 of 3 x 3 is the sixth."""
    table_1ND = sincos_table(3, 8)
    x, y = [2.0, 2e-4], [1.0, 1e-4]
    expected = [*map(math.sin, x), *map(math.cos, x), *map(math.sin, y), *map(math.cos, y)]
    assert table_1ND.shape == (1, 9, 8)
    assert torch.allclose(table_1ND[0, 5], torch.tensor(expected), atol=1e-7, rtol=0)


@pytest.mark.parametrize(("patch", "num_patches"), [(16, 14**2), (32, 7**2), (14, 16**2), (500, 1)])
def test_the_table_has_the_grid_of_224_px(patch: int, num_patches: int) -> None:
    shapes = {"embedding/kernel": (patch, patch, 3, 8)}
    file = with_table(TensorFile(where="w", shapes=shapes, read=lambda _: torch.zeros(0)))
    assert file.shapes[TABLE] == file.read(TABLE).shape == (1, num_patches, 8)
    assert file.read("embedding/kernel").shape == (0,)


@pytest.mark.parametrize("width", [4, 10])
def test_widths_without_a_table_are_named(width: int) -> None:
    file = TensorFile(where="w", shapes={"embedding/kernel": (16, 16, 3, width)}, read=lambda _: torch.zeros(0))
    with pytest.raises(UserError, match=f"its width {width} has no table of sines; allowed: multiples of 4"):
        with_table(file)
