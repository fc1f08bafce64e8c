"""Published .npz files: bit-exact round trips, every prefix and old shape, and the files that are refused."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.models import ModelConfig
from pipeline.models.conversion.npz import PREFIXES, Dialect, normalised, open_npz, save_npz
from pipeline.models.conversion.sizes import Hints
from pipeline.models.conversion.tensor_file import TensorFile
from shards.errors import InvalidDataError, UserError
from tests.pipeline.models.conversion.random_weights import (
    AVERAGE,
    BIT,
    HYBRID,
    MAP,
    REPRESENTATION,
    ROOT,
    TINY,
    VIT,
    Arrays,
    arrays_in,
    assert_same_logits,
    assert_same_tensors,
    random_model,
    tensors_of,
)

NO_HINTS = Hints()
MODELS = {"ViT": VIT, "average": AVERAGE, "hidden layer": REPRESENTATION, "hybrid": HYBRID, "BiT": BIT}


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


def test_big_vision_has_no_hybrids(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="big_vision has no hybrids; allowed: the formats vision_transformer"):
        written(tmp_path, HYBRID, "big_vision")
    assert list(tmp_path.iterdir()) == []


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
    assert weights.assumed[-1] == "position embeddings sincos2d of 56 x 56 patches"
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


@pytest.mark.parametrize("config", [VIT, HYBRID], ids=["ViT", "hybrid"])
def test_vision_transformers_files_have_a_table(tmp_path: Path, config: ModelConfig) -> None:
    arrays = arrays_in(written(tmp_path, config, "vision_transformer"))
    del arrays["Transformer/posembed_input/pos_embedding"]
    with pytest.raises(UserError, match=r"has no position embeddings .Transformer/posembed_input/pos_embedding."):
        open_npz(saved(tmp_path / "none.npz", arrays), NO_HINTS)


def test_a_table_of_zeros_stays_one(tmp_path: Path) -> None:
    """A model without positions is written as zeros; nothing is computed in their place."""
    tensor = tensors_of(random_model(VIT))
    path = tmp_path / "w.npz"
    save_npz(path, config=VIT, tensor=lambda n: tensor(n) * (n != "embed.position"), dialect="big_vision")
    weights = open_npz(path, NO_HINTS)
    assert not weights.tensor("embed.position").any()
    assert weights.assumed == ("gelu tanh", "layer_norm_epsilon 1e-06")


def test_what_is_beside_the_model_need_be_no_number(tmp_path: Path) -> None:
    """An optimiser's state may hold flags and texts; a pickled object is refused wherever it is."""
    arrays = {f"opt/target/{name}": a for name, a in arrays_in(written(tmp_path, VIT, "vision_transformer")).items()}
    beside: Arrays = {"opt/state/done": np.array(True), "note": np.array("a text"), "opt/z": np.zeros(2, complex)}
    assert_same_tensors(open_npz(saved(tmp_path / "w.npz", arrays | beside), NO_HINTS), random_model(VIT))
    with pytest.raises(UserError, match=r"note in .* is a pickled object"):
        open_npz(saved(tmp_path / "p.npz", arrays | {"note": np.array([{}], dtype=object)}), NO_HINTS)


def test_a_text_in_the_place_of_a_tensor_is_named(tmp_path: Path) -> None:
    arrays = arrays_in(written(tmp_path, VIT, "vision_transformer")) | {"cls": np.full((1, 1, 12), "a")}
    weights = open_npz(saved(tmp_path / "w.npz", arrays), NO_HINTS)
    with pytest.raises(UserError, match=r"cls \[1, 1, 12\] in .* is of type <U1; allowed: numbers"):
        weights.tensor("embed.class_token")


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


BLOCK = "Transformer/encoderblock_1/"
TABLE = "Transformer/posembed_input/pos_embedding"


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
            {TABLE: np.zeros((1, 19, 12), np.float32)},
            f"{TABLE} in FILE has 19 rows, which is the grid of no square image; allowed: a square and",
            id="impossible grid",
        ),
        pytest.param(
            {TABLE: np.zeros((19, 12), np.float32)}, f"{TABLE} in FILE is [19, 12]; it must have 3", id="flat table"
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


def test_a_model_that_it_is_not_is_refused_in_the_files_names(tmp_path: Path) -> None:
    """A checkpoint of another width: the message has both shapes and the name used in the file."""
    path = written(
        tmp_path, ModelConfig(**TINY | {"num_heads": 3, "patch": 16, "image_size": 64}), "vision_transformer"
    )
    with pytest.raises(UserError, match=r"embedding/kernel is \[16, 16, 3, 12\], the model needs \[16, 16, 3, 192\]"):
        open_npz(path, Hints(model="vit_ti16"))
    with pytest.raises(UserError, match=r"query/kernel is \[12, 3, 4\], the model needs \[192, 3, 64\]"):
        open_npz(path, Hints(model="vit_ti16"))


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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(
            np.zeros((3, 12), np.float32), r"LayerNorm_0/scale in .* is \[3, 12\], .* 2 layers", id="another depth"
        ),
        pytest.param(np.zeros((), np.float32), r"LayerNorm_0/scale in .* is \[\]", id="no dimension"),
        pytest.param(np.zeros((10**9, 0), np.float32), r"LayerNorm_0/scale in .* is \[1000000000, 0\]", id="no values"),
    ],
)
def test_stacks_must_be_of_one_depth(tmp_path: Path, value: Any, message: str) -> None:
    path = stacked(tmp_path / "w.npz")
    assert open_npz(path, Hints()).config == VIT
    with pytest.raises(UserError, match=message):
        open_npz(stacked(path, LayerNorm_0__scale=value), Hints())


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
    assert open_npz(tmp_path / "w.npz", Hints()).assumed == ("gelu tanh", "layer_norm_epsilon 1e-06")
    assert open_npz(tmp_path / "w.npz", Hints(gelu="exact")).assumed == ("layer_norm_epsilon 1e-06",)


def test_stacks_without_end_are_refused_before_they_are_unstacked() -> None:
    shapes: dict[str, tuple[int, ...]] = {f"Transformer/encoderblock/{number}": (1000, 1) for number in range(101)}
    shapes |= {"embedding/kernel": (4, 4, 3, 12)}
    file = TensorFile(where="w.npz", shapes=shapes, read=lambda _: torch.zeros(1))
    with pytest.raises(InvalidDataError, match=r"has 101 tensors of 1,000 layers; allowed: 100,000 of all layers"):
        normalised(file)
