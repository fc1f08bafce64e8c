"""A part of a dataset: its samples against Python's own sets, and choices that are nested, exact and never change."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards import sample_rows
from shards.config import HeldOutConfig, ReadConfig, SubsetConfig
from shards.dataset import Dataset, open_dataset
from shards.errors import UserError
from shards.order import SampleOrder
from shards.part import (
    Ids,
    Part,
    Runs,
    between,
    chosen,
    cut,
    joined,
    opened_parts,
    per_class,
    settings_of,
    single,
    without,
)
from shards.reading.read import StreamReader
from shards.reading.samples import RawSample, read_sample, verified
from shards.reading.windows import window_bound_bytes
from shards.sample_rows import BlockTable
from shards.store import open_store
from tests.rigs.datasets import index_rows, packed_folders
from tests.rigs.watched import watched
from tests.shards.adoption.test_adopt import adoption_of, run, with_cls, write_tars

NUM_SAMPLES, NUM_CLASSES = 60, 3
WHOLE, NOTHING = SubsetConfig(), HeldOutConfig()
CASES = [
    pytest.param(SubsetConfig(share=0.3), NOTHING, id="share"),
    pytest.param(SubsetConfig(count=7), NOTHING, id="count"),
    pytest.param(SubsetConfig(per_class=2), NOTHING, id="per class"),
    pytest.param(SubsetConfig(first=5, end=11), NOTHING, id="range"),
    pytest.param(SubsetConfig(share=0.5, first=5), HeldOutConfig(share=0.2), id="all three"),
    pytest.param(WHOLE, HeldOutConfig(count=5), id="held out"),
]
MOST = 60
sets = st.sets(st.integers(0, MOST - 1), min_size=1)
CHOSEN = [0, 9, 11, 15, 16]
OF_CLASSES = [0, 9, 11, 16]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 samples: shards of 4, blocks of 3 and 1."""
    return packed_folders(tmp_path_factory.mktemp("parts"), num_classes=NUM_CLASSES, images_a_class=20)


@pytest.fixture(scope="module")
def adopted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 samples in blocks of 2, in tars made by others, with other members between the images."""
    url = str(tmp_path_factory.mktemp("adopted") / "tars")
    write_tars(open_store(url), with_cls)
    run(adoption_of(url))
    return Path(url)


def ids_of(part: Dataset | None) -> list[int]:
    """The part's samples, by their ids in the whole dataset."""
    assert part is not None
    ids: list[int] = part.packed_ids(np.arange(part.num_samples)).tolist()
    return ids


