"""Parquet files with embedded images, as Hugging Face datasets write them."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.errors import ImageRefusedError, UserError
from shards.sources.entry import Entry, ImageBytes
from shards.sources.parquets import ParquetSource
from shards.store import open_store
from tests.rigs.images import image_bytes

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_images(path: Path, labels: list[Any], *, row_group_size: int = 3, names: Any = None) -> Path:
    """A file of generated images with seeds 0, 1, ..., one for each label; `names` as Hugging Face writes them."""
    images = [{"bytes": image_bytes(row), "path": f"{row}.jpg"} for row in range(len(labels))]
    table = pa.table({"image": pa.array(images, IMAGE), "label": pa.array(labels)})
    if names is not None:
        info = {"info": {"features": {"image": {"_type": "Image"}, "label": names}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def read(source: ParquetSource, *, max_bytes: int = 1 << 20) -> list[tuple[Entry, ImageBytes]]:
    return list(source.images(list(source.entries()), max_bytes=max_bytes))


def labels_of(source: ParquetSource) -> list[tuple[str, ...]]:
    return [entry.labels for entry, _ in read(source)]


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_row_groups_are_entries_and_their_images_come_in_order(where: str, tmp_path: Path, s3_bucket: str) -> None:
    root = str(tmp_path) if where == "folder" else f"s3://{s3_bucket}/in"
    for name, labels in (("a.parquet", [0, 1, 2, 0, 1]), ("b.parquet", [2, 2])):
        open_store(root).write(name, write_images(tmp_path / name, labels).read_bytes())
    source = ParquetSource(files=(f"{root}/*.parquet",))
    entries = list(source.entries())
    assert [(entry.name, entry.num_images) for entry in entries] == [
        *(("a.parquet:0", 3), ("a.parquet:1", 2), ("b.parquet:0", 2)),
    ]
    assert 3 * 500 < entries[0].num_bytes < (tmp_path / "a.parquet").stat().st_size
    images = read(source)
    assert [(entry.name, entry.labels) for entry, _ in images] == [
        *(("0.jpg", ("0",)), ("1.jpg", ("1",)), ("2.jpg", ("2",)), ("3.jpg", ("0",)), ("4.jpg", ("1",))),
        *(("0.jpg", ("2",)), ("1.jpg", ("2",))),
    ]
    assert [image for _, image in images] == [image_bytes(row) for row in (0, 1, 2, 3, 4, 0, 1)]
    assert list(source.images(entries[2:], max_bytes=1 << 20)) == images[5:]


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ([1, 0, 7, -1, None], [("1",), ("0",), ("7",), ("-1",), ()]),
        (["cat", " dog ", "", None], [("cat",), ("dog",), (), ()]),
        ([[0, 1], [1, 1], [], None], [("0", "1"), ("1", "1"), (), ()]),
        ([["a", "b"], ["c"]], [("a", "b"), ("c",)]),
    ],
)
def test_labels_of_every_kind(labels: list[Any], found: list[tuple[str, ...]], tmp_path: Path) -> None:
    path = write_images(tmp_path / "a.parquet", labels)
    source = ParquetSource(files=(str(path),), label_names=("zebra", "ant"))
    assert labels_of(source) == found
    assert source.known_labels() == ("zebra", "ant")


@pytest.mark.parametrize(
    ("feature", "known"),
    [
        ({"names": ["zebra", "ant"], "_type": "ClassLabel"}, ("zebra", "ant")),
        ({"feature": {"names": ["zebra", "ant"], "_type": "ClassLabel"}, "_type": "Sequence"}, ("zebra", "ant")),
        ([{"names": ["zebra", "ant"]}], ("zebra", "ant")),
        ({"dtype": "int64", "_type": "Value"}, None),
        ({"names": None}, None),
        ("nonsense", None),
        ([], None),
    ],
)
def test_names_written_into_the_file_are_used(feature: Any, known: tuple[str, ...] | None, tmp_path: Path) -> None:
    path = write_images(tmp_path / "a.parquet", [1, 0], names=feature)
    source = ParquetSource(files=(str(path),))
    assert source.known_labels() == known
    assert labels_of(source) == [("1",), ("0",)]
    assert ParquetSource(files=(str(path),), label_names=("x", "y")).known_labels() == ("x", "y")


@pytest.mark.parametrize("names", [{"0": "zebra", "1": "ant"}, "za", [1, 2], 2, True])
def test_names_that_are_no_list_of_texts_are_refused(names: Any, tmp_path: Path) -> None:
    path = write_images(tmp_path / "a.parquet", [1, 0], names={"names": names, "_type": "ClassLabel"})
    with pytest.raises(UserError):
        ParquetSource(files=(str(path),)).known_labels()
    assert ParquetSource(files=(str(path),), label_names=("x", "y")).known_labels() == ("x", "y")


@pytest.mark.parametrize(
    ("kind", "value"), [(pa.timestamp("s"), 10**15), (pa.date32(), 10**7), (pa.list_(pa.timestamp("s")), [10**15])]
)
def test_dates_that_python_has_no_value_for_refuse_their_images(kind: pa.DataType, value: Any, tmp_path: Path) -> None:
    path, today = write_images(tmp_path / "a.parquet", [1, 1]), [0] if pa.types.is_list(kind) else 0
    table = pq.read_table(path).set_column(1, "label", pa.array([value, today], kind))
    pq.write_table(table, path)
    refused = [str(image) for _, image in read(ParquetSource(files=(str(path),)))]
    said = r"its value in column 'label' is a .* that is out of range; allowed: text, whole numbers and lists of them"
    assert re.fullmatch(said, refused[0])
    assert re.fullmatch(r"its label .* is a date(time)?; allowed: text, whole numbers and lists of them", refused[1])


def test_files_that_disagree_on_names_are_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "a.parquet", [0], names={"names": ["cat", "dog"]})
    write_images(tmp_path / "b.parquet", [0], names={"names": ["dog", "cat"]})
    with pytest.raises(UserError):
        list(ParquetSource(files=(str(tmp_path),)).entries())
    given = ParquetSource(files=(str(tmp_path),), label_names=("x", "y"))
    assert labels_of(given) == [("0",), ("0",)]


def test_images_that_are_missing_empty_or_too_large(tmp_path: Path) -> None:
    images = [
        *({"bytes": None, "path": "x.jpg"}, {"bytes": b"data", "path": None}, {"bytes": b"", "path": "a\nb"}, None),
        {"bytes": b"12345", "path": "5"},
    ]
    table = pa.table({"image": pa.array(images, IMAGE), "label": list("abcde")})
    pq.write_table(table, tmp_path / "a.parquet")
    found = read(ParquetSource(files=(str(tmp_path / "a.parquet"),)), max_bytes=4)
    assert [entry.name for entry, _ in found] == ["x.jpg", "a.parquet:0:1", "a\nb", "a.parquet:0:3", "5"]
    missing, data, empty, null, large = (image for _, image in found)
    assert isinstance(missing, OSError)
    assert isinstance(null, OSError)
    assert (data, empty) == (b"data", b"")
    assert isinstance(large, ImageRefusedError)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_a_column_of_plain_bytes(kind: pa.DataType, tmp_path: Path) -> None:
    table = pa.table({"jpeg": pa.array([b"1", b"2"], kind), "class": [[{"a": 1}], [{"a": 2}]]})
    pq.write_table(table, tmp_path / "a.parquet")
    source = ParquetSource(files=(str(tmp_path),), image_column="jpeg", label_column="class")
    assert [(entry.name, str(image)) for entry, image in read(source)] == [
        ("a.parquet:0:0", "its label {'a': 1} is a dict; allowed: text, whole numbers and lists of them"),
        ("a.parquet:0:1", "its label {'a': 2} is a dict; allowed: text, whole numbers and lists of them"),
    ]


def test_few_large_images_are_in_memory_at_once(tmp_path: Path) -> None:
    images = [{"bytes": bytes([number]) * (8 << 20), "path": None} for number in range(12)]
    table = pa.table({"image": pa.array(images, IMAGE), "label": list(range(12))})
    pq.write_table(table, tmp_path / "a.parquet", write_batch_size=1, use_dictionary=False)
    del table
    source = ParquetSource(files=(str(tmp_path),))
    entries, before, most = list(source.entries()), pa.total_allocated_bytes(), 0
    for number, (_, image) in enumerate(source.images(entries, max_bytes=64 << 20)):
        most = max(most, pa.total_allocated_bytes() - before)
        assert image == images[number]["bytes"]
    assert most < 40 << 20


def test_a_damaged_row_group_refuses_its_images_and_no_others(tmp_path: Path) -> None:
    path = write_images(tmp_path / "a.parquet", list(range(6)))
    source = ParquetSource(files=(str(path),))
    entries = list(source.entries())
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    data[start : start + 400] = b"\xff" * 400
    path.write_bytes(data)
    images = list(source.images(entries, max_bytes=1 << 20))
    assert len(images) == 6
    assert all("damaged or missing Parquet row group" in str(image) for _, image in images[:3])
    assert [image for _, image in images[3:]] == [image_bytes(row) for row in (3, 4, 5)]
    path.unlink()
    assert all(isinstance(image, OSError) for _, image in source.images(entries, max_bytes=1 << 20))


def test_bad_files_are_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    pq.write_table(pa.table({"img": ["x"], "label": [1]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({"image": ["x"], "label": [1]}), tmp_path / "words.parquet")
    for files, message in (
        ((), "--source.files is missing"),
        ((str(tmp_path / "none*.parquet"),), "matches no file"),
        ((str(tmp_path / "text.parquet"),), "is not a readable Parquet file"),
        ((str(tmp_path / "other.parquet"),), "has no column 'image'; it has 'img', 'label'; set --source.image-column"),
        ((str(tmp_path / "words.parquet"),), "column 'image' is string; allowed: struct<bytes, path> and binary"),
    ):
        with pytest.raises(UserError) as caught:
            list(ParquetSource(files=files).entries())
        assert message in str(caught.value)


def test_cifar10_has_its_ten_thousand_test_images(test_data: Path) -> None:
    source = ParquetSource(files=(str(test_data / "cifar10" / "test.parquet"),))
    entries = list(source.entries())
    assert sum(entry.num_images for entry in entries) == 10_000
    images = list(source.images(entries, max_bytes=1 << 20))
    assert len(images) == 10_000
    assert {entry.labels for entry, _ in images} == {(str(label),) for label in range(10)}
    assert all(isinstance(image, bytes) and image.startswith(b"\xff\xd8\xff") for _, image in images)
