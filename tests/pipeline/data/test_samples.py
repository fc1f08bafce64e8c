"""A transform of one's own: what it gets, that it is a pure function, and what is refused."""

import gc
import io
import json
import pickle
import random
import tarfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from jobs.data import index
from pipeline.data.batches import Batch
from pipeline.data.config import AugmentConfig, DataConfig
from pipeline.data.decode import DecodeError, Pixels
from pipeline.data.samples import KeyedTorch, Sample, decoded_field, seeded
from pipeline.data.stream import train_batches, train_samples
from shards.config import SubsetConfig
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.reading.members import member_places, members_of
from tests.rigs.images import image_bytes

NUM_SAMPLES, BATCH, SIZE = 24, 6, 16
CONFIG = DataConfig(lanes=2, window_blocks=2, num_threads=2, max_quarantined=0.5)
Members = dict[str, bytes]


def npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=True)
    return file.getvalue()


def members(number: int) -> Members:
    """Some members come before the image and some after it; names are long in every third sample."""
    return {
        "caption.txt": f"picture {number}".encode(),
        "cls": str(number % 3).encode(),
        "jpg": image_bytes(number),
        "json": json.dumps({"number": number}).encode(),
        "npy": npy(np.full((2, number % 4), number)),
        "raw": b"x" * (20_000 * number),  # up to 460 kB: more than a gap that blocks of images alone skip
    }


def tars(folder: Path, of_sample: Callable[[int], Members] = members) -> str:
    """A dataset of three tars that others have made, indexed in place."""
    folder.mkdir(parents=True)
    for tar in range(3):
        with tarfile.open(folder / f"{tar}.tar", "w", format=tarfile.PAX_FORMAT) as out:
            for number in range(tar, NUM_SAMPLES, 3):
                stem = f"{'long-' * 30 * (number % 3 == 0)}{number:03}"
                for suffix, data in of_sample(number).items():
                    entry = tarfile.TarInfo(f"{stem}.{suffix}")
                    entry.size = len(data)
                    out.addfile(entry, io.BytesIO(data))
    assert index.run(index.IndexJob(url=str(folder), samples_per_block=3)) == 0
    return str(folder)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tars(tmp_path_factory.mktemp("samples") / "tars")


def arguments(url: str, **change: Any) -> dict[str, Any]:
    return {"url": url, "global_batch": BATCH, "image_size": SIZE, "config": CONFIG, "seed": 3} | change


def numbers_of(batch: Batch) -> list[int]:
    return [values["number"] for values in batch.fields["json"]]


def test_members_come_with_their_image(url: str) -> None:
    """In every epoch, from blocks and from the first single reads, whatever lies before or after the image."""
    fields, seen = ("caption.txt", "json", "npy", "raw", "cls"), list[int]()
    with train_batches(**arguments(url, fields=fields)) as batches, train_batches(**arguments(url)) as plain:
        for batch, other in islice(zip(batches, plain, strict=False), 8):
            assert torch.equal(batch.images, other.images)
            assert torch.equal(batch.labels, other.labels)
            numbers = numbers_of(batch)
            assert batch.fields["caption.txt"] == [f"picture {number}" for number in numbers]
            assert batch.fields["cls"] == batch.labels[:, 0].tolist() == [number % 3 for number in numbers]
            assert [len(raw) for raw in batch.fields["raw"]] == [20_000 * number for number in numbers]
            for array, number in zip(batch.fields["npy"], numbers, strict=True):
                np.testing.assert_array_equal(array, np.full((2, number % 4), number))
            seen += numbers
    assert sorted(seen) == sorted([*range(NUM_SAMPLES)] * 2)


def test_members_of_a_part_and_of_a_single_sample(url: str) -> None:
    config = DataConfig(lanes=2, num_threads=1, subset=SubsetConfig(per_class=3))
    with train_batches(**arguments(url, config=config, fields=("json", "cls"))) as batches:
        batch = next(batches)
        assert batch.fields["cls"] == batch.labels[:, 0].tolist()
        assert [number % 3 for number in numbers_of(batch)] == batch.fields["cls"]
    dataset = open_dataset(url)
    found = [json.loads(bytes(members_of(dataset, number)["json"]))["number"] for number in range(NUM_SAMPLES)]
    assert sorted(found) == list(range(NUM_SAMPLES))


def test_no_members_are_found_in_what_is_no_tar() -> None:
    assert member_places(memoryview(b"")) == {}
    assert member_places(memoryview(bytes(range(256)) * 64)) == {}