def an_epoch(dataset: Dataset, *, lanes: int = 2, batch: int = 4) -> list[RawSample]:
    """All samples, as a rank reads them; what it holds stays within its bound."""
    order = SampleOrder(dataset.block_sizes, seed=1, lanes=lanes, window_blocks=2)
    bound = window_bound_bytes(dataset.blocks, order, batch_size=batch, num_ranks=1, batches_in_use=1)
    found: dict[int, RawSample] = {}
    with closing(StreamReader(ReadConfig(connections=2))) as stream:
        reader = stream.samples(dataset, order)
        for step in range(-(-2 * dataset.num_samples // batch)):  # two epochs: more than the first, single reads
            samples = reader.read(order.positions(step, batch, 0, 1)).samples
            assert reader.held_bytes <= bound
            for sample in samples:
                read = verified(dataset, sample)
                assert not read.fault
                found[sample.sample_id] = replace(read, data=bytes(read.data or b""))  # a copy, which holds nothing
            del samples, sample, read
    return [found[number] for number in range(dataset.num_samples)]


@pytest.mark.parametrize("folder", ["packed", "adopted"])
@pytest.mark.parametrize(("subset", "held_out"), CASES)
def test_a_part_is_read_as_its_samples_are_in_the_whole(
    request: pytest.FixtureRequest, folder: str, subset: SubsetConfig, held_out: HeldOutConfig
) -> None:
    whole = open_dataset(str(request.getfixturevalue(folder)))
    if folder == "adopted" and subset.per_class:
        subset = SubsetConfig(per_class=1)
    for part in opened_parts(whole, subset, held_out):
        if part is None:
            continue
        ids = ids_of(part)
        assert ids == sorted(set(ids))
        assert len(ids) == part.num_samples == part.block_sizes.sum()
        for sample, number in zip(an_epoch(part), ids, strict=True):
            expected = read_sample(whole, number)
            assert (sample.data, sample.labels, sample.crc32) == (expected.data, expected.labels, expected.crc32)
            shard = int(np.searchsorted(whole.first_sample_ids, number, side="right")) - 1
            row = number - int(whole.first_sample_ids[shard])
            own = int(np.searchsorted(part.first_sample_ids, sample.sample_id, side="right")) - 1
            own_row = sample.sample_id - int(part.first_sample_ids[own])
            assert (own, part.packed_row(own, own_row)) == (shard, row)
            assert part.source_of(own, own_row) == whole.source_of(shard, row)


@pytest.mark.parametrize("folder", ["packed", "adopted"])
def test_parts_are_exact_apart_and_nested(request: pytest.FixtureRequest, folder: str) -> None:
    whole = open_dataset(str(request.getfixturevalue(folder)))
    num_held = round(0.2 * whole.num_samples)
    rest = whole.num_samples - num_held
    before: set[int] = set()
    for share in (0.1, 0.3, 0.7, 1.0):
        part, held = opened_parts(whole, SubsetConfig(share=share), HeldOutConfig(share=0.2))
        ids, out = set(ids_of(part)), set(ids_of(held))
        assert (len(ids), len(out)) == (round(share * rest), num_held)
        assert not ids & out
        assert before <= ids
        before = ids
    assert before | out == set(range(whole.num_samples))
    other, _ = opened_parts(whole, SubsetConfig(share=0.3, seed=1), NOTHING)
    assert ids_of(other) != ids_of(opened_parts(whole, SubsetConfig(share=0.3), NOTHING)[0])


def test_each_class_has_as_many(packed: Path) -> None:
    whole = open_dataset(str(packed))
    labels = [row.labels[0] for shard in range(len(whole.manifest.shards)) for row in index_rows(whole, shard)]
    part, held = opened_parts(whole, SubsetConfig(per_class=4), HeldOutConfig(share=0.1))
    assert np.bincount([labels[number] for number in ids_of(part)]).tolist() == [4] * NUM_CLASSES
    assert not set(ids_of(part)) & set(ids_of(held))


def test_the_whole_is_the_dataset_itself(packed: Path) -> None:
    whole = open_dataset(str(packed))
    assert opened_parts(whole, WHOLE, NOTHING) == (whole, None)


def test_no_thread_ever_sees_the_blocks_of_the_whole(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread still reads the block table, others that ask for it must not get that of the whole."""
    whole = open_dataset(str(packed))
    part, _ = opened_parts(whole, SubsetConfig(per_class=2), NOTHING)
    seen: list[int] = []
    before = Part._read_bytes

    def watched_bytes(self: Part, blocks: BlockTable) -> Ids:
        seen.append(vars(self).get("blocks", blocks).num_samples.sum())
        return before(self, blocks)

    monkeypatch.setattr(Part, "_read_bytes", watched_bytes)
    assert part.blocks.num_samples.sum() == 6
    assert seen == [6]


def test_parts_are_told_apart_and_remember_their_dataset(packed: Path) -> None:
    whole = open_dataset(str(packed))
    parts = [opened_parts(whole, SubsetConfig(share=share), NOTHING)[0] for share in (0.3, 0.6)]
    assert len({whole.fingerprint, *(part.fingerprint for part in parts)}) == 3
    assert {part.packed_fingerprint for part in parts} == {whole.fingerprint}
    again = opened_parts(open_dataset(str(packed)), SubsetConfig(share=0.3), NOTHING)[0]
    assert again.fingerprint == parts[0].fingerprint


def test_blocks_are_read_without_what_nobody_wants(adopted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_rows, "MOST_GAP_BYTES", 0)
    dataset, store = watched(adopted)
    part, _ = opened_parts(dataset, SubsetConfig(count=6), NOTHING)
    assert isinstance(part, Part)
    wanted = sum(len(sample.data or b"") for sample in an_epoch(part))
    assert wanted == part.blocks.most_bytes.sum()
    sizes = {(path, first): end - first for path, first, end in store.seen}
    assert sum(sizes.values()) == wanted  # each image by itself, however often, and nothing between them


def test_gaps_that_are_small_save_a_request(adopted: Path) -> None:
    dataset, store = watched(adopted)
    part, _ = opened_parts(dataset, SubsetConfig(count=14), NOTHING)
    an_epoch(part)
    assert max(end - first for _, first, end in store.seen) > max(
        int(dataset.sample_rows(shard).size.max()) for shard in range(len(dataset.manifest.shards))
    )


@pytest.mark.parametrize(
    ("subset", "held_out", "message"),
    [
        (
            SubsetConfig(share=1e-9),
            NOTHING,
            r"subset.share 1e-09 of the 60 samples of .* is less than one sample; allo",
        ),
        (WHOLE, HeldOutConfig(share=1e-9), r"held_out.share 1e-09 of the 60 samples of .* is less than one sample"),
        (SubsetConfig(count=61), NOTHING, r"subset.count is 61; allowed: at most 60, which .* has for it"),
        (SubsetConfig(count=60), HeldOutConfig(count=1), r"subset.count is 60; allowed: at most 59"),
        (WHOLE, HeldOutConfig(count=60), r"held_out takes all 60 samples of .*, and leaves none to train on; lower it"),
        (SubsetConfig(first=60), NOTHING, r"the subset is samples 60 to the end, but .* has 60 samples; allowed"),
        (SubsetConfig(end=61), NOTHING, r"the subset is samples 0 to 61, but .* has 60 samples; allowed"),
        (
            SubsetConfig(per_class=21),
            NOTHING,
            r"20 images of class 'c0', fewer than subset.per_class 21 \(3 of 3 class",
        ),
    ],
)
def test_what_cannot_be(packed: Path, subset: SubsetConfig, held_out: HeldOutConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened_parts(open_dataset(str(packed)), subset, held_out)


def test_settings_are_what_differs_from_the_default() -> None:
    assert settings_of(SubsetConfig(share=0.1, seed=3)) == {"share": 0.1, "seed": 3, "version": 1}
    assert settings_of(HeldOutConfig(count=5)) == {"count": 5, "version": 1}


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def runs_of(ids: set[int]) -> Runs:
    return joined(single(array(sorted(ids))))


@given(ids=sets)
def test_runs_are_their_ids(ids: set[int]) -> None:
    runs, rising = runs_of(ids), sorted(ids)
    assert runs.ids().tolist() == rising
    assert runs.num_samples == len(ids)
    assert runs.at(np.arange(len(ids))).tolist() == rising
    assert runs.num_below(np.arange(MOST + 1)).tolist() == [sum(one < end for one in ids) for end in range(MOST + 1)]
    ends = runs.first + runs.count
    assert (runs.first[1:] > ends[:-1]).all()  # as few as possible


@given(ids=sets, size=st.integers(1, 9))
def test_runs_are_cut_at_blocks(ids: set[int], size: int) -> None:
    found = cut(runs_of(ids), np.arange(0, MOST, size))
    assert found.ids().tolist() == sorted(ids)
    assert (found.first // size == (found.first + found.count - 1) // size).all()


@given(ids=sets, others=sets)
def test_ids_are_taken_out(ids: set[int], others: set[int]) -> None:
    found = without(runs_of(ids), runs_of(ids & others))
    assert found.ids().tolist() == sorted(ids - others)


def blocks_of(ids: set[int], size: int) -> tuple[Runs, np.ndarray]:
    units = cut(runs_of(ids), np.arange(0, MOST, size))
    return units, units.first // size


@given(ids=sets, size=st.integers(1, 9), key=st.integers(0, 2**64 - 1), data=st.data())
def test_fewer_are_among_more(ids: set[int], size: int, key: int, data: st.DataObject) -> None:
    units, names = blocks_of(ids, size)
    more = data.draw(st.integers(1, len(ids)))
    fewer = data.draw(st.integers(1, more))
    found = [set(chosen(units, num, names=names, key=key).ids().tolist()) for num in (fewer, more)]
    assert [len(one) for one in found] == [fewer, more]
    assert found[0] <= found[1] <= ids


def test_only_one_block_is_cut() -> None:
    units, names = blocks_of(set(range(MOST)), 8)
    found = chosen(units, 21, names=names, key=5).ids()
    nums = np.bincount(found // 8)
    assert sorted(nums[nums > 0].tolist()) == [5, 8, 8]


def test_every_sample_is_chosen_equally_often() -> None:
    units, names = blocks_of(set(range(MOST)), 4)
    found = [chosen(units, 20, names=names, key=key).ids() for key in range(3000)]
    nums = np.bincount(np.concatenate(found), minlength=MOST)  # 1,000 each, deviation 26
    assert 870 < nums.min() < nums.max() < 1130


def test_the_choice_never_changes() -> None:
    units = single(np.arange(20))
    assert chosen(units, 5, names=units.first, key=1).ids().tolist() == CHOSEN
    labels = np.arange(20) % 2
    assert per_class(np.arange(20), labels, 2, key=1).tolist() == OF_CLASSES


@given(seed=st.integers(0, 2**32), num_classes=st.integers(1, 5), most=st.integers(1, 6))
def test_as_many_ids_of_each_class(seed: int, num_classes: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(num_classes), most + 2))
    ids = np.sort(rng.choice(1000, labels.size, replace=False))
    by_id = dict(zip(ids.tolist(), labels.tolist(), strict=True))
    more, fewer = (set(per_class(ids, labels, num, key=seed).tolist()) for num in (most, max(1, most - 1)))
    assert fewer <= more <= set(ids.tolist())
    assert np.bincount([by_id[one] for one in more]).tolist() == [most] * num_classes


def test_a_range() -> None:
    assert between(3, 6).ids().tolist() == [3, 4, 5]
