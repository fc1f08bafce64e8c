"""The shards of a manifest as a table. A dataset of many shards stores it as shards.parquet, and the ranks of a host
share it.

300,000 shards take 21 MB as Parquet. As JSON they take 93 MB, and reading them takes six seconds and 400 MB.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.config_values import Range
from shards.images.config import ImageLimits
from shards.manifest import (
    MANIFEST_PATH,
    MOST_SHARD_SAMPLES,
    MOST_TAR_BYTES,
    SHARDS_PATH,
    TABLE_FORMAT_VERSION,
    Manifest,
    ShardColumns,
    ShardRecord,
    fingerprint_of,
    index_path,
    refuse_paths,
    sha256_hex,
)
from shards.store import Store
from shards.tables import MOST_ROWS, TableSchema, numbers, read_checked, table_bytes

MOST_LISTED_SHARDS = 4096  # manifest.json lists up to this many: 1.3 MB, read in 0.1 s
_SHA256 = pa.binary(32)
_NO_SHA256 = bytes(32)  # stands for an index that the manifest does not list
_RULES = TableSchema(
    schema=pa.schema(
        [
            ("path", pa.string()),
            ("num_samples", pa.int64()),
            ("num_bytes", pa.int64()),
            ("sha256", _SHA256),
            ("index_sha256", _SHA256),
        ]
    ),
    ranges={"num_samples": Range(0, MOST_SHARD_SAMPLES), "num_bytes": Range(1, MOST_TAR_BYTES)},
)
_REST, _FILES = b"manifest", b"files"


class ShardTable(ShardColumns):
    """The shards, in the columns of shards.parquet."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        num_samples = numbers(table.column("num_samples"))
        self._numbers: dict[str, NDArray[np.int64]] = {
            "first_sample_id": np.cumsum(num_samples) - num_samples,
            "num_samples": num_samples,
            "num_bytes": numbers(table.column("num_bytes")),
        }

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, number: int) -> ShardRecord: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ShardRecord, ...]: ...
    def __getitem__(self, number: int | slice) -> ShardRecord | tuple[ShardRecord, ...]:
        if isinstance(number, slice):
            return tuple(self[one] for one in range(*number.indices(len(self))))
        place = range(len(self))[number]  # raises IndexError beyond the end
        each = {name: int(column[place]) for name, column in self._numbers.items()}
        path, sha256 = (self.table.column(name)[place].as_py() for name in ("path", "sha256"))
        return ShardRecord(path=path, sha256=sha256.hex(), **each)

    def column(self, name: str) -> NDArray[np.int64]:
        """Returns int64[num_shards]: a field of every shard."""
        return self._numbers[name]


def write_manifest(store: Store, manifest: Manifest) -> Manifest:
    """Writes manifest.json; for a new dataset of many shards, first shards.parquet. Returns the manifest as written."""
    is_large = len(manifest.shards) > MOST_LISTED_SHARDS
    if is_large and manifest.format_version != TABLE_FORMAT_VERSION:
        data = table_bytes(_columns_of(manifest).cast(_RULES.schema))
        store.write(SHARDS_PATH, data)
        files = {**manifest.files, SHARDS_PATH: sha256_hex(data)}
        manifest = replace(manifest, format_version=TABLE_FORMAT_VERSION, files=files)
    store.write(MANIFEST_PATH, manifest.to_bytes())
    return manifest


def read_manifest(store: Store) -> tuple[Manifest, str]:
    """Reads the manifest and its fingerprint. Raises MissingObjectError if there is none, and ValueError for impossible
    values."""
    data = store.read(MANIFEST_PATH)
    manifest = Manifest.from_bytes(data, read_table=lambda files: shards_and_files(store.read(SHARDS_PATH), files))
    return manifest, fingerprint_of(data)


