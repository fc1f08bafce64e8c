"""Parquet files that packing wrote itself, read again: they may have been damaged or edited since."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


def own_table(data: bytes, schema: pa.Schema, *, columns: Sequence[str] | None = None) -> pa.Table:
    """The table in a file that was written with `schema`, or these columns of it. ValueError if it is anything else."""
    with damage_as_value_error():
        names = list(columns or schema.names)
        table = pq.read_table(pa.BufferReader(data), columns=names, page_checksum_verification=True)
        for name in names:
            if table.schema.get_field_index(name) < 0:
                raise ValueError(f"it has no column {name}")
            found, wanted = table.schema.field(name).type, schema.field(name).type
            if not found.equals(wanted):
                raise ValueError(f"its column {name} is {found}, allowed: {wanted}")
        return table


def refuse_nulls(table: pa.Table, names: Sequence[str]) -> None:
    """ValueError if one of these columns has a row without a value."""
    for name in names:
        if nulls := table.column(name).null_count:
            raise ValueError(f"its column {name} has no value in {nulls} rows")


def refuse_below(table: pa.Table, least: dict[str, int]) -> None:
    """ValueError if a column has a number below its least one."""
    for name, bound in least.items():
        found = pc.min(table.column(name)).as_py()
        if found is not None and found < bound:
            raise ValueError(f"its column {name} has {found}, allowed: {bound} or more")


@contextmanager
def damage_as_value_error() -> Iterator[None]:
    """Turns all that Arrow raises for a damaged file into a ValueError; faults of the disk and the memory stay."""
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, EOFError, KeyError) as error:
        raise ValueError(f"it is damaged: {' '.join(str(error).split())}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"it is damaged: {' '.join(str(error).split())}") from error
