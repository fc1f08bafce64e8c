"""The same global batch for any number of ranks and from any step, pixels included; broken samples are replaced."""

import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data import transform
from pipeline.data.batches import COUNT_NAMES, Batch, TrainBatches, _Coming, _Pace, chunk_size
from pipeline.data.config import AugmentConfig, DataConfig, RandAugmentConfig, Share
from pipeline.data.quarantine import Quarantine
from pipeline.data.training_data import TrainingData, check_memory, open_training_data
from shards.dataset import Dataset, open_dataset
from shards.errors import StorageError, UserError, WillNotSucceedError
from shards.reading.samples import locate_row
from shards.sample_rows import NO_WEIGHT
from tests.rigs.datasets import index_rows, packed_folders, packed_with_undecodable, packed_with_weights
from tests.rigs.turned import packed_twins
from tests.rigs.watched import WatchedStore, watched

NUM_SAMPLES, BATCH, SIZE = 24, 12, 16
LEAVING_SECONDS = 30.0  # half of what a watched read stands still for
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
        data = open_training_data(config)
        stream = TrainBatches(
            data,
            config,
            orders=data.orders(config, seed=seed),
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


def stream_of(
    data: TrainingData, quarantine: Path, *, config: DataConfig = CONFIG, max_share: float = 0.0
) -> TrainBatches:
    """One rank's stream of the whole; whoever makes it closes it."""
    return TrainBatches(
        data,
        config,
        orders=data.orders(config, seed=3),
        seed=3,
        image_size=SIZE,
        share=Share(global_batch=BATCH, rank=0, num_ranks=1),
        quarantine=Quarantine(quarantine, max_share=max_share),
    )


def data_of(*datasets: Dataset) -> TrainingData:
    return TrainingData(datasets=datasets, quotas=(1,) * len(datasets))


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
            sample_ids=torch.cat([part.sample_ids for part in of_step]),
            datasets=torch.cat([part.datasets for part in of_step]),
        )
        assert_equal(joined, batch)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"num_threads": 1}, id="one thread"),
        pytest.param({"num_threads": 5}, id="five threads"),
        pytest.param({"steps_ahead": 1}, id="one read ahead"),
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
        for sample, image in zip(batch.sample_ids.tolist(), batch.images, strict=True)
    }
    for name in ("second", "seed"):
        same = [torch.equal(pictures["first", i], pictures[name, i]) for i in range(NUM_SAMPLES)]
        assert sum(same) <= 1


def with_repeats(repeats: int) -> DataConfig:
    return replace(CONFIG, augment=replace(CONFIG.augment, repeats=repeats))


@pytest.mark.parametrize("ranks", [2, 3])
def test_repeats_are_the_same_on_any_number_of_ranks_and_from_any_step(
    packed: Path, tmp_path: Path, ranks: int
) -> None:
    """Two of each image: a lane has three draws in a batch, so every second batch ends between the two."""
    options: dict[str, Any] = {"config": with_repeats(2)}
    (whole,) = batches(packed, tmp_path / "q", steps=range(8), **options)
    parts = batches(packed, tmp_path / "q", steps=range(8), ranks=ranks, **options)
    (resumed,) = batches(packed, tmp_path / "q", steps=range(3, 8), **options)
    for step, batch in enumerate(whole):
        assert torch.equal(batch.images, torch.cat([part[step].images for part in parts]))
        assert torch.equal(batch.labels, torch.cat([part[step].labels for part in parts]))
    for left, right in zip(resumed, whole[3:], strict=True):
        assert_equal(left, right)


