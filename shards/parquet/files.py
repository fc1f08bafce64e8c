"""A Parquet file that is read in pieces.

Its footer is read by ourselves, and the header of each page is looked at as its bytes pass on to Arrow.
"""

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from shards.config_values import shown_value
from shards.parquet.pages import FOOTER_END_BYTES, Chunk, PageCheck, footer_bytes, read_groups, refuse_place

MOST_BATCH_BYTES = 1 << 30  # what a batch may take, even if all its values are the longest of a dictionary
_HEADER_BYTES = 4096  # most headers of pages have fewer


class ParquetPieces:
    """The footer of an open file, and batches of its rows. Everything raises ValueError or what Arrow raises.

    `ours`: the file is written by us. With `buffer_size`, columns are read in such pieces instead of whole.
    """

    def __init__(self, file: Any, *, ours: bool, buffer_size: int = 0) -> None:
        self._file = _PagesFile(file, ours=ours)
        self.num_bytes = self._file.seek(0, io.SEEK_END)
        self.num_rows, self.groups = self._footer()
        self._file.seek(0)
        self._ours, self._buffer_size, self._arrow = ours, buffer_size, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def schema(self) -> pa.Schema:
        """The schema as Arrow sees it."""
        return self._opened().schema_arrow

    def batches(
        self, columns: Sequence[str], *, rows: int, groups: Sequence[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Up to `rows` rows at a time: fewer where a dictionary has values so long that a batch could be too large."""
        opened = self._opened()
        for number in range(len(self.groups)) if groups is None else groups:
            chunks = [chunk for chunk in self.groups[number].chunks_of(columns) if chunk.num_values]
            for chunk in chunks:
                refuse_place(chunk, self.num_bytes)
            self._file.watch(())
            longest = max((self._longest(chunk, rows) for chunk in chunks), default=0)
            self._file.watch(chunks)
            size = max(1, min(rows, MOST_BATCH_BYTES // max(1, longest)))
            yield from opened.iter_batches(size, row_groups=[number], columns=list(columns), use_threads=False)

    def read(self, columns: Sequence[str], *, rows: int, groups: Sequence[int] | None = None) -> pa.Table:
        """All of it. ValueError if it is too large for memory."""
        batches, num_bytes = [], 0
        for batch in self.batches(columns, rows=rows, groups=groups):
            batches.append(batch)
            if (num_bytes := num_bytes + batch.nbytes) > MOST_BATCH_BYTES:
                raise ValueError(f"it has more than {MOST_BATCH_BYTES:,} bytes, the most allowed")
        schema = pa.schema([self.schema.field(name) for name in columns], self.schema.metadata)
        arrays = [[batch.column(name) for batch in batches] for name in columns]
        return pa.table([pa.chunked_array(some, one.type) for some, one in zip(arrays, schema, strict=True)], schema)

    def _opened(self) -> pq.ParquetFile:
        if self._arrow is None:
            options = {"buffer_size": self._buffer_size, "page_checksum_verification": True}
            self._arrow = pq.ParquetFile(self._file, pre_buffer=False, **options)
        return self._arrow

    def _footer(self) -> Any:
        self._file.seek(max(0, self.num_bytes - FOOTER_END_BYTES))
        num_bytes = footer_bytes(self._file.read(), self.num_bytes)
        self._file.seek(max(0, self.num_bytes - FOOTER_END_BYTES - num_bytes))
        return read_groups(self._file.read(num_bytes))

    def _longest(self, chunk: Chunk, rows: int) -> int:
        """Bytes that no value of a column has more of, unless `rows` rows of it fit in any case."""
        if rows * chunk.num_bytes <= MOST_BATCH_BYTES:
            return chunk.num_bytes
        self._file.seek(chunk.begin)
        return PageCheck(chunk, ours=self._ours).repeated_bytes(self._file.read(_HEADER_BYTES))


class _PagesFile(io.RawIOBase):
    """Passes reads on. While columns are watched, only their pages can be read, each from its column's beginning."""

    def __init__(self, file: Any, *, ours: bool) -> None:
        super().__init__()
        self._file, self._ours = file, ours
        self._has_buffers = isinstance(file, pa.NativeFile)
        self._watched: list[Chunk] | None = None
        self._checks: dict[int, PageCheck] = {}

    def watch(self, chunks: Sequence[Chunk]) -> None:
        """Lets only these columns be read from now on. ValueError if they overlap; without any, everything can be
        read."""
        self._watched = sorted(chunks, key=lambda chunk: chunk.begin) or None
        self._checks = {}
        for before, after in zip(self._watched or (), (self._watched or ())[1:], strict=False):
            if before.end > after.begin:
                raise ValueError(f"columns {shown_value(before.column)} and {shown_value(after.column)} overlap")

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The next byte to be read."""
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte of the file."""
        self._file.seek(offset, whence)
        return self.tell()

    def read(self, size: int | None = -1) -> bytes:
        """Up to `size` bytes, all that is left where it is negative."""
        most = None if size is None or size < 0 else size
        if self._watched is None:
            return bytes(self._file.read(most))
        begin = self.tell()
        data = memoryview(self._file.read_buffer(most) if self._has_buffers else self._file.read(most)).cast("B")
        if data:
            self._look(self._watched, begin, data)
        return data  # type: ignore[return-value]  # Arrow takes any buffer

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()

    def _look(self, watched: list[Chunk], begin: int, data: memoryview) -> None:
        place = bisect_right(watched, begin, key=lambda chunk: chunk.begin) - 1
        if place < 0 or begin >= watched[place].end:
            raise ValueError(f"bytes from {begin} on are read, where no column is")
        chunk = watched[place]
        if begin == chunk.begin:
            self._checks[place] = PageCheck(chunk, ours=self._ours)
        check = self._checks.get(place)
        if check is None or check.seen != begin:
            raise ValueError(f"column {shown_value(chunk.column)} is not read from its beginning on")
        check.add(data[: chunk.end - begin])
