"""What a store of whole objects promises, whether a folder or an S3 bucket is behind it."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from shards.storage.traffic import Traffic


class MissingObjectError(Exception):
    """No object is at this path of this store."""

    def __init__(self, path: str, *, url: str = "") -> None:
        super().__init__(f"no object {path!r} in {url or 'the store'}")
        self.path, self.url = path, url

    def __reduce__(self) -> tuple[type["MissingObjectError"], tuple[str]]:
        # Pool workers send their errors back pickled, and a keyword-only argument would be lost.
        return type(self), (self.path,)


def any_path(path: str) -> bool:  # noqa: ARG001
    """Every object is ours."""
    return True


class Store(Protocol):
    """Objects by relative path below one root. What is written is whole or absent."""

    @property
    def url(self) -> str: ...

    @property
    def traffic(self) -> Traffic:
        """What reading took in this process."""
        ...

    def fresh(self) -> "Store":
        """The same objects over connections that nobody has used yet, for reads that the others are slow at."""
        ...

    def with_traffic(self, traffic: Traffic) -> "Store":
        """The same objects over the same connections; what is read of them is counted in `traffic` alone."""
        ...

    def stopped_by(self, event: threading.Event) -> "Store":
        """The same objects, whose reads raise ReadStoppedError within about a second once `event` is set.

        A folder stops only its waiting for a disk that fails: files are read too fast for more.
        """
        ...

    def read(self, path: str) -> bytes:
        """The whole object. Raises MissingObjectError."""
        ...

    def read_range(self, path: str, first: int, end: int) -> bytes:
        """Exactly the bytes first..end-1. Raises MissingObjectError; EOFError where the object is shorter."""
        ...

    def open_read(self, path: str) -> AbstractContextManager[BinaryIO]:
        """The object as a stream from its first byte, in bounded memory whatever its size. Raises MissingObjectError.

        `read(n)` gives n bytes, fewer only at the end; it cannot seek. Good as the file of `tarfile`'s mode "r|".
        """
        ...

    def local_path(self, path: str) -> Path | None:
        """The file on disk that is this object, to be mapped into memory; None where a store has no files."""
        ...

    def size(self, path: str) -> int:
        """Bytes of the object. Raises MissingObjectError."""
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Paths of all objects below the folder `prefix`, relative to the store's root, sorted by their UTF-8 bytes.

        A bucket may hold keys that are no plain paths ("a//b", "a/../b", "folder/"): they are listed as they are, and
        reading them is refused. Listing streams: no more than one page, or one folder's names, is in memory.
        """
        ...

    def list_sizes(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """What `list` gives, and the bytes of each object."""
        ...

    def write(self, path: str, data: bytes) -> None: ...

    def create(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A file to write to; the object appears, whole, when the block ends without an error."""
        ...

    def delete(self, path: str) -> None:
        """Remove the object; one that is not there is no error."""
        ...

    def discard_unfinished(self, is_ours: Callable[[str], bool] = any_path) -> None:
        """Remove what interrupted writes of objects below this root left behind, of those whose path is ours.

        Only while nobody else writes such objects here.
        """
        ...


def folder_prefix(folder: str) -> str:
    """What the paths below a folder begin with: "" for the root, `FOLDER/` for others. Refuses what no path may be."""
    name = folder.strip("/")
    return f"{checked_path(name)}/" if name else ""


def checked_path(path: str) -> str:
    """`path` itself, or a ValueError where it could lead out of the store or has two spellings."""
    parts = path.split("/")
    if "" in parts[1:-1] and not path.startswith("/"):
        part = f"the one between the two slashes behind {path.partition('//')[0]!r}"
        what = f"object path {path!r} is not a plain relative path: it has an empty part, {part}"
        raise ValueError(f"{what}; copy it to a name without //")
    if not path or path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ValueError(f"object path {path!r} is not a plain relative path: use NAME or FOLDER/NAME, no ..")
    return str(PurePosixPath(path))


def without_secrets(text: str) -> str:
    """`text` with what stands before the @ of an address replaced: user names, passwords and keys."""
    return re.sub(r"(?<=//)[^/\s]*@", "***@", text)
