"""Rows of tables are streamed, and invalid rows are reported with their position."""

import gzip
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.errors import ImageRefusedError, InvalidDataError, UserError
from shards.sources.tables import read_rows
from shards.store import open_store

COLUMNS = {"path-column": "path", "label-column": "label"}
CSV = (
    b"\xef\xbb\xbfpath,other,label\r\n"
    b"a b.jpg,1,cat\r\n"
    b"too,few\r\n"
    b'"comma, ""quote"" and\nnewline.jpg",,dog\r\n'
    b"\r\n"
    b"caf\xe9.jpg,x,\r\n"
    b"one,two,three,four\r\n"
    b",,"
)
ROWS = [
    (2, (b"a b.jpg", b"cat")),
    (3, "the row has 2 columns, the header has 3"),
    (4, (b'comma, "quote" and\nnewline.jpg', b"dog")),
    (5, (b"caf\xe9.jpg", b"")),
    (6, "the row has 4 columns, the header has 3"),
    (7, (b"", b"")),
]


def rows(path: str) -> list[tuple[int, object]]:
    return [
        (number, str(values) if isinstance(values, ImageRefusedError) else values)
        for number, values in read_rows(path, COLUMNS)
    ]


@pytest.mark.parametrize("name", ["t.csv", "T.CSV", "t.csv.gz"])
def test_a_csv_with_all_that_is_odd(name: str, tmp_path: Path, s3_bucket: str) -> None:
    data = gzip.compress(CSV) if name.endswith(".gz") else CSV
    for root in (str(tmp_path), f"s3://{s3_bucket}/x"):
        open_store(root).write(name, data)
        assert rows(f"{root}/{name}") == ROWS


def test_bad_rows_stay_in_their_places_over_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.sources.tables._BLOCK_BYTES", 256)
    lines = ["path\tlabel"] + [f"{number}" if number % 7 == 0 else f"{number}\tx" for number in range(2, 1000)]
    (tmp_path / "t.tsv").write_text("\n".join(lines))
    found = rows(str(tmp_path / "t.tsv"))
    assert [number for number, _ in found] == list(range(2, 1000))
    assert [number for number, values in found if isinstance(values, str)] == list(range(7, 1000, 7))


def test_parquet_gives_its_own_types(tmp_path: Path) -> None:
    table = pa.table({"label": [["a", "b"], [], None], "extra": [1, 2, 3], "path": ["x", None, "z"]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    assert rows(str(tmp_path / "t.parquet")) == [(0, ("x", ["a", "b"])), (1, (None, [])), (2, ("z", None))]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.csv", b"path,name\n", "has no column 'label'; it has 'path', 'name'; set --source.label-column"),
        ("t.csv", b"path,label,path\n", "has 2 columns 'path'"),
        ("t.csv", b"", "cannot be read: Empty CSV file"),
        ("t.csv.gz", b"path,label\n", "cannot be read"),
        ("t.parquet", b"path,label\n", "cannot be read"),
        ("t.xlsx", b"", "is not a table; give a file that ends in .csv"),
    ],
)
def test_a_table_of_no_use_is_the_users_mistake(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as caught:
        rows(str(tmp_path / name))
    assert message in str(caught.value)


def test_a_missing_table_is_the_users_mistake(tmp_path: Path, s3_bucket: str) -> None:
    for path in (f"{tmp_path}/none.csv", f"s3://{s3_bucket}/none.parquet"):
        with pytest.raises(UserError, match="cannot be read"):
            rows(path)


LONG = b"path,label\na.jpg,x\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(LONG + b"b.jpg," + b"x" * (3 << 20), "row 3 or a later one has more than", id="a cell of 3 MB"),
        pytest.param(LONG * 1000 + b'b.jpg,"' + LONG * 200_000, "is a quote not closed?", id="a quote that stays open"),
        pytest.param(b"a" * (2 << 20), "its first line has no end in 1,048,576 bytes", id="a line without an end"),
        pytest.param(bytes(2 << 20), "its first line has no end in 1,048,576 bytes", id="zeros"),
        pytest.param(b"path,label" + b",c" * 100_000, "has 100,002 columns; allowed: 10,000", id="many columns"),
        pytest.param(b"p\xffth,label\na,b\n", "can't decode byte 0xff", id="a header that is not UTF-8"),
        pytest.param(b"a,b" + b",c" * 99 + b"\n", "it has 'a', 'b', 'c', 'c',", id="columns that nobody asked for"),
    ],
)
@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_tables_without_an_end(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    with pytest.raises(UserError) as caught:
        rows(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "straddling" not in str(caught.value)


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_has_no_end_is_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is not a regular file; give a file"):
        rows(str(path))


def test_a_short_row_that_is_not_utf_8_is_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_bytes(b"path,label\na.jpg,x\ncaf\xe9.jpg\n")
    hook = sys.unraisablehook
    with pytest.raises(UserError, match=r"t\.csv cannot be read: .*Row #3: Expected 2 columns, got 1"):
        rows(str(tmp_path / "t.csv"))
    assert capfd.readouterr().err == ""
    assert sys.unraisablehook is hook


def test_a_header_alone_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"path,label\n")
    assert rows(str(tmp_path / "t.csv")) == []


def test_a_list_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty lines, which are no rows: a gigabyte of them took a minute."""
    monkeypatch.setattr("shards.sources.tables._SMALL", 1 << 20)
    bomb = tmp_path / "a.csv.gz"
    bomb.write_bytes(gzip.compress(b"path,label\n" + b"\n" * (8 << 20)))
    with pytest.raises(InvalidDataError, match=r"a\.csv\.gz: it unpacks to more than .* bytes; allowed: 200 times"):
        list(read_rows(str(bomb), {"path-column": "path"}))
