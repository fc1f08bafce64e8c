"""Published .npz files: names and shapes of each dialect, written down and compared with timm's reader; old forms."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.models import ModelConfig, shapes_of
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.layout import layout_of
from pipeline.models.conversion.npz import (
    BIG_VISION,
    PREFIXES,
    TABLE,
    VISION_TRANSFORMER,
    Dialect,
    NpzNames,
    open_npz,
    save_npz,
    sincos_table,
    vit_table,
    with_table,
)
from pipeline.models.conversion.tensor_file import TensorFile
from shards.errors import UserError
from tests.pipeline.models.conversion.random_weights import (
    AVERAGE,
    BIT,
    HYBRID,
    MAP,
    REPRESENTATION,
    ROOT,
    VIT,
    Arrays,
    arrays_in,
    assert_same_logits,
    assert_same_tensors,
    assumed_of,
    random_model,
    tensors_of,
)
from tests.pipeline.models.parity import difference, random_images
from tests.pipeline.models.parity import random_model as gentle_model

NO_HINTS = Hints()
MODELS = {"ViT": VIT, "average": AVERAGE, "hidden layer": REPRESENTATION, "hybrid": HYBRID, "BiT": BIT}
BLOCK = "Transformer/encoderblock_1/"
LEARNED = "Transformer/posembed_input/pos_embedding"
Shapes = dict[str, tuple[int, ...]]
TENSORFLOW = {
    "resnet/root_block/standardized_conv2d/kernel": (7, 7, 3, 64),
    "resnet/block1/unit01/a/group_norm/gamma": (64,),
    "resnet/block1/unit01/a/proj/standardized_conv2d/kernel": (1, 1, 64, 256),
    "resnet/block2/unit02/b/standardized_conv2d/kernel": (3, 3, 128, 128),
    "resnet/block2/unit02/c/group_norm/beta": (128,),
    "resnet/group_norm/gamma": (512,),
    "resnet/head/conv2d/kernel": (1, 1, 512, 3),
    "resnet/head/conv2d/bias": (3,),
}
FLAX = {
    "params/root_block/conv_root/kernel": (7, 7, 3, 64),
    "params/block1/unit01/gn1/scale": (1, 1, 1, 64),
    "params/block1/unit01/conv_proj/kernel": (1, 1, 64, 256),
    "params/block2/unit02/conv2/kernel": (3, 3, 128, 128),
    "params/block2/unit02/gn3/bias": (1, 1, 1, 128),
    "params/norm-pre-head/scale": (1, 1, 1, 512),
    "params/head/kernel": (512, 3),
    "params/head/bias": (3,),
}


def written(folder: Path, config: ModelConfig, dialect: Dialect) -> Path:
    path = folder / f"{dialect}.npz"
    save_npz(path, config=config, tensor=tensors_of(random_model(config)), dialect=dialect)
    return path


def test_attention_pooling_goes_out_and_comes_back(tmp_path: Path) -> None:
    """Also under the names outside MAPHead_0 that big_vision's first files have."""
    first = written(tmp_path, MAP, "big_vision")
    weights = open_npz(first, NO_HINTS)
    assert weights.config == MAP
    assert_same_tensors(weights, random_model(MAP))
    old = {name.replace("MAPHead_0/", ""): array for name, array in arrays_in(first).items()}
    assert "params/probe" in old
    assert_same_tensors(open_npz(saved(tmp_path / "old.npz", old), NO_HINTS), random_model(MAP))


def saved(path: Path, arrays: Arrays) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("dialect", ["vision_transformer", "big_vision"])
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "hybrid"])
def test_a_round_trip_changes_no_bit(tmp_path: Path, kind: str, dialect: Dialect) -> None:
    config = MODELS[kind]
    first = written(tmp_path, config, dialect)
    weights = open_npz(first, NO_HINTS)
    assert weights.config == config
    again = tmp_path / "again.npz"
    save_npz(again, config=weights.config, tensor=weights.tensor, dialect=dialect)
    assert again.read_bytes() == first.read_bytes()
    if dialect == "vision_transformer" or "embed.class_token" not in weights.shapes:
        assert_same_tensors(weights, random_model(config))
    assert_same_logits(weights, random_model(config))


