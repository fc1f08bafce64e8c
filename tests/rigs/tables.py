"""Parquet files that a test has made."""

import pyarrow as pa
import pyarrow.parquet as pq


def read_table(data: bytes) -> pa.Table:
    """The table in the bytes of a Parquet file."""
    return pq.read_table(pa.BufferReader(data))
