"""Our tensors in a bare file: the configuration comes from the shapes, and the tensors are unchanged."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from pipeline.models import ModelConfig
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_any import open_plain
from pipeline.models.conversion.open_file import open_tensor_file
from tests.pipeline.models.conversion.random_weights import (
    AVERAGE,
    BIT,
    HYBRID,
    REPRESENTATION,
    ROOT,
    VIT,
    assert_same_tensors,
    assumed_of,
    random_model,
)


@pytest.mark.parametrize(
    ("config", "hints"),
    [
        pytest.param(VIT, Hints(num_heads=2), id="ViT"),
        pytest.param(AVERAGE, Hints(num_heads=2), id="average"),
        pytest.param(REPRESENTATION, Hints(num_heads=2), id="hidden layer"),
        pytest.param(replace(VIT, position="learned_2d"), Hints(num_heads=2), id="2-D positions"),
        pytest.param(replace(VIT, qk_norm=True), Hints(num_heads=2), id="norms of queries and keys"),
        pytest.param(replace(VIT, pooling="attention"), Hints(num_heads=2), id="attention pooling"),
        pytest.param(replace(VIT, registers=2), Hints(num_heads=2), id="registers"),
        pytest.param(replace(VIT, layer_scale=1e-5), Hints(num_heads=2), id="LayerScale"),
        pytest.param(HYBRID, Hints(num_heads=2), id="hybrid"),
        pytest.param(ROOT, Hints(num_heads=2), id="hybrid with the root alone"),
        pytest.param(BIT, Hints(), id="BiT"),
        pytest.param(replace(BIT, name="bit_r18x1"), Hints(), id="BiT of basic units"),
        pytest.param(ModelConfig(name="vit_ti16", num_classes=3), Hints(), id="Ti/16, whose heads are known"),
    ],
)
def test_the_shapes_say_what_model_it_is(tmp_path: Path, config: ModelConfig, hints: Hints) -> None:
    model = random_model(config)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    weights = open_plain(open_tensor_file(tmp_path / "w.safetensors"), hints)
    assert weights.config == config
    assert_same_tensors(weights, model)


def test_axial_attention_leaves_no_tensor_so_that_global_is_said(tmp_path: Path) -> None:
    save_file(random_model(replace(AVERAGE, attention="axial", depth=1)).state_dict(), tmp_path / "w.safetensors")
    weights = open_plain(open_tensor_file(tmp_path / "w.safetensors"), Hints(num_heads=2))
    assert weights.config == AVERAGE
    assert assumed_of(weights)[-1] == "attention global (an axial model of 1 layer has the same tensors)"
