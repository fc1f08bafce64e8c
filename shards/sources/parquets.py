"""Images embedded in Parquet files, in the layout of Hugging Face datasets: image struct<bytes, path>, label."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn, Self

from shards.class_names import class_name, labels_fault, repeated_fault
from shards.config_values import refuse_wrong_values, shown_value
from shards.errors import ImageRefusedError, InvalidDataError, UserError
from shards.files.typed_json import parse_json
from shards.sources.entry import Entry, ImageBytes, printable, too_large
from shards.sources.found_files import MOST_GROUP_IMAGES, find_files, open_found, refuse_groups, unreadable
from shards.sources.names import SPLIT_COLUMN, refuse_mixed_splits, refuse_several, split_value
from shards.sources.tables import batch_rows, check_columns, written_labels
from shards.storage.ahead import in_order
from shards.store import SCHEME, Buckets

if TYPE_CHECKING:
    import pyarrow as pa

    from shards.parquet_pieces import ParquetPieces

# A batch is in memory as a whole. It has about as many rows as fit in BATCH_BYTES, at least one and at most
# MOST_BATCH_ROWS.
BATCH_BYTES, MOST_BATCH_ROWS = 16 << 20, 16
_SPLIT_ROWS = 4096
READS_AHEAD = 16
# Size of a column's read buffer, which is needed because a row group may be as large as its file. In a bucket, filling
# a buffer is one request.
_LOCAL_BUFFER_BYTES, _REMOTE_BUFFER_BYTES = 1 << 20, 8 << 20


@dataclass(frozen=True, kw_only=True)
class ParquetSource:
    """Parquet files, folders or patterns, local or `s3://`, with a column of images and one of labels.

    The image is `struct<bytes, path>` or only bytes; the label is text, an integer, or a list of these. A row without
    bytes or with an invalid label is a refused image, and so is every row of a damaged row group.

    A page of a Parquet file is read as a whole, so a worker needs two to three times the memory of the largest page. If
    a page holds a gigabyte of images, reading it takes gigabytes. pyarrow writes such pages for large images, unless it
    is given `write_batch_size=1` and `use_dictionary=False`.
    """

    staged: ClassVar[bool] = True  # a single image cannot be read again
    labels_are_names: ClassVar[bool] = False
    kind: Literal["parquet"] = "parquet"
    files: tuple[str, ...] = ()
    """Parquet files, folders or patterns such as 'DIR/train-*.parquet', local or s3://; {split} stands for --split."""
    image_column: str = "image"
    """Column with the images: struct<bytes, path>, or bytes."""
    label_column: str = "label"
    """Column with the label: text, a number, or a list of these."""
    label_names: tuple[str, ...] = ()
    """Names of integer labels, in order; empty: those that Hugging Face's datasets write into the files."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="source.")
        if reason := _names_fault(self.label_names):
            raise UserError(f"--source.label-names: {reason}; give each class its own name")

    def entries(self) -> Iterator[Entry]:
        """Yields one entry per row group, file by file. Reads the files' footers, and the column of splits if there is
        one."""
        buckets, first_names = Buckets(), None
        splits: dict[str, str] = {}
        for path, footer in self._footers(self.paths(), buckets):
            names = footer.names
            for split in footer.splits:
                splits.setdefault(split, printable(path))
            todo = "write the rows of each split to files of their own, and pack these with --split"
            refuse_several(splits, what=f"column {SPLIT_COLUMN!r} has rows", todo=todo)
            if first_names is None:
                first_names = names
            if names != first_names:
                message = f"{printable(path)} has other names for its integer labels than the files before it"
                raise UserError(f"{message}; pack such files separately, or give --source.label-names for all")
            yield from footer.groups

    def images(self, entries: Sequence[Entry], *, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        """Yields the images row group by row group. Reads at most MOST_BATCH_ROWS rows at a time."""
        with _OpenFile(Buckets(), self._columns()) as held:
            for entry in entries:
                yield from self._group_images(held, entry, max_bytes)

    def reader(self) -> NoReturn:
        """Raises NotImplementedError, because a single image cannot be read again."""
        raise NotImplementedError("a single image cannot be read from a Parquet file: the scan keeps copies")

    def known_labels(self) -> tuple[str, ...] | None:
        """Returns the given class names or, without them, those of the first file, in the order of their integers; None
        if that has none."""
        if self.label_names:
            return tuple(class_name(name) for name in self.label_names)
        ((_, first),) = self._footers(self.paths()[:1], Buckets())
        return first.names or None

    def paths(self) -> list[str]:
        """Returns all files, sorted."""
        if not self.files:
            raise UserError("--source.files is missing; give Parquet files or patterns such as 'DIR/*.parquet'")
        found = find_files(self.files, suffixes=(".parquet",))
        refuse_mixed_splits(found)
        return found

    def _footers(self, paths: list[str], buckets: Buckets) -> Iterator[tuple[str, "_Footer"]]:
        """Yields each file's path and what its footer says. The footers of files in a bucket are fetched ahead."""
        threads = READS_AHEAD if any(path.startswith(SCHEME) for path in paths) else 1
        footers = in_order(lambda path: self._footer(path, buckets), paths, threads=threads, window=threads)
        for path, footer in zip(paths, footers, strict=True):
            if isinstance(footer, Exception):
                raise footer
            yield path, footer

    def _footer(self, path: str, buckets: Buckets) -> "_Footer":
        from shards.parquet_pieces import ParquetPieces

        try:
            with ParquetPieces(open_found(path, buckets), ours=False) as opened:
                self._check(path, opened.schema)
                refuse_groups(opened, self._columns(), most_rows=MOST_GROUP_IMAGES)
                names = self._names(path, opened.schema)
                if reason := _names_fault(names):
                    todo = (
                        "give other names for all classes in --source.label-names, for example 'crane' and 'crane (2)'"
                    )
                    raise UserError(f"{printable(path)}: {reason}; {todo}")
                groups = [
                    Entry(
                        locator=f"{path}:{number}",
                        name=f"{_file_name(path)}:{number}",
                        num_bytes=sum(chunk.end - chunk.begin for chunk in group.chunks_of(self._columns())),
                        num_images=group.num_rows,
                    )
                    for number, group in enumerate(opened.groups)
                    if group.num_rows
                ]
                return _Footer(names=names, groups=groups, splits=self._splits(opened))
        except unreadable() as error:
            raise InvalidDataError(f"{printable(path)} is not a readable Parquet file: {error}") from error

    def _splits(self, opened: "ParquetPieces") -> set[str]:
        """Returns the splits named in the file's column `split`, or an empty set if it has no such column."""
        from shards.parquet_pieces import MOST_BATCH_BYTES

        if opened.schema.names.count(SPLIT_COLUMN) != 1 or SPLIT_COLUMN in self._columns():
            return set()
        refuse_groups(opened, [SPLIT_COLUMN], most_rows=MOST_GROUP_IMAGES, most_bytes=MOST_BATCH_BYTES)
        batches = opened.batches([SPLIT_COLUMN], rows=_SPLIT_ROWS)
        cells = {str(cell) for batch in batches for cell in batch.column(SPLIT_COLUMN).to_pylist()}
        return set(filter(None, map(split_value, cells)))

    def _check(self, path: str, schema: "pa.Schema") -> None:
        import pyarrow as pa

        columns = {"image-column": self.image_column, "label-column": self.label_column}
        check_columns(path, schema.names, columns)
        kind = schema.field(self.image_column).type
        if _is_bytes(kind) or (
            pa.types.is_struct(kind) and "bytes" in kind.names and _is_bytes(kind.field("bytes").type)
        ):
            return
        message = f"{printable(path)}: column {self.image_column!r} is {kind}; allowed: struct<bytes, path> and binary"
        raise UserError(f"{message}; set --source.image-column")

    def _columns(self) -> list[str]:
        return [self.image_column, self.label_column]

    def _names(self, path: str, schema: "pa.Schema") -> tuple[str, ...]:
        """Returns the names of integer labels, or () if neither the settings nor the file give any. Raises UserError if
        the file's are not a list of texts, because only a list says which integer has which name."""
        if self.label_names:
            return tuple(class_name(name) for name in self.label_names)
        try:
            feature = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"][self.label_column]
            while isinstance(feature, list) or "feature" in feature:  # the column holds lists of labels
                feature = feature[0] if isinstance(feature, list) else feature["feature"]
            names = feature["names"]
        except (KeyError, TypeError, ValueError, IndexError):
            return ()
        if not isinstance(names, list | None) or not all(isinstance(name, str) for name in names or ()):
            message = f"{printable(path)}: its metadata names the classes of column {self.label_column!r}"
            todo = "give --source.label-names with the names as a list, in the order of their integers"
            raise UserError(f"{message} by {shown_value(names)}; allowed: a list of texts; {todo}")
        return tuple(class_name(name) for name in names or ())

    def _group_images(self, held: "_OpenFile", entry: Entry, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        path, _, group = entry.locator.rpartition(":")
        row = 0
        try:
            file = held.open(path)
            for batch in self._batches(file, int(group)):
                yield from self._batch_images(batch, max_bytes, (entry, row))
                row += batch.num_rows
                del batch  # frees it before the next
            if row < entry.num_images:
                raise EOFError(f"it has {row} rows, the footer says {entry.num_images}")
        except MemoryError as error:  # this concerns the machine, not the image
            todo = "give the workers more memory, or write the file with smaller pages"
            raise InvalidDataError(f"{printable(path)}, row group {group} cannot be read: {error}; {todo}") from error
        except unreadable() as error:
            reason = f"damaged or missing Parquet row group: {' '.join(str(error).split())}"
            for lost in range(row, entry.num_images):
                locator, name = f"{entry.locator}:{lost}", f"{entry.name}:{lost}"
                yield Entry(locator=locator, name=name), OSError(reason)

    def _batches(self, file: "ParquetPieces", number: int) -> "Iterator[pa.RecordBatch]":
        """Yields at most MOST_BATCH_ROWS rows at a time. The reader still holds a whole page of the file, because a
        page is compressed as a whole."""
        from shards.parquet_pieces import MOST_BATCH_BYTES

        group, columns = file.groups[number], self._columns()
        largest = max(chunk.num_bytes for chunk in group.chunks_of(columns))
        num_bytes = sum(chunk.num_bytes for chunk in group.chunks)
        rows = min(BATCH_BYTES * group.num_rows // max(1, num_bytes), MOST_BATCH_BYTES // max(1, largest))
        return file.batches(columns, rows=min(max(1, rows), MOST_BATCH_ROWS), groups=[number])

    def _batch_images(
        self, batch: "pa.RecordBatch", max_bytes: int, begin: tuple[Entry, int]
    ) -> Iterator[tuple[Entry, ImageBytes]]:
        import pyarrow as pa
        import pyarrow.compute as pc

        data, image_names = batch.column(self.image_column), [None] * batch.num_rows
        if pa.types.is_struct(data.type):
            columns = dict(zip(data.type.names, data.flatten(), strict=True))
            data = columns["bytes"]
            image_names = columns["path"].to_pylist() if "path" in columns else image_names
        sizes = pc.binary_length(data).to_pylist()
        labels = batch_rows(batch, [self.label_column])
        for place in range(batch.num_rows):
            row = begin[1] + place
            name = printable(str(image_names[place] or f"{begin[0].name}:{row}"))
            image: ImageBytes
            if sizes[place] is None:
                image = OSError("no image bytes in this row")
            elif sizes[place] > max_bytes:
                image = too_large(sizes[place], max_bytes=max_bytes)
            else:
                image = data[place].as_py()
            try:
                if isinstance(cells := labels[place], ImageRefusedError):
                    raise cells
                written = written_labels(cells[0])
            except ImageRefusedError as refusal:
                written, image = (), refusal
            yield Entry(locator=f"{begin[0].locator}:{row}", name=name, labels=written), image


@dataclass(frozen=True, kw_only=True)
class _Footer:
    """Facts about a file: the names of its integer labels, its row groups, and the splits of its rows."""

    names: tuple[str, ...]
    groups: list[Entry]
    splits: set[str]


class _OpenFile:
    """Keeps the latest file open, because neighbouring row groups are usually read together."""

    def __init__(self, buckets: Buckets, columns: Sequence[str]) -> None:
        self._buckets, self._columns, self._path, self._held = buckets, columns, "", ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def open(self, path: str) -> "ParquetPieces":
        if path != self._path:
            self._held.close()
            self._path = ""
            from shards.parquet_pieces import ParquetPieces

            buffer_size = _REMOTE_BUFFER_BYTES if path.startswith(SCHEME) else _LOCAL_BUFFER_BYTES
            opened = ParquetPieces(open_found(path, self._buckets), ours=False, buffer_size=buffer_size)
            self._opened = self._held.enter_context(opened)
            refuse_groups(opened, self._columns, most_rows=MOST_GROUP_IMAGES)
            self._path = path
        return self._opened


def _names_fault(names: Sequence[str]) -> str:
    """Returns what is wrong with the names of integer labels, or "" if nothing is."""
    names = [class_name(name) for name in names]
    if "" in names:
        return f"class {names.index('')} has an empty name"
    return repeated_fault(names) or next((reason for name in names if (reason := labels_fault((name,)))), "")


def _is_bytes(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _file_name(path: str) -> str:
    return printable(path.rpartition("/")[2])
