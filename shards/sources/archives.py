"""Reads images in place from tars that hold one class each, either separate (ImageNet-21k) or all inside one tar
(ILSVRC)."""

import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from io import FileIO
from typing import ClassVar, Literal, Self

from shards.config_values import refuse_wrong_values, shown_value
from shards.errors import ImageRefusedError, InvalidDataError, UserError
from shards.output.quantities import plural
from shards.sources.entry import IMAGE_SUFFIXES, MOST_BYTES_AHEAD, Entry, ImageBytes, printable
from shards.sources.names import ClassLevel, ClassPaths, PassedOver, refuse_several, refusing_mixed_folders, split_of
from shards.sources.tar_members import Member, is_hidden, read_members
from shards.sources.tree import is_passed_over
from shards.storage.ahead import Hold, Pieces, in_order_within, stored_pieces
from shards.storage.local import LocalStore, open_regular, read_exactly
from shards.store import MissingObjectError, Store, open_store

log = logging.getLogger(__name__)

NO_TAR = "without the suffix .tar"
READS_AHEAD = 16
MOST_OPEN_FILES = 64
HEADER_PIECE_BYTES = 4096  # enough for a header and its extensions
_SHARD, _BESIDE = re.compile(r"(^|-)\d{4,}$"), {"json", "txt"}  # WebDataset: 00000.tar, imagenet-train-000000.tar
_COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")