def test_repeats_are_views_of_the_same_images_with_their_labels(packed: Path, tmp_path: Path) -> None:
    """An epoch of draws has half of the images, twice; two epochs have all, and the first views are those of an epoch
    without repeats."""
    (plain,) = batches(packed, tmp_path / "q", steps=range(2))
    (run,) = batches(packed, tmp_path / "q", steps=range(4), config=with_repeats(2))
    known = {int(sample_id): (image, label) for one in plain for sample_id, image, label in rows_of(one)}
    views: dict[int, list[torch.Tensor]] = {}
    for sample_id, image, label in (row for batch in run for row in rows_of(batch)):
        views.setdefault(int(sample_id), []).append(image)
        assert torch.equal(label, known[int(sample_id)][1])
    assert {number: len(images) for number, images in views.items()} == dict.fromkeys(range(NUM_SAMPLES), 2)
    for number, (first, second) in views.items():
        is_first = [torch.equal(image, known[number][0]) for image in (first, second)]
        assert any(is_first)
        assert not torch.equal(first, second)


def rows_of(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Sample, image and label of each entry."""
    return list(zip(batch.sample_ids, batch.images, batch.labels, strict=True))


def test_each_image_is_read_once_for_all_its_repeats(packed: Path, tmp_path: Path) -> None:
    """What is held after a batch depends on how far the stream has read ahead; the most of all batches is about a fifth
    of what is read, and would be all of it if what was used up were not freed."""
    read, most = [], []
    for repeats in (1, 4):
        config = replace(with_repeats(repeats), url=str(packed), steps_ahead=1)
        with closing(stream_of(open_training_data(config), tmp_path / "q", config=config)) as stream:
            most.append(max(stream.counts()["held_bytes"] for _ in islice(stream(0), 2 * repeats + 40)))
            read.append(stream.counts()["bytes"])
    assert read[1] < read[0] * 0.6
    assert most[1] < read[1] / 3, "what was used up is freed"


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
            tar.seek(int(dataset.sample_rows(shard).offset[row]) + 20)
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
        np.testing.assert_array_equal(same, (left.sample_ids != broken).numpy())
        replaced += int((~same).sum())
        assert torch.equal(left.images, torch.cat([two[0][step].images, two[1][step].images]))
        assert torch.equal(left.labels, torch.cat([two[0][step].labels, two[1][step].labels]))
    assert replaced == 2  # once an epoch
    lines = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert [line["sample_id"] for line in lines] == [broken]
    assert "crc32" in lines[0]["reason"]
    assert lines[0]["source"].startswith("c")
    assert not (tmp_path / "clean.jsonl").exists()
    shard, row = locate_row(open_dataset(str(packed)), lines[0]["substitute"])
    labels = open_dataset(str(packed)).sample_rows(shard).labels_of(row)
    entries = [(batch, batch.sample_ids.tolist().index(broken)) for batch in found if broken in batch.sample_ids]
    assert [batch.labels[entry].tolist() for batch, entry in entries] == [list(labels)] * 2


def test_too_many_broken_samples_stop_the_run(packed: Path, tmp_path: Path) -> None:
    url = damaged(packed, tmp_path / "broken", list(range(18)))
    with pytest.raises(WillNotSucceedError, match=r"\d+ of \d+ samples could not be used.*q\.jsonl"):
        batches(url, tmp_path / "q.jsonl", steps=range(6))


def test_a_dataset_without_a_usable_sample_ends_the_run(packed: Path, tmp_path: Path) -> None:
    url = damaged(packed, tmp_path / "broken", list(range(NUM_SAMPLES)))
    config = replace(CONFIG, max_quarantined=1.0)
    with pytest.raises(WillNotSucceedError, match=f"20 substitutes in a row.*run: patchline verify {url}"):
        batches(url, tmp_path / "q.jsonl", steps=range(1), config=config)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_labels_stay_with_their_samples(tmp_path: Path, ranks: int) -> None:
    """Whatever the rank: label number i of sample s, in the order of the list, has the weight that was packed."""
    rows = [f"a|b|c,{number}|0.5|0.25" if number % 3 else "b," for number in range(12)]
    url = packed_with_weights(tmp_path / "lists", rows)
    dataset = open_dataset(str(url))
    packed_weights = {
        dataset.first_sample_ids[shard] + place: row.weights
        for shard in range(3)
        for place, row in enumerate(index_rows(dataset, shard))
    }
    config = replace(CONFIG, label_weights=True)
    for part in batches(url, tmp_path / "q", steps=range(2), ranks=ranks, config=config):
        for batch in part:
            assert batch.weights is not None
            assert batch.weights.shape == batch.labels.shape
            for sample, labels, weights in zip(batch.sample_ids.tolist(), batch.labels, batch.weights, strict=True):
                expected = packed_weights[sample] or (NO_WEIGHT,) * len(weights)
                assert tuple(weights.tolist()) == expected
                assert (labels >= 0).sum() == (3 if packed_weights[sample] else 1)


def test_weights_that_are_not_used_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = packed_with_weights(tmp_path / "lists", ["a|b,1|0.5"] * 12)
    ((batch, *_),) = batches(url, tmp_path / "q", steps=range(2))
    assert batch.weights is None
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings if "weights" in record.getMessage()] == [
        f"labels of {url} have weights, which are not used: --data.label-weights uses them"
    ]


def test_too_few_samples_for_the_lanes_are_the_users_mistake(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lanes is 64; allowed: 1 to 24.*--data\.lanes"):
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


@pytest.mark.parametrize(
    "change",
    [
        {"randaugment": RandAugmentConfig(num_ops=2, magnitude=9)},
        {"augment": AugmentConfig(crop="random_resized", antialias=True)},
        {"augment": AugmentConfig(crop="short_side_crop")},
        {"augment": AugmentConfig(color_jitter=0.3), "randaugment": RandAugmentConfig(num_ops=1)},
        {"augment": AugmentConfig(crop="simple_random")},  # which the library leaves to Python
    ],
)
def test_the_library_changes_no_batch(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    if transform.crop_decoder() is None:
        pytest.skip("the crop decoder was not built: a C compiler and libjpeg-turbo's headers make it")
    url, config = damaged(packed, tmp_path / "broken", [7]), replace(CONFIG, **change, max_quarantined=1.0)
    (found,) = batches(url, tmp_path / "with", steps=range(2), config=config)
    monkeypatch.setattr(transform, "crop_decoder", lambda: None)
    (expected,) = batches(url, tmp_path / "without", steps=range(2), config=config)
    for left, right in zip(found, expected, strict=True):
        assert_equal(left, right)
    assert (tmp_path / "with").read_text() == (tmp_path / "without").read_text()


@pytest.fixture(scope="module")
def mixed(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Three of `packed` to one of another dataset, whose classes are c0, c1, c2 and two more."""
    other = packed_folders(tmp_path_factory.mktemp("other"), num_classes=5, images_a_class=3)
    return replace(CONFIG, mix=((str(packed), 0.75), (str(other), 0.25)))


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
    with closing(stream_of(open_training_data(config), tmp_path / "q")) as stream:
        assert set(stream.counts().values()) == {0}
        list(islice(stream(0), 4))
        counts = stream.counts()
    assert tuple(counts) == COUNT_NAMES
    assert counts["samples"] >= 4 * BATCH
    assert counts["requests"] > 0
    assert counts["bytes"] > 0
    assert counts["replaced"] == counts["retries"] == 0


@pytest.mark.parametrize("is_mixed", [False, True], ids=["one dataset", "a dataset mixed with itself"])
def test_counts_are_what_this_stream_read(packed: Path, tmp_path: Path, is_mixed: bool) -> None:
    """Index files and samples that are read again, too; nothing twice, and nothing of another stream."""
    dataset, store = watched(packed)
    data = data_of(dataset, dataset) if is_mixed else data_of(dataset)
    _ = dataset.blocks
    with closing(stream_of(data, tmp_path / "q")) as idle:
        store.read_files.clear()
        with closing(stream_of(data, tmp_path / "q", max_share=1.0)) as stream:
            store.spoiled.extend([True, False, False])
            list(islice(stream(0), 5))
            # What is stopped by leaving is not counted, so all that was asked for has to arrive before.
            wait_until(lambda: counted(stream) == really_read(store))
        assert set(idle.counts().values()) == {0}
    assert store.read_files


def counted(stream: TrainBatches) -> tuple[float, float]:
    """Requests and bytes, by the stream."""
    counts = stream.counts()
    return counts["requests"], counts["bytes"]


def really_read(store: WatchedStore) -> tuple[float, float]:
    """Requests and bytes, by the store."""
    seen, files = list(store.seen), list(store.read_files)
    size = sum(end - first for _, first, end in seen) + sum(store.size(path) for path in files)
    return len(seen) + len(files), size


def test_a_batch_is_left_alone_until_the_next_but_one_is_asked_for(packed: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, url=str(packed), steps_ahead=2)
    with closing(stream_of(open_training_data(config), tmp_path / "q", config=config)) as stream:
        before: tuple[torch.Tensor, torch.Tensor] | None = None
        addresses = set()
        for batch in islice(stream(0), 12):
            if before:
                assert torch.equal(*before)
            before = batch.images, batch.images.clone()
            addresses.add(batch.images.data_ptr())
    assert len(addresses) == 4, "two ahead, one in use, and the one before"


@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_so_many_steps_are_ahead_of_the_batch_in_hand(packed: Path, tmp_path: Path, steps_ahead: int) -> None:
    config = replace(CONFIG, url=str(packed), steps_ahead=steps_ahead)
    with closing(stream_of(open_training_data(config), tmp_path / "q", config=config)) as stream:
        coming = stream(0)
        for step in range(3):
            assert next(coming).step == step
            wait_until(lambda: stream.counts()["samples"] == BATCH * (step + 1 + steps_ahead))  # noqa: B023


@pytest.mark.parametrize("steps_ahead", [1, 3])
@pytest.mark.parametrize("window_blocks", [1, 2])
def test_reading_ahead_holds_no_more_than_said(
    packed: Path, tmp_path: Path, steps_ahead: int, window_blocks: int
) -> None:
    config = replace(CONFIG, url=str(packed), steps_ahead=steps_ahead, window_blocks=window_blocks)
    data = open_training_data(config)
    (order,) = data.orders(config, seed=3)
    sizes: dict[str, Any] = {"global_batch": BATCH, "num_ranks": 1, "num_local_ranks": 1}
    bound = check_memory(data, config, (order,), **sizes)
    most = 0.0
    with closing(stream_of(data, tmp_path / "q", config=config)) as stream:
        for _ in islice(stream(0), 60):
            most = max(most, stream.counts()["held_bytes"], stream._sources[0].reader._held.most)
    assert 0 < most <= bound


def wait_until(condition: Callable[[], bool]) -> None:
    """Nothing tells what the threads of a stream have done."""
    pause, deadline = threading.Event(), time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)


