"""Images that lie as files: one folder a class, or one flat folder with the label in the file name."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shards.entry import IMAGE_SUFFIXES, Entry, FileReader, printable
from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class FolderSource:
    """Class folders: `root/CLASS/*.{jpg,jpeg,png,webp}` in any case; the folder's name is the label."""

    kind: Literal["folder"] = "folder"
    root: str = ""

    def entries(self) -> Iterator[Entry]:
        """Class by class, each sorted by name."""
        for label_name in _sorted_names(self.root, folders=True):
            for name in _sorted_names(self.root, label_name, folders=False):
                path = f"{label_name}/{name}"
                yield Entry(locator=path, name=printable(path), label_name=printable(label_name))

    def reader(self) -> FileReader:
        """Reads by path below the root."""
        return FileReader(root=Path(self.root))

    def known_labels(self) -> None:
        """Not known before the scan."""


@dataclass(frozen=True, kw_only=True)
class FlatSource:
    """One folder of images. The group of `label_pattern`, matched from a file name's start, is the label.

    By default that is all before the first underscore: `n01440764_tench.JPEG` has the label n01440764.
    """

    kind: Literal["flat"] = "flat"
    root: str = ""
    label_pattern: str = r"([^_]+)_"

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.label_pattern).groups
        except re.error as error:
            raise UserError(f"--source.label-pattern {self.label_pattern!r} is not a pattern: {error}") from error
        if groups != 1:
            message = f"--source.label-pattern {self.label_pattern!r} has {groups} groups; allowed is exactly one"
            raise UserError(f"{message}, around the label, e.g. '([^_]+)_'")

    def entries(self) -> Iterator[Entry]:
        """Sorted by name."""
        pattern = re.compile(self.label_pattern)
        for name in _sorted_names(self.root, folders=False):
            found = pattern.match(printable(name))
            yield Entry(locator=name, name=printable(name), label_name=found.group(1) if found else None)

    def reader(self) -> FileReader:
        """Reads by name."""
        return FileReader(root=Path(self.root))

    def known_labels(self) -> None:
        """Not known before the scan."""


def _sorted_names(root: str, folder: str = "", *, folders: bool) -> list[str]:
    if not root:
        raise UserError("--source.root is missing; give the folder that holds the images")
    try:
        with os.scandir(Path(root) / folder) as found:
            return sorted(item.name for item in found if _wanted(item, folders=folders))
    except OSError as error:
        raise UserError(f"--source.root {root!r} cannot be listed: {error.strerror}; give a folder") from error


def _wanted(item: os.DirEntry[str], *, folders: bool) -> bool:
    if folders:
        return item.is_dir()
    # Whatever is called an image but cannot be read is listed all the same: it belongs into quarantine.
    return Path(item.name).suffix.lower() in IMAGE_SUFFIXES and not item.is_dir()