@dataclass(frozen=True, kw_only=True)
class ClassTarsSource:
    """A folder or `s3://bucket/prefix` with one tar per class. The tar's name without `.tar` is the label.

    This is the layout of ImageNet-21k's winter 2021 release: 19,167 tars such as n01440764.tar.
    """

    staged: ClassVar[bool] = False
    labels_are_names: ClassVar[bool] = True
    kind: Literal["class_tars"] = "class_tars"
    root: str = ""
    """Folder or s3://bucket/prefix that holds one tar of images per class."""
    class_level: ClassLevel = "auto"
    """Class of an image: first: the tar's name; deepest: the deepest folder inside the tar; path: the whole path of tar
    and folders; auto: the tar's name, with a warning if its images lie in several folders."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="source.")

    def entries(self) -> Iterator[Entry]:
        """Yields every tar at any depth, sorted by path. Raises UserError if the tars lie in folders of different
        splits."""
        if not self.root:
            raise UserError("--source.root is missing; give the folder or s3://bucket/prefix that holds the tars")
        return refusing_mixed_folders(self._entries(), self.root)

    def _entries(self) -> Iterator[Entry]:
        classes, others = ClassPaths(self.class_level), PassedOver(why=NO_TAR)
        for path, num_bytes in open_store(self.root).list_sizes():
            if is_passed_over(path):
                continue
            if is_tar_name(path, where=self.root):
                yield replace(_tar_entry(path, path, 0, num_bytes), labels=(_tar_class(path, classes),))
            else:
                others.add(path)
        others.mention(self.root)

    def images(self, entries: Sequence[Entry], *, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        """Yields the images of each tar, from its start to its end."""
        return _images(open_store(self.root), entries, max_bytes, self.class_level)

    def reader(self) -> "TarReader":
        """Returns a reader that finds images by path, offset and size."""
        return TarReader(store=open_store(self.root))

    def known_labels(self) -> None:
        """Returns None, because the labels are not known before the scan."""


@dataclass(frozen=True, kw_only=True)
class TarOfTarsSource:
    """One tar, a file or `s3://bucket/key`, that contains one tar per class. An inner tar's name is the label.

    This is the layout of ILSVRC2012_img_train.tar. Nothing is unpacked: images are read from the tar by their offsets.
    """

    staged: ClassVar[bool] = False
    labels_are_names: ClassVar[bool] = True
    kind: Literal["tar_of_tars"] = "tar_of_tars"
    path: str = ""
    """The archive: a file or s3://bucket/key."""
    class_level: ClassLevel = "auto"
    """Class of an image: first: the inner tar's name; deepest: the deepest folder inside it; path: the whole path of
    tar and folders; auto: the tar's name, with a warning if its images lie in several folders."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="source.")

    def entries(self) -> Iterator[Entry]:
        """Yields every inner tar, in the archive's order. Only the headers of the outer tar are read. Raises UserError
        if the inner tars lie in folders of different splits."""
        return refusing_mixed_folders(self._entries(), self.path, option="--source.path")

    def _entries(self) -> Iterator[Entry]:
        classes, others = ClassPaths(self.class_level), PassedOver(why=NO_TAR)
        store, path = self._store_and_name()
        for member in self._outer_members(store, path, others):
            if isinstance(member.data, ImageRefusedError):
                where = f"--source.path {self.path!r}, {printable(member.name) or 'the archive'}"
                raise UserError(f"{where}: {member.data}; give the whole archive, as it was published")
            entry = _tar_entry(path, member.name, member.offset, member.size)
            yield replace(entry, labels=(_tar_class(member.name, classes),))
        others.mention(self.path)

    def images(self, entries: Sequence[Entry], *, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        """Yields the images of each inner tar, from its start to its end."""
        return _images(self._store_and_name()[0], entries, max_bytes, self.class_level)

    def reader(self) -> "TarReader":
        """Returns a reader that finds images by offset and size."""
        return TarReader(store=self._store_and_name()[0])

    def known_labels(self) -> None:
        """Returns None, because the labels are not known before the scan."""

    def _outer_members(self, store: Store, path: str, others: PassedOver) -> Iterator[Member]:
        def wanted(name: str) -> bool:
            is_wanted = is_tar_name(name, where=self.path)
            if not is_wanted and not is_hidden(name):
                others.add(name)
            return is_wanted

        try:
            end = store.size(path)
        except MissingObjectError as error:
            raise UserError(f"--source.path {self.path!r} does not exist; give a tar of class tars") from error
        pieces = Pieces(lambda first, end: store.read_range(path, first, end), 0, end, piece_bytes=HEADER_PIECE_BYTES)
        return read_members(pieces, wanted=wanted, max_bytes=0, with_data=lambda _: False)

    def _store_and_name(self) -> tuple[Store, str]:
        folder, slash, name = self.path.rpartition("/")
        if not name:
            raise UserError(f"--source.path is {self.path!r}; give a tar of class tars, a file or s3://bucket/key")
        return open_store(folder or slash or "."), name


@dataclass(frozen=True, kw_only=True)
class TarReader:
    """Reads images by locators `PATH:OFFSET:SIZE`; the path is relative to the store."""

    store: Store

    def read_many(self, locators: Sequence[str]) -> Iterator[ImageBytes]:
        """Yields the images in order. From a bucket, several are fetched at once."""
        if isinstance(self.store, LocalStore):
            with _OpenFiles(self.store) as files:
                yield from (files.read(locator) for locator in locators)
            return
        for image in in_order_within(self._fetch, locators, threads=READS_AHEAD, most_bytes=MOST_BYTES_AHEAD):
            if isinstance(image, Exception) and type(image) is not OSError:
                raise image  # an error of the store, which concerns more than this image
            yield image
            del image  # frees it before the next

    def _fetch(self, locator: str, hold: Hold) -> ImageBytes:
        path, first, size = split_locator(locator)
        hold(size)
        try:
            return self.store.read_range(path, first, first + size)
        except (MissingObjectError, EOFError) as error:
            return OSError(str(error))


class _OpenFiles:
    """Keeps the most recently read local tars open, because a shard's images come from all classes in turn."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._held: OrderedDict[str, FileIO] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._held.values():
            file.close()

    def read(self, locator: str) -> ImageBytes:
        path, first, size = split_locator(locator)
        try:
            data = read_exactly(self._file(path).fileno(), first, first + size)
        except OSError as error:
            return OSError(error.strerror or str(error))
        except InvalidDataError as error:
            return OSError(str(error))
        if len(data) < size:
            return OSError(f"{path} is cut off: it has {len(data)} of the {size} bytes from byte {first}")
        return data

    def _file(self, path: str) -> FileIO:
        if path in self._held:
            self._held.move_to_end(path)
            return self._held[path]
        file = self._held[path] = FileIO(self._store.local_path(path), opener=open_regular)
        if len(self._held) > MOST_OPEN_FILES:
            self._held.popitem(last=False)[1].close()
        return file


def split_locator(locator: str) -> tuple[str, int, int]:
    """Returns (path, offset, size) of `PATH:OFFSET:SIZE`; the path may contain colons."""
    path, first, size = locator.rsplit(":", 2)
    return path, int(first), int(size)


def is_image_name(name: str) -> bool:
    """Returns whether a file counts as an image: it has an image suffix and is not hidden."""
    stem, dot, suffix = name.rpartition(".")
    return f"{dot}{suffix}".lower() in IMAGE_SUFFIXES and bool(stem) and not is_hidden(name)


def is_tar_name(name: str, *, where: str) -> bool:
    """Returns whether a file is read as a tar. Raises UserError for a compressed one."""
    if is_hidden(name):
        return False
    if name.lower().endswith(_COMPRESSED_SUFFIXES):
        message = f"{printable(name)} of {where} is compressed, so no image can be read from it by its offset"
        raise UserError(f"{message}; decompress it first, e.g. with gunzip")
    return name.lower().endswith(".tar")