@pytest.mark.parametrize("first_reads", [pytest.param(8, id="the batch's rows"), pytest.param(0, id="a window's")])
def test_leaving_while_an_index_is_awaited_ends_at_once(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_reads: int
) -> None:
    """The planner, which waits for it, must not do so for ever."""
    monkeypatch.setattr("shards.reading.read.FIRST_READS", first_reads)
    monkeypatch.setattr("shards.pool.CLOSE_SECONDS", 0.1)
    for _ in range(20):
        dataset, store = watched(packed)
        stream = stream_of(data_of(dataset), tmp_path / "q")
        with ThreadPoolExecutor(1) as pool:
            store.read_files.clear()
            store.file_gate.clear()
            batch = pool.submit(next, stream(0))
            wait_until(lambda: len(store.read_files) > 0)  # noqa: B023
            began = time.monotonic()
            stream.close()
            assert time.monotonic() - began < LEAVING_SECONDS
            assert isinstance(batch.exception(60), CancelledError)
            wait_until(lambda: not any(thread.name in ("plan", "decode") for thread in threading.enumerate()))
            store.file_gate.set()
        wait_until(lambda: not any(thread.name == "rows" for thread in threading.enumerate()))


def test_leaving_while_a_sample_is_read_again_ends_at_once(packed: Path, tmp_path: Path) -> None:
    """In a decoding thread, which has others to read behind it."""
    dataset, store = watched(packed)
    taken = ThreadPoolExecutor(1)
    stream = stream_of(data_of(dataset), tmp_path / "q", max_share=1.0)
    try:
        store.spoiled.extend([True] * 1000)
        store.holds_repeats.set()
        batch = taken.submit(next, stream(0))
        wait_until(lambda: len(store.held_up) >= 2)
        began = time.monotonic()
        stream.close()
        assert time.monotonic() - began < LEAVING_SECONDS
        assert isinstance(batch.exception(60), CancelledError)
        num_seen = len(store.seen)
    finally:
        store.gate.set()
        taken.shutdown()
    wait_until(lambda: not any(thread.name == "decode" for thread in threading.enumerate()))
    assert len(store.seen) <= num_seen + 2, "after the sample in hand it reads no other"


