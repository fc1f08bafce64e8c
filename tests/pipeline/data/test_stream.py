"""`train_batches` as anybody's loop uses it: positions, refusals, and what it leaves behind, which is nothing."""

import json
import os
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.data import pack
from jobs.recipes.pack import digits
from pipeline.data.batches import Batch
from pipeline.data.config import AugmentConfig, DataConfig, Share
from pipeline.data.image_dataset import open_dataset
from pipeline.data.quarantine import Quarantine
from pipeline.data.stream import BatchStream, plan_stream, train_batches
from pipeline.data.training_data import TrainingData
from pipeline.ranks.world import World, leave
from shards.errors import StorageError, UserError, WillNotSucceedError
from shards.storage import s3
from shards.storage.retries import RetryConfig
from tests.conftest import new_bucket, use_s3
from tests.rigs.datasets import packed_folders
from tests.rigs.loader_kills import copied
from tests.rigs.processes import run_ranks
from tests.rigs.s3 import moto_server

NUM_SAMPLES, BATCH, SIZE = 27, 12, 16
CONFIG = DataConfig(lanes=4, window_blocks=2, num_threads=2)
LONGEST_POSITION_BYTES = 2000
DEADLINE_SECONDS = 60.0

Held = tuple[int, list[int], list[list[int]], bytes]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(packed_folders(tmp_path_factory.mktemp("stream"), num_classes=3, images_a_class=9))


@pytest.fixture(autouse=True)
def _no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of every test here, those that end with an error included. A pool that is left open keeps its threads."""
    monkeypatch.setattr("shards.pool.IDLE_SECONDS", 10 * DEADLINE_SECONDS)
    before = set(threading.enumerate())
    yield
    assert_no_thread_but(before)


def assert_no_thread_but(before: set[threading.Thread]) -> None:
    """Others have ended, or do so at once: one that has let go of everything may take a moment."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert set(threading.enumerate()) <= before


def held(batch: Batch) -> Held:
    """A copy of all that a batch holds."""
    return batch.step, batch.sample_ids.tolist(), batch.labels.tolist(), batch.images.numpy().tobytes()


def taken(batches: BatchStream, num: int) -> list[Held]:
    """The next batches."""
    return [held(batch) for batch in islice(batches, num)]


