"""Vision towers of transformers: what is left out or refused. test_zoo.py compares what they compute."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_any import open_any
from pipeline.models.weights.folder import filled_model
from shards.errors import UserError
from tests.pipeline.models.conversion.published import BOTH, DINOV2, DINOV3, GATED, SIZES, of_transformers


@pytest.mark.parametrize(
    ("name", "fields", "what"),
    [
        pytest.param(
            "Dinov2ForImageClassification", DINOV2, "the class token and the mean of all patches", id="DINOv2"
        ),
        pytest.param("CLIPForImageClassification", BOTH, "the mean of all patches before the last norm", id="CLIP"),
    ],
)
def test_a_classifier_that_reads_something_else_is_left_out_with_a_warning(
    transformers: ModuleType,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    fields: dict[str, Any],
    what: str,
) -> None:
    of_transformers(transformers, name, tmp_path, fields | {"num_labels": 3})
    assert open_any(str(tmp_path), Hints()).config.num_classes == 0
    assert f"its classifier is left out: it reads {what}" in caplog.text


def test_published_files_of_clip_have_more_tensors(
    transformers: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The numbers of the positions, which older versions saved, and a projection to the space of texts."""
    of_transformers(transformers, "CLIPModel", tmp_path, BOTH)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert {"visual_projection.weight", "text_projection.weight", "logit_scale"} <= tensors.keys()
    model = filled_model(open_any(str(tmp_path), Hints()))
    assert "its projection to the space of texts (visual_projection.weight) is left out" in caplog.text
    tensors["vision_model.embeddings.position_ids"] = torch.arange(10)[None]
    save_file(tensors, path)
    again = filled_model(open_any(str(tmp_path), Hints()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param("SiglipVisionModel", SIZES | {"hidden_act": "relu"}, id="ReLU"),
        pytest.param("DINOv3ViTModel", DINOV3 | GATED | {"hidden_act": "gelu"}, id="a gate with a GELU"),
    ],
)
def test_another_activation_is_refused(
    transformers: ModuleType, tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    of_transformers(transformers, name, tmp_path, fields)
    with pytest.raises(UserError) as caught:
        open_any(str(tmp_path), Hints())
    assert "hidden_act" in str(caught.value)
