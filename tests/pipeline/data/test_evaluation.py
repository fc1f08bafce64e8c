"""Evaluation sees every sample exactly once, for any number of ranks and sizes that do not divide."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.data.batches import Batch
from pipeline.data.config import Share
from pipeline.data.evaluation import evaluation_batches
from pipeline.data.transform import evaluation_view
from pipeline.shared_settings import EvaluationTransform
from shards.dataset import open_dataset
from shards.errors import WillNotSucceedError
from shards.reading.samples import read_sample
from tests.rigs.datasets import packed_folders, packed_with_undecodable
from tests.rigs.turned import NUM_TURNED, packed_twins
from tests.rigs.watched import watched

NUM_SAMPLES, SIZE = 15, 16
STRAIGHT = EvaluationTransform()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_folders(tmp_path_factory.mktemp("evaluation"), num_classes=3, images_a_class=5)


def rank_batches(
    url: Path,
    *,
    batch_size: int,
    rank: int,
    ranks: int,
    transform: EvaluationTransform = STRAIGHT,
    sample_ids: NDArray[np.int64] | None = None,
) -> list[tuple[Batch, torch.Tensor]]:
    return list(
        evaluation_batches(
            open_dataset(str(url)),
            batch_size=batch_size,
            image_size=SIZE,
            transform=transform,
            share=Share(global_batch=batch_size * ranks, rank=rank, num_ranks=ranks),
            threads=2,
            sample_ids=sample_ids,
        )
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 7, 15, 40])
def test_every_sample_exactly_once(packed: Path, batch_size: int, ranks: int) -> None:
    dataset = open_dataset(str(packed))
    all_ranks = [rank_batches(packed, batch_size=batch_size, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert len({len(batches) for batches in all_ranks}) == 1, "a rank with fewer batches would leave the others waiting"
    seen: list[int] = []
    for batch, mask in (pair for batches in all_ranks for pair in batches):
        assert batch.images.shape == (batch_size, SIZE, SIZE, 3)
        assert batch.sample_ids.shape == batch.datasets.shape == mask.shape == (batch_size,)
        assert torch.equal(mask, batch.sample_ids >= 0)
        assert mask.tolist() == sorted(mask.tolist(), reverse=True), "padding comes last"
        seen += batch.sample_ids[mask].tolist()
        assert (batch.labels[~mask] == -1).all()
        for entry, sample_id in enumerate(batch.sample_ids[mask].tolist()):
            sample = read_sample(dataset, sample_id)
            view = np.zeros((SIZE, SIZE, 3), dtype=np.uint8)
            evaluation_view(sample, STRAIGHT, out=view)
            assert torch.equal(batch.images[entry], torch.from_numpy(view))
            assert batch.labels[entry].tolist() == list(sample.labels)
    assert sorted(seen) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(STRAIGHT, id="straight to the size"),
        pytest.param(EvaluationTransform(mode="central_crop"), id="the centre"),
        pytest.param(EvaluationTransform(mode="central_crop", short_side=24), id="the centre, nothing resized"),
    ],
)
def test_turned_images_are_evaluated_as_they_are_seen(tmp_path: Path, transform: EvaluationTransform) -> None:
    upright, turned = (
        rank_batches(url, batch_size=NUM_TURNED, rank=0, ranks=1, transform=transform) for url in packed_twins(tmp_path)
    )
    for (left, _), (right, _) in zip(turned, upright, strict=True):
        assert torch.equal(left.images, right.images)
        assert torch.equal(left.labels, right.labels)


def test_a_sample_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    url = packed_folders(tmp_path)
    dataset = open_dataset(str(url))
    with (url / dataset.shard_path(1)).open("r+b") as tar:
        tar.seek(int(dataset.sample_rows(1).offset[2]) + 4)
        tar.write(b"????")
    expected = rf"{url}: sample 6 \(c.*\): crc32 .*an evaluation needs every sample.*run: patchline verify {url}"
    with pytest.raises(WillNotSucceedError, match=expected):
        rank_batches(url, batch_size=4, rank=0, ranks=1)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "chosen",
    [[9, 3, 4, 14, 0, 3], [2, 3, 4, 5, 6, 7], [11], []],
    ids=["apart and not sorted", "over the end of a shard", "one", "none"],
)
def test_only_the_samples_that_are_asked_for(packed: Path, chosen: list[int], ranks: int) -> None:
    whole = rank_batches(packed, batch_size=NUM_SAMPLES, rank=0, ranks=1)[0][0]
    ids = np.array(chosen, dtype=np.int64)
    all_ranks = [rank_batches(packed, batch_size=2, rank=rank, ranks=ranks, sample_ids=ids) for rank in range(ranks)]
    in_order = [pair for pairs in zip(*all_ranks, strict=True) for pair in pairs]
    assert [one for batch, mask in in_order for one in batch.sample_ids[mask].tolist()] == chosen
    for batch, mask in in_order:
        assert torch.equal(batch.images[mask], whole.images[batch.sample_ids[mask]])


def test_a_sample_that_can_not_be_decoded_is_named(tmp_path: Path) -> None:
    url = packed_with_undecodable(tmp_path)
    expected = rf"{url}: sample \d+ \(.*spoiled.*\): decode: .*run: patchline verify {url} --deep"
    with pytest.raises(WillNotSucceedError, match=expected):
        rank_batches(url, batch_size=4, rank=0, ranks=1)


def test_leaving_while_a_read_stands_still_ends_at_once(packed: Path) -> None:
    dataset, store = watched(packed)
    dataset.sample_rows(0)  # of the first batch; the next one's index cannot be had
    store.file_gate.clear()
    share = Share(global_batch=4, rank=0, num_ranks=1)
    batches = evaluation_batches(dataset, batch_size=4, image_size=SIZE, transform=STRAIGHT, share=share, threads=2)
    next(batches)
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < 30, "half of what the read stands still for"
    store.file_gate.set()
    for thread in threading.enumerate():
        if thread.name in ("evaluate", "decode"):
            thread.join(60)
            assert not thread.is_alive()