def test_ten_lines_are_enough(url: str) -> None:
    """Nothing but the dataset, the batch and the image size has to be said."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE * SIZE, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with train_batches(url, global_batch=BATCH, image_size=SIZE) as batches:
        for batch in batches:
            images = batch.images.permute(0, 3, 1, 2).float() / 127.5 - 1
            loss = torch.nn.functional.cross_entropy(model(images), batch.labels[:, 0])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if batch.step == 4:
                break
    assert torch.isfinite(loss)
    assert batches.position["next_step"] == 5
    assert batches.position["lanes"] == 4, "of the at most 64 that are wanted, as many as divide 12"


def test_batches_have_the_promised_types(url: str) -> None:
    with train_batches(url, global_batch=BATCH, image_size=SIZE, rank=1, num_ranks=3, config=CONFIG) as batches:
        batch = next(batches)
    assert (batch.images.shape, batch.images.dtype) == ((4, SIZE, SIZE, 3), torch.uint8)
    assert batch.images.is_contiguous()
    assert (batch.labels.shape, batch.labels.dtype) == ((4, 1), torch.int64)
    assert batch.sample_ids.shape == (4,)
    assert batch.sample_ids.dtype == torch.int64


def test_a_position_is_small_and_goes_on_exactly(url: str) -> None:
    with train_batches(url, global_batch=BATCH, image_size=SIZE, config=CONFIG) as batches:
        assert batches.position["next_step"] == 0
        whole, positions = [], [json.dumps(batches.position)]
        for batch in islice(batches, 7):  # three epochs
            whole.append(held(batch))
            positions.append(json.dumps(batches.position))
    for begin, position in enumerate(positions):
        assert len(position.encode()) < LONGEST_POSITION_BYTES
        saved = json.loads(position)
        with train_batches(url, global_batch=BATCH, image_size=SIZE, position=saved, config=CONFIG) as batches:
            assert batches.position == saved
            assert taken(batches, 7 - begin) == whole[begin:]


@pytest.mark.parametrize("skipped", [[(0, 1)], [(2, 3)], [(1, 3), (5, 9)], [(2, 30)]])
def test_skipped_data_is_left_out_and_the_rest_is_the_same(url: str, skipped: list[tuple[int, int]]) -> None:
    """Several epochs, and ranges that end in the middle of a window, in another window and in another epoch."""
    with train_batches(url, global_batch=BATCH, image_size=SIZE, config=CONFIG) as batches:
        start, whole = batches.position, taken(batches, 38)
    out = {step for first, end in skipped for step in range(first, end)}
    left = [(step, *batch[1:]) for step, batch in enumerate(one for one in whole if one[0] not in out)]
    ranges = [{"first": first, "end": end} for first, end in skipped]
    position = start | {"skipped": ranges, "data_step": min(set(range(38)) - out)}
    with train_batches(url, global_batch=BATCH, image_size=SIZE, position=position, config=CONFIG) as batches:
        assert taken(batches, 3) == left[:3]
        position = json.loads(json.dumps(batches.position))
    assert (position["next_step"], position["data_step"]) == (3, [s for s in range(38) if s not in out][3])
    with train_batches(url, global_batch=BATCH, image_size=SIZE, position=position, config=CONFIG) as batches:
        assert taken(batches, 4) == left[3:7]


def test_a_position_is_one_for_all_ranks_and_how_they_read(url: str) -> None:
    other = replace(CONFIG, num_threads=1, steps_ahead=1)
    found = []
    for rank, ranks, config in ((0, 1, CONFIG), (0, 2, CONFIG), (1, 2, other)):
        with train_batches(
            url, global_batch=BATCH, image_size=SIZE, rank=rank, num_ranks=ranks, config=config
        ) as batches:
            taken(batches, 2)
            found.append(batches.position)
    assert found[0] == found[1] == found[2]


def samples_of_this_rank(url: str) -> tuple[list[int], list[int]]:
    """The samples of its first two batches, and of its share of an evaluation, without a word about ranks."""
    with train_batches(url, global_batch=BATCH, image_size=SIZE) as batches:
        trained = [number for batch in islice(batches, 2) for number in batch.sample_ids.tolist()]
    scored = open_dataset(url).evaluation_batches(batch_size=4, image_size=SIZE)
    return trained, [number for batch, mask in scored for number in batch.sample_ids[mask].tolist()]


def as_one_of_several(world: World, url: str) -> dict[str, Any]:
    """What a script gets as a rank of a real process group, as torchrun's child before it has joined one, and if the
    two contradict each other."""
    own = {"RANK": str(world.rank), "WORLD_SIZE": str(world.num_ranks)}
    for name in own:
        os.environ.pop(name, None)
    found: dict[str, Any] = {"group": samples_of_this_rank(url)}
    os.environ.update(own)
    found["both"] = samples_of_this_rank(url)
    os.environ["RANK"] = str(1 - world.rank)
    try:
        samples_of_this_rank(url)
    except UserError as error:
        found["contradiction"] = str(error)
    with train_batches(url, global_batch=BATCH, image_size=SIZE, rank=0, num_ranks=1) as batches:
        found["whole"] = len(next(batches).sample_ids)
    leave()
    os.environ.update(own)
    found["environment"] = samples_of_this_rank(url)
    return found


def test_ranks_share_the_images_without_being_told(url: str) -> None:
    """Two processes that both took all images of a batch would train on each twice, and nobody would notice."""
    with train_batches(url, global_batch=BATCH, image_size=SIZE) as batches:
        whole = [batch.sample_ids.tolist() for batch in islice(batches, 2)]
    half = BATCH // 2
    ranks = run_ranks(as_one_of_several, url, num_ranks=2)
    for rank, found in enumerate(ranks):
        trained = [number for step in whole for number in step[rank * half : (rank + 1) * half]]
        assert [found[how][0] for how in ("group", "both", "environment")] == [trained] * 3
        assert f"is rank {rank} of 2, but RANK is '{1 - rank}' in the environment" in found["contradiction"]
        assert "give rank= and num_ranks=" in found["contradiction"]
        assert found["whole"] == BATCH
    for how in ("group", "both", "environment"):
        assert sorted(ranks[0][how][1] + ranks[1][how][1]) == list(range(NUM_SAMPLES))


def test_whole_numbers_of_numpy_give_a_plain_position(url: str) -> None:
    """Sizes are often computed with NumPy, and an older version put them into its positions."""
    sizes: dict[str, Any] = {"global_batch": np.int64(BATCH), "image_size": np.int64(SIZE), "seed": np.int64(0)}
    with train_batches(url, **sizes, config=CONFIG) as batches:
        first, position = taken(batches, 1), batches.position
    with train_batches(url, global_batch=BATCH, image_size=SIZE, config=CONFIG) as batches:
        assert taken(batches, 1) == first
        assert json.dumps(batches.position) == json.dumps(position)
    with train_batches(url, **sizes, config=CONFIG, position=position | sizes) as batches:
        assert batches.position == position


def test_a_loop_that_was_left_goes_on_with_the_next_batch(url: str) -> None:
    with train_batches(url, global_batch=BATCH, image_size=SIZE, config=CONFIG) as batches:
        whole = taken(batches, 6)
    with train_batches(url, global_batch=BATCH, image_size=SIZE, config=CONFIG) as batches:
        for batch in batches:
            if batch.step == 1:
                break
        assert batches.position["next_step"] == 2
        assert taken(batches, 2) == whole[2:4]
        assert [held(batch) for batch in islice(iter(batches), 2)] == whole[4:]


def test_two_streams_do_not_disturb_each_other(url: str) -> None:
    """Training and, say, a probe of another size and seed, batch by batch in turns."""
    arguments: list[dict[str, Any]] = [
        {"image_size": SIZE, "seed": 1, "config": CONFIG},
        {"image_size": 24, "seed": 2, "config": replace(CONFIG, lanes=3)},
    ]
    alone = []
    for each in arguments:
        with train_batches(url, global_batch=BATCH, **each) as batches:
            alone.append(taken(batches, 5))
    with ExitStack() as stack:
        both = [stack.enter_context(train_batches(url, global_batch=BATCH, **each)) for each in arguments]
        turns = [[held(next(batches)) for batches in both] for _ in range(5)]
    assert [list(found) for found in zip(*turns, strict=True)] == alone


class Planned:
    """How many samples all streams have begun to decode; to be put in the place of Quarantine.count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_samples, self.changed = 0, threading.Condition()

        def count(quarantine: Quarantine, num_samples: int) -> None:
            quarantine.num_read += num_samples
            with self.changed:
                self.num_samples += num_samples
                self.changed.notify_all()

        monkeypatch.setattr(Quarantine, "count", count)

    def wait_for(self, num_samples: int) -> None:
        """Returns once so many are; fails if that takes long."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_samples >= num_samples, DEADLINE_SECONDS)


@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_a_batch_is_valid_until_the_next_but_one_is_asked_for(
    url: str, monkeypatch: pytest.MonkeyPatch, steps_ahead: int
) -> None:
    """And its memory is used again, so that a loop's memory does not grow."""
    config, planned, places = replace(CONFIG, steps_ahead=steps_ahead), Planned(monkeypatch), []
    with train_batches(url, global_batch=BATCH, image_size=SIZE, config=config) as batches:
        previous = next(batches)
        content = held(previous)
        for batch in islice(batches, 40):
            current = held(batch)
            planned.wait_for((batch.step + steps_ahead + 1) * BATCH)  # the batches read ahead are being written
            assert held(previous) == content
            places.append(previous.images.data_ptr())
            previous, content = batch, current
    num_buffers = steps_ahead + 2
    assert len(set(places)) == num_buffers
    assert places[num_buffers:] == places[:-num_buffers]


