"""From shapes to configurations: the paper's models by name, others by fields, and what is refused. So are sizes that a
config.json declares beside weights."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.models.config import BIT_RESNETS, HYBRID_RESNETS, NAMES, SIZES, ModelConfig, ResNetSize
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.layout import numbers_in
from pipeline.models.conversion.sizes import (
    TransformerShapes,
    Usual,
    bit_config,
    grid_of,
    pair_of,
    shapes_in_file,
    side_of,
    transformer_config,
    units_of,
)

USUAL = Usual(gelu="exact", layer_norm_epsilon=1e-12, resnet_epsilons="timm")
TI = TransformerShapes(
    patch=16,
    depth=12,
    width=192,
    mlp_width=768,
    num_heads=None,
    num_classes=10,
    num_positions=197,
    class_token=True,
)


def config_of(shapes: TransformerShapes, hints: Hints | None = None) -> ModelConfig:
    return transformer_config(shapes, where="w.npz", position_name="pos", usual=USUAL, hints=hints or Hints())


@pytest.mark.parametrize("name", NAMES)
def test_every_model_has_its_name_back(name: str) -> None:
    if name in BIT_RESNETS:
        config = bit_config(BIT_RESNETS[name], num_classes=10, where="w.npz", usual=USUAL, hints=Hints())
    else:
        size, resnet = SIZES[name], HYBRID_RESNETS.get(name)
        shapes = TransformerShapes(**vars(size), num_classes=10, num_positions=50, class_token=True, resnet=resnet)
        config = config_of(replace(shapes, is_square=True))
        assert config.grid == (7, 7)
        assert (config.gelu, config.layer_norm_epsilon) == ("exact", 1e-12)
    assert (config.name, config.num_classes, config.width) == (name, 10, None)
    assert config.resnet_epsilons == ("timm" if config.resnet else "paper")


@pytest.mark.parametrize(
    ("change", "hints", "expected"),
    [
        pytest.param({}, Hints(), {"name": "vit_ti16", "image_size": 224}, id="Ti/16: heads by its width"),
        pytest.param({"depth": 3}, Hints(), {"name": "vit", "depth": 3, "num_heads": 3}, id="another depth"),
        pytest.param({"num_heads": 6}, Hints(), {"name": "vit", "num_heads": 6}, id="other heads"),
        pytest.param({}, Hints(num_heads=12), {"name": "vit", "num_heads": 12}, id="heads that were given"),
        pytest.param(
            {}, Hints(gelu="tanh", layer_norm_epsilon=1e-6), {"gelu": "tanh"}, id="what the file has not said"
        ),
        pytest.param({"num_positions": None}, Hints(), {"position": "none", "image_size": 224}, id="no positions"),
        pytest.param({"class_token": False, "num_positions": 196}, Hints(), {"pooling": "average"}, id="average"),
        pytest.param({"num_positions": 196}, Hints(), {"image_size": 224}, id="no row for the class token"),
        pytest.param({"num_positions": 577}, Hints(), {"image_size": 384}, id="384 px"),
        pytest.param(
            {"resnet": ResNetSize(units=(1, 2), factor=2), "patch": 1, "num_positions": 5, "is_square": True},
            Hints(resnet_epsilons="paper"),
            {"resnet_units": (1, 2), "resnet_factor": 2, "image_size": 16, "resnet_epsilons": "paper"},
            id="a hybrid of another size",
        ),
        pytest.param({"depth": 3}, Hints(model="vit_b16"), {"name": "vit_b16", "depth": None}, id="what it must be"),
    ],
)
def test_what_shapes_and_hints_give(change: dict[str, Any], hints: Hints, expected: dict[str, Any]) -> None:
    config = config_of(replace(TI, **change), hints)
    assert {field: getattr(config, field) for field in expected} == expected


def test_a_bit_of_another_size_and_of_another_name() -> None:
    config = bit_config(
        BIT_RESNETS["bit_r50x1"], num_classes=3, where="w.npz", usual=USUAL, hints=Hints(model="bit_r101x1")
    )
    assert (config.name, config.resnet_units) == ("bit_r101x1", None)


@pytest.mark.parametrize(
    ("rows", "class_token", "expected"),
    [
        (197, True, (14, True)),
        (196, True, (14, False)),
        (196, False, (14, False)),
        (1, True, (1, False)),
        (2, True, (1, True)),
    ],
)
def test_the_side_of_a_grid(rows: int, class_token: bool, expected: tuple[int, bool]) -> None:
    assert side_of(rows, num_class_tokens=class_token, where="w", name="pos") == expected


def test_units_of_each_stage() -> None:
    assert units_of({(0, 0), (0, 1), (1, 0)}) == (2, 1)
    assert units_of({(999_999_999, 0)}) == (0,), "a file says its own size, not how long to count"


def test_a_file_without_classes_has_no_head() -> None:
    with_head = shapes_in_file(ModelConfig(name="vit_ti16", num_classes=7))
    assert with_head["head.weight"] == (7, 192)
    without = shapes_in_file(ModelConfig(name="vit_ti16", num_classes=0))
    assert set(with_head) - set(without) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("rows", "change", "expected"),
    [
        (37, {"declared": (6, 6)}, (6, True)),
        (36, {"declared": (6, 6)}, (6, False)),
        (37, {"class_row": True}, (6, True)),
        (36, {"class_row": False}, (6, False)),
        (1, {"class_row": False}, (1, False)),
    ],
)
def test_a_grid_as_declared(rows: int, change: dict[str, Any], expected: tuple[int, bool]) -> None:
    assert side_of(rows, num_class_tokens=1, where="w", name="pos", **change) == expected


def test_advice_names_what_was_given() -> None:
    assert Hints().advice() == "Give the file of another model"
    assert "--model vit_b16" in Hints(model="vit_b16").advice()
    assert "--num-heads" not in Hints(model="vit_b16").advice()
    assert "--num-heads 3" in Hints(num_heads=3).advice()


def test_stages_without_end_are_counted_in_one_pass() -> None:
    """A pass per stage took hours for the names that a header of 16 MiB holds."""
    names = [f"stages.{number}.0.w" for number in range(50_000)]
    assert units_of(numbers_in(names, "stages.{}.{}.")) == (1,) * 50_000


@pytest.mark.parametrize(("value", "expected"), [(48, (48, 48)), ([48, 64], (48, 64)), ((8, 8), (8, 8))])
def test_one_number_or_two(value: Any, expected: tuple[int, int]) -> None:
    assert pair_of(value, key="image_size", where="w") == expected


@pytest.mark.parametrize(
    ("image", "patch", "expected"),
    [((48, 64), (8, 8), (6, 8)), ((50, 50), (8, 8), (6, 6)), ((16, 16), (16, 8), (1, 2))],
)
def test_the_grid(image: tuple[int, int], patch: tuple[int, int], expected: tuple[int, int]) -> None:
    assert grid_of(image, patch) == expected