def drawn(sample: Sample) -> dict[str, Any]:
    """What a transform may draw from, and what it gets."""
    return {
        "crop": torch.from_numpy(sample.crop),
        "torch": torch.cat(
            [torch.rand(2), torch.empty(1).uniform_(-1, 1), torch.randperm(5).float(), torch.randn_like(torch.zeros(2))]
        ),
        "rng": sample.rng.random(),
        "label": sample.label,
    }


def test_a_transform_is_a_pure_function_on_threads_in_workers_and_after_resuming(url: str) -> None:
    """And it leaves torch's own generator alone, which the model's dropout draws from."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with train_batches(**arguments(url, transform=drawn)) as batches, train_batches(**arguments(url)) as plain:
        found: list[Any] = [batch.images for batch in islice(batches, 6)]
        assert torch.equal(found[0]["crop"], next(plain).images), "the crop is the view without a transform"
        state = batches.state_dict()
        expected: Any = next(batches).images
    with train_batches(**arguments(url, transform=drawn)) as batches:
        batches.load_state_dict(json.loads(json.dumps(state)))
        again: Any = next(batches).images
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert torch.equal(before, torch.get_rng_state())
    samples = train_samples(**arguments(url, transform=drawn, num_steps=6))
    workers = DataLoader(samples, batch_sampler=samples.batch_sampler(first_step=2), num_workers=1)
    for ours, theirs in zip(found[2:], workers, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    own = [torch.cat([some["rng"] for some in found[first : first + 4]]) for first in (0, 2)]
    assert torch.unique(own[0]).numel() == NUM_SAMPLES, "every sample of an epoch draws for itself"


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_samples_by_number_are_the_batches(
    url: str, monkeypatch: pytest.MonkeyPatch, repeats: int, is_mixed: bool
) -> None:
    """In any order, and although the places of a few samples are found at once."""
    monkeypatch.setattr("pipeline.data.train_samples._TOGETHER", 4)
    config = replace(CONFIG, augment=replace(CONFIG.augment, repeats=repeats))
    if is_mixed:
        config = replace(config, mix=((url, 2.0), (url, 1.0)))
    given = arguments("" if is_mixed else url, config=config)
    samples = train_samples(**given, num_steps=4)
    numbers = [*range(4 * BATCH)]
    random.shuffle(numbers)
    made = {number: samples[number] for number in numbers}
    with train_batches(**given) as batches:
        for step, batch in enumerate(islice(batches, 4)):
            images, labels = default_collate([made[step * BATCH + entry] for entry in range(BATCH)])
            assert torch.equal(images.permute(0, 2, 3, 1), batch.images)
            assert torch.equal(labels, batch.labels[:, 0])


def test_samples_of_ranks_are_a_partition_and_seeded(url: str) -> None:
    """The other libraries' generators are seeded for each sample, too, and then restored."""
    samples = train_samples(**arguments(url, num_steps=4))
    ranks = [list(samples.batch_sampler(first_step=1, rank=rank, num_ranks=2)) for rank in range(2)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == list(samples.batch_sampler(first_step=1))
    others = train_samples(
        **arguments(url, num_steps=4, transform=lambda _: (random.random(), np.random.random(), torch.rand(1)))
    )
    random.seed(1)
    state = random.getstate()
    assert others[5] == others[5] != others[6]
    assert random.getstate() == state
    with pytest.raises(IndexError, match="sample 24 of 24"):
        samples[len(samples)]


def test_collate_makes_what_the_loop_gets(url: str) -> None:
    def pairs(made: list[Any]) -> tuple[torch.Tensor, list[str]]:
        return torch.stack([image for image, _ in made]), [text for _, text in made]

    def transform(sample: Sample) -> tuple[torch.Tensor, str]:
        return torch.from_numpy(np.array(sample.image.resize((4, 4)))), sample.fields["caption.txt"]

    with train_batches(**arguments(url, fields=("caption.txt",), transform=transform, collate=pairs)) as batches:
        collated: Any = next(batches)
        assert batches.position["next_step"] == 1
    images, texts = collated
    assert images.shape == (BATCH, 4, 4, 3)
    assert all(text.startswith("picture ") for text in texts)


def test_an_unusable_member_replaces_its_sample(tmp_path: Path) -> None:
    """The substitute comes with its own members. A mapping stands in for members that are missing."""

    def some(number: int) -> Members:
        found = members(number)
        if number == 7:
            found["json"] = b"{"
        if number == 8:
            del found["json"]
        return found

    url, list_of = tars(tmp_path / "tars", some), tmp_path / "quarantine.jsonl"
    with train_batches(**arguments(url, fields=("json", "cls"), quarantine=list_of)) as batches:
        for batch in islice(batches, 4):
            assert batch.fields["cls"] == batch.labels[:, 0].tolist() == [one % 3 for one in numbers_of(batch)]
    reasons = [json.loads(line)["reason"] for line in list_of.read_text().splitlines()]
    assert any("member 'json' is damaged: Expecting property name" in reason for reason in reasons)
    assert any("it has no member 'json'; its members are caption.txt, cls, jpg, npy, raw" in one for one in reasons)
    with train_batches(**arguments(url, fields={"json": None}, quarantine=list_of)) as batches:
        found = [one for batch in islice(batches, 4) for one in batch.fields["json"]]
    assert found.count(None) == 1


def test_a_failing_transform_names_its_sample(url: str) -> None:
    def fails(sample: Sample) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise KeyError("mine")
        return 0

    with train_batches(**arguments(url, transform=fails)) as batches, pytest.raises(KeyError, match="mine") as raised:
        next(batches)
    assert raised.value.__notes__[0].startswith("the transform failed for Sample(")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            {"transform": lambda _: np.random.random()}, "transform drew from numpy.random, which", id="NumPy"
        ),
        pytest.param({"transform": lambda _: random.random()}, "drew from the module random", id="Python"),
        pytest.param(
            {"transform": lambda _: torch.nn.functional.dropout(torch.ones(9))}, "calls dropout", id="dropout"
        ),
        pytest.param(
            {"transform": lambda _: torch.rrelu(-torch.ones(9), training=True)}, "drew from torch's", id="torch"
        ),
        pytest.param({"transform": lambda _: np.random.default_rng().random()}, "two different results", id="unseeded"),
        pytest.param({"fields": {"capton.txt": ""}}, "'capton.txt', but the first 8", id="typo in a mapping"),
        pytest.param({"fields": ("txt",)}, r"'txt', but the first 8 .* members are caption\.txt, cls, jpg", id="typo"),
        pytest.param({"fields": "json"}, r"fields is 'json'; give a tuple .*\('json',\)", id="a string"),
        pytest.param({"collate": default_collate}, "collate is given without transform", id="no transform"),
        pytest.param({"transform": drawn, "pin_memory": True}, "pin what collate returns", id="pinned"),
    ],
)
def test_what_would_not_be_repeatable_is_refused(url: str, change: dict[str, Any], words: str) -> None:
    states = random.getstate(), torch.get_rng_state()
    with pytest.raises(UserError, match=words):
        train_batches(**arguments(url, **change))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize(
    ("suffix", "data", "words"),
    [
        ("npy", npy(np.array([{}], dtype=object)), "would be unpickled"),
        ("npy", npy(np.zeros(3)).replace(b"(3,)", b"(9,)"), "cannot reshape"),
        ("npy", npy(np.zeros(3)).replace(b"}", b"("), "is damaged"),
        ("npy", b"\x93NUMPY\x09\x00", "version is"),
        ("txt", b"\xff", "is damaged: 'utf-8'"),
        ("json", b"[" * 100_000, "is damaged"),
        ("json", b" " * (5 << 20), "has 5242880 bytes; allowed: 4194304"),
    ],
)
def test_hostile_members_are_refused(suffix: str, data: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        decoded_field(suffix, data)


def test_streams_do_not_go_to_other_processes(url: str) -> None:
    with train_batches(**arguments(url)) as batches:
        with pytest.raises(UserError, match="num_workers=0, or take train_samples"):
            pickle.dumps(batches)
        loader: Any = iter(DataLoader(batches, batch_size=None, num_workers=1))
        with pytest.raises(UserError, match="num_workers=0"):
            next(loader)
        loader._shutdown_workers()


def test_a_transform_runs_on_one_thread_of_torch_alone(url: str) -> None:
    before, later = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        with train_batches(
            url, global_batch=BATCH, config=CONFIG, transform=lambda _: torch.get_num_threads()
        ) as batches:
            counts = next(batches).images
        other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert counts.tolist() == [1] * BATCH
        assert (torch.get_num_threads(), later) == (3, [3])
    finally:
        torch.set_num_threads(before)


def test_threads_decode_at_the_same_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def decode(*_: Any, **__: Any) -> Pixels:
        both.wait(60)
        return np.zeros((4, 4, 3), dtype=np.uint8)

    def transform(sample: Sample) -> int:
        is_trial = threading.current_thread() is threading.main_thread()
        return 0 if is_trial else sample.pixels.size

    monkeypatch.setattr("pipeline.data.samples.decode_upright", decode)
    with train_batches(**arguments(url, transform=transform, global_batch=8)) as batches:
        assert next(batches).images.tolist() == [48] * 8
    both.abort()  # a thread that decodes ahead may wait for another


def test_a_stream_that_was_moved_lets_go_of_the_old_one(url: str) -> None:
    with train_batches(**arguments(url)) as batches:
        next(batches)
        old = weakref.ref(batches._source)
        batches.load_state_dict(batches.state_dict())
        gc.collect()
        assert old() is None
        assert next(batches).step == 1


def test_generators_of_threads_are_apart() -> None:
    found = dict[int, torch.Tensor]()

    def draw(seed: int) -> None:
        with KeyedTorch(seed):
            found[seed] = torch.stack([torch.rand(3) for _ in range(50)])

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, values in found.items():
        with seeded(seed):
            assert torch.equal(values, torch.stack([torch.rand(3) for _ in range(50)]))


def test_a_batch_prints_as_shapes(url: str) -> None:
    with train_batches(**arguments(url, fields=("json",))) as batches:
        assert repr(next(batches)) == (
            "Batch(step=0, images=uint8[6, 16, 16, 3], labels=int64[6, 1], sample_ids=int64[6], datasets=int64[6], "
            "fields['json']=list[6])"
        )


def test_lanes_that_are_not_set_fit(url: str) -> None:
    config = DataConfig(num_threads=1, augment=AugmentConfig(flip=False))
    with train_batches(**arguments(url, global_batch=10, config=config)) as batches:
        assert batches.position["lanes"] == 2
        assert next(batches).labels.shape == (10, 1)


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        (lambda sample: torch.from_numpy(sample.pixels), "equal size"),
        (lambda sample: sample.image, "must contain tensors"),
        (lambda _: None, "must contain tensors"),
    ],
    ids=["images of several sizes", "images of Pillow", "nothing"],
)
def test_results_that_make_no_batch_are_refused_with_the_remedy(
    tmp_path: Path, results: Callable[[Sample], Any], reason: str
) -> None:
    def of_several_sizes(number: int) -> Members:
        return {"cls": b"0", "jpg": image_bytes(number, height=24 + 4 * number)}

    url = tars(tmp_path / "tars", of_several_sizes)
    wrong = rf"results of transform do not make a batch: .*{reason}.*collate="
    with train_batches(**arguments(url, transform=results)) as batches, pytest.raises(UserError, match=wrong):
        next(batches)


