"""Copies of images that cannot be read one by one from their source (Parquet), kept in the dataset's work folder.

A single image cannot be read from a Parquet file: a shard of 1,000 random images would read 1,000 row groups. The scan
reads all images in their own order anyway, so it writes them end to end into one object per slice, and packing reads
them from there by offset. The work folder is removed once the manifest is written.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import BinaryIO, Self

from shards.errors import ImageRefusedError
from shards.packing.config import PackSpec
from shards.sources.entry import MOST_BYTES_AHEAD, Entry, ImageBytes, Reader
from shards.storage.ahead import Hold, in_order_within
from shards.store import MissingObjectError, Store

READS_AHEAD = 16


class StagedFile:
    """The copies of one slice's images; they appear, whole, when the block ends without an error."""

    def __init__(self, store: Store, number: int) -> None:
        self._number, self._position = number, 0
        self._writing: AbstractContextManager[BinaryIO] = store.create(_path(number))

    def __enter__(self) -> Self:
        self._file = self._writing.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing.__exit__(kind, error, trace)

    def add(self, entry: Entry, image: bytes) -> Entry:
        """Append an image; returns its entry with a locator that finds the copy."""
        self._file.write(image)
        locator = f"{self._number}:{self._position}:{len(image)}"
        self._position += len(image)
        return replace(entry, locator=locator)


@dataclass(frozen=True, kw_only=True)
class StagedReader:
    """Reads images of the copies by the locators that `add` gave."""

    store: Store

    def read_many(self, locators: Sequence[str]) -> Iterator[ImageBytes]:
        """Reads files in order; from S3, several are fetched at once."""
        for image in in_order_within(self._read, locators, threads=READS_AHEAD, most_bytes=MOST_BYTES_AHEAD):
            if isinstance(image, Exception) and not isinstance(image, OSError | ImageRefusedError):
                raise image
            yield image
            del image  # frees it before the next

    def _read(self, locator: str, hold: Hold) -> ImageBytes:
        number, first, size = (int(text) for text in locator.split(":"))
        hold(size)
        try:
            return self.store.read_range(_path(number), first, first + size)
        except (MissingObjectError, EOFError) as error:
            return OSError(f"the copy in the work folder is gone: {error}")


def reader_of(store: Store, spec: PackSpec) -> Reader:
    """The reader that finds the images of a packing by their locators."""
    return StagedReader(store=store) if spec.source.staged else spec.source.reader()


def _path(number: int) -> str:
    return f"work/staged-{number:06d}.bin"
