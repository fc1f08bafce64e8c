"""What the footer of a Parquet file says, compared with the file itself before anything is allocated by it."""

from typing import TYPE_CHECKING, Any

from shards.config_values import shown_value
from shards.parquet_pages import Group, read_footer, read_groups
from shards.sources.table_labels import MOST_LABELS
from shards.storage.objects import MissingObjectError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

MOST_GROUP_ROWS = 1 << 26  # the most that pyarrow has ever put into a row group by default
MOST_GROUP_IMAGES = 1 << 22  # each is a row of the quarantine list if the row group is damaged


def open_parquet(
    file: Any, *, buffer_size: int = 0, most_rows: int = MOST_GROUP_ROWS
) -> "tuple[pq.ParquetFile, tuple[Group, ...]]":
    """The Parquet file in `file`, one of pyarrow's, and its row groups. Raises `unreadable()` if its footer cannot be
    true.

    No row group may have more than `most_rows`. With `buffer_size`, columns are read in such pieces instead of whole,
    and page checksums are verified. What the columns declare is read by ourselves: Arrow ends the process where some
    damaged footers are looked at (`RowGroupMetaData.column`).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    num_bytes = file.size()
    footer = read_footer(file, num_bytes=num_bytes)
    num_rows, groups = read_groups(footer)
    for number, group in enumerate(groups):
        _check_group(group, number, num_bytes, most_rows)
    if (found := sum(group.num_rows for group in groups)) != num_rows:
        raise ValueError(f"its footer is damaged: it says {num_rows} rows, its row groups have {found}")
    options: dict[str, Any] = {"pre_buffer": False, "page_checksum_verification": True} if buffer_size else {}
    facts = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))  # it is not read twice
    return pq.ParquetFile(file, metadata=facts, buffer_size=buffer_size, **options), groups


def unreadable() -> tuple[type[Exception], ...]:
    """The exceptions that an unreadable file raises. Names in a damaged footer may not be UTF-8: ValueError."""
    import pyarrow as pa

    return pa.ArrowException, ValueError, OSError, EOFError, MissingObjectError


def _check_group(group: Group, number: int, num_bytes: int, most_rows: int) -> None:
    where = f"its footer is damaged: row group {number}"
    _check(f"{where} has {group.num_rows} rows", group.num_rows, most_rows)
    for chunk in group.chunks:
        inside = f"{where}, column {shown_value(chunk.column)}"
        for first in (chunk.begin, chunk.first_data):
            _check(f"{inside} begins at byte {first}", first, num_bytes)
        _check(f"{inside} has {chunk.end - chunk.begin} bytes", chunk.end - chunk.begin, num_bytes - chunk.begin)
        _check(f"{inside} has {chunk.num_values} values", chunk.num_values, group.num_rows * MOST_LABELS)


def _check(what: str, found: int, most: int) -> None:
    if not 0 <= found <= most:
        raise ValueError(f"{what}, allowed: 0 to {most}")
