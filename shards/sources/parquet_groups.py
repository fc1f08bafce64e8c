"""Parquet files of others: what their footers say, compared with the file before anything is allocated by it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shards.class_names import MOST_LABELS
from shards.storage.objects import MissingObjectError

if TYPE_CHECKING:
    from shards.parquet.files import ParquetPieces

MOST_GROUP_ROWS = 1 << 26  # the most that pyarrow has ever put into a row group by default
MOST_GROUP_IMAGES = 1 << 22  # each is a row of the quarantine list if the row group is damaged
_MOST_GROUP_LABELS = 1 << 26
_MOST_CHUNK_BYTES = 1 << 50  # images are read in pieces


def refuse_groups(
    opened: "ParquetPieces", columns: Sequence[str], *, most_rows: int, most_bytes: int | None = None
) -> None:
    """ValueError if a row group has more rows, or one of these columns more values or decompressed bytes, than any, or
    lies outside the file."""
    from shards.parquet.pages import refuse_encrypted

    for number, group in enumerate(opened.groups):
        where = f"its footer is damaged: row group {number}"
        _check(f"{where} has {group.num_rows} rows", group.num_rows, most_rows)
        most_values = min(group.num_rows * MOST_LABELS, max(group.num_rows, _MOST_GROUP_LABELS))
        for chunk in group.chunks_of([*columns, ""]):  # the name of an encrypted column may be encrypted too
            refuse_encrypted(chunk)
            inside = f"{where}, column {chunk.column!r}"
            num_bytes = chunk.end - chunk.begin
            _check(f"{inside} begins at byte {chunk.begin}", chunk.begin, opened.num_bytes)
            _check(f"{inside} has its data at byte {chunk.data_begin}", chunk.data_begin, opened.num_bytes)
            _check(f"{inside} has {num_bytes} bytes", num_bytes, opened.num_bytes - chunk.begin)
            _check(f"{inside} has {chunk.num_values} values", chunk.num_values, most_values)
            most = most_bytes or _MOST_CHUNK_BYTES
            _check(f"{inside} has {chunk.num_bytes} decompressed bytes", chunk.num_bytes, most)
    if (num_rows := sum(group.num_rows for group in opened.groups)) != opened.num_rows:
        raise ValueError(f"its footer is damaged: it says {opened.num_rows} rows, its row groups have {num_rows}")


def unreadable() -> tuple[type[Exception], ...]:
    """The exceptions that an unreadable file raises. Names in a damaged footer may not be UTF-8: ValueError."""
    import pyarrow as pa

    return pa.ArrowException, ValueError, OSError, EOFError, MissingObjectError


def _check(what: str, found: int, most: int) -> None:
    if not 0 <= found <= most:
        raise ValueError(f"{what}, allowed: 0 to {most}")
