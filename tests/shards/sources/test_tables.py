"""Rows of tables, and the labels and weights in their cells."""

import codecs
import gzip
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.errors import ImageRefusedError, UserError
from shards.sources.tables import read_rows, weighted, written_labels
from shards.store import open_store

COLUMNS = {"path-column": "path", "label-column": "label"}
CSV = (
    b"\xef\xbb\xbfpath, other,label,\r\n"
    b"a b.jpg,1,cat\r\n"
    b"too,few\r\n"
    b'"comma, ""quote"" and so on.jpg",,dog\r\n'
    b"\r\n"
    b"caf\xe9.jpg,x,\r\n"
    b"one,two,three,four\r\n"
    b",,"
)
ROWS = [
    (2, (b"a b.jpg", b"cat")),
    (3, "the row has 2 columns, the header has 3"),
    (4, (b'comma, "quote" and so on.jpg', b"dog")),
    (6, (b"caf\xe9.jpg", b"")),
    (7, "the row has 4 columns, the header has 3"),
    (8, (b"", b"")),
]
LONG = b"path,label\na.jpg,x\n"
TWO = [(b"a.jpg", b"cat"), (b"b.jpg", b"dog")]


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


@pytest.mark.parametrize("column", ["path", "label"])
@pytest.mark.parametrize(("kind", "value"), [(pa.timestamp("s"), 10**15), (pa.date32(), 10**7)])
def test_a_date_that_python_has_no_value_for_refuses_its_row(
    column: str, kind: pa.DataType, value: int, tmp_path: Path
) -> None:
    columns = {"path": pa.array(["x", "y"]), "label": pa.array(["a", "b"]), column: pa.array([value, None], kind)}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    (_, first), (_, second) = rows(str(tmp_path / "t.parquet"))
    assert "that is out of range" in str(first)
    assert second == ((None, "b") if column == "path" else ("y", None))
    wanted = {"path-column": "path", "label-column": "label"}
    (_, beside), (_, whole) = read_rows(str(tmp_path / "t.parquet"), wanted, beside="weights")
    assert str(beside) == str(first)
    assert whole == (*second, None)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.csv", b"path,name\n", "has no column 'label'; it has 'path', 'name'; set --source.label-column"),
        ("t.csv", b"path;class\n", "has no column 'label'; it has 'path', 'class'; set --source.label-column"),
        ("t.csv", b"path,label,path\n", "has 2 columns 'path'"),
        ("t.csv", b"", "cannot be read: it is empty"),
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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(LONG + b"b.jpg," + b"x" * (3 << 20), "line 3 has more than 1,048,576 bytes", id="a cell of 3 MB"),
        pytest.param(
            LONG * 1000 + b'b.jpg,"' + LONG * 200_000, "line 2001: the quotes of", id="a quote that stays open"
        ),
        pytest.param(b"a" * (2 << 20), "line 1 has more than 1,048,576 bytes", id="a line without an end"),
        pytest.param(bytes(2 << 20), "it has NUL characters", id="zeros"),
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