def test_the_round_trip_of_a_hybrid_with_the_root_alone(tmp_path: Path) -> None:
    weights = open_npz(written(tmp_path, ROOT, "vision_transformer"), NO_HINTS)
    assert weights.config == ROOT
    assert_same_tensors(weights, random_model(ROOT))


def test_a_hybrids_round_trip(tmp_path: Path) -> None:
    path = written(tmp_path, HYBRID, "vision_transformer")
    weights = open_npz(path, NO_HINTS)
    assert weights.config == HYBRID
    assert_same_tensors(weights, random_model(HYBRID))
    assert arrays_in(path)["block2/unit2/conv2/kernel"].shape == (3, 3, 128, 128)


def test_the_class_tokens_position_is_added_to_it_for_big_vision(tmp_path: Path) -> None:
    arrays, model = arrays_in(written(tmp_path, VIT, "big_vision")), random_model(VIT)
    table = model.state_dict()["embed.position"]
    token = model.state_dict()["embed.class_token"]
    assert arrays["params/pos_embedding"].shape == (1, 16, 12)
    assert torch.equal(torch.from_numpy(arrays["params/cls"]), token + table[:, :1])
    assert torch.equal(torch.from_numpy(arrays["params/pos_embedding"]), table[:, 1:])


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", ["ViT", "BiT"])
def test_every_prefix_is_read(tmp_path: Path, prefix: str, kind: str) -> None:
    config = MODELS[kind]
    arrays = arrays_in(written(tmp_path, config, "vision_transformer"))
    beside: Arrays = {"opt/state/step": np.zeros(3), "params/t": np.zeros(2)} if prefix.count("/") == 2 else {}
    moved = saved(tmp_path / "moved.npz", {prefix + name: array for name, array in arrays.items()} | beside)
    assert_same_tensors(open_npz(moved, NO_HINTS), random_model(config))


def test_stacked_layers_are_taken_apart(tmp_path: Path) -> None:
    arrays = arrays_in(written(tmp_path, AVERAGE, "big_vision"))
    first = "params/Transformer/encoderblock_0/"
    stacked = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    for name in [name.removeprefix(first) for name in arrays if name.startswith(first)]:
        both = [arrays[f"params/Transformer/encoderblock_{number}/{name}"] for number in range(2)]
        stacked[f"params/Transformer/encoderblock/{name}"] = np.stack(both)
    weights = open_npz(saved(tmp_path / "scan.npz", stacked), NO_HINTS)
    assert_same_tensors(weights, random_model(AVERAGE))


def test_the_old_shape_of_group_norm_is_read(tmp_path: Path) -> None:
    arrays = arrays_in(written(tmp_path, HYBRID, "vision_transformer"))
    old = {
        name: array.reshape(1, 1, 1, -1) if "/gn" in name or "gn_" in name else array for name, array in arrays.items()
    }
    assert old["gn_root/scale"].shape == (1, 1, 1, 64)
    assert_same_tensors(open_npz(saved(tmp_path / "old.npz", old), NO_HINTS), random_model(HYBRID))


@pytest.mark.parametrize("name", ["pos_embedding", "Transformer/pos_embedding"])
def test_the_table_is_found_wherever_it_was(tmp_path: Path, name: str) -> None:
    """Where big_vision stored it before 2022, and with the class token's row still in it."""
    arrays = arrays_in(written(tmp_path, VIT, "vision_transformer"))
    arrays[name] = arrays.pop("Transformer/posembed_input/pos_embedding")
    assert_same_tensors(open_npz(saved(tmp_path / "moved.npz", arrays), NO_HINTS), random_model(VIT))


@pytest.mark.parametrize("config", [VIT, AVERAGE], ids=["token", "average"])
def test_without_a_table_big_visions_is_computed(tmp_path: Path, config: ModelConfig) -> None:
    """At 224 px, so for 56 x 56 patches of 4 px; the class token's row is zero."""
    config = replace(config, image_size=224)
    model, table_ND = random_model(config), big_visions_table(56, 56, 12)
    with torch.no_grad():
        position = model.state_dict()["embed.position"]
        position.zero_()[:, -(56**2) :] = torch.from_numpy(table_ND)
    path = tmp_path / "w.npz"
    save_npz(path, config=config, tensor=tensors_of(model), dialect="big_vision")
    arrays = arrays_in(path)
    del arrays["params/pos_embedding"]
    weights = open_npz(saved(path, arrays), NO_HINTS)
    assert weights.config == config
    assert assumed_of(weights)[-1] == "position embeddings sincos2d of 56 x 56 patches"
    assert float((weights.tensor("embed.position") - position).abs().max()) < 1e-6
    assert [
        n for n in weights.shapes if n != "embed.position" and (weights.tensor(n) != tensors_of(model)(n)).any()
    ] == []


