"""Parquet files with embedded images, as Hugging Face datasets write them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.errors import UserError
from shards.parquets import ParquetSource
from tests.rigs.images import image_bytes

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_images(path: Path, labels: list[int | None], *, row_group_size: int = 3) -> Path:
    """A file of generated images, one a label; seeds run on from the label."""
    images = [{"bytes": image_bytes(row), "path": f"{row}.jpg"} for row in range(len(labels))]
    table = pa.table({"image": pa.array(images, IMAGE), "label": pa.array(labels, pa.int64())})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def test_entries_and_bytes_over_files_and_row_groups(tmp_path: Path) -> None:
    write_images(tmp_path / "a.parquet", [0, 1, 2, 0, 1])
    write_images(tmp_path / "b.parquet", [2, 2])
    source = ParquetSource(files=(str(tmp_path / "*.parquet"),))
    entries = list(source.entries())
    assert [entry.locator for entry in entries] == [
        *("0:0:0", "0:0:1", "0:0:2", "0:1:0", "0:1:1"),
        *("1:0:0", "1:0:1"),
    ]
    assert [entry.label_name for entry in entries] == ["0", "1", "2", "0", "1", "2", "2"]
    backwards = [entry.locator for entry in reversed(entries)]
    rows = [1, 0, 4, 3, 2, 1, 0]
    assert list(source.reader().read_many(backwards)) == [image_bytes(row) for row in rows]


def test_names_stand_for_integers_and_keep_their_order(tmp_path: Path) -> None:
    path = write_images(tmp_path / "a.parquet", [1, 0, 7, None])
    source = ParquetSource(files=(str(path),), label_names=("zebra", "ant"))
    assert [entry.label_name for entry in source.entries()] == ["ant", "zebra", None, None]
    assert source.known_labels() == ("zebra", "ant")


def test_a_row_without_bytes_is_an_error_of_its_own(tmp_path: Path) -> None:
    images = [{"bytes": None, "path": "x.jpg"}, {"bytes": b"data", "path": None}]
    table = pa.table({"image": pa.array(images, IMAGE), "label": ["cat", "dog"]})
    pq.write_table(table, tmp_path / "a.parquet")
    source = ParquetSource(files=(str(tmp_path / "a.parquet"),))
    assert [entry.name for entry in source.entries()] == ["x.jpg", "a.parquet:0:1"]
    first, second = source.reader().read_many(["0:0:0", "0:0:1"])
    assert isinstance(first, OSError)
    assert second == b"data"


def test_bad_files_are_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    pq.write_table(pa.table({"img": ["x"], "label": [1]}), tmp_path / "other.parquet")
    for files, message in (
        ((), "--source.files is missing"),
        ((str(tmp_path / "none*.parquet"),), "matches no file"),
        ((str(tmp_path / "text.parquet"),), "not a readable Parquet file"),
        ((str(tmp_path / "other.parquet"),), "has no column image.bytes; it has img, label"),
    ):
        with pytest.raises(UserError, match=message.replace(".", r"\.")):
            list(ParquetSource(files=files).entries())


def test_cifar10_has_its_ten_thousand_test_images(test_data: Path) -> None:
    source = ParquetSource(files=(str(test_data / "cifar10" / "test.parquet"),))
    entries = list(source.entries())
    assert len(entries) == 10_000
    assert {entry.label_name for entry in entries} == {str(label) for label in range(10)}
    (image,) = source.reader().read_many([entries[5000].locator])
    assert isinstance(image, bytes)
    assert image.startswith(b"\xff\xd8\xff")
