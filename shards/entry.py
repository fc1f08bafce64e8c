"""What every source of images hands out: entries in a fixed order, and bytes by locator."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp"))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One image of a source: where its bytes are, the source's name for it, its label (None: unknown)."""

    locator: str
    name: str
    label_name: str | None


class Reader(Protocol):
    """Reads images of one source again by their locators."""

    def read_many(self, locators: Sequence[str]) -> Iterator[bytes | OSError]:
        """The bytes of each, in order, or the OSError met: one unreadable image must not end the others."""
        ...


@dataclass(frozen=True, kw_only=True)
class FileReader:
    """Locators are paths relative to a folder."""

    root: Path

    def read_many(self, locators: Sequence[str]) -> Iterator[bytes | OSError]:
        """One file at a time."""
        for locator in locators:
            try:
                yield (self.root / locator).read_bytes()
            except OSError as error:
                yield OSError(error.strerror or str(error))


def printable(name: str) -> str:
    """A file name as valid Unicode: bytes that are not UTF-8 become backslash escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
