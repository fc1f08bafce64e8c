"""Sizes: the paper's by name, others by fields, and refusals that say what would fit."""

from typing import Any

import pytest

from pipeline.models.config import SIZES, ModelConfig, Size
from shards.errors import UserError

OWN: dict[str, Any] = {"name": "vit", "patch": 8, "depth": 2, "width": 32, "mlp_width": 64, "num_heads": 4}


@pytest.mark.parametrize(
    ("name", "expected"),  # the paper's Table 1
    [
        ("vit_b32", Size(patch=32, depth=12, width=768, mlp_width=3072, num_heads=12)),
        ("vit_b16", Size(patch=16, depth=12, width=768, mlp_width=3072, num_heads=12)),
        ("vit_l32", Size(patch=32, depth=24, width=1024, mlp_width=4096, num_heads=16)),
        ("vit_l16", Size(patch=16, depth=24, width=1024, mlp_width=4096, num_heads=16)),
        ("vit_h14", Size(patch=14, depth=32, width=1280, mlp_width=5120, num_heads=16)),
    ],
)
def test_the_papers_sizes(name: str, expected: Size) -> None:
    assert ModelConfig(name=name).size == expected
    assert set(SIZES) == {"vit_b32", "vit_b16", "vit_l32", "vit_l16", "vit_h14"}


def test_the_defaults_are_b16_at_224_with_a_single_linear_head() -> None:
    assert ModelConfig(name="vit_b16", image_size=224, num_classes=1000) == ModelConfig()
    assert not ModelConfig().representation
    assert ModelConfig().grid == (14, 14)


def test_a_field_wins_over_the_names_size() -> None:
    assert ModelConfig(name="vit_l16", depth=3).size == Size(
        patch=16, depth=3, width=1024, mlp_width=4096, num_heads=16
    )
    assert ModelConfig(**OWN, image_size=48).size == Size(patch=8, depth=2, width=32, mlp_width=64, num_heads=4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"image_size": 225}, "225, not a multiple of the patch (16 px); take 224 or 240", id="between"),
        pytest.param({"image_size": 8}, "image_size is 8, .*take 16 or 16", id="smaller than a patch"),
        pytest.param({"name": "vit_h14", "image_size": 512}, "take 504 or 518", id="H/14 is fine-tuned at 518"),
        pytest.param({"width": 770}, "width is 770, not a multiple of model.num_heads = 12", id="uneven heads"),
        pytest.param({"name": "vit_x"}, "'vit_x', which is none of vit_b32, .*--model.mlp-width", id="unknown name"),
        pytest.param(OWN | {"num_heads": None}, "also needs --model.num-heads$", id="one size is missing"),
        pytest.param({"depth": 0}, "must be 1 or more, these are not: depth 0", id="no layers"),
        pytest.param({"patch": 0}, "these are not: patch 0", id="no patch: not a division by zero"),
        pytest.param({"num_heads": -1}, "these are not: num_heads -1", id="negative"),
        pytest.param({"num_classes": -1}, "num_classes is -1", id="negative classes"),
        pytest.param({"dropout": 1.0}, "dropout 1.0; allowed are .* below 1", id="drops everything"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        ModelConfig(**fields)