def big_visions_table(h: int, w: int, width: int, temperature: float = 10_000.0) -> NDArray[np.float32]:
    """posemb_sincos_2d of big_vision, with NumPy instead of JAX."""
    y, x = np.mgrid[:h, :w]
    omega = np.arange(width // 4) / (width // 4 - 1)
    omega = 1.0 / (temperature**omega)
    y, x = (np.einsum("m,d->md", axis.flatten(), omega) for axis in (y, x))
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def test_a_table_of_zeros_stays_one(tmp_path: Path) -> None:
    """A model without positions is written as zeros; nothing is computed in their place."""
    tensor = tensors_of(random_model(VIT))
    path = tmp_path / "w.npz"
    save_npz(path, config=VIT, tensor=lambda n: tensor(n) * (n != "embed.position"), dialect="big_vision")
    weights = open_npz(path, NO_HINTS)
    assert not weights.tensor("embed.position").any()
    assert assumed_of(weights) == ("gelu tanh", "layer_norm_epsilon 1e-06")


def test_what_is_beside_the_model_need_be_no_number(tmp_path: Path) -> None:
    """An optimiser's state may hold flags and texts; a pickled object is refused wherever it is."""
    arrays = {f"opt/target/{name}": a for name, a in arrays_in(written(tmp_path, VIT, "vision_transformer")).items()}
    beside: Arrays = {"opt/state/done": np.array(True), "note": np.array("a text"), "opt/z": np.zeros(2, complex)}
    assert_same_tensors(open_npz(saved(tmp_path / "w.npz", arrays | beside), NO_HINTS), random_model(VIT))


def test_layers_that_tensorflow_numbered_are_read(tmp_path: Path) -> None:
    arrays = arrays_in(written(tmp_path, BIT, "vision_transformer"))
    numbered = {name.replace("a/standardized_conv2d/", "a/standardized_conv2d_3/"): a for name, a in arrays.items()}
    assert numbered.keys() != arrays.keys()
    assert_same_tensors(open_npz(saved(tmp_path / "tf.npz", numbered), NO_HINTS), random_model(BIT))


def test_a_file_without_a_head(tmp_path: Path) -> None:
    arrays = arrays_in(written(tmp_path, VIT, "big_vision"))
    headless = {name: array for name, array in arrays.items() if "head" not in name}
    weights = open_npz(saved(tmp_path / "headless.npz", headless), NO_HINTS)
    assert weights.config.num_classes == 0
    assert "head.weight" not in weights.shapes


def test_jaxs_bfloat16_is_read(tmp_path: Path) -> None:
    """NumPy stores it as two bytes without a dtype."""
    arrays, values = arrays_in(written(tmp_path, VIT, "vision_transformer")), torch.randn(12).bfloat16()
    arrays["embedding/bias"] = values.view(torch.int16).numpy().view("V2")
    weights = open_npz(saved(tmp_path / "bf16.npz", arrays), NO_HINTS)
    assert torch.equal(weights.tensor("embed.patch.bias"), values.float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {f"{BLOCK}MlpBlock_3/Dense_0/kernel": np.zeros((14, 20), np.float32)},
            f"{BLOCK}MlpBlock_3/Dense_0/kernel is [14, 20], the model needs [12, 20]",
            id="one tensor of another width",
        ),
        pytest.param({f"{BLOCK}LayerNorm_0/bias": None}, f"{BLOCK}LayerNorm_0/bias [12] is not there", id="missing"),
        pytest.param(
            {"MAPHead_0/probe": np.zeros((1, 1, 12))},
            "MAPHead_0/probe [1, 1, 12] is not in the model",
            id="another head",
        ),
        pytest.param(
            {LEARNED: np.zeros((1, 19, 12), np.float32)},
            f"{LEARNED} in FILE has 19 rows, which is the grid of no square image; allowed: a square and",
            id="impossible grid",
        ),
        pytest.param(
            {LEARNED: np.zeros((19, 12), np.float32)}, f"{LEARNED} in FILE is [19, 12]; it must have 3", id="flat table"
        ),
        pytest.param(
            {"cls": np.array([{"a": 1}], dtype=object)}, "cls in FILE is a pickled object, not numbers", id="pickle"
        ),
        pytest.param({"embedding/kernel": None}, "FILE has no embedding/kernel and no root_block", id="another model"),
        pytest.param(
            {"Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel": None},
            "has no tensor Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel, which",
            id="no attention",
        ),
    ],
)
def test_the_tensor_that_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    arrays = arrays_in(written(tmp_path, VIT, "vision_transformer")) | changes
    path = saved(tmp_path / "bad.npz", {name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(UserError) as caught:
        open_npz(path, NO_HINTS)
    assert message.replace("FILE", repr(str(path))) in str(caught.value)


def stacked(path: Path, **changes: NDArray[Any]) -> Path:
    """big_vision's file with each kind of layer stacked in one array."""
    save_npz(path, config=VIT, tensor=tensors_of(random_model(VIT)), dialect="big_vision")
    arrays, start = arrays_in(path), "params/Transformer/encoderblock"
    layers = [[name for name in arrays if name.startswith(f"{start}_{number}/")] for number in (0, 1)]
    for first, second in zip(*map(sorted, layers), strict=True):
        arrays[first.replace("encoderblock_0/", "encoderblock/")] = np.stack([arrays.pop(first), arrays.pop(second)])
    for name, value in changes.items():
        arrays[f"{start}/{name.replace('__', '/')}"] = value
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def test_stacked_layers_are_read(tmp_path: Path) -> None:
    assert open_npz(stacked(tmp_path / "w.npz"), Hints()).config == VIT


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        pytest.param(replace(VIT, gelu="exact"), "--gelu exact", id="GELU"),
        pytest.param(replace(VIT, layer_norm_epsilon=1e-12), "--layer-norm-epsilon 1e-12", id="epsilon"),
        pytest.param(replace(HYBRID, resnet_epsilons="timm"), "--resnet-epsilons timm", id="ResNet"),
        pytest.param(replace(BIT, resnet_epsilons="timm"), "--resnet-epsilons timm", id="BiT"),
        pytest.param(VIT, "", id="nothing is lost"),
    ],
)
def test_what_the_file_can_not_say_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: ModelConfig, flags: str
) -> None:
    with caplog.at_level(logging.WARNING):
        save_npz(
            tmp_path / "w.npz", config=config, tensor=tensors_of(random_model(config)), dialect="vision_transformer"
        )
    assert flags in caplog.text
    assert bool(caplog.text) == bool(flags)