def test_a_folder_that_vanishes_is_no_damaged_dataset(packed: Path, tmp_path: Path) -> None:
    """Its tars alone, with the manifest still there: no sample is replaced for it."""
    url = Path(shutil.copytree(packed, tmp_path / "copy"))
    config = replace(CONFIG, url=str(url), window_blocks=1, max_quarantined=1.0)
    with closing(stream_of(open_training_data(config), tmp_path / "q", config=config, max_share=1.0)) as stream:
        coming = stream(0)
        next(coming)
        (url / "shards").rename(tmp_path / "unmounted")
        with pytest.raises(StorageError, match="is the storage mounted"):
            list(islice(coming, 20))
    assert not (tmp_path / "q").exists()


LEFT_OPEN = """
import sys
from pipeline.data.config import DataConfig
from pipeline.data.stream import train_batches
def taken(url):
    config = DataConfig(lanes=4, window_blocks=2, num_threads=2)
    with train_batches(url, global_batch=12, image_size=16, config=config) as batches:
        yield from batches
coming = taken(sys.argv[1])
print(next(coming).step)
"""


@pytest.mark.long
def test_a_process_may_end_with_a_stream_left_open(packed: Path, tmp_path: Path) -> None:
    """Its threads are daemons, which must not be stopped with a lock in hand that the end waits for."""
    words = [sys.executable, "-c", LEFT_OPEN, str(packed)]
    for _ in range(3):
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")