def differing(url: str, tmp_path: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """What differs -> (the words that must say so, the arguments that differ)."""
    other = packed_folders(tmp_path / "other", num_classes=2, images_a_class=9)
    crop = replace(CONFIG, augment=AugmentConfig(min_area=0.5))
    return {
        "data": (r"data\.dataset: before [0-9a-f]{12}\.\.\., now [0-9a-f]{12}\.\.\.", {"url": str(other)}),
        "seed": ("seed: before 0, now 1", {"seed": 1}),
        "batch": ("global_batch: before 12, now 24", {"global_batch": 24}),
        "lanes": (r"data\.lanes: before 4, now 2", {"config": replace(CONFIG, lanes=2)}),
        "window": (r"data\.window_blocks: before 2, now 1", {"config": replace(CONFIG, window_blocks=1)}),
        "crop": (r"data\.augment\.min_area: before 0\.05, now 0\.5", {"config": crop}),
        "size": ("image_size: before 16, now 32", {"image_size": 32}),
        "two things": (
            r"seed: before 0, now 1\n.*lanes: before 4, now 2",
            {"seed": 1, "config": replace(CONFIG, lanes=2)},
        ),
    }


@pytest.mark.parametrize("case", ["data", "seed", "batch", "lanes", "window", "crop", "size", "two things"])
def test_a_position_of_something_else_is_refused(url: str, tmp_path: Path, case: str) -> None:
    words, change = differing(url, tmp_path)[case]
    arguments: dict[str, Any] = {"url": url, "global_batch": BATCH, "image_size": SIZE, "config": CONFIG}
    with train_batches(**arguments) as batches:
        position = batches.position
    with (
        pytest.raises(UserError, match=rf"(?s)other data or settings:\n.*{words}.*\ngive .* or position=None"),
        train_batches(**(arguments | change), position=position),
    ):
        pass


def test_another_decoder_is_refused_unless_allowed_by_name(url: str) -> None:
    with train_batches(url, global_batch=BATCH, image_size=SIZE, config=CONFIG) as batches:
        position = batches.position
    position["decoder"] = {**position["decoder"], "simplejpeg": "0.1"}
    with (
        pytest.raises(UserError, match=r"(?s)data\.decoder\.simplejpeg: before 0\.1, .*allow_other_decoder"),
        train_batches(url, global_batch=BATCH, image_size=SIZE, position=position, config=CONFIG),
    ):
        pass
    config = replace(CONFIG, allow_other_decoder=True)
    with train_batches(url, global_batch=BATCH, image_size=SIZE, position=position, config=config) as batches:
        assert next(batches).step == 0


@pytest.mark.parametrize(
    ("position", "words"),
    [
        pytest.param({}, "next_step is None; give a stream's whole `position`", id="empty is no beginning"),
        pytest.param({"next_step": 3}, r"data\.order_version: before none, now 1", id="only the step"),
        pytest.param({"next_step": -1}, "next_step is -1", id="before the beginning"),
        pytest.param({"next_step": "3"}, "next_step is '3'", id="a word"),
        pytest.param({"next_step": True}, "next_step is True", id="a truth value"),
        pytest.param({"next_step": 0.5}, "next_step is 0.5", id="half a step"),
    ],
)
def test_what_is_no_position_is_refused(url: str, position: dict[str, Any], words: str) -> None:
    with (
        pytest.raises(UserError, match=words),
        train_batches(url, global_batch=BATCH, image_size=SIZE, position=position, config=CONFIG),
    ):
        pass


def test_a_position_of_equal_values_of_other_types_is_refused(url: str) -> None:
    """False is 0 to Python, and no seed."""
    with train_batches(url, global_batch=BATCH, image_size=SIZE, config=CONFIG) as batches:
        position = batches.position | {"seed": False}
    with (
        pytest.raises(
            UserError, match=r"not one that a stream returned \(seed: .*valid integer\); give a stream's whole"
        ),
        train_batches(url, global_batch=BATCH, image_size=SIZE, position=position, config=CONFIG),
    ):
        pass


def test_a_stream_computes_its_orders_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They permute every block and sample of the dataset."""
    calls, orders = [], TrainingData.orders

    def counted(data: TrainingData, config: DataConfig, *, seed: int) -> Any:
        calls.append(seed)
        return orders(data, config, seed=seed)

    monkeypatch.setattr(TrainingData, "orders", counted)
    with train_batches(url, global_batch=BATCH, image_size=SIZE, seed=3, config=CONFIG) as batches:
        taken(batches, 1)
    assert calls == [3]


def test_a_planned_stream_reads_nothing_and_knows_what_it_needs(url: str) -> None:
    share = Share(global_batch=BATCH, rank=1, num_ranks=2)
    config = replace(CONFIG, url=url)
    alone, both = (
        plan_stream(config, seed=3, image_size=SIZE, share=share, num_cores=3, num_local_ranks=number)
        for number in (1, 2)
    )
    assert both.config.num_threads == (CONFIG.num_threads or 3)
    assert both.most_read_ahead_bytes == 2 * alone.most_read_ahead_bytes > 0
    assert (both.start.next_step, both.start.seed, both.start.image_size) == (0, 3, SIZE)
    with train_batches(url, global_batch=BATCH, image_size=SIZE, seed=3, config=CONFIG) as batches:
        assert batches.typed_position == both.start
        assert batches.position == both.start.to_json()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"global_batch": 0}, r"global_batch is 0; allowed: 1 or more", id="an empty batch"),
        pytest.param(
            {"num_ranks": 5},
            r"global_batch is 12, which 5 ranks cannot share equally; .*for example 15",
            id="ranks do not divide the batch",
        ),
        pytest.param({"num_ranks": 0}, r"num_ranks is 0; allowed: 1 or more", id="no rank"),
        pytest.param({"rank": 1}, r"rank is 1; allowed: 0 to 0, since num_ranks is 1", id="ranks begin at 0"),
        pytest.param({"rank": -1, "num_ranks": 2}, r"rank is -1; allowed: 0 to 1, since num_ranks is 2", id="rank -1"),
        pytest.param({"num_ranks": 2}, r"num_ranks is 2, but nothing says which this is; give rank=", id="who?"),
        pytest.param({"image_size": 0}, r"image_size is 0; allowed: 1 or more", id="no pixels"),
        pytest.param(
            {"config": replace(CONFIG, lanes=8)},
            r"global_batch is 12 and config\.lanes 8.*for example DataConfig\(lanes=4\)",
            id="lanes do not divide the batch",
        ),
        pytest.param(
            {"global_batch": 64, "config": None},
            r"lanes is 64; allowed: 1 to 27 \(the number of samples\)",
            id="a tiny dataset",
        ),
        pytest.param(
            {"config": replace(CONFIG, memory_limit_bytes=10)}, r"reading ahead may hold .* GB", id="no memory"
        ),
        pytest.param({"url": ""}, r"a dataset URL is empty; give a folder or s3://bucket/prefix", id="no address"),
        pytest.param(
            {"url": "NOWHERE"},
            r"there is nothing at 'NOWHERE'; .*: patchline pack",
            id="no dataset",
        ),
        pytest.param(
            {"url": "gs://bucket/data"},
            r"cannot open 'gs://bucket/data'; give a folder or s3://bucket/prefix",
            id="another cloud",
        ),
    ],
)
def test_what_does_not_fit_is_one_clear_error(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, Any] = {"url": url, "global_batch": BATCH, "image_size": SIZE, "config": CONFIG} | change
    with pytest.raises(UserError, match=words) as raised, train_batches(**arguments):
        pass
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


class _LoopError(Exception):
    """What a loop raised."""


def test_a_mix_is_named_by_the_configuration(url: str, tmp_path: Path) -> None:
    other = str(packed_folders(tmp_path, num_classes=2, images_a_class=7))
    config = replace(CONFIG, mix=((url, 3), (other, 1)))
    with train_batches(global_batch=BATCH, image_size=SIZE, config=config) as batches:
        drawn = {dataset for batch in islice(batches, 3) for dataset in batch.datasets.tolist()}
        position = json.loads(json.dumps(batches.position))
        rest = taken(batches, 4)
    assert drawn == {0, 1}
    assert len(json.dumps(position)) < LONGEST_POSITION_BYTES
    with train_batches(global_batch=BATCH, image_size=SIZE, position=position, config=config) as batches:
        assert taken(batches, 4) == rest
    with (
        pytest.raises(UserError, match="give one of the two"),
        train_batches(url, global_batch=BATCH, image_size=SIZE, config=config),
    ):
        pass


@pytest.mark.parametrize("end", ["nothing taken", "break", "error", "at once"])
@pytest.mark.parametrize("ahead", [1, 8])
@pytest.mark.parametrize("place", ["folder", "s3"])
def test_leaving_ends_all_threads(
    url: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, place: str, ahead: int, end: str
) -> None:
    """With a full read-ahead, and in the midst of reading; the fixture of this file looks for threads, too."""
    planned, before = Planned(monkeypatch), set(threading.enumerate())
    config = replace(CONFIG, steps_ahead=ahead)
    place_url = copied(url, f"s3://{s3_bucket}/dataset") if place == "s3" else url
    for _ in range(20 if end == "at once" else 1):
        try:
            with train_batches(place_url, global_batch=BATCH, image_size=SIZE, config=config) as batches:
                for batch in batches if end != "nothing taken" else ():
                    if end != "at once":
                        planned.wait_for(ahead * BATCH)
                    if end == "error":
                        raise _LoopError(batch.step)
                    break
        except _LoopError:
            assert end == "error"
        assert_no_thread_but(before)
        with pytest.raises(UserError, match=r"its `with` block was left.*position=batches\.position"):
            next(batches)


def test_a_failure_ends_the_stream_and_is_not_the_end_of_a_loop(url: str, tmp_path: Path) -> None:
    """Asking again is refused: silence would look like the end of the data. The list is where it was asked for."""
    broken, listed = tmp_path / "broken", tmp_path / "listed.jsonl"
    shutil.copytree(url, broken)
    for tar in broken.rglob("*.tar"):
        tar.write_bytes(bytes(tar.stat().st_size))
    with train_batches(str(broken), global_batch=BATCH, image_size=SIZE, config=CONFIG, quarantine=listed) as batches:
        with pytest.raises(WillNotSucceedError, match="could not be used"):
            next(batches)
        with pytest.raises(UserError, match=r"ended before step 0: .* reading failed"):
            next(batches)
    assert listed.read_text()


def test_a_list_of_replaced_samples_is_made_only_where_one_is(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with train_batches(url, global_batch=BATCH, image_size=SIZE) as batches:
        taken(batches, 3)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_counts_what_it_read(url: str) -> None:
    with train_batches(url, global_batch=BATCH, image_size=SIZE, config=CONFIG) as batches:
        assert set(batches.counts().values()) == {0}
        taken(batches, 3)
        counts = batches.counts()
    assert counts["samples"] >= 3 * BATCH
    assert counts["requests"] > 0
    assert counts["bytes"] > 0


def test_a_server_that_ends_in_the_loop_is_one_error_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one deadline for each of the many blocks that wait for a connection: this loop hung for ten of them."""
    monkeypatch.setattr(s3, "RETRIES", RetryConfig(backoff_seconds=0.05, most_backoff_seconds=0.2, deadline_seconds=2))
    with moto_server() as endpoint:
        use_s3(monkeypatch, endpoint, access_key="test", secret_key="test-secret")
        url = f"s3://{new_bucket(endpoint)}/digits"
        assert pack.run(replace(digits(), out=url)) == 0
        batches = train_batches(url, global_batch=32, image_size=32)
        assert len(list(islice(batches, 20))) == 20
    began = time.monotonic()
    with batches, pytest.raises(StorageError, match="the deadline is 2 s"):
        list(islice(batches, 1000))
    assert time.monotonic() - began < 10
