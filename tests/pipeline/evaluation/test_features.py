"""Representations are those of the model's forward pass, for any number of ranks and in the order asked for."""

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.data.config import Share
from pipeline.data.evaluation import evaluation_batches
from pipeline.evaluation.features import features_of
from pipeline.evaluation_transform import EvaluationTransform
from pipeline.models import ModelConfig, build_model
from pipeline.models.build import Model
from pipeline.ranks.world import World
from shards.dataset import open_dataset
from tests.rigs.datasets import packed_folders
from tests.rigs.processes import run_ranks

FIELDS: dict[str, Any] = {"image_size": 8, "patch": 4, "depth": 1, "width": 8, "mlp_width": 8, "num_heads": 2}
IDS = [7, 0, 3, 4, 14]
MODELS: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean": {"pooling": "average"},
    "hidden layer": {"representation": True},
    "masked patches": {"masked_patches": True, "num_classes": 512},
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(packed_folders(tmp_path_factory.mktemp("features"), num_classes=3, images_a_class=5))


def model_of(kind: str) -> Model:
    model = build_model(ModelConfig(**{"name": "vit", "num_classes": 3, **FIELDS, **MODELS[kind]}))
    with torch.no_grad():
        model.head.weight.copy_(torch.eye(*model.head.weight.shape))  # logits are the first features
    return model.eval()


def features(world: World, url: str, kind: str) -> torch.Tensor:
    ids = np.array(IDS)
    return features_of(
        model_of(kind), open_dataset(url), ids, transform=EvaluationTransform(), batch_size=2, world=world
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_the_head_makes_the_logits_of_them(packed: str, kind: str, num_ranks: int) -> None:
    found, *others = run_ranks(features, packed, kind, num_ranks=num_ranks)
    assert (found.shape, found.dtype) == ((5, 8), torch.float32)
    assert [rest.numel() for rest in others] == [0] * (num_ranks - 1)
    share = Share(global_batch=15, rank=0, num_ranks=1)
    batches = evaluation_batches(
        open_dataset(packed), batch_size=15, image_size=8, transform=EvaluationTransform(), share=share, threads=1
    )
    with torch.no_grad():
        logits = model_of(kind)(next(batches)[0].images[IDS])
    if kind == "masked patches":
        assert logits.shape == (5, 4, 512)
        logits = logits.mean(dim=1)
    assert torch.allclose(found[:, :3], logits[:, :3], atol=1e-5)
    assert len(set(found[:, 0].tolist())) == 5
