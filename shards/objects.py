"""What a store of whole objects promises, whether a folder or an S3 bucket is behind it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol


class MissingObjectError(Exception):
    """No object is at this path of this store."""

    def __init__(self, path: str, *, url: str = "") -> None:
        super().__init__(f"no object {path!r} in {url or 'the store'}")
        self.path, self.url = path, url

    def __reduce__(self) -> tuple[type["MissingObjectError"], tuple[str]]:
        # Pool workers send their errors back pickled, and a keyword-only argument would be lost.
        return type(self), (self.path,)


class Store(Protocol):
    """Objects by relative path below one root. What is written is whole or absent."""

    @property
    def url(self) -> str: ...

    def read(self, path: str) -> bytes:
        """The whole object. Raises MissingObjectError."""
        ...

    def read_range(self, path: str, first: int, end: int) -> bytes:
        """Exactly the bytes first..end-1. Raises MissingObjectError; EOFError where the object is shorter."""
        ...

    def size(self, path: str) -> int:
        """Bytes of the object. Raises MissingObjectError."""
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Paths of all objects below the folder `prefix`, sorted as strings, relative to the store's root."""
        ...

    def write(self, path: str, data: bytes) -> None: ...

    def write_file(self, path: str, local_file: Path) -> None: ...

    def create(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A file to write to; the object appears, whole, when the block ends without an error."""
        ...

    def delete(self, path: str) -> None:
        """Remove the object; one that is not there is no error."""
        ...

    def discard_unfinished(self) -> None:
        """Remove what interrupted writes below this root left behind. Only while nobody else writes here."""
        ...

    def child(self, prefix: str) -> "Store": ...


def checked_path(path: str) -> str:
    """`path` itself, or a ValueError where it could lead out of the store or has two spellings."""
    parts = path.split("/")
    if not path or path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ValueError(f"object path {path!r} is not a plain relative path: use NAME or FOLDER/NAME, no ..")
    return str(PurePosixPath(path))