def test_a_short_row_that_is_not_utf_8_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"path,label\na.jpg,x\ncaf\xe9.jpg\n")
    short = (3, "the row has 1 columns, the header has 2")
    assert rows(str(tmp_path / "t.csv")) == [(2, (b"a.jpg", b"x")), short]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param("t.csv", b"path,label\ra.jpg,cat\rb.jpg,dog\r", id="CR alone"),
        pytest.param("t.csv", b"path;label\na.jpg;cat\nb.jpg;dog\n", id="semicolons"),
        pytest.param("t.csv", b'"path";"label"\n"a.jpg";"cat"\n"b.jpg";"dog"\n', id="semicolons and quotes"),
        pytest.param("t.csv", b'"path"\t"label"\n"a.jpg"\t"cat"\nb.jpg\tdog\n', id="tabs and quotes in a .csv"),
        pytest.param("t.csv", b"path\tlabel\na.jpg\tcat\nb.jpg\tdog\n", id="tabs in a .csv"),
        pytest.param("t.tsv", b"path,label\na.jpg,cat\nb.jpg,dog\n", id="commas in a .tsv"),
        pytest.param("t.csv", b"path,label\na.jpg,cat,\nb.jpg,dog,\n", id="a separator at the end of the rows"),
        pytest.param("t.csv", b"path,label,,\na.jpg,cat,,\nb.jpg,dog\n", id="separators at the end of the header"),
        pytest.param("t.csv", b"path , label\n a.jpg , cat\n b.jpg,  dog \n", id="spaces beside values"),
        pytest.param("t.csv", b'"path", "label"\n"a.jpg" , "cat"\n"b.jpg",dog\n', id="quotes beside spaces"),
        pytest.param("t.tsv", b'path\tlabel\n"a.jpg"\t "cat" \nb.jpg\tdog\n', id="quotes in a .tsv"),
        pytest.param("t.csv", b"\n\npath,label\n\na.jpg,cat\n  \nb.jpg,dog\n\n", id="empty lines"),
        pytest.param("t.csv", "path,label\r\na.jpg,cat\r\nb.jpg,dog".encode("utf-16"), id="UTF-16"),
        pytest.param(
            "t.csv", codecs.BOM_UTF16_BE + "path,label\na.jpg,cat\nb.jpg,dog\n".encode("utf-16-be"), id="UTF-16 BE"
        ),
    ],
)
def test_lists_as_other_programs_write_them(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    assert [values for _, values in rows(str(tmp_path / name))] == TWO


@pytest.mark.parametrize("block_bytes", [1 << 20, 7], ids=["whole", "blocks of 7 bytes"])
def test_a_text_is_the_same_however_it_is_cut(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.sources.tables._BLOCK_BYTES", block_bytes)
    monkeypatch.setattr("shards.sources.tables._MOST_LINE_BYTES", 1 << 20)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        text = "path,label\r\n" + "".join(f"é{number}.jpg,cat\r\n" for number in range(50))
        (tmp_path / "t.csv").write_bytes(text.encode(encoding))
        assert rows(str(tmp_path / "t.csv")) == [(2 + n, (f"é{n}.jpg".encode(), b"cat")) for n in range(50)]


def test_quotes_inside_a_value_stay(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('path,label\n"5"" plate.jpg","so called ""cat"""\nsix"by"nine.jpg,x\n')
    found = [values for _, values in rows(str(tmp_path / "t.csv"))]
    assert found == [(b'5" plate.jpg', b'so called "cat"'), (b'six"by"nine.jpg', b"x")]


def test_a_header_alone_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"path,label\n")
    assert rows(str(tmp_path / "t.csv")) == []


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        (b"cat", ("cat",)),
        (b" cat | dog ||", ("cat", "dog")),
        (b"", ()),
        ("猫".encode(), ("猫",)),
        ("cafe\u0301".encode(), ("caf\u00e9",)),  # macOS' form of the same name
        ("a|b", ("a|b",)),  # text in a Parquet file is one label
        (["a", "b"], ("a", "b")),
        ([1, 7, 7], ("1", "7", "7")),
        (-1, ("-1",)),
        (-1.0, ("-1",)),
        (3.0, ("3",)),
        (2.5, ("2.5",)),
        (1e300, (str(int(1e300)),)),
        (b"0.0|0|-1", ("0.0", "0", "-1")),
        (b"NaN|None", ("NaN", "None")),  # a labels file may list them
        (float("nan"), ()),
        (None, ()),
        ([None, "a"], ("a",)),
        ([1, None, 0], ("1", "", "0")),  # of a vector, each value keeps its place
        ([True, False], ("1", "0")),
        ([Decimal("1.0"), Decimal(2)], ("1.0", "2")),
        (str([0, 1] * 300), ("0", "1") * 300),  # too long for a name
        ("0 1 " * 300, ("0", "1") * 300),
    ],
)
def test_labels_are_kept_as_they_are_written(value: Any, labels: tuple[str, ...]) -> None:
    assert written_labels(value, separator="|") == labels


def test_without_a_separator_all_is_one_label() -> None:
    assert written_labels(b"a|b") == ("a|b",)


@pytest.mark.parametrize(
    ("value", "weights"),
    [
        (b"0.5|1", (0.5, 1.0)),
        (b"", ()),
        (None, ()),
        ([], ()),
        ([0.1, 1], (float(np.float32(0.1)), 1.0)),
    ],
)
def test_weights(value: Any, weights: tuple[float, ...]) -> None:
    assert weighted(("a", "b"), value, separator="|") == (("a", "b"), weights)


@pytest.mark.parametrize(
    ("labels", "value", "message"),
    [
        (("a", "b"), b"0.5", "1 weights for 2 labels"),
        (("a",), [0.5, 0.5], "2 weights for 1 labels"),
        ((), 0.5, "1 weights for 0 labels"),
        (("a",), b"much", "the weight 'much'"),
        (("a",), [float("nan")], "the weight 'nan'"),
        (("a",), b"1e60", "the weight '1e60'"),
        (("a",), b"-1", "the weight '-1'"),
        (("a",), [None], "the weight 'None'"),
    ],
)
def test_weights_that_do_not_belong_to_the_labels(labels: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(ImageRefusedError) as caught:
        weighted(labels, value, separator="|")
    assert message in str(caught.value)
