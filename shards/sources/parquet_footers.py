"""What the footer of a Parquet file says, compared with the file itself before anything is allocated by it."""

from typing import TYPE_CHECKING, Any

from shards.sources.table_labels import MOST_LABELS
from shards.storage.objects import MissingObjectError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

MOST_GROUP_ROWS = 1 << 26  # the most that pyarrow has ever put into a row group by default
MOST_GROUP_IMAGES = 1 << 22  # each is a row of the quarantine list if the row group is damaged


def open_parquet(file: Any, *, buffer_size: int = 0, most_rows: int = MOST_GROUP_ROWS) -> "pq.ParquetFile":
    """The Parquet file in `file`, one of pyarrow's. Raises `unreadable()` if its footer cannot be true.

    No row group may have more than `most_rows`. With `buffer_size`, columns are read in such pieces instead of whole,
    and page checksums are verified.
    """
    import pyarrow.parquet as pq

    options: dict[str, Any] = {"pre_buffer": False, "page_checksum_verification": True} if buffer_size else {}
    opened = pq.ParquetFile(file, buffer_size=buffer_size, **options)
    facts, num_rows = opened.metadata, 0
    for number in range(facts.num_row_groups):
        _check_group(facts.row_group(number), number, file.size(), most_rows)
        num_rows += facts.row_group(number).num_rows
    if num_rows != facts.num_rows:
        raise ValueError(f"its footer is damaged: it says {facts.num_rows} rows, its row groups have {num_rows}")
    return opened


def unreadable() -> tuple[type[Exception], ...]:
    """The exceptions that an unreadable file raises. Names in a damaged footer may not be UTF-8: ValueError."""
    import pyarrow as pa

    return pa.ArrowException, ValueError, OSError, EOFError, MissingObjectError


def _check_group(group: "pq.RowGroupMetaData", number: int, num_bytes: int, most_rows: int) -> None:
    where = f"its footer is damaged: row group {number}"
    _check(f"{where} has {group.num_rows} rows", group.num_rows, most_rows)
    for place in range(group.num_columns):
        column = group.column(place)
        inside = f"{where}, column {column.path_in_schema!r}"
        first, size, count = column.data_page_offset, column.total_compressed_size, column.num_values
        _check(f"{inside} begins at byte {first}", first, num_bytes)
        _check(f"{inside} has {size} bytes", size, num_bytes - first)
        _check(f"{inside} has {count} values", count, group.num_rows * MOST_LABELS)


def _check(what: str, found: int, most: int) -> None:
    if not 0 <= found <= most:
        raise ValueError(f"{what}, allowed: 0 to {most}")
