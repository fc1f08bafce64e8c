"""The same global batch for any number of ranks and from any step, pixels included; broken samples are replaced."""

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from pipeline.data.augment import AugmentConfig
from pipeline.data.batches import COUNT_NAMES, Batch, TrainBatches, label_matrix
from pipeline.data.config import DataConfig, MixPart, Share
from pipeline.data.quarantine import Quarantine
from pipeline.data.randaugment import RandAugmentConfig
from pipeline.data.training_data import open_training_data
from shards.dataset import open_dataset
from shards.errors import UserError, WillNotSucceedError
from shards.read import locate_row
from tests.rigs.datasets import packed_folders, packed_with_undecodable
from tests.rigs.turned import packed_twins

NUM_SAMPLES, BATCH, SIZE = 24, 12, 16
CONFIG = DataConfig(lanes=4, window_blocks=2, num_threads=2, augment=AugmentConfig(min_area=0.3))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_folders(tmp_path_factory.mktemp("batches"), num_classes=3, images_a_class=8)


def batches(
    url: Path, quarantine: Path, *, steps: range, ranks: int = 1, seed: int = 3, config: DataConfig = CONFIG
) -> list[list[Batch]]:
    """Every rank's batches of `steps`: [rank][step]."""
    found = []
    for rank in range(ranks):
        config = config if config.mix else replace(config, url=str(url))
        stream = TrainBatches(
            open_training_data(config),
            config,
            seed=seed,
            image_size=SIZE,
            share=Share(global_batch=BATCH, rank=rank, num_ranks=ranks),
            quarantine=Quarantine(quarantine, max_share=config.max_quarantined),
        )
        try:
            found.append([kept(batch) for batch in islice(stream(steps.start), len(steps))])
        finally:
            stream.close()
    return found


def kept(batch: Batch) -> Batch:
    """The batch with images of its own: its buffer is used again."""
    return replace(batch, images=batch.images.clone())