def _tar_entry(path: str, tar_name: str, first: int, num_bytes: int) -> Entry:
    """Returns the entry of the tar in bytes first..first+num_bytes-1 of an object."""
    return Entry(
        locator=f"{path}:{first}:{num_bytes}",
        name=printable(tar_name),
        num_bytes=num_bytes,
        num_images=0,
    )


def _own_name(tar_name: str) -> str:
    return tar_name.rpartition("/")[2][: -len(".tar")]


def _tar_class(path: str, classes: ClassPaths, *, inner: str = "") -> str:
    """Returns the class of a tar, or of the images in one of its folders. An outermost folder that has the tar's own
    name is not counted as a level."""
    stem, own = path.removeprefix("./")[: -len(".tar")], _own_name(path)
    inner = "" if inner == own else inner.removeprefix(f"{own}/")
    return classes.class_of(f"{stem}/{inner}" if inner else stem, num_first=stem.count("/") + 1)


def _images(
    store: Store, entries: Sequence[Entry], max_bytes: int, level: ClassLevel
) -> Iterator[tuple[Entry, ImageBytes]]:
    for entry in entries:
        classes = ClassPaths(level)
        try:
            for member in _members(store, entry, max_bytes):
                if member.data is not None:
                    yield _image_entry(entry, member, classes), member.data
        except (OSError, EOFError, MissingObjectError) as error:
            yield entry, OSError(str(error))
        classes.mention_nested(root=entry.name)


def _members(store: Store, entry: Entry, max_bytes: int) -> Iterator[Member]:
    path, first, num_bytes = split_locator(entry.locator)
    end = min(first + num_bytes, store.size(path))  # the object may have been truncated since
    others: list[str] = []
    key, suffixes = "", set[str]()
    splits: dict[str, str] = {}
    num_members = 0

    def wanted(name: str) -> bool:
        nonlocal key, suffixes
        folder, slash, file = name.rpartition("/")
        stem, _, suffix = file.lower().partition(".")
        key, suffixes = (here := f"{folder}{slash}{stem}"), (suffixes if here == key else set()) | {suffix}
        if len(suffixes) > 1:
            _refuse_samples(entry, suffixes)
        if not is_image_name(name) and not is_hidden(name):
            others.append(name)
        if is_image_name(name):
            _refuse_second_split(entry, splits, name)
        return is_image_name(name)

    with closing(stored_pieces(store, path, first, max(first, end))) as pieces:
        for member in read_members(pieces, wanted=wanted, max_bytes=max_bytes):
            num_members += member.data is not None
            yield member
    if not num_members:
        log.warning("%s has no image, so %s is not a class", entry.name, shown_value(entry.labels[0]))
    if others:
        message = "%s: skipped %s with no image suffix, the first of them %s"
        log.warning(message, entry.name, plural(len(others), "member"), printable(others[0]))


def _refuse_second_split(tar: Entry, found: dict[str, str], name: str) -> None:
    """Raises UserError if a class tar has images of two splits. `found`: each split so far, with the name of an
    image."""
    for split in filter(None, map(split_of, name.split("/")[:-1])):
        found.setdefault(split, printable(name))
    todo = "write the images of each split to tars of their own"
    refuse_several(found, what=f"{tar.name} holds images", todo=todo)


def _refuse_samples(tar: Entry, suffixes: Set[str]) -> None:
    """Raises UserError for a WebDataset shard: its members with the same key are one sample, and its name is not a
    class."""
    beside = suffixes & ({"cls"} | (_BESIDE if _SHARD.search(_own_name(tar.name)) else set()))
    if beside and any(f".{suffix}" in IMAGE_SUFFIXES for suffix in suffixes):
        raise UserError(
            f"{tar.name} is a WebDataset shard, with a .{min(beside)} beside each image, not a tar of one class; give "
            "its folder to patchline index, which reads labels from .cls or .json"
        )


def _image_entry(tar: Entry, member: Member, classes: ClassPaths) -> Entry:
    if not member.name:
        return tar
    path, _, _ = split_locator(tar.locator)
    name, own = printable(member.name).removeprefix("./"), _own_name(tar.name)
    return Entry(
        locator=f"{path}:{member.offset}:{member.size}",
        name=name if name.startswith(f"{own}/") else f"{own}/{name}",
        labels=(_tar_class(tar.name, classes, inner=name.rpartition("/")[0]),),
        num_bytes=member.size,
    )
