"""The bytes at a location from a list of images: a path, `s3://bucket/key`, `http://` or `https://`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shards.errors import ImageRefusedError
from shards.sources.entry import Entry, ImageBytes
from shards.sources.tree import MOST_BYTES, REFUSED, fetch, outside, read_ahead, read_below, read_file
from shards.sources.web import fetch_url, is_web
from shards.storage.ahead import Hold, no_wait
from shards.storage.buckets import SCHEME, Buckets


@dataclass(frozen=True, kw_only=True)
class Locations:
    """Reads any location. Relative paths are below `root`, a folder or an S3 prefix."""

    root: str

    def read_many(self, locators: Sequence[str]) -> Iterator[ImageBytes]:
        """Reads files in order; those on servers are fetched ahead."""
        entries = [Entry(locator=locator, name="") for locator in locators]
        return (image for _, image in self.images(entries, max_bytes=MOST_BYTES))

    def images(self, entries: Sequence[Entry], *, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        """The image of each entry, in order."""
        start, buckets = self.root.rstrip("/") + "/", Buckets()

        def read(entry: Entry, hold: Hold = no_wait) -> ImageBytes:
            return _read(entry.locator, start, buckets, _Most(num_bytes=max_bytes, hold=hold))

        if is_remote(start) or any(is_remote(entry.locator) for entry in entries):
            return read_ahead(read, iter(entries))
        return ((entry, read(entry)) for entry in entries)


def is_remote(location: str) -> bool:
    """Whether a location is on a server."""
    return location.startswith(SCHEME) or is_web(location)


@dataclass(frozen=True, kw_only=True)
class _Most:
    """Most bytes to read of an image, and the call that waits for room for them."""

    num_bytes: int
    hold: Hold


def _read(location: str, start: str, buckets: Buckets, most: _Most) -> ImageBytes:
    if location.startswith(REFUSED):
        return ImageRefusedError(location.removeprefix(REFUSED))
    if "\0" in location:
        return ImageRefusedError("its location contains a NUL byte")
    if is_web(location):
        return fetch_url(location, max_bytes=most.num_bytes, hold=most.hold)
    if location.startswith(SCHEME):
        return _read_object(location, buckets, most)
    if "://" in location:
        return ImageRefusedError("neither a path nor a URL that begins with s3://, http:// or https://")
    if location.startswith("/"):
        return read_file(location, max_bytes=most.num_bytes)
    if not is_remote(start):
        return read_below(start, location, max_bytes=most.num_bytes)
    if reason := outside(location):
        return ImageRefusedError(reason)
    return _read(start + location, "/", buckets, most)


def _read_object(url: str, buckets: Buckets, most: _Most) -> ImageBytes:
    try:
        store, key = buckets.locate(url)
    except ImageRefusedError as refusal:
        return refusal
    return fetch(store, key, max_bytes=most.num_bytes, hold=most.hold)