def test_what_is_assumed_of_a_file(tmp_path: Path) -> None:
    save_npz(tmp_path / "w.npz", config=VIT, tensor=tensors_of(random_model(VIT)), dialect="vision_transformer")
    assert assumed_of(open_npz(tmp_path / "w.npz", Hints())) == ("gelu tanh", "layer_norm_epsilon 1e-06")
    assert assumed_of(open_npz(tmp_path / "w.npz", Hints(gelu="exact"))) == ("layer_norm_epsilon 1e-06",)


def expected_norm(name: str) -> Shapes:
    return {f"{name}/scale": (12,), f"{name}/bias": (12,)}


def expected_shapes(names: NpzNames, num_positions: int, prefix: str) -> Shapes:
    """The shapes of REPRESENTATION: 4 x 4 patches of 4 px, width 12, two heads of 6, MLP width 20, 3 classes."""
    shapes: Shapes = {"embedding/kernel": (4, 4, 3, 12), "embedding/bias": (12,), "cls": (1, 1, 12)}
    shapes |= {names.position: (1, num_positions, 12)}
    for number in range(2):
        block = f"Transformer/encoderblock_{number}/"
        shapes |= expected_norm(f"{block}LayerNorm_0") | expected_norm(block + names.second_norm)
        for part in ("query", "key", "value"):
            shapes[f"{block}{names.attention}/{part}/kernel"] = (12, 2, 6)
            shapes[f"{block}{names.attention}/{part}/bias"] = (2, 6)
        shapes |= {f"{block}{names.attention}/out/kernel": (2, 6, 12), f"{block}{names.attention}/out/bias": (12,)}
        shapes |= {f"{block}{names.mlp}/Dense_0/kernel": (12, 20), f"{block}{names.mlp}/Dense_0/bias": (20,)}
        shapes |= {f"{block}{names.mlp}/Dense_1/kernel": (20, 12), f"{block}{names.mlp}/Dense_1/bias": (12,)}
    shapes |= expected_norm("Transformer/encoder_norm")
    shapes |= {"pre_logits/kernel": (12, 12), "pre_logits/bias": (12,), "head/kernel": (12, 3), "head/bias": (3,)}
    return {prefix + name: shape for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("dialect", "names", "num_positions", "prefix", "some"),
    [
        pytest.param(
            "vision_transformer",
            VISION_TRANSFORMER,
            17,
            "",
            "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel",
            id="vision_transformer: LayerNorm_0, attention 1, LayerNorm_2, MlpBlock_3",
        ),
        pytest.param(
            "big_vision",
            BIG_VISION,
            16,
            "params/",
            "params/Transformer/encoderblock_1/MultiHeadDotProductAttention_0/query/kernel",
            id="big_vision: numbers by kind, no row for the class token",
        ),
    ],
)
def test_names_and_shapes(
    tmp_path: Path, dialect: Dialect, names: NpzNames, num_positions: int, prefix: str, some: str
) -> None:
    path = tmp_path / "weights.npz"
    save_npz(path, config=REPRESENTATION, tensor=tensors_of(random_model(REPRESENTATION)), dialect=dialect)
    arrays = arrays_in(path)
    assert some in arrays
    assert {name: array.shape for name, array in arrays.items()} == expected_shapes(names, num_positions, prefix)
    assert {str(array.dtype) for array in arrays.values()} == {"float32"}