def test_a_batch_is_ready_once_it_is_complete_and_sound(packed: Path, tmp_path: Path) -> None:
    """Requesting it then waits for nothing."""
    data = open_training_data(replace(CONFIG, url=str(packed)))
    with closing(stream_of(data, tmp_path / "quarantine.jsonl")) as stream:
        assert not stream.is_ready, "nothing is requested yet"
        found = stream(0)
        next(found)
        deadline = time.monotonic() + 60
        while not stream.is_ready:
            assert time.monotonic() < deadline


def test_a_batch_that_failed_is_not_ready() -> None:
    """Its fault is raised where the batch is requested, not in the middle of a step."""
    failed: Future[Any] = Future()
    failed.set_exception(WillNotSucceedError("too many"))
    done: Future[Any] = Future()
    done.set_result([])
    cancelled: Future[Any] = Future()
    cancelled.cancel()
    cases: list[tuple[list[Any], bool]] = [
        ([done], True),
        ([done, failed], False),
        ([cancelled], False),
        ([Future()], False),
    ]
    for pieces, expected in cases:
        ids = np.zeros(0, dtype=np.int64)
        none = torch.zeros(0)
        coming = _Coming(
            step=0,
            images=none,
            sample_ids=ids,
            datasets=ids,
            labels=ids,
            others={},
            pieces=pieces,
            work_seconds=[],
        )
        assert coming.is_complete == expected


