"""A manifest as an Arrow table that can be mapped into memory: a row per shard, everything else in its metadata.

Only ranks of one start exchange it (shards/host_copy.py): what it says was checked when the manifest was read.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.manifest import Manifest, ShardTable, index_path
from shards.tables import numbers

_NUMBERS = ("first_sample_id", "num_samples", "num_bytes")
_REST, _FILES = b"manifest", b"files"
_SHA256_BYTES = 32
_NO_SHA256 = bytes(_SHA256_BYTES)  # of an index that the manifest does not list


def table_of(manifest: Manifest) -> pa.Table:
    """The table of a manifest."""
    paths = [shard.path for shard in manifest.shards]
    of_index = [manifest.files.get(index_path(shard)) for shard in range(len(paths))]
    columns = {
        "path": _texts(paths),
        **{name: array_of(manifest.shard_column(name)) for name in _NUMBERS},
        "sha256": _hashes([bytes.fromhex(shard.sha256) for shard in manifest.shards]),
        "index_sha256": _hashes([bytes.fromhex(one) if one else _NO_SHA256 for one in of_index]),
    }
    indices = {index_path(shard) for shard, one in enumerate(of_index) if one}
    files = {path: sha256 for path, sha256 in manifest.files.items() if path not in indices}
    rest = {
        name.name: getattr(manifest, name.name) for name in fields(Manifest) if name.name not in ("shards", "files")
    }
    metadata = {_REST: json.dumps(rest).encode(), _FILES: json.dumps(files).encode()}
    return pa.Table.from_arrays(list(columns.values()), names=list(columns)).replace_schema_metadata(metadata)


def manifest_from(table: pa.Table) -> Manifest:
    """The manifest of `table_of`, which takes no more memory than the table does."""
    sha256, of_index = _Hashes(table.column("sha256")), _Hashes(table.column("index_sha256"))
    shards = ShardTable(
        _Texts(table.column("path")), {name: numbers(table.column(name)) for name in _NUMBERS}, sha256.hex_of
    )
    files = _Files(json.loads(table.schema.metadata[_FILES]), of_index)
    return Manifest(**json.loads(table.schema.metadata[_REST]), shards=shards, files=files)


def array_of(values: NDArray[Any]) -> pa.Array:
    """An array as Arrow's, without a copy. Arrow's own way loads pandas if it is installed."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, [None, pa.py_buffer(values)])


def _texts(texts: Sequence[str]) -> pa.Array:
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string(), len(encoded), buffers)


def _hashes(hashes: Sequence[bytes]) -> pa.Array:
    kind = pa.binary(_SHA256_BYTES)
    return pa.Array.from_buffers(kind, len(hashes), [None, pa.py_buffer(b"".join(hashes))])


class _Texts(Sequence[str]):
    """A column of texts."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        found: str | list[str] = (
            self._column[number].to_pylist() if isinstance(number, slice) else self._column[number].as_py()
        )
        return found


@dataclass(frozen=True)
class _Hashes:
    """A column of sha256."""

    column: pa.ChunkedArray

    def hex_of(self, number: int) -> str:
        """64 hex digits; empty if there is none."""
        found: bytes = self.column[number].as_py()
        return "" if found == _NO_SHA256 else found.hex()


class _Files(Mapping[str, str]):
    """The sha256 of every file: those of indices are in a column."""

    def __init__(self, others: dict[str, str], of_index: _Hashes) -> None:
        self._others, self._of_index = others, of_index

    def __getitem__(self, path: str) -> str:
        if path in self._others:
            return self._others[path]
        digits = path[len("index/shard-") : -len(".parquet")]
        shard = int(digits) if digits.isdecimal() and len(digits) < 12 else -1
        is_index = 0 <= shard < len(self._of_index.column) and path == index_path(shard)
        if is_index and (found := self._of_index.hex_of(shard)):
            return found
        raise KeyError(path)

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        for shard in range(len(self._of_index.column)):
            if self._of_index.hex_of(shard):
                yield index_path(shard)

    def __len__(self) -> int:
        return sum(1 for _ in self)
