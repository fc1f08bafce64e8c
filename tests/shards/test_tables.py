"""Tables of strangers: bounded, typed, ranged; Arrow's errors become ours."""

import errno
import random

import pyarrow as pa
import pytest

from shards import tables
from shards.config_values import Range
from shards.tables import TableSchema, arrow_faults, read_checked, table_bytes

SCHEMA = pa.schema([("n", pa.int32()), ("name", pa.string()), ("labels", pa.list_(pa.int32())), ("w", pa.float32())])
RULES = TableSchema(
    schema=SCHEMA, ranges={"n": Range(0, 9), "labels": Range(0), "w": Range(0)}, may_be_null=frozenset({"labels"})
)


def table(**columns: object) -> pa.Table:
    values = {"n": [1, 2], "name": ["a", "ü"], "labels": [[1, 2], None], "w": [0.5, 1.0]} | columns
    return pa.table({name: pa.array(values[name], SCHEMA.field(name).type) for name in SCHEMA.names})


def test_a_table_comes_back() -> None:
    assert read_checked(table_bytes(table()), RULES, most_rows=2) == table()
    assert read_checked(table_bytes(table()), RULES, ["name"], most_rows=2).to_pydict() == {"name": ["a", "ü"]}
    empty = read_checked(table_bytes(SCHEMA.empty_table()), RULES, most_rows=2)
    assert empty.schema == SCHEMA
    in_groups = pa.concat_tables([table()] * 50)
    assert read_checked(table_bytes(in_groups, row_group_size=7), RULES, most_rows=100) == in_groups


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (table(n=[1, None]), "column n is null in row 1"),
        (table(n=[1, 10]), "column n has 10; allowed: 0 to 9"),
        (table(labels=[[1], [-5]]), "column labels has -5; allowed: 0 or more"),
        (table(labels=[[1], [None]]), "column labels has a null in a list"),
        (table(w=[1.0, float("inf")]), "column w has inf"),
        (table(name=["a", None]), "column name is null in row 1"),
        (pa.concat_tables([table()] * 2), "it declares 4 rows; allowed: 0 to 3"),
        (table().drop_columns("n"), "column n is missing; allowed: one int32"),
        (table().append_column("n", [[1, 2]]), "column n is there twice"),
        (table().set_column(0, "n", [["1", "2"]]), "column n is of type 'string'; allowed: int32"),
    ],
)
def test_what_cannot_be_right_is_refused(wrong: pa.Table, message: str) -> None:
    with pytest.raises(ValueError, match=r"column|rows") as caught:
        read_checked(table_bytes(wrong), RULES, most_rows=3)
    assert message in str(caught.value)


def test_a_text_that_many_rows_share_is_not_copied_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST_BYTES", 1 << 20)
    rules = TableSchema(schema=pa.schema([("name", pa.string())]))
    data = table_bytes(pa.table({"name": ["x" * 10_000] * 1000}))
    assert len(data) < 2000
    with pytest.raises(ValueError, match="column name has 10000000 bytes of text; allowed: 0 to 1,048,576"):
        read_checked(data, rules, most_rows=1000)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("_MOST_COLUMNS", "it declares 4 columns"),
        ("_MOST_GROUPS", "it declares 2 row groups"),
        ("_MOST_VALUES", "1 values and"),
        ("_MOST_BYTES", "decompressed bytes; allowed: 0 to 0"),
    ],
)
def test_the_footer_is_bounded(monkeypatch: pytest.MonkeyPatch, limit: str, message: str) -> None:
    data = table_bytes(table(), row_group_size=1)
    assert read_checked(data, RULES, most_rows=2) == table()
    monkeypatch.setattr(tables, limit, 0)
    with pytest.raises(ValueError, match="it declares") as caught:
        read_checked(data, RULES, most_rows=2)
    assert message in str(caught.value)


def test_arrows_words_become_ours_and_a_failing_disk_stays_one() -> None:
    for error in (pa.ArrowInvalid("x\ny"), pa.ArrowNotImplementedError("x"), OSError("Unexpected end of stream")):
        with pytest.raises(ValueError, match=r"^not a sound Parquet file: '"), arrow_faults():
            raise error
    with pytest.raises(OSError, match="Input/output"), arrow_faults():
        raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(FileNotFoundError), arrow_faults():
        raise FileNotFoundError("a")


def test_any_byte_may_be_wrong() -> None:
    """Values may differ unnoticed (the sha256 is checked elsewhere); nothing but ValueError is raised."""
    data, draw = table_bytes(pa.concat_tables([table()] * 20)), random.Random(0)
    for _ in range(1500):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(len(data))] = draw.randrange(256)
        try:
            found = read_checked(bytes(changed), RULES, most_rows=100)
        except ValueError:
            continue
        assert found.schema == SCHEMA
        assert found.num_rows <= 100
