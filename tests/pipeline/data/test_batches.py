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
from pipeline.data.batches import Batch, DataConfig, Share, TrainBatches, check_memory, data_state, label_matrix
from pipeline.data.quarantine import Quarantine
from shards.dataset import Dataset, open_dataset
from shards.errors import UserError, WillNotSucceedError
from shards.index import BlockTable
from shards.read import RawSample, locate_row
from tests.rigs.datasets import packed_folders
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
        stream = TrainBatches(
            open_dataset(str(url)),
            config,
            seed=seed,
            image_size=SIZE,
            share=Share(global_batch=BATCH, rank=rank, num_ranks=ranks),
            quarantine=Quarantine(quarantine, max_share=config.max_quarantined),
        )
        try:
            found.append(list(islice(stream(steps.start), len(steps))))
        finally:
            stream.close()
    return found


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
    url = damaged(packed, tmp_path / "broken", list(range(NUM_SAMPLES)))
    with pytest.raises(WillNotSucceedError, match=r"\d+ of 12 samples could not be used.*q\.jsonl"):
        batches(url, tmp_path / "q.jsonl", steps=range(2))


def test_a_dataset_without_a_usable_sample_ends_the_run(packed: Path, tmp_path: Path) -> None:
    url = damaged(packed, tmp_path / "broken", list(range(NUM_SAMPLES)))
    config = replace(CONFIG, max_quarantined=100.0)
    with pytest.raises(WillNotSucceedError, match=f"20 substitutes in a row.*run: patchline verify {url}"):
        batches(url, tmp_path / "q.jsonl", steps=range(1), config=config)


def with_large_blocks(dataset: Dataset) -> Dataset:
    """The dataset as if it had 1,000 blocks of 16 MB."""
    numbers = np.arange(1000, dtype=np.int64)
    dataset.__dict__["blocks"] = BlockTable(
        shard=numbers.astype(np.int32),
        first_byte=numbers * 0,
        end_byte=numbers * 0 + 16_000_000,
        first_sample_id=numbers * 64,
        num_samples=numbers * 0 + 64,
    )
    return dataset


@pytest.mark.parametrize(
    ("ranks", "local_ranks", "lanes", "batch", "refused"),
    [
        pytest.param(1, 1, 64, 64, "8.2 GB", id="2 x 4 blocks x 16 MB x 64 lanes"),
        pytest.param(8, 8, 64, 64, "8.2 GB", id="all ranks on one host: the host is what counts"),
        pytest.param(8, 4, 64, 64, "4.5 GB", id="half of the ranks here, and a lane more where they share one"),
        pytest.param(8, 1, 64, 64, "", id="an eighth of the lanes here"),
        pytest.param(1, 1, 16, 16, "", id="fewer lanes"),
        pytest.param(1, 1, 16, 16 * 257, "3.1 GB", id="a batch that takes more than one window (of 256) of a lane"),
        pytest.param(1, 1, 1000, 1000, "32.0 GB", id="never more than all blocks twice"),
    ],
)
def test_more_memory_than_allowed_is_refused_with_the_number(
    packed: Path, ranks: int, local_ranks: int, lanes: int, batch: int, refused: str
) -> None:
    dataset = with_large_blocks(open_dataset(str(packed)))
    config = DataConfig(lanes=lanes, window_blocks=4, memory_limit_bytes=3_000_000_000)
    if not refused:
        check_memory(dataset, config, global_batch=batch, num_ranks=ranks, num_local_ranks=local_ranks)
        return
    with pytest.raises(UserError, match=rf"would hold {refused} .*memory-limit-bytes = 3\.0 GB"):
        check_memory(dataset, config, global_batch=batch, num_ranks=ranks, num_local_ranks=local_ranks)


def test_the_data_state_changes_with_what_changes_the_batches(packed: Path) -> None:
    dataset = open_dataset(str(packed))
    state = data_state(dataset, CONFIG, seed=3, global_batch=BATCH)
    assert state == json.loads(json.dumps(state))
    others = [
        data_state(dataset, CONFIG, seed=4, global_batch=BATCH),
        data_state(dataset, CONFIG, seed=3, global_batch=24),
        data_state(dataset, replace(CONFIG, lanes=2), seed=3, global_batch=BATCH),
        data_state(dataset, replace(CONFIG, window_blocks=1), seed=3, global_batch=BATCH),
        data_state(dataset, replace(CONFIG, augment=AugmentConfig(min_area=0.4)), seed=3, global_batch=BATCH),
    ]
    assert all(other != state for other in others)
    assert data_state(dataset, replace(CONFIG, num_threads=1, steps_ahead=1), seed=3, global_batch=BATCH) == state


def test_labels_are_padded_with_minus_one() -> None:
    samples = [
        RawSample(sample_id=i, data=b"", fault="", height=1, width=1, orientation=1, labels=labels, source="")
        for i, labels in enumerate([(4,), (1, 2, 3), ()])
    ]
    assert label_matrix(samples).tolist() == [[4, -1, -1], [1, 2, 3], [-1, -1, -1]]
    assert label_matrix(samples[2:]).tolist() == [[-1]]


@pytest.mark.parametrize("change", [{"lanes": 0}, {"window_blocks": 0}, {"steps_ahead": 0}, {"num_threads": -1}])
def test_sizes_that_are_too_small_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be 1 or more"):
        replace(CONFIG, **change)


def test_too_few_samples_for_the_lanes_are_the_users_mistake(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lanes is 64; allowed is 1 to 24.*--data\.lanes"):
        batches(packed, tmp_path / "q", steps=range(1), config=DataConfig(lanes=64))
