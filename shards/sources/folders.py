"""Images in separate files, with labels from class folders, from the file names or from a table."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal

from shards.class_names import class_name
from shards.config_values import refuse_wrong_values
from shards.errors import ImageRefusedError, UserError
from shards.output.quantities import plural
from shards.sources.entry import Entry, ImageBytes, printable
from shards.sources.names import (
    SPLIT_COLUMN,
    ClassLevel,
    ClassPaths,
    Splits,
    refuse_split_classes,
    refusing_mixed_folders,
)
from shards.sources.tables import path_in, read_rows, written_labels
from shards.sources.tree import SYSTEM_FOLDERS, Row, Tree, list_images, refused_entry, sorted_rows

log = logging.getLogger(__name__)
_MOST_NAMED = 12
_FIRST_WORD = r"([^_]+)_"
# The most stems that are kept per label, and in all. A label with more stems is taken to have ids in its file names.
_MOST_OF_LABEL, _MOST_STEMS = 1000, 200_000
_NUMBERED = re.compile(r"[\W_]*\d+$")  # a file's number within its class
_WORDS = re.compile(r"(?:[^\W\d_]|[ _-])+")


@dataclass(frozen=True, kw_only=True)
class FolderSource:
    """Class folders below a folder or an S3 prefix: `root/CLASS/...`. The class folder's name is the label.

    Images in deeper folders (`root/CLASS/images/*.JPEG`) have the same class, unless `class_level` says otherwise.
    Images in `root` itself have no label.
    """

    staged: ClassVar[bool] = False
    labels_are_names: ClassVar[bool] = True
    kind: Literal["folder"] = "folder"
    root: str = ""
    """Folder or s3://bucket/prefix that holds one folder of images per class."""
    class_level: ClassLevel = "auto"
    """Folder that is the class: the first below the root, the deepest, or the whole path; auto: the first, with a
    warning if images lie further down."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="source.")

    def entries(self) -> Iterator[Entry]:
        """Yields the images, sorted by path. Raises UserError if the folders are splits, not classes."""
        return refusing_mixed_folders(self._entries(), self.root)

    def _entries(self) -> Iterator[Entry]:
        first, nested, classes = set[str](), set[str](), ClassPaths(self.class_level)
        last, labels = "", tuple[str, ...]()
        for path, num_bytes in list_images(self.root):
            folders, _, _ = path.rpartition("/")
            if folders != last:
                last, labels = folders, (classes.class_of(folders),) if folders else ()
                name, _, deeper = folders.partition("/")
                name = class_name(printable(name))
                first |= {name} if folders else set()
                nested |= {name} if deeper else set()
            yield Entry(locator=path, name=printable(path), labels=labels, num_bytes=num_bytes)
        refuse_split_classes(self.root, first, nested=nested)
        classes.mention_nested(root=printable(self.root))
        if empty := sorted(_folders_in(self.root) - first):
            shown = ", ".join(empty[:_MOST_NAMED]) + (", ..." if len(empty) > _MOST_NAMED else "")
            log.warning("%s without an image, so not a class: %s", plural(len(empty), "folder"), shown)

    def images(self, entries: Sequence[Entry], *, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        """Yields the images file by file."""
        return Tree(root=self.root).images(entries, max_bytes=max_bytes)

    def reader(self) -> Tree:
        """Returns a reader that finds images by their paths below the root."""
        return Tree(root=self.root)

    def known_labels(self) -> None:
        """Returns None, because the labels are not known before the scan."""


@dataclass(frozen=True, kw_only=True)
class FlatSource:
    """Images at any depth below a folder or an S3 prefix, whose folders say nothing about their labels.

    Labels come from the file names or from a table. A file in several rows has the labels of all of them, and a file
    that is not in the table has no label. A file that is only in the table is an unreadable image.
    """

    staged: ClassVar[bool] = False
    labels_are_names: ClassVar[bool] = False
    kind: Literal["flat"] = "flat"
    root: str = ""
    """Folder or s3://bucket/prefix that holds the images."""
    label_pattern: str = _FIRST_WORD
    """Regular expression, matched at the start of the file name; its only group is the label (by default everything
    before the first underscore: n01440764 of n01440764_tench.JPEG)."""
    labels_csv: str = ""
    """CSV or Parquet file with the labels; empty: they are in the file names."""
    file_column: str = "file"
    """Column of the table with paths below the root."""
    label_column: str = "label"
    """Column of the table with labels."""
    separator: str = "|"
    """Separator between several labels in the table."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="source.")
        try:
            groups = re.compile(self.label_pattern).groups
        except re.error as error:
            raise UserError(f"--source.label-pattern {self.label_pattern!r} is not a pattern: {error}") from error
        if groups != 1:
            message = f"--source.label-pattern {self.label_pattern!r} has {groups} groups; allowed: exactly one"
            raise UserError(f"{message}, around the label, e.g. '([^_]+)_'")

    def entries(self) -> Iterator[Entry]:
        """Yields the images, sorted by path. Raises UserError if no table is given and the images lie in folders of
        different splits."""
        if self.labels_csv:
            return self._labelled_by_table()
        return refusing_mixed_folders(self._labelled_by_name(), self.root)

    def images(self, entries: Sequence[Entry], *, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        """Yields the images file by file."""
        return Tree(root=self.root).images(entries, max_bytes=max_bytes)

    def reader(self) -> Tree:
        """Returns a reader that finds images by their paths below the root."""
        return Tree(root=self.root)

    def known_labels(self) -> None:
        """Returns None, because the labels are not known before the scan."""

    def _labelled_by_name(self) -> Iterator[Entry]:
        pattern, stems = re.compile(self.label_pattern), _Stems()
        for path, num_bytes in list_images(self.root):
            name = printable(path)
            file_name = name.rpartition("/")[2]
            found = pattern.match(file_name)
            if found and found.group(1):
                stems.add(found.group(1), file_name[found.start(1) :])
            try:
                labels = written_labels(found.group(1)) if found else ()
            except ImageRefusedError as refusal:
                yield refused_entry(name, str(refusal))
                continue
            yield Entry(locator=path, name=name, labels=labels, num_bytes=num_bytes)
        if self.label_pattern == _FIRST_WORD:
            stems.mention_merged(self.root)

    def _labelled_by_table(self) -> Iterator[Entry]:
        """Joins two sorted sequences, the files and the rows of the table. Neither is ever in memory as a whole."""
        files = list_images(self.root)
        file, num_relisted = next(files, None), 0
        for key, rows in groupby(sorted_rows(self._rows()), key=lambda row: row[0]):
            while file is not None and _bytes(file[0]) < key:
                yield Entry(locator=file[0], name=printable(file[0]), num_bytes=file[1])
                file = next(files, None)
            num_bytes = 0
            if file is not None and _bytes(file[0]) == key:
                num_bytes = file[1]
                file = next(files, None)
            for entry, num_rows in self._entries(key, rows, num_bytes):
                num_relisted += num_rows > 1
                yield entry
        while file is not None:
            yield Entry(locator=file[0], name=printable(file[0]), num_bytes=file[1])
            file = next(files, None)
        if num_relisted:
            again = plural(num_relisted, "image")
            log.warning("%s listed again with other labels: an image has the labels of all its rows", again)

    def _rows(self) -> Iterator[Row]:
        """Yields (file, labels, b"") for each valid row, and (b"", row number, reason) for an invalid row."""
        columns = {"file-column": self.file_column, "label-column": self.label_column}
        splits = Splits(wanted="")
        for number, values in read_rows(self.labels_csv, columns, beside=SPLIT_COLUMN):
            try:
                if isinstance(values, ImageRefusedError):
                    raise values
                splits.has(values[-1], self.labels_csv, number)
                path = _bytes(path_in(values[0]).removeprefix("./") or ".")
                labels = written_labels(values[1], separator=self.separator)
                yield path, "\0".join(labels).encode(), b""
            except ImageRefusedError as refusal:
                yield b"", str(number).encode(), str(refusal).encode()

    def _entries(self, path: bytes, rows: Iterator[Row], num_bytes: int) -> Iterator[tuple[Entry, int]]:
        """Yields the entry of a file in the table, with the number of different label lists in its rows. If `path` is
        empty, yields the entries of the invalid rows."""
        if not path:
            table = printable(self.labels_csv.rpartition("/")[2])
            yield from ((refused_entry(f"{table} row {number.decode()}", why.decode()), 1) for _, number, why in rows)
            return
        several = dict.fromkeys(joined.decode() for _, joined, _ in rows if joined)
        labels = tuple(label for joined in several for label in joined.split("\0"))
        locator = path.decode("utf-8", "surrogateescape")
        entry = Entry(locator=locator, name=printable(locator), labels=labels, num_bytes=num_bytes)
        yield entry, len(several)


class _Stems:
    """Collects the names of files without their numbers, to find labels that may stand for several classes.

    `american_bulldog` and `american_beagle`, which both have the label `american`, may be two classes. Names that
    contain an id, such as `cat_3fa9`, are not taken for classes.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._num_stems = 0

    def add(self, label: str, file_name: str) -> None:
        """Counts a file under its label. `file_name` begins with the label."""
        counts = self._counts.get(label)
        if counts is None and self._num_stems < _MOST_STEMS:
            counts = self._counts[label] = Counter()
        stem = _NUMBERED.sub("", file_name.rpartition(".")[0])
        if counts is not None and (stem in counts or (self._num_stems < _MOST_STEMS and len(counts) < _MOST_OF_LABEL)):
            self._num_stems += stem not in counts
            counts[stem] += 1

    def mention_merged(self, root: str) -> None:
        """Warns if files of one label have names that could stand for several classes."""
        found = {label: stems for label, counts in self._counts.items() if len(stems := _class_stems(counts)) > 1}
        if not found:
            return
        label, stems = next(iter(found.items()))
        message = (
            "%s: the label pattern gives files of several names one class, in %s: %s holds %s; if these are classes, "
            "give --source.label-pattern '(.+)_', which takes the name up to the last _"
        )
        shown = ", ".join(ascii(stem) for stem in stems[:_MOST_NAMED])
        log.warning(message, printable(root), plural(len(found), "class"), ascii(label), shown)


def _class_stems(counts: Counter[str]) -> list[str]:
    """Returns the stems of one label that may be class names: those that consist of words, and those shared by several
    files."""
    if len(counts) >= _MOST_OF_LABEL:
        return []
    return sorted(stem for stem, count in counts.items() if count > 1 or _WORDS.fullmatch(stem))


def _folders_in(root: str) -> set[str]:
    """Returns the class names of the folders in a local folder, except hidden ones. Returns an empty set for a bucket,
    which has no empty folders."""
    if "://" in root:
        return set()
    with os.scandir(root) as entries:
        names = [one.name for one in entries if not one.name.startswith(".") and one.is_dir()]
    return {class_name(printable(name)) for name in names if name not in SYSTEM_FOLDERS}


def _bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