def assert_equal(left: Batch, right: Batch) -> None:
    assert left.step == right.step
    np.testing.assert_array_equal(left.sample_ids, right.sample_ids)
    assert torch.equal(left.labels, right.labels)
    assert torch.equal(left.images, right.images)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_sees_the_same_global_batch(packed: Path, tmp_path: Path, ranks: int) -> None:
    (whole,) = batches(packed, tmp_path / "q", steps=range(5))  # two and a half epochs
    parts = batches(packed, tmp_path / "q", steps=range(5), ranks=ranks)
    for step, batch in enumerate(whole):
        assert batch.images.shape == (BATCH, SIZE, SIZE, 3)
        assert batch.images.dtype == torch.uint8
        of_step = [part[step] for part in parts]
        joined = Batch(
            step=step,
            images=torch.cat([part.images for part in of_step]),
            labels=torch.cat([part.labels for part in of_step]),
            sample_ids=np.concatenate([part.sample_ids for part in of_step]),
            datasets=np.concatenate([part.datasets for part in of_step]),
        )
        assert_equal(joined, batch)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"num_threads": 1}, id="one thread"),
        pytest.param({"num_threads": 5}, id="five threads"),
        pytest.param({"steps_ahead": 1}, id="nothing read ahead"),
    ],
)
def test_threads_and_reading_ahead_change_nothing(packed: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    config = replace(CONFIG, **change)
    (expected,) = batches(packed, tmp_path / "q", steps=range(3))
    (found,) = batches(packed, tmp_path / "q", steps=range(3), config=config)
    for left, right in zip(found, expected, strict=True):
        assert_equal(left, right)


@pytest.mark.parametrize("start", [1, 2, 5])
def test_a_later_start_equals_going_on(packed: Path, tmp_path: Path, start: int) -> None:
    (sequential,) = batches(packed, tmp_path / "q", steps=range(7))
    (resumed,) = batches(packed, tmp_path / "q", steps=range(start, 7))
    for left, right in zip(resumed, sequential[start:], strict=True):
        assert_equal(left, right)


def test_epochs_and_seeds_crop_anew(packed: Path, tmp_path: Path) -> None:
    (run,) = batches(packed, tmp_path / "q", steps=range(4))
    (other,) = batches(packed, tmp_path / "q", steps=range(4), seed=4)
    pictures = {
        (name, int(sample)): image
        for name, steps in (("first", run[:2]), ("second", run[2:]), ("seed", other[:2]))
        for batch in steps
        for sample, image in zip(batch.sample_ids, batch.images, strict=True)
    }
    for name in ("second", "seed"):
        same = [torch.equal(pictures["first", i], pictures[name, i]) for i in range(NUM_SAMPLES)]
        assert sum(same) <= 1


@pytest.mark.parametrize("crop", ["inception", "none"])
def test_turned_images_train_as_they_are_seen(tmp_path: Path, crop: Literal["inception", "none"]) -> None:
    """Of two datasets that look the same, one stored upright and one not, crops and pixels are the same."""
    config = replace(CONFIG, augment=AugmentConfig(crop=crop))
    twins = packed_twins(tmp_path)
    (upright,), (turned,) = (batches(url, tmp_path / "q", steps=range(4), config=config) for url in twins)
    for left, right in zip(turned, upright, strict=True):
        assert_equal(left, right)
    assert not (tmp_path / "q").exists(), "nothing was replaced"


def damaged(packed: Path, folder: Path, sample_ids: list[int]) -> Path:
    """A copy of the dataset with one byte of these samples changed."""
    shutil.copytree(packed, folder)
    dataset = open_dataset(str(packed))
    for sample_id in sample_ids:
        shard, row = locate_row(dataset, sample_id)
        with (folder / dataset.shard_path(shard)).open("r+b") as tar:
            tar.seek(int(dataset.shard_rows(shard).offset[row]) + 20)
            byte = tar.read(1)
            tar.seek(-1, 1)
            tar.write(bytes([byte[0] ^ 255]))
    return folder


def test_a_broken_sample_is_replaced_the_same_way_on_any_topology(packed: Path, tmp_path: Path) -> None:
    broken = 7
    url = damaged(packed, tmp_path / "broken", [broken])
    (clean,) = batches(packed, tmp_path / "clean.jsonl", steps=range(4))
    (found,) = batches(url, tmp_path / "one.jsonl", steps=range(4))
    two = batches(url, tmp_path / "two.jsonl", steps=range(4), ranks=2)
    replaced = 0
    for step, (left, right) in enumerate(zip(found, clean, strict=True)):
        np.testing.assert_array_equal(left.sample_ids, right.sample_ids)
        same = (left.images == right.images).flatten(1).all(1).numpy()
        np.testing.assert_array_equal(same, left.sample_ids != broken)
        replaced += int((~same).sum())
        assert torch.equal(left.images, torch.cat([two[0][step].images, two[1][step].images]))
        assert torch.equal(left.labels, torch.cat([two[0][step].labels, two[1][step].labels]))
    assert replaced == 2  # once an epoch
    lines = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert [line["sample_id"] for line in lines] == [broken] * 2
    assert len({line["substitute"] for line in lines}) == 1
    assert "crc32" in lines[0]["reason"]
    assert lines[0]["source"].startswith("c")
    assert not (tmp_path / "clean.jsonl").exists()
    label = open_dataset(str(packed)).shard_rows(locate_row(open_dataset(str(packed)), lines[0]["substitute"])[0])
    row = locate_row(open_dataset(str(packed)), lines[0]["substitute"])[1]
    entries = [
        (batch, int(np.flatnonzero(batch.sample_ids == broken)[0])) for batch in found if broken in batch.sample_ids
    ]
    assert [batch.labels[entry].tolist() for batch, entry in entries] == [label.labels[row]] * 2


def test_too_many_broken_samples_stop_the_run(packed: Path, tmp_path: Path) -> None:
    url = damaged(packed, tmp_path / "broken", list(range(18)))
    with pytest.raises(WillNotSucceedError, match=r"\d+ of \d+ samples could not be used.*q\.jsonl"):
        batches(url, tmp_path / "q.jsonl", steps=range(6))


def test_a_dataset_without_a_usable_sample_ends_the_run(packed: Path, tmp_path: Path) -> None:
    url = damaged(packed, tmp_path / "broken", list(range(NUM_SAMPLES)))
    config = replace(CONFIG, max_quarantined=1.0)
    with pytest.raises(WillNotSucceedError, match=f"20 substitutes in a row.*run: patchline verify {url}"):
        batches(url, tmp_path / "q.jsonl", steps=range(1), config=config)


def test_labels_are_padded_with_minus_one() -> None:
    labels = [np.array(own, dtype=np.int64) for own in ((4,), (1, 2, 3), ())]
    assert label_matrix(labels).tolist() == [[4, -1, -1], [1, 2, 3], [-1, -1, -1]]
    assert label_matrix(labels[2:]).tolist() == [[-1]]


def test_too_few_samples_for_the_lanes_are_the_users_mistake(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lanes is 64; allowed is 1 to 24.*--data\.lanes"):
        batches(packed, tmp_path / "q", steps=range(1), config=DataConfig(lanes=64))


def test_a_missing_shard_is_replaced_sample_by_sample(packed: Path, tmp_path: Path) -> None:
    """Its samples only: all others keep their place and their pixels, whatever the topology."""
    url = Path(shutil.copytree(packed, tmp_path / "copy"))
    dataset = open_dataset(str(url))
    (url / dataset.shard_path(2)).unlink()
    lost = {i for i in range(NUM_SAMPLES) if locate_row(dataset, i)[0] == 2}
    config = replace(CONFIG, max_quarantined=1.0)
    (clean,) = batches(packed, tmp_path / "clean.jsonl", steps=range(4))
    (found,) = batches(url, tmp_path / "one.jsonl", steps=range(4), config=config)
    two = batches(url, tmp_path / "two.jsonl", steps=range(4), ranks=2, config=config)
    for step, (left, right) in enumerate(zip(found, clean, strict=True)):
        same = (left.images == right.images).flatten(1).all(1).tolist()
        assert same == [sample not in lost for sample in left.sample_ids.tolist()]
        assert torch.equal(left.images, torch.cat([two[0][step].images, two[1][step].images]))
    lines = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert {line["sample_id"] for line in lines} >= lost
    assert all(dataset.shard_path(2) in line["reason"] and line["url"] == str(url) for line in lines)


def test_an_image_that_can_not_be_decoded_is_replaced(tmp_path: Path) -> None:
    url = packed_with_undecodable(tmp_path)
    batches(url, tmp_path / "q.jsonl", steps=range(2))
    lines = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert {line["source"] for line in lines} == {"c0/spoiled.jpg"}
    assert all(line["reason"].startswith("decode: ") for line in lines)


@pytest.mark.parametrize("ranks", [2, 4])
def test_randaugment_is_the_same_on_any_number_of_ranks(packed: Path, tmp_path: Path, ranks: int) -> None:
    config = replace(CONFIG, randaugment=RandAugmentConfig(num_ops=2, magnitude=9))
    (plain,) = batches(packed, tmp_path / "q", steps=range(4))
    (whole,) = batches(packed, tmp_path / "q", steps=range(4), config=config)
    parts = batches(packed, tmp_path / "q", steps=range(4), ranks=ranks, config=config)
    for step, batch in enumerate(whole):
        np.testing.assert_array_equal(batch.sample_ids, plain[step].sample_ids)
        assert not torch.equal(batch.images, plain[step].images)
        assert torch.equal(batch.images, torch.cat([part[step].images for part in parts]))


@pytest.fixture(scope="module")
def mixed(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Three of `packed` to one of another dataset, whose classes are c0, c1, c2 and two more."""
    other = packed_folders(tmp_path_factory.mktemp("other"), num_classes=5, images_a_class=3)
    return replace(CONFIG, mix=(MixPart(url=str(packed), weight=0.75), MixPart(url=str(other), weight=0.25)))


def test_a_mix_draws_exact_shares_and_every_sample_of_each_dataset_once_an_epoch(
    packed: Path, tmp_path: Path, mixed: DataConfig
) -> None:
    (run,) = batches(packed, tmp_path / "q", steps=range(20), config=mixed)  # 180 of 24 samples, 60 of 15
    counts = [np.bincount(batch.datasets, minlength=2).tolist() for batch in run]
    assert np.sum(counts, axis=0).tolist() == [180, 60]
    assert all(abs(first - 9) <= 4 for first, _ in counts), "evenly spread: each of the 4 lanes is one off at most"
    for dataset, size in ((0, NUM_SAMPLES), (1, 15)):
        drawn = np.concatenate([batch.sample_ids[batch.datasets == dataset] for batch in run])
        assert sorted(np.bincount(drawn, minlength=size).tolist())[0] >= drawn.size // size - 1
    data = open_training_data(mixed)
    assert data.label_names == ("c0", "c1", "c2", "c3", "c4")
    assert {int(label) for batch in run for label in batch.labels[batch.datasets == 1].flatten()} == set(range(5))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_mix_is_the_same_on_any_number_of_ranks_and_from_any_step(
    packed: Path, tmp_path: Path, mixed: DataConfig, ranks: int
) -> None:
    (whole,) = batches(packed, tmp_path / "q", steps=range(9), config=mixed)
    parts = batches(packed, tmp_path / "q", steps=range(4, 9), ranks=ranks, config=mixed)
    for step, batch in enumerate(whole[4:]):
        assert torch.equal(batch.images, torch.cat([part[step].images for part in parts]))
        assert torch.equal(batch.labels, torch.cat([part[step].labels for part in parts]))


def test_what_was_read_is_counted(packed: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, url=str(packed))
    stream = TrainBatches(
        open_training_data(config),
        config,
        seed=3,
        image_size=SIZE,
        share=Share(global_batch=BATCH, rank=0, num_ranks=1),
        quarantine=Quarantine(tmp_path / "q", max_share=0.0),
    )
    assert set(stream.counts().values()) == {0}
    try:
        list(islice(stream(0), 4))
        counts = stream.counts()
    finally:
        stream.close()
    assert tuple(counts) == COUNT_NAMES
    assert counts["samples"] >= 4 * BATCH
    assert counts["requests"] > 0
    assert counts["bytes"] > 0
    assert counts["replaced"] == counts["retries"] == 0


def test_a_batch_is_left_alone_until_the_next_but_one_is_asked_for(packed: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, url=str(packed), steps_ahead=2)
    stream = TrainBatches(
        open_training_data(config),
        config,
        seed=3,
        image_size=SIZE,
        share=Share(global_batch=BATCH, rank=0, num_ranks=1),
        quarantine=Quarantine(tmp_path / "q", max_share=0.0),
    )
    try:
        before: tuple[torch.Tensor, torch.Tensor] | None = None
        addresses = set()
        for batch in islice(stream(0), 12):
            if before:
                assert torch.equal(*before)
            before = batch.images, batch.images.clone()
            addresses.add(batch.images.data_ptr())
    finally:
        stream.close()
    assert len(addresses) == 3