def test_names_and_shapes_of_attention_pooling(tmp_path: Path) -> None:
    save_npz(tmp_path / "w.npz", config=MAP, tensor=tensors_of(random_model(MAP)), dialect="big_vision")
    attention, head = "MAPHead_0/MultiHeadDotProductAttention_0", "params/MAPHead_0/"
    expected: Shapes = {"MAPHead_0/probe": (1, 1, 12), **expected_norm("MAPHead_0/LayerNorm_0")}
    for part in ("query", "key", "value"):
        expected |= {f"{attention}/{part}/kernel": (12, 2, 6), f"{attention}/{part}/bias": (2, 6)}
    expected |= {f"{attention}/out/kernel": (2, 6, 12), f"{attention}/out/bias": (12,)}
    expected |= {"MAPHead_0/MlpBlock_0/Dense_0/kernel": (12, 20), "MAPHead_0/MlpBlock_0/Dense_0/bias": (20,)}
    expected |= {"MAPHead_0/MlpBlock_0/Dense_1/kernel": (20, 12), "MAPHead_0/MlpBlock_0/Dense_1/bias": (12,)}
    found = {name: array.shape for name, array in arrays_in(tmp_path / "w.npz").items() if name.startswith(head)}
    assert found == {f"params/{name}": shape for name, shape in expected.items()}


def test_names_of_a_hybrid() -> None:
    places = layout_of(vit_table(HYBRID, VISION_TRANSFORMER), shapes_of(HYBRID))
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


@pytest.mark.parametrize(("dialect", "expected"), [("vision_transformer", TENSORFLOW), ("big_vision", FLAX)])
def test_names_and_shapes_of_bit(tmp_path: Path, dialect: Dialect, expected: dict[str, tuple[int, ...]]) -> None:
    save_npz(tmp_path / "w.npz", config=BIT, tensor=tensors_of(random_model(BIT)), dialect=dialect)
    shapes = {name: array.shape for name, array in arrays_in(tmp_path / "w.npz").items()}
    assert {name: shapes.get(name) for name in expected} == expected
    # root, three convolutions and three norms per unit, two projections, last norm, head
    assert len(shapes) == 1 + 3 * (3 + 6) + 2 + 2 + 2


def test_timm_reads_our_file_of_bit(timm: ModuleType, tmp_path: Path) -> None:
    config = ModelConfig(name="bit_r50x1", num_classes=3, resnet_epsilons="timm")
    model = gentle_model(config)
    save_npz(tmp_path / "w.npz", config=config, tensor=tensors_of(model), dialect="vision_transformer")
    other = timm.create_model("resnetv2_50x1_bit", num_classes=3)
    with torch.no_grad():
        other.load_pretrained(str(tmp_path / "w.npz"))
    assert difference(model, other.eval(), random_images(64, 64)) < 2e-5