def test_as_many_threads_decode_as_the_steps_need() -> None:
    pace = _Pace(most=14)
    assert pace.limit == 14

    def limits(num_batches: int, *, is_complete: bool = True, work: float = 0.6, step: float = 1.0) -> list[int]:
        found = []
        for _ in range(num_batches):
            pace.request(is_complete=is_complete, work_seconds=work, step_seconds=step)
            found.append(pace.limit)
        return found

    assert limits(2, is_complete=False) == [14, 14], "the first batches come late with all threads"
    assert limits(7) == [14] * 7
    assert limits(1, is_complete=False) == [14], "late with all threads: nothing to learn"
    assert limits(9) == [*[14] * 7, 1, 1], "0.6 of a thread, and half as much again"
    assert limits(1, step=0.25) == [4], "the shortest step counts"
    assert limits(1, work=2.0) == [12]
    assert limits(9)[-1] == 1, "both are over"
    assert limits(1, is_complete=False) == [14]
    assert limits(8) == [*[14] * 7, 2], "one was not enough"
    assert limits(8, work=90.0)[-1] == 14
    assert limits(8, step=0.0)[-1] == 14


def test_fewer_threads_decode_beside_slow_steps_and_all_once_batches_come_late(packed: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, url=str(packed), num_threads=4)
    with closing(stream_of(open_training_data(config), tmp_path / "q", config=config)) as stream:
        found, deadline = stream(0), time.monotonic() + 120
        assert stream._decoders.limit == 4
        while stream._decoders.limit == 4:
            next(found)
            time.sleep(0.05)
            assert time.monotonic() < deadline
        while stream._decoders.limit < 4:
            next(found)
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("num_samples", "num_threads", "steps_ahead", "expected"),
    [
        pytest.param(64, 2, 3, 16, id="few threads: a batch is four calls"),
        pytest.param(512, 2, 3, 64, id="a large batch: four chunks for each thread"),
        pytest.param(64, 16, 3, 6, id="many threads: the batches ahead share them"),
        pytest.param(64, 16, 1, 2, id="one batch ahead: it has two chunks for each thread"),
        pytest.param(256, 16, 3, 16, id="an interpreter's call for sixteen images"),
        pytest.param(12, 64, 3, 1, id="more threads than images"),
    ],
)
def test_a_chunk_is_large_enough_for_the_interpreter_and_small_enough_for_the_threads(
    num_samples: int, num_threads: int, steps_ahead: int, expected: int
) -> None:
    assert chunk_size(num_samples, num_threads=num_threads, steps_ahead=steps_ahead) == expected


@given(st.integers(1, 4096), st.integers(1, 256), st.integers(1, 16))
def test_the_batches_ahead_have_a_chunk_for_every_thread(num_samples: int, num_threads: int, steps_ahead: int) -> None:
    size = chunk_size(num_samples, num_threads=num_threads, steps_ahead=steps_ahead)
    num_chunks = -(-num_samples // size) * steps_ahead
    assert num_chunks >= min(num_threads, num_samples * steps_ahead)


def test_a_thread_is_called_for_many_images(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(samples: Any, settings: Any, *, out: Any) -> Any:
        sizes.append(samples.size)
        return transform.train_views(samples, settings, out=out)

    monkeypatch.setattr("pipeline.data.batches.train_views", counted)
    batches(packed, tmp_path / "q", steps=range(2), config=replace(CONFIG, num_threads=16, steps_ahead=16))
    assert set(sizes) == {BATCH // 2}, "and not one image at a time, since the batches ahead share the threads"
