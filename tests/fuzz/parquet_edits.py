"""Edits of a Parquet file by structure: columns dropped, renamed, of other types, nulls, values, rows, the footer."""

import io
import json
from contextlib import suppress
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz import json_edits
from tests.fuzz.byte_edits import Edit

TYPES = (
    *("string", "binary", "int8", "int32", "int64", "uint64", "float32", "float64", "bool", "null", "list", "struct"),
    *("large_string", "timestamp", "dictionary", "decimal", "nested"),
)
VALUES: tuple[Any, ...] = (
    -1,
    0,
    1,
    255,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    1 << 62,
    -(1 << 62),
    0.5,
    float("nan"),
    "",
    "x",
)
VALUES += ("../x", "\0", "/etc/passwd", "\x1b]0;x\x07", "9" * 5000, [], [-5], [1 << 30], [None], [[1]], b"\xff", True)


def propose(rng: Random, data: bytes) -> Edit:
    """An edit of a table."""
    table = pq.read_table(pa.BufferReader(data))
    column, row = rng.choice(table.column_names), rng.randrange(max(1, table.num_rows))
    footer = sorted(key for key in table.schema.metadata or {} if key != b"huggingface")
    names = ("drop", "rename", "type", "type", "null", "nulls", "set", "set", "set", "rows", "order")
    name = rng.choice((*names, *["footer"] * bool(footer)))
    if name == "footer":
        key = rng.choice(footer)
        if rng.random() < 0.2:
            return ["no footer", key.decode()]
        return ["footer", key.decode(), json_edits.propose(rng, table.schema.metadata[key])]
    if name == "type":
        return ["type", column, rng.choice(TYPES)]
    if name == "set":
        return ["set", column, row, _shown(rng.choice(VALUES))]
    if name == "rename":
        return ["rename", column, rng.choice((column.upper(), "", *table.column_names))]
    if name == "rows":
        return ["rows", rng.choice((0, 1, row, table.num_rows - 1, table.num_rows + 1, 3 * table.num_rows))]
    return [name, column, row]


def apply(data: bytes, edit: Edit) -> bytes:
    """The file after the edit."""
    file = io.BytesIO()
    pq.write_table(_edited(pq.read_table(pa.BufferReader(data)), edit), file, compression="zstd")
    return file.getvalue()


def _edited(table: pa.Table, edit: Edit) -> pa.Table:
    name, *rest = edit
    if name in ("footer", "no footer"):
        return table.replace_schema_metadata(_footer(dict(table.schema.metadata), *rest))
    if name == "rows":
        return pa.concat_tables([table] * (1 + rest[0] // max(1, table.num_rows))).slice(0, rest[0])
    place = table.column_names.index(rest[0])
    if name == "drop":
        return table.remove_column(place)
    if name == "rename":
        return table.rename_columns([rest[1] if n == place else one for n, one in enumerate(table.column_names)])
    if name == "order":
        return table.slice(rest[1]) if rest[1] % 2 else table.take(list(range(table.num_rows))[::-1])
    values = table.column(place).to_pylist()
    if name == "nulls":
        values = [None] * len(values)
    elif name in ("null", "set"):
        values[rest[1]] = None if name == "null" else _value(rest[2])
    kind = rest[1] if name == "type" else None
    return table.set_column(place, rest[0], _array(values, kind, table.schema.field(place).type))


def _array(values: list[Any], kind: str | None, now: pa.DataType) -> pa.Array:
    """The values in the column's own type if they are of it, else in one that holds them."""
    if kind is None:
        for own in (now, None):
            with suppress(pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError):
                return pa.array(values, own)
        return pa.array([None if value is None else str(value) for value in values])
    if kind in ("list", "nested", "struct"):
        return pa.array([{"list": [value], "nested": [[[value]]], "struct": {"a": value}}[kind] for value in values])
    numbers = [value if isinstance(value, int | float) else n for n, value in enumerate(values)]
    types = {
        **{name: getattr(pa, name)() for name in TYPES[2:8]},
        "null": pa.null(), "bool": pa.bool_(), "timestamp": pa.timestamp("us"), "decimal": pa.decimal128(20, 2),
    }  # fmt: skip
    if kind in types:
        converted = {"null": [None] * len(values), "bool": [n % 2 == 0 for n in range(len(values))]}.get(kind, numbers)
        return pa.array(converted).cast(types[kind], safe=False)
    texts = pa.array([str(value) for value in values])
    return texts.dictionary_encode() if kind == "dictionary" else texts.cast(getattr(pa, kind)())


def _footer(metadata: dict[bytes, bytes], key: str, edit: Edit | None = None) -> dict[bytes, bytes]:
    old = metadata.pop(key.encode())
    return metadata | ({key.encode(): json_edits.apply(old, edit)} if edit else {})


def _shown(value: Any) -> Any:
    """As JSON can hold it."""
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def _value(shown: Any) -> Any:
    return bytes.fromhex(shown["bytes"]) if isinstance(shown, dict) else shown


def footer_of(data: bytes, key: bytes) -> Any:
    """The JSON that stands in the footer under `key`."""
    return json.loads(pq.read_schema(pa.BufferReader(data)).metadata[key])
