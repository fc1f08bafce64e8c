"""Images embedded in Parquet files, the layout of Hugging Face datasets: image struct<bytes, path>, label."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from shards.entry import Entry
from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ParquetSource:
    """Local Parquet files or glob patterns. Integer labels index `label_names` where these are given.

    A locator is FILE:ROW_GROUP:ROW, the file being its place in the sorted list of files.
    """

    kind: Literal["parquet"] = "parquet"
    files: tuple[str, ...] = ()
    image_column: str = "image"
    label_column: str = "label"
    label_names: tuple[str, ...] = ()

    def paths(self) -> list[str]:
        """All files, sorted."""
        if not self.files:
            raise UserError("--source.files is missing; give Parquet files or patterns such as 'DIR/*.parquet'")
        # Path.glob refuses absolute patterns.
        found = sorted({path for pattern in self.files for path in glob.glob(pattern)})  # noqa: PTH207
        if not found:
            raise UserError(f"--source.files {' '.join(self.files)!r} matches no file; give existing Parquet files")
        return found

    def entries(self) -> Iterator[Entry]:
        """File by file, row group by row group; only names and labels are read."""
        for number, path in enumerate(self.paths()):
            with self._open(path) as file:
                for group in range(file.num_row_groups):
                    yield from self._group_entries(file, Path(path).name, number, group)

    def _group_entries(self, file: pq.ParquetFile, name: str, number: int, group: int) -> Iterator[Entry]:
        table = file.read_row_group(group, columns=[f"{self.image_column}.path", self.label_column])
        paths = table.column(self.image_column).combine_chunks().field("path").to_pylist()
        labels = table.column(self.label_column).to_pylist()
        for row, (path, label) in enumerate(zip(paths, labels, strict=True)):
            locator = f"{number}:{group}:{row}"
            yield Entry(locator=locator, name=path or f"{name}:{group}:{row}", label_name=self._name_of(label))

    def reader(self) -> "ParquetReader":
        """Reads whole row groups."""
        return ParquetReader(paths=tuple(self.paths()), image_column=self.image_column)

    def known_labels(self) -> tuple[str, ...] | None:
        """The names given, in the order of their integers."""
        return self.label_names or None

    def _name_of(self, label: int | str | None) -> str | None:
        if isinstance(label, int) and self.label_names:
            return self.label_names[label] if 0 <= label < len(self.label_names) else None
        return None if label is None else str(label)

    def _open(self, path: str) -> pq.ParquetFile:
        try:
            file = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"{path} is not a readable Parquet file: {error}") from error
        columns = {file.schema.column(place).path for place in range(len(file.schema))}
        wanted = (f"{self.image_column}.bytes", f"{self.image_column}.path", self.label_column)
        if missing := [column for column in wanted if column not in columns]:
            have = ", ".join(sorted(columns))
            todo = "set --source.image-column and --source.label-column"
            raise UserError(f"{path} has no column {missing[0]}; it has {have}; {todo}")
        return file


@dataclass(kw_only=True)
class ParquetReader:
    """Keeps the row group read last, since neighbours are usually asked for together."""

    paths: tuple[str, ...]
    image_column: str
    _held: tuple[tuple[int, int], pa.Array] | None = field(default=None, repr=False)

    def read_many(self, locators: Sequence[str]) -> Iterator[bytes | OSError]:
        """Each row group is read once, however its images are spread over `locators`."""
        places = [tuple(int(part) for part in locator.split(":")) for locator in locators]
        loaded: dict[int, bytes | OSError] = {}
        for turn in sorted(range(len(places)), key=lambda turn: places[turn]):
            number, group, row = places[turn]
            loaded[turn] = self._image(number, group, row)
        for turn in range(len(places)):
            yield loaded.pop(turn)

    def _image(self, number: int, group: int, row: int) -> bytes | OSError:
        try:
            data = self._group(number, group)[row].as_py()
        except (OSError, pa.ArrowInvalid, IndexError) as error:
            return OSError(f"unreadable in {Path(self.paths[number]).name}: {error}")
        return data if data is not None else OSError("no image bytes in this row")

    def _group(self, number: int, group: int) -> pa.Array:
        if self._held is None or self._held[0] != (number, group):
            with pq.ParquetFile(self.paths[number]) as file:
                table = file.read_row_group(group, columns=[f"{self.image_column}.bytes"])
            self._held = ((number, group), table.column(self.image_column).combine_chunks().field("bytes"))
        return self._held[1]
