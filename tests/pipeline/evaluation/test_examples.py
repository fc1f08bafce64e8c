"""Examples beside scores: the most confident mistakes, right answers chosen by a hash, the same for any ranks."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.examples import Example, Examples, pictures
from pipeline.evaluation.scores import evaluate
from pipeline.models import build_model
from pipeline.ranks.world import World
from pipeline.shared_settings import EvaluationTransform
from shards.dataset import open_dataset
from tests.pipeline.evaluation.test_scores import NUM_SAMPLES, TINY, packed
from tests.rigs.processes import run_ranks

__all__ = ["packed"]


def filled(num: int, *, ids: range = range(100), batch: int = 7) -> list[Example]:
    """100 images with the labels 0, 1, 2, 0, ..., of which the model says 1 with a confidence that grows with the id;
    every tenth has no label that counts."""
    examples = Examples(num)
    for first in range(ids.start, ids.stop, batch):
        some = np.arange(first, min(first + batch, ids.stop))
        targets_B1 = torch.from_numpy(np.where(some % 10 == 9, -1, some % 3))[:, None]
        logits_BK = torch.tensor([[0.0, 1.0, 0.0]]).repeat(len(some), 1)
        confidence_B = torch.from_numpy(some / 100)
        examples.add(some, logits_BK, targets_B1, torch.from_numpy(some % 3)[:, None], confidence_B=confidence_B)
    return examples.chosen()


def test_the_most_confident_mistakes_and_as_many_right_answers() -> None:
    found = filled(4)
    assert [one.is_right for one in found] == [True] * 4 + [False] * 4
    assert [one.sample_id for one in found[4:]] == [98, 96, 95, 93], "the most confident first; 99 has no target"
    assert all(one.said == 1 for one in found)
    assert all(one.labels == (one.sample_id % 3,) and (one.labels == (1,)) == one.is_right for one in found)
    assert filled(4, batch=100) == found, "whatever the batches"
    assert len({one.sample_id for one in found[:4]} - {1, 4, 7, 10}) > 0, "no beginning of the dataset"
    assert filled(0) == []
    assert len(filled(200)) == 90


def chosen(world: World, url: str, num: int) -> list[Example]:
    model = build_model(replace(TINY, num_classes=3))
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    examples = Examples(num)
    evaluate(
        model,
        open_dataset(url),
        EvaluationConfig(batch_size=4),
        labels=("c0", "c1", "c2"),
        loss="softmax",
        world=world,
        examples=examples,
    )
    examples.over_ranks(world.device)
    return examples.chosen()


def test_any_number_of_ranks_chooses_the_same(packed: str) -> None:
    (alone,) = run_ranks(chosen, packed, 3, num_ranks=1)
    for ranks in run_ranks(chosen, packed, 3, num_ranks=2):
        assert [(one.sample_id, one.said, one.is_right) for one in ranks] == [
            (one.sample_id, one.said, one.is_right) for one in alone
        ]
    assert 0 < len(alone) <= 6
    assert len({one.sample_id for one in alone}) == len(alone)
    assert all(one.sample_id < NUM_SAMPLES for one in alone)


@pytest.mark.parametrize(("size", "kind"), [(32, "image/png"), (224, "image/jpeg")])
def test_pictures_are_what_the_model_sees(packed: str, size: int, kind: str) -> None:
    found = pictures(open_dataset(packed), [7, 2], image_size=size, transform=EvaluationTransform(), threads=1)
    assert [media for media, _ in found] == [kind] * 2
    images = [Image.open(io.BytesIO(data)) for _, data in found]
    assert [image.size for image in images] == [(min(size, 160),) * 2] * 2
    assert pictures(open_dataset(packed), [], image_size=size, transform=EvaluationTransform(), threads=1) == []
