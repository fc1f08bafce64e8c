"""Sorting more rows than memory should hold: sorted runs in a temporary file, merged as they are taken."""

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from shards.storage.temporary import temporary_file

if TYPE_CHECKING:
    import pyarrow as pa

RUN_ROWS = 1 << 17  # about 20 MB of Python objects if a row is a file name
BATCH_ROWS = 512  # of each run, in memory while runs are merged

Row = tuple[bytes, ...]
_first = itemgetter(0)


def sorted_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows of equal width, sorted by their first field; rows that share it keep their order."""
    left = iter(rows)
    run = _next_run(left)
    if len(run) < RUN_ROWS:
        yield from run
        return
    import pyarrow as pa

    with temporary_file() as file:
        edges = [0]
        with pa.ipc.new_file(pa.PythonFile(file, "w"), _schema(len(run[0]))) as writer:
            while run:
                edges.append(edges[-1] + _write_run(writer, run))
                run.clear()  # frees it before the next
                run = _next_run(left)
        with pa.ipc.open_file(pa.PythonFile(file)) as batches:
            runs = [_read_run(batches, first, end) for first, end in pairwise(edges)]
            yield from heapq.merge(*runs, key=_first)


def _next_run(left: Iterator[Row]) -> list[Row]:
    run = list(islice(left, RUN_ROWS))
    run.sort(key=_first)
    return run


def _schema(width: int) -> "pa.Schema":
    import pyarrow as pa

    return pa.schema([(f"field{number}", pa.binary()) for number in range(width)])


def _write_run(writer: "pa.ipc.RecordBatchFileWriter", run: list[Row]) -> int:
    """Append a run; returns the number of its batches."""
    import pyarrow as pa

    schema = _schema(len(run[0]))
    begins = range(0, len(run), BATCH_ROWS)
    for begin in begins:
        columns = zip(*run[begin : begin + BATCH_ROWS], strict=True)
        writer.write_batch(pa.record_batch([pa.array(column, pa.binary()) for column in columns], schema))
    return len(begins)


def _read_run(batches: "pa.ipc.RecordBatchFileReader", first: int, end: int) -> Iterator[Row]:
    for number in range(first, end):
        batch = batches.get_batch(number)
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