def test_a_rare_member_needs_a_value_that_stands_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be missing in all samples that are looked at before the stream begins."""

    def rare(number: int) -> Members:
        return {"cls": b"0", "jpg": image_bytes(number)} | ({"txt": b"rare"} if number >= NUM_SAMPLES - 1 else {})

    url = tars(tmp_path / "tars", rare)
    with pytest.raises(UserError, match=r"no such member; their members are cls, jpg; if others have it, give what"):
        train_batches(**arguments(url, fields=("txt",)))
    with train_batches(**arguments(url, fields={"txt": "none"})) as batches:
        texts = [text for batch in islice(batches, NUM_SAMPLES // BATCH) for text in batch.fields["txt"]]
    assert sorted(texts) == ["none"] * (NUM_SAMPLES - 1) + ["rare"]
    assert caplog.messages[-1].endswith("their members are cls, jpg; 'none' stands in")


def test_a_stream_prints_where_it_is(url: str) -> None:
    with train_batches(**arguments(url)) as batches:
        next(batches)
        assert repr(batches) == f"BatchStream({url!r}, next step 1, {BATCH} images of {SIZE} px)"
    samples = train_samples(**arguments(url, num_steps=4))
    assert repr(samples) == f"TrainSamples({url!r}, 4 steps of {BATCH} images of {SIZE} px)"


@pytest.mark.parametrize("position", ["state/position.json", 13])
def test_a_position_is_a_mapping(url: str, position: Any) -> None:
    with pytest.raises(UserError, match=r"the position is .*, which is no mapping; give a stream's whole `position`"):
        train_batches(**arguments(url, position=position))


def test_more_ranks_than_lanes_are_warned_of(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with train_batches(**arguments(url, rank=0, num_ranks=3)):
        pass
    (said,) = caplog.messages
    assert said.startswith("3 ranks share 2 lanes, so several ranks read the same bytes; DataConfig(lanes=3) prevents")


def test_worker_processes_need_a_repeatable_transform_that_takes_the_fields(url: str) -> None:
    """They seed the generators of all libraries, but not those that a transform makes for itself."""
    with pytest.raises(UserError, match="two different results of one sample"):
        train_samples(**arguments(url, num_steps=4, transform=lambda _: np.random.default_rng().random()))
    with pytest.raises(UserError, match=r"fields is given without transform, which takes them from sample\.fields"):
        train_samples(**arguments(url, num_steps=4, fields=("json",)))