def shards_and_files(data: bytes, files: Mapping[str, str]) -> tuple[ShardTable, Mapping[str, str]]:
    """Returns the shards and the sha256 of every file, from the bytes of shards.parquet and the `files` of
    manifest.json. Raises ValueError if the bytes do not match `files`, or have impossible values."""
    if sha256_hex(data) != files.get(SHARDS_PATH):
        raise ValueError(f"{SHARDS_PATH} is not the file that the manifest has the sha256 of")
    try:
        table = read_checked(data, _RULES, most_rows=MOST_ROWS).combine_chunks()
        refuse_paths(table.column("path").to_pylist())
    except ValueError as error:
        raise ValueError(f"{SHARDS_PATH}: {error}") from error
    return ShardTable(table), _Files(files, table.column("index_sha256"))


def table_of(manifest: Manifest) -> pa.Table:
    """Returns the manifest as one table, with everything except the shards in its metadata. It is passed only between
    ranks of one start (shards/host_copy.py), so it is not checked again."""
    table = manifest.shards.table if isinstance(manifest.shards, ShardTable) else _columns_of(manifest)
    files = manifest.files.others if isinstance(manifest.files, _Files) else _other_files(manifest)
    rest = {
        name.name: getattr(manifest, name.name) for name in fields(Manifest) if name.name not in ("shards", "files")
    } | {"limits": asdict(manifest.limits)}
    return table.replace_schema_metadata({_REST: json.dumps(rest).encode(), _FILES: json.dumps(files).encode()})


def manifest_from(table: pa.Table) -> Manifest:
    """Returns the manifest that `table_of` made a table of. It takes no more memory than the table."""
    files = _Files(json.loads(table.schema.metadata[_FILES]), table.column("index_sha256"))
    rest = json.loads(table.schema.metadata[_REST])
    return Manifest(**rest | {"limits": ImageLimits(**rest["limits"])}, shards=ShardTable(table), files=files)


def array_of(values: NDArray[Any]) -> pa.Array:
    """Returns a NumPy array as an Arrow array, without a copy. Arrow's own conversion is not used, since it loads
    pandas if it is installed."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, [None, pa.py_buffer(values)])


def _columns_of(manifest: Manifest) -> pa.Table:
    of_index = [manifest.files.get(index_path(shard)) for shard in range(len(manifest.shards))]
    columns = {
        "path": _texts([shard.path for shard in manifest.shards]),
        "num_samples": array_of(manifest.shard_column("num_samples")),
        "num_bytes": array_of(manifest.shard_column("num_bytes")),
        "sha256": _hashes([bytes.fromhex(shard.sha256) for shard in manifest.shards]),
        "index_sha256": _hashes([bytes.fromhex(one) if one else _NO_SHA256 for one in of_index]),
    }
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def _other_files(manifest: Manifest) -> dict[str, str]:
    indices = {index_path(shard) for shard in range(len(manifest.shards))}
    return {path: sha256 for path, sha256 in manifest.files.items() if path not in indices}


def _texts(texts: Sequence[str]) -> pa.Array:
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string(), len(encoded), buffers)


def _hashes(hashes: Sequence[bytes]) -> pa.Array:
    return pa.Array.from_buffers(_SHA256, len(hashes), [None, pa.py_buffer(b"".join(hashes))])


class _Files(Mapping[str, str]):
    """The sha256 of every file. Those of index files stay in a column of the table of shards."""

    def __init__(self, others: Mapping[str, str], of_index: pa.ChunkedArray) -> None:
        self.others, self._of_index = others, of_index

    def __getitem__(self, path: str) -> str:
        if path in self.others:
            return self.others[path]
        digits = path[len("index/shard-") : -len(".parquet")]
        shard = int(digits) if digits.isdecimal() and len(digits) < 12 else -1
        if 0 <= shard < len(self._of_index) and path == index_path(shard):
            found: bytes = self._of_index[shard].as_py()
            if found != _NO_SHA256:
                return found.hex()
        raise KeyError(path)

    def __iter__(self) -> Iterator[str]:
        yield from self.others
        for shard, sha256 in enumerate(self._of_index.to_pylist()):
            if sha256 != _NO_SHA256:
                yield index_path(shard)

    def __len__(self) -> int:
        listed = pc.sum(pc.not_equal(self._of_index, pa.scalar(_NO_SHA256, _SHA256))).as_py() or 0
        return len(self.others) + listed
