"""Images that CSV or Parquet files list by path or URL, with one or more labels and, optionally, weights (as in
JFT)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from shards.config_values import refuse_wrong_values
from shards.errors import ImageRefusedError, UserError
from shards.sources.entry import Entry, ImageBytes, printable
from shards.sources.found_files import find_files
from shards.sources.names import SPLIT_COLUMN, Splits, refuse_mixed_splits
from shards.sources.tables import TABLE_SUFFIXES, RowValues, path_in, read_rows, weighted, written_labels
from shards.sources.tree import MOST_BYTES, REFUSED, fetch, outside, read_ahead, read_below, read_file, refused_entry
from shards.sources.web import fetch_url, is_address, is_web, secret_reason, shown_address
from shards.storage.ahead import Hold, no_wait
from shards.store import SCHEME, Buckets

_MOST_CHARACTERS = 1 << 16  # the longest path or URL


@dataclass(frozen=True, kw_only=True)
class Locations:
    """Reads images from any location. Relative paths are below `root`: a folder, an S3 prefix or a URL."""

    root: str

    def read_many(self, locators: Sequence[str]) -> Iterator[ImageBytes]:
        """Yields the bytes of the images in order. Images on servers are fetched ahead."""
        entries = [Entry(locator=locator, name="") for locator in locators]
        return (image for _, image in self.images(entries, max_bytes=MOST_BYTES))

    def images(self, entries: Sequence[Entry], *, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        """Yields the image of each entry, in order."""
        start, buckets = self.root.rstrip("/") + "/", Buckets()

        def read(entry: Entry, hold: Hold = no_wait) -> ImageBytes:
            return _read(entry.locator, start, buckets, max_bytes=max_bytes, hold=hold)

        if is_remote(start) or any(is_remote(entry.locator) for entry in entries):
            return read_ahead(read, iter(entries))
        return ((entry, read(entry)) for entry in entries)


def is_remote(location: str) -> bool:
    """Returns whether a location is a URL of a server or a bucket."""
    return location.startswith(SCHEME) or is_web(location)


def _read(location: str, start: str, buckets: Buckets, *, max_bytes: int, hold: Hold) -> ImageBytes:
    """Reads an image from its location. `start`: the folder or prefix to which paths are relative. It ends in a
    slash."""
    if location.startswith(REFUSED):
        return ImageRefusedError(location.removeprefix(REFUSED))
    if "\0" in location:
        return ImageRefusedError("its location contains a NUL byte")
    if is_web(location):
        return fetch_url(location, max_bytes=max_bytes, hold=hold)
    if location.startswith(SCHEME):
        try:
            store, key = buckets.locate(location)
        except ImageRefusedError as refusal:
            return refusal
        return fetch(store, key, max_bytes=max_bytes, hold=hold)
    if "://" in location:
        return ImageRefusedError("neither a path nor a URL that begins with s3://, http:// or https://")
    if location.startswith("/"):
        return read_file(location, max_bytes=max_bytes)
    if not is_remote(start):
        return read_below(start, location, max_bytes=max_bytes)
    if reason := outside(location):
        return ImageRefusedError(reason)
    return _read(start + location, "/", buckets, max_bytes=max_bytes, hold=hold)


@dataclass(frozen=True, kw_only=True)
class ManifestSource:
    """CSV or Parquet files, local or `s3://`, with one row per image.

    A CSV begins with a header; its name may also end in .csv.gz, .tsv or .tsv.gz. An invalid row is a refused image,
    and so is a URL with a password or a signature, because the plan and the index would store it. Images are read
    twice, by the scan and by packing, unless copies are kept.
    """

    labels_are_names: ClassVar[bool] = False
    kind: Literal["manifest"] = "manifest"
    files: tuple[str, ...] = ()
    """CSV or Parquet files that list the images, local or s3://; {split} stands for --split."""
    root: str = ""
    """Folder, s3://bucket/prefix or URL that relative paths are below; empty: the folder that the files are in."""
    path_column: str = "path"
    """Column with a path, an s3://bucket/key or an http(s):// URL."""
    label_column: str = "label"
    """Column with a label or several: a list in Parquet, cut at the separator in a CSV."""
    weights_column: str = ""
    """Column with a weight for each label; empty: none."""
    separator: str = "|"
    """Separator between several labels, or weights, in a CSV."""
    split_column: str = ""
    """Column with the split of each row, of which one is packed; empty: the tables have one split."""
    split_rows: str = "{split}"
    """Value of that column in the rows to pack; {split} stands for --split."""
    keep_copies: bool = False
    """Keep a copy of each image from its scan until it is packed, so that nothing is fetched twice: for slow servers or
    images that change."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="source.")

    @property
    def staged(self) -> bool:
        """Whether the scan keeps copies."""
        return self.keep_copies

    def entries(self) -> Iterator[Entry]:
        """Yields the entries file by file, row by row."""
        columns = {"path-column": self.path_column, "label-column": self.label_column}
        if self.weights_column:
            columns["weights-column"] = self.weights_column
        if self.split_column:
            columns["split-column"] = self.split_column
        is_below_address, splits = is_web(self._root()), Splits(wanted=self.split_rows if self.split_column else "")
        for path in self._paths():
            for number, values in read_rows(path, columns, beside="" if self.split_column else SPLIT_COLUMN):
                if isinstance(values, ImageRefusedError) or splits.has(values[-1], path, number):
                    yield self._entry(path, number, values, is_below_address=is_below_address)
        splits.refuse_none(self.split_column)

    def images(self, entries: Sequence[Entry], *, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        """Yields the images in order, each read from its location. Images on servers are fetched ahead."""
        return Locations(root=self._root()).images(entries, max_bytes=max_bytes)

    def reader(self) -> Locations:
        """Returns a reader that finds images by their locations in the table."""
        return Locations(root=self._root())

    def known_labels(self) -> None:
        """Returns None, because the labels are not known before the scan."""

    def _paths(self) -> list[str]:
        if not self.files:
            raise UserError("--source.files is missing; give CSV or Parquet files that list images")
        found = find_files(self.files, suffixes=TABLE_SUFFIXES)
        refuse_mixed_splits(found)
        return found

    def _root(self) -> str:
        if self.root:
            if is_address(self.root) and (reason := secret_reason(self.root)):
                raise UserError(f"--source.root {shown_address(self.root)!r}: {reason}")
            return self.root
        folders = {path.rpartition("/")[0] or ("/" if path.startswith("/") else ".") for path in self._paths()}
        if len(folders) > 1:
            message = "--source.files are in more than one folder, so relative paths in them are ambiguous"
            raise UserError(f"{message}; set --source.root to the folder that they start from")
        return folders.pop()

    def _entry(self, path: str, number: int, values: RowValues, *, is_below_address: bool) -> Entry:
        row = f"{printable(path.rpartition('/')[2])} row {number}"
        if isinstance(values, ImageRefusedError):
            return refused_entry(row, str(values))
        try:
            location = path_in(values[0])
        except ImageRefusedError as refusal:
            return refused_entry(row, str(refusal))
        if len(location) > _MOST_CHARACTERS:
            return refused_entry(row, f"its path is too long: {len(location)} characters, allowed: {_MOST_CHARACTERS}")
        name = printable(location)
        if is_below_address or is_address(location):
            reason = secret_reason(location)
            if reason or is_below_address or is_web(location):  # not for S3: a key may have a question mark
                name = shown_address(name) or row
            if reason:
                return refused_entry(name, reason)
        try:
            labels = written_labels(values[1], separator=self.separator)
            labels, weights = weighted(labels, values[2] if self.weights_column else None, separator=self.separator)
        except ImageRefusedError as refusal:
            return refused_entry(name, f"{row}: {refusal}")
        return Entry(locator=location, name=name, labels=labels, weights=weights)
