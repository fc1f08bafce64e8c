"""rows.bin, which large datasets have: the same samples as from whole indices, by few bytes, and nothing damaged."""

import re
import shutil
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.data import index as index_stage
from jobs.settings.data import IndexJob
from shards.config import HeldOutConfig, ReadConfig, SubsetConfig
from shards.dataset import Dataset, open_dataset
from shards.errors import InvalidDataError, StorageError, UserError
from shards.index import read_block_rows, read_sample_rows
from shards.manifest import BLOCKS_PATH, MANIFEST_PATH, ROWS_PATH, index_path, sha256_hex
from shards.order import SampleOrder
from shards.part import opened_parts
from shards.reading.read import StreamReader
from shards.reading.samples import RawSample
from shards.sample_rows import SampleRows
from shards.store import open_store
from shards.verifying.verify import verify_dataset
from tests.rigs.datasets import file_hashes, packed_folders, packed_with_weights
from tests.rigs.hostile_datasets import cell, change_table, rehash
from tests.rigs.watched import watched

NUM_SAMPLES = 30


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same 30 images without and with rows.bin: shards of 4 (the last of 2), blocks of 3 and 1."""
    folder = tmp_path_factory.mktemp("rows")
    without = packed_folders(folder, num_classes=3, images_a_class=10).rename(folder / "without")
    shutil.rmtree(folder / "images")  # made again: the plan names the folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shards.packing.merge.LEAST_SAMPLES_WITH_ROWS", NUM_SAMPLES)
        return without, packed_folders(folder, num_classes=3, images_a_class=10)


@pytest.fixture
def store_path(both: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(both[1], tmp_path / "packed"))


def samples_of(dataset: Dataset, *, batch: int = 6, lanes: int = 2) -> list[RawSample]:
    """Two epochs, with the bytes of each sample."""
    order = SampleOrder(dataset.block_sizes, seed=11, lanes=lanes, window_blocks=2)
    with closing(StreamReader(ReadConfig(connections=2))) as stream:
        reader = stream.samples(dataset, order)
        batches = [reader.read(order.positions(step, batch, 0, 1)) for step in range(2 * dataset.num_samples // batch)]
        return [replace(one, data=bytes(one.data or b"")) for raw in batches for one in raw.samples]


def test_nothing_else_differs_and_small_datasets_have_none(both: tuple[Path, Path]) -> None:
    without, with_rows = map(file_hashes, both)
    assert with_rows.keys() - without.keys() == {ROWS_PATH}
    changed = {path for path in without if without[path] != with_rows[path]}
    assert changed == {BLOCKS_PATH, MANIFEST_PATH}
    assert verify_dataset(str(both[1])) == []


def test_the_samples_are_the_same(both: tuple[Path, Path]) -> None:
    expected, found = (samples_of(open_dataset(str(path))) for path in both)
    assert len(found) == 2 * NUM_SAMPLES
    assert all(one.data for one in found)
    assert found == expected


@pytest.mark.parametrize("subset", [SubsetConfig(count=12), SubsetConfig(per_class=4), SubsetConfig(first=3, end=21)])
def test_those_of_a_part_are(both: tuple[Path, Path], subset: SubsetConfig) -> None:
    parts = [opened_parts(open_dataset(str(path)), subset, HeldOutConfig())[0] for path in both]
    expected, found = (samples_of(part, batch=2) for part in parts)
    assert found == expected


def test_one_small_read_brings_the_rows_of_a_shard_and_no_index_is_read(both: tuple[Path, Path]) -> None:
    dataset, store = watched(both[1])
    for sample in [*range(NUM_SAMPLES), *range(NUM_SAMPLES)]:
        dataset.rows_of(sample, 1)
    reads = [(first, end) for path, first, end in store.seen if path == ROWS_PATH]
    assert len(reads) == len(dataset.manifest.shards), "once for two epochs"
    assert len(samples_of(dataset)) == 2 * NUM_SAMPLES
    assert [path for path in store.read_files if path.startswith("index/")] == []
    assert [read for read in store.seen if read[0] == ROWS_PATH] == [(ROWS_PATH, *read) for read in reads]
    assert sum(end - first for first, end in reads) <= 40 * NUM_SAMPLES
    before = sum((both[1] / index_path(shard)).stat().st_size for shard in range(len(dataset.manifest.shards)))
    assert sum(end - first for first, end in reads) < before / 20


def test_as_much_is_held_as_allowed(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.dataset.HELD_ROWS_BYTES", 0)
    monkeypatch.setattr("shards.dataset._SAMPLES_A_READ", 1)
    dataset, store = watched(both[1])
    for sample in (0, 1, 2, 3, 0):
        assert dataset.rows_of(sample, 1).offset.size == 1
    reads = [read for read in store.seen if read[0] == ROWS_PATH]
    assert len(reads) == 3, "blocks of 3 samples and 1, and the first again"
    assert dataset.rows_of(1, 3).to_bytes() == dataset.sample_rows(0).slice(1, 4).to_bytes()


def test_rows_that_came_wrong_once_are_read_again(both: tuple[Path, Path]) -> None:
    dataset, store = watched(both[1])
    _ = dataset.blocks
    store.spoiled.extend([False, True])
    assert dataset.rows_of(5, 1).offset.size == 1
    store.spoiled.extend([True, True])
    with pytest.raises(InvalidDataError, match=r"rows\.bin is damaged: bytes \d+ to \d+ are not those that blocks"):
        dataset.rows_of(9, 1)


def test_a_damaged_file_is_found(store_path: Path) -> None:
    path = store_path / ROWS_PATH
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(InvalidDataError, match=r"rows\.bin is damaged.*patchline verify"):
        samples_of(open_dataset(str(store_path)))
    found = [str(fault) for fault in verify_dataset(str(store_path))]
    assert any("rows.bin" in fault and "sha256" in fault for fault in found)
    assert any("is damaged" in fault for fault in found), "the rows of the shard, too"
    path.write_bytes(data[:50])
    with pytest.raises(InvalidDataError, match=r"rows\.bin is damaged"):
        samples_of(open_dataset(str(store_path)))
    path.unlink()
    with pytest.raises(UserError, match=r"rows\.bin.* but the manifest lists it"):
        samples_of(open_dataset(str(store_path)))
    (store_path / MANIFEST_PATH).unlink()
    with pytest.raises(UserError):
        open_dataset(str(store_path))


def test_a_dataset_that_vanished_is_no_damaged_dataset(store_path: Path) -> None:
    dataset = open_dataset(str(store_path))
    _ = dataset.blocks
    shutil.rmtree(store_path)
    with pytest.raises(StorageError, match=r"is the storage mounted"):
        dataset.rows_of(0, 1)


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("rows_end", 0, "the rows of block 2 are bytes"),
        ("rows_end", 1 << 40, "the rows of block 2 are bytes"),
        ("rows_end", -1, "column rows_end has -1"),
        ("rows_end", None, "column rows_end is null in row 2"),
        ("rows_crc32", 7, "rows.bin is damaged"),
    ],
)
def test_places_that_cannot_be_right_are_refused(store_path: Path, column: str, value: object, what: str) -> None:
    change_table(open_store(str(store_path)), BLOCKS_PATH, cell(column, 2, value))
    with pytest.raises(InvalidDataError, match=re.escape(what)):
        samples_of(open_dataset(str(store_path)))
    assert any(what in str(fault) for fault in verify_dataset(str(store_path)))


def test_a_table_without_the_places_is_refused(store_path: Path) -> None:
    change_table(open_store(str(store_path)), BLOCKS_PATH, lambda table: table.drop_columns("rows_end"))
    with pytest.raises(InvalidDataError, match="column rows_end is missing"):
        _ = open_dataset(str(store_path)).blocks


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("offset", -1, "column offset has -1"),
        ("offset", 1 << 40, "row 1 has offset 4096, inside or before the image of row 0"),
        ("size", 0, "column size has 0; allowed: 1 to"),
        ("height", 0, "column height has 0"),
        ("orientation", 9, "column orientation has 9; allowed: 1 to 8"),
        ("label_values", 3, "row 0 has label 3; allowed: 0 to 2"),
        ("label_values", -1, "column labels has -1"),
    ],
)
def test_rows_that_cannot_be_right_are_refused(store_path: Path, column: str, value: int, what: str) -> None:
    """Rows of the first block whose every checksum is right."""
    store, dataset = open_store(str(store_path)), open_dataset(str(store_path))
    rows = dataset.rows_of(0, 3)
    changed: Any = replace(rows)
    object.__setattr__(changed, column, np.array([value, *getattr(rows, column)[1:]], dtype=np.int64))
    data = changed.to_bytes()
    rehash(store, ROWS_PATH, data + store.read(ROWS_PATH)[len(data) :])
    change_table(store, BLOCKS_PATH, cell("rows_crc32", 0, zlib.crc32(data)))
    with pytest.raises(InvalidDataError, match=rf"rows\.bin cannot be right: {re.escape(what)}"):
        samples_of(open_dataset(str(store_path)))
    assert any("rows.bin" in str(fault) for fault in verify_dataset(str(store_path)))


LABELS = st.lists(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 9, width=32)), max_size=3), min_size=1, max_size=5)


def rows_with(labels: list[list[tuple[int, float]]], *, has_weights: bool) -> SampleRows:
    count = len(labels)
    values = [pair for row in labels for pair in row]
    return SampleRows(
        offset=np.arange(count, dtype=np.int64) * 512,
        size=np.full(count, 2**31 - 1, dtype=np.int64),
        height=np.arange(1, count + 1, dtype=np.int32),
        width=np.arange(2, count + 2, dtype=np.int32),
        orientation=np.ones(count, dtype=np.int8),
        crc32=np.full(count, 2**32 - 1, dtype=np.uint32),
        label_ends=np.cumsum([0, *map(len, labels)], dtype=np.int64),
        label_values=np.array([label for label, _ in values], dtype=np.int32),
        weight_values=np.array([weight for _, weight in values] if has_weights else [], dtype=np.float32),
    )


@given(LABELS, st.booleans())
def test_rows_come_back_as_they_were_written(labels: list[list[tuple[int, float]]], has_weights: bool) -> None:
    rows = rows_with(labels, has_weights=has_weights)
    found = read_block_rows(rows.to_bytes(), len(labels))
    for name, column in vars(rows).items():
        assert np.array_equal(getattr(found, name), column), name
        assert getattr(found, name).dtype == column.dtype, name
    halves = [rows.slice(0, 1), rows.slice(1, len(labels))] if len(labels) > 1 else [rows]
    assert SampleRows.joined(halves).to_bytes() == rows.to_bytes()


@given(st.binary(max_size=200), st.integers(0, 5))
def test_any_bytes_are_rows_or_refused(data: bytes, num_samples: int) -> None:
    try:
        found = read_block_rows(data, num_samples)
    except ValueError:
        return
    assert found.offset.size == num_samples
    assert found.to_bytes() == data


def test_weights_and_tars_of_others_have_rows_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.packing.merge.LEAST_SAMPLES_WITH_ROWS", 1)
    packed = packed_with_weights(tmp_path / "weights", ["a|b,1|0.5", "a,", "b,0.25", "a|b,0|3", "b,"])
    index_url, tars = str(tmp_path / "index"), packed_folders(tmp_path / "folders") / "shards"
    assert index_stage.run(IndexJob(url=str(tars), index_url=index_url)) == 0
    for url in (str(packed), index_url):
        dataset = open_dataset(url)
        assert verify_dataset(url) == []
        for shard, record in enumerate(dataset.manifest.shards):
            found = dataset.rows_of(record.first_sample_id, record.num_samples)
            expected = read_sample_rows(dataset.checked_file(index_path(shard)))
            assert found.to_bytes() == expected.to_bytes()
            assert found.weights_of(0) == expected.weights_of(0)
    assert sha256_hex(open_store(index_url).read(ROWS_PATH)) == open_dataset(index_url).manifest.files[ROWS_PATH]
