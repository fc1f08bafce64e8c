"""Finds the images that a command is given: files, and folders with all that is below them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from shards.errors import UserError

KINDS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp")


def images_below(folder: str) -> Iterator[Path]:
    """The images in a folder by name, then those of the folders in it. OSError if one cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail):
        folders.sort()
        yield from (Path(place) / name for name in sorted(names) if Path(name).suffix.lower() in KINDS)


def image_names(given: Sequence[str]) -> Iterator[str]:
    """Each name, and in the place of a folder the images in it and in the folders below. UserError for a folder without
    an image, or one that cannot be listed."""
    for name in given:
        if not Path(name).is_dir():
            yield name
            continue
        is_empty = True
        try:
            for path in images_below(name):
                is_empty = False
                yield str(path)
        except OSError as error:
            raise UserError(f"{error.filename or name}: {error.strerror}; give a folder that can be read") from error
        if is_empty:
            raise UserError(f"{name} has no image; allowed: a folder of {', '.join(KINDS)} files")
